"""What the states of sampler and stream have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_other(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises which settings of a state are not these."""
    differ = [
        f"{name} is {value!r} and was {state.get(name)!r}"
        for name, value in settings.items()
        if state.get(name) != value
    ]
    if differ:
        raise ValueError(f"state must be of the same arguments, but {'; '.join(differ)}")
