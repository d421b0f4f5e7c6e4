"""Implementation of `cuseq.enable` for a transformers model and for a trainer's model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cuseq._base.arguments import check_flag
from cuseq._base.models import text_config
from cuseq.attention import check_installed
from cuseq.integrations._enabled import Enabled, check_same_options, uninterrupted
from cuseq.integrations.transformers._forwards import (
    is_replaced,
    replace_forward,
    restore_forward,
)
from cuseq.integrations.transformers._layers import (
    attention_layers,
    class_names,
    dropout_of,
    dropout_warnings,
    find_pretrained,
    makes_mask,
    models_around,
    refuse_inexact_layers,
    rotating_layers,
    text_configs,
)
from cuseq.integrations.transformers._layouts import check_input, names_of_call, tell_layout
from cuseq.integrations.transformers._norm import find_normed_layers, fuse, unfuse
from cuseq.integrations.transformers._own_attention import (
    find_own_attention,
    left_rotations,
    own_dropout_of,
    replace_attention,
    restore_attention,
    takes_angles,
)
from cuseq.integrations.transformers._private import attention_of, check_cache_name
from cuseq.integrations.transformers._recurrent import (
    Separated,
    leak_warning,
    mark_separated,
    recurrent_layers,
    recurrent_types,
    unmark_separated,
)
from cuseq.integrations.transformers._refusal import without_layers
from cuseq.integrations.transformers._register import hold_registration, release_registration
from cuseq.integrations.transformers._rotation import (
    Function,
    find_rotations,
    replace_rotation,
    restore_rotations,
)
from cuseq.integrations.transformers._temperature import find_tempered_layers, tempered_forward
from cuseq.integrations.transformers._warn import warn
from cuseq.integrations.transformers._whole_rows import hook_models, replace_functions
from cuseq.integrations.transformers.hybrids.plan import (
    Plan,
    plan_mixers,
    restore_functions,
    restore_modules,
    separate,
)
from cuseq.integrations.transformers.names import BACKEND, MAKES_MASK, NAME, parameters_of


@dataclass
class _State:
    """What `disable_model` needs to restore a model."""

    enabled: Enabled
    options: dict[str, object]
    layers: list[nn.Module]
    own: list[nn.Module]
    implementations: dict[str, str]
    fused: list[nn.Module]
    tempered: list[nn.Module]
    plan: Plan
    hooks: list[RemovableHandle]
    release: Callable[[], object]


_states: weakref.WeakKeyDictionary[PreTrainedModel, _State] = weakref.WeakKeyDictionary()
# The trainers of each model that a trainer enabled.
_holders: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
# What a trainer replaced in a model that was made with attn_implementation="cuseq".
_aided: weakref.WeakKeyDictionary[nn.Module, tuple[list[RemovableHandle], Callable[[], object]]] = (
    weakref.WeakKeyDictionary()
)


def enable_model(
    model: nn.Module, *, rope: bool = True, qk_norm: bool = True, backend: str = "auto"
) -> Enabled:
    """Replace attention, rotation, q/k norms and mixers of a transformers model by cuseq's.

    `cuseq.enable` calls this and describes it.
    """
    check_flag(rope, "rope")
    check_flag(qk_norm, "qk_norm")
    check_installed(backend)
    options = {"rope": rope, "qk_norm": qk_norm, "backend": backend}
    base = find_pretrained(model)
    if base in _states:
        state = _states[base]
        check_same_options(state.options, options)
        # The user may have set another attention since.
        if state.implementations:
            base.set_attn_implementation(dict.fromkeys(state.implementations, NAME))
        return state.enabled
    _refuse_parts_and_copies(base)
    with torch.device("cpu"):  # small layers are compared there, whatever the user's default is
        plan = plan_mixers(base)
        layers = attention_layers(base, {base.get_submodule(name) for name in plan.mixers})
        own = [] if layers or plan.mixers else find_own_attention(base)
        if not (layers or own or plan.mixers):
            raise ValueError(without_layers(base))
        refuse_inexact_layers(layers)
        _check_caches(base, [*layers, *own, *map(base.get_submodule, plan.mixers)])
        tempered = find_tempered_layers(layers)
        rotating = rotating_layers(base, layers) + [one for one in own if takes_angles(one)]
        rotations = find_rotations(base, rotating) if rope or qk_norm else {}
        normed, left_alone = find_normed_layers(rotating, rotations) if qk_norm else ({}, [])
    left_alone += left_rotations(own, rotating)
    rates = {type(layer).__name__: dropout_of(layer) for layer in layers}
    rates |= {type(layer).__name__: own_dropout_of(layer) for layer in own}
    configs = text_configs(base, layers)
    config = text_config(base)
    recurrent = recurrent_types(config)
    leaking = sorted(set(recurrent)) if len(recurrent) > len(plan.mixers) else []
    leaks = (leak_warning(leaking),) if leaking else ()
    if leaking:
        left_alone.append(f"layers of type {', '.join(leaking)}: cuseq does not know these layers")
    rotated = list(rotations) if rope else []
    enabled = Enabled(
        "model",
        replaced=(
            *(f"attention:{name}" for name in class_names(type(layer) for layer in layers + own)),
            *sorted({f"rope:{code.__name__}" for code, _ in rotated}),
            *(f"qk_norm:{name}" for name in class_names(type(layer) for layer in normed)),
            *(f"temperature:{name}" for name in class_names(type(layer) for layer in tempered)),
            *plan.replaced,
        ),
        left_alone=tuple(left_alone),
        warnings=(*leaks, *plan.slow, *dropout_warnings(rates)),
    )
    implementations = {name: attention_of(config) for name, config in configs.items()}

    with uninterrupted(), contextlib.ExitStack() as undo:  # an error part-way undoes everything
        hold_registration()
        undo.callback(release_registration)
        if configs:
            undo.callback(base.set_attn_implementation, implementations)
            base.set_attn_implementation(dict.fromkeys(configs, NAME))
        makes = not own and makes_mask(base)
        for layer in layers + own:
            setattr(layer, BACKEND, backend)
            undo.callback(delattr, layer, BACKEND)
            setattr(layer, MAKES_MASK, makes)
            undo.callback(delattr, layer, MAKES_MASK)
        for layer, how in normed.items():
            fuse(layer, how)
            undo.callback(unfuse, layer)
        for layer in tempered:
            replace_forward(layer, tempered_forward)
            undo.callback(restore_forward, layer)
        for function in rotated:
            replace_rotation(function, rotations[function])
            undo.callback(restore_rotations, [function])
        separate(base, plan)
        undo.callback(restore_modules, base, plan)
        undo.callback(restore_functions, plan.functions)
        functions = plan.functions + replace_functions(base)
        undo.callback(restore_functions, functions[len(plan.functions) :])
        hooks = [base.register_forward_pre_hook(check_input, with_kwargs=True)]
        undo.callback(hooks[0].remove)
        mixers = [base.get_submodule(name) for name in plan.mixers]
        for hook in hook_models(models_around(base, layers + own + mixers)):
            hooks.append(hook)
            undo.callback(hook.remove)
        for inner in models_around(base, layers) if makes else ():
            tell = partial(tell_layout, names_of_call(inner))
            hooks.append(inner.register_forward_pre_hook(tell, with_kwargs=True))
            undo.callback(hooks[-1].remove)
        hooks += replace_attention(base, own)
        mark = mark_separated(config) if recurrent and not leaking else None
        # A model that is freed without `disable` releases what it holds of transformers.
        release = weakref.finalize(base, _release, rotated, functions, mark)
        release.atexit = False
        fused = list(normed)
        _states[base] = _State(
            enabled, options, layers, own, implementations, fused, tempered, plan, hooks, release
        )
        undo.pop_all()
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
    _holders.pop(base, None)
    if base in _aided:
        hooks, release = _aided.pop(base)
        _remove(hooks)
        release()
    elif state is None:
        _refuse_parts_and_copies(base)
    if state is None:
        return
    if state.implementations:
        base.set_attn_implementation(state.implementations)
    for layer in state.layers + state.own:
        delattr(layer, BACKEND)
        delattr(layer, MAKES_MASK)
    for layer in state.fused:
        unfuse(layer)
    for layer in state.tempered:
        restore_forward(layer)
    restore_attention(state.own)
    restore_modules(base, state.plan)
    _remove(state.hooks)
    state.release()


def enable_model_of_trainer(trainer: Any, *, rope: bool, qk_norm: bool, backend: str) -> Enabled:
    """Enable a trainer's model until `release_model_of_trainer`; call it again if it may be
    disabled.

    A model that the user enabled stays enabled then, and so does one that another trainer holds. A
    model made with `attn_implementation="cuseq"` keeps its own rotation and norms.

    Raises:
        ValueError: as `enable_model`; or the model drops attention weights, which its first step
            would refuse.
    """
    model = trainer.model
    config = text_config(model)
    dropout = getattr(config, "attention_dropout", 0.0)
    if isinstance(dropout, float) and dropout:
        raise ValueError(
            f"the trainer's model has attention_dropout={dropout}, which packed attention cannot "
            "compute: set attention_dropout to 0.0 in its config before the model is made"
        )
    base = find_pretrained(model)
    if base in _states or attention_of(config) != NAME:
        was_enabled = base in _states
        enabled = enable_model(model, rope=rope, qk_norm=qk_norm, backend=backend)
        if not was_enabled:
            _holders[base] = weakref.WeakSet()
        if base in _holders:
            _holders[base].add(trainer)
        return enabled
    if backend != "auto":
        raise ValueError(
            f'backend must be "auto" for a model made with attn_implementation="{NAME}", got '
            f'"{backend}": enable the model by cuseq.enable(model, backend="{backend}")'
        )
    if base not in _aided:
        hooks = hook_models(models_around(base, attention_layers(base, ())))
        release = weakref.finalize(base, restore_functions, replace_functions(base))
        release.atexit = False
        _aided[base] = hooks, release
    _holders.setdefault(base, weakref.WeakSet()).add(trainer)
    recurrent = recurrent_layers(config)
    reason = 'the model: it was made with attn_implementation="cuseq", and is enabled on its own'
    leaks = (leak_warning(recurrent),) if recurrent else ()
    return Enabled("model", (), (reason,), leaks)


def release_model_of_trainer(trainer: Any) -> None:
    """Disable the model that a trainer holds if no other trainer holds it."""
    for model, holders in list(_holders.items()):  # the trainer may have wrapped its model since
        if trainer in holders:
            holders.remove(trainer)
            if not holders:
                disable_model(model)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _release(
    rotated: list[Function],
    functions: list[Function],
    mark: Separated | None,
) -> None:
    restore_rotations(rotated)
    restore_functions(functions)
    if mark is not None:
        unmark_separated(mark)
    release_registration()


def _check_caches(base: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Check that the model that calls these layers takes its cache by a name that cuseq knows.

    Raises:
        UnknownRelease: it has a cache under another name, whose contents would be overlooked.
    """
    *_, caller = models_around(base, layers)
    if "use_cache" in parameters_of(type(caller).forward):
        check_cache_name(type(caller))


def _refuse_parts_and_copies(base: PreTrainedModel) -> None:
    for enabled in _states:
        if any(module is base for module in enabled.modules()):
            raise ValueError(
                f"model must be what was enabled, a {type(enabled).__name__}, got its "
                f"{type(base).__name__}"
            )
    if any(map(is_replaced, base.modules())):
        raise ValueError(
            f"model must not be a copy of an enabled {type(base).__name__}: disable that one, copy "
            "it, and enable both"
        )
