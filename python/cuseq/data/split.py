"""`split_by_tokens`, which splits one micro-batch into passes that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_tensor, round_up, shown
from cuseq._base.labels import IGNORE_INDEX
from cuseq.layout import PackedLayout, check_layout


def split_by_tokens(
    batch: Mapping[str, Any], budget: int, *, total_multiple: int = 1, pad_token_id: int = 0
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Split a packed row into passes of at most `budget` tokens with the same loss and gradients.

    Passes are cut between sequences, in order, as few as possible. Each pass comes with a weight:
    the weighted sum of the passes' mean losses is the mean loss of the whole row::

        for part, weight in cuseq.data.split_by_tokens(batch, 8192):
            (model(**part).loss * weight).backward()

    This needs at least one counted label in every pass. In a pass without one (only a masked
    prompt, or a sequence of one token) a mean loss is NaN, and NaN times a weight of 0 is NaN.
    A model that takes `num_items_in_batch`, as the models of transformers do, avoids this and needs
    no weight::

        counted = (batch["labels"] != -100).sum()
        for part, _ in cuseq.data.split_by_tokens(batch, 8192):
            model(**part, num_items_in_batch=counted).loss.backward()

    Args:
        batch: a dict as `PackingCollator` makes it, on any device: `packed`, `labels` (integers
            `[1, total_tokens]`, -100 for labels that do not count, such as the first of each
            sequence) and other tensors `[1, total_tokens, ...]`.
        budget: most tokens of a pass, padding not counted.
        total_multiple: passes are padded to a multiple of this; the padding of `batch` is dropped.
        pad_token_id: token of the padding.

    Returns:
        An iterator over `(part, weight)`. `part` is a dict with the keys of `batch`: views of its
        tensors unless the pass is padded, and a new `packed`. `weight`, float32 `[]` on the
        labels' device, is the fraction of the row's counted labels in this pass; 0 for every pass
        if no label counts. Never synchronises.

    Raises:
        ValueError: a sequence is longer than `budget`; a tensor is not per token; `packed` or
            `labels` is missing; or the lengths of `packed` are on the GPU alone: make the layout
            from lengths on the host.
        TypeError: a tensor is not dense, or `packed` is not a `PackedLayout`.

    Examples:
        >>> batch = cuseq.PackingCollator()([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
        >>> for part, weight in cuseq.data.split_by_tokens(batch, budget=3):
        ...     print(part["input_ids"].tolist(), round(weight.item(), 3))
        [[5, 6]] 0.333
        [[7, 8, 9]] 0.667
    """
    budget = as_int(budget, "budget", least=1)
    total_multiple = as_int(total_multiple, "total_multiple", least=1)
    if total_multiple >= 2**31:
        raise ValueError(f"total_multiple must be at most 2^31 - 1, got {total_multiple}")
    pad_token_id = as_int(pad_token_id, "pad_token_id")
    packed = _checked_layout(batch)
    if packed.pads_between_sequences:
        raise ValueError("packed must have no padding between its sequences to be split")
    passes = _passes(_host_lengths(packed), budget)
    fills = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "input_ids": pad_token_id}
    return _parts(batch, packed, passes, total_multiple, fills)


def _checked_layout(batch: Mapping[str, Any]) -> PackedLayout:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping, got {shown(batch)}")
    for key in ("packed", "labels"):
        if key not in batch:
            raise ValueError(f"batch must have {key}, as PackingCollator makes it")
    packed = batch["packed"]
    check_layout(packed, parts=False, trees=False)
    for key, value in batch.items():
        if key == "packed":
            continue
        if isinstance(value, Tensor):
            check_tensor(value, key)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, packed.total_tokens):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{key} must be a tensor [1, total_tokens = {packed.total_tokens}, ...] to be "
                f"split, got {got}"
            )
    return packed


def _host_lengths(packed: PackedLayout) -> list[int]:
    if packed.known_lengths is None:
        raise ValueError(
            "packed must be made from lengths on the host, where passes are planned, but its "
            "lengths are only on the GPU"
        )
    return packed.known_lengths[: packed.num_sequences].tolist()


def _passes(lengths: list[int], budget: int) -> list[list[int]]:
    """Return the lengths of each pass's sequences."""
    passes: list[list[int]] = []
    left = -1
    for number, length in enumerate(lengths):
        if length > budget:
            raise ValueError(
                f"budget must hold every sequence, got {budget}, but sequence {number} has "
                f"{length} tokens"
            )
        if length > left:
            passes.append([])
            left = budget
        passes[-1].append(length)
        left -= length
    return [lengths for lengths in passes if sum(lengths) > 0]


def _parts(
    batch: Mapping[str, Any],
    packed: PackedLayout,
    passes: list[list[int]],
    total_multiple: int,
    fills: dict[str, int],
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    all_counted = _counted(batch["labels"]).clamp(min=1)
    begin = 0
    for lengths in passes:
        tokens = sum(lengths)
        total = round_up(tokens, total_multiple)
        part: dict[str, Any] = {}
        for key, value in batch.items():
            if key == "packed":
                part[key] = PackedLayout.from_lengths(
                    lengths, total, max_seqs=max(total, len(lengths)), device=packed.device
                )
            elif key == "position_ids":
                part[key] = _padded(value[:, begin : begin + tokens], total, None)
            else:
                part[key] = _padded(value[:, begin : begin + tokens], total, fills.get(key, 0))
        yield part, _counted(part["labels"]) / all_counted
        begin += tokens


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum(dtype=torch.float32)


def _padded(values: Tensor, total: int, fill: int | None) -> Tensor:
    """Return `[1, total, ...]`: the values, then `fill`, or positions 0, 1, ... if it is None."""
    missing = total - values.shape[1]
    if missing == 0:
        return values
    if fill is None:
        tail = torch.arange(missing, device=values.device).to(values.dtype)  # of any dtype
        tail = tail.view(1, missing, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    else:
        tail = values.new_full((1, missing, *values.shape[2:]), fill)
    return torch.cat([values, tail], dim=1)
