"""Masks for attention that takes no `cu_seqlens`.

Every token sees keys that lie side by side, so a mask is two numbers for each token and everything
here is written from those in closed form: no intermediate of tokens x tokens, no synchronisation.
Layers should ask the layout (`PackedLayout.dense_mask`, `block_mask`, `xformers_bias`), which makes
each mask once; these functions make it anew in every call.

A token sees its own sequence: up to itself if causal, with `window` only the last keys of that
many, itself included (to both sides if not causal). A token of a span sees the whole span as well.
Tail and padding see themselves alone, since a row that sees nothing turns into NaN in softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask

from cuseq._arguments import as_int, as_size, check_dtype, check_flag, check_tensor

_ops = torch.ops.cuseq


def mask_ranges(
    lengths: Tensor,
    total_tokens: int,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Return the keys that each token sees: those from `first` up to, not including, `end`.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence.
        total_tokens: length of the row in memory, tail included.
        causal: whether a token sees only itself and what comes before it.
        window: keys that a token sees, itself included; with `causal=False` to both sides. None for
            all.
        spans: int32 `[n_spans, 2]`, (start, end) in tokens of the row, ascending, apart from each
            other and each inside one sequence, whose tokens see each other whatever `causal` and
            `window` say: the prefix of a prefix-LM, the images of Gemma 3.
        cu_seqlens_padded: int32 `[n_seqs + 1]`, where each sequence's segment starts in memory, if
            segments are longer than their sequences. Default: they are not.

    Returns:
        int32 `[2, total_tokens]`, `first` and `end`, in tokens of the row.

    Raises:
        ValueError, TypeError: window below 1, or shapes and dtypes do not fit; for values on the
            host also lengths and spans that do not.

    Example:
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
    """Return a mask for `scaled_dot_product_attention`, each byte written once.

    Lines start at multiples of 16 elements in memory, as PyTorch's memory-efficient kernel wants
    them: with the query's dtype it copies nothing. A bool mask it converts in every call.

    Args:
        dtype: bool, where True is visible, or float32, bfloat16, float16 or float64, to be added to
            the scores: 0 where visible.
        row_length: cuts the row into rows of that many tokens, a batch; no sequence may cross an
            end. Default one row.
        finite: hides with the dtype's lowest finite value instead of -inf.
        lengths, total_tokens, causal, window, spans, cu_seqlens_padded: as in `mask_ranges`.

    Returns:
        `[rows, 1, row_length, row_length]`.

    Raises:
        ValueError, TypeError: as `mask_ranges`; or the mask would take more bytes than the
            environment variable `CUSEQ_DENSE_MASK_MAX_BYTES` allows.

    Example:
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
    """Return a mask for `flex_attention`, equal to `create_block_mask`'s, without its search.

    Args:
        block_size: tokens of a block, for queries and keys, or of each.
        lengths, total_tokens, causal, window, spans, cu_seqlens_padded: as in `mask_ranges`.
        row_length: as in `dense_mask`.

    Returns:
        torch's `BlockMask` of `[rows, 1, row_length, row_length]`, key side and query side, whole
        blocks apart from those seen in part. Its `mask_mod` reads where a query's keys begin, and
        where they end if causality does not say it.

    Raises:
        ValueError, TypeError: as `mask_ranges`; a block without tokens.

    Example:
        >>> mask = cuseq.ops.block_mask(torch.tensor([200, 56]), 256)
        >>> mask.kv_num_blocks + mask.full_kv_num_blocks
        tensor([[[1, 2]]], dtype=torch.int32)
    """
    rule = _checked_rule(lengths, total_tokens, causal, window, spans, cu_seqlens_padded)
    row_length, sizes = as_row_length(row_length), block_sizes(block_size)
    ranges = _ops.mask_ranges(*rule)
    parts = _ops.block_mask(ranges, row_length, *sizes)
    return build_block_mask(ranges, parts, row_length, sizes, not causal or spans is not None)


def _checked_rule(
    lengths: Tensor,
    total_tokens: int,
    causal: bool,
    window: int | None,
    spans: Tensor | None,
    cu_seqlens_padded: Tensor | None,
) -> tuple[Any, ...]:
    """Return the arguments that every mask op takes first, each of the right type."""
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
    """Return the tokens of each row of a batch, at most those that a row can have."""
    row_length = as_size(row_length, "row_length")
    if type(row_length) is int and row_length >= 2**31 and not is_compiling():
        raise ValueError(f"row_length must be at most 2^31 - 1, got {row_length}")
    return row_length


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the tokens of a block of queries and of a block of keys."""
    both = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(both) != 2:
        raise ValueError(
            f"block_size must be an int or two, of queries and of keys, got {block_size!r}"
        )
    query_block, key_block = (as_int(size, "block_size", least=1) for size in both)
    if max(query_block, key_block) >= 2**31:
        raise ValueError(f"block_size must be at most 2^31 - 1, got {block_size!r}")
    return query_block, key_block


def build_block_mask(
    ranges: Tensor,
    parts: Sequence[Tensor],
    row_length: int | None,
    block_size: tuple[int, int],
    reads_end: bool,
) -> BlockMask:
    """The BlockMask of ranges and of the tensors that `torch.ops.cuseq.block_mask` made of them.

    Where keys end has to be read only if causality does not say it.
    """
    tokens = ranges.shape[1] if row_length is None else row_length
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=parts[0],
        kv_indices=parts[1],
        full_kv_num_blocks=parts[2],
        full_kv_indices=parts[3],
        q_num_blocks=parts[4],
        q_indices=parts[5],
        full_q_num_blocks=parts[6],
        full_q_indices=parts[7],
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(ranges, row_length, reads_end),
    )


def _mask_mod(ranges: Tensor, row_length: int | None, reads_end: bool):
    first, end = ranges[0], ranges[1]

    if row_length is None and not reads_end:

        def causal_row(batch, head, query, key):
            return (key >= first[query]) & (key <= query)

        return causal_row

    if row_length is None:

        def row(batch, head, query, key):
            return (key >= first[query]) & (key < end[query])

        return row

    def rows(batch, head, query, key):
        begin = batch * row_length
        token = begin + query
        return (key + begin >= first[token]) & (key + begin < end[token])

    return rows
