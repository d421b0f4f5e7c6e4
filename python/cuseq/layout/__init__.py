"""Where the sequences of a packed row lie: `PackedLayout` and the records that it holds."""

from __future__ import annotations

import pickle
from typing import NoReturn

from cuseq.layout.offsets import (
    layout_of_offsets,
    note_layout_of_offsets,
    offsets_of_static,
    remembered_layout,
    static_layout_of,
)
from cuseq.layout.packed import (
    PackedLayout,
    check_documents,
    check_layout,
    own_positions,
    positions_for_models,
    remember_offsets_on_host,
    special_kind,
)
from cuseq.layout.records import OtherSize, Part, Recipe, Records, Row, Tree
from cuseq.layout.spans import Spans, checked_spans
from cuseq.layout.static import StaticLayout, graph_room, needed_room

__all__ = [
    "OtherSize",
    "PackedLayout",
    "Part",
    "Recipe",
    "Records",
    "Row",
    "Spans",
    "StaticLayout",
    "Tree",
    "check_documents",
    "check_layout",
    "checked_spans",
    "layout_of_offsets",
    "needed_room",
    "note_layout_of_offsets",
    "offsets_of_static",
    "own_positions",
    "special_kind",
    "positions_for_models",
    "remember_offsets_on_host",
    "remembered_layout",
    "static_layout_of",
    "graph_room",
]


def __getattr__(name: str) -> NoReturn:
    if name == "_restored":  # what older pickles call
        raise pickle.UnpicklingError(
            "a PackedLayout that an earlier cuseq pickled cannot be read: make it again from its "
            "lengths, by PackedLayout.from_lengths"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
