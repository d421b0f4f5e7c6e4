"""Masks that a packed layout makes for other attention implementations."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, masks
from cuseq._base.arguments import as_window, check_dtype, check_flag, shown
from cuseq.cache import remember
from cuseq.layout.spans import Spans, checked_spans
from cuseq.masks import trees, xformers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from cuseq.layout.packed import PackedLayout

_ops = torch.ops.cuseq


class _Facts(NamedTuple):
    """The tensors and checked arguments that all masks of a row take."""

    offsets: Tensor
    total_tokens: int
    window: int | None
    spans: Tensor | None
    padded: Tensor | None
    row_length: int | None
    is_tree: bool  # whose masks take a window alone

    @property
    def rule(self) -> tuple[int | None, Tensor | None, Tensor | None, int | None]:
        """What the ops of masks take after `causal`."""
        return self[2:6]


def dense_mask(
    packed: PackedLayout,
    dtype: torch.dtype,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    row_length: int | None,
    finite: bool,
) -> Tensor:
    """Return `PackedLayout.dense_mask`."""
    check_dtype(dtype, "dtype")
    check_flag(causal, "causal")
    check_flag(finite, "finite")
    facts = _facts(packed, causal, window, spans, row_length)
    if facts.is_tree:
        return trees.dense_mask(packed, dtype, facts.window, finite)
    offsets, tokens = facts.offsets, facts.total_tokens
    if is_compiling():
        return _ops.cached_dense_mask(offsets, tokens, True, causal, *facts.rule, dtype, finite)
    return _C.cached_dense_mask(offsets, tokens, causal, *facts.rule, dtype, finite)


def block_mask(
    packed: PackedLayout,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    row_length: int | None,
    block_size: int | tuple[int, int],
) -> BlockMask:
    """Return `PackedLayout.block_mask`."""
    check_flag(causal, "causal")
    sizes = masks.block_sizes(block_size)
    facts = _facts(packed, causal, window, spans, row_length)
    if facts.is_tree:
        return trees.block_mask(packed, facts.window, sizes)
    offsets, tokens = facts.offsets, facts.total_tokens
    if is_compiling():
        ranges = _ops.cached_mask_ranges(offsets, tokens, True, causal, *facts.rule[:3])
        parts = _ops.block_mask(ranges, facts.row_length, *sizes)
        has_spans = facts.spans is not None
        return masks.build_block_mask(ranges, parts, facts.row_length, sizes, causal, has_spans)
    build = masks.build_block_mask
    return _C.cached_block_mask(offsets, tokens, causal, *facts.rule, *sizes, build)


def xformers_bias(packed: PackedLayout, window: int | None) -> Any:
    """Return `PackedLayout.xformers_bias`."""
    packed._check_unedited()
    packed._check_whole()
    window = as_window(window)
    bias, _ = remember(
        packed.row.lengths,
        "xformers_bias",
        lambda: xformers.causal_bias(packed, window),
        window,
        tensors=itemgetter(1),
    )
    return bias


def _facts(
    packed: PackedLayout,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    row_length: int | None,
) -> _Facts:
    """Check the arguments that all masks share; return them with the layout's tensors."""
    packed._check_unedited()
    if window is not None:
        window = as_window(window)
    if is_tree := packed.is_tree:
        if not causal or spans is not None or row_length is not None:
            raise ValueError(
                "a tree's mask must be causal, without spans and row_length, got causal="
                f"{causal}, spans={shown(spans)} and row_length={row_length}"
            )
    elif spans is not None or row_length is not None:
        row_length = masks.as_row_length(row_length)
        spans = checked_spans(packed, spans, row_length)
    row, padded = packed.row, packed.cu_seqlens_padded_static
    return _Facts(
        row.cu_seqlens_static, row.total_tokens, window, spans, padded, row_length, is_tree
    )
