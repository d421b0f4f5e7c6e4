"""Forwards that cuseq sets on module objects, and their removal."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

from cuseq.integrations.transformers._private import (
    has_accelerate_forward,
    own_forwards,
    set_forward,
)

_MARK = "_cuseq_forward"


def our_forward(function: Callable[..., Any], name: str = "forward") -> Callable[..., Any]:
    """Mark a function that is set on modules as their method `name`.

    pickle saves bound methods by name. A model that is pickled while enabled therefore gets its
    class's own method when it is loaded.
    """
    function.__name__ = name
    setattr(function, _MARK, True)
    return function


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Set a forward on a module, or inside accelerate's wrapper.

    The forward becomes a bound method: with a partial, each compiled layer would get its own graph.
    """
    set_forward(module, types.MethodType(forward, module))


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    if has_accelerate_forward(module):
        set_forward(module, types.MethodType(type(module).forward, module))
    else:
        del module.forward


def current_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the function of a module's forward: ours, or that of its class."""
    name = "_old_forward" if has_accelerate_forward(module) else "forward"
    bound = vars(module).get(name)
    return type(module).forward if bound is None else bound.__func__


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module has a forward of ours, or is a copy of such a module.

    accelerate's mixed precision may be around ours.
    """
    return any(is_ours(getattr(forward, "__func__", None)) for forward in own_forwards(module))


def is_ours(function: Any) -> bool:
    """Return whether a function is one that `our_forward` marked, or is around one."""
    while function is not None and not getattr(function, _MARK, False):
        function = getattr(function, "__wrapped__", None)
    return function is not None
