"""Test dense masks, and the ranges of keys that every mask is made from, against loops."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import WINDOWS, Pack, make_lengths, masked_attention, masked_packs
from test_attention import relative
from test_no_sync import trace, waits
from torch import Tensor
from torch.library import opcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Lengths [2, 3] in a row of 6 tokens: the example of the docstrings.
LITERAL = {
    "causal": ({}, [(0, 1), (0, 2), (2, 3), (2, 4), (2, 5), (5, 6)]),
    "bidirectional": ({"causal": False}, [(0, 2), (0, 2), (2, 5), (2, 5), (2, 5), (5, 6)]),
    "window": ({"window": 2}, [(0, 1), (0, 2), (2, 3), (2, 4), (3, 5), (5, 6)]),
    "window of one": ({"window": 1}, [(t, t + 1) for t in range(6)]),
    "both sides": (
        {"causal": False, "window": 2},
        [(0, 2), (0, 2), (2, 4), (2, 5), (3, 5), (5, 6)],
    ),
    "spans": ({"spans": [(0, 2), (2, 4)]}, [(0, 2), (0, 2), (2, 4), (2, 4), (2, 5), (5, 6)]),
    "span and window": (
        {"spans": [(2, 5)], "window": 1},
        [(0, 1), (1, 2), (2, 5), (2, 5), (2, 5), (5, 6)],
    ),
}
# Sequences of odd sizes at various places, all with a few spans in the longer ones.
PACKS = [
    pytest.param(Pack([2, 3], 6), id="tail"),
    pytest.param(Pack([0, 4, 0, 0, 2], 6, None, [(1, 4)]), id="zero-length sequences"),
    pytest.param(Pack([], 6), id="only a tail"),
    pytest.param(Pack([0, 0], 3), id="zero-length only"),
    pytest.param(Pack([], 0), id="no tokens"),
    pytest.param(Pack([0], 0), id="a sequence without tokens"),
    pytest.param(Pack([700], 700, None, [(3, 300), (301, 650)]), id="one giant"),
    pytest.param(Pack([1] * 2000, 2003), id="one-token sequences"),
    pytest.param(Pack([5, 5, 10, 4, 1, 0, 4], 30, 10, [(0, 3), (7, 9), (25, 28)]), id="rows"),
    pytest.param(Pack([16] * 4, 64, 16), id="one sequence a row"),
    pytest.param(Pack([16, 3], 64, 16, [(1, 9)]), id="rows of tail"),
    pytest.param(Pack([7, 3], 12, None, [(1, 4), (1, 4), (8, 10), (8, 10)]), id="repeated spans"),
]
OPTIONS = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 4},
    {"causal": False, "window": 1},
    {"causal": False, "window": 4},
]


@cache
def cached_reference(lengths, total_tokens, spans, causal, window) -> Tensor:
    return reference.mask(lengths, total_tokens, spans=spans, causal=causal, window=window)


def visible(pack: Pack, *, causal: bool = True, window: int | None = None) -> Tensor:
    lengths, total, _, spans = pack
    return cached_reference(tuple(lengths), total, tuple(map(tuple, spans)), causal, window)


def row_blocks(seen: Tensor, row_length: int | None) -> Tensor:
    """Split a flat mask into `[rows, row_length, row_length]`; between rows nothing is visible."""
    width = seen.shape[0] if row_length is None else row_length
    if row_length is None:
        return seen.unsqueeze(0)
    blocks = [seen[i : i + width, i : i + width] for i in range(0, seen.shape[0], width)] or [seen]
    assert sum(int(block.sum()) for block in blocks) == int(seen.sum())
    return torch.stack(blocks)


def dense_reference(
    seen: Tensor, row_length: int | None, dtype: torch.dtype, finite: bool
) -> Tensor:
    blocks = row_blocks(seen, row_length).unsqueeze(1)
    if dtype == torch.bool:
        return blocks
    hidden = torch.finfo(dtype).min if finite else float("-inf")
    return torch.full(blocks.shape, hidden, dtype=dtype).masked_fill(blocks, 0)


def reference_ranges(seen: Tensor) -> list[list[int]]:
    firsts, ends = [], []
    for row in seen.tolist():
        firsts.append(row.index(True))
        ends.append(len(row) - row[::-1].index(True))
        assert all(row[firsts[-1] : ends[-1]])
    return [firsts, ends]


def spans_tensor(spans, device) -> Tensor | None:
    """Return spans as the functions take them; None and an empty tensor mean the same."""
    return torch.tensor(spans, dtype=torch.int32, device=device).reshape(-1, 2)


def make_layout(pack: Pack, device) -> PackedLayout:
    max_seqs = max(pack.total_tokens, len(pack.lengths))
    return PackedLayout.from_lengths(
        list(pack.lengths), pack.total_tokens, max_seqs=max_seqs, device=device
    )


def check_dense(
    mask: Tensor,
    seen: Tensor,
    device,
    *,
    row_length: int | None = None,
    dtype: torch.dtype = torch.bool,
    finite: bool = False,
) -> None:
    expected = dense_reference(seen, row_length, dtype, finite)
    assert (mask.dtype, mask.device, mask.shape) == (dtype, device, expected.shape)
    if mask.numel() > 0:
        assert mask.stride(3) == 1
        assert [step % 16 for step in mask.stride()[:3]] == [0, 0, 0]
    assert torch.equal(mask.cpu(), expected)


def check_ranges(ranges: Tensor, seen: Tensor, device) -> None:
    assert (ranges.dtype, ranges.device) == (torch.int32, device)
    assert ranges.is_contiguous()
    assert ranges.tolist() == reference_ranges(seen)


@pytest.mark.kernels
@pytest.mark.parametrize("name", LITERAL)
def test_literal_case(name, device, poisoned_memory):
    options, ranges = LITERAL[name]
    cells = [[int(first <= key < end) for key in range(6)] for first, end in ranges]
    seen = torch.tensor(cells, dtype=torch.bool)
    assert torch.equal(reference.mask([2, 3], 6, **options), seen)

    lengths = torch.tensor([2, 3], device=device)
    on_device = dict(options)
    if "spans" in options:
        on_device["spans"] = spans_tensor(options["spans"], device)
    check_ranges(cuseq.ops.mask_ranges(lengths, 6, **on_device), seen, device)
    check_dense(cuseq.ops.dense_mask(lengths, 6, **on_device), seen, device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    for dtype in DTYPES:
        mask = packed.dense_mask(dtype, **options)
        check_dense(mask, seen, device, dtype=dtype)
    check_dense(packed.dense_mask(**on_device), seen, device)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("finite", [False, True])
def test_what_is_hidden(dtype, finite, device, poisoned_memory):
    lengths = torch.tensor([2, 3], device=device)
    mask = cuseq.ops.dense_mask(lengths, 6, dtype, finite=finite)
    assert mask[0, 0, 3, 3].item() == (1 if dtype == torch.bool else 0)
    hidden = mask[0, 0, 2, 1].item()
    if dtype == torch.bool:
        assert hidden is False
    else:
        assert hidden == (torch.finfo(dtype).min if finite else float("-inf"))
    check_dense(mask, reference.mask([2, 3], 6), device, dtype=dtype, finite=finite)


@pytest.mark.kernels
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_kind_of_pack(pack, options, device, poisoned_memory):
    seen = visible(pack, **options)
    packed, rows = make_layout(pack, device), {"row_length": pack.row_length}
    for dtype, finite in ((torch.bool, False), (torch.bfloat16, False), (torch.float32, True)):
        mask = packed.dense_mask(dtype, spans=pack.spans, finite=finite, **rows, **options)
        check_dense(mask, seen, device, dtype=dtype, finite=finite, **rows)
    lengths = torch.tensor(pack.lengths, dtype=torch.int64, device=device)
    spans = spans_tensor(pack.spans, device)
    check_ranges(
        cuseq.ops.mask_ranges(lengths, pack.total_tokens, spans=spans, **options), seen, device
    )
    mask = cuseq.ops.dense_mask(lengths, pack.total_tokens, spans=spans, **rows, **options)
    check_dense(mask, seen, device, **rows)


@given(
    pack=masked_packs(),
    causal=st.booleans(),
    window=WINDOWS,
    dtype=st.sampled_from(DTYPES),
    finite=st.booleans(),
    lengths_dtype=st.sampled_from(reference.DTYPES),
    strided=st.booleans(),
)
def test_any_pack(
    pack, causal, window, dtype, finite, lengths_dtype, strided, device, poisoned_memory
):
    total, rows = pack.total_tokens, {"row_length": pack.row_length}
    sees = {"causal": causal, "window": window}
    seen = visible(pack, **sees)
    expected = dict(dtype=dtype, finite=finite, **rows)

    lengths = make_lengths(pack.lengths, lengths_dtype, device, strided)
    spans = spans_tensor(pack.spans, device)
    check_ranges(cuseq.ops.mask_ranges(lengths, total, spans=spans, **sees), seen, device)
    mask = cuseq.ops.dense_mask(lengths, total, dtype, spans=spans, finite=finite, **rows, **sees)
    check_dense(mask, seen, device, **expected)

    offsets = cuseq.ops.cu_seqlens(lengths)
    check_ranges(ops.mask_ranges(offsets, total, True, causal, window, spans), seen, device)
    for op in (ops.dense_mask, ops.cached_dense_mask):
        mask = op(offsets, total, True, causal, window, spans, None, pack.row_length, dtype, finite)
        check_dense(mask, seen, device, **expected)

    packed = make_layout(pack, device)
    for given_spans in (spans, pack.spans[::-1]):  # a list may have any order
        mask = packed.dense_mask(dtype, spans=given_spans, finite=finite, **rows, **sees)
        check_dense(mask, seen, device, **expected)


def test_no_spans_in_three_ways(device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    for none in (None, [], spans_tensor([], device)):
        check_dense(packed.dense_mask(spans=none), reference.mask([2, 3], 6), device)


def test_spans_that_touch_stay_apart(device):
    """Two images directly after each other do not see each other."""
    packed = PackedLayout.from_lengths([9], 9, device=device)
    spans = [(1, 4), (4, 6), (6, 7)]
    seen = reference.mask([9], 9, spans=spans)
    assert not seen[1:4, 4:].any()
    check_dense(packed.dense_mask(spans=spans), seen, device)
    check_dense(packed.dense_mask(spans=spans_tensor(spans, device)), seen, device)


@pytest.mark.parametrize("size", [15, 16, 17, 127, 128, 129, 1001])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_in_memory_are_aligned(size, rows, device, poisoned_memory):
    lengths = [size - size // 3, size // 3] * rows
    packed = PackedLayout.from_lengths(lengths, rows * size, device=device)
    row_length = size if rows > 1 else None
    seen = visible(Pack(lengths, rows * size, row_length), window=size // 2)
    for dtype in DTYPES:
        mask = packed.dense_mask(dtype, window=size // 2, row_length=row_length)
        check_dense(mask, seen, device, dtype=dtype, row_length=row_length)
        assert mask.data_ptr() % 16 == 0


def test_a_row_is_a_batch_of_one(device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    assert torch.equal(packed.dense_mask(row_length=6), packed.dense_mask())
    assert packed.dense_mask(row_length=6).shape == (1, 1, 6, 6)


# Physical offsets of sequences that are padded in memory.


def physical(lengths: list[int], pads: list[int]) -> list[int]:
    starts = [0]
    for length, pad in zip(lengths, pads, strict=True):
        starts.append(starts[-1] + length + pad)
    return starts


@pytest.mark.kernels
def test_pads_see_themselves_alone(device, poisoned_memory):
    """The padding of segment i directly follows the segment's own tokens."""
    lengths = torch.tensor([2, 1], device=device)
    padded = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    ranges = cuseq.ops.mask_ranges(lengths, 7, cu_seqlens_padded=padded)
    assert ranges.tolist() == [[0, 0, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    seen = reference.mask([2, 1], 7, starts=[0, 3])
    check_dense(cuseq.ops.dense_mask(lengths, 7, cu_seqlens_padded=padded), seen, device)


def test_a_padded_batch(device, poisoned_memory):
    """Rows of five, padded on the right: two segments, each as long as its row."""
    lengths = torch.tensor([3, 5, 0], device=device)
    padded = torch.tensor([0, 5, 10, 15], dtype=torch.int32, device=device)
    mask = cuseq.ops.dense_mask(lengths, 15, cu_seqlens_padded=padded, row_length=5, causal=False)
    assert mask.shape == (3, 1, 5, 5)
    seen = reference.mask([3, 5, 0], 15, starts=[0, 5, 10], causal=False)
    check_dense(mask, seen, device, row_length=5)


@given(
    segments=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=6),
    tail=st.integers(0, 5),
    causal=st.booleans(),
    window=WINDOWS,
    has_spans=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_padding(segments, tail, causal, window, has_spans, dtype, device, poisoned_memory):
    lengths, pads = [s[0] for s in segments], [s[1] for s in segments]
    starts = physical(lengths, pads)
    total = starts[-1] + tail
    spans = [
        (start + length // 3, start + length)
        for start, length in zip(starts, lengths, strict=False)
        if has_spans and length > 0
    ]
    sees = {"causal": causal, "window": window}
    seen = reference.mask(lengths, total, spans=spans, starts=starts, **sees)

    source = torch.tensor(lengths, dtype=torch.int32, device=device)
    padded = torch.tensor(starts, dtype=torch.int32, device=device)
    spans = spans_tensor(spans, device)
    more = dict(spans=spans, cu_seqlens_padded=padded, **sees)
    check_ranges(cuseq.ops.mask_ranges(source, total, **more), seen, device)
    check_dense(cuseq.ops.dense_mask(source, total, dtype, **more), seen, device, dtype=dtype)
    offsets = cuseq.ops.cu_seqlens(source)
    ranges = ops.mask_ranges(offsets, total, True, causal, window, spans, padded)
    check_ranges(ranges, seen, device)


# Many tokens.


def test_thousands_of_sequences(device):
    """Compare with ranges from a few kernels, since loops over all pairs would take minutes."""
    lengths = [i % 7 for i in range(1500)]
    total = sum(lengths) + 11
    packed = PackedLayout.from_lengths(lengths, total, device=device)
    positions = torch.tensor(reference.position_ids(lengths, total), device=device)
    tokens = torch.arange(total, device=device)
    first = torch.where(tokens < total - 11, tokens - positions, tokens)
    ranges = cuseq.ops.mask_ranges(packed.lengths, total)
    assert torch.equal(ranges, torch.stack([first, tokens + 1]).int())
    mask = packed.dense_mask()
    for query in (0, 1, 2250, total - 12, total - 11, total - 1):
        seen = (tokens >= first[query]) & (tokens <= query)
        assert torch.equal(mask[0, 0, query], seen)
    assert int(mask.sum()) == int((tokens + 1 - first).sum())


@pytest.mark.slow
def test_elements_past_2_to_the_31(cuda):
    total = 46_400
    lengths = torch.tensor([total - 5, 2], device=cuda)
    mask = cuseq.ops.dense_mask(lengths, total)
    assert mask.stride(2) * total > 2**31
    counts = mask[0, 0].sum(1)
    assert counts.tolist() == [*range(1, total - 4), 1, 2, 1, 1, 1]
    assert mask[0, 0, total - 6, : total - 5].all()
    assert mask[0, 0, total - 4, total - 5 :].tolist() == [True, True, False, False, False]


# In attention.


def attention_inputs(shape, device, dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(device=device, dtype=dtype)
        .requires_grad_()
        for _ in range(3)
    )


# Minimum error bounds, for when the plain computation happens to be exact.
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute attention in plain PyTorch; its error sets the bounds here."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize(
    "pack",
    [
        Pack([7, 0, 12, 1], 23, None, [(8, 13)]),
        Pack([7, 4, 9], 33, 11, [(12, 15)]),
        Pack([], 9),
    ],
    ids=["one row", "rows", "only a tail"],
)
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive", "finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_dot_product_attention(pack, options, kind, dtype, device):
    seen = visible(pack, **options)
    rows = 1 if pack.row_length is None else pack.total_tokens // pack.row_length
    tensors = attention_inputs((rows, 2, pack.total_tokens // rows, 8), device, dtype)
    mask_dtype = torch.bool if kind == "bool" else dtype
    mask = make_layout(pack, device).dense_mask(
        mask_dtype,
        spans=pack.spans,
        row_length=pack.row_length,
        finite=kind == "finite",
        **options,
    )
    blocks = row_blocks(seen, pack.row_length).unsqueeze(1).to(device)

    def results(attention, inputs, mask):
        out = attention(*inputs, mask)
        grad = torch.ones_like(out) + torch.arange(out.shape[-1], device=device)
        return out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))

    exact = [t.detach().double().requires_grad_() for t in tensors]

    def by_loops(q, k, v, seen):
        flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        out = masked_attention(*flat, seen)
        return out.unflatten(0, (rows, -1)).transpose(1, 2)

    expected = results(by_loops, exact, seen.to(device))
    for actual, plain, wanted in zip(
        results(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m), tensors, mask),
        results(plain_attention, tensors, blocks),
        expected,
        strict=True,
    ):
        assert actual.isfinite().all(), "a token that sees nothing is NaN"
        bound = 3 * relative(plain, wanted, expected[0]) + FLOORS[dtype]
        assert relative(actual, wanted, expected[0]) <= bound
    out, real = expected[0].transpose(1, 2).flatten(0, 1), sum(pack.lengths)
    values = exact[2].transpose(1, 2).flatten(0, 1)
    assert torch.equal(out[real:], values[real:]), "the tail sees itself alone"


def launched(mask: Tensor | None, tensors) -> Counter:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        _, work = trace(lambda: scaled_dot_product_attention(*tensors, mask))
    return work


def test_the_efficient_kernel_takes_a_mask_as_it_is(cuda):
    total = 1001
    packed = PackedLayout.from_lengths([600, 300], total, device=cuda)
    tensors = [
        t.detach().transpose(1, 2)
        for t in attention_inputs((1, total, 4, 64), cuda, torch.bfloat16)
    ]
    mask = packed.dense_mask(torch.bfloat16)
    without = launched(mask, tensors)
    # A mask with unaligned rows is copied; the count includes that copy. Newer kernels of torch
    # also set memory, with or without a mask.
    assert sum(launched(mask.contiguous(), tensors).values()) > sum(without.values())
    assert sum(without.values()) == sum(launched(None, tensors).values()), without


# Mistakes.


def three_sequences(device) -> PackedLayout:
    return PackedLayout.from_lengths([2, 3, 4], 12, device=device)


WRONG_SPANS = {
    "descends": ([(4, 3)], "3"),
    "negative": ([(-1, 1)], "-1"),
    "across sequences": ([(1, 3)], "3"),
    "in the tail": ([(9, 11)], "11"),
    "out of the tail": ([(8, 10)], "10"),
    "behind the row": ([(20, 24)], "24"),
    "beyond int32": ([(2, 2**40)], "1099511627776"),
    "overlapping": ([(5, 8), (7, 9)], "7"),
    "equal at one end": ([(5, 7), (5, 8)], "5"),
    "overlapping, in any order": ([(7, 9), (0, 1), (5, 8)], "7"),
}


@pytest.mark.parametrize("method", ["dense_mask", "block_mask"])
@pytest.mark.parametrize("name", WRONG_SPANS)
def test_wrong_spans_are_refused(name, method, device):
    spans, value = WRONG_SPANS[name]
    call = getattr(three_sequences(device), method)
    for _ in range(2):  # asking again does not succeed either
        with pytest.raises(ValueError, match=rf"(?s)spans.*{value}"):
            call(spans=spans)
    call(spans=[(2, 5), (5, 9)])


@pytest.mark.parametrize(
    "spans",
    [[1, 2], [(1, 2, 3)], [(0, 1.5)], "ab", [("a", "b")], 3],
    ids=["flat", "triple", "floats", "text", "pairs of text", "a number"],
)
def test_spans_are_pairs_of_ints(spans, device):
    with pytest.raises((TypeError, ValueError), match="spans"):
        three_sequences(device).dense_mask(spans=spans)


def functions(lengths, device):
    """Return every function that takes spans as a tensor."""
    packed = three_sequences(device)
    return {
        "packed.dense_mask": packed.dense_mask,
        "packed.block_mask": packed.block_mask,
        "mask_ranges": lambda **more: cuseq.ops.mask_ranges(lengths, 12, **more),
        "dense_mask": lambda **more: cuseq.ops.dense_mask(lengths, 12, **more),
        "block_mask": lambda **more: cuseq.ops.block_mask(lengths, 12, **more),
        "cached_dense_mask": lambda **more: ops.cached_dense_mask(lengths, 12, **more),
        "cached_block_mask": lambda **more: ops.cached_block_mask(lengths, 12, **more),
    }


EVERY = pytest.mark.parametrize("name", functions(None, "cpu"))


@EVERY
def test_wrong_span_tensors_are_refused(name, device):
    call = functions(torch.tensor([2, 3, 4], device=device), device)[name]
    for dtype in (torch.int64, torch.float32):
        with pytest.raises((TypeError, ValueError), match="spans"):
            call(spans=torch.tensor([[2, 4]], dtype=dtype, device=device))
    for shape in ((2,), (2, 3), (1, 2, 2)):
        with pytest.raises(ValueError, match="spans"):
            call(spans=torch.zeros(shape, dtype=torch.int32, device=device))
    call(spans=spans_tensor([(2, 4)], device))


@EVERY
def test_spans_elsewhere_are_refused(name, cuda):
    call = functions(torch.tensor([2, 3, 4], device=cuda), cuda)[name]
    with pytest.raises(ValueError, match="spans"):
        call(spans=spans_tensor([(2, 4)], "cpu"))


@EVERY
@pytest.mark.parametrize("window", [0, -1, -5])
def test_a_window_is_at_least_one(name, window, device):
    call = functions(torch.tensor([2, 3, 4], device=device), device)[name]
    with pytest.raises(ValueError, match=rf"(?s)window.*{window}"):
        call(window=window)


def test_a_huge_window_is_none(device):
    packed, lengths = three_sequences(device), torch.tensor([2, 3, 4], device=device)
    for causal in (True, False):
        expected = packed.dense_mask(causal=causal)
        for window in (4, 2**31 - 1, 2**40, 2**63 - 1):
            assert torch.equal(packed.dense_mask(causal=causal, window=window), expected)
            ranges = cuseq.ops.mask_ranges(lengths, 12, causal=causal, window=window)
            assert torch.equal(ranges, cuseq.ops.mask_ranges(lengths, 12, causal=causal))


@pytest.mark.parametrize("method", ["dense_mask", "block_mask"])
@pytest.mark.parametrize("row_length", [0, -4, 5, 24])
def test_rows_divide_the_tokens(method, row_length, device):
    with pytest.raises(ValueError, match=rf"(?s)row_length.*{row_length}"):
        getattr(three_sequences(device), method)(row_length=row_length)
    lengths = torch.tensor([2], device=device)
    with pytest.raises(ValueError, match=rf"(?s)row_length.*{row_length}"):
        getattr(cuseq.ops, method)(lengths, 12, row_length=row_length)


@pytest.mark.parametrize("method", ["dense_mask", "block_mask"])
def test_no_sequence_crosses_a_row(method, device):
    for lengths, row_length in (([2, 3, 4], 4), ([2, 3, 4], 3), ([12], 6), ([7], 6)):
        packed = PackedLayout.from_lengths(lengths, 12, device=device)
        with pytest.raises(ValueError, match=rf"(?s)row_length.*{row_length}"):
            getattr(packed, method)(row_length=row_length)
    packed = PackedLayout.from_lengths([6, 0, 5, 0, 1], 12, device=device)
    getattr(packed, method)(row_length=6)
    # A sequence that ends at the row's end, an empty one there, or the tail crosses nothing.
    getattr(PackedLayout.from_lengths([3, 0], 12, device=device), method)(row_length=3)


@pytest.mark.parametrize("method", ["dense_mask", "block_mask"])
def test_functions_refuse_crossing_sequences_on_the_host(method):
    with pytest.raises(ValueError, match=r"(?s)row_length.*6"):
        getattr(cuseq.ops, method)(torch.tensor([7, 2]), 12, row_length=6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype, device):
    lengths = torch.tensor([2, 3, 4], device=device)
    for call in (
        lambda: three_sequences(device).dense_mask(dtype),
        lambda: cuseq.ops.dense_mask(lengths, 12, dtype),
        lambda: ops.dense_mask(lengths, 12, dtype=dtype),
        lambda: ops.cached_dense_mask(lengths, 12, dtype=dtype),
    ):
        with pytest.raises(TypeError, match="dtype"):
            call()


@pytest.mark.parametrize("name", ["mask_ranges", "dense_mask", "block_mask"])
def test_wrong_lengths_are_refused(name, device):
    function = getattr(cuseq.ops, name)
    with pytest.raises(TypeError, match="lengths must be int32 or int64"):
        function(torch.ones(2, device=device), 9)
    with pytest.raises(ValueError, match="lengths must have one dimension"):
        function(torch.ones(2, 2, dtype=torch.int32, device=device), 9)
    for total in (-1, 2**31):
        with pytest.raises(ValueError, match=f"total_tokens.*got {total}"):
            function(torch.tensor([0], device=device), total)


@pytest.mark.parametrize("name", ["mask_ranges", "dense_mask", "block_mask"])
def test_wrong_values_on_the_host_are_refused(name):
    function = getattr(cuseq.ops, name)
    with pytest.raises(ValueError, match=r"lengths\[1\] = -3"):
        function(torch.tensor([4, -3]), 9)
    with pytest.raises(ValueError, match="total_tokens = 4, got 5"):
        function(torch.tensor([2, 3]), 4)


@pytest.mark.parametrize("name", ["mask_ranges", "dense_mask", "block_mask"])
def test_wrong_physical_offsets_are_refused(name, device):
    function, lengths = getattr(cuseq.ops, name), torch.tensor([2, 3], device=device)
    for padded in (
        torch.zeros(3, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros(3, 1, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(4, dtype=torch.int32, device=device),
    ):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens_padded"):
            function(lengths, 9, cu_seqlens_padded=padded)


LIMITED = """
import pytest, torch, cuseq
device = {device!r}
ops = torch.ops.cuseq
lengths = torch.tensor([500, 12], device=device)
packed = cuseq.PackedLayout.from_lengths([500, 12], device=device)
assert packed.dense_mask().shape == (1, 1, 512, 512)  # 262,144 bytes
assert packed.dense_mask(torch.bfloat16).dtype == torch.bfloat16
ended = packed.block_mask(), cuseq.ops.block_mask(lengths, 512)  # have no such limit
huge = cuseq.PackedLayout.from_lengths([2**30, 5], max_seqs=2, device=device)
rows = cuseq.PackedLayout.from_lengths([500] * 4, device=device)
tree = cuseq.PackedTree.from_parents([500, 12], [-1, 0], device=device).layout
assert tree.dense_mask().shape == (1, 1, 512, 512) and tree.block_mask() is not None
assert rows.block_mask(row_length=500).shape == (4, 1, 500, 500)
for call in (
    lambda: packed.dense_mask(torch.float32),
    lambda: rows.dense_mask(row_length=500),
    lambda: huge.dense_mask(),
    lambda: cuseq.ops.dense_mask(lengths, 512, torch.float32),
    lambda: cuseq.ops.dense_mask(lengths, 2**30),
    lambda: cuseq.ops.dense_mask(lengths, 2**31 - 1, torch.float64),  # more than 2**63 bytes
    lambda: ops.dense_mask(lengths, 512, dtype=torch.float64),
    lambda: ops.cached_dense_mask(lengths, 512, dtype=torch.float32),
    lambda: tree.dense_mask(torch.float32),
    lambda: tree.dense_mask(torch.float32, window=3),
    lambda: torch.compile(lambda p: p.dense_mask(torch.float32), backend="eager")(tree),
):
    for part in ("CUSEQ_DENSE_MASK_MAX_BYTES", "block_mask", "varlen_attention"):
        with pytest.raises(ValueError, match=part):
            call()
print("all raised")
"""


def test_a_mask_above_the_limit_names_what_needs_less(device, run_python):
    # 500 rows of 512 bytes are 256,000 for one row and 1,024,000 for four.
    code = LIMITED.replace("{device!r}", repr(str(device)))
    result = run_python(code, CUSEQ_DENSE_MASK_MAX_BYTES="1000000")
    assert "all raised" in result.stdout, result.stderr


# Values that only the device knows.

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
TOTAL = 70
BAD_LENGTHS = [
    [-1],
    [5, -3, 4],
    [INT32_MIN, INT32_MAX],
    [INT32_MAX] * 5,
    [30, 41],
    [0, 0, 71, 0],
    [1, INT32_MAX, 1],
    [3, -1] * 700,
]
BAD_SPANS = [
    [(INT32_MIN, INT32_MAX)],
    [(5, 3)],
    [(-5, 4), (60, 100)],
    [(INT32_MAX, INT32_MIN)],
    [(40, 50), (10, 20), (15, 45)],
    [(0, 70)] * 300,
    [(69, 71), (70, 70), (70, 90)],
]
BAD_PADDED = [[0, 100, 200, 300], [-5, 3, 1, 0], [INT32_MAX] * 4, [INT32_MIN, 0, INT32_MAX, 1]]


def within(tensor: Tensor, low: int, high: int) -> bool:
    return bool(((tensor >= low) & (tensor <= high)).all())


def check_block_tables(tables, block: int, tokens: int) -> None:
    blocks = -(-tokens // block)
    for counts, indices in zip(tables[::2], tables[1::2], strict=True):
        assert within(counts, 0, blocks)
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        assert within(indices[listed], 0, blocks - 1)


def check_bounds(source: Tensor, from_offsets: bool = False, **more) -> None:
    for causal, window in ((True, None), (False, None), (True, 3), (False, INT32_MAX)):
        sees = dict(causal=causal, window=window, **more)
        ranges = ops.mask_ranges(source, TOTAL, from_offsets, **sees)
        assert within(ranges, 0, TOTAL)
        for dtype in (torch.bool, torch.float32):
            mask = ops.dense_mask(source, TOTAL, from_offsets, dtype=dtype, **sees)
            values = mask.float()
            assert ((values == 0) | (values == (1 if dtype == torch.bool else -torch.inf))).all()
        for rows in (None, 35):
            check_block_tables(ops.block_mask(ranges, rows, 16, 16), 16, rows or TOTAL)
            check_block_tables(
                ops.cached_block_mask(
                    source, TOTAL, from_offsets, row_length=rows, query_block=8, key_block=8, **sees
                ),
                8,
                rows or TOTAL,
            )
        ops.dense_mask(source, TOTAL, from_offsets, row_length=35, **sees)


@pytest.mark.kernels
@pytest.mark.parametrize("values", BAD_LENGTHS, ids=range(len(BAD_LENGTHS)))
def test_lengths_cannot_lead_out_of_bounds(values, cuda, poisoned_memory):
    for dtype in reference.DTYPES:
        check_bounds(torch.tensor(values, dtype=dtype, device=cuda))
    check_bounds(torch.tensor([0, *values], dtype=torch.int32, device=cuda), True)
    huge = torch.tensor([2**63 - 1, -(2**63), 2**32, 2], device=cuda)
    check_bounds(huge)


@pytest.mark.kernels
@pytest.mark.parametrize("values", BAD_SPANS, ids=range(len(BAD_SPANS)))
def test_spans_cannot_lead_out_of_bounds(values, cuda, poisoned_memory):
    check_bounds(torch.tensor([30, 20], device=cuda), spans=spans_tensor(values, cuda))
    packed = PackedLayout.from_lengths([30, 20], TOTAL, device=cuda)
    packed.dense_mask(spans=spans_tensor(values, cuda))
    packed.block_mask(spans=spans_tensor(values, cuda)).to_dense()


@pytest.mark.kernels
@pytest.mark.parametrize("values", BAD_PADDED, ids=range(len(BAD_PADDED)))
def test_physical_offsets_cannot_lead_out_of_bounds(values, cuda, poisoned_memory):
    padded = torch.tensor(values, dtype=torch.int32, device=cuda)
    check_bounds(torch.tensor([30, 20, 5], device=cuda), cu_seqlens_padded=padded)


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [None, 35, 1])
def test_ranges_cannot_lead_out_of_bounds(rows, device, poisoned_memory):
    """A caller may pass any ranges to the op."""
    generator = torch.Generator().manual_seed(0)
    for low, high in ((INT32_MIN, INT32_MAX), (-5, TOTAL + 5), (0, TOTAL + 1)):
        ranges = torch.randint(low, high, (2, TOTAL), generator=generator, dtype=torch.int32)
        for block in (1, 7, 16, 128):
            try:
                tables = ops.block_mask(ranges.to(device), rows, block, block)
            except ValueError:
                assert device.type == "cpu", "a GPU does not report it"
                continue
            check_block_tables(tables, block, rows or TOTAL)


def test_a_sequence_that_crosses_rows_on_the_device_stays_causal(cuda, poisoned_memory):
    lengths = torch.tensor([50, 20], device=cuda)
    mask = cuseq.ops.dense_mask(lengths, TOTAL, row_length=35)
    assert mask.shape == (2, 1, 35, 35)
    assert not mask.triu(1).any()


# Pure, compiled, captured.

CASES = [
    dict(),
    dict(causal=False, window=3),
    dict(spans=[(2, 4), (5, 8)]),
    dict(padded=[0, 3, 6, 11]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case, device):
    lengths = torch.tensor([2, 3, 4], device=device)
    case = dict(case)
    padded, spans = case.pop("padded", None), case.pop("spans", None)
    if padded is not None:
        case["cu_seqlens_padded"] = torch.tensor(padded, dtype=torch.int32, device=device)
    if spans is not None:
        case["spans"] = spans_tensor(spans, device)
    for op in (ops.mask_ranges, ops.cached_mask_ranges):
        opcheck(op, (lengths, 12), case)
        opcheck(op, (cuseq.ops.cu_seqlens(lengths), 12, True), case)
    for op in (ops.dense_mask, ops.cached_dense_mask):
        opcheck(op, (lengths, 12), case)
        opcheck(op, (lengths, 12), dict(case, dtype=torch.bfloat16, finite=True))
    single = dict(case, row_length=12)
    opcheck(ops.dense_mask, (lengths, 12), single)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_length", [None, 6])
def test_fakes_give_shapes_and_strides(dtype, row_length):
    lengths, more = torch.tensor([2, 4, 6]), dict(row_length=row_length, dtype=dtype)
    real = ops.dense_mask(lengths, 12, **more)
    meta = ops.dense_mask(lengths.to("meta"), 12, **more)
    assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)


def test_the_functions_leave_the_cache_alone(device, fresh_cache):
    lengths = torch.tensor([2, 3], device=device)
    before = cuseq.cache.stats()
    for function in (cuseq.ops.mask_ranges, cuseq.ops.dense_mask):
        first = function(lengths, 6)
        expected = first.tolist()
        first.zero_()
        assert function(lengths, 6).tolist() == expected
    assert cuseq.cache.stats() == before


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()


def check_compiled(device, **options) -> None:
    def masks(lengths, spans, packed):
        return (
            cuseq.ops.mask_ranges(lengths, 12, window=3, spans=spans),
            cuseq.ops.dense_mask(lengths, 12, spans=spans),
            cuseq.ops.dense_mask(lengths, 12, torch.float32, causal=False, finite=True),
            packed.dense_mask(),
            # With work after it, for which a compiler may reuse the mask's memory.
            packed.dense_mask(torch.float32, window=2, finite=True) * 0.5,
            ops.cached_dense_mask(lengths, 12, spans=spans),
        )

    compiled = torch.compile(masks, fullgraph=True, **options)
    for values in ([2, 4, 6], [6, 4, 1], [4, 4, 0]):
        arguments = (
            torch.tensor(values, device=device),
            spans_tensor([(0, 2), (values[0], values[0] + 3)], device),
            PackedLayout.from_lengths(values, 12, device=device),
        )
        kept = arguments[2].dense_mask(torch.float32, window=2, finite=True)
        copy = kept.clone()
        torch.testing.assert_close(compiled(*arguments), masks(*arguments), rtol=0, atol=0)
        assert torch.equal(kept, copy)
        assert arguments[2].dense_mask(torch.float32, window=2, finite=True) is kept


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_equals_eager(dynamic, device, fresh_cache, fresh_compiler):
    check_compiled(device, backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("warm", [False, True])
def test_rows_compile(warm, device, fresh_compiler):
    """Host checks, in a region that is compiled before the layout was used eagerly."""

    def double(packed, spans):
        mask = packed.dense_mask(torch.float32, row_length=6, finite=True, spans=spans)
        return mask * 2, packed.block_mask(row_length=6, block_size=4).kv_num_blocks * 2

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    spans = spans_tensor([(1, 4)], device)
    for lengths in ([4, 2, 5], [6, 6], [5]):
        packed = PackedLayout.from_lengths(lengths, 12, device=device)
        if warm:
            double(packed, spans)
        out = compiled(packed, spans)
        again = PackedLayout.from_lengths(lengths, 12, device=device)
        torch.testing.assert_close(out, double(again, spans), rtol=0, atol=0)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("method", ["dense_mask", "block_mask"])
def test_lists_of_spans_are_refused_in_compiled_code(method, warm, device, fresh_compiler):
    """Their values would become part of the graph: one compile for each pack."""
    packed = PackedLayout.from_lengths([4, 2, 5], 12, device=device)
    if warm:
        getattr(packed, method)(spans=[(1, 4)])
    compiled = torch.compile(
        lambda packed: getattr(packed, method)(spans=[(1, 4)]),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match="spans must be an int32 tensor"):
        compiled(packed)


def test_inductor_equals_eager(cuda, fresh_cache, fresh_compiler):
    """Runs only on the GPU, where it is quick; its effect on cached tensors is the same."""
    check_compiled(cuda, dynamic=False)


def test_masks_do_not_wait(cuda, fresh_cache):
    lengths = torch.tensor([2, 3], device=cuda)
    spans = spans_tensor([(2, 5)], cuda)

    def body():
        cuseq.cache.clear()
        cuseq.ops.mask_ranges(lengths, 6, window=2, spans=spans)
        for dtype in DTYPES:
            cuseq.ops.dense_mask(lengths, 6, dtype, spans=spans)
        cuseq.ops.dense_mask(lengths, 6, row_length=6)
        for host in (PackedLayout.from_lengths([2, 3], 6), PackedLayout.from_lengths([2, 4], 6)):
            packed = host.to(cuda)
            packed.dense_mask()
            packed.dense_mask(torch.bfloat16, window=2, row_length=6)
            packed.dense_mask(spans=[(0, 2), (3, 5)])
            packed.dense_mask(spans=spans)
        packed = PackedLayout.from_lengths([3, 3], device=cuda)
        packed.dense_mask(spans=[(0, 2)], row_length=3)

    assert waits(body) == Counter()


def test_a_layout_of_device_lengths_does_not_wait(cuda, fresh_cache):
    lengths = torch.tensor([2, 3], device=cuda)

    spans = spans_tensor([(2, 5)], cuda)

    def body():
        packed = PackedLayout.from_lengths(lengths, 6)
        packed.dense_mask()
        packed.dense_mask(torch.bfloat16, window=2, spans=spans)

    assert waits(body) == Counter()


# Not for compute-sanitizer: without the caching allocator, captures cannot allocate.
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_replay_with_new_lengths(warm, cuda, fresh_cache):
    lengths = torch.tensor([2, 3], device=cuda)
    spans = spans_tensor([(0, 2), (3, 5)], cuda)
    padded = torch.tensor([0, 2, 6], dtype=torch.int32, device=cuda)
    packed = PackedLayout.from_lengths([2, 3], 6, device=cuda)

    def functions():
        return {
            "ranges": cuseq.ops.mask_ranges(lengths, 6, spans=spans),
            "dense": cuseq.ops.dense_mask(lengths, 6, spans=spans, window=1),
            "rows": cuseq.ops.dense_mask(lengths, 6, torch.bfloat16, causal=False),
            "padded": cuseq.ops.dense_mask(lengths, 7, torch.float32, cu_seqlens_padded=padded),
            "packed": ops.cached_dense_mask(lengths, 6),
        }

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functions(), packed.dense_mask()
    torch.cuda.current_stream().wait_stream(side)
    if not warm:
        cuseq.cache.clear()

    before = cuseq.cache.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = functions()
        of_layout = packed.dense_mask()
    after = cuseq.cache.stats()
    assert after["bypasses"] > before["bypasses"]
    for count in ("hits", "misses", "entries", "bytes"):
        assert (count, after[count]) == (count, before[count])

    for new, new_spans in (([2, 3], [(0, 2), (3, 5)]), ([4, 1], [(1, 3), (3, 4)]), ([0, 5], None)):
        lengths.copy_(torch.tensor(new))
        if new_spans is not None:
            spans.copy_(torch.tensor(new_spans))
        padded.copy_(torch.tensor([0, new[0], 6]))
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        cuseq.cache.clear()
        torch.testing.assert_close(replayed, functions(), rtol=0, atol=0)
    check_dense(of_layout, reference.mask([2, 3], 6), cuda)


def test_second_gpu(second_gpu):
    packed = PackedLayout.from_lengths([2, 3], 6, device=second_gpu)
    assert torch.cuda.current_device() == 0
    spans = [(0, 2), (3, 5)]
    check_dense(packed.dense_mask(spans=spans), reference.mask([2, 3], 6, spans=spans), second_gpu)
    lengths = torch.tensor([2, 3], device=second_gpu)
    check_ranges(cuseq.ops.mask_ranges(lengths, 6), reference.mask([2, 3], 6), second_gpu)
