"""Implementation of `cuseq.enable` for a transformers model and for a trainer's model."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cuseq._base.arguments import check_flag
from cuseq._base.models import HOLD, recurrent_layers, recurrent_types, text_config
from cuseq.attention import attention_backend, check_installed
from cuseq.integrations._enabled import (
    Enabled,
    ModelOptions,
    TrainerOptions,
    check_same_options,
    uninterrupted,
)
from cuseq.integrations.transformers._forwards import (
    is_replaced,
    replace_forward,
    restore_forward,
)
from cuseq.integrations.transformers._indexers import (
    ROW,
    choosing_forward,
    indexed_forward,
    refuse_other_indexers,
)
from cuseq.integrations.transformers._layers import (
    attention_layers,
    class_names,
    dropout_of,
    dropout_warnings,
    find_pretrained,
    models_around,
    refuse_inexact_layers,
    rotating_layers,
    rows_of_layer,
    softcap_of,
)
from cuseq.integrations.transformers._norm import find_normed_layers, fuse, unfuse
from cuseq.integrations.transformers._own_attention import (
    find_own_attention,
    left_rotations,
    own_dropout_of,
    replace_attention,
    restore_attention,
    takes_angles,
)
from cuseq.integrations.transformers._ownership import (
    Hold,
    Own,
    attend,
    give_configs,
    take_configs,
)
from cuseq.integrations.transformers._pooling import can_pool, pooled_forward
from cuseq.integrations.transformers._private import (
    attention_of,
    check_cache_name,
    hooks_of,
    set_attention_alone,
)
from cuseq.integrations.transformers._recurrent import leak_warning, leak_warning_by_name
from cuseq.integrations.transformers._refusal import without_layers
from cuseq.integrations.transformers._register import hold_registration, release_registration
from cuseq.integrations.transformers._rotation import (
    find_rotations,
    find_tower_rotations,
    replace_rotation,
    restore_rotations,
)
from cuseq.integrations.transformers._temperature import find_tempered_layers, tempered_forward
from cuseq.integrations.transformers._tower import find_tower_layers, replace_tower
from cuseq.integrations.transformers._warn import warn
from cuseq.integrations.transformers._whole_rows import hook_models, replace_functions
from cuseq.integrations.transformers.documents import install_door, remove_door
from cuseq.integrations.transformers.hybrids.plan import (
    Plan,
    plan_mixers,
    restore_functions,
    restore_modules,
    separate,
)
from cuseq.integrations.transformers.names import BACKEND, NAME, parameters_of
from cuseq.layout import PackedLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _State:
    """The replaced parts of an enabled model, for `disable_model`; an attribute of the model.

    A deep copy of the model has a copy of it. A pickle has only what the attention was called.
    """

    enabled: Enabled
    options: ModelOptions
    layers: list[nn.Module]
    own: list[nn.Module]
    configs: list[Own]
    fused: list[nn.Module]
    forwards: list[nn.Module]
    pooling: list[nn.Module]
    plan: Plan
    hooks: list[RemovableHandle]
    hold: Hold

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State(**{name: copy.deepcopy(one, memo) for name, one in vars(self).items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return _Saved, (attention_of(self.configs[0].original) if self.configs else None,)


@dataclass
class _Saved:
    """The name of the attention that a model had before `enable`, in its pickle."""

    implementation: str | None


class _Aid(NamedTuple):
    """The hooks and patches of a trainer in a model made with attn_implementation="cuseq"."""

    hooks: list[RemovableHandle]
    has_doors: list[str]  # the parts that got one, by name
    release: Callable[[], object]


_STATE = "_cuseq_state"
_TYPICAL = 4096  # tokens of the row for which the report of `enable` names the backend
# The models that were enabled and not disabled, apart from their copies.
_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
# The trainers of each model that a trainer enabled.
_holders: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_aided: weakref.WeakKeyDictionary[nn.Module, _Aid] = weakref.WeakKeyDictionary()


def enable_model(model: nn.Module, **options: Unpack[ModelOptions]) -> Enabled:
    """Replace attention, rotation, q/k norms and mixers of a transformers model by cuseq's.

    `cuseq.enable` calls this with all options, and describes them.
    """
    rope, qk_norm, backend = (options[name] for name in ("rope", "qk_norm", "backend"))
    check_flag(rope, "rope")
    check_flag(qk_norm, "qk_norm")
    check_installed(backend)
    base = find_pretrained(model)
    state = _state_of(base)
    if isinstance(state, _State):
        check_same_options(state.options, options)
        attend(state.configs)
        return state.enabled
    if state is not None:
        _clean(base, state)
    _refuse_parts(base)
    with torch.device("cpu"):  # small layers are compared there, whatever the user's default is
        plan = plan_mixers(base)
        layers = attention_layers(base, {base.get_submodule(name) for name in plan.mixers})
        own = [] if layers or plan.mixers else find_own_attention(base)
        of_towers, left_alone = find_tower_layers(base, layers)
        if not (layers or own or plan.mixers or of_towers):
            raise ValueError(without_layers(base))
        refuse_inexact_layers(layers)
        refuse_other_indexers(layers)
        _check_caches(base, [*layers, *own, *map(base.get_submodule, plan.mixers)])
        tempered = find_tempered_layers(layers)
        indexed = [layer for layer in layers if hasattr(layer, "indexer")]
        indexers = [layer.indexer for layer in indexed if layer.indexer is not None]
        rotating = rotating_layers(base, layers) + [one for one in own if takes_angles(one)]
        rotations, learned = find_rotations(base, rotating) if rope or qk_norm else ({}, [])
        normed, others = find_normed_layers(rotating, rotations) if qk_norm else ({}, [])
        rotations_of_towers, more = find_tower_rotations(of_towers) if rope else ({}, [])
    left_alone += [*others, *learned, *more, *left_rotations(own, rotating)]
    rates = {type(layer).__name__: dropout_of(layer) for layer in layers}
    rates |= {type(layer).__name__: own_dropout_of(layer) for layer in own}
    config = text_config(base)
    recurrent = recurrent_types(config)
    leaking = sorted(set(recurrent)) if len(recurrent) > len(plan.mixers) else []
    leaks = (leak_warning(leaking),) if leaking else ()
    if leaking:
        left_alone.append(f"layers of type {', '.join(leaking)}: cuseq does not know these layers")
    rotations |= rotations_of_towers
    rotated = list(rotations) if rope else []
    enabled = Enabled(
        "model",
        replaced=(
            *(f"attention:{name}" for name in class_names(type(layer) for layer in layers + own)),
            *(f"tower:{name}" for name in class_names(type(layer) for layer in of_towers)),
            *sorted({f"rope:{code.__name__}" for code, _ in rotated}),
            *(f"qk_norm:{name}" for name in class_names(type(layer) for layer in normed)),
            *(f"temperature:{name}" for name in class_names(type(layer) for layer in tempered)),
            *(f"indexer:{name}" for name in class_names(map(type, indexers))),
            *plan.replaced,
        ),
        left_alone=tuple(left_alone),
        warnings=(*leaks, *plan.slow, *dropout_warnings(rates)),
        attention=_describe_attention(layers, backend),
    )
    with uninterrupted(), contextlib.ExitStack() as undo:  # an error part-way undoes everything
        hold_registration()
        undo.callback(release_registration)
        for module in indexed + indexers:
            make = indexed_forward if module in indexed else choosing_forward
            replace_forward(module, make(type(module)))
            undo.callback(restore_forward, module)
        configs = give_configs(model, base, layers, of_towers)
        undo.callback(take_configs, model, configs)
        for layer in layers + own:
            setattr(layer, BACKEND, backend)
            undo.callback(delattr, layer, BACKEND)
        for layer, how in normed.items():
            fuse(layer, how)
            undo.callback(unfuse, layer)
        for layer in tempered:
            replace_forward(layer, tempered_forward)
            undo.callback(restore_forward, layer)
        for function in rotated:
            replace_rotation(function, rotations[function])
            undo.callback(restore_rotations, [function])
        pooling = [base] if can_pool(base) else []
        for head in pooling:
            replace_forward(head, pooled_forward(type(head)))
            undo.callback(restore_forward, head)
        separate(base, plan)
        undo.callback(restore_modules, base, plan)
        undo.callback(restore_functions, plan.functions)
        places, hooks = replace_tower(base, of_towers)
        has_text = bool(layers or own or plan.mixers)
        functions = plan.functions + (replace_functions(base) if has_text else []) + places
        undo.callback(restore_functions, functions[len(plan.functions) :])
        mixers = [base.get_submodule(name) for name in plan.mixers]
        around = models_around(base, layers + own + mixers)
        for inner in around:
            hooks += install_door(inner, attends=bool(layers))
            undo.callback(remove_door, inner)
        hooks += hook_models(around)
        for hook in hooks:
            undo.callback(hook.remove)
        hooks += replace_attention(base, own)
        separates = bool(recurrent) and not leaking
        undo.pop_all()  # from here the hold gives back what is shared
        hold = Hold(
            [*rotated, *functions],
            plan.functions,
            text_config(base) if separates else None,
            has_forwards=bool(own or mixers or tempered or indexed or pooling),
        )
        for layer in layers + own + mixers + of_towers:
            setattr(layer, HOLD, hold)
        for inner in around:
            setattr(inner, HOLD, hold)
        state = _State(
            enabled,
            options,
            layers,
            own,
            configs,
            list(normed),
            tempered + indexed + indexers,
            pooling,
            plan,
            hooks,
            hold,
        )
        setattr(base, _STATE, state)
        _models.add(base)
    for leak in leaks:
        warn(leak, stacklevel=3)  # the caller of cuseq.enable
    return enabled


def _describe_attention(layers: list[nn.Module], backend: str) -> str:
    """Return what the attention of a typical row runs on where the first layer is; "" if unknown.

    Sizes are those of the layer, since the layers of a config may differ.
    """
    try:
        return _attention_of_a_row(layers[0], backend) if layers else ""
    except Exception:  # a layer of a kind that nobody has seen must not stop `enable`
        return ""


def _attention_of_a_row(layer: nn.Module, backend: str) -> str:
    weight = next(layer.parameters())
    if weight.is_meta or weight.dtype.itemsize == 1:  # quantised: the rows have another dtype
        return ""
    rows = rows_of_layer(layer, _TYPICAL, weight.dtype, weight.device)
    packed = PackedLayout.from_lengths([_TYPICAL // 8] * 8).to(weight.device)
    try:
        chosen = attention_backend(*rows, packed, softcap=softcap_of(layer), backend=backend)
    except (ValueError, TypeError) as refusal:
        return f"not in {weight.dtype} on {weight.device}: {refusal}"
    if weight.device.type == "cpu":
        return f'"{chosen.name}" on the CPU, where the model is; chosen anew where it moves'
    return (
        f'"{chosen.name}", for eager rows of {_TYPICAL:,} tokens in 8 documents in {weight.dtype} '
        f"on {weight.device}: {chosen.reason}"
    )


def disable_model(model: nn.Module) -> None:
    """Restore what `enable_model` replaced; leave a model that was not enabled unchanged.

    Raises:
        ValueError: the model is a part of an enabled model.
    """
    base = find_pretrained(model)
    state = _state_of(base)
    _holders.pop(base, None)
    if base in _aided:
        aid = _aided.pop(base)
        for name in aid.has_doors:
            remove_door(base.get_submodule(name))
        _remove(aid.hooks)
        aid.release()
    elif state is None:
        _refuse_parts(base)
    if isinstance(state, _Saved):
        _clean(base, state)
    if not isinstance(state, _State):
        return
    take_configs(model, state.configs)
    for layer in state.layers + state.own:
        delattr(layer, BACKEND)
    for layer in state.fused:
        unfuse(layer)
    for module in state.forwards + state.pooling:
        restore_forward(module)
    restore_attention(state.own)
    restore_modules(base, state.plan)
    for module in base.modules():
        remove_door(module)
        vars(module).pop(HOLD, None)
        vars(module).pop(ROW, None)
    _remove(state.hooks)
    delattr(base, _STATE)
    _models.discard(base)
    state.hold.release()


def check_one_gpu(trainer: Any) -> None:
    """Raise ValueError if a trainer of packed rows would split them over several GPUs.

    A row is one batch entry, so that DataParallel gives it to one GPU, and Trainer multiplies its
    loss by the number of GPUs.
    """
    if (n_gpu := trainer.args.n_gpu) > 1:
        raise ValueError(
            f"a trainer of packed rows must have a process for each GPU, got {n_gpu} GPUs in one, "
            f"whose loss Trainer would multiply by {n_gpu}: start the script by torchrun, or set "
            "CUDA_VISIBLE_DEVICES to one GPU"
        )


def enable_model_of_trainer(
    trainer: Any, options: TrainerOptions, model: nn.Module | None = None
) -> Enabled:
    """Enable a trainer's model, or another one that it runs, until `release_model_of_trainer`; call
    it again if it may be disabled.

    A model that the user enabled stays enabled then, and so does one that another trainer holds. A
    model made with `attn_implementation="cuseq"` keeps its own rotation and norms.

    Raises:
        ValueError: as `enable_model`; or the model drops attention weights, which its first step
            would refuse.
    """
    model = trainer.model if model is None else model
    config = text_config(model)
    dropout = getattr(config, "attention_dropout", 0.0)
    if isinstance(dropout, float) and dropout:
        raise ValueError(
            f"the trainer's model has attention_dropout={dropout}, which packed attention cannot "
            "compute: set attention_dropout to 0.0 in its config before the model is made"
        )
    base = find_pretrained(model)
    was_enabled = isinstance(_state_of(base), _State)
    if was_enabled or attention_of(config) != NAME:
        of_model = {name: options[name] for name in ModelOptions.__optional_keys__}
        enabled = enable_model(model, **of_model)
        if not was_enabled:
            _holders[base] = weakref.WeakSet()
        if base in _holders:
            _holders[base].add(trainer)
        return enabled
    if (backend := options["backend"]) != "auto":
        raise ValueError(
            f'backend must be "auto" for a model made with attn_implementation="{NAME}", got '
            f'"{backend}": enable the model by cuseq.enable(model, backend="{backend}")'
        )
    if base not in _aided:
        around = models_around(base, attention_layers(base, ()))
        hooks, with_doors = hook_models(around), []
        for inner in around:  # the text part alone may be named so, whose door sees no images
            if door := install_door(inner):
                hooks += door
                with_doors.append(inner)
        names = [name for name, one in base.named_modules() if one in with_doors]
        release = weakref.finalize(base, restore_functions, replace_functions(base))
        release.atexit = False
        _aided[base] = _Aid(hooks, names, release)
    _holders.setdefault(base, weakref.WeakSet()).add(trainer)
    recurrent = recurrent_layers(config)
    reason = 'the model: it was made with attn_implementation="cuseq", and is enabled on its own'
    leaks = (leak_warning_by_name(recurrent, config),) if recurrent else ()
    return Enabled("model", (), (reason,), leaks)


def release_model_of_trainer(trainer: Any) -> None:
    """Disable the models that a trainer holds and no other trainer."""
    for model, holders in list(_holders.items()):  # the trainer may have wrapped its model since
        if trainer in holders:
            holders.remove(trainer)
            if not holders:
                disable_model(model)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _state_of(base: PreTrainedModel) -> _State | _Saved | None:
    return vars(base).get(_STATE)


def _clean(base: PreTrainedModel, saved: _Saved) -> None:
    """Remove what a model has of cuseq's that was pickled while it was enabled."""
    for module in base.modules():
        for hooks in hooks_of(module):
            for number, hook in list(hooks.items()):
                function = getattr(hook, "func", hook)
                if function.__module__.startswith("cuseq."):
                    del hooks[number]
        for name in [name for name in vars(module) if name.startswith("_cuseq")]:
            delattr(module, name)
        if saved.implementation is not None and hasattr(module, "config"):
            if attention_of(module.config) == NAME:
                set_attention_alone(module.config, saved.implementation)


def _check_caches(base: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Check that the model that calls these layers takes its cache by a name that cuseq knows.

    Raises:
        UnknownRelease: it has a cache under another name, whose contents would be overlooked.
    """
    if not layers:
        return
    *_, caller = models_around(base, layers)
    if "use_cache" in parameters_of(type(caller).forward):
        check_cache_name(type(caller))


def _refuse_parts(base: PreTrainedModel) -> None:
    for enabled in _models:
        if any(module is base for module in enabled.modules()):
            raise ValueError(
                f"model must be what was enabled, a {type(enabled).__name__}, got its "
                f"{type(base).__name__}"
            )
    if any(map(is_replaced, base.modules())):
        raise ValueError(
            f"model must not be a part of an enabled model, got its {type(base).__name__}: call "
            "cuseq.disable with the model that was enabled, before it is gone"
        )
