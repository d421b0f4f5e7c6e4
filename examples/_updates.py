"""Clip gradients and update weights, where both are sharded, at a small cost for the host.

PyTorch's own functions take sharded weights too, but each operation on a list of DTensors plans how
to run every one of them: of 310 weights that is several milliseconds of a step. What follows works
element by element, or adds up over ranks once, so it runs on each rank's shards as plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, whose update runs on each rank's shards as plain tensors.

    Its state and state dict have DTensors for sharded weights, as that of PyTorch.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        # `step` calls this to fill lists with weights, gradients and state. Without the call the
        # update would be the same, and slower.
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(shard_of, tensors)
        return has_complex


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, which shares memory with the tensor; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm(weights: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for weights that are all plain, or all sharded over one
    mesh as by `fully_shard`: along its last dimension, the others hold copies.

    Returns:
        [] on the device: the norm of all gradients of all ranks before that, a plain tensor. Never
        waits for the device.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    shards = [shard_of(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(shards)
    if gradients and isinstance(gradients[0], DTensor):
        mesh, squared = gradients[0].device_mesh, norm.square()
        dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))
        norm = squared.sqrt()
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
