"""Between padded batches (BSHD) and packed rows (THD)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq.collate import IGNORE_INDEX, mask_boundary_labels
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
    for number, tensor in enumerate(tensors):
        if tensor.shape[:2] != tokens.shape:
            raise ValueError(
                f"tensors[{number}] must be [batch, seqlen, ...] with batch and seqlen as in the "
                f"layout's mask, {list(tokens.shape)}, got shape {list(tensor.shape)}"
            )
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
    for number, tensor in enumerate(tensors):
        if tensor.shape[:1] != slots.shape:
            raise ValueError(
                f"tensors[{number}] must be [total_tokens = {packed.total_tokens}, ...], got shape "
                f"{list(tensor.shape)}"
            )
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


def run_packed(
    model: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    segment_multiple: int | Sequence[int] = 1,
    total_multiple: int | Sequence[int] = 1,
    true_is_pad: bool = False,
    pad_to: int | None = None,
    **more: Any,
) -> Any:
    """Runs a model that takes packed rows on a padded batch, and gives back a padded batch.

    For callers that speak BSHD: no pad is computed with, real tokens get what the padded run would
    give them, gradients included.

    Args:
        model: called with `input_ids [1, total_tokens]`, `position_ids`, `packed` and `more`, as
            transformers' models with `attn_implementation="cuseq"` are.
        input_ids: `[batch, seqlen]`.
        attention_mask, segment_multiple, total_multiple, true_is_pad, pad_to: as for
            `PackedLayout.from_padding_mask`. Without `pad_to` a mask on a GPU makes it wait for
            the lengths.
        more: more of the model's arguments. Tensors must be `[batch, seqlen, ...]` and are packed;
            `labels` get -100 on pads and on the first token of each sequence, which no other one
            predicts (a batch padded on the left lets a pad predict it).

    Returns:
        What the model returns, with zeros on the padding: a tensor, the tensors `[1, total_tokens,
        ...]` of a tuple, or `logits`, `last_hidden_state` and `hidden_states` of a transformers'
        output are `[batch, seqlen, ...]`.
    """
    packed = PackedLayout.from_padding_mask(
        attention_mask,
        segment_multiple,
        total_multiple,
        true_is_pad=true_is_pad,
        pad_to=pad_to,
        device=input_ids.device,
    )
    tensors = {"input_ids": input_ids}
    tensors |= {name: value for name, value in more.items() if isinstance(value, Tensor)}
    fills = [IGNORE_INDEX if name == "labels" else 0 for name in tensors]
    rows = _as_tuple(pack(packed, *tensors.values(), fill=fills))
    more |= {name: row.unsqueeze(0) for name, row in zip(tensors, rows, strict=True)}
    if isinstance(more.get("labels"), Tensor):
        more["labels"] = mask_boundary_labels(more["labels"], packed)
    positions = packed.position_ids.long().unsqueeze(0)
    out = model(position_ids=positions, packed=packed, **more)
    if isinstance(out, (Tensor, tuple)):
        return _unpacked(packed, out)
    for name in ("logits", "last_hidden_state", "hidden_states"):
        if out.get(name) is not None:
            out[name] = _unpacked(packed, out[name])
    return out


def _unpacked(packed: PackedLayout, value: Any) -> Any:
    """Rows `[1, total_tokens, ...]` as a padded batch; what is none as it is."""
    if isinstance(value, tuple):
        return tuple(_unpacked(packed, item) for item in value)
    if isinstance(value, Tensor) and value.shape[:2] == (1, packed.total_tokens):
        return unpack(packed, value.squeeze(0))
    return value


def _as_tuple(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def equalize_tokens(
    packed: PackedLayout | None, group: torch.distributed.ProcessGroup | None = None
) -> PackedLayout | None:
    """The layout in a row as long as the longest of all ranks, which HybridEP and others need.

    One all-reduce of one integer. Where rows have a fixed total (`pad_to`), none is needed.

    Args:
        packed: this rank's layout; None is handed through, without a word to the others.
        group: whose ranks, default all. Over NCCL the number goes by the current GPU and comes
            back by a synchronisation; over gloo nothing touches a GPU.

    Returns:
        The layout with a longer tail; the same one where it is as long already.
    """
    if packed is None:
        return None
    backend = torch.distributed.get_backend(group)
    device = "cuda" if backend == "nccl" else "cpu"
    total = torch.tensor(packed.total_tokens, device=device)
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group)
    return packed.with_total_tokens(int(total.item()))
