"""Draw the README's plot: a training step of stock, of the best peers and of cuseq.

    python benchmarks/draw_training_steps.py RUN.json [RUN.json ...]

Each run is a result of `training_step` or of `training_turns` and becomes a panel. A panel shows
the variants below that its run measured, and beside it their peaks of memory, if each had a process
of its own. All bars of a panel are from one run, and each ratio is over its first bar: stock packed
sdpa, or flex attention in a run without it. Writes `training_step.png` beside the first run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

GREY, ORANGE = "#9aa0a6", "#f58518"
# How the variants of either benchmark ran.
HOW = {
    "training_step": "each in a process of its own",
    "training_turns": "taking turns in one process",
}
# Variants of bench_training_step: label and colour.
STEPS = {
    "packed_sdpa": ("stock: sdpa, dense mask", GREY),
    "flash_path_liger": ("flash path + Liger", GREY),
    "packed_flex_compiled": ("flex attention, layers compiled", GREY),
    "packed_flex_compiled_model": ("flex attention, model and loss compiled", GREY),
    "cuseq_enabled": ("cuseq.enable(model)", ORANGE),
    "cuseq_enabled_compiled": ("cuseq.enable(model), layers compiled", ORANGE),
    "cuseq_enabled_compiled_model": ("cuseq.enable(model), model and loss compiled", ORANGE),
    "cuseq_enabled_compiled_model_fa4": ("the same with FlashAttention 4", ORANGE),
}
# Variants of bench_training_turns: model and loss are compiled, but for stock.
TURNS = {
    "stock": ("stock: sdpa, dense mask", GREY),
    "flex": ("flex attention, model and loss compiled", GREY),
    "flex_graphed": ("flex attention in a cuseq.GraphedStep", GREY),
    "auto": ("cuseq.enable(model), model and loss compiled", ORANGE),
    "auto_graphed": ("cuseq.enable(model) in a cuseq.GraphedStep", ORANGE),
}
BARS = STEPS | TURNS


def measured(run: dict[str, Any], column: str) -> dict[str, float]:
    """Return a column of each variant in `BARS` that the run measured."""
    found = {row["variant"]: row.get(column) for row in run["tables"][0]["rows"]}
    return {name: found[name] for name in BARS if found.get(name) is not None}


def draw_panel(axes: pyplot.Axes, run: dict[str, Any], column: str) -> None:
    """Draw the bars of one run: times of a step, or the peak of memory."""
    values = measured(run, column)
    first = next(iter(values.values()))
    labels, colours = zip(*(BARS[name] for name in values), strict=True)
    bars = axes.barh(range(len(values)), list(values.values()), color=colours, height=0.75)
    if column == "step":
        notes = [f"{time:,.0f} ms, {first / time:.2f}x" for time in values.values()]
    else:
        notes = [f"{memory:.1f} GiB" for memory in values.values()]
    axes.bar_label(bars, notes, padding=3, fontsize=8)
    axes.set_xlim(0, 1.35 * max(values.values()))
    axes.set_xlabel("ms a step" if column == "step" else "GiB at the peak", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(values)), labels if column == "step" else [], fontsize=9)
    axes.invert_yaxis()


def main(paths: list[Path]) -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not measured(run, "step"):
            sys.exit(f"{path}: must have times of {', '.join(BARS)}, got none")
    heights = [1 + len(measured(run, "step")) for run in runs]
    figure, panels = pyplot.subplots(
        len(runs), 2, figsize=(9.6, 0.42 * sum(heights) + 0.5), layout="constrained",
        squeeze=False, height_ratios=heights, width_ratios=[3, 2],
    )  # fmt: skip
    for (times, memory), run in zip(panels, runs, strict=True):
        draw_panel(times, run, "step")
        how = next(how for name, how in HOW.items() if run["name"].startswith(name))
        tokens = run["tables"][0]["rows"][0]["tokens"]
        times.set_title(f"rows of {tokens:,} tokens, {how}", fontsize=10)
        # In turns in one process, the peak is that of all variants.
        if run["name"].startswith("training_step") and measured(run, "peak_gib"):
            draw_panel(memory, run, "peak_gib")
            memory.set_title("memory", fontsize=10)
        else:
            memory.axis("off")
    environment = runs[0]["environment"]
    figure.suptitle(
        "A training step on packed rows: Qwen3-0.6B's shape, full fine-tuning, bf16, "
        f"{environment['gpu']}, torch {environment['torch'].split('+')[0]}",
        fontsize=10,
    )
    figure.savefig(paths[0].parent / "training_step.png", dpi=120)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    main([Path(path) for path in sys.argv[1:]])
