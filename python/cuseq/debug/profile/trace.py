"""Parse a trace of torch.profiler into GPU work, waits and reads of the host.

Times are microseconds of the trace's own clock.
"""

from __future__ import annotations

import bisect
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from cuseq.debug.profile.lines import shown_path

WINDOW = "cuseq.profile_step"
_SYNC_WARNING = "called a synchronizing CUDA operation"  # of torch's sync debug mode

# Runtime and driver calls that block the host until the device reaches some point. Other calls
# return at once, except copies of pageable memory and allocations.
_KINDS = {
    "cudaStreamSynchronize": "stream",
    "cuStreamSynchronize": "stream",
    "cudaEventSynchronize": "event",
    "cuEventSynchronize": "event",
    "cudaDeviceSynchronize": "device",
    "cuCtxSynchronize": "device",
}
_COPY = re.compile(r"cu(da)?Memcpy")
_ALLOCATION = re.compile(r"cuda(Malloc|Free|HostAlloc)(Host|Managed)?$")
_OP = re.compile(r"(?!autograd::|torch::autograd)\w+::\w+$")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")

# Ops that return tensor values, or a shape that depends on them, to the host.
HOST_READS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "bincount",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )
)

# Every other op of cuseq reads values of tensors on the CPU only, to check its arguments.
_WAITING_OP = "cuseq::max_seqlen_sync"


@dataclass(frozen=True, eq=False)
class Span:
    """A named interval: an op, a call of the CUDA runtime, or work of the device.

    Attributes:
        thread: the host thread, or the stream.
        category: "cpu_op", "cuda_runtime", "kernel", "gpu_memcpy", ...
    """

    name: str
    start: float
    end: float
    thread: Any
    category: str
    args: dict[str, Any] = field(repr=False)

    @property
    def us(self) -> float:
        return self.end - self.start

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    @property
    def is_backward(self) -> bool:
        """Return whether this is an autograd node, which names its forward op."""
        return self.args.get("Fwd thread id", 0) > 0 and "Sequence number" in self.args


@dataclass(frozen=True, eq=False)
class HostWait:
    """A wait of the host: kind "stream", "event", "device" or "copy", and its one or two calls."""

    kind: str
    calls: tuple[Span, ...]

    @property
    def call(self) -> Span:
        return self.calls[0]

    @property
    def us(self) -> float:
        return sum(call.us for call in self.calls)


@dataclass(frozen=True)
class Stretch:
    """What happened in an interval of host code, on any thread.

    Attributes:
        spans: the intervals themselves, as the host ran them.
        waits: in the order of their start.
        allocations: calls that allocate or free driver memory; they may wait too.
        graph_launches: launches of CUDA graphs.
        work: kernels, copies and fills that the code launched, whenever they ran.
        ops: PyTorch's ops, including nested ones, without other records of that category
            (autograd's nodes, Dynamo's stages).
        reads: ops of `HOST_READS`, except those called by another one or by a check of cuseq's.
        labels: the `record_function` labels of the code.
    """

    spans: list[Span]
    waits: list[HostWait]
    allocations: list[Span]
    graph_launches: list[Span]
    work: list[Span]
    ops: list[Span]
    reads: list[Span]
    labels: list[Span]


class Trace:
    """The events of a Chrome trace; `within` selects those that a label's code caused.

    Args:
        events: `traceEvents` of the trace.
        base_ns: origin of its times, in ns of `time.time_ns`.
    """

    def __init__(self, events: Iterable[dict[str, Any]], base_ns: int = 0) -> None:
        self.base_ns = base_ns
        self._labels: dict[str, list[Span]] = {}
        self._calls: list[Span] = []
        self._work: dict[Any, list[Span]] = {}
        ops: dict[Any, list[Span]] = {}
        for event in events:
            if event.get("ph") != "X":
                continue
            span = _span(event)
            if span.category == "user_annotation":
                self._labels.setdefault(span.name, []).append(span)
            elif span.category in ("cuda_runtime", "cuda_driver"):
                self._calls.append(span)
            elif span.category in ("kernel", "gpu_memcpy", "gpu_memset"):
                self._work.setdefault(span.args.get("correlation"), []).append(span)
            elif span.category == "cpu_op":
                ops.setdefault(span.thread, []).append(span)
        self._calls.sort(key=lambda call: call.start)
        self._ops = {thread: _Nest(spans) for thread, spans in ops.items()}
        self._forward: dict[tuple[Any, int], list[Span]] = {}
        for thread, nest in self._ops.items():
            for op in nest.spans:
                if "Sequence number" in op.args and not op.is_backward:
                    key = (thread, op.args["Sequence number"])
                    self._forward.setdefault(key, []).append(op)

    def within(self, *labels: str) -> Stretch:
        """Return what host code in these `record_function` labels did and caused, on any thread."""
        spans = [span for label in labels for span in self._labels.get(label, [])]

        def inside(found: Iterable[Span]) -> list[Span]:
            return [x for x in found if any(s.start <= x.middle <= s.end for s in spans)]

        calls = inside(self._calls)
        # A launch may be recorded both as a runtime call and as a driver call.
        caused = dict.fromkeys(x.args["correlation"] for x in calls if "correlation" in x.args)
        ops = inside(op for nest in self._ops.values() for op in nest.spans)
        return Stretch(
            spans=spans,
            waits=self._waits(calls),
            allocations=[call for call in calls if _ALLOCATION.match(call.name)],
            graph_launches=[call for call in calls if call.name in _GRAPH_LAUNCHES],
            work=[work for correlation in caused for work in self._work.get(correlation, [])],
            ops=[op for op in ops if _OP.match(op.name)],
            reads=[op for op in ops if self._is_read(op)],
            labels=inside(label for same in self._labels.values() for label in same),
        )

    def ops_around(self, span: Span) -> list[Span]:
        """Return the ops that contain the span, outermost first; an op contains itself."""
        nest = self._ops.get(span.thread)
        return [] if nest is None else nest.around(span)

    def forward_of(self, backward: Span, thread: Any) -> Span | None:
        """Return the op on that thread for which autograd made a node, or None."""
        same = self._forward.get((thread, backward.args["Sequence number"]), [])
        # Making a node increments the number: earlier ops have it too, later ones do not.
        return max(
            (op for op in same if op.start < backward.start),
            key=lambda op: op.start,
            default=None,
        )

    def _is_read(self, op: Span) -> bool:
        if op.name not in HOST_READS:
            return False
        around = [x.name for x in self.ops_around(op) if x is not op]
        return not any(name in HOST_READS or _is_check(name) for name in around)

    def _waits(self, calls: list[Span]) -> list[HostWait]:
        last: dict[Any, HostWait] = {}
        waits: list[HostWait] = []
        for call in calls:
            kind = self._kind(call)
            before = last.get(call.thread)
            if kind is None or (before is not None and call.end <= before.calls[-1].end):
                continue  # no wait, or the driver call inside one
            if kind == "stream" and before is not None and self._belongs(before, call):
                waits.remove(before)
                wait = HostWait("copy", (before.call, call))
            else:
                wait = HostWait(kind, (call,))
            waits.append(wait)
            last[call.thread] = wait
        return waits

    def _kind(self, call: Span) -> str | None:
        if _COPY.match(call.name) is None:
            return _KINDS.get(call.name)
        if "Async" not in call.name:
            return "copy"
        copies = self._work.get(call.args.get("correlation"), [])
        return "copy" if any("Pageable" in copy.name for copy in copies) else None

    def _belongs(self, copy: HostWait, call: Span) -> bool:
        """Return whether a stream wait is the end of the same op's copy of pageable memory."""
        if copy.kind != "copy" or len(copy.calls) == 2:
            return False
        ops, others = self.ops_around(copy.call), self.ops_around(call)
        return bool(ops) and bool(others) and ops[-1] is others[-1]


class _Nest:
    """Spans of one thread, nested or disjoint."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self.spans]
        self._parents: list[int] = []
        open_ones: list[int] = []
        for index, span in enumerate(self.spans):
            while open_ones and self.spans[open_ones[-1]].end < span.end:
                open_ones.pop()
            self._parents.append(open_ones[-1] if open_ones else -1)
            open_ones.append(index)

    def around(self, span: Span) -> list[Span]:
        index = bisect.bisect_right(self._starts, span.start) - 1
        found = []
        while index >= 0:
            if self.spans[index].end >= span.end:
                found.append(self.spans[index])
            index = self._parents[index]
        return found[::-1]


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the intervals covered by any of the spans, in order and without overlaps."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


def record(
    body: Callable[[], object],
    *,
    gpu: bool,
    lines: AbstractContextManager[Any] | None = None,
) -> Trace:
    """Run `body` under torch.profiler with the label `WINDOW`, and wait for the GPU afterwards.

    Args:
        body: may label its parts with `torch.profiler.record_function`.
        gpu: whether to record the GPU's work.
        lines: context manager entered around the body alone.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    # Without acc_events the profiler warns that it keeps only one cycle; there is only one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        before = time.time_ns()
        with torch.profiler.record_function(WINDOW):
            with lines if lines is not None else nullcontext():
                body()
        after = time.time_ns()
        if gpu:
            torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            # Not strict: kernel names may hold control characters.
            content = json.loads(file.read(), strict=False)
    finally:
        os.unlink(path)
    base = int(content.get("baseTimeNanoseconds", 0))
    trace = Trace(content["traceEvents"], base)
    trace.base_ns += _clock_error(trace, before, after)
    return trace


def waits_that_torch_names(body: Callable[[], object]) -> tuple[str, ...]:
    """Run `body` in torch's sync debug mode, and return the lines of the waits that it names.

    The mode knows the waits of PyTorch's own ops, needs no profiler, and names the innermost line
    of Python, in backward that of the call. Other warnings of `body` are warned as ever.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    lines = []
    for one in caught:
        if _SYNC_WARNING in str(one.message):
            lines.append(f"{shown_path(one.filename)}:{one.lineno}")
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return tuple(dict.fromkeys(lines))


@lru_cache
def check_gpu_profiler() -> str | None:
    """Record a kernel, an event wait and a read; return a warning if the profiler missed some.

    A profiler that sees nothing would report that nothing waits. The first profile of a process
    also starts CUPTI and may miss events, so one runs before the check.
    """
    value = torch.ones(1, device="cuda")

    def known() -> None:
        value.add_(1)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        value.item()

    known()
    record(known, gpu=True)
    seen = record(known, gpu=True).within(WINDOW)
    kernels = sum(work.category == "kernel" for work in seen.work)
    kinds = sorted(wait.kind for wait in seen.waits)
    if kernels == 1 and kinds in (["event", "stream"], ["copy", "event"]):
        return None
    return (
        "The profiler miscounts on this machine, so do not trust its counts: of one kernel, a wait "
        f"for an event and a read of a value it recorded {kernels} kernels and the waits {kinds}."
    )


def _clock_error(trace: Trace, before: int, after: int) -> int:
    """Return the ns to add to the trace's times if its clock is not that of `time.time_ns`."""
    spans = trace.within(WINDOW).spans
    if len(spans) != 1:
        raise RuntimeError(
            f"torch.profiler recorded the step {len(spans)} times instead of once: "
            "is another profiler at work?"
        )
    least = before - trace.base_ns - int(spans[0].start * 1e3)
    most = after - trace.base_ns - int(spans[0].end * 1e3)
    return min(max(0, least), most)


def _is_check(name: str) -> bool:
    """Return whether reads inside an op of this name would not happen on a GPU."""
    return name.startswith("cuseq::") and name != _WAITING_OP


def _span(event: dict[str, Any]) -> Span:
    name, start = event["name"], float(event["ts"])
    category = event.get("cat", "")
    if category in ("cuda_runtime", "cuda_driver"):
        name = name.split("_")[0]  # drop "_v3020" or "_ptsz"
    end = start + float(event.get("dur", 0.0))
    return Span(name, start, end, event.get("tid"), category, event.get("args", {}))
