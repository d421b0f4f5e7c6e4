"""Run everything that uses the identity cache, at random, on eight threads at once.

CUSEQ_STRESS_SECONDS: how long (default 5). CUSEQ_STRESS_SEED: repeats a run's choices, but not the
order in which threads take turns.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import traceback

import pytest
import reference
import torch
from test_compile import Watch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cuseq
from cuseq import PackedLayout

THREADS = 8
SECONDS = float(os.environ.get("CUSEQ_STRESS_SECONDS", "5"))

pytestmark = pytest.mark.usefixtures("fresh_cache")


class Key:
    """A tensor of lengths and its expected values."""

    def __init__(self, values: list[int], device: torch.device):
        self.values = values
        self.tensor = torch.tensor(values, device=device)


# Under a Python mode PyTorch 2.11 calls Python for each op. With several such threads one run in 20
# crashed (in torch._library.simple_registry.find_torch_dispatch_rule), so use one at a time.
python_modes = threading.Lock()


class Worker:
    """One thread's share: it edits only its own keys, and reads those that all share."""

    def __init__(self, seed: int, device: torch.device, shared: list[Key]):
        self.random = random.Random(seed)
        self.device = device
        self.shared = shared
        self.own = [self.new_key() for _ in range(3)]
        self.actions = [
            getattr(self, name) for name in sorted(dir(self)) if name.startswith("act_")
        ]
        if device.type == "cpu":
            self.actions = [one for one in self.actions if "stream" not in one.__name__]
        self.done = dict.fromkeys((action.__name__ for action in self.actions), 0)

    def step(self) -> None:
        action = self.random.choice(self.actions)
        action()
        self.done[action.__name__] += 1

    def new_key(self) -> Key:
        return Key(
            [self.random.randrange(5) for _ in range(self.random.randrange(1, 6))], self.device
        )

    def any_key(self) -> Key:
        return self.random.choice(self.random.choice((self.own, self.shared)))

    def ask(self, key: Key, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Call one cached op on a key and check its value."""
        lengths = key.tensor if lengths is None else lengths
        name, *rest = self.random.choice([("cu_seqlens",), ("position_ids", 30), ("seq_ids", 26)])
        where = self.random.choice((cuseq.ops, torch.ops.cuseq))
        value = getattr(where, f"cached_{name}")(lengths, *rest)
        expected = getattr(reference, name)(key.values, *rest)
        found = value.tolist()
        assert found == expected, f"{name} of {key.values}: {found}, not {expected}"
        return value

    def act_ask(self):
        self.ask(self.any_key())

    def act_ask_twice_in_a_scope(self):
        key = self.any_key()
        with cuseq.cache.forward_scope():
            self.ask(key)
            self.ask(key)

    def act_scope_that_raises(self):
        with pytest.raises(KeyError), cuseq.cache.forward_scope():
            self.ask(self.any_key())
            raise KeyError

    def act_replace(self):
        self.own[self.random.randrange(3)] = self.new_key()

    def act_edit(self):
        key = self.random.choice(self.own)
        at = self.random.randrange(len(key.values))
        key.values[at] = key.tensor[at] = self.random.randrange(5)
        self.ask(key)

    def act_resize(self):
        key = self.random.choice(self.own)
        key.values = key.values[: self.random.randrange(1, len(key.values) + 1)]
        key.tensor.resize_(len(key.values))
        self.ask(key)

    def act_set_data(self):
        key = self.random.choice(self.own)
        other = self.new_key()
        key.tensor.data, key.values = other.tensor, other.values
        self.ask(key)

    def act_write_unseen(self):
        key = self.random.choice(self.own)
        key.tensor.data.fill_(2)
        key.values = [2] * len(key.values)
        cuseq.cache.invalidate(key.tensor)
        self.ask(key)

    def act_edit_what_was_given(self):
        key = self.random.choice(self.own)
        self.ask(key).fill_(-1)
        self.ask(key)

    def act_views(self):
        key = self.any_key()
        for view in (key.tensor[:], key.tensor.detach(), key.tensor.view(-1)):
            self.ask(key, view)

    def act_swap(self):
        one, other = self.random.sample(self.own, 2)
        cuseq.cache.invalidate(one.tensor), cuseq.cache.invalidate(other.tensor)
        try:
            torch.utils.swap_tensors(one.tensor, other.tensor)
        except RuntimeError as error:
            # Another thread, which cleared the cache, is still freeing the entries.
            assert "weakref" in str(error)
        else:
            one.values, other.values = other.values, one.values
        self.ask(one), self.ask(other)

    def act_clear(self):
        if self.random.random() < 0.1:
            cuseq.cache.clear()

    def act_invalidate(self):
        cuseq.cache.invalidate(self.any_key().tensor)

    def act_stats(self):
        # Each thread may hold one entry for which it has not evicted another yet.
        assert cuseq.cache.stats()["entries"] <= 64 + THREADS

    def act_inference(self):
        with torch.inference_mode():
            self.ask(self.any_key())
            self.ask(self.new_key())

    def act_watched(self):
        key = self.any_key()
        with python_modes, Watch() as watch:
            value = cuseq.ops.cached_cu_seqlens(key.tensor)
        assert torch.ops.cuseq.cu_seqlens.default in watch.seen
        value.fill_(-1)
        self.ask(key)

    def act_cycle(self):
        key = self.new_key()
        self.ask(key)
        key.itself = key

    def act_layout(self):
        key = self.any_key()
        layout = PackedLayout.from_lengths(key.values, 30, device=self.device)
        lengths = layout.to(self.device).lengths
        self.ask(Key(key.values, self.device), lengths)

    def act_checkpoint(self):
        key = self.any_key()
        values = list(key.values)
        ways = [
            dict(use_reentrant=True),
            dict(use_reentrant=False),
            dict(
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(
                    [torch.ops.aten.sin.default]
                ),
            ),
        ]
        hidden = torch.ones(30, device=self.device, requires_grad=True)

        def segment(hidden, lengths):
            return hidden.sin() * cuseq.ops.cached_position_ids(lengths, 30)

        # PyTorch waits for its generator's mutex while holding the GIL, and for the GIL while
        # holding that mutex: threads that keep the generator's state can deadlock.
        way = self.random.choice(ways) | dict(preserve_rng_state=False)
        with python_modes:
            out = checkpoint(segment, hidden, key.tensor, **way)
            out.sum().backward()
        positions = torch.tensor(reference.position_ids(values, 30), device=self.device)
        assert torch.equal(hidden.grad, hidden.detach().cos() * positions)

    def act_stream(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            value = self.ask(self.any_key())
            value + 1
        torch.cuda.current_stream().wait_stream(stream)

    def act_late_stream(self):
        key = self.new_key()
        expected = torch.tensor(reference.position_ids(key.values, 30), dtype=torch.int32)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            cuseq.ops.cached_position_ids(key.tensor, 30)
        # The value may be made late on the other stream; this stream waits for it before it reads.
        read = cuseq.ops.cached_position_ids(key.tensor, 30) + 0
        del key
        assert torch.equal(read.cpu(), expected)


def run_stress(device: torch.device, seed: int, seconds: float) -> list[Worker]:
    """Run the workers; return them, or raise the error of one of them."""
    cuseq.cache.clear()  # tables that earlier tests left count as entries
    shared = [Key([i, 1, i], device) for i in range(5)]
    workers = [Worker(seed * THREADS + i, device, shared) for i in range(THREADS)]
    # Once without threads: the first dispatch of an op to a Python mode races inside PyTorch.
    for action in workers[0].actions:
        action()
    failures = []
    end = time.monotonic() + seconds

    def work(worker: Worker) -> None:
        try:
            while time.monotonic() < end and not failures:
                worker.step()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in workers]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=seconds + 60)
    finally:
        sys.setswitchinterval(switching)
    assert not any(thread.is_alive() for thread in threads), f"deadlock, seed {seed}"
    assert not failures, f"seed {seed}: {failures[0]}"
    assert cuseq.cache.stats()["entries"] <= 64
    return workers


@pytest.mark.slow
def test_everything_at_once(device):
    seed = int(os.environ.get("CUSEQ_STRESS_SEED", random.randrange(10**6)))
    print(f"CUSEQ_STRESS_SEED={seed}")
    before = cuseq.cache.stats()
    workers = run_stress(device, seed, SECONDS)
    after = cuseq.cache.stats()
    assert after["hits"] > before["hits"] and after["bypasses"] > before["bypasses"]
    never = [name for name in workers[0].done if not any(worker.done[name] for worker in workers)]
    assert never == [], f"seed {seed}: too short a run"
    # All keys are freed, so nothing may be left, whichever thread made it.
    del workers
    gc.collect()
    stats = cuseq.cache.stats()
    assert (stats["entries"], stats["bytes"]) == (0, 0), f"seed {seed}"
