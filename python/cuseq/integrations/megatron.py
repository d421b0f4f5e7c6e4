"""Megatron-Core: conversion of a layout to `PackedSeqParams`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from cuseq._base.foreign import load
from cuseq.layout import check_layout

if TYPE_CHECKING:
    from cuseq.layout import PackedLayout


def packed_seq_params(packed: PackedLayout, **more: Any) -> Any:
    """Return Megatron-Core's `PackedSeqParams` for THD attention and rotary embedding.

    The fields of `PackedSeqParams` differ between releases of Megatron-Core. The fields that the
    installed release has are set.

    Args:
        packed: the layout. Attention reads the real lengths from `cu_seqlens_q` and
            `cu_seqlens_kv`, and the starts of segments from `cu_seqlens_q_padded` and
            `cu_seqlens_kv_padded`. The padded offsets are None if the layout was made without
            `segment_multiple` and has no tail. A tail becomes one more sequence of length zero in a
            segment of its own, because Megatron and TransformerEngine use the last offset as the
            end of the row.
        more: further fields, such as `cp_group`.

    Raises:
        ImportError: megatron-core is not installed.
        TypeError: the installed `PackedSeqParams` does not have a field in `more`.

    If the lengths came from a GPU, this waits for their copy to the host.
    """
    PackedSeqParams = load("megatron.core.packed_seq_params", "packed_seq_params").PackedSeqParams
    check_layout(packed, parts=False, trees=False)
    offsets, padded, longest = packed.cu_seqlens, packed.cu_seqlens_padded, packed.max_seqlen_padded
    tail = packed.total_tokens - packed.segments.num_real_tokens
    if tail > 0:
        offsets = torch.cat([offsets, offsets[-1:]])
        padded = torch.nn.functional.pad(padded, (0, 1), value=packed.total_tokens)
        longest = max(longest, tail)
    has_pads = packed.pads_between_sequences or tail > 0
    known = {
        "qkv_format": "thd",
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "cu_seqlens_q_padded": padded if has_pads else None,
        "cu_seqlens_kv_padded": padded if has_pads else None,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "pad_between_seqs": has_pads,
        "total_tokens": packed.total_tokens,
        "seq_idx": packed.seq_idx,
    }
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: known[name] for name in known if name in fields} | more)
