"""Test the real unsloth on a GPU: losses and gradients of packed rows with and without cuseq.

unsloth comes from the benchmarks' folder of peers (PEERS, default .peers). Each precision has a
process of its own, which runs everything once and saves a loss and the LoRA gradients of each run;
the tests compare those.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cuda"
LENGTHS = [17, 180, 5, 1, 130, 64, 95]
LAYERS = 4
LIMIT_S = 280

each_precision = pytest.mark.parametrize("bits", [16, 4], ids=["16bit", "4bit"])
each_mode = pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "plain"])

# ------------------------------------------------------------------------------------ the process


@contextmanager
def set_to(module: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module for the duration of the body."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Recorder:
    """Runs a model and keeps, for each run, its loss, gradients and calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        from unsloth_model import adapters, decoder_layers

        self.runs: dict[tuple[bool, str], dict[str, Any]] = {}
        self._model = model
        self._adapters = adapters(model)
        self._calls = {"layers": 0, "attention": 0}
        for layer in decoder_layers(model):
            layer.register_forward_pre_hook(lambda *_: self._count("layers"))

    def checkpoint(self, on: bool) -> None:
        """Turn unsloth's checkpointing on or off; the model was made with it."""
        self._checkpointing = on
        for module in self._model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = on

    def run(self, name: str, *rows: dict[str, Any]) -> None:
        """Run one step over rows whose losses add up."""
        from cuseq.integrations.unsloth import _attention

        self._calls = dict.fromkeys(self._calls, 0)
        self._model.zero_grad(set_to_none=True)
        counted = self._counted(_attention.varlen_attention)
        with set_to(_attention, varlen_attention=counted):
            losses = [self._backward(row) for row in rows]
        gradients = torch.cat([weight.grad.flatten() for weight in self._adapters])
        self.runs[self._checkpointing, name] = {
            "loss": sum(losses),
            "gradients": gradients.double().cpu(),
            **self._calls,
        }

    def _backward(self, row: dict[str, Any]) -> float:
        moved = {key: value.to(DEVICE, non_blocking=True) for key, value in row.items()}
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self._model(**moved, use_cache=False).loss
        loss.backward()
        return loss.item()

    def _counted(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            self._count("attention")
            return attention(*args, **options)

        return call

    def _count(self, what: str) -> None:
        self._calls[what] += 1


def record(recorder: Recorder, vocab_size: int) -> None:
    """Run everything with one setting of checkpointing."""
    import unsloth
    from unsloth.kernels import qk_norm_rope
    from unsloth.utils import attention_dispatch
    from unsloth_model import packed_row

    import cuseq

    row = packed_row(LENGTHS, vocab_size, seed=0)
    targets = (row["labels"] != -100).sum()
    row["num_items_in_batch"] = targets
    documents = []
    for ids in row["input_ids"].split(LENGTHS, dim=1):
        if (length := ids.shape[1]) > 1:  # one token has no target
            document = packed_row([length], vocab_size, seed=0)
            labels = ids.clone()
            labels[:, 0] = -100
            documents.append(document | {"input_ids": ids, "labels": labels})
            documents[-1]["num_items_in_batch"] = targets

    recorder.run("unsloth", row)
    recorder.run("unsloth again", row)
    # Its other paths: a dense mask, and a kernel each for norm and rotation.
    with (
        set_to(attention_dispatch, _SDPA_PACKED_SEGMENTS=False),
        set_to(qk_norm_rope, QK_NORM_ROPE_ENABLED=False),
    ):
        recorder.run("unsloth otherwise", row)
    recorder.run("one by one", *documents)
    whole = torch.tensor([sum(LENGTHS)], dtype=torch.int32)
    recorder.run("documents leak", row | {"packed_seq_lengths": whole})

    cuseq.enable(unsloth)
    recorder.run("cuseq", row | {"packed": cuseq.PackedLayout.from_lengths(LENGTHS)})
    recorder.run("cuseq, lengths on the device", row)
    cuseq.disable(unsloth)
    recorder.run("disabled", row)


def work(bits: int, folder: Path) -> None:
    """Run in the process: save `runs.pt`, or in `skipped.txt` the reason why it cannot."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import unsloth_model
    from workload import peers_folder

    peers = peers_folder()
    if peers is not None:
        sys.path.insert(0, str(peers))
    try:
        unsloth_model.import_unsloth(peers or Path(), xformers=False)
    except Exception as failure:
        reason = f"unsloth cannot be imported: {type(failure).__name__}: {failure}"
        (folder / "skipped.txt").write_text(reason, encoding="utf-8")
        return
    shape = unsloth_model.SHAPES["tiny"] | {"num_hidden_layers": LAYERS}
    checkpoint = folder / "qwen3-tiny"
    unsloth_model.write_checkpoint(checkpoint, shape, bits == 4, torch.device(DEVICE))
    model = unsloth_model.load_model(checkpoint, bits == 4, sum(LENGTHS))
    projection = unsloth_model.decoder_layers(model)[0].self_attn.q_proj.base_layer
    recorder = Recorder(model)
    for checkpointing in (True, False):
        recorder.checkpoint(checkpointing)
        record(recorder, shape["vocab_size"])
    left = {"projection": type(projection).__name__, "runs": recorder.runs}
    torch.save(left, folder / "runs.pt")


# --------------------------------------------------------------------------------------- the tests


@functools.cache
def results(bits: int) -> dict[str, Any]:
    """Return the process's results, or the reason for none in `skipped` or `failed`."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, __file__, str(bits), folder],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_S} s"}
        if done.returncode != 0:
            return {"failed": done.stdout[-2000:] + done.stderr[-6000:]}
        skipped = Path(folder, "skipped.txt")
        if skipped.exists():
            return {"skipped": skipped.read_text(encoding="utf-8")}
        return torch.load(Path(folder, "runs.pt"), weights_only=True)


def left_by(bits: int) -> dict[str, Any]:
    left = results(bits)
    if "failed" in left:
        pytest.fail(left["failed"])
    if "skipped" in left:
        pytest.skip(left["skipped"])
    return left


def runs_of(bits: int, checkpointing: bool) -> dict[str, dict[str, Any]]:
    runs = left_by(bits)["runs"]
    return {name: run for (mode, name), run in runs.items() if mode == checkpointing}


def gradients_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the relative L2 distance."""
    return ((one["gradients"] - other["gradients"]).norm() / other["gradients"].norm()).item()


def losses_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return abs(one["loss"] - other["loss"]) / abs(other["loss"])


def limits(runs: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Return the limits of differences: twice those between unsloth's own paths in bf16.

    Two losses may agree by chance to more digits than bf16 guarantees.
    """
    own = [runs["unsloth otherwise"], runs["one by one"]]
    loss = max(losses_apart(run, runs["unsloth"]) for run in own)
    gradients = max(gradients_apart(run, runs["unsloth"]) for run in own)
    return 2 * max(loss, 1e-4), 2 * gradients


def check_agree(runs: dict[str, dict[str, Any]], name: str, other: str) -> None:
    loss, gradients = limits(runs)
    assert losses_apart(runs[name], runs[other]) <= loss
    assert gradients_apart(runs[name], runs[other]) <= gradients


@each_precision
def test_weights_are_what_was_asked_for(bits, cuda):
    assert left_by(bits)["projection"] == ("Linear4bit" if bits == 4 else "Linear")


@each_precision
@each_mode
def test_enabled_rows_go_through_cuseq(bits, checkpointing, cuda):
    runs = runs_of(bits, checkpointing)
    passes = 2 if checkpointing else 1
    for name in ("cuseq", "cuseq, lengths on the device"):
        assert runs[name]["layers"] == runs[name]["attention"] == passes * LAYERS
    for name in ("unsloth", "disabled"):
        assert (runs[name]["layers"], runs[name]["attention"]) == (passes * LAYERS, 0)


@each_precision
@each_mode
@pytest.mark.parametrize("name", ["cuseq", "cuseq, lengths on the device"])
@pytest.mark.parametrize("other", ["unsloth", "one by one"])
def test_losses_and_gradients_agree(name, other, bits, checkpointing, cuda):
    check_agree(runs_of(bits, checkpointing), name, other)


@each_precision
@each_mode
def test_a_leak_would_show(bits, checkpointing, cuda):
    runs = runs_of(bits, checkpointing)
    _, limit = limits(runs)
    assert gradients_apart(runs["documents leak"], runs["one by one"]) > 3 * limit


@each_precision
def test_checkpointing_changes_nothing(bits, cuda):
    checkpointed, plain = (runs_of(bits, mode) for mode in (True, False))
    for name in ("unsloth", "cuseq"):
        _, limit = limits(plain)
        assert gradients_apart(checkpointed[name], plain[name]) <= limit


@each_precision
@each_mode
def test_disable_brings_back_every_bit(bits, checkpointing, cuda):
    """As far as unsloth itself is deterministic: a backward may add in any order."""
    runs = runs_of(bits, checkpointing)
    first, again, disabled = (runs[name] for name in ("unsloth", "unsloth again", "disabled"))
    assert losses_apart(disabled, first) <= losses_apart(again, first)
    assert gradients_apart(disabled, first) <= 3 * gradients_apart(again, first)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
