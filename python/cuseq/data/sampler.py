"""`PackedBatchSampler`: batches that are packed rows, the same number on every rank."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from cuseq._arguments import as_int, one_of
from cuseq.data._balance import (
    deal,
    order_of,
    rows_to_take_apart,
    seed_of,
    shuffle_groups,
    take_apart,
)
from cuseq.data._lengths import host_lengths
from cuseq.data._state import refuse_other

if TYPE_CHECKING:
    import numpy

_ops = torch.ops.cuseq

_STRATEGIES = ("bfd", "ffd", "sequential")
_OVERLONG = ("raise", "skip")
_CUTTING = {"strategy": "wrapped", "overlong": "split"}
_STATE_VERSION = 1

# Quadratic, linear and constant coefficient of a sample's length.
_TOKENS = (0.0, 1.0, 0.0)
_ATTENTION = (1.0, 0.0, 0.0)

# Lengths looked at, and rows balanced, in one go, so that a large set needs little more memory.
_CHUNK = 1 << 22
_ROWS = 1 << 17


class Ratio(NamedTuple):
    """Of the slowest rank to the mean of the ranks, over the steps of an epoch; 1.0 is even."""

    mean: float
    max: float


class Imbalance(NamedTuple):
    """How far the slowest rank is from the mean: in tokens, and in squares of the lengths."""

    tokens: Ratio
    attention: Ratio


@dataclass
class _Window:
    """Rows of one window: row b is `samples[begins[b]:ends[b]]`."""

    samples: Tensor
    begins: Tensor
    ends: Tensor
    start: int
    repeated: int = 0
    grid: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.begins)


class PackedBatchSampler(Sampler[list[int]]):
    """Batches of dataset indices whose samples fill one packed row each, for one rank.

    It is a `batch_sampler`: with `PackingCollator` it is all that a DataLoader needs.

    Args:
        lengths: tokens of each sample of the dataset, as for `bin_pack`. int32 and int64 arrays and
            tensors, memory-mapped ones too, are read where they lie and must not change.
        capacity: most tokens of a row.
        rank: which of the ranks this is, in `[0, world_size)`.
        world_size: how many ranks share the epoch.
        strategy: `"bfd"`, `"ffd"` or `"sequential"` as in `bin_pack`. "wrapped" cuts samples, which
            indices cannot say, and is refused.
        balance: what is made even over the ranks: None; `"tokens"`; `"attention"`, the sum of the
            squares of a row's lengths; or coefficients `(quadratic, linear, constant)`, not
            negative, of what n tokens cost: `quadratic * n * n + linear * n +
            constant`. Rows of about equal cost then share a step.
        accumulation: rows of each rank that make one step of the optimizer. What is balanced is
            their sum; the number of rows is a multiple of it.
        overlong: what happens to samples above `capacity`: `"raise"`, or `"skip"`, which leaves
            them out and counts them in `skipped`.
        seed: of the order. Every rank must give the same.
        shuffle: whether samples are put in an order of (seed, epoch) before they are packed, and
            the steps after it. Without it rows come as `strategy` opens them, or, balanced, the
            costliest first.
        drop_last: whether rows that do not fill `world_size * accumulation` are left out; with
            `shuffle` other ones in each epoch.
        buffer: pack the epoch in windows of so many samples, taken in turn from a pseudo-random
            order of the whole set which needs no memory, so memory follows `buffer` and each window
            is a random sample of the set. Rows that do not fill `world_size * accumulation` go into
            the next window. None packs the whole set at once.

    Guarantees: every sample goes to one rank, once; no row holds more than `capacity` tokens; every
    rank has the same number of steps. Where rows are no multiple of `world_size * accumulation`,
    some are taken apart, so that nothing is repeated; only where too few rows (with `buffer` of the
    last window) hold more than one sample are some repeated, counted in `repeated` (`drop_last`
    leaves such rows out instead).

    An epoch is a function of the arguments and the epoch's number. Iterating again without
    `set_epoch` repeats it, as torch's `DistributedSampler` does. Of several iterations at a time
    the state is that of the one that went on last.

    Attributes:
        epoch: number of the epoch, set with `set_epoch`.
        skipped: how many samples are longer than `capacity`.
        repeated: how many samples the current epoch repeats.

    Raises:
        ValueError: a length is negative or above `capacity`, or an argument is out of range; the
            message names it.
        TypeError: lengths or counts are not integers.

    Example:
        >>> lengths = [3, 5, 2, 4, 4, 6]
        >>> sampler = cuseq.data.PackedBatchSampler(lengths, capacity=8, shuffle=False)
        >>> list(sampler)
        [[5, 2], [1, 0], [3, 4]]

        With a DataLoader, on each rank::

            sampler = cuseq.data.PackedBatchSampler(
                lengths, 8192, rank=rank, world_size=world_size, balance="attention"
            )
            loader = DataLoader(
                dataset, batch_sampler=sampler, collate_fn=cuseq.PackingCollator(total_tokens=8192)
            )
            for epoch in range(3):
                sampler.set_epoch(epoch)
                for batch in loader:
                    ...
    """

    def __init__(
        self,
        lengths: Iterable[int] | numpy.ndarray | Tensor,
        capacity: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        strategy: str = "bfd",
        balance: str | Sequence[float] | None = None,
        accumulation: int = 1,
        overlong: str = "raise",
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        buffer: int | None = None,
    ):
        for name, value in (("strategy", strategy), ("overlong", overlong)):
            if value == _CUTTING[name]:
                raise ValueError(
                    f'{name}="{value}" cuts samples, which a batch of dataset indices cannot say: '
                    "use bin_pack and cut the dataset by its starts and lengths"
                )
        self.capacity = as_int(capacity, "capacity", least=1)
        self.world_size = as_int(world_size, "world_size", least=1)
        self.rank = as_int(rank, "rank")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in [0, {self.world_size}), got {rank}")
        self.strategy = one_of(strategy, "strategy", _STRATEGIES)
        self.overlong = one_of(overlong, "overlong", _OVERLONG)
        self.balance = _checked_balance(balance)
        self.accumulation = as_int(accumulation, "accumulation", least=1)
        self.seed = as_int(seed, "seed")
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.buffer = None if buffer is None else as_int(buffer, "buffer", least=1)

        self._lengths = host_lengths(lengths)
        self.skipped = self._check_lengths()
        self.epoch = 0
        self._start = 0  # of the next iteration
        self._step = 0  # batches that were yielded
        self._forget_plan()

    def _check_lengths(self) -> int:
        """Raises what is wrong with the lengths, or counts those above the capacity."""
        skipped = 0
        for begin, chunk in _chunks(self._lengths):
            shortest, longest = (int(value) for value in chunk.aminmax())
            if shortest < 0:
                self._refuse(begin, chunk, chunk < 0, "must not be negative")
            if longest > self.capacity:
                above = chunk > self.capacity
                if self.overlong == "raise":
                    rule = f"must be at most capacity = {self.capacity}"
                    self._refuse(begin, chunk, above, rule, ': overlong="skip" leaves longer out')
                skipped += int(above.sum())
        return skipped

    @staticmethod
    def _refuse(begin: int, chunk: Tensor, wrong: Tensor, rule: str, way_out: str = "") -> None:
        first = int(wrong.int().argmax())
        raise ValueError(f"lengths {rule}, got lengths[{begin + first}] = {chunk[first]}{way_out}")

    # ----------------------------------------------------------------------------- the epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that comes next; the one loaded with `load_state_dict` goes on."""
        epoch = as_int(epoch, "epoch", least=0)
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._start = self._step = 0
        self._forget_plan()

    def __iter__(self) -> Iterator[list[int]]:
        # Told at once, but used up by the first batch only: torchdata's StatefulDataLoader loads a
        # state into what it has called iter() of, and drops iterators that it never starts.
        self._step = self._start
        return self._iterate()

    def _iterate(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        step = self._step = start
        passed = 0
        for window in self._windows():
            steps = window.num_rows // self.world_size
            skip = max(0, step - passed)
            if skip < steps:
                for batch in self._batches(window, skip):
                    step += 1
                    self._step = step
                    yield batch
            passed += steps
            del window  # the next one is made meanwhile
        if step > passed:
            raise ValueError(f"step must be at most the {passed} of the epoch, got {step}")
        if start == passed > 0:
            # With workers StatefulDataLoader starts an iterator that it drops, then another one.
            self._start = start
            warnings.warn(
                f"the state that was loaded is of the end of epoch {self.epoch}, of which nothing "
                "is left: set_epoch chooses another one",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Batches of the epoch, the same on every rank.

        With `buffer` that takes a pass over all windows, once for each epoch.
        """
        return self._counted[0]

    @property
    def repeated(self) -> int:
        return self._counted[1]

    def imbalance(self) -> Imbalance:
        """How far the slowest rank of a step of the optimizer is from the mean of the ranks.

        Returns:
            An `Imbalance`: `tokens` and `attention`, each with `mean` and `max` over the steps of
            the current epoch; 1.0 is even. With `buffer` it takes a pass over all windows.
        """
        totals, largest, groups = [0.0, 0.0], [1.0, 1.0], 0
        for window in self._windows():
            if window.num_rows == 0:
                continue
            grid = self._dealt(window)
            groups += len(grid)
            for i, coefficients in enumerate((_TOKENS, _ATTENTION)):
                ranks = self._costs(window, coefficients)[grid].sum(1)
                # A step without any cost is even.
                ratios = (ranks.amax(1) / ranks.mean(1)).nan_to_num(1.0)
                totals[i] += float(ratios.sum())
                largest[i] = max(largest[i], float(ratios.max()))
            del window, grid, ranks, ratios  # the next one is made meanwhile
        means = [total / groups if groups else 1.0 for total in totals]
        return Imbalance(Ratio(means[0], largest[0]), Ratio(means[1], largest[1]))

    # ----------------------------------------------------------------------------- its state

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, to go on from there after `load_state_dict`.

        Args:
            steps: how many batches of this epoch were used. Default those that were yielded, which
                with DataLoader workers is more, since they fetch ahead: count your own there. The
                StatefulDataLoader of torchdata keeps count itself; it loads when it is next
                iterated, so call `set_epoch` for another epoch after that.

        Returns:
            A dict of plain values, the same on every rank. At the end of an epoch it says so: once
            it is loaded, iterations yield nothing, with a warning, until `set_epoch` chooses
            another epoch.

        Raises:
            ValueError: `steps` is beyond the epoch.
        """
        step = self._step
        if steps is not None:
            step = as_int(steps, "steps", least=0)
            if step > len(self):
                raise ValueError(
                    f"steps must be at most the {len(self)} batches of the epoch, got {steps}"
                )
        return {"epoch": self.epoch, "step": step, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where `state` was taken.

        Raises:
            ValueError: the state is of other lengths or arguments; the message says which differ.
                During the iteration: its step is beyond the epoch.
            TypeError: it is no state.
        """
        refuse_other(state, self._settings(), ("epoch", "step"))
        self.set_epoch(state["epoch"])
        self._start = self._step = as_int(state["step"], "step", least=0)

    def _settings(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "lengths": self._fingerprint,
            "capacity": self.capacity,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "balance": list(self.balance) if isinstance(self.balance, tuple) else self.balance,
            "accumulation": self.accumulation,
            "overlong": self.overlong,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "buffer": self.buffer,
        }

    @cached_property
    def _fingerprint(self) -> str:
        """Of the lengths' number and values, whatever type they have."""
        digest = hashlib.blake2b(digest_size=12)
        for _, chunk in _chunks(self._lengths):
            values = chunk.to(torch.int64).contiguous()
            digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
        return f"{len(self._lengths)}:{digest.hexdigest()}"

    # ----------------------------------------------------------------------------- its plan

    def _forget_plan(self) -> None:
        self._kept: list[_Window] | None = None
        self.__dict__.pop("_counted", None)

    def _windows(self) -> Iterable[_Window]:
        """The windows of the epoch; one that holds the whole set is kept."""
        if self.buffer is not None and self.buffer < len(self._lengths):
            return self._plan()
        if self._kept is None:
            self._kept = list(self._plan())
        return self._kept

    def _plan(self) -> Iterator[_Window]:
        total = len(self._lengths)
        size = total if self.buffer is None else self.buffer
        seed = self._seed("samples") if self.shuffle else None
        carried = torch.empty(0, dtype=torch.int32, device="cpu")
        for begin in range(0, total, max(size, 1)):
            end = min(begin + size, total)
            samples, offsets = _ops.pack_window(
                self._lengths, carried, seed, begin, end, self.capacity, self.strategy
            )
            window = _Window(samples, offsets[:-1], offsets[1:], begin)
            del samples, offsets
            group = self.world_size * self.accumulation
            spare = window.num_rows % group
            if end < total or self.drop_last:
                if end < total <= end + size and group > 1 and not self.drop_last:
                    # However small the last window is, it has a whole group to make even.
                    spare = min(spare + group, window.num_rows)
                carried = self._leave_out(window, spare)
            elif spare > 0:
                self._fill_up(window, spare)
            yield window
            del window  # before the next one is made

    def _leave_out(self, window: _Window, spare: int) -> Tensor:
        """Takes so many rows out of the window and returns their samples."""
        if spare == 0:
            return window.samples.new_empty(0)
        first, end = window.num_rows - spare, window.num_rows
        if self.shuffle:
            seed = self._seed("spare", window.start)
            rows = _ops.permutation(window.num_rows, seed, first, end).tolist()
        else:
            rows = list(range(first, end))
        return torch.cat(_take_out(window, rows))

    def _fill_up(self, window: _Window, spare: int) -> None:
        """Takes rows apart until the rows are a multiple of what a step of all ranks needs."""
        missing = self.world_size * self.accumulation - spare
        numbers = rows_to_take_apart(window.ends - window.begins, spare, missing)
        first_spare = int(window.begins[window.num_rows - spare])
        rows = [row.tolist() for row in _take_out(window, numbers)]
        lengths = {sample: int(self._lengths[sample]) for row in rows for sample in row}
        a, b, c = self._coefficients[0]
        costs = {sample: (a * n + b) * n + c for sample, n in lengths.items()}
        made, window.repeated = take_apart(rows, len(rows) + missing, lengths, costs, self.capacity)
        _write_rows(window, made, first_spare)

    def _dealt(self, window: _Window) -> Tensor:
        """Row numbers `[groups, accumulation, world_size]`."""
        if window.grid is None:
            seed = self._seed("steps", window.start) if self.shuffle else None
            shape = (-1, self.accumulation, self.world_size)
            if self.balance is None:
                window.grid = order_of(window.num_rows, seed).view(shape)
            else:
                window.grid = shuffle_groups(self._balanced(window), seed)
        return window.grid

    def _balanced(self, window: _Window) -> Tensor:
        """The same with even ranks, sorted by cost in parts that spare memory."""
        group = self.accumulation * self.world_size
        size = max(_ROWS // group, 1) * group
        numbers = torch.empty(window.num_rows, dtype=torch.int64, device="cpu")
        for first, part in zip(range(0, window.num_rows, size), numbers.split(size), strict=True):
            rows = slice(first, first + size)
            costs = [self._costs(window, c, rows) for c in self._coefficients]
            torch.add(deal(costs, self.accumulation, self.world_size).flatten(), first, out=part)
        return numbers.view(-1, self.accumulation, self.world_size)

    def _batches(self, window: _Window, skip: int) -> Iterator[list[int]]:
        mine = self._dealt(window)[:, :, self.rank].flatten()[skip:]
        for rows in mine.split(1024):
            begins, ends = window.begins[rows].tolist(), window.ends[rows].tolist()
            for begin, end in zip(begins, ends, strict=True):
                yield window.samples[begin:end].tolist()

    def _costs(
        self, window: _Window, coefficients: Sequence[float], rows: slice = slice(None)
    ) -> Tensor:
        begins, ends = window.begins[rows], window.ends[rows]
        return _ops.row_costs(self._lengths, window.samples, begins, ends, *coefficients)

    @property
    def _coefficients(self) -> list[Sequence[float]]:
        """What is balanced, and what decides among equals."""
        if self.balance == "attention":
            return [_ATTENTION, _TOKENS]
        if self.balance is None or self.balance == "tokens":
            return [_TOKENS, _ATTENTION]
        return [self.balance]

    @cached_property
    def _counted(self) -> tuple[int, int]:
        """Steps of a rank, and samples that are repeated."""
        rows = repeated = 0
        for window in self._windows():
            rows += window.num_rows
            repeated += window.repeated
            del window
        return rows // self.world_size, repeated

    def _seed(self, *purpose: str | int) -> int:
        return seed_of(self.seed, self.epoch, *purpose)


def _checked_balance(balance: Any) -> str | tuple[float, float, float] | None:
    if balance is None or (isinstance(balance, str) and balance in ("tokens", "attention")):
        return balance
    try:
        if isinstance(balance, str):
            raise ValueError("no such name")
        quadratic, linear, constant = (float(value) for value in balance)
    except (TypeError, ValueError):
        coefficients = None
    else:
        coefficients = (quadratic, linear, constant)
    if coefficients is None or not all(0 <= value < float("inf") for value in coefficients):
        raise ValueError(
            'balance must be None, "tokens", "attention" or three coefficients (quadratic, linear, '
            f"constant) that are not negative, got {balance!r}"
        )
    return coefficients


def _chunks(lengths: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(lengths), _CHUNK):
        yield begin, lengths[begin : begin + _CHUNK]


def _take_out(window: _Window, rows: list[int]) -> list[Tensor]:
    """Takes rows out of the window and returns the samples of each."""
    taken = [window.samples[window.begins[row] : window.ends[row]] for row in rows]
    stays = torch.ones(window.num_rows, dtype=torch.bool, device="cpu")
    stays[rows] = False
    window.begins, window.ends = window.begins[stays], window.ends[stays]
    return taken


def _write_rows(window: _Window, rows: list[list[int]], begin: int) -> None:
    """Puts rows at the end, their samples from `begin` on."""
    samples = window.samples.new_tensor([sample for row in rows for sample in row])
    ends = window.ends.new_tensor([len(row) for row in rows]).cumsum(0) + begin
    begins = torch.cat([ends.new_tensor([begin]), ends[:-1]])
    if begin + len(samples) <= len(window.samples):
        window.samples[begin : begin + len(samples)] = samples
    else:
        window.samples = torch.cat([window.samples[:begin], samples])
    window.begins = torch.cat([window.begins, begins])
    window.ends = torch.cat([window.ends, ends])
