"""Benchmark training on several GPUs: the job of examples/train.py under torchrun.

    python -m benchmarks train_ranks [--shapes 0.6b 1.7b 8b] [--ranks 2] [--cp 2 ...]
        [--variants one dp cp ddp ddp_cp stock] [--row-length 8192] [--steps N] [--saves N]
        [--recompute 8b]

Starts a process for each GPU, anew for each variant, as a run of training has them; on the CPU
these are small models over gloo. Each step trains on a row of --row-length tokens for each rank:
documents of lognormal lengths, mean 350, of random tokens. Layers and loss are compiled. Forward
and backward are bf16; weights, gradients and AdamW are fp32. Variants:

- `one`: the model unsharded on one GPU while the others idle, which takes all rows of a step in
  turn: bf16 copies of the weights, made once a step, and gradients added up in fp32;
- `dp`: FSDP2, a row for each rank, balanced by the attention of their documents;
- `cp`: FSDP2, as many ranks as --cp says share a row as long as theirs together, once for each
  number given; by default all ranks share one;
- `ddp`, `ddp_cp`: as `dp` and `cp`, but every rank has the whole model, under autocast, and DDP
  averages the gradients;
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

After `dp` it saves --saves checkpoints to TMPDIR, one after the other, while training goes on. A
checkpoint's cost is the time of its steps above that of as many others in the same loop, and of the
wait for the checkpoint if it takes longer than 100 steps. "s in its step" is the copy to the host,
during which no step runs; the first one also allocates. 8b saves none: 98 GB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from processes import default_ranks, run_ranks
from rank_models import SHAPES, Unsharded, use_flex_attention
from report import ROOT, Report, Table, arguments, environment
from timer import synchronize
from workload import lognormal_lengths

import cuseq

sys.path.insert(0, str(ROOT / "examples"))
import _sharding  # noqa: E402
from _checkpoint import Checkpoints  # noqa: E402
from _flops import Flops, peak_flops  # noqa: E402
from _mesh import Ranks, joined_ranks, make_ranks  # noqa: E402
from _model import ModelSource, compile_layers_and_loss, enable  # noqa: E402
from _rank_data import LENGTHS, TOKENS, Collate, RankRows, TokenStore  # noqa: E402
from _rank_training import Trained  # noqa: E402
from _ranks_options import parse_options  # noqa: E402
from transformers import PreTrainedModel, Qwen3Config  # noqa: E402

WARMUP = 4  # steps before the first that counts
EVERY = 100  # steps from one checkpoint to the next
STEPS = 300  # in the documents of an epoch, more than a variant makes
MEAN_LENGTH = 350
WHOLE = ("ddp", "ddp_cp")  # variants whose ranks hold whole models
SHARING = ("cp", "ddp_cp")  # variants whose ranks share rows
ROWS = "rows.json"  # what the variants so far gave


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
        ranks: this rank's place without context parallelism.
        alone: a group of this rank only.
        store: the documents.
        args: of the benchmark.
    """

    def __init__(
        self,
        name: str,
        variant: str,
        cp: int,
        ranks: Ranks,
        alone: Any,
        store: TokenStore,
        args: argparse.Namespace,
    ):
        self.name, self.variant = name, variant
        self.ranks, self.alone, self.store = ranks, alone, store
        self.row_length, self.cp = args.row_length, cp
        self.shape = SHAPES[name]
        self.steps = args.steps or self.shape.steps
        self.saves = self.shape.saves if args.saves is None else args.saves
        self.source = ModelSource(Qwen3Config(**self.shape.config, max_position_embeddings=2**18))
        given = ["--device", ranks.device.type, "--row-length", str(self.row_length)]
        given += ["--steps", str(STEPS), "--compile"]  # the steps shape the learning rate alone
        given += ["--recompute"] if name in args.recompute else []
        self.options = parse_options(None, given)

    def measure(self) -> dict[str, list[dict[str, Any]]]:
        """Return rows of the tables `steps` and `checkpoints`, the same on all ranks."""
        mine: dict[str, Any] | None = None
        if self.variant != "one" or self.ranks.is_first:
            mine = self.run()
        everyone: list[Any] = [None] * self.ranks.world_size
        # The others wait here for the first one if it runs alone.
        dist.all_gather_object(everyone, mine, group=self.ranks.host_group)
        found = [one for one in everyone if one is not None]
        row = self.summary(found)
        saves = [{"shape": self.name} | save for save in found[0]["saves"]]
        return {"steps": [row], "checkpoints": saves}

    def run(self) -> dict[str, Any]:
        """Make the steps of the variant on this rank."""
        ranks = self.ranks
        if self.variant == "one":
            ranks = replace(ranks, rank=0, world_size=1)
        elif self.cp > 1:
            ranks = make_ranks(ranks.device.type, 1, cp=self.cp)
        model, trained = self.model(ranks)
        whole = self.row_length * self.ranks.world_size
        flops = Flops(model)
        given = {"flops_per_step": flops.per_token * whole, "flops_per_pair": flops.per_pair}
        batches = self.batches(ranks)
        count = cuseq.distributed.ContextParallel.num_items
        counting = mock.patch.object(
            cuseq.distributed.ContextParallel, "num_items", partial(count, group=self.alone)
        )
        with counting if self.variant == "one" else nullcontext():
            timed = self.timed(trained, batches)
        saves = []
        if self.variant == "dp" and self.saves > 0:
            saves = self.checkpoints(trained, batches)
        batches.close()
        return {**given, **timed, "saves": saves}

    def model(self, ranks: Ranks) -> tuple[PreTrainedModel, Trained]:
        if self.variant == "one":
            dtype = torch.bfloat16 if self.options.precision == "bf16" else torch.float32
            model = self.source.build(ranks.device, self.options.seed, dtype=torch.float32)
            enable(model)
            compile_layers_and_loss(model)
            unsharded = Unsharded(model, dtype)
            trained = Trained(unsharded, ranks, self.options)
            trained.optimizer.register_step_post_hook(unsharded.copy_weights)
            return model, trained
        options = argparse.Namespace(**vars(self.options) | {"shard": self.variant not in WHOLE})
        prepare = use_flex_attention if self.variant == "stock" else enable
        with mock.patch.object(_sharding, "enable", prepare):
            model, _ = _sharding.make_model(self.source, ranks, options)
        return model, Trained(model, ranks, options)

    def batches(self, ranks: Ranks) -> Iterator[list[dict[str, Any]]]:
        """Yield the batches of each step."""
        if self.variant == "stock":
            yield from self.rows_in_order()
            return
        yield from RankRows(
            self.store,
            ranks,
            row_length=self.row_length * ranks.cp_size,
            accumulation=self.ranks.world_size if self.variant == "one" else 1,
            seed=self.options.seed,
            workers=self.options.workers,
            cp=ranks.context_parallel(self.source.config),
        )

    def rows_in_order(self) -> Iterator[list[dict[str, Any]]]:
        """Yield rows of documents in order, without layouts; made before the steps."""
        number = (np.cumsum(self.store.lengths) - 1) // self.row_length
        collate = Collate(self.row_length, None)
        rows = []
        for step in range(WARMUP + self.steps):
            (mine,) = np.nonzero(number == step * self.ranks.world_size + self.ranks.rank)
            batch = collate([self.store[index] for index in mine])
            del batch["packed"]  # transformers finds the documents where position_ids restart
            if self.ranks.device.type == "cuda":
                batch = {k: v.pin_memory() if torch.is_tensor(v) else v for k, v in batch.items()}
            rows.append([batch])
        yield from rows

    def timed(self, trained: Trained, batches: Iterator[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return what this rank's steps took and were given."""
        device = self.ranks.device
        first = next(batches)
        begun = time.perf_counter()
        trained.step(first, 0)
        synchronize(device)
        first_s = time.perf_counter() - begun
        for number in range(1, WARMUP):
            trained.step(next(batches), number)
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock, numbers, stolen = Clock(device), [], None
        before = busy_and_stolen()
        clock.mark()
        for number in range(WARMUP, WARMUP + self.steps):
            numbers.append(trained.step(next(batches), number))
            clock.mark()
        synchronize(device)
        if before is not None:
            busy, taken = busy_and_stolen() - before
            stolen = 100 * float(taken / max(1, busy))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        return {
            "first": first_s,
            "stolen": stolen,
            "seconds": clock.intervals(),
            "numbers": torch.stack(numbers).cpu().numpy(),
            "peak": peak,
        }

    def summary(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the variant's row, from what its ranks found."""
        # [steps] each, of all ranks.
        seconds = np.max([one["seconds"] for one in found], axis=0)
        losses, tokens, pairs = np.moveaxis([one["numbers"][:, :3] for one in found], 2, 0)
        peak, mfu = peak_flops(self.ranks.device, self.options.precision), None
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
            "loss": float(losses.sum(0)[-1]),
        }

    def checkpoints(
        self, trained: Trained, batches: Iterator[list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Save checkpoints while training goes on; return a row for each."""
        ranks, rows = self.ranks, []
        (folder,) = ranks.on_first(lambda: [tempfile.mkdtemp(dir=self.store.folder)])
        checkpoints = Checkpoints(Path(folder), ranks, keep=1)
        begun = self.together()
        self.steps_while(lambda: True, trained, batches, most=self.steps)
        step_s = (self.together() - begun) / self.steps
        for number in range(1, self.saves + 1):
            begun = self.together()
            checkpoints.save(trained.state_dict(), number, {})
            began_s = time.perf_counter() - begun
            steps = self.steps_while(lambda: checkpoints.is_saving, trained, batches, most=EVERY)
            if (error := checkpoints.wait()) is not None:
                raise RuntimeError(error)
            whole_s = self.together() - begun
            extra_s = whole_s - steps * step_s
            rows.append({
                "save": number, "began_s": began_s, "steps": steps, "whole_s": whole_s,
                "without": step_s * 1e3, "meanwhile": (whole_s - began_s) / steps * 1e3,
                "extra_s": extra_s, "share": 100 * extra_s / (EVERY * step_s),
            })  # fmt: skip
        ranks.on_first(lambda: shutil.rmtree(folder))
        return rows

    def together(self) -> float:
        """Wait for the device and for all ranks, and return the time."""
        synchronize(self.ranks.device)
        dist.barrier(group=self.ranks.host_group)
        return time.perf_counter()

    def steps_while(
        self,
        condition: Callable[[], bool],
        trained: Trained,
        batches: Iterator[list[dict[str, Any]]],
        most: int,
    ) -> int:
        """Train while rank 0 says so, for `most` steps at most; return how many were made."""
        for steps in range(1, most + 1):
            trained.step(next(batches), WARMUP + self.steps)
            goes_on = torch.tensor(condition())
            dist.broadcast(goes_on, 0, group=self.ranks.host_group)
            if not goes_on:
                return steps
        return most


def write_documents(folder: Path, rows: int, row_length: int, vocab_size: int) -> None:
    """Write a TokenStore whose documents fill `rows` rows exactly, one row after the other."""
    lengths = [n for row in range(rows) for n in lognormal_lengths(row_length, MEAN_LENGTH, row)]
    draw = np.random.default_rng(0)
    np.save(folder / LENGTHS, np.array(lengths))
    np.save(folder / TOKENS, draw.integers(0, vocab_size, rows * row_length, dtype=np.int32))


def work(
    rank: int, port: int, folder: Path, name: str, variant: str, cp: int, args: argparse.Namespace
) -> None:
    """Measure a variant as one rank; rank 0 adds its rows to `folder / ROWS`."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    with joined_ranks(args.device, 1, 1) as ranks:
        alone, _ = dist.new_subgroups(group_size=1)
        found = Bench(name, variant, cp, ranks, alone, TokenStore(folder), args).measure()
    if rank == 0:
        tables = json.loads((folder / ROWS).read_text())
        for table, rows in found.items():
            tables[table] += rows
        add_scaling(tables["steps"])
        (folder / ROWS).write_text(json.dumps(tables))
        make_report(tables, args).write(args.out)


def add_scaling(rows: list[dict[str, Any]]) -> None:
    """Add how many times as fast as `one` of the same shape the last row is."""
    row = rows[-1]
    for one in rows[:-1]:
        if (one["shape"], one["variant"]) == (row["shape"], "one"):
            row["scaling"] = row["speed"] / one["speed"]


def make_report(tables: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> Report:
    steps = {
        "shape": "shape", "variant": "variant", "ranks": "GPUs", "cp": "of which share a row",
        "ms": "ms a step", "least": "least", "most": "most",
        "speed": "tokens/s", "mfu": "MFU", "scaling": "times one GPU", "balance": "balance",
        "peak": "peak GiB", "stolen": "stolen, %", "first": "first s", "loss": "last loss",
    }  # fmt: skip
    saving = {
        "shape": "shape", "save": "checkpoint", "began_s": "s in its step",
        "steps": "steps until its end",
        "whole_s": "s until its end", "without": "ms a step without",
        "meanwhile": "ms a step meanwhile", "extra_s": "s above other steps",
        "share": f"% of {EVERY} steps",
    }  # fmt: skip
    report = Report("train_ranks", environment(args.device))
    recomputed = ", ".join(args.recompute) or "none"
    report.notes.append(
        f"Rows of {args.row_length:,} tokens, one for each of {args.ranks} ranks in a step; layers "
        f"recomputed for: {recomputed}; documents' lengths lognormal of mean {MEAN_LENGTH}; each "
        "variant in processes of its own."
    )
    report.tables.append(Table("Training steps", steps, tables["steps"]))
    if tables["checkpoints"]:
        report.tables.append(Table("Checkpoints", saving, tables["checkpoints"]))
    return report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models to train")
    parser.add_argument("--ranks", type=int, help="processes to start; default: GPUs, or 2")
    parser.add_argument(
        "--cp", type=int, nargs="+", metavar="N", help="ranks that share a row of cp; default all"
    )
    parser.add_argument("--variants", nargs="+", choices=["one", "dp", "cp", *WHOLE, "stock"])
    parser.add_argument("--steps", type=int, help="that are timed; default 16, of 8b 6")
    parser.add_argument("--row-length", type=int, help="tokens; default 8192, on the CPU 1024")
    parser.add_argument("--saves", type=int, help="checkpoints to save; default 2, of 8b none")
    parser.add_argument(
        "--recompute", nargs="*", choices=SHAPES, default=["8b"], metavar="SHAPE",
        help="models that recompute their layers in the backward; default 8b",
    )  # fmt: skip
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
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
        write_documents(folder, STEPS * args.ranks, args.row_length, vocab_size)
        (folder / ROWS).write_text(json.dumps({"steps": [], "checkpoints": []}))
        for name in args.shapes:
            for variant in args.variants or SHAPES[name].variants:
                for cp in args.cp if variant in SHARING else [1]:
                    begun = time.perf_counter()
                    run_ranks(work, args.ranks, folder, name, variant, cp, args)
                    spent = time.perf_counter() - begun
                    print(f"{name}, {variant}: {spent:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
