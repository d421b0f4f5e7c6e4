"""Layouts that are made once for the tensors that describe them, offsets above all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cuseq import cache
from cuseq._base.modes import outside_inference_mode
from cuseq.layout.packed import PackedLayout
from cuseq.layout.static import StaticLayout

_STATIC = "_cuseq_static_layout"  # an attribute of offsets


def layout_of_offsets(cu_seqlens: Tensor, total_tokens: int) -> PackedLayout:
    """Return the layout of offsets `[n_seqs + 1]`, made once for each tensor.

    The first use of a host value waits for one event if the offsets are on a GPU.
    """
    static = static_layout_of(cu_seqlens)
    if static is not None:
        return static

    def layout() -> PackedLayout:
        return PackedLayout.from_cu_seqlens(cu_seqlens.clone(), total_tokens)

    return remembered_layout(cu_seqlens, "packed_offsets", layout, total_tokens)


def note_layout_of_offsets(cu_seqlens: Tensor, layout: PackedLayout) -> None:
    """Make `layout_of_offsets` return this layout for offsets that the layout does not hold."""
    remembered_layout(cu_seqlens, "packed_offsets", lambda: layout, layout.total_tokens)


def offsets_of_static(layout: StaticLayout) -> Tensor:
    """Return the offsets of a static layout, by which `layout_of_offsets` finds it.

    They have an attribute for it, since nothing is cached while a CUDA graph is captured.
    """
    offsets = layout.cu_seqlens_static.detach()
    setattr(offsets, _STATIC, layout)
    return offsets


def static_layout_of(cu_seqlens: Tensor) -> StaticLayout | None:
    """Return the static layout that these are the offsets of, or None."""
    return getattr(cu_seqlens, _STATIC, None)


def remembered_layout(
    key: Tensor,
    fact: str,
    make: Callable[[], PackedLayout | None],
    *parameters: Hashable,
    device: torch.device | None = None,
) -> Any:
    """Return the layout that `make` makes for a key, made once until the key is edited.

    Args:
        key, fact, make, parameters, device: as `cuseq.cache.remember`.
    """
    with outside_inference_mode():
        tensors = _cached_tensors
        return cache.remember(key, fact, make, *parameters, device=device, tensors=tensors)


def _cached_tensors(layout: PackedLayout | None) -> tuple[Tensor, ...]:
    if layout is None:
        return ()
    return layout.row.lengths, layout.row.cu_seqlens_static, layout.row.host_meta
