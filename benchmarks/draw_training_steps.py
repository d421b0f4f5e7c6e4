"""Draw the training steps that bench_training_step measured: a panel for each row length.

    python benchmarks/draw_training_steps.py [benchmarks/results/h200]

Reads `training_step_2048.json`, `_8192` and `_32768` of a folder and writes `training_step.png`
next to them. All bars of a panel are from one run; the ratio is over stock packed sdpa of the same
run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROWS = (2048, 8192, 32_768)
GREY, ORANGE, RED = "#9aa0a6", "#f58518", "#b5344f"
NAMES = {
    "packed_sdpa": ("sdpa, dense mask", GREY),
    "packed_sdpa_liger": ("sdpa + Liger", GREY),
    "packed_flex": ("flex attention", GREY),
    "packed_flex_liger": ("flex + Liger", GREY),
    "flash_path": ("flash path", GREY),
    "flash_path_liger": ("flash path + Liger", GREY),
    "cuseq": ('attn_implementation="cuseq"', ORANGE),
    "cuseq_enabled": ("cuseq: enable(model)", ORANGE),
    "cuseq_enabled_liger": ("cuseq + Liger's norm, SwiGLU", ORANGE),
    "cuseq_enabled_compiled": ("cuseq, layers compiled", RED),
}


def main(folder: Path) -> None:
    runs = [json.loads((folder / f"training_step_{tokens}.json").read_text()) for tokens in ROWS]
    figure, panels = pyplot.subplots(
        1, len(ROWS), figsize=(14, 4), layout="constrained", sharey=True
    )
    labels, colours = zip(*NAMES.values(), strict=True)
    for axes, tokens, run in zip(panels, ROWS, runs, strict=True):
        rows = {row["variant"]: row for row in run["tables"][0]["rows"]}
        times = [rows[name]["step"] if name in rows else 0 for name in NAMES]
        notes = [
            f"{rows[name]['step']:,.0f} ms, {rows[name]['speedup']:.2f}x"
            if name in rows
            else "not in this run"
            for name in NAMES
        ]
        bars = axes.barh(range(len(NAMES)), times, color=colours, height=0.75)
        axes.bar_label(bars, notes, padding=3, fontsize=8)
        axes.set_xlim(0, 1.45 * max(times))
        axes.set_title(f"rows of {tokens:,} tokens", fontsize=10)
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(NAMES)), labels, fontsize=9)
    panels[0].invert_yaxis()
    about = runs[0]["environment"]
    figure.suptitle(
        f"A training step on packed rows: Qwen3-0.6B's shape, full fine-tuning, {about['gpu']}, "
        f"commit {about['commit']}",
        fontsize=11,
    )
    figure.savefig(folder / "training_step.png", dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/h200"))
