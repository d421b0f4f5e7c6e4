"""The metadata of a packed row in the keyword arguments of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import check_tensor
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
    """Return the metadata of a packed row from a forward's keyword arguments.

    Args:
        kwargs: holds `packed`, a `PackedLayout`, or `packed_seq_lengths`, integers `[n_seqs]`. If
            it holds both, the layout is used, unless there are fewer lengths than sequences in the
            layout: unsloth's token budget splits a row and its lengths, but not the layout, which
            it does not know.
        device: device of the result.
        position_ids: `[1, tokens]`, restarting with each sequence; used if kwargs has neither.

    Returns:
        `(lengths, cu_seqlens, max_seqlen)`: int32 `[n_seqs]`, int32 `[n_seqs + 1]`, an int. None if
        there is no sign of a packed row, or if the positions show only one sequence.

    Raises:
        TypeError: `packed` is not a layout, or `packed_seq_lengths` is not a tensor of integers.
        ValueError: both are known on the host, and the lengths are neither those of the layout nor
            those of consecutive sequences of it.

    Lengths on the host, and layouts made from them, never synchronise. Lengths on a GPU wait for
    one small copy, and positions on a GPU for two, once for each tensor.

    Examples:
        >>> from cuseq.integrations.unsloth import get_packed_info_from_kwargs
        >>> batch = {"packed_seq_lengths": torch.tensor([2, 3])}
        >>> get_packed_info_from_kwargs(batch, "cpu")[1]
        tensor([0, 2, 5], dtype=torch.int32)
    """
    packed, lengths = kwargs.get("packed"), kwargs.get(LENGTHS)
    if torch.compiler.is_compiling():
        # Compiled code must not read Python ints: they would become constants of the graph.
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
    """Return whether the lengths are all those of the layout; False if they are only a part.

    Lengths on a GPU are judged only by their number, because reading them would wait.

    Raises:
        ValueError: the lengths are known on the host and contradict the layout.
    """
    on_host = lengths.device.type == "cpu" and packed.known_lengths is not None
    if on_host and layout_behind(lengths) is not packed:
        whole, given = packed.lengths_on_host().tolist(), as_integers(lengths, LENGTHS).tolist()
        starts = range(len(whole) - len(given) + 1)
        if not any(whole[start : start + len(given)] == given for start in starts):
            raise ValueError(
                f"{LENGTHS} must be the lengths of packed, or those of consecutive sequences of "
                f"it, got {given} and a layout of {whole}"
            )
    return packed.num_sequences == lengths.numel()


def cached_host_lengths(
    seq_lengths: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[int, ...] | None:
    """Return the lengths as ints if they belong to a layout; else None.

    unsloth's own attention calls this, so that it does not read the lengths from the GPU. If
    `cu_seqlens` is given, it must belong to the same layout.
    """
    packed = layout_behind(seq_lengths)
    if packed is None or (cu_seqlens is not None and packed.cu_seqlens is not cu_seqlens):
        return None
    return tuple(packed.lengths_on_host().tolist())
