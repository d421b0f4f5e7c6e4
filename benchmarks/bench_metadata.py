"""Benchmark the metadata of a packed row: once per forward with cuseq, in every layer elsewhere.

    python -m benchmarks metadata [--device cpu] [--layers 1 28 40] [--out FOLDER]

Three tables: the metadata of a whole forward (host time on an idle and on a busy GPU, kernels,
waits), each op against the equivalent PyTorch calls, and the kernels' bandwidth against that of a
copy. On the busy GPU a matrix product is queued before each layer's metadata, in place of the
model's layers, so that waits show as host time. Nothing else of the model runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import timer
import torch
from report import Report, Table, arguments, environment
from workload import lognormal_lengths

import cuseq
from cuseq.ops import cu_seqlens_from_position_ids

TOTAL_TOKENS = 8192
MEAN_LENGTH = 350
IDLE_REPEATS = 30
BUSY_REPEATS = 8

Tensor = torch.Tensor


@dataclass(frozen=True)
class Way:
    """One way to make the metadata of a forward, in four steps; the first is not timed.

    Attributes:
        name: name in the table.
        prepare: does the data loader's work beforehand; its result goes to `begin`.
        begin: runs once per forward; its result goes to each `layer`.
        layer: runs once per layer.
        end: runs once, after the last layer.
    """

    name: str
    prepare: Callable[[], Any]
    begin: Callable[[Any], Any]
    layer: Callable[[Any], Any]
    end: Callable[[Any], None] = lambda state: None


def offsets_by_cumsum(lengths: Tensor) -> tuple[Tensor, int]:
    """Return `cu_seqlens` and the longest length, as unsloth's packing helper makes them."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, dim=0, dtype=torch.int32, out=offsets[1:])
    return offsets, int(lengths.max().item())


def offsets_from_position_ids(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return the same from packed position ids `[1, T]`, as transformers does in every layer.

    It first tests whether the row is packed at all, then finds where positions restart, then the
    longest difference, as an int because the flash kernel's wrapper requires one.
    """
    device = position_ids.device
    unpacked = torch.arange(position_ids.shape[1], device=device) + position_ids.min()
    if not (unpacked - position_ids).abs().sum().bool():
        raise ValueError("position_ids must be packed")
    flat = position_ids.reshape(-1)
    starts = (flat == flat.min()).nonzero().view(-1).to(torch.int32)
    end = torch.tensor(flat.size(), dtype=torch.int32, device=device)
    offsets = torch.cat((starts, end))
    return offsets, int(offsets.diff().max().item())


def position_ids_by_repeat(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return restarting positions from device lengths without a wait; the row has no tail."""
    starts = lengths.cumsum(0) - lengths
    first = torch.repeat_interleave(starts, lengths, output_size=total_tokens)
    return torch.arange(total_tokens, device=lengths.device) - first


def seq_ids_by_repeat(lengths: Tensor, total_tokens: int) -> Tensor:
    """Return segment indices from device lengths without a wait; the row has no tail."""
    number = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
    return torch.repeat_interleave(number, lengths, output_size=total_tokens)


def ways(lengths: list[int], device: torch.device) -> list[Way]:
    """Return everything that the first table compares, on the same lengths."""
    total = sum(lengths)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    position_ids = position_ids_by_repeat(on_device, total).long()[None]
    pin = device.type == "cuda"

    def nothing() -> None:
        return None

    def host_handle() -> cuseq.PackedLayout:
        layout = cuseq.PackedLayout.from_lengths(lengths, total)
        return layout.pin_memory() if pin else layout

    def moved(layout: cuseq.PackedLayout) -> cuseq.PackedLayout:
        return layout.to(device, non_blocking=True)

    def what_attention_reads(layout: cuseq.PackedLayout) -> tuple[Tensor, Tensor]:
        return layout.cu_seqlens_static, layout.host_meta

    def what_kernels_read(layout: cuseq.PackedLayout) -> tuple[Tensor, int]:
        return layout.cu_seqlens, layout.max_seqlen

    def scope(_: Any) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(cuseq.cache.forward_scope())
        return stack

    def cached_position_ids(_: Any) -> tuple[Tensor, Tensor]:
        offsets = cuseq.ops.cached_cu_seqlens(on_device)
        return offsets, cuseq.ops.cached_position_ids(on_device, total)

    return [
        Way(
            "cumsum, max().item() in every layer",
            nothing,
            lambda _: None,
            lambda _: offsets_by_cumsum(on_device),
        ),
        Way(
            "the same once, then a dict's hit",
            nothing,
            lambda _: {device: offsets_by_cumsum(on_device)},
            lambda cache: cache[device],
        ),
        Way(
            "from position ids in every layer (transformers' flash path)",
            nothing,
            lambda _: None,
            lambda _: offsets_from_position_ids(position_ids),
        ),
        Way(
            "cuseq, host lengths, handle built in the step",
            nothing,
            lambda _: moved(cuseq.PackedLayout.from_lengths(lengths, total)),
            what_attention_reads,
        ),
        Way(
            "cuseq, host lengths, handle from the collator",
            host_handle,
            moved,
            what_attention_reads,
        ),
        Way(
            "cuseq, device lengths, handle built in the step",
            nothing,
            lambda _: cuseq.PackedLayout.from_lengths(on_device, total),
            what_kernels_read,
        ),
        Way(
            "cuseq, device position ids, handle built in the step",
            nothing,
            lambda _: cuseq.PackedLayout.from_position_ids(position_ids),
            what_kernels_read,
        ),
        Way(
            "cuseq, cached_cu_seqlens in every layer",
            nothing,
            scope,
            lambda _: cuseq.ops.cached_cu_seqlens(on_device),
            lambda stack: stack.close(),
        ),
        Way(
            "cuseq, cached_cu_seqlens and cached_position_ids in every layer",
            nothing,
            scope,
            cached_position_ids,
            lambda stack: stack.close(),
        ),
    ]


class BusyWork:
    """Matrix products that keep the GPU busy without the host; one stands for a layer."""

    def __init__(self, device: torch.device) -> None:
        self._a = torch.randn(4096, 8192, dtype=torch.bfloat16, device=device)
        self._b = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
        self._out = torch.empty(4096, 8192, dtype=torch.bfloat16, device=device)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


def forward_host_us(way: Way, layers: int, work: Callable[[], None] | None) -> float:
    """Return host time of one forward's metadata in us, without the time to queue `work`."""
    state = way.prepare()
    if work is not None:
        work()
    begun = time.perf_counter_ns()
    state = way.begin(state)
    spent = time.perf_counter_ns() - begun
    for _ in range(layers):
        if work is not None:
            work()
        begun = time.perf_counter_ns()
        way.layer(state)
        spent += time.perf_counter_ns() - begun
    begun = time.perf_counter_ns()
    way.end(state)
    return (spent + time.perf_counter_ns() - begun) / 1e3


def host_timing(
    way: Way, layers: int, device: torch.device, work: Callable[[], None] | None
) -> timer.Timing:
    """Time `forward_host_us` over many forwards, each from an idle device."""
    samples = []
    for _ in range(3):
        forward_host_us(way, layers, work)
    for _ in range(IDLE_REPEATS if work is None else BUSY_REPEATS):
        timer.synchronize(device)
        samples.append(forward_host_us(way, layers, work))
    timer.synchronize(device)
    return timer.Timing.of(samples)


def forward_activity(way: Way, layers: int, device: torch.device) -> timer.Activity:
    """Return the device activity of one forward's metadata, without the loader's part."""
    prepared = way.prepare()

    def forward() -> None:
        state = way.begin(prepared)
        for _ in range(layers):
            way.layer(state)
        way.end(state)

    return timer.profile(forward, device=device).within(timer.WHOLE)


def op_pairs(lengths: list[int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return each op followed by the equivalent PyTorch calls."""
    total = sum(lengths)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    position_ids = position_ids_by_repeat(on_device, total).long()[None]
    width = max(lengths)
    mask = torch.arange(width, device=device)[None] < on_device[:, None]
    return {
        "cuseq.ops.cu_seqlens": lambda: cuseq.ops.cu_seqlens(on_device),
        "PyTorch: cumsum behind a zero": lambda: torch.nn.functional.pad(
            on_device.cumsum(0, dtype=torch.int32), (1, 0)
        ),
        "cuseq.ops.max_seqlen": lambda: cuseq.ops.max_seqlen(on_device),
        "cuseq.ops.max_seqlen_sync": lambda: cuseq.ops.max_seqlen_sync(on_device),
        "PyTorch: max().item()": lambda: on_device.max().item(),
        "cuseq.ops.last_token_indices": lambda: cuseq.ops.last_token_indices(on_device),
        "cuseq.ops.position_ids": lambda: cuseq.ops.position_ids(on_device, total),
        "PyTorch: arange minus repeated starts": lambda: position_ids_by_repeat(on_device, total),
        "cuseq.ops.seq_ids": lambda: cuseq.ops.seq_ids(on_device, total),
        "PyTorch: repeat_interleave": lambda: seq_ids_by_repeat(on_device, total),
        "cuseq.ops.cu_seqlens_from_position_ids": lambda: cu_seqlens_from_position_ids(
            position_ids
        ),
        "PyTorch: nonzero, diff, max().item()": lambda: offsets_from_position_ids(position_ids),
        "cuseq.ops.lengths_from_padding_mask": lambda: cuseq.ops.lengths_from_padding_mask(mask),
        "PyTorch: mask.sum": lambda: mask.sum(-1, dtype=torch.int32),
    }


def bandwidth_rows(device: torch.device, sizes: list[int]) -> list[dict[str, Any]]:
    """Return device time of the ops that write a value per token, next to a copy of equal size."""
    rows = []
    for total in sizes:
        lengths = torch.tensor(
            lognormal_lengths(total, MEAN_LENGTH, seed=1), dtype=torch.int32, device=device
        )
        position_ids = cuseq.ops.position_ids(lengths, total)[None]
        # A copy of half the tokens, read and written, moves the bytes of one int32 per token.
        source = torch.randint(1000, (total // 2,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {
            "copy of the same bytes": lambda: target.copy_(source),
            "cuseq.ops.position_ids": lambda: cuseq.ops.position_ids(lengths, total),
            "cuseq.ops.seq_ids": lambda: cuseq.ops.seq_ids(lengths, total),
            "cuseq.ops.cu_seqlens_from_position_ids": lambda: cu_seqlens_from_position_ids(
                position_ids, max_seqs=lengths.numel()
            ),
        }
        for name, call in calls.items():
            timing = timer.graph_time(call)
            gbs = 4 * total / timing.median / 1e3
            rows.append({"tokens": total, "what": name, "device_us": timing.median, "gbs": gbs})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 28, 40])
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    lengths = lognormal_lengths(args.tokens, MEAN_LENGTH, seed=0)
    compared = ways(lengths, device)
    pairs = op_pairs(lengths, device)
    report = Report("metadata", environment(args.device))
    report.notes.append(f"{len(lengths)} lengths, {args.tokens:,} tokens, mean {MEAN_LENGTH}.")

    # Host times come first and the profiler last, since it may slow later launches.
    forwards: list[dict[str, Any]] = []
    work = BusyWork(device) if on_gpu else None
    if work is not None:
        product = timer.device_time(work, device=device).median
        report.notes.append(f"The matrix product queued before each layer takes {product:,.0f} us.")
    for layers in args.layers:
        for way in compared:
            idle = host_timing(way, layers, device, None)
            busy = host_timing(way, layers, device, work) if work else None
            forwards.append(
                {
                    "layers": layers,
                    "way": way.name,
                    "idle_us": idle.median,
                    "idle_p90_us": idle.high,
                    "busy_us": busy.median if busy else None,
                }
            )
    singles = [
        {"op": name, "host_us": timer.host_time(call, device=device).median}
        for name, call in pairs.items()
    ]
    bandwidths = bandwidth_rows(device, [args.tokens, 131_072, 1_048_576]) if on_gpu else []

    if on_gpu:
        if note := timer.check_profiler(device):
            report.notes.append(note)
        names = {way.name: way for way in compared}
        for line in forwards:
            seen = forward_activity(names[line["way"]], line["layers"], device)
            line |= seen.as_dict()
        for line in singles:
            line |= timer.profile(pairs[line["op"]], device=device).within(timer.WHOLE).as_dict()

    headings = {"layers": "layers", "way": "way", "idle_us": "host us, idle", "idle_p90_us": "p90"}
    counted = {
        "device_us": "device us",
        "kernels": "kernels",
        "syncs": "stream waits",
        "event_waits": "event waits",
        "dtoh_copies": "copies to host",
    }
    if on_gpu:
        headings |= {"busy_us": "host us, busy"} | counted
    report.tables.append(Table("Metadata of one forward", headings, forwards))
    headings = {"op": "op", "host_us": "host us"} | (counted if on_gpu else {})
    report.tables.append(Table("One op, host time on an idle device", headings, singles))
    if on_gpu:
        headings = {
            "tokens": "tokens",
            "what": "int32 per token",
            "device_us": "device us (graph)",
            "gbs": "GB/s",
        }
        report.tables.append(Table("Kernels, L2 warm", headings, bandwidths))
    report.write(args.out)


if __name__ == "__main__":
    main()
