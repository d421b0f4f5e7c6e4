"""The result of `profile_step`: counts and times of the recorded steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cuseq.debug.profile import report

KINDS = ("stream", "event", "device", "copy")


@dataclass(frozen=True)
class Wait:
    """Waits of the host for the GPU, of one kind and from one line.

    Attributes:
        kind: what was waited for: "stream" (all work queued on a stream: `.item()`, `nonzero`),
            "event", "device" (`torch.cuda.synchronize()`) or "copy" (a copy of memory that is not
            pinned: `.cpu()`).
        line: "file.py:12 in function", "backward of file.py:12 in function", or the names of
            PyTorch's ops where no line is known.
        count: number of waits.
        us: microseconds in the blocking calls.
    """

    kind: str
    line: str
    count: int
    us: float


@dataclass(frozen=True)
class HostRead:
    """Calls of an op that returns a tensor's values to the host; with a GPU tensor each one waits.

    Attributes:
        op: "_local_scalar_dense" (`.item()`, `bool()`, `float()`), "nonzero" (boolean masks), ...
        line: as in `Wait`.
        count: number of calls.
    """

    op: str
    line: str
    count: int


@dataclass(frozen=True)
class Work:
    """Kernels or ops of one name: their number and their time in microseconds."""

    name: str
    count: int
    us: float


@dataclass(frozen=True)
class Copy:
    """Copies or fills of one kind, such as "Memcpy DtoH (Device -> Pinned)"."""

    kind: str
    count: int
    bytes: int
    us: float


@dataclass(frozen=True)
class Tokens:
    """Tokens of the batches: all tokens in memory, and those that are not padding.

    `repeated` are real tokens of padded batches that only repeat the beginning of an earlier row,
    such as the prompt of a group: `PackedTree` computes them once. None without ids beside a mask.
    """

    in_memory: int
    real: int
    repeated: int | None = None

    @property
    def pads(self) -> int:
        return self.in_memory - self.real

    @property
    def pad_share(self) -> float:
        return self.pads / self.in_memory if self.in_memory else 0.0

    @property
    def repeated_share(self) -> float | None:
        """Share of the real tokens that repeat a prefix."""
        return None if self.repeated is None else self.repeated / max(self.real, 1)


@dataclass(frozen=True)
class StepProfile:
    """Counts and times of the recorded steps: sums over `steps`. Tables show the mean step.

    Attributes:
        steps: number of recorded steps.
        device: the GPU's name, or "CPU".
        gpu: whether a GPU was in use. Without one, waits cannot be seen.
        wall_us: microseconds of the steps without the profiler, until the GPU had finished.
        gpu_busy_us: microseconds in which the busiest GPU ran anything; kernels that overlap on
            several streams count once. None without a GPU.
        syncs: waits of the host by kind and line, the most frequent first.
        host_reads: reads of tensor values by op and line, on any device. `tolist`, `.cpu()` and
            `.numpy()` of a CPU tensor call no op and are not seen.
        kernel_table: kernels by name, the longest first, including kernels inside CUDA graphs.
        copies: copies and fills by kind.
        graph_launches: launches of CUDA graphs.
        allocations: calls that allocate or free driver memory, which may wait for the GPU.
        op_table: PyTorch's ops by name, the most frequent first; an op's time includes that of the
            ops it calls.
        attention: the backends that computed packed attention, with their calls, forward and
            backward, and the host time in them; for "flex", kernels and their time on the GPU.
        tokens: tokens of the batch; None if no batch was given.
        notes: limits of these numbers, in sentences.
        timeline: data of the picture.
    """

    steps: int
    device: str
    gpu: bool
    wall_us: float
    gpu_busy_us: float | None
    syncs: tuple[Wait, ...]
    host_reads: tuple[HostRead, ...]
    kernel_table: tuple[Work, ...]
    copies: tuple[Copy, ...]
    graph_launches: int
    allocations: int
    op_table: tuple[Work, ...]
    attention: tuple[Work, ...]
    tokens: Tokens | None
    notes: tuple[str, ...]
    timeline: report.Timeline = field(repr=False)

    def sync_count(self, kind: str | None = None) -> int | None:
        """Count the waits of one kind, or all; None without a GPU, where waits cannot be seen."""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        if not self.gpu:
            return None
        return sum(wait.count for wait in self.syncs if kind in (None, wait.kind))

    @property
    def read_count(self) -> int:
        """Number of reads of tensors' values."""
        return sum(read.count for read in self.host_reads)

    @property
    def kernels(self) -> int:
        """Number of kernels that ran."""
        return sum(work.count for work in self.kernel_table)

    @property
    def ops(self) -> int:
        """Number of calls of PyTorch's ops, nested ones included."""
        return sum(work.count for work in self.op_table)

    @property
    def d2h_copies(self) -> int:
        """Number of copies from the GPU to the host."""
        return sum(copy.count for copy in self.copies if "DtoH" in copy.kind)

    @property
    def h2d_copies(self) -> int:
        """Number of copies from the host to the GPU."""
        return sum(copy.count for copy in self.copies if "HtoD" in copy.kind)

    @property
    def idle_share(self) -> float | None:
        """The share of `wall_us` in which the GPU was idle; None without a GPU."""
        if self.gpu_busy_us is None:
            return None
        return max(0.0, 1 - self.gpu_busy_us / self.wall_us)

    def summary(self) -> dict[str, float | int | None]:
        """Return the figures of one step by name; None for figures that cannot be known."""
        tokens = self.tokens
        sums: dict[str, float | None] = {
            "wall_us": self.wall_us,
            "host_reads": self.read_count,
            "ops": self.ops,
        }
        on_gpu: dict[str, float | None] = {
            "gpu_busy_us": self.gpu_busy_us,
            "syncs": self.sync_count(),
            **{f"syncs_{kind}": self.sync_count(kind) for kind in KINDS},
            "sync_us": sum(wait.us for wait in self.syncs),
            "d2h_copies": self.d2h_copies,
            "d2h_bytes": sum(copy.bytes for copy in self.copies if "DtoH" in copy.kind),
            "h2d_copies": self.h2d_copies,
            "kernels": self.kernels,
            "graph_launches": self.graph_launches,
            "allocations": self.allocations,
        }
        sums |= on_gpu if self.gpu else dict.fromkeys(on_gpu)
        return {
            **{name: None if value is None else value / self.steps for name, value in sums.items()},
            "idle_share": self.idle_share,
            "tokens": None if tokens is None else tokens.in_memory,
            "pads": None if tokens is None else tokens.pads,
            "pad_share": None if tokens is None else tokens.pad_share,
            "repeated": None if tokens is None else tokens.repeated,
            "repeated_share": None if tokens is None else tokens.repeated_share,
        }

    def __str__(self) -> str:
        head = f"A step on {self.device}" + (f", mean of {self.steps}" if self.steps > 1 else "")
        return report.text(head, self.summary(), self._listings(), self.notes)

    def compare(self, after: StepProfile, names: tuple[str, str] = ("before", "after")) -> str:
        """Return a table of this profile next to a later one, per step, with the waits of both."""
        waits: dict[tuple[str, str], list[float | None]] = {}
        for side, profile in enumerate((self, after)):
            for wait in profile.syncs:
                both = waits.setdefault((wait.kind, wait.line), [None, None])
                both[side] = wait.count / profile.steps
        rows = [[*map(report.count, both), *key] for key, both in waits.items()]
        lists = [report.Listing("Waits for the GPU", [*names, "kind", "line"], rows, ">><<")]
        notes = tuple(dict.fromkeys((*self.notes, *after.notes)))
        return report.comparison(self.summary(), after.summary(), names, lists, notes)

    def to_json(self) -> str:
        """Return everything as JSON; `from_json` reads it."""
        return json.dumps(asdict(self) | {"summary": self.summary()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Read a profile that `to_json` wrote, perhaps in another process."""
        kept = json.loads(text)
        del kept["summary"]
        rows = {"syncs": Wait, "host_reads": HostRead, "copies": Copy}
        rows |= {"kernel_table": Work, "op_table": Work, "attention": Work}
        for name, row in rows.items():
            kept[name] = tuple(row(**values) for values in kept[name])
        line = kept["timeline"]
        kept["timeline"] = report.Timeline(
            line["span_us"], tuple(map(tuple, line["busy"])), tuple(map(tuple, line["marks"]))
        )
        kept["tokens"] = None if kept["tokens"] is None else Tokens(**kept["tokens"])
        kept["notes"] = tuple(kept["notes"])
        return cls(**kept)

    def save(self, folder: str | Path, name: str = "profile", *, picture: bool = True) -> None:
        """Write `NAME.json`, the table `NAME.txt` and the timeline `NAME.png` into a folder.

        Args:
            folder: created if it does not exist.
            name: the files' name without its ending.
            picture: False leaves out the PNG, which needs matplotlib.

        Raises:
            ImportError: matplotlib is missing; nothing is written then.
        """
        draw = report.drawing() if picture else None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(self.to_json() + "\n", encoding="utf-8")
        (folder / f"{name}.txt").write_text(f"{self}\n", encoding="utf-8")
        if draw is not None:
            draw(folder / f"{name}.png", self._title(), self.timeline, self.gpu)

    def _listings(self) -> list[report.Listing]:
        """Return the tables after the figures: counts and times per step."""
        count, steps = report.count, self.steps
        waits = [
            [count(w.count / steps), f"{w.us / steps:,.1f}", w.kind, w.line] for w in self.syncs
        ]
        reads = [[count(r.count / steps), r.op, r.line] for r in self.host_reads]
        # Without a GPU no kernel was recorded, so the ops are shown instead.
        title = "Kernels, the longest first" if self.gpu else "PyTorch ops, the most frequent"
        work = [
            [count(w.count / steps), f"{w.us / steps:,.1f}", report.shorten(w.name)]
            for w in (self.kernel_table if self.gpu else self.op_table)
        ]
        attention = [
            [count(w.count / steps), f"{w.us / steps:,.1f}", w.name] for w in self.attention
        ]
        return [
            report.Listing("Attention backends", ["count", "us", "name"], attention, ">><"),
            report.Listing("Waits for the GPU", ["count", "us", "kind", "line"], waits, ">><<"),
            report.Listing("Host reads of values", ["count", "op", "line"], reads, "><<"),
            report.Listing(title, ["count", "us", "name"], work, ">><"),
        ]

    def _title(self) -> str:
        figures = self.summary()
        wall = f"{self.device}: {self.wall_us / self.steps / 1e3:,.2f} ms a step"
        if self.gpu:
            waits = report.count(figures["syncs"])
            return f"{wall}, GPU idle {self.idle_share:.0%}, {waits} waits"
        return f"{wall}, {report.count(figures['host_reads'])} host reads"
