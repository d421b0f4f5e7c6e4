"""Benchmark packing strategies, the sampler and the stream: rows, fill and seconds.

    python -m benchmarks packing [--samples N] [--large N]

Lengths are lognormal with a mean near 350, clipped to a capacity of 4,096 tokens. Everything runs
on the CPU. TRL's packer is measured too if it is installed. It also moves tokens, here one byte
each, and by default packs each thousand samples separately.

The sampler's time is from the lengths to the first batch, for one of 8 ranks. `--large` plans that
many samples in windows of a tenth, in a process of its own whose peak memory is read; 0 skips it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timer
import torch
from report import Report, Table, arguments, draw_bars, environment

import cuseq

CAPACITY = 4096
MEAN, SIGMA = 350, 1.0
RANKS = 8
STRATEGIES = ("bfd", "ffd", "sequential", "wrapped")
TRL_STRATEGIES = ("bfd", "wrapped")
BALANCES = (None, "tokens", "attention")


def make_lengths(count: int, dtype: type = np.int64) -> np.ndarray:
    """Return the tokens of each sample, made in parts to need no memory beyond the lengths."""
    lengths = np.empty(count, dtype)
    draw = np.random.default_rng(0)
    for begin in range(0, count, 250_000):
        part = lengths[begin : begin + 250_000]
        values = draw.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, len(part))
        part[:] = np.clip(np.rint(values), 1, CAPACITY)
    return lengths


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of several calls."""
    return timer.host_time(call, device=torch.device("cpu")).median / 1e6


def percent(fill: float) -> str:
    """Format with more digits than the numbers of other tables."""
    return f"{100 * fill:.3f}"


def strategy_rows(lengths: np.ndarray) -> list[dict[str, Any]]:
    """Return rows of every strategy, for lengths as array and as list, and of TRL's packer."""
    tokens = int(lengths.sum())
    as_list = lengths.tolist()
    rows = []
    for strategy in STRATEGIES:
        plan = cuseq.data.bin_pack(lengths, CAPACITY, strategy)
        rows.append(
            {
                "packer": f"cuseq, {strategy}",
                "rows": plan.num_rows,
                "fill": percent(plan.fill),
                "seconds": seconds_of(lambda: cuseq.data.bin_pack(lengths, CAPACITY, strategy)),
                "list_s": seconds_of(lambda: cuseq.data.bin_pack(as_list, CAPACITY, strategy)),
            }
        )
    for name, num_rows, seconds in trl_packings(lengths):
        fill = percent(tokens / (num_rows * CAPACITY))
        rows.append({"packer": name, "rows": num_rows, "fill": fill, "seconds": seconds})
    bound = -(-tokens // CAPACITY)
    rows.append({"packer": "bound", "rows": bound, "fill": percent(tokens / (bound * CAPACITY))})
    return rows


def trl_packings(lengths: np.ndarray) -> list[tuple[str, int, float]]:
    """Return name, rows and seconds of TRL's strategies; empty if TRL is not installed."""
    try:
        import datasets
        import pyarrow
        from trl import pack_dataset
    except ImportError:
        return []
    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pyarrow.array(np.zeros(offsets[-1], np.int8))
    column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), tokens)
    dataset = datasets.Dataset(pyarrow.table({"input_ids": column}))
    found = []
    for strategy in TRL_STRATEGIES:
        for what, batch in (("", 1000), (", all at once", len(lengths))):
            begin = time.perf_counter()
            options = {"batch_size": batch, "keep_in_memory": True, "load_from_cache_file": False}
            packed = pack_dataset(dataset, CAPACITY, strategy, map_kwargs=options)
            seconds = time.perf_counter() - begin
            found.append((f"TRL, {strategy}{what}", len(packed), seconds))
    return found


def sampler_rows(lengths: np.ndarray) -> list[dict[str, Any]]:
    """Return the time to plan an epoch for one of 8 ranks, and the balance of the plan."""
    rows = []
    for balance in BALANCES:
        for accumulation in (1, 4):

            def first_batch() -> cuseq.data.PackedBatchSampler:
                sampler = cuseq.data.PackedBatchSampler(
                    lengths,
                    CAPACITY,
                    world_size=RANKS,
                    balance=balance,
                    accumulation=accumulation,
                )
                next(iter(sampler))
                return sampler

            sampler = first_batch()
            seen = sampler.imbalance()
            rows.append(
                {
                    "balance": str(balance),
                    "accumulation": accumulation,
                    "seconds": seconds_of(first_batch),
                    "steps": len(sampler),
                    "tokens": 100 * (seen.tokens.mean - 1),
                    "tokens_worst": 100 * (seen.tokens.max - 1),
                    "attention": 100 * (seen.attention.mean - 1),
                    "attention_worst": 100 * (seen.attention.max - 1),
                }
            )
    return rows


def stream_rows(lengths: list[int]) -> list[dict[str, Any]]:
    """Return fill and speed of the stream by window size."""
    rows = []
    for window in (64, 256, 1024, 4096):
        for ranks in (1, RANKS):
            stream = cuseq.data.PackedStream(
                lengths, CAPACITY, window=window, length=int, world_size=ranks
            )
            begin = time.perf_counter()
            num_rows = ranks * sum(1 for _ in stream)
            seconds = time.perf_counter() - begin
            rows.append(
                {
                    "window": window,
                    "ranks": ranks,
                    "fill": percent(sum(lengths) / (num_rows * CAPACITY)),
                    "us": 1e6 * seconds / len(lengths),
                }
            )
    return rows


def memory_mib(what: str) -> float:
    """Return the peak memory (`VmHWM`) or resident memory (`VmRSS`) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def run_large(count: int) -> dict[str, Any]:
    """Plan one epoch in windows of a tenth of the set; return its time and memory."""
    imported = memory_mib("VmRSS")
    lengths = make_lengths(count, np.int32)
    with_lengths = memory_mib("VmHWM")
    begin = time.perf_counter()
    sampler = cuseq.data.PackedBatchSampler(
        lengths, CAPACITY, world_size=RANKS, balance="attention", buffer=count // 10
    )
    made = time.perf_counter()
    batches = sum(1 for _ in sampler)
    end = time.perf_counter()
    return {
        "samples": count,
        "buffer": count // 10,
        "batches": batches,
        "made_s": made - begin,
        "epoch_s": end - made,
        "imported_mib": imported,
        "lengths_mib": with_lengths - imported,
        "peak_mib": memory_mib("VmHWM"),
    }


def large_row(count: int) -> dict[str, Any]:
    """Call `run_large` in a process of its own."""
    command = [sys.executable, __file__, "--run-large", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--large", type=int, default=100_000_000)
    parser.add_argument("--run-large", type=int, help="print what run_large finds, as JSON")
    args = parser.parse_args()
    if args.run_large is not None:
        print(json.dumps(run_large(args.run_large)))
        return
    lengths = make_lengths(args.samples)
    report = Report("packing", environment("cpu"))
    report.notes.append(
        f"{args.samples:,} lengths, lognormal, mean {lengths.mean():.1f}, capacity {CAPACITY:,}."
    )
    packings = strategy_rows(lengths)
    headings = {
        "packer": "packer",
        "rows": "rows",
        "fill": "fill, %",
        "seconds": "s",
        "list_s": "s, from a list",
    }
    report.tables.append(Table("Strategies", headings, packings))

    samplers = sampler_rows(lengths)
    headings = {
        "balance": "balance",
        "accumulation": "accumulation",
        "seconds": "s to the first batch",
        "steps": "batches",
        "tokens": "tokens, %",
        "tokens_worst": "worst",
        "attention": "attention, %",
        "attention_worst": "worst",
    }
    title = f"PackedBatchSampler, {RANKS} ranks: slowest rank above the mean, mean over steps"
    report.tables.append(Table(title, headings, samplers))

    headings = {"window": "window", "ranks": "ranks", "fill": "fill, %", "us": "us a sample"}
    streams = stream_rows(lengths[:100_000].tolist())
    report.tables.append(Table("PackedStream, 100,000 samples", headings, streams))

    large = large_row(args.large) if args.large > 0 else None
    if large is not None:
        headings = {
            "samples": "samples",
            "buffer": "buffer",
            "batches": "batches",
            "made_s": "s to make",
            "epoch_s": "s an epoch",
            "imported_mib": "MiB imported",
            "lengths_mib": "lengths",
            "peak_mib": "peak",
        }
        title = "PackedBatchSampler in windows, balance attention"
        report.tables.append(Table(title, headings, [large]))
    report.write(args.out)

    timed = [row for row in packings if "seconds" in row]
    draw_bars(
        args.out / "packing.png",
        f"Planning rows for {args.samples:,} samples",
        "s",
        [""],
        {row["packer"]: [row["seconds"]] for row in timed},
    )


if __name__ == "__main__":
    main()
