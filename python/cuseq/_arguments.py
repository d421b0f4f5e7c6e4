"""Checks of arguments, each error with the name, the rule and the value."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor


def as_int(value: Any, name: str, least: int | None = None) -> int:
    """An int of 64 bits, or what stands for one exactly."""
    try:
        value = index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {value!r}") from error
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in int64, got {value}")
    return value


def as_size(value: Any, name: str) -> Any:
    """An int, except in compiled code, where it may be a symbol; None stays."""
    return value if value is None or torch.compiler.is_compiling() else as_int(value, name)


def one_of(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """One of the names that an argument may have."""
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    return value


def check_tensor(value: Any, name: str) -> None:
    """What has no dtype, shape or device fails later, with a word about that only."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_flag(value: Any, name: str) -> None:
    """None would be taken for False."""
    if value is None:
        raise TypeError(f"{name} must be True or False, got None")
