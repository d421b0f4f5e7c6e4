"""How a `StepProfile` is printed, compared and drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuseq.debug.profile.step import StepProfile

_ROWS = 10
_WIDTH = 70
_COLOURS = {"stream": "tab:red", "event": "tab:orange", "device": "tab:purple", "copy": "tab:brown"}


def summary(profile: StepProfile) -> dict[str, float | int | None]:
    """The figures of one step; None for what cannot be known."""
    steps, tokens = profile.steps, profile.tokens
    sums = {"wall_us": profile.wall_us, "host_reads": profile.read_count, "ops": profile.ops}
    on_gpu = {
        "gpu_busy_us": profile.gpu_busy_us,
        "syncs": profile.sync_count(),
        **{f"syncs_{kind}": profile.sync_count(kind) for kind in _COLOURS},
        "sync_us": sum(wait.us for wait in profile.syncs),
        "d2h_copies": profile.d2h_copies,
        "d2h_bytes": sum(copy.bytes for copy in profile.copies if "DtoH" in copy.kind),
        "h2d_copies": profile.h2d_copies,
        "kernels": profile.kernels,
        "graph_launches": profile.graph_launches,
        "allocations": profile.allocations,
    }
    sums |= on_gpu if profile.gpu else dict.fromkeys(on_gpu)
    return {
        **{name: None if value is None else value / steps for name, value in sums.items()},
        "idle_share": profile.idle_share,
        "tokens": None if tokens is None else tokens.in_memory,
        "pads": None if tokens is None else tokens.pads,
        "pad_share": None if tokens is None else tokens.pad_share,
    }


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


# Rows of both tables: what they are called, the figure, and how it is written.
_FIGURES: list[tuple[str, str, Callable[[float], str]]] = [
    ("wall time, ms", "wall_us", _ms),
    ("GPU busy, ms", "gpu_busy_us", _ms),
    ("GPU idle", "idle_share", _percent),
    ("waits for the GPU", "syncs", _count),
    ("  for a stream", "syncs_stream", _count),
    ("  for an event", "syncs_event", _count),
    ("  for the device", "syncs_device", _count),
    ("  for a copy", "syncs_copy", _count),
    ("time in them, ms", "sync_us", _ms),
    ("host reads of values", "host_reads", _count),
    ("copies to the host", "d2h_copies", _count),
    ("  bytes", "d2h_bytes", _count),
    ("copies to the GPU", "h2d_copies", _count),
    ("kernels", "kernels", _count),
    ("CUDA graph launches", "graph_launches", _count),
    ("driver allocations", "allocations", _count),
    ("PyTorch ops", "ops", _count),
    ("tokens in memory", "tokens", _count),
    ("pad tokens", "pads", _count),
    ("pad share", "pad_share", _percent),
]


def text(profile: StepProfile) -> str:
    """The whole profile for a terminal, figures a step."""
    steps = profile.steps
    figures = summary(profile)
    head = f"A step on {profile.device}" + (f", mean of {steps}" if steps > 1 else "")
    rows = [
        [name, write(figures[key])] for name, key, write in _FIGURES if figures[key] is not None
    ]
    parts = [head + "\n" + _table(rows, "<>")]
    if profile.syncs:
        waits = [
            [_count(wait.count / steps), f"{wait.us / steps:,.1f}", wait.kind, wait.line]
            for wait in profile.syncs
        ]
        parts.append(_listing("Waits for the GPU", ["count", "us", "kind", "line"], waits, ">><<"))
    if profile.host_reads:
        reads = [[_count(r.count / steps), r.op, r.line] for r in profile.host_reads]
        parts.append(_listing("Host reads of values", ["count", "op", "line"], reads, "><<"))
    # Without a GPU, the ops are what there is to see.
    work = profile.kernel_table if profile.gpu else profile.op_table
    if work:
        named = [[_count(w.count / steps), f"{w.us / steps:,.1f}", _short(w.name)] for w in work]
        title = "Kernels, the longest first" if profile.gpu else "PyTorch ops, the most frequent"
        parts.append(_listing(title, ["count", "us", "name"], named, ">><"))
    return "\n\n".join([*parts, *map(_wrapped, profile.notes)])


def comparison(before: StepProfile, after: StepProfile, names: tuple[str, str]) -> str:
    """Both profiles' figures beside each other, a step each."""
    one, two = summary(before), summary(after)
    rows = [["a step", *names, "ratio"]]
    for name, key, write in _FIGURES:
        if one[key] is None and two[key] is None:
            continue
        rows.append([name, _cell(one[key], write), _cell(two[key], write), _ratio(one, two, key)])
    parts = [_table(rows, "<>>>")]
    lines = [
        [_cell(a, _count), _cell(b, _count), kind, line]
        for (kind, line), (a, b) in _both(before, after).items()
    ]
    if lines:
        parts.append(_listing("Waits for the GPU", [*names, "kind", "line"], lines, ">><<"))
    notes = dict.fromkeys((*before.notes, *after.notes))
    return "\n\n".join([*parts, *map(_wrapped, notes)])


def drawing() -> Callable[[StepProfile, Path], None]:
    """The function that draws; raises ImportError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the picture of a profile needs matplotlib: pip install matplotlib, or save it with "
            "picture=False"
        ) from error

    def draw(profile: StepProfile, path: Path) -> None:
        line = profile.timeline
        figure = Figure(figsize=(12, 2.6), layout="constrained")
        axes = figure.subplots()
        spans = [(start / 1e3, (end - start) / 1e3) for start, end in line.busy]
        axes.broken_barh(spans, (0, 1), color="tab:blue", linewidth=0)
        kinds = dict.fromkeys(name for name, _, _ in line.marks)
        for index, kind in enumerate(kinds):
            marks = [(s / 1e3, (e - s) / 1e3) for name, s, e in line.marks if name == kind]
            colour = _COLOURS.get(kind, f"C{index + 1}")
            # With an edge, since most are too short to be seen; a label's first _ would hide it.
            axes.broken_barh(
                marks, (1.15, 0.6), color=colour, linewidth=0.8, label=kind.lstrip("_")
            )
        what = "GPU busy" if profile.gpu else "PyTorch's ops"
        axes.set_yticks([0.5, 1.45], [what, "waits" if profile.gpu else "host reads"])
        axes.set_ylim(-0.1, 1.9)
        axes.set_xlim(0, max(line.span_us / 1e3, 1e-3))
        axes.set_xlabel("ms since the step began, recorded (the profiler slows the host)")
        axes.set_title(_title(profile), loc="left", fontsize=10)
        if kinds:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        figure.savefig(path, dpi=120)

    return draw


def _title(profile: StepProfile) -> str:
    wall = f"{profile.device}: {profile.wall_us / profile.steps / 1e3:,.2f} ms a step"
    if profile.gpu:
        waits = profile.sync_count() / profile.steps
        return f"{wall}, GPU idle {profile.idle_share:.0%}, {_count(waits)} waits"
    return f"{wall}, {_count(profile.read_count / profile.steps)} host reads"


def _both(before: StepProfile, after: StepProfile) -> dict[tuple[str, str], list[float | None]]:
    counts: dict[tuple[str, str], list[float | None]] = {}
    for side, profile in enumerate((before, after)):
        for wait in profile.syncs:
            both = counts.setdefault((wait.kind, wait.line), [None, None])
            both[side] = wait.count / profile.steps
    return counts


def _cell(value: Any, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


def _ratio(one: dict[str, Any], two: dict[str, Any], key: str) -> str:
    if not one[key] or two[key] is None:
        return ""
    return f"{two[key] / one[key]:.2f}"


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 88, initial_indent="  ", subsequent_indent="  ")


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."


def _listing(title: str, head: list[str], rows: list[list[str]], align: str) -> str:
    more = len(rows) - _ROWS
    lines = [title, _table([head, *rows[:_ROWS]], align)]
    if more > 0:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns as wide as their longest cell, two spaces before each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(
            f"  {cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )
