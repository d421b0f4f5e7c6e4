"""Test the parts of a row that ranks hold: tokens, layouts and shares of the plan."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import cuseq
from cuseq import _C, PackedLayout
from cuseq.distributed import cp_join, cp_partition, cp_plan

POLICIES = ("auto", "contiguous", "ulysses")
META = _C.RankMeta


def check_parts(packed: PackedLayout, cp_size: int, policy: str) -> None:
    """Deal hidden states, join them again, and check the layout of each part."""
    total = packed.total_tokens
    plan = cp_plan(packed, cp_size, policy=policy, heads=(24, 24))
    hidden = torch.randn(total, 3, device=packed.device, dtype=torch.float64, requires_grad=True)
    numbers = torch.arange(total, device=packed.device)
    dealt = []
    for rank in range(cp_size):
        local, own, own_hidden = cp_partition(packed, plan, rank, numbers, hidden)
        tokens = plan.tokens_of(rank).to(packed.device)
        assert torch.equal(own, tokens)
        assert torch.equal(own_hidden, hidden[tokens])
        assert torch.equal(local.position_ids, packed.position_ids[tokens])
        assert torch.equal(local.moe_padding_mask, packed.moe_padding_mask[tokens])
        assert local.total_tokens == total // cp_size
        assert local.num_real_tokens == int((~packed.moe_padding_mask[tokens]).sum())
        assert local.pads_between_sequences == (
            packed.pads_between_sequences and policy == "ulysses"
        )
        # Tokens of one local sequence follow each other in one sequence of the row.
        same = local.seq_ids[1:] == local.seq_ids[:-1]
        real = ~local.moe_padding_mask[1:]
        assert bool((tokens.diff()[same & real] == 1).all())
        whole_ids = packed.seq_ids[tokens]
        assert torch.equal(whole_ids[1:][same & real], whole_ids[:-1][same & real])
        dealt.append(own_hidden)
    joined = cp_join(packed, plan, torch.stack(dealt))
    assert torch.equal(joined, hidden)
    weight = torch.randn_like(joined)
    (grad,) = torch.autograd.grad(joined, hidden, weight)
    assert torch.equal(grad, weight)


@pytest.mark.kernels
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[8, 24], [3, 0, 17, 1], [1] * 9, [0], [500]], ids=str)
def test_parts(lengths, policy, cp_size, device):
    total = sum(lengths) + 5 + -(sum(lengths) + 5) % cp_size
    check_parts(PackedLayout.from_lengths(lengths, total, device=device), cp_size, policy)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.sampled_from(POLICIES),
)
def test_parts_of_padded_rows(lengths, cp_size, multiple, policy):
    packed = PackedLayout.from_lengths(
        lengths, segment_multiple=multiple, total_multiple=cp_size, max_seqs=300
    )
    check_parts(packed, cp_size, policy)


def test_the_parts_of_a_padded_row_in_its_order():
    packed = PackedLayout.from_lengths([3, 5], segment_multiple=4, total_multiple=16)
    plan = cp_plan(packed, 4, policy="ulysses", heads=(4, 4))
    parts = [cp_partition(packed, plan, rank)[0] for rank in range(4)]
    assert [plan.tokens_of(rank).tolist() for rank in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [part.lengths.tolist() for part in parts] == [[3], [4], [1], []]
    assert [part.cu_seqlens_padded.tolist() for part in parts] == [[0, 4], [0, 4], [0, 4], [0]]
    assert [part.position_ids.tolist() for part in parts] == [
        [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3],
    ]  # fmt: skip
    wider = cp_plan(packed, 2, policy="ulysses", heads=(4, 4))
    assert wider.plot(8) == "rank 0 |aaa.BBBB|\nrank 1 |B.......|"


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_rope_of_a_part_is_that_of_the_whole(policy, multiple, device):
    packed = PackedLayout.from_lengths([7, 26, 2], 40, segment_multiple=multiple, device=device)
    cos, sin = cuseq.rope_table(64, 8, dtype=torch.float64, device=device)
    q = torch.randn(40, 2, 8, dtype=torch.float64, device=device)
    whole, _ = cuseq.apply_rope(q, None, cos, sin, packed=packed)
    plan = cp_plan(packed, 4, policy=policy)
    for rank in range(4):
        local, own, expected = cp_partition(packed, plan, rank, q, whole)
        turned, _ = cuseq.apply_rope(own, None, cos, sin, packed=local)
        assert torch.equal(turned, expected)


def all_of(part) -> dict[str, object]:
    """Return the share of a rank as lists."""
    return {
        "rows": part.rows.tolist(),
        "meta": part.meta.tolist(),
        "positions": part.positions.tolist(),
        "group": part.group,
    }


@pytest.mark.parametrize(("policy", "multiple"), [("contiguous", 1), ("ulysses", 4)])
def test_a_part_is_copied_pickled_and_moved_with_its_share(policy, multiple, device):
    packed = PackedLayout.from_lengths([40, 7, 27, 2], 80, segment_multiple=multiple)
    plan = cp_plan(packed, 4, policy=policy)
    (local,) = cp_partition(packed, plan, 2, group="7")
    expected = all_of(local.part)
    assert expected["group"] == "7"
    assert local.part.meta.device.type == "cpu"
    moved = local.to(device)
    assert moved.part.rows.device == device
    assert moved.part.meta.device.type == "cpu"
    for other in (
        pickle.loads(pickle.dumps(local)),
        pickle.loads(pickle.dumps(moved)),
        copy.deepcopy(local),
        moved,
        moved.to("cpu"),
        local.with_total_tokens(24),
    ):
        found = all_of(other.part)
        found["positions"] = found["positions"][:20]
        assert found == expected
        assert torch.equal(other.cu_seqlens_padded.cpu(), local.cu_seqlens_padded)
    assert local.with_total_tokens(24).position_ids.tolist()[20:] == [0, 1, 2, 3]


def test_a_part_is_pinned_with_its_share(cuda):
    packed = PackedLayout.from_lengths([40, 7, 30, 3])
    (local,) = cp_partition(packed, cp_plan(packed, 4), 1)
    pinned = local.pin_memory()
    assert pinned.part.rows.is_pinned() and pinned.part.positions.is_pinned()
    assert all_of(pinned.part) == all_of(local.part)


def test_a_row_on_a_gpu_is_dealt_without_a_wait(cuda):
    lengths = [40, 7, 30, 3]
    packed = PackedLayout.from_lengths(lengths, device=cuda)
    plan = cp_plan(lengths, 4)
    rows = torch.randn(80, 4, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        local, own = cp_partition(packed, plan, 1, rows)
        joined = cp_join(packed, plan, torch.stack([own] * 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(own, rows[plan.tokens_of(1).to(cuda)])
    assert joined.shape == rows.shape
    on_host = cp_partition(PackedLayout.from_lengths(lengths), plan, 1)[0]
    assert all_of(local.part) == all_of(on_host.part)


def test_a_plan_is_not_copied_in_a_capture(cuda):
    packed = PackedLayout.from_lengths([8, 8], device=cuda)
    plan, rows = cp_plan([8, 8], 2), torch.randn(2, 8, 4, device=cuda)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    packed.wait()
    with pytest.raises(RuntimeError, match="before the capture"):
        with torch.cuda.graph(graph, stream=stream):
            cp_join(packed, plan, rows)


@pytest.mark.parametrize(("policy", "multiple"), [("auto", 1), ("ulysses", 3)])
def test_buffers_have_one_size_for_all_packs(policy, multiple):
    shapes = set()
    for lengths in ([60], [1] * (60 // multiple), [13, 2, 40], [0, 5]):
        packed = PackedLayout.from_lengths(lengths, 60, segment_multiple=multiple, max_seqs=60)
        plan = cp_plan(packed, 3, policy=policy, heads=(3, 3))
        for rank in range(3):
            (local,) = cp_partition(packed, plan, rank)
            part = local.part
            sizes = [t.shape for t in (part.rows, part.meta, local.cu_seqlens_static)]
            if multiple > 1:
                sizes.append(local.segments.cu_seqlens_static.shape)
            shapes.add(tuple(sizes))
    assert len(shapes) == 1
    packed = PackedLayout.from_lengths([30, 30], max_seqs=4)
    sizes = [
        cp_partition(packed, cp_plan(packed, 3, max_far_rows=limit), 0)[0].part.rows.numel()
        for limit in (None, 25)
    ]
    assert sizes[1] < sizes[0]


def test_one_graph_serves_the_parts_of_all_rows():
    cos, sin = cuseq.rope_table(64, 8)
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def turned(q, packed):
        return cuseq.apply_rope(q, None, cos, sin, packed=packed)[0]

    for lengths in ([60], [1] * 60, [13, 2, 40], [0, 5]):
        packed = PackedLayout.from_lengths(lengths, 60)
        q = torch.randn(60, 2, 8)
        expected = cuseq.apply_rope(q, None, cos, sin, packed=packed)[0]
        for rank in range(3):
            plan = cp_plan(packed, 3)
            local, own, same = cp_partition(packed, plan, rank, q, expected)
            torch.testing.assert_close(turned(own, local), same)
    assert counter.frame_count == 1


def sections(local: PackedLayout) -> dict[str, list[int]]:
    """Return the sections of a share, without what fills them up."""
    meta, rows = local.part.meta.tolist(), local.part.rows.tolist()
    pieces, keys = meta[META.PIECE_CAPACITY], meta[META.KEY_CAPACITY]
    sent, sources = meta[META.SEND_CAPACITY], meta[META.SOURCE_CAPACITY]
    sizes = [pieces + 1, pieces + 1, keys, sent, sources + 1, keys + sent]
    begins = [0, *itertools.accumulate(sizes)]
    assert begins.pop() == len(rows)
    used = [
        meta[META.NUM_PIECES] + 1,
        meta[META.NUM_CUT] + 1,
        meta[META.NUM_KEY_ROWS],
        meta[META.NUM_SENT_ROWS],
        meta[META.NUM_CUT_TOKENS] + meta[META.NUM_FAR_ROWS] + 1,
        meta[META.NUM_KEY_ROWS] + meta[META.NUM_SENT_ROWS],
    ]
    names = ("queries", "keys", "key_rows", "sent", "term_offsets", "terms")
    return {
        name: rows[begin : begin + count]
        for name, begin, count in zip(names, begins, used, strict=True)
    }


def test_the_worked_example_of_a_share():
    """Document 1 lies on both ranks: rank 1 needs its first three keys."""
    packed = PackedLayout.from_lengths([2, 6], 10)
    plan = cp_plan(packed, 2, policy="contiguous")
    (first,), (second,) = (cp_partition(packed, plan, rank) for rank in range(2))
    assert plan.tokens_of(0).tolist() == [2, 3, 4, 0, 1]
    assert sections(first) == {
        "queries": [0, 3, 5],
        "keys": [0, 3],
        "key_rows": [0, 1, 2],
        "sent": [0, 1, 2],
        "term_offsets": [0, 2, 4, 6],
        "terms": [0, 3, 1, 4, 2, 5],
    }
    assert sections(second) == {
        "queries": [0, 3],
        "keys": [0, 6],
        "key_rows": [3, 4, 5, 0, 1, 2],
        "sent": [],
        "term_offsets": [0, 1, 2, 3, 4, 5, 6],
        "terms": [3, 4, 5, 0, 1, 2],
    }
    meta = second.part.meta.tolist()
    assert meta[META.SIZE :] == [0, 0, 3, 0]
    numbers = {
        META.CP_SIZE: 2,
        META.RANK: 1,
        META.ANY_FAR: 1,
        META.NUM_TOKENS: 3,
        META.NUM_CUT_TOKENS: 3,
        META.LONGEST_CUT: 3,
        META.LONGEST_KEYS: 6,
        META.NUM_FAR_ROWS: 3,
    }
    assert {slot: meta[slot] for slot in numbers} == numbers
    low, high = (meta[slot] % 2**32 for slot in (META.HASH_LOW, META.HASH_HIGH))
    assert low + (high << 32) == plan.hash


def attend(q, k, v, first: int):
    """Causal attention of queries that follow `first` keys, in float64."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(first + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("policy", ["auto", "contiguous", "zigzag"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2])
def test_shares_hold_what_attention_needs(policy, cp_size, multiple):
    """Send the rows as the shares say, attend over each piece's keys, join the outputs."""
    multiple = 2 * cp_size if policy == "zigzag" else multiple
    packed = PackedLayout.from_lengths(
        [61, 0, 3, 130, 17], segment_multiple=multiple, total_multiple=cp_size
    )
    plan = cp_plan(packed, cp_size, policy=policy)
    q, k, v = (torch.randn(packed.total_tokens, 2, 4, dtype=torch.float64) for _ in range(3))
    parts = [cp_partition(packed, plan, rank, q, k, v) for rank in range(cp_size)]
    real = [[rows[~local.moe_padding_mask] for rows in own] for local, *own in parts]
    messages = [[None] * cp_size for _ in range(cp_size)]
    for rank, (local, *_) in enumerate(parts):
        meta, sent = local.part.meta.tolist(), sections(local)["sent"]
        for peer, count in enumerate(meta[META.SIZE : META.SIZE + cp_size]):
            rows, sent = torch.tensor(sent[:count], dtype=torch.long), sent[count:]
            messages[peer][rank] = [own[rows] for own in real[rank][1:]]
    outputs = []
    for rank, (local, *_) in enumerate(parts):
        share, meta = sections(local), local.part.meta.tolist()
        queries = real[rank][0]
        cut = [rows[: meta[META.NUM_CUT_TOKENS]] for rows in real[rank][1:]]
        sources = [
            torch.cat([cut[i], *(message[i] for message in messages[rank])]) for i in range(2)
        ]
        pieces = []
        for i in range(meta[META.NUM_PIECES]):
            begin, end = share["queries"][i : i + 2]
            keys, values = (rows[begin:end] for rows in real[rank][1:])
            if i < meta[META.NUM_CUT]:
                rows = torch.tensor(share["key_rows"][share["keys"][i] : share["keys"][i + 1]])
                keys, values = (source[rows] for source in sources)
            first = len(keys) - (end - begin)
            pieces.append(attend(queries[begin:end], keys, values, first))
        out = torch.zeros(local.total_tokens, 2, 4, dtype=torch.float64)
        out[~local.moe_padding_mask] = torch.cat(pieces) if pieces else out[:0]
        outputs.append(out)
    joined = cp_join(packed, plan, torch.stack(outputs))
    expected = cuseq.varlen_attention(q, k, v, packed)
    torch.testing.assert_close(joined, expected)


def test_a_group_is_a_group():
    packed = PackedLayout.from_lengths([12, 4])
    with pytest.raises(TypeError, match="group must be a ProcessGroup or None, got 3"):
        cp_partition(packed, cp_plan(packed, 2), 0, group=3)


def test_a_plan_of_other_padding_is_refused():
    packed = PackedLayout.from_lengths([7, 8], segment_multiple=8)
    plan = cp_plan(PackedLayout.from_lengths([8, 8], segment_multiple=8), 2)
    with pytest.raises(ValueError, match=r"segments \[7, 8\], got one for \[8, 8\]"):
        cp_partition(packed, plan, 0)


def test_a_layout_without_room_for_the_documents_of_a_plan_is_named():
    """Empty documents leave no trace in a layout's tokens."""
    packed = PackedLayout.from_lengths([], 8, max_seqs=0)
    plan = cp_plan([0, 0], 1, total_tokens=8)
    with pytest.raises(ValueError, match=r"packed must have room for the plan's 2 documents, got"):
        cp_partition(packed, plan, 0)
