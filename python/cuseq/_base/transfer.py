"""Copies of int32 tensors between the host and a device."""

from __future__ import annotations

import torch
from torch import Tensor

from cuseq import _C


def to_host(source: Tensor) -> Tensor:
    """Copy a tensor to the host; wait only for the event of this copy, not for the stream."""
    (on_host,) = _C.start_host_copy([source])
    _C.wait_host_copy(on_host)
    return on_host


def copy_pair(first: Tensor, second: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy two int32 tensors to a device; to a GPU through one pinned buffer, without waiting."""
    if first.device.type == "cpu" and device.type == "cuda" and not first.is_pinned():
        numbers, others = _C.copy_to_device(first.view(-1), second.view(-1), device)
        return numbers.view(first.shape), others.view(second.shape)
    # A copy to the host must block, because its reader cannot know when the data has arrived.
    to_device = device.type != "cpu"
    return (
        first.to(device, non_blocking=to_device),
        second.to(device, non_blocking=to_device),
    )


def copy_without_wait(source: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any dtype to a device; from the host to a GPU through pinned memory."""
    if source.device.type == "cpu" and device.type == "cuda":
        return source.pin_memory().to(device, non_blocking=True)
    return source.to(device)


def with_index(device: torch.device) -> torch.device:
    """Return the device in the form that tensors report: `cuda` with an index, `cpu` without."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        return torch.device("cpu")  # accelerate names it cpu:0, but tensors report cpu
    return device
