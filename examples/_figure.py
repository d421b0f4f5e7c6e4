"""Draw the measurements as one picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _modes import MODES
from _report import device_name, loss_difference, memory_title, speedups
from _training import Measurement, TrainingPlan
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLORS = {
    "padded": "#80868b",
    "packed": "#4c78a8",
    "cuseq": "#f58518",
    "cuseq-compiled": "#b5384f",
}
# Wide pale lines below thin ones, so that curves of equal losses all stay visible.
LINES: dict[str, dict[str, Any]] = {
    "padded": dict(linewidth=11, alpha=0.3),
    "packed": dict(linewidth=6, alpha=0.5),
    "cuseq": dict(linewidth=2),
    "cuseq-compiled": dict(linewidth=1.4, linestyle="--"),
}
BACKWARD_OPACITY = 0.55


def draw(path: Path, measurements: list[Measurement], plan: TrainingPlan) -> None:
    """Write a PNG: losses, speed, padding, times, memory and, on CUDA, synchronisations."""
    on_cuda = plan.device.type == "cuda"
    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplot_mosaic(_layout(["padding", "time", "memory"] + ["waits"] * on_cuda))
    config = plan.source.config.get_text_config()
    figure.suptitle(
        f"The same documents, three ways: {config.model_type}, {config.num_hidden_layers} layers, "
        f"rows of {plan.row_length:,} tokens, {device_name(plan.device)}",
        fontsize=13,
    )
    _draw_losses(axes["loss"], measurements)
    _draw_speed(axes["speed"], measurements)
    _draw_padding(axes["padding"], measurements)
    _draw_times(axes["time"], measurements)
    _draw_memory(axes["memory"], measurements, memory_title(plan.device))
    if on_cuda:
        _draw_waits(axes["waits"], measurements)
    for panel in axes.values():
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _layout(small_panels: list[str]) -> list[list[str]]:
    """Return a grid of twelve columns: losses and speed on top, the small panels below."""
    above = ["loss"] * 8 + ["speed"] * 4
    below = [name for name in small_panels for _ in range(12 // len(small_panels))]
    return [above, below]


def _draw_losses(axes: Axes, measurements: list[Measurement]) -> None:
    for measurement in measurements:
        name = measurement.mode
        steps = range(1, len(measurement.losses) + 1)
        label = MODES[name].label
        axes.plot(steps, measurement.losses, color=COLORS[name], label=label, **LINES[name])
    difference = loss_difference(measurements)
    note = "" if difference is None else f" (packed sdpa and cuseq: at most {difference:.0e} apart)"
    axes.set_title("Loss" + note)
    axes.set_xlabel("optimiser step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_speed(axes: Axes, measurements: list[Measurement]) -> None:
    axes.set_title("Real tokens per second")
    speeds = [m.tokens_per_second for m in measurements]
    bars = _bars(axes, measurements, speeds)
    ratios = ["" if ratio is None else f"{ratio:.2f}x" for ratio in speedups(measurements)]
    axes.bar_label(bars, _labels(speeds, "{:,.0f}".format), padding=2, fontsize=9)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.bar_label(bars, ratios, label_type="center", color="white", fontweight="bold")


def _draw_padding(axes: Axes, measurements: list[Measurement]) -> None:
    axes.set_title("Share of padding")
    shares = [m.padding_share for m in measurements]
    bars = _bars(axes, measurements, shares)
    axes.bar_label(bars, _labels(shares, "{:.1%}".format), padding=2, fontsize=9)
    axes.yaxis.set_major_formatter("{x:.0%}")


def _draw_times(axes: Axes, measurements: list[Measurement]) -> None:
    axes.set_title("Forward (dark), backward (light), ms")
    forward = _milliseconds([m.forward_seconds for m in measurements])
    backward = _milliseconds([m.backward_seconds for m in measurements])
    below = [value or 0 for value in forward]
    bars = _bars(axes, measurements, forward)
    labels = _labels(forward, "{:,.0f}".format)
    axes.bar_label(bars, labels, label_type="center", fontsize=9, color="white")
    bars = _bars(axes, measurements, backward, bottom=below, alpha=BACKWARD_OPACITY)
    axes.bar_label(bars, _labels(backward, "{:,.0f}".format), label_type="center", fontsize=9)


def _draw_memory(axes: Axes, measurements: list[Measurement], title: str) -> None:
    axes.set_title(f"{title[0].upper()}{title[1:]}, GiB")
    memory = [m.peak_memory_bytes for m in measurements]
    gibibytes = [None if count is None else count / 2**30 for count in memory]
    bars = _bars(axes, measurements, gibibytes)
    axes.bar_label(bars, _labels(gibibytes, "{:.2f}".format), padding=2, fontsize=9)


def _draw_waits(axes: Axes, measurements: list[Measurement]) -> None:
    axes.set_title("Synchronisations a step")
    waits = [m.waits for m in measurements]
    bars = _bars(axes, measurements, waits)
    axes.bar_label(bars, _labels(waits, str), padding=2, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _bars(
    axes: Axes, measurements: list[Measurement], values: list[float | None], **style: Any
) -> BarContainer:
    """Draw one bar for each mode that has a value."""
    names = [MODES[m.mode].label.replace(", ", "\n") for m in measurements]
    heights = [value or 0 for value in values]
    colors = [COLORS[m.mode] for m in measurements]
    axes.margins(y=0.12)
    axes.tick_params(axis="x", labelsize=9)
    return axes.bar(names, heights, color=colors, width=0.62, **style)


def _labels(values: list[float | None], text: Callable[[float], str]) -> list[str]:
    return ["n/a" if value is None else text(value) for value in values]


def _milliseconds(seconds: list[float | None]) -> list[float | None]:
    return [None if value is None else value * 1e3 for value in seconds]
