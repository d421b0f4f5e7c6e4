"""Draw the README's plot: a training step of stock, of the best peers and of cuseq.

    python benchmarks/draw_training_steps.py [benchmarks/results/h200]

Reads `training_step_2048.json`, `_8192` and `_32768` of the folder and writes `training_step.png`
there. Each file that has a time for every bar becomes a panel; the others are left out. All bars of
a panel are from one run, and each ratio is over stock packed sdpa of that run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROWS = (2048, 8192, 32_768)
GREY, ORANGE = "#9aa0a6", "#f58518"
# Variant of bench_training_step: its label and colour.
BARS = {
    "packed_sdpa": ("stock: sdpa, dense mask", GREY),
    "flash_path_liger": ("flash path + Liger", GREY),
    "packed_flex_compiled_model": ("flex attention, model and loss compiled", GREY),
    "cuseq_enabled": ("cuseq.enable(model)", ORANGE),
    "cuseq_enabled_compiled": ("cuseq.enable(model), layers compiled", ORANGE),
    "cuseq_enabled_compiled_model": ("cuseq.enable(model), model and loss compiled", ORANGE),
}


def whole_runs(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the runs that measured every bar, by row length."""
    runs = {}
    for tokens in ROWS:
        path = folder / f"training_step_{tokens}.json"
        run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": []}
        times = {
            row["variant"]: row.get("step") for table in run["tables"][:1] for row in table["rows"]
        }
        lacking = [name for name in BARS if times.get(name) is None]
        if lacking:
            print(f"{path.name}: left out, it has no time for {', '.join(lacking)}")
        else:
            runs[tokens] = run | {"times": times}
    return runs


def draw(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw one panel for each run."""
    figure, panels = pyplot.subplots(
        1,
        len(runs),
        figsize=(4.4 + 3.6 * len(runs), 2.9),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    labels, colours = zip(*BARS.values(), strict=True)
    for axes, (tokens, run) in zip(panels[0], runs.items(), strict=True):
        times = [run["times"][name] for name in BARS]
        bars = axes.barh(range(len(BARS)), times, color=colours, height=0.75)
        notes = [f"{time:,.0f} ms, {times[0] / time:.2f}x" for time in times]
        axes.bar_label(bars, notes, padding=3, fontsize=8)
        axes.set_xlim(0, 1.4 * max(times))
        axes.set_title(f"rows of {tokens:,} tokens", fontsize=10)
        axes.set_xlabel("ms a step", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(BARS)), labels, fontsize=9)
    panels[0][0].invert_yaxis()
    gpu = next(iter(runs.values()))["environment"]["gpu"]
    figure.suptitle(
        f"A training step on packed rows: Qwen3-0.6B's shape, full fine-tuning, bf16, one {gpu}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)


def main(folder: Path) -> None:
    runs = whole_runs(folder)
    if not runs:
        sys.exit(f"nothing to draw: no run in {folder} has every bar")
    draw(runs, folder / "training_step.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/h200"))
