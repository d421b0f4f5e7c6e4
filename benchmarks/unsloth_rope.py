"""Measure rotation of queries and keys: unsloth's functions against cuseq's of the same names."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import timer
import torch
from workload import lognormal_lengths

Tensor = torch.Tensor
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

DEVICE = torch.device("cuda")
HEADS = [(32, 8), (40, 8), (16, 8)]
TOKENS = [512, 1024, 2048, 4096, 8192, 16_384, 32_768]
DIM = 128
MEAN_LENGTH = 350


def measure(emit: Callable[[dict[str, Any]], None]) -> None:
    """Emit a row of results for each shape."""
    for heads in HEADS:
        for tokens in TOKENS:
            emit(measure_shape(*heads, tokens))


def measure_shape(query_heads: int, key_heads: int, tokens: int) -> dict[str, Any]:
    """Return each function's milliseconds, forward and backward, and the results' difference."""
    row: dict[str, Any] = {
        "section": "rope",
        "shape": f"({query_heads}, {key_heads}) x {DIM}, {tokens:,}",
        "heads": [query_heads, key_heads],
        "tokens": tokens,
    }
    # As in models: projections [B, S, H, D], and gradients of the same shape.
    projected, incoming = (
        [
            torch.randn(1, tokens, heads, DIM, device=DEVICE, dtype=torch.bfloat16)
            for heads in (query_heads, key_heads)
        ]
        for _ in range(2)
    )
    results = {}
    for name, rotation in rotations(tokens).items():
        found = times(rotation, projected, incoming)
        results[name], row[f"{name} forward"], row[f"{name} backward"] = found
    for ours, theirs in (("cuseq", "unsloth"), ("cuseq norm", "unsloth norm")):
        row[f"{ours} apart"] = apart(results[ours], results[theirs])
        for phase in ("forward", "backward"):
            row[f"{ours} {phase} speed-up"] = row[f"{theirs} {phase}"] / row[f"{ours} {phase}"]
    for phase in ("forward", "backward"):
        row[f"fused {phase} speed-up"] = row[f"two launches {phase}"] / row[f"unsloth {phase}"]
        row[f"cuseq {phase} over two"] = row[f"two launches {phase}"] / row[f"cuseq {phase}"]
    return row


def rotations(tokens: int) -> dict[str, Rotation]:
    """Return each function as a model calls it, on `[1, S, H, D]` queries and keys."""
    from unsloth.kernels.qk_norm_rope import fast_qk_norm_rope as unsloth_norm_rope
    from unsloth.kernels.rope_embedding import Fast_RoPE_Embedding
    from unsloth.kernels.rope_embedding import fast_rope_embedding as unsloth_rope

    from cuseq.integrations.unsloth import fast_qk_norm_rope, fast_rope_embedding

    cos, sin, positions = table(tokens)
    norms = [norm() for _ in range(2)]

    def fused(rope: Callable[..., Any]) -> Rotation:
        return lambda q, k: rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, positions)

    def with_norm(rope: Callable[..., Any]) -> Rotation:
        return lambda q, k: rope(*norms, q, k, cos, sin, positions)

    def two_launches(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # unsloth's kernel for one tensor, in place; it takes no position ids.
        return Fast_RoPE_Embedding.apply(q, cos, sin), Fast_RoPE_Embedding.apply(k, cos, sin)

    return {
        "two launches": two_launches,
        "unsloth": fused(unsloth_rope),
        "cuseq": fused(fast_rope_embedding),
        "unsloth norm": with_norm(unsloth_norm_rope),
        "cuseq norm": with_norm(fast_qk_norm_rope),
    }


def table(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos and sin, bf16 `[S, D]` as unsloth keeps them, and int32 positions `[1, S]`."""
    frequencies = 1e6 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    angles = torch.outer(torch.arange(tokens, device=DEVICE).float(), frequencies).repeat(1, 2)
    lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed=0)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    return angles.cos().bfloat16(), angles.sin().bfloat16(), positions[None].to(DEVICE)


def norm() -> SimpleNamespace:
    """Return the attributes that the functions read of a frozen RMSNorm of one head."""
    weight = torch.rand(DIM, device=DEVICE).bfloat16() + 0.5
    return SimpleNamespace(weight=weight, variance_epsilon=1e-6)


def times(
    rotation: Rotation, projected: list[Tensor], incoming: list[Tensor]
) -> tuple[list[Tensor], float, float]:
    """Return outputs and gradients, and milliseconds of the forward and of the backward."""
    # Copies, because one of the functions works in place.
    leaves = [x.clone().requires_grad_() for x in projected]
    outputs = rotation(*leaves)
    incoming = [
        gradient if gradient.shape == output.shape else gradient.transpose(1, 2)
        for gradient, output in zip(incoming, outputs, strict=True)
    ]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)

    found = [x.detach() for x in (*outputs, *backward())]
    forward_us = timer.device_time(lambda: rotation(*leaves), device=DEVICE).median
    backward_us = timer.device_time(backward, device=DEVICE).median
    return found, forward_us / 1e3, backward_us / 1e3


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest relative L2 distance of an output or a gradient."""
    distances = [
        (a.double() - b.double()).norm() / b.double().norm()
        for a, b in zip(ours, theirs, strict=True)
    ]
    return max(distance.item() for distance in distances)
