"""Attention over a tree in one kernel, with the tree's mask: flex attention, or dense scores.

Without a window the op computes a tree depth by depth: one call for each depth, next to the call of
each node with itself. A deep tree of short nodes spends its time on launching them. There one
kernel is faster, by modelled time. Windows, which count tokens of a path, need the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.modes import is_capturing
from cuseq.attention import flex
from cuseq.attention.call import Call, as_autocast
from cuseq.layout import PackedLayout
from cuseq.masks.trees import tree_of, visible

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


def takes(call: Call) -> bool:
    """Return whether attention over a tree runs in one kernel."""
    return call.window is not None or one_kernel_pays(call)


def takes_flex(call: Call) -> bool:
    """Return whether that kernel is flex attention.

    Raises:
        ValueError: the call names it, and it cannot take the call.
    """
    return (call.backend == "flex" and flex.takes(call)) or flex.fits(call.q, call.v)


def why(call: Call) -> str:
    """Return why `takes` said yes."""
    if call.window is not None:
        return "its window counts tokens of a path of the tree"
    times = times_of(call.q, call.v, call.packed)
    depth = int(tree_of(call.packed).meta[_DEPTH])
    fitted = " on an H200" if call.q.is_cuda else ""
    return (
        f"one kernel is modelled to take {times.one_kernel:.0f} us{fitted}, the calls of {depth} "
        f"depths {times.calls:.0f}"
    )


# ---------------------------------------------------------------------------------- modelled times


def times_of(q: Tensor, v: Tensor, packed: PackedLayout) -> Times:
    """Return the modelled times of attention over a tree; reads numbers on the host only."""
    meta = tree_of(packed).meta
    dim = max(q.shape[2], v.shape[2])
    rates = GPU if q.is_cuda else CPU
    depth, mean_depth = int(meta[_DEPTH]), int(meta[_MEAN_DEPTH])
    mean_keys = int(meta[_MEAN_KEYS])
    return modelled_times(depth, mean_depth, mean_keys, q.shape[0], q.shape[1], dim, rates)


def one_kernel_pays(call: Call) -> bool:
    """Return whether attention over a tree runs in one kernel although its calls could.

    Groups, whose depth is 1, always take their two calls. So does compiled code, whose one graph
    serves trees of any depth, and so do calls with a backend of their own.
    """
    q, v = call.q, call.v
    if call.backend != "auto" or is_compiling() or isinstance(q, FakeTensor):
        return False
    if q.dim() != 3 or v.dim() != 3 or int(tree_of(call.packed).meta[_DEPTH]) < 2:
        return False
    if q.is_cuda:
        compiles_in_vain = q.shape[0] < flex.LEAST_TOKENS or is_capturing(q.device)
        if compiles_in_vain or not flex.computes_in_half(q) or not flex.fits(q, v):
            return False
    times = times_of(q, v, call.packed)
    return times.one_kernel < times.calls


# ------------------------------------------------------------------------------------------- dense


def attend(call: Call) -> Tensor:
    """Compute attention over a tree with the scores of all pairs in memory."""
    packed = call.packed
    q, k, v = as_autocast(call.q, call.k, call.v)
    offsets = packed.cu_seqlens_static
    is_tail = torch.ops.cuseq.token_metadata(offsets, packed.total_tokens, None)[2]
    tail = is_tail[:, None, None]
    # The tail may hold NaN. Clear it: a weight of zero times NaN is NaN in every row.
    q, k, v = (rows.masked_fill(tail, 0) for rows in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        out = _dense_attention(call._replace(q=q, k=k, v=v), visible(packed, call.window))
    return out.masked_fill(tail, 0).to(q.dtype).contiguous()


def _dense_attention(call: Call, seen: Tensor) -> Tensor:
    """Compute attention in fp32 (fp64 for fp64) with a mask, bool `[tokens, tokens]`."""
    q, k, v, scale = call.q, call.k, call.v, call.scale
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    queries = q.to(wide).transpose(0, 1)
    keys, values = (x.to(wide).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = queries @ keys.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = call.capped(scores).masked_fill(~seen, -torch.inf)
    if call.sinks is not None:
        column = call.sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], 2)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return (weights @ values).transpose(0, 1)
