"""Tables of cosines and sines, made once and kept."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cuseq._arguments import as_int, check_tensor

_KEPT = 8
_FIRST_ROWS = 1024


def rope_table(
    length: int,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    inv_freq: Tensor | None = None,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of the positions 0 to `length - 1`, for `apply_rope`.

    Angle i of position p is `p * inv_freq[i]`, multiplied in float32 as transformers does (float64
    for a float64 table). Scaled variants (linear, dynamic NTK, YaRN, Llama 3, LongRoPE) come in by
    `inv_freq` and `attention_factor`, which transformers' `ROPE_INIT_FUNCTIONS` return.

    The last few tables are kept and shared, with more rows than were asked for (the next power of
    two, at least 1,024): do not edit them. `cache_stats()` counts them. `clear_cache()` frees them,
    as is needed after a write to `inv_freq` that the version counter cannot see (`.data.copy_`).

    Args:
        length: positions.
        rotary_dim: elements of a head that turn, even.
        theta: base of the frequencies `theta ** (-2 i / rotary_dim)`, computed in float64.
        inv_freq: `[rotary_dim / 2]`, radians a token, instead of those of `theta`; any device.
        attention_factor: factor of both tables (YaRN, LongRoPE).
        dtype: float32, float64, bfloat16 or float16.
        device: default that of `inv_freq`, else torch's default device.

    Returns:
        `(cos, sin)`, each `[length, rotary_dim / 2]`.

    Raises:
        ValueError, TypeError: a size is negative or odd, `theta` is not above 0, `inv_freq` has
            another shape or requires grad, or `dtype` is another.

    Never synchronises, unless `inv_freq` has to come to another device.

    Example:
        >>> cos, sin = cuseq.rope_table(4096, 128, theta=1e6, device="cuda")
    """
    if not torch.compiler.is_compiling():  # where they may be symbols
        length, rotary_dim = as_int(length, "length"), as_int(rotary_dim, "rotary_dim")
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if rotary_dim <= 0 or rotary_dim % 2 != 0:
        raise ValueError(f"rotary_dim must be positive and even, got {rotary_dim}")
    if inv_freq is not None:
        check_tensor(inv_freq, "inv_freq")
    if inv_freq is not None and inv_freq.shape != (rotary_dim // 2,):
        raise ValueError(
            f"inv_freq must have shape [rotary_dim / 2 = {rotary_dim // 2}], "
            f"got {list(inv_freq.shape)}"
        )
    if inv_freq is None and not 0 < theta < float("inf"):
        raise ValueError(f"theta must be a finite number above 0, got {theta}")
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
    if inv_freq is not None and inv_freq.requires_grad and torch.is_grad_enabled():
        raise ValueError("inv_freq must not require grad, a table takes no gradient: detach it")
    if device is None and inv_freq is not None:
        device = inv_freq.device
    if torch.compiler.is_compiling():  # in a graph of its own making nothing may be kept
        return _make(length, rotary_dim, theta, inv_freq, attention_factor, dtype, device)
    if device is None:
        device = torch.get_default_device()
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    make = (rotary_dim, theta, inv_freq, attention_factor, dtype, target)
    if not _may_keep(target, inv_freq):
        return _make(length, *make)
    key = (
        rotary_dim,
        theta if inv_freq is None else None,
        None if inv_freq is None else id(inv_freq),
        attention_factor,
        dtype,
        target,
    )
    found = _tables.find(key, length, inv_freq)
    if found is None:
        rows = max(_FIRST_ROWS, 1 << max(0, length - 1).bit_length())
        found = _Table(*_make(rows, *make), inv_freq)
        _tables.keep(key, found)
    return found.cos[:length], found.sin[:length]


def _make(
    length: int,
    rotary_dim: int,
    theta: float,
    inv_freq: Tensor | None,
    attention_factor: float,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if inv_freq is None:
        # Rounded once, from float64: powers in float32 differ from device to device.
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
        inv_freq = (theta ** (-exponents / rotary_dim)).to(wide)
    else:
        # To the host a copy has to wait: its reader could not know when the data is there.
        to_device = torch.device(device).type != "cpu"
        inv_freq = inv_freq.detach().to(device=device, dtype=wide, non_blocking=to_device)
    positions = torch.arange(length, dtype=torch.int64, device=inv_freq.device).to(wide)
    angles = torch.outer(positions, inv_freq)
    return (
        (angles.cos() * attention_factor).to(dtype),
        (angles.sin() * attention_factor).to(dtype),
    )


def _may_keep(device: torch.device, inv_freq: Tensor | None) -> bool:
    """Whether a table made now may serve others, as the identity cache asks of its values."""
    traced = _get_current_dispatch_mode() is not None or torch._C._functorch.maybe_current_level()
    data = inv_freq is None or (type(inv_freq) in (Tensor, torch.nn.Parameter, torch.nn.Buffer))
    return (
        not traced
        and data
        and device.type != "meta"
        and not torch.is_inference_mode_enabled()
        and (inv_freq is None or not inv_freq.is_inference())
        and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _identity(inv_freq: Tensor) -> tuple[Any, ...]:
    """Besides the object: edits in place, and `.data = other`, which has a version of its own."""
    return inv_freq._version, inv_freq.data_ptr(), inv_freq.dtype, inv_freq.device


class _Table:
    def __init__(self, cos: Tensor, sin: Tensor, inv_freq: Tensor | None):
        self.cos, self.sin = cos, sin
        self._versions = (cos._version, sin._version)
        self._inv_freq = None if inv_freq is None else weakref.ref(inv_freq)
        self._inv_freq_is = None if inv_freq is None else _identity(inv_freq)
        self._made_on: Any = None
        self._made: Any = None
        if cos.is_cuda:
            self._made_on = torch.cuda.current_stream(cos.device)
            self._made = self._made_on.record_event()

    @property
    def bytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def serves(self, length: int, inv_freq: Tensor | None) -> bool:
        same = inv_freq is None or (
            self._inv_freq() is inv_freq and self._inv_freq_is == _identity(inv_freq)
        )
        unedited = self._versions == (self.cos._version, self.sin._version)
        return same and unedited and length <= self.cos.shape[0]

    def use_here(self) -> None:
        """Orders the current stream behind the table's making."""
        if self._made is None:
            return
        stream = torch.cuda.current_stream(self.cos.device)
        if stream != self._made_on:
            stream.wait_event(self._made)
            self.cos.record_stream(stream)
            self.sin.record_stream(stream)


class _Tables:
    """The tables used last. One that does not serve any more is replaced by the one made next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, _Table] = OrderedDict()

    def find(self, key: Any, length: int, inv_freq: Tensor | None) -> _Table | None:
        with self._lock:
            table = self._kept.get(key)
            if table is None or not table.serves(length, inv_freq):
                return None
            self._kept.move_to_end(key)
        table.use_here()
        return table

    def keep(self, key: Any, table: _Table) -> None:
        dropped = []  # outside the lock
        with self._lock:
            dropped.append(self._kept.pop(key, None))
            self._kept[key] = table
            while len(self._kept) > _KEPT:
                dropped.append(self._kept.popitem(last=False))

    def clear(self) -> None:
        with self._lock:
            dropped, self._kept = self._kept, OrderedDict()
        del dropped

    def held(self) -> tuple[int, int]:
        """How many tables there are, and their bytes."""
        with self._lock:
            return len(self._kept), sum(table.bytes for table in self._kept.values())


_tables = _Tables()
clear_tables = _tables.clear
tables_held = _tables.held
