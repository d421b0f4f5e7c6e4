"""Command-line options of the example."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _documents import UserError
from _modes import MODES

import cuseq

CPU_DEFAULTS: dict[str, Any] = dict(
    modes=["padded", "packed", "cuseq"],
    row_length=4096,
    steps=24,
    vocab_size=4096,
    learning_rate=3e-3,
)
CUDA_DEFAULTS: dict[str, Any] = dict(
    modes=list(MODES),
    row_length=8192,
    steps=25,
    vocab_size=16384,
    learning_rate=3e-4,
)
MODEL_LEARNING_RATE = 2e-5  # pretrained weights need small steps


def parse_options(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the given options, with the device's defaults for the others.

    Raises:
        UserError: options that do not work, together or on this machine.
    """
    options = _parser(description).parse_args(arguments)
    fill_in_defaults(options)
    if options.compile and "cuseq-compiled" not in options.modes:
        options.modes = [*options.modes, "cuseq-compiled"]
    _check(options)
    return options


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_inputs(parser)
    add_training(parser)
    _add_comparison(parser)
    return parser


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to train on and where results go."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help='a text file, a JSONL file with a "text" in each line, a Parquet file with a column '
        '"text", or a folder of them (default: the source files of Python\'s standard library)',
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a checkpoint's folder or its name on the Hub (organisation/name), or a config file "
        "or its folder, which start from random weights (default: a Qwen3 that suits the device)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        default=Path(__file__).parent / "out",
        help="folder for results.json and results.png (default: examples/out)",
    )
    parser.add_argument(
        "--long",
        choices=("split", "drop", "error"),
        help="what to do with a document longer than --max-length: split it into pieces, drop "
        "it, or stop (default: split, and drop for the standard library)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of the longest sequence (default: --row-length; for the standard library a "
        "quarter of that, which leaves a mix of short files like the texts of fine-tuning)",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of every training run."""
    parser.add_argument(
        "--row-length",
        type=int,
        metavar="N",
        help=f"tokens of a packed row {_defaults('row_length')}",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"optimiser steps {_defaults('steps')}"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="of the tokenizer that is trained on the documents, unless --model brings one "
        f"{_defaults('vocab_size')}",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="X",
        help=f"of AdamW {_defaults('learning_rate')}; with --model {MODEL_LEARNING_RATE}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the weights and of the documents' order (default: %(default)s)",
    )
    parser.add_argument(
        "--device", type=torch.device, help="cpu, cuda or cuda:1 (default: CUDA if there is one)"
    )


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes",
        type=_modes,
        metavar="A,B",
        help=f"some of {','.join(MODES)} (default: all, on a CPU without the last)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="add cuseq-compiled to the modes of a CPU"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        default=8,
        help="documents of a padded batch (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        default=2,
        help="first steps of each mode that are left out of the timings (default: %(default)s)",
    )


def _defaults(name: str) -> str:
    return f"(default: {CPU_DEFAULTS[name]}, on CUDA {CUDA_DEFAULTS[name]})"


def _modes(value: str) -> list[str]:
    names = value.split(",")
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(MODES)}, got {unknown[0]!r}")
    return names


def fill_in_defaults(options: argparse.Namespace) -> None:
    """Replace None by the default that suits the device and the data."""
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.learning_rate is None and options.model is not None:
        options.learning_rate = MODEL_LEARNING_RATE
    defaults = CUDA_DEFAULTS if options.device.type == "cuda" else CPU_DEFAULTS
    for name, value in defaults.items():
        if getattr(options, name, value) is None:
            setattr(options, name, value)
    if options.long is None:
        options.long = "drop" if options.data is None else "split"
    if options.max_length is None:
        options.max_length = options.row_length // (4 if options.data is None else 1)


def _check(options: argparse.Namespace) -> None:
    check_training(options)
    if options.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {options.batch_size}")
    if not 0 <= options.warmup < options.steps:
        raise UserError(
            f"--warmup must be from 0 to below --steps ({options.steps}), got {options.warmup}"
        )


def check_training(options: argparse.Namespace) -> None:
    """Raise UserError for lengths or a device that cannot be trained with."""
    if not 2 <= options.max_length <= options.row_length:
        raise UserError(
            f"--max-length must be from 2 to --row-length ({options.row_length}), "
            f"got {options.max_length}"
        )
    if options.device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda, got {options.device}")
    if options.device.type == "cuda" and (options.device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {options.device}: PyTorch finds {torch.cuda.device_count()} CUDA devices"
        )
    if options.device.type == "cuda" and not cuseq.build_info()["cuda"]:
        raise UserError(
            "this cuseq was built without CUDA: build it again with a CUDA toolkit, "
            "or train with --device cpu"
        )
