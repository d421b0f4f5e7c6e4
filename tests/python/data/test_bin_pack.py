"""Test bin_pack against loops and TRL's packer: every strategy and every form of lengths."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuseq

WHOLE = ("bfd", "ffd", "sequential")
STRATEGIES = (*WHOLE, "wrapped")
OVERLONG = ("raise", "split", "truncate")

Piece = tuple[int, int, int]  # sample, first token, tokens


def naive_pieces(lengths: list[int], capacity: int, overlong: str) -> list[Piece]:
    pieces = []
    for sample, length in enumerate(lengths):
        if length <= capacity:
            pieces.append((sample, 0, length))
        elif overlong == "truncate":
            pieces.append((sample, 0, capacity))
        else:
            for start in range(0, length, capacity):
                pieces.append((sample, start, min(capacity, length - start)))
    return pieces


def naive_wrapped(lengths: list[int], capacity: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    room = 0
    for sample, length in enumerate(lengths):
        start = 0
        while True:
            if not rows or (room == 0 and start < length):
                rows.append([])
                room = capacity
            tokens = min(length - start, room)
            rows[-1].append((sample, start, tokens))
            room -= tokens
            start += tokens
            if start == length:
                break
    return rows


def naive_pack(
    lengths: list[int], capacity: int, strategy: str, overlong: str = "raise"
) -> list[list[Piece]]:
    """Return the rows in order of opening; pieces of a row are in order of placement."""
    if strategy == "wrapped":
        return naive_wrapped(lengths, capacity)
    pieces = naive_pieces(lengths, capacity, overlong)
    if strategy != "sequential":
        pieces.sort(key=lambda piece: -piece[2])  # Python's sort is stable
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        chosen = None
        for row in range(len(rows)):
            if room[row] < piece[2]:
                continue
            if strategy == "sequential" and row != len(rows) - 1:
                continue
            if chosen is None or (strategy == "bfd" and room[row] < room[chosen]):
                chosen = row
        if chosen is None:
            chosen = len(rows)
            rows.append([])
            room.append(capacity)
        rows[chosen].append(piece)
        room[chosen] -= piece[2]
    return rows


def rows_of(plan) -> list[list[Piece]]:
    indices, offsets = plan
    pieces = list(zip(indices.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    ends = offsets.tolist()
    assert ends[0] == 0 and ends[-1] == len(pieces)
    return [pieces[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def check_guarantees(lengths: list[int], capacity: int, rows: list[list[Piece]]) -> None:
    """Check that rows hold every token of every sample once, in order, and respect the capacity."""
    pieces: dict[int, list[tuple[int, int]]] = {sample: [] for sample in range(len(lengths))}
    for row in rows:
        assert row, "a row holds something"
        assert sum(tokens for _, _, tokens in row) <= capacity
        for sample, start, tokens in row:
            pieces[sample].append((start, tokens))
    for sample, length in enumerate(lengths):
        assert pieces[sample], f"sample {sample} is missing"
        end = 0
        for start, tokens in sorted(pieces[sample]):
            assert start == end
            end += tokens
        assert end == length
        assert length == 0 or all(tokens > 0 for _, tokens in pieces[sample])


@st.composite
def packings(draw, longest: int = 1) -> tuple[list[int], int]:
    """Draw lengths and a capacity; the longest is at most `longest` times the capacity."""
    capacity = draw(st.sampled_from([1, 2, 7, 10, 16, 63, 64, 65, 100, 5000, 2**31, 2**40]))
    most = capacity * longest
    length = st.one_of(
        st.integers(0, most),
        st.integers(0, min(most, 12)),  # many equal ones
        st.sampled_from(sorted({0, 1, capacity // 3, capacity // 2, capacity - 1, capacity, most})),
    )
    return draw(st.lists(length, max_size=40)), capacity


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("bfd", [[0], [1, 3, 2], [4]]),
        ("ffd", [[0, 2], [1, 3], [4]]),
        ("sequential", [[0], [1, 2, 3], [4]]),
    ],
)
def test_literal_case(strategy, rows):
    plan = cuseq.data.bin_pack([7, 5, 1, 3, 3], 9, strategy)
    indices, offsets = plan
    assert [plan.row(b) for b in range(plan.num_rows)] == rows
    assert indices.tolist() == [sample for row in rows for sample in row]
    assert offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()


def test_literal_case_of_wrapped():
    plan = cuseq.data.bin_pack([6, 5, 0, 9], 8, "wrapped")
    indices, offsets = plan
    assert indices.tolist() == [0, 1, 1, 2, 3, 3]
    assert offsets.tolist() == [0, 2, 5, 6]
    assert plan.starts.tolist() == [0, 0, 2, 0, 0, 5]
    assert plan.lengths.tolist() == [6, 2, 3, 0, 5, 4]
    assert plan.row_lengths.tolist() == [8, 8, 4]


def test_what_a_plan_says():
    plan = cuseq.data.bin_pack([2, 8, 5, 3], 8)
    assert isinstance(plan, cuseq.data.PackingPlan) and isinstance(plan, tuple) and len(plan) == 2
    for values in (*plan, plan.starts, plan.lengths, plan.row_lengths):
        assert (values.dtype, values.device.type, values.dim()) == (torch.int64, "cpu", 1)
    assert [plan.row(b) for b in range(3)] == [[1], [2, 3], [0]]
    assert all(type(sample) is int for sample in plan.row(1))
    assert plan.starts.tolist() == [0, 0, 0, 0]
    assert plan.lengths.tolist() == [8, 5, 3, 2]
    assert plan.row_lengths.tolist() == [8, 8, 2]
    assert (plan.num_rows, plan.capacity) == (3, 8)
    assert plan.fill == pytest.approx(18 / 24)


def test_a_plan_can_be_copied():
    # DataLoader workers get the plan pickled.
    plan = cuseq.data.bin_pack([2, 8, 5, 3], 8)
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert type(copied) is type(plan)
        assert rows_of(copied) == rows_of(plan)
        assert (copied.capacity, copied.fill) == (plan.capacity, plan.fill)


def test_a_row_that_is_not_there_is_refused():
    plan = cuseq.data.bin_pack([2, 8, 5, 3], 8)
    with pytest.raises(IndexError, match="3"):
        plan.row(3)
    with pytest.raises(TypeError, match="number must be an int, got 'a'"):
        plan.row("a")


def arguments_of(plan: cuseq.data.PackingPlan) -> dict[str, Any]:
    names = ("indices", "offsets", "starts", "lengths", "capacity")
    return {name: getattr(plan, name) for name in names}


def test_a_plan_is_made_of_tensors_of_int64():
    plan = cuseq.data.bin_pack([2, 8, 5, 3], 8)
    right = arguments_of(plan)
    assert rows_of(cuseq.data.PackingPlan(**right)) == rows_of(plan)
    for name in right:
        rule = "an int" if name == "capacity" else "a tensor"
        with pytest.raises(TypeError, match=f"{name} must be {rule}, got"):
            cuseq.data.PackingPlan(**right | {name: "a"})
    with pytest.raises(TypeError, match="offsets must be int64, .* got torch.int32"):
        cuseq.data.PackingPlan(**right | {"offsets": plan.offsets.int()})
    with pytest.raises(ValueError, match=r"lengths must have one dimension, got shape \[1, 4\]"):
        cuseq.data.PackingPlan(**right | {"lengths": plan.lengths[None]})


@pytest.mark.parametrize("name", ["indices", "offsets", "starts", "lengths"])
def test_a_plan_whose_tensors_change_while_it_is_made(name):
    """An int of another type may run code that empties what was checked already."""

    class Emptying:
        def __index__(self) -> int:
            right[name].data = torch.empty(0, dtype=torch.int64)
            return 8

    right = arguments_of(cuseq.data.bin_pack([2, 8, 5, 3], 8)) | {"capacity": Emptying()}
    with pytest.raises(ValueError, match="must (have one number for each|ascend from 0)"):
        cuseq.data.PackingPlan(**right)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(packing=packings())
def test_equal_to_the_loops(strategy, packing):
    lengths, capacity = packing
    plan = cuseq.data.bin_pack(lengths, capacity, strategy)
    rows = rows_of(plan)
    check_guarantees(lengths, capacity, rows)
    assert rows == naive_pack(lengths, capacity, strategy)
    assert plan.num_rows == len(rows)
    assert plan.row_lengths.tolist() == [sum(tokens for _, _, tokens in row) for row in rows]
    assert [plan.row(b) for b in range(len(rows))] == [[p[0] for p in row] for row in rows]
    if rows:
        assert plan.fill == pytest.approx(sum(lengths) / (len(rows) * capacity))


@pytest.mark.parametrize("overlong", ["split", "truncate"])
@pytest.mark.parametrize("strategy", WHOLE)
@given(packing=packings(longest=3))
def test_too_long_ones_equal_to_the_loops(strategy, overlong, packing):
    lengths, capacity = packing
    rows = rows_of(cuseq.data.bin_pack(lengths, capacity, strategy, overlong=overlong))
    kept = lengths if overlong == "split" else [min(n, capacity) for n in lengths]
    check_guarantees(kept, capacity, rows)
    assert rows == naive_pack(lengths, capacity, strategy, overlong)


@pytest.mark.parametrize("overlong", OVERLONG)
@given(packing=packings(longest=3))
def test_wrapped_takes_any_length(overlong, packing):
    lengths, capacity = packing
    rows = rows_of(cuseq.data.bin_pack(lengths, capacity, "wrapped", overlong=overlong))
    check_guarantees(lengths, capacity, rows)
    assert rows == naive_wrapped(lengths, capacity)
    tokens = [sum(tokens for _, _, tokens in row) for row in rows]
    assert all(n == capacity for n in tokens[:-1]), "cut exactly at the capacity"
    assert [sample for row in rows for sample, _, _ in row] == sorted(p[0] for r in rows for p in r)


def distributions(count: int, capacity: int) -> dict[str, list[int]]:
    random = np.random.default_rng(count + capacity)
    lognormal = random.lognormal(np.log(capacity / 12), 0.9, count)
    return {
        "lognormal": np.clip(lognormal, 1, capacity).astype(int).tolist(),
        "uniform": random.integers(0, capacity + 1, count).tolist(),
        "two values": random.choice([capacity // 3, capacity // 2 + 1], count).tolist(),
        "large": random.integers(capacity // 2, capacity + 1, count).tolist(),
        "descending": sorted(random.integers(0, capacity // 2, count).tolist(), reverse=True),
        "ascending": sorted(random.integers(0, capacity // 2, count).tolist()),
    }


@pytest.mark.parametrize("strategy", ["bfd", "ffd"])
@pytest.mark.parametrize(
    ("count", "capacity"), [(1200, 64), (1200, 4096), (1200, 4097), (1200, 100_003), (700, 2**31)]
)
def test_larger_sets_equal_to_the_loops(count, capacity, strategy):
    """Sets large enough to use every level of the search for a row."""
    for name, lengths in distributions(count, capacity).items():
        rows = rows_of(cuseq.data.bin_pack(lengths, capacity, strategy))
        assert rows == naive_pack(lengths, capacity, strategy), name


def test_a_million_lengths_reach_the_bound():
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.4, 0.95, 1_000_000), 1, 4096).astype(np.int64)
    bound = -(-int(lengths.sum()) // 4096)
    for strategy in ("bfd", "ffd"):
        plan = cuseq.data.bin_pack(lengths, 4096, strategy)
        indices, offsets = plan
        assert torch.equal(indices.sort().values, torch.arange(len(lengths)))
        assert np.array_equal(plan.lengths.numpy(), lengths[indices.numpy()])
        assert int(plan.row_lengths.max()) <= 4096
        summed = torch.zeros(plan.num_rows, dtype=torch.int64).index_add_(
            0, torch.repeat_interleave(offsets.diff()), plan.lengths
        )
        assert torch.equal(summed, plan.row_lengths)
        assert bound <= plan.num_rows <= bound + 2


@pytest.mark.parametrize("strategy", ["bfd", "ffd"])
@given(
    copies=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=6),
    shuffle=st.randoms(use_true_random=False),
)
def test_stable_among_equals(strategy, copies, shuffle):
    lengths = [length for length, count in copies for _ in range(count)]
    shuffle.shuffle(lengths)
    rows = rows_of(cuseq.data.bin_pack(lengths, 12, strategy))
    placed: dict[int, list[int]] = {}
    for row in rows:
        tokens = [n for _, _, n in row]
        assert tokens == sorted(tokens, reverse=True), "in order of placement"
        for equal in set(tokens):
            samples = [sample for sample, _, n in row if n == equal]
            assert samples == sorted(samples)
    for row in rows:  # the first piece of each row: rows are in order of opening
        placed.setdefault(row[0][2], []).append(row[0][0])
    for samples in placed.values():
        assert samples == sorted(samples)


def test_among_rows_of_equal_room_the_one_opened_first():
    # Row 1 reached a room of 1 before row 0 did; row 2 reached a room of 2 last.
    plan = cuseq.data.bin_pack([18, 13, 8, 3, 1], 22)
    assert [plan.row(b) for b in range(plan.num_rows)] == [[0, 3, 4], [1, 2]]
    plan = cuseq.data.bin_pack([8, 8, 8, 5, 2], 10)
    assert [plan.row(b) for b in range(plan.num_rows)] == [[0, 4], [1], [2], [3]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_lengths(strategy):
    assert [cuseq.data.bin_pack([0, 0, 0], 5, strategy).row(0)] == [[0, 1, 2]]
    assert cuseq.data.bin_pack([0, 0, 0], 5, strategy).num_rows == 1
    plan = cuseq.data.bin_pack([0, 5, 0, 5, 0], 5, strategy)
    assert plan.num_rows == 2, "they fit where nothing else does"
    assert sorted(plan[0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_lengths(strategy):
    for empty in ([], np.zeros(0, np.int32), torch.zeros(0, dtype=torch.int32)):
        indices, offsets = plan = cuseq.data.bin_pack(empty, 5, strategy)
        assert (indices.tolist(), offsets.tolist()) == ([], [0])
        assert (indices.dtype, offsets.dtype) == (torch.int64, torch.int64)
        assert plan.starts.tolist() == plan.lengths.tolist() == plan.row_lengths.tolist() == []
        assert plan.num_rows == 0
        assert 0 <= plan.fill <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_to_the_capacity(strategy):
    plan = cuseq.data.bin_pack([7, 7, 7], 7, strategy)
    assert [plan.row(b) for b in range(plan.num_rows)] == [[0], [1], [2]]
    assert plan.fill == 1
    assert cuseq.data.bin_pack([1, 1], 1, strategy).num_rows == 2


@pytest.mark.parametrize("strategy", WHOLE)
def test_split_at_multiples_of_the_capacity(strategy):
    plan = cuseq.data.bin_pack([8, 4, 9], 4, strategy, overlong="split")
    pieces = sorted(piece for row in rows_of(plan) for piece in row)
    assert pieces == [(0, 0, 4), (0, 4, 4), (1, 0, 4), (2, 0, 4), (2, 4, 4), (2, 8, 1)]
    truncated = cuseq.data.bin_pack([8, 4, 9], 4, strategy, overlong="truncate")
    assert sorted(p for row in rows_of(truncated) for p in row) == [(i, 0, 4) for i in range(3)]


@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 2**31 + 1, 2**40])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_capacities_beyond_int32(strategy, capacity):
    lengths = [capacity - 5, 5, capacity, 6, capacity - 7, 1, 0]
    for given_as in (lengths, np.array(lengths), torch.tensor(lengths)):
        rows = rows_of(cuseq.data.bin_pack(given_as, capacity, strategy))
        assert rows == naive_pack(lengths, capacity, strategy)
    with pytest.raises(ValueError, match=rf"{capacity}\D.*lengths\[0\] = {capacity + 1}"):
        cuseq.data.bin_pack([capacity + 1], capacity, "bfd")


VALUES = [5, 0, 9, 3, 3, 12, 1]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def given_as_kinds(tmp_path) -> dict[str, object]:
    wide = np.full((len(VALUES), 3), -4, np.int32)
    wide[:, 1] = VALUES
    frozen = np.array(VALUES)
    frozen.flags.writeable = False
    np.array(VALUES, np.int32).tofile(tmp_path / "lengths")
    return {
        "tuple": tuple(VALUES),
        "list of NumPy ints": [np.int32(n) for n in VALUES],
        **{name: np.array(VALUES, name) for name in INTEGERS},
        "big-endian": np.array(VALUES, ">i4"),
        "strided": wide[:, 1],
        "reversed": np.array(VALUES[::-1])[::-1],
        "read-only": frozen,
        "memmap": np.memmap(tmp_path / "lengths", np.int32, "r"),
        "copy-on-write memmap": np.memmap(tmp_path / "lengths", np.int32, "c"),
        **{f"torch.{n}": torch.tensor(VALUES, dtype=getattr(torch, n)) for n in INTEGERS[:5]},
        "strided tensor": torch.from_numpy(wide)[:, 1],
        "reads as negative strides": torch.tensor(VALUES[::-1]).flip(0),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_input_kinds(strategy, tmp_path):
    expected = rows_of(cuseq.data.bin_pack(VALUES, 12, strategy))
    assert expected == naive_pack(VALUES, 12, strategy)
    for name, lengths in given_as_kinds(tmp_path).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch.from_numpy warns about read-only arrays
            assert rows_of(cuseq.data.bin_pack(lengths, 12, strategy)) == expected, name
        assert [int(n) for n in lengths] == VALUES, "left as it was"


def test_the_plan_is_its_own():
    """The plan does not share memory with the lengths, nor change when they do."""
    lengths = torch.tensor([5, 3])
    plan = cuseq.data.bin_pack(lengths, 8, "sequential")
    lengths.zero_()
    assert plan.lengths.tolist() == [5, 3]
    plan.lengths.fill_(7)
    assert lengths.tolist() == [0, 0]


def test_default_device_does_not_move_a_plan():
    with torch.device("meta"):
        plan = cuseq.data.bin_pack([5, 5, 3, 3], 8)
    assert plan[0].tolist() == [0, 2, 1, 3]
    assert plan.row_lengths.tolist() == [8, 8]


def test_plans_are_the_same_every_time():
    random = np.random.default_rng(1)
    lengths = random.integers(0, 30, 3000)
    for strategy in STRATEGIES:
        plans = [rows_of(cuseq.data.bin_pack(lengths, 100, strategy)) for _ in range(2)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("strategy", WHOLE)
def test_the_first_too_long_one_is_named(strategy):
    for lengths in ([3, 11, 12], torch.tensor([3, 11, 12]), np.array([3, 11, 12], np.int16)):
        with pytest.raises(ValueError, match=r"capacity = 10.*lengths\[1\] = 11"):
            cuseq.data.bin_pack(lengths, 10, strategy)


@pytest.mark.parametrize("overlong", OVERLONG)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_ones_are_named(strategy, overlong):
    for lengths in ([3, 0, -2, -9], torch.tensor([3, 0, -2, -9]), np.array([3, 0, -2, -9], "i1")):
        with pytest.raises(ValueError, match=r"lengths\[2\] = -2"):
            cuseq.data.bin_pack(lengths, 10, strategy, overlong=overlong)


@pytest.mark.parametrize(
    "lengths",
    [
        [1.5, 2.0],
        [3, None],
        ["3"],
        "333",
        7,
        None,
        np.array([1.0, 2.0]),
        np.array(["1"]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0]).half(),
        torch.tensor([1j]),
    ],
    ids=repr,
)
def test_lengths_that_are_not_integers_are_refused(lengths):
    with pytest.raises(TypeError, match="lengths must"):
        cuseq.data.bin_pack(lengths, 10)


@pytest.mark.parametrize(
    "lengths", [[[1, 2], [3, 4]], torch.ones(2, 2).long(), torch.tensor(3), np.ones((2, 2), int)]
)
def test_lengths_of_other_dimensions_are_refused(lengths):
    with pytest.raises((TypeError, ValueError), match="lengths must"):
        cuseq.data.bin_pack(lengths, 10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlong", OVERLONG)
def test_lengths_beyond_int64_are_refused(strategy, overlong):
    # Wrapped around they would be negative, or small.
    for lengths in ([2**63], [2**64 + 1], np.array([2**63 + 1], np.uint64)):
        with pytest.raises(ValueError, match="lengths"):
            cuseq.data.bin_pack(lengths, 10, strategy, overlong=overlong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (None, TypeError, r"lengths must be ints.*got lengths\[400\] = None"),
        (2.5, TypeError, r"lengths must be ints.*got lengths\[400\] = 2.5"),
        (2**70, ValueError, rf"lengths must fit in int64, got lengths\[400\] = {2**70}"),
    ],
)
def test_the_wrong_one_of_many_lengths_is_named(wrong, error, message):
    lengths = [3] * 1000
    lengths[400] = lengths[600] = wrong
    with pytest.raises(error, match=message):
        cuseq.data.bin_pack(lengths, 10)


def test_a_large_uint64_is_named():
    lengths = np.array([1, 2**63 + 1, 2**63 + 2], np.uint64)
    with pytest.raises(ValueError, match=rf"fit in int64, got lengths\[1\] = {2**63 + 1}"):
        cuseq.data.bin_pack(lengths, 10)


def test_fill_of_rows_beyond_int64_together():
    assert cuseq.data.bin_pack([2**62] * 3, 2**62).fill == 1.0


def test_lengths_elsewhere_are_refused():
    values = torch.tensor([3, 4])
    for wrong in (values.to_sparse(), torch.nested.nested_tensor([values])):
        with pytest.raises(TypeError, match="lengths must be a dense tensor, got a .* one"):
            cuseq.data.bin_pack(wrong, 10)
        with pytest.raises(TypeError, match="lengths must be a dense tensor, got a .* one"):
            cuseq.data.PackedBatchSampler(wrong, 10)
    with pytest.raises((TypeError, ValueError), match="lengths must.*meta"):
        cuseq.data.bin_pack(torch.ones(3, dtype=torch.int64, device="meta"), 10)


def test_lengths_on_a_gpu_are_refused(cuda):
    with pytest.raises((TypeError, ValueError), match="lengths must.*cuda"):
        cuseq.data.bin_pack(torch.ones(3, dtype=torch.int64, device=cuda), 10)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0,), {}, ValueError, "capacity must be at least 1, got 0"),
        ((-3,), {}, ValueError, "capacity must be at least 1, got -3"),
        ((2.5,), {}, TypeError, "capacity"),
        ((None,), {}, TypeError, "capacity"),
        ((10, "best"), {}, ValueError, "strategy must.*best"),
        ((10, None), {}, (TypeError, ValueError), "strategy must.*None"),
        ((10,), {"overlong": "cut"}, ValueError, "overlong must.*cut"),
        ((10,), {"overlong": "skip"}, ValueError, "overlong must.*skip"),
        ((10, "bfd", "raise"), {}, TypeError, "positional"),
    ],
)
def test_wrong_options_are_named(arguments, options, error, message):
    for lengths in ([3, 4], []):
        with pytest.raises(error, match=message):
            cuseq.data.bin_pack(lengths, *arguments, **options)


@pytest.mark.parametrize("count", [50, 3000])
def test_as_full_as_the_packer_of_trl(count):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    random = np.random.default_rng(count)
    lengths = np.clip(random.lognormal(3, 1, count), 1, 256).astype(int).tolist()
    # The tokens of a sample identify it.
    samples = datasets.Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]})
    for theirs, ours in (("bfd", "bfd"), ("wrapped", "wrapped")):
        # By default it packs each thousand separately.
        rows = trl.pack_dataset(samples, 256, theirs, map_kwargs={"batch_size": count})[:]
        plan = cuseq.data.bin_pack(lengths, 256, ours)
        packed = [len(row) for row in rows["input_ids"]]
        assert plan.num_rows == len(packed)
        # The choice among rows with equal room differs, but the remaining room does not.
        assert sorted(plan.row_lengths.tolist()) == sorted(packed)
        if ours == "wrapped":
            tokens = [[s for s, _, n in row for _ in range(n)] for row in rows_of(plan)]
            assert tokens == rows["input_ids"]
        else:
            assert sorted(map(len, rows["seq_lengths"])) == sorted(plan[1].diff().tolist())


def test_what_is_truncated_makes_one_piece():
    plan = cuseq.data.bin_pack([2**40], 1, overlong="truncate")
    assert plan.lengths.tolist() == [1]


def test_the_error_of_a_generator_is_kept():
    with pytest.raises(TypeError, match="lengths must be ints") as error:
        cuseq.data.bin_pack((len(x) for x in [[1], None]), 8)
    assert "NoneType" in str(error.value.__cause__)


def test_a_capacity_fits_in_64_bits():
    with pytest.raises(ValueError, match="capacity must fit in int64"):
        cuseq.data.bin_pack([1], 2**63)
