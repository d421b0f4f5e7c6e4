"""xformers: conversion of a layout to an attention bias."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuseq._base.foreign import load, private

if TYPE_CHECKING:
    from cuseq.layout import PackedLayout


def causal_bias(packed: PackedLayout, window: int | None) -> tuple[Any, list[Tensor]]:
    """Return a new `BlockDiagonalCausalMask` and the list of tensors made for it, for the cache.

    xformers' own constructors copy a list of lengths to the device and wait for that copy. This
    function uses the layout's offsets instead.

    Args:
        packed: the layout of a row with at least one token, without padding between its sequences.
        window: number of keys that a token sees, itself included; None for all.

    Raises:
        ImportError: xformers is not installed.
        ValueError: the layout does not fit, or cuseq does not know this release of xformers.

    If the lengths came from a GPU, this waits for their copy to the host.
    """
    attn_bias = load("xformers.ops.fmha.attn_bias", "packed.xformers_bias")
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
    fields = ["seqstart", "max_seqlen", "min_seqlen", "seqstart_py"]
    make_info = private(attn_bias, "_SeqLenInfo", signature=fields)
    info = make_info(
        seqstart=offsets,
        max_seqlen=max(lengths),
        min_seqlen=min(lengths),
        seqstart_py=list(accumulate(lengths, initial=0)),
    )
    bias = attn_bias.BlockDiagonalCausalMask(q_seqinfo=info, k_seqinfo=info)
    return bias if window is None else bias.make_local_attention(window), made
