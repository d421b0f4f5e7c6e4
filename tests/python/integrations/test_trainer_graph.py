"""Test enable(trainer, graph=True): the numbers of the trainer without it, by its plain path."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext

import distributed
import pytest
import torch
from tiers import full
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import cuseq
from cuseq.distributed import ContextParallel
from cuseq.graphs import step as graphed_step

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from trainer_models import small_model  # noqa: E402

from cuseq.integrations.transformers import PackingCallback, unregister  # noqa: E402
from cuseq.integrations.transformers._graphed import graph_of  # noqa: E402

STEPS = 20
NO_GRAPH = "ignore:the trainer's steps run without a CUDA graph"
pytestmark = pytest.mark.filterwarnings(NO_GRAPH)


@pytest.fixture(autouse=True, scope="module")
def unregistered_afterwards():
    yield
    unregister()


class Rows(torch.utils.data.Dataset):
    """Rows of up to 32 tokens."""

    def __init__(self, count: int):
        numbers = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(count):
            lengths = torch.randint(1, 9, (4,), generator=numbers).tolist()
            ids = [torch.randint(1, 64, (n,), generator=numbers).tolist() for n in lengths]
            self.rows.append([{"input_ids": one} for one in ids])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[dict]:
        return self.rows[number]


class RowCollator(cuseq.PackingCollator):
    def __call__(self, rows: list[list[dict]]) -> dict:
        return super().__call__(rows[0])


class Recorder(transformers.TrainerCallback):
    """Notes each event with the step, the rate and whether there are gradients."""

    def __init__(self):
        self.events = []

    def note(self, name, state, model, optimizer):
        rate = optimizer.param_groups[0]["lr"] if optimizer is not None else None
        gradients = any(p.grad is not None for p in model.parameters())
        self.events.append((name, state.global_step, rate, gradients))

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.note("begin", state, model, optimizer)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.note("optimizer", state, model, optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.note("end", state, model, optimizer)

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append(("substep", state.global_step))

    def on_log(self, args, state, control, **kwargs):
        self.events.append(("log", state.global_step))

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append(("evaluate", state.global_step))


def make_model(dtype: torch.dtype = torch.float32, **options):
    return small_model(transformers.LlamaConfig, dtype=dtype, **options)


def make_trainer(
    folder, *, graph, count=64, callbacks=(), loss=None, device="cpu", shared=False, **options
):
    settings = dict(
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
    )
    arguments = transformers.TrainingArguments(str(folder), **(settings | options))
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = transformers.Trainer(
        make_model(),
        arguments,
        data_collator=RowCollator(total_tokens=32, max_seqs=6),
        train_dataset=Rows(count),
        eval_dataset=Rows(3),
        callbacks=list(callbacks),
        compute_loss_func=loss,
    )
    cp = None
    if shared:
        mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "cp"))
        cp = ContextParallel(mesh["cp"], heads=(2, 1), head_dim=16)
    cuseq.enable(trainer, graph=graph, cp=cp)
    return trainer


def logs_of(trainer) -> list[dict]:
    left_out = ("runtime", "per_second")
    return [
        {name: value for name, value in log.items() if not any(part in name for part in left_out)}
        for log in trainer.state.log_history
    ]


def compare(trainer, twin, rounding: float = 1e-5):
    for mine, theirs in zip(logs_of(trainer), logs_of(twin), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_close(mine[name], value, rtol=rounding, atol=rounding, msg=name)
    for mine, theirs in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
        assert_close(mine, theirs, rtol=rounding, atol=rounding)


def my_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return total / num_items_in_batch


OPTIONS = [
    {},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 3, "count": 7},  # the last step of an epoch has one batch
    {"max_grad_norm": 0.1},
    {"max_grad_norm": 0.0},
    {"max_grad_norm": -1.0},
    {"label_smoothing_factor": 0.1},
    {"loss": my_loss},
    {"bf16": True, "max_grad_norm": 0.0},  # clipping adds up norms in another order
    {"gradient_checkpointing": True},
    {"logging_nan_inf_filter": False, "eval_strategy": "steps", "eval_steps": 5},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
    {"optim": "sgd", "weight_decay": 0.1, "neftune_noise_alpha": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_numbers_are_those_without_a_graph(options, tmp_path):
    trainers, recorders = [], []
    for graph in (True, False):
        recorders.append(Recorder())
        callbacks = [PackingCallback(), recorders[-1]]
        trainers.append(make_trainer(tmp_path, graph=graph, callbacks=callbacks, **options))
        trainers[-1].train()
    compare(*trainers)
    assert recorders[0].events == recorders[1].events
    assert trainers[0].args.logging_nan_inf_filter == trainers[1].args.logging_nan_inf_filter


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_capture_that_fails_after_a_loss(accumulation, tmp_path, monkeypatch):
    def fail(step):
        step._loss_fn(step._batches[0].value)
        step._obstacle = "the backward waits for the device"

    monkeypatch.setattr(graphed_step, "_obstacle", lambda *_: None)
    monkeypatch.setattr(cuseq.GraphedStep, "_capture", fail)
    options = dict(gradient_accumulation_steps=accumulation)
    trainers = [make_trainer(tmp_path, graph=graph, **options) for graph in (True, False)]
    for trainer in trainers:
        trainer.train()
    compare(*trainers)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_is_resumed_equals_one_that_is_not(accumulation, tmp_path):
    options = dict(save_strategy="steps", save_steps=8, gradient_accumulation_steps=accumulation)
    twin = make_trainer(tmp_path / "a", graph=False, **options)
    twin.train()
    trainer = make_trainer(tmp_path / "b", graph=True, **options)
    trainer.train()
    compare(trainer, twin)
    resumed = make_trainer(tmp_path / "c", graph=True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    for mine, theirs in zip(resumed.model.parameters(), twin.model.parameters(), strict=True):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    saved = [
        torch.load(tmp_path / name / "checkpoint-16" / "optimizer.pt", weights_only=True)
        for name in "ab"
    ]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()


def sometimes_nan(outputs, labels, num_items_in_batch=None):
    loss = my_loss(outputs, labels, num_items_in_batch)
    return torch.where(labels.sum() % 3 == 0, loss.detach() * torch.nan, loss) + 0 * loss


@pytest.mark.parametrize("filters", [True, False])
def test_losses_that_are_not_numbers(filters, tmp_path):
    options = dict(
        loss=sometimes_nan, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.0
    )
    trainers = [
        make_trainer(tmp_path, graph=graph, logging_nan_inf_filter=filters, **options)
        for graph in (True, False)
    ]
    losses = []
    for trainer in trainers:
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert_close(losses[0], losses[1], equal_nan=True, rtol=1e-5, atol=1e-6)
    assert any(loss != loss for loss in losses[0]) != filters


def test_the_filter_that_is_set_after_enable_is_kept(tmp_path):
    trainer = make_trainer(tmp_path, graph=True)
    trainer.args.logging_nan_inf_filter = False
    trainer.train()
    assert trainer.args.logging_nan_inf_filter is False


def test_the_reason_is_told_once(tmp_path):
    trainer = make_trainer(tmp_path, graph=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(w.message) for w in told if "without a CUDA graph" in str(w.message)]
    assert told == [
        "the trainer's steps run without a CUDA graph: the parameters are on cpu, and CUDA graphs "
        "need a GPU"
    ]


def test_disable_restores_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, graph=True)
    result = cuseq.enable(trainer, graph=True)
    assert result.replaced[-1] == "training_step:Trainer"
    with pytest.raises(ValueError, match="graph must stay True until cuseq.disable, got False"):
        cuseq.enable(trainer)
    trainer.train()
    cuseq.disable(trainer)
    assert graph_of(trainer) is None
    assert not {"training_step", "_clip_grad_norm", "_get_grad_norm"} & vars(trainer).keys()
    assert "prepare_model" not in vars(trainer.accelerator)
    trainer.train()
    cuseq.enable(trainer, graph=True)
    trainer.train()


class BeforeTheStep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def test_what_would_be_wrong_in_silence_is_refused(tmp_path, monkeypatch):
    def refused(message, cls=transformers.Trainer, callbacks=(), change=None, **options):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", **options
        )
        trainer = cls(make_model(), arguments, callbacks=list(callbacks))
        if change is not None:
            change(trainer)
        with pytest.raises(ValueError, match=message):
            cuseq.enable(trainer, graph=True)
        assert trainer.model.config._attn_implementation == "sdpa"
        assert "training_step" not in vars(trainer) or change is not None

    refused("with on_pre_optimizer_step, .* got BeforeTheStep", callbacks=[BeforeTheStep()])
    refused("the compute_loss of transformers or TRL, .* got that of OwnLoss", cls=OwnLoss)
    refused("no torch_empty_cache_steps, for graph=True, got 2", torch_empty_cache_steps=2)
    refused("no auto_find_batch_size", auto_find_batch_size=True)
    refused(
        "the training_step of transformers or TRL",
        change=lambda trainer: setattr(trainer, "training_step", print),
    )
    for name in ("FSDP", "DEEPSPEED"):
        kind = accelerate.DistributedType[name]
        with monkeypatch.context() as patch:
            patch.setattr(accelerate.Accelerator, "distributed_type", kind)
            refused(f"or sharded by FSDP2, for graph=True, got {name} on 1 ranks")
    handler = accelerate.DistributedDataParallelKwargs(comm_hook="fp16")
    refused(
        "no communication hook of DDP, for graph=True, got fp16",
        change=lambda trainer: setattr(trainer.accelerator, "ddp_handler", handler),
    )
    trainer = make_trainer(tmp_path, graph=True)
    trainer.add_callback(BeforeTheStep())
    with pytest.raises(ValueError, match="got BeforeTheStep"):
        trainer.train()


def test_images_of_shared_rows_are_refused(tmp_path):
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", remove_unused_columns=False
    )
    collator = cuseq.data.MultimodalPackingCollator.__new__(cuseq.data.MultimodalPackingCollator)
    trainer = transformers.Trainer(make_model(), arguments, data_collator=collator)
    with pytest.raises(ValueError, match="cp must be None with graph=True for a Multimodal"):
        cuseq.enable(trainer, graph=True, cp=object())


def test_rows_without_one_shape_are_refused_by_name(tmp_path):
    trainer = make_trainer(tmp_path, graph=True)
    trainer.data_collator = RowCollator(total_tokens=32)
    with pytest.raises(ValueError, match="max_seqs below total_tokens = 32, its default, got 32"):
        trainer.train()
    trainer.data_collator = RowCollator(max_seqs=6)
    with pytest.raises(ValueError, match="as in example_batch"):
        trainer.train()


class LongerCollator(RowCollator):
    """Makes one row that is longer than the others."""

    def __init__(self, number: int):
        super().__init__(total_tokens=32, max_seqs=6)
        self.left = number

    def __call__(self, rows: list[list[dict]]) -> dict:
        self.left -= 1
        return (RowCollator(total_tokens=48, max_seqs=6) if self.left == 0 else super()).__call__(
            rows
        )


@pytest.mark.parametrize("steps", [1, 2])
def test_one_row_of_another_size_is_trained_too(steps, device, tmp_path):
    found = []
    for graph in (True, False):
        trainer = make_trainer(
            tmp_path, graph=graph, device=device.type, gradient_accumulation_steps=steps
        )
        trainer.data_collator = LongerCollator(15)
        says = pytest.warns(UserWarning, match=r"without its graph: batch.*\['input_ids'\] must be")
        with says if graph and device.type == "cuda" else nullcontext():
            trainer.train()
        found.append(trainer)
        assert trainer.data_collator.left < 0
    logs = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in found]
    rounding = 1e-3 if device.type == "cuda" else 1e-6
    assert_close(logs[0], logs[1], rtol=rounding, atol=rounding)


def test_a_trainer_on_a_gpu_replays_its_steps(cuda, one_gpu, tmp_path):
    del cuda, one_gpu
    for options in ({}, {"gradient_accumulation_steps": 4}, {"bf16": True}):
        twin = make_trainer(tmp_path, graph=False, device="cuda", **options)
        twin.train()
        captured = []

        class Look(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                captured.append((graph_of(trainer).step.captured, graph_of(trainer).step.reason))

        trainer = make_trainer(
            tmp_path, graph=True, device="cuda", callbacks=[Look(), PackingCallback()], **options
        )
        trainer.train()
        assert captured[-1] == (True, None)
        losses = [
            [log["loss"] for log in one.state.log_history if "loss" in log]
            for one in (trainer, twin)
        ]
        assert_close(losses[0], losses[1], rtol=2e-2 if "bf16" in options else 1e-3, atol=1e-3)
        assert type(trainer.optimizer.state_dict()["param_groups"][0]["lr"]) is float


# --------------------------------------------------------------------------------- several ranks

QUICK = [  # averages, batches that add up to a step, clipping, shared rows
    {},
    {"gradient_accumulation_steps": 3, "count": 14},  # the last step of an epoch has one batch
    {"max_grad_norm": 0.1, "optim": "sgd", "weight_decay": 0.1},  # which feels a gradient's size
    {"shared": True, "gradient_accumulation_steps": 3, "count": 7, "eval_strategy": "epoch"},
]
ON_RANKS = [
    *QUICK,
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 3, "count": 2, "max_steps": 3},  # a step of one batch each
    {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "count": 14},
    {"loss": my_loss, "average_tokens_across_devices": False},
    {"eval_strategy": "steps", "eval_steps": 5},
    {"shared": True},
]


class NotesCapture(transformers.TrainerCallback):
    """Notes whether the last step was captured."""

    def on_step_end(self, args, state, control, **kwargs):
        step = None if self.graph is None else self.graph.step
        self.captured = step is not None and (step.captured, step.reason)


def train_on_ranks(rank: int, folder: str, device: str, options: dict, seed: int) -> dict:
    found = {}
    for graph in (True, False):
        notes = NotesCapture()
        trainer = make_trainer(
            folder, graph=graph, callbacks=[notes], device=device,
            ddp_backend="nccl" if device == "cuda" else "gloo", **options
        )  # fmt: skip
        notes.graph = graph_of(trainer)
        if seed and rank == 1:  # accelerate gives all ranks the weights of the first
            for parameter in trainer.model.parameters():
                parameter.data += 1
        trainer.train()
        weights = [distributed.whole(p).detach().cpu() for p in trainer.model.parameters()]
        found[graph] = {"logs": logs_of(trainer), "weights": weights, "captured": notes.captured}
    return found


def check_on_ranks(ranks: list[dict], rounding: float) -> None:
    for found in ranks:
        mine, theirs = found[True], found[False]
        for log, expected in zip(mine["logs"], theirs["logs"], strict=True):
            assert log.keys() == expected.keys()
            for name, value in expected.items():
                assert_close(log[name], value, rtol=rounding, atol=rounding, msg=name)
        assert_close(mine["weights"], theirs["weights"], rtol=rounding, atol=rounding)
    assert all(map(torch.equal, ranks[0][True]["weights"], ranks[1][True]["weights"]))


@pytest.mark.parametrize(
    "options",
    [one if one in QUICK else full(one) for one in ON_RANKS],
    ids=lambda options: "-".join(options) or "plain",
)
def test_ranks_have_the_numbers_of_ddp(options, tmp_path):
    ranks = distributed.run(train_on_ranks, str(tmp_path), "cpu", options, 0, limit=240)
    check_on_ranks(ranks, rounding=1e-4)


def test_ranks_begin_with_the_weights_of_the_first(tmp_path):
    ranks = distributed.run(train_on_ranks, str(tmp_path), "cpu", {}, 1, limit=240)
    check_on_ranks(ranks, rounding=1e-4)


def train_again(rank: int, folder: str, kind: str) -> dict:
    """Train with and without the graph, one after the other, or each process for itself."""
    options = {"ddp_backend": "gloo", "bf16": True}
    if kind == "graph_first":
        trainer = make_trainer(folder, graph=True, **options)
        trainer.train()
        cuseq.disable(trainer)
        trainer.train()
        wrapped = type(trainer.model_wrapped).__name__
        return {"wrapped": wrapped, "weights": [p.detach() for p in trainer.model.parameters()]}
    trainer = make_trainer(folder, graph=False, **options)
    trainer.train()
    cuseq.disable(trainer)
    with pytest.raises(ValueError, match="got the DistributedDataParallel of an earlier run"):
        cuseq.enable(trainer, graph=True)
    return {"wrapped": None, "weights": []}


def test_a_model_is_prepared_again_for_ddp_after_the_graph(tmp_path):
    first, second = distributed.run(train_again, str(tmp_path), "graph_first", limit=240)
    assert first["wrapped"] == "DistributedDataParallel"
    assert all(map(torch.equal, first["weights"], second["weights"]))


def test_a_model_that_ddp_holds_is_refused(tmp_path):
    distributed.run(train_again, str(tmp_path), "ddp_first", limit=240)


def apart(rank: int, folder: str) -> list[list[torch.Tensor]]:
    """Train with torch.distributed initialised, but not by torchrun: each process has its model."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    found = []
    for graph in (True, False):
        # AdamW divides by gradients, and so enlarges the rounding of small ones.
        trainer = make_trainer(f"{folder}/{rank}", graph=graph, optim="sgd")
        trainer.model.lm_head.weight.data += rank
        trainer.train()
        found.append([p.detach() for p in trainer.model.parameters()])
    return found


def test_processes_that_train_apart_stay_apart(tmp_path):
    first, second = distributed.run(apart, str(tmp_path), limit=240)
    for mine, theirs in (first, second):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(first[0][-1], second[0][-1])


FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
ON_GPUS = [
    *ON_RANKS,
    FSDP2,
    FSDP2 | {"gradient_accumulation_steps": 3, "count": 14, "bf16": True},
    FSDP2 | {"shared": True},
]


@pytest.mark.parametrize("options", ON_GPUS, ids=lambda options: "-".join(options) or "plain")
def test_two_gpus_have_the_numbers_of_ddp(options, second_gpu, tmp_path):
    del second_gpu
    ranks = distributed.run(
        train_on_ranks, str(tmp_path), "cuda", options, 0, limit=240, backend="nccl"
    )
    check_on_ranks(ranks, rounding=2e-3)
    if "count" not in options and "optim" not in options:  # then its last step may be captured
        assert [found[True]["captured"] for found in ranks] == [(True, None)] * 2
