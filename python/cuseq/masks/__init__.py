"""Masks of packed rows and of trees."""

from cuseq.masks.rows import (
    as_row_length,
    block_mask,
    block_mask_of,
    block_sizes,
    build_block_mask,
    dense_mask,
    mask_ranges,
)

__all__ = [
    "as_row_length",
    "block_mask",
    "block_mask_of",
    "block_sizes",
    "build_block_mask",
    "dense_mask",
    "mask_ranges",
]
