"""FLOPs of attention, for torch.utils.flop_counter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cuseq import _C
from cuseq._base.fakes import arguments_of
from cuseq._base.foreign import after_import

_ops = torch.ops.cuseq


def _attention_flops(op: str, given: tuple[Any, ...], named: dict[str, Any], products: int) -> int:
    """Return the FLOPs of attention, counted as torch counts its own.

    A multiply-add counts as two, and each sequence counts as a full square, without causality; of
    a tree each node, and each node's descendants with it; of a rank its pieces with their keys.
    This reads the offsets, which synchronises on a GPU. If they have no values (in tracing), the
    row counts as one sequence.

    Args:
        op: name of the op.
        given, named: its arguments by position and by name.
        products: matrix products of the size of the scores.
    """
    arguments = arguments_of(op, given, named)
    q, v, offsets = (arguments[name] for name in ("q", "v", "cu_seqlens"))
    if offsets.is_meta or isinstance(offsets, FakeTensor):
        pairs = q.shape[0] ** 2
    elif arguments["rank_rows"] is not None:
        pairs = _C.pairs_of_rank(arguments["rank_rows"], arguments["rank_meta"], q)
    else:
        pairs = sum(length * length for length in offsets.diff().tolist())
        if arguments["tree_rows"] is not None:
            pairs += _pairs_with_ancestors(offsets, arguments["tree_rows"])
    heads, head_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    return products * heads * pairs * (head_dim + value_dim)


def _pairs_with_ancestors(cu_seqlens: Tensor, tree_rows: Tensor) -> int:
    """Return the number of pairs of a token and a token of a node above its own; synchronises."""
    lengths = cu_seqlens.diff()
    below = (tree_rows[: lengths.shape[0]] - cu_seqlens[1:]).clamp(min=0)
    return int((lengths.long() * below).sum())


def _forward_flops(*given: Any, out_val: Any = None, **named: Any) -> int:
    return _attention_flops("varlen_attention", given, named, products=2)


def _backward_flops(*given: Any, out_val: Any = None, **named: Any) -> int:
    # The backward computes the scores again, and two products for each of the forward's two.
    return _attention_flops("varlen_attention_backward", given, named, products=5)


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(_ops.varlen_attention, get_raw=True)(_forward_flops)
    counter.register_flop_formula(_ops.varlen_attention_backward, get_raw=True)(_backward_flops)


# The module imports triton: a third of a second and 36 MiB, which few processes need.
after_import("torch.utils.flop_counter", _register)
