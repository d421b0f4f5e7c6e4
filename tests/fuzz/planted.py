"""Faults put in on purpose, to see that the fuzzer finds them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

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


def plant() -> None:
    """Register a function that fails."""

    def call(arguments: dict[str, Any]) -> int:
        return _faulty(arguments["self"])

    @function("planted", _faulty, call=call, check=_check)
    def _(draw: Draw) -> dict[str, Any]:
        hangs = 1 if "CUSEQ_FUZZ_HANGS" in os.environ else 0
        return {"self": draw.choices(range(7), (9, 9, 1, 9, 9, 9, hangs))[0]}  # never bent
