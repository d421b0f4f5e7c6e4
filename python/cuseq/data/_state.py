"""Checks of what states and pickles of samplers, streams and collators say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cuseq._arguments import as_int

MOST_RANKS = 2**16
_MOST_ROWS = 2**20  # of one step, all of which may have to be made of a few samples


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
        if not _is_same(state[name], value)
    ]
    if differ:
        raise ValueError(f"state must be of the same arguments, but {'; '.join(differ)}")


def _is_same(value: Any, setting: Any) -> bool:
    try:
        return bool(value == setting)
    except (TypeError, ValueError, RuntimeError):  # an array, which has no truth
        return False


def options_in(pickled: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those of a pickled object's attributes that are arguments of its class.

    Raises:
        TypeError: the pickle holds no attributes.
        ValueError: it lacks one.
    """
    if not isinstance(pickled, Mapping):
        raise TypeError(f"pickled must be a dict of attributes, got {type(pickled).__name__}")
    lacking = [name for name in names if name not in pickled]
    if lacking:
        raise ValueError(f"pickled must hold {lacking[0]}, got {sorted(map(str, pickled))}")
    return {name: pickled[name] for name in names}


def checked_ranks(world_size: Any, accumulation: Any = 1) -> tuple[int, int]:
    """Return the number of ranks, and the rows of each in one step, as ints."""
    world_size = as_int(world_size, "world_size", least=1)
    if world_size > MOST_RANKS:
        raise ValueError(f"world_size must be at most {MOST_RANKS}, got {world_size}")
    accumulation = as_int(accumulation, "accumulation", least=1)
    if world_size * accumulation > _MOST_ROWS:
        raise ValueError(
            f"accumulation must be at most {_MOST_ROWS // world_size} on {world_size} ranks, "
            f"{_MOST_ROWS} rows of all ranks, got {accumulation}"
        )
    return world_size, accumulation
