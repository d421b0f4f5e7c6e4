"""`pack_groups`, which plans rows of groups whose samples share a prompt, and its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, as_rank, check_flag, check_tensor, round_up, shown
from cuseq.data._balance import coefficients_of, deal, take_apart
from cuseq.data._lengths import host_lengths
from cuseq.data._state import checked_ranks, options_in
from cuseq.data.plan import bin_pack
from cuseq.trees import PackedTree, Tokens

if TYPE_CHECKING:
    import numpy

    Lengths = Iterable[int] | numpy.ndarray | Tensor

# Attention of one sequence of 16,384 tokens costs as much as the rest of the model: between a model
# of 0.6B parameters (at about 7,000 tokens) and one of 8B (at about 30,000), by FLOPs and by half
# the speed of matrix products for attention.
MODEL = (1 / 16384, 1.0, 0.0)

# The plan that costs least is taken of those whose parts hold at most n eighths of the capacity.
_EIGHTHS = (8, 7, 6, 5, 4, 3, 2, 1)


class GroupRow(NamedTuple):
    """One row of a `GroupPlan`.

    Attributes:
        groups: numbers of the groups in the row. A group that was cut is in other rows too.
        completions: for each of these groups the numbers of its completions in the row.
        samples: int64 `[n]`, the number of each sample of the row's tree, counted over all groups,
            group by group: `rewards[row.samples]`.
        tokens: unique tokens of the row.
        repeats: whether the row repeats a sample of another row, so that each rank has as many
            rows: compute it and multiply its loss by zero.
    """

    groups: list[int]
    completions: list[list[int]]
    samples: Tensor
    tokens: int
    repeats: bool

    def tree(
        self,
        prompts: Sequence[Tokens],
        completions: Sequence[Sequence[Tokens]],
        **options: Any,
    ) -> PackedTree:
        """Make the row's `PackedTree` from the token ids of all groups.

        Args:
            prompts: token ids of each group's prompt.
            completions: for each group the token ids of its completions.
            options: those of `PackedTree.from_groups`.
        """
        return PackedTree.from_groups(
            [prompts[group] for group in self.groups],
            [
                [completions[group][i] for i in numbers]
                for group, numbers in zip(self.groups, self.completions, strict=True)
            ],
            **options,
        )


class GroupPlan:
    """The assignment of groups to the rows of all ranks, made by `pack_groups`.

    Attributes:
        capacity: most tokens of a row.
        world_size: number of ranks.
        costs: float64 `[steps, world_size]`, the modelled cost of each row.
        num_cut: number of groups that were cut, whose prompt is in several rows.
    """

    def __init__(self, capacity: int, grid: list[list[GroupRow]], costs: Tensor, num_cut: int):
        self.capacity = capacity
        self.world_size = costs.shape[1]
        self.costs = costs
        self.num_cut = num_cut
        self._grid = grid  # by step, then by rank

    @property
    def steps(self) -> int:
        """Number of rows of each rank."""
        return len(self._grid)

    @property
    def num_rows(self) -> int:
        """Number of rows of all ranks together."""
        return self.steps * self.world_size

    @property
    def fill(self) -> float:
        """All tokens divided by `num_rows * capacity`; 1.0 if there are no rows."""
        if self.num_rows == 0:
            return 1.0
        tokens = sum(row.tokens for step in self._grid for row in step)
        return tokens / (self.num_rows * self.capacity)

    @property
    def imbalance(self) -> float:
        """Cost of the costliest rank over the mean of the ranks, summed over steps; 1.0 is even."""
        mean = float(self.costs.mean(1).sum()) if self.steps else 0.0
        return float(self.costs.amax(1).sum()) / mean if mean else 1.0

    def rows(self, rank: int = 0) -> list[GroupRow]:
        """Return the rows of one rank, one for each step.

        Raises:
            ValueError: `rank` is not in `[0, world_size)`.
        """
        rank = as_rank(rank, self.world_size)
        return [step[rank] for step in self._grid]

    def __setstate__(self, pickled: Any) -> None:
        options = options_in(pickled, ("capacity", "costs", "num_cut", "_grid"))
        check_tensor(options["costs"], "costs")
        costs, grid = options["costs"], options["_grid"]
        is_plan = costs.dtype == torch.float64 and costs.dim() == 2 and costs.device.type == "cpu"
        if not is_plan or not bool((costs.isfinite() & (costs >= 0)).all()):
            raise ValueError(
                "costs must be float64 [steps, world_size] on the CPU, finite and not negative, "
                f"got {shown(costs)}"
            )
        is_grid = isinstance(grid, list) and all(isinstance(step, list) for step in grid)
        steps = [len(step) for step in grid] if is_grid else None
        if steps != [costs.shape[1]] * costs.shape[0]:
            raise ValueError(
                f"_grid must have a row for each of the costs {list(costs.shape)}, got {steps}"
            )
        capacity = as_int(options["capacity"], "capacity", least=1)
        for row in (row for step in grid for row in step):
            _check_row(row, capacity)
        num_cut = as_int(options["num_cut"], "num_cut", least=0)
        GroupPlan.__init__(self, capacity, grid, costs, num_cut)

    def __repr__(self) -> str:
        return (
            f"GroupPlan({self.num_rows} rows of {self.capacity} tokens on {self.world_size} "
            f"ranks, {self.num_cut} groups cut, fill {self.fill:.4f})"
        )


def pack_groups(
    prompts: Lengths,
    completions: Iterable[Lengths],
    capacity: int,
    *,
    world_size: int = 1,
    cost: Sequence[float] = MODEL,
    padded: bool = True,
) -> GroupPlan:
    """Assign groups of samples with a common prompt to the rows of all ranks.

    For one batch of GRPO, RLOO or DPO, whose rows are trees. A group weighs its unique tokens, the
    prompt once. It stays in one row, unless it is longer than `capacity`, or the modelled time is
    less with the group cut into parts that each repeat the prompt: then rows fill better, or
    ranks differ less. All ranks get the same number of rows, and the rows of one step have similar
    costs. Every completion is in one row; only if there are fewer completions than rows are some
    repeated, in rows that say so.

    The modelled time is the sum over steps of the costliest rank. A row costs `quadratic * squares
    + linear * tokens + constant * groups`, where `squares` is `P * P` for a prompt of P tokens and
    `C * (C + 2 * P)` for each completion of C: twice the pairs of a query and a key.

    Args:
        prompts: tokens of each group's prompt, as `bin_pack` takes lengths.
        completions: for each group the tokens of its completions, at least one; each may be 0.
        capacity: most tokens of a row, at least 1.
        world_size: number of ranks.
        cost: the coefficients `(quadratic, linear, constant)`, not negative. Default: `(1 / 16384,
            1, 0)`, a sequence of 16,384 tokens spends as much on attention as on the rest.
        padded: whether rows are padded to `capacity` tokens, as `total_tokens=capacity` does for
            compiled code: each row's `tokens` then count as `capacity`.

    Returns:
        A `GroupPlan`, the same on every rank. On the CPU; never synchronises.

    Raises:
        ValueError: a prompt with one of its completions is longer than `capacity` (the message
            names both), a group has no completion, numbers of groups differ, or a number is
            negative or out of range.
        TypeError: lengths are not integers.

    Examples:
        >>> plan = cuseq.data.pack_groups([40, 10, 30], [[8] * 4, [20] * 2, [4] * 5], 128)
        >>> plan
        GroupPlan(2 rows of 128 tokens on 1 ranks, 0 groups cut, fill 0.6719)
        >>> [(row.groups, row.samples.tolist()) for row in plan.rows(0)]
        [([0], [0, 1, 2, 3]), ([1, 2], [4, 5, 6, 7, 8, 9, 10])]
    """
    capacity = as_int(capacity, "capacity", least=1)
    world_size, _ = checked_ranks(world_size)
    check_flag(padded, "padded")
    if isinstance(completions, Tensor):
        check_tensor(completions, "completions")
    try:
        groups_of_lengths = list(completions)
    except TypeError as error:  # NumPy's arrays without dimensions say that they can be iterated
        raise TypeError(
            f"completions must be a list for each group, got {shown(completions)}"
        ) from error
    groups = _Groups(
        _checked_lengths(prompts, "prompts"),
        [_checked_lengths(each, f"completions[{g}]") for g, each in enumerate(groups_of_lengths)],
        capacity,
        _checked_cost(cost),
        bool(padded),
    )
    if not groups.prompts:
        return GroupPlan(
            capacity, [], torch.empty(0, world_size, dtype=torch.float64, device="cpu"), 0
        )
    plans = (groups.plan(capacity * eighths // 8, world_size) for eighths in _EIGHTHS)
    return min(plans, key=lambda plan: float(plan.costs.amax(1).sum()))  # the first of equals


class _Part(NamedTuple):
    """Some completions of a group, ascending."""

    group: int
    completions: list[int]


class _Groups:
    """The lengths of groups, and their costs."""

    def __init__(
        self,
        prompts: list[int],
        completions: list[list[int]],
        capacity: int,
        cost: tuple[float, float, float],
        padded: bool,
    ):
        self.prompts = prompts
        self._completions = completions
        self._capacity = capacity
        quadratic, linear, constant = cost
        # Tokens of padded rows cost the same however many of them are real.
        self._cost = (quadratic, 0.0 if padded else linear, constant)
        self._cost_of_padded_row = linear * capacity if padded else 0.0
        self._check()
        counts = torch.tensor([0, *map(len, completions)], device="cpu")
        self._first_sample: list[int] = counts.cumsum(0).tolist()

    def _check(self) -> None:
        if len(self._completions) != len(self.prompts):
            raise ValueError(
                f"completions must have a list for each of the {len(self.prompts)} prompts, got "
                f"{len(self._completions)}"
            )
        for group, (prompt, lengths) in enumerate(
            zip(self.prompts, self._completions, strict=True)
        ):
            if not lengths:
                raise ValueError(f"completions[{group}] must have at least one completion, got []")
            longest = max(lengths)
            if prompt + longest > self._capacity:
                raise ValueError(
                    f"a prompt and a completion must fit a row of capacity = {self._capacity} "
                    f"tokens, got prompts[{group}] = {prompt} and "
                    f"completions[{group}][{lengths.index(longest)}] = {longest}"
                )

    def plan(self, limit: int, world_size: int) -> GroupPlan:
        """Plan rows of parts of at most `limit` tokens, where one completion allows it."""
        parts = [
            part for group in range(len(self.prompts)) for part in self._parts_of(group, limit)
        ]
        packed = bin_pack([self._tokens(part) for part in parts], self._capacity)
        num_rows = round_up(packed.num_rows, world_size)
        if len(parts) < num_rows:
            parts = self._halved(parts, num_rows)
            rows = [[number] for number in range(len(parts))]
        else:
            rows = [packed.row(number) for number in range(packed.num_rows)]
        tokens = {number: self._tokens(part) for number, part in enumerate(parts)}
        costs = {number: self._cost_of([part]) for number, part in enumerate(parts)}
        made, repeated = take_apart(rows, num_rows, tokens, costs, self._capacity)
        return self._dealt(
            [self._merged([parts[number] for number in row]) for row in made],
            num_rows - repeated,
            world_size,
        )

    def _parts_of(self, group: int, limit: int) -> list[_Part]:
        """Cut a group into few parts."""
        lengths = self._completions[group]
        # A room of 0 is left for completions of 0 tokens, which fit into any.
        room = max(limit - self.prompts[group], *lengths, 1)
        if sum(lengths) <= room:
            return [_Part(group, list(range(len(lengths))))]
        plan = bin_pack(lengths, room)
        return [_Part(group, sorted(plan.row(number))) for number in range(plan.num_rows)]

    def _halved(self, parts: list[_Part], wanted: int) -> list[_Part]:
        """Halve the costliest part until there are as many as wanted, if completions suffice."""
        costliest = [(-self._cost_of([part]), part) for part in parts if len(part.completions) > 1]
        heapify(costliest)
        made = [part for part in parts if len(part.completions) == 1]
        while costliest and len(made) + len(costliest) < wanted:
            group, numbers = heappop(costliest)[1]
            longest_first = sorted(numbers, key=lambda i: -self._completions[group][i])
            for half in (longest_first[::2], longest_first[1::2]):
                part = _Part(group, sorted(half))
                if len(half) > 1:
                    heappush(costliest, (-self._cost_of([part]), part))
                else:
                    made.append(part)
        return sorted([*made, *(part for _, part in costliest)])

    @staticmethod
    def _merged(parts: list[_Part]) -> list[_Part]:
        """Join the parts of a row that are of one group, whose prompt the row then holds once."""
        completions: dict[int, list[int]] = {}
        for group, numbers in parts:
            completions.setdefault(group, []).extend(numbers)
        return [_Part(group, sorted(numbers)) for group, numbers in sorted(completions.items())]

    def _dealt(self, rows: list[list[_Part]], num_fresh: int, world_size: int) -> GroupPlan:
        """Give rows to steps and ranks. The rows from `num_fresh` on repeat samples."""
        costs = torch.tensor(list(map(self._cost_of, rows)), dtype=torch.float64, device="cpu")
        costs += self._cost_of_padded_row
        grid = deal([costs], len(rows) // world_size, world_size)[0]
        times: dict[int, int] = {}  # that each group is in a row
        for row in rows[:num_fresh]:
            for part in row:
                times[part.group] = times.get(part.group, 0) + 1
        return GroupPlan(
            self._capacity,
            [[self._row(rows[i], i >= num_fresh) for i in step] for step in grid.tolist()],
            costs[grid],
            sum(count > 1 for count in times.values()),
        )

    def _row(self, parts: list[_Part], repeats: bool) -> GroupRow:
        samples = [self._first_sample[group] + i for group, numbers in parts for i in numbers]
        return GroupRow(
            [part.group for part in parts],
            [part.completions for part in parts],
            torch.tensor(samples, dtype=torch.int64, device="cpu"),
            sum(map(self._tokens, parts)),
            repeats,
        )

    def _tokens(self, part: _Part) -> int:
        lengths = self._completions[part.group]
        return self.prompts[part.group] + sum(lengths[i] for i in part.completions)

    def _cost_of(self, parts: list[_Part]) -> float:
        """Return the modelled cost of the parts of a row, without that of padded tokens."""
        squares = tokens = 0
        for part in parts:
            prompt, lengths = self.prompts[part.group], self._completions[part.group]
            squares += prompt**2 + sum(
                lengths[i] * (lengths[i] + 2 * prompt) for i in part.completions
            )
            tokens += self._tokens(part)
        quadratic, linear, constant = self._cost
        return quadratic * squares + linear * tokens + constant * len(parts)


def _check_row(row: Any, capacity: int) -> None:
    """Raise unless the facts of a row that was pickled agree with each other."""
    if not isinstance(row, GroupRow):
        raise TypeError(f"_grid must hold rows, got {shown(row)}")
    check_tensor(row.samples, "samples")
    lists = [row.groups, row.completions]
    lists += row.completions if isinstance(row.completions, list) else []
    if not all(isinstance(one, list) for one in lists):
        raise TypeError(
            f"groups and completions must be lists, got {shown(row.groups)} and "
            f"{shown(row.completions)}"
        )
    counts = [len(numbers) for numbers in row.completions]
    if len(row.groups) != len(counts) or row.samples.shape != (sum(counts),):
        raise ValueError(
            f"groups, completions and samples must be of one row, got {len(row.groups)} groups, "
            f"{counts} completions and samples of shape {list(row.samples.shape)}"
        )
    if not 0 <= as_int(row.tokens, "tokens") <= capacity:
        raise ValueError(f"tokens must lie in [0, capacity = {capacity}], got {row.tokens}")


def _checked_lengths(lengths: Lengths, name: str) -> list[int]:
    values: list[int] = host_lengths(lengths, name).tolist()
    for i, length in enumerate(values):
        if length < 0:
            raise ValueError(f"{name} must not be negative, got {name}[{i}] = {length}")
    return values


def _checked_cost(cost: object) -> tuple[float, float, float]:
    coefficients = coefficients_of(cost)
    if coefficients is None:
        raise ValueError(
            "cost must be three coefficients (quadratic, linear, constant) that are not negative, "
            f"got {shown(cost)}"
        )
    return coefficients
