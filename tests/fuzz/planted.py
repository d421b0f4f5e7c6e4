"""Faults put in on purpose, to see that the fuzzer finds them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import cuseq
from tests.fuzz.calls.target import function
from tests.fuzz.values import Draw


def _faulty(number: int) -> int:
    """Return twice the number, with a fault of each kind."""
    if number == 1:
        return 3
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 3:
        return [][number]
    if number == 4:
        cuseq.varlen_attention._nothing  # noqa: B018
    if number == 5:
        raise ValueError("something is wrong")
    if number == 6:
        time.sleep(1e6)
    return 2 * number


def _check(arguments: dict[str, Any], result: Any) -> None:
    assert result == 2 * arguments["self"], f"got {result}"


_CALLERS: list[int] = []


def _careless(fault: int, values: torch.Tensor) -> torch.Tensor:
    """Return the values, with a fault that plain calls do not show."""
    if fault == 0:
        return values.as_strided(values.shape, (values.shape[1], 1), 0).clone()
    if fault == 1:
        return values.detach()
    if fault == 2 and torch.is_inference_mode_enabled():
        raise ValueError("values must not come in inference mode")
    if fault == 3:
        return values + torch.ones(1).div(3).double()
    if fault == 4:
        _CALLERS.append(fault)
        time.sleep(1e-3)
        values = values + len(_CALLERS)
        _CALLERS.pop()
    if fault == 5 and type(values) is not torch.Tensor:
        raise TypeError("values must be a tensor")
    return values.clone()


def plant() -> None:
    """Register functions that fail."""

    def call(arguments: dict[str, Any]) -> int:
        return _faulty(arguments["self"])

    @function("planted", _faulty, call=call, check=_check)
    def _(draw: Draw) -> dict[str, Any]:
        hangs = 1 if "CUSEQ_FUZZ_HANGS" in os.environ else 0
        return {"self": draw.choices(range(7), (9, 9, 1, 9, 9, 9, hangs))[0]}  # never bent

    @function("careless", _careless, call=lambda arguments: _careless(*arguments.values()))
    def _(draw: Draw) -> dict[str, Any]:
        return {"self": draw.randrange(6), "values": draw.floats(3, 2, dtype=torch.float64)}
