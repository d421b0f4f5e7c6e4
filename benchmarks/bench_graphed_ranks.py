"""Benchmark training steps in CUDA graphs on several GPUs, each with the whole model.

    python -m benchmarks graphed_ranks [--shapes 0.6b 1.7b] [--tokens 2048 8192] [--ranks 2]
        [--variants one graph plain ddp cp cp_plain sharded fsdp2 stock] [--steps N]

Starts a process for each GPU. Each step trains on a row of --tokens tokens for each rank:
documents of lognormal lengths, mean 350, of random tokens, new ones in each step. Weights,
gradients and AdamW are bf16; layers and the loss are compiled. Variants, one after the other:

- `one`: a `cuseq.GraphedStep` on one GPU, with one row, while the others idle;
- `graph`: a `cuseq.GraphedStep` on all ranks, gradients averaged in the graph;
- `plain`: the same steps without a graph;
- `ddp`: `cuseq.enable(model)` in PyTorch's DistributedDataParallel;
- `cp`: `graph` with one row of ranks x --tokens tokens, which all ranks share;
- `cp_plain`: the same steps without a graph;
- `sharded`: a `cuseq.GraphedStep` of the model sharded by FSDP2 in units of a layer;
- `fsdp2`: the same steps without a graph;
- `stock`: the same with transformers' flex attention, without cuseq.

"ms" is the time of a step on the device, from the end of one step to that of the next: the median,
of the slowest rank. "host" is the time until the call of a step returns, in further steps that
begin on an idle GPU. "kernels" is the time of a step in which a GPU runs anything, and "without
NCCL" that in which it runs anything else; both from a profile of three more steps, of the busiest
GPU. "scaling" is the tokens/s over those of `one`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import become_rank, default_ranks, run_ranks
from rank_models import SHAPES
from report import Report, Table, arguments, environment
from timer import WHOLE, Clock, synchronize
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from workload import documents, lognormal_lengths

import cuseq
from cuseq.debug.profile.trace import record, union
from cuseq.distributed import ContextParallel

MEAN_LENGTH = 350
WARMUP = 6  # steps before the first that counts; a GraphedStep has captured by then
PROFILED = 3
ALONE = 8  # steps on an idle GPU
VARIANTS = ("one", "graph", "plain", "ddp", "cp", "cp_plain", "sharded", "fsdp2", "stock")
CAPTURED = ("one", "graph", "cp", "sharded")
SHARED = ("cp", "cp_plain")
SHARDED = ("sharded", "fsdp2", "stock")
Batch = dict[str, Any]
Step = Callable[[Batch], object]


def batches(
    rank: int, tokens: int, config: Qwen3Config, variant: str, shared: dist.ProcessGroup, pin: bool
) -> Iterator[Batch]:
    """Yield a rank's rows, made before they are used; or its parts of rows of all ranks."""
    cp = None
    if variant in SHARED:
        heads = (config.num_attention_heads, config.num_key_value_heads)
        cp = ContextParallel(shared, heads=heads, head_dim=config.head_dim)
        tokens, rank = tokens * cp.size, 0
    collate = cuseq.PackingCollator(total_tokens=tokens, max_seqs=max(16, tokens // 64), cp=cp)
    for number in range(10**6):
        seed = 1000 * number + rank
        row = documents(lognormal_lengths(tokens, MEAN_LENGTH, seed), config.vocab_size, seed)
        batch = ContextParallel.model_inputs(collate([{"input_ids": one} for one in row]))
        if variant == "stock":
            del batch["packed"]  # transformers finds the documents where position_ids restart
        yield {k: v.pin_memory() if pin and hasattr(v, "to") else v for k, v in batch.items()}


def make_model(config: Qwen3Config, variant: str, device: torch.device) -> PreTrainedModel:
    """Return the model of a variant, the same on all ranks, with compiled layers."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if variant == "stock":
        model.set_attn_implementation("flex_attention")
    else:
        cuseq.enable(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    model.loss_function = torch.compile(model.loss_function, dynamic=False)
    if variant in SHARDED:
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    return model


def make_step(
    model: PreTrainedModel, variant: str, alone: dist.ProcessGroup, example: Batch
) -> Step:
    """Return a function that makes one step with a batch on the host."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)

    def loss_of(batch: Batch) -> torch.Tensor:
        return model(**batch, use_cache=False).loss

    if variant in (*CAPTURED, "plain", "cp_plain"):
        step = cuseq.GraphedStep(
            loss_of,
            optimizer,
            example,
            max_grad_norm=1.0,
            warmup=3 if variant in CAPTURED else 10**6,
            group=alone if variant == "one" else None,
            model=model,
        )
        return step
    called = DistributedDataParallel(model) if variant == "ddp" else model

    def plain(batch: Batch) -> None:
        given = {
            k: v.to(device, non_blocking=True) if hasattr(v, "to") else v for k, v in batch.items()
        }
        called(**given, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return plain


def measure(
    step: Step, rows: Iterator[Batch], steps: int, device: torch.device, hosts: dist.ProcessGroup
) -> dict[str, Any]:
    """Return what this rank's steps took; `hosts` is a gloo group of the ranks that take part."""
    begun = time.perf_counter()
    step(next(rows))
    synchronize(device)
    first = time.perf_counter() - begun
    for _ in range(1, WARMUP):
        step(next(rows))
    given = [next(rows) for _ in range(steps + ALONE + PROFILED)]
    synchronize(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock, until_return = Clock(device), []
    clock.mark()
    for batch in given[:steps]:
        step(batch)
        clock.mark()
    synchronize(device)
    for batch in given[steps : steps + ALONE]:
        synchronize(device)
        dist.barrier(hosts)
        begun = time.perf_counter()
        step(batch)
        until_return.append(1e3 * (time.perf_counter() - begun))
    found = {
        "first": first,
        "ms": 1e3 * statistics.median(clock.intervals()),
        "host": statistics.median(until_return),
        "peak": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        "captured": getattr(step, "captured", False),
        "reason": getattr(step, "reason", None),
    }
    if on_gpu:
        trace = record(lambda: [step(batch) for batch in given[steps + ALONE :]], gpu=True)
        work = trace.within(WHOLE).work
        own = [span for span in work if "nccl" not in span.name]
        found["kernels"] = busy_ms(work)
        found["own"] = busy_ms(own)
    return found


def busy_ms(work: list[Any]) -> float:
    """Return the milliseconds of a step in which any of the work ran."""
    return sum(end - start for start, end in union(work)) / 1e3 / PROFILED


def work(
    rank: int, port: int, folder: Path, name: str, tokens: int, args: argparse.Namespace
) -> None:
    """Measure the variants of a shape and a row length as one rank; rank 0 writes their rows."""
    become_rank(rank, args.ranks, port)
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    hosts = dist.new_group(backend="gloo")
    shared = dist.new_group()
    alone, _ = dist.new_subgroups(group_size=1, backend="gloo")
    config = Qwen3Config(**SHAPES[name].config, max_position_embeddings=2**18, use_cache=False)
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    for variant in args.variants:
        mine = None
        if variant != "one" or rank == 0:
            torch._dynamo.reset()
            model = make_model(config, variant, device)
            given = batches(rank, tokens, config, variant, shared, device.type != "cpu")
            step = make_step(model, variant, alone, next(given))
            mine = measure(step, given, args.steps, device, alone if variant == "one" else hosts)
            del model, step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        everyone: list[Any] = [None] * args.ranks
        dist.all_gather_object(everyone, mine)
        found = [one for one in everyone if one is not None]
        row = {"shape": name, "tokens": tokens, "variant": variant, "GPUs": len(found)}
        for key in ("ms", "host", "kernels", "own", "peak", "first"):
            values = [one.get(key) for one in found]
            row[key] = None if None in values else max(values)
        row["speed"] = 1e3 * tokens * len(found) / row["ms"]
        captured = [one["captured"] for one in found]
        row["graph"] = "yes" if all(captured) else found[captured.index(False)]["reason"]
        if variant not in CAPTURED:
            row["graph"] = "no"
        rows.append(row)
        if rank == 0:
            add_scaling(rows)
            (folder / "rows.json").write_text(json.dumps(rows))
            make_report(rows, args).write(args.out)
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def add_scaling(rows: list[dict[str, Any]]) -> None:
    """Add how many times as fast as `one` of the same shape and row length the last row is."""
    row = rows[-1]
    for one in rows:
        same = all(one[key] == row[key] for key in ("shape", "tokens"))
        if same and one["variant"] == "one":
            row["scaling"] = row["speed"] / one["speed"]


def make_report(rows: list[dict[str, Any]], args: argparse.Namespace) -> Report:
    columns = {
        "shape": "shape", "tokens": "tokens", "variant": "variant", "GPUs": "GPUs", "ms": "ms",
        "host": "host ms", "kernels": "kernels ms", "own": "without NCCL ms", "speed": "tokens/s",
        "scaling": "scaling", "peak": "GiB", "graph": "captured", "first": "first s",
    }  # fmt: skip
    report = Report("graphed_ranks", environment(args.device))
    report.notes.append(
        f"A row for each of {args.ranks} ranks in a step, documents' lengths lognormal of mean "
        f"{MEAN_LENGTH}; {args.steps} steps timed."
    )
    report.tables.append(Table("Training steps", columns, rows))
    return report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models to train")
    parser.add_argument("--tokens", nargs="+", type=int, help="of a rank's row")
    parser.add_argument("--ranks", type=int, help="processes to start; default: GPUs, or 2")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=16, help="that are timed")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.ranks = args.ranks or default_ranks()
    args.shapes = args.shapes or (["0.6b", "1.7b"] if on_gpu else ["tiny"])
    args.tokens = args.tokens or ([2048, 8192] if on_gpu else [256])
    # Flex attention has no gradients on a CPU.
    args.variants = args.variants or (VARIANTS if on_gpu else VARIANTS[:-1])
    with tempfile.TemporaryDirectory(prefix="cuseq-graphed-ranks-") as scratch:
        (Path(scratch) / "rows.json").write_text("[]")
        for name in args.shapes:
            for tokens in args.tokens:
                run_ranks(work, args.ranks, Path(scratch), name, tokens, args)


if __name__ == "__main__":
    main()
