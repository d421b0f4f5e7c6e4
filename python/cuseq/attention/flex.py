"""Backend "flex": attention by `torch.nn.attention.flex_attention`.

flex_attention is a higher-order op: compiled code turns it into a kernel of its own. Inside
compiled code it becomes a part of that code; eager calls run one function that is compiled here.
Offsets, windows, spans and soft caps reach the kernel in tensors, so one kernel serves all packs
and, in eager code, all windows and soft caps. In compiled code the mask is made inside the graph,
where a window is a constant: each window makes a graph of its own.

First its limits, then where the measurements say that it is the fastest, then the kernel.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.modes import is_capturing
from cuseq.attention import packages
from cuseq.attention.call import WIDEST_FLASH, Call, as_autocast, is_wide
from cuseq.attention.table import COMMAND, Facts
from cuseq.layout import PackedLayout, StaticLayout

if TYPE_CHECKING:  # it imports sympy
    from torch.nn.attention.flex_attention import BlockMask

_WIDEST = 512  # head_dim
# Bytes of shared memory that a block can have. Triton supports sm_80 and newer (its README), where
# it is 99 KiB (sm_86, 89, 120) or more (163 on sm_80, 227 on sm_90 and 100: CUDA C++ Programming
# Guide, "Compute Capabilities"); older GPUs have 96 KiB at most.
_LEAST_MEMORY = 99 * 1024
# The tiles for wide heads were tried on an H200, which has 227 KiB.
_WIDE_MEMORY = 224 * 1024
# Below this many tokens flex is not chosen: compiling it takes longer than it ever saves.
LEAST_TOKENS = 512
# How far flex must be ahead where another backend has one kernel too: layers that are compiled one
# by one each make the block mask again, and their kernels take longer to compile.
_HANDICAP = 1.05
_POWERS = tuple(2**power for power in range(6, 21))
_SHORT_DOCUMENT = 256  # tokens; rows of compiled code are judged from one document to these


def takes(call: Call) -> bool:
    """Return whether flex attention runs the call.

    Raises:
        ValueError: the call names it, and it cannot take the call.
    """
    q, backend = call.q, call.backend
    if backend != "flex" and (backend != "auto" or not q.is_cuda):
        return False
    is_part = call.packed.part is not None
    if backend == "auto":
        if is_part:
            return False
        # Nearly all eager calls end here.
        if not is_compiling() and (
            (call.is_plain() and not call.packed.is_replayed) or isinstance(q, FakeTensor)
        ):
            return False
        return pays(call)
    if is_part:
        why: str | None = "packed is a rank's part of a row, whose attention runs in one op"
    elif q.is_cuda and not is_compiling() and isinstance(q, FakeTensor):
        return False
    else:
        why = obstacle(q, call.v)
    if why:
        raise ValueError(
            f'backend="flex" cannot take this call: {why}; backend="auto" chooses one that can'
        )
    return q.shape[0] > 0


# ----------------------------------------------------------------------------------------- limits


def obstacle(q: Tensor, v: Tensor) -> str | None:
    """Return why flex attention cannot take rows of these shapes and dtypes, or None."""
    if not q.is_cuda:
        return 'it runs on CUDA, since on a CPU it has no gradients; use backend="segments"'
    if q.dim() != 3 or v.dim() != 3:
        return "it takes q, k and v of shape [tokens, heads, head_dim]"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes fp16, bf16 and fp32, got {q.dtype}"
    widest = max(q.shape[2], v.shape[2])
    if min(q.shape[2], v.shape[2]) < 16 or widest > _WIDEST:
        return f"it takes head_dim from 16 to {_WIDEST}, got {q.shape[2]} and {v.shape[2]}"
    memory = shared_memory(q.device)
    if memory < _LEAST_MEMORY:
        return (
            f"it runs on GPUs from sm_80 on, with at least {_LEAST_MEMORY:,} bytes of shared "
            f"memory for a block, and this one has {memory:,}"
        )
    if not is_wide(q, v):
        return None
    if not computes_in_half(q):
        return f"it takes head_dim above {WIDEST_FLASH} in fp16 and bf16 alone, got {q.dtype}"
    if memory < _WIDE_MEMORY:
        return (
            f"head_dim above {WIDEST_FLASH}, got {widest}, needs a GPU with {_WIDE_MEMORY:,} "
            f"bytes of shared memory for a block, and this one has {memory:,}"
        )
    return None


def fits(q: Tensor, v: Tensor) -> bool:
    """Return whether flex attention can take rows of these shapes and dtypes, with its own tiles.

    Heads that need other tiles were not measured where this is asked: with the masks of trees.
    """
    return q.shape[0] > 0 and obstacle(q, v) is None and not is_wide(q, v)


def computes_in_half(q: Tensor) -> bool:
    """Return whether attention runs in fp16 or bf16; fp32 keeps its exact kernels."""
    autocast = torch.is_autocast_enabled(q.device.type)
    dtype = torch.get_autocast_dtype(q.device.type) if autocast else q.dtype
    return dtype in (torch.float16, torch.bfloat16)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block of a GPU can have."""
    return _once(_shared_memory_of, device.index)


def _shared_memory_of(index: int | None) -> int:
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block_optin


def _once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of constants; code that is compiled calls it then, and holds the result."""
    if not is_compiling():
        return function(*arguments)
    from cuseq._base.compile_time import constant  # imports torch._dynamo, which is there by now

    return constant(function, *arguments)


# ----------------------------------------------------------------------------------- measurements


def is_taken_by_compiled_code(call: Call) -> bool:
    """Return whether flex attention is what compiled code takes for a call."""
    if call.backend == "flex":
        return obstacle(call.q, call.v) is None
    return call.backend == "auto" and call.q.is_cuda and pays(call, compiled=True)


def pays(call: Call, compiled: bool | None = None) -> bool:
    """Return whether flex attention is what "auto" takes on a GPU.

    Args:
        compiled: whether the call is one of compiled code; default: whether it is being compiled.
    """
    q, v, packed = call.q, call.v, call.packed
    if not computes_in_half(q) or obstacle(q, v):
        return False
    alone = call.lacks_varlen_kernel()
    if packed.is_tree and not alone:
        return False  # a tree's calls run on the other backends
    if packed.is_replayed and not alone:
        return _wins_replays(call)
    if is_compiling() if compiled is None else compiled:
        return alone or _wins_in_compiled_code(call)
    if q.shape[0] < LEAST_TOKENS:
        return False
    if packed.is_replayed or is_capturing(q.device):
        return alone  # the capture cannot copy the offsets that segments need
    call = _without_idle_window(call)
    if call.is_plain():
        return False
    times = _flex_and_others(_facts_of(call))
    if times is None:
        # Not measured, a soft cap runs faster in one kernel than as five passes over the scores,
        # and spans than sequence by sequence.
        return call.softcap is not None or (call.spans is not None and not is_wide(q, v))
    return times[0] <= times[1]


def why(call: Call) -> str:
    """Return why `takes` said yes."""
    if call.backend == "flex":
        return "it was asked for"
    one_by_one = "one kernel for all sequences, where the other backends run them one by one"
    if call.packed.is_replayed or is_capturing(call.q.device):
        if call.lacks_varlen_kernel():
            return one_by_one
        return "the best in a CUDA graph, where the others pay for sequences that may come"
    facts = _facts_of(_without_idle_window(call))
    if _flex_and_others(facts) is None:
        return (
            f"a rule, not a measurement: {one_by_one}, and nothing like this call was measured on "
            f"sm_{facts.sm} (to measure it, in a clone of cuseq: {COMMAND})"
        )
    return "the fastest where it was measured"


def _without_idle_window(call: Call) -> Call:
    """Return the call without a window that hides nothing."""
    idle = call.window is not None and call.window >= call.packed.max_seqlen
    return call._replace(window=None) if idle else call


def _facts_of(call: Call) -> Facts:
    """Return the facts of a call in eager code."""
    packed = call.packed
    return Facts(
        _capability(call.q.device),
        True,
        max(call.q.shape[2], call.v.shape[2]),
        call.mask(),
        call.window or 0,
        "eager",
        packed.num_real_tokens,
        packed.num_sequences,
    )


def _capability(device: torch.device | None = None) -> int:
    """Return the compute capability of a GPU, such as 90; of the current one without a device."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _wins_in_compiled_code(call: Call) -> bool:
    least = _once(least_tokens_in_compiled_code, *_constants_of(call))
    return least is not None and call.q.shape[0] >= least


def _wins_replays(call: Call) -> bool:
    """Return whether flex is the fastest in a CUDA graph that replays other lengths.

    The graph's other kernels pay for each sequence that there is room for. All steps, and forwards
    that are computed again, ask the same, so that the first step compiles what is captured.
    """
    tokens, packed = call.q.shape[0], call.packed
    if tokens < LEAST_TOKENS:
        return False
    room = _constant(packed.cu_seqlens_static.shape[0] - 1, _POWERS)
    expected = packed.expected_sequences if isinstance(packed, StaticLayout) else 0
    facts = (*_constants_of(call), _constant(tokens, _POWERS), room, expected)
    return _once(wins_replays, *facts)


def _constants_of(call: Call) -> tuple[int, str, int]:
    """Return head_dim, kind of mask and window.

    Sizes may be symbolic in the code that is compiled, so constants stand for them.
    """
    head_dim, value_dim = call.q.shape[2], call.v.shape[2]
    widest = head_dim if head_dim >= value_dim else value_dim
    window = 0 if call.window is None else _constant(call.window, (128, 512, 1024, 4096))
    return _constant(widest, (64, 128, 192, WIDEST_FLASH)), call.mask(), window


def _constant(size: int, constants: tuple[int, ...]) -> int:
    """Return the smallest of the constants that is not below a size, or twice the largest."""
    for constant in constants:
        if size <= constant:
            return constant
    return 2 * constants[-1]


def least_tokens_in_compiled_code(head_dim: int, mask: str, window: int) -> int | None:
    """Return the fewest tokens from which flex stays the best choice in compiled code, or None."""
    least = None
    facts = Facts(_capability(), True, head_dim, mask, window, "compiled", 0, 0)
    for power in range(LEAST_TOKENS.bit_length() - 1, 21):
        # One graph serves rows of few and of many documents.
        tokens = 2**power
        documents = range(max(1, tokens // _SHORT_DOCUMENT).bit_length())
        rows = [facts._replace(tokens=tokens, sequences=2**count) for count in documents]
        if not _loses_less(rows, _HANDICAP):
            least = None
        elif least is None:
            least = tokens
    return least


def wins_replays(
    head_dim: int, mask: str, window: int, tokens: int, room: int, expected: int
) -> bool:
    """Return whether flex is the best choice in a CUDA graph whose offsets have room for sequences.

    Rows may come to have more sequences than the first ones, and the choice stays.

    Args:
        expected: sequences of the first rows; 0 if unknown.
    """
    facts = Facts(_capability(), True, head_dim, mask, window, "captured", tokens, room)
    return _loses_less([facts._replace(sequences=min(expected or room, room)), facts])


def _loses_less(rows: list[Facts], handicap: float = 1.0) -> bool:
    """Return whether flex loses less than the other backends where each choice loses most.

    Args:
        rows: what one choice is for.
        handicap: by how much flex must be ahead.
    """
    flex_loss = others_loss = 0.0
    for facts in rows:
        times = _flex_and_others(facts)
        if times is None:
            return False
        flex, others = handicap * times[0], times[1]
        flex_loss, others_loss = max(flex_loss, flex / others), max(others_loss, others / flex)
    return flex_loss <= others_loss


def _flex_and_others(facts: Facts) -> tuple[float, float] | None:
    """Return the times of flex and of the fastest other backend where flex was measured, or None.

    In compiled code and in graphs, masks without measurements follow those of a causal mask.
    """
    times = _C.closest_measured_attention(facts, "flex", facts.mode != "eager")
    if times is None:
        return None
    flex = times.pop("flex")
    if facts.mode == "captured":
        times.pop("cudnn", None)  # which "auto" does not take there
    there = (us for name, us in times.items() if packages.is_usable(name))
    return flex, min(there, default=float("inf"))


# ---------------------------------------------------------------------------------------- kernels

_SIZES = 4
# The tiles that torch 2.11 gives wide heads on an H200 do not fit in shared memory. These were the
# fastest there of some twenty.
_WIDE_TILES: Any = {
    "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1, "bwd_num_warps": 8,
    # Not the kernel for few queries, which computes its bounds from tiles of its own.
    "FORCE_USE_FLEX_ATTENTION": True,
}  # fmt: skip
# Where a row of a tile has more than _ROW bytes, torch's tiles take 103 to 172 KB of shared memory,
# and a block of sm_86, 89 and 120 has 101 (pytorch#180278, #133254). These take at most 74 KB for
# rows of up to twice, and 67 KB of up to four times as many bytes. Found by compiling the kernels
# for these GPUs with triton 3.6; nobody has measured them.
_ROW = 256
_ROOMY = 160 * 1024
_SMALL_TILES: Any = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1, "bwd_num_warps": 4,
    "FORCE_USE_FLEX_ATTENTION": True,
}  # fmt: skip
_SMALLEST_TILES: Any = _SMALL_TILES | {
    "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_stages": 1,
    "bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16,
}  # fmt: skip

_sizes: dict[tuple[Any, ...], set[int]] = {}
_copies = itertools.count()


def attend(call: Call) -> Tensor:
    """Compute a checked call. Returns `[total_tokens, heads, value_dim]`.

    Eager code compiles a kernel, for seconds, at the first call of a kind.
    """
    q, k, v, packed, causal, window, spans, scale, softcap, sinks, _ = call
    q, k, v = as_autocast(q, k, v)
    mask = packed.block_mask(causal=causal, window=window, spans=spans)
    is_pad = _is_pad(packed, q.shape[0]) if is_compiling() else packed.moe_padding_mask
    cap = None if softcap is None else torch.full((), softcap, device=q.device)
    run = flex_rows if is_compiling() else _compiled_for(q, k, v, scale, cap, sinks)
    return run(q, k, v, mask, is_pad, scale, cap, sinks)


def flex_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    is_pad: Tensor,
    scale: float | None,
    cap: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of rows `[tokens, heads, head_dim]`.

    Args:
        is_pad: bool `[tokens]`, True on padding and tail. They see themselves in the mask; what
            they hold must not reach other rows, not even as NaN times zero.
        cap: soft cap, `[]`, or None.
        sinks: `[heads]`, or None.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    pads = is_pad[:, None, None]
    query, key, value = (t.masked_fill(pads, 0).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    found: Any = flex_attention(
        query,
        key,
        value,
        score_mod=None if cap is None else _capped(cap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=_tiles(q, v),
    )
    out, aux = found
    if sinks is not None:  # the share of the softmax that the real keys keep
        share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
        out = (out * share.unsqueeze(-1)).to(out.dtype)
    return out.squeeze(0).transpose(0, 1).masked_fill(pads, 0).contiguous()


def _tiles(q: Tensor, v: Tensor) -> Any:
    """Return the options of kernels whose tiles fit where torch's own do not, or None."""
    if is_wide(q, v):
        return _WIDE_TILES
    row = max(q.shape[2], v.shape[2]) * q.element_size()
    if row <= _ROW or not q.is_cuda or shared_memory(q.device) >= _ROOMY:
        return None
    return _SMALL_TILES if row <= 2 * _ROW else _SMALLEST_TILES


def _capped(cap: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def _is_pad(packed: PackedLayout, total_tokens: int) -> Tensor:
    padded = packed.cu_seqlens_padded_static
    offsets = packed.cu_seqlens_static
    return torch.ops.cuseq.token_metadata(offsets, total_tokens, padded)[2]


def _compiled_for(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, cap: Tensor | None, sinks: Tensor | None
) -> Callable[..., Tensor]:
    """Return the function for eager calls like this one, compiled for its number of tokens.

    Each number of tokens costs seconds to compile. After `_SIZES` numbers for calls of one kind,
    further ones share a kernel for any number, which may be slower.
    """
    kind = (
        q.dtype,
        q.device,
        q.shape[1:],
        k.shape[1],
        v.shape[2],
        scale,
        cap is None,
        sinks is None,
    )
    sizes = _sizes.setdefault(kind, set())
    if len(sizes) < _SIZES:
        sizes.add(q.shape[0])
    return _compiled(kind, q.shape[0] if q.shape[0] in sizes else None)


@functools.cache
def _compiled(kind: tuple[Any, ...], tokens: int | None) -> Callable[..., Tensor]:
    """Compile a copy of `flex_rows`: Dynamo bounds how often it compiles one code object."""
    code = flex_rows.__code__.replace(co_name=f"flex_rows_{next(_copies)}")
    copy = types.FunctionType(code, flex_rows.__globals__)
    return torch.compile(copy, fullgraph=True, dynamic=None if tokens is None else False)
