"""Benchmark attention over parts of a row, and steps of models, on several GPUs.

    python -m benchmarks cp_attention [--ranks 2] [--shapes 0.6b] [--steps-of 0.6b]
        [--rows N ...] [--step-rows N ...] [--backend flash]
    torchrun --nproc-per-node 2 -m benchmarks cp_attention

Without torchrun it starts one process for each rank: over NCCL on GPUs, over gloo on the CPU, where
sizes are small and only the differences between outputs mean anything.

Rows: lognormal documents of mean 350 at 8 K and 32 K tokens a rank, long-tailed ones, 12 to 24 K
ones, one document of 32 K and of 128 K, and one of 16 K among short ones: numbers 1 to 7 of --rows.
8 and 9 are one document of 256 K and of 1 M, for eight GPUs; only where they are named.
Variants of a layer's attention, forward and backward, each over the same row unless it says
otherwise, those of cuseq over the kernels of --backend:

- `cuseq`, `cuseq contiguous`, `cuseq ulysses`: `varlen_attention` over the parts of each policy;
- `pieces alone`: the pieces of `cuseq` as documents of their own: its attention without exchange,
  and without far keys;
- `all-gather`, `zigzag ring`: shims (cp_peers.py) over PyTorch's flash kernels; the ring's
  documents are padded to multiples of 2 R;
- `dp`: documents dealt whole, by bin packing, as data parallelism would: rows of other lengths;
- `one GPU / R`: the whole row on one GPU, its time divided by R; up to 256 K tokens.

Times are those of the slowest rank, medians; all ranks start each repetition together, when the
host has launched it. `exposed` is the time above `pieces alone`. Steps shard a model of Qwen3's
shape by FSDP2 and train it, eager and compiled, with four of the variants. Outputs and gradients
are compared with the whole row's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import timer
import torch
import torch.distributed as dist
from bench_cp_plan import long, long_tailed, short
from cp_model import HEAD_DIM, SHAPES, Trainer, layout_attention
from cp_peers import AllGather, ZigzagRing
from processes import default_ranks, run_ranks
from report import Report, Table, arguments, environment
from torch import Tensor

from cuseq import PackedLayout
from cuseq.data import bin_pack
from cuseq.distributed import cp_partition, cp_plan

WARMUP = 3  # calls before the first that counts
BUDGET_S = 0.5  # for the calls of one measurement, of which there are at least MIN_CALLS
MIN_CALLS = 3
WHOLE_ROW = 256 * 1024  # tokens; whole, a longer row would take minutes
NOT_BY_DEFAULT = ("one of 256 K", "one of 1 M")
IN_STEPS = ("cuseq", "cuseq ulysses", "all-gather", "dp")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def workloads(ranks: int, device: torch.device) -> dict[str, list[int]]:
    """Return the lengths of each row; total tokens divide by 2 * ranks."""
    if device.type == "cpu":
        return {"lognormal": short(256 * ranks, 0), "one document": [256 * ranks]}
    k = 1024
    return {
        "lognormal 350, 8 K a rank": short(8 * k * ranks, 0),
        "lognormal 350, 32 K a rank": short(32 * k * ranks, 0),
        "long-tailed, 32 K a rank": long_tailed(32 * k * ranks, 0),
        "12 to 24 K, 64 K a rank": long(64 * k * ranks, 0),
        "one of 32 K": [32 * k],
        "one of 128 K": [128 * k],
        "16 K among short": [16 * k, *short(16 * k * ranks - 16 * k, 0)],
        "one of 256 K": [256 * k],
        "one of 1 M": [1024 * k],
    }


class Bench:
    """One rank's side of the measurements."""

    def __init__(self, device: torch.device, repeats: int, backend: str):
        self.device, self.repeats, self.backend = device, repeats, backend
        # Not the one that FSDP2 shards over: a group's collectives run one after the other.
        self.group = dist.new_group()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
        self.signal = torch.zeros(1, device=device)

    def rows(self, tokens: int, heads: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (tokens, heads, HEAD_DIM)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def attention(self, packed: PackedLayout) -> Attend:
        return layout_attention(packed, self.backend)

    def slowest(self, value: float) -> float:
        reduced = torch.tensor(value, device=self.device)
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        return float(reduced)

    def time(self, call: Callable[[], object]) -> float:
        """Return microseconds of the slowest rank; repetitions start together.

        GPUs wait until the host has launched the call, as they do in a step that keeps them busy;
        `host_time` is apart.
        """
        if self.device.type != "cuda":
            return self.time_on_cpu(call)
        host_s = call_s = 0.0
        for _ in range(WARMUP):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            host_s = time.perf_counter() - begun
            torch.cuda.synchronize()
            call_s = time.perf_counter() - begun
        hold = timer.hold_cycles(self.slowest(host_s))
        affordable = int(BUDGET_S / self.slowest(call_s))
        samples = []
        for _ in range(max(MIN_CALLS, min(self.repeats, affordable))):
            dist.all_reduce(self.signal)
            torch.cuda._sleep(hold)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        return self.slowest(statistics.median(samples))

    def time_on_cpu(self, call: Callable[[], object]) -> float:
        samples = []
        for _ in range(WARMUP + self.repeats):
            dist.all_reduce(self.signal)
            begun = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begun) * 1e6)
        return self.slowest(statistics.median(samples[WARMUP:]))

    def host_time(self, call: Callable[[], object]) -> float:
        """Return microseconds that a call occupies the host."""
        if self.device.type != "cuda":
            return self.time_on_cpu(call)
        samples = []
        for _ in range(MIN_CALLS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begun) * 1e6)
        torch.cuda.synchronize()
        return self.slowest(statistics.median(samples))

    def part(self, lengths: list[int], policy: str, heads: tuple[int, int]) -> tuple[Any, ...]:
        packed = PackedLayout.from_lengths(lengths, max_seqs=len(lengths))
        plan = cp_plan(packed, self.ranks, policy=policy, heads=heads, head_dim=HEAD_DIM)
        (local,) = cp_partition(packed, plan, self.rank)
        return plan, local.to(self.device), plan.tokens_of(self.rank).to(self.device)

    def variants(
        self, lengths: list[int], heads: tuple[int, int]
    ) -> dict[str, tuple[Attend, Tensor | None, float | None, list[int]]]:
        """Return attention, this rank's tokens, the share moved, and the row, by name."""
        found: dict[str, Any] = {}
        for policy in ("auto", "contiguous", "ulysses"):
            plan, local, tokens = self.part(lengths, policy, heads)
            name = "cuseq" if policy == "auto" else f"cuseq {policy}"
            found[name] = (self.attention(local), tokens, plan.moved_share, lengths)
            if policy == "auto":
                pieces = PackedLayout.from_lengths(
                    local.lengths_on_host().tolist(), local.total_tokens
                )
                alone = self.attention(pieces.to(self.device))
                found["pieces alone"] = (alone, tokens, None, lengths)
        found["all-gather"] = (gather := AllGather(lengths, self.group, self.device)), gather.tokens
        found["all-gather"] += (1.0, lengths)
        parts = 2 * self.ranks
        padded = [-(-length // parts) * parts for length in lengths]
        ring = ZigzagRing(padded, self.group, self.device)
        found["zigzag ring"] = (ring, ring.tokens, 1.0, padded)
        own = PackedLayout.from_lengths(self.dealt(lengths)).to(self.device)
        found["dp"] = (self.attention(own), None, 0.0, [own.total_tokens])
        return found

    def dealt(self, lengths: list[int]) -> list[int]:
        """Return the documents of this rank as data parallelism deals them: whole."""
        fair = -(-sum(lengths) // self.ranks)
        capacity = max(fair, max(lengths))
        indices, offsets = bin_pack(lengths, capacity)
        while len(offsets) - 1 > self.ranks:
            capacity += max(1, fair // 64)
            indices, offsets = bin_pack(lengths, capacity)
        if self.rank >= len(offsets) - 1:
            return [1]  # fewer documents than ranks
        return [lengths[i] for i in indices[offsets[self.rank] : offsets[self.rank + 1]].tolist()]

    def layer(self, lengths: list[int], heads: tuple[int, int]) -> list[dict[str, Any]]:
        """Return a row of the table for each variant of a layer's attention."""
        total = sum(lengths)
        whole = PackedLayout.from_lengths(lengths, max_seqs=len(lengths)).to(self.device)
        tensors = [self.rows(total, n, seed) for seed, n in enumerate((heads[0], *heads[1:] * 2))]
        expected = self.run(self.attention(whole), tensors)
        table = []
        for name, (attend, tokens, moved, row) in self.variants(lengths, heads).items():
            if tokens is None or row != lengths:
                count = row[0] if tokens is None else len(tokens)
                own = [self.rows(count, rows.shape[1], 3) for rows in tensors]
            else:
                own = [rows[tokens] for rows in tensors]
            found = self.run(attend, own)
            differs = None
            if name != "pieces alone" and tokens is not None and row == lengths:
                differs = max(
                    self.slowest(float((mine - theirs[tokens]).abs().max()))
                    for mine, theirs in zip(found, expected, strict=True)
                )
            table.append({"variant": name, "moved": moved, "differs": differs}
                         | self.timed(attend, own))  # fmt: skip
        if total <= WHOLE_ROW:
            one = self.timed(self.attention(whole), tensors)
            one = {key: value / self.ranks for key, value in one.items() if key != "host"}
            table.append({"variant": "one GPU / R"} | one)
        alone = next(row for row in table if row["variant"] == "pieces alone")
        for row in table:
            if row["variant"] in ("cuseq", "cuseq contiguous"):
                row["exposed"] = row["both"] - alone["both"]
        return table

    def run(self, attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
        leaves = [rows.detach().requires_grad_() for rows in tensors]
        out = attend(*leaves)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def timed(self, attend: Attend, tensors: list[Tensor]) -> dict[str, float]:
        leaves = [rows.detach().requires_grad_() for rows in tensors]

        def both() -> None:
            for leaf in leaves:
                leaf.grad = None
            out = attend(*leaves)
            out.backward(out.detach())

        with torch.no_grad():
            ahead = self.time(lambda: attend(*leaves))
        return {"forward": ahead, "both": self.time(both), "host": self.host_time(both)}

    def steps(self, shape: str, lengths: list[int], compiled: bool) -> list[dict[str, Any]]:
        """Return a row of the table for a training step of each variant."""
        torch._dynamo.reset()  # else the variants of all rows are too many for one function
        trainer = Trainer(shape, self.device, compiled=compiled)
        whole = PackedLayout.from_lengths(lengths, max_seqs=len(lengths)).to(self.device)
        ids = torch.randint(0, trainer.vocabulary, (sum(lengths),), device=self.device)
        dist.broadcast(ids, 0)
        table = []
        heads = SHAPES[shape][3:]
        for name, (attend, tokens, _, row) in self.variants(lengths, heads).items():
            if name not in IN_STEPS:
                continue
            if tokens is None:
                tokens = torch.arange(row[0], device=self.device) % sum(lengths)
            batch = (ids[tokens], whole.position_ids[tokens], ids[tokens])

            def step(batch: Any = batch, attend: Attend = attend) -> Tensor:
                return trainer.step(*batch, attend, sum(lengths))

            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent = self.time(step)
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
            table.append({"variant": name, "ms": spent / 1e3, "peak": self.slowest(peak)})
        return table


def work(rank: int, port: int, ranks: int, args: Any) -> None:
    """Measure as one rank; rank 0 writes the report."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = {} if port == 0 else {"init_method": f"tcp://127.0.0.1:{port}"}
    if port != 0:
        where |= {"rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **where)
    report = Report("cp_attention", environment(args.device))
    bench = Bench(device, args.repeats, args.backend)
    headings = {"row": "row", "variant": "variant", "forward": "us, forward",
                "both": "forward + backward", "exposed": "exposed", "host": "host us",
                "moved": "moved, of an all-gather", "differs": "largest difference"}  # fmt: skip
    numbered = dict(enumerate(workloads(ranks, device).items(), 1))
    usual = [number for number, (name, _) in numbered.items() if name not in NOT_BY_DEFAULT]
    rows, step_rows = (
        [numbered[number] for number in chosen or usual] for chosen in (args.rows, args.step_rows)
    )

    def keep(table: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
        """Add rows to a table and write the report, which stays if a later row fails."""
        table += more
        if rank == 0:
            for row in more:
                print(row, flush=True)
            report.write(args.out)

    for shape in args.shapes:
        table: list[dict[str, Any]] = []
        title = f"Attention of a {shape} layer over {ranks} ranks"
        report.tables.append(Table(title, headings, table))
        for name, lengths in rows:
            found = bench.layer(lengths, SHAPES[shape][3:])
            keep(table, [{"row": name} | row for row in found])
    headings = {"row": "row", "code": "code", "variant": "variant", "ms": "ms a step",
                "peak": "peak GiB"}  # fmt: skip
    for shape in args.steps_of:
        table = []
        report.tables.append(Table(f"Steps of {shape} over {ranks} ranks", headings, table))
        for name, lengths in step_rows:
            for compiled in (False, True) if device.type == "cuda" else (False,):
                code = {"row": name, "code": "compiled" if compiled else "eager"}
                keep(table, [code | row for row in bench.steps(shape, lengths, compiled)])
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, help="processes to start; default: GPUs, or 2")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="layers to measure")
    parser.add_argument("--steps-of", nargs="*", choices=SHAPES, help="models to train")
    for option, what in (("--rows", "layers"), ("--step-rows", "steps")):
        parser.add_argument(
            option, type=int, nargs="+", metavar="N", help=f"numbers of the rows of {what}"
        )
    parser.add_argument("--backend", default="flash", help="of cuseq's attention, default flash")
    parser.add_argument("--repeats", type=int, default=None, help="repetitions of a measurement")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    sizes = ["0.6b", "8b"] if on_gpu else ["tiny"]
    args.shapes = sizes if args.shapes is None else args.shapes
    args.steps_of = sizes[:1] if args.steps_of is None else args.steps_of
    args.repeats = args.repeats or (20 if on_gpu else 3)
    if not on_gpu:
        args.backend = "auto"
    if "RANK" in os.environ:  # torchrun
        work(int(os.environ["RANK"]), 0, int(os.environ["WORLD_SIZE"]), args)
        return
    ranks = args.ranks or default_ranks()
    run_ranks(work, ranks, ranks, args)


if __name__ == "__main__":
    main()
