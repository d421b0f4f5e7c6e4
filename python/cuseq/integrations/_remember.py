"""What was made of a tensor, kept with the tensor until it is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Made:
    """The tensor, what state it was in, and what was made of it then, by key."""

    def __init__(self, tensor: Tensor, state: tuple[int, int]) -> None:
        self.tensor = weakref.ref(tensor)
        self.state = state
        self.values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # copies of a tensor, and pickles, bring attributes along


def _nothing() -> None:
    return None


def remember(tensor: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it returned before for this key, if the tensor is as it was.

    It is the same tensor, by identity, version counter and address. An inference tensor has no
    version to notice edits by, so nothing is kept with it. The value must not refer to the tensor:
    a cycle would keep memory of a GPU until the garbage collector runs.
    """
    if tensor.is_inference():
        return make()
    state = tensor._version, tensor.data_ptr()
    made = getattr(tensor, "_cuseq_made", None)
    if made is None or made.state != state or made.tensor() is not tensor:
        made = _Made(tensor, state)
        tensor._cuseq_made = made
    if key not in made.values:
        made.values[key] = make()
    return made.values[key]
