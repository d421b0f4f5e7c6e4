"""The state while unsloth is enabled, and names that several files share."""

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
# The key of the lengths in unsloth's batches.
LENGTHS = "packed_seq_lengths"
# The attribute that marks a wrapper as cuseq's.
MARK = "_cuseq_wrapped"


class Replaced(NamedTuple):
    """A function of unsloth and its replacement."""

    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


@dataclass
class State:
    """What `disable` needs to restore unsloth.

    Attributes:
        compile_blocks: the option of `enable`.
        result: the result of `enable`.
        functions: the functions replaced in every module of unsloth.
        collators: weak references to collators, each with one to its new `torch_call`.
        blocks: classes of decoder layers, each with its new `forward`.
    """

    compile_blocks: bool
    result: Enabled
    functions: list[Replaced]
    collators: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = field(default_factory=list)
    blocks: list[tuple[type, Callable[..., Any]]] = field(default_factory=list)


_state: State | None = None


def current() -> State | None:
    """Return the state, or None if unsloth is not enabled."""
    return _state


def set_current(state: State | None) -> None:
    """Set the state; None means that unsloth is not enabled."""
    global _state
    _state = state


def original_of(name: str) -> Callable[..., Any]:
    """Return unsloth's original function, for compiled code that does not use cuseq.

    Raises:
        RuntimeError: unsloth is not enabled.
    """
    if _state is not None:
        for function in _state.functions:
            if function.name == name:
                return function.original
    raise RuntimeError(f"{name} cannot be compiled without packed, a cuseq.PackedLayout")
