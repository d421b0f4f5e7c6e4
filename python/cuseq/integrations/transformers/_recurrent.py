"""Recurrent layers, whose state leaks from one document of a packed row into the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers

from cuseq.integrations.transformers.names import NAME

_START = (
    "LEAKS: layers of type {} carry their state from one document of a packed row into the next: "
)


def leak_warning(types: Iterable[str]) -> str:
    """Return the warning for a model with recurrent layers of these types that `enable` leaves."""
    return _START.format(", ".join(types)) + (
        f"cuseq does not know such layers in transformers {transformers.__version__} and separates "
        "documents in attention only. Train this model on padded batches or on rows of one "
        "document, or try a newer transformers; cuseq.check_packing(model) shows which documents "
        "leak into which"
    )


def leak_warning_by_name(types: Iterable[str], config: Any) -> str:
    """Return the warning for a model with recurrent layers that was not enabled."""
    return _START.format(", ".join(types)) + (
        f'attn_implementation="{NAME}" alone separates the documents of {config.model_type} in '
        "attention only. Call cuseq.enable(model)"
    )
