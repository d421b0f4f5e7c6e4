"""Rows to steps, accumulation slots and ranks: as many for each, none waiting long for another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from cuseq import _C

_GROUPS = 1 << 14


def seed_of(*purpose: str | int) -> int:
    """One of 2^64 seeds for each purpose, the same on every machine."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def deal(costs: Sequence[Tensor], accumulation: int, world_size: int) -> Tensor:
    """Row numbers `[groups, accumulation, world_size]`, a group being one step of the optimizer.

    Args:
        costs: float64 `[num_rows]` each, a multiple of `accumulation * world_size` rows: what to
            balance, and what decides among equals.
        accumulation, world_size: slots of a group and ranks.
    """
    order = torch.arange(len(costs[0]), device="cpu")
    for cost in reversed(costs):
        order = order[cost[order].argsort(descending=True, stable=True)]
    # Neighbours in the order of cost share a slot, so ranks differ by little in each.
    grid = order.view(-1, accumulation, world_size)
    _even_out(grid, costs[0])
    return grid


def shuffle_groups(grid: Tensor, seed: int | None) -> Tensor:
    """Groups in an order of the seed, None keeps it, and no rank always the costliest of a slot."""
    groups, accumulation, world_size = grid.shape
    order = order_of(groups, seed)
    # Within a slot the costs descend: each group is turned by another number of ranks.
    turns = order_of(groups, None if seed is None else seed ^ 1) % world_size
    shuffled = torch.empty_like(grid)
    # In parts, which spares the memory of two more grids.
    for chosen, turn, out in zip(
        *(t.split(_GROUPS) for t in (order, turns, shuffled)), strict=True
    ):
        ranks = (torch.arange(world_size, device="cpu") + turn[:, None]) % world_size
        ranks = ranks[:, None, :].expand(-1, accumulation, -1)
        torch.gather(grid[chosen], 2, ranks, out=out)
    return shuffled


def order_of(count: int, seed: int | None) -> Tensor:
    """The numbers up to `count` in an order of the seed; None keeps it."""
    if seed is None:
        return torch.arange(count, device="cpu")
    return _C.permutation(count, seed, 0, count)


def _even_out(grid: Tensor, costs: Tensor) -> None:
    """Gives the largest row of each slot to the rank with the least so far, in place."""
    sums = costs[grid[:, 0]]
    for slot in range(1, grid.shape[1]):
        lightest_first = sums.argsort(stable=True)
        grid[:, slot] = torch.empty_like(sums, dtype=torch.int64).scatter_(
            1, lightest_first, grid[:, slot]
        )
        sums += costs[grid[:, slot]]


def rows_to_take_apart(counts: Tensor, spare: int, missing: int) -> list[int]:
    """Which rows to make `missing` more rows of: the last ones, and others if these have too few.

    Where all together have too few samples, so many are taken that none is repeated more often than
    another has to be.

    Args:
        counts: samples of each row.
        spare: rows that are too many for the ranks.
        missing: rows that they lack for one more step.
    """
    rows = list(range(len(counts) - spare, len(counts)))
    samples = int(counts[rows].sum())
    lacking = spare + missing - samples
    for row in counts[: rows[0]].argsort(descending=True, stable=True).tolist():
        if lacking <= 0 or (counts[row] == 1 and samples >= lacking):
            break
        rows.append(row)
        samples += int(counts[row])
        lacking -= int(counts[row]) - 1
    return sorted(rows)


def take_apart(
    rows: list[list[int]],
    num_rows: int,
    lengths: Mapping[int, int],
    costs: Mapping[int, float],
    capacity: int,
) -> tuple[list[list[int]], int]:
    """The samples of some rows in more rows, about equal in cost, and how many are there twice.

    Args:
        rows: sample numbers.
        num_rows: how many rows to make, at least as many as there are. With fewer samples than
            that, the first ones are repeated.
        lengths, costs: of each sample; what is longer costs as much at least.
        capacity: most tokens of a row.
    """
    samples = [sample for row in rows for sample in row]
    single = min(num_rows, len(samples))
    made = _spread(samples, single, lengths, costs, capacity) or _cut(rows, single)
    repeated = num_rows - single
    return made + [[samples[i % len(samples)]] for i in range(repeated)], repeated


def _spread(
    samples: list[int],
    num_rows: int,
    lengths: Mapping[int, int],
    costs: Mapping[int, float],
    capacity: int,
) -> list[list[int]] | None:
    """From the costliest sample on, each into the cheapest row; None if one fits nowhere.

    What costs more is as long at least, so lengths descend: a row without room for a sample is out
    of the way until one comes that it has room for.
    """
    made: list[list[int]] = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    # Cost, samples, number: an empty row comes first, so that none stays empty.
    cheapest = [(0.0, 0, number) for number in range(num_rows)]
    roomiest: list[tuple[int, tuple[float, int, int]]] = []  # of those out of the way
    for sample in sorted(samples, key=lambda sample: (-costs[sample], -lengths[sample])):
        length = lengths[sample]
        while roomiest and -roomiest[0][0] >= length:
            heappush(cheapest, heappop(roomiest)[1])
        while cheapest and room[cheapest[0][2]] < length:
            entry = heappop(cheapest)
            heappush(roomiest, (-room[entry[2]], entry))
        if not cheapest:
            return None
        cost, count, number = heappop(cheapest)
        made[number].append(sample)
        room[number] -= length
        heappush(cheapest, (cost + costs[sample], count + 1, number))
    return made


def _cut(rows: list[list[int]], num_rows: int) -> list[list[int]]:
    """The row of most samples cut into halves until there are enough: always fits."""
    largest_first = [(-len(row), number, row) for number, row in enumerate(rows)]
    heapify(largest_first)
    for number in range(len(rows), num_rows):
        _, first_number, row = heappop(largest_first)
        half = len(row) // 2
        heappush(largest_first, (-half, first_number, row[:half]))
        heappush(largest_first, (half - len(row), number, row[half:]))
    return [row for _, _, row in sorted(largest_first, key=lambda entry: entry[1])]
