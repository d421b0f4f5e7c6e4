"""Test `PackedTree`: its rows, positions, samples, targets, capacities and copies."""

from __future__ import annotations

import copy
import pickle
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuseq

GROUPS = ([[5, 6, 7], [1]], [[[8, 9], [], [4]], [[2, 3]]])


def samples_of(tree: cuseq.PackedTree) -> list[list[int]]:
    """Read each sample's token ids from the row."""
    ids = tree.input_ids[0]
    return [ids[tree.rows_of(i)].tolist() for i in range(tree.samples.num_sequences)]


def test_a_row_of_groups():
    tree = cuseq.PackedTree.from_groups(*GROUPS, total_tokens=12)
    assert tree.input_ids.tolist() == [[5, 6, 7, 8, 9, 4, 1, 2, 3, 0, 0, 0]]
    assert tree.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 0, 1, 2]]
    assert tree.layout.lengths.tolist() == [3, 2, 0, 1, 1, 2]
    assert samples_of(tree) == [[5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 7, 4], [1, 2, 3]]
    assert tree.samples.lengths.tolist() == [5, 3, 4, 3]
    assert (tree.depth, tree.longest_path) == (1, 5)
    rows, labels, by_sample = tree.targets
    assert rows.tolist() == [2, 3, 2, 6, 7]  # the prompt's last row once for each completion
    assert labels.tolist() == [8, 9, 4, 2, 3]
    assert by_sample.lengths.tolist() == [2, 0, 1, 2]
    assert tree.layout.is_tree and tree.layout.total_tokens == 12


def test_an_empty_prompt_predicts_nothing():
    tree = cuseq.PackedTree.from_groups([[]], [[[7, 8], []]])
    assert samples_of(tree) == [[7, 8], []]
    assert tree.targets[0].tolist() == [0] and tree.targets[1].tolist() == [8]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: array("q", x)])
def test_token_ids_may_be_of_any_kind(kind):
    prompts, completions = [[kind([5, 6]), kind([2**40])], [[kind([7])], [kind([8, 9])]]]
    tree = cuseq.PackedTree.from_groups(prompts, completions)
    assert tree.input_ids.tolist() == [[5, 6, 7, 2**40, 8, 9]]


# ----------------------------------------------------------------------------- ids that change


class Clearing:
    """An int that empties a list while it is read."""

    def __init__(self, of: list, value: int):
        self.of, self.value = of, value

    def __index__(self) -> int:
        self.of.clear()
        return self.value


def clearing(ids: list[int]) -> list:
    """Return a list of these ids whose first item empties it."""
    made: list = []
    made += [Clearing(made, ids[0]), *ids[1:]]
    return made


def refilled(lists):
    """Yield one list, each time with other items."""
    one: list[int] = []
    for items in lists:
        one[:] = items
        yield one


def shrunk(lists):
    """Yield arrays of which each is emptied when the next is asked for."""
    for items in lists:
        one = array("q", items)
        yield one
        del one[:]


def shrunk_in_numpy(lists):
    for items in lists:
        one = np.array(items, dtype=np.int64)
        yield one
        one.resize(0, refcheck=False)


def emptied(lists):
    return list(map(clearing, lists))


# Long enough that freed memory is used for something else.
LONG = [[1, 2, 3, 4] * 50, [1, 2, 5] * 50, [1, 2] * 70, [9] * 3000]


@pytest.mark.parametrize("change", [refilled, shrunk, shrunk_in_numpy, emptied])
def test_ids_are_read_when_they_are_given(change):
    for sequences in (LONG, [ids * 1000 for ids in LONG]):
        make = cuseq.PackedTree.from_sequences
        tree = make(change(sequences))
        assert samples_of(tree) == sequences
        keys = [[i] * len(ids) for i, ids in enumerate(sequences)]
        tree = make(sequences, keys=change(keys))
        assert samples_of(tree) == sequences and tree.depth == 0
        tree = cuseq.PackedTree.from_groups(
            change(sequences), (change([ids, ids[:1]]) for ids in sequences)
        )
        assert samples_of(tree) == [ids + more for ids in sequences for more in (ids, ids[:1])]


@pytest.mark.parametrize(
    "make",
    [
        lambda given: cuseq.PackedTree.from_parents(given, [-1, -1, -1]).layout.lengths.tolist(),
        lambda given: cuseq.PackedLayout.from_lengths(given).lengths.tolist(),
        lambda given: cuseq.data.bin_pack(given, 9).indices.tolist(),
        lambda given: list(cuseq.data.PackedBatchSampler(given, 9)),
        lambda given: cuseq.data.pack_groups(given, [[1], [1], [1]], 9).fill,
        lambda given: cuseq.distributed.cp_plan(given, 3).tokens_of(1).tolist(),
    ],
)
def test_lengths_are_read_when_they_are_given(make):
    assert make(clearing([3, 4, 5])) == make([3, 4, 5])


def test_an_interrupt_is_raised():
    class Stopping:
        def __iter__(self):
            raise KeyboardInterrupt

        def __index__(self):
            raise KeyboardInterrupt

    for sequences in (Stopping(), [Stopping()], [[Stopping()]]):
        with pytest.raises(KeyboardInterrupt):
            cuseq.PackedTree.from_sequences(sequences)


def test_ids_without_memory():
    released = memoryview(array("q", [1]))
    released.release()
    with pytest.raises(TypeError, match=r"sequences\[0\] must be a list"):
        cuseq.PackedTree.from_sequences([released])
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"sequences\[0\] must have values in memory"):
        cuseq.PackedTree.from_sequences([fake])
    for call in (
        lambda: cuseq.data.bin_pack(fake, 3),
        lambda: cuseq.PackedLayout.from_lengths(fake),
        lambda: cuseq.PackedTree.from_parents(fake, [-1, -1, -1]),
        lambda: cuseq.distributed.cp_plan(fake, 1),
    ):
        with pytest.raises(ValueError, match="lengths must have values in memory"):
            call()


def test_narrow_and_strided_ids():
    ids = torch.arange(8, dtype=torch.int32)
    tree = cuseq.PackedTree.from_groups([ids[::2]], [[np.arange(6, dtype=np.int32)[::3]]])
    assert tree.input_ids.tolist() == [[0, 2, 4, 6, 0, 3]]


SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [1, 2], [9], [1, 2, 3, 4], []]


def test_shared_prefixes_are_found():
    tree = cuseq.PackedTree.from_sequences(SEQUENCES)
    assert samples_of(tree) == SEQUENCES
    assert tree.input_ids.tolist() == [[1, 2, 3, 4, 5, 9]]
    rows, labels, by_sample = tree.targets
    assert by_sample.lengths.tolist() == [3, 2, 1, 0, 3, 0]
    assert labels.tolist() == [2, 3, 4, 2, 5, 2, 2, 3, 4]
    assert rows.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2]


def test_short_runs_are_repeated():
    tree = cuseq.PackedTree.from_sequences(SEQUENCES, min_shared=3)
    assert samples_of(tree) == SEQUENCES
    assert tree.input_ids.tolist() == [[1, 2, 1, 2, 3, 4, 1, 2, 5, 9]]


def test_keys_keep_equal_tokens_apart():
    ids = [[1, 7, 7, 2], [1, 7, 7, 2]]
    assert cuseq.PackedTree.from_sequences(ids).layout.total_tokens == 4
    tree = cuseq.PackedTree.from_sequences(ids, keys=[[0, 5, 5, 0], [0, 6, 6, 0]])
    assert samples_of(tree) == ids and tree.layout.total_tokens == 7


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12),
    st.integers(1, 3),
)
def test_any_sequences_come_back(sequences, min_shared):
    tree = cuseq.PackedTree.from_sequences(sequences, min_shared=min_shared)
    assert samples_of(tree) == sequences
    positions = tree.position_ids[0]
    for i, ids in enumerate(sequences):
        assert positions[tree.rows_of(i)].tolist() == list(range(len(ids)))
    prefixes = {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}
    if min_shared == 1:
        assert tree.layout.total_tokens == len(prefixes)


def test_a_tree_of_parents():
    tree = cuseq.PackedTree.from_parents([2, 1, 3, 1, 2], [-1, 0, 1, 0, -1])
    assert [tree.rows_of(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4, 5], [0, 1, 6], [7, 8]]
    assert tree.input_ids is None and tree.depth == 2
    with pytest.raises(ValueError, match="targets need token ids"):
        _ = tree.targets


@pytest.mark.parametrize("parents", [[0, 0], [-1, 2], [-1, -1, 0], [-1, -2], [1, -1]])
def test_parents_in_another_order_are_refused(parents):
    with pytest.raises(ValueError, match="parents must name -1 or a node on the path"):
        cuseq.PackedTree.from_parents([1] * len(parents), parents)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.from_groups([[1]], [[]]), ValueError, r"completions\[0\] must have at least"),
        (lambda t: t.from_groups([[1]], []), ValueError, "for each of the 1 prompts, got 0"),
        (lambda t: t.from_groups([], [[[1]]]), ValueError, "for each of the 0 prompts, got more"),
        (lambda t: t.from_groups([[1]], [[[2.5]]]), TypeError, r"completions\[0\]\[0\]\[0\] must"),
        (lambda t: t.from_groups([[2**70]], [[[2]]]), ValueError, r"prompts\[0\]\[0\] must fit"),
        (lambda t: t.from_groups(["ab"], [[[2]]]), TypeError, r"prompts\[0\] must be a list"),
        (lambda t: t.from_groups(3, [[[2]]]), TypeError, "prompts must be a list of"),
        (lambda t: t.from_groups([[1]], 3), TypeError, "completions must be a list of"),
        (lambda t: t.from_groups([torch.ones(2)], [[[2]]]), TypeError, "must be int32 or int64"),
        (lambda t: t.from_groups([[1]], [[[2]]], total_tokens=1), ValueError, "at least the 2"),
        (lambda t: t.from_groups([[1]], [[[2]]], max_seqs=1), ValueError, "max_seqs"),
        (lambda t: t.from_groups([[1]], [[[2]]], max_depth=0), ValueError, "max_depth must be at"),
        (lambda t: t.from_sequences([[1]], keys=[]), ValueError, "keys must have a list for each"),
        (lambda t: t.from_sequences([[1]], keys=[[]]), ValueError, r"keys\[0\] must have a key"),
        (lambda t: t.from_sequences([[1]], min_shared=0), ValueError, "min_shared must be at"),
        (lambda t: t.from_parents([1], [-1, 0]), ValueError, "parents must have an entry"),
        (lambda t: t.from_parents([-1], [-1]), ValueError, "lengths must not be negative"),
        (lambda t: t.from_parents([2], [-1], total_tokens=1), ValueError, "at least the 2"),
        (lambda t: t.from_groups([[1]], [[[2]]]).rows_of(1), ValueError, r"must lie in \[0, 1\)"),
        (lambda t: t(None, None, None), TypeError, "PackedTree is made by"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(cuseq.PackedTree)


def test_gather_adds_gradients_in_fp32():
    tree = cuseq.PackedTree.from_sequences(SEQUENCES, total_tokens=8)
    values = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.cat([tree.rows_of(i) for i in range(6)])
    found = tree.gather(values)
    assert torch.equal(found, values[rows])
    weights = torch.randn_like(found)
    (grad,) = torch.autograd.grad((found * weights).sum(), values)
    (expected,) = torch.autograd.grad((values[rows] * weights).sum(), values)
    torch.testing.assert_close(grad, expected)
    assert torch.autograd.gradcheck(tree.gather, values)
    # 4,096 ones and a large number: bfloat16 would lose the ones.
    group = cuseq.PackedTree.from_groups([[1]], [[[]] * 4097])
    one = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(4097)
    weights[0] = 2.0**12
    (grad,) = torch.autograd.grad((group.gather(one).float() * weights).sum(), one)
    assert grad.item() == 2.0**13
    with pytest.raises(ValueError, match="total_tokens = 8 rows"):
        tree.gather(values[:4])


def test_gather_takes_values_on_its_device_alone(cuda):
    tree = cuseq.PackedTree.from_groups([[1]], [[[2], [3]]])
    with pytest.raises(ValueError, match="values must lie on the tree's device, cuda:0, got cpu"):
        tree.to(cuda).gather(torch.zeros(3))
    with pytest.raises(ValueError, match="values must lie on the tree's device, cpu, got cuda:0"):
        tree.gather(torch.zeros(3, device=cuda))


def test_copies(device):
    tree = cuseq.PackedTree.from_sequences(SEQUENCES, total_tokens=8, max_seqs=8)
    moved = tree.to(device)
    assert moved is tree.to(device) and moved.to(device) is moved
    assert moved.device.type == device.type
    for again in (pickle.loads(pickle.dumps(tree)), copy.copy(tree), moved):
        assert [again.rows_of(i).tolist() for i in range(6)] == [
            tree.rows_of(i).tolist() for i in range(6)
        ]
        assert again.layout.is_tree and again.layout.device == again.device
        assert again.input_ids.tolist() == tree.input_ids.tolist()
        assert again.position_ids.tolist() == tree.position_ids.tolist()
        assert [t.tolist() for t in again.targets[:2]] == [t.tolist() for t in tree.targets[:2]]


def test_a_layout_is_filled_again_in_place():
    def tree(sequences):
        return cuseq.PackedTree.from_sequences(
            sequences, total_tokens=8, max_seqs=8, max_depth=3
        ).layout

    layout, other = tree(SEQUENCES), tree([[1, 2], [1, 3, 4], [1, 3, 5]])
    positions = layout.position_ids
    layout.copy_(other)
    assert positions.tolist() == other.position_ids.tolist()
    assert torch.equal(layout.tree.rows, other.tree.rows)
    with pytest.raises(ValueError, match="same kind: a tree, got a row"):
        layout.copy_(cuseq.PackedLayout.from_lengths([8], max_seqs=8))


def test_a_longer_row():
    layout = cuseq.PackedTree.from_groups(*GROUPS).layout.with_total_tokens(11)
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda p: cuseq.distributed.cp_plan(p, 1),
        lambda p: p.flash_kwargs(),
        lambda p: p.seq_idx,
        lambda p: p.cu_seqlens_recurrent,
        lambda p: p.chunk_indices(4),
        lambda p: cuseq.causal_conv1d(torch.ones(9, 1), torch.ones(1, 2), packed=p),
        lambda p: cuseq.unpack(p, torch.ones(9, 1)),
        lambda p: p.xformers_bias(),
        lambda p: cuseq.data.mask_boundary_labels(torch.ones(9, dtype=torch.int64), p),
    ],
)
def test_what_needs_whole_documents_refuses_trees(use):
    with pytest.raises(ValueError, match="got the layout of a tree"):
        use(cuseq.PackedTree.from_groups(*GROUPS).layout)


def test_rope_turns_by_the_depth():
    tree = cuseq.PackedTree.from_groups(*GROUPS)
    q, k = torch.randn(9, 2, 8), torch.randn(9, 1, 8)
    angles = torch.rand(8, 4)
    found = cuseq.apply_rope(q, k, angles.cos(), angles.sin(), packed=tree.layout)
    expected = cuseq.apply_rope(
        q, k, angles.cos(), angles.sin(), position_ids=tree.layout.position_ids
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
