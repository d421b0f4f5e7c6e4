"""Padded batches that the body of a model runs as packed rows, or as trees of what they share.

A trainer that pads keeps its code: its model's head and loss get hidden states of the shape of the
batch, zeros at padding. Between the two the body of the model (`model.base_model`) computes real
tokens alone, by `cuseq.run_packed`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import cuseq
from cuseq.integrations.transformers._forwards import (
    current_forward,
    is_replaced,
    our_forward,
    replace_forward,
    restore_forward,
)
from cuseq.integrations.transformers._private import has_accelerate_forward
from cuseq.integrations.transformers.documents import DESCRIPTIONS
from cuseq.integrations.transformers.names import cache_names

_INNER = "_cuseq_forward_of_rows"


def check_body(model: PreTrainedModel) -> None:
    """Raise ValueError unless the body of a model can run padded batches as packed rows."""
    body = model.base_model
    if body is model or "input_ids" not in inspect.signature(type(body).forward).parameters:
        raise ValueError(
            f"the trainer's model must have a head and a body that takes input_ids, got a "
            f"{type(model).__name__}"
        )
    if "forward" in vars(body) and not (has_accelerate_forward(body) or is_replaced(body)):
        raise ValueError(
            f"the {type(body).__name__} in the trainer's model must have the forward of its class, "
            "got one that was set on the object"
        )


def pack_batches(model: PreTrainedModel, tree: bool) -> None:
    """Let the body of an enabled model run padded batches as packed rows; `check_body` came before.

    Calls with a cache (generation), with lengths or without a mask run as before.

    Args:
        model: the model.
        tree: whether to compute prefixes that the rows of a batch share once.
    """
    body = model.base_model
    inner = current_forward(body)
    if not hasattr(inner, _INNER):
        replace_forward(body, _packing(inner, tree))


def restore_batches(model: PreTrainedModel) -> None:
    """Undo `pack_batches`."""
    body = model.base_model
    inner = getattr(current_forward(body), _INNER, None)
    if inner is type(body).forward:
        restore_forward(body)
    elif inner is not None:  # that of a hybrid, which is enabled
        replace_forward(body, inner)


@functools.cache
def _packing(inner: Callable[..., Any], tree: bool) -> Callable[..., Any]:
    """Return a forward of a body that runs padded batches as packed rows by the one it has."""
    signature = inspect.signature(inner)
    names = list(signature.parameters)[1:]

    @our_forward
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        told = {name: value for name, value in given.items() if value is not None}
        if not _is_padded_batch(told):
            return inner(self, *args, **kwargs)
        ids, mask = told.pop("input_ids"), told.pop("attention_mask")
        # Columns that Trainer left in the batch, such as the margins of pairs: no input of a body.
        strangers = {
            name: told.pop(name)
            for name, value in list(told.items())
            if name not in names and isinstance(value, Tensor) and value.shape[:2] != ids.shape
        }
        # The row comes back to this forward, through the module's hooks.
        run = functools.partial(self, **strangers) if strangers else self
        return cuseq.run_packed(run, ids, mask, tree=tree, **told)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    setattr(forward, _INNER, inner)
    return forward


def _is_padded_batch(told: Mapping[str, Any]) -> bool:
    ids, mask = told.get("input_ids"), told.get("attention_mask")
    if torch.compiler.is_compiling() or "packed" in told or any(n in told for n in DESCRIPTIONS):
        return False
    if told.get("use_cache") is not False or cache_names(told):
        return False
    is_batch = isinstance(ids, Tensor) and isinstance(mask, Tensor)
    return is_batch and ids.dim() == 2 and mask.shape == ids.shape
