"""Test trainers on rows with images, whose collator `cuseq.enable` sets."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

import cuseq
from cuseq.distributed import ContextParallel

transformers = pytest.importorskip("transformers")

from test_rows_of_models import IMAGE, make_model, make_row  # noqa: E402


def examples(count: int) -> list[dict]:
    """Return documents as `dataset.map(processor)` keeps them."""
    documents, *_ = make_row()
    found = []
    for one in (documents * count)[:count]:
        row = {name: one[name][0] for name in ("input_ids", "mm_token_type_ids")}
        labels = row["input_ids"].masked_fill(row["input_ids"] == IMAGE, -100)
        images = {name: one[name] for name in ("pixel_values", "image_grid_thw")}
        found.append(dict(row, labels=labels, **images))
    found[1] = {name: found[1][name][-4:] for name in ("input_ids", "mm_token_type_ids", "labels")}
    return [
        {name: x.float() if x.is_floating_point() else x for name, x in one.items()}
        for one in found
    ]


def arguments(cls: type, folder, **options):
    return cls(
        str(folder), max_steps=2, per_device_train_batch_size=3, remove_unused_columns=False,
        report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no", use_cpu=True,
        **options,
    )  # fmt: skip


def expected_loss(batch: dict) -> float:
    model = make_model("qwen2_vl").float()
    cuseq.enable(model)
    return model(**batch).loss.item()


def logged(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_enable_sets_the_collator_of_a_trainer(tmp_path):
    model = make_model("qwen2_vl").float()
    collate = cuseq.data.MultimodalPackingCollator(model.config)
    rows = examples(6)
    trainer = transformers.Trainer(
        model, arguments(transformers.TrainingArguments, tmp_path), train_dataset=rows
    )
    own = trainer.data_collator
    enabled = cuseq.enable(trainer, collator=collate)
    assert cuseq.enable(trainer, collator=collate) is enabled
    assert trainer.data_collator is collate
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    assert logged(trainer)[0]["loss"] == pytest.approx(expected_loss(batch), rel=1e-3)
    cuseq.disable(trainer)
    assert trainer.data_collator is own


def test_what_a_collator_cannot_go_with_is_named(tmp_path):
    model = make_model("qwen2_vl").float()
    collate = cuseq.data.MultimodalPackingCollator(model.config)

    def trainer(**options):
        given = arguments(transformers.TrainingArguments, tmp_path)
        for name, value in options.items():
            setattr(given, name, value)
        return transformers.Trainer(model, given, train_dataset=examples(3))

    with pytest.raises(TypeError, match="collator must be a cuseq.PackingCollator or"):
        cuseq.enable(trainer(), collator=lambda rows: rows)
    with pytest.raises(ValueError, match="remove_unused_columns must be False"):
        cuseq.enable(trainer(remove_unused_columns=True), collator=collate)
    with pytest.raises(ValueError, match="collator must be None with graph=True"):
        cuseq.enable(trainer(), collator=collate, graph=True)
    packing = trainer()
    packing.data_collator = collate
    with pytest.raises(ValueError, match="data_collator must have max_images with graph=True"):
        cuseq.enable(packing, graph=True)
    with pytest.raises(TypeError, match="enable of a model takes"):
        cuseq.enable(model, collator=collate)


@pytest.fixture
def make_sft(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "<e>": 1, "<p>": 2}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="<e>", pad_token="<p>"
    )

    def make(count=6, columns=None, **options):
        rows = datasets.Dataset.from_list(
            [{name: x.tolist() for name, x in one.items()} for one in examples(count)]
        ).with_format("torch")
        model = make_model("qwen2_vl").float()
        options = dict(max_length=None, bf16=False) | options
        trainer = trl.SFTTrainer(
            model,
            arguments(trl.SFTConfig, tmp_path, **options),
            train_dataset=rows,
            processing_class=tokenizer,
        )
        return trainer, cuseq.data.MultimodalPackingCollator(model.config)

    return make


def test_sft_logs_what_the_row_has(make_sft):
    trainer, collate = make_sft()
    own = trainer.data_collator
    enabled = cuseq.enable(trainer, collator=collate)
    assert f"collator:{type(own).__name__}" in enabled.replaced
    batches = list(trainer.get_train_dataloader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="attention_mask has no effect")
        trainer.train()
    log = logged(trainer)
    assert log[0]["loss"] == pytest.approx(expected_loss(batches[0]), rel=1e-3)
    tokens = [batch["packed"].num_real_tokens for batch in batches]
    assert [entry["num_tokens"] for entry in log] == [tokens[0], sum(tokens)]
    assert 0 <= log[0]["mean_token_accuracy"] <= 1 and log[0]["entropy"] > 0
    cuseq.disable(trainer)
    assert trainer.data_collator is own and "compute_loss" not in vars(trainer)


def test_sft_deals_rows_of_a_collator(make_sft, tmp_path):
    """Each process shares its rows with itself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        cp = ContextParallel(dist.group.WORLD)
        trainer, collate = make_sft()
        plain = cuseq.data.MultimodalPackingCollator(collate.config)
        expected = expected_loss(plain([trainer.train_dataset[i] for i in range(3)]))
        enabled = cuseq.enable(trainer, collator=collate, cp=cp)
        assert "context_parallel:SFTTrainer" in enabled.replaced
        assert trainer.data_collator.cp is cp
        batches = list(trainer.get_train_dataloader())
        trainer.args.train_sampling_strategy = "sequential"
        trainer.train()
        log = logged(trainer)
        assert log[0]["loss"] == pytest.approx(expected, rel=1e-3)
        tokens = sum(batch["packed"].num_real_tokens for batch in batches)
        assert log[-1]["num_tokens"] == tokens
    finally:
        dist.destroy_process_group()


def test_sft_keeps_a_loss_of_the_users_own(make_sft):
    trainer, collate = make_sft()
    own = trainer.compute_loss
    trainer.compute_loss = own
    cuseq.disable(trainer)  # it was never enabled
    assert vars(trainer)["compute_loss"] is own
    cuseq.enable(trainer, collator=collate)
    cuseq.disable(trainer)
    assert vars(trainer)["compute_loss"] is own


def test_sft_refuses_what_would_cut_or_pack_again(make_sft):
    trainer, collate = make_sft(max_length=64)
    with pytest.raises(ValueError, match="max_length must be None in SFTConfig with a collator"):
        cuseq.enable(trainer, collator=collate)
    trainer, collate = make_sft()
    trainer.args.packing = True
    with pytest.raises(ValueError, match="must have packing=False and padding_free=False"):
        cuseq.enable(trainer, collator=collate)
    trainer, collate = make_sft()
    trainer.train_dataset = trainer.train_dataset.rename_column("input_ids", "images")
    with pytest.raises(ValueError, match="must have the columns that a processor makes"):
        cuseq.enable(trainer, collator=collate)
