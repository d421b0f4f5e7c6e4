"""The choice between attention over a tree depth by depth and in one kernel, by modelled time.

Depth by depth is one call for each depth, next to the call of each node with itself. A deep tree
of short nodes spends its time on launching them: there one kernel with the tree's mask is faster,
flex attention on a GPU, dense scores on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._backends import LEAST_TOKENS_FOR_FLEX, computes_in_half, fits_flex
from cuseq._modes import is_capturing
from cuseq.layout import PackedLayout

_DEPTH: int = _C.TreeMeta.DEPTH
_MEAN_KEYS: int = _C.TreeMeta.MEAN_KEYS


class Rates(NamedTuple):
    """Costs of attention on a kind of device, forward and backward."""

    call_us: float  # of a call for a depth, besides its pairs
    kernel_us: float  # of one kernel more than of a call, besides its pairs
    pair_ps: float  # of one query-key pair of a head, for each element of head_dim
    handicap: float  # time of a pair in one kernel over that in a call
    counts_hidden: bool  # whether one kernel computes the pairs that the mask hides


# On a GPU a call and the sums after it are about ten launches, at ten microseconds of the host; an
# eager call of flex attention runs compiled code and its guards. Neither was measured on trees yet.
# A pair is 14 * head_dim operations at 240 TFLOP/s: FlashAttention 2 on an H200 with 32,768
# tokens in 4 documents, where flex is faster; the handicap is that of short documents.
GPU = Rates(call_us=100, kernel_us=300, pair_ps=0.06, handicap=1.05, counts_hidden=False)
# Measured on one core at head_dim 64 in fp32: chains of 4 to 64 nodes with 2 to 16 tokens.
CPU = Rates(call_us=200, kernel_us=0, pair_ps=600, handicap=1.0, counts_hidden=True)


class Times(NamedTuple):
    """Modelled microseconds of attention, forward and backward."""

    calls: float
    one_kernel: float


def modelled_times(
    depth: int, mean_keys: int, tokens: int, heads: int, dim: int, rates: Rates
) -> Times:
    """Return the modelled times of both ways.

    Args:
        depth: most ancestors of a node.
        mean_keys: keys that a token sees, on average.
        tokens: tokens of the row.
        dim: the larger of head_dim and value_dim.
    """
    pair_us = rates.pair_ps * heads * dim / 1e6
    keys = tokens if rates.counts_hidden else mean_keys
    return Times(
        depth * rates.call_us + tokens * mean_keys * pair_us,
        rates.kernel_us + tokens * keys * pair_us * rates.handicap,
    )


def times_of(q: Tensor, v: Tensor, packed: PackedLayout) -> Times:
    """Return the modelled times of attention over a tree; reads numbers on the host only."""
    meta = cast("Tensor", packed.state.tree_meta)
    dim = max(q.shape[2], v.shape[2])
    rates = GPU if q.is_cuda else CPU
    return modelled_times(
        int(meta[_DEPTH]), int(meta[_MEAN_KEYS]), q.shape[0], q.shape[1], dim, rates
    )


def one_kernel_pays(q: Tensor, v: Tensor, packed: PackedLayout, backend: str) -> bool:
    """Return whether attention over a tree runs in one kernel although its calls could.

    Groups, whose depth is 1, always take their two calls. So does compiled code, whose one graph
    serves trees of any depth, and so do calls with a backend of their own.
    """
    if backend != "auto" or is_compiling() or isinstance(q, FakeTensor):
        return False
    if q.dim() != 3 or v.dim() != 3 or int(cast("Tensor", packed.state.tree_meta)[_DEPTH]) < 2:
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
    depth = int(cast("Tensor", packed.state.tree_meta)[_DEPTH])
    return (
        f"one kernel is modelled to take {times.one_kernel:.0f} us, the calls of {depth} depths "
        f"{times.calls:.0f}"
    )
