"""Cached tables of cosines and sines for rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from cuseq._base.arguments import (
    as_device,
    as_float,
    as_int,
    check_dtype,
    check_tensor,
    power_of_two,
)
from cuseq.cache import keeps, new_key, remember

_FIRST_ROWS = 1024
# The cache key of tables made from theta, which belong to no tensor.
_THETA = new_key()


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
    """Return cosines and sines of the angles of positions 0 to `length - 1`, for `apply_rope`.

    Angle i of position p is `p * inv_freq[i]`, multiplied in float32 as in transformers (in float64
    for a float64 table). For scaled variants (linear, dynamic NTK, YaRN, Llama 3, LongRoPE) pass
    the `inv_freq` and `attention_factor` that transformers' `ROPE_INIT_FUNCTIONS` return.

    The identity cache keeps the most recently used tables, with more rows than requested (the next
    power of two, at least 1,024). They are shared and must not be edited. Tables of `inv_freq` are
    dropped with that tensor. After a write to it that the version counter does not see
    (`.data.copy_`), call `cuseq.cache.invalidate(inv_freq)`.

    Args:
        length: number of positions.
        rotary_dim: number of elements of a head that are rotated, even.
        theta: base of the frequencies `theta ** (-2 i / rotary_dim)`, computed in float64.
        inv_freq: `[rotary_dim / 2]`, radians per token, used instead of `theta`; any device.
        attention_factor: factor of both tables (YaRN, LongRoPE).
        dtype: float32, float64, bfloat16 or float16.
        device: default the device of `inv_freq`, else torch's default device.

    Returns:
        `(cos, sin)`, each `[length, rotary_dim / 2]`.

    Raises:
        ValueError, TypeError: a size is negative or odd, `theta` is not above 0, `inv_freq` has
            another shape or requires grad, or `dtype` is not one of the four.

    Never synchronises, unless `inv_freq` has to be copied to another device.

    Examples:
        >>> cos, sin = cuseq.rope_table(4096, 128, theta=1e6)
        >>> cos.shape
        torch.Size([4096, 64])
    """
    if not torch.compiler.is_compiling():  # in a traced graph they may be symbols
        length, rotary_dim = as_int(length, "length"), as_int(rotary_dim, "rotary_dim")
        theta = theta if inv_freq is not None else as_float(theta, "theta")
        attention_factor = as_float(attention_factor, "attention_factor")
        device = None if device is None else as_device(device, "device")
        for name, value in (("length", length), ("rotary_dim", rotary_dim)):
            if value >= 2**31:
                raise ValueError(f"{name} must be at most 2^31 - 1, got {value}")
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
    check_dtype(dtype, "dtype")
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
    if inv_freq is not None and _is_differentiated(inv_freq):
        raise ValueError("inv_freq must not require grad, since tables have no gradient: detach it")
    if device is None and inv_freq is not None:
        device = inv_freq.device
    if torch.compiler.is_compiling():  # the cache must not hold a graph's tensors
        return _make(length, rotary_dim, theta, inv_freq, attention_factor, dtype, device)
    if device is None:
        device = torch.get_default_device()
    key = _THETA if inv_freq is None else inv_freq
    make = (rotary_dim, theta, inv_freq, attention_factor, dtype, device)
    if not keeps(key, device):
        return _make(length, *make)
    rows = power_of_two(length, _FIRST_ROWS)
    cos, sin = remember(
        key,
        "rope_table",
        lambda: _make(rows, *make),
        rotary_dim,
        theta if inv_freq is None else None,
        attention_factor,
        dtype,
        rows,
        device=device,
        outlives_scopes=True,
    )
    return cos[:length], sin[:length]


def _is_differentiated(tensor: Tensor) -> bool:
    """Return whether a derivative in reverse or in forward mode is wanted."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return not torch.compiler.is_compiling() and unpack_dual(tensor).tangent is not None


def _make(
    length: int,
    rotary_dim: int,
    theta: float,
    inv_freq: Tensor | None,
    attention_factor: float,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if inv_freq is None:
        # Computed in float64 and rounded once, because float32 powers differ between devices.
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
        inv_freq = (theta ** (-exponents / rotary_dim)).to(wide)
    else:
        # A copy to the host must block, because its reader cannot know when the data has arrived.
        to_device = device is not None and torch.device(device).type != "cpu"
        inv_freq = inv_freq.detach().to(device=device, dtype=wide, non_blocking=to_device)
    positions = torch.arange(length, dtype=torch.int64, device=inv_freq.device).to(wide)
    angles = torch.outer(positions, inv_freq)
    return (
        (angles.cos() * attention_factor).to(dtype),
        (angles.sin() * attention_factor).to(dtype),
    )
