"""What can be seen of a model without importing the package that it is from."""

from __future__ import annotations

from typing import Any


def text_config(model: Any) -> Any:
    """The config of what attends to text in a model of transformers, None where there is none.

    The config of the whole may name another attention: vision towers attend by themselves.
    """
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
