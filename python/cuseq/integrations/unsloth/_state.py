"""What is replaced while unsloth is enabled, and the names that several files share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cuseq.integrations._enabled import Enabled

# Modules of unsloth.
PACKING = "unsloth.utils.packing"
DISPATCH = "unsloth.utils.attention_dispatch"
BLOCKS = "unsloth.models._block_compile"
# The keyword under which unsloth's batches hold their lengths.
LENGTHS = "packed_seq_lengths"
# The attribute that marks a wrapper as cuseq's.
MARK = "_cuseq_wrapped"


class Replaced(NamedTuple):
    """A function of unsloth, and the one in its place."""

    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


@dataclass
class State:
    """What `disable` puts back.

    Attributes:
        compile_blocks: the option of `enable`.
        result: what `enable` returned.
        functions: those replaced in every module of unsloth.
        collators: weak references to collators, and to the `torch_call` that each was given.
        blocks: classes of decoder layers, each with the `forward` it was given.
    """

    compile_blocks: bool
    result: Enabled
    functions: list[Replaced]
    collators: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = field(default_factory=list)
    blocks: list[tuple[type, Callable[..., Any]]] = field(default_factory=list)


_state: State | None = None


def current() -> State | None:
    """Return the state, None where unsloth is not enabled."""
    return _state


def set_current(state: State | None) -> None:
    """Switch on with a state, off with None."""
    global _state
    _state = state


def original_of(name: str) -> Callable[..., Any]:
    """Return unsloth's function, for compiled code in which cuseq has no part.

    Raises:
        RuntimeError: unsloth is not enabled.
    """
    if _state is not None:
        for function in _state.functions:
            if function.name == name:
                return function.original
    raise RuntimeError(f"{name} cannot be compiled without packed, a cuseq.PackedLayout")
