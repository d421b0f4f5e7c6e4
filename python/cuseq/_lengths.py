"""Lengths of samples on the host, as the packing ops read them."""

from __future__ import annotations

import sys
import warnings
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy

_KEPT = (torch.int32, torch.int64)
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
_WIDE = (torch.uint32, torch.uint64)


def host_lengths(lengths: Iterable[int] | numpy.ndarray | Tensor) -> Tensor:
    """Lengths as an int32 or int64 tensor; what has that type already is shared, not copied."""
    if isinstance(lengths, Tensor):
        values = lengths
    elif _is_array(lengths):
        values = _from_array(lengths)
    else:
        values = _from_ints(lengths)
    if values.device.type != "cpu":
        raise ValueError(
            f"lengths must lie on the CPU, where rows are planned, got {values.device}: keep the "
            "lengths that the dataset knows, or copy them with .cpu()"
        )
    if values.dtype not in (*_KEPT, *_NARROW, *_WIDE):
        raise TypeError(f"lengths must be integers, got {values.dtype}")
    if values.dim() != 1:
        raise ValueError(f"lengths must have one dimension, got shape {tuple(values.shape)}")
    if values.dtype in _KEPT:
        return values.detach()
    converted = values.to(torch.int32 if values.dtype in _NARROW else torch.int64)
    if values.dtype == torch.uint64 and bool((converted < 0).any()):
        raise ValueError("lengths must fit in int64, but some of these uint64 do not")
    return converted


def _is_array(lengths: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(lengths, numpy.ndarray)


def _from_array(lengths: numpy.ndarray) -> Tensor:
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"lengths must be integers, got an array of {lengths.dtype}")
    if not lengths.flags.c_contiguous or not lengths.dtype.isnative:
        lengths = lengths.astype(lengths.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # A tensor cannot say that it must not be written to; these are only read.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(lengths)


def _from_ints(lengths: Iterable[int]) -> Tensor:
    try:
        if isinstance(lengths, (str, bytes, bytearray)):
            raise TypeError(f"a {type(lengths).__name__} is no list of lengths")
        values = array("q", lengths)  # refuses what int() would cut off
    except OverflowError as error:
        raise ValueError("lengths must fit in int64, but some of these ints do not") from error
    except TypeError as error:
        got = repr(lengths)
        got = got if len(got) <= 80 else f"{got[:80]}..."
        raise TypeError(
            f"lengths must be ints, an integer array or an integer tensor, got {got}"
        ) from error
    if len(values) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(values, dtype=torch.int64)
