"""Implementation of `cuseq.enable` for a transformers Trainer, which keeps its data collator."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn
from transformers import Trainer

from cuseq._arguments import check_flag
from cuseq.data.collator import PackingCollator
from cuseq.integrations._enabled import Enabled, check_same_options
from cuseq.integrations.transformers._enable import disable_model, enable_model_of_trainer
from cuseq.integrations.transformers._graphed import GraphedTraining, graph_of


class _State(NamedTuple):
    enabled: Enabled
    options: dict[str, object]
    model: nn.Module | None  # the model that `disable_trainer` must disable


_states: weakref.WeakKeyDictionary[Trainer, _State] = weakref.WeakKeyDictionary()


def enable_trainer(
    trainer: Trainer,
    *,
    rope: bool = True,
    qk_norm: bool = True,
    backend: str = "auto",
    bin_pack: bool | str = False,
    capacity: int | None = None,
    graph: bool = False,
) -> Enabled:
    """Enable the model of a Trainer; `cuseq.enable` calls this and describes it."""
    check_flag(graph, "graph")
    options = {"rope": rope, "qk_norm": qk_norm, "backend": backend, "graph": graph}
    for name, value in (("bin_pack", bin_pack), ("capacity", capacity)):
        if value is not False and value is not None:
            raise ValueError(
                f"{name} must not be given for a {type(trainer).__name__}, whose dataset may hold "
                f"anything, got {value!r}: cuseq.data.bin_pack plans its rows (docs/trainer.md)"
            )
    if trainer in _states:
        state = _states[trainer]
        check_same_options(state.options, options)
        return state.enabled
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must have a model, got model_init, which makes another model when training "
            "begins: call cuseq.enable(model) inside model_init"
        )
    training = GraphedTraining(trainer) if graph else None
    if training is not None:
        training.check()
    model, ours = enable_model_of_trainer(
        trainer.model, rope=rope, qk_norm=qk_norm, backend=backend
    )
    name = type(trainer.data_collator).__name__
    collator = (
        f"the data collator {name}: it packs rows already"
        if isinstance(trainer.data_collator, PackingCollator)
        else f"the data collator {name}: a Trainer keeps the one it is given; rows are packed by "
        "Trainer(..., data_collator=cuseq.PackingCollator())"
    )
    step = () if training is None else (f"training_step:{type(trainer).__name__}",)
    enabled = Enabled(
        "trainer", (*model.replaced, *step), (*model.left_alone, collator), model.warnings
    )
    if training is not None:
        training.install()
    _states[trainer] = _State(enabled, options, trainer.model if ours else None)
    return enabled


def disable_trainer(trainer: Trainer) -> None:
    """Restore the model and the step that `enable_trainer` replaced; leave others unchanged."""
    state = _states.pop(trainer, None)
    training = graph_of(trainer)
    if training is not None:
        training.remove()
    if state is not None and state.model is not None:
        disable_model(state.model)
