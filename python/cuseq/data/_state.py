"""Checks of what states and pickles of samplers, streams and collators say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cuseq._base.arguments import as_int, shown
from cuseq.data._epoch import Stage

_MOST_RANKS = 2**16
_MOST_STAGES = 64  # parts of an epoch with other numbers of ranks
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
        f"{name} is {shown(value)} and was {shown(state[name])}"
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
    if world_size > _MOST_RANKS:
        raise ValueError(f"world_size must be at most {_MOST_RANKS}, got {world_size}")
    accumulation = as_int(accumulation, "accumulation", least=1)
    if world_size * accumulation > _MOST_ROWS:
        raise ValueError(
            f"accumulation must be at most {_MOST_ROWS // world_size} on {world_size} ranks, "
            f"{_MOST_ROWS} rows of all ranks, got {accumulation}"
        )
    return world_size, accumulation


def checked_stages(before: Any) -> list[Stage]:
    if not isinstance(before, Sequence):
        raise TypeError(f"before must be a list, got {type(before).__name__}")
    if len(before) > _MOST_STAGES:
        raise ValueError(
            f"before must hold at most {_MOST_STAGES} parts of the epoch, got {len(before)}"
        )
    return [checked_stage(stage) for stage in before]


def checked_stage(stage: Any) -> Stage:
    if not isinstance(stage, Sequence) or len(stage) != 3:
        raise TypeError(f"before must hold world_size, accumulation and steps, got {shown(stage)}")
    world_size, accumulation, steps = stage
    return Stage(*checked_ranks(world_size, accumulation), as_int(steps, "step", least=0))


def checked_held(
    state: Mapping[str, Any], position: Mapping[str, Any], stateful: bool
) -> list[list[Any]]:
    """Return the samples that a stream's state holds over; raise unless they are of its position.

    Args:
        state: with `held`, a list of (number, window, sample), and `source`.
        position: the counts of the state, as ints.
        stateful: whether the iterable has a state; otherwise the state keeps nothing of it.
    """
    if not isinstance(state["held"], list):
        raise TypeError(f"held must be a list, got {type(state['held']).__name__}")
    # Copies: reading a number may run code that changes the lists.
    entries = [list(one) if isinstance(one, list | tuple) else one for one in state["held"]]
    held: dict[int, list[Any]] = {}
    for entry in entries:
        number, since = _checked_numbers(entry, position, held)
        held[number] = [number, since, entry[2]]
    kept = [("source", state["source"]), *(("held", sample) for _, _, sample in held.values())]
    for name, value in kept:
        if not stateful and value is not None:
            raise ValueError(
                f"{name} must keep nothing of an iterable without state_dict and "
                f"load_state_dict, got {shown(value)}"
            )
    return list(held.values())


def _checked_numbers(
    entry: Any, position: Mapping[str, Any], seen: Mapping[int, Any]
) -> tuple[int, int]:
    """Return the number of a sample that a state holds over, and that of its window."""
    if not isinstance(entry, list) or len(entry) != 3:
        raise TypeError(f"held must hold [number, window, sample], got {shown(entry)}")
    number = as_int(entry[0], "held", least=0)
    since = as_int(entry[1], "held", least=0)
    if number >= position["consumed"] or since > position["window_number"] or number in seen:
        raise ValueError(
            f"held must hold each sample once, of the consumed = {position['consumed']} ones and "
            f"windows up to window_number = {position['window_number']}, got sample {number} of "
            f"window {since}"
        )
    return number, since
