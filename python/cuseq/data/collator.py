"""`PackingCollator`, which makes one packed row of a list of examples."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_tensor, round_up, shown
from cuseq._base.labels import IGNORE_INDEX, shifted
from cuseq._base.models import watch_models
from cuseq.data._lengths import array_as_tensor, is_array
from cuseq.data._state import options_in
from cuseq.distributed import ContextParallel, cp_partition
from cuseq.layout import PackedLayout, check_layout, positions_for_models

_ops = torch.ops.cuseq

# The columns of images and videos, by the names that transformers' processors give them.
IMAGE_COLUMNS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    "second_per_grid_ts",
)
_INTEGERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16),
    *(torch.int32, torch.int64, torch.uint32, torch.uint64),
)


def mask_boundary_labels(
    labels: Tensor,
    lengths_or_layout: Tensor | Sequence[int] | PackedLayout,
    *,
    shift: int = 0,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return a copy of `labels` in which no token has to predict a token of another sequence.

    `labels[t]` is token `t + shift` of the row. With `shift=0` (the loss shifts the labels, as in
    transformers) the first label of each sequence is masked. With labels shifted left by k, the
    last k labels of each sequence are masked, or all of them if it has at most k. Labels of padding
    and of the tail are masked too. A second call with the same `shift` changes nothing.

    Args:
        labels: int32 or int64, `[total_tokens]` or any shape with as many elements, contiguous.
        lengths_or_layout: the row's `PackedLayout`, or its lengths.
        shift: number of tokens by which the labels are already shifted left, at least 0: 0 for the
            token itself, 1 for the next token, k for multi-token prediction k tokens ahead.
        ignore_index: the label that the loss ignores.

    Returns:
        A new tensor with the shape and dtype of `labels`.

    Raises:
        ValueError: `labels` has another size or is not contiguous; `shift` is negative; the lengths
            are invalid, as for `PackedLayout.from_lengths`.
        TypeError: `labels` is not a dense integer tensor; `shift` or `ignore_index` is not an int.

    Never synchronises, unless the lengths lie on a GPU and the labels on the host.

    Examples:
        >>> cuseq.data.mask_boundary_labels(torch.tensor([5, 6, 7, 8, 9, 0]), [2, 3])
        tensor([-100,    6, -100,    8,    9, -100])
        >>> cuseq.data.mask_boundary_labels(torch.tensor([6, 7, 8, 9, 0, 0]), [2, 3], shift=1)
        tensor([   6, -100,    8,    9, -100, -100])
    """
    check_tensor(labels, "labels")
    shift = as_int(shift, "shift", least=0)
    ignore_index = as_int(ignore_index, "ignore_index")
    if isinstance(lengths_or_layout, PackedLayout):
        packed = lengths_or_layout
        check_layout(packed, trees=False)
        if packed.total_tokens != labels.numel():
            raise ValueError(
                f"labels must have the layout's total_tokens = {packed.total_tokens} elements, "
                f"got {labels.numel()}"
            )
    else:
        packed = PackedLayout.from_lengths(lengths_or_layout, labels.numel())
    packed = packed.to(labels.device)
    return _ops.mask_boundary_labels(
        labels, packed.cu_seqlens_static, shift, ignore_index, packed.cu_seqlens_padded_static
    )


class PackingCollator:
    """Collate function that concatenates examples into one packed row with its layout.

    Args:
        total_tokens: fixed length of every row, for compiled code; implies `capacity=total_tokens`.
        capacity: most tokens a row may hold before padding; a batch with more raises ValueError.
            None means no limit.
        max_seqs: most examples a row may hold, at least 1; a batch with more raises ValueError. It
            is also the capacity of the layout's `cu_seqlens_static`. None means no limit; that
            capacity is then the number of tokens in the row.
        total_multiple: rows are padded to a multiple of this (such as 8 for tensor cores).
        pad_token_id: token of the padding, which belongs to no sequence.
        cp: this rank's `cuseq.distributed.ContextParallel`. The examples are then those of a row
            that its ranks share, the same on all of them, and the batch is this rank's part.

    Call it with a list of examples. Each is a mapping from names to one value per token (a list or
    a tensor): `input_ids`, and optionally `labels` (default: the input ids) and other per-token
    keys, which are concatenated. The collator makes `position_ids` itself; those of an example must
    count from 0. An `attention_mask` must be all ones; the packed row has no mask.

    Returns a dict with `input_ids`, `labels` (unshifted, -100 on each sequence's first token and on
    padding) and `position_ids`, each int64 `[1, total_tokens]`, the other keys likewise, and
    `packed`, the row's `PackedLayout`. Everything is on the host: move the dict like any batch,
    `packed` has `.to`.

    With `cp`, rows are also padded to a multiple of its size, and every tensor is this rank's
    `[1, total_tokens / cp.size]` in the order of the plan, with positions in the whole sequences.
    There are three more keys, made before the row is dealt: `shift_labels`, the label of the next
    token, -100 at each sequence's end (give them to the loss, which must not shift dealt labels);
    `num_label_tokens`, the int number of labels of the whole row that are not -100; and
    `row_checksum`, an int made of the whole row's tokens, by which ranks can tell that they share
    one.

    Raises:
        ValueError: an example is empty or longer than `capacity`; all examples together are longer
            than `capacity` or more than `max_seqs`; an example lacks a key that others have;
            shapes differ; or the row cannot be dealt by the policy of `cp`. The message names the
            argument or the example.
        TypeError: the examples are not mappings, or a key does not hold one value per token.

    Examples:
        >>> collate = cuseq.PackingCollator(total_tokens=6)
        >>> batch = collate([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
        >>> batch["labels"]
        tensor([[-100,    6, -100,    8,    9, -100]])
    """

    _MADE_HERE = ("position_ids", "packed")
    _KNOWN = ("input_ids", "labels", "attention_mask")
    _OPTIONS = (
        "total_tokens", "capacity", "max_seqs", "total_multiple", "pad_token_id", "cp"
    )  # fmt: skip

    def __init__(
        self,
        *,
        total_tokens: int | None = None,
        capacity: int | None = None,
        max_seqs: int | None = None,
        total_multiple: int = 1,
        pad_token_id: int = 0,
        cp: ContextParallel | None = None,
    ):
        capacity = None if capacity is None else as_int(capacity, "capacity", 1)
        total_tokens = None if total_tokens is None else as_int(total_tokens, "total_tokens", 1)
        total_multiple = as_int(total_multiple, "total_multiple", 1)
        if total_tokens is not None and total_tokens % total_multiple != 0:
            raise ValueError(
                f"total_tokens must be a multiple of total_multiple = {total_multiple}, "
                f"got {total_tokens}"
            )
        if capacity is not None and total_tokens is not None and capacity > total_tokens:
            raise ValueError(
                f"capacity must be at most total_tokens = {total_tokens}, got {capacity}"
            )
        self.capacity = total_tokens if capacity is None else capacity
        self.total_tokens = total_tokens
        self.max_seqs = None if max_seqs is None else as_int(max_seqs, "max_seqs", 1)
        self.total_multiple = total_multiple
        self.pad_token_id = as_int(pad_token_id, "pad_token_id")
        self.cp: ContextParallel | None = None
        if cp is not None:
            self._share(cp)
        watch_models()  # where the models are; the rows may be made in another process

    def __setstate__(self, pickled: Any) -> None:
        """Check what a pickle says as arguments are; a subclass may hold more."""
        PackingCollator.__init__(self, **options_in(pickled, self._OPTIONS))
        self.__dict__ |= {key: pickled[key] for key in pickled if key not in self._OPTIONS}

    def with_cp(self, cp: ContextParallel) -> PackingCollator:
        """Return a copy of this collator that returns this rank's part of each row.

        Raises:
            ValueError: the collator deals rows to other ranks, or `total_tokens` is not a multiple
                of their number.
            TypeError: `cp` is not a ContextParallel.

        Examples:
            >>> collate = cuseq.PackingCollator(total_tokens=65_536)
            >>> collate = collate.with_cp(ContextParallel(mesh["cp"]))  # doctest: +SKIP
        """
        shared = copy.copy(self)
        shared._share(cp)
        return shared

    def _share(self, cp: ContextParallel) -> None:
        if not isinstance(cp, ContextParallel):
            raise TypeError(f"cp must be a ContextParallel or None, got {shown(cp)}")
        if self.cp is not None and self.cp.ranks != cp.ranks:
            raise ValueError(
                f"cp must have the ranks {list(self.cp.ranks)} of the collator's cp, got "
                f"{list(cp.ranks)}"
            )
        if self.total_tokens is not None and self.total_tokens % cp.size != 0:
            raise ValueError(
                f"total_tokens must be a multiple of cp.size = {cp.size}, so that every rank "
                f"gets the same number of tokens, got {self.total_tokens}"
            )
        self.total_multiple = lcm(self.total_multiple, cp.size)
        self.cp = cp

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch, packed = self._row(examples)
        if self.cp is not None:
            return part_of(batch, packed, self.cp)
        batch["position_ids"] = positions_for_models(packed)
        batch["packed"] = packed
        return batch

    def _row(self, examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], PackedLayout]:
        """Return the per-token tensors of the examples' row, each `[1, total_tokens, ...]`."""
        watch_models()
        examples = checked_examples(examples)
        if self.max_seqs is not None and len(examples) > self.max_seqs:
            raise ValueError(
                f"examples must be at most max_seqs = {self.max_seqs}, got {len(examples)}"
            )
        keys = [key for key in examples[0] if key not in self._MADE_HERE]
        images = [key for key in IMAGE_COLUMNS if any(key in example for example in examples)]
        if images:
            raise TypeError(
                f"examples must hold text alone, got {', '.join(images)}: "
                "cuseq.data.MultimodalPackingCollator(model.config) packs images"
            )
        columns = {key: _column(examples, key) for key in keys}
        if "input_ids" not in columns:
            raise ValueError(f"examples must have input_ids, got {sorted(examples[0], key=str)}")
        lengths = [len(ids) for ids in columns["input_ids"]]
        self._check(examples, columns, lengths)
        if self.cp is not None and "shift_labels" in columns:
            raise ValueError(
                "shift_labels must be left out of the examples, they are made of labels"
            )
        columns.pop("attention_mask", None)
        columns.setdefault("labels", columns["input_ids"])

        total = self._row_length(sum(lengths))
        packed = PackedLayout.from_lengths(lengths, total, max_seqs=self.max_seqs)
        fills = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}
        fills["shift_labels"] = IGNORE_INDEX
        batch: dict[str, Any] = {
            key: _pack(pieces, total, fills.get(key, 0)) for key, pieces in columns.items()
        }
        batch["labels"] = mask_boundary_labels(batch["labels"], packed)
        return batch, packed

    def _check(
        self,
        examples: Sequence[Mapping[str, Any]],
        columns: Mapping[str, list[Tensor]],
        lengths: list[int],
    ) -> None:
        for i, (example, length) in enumerate(zip(examples, lengths, strict=True)):
            if length == 0:
                raise ValueError(f"examples must not be empty, but examples[{i}] has no tokens")
            unknown = set(example) - set(columns) - set(self._MADE_HERE)
            if unknown:
                raise ValueError(
                    f"examples must have the same keys, but examples[{i}] has "
                    f"{sorted(unknown, key=str)} and examples[0] does not"
                )
            if self.capacity is not None and length > self.capacity:
                raise ValueError(
                    f"examples must fit a row of capacity = {self.capacity} tokens, but "
                    f"examples[{i}] has {length}"
                )
            for key, column in columns.items():
                if len(column[i]) != length:
                    raise ValueError(
                        f"{key} must hold one value per token, but examples[{i}] has {length} "
                        f"tokens and {len(column[i])} values"
                    )
            positions = example.get("position_ids")
            if positions is not None and not _counts(positions, length):
                raise ValueError(
                    f"position_ids must count from 0, but those of examples[{i}] do not: drop "
                    "the column, the collator makes it"
                )
        for i, mask in enumerate(columns.get("attention_mask", [])):
            if not bool((mask == 1).all()):
                raise ValueError(
                    f"attention_mask must be all ones, since a packed row has no padding between "
                    f"sequences, but examples[{i}] masks tokens: remove those tokens first"
                )
        if self.capacity is not None and sum(lengths) > self.capacity:
            raise ValueError(
                f"examples must fit a row of capacity = {self.capacity} tokens together, got "
                f"{sum(lengths)} in {len(lengths)} examples"
            )

    def _row_length(self, tokens: int) -> int:
        if self.total_tokens is not None:
            return self.total_tokens
        return round_up(tokens, self.total_multiple)


def checked_examples(examples: Any) -> list[Mapping[str, Any]]:
    """Return the examples that a collator was given; raise unless they are mappings."""
    if isinstance(examples, Mapping):
        raise TypeError("examples must be a list of mappings, got one mapping")
    if not isinstance(examples, Sequence):
        raise TypeError(f"examples must be a list of mappings, got {shown(examples)}")
    examples = list(examples)  # reading one may change the user's list
    if not examples:
        raise ValueError("examples must not be empty, got none")
    for i, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise TypeError(
                f"examples must be a list of mappings, got {type(example).__name__} as "
                f"examples[{i}]"
            )
    return examples


def part_of(batch: dict[str, Any], packed: PackedLayout, cp: ContextParallel) -> dict[str, Any]:
    """Return this rank's part of a batch. Labels are shifted before neighbours are parted.

    Positions that the batch holds are dealt too.
    """
    next_labels = shifted(batch["labels"])
    batch = batch | {"shift_labels": next_labels}
    rows = [value.squeeze(0) for value in batch.values()]
    local, *parts = cp_partition(packed, cp.plan(packed), cp.rank, *rows, group=cp.group_name)
    dealt: dict[str, Any] = {key: part.unsqueeze(0) for key, part in zip(batch, parts, strict=True)}
    dealt.setdefault("position_ids", positions_for_models(local))
    dealt["packed"] = local
    dealt["num_label_tokens"] = int((next_labels != IGNORE_INDEX).sum())
    dealt["row_checksum"] = zlib.crc32(batch["input_ids"].numpy().tobytes())
    return dealt


def _column(examples: Sequence[Mapping[str, Any]], key: str) -> list[Tensor]:
    column: list[Tensor] = []
    for i, example in enumerate(examples):
        if key not in example:
            raise ValueError(f"examples must have the same keys, but examples[{i}] lacks {key!r}")
        try:
            values = _tensor(example[key])
        except (TypeError, ValueError, RuntimeError) as error:
            if "Overflow" in str(error):
                raise ValueError(f"{key} must fit in int64, but examples[{i}] does not") from error
            raise TypeError(
                f"{key} must hold one number per token, got {type(example[key]).__name__} in "
                f"examples[{i}]; drop columns that are not per token"
            ) from error
        check_tensor(values, f"{key} of examples[{i}]")
        if values.dim() == 0 or (key in PackingCollator._KNOWN and values.dim() != 1):
            raise TypeError(
                f"{key} must hold one value per token, got shape {tuple(values.shape)} in "
                f"examples[{i}]; drop columns that are not per token"
            )
        if key in PackingCollator._KNOWN:
            if values.dtype not in _INTEGERS and values.numel() > 0:
                raise TypeError(f"{key} must hold integers, got {values.dtype} in examples[{i}]")
            unsigned, values = values, values.long()
            if unsigned.dtype == torch.uint64 and bool((values < 0).any()):
                first = unsigned[int((values < 0).int().argmax())]
                raise ValueError(f"{key} must fit in int64, got {first} in examples[{i}]")
        if column and values.shape[1:] != column[0].shape[1:]:
            raise ValueError(
                f"{key} must have one shape per token, got {list(values.shape[1:])} in "
                f"examples[{i}] and {list(column[0].shape[1:])} in examples[0]"
            )
        column.append(values)
    return column


def _tensor(values: Any) -> Tensor:
    if is_array(values):
        return array_as_tensor(values).clone()  # reading the next example may fill it again
    return torch.as_tensor(values, device="cpu")


def _counts(positions: Any, length: int) -> bool:
    try:
        values = _tensor(positions)
    except (TypeError, ValueError, RuntimeError):
        return False
    if values.dtype in _INTEGERS:
        values = values.long()  # PyTorch compares unsigned integers only with their like
    counted = torch.arange(length, device="cpu")
    return values.shape == counted.shape and bool((values == counted).all())


def _pack(pieces: list[Tensor], total: int, fill: int) -> Tensor:
    """Return `[1, total, ...]`: the pieces concatenated, then `fill`."""
    row = torch.cat(pieces)
    tail = row.new_full((total - row.shape[0], *row.shape[1:]), fill)
    return torch.cat([row, tail]).unsqueeze(0)
