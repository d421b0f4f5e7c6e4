"""The pure metadata ops against loops, on every device."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DTYPES, make_lengths, packings

import cuseq

INT32_MAX = 2**31 - 1
ops = torch.ops.cuseq

# Lengths [2, 3] in a row of 6 tokens: the example of the docstrings.
LITERAL = {
    "cu_seqlens": ([0, 2, 5], lambda lengths: cuseq.ops.cu_seqlens(lengths)),
    "max_seqlen": (3, lambda lengths: cuseq.ops.max_seqlen(lengths)),
    "last_token_indices": ([1, 4], lambda lengths: cuseq.ops.last_token_indices(lengths)),
    "position_ids": ([0, 1, 0, 1, 2, 0], lambda lengths: cuseq.ops.position_ids(lengths, 6)),
    "seq_ids": ([0, 0, 1, 1, 1, 2], lambda lengths: cuseq.ops.seq_ids(lengths, 6)),
}
PER_LENGTHS = ("cu_seqlens", "max_seqlen", "last_token_indices")
PER_TOKEN = ("position_ids", "seq_ids")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(result: torch.Tensor, expected, device: torch.device) -> None:
    assert result.dtype == torch.int32
    assert result.device == device
    assert result.is_contiguous()
    assert result.tolist() == expected


def check_lengths_ops(lengths: torch.Tensor, total_tokens: int) -> None:
    values, device = lengths.tolist(), lengths.device
    for name in PER_LENGTHS:
        check(getattr(ops, name)(lengths), getattr(reference, name)(values), device)
    for name in PER_TOKEN:
        expected = getattr(reference, name)(values, total_tokens)
        check(getattr(ops, name)(lengths, total_tokens), expected, device)
    assert cuseq.ops.max_seqlen_sync(lengths) == reference.max_seqlen(values)
    offsets = cuseq.ops.cu_seqlens(lengths)
    *found, is_pad = ops.token_metadata(offsets, total_tokens)
    for result, name in zip(found, PER_TOKEN, strict=True):
        check(result, getattr(reference, name)(values, total_tokens), device)
    assert is_pad.tolist() == [False] * sum(values) + [True] * (total_tokens - sum(values))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LITERAL)
def test_literal_case(name, dtype, device):
    expected, call = LITERAL[name]
    check(call(torch.tensor([2, 3], dtype=dtype, device=device)), expected, device)


@pytest.mark.kernels
def test_literal_case_of_the_other_ops(device):
    lengths = torch.tensor([2, 3], device=device)
    longest = cuseq.ops.max_seqlen_sync(lengths)
    assert type(longest) is int and longest == 3

    offsets = cuseq.ops.cu_seqlens(lengths)
    positions, segments, is_pad = ops.token_metadata(offsets, 6)
    check(positions, [0, 1, 0, 1, 2, 0], device)
    check(segments, [0, 0, 1, 1, 1, 2], device)
    assert is_pad.tolist() == [False] * 5 + [True]
    padded = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    positions, segments, is_pad = ops.token_metadata(offsets, 9, padded)
    check(positions, [0, 1, 2, 3, 0, 1, 2, 3, 0], device)
    check(segments, [0, 0, 0, 0, 1, 1, 1, 1, 2], device)
    assert is_pad.tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2

    own, static, meta = ops.layout_metadata(lengths, 6, 4, False)
    check(own, [2, 3], device)
    check(static, [0, 2, 5, 5, 5], device)
    check(meta, [2, 3, 6, 5, 0, 1], device)
    for result, again in zip(
        (own, static, meta), ops.layout_metadata(offsets, 6, 4, True), strict=True
    ):
        check(again, result.tolist(), device)

    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool, device=device)
    check(cuseq.ops.lengths_from_padding_mask(mask), [2, 3], device)

    offsets, count = cuseq.ops.cu_seqlens_from_position_ids(
        torch.tensor([0, 1, 0, 1, 2], device=device), max_seqs=3
    )
    check(offsets, [0, 2, 5, 5], device)
    check(count, [2], device)


@given(packing=packings(), dtype=st.sampled_from(DTYPES), strided=st.booleans())
def test_any_packing(packing, dtype, strided, device):
    lengths, total_tokens = packing
    check_lengths_ops(make_lengths(lengths, dtype, device, strided), total_tokens)


@pytest.mark.parametrize(
    "lengths",
    [
        [i % 7 for i in range(100_000)],
        [1] * 100_000,
        [0] * 100_000,
        [0] * 50_000 + [70_000] + [0] * 49_999,
    ],
    ids=["mixed", "ones", "empty", "one giant"],
)
def test_hundred_thousand_sequences(lengths, device):
    check_lengths_ops(torch.tensor(lengths, device=device), sum(lengths) + 3)


@pytest.mark.parametrize("size", [31, 32, 33, 255, 256, 1023, 1024, 1025, 8191, 8192, 8193, 16385])
def test_sizes_around_those_of_blocks(size, device):
    check_lengths_ops(torch.tensor([2] + [1] * (size - 1), device=device), size + 1)
    check_lengths_ops(torch.tensor([size - 1, 1], device=device), size)


def test_a_total_at_the_limit(device):
    lengths = torch.tensor([2**30, 2**30 - 1], dtype=torch.int32, device=device)
    assert cuseq.ops.cu_seqlens(lengths).tolist() == [0, 2**30, INT32_MAX]
    assert cuseq.ops.last_token_indices(lengths).tolist() == [2**30 - 1, INT32_MAX - 1]
    one = torch.tensor([INT32_MAX], device=device)
    assert cuseq.ops.max_seqlen_sync(one) == INT32_MAX


def far_apart(shape, stride, dtype, device, tmp_path, monkeypatch) -> torch.Tensor:
    """Return a tensor whose offsets need 64 bits; on the CPU its memory is a sparse file."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if device.type == "cuda":
        storage = torch.empty(size, dtype=dtype, device=device)
    else:
        path = str(tmp_path / "holes")
        storage = torch.from_file(path, shared=True, size=size, dtype=dtype)
    return storage.as_strided(shape, stride)


@pytest.mark.parametrize("far", [2**31 + 8])
def test_elements_past_2_to_the_31(far, device, tmp_path, monkeypatch):
    memory = (device, tmp_path, monkeypatch)
    lengths = far_apart((2,), (far,), torch.int32, *memory)
    lengths.copy_(torch.tensor([2, 3]))
    check_lengths_ops(lengths, 6)

    mask = far_apart((2, 2), (far, 1), torch.uint8, *memory)
    mask.copy_(torch.tensor([[1, 0], [1, 1]]))
    assert cuseq.ops.lengths_from_padding_mask(mask).tolist() == [1, 2]

    positions = far_apart((2, 2), (far, 1), torch.int32, *memory)
    positions.copy_(torch.tensor([[0, 1], [0, 0]]))
    offsets, count = cuseq.ops.cu_seqlens_from_position_ids(positions)
    assert (offsets.tolist(), count.tolist()) == ([0, 2, 3, 4, 4], [3])


@pytest.mark.slow
def test_the_longest_row(cuda, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    lengths = torch.tensor([2**30, 2**30 - 2], device=cuda)
    where = [2**30 - 1, 2**30, INT32_MAX - 2, INT32_MAX - 1]
    positions = cuseq.ops.position_ids(lengths, INT32_MAX)
    assert [positions[i].item() for i in where] == [2**30 - 1, 0, 2**30 - 3, 0]
    del positions
    segments = cuseq.ops.seq_ids(lengths, INT32_MAX)
    assert [segments[i].item() for i in where] == [0, 1, 1, 2]


def test_outputs_are_fresh(device):
    lengths = torch.tensor([2, 3], dtype=torch.int32, device=device)
    calls = [(getattr(ops, name), (lengths,)) for name in PER_LENGTHS]
    calls += [(getattr(ops, name), (lengths, 6)) for name in PER_TOKEN]
    for op, args in calls:
        first = op(*args)
        expected = first.tolist()
        first.fill_(-7)
        assert lengths.tolist() == [2, 3]
        assert op(*args).tolist() == expected
    own, *_ = ops.layout_metadata(lengths, 6, 4, False)
    own.fill_(-7)
    assert lengths.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*PER_LENGTHS, "max_seqlen_sync", *PER_TOKEN])
def test_a_negative_length_is_named(name, dtype):
    rest = (9,) if name in PER_TOKEN else ()
    with pytest.raises(ValueError, match=r"lengths\[2\] = -3"):
        getattr(cuseq.ops, name)(torch.tensor([4, 1, -3, -5], dtype=dtype), *rest)


@pytest.mark.parametrize("name", [*PER_LENGTHS, *PER_TOKEN])
@pytest.mark.parametrize(
    ("lengths", "index", "value"),
    [
        ([1, INT32_MAX], 1, INT32_MAX),
        ([2**30, 2**30], 1, 2**30),
        ([0, 2**31], 1, 2**31),
        ([2**63 - 1, 2**63 - 1], 0, 2**63 - 1),
    ],
)
def test_overflow_is_an_error(name, lengths, index, value):
    rest = (9,) if name in PER_TOKEN else ()
    with pytest.raises(ValueError, match=rf"2\^31 - 1.*lengths\[{index}\] = {value}"):
        getattr(cuseq.ops, name)(torch.tensor(lengths), *rest)


@pytest.mark.parametrize("name", [*PER_LENGTHS, *PER_TOKEN])
def test_wrong_lengths_are_refused(name, device):
    op = getattr(cuseq.ops, name)
    rest = (9,) if name in PER_TOKEN else ()
    for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
        with pytest.raises(TypeError, match="lengths must be int32 or int64"):
            op(torch.ones(2, device=device).to(dtype), *rest)
    for shape in ((), (2, 2)):
        with pytest.raises(ValueError, match="lengths must have one dimension"):
            op(torch.ones(shape, dtype=torch.int32, device=device), *rest)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_wrong_totals_are_refused(name):
    op, lengths = getattr(cuseq.ops, name), torch.tensor([2, 3])
    with pytest.raises(ValueError, match="lengths must sum to at most total_tokens = 4, got 5"):
        op(lengths, 4)
    for total in (-1, 2**31):
        with pytest.raises(ValueError, match=f"total_tokens.*got {total}"):
            op(lengths, total)


MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_each_kind_of_padding(dtype, device):
    right, left, holes = [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]
    rows = [right, left, holes, [0, 0, 0, 0], [1, 1, 1, 1]]
    mask = torch.tensor(rows, dtype=dtype, device=device)
    check(cuseq.ops.lengths_from_padding_mask(mask), [3, 2, 2, 0, 4], device)


@given(
    rows=st.integers(0, 5).flatmap(
        lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width))
    ),
    dtype=st.sampled_from(MASK_DTYPES),
    transposed=st.booleans(),
)
def test_any_padding(rows, dtype, transposed, device):
    mask = torch.tensor(rows, dtype=dtype, device=device).reshape(len(rows), -1 if rows else 4)
    if transposed:
        mask = mask.t().contiguous().t()
    check(
        cuseq.ops.lengths_from_padding_mask(mask), reference.lengths_from_padding_mask(rows), device
    )


def test_wide_masks(device):
    mask = torch.rand(3, 5000, device=device) < 0.5
    for seen in (mask, mask[:, ::3], mask[:1].expand(4, -1)):
        check(cuseq.ops.lengths_from_padding_mask(seen), seen.sum(1).tolist(), device)


@pytest.mark.parametrize(
    ("dtype", "real"), [(torch.int16, 256), (torch.int32, -(2**31)), (torch.int64, 2**40)]
)
def test_any_number_but_zero_is_real(dtype, real, device):
    mask = torch.tensor([[real, 0, -1]], dtype=dtype, device=device)
    check(cuseq.ops.lengths_from_padding_mask(mask), [2], device)


def test_wrong_masks_are_refused(device):
    with pytest.raises(TypeError, match="mask must be bool or an integer type.*torch.float32"):
        cuseq.ops.lengths_from_padding_mask(torch.ones(2, 3, device=device))
    for shape in ((3,), (2, 1, 3, 3)):
        with pytest.raises(ValueError, match=r"mask must have shape \[batch, seqlen\]"):
            cuseq.ops.lengths_from_padding_mask(torch.ones(shape, dtype=torch.bool, device=device))


def check_position_ids(rows, device, *, dtype=torch.int64, max_seqs=None, transposed=False):
    tensor = torch.tensor(rows, dtype=dtype, device=device).reshape(len(rows), -1 if rows else 0)
    if transposed:
        tensor = tensor.t().contiguous().t()
    capacity = tensor.numel() if max_seqs is None else max_seqs
    offsets, count = cuseq.ops.cu_seqlens_from_position_ids(tensor, max_seqs)
    expected, expected_count = reference.cu_seqlens_from_position_ids(rows, capacity)
    check(offsets, expected, device)
    check(count, [expected_count], device)


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([[0, 1, 2, 0, 1]], [3, 2]),
        ([[0, 0, 0]], [1, 1, 1]),
        ([[0, 0, 1, 0]], [1, 2, 1]),
        ([[5, 6, 7, 0, 1]], [3, 2]),  # a document that continues from the row before
        ([[5, 6, 9, 10]], [2, 2]),
        ([[3, 2, 1]], [1, 1, 1]),
        ([[0, 1, 2], [3, 4, 0]], [3, 2, 1]),  # rows are separate, whatever the numbers
        ([[0], [1], [2]], [1, 1, 1]),
    ],
)
def test_where_positions_restart(rows, lengths, device):
    assert reference.lengths_from_position_ids(rows) == lengths
    check_position_ids(rows, device)


@given(
    packing=packings(),
    rows=st.integers(1, 3),
    first=st.sampled_from([0, 0, 3]),
    dtype=st.sampled_from(DTYPES),
    max_seqs=st.sampled_from([None, 0, 1, 3, 40]),
    transposed=st.booleans(),
)
def test_any_positions(packing, rows, first, dtype, max_seqs, transposed, device):
    positions = [first + position for position in reference.position_ids(*packing)]
    check_position_ids(
        [positions] * rows, device, dtype=dtype, max_seqs=max_seqs, transposed=transposed
    )


@pytest.mark.kernels
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12_289])
def test_positions_around_the_size_of_tiles(size, device):
    restarts_everywhere = [0] * size
    check_position_ids([restarts_everywhere], device)
    check_position_ids([[i % 700 for i in range(size)]] * 2, device, max_seqs=21)


def test_planes_that_differ(device):
    # Two documents: 2 text tokens, an image of 2 x 3 patches, 2 text tokens; then 1 and 3 of text.
    time = [0, 1, *[2] * 6, 5, 6, 0, 0, 1, 2]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 0, 1, 2]
    other = [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    planes = torch.tensor([time, height, other], device=device).unsqueeze(1)
    results = [cuseq.ops.cu_seqlens_from_position_ids(planes, 4, plane) for plane in range(3)]
    assert [offsets.tolist() for offsets, _ in results] == [
        [0, 10, 11, 14, 14],
        [0, 10, 11, 14, 14],
        [0, 4, 7, 14, 14],
    ]
    assert [count.tolist() for _, count in results] == [[3], [3], [3]]


@given(
    planes=st.lists(
        st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=2, max_size=2),
        min_size=3,
        max_size=3,
    )
)
def test_any_numbers_as_positions(planes, device):
    tensor = torch.tensor(planes, device=device)
    for plane, rows in enumerate(planes):
        check_position_ids(rows, device)
        offsets, count = cuseq.ops.cu_seqlens_from_position_ids(tensor, plane=plane)
        expected, expected_count = reference.cu_seqlens_from_position_ids(rows, 10, is_plane=True)
        check(offsets, expected, device)
        check(count, [expected_count], device)


def test_wrong_positions_are_refused(device):
    find = cuseq.ops.cu_seqlens_from_position_ids
    ids = torch.zeros(3, 1, 4, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="position_ids must be int32 or int64"):
        find(ids.float(), plane=0)
    with pytest.raises(ValueError, match="plane"):
        find(ids)
    for plane in (-1, 3):
        with pytest.raises(ValueError, match=rf"plane.*got {plane}"):
            find(ids, plane=plane)
    with pytest.raises(ValueError, match="plane = 0"):
        find(ids[0], plane=0)
    with pytest.raises(ValueError, match="position_ids"):
        find(ids[None], plane=0)
    with pytest.raises(ValueError, match="max_seqs.*got -1"):
        find(ids[0], -1)


def test_runs_on_the_device_of_its_input(second_gpu):
    with torch.cuda.device(0):
        check_lengths_ops(torch.tensor([2, 0, 3], device=second_gpu), 6)
        assert torch.cuda.current_device() == 0


def test_runs_on_the_current_stream(cuda):
    lengths = torch.zeros(2, dtype=torch.int32, device=cuda)
    new = torch.tensor([2, 3], dtype=torch.int32, device=cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        lengths.copy_(new)
        # On another stream they would read the zeros from before the sleep.
        offsets, positions = cuseq.ops.cu_seqlens(lengths), cuseq.ops.position_ids(lengths, 6)
    side.synchronize()
    assert offsets.tolist() == [0, 2, 5]
    assert positions.tolist() == [0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("max_seqs", [2**31, 2**63 - 1, -1])
def test_max_seqs_that_no_offset_can_count_is_refused(max_seqs):
    lengths = torch.tensor([2, 3])
    calls = (
        lambda: torch.ops.cuseq.layout_metadata(lengths, 6, max_seqs, False),
        lambda: torch.ops.cuseq.segment_metadata(lengths, 8, max_seqs, 4),
        lambda: torch.ops.cuseq.cu_seqlens_from_position_ids(lengths, max_seqs),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"max_seqs must lie in \[0, 2\^31 - 1\], got {max_seqs}"
        ):
            call()
