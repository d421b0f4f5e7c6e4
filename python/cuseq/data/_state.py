"""Checks that the states of `PackedBatchSampler` and `PackedStream` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def refuse_other(
    state: Mapping[str, Any], settings: Mapping[str, Any], position: Iterable[str]
) -> None:
    """Raise ValueError if `state` differs from `settings` or lacks a key of `position`.

    The message names each setting that differs. A state that is not a mapping raises TypeError.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict returned, got {type(state).__name__}")
    lacking = [name for name in (*settings, *position) if name not in state]
    if lacking:
        raise ValueError(f"state must be what state_dict returned, but it has no {lacking[0]!r}")
    differ = [
        f"{name} is {value!r} and was {state[name]!r}"
        for name, value in settings.items()
        if state[name] != value
    ]
    if differ:
        raise ValueError(f"state must be of the same arguments, but {'; '.join(differ)}")
