"""Test how long entries of the identity cache live, with processes, threads and limits."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_cache import counted, make
from test_cache_identity import check
from tiers import full, full_but
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")


def on_a_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def value_of(key: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the entry's memory, which shows without cuseq when it is freed."""
    return StorageWeakRef(check(key).untyped_storage())


class Node:
    """An object to make a reference cycle of."""


# Each function holds the key and returns what releases it.


def held_by_a_list(key, drop):
    box = [key]
    return lambda: drop(box.clear)


def held_by_a_cycle(key, drop):
    node = Node()
    node.itself, node.key = node, key
    return lambda: drop(gc.collect)


def held_by_itself(key, drop):
    key.itself = key
    return lambda: drop(gc.collect)


def held_by_a_view(key, drop):
    box = [key[1:]]
    return lambda: drop(box.clear)


def held_by_a_traceback(key, drop):
    def fail(lengths):
        raise KeyError

    box = []
    try:
        fail(key)
    except KeyError as error:
        box.append(error)
    return lambda: drop(box.clear)


def held_by_autograd(key, drop):
    box = [torch.ones(9, device=key.device, requires_grad=True).index_select(0, key)]
    return lambda: drop(box.clear)


def freed_by_backward(key, drop):
    loss = torch.ones(9, device=key.device, requires_grad=True).index_select(0, key).sum()
    return lambda: drop(loss.backward)


HOLDERS = [
    held_by_a_list,
    held_by_a_cycle,
    held_by_itself,
    held_by_a_view,
    held_by_a_traceback,
    held_by_autograd,
    freed_by_backward,
]


@pytest.mark.parametrize("drop", [lambda let_go: let_go(), on_a_thread], ids=["here", "thread"])
@pytest.mark.parametrize("hold", HOLDERS)
def test_entries_go_with_the_last_reference(hold, drop, device):
    key = make(device)
    value = value_of(key)
    let_go = hold(key, drop)
    del key
    assert not value.expired()
    let_go()
    # At once: there was no other call of cuseq in between.
    assert value.expired()
    assert cuseq.cache.stats()["entries"] == 0


def test_a_key_that_only_autograd_holds(device):
    key = make(device)
    out = torch.ones(9, device=device, requires_grad=True).index_select(0, key)
    del key
    value = value_of(out.grad_fn._saved_index)
    assert not value.expired()
    with counted(hits=1):
        check(out.grad_fn._saved_index)
    del out
    assert value.expired()


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
def test_batches_of_a_loader_with_workers(pinned, request):
    if pinned:
        request.getfixturevalue("cuda")
    loader = DataLoader(range(20), batch_size=2, num_workers=2, pin_memory=pinned)
    batches = list(loader)
    assert all(lengths.is_pinned() == pinned for lengths in batches)
    values = [value_of(lengths) for lengths in batches]
    assert not any(value.expired() for value in values)
    batches.pop()
    assert [value.expired() for value in values] == [False] * 9 + [True]
    batches.clear()
    assert all(value.expired() for value in values)


def test_edited_and_rebound_keys_leave_nothing(device):
    key = make(device)
    for _ in range(3):
        old = value_of(key)
        key.add_(1)
        with counted(misses=1):
            new = value_of(key)
        assert old.expired() and not new.expired()
    cuseq.cache.invalidate(key)
    value = value_of(key)
    del key
    assert new.expired() and value.expired()


# Scopes; test_cache.py tests that they nest and end with an exception.


def test_an_inner_scope_leaves_the_outer_one_open():
    keys = [make() for _ in range(3)]
    with cuseq.cache.forward_scope():
        for key in keys[:2]:
            with cuseq.cache.forward_scope():
                value = value_of(key)
            assert value.expired()
        values = [value_of(key) for key in keys]
        assert not any(value.expired() for value in values)
    assert all(value.expired() for value in values)


def test_scopes_closed_out_of_order():
    before, keys = make(), [make() for _ in range(3)]
    kept = check(before)
    outer, inner = cuseq.cache.forward_scope(), cuseq.cache.forward_scope()
    outer.__enter__()
    values = [value_of(keys[0])]
    inner.__enter__()
    values.append(value_of(keys[1]))
    outer.__exit__(None, None, None)
    assert values[0].expired()
    values.append(value_of(keys[2]))
    inner.__exit__(None, None, None)
    assert all(value.expired() for value in values)
    with counted(hits=1, misses=1, entries=1):  # no scope is left open
        assert check(before) is kept
        check(keys[0])


def test_scopes_of_interleaved_generators():
    before = make()
    kept = check(before)
    values = []

    def steps():
        with cuseq.cache.forward_scope():
            for _ in range(2):
                key = make()
                keys.append(key)
                values.append(value_of(key))
                yield

    keys = []
    first, second = steps(), steps()
    next(first), next(second), next(first), next(second)
    first.close()  # the scope that was opened first
    second.close()
    assert len(values) == 4 and all(value.expired() for value in values)
    with counted(hits=1, misses=1, entries=1):
        assert check(before) is kept
        check(keys[0])


def test_scopes_of_interleaved_tasks():
    before = make()
    kept = check(before)
    keys, values = [], []

    async def forward():
        with cuseq.cache.forward_scope():
            for _ in range(3):
                keys.append(make())
                values.append(value_of(keys[-1]))
                await asyncio.sleep(0)

    async def all_at_once():
        await asyncio.gather(*(forward() for _ in range(3)))

    asyncio.run(all_at_once())
    assert len(values) == 9 and all(value.expired() for value in values)
    with counted(hits=1, misses=1, entries=1):
        assert check(before) is kept
        check(keys[0])


def test_a_scope_closed_by_another_thread():
    mine, later, theirs = make(), make(), make()
    scope = cuseq.cache.forward_scope()
    scope.__enter__()
    value = value_of(mine)

    def close():
        check(theirs)
        scope.__exit__(None, None, None)

    on_a_thread(close)
    assert value.expired()
    with counted(hits=2, misses=1, entries=1):
        check(theirs)
        assert check(later) is check(later)
    value = value_of(later)
    del later
    assert value.expired()


def test_what_autograds_threads_put_in_outlives_the_scope(device):
    keys = [make(device)]

    def segment(hidden):
        return hidden.sin() * cuseq.ops.cached_position_ids(keys[0], 6)

    hidden = torch.ones(6, device=device, requires_grad=True)
    with cuseq.cache.forward_scope():
        loss = checkpoint(segment, hidden, use_reentrant=False).sum()
        cuseq.cache.clear()
        with counted(misses=1, entries=1):
            on_a_thread(loss.backward)
    with counted(hits=1):
        value = StorageWeakRef(cuseq.ops.cached_position_ids(keys[0], 6).untyped_storage())
    keys.clear()
    assert value.expired()


# Limits, which are read once when the process starts.

LEAST_RECENTLY_USED = """
import torch, cuseq
keys = {name: torch.tensor([i]) for i, name in enumerate("abcde")}
tokens = {"a": 100, "b": 50, "c": 75, "d": 50, "e": 1000}

def ask(name):
    before = cuseq.cache.stats()["hits"]
    value = cuseq.ops.cached_seq_ids(keys[name], tokens[name])
    first = "abcde".index(name)
    assert value.tolist() == [0] * first + [1] * (tokens[name] - first)
    return cuseq.cache.stats()["hits"] - before

for name in "abcad":
    ask(name)
stats = cuseq.cache.stats()
print([ask(name) for name in "acdb"], stats["entries"], stats["evictions"])
"""

LARGER_THAN_THE_LIMIT = """
for name in "bcd":
    ask(name)
before = cuseq.cache.stats()
assert ask("e") == ask("e") == 0
print([ask(name) for name in "bcd"], cuseq.cache.stats()["evictions"] - before["evictions"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit,hits",
    [
        ({"CUSEQ_CACHE_MAX_ENTRIES": "3"}, [1, 1, 1, 0]),
        # Freeing c releases more bytes than b, which is slightly older.
        ({"CUSEQ_CACHE_MAX_BYTES": "1000"}, [1, 0, 1, 0]),
    ],
    ids=["entries", "bytes"],
)
def test_the_least_recently_used_goes_first(limit, hits, run_python):
    result = run_python(LEAST_RECENTLY_USED, **limit)
    assert result.stdout.strip() == f"{hits} 3 1", result.stderr


@pytest.mark.parametrize(
    "name,value,rule",
    [
        ("CUSEQ_CACHE", "no", "0 or 1"),
        full("CUSEQ_CHECK", "yes", "0 or 1"),
        full("CUSEQ_CACHE_MAX_ENTRIES", "0", "a number of at least 1"),
        ("CUSEQ_CACHE_MAX_BYTES", "1G", "a number of at least 0"),
        full("CUSEQ_CACHE_MAX_BYTES", "-1", "a number of at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(name, value, rule, run_python):
    """The import raises, without advice to reinstall."""
    result = run_python("import cuseq", **{name: value})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"ValueError: {name} must be {rule}, got '{value}'"


@pytest.mark.slow
def test_a_value_larger_than_the_limit_drives_nothing_out(run_python):
    result = run_python(LEAST_RECENTLY_USED + LARGER_THAN_THE_LIMIT, CUSEQ_CACHE_MAX_BYTES="1000")
    assert result.stdout.splitlines()[1:] == ["[1, 1, 1] 0"], result.stdout + result.stderr


MANY_BATCHES = """
import resource, torch, cuseq

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def run(batches):
    most = 0
    for i in range(batches):
        lengths = torch.tensor([i % 7, 3])
        cuseq.ops.cached_cu_seqlens(lengths)
        with cuseq.cache.forward_scope():
            cuseq.ops.cached_position_ids(lengths, 16)
        if i % 3 == 0:
            lengths.add_(1)
        if i % 5 == 0:
            cuseq.cache.invalidate(lengths)
        value = cuseq.ops.cached_seq_ids(lengths, 16)
        if i % 100 == 0:
            assert value.tolist()[-1] == 2
            most = max(most, cuseq.cache.stats()["entries"])
    return most

run(10_000)
before = resident()
most = run(100_000)
print(most, resident() - before, cuseq.cache.stats()["entries"])
"""


@pytest.mark.slow
def test_many_batches_do_not_grow(run_python):
    result = run_python(MANY_BATCHES)
    assert result.returncode == 0, result.stderr
    most, growth, left = map(int, result.stdout.split())
    assert most <= 2 and left <= 2  # one key is alive, with its cu_seqlens and seq_ids
    assert growth < 4_000_000, "that is 40 bytes a batch"


# Requested memory, since the allocator's overhead depends on what it holds already.
PEAK = """
import torch, cuseq

def step(weight):
    batches = [torch.tensor([i, 3], device="cuda") for i in range(4)]
    hidden = weight
    for _ in range(3):
        for lengths in batches:
            hidden = (hidden + cuseq.ops.cached_position_ids(lengths, 1000)).sin()
            hidden = hidden + cuseq.ops.cached_seq_ids(lengths, 1000)
    hidden.sum().backward()
    large = torch.ones(1_000_000, device="cuda")  # the peak: no value is alive but in the cache
    return cuseq.cache.stats()

weight = torch.ones(1000, device="cuda", requires_grad=True)
step(weight)
torch.cuda.reset_peak_memory_stats()
stats = step(weight)
memory = torch.cuda.memory_stats()
print(memory["requested_bytes.all.peak"], memory["requested_bytes.all.current"], stats["bytes"],
      stats["entries"], cuseq.cache.stats()["entries"])
"""


@pytest.mark.slow
def test_peak_memory_is_the_live_entries_more(cuda, run_python):
    results = [run_python(PEAK, CUSEQ_CACHE=switch) for switch in "10"]
    assert all(result.returncode == 0 for result in results), results
    with_cache, without = ([int(n) for n in result.stdout.split()] for result in results)
    assert with_cache[2:] == [4 * 2 * 4 * 1000, 8, 0] and without[2:] == [0, 0, 0]
    assert with_cache[0] == without[0] + with_cache[2]
    assert with_cache[1] == without[1], "nothing stays behind the step"


# The end of the process. Each script gets `device` and `check`.
SHUTDOWN_START = """
import asyncio, atexit, sys, threading, weakref
import torch, cuseq
device = sys.argv[1] if len(sys.argv) > 1 else "{device}"

def check(lengths=None):
    lengths = torch.tensor([2, 3], device=device) if lengths is None else lengths
    assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 5]
    return lengths

"""
SHUTDOWNS = {
    "live keys": """
kept = [check() for _ in range(70)]
torch.held = check()
cycle = [check()]
cycle.append(cycle)
value = cuseq.ops.cached_seq_ids(cycle[0], 6)
graph = torch.ones(6, device=device, requires_grad=True).index_select(0, check())
scope = cuseq.cache.forward_scope()
scope.__enter__()
check(kept[0])
""",
    "used while it ends": """
key = check()
atexit.register(check, key)
atexit.register(check)
weakref.finalize(key, print, "finalised")

class Late:
    def __init__(self):
        self.key, self.invalidate, self.clear = check(), cuseq.cache.invalidate, cuseq.cache.clear
    def __del__(self):
        self.invalidate(self.key)
        self.clear()

# Not in __main__, which outlives the modules where something holds it (dill does, if installed).
sys.modules["late"] = Late()
""",
    "threads": """
stop, started = threading.Event(), threading.Barrier(4)

def hold():
    key = check()
    started.wait()
    stop.wait()  # for good

def work():
    started.wait()
    key = check()
    for _ in range(2000):
        check(key), check()

threads = [threading.Thread(target=hold, daemon=True) for _ in range(2)]
threads += [threading.Thread(target=work)]
for thread in threads:
    thread.start()
started.wait()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(SHUTDOWNS, "threads"))
def test_the_process_ends(name, device, run_python):
    start = SHUTDOWN_START.replace("{device}", str(device))
    result = run_python(start + SHUTDOWNS[name] + "print('last line')")
    assert (result.returncode, result.stderr) == (0, "")
    assert "last line" in result.stdout


# A fork copies the cache.


class Forked(torch.utils.data.Dataset):
    """Queries the cache with a tensor of the parent and with its own."""

    def __init__(self, shared: torch.Tensor):
        self.shared = shared
        self.address = check(shared).data_ptr()
        self.parent = os.getpid()

    def __len__(self):
        return 8

    def __getitem__(self, i):
        before = cuseq.cache.stats()["hits"]
        hit = check(self.shared).data_ptr() == self.address if i < 2 else True
        own = torch.tensor([i, 1])
        value = value_of(own)
        assert check(own).tolist() == [0, i, i + 1]
        hits = cuseq.cache.stats()["hits"] - before
        with cuseq.cache.forward_scope():
            check(make())
        del own
        assert value.expired()
        cuseq.cache.clear()
        check(self.shared)
        cuseq.cache.invalidate(self.shared)
        return torch.tensor([hit, hits, os.getpid() != self.parent])


@pytest.mark.slow
def test_forked_workers_use_the_cache():
    dataset = Forked(make())
    kept = check(dataset.shared)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, multiprocessing_context="fork")
    for i, (hit, hits, forked) in enumerate(row for (row,) in map(torch.unbind, loader)):
        assert (bool(hit), int(hits), bool(forked)) == (True, 2 if i < 2 else 1, True)
    with counted(hits=1):
        assert check(dataset.shared) is kept


FORKED_WHILE_OTHERS_HIT = """
import os, signal, threading, torch, cuseq
key = torch.tensor([2, 3])
cuseq.ops.cached_cu_seqlens(key)
done = []

def hit():
    while not done:
        torch.ops.cuseq.cached_cu_seqlens(key)  # without the GIL

threads = [threading.Thread(target=hit) for _ in range(2)]
for thread in threads:
    thread.start()
hung = 0
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that waits for a lock of a thread that it has not got
        cuseq.ops.cached_cu_seqlens(key)
        os._exit(0)
    hung += os.waitpid(child, 0)[1] != 0
    if hung:
        break
done.append(True)
for thread in threads:
    thread.join()
print(hung)
"""


@pytest.mark.slow
def test_a_fork_while_other_threads_hit(run_python):
    result = run_python(FORKED_WHILE_OTHERS_HIT)
    assert result.stdout.strip() == "0", result.stderr
