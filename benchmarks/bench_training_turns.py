"""Compare training steps of stock attention, flex attention and cuseq's backends in one process.

    python -m benchmarks training_turns [--tokens T ...] [--documents N] [--compiled layers|model]
        [--max-seqs N] [--busy-core] [--warm]

Qwen3-0.6B's shape, full fine-tuning. Every variant has a model and an optimizer of its own. They
take turns step by step, on the same packs, so that a host or a clock that is slow for a while slows
all of them alike (`bench_training_step` runs each variant in its own process). Variants:

- `stock`: transformers' sdpa with the mask that it makes of the position ids, never compiled;
- `flex`: transformers' flex attention, with the mask that transformers makes of the position ids,
  which breaks the graph of a compiled model;
- `flex_block_mask`: flex attention over cuseq's `packed.block_mask()`;
- `flex_flash`: the same with `kernel_options={"BACKEND": "FLASH"}`, which needs FlashAttention 4;
- `auto`, `flash`, `cudnn`, `fa4`, `enabled_flex`: `cuseq.enable(model, backend=...)`;
- `auto_graphed`: the same in a `cuseq.GraphedStep`, for rows of at most --max-seqs sequences;
- `flex_graphed`: flex attention captured the same way, over `packed.block_mask()` of the graph.

"GiB" is what a variant reserves: weights, AdamW's averages, the activations of a step, and the pool
of a graph. A first step compiles for up to a minute. With --warm all variants of a row length do so
at once before, in processes of their own: the steps find what these leave in the compiler's cache
on disk.

"host" is the time until the step returns, of which the device need not have done anything yet;
"launch" is the part of it in CUDA's launch of the graph. "kernels" is the sum of the times of the
kernels, copies and fills of one more step, as the profiler counts them; only graphs are profiled.
With --busy-core the timed steps share one core with another process.

The models of stock and flex come from a copy of transformers' modeling module, which
`cuseq.enable` does not change. "first" is the first step of a variant, with what it compiles. A
variant whose first step fails is left out, and the ratios are to the first variant that runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import timer
import torch
from bench_training_step import (
    ENABLED,
    LONG_ROW,
    MEAN_LENGTH,
    MODELS,
    MicroBatch,
    Variant,
    compile_parts,
    loss_of,
    packed_batch,
    to_device,
    train_step,
)
from report import Report, Table, arguments, environment
from workload import documents, has_flash_attention_4, lognormal_lengths

import cuseq
from cuseq.attention import choice, packages

FLEX = Variant("flex", "flex_attention", "packed")
STOCK = Variant("stock", "sdpa", "packed")
FLEX_FLASH = replace(FLEX, name="flex_flash", lengths="host", block_mask=True)
VARIANTS = {
    variant.name: variant
    for variant in (
        FLEX,
        STOCK,
        replace(FLEX, name="flex_block_mask", lengths="host", block_mask=True),
        FLEX_FLASH,
        replace(ENABLED, name="auto"),
        replace(ENABLED, name="flash", backend="flash"),
        replace(ENABLED, name="cudnn", backend="cudnn"),
        replace(ENABLED, name="fa4", backend="fa4"),
        replace(ENABLED, name="enabled_flex", backend="flex"),
        replace(ENABLED, name="auto_graphed"),
        replace(FLEX, name="flex_graphed", lengths="host", block_mask=True),
    )
}
GRAPHED = ("auto_graphed", "flex_graphed")
CAPTURED_IN = 4  # calls of a GraphedStep, the last of which captures
# Each process compiles in a few processes more.
WARM_THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}


@dataclass
class Runner:
    """A variant with its model and optimizer, and the times of its steps in milliseconds."""

    variant: Variant
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    graph: cuseq.GraphedStep | None = None
    first_s: float = 0.0
    gib: float = 0.0
    steps: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)

    def step(self, batches: list[MicroBatch], device: torch.device) -> tuple[float, float]:
        """Run one step; return its wall time and that of the host alone, in milliseconds."""
        timer.synchronize(device)
        begun = time.perf_counter()
        if self.variant.name in GRAPHED:
            self.run_graphed(batches)
        else:
            train_step(self.model, self.optimizer, batches, device)
        host = time.perf_counter() - begun
        timer.synchronize(device)
        return (time.perf_counter() - begun) * 1e3, host * 1e3

    def run_graphed(self, batches: list[MicroBatch]) -> None:
        """Run the whole step in its graph, which the first call makes."""
        (batch,) = batches
        if self.graph is None:
            self.graph = cuseq.GraphedStep(self.loss, self.optimizer, batch.inputs)
        with timed_launches(self.launches):
            self.graph(batch.inputs)

    def kernels_ms(self, batches: list[MicroBatch], device: torch.device) -> float:
        """Return the sum of the times of a step's work on the device, in milliseconds."""
        step = timer.profile(lambda: self.step(batches, device), device=device)
        return step.within(timer.WHOLE).device_us / 1e3

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a row on the device, for a graph."""
        batch = MicroBatch(inputs, 1.0, self.variant.block_mask)
        return loss_of(self.model, to_device(batch, inputs["input_ids"].device))


@contextmanager
def timed_launches(milliseconds: list[float]) -> Iterator[None]:
    """Append the host's time of each launch of a CUDA graph."""
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begun = time.perf_counter()
        replay(graph)
        milliseconds.append((time.perf_counter() - begun) * 1e3)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed):
        yield


def copied_modeling() -> ModuleType:
    """Return a second copy of transformers' Qwen3 code, for models that cuseq does not enable."""
    original = "transformers.models.qwen3.modeling_qwen3"
    found = importlib.util.find_spec(original)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{original}_copy", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_runner(
    variant: Variant, code: ModuleType, tokens: int, compiled: str, device: torch.device
) -> Runner:
    """Make the model of a variant, with equal random weights for all."""
    import transformers

    config = transformers.Qwen3Config(**MODELS["0.6b"].shape)
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": variant.attention}
    with torch.device(device):
        if variant.enabled:
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
            cuseq.enable(model, backend=variant.backend)
        else:
            model = code.Qwen3ForCausalLM._from_config(config, **options)
    model.train()
    if variant is not STOCK:
        compile_parts(model, compiled, tokens, fullgraph=variant is not FLEX)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return Runner(variant, model, optimizer)


def packs(tokens: int, count: int | None, vocab_size: int):
    """Yield the documents of one pack after the other."""
    for seed in itertools.count():
        if count is None:
            lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed)
        else:
            lengths = [tokens // count] * (count - 1)
            lengths.append(tokens - sum(lengths))
        yield documents(lengths, vocab_size, seed)


def prepared(
    variant: Variant, docs: list[list[int]], tokens: int, max_seqs: int
) -> list[MicroBatch]:
    """Return what a data loader would pass to the step, in pinned memory."""
    room = max_seqs if variant.name in GRAPHED else None
    options = {"kernel_options": KernelOptions(BACKEND="FLASH")} if variant is FLEX_FLASH else {}
    return [
        replace(batch, inputs={name: x.pin_memory() for name, x in batch.inputs.items()} | options)
        for batch in packed_batch(variant, docs, tokens, room)
    ]


class KernelOptions(dict):
    """Options of flex attention's kernels, which go to the device with a batch as they are."""

    def to(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict(self)


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep all threads of this process on one core, which another process keeps busy."""
    cores = os.sched_getaffinity(0)
    core = {min(cores)}

    def pin(to: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), to)

    pin(core)
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the core
    try:
        yield
    finally:
        rival.kill()
        rival.wait()
        pin(cores)


def measure(tokens: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    code = copied_modeling()
    stream = packs(tokens, args.documents, MODELS["0.6b"].shape["vocab_size"])
    runners = []
    for name in args.variants:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        runner = make_runner(VARIANTS[name], code, tokens, args.compiled, device)
        batches = prepared(runner.variant, next(stream), tokens, args.max_seqs)
        try:
            runner.first_s = runner.step(batches, device)[0] / 1e3
            for _ in range(CAPTURED_IN - 1 if name in GRAPHED else 0):
                runner.step(batches, device)
        except Exception as failure:  # the code of peers may not compile as one graph
            why = str(failure).splitlines()[:1]
            print(f"{tokens:,} tokens, {name}: {why}", file=sys.stderr, flush=True)
            continue
        runner.gib = (torch.cuda.memory_reserved() - before) / 2**30
        print(f"{tokens:,} tokens, {name}: first step {runner.first_s:.1f} s", flush=True)
        runners.append(runner)

    if not runners:
        return []

    def take_turns(turns: int) -> None:
        for turn in range(turns):
            docs = next(stream)
            first = turn % len(runners)
            for runner in runners[first:] + runners[:first]:
                batches = prepared(runner.variant, docs, tokens, args.max_seqs)
                taken, host = runner.step(batches, device)
                runner.steps.append(taken)
                runner.hosts.append(host)

    take_turns(args.warmup)
    for runner in runners:
        for times in (runner.steps, runner.hosts, runner.launches):
            times.clear()
    with busy_core() if args.busy_core else nullcontext():
        take_turns(args.steps)
    rows = []
    for runner in runners:
        if runner.graph is not None and not runner.graph.captured:
            print(f"{tokens:,} tokens, {runner.variant.name}: {runner.graph.reason}", flush=True)
        ratios = [a / b for a, b in zip(runners[0].steps, runner.steps, strict=True)]
        row = {
            "tokens": tokens, "documents": args.documents, "variant": runner.variant.name,
            "step": statistics.median(runner.steps), "least": min(runner.steps),
            "most": max(runner.steps), "host": statistics.median(runner.hosts),
            "times": statistics.median(ratios), "gib": runner.gib, "first_s": runner.first_s,
        }  # fmt: skip
        if runner.launches:
            row["launch"] = statistics.median(runner.launches)
        print(f"{tokens:,} tokens, {row['variant']}: {row['step']:.1f} ms, {row['times']:.3f}")
        rows.append(row)
    docs = next(stream)
    timer.check_profiler(device)
    for runner, row in zip(runners, rows, strict=True):  # last, as a profile slows later launches
        if runner.graph is not None and runner.graph.captured:
            batches = prepared(runner.variant, docs, tokens, args.max_seqs)
            row["kernels"] = runner.kernels_ms(batches, device)
    return rows


def warm(tokens: int, args: argparse.Namespace) -> None:
    """Run a few steps of every variant in processes of their own, all at once."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name in args.variants:
                if VARIANTS[name] is STOCK:
                    continue
                shape = ["--tokens", str(tokens), "--compiled", args.compiled, "--variants", name]
                room = ["--max-seqs", str(args.max_seqs)]
                steps = ["--warmup", "1", "--steps", "1"]
                command = [sys.executable, __file__, *shape, *room, *steps, "--out", scratch]
                running[name] = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, env=os.environ | WARM_THREADS
                )
            for name, process in running.items():
                if process.wait() != 0:
                    print(f"{tokens:,} tokens, {name}: not warm, exit status {process.returncode}")
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--documents", type=int, help="of equal length; default lognormal lengths")
    parser.add_argument("--compiled", choices=["layers", "model"], default="model")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--max-seqs", type=int, default=128, help="of a graph's rows; default 128")
    parser.add_argument("--busy-core", action="store_true", help="share one core while timing")
    parser.add_argument("--warm", action="store_true", help="compile all variants at once before")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cuda":
        parser.error("flex attention has no gradients on a CPU: it needs a GPU")
    if args.variants is None:
        choice.load_backends()
        here = {"fa4": has_flash_attention_4(), "cudnn": packages.is_usable("cudnn")}
        args.variants = [name for name in VARIANTS if here.get(name, True)]
    if max(args.tokens) >= LONG_ROW:  # their loss is computed in parts
        args.variants = [name for name in args.variants if name not in GRAPHED]
    rows = []
    for tokens in args.tokens:
        if args.warm:
            begun = time.perf_counter()
            warm(tokens, args)
            print(f"{tokens:,} tokens: warm after {time.perf_counter() - begun:.0f} s", flush=True)
        torch._dynamo.reset()
        rows += measure(tokens, args, device)
        torch.cuda.empty_cache()
    if not rows:
        sys.exit("no variant ran")

    report = Report("training_turns", environment(args.device))
    report.notes.append(
        f"{MODELS['0.6b'].describe}, {args.compiled} compiled but for stock, variants taking turns"
        f"{' on one core with another process' if args.busy_core else ''}; at most "
        f"{args.max_seqs} sequences in a graph's row; 'times' is the median of a turn's ratio to "
        "the first variant."
    )
    columns = {
        "tokens": "tokens", "documents": "documents", "variant": "variant", "step": "step ms",
        "least": "least", "most": "most", "host": "host ms", "launch": "launch ms",
        "kernels": "kernels ms", "times": "times", "gib": "GiB", "first_s": "first s",
    }  # fmt: skip
    report.tables.append(Table("Steps in turns", columns, rows))
    report.write(args.out)


if __name__ == "__main__":
    main()
