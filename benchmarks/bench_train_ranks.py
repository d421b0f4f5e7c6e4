"""Benchmark training on several GPUs: the loop of examples/fsdp2.py.

    python -m benchmarks train_ranks [--shapes 0.6b 1.7b 8b] [--ranks 2] [--cp 2 ...]
        [--variants one dp cp stock] [--row-length 8192] [--steps N] [--recompute 8b]

Starts a process for each GPU, anew for each variant, as a run of training has them; on the CPU
these are small models over gloo. Each step trains on a row of --row-length tokens for each rank:
documents of lognormal lengths, mean 350, of random tokens. Layers and loss are compiled. Forward
and backward are bf16; weights, gradients and AdamW are fp32. Variants:

- `one`: the model unsharded on one GPU while the others idle, which takes all rows of a step in
  turn: bf16 copies of the weights, made once a step, and gradients added up in fp32;
- `dp`: FSDP2, a row for each rank, balanced by the attention of their documents;
- `cp`: FSDP2, as many ranks as --cp says share a row as long as theirs together, once for each
  number given; by default all ranks share one;
- `stock`: as `dp`, but transformers' flex attention, and rows in the documents' order.

All but `stock` pack the same documents into rows, each step into others; `stock` takes them in
the order in which they fill its rows exactly. The time of a step is that on the device, from the
end of one step to that of the next, with waits for data; tokens/s counts no padding and is of all
ranks. Figures are medians over the steps, those of the slowest rank; memory is the peak of the
fullest rank while it trains. "balance" is the query-key pairs of the slowest rank over the mean.
"stolen" is the share of this machine's busy time that a hypervisor gave to others: the host of a
virtual machine then launches its kernels late, and "least", the fastest step, tells what the GPUs
can do. "first" is the first step, with what it compiles; a later variant finds some of that in the
compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
import torch.distributed as dist
from processes import become_rank, default_ranks, run_ranks
from rank_models import SHAPES, Flops, Unsharded, peak_flops
from report import ROOT, Report, Table, arguments, environment
from timer import Clock, synchronize
from transformers import AutoModelForCausalLM, Qwen3Config
from workload import lognormal_lengths

import cuseq

sys.path.insert(0, str(ROOT / "examples"))
import fsdp2  # noqa: E402
from _ranks import KIND, context_parallel, join_ranks, make_mesh  # noqa: E402

WARMUP = 4  # steps before the first that counts
STEPS = 300  # in the documents of an epoch, more than a variant makes
MEAN_LENGTH = 350
ROWS = "rows.json"  # what the variants so far gave


def busy_and_stolen() -> np.ndarray | None:
    """Return this machine's time so far, of all cores: busy or stolen, and stolen by a hypervisor.

    In ticks; None where the kernel does not say.
    """
    counters = Path("/proc/stat")
    if not counters.exists():
        return None
    user, nice, system, _, _, *interrupts, stolen = map(
        int, counters.read_text().splitlines()[0].split()[1:9]
    )
    return np.array([user + nice + system + sum(interrupts) + stolen, stolen])


class Bench:
    """One rank's side of the measurement of a variant.

    Args:
        name: of the shape.
        variant: of the table.
        cp: ranks that share a row.
        documents: with columns `input_ids` and `length`.
        args: of the benchmark.
    """

    def __init__(
        self,
        name: str,
        variant: str,
        cp: int,
        documents: datasets.Dataset,
        args: argparse.Namespace,
    ):
        self.name, self.variant, self.cp = name, variant, cp
        self.documents, self.args, self.shape = documents, args, SHAPES[name]
        self.steps = args.steps or self.shape.steps
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def measure(self) -> dict[str, Any]:
        """Return the variant's row of the table, the same on all ranks."""
        alone, _ = dist.new_subgroups(group_size=1)
        mine: dict[str, Any] | None = None
        if self.variant != "one" or self.rank == 0:
            mine = self.run(alone)
        everyone: list[Any] = [None] * self.ranks
        # The others wait here for the first one if it runs alone.
        dist.all_gather_object(everyone, mine)
        return self.summary([one for one in everyone if one is not None])

    def run(self, alone: Any) -> dict[str, Any]:
        """Make the steps of the variant on this rank; `alone` is a group of it."""
        torch.manual_seed(0)
        config = Qwen3Config(**self.shape.config, max_position_embeddings=2**18, use_cache=False)
        with torch.device(KIND):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if self.variant == "stock":
            model.set_attn_implementation("flex_attention")
        else:
            cuseq.enable(model)
        if self.name in self.args.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        flops, weights = Flops(model), model
        if self.variant == "one":
            for layer in model.model.layers:
                layer.compile(fullgraph=True, dynamic=False)
            model.loss_function = torch.compile(model.loss_function, dynamic=False)
            weights = Unsharded(model, torch.bfloat16 if KIND == "cuda" else torch.float32)
        else:
            fsdp2.shard(model, compile_layers=True)
        optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-5, fused=KIND == "cuda")
        averaged = 1 if self.variant == "one" else self.ranks
        step = partial(fsdp2.make_step, weights, optimizer, ranks=averaged)
        without_others = nullcontext()
        if self.variant == "one":
            optimizer.register_step_post_hook(weights.copy_weights)
            count = cuseq.distributed.ContextParallel.num_items
            without_others = mock.patch.multiple(
                cuseq.distributed.ContextParallel, num_items=partial(count, group=alone)
            )
        with without_others:
            timed = self.timed(step, self.batches(config))
        whole = self.args.row_length * self.ranks
        return {"flops_per_step": flops.per_token * whole, "flops_per_pair": flops.per_pair} | timed

    def batches(self, config: Qwen3Config) -> Iterator[list[dict[str, Any]]]:
        """Yield the batches of each step."""
        if self.variant == "stock":
            yield from self.rows_in_order()
            return
        options = argparse.Namespace(
            accumulation=1, row_length=self.args.row_length * self.cp, seed=0
        )
        if self.variant == "one":
            options.accumulation = self.ranks
            yield from fsdp2.Rows(self.documents, options, rank=0, ranks=1, cp=None)
            return
        mesh = make_mesh(self.cp, options.row_length)
        dp, cp = mesh["dp"], context_parallel(mesh, config)
        yield from fsdp2.Rows(self.documents, options, dp.get_local_rank(), dp.size(), cp)

    def rows_in_order(self) -> Iterator[list[dict[str, Any]]]:
        """Yield rows of documents in order, without layouts; made before the steps."""
        number = (np.cumsum(self.documents["length"]) - 1) // self.args.row_length
        collate = cuseq.PackingCollator(total_tokens=self.args.row_length)
        rows = []
        for step in range(WARMUP + self.steps):
            (mine,) = np.nonzero(number == step * self.ranks + self.rank)
            batch = collate([{"input_ids": self.documents[int(i)]["input_ids"]} for i in mine])
            del batch["packed"]  # transformers finds the documents where position_ids restart
            if KIND == "cuda":
                batch = {k: v.pin_memory() if torch.is_tensor(v) else v for k, v in batch.items()}
            rows.append([batch])
        yield from rows

    def timed(self, step: Any, batches: Iterator[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return what this rank's steps took and were given."""
        device = torch.device(KIND)
        first = next(batches)
        begun = time.perf_counter()
        step(first)
        synchronize(device)
        first_s = time.perf_counter() - begun
        for _ in range(1, WARMUP):
            step(next(batches))
        synchronize(device)
        if KIND == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock, losses, counts, stolen = Clock(device), [], [], None
        before = busy_and_stolen()
        clock.mark()
        for _ in range(self.steps):
            given = next(batches)
            counts.append(np.sum([tokens_and_pairs(batch) for batch in given], axis=0))
            losses.append(step(given))
            clock.mark()
        synchronize(device)
        if before is not None:
            busy, taken = busy_and_stolen() - before
            stolen = 100 * float(taken / max(1, busy))
        peak = torch.cuda.max_memory_allocated() / 2**30 if KIND == "cuda" else None
        return {
            "first": first_s,
            "stolen": stolen,
            "seconds": clock.intervals(),
            "loss": float(losses[-1]),
            "counts": np.array(counts),
            "peak": peak,
        }

    def summary(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the variant's row, from what its ranks found."""
        # [steps] each, of all ranks.
        seconds = np.max([one["seconds"] for one in found], axis=0)
        tokens, pairs = np.moveaxis([one["counts"] for one in found], 2, 0)
        peak, mfu = peak_flops(), None
        if peak is not None:
            pair_flops = found[0]["flops_per_pair"] * pairs.sum(0)
            flops = found[0]["flops_per_step"] + pair_flops
            mfu = float(np.median(flops / seconds)) / (peak * len(found))
        return {
            "shape": self.name,
            "variant": self.variant,
            "ranks": len(found),
            "cp": self.cp,
            "ms": float(np.median(seconds)) * 1e3,
            "least": float(min(seconds)) * 1e3,
            "most": float(max(seconds)) * 1e3,
            "speed": float(np.median(tokens.sum(0) / seconds)),
            "mfu": mfu,
            "balance": float(np.median(pairs.max(0) / pairs.mean(0))),
            "peak": None if found[0]["peak"] is None else max(one["peak"] for one in found),
            "stolen": found[0]["stolen"],
            "first": max(one["first"] for one in found),
            "loss": sum(one["loss"] for one in found),
        }


def tokens_and_pairs(batch: dict[str, Any]) -> tuple[int, int]:
    """Return a batch's tokens without padding, and its query-key pairs."""
    real = (
        batch["labels"][0] != -100 if "packed" not in batch else ~batch["packed"].moe_padding_mask
    )
    # A token sees all earlier tokens of its document, whichever rank holds them, and itself.
    pairs = ((batch["position_ids"][0] + 1) * real).sum()
    return int(real.sum()), int(pairs)


def make_documents(rows: int, row_length: int, vocab_size: int) -> datasets.Dataset:
    """Return documents that fill `rows` rows exactly, one row after the other."""
    lengths = [n for row in range(rows) for n in lognormal_lengths(row_length, MEAN_LENGTH, row)]
    tokens = np.random.default_rng(0).integers(0, vocab_size, rows * row_length)
    cut = np.split(tokens, np.cumsum(lengths)[:-1])
    return datasets.Dataset.from_dict({"input_ids": cut, "length": lengths})


def work(
    rank: int, port: int, folder: Path, name: str, variant: str, cp: int, args: argparse.Namespace
) -> None:
    """Measure a variant as one rank; rank 0 adds its row to `folder / ROWS`."""
    become_rank(rank, args.ranks, port)
    join_ranks()
    documents = datasets.load_from_disk(str(folder / "documents"))
    row = Bench(name, variant, cp, documents, args).measure()
    dist.destroy_process_group()
    if rank == 0:
        rows = [*json.loads((folder / ROWS).read_text()), row]
        add_scaling(rows)
        (folder / ROWS).write_text(json.dumps(rows))
        make_report(rows, args).write(args.out)


def add_scaling(rows: list[dict[str, Any]]) -> None:
    """Add how many times as fast as `one` of the same shape the last row is."""
    row = rows[-1]
    for one in rows[:-1]:
        if (one["shape"], one["variant"]) == (row["shape"], "one"):
            row["scaling"] = row["speed"] / one["speed"]


def make_report(rows: list[dict[str, Any]], args: argparse.Namespace) -> Report:
    columns = {
        "shape": "shape", "variant": "variant", "ranks": "GPUs", "cp": "of which share a row",
        "ms": "ms a step", "least": "least", "most": "most",
        "speed": "tokens/s", "mfu": "MFU", "scaling": "times one GPU", "balance": "balance",
        "peak": "peak GiB", "stolen": "stolen, %", "first": "first s", "loss": "last loss",
    }  # fmt: skip
    report = Report("train_ranks", environment(args.device))
    recomputed = ", ".join(args.recompute) or "none"
    report.notes.append(
        f"Rows of {args.row_length:,} tokens, one for each of {args.ranks} ranks in a step; layers "
        f"recomputed for: {recomputed}; documents' lengths lognormal of mean {MEAN_LENGTH}; each "
        "variant in processes of its own."
    )
    report.tables.append(Table("Training steps", columns, rows))
    return report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models to train")
    parser.add_argument("--ranks", type=int, help="processes to start; default: GPUs, or 2")
    parser.add_argument(
        "--cp", type=int, nargs="+", metavar="N", help="ranks that share a row of cp; default all"
    )
    parser.add_argument("--variants", nargs="+", choices=["one", "dp", "cp", "stock"])
    parser.add_argument("--steps", type=int, help="that are timed; default 16, of 8b 6")
    parser.add_argument("--row-length", type=int, help="tokens; default 8192, on the CPU 1024")
    parser.add_argument(
        "--recompute", nargs="*", choices=SHAPES, default=["8b"], metavar="SHAPE",
        help="models that recompute their layers in the backward; default 8b",
    )  # fmt: skip
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu != (KIND == "cuda"):
        parser.error(f"--device must be {KIND} here: hide the GPUs to measure on the CPU")
    if not on_gpu and "stock" in (args.variants or ()):
        parser.error("--variants stock needs a GPU: flex attention has no gradients on a CPU")
    args.ranks = args.ranks or default_ranks()
    args.cp = args.cp or [args.ranks]
    for cp in args.cp:
        if cp < 1 or args.ranks % cp != 0:
            parser.error(f"--cp must divide --ranks, {args.ranks}, got {cp}")
    args.shapes = args.shapes or (["0.6b", "1.7b", "8b"] if on_gpu else ["tiny"])
    args.row_length = args.row_length or (8192 if on_gpu else 1024)
    with tempfile.TemporaryDirectory(prefix="cuseq-train-ranks-") as scratch:
        folder = Path(scratch)
        vocab_size = min(SHAPES[name].config["vocab_size"] for name in args.shapes)
        documents = make_documents(STEPS * args.ranks, args.row_length, vocab_size)
        documents.save_to_disk(folder / "documents")
        (folder / ROWS).write_text("[]")
        for name in args.shapes:
            for variant in args.variants or SHAPES[name].variants:
                for cp in args.cp if variant == "cp" else [1]:
                    begun = time.perf_counter()
                    run_ranks(work, args.ranks, folder, name, variant, cp, args)
                    spent = time.perf_counter() - begun
                    print(f"{name}, {variant}: {spent:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
