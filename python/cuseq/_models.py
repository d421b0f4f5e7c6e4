"""Helpers for models that do not import the model's package."""

from __future__ import annotations

from typing import Any


def text_config(model: Any) -> Any:
    """Return the config of a transformers model's text part; None for a model without a config.

    The config of the whole model may name the attention of another part, such as a vision tower.
    """
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
