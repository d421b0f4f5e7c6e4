"""Write results: a JSON file with everything and a Markdown page with the tables.

Every page starts with the machine and the command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Table:
    """A titled table: `columns` maps a key of each row to its heading; None shows as a dash."""

    title: str
    columns: dict[str, str]
    rows: list[dict[str, Any]]

    def markdown(self) -> str:
        """Return the table as Markdown, numbers right-aligned."""
        keys = list(self.columns)
        cells = [[_text(row.get(key)) for key in keys] for row in self.rows]
        numeric = [any(isinstance(row.get(key), (int, float)) for row in self.rows) for key in keys]
        lines = [
            f"## {self.title}",
            "",
            "| " + " | ".join(self.columns.values()) + " |",
            "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join(lines)


@dataclass
class Report:
    """Collects the tables of one benchmark; `write` prints and saves them."""

    name: str
    environment: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the whole page."""
        parts = [f"# {self.name}", _environment_line(self.environment)]
        parts += self.notes
        parts += [table.markdown() for table in self.tables]
        return "\n\n".join(parts) + "\n"

    def write(self, out: Path) -> None:
        """Print the page and write `NAME.json` and `NAME.md` into the folder `out`."""
        out.mkdir(parents=True, exist_ok=True)
        page = self.markdown()
        print("\n" + page, flush=True)
        (out / f"{self.name}.md").write_text(page, encoding="utf-8")
        text = json.dumps(asdict(self), indent=1, default=str)
        (out / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")


def environment(device: str) -> dict[str, Any]:
    """Return the machine, the versions, the commit and the command line.

    Args:
        device: `cpu` or `cuda`.
    """
    import torch

    script, *options = sys.argv
    name = Path(script).stem.removeprefix("bench_")
    found: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks", name, *options]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device,
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": None,
        "driver": None,
    }
    if device == "cuda":
        # torch would create a context, which takes memory, in a process that only reports.
        query = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        gpu, _, driver = (query or "unknown").splitlines()[0].partition(", ")
        found |= {"gpu": gpu, "driver": driver}
    try:
        import cuseq

        found["cuseq"] = cuseq.build_info()
    except ImportError as error:
        found["cuseq"] = f"not importable: {error}"
    return found


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: `--device` and `--out`."""
    import torch

    name = Path(sys.argv[0]).stem.removeprefix("bench_")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is a GPU",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help=f"folder for the results, default {RESULTS}"
    )
    return parser


def draw_bars(
    path: Path, title: str, unit: str, groups: Sequence[str], series: dict[str, list[float | None]]
) -> None:
    """Draw grouped bars as a PNG, one group per case and one bar per series; or print why not.

    Args:
        path: the PNG to write.
        title: title of the picture.
        unit: unit of the vertical axis, which is logarithmic.
        groups: names of the cases.
        series: for each name, one value per group; None leaves a gap.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"{path.name}: not drawn, matplotlib is not installed", flush=True)
        return
    if not any(value for values in series.values() for value in values):
        print(f"{path.name}: not drawn, nothing was measured", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.5 + 2.6 * len(groups), 4.2), layout="constrained")
    width = 0.85 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        drawn = [(i, value) for i, value in enumerate(values) if value is not None]
        bars = axes.bar(
            [i + (index - (len(series) - 1) / 2) * width for i, _ in drawn],
            [value for _, value in drawn],
            width,
            label=name,
            color=pyplot.get_cmap("tab20")(index % 20),
        )
        axes.bar_label(bars, fmt="{:.3g}", fontsize=6)
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(title)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _environment_line(found: dict[str, Any]) -> str:
    where = found["cpu"] if found["gpu"] is None else f"{found['gpu']}, driver {found['driver']}"
    return (
        f"{where}; torch {found['torch']}, CUDA {found['cuda']}, Python {found['python']}; "
        f"commit {found['commit']}; {found['time']}; `{found['command']}`"
    )


def _commit() -> str:
    # A copy of the working tree may come without .git; then the caller names its commit.
    if named := os.environ.get("CUSEQ_COMMIT"):
        return named
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("-dirty" if _output("git", "-C", str(ROOT), "status", "--porcelain") else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
