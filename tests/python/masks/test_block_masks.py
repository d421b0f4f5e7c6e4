"""Test FlexAttention's block masks: block by block against create_block_mask, and in attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import WINDOWS, Pack, masked_attention, masked_packs
from test_attention import relative
from test_masks import (
    attention_inputs,
    make_layout,
    physical,
    row_blocks,
    spans_tensor,
    visible,
)
from test_no_sync import waits
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import cuseq
from cuseq import PackedLayout
from cuseq.layout import StaticLayout

ops = torch.ops.cuseq

SIDES = ("kv", "full_kv", "q", "full_q")
TABLES = [f"{side}_{table}" for side in SIDES for table in ("num_blocks", "indices")]
BLOCK_SIZES = [128, 64, 32, (128, 64), (64, 128), (16, 48)]
PACKS = [
    pytest.param(Pack([100, 28, 130], 300, None, [(20, 90), (130, 256)]), id="ragged"),
    pytest.param(Pack([128, 128], 256, None, [(0, 128)]), id="blocks that sequences fill"),
    pytest.param(Pack([0, 4, 0, 0, 2], 6), id="less than a block"),
    pytest.param(Pack([385], 385, None, [(10, 380)]), id="one giant"),
    pytest.param(Pack([1] * 270, 290), id="one-token sequences"),
    pytest.param(Pack([], 130), id="only a tail"),
    pytest.param(Pack([150, 0, 50, 200, 110], 600, 200, [(5, 145), (210, 390)]), id="rows"),
    pytest.param(Pack([64] * 6, 384, 128), id="rows of blocks"),
    pytest.param(Pack([40, 24, 3], 192, 64), id="rows of tail"),
]
OPTIONS = [{}, {"causal": False}, {"window": 1}, {"window": 70}, {"causal": False, "window": 33}]


def pair(block_size) -> tuple[int, int]:
    return (block_size, block_size) if isinstance(block_size, int) else block_size


def listed(block: BlockMask, side: str) -> list[list[list[int]]]:
    """Return the blocks of each row of a side, for each row of the batch."""
    counts = getattr(block, f"{side}_num_blocks")[:, 0].tolist()
    indices = getattr(block, f"{side}_indices")[:, 0].tolist()
    return [
        [row[:count] for row, count in zip(rows, numbers, strict=True)]
        for rows, numbers in zip(indices, counts, strict=True)
    ]


def tiles(seen: Tensor, row_length: int | None, block_size) -> tuple[Tensor, Tensor]:
    """Return which blocks are partial and which are full; positions beyond the edge are hidden."""
    query, key = pair(block_size)
    blocks = row_blocks(seen, row_length)
    width = blocks.shape[-1]
    padded = torch.nn.functional.pad(blocks, (0, -width % key, 0, -width % query))
    cells = padded.unflatten(2, (-1, key)).unflatten(1, (-1, query))
    full = cells.all(4).all(2)
    return cells.any(4).any(2) & ~full, full


def true_columns(table: Tensor) -> list[list[list[int]]]:
    return [[row.nonzero().flatten().tolist() for row in rows] for rows in table]


def check_block_mask(
    block: BlockMask, seen: Tensor, device, *, row_length: int | None = None, block_size=128
) -> None:
    partial, full = tiles(seen, row_length, block_size)
    width = seen.shape[0] if row_length is None else row_length
    rows, queries, keys = partial.shape
    assert type(block) is BlockMask
    assert block.BLOCK_SIZE == pair(block_size)
    assert block.seq_lengths == (width, width)
    assert block.shape == (rows, 1, width, width)
    for name in TABLES:
        table = getattr(block, name)
        from_queries = "kv" in name
        shape = (rows, 1, queries, keys) if from_queries else (rows, 1, keys, queries)
        assert (name, table.dtype, table.device) == (name, torch.int32, device)
        assert (name, table.shape) == (name, shape if "indices" in name else shape[:3])
    assert listed(block, "kv") == true_columns(partial)
    assert listed(block, "full_kv") == true_columns(full)
    assert listed(block, "q") == true_columns(partial.mT)
    assert listed(block, "full_q") == true_columns(full.mT)
    assert torch.equal(block.to_dense()[:, 0].bool().cpu(), partial | full)


def check_mask_mod(block: BlockMask, seen: Tensor, device, row_length: int | None = None) -> None:
    blocks = row_blocks(seen, row_length).unsqueeze(1)
    rows, _, width, _ = blocks.shape
    dense = create_mask(block.mask_mod, rows, 1, width, width, str(device))
    assert torch.equal(dense.cpu(), blocks)


@pytest.mark.kernels
def test_literal_case(device, poisoned_memory):
    """Blocks of two over [2, 3] and a tail of one: `x` is full, `/` partial.

    x . .
    . x /
    . / /
    """
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    block = packed.block_mask(causal=False, block_size=2)
    assert listed(block, "full_kv") == [[[0], [1], []]]
    assert listed(block, "kv") == [[[], [2], [1, 2]]]
    block = packed.block_mask(block_size=2)
    assert listed(block, "full_kv") == [[[], [], []]]
    assert listed(block, "kv") == [[[0], [1], [1, 2]]]
    assert listed(block, "q") == [[[0], [1, 2], [2]]]
    assert listed(block, "full_q") == [[[], [], []]]


@pytest.mark.kernels
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
def test_blocks(pack, block_size, device, poisoned_memory):
    packed = make_layout(pack, device)
    more = {"row_length": pack.row_length, "block_size": block_size}
    for options in OPTIONS:
        seen = visible(pack, **options)
        block = packed.block_mask(spans=pack.spans, **more, **options)
        check_block_mask(block, seen, device, **more)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_create_block_mask(pack, options, device):
    seen = row_blocks(visible(pack, **options), pack.row_length).to(device)
    rows, width, _ = seen.shape
    packed = make_layout(pack, device)

    def mask_mod(b, h, q_idx, kv_idx):
        return seen[b, q_idx, kv_idx]

    for block_size in (128, (64, 32)):
        theirs = create_block_mask(
            mask_mod, rows, 1, width, width, str(device), BLOCK_SIZE=block_size
        )
        ours = packed.block_mask(
            spans=pack.spans, row_length=pack.row_length, block_size=block_size, **options
        )
        for side in SIDES:
            assert listed(ours, side) == [[sorted(r) for r in b] for b in listed(theirs, side)]
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        for name in ("shape", "seq_lengths", "BLOCK_SIZE"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.sparsity() == theirs.sparsity()


@pytest.mark.parametrize("pack", PACKS)
def test_mask_mod_is_the_dense_mask(pack, device):
    packed = make_layout(pack, device)
    more = {"row_length": pack.row_length, "spans": pack.spans}
    for options in OPTIONS:
        block = packed.block_mask(**more, **options)
        check_mask_mod(block, visible(pack, **options), device, pack.row_length)


@given(
    pack=masked_packs(),
    causal=st.booleans(),
    window=WINDOWS,
    block_size=st.sampled_from([1, 2, 5, 8, 16, 128, (8, 2), (3, 7), (1, 16)]),
)
def test_any_pack(pack, causal, window, block_size, device, poisoned_memory):
    total, more = pack.total_tokens, {"row_length": pack.row_length, "block_size": block_size}
    sees = {"causal": causal, "window": window}
    seen = visible(pack, **sees)
    spans = spans_tensor(pack.spans, device)
    lengths = torch.tensor(pack.lengths, dtype=torch.int64, device=device)

    block = make_layout(pack, device).block_mask(spans=pack.spans, **more, **sees)
    check_block_mask(block, seen, device, **more)
    check_mask_mod(block, seen, device, pack.row_length)
    block = cuseq.ops.block_mask(lengths, total, spans=spans, **more, **sees)
    check_block_mask(block, seen, device, **more)
    check_mask_mod(block, seen, device, pack.row_length)

    # The ops return the tables in the order of BlockMask's arguments.
    query, key = pair(block_size)
    ranges = cuseq.ops.mask_ranges(lengths, total, spans=spans, **sees)
    offsets = cuseq.ops.cu_seqlens(lengths)
    for tables in (
        ops.block_mask(ranges, pack.row_length, query, key),
        ops.cached_block_mask(
            offsets, total, True, causal, window, spans, None, pack.row_length, query, key
        ),
    ):
        assert len(tables) == 8
        width = block.seq_lengths[0]
        again = BlockMask((width, width), *tables, pair(block_size), block.mask_mod)
        check_block_mask(again, seen, device, **more)


@given(
    segments=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=6),
    tail=st.integers(0, 5),
    causal=st.booleans(),
    window=WINDOWS,
    block_size=st.sampled_from([1, 4, 128, (8, 2)]),
)
def test_any_padding(segments, tail, causal, window, block_size, device, poisoned_memory):
    lengths, pads = [s[0] for s in segments], [s[1] for s in segments]
    starts = physical(lengths, pads)
    total = starts[-1] + tail
    sees = {"causal": causal, "window": window}
    seen = reference.mask(lengths, total, starts=starts, **sees)
    block = cuseq.ops.block_mask(
        torch.tensor(lengths, dtype=torch.int32, device=device),
        total,
        cu_seqlens_padded=torch.tensor(starts, dtype=torch.int32, device=device),
        block_size=block_size,
        **sees,
    )
    check_block_mask(block, seen, device, block_size=block_size)
    check_mask_mod(block, seen, device)


def test_a_long_row(device):
    """A sequence of 128 K tokens, where T x T would be 16 GiB, block by block in closed form."""
    total, blocks = 131_072, 1024
    packed = PackedLayout.from_lengths([total], device=device)
    block = packed.block_mask()
    assert listed(block, "kv") == [[[i] for i in range(blocks)]]
    full = torch.arange(blocks, device=device)
    assert torch.equal(block.full_kv_num_blocks[0, 0], full.int())
    assert torch.equal(block.full_q_num_blocks[0, 0], (blocks - 1 - full).int())
    assert torch.equal(block.to_dense()[0, 0].bool(), (full[:, None] >= full[None, :]))
    window = packed.block_mask(window=1024)
    assert window.kv_num_blocks[0, 0].tolist() == [1] * 8 + [2] * (blocks - 8)
    assert window.full_kv_num_blocks[0, 0].tolist() == [*range(8)] + [7] * (blocks - 8)
    assert listed(window, "kv")[0][-1] == [blocks - 9, blocks - 1]


@pytest.mark.parametrize("block_size", [0, -1, (0, 128), (128, 0), (128, -16)])
def test_blocks_have_a_size(block_size, device):
    lengths = torch.tensor([2, 3], device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    ranges = cuseq.ops.mask_ranges(lengths, 6)
    with pytest.raises(ValueError, match="block"):
        packed.block_mask(block_size=block_size)
    with pytest.raises(ValueError, match="block"):
        cuseq.ops.block_mask(lengths, 6, block_size=block_size)
    with pytest.raises(ValueError, match="block"):
        ops.block_mask(ranges, None, *pair(block_size))
    with pytest.raises(ValueError, match="block"):
        ops.cached_block_mask(
            lengths, 6, query_block=pair(block_size)[0], key_block=pair(block_size)[1]
        )


@pytest.mark.parametrize("block_size", [(128,), (1, 2, 3), 1.5, "128", None])
def test_a_block_size_is_an_int_or_two(block_size):
    with pytest.raises((TypeError, ValueError), match="block"):
        PackedLayout.from_lengths([2, 3]).block_mask(block_size=block_size)


def test_wrong_ranges_are_refused(device):
    good = cuseq.ops.mask_ranges(torch.tensor([3, 2], device=device), 6)
    ops.block_mask(good, 3)
    for ranges in (good.long(), good.float(), good[:1], good[0], torch.stack([good, good])):
        with pytest.raises((TypeError, ValueError), match="ranges"):
            ops.block_mask(ranges)
    for row_length in (0, -3, 4, 12):
        with pytest.raises(ValueError, match=f"(?s)row_length.*{row_length}"):
            ops.block_mask(good, row_length)


# In attention.


def flat(tensor: Tensor) -> Tensor:
    """Reshape `[batch, heads, tokens, dim]` to `[batch * tokens, heads, dim]`."""
    return tensor.transpose(1, 2).flatten(0, 1)


FLEX_PACKS = [
    Pack([150, 0, 100, 33], 300, None, [(20, 70), (160, 200)]),
    Pack([60, 70, 130, 41, 70], 390, 130, [(65, 100)]),
]


@pytest.mark.parametrize("pack", FLEX_PACKS, ids=["one row", "rows"])
@pytest.mark.parametrize("options", [{}, {"window": 17}, {"causal": False}], ids=str)
@torch.no_grad()
def test_flex_attention_on_the_cpu(pack, options):
    rows = 1 if pack.row_length is None else pack.total_tokens // pack.row_length
    shape = (rows, 2, pack.total_tokens // rows, 16)
    q, k, v = (t.detach() for t in attention_inputs(shape, "cpu", torch.float32))
    block = make_layout(pack, "cpu").block_mask(
        spans=pack.spans, row_length=pack.row_length, **options
    )
    out = flex_attention(q, k, v, block_mask=block)
    seen = visible(pack, **options)
    exact = [flat(t).double() for t in (q, k, v)]
    expected = masked_attention(*exact, seen)
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    scores = torch.einsum("qhd,khd->hqk", flat(q), flat(k)) / 4 + bias
    plain = torch.einsum("hqk,khd->qhd", scores.softmax(-1), flat(v))
    bound = 3 * relative(plain, expected, expected)
    assert relative(flat(out), expected, expected) <= bound


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()


def unique_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "kind,dtype",
    [
        ("spans", torch.float32),
        *((kind, torch.bfloat16) for kind in ("plain", "windowed", "spans", "rows", "both sides")),
    ],
    ids=str,
)
def test_flex_attention_forward_and_backward(kind, dtype, cuda, fresh_compiler):
    pack = FLEX_PACKS[kind == "rows"]
    options = {"windowed": {"window": 17}, "both sides": {"causal": False}}.get(kind, {})
    spans = pack.spans if kind in ("spans", "rows") else []
    seen = reference.mask(pack.lengths, pack.total_tokens, spans=spans, **options)
    rows = 1 if pack.row_length is None else pack.total_tokens // pack.row_length
    tensors = attention_inputs((rows, 2, pack.total_tokens // rows, 64), cuda, dtype)
    block = make_layout(pack, cuda).block_mask(spans=spans, row_length=pack.row_length, **options)
    compiled = torch.compile(flex_attention, fullgraph=True)
    blocks = row_blocks(seen, pack.row_length).unsqueeze(1).to(cuda)

    def dense(q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 8
        weights = scores.masked_fill(~blocks, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    def results(attention, inputs):
        out = attention(*inputs)
        grad = torch.sin(torch.arange(out.numel(), device=cuda)).view(out.shape)
        return out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))

    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = results(dense, exact)
    by_loops = masked_attention(*(flat(t) for t in exact), seen.to(cuda))
    torch.testing.assert_close(flat(expected[0]), by_loops)
    plain = results(dense, tensors)
    actual = results(lambda q, k, v: compiled(q, k, v, block_mask=block), tensors)
    # Its fp32 products run in tf32, which has ten bits of mantissa, three more than bf16.
    eps = torch.finfo(torch.bfloat16).eps / (8 if dtype == torch.float32 else 1)
    for ours, simple, wanted in zip(actual, plain, expected, strict=True):
        assert ours.isfinite().all()
        bound = 3 * relative(simple, wanted, expected[0]) + eps
        assert relative(ours, wanted, expected[0]) <= bound


def test_one_compile_for_all_packs(cuda, fresh_compiler):
    def layer(q, k, v, block):
        return flex_attention(q, k, v, block_mask=block)

    total = 300
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    tensors = attention_inputs((1, 2, total, 64), cuda, torch.bfloat16)
    for lengths in ([150, 100], [300], [1] * 300, [10, 0, 200], []):
        packed = PackedLayout.from_lengths(lengths, total, device=cuda)
        out = compiled(*tensors, packed.block_mask())
        grads = torch.autograd.grad(out.sum(), tensors)
        mask = packed.dense_mask()
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, mask)
        wanted = torch.autograd.grad(expected.sum(), tensors)
        for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
            assert relative(ours, theirs, expected) <= 2e-2
    assert unique_graphs() == 1


@pytest.mark.parametrize("made", ["by the layout", "of lengths"])
@torch.no_grad()
def test_made_inside_a_compiled_region(made, device, fresh_compiler, fresh_cache):
    def layer(q, k, v, lengths, packed):
        if made == "of lengths":
            block = cuseq.ops.block_mask(lengths, 200, window=9)
        else:
            block = packed.block_mask(window=9)
        return flex_attention(q * 1, k, v, block_mask=block)

    torch._dynamo.utils.counters.clear()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    # On the CPU flex_attention rejects inputs that require gradients.
    tensors = [t.detach() for t in attention_inputs((1, 2, 200, 64), device, torch.float32)]
    for values in ([120, 60], [30, 170], [5, 0]):
        packed = PackedLayout.from_lengths(values, 200, device=device)
        out = compiled(*tensors, torch.tensor(values, device=device), packed)
        seen = reference.mask(values, 200, window=9).to(device)
        expected = masked_attention(*(flat(t).double() for t in tensors), seen)
        bound = 1e-2 if device.type == "cuda" else 1e-6  # tf32 on CUDA
        assert relative(flat(out), expected, expected) <= bound
    assert unique_graphs() == 1


def test_tables_compiled(device, fresh_compiler):
    def tables(lengths):
        block = cuseq.ops.block_mask(lengths, 40, block_size=16)
        return [getattr(block, name) * 2 for name in TABLES]

    compiled = torch.compile(tables, backend="aot_eager", fullgraph=True, dynamic=True)
    for values in ([12, 20], [30, 10], [5, 0]):
        lengths = torch.tensor(values, device=device)
        block = cuseq.ops.block_mask(lengths, 40, block_size=16)
        doubled = dict(zip(TABLES, compiled(lengths), strict=True))
        for side in SIDES:
            counts = getattr(block, f"{side}_num_blocks")
            assert torch.equal(doubled[f"{side}_num_blocks"], 2 * counts)
            indices = getattr(block, f"{side}_indices")
            used = torch.arange(indices.shape[-1], device=device) < counts.unsqueeze(-1)
            assert torch.equal(doubled[f"{side}_indices"][used], 2 * indices[used])


@pytest.mark.parametrize("rows", [None, 6])
def test_opcheck(rows, device, poisoned_memory):
    lengths = torch.tensor([2, 4, 3], device=device)
    ranges = cuseq.ops.mask_ranges(lengths, 12)
    opcheck(ops.block_mask, (ranges, rows))
    opcheck(ops.block_mask, (ranges, rows, 4, 2))
    opcheck(ops.cached_block_mask, (lengths, 12), {"row_length": rows, "query_block": 4})
    offsets = cuseq.ops.cu_seqlens(lengths)
    spans = spans_tensor([(2, 5)], device)
    opcheck(ops.cached_block_mask, (offsets, 12, True, False, 3, spans, None, rows))


def test_the_function_leaves_the_cache_alone(device, fresh_cache):
    lengths = torch.tensor([2, 3], device=device)
    before = cuseq.cache.stats()
    first, second = cuseq.ops.block_mask(lengths, 6), cuseq.ops.block_mask(lengths, 6)
    for name in TABLES:
        getattr(first, name).zero_()
    check_block_mask(second, reference.mask([2, 3], 6), device)
    assert cuseq.cache.stats() == before


def test_a_block_mask_moves_like_torchs(cuda):
    packed = PackedLayout.from_lengths([2, 3], 6, device=cuda)
    check_block_mask(packed.block_mask().to("cpu"), reference.mask([2, 3], 6), torch.device("cpu"))


# Only a GPU shows these.


def test_block_masks_do_not_wait(cuda, fresh_cache):
    lengths = torch.tensor([2, 4], device=cuda)
    spans = spans_tensor([(2, 5)], cuda)

    def body():
        cuseq.cache.clear()
        cuseq.ops.block_mask(lengths, 6, window=2, spans=spans)
        cuseq.ops.block_mask(lengths, 12, row_length=6, block_size=(4, 2))
        packed = PackedLayout.from_lengths([2, 4], 6).to(cuda)
        packed.block_mask()
        packed.block_mask(spans=[(0, 2), (3, 5)], block_size=64)
        packed.block_mask(spans=spans, row_length=6)
        PackedLayout.from_lengths(lengths, 6).block_mask(causal=False)

    assert waits(body) == Counter()


def test_no_memory_of_tokens_times_tokens(cuda, fresh_cache):
    total = 131_072
    lengths = torch.full((254,), 500, device=cuda)
    packed = PackedLayout.from_lengths([500] * 254, total, device=cuda)
    # Four tables of 1024 x 1024 int32 are 16 MiB; one bit per pair of tokens would be 2 GiB.
    for make in (
        lambda: cuseq.ops.block_mask(lengths, total),
        lambda: packed.block_mask(),
        lambda: packed.block_mask(window=4096, causal=False, spans=[(0, 400), (7000, 7300)]),
    ):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        block = make()
        assert torch.cuda.max_memory_allocated() - before <= 40 * 2**20
        assert block.shape == (1, 1, total, total)
        del block


# Not for compute-sanitizer: without the caching allocator, captures cannot allocate.
def test_graphs_replay_with_new_lengths(cuda, fresh_cache):
    lengths = torch.tensor([200, 50], device=cuda)
    spans = spans_tensor([(20, 120)], cuda)
    packed = PackedLayout.from_lengths([200, 50], 300, device=cuda)

    def make():
        return cuseq.ops.block_mask(lengths, 300, spans=spans, window=150, block_size=64)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        make(), packed.block_mask()
    torch.cuda.current_stream().wait_stream(side)
    before = cuseq.cache.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = make()
        of_layout = packed.block_mask()
    after = cuseq.cache.stats()
    for count in ("hits", "misses", "entries", "bytes"):
        assert (count, after[count]) == (count, before[count])
    for values, new_spans in (([200, 50], (20, 120)), ([1, 299], (1, 200)), ([300, 0], (250, 290))):
        lengths.copy_(torch.tensor(values))
        spans.copy_(torch.tensor([new_spans]))
        graph.replay()
        seen = reference.mask(values, 300, spans=[new_spans], window=150)
        check_block_mask(captured, seen, cuda, block_size=64)
        check_mask_mod(captured, seen, cuda)
    check_block_mask(of_layout, reference.mask([200, 50], 300), cuda)


def test_second_gpu(second_gpu):
    packed = PackedLayout.from_lengths([200, 50], 300, device=second_gpu)
    assert torch.cuda.current_device() == 0
    seen = reference.mask([200, 50], 300, spans=[(20, 120)])
    check_block_mask(packed.block_mask(spans=[(20, 120)]), seen, second_gpu)


@pytest.mark.parametrize("size", [0, -1, 2**31, 2**63 - 1])
def test_a_block_size_out_of_range_is_refused(size):
    packed = PackedLayout.from_lengths([2, 3])
    with pytest.raises(ValueError, match="_block must lie in|block_size must be at (least 1|most)"):
        packed.block_mask(block_size=(128, size))


# --------------------------------------------------------- masks that compiled code takes as inputs


def make_rows(kind: str, lengths: list[int], device) -> PackedLayout:
    """Return a layout of 256 tokens: of a row, of padded segments or of a tree."""
    if kind == "tree":
        first, *rest = lengths
        answers = [[2] * n for n in rest]
        tree = cuseq.PackedTree.from_groups(
            [[1] * first], [answers], total_tokens=256, max_seqs=4, max_depth=3
        )
        return tree.to(device).layout
    multiple = 8 if kind == "padded" else 1
    return PackedLayout.from_lengths(lengths, 256, segment_multiple=multiple, device=device)


def make_held(kind: str, lengths: list[int], device, **options) -> PackedLayout:
    packed = make_rows(kind, lengths, device)
    packed.block_mask(hold=True, **options)
    return packed


def attend_by_flex(packed: PackedLayout, query: Tensor, options: dict) -> Tensor:
    return flex_attention(query, query, query, block_mask=packed.block_mask(**options))


HELD = [
    (kind, options)
    for kind in ("row", "padded", "tree")
    for options in ({}, {"window": 30}, {"causal": False})
    if kind != "tree" or options.get("causal", True)  # trees are causal
]


def counting() -> tuple[CompileCounterWithBackend, Callable[..., Tensor]]:
    """Return a backend that keeps the graphs, and attention that it compiles."""
    backend = CompileCounterWithBackend("aot_eager")
    return backend, torch.compile(attend_by_flex, backend=backend, fullgraph=True, dynamic=False)


@pytest.mark.parametrize(("kind", "options"), HELD, ids=str)
def test_compiled_code_takes_a_mask_that_is_held(kind, options, device, fresh_compiler):
    backend, compiled = counting()
    for lengths in ([100, 50, 60], [90, 10, 110], [209, 1, 0]):
        packed = make_held(kind, lengths, device, **options)
        query = torch.randn(1, 2, packed.total_tokens, 16, device=device)
        found = compiled(packed, query, options)
        torch.testing.assert_close(found, attend_by_flex(packed, query, options))
    assert backend.frame_count == 1
    (graph,) = backend.graphs
    made = [node.target for node in graph.graph.nodes if "cuseq" in str(node.target)]
    assert not made


def test_a_mask_of_another_kind_is_not_taken(device, fresh_compiler):
    compiled = torch.compile(attend_by_flex, backend="aot_eager", fullgraph=True, dynamic=False)
    packed = make_held("row", [100, 50], device, window=30)
    query = torch.randn(1, 2, 256, 16, device=device)
    spans = torch.tensor([[3, 90]], dtype=torch.int32, device=device)
    for options in ({}, {"window": 31}, {"causal": False}, {"window": 30, "spans": spans}):
        expected = attend_by_flex(packed, query, options)
        torch.testing.assert_close(compiled(packed, query, options), expected)


@pytest.mark.parametrize(("kind", "options"), HELD, ids=str)
def test_other_lengths_are_written_into_what_is_held(kind, options, device, fresh_compiler):
    backend, compiled = counting()
    packed = make_held(kind, [100, 50, 60], device, **options)
    query = torch.randn(1, 2, 256, 16, device=device)
    held = packed.block_mask(hold=True, **options)
    for lengths in ([100, 50, 60], [90, 10, 110], [40, 70, 30]):
        packed.copy_(make_rows(kind, lengths, device))
        expected = attend_by_flex(make_rows(kind, lengths, device), query, options)
        torch.testing.assert_close(compiled(packed, query, options), expected)
        assert packed.block_mask(hold=True, **options) is held
    assert backend.frame_count == 1


# Not for compute-sanitizer: without the caching allocator, captures cannot allocate.
@pytest.mark.parametrize("before", [True, False])
def test_a_graph_replays_with_a_mask_that_is_held(before, cuda, fresh_compiler):
    compiled = torch.compile(attend_by_flex, fullgraph=True, dynamic=False)
    packed = make_rows("row", [100, 50, 60], cuda)
    query = torch.randn(1, 2, 256, 16, device=cuda)
    if before:
        packed.block_mask(hold=True)
    compiled(packed, query, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed.block_mask(hold=True)
        found = compiled(packed, query, {})
    for lengths in ([100, 50, 60], [90, 10, 110], [256]):
        packed.copy_(PackedLayout.from_lengths(lengths, 256, device=cuda))
        graph.replay()
        expected = compiled(PackedLayout.from_lengths(lengths, 256, device=cuda), query, {})
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("kind", "options"), HELD, ids=str)
def test_a_graph_writes_what_was_loaded_into_masks(kind, options, cuda, fresh_compiler):
    """A step has this at its beginning, where it costs the host nothing."""
    compiled = torch.compile(attend_by_flex, fullgraph=True, dynamic=False)
    static = StaticLayout.like(make_rows(kind, [100, 50, 60], cuda), cuda)
    query = torch.randn(1, 2, 256, 16, device=cuda)
    static.block_mask(hold=True, **options)
    compiled(static, query, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.refill_block_masks()
        found = compiled(static, query, options)
    for lengths in ([100, 50, 60], [90, 10, 110], [40, 70, 30]):
        other = make_rows(kind, lengths, torch.device("cpu"))
        static.load(other.pin_memory())
        graph.replay()
        expected = attend_by_flex(make_rows(kind, lengths, cuda), query, options)
        torch.testing.assert_close(found, expected)


def test_masks_of_a_static_layout_wait_for_the_step():
    first, second = (PackedLayout.from_lengths(n, 256, max_seqs=4) for n in ([100, 50], [7, 90]))
    static = StaticLayout.like(first, torch.device("cpu"))
    held = [static.block_mask(hold=True), static.chunked(32).block_mask(hold=True)]
    old = [mask.kv_num_blocks.clone() for mask in held]
    static.load(second)
    assert all(torch.equal(mask.kv_num_blocks, one) for mask, one in zip(held, old, strict=True))
    static.refill_block_masks()
    expected = [second.block_mask(), second.chunked(32).block_mask()]
    assert [static.block_mask(hold=True), static.chunked(32).block_mask(hold=True)] == held
    for mine, fresh in zip(held, expected, strict=True):
        parts = [
            [one for one in mask.as_tuple() if isinstance(one, Tensor)] for mask in (mine, fresh)
        ]
        assert all(map(torch.equal, *parts))


def test_a_mask_held_in_inference_trains(device, fresh_compiler):
    compiled = torch.compile(attend_by_flex, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        packed = make_held("row", [100, 50], device)
    query = torch.randn(1, 2, 256, 16, device=device)
    torch.testing.assert_close(compiled(packed, query, {}), attend_by_flex(packed, query, {}))
    held = packed.block_mask(hold=True).as_tuple()
    assert not any(one.is_inference() for one in held if isinstance(one, Tensor))


@pytest.mark.parametrize(
    "options", [{"spans": [(0, 2)]}, {"row_length": 4}, {"block_size": 64}], ids=str
)
def test_masks_that_cannot_be_held_are_refused(options):
    packed = PackedLayout.from_lengths([4], 8)
    with pytest.raises(ValueError, match="hold=True keeps masks without spans and row_length"):
        packed.block_mask(hold=True, **options)


def test_a_mask_is_held_outside_compiled_code(device, fresh_compiler):
    packed = PackedLayout.from_lengths([4], 8, device=device)
    hold = torch.compile(lambda: packed.block_mask(hold=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="hold=True must be given outside compiled code"):
        hold()
