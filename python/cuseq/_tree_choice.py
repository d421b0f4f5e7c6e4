"""The choice between attention over a tree depth by depth and in one kernel, by modelled time.

Depth by depth is one call for each depth, next to the call of each node with itself. A deep tree
of short nodes spends its time on launching them: there one kernel with the tree's mask is faster,
flex attention on a GPU, dense scores on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._backends import LEAST_TOKENS_FOR_FLEX, computes_in_half, fits_flex
from cuseq._modes import is_capturing
from cuseq.layout import PackedLayout

_DEPTH: int = _C.TreeMeta.DEPTH
_MEAN_KEYS: int = _C.TreeMeta.MEAN_KEYS
_MEAN_DEPTH: int = _C.TreeMeta.MEAN_DEPTH


class Rates(NamedTuple):
    """Costs of attention on a kind of device, forward and backward."""

    call_us: float  # of a call for a depth, besides its queries and pairs
    query_ps: float  # of a query of a call in a head, for each element of head_dim
    kernel_us: float  # of one kernel, besides its pairs
    pair_ps: float  # of a query-key pair of a head in a call, for each element of head_dim
    handicap: float  # time of a pair in one kernel over that in a call
    counts_hidden: bool  # whether one kernel computes the pairs that the mask hides


# Fitted to `python -m benchmarks tree` on an H200: traces of 4 to 64 turns with 32 to 512 tokens at
# 16 heads of 128. The calls run on FlashAttention 2, whose backward keeps few processors busy where
# keys are few; their times are met within 14 %. Those of one kernel are met within 27 %, but for
# nodes of 32 tokens: flex attention computes whole blocks of a mask, and takes 3 times as long.
GPU = Rates(
    call_us=59, query_ps=46, kernel_us=120, pair_ps=0.03, handicap=1.65, counts_hidden=False
)
# Measured on one core at head_dim 64 in fp32: chains of 4 to 64 nodes with 2 to 16 tokens.
CPU = Rates(call_us=200, query_ps=0, kernel_us=0, pair_ps=600, handicap=1.0, counts_hidden=True)


class Times(NamedTuple):
    """Modelled microseconds of attention, forward and backward."""

    calls: float
    one_kernel: float


def modelled_times(
    depth: int,
    mean_depth: int,
    mean_keys: int,
    tokens: int,
    heads: int,
    dim: int,
    rates: Rates,
) -> Times:
    """Return the modelled times of both ways.

    Args:
        depth: most ancestors of a node.
        mean_depth: ancestors of a token's node, on average.
        mean_keys: keys that a token sees, on average.
        tokens: tokens of the row.
        dim: the larger of head_dim and value_dim.
    """
    query_us = rates.query_ps * heads * dim / 1e6
    pair_us = rates.pair_ps * heads * dim / 1e6
    keys = tokens if rates.counts_hidden else mean_keys
    return Times(
        depth * rates.call_us + tokens * (mean_depth * query_us + mean_keys * pair_us),
        rates.kernel_us + tokens * keys * pair_us * rates.handicap,
    )


def _meta_of(packed: PackedLayout) -> Tensor:
    assert packed.tree is not None
    return packed.tree.meta


def times_of(q: Tensor, v: Tensor, packed: PackedLayout) -> Times:
    """Return the modelled times of attention over a tree; reads numbers on the host only."""
    meta = _meta_of(packed)
    dim = max(q.shape[2], v.shape[2])
    rates = GPU if q.is_cuda else CPU
    depth, mean_depth = int(meta[_DEPTH]), int(meta[_MEAN_DEPTH])
    mean_keys = int(meta[_MEAN_KEYS])
    return modelled_times(depth, mean_depth, mean_keys, q.shape[0], q.shape[1], dim, rates)


def one_kernel_pays(q: Tensor, v: Tensor, packed: PackedLayout, backend: str) -> bool:
    """Return whether attention over a tree runs in one kernel although its calls could.

    Groups, whose depth is 1, always take their two calls. So does compiled code, whose one graph
    serves trees of any depth, and so do calls with a backend of their own.
    """
    if backend != "auto" or is_compiling() or isinstance(q, FakeTensor):
        return False
    if q.dim() != 3 or v.dim() != 3 or int(_meta_of(packed)[_DEPTH]) < 2:
        return False
    if q.is_cuda:
        compiles_in_vain = q.shape[0] < LEAST_TOKENS_FOR_FLEX or is_capturing(q.device)
        if compiles_in_vain or not computes_in_half(q) or not fits_flex(q, v):
            return False
    times = times_of(q, v, packed)
    return times.one_kernel < times.calls


def why_one_kernel(q: Tensor, v: Tensor, packed: PackedLayout) -> str:
    """Return why `one_kernel_pays` said yes."""
    times = times_of(q, v, packed)
    depth = int(_meta_of(packed)[_DEPTH])
    fitted = " on an H200" if q.is_cuda else ""
    return (
        f"one kernel is modelled to take {times.one_kernel:.0f} us{fitted}, the calls of {depth} "
        f"depths {times.calls:.0f}"
    )
