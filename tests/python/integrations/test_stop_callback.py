"""Test StopCallback: a signal ends Trainer on all ranks after the same step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import distributed
import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from trainer_models import SETTINGS, documents, small_model  # noqa: E402

import cuseq  # noqa: E402
from cuseq.integrations.transformers import StopCallback  # noqa: E402


class Signal(transformers.TrainerCallback):
    """Sends this process a signal in a step."""

    def __init__(self, step: int | None, number: int) -> None:
        self.step, self.number = step, number

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def make_trainer(folder: str, stop: StopCallback, signal_in: int | None, **options):
    number = options.pop("number", signal.SIGTERM)
    settings = SETTINGS | dict(
        eval_strategy="no", gradient_accumulation_steps=2, max_steps=8, use_cpu=True
    )
    return transformers.Trainer(
        small_model(transformers.LlamaConfig, dtype=torch.float32),
        transformers.TrainingArguments(folder, **settings | options),
        data_collator=cuseq.PackingCollator(),
        train_dataset=documents(60, seed=0),
        callbacks=[stop, Signal(signal_in, number)],
    )


@pytest.mark.parametrize("number", StopCallback.SIGNALS)
def test_a_signal_saves_and_stops(number, tmp_path):
    before = [signal.getsignal(one) for one in StopCallback.SIGNALS]
    stop = StopCallback()
    trainer = make_trainer(str(tmp_path), stop, 3, number=number)
    trainer.train()
    assert stop.stopped and trainer.state.global_step == 4
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert [signal.getsignal(one) for one in StopCallback.SIGNALS] == before
    again = make_trainer(str(tmp_path), stop, None)
    again.train(resume_from_checkpoint=True)
    assert not stop.stopped and again.state.global_step == 8


def test_it_stops_where_trainer_logs(tmp_path):
    stop = StopCallback()
    trainer = make_trainer(str(tmp_path), stop, 3, logging_steps=3)
    trainer.train()
    assert stop.stopped and trainer.state.global_step == 6


def train_on_ranks(rank: int, folder: str) -> tuple[bool, int]:
    stop = StopCallback()
    trainer = make_trainer(folder, stop, 2 if rank == 1 else None, ddp_backend="gloo")
    trainer.train()
    return stop.stopped, trainer.state.global_step


def test_all_ranks_stop_after_the_same_step(tmp_path):
    found = distributed.run(train_on_ranks, str(tmp_path), limit=240)
    assert found == [(True, 3)] * 2
    assert (Path(tmp_path) / "checkpoint-3" / "trainer_state.json").is_file()
