"""Check a transformers model: does a packed row give the same result as each document alone?

    python -m cuseq.debug.packing_check MODEL [--attn cuseq] [--tiny] [--json FILE]

Exit codes: 0 the results agree; 1 they differ; 2 the check could not run or the JSON file could not
be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cuseq._base.foreign import load
from cuseq.debug.packing_check import PackingReport, check_packing

FINE, WRONG, NOT_RUN = 0, 1, 2
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, print its table and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _run(options)
    except Exception as error:  # any error: callers must not mistake it for a verdict
        print(f"the check could not run: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_RUN
    print(report, flush=True)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        except OSError as error:
            print(
                f"{options.json} could not be written: {type(error).__name__}: {error}",
                file=sys.stderr,
            )
            return NOT_RUN
    return FINE if report.ok else WRONG


def _run(options: argparse.Namespace) -> PackingReport:
    load("transformers", "python -m cuseq.debug.packing_check")
    from cuseq.debug.packing_check import _load  # imports transformers, which --help does not need

    _load.quiet()
    model = _load.load_model(
        options.model,
        attention=options.attn,
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
        tiny=options.tiny,
    )
    if options.no_cache:
        model.config.get_text_config(decoder=True).use_cache = False
    documents = _load.random_documents(model.config, options.tokens, options.documents)
    return check_packing(model, documents, rtol=options.rtol, bitwise=options.bitwise)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuseq.debug.packing_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="name or folder of a language model, with images or without"
    )
    parser.add_argument("--attn", default="cuseq", help="attn_implementation, default cuseq")
    parser.add_argument("--dtype", default="float32", choices=_DTYPES)
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of all documents together, default 256"
    )
    parser.add_argument(
        "--documents", type=int, default=6, help="number of documents, default 6, at least 4"
    )
    parser.add_argument("--rtol", type=float, help="largest relative difference, default by dtype")
    parser.add_argument(
        "--bitwise", action="store_true", help="documents must have the same bits in other rows too"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="check a small model of the same family with random weights",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="turn use_cache off in the config, as Trainer does",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report to FILE as JSON"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
