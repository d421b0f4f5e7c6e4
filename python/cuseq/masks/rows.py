"""Masks for attention that takes no `cu_seqlens`.

Every token sees one contiguous range of keys, so two numbers for each token describe a mask. All
masks are computed from those numbers in closed form, without an intermediate of size tokens x
tokens and without synchronisation. Layers should call the layout's methods
(`PackedLayout.dense_mask`, `block_mask`, `xformers_bias`), which make each mask once. The functions
here make a new mask in every call.

A token sees its own sequence: up to itself if causal; with `window`, only the last `window` keys,
itself included (in both directions if not causal). A token of a span also sees the whole span.
Tokens of tail and padding see only themselves, because softmax over no keys gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq._base.arguments import as_int, as_size, check_dtype, check_flag, check_tensor, shown

if TYPE_CHECKING:  # it imports sympy
    from torch.nn.attention.flex_attention import BlockMask

_ops = torch.ops.cuseq

# Of batch, head, query and key: whether the query sees the key.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Numbers and indices of partial blocks, then numbers and indices of full ones, if listed apart.
BlockLists = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def mask_ranges(
    lengths: Tensor,
    total_tokens: int,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Return the range of keys that each token sees: from `first` up to, not including, `end`.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence.
        total_tokens: length of the row in memory, tail included.
        causal: whether a token sees only itself and earlier tokens.
        window: number of keys that a token sees, itself included; with `causal=False` in both
            directions. None means all keys.
        spans: int32 `[n_spans, 2]`, ascending (start, end) pairs in tokens of the row, disjoint or
            repeated, each inside one sequence. The tokens of a span see each other, whatever
            `causal` and `window` are: the prefix of a prefix-LM, the images of Gemma 3.
        cu_seqlens_padded: int32 `[n_seqs + 1]`, where each sequence's segment starts in memory, if
            segments are longer than their sequences. Default: they are not.

    Returns:
        int32 `[2, total_tokens]`, `first` and `end`, in tokens of the row.

    Raises:
        ValueError, TypeError: `window` is below 1, or shapes or dtypes do not fit. Values of
            lengths and spans are checked only on the host.

    Examples:
        >>> cuseq.ops.mask_ranges(torch.tensor([2, 3]), 6)
        tensor([[0, 0, 2, 2, 2, 5],
                [1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    """
    rule = _checked_rule(lengths, total_tokens, causal, window, spans, cu_seqlens_padded)
    return _ops.mask_ranges(*rule)


def dense_mask(
    lengths: Tensor,
    total_tokens: int,
    dtype: torch.dtype = torch.bool,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    row_length: int | None = None,
    finite: bool = False,
) -> Tensor:
    """Return a mask for `scaled_dot_product_attention`; the kernel writes each byte once.

    Lines start at multiples of 16 elements in memory. PyTorch's memory-efficient kernel requires
    this; it then does not copy a mask of the query's dtype. It converts a bool mask in every call.

    Args:
        dtype: bool, where True means visible; or float32, bfloat16, float16 or float64, for a mask
            that is added to the scores (0 where visible).
        row_length: cuts the row into a batch of rows of this many tokens. No sequence may cross the
            end of such a row. Default: one row.
        finite: whether hidden keys get the dtype's lowest finite value instead of -inf.
        lengths, total_tokens, causal, window, spans, cu_seqlens_padded: as in `mask_ranges`.

    Returns:
        `[rows, 1, row_length, row_length]`.

    Raises:
        ValueError, TypeError: as `mask_ranges`; or the mask would take more bytes than the
            environment variable `CUSEQ_DENSE_MASK_MAX_BYTES` allows.

    Examples:
        >>> mask = cuseq.ops.dense_mask(torch.tensor([2, 1]), 3)
        >>> mask[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    rule = _checked_rule(lengths, total_tokens, causal, window, spans, cu_seqlens_padded)
    check_dtype(dtype, "dtype")
    check_flag(finite, "finite")
    return _ops.dense_mask(*rule, as_row_length(row_length), dtype, finite)


def block_mask(
    lengths: Tensor,
    total_tokens: int,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    row_length: int | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Return the mask for `flex_attention` that `create_block_mask` would make, in closed form.

    Args:
        block_size: tokens of a block; one number, or one for queries and one for keys.
        lengths, total_tokens, causal, window, spans, cu_seqlens_padded: as in `mask_ranges`.
        row_length: as in `dense_mask`.

    Returns:
        torch's `BlockMask` of `[rows, 1, row_length, row_length]`, with key-side and query-side
        indices, and with full blocks separate from partial ones. Its `mask_mod` reads where a
        query's keys begin, and reads where they end only if causality does not determine it.

    Raises:
        ValueError, TypeError: as `mask_ranges`; or a block size is below 1.

    Examples:
        >>> mask = cuseq.ops.block_mask(torch.tensor([200, 56]), 256)
        >>> mask.kv_num_blocks + mask.full_kv_num_blocks
        tensor([[[1, 2]]], dtype=torch.int32)
    """
    rule = _checked_rule(lengths, total_tokens, causal, window, spans, cu_seqlens_padded)
    row_length, sizes = as_row_length(row_length), block_sizes(block_size)
    ranges = _ops.mask_ranges(*rule)
    parts = _ops.block_mask(ranges, row_length, *sizes)
    return build_block_mask(ranges, parts, row_length, sizes, causal, spans is not None)


def _checked_rule(
    lengths: Tensor,
    total_tokens: int,
    causal: bool,
    window: int | None,
    spans: Tensor | None,
    cu_seqlens_padded: Tensor | None,
) -> tuple[Any, ...]:
    """Check the types of the arguments that every mask op takes first; return them in order."""
    check_tensor(lengths, "lengths")
    total_tokens = as_size(total_tokens, "total_tokens", optional=False)
    check_flag(causal, "causal")
    if spans is not None:
        check_tensor(spans, "spans")
    if cu_seqlens_padded is not None:
        check_tensor(cu_seqlens_padded, "cu_seqlens_padded")
    window = as_size(window, "window")
    return lengths, total_tokens, False, causal, window, spans, cu_seqlens_padded


def as_row_length(row_length: int | None) -> int | None:
    """Return `row_length` as an int below 2^31, or None; raise if it is neither."""
    row_length = as_size(row_length, "row_length")
    if type(row_length) is int and row_length >= 2**31 and not is_compiling():
        raise ValueError(f"row_length must be at most 2^31 - 1, got {row_length}")
    return row_length


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the number of tokens of a query block and of a key block."""
    if type(block_size) is int and block_size == 128:  # the usual case
        return 128, 128
    both = tuple(block_size) if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(both) != 2:
        raise ValueError(
            f"block_size must be an int, or two for queries and keys, got {shown(block_size)}"
        )
    query_block, key_block = (as_int(size, "block_size", least=1) for size in both)
    if max(query_block, key_block) >= 2**31:
        raise ValueError(f"block_size must be at most 2^31 - 1, got {shown(block_size)}")
    return query_block, key_block


def build_block_mask(
    ranges: Tensor,
    parts: Sequence[Tensor],
    row_length: int | None,
    block_size: tuple[int, int],
    causal: bool,
    has_spans: bool,
) -> BlockMask:
    """Make the BlockMask from ranges and from the output of `torch.ops.cuseq.block_mask`.

    Args:
        ranges: int32 `[2, total_tokens]`, the output of `mask_ranges`.
        parts: the eight tensors that `block_mask` made of the ranges.
        row_length: tokens of each row of the batch; None for one row.
        block_size: tokens of a query block and of a key block.
        causal, has_spans: the rule's. With causality alone the keys of a query end at the query,
            and the mask need not read where.
    """
    tokens = ranges.shape[1] if row_length is None else row_length
    mask_mod = _mask_mod(ranges, row_length, reads_end=not causal or has_spans)
    keys, queries = cast("BlockLists", parts[:4]), cast("BlockLists", parts[4:])
    return block_mask_of(keys, queries, tokens, block_size, mask_mod)


def block_mask_of(
    keys: BlockLists,
    queries: BlockLists,
    tokens: int,
    block_size: tuple[int, int],
    mask_mod: MaskMod,
) -> BlockMask:
    """Make the BlockMask of a row of `tokens` tokens.

    Args:
        keys: the key blocks of each query block.
        queries: the query blocks of each key block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=keys[0],
        kv_indices=keys[1],
        full_kv_num_blocks=keys[2],
        full_kv_indices=keys[3],
        q_num_blocks=queries[0],
        q_indices=queries[1],
        full_q_num_blocks=queries[2],
        full_q_indices=queries[3],
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def _mask_mod(ranges: Tensor, row_length: int | None, reads_end: bool) -> MaskMod:
    first, end = ranges[0], ranges[1]

    if row_length is None and not reads_end:

        def causal_row(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key <= query)

        return causal_row

    if row_length is None:

        def row(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key < end[query])

        return row

    def rows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        begin = batch * row_length
        token = begin + query
        return (key + begin >= first[token]) & (key + begin < end[token])

    return rows
