"""Find documents whose logits depend, in any bit, on where they lie and on who lies beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._leaks import groups_of
from cuseq.debug.packing_check._runs import Runs

# Documents of a row of the same tokens, each with its number among the user's; None for neighbours
# made for this row.
Arrangement = list[tuple[int | None, Document]]


@dataclass(frozen=True)
class Moved:
    """The largest change of a document's logits in another row of the same length.

    Attributes:
        size: absolute change; 0 if no bit changed.
        document: which document.
        row: the row that shows it.
    """

    size: float = 0.0
    document: int = 0
    row: tuple[tuple[int | None, Document], ...] = ()

    def __str__(self) -> str:
        if self.size == 0:
            return ""
        lengths = ", ".join(str(document.length) for _, document in self.row)
        return f"document {self.document} in a row of lengths {lengths}"


def largest_move(runs: Runs, documents: Sequence[Document], logits: Tensor) -> Moved:
    """Return the largest change of a document's logits `[tokens, vocabulary]` in other rows."""
    expected = logits.split([document.length for document in documents])
    worst = Moved()
    for row in arrangements(documents):
        found = runs.packed([document for _, document in row]).logits
        parts = found.split([document.length for _, document in row])
        for (number, _), part in zip(row, parts, strict=True):
            if number is None or torch.equal(part, expected[number]):
                continue
            size = float((part - expected[number]).abs().max())
            if not size <= worst.size:  # NaN too
                worst = Moved(size, number, tuple(row))
    return worst


def arrangements(documents: Sequence[Document]) -> Iterator[Arrangement]:
    """Yield other rows of the same length: in other orders, and one document among strangers.

    A stranger has the tokens of other documents. There is none if examples have keys beside tokens
    and labels.
    """
    numbered: Arrangement = list(enumerate(documents))
    half = len(documents) // 2
    yield numbered[::-1]
    yield numbered[half:] + numbered[:half]
    if any(document.others for document in documents):
        return
    for number in (group[0] for group in groups_of(len(documents)) if len(group) == 1):
        others = [document for i, document in enumerate(documents) if i != number]
        ids = torch.cat([document.ids for document in others])
        for cut in (0, 1, len(ids) // 3, len(ids)):
            row: Arrangement = [(number, documents[number])]
            before, after = ids[:cut], ids[cut:]
            if len(before):
                row.insert(0, (None, _stranger(before, others[0])))
            if len(after):
                row.append((None, _stranger(after, others[0])))
            yield row


def first_to_differ(
    runs: Runs, documents: Sequence[Document], moved: Moved
) -> tuple[str, nn.Module] | None:
    """Return the first module that computes a moved document otherwise from the same inputs."""
    elsewhere = [number for number, _ in moved.row].index(moved.document)
    others = [document for _, document in moved.row]
    return runs.first_to_differ((documents, [moved.document]), (others, [elsewhere]))


def _stranger(ids: Tensor, like: Document) -> Document:
    return replace(like, ids=ids, labels=ids)
