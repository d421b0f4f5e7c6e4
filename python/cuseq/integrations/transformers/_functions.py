"""Replacement of functions of modeling modules, counted over the models that want it.

A modeling module looks its functions up by name when a layer runs, so a replacement acts on live
models, and on every model of that family in the process. The last model that is disabled, or freed,
restores the original.
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
    models: int = 0


_replaced: dict[tuple[types.ModuleType, str], _Replaced] = {}


def original_function(code: types.ModuleType, name: str) -> Function:
    """Return a modeling module's own function, also while it is replaced."""
    if (code, name) in _replaced:
        return _replaced[code, name].original
    return getattr(code, name)


def replace_function(
    code: types.ModuleType, name: str, replacement: Callable[[Function], Function]
) -> None:
    """Replace a modeling module's function on behalf of one more model.

    Args:
        code: the modeling module.
        name: the function.
        replacement: makes the new function from the original one; called for the first model only.
    """
    if (code, name) not in _replaced:
        original = getattr(code, name)
        _replaced[code, name] = _Replaced(original)
        setattr(code, name, replacement(original))
    _replaced[code, name].models += 1


def hold_function(code: types.ModuleType, name: str) -> None:
    """Keep a replaced function replaced for one more model."""
    _replaced[code, name].models += 1


def restore_function(code: types.ModuleType, name: str) -> None:
    """Undo one `replace_function`; undoing the last restores the original."""
    replaced = _replaced[code, name]
    replaced.models -= 1
    if replaced.models == 0:
        setattr(code, name, _replaced.pop((code, name)).original)
