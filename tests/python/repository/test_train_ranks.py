"""Test examples/train.py on several ranks: losses, checkpoints, signals, and mistakes of users."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import distributed
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.utils._pytree import tree_flatten_with_path

import cuseq

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 10
HALF = STEPS // 2
DOCUMENTS = 300  # more than ten steps use, fewer than twenty
UNCUT = 300  # steps, for a run that a signal is to stop
# The processes of a test may have none of their own, which would load the data.
ON_GPUS = ["--device", "cuda", "--workers", "0"]
FP32 = [*ON_GPUS, "--precision", "fp32"]


def import_example(name: str) -> Any:
    """Import a module of the example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """Return options for documents of several lengths and a small model, as a config file."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": f"{i} green bottles. " * (i % 7 + 1)}) for i in range(DOCUMENTS)]
    (folder / "bottles.jsonl").write_text("\n".join(lines))
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    return [
        *("--data", str(folder / "bottles.jsonl")),
        *("--model", str(folder / "config.json")),
        *("--device", "cpu", "--row-length", "256", "--vocab-size", "300"),
        *("--steps", str(STEPS), "--learning-rate", "1e-3", "--keep", "9"),
    ]


def train(out: Path, *options: object) -> tuple[list[dict], list[list[int]]]:
    """Train in this process's group; return the log, and the samples of this rank's rows."""
    ranks_module, data = import_example("_ranks"), import_example("_rank_data")
    parsed = import_example("_ranks_options").parse_options(None, [*map(str, options)])
    if parsed.resume is None:
        parsed.out = out
    device = parsed.device.type
    ranks = import_example("_mesh").make_ranks(device, parsed.dp_replicate, parsed.cp)
    seen: list[list[int]] = []

    class Recorded(data.TokenStore):
        def __getitems__(self, indices: list[int]) -> list:
            seen.append(indices)
            return [self[index] for index in indices]

    before, ranks_module.TokenStore = ranks_module.TokenStore, Recorded
    try:
        ranks_module.run(parsed, ranks)
    finally:
        ranks_module.TokenStore = before
    dist.barrier()
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()], seen


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def copy_run(source: Path, target: Path, step: int) -> Path:
    """Copy a run as it was when its checkpoint of `step` was the newest, once for all ranks."""
    if dist.get_rank() == 0:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("step-*"))
        shutil.copytree(checkpoint(source, step), checkpoint(target, step))
    dist.barrier()
    return target


def basic_runs(rank: int, folder: Path, inputs: list[str]) -> dict[str, Any]:
    """Train, resume, share rows, and stop by a signal."""
    outcome: dict[str, Any] = {}
    outcome["whole"] = train(folder / "whole", *inputs, "--save-every", HALF)
    outcome["seed"] = torch.initial_seed()
    half = copy_run(folder / "whole", folder / "half", HALF)
    outcome["resumed"] = train(half, "--resume", half)
    outcome["shared rows"] = train(folder / "cp", *inputs, "--save-every", HALF, "--cp", 2)
    copies = (*inputs, "--save-every", HALF, "--no-shard")
    outcome["copies"] = train(folder / "copies", *copies)
    half = copy_run(folder / "copies", folder / "half of copies", HALF)
    outcome["resumed copies"] = train(half, *copies, "--resume", half)
    half = copy_run(folder / "copies", folder / "copies, then shards", HALF)
    outcome["copies, then shards"] = train(half, *inputs, "--shard", "--resume", half)
    half = copy_run(folder / "whole", folder / "shards, then copies", HALF)
    outcome["shards, then copies"] = train(half, *copies, "--resume", half)
    outcome["stopped"] = stopped_by_a_signal(rank, folder / "stopped", inputs)
    return outcome


def two_ranks(rank: int, folder: Path, inputs: list[str]) -> dict[str, Any]:
    """Make the basic runs, train GPT-2 and OLMo 2, and save to a full disk."""
    outcome = basic_runs(rank, folder, inputs)
    options = ("--model", folder / "gpt2.json", "--cp", 2)
    outcome["gpt2"] = train(folder / "gpt2", *inputs, *options)[0]
    outcome["small units"] = in_small_units(folder / "small", *inputs, "--no-reshard-after-forward")
    olmo = (*inputs, "--model", folder / "olmo2.json", "--precision", "bf16")
    outcome["bf16"] = train(folder / "bf16", *olmo)[0]
    outcome["bf16, small units"] = in_small_units(folder / "bf16-small", *olmo)
    copies = ("--no-shard", "--cp", 2, "--accumulation", 2, "--compile", "--recompute")
    outcome["copies that share rows"] = train(folder / "cp copies", *inputs, *copies)[0]
    outcome["bf16 copies"] = train(folder / "bf16 copies", *olmo, "--no-shard")[0]
    copies = ("--no-shard", "--cp", 2, "--precision", "bf16")
    outcome["bf16 copies that share rows"] = train(folder / "bf16 cp", *inputs, *copies)[0]
    outcome["full"] = with_a_full_disk(rank, folder / "full", inputs)
    outcome["refused"] = refused_on_one_rank(rank)
    return outcome


def refused_on_one_rank(rank: int) -> str:
    """Let rank 1 alone find a mistake, and return what this rank raises."""
    documents, mesh = import_example("_documents"), import_example("_mesh")

    def read() -> int:
        if rank == 1:
            raise documents.UserError("no such file")
        return rank

    with pytest.raises(documents.UserError) as raised:
        mesh.make_ranks("cpu", 1, 1).on_each(read)
    return str(raised.value)


def in_small_units(out: Path, *options: object) -> list[dict]:
    """Train with each layer sharded by itself; return the log."""
    sharding = import_example("_sharding")
    before, sharding.UNIT_WEIGHTS = sharding.UNIT_WEIGHTS, 1
    try:
        return train(out, *options)[0]
    finally:
        sharding.UNIT_WEIGHTS = before


def stopped_by_a_signal(rank: int, out: Path, inputs: list[str]) -> Any:
    """Send SIGTERM to rank 1 alone, in its third step."""
    training = import_example("_rank_training")
    step = training.Trained.step

    def step_with_signal(self: Any, batches: list, number: int) -> Any:
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches, number)

    training.Trained.step = step_with_signal
    try:
        return train(out, *inputs)
    finally:
        training.Trained.step = step


def with_a_full_disk(rank: int, out: Path, inputs: list[str]) -> tuple[str | None, list[str]]:
    """Let the disk of rank 1 be full in the second save; return the error and what is left."""
    module = import_example("_checkpoint")
    save = module.Checkpoints.save

    def save_on_a_full_disk(self: Any, state: dict, step: int, facts: dict) -> None:
        if step == STEPS and rank == 1:
            checkpoint(out, step).mkdir(parents=True, exist_ok=True)
            (checkpoint(out, step) / "__1_0.distcp").symlink_to("/dev/full")
        save(self, state, step, facts)

    module.Checkpoints.save = save_on_a_full_disk
    error = None
    try:
        train(out, *inputs, "--save-every", HALF)
    except import_example("_documents").UserError as raised:
        error = str(raised)
    finally:
        module.Checkpoints.save = save
    dist.barrier()
    return error, sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of the runs of two ranks, and what each rank saw."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "gpt2.json").write_text(json.dumps(gpt2(attn_pdrop=0.0).to_dict()))
    (folder / "olmo2.json").write_text(json.dumps(olmo2().to_dict()))
    return folder, distributed.run(two_ranks, folder, inputs, limit=240)


@pytest.fixture
def one_rank(tmp_path):
    """Make this process a group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(log: list[dict]) -> list[float]:
    return [line["loss"] for line in log]


def test_two_ranks_have_the_losses_of_one(runs, one_rank, inputs, tmp_path):
    log, seen = train(tmp_path / "one", *inputs, "--accumulation", 2)
    _, of_ranks = runs
    assert losses(log) == pytest.approx(losses(of_ranks[0]["whole"][0]), rel=1e-5)
    assert [line["tokens"] for line in log] == [line["tokens"] for line in of_ranks[0]["whole"][0]]
    assert log[-1]["loss"] < log[0]["loss"]


def test_ranks_that_share_rows_have_the_losses_of_one(runs, one_rank, inputs, tmp_path):
    """Also if one rank continues what two ranks that share rows began."""
    folder, of_ranks = runs
    log, seen = train(tmp_path / "one", *inputs)
    for outcome in of_ranks:
        shared, samples = outcome["shared rows"]
        assert losses(shared) == pytest.approx(losses(log), rel=1e-5)
        assert [line["tokens"] for line in shared] == [line["tokens"] for line in log]
        assert samples == seen
    out = copy_run(folder / "cp", tmp_path / "continued", HALF)
    continued, rest = train(out, *inputs, "--cp", 1, "--resume", out)
    assert losses(continued) == pytest.approx(losses(log), rel=1e-5)
    assert rest == seen[HALF:]


def check_copies(folder: Path, of_ranks: list[dict[str, Any]], log: list[dict], rel: float) -> None:
    """Check runs of ranks that each hold the whole model against the log of the same rows."""
    for outcome in of_ranks:
        for name in (
            "copies", "resumed copies", "copies, then shards", "shards, then copies",
        ):  # fmt: skip
            assert losses(outcome[name][0]) == pytest.approx(losses(log), rel=rel), name
        check_equal_logs(outcome["resumed copies"][0], outcome["copies"][0])
    whole, resumed = (tensors_of(checkpoint(folder / run, STEPS)) for run in
                      ("copies", "half of copies"))  # fmt: skip
    assert len(whole) > 50 and list(whole) == list(resumed)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    of_shards = tensors_of(checkpoint(folder / "whole", STEPS))
    assert {name: t.shape for name, t in whole.items()} == {
        name: t.shape for name, t in of_shards.items()
    }


def test_copies_on_all_ranks_have_the_losses_of_one(runs, one_rank, inputs, tmp_path):
    """Also if ranks that shard the model continue what these began, or these what they began."""
    folder, of_ranks = runs
    log, _ = train(tmp_path / "one", *inputs, "--accumulation", 2)
    check_copies(folder, of_ranks, log, rel=1e-5)
    for outcome in of_ranks:
        shared = outcome["copies that share rows"]
        assert losses(shared) == pytest.approx(losses(log), rel=1e-5)
        # The precisions of FSDP2 and of autocast are not the same.
        assert losses(outcome["bf16 copies"]) == pytest.approx(losses(outcome["bf16"]), rel=2e-3)
        shared, exact = outcome["bf16 copies that share rows"], outcome["shared rows"][0]
        assert losses(shared) == pytest.approx(losses(exact), rel=2e-3)


def test_copies_are_whole_and_compute_in_bf16(one_rank, inputs, tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    training, seen = import_example("_rank_training"), []
    step = training.Trained.step

    def watched(self: Any, batches: list, number: int) -> Any:
        assert type(self.model) is DistributedDataParallel and not self.model.broadcast_buffers
        assert {type(weight) for weight in self.model.parameters()} == {torch.nn.Parameter}
        layer = self.model.module.model.layers[1]
        for module in (layer.self_attn.q_proj, layer.mlp.down_proj, layer):
            module.register_forward_hook(lambda m, given, out: seen.append(out.dtype))
        return step(self, batches, number)

    with mock.patch.object(training.Trained, "step", watched):
        train(tmp_path / "run", *inputs, "--steps", 1, "--no-shard", "--precision", "bf16")
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("model", ["mixture of experts", "model with parts beside"])
def test_models_that_ddp_cannot_train_are_refused(model):
    from transformers import Gemma3Config

    config = mixtral() if model == "mixture of experts" else Gemma3Config()
    with pytest.raises(import_example("_documents").UserError, match=f"--no-shard.*{model}"):
        import_example("_sharding").check_copies(config)


def updated(rank: int, mesh: Any, max_norm: float, clip: Any, optimizer_of: Any) -> list:
    """Train a sharded model for three steps; return norms, weights and averages of gradients."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    # Some ranks have no part of weights of one row.
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    weights = list(model.parameters())
    optimizer = optimizer_of(weights, lr=0.1, eps=1.0)
    norms = []
    for step in range(3):
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank + step))
        (100 * model(rows)).square().sum().backward()
        norms.append(clip(weights, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    averages = [optimizer.state[weight]["exp_avg"] for weight in weights]
    return [distributed.whole(value).detach() for value in (*norms, *weights, *averages)]


def updates(rank: int) -> list[tuple[list, list]]:
    """Return the outcomes of PyTorch's functions and of the example's, for meshes and limits."""
    from torch.distributed.device_mesh import init_device_mesh

    module, outcomes = import_example("_updates"), []
    for shape, names in (((2,), ("shard",)), ((2, 1), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for max_norm in (1e-2, 1e6):
            theirs = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW
            ours = module.clip_grad_norm, module.AdamW
            outcomes.append(
                tuple(updated(rank, mesh, max_norm, *functions) for functions in (theirs, ours))
            )
    return outcomes


def test_shards_are_clipped_and_updated_as_by_pytorch():
    for outcomes in distributed.run(updates):
        for theirs, ours in outcomes:
            torch.testing.assert_close(ours, theirs)
        (_, clipped), (_, unclipped), *_ = outcomes
        assert not torch.equal(clipped[3], unclipped[3])  # the lower limit clips


def test_an_update_works_on_plain_tensors(one_rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = torch.nn.Linear(3, 2)
    fully_shard(model)
    optimizer = import_example("_updates").AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    module = importlib.import_module("torch.optim.adam")  # torch.optim has no such attribute
    with mock.patch.object(module, "adam", wraps=module.adam) as update:
        optimizer.step()
    weights, gradients, averages, squares, *_ = update.call_args.args
    assert len(weights) == 2
    assert not any(
        isinstance(tensor, DTensor)
        for tensors in (weights, gradients, averages, squares)
        for tensor in tensors
    )


def test_a_part_of_a_row_has_the_keys_of_a_row(one_rank):
    collate = import_example("_rank_data").Collate
    examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    cp = cuseq.distributed.ContextParallel(dist.group.WORLD)
    assert collate(8, cp)(examples).keys() == collate(8, None)(examples).keys()


def compiled(rank: int, out: Path, inputs: list[str]) -> list[dict]:
    """Train with compiled and recomputed layers that exchange keys."""
    return in_small_units(out, *inputs, "--cp", 2, "--compile", "--recompute")


@pytest.mark.full
def test_compiled_layers_share_rows(runs, inputs, tmp_path):
    of_ranks = distributed.run(compiled, tmp_path, inputs, limit=400)
    shared, _ = runs[1][0]["shared rows"]
    assert losses(of_ranks[0]) == pytest.approx(losses(shared), rel=1e-5)


def test_shared_rows_have_a_group_of_their_own(one_rank):
    """FSDP2's collectives in the same group would run before those of attention."""
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    assert ranks.mesh.get_group("cp") not in (dist.group.WORLD, ranks.sharding.get_group())


def test_units_and_kept_weights_change_no_bit(runs):
    """OLMo 2's layers get a rotation in fp32, which FSDP2 must not cast in some of them."""
    whole, _ = runs[1][0]["whole"]
    bf16 = runs[1][0]["bf16"]
    for log, expected in (("small units", whole), ("bf16, small units", bf16)):
        for name in ("loss", "grad_norm"):
            assert [line[name] for line in runs[1][0][log]] == [line[name] for line in expected]


def pairs_of_ranks(rank: int, out: Path, inputs: list[str]) -> list[dict]:
    """Train on two rows a step, each shared by two ranks."""
    return train(out, *inputs, "--steps", 30, "--cp", 2)[0]


@pytest.mark.full
def test_pairs_of_ranks_that_share_rows_have_the_losses_of_one(one_rank, inputs, tmp_path):
    log, _ = train(tmp_path / "one", *inputs, "--steps", 30, "--accumulation", 2)
    of_ranks = distributed.run(pairs_of_ranks, tmp_path / "four", inputs, processes=4, limit=240)
    for shared in of_ranks:
        assert losses(shared) == pytest.approx(losses(log), rel=1e-5)
        assert [line["tokens"] for line in shared] == [line["tokens"] for line in log]
    assert len(log) == 30 and log[-1]["loss"] < log[0]["loss"]


def copies(rank: int, out: Path, inputs: list[str]) -> list[dict]:
    """Train two copies of the model, each sharded over two ranks."""
    return in_small_units(out, *inputs, "--dp-replicate", 2, "--recompute")


@pytest.mark.full
def test_copies_of_a_sharded_model_have_the_losses_of_one_rank(one_rank, inputs, tmp_path):
    log, _ = train(tmp_path / "one", *inputs, "--accumulation", 4)
    of_ranks = distributed.run(copies, tmp_path / "four", inputs, processes=4, limit=240)
    assert losses(of_ranks[0]) == pytest.approx(losses(log), rel=1e-5)


def test_a_run_that_resumes_on_as_many_ranks_is_bit_equal(runs):
    check_resumed(*runs)


def check_equal_logs(log: list[dict], expected: list[dict]) -> None:
    """Check that the numbers of two logs that do not depend on time are bit-equal."""
    keys = ("step", "loss", "grad_norm", "tokens", "balance")
    for line, other in zip(log, expected):
        assert {key: line[key] for key in keys} == {key: other[key] for key in keys}
    assert len(log) == len(expected)


def check_resumed(folder: Path, of_ranks: list[dict[str, Any]]) -> None:
    """Check that the resumed run of two ranks is bit-equal to the whole one."""
    for outcome in of_ranks:
        (whole, samples), (resumed, samples_after) = outcome["whole"], outcome["resumed"]
        check_equal_logs(resumed, whole)
        assert samples_after == samples[HALF:]
    whole, resumed = (tensors_of(checkpoint(folder / run, STEPS)) for run in ("whole", "half"))
    assert len(whole) > 50 and list(whole) == list(resumed)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights, moments and random numbers of a checkpoint, by name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder / "together.pt")
    leaves = tree_flatten_with_path(torch.load(folder / "together.pt"))[0]
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def test_another_number_of_ranks_repeats_and_loses_no_sample(runs, one_rank, inputs, tmp_path):
    """Two ranks begin an epoch, one goes on, and three end it."""
    folder, of_ranks = runs
    out = copy_run(folder / "whole", tmp_path / "one", HALF)
    log, of_one = train(out, *inputs, "--save-every", HALF, "--resume", out)
    check_samples(of_ranks, out, log, of_one)


def check_samples(
    of_ranks: list[dict[str, Any]], out: Path, log: list[dict], of_one: list[list[int]]
) -> None:
    """Check that each sample is in one row, of two ranks, of one after them, or of three."""
    assert losses(log)[:HALF] == losses(of_ranks[0]["whole"][0])[:HALF]
    assert len(of_one) == STEPS - HALF
    of_two = [row for outcome in of_ranks for row in outcome["whole"][1][:HALF]]
    manifest = json.loads((checkpoint(out, STEPS) / "manifest.json").read_text())
    of_three = [row for rank in range(3) for row in rest_of_epoch(out, manifest["rows"], rank, 3)]
    assert of_three
    counts = Counter(sample for row in of_two + of_one + of_three for sample in row)
    assert counts == Counter(range(DOCUMENTS))


def rest_of_epoch(out: Path, position: dict, rank: int, ranks: int) -> list[list[int]]:
    """Return the samples of the rows that a rank still has in the epoch of a position."""
    data = import_example("_rank_data")
    seen: list[list[int]] = []

    class Recorded(data.TokenStore):
        def __getitems__(self, indices: list[int]) -> list:
            seen.append(indices)
            return [self[index] for index in indices]

    place = SimpleNamespace(dp_rank=rank, dp_size=ranks, device=torch.device("cpu"))
    rows = data.RankRows(Recorded(out / "data"), place, row_length=256, accumulation=1, seed=0)
    rows.load_state_dict(position)
    for _ in rows:
        if rows.state_dict()["epoch"] != position["epoch"]:
            return seen[:-1]
    raise AssertionError("rows end")


def test_a_position_at_the_end_of_an_epoch_starts_the_next(runs):
    folder, _ = runs
    position = json.loads((checkpoint(folder / "whole", HALF) / "manifest.json").read_text())[
        "rows"
    ]
    data = import_example("_rank_data")
    place = SimpleNamespace(dp_rank=0, dp_size=2, device=torch.device("cpu"))
    rows = data.RankRows(
        data.TokenStore(folder / "whole" / "data"), place, row_length=256, accumulation=1, seed=0
    )
    rows.load_state_dict(
        position | {"step": len(rest_of_epoch(folder / "whole", position, 0, 2)) + HALF}
    )
    assert rows.state_dict()["epoch"] == 1
    assert len(next(iter(rows))) == 1


def test_sigterm_to_one_rank_saves_a_checkpoint_on_all(runs):
    check_stopped(*runs)


def check_stopped(folder: Path, of_ranks: list[dict[str, Any]]) -> None:
    """Check that a signal to one rank ended all after the same step, with a checkpoint."""
    for outcome in of_ranks:
        log, samples = outcome["stopped"]
        assert len(log) == len(samples) == 4  # the ranks ask each other as a step begins
        assert losses(log) == losses(outcome["whole"][0])[:4]
    assert (checkpoint(folder / "stopped", 4) / "manifest.json").exists()
    assert (folder / "stopped" / "results.png").exists()


def test_the_last_good_checkpoint_survives_a_failed_save(runs):
    folder, of_ranks = runs
    for outcome in of_ranks:
        error, left = outcome["full"]
        assert left == [f"step-{HALF:08d}"]
        assert (
            f"step-{STEPS:08d} was not saved: rank 1: [Errno 28] No space left on device" in error
        )
        assert error.endswith(f"the newest checkpoint is {checkpoint(folder / 'full', HALF)}")


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_shard_is_named(runs, one_rank, inputs, tmp_path, damage):
    out = copy_run(runs[0] / "whole", tmp_path / "one", HALF)
    shard = checkpoint(out, HALF) / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "cut":
        del content[1000:]
    shard.write_bytes(content)
    if damage == "gone":
        shard.unlink()
    with pytest.raises(import_example("_documents").UserError, match=str(shard)):
        train(out, *inputs, "--resume", out)


@pytest.mark.parametrize("mistake", ["rows", "manifest", "list", "model"])
def test_a_mistake_in_resuming_is_named(runs, one_rank, inputs, tmp_path, mistake):
    out = copy_run(runs[0] / "whole", tmp_path / "one", HALF)
    path, options = checkpoint(out, HALF), []
    config = out / "data" / "config.json"
    if mistake == "rows":
        options = ["--row-length", 32]
        rule = "--row-length must fit the sequences in .*got 32 .*that the run began with"
    elif mistake == "model":
        config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
        rule = f"{path}: cannot be loaded .*config.json of {out / 'data'} must be"
    else:
        (path / "manifest.json").write_text("{}" if mistake == "manifest" else "[1]")
        rule = f"manifest.json: lacks files, step, world_size; move {path} away"
    before = (out / "options.json").read_text()
    with pytest.raises(import_example("_documents").UserError, match=rule):
        train(out, *inputs, "--resume", out, *options)
    assert (out / "options.json").read_text() == before


def test_a_log_that_a_killed_run_wrote_in_part_is_read_up_to_there(tmp_path):
    lines_before, file = import_example("_rank_report")._lines_before, tmp_path / "log.jsonl"
    whole = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in whole).encode()
    for rest in (b"", b'{"step": 4, "lo', b'{"step": 4, "a": "\xc3', b"{}\n", b"4"):
        file.write_bytes(text + rest)
        assert lines_before(file, 9) == whole
        assert lines_before(file, 2) == whole[:2]


def test_a_resumed_run_takes_over_the_options_that_are_not_given(tmp_path):
    options = import_example("_ranks_options")
    given = ["--model", "a.json", "--steps", "40", "--no-shard", "--max-grad-norm", "0.5"]
    parsed = options.parse_options(None, ["--device", "cpu", "--precision", "bf16", *given])
    options.write_options(tmp_path, parsed)
    resumed = options.parse_options(None, ["--resume", str(tmp_path), "--steps", "80"])
    assert {**vars(resumed), "given": None} == {
        **vars(parsed), "given": None, "steps": 80, "lr_warmup": 8, "resume": tmp_path,
    }  # fmt: skip
    assert resumed.learning_rate == 2e-5  # that of a model of one's own, not of the built-in one
    (tmp_path / "options.json").write_text("[1]")
    with pytest.raises(import_example("_documents").UserError, match=r"options.json: cannot be re"):
        options.parse_options(None, ["--resume", str(tmp_path)])


def test_random_numbers_of_another_kind_of_device_are_not_read(one_rank, inputs, tmp_path):
    train(tmp_path, *inputs, "--steps", 3, "--save-every", 3)
    manifest = checkpoint(tmp_path, 3) / "manifest.json"
    state_dict, given = import_example("_rank_training").Trained.state_dict, []

    def recorded(self: Any, random: bool = True) -> dict:
        given.append(random)
        return state_dict(self, random)

    with mock.patch.object(import_example("_rank_training").Trained, "state_dict", recorded):
        train(tmp_path, "--resume", tmp_path)
        manifest.write_text(manifest.read_text().replace('"device": "cpu"', '"device": "cuda"'))
        train(tmp_path, "--resume", tmp_path)
    assert given == [True, False]


@pytest.mark.skipif(
    Version(importlib.metadata.version("transformers")) < Version("5.9"),
    reason="this transformers wants token types of Gemma 3 in training",
)
def test_a_model_with_parts_beside_its_text_trains_that_and_resumes(one_rank, inputs, tmp_path):
    from transformers import Gemma3Config

    text = dict(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    options = [*inputs, "--model", tmp_path / "config.json", "--save-every", HALF]
    whole, _ = train(tmp_path / "run", *options)
    shutil.rmtree(checkpoint(tmp_path / "run", STEPS))
    resumed, _ = train(tmp_path / "run", "--resume", tmp_path / "run")
    check_equal_logs(resumed, whole)
    names = tensors_of(checkpoint(tmp_path / "run", STEPS))
    assert any("vision" in name and "exp_avg" not in name for name in names)
    assert not any("vision" in name and "exp_avg" in name for name in names)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    options = import_example("_ranks_options")
    monkeypatch.setattr(options, "check_training", lambda given: None)
    rule = "--nproc-per-node must be at most the machine's GPUs, 2, got 3"
    with pytest.raises(import_example("_documents").UserError, match=rule):
        options.parse_options(None, ["--device", "cuda"])


def test_ranks_have_random_numbers_of_their_own(runs):
    seeds = [outcome["seed"] for outcome in runs[1]]
    assert len({*seeds}) == len(seeds)


def test_a_checkpoint_has_the_log_of_all_steps_before_it(one_rank, inputs, tmp_path, monkeypatch):
    ranks, lines = import_example("_ranks"), []

    class Counting(import_example("_checkpoint").Checkpoints):
        def save(self, *arguments: Any) -> None:
            lines.append(len((tmp_path / "log.jsonl").read_text().splitlines()))
            super().save(*arguments)

    monkeypatch.setattr(ranks, "Checkpoints", Counting)
    train(tmp_path, *inputs, "--steps", 5, "--save-every", 2, "--log-every", 100)
    assert lines == [2, 4, 5]


def test_a_mistake_on_one_rank_is_raised_on_all(runs):
    assert [outcome["refused"] for outcome in runs[1]] == 2 * ["rank 1: no such file"]


def test_what_a_user_keeps_beside_checkpoints_is_left_alone(runs, one_rank, tmp_path):
    out = copy_run(runs[0] / "whole", tmp_path / "one", HALF)
    folder = out / "checkpoints"
    (folder / "step-00000099-exported").mkdir()
    (folder / "step-00000099.pt").touch()
    shutil.copytree(checkpoint(out, HALF), folder / "step-00000099.bad")
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    checkpoints = import_example("_checkpoint").Checkpoints(folder, ranks, keep=1)
    assert checkpoints.newest()["path"] == checkpoint(out, HALF)
    assert len([*folder.iterdir()]) == 4


def test_an_old_checkpoint_that_cannot_be_removed_stays(one_rank, tmp_path, monkeypatch):
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    checkpoints = import_example("_checkpoint").Checkpoints(tmp_path, ranks, keep=1)
    checkpoints.save({"tensor": torch.ones(4)}, 1, {})
    assert checkpoints.wait() is None

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    checkpoints.save({"tensor": torch.ones(4)}, 2, {})
    with pytest.warns(UserWarning, match="step-00000001 cannot be removed and is kept"):
        assert checkpoints.wait() is None
    assert [path.name for path in checkpoints.found()] == ["step-00000001", "step-00000002"]


def test_a_folder_that_a_save_left_unfinished_is_no_checkpoint(runs, one_rank, tmp_path):
    out = copy_run(runs[0] / "whole", tmp_path / "one", HALF)
    later = checkpoint(out, STEPS)
    shutil.copytree(checkpoint(out, HALF), later)
    (later / "manifest.json").unlink()
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    checkpoints = import_example("_checkpoint").Checkpoints(out / "checkpoints", ranks, keep=2)
    assert checkpoints.newest()["step"] == HALF
    assert not later.exists()


def test_old_checkpoints_are_removed(one_rank, tmp_path):
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    checkpoints = import_example("_checkpoint").Checkpoints(tmp_path / "c", ranks, keep=2)
    tensor = torch.arange(4.0)
    for step in range(1, 5):
        checkpoints.save({"tensor": tensor}, step, {})
        tensor += 1  # a save that is under way does not see it
    assert checkpoints.wait() is None
    assert [path.name for path in checkpoints.found()] == ["step-00000003", "step-00000004"]
    state = {"tensor": torch.zeros(4)}
    checkpoints.load(state, checkpoints.newest())
    assert state["tensor"].tolist() == [3, 4, 5, 6]


def test_a_save_is_under_way_until_its_checkpoint_is_whole(one_rank, tmp_path, monkeypatch):
    module, may_end = import_example("_checkpoint"), threading.Event()
    checksums = module._checksums
    monkeypatch.setattr(module, "_checksums", lambda files: may_end.wait(60) and checksums(files))
    ranks = import_example("_mesh").make_ranks("cpu", 1, 1)
    checkpoints = module.Checkpoints(tmp_path, ranks, keep=1)
    assert not checkpoints.is_saving
    checkpoints.save({"tensor": torch.ones(4)}, 1, {})
    assert checkpoints.is_saving and not checkpoints.found()
    may_end.set()
    assert checkpoints.wait() is None
    assert not checkpoints.is_saving and checkpoints.found()


def test_a_run_does_not_mix_with_the_checkpoints_of_another(runs, one_rank, inputs):
    with pytest.raises(import_example("_documents").UserError, match="--resume .*continues it"):
        train(runs[0] / "whole", *inputs)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--cp", "3"], "--row-length must be a multiple of --cp \\(3\\), got 256"),
        (["--cp", "2"], "must divide the number of ranks, 1, got 1 times 2"),
        (["--cp", "0"], "--cp must be at least 1, got 0"),
        (["--accumulation", "0"], "--accumulation must be at least 1"),
        (["--save-every", "0"], "--save-every must be at least 1"),
        (["--max-grad-norm", "nan"], "--max-grad-norm must be above 0"),
        (["--device", "cuda:1"], "--device must be cpu or cuda"),
        (["--dp-replicate", "3"], "must divide the number of ranks, 1, got 3 times 1"),
        (["--no-shard", "--dp-replicate", "2"], "--dp-replicate must be 1 with --no-shard.* got 2"),
        (["--no-shard", "--no-reshard-after-forward"], "must not be given with --no-shard"),
        (["--resume", "nowhere"], "--resume nowhere: no run there"),
    ],
)
def test_mistakes_are_named(one_rank, inputs, tmp_path, options, rule):
    with pytest.raises(import_example("_documents").UserError, match=rule):
        train(tmp_path, *inputs, *options)


# ------------------------------------------------------------------------------- models


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=256, **options)


def mixtral(**options: Any) -> Any:
    from transformers import MixtralConfig

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    return MixtralConfig(**sizes, **heads, **options)


def lfm2() -> Any:
    from transformers import Lfm2Config

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    return Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"])


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config

    sizes = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    tokens = dict(bos_token_id=0, eos_token_id=0)
    return GPT2Config(**sizes, **tokens, embd_pdrop=0.0, resid_pdrop=0.0, **options)


def olmo2() -> Any:
    from transformers import Olmo2Config

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3)
    return Olmo2Config(**sizes, num_attention_heads=2, max_position_embeddings=256)


def mamba() -> Any:
    from transformers import MambaConfig

    return MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        # An older transformers keeps no documents apart in such layers: the reason is "LEAKS".
        (lfm2, "--cp must be 1 for a model whose layers carry a state.*got (conv:Lfm2Sh|LEAKS)"),
        (lambda: llama(rope_parameters=DYNAMIC), "--cp must be 1 .*got rope_type='dynamic'"),
        (lambda: llama(rope_parameters=LONGROPE), "--cp must be 1 .*got rope_type='longrope'"),
        (
            lambda: mixtral(output_router_logits=True, router_aux_loss_coef=0.02),
            "each of the 2 parts of a step, got router_aux_loss_coef=0.02: set it to 0",
        ),
        (lambda: gpt2(attn_pdrop=0.1), "all attention weights, got DROPOUT.*attn_pdrop to 0"),
        (lambda: gpt2(add_cross_attention=True), "one that cuseq can compute: GPT2LMHeadModel"),
        (mamba, "a causal LM with sdpa attention: MambaForCausalLM does not support"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(config, rule):
    source = import_example("_model").ModelSource(config())
    ranks = SimpleNamespace(cp_size=2, world_size=2, device=torch.device("cpu"))
    options = SimpleNamespace(seed=0, accumulation=1, recompute=False, precision="fp32", shard=True)
    with pytest.raises(import_example("_documents").UserError, match=rule):
        import_example("_sharding").make_model(source, ranks, options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_row_of_one_rank_may_have_a_balance_loss(accumulation):
    module, error = import_example("_sharding"), import_example("_documents").UserError
    ranks, options = SimpleNamespace(world_size=1), SimpleNamespace(accumulation=accumulation)
    module.check_balance_loss(mixtral(router_aux_loss_coef=0.02), ranks, options)  # not added
    config = mixtral(output_router_logits=True, router_aux_loss_coef=0.02)
    if accumulation == 1:
        module.check_balance_loss(config, ranks, options)
        return
    with pytest.raises(error, match="each of the 2 parts of a step"):
        module.check_balance_loss(config, ranks, options)


def test_layers_are_found_by_their_names():
    from transformers import AutoModelForCausalLM

    module, error = import_example("_model"), import_example("_documents").UserError
    for config in (gpt2(), llama()):
        model = AutoModelForCausalLM.from_config(config)
        assert len(module.decoder_layers(model)) == config.num_hidden_layers
    other = SimpleNamespace(get_decoder=lambda: torch.nn.Linear(1, 1))
    with pytest.raises(error, match="named `layers` or `h`, got Linear"):
        module.decoder_layers(other)


@pytest.mark.slow
def test_a_compiled_loss_keeps_no_logits_in_fp32():
    from transformers import AutoModelForCausalLM

    ids = torch.arange(8)[None]
    rows = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(7)}
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16)
        if compiled:
            import_example("_model").compile_layers_and_loss(model)
        with saved_dtypes(model.config.vocab_size) as kept:
            loss = model(**rows).loss
        loss.backward()
        found.append((float(loss.detach()), model.lm_head.weight.grad, kept))
    (loss, gradient, kept), (compiled_loss, compiled_gradient, compiled_kept) = found
    assert torch.float32 in kept and torch.float32 not in compiled_kept
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    assert torch.allclose(compiled_gradient, gradient, rtol=0.05, atol=1e-3)


@contextmanager
def saved_dtypes(columns: int) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of tensors of so many columns that autograd keeps for the backward."""
    kept = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (columns,):
            kept.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def test_layers_form_units_of_enough_weights():
    layers = [torch.nn.Linear(10, size, bias=False) for size in (1, 1, 2, 1, 1)]
    units = import_example("_sharding").group_layers(layers, 30)
    assert units == [layers[:3], layers[3:]]
    assert import_example("_sharding").group_layers(layers, 1) == [[layer] for layer in layers]


def test_weights_are_kept_if_the_gpu_has_room(monkeypatch):
    has_room, cuda = import_example("_sharding").has_room, torch.device("cuda")
    memory = SimpleNamespace(total_memory=20 * 2 * 100)  # a twentieth holds 100 weights in bf16
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model = torch.nn.Linear(10, 10, bias=False)
    assert has_room(model, cuda, torch.bfloat16)
    assert not has_room(model, cuda, None)
    assert not has_room(model, torch.device("cpu"), torch.bfloat16)


def test_gpt2_shares_rows(runs, one_rank, inputs, tmp_path):
    """Its layers lie under another name, and its config has no number of key heads."""
    folder, of_ranks = runs
    model = ("--model", folder / "gpt2.json")
    log, _ = train(tmp_path / "one", *inputs, *model)
    assert losses(of_ranks[0]["gpt2"]) == pytest.approx(losses(log), rel=1e-5)


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    rate_at = import_example("_rank_training").rate_at
    rates = [rate_at(step, steps=100, warmup=10) for step in range(101)]
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


# ------------------------------------------------------------------------------- launching


def stand_in(folder: Path, name: str, body: str) -> None:
    """Write a command that a machine without Slurm lacks."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_exposed_communication_is_what_nothing_else_covers():
    share = import_example("_exposed").exposed_share
    gather, matmul = "ncclDevKernel_AllGather_RING_LL", "nvjet_hsh_128x256"
    assert share([]) is None
    assert share([(matmul, 5.0, 15.0)]) == 0
    assert share([(gather, 5.0, 15.0)]) == 1
    # Of 0 to 100: the matmuls cover 0 to 30 and 50 to 60, two gathers 20 to 55, a copy 70 to 100.
    spans = [
        (gather, 20.0, 45.0),
        (matmul, 0.0, 30.0),
        ("Memcpy DtoD", 70.0, 100.0),
        (gather, 40.0, 55.0),
        (matmul, 50.0, 60.0),
    ]
    assert share(spans) == pytest.approx(0.2)


def test_the_third_and_every_hundredth_step_are_profiled_on_the_first_gpu():
    steps = import_example("_exposed").is_profiled
    assert [step for step in range(1, 300) if steps(step)] == [3, 103, 203]
    log = import_example("_rank_report").StepLog.profiles
    for rank, device, expected in ((0, "cuda", True), (1, "cuda", False), (0, "cpu", False)):
        ranks = SimpleNamespace(is_first=rank == 0, device=torch.device(device))
        assert log(SimpleNamespace(_ranks=ranks), 3) == expected


def test_the_progress_bar_shows_exposed_communication():
    report = import_example("_rank_report")
    line = {"loss": 1.0, "tokens_per_second": 2.0, "padding": 0.0, "balance": 1.0}
    assert "exposed" not in report._postfix(line, None)
    assert report._postfix(line, 0.0425).endswith("exposed communication 4.2%")


def make_log(folder: Path, first_step: int, steps: int) -> tuple[Any, Path]:
    """Return the log of one rank, and its file."""
    report, ranks = import_example("_rank_report"), import_example("_mesh").make_ranks("cpu", 1, 1)
    size = report.StepSize(tokens=10, flops_per_token=None, flops_per_pair=None, peak_flops=None)
    log = report.StepLog(folder, ranks, size, first_step=first_step, steps=steps)
    return log, folder / report.LOG


def test_the_log_gives_a_profile_to_its_own_step(tmp_path, one_rank):
    log, file = make_log(tmp_path, first_step=10, steps=14)
    try:
        for step in (11, 12, 13):
            log.add(torch.tensor([1.0, 8.0, 20.0, 0.5]))
            if step == 12:
                log.add_exposed(step, 0.25)
        log.add_exposed(13, None)  # the profiler saw nothing
        log.read()
        log.add(torch.tensor([1.0, 8.0, 20.0, 0.5]))
        log.read()
    finally:
        log.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shares = {line["step"]: line.get("exposed_communication") for line in lines}
    assert shares == {11: None, 12: 0.25, 13: None, 14: None}
    assert "exposed communication 25.0%" in log._bar.postfix


def test_a_full_disk_does_not_end_training_for_its_log(tmp_path, one_rank, capsys, monkeypatch):
    """It is said once; what was not written follows when there is room."""
    log, file = make_log(tmp_path, first_step=0, steps=4)
    try:
        for step in range(4):
            log.add(torch.tensor([1.0, 8.0, 20.0, 0.5]))
            full = step in (1, 2)
            with monkeypatch.context() as patch:
                if full:
                    patch.setattr(log, "_file", Path("/dev/full"))
                log.read()
            if full:
                with file.open("ab") as half:
                    half.write(b'{"step": 2, "lo')
    finally:
        log.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("Training goes on, but /dev/full is not written") == 1


def test_a_log_that_was_removed_is_written_again(tmp_path, one_rank):
    log, file = make_log(tmp_path, first_step=0, steps=3)
    try:
        for _ in range(3):
            log.add(torch.tensor([1.0, 8.0, 20.0, 0.5]))
            log.read()
            if log._step == 2:
                file.unlink()
    finally:
        log.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_a_profiled_step_returns_what_it_computed(cuda):
    tensor = torch.ones(1000, device=cuda)
    found, share = import_example("_exposed").profiled(lambda: (tensor @ tensor).item())
    assert (found, share) == (1000, 0)


def test_the_slurm_script_starts_and_resumes(tmp_path):
    stand_in(
        tmp_path, "scontrol", '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"'
    )
    options = "--cpus-per-task 32 --kill-on-bad-exit"
    stand_in(tmp_path, "srun", f'[ "$1 $2 $3" = "{options}" ] && exec "${{@:4}}"')
    own_store = '[ "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 ]'
    stand_in(tmp_path, "torchrun", f'{own_store} && printf "%s\\n" "$@"')
    job = {"NNODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "17", "JOB_NODELIST": "node[3-4]"}
    job["CPUS_PER_TASK"] = "32"
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    out = tmp_path / "a run"

    def submit() -> list[str]:
        script = ["bash", str(EXAMPLES / "slurm.sh"), str(out), "--data", "my texts"]
        return subprocess.run(
            script, env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    launch = "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 17"
    launch = [*launch.split(), "--rdzv-endpoint", "node3:29500", "examples/train.py"]
    assert submit() == [*launch, "--out", str(out), "--data", "my texts"]
    (out / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert submit() == [*launch, "--out", str(out), "--data", "my texts"]  # nothing whole yet
    (out / "checkpoints" / "step-00000010" / "manifest.json").touch()
    arguments = submit()
    assert arguments == [*launch, "--resume", str(out), "--data", "my texts"]
    run = importlib.import_module("torch.distributed.run")
    parsed = run.get_args_parser().parse_args(arguments)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_id) == ("2", "8", "17")
    assert parsed.training_script == "examples/train.py"


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ([], ""),
        (["NPROC=2"], "-m torch.distributed.run --standalone --nproc-per-node 2"),
    ],
)
def test_make_train_starts_the_ranks(variables, launch):
    command = ["make", "--dry-run", "train", "VENV=env", "ARGS=--steps 3", *variables]
    # `make test` hands its own options and variables to every make below it.
    environment = {n: v for n, v in os.environ.items() if n not in ("MAKEFLAGS", "MAKELEVEL")}
    process = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, check=True
    )
    started = process.stdout.splitlines()[-1].split()
    assert started == ["env/bin/python", *launch.split(), "examples/train.py", "--steps", "3"]


@pytest.mark.parametrize(
    ("machines", "restarts", "own_store", "attempt"),
    [(1, 3, True, 2), (2, 0, True, 2), (2, 3, False, 0), (2, 3, True, None)],
)
def test_a_restart_meets_in_a_store_without_dead_ranks(
    monkeypatch, machines, restarts, own_store, attempt
):
    mesh = import_example("_mesh")
    given = {"GROUP_WORLD_SIZE": machines, "TORCHELASTIC_MAX_RESTARTS": restarts}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": own_store, "TORCHELASTIC_RESTART_COUNT": 2}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    if attempt is not None:
        assert mesh._attempt() == attempt
        return
    rule = "must have TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(import_example("_documents").UserError, match=rule):
        mesh._attempt()


def torchrun(out: Path, *options: object) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    if "--max-restarts" in options:
        launch += ["--max-restarts", 1]
        options = tuple(option for option in options if option != "--max-restarts")
    return [*map(str, launch), str(EXAMPLES / "train.py"), *map(str, options), "--out", str(out)]


def wait_for_line(
    file: Path, number: int, process: subprocess.Popen, output: Path | None = None
) -> None:
    """Wait until a run has written that many lines of its log."""
    end = time.monotonic() + 180
    while not file.exists() or len(file.read_text().splitlines()) < number:
        if process.poll() is not None or time.monotonic() > end:
            code = process.poll()
            raise AssertionError(output.read_text() if output else process.communicate(), code)
        time.sleep(0.05)


@contextmanager
def launched(command: list[str], output: Path) -> Iterator[subprocess.Popen]:
    """Start torchrun with its output in a file; at the end no process of it is left."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        yield process
    finally:
        ranks = children.read_text().split() if process.poll() is None else []
        process.kill()
        process.wait()
        for rank in ranks:  # each leads a session, with the processes that load its data
            with suppress(ProcessLookupError):
                os.killpg(int(rank), signal.SIGKILL)


def stop_and_resume(out: Path, *options: object) -> tuple[int, list[dict]]:
    """Stop torchrun by SIGTERM and resume; return the step it stopped after, and the log."""
    log, output = out / "log.jsonl", out.with_suffix(".txt")
    with launched(torchrun(out, *options), output) as process:
        wait_for_line(log, 4, process, output)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=90)
    said = output.read_text()
    step = len(log.read_text().splitlines())
    assert f"Stopped by SIGTERM after step {step}" in said, said
    assert "forcefully" not in said, said  # torchrun did not have to kill a rank
    assert (checkpoint(out, step) / "manifest.json").exists()
    with launched(torchrun(out, *options, "--resume", out), output) as process:
        assert process.wait(timeout=150) == 0, output.read_text()
    return step, [json.loads(line) for line in log.read_text().splitlines()]


def uncut(rank: int, out: Path, inputs: list[str]) -> list[dict]:
    """Train for so many steps that a signal comes in time."""
    return train(out, *inputs, "--steps", UNCUT)[0]


@pytest.mark.parametrize("sender", ["another process", "the rank"])
def test_a_process_that_loads_data_ends_by_a_signal_of_its_rank_alone(sender):
    init = import_example("_rank_data").outlive_signals
    batches = iter(torch.utils.data.DataLoader(range(100), num_workers=1, worker_init_fn=init))
    next(batches)
    (process,) = batches._workers
    if sender == "the rank":
        process.terminate()
        process.join(20)
        assert process.exitcode == 0
        return
    for name in ("-TERM", "-INT"):
        subprocess.run(["kill", name, str(process.pid)], check=True)
    assert len(list(batches)) == 99


@pytest.mark.full
def test_a_run_that_sigterm_to_torchrun_stopped_goes_on(inputs, tmp_path):
    options = [*inputs, "--steps", UNCUT, "--workers", 2]
    step, log = stop_and_resume(tmp_path / "stopped", *options)
    assert 4 <= step < UNCUT
    check_equal_logs(log, distributed.run(uncut, tmp_path / "uncut", inputs, limit=240)[0])


@pytest.mark.full
def test_torchrun_restarts_after_a_killed_rank_from_the_checkpoint(inputs, tmp_path):
    options = [*inputs, "--steps", 60, "--save-every", 5, "--max-restarts"]
    process = subprocess.Popen(torchrun(tmp_path, *options), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_line(tmp_path / "log.jsonl", 12, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        errors = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 0, errors
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 61))
    assert (checkpoint(tmp_path, 60) / "manifest.json").exists()


@pytest.mark.full
def test_two_machines_restart_after_a_killed_rank(inputs, tmp_path, monkeypatch):
    """With a torchrun for each machine, of which only one counts the failure."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr"]
    launch = [sys.executable, "-m", "torch.distributed.run", *where, "localhost", "--rdzv-id", "1"]
    launch += ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    options = [*inputs, "--steps", 60, "--save-every", 5, "--out", tmp_path]
    command = [*launch, str(EXAMPLES / "train.py"), *map(str, options)]
    log, outputs = tmp_path / "log.jsonl", [tmp_path / f"{n}.txt" for n in range(2)]
    with launched(command, outputs[0]) as first, launched(command, outputs[1]) as second:
        wait_for_line(log, 12, first, outputs[0])
        children = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        for process, output in zip((first, second), outputs, strict=True):
            assert process.wait(timeout=150) == 0, output.read_text()
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, 61))


# ------------------------------------------------------------------------------- GPUs


def on_two_gpus(rank: int, folder: Path, inputs: list[str]) -> dict[str, Any]:
    """Make the basic runs in fp32, and a longer one in bf16."""
    outcome = basic_runs(rank, folder, [*inputs, *FP32])
    outcome["uncut"] = uncut(rank, folder / "uncut", [*inputs, *ON_GPUS])
    return outcome


def on_one_gpu(rank: int, folder: Path, inputs: list[str]) -> dict[str, Any]:
    """Train on the rows that two GPUs share, and on theirs; continue what two began."""
    inputs = [*inputs, *FP32]
    outcome: dict[str, Any] = {"one row": train(folder / "one row", *inputs)}
    outcome["two rows"] = train(folder / "two rows", *inputs, "--accumulation", 2)
    out = copy_run(folder / "whole", folder / "continued", HALF)
    outcome["continued"] = train(out, *inputs, "--save-every", HALF, "--resume", out)
    return outcome


@pytest.fixture(scope="module")
def gpu_runs(inputs, tmp_path_factory) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """Return the folder of the runs, what each of two GPUs saw, and what one GPU saw."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    folder, both = tmp_path_factory.mktemp("gpus"), "cpu:gloo,cuda:nccl"  # as train.py
    of_two = distributed.run(on_two_gpus, folder, inputs, backend=both, limit=240)
    (of_one,) = distributed.run(on_one_gpu, folder, inputs, processes=1, backend=both, limit=120)
    return folder, of_two, of_one


def check_losses(log: list[dict], expected: list[dict]) -> None:
    """Check losses of fp32, whose kernels on GPUs add up in another order in parts of a row."""
    assert losses(log) == pytest.approx(losses(expected), rel=2e-4)
    assert [line["tokens"] for line in log] == [line["tokens"] for line in expected]
    assert log[-1]["loss"] < log[0]["loss"]


@pytest.mark.slow
def test_two_gpus_have_the_losses_of_one(second_gpu, gpu_runs):
    _, of_two, of_one = gpu_runs
    check_losses(of_two[0]["whole"][0], of_one["two rows"][0])


@pytest.mark.slow
def test_copies_on_two_gpus_have_the_losses_of_one(second_gpu, gpu_runs):
    folder, of_two, of_one = gpu_runs
    check_copies(folder, of_two, of_one["two rows"][0], rel=2e-4)


@pytest.mark.slow
def test_gpus_that_share_rows_have_the_losses_of_one(second_gpu, gpu_runs):
    _, of_two, of_one = gpu_runs
    for outcome in of_two:
        assert outcome["shared rows"][1] == of_one["one row"][1]
    check_losses(of_two[0]["shared rows"][0], of_one["one row"][0])


@pytest.mark.slow
def test_a_run_that_resumes_on_two_gpus_is_bit_equal(second_gpu, gpu_runs):
    """No document reaches a second block of keys, whose sums would come in any order."""
    folder, of_two, _ = gpu_runs
    check_resumed(folder, of_two)


@pytest.mark.slow
def test_one_gpu_that_goes_on_repeats_and_loses_no_sample(second_gpu, gpu_runs):
    folder, of_two, of_one = gpu_runs
    check_samples(of_two, folder / "continued", *of_one["continued"])


@pytest.mark.slow
def test_sigterm_to_one_gpu_saves_a_checkpoint_on_both(second_gpu, gpu_runs):
    folder, of_two, _ = gpu_runs
    check_stopped(folder, of_two)


@pytest.mark.slow
def test_the_log_has_the_exposed_communication_of_gpus(second_gpu, gpu_runs):
    _, of_two, _ = gpu_runs
    for run in (of_two[0]["shared rows"][0], of_two[0]["uncut"]):
        shares = {line["step"]: line.get("exposed_communication") for line in run}
        assert [step for step, share in shares.items() if share is not None] == [
            step for step in shares if import_example("_exposed").is_profiled(step)
        ]
        assert 0 < shares[3] < 1


@pytest.mark.slow
def test_a_run_on_two_gpus_that_sigterm_stopped_goes_on_bit_equal(
    second_gpu, gpu_runs, inputs, tmp_path
):
    """torchrun starts it, with processes that load the data and bf16, as users do."""
    options = [*inputs, "--device", "cuda", "--log-every", 1, "--steps", UNCUT]
    step, log = stop_and_resume(tmp_path / "stopped", *options)
    assert 4 <= step < UNCUT
    check_equal_logs(log, gpu_runs[1][0]["uncut"])
    profiled = [line["step"] for line in log if "exposed_communication" in line]
    assert profiled[:1] == [3] and (step + 3 in profiled) == (step + 3 <= UNCUT)


def test_a_mistake_is_printed_once_on_each_machine(tmp_path, monkeypatch, capsys):
    ranks = import_example("_ranks")
    for rank, printed in ((0, "train.py: --steps must be at least 1, got 0\n"), (1, "")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert ranks.main(["--device", "cpu", "--steps", "0", "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == printed
