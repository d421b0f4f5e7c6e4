"""The runs of tokens over which a recurrence may go, and their chunks.

A run is a sequence, the padding after one, or the tail: kernels leave tokens after the last offset
unwritten, and a state that enters padding must not come out again. No run is empty, because such
offsets break kernels of gated delta nets (VeOmni#845). All of these are computed once, on the host,
from lengths that are there, so nothing waits; for lengths that came from a GPU the first use waits
for their small copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import as_int, check_dtype
from cuseq._base.modes import are_plain, is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_pair
from cuseq.layout.derived import keep

if TYPE_CHECKING:
    from cuseq.layout.packed import PackedLayout


def offsets_on_host(packed: PackedLayout) -> Tensor:
    """Return `PackedLayout.cu_seqlens_recurrent_on_host`."""
    derived = packed._derived
    if derived.runs_on_host is not None:
        return derived.runs_on_host
    packed._check_whole()
    packed._check_unedited()
    segments = packed.segments.lengths_on_host() if packed.pads_between_sequences else None
    with outside_inference_mode():
        runs = _C.recurrent_offsets(packed.lengths_on_host(), segments, packed.total_tokens)
    if are_plain(runs):
        derived.runs_on_host = runs
        packed._note_versions(cu_seqlens_recurrent_on_host=runs)
    return runs


def offsets(packed: PackedLayout) -> Tensor:
    """Return `PackedLayout.cu_seqlens_recurrent`."""
    derived = packed._derived
    if derived.runs is not None:
        return derived.runs
    on_host = offsets_on_host(packed)
    runs, _ = _on_device(packed, on_host, on_host[:0], "cu_seqlens_recurrent")
    if are_plain(runs):
        derived.runs = runs
        packed._note_versions(cu_seqlens_recurrent=runs)
    return runs


def chunks_of(packed: PackedLayout, chunk_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `PackedLayout.chunk_indices` and `chunk_offsets`."""
    chunk_size = as_int(chunk_size, "chunk_size", least=1)
    check_dtype(dtype, "dtype")
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"dtype must be torch.int32 or torch.int64, got {dtype}")
    derived = packed._derived
    known = derived.chunks.get((chunk_size, dtype))
    if known is not None:
        return known
    if dtype == torch.int64:
        indices, first = chunks_of(packed, chunk_size, torch.int32)
        with outside_inference_mode():
            chunks = indices.long(), first.long()
    else:
        with outside_inference_mode():
            on_host = _C.chunks_of(offsets_on_host(packed), chunk_size)
        chunks = _on_device(packed, *on_host, "chunk_indices")
    if are_plain(*chunks) and not is_capturing(packed.device):
        keep(derived.chunks, (chunk_size, dtype), chunks)
        packed._note_versions(chunk_indices=chunks[0], chunk_offsets=chunks[1])
    return chunks


def _on_device(
    packed: PackedLayout, first: Tensor, second: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """Copy two tensors from the host to the layout's device, without waiting."""
    if packed.device.type == "cpu":
        return first, second
    if is_capturing(packed.device):
        raise RuntimeError(
            f"packed.{name} comes from the host, which a CUDA graph would not ask again: read it "
            "before the capture"
        )
    with outside_inference_mode():
        return copy_pair(first, second, packed.device)
