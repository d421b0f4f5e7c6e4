"""`PackedBatchSampler`, whose batches are packed rows, the same number on every rank."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from cuseq._base.arguments import as_int, as_rank, check_flag, check_tensor, one_of, shown
from cuseq.data._balance import coefficients_of
from cuseq.data._epoch import ATTENTION, TOKENS, Epoch, Packing, Stage
from cuseq.data._lengths import host_lengths
from cuseq.data._state import (
    checked_ranks,
    checked_stage,
    checked_stages,
    options_in,
    refuse_other,
)

if TYPE_CHECKING:
    import numpy

_STRATEGIES = ("bfd", "ffd", "sequential")
_OVERLONG = ("raise", "skip")
_CUTTING = {"strategy": "wrapped", "overlong": "split"}
_STATE_VERSION = 2
_OPTIONS = (
    "capacity", "rank", "world_size", "strategy", "balance", "accumulation", "overlong", "seed",
    "shuffle", "drop_last", "buffer",
)  # fmt: skip
_POSITION = ("epoch", "step", "world_size", "accumulation", "before")

# Lengths read at a time, which bounds the extra memory for a large set.
_CHUNK = 1 << 22


class Ratio(NamedTuple):
    """Ratio of the costliest rank to the mean of the ranks, over all steps; 1.0 is even."""

    mean: float
    max: float


class Imbalance(NamedTuple):
    """Ratio of the costliest rank to the mean: in tokens, and in squared sequence lengths."""

    tokens: Ratio
    attention: Ratio


class _Position(NamedTuple):
    """The position of an iteration in its epoch.

    Attributes:
        before: the finished parts of the epoch, which ran with other numbers of ranks.
        step: batches that each rank has had since then.
    """

    before: tuple[Stage, ...] = ()
    step: int = 0


class PackedBatchSampler(Sampler[list[int]]):
    """Batch sampler whose batches are lists of dataset indices, one packed row of this rank each.

    Give it to a DataLoader as `batch_sampler`, with `PackingCollator` as `collate_fn`.

    Args:
        lengths: tokens of each sample of the dataset, as for `bin_pack`. int32 and int64 arrays and
            tensors, memory-mapped ones too, are read without a copy and must not change.
        capacity: most tokens of a row.
        rank: number of this rank, in `[0, world_size)`.
        world_size: number of ranks that share the epoch.
        strategy: `"bfd"`, `"ffd"` or `"sequential"` as in `bin_pack`. "wrapped" is refused, because
            it cuts samples, which a list of indices cannot express.
        balance: the cost to balance over the ranks: None; `"tokens"`; `"attention"`, the sum of the
            squared lengths of a row; or non-negative coefficients `(quadratic, linear, constant)`
            for a cost of `quadratic * n * n + linear * n + constant` per sample of n tokens. Rows
            of about equal cost then share a step.
        costs: cost of each sample, `[n_samples]`, finite and not negative: a list, an array or a
            tensor on the CPU. Balances these instead of lengths, such as the modelled costs of
            groups of GRPO or DPO, whose lengths are their unique tokens. `balance` must be None.
        accumulation: rows of each rank in one step of the optimizer. Their total cost is balanced;
            the number of rows of each rank is a multiple of it.
        overlong: how to treat samples longer than `capacity`: `"raise"` a ValueError, or `"skip"`
            them and count them in `skipped`.
        seed: seed of the order, the same on every rank.
        shuffle: whether to shuffle the samples by (seed, epoch) before packing, and the steps after
            packing. Without it rows come in the order in which `strategy` opens them or, if
            balanced, the costliest first.
        drop_last: whether to leave out rows that do not fill `world_size * accumulation`. With
            `shuffle` these are different rows in each epoch.
        buffer: number of samples in a window. The epoch is packed one window at a time. The windows
            are taken from a pseudo-random order of the whole set that needs no memory, so memory
            grows with `buffer` and each window is a random sample of the set. Rows that do not
            fill `world_size * accumulation` go into the next window. None packs the whole set at
            once.

    Guarantees: every sample goes to exactly one rank, once; no row holds more than `capacity`
    tokens; every rank has the same number of steps. If the number of rows is not a multiple of
    `world_size * accumulation`, some rows are split, so that no sample is repeated. Samples are
    repeated, and counted in `repeated`, only if too few rows (of the last window, with `buffer`)
    hold more than one sample. `drop_last` leaves such rows out instead.

    A state counts the rows of all ranks together, so any number of ranks can resume from it. The
    same number of ranks gets the rows it would have got. Another number plans the rest of the epoch
    anew, from the samples that no rank has had; each of them again goes to one rank, once.

    An epoch depends only on the arguments and the number of the epoch. Iterating again without
    `set_epoch` repeats it, as torch's `DistributedSampler` does. With several iterators at a time,
    the state is that of the one that advanced last.

    Attributes:
        epoch: number of the epoch, set with `set_epoch`.
        skipped: number of samples longer than `capacity`.
        repeated: number of samples that the current epoch repeats.

    Raises:
        ValueError: a length is negative or above `capacity`, or an argument is out of range; the
            message names it.
        TypeError: lengths or counts are not integers.

    Examples:
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
        costs: Sequence[float] | numpy.ndarray | Tensor | None = None,
        accumulation: int = 1,
        overlong: str = "raise",
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        buffer: int | None = None,
    ):
        for name, value in (("strategy", strategy), ("overlong", overlong)):
            if isinstance(value, str) and value == _CUTTING[name]:
                raise ValueError(
                    f'{name} must not be "{value}", which cuts samples: a batch of dataset indices '
                    "holds whole ones; use bin_pack and cut the dataset by its starts and lengths"
                )
        self.capacity = as_int(capacity, "capacity", least=1)
        self.world_size, self.accumulation = checked_ranks(world_size, accumulation)
        self.rank = as_rank(rank, self.world_size)
        self.strategy = one_of(strategy, "strategy", _STRATEGIES)
        self.overlong = one_of(overlong, "overlong", _OVERLONG)
        self.balance = _checked_balance(balance)
        self.seed = as_int(seed, "seed")
        check_flag(shuffle, "shuffle")
        check_flag(drop_last, "drop_last")
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.buffer = None if buffer is None else as_int(buffer, "buffer", least=1)

        self._lengths = host_lengths(lengths)
        self.skipped = self._check_lengths()
        self._costs = None if costs is None else self._checked_costs(costs)
        self.epoch = 0
        self._next = _Position()  # where the next iteration starts
        self._position = _Position()  # of the iterator that advanced last
        self._epochs: dict[tuple[Stage, ...], Epoch] = {}

    def _check_lengths(self) -> int:
        """Raise ValueError if a length is invalid; otherwise return how many exceed `capacity`."""
        skipped = 0
        for begin, chunk in _chunks(self._lengths):
            shortest, longest = (int(value) for value in chunk.aminmax())
            if shortest < 0:
                self._refuse(begin, chunk, chunk < 0, "must not be negative")
            if longest > self.capacity:
                above = chunk > self.capacity
                if self.overlong == "raise":
                    rule = f"must be at most capacity = {self.capacity}"
                    self._refuse(begin, chunk, above, rule, ': overlong="skip" leaves it out')
                skipped += int(above.sum())
        return skipped

    def _checked_costs(self, costs: Any) -> Tensor:
        """Return the costs of the samples as float64."""
        if self.balance is not None:
            raise ValueError(f"balance must be None if costs are given, got {self.balance!r}")
        if isinstance(costs, Tensor):
            check_tensor(costs, "costs")
        try:
            given = torch.as_tensor(costs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"costs must be numbers, got {shown(costs)}") from error
        if given.device.type != "cpu":
            raise ValueError(
                f"costs must lie on the CPU, where rows are planned, got {given.device}: copy them "
                "with .cpu()"
            )
        if given.is_complex():
            raise TypeError(f"costs must be real numbers, got {given.dtype}")
        values = given.detach().to(torch.float64)
        if values.shape != self._lengths.shape:
            raise ValueError(
                f"costs must have one number for each of the {len(self._lengths)} samples, got "
                f"shape {tuple(values.shape)}"
            )
        wrong = ~((values >= 0) & values.isfinite())
        if bool(wrong.any()):
            first = int(wrong.int().argmax())
            raise ValueError(
                f"costs must be finite and not negative, got costs[{first}] = {values[first]}"
            )
        return values

    @staticmethod
    def _refuse(begin: int, chunk: Tensor, wrong: Tensor, rule: str, way_out: str = "") -> None:
        first = int(wrong.int().argmax())
        raise ValueError(f"lengths {rule}, got lengths[{begin + first}] = {chunk[first]}{way_out}")

    # ----------------------------------------------------------------------------- the epoch

    def set_epoch(self, epoch: int) -> None:
        """Select the next epoch.

        Does nothing if `epoch` is the current one, so an epoch that was loaded with
        `load_state_dict` continues.
        """
        epoch = as_int(epoch, "epoch", least=0)
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._next = self._position = _Position()
        self._epochs.clear()

    def __iter__(self) -> Iterator[list[int]]:
        # The position is set here, but a loaded state is consumed by the first batch only:
        # torchdata's StatefulDataLoader calls iter() before it loads a state, and drops some
        # iterators without ever starting them.
        self._position = self._next
        return self._iterate()

    def _iterate(self) -> Iterator[list[int]]:
        start, self._next = self._next, _Position()
        self._position = start
        batches = self._epoch_after(start.before).batches(self.rank, start.step)
        for step, batch in enumerate(batches, start.step + 1):
            self._position = _Position(start.before, step)
            yield batch
        if start != _Position() and self._position == start:
            # With workers StatefulDataLoader starts one iterator, drops it and starts another.
            self._next = start
            warnings.warn(
                f"the loaded state was saved at the end of epoch {self.epoch}, which has no "
                "batches left: call set_epoch",
                stacklevel=2,
            )

    def _epoch_after(self, before: tuple[Stage, ...]) -> Epoch:
        """Return the epoch, or the rest of it after the stages in `before`."""
        if before not in self._epochs:
            packing = Packing(
                capacity=self.capacity,
                strategy=self.strategy,
                balance=self.balance,
                seed=self.seed,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
                buffer=self.buffer,
            )
            self._epochs[before] = Epoch(
                self._lengths,
                packing,
                self.epoch,
                self.world_size,
                self.accumulation,
                before,
                self._costs,
            )
        return self._epochs[before]

    @property
    def _current(self) -> Epoch:
        return self._epoch_after(self._position.before)

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same on every rank.

        If a state of another number of ranks was loaded, these are the batches that remain for each
        of the present ranks. With `buffer` this takes a pass over all windows, once per epoch.
        """
        return self._current.counts[0]

    @property
    def repeated(self) -> int:
        return self._current.counts[1]

    def imbalance(self) -> Imbalance:
        """Compute the cost of the costliest rank of an optimizer step over the mean of the ranks.

        Returns:
            An `Imbalance`: `tokens` and `attention`, each with `mean` and `max` over the steps of
            the current epoch; 1.0 is even. With `buffer` this takes a pass over all windows.
        """
        totals, largest, groups = [0.0, 0.0], [1.0, 1.0], 0
        for costs in self._current.costs_of_ranks((TOKENS, ATTENTION)):
            groups += len(costs[0])
            for i, ranks in enumerate(costs):
                # Where all costs are 0 the ratio is NaN: such a step is even.
                ratios = (ranks.amax(1) / ranks.mean(1)).nan_to_num(1.0)
                totals[i] += float(ratios.sum())
                largest[i] = max(largest[i], float(ratios.max()))
            del costs, ranks, ratios  # free them before the next window is made
        means = [total / groups if groups else 1.0 for total in totals]
        return Imbalance(Ratio(means[0], largest[0]), Ratio(means[1], largest[1]))

    # ----------------------------------------------------------------------------- its state

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, from which `load_state_dict` resumes.

        Args:
            steps: number of batches of this epoch that were used; if a state of another number of
                ranks was loaded, counted from there. Default: the batches yielded. DataLoader
                workers fetch ahead, so with workers count the used batches yourself. torchdata's
                StatefulDataLoader keeps this count itself. It loads a state when it is next
                iterated, so call `set_epoch` for another epoch after that.

        Returns:
            A dict of plain values, the same on every rank. A state from the end of an epoch records
            that: once it is loaded, iterations yield nothing and warn, until `set_epoch` selects
            another epoch.

        Raises:
            ValueError: `steps` is beyond the end of the epoch.
        """
        before, step = self._position
        if steps is not None:
            step = as_int(steps, "steps", least=0)
            if step > len(self):
                raise ValueError(
                    f"steps must be at most the {len(self)} batches of the epoch, got {steps}"
                )
        return {
            "epoch": self.epoch,
            "step": step,
            "world_size": self.world_size,
            "accumulation": self.accumulation,
            "before": [list(stage) for stage in before],
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where `state` was taken.

        A state of another `world_size` counts the rows of all its ranks together; the present ranks
        share the rest. `accumulation` may then differ too, so that a step of the optimizer can keep
        its size. Steps are counted from there: step 0 is the first batch of the present ranks, and
        `len(sampler)` is the number of batches that remain for each. With `drop_last`, rows that
        were left out for the former ranks are shared too, unless the epoch had ended.

        With torchdata's StatefulDataLoader keep `snapshot_every_n_steps=1`, its default. Otherwise
        it replays the steps since its last snapshot, and with another number of ranks those are
        different rows.

        Raises:
            ValueError: the state was taken with other lengths or arguments; the message says which
                differ. Raised during the iteration: the step is beyond the end of the epoch.
            TypeError: `state` is not what `state_dict` returns.
        """
        if isinstance(state, Mapping):
            state = {"costs": None, **state}  # saved before there were costs
        refuse_other(state, self._settings(), _POSITION)
        position = self._position_of(state)
        self.set_epoch(state["epoch"])
        self._next = self._position = position
        # Only the plan of the whole epoch can be used again.
        self._epochs = {before: epoch for before, epoch in self._epochs.items() if before == ()}

    def _position_of(self, state: Mapping[str, Any]) -> _Position:
        stages = checked_stages(state["before"])
        last = [state[name] for name in ("world_size", "accumulation", "step")]
        stages.append(checked_stage(last))
        ranks = (self.world_size, self.accumulation)
        if stages[-1].world_size == self.world_size and stages[-1][:2] != ranks:
            raise ValueError(
                "state must be of the same accumulation on the same number of ranks, but it is "
                f"{self.accumulation} and was {stages[-1].accumulation}"
            )
        while stages and stages[-1].steps == 0:
            stages.pop()
        step = stages.pop().steps if stages and stages[-1][:2] == ranks else 0
        return _Position(tuple(stages), step)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}}  # which are planned again

    def __setstate__(self, pickled: Any) -> None:
        """Check what a pickle says as arguments and states are; a subclass may hold more."""
        options = options_in(pickled, _OPTIONS)
        place = options_in(pickled, ("_lengths", "_costs", "epoch", "_next", "_position"))
        lengths, costs, epoch, *positions = place.values()
        PackedBatchSampler.__init__(self, lengths, costs=costs, **options)
        self.epoch = as_int(epoch, "epoch", least=0)
        self._next, self._position = map(_checked_position, positions)
        self.__dict__ |= {name: pickled[name] for name in pickled if name not in self.__dict__}

    def _settings(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "lengths": self._fingerprint,
            "costs": self._fingerprint_of_costs,
            "capacity": self.capacity,
            "strategy": self.strategy,
            "balance": list(self.balance) if isinstance(self.balance, tuple) else self.balance,
            "overlong": self.overlong,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "buffer": self.buffer,
        }

    @cached_property
    def _fingerprint(self) -> str:
        """Return a hash of the number and values of the lengths, independent of their dtype."""
        digest = hashlib.blake2b(digest_size=12)
        for _, chunk in _chunks(self._lengths):
            _add(digest, chunk.to(torch.int64))
        return f"{len(self._lengths)}:{digest.hexdigest()}"

    @cached_property
    def _fingerprint_of_costs(self) -> str | None:
        if self._costs is None:
            return None
        digest = hashlib.blake2b(digest_size=12)
        _add(digest, self._costs)
        return digest.hexdigest()


def _add(digest: hashlib.blake2b, values: Tensor) -> None:
    """Add the bytes of a tensor on the CPU to a hash."""
    values = values.contiguous()
    digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


def _checked_balance(balance: Any) -> str | tuple[float, float, float] | None:
    if balance is None or (isinstance(balance, str) and balance in ("tokens", "attention")):
        return balance
    coefficients = coefficients_of(balance)
    if coefficients is None:
        raise ValueError(
            'balance must be None, "tokens", "attention" or three coefficients (quadratic, linear, '
            f"constant) that are not negative, got {shown(balance)}"
        )
    return coefficients


def _chunks(lengths: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(lengths), _CHUNK):
        yield begin, lengths[begin : begin + _CHUNK]


def _checked_position(position: Any) -> _Position:
    if not isinstance(position, tuple) or len(position) != 2:
        raise TypeError(f"_next and _position must be (before, step), got {shown(position)}")
    before, step = position
    return _Position(tuple(checked_stages(before)), as_int(step, "step", least=0))
