"""Full rows for a Trainer, of one cost on every rank: `cuseq.enable(trainer, capacity=...)`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import seed_worker

from cuseq._base.arguments import as_int
from cuseq.data import PackedBatchSampler
from cuseq.distributed import ContextParallel
from cuseq.integrations.transformers import _private as private

if TYPE_CHECKING:
    from transformers import Trainer

_COLLATORS = "data_collator=cuseq.PackingCollator()"
# Whether rows are shuffled, by `train_sampling_strategy`.
_SHUFFLES = {"random": True, "sequential": False}


class PlannedRows(TrainerCallback):
    """The training rows of a trainer until `restore`: those of a `PackedBatchSampler`.

    A batch is a row of at most `capacity` tokens. The rows of an epoch depend on its number and the
    seed alone, so a run that Trainer resumes on as many ranks reads those that are left.
    """

    def __init__(self, trainer: Trainer, capacity: int, cp: ContextParallel | None):
        self._trainer, self._sharing = trainer, 1 if cp is None else cp.size
        self._capacity = as_int(capacity, "capacity", least=1)
        self._epoch = -1  # the last one that began
        self._sampler = self._plan()
        self._prepare = getattr(trainer, private.PREPARE_INPUTS)

    def install(self) -> None:
        trainer = self._trainer
        trainer.get_train_dataloader = self._loader
        setattr(trainer, private.PREPARE_INPUTS, self._prepare_inputs)
        trainer.add_callback(self)

    def restore(self) -> None:
        trainer = self._trainer
        del trainer.get_train_dataloader
        delattr(trainer, private.PREPARE_INPUTS)
        trainer.remove_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self._epoch = -1

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Tell the sampler its epoch, which Trainer does in some releases and epochs alone."""
        # The state's is that of a resumed run. It stands still after an epoch that was stopped.
        self._epoch = max(int(state.epoch or 0), self._epoch + 1)
        self._sampler.set_epoch(self._epoch)

    def _plan(self) -> PackedBatchSampler:
        """Return the sampler of the trainer's dataset and arguments as they are now."""
        args = self._trainer.args
        return PackedBatchSampler(
            lengths_of(self._trainer.train_dataset, args.length_column_name),
            self._capacity,
            rank=args.process_index // self._sharing,
            world_size=args.world_size // self._sharing,
            accumulation=args.gradient_accumulation_steps,
            balance="attention",
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=_SHUFFLES[args.train_sampling_strategy],
            drop_last=args.dataloader_drop_last,
        )

    def _loader(self) -> DataLoader:
        """Return the loader of this rank's rows, for `get_train_dataloader`.

        accelerate does not prepare it, which would deal the rows to ranks once more.
        """
        args = self._trainer.args
        workers = args.dataloader_num_workers
        dataset, collate = private.without_unused_columns(self._trainer)
        self._sampler = self._plan()
        if repeated := self._sampler.repeated:
            warnings.warn(
                f"cuseq: {repeated} examples are repeated in an epoch, so that all of "
                f"{args.world_size} ranks and {args.gradient_accumulation_steps} accumulated rows "
                "have one: there are too few examples",
                stacklevel=2,
            )
        return DataLoader(
            dataset,
            batch_sampler=self._sampler,
            collate_fn=_Checked(collate, self._capacity, args.length_column_name),
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            in_order=getattr(args, "dataloader_in_order", True),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch with its layout, which accelerate's loaders do elsewhere."""
        args = self._trainer.args
        moved = send_to_device(inputs, args.device, non_blocking=args.dataloader_pin_memory)
        return self._prepare(moved)


class _Checked:
    """A collator of rows that were planned by a dataset's own lengths, which may be wrong."""

    def __init__(self, collate: Callable[..., Any], capacity: int, column: str):
        self._collate, self._capacity, self._column = collate, capacity, column

    def __call__(self, examples: list[Any]) -> Any:
        tokens = sum(len(example["input_ids"]) for example in examples)
        if tokens > self._capacity:
            raise ValueError(
                f"the dataset's column {self._column!r} must have the tokens of each example, got "
                f"a row of {tokens} tokens, with capacity = {self._capacity}"
            )
        return self._collate(examples)


def planned_rows_of(trainer: Trainer) -> PlannedRows | None:
    """Return what `enable(trainer, capacity=...)` made, or None."""
    owner = getattr(vars(trainer).get("get_train_dataloader"), "__self__", None)
    return owner if isinstance(owner, PlannedRows) else None


def check_planned_rows(
    trainer: Trainer, collator: Any, packs: bool, cp: ContextParallel | None
) -> None:
    """Raise ValueError unless a trainer's rows can be planned.

    Args:
        trainer: the trainer.
        collator: what will collate its batches.
        packs: whether that makes one packed row of its examples.
        cp: whether ranks share rows by cuseq.
    """
    private.check_planned_rows(trainer)
    if not packs:
        raise ValueError(
            f"capacity must not be given for a trainer whose collator is a "
            f"{type(collator).__name__}, which does not pack: make the Trainer with {_COLLATORS}"
        )
    dataset, strategy = trainer.train_dataset, trainer.args.train_sampling_strategy
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            "capacity must not be given for a stream of examples, whose lengths are not known, got "
            f"a {type(dataset).__name__}: cuseq.data.PackedStream packs it"
        )
    if strategy not in _SHUFFLES:
        raise ValueError(
            'train_sampling_strategy must be "random" or "sequential" with capacity, which plans '
            f"the rows, got {strategy!r}"
        )
    private.check_methods(trainer, ("get_train_dataloader", private.TRAIN_SAMPLER), "capacity")
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is None:
        return
    own_cp = parallelism.cp_enabled and cp is None
    if parallelism.tp_enabled or parallelism.sp_enabled or own_cp:
        raise ValueError(
            "capacity must not be given if ranks of the trainer's ParallelismConfig read the same "
            f"rows (tp_size, sp_size, cp_size without cp), got {parallelism}"
        )


def lengths_of(dataset: Any, column: str) -> Tensor:
    """Return the tokens of each example, int64 `[n_examples]`.

    Args:
        dataset: a map-style dataset whose examples have `input_ids`, or a `datasets.Dataset`, which
            is read without making Python objects.
        column: the name of a column that has the lengths already, if the dataset has it.
    """
    names = getattr(dataset, "column_names", None) or ()
    if column in names:
        return torch.as_tensor(list(dataset[column]), dtype=torch.int64)
    datasets = sys.modules.get("datasets")
    is_table = datasets is not None and isinstance(dataset, datasets.Dataset)
    if is_table and "input_ids" in names and dataset.format["type"] != "custom":
        return list_lengths(dataset, "input_ids")
    return torch.tensor([_tokens(dataset[i], i) for i in range(len(dataset))], dtype=torch.int64)


def list_lengths(dataset: Any, column: str) -> Tensor:
    """Return the lengths of the lists in a column of a `datasets.Dataset`, int64 `[n_rows]`."""
    import pyarrow.compute

    tables = dataset.select_columns(column).with_format("arrow").iter(batch_size=10_000)
    sizes = [pyarrow.compute.list_value_length(table[column]).to_numpy() for table in tables]
    return torch.cat([torch.tensor(one, dtype=torch.int64) for one in sizes])


def _tokens(example: Any, number: int) -> int:
    if not isinstance(example, Mapping) or "input_ids" not in example:
        raise ValueError(
            "examples must have input_ids with capacity, which counts their tokens, got "
            f"train_dataset[{number}] without them"
        )
    return len(example["input_ids"])
