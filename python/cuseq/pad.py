"""Between padded batches (BSHD) and packed rows (THD)."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from cuseq._arguments import as_int, check_tensor, shown
from cuseq._build_layout import common_multiple
from cuseq._models import text_config
from cuseq.data.collator import IGNORE_INDEX, mask_boundary_labels
from cuseq.layout import PackedLayout, check_layout

_ops = torch.ops.cuseq

Fill = bool | int | float | complex


def pack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Pack tensors of a padded batch into rows without padding, all in one launch.

    Args:
        packed: the layout of the batch's mask; None hands everything through.
        tensors: `[batch, seqlen, ...]` of any dtype and trailing shape, contiguous in the last
            dimension, other strides as they are. Or `[planes, batch, seqlen]`, the position ids of
            multimodal models (M-RoPE); what fits both ways is a batch.
        fill: what pads and tail get, one for all or one for each tensor: -100 for labels.

    Returns:
        One tensor for one, a tuple for several, each `[total_tokens, ...]`, or `[planes,
        total_tokens]`. Differentiable: the gradient is `unpack` of the gradient. Never
        synchronises.

    Raises:
        ValueError: shapes, strides, devices or the number of fills do not fit, or a tensor on meta
            has no values.
        TypeError: an argument is of another kind.

    Example:
        >>> packed = cuseq.PackedLayout.from_padding_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> cuseq.pack(packed, torch.tensor([[5, 6, 0], [7, 8, 9]]))
        tensor([5, 6, 7, 8, 9])
    """
    if packed is None:
        return one_or_all(tensors)
    check_layout(packed)
    names = [f"tensors[{number}]" for number in range(len(tensors))]
    return one_or_all(_packed(packed, names, tensors, _fills(fill, tensors)))


def _packed(
    packed: PackedLayout, names: Sequence[str], tensors: Sequence[Tensor], fills: list[Fill]
) -> Sequence[Tensor]:
    slots, tokens = packed.batch_rows()
    rows: list[Tensor] = []  # of every batch; planes are several
    row_fills: list[Fill] = []
    planes = []
    for name, tensor, fill in zip(names, tensors, fills, strict=True):
        check_tensor(tensor, name)
        has_planes = _has_planes(name, tensor, tokens.shape)
        if not has_planes and tensor.shape[:2] != tokens.shape:
            raise ValueError(
                f"{name} must be [batch, seqlen, ...] with batch and seqlen as in the layout's "
                f"mask, {list(tokens.shape)}, or [planes, batch, seqlen], got shape "
                f"{list(tensor.shape)}"
            )
        own = list(tensor) if has_planes else [tensor]
        planes.append(len(own) if has_planes else None)
        rows += own
        row_fills += [fill] * len(own)
    moved = iter(
        _ops.gather_rows(rows, slots, tokens.view(-1), [packed.total_tokens], 2, row_fills)
    )
    return [
        next(moved) if count is None else torch.stack([next(moved) for _ in range(count)])
        for count in planes
    ]


def _has_planes(name: str, tensor: Tensor, batch: torch.Size) -> bool:
    """Return whether it is [planes, batch, seqlen]; only position ids are that before a batch."""
    if tensor.dim() != 3 or tensor.shape[1:] != batch or tensor.shape[0] == 0:
        return False
    return name == "position_ids" or tensor.shape[:2] != batch


def unpack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Unpack rows `[total_tokens, ...]` into tensors of the padded batch, the inverse of `pack`.

    Args:
        packed: as for `pack`.
        tensors: `[total_tokens, ...]` of any dtype and trailing shape.
        fill: what the padding of the batch gets.

    Returns:
        `[batch, seqlen, ...]` each; otherwise as `pack`.

    Raises:
        ValueError, TypeError: as `pack`.

    Example:
        >>> packed = cuseq.PackedLayout.from_padding_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> cuseq.unpack(packed, torch.tensor([5, 6, 7, 8, 9]), fill=-1)
        tensor([[ 5,  6, -1],
                [ 7,  8,  9]])
    """
    if packed is None:
        return one_or_all(tensors)
    check_layout(packed)
    slots, tokens = packed.batch_rows()
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensors[{number}]")
        if tensor.shape[:1] != slots.shape:
            raise ValueError(
                f"tensors[{number}] must be [total_tokens = {packed.total_tokens}, ...], got shape "
                f"{list(tensor.shape)}"
            )
    padded = _ops.gather_rows(
        tensors, tokens.view(-1), slots, list(tokens.shape), 1, _fills(fill, tensors)
    )
    return one_or_all(padded)


def _fills(fill: Fill | Sequence[Fill], tensors: Sequence[Tensor]) -> list[Fill]:
    fills = list(fill) if isinstance(fill, Sequence) else [fill] * len(tensors)
    if len(fills) != len(tensors):
        raise ValueError(
            f"fill must be one number or one for each of {len(tensors)} tensors, got {fill}"
        )
    return [_number(value) for value in fills]


def _number(value: Any) -> Fill:
    """One of Python's own: NumPy's scalars and tensors of one element stand for one."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError) as error:  # more elements than one
        raise TypeError(f"fill must be numbers, got {value!r}") from error
    if not isinstance(number, (bool, int, float, complex)):
        raise TypeError(f"fill must be numbers, got {value!r}")
    return as_int(number, "fill") if type(number) is int else number


def one_or_all(tensors: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def run_packed(
    model: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_multiple: int | Sequence[int] = 1,
    total_multiple: int | Sequence[int] = 1,
    true_is_pad: bool = False,
    total_tokens: int | None = None,
    **more: Any,
) -> Any:
    """Run a model that takes packed rows on a padded batch, and return a padded batch.

    For callers that speak BSHD: no pad is computed with, real tokens get what the padded run would
    give them, gradients included.

    Args:
        model: called with `input_ids [1, total_tokens]`, `position_ids`, `packed` and `more`, as
            transformers' models with `attn_implementation="cuseq"` are.
        input_ids: `[batch, seqlen]`.
        attention_mask: as for `PackedLayout.from_padding_mask`; `[1, 1, seqlen, seqlen]` is that of
            every row. Without a mask (None) the model is called with the batch as it is.
        segment_multiple, total_multiple, true_is_pad, total_tokens: as for
            `PackedLayout.from_padding_mask`. Without `total_tokens` a mask on a GPU makes it wait
            for the lengths.
        more: more of the model's arguments. Tensors must be `[batch, seqlen, ...]` and are packed,
            `position_ids` too, which may be M-RoPE's `[planes, batch, seqlen]` and are then handed
            on as `[planes, 1, total_tokens]`. Names that end in "labels" get -100 on pads. `labels`
            themselves get it on the first token of each sequence too, which no other one predicts
            (a batch padded on the left lets a pad predict it).

    Returns:
        What the model returns, with zeros on the padding: a tensor, the tensors `[1, total_tokens,
        ...]` of a tuple or list, or `logits`, `last_hidden_state` and `hidden_states` of a
        transformers' output are `[batch, seqlen, ...]`.

    Raises:
        ValueError: an argument does not fit; a model of transformers has another attention, which
            would let documents see each other; or an output that would be unpacked has not as many
            tokens as the row (`logits_to_keep`).
        TypeError: the model returns something else.

    Example:
        >>> def model(input_ids, position_ids, packed):  # takes a packed row
        ...     return input_ids * 10 + position_ids
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> cuseq.run_packed(model, torch.tensor([[5, 6, 0], [7, 8, 9]]), mask)
        tensor([[50, 61,  0],
                [70, 81, 92]])
    """
    if not callable(model):
        raise TypeError(f"model must be callable, got {shown(model)}")
    check_tensor(input_ids, "input_ids")
    if input_ids.dim() < 2:
        raise ValueError(f"input_ids must be [batch, seqlen], got shape {list(input_ids.shape)}")
    if attention_mask is None:
        return model(input_ids=input_ids, **more)
    _check_takes_rows(model, more)
    attention_mask = _mask_of_batch(attention_mask, input_ids)
    packed = PackedLayout.from_padding_mask(
        attention_mask,
        segment_multiple,
        total_multiple,
        true_is_pad=true_is_pad,
        total_tokens=total_tokens,
        device=input_ids.device,
    )
    if packed.total_tokens == 0:  # models want a token
        segment = common_multiple(segment_multiple, "segment_multiple")
        total = common_multiple(total_multiple, "total_multiple")
        packed = packed.with_total_tokens(lcm(segment, total))
    tensors = {"input_ids": input_ids}
    tensors |= {name: value for name, value in more.items() if isinstance(value, Tensor)}
    fills = [IGNORE_INDEX if name.endswith("labels") else 0 for name in tensors]
    rows = _packed(packed, list(tensors), list(tensors.values()), fills)
    batch = input_ids.shape[:2]
    for (name, tensor), row in zip(tensors.items(), rows, strict=True):
        more[name] = row.unsqueeze(1 if _has_planes(name, tensor, batch) else 0)
    if isinstance(more.get("labels"), Tensor):
        more["labels"] = mask_boundary_labels(more["labels"], packed)
    if more.get("position_ids") is None:
        more["position_ids"] = packed.position_ids.long().unsqueeze(0)
    out = model(packed=packed, **more)
    if isinstance(out, Tensor):
        return _unpacked(packed, "the output", out)
    if isinstance(out, (tuple, list)):
        return _unpacked_items(packed, out)
    if not isinstance(out, MutableMapping):
        raise TypeError(
            "the model must return a tensor, a tuple, a list or a mapping of outputs, got "
            f"{type(out).__name__}"
        )
    for name in ("logits", "last_hidden_state"):
        if out.get(name) is not None:
            out[name] = _unpacked(packed, name, out[name])
    if out.get("hidden_states") is not None:
        out["hidden_states"] = _unpacked_items(packed, out["hidden_states"])
    return out


def _mask_of_batch(mask: Tensor, input_ids: Tensor) -> Tensor:
    """Return the mask with a row for each of the batch, of which one 4-D mask may serve all."""
    check_tensor(mask, "attention_mask")
    batch, seqlen = input_ids.shape[:2]
    if mask.dim() == 4 and mask.shape[0] == 1:
        mask = mask.expand(batch, -1, -1, -1)
    shapes = [(batch, seqlen), (batch, *mask.shape[1:2], seqlen, seqlen)]
    if mask.shape not in shapes:
        raise ValueError(
            "attention_mask must be [batch, seqlen] or [batch or 1, heads, seqlen, seqlen] of "
            f"input_ids, with batch = {batch} and seqlen = {seqlen}, got shape {list(mask.shape)}"
        )
    if mask.dim() == 2 and (mask.is_floating_point() or mask.is_complex()):
        raise TypeError(f"attention_mask must be bool or an integer type, got {mask.dtype}")
    return mask


def _check_takes_rows(model: Callable[..., Any], more: dict[str, Any]) -> None:
    """Models of transformers take any keyword, `packed` too, and not all look at it."""
    config = text_config(model)
    attention = getattr(config, "_attn_implementation", None)
    if attention is None or attention == "cuseq":
        return
    use_cache = more.get("use_cache")
    if getattr(config, "use_cache", False) if use_cache is None else use_cache:
        raise ValueError(
            "model must take packed rows, by cuseq.enable(model) or "
            f'attn_implementation="cuseq", got attn_implementation={attention!r}, which tells '
            "documents apart only without a cache: use_cache=False"
        )


def _unpacked(packed: PackedLayout, name: str, rows: Tensor) -> Tensor:
    if rows.shape[:2] != (1, packed.total_tokens):
        raise ValueError(
            f"{name} must be [1, total_tokens = {packed.total_tokens}, ...] to be unpacked, got "
            f"shape {list(rows.shape)}"
        )
    return unpack(packed, rows.squeeze(0))


def _unpacked_items(packed: PackedLayout, items: Sequence[Any]) -> Sequence[Any]:
    """A tuple or list like `items`, its packed rows as padded batches, and what is in it."""
    unpacked = []
    for item in items:
        if isinstance(item, (tuple, list)):
            item = _unpacked_items(packed, item)
        elif isinstance(item, Tensor) and item.shape[:2] == (1, packed.total_tokens):
            item = unpack(packed, item.squeeze(0))
        unpacked.append(item)
    is_named = hasattr(items, "_fields")
    return type(items)(*unpacked) if is_named else type(items)(unpacked)
