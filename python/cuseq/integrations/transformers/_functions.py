"""Replacement of functions of modeling modules, counted over the models that want it.

A modeling module looks its functions up by name when a layer runs, so a replacement acts on live
models, and on every model of that family in the process. The last model that is disabled, or
freed, restores the original. Others replace such functions too (Liger, unsloth, tests). One that
wraps ours may stay; one that does not is replaced for the next model, and restored in the end.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Function = Callable[..., Any]
Place = tuple[types.ModuleType, str]
"""A modeling module, and the name of a function that it looks up."""


@dataclass
class _Replaced:
    ours: list[tuple[Function, Function]] = field(default_factory=list)  # each with its original
    models: int = 0

    def original_of(self, function: Function) -> Function | None:
        """Return what a function of ours replaced; None for another's."""
        return next((original for own, original in self.ours if own is function), None)


_replaced: dict[tuple[types.ModuleType, str], _Replaced] = {}


def _original_of_ours(code: types.ModuleType, name: str) -> Function | None:
    """Return what our function in a module replaced; None if it would not be called."""
    replaced, function = _replaced.get((code, name)), getattr(code, name)
    original = None
    while replaced is not None and function is not None and original is None:
        original = replaced.original_of(function)
        function = getattr(function, "__wrapped__", None)
    return original


def original_function(code: types.ModuleType, name: str) -> Function:
    """Return the function of a modeling module that ours replaces or would replace."""
    return _original_of_ours(code, name) or getattr(code, name)


def is_ours(code: types.ModuleType, name: str) -> bool:
    """Return whether a modeling module calls our function."""
    return _original_of_ours(code, name) is not None


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
    replaced = _replaced.setdefault((code, name), _Replaced())
    if not is_ours(code, name):
        original = getattr(code, name)
        own = replacement(original)
        replaced.ours.append((own, original))
        setattr(code, name, own)
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
        original = replaced.original_of(getattr(code, name))
        if original is not None:
            setattr(code, name, original)
