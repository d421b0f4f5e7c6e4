"""Packed rows in the decoder blocks that unsloth compiles."""

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

# unsloth sets this attribute on the forward of a class that it compiles: the original forward.
ORIGINAL = "_unsloth_block_original"


def then_let_packed_rows_in(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap unsloth's function that makes a class of decoder layers compile itself."""

    @functools.wraps(original)
    def wrap(cls: type, *arguments: Any, **options: Any) -> None:
        original(cls, *arguments, **options)
        if current() is not None:
            let_packed_rows_in(cls)

    return wrap


def compiled_blocks() -> Iterator[type]:
    """Yield the classes of decoder layers that already compile themselves."""
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
    """Wrap the forward of a class of decoder layers so that it gets a layout instead of lengths.

    unsloth runs a block uncompiled if it gets lengths, because a graph would depend on them. It
    runs the block compiled if it gets a layout. The layout covers the whole row, with the tail as
    one more sequence, as in unsloth. Blocks of transformers' classes are not wrapped: they already
    run packed rows compiled, and read the lengths.
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
    """Restore the forward of a class, unless another wrapper has been put around ours."""
    if cls.forward is forward:
        cls.forward = forward.__wrapped__


def _may_compile() -> bool:
    """Return whether a compiled block would use cuseq's attention."""
    if current() is None or torch.compiler.is_compiling():
        return False
    backend = sys.modules[DISPATCH].select_attention_backend(True)
    return backend in OPTIONS and not torch.are_deterministic_algorithms_enabled()
