"""Layouts from unsloth's data: lengths, positions and tuples of metadata."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_tensor, shown
from cuseq._base.transfer import to_host
from cuseq.cache import remember
from cuseq.layout import PackedLayout


class PackedInfo(tuple):
    """unsloth's tuple `(lengths, cu_seqlens, max_seqlen)` of a pack, with the pack's layout.

    Attributes:
        layout: the layout that owns the tensors of the tuple.

    Examples:
        >>> from cuseq.integrations.unsloth import PackedInfo
        >>> packed = PackedLayout.from_lengths([2, 3])
        >>> info = PackedInfo(packed)
        >>> info[1].tolist(), info[2], info.layout is packed
        ([0, 2, 5], 3, True)
    """

    layout: PackedLayout

    def __new__(cls, packed: PackedLayout) -> PackedInfo:
        self = super().__new__(cls, (packed.lengths, packed.cu_seqlens, packed.max_seqlen))
        self.layout = packed
        # unsloth passes on only the lengths. The reference is weak, because the layout holds them
        # and a cached value must not keep its key alive.
        remember(packed.lengths, "unsloth_layout", lambda: weakref.ref(packed))
        return self

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)


def _no_layout() -> None:
    """Stand for the reference to a layout, for lengths that came from elsewhere."""


def layout_behind(lengths: Tensor) -> PackedLayout | None:
    """Return the layout of lengths that came from a `PackedInfo`; None for other lengths."""
    return remember(lengths, "unsloth_layout", lambda: _no_layout)()


def layout_of_lengths(lengths: Tensor, name: str) -> PackedLayout:
    """Return the layout of sequences with these lengths, without a tail.

    Args:
        lengths: integers of any shape; the layout is cached for the tensor.
        name: name of the caller's argument, for errors.
    """
    packed = layout_behind(lengths)
    if packed is not None:
        return packed
    return remember(
        lengths,
        "unsloth_lengths",
        lambda: PackedLayout.from_lengths(as_integers(lengths, name)),
        tensors=_tensors,
    )


def row_of_positions(position_ids: Tensor) -> PackedLayout:
    """Return the layout of a row `[1, tokens]` whose sequences start where positions are 0.

    The layout is cached for the tensor.
    """
    return remember(
        position_ids,
        "unsloth_positions",
        lambda: _of_positions(position_ids),
        tensors=_tensors,
    )


def _of_positions(position_ids: Tensor) -> PackedLayout:
    # Positions that do not start with 0 do not describe packed sequences: the row is one sequence.
    if to_host(position_ids[0, :1]).tolist() != [0]:
        return PackedLayout.from_lengths([position_ids.numel()])
    # With plane=0, sequences start where the number drops or where 0 follows 0.
    return PackedLayout.from_position_ids((position_ids != 0).int().unsqueeze(0), plane=0)


def row_of(seq_info: Sequence[Any], total_tokens: int | None) -> PackedLayout:
    """Return the layout of a whole row, with the tail as one more sequence, as in unsloth.

    Args:
        seq_info: a tuple that starts with the lengths of the sequences.
        total_tokens: tokens of the row. None, or a value below the sum of the lengths, means that
            sum.
    """
    packed = seq_info.layout if isinstance(seq_info, PackedInfo) else None
    if packed is None:
        packed = layout_of_lengths(lengths_of(seq_info), "seq_info[0]")
    if packed.pads_between_sequences:
        raise ValueError("packed must have no padding between its sequences for unsloth")
    real = packed.num_real_tokens
    total = real if total_tokens is None else max(real, as_int(total_tokens, "total_tokens"))
    if total == packed.total_tokens == real:
        return packed
    return remember(
        packed.lengths, "unsloth_row", lambda: _whole_row(packed, total), total, tensors=_tensors
    )


def _whole_row(packed: PackedLayout, total: int) -> PackedLayout:
    lengths, tail = packed.lengths_on_host(), total - packed.num_real_tokens
    if tail > 0:
        lengths = torch.nn.functional.pad(lengths, (0, 1), value=tail)
    return PackedLayout.from_lengths(lengths, total)


def _tensors(packed: PackedLayout) -> tuple[Tensor, Tensor]:
    return packed.lengths, packed.cu_seqlens


def lengths_of(seq_info: Any) -> Tensor:
    """Return the lengths, the first item of a tuple of metadata.

    Raises:
        TypeError: `seq_info` is not such a tuple.
    """
    if not isinstance(seq_info, tuple | list) or not seq_info:
        raise TypeError(
            "seq_info must be a tuple (lengths, cu_seqlens, max_seqlen), got "
            f"{type(seq_info).__name__}"
        )
    check_tensor(seq_info[0], "seq_info[0]")
    return seq_info[0]


def as_integers(values: Sequence[int] | Tensor, name: str) -> Tensor:
    """Return a list or tensor of integers, of any shape, as an int32 or int64 tensor `[n]`.

    Raises:
        TypeError: the values are not integers that fit in int64.
    """
    if not isinstance(values, Tensor):
        try:
            # The device is explicit, because torch's default device may be a GPU.
            values = torch.tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be integers of 64 bits, got {shown(values)}") from error
    check_tensor(values, name)
    row = values.reshape(-1)
    if not row.numel():
        return row.new_zeros(0, dtype=torch.int64)  # torch.tensor([]) is a float tensor
    if row.is_floating_point() or row.is_complex() or row.dtype is torch.bool:
        raise TypeError(f"{name} must be integers, got {row.dtype}")
    if row.dtype in (torch.int32, torch.int64):
        return row
    return row.int() if row.dtype in (torch.int8, torch.int16, torch.uint8) else row.long()


def as_window(sliding_window: int | None) -> int | None:
    """Return the number of keys that a token sees, itself included; None for all.

    Raises:
        TypeError: `sliding_window` is not an int.
    """
    if sliding_window is None:
        return None
    if not torch.compiler.is_compiling():
        sliding_window = as_int(sliding_window, "sliding_window")
    return sliding_window if sliding_window > 0 else None
