"""Log-probabilities under the head of a model of transformers."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterator
from numbers import Real
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from cuseq._base.models import text_config
from cuseq.reductions.segments import token_logprobs

# The names under which configs and models hold a factor of the logits, or one over it, and a bound.
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
_INSTEAD = "pass weight, bias, scale and softcap to cuseq.token_logprobs if it computes this head"


def model_logprobs(
    model: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target under a model's own head.

    This is `token_logprobs` with the head's weight and bias, and with the factor and the bound that
    the model's forward gives its logits (Gemma, Granite, Cohere, Falcon-H1). At the first call the
    head part of that forward runs in fp64 on a few small numbers, on the CPU and without the layers
    or the weights of the model, and must give the same logits. The result is kept for the model.

    Args:
        model: a causal language model of transformers, or a module that contains one (of peft, DDP,
            torch.compile). Its head must be a plain linear layer, which may be tied.
        hidden: `[N, features]`, rows of the `last_hidden_state` of the part of the model below the
            head, of the dtype and on the device of the head's weight.
        targets: int64 `[N]`; -100 gives 0 and no gradient.
        temperature: divides the logits of the model; from 2^-60 to 2^60.
        chunk_size: tokens whose logits are in memory together, as in `token_logprobs`.
        entropy: whether to return the entropy of each token's distribution too.

    Returns:
        As `token_logprobs`. The gradients go to `hidden` and to the parameters of the head.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the head is not a plain linear layer (adapters, quantised weights), its
            parameters are shared out over ranks, or the forward computes the logits in another way;
            the message says which.
        ValueError, TypeError: as `token_logprobs`.

    Never synchronises. Compiled code breaks its graph here; `token_logprobs` is one graph.

    Examples:
        >>> hidden = model.model(input_ids).last_hidden_state[0]  # doctest: +SKIP
        >>> cuseq.model_logprobs(model, hidden[:-1], input_ids[0, 1:])  # doctest: +SKIP
    """
    if is_compiling():
        from cuseq._base.compile_time import in_eager_code

        head = in_eager_code(read_head, model)
    else:
        head = read_head(model)
    return token_logprobs(
        hidden,
        head.weight,
        targets,
        bias=head.bias,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=entropy,
        scale=head.scale,
        softcap=head.softcap,
    )


class Head(NamedTuple):
    """A model's head: `weight` [vocabulary, features], `bias` [vocabulary] or None, and what its
    logits are multiplied with and bounded by.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


class _Read(NamedTuple):
    """What the comparison found for a model in the state that `key` describes."""

    key: tuple[Any, ...]
    vocabulary: int
    scale: float
    softcap: float | None


# By model and whether it is in training mode.
_read: WeakKeyDictionary[nn.Module, dict[bool, _Read]] = WeakKeyDictionary()


def read_head(model: nn.Module) -> Head:
    """Return the head of a model, compared with the model's forward; else raise ValueError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    owner, head = _owner(model)
    weight, bias = _plain(owner, head)
    scales, softcaps = _numbers(owner, _SCALES), _numbers(owner, _SOFTCAPS)
    forward = _forward(owner)
    key = (ref(forward), ref(head), weight.shape, bias is None, scales, softcaps)
    of_modes = _read.setdefault(owner, {})
    read = of_modes.get(owner.training)
    if read is None or read.key != key:
        factors = dict.fromkeys((1.0, *(f for one in scales for f in (one, 1 / one))))
        read = _Read(key, *_compared(owner, head, forward, (*factors,), (None, *softcaps)))
        of_modes[owner.training] = read
    rows = slice(read.vocabulary)
    return Head(weight[rows], None if bias is None else bias[rows], read.scale, read.softcap)


def _refused(owner: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"model_logprobs cannot compute the head of {type(owner).__name__}: {reason}; {_INSTEAD}"
    )


def _owner(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the part of a model that has a head, and the head."""
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings"):
            head = cast("Any", module).get_output_embeddings()
            if isinstance(head, nn.Module):
                return module, head
    raise _refused(model, "no part of it has get_output_embeddings() with a module")


def _plain(owner: nn.Module, head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a head that is a linear layer and nothing else."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise _refused(owner, f"it is a {type(head).__module__}.{type(head).__name__}")
    if "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
        raise _refused(owner, "it has a forward or hooks of its own")
    weight, bias = head.weight, head.bias
    for tensor in (weight,) if bias is None else (weight, bias):
        if hasattr(tensor, "full_tensor"):  # a DTensor
            raise _refused(owner, "its parameters are shared out over ranks (DTensor)")
    if weight.dim() != 2 or 0 in weight.shape:  # ZeRO-3 and FSDP1 leave nothing
        raise _refused(owner, f"its weight has shape {list(weight.shape)}")
    return weight, bias


def _numbers(owner: nn.Module, names: tuple[str, ...]) -> tuple[float, ...]:
    """Return the numbers above 0 that a model or its configs hold under some names."""
    places = (owner, getattr(owner, "config", None), text_config(owner), *owner.children())
    found = (getattr(place, name, None) for place in places for name in names)
    usable = (float(n) for n in found if isinstance(n, Real) and not isinstance(n, bool))
    return tuple(dict.fromkeys(n for n in usable if math.isfinite(n) and n > 0))


def _forward(owner: nn.Module) -> Any:
    """Return the function that runs as a model's forward: its class's, or its own (Liger,
    accelerate).
    """
    own = vars(owner).get("forward")
    if own is None:
        return type(owner).forward
    if "_old_forward" in vars(owner):  # below accelerate's hooks
        own = vars(owner)["_old_forward"]
    if not isinstance(own, types.MethodType) or own.__self__ is not owner:
        raise _refused(owner, f"its forward was replaced by {own!r}")
    return own.__func__


def _compared(
    owner: nn.Module,
    head: nn.Module,
    forward: Any,
    scales: tuple[float, ...],
    softcaps: tuple[float | None, ...],
) -> tuple[int, float, float | None]:
    """Return the vocabulary, scale and softcap with which a forward computes its logits."""
    weight, bias = _plain(owner, head)
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    # From far below to far above every bound.
    sizes = torch.tensor([1e-2, 1, 30, 1e3], dtype=torch.float64, device="cpu").unsqueeze(1)
    hidden = numbers(4, 2) * sizes
    small = nn.Linear(1, 1, device="meta")
    small.weight = nn.Parameter(numbers(weight.shape[0], 2))
    small.register_parameter(
        "bias", None if bias is None else nn.Parameter(numbers(weight.shape[0]))
    )
    with torch.no_grad():
        found = _logits(owner, head, forward, small, hidden)
        raw = nn.functional.linear(hidden, small.weight, small.bias)[:, : found.shape[-1]]
        for scale, softcap in itertools.product(scales, softcaps):
            expected = raw * scale
            if softcap is not None:
                expected = softcap * torch.tanh(expected / softcap)
            if torch.allclose(found, expected, rtol=1e-5, atol=1e-9):
                return found.shape[-1], scale, softcap
    raise _refused(
        owner,
        "its forward does not compute logits as "
        f"hidden @ weight.T{'' if bias is None else ' + bias'} times any of {list(scales)}, "
        f"bounded by any of {list(softcaps)}",
    )


def _logits(
    owner: nn.Module, head: nn.Module, forward: Any, small: nn.Linear, hidden: Tensor
) -> Tensor:
    """Return the logits [n, vocabulary] of a model whose parts below the head return `hidden`."""
    body = [
        name
        for name, child in owner.named_children()
        if child is not head and any(True for _ in _tensors(child))
    ]
    names = [name for name, child in owner.named_children() if child is head]
    own = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    loose = [name for name, _ in own]
    if len(body) != 1 or len(names) != 1 or loose:
        parts = ", ".join((*body, *names, *loose))
        raise _refused(owner, f"it has other parts than one and a head ({parts})")
    below = _Below(owner.get_submodule(body[0]), hidden)
    copy = object.__new__(type(owner))  # the model itself stays as it is, for other threads too
    vars(copy).update(vars(owner))
    vars(copy)["_modules"] = {**owner._modules, body[0]: below, names[0]: small}
    ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device="cpu")
    try:
        output = forward(copy, input_ids=ids)
        logits = output[0] if isinstance(output, tuple) else output.logits
        shape = list(logits.shape)
    except Exception as error:
        reason = f"its forward does not run without the layers ({type(error).__name__}: {error})"
        raise _refused(owner, reason) from error
    if below.calls != 1:
        raise _refused(owner, f"its forward calls the parts below it {below.calls} times")
    if len(shape) != 3 or shape[:2] != [1, len(hidden)] or not 0 < shape[2] <= len(small.weight):
        raise _refused(owner, f"its logits have shape {shape}")
    return logits[0].to(torch.float64)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _Below:
    """The part of a model below its head: each call of it, or of a part of it, returns `hidden`."""

    def __init__(self, module: nn.Module, hidden: Tensor) -> None:
        self.calls = 0
        self._module = module
        self._hidden = hidden

    def __call__(self, *_: Any, **__: Any) -> _Output:
        self.calls += 1
        return _Output((self._hidden.unsqueeze(0),))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self if isinstance(value, nn.Module) else value


class _Output(tuple[Tensor]):
    """An output of transformers with hidden states alone."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
