"""Typed functions over `torch.ops.cuseq`.

None of them synchronises, except the one whose name says so. Lengths on the host are always
checked; lengths on a GPU cannot be without a stall, so kernels stay inside their tensors whatever
they hold, and the environment variable `CUSEQ_CHECK=1` pays for a check with a clear error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuseq import _C
from cuseq.masks import block_mask as block_mask
from cuseq.masks import dense_mask as dense_mask
from cuseq.masks import mask_ranges as mask_ranges

_ops = torch.ops.cuseq


def cu_seqlens(lengths: Tensor) -> Tensor:
    """Offsets of packed sequences: the exclusive prefix sum of their lengths.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence, any device.

    Returns:
        int32 `[n_seqs + 1]` on the device of `lengths`.

    Raises:
        ValueError: a length on the host is negative, or they sum to more than 2^31 - 1; `lengths`
            has another number of dimensions.
        TypeError: `lengths` is of another dtype.

    Example:
        >>> cuseq.ops.cu_seqlens(torch.tensor([2, 3]))
        tensor([0, 2, 5], dtype=torch.int32)
    """
    return _ops.cu_seqlens(lengths)


def max_seqlen(lengths: Tensor) -> Tensor:
    """The longest length, left on the device.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        int32 `[]` on the device of `lengths`; 0 when there is no sequence.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.
    """
    return _ops.max_seqlen(lengths)


def max_seqlen_sync(lengths: Tensor) -> int:
    """The longest length as a Python int. Synchronises when `lengths` lies on a GPU.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        Tokens; 0 when there is no sequence.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.
        RuntimeError: a CUDA graph is being captured, which cannot wait.
    """
    return _ops.max_seqlen_sync(lengths)


def last_token_indices(lengths: Tensor) -> Tensor:
    """Where the last token of each sequence lies in the packed row, for pooling.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.

    Returns:
        int32 `[n_seqs]`; -1 for a sequence of length zero, which has no token.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.
    """
    return _ops.last_token_indices(lengths)


def position_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Position of each token inside its sequence.

    Tokens after the last sequence, the tail, are one segment of their own and restart at 0.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included.

    Returns:
        int32 `[total_tokens]`.

    Raises:
        ValueError, TypeError: as `cu_seqlens`; or lengths on the host sum to more than
            `total_tokens`.

    Example:
        >>> cuseq.ops.position_ids(torch.tensor([2, 3]), 6)
        tensor([0, 1, 0, 1, 2, 0], dtype=torch.int32)
    """
    return _ops.position_ids(lengths, total_tokens)


def seq_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """Index of the sequence that owns each token; `n_seqs` on the tail.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included.

    Returns:
        int32 `[total_tokens]`, ascending.

    Raises:
        ValueError, TypeError: as `position_ids`.

    Example:
        >>> cuseq.ops.seq_ids(torch.tensor([2, 3]), 6)
        tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32)
    """
    return _ops.seq_ids(lengths, total_tokens)


def lengths_from_padding_mask(mask: Tensor) -> Tensor:
    """Number of real tokens in each row of a padded batch.

    Padding may be on the left, on the right or in between; a row of padding has length zero.

    Args:
        mask: bool or integer `[batch, seqlen]`, non-zero where a token is real.

    Returns:
        int32 `[batch]`.

    Raises:
        ValueError, TypeError: `mask` has another number of dimensions, or is floating point.
    """
    return _ops.lengths_from_padding_mask(mask)


def cu_seqlens_from_position_ids(
    position_ids: Tensor, max_seqs: int | None = None, plane: int | None = None
) -> tuple[Tensor, Tensor]:
    """Finds the sequences of packed rows from where their positions restart.

    A sequence starts at each row's first token and wherever a position is not the one before it
    plus one. In a plane of multimodal positions, which repeat inside an image and jump behind it, a
    sequence starts where the position drops or is 0 after 0. So choose the temporal plane, of
    documents that begin with a text token: heights and widths drop inside every image.

    The result has a fixed size and the count stays on the device, so nothing synchronises and no
    shape depends on data.

    Args:
        position_ids: int32 or int64, `[seqlen]`, `[batch, seqlen]` (one flat row of all tokens
            results) or `[planes, batch, seqlen]`.
        max_seqs: capacity of the result; default the number of tokens.
        plane: which plane to read; needed with three dimensions, refused otherwise.

    Returns:
        `cu_seqlens`, int32 `[max_seqs + 1]` with the last offset repeated, and the number of
        sequences, int32 `[1]`, which is above `max_seqs` where they did not all fit.

    Raises:
        ValueError, TypeError: `position_ids` of another shape or dtype, `max_seqs` below 0, or
            `plane` missing, refused or out of range. What positions say is not checked.

    Example:
        >>> cuseq.ops.cu_seqlens_from_position_ids(torch.tensor([0, 1, 0, 1, 2]), max_seqs=3)
        (tensor([0, 2, 5, 5], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    return _ops.cu_seqlens_from_position_ids(position_ids, max_seqs, plane)


def cached_cu_seqlens(lengths: Tensor) -> Tensor:
    """`cu_seqlens` through the identity cache: computed once for as long as `lengths` lives.

    Editing `lengths` in place, by anything that PyTorch's version counter sees, computes it anew.
    Inside torch.compile, under a dispatch mode or while a CUDA graph is captured the cache is left
    alone and the pure op runs. Never synchronises.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens of each sequence, any device.

    Returns:
        int32 `[n_seqs + 1]`, shared by all who ask for these lengths: do not edit it.

    Raises:
        ValueError, TypeError: as `cu_seqlens`.
    """
    if torch.compiler.is_compiling():
        return _ops.cached_cu_seqlens(lengths)
    return _C.cached_cu_seqlens(lengths)


def cached_position_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """`position_ids` through the identity cache, as `cached_cu_seqlens`.

    Args:
        lengths: int32 or int64 `[n_seqs]`, tokens.
        total_tokens: length of the row in memory, tail included; another one is another entry.

    Returns:
        int32 `[total_tokens]`, shared: do not edit it.

    Raises:
        ValueError, TypeError: as `position_ids`.
    """
    if torch.compiler.is_compiling():
        return _ops.cached_position_ids(lengths, total_tokens)
    return _C.cached_position_ids(lengths, total_tokens)


def cached_seq_ids(lengths: Tensor, total_tokens: int) -> Tensor:
    """`seq_ids` through the identity cache; arguments and errors as for `cached_position_ids`.

    Returns:
        int32 `[total_tokens]`, shared: do not edit it.
    """
    if torch.compiler.is_compiling():
        return _ops.cached_seq_ids(lengths, total_tokens)
    return _C.cached_seq_ids(lengths, total_tokens)
