"""Test what a model computes over whole rows: balance losses, NEFTune, padding, tokens seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import cuseq

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_models import SETTINGS  # noqa: E402
from trainer_models import small_model as llama_like  # noqa: E402

from cuseq.debug.families.models import (  # noqa: E402
    VOCAB,
)

LENGTHS = (7, 9, 12)


def documents(lengths=LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def padded(ids: list[Tensor]) -> dict[str, Tensor]:
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    mask = (labels != -100).long()
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": mask}


def packed(ids: list[Tensor], total_tokens: int | None = None) -> dict[str, Any]:
    return cuseq.PackingCollator(total_tokens=total_tokens)([{"input_ids": one} for one in ids])


def between(ids: list[Tensor]) -> dict[str, Any]:
    """Return a row with padding between its documents and a tail."""
    lengths = [len(one) for one in ids]
    layout = cuseq.PackedLayout.from_lengths(lengths, 64, segment_multiple=8)
    batch = {name: torch.zeros(64, dtype=torch.int64) for name in ("input_ids", "labels")}
    batch["labels"].fill_(-100)
    for one, start in zip(ids, layout.cu_seqlens_padded.tolist(), strict=False):
        batch["input_ids"][start : start + len(one)] = one
        batch["labels"][start + 1 : start + len(one)] = one[1:]
    batch["position_ids"] = layout.position_ids.long()
    return {name: value[None] for name, value in batch.items()} | {"packed": layout}


def by_offsets(ids: list[Tensor]) -> dict[str, Any]:
    """Return a row whose call has offsets that end before the tail."""
    batch = packed(ids, 64)
    layout = batch.pop("packed")
    offsets, longest = layout.cu_seqlens, layout.max_seqlen
    return batch | dict(
        cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest
    )


ROWS = {
    "no tail": lambda ids: packed(ids),
    "tail": lambda ids: packed(ids, 32),
    "long tail": lambda ids: packed(ids, 256),
    "padding between": between,
    "offsets": by_offsets,
}


def result(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the output of a training step, and the gradients."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    named = model.named_parameters()
    return output, {name: p.grad.clone() for name, p in named if p.grad is not None}


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rounding: float):
    for name, gradient in expected.items():
        atol = rounding * float(gradient.abs().max())
        assert_close(found[name], gradient, rtol=0, atol=atol + 1e-12, msg=name)


# ------------------------------------------------------------------------------------------ Trainer


def make_trainer(model: nn.Module, folder: Any, collator: Any, ids: list[Tensor], **options: Any):
    settings = SETTINGS | dict(
        per_device_train_batch_size=len(LENGTHS),
        max_steps=2,
        eval_strategy="no",
        use_cpu=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        bf16=False,
    )
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **(settings | options)),
        data_collator=collator,
        train_dataset=[{"input_ids": one.tolist()} for one in ids],
    )


def pad(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded([torch.as_tensor(example["input_ids"]) for example in examples])


@pytest.mark.parametrize("kind", ["no", "all", "non_padding"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_trainer_counts_real_tokens(kind, is_enabled, tmp_path):
    model = llama_like(transformers.LlamaConfig, dtype=torch.float32)
    collator = cuseq.PackingCollator(total_tokens=64)
    options = dict(include_num_input_tokens_seen=kind)
    trainer = make_trainer(model, tmp_path, collator, documents(LENGTHS * 2), **options)
    if is_enabled:
        cuseq.enable(trainer)
        trainer.train()
        counts = {"no": 0, "all": 2 * 64, "non_padding": 2 * sum(LENGTHS)}
        assert trainer.state.num_input_tokens_seen == counts[kind]
        cuseq.disable(trainer)
    assert "_track_num_input_tokens" not in vars(trainer)
