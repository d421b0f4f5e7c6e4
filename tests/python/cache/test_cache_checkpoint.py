"""Test the identity cache under activation checkpointing: hits and misses give right gradients."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tiers import full
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import cuseq

ops = torch.ops.cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")

LENGTHS, TOTAL = [2, 3], 6
POSITIONS, IDS = [0, 1, 0, 1, 2, 0], [0, 0, 1, 1, 1, 2]

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def make(device, values=LENGTHS) -> Tensor:
    return torch.tensor(values, device=device)


def hidden(device) -> Tensor:
    return torch.linspace(-1, 1, TOTAL, dtype=torch.float64, device=device, requires_grad=True)


def segment(x: Tensor, lengths: Tensor) -> Tensor:
    """Save cached tensors for backward, one from the function and one from the op."""
    x = x.sin() * cuseq.ops.cached_position_ids(lengths, TOTAL)
    return x.cos() * ops.cached_seq_ids(lengths, TOTAL)


def segment_grad(x: Tensor, positions=POSITIONS, ids=IDS) -> Tensor:
    positions, ids = (torch.tensor(values, device=x.device) for values in (positions, ids))
    x = x.detach()
    return -(x.sin() * positions).sin() * ids * positions * x.cos()


@contextlib.contextmanager
def counted(**changes: int):
    """Check how much the body changes hits, misses and entries."""
    before = cuseq.cache.stats()
    yield
    after = cuseq.cache.stats()
    moved = {key: after[key] - before[key] for key in ("hits", "misses", "entries")}
    assert moved == {**dict.fromkeys(moved, 0), **changes}


def on_another_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


# What the cache holds in forward, and what happens to it before the recompute.

WARM = pytest.mark.parametrize("warm", [True, False], ids=["forward hits", "forward misses"])
BETWEEN = {
    "recompute hits": lambda lengths: None,
    "cleared": lambda lengths: cuseq.cache.clear(),
    "invalidated": lambda lengths: cuseq.cache.invalidate(lengths),
    "value edited": lambda lengths: cuseq.ops.cached_position_ids(lengths, TOTAL).fill_(7),
}


@REENTRANT
@WARM
@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_hits(reentrant, warm, between, device):
    lengths, x = make(device), hidden(device)
    if warm:
        segment(x, lengths)
    with counted(**{"hits": 2} if warm else {"misses": 2, "entries": 2}):
        # A closure, not an argument: a reentrant segment would look up a detached tensor.
        out = checkpoint(lambda x: segment(x, lengths), x, use_reentrant=reentrant)
    # A reentrant segment saved nothing in its forward; the other's saved tensors are recomputed.
    BETWEEN[between](lengths)
    entries = cuseq.cache.stats()["entries"]
    misses = 1 if between == "value edited" else 2 - entries
    with counted(hits=2 - misses, misses=misses, entries=2 - entries):
        out.sum().backward()
    torch.testing.assert_close(x.grad, segment_grad(x))
    lengths = None  # a closure has it too
    assert cuseq.cache.stats()["entries"] == 0


@REENTRANT
def test_an_edit_before_the_recompute_is_not_hidden(reentrant, device):
    """As without a cache, the recompute reads the edited lengths."""
    lengths, x = make(device), hidden(device)
    out = checkpoint(lambda x: segment(x, lengths), x, use_reentrant=reentrant)
    lengths.copy_(torch.tensor([1, 4]))
    out.sum().backward()
    wanted = segment_grad(x, positions=[0, 0, 1, 2, 3, 0], ids=[0, 1, 1, 1, 1, 2])
    torch.testing.assert_close(x.grad, wanted)


@REENTRANT
@pytest.mark.parametrize("threaded", [True, False], ids=["other thread", "same thread"])
def test_lengths_as_an_argument(reentrant, threaded, device):
    """Reentrant checkpoint detaches them for the recompute; nothing of that remains."""
    lengths = make(device)
    with counted(misses=2, hits=2 * 4 - 2, entries=2):
        xs = [hidden(device) for _ in range(4)]
        outs = [checkpoint(segment, x, lengths, use_reentrant=reentrant) for x in xs]
    values = [
        cuseq.ops.cached_position_ids(lengths, TOTAL),
        cuseq.ops.cached_seq_ids(lengths, TOTAL),
    ]
    for x, out in zip(xs, outs, strict=True):
        backward = out.sum().backward
        on_another_thread(backward) if threaded else backward()
        torch.testing.assert_close(x.grad, segment_grad(x))
    assert cuseq.cache.stats()["entries"] == 2, "only the lengths that are still here"
    with counted(hits=2):
        assert cuseq.ops.cached_position_ids(lengths, TOTAL) is values[0]
        assert cuseq.ops.cached_seq_ids(lengths, TOTAL) is values[1]
    del lengths, outs, out, backward
    assert cuseq.cache.stats()["entries"] == 0


def test_recompute_on_the_threads_of_autograd_at_once(device):
    """Eight simultaneous backwards share the entries of one key."""
    lengths = make(device)
    xs = [hidden(device) for _ in range(8)]
    outs = [checkpoint(lambda x: segment(x, lengths), x, use_reentrant=False) for x in xs]
    barrier = threading.Barrier(len(xs), timeout=60)

    def backward(out):
        barrier.wait()
        out.sum().backward()

    with counted(hits=2 * len(xs)), ThreadPoolExecutor(len(xs)) as pool:
        list(pool.map(backward, outs))
    for x in xs:
        torch.testing.assert_close(x.grad, segment_grad(x))


# Selective checkpointing compares the dispatched ops of forward and recompute.

SAVED = {
    "the pure ops": [ops.position_ids.default, ops.seq_ids.default],
    "one of them": [ops.seq_ids.default],
    "the work": [torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor],
    "nothing": [],
}


class Recorded(TorchDispatchMode):
    """Records the ops before the checkpoint's own mode answers some of them from saved results."""

    def __enter__(self):
        self.ops = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op not in SAC_IGNORED_OPS:
            self.ops.append(op)
        return op(*args, **(kwargs or {}))


@WARM
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("saved", SAVED)
def test_selective_dispatches_the_same_ops(saved, warm, between, device):
    lengths, x = make(device), hidden(device)
    dispatched = []

    def policy(context, op, *args, **kwargs):
        save = op in SAVED[saved]
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def recorded(x):
        with Recorded() as ops_of_pass:
            out = segment(x, lengths)
        dispatched.append(ops_of_pass.ops)
        return out

    if warm:
        segment(x, lengths)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    # Without early stop the recompute runs to the end, as the forward did.
    with counted(), set_checkpoint_early_stop(False):
        out = checkpoint(recorded, x, use_reentrant=False, context_fn=contexts)
    segment(x, lengths)  # a lookup outside the segment, between its forward and its recompute
    BETWEEN[between](lengths)
    with counted():
        out.sum().backward()
    torch.testing.assert_close(x.grad, segment_grad(x))
    forward, recompute = dispatched
    assert forward == recompute
    assert {ops.position_ids.default, ops.seq_ids.default} <= set(forward)


# Nested, sequential, early stop, random numbers, scopes.


@pytest.mark.parametrize("outer", [True, False], ids=["outer reentrant", "outer non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["inner reentrant", "inner non-reentrant"])
@pytest.mark.parametrize("between", ["recompute hits", "cleared"])
def test_nested(outer, inner, between, device):
    lengths, x = make(device), hidden(device)

    def around(x):
        x = x * cuseq.ops.cached_seq_ids(lengths, TOTAL)
        x = checkpoint(lambda x: segment(x, lengths), x, use_reentrant=inner)
        return x * cuseq.ops.cached_position_ids(lengths, TOTAL)

    out = checkpoint(around, x, use_reentrant=outer)
    assert cuseq.cache.stats()["entries"] == 2
    BETWEEN[between](lengths)
    before = cuseq.cache.stats()["misses"]
    out.sum().backward()
    # Each of the two entries is built again at most once, for both levels of recompute.
    assert cuseq.cache.stats()["misses"] - before == (2 if between == "cleared" else 0)
    scaled = x.detach() * torch.tensor(IDS, device=device)
    outer_factor = torch.tensor([a * b for a, b in zip(IDS, POSITIONS, strict=True)], device=device)
    torch.testing.assert_close(x.grad, segment_grad(scaled) * outer_factor)


class Layer(nn.Module):
    """Looks up the layout that its caller holds; a stand-in for a decoder layer."""

    def __init__(self, lengths, dropout: float = 0.0):
        super().__init__()
        self.lengths, self.dropout = lengths, dropout

    def forward(self, x):
        x = x + 0.1 * segment(x, self.lengths)
        return torch.nn.functional.dropout(x, self.dropout)


@REENTRANT
def test_checkpoint_sequential(reentrant, device):
    lengths = make(device)
    layers = [Layer(lengths) for _ in range(6)]
    x, plain = hidden(device), hidden(device)
    with counted(misses=2, hits=10, entries=2):
        out = checkpoint_sequential(layers, 3, x, use_reentrant=reentrant)
    # The last of the three segments is not checkpointed: four layers run again.
    with counted(hits=8):
        out.sum().backward()
    nn.Sequential(*layers)(plain).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad, rtol=0, atol=0)


@REENTRANT
def test_random_numbers_are_restored(reentrant, device):
    lengths = make(device)
    layer = Layer(lengths, dropout=0.5)
    grads = []
    for run in (layer, partial(checkpoint, layer, use_reentrant=reentrant)):
        cuseq.cache.clear()  # a miss in forward, then a hit in the recompute
        torch.manual_seed(0)
        x = hidden(device)
        out = run(x)
        torch.rand(3, device=device)  # draws of the rest of the model
        out.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert not torch.equal(grads[0], torch.ones_like(grads[0]))


@pytest.mark.parametrize("stop", [True, False], ids=["early stop", "to the end"])
def test_early_stop_inside_a_scope(stop, device):
    """The exception that ends a recompute early closes the scope that the segment had opened."""
    lengths, x = make(device), hidden(device)
    runs = []

    def scoped(x):
        runs.append("start")
        with cuseq.cache.forward_scope():
            out = segment(x, lengths)
            cuseq.ops.cached_cu_seqlens(lengths)  # after the last saved tensor
            runs.append("end")
        return out

    with set_checkpoint_early_stop(stop):
        out = checkpoint(scoped, x, use_reentrant=False)
    with counted(misses=2 if stop else 3):
        out.sum().backward()
    assert runs == ["start", "end", "start"] + ["end"] * (not stop)
    torch.testing.assert_close(x.grad, segment_grad(x))
    with counted(misses=1, entries=1):  # no scope is left open to free this with it
        value = cuseq.ops.cached_cu_seqlens(lengths)
    with cuseq.cache.forward_scope():
        assert cuseq.ops.cached_cu_seqlens(lengths) is value


@REENTRANT
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_checkpoint_in_a_scope(reentrant, inside, device):
    lengths, x = make(device), hidden(device)
    with cuseq.cache.forward_scope():
        out = checkpoint(lambda x: segment(x, lengths), x, use_reentrant=reentrant)
        if inside:
            with counted(hits=2):
                out.sum().backward()
    assert cuseq.cache.stats()["entries"] == 0
    if not inside:
        # No scope is open: results of the recompute stay as long as the lengths do.
        with counted(misses=2, entries=2):
            out.sum().backward()
        with counted(hits=1):
            cuseq.ops.cached_position_ids(lengths, TOTAL)
    torch.testing.assert_close(x.grad, segment_grad(x))
    lengths = None  # a closure has it too
    assert cuseq.cache.stats()["entries"] == 0


# Saved tensors that are stored elsewhere.


OFFLOADS = {
    "save_on_cpu": lambda device: save_on_cpu(pin_memory=device.type == "cuda"),
    "no tensor": lambda device: saved_tensors_hooks(
        lambda t: (t.tolist(), t.dtype, t.shape),
        lambda p: torch.tensor(p[0], dtype=p[1], device=device).reshape(p[2]),
    ),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_offloaded_tensors_pin_nothing(name, device):
    lengths, x = make(device), hidden(device)
    with OFFLOADS[name](device):
        out = segment(x, lengths)
    values = [
        cuseq.ops.cached_position_ids(lengths, TOTAL),
        cuseq.ops.cached_seq_ids(lengths, TOTAL),
    ]
    assert [value.tolist() for value in values] == [POSITIONS, IDS]
    storages = [StorageWeakRef(value.untyped_storage()) for value in values]
    assert all(value.device.type == device.type for value in values)
    del lengths, values
    assert cuseq.cache.stats()["entries"] == 0
    if device.type == "cuda" or name == "no tensor":  # otherwise the saved tensor is the cached one
        assert all(storage.expired() for storage in storages)
    out.sum().backward()
    torch.testing.assert_close(x.grad, segment_grad(x))


@REENTRANT
@pytest.mark.parametrize("name", OFFLOADS)
def test_offloaded_and_checkpointed(name, reentrant, device):
    """The recompute looks up the lengths that were saved for it, moved there and back."""
    lengths, x = make(device), hidden(device)
    with OFFLOADS[name](device):
        out = checkpoint(segment, x, lengths, use_reentrant=reentrant)
        out = out * cuseq.ops.cached_seq_ids(lengths, TOTAL)
        entries = cuseq.cache.stats()["entries"]
        out.sum().backward()
    assert cuseq.cache.stats()["entries"] == entries == 2
    wanted = segment_grad(x) * torch.tensor(IDS, device=device)
    torch.testing.assert_close(x.grad, wanted)
    with counted(hits=2):
        assert cuseq.ops.cached_position_ids(lengths, TOTAL).tolist() == POSITIONS
        assert cuseq.ops.cached_seq_ids(lengths, TOTAL).tolist() == IDS


# Under torch.compile.


@pytest.mark.parametrize("where", ["compiled around", "compiled inside"])
@pytest.mark.parametrize("selective", [True, False], ids=["selective", "whole"])
@pytest.mark.parametrize("backend", ["aot_eager", full("inductor")])
def test_checkpoint_and_compile(where, selective, backend, device):
    torch.compiler.reset()
    lengths, x = make(device), hidden(device)
    values = [
        cuseq.ops.cached_position_ids(lengths, TOTAL),
        cuseq.ops.cached_seq_ids(lengths, TOTAL),
    ]
    options = {}
    if selective:
        saved = [torch.ops.aten.sin.default, ops.seq_ids.default]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    compiler = torch.compile(backend=backend, fullgraph=True)

    def checkpointed(function):
        return lambda x, lengths: checkpoint(function, x, lengths, use_reentrant=False, **options)

    if where == "compiled around":
        run = compiler(checkpointed(segment))
    else:
        run = checkpointed(compiler(segment))
    for _ in range(2):
        x.grad = None
        with counted():
            run(x, lengths).sum().backward()
        torch.testing.assert_close(x.grad, segment_grad(x))
    with counted(hits=2):
        assert cuseq.ops.cached_position_ids(lengths, TOTAL) is values[0]
        assert cuseq.ops.cached_seq_ids(lengths, TOTAL) is values[1]
    assert [value.tolist() for value in values] == [POSITIONS, IDS]
