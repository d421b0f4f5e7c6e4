"""Models of the benchmark of training on several GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from workload import QWEN3


@dataclass(frozen=True)
class Shape:
    """A model and what is measured of it by default."""

    config: dict[str, Any]
    variants: tuple[str, ...]
    steps: int
    saves: int


SHAPES = {
    "tiny": Shape(
        QWEN3["0.6b"] | dict(vocab_size=512, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        ("one", "dp", "cp", "ddp", "ddp_cp"), 3, 2),
    "0.6b": Shape(QWEN3["0.6b"], ("one", "dp", "cp", "ddp", "ddp_cp", "stock"), 16, 2),
    "1.7b": Shape(
        QWEN3["0.6b"] | dict(hidden_size=2048, intermediate_size=6144),
        ("one", "dp", "cp", "ddp", "ddp_cp", "stock"), 16, 2),
    # Its fp32 weights, gradients and AdamW are 131 GB: more than one GPU has room for.
    "8b": Shape(
        QWEN3["14b"] | dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32), ("dp", "cp", "stock"), 6, 0),
}  # fmt: skip


class Unsharded(nn.Module):
    """A model on one GPU with the precisions of FSDP2: computes on copies of its fp32 weights.

    Args:
        model: with fp32 weights.
        dtype: of the copies.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(weight.detach().clone()) for weight in model.parameters()
        )
        self.model = [model]  # in a list, so that its weights are not this module's
        self._copies = list(model.parameters())
        for copy, weight in zip(self._copies, self.weights, strict=True):
            copy.data = copy.data.to(dtype)
            copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight))

    def forward(self, **inputs: Any) -> Any:
        return self.model[0](**inputs)

    @torch.no_grad()
    def copy_weights(self, *_: Any) -> None:
        """Copy the weights to what computes, after a step of the optimizer."""
        torch._foreach_copy_(self._copies, list(self.weights))


def _add_gradient(weight: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, copy.grad = copy.grad, None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad += gradient


def use_flex_attention(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Stand in for cuseq's `enable`."""
    model.set_attn_implementation("flex_attention")
    return [], []
