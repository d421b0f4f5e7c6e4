"""Test wrong values that only a GPU knows: kernels stay in bounds, and the host raises later.

Only compute-sanitizer can check the first, so those tests are marked `kernels`; without it they
check that no result leads its reader out of bounds.
"""

from __future__ import annotations

import pytest
import torch

import cuseq

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)
TOTAL = 70

ops = torch.ops.cuseq

BAD_LENGTHS = [
    [-1],
    [5, -3, 4],
    [INT32_MIN, INT32_MAX],
    [INT32_MAX] * 5,
    [30, 41],
    [0, 0, 71, 0],
    [INT32_MIN] * 3,
    [1, INT32_MAX, 1],
    [3, -1] * 700,
    [INT32_MAX] * 9000,
]
BAD_LONG_LENGTHS = [
    [INT64_MAX] * 3,
    [INT64_MIN] * 3,
    [INT64_MIN, INT64_MAX, 2],
    [2**32, 2],
    [2**32 - 1, 2**32 + 1],
    [2**62] * 9000,
]
BAD_OFFSETS = [
    [1, 5],
    [-1, 5],
    [0, 9, 4, 20],
    [0, INT32_MAX],
    [0, INT32_MIN, INT32_MAX],
    [INT32_MAX, 0, INT32_MAX, 0],
    [0, 71],
    [0, 5, -5, 71, 70],
    [(i * 7919) % 200 - 60 for i in range(3000)],
]


def on(device, values, dtype=None) -> torch.Tensor:
    fits = all(INT32_MIN <= value <= INT32_MAX for value in values)
    return torch.tensor(values, dtype=dtype or (torch.int32 if fits else torch.int64)).to(device)


def within(tensor: torch.Tensor, low: int, high: int) -> bool:
    return bool(((tensor >= low) & (tensor <= high)).all())


def ascends(tensor: torch.Tensor) -> bool:
    return bool((tensor.long().diff() >= 0).all())


@pytest.fixture(params=range(len(BAD_LENGTHS) + len(BAD_LONG_LENGTHS)))
def bad_lengths(request, cuda) -> torch.Tensor:
    return on(cuda, [*BAD_LENGTHS, *BAD_LONG_LENGTHS][request.param])


@pytest.mark.kernels
def test_lengths_cannot_lead_out_of_bounds(bad_lengths):
    n_seqs = bad_lengths.numel()
    for lengths in (bad_lengths, bad_lengths.long(), torch.stack([bad_lengths] * 2, 1)[:, 0]):
        offsets = cuseq.ops.cu_seqlens(lengths)
        assert offsets[0].item() == 0
        assert ascends(offsets)
        assert within(cuseq.ops.max_seqlen(lengths), 0, INT32_MAX)
        assert within(cuseq.ops.last_token_indices(lengths), -1, INT32_MAX - 1)
        segments = cuseq.ops.seq_ids(lengths, TOTAL)
        assert ascends(segments)
        assert within(segments, 0, n_seqs)
        assert within(cuseq.ops.position_ids(lengths, TOTAL), 0, TOTAL - 1)
        own, static, meta = ops.layout_metadata(lengths, TOTAL, n_seqs + 2, False)
        assert within(own, 0, TOTAL)
        assert ascends(static)
        assert within(static, 0, TOTAL)
        assert within(meta[:4], 0, max(TOTAL, n_seqs))


@pytest.mark.kernels
@pytest.mark.parametrize("values", BAD_OFFSETS)
def test_offsets_cannot_lead_out_of_bounds(values, cuda):
    offsets = on(cuda, values)
    n_seqs = len(values) - 1
    _, static, meta = ops.layout_metadata(offsets, TOTAL, n_seqs + 2, True)
    assert ascends(static)
    assert within(static, 0, TOTAL)
    assert within(meta[:4], 0, max(TOTAL, n_seqs))
    # These two accept any int32 offsets: their results are meaningless, but fully written.
    _, segments, _ = ops.token_metadata(offsets, TOTAL)
    assert within(segments, 0, n_seqs)
    labels = torch.arange(TOTAL, device=cuda)
    for shift in (0, 1, 3):
        masked = ops.mask_boundary_labels(labels, offsets, shift)
        assert bool(((masked == labels) | (masked == -100)).all())


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "last"])
@pytest.mark.parametrize("values", BAD_OFFSETS)
def test_offsets_cannot_lead_a_reduction_out_of_bounds(values, kind, cuda):
    offsets, rows = on(cuda, values, torch.int32), torch.ones(TOTAL, 3, device=cuda)
    out, which = ops.segment_reduce(rows, offsets, kind)
    assert within(which, -1, TOTAL - 1)
    grads = ops.segment_reduce_backward(out, which, torch.float32, TOTAL, offsets, kind)
    assert grads.shape == rows.shape


@pytest.mark.kernels
@pytest.mark.parametrize("order", ["channels", "tokens"])
@pytest.mark.parametrize("values", BAD_OFFSETS)
def test_offsets_cannot_lead_a_convolution_out_of_bounds(values, order, cuda):
    offsets = on(cuda, values)
    # Values next to x that the convolution would show if it read them.
    around = torch.full((TOTAL + 20, 16), float("nan"), device=cuda)
    x = around[10:-10]
    x.copy_(torch.randn(TOTAL, 16))
    if order == "tokens":
        around = torch.full((16, TOTAL + 20), float("nan"), device=cuda)
        around[:, 10:-10] = x.t()
        x = around[:, 10:-10].t()
    weight, states = (
        torch.randn(16, 4, device=cuda),
        torch.randn(len(values) - 1, 16, 3, device=cuda),
    )
    for padded in (None, offsets):
        for initial in (None, states):
            out, final = ops.causal_conv1d(
                x, weight, None, offsets, padded, None, initial, True, True
            )
            assert out.isfinite().all() and final.isfinite().all()
            grads = ops.causal_conv1d_backward(
                torch.ones_like(out), x, weight, None, offsets, padded, None, initial, True, final
            )
            assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_cannot_lead_out_of_bounds(dtype, cuda):
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.min, 0, -1, limits.max, limits.max, limits.min]
    ids = torch.tensor(values * 600, dtype=dtype, device=cuda)
    tokens = ids.numel()
    for max_seqs in (None, 0, 1, tokens + 5):
        for shape in ((tokens,), (8, -1)):
            offsets, count = cuseq.ops.cu_seqlens_from_position_ids(ids.reshape(shape), max_seqs)
            assert ascends(offsets)
            assert within(offsets, 0, tokens)
            assert offsets[-1].item() == tokens
            assert within(count, 1, tokens)
        cuseq.ops.cu_seqlens_from_position_ids(ids.reshape(2, 2, -1), max_seqs, 1)


@pytest.mark.kernels
@pytest.mark.parametrize("count", [-5, INT32_MIN, 3, INT32_MAX])
def test_a_count_cannot_lead_out_of_bounds(count, cuda):
    # num_seqs comes from another kernel: it may be larger than the offsets allow.
    own, static, _ = ops.layout_metadata(on(cuda, [0, 2, 5]), 6, 4, True, on(cuda, [count]))
    assert within(own, 0, 6)
    assert ascends(static)
    assert within(static, 0, 6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda d: cuseq.PackedLayout.from_lengths(on(d, [5, -3]), 9), "lengths.*negative"),
        (lambda d: cuseq.PackedLayout.from_lengths(on(d, [5, 6]), 9), "total_tokens = 9"),
        (lambda d: cuseq.PackedLayout.from_lengths(on(d, [2**40]), 9), "total_tokens = 9"),
        (lambda d: cuseq.PackedLayout.from_cu_seqlens(on(d, [1, 5]), 9), "cu_seqlens.*start at 0"),
        (lambda d: cuseq.PackedLayout.from_cu_seqlens(on(d, [5]), 9), "cu_seqlens.*start at 0"),
        (lambda d: cuseq.PackedLayout.from_cu_seqlens(on(d, [0, 5, 3]), 9), "cu_seqlens.*descend"),
        (lambda d: cuseq.PackedLayout.from_cu_seqlens(on(d, [0, 10]), 9), "total_tokens = 9"),
        (
            lambda d: cuseq.PackedLayout.from_position_ids(on(d, [0, 0, 0]), max_seqs=2),
            "max_seqs = 2",
        ),
    ],
    ids=["negative", "sum", "huge", "first", "first of none", "descends", "last", "capacity"],
)
@pytest.mark.parametrize(
    "use", ["max_seqlen", "num_real_tokens", "wait", "flash_kwargs", "pickle", "cu_seqlens on cpu"]
)
def test_the_first_use_of_a_host_value_raises(build, message, use, cuda):
    uses = {
        "max_seqlen": lambda layout: layout.max_seqlen,
        "num_real_tokens": lambda layout: layout.num_real_tokens,
        "wait": lambda layout: layout.wait(),
        "flash_kwargs": lambda layout: layout.flash_kwargs(),
        "pickle": lambda layout: layout.__reduce__(),
        "cu_seqlens on cpu": lambda layout: layout.to("cpu").max_seqlen,
    }
    layout = build(cuda)  # cannot know yet
    for _ in range(2):  # asking again does not succeed either
        with pytest.raises(ValueError, match=message):
            uses[use](layout)


CHECKED = """
import pytest, torch, cuseq
device = {device!r}
lengths = torch.tensor([5, -3], device=device)
offsets = torch.tensor([0, 5, 3], dtype=torch.int32, device=device)
late = torch.tensor([1, 5], dtype=torch.int32, device=device)
huge = torch.tensor([2**31 - 1, 1], device=device)
labels = torch.arange(9, device=device)
ops = torch.ops.cuseq
Layout = cuseq.PackedLayout
for call, message in [
    (lambda: cuseq.ops.cu_seqlens(lengths), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.max_seqlen(lengths), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.last_token_indices(lengths), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.position_ids(lengths, 9), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.seq_ids(lengths, 9), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.cached_position_ids(lengths, 9), r"lengths\\[1\\] = -3"),
    (lambda: cuseq.ops.seq_ids(lengths.abs(), 7), "total_tokens = 7, got 8"),
    (lambda: cuseq.ops.cu_seqlens(huge), r"2\\^31 - 1.*lengths\\[1\\] = 1"),
    (lambda: ops.token_metadata(offsets, 9), r"cu_seqlens\\[2\\] = 3"),
    (lambda: ops.mask_boundary_labels(labels, offsets), r"cu_seqlens\\[2\\] = 3"),
    (lambda: cuseq.data.mask_boundary_labels(labels, lengths), r"lengths\\[1\\] = -3"),
    (lambda: Layout.from_lengths(lengths, 9), r"lengths\\[1\\] = -3"),
    (lambda: Layout.from_cu_seqlens(offsets, 9), r"cu_seqlens\\[2\\] = 3"),
    (lambda: Layout.from_cu_seqlens(late, 9), r"cu_seqlens\\[0\\] = 1"),
    (lambda: Layout.from_position_ids(torch.zeros(3, dtype=torch.int32, device=device), max_seqs=2),
     "max_seqs = 2"),
]:
    with pytest.raises(ValueError, match=message):
        call()
print("all raised")
"""


def test_cuseq_check_raises_at_once(device, run_python):
    # On the CPU the same errors occur with or without it.
    result = run_python(CHECKED.format(device=str(device)), CUSEQ_CHECK="1")
    assert "all raised" in result.stdout, result.stderr
