"""`profile_step`: what one step of a training loop costs beside its arithmetic."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq._arguments import as_int, check_tensor, shown
from cuseq.debug.profile.lines import LineLog
from cuseq.debug.profile.report import Timeline
from cuseq.debug.profile.result import Copy, HostRead, StepProfile, Tokens, Wait, Work
from cuseq.debug.profile.trace import (
    WINDOW,
    HostWait,
    Span,
    Stretch,
    Trace,
    check_gpu_profiler,
    record,
    union,
)
from cuseq.layout import PackedLayout


def profile_step(
    fn: Callable[[], object],
    *,
    warmup: int = 1,
    steps: int = 1,
    batch: Mapping[str, Any] | PackedLayout | Sequence[Any] | None = None,
) -> StepProfile:
    """What one step of a training loop does beside its arithmetic: waits, copies, launches, pads.

    `fn` runs `warmup` times unseen, `steps` times against the clock, and `steps` times more under
    torch.profiler with a trace function that notes the lines: profilers slow the host, so wall time
    is not taken from what they record. Counts are exact for the recorded steps; what the profiler
    itself waits for lies outside of them. The GPU's are of every thread, ops and reads of values of
    the calling one and of autograd's.

    A wait is a call in which the CUDA runtime keeps the host: synchronising a stream, an event or
    the device, and copies of memory that is not pinned. The copy of one op and the wait at its end
    count once. Polling an event (as NCCL's watchdog does) is none. On a machine without a GPU no
    wait can be seen; the reads of tensors' values are, and each would wait for a tensor on a GPU.

    Lines are those of the thread that calls. Work of autograd's threads has the line of its forward
    op, another thread's the names of PyTorch's ops. Where a debugger or a coverage tool traces
    already, there are ops' names only. From Python 3.13 on Dynamo gives a branch on a tensor, in
    code that it compiled, the first line of the function.

    Waits for the GPU itself, before and after the steps. A process whose profiler ran once may
    launch kernels more slowly from then on.

    Args:
        fn: one step, without arguments; what it raises is passed on.
        warmup: calls before anything is measured, that compile, allocate and load kernels.
        steps: calls to sum over.
        batch: for the share of pads. A mapping with `packed` (a `PackedLayout`), or with
            `cu_seq_lens_q` and `input_ids`, or with a 2-D `attention_mask`, the first found; or a
            layout; or a sequence of these, for the micro-batches of a step. The pads of anything
            else are nobody's to know: a label of -100 and a pad's token id may be real tokens, and
            how many tokens went through attention cannot be seen from outside.

    Raises:
        TypeError, ValueError: an argument is wrong; a batch does not say which tokens are real.
        RuntimeError: another profiler is at work.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> profile = cuseq.profile_step(lambda: model(torch.ones(2, 4)).sum().backward())
        >>> print(profile)
        A step on ...
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {shown(fn)}")
    warmup, steps = as_int(warmup, "warmup", 0), as_int(steps, "steps", 1)
    batches = _batches(batch)
    if torch.autograd._profiler_enabled():
        raise RuntimeError("profile_step must not run inside another profiler, got one at work")
    for _ in range(warmup):
        fn()
    wall_us = _wall_us(fn, steps)
    gpu = torch.cuda.is_initialized()
    broken = check_gpu_profiler() if gpu else None

    def all_steps() -> None:
        for _ in range(steps):
            fn()

    log = LineLog()
    trace = record(all_steps, gpu=gpu, lines=log)
    notes = _notes(gpu, log, broken)
    # Counted last: it may wait, and a layout that was waited for would not wait in the step.
    tokens = _count_tokens(batches)
    name = torch.cuda.get_device_name() if gpu else None
    return summarise(trace, log, steps=steps, wall_us=wall_us, gpu=name, tokens=tokens, notes=notes)


def summarise(
    trace: Trace,
    log: LineLog,
    *,
    steps: int,
    wall_us: float,
    gpu: str | None,
    tokens: Tokens | None = None,
    notes: tuple[str, ...] = (),
) -> StepProfile:
    """The profile of a recorded trace: `log` the lines of `WINDOW`'s thread, `gpu` its name."""
    seen = trace.within(WINDOW)
    (window,) = seen.spans
    place = _Places(trace, log, window.thread)
    return StepProfile(
        steps=steps,
        device=gpu or "CPU",
        gpu=gpu is not None,
        wall_us=wall_us,
        gpu_busy_us=_length(_busiest(seen.work)) if gpu else None,
        syncs=_waits(seen.waits, place),
        host_reads=_reads(seen.reads, place),
        kernel_table=_by_name((w for w in seen.work if w.category == "kernel"), longest=True),
        copies=_copies(work for work in seen.work if work.category != "kernel"),
        graph_launches=len(seen.graph_launches),
        allocations=len(seen.allocations),
        op_table=_by_name(seen.ops, longest=False),
        tokens=tokens,
        notes=notes,
        timeline=_timeline(seen, window, gpu is not None),
    )


class _Places:
    """Says which line caused what a trace saw."""

    def __init__(self, trace: Trace, log: LineLog, thread: Any) -> None:
        self._trace, self._log, self._thread = trace, log, thread

    def __call__(self, span: Span) -> str:
        ops = self._trace.ops_around(span)
        at = self._at(span) if span.thread == self._thread else None
        nodes = [op for op in ops if op.is_backward]
        # Since the node began, no line of the user's has run: it is autograd that is at work.
        if nodes and (at is None or at[0] <= self._ns(nodes[-1].start)):
            forward = self._trace.forward_of(nodes[-1], self._thread)
            origin = None if forward is None else self._at(forward)
            if origin is not None:
                return f"backward of {origin[1]}"
        if at is not None:
            return at[1]
        names = " > ".join(op.name for op in ops) or "code outside PyTorch's ops"
        return names if span.thread == self._thread else f"{names}, on another thread"

    def _at(self, span: Span) -> tuple[int, str] | None:
        return self._log.at(self._ns(span.middle))

    def _ns(self, when: float) -> int:
        return self._trace.base_ns + int(when * 1e3)


def _waits(waits: list[HostWait], place: _Places) -> tuple[Wait, ...]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    for wait in waits:
        sums[wait.kind, place(wait.call)].append(wait.us)
    rows = [Wait(*key, len(times), sum(times)) for key, times in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _reads(reads: list[Span], place: _Places) -> tuple[HostRead, ...]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for read in reads:
        counts[read.name.removeprefix("aten::"), place(read)] += 1
    rows = [HostRead(*key, count) for key, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _by_name(spans: Iterable[Span], longest: bool) -> tuple[Work, ...]:
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.us)
    rows = [Work(name, len(each), sum(each)) for name, each in times.items()]
    return tuple(sorted(rows, key=lambda row: -row.us if longest else -row.count))


def _copies(spans: Iterable[Span]) -> tuple[Copy, ...]:
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.name].append(span)
    rows = [
        Copy(kind, len(g), sum(int(x.args.get("bytes", 0)) for x in g), sum(x.us for x in g))
        for kind, g in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _busiest(work: list[Span]) -> list[tuple[float, float]]:
    devices: dict[Any, list[Span]] = defaultdict(list)
    for span in work:
        devices[span.args.get("device")].append(span)
    return max((union(spans) for spans in devices.values()), key=_length, default=[])


def _length(busy: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in busy)


def _timeline(seen: Stretch, window: Span, gpu: bool) -> Timeline:
    if gpu:
        busy = _busiest(seen.work)
        marks = [(wait.kind, wait.call.start, wait.call.start + wait.us) for wait in seen.waits]
    else:
        busy = union(op for op in seen.ops if op.thread == window.thread)
        marks = [(op.name.removeprefix("aten::"), op.start, op.end) for op in seen.reads]
    end = max([window.end, *(stop for _, stop in busy[-1:])])

    def since(when: float) -> float:
        return round(when - window.start, 2)

    return Timeline(
        since(end),
        tuple((since(start), since(stop)) for start, stop in busy),
        tuple((name, since(start), since(stop)) for name, start, stop in marks),
    )


def _wall_us(fn: Callable[[], object], steps: int) -> float:
    _finish()
    begun = time.perf_counter_ns()
    for _ in range(steps):
        fn()
    _finish()
    return (time.perf_counter_ns() - begun) / 1e3


def _finish() -> None:
    # Not asked of a process that uses no GPU: it would get a context.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _notes(gpu: bool, log: LineLog, broken: str | None) -> tuple[str, ...]:
    notes = [] if broken is None else [broken]
    if not gpu:
        notes.append(
            "No GPU was in use, so nothing could wait for one. Each host read would wait, if its "
            "tensor were on a GPU; so would tolist(), .cpu() and .numpy(), which are not seen here."
        )
    if not log.active:
        notes.append("Another trace function was at work (a debugger, coverage): no lines.")
    return tuple(notes)


# A layout, or total tokens and what tells the real ones: offsets or a mask.
_Source = PackedLayout | tuple[int, str, Tensor]


def _batches(batch: Any) -> list[_Source] | None:
    if batch is None:
        return None
    if isinstance(batch, (Mapping, PackedLayout)):
        return [_source(batch, "batch")]
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise TypeError(
            "batch must be a mapping, a PackedLayout or a sequence of these, got "
            f"{type(batch).__name__}"
        )
    return [_source(each, f"batch[{i}]") for i, each in enumerate(batch)]


def _source(batch: Any, name: str) -> _Source:
    """What tells a batch's tokens, taken out now: a step may take its batch apart."""
    if isinstance(batch, PackedLayout):
        return batch
    if not isinstance(batch, Mapping):
        raise TypeError(f"{name} must be a mapping or a PackedLayout, got {type(batch).__name__}")
    packed, offsets = batch.get("packed"), batch.get("cu_seq_lens_q")
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(packed, PackedLayout):
        return packed
    if isinstance(offsets, Tensor) and isinstance(ids, Tensor):
        check_tensor(offsets, "cu_seq_lens_q")
        if offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(f"cu_seq_lens_q must be [n_seqs + 1], got {shown(offsets)}")
        return ids.numel(), "cu_seq_lens_q", offsets
    if isinstance(mask, Tensor) and mask.dim() == 2:
        check_tensor(mask, "attention_mask")
        return mask.numel(), "attention_mask", mask
    raise ValueError(
        f"{name} must say which tokens are real, by packed, by cu_seq_lens_q with input_ids or by "
        f"a 2-D attention_mask, got {sorted(map(str, batch))}"
    )


def _count_tokens(batches: list[_Source] | None) -> Tokens | None:
    if batches is None:
        return None
    in_memory = real = 0
    for source in batches:
        if isinstance(source, PackedLayout):
            in_memory += source.total_tokens
            real += source.num_real_tokens
            continue
        total, name, values = source
        in_memory += total
        real += int(values[-1] if name == "cu_seq_lens_q" else torch.count_nonzero(values))
    return Tokens(in_memory, real)
