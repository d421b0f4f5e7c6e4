"""The front door: `enable` and `disable` for a model, a trainer or the unsloth module."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn


def enable(x: Any, **options: Any) -> Any:
    """Let a model, a trainer or the unsloth module train packed rows with cuseq."""
    return _integration_of(x).enable(x, **options)


def disable(x: Any) -> None:
    """Put back what `enable` replaced in `x`."""
    _integration_of(x).disable(x)


def _integration_of(x: Any) -> ModuleType:
    if isinstance(x, nn.Module):
        from cuseq.integrations import transformers

        return transformers
    if isinstance(x, ModuleType) and x.__name__ == "unsloth":
        from cuseq.integrations import unsloth

        return unsloth
    from cuseq.integrations import trl

    return trl
