"""Command-line options of training on several ranks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _documents import UserError
from _options import add_inputs, add_training, check_training, fill_in_defaults

OPTIONS = "options.json"
PLACES = ("out", "resume")  # options that a resumed run does not take over


def parse_options(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the given options, with those of the run that is resumed or the device's defaults for
    the others. `given` in them are all but the device's.

    Raises:
        UserError: options that do not work, together or on this machine.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_inputs(parser)
    add_training(parser)
    _add_ranks(parser)
    _add_speed(parser)
    _add_optimizer(parser)
    _add_checkpoints(parser)
    options = parser.parse_args(arguments)
    if options.resume is not None:
        parser.set_defaults(**_read_options(options.resume))
        options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if name not in PLACES}
    options.given = given
    fill_in_defaults(options)
    on_cuda = options.device.type == "cuda"
    if options.precision is None:
        options.precision = "bf16" if on_cuda else "fp32"
    if options.workers is None:
        options.workers = 2 if on_cuda else 0
    if options.log_every is None:
        options.log_every = 10 if on_cuda else 1
    if options.lr_warmup is None:
        options.lr_warmup = options.steps // 10
    _check(options)
    return options


def write_options(folder: Path, options: argparse.Namespace) -> None:
    """Write the options of a run to its folder, for one that resumes it.

    Raises:
        UserError: the file cannot be written.
    """
    plain = {
        name: value if isinstance(value, bool | int | float | None) else str(value)
        for name, value in options.given.items()
    }
    try:
        (folder / OPTIONS).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {folder}: the options cannot be written ({error})") from error


def _read_options(folder: Path) -> dict[str, Any]:
    """Return the options of a run by name; none if it wrote none.

    Raises:
        UserError: there is no such folder, or the file is damaged.
    """
    if not folder.is_dir():  # perhaps on this machine alone, whose ranks would have other options
        raise UserError(f"--resume {folder}: no run there, it is not a folder")
    file = folder / OPTIONS
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read ({error}); without it, give all options again"
        ) from error


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dp-replicate",
        type=int,
        metavar="N",
        default=1,
        help="copies of the model; each is sharded over the remaining ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--shard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard weights, gradients and AdamW by FSDP2; --no-shard keeps all of them on every "
        "rank and averages gradients by DDP, which works less on the host and takes 16 bytes a "
        "weight, 20 with --accumulation (default: --shard)",
    )
    parser.add_argument(
        "--cp",
        type=int,
        metavar="N",
        default=1,
        help="ranks that share a row (default: %(default)s)",
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        metavar="N",
        default=1,
        help="rows of each data-parallel rank in an optimiser step (default: %(default)s)",
    )


def _add_speed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="compile layers and loss")
    parser.add_argument(
        "--recompute", action="store_true", help="recompute the decoder layers in the backward"
    )
    parser.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        help="free gathered weights after the forward and gather them again in the backward; "
        "keeping them saves time and takes 2 bytes a weight in bf16 (default: keep them if that is "
        "at most a twentieth of the GPU's memory)",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="of the forward and backward; weights, gradients and AdamW stay fp32 (default: fp32, "
        "on CUDA bf16)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of each rank that make batches (default: 0, on CUDA 2)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="of a GPU at --precision, for the MFU (default: known GPUs at bf16)",
    )
    parser.add_argument(
        "--log-every",
        type=int,
        metavar="N",
        help="steps from one reading of the losses to the next, which waits for the device "
        "(default: 1, on CUDA 10)",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="X",
        default=1.0,
        help="gradients are clipped to this norm (default: %(default)s)",
    )
    parser.add_argument(
        "--lr-warmup",
        type=int,
        metavar="N",
        help="steps in which the learning rate rises, before a cosine to a tenth (default: a "
        "tenth of --steps)",
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="steps from one checkpoint to the next (default: only SIGTERM and SIGINT save one)",
    )
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        default=2,
        help="checkpoints that are kept, the newest (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="the --out of an earlier run: continue it there, from its newest checkpoint, with its "
        "documents, tokenizer and model, and with its options where no others are given",
    )


def _check(options: argparse.Namespace) -> None:
    if options.device.index is not None:
        raise UserError(
            f"--device must be cpu or cuda, since each rank takes a GPU of its own, "
            f"got {options.device}"
        )
    check_training(options)
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.device.type == "cuda" and on_machine > torch.cuda.device_count():
        raise UserError(
            f"--nproc-per-node must be at most the machine's GPUs, {torch.cuda.device_count()}, "
            f"got {on_machine}"
        )
    at_least = {1: ("dp_replicate", "cp", "accumulation", "steps", "keep", "log_every")}
    at_least[0] = ("workers", "lr_warmup")
    for least, names in at_least.items():
        for name in names:
            value = getattr(options, name)
            if value < least:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be at least {least}, got {value}")
    if options.save_every is not None and options.save_every < 1:
        raise UserError(f"--save-every must be at least 1, got {options.save_every}")
    if not options.max_grad_norm > 0:
        raise UserError(f"--max-grad-norm must be above 0, got {options.max_grad_norm}")
    if not options.shard and options.dp_replicate > 1:
        raise UserError(
            f"--dp-replicate must be 1 with --no-shard, which puts a copy on every rank, got "
            f"{options.dp_replicate}"
        )
    if not options.shard and options.reshard_after_forward is not None:
        raise UserError("--reshard-after-forward must not be given with --no-shard")
    if options.row_length % options.cp != 0:
        raise UserError(
            f"--row-length must be a multiple of --cp ({options.cp}), got {options.row_length}"
        )
