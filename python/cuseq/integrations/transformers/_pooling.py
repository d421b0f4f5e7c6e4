"""Heads that score a row by its last token, made to score each document of a packed row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

import cuseq
from cuseq.integrations.transformers._forwards import is_replaced, our_forward
from cuseq.integrations.transformers._layers import calls_of
from cuseq.integrations.transformers._private import has_accelerate_forward
from cuseq.integrations.transformers.masks import LayoutMask
from cuseq.integrations.transformers.names import cache_names
from cuseq.layout import layout_of_offsets


def can_pool(model: PreTrainedModel) -> bool:
    """Return whether `pooled_forward` computes what a model's head does for one document.

    The head is a linear layer, `score`, and the model takes its result at the last token. A forward
    that someone else has set on the model (accelerate, for mixed precision) is not replaced.
    """
    forward = inspect.unwrap(type(model).forward).__code__
    takes_last = {"pooled_logits", "last_non_pad_token"} <= set(forward.co_varnames)
    head = getattr(model, "score", None)
    body = getattr(model, model.base_model_prefix, None)
    is_whole = takes_last and "score" in calls_of(model) and isinstance(body, PreTrainedModel)
    is_free = has_accelerate_forward(model) or "forward" not in vars(model)
    return is_whole and isinstance(head, nn.Linear) and is_free and not is_replaced(model)


@functools.cache
def pooled_forward(cls: type[PreTrainedModel]) -> Callable[..., Any]:
    """Return the forward of a class's models that scores each document of a packed row.

    It has the signature of the class's own, by which a Trainer chooses the columns of a dataset and
    how it averages the loss.
    """

    @our_forward
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _pool(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


def _pool(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Score the last token of each document of a packed row."""
    names = list(inspect.signature(type(self).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = given.get("attention_mask")
    told = mask.lengths if isinstance(mask, LayoutMask) else given
    packed, offsets = told.get("packed"), told.get("cu_seq_lens_q")
    if packed is None and offsets is None:
        return type(self).forward(self, *args, **kwargs)
    labels = given.pop("labels", None)
    as_tuple = given.pop("return_dict", None) is False
    out = getattr(self, self.base_model_prefix)(**given)
    rows: Tensor = out.last_hidden_state.flatten(0, 1)
    if packed is None:
        packed = layout_of_offsets(offsets, rows.shape[0])
    last = cuseq.ops.segment_last(rows, packed.to(rows.device))
    if not torch.compiler.is_compiling():
        filled = packed.lengths_on_host().nonzero().flatten()
        if filled.numel() < last.shape[0]:  # a document without tokens has the padding in front
            last = last[filled.to(last.device)]
    logits = self.score(last)
    loss = None
    if labels is not None:
        loss = self.loss_function(
            logits=logits, labels=labels, pooled_logits=logits, config=self.config
        )
    found = SequenceClassifierOutputWithPast(
        loss=loss,
        logits=logits,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        **{name: out[name] for name in cache_names(out)},
    )
    return found.to_tuple() if as_tuple else found
