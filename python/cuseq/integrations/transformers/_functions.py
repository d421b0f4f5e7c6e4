"""Replacement of functions of modeling modules, counted over the models that want it.

A modeling module looks its functions up by name when a layer runs, so a replacement acts on live
models, and on every model of that family in the process. The last model that is disabled, or freed,
restores the original. Others replace such functions too (Liger, unsloth, tests): one that stands in
the place of ours is replaced for the next model, and is what is restored.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
Place = tuple[types.ModuleType, str]
"""A modeling module, and the name of a function that it looks up."""


@dataclass
class _Replaced:
    original: Function
    own: Function
    models: int = 0

    def is_in(self, code: types.ModuleType, name: str) -> bool:
        """Return whether nobody has put another function in its place."""
        return getattr(code, name) is self.own


_replaced: dict[tuple[types.ModuleType, str], _Replaced] = {}


def original_function(code: types.ModuleType, name: str) -> Function:
    """Return a modeling module's own function, also while it is replaced."""
    replaced = _replaced.get((code, name))
    if replaced is not None and replaced.is_in(code, name):
        return replaced.original
    return getattr(code, name)


def is_replaced(code: types.ModuleType, name: str) -> bool:
    """Return whether a modeling module's function is ours."""
    replaced = _replaced.get((code, name))
    return replaced is not None and replaced.is_in(code, name)


def replace_function(
    code: types.ModuleType, name: str, replacement: Callable[[Function], Function]
) -> None:
    """Replace a modeling module's function on behalf of one more model.

    Args:
        code: the modeling module.
        name: the function.
        replacement: makes the new function from the original one; called for the first model, and
            where another function has been put there since.
    """
    replaced = _replaced.get((code, name))
    if replaced is None or not replaced.is_in(code, name):
        original, models = getattr(code, name), 0 if replaced is None else replaced.models
        replaced = _replaced[code, name] = _Replaced(original, replacement(original), models)
        setattr(code, name, replaced.own)
    replaced.models += 1


def hold_function(code: types.ModuleType, name: str) -> None:
    """Keep a replaced function replaced for one more model."""
    _replaced[code, name].models += 1


def restore_function(code: types.ModuleType, name: str) -> None:
    """Undo one `replace_function`; undoing the last restores the original."""
    replaced = _replaced[code, name]
    replaced.models -= 1
    if replaced.models == 0:
        del _replaced[code, name]
        if replaced.is_in(code, name):
            setattr(code, name, replaced.original)
