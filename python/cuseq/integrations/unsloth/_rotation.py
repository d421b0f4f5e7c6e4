"""RoPE for queries and keys, with and without their norm, under unsloth's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.arguments import check_tensor
from cuseq._base.models import eps_of
from cuseq.rope import apply_qk_norm_rope, apply_rope


def fast_rope_embedding(
    Q: Tensor,
    K: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_embedding_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key, both in one kernel (`cuseq.apply_rope`).

    Args:
        Q, K: `[batch, heads, seqlen, head_dim]`, any strides; never written to.
        cos, sin: tables `[positions, head_dim]`, with any leading dimensions of size 1.
        rope_embedding_indices: `batch * seqlen` or `seqlen` integer positions in any shape; None
            counts positions from 0.

    Returns:
        The rotated query and key, with the same order of dimensions in memory.

    Raises:
        TypeError: an argument is not a tensor, or positions are not integers.
        ValueError: Q or K does not have four dimensions, or the number of positions does not fit.

    Never synchronises, except to copy positions from another device.

    Examples:
        >>> from cuseq.integrations.unsloth import fast_rope_embedding
        >>> heads = torch.randn(1, 2, 5, 8)
        >>> cos, sin = torch.ones(16, 8), torch.zeros(16, 8)
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> q, k = fast_rope_embedding(heads, heads, cos, sin, positions)
        >>> torch.equal(q, heads)
        True
    """
    _check_heads(Q, "Q")
    _check_heads(K, "K")
    tables = _table(cos, "cos"), _table(sin, "sin")
    positions = _positions(
        rope_embedding_indices, "rope_embedding_indices", Q.shape[0], Q.shape[2], Q.device
    )
    options: dict[str, Any] = {"position_ids": positions, "qkv_format": "bhsd"}
    if Q.dtype == K.dtype:
        return apply_rope(Q, K, *tables, **options)
    # DoRA on only some projections makes Q and K differ in dtype: its outputs are float32.
    return tuple(apply_rope(heads, None, *tables, **options)[0] for heads in (Q, K))


def fast_qk_norm_rope(
    q_norm: nn.Module,
    k_norm: nn.Module,
    Q: Tensor,
    K: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate query and key in one kernel, with frozen or trained norm weights.

    Args:
        q_norm, k_norm: per-head RMS norms, with `weight` `[head_dim]` and `variance_epsilon` or
            `eps`.
        Q, K: `[batch, seqlen, heads, head_dim]`, any strides; never written to.
        cos, sin, position_ids: as for `fast_rope_embedding`.

    Returns:
        The normalised and rotated query and key, `[batch, heads, seqlen, head_dim]`.

    Raises:
        TypeError: an argument is not a tensor, positions are not integers, or a norm has no
            epsilon.
        ValueError: as for `fast_rope_embedding`.

    Never synchronises, except to copy positions from another device.

    Examples:
        >>> from cuseq.integrations.unsloth import fast_qk_norm_rope
        >>> norm, heads = torch.nn.RMSNorm(8, eps=1e-6), torch.randn(1, 5, 2, 8)
        >>> q, k = fast_qk_norm_rope(norm, norm, heads, heads, torch.ones(5, 8), torch.zeros(5, 8))
        >>> tuple(q.shape)
        (1, 2, 5, 8)
    """
    _check_heads(Q, "Q")
    _check_heads(K, "K")
    positions = _positions(position_ids, "position_ids", *Q.shape[:2], Q.device)
    options: dict[str, Any] = {"position_ids": positions, "qkv_format": "bshd"}
    tables = _table(cos, "cos"), _table(sin, "sin")
    weights = _weight(q_norm, "q_norm"), _weight(k_norm, "k_norm")
    eps = _eps(q_norm, "q_norm"), _eps(k_norm, "k_norm")
    if eps[0] == eps[1] and weights[0].dtype == weights[1].dtype and Q.dtype == K.dtype:
        Q, K = apply_qk_norm_rope(Q, K, *weights, *tables, eps=eps[0], **options)
    else:  # one kernel call supports only one eps, weight dtype and input dtype
        Q, _ = apply_qk_norm_rope(Q, None, weights[0], None, *tables, eps=eps[0], **options)
        K, _ = apply_qk_norm_rope(K, None, weights[1], None, *tables, eps=eps[1], **options)
    return Q.transpose(1, 2), K.transpose(1, 2)


def _check_heads(heads: Tensor, name: str) -> None:
    check_tensor(heads, name)
    if heads.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(heads.shape)}")


def _positions(
    position_ids: Tensor | None, name: str, batch: int, seqlen: int, device: torch.device
) -> Tensor | None:
    if position_ids is None:
        return None
    check_tensor(position_ids, name)
    dtype, count = position_ids.dtype, position_ids.numel()
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise TypeError(f"{name} must be integers, got {dtype}")
    if count != seqlen and count != batch * seqlen:
        raise ValueError(
            f"{name} must hold {seqlen} positions for all rows, or {batch} times {seqlen}, got "
            f"shape {tuple(position_ids.shape)}"
        )
    if dtype not in (torch.int32, torch.int64):
        position_ids = position_ids.int()
    return position_ids.reshape(1 if count == seqlen else batch, seqlen).to(device)


def _table(angles: Tensor, name: str) -> Tensor:
    check_tensor(angles, name)
    if angles.dim() == 0:
        raise ValueError(
            f"{name} must be a table [positions, head_dim], got shape {tuple(angles.shape)}"
        )
    return angles.unsqueeze(0) if angles.dim() == 1 else angles.flatten(0, -2)


def _weight(norm: nn.Module, name: str) -> Tensor:
    weight = getattr(norm, "weight", None)
    check_tensor(weight, f"{name}.weight")
    return weight


def _eps(norm: nn.Module, name: str) -> float:
    eps = eps_of(norm)
    if eps is None:
        raise TypeError(f"{name} must have variance_epsilon or eps, got {type(norm).__name__}")
    return eps
