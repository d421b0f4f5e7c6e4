"""Measure every backend of attention and write the table that `backend="auto"` follows.

    python -m benchmarks attention_backends [--table FILE] [--quick] [--resume] [--modes MODE ...]
    python -m benchmarks attention_backends --host

The table is your own, where cuseq finds it: the file that CUSEQ_ATTENTION_TABLE names, or else
cuseq/attention_table.csv in $XDG_CONFIG_HOME or ~/.config.

Rows of 16 query and 8 key-value heads, lognormal lengths. Times are microseconds of one forward and
backward:

- eager: wall time of a layer in a stack of LAYERS under one backward, host and device overlapping.
- compiled: the same stack under torch.compile.
- captured: a CUDA graph of forwards and backwards, whose host does not know the lengths. Its
  number of sequences is the capacity of the offsets, which decides about the workspace.

The host columns are the time that a call occupies the host; "of the package" is the part that
FlashAttention 4's own Python functions take for the same call, which cuseq passes by; --host
measures these two alone, in seconds, and writes no table. Memory is the peak above the inputs.

The table keeps the rows of other GPUs, of other releases of torch and of modes that are not
measured, and with --resume those of this GPU and torch too, which are measured again only if a
backend that is installed has no time in them: all of them take longer than some machines are lent
for. The table is written after each mode, the report, of this run alone, after each row. A backend
that fails, or whose gradients differ from those of plain attention, is left out of its row, and the
report says why.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import timer
import torch
from report import Report, Table, arguments, environment
from workload import lognormal_lengths

import cuseq
from cuseq.attention import choice, fa4, flex, table
from cuseq.attention import packages as _packages
from cuseq.layout import checked_spans, graph_room

Tensor = torch.Tensor
LAYERS = 8
HEADS, KEY_HEADS = 16, 8
HALF = {torch.bfloat16: "1", torch.float32: "0"}
MODES = ("eager", "compiled", "captured")
PLAIN = ("flash", "cudnn", "fa4", "fa3")
ONE_BY_ONE = ("flex", "segments")
FULL_PRECISION = ("efficient", "segments")
WIDE_HEADS = ("flex", "efficient")


@dataclass(frozen=True)
class Row:
    """One row of the table: what is attended over, and the backends in question.

    `room` is the number of sequences that a capture attends over; 0 for what a GraphedStep takes.
    """

    tokens: int
    mean: int
    head_dim: int = 128
    mask: str = "causal"
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    backends: tuple[str, ...] = PLAIN
    modes: tuple[str, ...] = MODES
    room: int = 0

    def backends_of(self, mode: str) -> tuple[str, ...]:
        """Return the backends that auto chooses from: in compiled code and captures flex too."""
        with_flex = mode != "eager" and "flex" not in self.backends
        return (*self.backends, "flex") if with_flex else self.backends

    @property
    def capacity(self) -> int:
        """Return the room of the offsets, which a capture takes for the number of sequences."""
        return self.room or graph_room(len(self.lengths))

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the documents."""
        return lognormal_lengths(self.tokens, self.mean, seed=self.mean)

    def options(self) -> dict[str, Any]:
        """Return the options of `varlen_attention`."""
        options: dict[str, Any] = {"causal": self.mask not in ("full", "two_sided")}
        if self.window:
            options["window"] = self.window
        if self.mask == "softcap":
            options["softcap"] = 50.0
        if self.mask == "spans":  # an image of 256 tokens at the start of each long document
            starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0).tolist()
            longer = zip(starts, self.lengths, strict=True)
            options["spans"] = [(begin, begin + 256) for begin, n in longer if n > 300]
        return options


def rows(quick: bool) -> list[Row]:
    """Return the rows of the table."""
    sizes = [(8192, 350), (2048, 350), (16384, 2048), (4096, 350), (512, 256), (1024, 350),
             (32768, 350), (32768, 8192), (8192, 4096)]  # fmt: skip
    if quick:
        sizes = [(2048, 350), (8192, 350), (16384, 2048), (8192, 4096)]
    found = [Row(*size) for size in sizes]
    found += [
        Row(*size, modes=("captured",), room=room) for room in (128, 1024) for size in sizes[:6]
    ]
    full = [(2048, 350), (8192, 1024), (512, 256), (16384, 2048)]
    found += [Row(*size, mask="full", modes=("eager", "captured")) for size in full]
    found += [Row(*size, mask="full", modes=("captured",), room=1024) for size in full[:2]]
    special = {"backends": ONE_BY_ONE, "modes": ("eager",)}
    two_sided = {"mask": "two_sided", "window": 128, "backends": (*PLAIN, "flex")}
    for tokens, mean in ((8192, 1024), (1024, 350), (32768, 2048)):
        found.append(Row(tokens, mean, mask="spans", **special))
        found.append(Row(tokens, mean, modes=("eager", "captured"), **two_sided))
        found.append(Row(tokens, mean, 256, mask="softcap", **special))
    eager = ("eager", "captured")
    found += [
        Row(tokens, 4096, mask="window", window=1024, modes=eager) for tokens in (8192, 32768)
    ]
    found += [Row(*size, dim, modes=eager) for dim in (64, 256) for size in sizes[:3]]
    exact = {"dtype": torch.float32, "backends": FULL_PRECISION, "modes": ("eager",)}
    found += [Row(tokens, 350, **exact) for tokens in (2048, 8192)]
    found += [Row(*size, 512, backends=WIDE_HEADS) for size in sizes[:3]]
    return found


class Case:
    """The inputs of a row."""

    def __init__(self, row: Row, device: torch.device):
        # A process compiles flex for a few row lengths alone; a later row would get the kernel for
        # any length, which takes up to 1.8 times as long.
        flex._sizes.clear()
        self.row, self.device = row, device
        generator = torch.Generator(device=device).manual_seed(row.tokens + row.mean)

        def random(heads: int) -> Tensor:
            shape = (row.tokens, heads, row.head_dim)
            drawn = torch.randn(shape, generator=generator, device=device, dtype=row.dtype)
            return drawn.requires_grad_()

        self.q = random(HEADS)
        self.pairs = [(random(KEY_HEADS), random(KEY_HEADS)) for _ in range(LAYERS)]
        self.grad = torch.randn_like(self.q)
        room = row.capacity
        self.packed = cuseq.PackedLayout.from_lengths(row.lengths, max_seqs=room, device=device)
        self.leaves = [self.q, *(tensor for pair in self.pairs for tensor in pair)]

    def stack(self, backend: str) -> Callable[..., Tensor]:
        """Return a function of q and the pairs that runs LAYERS attentions."""
        packed, options = self.packed, self.row.options()
        if "spans" in options:
            options["spans"] = checked_spans(packed, options["spans"])

        def run(q: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
            for k, v in pairs:
                q = cuseq.varlen_attention(q, k, v, packed, backend=backend, **options)
            return q

        return run

    def step(self, run: Callable[..., Tensor]) -> Callable[[], object]:
        """Return a function that runs a stack forward and backward."""
        return lambda: torch.autograd.grad(run(self.q, self.pairs), self.leaves, self.grad)

    def single(self, backend: str) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that runs one attention forward and backward."""
        run, (pair, *_) = self.stack(backend), self.pairs
        leaves = (self.q, *pair)
        return lambda: torch.autograd.grad(run(self.q, [pair]), leaves, self.grad)


def wall_us(step: Callable[[], object]) -> float:
    """Return the median wall time of a step in microseconds, host and device together."""
    samples: list[float] = []
    for _ in range(3):
        step()
    until = time.perf_counter() + timer.BUDGET_S
    while len(samples) < timer.MIN_REPEATS or (time.perf_counter() < until and len(samples) < 30):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(samples)


def measure(case: Case, mode: str, backend: str) -> dict[str, float]:
    """Return the time of one layer, and in eager code its memory and host time."""
    if mode == "captured":
        calls = 4 if case.row.tokens < 16384 else 2
        taken = timer.graph_time(case.single(backend), calls=calls, repeats=5)
        return {"us": taken.median}
    run = case.stack(backend)
    if mode == "compiled":
        torch._dynamo.reset()
        return {"us": wall_us(case.step(torch.compile(run, fullgraph=True))) / LAYERS}
    us = wall_us(case.step(run)) / LAYERS
    single = case.single(backend)
    single()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    single()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    host = timer.host_time(case.step(run), device=case.device, calls=1, batches=15).median / LAYERS
    return {"us": us, "memory_mib": peak, "host_us": host}


def package_host(case: Case) -> dict[str, float]:
    """Return the host time of FlashAttention 4 launched by cuseq and by its own functions."""
    if not _packages.found.get("fa4"):
        return {}
    (k, v), *_ = case.pairs
    q, k, v = (tensor.detach() for tensor in (case.q, k, v))
    out, grads = torch.empty_like(q), [torch.empty_like(t) for t in (q, k, v)]
    logsumexp = torch.empty(HEADS, q.shape[0], dtype=torch.float32, device=case.device)
    offsets = case.packed.cu_seqlens
    longest = case.packed.max_seqlen
    rest = (offsets, offsets, longest, longest, q.shape[2] ** -0.5, True, None, None)

    def forward() -> None:
        fa4.forward(q, k, v, out, logsumexp, *rest)

    def backward() -> None:
        fa4.backward(case.grad, q, k, v, out, logsumexp, *grads, *rest)

    found = {}
    for name, call in (("forward", forward), ("backward", backward)):
        found[f"{name}_us"] = timer.host_time(call, device=case.device, calls=5).median
        with fa4.through_the_package():
            found[f"{name}_of_the_package_us"] = timer.host_time(
                call, device=case.device, calls=5
            ).median
    return found


def host_rows(args: argparse.Namespace) -> list[Row]:
    """Return the rows for which the host times of FlashAttention 4 are measured."""
    return [row for row in rows(args.quick)[:5] if row.dtype == torch.bfloat16]


def facts_of(row: Row, mode: str) -> dict[str, str]:
    """Return the columns of the table that say what was measured, and where."""
    major, minor = torch.cuda.get_device_capability()
    values = (
        10 * major + minor, HALF[row.dtype], row.head_dim, row.mask, row.window, mode, row.tokens,
        row.capacity if mode == "captured" else len(row.lengths),
    )  # fmt: skip
    return dict(zip(table.FACTS, map(str, values), strict=True)) | {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def is_here(line: dict[str, str], facts: dict[str, str]) -> bool:
    """Return whether a line was measured on the GPU and with the release of torch of `facts`."""
    if table.release(line["torch"]) != table.release(facts["torch"]):
        return False
    # The package's table is for all GPUs of an architecture.
    return line["gpu"] == facts["gpu"] if line.get("gpu") else line["sm"] == facts["sm"]


def is_of(line: dict[str, str], facts: dict[str, str]) -> bool:
    """Return whether a line was measured about the same."""
    same = all(line[name] == facts[name] for name in table.FACTS)
    return same and is_here(line, facts)


def lacks(lines: list[dict[str, str]], row: Row, mode: str) -> bool:
    """Return whether lines of the table lack a time of a backend that is installed."""
    installed = [name for name in row.backends_of(mode) if _packages.found.get(name, True)]
    facts = facts_of(row, mode)
    return not any(
        is_of(line, facts) and all(line.get(name) for name in installed) for line in lines
    )


def check_numbers(case: Case, backend: str) -> None:
    """Raise ValueError unless a backend computes the gradients that plain attention does.

    The table may be the first to run a package on this GPU, and auto follows it.
    """
    for found, expected in zip(case.single(backend)(), case.single("segments")(), strict=True):
        error = ((found - expected).float().norm() / expected.float().norm()).item()
        if not error < 0.02:
            raise ValueError(f"its gradients differ from those of segments by {error:.1%}")


def packages() -> str:
    """Return the packages of attention that are installed, with their versions."""
    found = ["FlashAttention 3"] if _packages.found.get("fa3") else []
    if _packages.found.get("fa4"):
        found.append(f"flash-attn-4 {metadata.version('flash-attn-4')}")
    return " and ".join(found) or "no package of attention"


def write_table(
    path: Path, kept: list[dict[str, str]], lines: list[dict[str, str]], found: dict[str, Any]
) -> None:
    """Write the lines that are kept and the new ones."""
    names = [*table.FACTS, *table.TIMES, *table.PLACE]
    body = io.StringIO()
    body.write(
        "# Microseconds of one forward and backward of attention by backend; the choice of\n"
        '# "auto" follows the closest row. Written by: python -m benchmarks attention_backends\n'
        f"# The newest rows: {found['gpu']}, torch {found['torch']}, {packages()}, "
        f"commit {found['commit']}, {found['time']}\n"
    )
    writer = csv.DictWriter(body, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept + lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")  # other processes may read the table meanwhile
    unfinished.write_text(body.getvalue(), encoding="utf-8")
    unfinished.replace(path)
    print(f"wrote {path}", flush=True)


def write_report(
    args: argparse.Namespace, shown: list[dict[str, Any]], hosts: list[dict[str, Any]]
) -> None:
    """Write what has been measured so far."""
    report = Report("attention_backends", environment(args.device))
    report.notes.append(f"{HEADS} query and {KEY_HEADS} key-value heads, forward and backward.")
    columns = {
        "mask": "mask", "dtype": "dtype", "head_dim": "head_dim", "window": "window",
        "tokens": "tokens", "sequences": "sequences", "mode": "mode", "backend": "backend",
        "us": "us", "host_us": "host us", "memory_mib": "MiB", "note": "failed",
    }  # fmt: skip
    if shown:
        report.tables.append(Table("Backends", columns, shown))
    if any(len(host) > 1 for host in hosts):
        report.notes.append(f"{packages()}.")
        columns = {
            "tokens": "tokens", "forward_us": "forward", "backward_us": "backward",
            "forward_of_the_package_us": "forward of the package",
            "backward_of_the_package_us": "backward of the package",
        }  # fmt: skip
        report.tables.append(Table("Host time of FlashAttention 4, us", columns, hosts))
    report.write(args.out)


def main() -> None:
    parser = arguments(__doc__)
    own = table.own_path()
    parser.add_argument(
        "--table", type=Path, default=own, required=own is None, help=f"default {own}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--resume", action="store_true", help="measure what the table lacks")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE")
    parser.add_argument("--host", action="store_true", help="host time of FlashAttention 4 alone")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cuda":
        parser.error("backends are chosen on a GPU: there is nothing to measure on a CPU")
    os.environ[table.VARIABLE] = ""  # calls here name their backends
    choice.load_backends()
    text = args.table.read_text(encoding="utf-8") if args.table.exists() else ""
    try:
        old = [line for _, line in table.table_lines(text)]
    except ValueError as error:
        parser.error(f"{args.table}, {error}: correct or delete it")
    again = () if args.resume else args.modes
    here = facts_of(rows(quick=True)[0], "eager")
    kept = [line for line in old if not is_here(line, here) or line["mode"] not in again]
    lines, shown, hosts = [], [], []
    if args.host:
        hosts = [
            {"tokens": row.tokens} | package_host(Case(row, device)) for row in host_rows(args)
        ]
        write_report(args, shown, hosts)
        return
    for row in rows(args.quick):
        wanted = (mode for mode in row.modes if mode in args.modes)
        modes = [mode for mode in wanted if lacks(kept, row, mode)]
        if not modes:
            continue
        case = Case(row, device)
        right: set[str] = set()  # the backends whose numbers are
        for mode in modes:
            facts = {"mask": row.mask, "mode": mode, "head_dim": row.head_dim,
                     "dtype": str(row.dtype).removeprefix("torch."), "window": row.window,
                     "tokens": row.tokens, "sequences": len(row.lengths)}  # fmt: skip
            times = {}
            for backend in row.backends_of(mode):
                try:
                    if backend not in right:
                        check_numbers(case, backend)
                        right.add(backend)
                    found = measure(case, mode, backend)
                    times[backend] = found["us"]
                except Exception as failure:  # a kernel of a peer may fail in any way
                    found = {"note": str(failure).splitlines()[0][:120] if str(failure) else
                             type(failure).__name__}  # fmt: skip
                shown.append(facts | {"backend": backend} | found)
            if times:
                found = {name: f"{us:.1f}" for name, us in times.items()}
                measured = facts_of(row, mode)
                kept = [line for line in kept if not is_of(line, measured)]
                lines.append(measured | found)
                write_table(args.table, kept, lines, environment(args.device))
            best = ", ".join(
                f"{name} {us:,.0f}" for name, us in sorted(times.items(), key=lambda x: x[1])
            )
            print(f"{row.mask} {row.head_dim} {row.tokens:,} {mode}: {best}", flush=True)
        if row in host_rows(args):
            hosts.append({"tokens": row.tokens} | package_host(case))
        write_report(args, shown, hosts)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
