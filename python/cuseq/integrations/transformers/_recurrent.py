"""Recurrent layers, whose state leaks from one document of a packed row into the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Names of layer types in configs.
_RECURRENT_LAYERS = {
    "linear_attention",
    "hybrid",
    "hybrid_sliding",
    "mamba",
    "recurrent",
    "conv",
}


def recurrent_layers(config: Any) -> list[str]:
    """Return the sorted types of a config's layers that carry a state from token to token."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return sorted(_RECURRENT_LAYERS.intersection(types or ()))


def leak_warning(types: Iterable[str]) -> str:
    """Return the warning for a model with these types of recurrent layers."""
    return (
        f"LEAKS: layers of type {', '.join(types)} carry their state from one document of a packed "
        "row into the next, since cuseq separates documents in attention only. Train this model "
        "on padded batches or on rows of one document; cuseq.check_packing(model) shows which "
        "documents leak into which"
    )
