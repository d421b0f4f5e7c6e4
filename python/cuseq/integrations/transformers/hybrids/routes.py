"""Search for the way of keywords through the modules of a model, in their source code.

A mixer is separated only if the layout reaches it. Most modules hand their keywords on; from some
others a caller can lend them to the child for the time of its forward. That must happen inside what
a checkpoint computes again, or the mixer would run without boundaries in the backward.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

Loan = tuple[str, str]  # the names of the lending module and, below it, of the child

_FORGETTING = {"loss_function"}  # calls with keywords that lead to no child


def loans_to(mixer: str, modules: dict[str, nn.Module]) -> list[Loan] | None:
    """Return the loans that bring keywords from a model's forward to a mixer.

    Args:
        mixer: its name.
        modules: the model's modules by name.

    Returns:
        The lending modules with the children they lend to; None if keywords do not arrive.
    """
    parts = mixer.split(".")
    names = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    called = [
        name for name in names if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict)
    ]
    loans = []
    in_layer = False
    for name, child in zip(called[:-1], called[1:], strict=True):
        caller = modules[name]
        in_layer = in_layer or isinstance(caller, GradientCheckpointingLayer)
        if hands_on_keywords(type(caller)):
            continue
        # A model inside a model is called once, outside all checkpoints.
        if not in_layer and not isinstance(modules[child], PreTrainedModel):
            return None
        loans.append((name, child[len(name) :].lstrip(".")))
    return loans


@functools.cache
def hands_on_keywords(cls: type[nn.Module]) -> bool:
    """Return whether a module's forward gives all its keywords to a module that it calls."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return False
    (function,) = ast.parse(source).body
    own = function.args.kwarg
    return own is not None and any(
        isinstance(keyword.value, ast.Name) and keyword.value.id == own.arg
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _name(call.func) not in _FORGETTING
        for keyword in call.keywords
        if keyword.arg is None
    )


def _name(function: ast.expr) -> str | None:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
