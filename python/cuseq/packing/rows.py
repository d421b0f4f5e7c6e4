"""Conversion between padded batches (BSHD) and packed rows (THD), and shifts inside sequences."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from math import lcm
from typing import Any, cast, overload

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_flag, check_tensor, shown
from cuseq._base.labels import IGNORE_INDEX
from cuseq._base.models import recurrent_layers, recurrent_types, text_config, uses_cache
from cuseq.data.collator import mask_boundary_labels
from cuseq.layout import PackedLayout, check_layout, positions_for_models
from cuseq.layout.build import common_multiple
from cuseq.trees import PackedTree

_ops = torch.ops.cuseq

Fill = bool | int | float | complex


@overload
def pack(
    packed: PackedLayout | None, tensor: Tensor, /, *, fill: Fill | Sequence[Fill] = 0
) -> Tensor: ...
@overload
def pack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> tuple[Tensor, ...]: ...
def pack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Pack tensors of a padded batch into one row each, all in one kernel launch.

    Args:
        packed: the layout made from the batch's mask; None returns the tensors unchanged.
        tensors: `[batch, seqlen, ...]` of any dtype and trailing shape; the last dimension must be
            contiguous. Or `[planes, batch, seqlen]`, the position ids of multimodal models
            (M-RoPE). A shape that could be either is read as a batch.
        fill: value of padding and tail: one for all tensors or one for each, -100 for labels.

    Returns:
        One tensor if one was given, else a tuple; each `[total_tokens, ...]`, or `[planes,
        total_tokens]`. Differentiable: the backward is `unpack`. Never synchronises.

    Raises:
        ValueError: shapes, strides, devices or the number of fills do not fit, or a tensor is on
            the meta device and has no values.
        TypeError: an argument has the wrong type.

    Examples:
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
    packed: PackedLayout, names: Sequence[str], tensors: Sequence[Tensor], fills: Sequence[Fill]
) -> Sequence[Tensor]:
    slots, tokens = packed.batch_rows()
    rows: list[Tensor] = []  # one for each batch tensor, and one for each plane
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
    """Return whether `tensor` is [planes, batch, seqlen].

    A shape that could also be [batch, seqlen, ...] counts as planes only for `position_ids`.
    """
    if tensor.dim() != 3 or tensor.shape[1:] != batch or tensor.shape[0] == 0:
        return False
    return name == "position_ids" or tensor.shape[:2] != batch


@overload
def unpack(
    packed: PackedLayout | None, tensor: Tensor, /, *, fill: Fill | Sequence[Fill] = 0
) -> Tensor: ...
@overload
def unpack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> tuple[Tensor, ...]: ...
def unpack(
    packed: PackedLayout | None, *tensors: Tensor, fill: Fill | Sequence[Fill] = 0
) -> Tensor | tuple[Tensor, ...]:
    """Unpack rows `[total_tokens, ...]` into tensors of the padded batch; the inverse of `pack`.

    Args:
        packed: as for `pack`.
        tensors: `[total_tokens, ...]` of any dtype and trailing shape.
        fill: value of the padding of the batch.

    Returns:
        `[batch, seqlen, ...]` each; one tensor or a tuple, as `pack`.

    Raises:
        ValueError, TypeError: as `pack`.

    Examples:
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


def shift_left(values: Tensor, packed: PackedLayout, shift: int = 1, *, fill: Fill = 0) -> Tensor:
    """Shift the tokens of each sequence to the left: token t gets the value of token t + shift of
    its own sequence.

    For multi-token prediction: labels, ids, positions and loss masks k tokens ahead. Unlike
    `torch.roll`, nothing comes from another sequence, from padding or from the tail.

    Args:
        values: `[total_tokens, ...]` or `[1, total_tokens, ...]` of any dtype, contiguous in the
            last dimension, on the layout's device.
        packed: the layout of the row, with or without padding between its sequences. Shift before
            `cp_partition`: a rank's part lacks its neighbours.
        shift: number of tokens, at least 0.
        fill: value of the last `shift` tokens of each sequence, of padding and of the tail; -100
            for labels.

    Returns:
        A new tensor of the shape and dtype of `values`; differentiable.

    Raises:
        ValueError: `values` has another shape or device, or `packed` is a rank's part of a row or
            the layout of a tree.
        TypeError: an argument has the wrong type.

    Never synchronises with host lengths.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([3, 2], segment_multiple=4)
        >>> cuseq.ops.shift_left(torch.tensor([5, 6, 7, 0, 8, 9, 0, 0]), packed, fill=-100)
        tensor([   6,    7, -100, -100,    9, -100, -100, -100])
    """
    check_tensor(values, "values")
    check_layout(packed, parts=False, trees=False)
    shift = as_int(shift, "shift", least=0)
    total = packed.total_tokens
    batched = values.shape[:2] == (1, total)
    if not batched and values.shape[:1] != (total,):
        raise ValueError(
            f"values must be [total_tokens = {total}, ...] or [1, {total}, ...] of the layout, got "
            f"shape {list(values.shape)}"
        )
    if values.device != packed.device:
        raise ValueError(f"values must lie on {packed.device}, got {values.device}")
    rows = values.flatten(0, 1) if batched else values
    if rows.dim() > 1 and rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(
            f"values must be contiguous in its last dimension, got strides {list(values.stride())}"
        )
    shift = min(shift, total)
    places, is_real = torch.arange(total, device=packed.device), ~packed.moe_padding_mask
    sequences = packed.seq_ids
    ahead = (places + shift).clamp(max=max(total - 1, 0))
    comes = is_real & is_real[ahead] & (sequences == sequences[ahead]) & (places + shift < total)
    behind = (places - shift).clamp(min=0)
    goes = comes[behind] & (places >= shift)
    sources, targets = (
        torch.where(which, there, -1).int() for which, there in ((comes, ahead), (goes, behind))
    )
    (shifted,) = _ops.gather_rows([rows], sources, targets, [total], 1, _fills(fill, [rows]))
    return shifted.view(values.shape) if batched else shifted


def _fills(fill: Fill | Sequence[Fill], tensors: Sequence[Tensor]) -> list[Fill]:
    fills = list(fill) if isinstance(fill, Sequence) else [fill] * len(tensors)
    if len(fills) != len(tensors):
        raise ValueError(
            f"fill must be one number or one for each of {len(tensors)} tensors, got {fill}"
        )
    return [_number(value) for value in fills]


def _number(value: Any) -> Fill:
    """Return a Python number; accept NumPy scalars and tensors of one element too."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError) as error:  # a tensor of several elements
        raise TypeError(f"fill must be numbers, got {shown(value)}") from error
    if not isinstance(number, (bool, int, float, complex)):
        raise TypeError(f"fill must be numbers, got {shown(value)}")
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
    tree: bool = False,
    **more: Any,
) -> Any:
    """Run a model that takes packed rows on a padded batch, and return a padded batch.

    The model computes nothing for padding. Outputs and gradients of real tokens are those of the
    padded run.

    Args:
        model: called with `input_ids [1, total_tokens]`, `position_ids`, `packed` and `more`, like
            transformers' models with `attn_implementation="cuseq"`.
        input_ids: `[batch, seqlen]`.
        attention_mask: as for `PackedLayout.from_padding_mask`. `[1, 1, seqlen, seqlen]` applies to
            every row. With None the model is called with the batch unchanged.
        segment_multiple, total_multiple, true_is_pad, total_tokens: as for
            `PackedLayout.from_padding_mask`. Without `total_tokens`, a mask on a GPU makes the call
            wait for the lengths.
        tree: whether to compute prefixes that rows of the batch share once (`PackedTree`). The
            call then waits for the ids of a GPU. `more` must hold no tensors, and
            `segment_multiple` and `total_multiple` must be 1.
        more: further arguments of the model. Tensors must be `[batch, seqlen, ...]` and are packed.
            `position_ids` may also be M-RoPE's `[planes, batch, seqlen]`; the model then gets
            `[planes, 1, total_tokens]`. Arguments whose names end in "labels" get -100 on padding.
            `labels` also get -100 on the first token of each sequence, because no token of that
            sequence predicts it (in a batch padded on the left a pad would predict it).

    Returns:
        The model's output, unpacked to `[batch, seqlen, ...]` with zeros on the padding. Unpacked
        are a tensor; the tensors `[1, total_tokens, ...]` of a tuple or list; and `logits`,
        `last_hidden_state`, `hidden_states` and `router_logits` (`[batch * seqlen, experts]`) of a
        transformers output.

    Raises:
        ValueError: an argument does not fit; a transformers model uses another attention, or has
            layers with a state along the row and is not enabled, so that documents would see each
            other; or an output to unpack does not have as many tokens as the row
            (`logits_to_keep`).
        TypeError: the model returns another type.

    Examples:
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
    check_flag(tree, "tree")
    if tree:
        if not segment_multiple == total_multiple == 1:
            raise ValueError(
                "segment_multiple and total_multiple must be 1 with tree=True, got "
                f"{segment_multiple} and {total_multiple}"
            )
        return _run_tree(model, input_ids, attention_mask, true_is_pad, total_tokens, more)
    packed = PackedLayout.from_padding_mask(
        attention_mask,
        segment_multiple,
        total_multiple,
        true_is_pad=true_is_pad,
        total_tokens=total_tokens,
        device=input_ids.device,
    )
    if packed.total_tokens == 0:  # models need at least one token
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
        more["position_ids"] = positions_for_models(packed)
    return _unpacked_output(_Row(packed), model(packed=packed, **more))


def _run_tree(
    model: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor,
    true_is_pad: bool,
    total_tokens: int | None,
    more: dict[str, Any],
) -> Any:
    tensors = [name for name, value in more.items() if isinstance(value, Tensor)]
    if tensors or input_ids.dim() != 2:
        raise ValueError(
            "tree=True takes input_ids [batch, seqlen] and no other tensor, whose values could "
            f"differ where ids are equal, got {', '.join(tensors) or list(input_ids.shape)}"
        )
    ids, mask = input_ids.cpu(), attention_mask.cpu()
    packed = PackedLayout.from_padding_mask(mask, true_is_pad=true_is_pad)
    sequences = pack(packed, ids).split(packed.lengths.tolist())
    total = total_tokens
    if total is None and packed.total_tokens == 0:
        total = 1  # models need at least one token
    tree = PackedTree.from_sequences(sequences, total_tokens=total, device=input_ids.device)
    more["position_ids"] = tree.position_ids.long()
    unique = cast("Tensor", tree.input_ids).to(input_ids.dtype)
    out = model(packed=tree.layout, input_ids=unique, **more)
    return _unpacked_output(_Row(packed.to(input_ids.device), tree), out)


class _Row:
    """A row that a model computed, to be unpacked to the padded batch."""

    def __init__(self, samples: PackedLayout, tree: PackedTree | None = None):
        self.samples, self.tree = samples, tree
        self.total_tokens = (samples if tree is None else tree.layout).total_tokens

    def unpacked(self, row: Tensor) -> Tensor:
        """Return `[batch, seqlen, ...]` from a row `[1, total_tokens, ...]`."""
        values = row.squeeze(0)
        return unpack(self.samples, values if self.tree is None else self.tree.gather(values))


def _unpacked_output(row: _Row, out: Any) -> Any:
    if isinstance(out, Tensor):
        return _unpacked(row, "the output", out)
    if isinstance(out, (tuple, list)):
        return _unpacked_items(row, out)
    if not isinstance(out, MutableMapping):
        raise TypeError(
            "the model must return a tensor, a tuple, a list or a mapping of outputs, got "
            f"{type(out).__name__}"
        )
    for name in ("logits", "last_hidden_state"):
        if out.get(name) is not None:
            out[name] = _unpacked(row, name, out[name])
    if out.get("hidden_states") is not None:
        out["hidden_states"] = _unpacked_items(row, out["hidden_states"])
    if out.get("router_logits") is not None:  # [total_tokens, experts] of each layer
        rows = (one.view(1, row.total_tokens, -1) for one in out["router_logits"])
        out["router_logits"] = tuple(row.unpacked(one).flatten(0, 1) for one in rows)
    return out


def _mask_of_batch(mask: Tensor, input_ids: Tensor) -> Tensor:
    """Check the mask's shape; expand a 4-D mask of one row to the whole batch."""
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
    """Raise ValueError for a transformers model that would ignore `packed`.

    Models of transformers accept any keyword, including `packed`, whether or not they use it.
    """
    config = text_config(model)
    attention = getattr(config, "_attn_implementation", None)
    if attention is None:
        return
    if leaking := recurrent_layers(config):
        raise ValueError(
            "model must be enabled by cuseq.enable(model), for its layers that carry a state along "
            f"the row, and of kinds that cuseq knows, got layers of type {', '.join(leaking)}"
        )
    if attention == "cuseq" or recurrent_types(config):
        return
    if uses_cache(config, more):
        raise ValueError(
            "model must be enabled by cuseq.enable(model), or made with "
            f'attn_implementation="cuseq", got attn_implementation={attention!r}, which separates '
            "documents only with use_cache=False"
        )


def _unpacked(row: _Row, name: str, out: Tensor) -> Tensor:
    if out.shape[:2] != (1, row.total_tokens):
        raise ValueError(
            f"{name} must be [1, total_tokens = {row.total_tokens}, ...] to be unpacked, got "
            f"shape {list(out.shape)}"
        )
    return row.unpacked(out)


def _unpacked_items(row: _Row, items: Sequence[Any]) -> Sequence[Any]:
    """Unpack the packed rows in a tuple or list, and in tuples and lists inside it."""
    unpacked = []
    for item in items:
        if isinstance(item, (tuple, list)):
            item = _unpacked_items(row, item)
        elif isinstance(item, Tensor) and item.shape[:2] == (1, row.total_tokens):
            item = row.unpacked(item)
        unpacked.append(item)
    make: Any = type(items)
    return make(*unpacked) if hasattr(items, "_fields") else make(unpacked)
