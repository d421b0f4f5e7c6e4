"""The result of `cuseq.enable`, which every integration returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Enabled:
    """Say what `cuseq.enable` replaced in a model, a trainer or the unsloth module.

    Attributes:
        kind: "model", "trainer" or "unsloth".
        replaced: what now runs through cuseq, as "attention:CLASS" for a class of attention layers,
            "rope:MODULE" for a modeling module whose rotation is cuseq's in this process,
            "qk_norm:CLASS" for a class whose query and key norms run in the rotation's kernel,
            "collator:CLASS" for a trainer's data collator.
        left_alone: what was not replaced, with the reason.
        warnings: what makes training on packed rows wrong or slow. An entry that starts with
            "LEAKS" names layers through which documents of one row see each other.
    """

    kind: str
    replaced: tuple[str, ...]
    left_alone: tuple[str, ...]
    warnings: tuple[str, ...]


def check_same_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError where something is enabled again with other options."""
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"{name} must stay {before[name]!r} while this is enabled, got {value!r}: "
                "cuseq.disable it first"
            )
