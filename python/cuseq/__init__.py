"""cuseq: tools for packed rows that compute each property of a row once, without a stall."""

from cuseq._base import load as _load  # noqa: F401  first: other modules need its libraries' ops

# isort: split
from cuseq import cache, data, distributed, ops, vision
from cuseq._base import fakes as _fakes  # noqa: F401
from cuseq._base.load import build_info
from cuseq._version import __version__ as __version__
from cuseq.attention import attention_backend, varlen_attention
from cuseq.attention.warmup import attention_warmup
from cuseq.conv import causal_conv1d
from cuseq.data.collator import PackingCollator
from cuseq.debug.packing_check import check_packing
from cuseq.debug.profile import profile_step
from cuseq.graphs import GraphedStep
from cuseq.integrations.enable import disable, enable
from cuseq.layout import PackedLayout
from cuseq.packing import pack, run_packed, unpack
from cuseq.reductions import model_logprobs, token_logprobs
from cuseq.rope import apply_qk_norm_rope, apply_rope, rope_table
from cuseq.trees import PackedTree

__all__ = [
    "GraphedStep",
    "PackedLayout",
    "PackedTree",
    "PackingCollator",
    "apply_qk_norm_rope",
    "apply_rope",
    "attention_backend",
    "attention_warmup",
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
    "vision",
]
