"""Collators of unsloth's packing trainers: their batches get a layout as `packed`."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cuseq.integrations._enabled import Enabled
from cuseq.integrations.unsloth._state import LENGTHS, MARK, current
from cuseq.layout import PackedLayout

# By the function of unsloth that wraps a collator, the attribute that it sets on it.
WRAPPED_BY = {
    "enable_sample_packing": "_unsloth_packing_wrapped",
    "enable_padding_free_metadata": "_unsloth_padding_free_lengths_wrapped",
}


def is_packing_trainer(trainer: Any) -> bool:
    """Return whether unsloth packs the batches of this object's collator, or flattens them."""
    collator = getattr(trainer, "data_collator", None)
    return any(getattr(collator, mark, False) is True for mark in WRAPPED_BY.values())


def then_hand_on_layout(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function of unsloth that prepares a trainer for packing."""

    @functools.wraps(original)
    def enable_packing(model: Any, trainer: Any, **options: Any) -> None:
        original(model, trainer, **options)
        if current() is not None and is_packing_trainer(trainer):
            hand_on_layout(model, trainer)

    return enable_packing


def hand_on_layout(model: Any, trainer: Any) -> Enabled:
    """Let a collator's batches carry a layout, from lengths that are on the host.

    A model whose forward has no keyword `packed` gets none: there the lengths alone say it.
    """
    collator = trainer.data_collator
    known = getattr(collator.torch_call, MARK, None)
    if known is not None:
        return known
    name = type(collator).__name__
    if not _takes_layout(model):
        reason = f"collator:{name}: the forward of {type(model).__name__} does not take packed"
        return Enabled("trainer", (), (reason,), ())
    torch_call = collator.torch_call

    @functools.wraps(torch_call)
    def torch_call_with_layout(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = torch_call(examples)
        lengths, ids = batch.get(LENGTHS), batch.get("input_ids")
        if current() is not None and lengths is not None and ids is not None and len(ids) == 1:
            batch["packed"] = PackedLayout.from_lengths(lengths, ids.shape[1])
        return batch

    result = Enabled("trainer", (f"collator:{name}",), (), ())
    setattr(torch_call_with_layout, MARK, result)
    collator.torch_call = torch_call_with_layout
    with suppress(TypeError):  # one that cannot be referred to keeps a wrapper that does nothing
        # Weak, since the wrapper holds the collator.
        entry = weakref.ref(collator), weakref.ref(torch_call_with_layout)
        current().collators.append(entry)
    return result


def take_back_layout(collator: Any | None, torch_call: Callable[..., Any] | None) -> None:
    """Give a collator its own `torch_call` back; a wrapper that others have wrapped stays.

    Either is None where it is gone.
    """
    if torch_call is not None and getattr(collator, "torch_call", None) is torch_call:
        collator.torch_call = torch_call.__wrapped__


def _takes_layout(model: Any) -> bool:
    inner = getattr(model, "get_base_model", lambda: model)()  # peft's own takes everything
    try:
        parameters = inspect.signature(inner.forward).parameters
    except (AttributeError, TypeError, ValueError):  # no model, or a forward without a signature
        return False
    return "packed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
