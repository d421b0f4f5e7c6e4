"""xformers: its attention bias of a layout."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cuseq.layout import PackedLayout


def causal_bias(packed: PackedLayout, window: int | None) -> tuple[Any, list[Tensor]]:
    """A new `BlockDiagonalCausalMask` and the tensors made for it; `PackedLayout` keeps both.

    xformers' own constructors copy their list of lengths to the device and wait for it. The bias is
    made here of the offsets that are there already.
    """
    try:
        from xformers.ops.fmha import attn_bias
    except ImportError as error:
        raise ImportError(
            "packed.xformers_bias needs xformers: pip install xformers, of a build for this torch"
        ) from error
    if packed.pads_between_sequences:
        raise ValueError("packed must have no padding between its sequences for an xformers bias")
    if packed.total_tokens == 0:
        raise ValueError("packed must have tokens for an xformers bias, got a row without any")
    lengths = packed.lengths_on_host().tolist()
    offsets, made = packed.cu_seqlens, []
    tail = packed.total_tokens - packed.num_real_tokens
    if tail > 0:
        lengths.append(tail)
        offsets = torch.nn.functional.pad(offsets, (0, 1), value=packed.total_tokens)
        made.append(offsets)
    info = attn_bias._SeqLenInfo(
        seqstart=offsets,
        max_seqlen=max(lengths),
        min_seqlen=min(lengths),
        seqstart_py=list(accumulate(lengths, initial=0)),
    )
    bias = attn_bias.BlockDiagonalCausalMask(q_seqinfo=info, k_seqinfo=info)
    return bias if window is None else bias.make_local_attention(window), made
