"""cuseq: each fact about a packed row of sequences, computed once, without a stall."""

from cuseq import _load as _load  # the compiled libraries, before anything that needs their ops

# isort: split
from cuseq import _fakes as _fakes
from cuseq._cache import cache_stats, clear_cache, forward_scope, invalidate
from cuseq._load import build_info
from cuseq._rope_table import rope_table
from cuseq._version import __version__ as __version__
from cuseq.attention import varlen_attention
from cuseq.check_packing import PackingReport, check_packing
from cuseq.collate import PackingCollator, mask_boundary_labels
from cuseq.context_parallel import cp_join, cp_partition
from cuseq.layout import PackedLayout
from cuseq.masks import block_mask, dense_mask, mask_ranges
from cuseq.ops import (
    cu_seqlens,
    cu_seqlens_from_position_ids,
    last_token_indices,
    lengths_from_padding_mask,
    max_seqlen,
    max_seqlen_sync,
    packed_cu_seqlens,
    packed_position_ids,
    packed_seq_ids,
    position_ids,
    seq_ids,
)
from cuseq.packing_plan import PackingPlan, bin_pack
from cuseq.pad import equalize_tokens, pack, run_packed, unpack
from cuseq.profile_step import StepProfile, profile_step
from cuseq.rope import apply_qk_norm_rope, apply_rope
from cuseq.sampler import PackedBatchSampler
from cuseq.split import split_by_tokens
from cuseq.stream import PackedStream

__all__ = [
    "PackedBatchSampler",
    "PackedLayout",
    "PackedStream",
    "PackingCollator",
    "PackingPlan",
    "PackingReport",
    "StepProfile",
    "apply_qk_norm_rope",
    "apply_rope",
    "bin_pack",
    "block_mask",
    "build_info",
    "cache_stats",
    "check_packing",
    "clear_cache",
    "cp_join",
    "cp_partition",
    "cu_seqlens",
    "cu_seqlens_from_position_ids",
    "dense_mask",
    "equalize_tokens",
    "forward_scope",
    "invalidate",
    "last_token_indices",
    "lengths_from_padding_mask",
    "mask_boundary_labels",
    "mask_ranges",
    "max_seqlen",
    "max_seqlen_sync",
    "pack",
    "packed_cu_seqlens",
    "packed_position_ids",
    "packed_seq_ids",
    "position_ids",
    "profile_step",
    "rope_table",
    "run_packed",
    "seq_ids",
    "split_by_tokens",
    "unpack",
    "varlen_attention",
]
