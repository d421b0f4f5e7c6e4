"""Conversion of sample lengths to the host tensors that the planning functions read."""

from __future__ import annotations

import sys
import warnings
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from cuseq._base.arguments import as_int64s, check_tensor, shown

if TYPE_CHECKING:
    import numpy

_KEPT = (torch.int32, torch.int64)
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
_WIDE = (torch.uint32, torch.uint64)


def host_lengths(lengths: Iterable[int] | numpy.ndarray | Tensor, name: str = "lengths") -> Tensor:
    """Return lengths as an int32 or int64 tensor, without a copy if they have such a type.

    Args:
        name: what messages call them.
    """
    if isinstance(lengths, Tensor):
        check_tensor(lengths, name)
        values = lengths
    elif is_array(lengths):
        values = _from_array(lengths, name)
    else:
        values = _from_ints(lengths, name)
    if values.device.type != "cpu":
        raise ValueError(
            f"{name} must lie on the CPU, where rows are planned, got {values.device}: keep the "
            "lengths that the dataset knows, or copy them with .cpu()"
        )
    if values.dtype not in (*_KEPT, *_NARROW, *_WIDE):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    if values.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(values.shape)}")
    if values.dtype in _KEPT:
        return values.detach()
    converted = values.to(torch.int32 if values.dtype in _NARROW else torch.int64)
    if values.dtype == torch.uint64 and bool((converted < 0).any()):
        first = int((converted < 0).int().argmax())
        raise ValueError(f"{name} must fit in int64, got {name}[{first}] = {values[first]}")
    return converted


def is_array(values: object) -> TypeGuard[numpy.ndarray]:
    """Return whether `values` is a NumPy array; NumPy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(values, numpy.ndarray)


def _from_array(lengths: numpy.ndarray, name: str) -> Tensor:
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got an array of {lengths.dtype}")
    return array_as_tensor(lengths)


def array_as_tensor(values: numpy.ndarray) -> Tensor:
    """Return a read-only tensor that shares the array's memory where PyTorch can.

    Arrays that are not contiguous or not in native byte order are copied.
    """
    if not values.flags.c_contiguous or not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="), order="C")
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():  # tensors have no read-only flag, so PyTorch warns
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(values)


def _from_ints(lengths: Iterable[int], name: str) -> Tensor:
    try:
        if isinstance(lengths, (str, bytes, bytearray)):
            raise TypeError(f"a {type(lengths).__name__} is not a list of lengths")
        return as_int64s(lengths)
    except OverflowError as error:
        raise ValueError(f"{name} must fit in int64, got {_first_wrong(lengths, name)}") from error
    except TypeError as error:
        raise TypeError(
            f"{name} must be ints, an integer array or an integer tensor, got "
            f"{_first_wrong(lengths, name)}"
        ) from error


def _first_wrong(lengths: Any, name: str) -> str:
    """Describe the first length that is not a 64-bit int, or else the whole argument."""
    if isinstance(lengths, Sequence) and not isinstance(lengths, (str, bytes, bytearray)):
        for number, length in enumerate(lengths):
            try:
                array("q", [length])
            except (TypeError, OverflowError):
                return f"{name}[{number}] = {shown(length)}"
    return shown(lengths)
