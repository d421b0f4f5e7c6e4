"""What was made of a tensor, kept until the tensor goes or is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Made(NamedTuple):
    """The tensor, what state it was in, and what was made of it then, by key."""

    tensor: weakref.ref[Tensor]
    state: tuple[int, int]
    values: dict[Hashable, Any]


# By `id`, not as attributes: those go along with copies and into saved files.
_made: dict[int, _Made] = {}


def remember(tensor: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it returned before for this key, if the tensor is as it was.

    It is the same tensor, by identity, version counter and address; writes past the version counter
    (by numpy, by a raw kernel) are not seen. An inference tensor has no version, so nothing is kept
    of it. The value must not refer to the tensor, or neither ever goes.
    """
    if tensor.is_inference():
        return make()
    number, state = id(tensor), (tensor._version, tensor.data_ptr())
    made = _made.get(number)
    if made is None or made.state != state or made.tensor() is not tensor:
        made = _Made(weakref.ref(tensor, _forgetter(number)), state, {})
        _made[number] = made
    if key not in made.values:
        made.values[key] = make()
    return made.values[key]


def _forgetter(number: int) -> Callable[[weakref.ref[Tensor]], None]:
    every = _made  # a tensor may go when the interpreter's modules are gone

    def forget(gone: weakref.ref[Tensor]) -> None:
        made = every.get(number)
        if made is not None and made.tensor is gone:  # else another tensor has the number now
            del every[number]

    return forget
