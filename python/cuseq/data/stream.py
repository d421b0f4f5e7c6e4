"""`PackedStream`, which packs an iterable of unknown length one window at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cuseq import _C
from cuseq._base.arguments import as_int, as_rank, check_flag, check_tensor, one_of, shown
from cuseq.data._balance import rows_to_take_apart, seed_of, take_apart
from cuseq.data._state import checked_held, checked_ranks, options_in, refuse_other

_STRATEGIES = ("bfd", "ffd", "sequential")
_OVERLONG = ("raise", "skip")
_MOST_WINDOWS = 8  # most windows that may hold the same sample
_STATE_VERSION = 2
_OPTIONS = (
    "iterable", "capacity", "window", "strategy", "length", "rank", "world_size", "shuffle",
    "overlong", "drop_last",
)  # fmt: skip
_COUNTS = ("window_number", "done", "consumed", "skipped")
_END = object()
_OF_PYTHON = ("builtins", "itertools")  # modules of iterators that cannot start again


class _Held(NamedTuple):
    """A sample in the window, with its number in the stream and the window that first held it."""

    number: int
    since: int
    length: int
    sample: Any


class _Window(NamedTuple):
    """A packed window: the rows to yield, in order over all ranks, and the samples that stay."""

    rows: list[list[_Held]]
    staying: list[_Held]


class _Pass:
    """The position of one pass: the state of its window, and how much of the stream was read."""

    def __init__(self, position: dict[str, Any]):
        self.position = position
        self.consumed = position["consumed"]
        self.skipped = position["skipped"]

    @property
    def window(self) -> int:
        return self.position["window_number"]


class PackedStream(IterableDataset[list[Any]]):
    """IterableDataset that packs samples from an iterable of unknown length into rows.

    A row is a list of samples. The stream holds at most `window` samples. It fills the window,
    packs it and yields all rows but the emptiest, whose samples stay in the window to be packed
    with the samples that follow. At most `world_size` rows stay, and no sample stays for more than
    8 windows. With "sequential" the last rows stay, so that samples keep the order of the stream.

    Give it to a DataLoader with `batch_size=None` and `PackingCollator` as `collate_fn`. Each
    worker would read the whole stream, so `num_workers` must be 0 or 1. With one worker the pass
    and its state are in the worker's process: torchdata's StatefulDataLoader fetches that state,
    while `state_dict` of the main process's object does not see it.

    Args:
        iterable: an iterable of samples. A pass starts with `iter(iterable)`, so a generator has
            one pass; to resume in it, make it anew.
        capacity: most tokens of a row.
        window: most samples to hold, at least `world_size`. A larger window makes fuller rows.
        strategy: `"bfd"`, `"ffd"` or `"sequential"` as in `bin_pack`.
        length: function that returns the tokens of a sample; default `len(sample["input_ids"])`.
        rank: number of this rank, in `[0, world_size)`.
        world_size: number of ranks that share the stream. Each rank reads the whole stream, packs
            the same rows and yields its own, so the stream must be the same on every rank.
        shuffle: whether to shuffle the samples of each window, and its rows, by `seed`.
        seed: seed of that order, the same on every rank. Every pass repeats the order; set the
            attribute `seed` before a pass to change it.
        overlong: how to treat samples longer than `capacity`: `"raise"` a ValueError, or `"skip"`
            them and count them in `skipped`.
        drop_last: whether to leave out the rows at the end of the stream that do not fill
            `world_size`.

    Guarantees: every sample goes to exactly one rank, once in each pass; no row holds more than
    `capacity` tokens; every rank has the same number of rows. To keep that number equal, rows may
    be split at the end of the stream, and in a window that makes fewer rows than there are ranks.
    Samples are repeated only if too few of these rows hold more than one sample (at the end of the
    stream `drop_last` leaves such rows out instead).

    Attributes:
        skipped: number of samples longer than `capacity` in the pass that advanced last.

    Raises:
        ValueError: an argument is out of range or, during the pass, a length is negative or above
            `capacity`; the message names it and the sample's number in the stream. Or the iterable
            is a generator, or another iterator of Python's, that a pass has read already.
        RuntimeError: a DataLoader has more than one worker.

    Examples:
        >>> samples = ({"input_ids": [7] * n} for n in [3, 5, 2, 4, 4, 6])
        >>> for row in cuseq.data.PackedStream(samples, capacity=8):
        ...     print([len(sample["input_ids"]) for sample in row])
        [6, 2]
        [5, 3]
        [4, 4]
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        capacity: int,
        *,
        window: int = 1024,
        strategy: str = "bfd",
        length: Callable[[Any], int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        overlong: str = "raise",
        drop_last: bool = False,
    ):
        if length is not None and not callable(length):
            raise TypeError(f"length must be a function of a sample, got {shown(length)}")
        check_flag(shuffle, "shuffle")
        check_flag(drop_last, "drop_last")
        self.iterable: Any = iterable  # some have `state_dict` and `load_state_dict`
        self.capacity = as_int(capacity, "capacity", least=1)
        self.world_size, _ = checked_ranks(world_size)
        self.rank = as_rank(rank, self.world_size)
        self.window = as_int(window, "window", least=self.world_size)
        self.strategy = one_of(strategy, "strategy", _STRATEGIES)
        self.length = _tokens if length is None else length
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.overlong = one_of(overlong, "overlong", _OVERLONG)
        self.drop_last = bool(drop_last)
        self._pass = self._new_pass()  # the pass that advanced last
        self._loaded: _Pass | None = None  # the next pass, if a state was loaded
        self._source_start: Any = None  # the iterable's own state before its first pass, if any
        self._source_moved = False  # whether another state was loaded into the iterable since
        self._begun: Any = None  # the iterable that a pass has begun to read, if it is an iterator

    @property
    def seed(self) -> int:
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = as_int(seed, "seed")

    @property
    def skipped(self) -> int:
        return self._pass.skipped

    # ----------------------------------------------------------------------------- the pass

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                "num_workers must be 0 or 1 for a PackedStream, since each worker would read and "
                f"repeat the whole stream, got {worker.num_workers}"
            )
        # The position is set here, but a loaded state is consumed by the first row only:
        # torchdata's StatefulDataLoader drops some iterators without ever starting them.
        self._pass = self._loaded or self._new_pass()
        return self._rows()

    def _new_pass(self) -> _Pass:
        position: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        return _Pass(position | {"world_size": self.world_size, "held": [], "source": None})

    def _rows(self) -> Iterator[list[Any]]:
        loaded, self._loaded = self._loaded, None
        at = self._pass = loaded or self._new_pass()
        samples, held = self._resumed(at) if loaded else (self._from_the_start(), [])
        ended = self._refill(at, held, samples)
        if at.position["world_size"] != self.world_size:
            held, ended = self._left_by_other_ranks(at, held, samples, ended)
            if ended and not held:
                return
        while True:
            window = self._packed(at, held, ended, self.world_size)
            done = _checked_done(at, window)
            # Reversed, so that pop() releases each row as it is yielded.
            rows = [_samples_of(row) for row in window.rows[self.rank :: self.world_size]]
            held = window.staying
            del window
            rows = rows[done:][::-1]
            while rows:
                at.position["done"] += 1
                self._pass = at
                yield rows.pop()
            if ended:
                return
            at.position = self._window_start(at, held)
            ended = self._refill(at, held, samples)

    def _left_by_other_ranks(
        self, at: _Pass, held: list[_Held], samples: Iterator[Any], ended: bool
    ) -> tuple[list[_Held], bool]:
        """Return a window of the samples that a state of another number of ranks left unseen.

        Also returns whether the stream has ended. Nothing is left if the pass had reached its end.
        """
        world_size = at.position["world_size"]
        window = self._packed(at, held, ended, world_size)
        done = _checked_done(at, window)
        seen = {entry.number for row in window.rows[: done * world_size] for entry in row}
        if ended and done * world_size == len(window.rows):
            return [], True
        if done == 0:  # no rank has had a row of this window: pack it for the present ranks
            at.position["world_size"] = self.world_size
            return held, ended
        left = [entry for entry in held if entry.number not in seen]
        at.position = self._window_start(at, left)
        return left, self._refill(at, left, samples)

    def _window_start(self, at: _Pass, held: list[_Held]) -> dict[str, Any]:
        """Return the state at the start of the next window, which begins with `held`."""
        stateful = self._is_stateful()
        return {
            "window_number": at.window + 1,
            "done": 0,
            "world_size": self.world_size,
            "consumed": at.consumed,
            "skipped": at.skipped,
            # Copies, because the consumer of a sample may modify it.
            "held": [
                [e.number, e.since, copy.deepcopy(e.sample) if stateful else None] for e in held
            ],
            "source": copy.deepcopy(self.iterable.state_dict()) if stateful else None,
        }

    def _is_stateful(self) -> bool:
        methods = ("state_dict", "load_state_dict")
        return all(hasattr(self.iterable, method) for method in methods)

    def _from_the_start(self) -> Iterator[Any]:
        """Return an iterator over all samples.

        The iterable's start state is loaded first if another state was loaded, because some
        iterables resume from a loaded state in every later pass.
        """
        self._note_start()
        if self._source_moved:
            self.iterable.load_state_dict(copy.deepcopy(self._source_start))
            self._source_moved = False
        try:
            samples = iter(self.iterable)
        except TypeError as error:
            raise TypeError(
                f"iterable must be an iterable of samples, got {shown(self.iterable)}"
            ) from error
        # Other modules' objects that return themselves may start again.
        if samples is self._begun and type(samples).__module__ in _OF_PYTHON:
            raise ValueError(
                "iterable must be one that can be read again for another pass, such as an object "
                f"whose __iter__ is a generator function, got a {type(samples).__name__}, whose "
                "samples were read"
            )
        self._begun = samples if samples is self.iterable else None
        return samples

    def _note_start(self) -> None:
        if self._source_start is None and self._is_stateful():
            self._source_start = copy.deepcopy(self.iterable.state_dict())

    def _resumed(self, at: _Pass) -> tuple[Iterator[Any], list[_Held]]:
        """Return an iterator from the window's start on, and the samples held over into it."""
        source, held = at.position["source"], at.position["held"]
        if source is not None:
            self._note_start()
            self.iterable.load_state_dict(copy.deepcopy(source))
            self._source_moved = True
            return iter(self.iterable), [self._measured(*copy.deepcopy(entry)) for entry in held]
        samples = self._from_the_start()
        wanted = {number for number, _, _ in held}
        found = {}
        for number in range(at.consumed):
            sample = next(samples, _END)
            if sample is _END:
                raise ValueError(
                    f"iterable must be that of the state, of which {at.consumed} samples were "
                    f"read, but it ended after {number}"
                )
            if number in wanted:
                found[number] = sample
        return samples, [self._measured(n, since, found[n]) for n, since, _ in held]

    def _refill(self, at: _Pass, held: list[_Held], samples: Iterator[Any]) -> bool:
        """Read samples until the window is full; return whether the stream has ended."""
        while len(held) < self.window:
            sample = next(samples, _END)
            if sample is _END:
                return True
            entry = self._measured(at.consumed, at.window, sample)
            if entry.length <= self.capacity:
                held.append(entry)
            elif self.overlong == "skip":
                at.skipped += 1
            else:
                raise ValueError(
                    f"samples must have at most capacity = {self.capacity} tokens, but number "
                    f'{entry.number} of the stream has {entry.length}: overlong="skip" leaves it '
                    "out"
                )
            at.consumed += 1
        return False

    def _measured(self, number: int, since: int, sample: Any) -> _Held:
        length = as_int(self.length(sample), "length")
        if length < 0:
            raise ValueError(
                f"samples must not have negative lengths, but number {number} of the stream has "
                f"{length}"
            )
        return _Held(number, since, length, sample)

    # ----------------------------------------------------------------------------- one window

    def _packed(self, at: _Pass, held: list[_Held], ended: bool, world_size: int) -> _Window:
        """Pack the window for `world_size` ranks."""
        held = [held[i] for i in self._order(at, len(held), "samples")]
        lengths = [entry.length for entry in held]
        values = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        indices, offsets, _, _ = _C.bin_pack(values, self.capacity, self.strategy, "raise")
        numbers, ends = indices.tolist(), offsets.tolist()
        rows = [numbers[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
        rows, staying = self._chosen(at, rows, held, ended, world_size)
        order = self._order(at, len(rows), "rows")
        return _Window(
            [[held[i] for i in rows[number]] for number in order],
            [held[i] for row in staying for i in row],
        )

    def _order(self, at: _Pass, count: int, purpose: str) -> list[int]:
        if not self.shuffle:
            return list(range(count))
        seed = seed_of(self.seed, purpose, at.window)
        return _C.permutation(count, seed, 0, count).tolist()

    def _chosen(
        self,
        at: _Pass,
        rows: list[list[int]],
        held: list[_Held],
        ended: bool,
        world_size: int,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the rows to yield, a multiple of `world_size`, and the rows that stay."""
        spare = len(rows) % world_size
        numbers: Sequence[int] = range(len(rows))
        if ended and not self.drop_last:
            return self._evened(rows, held, world_size), []
        if not ended:
            # At least one row stays, so that the next window can repack its samples better.
            spare = spare or world_size
            oldest = at.window - _MOST_WINDOWS
            numbers = [n for n in numbers if all(held[i].since > oldest for i in rows[n])]
            if spare > len(numbers) or spare == len(rows):
                return self._evened(rows, held, world_size), []
        if self.strategy != "sequential":
            # The emptiest rows come last, and the last rows stay.
            numbers = sorted(numbers, key=lambda n: -sum(held[i].length for i in rows[n]))
        stay = set(numbers[len(numbers) - spare :])
        going = [row for n, row in enumerate(rows) if n not in stay]
        return going, [row for n, row in enumerate(rows) if n in stay]

    def _evened(self, rows: list[list[int]], held: list[_Held], world_size: int) -> list[list[int]]:
        """Return all rows, some of them split to make the number a multiple of `world_size`."""
        missing = -len(rows) % world_size
        if missing == 0:
            return rows
        lengths = {i: held[i].length for row in rows for i in row}
        counts = torch.tensor([len(row) for row in rows], device="cpu")
        numbers = rows_to_take_apart(counts, world_size - missing, missing)
        apart = [rows[n] for n in numbers]
        made, _ = take_apart(apart, len(apart) + missing, lengths, lengths, self.capacity)
        return [row for n, row in enumerate(rows) if n not in set(numbers)] + made

    # ----------------------------------------------------------------------------- its state

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass, from which `load_state_dict` resumes.

        The state is the same on every rank. It records where the window began and how many of its
        rows each rank has yielded. If the iterable has `state_dict` and `load_state_dict`, it also
        holds the iterable's state at that point and the samples held over; otherwise resuming reads
        the iterable again from its start up to that point. If the pass had reached its end, the
        resumed pass yields nothing and the one after it is complete. (With a worker, torchdata's
        StatefulDataLoader begins that one at once.)
        """
        return copy.deepcopy(self._pass.position) | self._settings()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume where `state` was taken.

        A state of another `world_size` counts the rows of all its ranks together. The present ranks
        share the samples of its window that were in none of those rows, and the rest of the stream.
        A pass that had reached its end stays at its end.

        Raises:
            ValueError: the state was taken with other arguments; the message says which differ.
                Raised during the pass: the iterable ends before the point of the state.
            TypeError: `state` is not what `state_dict` returns.
        """
        refuse_other(state, self._settings(), (*_COUNTS, "world_size", "held", "source"))
        self._pass = self._loaded = _Pass(self._checked_position(state))

    def _checked_position(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position that a state says, as ints and copies."""
        position: dict[str, Any] = {n: as_int(state[n], n, least=0) for n in _COUNTS}
        if position["skipped"] > position["consumed"]:
            raise ValueError(
                f"skipped must be at most the consumed = {position['consumed']} samples, got "
                f"{position['skipped']}"
            )
        position["world_size"], _ = checked_ranks(state["world_size"])
        held = checked_held(state, position, self._is_stateful())
        position["held"] = copy.deepcopy(held)
        position["source"] = copy.deepcopy(state["source"])
        return position

    def __setstate__(self, pickled: Any) -> None:
        """Check what a pickle says as arguments and states are; a subclass may hold more."""
        options = options_in(pickled, _OPTIONS)
        PackedStream.__init__(self, seed=options_in(pickled, ("_seed",))["_seed"], **options)
        loaded, now, moved = options_in(pickled, ("_loaded", "_pass", "_source_moved")).values()
        check_flag(moved, "_source_moved")
        if moved and not self._is_stateful():
            raise ValueError(
                "_source_moved must be False for an iterable without load_state_dict, got True"
            )
        self._pass = self._pass_again(now)
        if loaded is not None:
            self._loaded = self._pass if loaded is now else self._pass_again(loaded)
        kept = {"_loaded", "_pass", "_seed", *_OPTIONS}
        self.__dict__ |= {name: pickled[name] for name in pickled if name not in kept}

    def _pass_again(self, pickled: Any) -> _Pass:
        if not isinstance(pickled, _Pass):
            raise TypeError(f"_pass must be the position of a pass, got {shown(pickled)}")
        kept = ("position", "consumed", "skipped")
        position, consumed, skipped = options_in(vars(pickled), kept).values()
        names = (*_COUNTS, "world_size", "held", "source")
        made = _Pass(self._checked_position(options_in(position, names)))
        made.consumed = as_int(consumed, "consumed", least=made.consumed)
        made.skipped = as_int(skipped, "skipped", least=made.skipped)
        return made

    def _settings(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "capacity": self.capacity,
            "window": self.window,
            "strategy": self.strategy,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "overlong": self.overlong,
            "drop_last": self.drop_last,
        }


def _tokens(sample: Any) -> int:
    try:
        ids = sample["input_ids"]
        if isinstance(ids, torch.Tensor):  # a nested one has no length
            check_tensor(ids, "input_ids of samples")
        return len(ids)
    except (TypeError, LookupError) as error:
        raise TypeError(
            f"samples must be mappings with input_ids if length is None, got {shown(sample)}"
        ) from error


def _samples_of(row: list[_Held]) -> list[Any]:
    return [entry.sample for entry in row]


def _checked_done(at: _Pass, window: _Window) -> int:
    """Return how many rows of the window each rank has had; raise ValueError if too many."""
    done, rows = at.position["done"], len(window.rows) // at.position["world_size"]
    if done > rows:
        raise ValueError(f"done must be at most the {rows} rows of the state's window, got {done}")
    return done
