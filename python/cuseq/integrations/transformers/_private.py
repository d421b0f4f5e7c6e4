"""Access to all private names of transformers, accelerate and torch that this package uses.

The other files call these functions. A release that renames one of them then raises an error that
has the name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer

from cuseq._base.foreign import check_attribute, check_parameter, private
from cuseq.integrations.transformers.names import CACHE, RENAMED, cache_names

if TYPE_CHECKING:
    from transformers import Trainer

_Run = Callable[..., Any]
_CHECKPOINT = "_gradient_checkpointing_func"
# Of continuous batching: the method that sets its attention, and where it keeps the model's.
SWITCH, BEFORE_SWITCH = "switch_to_cb_friendly_attn", "_original_attn_impl"
MASK_PREPARATION = "_preprocess_mask_arguments"
# Methods of Trainer and of accelerate's Accelerator that rows shared by ranks replace.
CP_INPUTS = "_prepare_context_parallel_inputs"
NUM_ITEMS = "_get_num_items_in_batch"
PREPARE_CP = "_prepare_cp"
PREPARE_INPUTS, TRAIN_SAMPLER = "_prepare_inputs", "_get_train_sampler"
COUNT_TOKENS = "_track_num_input_tokens"  # of Trainer, for `include_num_input_tokens_seen`
DATA_MESH = "_prepare_device_mesh"
_PREPARATION_PARAMETERS = [
    "config",
    "inputs_embeds",
    "attention_mask",
    CACHE,
    "position_ids",
    "layer_idx",
    "encoder_hidden_states",
]
OWN_ATTENTION = "_attn"
"""The method in which GPT-J and its kin compute attention."""
ATTENTION = "_attn_implementation_internal"
"""The attribute of a config that holds its `attn_implementation`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_names() -> None:
    """Check, once, the names that are read in every forward, where a check would cost time.

    Raises:
        UnknownRelease: configs do not keep their attention in `_attn_implementation`, or modules
            keep their hooks under other names.
    """
    choice = private(PreTrainedConfig, "_attn_implementation")
    check_attribute(choice.fset, ATTENTION)
    for name in (*_HOOKS, "_modules"):
        private(nn.Module(), name)


# ------------------------------------------------------------------------------------- transformers


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the `attn_implementation` of a config."""
    return config._attn_implementation


def set_attention_alone(config: PreTrainedConfig, name: str) -> None:
    """Set the `attn_implementation` of a config, but not that of its sub-configs."""
    setattr(config, ATTENTION, name)


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Return whether a model's class declares support for sdpa."""
    return private(model, "_supports_sdpa", package="transformers")


def registered_functions(interface: type) -> dict[str, Callable[..., Any]]:
    """Return the functions of `AttentionInterface` or `AttentionMaskInterface` by name."""
    return private(interface, "_global_mapping")


def check_mask_preparation() -> None:
    """Check `_preprocess_mask_arguments`, which searches position ids for packed sequences.

    Raises:
        UnknownRelease: it is missing or takes other arguments.
    """
    private(masking_utils, MASK_PREPARATION, signature=_PREPARATION_PARAMETERS, renamed=RENAMED)


def signature_columns(trainer: Trainer) -> list[str]:
    """Return the dataset columns that a trainer keeps for its model."""
    private(trainer, "_set_signature_columns_if_needed", package="transformers")()
    return private(trainer, "_signature_columns", package="transformers")


def check_token_count() -> None:
    """Check the method by which a Trainer counts the tokens of a batch.

    Raises:
        UnknownRelease: it is missing or takes other arguments.
    """
    from transformers.trainer import Trainer

    private(Trainer, COUNT_TOKENS, signature=["self", "inputs"])


def forget_evaluation_loaders(trainer: Trainer) -> None:
    """Drop the cached evaluation loaders, whose persistent workers hold the old collator."""
    from transformers.trainer import Trainer

    check_attribute(Trainer.get_eval_dataloader, "_eval_dataloaders")
    # Trainer sets the attribute when it makes the first such loader.
    getattr(trainer, "_eval_dataloaders", {}).clear()


@contextlib.contextmanager
def inside_checkpoint(layer: nn.Module, wrap: Callable[[_Run], _Run]) -> Iterator[None]:
    """Wrap what a layer checkpoints while its forward runs.

    Before transformers 5.23 a layer's checkpoint is around its forward, and nothing has to be done.
    """
    forward_checkpoints = "__init_subclass__" in vars(GradientCheckpointingLayer)
    is_on = isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    if not (forward_checkpoints and is_on and layer.training):
        yield
        return
    checkpoint = private(layer, _CHECKPOINT, package="transformers")
    setattr(layer, _CHECKPOINT, lambda run, *args: checkpoint(wrap(run), *args))
    try:
        yield
    finally:
        setattr(layer, _CHECKPOINT, checkpoint)


def check_shared_rows(trainer: Trainer) -> None:
    """Check the methods of a trainer and its accelerator that rows shared by ranks replace.

    Raises:
        UnknownRelease: one is missing or takes other arguments.
    """
    private(trainer, CP_INPUTS, signature=["model", "inputs"], package="transformers")
    private(trainer, NUM_ITEMS, signature=["batch_samples", "device"], package="transformers")
    private(trainer, PREPARE_INPUTS, signature=["inputs"], package="transformers")
    private(trainer.accelerator, PREPARE_CP, signature="(*args)", package="accelerate")
    private(trainer.accelerator, DATA_MESH, signature=[], package="accelerate")
    private(trainer.accelerator, "_models", package="accelerate")


_REMOVE = "_remove_unused_columns", "_get_collator_with_removed_columns"


def check_planned_rows(trainer: Trainer) -> None:
    """Check the methods of a trainer by which planned rows are loaded.

    Raises:
        UnknownRelease: one is missing or takes other arguments.
    """
    private(trainer, PREPARE_INPUTS, signature=["inputs"], package="transformers")
    private(trainer, TRAIN_SAMPLER, package="transformers")
    for name, first in zip(_REMOVE, ("dataset", "data_collator"), strict=True):
        private(trainer, name, signature=[first, "description"], package="transformers")


def without_unused_columns(trainer: Trainer) -> tuple[Any, Callable[..., Any]]:
    """Return a trainer's training dataset and collator, one of which drops unused columns."""
    dataset, collator = trainer.train_dataset, trainer.data_collator
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return getattr(trainer, _REMOVE[0])(dataset, "training"), collator
    return dataset, getattr(trainer, _REMOVE[1])(collator, "training")


def check_cache_name(cls: type[nn.Module]) -> None:
    """Check that a class's forward takes its cache under a name that cuseq knows.

    Raises:
        UnknownRelease: it takes none of them; with a cache, what cuseq replaces would not see it.
    """
    check_parameter(cls.forward, (CACHE, *cache_names(RENAMED)))


def is_of_library(method: Callable[..., Any]) -> bool:
    """Return whether a trainer's method is that of transformers or TRL, and not a user's own."""
    return method.__module__.partition(".")[0] in ("transformers", "trl")


def check_methods(trainer: Trainer, names: Iterable[str], option: str) -> None:
    """Raise ValueError if an option would replace a method of a trainer that is a user's own."""
    for name in names:
        if not is_of_library(getattr(trainer, name)):
            raise ValueError(
                f"trainer must have the {name} of transformers or TRL with {option}, which "
                f"replaces it, got that of {type(trainer).__name__}"
            )


def shifts_labels(trainer: Trainer) -> bool:
    """Return whether the loss of a trainer's model is that of the next token.

    A Trainer goes by the name of a model's class, which GPT-2's LMHeadModel does not have.
    """
    if getattr(trainer, "_loss_shifts_labels", False):  # since transformers 5.10
        return True
    config = getattr(trainer.model, "config", None)
    by_default = getattr(trainer.model, "loss_function", None) is ForCausalLMLoss
    return by_default and not getattr(config, "is_encoder_decoder", False)


def prepare_inputs(trainer: Trainer, inputs: dict[str, Any]) -> dict[str, Any]:
    """Move a batch to a trainer's device."""
    return private(trainer, PREPARE_INPUTS, package="transformers")(inputs)


def is_prepared(accelerator: Any) -> bool:
    """Return whether accelerate has wrapped or hooked a model."""
    return bool(private(accelerator, "_models", package="accelerate"))


_CLIP, _NORM = "_clip_grad_norm", "_get_grad_norm"
_SUM, _LOGGED = "_tr_loss", "_globalstep_last_logged"


def check_training_loop() -> None:
    """Check the names by which a Trainer's loop runs a step, clips and adds up the loss.

    Raises:
        UnknownRelease: one of them is missing, or takes other arguments.
    """
    from transformers.trainer import Trainer

    loop = private(Trainer, "_run_epoch")
    for name in (_CLIP, _NORM, _SUM, _LOGGED, "current_gradient_accumulation_steps"):
        check_attribute(loop, name)
    private(Trainer, _CLIP, signature=["self", "model"])
    private(Trainer, _NORM, signature=["self", "model", "grad_norm"])
    private(Trainer, PREPARE_INPUTS, signature=["self", "inputs"])


def gradient_norm_names() -> tuple[str, str]:
    """Return the names of a Trainer's methods that clip the gradients and measure their norm."""
    return _CLIP, _NORM


def loop_values(trainer: Trainer) -> tuple[Tensor, int]:
    """Return a Trainer's running sum of losses, and the steps since its last log."""
    return getattr(trainer, _SUM), trainer.state.global_step - getattr(trainer, _LOGGED)


# --------------------------------------------------------------------------------- hooks on modules


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward hooks by number; a write to it replaces a hook."""
    return module._forward_hooks


def hooks_of(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return a module's forward hooks and forward pre-hooks, each by number."""
    return [module._forward_hooks, module._forward_pre_hooks]


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's children; a write to it replaces a child."""
    return module._modules


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate offloads a module's weights between calls."""
    _check_accelerate()
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


def own_forwards(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forwards and `_attn` set on the module object, and the one accelerate wraps."""
    _check_accelerate()
    names = ("forward", "_old_forward", OWN_ATTENTION)
    return [module.__dict__[name] for name in names if name in module.__dict__]


def has_accelerate_forward(module: nn.Module) -> bool:
    """Return whether accelerate has wrapped a module's forward."""
    _check_accelerate()
    return "_old_forward" in module.__dict__


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward, or the one inside accelerate's wrapper."""
    setattr(module, "_old_forward" if has_accelerate_forward(module) else "forward", forward)


def without_forwards(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without accelerate's hook and forwards set on the object."""
    names = ("forward", "_old_forward", "_hf_hook")
    return {name: value for name, value in attributes.items() if name not in names}


def _check_accelerate() -> None:
    hooks = sys.modules.get("accelerate.hooks")
    if hooks is not None:  # accelerate was not imported, so it has no hooks
        _check_hooks(hooks)


@functools.cache
def _check_hooks(hooks: ModuleType) -> None:
    for name in ("_hf_hook", "_old_forward"):
        check_attribute(hooks.add_hook_to_module, name)
