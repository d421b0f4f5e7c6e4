"""Replacement of RoPE in modeling modules of transformers by `cuseq.apply_rope`.

A matching name is not enough. A function is replaced only if `cuseq.apply_rope` gives the same
numbers on a small input.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuseq.integrations.transformers._functions import (
    original_function,
    replace_function,
    restore_function,
)
from cuseq.integrations.transformers._layers import calls_of, code_of, is_rotary_embedding
from cuseq.integrations.transformers._rotary import IN_TOWER, KINDS, NAMES, Kind, Rotary

Function = tuple[types.ModuleType, str]

_WITHOUT = "enable the model with rope=False, qk_norm=False"
_HEAD_SIZES = ("head_dim", "head_size")


@dataclass(frozen=True)
class Rotation:
    """A function of a modeling module that rotates: its kind, and how it reads its table."""

    kind: Kind
    rotary: Rotary


def find_rotations(
    base: PreTrainedModel, layers: list[nn.Module]
) -> tuple[dict[Function, Rotation], list[str]]:
    """Return how each function that rotates does so, and those that are left alone.

    A function is compared with `cuseq.apply_rope`, which has no gradient of angles.

    Raises:
        ValueError: a function rotates in a way that `cuseq.apply_rope` does not support.
    """
    found, left_alone = {}, []
    for (code, name), user in _users_of(layers, NAMES).items():
        tables = [m for m in base.modules() if is_rotary_embedding(m) and code_of(m) is code]
        if any(True for table in tables for _ in table.parameters()):
            left_alone.append(f"rope:{code.__name__}: its angles are learned")
        else:
            found[code, name] = _rotation_of(base, (code, name), user)
    return found, left_alone


def _users_of(layers: list[nn.Module], names: Iterable[str]) -> dict[Function, nn.Module]:
    """Return the functions with these names that layers call, each with a layer that does."""
    users: dict[Function, nn.Module] = {}
    for layer in layers:
        code = code_of(layer)
        for name in names:
            if name in calls_of(layer) and hasattr(code, name):
                users.setdefault((code, name), layer)
    return users


def find_tower_rotations(layers: list[nn.Module]) -> tuple[dict[Function, Rotation], list[str]]:
    """Return how each function that rotates in towers does so, and those that are left alone."""
    found, left_alone = {}, []
    for (code, name), layer in _users_of(layers, [IN_TOWER.name]).items():
        rotate = original_function(code, name)
        if tuple(inspect.signature(rotate).parameters) == IN_TOWER.parameters:
            rotary = IN_TOWER.match(rotate, [layer.head_dim], None)
            if rotary is not None:
                found[code, name] = Rotation(IN_TOWER, rotary)
                continue
        left_alone.append(f"rope:{code.__name__}: {name} rotates in a way of its own")
    return found, left_alone


def _rotation_of(base: PreTrainedModel, function: Function, layer: nn.Module) -> Rotation:
    code, name = function
    where = f"{code.__name__}.{name}"
    rotate = original_function(code, name)
    parameters = tuple(inspect.signature(rotate).parameters)
    kinds = [kind for kind in KINDS if kind.name == name]
    known = [kind for kind in kinds if kind.parameters == parameters]
    if not known:
        raise ValueError(
            f"{where} must take {list(kinds[0].parameters)}, got {list(parameters)}: "
            "is it of another release of transformers, or did another package replace it "
            "(Liger: rope=False)?"
        )
    (kind,) = known
    sizes = [getattr(layer, one) for one in _HEAD_SIZES if hasattr(layer, one)]
    try:
        rotary = kind.match(rotate, sizes, _angles(base, layer))
    except (AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"{where} cannot be compared with cuseq.apply_rope "
            f"({type(error).__name__}: {error}): {_WITHOUT}"
        ) from error
    if rotary is None:
        raise ValueError(f"{where} rotates heads in a way that cuseq.apply_rope cannot: {_WITHOUT}")
    return Rotation(kind, rotary)


def _angles(base: PreTrainedModel, layer: nn.Module) -> Any:
    """Return a few rows of the model's own table for a layer, on the CPU."""
    code = code_of(layer)
    for module in base.modules():
        kind = type(module)
        if kind.__module__ != code.__name__ or not is_rotary_embedding(module):
            continue
        is_meta = any(one.is_meta for one in module.buffers())
        rotary = kind(module.config) if is_meta else copy.deepcopy(module).cpu()
        rotary.__dict__.pop("forward", None)  # accelerate's forward moves tensors to the GPU
        options = {}
        kinds = getattr(base.config.get_text_config(), "layer_types", None)
        if kinds and "layer_type" in inspect.signature(kind.forward).parameters:
            options["layer_type"] = kinds[layer.layer_idx]
        positions = torch.arange(7).unsqueeze(0)
        if hasattr(rotary, "mrope_section"):
            positions = positions.expand(3, 1, -1)
        return kind.forward(rotary, torch.zeros(1, 7, 1), positions, **options)
    raise ValueError(
        f"{code.__name__} has no rotary embedding among the model's modules: {_WITHOUT}"
    )


def replace_rotation(function: Function, rotation: Rotation) -> None:
    """Replace a function that rotates on behalf of one more model."""
    replace_function(*function, lambda original: rotation.kind.replace(original, rotation.rotary))


def restore_rotations(functions: list[Function]) -> None:
    """Undo one `replace_rotation` of each function; undoing the last restores the original."""
    for code, name in functions:
        restore_function(code, name)
