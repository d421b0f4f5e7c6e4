"""Which causal-LM families of the installed transformers train on packed rows with `cuseq.enable`?

    python -m tests.families [FAMILY ...] [--device cuda] [--jobs N] [--docs FILE]
        [--json FILE]

Makes a small random model of every family in a process of its own, enables it, and compares it with
the model before. Downloads nothing.

Exit codes: 0 no family leaks or differs without a warning of `enable`; 1 one does; 2 a name is
unknown, or there is no GPU for `--device cuda`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FINE, WRONG, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the families, print a line for each as it is ready, and return the exit code."""
    options = _parser().parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # which leaves CUDA to the forks
    import torch

    from tests.families import _table
    from tests.families._checks import CHECKS
    from tests.families._sweep import sweep
    from tests.families.models import family_names

    names = family_names()
    unknown = sorted(set(options.families) - set(names))
    if unknown:
        print(f"families must be causal LMs of transformers, got {unknown[0]}", file=sys.stderr)
        return UNUSABLE
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device must be cpu where torch finds no GPU, got cuda", file=sys.stderr)
        return UNUSABLE
    checks = [name for name in CHECKS if name not in options.without]
    results = []
    for result in sweep(
        options.families or names,
        checks,
        jobs=options.jobs,
        seconds=options.seconds,
        device=options.device,
    ):
        results.append(result)
        print(_table.as_line(result), flush=True)
    print(_table.as_text([]) if not results else _table.as_text(results).rpartition("\n")[2])
    if options.json is not None:
        text = json.dumps([dataclasses.asdict(result) for result in results], indent=2)
        options.json.write_text(text + "\n")
    if options.docs is not None:
        options.docs.write_text(_table.as_page(results, options.device))
    return WRONG if any(result.is_wrong for result in results) else FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", metavar="FAMILY", nargs="*", help="model type, default all")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the models run, default cpu"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, default 1")
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of one family, default 300"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="CHECK",
        help="leave a check out, such as compile, which takes longest",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
