"""Enabling cuseq in a live transformers model, and in the model of a trainer."""

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
    """What it takes to put a model back."""

    enabled: Enabled
    options: dict[str, bool]
    implementations: dict[str, str]
    fused: list[nn.Module] = field(default_factory=list)
    release: Callable[[], object] = lambda: None


_states: weakref.WeakKeyDictionary[PreTrainedModel, _State] = weakref.WeakKeyDictionary()


def enable_model(model: nn.Module, *, rope: bool = True, qk_norm: bool = True) -> Enabled:
    """Let a live transformers model attend, rotate and normalise queries and keys by cuseq.

    See `cuseq.enable`, which calls this.
    """
    check_flag(rope, "rope")
    check_flag(qk_norm, "qk_norm")
    options = {"rope": rope, "qk_norm": qk_norm}
    base = find_pretrained(model)
    if base in _states:
        state = _states[base]
        check_same_options(state.options, options)
        # Somebody may have asked for another attention since.
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
    # A model that is dropped without `disable` gives back what it holds of the process.
    release = weakref.finalize(base, _release, rotated)
    release.atexit = False
    _states[base] = _State(enabled, options, implementations, list(normed), release)
    for leak in leaks:
        warn(leak, stacklevel=3)  # the caller of cuseq.enable
    return enabled


def disable_model(model: nn.Module) -> None:
    """Put back what `enable_model` replaced; a model that was not enabled stays as it is.

    Raises:
        ValueError: the model is a part of an enabled one, or a copy of one.
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
    """Enable a trainer's model; return also whether the trainer's `disable` has to disable it.

    A model that was enabled before stays so. One that was made with `attn_implementation="cuseq"`
    keeps its own rotation and norms.
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
