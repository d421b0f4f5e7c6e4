"""cuseq: tools for packed rows that compute each property of a row once, without a stall."""

from cuseq import _load as _load  # load the compiled libraries before modules that need their ops

# isort: split
from cuseq import _fakes as _fakes
from cuseq import cache, data, distributed, ops
from cuseq._enable import disable, enable
from cuseq._load import build_info
from cuseq._rope_table import rope_table
from cuseq._version import __version__ as __version__
from cuseq.attention import attention_backend, varlen_attention
from cuseq.conv import causal_conv1d
from cuseq.data.collator import PackingCollator
from cuseq.debug.packing_check import check_packing
from cuseq.debug.profile import profile_step
from cuseq.graphs import GraphedStep
from cuseq.layout import PackedLayout
from cuseq.model_head import model_logprobs
from cuseq.pad import pack, run_packed, unpack
from cuseq.reductions import token_logprobs
from cuseq.rope import apply_qk_norm_rope, apply_rope
from cuseq.tree import PackedTree

__all__ = [
    "GraphedStep",
    "PackedLayout",
    "PackedTree",
    "PackingCollator",
    "apply_qk_norm_rope",
    "apply_rope",
    "attention_backend",
    "build_info",
    "cache",
    "causal_conv1d",
    "check_packing",
    "data",
    "disable",
    "distributed",
    "enable",
    "model_logprobs",
    "ops",
    "pack",
    "profile_step",
    "rope_table",
    "run_packed",
    "token_logprobs",
    "unpack",
    "varlen_attention",
]
