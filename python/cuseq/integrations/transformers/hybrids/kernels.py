"""Recurrence kernels of other packages, used where they are installed and can run."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cuseq.layout import PackedLayout

_MODULES = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
}


def kernel(name: str, rows: Tensor) -> Callable[..., Any] | None:
    """Return a function of another package, or None if it is missing or cannot run on `rows`."""
    return _imported(name) if rows.is_cuda else None


@functools.cache
def _imported(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except Exception:  # an installed package may fail to load in its own ways: no Triton, no driver
        return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def fla_arguments(function: Callable[..., Any], packed: PackedLayout) -> dict[str, Any]:
    """Return the keyword arguments by which a function of fla gets the segments of a row.

    fla reads the lengths on the GPU, which waits for it, unless it is given the indices of its
    chunks or the offsets on the host. Both are the layout's own tensors: fla's caches compare by
    identity, and so hit in every layer.
    """
    given = {
        "chunk_indices": lambda: packed.chunk_indices(64),
        "cu_seqlens_cpu": packed.cu_seqlens_recurrent_on_host,
    }
    takes = _parameters(function)
    facts = {name: make() for name, make in given.items() if name in takes}
    return {"cu_seqlens": packed.cu_seqlens_recurrent, **facts}
