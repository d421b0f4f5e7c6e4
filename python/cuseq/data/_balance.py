"""Assignment of rows to steps, accumulation slots and ranks.

Every rank gets the same number of rows, and the ranks of one step get rows of about equal cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from cuseq import _C

_GROUPS = 1 << 14


def seed_of(*purpose: str | int) -> int:
    """Return a 64-bit seed hashed from `purpose`, the same on every machine."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def coefficients_of(cost: Any) -> tuple[float, float, float] | None:
    """Return three numbers `(quadratic, linear, constant)` as floats; None if they are not that."""
    try:
        if isinstance(cost, str):
            return None
        quadratic, linear, constant = (float(value) for value in cost)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: no values
        return None
    coefficients = (quadratic, linear, constant)
    return coefficients if all(0 <= value < float("inf") for value in coefficients) else None


def deal(costs: Sequence[Tensor], accumulation: int, world_size: int) -> Tensor:
    """Assign rows to groups, slots and ranks such that the ranks of a group have similar costs.

    Args:
        costs: float64 `[num_rows]` each. The first is the cost to balance, the others break ties.
            `num_rows` is a multiple of `accumulation * world_size`.
        accumulation: slots in a group, which is one step of the optimizer.
        world_size: number of ranks.

    Returns:
        Row numbers, int64 `[groups, accumulation, world_size]`.
    """
    order = torch.arange(len(costs[0]), device="cpu")
    for cost in reversed(costs):
        order = order[cost[order].argsort(descending=True, stable=True)]
    # Rows next to each other in the sorted order share a slot, so the ranks' costs differ little.
    grid = order.view(-1, accumulation, world_size)
    _even_out(grid, costs[0])
    return grid


def shuffle_groups(grid: Tensor, seed: int | None) -> Tensor:
    """Return the groups in an order drawn from `seed`, each with its ranks rotated.

    The rotation keeps one rank from always getting the costliest row of a slot. With `seed=None`
    the groups keep their order.
    """
    groups, accumulation, world_size = grid.shape
    order = order_of(groups, seed)
    # Costs descend within a slot, so each group is rotated by a different number of ranks.
    rotations = order_of(groups, None if seed is None else seed ^ 1) % world_size
    shuffled = torch.empty_like(grid)
    # Working in parts avoids the memory of two more grids.
    for chosen, rotation, out in zip(
        *(t.split(_GROUPS) for t in (order, rotations, shuffled)), strict=True
    ):
        ranks = (torch.arange(world_size, device="cpu") + rotation[:, None]) % world_size
        ranks = ranks[:, None, :].expand(-1, accumulation, -1)
        torch.gather(grid[chosen], 2, ranks, out=out)
    return shuffled


def order_of(count: int, seed: int | None) -> Tensor:
    """Return the numbers in `[0, count)` in an order drawn from `seed`; None means ascending."""
    if seed is None:
        return torch.arange(count, device="cpu")
    return _C.permutation(count, seed, 0, count)


def _even_out(grid: Tensor, costs: Tensor) -> None:
    """Give the costliest row of each slot to the rank with the lowest sum so far, in place."""
    sums = costs[grid[:, 0]]
    for slot in range(1, grid.shape[1]):
        lightest_first = sums.argsort(stable=True)
        grid[:, slot] = torch.empty_like(sums, dtype=torch.int64).scatter_(
            1, lightest_first, grid[:, slot]
        )
        sums += costs[grid[:, slot]]


def rows_to_take_apart(counts: Tensor, spare: int, missing: int) -> list[int]:
    """Return the numbers of the rows to split so that there are `missing` more rows.

    These are the last `spare` rows, and further rows if those hold too few samples. If all rows
    together hold too few samples, enough rows are chosen to repeat their samples evenly.

    Args:
        counts: number of samples of each row.
        spare: number of rows beyond the last full step.
        missing: number of rows needed to fill one more step.
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
    """Spread the samples of some rows over more rows of about equal cost.

    Args:
        rows: sample numbers of each row.
        num_rows: number of rows to make, at least `len(rows)`. If there are fewer samples than
            that, the first samples are repeated.
        lengths: tokens of each sample.
        costs: cost of each sample.
        capacity: most tokens of a row.

    Returns:
        The new rows, and how many of them repeat a sample.
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
    """Place samples into rows in descending order of cost, each into the cheapest row with room.

    A row without room for the current sample is set aside until a sample fits into it.

    Returns:
        The rows, or None if a sample fits into none of them.
    """
    made: list[list[int]] = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    # (cost, samples, number): among equal costs an empty row comes first, so no row stays empty.
    cheapest = [(0.0, 0, number) for number in range(num_rows)]
    roomiest: list[tuple[int, tuple[float, int, int]]] = []  # rows set aside
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
    """Halve the row with the most samples until there are `num_rows` rows.

    This always fits, because no row gets longer.
    """
    largest_first = [(-len(row), number, row) for number, row in enumerate(rows)]
    heapify(largest_first)
    for number in range(len(rows), num_rows):
        _, first_number, row = heappop(largest_first)
        half = len(row) // 2
        heappush(largest_first, (-half, first_number, row[:half]))
        heappush(largest_first, (half - len(row), number, row[half:]))
    return [row for _, _, row in sorted(largest_first, key=lambda entry: entry[1])]
