"""Report a run on several ranks: a progress bar, a line for each step, and a picture."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _exposed import is_profiled
from _mesh import Ranks
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

LOG, RESULTS, PICTURE = "log.jsonl", "results.json", "results.png"


@dataclass(frozen=True)
class StepSize:
    """What all ranks together are given in a step.

    Attributes:
        tokens: tokens of all rows, padding included.
        flops_per_token, flops_per_pair: FLOPs of forward and backward; None if they are not known.
        peak_flops: FLOP/s of all devices at their best; None if it is not known.
    """

    tokens: int
    flops_per_token: float | None
    flops_per_pair: float | None
    peak_flops: float | None


class StepLog:
    """Collects the numbers of all ranks and writes them on rank 0, a line of JSON for each step.

    The numbers stay on the device until `read`, so a step does not wait for them. If the file
    cannot be written (a full disk), the log says so once, and training goes on.

    Args:
        folder: where log.jsonl lies. Lines of steps that a resumed run makes again are removed.
        ranks: this rank's place.
        size: what a step is given.
        first_step: steps that were made before.
        steps: steps of the whole run.
    """

    def __init__(self, folder: Path, ranks: Ranks, size: StepSize, first_step: int, steps: int):
        self._file = folder / LOG
        self._ranks = ranks
        self._size = size
        self._step = first_step
        self._waiting: list[torch.Tensor] = []
        self.lines: list[dict[str, Any]] = []
        # Shares of the profiled steps: of those that are not read yet, and the newest one read.
        self._exposed: dict[int, float] = {}
        self._newest_exposed: float | None = None
        self._end = 0  # bytes of whole lines in the file
        self._unwritten = b""
        self._failed = False
        self._bar = tqdm(initial=first_step, total=steps, unit="step", disable=not ranks.is_first)
        if ranks.is_first:
            self.lines = _lines_before(self._file, first_step)
            self._write(self.lines)
        self._since = time.perf_counter()

    def add(self, numbers: torch.Tensor) -> None:
        """Gather what `Trained.step` returned, without waiting for it."""
        gathered = numbers.new_empty(self._ranks.world_size, len(numbers))
        dist.all_gather_into_tensor(gathered, numbers[None])
        self._waiting.append(gathered)

    def add_exposed(self, step: int, share: float | None) -> None:
        """Note for which share of a step, counted as in log.jsonl, only collectives ran."""
        if share is not None:
            self._exposed[step] = share

    def profiles(self, step: int) -> bool:
        """Return whether this rank profiles a step of this run, counted from 1."""
        return self._ranks.is_first and self._ranks.device.type == "cuda" and is_profiled(step)

    def read(self) -> None:
        """Wait for the device, write the steps since the last call and show the newest."""
        if not self._waiting:
            return
        waiting, self._waiting = [numbers.cpu() for numbers in self._waiting], []
        now = time.perf_counter()
        seconds = (now - self._since) / len(waiting)
        self._since = now
        if not self._ranks.is_first:
            return
        for numbers in waiting:
            self._step += 1
            self.lines.append(self._line(numbers, seconds))
        self._write(self.lines[-len(waiting) :])
        self._bar.update(len(waiting))
        self._bar.set_postfix_str(_postfix(self.lines[-1], self._newest_exposed))

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Write lines after those of earlier calls, in place of what a failed call left."""
        if not self._file.exists():  # removed while training: write it from its first line on
            self._end, self._unwritten, lines = 0, b"", self.lines
        self._unwritten += b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            with self._file.open("r+b" if self._file.exists() else "wb") as file:
                file.seek(self._end)
                file.truncate()
                file.write(self._unwritten)
        except OSError as error:
            if not self._failed:
                self.say(f"Training goes on, but {self._file} is not written: {error}")
            self._failed = True
            return
        self._end += len(self._unwritten)
        self._unwritten = b""

    def _line(self, numbers: torch.Tensor, seconds: float) -> dict[str, Any]:
        losses, tokens, pairs, norms = numbers.T.tolist()
        real, given, size = sum(tokens), self._size.tokens, self._size
        line = {
            "step": self._step,
            "loss": sum(losses),
            "grad_norm": norms[0],
            "tokens": int(real),
            "padding": 1 - real / given,
            "balance": max(pairs) * len(pairs) / sum(pairs),
            "seconds": seconds,
            "tokens_per_second": real / seconds,
        }
        if size.peak_flops is not None and size.flops_per_token is not None:
            flops = size.flops_per_token * given + size.flops_per_pair * sum(pairs)
            line["mfu"] = flops / seconds / size.peak_flops
        if self._step in self._exposed:
            self._newest_exposed = self._exposed.pop(self._step)
            line["exposed_communication"] = self._newest_exposed
        return line

    def close(self) -> None:
        self._bar.close()

    def say(self, text: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        if self._ranks.is_first:
            self._bar.write(text)


def _lines_before(file: Path, first_step: int) -> list[dict[str, Any]]:
    """Return the lines of the first steps, up to one that a killed run wrote in part."""
    if first_step == 0 or not file.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in file.read_bytes().splitlines():
        try:
            line = json.loads(text)
            if line["step"] <= first_step:
                lines.append(line)
        except (KeyError, TypeError, ValueError):  # the latter also for half a character
            break
    return lines


def _postfix(line: dict[str, Any], exposed: float | None) -> str:
    parts = [
        f"loss {line['loss']:.4f}",
        f"{line['tokens_per_second']:,.0f} tokens/s",
        f"padding {line['padding']:.1%}",
        f"balance {line['balance']:.3f}",
    ]
    if "mfu" in line:
        parts.append(f"MFU {line['mfu']:.1%}")
    if exposed is not None:
        parts.append(f"exposed communication {exposed:.1%}")
    return ", ".join(parts)


def write_results(folder: Path, lines: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write results.json and results.png, and print what they say."""
    if not lines:
        return
    last = lines[-1]
    speed = statistics.median(line["tokens_per_second"] for line in lines)
    results = {**facts, "steps": last["step"], "loss": last["loss"], "tokens_per_second": speed}
    (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _draw(folder / PICTURE, lines)
    print(
        f"{last['step']} steps, loss {last['loss']:.4f}, {speed:,.0f} real tokens/s (median). "
        f"Written: {LOG}, {RESULTS} and {PICTURE} in {folder}"
    )


def _draw(path: Path, lines: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    steps = [line["step"] for line in lines]
    titles = {"loss": "Loss", "tokens_per_second": "Real tokens per second, all ranks"}
    for axes, (key, title) in zip(panels, titles.items()):
        axes.plot(steps, [line[key] for line in lines], color="#f58518", linewidth=1.6)
        axes.set_title(title)
        axes.set_xlabel("optimiser step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].yaxis.set_major_formatter("{x:,.0f}")
    panels[1].set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
