"""Tiers of the tests: which parameters `make test` runs, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Return a parameter that only the full tier runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def full_but(names: Iterable[str], *fast: str) -> list[Any]:
    """Return the names as parameters, of which the fast tier runs only the given ones."""
    names = list(names)
    assert set(fast) <= set(names), set(fast) - set(names)
    return [name if name in fast else full(name) for name in names]
