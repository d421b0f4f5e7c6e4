"""Test layouts in Hugging Face's Trainer: they arrive as one object, and losses are right."""

from __future__ import annotations

import warnings

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_models import small_model  # noqa: E402

from cuseq.integrations import transformers as integration  # noqa: E402
from cuseq.integrations.transformers import _warn  # noqa: E402
from tests.families.models import small_model as family_model  # noqa: E402

LENGTHS = [[3, 9, 4], [16], [1, 1, 14], [7, 8], [5, 5, 5], [2, 12]]
ROW = 16


def documents() -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]
        for lengths in LENGTHS
    ]


class Rows(torch.utils.data.Dataset):
    """One item per row: the documents that share it."""

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
    return small_model(transformers.LlamaConfig, dtype=torch.float32, attention=implementation)


def collate_dense(rows: list[dict[str, list[list[int]]]]) -> dict:
    """Return the same row with an explicit mask."""
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


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the attention; the models of this file request it by name."""
    integration.register()
    yield
    integration.unregister()


@pytest.fixture
def seen(monkeypatch) -> list[cuseq.PackedLayout]:
    """Return the layouts that attention was given, one for each call."""
    layouts = []
    attend = cuseq.varlen_attention

    def spy(q, k, v, packed, **options):
        layouts.append(packed)
        return attend(q, k, v, packed, **options)

    monkeypatch.setattr(cuseq, "varlen_attention", spy)
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


# ------------------------------------------------------------------------------ enable and disable


@pytest.fixture
def make_trainer(tmp_path):
    def make(model=None, collator=None, batch_size=1, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch_size,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=True,
        )
        if model is None and "model_init" not in options:
            model = make_model("sdpa")
        return transformers.Trainer(
            model, arguments, data_collator=collator, train_dataset=Rows(), **options
        )

    return make


def test_a_trainer_is_enabled_by_its_model(make_trainer, seen):
    trainer = make_trainer(collator=collate)
    theirs = make_trainer(collator=collate_dense)
    theirs.train()
    enabled = cuseq.enable(trainer)
    assert enabled.kind == "trainer"
    assert enabled.replaced == (
        "attention:LlamaAttention",
        "rope:transformers.models.llama.modeling_llama",
    )
    (left,) = enabled.left_alone
    assert left.startswith("the data collator collate: a Trainer keeps the one it is given")
    assert enabled.warnings == ()
    assert cuseq.enable(trainer) is enabled
    with pytest.raises(ValueError, match="rope must stay True until cuseq.disable, got False"):
        cuseq.enable(trainer, rope=False)
    assert trainer.data_collator is collate
    trainer.train()
    assert len(seen) == 2 * 2  # layers, steps
    losses, expected = (
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (trainer, theirs)
    )
    assert losses == pytest.approx(expected, abs=2e-4)
    cuseq.disable(trainer)
    assert trainer.model.config._attn_implementation == "sdpa"
    cuseq.disable(trainer)  # a trainer that is not enabled does not change


@pytest.mark.filterwarnings("error:PackingCallback")
@pytest.mark.parametrize("family", ["llama", "gptj", "falcon"])
def test_the_callback_counts_models_of_every_kind(family, make_trainer):
    """Layers of GPT-J get lengths in the place of the mask, so that `packed` leaves the call."""
    trainer = make_trainer(family_model(family), collate)
    cuseq.enable(trainer)
    trainer.add_callback(integration.PackingCallback())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["sequences_per_step"] >= 1 for entry in logs)
    cuseq.disable(trainer)


def test_a_collator_that_pads_is_said(make_trainer):
    pads = transformers.DataCollatorForSeq2Seq(tokenizer=None)
    with pytest.warns(UserWarning, match="PADDED: the trainer's DataCollatorForSeq2Seq pads its"):
        enabled = cuseq.enable(make_trainer(collator=pads))
    assert enabled.warnings[0].startswith("PADDED")
    for collator in (None, transformers.DataCollatorWithFlattening(), collate):
        assert cuseq.enable(make_trainer(collator=collator)).warnings == ()
    packs = make_trainer(collator=pads)
    assert cuseq.enable(packs, collator=cuseq.PackingCollator()).warnings == ()


def pads(examples):
    longest = max(len(one["input_ids"]) for one in examples)
    rows = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in examples]
    mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"]))
            for one in examples]  # fmt: skip
    rows, mask = torch.tensor(rows), torch.tensor(mask)
    return dict(input_ids=rows, attention_mask=mask, labels=rows.masked_fill(mask == 0, -100))


def numbers_documents(examples):
    batch = pads(examples)
    batch["attention_mask"][:, :2] *= 2
    return batch


def packs_with_a_mask(examples):
    return {name: rows[:, : len(examples[0]["input_ids"])] for name, rows in pads(examples).items()}


class Pads:
    def __call__(self, examples):
        return pads(examples)


@pytest.mark.parametrize("collator", [pads, Pads(), numbers_documents, packs_with_a_mask])
def test_a_collator_of_ones_own_that_pads_is_said_once_it_has(collator, make_trainer):
    _warn.forget_warnings()
    trainer = make_trainer(collator=collator, batch_size=2)
    examples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11, 12, 13, 14]}]
    trainer.train_dataset = examples * 2
    assert cuseq.enable(trainer).warnings == ()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    name = "pads" if collator is pads else "Pads"
    found = [str(one.message) for one in said if "PADDED" in str(one.message)]
    expected = 1 if collator is pads or isinstance(collator, Pads) else 0
    assert len(found) == expected
    assert all(f"the trainer's {name} pads its batches" in one for one in found)


def test_transformers_collator_of_rows_is_known(make_trainer):
    (said,) = cuseq.enable(
        make_trainer(collator=transformers.DataCollatorWithFlattening())
    ).left_alone
    assert said.startswith("the data collator DataCollatorWithFlattening: it packs rows already;")


def test_a_collator_that_packs_is_left_alone(make_trainer):
    trainer = make_trainer(collator=cuseq.PackingCollator())
    enabled = cuseq.enable(trainer)
    assert enabled.left_alone == ("the data collator PackingCollator: it packs rows already",)
    cuseq.disable(trainer)


def test_a_model_that_was_enabled_before_stays_so(make_trainer):
    model = make_model("sdpa")
    cuseq.enable(model, rope=False)
    trainer = make_trainer(model)
    with pytest.raises(ValueError, match="rope must stay False"):
        cuseq.enable(trainer)
    assert cuseq.enable(trainer, rope=False).replaced == ("attention:LlamaAttention",)
    cuseq.disable(trainer)
    assert model.config._attn_implementation == "cuseq"
    cuseq.disable(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"bin_pack": True}, ValueError, "bin_pack must not be given for a Trainer.*got True"),
        ({"capacity": 8}, ValueError, "capacity must not be given for a trainer.*does not pack"),
        ({"graph": 1}, TypeError, "graph must be True or False, got 1"),
        ({"cpu": True}, TypeError, "a Trainer takes backend and .* and rope and tree, got cpu"),
        ({"rope": None}, TypeError, "rope must be True or False, got None"),
    ],
)
def test_options_of_other_trainers_are_refused(options, error, message, make_trainer):
    trainer = make_trainer()
    with pytest.raises(error, match=message):
        cuseq.enable(trainer, **options)
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("packs", [True, False])
def test_several_gpus_in_one_process_are_refused(packs, make_trainer, monkeypatch):
    """Trainer would multiply the loss of a row, which is on one of them, by their number."""
    trainer = make_trainer(collator=cuseq.PackingCollator() if packs else collate)
    monkeypatch.setattr(type(trainer.args), "n_gpu", property(lambda args: 2))
    if not packs:
        cuseq.enable(trainer)  # its batches may have a row for each GPU
        return
    with pytest.raises(ValueError, match="a process for each GPU, got 2 GPUs in one"):
        cuseq.enable(trainer)
    assert trainer.model.config._attn_implementation == "sdpa"


def test_a_trainer_that_makes_its_model_is_refused(make_trainer):
    """Training would begin with another model than the enabled one."""
    trainer = make_trainer(model_init=lambda: make_model("sdpa"))
    with pytest.raises(ValueError, match="got model_init.*inside model_init"):
        cuseq.enable(trainer)
