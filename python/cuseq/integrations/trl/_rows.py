"""Rows for an SFTTrainer: a dataset that packs its documents, and a collator that knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

import datasets
import pyarrow.compute
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import cuseq
from cuseq._base.arguments import round_up
from cuseq._base.labels import IGNORE_INDEX
from cuseq.data.collator import part_of
from cuseq.distributed import ContextParallel
from cuseq.integrations.transformers._planned_rows import list_lengths
from cuseq.layout import positions_for_models


@dataclass
class PackedCollator(DataCollatorForLanguageModeling):
    """TRL's padding-free collator that also returns the layout of the row.

    It is called with a list of examples. Each has `input_ids`; optionally `labels`, one value per
    token (default the input ids); and optionally `seq_lengths`, the lengths of the documents in the
    example (default one document). Documents of length zero are skipped. Other keys are ignored, as
    in TRL.

    It returns a dict with TRL's keys, all documents in one row: `input_ids`, `labels` (-100 on the
    first token of each document and on padding) and `position_ids`, int64 `[1, total_tokens]`;
    `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `[n_seqs + 1]`; `max_length_q` and `max_length_k`,
    ints; and `seq_idx`, int32 `[1, total_tokens]`, for layers that carry a state. It adds `packed`,
    the row's `PackedLayout`, which attention reads. Padding by `pad_to_multiple_of` is the layout's
    tail; the offsets count it as one more sequence. All tensors are on the host.

    With `cp` it returns this rank's part of the row and the keys of `PackingCollator(cp=...)`, none
    of TRL's keys for offsets.

    Raises:
        ValueError: an example's `seq_lengths` or `labels` do not fit its tokens, or no example has
            a token; the message names the example.
    """

    cp: ContextParallel | None = None

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.row_of(examples)

    def row_of(
        self,
        examples: Sequence[Mapping[str, Any]],
        total_tokens: int | None = None,
        max_seqs: int | None = None,
    ) -> dict[str, Any]:
        """Return the batch of the examples, in a row of `total_tokens` if given."""
        lengths = [n for i, example in enumerate(examples) for n in _lengths(example, i) if n]
        if not lengths:
            raise ValueError(
                f"examples must hold at least one token, got {len(examples)} empty ones"
            )
        tokens, multiple = sum(lengths), self.pad_to_multiple_of or 1
        if self.cp is not None:
            multiple = lcm(multiple, self.cp.size)
        total = round_up(tokens, multiple) if total_tokens is None else total_tokens
        packed = cuseq.PackedLayout.from_lengths(lengths, total, max_seqs=max_seqs)
        given = [_labels(example, i) for i, example in enumerate(examples)]
        labels = _row(given, total, IGNORE_INDEX)
        batch = {
            "input_ids": _row([e["input_ids"] for e in examples], total, self.pad_token_id),
            "labels": cuseq.data.mask_boundary_labels(labels, packed),
        }
        if self.cp is not None:
            return part_of(batch, packed, self.cp)

        segments = [*lengths, total - tokens] if total > tokens else lengths
        offsets = torch.tensor([0, *accumulate(segments)], dtype=torch.int32)
        return batch | {
            "position_ids": positions_for_models(packed),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(segments),
            "max_length_k": max(segments),
            "seq_idx": packed.seq_ids.unsqueeze(0),
            "packed": packed,
        }


class PackedRows(torch.utils.data.Dataset):
    """A dataset of packed rows, each built when it is read: `input_ids`, `labels`, `seq_lengths`.

    It has the methods of `datasets.Dataset` (`select`, `map`, `shuffle` and the others). The first
    call of one builds all rows, in the cache folder of `datasets`.

    Attributes:
        plan: The `cuseq.data.PackingPlan`; its `fill` and `num_rows` measure its quality.
        column_names: The names of the columns.
    """

    def __init__(self, dataset: datasets.Dataset, capacity: int, strategy: str, overlong: str):
        """Plan rows for the documents of `dataset`; its rows may hold several (`seq_lengths`)."""
        self._rows, self._starts, lengths = _documents(dataset)
        self.plan = cuseq.data.bin_pack(lengths, capacity, strategy, overlong=overlong)
        columns = [name for name in ("input_ids", "labels") if name in dataset.column_names]
        self._dataset = dataset.select_columns(columns).with_format(None)
        self.column_names = [*columns, "seq_lengths"]
        self._built: datasets.Dataset | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(datasets.Dataset, name):
            raise AttributeError(f"PackedRows has no attribute {name}")
        if self._built is None:
            self._built = datasets.Dataset.from_generator(
                lambda: map(self.__getitem__, range(len(self)))
            )
        return getattr(self._built, name)

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        if not 0 <= number < len(self):
            raise IndexError(f"number must lie in [0, {len(self)}), got {number}")
        begin, end = self.plan.offsets[number : number + 2].tolist()
        documents = self.plan.indices[begin:end]
        starts = (self._starts[documents] + self.plan.starts[begin:end]).tolist()
        lengths = self.plan.lengths[begin:end].tolist()
        columns = self._dataset[self._rows[documents].tolist()]
        row = {
            name: [
                token
                for values, start, length in zip(rows, starts, lengths, strict=True)
                for token in values[start : start + length]
            ]
            for name, rows in columns.items()
        }
        return row | {"seq_lengths": lengths}


def most_documents(rows: Any, batch_size: int) -> int:
    """Return the most documents that `batch_size` rows of a dataset can hold."""
    if isinstance(rows, PackedRows):
        counts = rows.plan.offsets.diff()
    elif not isinstance(rows, datasets.Dataset) or rows.format["type"] == "custom":
        raise TypeError(
            "graph=True needs a datasets.Dataset without a transform, whose rows are known before "
            f"training, got {type(rows).__name__}"
        )
    elif "seq_lengths" not in rows.column_names:
        counts = torch.ones(len(rows), dtype=torch.int64)
    else:
        counts = list_lengths(rows, "seq_lengths")
    return int(counts.topk(min(batch_size, len(counts))).values.sum())


# ------------------------------------------------------------------------- from examples to one row


def _lengths(example: Mapping[str, Any], number: int) -> list[int]:
    """Return the lengths of the documents in an example."""
    tokens = len(example["input_ids"])
    if "seq_lengths" not in example:
        return [tokens]
    lengths = list(map(int, example["seq_lengths"]))
    if sum(lengths) != tokens:
        raise ValueError(
            f"seq_lengths must sum to the tokens of their example, but those of examples[{number}] "
            f"sum to {sum(lengths)} and it has {tokens}"
        )
    return lengths


def _labels(example: Mapping[str, Any], number: int) -> Sequence[int]:
    tokens, labels = example["input_ids"], example.get("labels", example["input_ids"])
    if len(labels) != len(tokens):
        raise ValueError(
            f"labels must hold one value per token, but examples[{number}] has {len(tokens)} "
            f"tokens and {len(labels)} labels"
        )
    return labels


def _row(pieces: Sequence[Sequence[int]], total: int, fill: int) -> torch.Tensor:
    """Return int64 `[1, total]`: the concatenated pieces, then `fill`."""
    row = torch.full((1, total), fill, dtype=torch.int64)
    tokens = torch.cat([torch.as_tensor(piece, dtype=torch.int64) for piece in pieces])
    row[0, : len(tokens)] = tokens
    return row


def _documents(dataset: datasets.Dataset) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each document's row, its first token in that row and its length, int64 `[n_docs]`."""
    if "seq_lengths" not in dataset.column_names:
        sizes = list_lengths(dataset, "input_ids")
        return torch.arange(len(sizes)), torch.zeros_like(sizes), sizes
    sizes = list_lengths(dataset, "seq_lengths")
    tables = dataset.select_columns("seq_lengths").with_format("arrow").iter(batch_size=10_000)
    flat = [pyarrow.compute.list_flatten(table["seq_lengths"]).to_numpy() for table in tables]
    lengths = torch.cat([torch.tensor(one, dtype=torch.int64) for one in flat])
    rows = torch.repeat_interleave(sizes)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    first = offsets[sizes.cumsum(0) - sizes]  # offset of each row's first token
    return rows, offsets[:-1] - first[rows], lengths
