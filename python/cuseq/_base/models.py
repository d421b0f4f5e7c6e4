"""Helpers for models that do not import the model's package."""

from __future__ import annotations

from typing import Any

from torch import nn


def text_config(model: Any) -> Any:
    """Return the config of a transformers model's text part; None for a model without a config.

    The config of the whole model may name the attention of another part, such as a vision tower.
    """
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def eps_of(norm: nn.Module) -> float | None:
    """Return the epsilon of a norm, under transformers' name or torch's; None if it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def rotations_by_length(config: Any) -> list[str]:
    """Return the types of a config's rotations whose angles depend on the longest position."""
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = [value for value in given.values() if isinstance(value, dict)]
    types = {rotation.get("rope_type") for rotation in of_layers or [given]}
    return [name for name in ("dynamic", "longrope") if name in types]
