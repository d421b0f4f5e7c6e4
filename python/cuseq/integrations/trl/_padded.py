"""Implementation of `cuseq.enable` for the trainers of TRL that pad: GRPO, RLOO, DPO, KTO, Reward.

Their losses take columns of padded batches apart, and stay TRL's own, with all that they log. The
bodies of policy, reference and reward model run each batch as a packed row; where samples share
their prompts, as a tree that computes a prompt once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import trl
from accelerate.utils import is_peft_model
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel, Trainer

from cuseq._base.arguments import as_int, check_flag, shown
from cuseq._base.models import recurrent_types, text_config
from cuseq.integrations._enabled import DEFAULTS, Enabled, TrainerOptions, check_same_options
from cuseq.integrations.transformers._enable import (
    enable_model_of_trainer,
    release_model_of_trainer,
)
from cuseq.integrations.transformers._layers import find_pretrained
from cuseq.integrations.transformers._padded_batches import (
    check_body,
    pack_batches,
    restore_batches,
)
from cuseq.integrations.trl._micro_batches import (
    check_budget,
    install_budget,
    remove_budget,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

LEAST = Version("1.14")


_IN_GROUPS = ("GRPOTrainer", "RLOOTrainer")  # whose samples share prompts
KINDS = (*_IN_GROUPS, "DPOTrainer", "KTOTrainer", "RewardTrainer")
"""The trainers whose padded batches run as packed rows."""


def is_one_of(kinds: tuple[str, ...], trainer: object) -> bool:
    """Return whether a trainer is one of TRL's by these names, of which none is imported."""
    classes = type(trainer).__mro__
    return any(cls.__name__ in kinds and cls.__module__.startswith("trl.") for cls in classes)


class _State(NamedTuple):
    """The result of enabling a trainer, its options, and the models whose bodies were replaced."""

    enabled: Enabled
    options: TrainerOptions
    models: list[weakref.ref[PreTrainedModel]]


# No value may refer to its trainer, which would then never be freed.
_states: weakref.WeakKeyDictionary[Trainer, _State] = weakref.WeakKeyDictionary()


def enable_padded(trainer: Trainer, **options: Unpack[TrainerOptions]) -> Enabled:
    """Make the models of a trainer run its padded batches as packed rows or trees.

    `cuseq.enable` calls this with all options. A trainer that is refused is unchanged.
    """
    name = type(trainer).__name__
    if Version(trl.__version__) < LEAST:
        raise ValueError(f"trl must be {LEAST} or newer for a {name}, got {trl.__version__}")
    for cls in type(trainer).__mro__:
        if cls.__name__.startswith("Unsloth") or "unsloth" in cls.__module__.lower():
            raise ValueError(
                f"trainer must be TRL's own, got unsloth's {cls.__name__}, whose models compute "
                "padded batches in their own way"
            )
    for option in ("bin_pack", "capacity", "cp", "graph", "collator"):
        if (value := options[option]) != (default := DEFAULTS[option]):
            raise ValueError(
                f"{option} must be {default!r} for a {name}, whose batches are pairs or groups of "
                f"samples that its loss takes apart, got {shown(value)}"
            )
    if options["tree"] is not None:
        check_flag(options["tree"], "tree")
    if (tokens := options["micro_batch_tokens"]) is not None:
        if not is_one_of(_IN_GROUPS, trainer):
            raise ValueError(
                f"micro_batch_tokens must be None for a {name}, got {shown(tokens)}: it bounds "
                "the batches of GRPO and RLOO"
            )
        as_int(tokens, "micro_batch_tokens", least=1)
        check_budget(trainer)
    if trainer in _states:
        state = _states[trainer]
        check_same_options(state.options, options)
        for model in _models_of(trainer):
            enable_model_of_trainer(trainer, options, model)
        return state.enabled
    models, trees = _models_of(trainer), []
    check_no_virtual_tokens(trainer.model)
    for model in models:
        _check_model(model)
        trees.append(_takes_trees(model, options["tree"], is_one_of(_IN_GROUPS, trainer)))
    found = [enable_model_of_trainer(trainer, options, model) for model in models]
    bodies = []
    for model, tree in zip(models, trees, strict=True):
        pack_batches(model, tree)
        bodies.append(f"{'trees' if tree else 'rows'}:{type(model.base_model).__name__}")
    if tokens is not None:
        install_budget(trainer, tokens, trees[0])
        bodies.append(f"micro_batches:{name}")
    left_alone = [part for one in found for part in one.left_alone]
    if trainer.args.torch_compile:
        left_alone.append(
            "padded batches: torch_compile compiles the model as a whole, which then computes "
            "their padding; compile its layers instead"
        )
    enabled = Enabled(
        "trainer",
        tuple(dict.fromkeys([*(part for one in found for part in one.replaced), *bodies])),
        tuple(dict.fromkeys(left_alone)),
        tuple(dict.fromkeys(warning for one in found for warning in one.warnings)),
        found[0].attention,
    )
    _states[trainer] = _State(enabled, options, [weakref.ref(model) for model in models])
    return enabled


def disable_padded(trainer: Trainer) -> None:
    """Restore what `enable_padded` replaced; leave other trainers unchanged."""
    state = _states.pop(trainer, None)
    if state is None:
        return
    remove_budget(trainer)
    for model in (of() for of in state.models):
        if model is not None:
            restore_batches(model)
    release_model_of_trainer(trainer)


def _models_of(trainer: Trainer) -> list[PreTrainedModel]:
    """Return the models that a trainer runs: that which it trains, and its reference."""
    wrapped = (trainer.model, getattr(trainer, "ref_model", None))
    return list(dict.fromkeys(find_pretrained(one) for one in wrapped if one is not None))


def check_no_virtual_tokens(model: nn.Module) -> None:
    """Raise ValueError if a trainer's model puts virtual tokens in front of its rows."""
    if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            "trainer.model must not put virtual tokens in front of its rows, got "
            f"{type(model.active_peft_config).__name__}: only the first document would see them"
        )


def _check_model(model: PreTrainedModel) -> None:
    if hasattr(model.config, "vision_config"):
        raise ValueError(
            f"the trainer's model must be one of text, got a {type(model).__name__}: the images of "
            "a padded batch have no packed row yet"
        )
    check_body(model)


def _takes_trees(model: PreTrainedModel, asked: bool | None, is_in_groups: bool) -> bool:
    """Return whether a model's batches run as trees.

    Raises:
        ValueError: trees were asked for, and the model cannot run them.
    """
    config = text_config(model)
    kinds = recurrent_types(config)
    if asked and kinds:
        raise ValueError(
            f"tree must be False or None for a {type(model).__name__}, whose layers carry a state "
            f"along the row ({kinds[0]})"
        )
    if asked is not None:
        return asked
    # A window that is shorter than a path would need the scores of all pairs in memory.
    return is_in_groups and not kinds and getattr(config, "sliding_window", None) is None
