"""Implementation of `cuseq.enable` and `cuseq.disable` for trainers of TRL, SFT of them here."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from cuseq._base.arguments import check_flag, round_up
from cuseq._base.foreign import check_fields, private
from cuseq.integrations._enabled import (
    Enabled,
    TrainerOptions,
    check_not_given,
    check_same_options,
)
from cuseq.integrations.transformers._enable import (
    check_one_gpu,
    enable_model_of_trainer,
    release_model_of_trainer,
)
from cuseq.integrations.transformers._graphed import GraphedTraining
from cuseq.integrations.transformers._private import (
    check_token_count,
    forget_evaluation_loaders,
    signature_columns,
)
from cuseq.integrations.transformers._shared_rows import SharedRows, check_shared_rows
from cuseq.integrations.transformers._trainer import disable_trainer as disable_plain_trainer
from cuseq.integrations.transformers._trainer import enable_trainer as enable_plain_trainer
from cuseq.integrations.transformers._trainer import (
    restore_methods,
    watch_batches,
    watch_shards,
)
from cuseq.integrations.transformers.names import DOCUMENTS
from cuseq.integrations.trl._graphed import FixedCollator, GraphedSFT
from cuseq.integrations.trl._padded import (
    KINDS,
    check_no_virtual_tokens,
    disable_padded,
    enable_padded,
    is_one_of,
)
from cuseq.integrations.trl._rows import PackedCollator, PackedRows, most_documents
from cuseq.layout import PackedLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PREPARE = "_prepare_dataset"  # the method by which an SFTTrainer tokenizes and packs a dataset

# Options of TRL's collator. cuseq does not implement any other field.
_FIELDS = {
    "pad_token_id",
    "padding_free",
    "return_position_ids",
    "pad_to_multiple_of",
    "return_tensors",
}


class _State(NamedTuple):
    """The parts of an enabled trainer before `enable_trainer`, and its options."""

    enabled: Enabled
    options: TrainerOptions
    collator: DataCollatorForLanguageModeling
    train_dataset: Any


# No value may refer to its trainer, which would then never be freed.
_states: weakref.WeakKeyDictionary[SFTTrainer, _State] = weakref.WeakKeyDictionary()
# The trainers whose tokens `_count_tokens_of_rows` counts.
_counting: weakref.WeakSet[SFTTrainer] = weakref.WeakSet()


def enable_trainer(trainer: SFTTrainer, **options: Unpack[TrainerOptions]) -> Enabled:
    """Make a packed or padding-free SFTTrainer train with cuseq.

    `cuseq.enable` calls this with all options.

    It replaces parts of the model and the data collator (by `PackedCollator`); with `bin_pack` or
    `cp` the training dataset (by `PackedRows`); with `graph` the training step. With `cp` the
    trainer may have padded batches. A trainer that is refused is unchanged.
    """
    if is_one_of(KINDS, trainer):
        return enable_padded(trainer, **options)
    bin_pack, capacity, cp, graph = (
        options[name] for name in ("bin_pack", "capacity", "cp", "graph")
    )
    _check_sft(trainer)
    check_not_given(
        options, ("tree", "micro_batch_tokens"), trainer, "its documents share no prompts"
    )
    if options["collator"] is not None:
        return _enable_with_collator(trainer, **options)
    check_flag(graph, "graph")
    if graph and cp is not None:
        raise ValueError(
            f"cp must be None with graph=True for an SFTTrainer, got {cp!r}: its metrics are of "
            "whole rows; a Trainer takes both"
        )
    strategy = "bfd" if bin_pack is True or (cp is not None and bin_pack is False) else bin_pack
    options["bin_pack"] = strategy
    if trainer in _states:
        state = _states[trainer]
        check_same_options(state.options, options)
        enable_model_of_trainer(trainer, options)
        return state.enabled
    _check_packs(trainer, cp is not None)
    check_one_gpu(trainer)
    _check_collator(trainer.data_collator)
    check_no_virtual_tokens(trainer.model)
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
    model = enable_model_of_trainer(trainer, options)
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
    watch_batches(trainer)
    watch_shards(trainer)
    if cp is not None:
        SharedRows(trainer, cp).install()
        replaced = (*replaced, f"context_parallel:{name}")
    if training is not None:
        training.install()
        replaced = (*replaced, f"training_step:{name}")
    enabled = Enabled("trainer", replaced, model.left_alone, model.warnings, model.attention)
    _states[trainer] = _State(enabled, options, collator, before)
    return enabled


def disable_trainer(trainer: SFTTrainer) -> None:
    """Restore what `enable_trainer` replaced: the collator, the dataset, the model's parts."""
    if is_one_of(KINDS, trainer):
        disable_padded(trainer)
        return
    _check_sft(trainer)
    state = _states.pop(trainer, None)
    if state is None:
        if trainer in _counting:
            _counting.remove(trainer)
            delattr(trainer, "compute_loss")
        disable_plain_trainer(trainer)
        return
    restore_methods(trainer)
    delattr(trainer, _PREPARE)
    _put(trainer, state.collator, state.train_dataset)


def _enable_with_collator(trainer: SFTTrainer, **options: Unpack[TrainerOptions]) -> Enabled:
    """Enable a trainer whose rows a collator of cuseq makes, of documents as a processor gives
    them.
    """
    args = trainer.args
    if args.packing or trainer.padding_free:
        raise ValueError(
            "trainer must have packing=False and padding_free=False with a collator, which makes "
            "the rows itself"
        )
    if args.max_length is not None and not _prepares_nothing(args):
        raise ValueError(
            f"max_length must be None in SFTConfig with a collator, got {args.max_length}: TRL "
            "would cut examples inside an image; leave out examples that are too long"
        )
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    if columns and "input_ids" not in columns:
        raise ValueError(
            "trainer.train_dataset must have the columns that a processor makes, input_ids among "
            f"them, for a collator of cuseq, got {list(columns)}: call the processor in "
            "dataset.map"
        )
    enabled = enable_plain_trainer(trainer, **options)
    if "compute_loss" not in vars(trainer):  # a user's own says what it counts
        _count_tokens_of_rows(trainer)
    return enabled


def _prepares_nothing(args: Any) -> bool:
    return bool((args.dataset_kwargs or {}).get("skip_prepare_dataset", False))


def _count_tokens_of_rows(trainer: SFTTrainer) -> None:
    """Let TRL count the real tokens of a row: of planes of positions it would count one."""
    compute = type(trainer).compute_loss
    own = weakref.ref(trainer)

    def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        packed = inputs.get("packed")
        if isinstance(packed, PackedLayout) and "attention_mask" not in inputs:
            mask = (~packed.to(inputs["input_ids"].device).moe_padding_mask).long()[None]
            setattr(mask, DOCUMENTS, True)  # the model need not warn that it takes the layout
            inputs = inputs | {"attention_mask": mask}
        return compute(own(), model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    _counting.add(trainer)


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
            f"trainer must be an SFTTrainer or a {', '.join(KINDS)}, got {type(trainer).__name__}"
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
    capacity = trainer.args.max_length if capacity is None else capacity
    if capacity is None:
        raise ValueError(
            "max_length must be given in SFTConfig for graph=True, or bin_pack=True with "
            "capacity, since all rows have one length, got None"
        )
    batch_size, multiple = trainer.args.train_batch_size, fields["pad_to_multiple_of"] or 1
    total_tokens = round_up(batch_size * capacity, multiple)
    max_seqs = most_documents(rows, batch_size)
    training = GraphedSFT(
        trainer, FixedCollator(**fields, total_tokens=total_tokens, max_seqs=max_seqs)
    )
    training.check()
    return training
