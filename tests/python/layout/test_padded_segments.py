"""Test rows with padding between sequences: ops that support them, refusals, and cost.

NaN is written to all padding, in values and in incoming gradients, so that any read of it shows.
"""

from __future__ import annotations

import pickle
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_attention import inputs, relative
from test_no_sync import waits
from test_padding_mask_layouts import Expected, additive, expect, four, kernels
from test_padding_mask_layouts import check as check_layout
from test_values_on_device import BAD_OFFSETS, INT32_MAX, INT32_MIN, TOTAL, on, within
from torch import Tensor, nn

import cuseq
from cuseq import PackedLayout
from cuseq.distributed import cp_join, cp_partition, cp_plan

ops = torch.ops.cuseq

IGNORED = -100
NAN = float("nan")


def batch_of(lengths: list[int], left: bool = False) -> list[list[int]]:
    """Return a mask with one row per length, padded on the right or on the left."""
    longest = max(lengths, default=0)
    rows = [[1] * length + [0] * (longest - length) for length in lengths]
    return [row[::-1] for row in rows] if left else rows


def tensor_of(rows: list[list[int]], device: torch.device) -> Tensor:
    width = len(rows[0]) if rows else 0
    return torch.tensor(rows, dtype=torch.bool, device=device).view(len(rows), width)


def row(lengths: list[int], segment=4, total=1, total_tokens: int | None = None) -> Expected:
    return expect(batch_of(lengths), segment, total, total_tokens)


def real_of(expected: Expected, device: torch.device | str = "cpu") -> Tensor:
    """Return bool `[total_tokens]`, True for real tokens."""
    real = [slot is not None for slot in expected.slots]
    return torch.tensor(real, dtype=torch.bool, device=device)


MAKERS: dict[str, Callable[..., PackedLayout]] = {
    "lengths": lambda lengths, device, **sizes: PackedLayout.from_lengths(
        lengths, sizes.pop("total_tokens", None), **sizes, device=device
    ),
    "mask": lambda lengths, device, **sizes: PackedLayout.from_padding_mask(
        tensor_of(batch_of(lengths, left=True), device), **sizes
    ),
}


# ------------------------------------------------------------------------------------- attention


def attention_by_loops(q, k, v, expected: Expected, spans=(), **options) -> Tensor:
    """Let each sequence attend to itself, wherever it lies; zeros everywhere else."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    starts = reference.cu_seqlens(expected.segments)
    for begin, length in zip(starts, expected.lengths, strict=False):
        own = slice(begin, begin + length)
        rows = [tensor[own] for tensor in (q, k, v)]
        inside = [(int(s) - begin, int(e) - begin) for s, e in spans if begin <= s < begin + length]
        if inside:
            seen = reference.mask([length], length, spans=inside, **options)
            out[own] = reference.masked_attention(*rows, seen)
        else:
            out[own] = reference.attention(*rows, [length], **options)
    return out


def check_attention(tensors, expected: Expected, packed, *, bound, spans=(), **options) -> None:
    """Check output and gradients against float64 loops: zeros on padding, which held NaN before."""
    real = real_of(expected, tensors[0].device)
    with torch.no_grad():
        for tensor in tensors:
            tensor[~real] = NAN
    given = {"spans": spans} if len(spans) > 0 else {}
    out = cuseq.varlen_attention(*tensors, packed, **given, **options)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    wanted = attention_by_loops(*exact, expected, spans, **options)
    assert (out.shape, out.dtype) == (wanted.shape, tensors[0].dtype)
    assert not out[~real].any(), "padding of the output must be zero"
    assert relative(out, wanted, wanted) <= bound

    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    poisoned = grad.masked_fill(~real.cpu()[:, None, None], NAN)
    grads = torch.autograd.grad(out, tensors, poisoned.to(out))
    clean = poisoned.nan_to_num(0.0)
    # Without real tokens the reference does not depend on its inputs at all.
    wanted_grads = (
        torch.autograd.grad(wanted, exact, clean)
        if wanted.requires_grad
        else [torch.zeros_like(tensor) for tensor in exact]
    )
    for actual, wanted_grad in zip(grads, wanted_grads, strict=True):
        assert not actual[~real].any(), "padding of a gradient must be zero"
        assert relative(actual, wanted_grad, clean) <= 3 * bound


ROWS = [
    pytest.param([3, 5], {"segment_multiple": 4}, id="pads"),
    pytest.param([3, 5], {"segment_multiple": 4, "total_multiple": 20}, id="pads and a tail"),
    pytest.param([0, 6, 0, 0, 2], {"segment_multiple": 4}, id="zero-length sequences"),
    pytest.param([1] * 5, {"segment_multiple": 3}, id="one-token sequences"),
    pytest.param([8, 4], {"segment_multiple": 4}, id="segments that are full"),
    pytest.param([7], {"segment_multiple": 16}, id="one sequence"),
    pytest.param([0, 0], {"segment_multiple": 4, "total_tokens": 8}, id="only a tail"),
    pytest.param([0], {"segment_multiple": 4}, id="no tokens"),
    pytest.param(
        [70, 1, 0, 33], {"segment_multiple": 16, "total_tokens": 160}, id="longer than a tile"
    ),
]
OPTIONS = [
    {},
    {"causal": False},
    {"window": 3},
    {"causal": False, "window": 3},
    {"window": 1, "scale": 0.3},
]


def sizes_to_row(sizes: dict[str, int]) -> dict[str, int]:
    names = {
        "segment_multiple": "segment",
        "total_multiple": "total",
        "total_tokens": "total_tokens",
    }
    return {names[name]: value for name, value in sizes.items()}


@pytest.mark.parametrize("lengths,sizes", ROWS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_attention_in_fp64(make, lengths, sizes, options, device):
    expected = row(lengths, **sizes_to_row(sizes))
    tensors = inputs(expected.total_tokens, dim=8, device=device, dtype=torch.float64)
    packed = MAKERS[make](lengths, device, **sizes)
    check_attention(tensors, expected, packed, bound=1e-13, **options)


@pytest.mark.kernels
@pytest.mark.parametrize("lengths,sizes", ROWS)
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_attention_in_fp32(lengths, sizes, options, device):
    """On CUDA this uses the memory-efficient kernels."""
    expected = row(lengths, **sizes_to_row(sizes))
    tensors = inputs(expected.total_tokens, device=device)
    packed = PackedLayout.from_padding_mask(tensor_of(batch_of(lengths), device), **sizes)
    check_attention(tensors, expected, packed, bound=2e-6, **options)


@pytest.mark.kernels
@pytest.mark.parametrize("lengths,sizes", ROWS)
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("dim,value_dim", [(64, 64), (20, 20), (48, 32)])
def test_attention_by_flash(lengths, sizes, options, dim, value_dim, cuda):
    expected = row(lengths, **sizes_to_row(sizes))
    total = expected.total_tokens
    tensors = inputs(total, 4, 2, dim, value_dim, device=cuda, dtype=torch.bfloat16)
    packed = PackedLayout.from_padding_mask(tensor_of(batch_of(lengths), cuda), **sizes)
    check_attention(tensors, expected, packed, bound=6e-3, **options)


SPANNED = [
    pytest.param([6, 5], {"segment_multiple": 4}, [(1, 4), (8, 13)], id="pads"),
    pytest.param(
        [3, 0, 6], {"segment_multiple": 4, "total_tokens": 16}, [(0, 3), (5, 7)], id="tail"
    ),
    pytest.param([1, 1], {"segment_multiple": 4}, [(4, 5)], id="one-token sequences"),
    pytest.param([4, 8], {"segment_multiple": 4}, [(0, 4), (4, 12)], id="segments that are full"),
]


@pytest.mark.parametrize("lengths,sizes,spans", SPANNED)
@pytest.mark.parametrize("options", [{}, {"window": 2}], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["pairs", "tensor"])
def test_attention_with_spans(lengths, sizes, spans, options, as_tensor, device):
    """Spans count tokens of the row, including padding."""
    expected = row(lengths, **sizes_to_row(sizes))
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    tensors = inputs(expected.total_tokens, dim=8, device=device, dtype=dtype)
    packed = MAKERS["lengths"](lengths, device, **sizes)
    bound = 1e-13 if dtype == torch.float64 else 2e-6
    given = torch.tensor(spans, dtype=torch.int32, device=device) if as_tensor else spans
    check_attention(tensors, expected, packed, bound=bound, spans=given, **options)


@given(
    lengths=st.lists(st.integers(0, 12), max_size=5),
    segment=st.sampled_from([2, 3, 4, 8, (2, 3)]),
    total=st.sampled_from([1, 1, 5, 16]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    group=st.sampled_from([1, 3]),
    from_mask=st.booleans(),
)
def test_attention_of_any_row(lengths, segment, total, causal, window, group, from_mask):
    expected = row(lengths, segment, total)
    tensors = inputs(expected.total_tokens, 2 * group, 2, 4, dtype=torch.float64)
    make = MAKERS["mask" if from_mask else "lengths"]
    packed = make(lengths, "cpu", segment_multiple=segment, total_multiple=total)
    check_attention(tensors, expected, packed, bound=1e-13, causal=causal, window=window)


@pytest.mark.parametrize("value", [0.0, 1e30, float("inf"), NAN], ids=str)
def test_what_lies_on_padding_reaches_nobody(value, device):
    """Compared bit for bit."""
    expected = row([3, 0, 5], 4, 16)
    real = real_of(expected, device)
    packed = PackedLayout.from_lengths([3, 0, 5], 16, segment_multiple=4, device=device)
    results = []
    for fill in (1.0, value):
        tensors = [t.detach() for t in inputs(16, device=device)]
        grad = torch.ones_like(tensors[0])
        for tensor in (*tensors, grad):
            tensor[~real] = fill
        tensors = [tensor.requires_grad_() for tensor in tensors]
        out = cuseq.varlen_attention(*tensors, packed)
        results.append((out, *torch.autograd.grad(out, tensors, grad)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after) and not after[~real].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_graph_replays_with_other_values(dtype, cuda):
    """The values of tensors and offsets change; a capture reads none of them on the host."""
    sizes = dict(segment_multiple=4, max_seqs=4, device=cuda)
    packed = PackedLayout.from_lengths([9, 14], 32, **sizes)
    tensors = [t.detach() for t in inputs(32, dim=32, device=cuda, dtype=dtype)]
    offsets, padded = (
        layout.clone() for layout in (packed.cu_seqlens_static, packed.cu_seqlens_padded_static)
    )

    def body() -> Tensor:
        return ops.varlen_attention(
            *tensors, offsets, packed.host_meta, max_seqlen_bound=32, cu_seqlens_padded=padded
        )[0]

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = body()
    for seed, lengths in enumerate([[9, 14], [1, 2, 3], [32], [0, 5, 0, 7], [32 - 4, 1]]):
        other = PackedLayout.from_lengths(lengths, 32, **sizes)
        offsets.copy_(other.cu_seqlens_static)
        padded.copy_(other.cu_seqlens_padded_static)
        values = inputs(32, dim=32, device=cuda, dtype=dtype, seed=seed)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.detach())
        graph.replay()
        expected = cuseq.varlen_attention(*tensors, other)
        torch.testing.assert_close(captured, expected)
        assert not captured[~real_of(row(lengths, total_tokens=32), cuda)].any()


def test_compiled_code_says_that_segments_do_not_fit(cuda):
    """The sequences fit, but their segments do not; the graph ran before with ones that fit."""

    def layer(q, k, v, packed):
        return cuseq.varlen_attention(q * 2, k, v, packed)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    tensors = inputs(8, device=cuda)

    def layout(lengths: list[int]) -> PackedLayout:
        mask = tensor_of(batch_of(lengths), cuda)
        return PackedLayout.from_padding_mask(mask, 4, total_tokens=8, max_seqs=2)

    compiled(*tensors, layout([4, 4]))
    too_much = layout([1, 5])
    with pytest.raises(ValueError, match="total_tokens = 8"):
        compiled(*tensors, too_much)
    packed = layout([4, 3])
    torch.testing.assert_close(compiled(*tensors, packed), layer(*tensors, packed))


# ---------------------------------------------------------------------------------------- labels


def labels_by_loop(labels: list[int], expected: Expected, shift: int) -> list[int]:
    kept = []
    for token, label in enumerate(labels):
        source, target = (token, token + shift) if shift > 0 else (token - 1, token)
        inside = source >= 0 and target < len(labels)
        both_real = inside and None not in (expected.slots[source], expected.slots[target])
        one_sequence = inside and expected.seq_ids[source] == expected.seq_ids[target]
        kept.append(label if both_real and one_sequence else IGNORED)
    return kept


def check_labels(expected: Expected, packed: PackedLayout, shift: int, dtype, device) -> None:
    labels = torch.arange(10, 10 + expected.total_tokens, dtype=dtype, device=device)
    before = labels.clone()
    wanted = labels_by_loop(labels.tolist(), expected, shift)
    for form, values in ((labels, wanted), (labels.unsqueeze(0), [wanted])):
        masked = cuseq.data.mask_boundary_labels(form, packed, shift=shift)
        assert (masked.dtype, masked.device) == (dtype, device)
        assert masked.tolist() == values
    assert torch.equal(labels, before)


def test_labels_of_two_sequences(device):
    """Written out: segments of four, of which three and two tokens are real, and a tail."""
    packed = PackedLayout.from_lengths([3, 2], 12, segment_multiple=4, device=device)
    labels = torch.arange(12, device=device)
    masked = cuseq.data.mask_boundary_labels(labels, packed)
    assert masked.tolist() == [IGNORED, 1, 2, IGNORED, IGNORED, 5, *[IGNORED] * 6]
    masked = cuseq.data.mask_boundary_labels(labels, packed, shift=1)
    assert masked.tolist() == [0, 1, IGNORED, IGNORED, 4, *[IGNORED] * 7]


@pytest.mark.kernels
@pytest.mark.parametrize("lengths,sizes", ROWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("make", MAKERS)
def test_labels(make, shift, dtype, lengths, sizes, device):
    expected = row(lengths, **sizes_to_row(sizes))
    packed = MAKERS[make](lengths, device, **sizes)
    check_labels(expected, packed, shift, dtype, device)


@given(
    lengths=st.lists(st.integers(0, 12), max_size=6),
    segment=st.sampled_from([2, 3, 8]),
    total=st.sampled_from([1, 5, 16]),
    shift=st.integers(0, 5),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_labels_of_any_row(lengths, segment, total, shift, dtype, device):
    packed = PackedLayout.from_lengths(
        lengths, segment_multiple=segment, total_multiple=total, device=device
    )
    check_labels(row(lengths, segment, total), packed, shift, dtype, device)


# ----------------------------------------------------------------- offsets that hold anything


@contextmanager
def surrounded(device: torch.device, sizes: list[int]) -> Iterator[list[Tensor]]:
    """Allocate small free blocks between poisoned ones, so that a write outside an output shows."""
    blocks = [
        torch.full((size,), 0x5A, dtype=torch.uint8, device=device)
        for size in sizes
        for _ in range(16)
    ]
    del blocks[1::2]  # the allocator will put outputs here
    yield blocks
    torch.cuda.synchronize(device)
    for block in blocks:
        assert bool((block == 0x5A).all()), "written outside"


# Sizes of the outputs in bytes: int32 and bool of the row, tensors of heads.
BLOCKS = [512, 1024, 2 * TOTAL * 8 * 4 + 512, 8192]


def good_offsets(count: int) -> list[int]:
    return [min(2 * i, TOTAL) for i in range(count)]


def use_rows(index: Tensor, inverse: Tensor) -> None:
    """Read with these indices, which must stay inside too."""
    tensor = torch.zeros(inverse.numel(), 3, device=index.device, requires_grad=True)
    (rows,) = ops.gather_rows([tensor], index, inverse, [index.numel()], 1, [0])
    rows.sum().backward()


def index_ops(mask: Tensor, offsets: Tensor) -> None:
    slots, tokens, *_ = ops.mask_rows(mask, offsets, TOTAL)
    use_rows(slots, tokens.view(-1))


def attend(offsets: Tensor, padded: Tensor, dtype=torch.float32) -> None:
    q, k, v = inputs(TOTAL, 2, 1, 8, device=offsets.device, dtype=dtype)
    for options in ({}, {"causal": False}, {"window": 2}, {"max_seqlen_bound": 5}):
        out, *_ = ops.varlen_attention(q, k, v, offsets, cu_seqlens_padded=padded, **options)
        out.sum().backward()


def pair_calls(offsets: Tensor, padded: Tensor) -> dict[str, Callable[[], object]]:
    labels = torch.arange(TOTAL, device=offsets.device)
    return {
        "segment_rows": lambda: use_rows(*ops.segment_rows(offsets, padded, TOTAL)),
        "token_metadata": lambda: ops.token_metadata(offsets, TOTAL, padded),
        "mask_boundary_labels": lambda: ops.mask_boundary_labels(
            labels, offsets, cu_seqlens_padded=padded
        ),
        "shifted labels": lambda: ops.mask_boundary_labels(
            labels.int(), offsets, 1, cu_seqlens_padded=padded
        ),
        "varlen_attention": lambda: attend(offsets, padded),
    }


@pytest.mark.kernels
@pytest.mark.parametrize("values", BAD_OFFSETS, ids=range(len(BAD_OFFSETS)))
def test_offsets_cannot_lead_out_of_the_row(values, cuda):
    bad, good = on(cuda, values), on(cuda, good_offsets(len(values)))
    for offsets, padded in ((bad, good), (good, bad), (bad, bad), (bad, bad.flip(0).contiguous())):
        for call in pair_calls(offsets, padded).values():
            with surrounded(cuda, BLOCKS):
                call()
        with surrounded(cuda, BLOCKS):
            attend(offsets, padded, torch.bfloat16)
    with surrounded(cuda, BLOCKS):
        _, segments, _ = ops.token_metadata(good, TOTAL, bad)
        assert within(segments, 0, len(values) - 1)


@pytest.mark.kernels
@pytest.mark.parametrize("columns", [1, 9, 600])
@pytest.mark.parametrize("values", BAD_OFFSETS, ids=range(len(BAD_OFFSETS)))
def test_a_mask_cannot_lead_out_of_the_row(values, columns, cuda):
    mask = torch.ones(len(values) - 1, columns, dtype=torch.bool, device=cuda)
    for offsets in (on(cuda, values), on(cuda, good_offsets(len(values)))):
        for form in (mask, mask.long(), mask.t().contiguous().t()):
            with surrounded(cuda, BLOCKS):
                index_ops(form, offsets)


def test_the_guard_sees_a_write(cuda):
    """The tests above rely on it."""
    with pytest.raises(AssertionError, match="written outside"):
        with surrounded(cuda, [512]) as blocks:
            blocks[3][0] = 1


@pytest.mark.parametrize("values", BAD_OFFSETS, ids=range(len(BAD_OFFSETS)))
def test_offsets_on_the_host_are_named(values):
    bad, good = on("cpu", values), on("cpu", good_offsets(len(values)))
    mask = torch.ones(len(values) - 1, 2, dtype=torch.bool)
    for name, call in pair_calls(bad, good).items():
        with pytest.raises(ValueError, match=r"cu_seqlens must .*got") as raised:
            call()
        assert "frame #" not in str(raised.value), name
    for name, call in pair_calls(good, bad).items():
        with pytest.raises(ValueError, match=r"cu_seqlens_padded must .*got") as raised:
            call()
        assert "frame #" not in str(raised.value), name
    with pytest.raises(ValueError, match=r"cu_seqlens must .*got"):
        ops.mask_rows(mask, bad, TOTAL)


@pytest.mark.parametrize(
    ("padded", "message"),
    [
        ([1, 4, 8], "start at 0.* 1"),
        ([0, -3, 8], "room.*segment 0 of -3"),
        ([0, 6, 4], "room.*segment 1 of -2"),
        ([0, 2, 8], "room.*segment 0 of 2 tokens for a sequence of 3"),
        ([0, 4, 71], "total_tokens = 70, got 71"),
        ([0, INT32_MIN, INT32_MAX], f"room.*segment 0 of {INT32_MIN}"),
        ([0, INT32_MAX, INT32_MIN], f"room.*segment 1 of {INT32_MIN - INT32_MAX}"),
    ],
)
def test_which_value_of_the_segments_is_wrong(padded, message):
    for call in pair_calls(on("cpu", [0, 3, 5]), on("cpu", padded)).values():
        with pytest.raises(ValueError, match=f"cu_seqlens_padded must .*{message}"):
            call()


CHECKED = """
import pytest, torch
device = {device!r}
ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
good, descends, negative, far = ints(0, 3, 5), ints(0, 5, 3), ints(0, -4, 8), ints(0, 4, 99)
mask = torch.ones(2, 4, dtype=torch.bool, device=device)
labels = torch.arange(12, device=device)
q = torch.zeros(12, 2, 8, device=device)
import cuseq
ops = torch.ops.cuseq
alone = r"cu_seqlens\\[2\\] = 3"
pairs = [
    lambda offsets, padded: ops.segment_rows(offsets, padded, 12),
    lambda offsets, padded: ops.token_metadata(offsets, 12, padded),
    lambda offsets, padded: ops.mask_boundary_labels(labels, offsets, cu_seqlens_padded=padded),
    lambda offsets, padded: ops.varlen_attention(q, q, q, offsets, cu_seqlens_padded=padded),
]
calls = [
    (lambda: ops.mask_rows(mask, descends, 12), alone),
]
for op in pairs:
    calls += [
        (lambda op=op: op(descends, good), alone),
        (lambda op=op: op(good, descends), "segment 1 of -2"),
        (lambda op=op: op(good, negative), "segment 0 of -4"),
        (lambda op=op: op(good, far), "total_tokens = 12, got 99"),
    ]
for call, message in calls:
    with pytest.raises(ValueError, match=message):
        call()
print(len(calls), "raised")
"""


def test_cuseq_check_names_values_at_once(device, run_python):
    result = run_python(CHECKED.format(device=str(device)), CUSEQ_CHECK="1")
    assert "17 raised" in result.stdout, result.stderr


# ----------------------------------------------------------------------------------- longer rows

LENGTHS, LONGER = [3, 0, 5], 24


def positions(lengths: list[int]) -> list[int]:
    return [position for length in lengths for position in range(length)]


# The layout in the shortest row that holds its sequences, and the multiple of its segments.
SHORT: dict[str, tuple[Callable[[torch.device], PackedLayout], list[int], int]] = {
    "ints": (lambda d: PackedLayout.from_lengths(LENGTHS, device=d), LENGTHS, 1),
    "lengths": (lambda d: PackedLayout.from_lengths(on(d, LENGTHS), 8), LENGTHS, 1),
    "padded lengths": (
        lambda d: PackedLayout.from_lengths(on(d, LENGTHS), segment_multiple=4).to(d),
        LENGTHS,
        4,
    ),
    "offsets": (
        lambda d: PackedLayout.from_cu_seqlens(on(d, reference.cu_seqlens(LENGTHS)), 8),
        LENGTHS,
        1,
    ),
    "positions": (
        lambda d: PackedLayout.from_position_ids(on(d, positions([3, 5]))),
        [3, 5],
        1,
    ),
    "mask": (
        lambda d: PackedLayout.from_padding_mask(tensor_of(batch_of(LENGTHS), d)),
        LENGTHS,
        1,
    ),
    "padded mask": (
        lambda d: PackedLayout.from_padding_mask(
            tensor_of(batch_of(LENGTHS), d), 4, total_tokens=12
        ),
        LENGTHS,
        4,
    ),
    "a host's": (
        lambda d: PackedLayout.from_lengths(LENGTHS, segment_multiple=4).to(d),
        LENGTHS,
        4,
    ),
    "few offsets": (
        lambda d: PackedLayout.from_padding_mask(
            tensor_of(batch_of(LENGTHS), d), 4, total_tokens=16, max_seqs=5
        ),
        LENGTHS,
        4,
    ),
}


def check_longer(made: PackedLayout, lengths: list[int], segment: int, device, capacity) -> None:
    """Check all properties against the loops over the longer row."""
    expected = row(lengths, segment, total_tokens=LONGER)
    check_layout(made, expected, device, capacity - 1)
    real = real_of(expected)
    assert made.cu_seqlens_static.shape == (capacity,)
    assert made.moe_padding_mask.tolist() == real.logical_not().tolist()
    assert made.moe_padding_mask.device == device
    ids = torch.tensor(expected.seq_ids, dtype=torch.int32).masked_fill(~real, -1)
    assert made.seq_idx.tolist() == [ids.tolist()]
    assert made.pads_between_sequences == (segment > 1)
    batch = torch.arange(1, 1 + len(lengths) * max(lengths), device=device)
    batch = batch.view(len(lengths), max(lengths))
    packed = cuseq.pack(made, batch)
    wanted = [0 if slot is None else int(batch[slot]) for slot in expected.slots]
    assert packed.tolist() == wanted
    mask = tensor_of(batch_of(lengths), device)
    assert torch.equal(cuseq.unpack(made, packed), batch * mask)
    starts = reference.cu_seqlens(expected.segments)
    seen = reference.mask(lengths, LONGER, starts=starts)
    assert torch.equal(made.dense_mask()[0, 0].cpu(), seen)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("name", SHORT)
def test_a_longer_row(name, read, device):
    make, lengths, segment = SHORT[name]
    short = make(device)
    if read:
        before = row(lengths, segment, total_tokens=short.total_tokens)
        check_layout(short, before, device, short.cu_seqlens_static.shape[0] - 1)
        short.seq_idx, short.dense_mask()  # noqa: B018
    capacity = short.cu_seqlens_static.shape[0]
    tokens = short.total_tokens
    longer = short.with_total_tokens(LONGER)
    check_longer(longer, lengths, segment, device, capacity)
    assert short.total_tokens == tokens and short.host_meta.tolist()[2] == tokens
    assert short.with_total_tokens(tokens) is short
    again = short.with_total_tokens(20).with_total_tokens(LONGER)
    check_longer(again, lengths, segment, device, capacity)
    with pytest.raises(ValueError, match=f"total_tokens must be at least .*{LONGER}, got 20"):
        longer.with_total_tokens(20)


@pytest.mark.parametrize("name", SHORT)
def test_a_longer_row_in_inference_mode_trains(name, device):
    make, lengths, segment = SHORT[name]
    with torch.inference_mode():
        packed = make(device).with_total_tokens(LONGER)
        packed.position_ids, packed.seq_ids, packed.moe_padding_mask  # noqa: B018
    mask = tensor_of(batch_of(lengths), device)
    hidden = torch.randn(*mask.shape, 2, 8, device=device, requires_grad=True)
    cos, sin = cuseq.rope_table(LONGER, 8, device=device)
    rows = cuseq.pack(packed, hidden)
    turned, _ = cuseq.apply_rope(rows, None, cos, sin, packed=packed)
    out = cuseq.unpack(packed, cuseq.varlen_attention(turned, rows, rows, packed))
    out.square().sum().backward()
    assert torch.equal(hidden.grad.ne(0).any(-1).any(-1), mask)
    check_longer(packed, lengths, segment, device, packed.cu_seqlens_static.shape[0])


def test_rope_of_a_longer_row(device):
    """Positions of padding continue in its segment, and the added tail starts at 0."""
    short = PackedLayout.from_lengths(LENGTHS, segment_multiple=4, device=device)
    cos, sin = cuseq.rope_table(LONGER, 8, dtype=torch.float64, device=device)
    q = torch.randn(LONGER, 1, 8, dtype=torch.float64, device=device)
    turned, _ = cuseq.apply_rope(q, None, cos, sin, packed=short.with_total_tokens(LONGER))
    expected = reference.rope(q, cos, sin, row(LENGTHS, total_tokens=LONGER).position_ids)
    torch.testing.assert_close(turned.cpu(), expected)


@pytest.mark.parametrize("name", SHORT)
def test_a_longer_row_is_pickled_and_moved(name, device):
    make, lengths, segment = SHORT[name]
    short = make(device)
    capacity = short.cu_seqlens_static.shape[0]
    longer = short.with_total_tokens(LONGER)
    other = pickle.loads(pickle.dumps(longer))
    check_longer(other, lengths, segment, device, capacity)
    check_longer(other.with_total_tokens(LONGER), lengths, segment, device, capacity)
    host = torch.device("cpu")
    moved = longer.to(host)
    check_longer(moved, lengths, segment, host, capacity)
    assert moved.to(device) is longer
    check_longer(
        make(host).with_total_tokens(LONGER).to(device), lengths, segment, device, capacity
    )


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_longer_row_of_a_part(cp_rank, inference, device):
    with torch.inference_mode(inference):
        packed = PackedLayout.from_lengths([7, 0, 3], segment_multiple=4, device=device)
        (part,) = cp_partition(packed, cp_plan(packed, 2, policy="zigzag"), cp_rank)
        longer = part.with_total_tokens(10)
        in_steps = part.with_total_tokens(7).with_total_tokens(8).with_total_tokens(10)
    pads = part.moe_padding_mask.tolist()
    for made in (longer, in_steps, pickle.loads(pickle.dumps(longer)), longer.to("cpu")):
        assert made.position_ids.tolist() == [*part.position_ids.tolist(), 0, 1, 2, 3]
        assert made.seq_ids.tolist() == [*part.seq_ids.tolist(), 3, 3, 3, 3]
        assert made.moe_padding_mask.tolist() == [*pads, *[True] * 4]
        for name in ("lengths", "cu_seqlens", "cu_seqlens_padded", "cu_seqlens_static"):
            assert getattr(made, name).tolist() == getattr(part, name).tolist(), name
        for name in ("num_sequences", "max_seqlen", "max_seqlen_padded", "num_real_tokens"):
            assert getattr(made, name) == getattr(part, name), name
        assert made.total_tokens == made.host_meta.tolist()[2] == 10
        with pytest.raises(ValueError, match="whole row"):
            made.dense_mask()
    cos, sin = cuseq.rope_table(16, 8, dtype=torch.float64, device=device)
    q = torch.randn(10, 1, 8, dtype=torch.float64, device=device, requires_grad=True)
    turned, _ = cuseq.apply_rope(q, None, cos, sin, packed=longer)
    turned.sum().backward()
    expected = reference.rope(q.detach(), cos, sin, longer.position_ids.tolist())
    torch.testing.assert_close(turned.detach().cpu(), expected)


WRONG: dict[str, Callable[[torch.device], PackedLayout]] = {
    "lengths": lambda d: PackedLayout.from_lengths(on(d, [5, 6]), 9),
    "offsets": lambda d: PackedLayout.from_cu_seqlens(on(d, [0, 10]), 9),
    "mask": lambda d: PackedLayout.from_padding_mask(tensor_of([[1] * 5] * 2, d), total_tokens=9),
    "segments": lambda d: PackedLayout.from_padding_mask(
        tensor_of([[1] * 3] * 3, d), 4, total_tokens=8
    ),
    "segments alone": lambda d: PackedLayout.from_padding_mask(
        tensor_of([[1], [1], [1]], d), 4, total_tokens=8
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_longer_row_does_not_make_lengths_right(name, cuda):
    layout = WRONG[name](cuda)
    total = layout.total_tokens
    for _ in range(2):
        with pytest.raises(ValueError, match=f"total_tokens = {total}"):
            layout.with_total_tokens(64).wait()


def test_a_longer_row_waits_for_the_copy_of_its_segments(cuda):
    """It is a separate copy from that of the lengths, and is made later."""
    for length in range(1, 60):
        mask = torch.ones(20_000, length, dtype=torch.bool, device=cuda)
        total = 20_000 * 64
        longer = PackedLayout.from_padding_mask(mask, 4, total_tokens=total).with_total_tokens(
            total + 4
        )
        assert longer.max_seqlen_padded == -(-length // 4) * 4
        assert longer.segments.host_meta.tolist()[2] == total + 4


def test_equalized_rows_keep_their_padding(monkeypatch, device):
    """Equalise as if the longest row of the ranks had 24 tokens."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, *_: total.clamp_(min=LONGER))
    for make, lengths, segment in SHORT.values():
        short = make(device)
        longer = cuseq.distributed.equalize_tokens(short)
        check_longer(longer, lengths, segment, device, short.cu_seqlens_static.shape[0])
        assert cuseq.distributed.equalize_tokens(longer) is longer


# ------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("segment", [1, 16])
@pytest.mark.parametrize("kind", ["2-D", "4-D", "4-D additive"])
def test_all_that_a_device_mask_says_is_three_kernels(kind, segment, cuda):
    real = torch.rand(16, 300, device=cuda) < 0.5
    mask = real if kind == "2-D" else four(real.cpu()).to(cuda)
    if kind == "4-D additive":
        mask = additive(mask, torch.bfloat16, float("-inf"))
    ids = torch.arange(16 * 300, device=cuda).view(16, 300)
    names = "lengths cu_seqlens cu_seqlens_padded cu_seqlens_static position_ids "
    names += "seq_ids moe_padding_mask pads_between_sequences total_tokens num_sequences"

    def read() -> PackedLayout:
        layout = PackedLayout.from_padding_mask(mask, segment, total_tokens=16 * 304)
        for name in names.split():
            getattr(layout, name)
        return layout

    assert not waits(read)
    launched = kernels(read)
    assert 1 <= sum(launched.values()) <= 3, launched

    def move() -> None:
        layout = read()
        cuseq.unpack(layout, cuseq.pack(layout, ids))

    assert not waits(move)
    launched = kernels(move)
    assert sum(launched.values()) <= 5, ("one to pack and one to unpack", launched)


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "shape",
    [(12,), (3, 4), (2, 5), (1, 12), (6, 2), (2, 7, 3), (4, 3, 1)],
    ids=str,
)
def test_parts_that_are_not_those_of_all_ranks(shape, device):
    packed = PackedLayout.from_lengths([5, 3], segment_multiple=4, device=device)
    right = torch.zeros(2, 6, 3, device=device)
    plan = cp_plan(packed, 2, policy="zigzag")
    assert cp_join(packed, plan, right).shape == (12, 3)
    wrong = torch.zeros(shape, device=device)
    got = ", ".join(map(str, shape))
    for number, tensors in enumerate([(wrong,), (right, wrong)]):
        with pytest.raises(ValueError, match=rf"tensors\[{number}\].*2, 6.*\[{got}\]"):
            cp_join(packed, plan, *tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1.0, 1e-30, float("inf"), NAN], ids=str)
def test_an_additive_mask_that_adds_to_its_diagonal(value, dtype):
    seen = four(tensor_of([[1, 1, 0], [0, 1, 1]], torch.device("cpu")))
    mask = additive(seen, dtype, float("-inf"))
    PackedLayout.from_padding_mask(mask)
    mask[1, 0, 2, 2] = value
    with pytest.raises(ValueError, match="mask.*diagonal.*got"):
        PackedLayout.from_padding_mask(mask)


def test_an_additive_mask_is_read_on_its_diagonal_alone():
    """A bias on other elements (ALiBi) hides nothing."""
    seen = four(tensor_of([[1, 1, 0]], torch.device("cpu")))
    mask = additive(seen, torch.float32, float("-inf"))
    mask[0, 0, 1, 0] = 3.0
    assert PackedLayout.from_padding_mask(mask).lengths.tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("true_is_pad", [False, True])
def test_an_integer_mask_with_negative_elements(dtype, true_is_pad):
    """A 4-D one is an additive mask that was cast. In a 2-D one any bit makes a token real."""
    mask = torch.ones(2, 1, 3, 3, dtype=dtype)
    mask[1, 0, 2, 2] = -7
    with pytest.raises(ValueError, match="mask.*negative.*-7"):
        PackedLayout.from_padding_mask(mask, true_is_pad=true_is_pad)


# ---------------------------------------------------------------------------------- run_packed

RIGHT = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]


class Recorder(nn.Module):
    """Keeps its arguments; its output is computed from them."""

    def __init__(self, output: Callable[..., object] = lambda input_ids, **_: input_ids) -> None:
        super().__init__()
        self.output = output
        self.seen: dict[str, object] = {}

    def forward(self, **arguments):
        self.seen = arguments
        return self.output(**arguments)


def padded_batch(device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.arange(1, 13, device=device).view(3, 4)
    return ids, torch.tensor(RIGHT, device=device)


def test_shifted_labels_of_padding_are_ignored(device):
    ids, mask = padded_batch(device)
    model = Recorder()
    labels = ids + 100
    cuseq.run_packed(model, ids, mask, segment_multiple=4, shift_labels=labels, total_tokens=16)
    (row_of_labels,) = model.seen["shift_labels"].tolist()
    pads = model.seen["packed"].moe_padding_mask.tolist()
    assert pads == [slot is None for slot in row([4, 2, 3], 4, total_tokens=16).slots]
    assert [label for label, pad in zip(row_of_labels, pads, strict=True) if pad] == [IGNORED] * 7
    # Labels that the caller has shifted are unchanged on real tokens.
    kept = [label for label, pad in zip(row_of_labels, pads, strict=True) if not pad]
    assert kept == labels[mask.bool()].tolist()


def test_without_a_mask_the_model_gets_what_was_given(device):
    ids, _ = padded_batch(device)
    result = object()
    model = Recorder(lambda **_: result)
    given = {"labels": ids + 1, "position_ids": ids - 1, "use_cache": False}
    assert cuseq.run_packed(model, ids, None, **given) is result
    assert model.seen["input_ids"] is ids
    for name, value in given.items():
        assert model.seen[name] is value
    assert model.seen.get("packed") is None and model.seen.get("attention_mask") is None
    assert set(model.seen) <= {"input_ids", "packed", "attention_mask", *given}


@pytest.mark.parametrize("total_tokens", [None, 8])
@pytest.mark.parametrize("segment", [1, 4])
def test_a_batch_of_padding_gives_zeros(segment, total_tokens, device):
    ids, mask = padded_batch(device)
    weights = torch.randn(3, 4, 2, device=device, requires_grad=True)

    def output(input_ids, position_ids, weights, **_):
        hidden = weights + position_ids.unsqueeze(-1) + 1
        return hidden, (hidden.sum(-1),)

    out, (sums,) = cuseq.run_packed(
        Recorder(output),
        ids,
        torch.zeros_like(mask),
        segment_multiple=segment,
        total_tokens=total_tokens,
        weights=weights,
    )
    assert out.shape == (3, 4, 2) and sums.shape == (3, 4)
    assert not out.any() and not sums.any()
    out.sum().backward()
    assert not weights.grad.any()


def test_positions_of_the_caller_are_packed(device):
    ids, mask = padded_batch(device)
    own = torch.tensor([[5, 6, 7, 8], [40, 41, 9, 9], [0, 2, 4, 9]], device=device)
    model = Recorder(lambda position_ids, **_: position_ids)
    out = cuseq.run_packed(model, ids, mask, position_ids=own)
    assert model.seen["position_ids"].tolist() == [[5, 6, 7, 8, 40, 41, 0, 2, 4]]
    assert torch.equal(out, own * mask)
    cuseq.run_packed(model, ids, mask, segment_multiple=4, position_ids=own)
    real = ~model.seen["packed"].moe_padding_mask
    assert model.seen["position_ids"][0, real].tolist() == [5, 6, 7, 8, 40, 41, 0, 2, 4]


@pytest.mark.parametrize("shape", [(9,), (9, 2), (1, 8), (2, 9), (1, 10, 3), (3, 4), ()], ids=str)
def test_an_output_that_is_no_row_is_named(shape, device):
    ids, mask = padded_batch(device)
    right = torch.zeros(1, 9, 2, device=device)
    wrong = torch.zeros(shape, device=device)
    got = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"\[1, total_tokens.*9.*\[{got}\]"):
        cuseq.run_packed(Recorder(lambda **_: wrong), ids, mask)
    assert cuseq.run_packed(Recorder(lambda **_: right), ids, mask).shape == (3, 4, 2)


Pair = namedtuple("Pair", "hidden scores")


@pytest.mark.parametrize("kind", ["list", "tuple", "namedtuple", "nested"])
def test_sequences_of_outputs_come_back_as_such(kind, device):
    ids, mask = padded_batch(device)
    make = {
        "list": lambda *rows: list(rows),
        "tuple": lambda *rows: rows,
        "namedtuple": Pair,
        "nested": lambda first, second: [first, Pair(second, (first,))],
    }[kind]
    model = Recorder(lambda input_ids, **_: make(input_ids, -input_ids))
    out = cuseq.run_packed(model, ids, mask, segment_multiple=4)
    expected = make(ids * mask, -ids * mask)
    assert type(out) is type(expected) and len(out) == 2

    def check_same(actual, wanted) -> None:
        assert type(actual) is type(wanted)
        if isinstance(wanted, Tensor):
            assert torch.equal(actual, wanted)
        else:
            for one, other in zip(actual, wanted, strict=True):
                check_same(one, other)

    check_same(out, expected)
    if kind == "namedtuple":
        assert torch.equal(out.hidden, expected.hidden)
