"""Calls of attention before a training loop: they compile kernels and make plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cuseq import _C
from cuseq._base.arguments import check_flag, shown
from cuseq.attention import varlen_attention
from cuseq.attention.call import check_backend
from cuseq.layout import PackedLayout


def attention_warmup(
    packs: Iterable[Sequence[int]],
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
    for name, size in (("heads", heads), ("head_dim", head_dim), ("key_heads", key_heads),
                       ("value_dim", value_dim)):  # fmt: skip
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {shown(size)}")
    check_flag(causal, "causal")
    check_backend(backend)
    before, seen = _C.cudnn_plans(), set()
    for lengths in packs:
        if not lengths:
            continue
        tokens = sum(lengths) if total_tokens is None else total_tokens
        sizes = _C.cudnn_plan_sizes(len(lengths), max(lengths), tokens)
        if sizes in seen:
            continue
        seen.add(sizes)
        packed = PackedLayout.from_lengths(lengths, tokens, device=device)
        shapes = ((heads, head_dim), (key_heads, head_dim), (key_heads, value_dim))
        q, k, v = (
            torch.zeros(tokens, *shape, dtype=dtype, device=device, requires_grad=True)
            for shape in shapes
        )
        varlen_attention(q, k, v, packed, causal=causal, backend=backend).sum().backward()
    return _C.cudnn_plans() - before
