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


SHAPES = {
    "tiny": Shape(
        QWEN3["0.6b"] | dict(vocab_size=512, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        ("one", "dp", "cp"), 3),
    "0.6b": Shape(QWEN3["0.6b"], ("one", "dp", "cp", "stock"), 16),
    "1.7b": Shape(
        QWEN3["0.6b"] | dict(hidden_size=2048, intermediate_size=6144),
        ("one", "dp", "cp", "stock"), 16),
    # Its fp32 weights, gradients and AdamW are 131 GB: more than one GPU has room for.
    "8b": Shape(
        QWEN3["14b"] | dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32), ("dp", "cp", "stock"), 6),
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


# Dense bf16 on tensor cores, in TFLOP/s, from NVIDIA's data sheets (SXM modules).
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}


class Flops:
    """FLOPs of forward and backward of a dense model, without recomputation.

    Attributes:
        per_token: of the products with weights.
        per_pair: of the attention of all layers, for each query-key pair.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights = sum(parameter.numel() for parameter in model.parameters())
        looked_up = 0 if embedding is head else embedding.numel()
        # The backward computes two products for each one of the forward.
        self.per_token = 3 * 2 * (weights - looked_up)
        # Query times key, and probability times value: 2 * head_dim operations each.
        per_layer = 3 * 4 * config.head_dim * config.num_attention_heads
        self.per_pair = per_layer * config.num_hidden_layers


def peak_flops() -> float | None:
    """Return the FLOP/s of this GPU in bf16; None if they are not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
