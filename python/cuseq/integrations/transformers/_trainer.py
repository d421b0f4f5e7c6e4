"""Implementation of `cuseq.enable` for a transformers Trainer, which keeps its data collator.

With `cp` the collator is replaced by a copy that deals rows to the ranks that share them; with
`capacity` the trainer's rows are planned.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from cuseq._base.arguments import check_flag, shown
from cuseq._base.models import gather_what_is_needed
from cuseq.data.collator import PackingCollator
from cuseq.data.multimodal import MultimodalPackingCollator
from cuseq.distributed import ContextParallel
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
from cuseq.integrations.transformers._graphed import GraphedTraining, graph_of
from cuseq.integrations.transformers._planned_rows import (
    PlannedRows,
    check_planned_rows,
    planned_rows_of,
)
from cuseq.integrations.transformers._private import (
    COUNT_TOKENS,
    check_token_count,
    forget_evaluation_loaders,
    signature_columns,
)
from cuseq.integrations.transformers._shared_rows import (
    SharedRows,
    check_shared_rows,
    shared_rows_of,
)
from cuseq.integrations.transformers._warn import warn_once
from cuseq.integrations.transformers.documents import NAMES
from cuseq.layout import PackedLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack


_COLLATORS = (PackingCollator, MultimodalPackingCollator)
_PADDED = (
    "PADDED: the trainer's {} pads its batches, and the model computes the padding as before, so "
    "that cuseq gains little, unless the examples are packed rows already. Make the Trainer with "
    "data_collator=cuseq.PackingCollator(), or call "
    "cuseq.enable(trainer, collator=cuseq.PackingCollator())"
)


class _GathersWhatIsNeeded(TrainerCallback):
    """Calls `gather_what_is_needed` once the trainer has sharded its model. `disable` leaves what
    that did as it is.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        gather_what_is_needed(model)


class _State(NamedTuple):
    enabled: Enabled
    options: TrainerOptions
    collator: Any  # the trainer's own, if it was replaced


# No value may refer to its trainer, which would then never be freed.
_states: weakref.WeakKeyDictionary[Trainer, _State] = weakref.WeakKeyDictionary()


def enable_trainer(trainer: Trainer, **options: Unpack[TrainerOptions]) -> Enabled:
    """Enable the model of a Trainer; `cuseq.enable` calls this with all options."""
    cp, graph, collator = options["cp"], options["graph"], options["collator"]
    check_flag(graph, "graph")
    if collator is not None:
        _check_collator(trainer, collator)
    check_not_given(
        options, ("tree", "micro_batch_tokens"), trainer,
        "it is for trainers of TRL whose samples share their prompts",
    )  # fmt: skip
    check_not_given(
        options, ("bin_pack",), trainer,
        "capacity plans its rows; bin_pack is for an SFTTrainer, which packs its dataset"
    )  # fmt: skip
    if trainer in _states:
        state = _states[trainer]
        check_same_options(state.options, options)
        enable_model_of_trainer(trainer, options)
        return state.enabled
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must have a model, got model_init, which makes another model when training "
            "begins: call cuseq.enable(model) inside model_init"
        )
    before = trainer.data_collator
    if collator is not None and graph:
        raise ValueError(
            "collator must be None with graph=True, got one: make the Trainer with it, as "
            "data_collator"
        )
    packing = before if collator is None else collator
    if graph and cp is not None and isinstance(packing, MultimodalPackingCollator):
        raise ValueError(
            f"cp must be None with graph=True for a MultimodalPackingCollator, got {cp!r}: the "
            "images of a rank have no fixed number"
        )
    if cp is None and isinstance(packing, _COLLATORS) and packing.cp is not None:
        raise ValueError(
            f"cp must be given to cuseq.enable if the trainer's {type(packing).__name__} has one, "
            "got None: the trainer would give each rank other rows"
        )
    check_token_count()
    if isinstance(packing, _COLLATORS):
        check_one_gpu(trainer)
    dealing = None if cp is None else _dealing_collator(trainer, packing, cp)
    planned = None
    if (capacity := options["capacity"]) is not None:
        check_planned_rows(trainer, packing, isinstance(packing, _COLLATORS), cp)
        planned = PlannedRows(trainer, capacity, cp)
    training = GraphedTraining(trainer) if graph else None
    if training is not None:
        training.check()
    model = enable_model_of_trainer(trainer, options)
    name = before.__name__ if inspect.isfunction(before) else type(before).__name__
    replaced, left_alone = model.replaced, model.left_alone
    padded: tuple[str, ...] = ()
    unknown = None  # the collator whose first batch tells whether it pads
    if dealing is not None:
        _put_collator(trainer, dealing)
        SharedRows(trainer, cp).install()
        replaced = (*replaced, f"collator:{name}", f"context_parallel:{type(trainer).__name__}")
    elif collator is not None:
        _put_collator(trainer, collator)
        replaced = (*replaced, f"collator:{name}")
    elif isinstance(before, _COLLATORS):
        left_alone = (*left_alone, f"the data collator {name}: it packs rows already")
    elif isinstance(before, DataCollatorWithFlattening):
        reason = (
            f"the data collator {name}: it packs rows already; those of cuseq.PackingCollator() "
            "also know their lengths on the host"
        )
        left_alone = (*left_alone, reason)
    else:
        reason = (
            f"the data collator {name}: a Trainer keeps the one it is given; rows are packed by "
            "Trainer(..., data_collator=cuseq.PackingCollator())"
        )
        left_alone = (*left_alone, reason)
        if _pads(before):
            padded = (_PADDED.format(name),)
        else:
            unknown = name
    if planned is not None:
        planned.install()
        replaced = (*replaced, f"planned_rows:{type(trainer).__name__}")
    watch_batches(trainer, unknown)
    watch_shards(trainer)
    if training is not None:
        training.install()
        replaced = (*replaced, f"training_step:{type(trainer).__name__}")
    warnings = (*model.warnings, *padded, *_dropped_columns(trainer))
    for warning in warnings[len(model.warnings) :]:
        warn_once(warning)
    enabled = Enabled("trainer", replaced, left_alone, warnings, model.attention)
    own = None if dealing is None and collator is None else before
    _states[trainer] = _State(enabled, options, own)
    return enabled


def _pads(collator: Any) -> bool:
    """Return whether a collator is one of transformers' that pad by the tokenizer."""
    is_theirs = type(collator).__module__ == "transformers.data.data_collator"
    return is_theirs and hasattr(collator, "tokenizer")


def _is_padded(mask: Any) -> bool:
    """Return whether a batch's mask is of several rows of one document, some of them padded."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) == 1:
        return False
    return bool(((mask == 0).any() & (mask <= 1).all()).item())  # others number documents


def disable_trainer(trainer: Trainer) -> None:
    """Restore what `enable_trainer` replaced; leave other trainers unchanged."""
    state = _states.pop(trainer, None)
    if state is None:
        return
    restore_methods(trainer)
    if state.collator is not None:
        _put_collator(trainer, state.collator)


def watch_batches(trainer: Trainer, collator: str | None = None) -> None:
    """Make `include_num_input_tokens_seen="non_padding"` count the real tokens of packed rows.

    A Trainer adds up the mask, which may number documents.

    Args:
        trainer: the trainer.
        collator: name of one that may pad: a warning says so if its first batch is padded. That
            reads the mask, a wait for a GPU.
    """
    count = getattr(type(trainer), COUNT_TOKENS)
    own = weakref.ref(trainer)
    unknown = collator

    def counted(inputs: dict[str, Any]) -> None:
        nonlocal unknown
        itself, packed, mask = own(), inputs.get("packed"), inputs.get("attention_mask")
        name, unknown = unknown, None
        if name is not None and packed is None and _is_padded(mask):
            warn_once(_PADDED.format(name))
        if itself.args.include_num_input_tokens_seen == "non_padding":
            if isinstance(mask, Tensor) and mask.dim() == 2:
                inputs = {**inputs, "attention_mask": mask != 0}
            elif isinstance(packed, PackedLayout) and "attention_mask" not in inputs:
                inputs = {**inputs, "attention_mask": ~packed.moe_padding_mask}
        count(itself, inputs)

    setattr(trainer, COUNT_TOKENS, counted)


def watch_shards(trainer: Trainer) -> None:
    """Keep FSDP2 from gathering weights that no backward asks for, when training begins."""
    trainer.add_callback(_GathersWhatIsNeeded)


def restore_methods(trainer: Trainer) -> None:
    """Restore a trainer's own step and rows, and release its model."""
    training = graph_of(trainer)
    if training is not None:
        training.remove()
    delattr(trainer, COUNT_TOKENS)
    trainer.remove_callback(_GathersWhatIsNeeded)
    release_model_of_trainer(trainer)
    planned = planned_rows_of(trainer)
    if planned is not None:
        planned.restore()
    shared = shared_rows_of(trainer)
    if shared is not None:
        shared.restore()


def _dropped_columns(trainer: Trainer) -> list[str]:
    """Return a warning if a Trainer drops columns that may say where documents end."""
    collates_documents = isinstance(trainer.data_collator, PackingCollator)
    if collates_documents or not trainer.args.remove_unused_columns:
        return []
    evaluated = trainer.eval_dataset
    datasets = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
    names = {name for one in (trainer.train_dataset, *datasets) for name in _columns_of(one)}
    dropped = sorted(names.intersection(NAMES).difference(signature_columns(trainer)))
    if not dropped:
        return []
    return [
        f"LEAKS if {' or '.join(dropped)} of the dataset says where documents end: the Trainer "
        "drops columns that the model's forward does not name, so that each row would be one "
        "document; set remove_unused_columns=False"
    ]


def _columns_of(dataset: Any) -> Iterable[str]:
    first = dataset[0] if isinstance(dataset, list) and dataset else None
    return getattr(dataset, "column_names", None) or (first if isinstance(first, dict) else ())


def _dealing_collator(trainer: Trainer, collator: Any, cp: ContextParallel) -> Any:
    """Return a copy of a collator that deals rows to the ranks of `cp`."""
    check_shared_rows(trainer, cp)
    if not isinstance(collator, _COLLATORS):
        raise ValueError(
            "trainer.data_collator must be a cuseq.PackingCollator with cp, which deals its rows, "
            "or a cuseq.data.MultimodalPackingCollator, or collator be given, got "
            f"{type(collator).__name__}"
        )
    return collator.with_cp(cp)


def _check_collator(trainer: Trainer, collator: Any) -> None:
    """Check a collator that is to replace a trainer's.

    Raises:
        TypeError: it is not a collator of cuseq.
        ValueError: the trainer drops the columns that it needs.
    """
    if not isinstance(collator, _COLLATORS):
        raise TypeError(
            "collator must be a cuseq.PackingCollator or a cuseq.data.MultimodalPackingCollator, "
            f"got {shown(collator)}"
        )
    if isinstance(collator, MultimodalPackingCollator) and trainer.args.remove_unused_columns:
        raise ValueError(
            "remove_unused_columns must be False for a MultimodalPackingCollator, got True: the "
            "trainer would drop columns of images"
        )


def _put_collator(trainer: Trainer, collator: Any) -> None:
    forget_evaluation_loaders(trainer)  # persistent workers would keep using the old collator
    trainer.data_collator = collator
