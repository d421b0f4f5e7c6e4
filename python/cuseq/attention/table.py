"""The measurements that the choice of an attention backend follows.

The package brings a table of the GPUs that it was measured on. A table of the user's own, which
`python -m benchmarks attention_backends` writes, adds rows for the GPU and the torch that it names
and takes the place of rows with the same facts.
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from cuseq.attention.call import BACKENDS, MASKS

PLACE = ("gpu", "torch")  # where a row of the user's own table was measured
TIMES = BACKENDS[1:]
PACKAGED = "table.csv"  # has a column "torch" too
VARIABLE = "CUSEQ_ATTENTION_TABLE"
COMMAND = "python -m benchmarks attention_backends"

_MODES = ("eager", "compiled", "captured")

Times = dict[str, float]


class Facts(NamedTuple):
    """The facts of a call that decide how fast a backend is: `Facts` of measured.h."""

    sm: int  # compute capability, such as 90
    half: bool  # fp16 or bf16
    head_dim: int  # the larger one of q and v
    mask: str  # one of `MASKS`
    window: int  # keys that a query sees; 0 without a window
    mode: str  # "eager", "compiled" or "captured"
    tokens: int  # of the row
    sequences: int  # those that the offsets have room for if captured


FACTS = Facts._fields


class OwnTable(NamedTuple):
    """The user's own table, as far as it is about this machine."""

    rows: dict[Facts, Times]
    ignored: str  # which rows are not used and why; empty if all are


def read_table(version: str = torch.__version__) -> list[tuple[Facts, Times]]:
    """Return the measurements of the package: facts, and the microseconds of each backend.

    Facts that were measured with several releases of torch have the times of the newest one that is
    not newer than `version`.
    """
    text = resources.files("cuseq.attention").joinpath(PACKAGED).read_text()
    here = _order(version)
    found: dict[Facts, tuple[tuple[int, ...], Times]] = {}
    for _, line in table_lines(text):
        measured_by, facts = _order(line["torch"]), _facts(line)
        if measured_by <= here and (facts not in found or found[facts][0] < measured_by):
            found[facts] = measured_by, _times(line)
    return [(facts, times) for facts, (_, times) in found.items()]


def table_lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table as they are written, by column, with their line numbers."""
    written = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    if not written:
        return
    (_, head), *rows = written
    columns = next(csv.reader([head]))
    for number, line in rows:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise ValueError(
                f"line {number}: it must have a cell for each of the {len(columns)} columns, got "
                f"{len(cells)}"
            )
        yield number, dict(zip(columns, cells, strict=True))


def _facts(line: dict[str, str]) -> Facts:
    return Facts(
        int(line["sm"]), line["half"] == "1", int(line["head_dim"]), line["mask"],
        int(line["window"]), line["mode"], int(line["tokens"]), int(line["sequences"]),
    )  # fmt: skip


def _times(line: dict[str, str]) -> Times:
    return {name: float(line[name]) for name in TIMES if line.get(name)}


# ------------------------------------------------------------------------------- the user's own


def own_path() -> Path | None:
    """Return where the user's own table is, or None if `CUSEQ_ATTENTION_TABLE` is set to nothing.

    It is the file that the variable names, or else `cuseq/attention_table.csv` in the folder of the
    user's settings, `$XDG_CONFIG_HOME` or `~/.config`.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(settings, "cuseq", "attention_table.csv")


def read_own_table() -> OwnTable:
    """Read the rows of the user's own table that were measured on GPUs and a torch like these.

    Raises:
        ValueError: the file that `CUSEQ_ATTENTION_TABLE` names cannot be read, or a value in a
            table is not of its kind. The message names the file, the line, the rule and the value.
    """
    path = own_path()
    if path is None or not (path.exists() or os.environ.get(VARIABLE)):
        return OwnTable({}, "")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"CUSEQ_ATTENTION_TABLE must name a table of text, got {path}: {error}"
        ) from None
    try:
        lines = list(table_lines(text))
        found = {}
        for number, line in lines:
            _check(line, number)
            key = (line["gpu"], release(line["torch"]), _facts(line))
            if key in found:
                raise ValueError(f"line {number}: facts must be measured once, got them twice")
            found[key] = _times(line)
    except ValueError as error:
        raise ValueError(
            f"{path}, {error}: correct the table, or delete it and measure again: {COMMAND}"
        ) from None
    return _about_this_machine(path, found)


def release(version: str) -> str:
    """Return the release of a version of torch whose kernels are the same: 2.11 of 2.11.0+cu130."""
    return ".".join(version.split(".")[:2])


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release(version).split("."))


def gpu_names() -> set[str]:
    """Return the names of the GPUs of this process."""
    return {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}


def _about_this_machine(path: Path, found: dict[tuple[str, str, Facts], Times]) -> OwnTable:
    rows: dict[Facts, Times] = {}
    others: Counter[str] = Counter()
    gpus, here = gpu_names(), release(torch.__version__)
    for (gpu, measured_by, facts), times in found.items():
        if gpu not in gpus:
            others[gpu] += 1
        elif measured_by != here:
            others[f"torch {measured_by}"] += 1
        else:
            rows[facts] = times
    if not others:
        return OwnTable(rows, "")
    kinds = ", ".join(f"{count} of {kind}" for kind, count in others.items())
    this = f"{', '.join(sorted(gpus))} with torch {here}"
    return OwnTable(rows, f"ignored rows of {path}: {kinds}; this is {this}")


def _is_whole(least: int) -> Callable[[str], bool]:
    return lambda cell: cell.isascii() and cell.isdigit() and len(cell) < 10 and int(cell) >= least


def _is_time(cell: str) -> bool:
    try:
        return not cell or 0 < float(cell) < math.inf
    except ValueError:
        return False


# The check of each column's cells, and its words.
_RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "sm": (_is_whole(10), "a compute capability such as 90"),
    "half": (lambda cell: cell in ("0", "1"), "1 for fp16 and bf16, or 0"),
    "head_dim": (_is_whole(1), "a number from 1 to 999999999"),
    "mask": (lambda cell: cell in MASKS, f"one of {', '.join(MASKS)}"),
    "window": (_is_whole(0), "a number of keys from 0 to 999999999"),
    "mode": (lambda cell: cell in _MODES, f"one of {', '.join(_MODES)}"),
    "tokens": (_is_whole(1), "a number from 1 to 999999999"),
    "sequences": (_is_whole(1), "a number from 1 to 999999999"),
    "gpu": (bool, "the name of a GPU"),
    "torch": (bool, "a version of torch"),
} | {name: (_is_time, "microseconds above 0, or empty") for name in TIMES}


def _check(line: dict[str, str], number: int) -> None:
    for name in (*FACTS, *PLACE):
        if name not in line:
            raise ValueError(f"line {number}: it must have a column {name}, got {', '.join(line)}")
    for name, cell in line.items():
        if name not in _RULES:
            raise ValueError(
                f"line {number}: its columns must be {', '.join(_RULES)}, got {name!r}"
            )
        fits, rule = _RULES[name]
        if not fits(cell):
            raise ValueError(f"line {number}: {name} must be {rule}, got {cell!r}")
    if not _times(line):
        raise ValueError(f"line {number}: it must have the time of a backend, got none")
