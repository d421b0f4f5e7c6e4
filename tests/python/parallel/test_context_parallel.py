"""Test rows split over the ranks of context parallelism, and a model trained on them."""

from __future__ import annotations

import pickle

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import DIM, HEAD_DIM, HEADS
from hypothesis import given
from hypothesis import strategies as st
from tiers import full
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

import cuseq
from cuseq import PackedLayout
from cuseq.distributed import cp_join, cp_partition, cp_plan


def zigzag(packed: PackedLayout, cp_size: int) -> cuseq.distributed.ContextParallelPlan:
    return cp_plan(packed, cp_size, policy="zigzag")


def own_positions(length: int, cp_size: int, cp_rank: int) -> list[int]:
    """Return which tokens of a segment a rank has, by the definition."""
    part = length // (2 * cp_size)
    second = 2 * cp_size - 1 - cp_rank
    parts = (range(cp_rank * part, (cp_rank + 1) * part), range(second * part, (second + 1) * part))
    return [position for one in parts for position in one]


def check_deal(lengths, cp_size: int, multiple: int, device="cpu") -> None:
    parts = 2 * cp_size
    packed = PackedLayout.from_lengths(
        lengths, segment_multiple=parts, total_multiple=multiple, max_seqs=600, device=device
    )
    total = packed.total_tokens
    tokens = torch.arange(total, device=device)
    hidden = torch.randn(total, 3, device=device, dtype=torch.float64, requires_grad=True)
    segments = [-(-length // parts) * parts for length in lengths]
    segments.append(total - sum(segments))
    dealt = []
    plan = zigzag(packed, cp_size)
    assert (plan.total_tokens, plan.cp_size, plan.policy) == (total, cp_size, "zigzag")
    for rank in range(cp_size):
        local, own, own_hidden = cp_partition(packed, plan, rank, tokens, hidden)
        begin, expected, positions, real = 0, [], [], []
        for length, segment in zip([*lengths, 0], segments, strict=True):
            inside = own_positions(segment, cp_size, rank)
            expected += [begin + position for position in inside]
            positions += inside
            real += [position < length for position in inside]
            begin += segment
        assert own.tolist() == expected
        assert plan.tokens_of(rank).tolist() == expected
        assert plan.tokens_of(rank).dtype == torch.int64
        assert local.total_tokens == total // cp_size
        assert local.position_ids.tolist() == positions
        assert (~local.moe_padding_mask).tolist() == real
        assert local.num_real_tokens == sum(real)
        assert torch.equal(own_hidden, hidden[expected])
        dealt.append(own_hidden)
    joined = cp_join(packed, plan, torch.stack(dealt))
    assert torch.equal(joined, hidden)
    weight = torch.randn_like(joined)
    (grad,) = torch.autograd.grad(joined, hidden, weight)
    assert torch.equal(grad, weight)


@pytest.mark.kernels
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[8, 24], [3, 0, 17, 1], [1] * 9, [0], [500]], ids=str)
def test_deal(lengths, cp_size, device):
    check_deal(lengths, cp_size, multiple=5, device=device)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_any_deal(lengths, cp_size, multiple):
    check_deal(lengths, cp_size, multiple)


@pytest.mark.parametrize(
    "lengths,total,message",
    [
        ([8, 6], None, r"multiples of 4.*lengths\[1\] = 6"),
        ([8, 4], 14, "multiples of 4.*tail = 2"),
    ],
)
def test_what_cannot_be_dealt_is_named(lengths, total, message, device):
    packed = PackedLayout.from_lengths(lengths, total, device=device)
    with pytest.raises(ValueError, match=message):
        zigzag(packed, 2)


def test_device_lengths_that_cannot_be_dealt(cuda):
    packed = PackedLayout.from_lengths(torch.tensor([8, 6], device=cuda), 16)
    with pytest.raises(ValueError, match="multiples of 4"):
        zigzag(packed, 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank):
    packed = PackedLayout.from_lengths([8])
    plan = zigzag(packed, 2)
    for call in (lambda: cp_partition(packed, plan, rank), lambda: plan.tokens_of(rank)):
        with pytest.raises(ValueError, match=f"rank must lie in .*got {rank}"):
            call()


def test_rope_of_a_part_is_that_of_the_whole(device):
    packed = PackedLayout.from_lengths([7, 30], segment_multiple=4, device=device)
    cos, sin = cuseq.rope_table(64, 8, dtype=torch.float64, device=device)
    q = torch.randn(packed.total_tokens, 2, 8, dtype=torch.float64, device=device)
    whole, _ = cuseq.apply_rope(q, None, cos, sin, packed=packed)
    for rank in range(2):
        local, own, expected = cp_partition(packed, zigzag(packed, 2), rank, q, whole)
        turned, _ = cuseq.apply_rope(own, None, cos, sin, packed=local)
        torch.testing.assert_close(turned, expected)
        with pytest.raises(ValueError, match="cp_size must be 1"):
            cuseq.apply_rope(own, None, cos, sin, packed=local, cp_size=2)


LENGTHS = [13, 4, 30, 1]


class Block(nn.Module):
    """Attention of this rank's queries over the keys of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)

    def forward(self, hidden: Tensor, packed: PackedLayout, cp_size: int, rank: int) -> Tensor:
        plan = zigzag(packed, cp_size)
        local, tokens = cp_partition(
            packed, plan, rank, torch.arange(packed.total_tokens, device=hidden.device)
        )
        q, k, v = self.qkv(hidden).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        cos, sin = cuseq.rope_table(64, HEAD_DIM, dtype=torch.float64, device=hidden.device)
        q, k = cuseq.apply_rope(q.contiguous(), k.contiguous(), cos, sin, packed=local)
        if cp_size > 1:
            k, v = (
                cp_join(packed, plan, torch.stack(all_gather(rows.contiguous()))) for rows in (k, v)
            )
        seen = packed.dense_mask()[0, 0, tokens.long()]
        out = scaled_dot_product_attention(*(rows.transpose(0, 1) for rows in (q, k, v)), seen)
        return hidden + out.transpose(0, 1).flatten(1)


def step(rank: int, cp_size: int, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients of the row, of which this rank has its part."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(2)).to(device)
    packed = PackedLayout.from_lengths(LENGTHS, segment_multiple=8, total_multiple=24).to(device)
    rows = distributed.make_rows(packed.total_tokens).to(device)
    local, hidden = cp_partition(packed, zigzag(packed, cp_size), rank, rows)
    for block in model:
        hidden = block(hidden, packed, cp_size, rank)
    loss = hidden[~local.moe_padding_mask].square().sum()
    loss.backward()
    grads = distributed.gradients(model)
    loss = loss.detach()
    if cp_size > 1:
        for tensor in (loss, *grads):
            dist.all_reduce(tensor)
    return loss, grads


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, full(4)])
def test_training_over_gloo_is_that_of_one_process(cp_size):
    loss, grads = step(0, 1)
    for their_loss, their_grads in distributed.run(step, cp_size, processes=cp_size):
        torch.testing.assert_close(their_loss, loss)
        torch.testing.assert_close(their_grads, grads)


@pytest.mark.slow
def test_training_over_nccl_is_that_of_one_process(second_gpu):
    loss, grads = step(0, 1)
    for their_loss, their_grads in distributed.run(step, 2, "cuda", backend="nccl"):
        torch.testing.assert_close(their_loss, loss)
        torch.testing.assert_close(their_grads, grads)


def equalized(rank: int) -> int:
    packed = PackedLayout.from_lengths([5 + 10 * rank], total_multiple=4)
    return cuseq.distributed.equalize_tokens(packed).total_tokens


@pytest.mark.slow
def test_equalized_totals():
    assert distributed.run(equalized) == [16, 16]


@pytest.mark.slow
def test_equalized_totals_over_nccl(second_gpu):
    assert distributed.run(equalized, backend="nccl") == [16, 16]


def test_a_longer_row_of_a_part_keeps_its_positions(device):
    packed = PackedLayout.from_lengths([8, 8], device=device)
    (local,) = cp_partition(packed, zigzag(packed, 2), 1)
    longer = local.with_total_tokens(12)
    assert longer.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5, 0, 1, 2, 3]
    moved = longer.to("cpu")
    assert moved.position_ids.tolist() == longer.position_ids.tolist()


def test_a_part_on_the_host_moves_without_a_wait(cuda):
    packed = PackedLayout.from_lengths([8, 8])
    (local,) = cp_partition(packed, zigzag(packed, 2), 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = local.to(cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]


def test_what_needs_neighbours_refuses_a_part(device):
    packed = PackedLayout.from_lengths([8, 8], device=device)
    (local,) = cp_partition(packed, zigzag(packed, 2), 1)
    labels = torch.arange(8, device=device)
    for call in (
        local.dense_mask,
        local.block_mask,
        local.xformers_bias,
        local.flash_kwargs,
        lambda: local.seq_idx,
        lambda: cuseq.data.mask_boundary_labels(labels, local),
        lambda: cuseq.pack(local, labels),
        lambda: cuseq.unpack(local, labels),
        lambda: cuseq.ops.segment_sum(labels.float(), local),
        lambda: cuseq.ops.segment_mean(labels.float(), local),
        lambda: cuseq.ops.segment_max(labels.float(), local),
        lambda: cuseq.ops.segment_last(labels.float(), local),
        lambda: zigzag(local, 2),
        lambda: cp_partition(local, zigzag(packed, 2), 0),
        lambda: cp_join(local, zigzag(packed, 2), labels.view(2, 4)),
        lambda: next(
            iter(cuseq.data.split_by_tokens({"packed": local, "labels": labels[None]}, 8))
        ),
    ):
        with pytest.raises(ValueError, match="whole row"):
            call()


def test_a_plan_of_lengths_is_that_of_their_layout(device):
    packed = PackedLayout.from_lengths([8, 0, 4], 16, device=device)
    plan, of_lengths = zigzag(packed, 2), cp_plan([8, 0, 4], 2, total_tokens=16, policy="zigzag")
    rows = torch.arange(16, device=device)
    for rank in range(2):
        assert plan.tokens_of(rank).tolist() == of_lengths.tokens_of(rank).tolist()
        (_, own), (_, same) = (cp_partition(packed, one, rank, rows) for one in (plan, of_lengths))
        assert torch.equal(own, same)
    sent = pickle.loads(pickle.dumps(plan))
    assert (sent.total_tokens, sent.cp_size, sent.policy) == (16, 2, "zigzag")
    assert sent.tokens_of(1).tolist() == plan.tokens_of(1).tolist()


def test_a_plan_of_another_row_is_refused():
    packed = PackedLayout.from_lengths([8, 4])
    for lengths, message in (([4, 8], r"segments \[8, 4\], got one for \[4, 8\]"), ([8], "12.*8")):
        plan = cp_plan(lengths, 2, policy="zigzag")
        for call in (
            lambda plan=plan: cp_partition(packed, plan, 0),
            lambda plan=plan: cp_join(packed, plan, torch.zeros(2, 6)),
        ):
            with pytest.raises(ValueError, match=f"plan must be made for .*{message}"):
                call()
    with pytest.raises(TypeError, match="plan must be what .*cp_plan returns, got int"):
        cp_partition(packed, 2, 0)
    with pytest.raises(ValueError, match="total_tokens must be the layout's 12 or None, got 16"):
        cp_plan(packed, 2, total_tokens=16, policy="zigzag")


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_attention_balance_counts_query_key_pairs(cp_size):
    lengths = [5, 0, 30, 17]
    packed = PackedLayout.from_lengths(lengths, segment_multiple=2 * cp_size)
    plan = zigzag(packed, cp_size)
    pairs = []
    for rank in range(cp_size):
        local, positions = cp_partition(packed, plan, rank, packed.position_ids)
        pairs.append(int((positions + 1)[~local.moe_padding_mask].sum()))
    assert plan.attention_balance == pytest.approx(max(pairs) / (sum(pairs) / cp_size))
    assert zigzag(PackedLayout.from_lengths([], 4 * cp_size), cp_size).attention_balance == 1.0


@pytest.mark.parametrize(
    "config,on,equalized,counted",
    [
        ("cpu:gloo,cuda:gloo", "cuda", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu", "cuda"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu", "cuda"),  # labels that are not moved yet
        ("cpu:mpi,cuda:mpi", "cuda", "cpu", "cpu"),
        ("cuda:nccl", "cpu", "cuda", "cuda"),
        ("xpu:xccl", "cpu", "xpu", "xpu"),
        ("npu:hccl,xpu:xccl", "xpu", "xpu", "npu"),
    ],
)
def test_numbers_of_all_ranks_go_by_a_device_of_the_group(
    config, on, equalized, counted, monkeypatch
):
    """Devices of any vendor; the CPU stands in for a missing one."""
    asked = []

    def tensor(value, device):
        asked.append(device)
        return torch.full((), value)

    def zeros(shape, dtype, device):
        asked.append(str(device))
        return torch.full(shape, 0, dtype=dtype)

    packed = PackedLayout.from_lengths([4])
    batches = [{"shift_labels": torch.ones(1, 4)}]
    monkeypatch.setattr(PackedLayout, "device", property(lambda self: torch.device(on)))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, *_, **__: total)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **_: self)
    assert cuseq.distributed.equalize_tokens(packed) is packed
    for own in ([], batches):  # a rank without batches must choose the device of the others
        cuseq.distributed.ContextParallel.num_items(own)
    assert asked == [equalized, counted, counted]


def differing(rank: int) -> list[str]:
    cuseq.distributed.check_same_on_ranks({"seed": 0, "rates": [3e-4]})
    said = []
    for facts in ({"seed": 0, "rate": rank / 2}, dict([("seed", 0), ("cp", 2)][: 2 - rank])):
        with pytest.raises(ValueError) as raised:
            cuseq.distributed.check_same_on_ranks(facts)
        said.append(str(raised.value))
    own = [dist.new_group([r]) for r in range(2)][rank]
    cuseq.distributed.check_same_on_ranks({"rank": rank}, own)
    return said


@pytest.mark.slow
def test_facts_that_differ_are_named_on_all_ranks():
    said = [
        "rate must be the same on all ranks of group, got 0.0 on rank 0 and 0.5 on rank 1",
        "cp must be the same on all ranks of group, got 2 on rank 0 and nothing on rank 1",
    ]
    assert distributed.run(differing) == [said, said]


def test_facts_are_compared_in_a_group():
    with pytest.raises(TypeError, match="group must be a ProcessGroup or None, got 'dp'"):
        cuseq.distributed.check_same_on_ranks({"seed": 0}, "dp")
    with pytest.raises(TypeError, match="facts must be a mapping of names to values, got 0"):
        cuseq.distributed.check_same_on_ranks(0)
    cuseq.distributed.check_same_on_ranks({"seed": 0})  # one process


def test_a_layout_to_equalize_is_one():
    with pytest.raises(TypeError, match="packed must be a PackedLayout, got list"):
        cuseq.distributed.equalize_tokens([1, 2])
