"""Masks of trees: a token sees its path, and a window counts tokens of the path.

In a row that holds a tree, the tokens that see a key lie side by side: the key itself, the rest of
its node, and the node's descendants. So a mask is one number per key, where they end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.modes import is_capturing
from cuseq.cache import remember
from cuseq.masks.rows import block_mask_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from cuseq.layout import PackedLayout, Tree

_ops = torch.ops.cuseq

_LONGEST_PATH: int = _C.TreeMeta.LONGEST_PATH


def tree_of(packed: PackedLayout) -> Tree:
    """Return the tree of a layout that has one."""
    return cast("Tree", packed.tree)


def hides_nothing(packed: PackedLayout, window: int) -> bool:
    """Return whether every path of a tree is within a window. Never waits.

    A CUDA graph replays other trees, of which only the row's length is known. Compiled code serves
    other rows too.
    """
    if is_compiling():
        return False
    if packed.is_replayed or is_capturing(packed.device):
        return window >= packed.total_tokens
    return window >= int(tree_of(packed).meta[_LONGEST_PATH])


def ranges_of_keys(packed: PackedLayout) -> Tensor:
    """Return the queries that see each key, int32 `[2, total_tokens]`: from `first` up to `end`.

    A token of the tail is seen by itself alone.
    """
    if is_compiling():
        return _ranges_of_keys(packed)
    return remember(packed.row.lengths, "tree_ranges", lambda: _ranges_of_keys(packed))


def _ranges_of_keys(packed: PackedLayout) -> Tensor:
    rows, offsets = tree_of(packed).rows, packed.cu_seqlens_static
    _, nodes, is_tail = _ops.token_metadata(offsets, packed.total_tokens, None)
    tokens = torch.arange(packed.total_tokens, dtype=torch.int32, device=rows.device)
    ends = rows.index_select(0, nodes.clamp(max=offsets.shape[0] - 2))
    return torch.stack([tokens, torch.where(is_tail, tokens + 1, ends)])


def visible(packed: PackedLayout, window: int | None) -> Tensor:
    """Return which keys each token sees, bool `[total_tokens, total_tokens]`."""
    first, end = ranges_of_keys(packed)
    query = first.unsqueeze(1)
    seen = (first <= query) & (query < end)
    if window is not None:
        positions = tree_of(packed).positions
        seen &= positions.unsqueeze(1) - positions < window
    return seen


def dense_mask(
    packed: PackedLayout, dtype: torch.dtype, window: int | None, finite: bool
) -> Tensor:
    """Return `PackedLayout.dense_mask` of a tree."""

    def make() -> Tensor:
        offsets, tokens = packed.cu_seqlens_static, packed.total_tokens
        # The op checks the size and aligns the lines; the values are written here.
        mask = _ops.dense_mask(offsets, tokens, True, True, None, None, None, None, dtype, finite)
        seen = visible(packed, window)
        if dtype == torch.bool:
            return mask.copy_(seen)
        hidden = torch.finfo(dtype).min if finite else -torch.inf
        return mask.zero_().masked_fill_(~seen, hidden)

    if is_compiling():
        return make()
    return remember(packed.row.lengths, "tree_mask", make, dtype, window, finite)


def block_mask(packed: PackedLayout, window: int | None, sizes: tuple[int, int]) -> BlockMask:
    """Return `PackedLayout.block_mask` of a tree.

    Args:
        sizes: tokens of a query block and of a key block.
    """
    if is_compiling():
        return make_block_mask(packed, window, sizes)
    return remember(
        packed.row.lengths,
        "tree_block_mask",
        lambda: make_block_mask(packed, window, sizes),
        window,
        *sizes,
        tensors=tensors_of,
    )


def make_block_mask(packed: PackedLayout, window: int | None, sizes: tuple[int, int]) -> BlockMask:
    """Make the `PackedLayout.block_mask` of a tree, which is in no cache."""
    ranges = ranges_of_keys(packed)
    end, positions = ranges[1], tree_of(packed).positions
    query_block, key_block = sizes
    # The op takes the keys of each query. Given the queries of each key, it returns the mask with
    # both sides exchanged.
    of_keys = _ops.block_mask(ranges, None, key_block, query_block)
    queries, keys = of_keys[:4], of_keys[4:]

    def path(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    if window is None:
        return block_mask_of(keys, queries, packed.total_tokens, sizes, path)
    reach = window

    def windowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = positions[query] - positions[key] < reach
        return (key <= query) & (query < end[key]) & near

    # A block that is full without the window may be partial with it.
    keys, queries = (*_one_list(keys), None, None), (*_one_list(queries), None, None)
    return block_mask_of(keys, queries, packed.total_tokens, sizes, windowed)


def _one_list(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return counts and ascending indices of partial and full blocks together."""
    counts, indices, full_counts, full_indices = parts
    blocks = indices.shape[-1]
    listed = torch.arange(blocks, device=indices.device)
    seen = indices.new_zeros(*indices.shape[:-1], blocks + 1)
    for number, which in ((counts, indices), (full_counts, full_indices)):
        inside = torch.where(listed < number.unsqueeze(-1), which, blocks).long()
        seen.scatter_(-1, inside, 1)
    seen = seen[..., :blocks]
    order = seen.argsort(dim=-1, descending=True, stable=True).to(indices.dtype)
    return seen.sum(-1, dtype=counts.dtype), order.contiguous()


def tensors_of(mask: BlockMask) -> list[Tensor]:
    """Return the tensors of a mask's block lists."""
    return [value for value in mask.as_tuple() if isinstance(value, Tensor)]
