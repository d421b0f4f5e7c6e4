"""Test the examples on two ranks: losses of one rank, resumption, signals and killed ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import distributed
import pytest
import torch.distributed as dist
from example_modules import EXAMPLES, imported, logged

import cuseq

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")
pytest.importorskip("tqdm")

STEPS, HALF = 6, 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": f"{i} green bottles. " * (i % 7 + 1)}) for i in range(300)]
    (folder / "bottles.jsonl").write_text("\n".join(lines))
    transformers.Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return dict(data=f"{folder}/bottles.jsonl", model=f"{folder}/config.json", row_length=256)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    """The processes of these tests see no GPU, and keep tables of `datasets` in a folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def trained(folder: Path, inputs: dict[str, Any], **options: Any) -> list[float]:
    """Train by fsdp2.py in this process's group, and return the loss of each step."""
    given = dict(steps=STEPS, save_every=HALF, learning_rate=1e-2, out=folder)
    with imported("fsdp2") as example:
        return example.train(example.Options(**inputs | given | options))


def copied(source: Path, target: Path) -> Path:
    """Copy a run as it was after half of its steps, once for all ranks."""
    if dist.get_rank() == 0:
        shutil.copytree(source / f"step-{HALF:08d}", target / f"step-{HALF:08d}")
    dist.barrier()
    return target


@contextmanager
def rows_of(name: str, found: dict[str, Any]) -> Iterator[None]:
    """Note the documents of each row that is collated."""
    found[name], collate = [], cuseq.PackingCollator.__call__

    def noted(self: Any, examples: list[Any]) -> Any:
        found[name].append([tuple(one["input_ids"]) for one in examples])
        return collate(self, examples)

    with mock.patch.object(cuseq.PackingCollator, "__call__", noted):
        yield


def on_two_ranks(rank: int, folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with rows_of("rows", found):
        found["whole"] = trained(folder / "whole", inputs)
    half = copied(folder / "whole", folder / "half")
    found["resumed"] = trained(half, inputs, resume=True)
    found["cp"] = trained(folder / "cp", inputs, cp=2, accumulation=2)
    found["graph"] = trained(folder / "graph", inputs, graph=True)  # without a GPU plain steps
    for name, options in {
        "seed": dict(seed=rank),
        "taken": dict(out=folder / "whole"),
        "nothing": dict(out=folder / "other", resume=True),
        "cp=3": dict(cp=3),
    }.items():
        with pytest.raises(SystemExit) as raised:
            trained(folder / name, inputs, **options)
        found[name] = str(raised.value)
    return found


def on_one_rank(rank: int, folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    whole = trained(folder / "one", inputs, accumulation=2)
    half = copied(folder / "whole", folder / "of two")
    found: dict[str, Any] = {"whole": whole}
    with rows_of("rows", found):
        found["resumed"] = trained(half, inputs, resume=True, accumulation=2)
    return found


def tensors(checkpoint: Path) -> dict[str, Any]:
    parts = [safetensors.load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    return {f"{i}.{name}": value for i, part in enumerate(parts) for name, value in part.items()}


@pytest.mark.slow
def test_fsdp2(inputs, tmp_path):
    first, second = distributed.run(on_two_ranks, tmp_path, inputs, limit=300)
    used = sum(first.pop("rows")[:HALF] + second.pop("rows")[:HALF], [])
    assert first == second
    assert len(first["whole"]) == STEPS and first["whole"][-1] < first["whole"][0]
    assert first["resumed"] == first["whole"][HALF:]
    last = f"step-{STEPS:08d}"
    whole, again = tensors(tmp_path / "whole" / last), tensors(tmp_path / "half" / last)
    assert whole.keys() == again.keys() and any("exp_avg" in name for name in whole)
    assert all(value.equal(again[name]) for name, value in whole.items())
    assert not list(tmp_path.rglob("*.metadata")) + list(tmp_path.rglob("*.pt"))
    assert first["cp"] == pytest.approx(first["whole"], rel=1e-4)
    assert first["graph"] == pytest.approx(first["whole"], rel=1e-4)
    assert (
        first["seed"]
        == "seed must be the same on all ranks of group, got 0 on rank 0 and 1 on rank 1"
    )
    assert "has checkpoints of another run: --resume goes on from them" in first["taken"]
    assert "has no checkpoint" in first["nothing"]
    assert first["cp=3"].startswith("--cp must divide the 2 ranks")
    (one,) = distributed.run(on_one_rank, tmp_path, inputs, processes=1, limit=200)
    assert one["whole"] == pytest.approx(first["whole"], rel=1e-4)
    # Of the epoch those documents are left that were not used, in rows that are planned anew.
    left = sum(one["rows"], [])
    assert len(used) == len(set(used)) and len(left) == len(set(left)) > 20
    assert not set(used) & set(left) and len(one["resumed"]) == STEPS - HALF


def torchrun(out: Path, inputs: dict[str, Any], *options: object) -> list[str]:
    launcher, trainer = [], []
    for option in options:
        (launcher if option in ("--max-restarts", "2") else trainer).append(str(option))
    given = [str(one) for name, value in inputs.items() for one in (f"--{name}", value)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(*launcher, str(EXAMPLES / "trainer.py"), *given, "--output_dir", str(out), *trainer),
    ]


def wait_for(pattern: str, out: Path, process: subprocess.Popen) -> None:
    """Wait until a run has a checkpoint of this name."""
    end = time.monotonic() + 120
    while not list(out.glob(pattern)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)


def started(command: list[str], output: Path) -> subprocess.Popen:
    with output.open("a") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.full
def test_a_trainer_that_sigterm_stopped_goes_on(inputs, tmp_path):
    out, output = tmp_path / "run", tmp_path / "output.txt"
    options = ["--max_steps", 300, "--save_steps", 5, "--learning_rate", 1e-3]
    process = started(torchrun(out, inputs, *options), output)
    wait_for("checkpoint-5/trainer_state.json", out, process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=90)
    assert "--resume goes on from there" in output.read_text()
    before = logged(out, "loss")
    assert 5 <= len(before) < 300
    process = started(torchrun(out, inputs, *options, "--resume"), output)
    assert process.wait(timeout=200) == 0, output.read_text()
    whole = tmp_path / "whole"
    process = started(torchrun(whole, inputs, *options), output)
    assert process.wait(timeout=200) == 0, output.read_text()
    assert logged(out, "loss") == logged(whole, "loss")
    assert logged(out, "loss")[: len(before)] == before


@pytest.mark.full
@pytest.mark.parametrize("cp", [1, 2])
def test_a_trainer_whose_steps_are_graphs_learns_the_same(cp, inputs, tmp_path):
    found = []
    for options in ([], ["--graph"]):
        out, output = tmp_path / f"run{len(found)}", tmp_path / "output.txt"
        options = ["--max_steps", 6, "--save_steps", 6, "--learning_rate", 1e-3, *options]
        options += ["--cp", cp]
        process = started(torchrun(out, inputs, *options), output)
        assert process.wait(timeout=200) == 0, output.read_text()
        found.append(logged(out, "loss"))
    assert len(found[0]) == 6 and found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.full
def test_torchrun_restarts_a_trainer_after_a_killed_rank(inputs, tmp_path):
    out, output = tmp_path / "run", tmp_path / "output.txt"
    options = ["--max_steps", 100, "--save_steps", 5, "--max-restarts", "2"]
    process = started(torchrun(out, inputs, *options), output)
    wait_for("checkpoint-10/trainer_state.json", out, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(timeout=200) == 0, output.read_text()
    assert len(logged(out, "loss")) == 100


@pytest.mark.parametrize(
    ("machines", "restarts", "own_store", "prefix"),
    [(1, 3, True, "attempt-2"), (2, 0, True, "attempt-2"), (2, 3, False, "attempt-0"),
     (2, 3, True, None)],
)  # fmt: skip
def test_a_restart_meets_in_a_store_without_dead_ranks(
    machines, restarts, own_store, prefix, monkeypatch
):
    torchrun = {
        "WORLD_SIZE": 4, "LOCAL_RANK": 0, "GROUP_WORLD_SIZE": machines,
        "TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_RESTART_COUNT": 2,
        "TORCHELASTIC_USE_AGENT_STORE": own_store,
    }  # fmt: skip
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    with imported("_ranks") as example, mock.patch.multiple(
        example.dist, rendezvous=mock.DEFAULT, PrefixStore=mock.DEFAULT,
        init_process_group=mock.DEFAULT,
    ) as calls, mock.patch.object(example, "KIND", "cpu"):  # fmt: skip
        calls["rendezvous"].return_value = iter([("store", 1, 4)])
        if prefix is None:
            with pytest.raises(SystemExit, match="must have TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
                example.join_ranks()
            return
        example.join_ranks()
        calls["PrefixStore"].assert_called_once_with(prefix, "store")
        assert calls["init_process_group"].call_args.kwargs["world_size"] == 4


def test_ranks_that_do_not_meet_are_told(monkeypatch):
    """Trainer would train a model on each of them alone, without a word."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with imported("_ranks") as example, pytest.raises(SystemExit, match="the ranks did not meet"):
        example.check_same_on_ranks(seed=0)
