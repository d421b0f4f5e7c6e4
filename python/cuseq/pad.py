"""Between padded batches (BSHD) and packed rows (THD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuseq.layout import PackedLayout

_ops = torch.ops.cuseq

Fill = bool | int | float | complex


def pack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Tensors of a padded batch as packed rows, all in one launch.

    Args:
        packed: the layout of the batch's mask; None hands everything through.
        tensors: `[batch, seqlen, ...]` of any dtype and trailing shape, contiguous in the last
            dimension, other strides as they are.
        fill: what pads and tail get, one for all or one for each tensor: -100 for labels.

    Returns:
        One tensor for one, a tuple for several, each `[total_tokens, ...]`. Differentiable: the
        gradient is `unpack` of the gradient. Never synchronises.

    Raises:
        ValueError, TypeError: shapes, strides, devices or fills do not fit.
    """
    if packed is None:
        return _one_or_all(tensors)
    slots, tokens = packed._batch_rows()
    packed_tensors = _ops.gather_rows(
        tensors, slots, tokens.view(-1), [packed.total_tokens], 2, _fills(fill, len(tensors))
    )
    return _one_or_all(packed_tensors)


def unpack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Packed rows `[total_tokens, ...]` as tensors of the padded batch, the inverse of `pack`.

    Args:
        fill: what the padding of the batch gets.
        packed, tensors: as for `pack`.

    Returns:
        `[batch, seqlen, ...]` each; otherwise as `pack`.
    """
    if packed is None:
        return _one_or_all(tensors)
    slots, tokens = packed._batch_rows()
    padded = _ops.gather_rows(
        tensors, tokens.view(-1), slots, list(tokens.shape), 1, _fills(fill, len(tensors))
    )
    return _one_or_all(padded)


def _fills(fill: Fill | Sequence[Fill], count: int) -> list[Fill]:
    fills = list(fill) if isinstance(fill, Sequence) else [fill] * count
    if len(fills) != count:
        raise ValueError(f"fill must be one number or one for each of {count} tensors, got {fill}")
    return fills


def _one_or_all(tensors: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
