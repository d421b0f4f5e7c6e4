"""Trying one family in this process."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import cuseq
from tests.families._checks import CHECKS, Run
from tests.families.models import other_parts, small_model, text_family
from tests.families.result import (
    DIFFERS,
    LEAKS,
    NOT_TRIED,
    RAISES,
    REFUSED,
    RIGHT,
    FamilyResult,
)

_OF_DOCUMENTS = ("separate", "packed")


def try_family(
    family: str, checks: Collection[str] = tuple(CHECKS), device: str = "cpu"
) -> FamilyResult:
    """Enable a small random model of a family and compare what it computes with what it did before.

    Args:
        family: a model type of transformers with a causal-LM class.
        checks: names of `CHECKS`.
        device: where the model runs.

    Returns:
        The result. Errors of the model, of `enable` and of the checks become a part of it.
    """
    parts = other_parts(family)
    if parts:
        reason = f"a model of several parts: {', '.join(parts)}"
        text = text_family(family)
        return FamilyResult(family, NOT_TRIED, f"{reason}; its text is {text}" if text else reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = small_model(family, device=device)
            next(CHECKS["dense"](model))
        except Exception as error:
            return FamilyResult(family, NOT_TRIED, f"no small model of it runs ({_shown(error)})")
        found: dict[str, str] = {}
        raised = set()
        started = {}
        for name in checks:
            run = CHECKS[name](model)
            try:
                next(run)
            except Exception:  # what the stock model cannot do is not a check of `enable`
                continue
            started[name] = run
        try:
            enabled = cuseq.enable(model)
        except ValueError as error:
            named = _finished(started["named"]) if "named" in started else ""
            if named:
                return FamilyResult(family, LEAKS, f"named: {named}", {"named": named})
            return FamilyResult(family, REFUSED, str(error))
        try:
            for name, run in started.items():
                try:
                    found[name] = _finished(run)
                except Exception as error:
                    found[name] = _shown(error)
                    raised.add(name)
        finally:
            cuseq.disable(model)
    wrong = {name: text for name, text in found.items() if text}
    verdict, reason = RIGHT, ""
    if wrong:
        first = next((name for name in _OF_DOCUMENTS if name in wrong), next(iter(wrong)))
        leaks = first in ("separate", "named")
        verdict = RAISES if first in raised else LEAKS if leaks else DIFFERS
        reason = f"{first}: {wrong[first]}"
    return FamilyResult(
        family,
        verdict,
        reason,
        found,
        enabled.replaced,
        enabled.left_alone,
        enabled.warnings,
    )


def _finished(run: Run) -> str:
    """Return what the second half of a check finds wrong, or an empty string."""
    try:
        next(run)
    except StopIteration as end:
        return end.value or ""
    raise AssertionError("a check yields once")


def _shown(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"
