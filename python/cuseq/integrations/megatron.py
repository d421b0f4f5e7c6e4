"""Megatron-Core: its description of a packed row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuseq.layout import PackedLayout


def packed_seq_params(packed: PackedLayout, **more: Any) -> Any:
    """Megatron-Core's `PackedSeqParams` of a layout, for its THD attention and rotary embedding.

    Releases differ in its fields: those that the installed one has are filled in.

    Args:
        packed: the layout. Attention reads the real lengths from `cu_seqlens_q` and `_kv`, where
            segments lie from `cu_seqlens_q_padded` and `_kv_padded`, None without padding.
            A tail is in no segment: where TransformerEngine deals the row to the ranks of context
            parallelism, leave none, by `segment_multiple` alone.
        more: further fields, such as `cp_group`.

    Raises:
        ImportError: megatron-core is not installed.
        TypeError: it has no such field.

    Waits for the layout's host values where lengths came from a GPU.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError as error:
        raise ImportError(
            "packed_seq_params needs megatron-core: pip install megatron-core"
        ) from error
    packed._check_whole()
    padded = packed.cu_seqlens_padded if packed.pads_between_sequences else None
    known = {
        "qkv_format": "thd",
        "cu_seqlens_q": packed.cu_seqlens,
        "cu_seqlens_kv": packed.cu_seqlens,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": packed.max_seqlen_padded,
        "max_seqlen_kv": packed.max_seqlen_padded,
        "pad_between_seqs": packed.pads_between_sequences,
        "total_tokens": packed.total_tokens,
        "seq_idx": packed.seq_idx,
    }
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: known[name] for name in known if name in fields} | more)
