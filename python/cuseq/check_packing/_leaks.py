"""Which document hears of which: what changes with a token, and what has a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuseq.check_packing._documents import Document, other_token
from cuseq.check_packing._runs import Outcome, Row, Runs

# Documents that are changed to see who hears of it; each costs two forwards and a backward.
_MAX_PROBES = 8


@dataclass(frozen=True)
class Leak:
    """The largest effect of one document on another.

    Attributes:
        size: absolute; 0 where there is none, NaN where it is no number.
        source, target: numbers of the document that is heard and of the one that hears.
        index: the changed token's place in the source.
    """

    size: float = 0.0
    source: int = 0
    target: int = 0
    index: int = 0

    def __str__(self) -> str:
        return "" if self.size == 0 else f"document {self.target} hears of document {self.source}"


def forward_leak(
    runs: Runs, documents: Sequence[Document], row: Row, logits: Tensor, noise: float
) -> Leak:
    """The largest change of logits `[tokens, vocabulary]` in documents whose tokens stay.

    Args:
        noise: what counts as no change.
    """
    worst = Leak()
    for i in _probes(len(documents)):
        for index in sorted({0, documents[i].length - 1}):
            changed = runs.packed(with_another_token(documents, i, index)).logits
            size, target = _largest_elsewhere(changed - logits, row, i)
            if not size <= max(worst.size, noise):
                worst = Leak(size, i, target, index)
    return worst


def backward_leak(packed: Outcome, row: Row) -> Leak | None:
    """The largest gradient of a document's logits in the embeddings of others, with fixed random
    weights; None where no module was seen to look the tokens up. Keeps the graph."""
    if not packed.embeddings or not packed.logits.requires_grad:
        return None
    worst = Leak()
    for i in _probes(int(row.document[-1]) + 1):
        mine = row.document == i
        weights = torch.zeros_like(packed.logits)
        generator = torch.Generator().manual_seed(i)
        weights[mine] = torch.randn(packed.logits[mine].shape, generator=generator).to(weights)
        gradients = torch.autograd.grad(
            packed.logits, packed.embeddings, weights, retain_graph=True, allow_unused=True
        )
        for rows in packed.of_tokens(gradients).values():
            size, source = _largest_elsewhere(rows, row, i)
            if not size <= worst.size:
                worst = Leak(size, source, i)
    return worst


def padding_leak(
    runs: Runs, documents: Sequence[Document], row: Row, logits: Tensor
) -> float | None:
    """How much other pad tokens change the logits; None where there is no padding."""
    pads = row.pads()
    if len(pads) == 0:
        return None
    ids = row.batch["input_ids"].clone()
    flat = ids.view(-1)
    for slot in pads.tolist():
        flat[slot] = other_token(documents, int(flat[slot]))
    padded_otherwise = replace(row, batch={**row.batch, "input_ids": ids})
    return float((runs.packed(documents, padded_otherwise).logits - logits).abs().max())


def with_another_token(documents: Sequence[Document], i: int, index: int) -> list[Document]:
    changed = list(documents)
    token = other_token(documents, int(documents[i].ids[index]))
    changed[i] = documents[i].with_token(index, token)
    return changed


def _probes(count: int) -> list[int]:
    """Documents to change: all, or some from the first to the last."""
    probes = min(count, _MAX_PROBES)
    return sorted({round(i * (count - 1) / (probes - 1)) for i in range(probes)})


def _largest_elsewhere(rows: Tensor, row: Row, i: int) -> tuple[float, int]:
    """The largest absolute value outside document i, of `[tokens, ...]`, and its document."""
    sizes = rows.detach().abs().amax(-1).masked_fill(row.document == i, 0)
    token = int(sizes.nan_to_num(nan=math.inf).argmax())
    return float(sizes[token]), int(row.document[token])
