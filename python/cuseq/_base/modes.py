"""Helpers for torch's modes: inference mode, torch.func, fake tensors and CUDA graph capture."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

# Whether expensive checks run: values of tensors on a GPU, and edits of a layout's tensors.
CHECKING = os.environ.get("CUSEQ_CHECK") == "1"


def outside_inference_mode() -> AbstractContextManager:
    """Return a context that leaves inference mode and the transforms of torch.func.

    A layout made during evaluation may be used in training later, and autograd cannot save
    inference tensors. What is made of plain tensors inside torch.func.grad or jvp would be a tensor
    of that transform, without memory to read.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    in_inference = torch.is_inference_mode_enabled()
    if torch._C._functorch.peek_interpreter_stack() is None:
        return torch.inference_mode(False) if in_inference else nullcontext()
    contexts = ExitStack()
    contexts.enter_context(torch._C._DisableFuncTorch())
    if in_inference:
        contexts.enter_context(torch.inference_mode(False))
    return contexts


def are_plain(*tensors: Tensor) -> bool:
    """Return whether all are plain tensors; a FakeTensor must not be kept beyond its mode, nor a
    tensor of torch.func beyond its transform.
    """
    if any(type(tensor) is not Tensor for tensor in tensors):
        return False
    return torch.compiler.is_compiling() or not any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on this thread's stream."""
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    )
