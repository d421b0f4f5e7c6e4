"""What the examples' runs share: their folder, its checkpoints, and how they train."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import KIND, check_same_on_ranks, say

from cuseq.integrations.transformers import StopCallback

_locks: list[Any] = []  # open files, whose locks end with this process, however it ends


def make_folder(option: str, folder: str | Path) -> None:
    """Make a run's folder; exit if it cannot be made, or if another run writes there now."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            _locks.append(open(Path(folder) / ".lock", "w"))
            fcntl.lockf(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(f"{option} {folder}: another run writes there now") from error
    except OSError as error:
        raise SystemExit(f"{option} {folder}: cannot be made ({error.strerror})") from error


def newest_checkpoint(
    folder: str | Path,
    last_file: str,
    resume: bool,
    option: str = "--output_dir",
    how: str = "--resume",
) -> str | None:
    """Return the newest checkpoint of a run that goes on, by `last_file`, which is written last.

    A run goes on with `resume`, or if torchrun started its ranks again after one of them died.

    Raises:
        SystemExit: it is missing or of another run, or its folder cannot be taken.
    """
    make_folder(option, folder)
    found = sorted(Path(folder).glob(last_file), key=lambda one: int(one.parent.name.split("-")[1]))
    newest = str(found[-1].parent) if found else None
    # Each machine counts the failures of its own ranks, so one that counted some speaks for all.
    restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), device=KIND)
    if dist.is_initialized():
        dist.all_reduce(restarts, dist.ReduceOp.MAX)
    check_same_on_ranks(checkpoint=newest)
    if resume and not found:
        raise SystemExit(f"--resume: {folder} has no checkpoint")
    if found and not resume and restarts == 0:
        raise SystemExit(f"{folder} has checkpoints of another run: {how} goes on from them")
    return newest


def given_checkpoint(args: Any) -> str | None:
    """Return --resume_from_checkpoint of Trainer's options, and take the run's folder.

    Raises:
        SystemExit: it is not whole, or the folder has another run.
    """
    last_file, how = "trainer_state.json", "--resume_from_checkpoint PATH"
    if (given := args.resume_from_checkpoint) is None:
        return newest_checkpoint(args.output_dir, f"checkpoint-*/{last_file}", False, how=how)
    if not Path(given, last_file).is_file():
        raise SystemExit(f"--resume_from_checkpoint {given}: no whole checkpoint")
    make_folder("--output_dir", args.output_dir)
    return given


def train(trainer: Any, checkpoint: str | None, resume: str) -> None:
    """Train, unless all steps are made, and write the model; `resume` is the option."""
    most, folder = trainer.args.max_steps, f"{trainer.args.output_dir}/model"
    if checkpoint is not None and Path(folder).exists():
        steps = json.loads(Path(checkpoint, "trainer_state.json").read_text())["global_step"]
        if 0 < most <= steps:  # Trainer would make one more
            say(f"{trainer.args.output_dir} has made {steps} of {most} steps already.")
            return
    trainer.add_callback(stop := StopCallback())
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped:
        say(f"Stopped after step {trainer.state.global_step}; {resume} goes on from there.")
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()  # the first rank may still be writing
    say(f"Written: the model and its tokenizer in {folder}")


def check_same_run(
    folder: str | Path, checkpoint: str | None, loaded: Any, model: Any, **options: int
) -> None:
    """Note what a run is made of in its folder; exit if one that goes on differs."""
    documents, tokenizer = loaded
    chosen = range(0, len(documents), 1 + len(documents) // 1000)
    known = [sorted(tokenizer.get_vocab().items()), *(documents[i] for i in chosen)]
    facts = dict(
        documents=len(documents),
        weights=sum(weight.numel() for weight in model.parameters()),
        texts_and_tokenizer=hashlib.sha256(repr(known).encode()).hexdigest()[:16],
        **options,
    )
    check_same_on_ranks(**facts)
    file = Path(folder) / "run.json"
    if checkpoint is None:
        if os.environ.get("RANK", "0") == "0":
            file.write_text(json.dumps(facts))
    elif file.exists() and (before := json.loads(file.read_text())) != facts:
        differ = {name: f"{before.get(name)}, now {facts[name]}" for name in facts
                  if before.get(name) != facts[name]}  # fmt: skip
        raise SystemExit(f"{folder}: a run that goes on must have the rows of before, got {differ}")
