"""The kernels of FlashAttention 4, for the backend "fa4" of attention.

The package flash-attn-4 compiles its kernels when they are first needed and launches them from
Python. Its own functions look up each compiled kernel by some thirty facts and check their
arguments, which takes longer than short rows take on the GPU. So on sm_90 one call of each kind is
recorded: the kernels that the package launched, and what it passed to each. Further calls of that
kind launch these kernels directly, with their own tensors in the same places.

Nothing here depends on a release's order of arguments. What a recorded kernel was given must be a
tensor of the call, a workspace whose size follows from the tokens, or a constant. If anything else
was passed, or the package did anything besides, calls of that kind run through its own functions.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuseq._base.arguments import round_up
from cuseq.attention.packages import register_kernels

_CAPABILITIES = (9, 10)
# The arguments of the package's functions that are passed, by name: the tensors, then the mask. The
# tensors begin with q, k and v and end with the offsets of the queries and of the keys.
_TENSORS = {
    "_flash_attn_fwd": ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"),
    "_flash_attn_bwd": (
        "q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k",
    ),
}  # fmt: skip
_MASK = ("softmax_scale", "causal", "window_size_left", "window_size_right")
_REMEDY = "pip install 'cuseq[fa4]' installs versions that fit each other"

# Rows of one tile, which has at most this many tokens, have kernels of their own, as have strides
# of zero.
_ONE_TILE = 128
# Calls of a kind that are recorded until one can be repeated. The layers of a model repeat a shape,
# which then says nothing new; only the compilation of a first call may be in the way.
_TRIES = 6
_TRIES_OF_A_SHAPE = 2
_MOST_TRIED = 2048  # a scale that changes at every step makes a kind of every call

_package: Any = None
_launches_directly = False
_most_sequences = sys.maxsize
_library: torch.library.Library | None = None
_lock = threading.Lock()
_tries: Counter[tuple[Any, ...]] = Counter()
recorded: dict[tuple[Any, ...], _Launches] = {}  # kinds of calls that are launched directly


def register(capability: tuple[int, int]) -> str:
    """Register the kernels for CUDA. Return an empty string, or why they cannot be used."""
    global _package, _launches_directly, _most_sequences, _library
    if capability[0] not in _CAPABILITIES:
        sm = "".join(map(str, capability))
        return f"FlashAttention 4 runs on GPUs of sm_90 and sm_100, got sm_{sm}"
    try:
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "FlashAttention 4 is not installed: pip install 'cuseq[fa4]'"
    try:
        package = importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # its dependencies fail in many ways
        how = f"{type(error).__name__}: {error}"
        return f"flash-attn-4 {version} cannot be imported ({how}): {_REMEDY}"
    for function, tensors in _TENSORS.items():
        why = _misfit(package, function, (*tensors, *_MASK))
        if why:
            return f"flash-attn-4 {version} cannot be called: {why}: {_REMEDY}"
    _package = package
    on_sm90 = _launches_directly = capability[0] == 9
    # For more sequences some releases compile other kernels, with an index of the sequences.
    _most_sequences = getattr(package, "BIN_BATCH_SEARCH_THRESH", sys.maxsize)
    recorded.clear()
    _tries.clear()
    # The kernels of sm_90 treat pairs without queries or keys alike in every release. Some of
    # sm_100 crash on them (flash-attention#2470, #2562), and none was tried.
    _library = register_kernels(
        "fa4", f"flash-attn-4 {version}", forward, backward, takes_two_rows=on_sm90
    )
    return ""


def _misfit(package: Any, name: str, passed: tuple[str, ...]) -> str:
    """Return why a function of the package cannot be given these arguments, or an empty string."""
    function = getattr(package, name, None)
    if function is None:
        return f"it has no function {name}"
    found = inspect.signature(function).parameters
    by_name = {
        parameter.name
        for parameter in found.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for argument in passed:
        if argument not in by_name:
            return f"{name} has no parameter {argument!r}, which cuseq passes"
    for parameter in found.values():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        )  # fmt: skip
        if required and parameter.name not in passed:
            return f"{name} requires {parameter.name!r}, which cuseq does not know"
    return ""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *sequences: Any,
) -> None:
    """Compute attention into `out` and `logsumexp`, for the op `cuseq::fa4_forward`.

    Rows are fp16 or bf16 `[tokens, heads, head_dim]` with zeros in a tail; `logsumexp` is fp32
    `[heads, tokens]`; `register_kernels` describes `sequences`. Never synchronises.
    """
    offsets_q, offsets_k, _, _, *mask = sequences
    _run("_flash_attn_fwd", (q, k, v, out, logsumexp, offsets_q, offsets_k), tuple(mask))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *sequences: Any,
) -> None:
    """Compute gradients into `grad_q`, `grad_k` and `grad_v`, for the op `cuseq::fa4_backward`.

    Shapes and dtypes are those of the forward; gradients have them too. Never synchronises.
    """
    offsets_q, offsets_k, _, _, *mask = sequences
    tensors = (q, k, v, out, grad_out, logsumexp, grad_q, grad_k, grad_v, offsets_q, offsets_k)
    _run("_flash_attn_bwd", tensors, tuple(mask))


_Mask = tuple[float, bool, "int | None", "int | None"]


def _run(function: str, tensors: tuple[Tensor, ...], mask: _Mask) -> None:
    """Run a function of the package, or launch the kernels that it launches."""
    q, k, v, _, fifth, *_, offsets_q, offsets_k = tensors  # the fifth is grad_out of a backward
    (tokens_q, heads, dim), (tokens_k, key_heads, value_dim) = q.shape, v.shape
    if (
        not _launches_directly
        or min(tokens_q, tokens_k) <= _ONE_TILE
        or offsets_q.shape[0] - 1 > _most_sequences
        or (0 in q.stride() or 0 in k.stride() or 0 in v.stride() or 0 in fifth.stride())
    ):
        _call_package(function, tensors, mask)
        return
    one_row = offsets_q is offsets_k and tokens_q == tokens_k
    # What the package chooses a kernel by; the scale and the windows are constants of a record.
    kind = (function, q.dtype, heads, dim, key_heads, value_dim, one_row, mask)
    launches = recorded.get(kind)
    if launches is not None:
        launches.run(tensors)
        return
    shape = (kind, tokens_q, tokens_k, offsets_q.shape[0])
    if _tries[kind] >= _TRIES or _tries[shape] >= _TRIES_OF_A_SHAPE or len(_tries) >= _MOST_TRIED:
        _call_package(function, tensors, mask)
    else:
        _tries.update((kind, shape))
        with _lock, _Recording() as recording, _watched_caches(recording):
            _call_package(function, tensors, mask)
        launches = _understood(recording, tensors, mask, one_row)
        if launches is not None:
            recorded[kind] = launches


def _call_package(function: str, tensors: tuple[Tensor, ...], mask: _Mask) -> None:
    named = dict(zip(_TENSORS[function], tensors, strict=True))
    getattr(_package, function)(**named, **dict(zip(_MASK, mask, strict=True)))


@contextmanager
def through_the_package() -> Iterator[None]:
    """Let the package's own functions run meanwhile, for comparisons."""
    global _launches_directly
    kept, _launches_directly = _launches_directly, False
    try:
        yield
    finally:
        _launches_directly = kept


# ------------------------------------------------------------------------------ direct launches


class _Workspace(NamedTuple):
    """A tensor that the package makes in each call: fp32 `[heads, rows * width]`.

    Its rows are those of the queries (`side` 0) or of the keys (1), where each sequence begins at a
    multiple of `block`.
    """

    make: Callable[..., Tensor]
    heads: int
    side: int
    block: int
    width: int

    def allocate(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the workspace of a call."""
        size = _padded_rows(tensors, self.side, self.block) * self.width
        return self.make(self.heads, size, dtype=torch.float32, device=tensors[0].device)


class _Launches:
    """The kernels of one kind of call, in the order in which the package launches them.

    Each kernel has the numbers of its arguments among the tensors of a call, then the workspaces,
    then the constants, which are counted from the end.
    """

    def __init__(
        self,
        workspaces: list[_Workspace],
        constants: list[Any],
        kernels: list[tuple[Callable[..., Any], list[int]]],
    ):
        self._workspaces, self._constants = workspaces, constants
        self._kernels = [(kernel, itemgetter(*numbers)) for kernel, numbers in kernels]

    def run(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch the kernels for another call of that kind."""
        workspaces = [one.allocate(tensors) for one in self._workspaces]
        values = (*tensors, *workspaces, *self._constants)
        for kernel, arguments_in in self._kernels:
            kernel(*arguments_in(values))


_MAKES: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.zeros.default: torch.zeros,
}
_CHANGES_NOTHING = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class _Recording(TorchDispatchMode):
    """Notes what the package does in a call: the tensors that it makes, the kernels it launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.made: dict[Any, tuple[Callable[..., Tensor], Tensor]] = {}
        self.is_whole = True  # nothing happened that a repetition would miss
        self._in_kernel = False
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if self._in_kernel:
            return result  # a repetition does it too
        if op in _MAKES:
            self.made[_place(result)] = _MAKES[op], result
        elif op not in _CHANGES_NOTHING:
            self.is_whole = False
        return result

    def watch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return the kernel; its launches are noted, but those of other threads."""
        if threading.get_ident() != self._thread:
            return kernel

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.launched.append((kernel, args))
            self.is_whole &= not kwargs
            self._in_kernel = True
            result = kernel(*args, **kwargs)
            self._in_kernel = False
            return result

        return launch


class _WatchedCache:
    """Stands in for one of the package's caches of compiled kernels."""

    def __init__(self, cache: Any, recording: _Recording):
        self._cache, self._recording = cache, recording

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Callable[..., Any]) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        return self._recording.watch(self._cache[key])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@contextmanager
def _watched_caches(recording: _Recording) -> Iterator[None]:
    """Put stand-ins in the place of the caches that the package's functions have."""
    found = {
        function: function.compile_cache
        for function in vars(_package).values()
        if inspect.isfunction(function) and hasattr(function, "compile_cache")
    }
    for function, cache in found.items():
        function.compile_cache = _WatchedCache(cache, recording)
    try:
        yield
    finally:
        for function, cache in found.items():
            function.compile_cache = cache


def _understood(
    recording: _Recording, tensors: tuple[Tensor, ...], mask: _Mask, one_row: bool
) -> _Launches | None:
    """Return how to repeat a recorded call, or None if anything of it is not understood."""
    numbers = {_place(tensor): number for number, tensor in enumerate(tensors)}
    # Two tensors in one place cannot be told apart, but for the offsets of one row.
    if len(numbers) != len(tensors) - one_row or not recording.is_whole:
        return None
    # An integer that may be a number of tokens or sequences is not a constant.
    offsets = tensors[-1].shape[0]
    counts = {tensors[0].shape[0], tensors[1].shape[0], offsets, offsets - 1}
    integers = {window for window in mask[2:] if window is not None} - counts
    workspaces: list[_Workspace] = []
    constants: list[Any] = []
    kernels, uses = [], Counter[int]()
    for kernel, args in recording.launched:
        if len(args) < 2:
            return None
        passed = []
        for argument in args:
            if isinstance(argument, Tensor):
                place = _place(argument)
                if place not in numbers:
                    workspace = _workspace(recording, place, tensors, mask, one_row)
                    if workspace is None:
                        return None
                    numbers[place] = len(tensors) + len(workspaces)
                    workspaces.append(workspace)
                passed.append(numbers[place])
            elif _is_constant(argument, integers):
                constants.insert(0, argument)
                passed.append(-len(constants))
            else:
                return None
        uses.update(set(passed))
        kernels.append((kernel, passed))
    # Where a kernel was launched in another way, what it reads or writes is missing here.
    for number in numbers.values():
        if uses[number] < (1 if number < len(tensors) else 2):
            return None
    return _Launches(workspaces, constants, kernels)


def _place(tensor: Tensor) -> Any:
    """Return what two tensors share if they are views of the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_constant(argument: Any, integers: set[int]) -> bool:
    if isinstance(argument, tuple):
        return all(_is_constant(one, integers) for one in argument)
    return (
        argument is None
        or isinstance(argument, (bool, float))
        or (isinstance(argument, int) and argument in integers)
    )


def _workspace(
    recording: _Recording, place: Any, tensors: tuple[Tensor, ...], mask: _Mask, one_row: bool
) -> _Workspace | None:
    """Return the rule by which the package made a tensor, or None if several or none fit."""
    make, made = recording.made.get(place, (None, None))
    if make is None or made is None:
        return None
    q, k, v = tensors[:3]
    dim, value_dim = q.shape[2], v.shape[2]
    blocks = _tiles(dim, value_dim, mask)
    if made.dtype != torch.float32 or made.dim() != 2 or not made.is_contiguous():
        return None
    if made.shape[0] not in (q.shape[1], k.shape[1]) or made.device != q.device:
        return None
    # The kernels round head_dim up to multiples of 32 or 64.
    widths = {1} | {round_up(size, step) for size in (dim, value_dim) for step in (32, 64)}
    sides = {block: side for side, block in enumerate(blocks)} if one_row else None
    fits = {
        _Workspace(make, made.shape[0], side if sides is None else sides[block], block, width)
        for side, block in enumerate(blocks)
        for width in widths
        if _padded_rows(tensors, side, block) * width == made.shape[1]
    }
    return fits.pop() if len(fits) == 1 else None


def _tiles(dim: int, value_dim: int, mask: _Mask) -> Sequence[int]:
    """Return the tokens of the backward's tiles, queries and keys; nothing if they are not told."""
    _, causal, left, right = mask
    local = left is not None or right is not None
    try:
        tiles = _package._tile_size_bwd_sm90(
            head_dim=dim, head_dim_v=value_dim, causal=causal and not local, local=local
        )
        return tiles.m_block_size, tiles.n_block_size
    except (AttributeError, TypeError):
        return ()


def _padded_rows(tensors: tuple[Tensor, ...], side: int, block: int) -> int:
    rows, offsets = tensors[side].shape[0], tensors[side - 2].shape[0]
    return (rows + offsets * block - 1) // block * block
