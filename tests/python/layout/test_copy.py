"""Test PackedLayout.copy_: a layout that is filled again for the static inputs of a CUDA graph."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_no_sync import syncs_are_errors

import cuseq
from cuseq import PackedLayout
from cuseq.layout import StaticLayout
from cuseq.layout.records import tensors_of

MAX_SEQS = 6
STATIC = ("position_ids", "seq_ids", "moe_padding_mask", "seq_idx", "cu_seqlens_static")
TENSORS = (*STATIC, "lengths", "cu_seqlens", "cu_seqlens_padded", "cu_seqlens_recurrent")
NUMBERS = ("num_sequences", "max_seqlen", "num_real_tokens", "total_tokens", "max_seqlen_padded")

pairs = st.tuples(*[st.lists(st.integers(0, 5), min_size=1, max_size=MAX_SEQS)] * 2)


def assert_same(filled: PackedLayout, fresh: PackedLayout) -> None:
    """Check each property of a filled layout against a new layout of the same row."""
    for name in TENSORS:
        assert (name, getattr(filled, name).tolist()) == (name, getattr(fresh, name).tolist())
    for name in NUMBERS:
        assert (name, getattr(filled, name)) == (name, getattr(fresh, name))
    assert filled.host_meta.tolist() == fresh.host_meta.tolist()
    assert filled.chunk_indices(2).tolist() == fresh.chunk_indices(2).tolist()
    assert torch.equal(filled.dense_mask(), fresh.dense_mask())


@pytest.mark.kernels
@given(lengths=pairs, segment_multiple=st.sampled_from([1, 4]))
def test_a_filled_layout_equals_a_new_one(lengths, segment_multiple, device):
    def layout(of: list[int]) -> PackedLayout:
        return PackedLayout.from_lengths(
            of, 48, segment_multiple=segment_multiple, max_seqs=MAX_SEQS, device=device
        )

    first, second = (layout(of) for of in lengths)
    assert_same(first, layout(lengths[0]))  # makes every lazy field
    segments = first.segments
    static = {name: getattr(first, name) for name in STATIC}
    assert first.copy_(second) is first
    assert_same(first, layout(lengths[1]))
    assert_same(second, layout(lengths[1]))
    for name, tensor in static.items():
        assert getattr(first, name) is tensor, name
    assert first.segments is segments
    assert segments.cu_seqlens.tolist() == second.cu_seqlens_padded.tolist()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_layout_on_a_gpu_is_filled_from_the_host(cuda, pinned):
    options = {"total_tokens": 48, "segment_multiple": 4, "max_seqs": MAX_SEQS}
    packed = PackedLayout.from_lengths([3, 9], device=cuda, **options)
    assert_same(packed, packed)  # makes every lazy field
    static = {name: getattr(packed, name) for name in STATIC}
    packed.chunked(4)
    for lengths in ([7, 0, 5, 1], [20], [4, 4]):
        other = PackedLayout.from_lengths(lengths, **options)
        with syncs_are_errors():
            packed.copy_(other.pin_memory() if pinned else other)
        assert_same(packed, other.to(cuda))
        assert torch.equal(packed.chunked(4).lengths.cpu(), other.chunked(4).lengths)
        assert all(getattr(packed, name) is tensor for name, tensor in static.items())


@pytest.mark.parametrize("pinned", [False, True])
def test_other_kinds_on_a_gpu_are_filled_from_the_host(cuda, pinned):
    local, other = part([5, 3]), part([2, 6])
    tree, deep = (
        cuseq.PackedTree.from_sequences(sequences, total_tokens=16, max_seqs=8, max_depth=3).layout
        for sequences in ([[1, 2, 3], [1, 2, 4]], [[5, 6], [5, 7, 8], [5, 7, 9]])
    )
    for mine, row in ((local.to(cuda), other), (tree.to(cuda), deep)):
        mine.copy_(row.pin_memory() if pinned else row)
        assert torch.equal(mine.position_ids.cpu(), row.position_ids)
        fresh = tensors_of(row._on(cuda)._records)
        for path, tensor in tensors_of(mine._records).items():
            assert torch.equal(tensor, fresh[path]), path


@pytest.mark.parametrize("pinned", [False, True])
def test_a_padded_batch_on_a_gpu_is_filled_from_the_host(cuda, pinned):
    masks = [torch.tensor(rows) for rows in ([[1, 1, 0], [1, 0, 0]], [[0, 1, 1]] * 2)]
    first, second = (
        PackedLayout.from_padding_mask(mask, total_tokens=6, max_seqs=2) for mask in masks
    )
    static, ids = StaticLayout.like(first, cuda), torch.arange(6).view(2, 3)
    of_row = PackedLayout.from_lengths([1, 2], 6, max_seqs=2, device=cuda)
    for packed in (static, of_row):
        packed.copy_(second.pin_memory() if pinned else second)
        assert torch.equal(cuseq.pack(packed, ids.to(cuda)).cpu(), cuseq.pack(second, ids))


@pytest.mark.kernels
def test_layouts_of_padded_batches(device):
    masks = [
        torch.tensor(rows, device=device) for rows in ([[1, 1, 0], [1, 0, 0]], [[0, 1, 1]] * 2)
    ]
    first, second = (
        PackedLayout.from_padding_mask(mask, total_tokens=6, max_seqs=2) for mask in masks
    )
    ids = torch.arange(6, device=device).view(2, 3)
    slots = first.batch.slots
    first.copy_(second)
    assert torch.equal(cuseq.pack(first, ids), cuseq.pack(second, ids))
    assert first.batch.slots is slots


ROWS = (
    [[1, 1, 0], [1, 0, 0]],
    [[0, 1, 1], [0, 1, 1]],
    [[0, 0, 1], [1, 0, 1]],
    [[0, 1, 0], [1, 1, 1]],
)
WIDE = 7  # chunks of more tokens than the row has: the layout of chunks has the form of the row's


class Filled:
    """A layout, and the row that it should describe: lengths, and the mask of a batch or None."""

    def __init__(self, layout, row=None, whole=None):
        self.layout, self.own, self.whole = layout, row, whole

    @property
    def row(self):
        """The row of the layout itself, or chunks of the row that it is made of."""
        if self.whole is None:
            return self.own
        return [length for length in self.whole.row[0] if length], None

    def is_made_of(self, other):
        return self.whole is not None and (self.whole is other or self.whole.is_made_of(other))

    def check(self):
        lengths, mask = self.row
        assert self.layout.lengths.tolist() == lengths
        fresh = PackedLayout.from_lengths(lengths, 6)
        assert torch.equal(self.layout.position_ids, fresh.position_ids)
        assert torch.equal(self.layout.seq_ids, fresh.seq_ids)
        if mask is not None:
            ids = torch.arange(6).view(2, 3)
            row = cuseq.pack(self.layout, ids)[: sum(lengths)]
            assert row.tolist() == ids[torch.tensor(mask).bool()].tolist()


@given(st.data())
def test_fills_in_any_order(data):
    """Layouts of padded batches, of none, and of chunks are filled with each other."""
    pool = []
    for mask in ROWS[:2]:
        packed = PackedLayout.from_padding_mask(torch.tensor(mask), total_tokens=6, max_seqs=2)
        pool.append(Filled(packed, ([sum(row) for row in mask], mask)))
    for lengths in ([3, 2], [6, 0]):
        packed = PackedLayout.from_lengths(lengths, 6, max_seqs=2)
        pool.append(Filled(packed, (lengths, None)))
    for _ in range(data.draw(st.integers(1, 8))):
        first, second = (pool[data.draw(st.integers(0, len(pool) - 1))] for _ in range(2))
        what = data.draw(st.sampled_from(["fill", "fill", "chunk", "pack"]))
        if what == "chunk":
            layout = first.layout.chunked(WIDE)
            if all(layout is not one.layout for one in pool):
                pool.append(Filled(layout, whole=first))
        elif what == "pack":
            first.check()
        elif first is not second:
            lengths, mask = second.row
            shape = len(lengths), max(lengths, default=0)
            if second.layout.batch is not None:
                shape = tuple(second.layout.batch.tokens.shape)
            # Chunks, which are filled too, have no sequences without tokens.
            of_chunks = sum(length > 0 for length in lengths), max(lengths, default=0)
            fitting = [(first.layout.batch, shape)]
            fitting += [(one.layout.batch, of_chunks) for one in pool if one.is_made_of(first)]
            if any(one and tuple(one.tokens.shape) != theirs for one, theirs in fitting):
                with pytest.raises(ValueError, match="same padded batch"):
                    first.layout.copy_(second.layout)
                continue
            first.layout.copy_(second.layout)
            first.own, first.whole = (lengths, mask), None
        for one in pool:
            one.check()


def test_a_batch_filled_into_a_row_is_not_shared():
    first, second = (
        PackedLayout.from_padding_mask(torch.tensor(mask), total_tokens=6, max_seqs=2)
        for mask in ROWS[:2]
    )
    static = PackedLayout.from_lengths([3, 2], 6, max_seqs=2)
    ids = torch.arange(6).view(2, 3)
    expected = [cuseq.pack(packed, ids).tolist() for packed in (first, second)]
    static.copy_(first)
    assert cuseq.pack(static, ids).tolist() == expected[0]
    static.copy_(second)
    assert cuseq.pack(static, ids).tolist() == expected[1]
    assert cuseq.pack(first, ids).tolist() == expected[0]


@pytest.mark.parametrize("other", ["tree", "part"])
def test_a_batch_is_not_filled_with_another_kind(other):
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    packed = PackedLayout.from_padding_mask(mask, total_tokens=8)
    kinds = {
        "tree": cuseq.PackedTree.from_groups([[1]], [[[2], [3]]], total_tokens=8).layout,
        "part": part([5, 3]),
    }
    with pytest.raises(ValueError, match="other must have the same"):
        packed.copy_(kinds[other])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_layout_is_filled_with_its_own_chunks(depth):
    packed = PackedLayout.from_lengths([3, 0, 2], 6, max_seqs=3)
    chunks = packed
    for _ in range(depth):
        chunks = chunks.chunked(WIDE)
    assert packed.copy_(chunks) is packed
    assert packed.lengths.tolist() == chunks.lengths.tolist() == [3, 2]
    assert packed.chunked(WIDE).lengths.tolist() == [3, 2]


def test_chunks_that_are_filled_leave_their_layout():
    packed, other = (PackedLayout.from_lengths(of, 6, max_seqs=3) for of in ([3, 2], [1, 5]))
    chunks = packed.chunked(WIDE)
    chunks.copy_(other)
    assert chunks.lengths.tolist() == [1, 5]
    assert packed.chunked(WIDE).lengths.tolist() == [3, 2]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_of_another_padded_batch_are_refused_before_anything_is_written(depth):
    """Also those of a layout of chunks, which is filled with its layout."""
    packed, other, same = (
        PackedLayout.from_lengths(of, 6, max_seqs=3) for of in ([3, 1], [2, 1], [1, 3])
    )
    chunks = packed
    for size in (5, 4)[:depth]:
        chunks = chunks.chunked(size)
    chunks.batch_rows()
    before = [one.cu_seqlens_static.clone() for one in (packed, chunks)]
    with pytest.raises(ValueError, match=r"other must have the same padded batch"):
        packed.copy_(other)
    for one, offsets in zip((packed, chunks), before, strict=True):
        assert torch.equal(one.cu_seqlens_static, offsets) and one.lengths.tolist() == [3, 1]
    slots = chunks.batch_rows().slots
    packed.copy_(same)
    assert chunks.lengths.tolist() == [1, 3] and chunks.batch_rows().slots is slots
    expected = PackedLayout.from_lengths([1, 3], 6, max_seqs=3).batch_rows().slots
    assert torch.equal(slots, expected)


def test_a_layout_keeps_few_lists_of_spans():
    packed = PackedLayout.from_lengths([200], 200)
    expected = packed.dense_mask(spans=[(3, 9)]).clone()
    for number in range(200):
        packed.dense_mask(spans=[(number // 2, number // 2 + 1 + number % 2)])
        packed.chunk_indices(number + 1)
    assert len(packed._derived.spans) <= 16 and len(packed._derived.chunks) <= 16
    assert torch.equal(packed.dense_mask(spans=[(3, 9)]), expected)


def test_masks_and_copies_of_the_old_row_are_dropped(fresh_cache):
    packed, other = (PackedLayout.from_lengths(of, 6, max_seqs=3) for of in ([2, 3], [6]))
    old = weakref.ref(packed.dense_mask())
    elsewhere = packed.to("meta")
    packed.copy_(other)
    gc.collect()
    assert old() is None
    assert packed.to("meta") is not elsewhere
    with pytest.raises(NotImplementedError):  # it stays the copy of the old row, without data
        elsewhere.to("cpu")


def test_a_graph_that_replays_other_lengths_takes_none_of_now(cuda):
    packed = StaticLayout.like(PackedLayout.from_lengths([2, 3], 8, max_seqs=3), cuda)
    names = ("lengths", "cu_seqlens", "num_sequences", "max_seqlen", "num_real_tokens")
    for name in names:
        getattr(packed, name)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for name in names:
            with pytest.raises(RuntimeError, match="would be constants of the CUDA graph"):
                getattr(packed, name)
        with pytest.raises(RuntimeError, match="would be constants of the CUDA graph"):
            packed.flash_kwargs()


@pytest.mark.parametrize("kind", ["meta", "cuda"])
def test_a_moved_copy_that_is_filled_leaves_its_origin(kind, request):
    elsewhere = request.getfixturevalue("cuda") if kind == "cuda" else torch.device("meta")
    origin, other = (PackedLayout.from_lengths(of, 6, max_seqs=3) for of in ([2, 3], [6]))
    moved = origin.to(elsewhere)
    moved.copy_(other.to(elsewhere))
    assert moved.max_seqlen == 6
    assert origin.to(elsewhere) is not moved
    assert origin.to(elsewhere).max_seqlen == origin.max_seqlen == 3
    if kind == "cuda":
        assert moved.to("cpu").lengths.tolist() == [6]


def test_layouts_of_longer_rows_stay(device):
    packed, other = (
        PackedLayout.from_lengths(of, 6, max_seqs=3, device=device) for of in ([2, 3], [6])
    )
    longer = packed.with_total_tokens(8)
    packed.copy_(other)
    assert longer.cu_seqlens_static.tolist() == [0, 2, 5, 5]
    longer.copy_(PackedLayout.from_lengths([8], 8, max_seqs=3, device=device))
    assert packed.cu_seqlens_static.tolist() == [0, 6, 6, 6]


def test_lengths_that_only_the_device_knew(device):
    packed, other = (
        PackedLayout.from_lengths(torch.tensor(of, device=device), 6, max_seqs=3)
        for of in ([2, 3], [1, 1, 2])
    )
    packed.copy_(other)
    assert_same(packed, PackedLayout.from_lengths([1, 1, 2], 6, max_seqs=3, device=device))


def part(lengths: list[int], rank: int = 0, group: str | None = None) -> PackedLayout:
    """Return a rank's part of a row of 8 tokens."""
    packed = PackedLayout.from_lengths(lengths, 8, max_seqs=3)
    plan = cuseq.distributed.cp_plan(packed, 2, policy="contiguous")
    return cuseq.distributed.cp_partition(packed, plan, rank, group=group)[0]


def test_parts_of_rows():
    local, other = part([5, 3]), part([2, 6])
    positions, rows = local.position_ids, local.part.rows
    local.copy_(other)
    assert local.position_ids is positions
    assert positions.tolist() == [0, 1, 0, 1]
    assert torch.equal(rows, other.part.rows)
    assert torch.equal(local.part.meta, other.part.meta)


def packed_of(*lengths: int, **options) -> PackedLayout:
    return PackedLayout.from_lengths(list(lengths), **{"total_tokens": 8, "max_seqs": 3} | options)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ([2, 3], TypeError, "other must be a PackedLayout, got list"),
        (
            packed_of(2, total_tokens=9),
            ValueError,
            "other must have the same total_tokens: 8, got 9",
        ),
        (packed_of(2, max_seqs=4), ValueError, "other must have the same max_seqs: 3, got 4"),
        (packed_of(2).to("meta"), ValueError, "other must be on cpu, got one on meta"),
        (
            packed_of(2, segment_multiple=2),
            ValueError,
            "other must have the same padding between sequences: False, got True",
        ),
        (
            PackedLayout.from_padding_mask(
                torch.ones(2, 4, dtype=torch.int64), total_tokens=8, max_seqs=3
            ),
            ValueError,
            r"other must have the same padded batch: \(3, 4\), got \(2, 4\)",
        ),
    ],
)
def test_other_kinds_are_refused_before_anything_is_written(other, error, message):
    packed = PackedLayout.from_padding_mask(
        torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]), total_tokens=8, max_seqs=3
    )
    before = packed.cu_seqlens_static.tolist()
    with pytest.raises(error, match=message):
        packed.copy_(other)
    assert packed.cu_seqlens_static.tolist() == before


@pytest.mark.parametrize("other", [part([2, 6], group="cp"), packed_of(2, total_tokens=4)])
def test_parts_of_other_groups_are_refused(other):
    with pytest.raises(ValueError, match="other must have the same"):
        part([5, 3]).copy_(other)


def test_an_edit_in_place_by_copy_is_no_edit_to_check(run_python):
    code = """
import cuseq
packed, other = (cuseq.PackedLayout.from_lengths(of, 6, max_seqs=3) for of in ([2, 3], [6]))
packed.position_ids, packed.seq_idx
packed.copy_(other).dense_mask()
packed.copy_(other).copy_(other)
assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5]
"""
    done = run_python(code, CUSEQ_CHECK="1")
    assert done.returncode == 0, done.stderr


def test_a_captured_graph_reads_the_new_row(cuda):
    packed, other = (
        PackedLayout.from_lengths(of, 64, max_seqs=8, device=cuda) for of in ([20, 30], [1, 9, 54])
    )
    q, k = (torch.randn(64, 2, 16, device=cuda) for _ in range(2))
    cos, sin = cuseq.rope_table(64, 16, device=cuda)
    packed.position_ids  # noqa: B018  outside the graph, so that copy_ fills it
    cuseq.apply_rope(q, k, cos, sin, packed=packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = cuseq.apply_rope(q, k, cos, sin, packed=packed)
        positions = packed.position_ids + 0
        with pytest.raises(RuntimeError, match="before the capture"):
            packed.copy_(other)
    packed.copy_(other)
    graph.replay()
    for of_graph, of_now in zip(
        turned, cuseq.apply_rope(q, k, cos, sin, packed=other), strict=True
    ):
        assert torch.equal(of_graph, of_now)
    assert positions.tolist() == other.position_ids.tolist()
