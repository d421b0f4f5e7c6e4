"""Rotary position embeddings of packed rows, alone or fused with the norms of q and k."""

from cuseq.rope.apply import apply_qk_norm_rope, apply_rope
from cuseq.rope.table import rope_table

__all__ = ["apply_qk_norm_rope", "apply_rope", "rope_table"]
