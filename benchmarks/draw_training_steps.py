"""Draw the README's pair of plots: time and peak memory of a training step of peers and of cuseq.

    python benchmarks/draw_training_steps.py

The values are those of published pages, which the README's table links to: rerun a page's command,
replace the page, and draw again. Writes benchmarks/results/h200/training_step.png.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "results" / "h200"
GREY, ORANGE = "#9aa0a6", "#f58518"
# Page, variant, label, colour; the strongest peer is the first.
BARS = [
    ("training_turns_8192_torch215", "flex_block_mask",
     "flex attention,\nmodel and loss compiled", GREY),
    ("training_turns_8192_torch215", "auto",
     "cuseq.enable(model),\nmodel and loss compiled", ORANGE),
    ("training_step_8192_compiled", "packed_sdpa",
     "transformers, sdpa with a\ndense mask, not compiled", GREY),
]  # fmt: skip


def measured(page: str, variant: str) -> tuple[float, float]:
    """Return ms and GiB of a variant, from the first table of a page that has both."""
    header: list[str] = []
    for line in (FOLDER / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "variant" in cells:
            header = [cell.removeprefix("peak ") for cell in cells]
        elif variant in cells and {"step ms", "GiB"} <= set(header):
            row = dict(zip(header, cells, strict=True))
            return float(row["step ms"]), float(row["GiB"])
    raise SystemExit(f"{page}.md must have a row of {variant} with step ms and GiB")


def main() -> None:
    times, memory = zip(*(measured(page, variant) for page, variant, _, _ in BARS), strict=True)
    labels, colours = [label for *_, label, _ in BARS], [colour for *_, colour in BARS]
    figure = Figure(figsize=(9.6, 2.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, values, unit in zip(panels, (times, memory), ("ms a step", "GiB at the peak")):
        bars = axes.barh(range(len(values)), values, color=colours, height=0.7)
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=9)
        axes.set_xlim(0, 1.15 * max(values))
        axes.set_title(unit, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(labels)), labels, fontsize=9)
    panels[0].invert_yaxis()
    figure.savefig(FOLDER / "training_step.png", dpi=120)


if __name__ == "__main__":
    main()
