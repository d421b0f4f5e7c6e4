"""Find leaks between documents, by changing tokens and by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuseq.debug.packing_check._documents import Document, boundaries, two_tokens
from cuseq.debug.packing_check._runs import Outcome, Row, Runs

# Most documents to probe one by one; each costs two forward passes and a backward pass.
_MAX_ALONE = 8

# Pairs (document, position in it) of the changed tokens.
Changes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Leak:
    """The largest effect of one document on another.

    Attributes:
        size: absolute effect; 0 if there is none, NaN if the result was NaN.
        sources, targets: indices of the documents that leak and of those that they leak into.
            Several are given if the leak was only narrowed down to a group.
        changes: the changed tokens of the sources; empty for the backward pass.
    """

    size: float = 0.0
    sources: tuple[int, ...] = (0,)
    targets: tuple[int, ...] = (0,)
    changes: Changes = ()

    def __str__(self) -> str:
        if self.size == 0:
            return ""
        return f"{_one_of(self.sources)} leaks into {_one_of(self.targets)}"


def forward_leak(
    runs: Runs, documents: Sequence[Document], row: Row, logits: Tensor, noise: float
) -> Leak:
    """Return the largest change of logits `[tokens, vocabulary]` in unchanged documents.

    Args:
        noise: changes up to this size do not count.
    """

    def largest(groups: Iterable[Collection[int]]) -> Leak:
        worst = Leak()
        for group in groups:
            for changes in changes_of(documents, group):
                changed = runs.packed(with_other_tokens(documents, changes)).logits
                size, target = _largest_elsewhere(changed - logits, row, group)
                if _exceeds(size, max(worst.size, noise)):
                    worst = Leak(size, tuple(group), (target,), changes)
        return worst

    return _of_one(largest, len(documents))


def backward_leak(packed: Outcome, row: Row) -> Leak | None:
    """Return the largest gradient of one document's logits in another's embeddings.

    The logits are weighted with fixed random numbers. Returns None if no module was seen to look up
    the tokens. Keeps the graph.
    """
    if not packed.embeddings or not packed.logits.requires_grad:
        return None

    def largest(groups: Iterable[Collection[int]]) -> Leak:
        worst = Leak()
        for group in groups:
            mine = row.belongs_to(group)
            weights = torch.zeros_like(packed.logits)
            generator = torch.Generator().manual_seed(min(group))
            weights[mine] = torch.randn(packed.logits[mine].shape, generator=generator).to(weights)
            gradients = torch.autograd.grad(
                packed.logits, packed.embeddings, weights, retain_graph=True, allow_unused=True
            )
            for rows in packed.of_tokens(gradients).values():
                size, source = _largest_elsewhere(rows, row, group)
                if _exceeds(size, worst.size):
                    worst = Leak(size, (source,), tuple(group))
        return worst

    return _of_one(largest, int(row.document[-1]) + 1)


def padding_leak(
    runs: Runs, documents: Sequence[Document], row: Row, logits: Tensor
) -> float | None:
    """Return how much other pad tokens change the logits; None if there is no padding."""
    pads = row.pads()
    if row.batch is None or len(pads) == 0:
        return None
    ids = row.batch["input_ids"].clone()
    flat = ids.view(-1)
    one, other = two_tokens(documents)
    flat[pads] = torch.where(flat[pads] == one, other, one).to(flat)
    padded_otherwise = replace(row, batch={**row.batch, "input_ids": ids})
    return float((runs.packed(documents, padded_otherwise).logits - logits).abs().max())


def with_other_tokens(documents: Sequence[Document], changes: Changes) -> list[Document]:
    changed, (one, other) = list(documents), two_tokens(documents)
    for i, place in changes:
        token = other if int(documents[i].ids[place]) == one else one
        changed[i] = documents[i].with_token(place, token)
    return changed


def changes_of(documents: Sequence[Document], group: Iterable[int]) -> list[Changes]:
    """Return the changes to try: the first token of each document of a group, then the last ones.

    If that token is a boundary token, the token beside it is changed instead. A document of
    boundary tokens alone is not changed.
    """
    edges = boundaries(documents)
    first: Changes = ()
    last: Changes = ()
    for i in group:
        ids = documents[i].ids.tolist()
        places = [place for place, token in enumerate(ids) if token not in edges]
        first += tuple((i, place) for place in places[:1])
        last += tuple((i, place) for place in places[-1:])
    return [changes for changes in dict.fromkeys((first, last)) if changes]


def groups_of(count: int) -> list[list[int]]:
    """Return the groups of documents to probe together.

    Few documents are probed one by one. Of many, some are probed alone, and the rest in halves
    chosen so that for any two documents one group holds the first and not the second.
    """
    alone = min(count, _MAX_ALONE)
    groups = [[i] for i in sorted({round(i * (count - 1) / (alone - 1)) for i in range(alone)})]
    if count > alone:
        for bit in range((count - 1).bit_length()):
            for value in (0, 1):
                groups.append([i for i in range(count) if i >> bit & 1 == value])
    return groups


def _of_one(largest: Callable[[Iterable[Collection[int]]], Leak], count: int) -> Leak:
    """Return the largest leak, narrowed to one source and one target if a single pair shows it."""
    leak = largest(groups_of(count))
    group = max(leak.sources, leak.targets, key=len)
    if len(group) == 1:
        return leak
    alone = largest([i] for i in group)
    return leak if alone.size == 0 else alone


def _largest_elsewhere(rows: Tensor, row: Row, group: Collection[int]) -> tuple[float, int]:
    """Return the largest absolute value of `[tokens, ...]` outside a group, and its document."""
    sizes = rows.detach().abs().amax(-1).masked_fill(row.belongs_to(group), 0)
    token = int(sizes.nan_to_num(nan=math.inf).argmax())
    return float(sizes[token]), int(row.document[token])


def _exceeds(size: float, limit: float) -> bool:
    """Return whether size is above limit. NaN exceeds every number, and nothing exceeds NaN."""
    return not (math.isnan(limit) or size <= limit)


def _one_of(documents: Sequence[int]) -> str:
    if len(documents) == 1:
        return f"document {documents[0]}"
    more = ", ..." if len(documents) > 8 else ""
    return f"one of documents {', '.join(map(str, documents[:8]))}{more}"
