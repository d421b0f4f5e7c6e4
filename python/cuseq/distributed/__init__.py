"""Packed rows over several ranks: context parallelism, and rows of equal length."""

from cuseq.distributed.context_parallel import ContextParallel
from cuseq.distributed.equal_rows import equalize_tokens
from cuseq.distributed.parts import cp_join, cp_partition
from cuseq.distributed.plan import ContextParallelPlan, cp_plan

__all__ = [
    "ContextParallel",
    "ContextParallelPlan",
    "cp_join",
    "cp_partition",
    "cp_plan",
    "equalize_tokens",
]
