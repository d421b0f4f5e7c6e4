"""Report what was trained and measured: in words, as a table and as a JSON file."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from _documents import Documents
from _model import ModelSource
from _modes import MODES
from _rows import FittedSequences
from _training import Measurement, TrainingPlan

import cuseq

BASELINE = "packed"  # the mode that the others' speed is compared with
MISSING = "-"

Value = TypeVar("Value")


def print_documents(
    documents: Documents, fitted: FittedSequences, options: argparse.Namespace
) -> None:
    """Print where the documents come from, and how many are skipped, cut or split."""
    tokens = sum(map(len, fitted.sequences))
    print(f"Documents: {len(documents.texts):,} from {documents.source}.")
    if documents.empty:
        print(f"  {_count(documents.empty, 'document')} without text skipped.")
    if documents.undecodable:
        print(f"  {_count(documents.undecodable, 'file')} not in UTF-8 skipped.")
    if fitted.too_long:
        fate = f"split into {fitted.pieces:,} pieces" if fitted.pieces else "dropped"
        hint = "" if fitted.pieces else " (--long split keeps them, in pieces)"
        print(
            f"  {_count(fitted.too_long, 'document')} longer than {options.max_length:,} tokens "
            f"{fate}{hint}."
        )
    if fitted.too_short:
        print(f"  {_count(fitted.too_short, 'sequence')} of a single token skipped.")
    print(f"  {tokens:,} tokens in {len(fitted.sequences):,} sequences.")


def print_rows(number: int, options: argparse.Namespace) -> None:
    """Print how many rows of --row-length tokens there are."""
    print(f"  They pack into {number:,} rows of {options.row_length:,} tokens.")
    if number < options.steps:
        print(f"  Rows are repeated: {options.steps} steps want more than there are.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_plan(plan: TrainingPlan) -> None:
    """Print the model, the machine and the length of the run."""
    tokens = sum(len(sequence) for row in plan.rows for sequence in row)
    sequences = sum(map(len, plan.rows))
    print_model(plan.source, plan.device)
    print(
        f"Each mode: {len(plan.rows)} steps on the same {sequences:,} sequences, "
        f"{tokens:,} real tokens; the first {plan.warmup} steps are not timed.\n"
    )


def print_model(source: ModelSource, device: torch.device) -> None:
    """Print the shape of the model, where its weights come from, and the device."""
    config = source.config.get_text_config()
    start = "random weights" if source.checkpoint is None else "the checkpoint's weights"
    print(
        f"Model: {config.model_type}, {_count(config.num_hidden_layers, 'layer')}, hidden size "
        f"{config.hidden_size}, vocabulary {config.vocab_size:,}, {start}, on "
        f"{device_name(device)}."
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {_count(torch.get_num_threads(), 'thread')}"


def print_table(measurements: list[Measurement], plan: TrainingPlan) -> None:
    """Print one line for each mode, without the columns that no mode fills."""
    columns = {
        "": [MODES[m.mode].label for m in measurements],
        "real tokens/s": _cells((m.tokens_per_second for m in measurements), "{:,.0f}".format),
        "speed": _cells(speedups(measurements), "{:.2f}x".format),
        "padding": _cells((m.padding_share for m in measurements), "{:.1%}".format),
        "step": _cells((m.step_seconds for m in measurements), _milliseconds),
        "forward": _cells((m.forward_seconds for m in measurements), _milliseconds),
        "backward": _cells((m.backward_seconds for m in measurements), _milliseconds),
        memory_title(plan.device): _cells((m.peak_memory_bytes for m in measurements), _gibibytes),
        "last loss": _cells((m.losses[-1] for m in measurements), "{:.4f}".format),
        "syncs/step": _cells((m.waits for m in measurements), str),
        "compiling": _cells((m.compile_seconds for m in measurements), "{:.1f} s".format),
    }
    filled = {title: cells for title, cells in columns.items() if set(cells) != {MISSING}}
    table = [[title, *cells] for title, cells in filled.items()]
    widths = [max(map(len, column)) for column in table]
    print()
    for mode, *numbers in zip(*table):
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:])]
        print("  ".join([mode.ljust(widths[0]), *cells]))
    difference = loss_difference(measurements)
    if difference is not None:
        print(f"\nLosses of packed sdpa and packed cuseq differ by at most {difference:.1e}.")


def speedups(measurements: list[Measurement]) -> list[float | None]:
    """Return the real tokens per second of each mode over those of packed sdpa."""
    speeds = {m.mode: m.tokens_per_second for m in measurements}
    baseline = speeds.get(BASELINE)
    return [
        None if baseline is None or speed is None else speed / baseline for speed in speeds.values()
    ]


def loss_difference(measurements: list[Measurement]) -> float | None:
    """Return the largest difference in any step's loss between packed sdpa and packed cuseq."""
    losses = {m.mode: m.losses for m in measurements}
    if not {BASELINE, "cuseq"} <= losses.keys():
        return None
    return max(abs(a - b) for a, b in zip(losses[BASELINE], losses["cuseq"]))


def memory_title(device: torch.device) -> str:
    """Return the title of the memory column.

    CUDA's allocator counts tensors; elsewhere only the growth of the process is known.
    """
    return "peak memory" if device.type == "cuda" else "peak RSS growth"


def _cells(values: Iterable[Value | None], text: Callable[[Value], str]) -> list[str]:
    return [MISSING if value is None else text(value) for value in values]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def write_results(
    path: Path, measurements: list[Measurement], plan: TrainingPlan, options: argparse.Namespace
) -> None:
    """Write options, environment, rows and measurements as JSON."""
    results = {
        "options": {name: _plain(value) for name, value in vars(options).items()},
        "environment": {
            "device": device_name(plan.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuseq": cuseq.__version__,
            "python": platform.python_version(),
        },
        "model": plan.source.config.to_diff_dict(),
        "sequence_lengths": [[len(sequence) for sequence in row] for row in plan.rows],
        "modes": [asdict(measurement) for measurement in measurements],
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    return str(value) if isinstance(value, (Path, torch.device)) else value
