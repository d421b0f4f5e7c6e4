"""Helpers for torch's modes: inference mode, fake tensors and CUDA graph capture."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Whether expensive checks run: values of tensors on a GPU, and edits of a layout's tensors.
CHECKING = os.environ.get("CUSEQ_CHECK") == "1"


def outside_inference_mode() -> AbstractContextManager:
    """Return a context that leaves inference mode, because autograd cannot save inference tensors.

    A layout made during evaluation may be used in training later.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def may_keep(*tensors: Tensor) -> bool:
    """Return whether all are plain tensors; a FakeTensor must not be kept beyond its mode."""
    return all(type(tensor) is Tensor for tensor in tensors)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on this thread's stream."""
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    )
