"""Wrappers that add a layout, as `packed`, to the batches of unsloth's packing trainers."""

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

# unsloth's functions that wrap a collator, and the attribute that each sets on it.
WRAPPED_BY = {
    "enable_sample_packing": "_unsloth_packing_wrapped",
    "enable_padding_free_metadata": "_unsloth_padding_free_lengths_wrapped",
}


def is_packing_trainer(trainer: Any) -> bool:
    """Return whether unsloth made this object's collator pack or flatten its batches."""
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
    """Make a trainer's collator add a layout to each batch, from lengths on the host.

    If the model's forward does not take `packed`, the collator stays unchanged and the model gets
    only the lengths.
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
    # A collator without weak references keeps its wrapper, which does nothing once disabled.
    with suppress(TypeError):
        # Weak references, because the wrapper holds the collator.
        entry = weakref.ref(collator), weakref.ref(torch_call_with_layout)
        current().collators.append(entry)
    return result


def take_back_layout(collator: Any | None, torch_call: Callable[..., Any] | None) -> None:
    """Restore a collator's `torch_call`, unless another wrapper has been put around ours.

    An argument is None if the object was garbage-collected.
    """
    if torch_call is not None and getattr(collator, "torch_call", None) is torch_call:
        collator.torch_call = torch_call.__wrapped__


def _takes_layout(model: Any) -> bool:
    inner = getattr(model, "get_base_model", lambda: model)()  # peft's forward takes any keyword
    try:
        parameters = inspect.signature(inner.forward).parameters
    except (AttributeError, TypeError, ValueError):  # not a model, or a forward without a signature
        return False
    return "packed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
