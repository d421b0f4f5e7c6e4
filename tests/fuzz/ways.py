"""Other ways to make a right call: each gives what the plain call gives, or the error for it."""

from __future__ import annotations

import pickle
import re
import sys
from array import array
from collections import UserList, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Barrier, Thread
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import cuseq
from cuseq.layout import StaticLayout
from tests.fuzz import judge
from tests.fuzz.calls.target import Arguments, Target
from tests.fuzz.values import Draw

Make = Callable[[], Arguments]  # makes the same arguments anew

JUNK = 1_234_567  # in the gaps of a view; no right number, and no error may print it
STEP = 1e-5  # of differences


class Wrong(Exception):
    """What is wrong with a call that was made in another way."""


# --------------------------------------------------------------------------- other arguments


def _junk(*shape: int, like: Tensor) -> Tensor:
    number = JUNK if like.dtype.itemsize >= 4 else 1
    return torch.full(shape, number, dtype=like.dtype, device=like.device)


def sliced(value: Tensor) -> Tensor:
    wide = _junk(*value.shape[:-1], 2 * value.shape[-1], like=value)
    wide[..., ::2] = value
    return wide[..., ::2]


def offset(value: Tensor) -> Tensor:
    flat = _junk(value.numel() + 6, like=value)
    flat[3:-3] = value.flatten()
    return flat[3:-3].view(value.shape)


def transposed(value: Tensor) -> Tensor:
    if value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    columns = _junk(len(value), 3, like=value)
    columns[:, 1] = value
    return columns[:, 1]


def expanded(value: Tensor) -> Tensor:
    """Return a view with stride 0 in the dimensions along which all numbers are equal."""
    view = value
    for dim in range(value.dim()):
        first = view.narrow(dim, 0, 1)
        if torch.equal(first.expand_as(view), view):
            view = first.expand(value.shape)
    return view


VIEWS = (sliced, offset, transposed, expanded)  # of a tensor with elements and dimensions


class Passed(Tensor):
    """Results of torch functions have this type too (MetaTensor)."""


class Disabled(Tensor):
    """Results of torch functions are plain (tv_tensors)."""

    __torch_function__ = torch._C._disabled_torch_function_impl


SUBCLASSES = (Passed, Disabled, torch.nn.Parameter)


def as_subclass(kind: type[Tensor], value: Tensor) -> Tensor:
    """Return a plain tensor as a subclass, and any other one unchanged."""
    if type(value) is not Tensor:
        return value
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(value, requires_grad=value.requires_grad)
    return value.as_subclass(kind)


def _view(draw: Draw, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.numel() == 0 or value.dim() == 0:
        return value
    return draw.choice(VIEWS)(value) if draw.chance(0.7) else value


def _subclass(draw: Draw, value: Any) -> Any:
    return as_subclass(draw.choice(SUBCLASSES), value) if isinstance(value, Tensor) else value


def _with_gradient(draw: Draw, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_()


def _other_copy(draw: Draw, value: Any) -> Any:
    """Return an object of ours after it was pickled, or a layout that was filled with its row."""
    if isinstance(value, cuseq.PackedLayout) and draw.chance(0.5):
        static = StaticLayout.like(value, value.device)
        static.stop_replays()  # otherwise a tree's window goes to another backend
        judge.facts(static)
        return static.copy_(value)
    ours = type(value).__module__.startswith("cuseq") and not isinstance(value, type)
    return pickle.loads(pickle.dumps(value)) if ours else value


def _each(change: Callable[[Draw, Any], Any]) -> Callable[[Draw, Target, Arguments], Arguments]:
    return lambda draw, target, given: tree_map(lambda value: change(draw, value), given)


_SEQUENCES: tuple[Callable[[list[int]], Any], ...] = (tuple, UserList, numpy.array)
_ITERABLES: tuple[Callable[[list[int]], Any], ...] = (
    *(iter, deque, lambda ints: array("q", ints), lambda ints: (one for one in ints)),
)


def _contained(kinds: tuple[Callable[[list[int]], Any], ...]) -> Any:
    """Return a change of lists of ints to what else holds ints."""

    def contain(draw: Draw, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            return value
        if all(type(one) is int for one in value):
            return draw.choice(kinds)(value)
        return [contain(draw, one) for one in value]

    def change(draw: Draw, target: Target, given: Arguments) -> Arguments:
        return {name: contain(draw, value) for name, value in given.items()}

    return lambda draw, target, given: given if target.typed else change(draw, target, given)


class Index:
    """What is an int by `__index__` alone, as those of other libraries are."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value})"


def _indices(draw: Draw, target: Target, given: Arguments) -> Arguments:
    kinds = (numpy.int64,) if target.typed else (Index, numpy.int64)
    return {
        name: draw.choice(kinds)(value) if type(value) is int else value
        for name, value in given.items()
    }


# --------------------------------------------------------------------------- modes


class _Dispatch(TorchDispatchMode):
    """Sees every op of PyTorch and changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@contextmanager
def _set(set_: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


class Way(NamedTuple):
    """A change of the arguments, of what surrounds the call, or of both."""

    change: Callable[[Draw, Target, Arguments], Arguments] = lambda draw, target, given: given
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    least: torch.dtype = torch.float64  # that something is computed in
    refusals: str = r"(?!)"  # pattern of errors that may be raised


WAYS = {
    "views": Way(_each(_view), refusals="contiguous|overlap|single memory location"),
    "other copies": Way(_each(_other_copy)),
    "subclasses": Way(_each(_subclass)),
    "gradients": Way(
        _each(_with_gradient), refusals="must not (require grad|be a leaf that requires grad)"
    ),
    "indices": Way(_indices, refusals="must be a? ?numbers?"),
    "sequences": Way(_contained(_SEQUENCES)),
    "iterables": Way(_contained(_ITERABLES), refusals=r"must .*got"),
    "inference mode": Way(around=torch.inference_mode),
    "no_grad": Way(around=torch.no_grad),
    "deterministic": Way(around=lambda: _set(torch.use_deterministic_algorithms, True, False)),
    "default dtype": Way(
        around=lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32)
    ),
    "default device": Way(around=lambda: torch.device("meta")),
    "autocast": Way(around=lambda: torch.autocast("cpu", torch.bfloat16), least=torch.bfloat16),
    "two threads inside": Way(around=lambda: _set(torch.set_num_threads, 2, 1)),
    "function mode": Way(around=BaseTorchFunctionMode),
    "dispatch mode": Way(around=_Dispatch),
}


def outcome(target: Target, arguments: Arguments) -> Any:
    """Return the facts of what a call gives, and of the tensors that it was given."""
    result = target.call(arguments)
    return judge.facts([result, _tensors(arguments)])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _other_ways(draw: Draw, target: Target, make: Make) -> None:
    names = draw.sample(sorted(WAYS), draw.choice((1, 1, 2)))
    ways = [WAYS[name] for name in names]
    expected, given = outcome(target, make()), make()
    for way in ways:
        given = way.change(draw, target, given)
    around = [way.around() for way in ways]
    label = " and ".join(names)
    try:
        with around[0], around[-1] if len(around) > 1 else nullcontext():
            found = outcome(target, given)
    except Exception as error:
        what = judge.complaint(error, target.names)
        polite = what is None and any(re.search(way.refusals, str(error)) for way in ways)
        if polite or judge.is_elsewhere(error):
            return
        raise Wrong(f"refused with {label}: {type(error).__name__}: {error}") from error
    least = torch.bfloat16 if "autocast" in names else torch.float64
    if not judge.same(found, expected, least):
        raise Wrong(f"another result with {label}: {found}, not {expected}")


def _from_threads(draw: Draw, target: Target, make: Make) -> None:
    """Make the call from several threads at a time with the same arguments."""
    arguments = make()
    before = judge.facts(_tensors(arguments))
    expected = outcome(target, arguments)
    if not judge.same(judge.facts(_tensors(arguments)), before):
        return  # it writes into them
    arguments, found, start = make(), [], Barrier(3)

    def run() -> None:
        start.wait()
        try:
            found.append(outcome(target, arguments))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    threads = [Thread(target=run) for _ in range(3)]
    with _set(sys.setswitchinterval, 1e-6, sys.getswitchinterval()):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in found:
        if not judge.same(one, expected):
            raise Wrong(f"another result from threads: {one}, not {expected}")


# --------------------------------------------------------------------------- derivatives, vmap


# Arguments of backward ops that a forward saved: they have no derivatives.
_SAVED = ("out", "logsumexp", "rstd", "mean", "far_rows")


class _Function:
    """A call as a function of some of its tensors; its results are the tensors that it returns."""

    def __init__(self, draw: Draw, target: Target, given: Arguments, floating: bool):
        self.target = target
        saved = {id(leaf) for name in _SAVED for leaf in tree_leaves(given.get(name))}
        self.leaves, self.structure = tree_flatten(given)
        places = [
            place
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor)
            and leaf.numel()
            and id(leaf) not in saved
            and (leaf.is_floating_point() or not floating)
        ]
        self.places = draw.sample(places, draw.randint(min(1, len(places)), len(places)))
        self.floating = floating

    @property
    def inputs(self) -> list[Tensor]:
        return [self.leaves[place].detach().clone() for place in self.places]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        for place, value in zip(self.places, inputs, strict=True):
            leaves[place] = value.clone()  # the call may write into it
        given = tree_unflatten(leaves, self.structure)
        result = self.target.call(given)
        found = _tensors(given if result is None else result)
        return [one for one in found if one.is_floating_point() or not self.floating]


def _in_double(given: Arguments) -> Arguments:
    def change(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return (
            torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
        )

    return tree_map(change, given)


def _dot(one: list[Tensor], two: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, two, strict=True))


def _slopes(
    function: Callable[..., list[Tensor]],
    at: list[Tensor],
    along: list[Tensor],
    weights: list[Tensor],
) -> tuple[float, float]:
    """Return the derivatives before and after a point of a function's weighted results, in a
    direction, as difference quotients. They differ where the function has a kink: the maximum of
    two equal numbers.
    """
    before, here, after = (
        [one.detach() for one in function(*(x + d * v for x, v in zip(at, along, strict=True)))]
        for d in (-STEP, 0.0, STEP)
    )
    return tuple(
        _dot([b - a for a, b in zip(*pair, strict=True)], weights) / STEP
        for pair in ((before, here), (here, after))
    )


def _compare(what: str, found: float, slopes: tuple[float, float], scale: float) -> None:
    expected = sum(slopes) / 2
    most = 1e-4 * (1 + abs(expected) + scale)
    if abs(slopes[0] - slopes[1]) > most:
        return  # any number between them may be right
    if not abs(found - expected) <= most:
        raise Wrong(f"{what}: {found}, not {expected}")


def _gradients(outputs: list[Tensor], weights: list[Tensor], of: list[Tensor], **options: Any):
    pairs = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(one) for one in of]
    given, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(given, of, cotangents, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, of, strict=True)]


def _derivatives(draw: Draw, target: Target, make: Make) -> None:
    """Compare gradients, forward mode and second derivatives with difference quotients in fp64."""
    function = _Function(draw, target, _in_double(make()), floating=True)
    at = function.inputs
    try:
        outputs = function(*at)
    except (TypeError, ValueError):
        return  # it does not take fp64
    if not at or not outputs or any(not torch.isfinite(one).all() for one in outputs):
        return
    along = [draw.floats(*x.shape, dtype=x.dtype) for x in at]
    weights = [draw.floats(*one.shape, dtype=one.dtype) for one in outputs]
    kind = draw.choice(("gradient", "gradient", "forward mode", "jvp", "second derivative"))
    try:
        leaves = [x.clone().requires_grad_() for x in at]
        with_history = function(*leaves)
        if any(one.requires_grad for one in with_history):  # the others are not differentiable
            for one, weight in zip(with_history, weights, strict=True):
                weight *= one.requires_grad
        slopes = _slopes(function, at, along, weights)
        scale = sum(float(one.abs().sum()) for one in outputs)
        if kind == "gradient":
            found = _dot(_gradients(with_history, weights, leaves), along)
        elif kind == "second derivative":

            def gradient(*inputs: Tensor, **options: Any) -> list[Tensor]:
                leaves = [x if x.requires_grad else x.requires_grad_() for x in inputs]
                return _gradients(function(*leaves), weights, leaves, **options)

            slopes = _slopes(gradient, at, along, along)
            first = gradient(*leaves, create_graph=True)
            scale = sum(float(one.abs().sum()) for one in first)
            found = _dot(_gradients(first, along, leaves), along)
        elif kind == "jvp":
            _, tangents = torch.func.jvp(lambda *x: function(*x), tuple(at), tuple(along))
            found = _dot(tangents, weights)
        else:
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(x, v) for x, v in zip(at, along, strict=True)]
                pairs = [forward_ad.unpack_dual(one) for one in function(*duals)]
            tangents = [torch.zeros_like(p) if t is None else t for p, t in pairs]
            found = _dot(tangents, weights)
    except NotImplementedError as error:
        if judge.RAW.search(str(error)):
            raise Wrong(f"raw error of a {kind}: {error}") from error
        return
    except (TypeError, ValueError) as error:  # of tables, which have no derivatives
        what = judge.complaint(error, target.names)
        if what is None and "gradient" in str(error):
            return
        raise Wrong(f"{kind} refused: {type(error).__name__}: {error}") from error
    _compare(kind, found, slopes, scale)


def _vmap(draw: Draw, target: Target, make: Make) -> None:
    """Compare torch.vmap with a loop over two calls."""
    function = _Function(draw, target, make(), floating=False)
    first = function.inputs
    second = [-x if x.is_floating_point() else x.clone() for x in first]
    try:
        loop = [function(*inputs) for inputs in (first, second)]
    except (TypeError, ValueError):
        return  # negated arguments are wrong
    if not first or not loop[0]:
        return
    expected = [torch.stack(pair) for pair in zip(*loop, strict=True)]
    batch = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    try:
        found = torch.vmap(lambda *inputs: tuple(function(*inputs)))(*batch)
    except NotImplementedError as error:
        if judge.RAW.search(str(error)):
            raise Wrong(f"raw error in vmap: {error}") from error
        return
    except Exception as error:
        if judge.is_elsewhere(error):
            return
        raise Wrong(f"refused in vmap: {type(error).__name__}: {error}") from error
    if not judge.same(judge.facts(found), judge.facts(expected), torch.float64):
        raise Wrong(f"another result in vmap: {found}, not {expected}")


def try_one(draw: Draw, target: Target, make: Make) -> str | None:
    """Make a right call in another way; return what is wrong with it."""
    way = draw.choices((_other_ways, _from_threads, _derivatives, _vmap), (6, 1, 3, 1))[0]
    try:
        way(draw, target, make)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"right arguments are refused: {type(error).__name__}: {error}"
    return None
