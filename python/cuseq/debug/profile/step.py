"""`profile_step`: measure what one step of a training loop does besides arithmetic."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_flag, check_tensor, shown
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
    waits_that_torch_names,
)
from cuseq.layout import PackedLayout
from cuseq.trees import PackedTree

_NAMES_OF_SAMPLES = (
    ("attention_mask", "prompt_mask", "completion_mask"),
    ("input_ids", "prompt_ids", "completion_ids"),
)
_ATTENTION = "cuseq attention: "  # what csrc/attention/call.cpp puts before a backend's name


def profile_step(
    fn: Callable[[], object],
    *,
    warmup: int = 1,
    steps: int = 1,
    batch: Mapping[str, Any] | PackedLayout | Sequence[Any] | None = None,
    fail_on_wait: bool = False,
) -> StepProfile:
    """Measure what one training step does besides arithmetic: waits, copies, launches, padding.

    `fn` runs `warmup` times unmeasured, then `steps` times for the wall time, then `steps` times
    under torch.profiler with a trace function that records lines. Wall time is measured without the
    profiler, because the profiler slows the host. Counts are exact for the recorded steps; waits of
    the profiler itself are not counted. GPU counts include every thread. Ops and reads of values
    are counted on the calling thread and autograd's threads.

    A wait is a call in which the CUDA runtime blocks the host: synchronising a stream, an event or
    the device, or copying memory that is not pinned. An op's copy and the wait at its end count
    once. Polling an event (as NCCL's watchdog does) is not a wait. Without a GPU, waits cannot be
    seen; reads of tensor values can, and each would wait if its tensor were on a GPU.

    Lines are those of the calling thread. Work of autograd's threads gets the line of its forward
    op; work of any other thread gets the names of PyTorch's ops. If a debugger or a coverage tool
    is tracing already, all work gets the names of ops. From Python 3.13 on, Dynamo reports a branch
    on a tensor in compiled code at the first line of the function.

    Waits for the GPU itself, before and after the steps. After the profiler has run once, the
    process may launch kernels more slowly.

    Args:
        fn: one step, called without arguments; its exceptions are passed on.
        warmup: calls before the measurement, which compile, allocate and load kernels.
        steps: calls to sum over.
        batch: tells the share of padding. A mapping with `packed` (a `PackedLayout`), with
            `cu_seq_lens_q` and `input_ids`, or with a 2-D `attention_mask` (or the `prompt_mask`
            and `completion_mask` of TRL's GRPO); the first one found counts. Or a layout, or a
            sequence of these for the micro-batches of a step. Padding cannot be derived from
            anything else: a token with label -100 or with the pad token's id may be real, and the
            number of tokens in attention cannot be seen from outside. A mask
            with `input_ids` also tells how many tokens repeat the beginning of another row.
        fail_on_wait: raise if the step waited for the GPU, with the lines: a gate for tests. On a
            GPU the step runs once more in torch's sync debug mode, which names waits of PyTorch's
            ops where the profiler is not allowed or misses them. Where CUDA was not initialised,
            raise if ops read values of tensors, each of which would wait on a GPU; `tolist`,
            `.cpu()` and `.numpy()` of a CPU tensor call no op and pass.

    Raises:
        TypeError, ValueError: an argument is wrong; a batch does not say which tokens are real.
        RuntimeError: another profiler is at work, or a wait that `fail_on_wait` does not let pass.

    Examples:
        >>> model = torch.nn.Linear(4, 4)
        >>> profile = cuseq.profile_step(lambda: model(torch.ones(2, 4)).sum().backward())
        >>> print(profile)
        A step on ...
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {shown(fn)}")
    warmup, steps = as_int(warmup, "warmup", 0), as_int(steps, "steps", 1)
    check_flag(fail_on_wait, "fail_on_wait")
    batches = _batches(batch)
    if torch.autograd._profiler_enabled():
        raise RuntimeError("profile_step must not run inside another profiler, got an active one")
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
    # Counted last: counting may wait, and would make the layout's values known to the step.
    tokens = _count_tokens(batches)
    name = torch.cuda.get_device_name() if gpu else None
    made = summarise(trace, log, steps=steps, wall_us=wall_us, gpu=name, tokens=tokens, notes=notes)
    if fail_on_wait:
        if not broken:
            check_no_waits(made)
        # A second witness, which needs no profiler.
        if gpu and (lines := waits_that_torch_names(fn)):
            raise RuntimeError(f"fn must not wait for the GPU, got waits at {', '.join(lines)}")
        if broken:
            raise RuntimeError(f"fail_on_wait cannot count the waits here: {broken}")
    return made


def check_no_waits(profile: StepProfile) -> None:
    """Raise RuntimeError, with kinds and lines, if a step waited or would wait on a GPU."""
    waits = "; ".join(f"{wait.count} x {wait.kind} in {wait.line}" for wait in profile.syncs)
    reads = "; ".join(f"{read.count} x {read.op} in {read.line}" for read in profile.host_reads)
    if profile.gpu and waits:
        raise RuntimeError(f"fn must not wait for the GPU, got in {profile.steps} steps: {waits}")
    if not profile.gpu and reads:
        raise RuntimeError(
            "fn must not read values of tensors, each of which would wait on a GPU, got in "
            f"{profile.steps} steps: {reads}"
        )


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
    """Make the profile of a recorded trace; `log` has the lines of the calling thread.

    Args:
        gpu: name of the GPU.
    """
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
        attention=_attention(seen),
        tokens=tokens,
        notes=notes,
        timeline=_timeline(seen, window, gpu is not None),
    )


class _Places:
    """Finds the line that caused an event of a trace."""

    def __init__(self, trace: Trace, log: LineLog, thread: Any) -> None:
        self._trace, self._log, self._thread = trace, log, thread

    def __call__(self, span: Span) -> str:
        ops = self._trace.ops_around(span)
        at = self._at(span) if span.thread == self._thread else None
        nodes = [op for op in ops if op.is_backward]
        # No line of the user's ran since the node began, so autograd caused it.
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


def _attention(seen: Stretch) -> tuple[Work, ...]:
    """Sum the calls of each attention backend, under the names that C++ gives them."""
    calls = [
        replace(label, name=label.name.removeprefix(_ATTENTION))
        for label in seen.labels
        if label.name.startswith(_ATTENTION)
    ]
    # flex is a part of compiled code: nothing calls it, but its kernels have its name.
    flex = [replace(work, name="flex") for work in seen.work if "flex_attention" in work.name]
    return _by_name([*calls, *flex], longest=False)


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
    # Only if CUDA is in use: asking would create a context.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _notes(gpu: bool, log: LineLog, broken: str | None) -> tuple[str, ...]:
    notes = [] if broken is None else [broken]
    if not gpu:
        notes.append(
            "No GPU was in use, so nothing could wait for one. Each host read would wait, if its "
            "tensor were on a GPU; so would tolist(), .cpu() and .numpy(), which are not counted."
        )
    if not log.active:
        notes.append(
            "Another trace function was active (a debugger, coverage), so lines are unknown."
        )
    return tuple(notes)


# A layout; or total tokens, the offsets or mask that tell which are real, and the ids of a mask.
_Source = PackedLayout | tuple[int, str, Tensor, Tensor | None]


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
    """Return what tells a batch's real tokens; read early, since a step may modify its batch."""
    if isinstance(batch, PackedLayout):
        return batch
    if not isinstance(batch, Mapping):
        raise TypeError(f"{name} must be a mapping or a PackedLayout, got {type(batch).__name__}")
    packed, offsets = batch.get("packed"), batch.get("cu_seq_lens_q")
    mask, ids = (_of_samples(batch, *names) for names in _NAMES_OF_SAMPLES)
    if isinstance(packed, PackedLayout):
        return packed
    if isinstance(offsets, Tensor) and isinstance(ids, Tensor):
        check_tensor(offsets, "cu_seq_lens_q")
        if offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(f"cu_seq_lens_q must be [n_seqs + 1], got {shown(offsets)}")
        return ids.numel(), "cu_seq_lens_q", offsets, None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        check_tensor(mask, "attention_mask")
        if not isinstance(ids, Tensor) or ids.shape != mask.shape or ids.is_floating_point():
            ids = None
        return mask.numel(), "attention_mask", mask, ids
    raise ValueError(
        f"{name} must say which tokens are real, by packed, by cu_seq_lens_q with input_ids or by "
        "a 2-D attention_mask (or prompt_mask and completion_mask), got "
        f"{sorted(map(str, batch))}"
    )


def _of_samples(batch: Mapping[str, Any], name: str, prompt: str, completion: str) -> Any:
    """Return a value of samples, which TRL's GRPO and RLOO have in two parts."""
    parts = [batch.get(part) for part in (prompt, completion)]
    if name not in batch and all(isinstance(part, Tensor) and part.dim() == 2 for part in parts):
        return torch.cat(parts, 1)  # type: ignore[arg-type]
    return batch.get(name)


def _count_tokens(batches: list[_Source] | None) -> Tokens | None:
    if batches is None:
        return None
    in_memory = real = 0
    repeated: int | None = None
    for source in batches:
        if isinstance(source, PackedLayout):
            in_memory += source.total_tokens
            real += source.num_real_tokens
            continue
        total, name, values, ids = source
        in_memory += total
        own = int(values[-1] if name == "cu_seq_lens_q" else torch.count_nonzero(values))
        real += own
        if ids is not None and own > 0:
            rows = zip(ids.cpu(), values.cpu() != 0, strict=True)
            tree = PackedTree.from_sequences([row[keep].tolist() for row, keep in rows])
            repeated = (repeated or 0) + own - tree.layout.num_real_tokens
    return Tokens(in_memory, real, repeated)
