"""Calls of attention before a training loop: they compile kernels and make plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cuseq import _C
from cuseq._base.arguments import as_device, as_int, check_dtype, check_flag, shown
from cuseq.attention import varlen_attention
from cuseq.attention.call import check_backend
from cuseq.layout import PackedLayout

_MOST = 65536  # heads, and numbers of a head
_SHAPES = (("heads", "head_dim"), ("key_heads", "head_dim"), ("key_heads", "value_dim"))


def attention_warmup(
    packs: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    *,
    heads: int,
    head_dim: int,
    key_heads: int | None = None,
    value_dim: int | None = None,
    total_tokens: int | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    backend: str = "auto",
) -> int:
    """Run attention forward and backward for packs like those that a training run will have.

    cuDNN makes a plan for each rounded number of sequences, longest length and number of tokens,
    which takes about 0.1 s; FlashAttention 4 and flex attention compile kernels for seconds. This
    makes the calls that do so, one for each plan that the packs share, instead of the first steps.
    Plans belong to the thread that trains and to autograd's: call it in the thread that trains. A
    plan also counts the strides of q, k and v, which are contiguous here: a model that passes parts
    of one fused projection makes its own plans as they come.

    Args:
        packs: the lengths of each pack, as a sampler or a collator plans them. Lengths alone are
            read; equal plans are made once, so a whole epoch may be given.
        heads, key_heads: query heads and key-value heads of the calls, default as many as `heads`.
        head_dim, value_dim: numbers of a head of q and k, and of v, default `head_dim`.
        total_tokens: tokens of a row, default the sum of its lengths.
        causal: whether the calls are causal.
        dtype: dtype of q, k and v.
        device: device of the calls.
        backend: as in `varlen_attention`.

    Returns:
        The number of plans that cuDNN has made for it; 0 where another backend takes the calls.
        `cuseq.cache.info()["cudnn_plan"]` counts all.

    Raises:
        ValueError, TypeError: a number is below 1, lengths do not fit `total_tokens`, or no backend
            takes the call.

    Synchronises.

    Examples:
        >>> cuseq.attention_warmup([[3, 5], [8]], heads=2, head_dim=16, device="cpu",
        ...                        dtype=torch.float32)
        0
    """
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        sizes[name] = as_int(size, name, 1)
        if sizes[name] > _MOST:
            raise ValueError(f"{name} must be at most {_MOST}, got {sizes[name]}")
    check_flag(causal, "causal")
    check_dtype(dtype, "dtype")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating point, got {dtype}")
    device = as_device(device, "device")
    if device.type == "meta":
        raise ValueError("device must be one that computes, got meta")
    check_backend(backend)
    before, seen = _C.cudnn_plans(), set()
    for packed in _layouts(packs, total_tokens):
        plan = (packed.num_sequences, packed.max_seqlen, packed.total_tokens)
        if 0 in plan or _C.cudnn_plan_sizes(*plan) in seen:
            continue
        seen.add(_C.cudnn_plan_sizes(*plan))
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (
                torch.zeros(
                    packed.total_tokens, sizes[of_heads], sizes[dim], dtype=dtype, device=device,
                    requires_grad=True,
                )
                for of_heads, dim in _SHAPES
            )  # fmt: skip
            out = varlen_attention(q, k, v, packed.to(device), causal=causal, backend=backend)
            out.sum().backward()
    return _C.cudnn_plans() - before


def _layouts(packs: Any, total_tokens: int | None) -> Iterator[PackedLayout]:
    """Yield the layouts of packs on the CPU, or raise with the number of the pack that is wrong."""
    if isinstance(packs, (str, bytes, dict)) or not isinstance(packs, (Sequence, Iterator)):
        raise TypeError(f"packs must be a list of the lengths of packs, got {shown(packs)}")
    for number, pack in enumerate(packs):
        try:
            yield PackedLayout.from_lengths(pack, total_tokens)
        except (TypeError, ValueError) as error:
            raise type(error)(f"packs[{number}]: {error}") from None
