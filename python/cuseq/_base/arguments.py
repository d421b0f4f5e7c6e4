"""Checks of arguments, whose errors have the name, the rule and the value; rounding of sizes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from numbers import Real
from operator import index
from reprlib import Repr
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling


def as_int(value: Any, name: str, least: int | None = None) -> int:
    """Return `value` as an int that fits in int64; accept all types with `__index__` but bool."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value}")
    try:
        value = index(value)
    except (TypeError, RuntimeError) as error:  # RuntimeError: a tensor without values
        raise TypeError(f"{name} must be an int, got {shown(value)}") from error
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in int64, got {value}")
    return value


def as_int64s(values: Iterable[int]) -> Tensor:
    """Return ints as int64 `[n]` on the CPU, whatever torch's default device is.

    Raises:
        TypeError: a value is not an int; a fraction is refused, which int() would truncate.
        OverflowError: a value does not fit in int64.
    """
    if isinstance(values, list):  # an item's __index__ may change it
        values = tuple(values)
    numbers = array("q", values)  # torch reads its memory faster than a list
    if not numbers:  # frombuffer refuses it
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(numbers, dtype=torch.int64)


def as_size(value: Any, name: str, optional: bool = True) -> Any:
    """Return `value` as an int. While a graph is traced, return it unchanged: it may be a symbol.

    None is returned if the argument is optional; otherwise it raises TypeError.
    """
    if (optional and value is None) or is_compiling() or isinstance(value, torch.SymInt):
        return value
    return as_int(value, name)


def as_rank(value: Any, size: int, group: str = "world_size") -> int:
    """Return `value` as an int if it is a rank of a group of `size`; `group` names that size."""
    rank = as_int(value, "rank")
    if not 0 <= rank < size:
        raise ValueError(f"rank must lie in [0, {group} = {size}), got {rank}")
    return rank


def ceil_div(size: Any, divisor: Any) -> Any:
    """Return how many times `divisor` it takes to hold `size`; both may be symbols or tensors."""
    return (size + (divisor - 1)) // divisor


def round_up(size: Any, multiple: Any) -> Any:
    """Return the least multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple


def power_of_two(number: int, least: int) -> int:
    """Return the least power of two that is at least both; `least` is one, `number` at least 0."""
    return max(least, 1 << max(0, number - 1).bit_length())


def as_float(value: Any, name: str) -> Any:
    """Return a real number of Python or NumPy as a float; return a symbol unchanged."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must fit in float64, got {shown(value)}") from error


def as_window(window: Any) -> Any:
    """Return a sliding window: None for all keys, or an int of at least 1."""
    if isinstance(window, bool):  # True would be a window of one key
        raise TypeError(f"window must be None or an int, got {window}")
    window = as_size(window, "window")
    if type(window) is int and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")
    return window


def one_of(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; else raise ValueError."""
    if not isinstance(value, str) or value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        rule = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} must be {rule}, got {shown(value)}")
    return value


def check_tensor(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is a dense tensor, and ValueError if it is a meta tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one")
    if value.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on meta")


def plain_tensor(value: Any, name: str) -> Tensor:
    """Return a dense tensor as a plain one of the same memory, whatever subclass of Tensor it is.

    What is derived from a subclass may be of that subclass too (MONAI's MetaTensor), and a layout
    keeps plain tensors alone.

    Raises:
        TypeError, ValueError: as `check_tensor`; or the subclass has its values in other tensors
            (DTensor).
    """
    check_tensor(value, name)
    if type(value) is Tensor or is_compiling() or isinstance(value, FakeTensor):
        return cast("Tensor", value)
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} must be a tensor with values of its own, got a {type(value).__name__}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def check_untransformed(value: Tensor, name: str, way_out: str) -> None:
    """Raise NotImplementedError for a tensor inside torch.vmap or a transform of torch.func.

    Such a tensor has no memory to read, and no autograd.Function of ours takes it.
    """
    if not is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise NotImplementedError(
            f"{name} must not be a tensor of torch.vmap or torch.func here: {way_out}"
        )


def check_values(value: Any, name: str) -> None:
    """Raise as `check_tensor` for what an op does not name itself: no tensor, or one on meta.

    For calls in every layer, where the whole of `check_tensor` would cost time.
    """
    if not isinstance(value, Tensor) or value.is_meta:
        check_tensor(value, name)


def check_flag(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is True or False, because None would silently mean False."""
    if value is True or value is False or isinstance(value, torch.SymBool):
        return
    if type(value).__name__ not in ("bool", "bool_"):  # both names of NumPy's type
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_dtype(value: Any, name: str) -> None:
    """Raise TypeError unless value is a torch.dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {shown(value)}")


def as_device(value: Any, name: str) -> torch.device:
    """Return a torch.device from a torch.device, a name or the index of an accelerator."""
    if isinstance(value, bool) or not isinstance(value, torch.device | str | int):
        raise TypeError(f"{name} must be a torch.device, a name or an index, got {shown(value)}")
    try:
        device = torch.device(value)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a device of torch, got {shown(value)}") from error
    if device.index and device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"{name} must be one of the {torch.cuda.device_count()} GPUs that torch sees, got "
            f"{device}"
        )
    return device


def shown(value: Any) -> str:
    """Return the text of a value for an error message.

    A tensor, in a list too, is described by dtype, shape and device, because printing its values
    may wait for the device.
    """
    text = _TEXTS.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class _Texts(Repr):
    """Makes the texts of values; of one whose own `__repr__` fails too."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxarray = self.maxdict = self.maxset = 100
        self.maxfrozenset = self.maxdeque = 100
        self.maxstring = self.maxlong = self.maxother = 400

    def repr1(self, x: Any, level: int) -> str:
        if not isinstance(x, Tensor):
            return super().repr1(x, level)
        if x.is_nested:
            return "a nested tensor"  # it has no shape
        return f"a tensor of {x.dtype} {list(x.shape)} on {x.device}"


_TEXTS = _Texts()
