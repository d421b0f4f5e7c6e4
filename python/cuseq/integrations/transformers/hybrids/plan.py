"""What separates documents in the mixers of one model: found first, then applied and undone."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cuseq._base.foreign import private
from cuseq.integrations.transformers._forwards import replace_forward, restore_forward
from cuseq.integrations.transformers._functions import (
    original_function,
    replace_function,
    restore_function,
)
from cuseq.integrations.transformers._layers import code_of
from cuseq.integrations.transformers._private import check_cache_name
from cuseq.integrations.transformers.hybrids.boundaries import (
    HANDS_ON_SEQ_IDX,
    LENDS_TO,
    LENT,
    borrowing_forward,
    entry_forward,
    lending_forward,
)
from cuseq.integrations.transformers.hybrids.kinds import (
    CONVOLUTION,
    KINDS,
    PARAMETERS,
    Kind,
    kind_of,
)
from cuseq.integrations.transformers.hybrids.routes import Loan, loans_to, reaches_functions
from cuseq.integrations.transformers.hybrids.segments import slow_warning

Function = tuple[types.ModuleType, str]


@dataclass
class Plan:
    """What to replace for the mixers of a model.

    Modules are given by name, because the state of an enabled model must not keep it alive.

    Attributes:
        mixers: the kind of each mixer.
        functions: functions of modeling modules to replace.
        forwards: forwards to set on modules.
        attributes: attributes to set on modules for those forwards.
        replaced: entries for `Enabled.replaced`.
        slow: warnings about recurrences that run without a kernel where the layers are now.
    """

    mixers: dict[str, Kind] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # it has names, and not the modules of one model


def plan_mixers(base: PreTrainedModel) -> Plan:
    """Find the mixers of a model and what separates documents in them.

    Raises:
        UnknownRelease: a function or layer of transformers takes other arguments than cuseq knows.
    """
    modules = dict(base.named_modules())
    plan = Plan()
    loans: dict[Loan, None] = {}
    for name, module in modules.items():
        kind = kind_of(module) if hasattr(module, "layer_idx") else None
        needed = None if kind is None else loans_to(name, modules)
        if needed is not None and reaches_functions(type(module), kind.replacements):
            plan.mixers[name] = kind
            loans |= dict.fromkeys(needed)
    if not plan.mixers:
        return plan
    plan.functions = list(
        dict.fromkeys(
            (code_of(modules[name]), function)
            for name, kind in plan.mixers.items()
            for function in kind.replacements
        )
    )
    for code, function in plan.functions:
        _check_parameters(code, function)
    _plan_forwards(plan, modules, loans)
    plan.replaced = tuple(
        sorted(
            {
                f"{part}:{_class(modules[n])}"
                for n, kind in plan.mixers.items()
                for part in _parts(kind)
            }
        )
    )
    parameters = list(base.parameters())
    plan.slow = tuple(
        dict.fromkeys(
            slow_warning(kind.what, kind.remedy)
            for name, kind in plan.mixers.items()
            if kind.what is not None and not _has_kernel(kind, modules[name], parameters)
        )
    )
    return plan


def _check_parameters(code: types.ModuleType, function: str) -> None:
    # While it is replaced the module holds our function, so look at the original.
    own = types.SimpleNamespace(**{function: original_function(code, function)})
    private(own, function, signature=PARAMETERS[function], package="transformers")


def _plan_forwards(plan: Plan, modules: dict[str, nn.Module], loans: Iterable[Loan]) -> None:
    for name, kind in plan.mixers.items():
        if kind.forward is not None:
            check_cache_name(type(modules[name]))
            plan.forwards[name] = kind.forward
    mixers = set(plan.mixers)
    around = [
        name
        for name, module in modules.items()
        if isinstance(module, PreTrainedModel)
        and mixers <= {_joined(name, one) for one, _ in module.named_modules()}
    ]
    text = max(around, key=len)  # the innermost
    plan.forwards[text] = entry_forward(type(modules[text]))
    plan.attributes[text, HANDS_ON_SEQ_IDX] = any(k.what is None for k in plan.mixers.values())
    for name, child in loans:
        plan.forwards[name] = lending_forward(type(modules[name]))
        plan.attributes[name, LENDS_TO] = child
        child = _joined(name, child)
        plan.attributes[child, LENT] = None
        if child in plan.mixers:  # one with functions alone, or with a forward that reads the loan
            plan.forwards.setdefault(child, borrowing_forward(type(modules[child])))


def _joined(name: str, child: str) -> str:
    return ".".join(one for one in (name, child) if one)


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _parts(kind: Kind) -> list[str]:
    return ["conv"] * (CONVOLUTION in kind.replacements) + ["recurrence"] * (kind.what is not None)


def _has_kernel(kind: Kind, mixer: nn.Module, parameters: list[nn.Parameter]) -> bool:
    # If anything in the model trains, gradients may go through the mixer.
    tensors = (next(mixer.parameters()), *parameters)
    return any(kernel.function(*tensors) is not None for kernel in kind.kernels)


def separate(base: nn.Module, plan: Plan) -> None:
    """Replace what a plan lists."""
    for code, function in plan.functions:
        replace_function(
            code,
            function,
            next(kind.replacements[function] for kind in KINDS if function in kind.replacements),
        )
    for (name, attribute), value in plan.attributes.items():
        setattr(base.get_submodule(name), attribute, value)
    for name, forward in plan.forwards.items():
        replace_forward(base.get_submodule(name), forward)


def restore_modules(base: nn.Module, plan: Plan) -> None:
    """Undo `separate` on the modules of the model."""
    for name in plan.forwards:
        restore_forward(base.get_submodule(name))
    for name, attribute in plan.attributes:
        delattr(base.get_submodule(name), attribute)


def restore_functions(functions: list[Function]) -> None:
    """Undo one replacement of each function."""
    for code, function in functions:
        restore_function(code, function)
