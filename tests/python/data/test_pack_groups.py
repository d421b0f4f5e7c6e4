"""Test `pack_groups` and what samplers do with the costs of groups."""

from __future__ import annotations

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuseq


def squares_of(prompt: int, lengths: list[int]) -> int:
    """Count twice the query-key pairs of a tree, token by token; a token counts itself once."""
    pairs = sum(2 * position + 1 for position in range(prompt))
    for length in lengths:
        pairs += sum(2 * position + 1 for position in range(prompt, prompt + length))
    return pairs


def check(plan, prompts, completions, cost, padded) -> None:
    """Check what every plan promises."""
    numbers = itertools.count()
    sample_of = {
        (g, i): next(numbers) for g, each in enumerate(completions) for i in range(len(each))
    }
    seen: dict[tuple[int, int], int] = {}
    homes: dict[int, int] = {}
    repeated = 0
    for rank in range(plan.world_size):
        rows = plan.rows(rank)
        assert len(rows) == plan.steps
        for step, row in enumerate(rows):
            assert len(set(row.groups)) == len(row.groups) > 0, "one prompt for each group in a row"
            tokens, total, squares = 0, [], 0
            for group, which in zip(row.groups, row.completions, strict=True):
                assert which, "a prompt without completions"
                lengths = [completions[group][i] for i in which]
                tokens += prompts[group] + sum(lengths)
                squares += squares_of(prompts[group], lengths)
                total += [sample_of[group, i] for i in which]
                for i in which:
                    if not row.repeats:
                        seen[group, i] = seen.get((group, i), 0) + 1
                homes[group] = homes.get(group, 0) + (not row.repeats)
            assert row.samples.tolist() == total
            assert row.tokens == tokens <= plan.capacity
            repeated += row.repeats
            expected = cost[0] * squares + cost[1] * (plan.capacity if padded else tokens)
            assert plan.costs[step, rank].item() == pytest.approx(
                expected + cost[2] * len(row.groups)
            )
    assert seen == dict.fromkeys(sample_of, 1), "every completion once"
    assert plan.num_cut == sum(count > 1 for count in homes.values())
    if repeated:
        assert all(len(r.samples) == 1 for k in range(plan.world_size) for r in plan.rows(k))


@st.composite
def drawn(draw):
    capacity = draw(st.integers(1, 60))
    prompts, completions = [], []
    for _ in range(draw(st.integers(0, 8))):
        prompt = draw(st.integers(0, capacity))
        prompts.append(prompt)
        completions.append(
            draw(st.lists(st.integers(0, capacity - prompt), min_size=1, max_size=7))
        )
    return prompts, completions, capacity


@settings(max_examples=150, deadline=None)
@given(
    drawn(),
    st.integers(1, 5),
    st.sampled_from([(1 / 64, 1.0, 0.0), (0.0, 1.0, 5.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)]),
    st.booleans(),
)
def test_drawn_groups(groups, world_size, cost, padded):
    prompts, completions, capacity = groups
    plan = cuseq.data.pack_groups(
        prompts, completions, capacity, world_size=world_size, cost=cost, padded=padded
    )
    check(plan, prompts, completions, cost, padded)
    assert plan.num_rows == plan.steps * world_size and (plan.steps > 0) == bool(prompts)
    assert 0 <= plan.fill <= 1 and plan.imbalance >= 1 - 1e-9


def test_groups_stay_together():
    prompts, completions = [40, 10, 30], [[8] * 4, [20] * 2, [4] * 5]
    plan = cuseq.data.pack_groups(prompts, completions, 128)
    assert [(row.groups, row.completions) for row in plan.rows()] == [
        ([0], [[0, 1, 2, 3]]),
        ([1, 2], [[0, 1], [0, 1, 2, 3, 4]]),
    ]
    assert plan.num_cut == 0


def test_a_long_group_is_cut_and_its_prompt_repeated():
    plan = cuseq.data.pack_groups([20], [[30, 10, 30, 10]], 64, padded=False)
    assert sorted((row.groups, row.completions, row.tokens) for row in plan.rows()) == [
        ([0], [[0, 1]], 60),
        ([0], [[2, 3]], 60),
    ]
    assert plan.num_cut == 1


def test_a_group_that_fits_is_cut_where_rows_are_saved():
    # Whole, these groups of 55 tokens take four rows of 90; halves of 30 take three.
    prompts, completions = [5] * 4, [[25, 25]] * 4
    fewer = cuseq.data.pack_groups(prompts, completions, 90, cost=(0, 1, 0))
    assert (fewer.num_rows, fewer.num_cut > 0) == (3, True)
    check(fewer, prompts, completions, (0, 1, 0), True)
    # With rows as long as their tokens, the repeated prompt only costs.
    assert (
        cuseq.data.pack_groups(prompts, completions, 90, cost=(0, 1, 0), padded=False).num_cut == 0
    )


def test_one_group_feeds_all_ranks():
    plan = cuseq.data.pack_groups([10], [[5] * 16], 4096, world_size=4)
    assert plan.steps == 1 and plan.num_cut == 1
    assert [len(plan.rows(rank)[0].samples) for rank in range(4)] == [4, 4, 4, 4]
    assert plan.imbalance == 1.0


def test_too_few_completions_repeat_one_and_say_so():
    plan = cuseq.data.pack_groups([3, 4], [[5], [6]], 32, world_size=4)
    rows = [plan.rows(rank)[0] for rank in range(4)]
    assert sorted(row.repeats for row in rows) == [False, False, True, True]
    assert sorted(row.samples.item() for row in rows if not row.repeats) == [0, 1]


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_are_balanced_by_modelled_cost(padded):
    draw = random.Random(0)
    prompts = [draw.randint(16, 1500) for _ in range(96)]
    completions = [[draw.randint(16, 1500) for _ in range(8)] for _ in prompts]
    plan = cuseq.data.pack_groups(prompts, completions, 8192, world_size=8, padded=padded)
    check(plan, prompts, completions, (1 / 16384, 1.0, 0.0), padded)
    assert plan.imbalance < 1.02
    shares = plan.costs.sum(0)
    assert float(shares.max() / shares.mean()) < 1.01, "over all steps"


def test_a_row_makes_its_tree():
    prompts = [[1, 2], torch.tensor([3, 4, 5])]
    completions = [[[10], [11, 12], []], [np.array([20, 21]), [22]]]
    lengths = [[len(c) for c in each] for each in completions]
    plan = cuseq.data.pack_groups([2, 3], lengths, 7)
    found = {}
    for row in pickle.loads(pickle.dumps(plan)).rows():
        tree = row.tree(prompts, completions, total_tokens=7, max_seqs=6)
        assert tree.layout.num_real_tokens == row.tokens and tree.layout.total_tokens == 7
        for i, sample in enumerate(row.samples.tolist()):
            found[sample] = tree.input_ids[0][tree.rows_of(i)].tolist()
    assert found == {
        0: [1, 2, 10], 1: [1, 2, 11, 12], 2: [1, 2], 3: [3, 4, 5, 20, 21], 4: [3, 4, 5, 22]
    }  # fmt: skip


def test_lengths_of_any_kind_give_the_same_plan():
    prompts, completions = torch.randint(1, 50, (40,)), torch.randint(1, 50, (40, 4))
    found = []
    for kind in (lambda t: t, torch.Tensor.tolist, torch.Tensor.numpy):
        plan = cuseq.data.pack_groups(kind(prompts), kind(completions), 300, world_size=2)
        found.append([row._replace(samples=None) for rank in (0, 1) for row in plan.rows(rank)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([9], [[1, 3]], 10), {}, ValueError, r"prompts\[0\] = 9 and completions\[0\]\[1\] = 3"),
        (([1, 11], [[1], [0]], 10), {}, ValueError, r"prompts\[1\] = 11 and completions\[1\]\[0\]"),
        (([1], [[]], 10), {}, ValueError, r"completions\[0\] must have at least one"),
        (([1, 2], [[1]], 10), {}, ValueError, "for each of the 2 prompts, got 1"),
        (([-1], [[1]], 10), {}, ValueError, r"prompts must not be negative, got prompts\[0\] = -1"),
        (([1], [[2, -2]], 10), {}, ValueError, r"got completions\[0\]\[1\] = -2"),
        (([1.5], [[2]], 10), {}, TypeError, r"prompts must be ints.*prompts\[0\] = 1.5"),
        (([1], [[None]], 10), {}, TypeError, r"completions\[0\] must be ints"),
        (([1], 3, 10), {}, TypeError, "completions must be a list for each group, got 3"),
        (([1], np.array(3), 10), {}, TypeError, "completions must be a list for each group"),
        (([1], [[1]], 0), {}, ValueError, "capacity must be at least 1, got 0"),
        (([1], [[1]], 10), {"world_size": 0}, ValueError, "world_size must be at least 1"),
        (([1], [[1]], 10), {"world_size": 2**40}, ValueError, "world_size must be at most 65536"),
        (([1], [[1]], 10), {"cost": (1, 2)}, ValueError, "cost must be three coefficients"),
        (([1], [[1]], 10), {"cost": (1, -2, 0)}, ValueError, "cost must be three coefficients"),
        (([1], [[1]], 10), {"cost": (10**400, 0, 0)}, ValueError, "cost must be three coeff"),
        (
            ([1], [[1]], 10),
            {"cost": torch.ones(3, device="meta")},
            ValueError,
            "cost must be three coefficients .* on meta",
        ),
        (([1], [[1]], 10), {"padded": None}, TypeError, "padded must be True or False"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        cuseq.data.pack_groups(*arguments, **options)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, world_size = 1\), got 1"):
        cuseq.data.pack_groups([1], [[1]], 4).rows(1)


# ------------------------------------------------------------------------------- samplers


def pairs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unique tokens and modelled costs of pairs of DPO, whose order differs."""
    random_ = np.random.default_rng(1)
    prompt, a, b = (random_.integers(1, 400, count) for _ in range(3))
    squares = prompt**2 + a * (a + 2 * prompt) + b * (b + 2 * prompt)
    return torch.from_numpy(prompt + a + b), torch.from_numpy(squares.astype(float))


@pytest.mark.parametrize("buffer", [None, 200])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_samplers_balance_given_costs(buffer, accumulation):
    lengths, costs = pairs(1000)

    def ratio(**options) -> float:
        options |= {"world_size": 4, "accumulation": accumulation, "buffer": buffer}
        ranks = [
            list(cuseq.data.PackedBatchSampler(lengths, 2048, rank=rank, **options))
            for rank in range(4)
        ]
        rows = [row for rank in ranks for row in rank]
        assert sorted(i for row in rows for i in row) == list(range(1000))
        assert max(int(lengths[row].sum()) for row in rows) <= 2048
        sums = torch.tensor([[float(costs[row].sum()) for row in rank] for rank in ranks])
        steps = sums.view(4, -1, accumulation).sum(2)
        return float((steps.amax(0) / steps.mean(0)).mean())

    assert ratio(costs=costs) < 1.06
    assert ratio(costs=costs) < 0.5 + 0.5 * ratio(), "closer to even than without"


def test_a_state_knows_the_costs():
    lengths, costs = pairs(60)
    sampler = cuseq.data.PackedBatchSampler(lengths, 2048, costs=costs)
    batches = iter(sampler)
    next(batches)
    state = sampler.state_dict()
    again = cuseq.data.PackedBatchSampler(lengths, 2048, costs=costs.numpy())
    again.load_state_dict(state)
    assert list(again) == list(batches)
    for other in (costs + 1, None):
        with pytest.raises(ValueError, match="same arguments, but costs is .* and was '"):
            cuseq.data.PackedBatchSampler(lengths, 2048, costs=other).load_state_dict(state)


def test_a_state_from_before_there_were_costs_is_taken():
    lengths, costs = pairs(60)
    state = cuseq.data.PackedBatchSampler(lengths, 2048).state_dict()
    del state["costs"]
    cuseq.data.PackedBatchSampler(lengths, 2048).load_state_dict(state)
    with pytest.raises(ValueError, match="costs is '.*' and was None"):
        cuseq.data.PackedBatchSampler(lengths, 2048, costs=costs).load_state_dict(state)


def test_costs_on_a_gpu_are_refused(cuda):
    with pytest.raises(ValueError, match=r"costs must lie on the CPU.*got cuda:0.*\.cpu\(\)"):
        cuseq.data.PackedBatchSampler([3, 4], 8, costs=torch.ones(2, device=cuda))


@pytest.mark.parametrize(
    ("costs", "options", "error", "message"),
    [
        ([1.0], {}, ValueError, "one number for each of the 2 samples"),
        ([1.0, -1.0], {}, ValueError, r"not negative, got costs\[1\] = -1"),
        ([float("nan"), 1.0], {}, ValueError, r"finite and not negative, got costs\[0\]"),
        (["a", "b"], {}, TypeError, "costs must be numbers"),
        ([1j, 1.0], {}, TypeError, "costs must be real numbers, got torch.complex64"),
        (torch.ones(2).to_sparse(), {}, TypeError, "costs must be a dense tensor"),
        ([1.0, 1.0], {"balance": "tokens"}, ValueError, "balance must be None if costs are given"),
    ],
)
def test_wrong_costs_are_named(costs, options, error, message):
    with pytest.raises(error, match=message):
        cuseq.data.PackedBatchSampler([3, 4], 8, costs=costs, **options)
