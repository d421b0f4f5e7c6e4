"""Modes that torch runs in: what may be kept in them, and what may not."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Whether tensors are checked at a cost: values on a device, and edits of a layout's tensors.
CHECKING = os.environ.get("CUSEQ_CHECK") == "1"


def outside_inference_mode() -> AbstractContextManager:
    """Leave inference mode: a layout made in evaluation may be saved for a backward later."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def may_keep(*tensors: Tensor) -> bool:
    """Return whether these are plain tensors; a FakeTensor means nothing outside of its mode."""
    return all(type(tensor) is Tensor for tensor in tensors)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on this thread's stream."""
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    )
