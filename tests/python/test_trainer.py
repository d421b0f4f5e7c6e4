"""The layout through Hugging Face's Trainer: it arrives as one object, and losses are right."""

from __future__ import annotations

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import cuseq.integrations.transformers as integration  # noqa: E402

LENGTHS = [[3, 9, 4], [16], [1, 1, 14], [7, 8], [5, 5, 5], [2, 12]]
ROW = 16


def documents() -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]
        for lengths in LENGTHS
    ]


class Rows(torch.utils.data.Dataset):
    """One item a row: the documents that share it."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, list[list[int]]]:
        return {"documents": documents()[index]}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Rows()[i] for i in range(len(LENGTHS)))


def collate(rows: list[dict[str, list[list[int]]]]) -> dict:
    (row,) = rows
    return cuseq.PackingCollator(total_tokens=ROW)([{"input_ids": ids} for ids in row["documents"]])


def make_model(implementation: str):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    )


def collate_dense(rows: list[dict[str, list[list[int]]]]) -> dict:
    """The same row with its mask spelled out."""
    batch = collate(rows)
    ids = batch.pop("packed").seq_ids
    return batch | {"attention_mask": (ids[:, None] == ids).tril()[None, None]}


def train(model, dataset, folder, collator=collate, **options) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        max_steps=len(LENGTHS),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, data_collator=collator, train_dataset=dataset)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def seen(monkeypatch) -> list[cuseq.PackedLayout]:
    """The layouts that attention was given, one for each call."""
    layouts = []
    attend = cuseq.varlen_attention

    def spy(q, k, v, packed, **options):
        layouts.append(packed)
        return attend(q, k, v, packed, **options)

    monkeypatch.setattr(integration.cuseq, "varlen_attention", spy)
    return layouts


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["map-style", "streaming"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant", "not"])
def test_the_layout_arrives_as_one_object(dataset, checkpointing, seen, tmp_path):
    options = {}
    if checkpointing is not None:
        options = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing},
        }
    losses = train(make_model("cuseq"), dataset, tmp_path, **options)
    assert len(losses) == len(LENGTHS)
    calls = 2 if checkpointing is None else 4  # two layers, each once more in the recompute
    assert len(seen) == calls * len(LENGTHS)
    for step in range(len(LENGTHS)):
        of_step = seen[step * calls : (step + 1) * calls]
        assert all(layout is of_step[0] for layout in of_step)
        assert of_step[0].total_tokens == ROW


def test_losses_equal_those_of_a_dense_mask(tmp_path):
    packed = train(make_model("cuseq"), Stream(), tmp_path / "packed")
    dense = train(make_model("sdpa"), Stream(), tmp_path / "dense", collate_dense)
    assert packed == pytest.approx(dense, abs=2e-4)  # Trainer logs four digits
