"""Test PackedBatchSampler: every sample once, equal steps on all ranks, balance, resuming."""

from __future__ import annotations

import copy
import io
import itertools
import math
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable

import distributed
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import cuseq
from cuseq.data import _balance

Row = list[int]


def make_lengths(count: int, capacity: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(capacity / 16), 0.9, count)
    return np.clip(lengths, 1, capacity).astype(np.int64)


def make_ranks(lengths, capacity: int, world_size: int, **options):
    return [
        cuseq.data.PackedBatchSampler(
            lengths, capacity, rank=rank, world_size=world_size, **options
        )
        for rank in range(world_size)
    ]


def make_steps(samplers, epoch: int = 0) -> list[tuple[Row, ...]]:
    """Return the rows of one epoch: for each step, one row per rank."""
    rows = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        rows.append(list(sampler))
        assert len(sampler) == len(rows[-1])
    assert len({len(of_rank) for of_rank in rows}) == 1, "or DDP hangs"
    return list(zip(*rows, strict=True))


def samples_of(steps: list[tuple[Row, ...]]) -> list[int]:
    return [sample for step in steps for row in step for sample in row]


def attention(lengths: list[int]) -> int:
    return sum(length * length for length in lengths)


OPTIONS = {
    "strategy": st.sampled_from(["bfd", "ffd", "sequential"]),
    "balance": st.sampled_from([None, "tokens", "attention", (1, 20, 3)]),
    "accumulation": st.integers(1, 3),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 2**63 - 1),
    "buffer": st.one_of(st.none(), st.integers(1, 50)),
    "drop_last": st.booleans(),
}


@st.composite
def cases(draw, **fixed):
    """Draw lengths, capacity, number of ranks and options."""
    capacity = draw(st.sampled_from([1, 8, 20, 100]))
    lengths = draw(st.lists(st.integers(0, capacity), max_size=60))
    options = {
        name: fixed[name] if name in fixed else draw(values) for name, values in OPTIONS.items()
    }
    return lengths, capacity, draw(st.integers(1, 4)), options


FEW = {"strategy": "bfd", "balance": None, "accumulation": 1, "shuffle": False, "seed": 0}


@given(case=cases(drop_last=False), epoch=st.integers(0, 3))
@example(case=([1] * 4, 1, 3, FEW | {"buffer": None, "drop_last": False}), epoch=0)
def test_every_sample_once(case, epoch):
    lengths, capacity, world_size, options = case
    samplers = make_ranks(lengths, capacity, world_size, **options)
    steps = make_steps(samplers, epoch)
    rows = [row for step in steps for row in step]
    assert all(rows), "no row is empty"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    assert all(type(sample) is int for row in rows for sample in row)
    assert len(steps) % options["accumulation"] == 0

    counts = Counter(samples_of(steps))
    assert set(counts) == set(range(len(lengths)))
    repeated = sum(counts.values()) - len(lengths)
    assert all(sampler.repeated == repeated for sampler in samplers)
    group = world_size * options["accumulation"]
    if options["buffer"] is None:
        # Samples are repeated only if there are too few for all places.
        assert repeated == max(0, len(rows) - len(lengths))
        # with "sequential" the order decides the number of rows
        if options["strategy"] != "sequential":
            packed = cuseq.data.bin_pack(lengths, capacity, options["strategy"]).num_rows
            assert len(rows) == -(-packed // group) * group
        most = max(1, -(-len(rows) // max(1, len(lengths))))
        assert all(count <= most for count in counts.values()), "repeats are spread"
    else:
        assert repeated < group


@given(case=cases(drop_last=True), epoch=st.integers(0, 3))
def test_the_last_incomplete_group_is_dropped(case, epoch):
    lengths, capacity, world_size, options = case
    samplers = make_ranks(lengths, capacity, world_size, **options)
    steps = make_steps(samplers, epoch)
    rows = [row for step in steps for row in step]
    assert all(rows) and all(sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(steps) % options["accumulation"] == 0
    assert max(Counter(samples_of(steps)).values(), default=1) == 1
    assert all(sampler.repeated == 0 for sampler in samplers)
    group = world_size * options["accumulation"]
    if options["buffer"] is None and options["strategy"] != "sequential":
        packed = cuseq.data.bin_pack(lengths, capacity, options["strategy"]).num_rows
        assert len(rows) == packed // group * group
    left = sorted(set(range(len(lengths))) - set(samples_of(steps)))
    if left:  # at most one incomplete group
        assert sum(lengths[i] for i in left) <= (group - 1) * capacity


@pytest.mark.parametrize("options", [{}, {"balance": "tokens"}, {"buffer": 60}], ids=str)
def test_other_samples_are_dropped_in_each_epoch(options):
    """Neither short samples, which are in the emptiest rows, nor long ones are always dropped."""
    lengths = make_lengths(120, 64)
    samplers = make_ranks(lengths, 64, 6, drop_last=True, **options)
    dropped: Counter[int] = Counter()
    for epoch in range(60):
        dropped.update(set(range(120)) - set(samples_of(make_steps(samplers, epoch))))
    assert dropped, "or this shows nothing"
    assert max(dropped.values()) < 45
    if not options.get("buffer"):
        assert len(dropped) > 110


def test_rows_are_taken_apart_before_samples_are_repeated():
    # One row of four samples, four ranks.
    samplers = make_ranks([2, 2, 2, 2], 8, 4)
    (step,) = make_steps(samplers)
    assert sorted(samples_of([step])) == [0, 1, 2, 3]
    assert samplers[0].repeated == 0


@pytest.mark.parametrize("options", [{}, {"buffer": 2}, {"balance": "tokens"}])
def test_fewer_samples_than_ranks(options):
    samplers = make_ranks([3, 4], 8, 4, **options)
    (step,) = make_steps(samplers)
    assert Counter(samples_of([step])) == {0: 2, 1: 2}
    assert samplers[3].repeated == 2
    assert make_steps(make_ranks([3, 4], 8, 4, drop_last=True, **options)) == []


@pytest.mark.parametrize("options", [{}, {"buffer": 2}, {"drop_last": True}, {"balance": "tokens"}])
def test_no_samples(options):
    assert make_steps(make_ranks([], 8, 2, **options)) == []


@pytest.mark.parametrize("strategy", ["bfd", "ffd", "sequential"])
def test_unshuffled_rows_are_those_of_bin_pack(strategy):
    lengths = make_lengths(200, 64)
    plan = cuseq.data.bin_pack(lengths, 64, strategy)
    expected = [plan.row(b) for b in range(plan.num_rows)]
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, strategy=strategy, shuffle=False)
    assert list(sampler) == expected
    sampler.set_epoch(3)
    assert list(sampler) == expected, "every epoch alike"
    if strategy == "sequential":
        steps = make_steps(make_ranks(lengths, 64, 2, strategy=strategy, shuffle=False))
        assert samples_of(steps) == list(range(200)), "the order of the set, dealt over ranks"


def test_it_is_a_batch_sampler():
    sampler = cuseq.data.PackedBatchSampler([3, 4, 5], 8)
    assert isinstance(sampler, Sampler)
    assert all(isinstance(row, list) for row in sampler)


@pytest.mark.parametrize("buffer", [None, 40])
def test_epochs_differ_and_repeat(buffer):
    lengths = make_lengths(200, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, buffer=buffer)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert list(sampler) == epochs[-1], "the same epoch until set_epoch"
    for one, other in itertools.combinations(epochs, 2):
        assert one != other
        assert sorted(map(sorted, one)) != sorted(map(sorted, other)), "other rows, too"
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    fresh = cuseq.data.PackedBatchSampler(lengths, 64, buffer=buffer)
    assert list(fresh) == epochs[0], "epoch 0 is where it starts"
    fresh.set_epoch(2)
    assert list(fresh) == epochs[2]
    reseeded = cuseq.data.PackedBatchSampler(lengths, 64, buffer=buffer, seed=1)
    assert list(reseeded) not in epochs
    reseeded.set_epoch(1)
    assert list(reseeded) not in epochs


@pytest.mark.parametrize("buffer", [None, 16, 64])
def test_equal_samples_change_places(buffer):
    """Samples are permuted before packing, so the samples that share a row differ."""
    sampler = cuseq.data.PackedBatchSampler([4] * 64, 8, buffer=buffer)
    pairs = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        pairs.append({tuple(sorted(row)) for row in sampler})
        assert all(len(pair) == 2 for pair in pairs[-1])
    for one, other in itertools.combinations(pairs, 2):
        assert len(one & other) < 8  # of 32 pairs; about half a pair by chance


@pytest.mark.parametrize("balance", [None, "tokens", "attention"])
def test_steps_are_shuffled(balance):
    """Long rows come neither first nor last."""
    lengths = list(range(51, 99))  # one sample per row
    sampler = cuseq.data.PackedBatchSampler(lengths, 100, balance=balance)
    orders = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        orders.append([lengths[i] for (i,) in sampler])
        rising = sum(a < b for a, b in itertools.pairwise(orders[-1]))
        assert 10 < rising < 37
    assert len(set(map(tuple, orders))) == 8


def test_random_state_of_the_caller_is_neither_read_nor_moved():
    lengths = make_lengths(100, 64)
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        orders.append(make_steps(make_ranks(lengths, 64, 2, balance="tokens"), epoch=1))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert orders[0] == orders[1]


def test_the_order_is_that_of_every_process(run_python):
    """Python salts its hashes in each process."""
    code = (
        "import cuseq\n"
        "sampler = cuseq.data.PackedBatchSampler("
        "[1 + i % 7 for i in range(40)], 10, balance='tokens',"
        " rank=1, world_size=2, buffer=20)\n"
        "sampler.set_epoch(3)\n"
        "result = list(sampler), sampler.state_dict()\n"
    )
    here: dict = {}
    exec(code, here)
    done = run_python(code + "print(result)", PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(here["result"])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, "int32", "memmap"])
def test_kinds_of_lengths(kind, tmp_path):
    values = make_lengths(100, 64)
    expected = list(cuseq.data.PackedBatchSampler(values, 64, buffer=30))
    if kind == "memmap":
        values.astype(np.int32).tofile(tmp_path / "lengths")
        lengths = np.memmap(tmp_path / "lengths", np.int32, "r")
    elif kind == "int32":
        lengths = torch.from_numpy(values).to(torch.int32)
    else:
        lengths = kind(values.tolist())
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, buffer=30)
    assert list(sampler) == expected
    state = cuseq.data.PackedBatchSampler(values, 64, buffer=30).state_dict()
    sampler.load_state_dict(state)  # they are the same lengths


# Windows.


@given(
    count=st.integers(1, 3000),
    seed=st.integers(-(2**63), 2**63 - 1),
    cuts=st.lists(st.integers(0, 3000), max_size=3),
)
def test_the_permutation_is_one(count, seed, cuts):
    whole = cuseq._C.permutation(count, seed, 0, count)
    assert (whole.dtype, whole.device.type) == (torch.int64, "cpu")
    assert sorted(whole.tolist()) == list(range(count))
    cuts = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [cuseq._C.permutation(count, seed, a, b) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_permutation_of_every_small_set():
    for count in [*range(200), *(2**k + d for k in range(8, 17, 2) for d in (-1, 0, 1))]:
        numbers = cuseq._C.permutation(count, 5, 0, count)
        assert torch.equal(numbers.sort().values, torch.arange(count))


@pytest.mark.parametrize("count", [2**31 - 1, 2**31 + 11, 2**40, 10**12])
def test_a_part_of_a_permutation_of_a_large_set(count):
    for begin in (0, count // 2, count - 20_000):
        numbers = cuseq._C.permutation(count, 7, begin, begin + 20_000)
        assert len(numbers.unique()) == 20_000
        assert 0 <= int(numbers.min()) and int(numbers.max()) < count
        shares = torch.histc(numbers.double(), 10, 0, count)
        # expected 2,000 each, standard deviation 42
        assert shares.min() > 1700 and shares.max() < 2300


def test_a_permutation_looks_random():
    count = 10_007
    places = torch.arange(count, dtype=torch.float64)
    for seed in range(20):
        numbers = cuseq._C.permutation(count, seed, 0, count).double()
        pairs = (numbers, places), (numbers[1:], numbers[:-1]), (numbers[7:], numbers[:-7])
        related = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]
        assert all(abs(r) < 5 / count**0.5 for r in related)
        assert (numbers == places).sum() < 10
        steps, times = (numbers[1:] - numbers[:-1]).unique(return_counts=True)
        assert times.max() < 20, "neighbours do not keep their distance"


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_every_number_of_a_small_set_comes_at_every_place(count):
    seeds = 3000
    times = torch.zeros(count, count)
    for seed in range(seeds):
        numbers = cuseq._C.permutation(count, seed, 0, count)
        times[torch.arange(count), numbers] += 1
    expected = seeds / count
    assert (times - expected).abs().max() < 6 * expected**0.5


@pytest.mark.parametrize(
    ("count", "begin", "end"), [(-1, 0, 0), (5, -1, 3), (5, 0, 6), (5, 4, 3), (0, 0, 1)]
)
def test_a_part_that_is_not_there_is_refused(count, begin, end):
    with pytest.raises((ValueError, RuntimeError), match="must"):
        cuseq._C.permutation(count, 0, begin, end)


@pytest.mark.parametrize("balance", [None, "tokens"])
def test_each_window_is_a_sample_of_the_whole_set(balance):
    """Sets may be sorted, as crawls are by source; no part of the epoch may be."""
    count, parts = 8000, 8
    samplers = make_ranks([64] * count, 64, 2, buffer=count // parts, balance=balance)
    firsts = []
    for epoch in range(2):
        (samples,) = np.array(samples_of(make_steps(samplers, epoch))).reshape(1, -1)
        assert np.array_equal(np.sort(samples), np.arange(count))
        for of_part in np.split(samples, parts):
            shares = np.histogram(of_part, 4, (0, count))[0]
            assert np.abs(shares - 250).max() < 6 * 250**0.5
        firsts.append(set(samples[: count // parts].tolist()))
    # 125 by chance.
    assert 60 < len(firsts[0] & firsts[1]) < 200


@pytest.mark.parametrize("options", [{}, {"balance": "tokens"}, {"shuffle": False}], ids=str)
def test_a_window_is_packed_by_itself(options):
    """On one rank all rows of a window come before those of the next."""
    lengths = make_lengths(400, 64)
    rows = list(cuseq.data.PackedBatchSampler(lengths, 64, buffer=100, **options))
    assert sorted(sample for row in rows for sample in row) == list(range(400))
    if options == {"shuffle": False}:
        first = [sample for row in rows for sample in row][:100]
        assert sorted(first) == list(range(100))
    ends = np.cumsum([len(row) for row in rows]).tolist()
    assert {100, 200, 300, 400} <= set(ends)


@pytest.mark.parametrize("seed", range(20))
def test_a_small_last_window_repeats_nothing(seed):
    sampler = cuseq.data.PackedBatchSampler(
        make_lengths(2003, 64), 512, world_size=8, buffer=1000, seed=seed
    )
    assert sampler.repeated == 0


def test_windows_without_rows_are_even():
    """All of their samples are left out, or carried over."""
    for options in ({"drop_last": True}, {"buffer": 1}):
        sampler = cuseq.data.PackedBatchSampler(
            [3, 5], 8, world_size=4, balance="tokens", **options
        )
        assert sampler.imbalance().tokens.mean >= 1.0


def test_a_step_beyond_the_epoch_is_refused():
    sampler = cuseq.data.PackedBatchSampler([3, 5, 8], 8)
    state = sampler.state_dict() | {"step": 3}
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="step must be at most the 2 of the epoch, got 3"):
        list(sampler)
    sampler.load_state_dict(state | {"step": 2})
    assert list(sampler) == []


def test_coefficients_may_be_an_array():
    lengths = make_lengths(100, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, balance=np.array([1.0, 0.0, 0.0]))
    assert list(sampler) == list(cuseq.data.PackedBatchSampler(lengths, 64, balance=(1, 0, 0)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_order_of_a_few_is_reached(count):
    seen = {tuple(cuseq._C.permutation(count, s, 0, count).tolist()) for s in range(500)}
    assert len(seen) == math.factorial(count)


def test_windows_pack_nearly_as_well():
    lengths = make_lengths(20_000, 1024)
    whole = len(cuseq.data.PackedBatchSampler(lengths, 1024))
    windows = len(cuseq.data.PackedBatchSampler(lengths, 1024, buffer=2000))
    assert windows <= 1.01 * whole
    # Rows that do not fill a group move to the next window; they are not split in each window.
    group = {"world_size": 8, "accumulation": 4}
    assert (
        8 * len(cuseq.data.PackedBatchSampler(lengths, 1024, buffer=2000, **group)) <= 1.03 * whole
    )


MEMORY = """
import resource, sys
import numpy as np
import torch
import cuseq

def held():
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024

count = 40_000_000
lengths = np.memmap(sys.argv[1], np.int32, "r", shape=(count,))
# What is loaded lazily, and the threads, come first.
list(cuseq.data.PackedBatchSampler(lengths[:100_000], 4096, buffer=50_000, balance="tokens"))
resource.setrlimit(resource.RLIMIT_DATA, (held() + 2 * count, -1))
sampler = cuseq.data.PackedBatchSampler(lengths, 4096, buffer=50_000, balance="tokens")
rows = iter(sampler)
for _ in range(100):
    row = next(rows)
    assert sum(lengths[row].tolist()) <= 4096
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_memory_is_that_of_the_buffer(run_python, tmp_path):
    """There is no memory for a byte mask and an index, nor for a copy of the lengths."""
    path = tmp_path / "lengths"
    lengths = np.random.default_rng(0).integers(1, 4097, 1_000_000).astype(np.int32)
    with open(path, "wb") as file:
        for _ in range(40):
            lengths.tofile(file)
    done = run_python(f"import sys; sys.argv = ['', {str(path)!r}]\n" + MEMORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


# Balance.


def costs_of(lengths, steps, cost: Callable[[list[int]], float]) -> np.ndarray:
    """Return costs, `[steps, ranks]`."""
    return np.array([[cost([int(lengths[i]) for i in row]) for row in step] for step in steps])


BALANCES = [
    ("tokens", sum),
    ("attention", attention),
    ((2, 30, 5), lambda row: sum(2 * n * n + 30 * n + 5 for n in row)),
    ((0, 1, 0), sum),
    ((0, 0, 1), len),
]


@pytest.mark.parametrize(("balance", "cost"), BALANCES, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_slowest_of_each_step_is_as_fast_as_may_be(balance, cost, shuffle, world_size):
    """Assigning rows in order of cost gives the minimal sum of the steps' maxima."""
    lengths = make_lengths(1000, 128, seed=world_size)
    samplers = make_ranks(lengths, 128, world_size, balance=balance, shuffle=shuffle)
    costs = costs_of(lengths, make_steps(samplers), cost)
    slowest = costs.max(1)
    assert slowest.sum() == np.sort(costs.ravel())[::-1][::world_size].sum()


@given(case=cases(buffer=None, accumulation=1), picked=st.sampled_from(BALANCES[:3]))
def test_balance_of_small_sets_is_the_best_of_all(case, picked):
    """Compare with every assignment of rows to steps."""
    lengths, capacity, _, options = case
    balance, cost = picked
    samplers = make_ranks(lengths[:18], capacity, 2, **{**options, "balance": balance})
    costs = costs_of(lengths, make_steps(samplers), cost)
    if not 1 <= len(costs) <= 4:
        return

    def best(rows: list[float]) -> float:
        if not rows:
            return 0
        first, rest = rows[0], rows[1:]
        return min(
            max(first, other) + best(rest[:i] + rest[i + 1 :]) for i, other in enumerate(rest)
        )

    assert costs.max(1).sum() == best(costs.ravel().tolist())


def test_nearly_equal_at_eight_ranks():
    lengths = make_lengths(50_000, 4096)
    for balance, cost, most in (("tokens", sum, 1.005), ("attention", attention, 1.02)):
        costs = costs_of(lengths, make_steps(make_ranks(lengths, 4096, 8, balance=balance)), cost)
        assert (costs.max(1) / costs.mean(1)).mean() < most


@pytest.mark.parametrize(("balance", "cost"), BALANCES[:3], ids=["tokens", "attention", "own"])
def test_optimizer_steps_are_balanced_over_ranks(balance, cost):
    """Two ranks, two slots: compare with every way of giving each rank two of the four rows."""
    lengths = make_lengths(600, 128)
    samplers = make_ranks(lengths, 128, 2, balance=balance, accumulation=2)
    costs = costs_of(lengths, make_steps(samplers), cost)
    assert len(costs) % 2 == 0 and len(costs) > 20
    for group in costs.reshape(-1, 4).tolist():
        sums = [sum(pair) for pair in itertools.combinations(group, 2)]
        slowest = max(group[0] + group[2], group[1] + group[3])  # [slot, rank], row-major
        assert slowest == min(max(one, sum(group) - one) for one in sums)


@pytest.mark.parametrize("accumulation", [2, 4, 5])
def test_accumulated_sums_differ_by_less_than_their_rows(accumulation):
    lengths = make_lengths(8000, 4096)
    samplers = make_ranks(lengths, 4096, 4, balance="attention", accumulation=accumulation)
    costs = costs_of(lengths, make_steps(samplers), attention).reshape(-1, accumulation, 4)
    sums = costs.sum(1)
    rows = costs.reshape(len(costs), -1)
    assert np.all(np.ptp(sums, 1) <= np.ptp(rows, 1))
    assert (sums.max(1) / sums.mean(1)).mean() < 1.02
    # Each slot waits for its slowest rank too.
    assert (costs.max(2) / costs.mean(2)).mean() < 1.05


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_rank_is_always_the_slowest(accumulation):
    lengths = make_lengths(8000, 4096)
    samplers = make_ranks(lengths, 4096, 4, balance="attention", accumulation=accumulation)
    costs = costs_of(lengths, make_steps(samplers), attention)
    costs = costs.reshape(-1, accumulation, 4).sum(1)
    slowest = np.bincount(costs.argmax(1), minlength=4)
    assert slowest.min() > 0.1 * len(costs)


def test_balance_in_windows():
    lengths = make_lengths(8000, 512)
    spread = {}
    for balance in (None, "attention"):
        steps = make_steps(make_ranks(lengths, 512, 4, balance=balance, buffer=1000))
        costs = costs_of(lengths, steps, attention)
        spread[balance] = (costs.max(1) / costs.mean(1)).mean()
    assert spread["attention"] - 1 < 0.3 * (spread[None] - 1)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("options", [{}, {"balance": "attention"}, {"buffer": 300}], ids=str)
def test_imbalance_is_reported(options, accumulation):
    lengths = make_lengths(1000, 128)
    samplers = make_ranks(lengths, 128, 4, accumulation=accumulation, **options)
    for epoch in (0, 1):
        steps = make_steps(samplers, epoch)
        report = samplers[2].imbalance()
        for told, cost in ((report.tokens, sum), (report.attention, attention)):
            costs = costs_of(lengths, steps, cost).reshape(-1, accumulation, 4).sum(1)
            ratios = costs.max(1) / costs.mean(1)
            assert told.mean == pytest.approx(ratios.mean(), rel=1e-9)
            assert told.max == pytest.approx(ratios.max(), rel=1e-9)


def test_imbalance_where_there_is_nothing_to_compare():
    for lengths in ([], [0, 0, 0, 0], [5]):
        report = make_ranks(lengths, 8, 1)[0].imbalance()
        assert (report.tokens.mean, report.tokens.max) == (1, 1)
        assert (report.attention.mean, report.attention.max) == (1, 1)


# Too long, wrong.


def test_too_long_ones_are_skipped_and_counted():
    lengths = [3, 11, 4, 12, 10]
    for buffer in (None, 2):
        samplers = make_ranks(lengths, 10, 2, overlong="skip", buffer=buffer)
        assert set(samples_of(make_steps(samplers))) == {0, 2, 4}
        assert [sampler.skipped for sampler in samplers] == [2, 2]
    assert cuseq.data.PackedBatchSampler([3, 10], 10, overlong="skip").skipped == 0
    alone = cuseq.data.PackedBatchSampler([11], 10, overlong="skip")
    assert (list(alone), len(alone), alone.skipped) == ([], 0, 1)


@pytest.mark.parametrize("buffer", [None, 2])
def test_too_long_and_negative_ones_are_named(buffer):
    with pytest.raises(ValueError, match=r"capacity = 10.*lengths\[1\] = 11"):
        cuseq.data.PackedBatchSampler([3, 11, 12], 10, buffer=buffer)
    for overlong in ("raise", "skip"):
        with pytest.raises(ValueError, match=r"lengths\[2\] = -1"):
            cuseq.data.PackedBatchSampler([3, 10, -1], 10, overlong=overlong, buffer=buffer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity.*0"),
        ({"rank": 2, "world_size": 2}, "rank.*2"),
        ({"rank": -1}, "rank.*-1"),
        ({"world_size": 0}, "world_size.*0"),
        ({"accumulation": 0}, "accumulation.*0"),
        ({"buffer": 0}, "buffer.*0"),
        ({"strategy": "wrapped"}, "strategy.*wrapped"),
        ({"strategy": "best"}, "strategy.*best"),
        ({"overlong": "split"}, "overlong.*split"),
        ({"overlong": "truncate"}, "overlong.*truncate"),
        ({"balance": "flops"}, "balance.*flops"),
        ({"balance": (1, 2)}, r"balance.*\(1, 2\)"),
        ({"balance": "123"}, "balance.*'123'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        cuseq.data.PackedBatchSampler([3, 4], **{"capacity": 8, **options})


def test_options_are_keywords():
    with pytest.raises(TypeError):
        cuseq.data.PackedBatchSampler([3, 4], 8, 0)


class Spy:
    """Counts calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    rows=st.integers(1, 12),
    quadratic=st.booleans(),
)
def test_samples_are_spread_over_the_cheapest_rows_with_room(lengths, rows, quadratic):
    costs = {i: float(n * n if quadratic else n) for i, n in enumerate(lengths)}
    rows, capacity = min(rows, len(lengths)), 30
    expected = [[] for _ in range(rows)]
    for sample in sorted(costs, key=lambda i: -lengths[i]):
        fitting = [
            (sum(costs[i] for i in row), len(row), number)
            for number, row in enumerate(expected)
            if sum(lengths[i] for i in row) + lengths[sample] <= capacity
        ]
        if not fitting:
            expected = None
            break
        expected[min(fitting)[2]].append(sample)
    found = _balance._spread(list(costs), rows, dict(enumerate(lengths)), costs, capacity)
    assert found == expected


def test_rows_without_room_are_not_looked_at_for_every_sample(monkeypatch):
    """Full rows that are cheap in attention were once examined for thousands of samples."""
    push = Spy(_balance.heappush)
    monkeypatch.setattr(_balance, "heappush", push)
    lengths = dict(enumerate(make_lengths(20_000, 1024).tolist()))
    rows = -(-sum(lengths.values()) // 1024) + 20
    costs = {sample: float(n * n) for sample, n in lengths.items()}
    assert _balance._spread(list(lengths), rows, lengths, costs, 1024) is not None
    assert push.calls <= 3 * len(lengths)


# Resuming.


def through_a_checkpoint(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # weights_only


RESUMED = [
    {},
    {"strategy": "sequential"},
    {"buffer": 25},
    {"shuffle": False, "drop_last": True},
    {"balance": "attention", "accumulation": 2},
    {"balance": "tokens", "buffer": 40, "accumulation": 2},
]


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_resume_at_every_step(options):
    lengths = make_lengths(150, 64)

    def make(rank=1):
        return cuseq.data.PackedBatchSampler(lengths, 64, rank=rank, world_size=2, **options)

    sampler = make()
    epochs = {}
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        epochs[epoch] = list(sampler)
    expected = epochs[2]
    sampler.set_epoch(2)
    rows = iter(sampler)
    assert len(expected) > 4
    for done in range(len(expected) + 1):
        state = sampler.state_dict()
        resumed = make()
        resumed.load_state_dict(through_a_checkpoint(state))
        assert list(resumed) == expected[done:]
        if done < len(expected):
            assert list(resumed) == expected, "the whole epoch again, as without resuming"
        else:
            with pytest.warns(UserWarning, match="the end of epoch 2, which has no batches left"):
                assert list(resumed) == [], "until set_epoch chooses another"
        resumed.set_epoch(3)
        assert list(resumed) == epochs[3]
        counted = make()
        counted.set_epoch(2)
        resumed.load_state_dict(counted.state_dict(steps=done))
        assert list(resumed) == expected[done:]
        if done < len(expected):
            assert next(rows) == expected[done]
    assert next(rows, None) is None
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == [], "the end was seen"


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_the_state_of_one_rank_is_that_of_all(options):
    """Rank 0 writes the checkpoint, and every rank reads it."""
    ranks = make_ranks(make_lengths(150, 64), 64, 2, **options)
    expected = [list(sampler) for sampler in ranks]
    for step in (0, 3):
        states = [sampler.state_dict(steps=step) for sampler in ranks]
        assert states[0] == states[1]
        for sampler, rows in zip(ranks, expected, strict=True):
            sampler.load_state_dict(states[0])
            assert list(sampler) == rows[step:]


@settings(max_examples=50)
@given(case=cases(), stops=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_interrupted_at_random(case, stops):
    """The order stays the same after any number of interruptions, in every epoch."""
    lengths, capacity, world_size, options = case
    ranks = make_ranks(lengths, capacity, world_size, **options)
    expected = [make_steps(ranks, epoch) for epoch in range(2)]
    for rank in range(world_size):
        sampler = make_ranks(lengths, capacity, world_size, **options)[rank]
        for epoch in range(2):
            sampler.set_epoch(epoch)
            rows = []
            for stop in stops:
                rows += itertools.islice(sampler, stop)
                state = through_a_checkpoint(sampler.state_dict())
                sampler = make_ranks(lengths, capacity, world_size, **options)[rank]
                sampler.load_state_dict(state)
            rows += sampler
            assert rows == [step[rank] for step in expected[epoch]]


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_iterations_at_a_time_are_whole(options):
    """Iterating over the whole set mid-epoch, as an evaluation may, loses no batch."""
    sampler = cuseq.data.PackedBatchSampler(make_lengths(150, 64), 64, **options)
    expected = list(sampler)
    rows = []
    for number, row in enumerate(sampler):
        rows.append(row)
        if number == 3:
            assert list(sampler) == expected
            assert sampler.state_dict()["step"] == len(expected)
        else:
            assert sampler.state_dict()["step"] == number + 1, "of what went on last"
    assert rows == expected
    assert [a for a, b in zip(sampler, sampler, strict=True) if a == b] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_an_iteration_that_has_not_begun(workers):
    """The state is at the start, although the sampler was at the end of the iteration before."""
    sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    expected = list(sampler)
    rows = iter(sampler)
    state = sampler.state_dict()
    assert state["step"] == 0 and list(rows) == expected
    sampler.load_state_dict(state)
    assert list(sampler) == expected

    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = make_loader(sampler, workers, stateful)
    assert [rows_of(batch) for batch in loader] == expected
    batches = iter(loader)
    state = loader.state_dict()
    del batches
    resumed = make_loader(cuseq.data.PackedBatchSampler(sampler_lengths(), 64), workers, stateful)
    resumed.load_state_dict(state)
    assert [rows_of(batch) for batch in resumed] == expected


def test_set_epoch_after_resuming():
    """A loop sets the epoch before each one, including the interrupted one, which continues."""
    lengths = make_lengths(150, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64)
    sampler.set_epoch(5)
    expected = list(sampler)
    state = sampler.state_dict(steps=3)
    resumed = cuseq.data.PackedBatchSampler(lengths, 64)
    resumed.load_state_dict(state)
    resumed.set_epoch(5)
    assert list(resumed) == expected[3:]
    resumed.load_state_dict(state)
    resumed.set_epoch(6)
    sampler.set_epoch(6)
    assert list(resumed) == list(sampler)


def test_a_state_is_a_snapshot():
    sampler = cuseq.data.PackedBatchSampler(make_lengths(150, 64), 64)
    rows = iter(sampler)
    next(rows)
    state = sampler.state_dict()
    before = copy.deepcopy(state)
    list(rows)
    assert state == before
    assert len(str(state)) < 1000, "a few numbers"


SETTINGS = {
    "capacity": 65,
    "strategy": "ffd",
    "balance": "tokens",
    "accumulation": 2,
    "shuffle": False,
    "drop_last": True,
    "buffer": 30,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_state_of_other_settings_is_refused(name):
    lengths = make_lengths(50, 64)
    base = {"capacity": 64, "world_size": 2}
    sampler = cuseq.data.PackedBatchSampler(lengths, **base)
    other = cuseq.data.PackedBatchSampler(lengths, **{**base, name: SETTINGS[name]})
    with pytest.raises(ValueError, match=name):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match=name):
        sampler.load_state_dict(other.state_dict())


def test_state_of_another_seed_never_gives_another_order():
    lengths = make_lengths(50, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, seed=1)
    other = cuseq.data.PackedBatchSampler(lengths, 64, seed=2)
    expected = list(sampler)
    try:
        other.load_state_dict(sampler.state_dict(steps=2))
    except ValueError as error:
        assert "seed" in str(error)
    else:
        assert list(other) == expected[2:]


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [values[1], values[0], *values[2:]],
        lambda values: values[:-1],
        lambda values: [*values, 1],
        lambda values: [*values[:-1], values[-1] + 1],
        lambda values: [values[0] + 1, values[1] - 1, *values[2:]],
    ],
    ids=["swapped", "one less", "one more", "one longer", "same sum"],
)
def test_state_of_another_set_is_refused(change):
    values = [5, 9, *make_lengths(50, 60).tolist()]
    state = cuseq.data.PackedBatchSampler(values, 64).state_dict()
    other = cuseq.data.PackedBatchSampler(change(values), 64)
    with pytest.raises(ValueError, match="lengths"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: None, TypeError, "what state_dict returned, got NoneType"),
        (lambda state: {}, ValueError, "what state_dict returned, but it has no 'version'"),
        (lambda state: {k: v for k, v in state.items() if k != "step"}, ValueError, "no 'step'"),
        (lambda state: state | {"step": "3"}, TypeError, "step must be an int, got '3'"),
    ],
)
def test_what_is_no_state_is_refused(change, error, message):
    sampler = cuseq.data.PackedBatchSampler([3, 4, 5], 8)
    with pytest.raises(error, match=message):
        sampler.load_state_dict(change(sampler.state_dict()))


def test_steps_beyond_the_epoch_are_refused():
    sampler = cuseq.data.PackedBatchSampler([3, 4, 5], 8)
    for steps in (-1, len(sampler) + 1):
        with pytest.raises(ValueError, match=f"steps.*{steps}"):
            sampler.state_dict(steps=steps)


# Resuming on another number of ranks.


def epoch_over_ranks(lengths, capacity, stages, epoch, **options):
    """Run one epoch over stages `(world_size, accumulation, stop)`, the last one to its end.

    Returns what each stage yields, as `make_steps` does, and the samplers of the last one.
    """
    state, parts, ranks = None, [], []
    for number, (world_size, accumulation, stop) in enumerate(stages):
        ranks = make_ranks(lengths, capacity, world_size, accumulation=accumulation, **options)
        rows = []
        for sampler in ranks:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(through_a_checkpoint(state))
            until = None if number == len(stages) - 1 else stop
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*which has no batches left")
                rows.append(list(itertools.islice(sampler, until)))
        assert len(set(map(len, rows))) == 1, "or DDP hangs"
        state = ranks[-1].state_dict()
        assert state == ranks[0].state_dict(), "the state of one rank is that of all"
        parts.append(list(zip(*rows, strict=True)))
    return parts, ranks


STAGES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 12))


@settings(max_examples=200)
@given(
    case=cases(drop_last=False),
    stages=st.lists(STAGES, min_size=2, max_size=4),
    epoch=st.integers(0, 2),
)
@example(
    case=([1] * 9, 1, 1, FEW | {"buffer": None, "drop_last": False}),
    stages=[(4, 1, 2), (2, 1, 0)],
    epoch=0,
)
def test_every_sample_once_on_changing_ranks(case, stages, epoch):
    lengths, capacity, _, options = case
    options = {name: value for name, value in options.items() if name != "accumulation"}
    # With the same number of ranks, another accumulation is an error.
    stages = [(w, stages[0][1] if w == stages[0][0] else 1 + w % 3, stop) for w, _, stop in stages]
    parts, ranks = epoch_over_ranks(lengths, capacity, stages, epoch, **options)
    rows = [row for steps in parts for step in steps for row in step]
    assert all(rows), "no row is empty"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert set(counts) == set(range(len(lengths))), "none is lost"
    repeated = sum(counts.values()) - len(lengths)
    assert all(sampler.repeated == repeated for sampler in ranks)
    # Samples are repeated only at a stage's end, if fewer were left than places in a step.
    assert repeated <= sum(w * a - 1 for w, a, _ in stages)


@settings(max_examples=200)
@given(
    case=cases(drop_last=True),
    stages=st.lists(STAGES, min_size=2, max_size=4),
    epoch=st.integers(0, 2),
)
def test_no_sample_twice_on_changing_ranks(case, stages, epoch):
    """With drop_last, rows that do not fill a group of the last ranks are left out."""
    lengths, capacity, _, options = case
    options = {name: value for name, value in options.items() if name != "accumulation"}
    stages = [(w, stages[0][1] if w == stages[0][0] else 1 + w % 3, stop) for w, _, stop in stages]
    parts, ranks = epoch_over_ranks(lengths, capacity, stages, epoch, **options)
    rows = [row for steps in parts for step in steps for row in step]
    assert all(rows) and all(sum(lengths[i] for i in row) <= capacity for row in rows)
    counts = Counter(sample for row in rows for sample in row)
    assert max(counts.values(), default=1) == 1
    assert all(sampler.repeated == 0 for sampler in ranks)
    left = set(range(len(lengths))) - set(counts)
    # A stage that reached the end of the epoch ended it; its number of ranks decides what is left
    # out.
    group = max(w * a for w, a, _ in stages)
    assert sum(lengths[i] for i in left) <= (group - 1) * capacity


@settings(max_examples=50)
@given(case=cases(), stops=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_the_same_ranks_go_on_bit_equal(case, stops):
    """Also if a stage on another number of ranks was started without taking a batch."""
    lengths, capacity, world_size, options = case
    accumulation = options.pop("accumulation")
    ranks = make_ranks(lengths, capacity, world_size, accumulation=accumulation, **options)
    stages = [(world_size, accumulation, stop) for stop in stops]
    idle = [(world_size + 1, accumulation, 0)]
    stages = [stage for each in stages for stage in [each, *idle]] + [(world_size, accumulation, 0)]
    parts, _ = epoch_over_ranks(lengths, capacity, stages, 1, **options)
    assert [step for steps in parts for step in steps] == make_steps(ranks, 1)


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_ranks_that_had_no_batch_leave_no_trace(options):
    lengths = make_lengths(400, 64)
    accumulation = options.get("accumulation", 1)
    options = {name: value for name, value in options.items() if name != "accumulation"}
    stages = [(2, accumulation, 3), (3, accumulation, 0), (2, accumulation, 0)]
    parts, ranks = epoch_over_ranks(lengths, 64, stages, 2, **options)
    assert [len(steps) for steps in parts[:2]] == [3, 0]
    assert parts[0] + parts[2] == make_steps(
        make_ranks(lengths, 64, 2, accumulation=accumulation, **options), 2
    )


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_resume_on_other_ranks_literally(options):
    """4 ranks stop after 3 steps, 2 continue with the rest: each sample once, rows equally full."""
    lengths = make_lengths(400, 64)
    accumulation = options.get("accumulation", 1)
    options = {name: value for name, value in options.items() if name != "accumulation"}
    stages = [(4, accumulation, 3), (2, 2 * accumulation, 0)]
    (first, second), ranks = epoch_over_ranks(lengths, 64, stages, 2, **options)
    assert len(first) == 3 and len(second) == len(ranks[0]) > 3
    assert len(second) % (2 * accumulation) == 0
    seen = samples_of(first) + samples_of(second)
    assert len(set(seen)) == len(seen)
    if not options.get("drop_last"):
        assert sorted(seen) == list(range(400))
    ((same, rest), _) = epoch_over_ranks(lengths, 64, [stages[0], stages[0]], 2, **options)
    assert same == first and 2 * len(second) <= 4 * (len(rest) + accumulation)


def test_steps_count_from_where_the_ranks_changed():
    lengths = make_lengths(600, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, rank=1, world_size=4)
    state = sampler.state_dict(steps=5)
    resumed = cuseq.data.PackedBatchSampler(lengths, 64)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["step"] == 0
    left = len(resumed)
    rows = list(resumed)
    assert len(rows) == left < len(cuseq.data.PackedBatchSampler(lengths, 64))
    resumed.load_state_dict(state)
    again = cuseq.data.PackedBatchSampler(lengths, 64)
    again.load_state_dict(resumed.state_dict(steps=3))
    assert list(again) == rows[3:]
    assert len(list(again)) == len(cuseq.data.PackedBatchSampler(lengths, 64)), "a whole epoch"
    assert len(again) == len(cuseq.data.PackedBatchSampler(lengths, 64))
    with pytest.raises(ValueError, match=f"steps must be at most the {left} batches"):
        resumed.state_dict(steps=left + 1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_has_ended_stays_ended_on_other_ranks(drop_last):
    """Also if the last rows, left out on eight ranks, would fill a step of one."""
    lengths = make_lengths(600, 64)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64, world_size=8, drop_last=drop_last)
    state = sampler.state_dict(steps=len(sampler))
    resumed = cuseq.data.PackedBatchSampler(lengths, 64, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert len(resumed) == 0
    for _ in range(2):
        with pytest.warns(UserWarning, match="the end of epoch 0, which has no batches left"):
            assert list(resumed) == []
    resumed.set_epoch(1)
    plain = cuseq.data.PackedBatchSampler(lengths, 64, drop_last=drop_last)
    plain.set_epoch(1)
    assert list(resumed) == list(plain)


def test_balance_on_other_ranks():
    lengths = make_lengths(20_000, 4096)
    for accumulation in (1, 2):
        stages = [(8, 1, 20), (4, accumulation, 0)]
        (_, steps), ranks = epoch_over_ranks(lengths, 4096, stages, 0, balance="attention")
        costs = costs_of(lengths, steps, attention).reshape(-1, accumulation, 4).sum(1)
        ratios = costs.max(1) / costs.mean(1)
        assert ratios.mean() < 1.02
        report = ranks[1].imbalance().attention
        assert report.mean == pytest.approx(ratios.mean(), rel=1e-9)


def test_two_iterations_at_a_time_on_other_ranks():
    lengths = make_lengths(200, 64)
    state = cuseq.data.PackedBatchSampler(lengths, 64, world_size=4).state_dict(steps=4)
    sampler = cuseq.data.PackedBatchSampler(lengths, 64)
    whole = list(sampler)
    sampler.load_state_dict(state)
    rest = list(sampler)
    sampler.load_state_dict(state)
    rows = iter(sampler)
    started = [next(rows), next(rows)]
    first = sampler.state_dict()
    other = iter(sampler)
    assert next(other) == whole[0]
    second = sampler.state_dict()
    assert started + list(rows) == rest
    resumed = cuseq.data.PackedBatchSampler(lengths, 64)
    for state, expected in ((first, rest[2:]), (second, whole[1:])):
        resumed.load_state_dict(state)
        assert list(resumed) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_on_other_ranks(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    seen, state = [], None
    for rank in range(3):
        sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64, rank=rank, world_size=3)
        loader = make_loader(sampler, workers, stateful)
        seen += [rows_of(batch) for batch in itertools.islice(loader, 2)]
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        del batches
    for rank in range(2):
        sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64, rank=rank, world_size=2)
        loader = make_loader(sampler, workers, stateful)
        loader.load_state_dict(state)
        seen += [rows_of(batch) for batch in loader]
    assert sorted(sample for row in seen for sample in row) == list(range(120))


def test_another_accumulation_on_as_many_ranks_is_refused():
    lengths = make_lengths(50, 64)
    state = cuseq.data.PackedBatchSampler(lengths, 64, world_size=2).state_dict(steps=1)
    other = cuseq.data.PackedBatchSampler(lengths, 64, world_size=2, accumulation=2)
    with pytest.raises(ValueError, match="it is 2 and was 1"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"before": None}, TypeError, "before must be a list, got NoneType"),
        ({"before": [3]}, TypeError, "before must hold world_size, accumulation and steps, got 3"),
        ({"before": [[2, 1]]}, TypeError, "before must hold world_size, accumulation and steps"),
        ({"before": [[2, 1, 1.5]]}, TypeError, "step must be an int, got 1.5"),
        ({"before": [[0, 1, 1]]}, ValueError, "world_size must be at least 1, got 0"),
        ({"world_size": "2"}, TypeError, "world_size must be an int, got '2'"),
        ({"step": -1}, ValueError, "step must be at least 0, got -1"),
    ],
)
def test_wrong_positions_are_refused(change, error, message):
    sampler = cuseq.data.PackedBatchSampler([3, 4, 5], 8)
    expected = list(sampler)
    state = sampler.state_dict(steps=0)
    with pytest.raises(error, match=message):
        sampler.load_state_dict(state | change)
    assert list(sampler) == expected, "as it was"


def test_steps_beyond_the_epoch_of_other_ranks_are_refused():
    sampler = cuseq.data.PackedBatchSampler([3, 5, 8], 8)
    sampler.load_state_dict(sampler.state_dict() | {"step": 2, "world_size": 2})
    with pytest.raises(ValueError, match="step must be at most the 1 of the epoch, got 2"):
        list(sampler)


# With DataLoader.


class Documents(torch.utils.data.Dataset):
    """Sample i holds the token i + 1, repeated to its length."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [index + 1] * int(self.lengths[index])}


def make_loader(sampler, workers: int = 0, cls=DataLoader):
    return cls(
        Documents(sampler_lengths()),
        batch_sampler=sampler,
        collate_fn=cuseq.PackingCollator(capacity=64, total_multiple=8),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def sampler_lengths() -> np.ndarray:
    return make_lengths(120, 64)


def rows_of(batch: dict) -> Row:
    """Return the samples of a row, found by their tokens, and check them."""
    row, begin = [], 0
    ids = batch["input_ids"][0].tolist()
    for length in batch["packed"].lengths.tolist():
        (token,) = set(ids[begin : begin + length])
        assert length == sampler_lengths()[token - 1]
        row.append(token - 1)
        begin += length
    return row


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_through_a_loader(workers):
    sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    loader = make_loader(sampler, workers)
    plain = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    for epoch in (0, 1):
        for each in (sampler, plain):
            each.set_epoch(epoch)
        assert len(loader) == len(plain)
        assert [rows_of(batch) for batch in loader] == list(plain)


def test_workers_prefetch_and_the_caller_counts():
    sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    sampler.set_epoch(1)
    expected = list(sampler)
    batches = iter(make_loader(sampler, workers=2))
    rows = [rows_of(next(batches)) for _ in range(3)]
    state = sampler.state_dict(steps=3)
    assert sampler.state_dict() != state, "what was yielded is ahead of what was consumed"
    del batches
    resumed = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    resumed.load_state_dict(through_a_checkpoint(state))
    rows += [rows_of(batch) for batch in make_loader(resumed, workers=2)]
    assert rows == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_of_torchdata(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make():
        sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
        return sampler, make_loader(sampler, workers, stateful)

    sampler, loader = make()
    sampler.set_epoch(1)
    expected = list(make_epoch(1))
    batches = iter(loader)
    rows = [rows_of(next(batches)) for _ in range(3)]
    state = loader.state_dict()
    del batches
    _, resumed = make()
    resumed.load_state_dict(state)
    rows += [rows_of(batch) for batch in resumed]
    assert rows == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_at_the_end_of_an_epoch(workers):
    """No sample comes again, and the next epoch is complete."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = make_loader(make_epoch(1), workers, stateful)
    assert len(list(loader)) == len(make_epoch(1))
    sampler = make_epoch(0)
    resumed = make_loader(sampler, workers, stateful)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="the end of epoch 1"):
        assert list(resumed) == [] and sampler.epoch == 1, "nothing is left of it"
    sampler.set_epoch(2)
    assert [rows_of(batch) for batch in resumed] == list(make_epoch(2))


def make_epoch(epoch: int) -> cuseq.data.PackedBatchSampler:
    sampler = cuseq.data.PackedBatchSampler(sampler_lengths(), 64)
    sampler.set_epoch(epoch)
    return sampler


# With DDP.

EPOCHS, RANKS = 2, 4


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(128, distributed.DIM, dtype=torch.float64)
        self.blocks = distributed.make_model(1)
        self.head = nn.Linear(distributed.DIM, 128, dtype=torch.float64)

    def forward(self, input_ids, labels, packed):
        logits = self.head(self.blocks(self.tokens(input_ids), packed))[0, :-1]
        return nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")


def train(rank: int) -> dict:
    sampler = cuseq.data.PackedBatchSampler(
        sampler_lengths(), 64, rank=rank, world_size=RANKS, balance="attention"
    )
    model = DistributedDataParallel(Guess())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = make_loader(sampler)
    rows = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        rows.append([])
        for batch in loader:
            optimizer.zero_grad()
            model(batch["input_ids"], batch["labels"], batch["packed"]).backward()
            optimizer.step()
            rows[-1].append(rows_of(batch))
    return {"rows": rows, "weights": [p.detach() for p in model.parameters()]}


@pytest.mark.full
def test_epochs_over_four_processes():
    results = distributed.run(train, processes=RANKS)
    samplers = make_ranks(sampler_lengths(), 64, RANKS, balance="attention")
    for epoch in range(EPOCHS):
        rows = [result["rows"][epoch] for result in results]
        assert len({len(of_rank) for of_rank in rows}) == 1
        seen = [sample for of_rank in rows for row in of_rank for sample in row]
        assert sorted(seen) == list(range(len(sampler_lengths())))
        steps = make_steps(samplers, epoch)
        assert [list(step) for step in zip(*rows, strict=True)] == [list(step) for step in steps]
    for result in results[1:]:
        torch.testing.assert_close(result["weights"], results[0]["weights"], rtol=0, atol=0)
