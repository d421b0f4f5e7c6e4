"""Test the identity cache on a GPU: late streams, captured graphs and several devices."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from contextlib import suppress

import pytest
import reference
import torch
from test_cache import counted, make
from test_no_sync import syncs_are_errors, trace, waits

import cuseq
from cuseq import PackedLayout

# At least a sixth of a second on any GPU of the last ten years.
LONG = 300_000_000
LENGTHS = [337, *range(211, 1, -7)]
TOTAL = sum(LENGTHS) + 41

CALLS = {
    "cu_seqlens": lambda key: cuseq.ops.cached_cu_seqlens(key),
    "position_ids": lambda key: cuseq.ops.cached_position_ids(key, TOTAL),
    "seq_ids": lambda key: cuseq.ops.cached_seq_ids(key, TOTAL),
}
ALL = pytest.mark.parametrize("name", CALLS)

pytestmark = pytest.mark.usefixtures("fresh_cache")


def expected(name: str, lengths: list[int] = LENGTHS) -> list[int]:
    return getattr(reference, name)(lengths, *(() if name == "cu_seqlens" else (TOTAL,)))


def load_kernels(device: torch.device) -> None:
    """Run everything once, since first use may stall the device."""
    with torch.cuda.device(device):
        key = torch.tensor(LENGTHS, device=device)
        late = torch.zeros_like(key)
        late.copy_(key + 1)
        for call in CALLS.values():
            late.new_empty(1).copy_(call(late)[:1])
            torch.full_like(call(late).clone(), -7)
        torch.cuda._sleep(1)
    cuseq.cache.clear()
    torch.cuda.synchronize(device)


TURNS = itertools.count(1)


def turned_lengths() -> list[int]:
    """Return lengths of no other test: recycled memory must not hold the right answer by chance."""
    turn = next(TURNS)
    assert turn < len(LENGTHS)
    return LENGTHS[turn:] + LENGTHS[:turn]


@pytest.fixture(params=["cuda", "second_gpu"])
def gpu(request) -> torch.device:
    """Return each GPU in turn; the current one comes first."""
    device = request.getfixturevalue(request.param)
    load_kernels(device)
    return device


def stream_of(device: torch.device, which: str) -> torch.cuda.Stream:
    if which == "default":
        return torch.cuda.default_stream(device)
    return torch.cuda.Stream(device)


@pytest.mark.parametrize(
    ("maker", "reader"), [("default", "side"), ("side", "default"), ("side", "side")]
)
@ALL
def test_a_hit_waits_for_the_stream_that_made_it(name, maker, reader, gpu):
    maker, reader = stream_of(gpu, maker), stream_of(gpu, reader)
    lengths = turned_lengths()
    new = torch.tensor(lengths, device=gpu)
    key = torch.zeros_like(new)
    torch.cuda.synchronize(gpu)
    with counted(misses=1, hits=2, entries=1):
        with torch.cuda.stream(maker):
            torch.cuda._sleep(LONG)
            key.copy_(new)
            value = CALLS[name](key)
        with torch.cuda.stream(reader), torch.cuda.device(0), syncs_are_errors():
            hit = CALLS[name](key)
            read = hit.clone()
        assert not maker.query() and not reader.query(), "the host must not wait"
        with torch.cuda.stream(maker):  # and back
            assert CALLS[name](key) is value
    assert hit is value
    reader.synchronize()
    assert read.tolist() == expected(name, lengths)
    torch.cuda.synchronize(gpu)


DROPS = {
    "key": lambda keys, scope: keys.clear(),
    "clear_cache": lambda keys, scope: cuseq.cache.clear(),
    "invalidate": lambda keys, scope: cuseq.cache.invalidate(keys[0]),
    "scope": lambda keys, scope: scope.__exit__(None, None, None),
}


def reads_late(make_value, drop, device: torch.device, readers: int) -> list[list[int]]:
    """Return what late streams read of a value that was dropped and overwritten meanwhile."""
    maker = torch.cuda.Stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(readers)]
    with torch.cuda.stream(maker):
        value = make_value()
    torch.cuda.synchronize(device)
    copies = []
    for stream in streams:
        with torch.cuda.stream(stream):
            copies.append(torch.empty_like(value))
            torch.cuda._sleep(LONG)
            value = make_value()
            copies[-1].copy_(value)
    like = torch.empty_like(value, device="meta")
    del value
    drop()
    with torch.cuda.stream(maker):
        others = [torch.full_like(like, -7, device=device) for _ in range(8)]
        maker.synchronize()
    assert not any(stream.query() for stream in streams), "they must still be late"
    torch.cuda.synchronize(device)
    del others
    return [copy.tolist() for copy in copies]


def test_memory_is_reused_under_a_late_reader(gpu):
    """Without record_stream memory is reused; the tests that follow rely on it."""
    box: list = []

    def make_value():
        if not box:
            box.append(cuseq.ops.position_ids(torch.tensor(LENGTHS, device=gpu), TOTAL))
        return box[0]

    (read,) = reads_late(make_value, box.clear, gpu, readers=1)
    assert read != expected("position_ids")


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("drop", DROPS)
def test_memory_waits_for_late_readers(drop, readers, gpu):
    keys = [torch.tensor(LENGTHS, device=gpu)]
    scope = cuseq.cache.forward_scope()
    with scope, counted(misses=1, hits=readers):
        reads = reads_late(
            lambda: CALLS["position_ids"](keys[0]), lambda: DROPS[drop](keys, scope), gpu, readers
        )
    assert reads == [expected("position_ids")] * readers


def test_hits_neither_wait_nor_launch(gpu):
    key = torch.tensor(LENGTHS, device=gpu)
    side = torch.cuda.Stream(gpu)

    def hit():
        for call in CALLS.values():
            call(key)

    def hit_elsewhere():
        with torch.cuda.stream(side):
            hit()

    hit()
    with counted(hits=18):
        calls, work = trace(hit)
        assert work == Counter() and not [call for call in calls if "Synchronize" in call]
        assert waits(hit_elsewhere) == Counter()
    with counted(hits=3), torch.cuda.device(gpu):
        before = torch.cuda.memory_stats(gpu)["allocation.all.allocated"]
        hit()
        assert torch.cuda.memory_stats(gpu)["allocation.all.allocated"] == before


# Graphs; test_no_sync.py tests that each op replays with new lengths.


def capture(body, **arguments) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **arguments):
        body()
    return graph


@pytest.mark.parametrize("side", [False, True])
def test_what_was_made_before_a_capture_stays(side, cuda):
    load_kernels(cuda)
    lengths = torch.tensor(LENGTHS, device=cuda)  # the static input
    other = torch.tensor(LENGTHS, device=cuda)
    kept = {name: (call(lengths), call(other)) for name, call in CALLS.items()}
    captured = {}

    def body():
        for name, call in CALLS.items():
            captured[name] = call(lengths)
        for _ in range(8):  # work that uses memory of the same size
            for value in list(captured.values()):
                value.clone().fill_(-7)

    stream = torch.cuda.Stream(cuda) if side else None
    with counted(bypasses=3):
        graph = capture(body, stream=stream)
    with counted(hits=3):  # still warm
        assert all(call(lengths) is kept[name][0] for name, call in CALLS.items())
    for new in (LENGTHS[::-1], LENGTHS, [0] * (len(LENGTHS) - 1) + [TOTAL]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        for name, value in captured.items():
            assert value.tolist() == expected(name, new)
            assert CALLS[name](lengths).tolist() == expected(name, new)
            assert [old.tolist() for old in kept[name]] == [expected(name)] * 2
    with counted(hits=3):
        assert all(call(other) is kept[name][1] for name, call in CALLS.items())


def test_entries_dropped_during_a_capture(cuda):
    load_kernels(cuda)
    keys = [torch.tensor(LENGTHS, device=cuda) for _ in range(3)]
    static = torch.tensor(LENGTHS, device=cuda)
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        for key in keys:
            CALLS["position_ids"](key)
    for key in keys:  # recorded on a second stream
        CALLS["position_ids"](key)
    del key
    torch.cuda.synchronize(cuda)
    captured = []

    def body():
        captured.append(CALLS["position_ids"](static))
        keys.pop()
        cuseq.cache.invalidate(keys[0])
        captured.append(CALLS["seq_ids"](static))
        cuseq.cache.clear()

    with counted(bypasses=2, entries=-3):
        graph = capture(body)
    graph.replay()
    assert captured[0].tolist() == expected("position_ids")
    assert captured[1].tolist() == expected("seq_ids")
    with counted(misses=1, hits=1, entries=1):
        assert CALLS["seq_ids"](keys[0]) is CALLS["seq_ids"](keys[0])


def test_a_replay_that_writes_the_lengths(cuda):
    load_kernels(cuda)
    lengths = make(cuda)
    one = torch.ones_like(lengths)
    graph = capture(lambda: lengths.add_(one))
    lengths.copy_(one)
    cuseq.ops.cached_cu_seqlens(lengths)
    version = lengths._version
    graph.replay()
    assert lengths._version == version  # documented: the version counter does not see it
    cuseq.cache.invalidate(lengths)
    assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 4]


@pytest.mark.parametrize("others", ["default", "side"])
def test_another_thread_hits_during_a_capture(others, cuda):
    load_kernels(cuda)
    static, warm = (torch.tensor(LENGTHS, device=cuda) for _ in range(2))
    fresh = torch.tensor(LENGTHS, device=cuda)
    kept = CALLS["position_ids"](warm)
    stream = stream_of(cuda, others)
    torch.cuda.synchronize(cuda)
    answers = []

    def work():
        with torch.cuda.stream(stream):
            for _ in range(20):
                answers.append(CALLS["position_ids"](warm))
            answers.append(CALLS["seq_ids"](fresh))  # a miss
            answers.append(CALLS["seq_ids"](fresh))

    captured = []

    def body():
        captured.append(CALLS["position_ids"](static))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        captured.append(CALLS["position_ids"](warm))

    with counted(bypasses=2, misses=1, hits=21, entries=1):
        graph = capture(body, capture_error_mode="thread_local")
    assert len(answers) == 22 and all(answer is kept for answer in answers[:20])
    assert answers[20] is answers[21]
    graph.replay()
    torch.cuda.synchronize(cuda)
    for answer, name in (*((c, "position_ids") for c in captured), (answers[20], "seq_ids")):
        assert answer.tolist() == expected(name)
    with counted(hits=2):
        assert CALLS["position_ids"](warm) is kept
        assert CALLS["seq_ids"](fresh) is answers[20]


# Several devices.


@ALL
def test_keys_on_two_devices(name, cuda, second_gpu):
    call = CALLS[name]
    devices = (cuda, second_gpu)
    with counted(misses=2, hits=4, entries=2):
        keys = [torch.tensor(LENGTHS, device=device) for device in devices]
        values = [call(key) for key in keys]
        for current in devices:
            with torch.cuda.device(current):
                assert all(call(key) is value for key, value in zip(keys, values, strict=True))
                assert torch.cuda.current_device() == current.index
    for value, device in zip(values, devices, strict=True):
        assert value.device == device
        assert value.tolist() == expected(name)
    del value
    with counted(entries=-1):
        keys.pop()


class Block(torch.nn.Module):
    """A layer of a model that is spread over devices."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(TOTAL, device=device))
        self.seen: list = []

    def forward(self, hidden, packed):
        packed = packed.to(self.weight.device)
        positions = cuseq.ops.cached_position_ids(packed.lengths, packed.total_tokens)
        self.seen += [packed, positions]
        return hidden.to(self.weight.device) * self.weight + positions


def run_model_parallel(devices: list[torch.device], start: torch.device) -> None:
    layout = PackedLayout.from_lengths(LENGTHS, TOTAL, device=start)
    blocks = [Block(device) for device in devices]
    hidden = torch.zeros(TOTAL, device=start)
    distinct = len(set(devices))
    with counted(misses=distinct, hits=2 * len(devices) - distinct, entries=distinct):
        for _ in range(2):
            out = hidden
            for block in blocks:
                out = block(out, layout)
    for device in set(devices):
        same = [block for block in blocks if block.weight.device == device]
        assert len({id(block.seen[i]) for block in same for i in (0, 2)}) == 1
        assert len({id(block.seen[i]) for block in same for i in (1, 3)}) == 1
        assert same[0].seen[0] is layout.to(device) and same[0].seen[1].device == device
    positions = torch.tensor(expected("position_ids")) * len(blocks)
    assert torch.equal(out.cpu(), positions.float())
    del same, block
    with counted(entries=-distinct):
        blocks.clear()
        del layout


def test_modules_on_two_gpus_share_one_layout(cuda, second_gpu):
    run_model_parallel([cuda, second_gpu, second_gpu, cuda, second_gpu], start=cuda)


def test_modules_on_two_devices_share_one_layout(cuda):
    cpu = torch.device("cpu")
    run_model_parallel([cpu, cuda, cuda, cpu, cuda], start=cpu)


def test_modules_on_one_device_share_one_layout():
    cpu = torch.device("cpu")
    run_model_parallel([cpu, cpu, cpu], start=cpu)


@pytest.mark.parametrize("target", ["meta", "second_gpu"])
def test_threads_that_move_a_layout_get_one_object(target, monkeypatch, request):
    device = torch.device("meta") if target == "meta" else request.getfixturevalue(target)
    layout = PackedLayout.from_lengths(LENGTHS, TOTAL)
    together = threading.Barrier(2)
    copy = PackedLayout._on

    def copy_at_the_same_time(self, device):
        moved = copy(self, device)
        with suppress(threading.BrokenBarrierError):  # times out if only one thread may copy
            together.wait(timeout=1)
        return moved

    monkeypatch.setattr(PackedLayout, "_on", copy_at_the_same_time)
    moved = []
    threads = [threading.Thread(target=lambda: moved.append(layout.to(device))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(moved) == 2 and moved[0] is moved[1] is layout.to(device)
