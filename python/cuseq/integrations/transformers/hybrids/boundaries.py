"""Forwards that bring a row's layout from the call of a model to its mixers.

The layout travels as an argument, so no layer can see the boundaries of another batch, not even
when a checkpoint computes it again during the backward. A model that is told its sequences in
another way (offsets, packed position ids) gets a layout made of them first, because mixers cannot
read those.

Some models do not hand their keywords on: Mamba's head to its backbone, Jamba's layers to their
mixers. There the caller lends its keywords to the module for the time of its forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.models import HOLD
from cuseq.integrations.transformers._forwards import our_forward
from cuseq.integrations.transformers._functions import is_ours
from cuseq.integrations.transformers._lengths import check_lengths, check_offsets
from cuseq.integrations.transformers._private import inside_checkpoint
from cuseq.integrations.transformers.documents import (
    DESCRIPTIONS,
    check_total,
    warn_of_compiled_positions,
    warn_of_dense_mask,
)
from cuseq.integrations.transformers.hybrids.functions import inside_packed_row
from cuseq.integrations.transformers.names import cache_names
from cuseq.layout import PackedLayout, check_documents, check_layout, layout_of_offsets

# Attributes of modules, for the forwards here.
HANDS_ON_SEQ_IDX = "_cuseq_hands_on_seq_idx"  # whether its layers hand on `seq_idx` alone
LENDS_TO = "_cuseq_lends_to"  # the name of a child that gets no keywords
LENT = "_cuseq_lent"  # the keywords that the caller lends for now

_LENDABLE = (*DESCRIPTIONS, "max_length_q", "max_length_k", "packed_seq_lengths", "position_ids")


def lent_to(module: nn.Module) -> dict[str, Any]:
    """Return the keywords about sequences that a module's caller lends to it."""
    return getattr(module, LENT, None) or {}


@functools.cache
def entry_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for a text model that gives its layers a layout, as `packed`."""
    forward = cls.forward
    names = list(inspect.signature(forward).parameters)[1:]

    @our_forward
    @functools.wraps(forward)
    def entered(self, *args, **kwargs):
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        packed = _layout(self, kwargs)
        if packed is not None:
            kwargs["packed"] = packed
            if getattr(self, HANDS_ON_SEQ_IDX):
                kwargs["seq_idx"] = packed
            mask = kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 2:
                kwargs["attention_mask"] = None
        if packed is None or torch.compiler.is_compiling():
            return forward(self, **kwargs)
        _check_functions(self)
        with inside_packed_row(type(self).__name__):
            return forward(self, **kwargs)

    return entered


@functools.cache
def lending_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for a module that does not hand its keywords on to a child."""
    forward = cls.forward

    @our_forward
    @functools.wraps(forward)
    def lending(self, *args, **kwargs):
        child = self.get_submodule(getattr(self, LENDS_TO))
        lent = {name: kwargs[name] for name in _LENDABLE if name in kwargs}

        def lend(run):
            def lent_run(*args, **kwargs):
                setattr(child, LENT, lent)
                try:
                    return run(*args, **kwargs)
                finally:
                    setattr(child, LENT, None)

            return lent_run

        with inside_checkpoint(self, lend):
            return lend(forward)(self, *args, **kwargs)

    return lending


@functools.cache
def borrowing_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for a mixer whose caller lends it the layout of the row."""
    forward = cls.forward

    @our_forward
    @functools.wraps(forward)
    def borrowing(self, *args, **kwargs):
        lent = {name: one for name, one in lent_to(self).items() if name == "packed"}
        return forward(self, *args, **(kwargs | lent))

    return borrowing


def _check_functions(model: nn.Module) -> None:
    """Raise RuntimeError if others have put functions in the place of those for packed rows.

    Not seen in compiled code.
    """
    hold = vars(model).get(HOLD)
    for code, name in () if hold is None else hold.separating:
        if not is_ours(code, name):
            raise RuntimeError(
                f"{name} of {code.__name__} was replaced after cuseq.enable(model), so documents "
                "would reach each other: call cuseq.disable(model) and cuseq.enable(model) again"
            )


def _layout(model: nn.Module, kwargs: dict[str, Any]) -> PackedLayout | None:
    """Return the layout of a call's row; None if each row of the batch is one sequence."""
    told = lent_to(model) | {n: v for n, v in kwargs.items() if v is not None}
    packed = told.get("packed")
    offsets = told.get("cu_seq_lens_q")
    if packed is None and offsets is None:
        if torch.compiler.is_compiling() and _may_be_packed(told):
            warn_of_compiled_positions()
        mask = told.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            warn_of_dense_mask()
        return None
    name = type(model).__name__
    if packed is None:
        if torch.compiler.is_compiling():
            raise ValueError(
                f"{name} has layers with a state along the row, which compiled code can only "
                "separate by the layout, packed=, got bare offsets"
            )
        check_lengths(told)
        check_offsets(offsets, told.get("cu_seq_lens_k"))
        packed = layout_of_offsets(offsets, _tokens(told))
    check_layout(packed)
    mask = told.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise ValueError(
            f"packed lengths cannot be combined with a {mask.dim()}-D attention_mask, got shape "
            f"{list(mask.shape)}; pass one of the two"
        )
    if not torch.compiler.is_compiling():  # compiled code that reads an int may recompile
        check_total(packed, _tokens(told))
    check_documents(
        packed, f"{name} has layers with a state along the row, which need whole rows of documents"
    )
    return packed


def _may_be_packed(told: dict[str, Any]) -> bool:
    """Return whether positions, which compiled code cannot read, may begin again in a row."""
    others = ("attention_mask", *cache_names(told))
    positions = told.get("position_ids")
    return positions is not None and all(told.get(name) is None for name in others)


def _tokens(told: dict[str, Any]) -> int:
    ids = told.get("input_ids")
    rows = told["inputs_embeds"] if ids is None else ids
    return rows.shape[0] * rows.shape[1]
