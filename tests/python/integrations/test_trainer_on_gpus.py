"""Test a Trainer on rows that two GPUs share, over NCCL: it learns what one GPU learns.

Two processes over gloo run the same code without GPUs, where FSDP2 needs a change to accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from tiers import full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import cuseq
from cuseq.distributed import ContextParallel

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from trainer_models import SAVING, SETTINGS, documents, small_model  # noqa: E402

from cuseq.integrations.transformers import _trainer  # noqa: E402

# `save_model` of older releases saves nothing of a sharded model.
SAVES_SHARDED = Version(transformers.__version__) >= Version("5.17")
STEPS = 6
MEASURES = ("loss", "grad_norm", "eval_loss")
# What shards the model, and who made the mesh: DDP and cuseq's user, FSDP2 and cuseq's user, FSDP2
# and accelerate. "bf16" is the latter in mixed precision; the others compute in float64.
KINDS = ("ddp", "fsdp", "config", "bf16")
TOLERANCES = {"float64": 1e-6, "bf16": 2e-2}
# How far apart two runs may leave a weight, as a part of how far training moved it.
APART = {"float64": 1e-6, "bf16": 0.1}


def precision_of(kind: str) -> str:
    return "bf16" if kind == "bf16" else "float64"


def make_model(precision: str) -> torch.nn.Module:
    dtype = torch.float32 if precision == "bf16" else torch.float64
    return small_model(transformers.Qwen3Config, dtype=dtype)


def make_trainer(folder: str, device: str, precision: str, **options: Any) -> Any:
    settings = SETTINGS | dict(
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        eval_steps=3,
        bf16=precision == "bf16",
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
    )
    return transformers.Trainer(
        make_model(precision),
        transformers.TrainingArguments(folder, **settings | options),
        data_collator=cuseq.PackingCollator(),
        train_dataset=documents(60, seed=0),
        eval_dataset=documents(5, seed=1),
    )


def share(trainer: Any, device: str) -> Any:
    """Let both ranks share the rows of a trainer, by accelerate's mesh if it has one."""
    if trainer.accelerator.parallelism_config is None:
        mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "cp"))
    else:
        mesh = trainer.accelerator.torch_device_mesh
    cuseq.enable(trainer, cp=ContextParallel(mesh["cp"], heads=(2, 1), head_dim=16))
    return trainer


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return whole weights on the host; every rank calls it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some gathered, in the dtype of the forward
    found = {name: distributed.whole(w.detach()) for name, w in model.named_parameters()}
    return {name: weight.cpu().clone() for name, weight in found.items()}


def result(trainer: Any) -> dict[str, Any]:
    """Train, and return the measures of each log and the weights."""
    trainer.train()
    history = trainer.state.log_history
    logs = {name: [float(log[name]) for log in history if name in log] for name in MEASURES}
    logs["later eval_loss"] = [trainer.evaluate()["eval_loss"]]
    return {"logs": logs, "learned": weights(trainer.model)}


def allow_fsdp_on_cpus() -> None:
    """Let accelerate shard models on CPUs too, where it takes DDP whatever it is told."""
    init = AcceleratorState.__init__

    def init_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init_with_fsdp


def options_of(kind: str) -> dict[str, Any]:
    """Return the arguments that a user would give for one of KINDS."""
    if kind == "ddp":
        return {}
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    options: dict[str, Any] = dict(fsdp=True, fsdp_config=layers)
    if kind != "fsdp":
        options["parallelism_config"] = accelerate.ParallelismConfig(cp_size=2)
    return options


@contextmanager
def counting_gathers() -> Iterator[list[None]]:
    """Yield a list that gets longer with each gather of weights."""
    # torch 2.13 renamed the function.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, begun = getattr(dist, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        begun.append(None)
        return gather(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counted)
        yield begun


def count_gathers(trainer: Any) -> list[int]:
    """Return a list to which each backward of a trainer adds how often it gathered weights."""
    backward = trainer.accelerator.backward
    counts: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> None:
        with counting_gathers() as begun:
            backward(*args, **kwargs)
        counts.append(len(begun))

    trainer.accelerator.backward = counting
    return counts


def work(rank: int, folder: str, device: str, kind: str) -> dict[str, Any]:
    """Train on shared rows, and once more with a stop in the middle."""
    if device == "cpu":
        allow_fsdp_on_cpus()
    trainer = share(make_trainer(folder, device, precision_of(kind), **options_of(kind)), device)
    gathers = count_gathers(trainer)
    found = {"whole": result(trainer), "gathers": gathers}
    assert isinstance(trainer.model, FSDPModule) == (kind != "ddp")
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, DTensor) == (kind != "ddp")
    if isinstance(weight, DTensor):
        assert weight.device_mesh.size() == 2 and weight.to_local().shape[0] == len(weight) // 2
    assert trainer.accelerator.device.type == device
    assert trainer.get_total_train_batch_size(trainer.args) == 6
    layers = [layer.self_attn for layer in trainer.model.model.layers]
    assert not any(layer._forward_pre_hooks for layer in layers)  # accelerate's, that drop masks
    if SAVES_SHARDED:
        trainer.save_model(f"{folder}/final")
        dist.barrier()
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final", dtype="auto")
        found["saved"] = weights(saved)
    if kind != "bf16":
        found["resumed"] = resumed(f"{folder}/again", device, kind)
    return found


def resumed(folder: str, device: str, kind: str) -> tuple[dict, dict]:
    """Return what a run learns, and what one learns that goes on from its checkpoint."""
    uncut = share(make_trainer(folder, device, "float64", **SAVING, **options_of(kind)), device)
    first = result(uncut)
    again = make_trainer(f"{folder}/more", device, "float64", **SAVING, **options_of(kind))
    torch.nn.init.normal_(again.model.lm_head.weight)
    if device == "cpu":  # transformers would load moments to "cpu:0", which torch.load has not
        vars(again.args)["_setup_devices"] = torch.device("cpu")
    share(again, device)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert again.state.global_step == 6
    return first["learned"], weights(again.model)


Alone = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Alone:
    """Return a function that trains in this process, without sharing rows."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def train(device: str, precision: str) -> dict[str, Any]:
        if (device, precision) not in found:
            folder = str(tmp_path_factory.mktemp("alone"))
            with pytest.MonkeyPatch.context() as patch:
                if device == "cuda":  # a Trainer would spread its model over further GPUs
                    patch.setattr(torch.cuda, "device_count", lambda: 1)
                trainer = make_trainer(folder, device, precision)
                cuseq.enable(trainer)
                found[device, precision] = result(trainer)
        return found[device, precision]

    return train


def check(device: str, kind: str, alone: Alone, folder: Path) -> None:
    """Compare what two ranks learn of shared rows with what one learns of whole ones."""
    backend = "nccl" if device == "cuda" else "gloo"
    ranks = distributed.run(work, str(folder), device, kind, limit=180, backend=backend)
    precision = precision_of(kind)
    expected, tolerance = alone(device, precision), TOLERANCES[precision]
    start = dict(make_model(precision).named_parameters())
    assert len(expected["logs"]["loss"]) == STEPS and len(expected["logs"]["eval_loss"]) >= 2
    for found in ranks:
        of_run = found["whole"]
        # A backward after an evaluation gathers no more than others: PyTorch 2.11 may write the
        # surplus over the weights of the next batch.
        first, *others = found["gathers"]
        assert others == [first] * (2 * STEPS - 1) and (first > 0) == (kind != "ddp")
        for name, values in expected["logs"].items():
            assert of_run["logs"][name] == pytest.approx(values, rel=tolerance), name
        for name, value in of_run["learned"].items():
            apart = (value - expected["learned"][name]).norm()
            moved = (expected["learned"][name] - start[name]).norm()
            assert apart <= APART[precision] * moved, f"{name}: {apart} apart, moved by {moved}"
            if SAVES_SHARDED:
                torch.testing.assert_close(found["saved"][name], value, rtol=0, atol=0)
        if kind != "bf16":
            first, again = found["resumed"]
            apart = {n: (again[n] - value).abs().max().item() for n, value in first.items()}
            assert not any(apart.values()), f"a resumed run is not bit-equal: {apart}"


def gathers_of(rank: int, kind: str, device: str) -> tuple[list[str], list[int], list[bool]]:
    """Return the units that were told what to gather, the gathers of three backwards of a model
    that is sharded as accelerate does it, and whether forwards had the embeddings that they should.
    An evaluation comes before the second backward.
    """
    tied = kind == "tied"
    model = small_model(transformers.Qwen3Config, dtype=torch.float64, tie_word_embeddings=tied).to(
        device
    )
    embeddings, tail = model.model.embed_tokens, [model.model.norm, model.lm_head]
    embeddings.requires_grad_(kind != "frozen")
    weight = embeddings.weight.detach().clone()
    seen: list[Tensor] = []
    # Before FSDP2's own hook, which frees what was gathered.
    embeddings.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    for layer in model.model.layers:
        fully_shard(layer)
    if tied:
        tail.insert(1, embeddings)
    else:
        fully_shard(embeddings)
    fully_shard(tail, reshard_after_forward=False)
    fully_shard(model)
    told: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    tell = FSDPModule.set_modules_to_backward_prefetch

    def telling(self: Any, modules: list[Any]) -> None:
        assert modules == [self]
        told.append(names[self])
        tell(self, modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_modules_to_backward_prefetch", telling)
        _trainer._GathersWhatIsNeeded().on_train_begin(None, None, None, model=model)
    counts, ids = [], torch.arange(12, device=device).view(1, -1)
    for step in range(3):
        # A batch of an accumulation: gradients are neither averaged nor waited for.
        model.set_requires_gradient_sync(step == 0)
        loss = model(input_ids=ids, labels=ids).loss
        with counting_gathers() as begun:
            loss.backward()
        counts.append(len(begun))
        if step == 0:
            with torch.no_grad():
                for _ in range(5):
                    model(input_ids=ids, labels=ids)
    return told, counts, [torch.equal(one, weight) for one in seen]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("kind", "told", "gathered"),
    [
        ("trained", ["model.embed_tokens"], 3),
        ("frozen", ["model.embed_tokens", "model.layers.0"], 2),
        ("tied", [], 2),
    ],
)
def test_backwards_gather_what_they_need(kind, told, gathered, backend, request, monkeypatch):
    """The two layers, and embeddings that are trained; the head is kept."""
    if backend == "nccl":
        request.getfixturevalue("second_gpu")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # FSDP2 shards over the GPUs that it sees
    device = "cuda" if backend == "nccl" else "cpu"
    for found in distributed.run(gathers_of, kind, device, backend=backend):
        assert found == (told, [gathered] * 3, [True] * 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_that_share_rows_learn_what_one_learns(kind, second_gpu, alone, tmp_path):
    check("cuda", kind, alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", full("config"), full("bf16")])
def test_processes_that_shard_a_model_learn_what_one_learns(kind, alone, tmp_path, monkeypatch):
    """DDP in processes is tested in test_trainer_shared_rows.py."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # accelerate takes the GPU that it sees
    check("cpu", kind, alone, tmp_path)
