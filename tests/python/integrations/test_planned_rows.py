"""Test a Trainer whose rows are planned, `cuseq.enable(trainer, capacity=...)`."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import distributed
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

import cuseq
from cuseq.distributed import ContextParallel

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from trainer_models import documents, small_model  # noqa: E402

CAPACITY, COUNT = 40, 60
# transformers 5.5.3 divides gradients by the accumulated batches once more, for which its number of
# labels accounts already. Adam takes no notice, but for the epsilon and clipping.
DIVIDES_TWICE = Version(transformers.__version__) < Version("5.17")
SETTINGS = dict(
    **({"max_grad_norm": 0.0, "adam_epsilon": 1e-30} if DIVIDES_TWICE else {}),
    per_device_train_batch_size=1,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    dataloader_pin_memory=False,
)


class Recorded(cuseq.PackingCollator):
    """A collator that notes the rows which it makes, as lists of the documents' ids."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows: list[list[tuple[int, ...]]] = []

    def __call__(self, examples):
        self.rows.append([tuple(example["input_ids"]) for example in examples])
        return super().__call__(examples)


def examples(count: int = COUNT) -> list[dict]:
    """Return documents of which no two are equal."""
    found = documents(count, seed=0)
    return [{"input_ids": [i, *one["input_ids"]]} for i, one in enumerate(found)]


def make_trainer(folder, data=None, kind=transformers.Trainer, collator=None, **options):
    torch.manual_seed(0)
    return kind(
        small_model(transformers.Qwen3Config, dtype=torch.float64),
        transformers.TrainingArguments(str(folder), **SETTINGS | options),
        data_collator=Recorded() if collator is None else collator,
        train_dataset=examples() if data is None else data,
    )


def trained(trainer, **options):
    """Enable and train, and return the rows, the losses and the weights."""
    enabled = cuseq.enable(trainer, capacity=CAPACITY, **options)
    assert f"planned_rows:{type(trainer).__name__}" in enabled.replaced
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
    return trainer.data_collator.rows, losses, weights


def as_tuples(data) -> list[tuple[int, ...]]:
    return [tuple(one["input_ids"]) for one in data]


def test_rows_are_those_of_the_sampler(tmp_path):
    rows, _, _ = trained(make_trainer(tmp_path, data_seed=7, gradient_accumulation_steps=2))
    ids = as_tuples(examples())
    sampler = cuseq.data.PackedBatchSampler(
        list(map(len, ids)), CAPACITY, balance="attention", accumulation=2, seed=7
    )
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += [[ids[i] for i in row] for row in sampler]
    assert rows == expected
    half = len(rows) // 2
    assert sorted(sum(rows[:half], [])) == sorted(sum(rows[half:], [])) == sorted(ids)
    assert rows[:half] != rows[half:]


def test_a_step_has_the_loss_of_its_documents(tmp_path):
    """In transformers alone, one by one; the rate is zero, so that all steps have one model."""
    trainer = make_trainer(tmp_path, learning_rate=0.0, num_train_epochs=1)
    rows, losses, _ = trained(trainer)
    model = small_model(transformers.Qwen3Config, dtype=torch.float64)
    for row, loss in zip(rows, losses, strict=True):
        total = labels = 0
        for ids in map(torch.tensor, row):
            if len(ids) > 1:
                total += model(ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
                labels += len(ids) - 1
        assert loss == pytest.approx(total / labels, rel=1e-4)


@pytest.mark.parametrize("step", [5, 23])
def test_a_run_that_is_resumed_reads_what_is_left(step, tmp_path):
    """In the first and in the second of two epochs."""
    options = dict(save_strategy="steps", save_steps=step, save_total_limit=9)
    rows, losses, weights = trained(make_trainer(tmp_path / "whole", **options))
    assert len(losses) == 2 * len(rows) // 2 and 5 < len(rows) // 2 < 23
    again = make_trainer(tmp_path / "again", **options)
    vars(again.args)["_setup_devices"] = torch.device("cpu")  # else moments go to "cpu:0"
    cuseq.enable(again, capacity=CAPACITY)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert again.data_collator.rows == rows[step:]
    for name, value in again.model.named_parameters():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("kind", ["list", "table", "formatted", "lengths", "transform", "columns"])
def test_lengths_are_those_of_the_dataset(kind, tmp_path):
    data = examples(20)
    expected = trained(make_trainer(tmp_path, data))[0]
    options = {}
    if kind != "list":
        data = datasets.Dataset.from_list(data)
    if kind == "formatted":
        data = data.with_format("torch")
    if kind == "transform":
        data = data.with_transform(lambda batch: batch)
    if kind == "columns":  # of text, which a Trainer drops
        data = data.add_column("source", ["a"] * 20)
    if kind == "lengths":
        data = data.add_column("tokens", [len(one) for one in as_tuples(data)])
        options["length_column_name"] = "tokens"
    rows = trained(make_trainer(tmp_path, data, **options))[0]
    assert [[tuple(map(int, one)) for one in row] for row in rows] == expected


def test_what_is_changed_after_enable_counts(tmp_path):
    """A dataset of other lengths would be packed by the lengths of the first one."""
    trainer = make_trainer(tmp_path)
    cuseq.enable(trainer, capacity=CAPACITY)
    trainer.train_dataset[:] = examples(20)[::-1]
    trainer.args.data_seed, trainer.args.gradient_accumulation_steps = 3, 2
    trainer.train()
    options = dict(data_seed=3, gradient_accumulation_steps=2)
    assert (
        trainer.data_collator.rows
        == trained(make_trainer(tmp_path, examples(20)[::-1], **options))[0]
    )


def test_sequential_rows_are_not_shuffled(tmp_path):
    trainer = make_trainer(tmp_path, train_sampling_strategy="sequential", num_train_epochs=2)
    rows, _, _ = trained(trainer)
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]


def test_workers_and_a_graph_change_no_number(tmp_path):
    plain = trained(make_trainer(tmp_path, max_steps=6))
    workers = trained(make_trainer(tmp_path, max_steps=6, dataloader_num_workers=1))
    assert workers[1] == plain[1]
    fixed = Recorded(total_tokens=CAPACITY, max_seqs=CAPACITY // 2)
    graph = trained(make_trainer(tmp_path, collator=fixed, max_steps=6), graph=True)
    assert graph[1] == pytest.approx(plain[1], rel=1e-9)
    for name, value in plain[2].items():
        torch.testing.assert_close(graph[2][name], value, rtol=1e-9, atol=1e-12)


def on_ranks(rank: int, folder: str) -> dict:
    found = {}
    for cp_size in (1, 2):
        mesh = init_device_mesh("cpu", (2 // cp_size, cp_size))
        group = mesh.get_group(1)
        cp = None if cp_size == 1 else ContextParallel(group, heads=(2, 1), head_dim=16)
        options = dict(gradient_accumulation_steps=cp_size, ddp_backend="gloo")
        found[cp_size] = trained(make_trainer(folder, **options), cp=cp)[1:]
    collator = Recorded()
    trainer = make_trainer(folder, collator=collator, num_train_epochs=1, ddp_backend="gloo")
    rows, _, _ = trained(trainer)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    found["rows"] = everyone
    return found


def test_ranks_learn_what_one_process_learns(tmp_path):
    options = dict(gradient_accumulation_steps=2)
    _, losses, weights = trained(make_trainer(tmp_path, **options))
    for found in distributed.run(on_ranks, str(tmp_path), limit=240):
        for cp_size in (1, 2):
            assert found[cp_size][0] == pytest.approx(losses, rel=1e-6)
            for name, value in weights.items():
                torch.testing.assert_close(found[cp_size][1][name], value, rtol=1e-6, atol=1e-9)
        first, second = found["rows"]
        assert len(first) == len(second)
        assert sorted(sum(first + second, [])) == sorted(as_tuples(examples()))


class Stream(IterableDataset):
    def __iter__(self):
        yield from examples()


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *args):
        return [0, 1, 2]


REFUSED = [
    (dict(collator=transformers.default_data_collator), "collator is a function, which does not"),
    (dict(data=Stream(), max_steps=3), "stream of examples.*PackedStream packs it"),
    (dict(train_sampling_strategy="group_by_length"), 'must be "random".*got .group_by_length'),
    (dict(kind=OwnLoader), "get_train_dataloader of transformers.*got that of OwnLoader"),
    (dict(kind=OwnSampler), "_get_train_sampler of transformers.*got that of OwnSampler"),
    (dict(data=[{"ids": [1, 2]}]), r"must have input_ids.*train_dataset\[0\] without them"),
    (dict(data=[{"input_ids": [1] * 41}]), r"at most capacity = 40, got lengths\[0\] = 41"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_planned_is_refused(options, message, tmp_path):
    trainer = make_trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        cuseq.enable(trainer, capacity=CAPACITY)
    assert "get_train_dataloader" not in vars(trainer)
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shared", ["tp", "sp", "cp"])
def test_ranks_that_read_the_same_rows_are_refused(shared, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    given = {f"{name}_enabled": name == shared for name in ("tp", "sp", "cp")}
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", SimpleNamespace(**given))
    with pytest.raises(ValueError, match="the trainer's ParallelismConfig read the same rows"):
        cuseq.enable(trainer, capacity=CAPACITY)


class StopsEpochs(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 3 == 0


def test_an_epoch_after_one_that_was_stopped_has_other_rows(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(StopsEpochs())
    rows, _, _ = trained(trainer)
    assert len(rows) == 6 and rows[:3] != rows[3:]
    trainer.train()
    assert trainer.data_collator.rows[6:9] == rows[:3]


def test_examples_that_are_repeated_are_said(tmp_path):
    data = [{"input_ids": [i] * CAPACITY} for i in range(5)]
    trainer = make_trainer(tmp_path, data, gradient_accumulation_steps=4, num_train_epochs=1)
    with pytest.warns(UserWarning, match="3 examples are repeated in an epoch"):
        rows, _, _ = trained(trainer)
    assert len(rows) == 8


def test_a_wrong_column_of_lengths_is_named(tmp_path):
    data = datasets.Dataset.from_list([one | {"length": 1} for one in examples()])
    trainer = make_trainer(tmp_path, data)
    cuseq.enable(trainer, capacity=CAPACITY)
    with pytest.raises(ValueError, match="column 'length' must have the tokens of each example"):
        trainer.train()


@pytest.mark.parametrize("capacity, error", [(0, ValueError), (4.5, TypeError), ("8", TypeError)])
def test_capacities_that_are_none_are_refused(capacity, error, tmp_path):
    with pytest.raises(error, match="capacity must be"):
        cuseq.enable(make_trainer(tmp_path), capacity=capacity)


def test_disable_restores_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=1)
    before = [type(one) for one in trainer.callback_handler.callbacks]
    own = set(vars(trainer))
    cuseq.enable(trainer, capacity=CAPACITY)
    with pytest.raises(ValueError, match="capacity must stay 40"):
        cuseq.enable(trainer, capacity=80)
    cuseq.disable(trainer)
    assert set(vars(trainer)) == own
    assert [type(one) for one in trainer.callback_handler.callbacks] == before
    cuseq.enable(trainer)
    trainer.train()
    assert all(len(row) == 1 for row in trainer.data_collator.rows)


def test_an_enabled_trainer_is_freed(tmp_path):
    trainer = make_trainer(tmp_path)
    cuseq.enable(trainer, capacity=CAPACITY)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
