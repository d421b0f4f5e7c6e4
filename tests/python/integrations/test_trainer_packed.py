"""Test Trainer on packed rows: it learns the same as on padded rows, whatever options are on.

Also tests PackingCallback's figures. test_trainer.py tests how a layout passes through Trainer.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import distributed
import pytest
import torch
import torch._dynamo.testing
from tiers import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

import cuseq

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from trainer_models import SETTINGS, small_model  # noqa: E402

from cuseq.integrations.transformers import (  # noqa: E402
    PackingCallback,
    callback,
    register,
    unregister,
)

CAPACITY, STEPS = 16, 3
# No two rows have equal numbers of sequences and tokens, so a mean of means is not the mean.
LENGTHS = [
    [3, 9, 4],
    [16],
    [1, 1, 14],
    [2],
    [5, 5, 5],
    [2, 12],
    [7, 8],
    [4],
    [3, 3],
    [11],
    [6],
    [5],
]
FIGURES = ("fill", "real_tokens_per_second", "sequences_per_step")

Samples = list[dict[str, list[int]]]


def make_rows() -> list[Samples]:
    generator = torch.Generator().manual_seed(0)
    return [
        [{"input_ids": torch.randint(1, 64, (n,), generator=generator).tolist()} for n in lengths]
        for lengths in LENGTHS
    ]


def map_style() -> list[Samples]:
    """Return one item per row: the documents that share it."""
    return make_rows()


def streaming() -> cuseq.data.PackedStream:
    documents = [sample for row in make_rows() for sample in row]
    return cuseq.data.PackedStream(documents, CAPACITY, window=9)


def pack(rows: list[Samples]) -> dict[str, Any]:
    return cuseq.PackingCollator(total_tokens=CAPACITY)([sample for row in rows for sample in row])


def pad(rows: list[Samples]) -> dict[str, Tensor]:
    """Return the same documents, one per row, with the mask that transformers expects."""
    ids = [torch.tensor(sample["input_ids"]) for row in rows for sample in row]
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": labels.clamp(min=0),
        "labels": labels,
        "attention_mask": (labels != -100).long(),
    }


@pytest.fixture(autouse=True, scope="module")
def unregistered_afterwards():
    yield
    unregister()


def make_model(attention: str = "cuseq", dtype: torch.dtype = torch.float64):
    register()  # also in the processes that a test starts
    model = small_model(transformers.LlamaConfig, dtype=torch.float64, attention=attention)
    return model.to(dtype)  # drawing in another dtype would give other numbers


def make_trainer(model, folder, dataset=None, collator=pack, callbacks=(), **options):
    settings = SETTINGS | dict(
        per_device_train_batch_size=1,
        max_steps=STEPS,
        learning_rate=1.0,
        eval_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    arguments = transformers.TrainingArguments(str(folder), **(settings | options))
    return transformers.Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=map_style() if dataset is None else dataset,
        eval_dataset=map_style()[:2],
        callbacks=list(callbacks),
    )


def logged(trainer, *names: str) -> list[list[float]]:
    """Return these values of each log that has the training loss."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[log[name] for name in names] for log in logs]


def learned(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights, under the names of the unwrapped model."""
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().to("cpu", torch.float64)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def train(model, folder, *arguments, **options) -> dict[str, Any]:
    trainer = make_trainer(model, folder, *arguments, **options)
    trainer.train()
    return {
        "losses": [loss for (loss,) in logged(trainer, "loss")],
        "learned": learned(trainer.model),
    }


def check_same(actual: dict, expected: dict, tolerance: float = 1e-6) -> None:
    """Compare results; the default suits RMSNorm, RoPE and the loss, which compute in float32."""
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert len(expected["losses"]) == STEPS
    assert actual["learned"].keys() == expected["learned"].keys()
    for name, value in expected["learned"].items():
        error = (actual["learned"][name] - value).abs().max() / value.abs().max()
        assert error < tolerance, f"{name} is off by {error}"


# The same as padded, on one process.


# Older releases count the first label of each padded document, which no token predicts.
counts_predictions = pytest.mark.skipif(
    "_loss_shifts_labels" not in transformers.Trainer.__init__.__code__.co_names,
    reason="Trainer of this transformers divides the loss of a padded batch by too many labels",
)


@counts_predictions
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dataset", [map_style, streaming])
def test_equals_the_padded_run(dataset, accumulation, tmp_path):
    options = dict(gradient_accumulation_steps=accumulation)
    padded = train(make_model("sdpa"), tmp_path, dataset(), pad, **options)
    check_same(train(make_model(), tmp_path, dataset(), **options), padded)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    """Train with two rows per step and no other option."""
    folder = tmp_path_factory.mktemp("plain")
    return train(make_model(), folder, gradient_accumulation_steps=2)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_nothing(reentrant, plain, tmp_path):
    options = dict(
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    check_same(train(make_model(), tmp_path, **options), plain)


def test_compiled_layers_change_nothing_and_compile_once(plain, tmp_path):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = make_model()
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True, dynamic=False)
    options = dict(gradient_accumulation_steps=2, callbacks=[PackingCallback()])
    check_same(train(model, tmp_path, **options), plain)
    assert counter.frame_count == 1


@pytest.mark.parametrize("by", ["Trainer", full("hand")])
def test_a_compiled_model_is_counted_without_compiling_again(by, plain, tmp_path):
    """The callback's hook is part of the graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, callback = make_model(), PackingCallback()
    options = dict(gradient_accumulation_steps=2, callbacks=[callback])
    if by == "hand":
        model.compile(backend="aot_eager", fullgraph=True)
        trainer = make_trainer(model, tmp_path, **options)
    else:
        more = dict(torch_compile=True, torch_compile_backend="aot_eager")
        trainer = make_trainer(model, tmp_path, **options, **more)
    trainer.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    check_same(
        {"losses": sum(logged(trainer, "loss"), []), "learned": learned(trainer.model)}, plain
    )
    eager = make_trainer(make_model(), tmp_path, **options)
    eager.train()
    names = "fill", "sequences_per_step"
    assert logged(trainer, *names) == logged(eager, *names)


def with_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


@counts_predictions
def test_lora_equals_the_padded_run(tmp_path):
    options = dict(gradient_accumulation_steps=2, gradient_checkpointing=True)
    padded = train(with_lora(make_model("sdpa")), tmp_path, collator=pad, **options)
    packed = train(with_lora(make_model()), tmp_path, callbacks=[PackingCallback()], **options)
    assert all("lora" in name for name in packed["learned"])
    check_same(packed, padded)


# Several processes. Together, those of a step have the rows that one process accumulates.

FSDP = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
WRAPPERS = ["ddp", "fsdp2"]
DATASETS = {f.__name__: f for f in (map_style, streaming)}
# Otherwise accelerate lets the first process fetch for all, and it cannot send layouts.
EACH_FETCHES = {"accelerator_config": {"dispatch_batches": False}}


def shard(model):
    """Apply FSDP2 directly: accelerate supports it only on GPUs, and uses DDP elsewhere."""
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    model._is_accelerate_prepared = True  # no DDP around it
    return model


def work(rank: int, folder: str, backend: str) -> dict:
    """Return what each wrapper learns from each kind of dataset."""
    gpu = backend == "nccl"
    options = dict(use_cpu=not gpu, ddp_backend=backend, **EACH_FETCHES)
    results = {}
    for wrapper, dataset in itertools.product(WRAPPERS, DATASETS):
        model = make_model(dtype=torch.float32 if gpu else torch.float64)
        if wrapper == "fsdp2" and not gpu:
            model = shard(model)
        more = FSDP if wrapper == "fsdp2" and gpu else {}
        results[wrapper, dataset] = train_with_figures(model, folder, dataset, **options, **more)
    return results


def train_with_figures(model, folder: str, dataset: str, **options) -> dict:
    trainer = make_trainer(
        model,
        folder,
        DATASETS[dataset](),
        callbacks=[PackingCallback()],
        train_sampling_strategy="sequential",
        **options,
    )
    trainer.train()
    return {
        "losses": sum(logged(trainer, "loss"), []),
        "learned": learned(trainer.model),
        "wrapped": type(trainer.model_wrapped).__name__,
        "figures": logged(trainer, *FIGURES),
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict:
    folder = str(tmp_path_factory.mktemp("one"))
    return {
        dataset: train_with_figures(make_model(), folder, dataset, gradient_accumulation_steps=2)
        for dataset in DATASETS
    }


def check_ranks(ranks: list[dict], wrapper: str, expected: dict, tolerance: float) -> None:
    name = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPLlamaForCausalLM"}[wrapper]
    for actual in ranks:
        assert actual["wrapped"] == name
        check_same(actual, expected, tolerance)
        for ours, theirs in zip(actual["figures"], expected["figures"], strict=True):
            assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    # Both report the same speed, by the slower one's clock.
    speeds = [[figures[1] for figures in actual["figures"]] for actual in ranks]
    assert speeds[0] == speeds[1]


@pytest.fixture(scope="module")
def gloo_ranks(tmp_path_factory) -> list[dict]:
    return distributed.run(work, str(tmp_path_factory.mktemp("gloo")), "gloo")


@pytest.fixture(scope="module")
def nccl_ranks(tmp_path_factory) -> list[dict]:
    return distributed.run(work, str(tmp_path_factory.mktemp("nccl")), "nccl", backend="nccl")


@pytest.mark.full
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_processes_equal_one(wrapper, dataset, gloo_ranks, one_process):
    ranks = [results[wrapper, dataset] for results in gloo_ranks]
    check_ranks(ranks, wrapper, one_process[dataset], 1e-6)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_gpus_equal_one_process(wrapper, dataset, second_gpu, one_process, request):
    nccl_ranks = request.getfixturevalue("nccl_ranks")  # requested late, because it needs two GPUs
    ranks = [results[wrapper, dataset] for results in nccl_ranks]
    check_ranks(ranks, wrapper, one_process[dataset], 1e-3)


def test_a_model_over_two_gpus_has_one_layout_on_each(
    cuda, second_gpu, plain, tmp_path, monkeypatch
):
    model = make_model(dtype=torch.float32)
    device_map = {"model.layers.1": second_gpu.index} | dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"),
        cuda.index,
    )
    model = accelerate.dispatch_model(model, device_map=device_map)
    seen = []
    attend = cuseq.varlen_attention

    def spy(q, k, v, packed, **options):
        seen.append((packed, q.device))
        return attend(q, k, v, packed, **options)

    monkeypatch.setattr(cuseq, "varlen_attention", spy)
    result = train(model, tmp_path, gradient_accumulation_steps=2, use_cpu=False)
    check_same(result, plain, 1e-3)
    rows = [seen[i : i + 2] for i in range(0, len(seen), 2)]
    assert len(rows) == 2 * STEPS
    for row in rows:
        assert [(packed.device, at) for packed, at in row] == [(d, d) for d in (cuda, second_gpu)]
        (first, _), (second, _) = row
        assert first.to(second_gpu) is second  # moved once, not made again


# The callback's figures.


class Clock(transformers.TrainerCallback):
    """A clock before PackingCallback: a micro-batch takes a second, other work much longer."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def on_substep_end(self, *args, **kwargs) -> None:
        self.pass_time(1)

    def on_step_end(self, *args, **kwargs) -> None:
        self.pass_time(1)

    def on_train_begin(self, *args, **kwargs) -> None:
        self.pass_time(200)

    def on_prediction_step(self, *args, **kwargs) -> None:
        self.pass_time(300)

    def on_save(self, *args, **kwargs) -> None:
        self.pass_time(500)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callback, "perf_counter", clock)
    return clock


def figures_of(rows: list[list[int]], steps: int, seconds: float) -> list[float]:
    real = sum(map(sum, rows))
    return [real / (CAPACITY * len(rows)), real / seconds, sum(map(len, rows)) / steps]


@pytest.mark.parametrize("workers", [0, 1])
def test_figures(clock, workers, tmp_path):
    """Figures cover the steps since the last log, with evaluation and checkpoints in between."""
    model = make_model()
    options = dict(
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=3,
        dataloader_num_workers=workers,
    )
    before = len(model._forward_pre_hooks)
    trainer = make_trainer(model, tmp_path, callbacks=[clock, PackingCallback()], **options)
    trainer.train()
    halves = [figures_of(LENGTHS[i : i + 4], steps=2, seconds=4) for i in (0, 4)]
    assert logged(trainer, *FIGURES) == [pytest.approx(half) for half in halves]
    assert len(model._forward_pre_hooks) == before

    resumed = make_trainer(make_model(), tmp_path, callbacks=[clock, PackingCallback()], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    first, last = logged(resumed, *FIGURES)  # the first was in the checkpoint
    assert first == pytest.approx(halves[0])
    assert last == pytest.approx(figures_of(LENGTHS[6:8], steps=1, seconds=2))


class Predicts(transformers.TrainerCallback):
    """Samples the model's output after each step; runs after PackingCallback."""

    def on_step_end(self, *args, **kwargs) -> None:
        self.trainer.predict(self.trainer.eval_dataset)


def test_predicting_is_left_out(clock, tmp_path):
    predicts = Predicts()
    options = dict(train_sampling_strategy="sequential", max_steps=2, logging_steps=1)
    callbacks = [clock, PackingCallback(), predicts]
    predicts.trainer = make_trainer(make_model(), tmp_path, callbacks=callbacks, **options)
    predicts.trainer.train()
    assert clock.now > 1000 + 200 + 2 + 2 * 300
    steps = [figures_of(LENGTHS[i : i + 1], steps=1, seconds=1) for i in (0, 1)]
    assert logged(predicts.trainer, *FIGURES) == [pytest.approx(step) for step in steps]


class Fails(transformers.TrainerCallback):
    def on_substep_end(self, *args, **kwargs) -> None:
        raise RuntimeError("in the middle of a step")


def test_a_run_that_failed_is_not_counted(clock, tmp_path):
    model, callback = make_model(), PackingCallback()
    options = dict(train_sampling_strategy="sequential", gradient_accumulation_steps=2)
    trainer = make_trainer(model, tmp_path, callbacks=[Fails(), callback], **options)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    trainer = make_trainer(model, tmp_path, callbacks=[clock, callback], **options)
    trainer.train()
    steps = [figures_of(LENGTHS[i : i + 2], steps=1, seconds=2) for i in (0, 2, 4)]
    assert logged(trainer, *FIGURES) == [pytest.approx(step) for step in steps]


class Tracker(transformers.TrainerCallback):
    """A tracker like those of `report_to`."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))


def test_trackers_log_what_an_attached_callback_adds(tmp_path):
    tracker = Tracker()
    trainer = make_trainer(make_model(), tmp_path, callbacks=[tracker])
    PackingCallback().attach(trainer)
    with pytest.raises(ValueError, match="already"):
        PackingCallback().attach(trainer)
    trainer.train()
    assert [[log[name] for name in FIGURES] for log in tracker.logs] == logged(trainer, *FIGURES)
    assert len(tracker.logs) == STEPS


def test_only_a_trainer_takes_a_callback():
    for other in (None, torch.nn.Linear(2, 2)):
        name = type(other).__name__
        with pytest.raises(TypeError, match=f"trainer must be a Trainer, got {name}"):
            PackingCallback().attach(other)


def test_a_model_without_layouts_is_said(tmp_path):
    trainer = make_trainer(
        make_model("sdpa"), tmp_path, collator=pad, callbacks=[PackingCallback()], max_steps=1
    )
    with pytest.warns(UserWarning, match="packed=PackedLayout"):
        trainer.train()
    assert not set(FIGURES) & set().union(*trainer.state.log_history)


def test_other_logs_are_left_alone(clock, tmp_path):
    """They may come from one process alone, and in the middle of an interval."""
    callbacks = [clock, PackingCallback()]
    options = dict(train_sampling_strategy="sequential", max_steps=2, logging_steps=2)
    trainer = make_trainer(make_model(), tmp_path, callbacks=callbacks, **options)

    class LogsEachStep(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            trainer.log({"reward": 1.0})

    trainer.add_callback(LogsEachStep())
    trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.log({"loss": 1.0})  # belongs to no step
    *during, train_loss, after = trainer.state.log_history
    assert [set(FIGURES) <= set(entry) for entry in during] == [False, False, True]
    assert [during[-1][name] for name in FIGURES] == figures_of(LENGTHS[:2], steps=2, seconds=2)
    for entry in (train_loss, after):
        assert not set(FIGURES) & set(entry)


class Identity(nn.Module):
    def forward(self, packed: cuseq.PackedLayout) -> cuseq.PackedLayout:
        return packed


def test_no_step_waits_for_the_gpu(cuda):
    model, callback = Identity(), PackingCallback()
    packed = cuseq.PackedLayout.from_lengths([3, 5], CAPACITY).to(cuda)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        callback.on_train_begin(None, None, None, model=model)
        callback.on_step_begin()
        for _ in range(2):
            model(packed=packed)
        callback.on_step_end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (callback._real_tokens, callback._tokens, callback._sequences) == (16, 32, 4)


def is_enabled(model: nn.Module) -> bool:
    return model.config._attn_implementation == "cuseq"


def test_trainers_of_one_model_hold_it_together(tmp_path):
    """It stays enabled until the last of them is disabled, and is enabled anew if asked for."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    first, second = (
        transformers.Trainer(model, arguments, data_collator=cuseq.PackingCollator())
        for _ in range(2)
    )
    cuseq.enable(first)
    replaced = cuseq.enable(second).replaced
    cuseq.disable(first)
    assert is_enabled(model)
    cuseq.disable(second)
    assert not is_enabled(model)

    assert cuseq.enable(first).replaced == replaced
    cuseq.disable(model)  # the user's word counts for all
    assert not is_enabled(model)
    assert cuseq.enable(first).replaced == replaced
    assert is_enabled(model)
    cuseq.disable(first)
    assert not is_enabled(model)

    cuseq.enable(model)
    cuseq.enable(first)
    cuseq.disable(first)
    assert is_enabled(model)  # it was the user's before
    cuseq.disable(model)
