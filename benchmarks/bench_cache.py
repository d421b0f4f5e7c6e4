"""Benchmark the identity cache: host time of a hit, a miss and the ops without it, also on threads.

    python -m benchmarks cache [--device cpu] [--out FOLDER]

The lines of C++ threads need the program `cuseq_cache_threads`, which a build with tests compiles.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import timer
import torch
from report import ROOT, Report, Table, arguments, environment
from workload import lognormal_lengths

import cuseq

TOTAL_TOKENS = 8192
# Fewer keys than the cache holds, so that a miss does not also evict.
KEYS = 50


def measure_hit(
    call: Callable[..., object], key: tuple[Any, ...], device: torch.device, others: int = 0
) -> timer.Timing:
    """Measure host time of a hit with `others` more entries in the cache; fail if it was a miss."""
    fillers = [key[0].clone() for _ in range(others)]
    cuseq.cache.clear()
    call(*key)
    for filler in fillers:
        cuseq.ops.cached_cu_seqlens(filler)
    before = cuseq.cache.stats()
    timing = timer.host_time(call, *key, device=device, calls=2000)
    after = cuseq.cache.stats()
    if after["misses"] != before["misses"] or after["hits"] == before["hits"]:
        raise RuntimeError(f"these calls were not all hits: {before} before, {after} after")
    return timing


def measure_miss(
    call: Callable[..., object], key: tuple[Any, ...], device: torch.device
) -> timer.Timing:
    """Measure host time of a miss with its insertion; fail if one was a hit."""
    lengths, *rest = key
    keys = itertools.cycle([lengths.clone() for _ in range(KEYS)])
    cuseq.cache.clear()
    before = cuseq.cache.stats()
    timing = timer.host_time(
        lambda: call(next(keys), *rest),
        device=device,
        calls=KEYS,
        warmup=KEYS,
        setup=cuseq.cache.clear,
    )
    hits = cuseq.cache.stats()["hits"] - before["hits"]
    if hits > 0:
        raise RuntimeError(f"{hits} of these calls were hits, not misses")
    return timing


def python_throughput(
    call: Callable[..., object], keys: list[torch.Tensor], seconds: float = 0.4
) -> float:
    """Return millions of calls per second over all threads, one thread per key; median of five."""

    def once() -> float:
        counts = [0] * len(keys)
        ready = threading.Barrier(len(keys) + 1)
        stop = threading.Event()

        def work(index: int) -> None:
            key, done = keys[index], 0
            ready.wait()
            while not stop.is_set():
                for _ in itertools.repeat(None, 100):
                    call(key)
                done += 100
            counts[index] = done

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(keys))]
        for thread in threads:
            thread.start()
        ready.wait()
        begun = time.perf_counter()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - begun) / 1e6

    return statistics.median(once() for _ in range(5))


def cpp_throughput(device: torch.device) -> dict[tuple[int, str], float]:
    """Return throughput by number of threads and kind of key, from a C++ program without a GIL.

    Each figure is the median of five.
    """
    folder = ROOT / "build" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    program = folder / "cuseq_cache_threads"
    if not program.exists():
        return {}
    runs: dict[tuple[int, str], list[float]] = {}
    for _ in range(5):
        printed = subprocess.run(
            [program, device.type], check=True, capture_output=True, text=True
        ).stdout
        for line in printed.splitlines():
            threads, kind, millions = line.split()
            runs.setdefault((int(threads), kind), []).append(float(millions))
    return {which: statistics.median(values) for which, values in runs.items()}


def measure_threads(lengths: torch.Tensor, device: torch.device) -> list[dict[str, Any]]:
    """Measure hits per second over all threads, with one key per thread and with a shared key."""
    calls = {
        "Python, cuseq.ops.cached_cu_seqlens": cuseq.ops.cached_cu_seqlens,
        "Python, torch.ops.cuseq.cached_cu_seqlens": torch.ops.cuseq.cached_cu_seqlens,
        "Python, torch.ops.aten.alias (no cache)": torch.ops.aten.alias.default,
    }
    rows = []
    for name, call in calls.items():
        for kind in ("own", "shared"):
            line: dict[str, Any] = {"what": name, "keys": kind}
            for threads in (1, 8):
                own = [lengths.clone() for _ in range(threads)]
                keys = own if kind == "own" else own[:1] * threads
                cuseq.cache.clear()
                line[f"m{threads}"] = python_throughput(call, keys)
            rows.append(line)
    cpp = cpp_throughput(device)
    for kind in ("own", "shared") if cpp else ():
        line = {"what": "C++, cuseq::cached_cu_seqlens", "keys": kind}
        rows.append(line | {f"m{threads}": cpp[threads, kind] for threads in (1, 8)})
    return [line | {"ratio": line["m8"] / line["m1"]} for line in rows]


def measure_drop(lengths: torch.Tensor, device: torch.device) -> list[dict[str, Any]]:
    """Measure host time of making and dropping a tensor that is not a key, with a filled cache."""

    def make_and_drop() -> None:
        lengths.clone()

    rows = []
    for others in (0, KEYS):
        cuseq.cache.clear()
        keys = [lengths.clone() for _ in range(others)]
        for key in keys:
            cuseq.ops.cached_cu_seqlens(key)
        timing = timer.host_time(make_and_drop, device=device, calls=500)
        rows.append(row(f"clone and drop, {others} keys in the cache", timing))
    return rows


def row(name: str, timing: timer.Timing, activity: timer.Activity | None = None) -> dict[str, Any]:
    """Return one line of the table."""
    return {
        "what": name,
        "host_us": timing.median,
        "low": timing.low,
        "high": timing.high,
        "kernels": activity.kernels if activity else None,
        "device_us": activity.device_us if activity else None,
        "syncs": activity.syncs + activity.event_waits if activity else None,
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = torch.device(args.device)
    ops = torch.ops.cuseq
    lengths = torch.tensor(
        lognormal_lengths(TOTAL_TOKENS, 350, seed=0), dtype=torch.int32, device=device
    )
    by_id = {id(lengths): lengths}
    key, key_and_total = (lengths,), (lengths, TOTAL_TOKENS)

    def plain_cumsum() -> torch.Tensor:
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=device)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
        return offsets

    hits = {
        "hit, cuseq.ops.cached_cu_seqlens": (cuseq.ops.cached_cu_seqlens, key),
        "hit, torch.ops.cuseq.cached_cu_seqlens": (ops.cached_cu_seqlens, key),
        "hit, torch.ops.cuseq.cached_cu_seqlens.default": (ops.cached_cu_seqlens.default, key),
        "hit, cuseq.ops.cached_position_ids": (cuseq.ops.cached_position_ids, key_and_total),
        "hit, torch.ops.cuseq.cached_position_ids": (ops.cached_position_ids, key_and_total),
    }
    dropped = measure_drop(lengths, device)
    rows = [row(name, measure_hit(call, on, device)) for name, (call, on) in hits.items()]
    rows.append(
        row(
            f"hit, cuseq.ops.cached_cu_seqlens, {KEYS} newer entries",
            measure_hit(cuseq.ops.cached_cu_seqlens, key, device, others=KEYS),
        )
    )
    misses = {
        "miss, cuseq.ops.cached_cu_seqlens": (cuseq.ops.cached_cu_seqlens, key),
        "miss, torch.ops.cuseq.cached_cu_seqlens": (ops.cached_cu_seqlens, key),
        "miss, cuseq.ops.cached_position_ids": (cuseq.ops.cached_position_ids, key_and_total),
        "miss, cuseq.ops.cached_seq_ids": (cuseq.ops.cached_seq_ids, key_and_total),
    }
    missed = {name: measure_miss(call, on, device) for name, (call, on) in misses.items()}
    plain: dict[str, Callable[[], object]] = {
        "pure op, cuseq.ops.cu_seqlens": lambda: cuseq.ops.cu_seqlens(lengths),
        "pure op, torch.ops.cuseq.cu_seqlens": lambda: ops.cu_seqlens(lengths),
        "the same in PyTorch: zeros, cumsum": plain_cumsum,
    }
    uncached = {name: timer.host_time(call, device=device) for name, call in plain.items()}
    floors = {
        "a dict's hit, by id()": timer.host_time(
            lambda: by_id[id(lengths)], device=device, calls=2000
        ),
        "a view through torch.ops (aten.alias)": timer.host_time(
            torch.ops.aten.alias.default, lengths, device=device, calls=2000
        ),
    }

    threads = measure_threads(lengths, device)

    # The profiler runs last: it may change host times measured after it.
    note = timer.check_profiler(device)

    def seen(call: Callable[..., object], on: tuple[Any, ...]) -> timer.Activity | None:
        if device.type != "cuda":
            return None
        cuseq.cache.clear()
        return timer.profile(lambda: call(*on), device=device).within(timer.WHOLE)

    miss_activity = {name: seen(call, on) for name, (call, on) in misses.items()}
    rows += [row(name, timing, miss_activity[name]) for name, timing in missed.items()]
    rows += [row(name, timing, seen(plain[name], ())) for name, timing in uncached.items()]
    rows += [row(name, timing) for name, timing in floors.items()]

    report = Report("cache", environment(args.device))
    if note:
        report.notes.append(note)
    headings = {
        "what": f"{lengths.numel()} lengths, {TOTAL_TOKENS:,} tokens",
        "host_us": "host us",
        "low": "p10",
        "high": "p90",
    }
    if device.type == "cuda":
        headings |= {"kernels": "kernels", "device_us": "device us", "syncs": "waits"}
    report.tables.append(Table("Host time of a call", headings, rows))
    report.tables.append(Table("What was never a key", headings, dropped))
    report.tables.append(
        Table(
            "Hits on threads, millions a second over all of them",
            {"what": "call", "keys": "keys", "m1": "1 thread", "m8": "8 threads", "ratio": "ratio"},
            threads,
        )
    )
    report.write(args.out)


if __name__ == "__main__":
    main()
