"""Test PackedStream: rows from an iterable of unknown length, in windows of bounded size."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import cuseq


class Source:
    """Samples of these lengths; number i holds the token i + 1."""

    def __init__(self, lengths):
        self.lengths = [int(length) for length in lengths]
        self.pulled = 0

    def make(self, number: int) -> dict:
        self.pulled += 1
        return {"input_ids": [number + 1] * self.lengths[number], "number": number}

    def __iter__(self) -> Iterator[dict]:
        for number in range(len(self.lengths)):
            yield self.make(number)


class Sample(dict):
    """A dict that supports weak references."""


class Watched(Source):
    """Counts which of its samples are alive."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.alive: set[int] = set()
        self.most_alive = 0

    def make(self, number: int) -> Sample:
        sample = Sample(super().make(number))
        self.alive.add(number)
        weakref.finalize(sample, self.alive.discard, number)
        self.most_alive = max(self.most_alive, len(self.alive))
        return sample


class Resumable(Source):
    """A source that knows its position, as the datasets of Hugging Face and torchdata do."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.position = 0
        self.start = 0

    def __iter__(self) -> Iterator[dict]:
        self.position, self.start = self.start, 0
        while self.position < len(self.lengths):
            self.position += 1
            yield self.make(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


def make_lengths(count: int, capacity: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(capacity / 12), 0.9, count)
    return np.clip(lengths, 1, capacity).astype(int).tolist()


def numbers(row) -> list[int]:
    assert isinstance(row, list)
    return [sample["number"] for sample in row]


def make_rows(stream) -> list[list[int]]:
    return [numbers(row) for row in stream]


OPTIONS = {
    "strategy": st.sampled_from(["bfd", "ffd", "sequential"]),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 2**40),
    "window": st.integers(4, 40),
    "drop_last": st.booleans(),
}


@st.composite
def cases(draw, **fixed):
    """Draw lengths, capacity, ranks and options; a window has at least one sample per rank."""
    capacity = draw(st.sampled_from([8, 20, 100]))
    length = st.one_of(st.integers(0, capacity), st.sampled_from([1, capacity, capacity // 2 + 1]))
    lengths = draw(st.lists(length, max_size=120))
    options = {
        name: fixed[name] if name in fixed else draw(values) for name, values in OPTIONS.items()
    }
    return lengths, capacity, draw(st.integers(1, 4)), options


def ranks_of(case, source=Source) -> list[list[list[int]]]:
    lengths, capacity, world_size, options = case
    return [
        make_rows(
            cuseq.data.PackedStream(
                source(lengths), capacity, rank=rank, world_size=world_size, **options
            )
        )
        for rank in range(world_size)
    ]


@given(case=cases(drop_last=False))
def test_every_sample_once(case):
    lengths, capacity, world_size, options = case
    ranks = ranks_of(case)
    assert len(set(map(len, ranks))) == 1, "or DDP hangs"
    rows = [row for of_rank in ranks for row in of_rank]
    assert all(rows), "no row is empty"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert set(counts) == set(range(len(lengths)))
    # A sample is repeated only if fewer samples than ranks remain at the end.
    repeated = sum(counts.values()) - len(lengths)
    assert repeated < world_size
    if len(lengths) < options["window"]:  # a full window does not know that it is the last
        assert repeated == max(0, len(rows) - len(lengths))


@given(case=cases(drop_last=True))
def test_the_last_incomplete_group_is_dropped(case):
    lengths, capacity, world_size, _ = case
    ranks = ranks_of(case)
    assert len(set(map(len, ranks))) == 1
    rows = [row for of_rank in ranks for row in of_rank]
    assert all(rows) and all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert max(counts.values(), default=1) == 1
    left = [length for number, length in enumerate(lengths) if number not in counts]
    assert sum(left) <= (world_size - 1) * capacity
    if world_size == 1:
        assert not left


def test_literal_case():
    stream = cuseq.data.PackedStream(Source([3, 5, 2, 4, 4, 6]), capacity=8)
    rows = list(stream)
    assert sorted(map(sorted, map(numbers, rows))) == [[0, 1], [2, 5], [3, 4]]
    assert rows[0][0]["input_ids"] == [rows[0][0]["number"] + 1] * len(rows[0][0]["input_ids"])
    assert isinstance(stream, IterableDataset)


def test_sequential_keeps_the_order():
    lengths = make_lengths(300, 64)
    expected = cuseq.data.bin_pack(lengths, 64, "sequential")
    for window in (10, 50, 1000):
        stream = cuseq.data.PackedStream(Source(lengths), 64, strategy="sequential", window=window)
        rows = make_rows(stream)
        assert [sample for row in rows for sample in row] == list(range(300))
        if window == 1000:
            assert rows == [expected.row(b) for b in range(expected.num_rows)]


def test_no_samples():
    for world_size in (1, 3):
        assert make_rows(cuseq.data.PackedStream([], 8, world_size=world_size)) == []


def test_fewer_samples_than_ranks():
    case = [3, 4], 8, 4, {}
    ranks = ranks_of(case)
    assert [len(of_rank) for of_rank in ranks] == [1] * 4
    assert {sample for of_rank in ranks for row in of_rank for sample in row} == {0, 1}
    assert ranks_of(([3, 4], 8, 4, {"drop_last": True})) == [[]] * 4
    # One row's samples are split over ranks before any is repeated.
    ranks = ranks_of(([2, 2, 2, 2], 8, 4, {}))
    assert sorted(ranks) == [[[0]], [[1]], [[2]], [[3]]]


@pytest.mark.parametrize("kind", ["generator", "list", "iterator", "own length"])
def test_kinds_of_sources(kind):
    lengths = make_lengths(100, 32)
    expected = make_rows(cuseq.data.PackedStream(Source(lengths), 32, window=20))
    options = {}
    if kind == "generator":
        source = (sample for sample in Source(lengths))
    elif kind == "list":
        source = list(Source(lengths))
    elif kind == "iterator":
        source = iter(Source(lengths))
    else:
        source = [{"number": number, "text": "x" * length} for number, length in enumerate(lengths)]
        options = {"length": lambda sample: len(sample["text"])}
    assert make_rows(cuseq.data.PackedStream(source, 32, window=20, **options)) == expected


def test_a_pass_can_be_repeated():
    stream = cuseq.data.PackedStream(list(Source(make_lengths(100, 32))), 32, window=20)
    rows = make_rows(stream)
    assert make_rows(stream) == rows
    list(itertools.islice(stream, 3))
    assert make_rows(stream) == rows, "from the start, as any iterable"


def test_shuffled_by_seed():
    lengths = [4] * 200

    def rows(**options):
        return make_rows(cuseq.data.PackedStream(Source(lengths), 8, window=50, **options))

    plain, one = rows(), rows(shuffle=True, seed=1)
    assert one == rows(shuffle=True, seed=1)
    orders = [plain, one, rows(shuffle=True, seed=2)]
    for first, second in itertools.combinations(orders, 2):
        pairs = [{tuple(sorted(row)) for row in order} for order in (first, second)]
        assert len(pairs[0] & pairs[1]) < 30, "other samples share a row"
    assert rows(seed=2) == plain
    # The same over ranks: together they get every sample.
    ranks = ranks_of((lengths, 8, 2, {"shuffle": True, "window": 50}))
    assert sorted(i for of_rank in ranks for row in of_rank for i in row) == list(range(200))


def test_random_state_of_the_caller_is_neither_read_nor_moved():
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        stream = cuseq.data.PackedStream(Source([4] * 100), 8, window=50, shuffle=True)
        orders.append(make_rows(stream))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert orders[0] == orders[1]


# The window.


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("strategy", ["bfd", "sequential"])
@pytest.mark.parametrize("window", [8, 64])
def test_at_most_a_window_is_held(window, strategy, world_size):
    source = Watched(make_lengths(1000, 64))
    stream = cuseq.data.PackedStream(
        source, 64, window=window, strategy=strategy, world_size=world_size, rank=world_size - 1
    )
    for row in stream:
        del row
    gc.collect()
    assert source.pulled == 1000
    assert source.most_alive <= window
    assert not source.alive, "none is kept behind the end"


def test_nothing_is_pulled_before_it_is_needed():
    source = Source(make_lengths(1000, 64))
    stream = cuseq.data.PackedStream(source, 64, window=50)
    assert source.pulled == 0
    rows = iter(stream)
    next(rows)
    assert source.pulled == 50
    assert len(stream.state_dict()) and source.pulled == 50


def test_an_endless_source():
    def endless():
        for number in itertools.count():
            yield {"input_ids": [0] * (1 + number * 7919 % 30), "number": number}

    rows = make_rows(itertools.islice(cuseq.data.PackedStream(endless(), 32, window=40), 300))
    assert len(rows) == 300
    seen = [sample for row in rows for sample in row]
    assert len(set(seen)) == len(seen)
    assert max(seen) < len(seen) + 40


@pytest.mark.parametrize("lengths", ["all full", "others do not fit", "random"])
def test_no_sample_waits_for_ever(lengths):
    """Even a sample that never fits with others is used after a bounded number of windows."""
    window, capacity, count = 16, 64, 3000
    values = {
        "all full": [1] + [capacity] * count,
        "others do not fit": [capacity // 2 + 1] + [capacity - 5] * count,
        "random": make_lengths(count, capacity),
    }[lengths]
    source = Source(values)
    for row in cuseq.data.PackedStream(source, capacity, window=window):
        for number in numbers(row):
            assert source.pulled - number <= 20 * window
        del row


def test_rows_are_full():
    lengths = make_lengths(20_000, 4096)
    for window, least in ((1024, 0.995), (128, 0.985), (32, 0.95)):
        rows = make_rows(cuseq.data.PackedStream(Source(lengths), 4096, window=window))
        assert sum(lengths) / (len(rows) * 4096) > least
    plain = cuseq.data.bin_pack(lengths, 4096, "sequential").fill
    assert plain < 0.93, "what that is compared with"


# Resuming.


def through_a_checkpoint(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # weights_only


def as_generator(lengths):
    return (sample for sample in Source(lengths))


def as_list(lengths):
    return list(Source(lengths))


SOURCES = {"resumable": Resumable, "iterable": Source, "generator": as_generator, "list": as_list}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "seed": 3},
        {"strategy": "sequential"},
        {"world_size": 2, "rank": 1},
        {"world_size": 3, "rank": 0, "drop_last": True},
    ],
    ids=str,
)
def test_resume_at_every_row(options, source):
    lengths = make_lengths(120, 40)

    def make():
        return cuseq.data.PackedStream(source(lengths), 40, window=25, **options)

    expected = make_rows(make())
    assert len(expected) > 4
    stream = make()
    rows = iter(stream)
    for done in range(len(expected) + 1):
        state = through_a_checkpoint(stream.state_dict())
        resumed = make()
        resumed.load_state_dict(state)
        assert make_rows(resumed) == expected[done:]
        if done < len(expected):
            assert numbers(next(rows)) == expected[done]
    assert next(rows, None) is None
    resumed = make()
    resumed.load_state_dict(through_a_checkpoint(stream.state_dict()))
    assert make_rows(resumed) == [], "the end was seen"


@pytest.mark.parametrize("source", [Resumable, Source, as_list])
@pytest.mark.parametrize("done", [1, 12])
def test_resume_in_a_second_pass(done, source):
    """The source was at its end when the second pass began."""
    lengths = make_lengths(120, 40)
    stream = cuseq.data.PackedStream(source(lengths), 40, window=25)
    expected = make_rows(stream)
    rows = iter(stream)
    assert make_rows(itertools.islice(rows, done)) == expected[:done]
    resumed = cuseq.data.PackedStream(source(lengths), 40, window=25)
    state = through_a_checkpoint(stream.state_dict())
    resumed.load_state_dict(state)
    assert make_rows(resumed) == expected[done:]
    assert make_rows(resumed) == expected, "the next pass is a whole one"


@settings(max_examples=50)
@given(
    case=cases(),
    stops=st.lists(st.integers(0, 15), min_size=1, max_size=5),
    source=st.sampled_from([Resumable, Source]),
)
def test_interrupted_at_random(case, stops, source):
    lengths, capacity, world_size, options = case
    for rank in range(world_size):

        def make():
            return cuseq.data.PackedStream(
                source(lengths), capacity, rank=rank, world_size=world_size, **options
            )

        expected = make_rows(make())
        stream, rows = make(), []
        for stop in stops:
            stop = min(stop, len(expected) - len(rows))
            # islice requests no more rows, so the stream does not reach its end early.
            rows += make_rows(itertools.islice(stream, stop))
            state = through_a_checkpoint(stream.state_dict())
            stream = make()
            stream.load_state_dict(state)
        rows += make_rows(stream)
        assert rows == expected


# Resuming on another number of ranks.


def pass_over_ranks(case, stages, source):
    """Run one pass over stages `(world_size, stop)`, the last one to its end; rows by rank."""
    lengths, capacity, _, options = case
    state, rows = None, []
    for number, (world_size, stop) in enumerate(stages):
        ranks, states = [], []
        for rank in range(world_size):
            stream = cuseq.data.PackedStream(
                source(lengths), capacity, rank=rank, world_size=world_size, **options
            )
            if state is not None:
                stream.load_state_dict(through_a_checkpoint(state))
            last = number == len(stages) - 1
            ranks.append(make_rows(itertools.islice(stream, None if last else stop)))
            states.append(stream.state_dict())
        assert len(set(map(len, ranks))) == 1, "or DDP hangs"
        assert all(other == states[0] for other in states)
        state = states[-1]
        rows += [row for of_rank in ranks for row in of_rank]
    return rows, ranks


STAGES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=2, max_size=4)


@settings(max_examples=150)
@given(
    case=cases(drop_last=False),
    stages=STAGES,
    source=st.sampled_from([Resumable, Source]),
)
def test_every_sample_once_on_changing_ranks(case, stages, source):
    lengths, capacity, _, options = case
    rows, _ = pass_over_ranks(case, stages, source)
    assert all(rows), "no row is empty"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert set(counts) == set(range(len(lengths))), "none is lost"
    repeated = sum(counts.values()) - len(lengths)
    assert repeated <= sum(world_size - 1 for world_size, _ in stages)
    if options["strategy"] == "sequential" and not options["shuffle"] and repeated == 0:
        world_sizes = {world_size for world_size, _ in stages}
        if world_sizes == {1}:
            assert [i for row in rows for i in row] == list(range(len(lengths)))


@settings(max_examples=150)
@given(case=cases(drop_last=True), stages=STAGES, source=st.sampled_from([Resumable, Source]))
def test_no_sample_twice_on_changing_ranks(case, stages, source):
    """With drop_last, less than one row per rank of a stage is left out."""
    lengths, capacity, _, _ = case
    rows, _ = pass_over_ranks(case, stages, source)
    assert all(rows) and all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert max(counts.values(), default=1) == 1
    left = [length for number, length in enumerate(lengths) if number not in counts]
    most = max(world_size for world_size, _ in stages)
    assert sum(left) <= (most - 1) * capacity


@settings(max_examples=50)
@given(case=cases(), stops=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_the_same_ranks_go_on_bit_equal(case, stops):
    """Also if other ranks loaded the state and took no row."""
    lengths, capacity, world_size, options = case
    options["window"] = max(options["window"], world_size + 1)
    for rank in range(world_size):

        def make(rank=rank, world_size=world_size):
            return cuseq.data.PackedStream(
                Source(lengths), capacity, rank=rank, world_size=world_size, **options
            )

        expected, stream, rows = make_rows(make()), make(), []
        for stop in stops:
            rows += make_rows(itertools.islice(stream, min(stop, len(expected) - len(rows))))
            state = stream.state_dict()
            idle = make(0, world_size + 1)
            idle.load_state_dict(state)
            iter(idle)
            stream = make()
            stream.load_state_dict(through_a_checkpoint(idle.state_dict()))
        assert rows + make_rows(stream) == expected


def test_resume_on_other_ranks_literally():
    """Three ranks stop after 4 rows each, and one rank continues with the remaining samples."""
    lengths = make_lengths(300, 64)
    case = lengths, 64, 1, {"window": 50}
    for source in SOURCES.values():
        rows, (last,) = pass_over_ranks(case, [(3, 4), (1, 0)], source)
        assert sorted(sample for row in rows for sample in row) == list(range(300))
        assert len(rows) == 12 + len(last) and len(last) > 12
        assert sum(lengths) / (64 * len(rows)) > 0.9, "rows are full"


def test_a_state_of_no_row_starts_the_pass_of_any_ranks():
    options = {"window": 50, "shuffle": True, "seed": 3}
    source = as_list(make_lengths(300, 64))
    state = cuseq.data.PackedStream(source, 64, world_size=3, **options).state_dict()
    resumed = cuseq.data.PackedStream(source, 64, **options)
    resumed.load_state_dict(state)
    assert make_rows(resumed) == make_rows(cuseq.data.PackedStream(source, 64, **options))


def test_the_end_on_other_ranks():
    """No sample comes again, and the next pass is complete."""
    source = as_list(make_lengths(120, 40))
    for drop_last in (False, True):
        options = {"window": 25, "drop_last": drop_last}
        stream = cuseq.data.PackedStream(source, 40, world_size=4, **options)
        assert len(make_rows(stream)) > 2
        resumed = cuseq.data.PackedStream(source, 40, **options)
        resumed.load_state_dict(stream.state_dict())
        assert make_rows(resumed) == []
        assert make_rows(resumed) == make_rows(cuseq.data.PackedStream(source, 40, **options))


def test_a_source_with_a_state_is_not_read_again():
    lengths = make_lengths(2000, 64)
    stream = cuseq.data.PackedStream(Resumable(lengths), 64, window=50)
    rows = make_rows(itertools.islice(stream, 100))
    state = stream.state_dict()
    source = Resumable(lengths)
    resumed = cuseq.data.PackedStream(source, 64, window=50)
    resumed.load_state_dict(state)
    rows += [numbers(next(iter(resumed)))]
    assert source.pulled <= 100, "what is held, and a window"
    whole = cuseq.data.PackedStream(Source(lengths), 64, window=50)
    assert rows == make_rows(itertools.islice(whole, 101))


class Sticky(Resumable):
    """Continues from a loaded state in every later pass, as Hugging Face's streams do."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.loaded = 0

    def __iter__(self) -> Iterator[dict]:
        self.start = self.loaded
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.loaded = state["position"]


def test_the_pass_after_a_resumed_one_is_whole():
    lengths = make_lengths(300, 64)
    stream = cuseq.data.PackedStream(Sticky(lengths), 64, window=50)
    expected = make_rows(stream)
    rows = iter(stream)
    done = len(expected) // 2
    for _ in range(done):
        next(rows)
    resumed = cuseq.data.PackedStream(Sticky(lengths), 64, window=50)
    resumed.load_state_dict(stream.state_dict())
    assert make_rows(resumed) == expected[done:]
    assert make_rows(resumed) == expected
    assert make_rows(resumed) == expected


def shards_of_hugging_face(lengths):
    datasets = pytest.importorskip("datasets")
    samples = {"input_ids": [[i + 1] * n for i, n in enumerate(lengths)], "number": [*range(100)]}
    return datasets.Dataset.from_dict(samples).to_iterable_dataset(num_shards=4)


def test_another_pass_over_a_generator_is_refused():
    """Also to resume: what was read would be left out."""
    for source in (as_generator([3, 5, 2]), map(str, range(3)), itertools.chain("ab")):
        stream = cuseq.data.PackedStream(source, 6, window=2, length=lambda sample: 1)
        rows = iter(stream)
        next(rows)
        state = stream.state_dict()
        with pytest.raises(ValueError, match="iterable must be one that can be read again"):
            list(stream)
        stream.load_state_dict(state)
        with pytest.raises(ValueError, match="iterable must be one that can be read again"):
            list(stream)


@pytest.mark.parametrize(
    "source", [*SOURCES.values(), Sticky, shards_of_hugging_face], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("rolled_back", ["in the pass", "at its end", "after a second try"])
def test_passes_after_a_rollback_are_whole(rolled_back, source):
    """A state may be loaded at any position of the source, and more than once."""
    if source is as_generator:
        pytest.skip("there is one pass over a generator")
    lengths = make_lengths(100, 40)
    expected = make_rows(cuseq.data.PackedStream(source(lengths), 40, window=25))
    stream = cuseq.data.PackedStream(source(lengths), 40, window=25)
    rows = iter(stream)
    begun = [numbers(next(rows)) for _ in range(5)]
    state = stream.state_dict()
    if rolled_back == "in the pass":
        next(rows)
    elif rolled_back == "at its end":
        list(rows)
    else:
        stream = cuseq.data.PackedStream(source(lengths), 40, window=25)
        stream.load_state_dict(state)
        list(itertools.islice(stream, 2))
    stream.load_state_dict(state)
    assert begun + make_rows(stream) == expected
    for _ in range(2):
        assert make_rows(stream) == expected


@pytest.mark.parametrize("source", [Resumable, Source, as_list])
def test_the_state_of_a_pass_that_has_not_begun(source):
    """The state is at the start, although the stream was at the end of the pass before."""
    lengths = make_lengths(120, 40)
    stream = cuseq.data.PackedStream(source(lengths), 40, window=25)
    expected = make_rows(stream)
    rows = iter(stream)
    resumed = cuseq.data.PackedStream(source(lengths), 40, window=25)
    resumed.load_state_dict(stream.state_dict())
    assert make_rows(resumed) == expected == make_rows(rows)


def test_passes_at_a_time_are_whole():
    stream = cuseq.data.PackedStream(as_list(make_lengths(120, 40)), 40, window=25)
    expected = make_rows(stream)
    rows = []
    for row in stream:
        rows.append(numbers(row))
        if len(rows) == 3:
            assert make_rows(stream) == expected
    assert rows == expected


def test_samples_that_are_changed_do_not_change_the_state():
    """A collate function may rename a sample's keys, and write into its values."""
    lengths = make_lengths(120, 40)
    expected = make_rows(cuseq.data.PackedStream(Resumable(lengths), 40, window=25))

    def changed(row) -> list[int]:
        for sample in row:
            sample["input_ids"].append(0)
            sample["labels"] = sample.pop("input_ids")
        return numbers(row)

    stream = cuseq.data.PackedStream(Resumable(lengths), 40, window=25)
    state = stream.state_dict()
    for done, row in enumerate(stream, 1):
        changed(row)
        state = stream.state_dict()
        for _ in range(2):  # the loaded state has not changed either
            resumed = cuseq.data.PackedStream(Resumable(lengths), 40, window=25)
            resumed.load_state_dict(state)
            assert [changed(row) for row in resumed] == expected[done:]


def test_the_seed_is_an_int_however_it_is_set():
    def stream(**options):
        source = as_list(make_lengths(120, 40))
        return cuseq.data.PackedStream(source, 40, window=25, shuffle=True, **options)

    one, other = stream(seed=3), stream()
    other.seed = np.int64(3)
    assert make_rows(one) == make_rows(other)
    assert type(through_a_checkpoint(other.state_dict())["seed"]) is int
    with pytest.raises(TypeError, match="seed must be an int, got 1.5"):
        other.seed = 1.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: None, TypeError, "what state_dict returned, got NoneType"),
        (lambda state: {k: v for k, v in state.items() if k != "done"}, ValueError, "no 'done'"),
        (lambda state: state | {"done": -1}, ValueError, "done must be at least 0, got -1"),
        (lambda state: state | {"done": 99}, ValueError, "done must be at most the .*, got 99"),
        (lambda state: state | {"held": None}, TypeError, "held must be a list, got NoneType"),
        (
            lambda state: state | {"world_size": 0},
            ValueError,
            "world_size must be at least 1, got 0",
        ),
        (
            lambda state: state | {"world_size": 2, "done": 99},
            ValueError,
            "done must be at most the .*, got 99",
        ),
    ],
)
def test_what_is_no_state_is_refused(change, error, message):
    stream = cuseq.data.PackedStream(Source(make_lengths(120, 40)), 40, window=25)
    with pytest.raises(error, match=message):
        stream.load_state_dict(change(stream.state_dict()))
        list(stream)


def test_a_negative_length_names_its_sample():
    stream = cuseq.data.PackedStream([1, 2, -3], 8, length=lambda sample: sample)
    with pytest.raises(ValueError, match="number 2 of the stream has -3"):
        list(stream)


@pytest.mark.parametrize("shards", [1, 4])
def test_resume_with_the_streams_of_hugging_face(shards):
    datasets = pytest.importorskip("datasets")
    lengths = make_lengths(300, 64)
    samples = {"input_ids": [[i + 1] * n for i, n in enumerate(lengths)], "number": range(300)}

    def make():
        source = datasets.Dataset.from_dict(samples).to_iterable_dataset(num_shards=shards)
        return cuseq.data.PackedStream(source, 64, window=50)

    stream = make()
    expected = make_rows(stream)
    assert sorted(number for row in expected for number in row) == list(range(300))
    for _ in range(2):
        rows = iter(stream)
        for done in range(len(expected) + 1):
            if done % 5 < 2:
                resumed = make()
                resumed.load_state_dict(through_a_checkpoint(stream.state_dict()))
                assert make_rows(resumed) == expected[done:] or done == 0
            if done < len(expected):
                assert numbers(next(rows)) == expected[done]


def test_a_state_is_a_snapshot():
    stream = cuseq.data.PackedStream(Resumable(make_lengths(300, 64)), 64, window=50)
    rows = iter(stream)
    for _ in range(20):
        next(rows)
    state = stream.state_dict()
    before = copy.deepcopy(state)
    list(rows)
    assert state == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 65),
        ("window", 51),
        ("strategy", "ffd"),
        ("shuffle", True),
        ("drop_last", True),
    ],
)
def test_state_of_other_settings_is_refused(name, value):
    def make(**options):
        settings = {"capacity": 64, "window": 50, **options}
        return cuseq.data.PackedStream(Source(make_lengths(300, 64)), **settings)

    stream, other = make(), make(**{name: value})
    next(iter(stream))
    with pytest.raises(ValueError, match=name):
        other.load_state_dict(stream.state_dict())


def test_a_source_that_ends_too_early_is_noticed():
    """Skipping consumed samples must not end silently: it is another stream."""
    lengths = make_lengths(300, 64)
    stream = cuseq.data.PackedStream(Source(lengths), 64, window=50)
    list(itertools.islice(stream, 30))
    resumed = cuseq.data.PackedStream(Source(lengths[:20]), 64, window=50)
    resumed.load_state_dict(stream.state_dict())
    with pytest.raises((RuntimeError, ValueError), match="source|iterable|stream"):
        list(resumed)


# Too long, wrong.


def test_too_long_ones_are_named_or_skipped():
    lengths = [3, 11, 4, 12, 10]
    with pytest.raises(ValueError, match=r"(?=.*\bcapacity = 10\b)(?=.*\b1\b.*\b11\b)"):
        make_rows(cuseq.data.PackedStream(Source(lengths), 10))
    stream = cuseq.data.PackedStream(Source(lengths), 10, overlong="skip", window=2)
    assert sorted(sample for row in make_rows(stream) for sample in row) == [0, 2, 4]
    assert stream.skipped == 2
    resumed = cuseq.data.PackedStream(Source(lengths), 10, overlong="skip", window=2)
    rows = iter(stream)
    next(rows), next(rows)
    resumed.load_state_dict(stream.state_dict())
    assert make_rows(resumed) == make_rows(rows)
    assert resumed.skipped == 2, "those before the interruption count"


def test_what_has_no_length_is_refused():
    with pytest.raises((KeyError, TypeError, ValueError), match="input_ids"):
        list(cuseq.data.PackedStream([{"text": "abc"}], 10))
    with pytest.raises(ValueError, match="-1"):
        list(cuseq.data.PackedStream([{"text": "abc"}], 10, length=lambda sample: -1))
    with pytest.raises(TypeError, match="length"):
        list(cuseq.data.PackedStream([{"text": "abc"}], 10, length=lambda sample: 1.5))


def test_errors_of_the_source_arrive():
    def broken():
        yield from Source([3, 4, 5])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(cuseq.data.PackedStream(broken(), 10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity.*0"),
        ({"window": 0}, "window.*0"),
        ({"rank": 2, "world_size": 2}, "rank.*2"),
        ({"rank": -1}, "rank.*-1"),
        ({"world_size": 0}, "world_size.*0"),
        ({"strategy": "wrapped"}, "strategy.*wrapped"),
        ({"overlong": "cut"}, "overlong.*cut"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        cuseq.data.PackedStream([], **{"capacity": 8, **options})


# With DataLoader.


def make_loader(workers: int = 0) -> DataLoader:
    samples = [{"input_ids": [i + 1] * n} for i, n in enumerate(make_lengths(200, 64))]
    return DataLoader(
        cuseq.data.PackedStream(samples, 64, window=40),
        batch_size=None,
        collate_fn=cuseq.PackingCollator(capacity=64, total_multiple=8),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def samples_of(batch: dict) -> list[int]:
    ids, begin, samples = batch["input_ids"][0].tolist(), 0, []
    for length in batch["packed"].lengths.tolist():
        (token,) = set(ids[begin : begin + length])
        samples.append(token - 1)
        begin += length
    return samples


def test_through_a_loader():
    seen = [sample for batch in make_loader() for sample in samples_of(batch)]
    assert sorted(seen) == list(range(200))


def test_workers_do_not_repeat_the_stream():
    """Each worker would read the whole stream: an error, unless the stream is shared out."""
    try:
        seen = [sample for batch in make_loader(workers=2) for sample in samples_of(batch)]
    except (RuntimeError, ValueError) as error:
        assert "num_workers" in str(error)
    else:
        assert sorted(seen) == list(range(200))


def test_a_state_that_changes_while_it_is_read():
    """An int of another type may run code that empties the list which holds it."""

    class Emptying:
        def __init__(self, number: int):
            self.number = number

        def __index__(self) -> int:
            entry.clear()
            return self.number

    stream = cuseq.data.PackedStream(range(9), capacity=10, length=lambda sample: 6, window=3)
    iterator = iter(stream)
    next(iterator)
    next(iterator)
    state = stream.state_dict()
    entry = [Emptying(0), 0, None]
    with pytest.raises((ValueError, TypeError), match="held"):
        stream.load_state_dict(state | {"consumed": 1, "skipped": 0, "held": [entry, entry]})
    entry = [Emptying(0), 0, None]
    stream.load_state_dict(state | {"consumed": 1, "skipped": 0, "held": [entry]})
    assert stream.state_dict()["held"] == [[0, 0, None]]
