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
from collections.abc import Iterable

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
        if hands_on_keywords(type(caller), child[len(name) :].lstrip(".")):
            continue
        # A model inside a model is called once, outside all checkpoints.
        if not in_layer and not isinstance(modules[child], PreTrainedModel):
            return None
        loans.append((name, child[len(name) :].lstrip(".")))
    return loans


@functools.cache
def hands_on_keywords(cls: type[nn.Module], child: str) -> bool:
    """Return whether a module's forward gives its keywords to a child.

    If it calls the child by its name, each such call must, but for calls with one argument, which
    are those of another kind of child (NemotronH's experts). Else, if it calls children in a loop,
    it is enough that one of its calls does.
    """
    calls, own = _calls(cls)
    direct = [call for call in calls if _name(call.func) == child]
    direct = [call for call in direct if len(call.args) + len(call.keywords) > 1]
    if direct:
        return all(_hands_on(call, own) for call in direct)
    return any(_hands_on(call, own) for call in calls)


def reaches_functions(cls: type[nn.Module], functions: Iterable[str]) -> bool:
    """Return whether a mixer's forward gives keywords to all of the functions that it calls."""
    calls, _ = _calls(cls)
    return all(_hands_on(call) for call in calls if _name(call.func) in functions)


def _calls(cls: type[nn.Module]) -> tuple[list[ast.Call], str | None]:
    """Return the calls in a module's forward to which keywords could go, and the keywords' name.

    There are none if the forward's source is not there or it takes no further keywords.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return [], None
    (function,) = ast.parse(source).body
    own = function.args.kwarg
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return [one for one in calls if _name(one.func) not in _FORGETTING], own and own.arg


def _hands_on(call: ast.Call, name: str | None = None) -> bool:
    """Return whether a call gets the keywords of this name, or `seq_idx` alone.

    Without a name, any keywords are meant.
    """
    for keyword in call.keywords:
        if keyword.arg == "seq_idx":
            return True
        if keyword.arg is None and (name is None or getattr(keyword.value, "id", None) == name):
            return True
    return False


def _name(function: ast.expr) -> str | None:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
