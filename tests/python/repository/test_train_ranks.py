"""Test examples/train.py on several ranks: losses, checkpoints, signals, and mistakes of users."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch.distributed as dist

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 10
HALF = STEPS // 2
DOCUMENTS = 300  # more than ten steps use, fewer than twenty


def import_example(name: str) -> Any:
    """Import a module of the example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
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
    ranks = import_example("_mesh").make_ranks("cpu", parsed.dp_replicate, parsed.cp)
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


def two_ranks(rank: int, folder: Path, inputs: list[str]) -> dict[str, Any]:
    """Train ten steps, resume after five, stop by a signal, and lose the disk in a save."""
    torch_runs: dict[str, Any] = {}
    torch_runs["whole"] = train(folder / "whole", *inputs, "--save-every", HALF)
    half = copy_run(folder / "whole", folder / "half", HALF)
    torch_runs["resumed"] = train(half, *inputs, "--save-every", HALF, "--resume", half)
    torch_runs["stopped"] = stopped_by_a_signal(rank, folder / "stopped", inputs)
    torch_runs["full"] = with_a_full_disk(rank, folder / "full", inputs)
    return torch_runs


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
    """Let the second save fail on rank 1, as a full disk does; return the error and what is left."""
    module = import_example("_checkpoint")
    save = module.Checkpoints.save

    def save_on_a_small_disk(self: Any, state: dict, step: int, facts: dict) -> None:
        if step == HALF or rank == 0:
            return save(self, state, step, facts)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            save(self, state, step, facts)
            self._join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    module.Checkpoints.save = save_on_a_small_disk
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
    return folder, distributed.run(two_ranks, folder, inputs, limit=240)


@pytest.fixture
def one_rank(tmp_path):
    """Make this process a group of one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
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
