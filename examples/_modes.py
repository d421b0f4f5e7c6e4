"""Ways to train on the same documents: padded, packed by transformers, packed by cuseq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from _rows import Row, Tokens

import cuseq

IGNORE_INDEX = -100

Batch = dict[str, Any]  # keyword arguments of the model


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: name for --modes and in the results file.
        label: name in tables and pictures.
        packed: True for one row of documents end to end, False for padded batches.
        cuseq: True if the model is enabled and each batch carries its layout, False for
            transformers' sdpa.
        compiled: True if layers and loss are compiled, which requires rows of one length.
    """

    name: str
    label: str
    packed: bool = True
    cuseq: bool = False
    compiled: bool = False

    def batches(self, row: Row, row_length: int, batch_size: int) -> list[Batch]:
        """Return the model's inputs for the step that trains on `row`."""
        if not self.packed:
            return padded_batches(row, batch_size)
        batch = packed_batch(row, total_tokens=row_length if self.compiled else None)
        if not self.cuseq:
            # Without a layout, transformers finds the documents where position_ids restart.
            del batch["packed"]
        return [batch]


MODES = {
    mode.name: mode
    for mode in (
        Mode("padded", "padded, sdpa", packed=False),
        Mode("packed", "packed, sdpa"),
        Mode("cuseq", "packed, cuseq", cuseq=True),
        Mode("cuseq-compiled", "packed, cuseq, compiled", cuseq=True, compiled=True),
    )
}


def packed_batch(row: Row, total_tokens: int | None) -> Batch:
    """Return the row's documents end to end, padded at the end up to `total_tokens` tokens."""
    collate = cuseq.PackingCollator(total_tokens=total_tokens)
    return collate([{"input_ids": sequence} for sequence in row])


def padded_batches(row: Row, batch_size: int) -> list[Batch]:
    """Return padded batches of the row's documents; their losses sum to the mean over targets."""
    targets = sum(len(sequence) - 1 for sequence in row)
    groups = [row[at : at + batch_size] for at in range(0, len(row), batch_size)]
    return [{**padded_batch(group), "num_items_in_batch": targets} for group in groups]


def padded_batch(sequences: list[Tokens]) -> Batch:
    """Return input_ids, attention_mask and labels, int64 [sequences, longest], right-padded."""
    shape = len(sequences), max(map(len, sequences))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX)
    for i, sequence in enumerate(sequences):
        ids = torch.tensor(sequence)
        input_ids[i, : len(ids)] = ids
        attention_mask[i, : len(ids)] = 1
        labels[i, 1 : len(ids)] = ids[1:]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
