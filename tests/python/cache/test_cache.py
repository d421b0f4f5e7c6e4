"""Test the invariants of the identity cache, one after the other.

test_compile.py tests that the cache is bypassed in traced calls.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import reference
import torch
from tiers import full
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cuseq

ops = torch.ops.cuseq

# Each cached op by its typed function and through the dispatcher: they share their entries.
PACKED = {
    "cu_seqlens": (cuseq.ops.cached_cu_seqlens, ops.cached_cu_seqlens, ()),
    "position_ids": (cuseq.ops.cached_position_ids, ops.cached_position_ids, (6,)),
    "seq_ids": (cuseq.ops.cached_seq_ids, ops.cached_seq_ids, (6,)),
}
ALL = pytest.mark.parametrize("name", PACKED)

pytestmark = pytest.mark.usefixtures("fresh_cache")


def expected(name: str, lengths: list[int], *rest: int) -> list[int]:
    return getattr(reference, name)(lengths, *rest)


@contextmanager
def counted(**changes: int):
    """Check the changes of counts in the body; counts not named must not change, except bytes."""
    before = cuseq.cache.stats()
    yield
    after = cuseq.cache.stats()
    moved = {key: after[key] - before[key] for key in after if key != "bytes"}
    assert moved == {**dict.fromkeys(moved, 0), **changes}


def make(device=None) -> torch.Tensor:
    return torch.tensor([2, 3], device=device)


@pytest.mark.kernels
@ALL
def test_a_hit_is_the_same_object(name, device):
    function, op, rest = PACKED[name]
    lengths = make(device)
    with counted(misses=1, entries=1):
        value = function(lengths, *rest)
    assert value.tolist() == expected(name, [2, 3], *rest)
    with counted(hits=3):
        assert function(lengths, *rest) is value
        assert op(lengths, *rest) is value
        named = dict(zip(("total_tokens",), rest, strict=False))
        assert function(lengths=lengths, **named) is value


def test_stats():
    lengths = make()
    before = cuseq.cache.stats()
    assert set(before) == {"hits", "misses", "bypasses", "evictions", "bytes", "entries"}
    assert (before["entries"], before["bytes"]) == (0, 0)
    cuseq.ops.cached_cu_seqlens(lengths), cuseq.ops.cached_position_ids(lengths, 6)
    assert cuseq.cache.stats()["bytes"] >= 4 * (3 + 6)
    with counted(entries=-2):
        cuseq.cache.clear()
    assert cuseq.cache.stats()["bytes"] == 0


# Invariant 1: the key is the tensor's identity, the device, the op and its parameters.


def test_parameters_are_part_of_the_key():
    lengths = make()
    with counted(misses=4, entries=4, hits=4):
        for _ in range(2):
            assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 5]
            for total in (6, 7):
                positions = cuseq.ops.cached_position_ids(lengths, total)
                assert positions.tolist() == reference.position_ids([2, 3], total)
            assert cuseq.ops.cached_seq_ids(lengths, 6).tolist() == [0, 0, 1, 1, 1, 2]


def test_equal_tensors_are_different_keys():
    one, other = make(), make()
    view = one[:]
    with counted(misses=3, entries=3):
        values = [cuseq.ops.cached_cu_seqlens(key) for key in (one, other, view)]
    assert len({id(value) for value in values}) == 3


def test_recycled_addresses_are_no_hits():
    for first in range(2000):
        assert cuseq.ops.cached_cu_seqlens(torch.tensor([first, 1])).tolist() == [
            0,
            first,
            first + 1,
        ]


# Invariant 2: an edited key or an edited value is a miss.

EDITS = {
    "fill_": (lambda lengths: lengths.fill_(1), [1, 1]),
    "item assignment": (lambda lengths: lengths.__setitem__(0, 1), [1, 3]),
    "through a view": (lambda lengths: lengths[1:].fill_(1), [2, 1]),
    "copy_": (lambda lengths: lengths.copy_(torch.tensor([3, 0])), [3, 0]),
    ".data =": (lambda lengths: setattr(lengths, "data", torch.tensor([1, 2])), [1, 2]),
    "set_": (lambda lengths: lengths.set_(torch.tensor([1, 2])), [1, 2]),
    "resize_": (lambda lengths: lengths.resize_(1), [2]),
    "stride": (lambda lengths: lengths.as_strided_((2,), (0,)), [2, 2]),
    "offset": (lambda lengths: lengths.as_strided_((2,), (0,), 1), [3, 3]),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_key_is_a_miss(name):
    edit, lengths = EDITS[name]
    key = make()
    cuseq.ops.cached_cu_seqlens(key)
    edit(key)
    with counted(misses=1, hits=1):
        value = cuseq.ops.cached_cu_seqlens(key)
        assert cuseq.ops.cached_cu_seqlens(key) is value
    assert value.tolist() == reference.cu_seqlens(lengths)


@ALL
def test_an_edited_value_is_a_miss(name, device):
    function, _, rest = PACKED[name]
    lengths = make(device)
    edited = function(lengths, *rest)
    edited[1:].add_(7)
    with counted(misses=1):
        assert function(lengths, *rest).tolist() == expected(name, [2, 3], *rest)


def test_invalidate_after_a_write_that_no_counter_sees():
    lengths = make()
    cuseq.ops.cached_cu_seqlens(lengths), cuseq.ops.cached_seq_ids(lengths, 6)
    other = make()
    kept = cuseq.ops.cached_cu_seqlens(other)
    lengths.data.fill_(1)
    with counted(entries=-2):
        cuseq.cache.invalidate(lengths)
    assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 1, 2]
    assert cuseq.ops.cached_cu_seqlens(other) is kept
    cuseq.cache.invalidate(make())  # nothing is cached for it, so nothing happens


def test_invalidate_before_swap_tensors():
    one, other = make(), torch.tensor([1, 1])
    cuseq.ops.cached_cu_seqlens(one), cuseq.ops.cached_cu_seqlens(other)
    cuseq.cache.invalidate(one), cuseq.cache.invalidate(other)
    torch.utils.swap_tensors(one, other)
    assert cuseq.ops.cached_cu_seqlens(one).tolist() == [0, 1, 2]
    assert cuseq.ops.cached_cu_seqlens(other).tolist() == [0, 2, 5]
    with counted(entries=-2):
        del one, other


def test_an_error_leaves_nothing_behind():
    wrong = torch.tensor([2, -3])
    for call in (cuseq.ops.cached_cu_seqlens, ops.cached_cu_seqlens):
        with counted(misses=1), pytest.raises(ValueError, match=r"lengths\[1\] = -3"):
            call(wrong)


# Invariant 3: no inference tensor and no fake tensor is ever kept.


def test_inference_mode_leaves_a_miss_for_training():
    lengths = make()
    with torch.inference_mode(), counted(misses=1):
        assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 5]
    value = cuseq.ops.cached_cu_seqlens(lengths)
    assert not value.is_inference()
    weight = torch.ones(6, requires_grad=True)
    weight.index_select(0, value).sum().backward()  # saves the value for backward
    with torch.inference_mode(), counted(hits=1):
        assert cuseq.ops.cached_cu_seqlens(lengths) is value


def test_inference_tensors_are_no_keys():
    with torch.inference_mode():
        lengths = make()
        with counted(bypasses=1):
            assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 5]
    with counted(bypasses=1):
        cuseq.ops.cached_cu_seqlens(lengths)


def test_selective_checkpointing_sees_the_same_ops_again():
    lengths = make()

    def segment(hidden):
        return hidden.sin() * cuseq.ops.cached_position_ids(lengths, 6)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    hidden = torch.ones(6, requires_grad=True)
    out = checkpoint(segment, hidden, use_reentrant=False, context_fn=contexts)
    cuseq.ops.cached_position_ids(lengths, 6)  # a lookup by a layer outside the segment
    out.sum().backward()
    assert torch.equal(hidden.grad, hidden.cos() * torch.tensor([0, 1, 0, 1, 2, 0]))


# Invariant 4: one cache for all threads.


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_on_another_thread_hits(reentrant, device):
    lengths = make(device)
    hidden = torch.ones(6, device=device, requires_grad=True)
    threads = []

    def segment(hidden):
        threads.append(threading.get_ident())
        return hidden.sin() * cuseq.ops.cached_position_ids(lengths, 6)

    with counted(misses=1, hits=1, entries=1):
        loss = checkpoint(segment, hidden, use_reentrant=reentrant).sum()
        # On the CPU autograd runs on the calling thread, on a GPU on a thread of its own.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
    assert threads[0] != threads[1]


def on_threads(work, count: int) -> None:
    """Run `work(number)` on `count` threads at once; all of them must finish."""
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def test_threads_at_once():
    shared = [torch.tensor([i, 3]) for i in range(6)]
    wrong = []

    def work(seed: int) -> None:
        for step in range(300):
            lengths = shared[(seed + step) % 6]
            own = torch.tensor([seed, step])
            for key, values in ((lengths, [(seed + step) % 6, 3]), (own, [seed, step])):
                if cuseq.ops.cached_cu_seqlens(key).tolist() != reference.cu_seqlens(values):
                    wrong.append((seed, step))
            with cuseq.cache.forward_scope():
                cuseq.ops.cached_seq_ids(own, 400)
            if step % 50 == 0:
                cuseq.cache.clear()
            elif step % 20 == 0:
                cuseq.cache.invalidate(lengths)

    on_threads(work, 6)
    assert wrong == []
    assert cuseq.cache.stats()["entries"] <= len(shared)


# Invariant 5: many entries, bounded in number and bytes.


def test_many_are_kept_and_the_oldest_goes():
    keys = [torch.tensor([i, 1]) for i in range(64)]
    with counted(misses=64, hits=64, entries=64):
        for _ in range(2):
            for key in keys:
                cuseq.ops.cached_cu_seqlens(key)
    newest = make()
    with counted(misses=1, evictions=1, hits=1):
        cuseq.ops.cached_cu_seqlens(keys[0])  # used again, so keys[1] is the oldest now
        cuseq.ops.cached_cu_seqlens(newest)
    with counted(hits=2, misses=1, evictions=1):
        cuseq.ops.cached_cu_seqlens(keys[0]), cuseq.ops.cached_cu_seqlens(keys[2])
        cuseq.ops.cached_cu_seqlens(keys[1])


LIMITED = """
import torch, cuseq
keys = [torch.tensor([i, 3]) for i in range(5)]
for _ in range(2):
    for i, key in enumerate(keys):
        assert cuseq.ops.cached_position_ids(key, 100).tolist()[i:] == [0, 1, 2, *range(97 - i)]
stats = cuseq.cache.stats()
again = cuseq.ops.cached_position_ids(keys[-1], 100)
print(stats["entries"], stats["evictions"] > 0, stats["bytes"], stats["hits"],
      cuseq.ops.cached_position_ids(keys[-1], 100) is again)
"""


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"CUSEQ_CACHE_MAX_ENTRIES": "2"}, "2 True 800 0 True"),
        full({"CUSEQ_CACHE_MAX_BYTES": "1000"}, "2 True 800 0 True"),
        full({"CUSEQ_CACHE_MAX_BYTES": "399"}, "0 False 0 0 False"),
        ({"CUSEQ_CACHE": "0"}, "0 False 0 0 False"),
        full({"CUSEQ_CACHE": "1"}, "5 False 2000 5 True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_limits(environment, printed, run_python):
    result = run_python(LIMITED, **environment)
    assert result.stdout.strip() == printed, result.stderr


# Invariant 8: nothing is pinned.


@ALL
def test_entries_go_with_their_key(name, device):
    function, _, rest = PACKED[name]
    lengths = make(device)
    value = function(lengths, *rest)
    wrapper, storage = weakref.ref(value), StorageWeakRef(value.untyped_storage())
    key = weakref.ref(lengths)
    del value
    assert not storage.expired()
    del lengths
    # At once: there was no other call of cuseq in between.
    assert key() is None
    assert wrapper() is None and storage.expired()
    assert cuseq.cache.stats()["entries"] == 0


def test_a_held_value_outlives_its_key():
    lengths = make()
    value = cuseq.ops.cached_cu_seqlens(lengths)
    del lengths
    assert value.tolist() == [0, 2, 5]


def test_entries_stay_while_autograd_holds_their_key():
    lengths = make()
    out = torch.ones(6, requires_grad=True).index_select(0, lengths)
    value = cuseq.ops.cached_cu_seqlens(lengths)
    del lengths  # the wrapper's last reference, not the tensor's
    with counted(hits=1):
        assert cuseq.ops.cached_cu_seqlens(out.grad_fn._saved_index) is value


def test_forward_scopes_nest():
    before, outer, inner = make(), make(), make()
    cuseq.ops.cached_cu_seqlens(before)
    with counted(hits=1, misses=3), cuseq.cache.forward_scope():
        cuseq.ops.cached_cu_seqlens(outer)
        with counted(misses=1), cuseq.cache.forward_scope():
            value = cuseq.ops.cached_cu_seqlens(inner)
            storage = StorageWeakRef(value.untyped_storage())
            del value
            assert cuseq.cache.stats()["entries"] == 3
        assert storage.expired()
        cuseq.ops.cached_cu_seqlens(before)  # made outside, so it stays
        cuseq.ops.cached_seq_ids(before, 6)
        assert cuseq.cache.stats()["entries"] == 3
    with counted(hits=1):
        cuseq.ops.cached_cu_seqlens(before)


def test_forward_scope_ends_with_an_exception():
    lengths, after = make(), make()
    with pytest.raises(KeyError), counted(misses=1), cuseq.cache.forward_scope():
        cuseq.ops.cached_cu_seqlens(lengths)
        raise KeyError
    with counted(misses=1, entries=1):  # no scope is left open
        cuseq.ops.cached_cu_seqlens(after)


def test_forward_scope_is_the_threads_own():
    mine, theirs = make(), make()
    opened = cuseq.cache.forward_scope()

    def open_and_stay():
        opened.__enter__()
        return cuseq.ops.cached_cu_seqlens(theirs)

    with ThreadPoolExecutor(1) as pool:
        with cuseq.cache.forward_scope():
            cuseq.ops.cached_cu_seqlens(mine)
            value = pool.submit(open_and_stay).result()
        with counted(hits=1, misses=1, entries=1):
            assert cuseq.ops.cached_cu_seqlens(theirs) is value
            cuseq.ops.cached_cu_seqlens(mine)
        with counted(entries=-1):
            pool.submit(opened.__exit__, None, None, None).result()
