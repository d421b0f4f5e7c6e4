"""Test masks in the identity cache, which are large, and the eviction that makes room for them."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import reference
import torch
from reference import masked_attention
from test_block_masks import TABLES, check_block_mask
from test_cache import on_threads
from test_cache_lifetime import on_a_thread
from test_cache_microbatches import schedule
from test_masks import check_dense, spans_tensor
from tiers import full_but
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")


def layout(device, lengths=(2, 3), total: int = 6) -> PackedLayout:
    return PackedLayout.from_lengths(list(lengths), total, device=device)


@contextmanager
def only_hits(at_least: int):
    before = cuseq.cache.stats()
    yield
    after = cuseq.cache.stats()
    for count in ("misses", "entries", "evictions", "bytes"):
        assert (count, after[count]) == (count, before[count])
    assert after["hits"] - before["hits"] >= at_least


@contextmanager
def some_misses():
    before = cuseq.cache.stats()["misses"]
    yield
    assert cuseq.cache.stats()["misses"] > before


def storage(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())


def storages(block) -> list[StorageWeakRef]:
    return [storage(getattr(block, name)) for name in TABLES]


# Different masks of one layout, each requested as a layer would.
KINDS = {
    "dense": lambda packed: packed.dense_mask(),
    "additive": lambda packed: packed.dense_mask(torch.float32),
    "finite": lambda packed: packed.dense_mask(torch.float32, finite=True),
    "bfloat16": lambda packed: packed.dense_mask(torch.bfloat16),
    "window": lambda packed: packed.dense_mask(window=2),
    "another window": lambda packed: packed.dense_mask(window=1),
    "bidirectional": lambda packed: packed.dense_mask(causal=False),
    "spans": lambda packed: packed.dense_mask(spans=[(0, 2), (3, 5)]),
    "other spans": lambda packed: packed.dense_mask(spans=[(0, 2), (2, 5)]),
    "rows": lambda packed: packed.dense_mask(row_length=6),
    "blocks": lambda packed: packed.block_mask(),
    "small blocks": lambda packed: packed.block_mask(block_size=16),
    "oblong blocks": lambda packed: packed.block_mask(block_size=(16, 32)),
    "windowed blocks": lambda packed: packed.block_mask(window=2),
    "blocks with spans": lambda packed: packed.block_mask(spans=[(0, 2)]),
    "bidirectional blocks": lambda packed: packed.block_mask(causal=False),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", KINDS)
def test_a_hit_is_the_same_object(name, device):
    packed = layout(device)
    with some_misses():
        value = KINDS[name](packed)
    with only_hits(at_least=5):
        for _ in range(5):
            assert KINDS[name](packed) is value


def test_each_parameter_counts(device):
    packed = layout(device)
    values = {name: make(packed) for name, make in KINDS.items()}
    distinct = dict(values)
    del distinct["rows"]  # one row is the whole row; it may share an entry or not
    assert len({id(value) for value in distinct.values()}) == len(distinct)
    with only_hits(at_least=len(KINDS)):
        for name, value in values.items():
            assert KINDS[name](packed) is value


def test_other_spellings_hit(device):
    """fla#770: an equivalent call with other keyword arguments missed in every layer."""
    packed = layout(device)
    mask, block = packed.dense_mask(), packed.block_mask()
    wide = packed.dense_mask(torch.bfloat16, window=2)
    with only_hits(at_least=9):
        assert packed.dense_mask(torch.bool) is mask
        assert packed.dense_mask(dtype=torch.bool, causal=True, window=None, spans=None) is mask
        assert packed.dense_mask(finite=False, row_length=None) is mask
        assert packed.dense_mask(window=2, dtype=torch.bfloat16) is wide
        assert packed.block_mask(block_size=128) is block
        assert packed.block_mask(block_size=(128, 128)) is block
        assert packed.block_mask(causal=True, window=None, spans=None, row_length=None) is block
        assert packed.dense_mask() is mask
        assert packed.block_mask() is block


def test_a_layout_on_its_own_device_hits(device):
    packed = layout("cpu")
    mask = packed.to(device).dense_mask()
    assert mask.device == device
    with only_hits(at_least=2):
        assert packed.to(device).dense_mask() is mask
        assert packed.to(device).to(device).dense_mask() is mask


def test_layouts_do_not_share(device):
    one, other = layout(device), layout(device)
    assert one.dense_mask() is not other.dense_mask()
    assert one.block_mask() is not other.block_mask()
    kept = one.dense_mask()
    del other
    assert one.dense_mask() is kept


def test_the_cached_ops_hit(device):
    lengths = torch.tensor([2, 3], device=device)
    spans = spans_tensor([(2, 5)], device)
    calls = {
        "ranges": lambda: ops.cached_mask_ranges(lengths, 6),
        "windowed": lambda: ops.cached_mask_ranges(lengths, 6, window=2),
        "dense": lambda: ops.cached_dense_mask(lengths, 6),
        "additive": lambda: ops.cached_dense_mask(lengths, 6, dtype=torch.float32),
        "spans": lambda: ops.cached_dense_mask(lengths, 6, spans=spans),
        "blocks": lambda: ops.cached_block_mask(lengths, 6)[0],
    }
    values = {name: call() for name, call in calls.items()}
    with only_hits(at_least=len(calls)):
        for name, call in calls.items():
            assert call() is values[name]
    expected = cuseq.ops.dense_mask(lengths, 6, spans=spans)
    assert torch.equal(values["spans"], expected)
    assert torch.equal(values["windowed"], cuseq.ops.mask_ranges(lengths, 6, window=2))


# Spans are part of the key: a list by value, a tensor by identity.


def test_equal_lists_of_spans_hit(device):
    packed = layout(device)
    mask, block = (
        packed.dense_mask(spans=[(0, 2), (3, 5)]),
        packed.block_mask(spans=[(0, 2), (3, 5)]),
    )
    with only_hits(at_least=4):
        for _ in range(2):
            assert packed.dense_mask(spans=[(0, 1 + 1), (3, 5)]) is mask
            assert packed.block_mask(spans=[(0, 1 + 1), (3, 5)]) is block
    assert packed.dense_mask(spans=[(0, 2), (3, 4)]) is not mask


def test_a_list_of_spans_may_be_edited(device):
    packed = layout(device)
    spans = [(0, 2)]
    before = packed.dense_mask(spans=spans)
    spans.append((3, 5))
    after = packed.dense_mask(spans=spans)
    check_dense(before, reference.mask([2, 3], 6, spans=[(0, 2)]), device)
    check_dense(after, reference.mask([2, 3], 6, spans=[(0, 2), (3, 5)]), device)


def test_edited_span_tensors_miss(device):
    packed = layout(device)
    spans = spans_tensor([(2, 4)], device)
    mask, block = packed.dense_mask(spans=spans), packed.block_mask(spans=spans, block_size=2)
    with only_hits(at_least=2):
        assert packed.dense_mask(spans=spans) is mask
        assert packed.block_mask(spans=spans, block_size=2) is block
    old = storage(mask)
    del mask
    spans.add_(1)
    with some_misses():
        mask = packed.dense_mask(spans=spans)
    seen = reference.mask([2, 3], 6, spans=[(3, 5)])
    check_dense(mask, seen, device)
    check_block_mask(packed.block_mask(spans=spans, block_size=2), seen, device, block_size=2)
    assert old.expired(), "a mask whose spans are gone is dropped"


def test_equal_span_tensors_are_different_keys(device):
    packed = layout(device)
    one, other = spans_tensor([(2, 4)], device), spans_tensor([(2, 4)], device)
    assert packed.dense_mask(spans=one) is not packed.dense_mask(spans=other)


def test_masks_die_with_their_spans(device):
    packed = layout(device)
    kept = packed.dense_mask()
    before = cuseq.cache.stats()
    spans = spans_tensor([(2, 4)], device)
    mask, block = packed.dense_mask(spans=spans), packed.block_mask(spans=spans)
    gone = [storage(mask), *storages(block), weakref.ref(block)]
    del mask, block, spans
    assert all(ref.expired() for ref in gone[:-1]) and gone[-1]() is None
    after = cuseq.cache.stats()
    assert (after["entries"], after["bytes"]) == (before["entries"], before["bytes"])
    assert packed.dense_mask() is kept


def test_a_new_span_tensor_is_never_an_old_one(device):
    packed = layout(device, [300], 300)
    for end in range(2, 200):
        mask = packed.dense_mask(spans=spans_tensor([(0, end)], device))
        assert int(mask[0, 0, 0].sum()) == end


# Statistics, and what is counted.


def test_bytes_are_counted(device):
    packed = layout(device, [500, 500], 1001)
    assert cuseq.cache.stats()["bytes"] == 0
    sizes = {torch.bool: 1, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}
    for dtype, size in sizes.items():
        before = cuseq.cache.stats()["bytes"]
        mask = packed.dense_mask(dtype)
        grown = cuseq.cache.stats()["bytes"] - before
        assert mask.untyped_storage().nbytes() >= 1001 * 1001 * size
        # Besides the mask, ranges and offsets: a few numbers per token.
        assert 0 <= grown - mask.untyped_storage().nbytes() <= 64 * 1001
    before = cuseq.cache.stats()["bytes"]
    block = packed.block_mask(block_size=16)
    tables = {getattr(block, name).untyped_storage() for name in TABLES}
    size = sum({table.data_ptr(): table.nbytes() for table in tables}.values())
    assert 0 <= cuseq.cache.stats()["bytes"] - before - size <= 64 * 1001
    del mask, block, packed, tables
    assert (cuseq.cache.stats()["bytes"], cuseq.cache.stats()["entries"]) == (0, 0)


def test_one_build_for_each_mask(device):
    """48 layers that alternate windows and dtypes, with four micro-batches in flight."""
    windows, dtypes = (None, 3), (torch.bfloat16, torch.float32)
    in_flight, layers = 4, 48
    packs = [[3, 9, 4], [16], [1, 1, 14], [7, 8], [5, 5, 5], [2, 12], [6, 0, 9], [4]]

    def layer(packed: PackedLayout, index: int):
        window, dtype = windows[index % 2], dtypes[index // 2 % 2]
        return packed.dense_mask(dtype, window=window), packed.block_mask(window=window)

    def forward(packed: PackedLayout) -> list:
        first = [layer(packed, index) for index in range(4)]
        assert len({id(mask) for mask, _ in first}) == 4
        assert len({id(block) for _, block in first}) == 2
        with only_hits(at_least=2 * (layers - 4)):
            for index in range(4, layers):
                mask, block = layer(packed, index)
                assert mask is first[index % 4][0]
                assert block is first[index % 4][1]
        return first

    alive: dict[int, tuple[PackedLayout, list]] = {}
    entries = None
    for is_forward, index in schedule(len(packs), in_flight):
        if is_forward:
            before = cuseq.cache.stats()
            packed = PackedLayout.from_lengths(packs[index], 16, device=device)
            alive[index] = packed, forward(packed)
            made = cuseq.cache.stats()["misses"] - before["misses"]
            # Every micro-batch costs the same whatever others are alive: nothing was evicted.
            assert cuseq.cache.stats()["evictions"] == before["evictions"]
            assert cuseq.cache.stats()["entries"] - before["entries"] == made
            entries = made if entries is None else entries
            assert made == entries
            assert 6 <= made <= 10  # the masks, and the facts that they are made from
        else:
            packed, first = alive.pop(index)
            with only_hits(at_least=2 * layers):  # the recompute of a checkpoint
                for again in reversed(range(layers)):
                    mask, block = layer(packed, again)
                    assert mask is first[again % 4][0] and block is first[again % 4][1]
            del packed, first, mask, block
    assert cuseq.cache.stats()["entries"] == 0


def test_micro_batches_in_turn(device):
    """Every layer requests every micro-batch before the next layer starts."""
    packed = [layout(device, lengths, 16) for lengths in ([3, 9], [16], [1, 1, 14], [7, 8])]
    ask = [(dtype, window) for dtype in (torch.bfloat16, torch.float32) for window in (None, 3)]
    first = {(i, a): packed[i].dense_mask(a[0], window=a[1]) for i in range(4) for a in ask}
    assert len({id(mask) for mask in first.values()}) == 16
    with only_hits(at_least=48 * 4):
        for index in range(48):
            dtype, window = ask[index % 4]
            for i in range(4):
                assert packed[i].dense_mask(dtype, window=window) is first[i, (dtype, window)]
    for (i, (dtype, window)), mask in first.items():
        lengths = packed[i].lengths.tolist()
        check_dense(mask, reference.mask(lengths, 16, window=window), device, dtype=dtype)


# How long masks live.


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_dies_with_its_layout(name, device):
    packed = layout(device)
    value = KINDS[name](packed)
    gone = storages(value) if hasattr(value, "kv_indices") else [storage(value)]
    wrapper = weakref.ref(value)
    gc.disable()  # only references decide, not the next collection
    try:
        del value
        assert wrapper() is not None and not any(ref.expired() for ref in gone)
        del packed
        assert wrapper() is None and all(ref.expired() for ref in gone)
    finally:
        gc.enable()
    assert cuseq.cache.stats()["entries"] == 0
    assert cuseq.cache.stats()["bytes"] == 0


def test_a_mask_does_not_hold_its_layout(device):
    packed = layout(device)
    mask, block = packed.dense_mask(), packed.block_mask(block_size=2)
    gone = weakref.ref(packed)
    gc.disable()
    try:
        del packed
        assert gone() is None
    finally:
        gc.enable()
    assert cuseq.cache.stats()["entries"] == 0
    seen = reference.mask([2, 3], 6)
    check_dense(mask, seen, device)
    check_block_mask(block, seen, device, block_size=2)
    positions = torch.arange(6, device=device)
    for query in range(6):
        row = [bool(block.mask_mod(0, 0, positions[query], positions[key])) for key in range(6)]
        assert row == seen[query].tolist()


def test_masks_die_with_their_scope(device):
    packed = layout(device)
    kept = packed.dense_mask(window=2)
    with cuseq.cache.forward_scope():
        mask, block = packed.dense_mask(), packed.block_mask()
        assert packed.dense_mask() is mask and packed.block_mask() is block
        gone = [storage(mask), *storages(block)]
        wrapper = weakref.ref(block)
        del mask, block
        assert not any(ref.expired() for ref in gone)
    assert all(ref.expired() for ref in gone) and wrapper() is None
    with only_hits(at_least=1):
        assert packed.dense_mask(window=2) is kept


def test_a_block_mask_of_a_scope_is_made_again(device):
    packed = layout(device)
    with cuseq.cache.forward_scope():
        block = packed.block_mask(block_size=2)
    again = packed.block_mask(block_size=2)
    assert again is not block
    check_block_mask(again, reference.mask([2, 3], 6), device, block_size=2)


def test_cleared_masks_are_made_again(device):
    packed = layout(device)
    before = {name: make(packed) for name, make in KINDS.items()}
    cuseq.cache.clear()
    assert cuseq.cache.stats()["entries"] == 0
    for name, make in KINDS.items():
        assert make(packed) is not before[name]


def test_edited_masks_are_made_again(device):
    packed = layout(device)
    seen = reference.mask([2, 3], 6)
    mask = packed.dense_mask()
    mask.zero_()
    check_dense(packed.dense_mask(), seen, device)
    for name in TABLES:
        block = packed.block_mask(block_size=2)
        getattr(block, name).zero_()
        check_block_mask(packed.block_mask(block_size=2), seen, device, block_size=2)


def test_evaluation_leaves_nothing_that_training_cannot_save(device):
    packed = layout(device)
    with torch.inference_mode():
        packed.dense_mask(torch.float32), packed.block_mask()
    mask, block = packed.dense_mask(torch.float32), packed.block_mask()
    assert not mask.is_inference()
    assert not any(getattr(block, name).is_inference() for name in TABLES)
    weight = torch.ones(6, 6, device=device, requires_grad=True)
    (weight * mask.exp()[0, 0]).sum().backward()
    assert torch.equal(weight.grad == 1, packed.dense_mask()[0, 0])
    with torch.inference_mode(), only_hits(at_least=2):
        assert packed.dense_mask(torch.float32) is mask
        assert packed.block_mask() is block


def test_errors_leave_nothing_behind(device):
    packed = layout(device)
    for wrong in (
        lambda: packed.dense_mask(window=0),
        lambda: packed.dense_mask(spans=[(1, 3)]),
        lambda: packed.dense_mask(row_length=4),
        lambda: packed.block_mask(block_size=0),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert cuseq.cache.stats()["bytes"] <= 64 * 6  # at most a fact that the check requested
    check_dense(packed.dense_mask(), reference.mask([2, 3], 6), device)


# Under a backward that still needs it.


def inputs(device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 2, 6, 8, generator=generator).to(device).requires_grad_() for _ in range(3)
    ]


def expected_gradients(tensors, **options) -> tuple[Tensor, ...]:
    exact = [t.detach()[0].transpose(0, 1).double().requires_grad_() for t in tensors]
    seen = reference.mask([2, 3], 6, **options).to(tensors[0].device)
    out = masked_attention(*exact, seen)
    grads = torch.autograd.grad(out.square().sum(), exact)
    return tuple(grad.transpose(0, 1).unsqueeze(0).float() for grad in grads)


EVICTIONS = {
    "the layout dies": lambda packed: packed.clear(),
    "cleared": lambda packed: cuseq.cache.clear(),
    "many others": lambda packed: [
        layout(packed[0].device, [i, 1], 100 + i).dense_mask() for i in range(80)
    ],
    "on a thread": lambda packed: on_a_thread(cuseq.cache.clear),
}


@pytest.mark.parametrize("how", EVICTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_backward_keeps_what_it_needs(how, dtype, device):
    packed = [layout(device)]
    tensors = inputs(device)
    out = scaled_dot_product_attention(*tensors, packed[0].dense_mask(dtype, window=2))
    EVICTIONS[how](packed)
    # These would fill the freed memory, if it was freed.
    others = [torch.full((6, 16), 3.0, device=device) for _ in range(50)]
    grads = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(grads, expected_gradients(tensors, window=2), rtol=1e-4, atol=1e-5)
    del others


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_hits(reentrant, device):
    packed = layout(device)
    tensors = inputs(device)

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, packed.dense_mask(torch.float32))

    out = checkpoint(attend, *tensors, use_reentrant=reentrant)
    with only_hits(at_least=1):
        out.square().sum().backward()
    grads = tuple(t.grad for t in tensors)
    torch.testing.assert_close(grads, expected_gradients(tensors), rtol=1e-4, atol=1e-5)


# The bound on bytes. A mask of 1024 tokens is 1 MiB in bool and 4 MiB in float32.

BOUNDED = """
import torch, cuseq
from torch.multiprocessing.reductions import StorageWeakRef
from cuseq import PackedLayout

MIB = 2**20
device = {device!r}
packed = PackedLayout.from_lengths([500, 524], device=device)
lengths = packed.lengths

def alive(value):
    return StorageWeakRef(value.untyped_storage())

def pass_time(calls):
    small = torch.tensor([1, 2], device=device)
    for _ in range(calls):
        cuseq.ops.cached_cu_seqlens(small)

def stays(*values):
    return [not value.expired() for value in values]

def within(bound):
    stats = cuseq.cache.stats()
    assert 0 <= stats["bytes"] <= bound, stats
    return True
"""

# Each script prints what remains.
BOUNDS = {
    "masks go before the facts of tokens, however old and large those are": (
        2.5,
        """
offsets = alive(cuseq.ops.cached_cu_seqlens(lengths))
facts = alive(cuseq.ops.cached_position_ids(lengths, 250_000))  # a million bytes
pass_time(1000)
first = alive(packed.dense_mask())
assert stays(offsets, facts, first) == [True] * 3
second = alive(packed.dense_mask(window=3))
print(stays(offsets, facts, first, second))
""",
        [True, True, False, True],
    ),
    "block masks are masks": (
        2.5,
        """
offsets = alive(cuseq.ops.cached_cu_seqlens(lengths))
facts = alive(cuseq.ops.cached_position_ids(lengths, 250_000))
pass_time(1000)
first = alive(packed.block_mask(block_size=4).kv_indices)  # 4 x 256 x 256 x 4 bytes
second = alive(packed.dense_mask(window=3))
print(stays(offsets, facts, first, second))
""",
        [True, True, False, True],
    ),
    "facts of tokens go before cu_seqlens": (
        1.5,
        """
many = torch.ones(100_000, dtype=torch.int32, device=device)
offsets = alive(cuseq.ops.cached_cu_seqlens(many))  # 400,004 bytes
pass_time(1000)
positions = alive(cuseq.ops.cached_position_ids(many, 150_000))
ids = alive(cuseq.ops.cached_seq_ids(many, 150_000))
print(stays(offsets, positions, ids))
""",
        [True, False, True],
    ),
    "ranges are facts of tokens": (
        1.5,
        """
many = torch.ones(100_000, dtype=torch.int32, device=device)
offsets = alive(cuseq.ops.cached_cu_seqlens(many))
pass_time(1000)
ranges = alive(torch.ops.cuseq.cached_mask_ranges(many, 100_000))  # 800,000 bytes
again = alive(torch.ops.cuseq.cached_mask_ranges(many, 100_000, window=2))
print(stays(offsets, ranges, again))
""",
        [True, False, True],
    ),
    "of two of one size the older goes": (
        2.5,
        """
first = alive(packed.dense_mask())
pass_time(100)
second = alive(packed.dense_mask(window=3))
pass_time(100)
third = alive(packed.dense_mask(window=5))
print(stays(first, second, third))
""",
        [False, True, True],
    ),
    "the one used again is not old": (
        2.5,
        """
first = alive(packed.dense_mask())
pass_time(100)
second = alive(packed.dense_mask(window=3))
pass_time(100)
packed.dense_mask()
third = alive(packed.dense_mask(window=5))
print(stays(first, second, third))
""",
        [True, False, True],
    ),
    "of two of one age the larger goes": (
        5.25,
        """
small = alive(packed.dense_mask())
large = alive(packed.dense_mask(torch.float32))
pass_time(2000)
third = alive(packed.dense_mask(causal=False))
print(stays(small, large, third))
""",
        [True, False, True],
    ),
    "a small one that is old enough goes": (
        5.25,
        """
small = alive(packed.dense_mask())
pass_time(50_000)
large = alive(packed.dense_mask(torch.float32))
third = alive(packed.dense_mask(causal=False))
print(stays(small, large, third))
""",
        [False, True, True],
    ),
    "one that can never fit is not kept": (
        2.5,
        """
offsets = alive(cuseq.ops.cached_cu_seqlens(lengths))
kept = [alive(packed.dense_mask()), alive(packed.dense_mask(window=3))]
before = cuseq.cache.stats()
mask = packed.dense_mask(torch.float32)
assert mask.shape == (1, 1, 1024, 1024) and mask[0, 0, 523, 501:].isinf().any()
assert torch.equal(mask[0, 0] == 0, packed.dense_mask()[0, 0])
assert packed.dense_mask(torch.float32) is not mask
after = cuseq.cache.stats()
assert after["evictions"] == before["evictions"], (before, after)
gone = alive(mask)
del mask
print(stays(offsets, *kept, gone))
""",
        [True, True, True, False],
    ),
    "what is held lives on": (
        2.5,
        """
first, block = packed.dense_mask(), packed.block_mask(block_size=8)
copy, tables = first.clone(), block.kv_indices.clone()
for window in range(1, 9):
    packed.dense_mask(window=window)
assert torch.equal(first, copy) and torch.equal(block.kv_indices, tables)
assert packed.dense_mask() is not first
again = packed.block_mask(block_size=8)
assert again is not block
print([torch.equal(packed.dense_mask(), first)])
""",
        [True],
    ),
    "a block mask that went is another object": (
        2.5,
        """
import weakref
block = packed.block_mask(block_size=4)
wrapper, table = weakref.ref(block), alive(block.kv_indices)
assert packed.block_mask(block_size=4) is block
del block
assert wrapper() is not None
for window in range(1, 4):
    packed.dense_mask(window=window)
assert table.expired()
print([wrapper() is None])
""",
        [True],
    ),
}


@pytest.mark.parametrize(
    "name",
    full_but(
        BOUNDS,
        "masks go before the facts of tokens, however old and large those are",
        "facts of tokens go before cu_seqlens",
        "one that can never fit is not kept",
        "what is held lives on",
    ),
)
def test_the_bound(name, device, run_python):
    bound, code, expected = BOUNDS[name]
    bound = int(bound * 2**20)
    start = BOUNDED.replace("{device!r}", repr(str(device)))
    end = f"assert within({bound}) and cuseq.cache.stats()['entries'] > 0\n"
    result = run_python(start + code + end, CUSEQ_CACHE_MAX_BYTES=str(bound))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(expected)


ROOM_ON_THE_HOST = """
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
    packed.dense_mask()
    packed.dense_mask(window=3)
sizes = [
    event.nbytes()
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    if event.name() == "[memory]" and abs(event.nbytes()) >= MIB
]
print(sizes)
"""


def test_room_is_made_before_memory_is_taken(run_python):
    start = BOUNDED.replace("{device!r}", "'cpu'")
    result = run_python(start + ROOM_ON_THE_HOST, CUSEQ_CACHE_MAX_BYTES=str(3 * 2**19))
    assert result.stdout.strip() == str([2**20, -(2**20), 2**20]), result.stderr


ROOM_ON_THE_GPU = """
packed.dense_mask()
before = torch.cuda.memory_allocated() - MIB
torch.cuda.reset_peak_memory_stats()
for window in (3, 4, 5, None):
    packed.dense_mask(window=window)
peak = torch.cuda.max_memory_allocated() - before
assert MIB <= peak <= 1.5 * MIB, peak
print("one at a time")
"""


def test_room_is_made_before_memory_is_taken_on_the_gpu(cuda, run_python):
    start = BOUNDED.replace("{device!r}", "'cuda'")
    result = run_python(start + ROOM_ON_THE_GPU, CUSEQ_CACHE_MAX_BYTES=str(3 * 2**19))
    assert result.stdout.strip() == "one at a time", result.stderr


GRADIENTS = """
from torch.nn.functional import scaled_dot_product_attention as attention
q, k, v = (torch.randn(1, 2, 1024, 8, device=device, requires_grad=True) for _ in range(3))

def gradients(evict):
    out = attention(q, k, v, packed.dense_mask(torch.float32, window=9))
    if evict:
        for window in range(1, 5):
            packed.dense_mask(torch.float32, window=window).sum()
        assert cuseq.cache.stats()["evictions"] > 0
    return torch.autograd.grad(out.square().sum(), (q, k, v))

for one, other in zip(gradients(False), gradients(True)):
    assert one.isfinite().all() and torch.equal(one, other)
print("equal")
"""


def test_a_mask_that_went_for_room_stays_under_its_backward(device, run_python):
    start = BOUNDED.replace("{device!r}", repr(str(device)))
    result = run_python(start + GRADIENTS, CUSEQ_CACHE_MAX_BYTES=str(6 * 2**20))
    assert result.stdout.strip() == "equal", result.stderr


WITHOUT_CACHE = """
masks = [packed.dense_mask(), packed.dense_mask()]
blocks = [packed.block_mask(), packed.block_mask()]
assert masks[0] is not masks[1] and torch.equal(*masks)
assert blocks[0] is not blocks[1] and torch.equal(*(block.to_dense() for block in blocks))
assert torch.equal(masks[0], cuseq.ops.dense_mask(lengths, 1024))
spans = [packed.dense_mask(spans=[(3, 90)]) for _ in range(2)]
assert torch.equal(*spans) and bool(spans[0][0, 0, 3, 89])
stats = cuseq.cache.stats()
print(stats["entries"], stats["bytes"], stats["hits"])
"""


def test_without_the_cache(device, run_python):
    start = BOUNDED.replace("{device!r}", repr(str(device)))
    result = run_python(start + WITHOUT_CACHE, CUSEQ_CACHE="0")
    assert result.stdout.strip() == "0 0 0", result.stderr


# Threads.


def test_threads_at_once(device):
    shared = [layout(device, [i + 1, 7 - i], 10) for i in range(4)]
    asked = [dict(window=w, causal=c) for w in (None, 2) for c in (True, False)]
    seen = {
        (i, j): reference.mask([i + 1, 7 - i], 10, **options).to(device)
        for i in range(4)
        for j, options in enumerate(asked)
    }
    wrong = []

    def work(seed: int) -> None:
        try:
            for step in range(120):
                i, j = (seed + step) % 4, (seed * 3 + step // 3) % 4
                mask = shared[i].dense_mask(**asked[j])
                block = shared[i].block_mask(**asked[j], block_size=4)
                own = layout(device, [seed + 1, step % 5], 12).dense_mask(spans=[(0, seed + 1)])
                right = (
                    torch.equal(mask[0, 0], seen[i, j])
                    and block.shape == (1, 1, 10, 10)
                    and bool(own[0, 0, 0, seed])
                )
                if not right:
                    wrong.append((seed, step))
                if step % 40 == 39:
                    cuseq.cache.clear()
        except Exception as error:
            wrong.append(error)

    on_threads(work, 5)
    assert wrong == []
    for packed in shared:
        block = packed.block_mask()
        assert packed.dense_mask() is packed.dense_mask()
        on_a_thread(lambda packed=packed, block=block: hit(packed, block))
    del packed, block
    shared.clear()
    assert cuseq.cache.stats()["entries"] == 0


def hit(packed: PackedLayout, block) -> None:
    assert packed.block_mask() is block


# Traced calls never get a cached mask.


def test_compiled_code_leaves_cached_masks_alone(device):
    packed = layout(device)
    mask = packed.dense_mask(torch.float32, finite=True)
    copy = mask.clone()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda packed: packed.dense_mask(torch.float32, finite=True) * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    with only_hits(at_least=0):
        assert torch.equal(compiled(packed), copy * 2)
    assert torch.equal(mask, copy)


# Streams.


def test_a_hit_on_another_stream_waits(cuda):
    packed = layout(cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        mask, block = packed.dense_mask(), packed.block_mask(block_size=2)
        bias = packed.dense_mask(torch.float32, window=2)
    assert packed.dense_mask() is mask
    copy = mask.clone()
    assert packed.block_mask(block_size=2) is block
    dense = block.to_dense()
    assert packed.dense_mask(torch.float32, window=2) is bias
    seen = reference.mask([2, 3], 6)
    assert torch.equal(copy[0, 0].cpu(), seen)
    assert dense[0, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    check_dense(bias, reference.mask([2, 3], 6, window=2), cuda, dtype=torch.float32)


# Memory in a training run.


def test_alternating_packs_show_the_live_masks_alone(cuda):
    total, step_bytes = 4096, 4096 * 4096 * (2 + 4)
    hidden = torch.randn(1, 1, total, 8, device=cuda, requires_grad=True)

    def step(index: int) -> None:
        packed = PackedLayout.from_lengths([1000 + index, 2000], total, device=cuda)
        for layer in range(8):
            packed.dense_mask((torch.bfloat16, torch.float32)[layer % 2])
            packed.block_mask()
        hidden.square().sum().backward()
        hidden.grad = None

    step(0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for index in range(6):
        step(index % 2)
    peak = torch.cuda.max_memory_allocated() - before
    assert step_bytes <= peak <= step_bytes + 4 * 2**20
    assert torch.cuda.memory_allocated() == before


def test_kept_packs_show_the_live_masks_alone(cuda):
    total = 4096
    packs = [PackedLayout.from_lengths([i, 3000], total, device=cuda) for i in (100, 200)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for index in range(8):
        packs[index % 2].dense_mask()
        packs[index % 2].dense_mask(torch.float32)
    live = 2 * total * total * (1 + 4)
    assert live <= torch.cuda.max_memory_allocated() - before <= live + 2**20
    packs.pop()
    assert torch.cuda.memory_allocated() - before <= live // 2 + 2**19


MANY_FACTS = """
import torch, cuseq
facts = [torch.tensor([i]) for i in range(70)]
for fact in facts:
    cuseq.ops.cached_cu_seqlens(fact)
packed = cuseq.PackedLayout.from_lengths([2, 3])
mask, block = packed.dense_mask(), packed.block_mask()
for _ in range(3):
    assert packed.dense_mask() is mask and packed.block_mask() is block
print(cuseq.cache.stats()["entries"])
"""


def test_many_facts_do_not_drive_out_a_new_mask(run_python):
    result = run_python(MANY_FACTS)
    assert result.stdout.strip() == "64", result.stderr


def test_a_tensor_has_one_role_in_a_key(device, fresh_cache):
    lengths = torch.tensor([2, 2], device=device)
    spans = torch.tensor([[0, 2], [2, 4]], dtype=torch.int32, device=device)
    torch.ops.cuseq.cached_dense_mask(lengths, 6, spans=spans)
    with pytest.raises(ValueError, match="cu_seqlens_padded"):
        torch.ops.cuseq.cached_dense_mask(lengths, 6, cu_seqlens_padded=spans)


REFUSED = """
import torch, cuseq
packed = cuseq.PackedLayout.from_lengths([1024])
mask = packed.dense_mask()
for wrong in (dict(row_length=3), dict(dtype=torch.int8)):
    try:
        packed.dense_mask(**wrong)
    except (TypeError, ValueError):
        pass
assert packed.dense_mask() is mask
print(cuseq.cache.stats()["evictions"])
"""


def test_what_is_refused_drives_nothing_out(run_python):
    result = run_python(REFUSED, CUSEQ_CACHE_MAX_BYTES=str(3 * 2**19))
    assert result.stdout.strip() == "0", result.stderr
