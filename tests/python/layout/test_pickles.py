"""Test that pickles and states are checked as arguments are, before anything reads them."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch

import cuseq
from cuseq import _C
from cuseq.layout import build
from cuseq.layout.packed import _row_again, _tree_again
from cuseq.layout.records import tensors_of
from cuseq.trees import _restored

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# isort: split
from tests.fuzz import driver  # noqa: E402

Layout = cuseq.PackedLayout
WHOLE = Layout.from_lengths([6, 2, 0, 4], 12)
PADDED = Layout.from_lengths([5, 2, 0, 3], 16, segment_multiple=4)
GROUPS = ([[5, 6, 7], [1]], [[[8, 9], [], [4]], [[2, 3]]])


def part(policy: str, rank: int = 1, whole: Layout = WHOLE) -> Layout:
    plan = cuseq.distributed.cp_plan(whole, 2, policy=policy, heads=(4, 2))
    return cuseq.distributed.cp_partition(whole, plan, rank, group="a group")[0]


LAYOUTS = {
    "lengths": Layout.from_lengths([2, 3], 6),
    "nothing": Layout.from_lengths([]),
    "capacity": Layout.from_lengths([0, 3, 0], 9, max_seqs=7),
    "segments": Layout.from_lengths([3, 5, 0], segment_multiple=4, total_multiple=16),
    "mask": Layout.from_padding_mask(torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])),
    "mask, segments": Layout.from_padding_mask(torch.tensor([[1, 0], [1, 1]]), 4),
    "positions": Layout.from_position_ids(torch.tensor([0, 1, 0, 1, 2])),
    "longer": Layout.from_padding_mask(torch.tensor([[1, 1, 0]])).with_total_tokens(9),
    "chunks": Layout.from_lengths([5, 2], 8).chunked(2),
    "tree": cuseq.PackedTree.from_groups(*GROUPS, total_tokens=12).layout,
    "longer tree": cuseq.PackedTree.from_groups(*GROUPS).layout.with_total_tokens(11),
    **{policy: part(policy) for policy in ("auto", "contiguous", "ulysses")},
    "padded part": part("ulysses", whole=PADDED),
    "longer part": part("auto").with_total_tokens(9),
    "longer part in steps": part("auto").with_total_tokens(8).with_total_tokens(11),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_layout_comes_back(name):
    layout = LAYOUTS[name]
    again = pickle.loads(pickle.dumps(layout))
    for fact in ("lengths", "cu_seqlens", "cu_seqlens_static", "host_meta", "position_ids"):
        assert torch.equal(getattr(again, fact), getattr(layout, fact)), fact
    for path, tensor in (before := tensors_of(layout._records)).items():
        if path[-1] != "lengths":  # of which there may be more than sequences
            assert torch.equal(tensors_of(again._records)[path], tensor), path
    assert before.keys() == tensors_of(again._records).keys()
    assert torch.equal(again.segments.cu_seqlens, layout.segments.cu_seqlens)
    assert again.pads_between_sequences == layout.pads_between_sequences
    assert again._records.form()["kind"] == layout._records.form()["kind"]
    assert getattr(again.part, "group", None) == getattr(layout.part, "group", None)
    assert len(pickle.dumps(layout)) < 1000  # of what the layout follows from


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_an_older_pickle_is_refused_by_name(protocol):
    """It held the tensors of a layout, and called another function with them."""

    old = {
        0: b"ccuseq.layout\n_restored\n.",
        2: b"\x80\x02ccuseq.layout\n_restored\n.",
        4: b"\x80\x04\x8c\x0ccuseq.layout\x8c\x09_restored\x93.",
    }[protocol]
    with pytest.raises(pickle.UnpicklingError, match="an earlier cuseq pickled cannot be read"):
        pickle.loads(old)


def numbers(*values: int) -> bytes:
    return build.as_bytes(torch.tensor(values, dtype=torch.int32))


ROW = {
    "lengths": numbers(2, 3),
    "segment_lengths": numbers(4, 4),
    "total_tokens": 8,
    "max_seqs": 8,
    "batch": (bytes([1, 1, 0, 1, 1, 1]), 3),
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lengths", numbers(2, 4), "mask must have as many real tokens in each row as lengths"),
        ("lengths", numbers(2, -3), "lengths must not be negative"),
        ("lengths", numbers(2, 3, 0), "segment_lengths must be at least the lengths of the 3"),
        ("lengths", b"abc", "lengths must be the bytes of torch.int32 numbers"),
        ("lengths", [2, 3], "lengths must be the bytes"),
        ("segment_lengths", numbers(4, 2), "segment_lengths must be at least the lengths"),
        ("segment_lengths", numbers(4, 8), "lengths must sum to at most total_tokens = 8"),
        ("total_tokens", 7, "lengths must sum to at most total_tokens = 7"),
        ("total_tokens", "8", "total_tokens must be an int"),
        ("max_seqs", 1, "at most max_seqs = 1 sequences"),
        ("max_seqs", None, "max_seqs must be an int"),
        ("batch", (bytes([1, 1, 0, 1, 1]), 3), "mask must have a 0 or a 1 for each of 2 rows"),
        ("batch", (bytes([1, 1, 0, 1, 1, 2]), 3), "mask must have a 0 or a 1"),
        ("batch", (bytes([1, 1, 0, 1, 1, 1]), -3), "seqlen must be at least 0"),
        ("device", "a disk", "device must be a device of torch"),
    ],
)
def test_a_wrong_row_is_named(field, value, message):
    assert _row_again(*ROW.values()).num_sequences == 2
    with pytest.raises((ValueError, TypeError), match=message):
        _row_again(*(ROW | {field: value}).values())


TREE = cuseq.PackedTree.from_groups(*GROUPS, total_tokens=12)
PARTS = dict(zip(("lengths", "parents", "samples", "context"), TREE._tree.parts(), strict=True))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", [1, 2, 3, 6], r"samples must name nodes in \[0, 6\), got samples\[3\] = 6"),
        ("samples", [1, 2, 3, -1], r"got samples\[3\] = -1"),
        ("samples", [1, 2, 3, 1], "samples must name every leaf, got none through node 5"),
        ("context", [3, 3, 3], "context must have a number for each of the 4 samples, got 3"),
        ("context", [3, 3, 3, 9], r"context must lie within each sample, .* got context\[3\] = 9"),
        ("context", [3, 3, 3, -1], r"got context\[3\] = -1"),
        ("lengths", [3, 2, 0, 1, 1], "parents must have an entry for each of the 5 nodes"),
        ("lengths", [3, 2, 0, 1, 1, -2], "lengths must not be negative"),
        ("lengths", [3, 2, 0, 1, 1, 2**31], "lengths must sum to at most"),
        ("parents", [-1, 0, 0, 0, -1, 6], "parents must name -1 or a node on the path"),
        ("parents", [-1, 0, 0, 0, -1, None], r"parents\[5\] must be an int, got None"),
        ("samples", "abcd", "samples must be a list"),
    ],
)
def test_a_wrong_tree_is_named(field, value, message):
    assert _C.tree_of_parts(*PARTS.values()).parts() == tuple(PARTS.values())
    with pytest.raises((ValueError, TypeError), match=message):
        _C.tree_of_parts(*(PARTS | {field: value}).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((11, 12, 1), r"total_tokens must be at least|lengths must sum"),
        ((8, 12, 1), "total_tokens must be at least the 9 tokens of the tree, got 8"),
        ((12, 5, 1), "max_seqs = 5 sequences"),
        ((12, 12, 0), "max_depth must be at least the depth of the tree, 1, got 0"),
        ((12, 12, 2**20), "max_depth must be at most"),
    ],
)
def test_a_wrong_layout_of_a_tree_is_named(arguments, message):
    if arguments[0] == 11:  # a row of which the tree fills 9 tokens
        assert _tree_again(TREE._tree, *arguments, "cpu").total_tokens == 11
        return
    with pytest.raises(ValueError, match=message):
        _tree_again(TREE._tree, *arguments, "cpu")


def test_a_tree_and_its_layout_belong_together():
    ids = build.as_bytes(torch.zeros(12, dtype=torch.int64))
    other = cuseq.PackedTree.from_groups(*GROUPS, total_tokens=12)
    with pytest.raises(ValueError, match="layout must be that of the tree"):
        _restored(TREE._tree, ids, other.layout)
    with pytest.raises(ValueError, match="layout must be that of the tree"):
        _restored(TREE._tree, ids, LAYOUTS["lengths"])
    for wrong in (ids[:-8], ids + b"\0" * 8, b""):
        with pytest.raises(ValueError, match=r"input_ids must be int64 \[total_tokens = 12\]"):
            _restored(TREE._tree, wrong, TREE.layout)
    again = pickle.loads(pickle.dumps({"packed": TREE.layout, "tree": TREE}))
    assert again["tree"].layout is again["packed"]
    assert copy.deepcopy(TREE) is TREE and copy.copy(TREE).layout is TREE.layout


def test_a_tree_reads_no_further_than_its_ids():
    with pytest.raises(ValueError, match="input_ids must be contiguous int64 with at least the 9"):
        TREE._tree.targets(torch.zeros(4, dtype=torch.int64))
    for read in (TREE._tree.positions, TREE._tree.uses):
        with pytest.raises(ValueError, match="total_tokens must be at least the 9 tokens"):
            read(5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: {"indices": plan.indices - 1}, "indices must not be negative"),
        (lambda plan: {"offsets": plan.offsets + 1}, "offsets must ascend from 0 to the number"),
        (lambda plan: {"offsets": plan.offsets[:-1]}, "offsets must ascend from 0 to the number"),
        (lambda plan: {"offsets": plan.offsets.flip(0)}, "offsets must ascend from 0"),
        (lambda plan: {"starts": plan.starts[1:]}, "starts must have one number for each of the 5"),
        (lambda plan: {"lengths": plan.lengths * 2}, "lengths must make pieces of at most"),
        (lambda plan: {"lengths": plan.lengths + 1}, "lengths must make rows of at most"),
        (lambda plan: {"capacity": 0}, "capacity must be at least 1"),
    ],
)
def test_a_wrong_packing_plan_is_named(edit, message):
    plan = cuseq.data.bin_pack([3, 1, 4, 2, 2], 5)
    names = ("indices", "offsets", "starts", "lengths", "capacity")
    made, arguments = plan.__reduce__()
    assert torch.equal(made(*arguments).row_lengths, plan.row_lengths)
    with pytest.raises(ValueError, match=message):
        made(*(dict(zip(names, arguments, strict=True)) | edit(plan)).values())


def edited(value, **fields):
    """Return what pickle makes of an object with changed attributes."""
    function, arguments, state, *_ = value.__reduce_ex__(4)
    made = function(*arguments)
    made.__setstate__(state | fields)
    return made


@pytest.mark.parametrize(
    ("value", "fields", "message"),
    [
        (cuseq.PackingCollator(), {"total_tokens": -1}, "total_tokens must be at least 1"),
        (cuseq.PackingCollator(), {"max_seqs": "2"}, "max_seqs must be an int"),
        (cuseq.PackingCollator(total_tokens=8), {"capacity": 9}, "capacity must be at most"),
        (cuseq.data.PackedBatchSampler([3, 2], 4), {"capacity": 2}, "lengths must be at most"),
        (
            cuseq.data.PackedBatchSampler([3, 2], 4),
            {"rank": 1},
            r"rank must lie in \[0, world_size = 1\)",
        ),
        (
            cuseq.data.PackedBatchSampler([3, 2], 4),
            {"_position": ((), -1)},
            "step must be at least 0",
        ),
        (cuseq.data.PackedStream([], 4), {"window": 0}, "window must be at least 1"),
        (
            cuseq.data.pack_groups([1], [[2]], 4),
            {"capacity": 2},
            r"tokens must lie in \[0, capacity = 2\], got 3",
        ),
    ],
)
def test_wrong_attributes_are_named(value, fields, message):
    edited(value)
    with pytest.raises((ValueError, TypeError), match=message):
        edited(value, **fields)


@pytest.mark.parametrize("attributes", [{}, {"position": {}}, {"position": 3, "consumed": 0}])
@pytest.mark.parametrize("field", ["_pass", "_loaded"])
def test_a_pickled_pass_that_lacks_attributes_is_refused(field, attributes):
    stream = cuseq.data.PackedStream([], 4)
    position = object.__new__(type(stream._pass))
    vars(position).update(attributes)
    with pytest.raises(ValueError, match="pickled must hold (position|consumed|skipped), got"):
        edited(stream, **{field: position})


def test_a_subclass_keeps_what_it_adds():
    collator = _Collator(total_tokens=8)
    collator.more = 3
    for again in (pickle.loads(pickle.dumps(collator)), copy.copy(collator)):
        assert type(again) is _Collator and vars(again) == vars(collator)


class _Collator(cuseq.PackingCollator):
    pass


# --------------------------------------------------------------------------- states


def sampler(**options) -> cuseq.data.PackedBatchSampler:
    return cuseq.data.PackedBatchSampler([3, 5, 2, 4], 8, **options)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"world_size": 2**31}, "world_size must be at most 65536, got 2147483648"),
        ({"accumulation": 2**40}, "accumulation must be at most 1048576 on 1 ranks"),
        ({"before": [[2**31, 1, 1]]}, "world_size must be at most 65536"),
        ({"before": [[2, 1, 1]] * 65}, "before must hold at most 64 parts"),
        ({"before": [3]}, "before must hold world_size, accumulation and steps"),
        ({"epoch": "a"}, "epoch must be an int"),
        ({"step": -1}, "step must be at least 0"),
        ({"seed": torch.ones(2)}, "seed is 0 and was a tensor of torch.float32"),
    ],
)
def test_a_state_that_no_sampler_returned_is_named(state, message):
    made = sampler()
    before = made.state_dict()
    with pytest.raises((ValueError, TypeError), match=message):
        made.load_state_dict(before | state)
    assert made.state_dict() == before and len(list(made)) == 2


def stream(samples=None, **options) -> cuseq.data.PackedStream:
    samples = [{"input_ids": [7] * n} for n in (3, 5, 2, 4)] if samples is None else samples
    return cuseq.data.PackedStream(samples, 8, window=4, **options)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"held": [[7, 0, None]]}, "held must hold each sample once, of the consumed = 4 ones"),
        ({"held": [[0, 9, None]]}, "windows up to window_number = 1, got sample 0 of window 9"),
        ({"held": [[0, 0, None]] * 2}, "held must hold each sample once"),
        ({"held": [3]}, r"held must hold \[number, window, sample\], got 3"),
        ({"held": [["a", 0, None]]}, "held must be an int"),
        ({"world_size": 2**31}, "world_size must be at most 65536"),
        ({"skipped": 9}, "skipped must be at most the consumed = 4 samples, got 9"),
        ({"source": {}}, "source must keep nothing of an iterable without state_dict"),
        ({"held": [[1, 0, {}]]}, "held must keep nothing of an iterable without state_dict"),
        ({"consumed": -1}, "consumed must be at least 0"),
    ],
)
def test_a_state_that_no_stream_returned_is_named(state, message):
    made = stream()
    right = {"window_number": 1, "done": 0, "consumed": 4, "skipped": 0, "world_size": 1}
    right |= {"held": [[1, 0, None]], "source": None}
    made.load_state_dict(made.state_dict() | right)
    with pytest.raises((ValueError, TypeError), match=message):
        made.load_state_dict(made.state_dict() | state)
    assert made.state_dict()["held"] == [[1, 0, None]]


@pytest.mark.parametrize("make", [sampler, stream])
def test_too_many_ranks_are_refused(make):
    with pytest.raises(ValueError, match="world_size must be at most 65536, got 2147483648"):
        make(world_size=2**31)
    with pytest.raises(ValueError, match="accumulation must be at most 1024 on 1024 ranks"):
        sampler(world_size=1024, accumulation=1025)


# --------------------------------------------------------------------------- many edits


@pytest.mark.parametrize("kind", ["pickle of .* part", "pickle of .* byte", "state of"])
def test_edited_pickles_and_states_are_refused_or_agree(kind):
    report = driver.fuzz(driver.Options(seed=2, calls=400, only=kind), verbose=False)
    assert not report.findings, "\n".join(report.findings)
    assert report.calls == 400
