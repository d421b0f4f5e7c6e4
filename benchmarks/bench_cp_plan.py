"""Benchmark plans of context parallelism: host time, and what the plans cost, by policy.

    python -m benchmarks cp_plan [--rows N]

Everything runs on the CPU. Rows have three kinds of documents: lognormal with a mean of 350 tokens,
long-tailed (a histogram of the lengths that MagiAttention's benchmark uses) and 12 to 24 K tokens.

- Host time of `cp_plan` for 1,000 short documents, from a layout, a tensor and a list; and of the
  rank's part of a row.
- Attention of the busiest rank over the mean, rows of keys and values that move as a share of an
  all-gather, and the predicted time of a layer of Qwen3-0.6B's shape, forward and backward, as a
  multiple of attention divided evenly and without any exchange. "zigzag" has no such row: these
  lengths are not multiples of 2 * cp_size.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import timer
import torch
from report import Report, Table, arguments, environment
from workload import lognormal_lengths

import cuseq
from cuseq.distributed import cp_partition, cp_plan

POLICIES = ("auto", "contiguous", "ulysses")
HEADS = (16, 8)
# Lengths up to each bound, and how many documents have them.
HISTOGRAM = (
    (10, 30_254),
    (50, 391_188),
    (100, 699_596),
    (200, 1_377_757),
    (500, 3_794_735),
    (1024, 3_316_785),
    (2048, 2_106_566),
    (4096, 988_525),
    (8192, 410_002),
    (16_384, 173_574),
    (32_768, 115_007),
    (65_536, 18_428),
    (131_072, 22_513),
    (196_608, 18_284),
)


def short(total: int, seed: int) -> list[int]:
    return lognormal_lengths(total, 350, seed, sigma=1.0)


def filled(total: int, draw: Callable[[], int]) -> list[int]:
    """Return drawn lengths that fill a row; the last one is cut to fit."""
    lengths, left = [], total
    while left > 0:
        lengths.append(min(draw(), left))
        left -= lengths[-1]
    return lengths


def long_tailed(total: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    bounds = [bound for bound, _ in HISTOGRAM]
    weights = [count for _, count in HISTOGRAM]

    def draw() -> int:
        place = rng.choices(range(len(bounds)), weights)[0]
        return rng.randint(bounds[place - 1] + 1 if place > 0 else 1, bounds[place])

    return filled(total, draw)


def long(total: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return filled(total, lambda: rng.randint(12_000, 24_000))


KINDS = {"lognormal 350": short, "long-tailed": long_tailed, "12 to 24 K": long}


def microseconds(call: Callable[[], object]) -> float:
    return timer.host_time(call, device=torch.device("cpu")).median


def host_rows(documents: int, cp_size: int) -> list[dict[str, Any]]:
    """Return host times for a row of as many documents."""
    rng = random.Random(0)
    lengths = [max(2, round(rng.lognormvariate(5.36, 1.0))) for _ in range(documents)]
    total = sum(lengths) + -sum(lengths) % cp_size
    packed = cuseq.PackedLayout.from_lengths(lengths, total, max_seqs=documents)
    tensor, ids = torch.tensor(lengths), torch.zeros(total, dtype=torch.int64)
    rows = []
    for policy in POLICIES:
        options = {"policy": policy, "heads": HEADS}
        plan = cp_plan(packed, cp_size, **options)
        size = {"total_tokens": total}
        rows.append(
            {
                "policy": policy,
                "documents": documents,
                "ranks": cp_size,
                "layout": microseconds(lambda o=options: cp_plan(packed, cp_size, **o)),
                "tensor": microseconds(lambda o=options | size: cp_plan(tensor, cp_size, **o)),
                "list": microseconds(lambda o=options | size: cp_plan(lengths, cp_size, **o)),
                "part": microseconds(lambda p=plan: cp_partition(packed, p, 1, ids)),
            }
        )
    return rows


def quality_rows(rows: int) -> list[dict[str, Any]]:
    """Return means over some rows of each kind, tokens of a rank, number of ranks and policy."""
    found = []
    for kind, make in KINDS.items():
        for tokens in (8192, 32_768):
            for cp_size in (2, 8, 64):
                packs = [make(tokens * cp_size, seed) for seed in range(rows)]
                for policy in POLICIES:
                    if policy == "ulysses" and HEADS[0] % cp_size != 0:
                        continue
                    plans = [cp_plan(pack, cp_size, policy=policy, heads=HEADS) for pack in packs]
                    found.append(
                        {"kind": kind, "tokens": tokens, "ranks": cp_size, "policy": policy}
                        | costs(plans, packs)
                    )
    return found


def costs(
    plans: list[cuseq.distributed.ContextParallelPlan], packs: list[list[int]]
) -> dict[str, float]:
    """Return what the plans cost, as means; `ideal` is attention divided evenly."""
    ratios = []
    for plan, pack in zip(plans, packs, strict=True):
        pairs = sum(length * (length + 1) // 2 for length in pack)
        ideal = pairs / plan.cp_size * 14 * HEADS[0] * 128 / 300e6
        ratios.append(plan.predicted_us / ideal)
    balance = [plan.attention_balance for plan in plans]
    count = len(plans)
    return {
        "cut": sum(plan.cut for plan in plans) / count,
        "balance": sum(balance) / count,
        "worst": max(balance),
        "moved": 100 * sum(plan.moved_share for plan in plans) / count,
        "of_ideal": sum(ratios) / count,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=12, help="rows of each kind")
    args = parser.parse_args()
    report = Report("cp_plan", environment("cpu"))
    headings = {
        "policy": "policy",
        "documents": "documents",
        "ranks": "ranks",
        "layout": "us, from a layout",
        "tensor": "from a tensor",
        "list": "from a list",
        "part": "us, a rank's part",
    }
    report.tables.append(Table("Host time", headings, host_rows(1000, 8)))
    headings = {
        "kind": "documents",
        "tokens": "tokens a rank",
        "ranks": "ranks",
        "policy": "policy",
        "cut": "documents cut",
        "balance": "busiest rank",
        "worst": "worst row",
        "moved": "moved, %",
        "of_ideal": "predicted time over ideal",
    }
    title = f"Plans, means of {args.rows} rows"
    report.tables.append(Table(title, headings, quality_rows(args.rows)))
    report.write(args.out)


if __name__ == "__main__":
    main()
