"""Implementation of `cuseq.enable` for a transformers model and for a trainer's model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

from cuseq._arguments import check_flag
from cuseq._models import text_config
from cuseq.integrations._enabled import Enabled, check_same_options
from cuseq.integrations.transformers._layers import (
    attention_layers,
    class_names,
    find_pretrained,
    refuse_inexact_layers,
    text_configs,
)
from cuseq.integrations.transformers._norm import find_normed_layers, fuse, is_fused, unfuse
from cuseq.integrations.transformers._private import attention_of
from cuseq.integrations.transformers._recurrent import leak_warning, recurrent_layers
from cuseq.integrations.transformers._register import hold_registration, release_registration
from cuseq.integrations.transformers._rotation import (
    find_rotaries,
    replace_rotation,
    restore_rotations,
)
from cuseq.integrations.transformers._warn import warn
from cuseq.integrations.transformers.names import NAME


@dataclass
class _State:
    """What `disable_model` needs to restore a model."""

    enabled: Enabled
    options: dict[str, bool]
    implementations: dict[str, str]
    fused: list[nn.Module] = field(default_factory=list)
    release: Callable[[], object] = lambda: None


_states: weakref.WeakKeyDictionary[PreTrainedModel, _State] = weakref.WeakKeyDictionary()


def enable_model(model: nn.Module, *, rope: bool = True, qk_norm: bool = True) -> Enabled:
    """Replace attention, rotation and q/k norms of a transformers model by cuseq's.

    `cuseq.enable` calls this and describes it.
    """
    check_flag(rope, "rope")
    check_flag(qk_norm, "qk_norm")
    options = {"rope": rope, "qk_norm": qk_norm}
    base = find_pretrained(model)
    if base in _states:
        state = _states[base]
        check_same_options(state.options, options)
        # The user may have set another attention since.
        base.set_attn_implementation(dict.fromkeys(state.implementations, NAME))
        return state.enabled
    _refuse_parts_and_copies(base)
    layers = attention_layers(base)
    refuse_inexact_layers(layers)
    rotaries = find_rotaries(base, layers) if rope or qk_norm else {}
    normed, left_alone = find_normed_layers(layers, rotaries) if qk_norm else ({}, [])
    configs = text_configs(base, layers)
    recurrent = sorted({kind for config in configs.values() for kind in recurrent_layers(config)})
    leaks = (leak_warning(recurrent),) if recurrent else ()
    if recurrent:
        left_alone.append(f"layers of type {', '.join(recurrent)}: cuseq replaces attention only")
    rotated = list(rotaries) if rope else []
    enabled = Enabled(
        "model",
        replaced=(
            *(f"attention:{name}" for name in class_names(type(layer) for layer in layers)),
            *sorted(f"rope:{code.__name__}" for code in rotated),
            *(f"qk_norm:{name}" for name in class_names(type(layer) for layer in normed)),
        ),
        left_alone=tuple(left_alone),
        warnings=leaks,
    )
    implementations = {name: attention_of(config) for name, config in configs.items()}

    hold_registration()
    try:
        base.set_attn_implementation(dict.fromkeys(configs, NAME))
    except BaseException:
        release_registration()
        raise
    for layer, how in normed.items():
        fuse(layer, how)
    for code in rotated:
        replace_rotation(code, rotaries[code])
    # A model that is freed without `disable` releases the registration and rotations it holds.
    release = weakref.finalize(base, _release, rotated)
    release.atexit = False
    _states[base] = _State(enabled, options, implementations, list(normed), release)
    for leak in leaks:
        warn(leak, stacklevel=3)  # the caller of cuseq.enable
    return enabled


def disable_model(model: nn.Module) -> None:
    """Restore what `enable_model` replaced; leave a model that was not enabled unchanged.

    Raises:
        ValueError: the model is a part or a copy of an enabled model.
    """
    base = find_pretrained(model)
    state = _states.pop(base, None)
    if state is None:
        _refuse_parts_and_copies(base)
        return
    base.set_attn_implementation(state.implementations)
    for layer in state.fused:
        unfuse(layer)
    state.release()


def enable_model_of_trainer(model: nn.Module, *, rope: bool, qk_norm: bool) -> tuple[Enabled, bool]:
    """Enable a trainer's model; return also whether `disable` of the trainer must disable it.

    A model that was enabled before stays enabled then. A model made with
    `attn_implementation="cuseq"` keeps its own rotation and norms.
    """
    if find_pretrained(model) in _states:
        return enable_model(model, rope=rope, qk_norm=qk_norm), False
    config = text_config(model)
    if attention_of(config) != NAME:
        return enable_model(model, rope=rope, qk_norm=qk_norm), True
    recurrent = recurrent_layers(config)
    reason = 'the model: it was made with attn_implementation="cuseq", and is enabled on its own'
    leaks = (leak_warning(recurrent),) if recurrent else ()
    return Enabled("model", (), (reason,), leaks), False


def _release(rotated: list[ModuleType]) -> None:
    restore_rotations(rotated)
    release_registration()


def _refuse_parts_and_copies(base: PreTrainedModel) -> None:
    for enabled in _states:
        if any(module is base for module in enabled.modules()):
            raise ValueError(
                f"model must be what was enabled, a {type(enabled).__name__}, got its "
                f"{type(base).__name__}"
            )
    if any(map(is_fused, base.modules())):
        raise ValueError(
            f"model must not be a copy of an enabled {type(base).__name__}: disable that one, copy "
            "it, and enable both"
        )
