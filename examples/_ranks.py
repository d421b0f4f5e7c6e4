"""Train a causal language model on several ranks, with cuseq's packed rows and FSDP2 or DDP.

    torchrun --standalone --nproc-per-node 2 examples/train.py --save-every 10 --out run
    torchrun --standalone --nproc-per-node 2 examples/train.py --resume run

Writes log.jsonl, results.json, results.png and checkpoints to --out. SIGTERM and SIGINT end the run
after the current step, with a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _checkpoint import Checkpoints, checkpoints_in
from _documents import UserError
from _exposed import profiled
from _flops import Flops, peak_flops
from _mesh import Ranks, joined_ranks, restarts
from _model import ModelSource
from _prepare import prepare
from _rank_data import RankRows, TokenStore, write_store
from _rank_report import StepLog, StepSize, write_results
from _rank_training import StopRequest, Trained
from _ranks_options import parse_options, write_options
from _report import print_documents, print_model
from _sharding import make_model
from transformers import PreTrainedModel

EXIT_USER_ERROR = 2
DATA, CHECKPOINTS = "data", "checkpoints"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank and return the process's exit code."""
    try:
        options = parse_options(__doc__, arguments)
        with joined_ranks(options.device.type, options.dp_replicate, options.cp) as ranks:
            run(options, ranks)
    except UserError as error:
        if os.environ["LOCAL_RANK"] == "0":  # machines may differ in what is wrong with them
            print(f"train.py: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Train until --steps, or until a signal; save and report.

    Raises:
        UserError: on all ranks, for a mistake in the options, the data or a checkpoint.
    """
    resumed = options.resume is not None or _restarted(options, ranks)
    options.out = options.resume or options.out
    source = ranks.on_first(lambda: _prepare_folder(options, ranks, resumed))
    store = ranks.on_each(lambda: TokenStore(options.out / DATA))
    checkpoints = Checkpoints(options.out / CHECKPOINTS, ranks, options.keep)
    manifest = checkpoints.newest() if resumed else None
    rows = RankRows(
        store,
        ranks,
        row_length=options.row_length,
        accumulation=options.accumulation,
        seed=options.seed,
        workers=options.workers,
        cp=ranks.context_parallel(source.config),
    )
    if ranks.is_first:
        print_model(source, ranks.device)
    model, warnings = make_model(source, ranks, options)
    trained = Trained(model, ranks, options)
    first_step = 0 if manifest is None else manifest["step"]
    # The model was made from the same numbers on all ranks. Their rows drop other activations.
    torch.manual_seed(seed_of(options.seed, ranks.rank, first_step))
    if manifest is not None:
        rows.load_state_dict(manifest.get("rows"))
        saved_by = (manifest["world_size"], manifest.get("device"))
        state = trained.state_dict(random=saved_by == (ranks.world_size, ranks.device.type))
        checkpoints.load(state, manifest)
        trained.load_state_dict(state)
    ranks.on_first(lambda: write_options(options.out, options))  # now that they are known to fit
    size = _step_size(model, ranks, options)
    log = StepLog(options.out, ranks, size, first_step, options.steps)
    for warning in warnings:
        log.say(warning)
    try:
        train(trained, rows, checkpoints, log, StopRequest(ranks), options, first_step)
    finally:
        log.close()
    if ranks.is_first:
        facts = {"options": {n: str(v) for n, v in vars(options).items() if n != "given"}}
        try:
            write_results(options.out, log.lines, {**facts, "ranks": ranks.world_size})
        except OSError as error:
            raise UserError(
                f"--out {options.out}: the results cannot be written ({error})"
            ) from error


def train(
    trained: Trained,
    rows: RankRows,
    checkpoints: Checkpoints,
    log: StepLog,
    stop: StopRequest,
    options: argparse.Namespace,
    first_step: int,
) -> None:
    """Make the steps from `first_step` on.

    Raises:
        UserError: the last checkpoint could not be saved.
    """
    saved, stopped, steps = first_step, False, first_step

    def save() -> None:
        _warn(checkpoints.wait(), log)
        facts = {"rows": rows.state_dict(), "device": options.device.type}
        checkpoints.save(trained.state_dict(), steps, facts)

    with stop.listening():
        for number, batches in zip(range(first_step, options.steps), rows):
            question = stop.start()
            steps = number + 1
            step = partial(trained.step, batches, number)
            if log.profiles(steps - first_step):
                numbers, share = profiled(step)
                log.add_exposed(steps, share)
            else:
                numbers = step()
            log.add(numbers)
            stopped = stop.answer(question)
            saves = options.save_every is not None and steps % options.save_every == 0
            if saves or steps % options.log_every == 0:  # a run that goes on from there needs all
                log.read()
            if saves:
                save()
                saved = steps
            if stopped:
                break
        log.read()
        if saved != steps and (stopped or options.save_every is not None):
            save()
        error = checkpoints.wait()
    if error is not None:
        raise UserError(f"{error}; the newest checkpoint is {_newest(checkpoints)}")
    if stopped:
        name = "another rank" if stop.signal is None else signal.Signals(stop.signal).name
        log.say(f"Stopped by {name} after step {steps}; --resume {options.out} goes on from there.")


def _warn(error: str | None, log: StepLog) -> None:
    if error is not None:
        log.say(f"Training goes on, but {error}")


def _newest(checkpoints: Checkpoints) -> str:
    found = checkpoints.found()
    return str(found[-1]) if found else "none"


def seed_of(seed: int, rank: int, step: int) -> int:
    """Return the seed of a rank's random numbers from a step on."""
    return int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0])


def _restarted(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Return whether torchrun started this run again after a rank failed, with a checkpoint."""
    count = torch.tensor(restarts())
    dist.all_reduce(count, dist.ReduceOp.MAX, group=ranks.host_group)
    has_checkpoint = ranks.on_first(lambda: bool(checkpoints_in(options.out / CHECKPOINTS)))
    return bool(count > 0) and has_checkpoint


def _prepare_folder(options: argparse.Namespace, ranks: Ranks, resumed: bool) -> ModelSource:
    """Write the tokens, or find those of the run that is resumed; return the model. On rank 0."""
    folder: Path = options.out / DATA
    if resumed:
        if not folder.is_dir():
            raise UserError(f"--resume {options.out}: no run there, it has no folder {DATA}")
        return TokenStore(folder).source()
    if checkpoints_in(options.out / CHECKPOINTS):
        raise UserError(
            f"--out {options.out}: it holds checkpoints of another run; --resume {options.out} "
            "continues it, another --out leaves it alone"
        )
    tokens = options.steps * options.row_length * options.accumulation * ranks.dp_size
    prepared = prepare(options, tokens)
    print_documents(prepared.documents, prepared.fitted, options)
    shutil.rmtree(folder, ignore_errors=True)
    write_store(folder, prepared)
    return prepared.source


def _step_size(model: PreTrainedModel, ranks: Ranks, options: argparse.Namespace) -> StepSize:
    flops = Flops(model)
    peak = peak_flops(ranks.device, options.precision)
    if options.peak_tflops is not None:
        peak = 1e12 * options.peak_tflops
    return StepSize(
        tokens=options.row_length * options.accumulation * ranks.dp_size,
        flops_per_token=flops.per_token if flops.known else None,
        flops_per_pair=flops.per_pair if flops.known else None,
        peak_flops=None if peak is None else peak * ranks.world_size,
    )
