"""The rows of one epoch, planned one window at a time, and their assignment to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cuseq import _C
from cuseq.data._balance import (
    deal,
    order_of,
    rows_to_take_apart,
    seed_of,
    shuffle_groups,
    take_apart,
)

# Coefficients (quadratic, linear, constant) of a sample's cost as a function of its length.
TOKENS = (0.0, 1.0, 0.0)
ATTENTION = (1.0, 0.0, 0.0)

# Rows balanced at a time, which bounds the extra memory for a large set.
_ROWS = 1 << 17


@dataclass(frozen=True)
class Packing:
    """How samples are packed and ordered.

    The fields are the arguments of `PackedBatchSampler` with the same names.
    """

    capacity: int
    strategy: str
    balance: str | tuple[float, float, float] | None
    seed: int
    shuffle: bool
    drop_last: bool
    buffer: int | None

    @property
    def coefficients(self) -> list[Sequence[float]]:
        """Return the coefficients of the cost to balance, then those that break ties."""
        if self.balance == "attention":
            return [ATTENTION, TOKENS]
        if self.balance is None or self.balance == "tokens":
            return [TOKENS, ATTENTION]
        assert not isinstance(self.balance, str)
        return [self.balance]


class Stage(NamedTuple):
    """A finished part of an epoch: `steps` batches on each of `world_size` ranks."""

    world_size: int
    accumulation: int
    steps: int


class Rest(NamedTuple):
    """The part of an epoch that remains after a stage.

    Attributes:
        samples: int32, the unseen samples of the window in which the stage ended.
        begin: where the next window begins.
        repeated: number of samples that the stages so far have repeated.
    """

    samples: Tensor
    begin: int
    repeated: int


@dataclass
class Window:
    """Rows that are packed together: row b is `samples[begins[b]:ends[b]]`.

    Attributes:
        name: the input of the window's seeds, unique within the epoch.
        end: where the next window begins.
        left_out: int32, samples of the rows that do not fill a step; the next window packs them.
        repeated: number of rows, at the end, that repeat a sample of another row.
        grid: row numbers `[groups, accumulation, world_size]`; None before they are assigned.
    """

    samples: Tensor
    begins: Tensor
    ends: Tensor
    name: tuple[int, ...]
    end: int
    left_out: Tensor
    repeated: int = 0
    grid: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.begins)

    def samples_of(self, rows: Tensor | slice) -> Tensor:
        """Return the samples of the given rows, row after row."""
        begins, counts = self.begins[rows], self.ends[rows] - self.begins[rows]
        shifts = begins - counts.cumsum(0) + counts
        places = torch.arange(int(counts.sum()), device="cpu")
        return self.samples[places + shifts.repeat_interleave(counts)]

    def take_out(self, rows: list[int]) -> list[Tensor]:
        """Remove rows and return the samples of each."""
        taken = [self.samples[self.begins[row] : self.ends[row]] for row in rows]
        stays = torch.ones(self.num_rows, dtype=torch.bool, device="cpu")
        stays[rows] = False
        self.begins, self.ends = self.begins[stays], self.ends[stays]
        return taken

    def append(self, rows: list[list[int]], begin: int) -> None:
        """Append rows and write their samples to `samples`, starting at index `begin`."""
        samples = self.samples.new_tensor([sample for row in rows for sample in row])
        ends = self.ends.new_tensor([len(row) for row in rows]).cumsum(0) + begin
        begins = torch.cat([ends.new_tensor([begin]), ends[:-1]])
        if begin + len(samples) <= len(self.samples):
            self.samples[begin : begin + len(samples)] = samples
        else:
            self.samples = torch.cat([self.samples[:begin], samples])
        self.begins = torch.cat([self.begins, begins])
        self.ends = torch.cat([self.ends, ends])


class Epoch:
    """The rows of one epoch, or of the rest that earlier stages with other rank counts left.

    The first window of a new stage packs the samples that the last stage left of its window. All
    later windows are planned as if the epoch had started with the new number of ranks.

    Args:
        lengths: int32 or int64 `[n_samples]`.
        packing: how the samples are packed and ordered.
        number: number of the epoch.
        world_size: number of ranks.
        accumulation: rows of each rank in one step of the optimizer.
        before: the finished stages, oldest first.
        costs: float64 `[n_samples]`, the cost to balance instead of one of the lengths.
    """

    def __init__(
        self,
        lengths: Tensor,
        packing: Packing,
        number: int,
        world_size: int,
        accumulation: int,
        before: tuple[Stage, ...] = (),
        costs: Tensor | None = None,
    ):
        self._lengths = lengths
        self._given_costs = costs
        self._packing = packing
        self._number = number
        self._world_size = world_size
        self._accumulation = accumulation
        self._before = before
        self._kept: list[Window] | None = None

    def batches(self, rank: int, step: int) -> Iterator[list[int]]:
        """Yield the rows of one rank, starting with row number `step`.

        Raises:
            ValueError: the epoch has fewer than `step` steps.
        """
        passed = 0
        for window in self._windows():
            steps = window.num_rows // self._world_size
            skip = max(0, step - passed)
            if skip < steps:
                yield from self._rows_of(window, rank, skip)
            passed += steps
            del window  # free it before the next one is made
        _check_step(step, passed)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Return the steps of a rank and the samples the epoch repeats, earlier stages included."""
        rows, repeated = 0, self._rest.repeated
        for window in self._windows():
            rows += window.num_rows
            repeated += window.repeated
            del window
        return rows // self._world_size, repeated

    def costs_of_ranks(self, coefficients: Sequence[Sequence[float]]) -> Iterator[list[Tensor]]:
        """Yield, for each window, one float64 `[groups, world_size]` per set of coefficients."""
        for window in self._windows():
            if window.num_rows > 0:
                grid = self._dealt(window)
                yield [self._costs(window, each)[grid].sum(1) for each in coefficients]
                del grid
            del window  # free it before the next one is made

    def rest_after(self, steps: int) -> Rest:
        """Return what remains of the epoch after each rank has had `steps` rows.

        Nothing remains at the end of the epoch. Rows that `drop_last` left out are included only if
        the stage ended before that.
        """
        rows = steps * self._world_size
        repeated = self._rest.repeated
        passed = 0
        for window in self._windows():
            if rows < passed + window.num_rows:
                order = self._dealt(window).flatten()
                seen, unseen = order.split([rows - passed, window.num_rows - rows + passed])
                samples = torch.cat([window.samples_of(unseen), window.left_out])
                if window.repeated > 0:
                    samples, again = _without_repeats(window.samples_of(seen), samples)
                    repeated += again
                return Rest(samples, window.end, repeated)
            passed += window.num_rows
            repeated += window.repeated
            del window
        _check_step(steps, passed // self._world_size)
        return Rest(_no_samples(), len(self._lengths), repeated)

    @cached_property
    def _rest(self) -> Rest:
        """Return what the earlier stages left."""
        if not self._before:
            return Rest(_no_samples(), 0, 0)
        *before, last = self._before
        stage = Epoch(
            self._lengths,
            self._packing,
            self._number,
            last.world_size,
            last.accumulation,
            tuple(before),
            self._given_costs,
        )
        return stage.rest_after(last.steps)

    # ----------------------------------------------------------------------------- its windows

    def _windows(self) -> Iterable[Window]:
        """Return the windows; a single window over the whole set is kept for later passes."""
        buffer = self._packing.buffer
        if buffer is not None and buffer < len(self._lengths):
            return self._planned()
        if self._kept is None:
            self._kept = list(self._planned())
        return self._kept

    def _planned(self) -> Iterator[Window]:
        total, packing = len(self._lengths), self._packing
        size = total if packing.buffer is None else packing.buffer
        seed = self._seed("samples") if packing.shuffle else None
        group = self._world_size * self._accumulation
        carried = self._rest.samples
        for begin, end, name in self._spans(size):
            samples, offsets = _C.pack_window(
                self._lengths, carried, seed, begin, end, packing.capacity, packing.strategy
            )
            window = Window(samples, offsets[:-1], offsets[1:], name, end, _no_samples())
            del samples, offsets
            spare = window.num_rows % group
            if end < total or packing.drop_last:
                if end < total <= end + size and group > 1 and not packing.drop_last:
                    # The last window may be small: this gives it at least one whole group.
                    spare = min(spare + group, window.num_rows)
                self._leave_out(window, spare)
            elif spare > 0:
                self._fill_up(window, spare)
            carried = window.left_out
            yield window
            del window  # free it before the next one is made

    def _spans(self, size: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield the begin, end and name of each window."""
        total = len(self._lengths)
        first = self._rest.begin
        if len(self._rest.samples) > 0:
            yield first, first, (first, len(self._before))
        for begin in range(first, total, max(size, 1)):
            yield begin, min(begin + size, total), (begin,)

    def _leave_out(self, window: Window, spare: int) -> None:
        """Remove `spare` rows from the window and keep their samples in `left_out`."""
        if spare == 0:
            return
        first, end = window.num_rows - spare, window.num_rows
        if self._packing.shuffle:
            seed = self._seed("spare", *window.name)
            rows = _C.permutation(window.num_rows, seed, first, end).tolist()
        else:
            rows = list(range(first, end))
        window.left_out = torch.cat(window.take_out(rows))

    def _fill_up(self, window: Window, spare: int) -> None:
        """Split rows until their number is a multiple of `world_size * accumulation`."""
        missing = self._world_size * self._accumulation - spare
        numbers = rows_to_take_apart(window.ends - window.begins, spare, missing)
        first_spare = int(window.begins[window.num_rows - spare])
        rows = [row.tolist() for row in window.take_out(numbers)]
        lengths = {sample: int(self._lengths[sample]) for row in rows for sample in row}
        if self._given_costs is not None:
            costs = {sample: float(self._given_costs[sample]) for sample in lengths}
        else:
            a, b, c = self._packing.coefficients[0]
            costs = {sample: (a * n + b) * n + c for sample, n in lengths.items()}
        made, window.repeated = take_apart(
            rows, len(rows) + missing, lengths, costs, self._packing.capacity
        )
        window.append(made, first_spare)

    # ----------------------------------------------------------------------------- its ranks

    def _dealt(self, window: Window) -> Tensor:
        """Return row numbers `[groups, accumulation, world_size]`."""
        if window.grid is None:
            seed = self._seed("steps", *window.name) if self._packing.shuffle else None
            shape = (-1, self._accumulation, self._world_size)
            if self._packing.balance is None and self._given_costs is None:
                window.grid = order_of(window.num_rows, seed).view(shape)
            else:
                window.grid = shuffle_groups(self._balanced(window), seed)
        return window.grid

    def _balanced(self, window: Window) -> Tensor:
        """Return row numbers balanced over the ranks; sorting in parts saves memory."""
        group = self._accumulation * self._world_size
        size = max(_ROWS // group, 1) * group
        numbers = torch.empty(window.num_rows, dtype=torch.int64, device="cpu")
        for first, part in zip(range(0, window.num_rows, size), numbers.split(size), strict=True):
            rows = slice(first, first + size)
            if self._given_costs is not None:
                costs = [self._sums(window, self._given_costs, rows)]
            else:
                costs = [self._costs(window, c, rows) for c in self._packing.coefficients]
            torch.add(deal(costs, self._accumulation, self._world_size).flatten(), first, out=part)
        return numbers.view(-1, self._accumulation, self._world_size)

    def _rows_of(self, window: Window, rank: int, skip: int) -> Iterator[list[int]]:
        mine = self._dealt(window)[:, :, rank].flatten()[skip:]
        for rows in mine.split(1024):
            begins, ends = window.begins[rows].tolist(), window.ends[rows].tolist()
            for begin, end in zip(begins, ends, strict=True):
                yield window.samples[begin:end].tolist()

    def _costs(
        self, window: Window, coefficients: Sequence[float], rows: slice = slice(None)
    ) -> Tensor:
        begins, ends = window.begins[rows], window.ends[rows]
        return _C.row_costs(self._lengths, window.samples, begins, ends, *coefficients)

    @staticmethod
    def _sums(window: Window, costs: Tensor, rows: slice) -> Tensor:
        """Return the sum of the costs of each row's samples."""
        counts = window.ends[rows] - window.begins[rows]
        owners = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
        each = costs[window.samples_of(rows).long()]
        return costs.new_zeros(len(counts)).index_add_(0, owners, each)

    def _seed(self, *purpose: str | int) -> int:
        return seed_of(self._packing.seed, self._number, *purpose)


def _no_samples() -> Tensor:
    return torch.empty(0, dtype=torch.int32, device="cpu")


def _check_step(step: int, steps: int) -> None:
    if step > steps:
        raise ValueError(f"step must be at most the {steps} of the epoch, got {step}")


def _without_repeats(seen: Tensor, unseen: Tensor) -> tuple[Tensor, int]:
    """Return each unseen sample once, and how many samples in `seen` are repetitions."""
    once = set(seen.tolist())
    samples = [sample for sample in dict.fromkeys(unseen.tolist()) if sample not in once]
    return unseen.new_tensor(samples), len(seen) - len(once)
