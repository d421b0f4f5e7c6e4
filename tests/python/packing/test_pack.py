"""Test pack and unpack: tensors of a padded batch as packed rows, and back."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_no_sync import trace, waits
from test_padding_mask_layouts import (
    EMPTY,
    FULL,
    HOLES,
    LEFT,
    MULTIPLES,
    RIGHT,
    SHAPES,
    ZERO_ROWS,
    Expected,
    additive,
    expect,
    four,
    masks,
    tensor_of,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import cuseq
from cuseq import PackedLayout

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
]
TRAILING = [(), (1,), (3,), (2, 5), (2, 3, 4), (64,), (0,)]


def values(shape, dtype: torch.dtype, device, seed: int = 0) -> Tensor:
    """Return values whose rows all differ, and differ from any fill, as far as dtype allows."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    if dtype == torch.uint8:
        return torch.randint(1, 200, shape, generator=generator).to(dtype).to(device)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 2**30, shape, generator=generator).to(dtype).to(device)
    base = dtype if dtype.itemsize >= 4 else torch.float32
    return torch.randn(shape, dtype=base, generator=generator).to(dtype).to(device)


def fill_of(dtype: torch.dtype) -> complex:
    if dtype in (torch.bool, torch.uint8):
        return {torch.bool: True, torch.uint8: 255}[dtype]
    return 0.5 if dtype.is_floating_point or dtype.is_complex else -100


def packed_by_loop(tensor: Tensor, expected: Expected, fill: complex) -> Tensor:
    shape = (expected.total_tokens, *tensor.shape[2:])
    out = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    for token, slot in enumerate(expected.slots):
        if slot is not None:
            out[token] = tensor[slot]
    return out


def unpacked_by_loop(
    row: Tensor, expected: Expected, shape: tuple[int, int], fill: complex
) -> Tensor:
    out = torch.full((*shape, *row.shape[1:]), fill, dtype=row.dtype, device=row.device)
    for token, slot in enumerate(expected.slots):
        if slot is not None:
            out[slot] = row[token]
    return out


def same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.device == expected.device
    assert actual.is_contiguous()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def check(layout, expected: Expected, shape, tensors, fills=None) -> None:
    """Check both directions, for all tensors together and for each alone."""
    fills = [fill_of(tensor.dtype) for tensor in tensors] if fills is None else fills
    rows = cuseq.pack(layout, *tensors, fill=fills)
    rows = rows if isinstance(rows, tuple) else (rows,)
    assert len(rows) == len(tensors)
    for row, tensor, fill in zip(rows, tensors, fills, strict=True):
        same(row, packed_by_loop(tensor, expected, fill))
    batches = cuseq.unpack(layout, *rows, fill=fills)
    batches = batches if isinstance(batches, tuple) else (batches,)
    for batch, row, fill in zip(batches, rows, fills, strict=True):
        same(batch, unpacked_by_loop(row, expected, shape, fill))


def layout_of(rows, segment=1, total=1, device="cpu", **options) -> tuple[PackedLayout, Expected]:
    mask = tensor_of(rows).to(device)
    layout = PackedLayout.from_padding_mask(mask, segment, total, **options)
    return layout, expect(rows, segment, total, options.get("total_tokens"))


# ------------------------------------------------------------------------------------------ values


@pytest.mark.kernels
def test_what_a_trainer_packs(device):
    """Lengths [2, 3], padded to segments of 4, for token ids, labels, loss mask and positions."""
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]], device=device)
    packed = PackedLayout.from_padding_mask(mask, segment_multiple=4)
    ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]], device=device)
    labels = torch.tensor([[-100, -100, -100, 6], [-100, -100, 8, 9]], device=device)
    loss = torch.tensor([[0.0, 0, 0, 1], [0, 0, 1, 1]], device=device)
    positions = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2]], dtype=torch.int32, device=device)
    hidden = ids[..., None] + torch.tensor([0.25, 0.5], device=device)

    rows = cuseq.pack(packed, ids, labels, loss, positions, hidden, fill=(1, -100, 0, 0, -1.0))
    assert type(rows) is tuple
    assert rows[0].tolist() == [5, 6, 1, 1, 7, 8, 9, 1]
    assert rows[1].tolist() == [-100, 6, -100, -100, -100, 8, 9, -100]
    assert rows[2].tolist() == [0, 1, 0, 0, 0, 1, 1, 0]
    assert rows[3].tolist() == [0, 1, 0, 0, 0, 1, 2, 0]
    assert rows[4][:, 1].tolist() == [5.5, 6.5, -1, -1, 7.5, 8.5, 9.5, -1]
    assert [row.dtype for row in rows] == [t.dtype for t in (ids, labels, loss, positions, hidden)]

    back = cuseq.unpack(packed, *rows, fill=[0, -100, 0, 0, 7])
    for actual, tensor in zip(back[:4], (ids, labels, loss, positions), strict=True):
        assert torch.equal(actual, tensor)
    assert back[4][..., 0].tolist() == [[7, 7, 5.25, 6.25], [7, 7.25, 8.25, 9.25]]


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_dtype_and_trailing_shape(shape, dtype, device):
    rows = SHAPES[shape]
    size = (len(rows), len(rows[0]))
    for segment, total in ((1, 1), (4, 6)):
        layout, expected = layout_of(rows, segment, total, device)
        tensors = [values((*size, *trail), dtype, device, i) for i, trail in enumerate(TRAILING)]
        check(layout, expected, size, tensors)
        check(layout, expected, size, tensors[2:3])


@given(
    drawn=masks(),
    segment=MULTIPLES,
    total=MULTIPLES,
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(TRAILING)), min_size=1, max_size=5
    ),
    on_host=st.booleans(),
)
def test_any_mask(drawn, segment, total, kinds, on_host, device):
    rows, shape = drawn
    mask = tensor_of(rows, shape)
    if on_host:
        layout = PackedLayout.from_padding_mask(mask, segment, total).to(device)
    else:
        layout = PackedLayout.from_padding_mask(mask.to(device), segment, total)
    tensors = [values((*shape, *trail), dtype, device, i) for i, (dtype, trail) in enumerate(kinds)]
    check(layout, expect(rows, segment, total), shape, tensors)


@given(drawn=masks(), segment=MULTIPLES, seed=st.integers(0, 99))
def test_each_undoes_the_other(drawn, segment, seed, device):
    rows, shape = drawn
    real = tensor_of(rows, shape).to(device)
    layout = PackedLayout.from_padding_mask(real, segment)
    batch = values((*shape, 3), torch.float32, device, seed)
    again = cuseq.unpack(layout, cuseq.pack(layout, batch, fill=7))
    assert torch.equal(again, batch * real[..., None])
    row = values((layout.total_tokens, 3), torch.float32, device, seed)
    again = cuseq.pack(layout, cuseq.unpack(layout, row, fill=7))
    is_real = cuseq.pack(layout, real)
    assert int(is_real.sum()) == layout.num_real_tokens
    assert torch.equal(again, row * is_real[:, None])


@given(drawn=masks(), seed=st.integers(0, 99))
def test_order_of_sequences_is_order_of_rows(drawn, seed, device):
    """Permuting the rows permutes the segments."""
    rows, shape = drawn
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    mask, batch = tensor_of(rows, shape).to(device), values(shape, torch.int64, device)

    def segments(mask: Tensor, batch: Tensor) -> list[list[int]]:
        layout = PackedLayout.from_padding_mask(mask, 4)
        begins = layout.cu_seqlens_padded.tolist()
        row = cuseq.pack(layout, batch).tolist()
        return [row[a:b] for a, b in zip(begins, begins[1:], strict=False)]

    turned = segments(mask[order.to(device)], batch[order.to(device)])
    before = segments(mask, batch)
    assert turned == [before[i] for i in order.tolist()]


def test_one_layout_from_masks_of_every_form(device):
    """Masks of two and of four dimensions give the same layout."""
    ids = values((2, 4), torch.int64, device)
    for rows in (RIGHT, LEFT, HOLES):
        real = tensor_of(rows).to(device)
        seen = four(real.cpu()).to(device)
        expected = packed_by_loop(ids, expect(rows, 4), -100)
        made = [PackedLayout.from_padding_mask(form, 4) for form in (real, real.int(), seen)]
        for form in (~real, ~seen, (~seen).long()):
            made.append(PackedLayout.from_padding_mask(form, 4, true_is_pad=True))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for hidden in (-math.inf, torch.finfo(dtype).min):
                made.append(PackedLayout.from_padding_mask(additive(seen, dtype, hidden), 4))
        for layout in made:
            same(cuseq.pack(layout, ids, fill=-100), expected)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty_batches(shape, multiple, device):
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for total_tokens in (None, 16):
        layout = PackedLayout.from_padding_mask(mask, multiple, total_tokens=total_tokens)
        expected = expect([[] for _ in range(shape[0])], multiple, total_tokens=total_tokens)
        hidden = values((*shape, 3), torch.float32, device).requires_grad_()
        check(layout, expected, shape, [values(shape, torch.int64, device), hidden.detach()])
        cuseq.pack(layout, hidden).sum().backward()
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.kernels
@pytest.mark.parametrize("columns", [511, 513, 1500])
def test_rows_longer_than_a_block_of_threads(columns, device):
    generator = torch.Generator().manual_seed(columns)
    real = torch.rand(3, columns, generator=generator) < torch.tensor([[0.5], [0], [0.9]])
    rows = real.long().tolist()
    layout, expected = layout_of(rows, 16, 1, device, total_tokens=5008)
    tensors = [values((3, columns, *trail), torch.int32, device) for trail in ((), (2,))]
    check(layout, expected, (3, columns), tensors)


@pytest.mark.kernels
def test_many_tensors(device):
    """More tensors than one launch takes."""
    layout, expected = layout_of(HOLES, 4, 1, device)
    kinds = [(dtype, trail) for trail in TRAILING for dtype in DTYPES][:37]
    tensors = [values((2, 4, *trail), dtype, device, i) for i, (dtype, trail) in enumerate(kinds)]
    check(layout, expected, (2, 4), tensors)


VIEWS = {
    "sequence first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "of a fused row": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "inside a longer batch": lambda t: torch.cat((t, t), 1)[:, t.shape[1] :],
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every other token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "heads first": lambda t: t.movedim(-2, 0).contiguous().movedim(0, -2),
    "odd address": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view_as(t),
}


@pytest.mark.kernels
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, device):
    layout, expected = layout_of(HOLES, 4, 1, device)
    for dtype in (torch.bfloat16, torch.float64):
        for trail in ((2, 3), (4, 16)):
            tensor = values((2, 4, *trail), dtype, device)
            strided = VIEWS[view](tensor)
            assert torch.equal(strided, tensor)
            check(layout, expected, (2, 4), [strided])
    ids = values((2, 4), torch.int64, device)
    for strided in (ids.t().contiguous().t(), ids[:1].expand(2, 4), ids[:, :1].expand(2, 4)):
        check(layout, expected, (2, 4), [strided])


def test_packed_rows_may_be_views_too(device):
    layout, expected = layout_of(HOLES, 4, 1, device)
    row = values((8, 12), torch.float32, device)
    for strided in (row[:, 4:8], row.repeat_interleave(2, 0)[::2], row[:1].expand(8, 12)):
        actual = cuseq.unpack(layout, strided, fill=-1)
        same(actual, unpacked_by_loop(strided, expected, (2, 4), -1))


def test_inputs_are_left_alone(device):
    layout, _ = layout_of(HOLES, 4, 1, device)
    ids = values((2, 4), torch.int64, device)
    kept = ids.clone()
    row = cuseq.pack(layout, ids, fill=-100)
    cuseq.unpack(layout, row.clone(), fill=-100).zero_()
    assert torch.equal(ids, kept)
    row.zero_()
    assert torch.equal(ids, kept)
    full, _ = layout_of(FULL, 1, 1, device)  # where nothing moves
    ids = values((2, 3), torch.int64, device)
    row = cuseq.pack(full, ids)
    assert row.data_ptr() != ids.data_ptr()
    assert row.tolist() == ids.flatten().tolist()


# ----------------------------------------------------------------------------- one, several, none


def test_one_in_one_out_and_several_in_a_tuple_out(device):
    layout, _ = layout_of(HOLES, 1, 1, device)
    ids = values((2, 4), torch.int64, device)
    row = cuseq.pack(layout, ids)
    assert isinstance(row, Tensor) and row.shape == (5,)
    assert isinstance(cuseq.unpack(layout, row), Tensor)
    for count in (2, 3):
        rows = cuseq.pack(layout, *[ids] * count)
        assert type(rows) is tuple and len(rows) == count
        assert len({r.data_ptr() for r in rows}) == count
        batches = cuseq.unpack(layout, *rows)
        assert type(batches) is tuple and len(batches) == count
    assert cuseq.pack(layout) == cuseq.unpack(layout) == ()
    assert cuseq.pack(layout, fill=[]) == ()


@pytest.mark.parametrize("function", [cuseq.pack, cuseq.unpack])
def test_no_layout_hands_everything_through(function, device):
    ids = values((2, 4), torch.int64, device)
    hidden = values((2, 4, 3), torch.float32, device).requires_grad_()
    assert function(None, ids) is ids
    assert function(None, ids, fill=-100) is ids
    result = function(None, ids, hidden, fill=(-100, 0))
    assert type(result) is tuple
    assert result[0] is ids and result[1] is hidden
    assert function(None) == ()
    # Any shape and strides are accepted.
    odd = hidden[..., ::2]
    assert function(None, odd) is odd


@pytest.mark.usefixtures("poisoned_memory")
def test_one_fill_or_one_each(device):
    layout, expected = layout_of(ZERO_ROWS, 4, 8, device)
    shape = (4, 4)
    ids = values(shape, torch.int64, device)
    loss = values(shape, torch.float32, device)
    is_real = tensor_of(ZERO_ROWS).to(device)
    for fills in ([-100, 0.5, True], (3, 3.0, False)):
        check(layout, expected, shape, [ids, loss, is_real], fills)
        check(layout, expected, shape, [ids, loss, is_real], tuple(fills))
    for fill in (0, 1):
        rows = cuseq.pack(layout, ids, loss, is_real, fill=fill)
        for row, tensor in zip(rows, (ids, loss, is_real), strict=True):
            same(row, packed_by_loop(tensor, expected, fill))
    rows = cuseq.pack(layout, ids, loss, is_real)
    for row, tensor in zip(rows, (ids, loss, is_real), strict=True):
        same(row, packed_by_loop(tensor, expected, 0))
    same(cuseq.pack(layout, ids, fill=[-100]), packed_by_loop(ids, expected, -100))
    row = cuseq.pack(layout, loss, fill=-math.inf)
    assert row.isneginf().tolist() == [slot is None for slot in expected.slots]
    batch = cuseq.unpack(layout, row, fill=math.nan)
    assert torch.equal(batch.isnan(), ~is_real)
    complex_row = cuseq.pack(layout, loss.to(torch.complex64), fill=1 - 2j)
    assert complex_row[-1].item() == 1 - 2j


# ----------------------------------------------------------------------------- layouts from lengths


@pytest.mark.parametrize(
    ("lengths", "total"),
    [([2, 3], 5), ([2, 3], 8), ([0, 4, 0, 1], 5), ([3], 3), ([0, 0], 0), ([0, 0], 4), ([], 0)],
)
def test_lengths_stand_for_padding_on_the_right(lengths, total, device):
    longest = max(lengths, default=0)
    rows = [[1] * length + [0] * (longest - length) for length in lengths]
    shape = (len(lengths), longest)
    expected = expect(rows, total_tokens=total)
    tensors = [values((*shape, *trail), torch.float32, device) for trail in ((), (5,))]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    layouts = [
        PackedLayout.from_lengths(lengths, total, max_seqs=9, device=device),
        PackedLayout.from_lengths(torch.tensor(lengths, dtype=torch.int64), total, max_seqs=9),
        PackedLayout.from_lengths(torch.tensor(lengths, device=device).int(), total, max_seqs=9),
        PackedLayout.from_cu_seqlens(offsets, total, max_seqs=9),
    ]
    for layout in layouts:
        check(layout.to(device), expected, shape, tensors)


def test_positions_stand_for_padding_on_the_right_too(device):
    """A capacity for more sequences than there are adds no rows."""
    ids = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]], device=device)
    layout = PackedLayout.from_position_ids(ids, max_seqs=8)
    rows = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]
    check(layout, expect(rows), (4, 3), [values((4, 3, 2), torch.float32, device)])


def test_a_collated_row_unpacks(device):
    examples = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    batch = cuseq.PackingCollator(total_tokens=8)(examples)
    layout, row = batch["packed"].to(device), batch["input_ids"].to(device)
    padded = cuseq.unpack(layout, row.view(-1), fill=-1)
    assert padded.tolist() == [[5, 6, -1], [7, 8, 9]]
    packed = cuseq.pack(layout, padded, fill=0)
    assert packed.tolist()[:5] == [5, 6, 7, 8, 9]


def test_a_full_mask_is_a_reshape(device):
    layout, _ = layout_of([[1] * 5] * 3, device=device)
    hidden = values((3, 5, 2), torch.float32, device)
    assert torch.equal(cuseq.pack(layout, hidden), hidden.flatten(0, 1))
    by_lengths = PackedLayout.from_lengths([5] * 3, device=device)
    assert torch.equal(cuseq.pack(by_lengths, hidden), hidden.flatten(0, 1))


# ----------------------------------------------------------------------------------- what is wrong


def test_tensors_are_checked(device):
    layout, _ = layout_of(HOLES, 4, 1, device)
    batch = torch.zeros(2, 4, 3, device=device)
    row = torch.zeros(8, 3, device=device)

    def refused(function, *tensors, message=r"tensors\[0\] must.*got", **options):
        with pytest.raises(ValueError, match=message) as raised:
            function(layout, *tensors, **options)
        assert "frame #" not in str(raised.value)

    refused(cuseq.pack, batch[:1])
    refused(cuseq.pack, batch[:, :3])
    refused(cuseq.pack, batch[0, :, 0])
    refused(cuseq.pack, batch[0, 0, 0])
    refused(cuseq.pack, row)
    refused(cuseq.pack, batch.repeat(1, 2, 1))
    refused(cuseq.pack, batch, batch[:1], message=r"tensors\[1\] must")
    refused(cuseq.pack, batch[..., :2].mT.contiguous().mT, message=r"contiguous.*last")
    refused(cuseq.pack, batch[..., ::2], message=r"contiguous.*last")
    refused(cuseq.unpack, row[:7])
    refused(cuseq.unpack, row.repeat(2, 1))
    refused(cuseq.unpack, batch)
    refused(cuseq.unpack, row[0, 0])
    refused(cuseq.unpack, row[:, ::2], message=r"contiguous.*last")


@pytest.mark.parametrize("shape", [(4, 2), (8, 1), (1, 8)])
def test_a_batch_turned_round_is_refused(shape, device):
    """An equal number of slots is not enough: Megatron's [seqlen, batch, hidden] is an error."""
    layout, _ = layout_of(HOLES, 4, 1, device)
    for trail in ((), (3,)):
        with pytest.raises(ValueError, match=r"(?s)\[2, 4\]|\(2, 4\)|batch"):
            cuseq.pack(layout, torch.zeros(*shape, *trail, device=device))


def test_lengths_want_a_batch_of_their_longest(device):
    layout = PackedLayout.from_lengths([2, 3], 6, device=device)
    for shape in ((2, 4), (3, 3), (6,)):
        with pytest.raises(ValueError, match=r"tensors\[0\] must"):
            cuseq.pack(layout, torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match=r"tensors\[0\] must"):
        cuseq.unpack(layout, torch.zeros(5, device=device))


@pytest.mark.parametrize("function", [cuseq.pack, cuseq.unpack])
def test_fills_are_checked(function, device):
    layout, _ = layout_of(HOLES, 4, 1, device)
    shape = (2, 4) if function is cuseq.pack else (8,)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)

    def refused(*tensors, fill, message):
        with pytest.raises(ValueError, match=message) as raised:
            function(layout, *tensors, fill=fill)
        assert "frame #" not in str(raised.value)

    refused(ids, fill=[], message=r"fill.*1.*\[\]")
    refused(ids, fill=(1, 2), message=r"fill.*1.*\(1, 2\)")
    refused(ids, ids, fill=[1], message=r"fill.*2.*\[1\]")
    refused(ids, ids, ids, fill=(1, 2), message=r"fill.*3.*\(1, 2\)")
    refused(ids, fill=0.5, message=r"fill\[0\].*torch.int64.*0.5")
    refused(ids, fill=math.nan, message=r"fill\[0\].*torch.int64")
    refused(ids, ids.bool(), fill=-100, message=r"fill\[1\].*torch.bool.*-100")
    refused(ids.byte(), fill=-100, message=r"fill\[0\].*torch.uint8.*-100")
    refused(ids.half(), fill=1e6, message=r"fill\[0\].*torch.float16")


@pytest.mark.parametrize("function", [cuseq.pack, cuseq.unpack])
def test_fills_that_stand_for_numbers(function, device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device=device)
    packed = PackedLayout.from_padding_mask(mask, segment_multiple=4)
    given = mask if function is cuseq.pack else torch.ones(packed.total_tokens, device=device)
    expected = function(packed, given, fill=7)
    for fill in (np.int64(7), torch.tensor(7), [np.int8(7)]):
        assert torch.equal(function(packed, given, fill=fill), expected)
    for fill, error in ((None, TypeError), ("7", TypeError), (2**70, ValueError)):
        with pytest.raises(error, match=f"fill must .*{fill}"):
            function(packed, given, fill=fill)
    for several, shown in ((torch.tensor([0, 7]), r"int64 \[2\] on cpu"), (np.array([0, 7]), "7")):
        with pytest.raises(TypeError, match=f"fill must be numbers, got .*{shown}"):
            function(packed, given, fill=several)


def test_what_is_no_tensor_is_named(device):
    packed = PackedLayout.from_lengths([2, 2], device=device)
    plan = cuseq.distributed.cp_plan(packed, 1, policy="zigzag")
    for call in (
        lambda: cuseq.pack(packed, [[1, 2], [3, 4]]),
        lambda: cuseq.unpack(packed, [1, 2, 3, 4]),
        lambda: cuseq.distributed.cp_join(packed, plan, [[1, 2, 3, 4]]),
        lambda: cuseq.distributed.cp_partition(packed, plan, 0, [1, 2, 3, 4]),
    ):
        with pytest.raises(TypeError, match=r"tensors\[0\] must be a tensor, got list"):
            call()


def test_one_device(cuda):
    layout, _ = layout_of(HOLES, 4)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tensors\[0\] must lie"):
        cuseq.pack(layout, ids.to(cuda))
    with pytest.raises(ValueError, match=r"tensors\[0\] must lie"):
        cuseq.pack(layout.to(cuda), ids)
    with pytest.raises(ValueError, match=r"tensors\[1\] must lie"):
        cuseq.pack(layout.to(cuda), ids.to(cuda), ids)


# --------------------------------------------------------------------------------------- gradients


def leaves(device, trails=((), (3,), (2, 2)), dtype=torch.float64, lead=(2, 4)) -> list[Tensor]:
    return [
        values((*lead, *trail), dtype, device, i).requires_grad_() for i, trail in enumerate(trails)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("segment", [1, 4])
@pytest.mark.parametrize("rows", [RIGHT, LEFT, HOLES], ids=["right", "left", "holes"])
def test_gradcheck(rows, segment, dtype, device):
    layout, expected = layout_of(rows, segment, 3, device)
    for function, lead in (
        (cuseq.pack, (2, 4)),
        (cuseq.unpack, (expected.total_tokens,)),
    ):
        tensors = leaves(device, ((), (2,)), dtype, lead)

        def call(*tensors, function=function):
            return function(layout, *tensors, fill=0.5)

        assert gradcheck(call, tensors)
        assert gradgradcheck(call, tensors)


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["right", "left", "holes", "rows of padding", "full"])
def test_the_one_is_the_others_backward(shape, dtype, device):
    """Compared bit for bit, for any fill; padding gets a gradient of zero."""
    rows = SHAPES[shape]
    size = (len(rows), len(rows[0]))
    layout, expected = layout_of(rows, 4, 6, device)
    batches = leaves(device, dtype=dtype, lead=size)
    outs = cuseq.pack(layout, *batches, fill=3)
    grads = [values(out.shape, dtype, device, 7 + i) for i, out in enumerate(outs)]
    actual = torch.autograd.grad(outs, batches, grads)
    for grad, result, wanted in zip(grads, actual, cuseq.unpack(layout, *grads), strict=True):
        same(result, wanted)
        same(result, unpacked_by_loop(grad, expected, size, 0))

    packed = leaves(device, dtype=dtype, lead=(expected.total_tokens,))
    outs = cuseq.unpack(layout, *packed, fill=3)
    grads = [values(out.shape, dtype, device, 7 + i) for i, out in enumerate(outs)]
    actual = torch.autograd.grad(outs, packed, grads)
    for grad, result, wanted in zip(grads, actual, cuseq.pack(layout, *grads), strict=True):
        same(result, wanted)
        same(result, packed_by_loop(grad, expected, 0))


def test_gradients_by_lengths(device):
    layout = PackedLayout.from_lengths([2, 0, 3], 7, device=device)
    (batch,) = leaves(device, ((3,),), lead=(3, 3))
    assert gradcheck(lambda t: cuseq.pack(layout, t, fill=0.5), batch)
    (row,) = leaves(device, ((3,),), lead=(7,))
    assert gradcheck(lambda t: cuseq.unpack(layout, t, fill=0.5), row)


def test_what_needs_no_gradient_has_none(device):
    layout, _ = layout_of(HOLES, 4, 1, device)
    trained, frozen, other = leaves(device)
    ids = values((2, 4), torch.int64, device)
    outs = cuseq.pack(layout, ids, trained, frozen.detach(), other, fill=(-100, 0, 0, 0))
    assert [out.requires_grad for out in outs] == [False, True, False, True]
    (grad,) = torch.autograd.grad(outs[1].sum(), trained)
    assert torch.equal(grad, tensor_of(HOLES).to(device).double())
    with torch.no_grad():
        assert not cuseq.pack(layout, trained).requires_grad


def test_a_model_between_the_two_learns_from_real_tokens_alone(device):
    """The loss of a token-wise model equals that of the padded batch, gradients included."""
    layout, _ = layout_of(HOLES, 4, 1, device)
    real = tensor_of(HOLES).to(device)
    hidden, weight = values((2, 4, 3), torch.float64, device), values((3, 3), torch.float64, device)

    def step(between) -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = between(*inputs).masked_fill(~real[..., None], 0).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    padded = step(lambda h, w: (h @ w).sin())
    packed = step(lambda h, w: cuseq.unpack(layout, (cuseq.pack(layout, h, fill=9) @ w).sin()))
    for actual, expected in zip(packed, padded, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_it_works_under_autocast(device):
    layout, expected = layout_of(HOLES, 4, 1, device)
    (hidden,) = leaves(device, ((3,),), torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        row = cuseq.pack(layout, hidden)
    same(row.detach(), packed_by_loop(hidden.detach(), expected, 0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, device):
    layout, _ = layout_of(HOLES, 4, 1, device)
    (hidden,) = leaves(device, ((3,),))

    def segment(hidden):
        return cuseq.unpack(layout, cuseq.pack(layout, hidden).sin())

    (expected,) = torch.autograd.grad(segment(hidden).sum(), hidden)
    checkpoint(segment, hidden, use_reentrant=reentrant).sum().backward()
    assert torch.equal(hidden.grad, expected)


# --------------------------------------------------------------------------------------- compilers


def test_compiled_equals_eager(device):
    """One graph for all packs, besides the first one, which torch makes with static sizes."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(layout, hidden, ids):
        row, labels = cuseq.pack(layout, hidden * 2, ids, fill=(0, -100))
        return cuseq.unpack(layout, row.sin()) * 3, labels

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for columns, batch in ((4, 2), (3, 3), (5, 4), (9, 7), (8, 5)):
        real = torch.rand(batch, columns, generator=torch.Generator().manual_seed(batch)) < 0.6
        layout = PackedLayout.from_padding_mask(real, 4).to(device)
        (hidden,) = leaves(device, ((3,),), lead=(batch, columns))
        ids = values((batch, columns), torch.int64, device)
        expected, actual = function(layout, hidden, ids), compiled(layout, hidden, ids)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        grads = [torch.autograd.grad(outs[0].sum(), hidden)[0] for outs in (actual, expected)]
        assert torch.equal(*grads)
    assert counter.frame_count <= 2


# -------------------------------------------------------------------------------------- on the GPU


def several(device, batch=16, columns=64) -> list[Tensor]:
    ids = values((batch, columns), torch.int64, device)
    hidden = values((batch, columns, 32), torch.bfloat16, device).requires_grad_()
    return [ids, ids.clone(), ids > 2**29, ids.int(), hidden]


def train(layout: PackedLayout, tensors: list[Tensor]) -> None:
    rows = cuseq.pack(layout, *tensors, fill=(0, -100, 0, 0, 0))
    batches = cuseq.unpack(layout, *rows, fill=(0, -100, 0, 0, 0))
    torch.autograd.grad(batches[-1].sum(), tensors[-1])


@pytest.mark.parametrize("segment", [1, 16])
@pytest.mark.parametrize("dimensions", [2, 4])
def test_a_host_mask_never_waits(dimensions, segment, cuda):
    real = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = real if dimensions == 2 else four(real)
    tensors = several(cuda)

    def body():
        layout = PackedLayout.from_padding_mask(mask, segment, 8).to(cuda)
        assert layout.max_seqlen > 0 and layout.num_real_tokens > 0
        train(layout, tensors)

    assert not waits(body)


def test_host_lengths_never_wait(cuda):
    hidden = values((3, 4, 8), torch.float32, cuda).requires_grad_()

    def body():
        layout = PackedLayout.from_lengths([2, 0, 4], 8).to(cuda)
        cuseq.unpack(layout, cuseq.pack(layout, hidden)).sum().backward()

    assert not waits(body)


@pytest.mark.parametrize("segment", [1, 16])
@pytest.mark.parametrize("dimensions", [2, 4])
def test_a_device_mask_with_a_fixed_size_never_waits(dimensions, segment, cuda):
    real = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = (real if dimensions == 2 else four(real)).to(cuda)
    tensors = several(cuda)

    def body():
        train(PackedLayout.from_padding_mask(mask, segment, total_tokens=16 * 64), tensors)

    assert not waits(body)


def test_eight_tensors_are_one_launch(cuda):
    mask = torch.rand(16, 64, device=cuda) < 0.5
    layout = PackedLayout.from_padding_mask(mask, total_tokens=1024)
    tensors = [values((16, 64), torch.int64, cuda, i) for i in range(8)]
    rows = cuseq.pack(layout, *tensors)
    for body in (lambda: cuseq.pack(layout, *tensors), lambda: cuseq.unpack(layout, *rows)):
        _, work = trace(body)
        assert sum(work.values()) == 1, work


def test_a_backward_is_one_launch(cuda):
    layout, _ = layout_of(HOLES, 4, 1, cuda)
    tensors = leaves(cuda)
    outs = cuseq.pack(layout, *tensors)
    grads = [torch.ones_like(out) for out in outs]
    _, work = trace(lambda: torch.autograd.grad(outs, tensors, grads, retain_graph=True))
    kernels = Counter({name: n for name, n in work.items() if "gather" in name})
    assert sum(kernels.values()) == 1, work


@pytest.mark.parametrize("from_mask", [True, False], ids=["mask", "lengths"])
def test_a_captured_graph_packs_what_is_there_at_its_replay(from_mask, cuda):
    rows = RIGHT if from_mask else [[1, 1, 0], [1, 1, 1]]
    shape = (2, len(rows[0]))
    layout, expected = layout_of(rows, 1, 8, cuda)
    if not from_mask:
        layout = PackedLayout.from_lengths([2, 3], 8, device=cuda)
    ids = values(shape, torch.int64, cuda)
    hidden = values((*shape, 5), torch.float32, cuda)

    def body():
        packed = cuseq.pack(layout, ids, hidden, fill=(-100, 0.5))
        return *packed, *cuseq.unpack(layout, *packed, fill=(-1, 2))

    body()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = body()
    for seed in range(3):
        ids.copy_(values(shape, torch.int64, cuda, seed))
        hidden.copy_(values((*shape, 5), torch.float32, cuda, seed))
        graph.replay()
        same(captured[0], packed_by_loop(ids, expected, -100))
        same(captured[1], packed_by_loop(hidden, expected, 0.5))
        same(captured[2], unpacked_by_loop(captured[0], expected, shape, -1))
        same(captured[3], unpacked_by_loop(captured[1], expected, shape, 2))


def test_a_captured_step_with_gradients(cuda):
    layout, expected = layout_of(HOLES, 4, 1, cuda)
    (hidden,) = leaves(cuda, ((3,),), torch.float32)

    def body():
        row = cuseq.pack(layout, hidden)
        return torch.autograd.grad(cuseq.unpack(layout, row.square()).sum(), hidden)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = body()
    real = tensor_of(HOLES).to(cuda)[..., None]
    for seed in range(3):
        with torch.no_grad():
            hidden.copy_(values((2, 4, 3), torch.float32, cuda, seed))
        graph.replay()
        assert torch.equal(captured, 2 * hidden.detach() * real)


@pytest.mark.parametrize("total_tokens", [0, 4, 8])
def test_segments_that_do_not_fit_write_inside_the_row(total_tokens, cuda):
    """The row is not overrun before a wait could report the error; then the error is reported."""
    mask = torch.ones(4, 8, dtype=torch.bool, device=cuda)
    layout = PackedLayout.from_padding_mask(mask, 4, total_tokens=total_tokens)
    ids = values((4, 8), torch.int64, cuda)
    row = cuseq.pack(layout, ids, fill=-100)
    assert row.shape == (total_tokens,)
    back = cuseq.unpack(layout, row, fill=-100)
    assert back.shape == (4, 8)
    assert all(bool(((b == i) | (b == -100)).all()) for b, i in zip(back, ids, strict=True))
    with pytest.raises(ValueError, match=str(total_tokens)):
        layout.wait()


def test_the_second_gpu(second_gpu):
    layout, expected = layout_of(HOLES, 4, 1, second_gpu)
    check(layout, expected, (2, 4), [values((2, 4, 40), torch.float32, second_gpu)])
    moved = layout_of(HOLES, 4)[0].to(second_gpu)
    check(moved, expected, (2, 4), [values((2, 4, 40), torch.float32, second_gpu)])


def test_another_stream(cuda):
    """A layout moved on one stream can be used on the stream that moved it."""
    side = torch.cuda.Stream()
    ids = values((2, 4), torch.int64, cuda)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layout = layout_of(HOLES, 4)[0].to(cuda)
        row = cuseq.pack(layout, ids, fill=-100)
    side.synchronize()
    same(row, packed_by_loop(ids, expect(HOLES, 4), -100))


@pytest.mark.slow
def test_past_2_to_the_31_elements(cuda):
    """The last token is beyond that element in the batch and in the row."""
    batch, columns, width = 16, 4100, 32776
    mask = torch.ones(batch, columns, dtype=torch.bool, device=cuda)
    mask[0, 7] = False
    layout = PackedLayout.from_padding_mask(mask, total_tokens=batch * columns)
    hidden = torch.empty(batch, columns, width, dtype=torch.uint8, device=cuda).random_(1, 256)
    assert hidden.numel() > 2**31
    row = cuseq.pack(layout, hidden)
    assert torch.equal(row[-2], hidden[-1, -1]) and not row[-1].any()
    assert torch.equal(row[7:-1].view(-1, width), hidden.view(-1, width)[8:])
    back = cuseq.unpack(layout, row)
    hidden[0, 7] = 0
    assert torch.equal(back, hidden)
