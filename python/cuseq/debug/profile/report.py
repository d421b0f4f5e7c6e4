"""Print, compare and draw a `StepProfile`.

Works on figures and rows instead of the class, because the class imports this module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ROWS = 10
_WIDTH = 70
_COLOURS = {"stream": "tab:red", "event": "tab:orange", "device": "tab:purple", "copy": "tab:brown"}

Figures = Mapping[str, float | int | None]


class Listing(NamedTuple):
    """A table with a title, a head, rows, and "<" or ">" for each column's alignment."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str

    def __str__(self) -> str:
        more = len(self.rows) - _ROWS
        lines = [self.title, _table([self.head, *self.rows[:_ROWS]], self.align)]
        if more > 0:
            lines.append(f"  and {more} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Timeline:
    """When the recorded steps were busy and when they waited, in microseconds from their start.

    Attributes:
        span_us: when host and GPU had finished.
        busy: start and end of the GPU's work; without a GPU, of the thread's PyTorch ops.
        marks: name, start and end of each wait; without a GPU, of each host read.
    """

    span_us: float
    busy: tuple[tuple[float, float], ...]
    marks: tuple[tuple[str, float, float], ...]


def count(number: float | None) -> str:
    """Format a count, which may be a fraction if it is a mean over steps; "-" for None."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def shorten(name: str) -> str:
    """Cut a kernel's name to the width of the table."""
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


# Rows of both tables: label, name of the figure, formatter.
_FIGURES: list[tuple[str, str, Callable[[float], str]]] = [
    ("wall time, ms", "wall_us", _ms),
    ("GPU busy, ms", "gpu_busy_us", _ms),
    ("GPU idle", "idle_share", _percent),
    ("waits for the GPU", "syncs", count),
    ("  for a stream", "syncs_stream", count),
    ("  for an event", "syncs_event", count),
    ("  for the device", "syncs_device", count),
    ("  for a copy", "syncs_copy", count),
    ("time in them, ms", "sync_us", _ms),
    ("host reads of values", "host_reads", count),
    ("copies to the host", "d2h_copies", count),
    ("  bytes", "d2h_bytes", count),
    ("copies to the GPU", "h2d_copies", count),
    ("kernels", "kernels", count),
    ("CUDA graph launches", "graph_launches", count),
    ("driver allocations", "allocations", count),
    ("PyTorch ops", "ops", count),
    ("tokens in memory", "tokens", count),
    ("pad tokens", "pads", count),
    ("pad share", "pad_share", _percent),
    ("tokens of repeated prefixes", "repeated", count),
    ("  share of real tokens", "repeated_share", _percent),
]


def text(head: str, figures: Figures, lists: Sequence[Listing], notes: Sequence[str]) -> str:
    """Format one profile for a terminal; figures that are None are left out."""
    rows = [
        [label, write(value)]
        for label, name, write in _FIGURES
        if (value := figures[name]) is not None
    ]
    return _parts(head + "\n" + _table(rows, "<>"), lists, notes)


def comparison(
    before: Figures,
    after: Figures,
    names: tuple[str, str],
    lists: Sequence[Listing],
    notes: Sequence[str],
) -> str:
    """Format two profiles side by side."""
    rows = [["a step", *names, "ratio"]]
    for label, name, write in _FIGURES:
        one, two = before[name], after[name]
        if one is None and two is None:
            continue
        cells = ("-" if value is None else write(value) for value in (one, two))
        ratio = f"{two / one:.2f}" if one and two is not None else ""
        rows.append([label, *cells, ratio])
    return _parts(_table(rows, "<>>>"), lists, notes)


def drawing() -> Callable[[Path, str, Timeline, bool], None]:
    """Return the drawing function; raise ImportError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the picture of a profile needs matplotlib: pip install matplotlib, or save it with "
            "picture=False"
        ) from error

    def draw(path: Path, title: str, line: Timeline, gpu: bool) -> None:
        figure = Figure(figsize=(12, 2.6), layout="constrained")
        axes = figure.subplots()
        spans = [(start / 1e3, (end - start) / 1e3) for start, end in line.busy]
        axes.broken_barh(spans, (0, 1), color="tab:blue", linewidth=0)
        kinds = dict.fromkeys(name for name, _, _ in line.marks)
        for index, kind in enumerate(kinds):
            marks = [(s / 1e3, (e - s) / 1e3) for name, s, e in line.marks if name == kind]
            colour = _COLOURS.get(kind, f"C{index + 1}")
            # The edge keeps short marks visible. matplotlib hides labels that begin with "_".
            axes.broken_barh(
                marks, (1.15, 0.6), color=colour, linewidth=0.8, label=kind.lstrip("_")
            )
        what = "GPU busy" if gpu else "PyTorch's ops"
        axes.set_yticks([0.5, 1.45], [what, "waits" if gpu else "host reads"])
        axes.set_ylim(-0.1, 1.9)
        axes.set_xlim(0, max(line.span_us / 1e3, 1e-3))
        axes.set_xlabel("ms since the step began, recorded (the profiler slows the host)")
        axes.set_title(title, loc="left", fontsize=10)
        if kinds:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        figure.savefig(path, dpi=120)

    return draw


def _parts(first: str, lists: Sequence[Listing], notes: Sequence[str]) -> str:
    return "\n\n".join([first, *(str(each) for each in lists if each.rows), *map(_wrapped, notes)])


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 88, initial_indent="  ", subsequent_indent="  ")


def _table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Format a table with each column as wide as its longest cell, after two spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(
            f"  {cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )
