"""Measure device time, host time and device activity, for all benchmarks.

Times are in microseconds. A `Timing` is the median of its samples, with the 10th and 90th
percentiles.

Which function to use:
- `device_time`: time on the GPU, by events, with the L2 cache flushed before each repetition.
- `graph_time`: the same for kernels so short that two events would dominate the time.
- `host_time`: CPU time of a call. For a CPU tensor that is the time of the work itself.
- `profile`: kernels, copies and waits of one call, by name.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cuseq.debug.profile.trace import WINDOW, HostWait, Trace, check_gpu_profiler, record

WHOLE = WINDOW

# Longest duration of one measurement in seconds; slow calls get fewer repetitions to fit.
BUDGET_S = 0.4
MIN_REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median, the 10th and the 90th percentile of `n` samples."""

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """Summarise samples given in microseconds."""
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


class Clock:
    """Marks moments on the device, without waiting for it; on the CPU those of the host."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds from each mark to the next, after a synchronization."""
        pairs = itertools.pairwise(self._marks)
        if self._on_gpu:
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def device_time(
    fn: Callable[[], object],
    *,
    device: torch.device,
    repeats: int = 50,
    warmup: int = 5,
    flush_l2: bool = True,
) -> Timing:
    """Measure the time of one call on the device, including gaps between its kernels.

    The device is kept busy until the host has queued the call, so host time does not count, unless
    `fn` itself waits for the device. On a CPU this is the wall time.

    Args:
        fn: the call; its result is dropped.
        device: where `fn` works.
        repeats: most samples to take; slow calls get fewer, at least `MIN_REPEATS`.
        warmup: calls before the first sample.
        flush_l2: overwrite the L2 cache before each sample.
    """
    if device.type != "cuda":
        return host_time(fn, device=device, calls=1, batches=repeats, warmup=warmup)
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    fn()
    host_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    call_s = time.perf_counter() - begun
    repeats = _affordable(call_s, repeats)

    hold = hold_cycles(host_s)
    flush = _l2_buffer(torch.cuda.current_device()) if flush_l2 else None
    pairs = []
    for _ in range(repeats):
        if flush is not None:
            flush.zero_()
        torch.cuda._sleep(hold)
        start, end = _event(), _event()
        start.record()
        fn()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) * 1e3 for start, end in pairs])


def hold_cycles(host_s: float) -> int:
    """Return the cycles for which a device must sleep until the host has queued a call.

    They are those of 2 GHz, about the highest clock; at a lower clock the device only waits longer.
    """
    return int(2e9 * min(2 * host_s + 50e-6, 20e-3))


def graph_time(
    fn: Callable[[], object], *, calls: int = 20, repeats: int = 20, warmup: int = 3
) -> Timing:
    """Measure one call inside a CUDA graph of `calls` calls: launch gaps shrink to about 1 us.

    The L2 cache stays warm from call to call. `fn` must be capturable: no waits, no host copies.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) * 1e3 / calls for start, end in pairs])


def host_time(
    fn: Callable[..., object],
    *args: Any,
    device: torch.device,
    calls: int = 20,
    batches: int = 25,
    warmup: int = 5,
    setup: Callable[[], object] | None = None,
) -> Timing:
    """Measure how long one call occupies the host, over batches that start on an idle device.

    Args:
        fn: the call; its result is dropped.
        args: arguments of `fn`, so that cheap calls need no lambda.
        device: where `fn` works; a CUDA device is synchronised between batches, untimed.
        calls: calls per batch. CUDA blocks the host at about 1,000 queued launches, so keep `calls`
            times the launches of one call below that.
        batches: most batches to take; slow ones get fewer, at least `MIN_REPEATS`.
        warmup: calls before the first batch.
        setup: called before each batch and before the warm-up, untimed.
    """
    if setup is not None:
        setup()
    for _ in range(warmup):
        fn(*args)
    samples: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(samples) < batches:
            if setup is not None:
                setup()
            synchronize(device)
            begun = time.perf_counter_ns()
            for _ in itertools.repeat(None, calls):
                fn(*args)
            samples.append((time.perf_counter_ns() - begun) / calls / 1e3)
            if len(samples) == 1:
                synchronize(device)
                batch_s = (time.perf_counter_ns() - begun) / 1e9
                batches = _affordable(batch_s, batches)
        synchronize(device)
    finally:
        if collecting:
            gc.enable()
    return Timing.of(samples)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on a CUDA device; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Activity:
    """The device activity caused by an interval of host code.

    Attributes:
        kernels: kernels launched.
        device_us: time of its kernels, copies and fills on the device.
        waits: how often the host waited, by kind: "stream", "event", "device", "copy" (of memory
            that is not pinned).
        copies: copies and fills, by kind ("Memcpy DtoH (Device -> Pinned)", "Memset (Device)").
        allocations: calls that allocate or free driver memory, by name.
        sites: the waits again, by kind and the PyTorch ops around them, outermost first.
    """

    kernels: int
    device_us: float
    waits: Counter[str]
    copies: Counter[str]
    allocations: Counter[str]
    sites: Counter[str]

    @property
    def syncs(self) -> int:
        """Return the number of waits for a stream, a copy or the whole device."""
        return sum(self.waits.values()) - self.event_waits

    @property
    def event_waits(self) -> int:
        """Return the number of waits for one event."""
        return self.waits["event"]

    @property
    def dtoh_copies(self) -> int:
        """Return the number of copies from the device to the host."""
        return sum(n for kind, n in self.copies.items() if "DtoH" in kind)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "kernels": self.kernels,
            "device_us": self.device_us,
            "syncs": self.syncs,
            "event_waits": self.event_waits,
            "dtoh_copies": self.dtoh_copies,
            "waits": dict(self.waits),
            "copies": dict(self.copies),
            "allocations": dict(self.allocations),
            "sites": dict(self.sites),
        }


@dataclass(frozen=True)
class Profile:
    """One profiled call; `within` sums what a label's code caused."""

    trace: Trace

    def within(self, *labels: str) -> Activity:
        """Return what host code inside these `record_function` labels caused, on any thread."""
        seen = self.trace.within(*labels)
        kernels = [work for work in seen.work if work.category == "kernel"]
        return Activity(
            kernels=len(kernels),
            device_us=sum(work.us for work in seen.work),
            waits=Counter(wait.kind for wait in seen.waits),
            copies=Counter(work.name for work in seen.work if work.category != "kernel"),
            allocations=Counter(call.name for call in seen.allocations),
            sites=Counter(f"{wait.kind} in {self._site(wait)}" for wait in seen.waits),
        )

    def _site(self, wait: HostWait) -> str:
        around = self.trace.ops_around(wait.call)
        return " > ".join(op.name for op in around) or "code outside PyTorch's ops"


def profile(fn: Callable[[], object], *, device: torch.device) -> Profile:
    """Run `fn` once under torch.profiler; `within(WHOLE)` is everything it did.

    `fn` may mark its parts with `torch.profiler.record_function`. Warm it up and measure times
    before: once the profiler has run, it may slow every later launch of the process.
    """
    check_profiler(device)  # the first profile of a process starts CUPTI and may miss events
    return Profile(record(fn, gpu=device.type == "cuda"))


def check_profiler(device: torch.device) -> str | None:
    """Return a warning for the report if the profiler misses events, else None."""
    return check_gpu_profiler() if device.type == "cuda" else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _affordable(sample_s: float, wanted: int) -> int:
    return max(min(wanted, MIN_REPEATS), min(wanted, int(BUDGET_S / max(sample_s, 1e-9))))


@lru_cache
def _l2_buffer(index: int) -> torch.Tensor:
    size = 4 * torch.cuda.get_device_properties(index).L2_cache_size
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{index}")
