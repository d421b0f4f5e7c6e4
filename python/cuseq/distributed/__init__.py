"""Packed rows over several ranks: context parallelism, rows of equal length, equal options."""

from cuseq.distributed.context_parallel import ContextParallel
from cuseq.distributed.equal_rows import equalize_tokens
from cuseq.distributed.parts import cp_join, cp_partition
from cuseq.distributed.plan import ContextParallelPlan, cp_plan
from cuseq.distributed.same_facts import check_same_on_ranks

__all__ = [
    "ContextParallel",
    "ContextParallelPlan",
    "check_same_on_ranks",
    "cp_join",
    "cp_partition",
    "cp_plan",
    "equalize_tokens",
]
