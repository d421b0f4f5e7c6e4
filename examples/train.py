"""Train a causal language model on the same documents padded, packed, and packed with cuseq.

    python examples/train.py                        # the source files of Python's standard library
    python examples/train.py --data my_texts        # a file or folder of text, JSONL or Parquet
    python examples/train.py --model my_checkpoint  # a checkpoint, config or name on the Hub
    torchrun --standalone --nproc-per-node 2 examples/train.py  # one run on several ranks

Prints a table and writes results.json and results.png. The modes share the initial weights and the
documents of each step, so their losses can be compared step by step.

Under torchrun it trains one model on all ranks instead, with options of its own: add --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from _documents import UserError
from _figure import draw
from _modes import MODES
from _options import parse_options
from _prepare import prepare
from _report import print_documents, print_plan, print_rows, print_table, write_results
from _rows import choose_rows, pack
from _training import Measurement, TrainingPlan, train_mode
from transformers.utils import logging as transformers_logging

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # the exit code that a shell reports after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return the process's exit code."""
    transformers_logging.disable_progress_bar()
    if torch.distributed.is_torchelastic_launched():
        import _ranks

        return _ranks.main(arguments)
    try:
        options = parse_options(__doc__, arguments)
        if options.device.type == "cuda" and options.device.index is not None:
            torch.cuda.set_device(options.device)
        plan = make_plan(options)
        measurements, interrupted = train_modes(options.modes, plan)
        if measurements:
            report(measurements, plan, options)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        measurements, interrupted = [], True
    if interrupted:
        done = "Stopped early." if measurements else "Stopped before anything was measured."
        print(done, file=sys.stderr)
    return EXIT_INTERRUPTED if interrupted else 0


def make_plan(options: argparse.Namespace) -> TrainingPlan:
    """Read and pack the documents, and print how they were treated."""
    prepared = prepare(options, options.steps * options.row_length)
    rows = pack(prepared.fitted.sequences, options.row_length)
    print_documents(prepared.documents, prepared.fitted, options)
    print_rows(len(rows), options)
    plan = TrainingPlan(
        source=prepared.source,
        rows=choose_rows(rows, options.steps),
        row_length=options.row_length,
        batch_size=options.batch_size,
        warmup=options.warmup,
        learning_rate=options.learning_rate,
        device=options.device,
        seed=options.seed,
    )
    print_plan(plan)
    return plan


def train_modes(names: list[str], plan: TrainingPlan) -> tuple[list[Measurement], bool]:
    """Train one mode after the other; return the measurements and whether Ctrl-C ended the run."""
    measurements: list[Measurement] = []
    try:
        for name in names:
            measurement = train_mode(MODES[name], plan)
            if measurement.losses:
                measurements.append(measurement)
            if measurement.interrupted:
                return measurements, True
    except KeyboardInterrupt:
        return measurements, True
    return measurements, False


def report(
    measurements: list[Measurement], plan: TrainingPlan, options: argparse.Namespace
) -> None:
    """Print the table and write the results and the picture."""
    print_table(measurements, plan)
    options.out.mkdir(parents=True, exist_ok=True)
    write_results(options.out / "results.json", measurements, plan, options)
    draw(options.out / "results.png", measurements, plan)
    print(f"Written: results.json and results.png in {options.out}")


if __name__ == "__main__":
    sys.exit(main())
