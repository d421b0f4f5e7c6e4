"""Ops over the lengths of packed sequences: typed functions that check their arguments.

Only `max_seqlen_sync` synchronises. Lengths on the host are always checked. A check of lengths on a
GPU would stall, so there is none by default: the kernels never access memory outside their tensors,
whatever the lengths are. With the environment variable `CUSEQ_CHECK=1` such lengths are checked too
and raise a clear error.

The `cached_*` functions return results from the identity cache. The others compute a new result in
every call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.arguments import as_size, check_tensor
from cuseq.conv import causal_conv1d_fn
from cuseq.masks import block_mask, dense_mask, mask_ranges
from cuseq.packing import shift_left
from cuseq.reductions import segment_last, segment_max, segment_mean, segment_sum

__all__ = [
    "block_mask",
    "cached_cu_seqlens",
    "cached_position_ids",
    "cached_seq_ids",
    "causal_conv1d_fn",
    "cu_seqlens",
    "cu_seqlens_from_position_ids",
    "dense_mask",
    "last_token_indices",
    "lengths_from_padding_mask",
    "mask_ranges",
    "max_seqlen",
    "max_seqlen_sync",
    "position_ids",
    "segment_last",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "seq_ids",
    "shift_left",
]

_ops = torch.ops.cuseq


def cu_seqlens(lengths: Tensor) -> Tensor:
    """Return the offsets of packed sequences: the exclusive prefix sum of their lengths.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence, any device.

    Returns:
        int32 `[n_seqs + 1]` on the device of `lengths`.

    Raises:
        ValueError: a length on the host is negative, the lengths on the host sum to more than
            2^31 - 1, or `lengths` does not have one dimension.
        TypeError: `lengths` has another dtype.

    Examples:
        >>> cuseq.ops.cu_seqlens(torch.tensor([2, 3]))
        tensor([0, 2, 5], dtype=torch.int32)
    """
    check_tensor(lengths, "lengths")
    return _ops.cu_seqlens(lengths)


def max_seqlen(lengths: Tensor) -> Tensor:
    """Return the longest length as a tensor on the device.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        int32 `[]` on the device of `lengths`; 0 if there are no sequences.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.

    Examples:
        >>> cuseq.ops.max_seqlen(torch.tensor([2, 3]))
        tensor(3, dtype=torch.int32)
    """
    check_tensor(lengths, "lengths")
    return _ops.max_seqlen(lengths)


def max_seqlen_sync(lengths: Tensor) -> int:
    """Return the longest length as a Python int. Synchronises when `lengths` is on a GPU.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        The longest length in tokens; 0 if there are no sequences.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.
        RuntimeError: a CUDA graph is being captured, during which nothing can wait.

    Examples:
        >>> cuseq.ops.max_seqlen_sync(torch.tensor([2, 3]))
        3
    """
    check_tensor(lengths, "lengths")
    return _ops.max_seqlen_sync(lengths)


def last_token_indices(lengths: Tensor) -> Tensor:
    """Return the row index of the last token of each sequence, for pooling.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        int32 `[n_seqs]`; -1 for an empty sequence.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.

    Examples:
        >>> cuseq.ops.last_token_indices(torch.tensor([2, 3]))
        tensor([1, 4], dtype=torch.int32)
    """
    check_tensor(lengths, "lengths")
    return _ops.last_token_indices(lengths)


def position_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return the position of each token inside its sequence.

    In the tail (the tokens after the last sequence) positions restart at 0 and count up.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included.

    Returns:
        int32 `[total_tokens]`.

    Raises:
        ValueError, TypeError: as `cu_seqlens`; or lengths on the host sum to more than
            `total_tokens`.

    Examples:
        >>> cuseq.ops.position_ids(torch.tensor([2, 3]), 6)
        tensor([0, 1, 0, 1, 2, 0], dtype=torch.int32)
    """
    check_tensor(lengths, "lengths")
    total_tokens = as_size(total_tokens, "total_tokens", optional=False)
    return _ops.position_ids(lengths, total_tokens)


def seq_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return the index of the sequence of each token; `n_seqs` on the tail.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included.

    Returns:
        int32 `[total_tokens]`, ascending.

    Raises:
        ValueError, TypeError: as `position_ids`.

    Examples:
        >>> cuseq.ops.seq_ids(torch.tensor([2, 3]), 6)
        tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32)
    """
    check_tensor(lengths, "lengths")
    total_tokens = as_size(total_tokens, "total_tokens", optional=False)
    return _ops.seq_ids(lengths, total_tokens)


def lengths_from_padding_mask(mask: Tensor) -> Tensor:
    """Return the number of real tokens in each row of a padded batch.

    Padding may be on the left, on the right or in between; a row of padding has length zero.

    Args:
        mask: bool or integer `[batch, seqlen]`, non-zero where a token is real.

    Returns:
        int32 `[batch]`.

    Raises:
        ValueError, TypeError: `mask` does not have two dimensions, or is floating point.

    Examples:
        >>> cuseq.ops.lengths_from_padding_mask(torch.tensor([[1, 1, 0], [0, 1, 0]]))
        tensor([2, 1], dtype=torch.int32)
    """
    check_tensor(mask, "mask")
    return _ops.lengths_from_padding_mask(mask)


def cu_seqlens_from_position_ids(
    position_ids: Tensor, max_seqs: int | None = None, plane: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the offsets and the number of sequences in rows whose positions restart.

    A sequence starts at the first token of each row and wherever a position is not its predecessor
    plus one. Multimodal positions repeat inside an image and jump after it, so in a plane of them a
    sequence starts where the position drops, or where 0 follows 0. Choose the temporal plane, and
    documents that begin with a text token, because height and width drop inside every image.

    The result has a fixed size and the count stays on the device, so nothing synchronises and no
    shape depends on data.

    Args:
        position_ids: int32 or int64, `[seqlen]`, `[batch, seqlen]` (read as one flat row of all
            tokens) or `[planes, batch, seqlen]`.
        max_seqs: capacity of the result; default the number of tokens.
        plane: which plane to read; required with three dimensions, refused otherwise.

    Returns:
        `cu_seqlens`, int32 `[max_seqs + 1]` with the last offset repeated; and the number of
        sequences, int32 `[1]`, which is above `max_seqs` if they did not all fit.

    Raises:
        ValueError, TypeError: `position_ids` has another shape or dtype, `max_seqs` is below 0, or
            `plane` is missing, not allowed or out of range. The values of positions are not
            checked.

    Examples:
        >>> cuseq.ops.cu_seqlens_from_position_ids(torch.tensor([0, 1, 0, 1, 2]), max_seqs=3)
        (tensor([0, 2, 5, 5], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    check_tensor(position_ids, "position_ids")
    max_seqs, plane = as_size(max_seqs, "max_seqs"), as_size(plane, "plane")
    if type(max_seqs) is int and max_seqs >= 2**31 - 1 and not is_compiling():
        raise ValueError(f"max_seqs must be less than 2^31 - 1, got {max_seqs}")
    return _ops.cu_seqlens_from_position_ids(position_ids, max_seqs, plane)


def cached_cu_seqlens(lengths: Tensor) -> Tensor:
    """Return `cu_seqlens` from the identity cache; computed once while `lengths` lives.

    If `lengths` is edited in place, so that PyTorch's version counter changes, the next call
    computes the offsets again. Inside torch.compile, under a dispatch mode and during CUDA graph
    capture the op without a cache runs instead. Never synchronises.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence, any device.

    Returns:
        int32 `[n_seqs + 1]`, shared by all callers: do not edit it.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> cuseq.ops.cached_cu_seqlens(lengths) is cuseq.ops.cached_cu_seqlens(lengths)
        True
    """
    if is_compiling():
        return _ops.cached_cu_seqlens(lengths)
    return _C.cached_cu_seqlens(lengths)


def cached_position_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return `position_ids` from the identity cache, as `cached_cu_seqlens` does.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included; part of the cache key.

    Returns:
        int32 `[total_tokens]`, shared: do not edit it.

    Raises:
        ValueError, TypeError: as `position_ids`.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> cuseq.ops.cached_position_ids(lengths, 6)
        tensor([0, 1, 0, 1, 2, 0], dtype=torch.int32)
    """
    if is_compiling():
        return _ops.cached_position_ids(lengths, total_tokens)
    return _C.cached_position_ids(lengths, total_tokens)


def cached_seq_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return `seq_ids` from the identity cache; arguments and errors as `cached_position_ids`.

    Returns:
        int32 `[total_tokens]`, shared: do not edit it.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> cuseq.ops.cached_seq_ids(lengths, 6)
        tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32)
    """
    if is_compiling():
        return _ops.cached_seq_ids(lengths, total_tokens)
    return _C.cached_seq_ids(lengths, total_tokens)
