"""Calls of a function of a row on one segment of the row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuseq.integrations.transformers._warn import warn_once
from cuseq.layout import PackedLayout

Run = Callable[..., tuple[Tensor, Tensor | None]]


def slow_warning(what: str, remedy: str) -> str:
    """Return the warning that something runs without a kernel for packed rows."""
    return (
        f"SLOW: {what} of packed rows runs in PyTorch, one document after the other. This is "
        f"exact, but each such layer runs the model's own code once for each document: {remedy}"
    )


@torch.compiler.disable
def by_segment(
    what: str, remedy: str, packed: PackedLayout, run: Run, *rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call `run` on each segment of the rows, and warn once that this is slow.

    Padding after a sequence and the tail are segments of their own, so nothing in them reaches a
    sequence. Compiled code calls this outside the graph, because its loop depends on the lengths.

    Args:
        what, remedy: for `slow_warning`.
        packed: the layout.
        run: `run(is_last, *rows)` of the rows of one segment, `[1, n, ...]`, where `is_last` says
            whether it is the last sequence; returns the output `[1, n, ...]` and the state after
            it, or None.
        *rows: `[1, total_tokens, ...]`.

    Returns:
        The output `[1, total_tokens, ...]`, and the state after the last sequence of the row.
    """
    warn_once(slow_warning(what, remedy))
    outputs, last = [], None
    bounds = segment_bounds(packed)
    of_last = last_sequence(packed, bounds)
    for segment, (begin, end) in enumerate(bounds):
        output, state = run(segment == of_last, *(row[:, begin:end] for row in rows))
        outputs.append(output)
        if segment == of_last:
            last = state
    return torch.cat(outputs, dim=1), last


def segment_bounds(packed: PackedLayout) -> list[tuple[int, int]]:
    """Return where the segments of a row begin and end, in tokens; none of them is empty."""
    offsets = packed.cu_seqlens_recurrent_on_host().tolist()
    return list(zip(offsets[:-1], offsets[1:], strict=True))


def last_sequence(packed: PackedLayout, bounds: list[tuple[int, int]]) -> int:
    """Return the index of the segment that holds the last sequence with tokens.

    If no sequence has tokens this is the last segment.
    """
    lengths = packed.lengths_on_host().tolist()
    padded = packed.segments.lengths_on_host().tolist()
    begin = 0
    last = None
    for length, whole in zip(lengths, padded, strict=True):
        if length > 0:
            last = begin
        begin += whole
    begins = [begin for begin, _ in bounds]
    return len(bounds) - 1 if last is None else begins.index(last)
