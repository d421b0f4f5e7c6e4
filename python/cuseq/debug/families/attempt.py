"""Trying one family in this process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection

import cuseq
from cuseq.debug.families._checks import CHECKS
from cuseq.debug.families.models import other_parts, small_model
from cuseq.debug.families.result import (
    DIFFERS,
    LEAKS,
    NOT_TRIED,
    REFUSED,
    RIGHT,
    FamilyResult,
)

_OF_DOCUMENTS = ("separate", "packed")


def try_family(family: str, checks: Collection[str] = tuple(CHECKS)) -> FamilyResult:
    """Enable a small random model of a family and compare what it computes with the stock model.

    Args:
        family: a model type of transformers with a causal-LM class.
        checks: names of `CHECKS`.

    Returns:
        The result. Errors of the model, of `enable` and of the checks become a part of it.
    """
    parts = other_parts(family)
    if parts:
        return FamilyResult(family, NOT_TRIED, f"a model of several parts: {', '.join(parts)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stock = small_model(family)
            CHECKS["dense"](stock, stock)
        except Exception as error:
            return FamilyResult(family, NOT_TRIED, f"no small model of it runs ({_shown(error)})")
        model = copy.deepcopy(stock)
        try:
            enabled = cuseq.enable(model)
        except ValueError as error:
            return FamilyResult(family, REFUSED, str(error))
        found = {}
        try:
            for name in checks:
                try:
                    found[name] = CHECKS[name](stock, model) or ""
                except Exception as error:
                    found[name] = _shown(error)
        finally:
            cuseq.disable(model)
    wrong = {name: text for name, text in found.items() if text}
    verdict, reason = RIGHT, ""
    if wrong:
        first = next((name for name in _OF_DOCUMENTS if name in wrong), next(iter(wrong)))
        verdict = LEAKS if first == "separate" else DIFFERS
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


def _shown(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"
