"""What a forward's keywords say about its packed row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuseq._arguments import check_tensor
from cuseq.integrations.unsloth._layouts import (
    PackedInfo,
    as_integers,
    layout_behind,
    layout_of_lengths,
    row_of_positions,
)
from cuseq.integrations.unsloth._state import LENGTHS, original_of
from cuseq.layout import PackedLayout, check_layout


def get_packed_info_from_kwargs(
    kwargs: Mapping[str, Any],
    device: torch.device | str,
    position_ids: Tensor | None = None,
) -> PackedInfo | None:
    """Return what a forward's keywords say about its packed row.

    Args:
        kwargs: `packed`, a `PackedLayout`, or `packed_seq_lengths`, integers `[n_seqs]`. Of both
            the layout is taken, unless the lengths are fewer: unsloth's token budget splits a row
            and its lengths, and leaves what it does not know whole.
        device: where the answer shall lie.
        position_ids: `[1, tokens]`, restarting with each sequence; read where kwargs has neither.

    Returns:
        `(lengths, cu_seqlens, max_seqlen)`: int32 `[n_seqs]`, int32 `[n_seqs + 1]`, an int. None
        where nothing says that the row is packed, or positions show one sequence only.

    Raises:
        TypeError: `packed` is not a layout, or `packed_seq_lengths` is not a tensor of integers.
        ValueError: both are known on the host, and the lengths are neither those of the layout nor
            a part of them.

    Lengths on the host, and layouts made from them, never synchronise. Lengths on a GPU cost one
    wait for one small copy, positions two, once for each tensor.

    Example:
        >>> from cuseq.integrations.unsloth import get_packed_info_from_kwargs
        >>> batch = {"packed_seq_lengths": torch.tensor([2, 3])}
        >>> get_packed_info_from_kwargs(batch, "cpu")[1]
        tensor([0, 2, 5], dtype=torch.int32)
    """
    packed, lengths = kwargs.get("packed"), kwargs.get(LENGTHS)
    if torch.compiler.is_compiling():
        # Compiled code must not read numbers of the host: they would become its constants.
        if packed is None:
            return original_of("get_packed_info_from_kwargs")(kwargs, device, position_ids)
        return packed, None, None
    if lengths is not None:
        check_tensor(lengths, LENGTHS)
    if packed is not None:
        check_layout(packed)
        if lengths is None or _agree(packed, lengths):
            return PackedInfo(packed.to(device))
    if lengths is not None:
        return PackedInfo(layout_of_lengths(lengths, LENGTHS).to(device))
    if position_ids is None:
        return None
    check_tensor(position_ids, "position_ids")
    if position_ids.dim() != 2 or len(position_ids) != 1:
        return None
    packed = row_of_positions(position_ids)
    if packed.num_sequences == 1:
        return None
    return PackedInfo(packed.to(device))


def _agree(packed: PackedLayout, lengths: Tensor) -> bool:
    """Return whether the lengths are those of the layout, False for a part of them.

    What lies on a GPU is judged by its number of sequences alone: reading it would wait.

    Raises:
        ValueError: they are known on the host, and contradict the layout.
    """
    on_host = lengths.device.type == "cpu" and packed.known_lengths is not None
    if on_host and layout_behind(lengths) is not packed:
        whole, given = packed.lengths_on_host().tolist(), as_integers(lengths, LENGTHS).tolist()
        starts = range(len(whole) - len(given) + 1)
        if not any(whole[start : start + len(given)] == given for start in starts):
            raise ValueError(
                f"{LENGTHS} must be the lengths of packed, or those of neighbouring sequences of "
                f"it, got {given} beside a layout of {whole}"
            )
    return packed.num_sequences == lengths.numel()


def cached_host_lengths(
    seq_lengths: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[int, ...] | None:
    """Return lengths that the host knows already; unsloth's own paths would read them.

    With offsets, only where they belong to the same layout.
    """
    packed = layout_behind(seq_lengths)
    if packed is None or (cu_seqlens is not None and packed.cu_seqlens is not cu_seqlens):
        return None
    return tuple(packed.lengths_on_host().tolist())
