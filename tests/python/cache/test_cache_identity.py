"""Test which tensors are one key of the identity cache, and which writes make an entry stale.

The simple cases are in test_cache.py; lifetime and streams have files of their own.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import reference
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_cache import counted, make
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")


def check(key: torch.Tensor) -> torch.Tensor:
    """Return the cached value of a key, after checking it against the key's present values."""
    value = cuseq.ops.cached_cu_seqlens(key)
    assert value.tolist() == reference.cu_seqlens(key.tolist())
    return value


def cpu_only(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("this shares memory with the host")


# Each changes one part of the key; `.data =` keeps the version counter, so only that part differs.
REBINDS = {
    "storage": lambda base: base[0].clone(),
    "offset": lambda base: base[1],
    "sizes": lambda base: base[0, :1],
    "strides": lambda base: base.t()[0],
    "dtype": lambda base: base.view(torch.int32)[0, :2],
}


@pytest.mark.parametrize("part", REBINDS)
def test_every_part_of_the_key_counts(part, device):
    base = torch.tensor([[2, 3], [4, 5]], device=device)
    key = base[0].detach()
    old, version = check(key), key._version
    key.data = REBINDS[part](base)
    assert key._version == version
    with counted(misses=1):
        assert check(key) is not old


def test_data_of_inference_mode_is_not_kept(device):
    key = make(device)
    check(key)
    with torch.inference_mode():
        key.data = torch.tensor([4, 1], device=device)
    with counted(bypasses=1):
        check(key)


def test_recycled_storages_are_no_hits():
    key = make()
    version = key._version
    for first in range(500):
        check(key)
        key.data = torch.empty(
            0, dtype=torch.int64
        )  # the old storage is freed before the new one is allocated
        key.data = torch.tensor([first, 1])
    assert key._version == version


# Writes that the version counter sees.
EDITS = {
    "foreach": lambda key: torch._foreach_add_([key], 1),
    "foreach copy": lambda key: torch._foreach_copy_([key], [key + 1]),
    "out=": lambda key: torch.add(key.clone(), 1, out=key),
    "index_put_": lambda key: key.index_put_((key.new_tensor([0]),), key.new_tensor(7)),
    "masked_fill_": lambda key: key.masked_fill_(key > 2, 1),
    "swapped rows": lambda key: key.copy_(key.flip(0)),
    "storage freed and filled": lambda key: refill(key),
}


def refill(key: torch.Tensor) -> None:
    """Do what a sharded module does to its parameters between two uses."""
    size = key.untyped_storage().nbytes()
    key.untyped_storage().resize_(0)
    key.untyped_storage().resize_(size)
    key.fill_(4)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EDITS)
def test_edits_are_seen(name, mode, device):
    key = make(device)
    check(key)
    before = key.tolist()
    with mode():
        EDITS[name](key)
    assert key.tolist() != before
    with counted(misses=1, hits=1):
        assert check(key) is check(key)


# Tensors of the same memory that share one version counter; each is a key of its own.
ALIASES = {
    "view": lambda base: base[:],
    "part": lambda base: base[1:3],
    "every other": lambda base: base[::2],
    "tensor_split": lambda base: base.tensor_split(2)[1],
    "transposed": lambda base: base.view(2, 2).t()[1],
    "detach": lambda base: base.detach(),
    "detached view": lambda base: base[1:].detach(),
    "another dtype": lambda base: base.view(torch.int32),
}


@pytest.mark.parametrize("name", ALIASES)
def test_edits_through_an_alias_are_seen(name, device):
    base = torch.tensor([2, 3, 4, 5], device=device)
    alias = ALIASES[name](base)
    with counted(misses=2, hits=2, entries=2):
        assert check(base) is not check(alias)
        check(base), check(alias)
    for edited, number in ((base, 6), (alias, 0)):
        edited.fill_(number)
        with counted(misses=2):
            check(base), check(alias)


# Writes that the version counter does not see: documented, with invalidate().
UNSEEN = {
    ".data": lambda key: key.data.fill_(1),
    "another tensor of the storage": lambda key: key.new_empty(0).set_(key.data).fill_(1),
    "dlpack": lambda key: torch.from_dlpack(key.data).fill_(1),
    "storage": lambda key: key.untyped_storage().copy_(torch.ones_like(key).untyped_storage()),
    "numpy": lambda key: (cpu_only(key.device), key.numpy().fill(1)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_invalidate_after_unseen_writes(name, device):
    key = make(device)
    other = make(device)
    check(key)
    kept = check(other)
    version = key._version
    UNSEEN[name](key)
    assert key._version == version and key.tolist() == [1, 1]
    cuseq.cache.invalidate(key)
    with counted(misses=1, hits=1, entries=1):
        check(key)
        assert check(other) is kept


def test_a_numpy_array_as_lengths():
    array = make().numpy()
    key = torch.from_numpy(array)
    check(key)
    array[0] = 7
    cuseq.cache.invalidate(key)
    assert check(key).tolist() == [0, 7, 10]


def test_lazy_clones():
    if not hasattr(torch, "_lazy_clone"):
        pytest.skip("this torch has no copy-on-write tensors")
    key = make()
    clone = torch._lazy_clone(key)
    check(key)
    kept = check(clone)
    key.add_(1)
    with counted(misses=1, hits=1):
        check(key)
        assert check(clone) is kept
    clone.add_(5)
    with counted(misses=1, hits=1):
        check(key), check(clone)


@pytest.mark.parametrize("keys", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_swap_tensors(keys, device):
    tensors = [make(device), torch.tensor([4, 1], device=device)]
    contents = [tensor.tolist() for tensor in tensors]
    for key in keys:
        check(tensors[key])
    # Without invalidate() PyTorch may raise, because there are weak references to the key.
    with suppress(RuntimeError):
        torch.utils.swap_tensors(*tensors)
        contents.reverse()
    assert [tensor.tolist() for tensor in tensors] == contents
    check(tensors[0]), check(tensors[1])
    cuseq.cache.invalidate(tensors[0]), cuseq.cache.invalidate(tensors[1])
    torch.utils.swap_tensors(*tensors)
    assert [tensor.tolist() for tensor in tensors] == contents[::-1]
    check(tensors[0]), check(tensors[1])
    with counted(entries=-2):
        tensors.clear()


def test_swapped_values(device):
    key = make(device)
    value = check(key)
    with suppress(RuntimeError):
        torch.utils.swap_tensors(value, torch.zeros_like(value))
    check(key)


def test_lengths_that_reentrant_checkpoint_detaches(device):
    lengths = make(device)
    scale = torch.tensor([0, 1, 0, 1, 2, 0], device=device)
    keys = []

    def segment(hidden, lengths):
        keys.append(lengths)
        return hidden.sin() * cuseq.ops.cached_position_ids(lengths, 6)

    hidden = torch.ones(6, device=device, requires_grad=True)
    with counted(misses=2, entries=2):
        checkpoint(segment, hidden, lengths, use_reentrant=True).sum().backward()
    assert keys[0] is lengths and keys[1] is not lengths
    assert torch.equal(hidden.grad, hidden.cos() * scale)
    lengths.fill_(1)  # the detached one shares the counter
    for key in keys:
        assert cuseq.ops.cached_position_ids(key, 6).tolist() == reference.position_ids([1, 1], 6)


# A caller that edits a returned value.
VALUE_EDITS = {
    "in place": lambda value: value.add_(1),
    "through a view": lambda value: value[1:].zero_(),
    "through detach": lambda value: value.detach().zero_(),
    "foreach": lambda value: torch._foreach_add_([value], 1),
    "out=": lambda value: torch.add(value.clone(), 1, out=value),
    "resize_": lambda value: value.resize_(1),
    "set_": lambda value: value.set_(torch.zeros_like(value)),
    "as_strided_": lambda value: value.as_strided_((3,), (0,)),
    "unsqueeze_": lambda value: value.unsqueeze_(0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VALUE_EDITS)
def test_edited_values_are_misses(name, mode, device):
    key = make(device)
    value = check(key)
    with mode():
        VALUE_EDITS[name](value)
    edited = value.tolist()
    with counted(misses=1, hits=1):
        assert check(key) is check(key)
    assert value.tolist() == edited, "it is the caller's now"


VALUE_UNSEEN = {
    ".data": lambda value: value.data.fill_(7),
    ".data =": lambda value: setattr(value, "data", torch.zeros_like(value)),
    "storage": lambda value: value.untyped_storage().resize_(0),
    "numpy": lambda value: (cpu_only(value.device), value.numpy().fill(7)),
}


@pytest.mark.parametrize("name", VALUE_UNSEEN)
def test_invalidate_after_unseen_writes_to_a_value(name, device):
    key = make(device)
    value = check(key)
    version = value._version
    VALUE_UNSEEN[name](value)
    assert value._version == version
    cuseq.cache.invalidate(key)
    check(key)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_saves_what_evaluation_asked_for(mode, device):
    key = make(device)
    with mode():
        check(key), cuseq.ops.cached_position_ids(key, 6)
    weight = torch.ones(6, device=device, requires_grad=True)
    for value in (check(key), cuseq.ops.cached_position_ids(key, 6)):
        assert not value.is_inference()
        weight.index_select(0, value).sum().backward()
    with mode(), counted(hits=2):
        views = [cuseq.ops.cached_cu_seqlens(key)[1:], cuseq.ops.cached_position_ids(key, 6)[1:]]
    for view in views:
        weight.index_select(0, view).sum().backward()
    assert weight.grad.sum() == 3 + 6 + 2 + 5


def test_inference_tensors_are_read_anew(device):
    with torch.inference_mode():
        key = make(device)
        view = key[1:]
        with counted(bypasses=6):
            for _ in range(3):
                check(key), check(view)
                key.add_(1)
    with counted(bypasses=1):
        check(key)
    copy = key.clone()
    with counted(misses=1, hits=1, entries=1):
        assert check(copy) is check(copy)


def lengths_of(indices: list[int]) -> torch.Tensor:
    return torch.tensor([*indices, 1])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_of_a_loader(workers):
    # Batches come in recycled tensors and, from workers, in recycled shared memory.
    loader = DataLoader(range(1200), batch_size=2, collate_fn=lengths_of, num_workers=workers)
    with counted(misses=600, hits=600):
        for i, lengths in enumerate(loader):
            assert check(lengths).tolist() == [0, 2 * i, 4 * i + 1, 4 * i + 2]
            check(lengths)
            del lengths


def test_micro_batches_of_one_tensor(device):
    for step in range(50):
        lengths = torch.arange(step, step + 12, device=device)
        parts = lengths.tensor_split(5)
        with counted(misses=5, hits=5, entries=5):
            for _ in range(2):
                for part in parts:
                    check(part)
        again = lengths.tensor_split(5)  # other views, other keys
        with counted(misses=5, entries=5):
            for part in again:
                check(part)
        del lengths, parts, part, again
    assert cuseq.cache.stats()["entries"] == 0


TOTAL = 96
CALLS = {
    "cu_seqlens": cuseq.ops.cached_cu_seqlens,
    "position_ids": lambda key: cuseq.ops.cached_position_ids(key, TOTAL),
    "seq_ids": lambda key: cuseq.ops.cached_seq_ids(key, TOTAL),
}
WHICH = st.integers(0, 99)
NUMBER = st.integers(0, 6)
SHORT = st.lists(NUMBER, max_size=4)


class AnySequence(RuleBasedStateMachine):
    """Any sequence of actions on a few keys gives right answers and leaves nothing behind."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.keys: list[torch.Tensor] = []
        self.scopes: list = []
        self.ask_always = False

    def key(self, which: int) -> torch.Tensor:
        return self.keys[which % len(self.keys)]

    @initialize(always=st.booleans())
    def start_empty(self, always):
        cuseq.cache.clear()
        self.ask_always = always

    @precondition(lambda self: len(self.keys) < 6)
    @rule(lengths=SHORT, dtype=st.sampled_from(reference.DTYPES))
    def make(self, lengths, dtype):
        self.keys.append(torch.tensor(lengths, dtype=dtype, device=self.device))

    @precondition(lambda self: 0 < len(self.keys) < 6)
    @rule(which=WHICH, begin=st.integers(0, 3), detached=st.booleans())
    def alias(self, which, begin, detached):
        key = self.key(which)
        self.keys.append(key.detach() if detached else key[begin:])

    def ask(self, key, inference=False):
        for name, call in CALLS.items():
            rest = () if name == "cu_seqlens" else (TOTAL,)
            expected = getattr(reference, name)(key.tolist(), *rest)
            with torch.inference_mode(inference):
                assert call(key).tolist() == expected
                again = call(key)
            assert again.tolist() == expected
            if not inference:
                assert call(key) is again

    @precondition(lambda self: self.keys)
    @rule(which=WHICH, inference=st.booleans())
    def query(self, which, inference):
        self.ask(self.key(which), inference)

    @precondition(lambda self: self.keys)
    @rule(which=WHICH, number=NUMBER, inference=st.booleans())
    def edit(self, which, number, inference):
        with torch.inference_mode(inference):
            self.key(which).fill_(number)

    @precondition(lambda self: self.keys)
    @rule(which=WHICH, call=st.sampled_from(sorted(CALLS)))
    def edit_the_value(self, which, call):
        CALLS[call](self.key(which)).add_(1)

    @precondition(lambda self: self.keys)
    @rule(which=WHICH, size=st.integers(0, 4))
    def shrink(self, which, size):
        key = self.key(which)
        key.resize_(min(size, len(key)))

    @precondition(lambda self: self.keys)
    @rule(which=WHICH, lengths=SHORT)
    def rebind(self, which, lengths):
        key = self.key(which)
        key.data = torch.tensor(lengths, dtype=key.dtype, device=self.device)

    @precondition(lambda self: self.keys)
    @rule(which=WHICH)
    def drop(self, which):
        self.keys.pop(which % len(self.keys))

    @precondition(lambda self: self.keys)
    @rule(which=WHICH)
    def invalidate(self, which):
        cuseq.cache.invalidate(self.key(which))

    @rule()
    def clear(self):
        cuseq.cache.clear()
        assert cuseq.cache.stats()["entries"] == cuseq.cache.stats()["bytes"] == 0

    @precondition(lambda self: len(self.scopes) < 3)
    @rule()
    def open_scope(self):
        self.scopes.append(cuseq.cache.forward_scope())
        self.scopes[-1].__enter__()

    @precondition(lambda self: self.scopes)
    @rule()
    def close_scope(self):
        inside = torch.ones(2, dtype=torch.int64, device=self.device)
        value = StorageWeakRef(check(inside).untyped_storage())
        self.scopes.pop().__exit__(None, None, None)
        assert value.expired()

    @precondition(lambda self: self.ask_always)
    @invariant()
    def right_answers(self):
        for key in self.keys:
            self.ask(key)

    @invariant()
    def nothing_but_live_keys(self):
        live = {id(t) for key in self.keys for t in (key, key._base) if t is not None}
        assert cuseq.cache.stats()["entries"] <= len(live) * len(CALLS)

    def teardown(self):
        while self.scopes:
            self.close_scope()
        self.keys.clear()
        assert cuseq.cache.stats()["entries"] == cuseq.cache.stats()["bytes"] == 0


@pytest.mark.slow
def test_any_sequence_of_actions(device):
    run_state_machine_as_test(
        lambda: AnySequence(device), settings=settings(max_examples=200, stateful_step_count=40)
    )
