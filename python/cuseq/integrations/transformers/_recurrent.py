"""Recurrent layers, whose state leaks from one document of a packed row into the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import transformers

# Names that configs give to layers without a state along the row. A layer of any other type counts
# as recurrent, those that a new release adds too.
_STATELESS_LAYERS = {
    "attention",
    "chunked_attention",
    "compressed_sparse_attention",
    "deepseek_sparse_attention",
    "dense",
    "full_attention",
    "heavily_compressed_attention",
    "indexed_attention",
    "minimax_m3_sparse",
    "mlp",
    "moe",
    "qwen_sparse_attention",
    "sliding_attention",
    "sparse",
    "window_attention",
}


class Separated:
    """A mark that an enabled model of a config keeps documents apart in its recurrent layers.

    Configs compare by value, but a copy of a model must not count as enabled, so marks are compared
    by identity.
    """

    def __init__(self, config: Any) -> None:
        self.config = weakref.ref(config)


_marks: list[Separated] = []


def recurrent_layers(config: Any) -> list[str]:
    """Return the sorted types of a config's layers whose state crosses the ends of documents.

    These are the layers that carry a state from token to token, unless `mark_separated` was called.
    """
    if any(mark.config() is config for mark in _marks):
        return []
    return sorted(set(recurrent_types(config)))


def recurrent_types(config: Any) -> list[str]:
    """Return the type of each of a config's layers that may carry a state from token to token."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [kind for kind in types or () if kind not in _STATELESS_LAYERS]


def mark_separated(config: Any) -> Separated:
    """Note that an enabled model of this config keeps documents apart; return the mark."""
    mark = Separated(config)
    _marks.append(mark)
    return mark


def unmark_separated(mark: Separated) -> None:
    """Undo a `mark_separated`."""
    _marks.remove(mark)


def leak_warning(types: Iterable[str]) -> str:
    """Return the warning for a model with these types of recurrent layers."""
    return (
        f"LEAKS: layers of type {', '.join(types)} carry their state from one document of a packed "
        "row into the next: cuseq does not know such layers in transformers "
        f"{transformers.__version__} and separates documents in attention only. Train this model "
        "on padded batches or on rows of one document, or try a newer transformers; "
        "cuseq.check_packing(model) shows which documents leak into which"
    )
