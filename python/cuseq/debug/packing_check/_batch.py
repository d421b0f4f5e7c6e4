"""A batch of the user's own loader: the documents that it says it has, and the same with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cuseq._base.arguments import check_tensor
from cuseq._base.labels import IGNORE_INDEX
from cuseq.debug.packing_check._documents import text_of
from cuseq.layout import PackedLayout

_PER_ROW = ("attention_mask", "position_ids")  # keys that say where documents lie


@dataclass(frozen=True)
class OwnBatch:
    """A batch, and where its documents lie.

    Attributes:
        batch: the model's keywords.
        slots: for each document int64 `[n]`, the places of its tokens in the flat `input_ids`.
    """

    batch: dict[str, Any]
    slots: tuple[Tensor, ...]

    def examples(self) -> list[dict[str, Any]]:
        """Return the documents: for each the values of its tokens, by key, labels unshifted."""
        ids = self.batch["input_ids"]
        values = {
            key: value.flatten().cpu()
            for key, value in self.batch.items()
            if isinstance(value, Tensor) and value.shape == ids.shape and key not in _PER_ROW
        }
        examples = [{key: value[own] for key, value in values.items()} for own in self.slots]
        if "labels" in values and _are_shifted(examples):
            for example in examples:
                example["labels"] = pad(example["labels"][:-1], (1, 0), value=IGNORE_INDEX)
        return examples

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch with the tokens of these examples in the place of its own."""
        given = self.batch["input_ids"]
        ids = given.flatten().clone()
        for own, example in zip(self.slots, examples, strict=True):
            ids[own.to(ids.device)] = torch.tensor(example["input_ids"]).to(ids)
        return self.batch | {"input_ids": ids.view(given.shape)}

    def said(self) -> str:
        """Return a sentence about the documents, for the report."""
        lengths = [str(len(own)) for own in self.slots]
        shown = lengths if len(lengths) <= 20 else [*lengths[:20], "..."]
        documents = "1 document" if len(lengths) == 1 else f"{len(lengths)} documents"
        return f"the batch says that it has {documents}, of {', '.join(shown)} tokens"


def read_batch(batch: Mapping[str, Any], config: Any) -> OwnBatch:
    """Read where the documents of a batch lie, as a call of a model with this config is read.

    Raises:
        TypeError, ValueError: `input_ids` is not a batch of tokens, the batch holds more than text,
            or what it says of its documents is wrong.
        ImportError: the batch has no `packed`, and transformers is not installed.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        shape = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(
            "examples must be documents, or one batch with a tensor input_ids [rows, tokens], got "
            f"a mapping whose input_ids is {shape}"
        )
    check_tensor(ids, "input_ids")
    for key, value in batch.items():
        is_input = isinstance(value, Tensor) and value.is_floating_point()
        if is_input and key != "attention_mask" and value.shape[:2] != ids.shape:
            raise ValueError(
                f"examples must hold text alone if they are one batch, got {key}, which cannot be "
                "divided by document: give the documents, and your collator"
            )
    packed = _layout_of(batch, config)
    if packed is not None:
        starts, lengths = packed.cu_seqlens_padded.tolist(), packed.lengths.tolist()
        slots = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=False)]
    else:
        slots = _rows_of(ids, batch.get("attention_mask"))
    own_batch = OwnBatch(dict(batch), tuple(own for own in slots if len(own)))
    if sum(len(own) >= 2 for own in own_batch.slots) < 2:
        raise ValueError(
            "examples must hold at least two documents of two or more tokens, but "
            f"{own_batch.said()}: if it is packed, it does not say where its documents end"
        )
    _check_positions(own_batch, batch.get("position_ids"))
    return own_batch


def _check_positions(batch: OwnBatch, positions: Any) -> None:
    """Raise ValueError if positions skip or repeat, since documents alone count theirs by one."""
    if not isinstance(positions, Tensor) or positions.shape != batch.batch["input_ids"].shape:
        return
    flat = positions.flatten().cpu()
    for i, own in enumerate(batch.slots):
        if not bool((flat[own].diff() == 1).all()):
            raise ValueError(
                "position_ids must go up by one inside each document of a batch to be compared "
                f"with documents alone, got {flat[own][:8].tolist()} ... in document {i}: give the "
                "documents, and a forward that makes the positions"
            )


def _layout_of(batch: Mapping[str, Any], config: Any) -> PackedLayout | None:
    packed = batch.get("packed")
    if isinstance(packed, PackedLayout):
        total = batch["input_ids"].numel()
        if packed.total_tokens != total:
            raise ValueError(
                f"packed must describe the {total} tokens of input_ids, got a layout of "
                f"total_tokens={packed.total_tokens}"
            )
        return packed
    from cuseq.integrations.transformers.documents import layout_of_batch  # needs transformers

    return layout_of_batch(batch, use_cache=getattr(text_of(config), "use_cache", False))


def _are_shifted(examples: list[dict[str, Any]]) -> bool:
    """Return whether labels are those of the next tokens, and not of their own."""

    def agree(shift: int) -> bool:
        for example in examples:
            labels = example["labels"][: len(example["labels"]) - shift]
            ids, is_target = example["input_ids"][shift:], labels != IGNORE_INDEX
            if not torch.equal(labels[is_target], ids[is_target]):
                return False
        return True

    return not agree(0) and agree(1)


def _rows_of(ids: Tensor, mask: Any) -> list[Tensor]:
    """Return the places of each row's tokens, without the padding of a 2-D mask."""
    real = torch.ones(ids.shape, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        real = mask.cpu() != 0
    places = torch.arange(ids.numel()).view(ids.shape)
    return [row[kept] for row, kept in zip(places, real, strict=True)]
