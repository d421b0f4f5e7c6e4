"""Recurrent layers, whose state leaks from one document of a packed row into the next."""

from __future__ import annotations

from collections.abc import Iterable

import transformers


def leak_warning(types: Iterable[str]) -> str:
    """Return the warning for a model with these types of recurrent layers."""
    return (
        f"LEAKS: layers of type {', '.join(types)} carry their state from one document of a packed "
        "row into the next: cuseq does not know such layers in transformers "
        f"{transformers.__version__} and separates documents in attention only. Train this model "
        "on padded batches or on rows of one document, or try a newer transformers; "
        "cuseq.check_packing(model) shows which documents leak into which"
    )
