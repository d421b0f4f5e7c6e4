"""Recurrence kernels of other packages, used where they are installed and can run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from cuseq.layout import PackedLayout


@dataclass(frozen=True)
class Kernel:
    """A function of another package.

    Attributes:
        name, module: where it is.
        gated: whether its backward is fla's gated `chunk_bwd_dqkwg`.
        fp32_states: whether it keeps the states of that backward in fp32.
    """

    name: str
    module: str
    gated: bool = False
    fp32_states: bool = False

    def function(self, *tensors: Tensor) -> Callable[..., Any] | None:
        """Return the function, or None if it is missing or cannot run on `tensors`, its inputs."""
        if not tensors[0].is_cuda:
            return None
        trains = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        if trains and self.gated and _gated_backward_raises(tensors[0].get_device()):
            # tilelang's backward takes states in the dtype of the rows alone; autocast rounds rows.
            fp32 = tensors[0].dtype is torch.float32 and not torch.is_autocast_enabled("cuda")
            if not _has_tilelang() or (self.fp32_states and not fp32):
                return None
        return _imported(self)


GATED_DELTA_RULE = Kernel("chunk_gated_delta_rule", "fla.ops.gated_delta_rule", gated=True)
KIMI_DELTA_ATTENTION = Kernel("chunk_kda", "fla.ops.kda")
LINEAR_ATTENTION = Kernel("chunk_simple_gla", "fla.ops.simple_gla")
GATED_LINEAR_ATTENTION = Kernel(
    "chunk_simple_gla", "fla.ops.simple_gla", gated=True, fp32_states=True
)
MAMBA_SCAN = Kernel("mamba_chunk_scan_combined", "mamba_ssm.ops.triton.ssd_combined")


@functools.cache
def _imported(kernel: Kernel) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(kernel.module), kernel.name)
    except Exception:  # an installed package may fail to load in its own ways: no Triton, no driver
        return None


@functools.cache
def _gated_backward_raises(device: int) -> bool:
    """Return whether fla refuses the backward of its gated kernels in Triton on a GPU.

    On Hopper, Triton 3.4.0 to 3.7.0 compiles it wrongly (fla-org/flash-linear-attention #640), and
    fla raises unless tilelang computes it.
    """
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import triton
    except ImportError:
        return False
    version = TorchVersion(triton.__version__)
    return version >= "3.4" and version < "3.7.1"


@functools.cache
def _has_tilelang() -> bool:
    return importlib.util.find_spec("tilelang") is not None


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
