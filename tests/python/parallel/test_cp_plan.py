"""Test plans of context parallelism: every policy, on any lengths, counted from the tokens."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from cuseq import PackedLayout
from cuseq.distributed import ContextParallelPlan, cp_plan

# Lengths for rows of several thousand tokens, and their number of tokens in a rank.
DRAWS = {
    "lognormal": lambda rng: max(1, int(rng.lognormvariate(math.log(350) - 0.5, 1.0))),
    "long-tailed": lambda rng: int(2 ** rng.triangular(3, 17, 8.5)),
    "12 to 24 K": lambda rng: rng.randint(12_000, 24_000),
}
ANY_LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(200, 400)), max_size=8
)


def draw_row(name: str, total: int, seed: int) -> list[int]:
    """Return lengths that fill a row; the last one is cut to fit."""
    rng, lengths, left = random.Random(seed), [], total
    while left > 0:
        lengths.append(min(DRAWS[name](rng), left))
        left -= lengths[-1]
    return lengths


def owners(plan: ContextParallelPlan) -> list[int]:
    """Return the rank of each token; check that each has one and every rank its number."""
    rank_of = [-1] * plan.total_tokens
    for rank in range(plan.cp_size):
        tokens = plan.tokens_of(rank)
        assert (tokens.dtype, tokens.device.type) == (torch.int64, "cpu")
        assert len(tokens) == plan.total_tokens // plan.cp_size
        for token in tokens.tolist():
            assert rank_of[token] == -1
            rank_of[token] = rank
    assert -1 not in rank_of
    return rank_of


def recount(
    plan: ContextParallelPlan, lengths: list[int], window: int | None = None
) -> tuple[list[int], int, int, int]:
    """Return each rank's query-key pairs, the rows that ranks need of others, whole and cut."""
    rank_of, pairs, moved, whole, begin = owners(plan), [0] * plan.cp_size, 0, 0, 0
    for length in lengths:
        needed = [set() for _ in range(plan.cp_size)]
        for query in range(length):
            first = 0 if window is None else max(0, query - window + 1)
            rank = rank_of[begin + query]
            pairs[rank] += query + 1 - first
            needed[rank].update(range(first, query))
        for rank, keys in enumerate(needed):
            moved += sum(rank_of[begin + key] != rank for key in keys)
        whole += length > 0 and len(set(rank_of[begin : begin + length])) == 1
        begin += length
    return pairs, moved, whole, sum(length > 0 for length in lengths) - whole


@given(
    ANY_LENGTHS,
    st.integers(1, 6),
    st.integers(0, 9),
    st.sampled_from(["auto", "contiguous"]),
    st.sampled_from([None, None, 1, 7]),
)
def test_any_lengths_are_dealt(lengths, cp_size, tail, policy, window):
    total = sum(lengths) + tail
    total += -total % cp_size
    plan = cp_plan(lengths, cp_size, total_tokens=total, policy=policy, window=window)
    pairs, moved, whole, cut = recount(plan, lengths, window)
    assert (plan.whole, plan.cut) == (whole, cut)
    assert plan.attention_balance == pytest.approx(
        max(pairs) * cp_size / sum(pairs) if sum(pairs) else 1.0
    )
    expected = moved / (total * (cp_size - 1)) if moved else 0.0
    assert plan.moved_share == pytest.approx(expected)
    assert plan.predicted_us >= 0


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("policy", ["auto", "contiguous"])
@pytest.mark.parametrize(
    "lengths",
    [lambda r: [1], lambda r: [r + 1], lambda r: [50 * r], lambda r: [0, 5, 0], lambda r: []],
    ids=["one token", "R + 1", "longer than a rank", "empty ones", "none"],
)
def test_documents_of_any_kind(lengths, policy, cp_size):
    made = lengths(cp_size)
    total = sum(made) + -sum(made) % cp_size
    plan = cp_plan(made, cp_size, total_tokens=total, policy=policy)
    pairs, _, whole, cut = recount(plan, made)
    assert (plan.whole, plan.cut) == (whole, cut)
    if made and len(made) == 1 and made[0] == 50 * cp_size and policy == "auto":
        assert max(pairs) <= 1.05 * sum(pairs) / cp_size


@pytest.mark.parametrize("cp_size", [2, 8, 64])
@pytest.mark.parametrize("name", DRAWS)
def test_the_busiest_rank_is_within_a_twentieth_of_the_mean(name, cp_size):
    for seed in range(3):
        lengths = draw_row(name, 8192 * cp_size, seed)
        plan = cp_plan(lengths, cp_size)
        ends = torch.tensor(lengths).cumsum(0)
        starts = torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths))
        keys = torch.arange(plan.total_tokens) - starts + 1  # that each token sees
        pairs = [int(keys[plan.tokens_of(rank)].sum()) for rank in range(cp_size)]
        assert max(pairs) <= 1.05 * sum(pairs) / cp_size
        assert plan.attention_balance == pytest.approx(max(pairs) * cp_size / sum(pairs))


def test_short_documents_stay_whole():
    lengths = draw_row("lognormal", 8 * 8192, seed=0)
    plan = cp_plan(lengths, 8)
    assert plan.cut <= 8
    assert plan.moved_share < 0.05
    alone = cp_plan([8192] * 8, 8)
    assert (alone.whole, alone.cut, alone.moved_share) == (8, 0, 0.0)


def test_auto_is_no_worse_than_the_other_policies():
    for seed, name in enumerate(DRAWS):
        lengths = draw_row(name, 4 * 8192, seed)
        auto, contiguous = (cp_plan(lengths, 4, policy=p) for p in ("auto", "contiguous"))
        if contiguous.attention_balance <= 1.05:
            assert auto.predicted_us <= contiguous.predicted_us
        assert auto.attention_balance <= 1.05


def test_ulysses_keeps_the_order_of_the_row():
    plan = cp_plan([3, 7], 2, total_tokens=12, policy="ulysses", heads=(4, 2))
    assert [plan.tokens_of(rank).tolist() for rank in range(2)] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]
    assert plan.attention_balance == 1.0
    # q and out of half the heads against k and v of all: (4 + 2) / 2 heads over 2 ranks
    assert plan.moved_share == pytest.approx(1.5)
    for heads in ((4, 1), (8, 8), (4, 4)):
        cp_plan([16], 4, policy="ulysses", heads=heads)
    with pytest.raises(ValueError, match="divide the query heads .*got 3 ranks and 4 heads"):
        cp_plan([12], 3, policy="ulysses", heads=(4, 2))
    with pytest.raises(ValueError, match="key heads or be a multiple .*got 4 ranks and 6 key"):
        cp_plan([16], 4, policy="ulysses", heads=(12, 6))


@given(ANY_LENGTHS, st.integers(1, 6), st.integers(0, 9), st.sampled_from([1, 1, 2, 4, 7, 12]))
def test_ulysses_keeps_the_order_of_any_row(lengths, cp_size, tail, multiple):
    used = sum(-(-length // multiple) * multiple for length in lengths)
    step = math.lcm(cp_size, multiple)
    packed = PackedLayout.from_lengths(
        lengths, -(-(used + tail) // step) * step, segment_multiple=multiple
    )
    plan = cp_plan(packed, cp_size, policy="ulysses", heads=(60, 60))
    tokens = torch.cat([plan.tokens_of(rank) for rank in range(cp_size)])
    assert tokens.tolist() == list(range(packed.total_tokens))
    ends = packed.cu_seqlens_padded[:-1] + packed.lengths
    own = max(1, plan.total_tokens // cp_size)
    whole = sum(
        begin < end and begin // own == (end - 1) // own
        for begin, end in zip(packed.cu_seqlens_padded.tolist(), ends.tolist(), strict=False)
    )
    assert (plan.whole, plan.cut) == (whole, sum(length > 0 for length in lengths) - whole)
    assert pickle.loads(pickle.dumps(plan)).hash == plan.hash


def test_what_cannot_be_planned_is_named():
    for arguments, options, message in (
        (([9], 2), {}, "total_tokens must be a multiple of cp_size = 2, .*got 9"),
        (([8], 2), {"total_tokens": 6}, "sum to at most total_tokens = 6, got 8"),
        (([8, -1], 2), {}, r"negative, got lengths\[1\] = -1"),
        (([8], 0), {}, "cp_size must be at least 1, got 0"),
        (([8], 1 << 40), {}, r"cp_size must lie in \[1, 65536\]"),
        (([8], 2), {"policy": "ring"}, "policy must be \"auto\", .*got 'ring'"),
        (([8], 2), {"heads": (3, 2)}, "heads must be .*got 3 and 2"),
        (([8], 2), {"heads": (0, 0)}, "heads must be .*got 0 and 0"),
        (([8], 2), {"window": 0}, "window must be None or at least 1, got 0"),
        (([8], 2), {"max_far_rows": -1}, "max_far_rows must be at least 0, got -1"),
        (([8], 2), {"max_far_rows": 1}, "max_far_rows must be at least .*, 4 .*got 1"),
        (([2**30], 2), {}, r"total_tokens must be below 2\^30"),
    ):
        with pytest.raises(ValueError, match=message):
            cp_plan(*arguments, **options)
    for options, message in (
        ({"heads": 16}, r"heads must be \(query heads, key heads\), got 16"),
        ({"heads": (16, "8")}, "heads must be an int"),
        ({"head_dim": None}, "head_dim must be an int"),
        ({"total_tokens": 8.0}, "total_tokens must be an int"),
    ):
        with pytest.raises(TypeError, match=message):
            cp_plan([8], 2, **options)


def test_a_plan_is_made_by_cp_plan():
    for lengths in ([1], torch.tensor([4], dtype=torch.int32)):
        with pytest.raises(TypeError, match="ContextParallelPlan is made by cp_plan, .* got"):
            ContextParallelPlan(lengths, None, 4, 2, "auto", (1, 1), 2, None, None, None)


def test_a_limit_of_far_keys_is_kept_where_a_plan_keeps_it():
    lengths = draw_row("long-tailed", 4 * 8192, seed=1)
    free = cp_plan(lengths, 4)
    contiguous = cp_plan(lengths, 4, policy="contiguous")
    with pytest.raises(ValueError, match="max_far_rows must be at least the far keys"):
        cp_plan(lengths, 4, max_far_rows=10)
    for limit in (8192, 16_384, 3 * 8192):
        try:
            plan = cp_plan(lengths, 4, max_far_rows=limit)
        except ValueError:
            continue
        assert plan.moved_share * plan.total_tokens * 3 <= 4 * limit
    assert min(free.moved_share, contiguous.moved_share) > 0


def test_padding_between_documents_is_dealt_last():
    packed = PackedLayout.from_lengths([5, 9, 1], 32, segment_multiple=8)
    for policy in ("auto", "contiguous"):
        plan = cp_plan(packed, 2, policy=policy)
        real = {*range(5), *range(8, 17), 24}
        for rank in range(2):
            is_real = [token in real for token in plan.tokens_of(rank).tolist()]
            assert is_real == sorted(is_real, reverse=True)


def test_a_plan_is_that_of_its_lengths_however_they_are_given(device):
    lengths = [5, 0, 30, 17, 400, 2]
    plan = cp_plan(lengths, 2, total_tokens=460)
    packed = PackedLayout.from_lengths(lengths, 460, device=device)
    for given_lengths in (
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(lengths, device=device),
        tuple(lengths),
    ):
        same = cp_plan(given_lengths, 2, total_tokens=460)
        assert same.hash == plan.hash
    assert cp_plan(packed, 2).hash == plan.hash
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.hash == plan.hash
    assert torch.equal(sent.tokens_of(1), plan.tokens_of(1))
    assert (sent.policy, sent.predicted_us) == (plan.policy, plan.predicted_us)


def test_a_plan_that_an_earlier_cuseq_pickled_is_refused_by_name():
    """It had one option more."""
    make, arguments = cp_plan([6, 2], 2).__reduce__()
    with pytest.raises(ValueError, match="got 7 options: make a plan of an earlier cuseq again"):
        make(*arguments, None)


ELSEWHERE = """
import sys
sys.path[:0] = {paths!r}
from cuseq.distributed import cp_plan
print([cp_plan({lengths!r}, size).hash for size in (2, 3, 8)])
"""


def test_another_process_computes_the_same_plan():
    lengths = draw_row("long-tailed", 24 * 1000, seed=5)
    code = ELSEWHERE.format(paths=sys.path, lengths=lengths)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(found.stdout) == [cp_plan(lengths, size).hash for size in (2, 3, 8)]


def test_the_hash_tells_plans_apart():
    packed = PackedLayout.from_lengths([8, 8], segment_multiple=4)
    plans = [
        cp_plan([8, 8], 2, policy="zigzag"),
        cp_plan([8, 8], 2, policy="contiguous"),
        cp_plan([8, 8], 2, policy="ulysses"),
        cp_plan([8, 8], 2, policy="contiguous", window=3),
        cp_plan([8, 8], 4, policy="contiguous"),
        cp_plan([8, 7], 2, total_tokens=16, policy="contiguous"),
        cp_plan([7, 9], 2, policy="contiguous"),
    ]
    assert len({plan.hash for plan in plans}) == len(plans)
    assert cp_plan(packed, 2, policy="zigzag").hash == plans[0].hash
    assert all(0 <= plan.hash < 2**64 for plan in plans)


def test_a_plan_prints_what_it_costs():
    plan = cp_plan([6, 2, 2], 2)
    text = repr(plan)
    assert text.startswith("ContextParallelPlan(auto, 10 tokens over 2 ranks: 2 documents whole, 1")
    for part in ("of the mean", "% of an all-gather", "us a layer predicted"):
        assert part in text


def test_a_plan_is_drawn():
    plan = cp_plan([8, 2, 2, 3], 2, total_tokens=16, policy="contiguous")
    assert plan.plot(8) == "rank 0 |aaaaaaaa|\nrank 1 |bbccddd.|"
    assert cp_plan([], 2, total_tokens=0).plot() == "rank 0 ||\nrank 1 ||"
    padded = PackedLayout.from_lengths([3, 5], segment_multiple=4)
    assert cp_plan(padded, 2, policy="zigzag").plot(6) == "rank 0 |A.BB..|\nrank 1 |AABBB.|"
    cut = cp_plan([6, 2], 2, policy="contiguous").plot(4)
    assert cut == "rank 0 |AAAA|\nrank 1 |AAbb|"
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        plan.plot(0)


def test_lengths_on_a_gpu_wait_for_their_copy(cuda):
    lengths = torch.tensor([5, 11], device=cuda)
    packed = PackedLayout.from_lengths(lengths, 16)
    assert cuseq.distributed.cp_plan(packed, 2).hash == cp_plan([5, 11], 2).hash
