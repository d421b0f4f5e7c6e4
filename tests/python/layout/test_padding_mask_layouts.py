"""Test layouts from padding masks of every form: real tokens, segments and totals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_no_sync import trace, waits
from torch import Tensor

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

Rows = list[list[int]]
Multiple = int | Sequence[int]

CPU = torch.device("cpu")


class Expected(NamedTuple):
    """The meaning of a mask: its sequences and its tokens."""

    lengths: list[int]
    segments: list[int]
    slots: list[tuple[int, int] | None]  # row and column of each token in memory; None on padding
    position_ids: list[int]
    seq_ids: list[int]

    @property
    def total_tokens(self) -> int:
        return len(self.slots)


def expect(
    rows: Rows, segment: Multiple = 1, total: Multiple = 1, total_tokens: int | None = None
) -> Expected:
    segment, total = ([m] if isinstance(m, int) else list(m) for m in (segment, total))
    slots: list[tuple[int, int] | None] = []
    lengths, segments = [], []
    for row, line in enumerate(rows):
        begin = len(slots)
        slots += [(row, column) for column, real in enumerate(line) if real]
        lengths.append(len(slots) - begin)
        while any((len(slots) - begin) % multiple for multiple in segment):
            slots.append(None)
        segments.append(len(slots) - begin)
    while any(len(slots) % m for m in (*segment, *total)) or len(slots) < (total_tokens or 0):
        slots.append(None)
    positions = reference.position_ids(segments, len(slots))
    return Expected(lengths, segments, slots, positions, reference.seq_ids(segments, len(slots)))


def check(
    layout: PackedLayout, expected: Expected, device: torch.device, max_seqs: int | None = None
) -> None:
    total, batch = expected.total_tokens, len(expected.lengths)
    max_seqs = max(total, batch) if max_seqs is None else max_seqs
    tensors = {
        "lengths": expected.lengths,
        "cu_seqlens": reference.cu_seqlens(expected.lengths),
        "cu_seqlens_static": reference.cu_seqlens_static(expected.lengths, max_seqs),
        "cu_seqlens_padded": reference.cu_seqlens(expected.segments),
        "position_ids": expected.position_ids,
        "seq_ids": expected.seq_ids,
    }
    for name, values in tensors.items():
        tensor = getattr(layout, name)
        assert (name, tensor.tolist()) == (name, values)
        assert (name, tensor.dtype, tensor.device) == (name, torch.int32, device)
    numbers = {
        "num_sequences": batch,
        "max_seqlen": reference.max_seqlen(expected.lengths),
        "max_seqlen_padded": reference.max_seqlen(expected.segments),
        "total_tokens": total,
        "num_real_tokens": sum(expected.lengths),
    }
    for name, value in numbers.items():
        assert (name, getattr(layout, name)) == (name, value)
        assert type(getattr(layout, name)) is int
    assert type(layout.pads_between_sequences) is bool
    if expected.lengths != expected.segments:
        assert layout.pads_between_sequences
    assert layout.device == device
    meta = [batch, numbers["max_seqlen"], total, sum(expected.lengths), 0]
    assert layout.host_meta.tolist() == [*meta, math.gcd(*expected.lengths)]


# --------------------------------------------------------------------- masks, as rows of 0 and 1

RIGHT = [[1, 1, 0, 0], [1, 1, 1, 0]]
LEFT = [[0, 0, 1, 1], [0, 1, 1, 1]]
HOLES = [[0, 1, 0, 1], [1, 0, 1, 1]]
ZERO_ROWS = [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
FULL = [[1, 1, 1], [1, 1, 1]]
SHAPES = {
    "right": RIGHT,
    "left": LEFT,
    "holes": HOLES,
    "rows of padding": ZERO_ROWS,
    "full": FULL,
    "no real token": [[0, 0], [0, 0], [0, 0]],
    "one token each": [[0, 0, 1], [1, 0, 0]],
    "a single slot": [[1]],
}
EMPTY = {"no row": (0, 5), "no column": (3, 0), "neither": (0, 0)}


def tensor_of(rows: Rows, shape: tuple[int, int] | None = None) -> Tensor:
    """Return a bool tensor, `[batch, seqlen]`."""
    shape = (len(rows), len(rows[0])) if shape is None else shape
    return torch.tensor(rows, dtype=torch.bool).view(shape)


@st.composite
def masks(draw, max_rows: int = 5, max_columns: int = 9) -> tuple[Rows, tuple[int, int]]:
    """Draw rows of 0 and 1, padded right, left, on both sides or anywhere, and their shape."""
    columns = draw(st.integers(0, max_columns))
    lines = []
    for _ in range(draw(st.integers(0, max_rows))):
        length = draw(st.integers(0, columns))
        before = draw(st.sampled_from([0, columns - length, (columns - length) // 2]))
        line = [0] * before + [1] * length + [0] * (columns - length - before)
        lines.append(draw(st.one_of(st.just(line), st.permutations(line))))
    return lines, (len(lines), columns)


MULTIPLES = st.sampled_from([1, 1, 2, 4, 16, (2, 3), [4, 6], (1,), ()])


# --------------------------------------------------------------------------------- two dimensions

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda m: m,
    "transposed": lambda m: m.t().contiguous().t(),
    "every other column": lambda m: torch.stack((m, 1 - m), 2).flatten(1)[:, ::2],
    "every other row": lambda m: torch.stack((1 - m, m), 1).flatten(0, 1)[1::2],
    "inside a larger one": lambda m: torch.nn.functional.pad(m, (3, 2, 1, 1), value=1)[1:-1, 3:-2],
}


def encode(real: Tensor, dtype: torch.dtype, strides: str, true_is_pad: bool) -> Tensor:
    marked = real.logical_not() if true_is_pad else real
    return STRIDES[strides](marked.to(torch.uint8)).to(dtype, memory_format=torch.preserve_format)


@pytest.mark.kernels
def test_two_sequences(device):
    """Lengths [2, 3], equal for every side of the padding."""
    for rows in (RIGHT, LEFT, HOLES):
        mask = torch.tensor(rows, device=device)
        layout = PackedLayout.from_padding_mask(mask)
        assert layout.lengths.tolist() == [2, 3]
        assert layout.cu_seqlens.tolist() == layout.cu_seqlens_padded.tolist() == [0, 2, 5]
        assert (layout.total_tokens, layout.pads_between_sequences) == (5, False)
        layout = PackedLayout.from_padding_mask(mask, segment_multiple=4, total_multiple=3)
        assert layout.cu_seqlens.tolist() == [0, 2, 5]
        assert layout.cu_seqlens_padded.tolist() == [0, 4, 8]
        assert layout.position_ids.tolist() == [0, 1, 2, 3] * 3
        assert layout.seq_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert (layout.max_seqlen, layout.max_seqlen_padded) == (3, 4)
        assert (layout.total_tokens, layout.num_real_tokens) == (12, 5)
        assert layout.pads_between_sequences is True


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("true_is_pad", [False, True], ids=["true is real", "true is pad"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_mask(dtype, strides, true_is_pad, device):
    for rows in SHAPES.values():
        mask = encode(tensor_of(rows).to(device), dtype, strides, true_is_pad)
        assert mask.dtype == dtype and mask.shape == tensor_of(rows).shape
        for segment, total in ((1, 1), (4, 6)):
            layout = PackedLayout.from_padding_mask(mask, segment, total, true_is_pad=true_is_pad)
            check(layout, expect(rows, segment, total), device)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("total_tokens", [None, 0, 16])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty_batches(shape, total_tokens, multiple, device):
    rows = [[] for _ in range(shape[0])]
    mask = torch.zeros(shape, dtype=torch.int64, device=device)
    layout = PackedLayout.from_padding_mask(mask, multiple, total_tokens=total_tokens)
    check(layout, expect(rows, multiple, total_tokens=total_tokens), device)
    mask = torch.zeros(shape[0], 1, shape[1], shape[1], device=device)
    layout = PackedLayout.from_padding_mask(mask, multiple, total_tokens=total_tokens)
    check(layout, expect(rows, multiple, total_tokens=total_tokens), device)


@pytest.mark.parametrize("value", [2, -1, 1 << 8, 1 << 31, 1 << 40, -(1 << 63)])
def test_any_bit_makes_a_token_real(value, device):
    mask = torch.tensor(HOLES, device=device) * value
    check(PackedLayout.from_padding_mask(mask), expect(HOLES), device)
    turned = [[1 - real for real in line] for line in HOLES]
    check(PackedLayout.from_padding_mask(mask, true_is_pad=True), expect(turned), device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64], ids=str)
def test_a_mask_that_numbers_documents_is_refused(dtype, device):
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 2, 2]], dtype=dtype, device=device)
    for strided in (mask, mask.t().contiguous().t(), mask.expand(1, 2, 5)[0]):
        with pytest.raises(ValueError, match=r"mask must have one value .* got \[1, 2\] in row 1"):
            PackedLayout.from_padding_mask(strided)
    with pytest.raises(ValueError, match="mask must have one value"):
        cuseq.run_packed(torch.nn.Embedding(9, 4), torch.ones_like(mask).long(), mask)


def test_expanded_masks(device):
    column = torch.tensor([[1], [0]], device=device).expand(2, 3)
    check(PackedLayout.from_padding_mask(column), expect([[1] * 3, [0] * 3]), device)
    row = torch.tensor([0, 1, 1], device=device).expand(4, 3)
    check(PackedLayout.from_padding_mask(row, 4), expect([[0, 1, 1]] * 4, 4), device)


@given(
    drawn=masks(),
    segment=MULTIPLES,
    total=MULTIPLES,
    extra=st.sampled_from([None, 0, 1, 3]),
    spare=st.sampled_from([None, 0, 4]),
    dtype=st.sampled_from(INTEGERS),
    strides=st.sampled_from([*STRIDES]),
    true_is_pad=st.booleans(),
)
def test_any_mask(drawn, segment, total, extra, spare, dtype, strides, true_is_pad, device):
    rows, shape = drawn
    expected = expect(rows, segment, total)
    total_tokens = None
    if extra is not None:
        given_multiples = [[m] if isinstance(m, int) else m for m in (segment, total)]
        common = math.lcm(*given_multiples[0], *given_multiples[1])
        total_tokens = expected.total_tokens + extra * common
        expected = expect(rows, segment, total, total_tokens)
    max_seqs = None if spare is None else len(rows) + spare
    mask = encode(tensor_of(rows, shape).to(device), dtype, strides, true_is_pad)
    options = dict(true_is_pad=true_is_pad, total_tokens=total_tokens, max_seqs=max_seqs)
    layout = PackedLayout.from_padding_mask(mask, segment, total, **options)
    check(layout, expected, device, max_seqs)
    moved = PackedLayout.from_padding_mask(mask.cpu(), segment, total, **options, device=device)
    check(moved, expected, device, max_seqs)


@pytest.mark.kernels
@pytest.mark.parametrize("columns", [511, 512, 513, 1025])
def test_rows_longer_than_a_block_of_threads(columns, device):
    generator = torch.Generator().manual_seed(columns)
    real = torch.rand(5, columns, generator=generator) < torch.tensor(
        [[0.0], [1], [0.5], [0.9], [0.1]]
    )
    layout = PackedLayout.from_padding_mask(real.to(device), 16, 32)
    check(layout, expect(real.long().tolist(), 16, 32), device)


@pytest.mark.kernels
def test_more_rows_than_one_scan_takes(device):
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(9000, 3, generator=generator) < 0.5
    layout = PackedLayout.from_padding_mask(real.to(device), (2, 3), 8)
    check(layout, expect(real.long().tolist(), (2, 3), 8), device)


# -------------------------------------------------------------------------------- four dimensions


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


VISIBLE: dict[str, Callable[[Tensor], Tensor]] = {
    # transformers: padding is hidden only as a key.
    "causal keys": lambda real: causal(real.shape[1]) & real[:, None],
    "causal pairs": lambda real: causal(real.shape[1]) & real[:, None] & real[:, :, None],
    "bidirectional": lambda real: real[:, None] & real[:, :, None],
    "bidirectional keys": lambda real: real[:, None].expand(-1, real.shape[1], -1),
    "window": lambda real: causal(real.shape[1]).triu(-1) & real[:, None],
    "diagonal": lambda real: torch.eye(real.shape[1]).bool() & real[:, None],
}


def four(real: Tensor, visible: str = "causal keys") -> Tensor:
    """Return bool `[batch, 1, seqlen, seqlen]`, True is visible."""
    return VISIBLE[visible](real).unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype, hidden: float, shown: float = 0.0) -> Tensor:
    return torch.full_like(seen, hidden, dtype=dtype).masked_fill_(seen, shown)


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HIDDEN: dict[str, Callable[[torch.dtype], float]] = {
    "-inf": lambda dtype: -math.inf,
    "finfo.min": lambda dtype: torch.finfo(dtype).min,
    "-10000": lambda dtype: -10000.0,
    "smallest": lambda dtype: -torch.finfo(dtype).smallest_normal,
}


@pytest.mark.kernels
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_diagonal_says_what_is_real(shape, visible, device):
    rows = SHAPES[shape]
    seen = four(tensor_of(rows), visible).to(device)
    expected = expect(rows, 4, 6)
    for dtype in INTEGERS:
        layout = PackedLayout.from_padding_mask(seen.to(dtype), 4, 6)
        check(layout, expected, device)
        turned = seen.logical_not().to(dtype)
        layout = PackedLayout.from_padding_mask(turned, 4, 6, true_is_pad=True)
        check(layout, expected, device)
    mask = additive(seen, torch.float32, -math.inf)
    check(PackedLayout.from_padding_mask(mask, 4, 6), expected, device)


@pytest.mark.parametrize("shown", [0.0, -0.0], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_additive_masks(dtype, hidden, shown, device):
    """`(1 - mask) * -10000` gives -0.0 where the mask is 1."""
    for rows in (RIGHT, LEFT, HOLES, ZERO_ROWS):
        mask = additive(four(tensor_of(rows)).to(device), dtype, HIDDEN[hidden](dtype), shown)
        check(PackedLayout.from_padding_mask(mask, 2), expect(rows, 2), device)
        check(
            PackedLayout.from_padding_mask(mask, total_tokens=12),
            expect(rows, total_tokens=12),
            device,
        )


def test_what_else_a_mask_seems_to_say_is_wrong():
    """Column 0, row sums, and lengths taken as prefixes all differ from the diagonal here."""
    for rows, visible in ((LEFT, "causal keys"), (HOLES, "causal pairs"), (LEFT, "window")):
        seen = four(tensor_of(rows), visible)[:, 0]
        lengths = expect(rows).lengths
        assert seen[:, :, 0].sum(1).tolist() != lengths
        assert visible != "window" or seen.sum(2).amax(1).tolist() != lengths
        real = seen.diagonal(dim1=1, dim2=2)
        assert not torch.equal(real, torch.arange(4) < torch.tensor(lengths).unsqueeze(1))
        assert PackedLayout.from_padding_mask(seen.unsqueeze(1)).lengths.tolist() == lengths


@pytest.mark.kernels
@pytest.mark.parametrize("others", ["visible", "hidden", "expanded"])
def test_the_first_of_several_heads_counts(others, device):
    seen = four(tensor_of(HOLES)).to(device)
    if others == "expanded":
        heads = seen.expand(-1, 3, -1, -1)
    else:
        rest = torch.full_like(seen, others == "visible").expand(-1, 2, -1, -1)
        heads = torch.cat((seen, rest), 1)
    for mask in (heads, heads.int(), additive(heads, torch.bfloat16, -math.inf)):
        check(PackedLayout.from_padding_mask(mask, 4), expect(HOLES, 4), device)


def test_strided_masks_of_four_dimensions(device):
    seen = four(tensor_of(HOLES), "bidirectional").to(device)
    wrong = seen.logical_not()
    views = {
        "keys beside a cache": torch.cat((seen, wrong), 3)[..., :4],
        "behind a cache": torch.cat((wrong, seen), 3)[..., 4:],
        "transposed": seen.mT.contiguous().mT,
        "every other": torch.stack((seen, wrong), 4).flatten(3)[..., ::2],
        "batch last": seen.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "aligned to 16": torch.nn.functional.pad(seen, (0, 12))[..., :4],
    }
    for name, view in views.items():
        assert torch.equal(view, seen), name
        check(PackedLayout.from_padding_mask(view, 2), expect(HOLES, 2), device)
        pad = view.logical_not()
        assert pad.shape == seen.shape
        check(PackedLayout.from_padding_mask(pad, 2, true_is_pad=True), expect(HOLES, 2), device)


@given(
    drawn=masks(4, 6),
    visible=st.sampled_from([*VISIBLE]),
    dtype=st.sampled_from([*INTEGERS, *FLOATS]),
    hidden=st.sampled_from([*HIDDEN]),
    heads=st.integers(1, 3),
    true_is_pad=st.booleans(),
    segment=MULTIPLES,
)
def test_any_mask_of_four_dimensions(
    drawn, visible, dtype, hidden, heads, true_is_pad, segment, device
):
    rows, shape = drawn
    seen = four(tensor_of(rows, shape), visible).expand(-1, heads, -1, -1)
    if dtype.is_floating_point:
        mask, true_is_pad = additive(seen, dtype, HIDDEN[hidden](dtype)), False
    else:
        mask = (seen.logical_not() if true_is_pad else seen).to(dtype)
    layout = PackedLayout.from_padding_mask(mask.to(device), segment, true_is_pad=true_is_pad)
    check(layout, expect(rows, segment), device)


@pytest.mark.parametrize("shape", ["right", "left", "holes", "rows of padding", "full"])
def test_masks_of_transformers(shape, device):
    masking = pytest.importorskip("transformers.masking_utils")
    rows = SHAPES[shape]
    real = tensor_of(rows).to(device)
    made = dict(batch_size=len(rows), q_length=len(rows[0]), kv_length=len(rows[0]))
    made |= dict(attention_mask=real, allow_is_causal_skip=False, device=device)
    check(PackedLayout.from_padding_mask(masking.sdpa_mask(**made)), expect(rows), device)
    for dtype in (torch.float32, torch.bfloat16):
        mask = masking.eager_mask(**made, dtype=dtype)
        check(PackedLayout.from_padding_mask(mask, 4), expect(rows, 4), device)


def test_a_mask_from_our_own_layout(device):
    """Tokens of a tail see themselves, so every token of such a mask is real."""
    layout = PackedLayout.from_lengths([2, 3], 8, device=device)
    for mask in (layout.dense_mask(), layout.dense_mask(torch.float32)):
        check(PackedLayout.from_padding_mask(mask), expect([[1] * 8]), device)


# ------------------------------------------------------------------------------- sizes of the row


@pytest.mark.parametrize(
    ("segment", "total", "padded", "tokens"),
    [
        (1, 1, [0, 2, 5], 5),
        (1, 4, [0, 2, 5], 8),
        (2, 1, [0, 2, 6], 6),
        (2, 3, [0, 2, 6], 6),
        (2, 4, [0, 2, 6], 8),
        (4, 6, [0, 4, 8], 12),
        (4, 2, [0, 4, 8], 8),
        ((2, 3), 1, [0, 6, 12], 12),
        ([4, 6], (8, 16), [0, 12, 24], 48),
        ((), (), [0, 2, 5], 5),
        ((2, 2, 2), (4, 4), [0, 2, 6], 8),
        (16, 32, [0, 16, 32], 32),
        (16, 3, [0, 16, 32], 48),
        (1000, 1, [0, 1000, 2000], 2000),
    ],
)
def test_multiples(segment, total, padded, tokens, device):
    """The row is a multiple of both the segments' multiple and its own."""
    layout = PackedLayout.from_padding_mask(torch.tensor(LEFT, device=device), segment, total)
    check(layout, expect(LEFT, segment, total), device)
    assert layout.cu_seqlens_padded.tolist() == padded
    assert layout.total_tokens == tokens
    assert layout.pads_between_sequences is (segment not in (1, ()))


def test_a_padded_row_of_one_batch_and_of_none(device):
    """A row that is full already does not grow; a sequence without tokens has no segment."""
    full = torch.ones(2, 8, dtype=torch.bool, device=device)
    layout = PackedLayout.from_padding_mask(full, 8, 16)
    assert (layout.total_tokens, layout.cu_seqlens_padded.tolist()) == (16, [0, 8, 16])
    layout = PackedLayout.from_padding_mask(torch.tensor(ZERO_ROWS, device=device), 8)
    assert (layout.total_tokens, layout.cu_seqlens_padded.tolist()) == (8, [0, 0, 8, 8, 8])
    assert layout.seq_ids.tolist() == [1] * 8


@pytest.mark.parametrize("total_tokens", [8, 12, 40])
def test_a_fixed_size(total_tokens, device):
    mask = torch.tensor(HOLES, device=device)
    layout = PackedLayout.from_padding_mask(mask, 2, 4, total_tokens=total_tokens)
    check(layout, expect(HOLES, 2, 4, total_tokens), device)
    assert layout.total_tokens == total_tokens
    assert layout.position_ids.tolist()[6:] == list(range(total_tokens - 6)), (
        "the tail is one segment"
    )


@pytest.mark.parametrize("max_seqs", [2, 3, 7, 100])
def test_a_fixed_number_of_offsets(max_seqs, device):
    mask = torch.tensor(HOLES, device=device)
    for segment in (1, 4):
        layout = PackedLayout.from_padding_mask(mask, segment, max_seqs=max_seqs)
        check(layout, expect(HOLES, segment), device, max_seqs)
        assert layout.cu_seqlens_static.tolist() == [0, 2] + [5] * (max_seqs - 1)


def test_room_for_more_rows_than_tokens(device):
    """Most of the rows have no tokens."""
    mask = torch.zeros(9, 4, dtype=torch.bool, device=device)
    mask[3, 1] = True
    check(PackedLayout.from_padding_mask(mask), expect(mask.long().tolist()), device, 9)


def test_integers_of_any_kind(device):
    numpy = pytest.importorskip("numpy")
    mask = torch.tensor(HOLES, device=device)
    layout = PackedLayout.from_padding_mask(mask, numpy.int64(4), (numpy.int32(2), 6))
    check(layout, expect(HOLES, 4, 6), device)


WRONG_SIZES = {
    "segment 0": (dict(segment_multiple=0), ValueError, "segment_multiple.*0"),
    "segment -1": (dict(segment_multiple=(2, -1)), ValueError, "segment_multiple.*-1"),
    "segment float": (dict(segment_multiple=2.0), TypeError, "segment_multiple|float"),
    "total 0": (dict(total_multiple=0), ValueError, "total_multiple.*0"),
    "total float": (dict(total_multiple=(2.0,)), TypeError, "total_multiple|float"),
    "not a multiple": (dict(total_multiple=8, total_tokens=12), ValueError, "total_tokens.* 8.*12"),
    "not of the segment": (
        dict(segment_multiple=4, total_tokens=10),
        ValueError,
        "total_tokens.* 4.*10",
    ),
    "of one alone": (
        dict(segment_multiple=4, total_multiple=6, total_tokens=8),
        ValueError,
        "total_tokens.* 12.*8",
    ),
    "negative": (dict(total_tokens=-1), ValueError, "-1"),
    "negative multiple": (dict(segment_multiple=2, total_tokens=-4), ValueError, "-4"),
    "past int32": (dict(total_tokens=2**31), ValueError, str(2**31)),
    "few offsets": (dict(max_seqs=1), ValueError, "max_seqs = 1.*2"),
    "few offsets of segments": (
        dict(max_seqs=1, segment_multiple=2),
        ValueError,
        "max_seqs = 1.*2",
    ),
}


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_wrong_sizes(name, device):
    options, error, message = WRONG_SIZES[name]
    with pytest.raises(error, match=message) as raised:
        PackedLayout.from_padding_mask(torch.tensor(HOLES, device=device), **options)
    assert "frame #" not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(total_tokens=4),
        dict(total_tokens=0),
        dict(total_tokens=0, segment_multiple=4),
        dict(total_tokens=4, segment_multiple=4),  # the sequences fit, but their segments do not
        dict(total_tokens=5, segment_multiple=5),
        dict(total_tokens=6, segment_multiple=3, max_seqs=2),
    ],
    ids=str,
)
def test_what_does_not_fit(options, device):
    """The error is raised at once on the host, and at the first wait if lengths are on a GPU."""
    rows = [[1, 1, 1, 1, 0], [0, 1, 0, 0, 0]]
    options = dict(segment_multiple=1) | options
    mask = torch.tensor(rows, device=device)
    with pytest.raises(ValueError, match=f"{options['total_tokens']}"):
        if device.type == "cpu":
            PackedLayout.from_padding_mask(mask, **options)
        else:
            PackedLayout.from_padding_mask(mask, **options).wait()
    fitting = PackedLayout.from_padding_mask(mask, options["segment_multiple"], total_tokens=60)
    check(fitting, expect(rows, options["segment_multiple"], total_tokens=60), device)


@pytest.mark.parametrize("value", ["max_seqlen", "num_real_tokens", "max_seqlen_padded"])
def test_segments_that_do_not_fit_are_said_by_every_host_value(value, cuda):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], device=cuda)
    layout = PackedLayout.from_padding_mask(mask, 4, total_tokens=4)
    with pytest.raises(ValueError, match="4"):
        getattr(layout, value)


def test_rows_past_int32():
    mask = torch.ones(2048, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=str(2**31)):
        PackedLayout.from_padding_mask(mask, 2**20)
    with pytest.raises(ValueError):
        PackedLayout.from_padding_mask(mask, (2**19, 3**7, 5**5))


# ------------------------------------------------------------------------------ what is no mask


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(2, 3), TypeError),
        (torch.ones(2, 3, dtype=torch.bfloat16), TypeError),
        (torch.ones(2, 1, 3, 3, dtype=torch.complex64), TypeError),
        (torch.ones(3, dtype=torch.bool), ValueError),
        (torch.tensor(True), ValueError),
        (torch.ones(2, 3, 3, dtype=torch.bool), ValueError),
        (torch.ones(1, 2, 1, 3, 3, dtype=torch.bool), ValueError),
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), ValueError),
        (torch.ones(2, 1, 1, 4, dtype=torch.bool), ValueError),
        (torch.ones(2, 0, 3, 3, dtype=torch.bool), ValueError),
    ],
    ids=lambda v: f"{list(v.shape)} {v.dtype}" if isinstance(v, Tensor) else None,
)
def test_masks_are_checked(mask, error, device):
    with pytest.raises(error, match="mask.*got") as raised:
        PackedLayout.from_padding_mask(mask.to(device))
    assert "frame #" not in str(raised.value)


def test_no_mask_names_what_to_give_instead():
    with pytest.raises((TypeError, ValueError), match="(?s)mask.*lengths|lengths.*mask"):
        PackedLayout.from_padding_mask(None)


def test_an_additive_mask_has_no_polarity():
    """With true_is_pad, an additive mask cannot be meant."""
    mask = additive(four(tensor_of(HOLES)), torch.float32, -math.inf)
    with pytest.raises((TypeError, ValueError), match="true_is_pad"):
        PackedLayout.from_padding_mask(mask, true_is_pad=True)


# ---------------------------------------------------------------------------- a layout like others

MADE = {
    "rows": dict(),
    "segments": dict(segment_multiple=4),
    "fixed": dict(segment_multiple=(2, 3), total_multiple=4, total_tokens=24, max_seqs=7),
}


def made(options: str, device=CPU) -> tuple[PackedLayout, Expected, int | None]:
    given = MADE[options]
    layout = PackedLayout.from_padding_mask(torch.tensor(HOLES, device=device), **given)
    sizes = {"segment": given.get("segment_multiple", 1), "total": given.get("total_multiple", 1)}
    return (
        layout,
        expect(HOLES, **sizes, total_tokens=given.get("total_tokens")),
        given.get("max_seqs"),
    )


@pytest.mark.parametrize("options", MADE)
def test_tensors_are_made_once(options, device):
    layout, *_ = made(options, device)
    for name in "lengths cu_seqlens cu_seqlens_padded position_ids seq_ids".split():
        assert getattr(layout, name) is getattr(layout, name), name


@pytest.mark.parametrize("options", MADE)
def test_moe_padding_mask_is_true_on_pads(options, device):
    layout, expected, _ = made(options, device)
    mask = layout.moe_padding_mask
    assert (mask.dtype, mask.device) == (torch.bool, device)
    assert mask.tolist() == [slot is None for slot in expected.slots]
    assert layout.moe_padding_mask is mask


@pytest.mark.parametrize("segment", [1, 4])
def test_it_is_a_snapshot_of_the_mask(segment, device):
    mask = torch.tensor(HOLES, device=device)
    layout = PackedLayout.from_padding_mask(mask, segment, total_tokens=12)
    tokens = torch.arange(1, 9, device=device).view(2, 4)
    mask.fill_(1)
    check(layout, expect(HOLES, segment, total_tokens=12), device)
    packed = cuseq.pack(layout, tokens).tolist()
    assert [token for token in packed if token] == [2, 4, 5, 7, 8]


@pytest.mark.parametrize("options", MADE)
def test_inference_mode_leaves_no_trace(options, device):
    with torch.inference_mode():
        layout, expected, max_seqs = made(options, device)
        moved = made(options)[0].to(device)
    for each in (layout, moved):
        hidden = torch.randn(2, 4, 3, device=device, requires_grad=True)
        cuseq.pack(each, hidden).sum().backward()
        assert torch.equal(hidden.grad[..., 0].bool().cpu(), tensor_of(HOLES))
        check(each, expected, device, max_seqs)


@pytest.mark.parametrize("options", MADE)
def test_to_takes_everything_along(options, device):
    on_host, expected, max_seqs = made(options)
    moved = on_host.to(device)
    assert on_host.to(device) is moved
    check(moved, expected, device, max_seqs)
    assert moved.to("cpu") is on_host
    there, *_ = made(options, device)
    check(there.to("cpu"), expected, CPU, max_seqs)
    tokens = torch.arange(1, 9).view(2, 4)
    for layout in (moved, there):
        assert torch.equal(cuseq.pack(layout, tokens.to(device)).cpu(), cuseq.pack(on_host, tokens))
    nowhere = on_host.to("meta")
    assert nowhere.cu_seqlens_padded.shape == on_host.cu_seqlens_padded.shape
    assert nowhere.pads_between_sequences == on_host.pads_between_sequences


@pytest.mark.parametrize("options", MADE)
def test_copies_and_pickles_take_everything_along(options, device):
    layout, expected, max_seqs = made(options, device)
    assert copy.deepcopy({"packed": layout})["packed"] is layout
    other = pickle.loads(pickle.dumps(layout))
    check(other, expected, device, max_seqs)
    assert other.pads_between_sequences == layout.pads_between_sequences
    tokens = torch.arange(1, 9, device=device).view(2, 4)
    assert torch.equal(cuseq.pack(other, tokens), cuseq.pack(layout, tokens))


@pytest.mark.parametrize("options", MADE)
def test_pinned_memory_takes_everything_along(options, cuda):
    layout, expected, max_seqs = made(options)
    pinned = layout.pin_memory()
    check(pinned, expected, CPU, max_seqs)
    moved = pinned.to(cuda)
    check(moved, expected, cuda, max_seqs)
    tokens = torch.arange(1, 9).view(2, 4)
    assert torch.equal(cuseq.pack(moved, tokens.to(cuda)).cpu(), cuseq.pack(layout, tokens))


def test_a_default_device_does_not_move_it():
    with torch.device("meta"):
        layout = PackedLayout.from_padding_mask(torch.tensor(HOLES, device="cpu"), 4)
        check(layout, expect(HOLES, 4), CPU)


def test_the_second_gpu(second_gpu):
    mask = torch.tensor(HOLES, device=second_gpu)
    check(PackedLayout.from_padding_mask(mask, 4), expect(HOLES, 4), second_gpu)
    check(
        PackedLayout.from_padding_mask(mask, total_tokens=8),
        expect(HOLES, total_tokens=8),
        second_gpu,
    )


# ---------------------------------------------------------------------------------- megatron-core


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    """Return Megatron's rule for padding, packed parameters, sequence ids and BERT's mask."""
    reason = "megatron-core is not installed: pip install --no-deps megatron-core==0.16.1"
    models = "megatron.core.models"
    parallel = pytest.importorskip(f"{models}.multimodal.context_parallel", reason=reason)
    mamba = pytest.importorskip("megatron.core.ssm.mamba_mixer", reason=reason)
    bert = pytest.importorskip(f"{models}.bert.bert_model", reason=reason)
    return SimpleNamespace(
        padding=parallel.get_padding,
        params=parallel.get_packed_seq_params,
        packed_seq_params=parallel.PackedSeqParams,
        seq_idx=mamba.MambaMixer._create_packed_seq_idx,
        bert_mask=bert.BertModel.bert_extended_attention_mask,
    )


# The multiples that a Megatron configuration requires.
PARALLEL = [
    (dict(cp_size=1, tp_size=1, has_sp=False), 1),
    (dict(cp_size=2, tp_size=4, has_sp=False), (2 * 2,)),
    (dict(cp_size=4, tp_size=2, has_sp=True), (2 * 4, 2 * 2 * 4)),
    (dict(cp_size=1, tp_size=6, has_sp=True), 6),
    (dict(cp_size=1, tp_size=1, has_sp=False, fp8_enabled=True), 16),
    (dict(cp_size=1, tp_size=1, has_sp=False, fp8_enabled=True, fp8_recipe="mxfp8"), 32),
]


@pytest.mark.parametrize(("parallel", "segment"), PARALLEL, ids=str)
def test_segments_are_as_long_as_megatron_pads(parallel, segment, megatron, device):
    lengths = [0, 1, 2, 5, 8, 16, 17, 31, 32, 33, 64]
    mask = torch.arange(64) >= 64 - torch.tensor(lengths).unsqueeze(1)
    layout = PackedLayout.from_padding_mask(mask.to(device), segment)
    padded = [length + megatron.padding(length, **parallel) for length in lengths]
    assert layout.cu_seqlens_padded.tolist() == reference.cu_seqlens(padded)


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_no_rule_is_dropped_that_megatron_drops(recipe, megatron):
    """Megatron's rules are an elif chain, in which context parallelism overrides FP8."""
    parallel = dict(cp_size=3, tp_size=1, has_sp=False, fp8_enabled=True, fp8_recipe=recipe)
    fp8 = 32 if recipe == "mxfp8" else 16
    layout = PackedLayout.from_padding_mask(torch.ones(1, 7, dtype=torch.bool), (2 * 3, fp8))
    assert layout.total_tokens % fp8 == layout.total_tokens % 6 == 0
    theirs = 7 + megatron.padding(7, **parallel)
    assert (theirs % fp8, theirs % 6) == (12, 0)


def test_offsets_of_megatron(megatron, device):
    """Megatron supports rows of one length with equal padding."""
    for length in (1, 5, 8):
        padding = megatron.padding(length, cp_size=2, tp_size=1, has_sp=False)
        tokens = torch.zeros(3, length + padding, device=device)
        params = megatron.params(tokens, 0, padding, cp_size=2, use_packed_sequence=True)
        mask = torch.arange(length + padding, device=device).expand_as(tokens) < length
        layout = PackedLayout.from_padding_mask(mask, 4)
        assert torch.equal(layout.cu_seqlens, params.cu_seqlens_q)
        assert torch.equal(layout.cu_seqlens_padded, params.cu_seqlens_q_padded)
        assert layout.max_seqlen_padded == params.max_seqlen_q


@given(drawn=masks(), segment=MULTIPLES, total=MULTIPLES)
def test_sequence_ids_of_megatron(drawn, segment, total, megatron):
    rows, shape = drawn
    layout = PackedLayout.from_padding_mask(tensor_of(rows, shape), segment, total)
    params = megatron.packed_seq_params(
        cu_seqlens_q=layout.cu_seqlens, cu_seqlens_q_padded=layout.cu_seqlens_padded
    )
    ids = megatron.seq_idx(None, params, layout.total_tokens)
    assert ids.tolist() == [layout.seq_ids.tolist()]


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_megatron(shape, megatron, device):
    """In Megatron's masks, True is padding."""
    rows = SHAPES[shape]
    real = tensor_of(rows).long().to(device)
    mask = megatron.bert_mask(SimpleNamespace(attn_mask_dimensions="b1ss"), real)
    assert mask.shape == (len(rows), 1, len(rows[0]), len(rows[0]))
    layout = PackedLayout.from_padding_mask(mask, 4, true_is_pad=True)
    check(layout, expect(rows, 4), device)


# ------------------------------------------------------------------------------------- on the GPU


def kernels(body) -> dict[str, int]:
    """Return the kernels that the device ran, without copies of lengths to the host."""
    _, work = trace(body)
    return {name: n for name, n in work.items() if not name.startswith("Memcpy")}


MASKS = {
    "bool": lambda real: real,
    "uint8": lambda real: real.to(torch.uint8),
    "int64": lambda real: real.long(),
    "strided": lambda real: real.t().contiguous().t(),
    "4-D": lambda real: four(real.cpu()).to(real.device),
    "4-D additive": lambda real: additive(
        four(real.cpu()).to(real.device), torch.bfloat16, -math.inf
    ),
}


@pytest.mark.parametrize("segment", [1, 16])
@pytest.mark.parametrize("kind", MASKS)
def test_a_device_mask_costs_three_kernels_and_no_wait(kind, segment, cuda):
    real = torch.rand(16, 300, device=cuda) < 0.5
    mask = MASKS[kind](real)

    def body():
        PackedLayout.from_padding_mask(mask, segment, total_tokens=16 * 304)

    assert not waits(body)
    launched = kernels(body)
    assert 1 <= sum(launched.values()) <= 3, launched


def test_what_is_read_of_a_device_mask_later(cuda):
    """ids and positions together cost one more kernel, and offsets none."""
    mask = torch.rand(16, 300, device=cuda) < 0.5

    def body():
        layout = PackedLayout.from_padding_mask(mask, 16, total_tokens=16 * 304)
        for name in ("lengths", "cu_seqlens", "cu_seqlens_padded"):
            getattr(layout, name)
        layout.position_ids, layout.seq_ids, layout.pads_between_sequences  # noqa: B018

    assert not waits(body)
    launched = kernels(body)
    assert sum(launched.values()) <= 4, launched


@pytest.mark.parametrize("shape", ["2-D", "4-D"])
@pytest.mark.parametrize("options", MADE)
def test_a_host_mask_never_waits(options, shape, cuda):
    real = tensor_of(HOLES)
    mask = real if shape == "2-D" else four(real)

    def body():
        layout = PackedLayout.from_padding_mask(mask, **MADE[options]).to(cuda)
        for name in ("lengths", "cu_seqlens", "cu_seqlens_padded", "position_ids", "seq_ids"):
            getattr(layout, name)
        layout.wait()
        for name in ("max_seqlen", "max_seqlen_padded", "num_real_tokens", "num_sequences"):
            getattr(layout, name)

    assert not waits(body)


def test_host_values_of_a_device_mask_wait_for_their_copies(cuda):
    mask = torch.tensor(HOLES, device=cuda)

    def body():
        layout = PackedLayout.from_padding_mask(mask, 4, total_tokens=16)
        assert (layout.max_seqlen, layout.max_seqlen_padded) == (3, 4)
        layout.wait()

    assert set(waits(body)) <= {"cudaEventSynchronize"}
    assert sum(waits(body).values()) <= 2


def test_a_mask_is_refused_in_a_capture(cuda):
    mask = torch.tensor(HOLES, device=cuda)
    PackedLayout.from_padding_mask(mask, total_tokens=8).wait()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="captur"):
            PackedLayout.from_padding_mask(mask, total_tokens=8)


@pytest.mark.parametrize("kind", ["nonzero", "zero", "additive"])
def test_the_ops_replay_with_another_mask(kind, cuda):
    total, segment = 24, 4

    def encoded(real: Tensor) -> Tensor:
        if kind == "additive":
            return additive(real, torch.bfloat16, -math.inf)
        return real if kind == "nonzero" else real.logical_not()

    mask = encoded(tensor_of(HOLES)).to(cuda)

    def body():
        lengths = ops.lengths_from_padding_mask(mask, kind)
        made = ops.segment_metadata(lengths, total, 6, segment)
        return [*made, *ops.mask_rows(mask, made[4], total, kind)]

    body()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = body()
    for rows in (HOLES, LEFT, RIGHT, ZERO_ROWS[:2], [[1] * 4] * 2, [[0] * 4] * 2):
        mask.copy_(encoded(tensor_of(rows)))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for actual, eager in zip(replayed, body(), strict=True):
            assert torch.equal(actual, eager)
        expected = expect(rows, segment, total_tokens=total)
        lengths, offsets, _, segments, padded, _, slots, tokens, *of_tokens = (
            t.tolist() for t in replayed
        )
        assert (lengths, segments) == (expected.lengths, expected.segments)
        assert offsets == reference.cu_seqlens_static(expected.lengths, 6)
        assert padded == reference.cu_seqlens_static(expected.segments, 6)
        flat = [-1 if slot is None else slot[0] * 4 + slot[1] for slot in expected.slots]
        assert slots == flat
        back = [flat.index(slot) if slot in flat else -1 for slot in range(8)]
        assert sum(tokens, []) == back
        is_pad = [slot is None for slot in expected.slots]
        assert of_tokens == [expected.position_ids, expected.seq_ids, is_pad]


@pytest.mark.parametrize("options", [{}, {"segment_multiple": 4}], ids=str)
def test_a_layout_that_arrives_in_inference_mode_trains(options):
    """DataLoader workers pickle the batches, which may be received in inference mode."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    sent = pickle.dumps(PackedLayout.from_padding_mask(mask, **options))
    with torch.inference_mode():
        packed = pickle.loads(sent)
    batch = torch.randn(2, 3, 4, requires_grad=True)
    cuseq.pack(packed, batch).sum().backward()
    assert torch.equal(batch.grad[..., 0], mask.float())
    packed = PackedLayout.from_lengths([4, 8])
    plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    part, _ = cuseq.distributed.cp_partition(packed, plan, 0, torch.zeros(12))
    with torch.inference_mode():
        part = pickle.loads(pickle.dumps(part))
    q = torch.randn(6, 2, 8, requires_grad=True)
    cuseq.apply_rope(q, q, *cuseq.rope_table(8, 8), packed=part)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int8], ids=str)
def test_a_4d_mask_of_any_integers(dtype):
    mask = torch.ones(1, 1, 3, 3).tril().to(dtype)
    mask[0, 0, 2, 2] = 0
    assert PackedLayout.from_padding_mask(mask).lengths.tolist() == [2]


@pytest.mark.parametrize(
    "options", [{}, {"segment_multiple": 4}, {"total_multiple": 4}, {"total_tokens": 8}], ids=str
)
def test_a_wrong_length_is_named_whatever_it_is_filled_up_to(options):
    with pytest.raises(ValueError, match=r"lengths must not be negative, got lengths\[1\] = -5"):
        PackedLayout.from_lengths([1, -5], **options)
    with pytest.raises(
        ValueError, match=r"lengths must sum to at most .*lengths\[0\] = 2147483648"
    ):
        PackedLayout.from_lengths([2**31], **options)


@pytest.mark.parametrize("multiple", [1.0, None, "4", np.array([2, 4])], ids=str)
def test_multiples_that_are_none_are_named(multiple):
    for name in ("segment_multiple", "total_multiple"):
        with pytest.raises(TypeError, match=f"{name} must be an int, got"):
            PackedLayout.from_lengths([3], **{name: multiple})


def test_a_polarity_of_none_is_refused():
    with pytest.raises(TypeError, match="true_is_pad must be True or False, got None"):
        PackedLayout.from_padding_mask(torch.ones(1, 2), true_is_pad=None)
