"""Masks that a packed layout makes for other attention implementations."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, masks
from cuseq._base.arguments import as_window, check_dtype, check_flag, shown
from cuseq._base.modes import is_capturing, outside_inference_mode
from cuseq.cache import remember
from cuseq.layout.derived import keep
from cuseq.layout.spans import Spans, checked_spans
from cuseq.masks import trees, xformers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from cuseq.layout.packed import PackedLayout

_ops = torch.ops.cuseq

_SIZES = (128, 128)  # tokens of a block of the masks that layouts hold


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
    hold: bool,
) -> BlockMask:
    """Return `PackedLayout.block_mask`."""
    check_flag(causal, "causal")
    check_flag(hold, "hold")
    sizes = masks.block_sizes(block_size)
    if hold:
        return _held_block_mask(packed, causal, window, spans, row_length, sizes)
    facts = _facts(packed, causal, window, spans, row_length)
    held = packed._derived.block_masks
    if held and is_compiling() and spans is None and row_length is None and sizes == _SIZES:
        found = held.get((causal, facts.window))
        if found is not None:
            return found
    if facts.is_tree:
        return trees.block_mask(packed, facts.window, sizes)
    offsets, tokens = facts.offsets, facts.total_tokens
    if is_compiling():
        return _row_mask(facts, causal, sizes)
    build = masks.build_block_mask
    return _C.cached_block_mask(offsets, tokens, causal, *facts.rule, *sizes, build)


def _row_mask(facts: _Facts, causal: bool, sizes: tuple[int, int]) -> BlockMask:
    """Make a mask that is in no cache."""
    ranges = _ops.mask_ranges(facts.offsets, facts.total_tokens, True, causal, *facts.rule[:3])
    parts = _ops.block_mask(ranges, facts.row_length, *sizes)
    has_spans = facts.spans is not None
    return masks.build_block_mask(ranges, parts, facts.row_length, sizes, causal, has_spans)


def _held_block_mask(
    packed: PackedLayout,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    row_length: int | None,
    sizes: tuple[int, int],
) -> BlockMask:
    """Make a mask that compiled code takes as an input instead of making its own."""
    if spans is not None or row_length is not None or sizes != _SIZES:
        raise ValueError(
            "hold=True keeps masks without spans and row_length, with blocks of 128, got "
            f"spans={shown(spans)}, row_length={row_length} and block_size={sizes}"
        )
    if is_compiling():
        raise ValueError("hold=True must be given outside compiled code, which takes what is held")
    facts = _facts(packed, causal, window, None, None)
    held, key = packed._derived.block_masks, (causal, facts.window)
    if key in held:
        return held[key]
    with outside_inference_mode():  # a backward saves it
        mask = _uncached(packed, facts, causal)
    if is_capturing(packed.device):  # nothing has run yet that could be held
        return mask
    return keep(held, key, mask)


def _uncached(packed: PackedLayout, facts: _Facts, causal: bool) -> BlockMask:
    if facts.is_tree:
        return trees.make_block_mask(packed, facts.window, _SIZES)
    return _row_mask(facts, causal, _SIZES)


def refill_block_masks(packed: PackedLayout) -> None:
    """Write a layout's row into the masks that it holds, whose tensors CUDA graphs may read."""
    for (causal, window), mask in packed._derived.block_masks.items():
        fresh = _uncached(packed, _facts(packed, causal, window, None, None), causal)
        for old, new in zip(_tensors_of(mask), _tensors_of(fresh), strict=True):
            old.copy_(new)


def _tensors_of(mask: BlockMask) -> list[Tensor]:
    """Return the tensors of a mask, those that its `mask_mod` reads too."""
    closure = getattr(mask.mask_mod, "__closure__", None) or ()
    read = (cell.cell_contents for cell in closure)
    return [*trees.tensors_of(mask), *(value for value in read if isinstance(value, Tensor))]


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
