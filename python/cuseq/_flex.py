"""Attention by `torch.nn.attention.flex_attention`, for the backend "flex".

flex_attention is a higher-order op: compiled code turns it into a kernel of its own. Inside
compiled code it becomes a part of that code; eager calls run one function that is compiled here.
What differs between packs, windows, spans and soft caps is in tensors, so one graph serves them
all.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from cuseq._backends import is_wide, shared_memory
from cuseq.layout import PackedLayout, Spans

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


def attend_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `cuseq.varlen_attention` with checked arguments.

    Returns `[total_tokens, heads, value_dim]`. Eager code compiles a kernel, for seconds, at the
    first call of a kind.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
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
