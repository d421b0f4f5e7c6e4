"""Facts about models, read without importing the package that they are from."""

from __future__ import annotations

from typing import Any


def text_config(model: Any) -> Any:
    """Return the config of a transformers model's text part, None where there is none.

    The config of the whole model may name another attention, that of a vision tower.
    """
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
