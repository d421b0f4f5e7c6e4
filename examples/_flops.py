"""Count the arithmetic of a training step, for the MFU (model FLOPs utilisation)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

# Dense bf16 on tensor cores, in TFLOP/s, from NVIDIA's data sheets (SXM modules).
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
FORWARD_AND_BACKWARD = 3  # the backward computes two products for each one of the forward


class Flops:
    """FLOPs of forward and backward, for each token and for each query-key pair of attention.

    Recomputation is not counted. Layers with sliding windows are counted as full attention.

    Args:
        model: before it is sharded or after.

    Attributes:
        known: False where a token does not meet all weights: for a mixture of experts, and for a
            model with parts beside its text model.
        per_token: of the products with weights.
        per_pair: of all attention layers.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config()
        experts = any("expert" in name for name, _ in model.named_parameters())
        self.known = config is model.config and not experts
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights = sum(parameter.numel() for parameter in model.parameters())
        looked_up = 0 if embedding is head else embedding.numel()
        self.per_token = FORWARD_AND_BACKWARD * 2 * (weights - looked_up)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        # Query times key, and probability times value: 2 * head_dim operations each.
        per_layer = FORWARD_AND_BACKWARD * 4 * head_dim * heads
        self.per_pair = per_layer * config.num_hidden_layers


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the FLOP/s of the device at its best; None if they are not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
