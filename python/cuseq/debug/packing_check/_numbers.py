"""Logits, loss and gradients of the documents, packed and alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuseq._base.labels import IGNORE_INDEX, shifted
from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._runs import Outcome, Runs

# A tensor smaller than this share of all tensors together is measured against that share: a
# gradient that is zero up to rounding has no meaningful relative error.
_SMALL = 0.01


@dataclass
class Totals:
    """Results over all documents.

    Attributes:
        logits: `[tokens, vocabulary]`.
        loss: mean over all targets; the model's own if it returns one.
        own_loss: whether the model returns a loss.
        cross_entropy: mean over all targets, computed from the logits.
        gradients: gradients of the loss in each parameter that requires one, by name; None means
            zero.
        embeddings: gradients of the loss in each document's looked-up embeddings, by document;
            empty if the lookups were not seen.
    """

    logits: Tensor
    loss: float = 0.0
    own_loss: bool = False
    cross_entropy: float = 0.0
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    embeddings: dict[str, Tensor] = field(default_factory=dict)


def packed_totals(runs: Runs, documents: Sequence[Document], packed: Outcome) -> Totals:
    """Compute the totals of a packed run; frees its graph."""
    names, parameters = _parameters(runs.model)
    plain = _cross_entropy(packed.logits, documents)
    loss = plain if packed.loss is None else packed.loss
    gradients = _gradients(loss, [*parameters, *packed.embeddings])
    totals = Totals(packed.logits.detach(), float(loss.detach()), packed.loss is not None)
    totals.cross_entropy = float(plain.detach())
    totals.gradients = dict(zip(names, gradients[: len(names)], strict=True))
    lengths = [document.length for document in documents]
    for number, rows in packed.of_tokens(gradients[len(names) :]).items():
        for i, part in enumerate(rows.split(lengths)):
            totals.embeddings[_document_name(i, number)] = part
    return totals


def alone_totals(runs: Runs, documents: Sequence[Document], keys: Collection[str]) -> Totals:
    """Compute the totals of the single runs, each weighted with its number of targets.

    Args:
        runs, documents: what to run.
        keys: keys of the packed batch.
    """
    names, parameters = _parameters(runs.model)
    totals = Totals(torch.empty(0), gradients=dict.fromkeys(names))
    targets = sum(document.num_targets for document in documents)
    logits = []
    for i, document in enumerate(documents):
        alone = runs.alone(document, keys)
        logits.append(alone.logits.detach())
        gradients: list[Tensor | None] = [None] * (len(names) + len(alone.embeddings))
        if document.num_targets > 0:
            weight = document.num_targets / targets
            plain = _cross_entropy(alone.logits, [document])
            loss = plain if alone.loss is None else alone.loss
            totals.cross_entropy += weight * float(plain.detach())
            totals.loss += weight * float(loss.detach())
            gradients = _gradients(loss * weight, [*parameters, *alone.embeddings])
        for name, gradient in zip(names, gradients[: len(names)], strict=True):
            totals.gradients[name] = _sum(totals.gradients[name], gradient)
        for number, rows in alone.of_tokens(gradients[len(names) :]).items():
            totals.embeddings[_document_name(i, number)] = rows
    totals.logits = torch.cat(logits)
    return totals


def crossing_gap(totals: Totals, documents: Sequence[Document]) -> float:
    """Return how much the loss would grow if labels crossed document boundaries.

    That is, if each document's last token had to predict the first token of the next document.
    """
    labels = torch.cat([document.labels for document in documents])
    targets = shifted(labels)
    return float(_mean_loss(totals.logits, targets)) - totals.cross_entropy


def token_errors(packed: Tensor, alone: Tensor) -> Tensor:
    """Return the relative L2 error of each row of two `[tokens, vocabulary]`; infinity for NaN.

    Rows with a norm below average are measured against the average. Equal rows have error 0, even
    if they are zero.
    """
    if packed.shape != alone.shape:
        raise ValueError(
            "logits must have the same width packed and alone, got shapes "
            f"{tuple(packed.shape)} and {tuple(alone.shape)}"
        )
    packed, alone = wide(packed), wide(alone)
    norms = alone.norm(dim=-1)
    errors = (packed - alone).norm(dim=-1)
    errors = torch.where(errors == 0, 0, errors / norms.clamp(min=float(norms.mean())))
    return errors.nan_to_num(nan=math.inf, posinf=math.inf)


def worst_error(
    packed: Mapping[str, Tensor | None], alone: Mapping[str, Tensor | None]
) -> tuple[float, str] | None:
    """Return the largest relative L2 error of tensors with equal names, and that name.

    A tensor of None means zero. Returns None if there is nothing to compare.
    """
    if not packed or packed.keys() != alone.keys():
        return None
    norms = {name: _norm(tensor) for name, tensor in alone.items()}
    floor = _SMALL * math.hypot(*norms.values())
    worst = -1.0, ""
    for name, norm in norms.items():
        one, other = packed[name], alone[name]
        error = _norm(_sum(one, None if other is None else -other))
        worst = max(worst, (relative(error, max(norm, floor)), name))
    return worst


def relative(error: float, norm: float) -> float:
    if error == 0:
        return 0.0
    value = error / norm if norm > 0 else math.inf
    return math.inf if math.isnan(value) else value


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in at least fp32, so that the comparison rounds less than the model did."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _document_name(i: int, number: int) -> str:
    return f"document {i}" + (f", of lookup {number}" if number else "")


def _parameters(model: nn.Module) -> tuple[list[str], list[Tensor]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in trained], [parameter for _, parameter in trained]


def _cross_entropy(logits: Tensor, documents: Sequence[Document]) -> Tensor:
    """Return the mean cross entropy of `[tokens, vocabulary]` over the documents' targets."""
    targets = [shifted(document.labels) for document in documents]
    return _mean_loss(logits, torch.cat(targets))


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), targets.to(logits.device), ignore_index=IGNORE_INDEX)


def _gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    if not inputs or not loss.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        given = one if other is None else other
        return None if given is None else wide(given)
    return wide(one) + wide(other)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(wide(tensor).norm())
