"""A function under test: how it is called and which arguments are right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.values import Draw

Arguments = dict[str, Any]
Check = Callable[[Arguments, Any], None]


@dataclass(frozen=True)
class Target:
    """One function.

    `make` draws right arguments, `call` calls with them, `check` raises AssertionError where a
    result is wrong (it gets bent arguments too, and returns where it cannot judge them). `names`
    are what an error may name. An op of a schema is `typed`: PyTorch's dispatcher refuses values of
    another type before the op is asked, in its own words.
    """

    name: str
    make: Callable[[Draw], Arguments]
    call: Callable[[Arguments], Any]
    check: Check | None
    names: frozenset[str]
    typed: bool
    weight: int
    wrong: bool = False  # no arguments are right

    def maker(self, draw: Draw) -> Callable[[], Arguments]:
        """Return a function that makes the arguments of now, the same ones each time."""
        begin = draw.fork()
        return lambda: self.make(begin.fork())


TARGETS: dict[str, Target] = {}


def function(
    name: str,
    of: Callable[..., Any],
    *,
    call: Callable[[Arguments], Any] | None = None,
    check: Check | None = None,
    also: tuple[str, ...] = (),
    weight: int = 4,
    wrong: bool = False,
) -> Callable[[Callable[[Draw], Arguments]], None]:
    """Register a public function under the name that a user writes; the decorated makes arguments.

    `also` are further names that an error may give, as those of a mapping's entries.
    """

    def register(make: Callable[[Draw], Arguments]) -> None:
        names = frozenset((*inspect.signature(of).parameters, *also)) - {"self"}
        run = call or (lambda arguments: of(**arguments))
        TARGETS[name] = Target(name, make, run, check, names, False, weight, wrong)

    return register


# What a message calls an argument that holds one of several things.
_CALLED = {
    "source": frozenset(("lengths", "cu_seqlens")),
    "cu_seqlens": frozenset(("lengths",)),
    "tensors": frozenset(("q", "k", "head_dim")),
    "weights": frozenset(("q_weight", "k_weight")),
    "host_meta": frozenset(("max_seqs",)),  # what its status says
    "cp_size": frozenset(("the tail",)),
}


def schema(
    name: str, *, check: Check | None = None, weight: int = 4
) -> Callable[[Callable[[Draw], Arguments]], None]:
    """Register an op of `torch.ops.cuseq`; arguments are given by position."""

    def register(make: Callable[[Draw], Arguments]) -> None:
        op = getattr(torch.ops.cuseq, name).default
        names = frozenset(argument.name for argument in op._schema.arguments)
        for argument, aliases in _CALLED.items():
            names |= aliases if argument in names else frozenset()
        names |= {"inplace"} if name.endswith("_") else frozenset()
        TARGETS[f"torch.ops.cuseq.{name}"] = Target(
            f"torch.ops.cuseq.{name}",
            make,
            lambda arguments: op(*arguments.values()),
            check,
            names,
            True,
            weight,
        )

    return register
