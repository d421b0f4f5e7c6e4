"""Draw attention over parts of rows by the number of ranks, beside the planner's prediction.

    python benchmarks/draw_cp_scaling.py RUN.json [RUN.json ...]

Each run is a result of `cp_attention` over flash attention, on GPUs, with any number of ranks. Each
kind of row becomes a panel: the time of a layer on the slowest rank, forward and backward, of cuseq
and of its peers, and what `cp_plan` predicts for 2, 4 and 8 ranks, measured or not. A row that
several runs measured with as many ranks counts as in the last of them. Writes `cp_scaling.png`
beside the first run.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from bench_cp_attention import workloads
from cp_model import HEAD_DIM, SHAPES
from matplotlib import pyplot

from cuseq.distributed import cp_plan

RANKS = (2, 4, 8)
COLUMNS = 3
TITLE = re.compile(r"Attention of a (\S+) layer over (\d+) ranks")
# Variants of bench_cp_attention: how they are drawn.
LINES: dict[str, dict[str, Any]] = {
    "cuseq": {"color": "#f58518", "marker": "o", "zorder": 3},
    "all-gather": {"color": "#9aa0a6", "marker": "s"},
    "zigzag ring": {"color": "#9aa0a6", "marker": "^"},
    "dp": {"color": "#9aa0a6", "marker": "x"},
    "one GPU / R": {"color": "#202124", "marker": "_", "markersize": 12},
}
Times = dict[str, dict[str, dict[int, float]]]  # us, by row, variant and ranks


def times_of(runs: list[dict[str, Any]]) -> dict[str, Times]:
    """Return what the runs measured, by shape."""
    found: dict[str, Times] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for table in (table for run in runs for table in run["tables"]):
        if match := TITLE.fullmatch(table["title"]):
            for row in table["rows"]:
                found[match[1]][row["row"]][row["variant"]][int(match[2])] = row["both"]
    return found


def predicted(shape: str, row: str) -> dict[int, float]:
    """Return the planner's microseconds of a layer by the number of ranks."""
    times = {}
    for ranks in RANKS:
        lengths = workloads(ranks, torch.device("cuda"))[row]
        plan = cp_plan(lengths, ranks, heads=SHAPES[shape][3:], head_dim=HEAD_DIM)
        times[ranks] = plan.predicted_us
    return times


def draw_panel(axes: pyplot.Axes, shape: str, row: str, times: dict[str, dict[int, float]]) -> None:
    """Draw one kind of row."""

    def draw(points: dict[int, float], label: str, **options: Any) -> None:
        ranks = sorted(points)
        axes.plot(ranks, [points[n] / 1e3 for n in ranks], label=label, **options)

    draw(predicted(shape, row), "predicted for cuseq", color="#f58518", linestyle="--")
    for variant, options in LINES.items():
        if variant in times:
            draw(times[variant], variant, **options)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.set_xlabel("ranks", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_title(f"{shape}: {row}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def main(paths: list[Path]) -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found = times_of(runs)
    panels = [(shape, row, times) for shape, rows in found.items() for row, times in rows.items()]
    if not panels:
        sys.exit(f"{paths[0]}: must be a result of cp_attention with layers, has no such table")
    lines = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(
        lines, COLUMNS, figsize=(3 * COLUMNS, 2.4 * lines + 0.8), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for place, panel in zip(axes.flat, panels, strict=False):
        draw_panel(place, *panel)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    figure.supylabel("ms of a layer's attention, forward and backward, slowest rank", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    gpus = sorted({run["environment"]["gpu"] for run in runs})
    figure.suptitle(f"Rows that ranks share, on {' and '.join(gpus)}", fontsize=10)
    figure.savefig(paths[0].parent / "cp_scaling.png", dpi=120)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    main([Path(path) for path in sys.argv[1:]])
