"""Rows dealt to the ranks of context parallelism, and a model trained over them."""

from __future__ import annotations

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import DIM, HEAD_DIM, HEADS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

import cuseq
from cuseq import PackedLayout
from cuseq.distributed import cp_join, cp_partition


def own_positions(length: int, cp_size: int, cp_rank: int, zigzag: bool) -> list[int]:
    """Which tokens of a segment a rank has, by the definition."""
    if not zigzag:
        part = length // cp_size
        return list(range(cp_rank * part, (cp_rank + 1) * part))
    part = length // (2 * cp_size)
    second = 2 * cp_size - 1 - cp_rank
    parts = (range(cp_rank * part, (cp_rank + 1) * part), range(second * part, (second + 1) * part))
    return [position for one in parts for position in one]


def check_deal(lengths, cp_size: int, zigzag: bool, multiple: int, device="cpu") -> None:
    parts = 2 * cp_size if zigzag else cp_size
    packed = PackedLayout.from_lengths(
        lengths, segment_multiple=parts, total_multiple=multiple, max_seqs=600, device=device
    )
    total = packed.total_tokens
    tokens = torch.arange(total, device=device)
    hidden = torch.randn(total, 3, device=device, dtype=torch.float64, requires_grad=True)
    segments = [-(-length // parts) * parts for length in lengths]
    segments.append(total - sum(segments))
    dealt = []
    for rank in range(cp_size):
        local, own, own_hidden = cp_partition(packed, cp_size, rank, tokens, hidden, zigzag=zigzag)
        begin, expected, positions, real = 0, [], [], []
        for length, segment in zip([*lengths, 0], segments, strict=True):
            inside = own_positions(segment, cp_size, rank, zigzag)
            expected += [begin + position for position in inside]
            positions += inside
            real += [position < length for position in inside]
            begin += segment
        assert own.tolist() == expected
        assert local.total_tokens == total // cp_size
        assert local.position_ids.tolist() == positions
        assert (~local.moe_padding_mask).tolist() == real
        assert local.num_real_tokens == sum(real)
        assert torch.equal(own_hidden, hidden[expected])
        dealt.append(own_hidden)
    joined = cp_join(packed, cp_size, torch.stack(dealt), zigzag=zigzag)
    assert torch.equal(joined, hidden)
    weight = torch.randn_like(joined)
    (grad,) = torch.autograd.grad(joined, hidden, weight)
    assert torch.equal(grad, weight)


@pytest.mark.kernels
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[8, 24], [3, 0, 17, 1], [1] * 9, [0], [500]], ids=str)
def test_deal(lengths, cp_size, zigzag, device):
    check_deal(lengths, cp_size, zigzag, multiple=5, device=device)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 6),
)
def test_any_deal(lengths, cp_size, zigzag, multiple):
    check_deal(lengths, cp_size, zigzag, multiple)


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
        cp_partition(packed, 2, 0)


def test_device_lengths_that_cannot_be_dealt(cuda):
    packed = PackedLayout.from_lengths(torch.tensor([8, 6], device=cuda), 16)
    with pytest.raises(ValueError, match="multiples of 4"):
        cp_partition(packed, 2, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank):
    with pytest.raises(ValueError, match=f"cp_rank must lie in .*got {rank}"):
        cp_partition(PackedLayout.from_lengths([8]), 2, rank)


@pytest.mark.parametrize("zigzag", [True, False])
def test_rope_of_a_part_is_that_of_the_whole(zigzag, device):
    packed = PackedLayout.from_lengths([7, 30], segment_multiple=4, device=device)
    cos, sin = cuseq.rope_table(64, 8, dtype=torch.float64, device=device)
    q = torch.randn(packed.total_tokens, 2, 8, dtype=torch.float64, device=device)
    whole, _ = cuseq.apply_rope(q, None, cos, sin, packed=packed)
    for rank in range(2):
        local, own, expected = cp_partition(packed, 2, rank, q, whole, zigzag=zigzag)
        turned, _ = cuseq.apply_rope(own, None, cos, sin, packed=local)
        torch.testing.assert_close(turned, expected)
        with pytest.raises(ValueError, match="cp_size must be 1"):
            cuseq.apply_rope(own, None, cos, sin, packed=local, cp_size=2)


LENGTHS = [13, 4, 30, 1]


class Block(nn.Module):
    """Attention of this rank's queries over everybody's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)

    def forward(self, hidden: Tensor, packed: PackedLayout, cp_size: int, rank: int) -> Tensor:
        local, tokens = cp_partition(
            packed, cp_size, rank, torch.arange(packed.total_tokens, device=hidden.device)
        )
        q, k, v = self.qkv(hidden).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        cos, sin = cuseq.rope_table(64, HEAD_DIM, dtype=torch.float64, device=hidden.device)
        q, k = cuseq.apply_rope(q.contiguous(), k.contiguous(), cos, sin, packed=local)
        if cp_size > 1:
            k, v = (
                cp_join(packed, cp_size, torch.stack(all_gather(rows.contiguous())))
                for rows in (k, v)
            )
        seen = packed.dense_mask()[0, 0, tokens.long()]
        out = scaled_dot_product_attention(*(rows.transpose(0, 1) for rows in (q, k, v)), seen)
        return hidden + out.transpose(0, 1).flatten(1)


def step(rank: int, cp_size: int, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the row, of which this rank has its part."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(2)).to(device)
    packed = PackedLayout.from_lengths(LENGTHS, segment_multiple=8, total_multiple=24).to(device)
    rows = distributed.make_rows(packed.total_tokens).to(device)
    local, hidden = cp_partition(packed, cp_size, rank, rows)
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
@pytest.mark.parametrize("cp_size", [2, 4])
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
    (local,) = cp_partition(PackedLayout.from_lengths([8, 8], device=device), 2, 1)
    longer = local.with_total_tokens(12)
    assert longer.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5, 0, 1, 2, 3]
    moved = longer.to("cpu")
    assert moved.position_ids.tolist() == longer.position_ids.tolist()


def test_a_part_on_the_host_moves_without_a_wait(cuda):
    (local,) = cp_partition(PackedLayout.from_lengths([8, 8]), 2, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = local.to(cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]


def test_what_needs_neighbours_refuses_a_part(device):
    (local,) = cp_partition(PackedLayout.from_lengths([8, 8], device=device), 2, 1)
    rows = torch.randn(8, 2, 8, device=device)
    labels = torch.arange(8, device=device)
    for call in (
        lambda: cuseq.varlen_attention(rows, rows, rows, local),
        local.dense_mask,
        local.block_mask,
        local.xformers_bias,
        local.flash_kwargs,
        lambda: local.seq_idx,
        lambda: cuseq.data.mask_boundary_labels(labels, local),
        lambda: cuseq.pack(local, labels),
        lambda: cuseq.unpack(local, labels),
        lambda: cp_partition(local, 2, 0),
        lambda: cp_join(local, 2, labels.view(2, 4)),
        lambda: next(
            iter(cuseq.data.split_by_tokens({"packed": local, "labels": labels[None]}, 8))
        ),
    ):
        with pytest.raises(ValueError, match="whole row"):
            call()


def test_how_to_deal_is_no_none():
    packed = PackedLayout.from_lengths([4])
    for call in (
        lambda: cp_partition(packed, 2, 0, zigzag=None),
        lambda: cuseq.distributed.cp_join(packed, 2, torch.zeros(2, 2), zigzag=None),
    ):
        with pytest.raises(TypeError, match="zigzag must be True or False, got None"):
            call()


def test_a_layout_to_equalize_is_one():
    with pytest.raises(TypeError, match="packed must be a PackedLayout, got list"):
        cuseq.distributed.equalize_tokens([1, 2])
