"""Packed and padding-free SFT with TRL, entered through `cuseq.enable(trainer)`.

    trainer = SFTTrainer(model, SFTConfig(packing=True, ...), train_dataset=...)
    cuseq.enable(trainer)
    trainer.train()

TRL's collator marks the documents of a row only by positions that restart. This module makes a
`cuseq.PackedLayout` from the lengths that TRL's packer stores with each row, while they are still
Python ints. Every layer gets that one object, so no layer searches tensors for documents. The loss
stays TRL's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

from cuseq._base.foreign import check_fields, load, private

load("trl", "cuseq's integration with TRL")  # before the modules that import it

import datasets
import pyarrow.compute
import torch
from accelerate.utils import is_peft_model
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import cuseq
from cuseq._base.arguments import round_up
from cuseq._base.labels import IGNORE_INDEX
from cuseq.data.collator import part_of
from cuseq.distributed import ContextParallel
from cuseq.integrations._enabled import Enabled, check_same_options
from cuseq.integrations.transformers._enable import (
    enable_model_of_trainer,
    release_model_of_trainer,
)
from cuseq.integrations.transformers._graphed import GraphedTraining, check_option
from cuseq.integrations.transformers._private import (
    check_token_count,
    forget_evaluation_loaders,
    signature_columns,
)
from cuseq.integrations.transformers._shared_rows import SharedRows, check_shared_rows
from cuseq.integrations.transformers._trainer import count_real_tokens, restore_methods
from cuseq.layout import positions_for_models

__all__ = ["PackedCollator", "PackedRows"]

_PREPARE = "_prepare_dataset"  # the method by which an SFTTrainer tokenizes and packs a dataset

# Options of TRL's collator. cuseq does not implement any other field.
_FIELDS = {
    "pad_token_id",
    "padding_free",
    "return_position_ids",
    "pad_to_multiple_of",
    "return_tensors",
}


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


class _State(NamedTuple):
    """What `disable_trainer` needs to restore a trainer."""

    enabled: Enabled
    options: dict[str, Any]
    collator: DataCollatorForLanguageModeling
    train_dataset: Any


# No value may refer to its trainer, which would then never be freed.
_states: weakref.WeakKeyDictionary[SFTTrainer, _State] = weakref.WeakKeyDictionary()


def enable_trainer(
    trainer: SFTTrainer,
    *,
    rope: bool = True,
    qk_norm: bool = True,
    backend: str = "auto",
    bin_pack: bool | str = False,
    capacity: int | None = None,
    cp: ContextParallel | None = None,
    graph: bool = False,
) -> Enabled:
    """Make a packed or padding-free SFTTrainer train with cuseq; `cuseq.enable` calls this.

    It replaces parts of the model and the data collator (by `PackedCollator`); with `bin_pack` or
    `cp` the training dataset (by `PackedRows`); with `graph` the training step. With `cp` the
    trainer may have padded batches. A trainer that is refused is unchanged.
    """
    if cp is not None:
        _check_shares(trainer)
    _check_sft(trainer)
    check_option(graph, cp)
    strategy = "bfd" if bin_pack is True or (cp is not None and bin_pack is False) else bin_pack
    options = {
        "rope": rope,
        "qk_norm": qk_norm,
        "backend": backend,
        "bin_pack": strategy,
        "capacity": capacity,
        "cp": cp,
        "graph": graph,
    }
    if trainer in _states:
        state = _states[trainer]
        check_same_options(state.options, options)
        enable_model_of_trainer(trainer, rope=rope, qk_norm=qk_norm, backend=backend)
        return state.enabled
    _check_packs(trainer, cp is not None)
    _check_collator(trainer.data_collator)
    _check_model(trainer)
    check_token_count()
    private(SFTTrainer, _PREPARE)
    if cp is None:
        _check_parallelism(trainer)
    else:
        check_shared_rows(trainer, cp)
    before, collator = trainer.train_dataset, trainer.data_collator
    rows = before
    if strategy is not False:
        rows = _packed_rows(trainer, strategy, capacity)
    elif capacity is not None:
        raise ValueError(f"capacity must be None without bin_pack, got {capacity}")

    fields = {name: getattr(collator, name) for name in _FIELDS}
    training = _graphed_training(trainer, rows, capacity, fields) if graph else None
    model = enable_model_of_trainer(trainer, rope=rope, qk_norm=qk_norm, backend=backend)
    if graph and any(warning.startswith("LEAKS") for warning in model.warnings):
        release_model_of_trainer(trainer)
        raise ValueError(
            "trainer.model must not have recurrent layers that cuseq does not know, for graph=True:"
            f" they read offsets that a graph cannot replay, got {model.warnings[0]}"
        )
    name = type(trainer).__name__
    replaced = (*model.replaced, f"collator:{type(collator).__name__}")
    _put(trainer, PackedCollator(**fields, cp=cp), rows)
    _keep_packed_rows(trainer)
    count_real_tokens(trainer)
    if cp is not None:
        SharedRows(trainer, cp).install()
        replaced = (*replaced, f"context_parallel:{name}")
    if training is not None:
        training.install()
        replaced = (*replaced, f"training_step:{name}")
    enabled = Enabled("trainer", replaced, model.left_alone, model.warnings)
    _states[trainer] = _State(enabled, options, collator, before)
    return enabled


def disable_trainer(trainer: SFTTrainer) -> None:
    """Restore what `enable_trainer` replaced: the collator, the dataset, the model's parts."""
    _check_sft(trainer)
    state = _states.pop(trainer, None)
    if state is None:
        return
    restore_methods(trainer)
    delattr(trainer, _PREPARE)
    _put(trainer, state.collator, state.train_dataset)


def _put(trainer: SFTTrainer, collator: DataCollatorForLanguageModeling, rows: Any) -> None:
    forget_evaluation_loaders(trainer)  # persistent workers would keep using the old collator
    trainer.data_collator = collator
    trainer.train_dataset = rows


def _keep_packed_rows(trainer: SFTTrainer) -> None:
    """Let `evaluate` take rows that are packed already, such as those of the training dataset.

    TRL packs what it is given and drops the column `seq_lengths`, so that the documents of a row
    would be one.
    """
    prepare = getattr(type(trainer), _PREPARE)
    own = weakref.ref(trainer)

    def prepared(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if "seq_lengths" in (getattr(dataset, "column_names", None) or ()):
            return dataset
        return prepare(own(), dataset, *args, **kwargs)

    setattr(trainer, _PREPARE, prepared)


# ------------------------------------------------------------------------------------------- checks


def _check_sft(trainer: SFTTrainer) -> None:
    if not isinstance(trainer, SFTTrainer):
        raise TypeError(
            f"trainer must be an SFTTrainer, got {type(trainer).__name__}: the batches of other "
            "trainers hold pairs or completions in columns that their losses take apart, and a "
            "packed row has no columns"
        )


def _check_shares(trainer: Any) -> None:
    if not isinstance(trainer, SFTTrainer):
        raise ValueError(
            f"cp must be None for a {type(trainer).__name__}, got one: only an SFTTrainer has a "
            "loss that is a sum over the tokens of a packed row"
        )


def _check_packs(trainer: SFTTrainer, packs: bool) -> None:
    args = trainer.args
    if not (packs or trainer.padding_free or args.packing):
        raise ValueError(
            "trainer must have packing=True or padding_free=True in its SFTConfig, got padded "
            "batches: the trainer prepared its dataset for padding when it was made"
        )
    if args.remove_unused_columns:
        columns = signature_columns(trainer)
        if "seq_lengths" not in columns:
            raise ValueError(
                "trainer must keep the column seq_lengths, which says where documents lie, got "
                f"{columns}: set remove_unused_columns=False"
            )


def _check_collator(collator: Any) -> None:
    if type(collator) is not DataCollatorForLanguageModeling:
        raise TypeError(
            "trainer.data_collator must be TRL's DataCollatorForLanguageModeling, got "
            f"{type(collator).__name__}, whose work cuseq's collator would not do"
        )
    check_fields(DataCollatorForLanguageModeling, _FIELDS)
    if collator.return_tensors != "pt":
        raise ValueError(f'return_tensors must be "pt", got {collator.return_tensors!r}')


def _check_parallelism(trainer: SFTTrainer) -> None:
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "trainer must not split sequences over ranks without cp=ContextParallel(...) (cp_size "
            f"and sp_size must be 1), got {parallelism}: a rank's part of a row does not hold "
            "whole documents"
        )


def _check_model(trainer: SFTTrainer) -> None:
    if is_peft_model(trainer.model) and trainer.model.active_peft_config.is_prompt_learning:
        raise ValueError(
            "trainer.model must not put virtual tokens in front of its rows, got "
            f"{type(trainer.model.active_peft_config).__name__}: only the first document would see "
            "them"
        )


def _packed_rows(trainer: SFTTrainer, strategy: str, capacity: int | None) -> PackedRows:
    args, dataset = trainer.args, trainer.train_dataset
    if args.packing and args.packing_strategy == "wrapped":
        raise ValueError(
            'packing_strategy must not be "wrapped" with bin_pack or cp, which pack documents '
            'again, got "wrapped": its rows are cut without regard for documents'
        )
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        raise TypeError(
            "bin_pack needs a datasets.Dataset without a transform, whose lengths are known before "
            f"it is read, got {type(dataset).__name__}; cuseq.data.PackedStream packs streams"
        )
    capacity = args.max_length if capacity is None else capacity
    if capacity is None:
        raise ValueError("capacity must be given if the trainer has max_length=None, got None")
    overlong = "split" if args.packing_strategy == "bfd_split" else "truncate"
    return PackedRows(dataset, capacity, strategy, overlong)


def _graphed_training(
    trainer: SFTTrainer, rows: Any, capacity: int | None, fields: dict[str, Any]
) -> GraphedTraining:
    """Return the step of `graph=True`, which takes rows of one shape."""
    from cuseq.integrations._trl_graphed import FixedCollator, GraphedSFT

    capacity = trainer.args.max_length if capacity is None else capacity
    if capacity is None:
        raise ValueError(
            "max_length must be given in SFTConfig for graph=True, or bin_pack=True with "
            "capacity, since all rows have one length, got None"
        )
    batch_size, multiple = trainer.args.train_batch_size, fields["pad_to_multiple_of"] or 1
    total_tokens = round_up(batch_size * capacity, multiple)
    max_seqs = _most_documents(rows, batch_size)
    training = GraphedSFT(
        trainer, FixedCollator(**fields, total_tokens=total_tokens, max_seqs=max_seqs)
    )
    training.check()
    return training


def _most_documents(rows: Any, batch_size: int) -> int:
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
        tables = rows.select_columns("seq_lengths").with_format("arrow").iter(batch_size=10_000)
        counts = torch.cat(
            [_numbers(pyarrow.compute.list_value_length(t["seq_lengths"])) for t in tables]
        )
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
    packed = "seq_lengths" in dataset.column_names
    column = "seq_lengths" if packed else "input_ids"
    sizes, flat = [], []  # the sizes of the lists in a column, and their concatenated elements
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=10_000):
        sizes.append(_numbers(pyarrow.compute.list_value_length(table[column])))
        if packed:
            flat.append(_numbers(pyarrow.compute.list_flatten(table[column])))
    sizes = torch.cat(sizes)
    if not packed:
        return torch.arange(len(sizes)), torch.zeros_like(sizes), sizes
    lengths = torch.cat(flat)
    rows = torch.repeat_interleave(sizes)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    first = offsets[sizes.cumsum(0) - sizes]  # offset of each row's first token
    return rows, offsets[:-1] - first[rows], lengths


def _numbers(column: Any) -> torch.Tensor:
    return torch.tensor(column.to_numpy(), dtype=torch.int64)
