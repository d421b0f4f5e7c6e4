"""Decoder blocks that unsloth compiles: layouts let packed rows into them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cuseq.integrations.unsloth._attention import OPTIONS
from cuseq.integrations.unsloth._layouts import row_of
from cuseq.integrations.unsloth._metadata import get_packed_info_from_kwargs
from cuseq.integrations.unsloth._state import DISPATCH, LENGTHS, MARK, current

# Set by unsloth on the forward of a class that it compiles: the forward before.
ORIGINAL = "_unsloth_block_original"


def then_let_packed_rows_in(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function by which unsloth makes a class of decoder layers compile itself."""

    @functools.wraps(original)
    def wrap(cls: type, *arguments: Any, **options: Any) -> None:
        original(cls, *arguments, **options)
        if current() is not None:
            let_packed_rows_in(cls)

    return wrap


def compiled_blocks() -> Iterator[type]:
    """Yield the classes of decoder layers that compile themselves already."""
    seen, waiting = set(), [nn.Module]
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        waiting += cls.__subclasses__()
        if hasattr(vars(cls).get("forward"), ORIGINAL):
            yield cls


def let_packed_rows_in(cls: type) -> None:
    """Give a class of decoder layers a layout in place of lengths.

    unsloth's blocks run uncompiled for lengths, on which a graph would depend, but not for a
    layout. The layout covers the whole row, its tail as one more sequence, as unsloth attends.
    Blocks of transformers' classes take packed rows compiled already, and look for their lengths.
    """
    forward = cls.forward
    inner = getattr(forward, ORIGINAL, None)
    if hasattr(forward, MARK) or not getattr(inner, "__module__", "").startswith("unsloth.models"):
        return

    @functools.wraps(forward)
    def forward_with_layout(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any):
        if kwargs.get("packed") is not None and self.training and _may_compile():
            info = get_packed_info_from_kwargs(kwargs, hidden_states.device)
            row = row_of(info, hidden_states.shape[1]).to(hidden_states.device)
            kwargs = kwargs | {"packed": row, LENGTHS: None}
        return forward(self, hidden_states, *args, **kwargs)

    setattr(forward_with_layout, MARK, True)
    cls.forward = forward_with_layout
    current().blocks.append((cls, forward_with_layout))


def take_rows_out(cls: type, forward: Callable[..., Any]) -> None:
    """Give a class its own forward back; a wrapper that others have wrapped stays."""
    if cls.forward is forward:
        cls.forward = forward.__wrapped__


def _may_compile() -> bool:
    """Return whether compiled attention would be cuseq's."""
    if current() is None or torch.compiler.is_compiling():
        return False
    backend = sys.modules[DISPATCH].select_attention_backend(True)
    return backend in OPTIONS and not torch.are_deterministic_algorithms_enabled()
