"""Masks for labels at the boundaries of packed sequences, under unsloth's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_tensor
from cuseq._base.labels import IGNORE_INDEX
from cuseq.integrations.unsloth._layouts import as_integers, layout_of_lengths


def mask_packed_sequence_boundaries(
    shift_labels: Tensor,
    seq_lengths: Sequence[int] | Tensor | None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> bool:
    """Mask, in place, the shifted label at the last token of each sequence.

    That token would otherwise predict the first token of the next sequence.

    Args:
        shift_labels: integers of any shape, already shifted. They are written in place, so they
            must be viewable as one row.
        seq_lengths: tokens of each sequence; a tensor, a list or nested lists. Sequences that end
            beyond the labels are skipped.
        ignore_index: the value to write.

    Returns:
        Whether a sequence ends within the labels.

    Raises:
        TypeError: `shift_labels` is not a tensor, or the lengths or `ignore_index` are not
            integers.
        ValueError: the labels cannot be viewed as one row, or a length is negative.

    For lengths on a GPU, this waits for one small copy, once for each tensor.

    Examples:
        >>> from cuseq.integrations.unsloth import mask_packed_sequence_boundaries
        >>> labels = torch.tensor([1, 2, 3, 4, 5])
        >>> mask_packed_sequence_boundaries(labels, [2, 3]), labels.tolist()
        (True, [1, -100, 3, 4, -100])
    """
    check_tensor(shift_labels, "shift_labels")
    ignore_index = as_int(ignore_index, "ignore_index")
    lengths = _as_tensor(seq_lengths)
    if lengths is None:
        return False
    packed = layout_of_lengths(lengths, "seq_lengths")
    ends = torch.ops.cuseq.cu_seqlens(packed.lengths_on_host())[1:]
    first, last = int((ends == 0).sum()), int((ends <= shift_labels.numel()).sum())
    if last == 0:
        return False
    ends = packed.to(shift_labels.device).cu_seqlens[1:][first:last]
    _as_row(shift_labels).index_fill_(0, ends.long() - 1, ignore_index)
    return True


def mask_packed_boundary_labels(
    labels: Tensor | None,
    seq_lengths: Sequence[int] | Tensor | None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor | None:
    """Return labels, for a loss that shifts them itself, with each sequence's first label masked.

    Args:
        labels: integers of any shape and strides; not written to.
        seq_lengths: tokens of each sequence; a tensor, a list or nested lists. For a sequence that
            ends at or beyond the end of the labels, the first label of the row is masked instead,
            which a loss that shifts does not read.
        ignore_index: the value of masked labels.

    Returns:
        New labels, or `labels` itself if there is nothing to mask.

    Raises:
        TypeError: the lengths or `ignore_index` are not integers.
        ValueError: a length is negative.

    Never synchronises if the lengths are on the host or on the device of the labels.

    Examples:
        >>> from cuseq.integrations.unsloth import mask_packed_boundary_labels
        >>> mask_packed_boundary_labels(torch.tensor([1, 2, 3, 4, 5]), [2, 3]).tolist()
        [-100, 2, -100, 4, 5]
    """
    lengths = _as_tensor(seq_lengths)
    if not isinstance(labels, Tensor) or labels.numel() == 0 or lengths is None:
        return labels
    check_tensor(labels, "labels")
    ignore_index = as_int(ignore_index, "ignore_index")
    if lengths.device == labels.device:
        offsets = torch.ops.cuseq.cu_seqlens(as_integers(lengths, "seq_lengths"))
    else:
        offsets = layout_of_lengths(lengths, "seq_lengths").to(labels.device).cu_seqlens
    starts = offsets[1:].long()
    starts *= starts < labels.numel()
    masked = labels.clone(memory_format=torch.contiguous_format)
    masked.view(-1).index_fill_(0, starts, ignore_index)
    return masked


def _as_tensor(seq_lengths: Sequence[int] | Tensor | None) -> Tensor | None:
    """Return the lengths as a tensor, or None if there are none."""
    if seq_lengths is None:
        return None
    if not isinstance(seq_lengths, Tensor):
        seq_lengths = as_integers(seq_lengths, "seq_lengths")
    return seq_lengths if seq_lengths.numel() else None


def _as_row(labels: Tensor) -> Tensor:
    # Not reshape: it may copy, and then the write would go to the copy.
    try:
        return labels.view(-1)
    except RuntimeError as error:
        raise ValueError(
            "shift_labels must be contiguous, since they are written in place, got shape "
            f"{tuple(labels.shape)} with strides {labels.stride()}"
        ) from error
