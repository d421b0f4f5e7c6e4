"""Spans of tokens that see each other: conversion, and checks against the layout."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.arguments import check_tensor, shown
from cuseq._base.modes import is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_pair
from cuseq.layout.derived import keep

if TYPE_CHECKING:
    from cuseq.layout.packed import PackedLayout

Spans = Sequence[tuple[int, int]] | Tensor
Pairs = tuple[tuple[int, int], ...]


def checked_spans(
    packed: PackedLayout, spans: Spans | None, row_length: int | None = None
) -> Tensor | None:
    """Check the spans against the host's lengths; return them sorted, on the layout's device.

    Args:
        spans: (start, end) pairs in tokens of the row, or int32 `[n_spans, 2]`.
        row_length: tokens of the rows that the packed row is cut into; checked too.
    """
    if is_compiling():
        if spans is None or isinstance(spans, Tensor):
            return spans
        # Python ints would become constants of the graph, which then serves only one pack.
        raise TypeError(
            "spans must be an int32 tensor [n_spans, 2] inside compiled code, got "
            f"{type(spans).__name__}"
        )
    given = spans if isinstance(spans, Tensor) else None
    if given is not None:
        check_tensor(given, "spans")
    pairs = () if spans is None or isinstance(spans, Tensor) else _sorted_pairs(spans)
    if not pairs and row_length is None:
        return given
    device = packed.device
    on_gpu = device.type == "cuda"
    # A tensor copied on one stream may not be ready yet on another stream.
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    key = (pairs, row_length, stream)
    known = packed._derived.spans
    kept = known.get(key)
    if kept is None:
        padded = packed.segments.known_lengths if packed.pads_between_sequences else None
        on_host = _checked_pairs(
            pairs, row_length, packed.known_lengths, padded, packed.total_tokens
        )
        kept = keep(known, key, (_on(device, on_host), on_host))
    if given is not None:
        return given
    checked, on_host = kept
    if on_gpu and checked is not None and on_host is not None and not is_capturing(device):
        _C.remember_on_host(checked, on_host)
    return checked


def _sorted_pairs(spans: Sequence[tuple[int, int]]) -> Pairs:
    """Return the spans as pairs of Python ints in ascending order."""
    try:
        return tuple(sorted((index(start), index(end)) for start, end in spans))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"spans must be pairs of ints or an int32 tensor [n_spans, 2], got {shown(spans)}"
        ) from error


def _checked_pairs(
    pairs: Pairs,
    row_length: int | None,
    lengths: Tensor | None,
    segment_lengths: Tensor | None,
    total_tokens: int,
) -> Tensor | None:
    """Check that pairs and rows fit the layout; return the pairs as a tensor on the host.

    Args:
        pairs: (start, end) in tokens of the row, ascending.
        row_length: tokens of each row that the packed row is cut into; None for one row.
        lengths: int32 `[n_seqs]` on the host. None if the host does not know them; then the pairs
            are checked only against the row.
        segment_lengths: int32 `[n_seqs]` on the host, if segments are longer than sequences.
        total_tokens: tokens of the row.

    Returns:
        int32 `[n_spans, 2]`, or None if there are no pairs.
    """
    host: dict[str, Any] = dict(dtype=torch.int32, device="cpu")
    with outside_inference_mode():
        try:
            spans = torch.tensor(pairs, **host) if pairs else None
        except RuntimeError as error:
            raise ValueError(
                f"spans must lie inside the row of {total_tokens} tokens, got {pairs}"
            ) from error
        if lengths is None:
            one_sequence = torch.tensor([0, total_tokens], **host)
            _C.check_spans_and_rows(one_sequence, None, total_tokens, spans, None)
            return spans
        offsets = torch.ops.cuseq.cu_seqlens(lengths)
        padded = None if segment_lengths is None else torch.ops.cuseq.cu_seqlens(segment_lengths)
        _C.check_spans_and_rows(offsets, padded, total_tokens, spans, row_length)
        return spans


def _on(device: torch.device, spans: Tensor | None) -> Tensor | None:
    """Copy spans from the host to the layout's device, without synchronisation."""
    if spans is None or device.type == "cpu":
        return spans
    if is_capturing(device):
        raise RuntimeError(
            "spans must be a tensor on the layout's device while a CUDA graph is captured"
        )
    with outside_inference_mode():
        flat, _ = copy_pair(spans.view(-1), spans.new_empty(0), device)
    return flat.view(-1, 2)
