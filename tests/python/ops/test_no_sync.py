"""Test that nothing waits for the GPU unless documented, and that every pure op can be captured."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager

import pytest
import reference
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

LENGTHS, TOTAL = [2, 0, 3], 6
# About half a second on any GPU of the last ten years.
LONG = 1_000_000_000

pytestmark = pytest.mark.usefixtures("cuda", "fresh_cache")


@contextmanager
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trace(body) -> tuple[Counter, Counter]:
    """Return the CUDA runtime calls of the body and what it made the device do, each by name."""
    for _ in range(2):  # the first run allocates and loads kernels
        body()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function("the body"), syncs_are_errors():
            body()
        torch.cuda.synchronize()
    events = recorded.events()
    (span,) = (
        event.time_range
        for event in events
        if event.name == "the body" and event.device_type == DeviceType.CPU
    )
    # The profiler itself synchronises, before and after.
    calls = Counter(
        event.name
        for event in events
        if event.device_type == DeviceType.CPU
        and re.match(r"cu(da)?[A-Z]", event.name)
        and span.start <= event.time_range.start <= span.end
    )
    work = Counter(
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA and event.name != "the body"
    )
    return calls, work


def waits(body) -> Counter:
    """Count calls in which the host waits, and copies that wait because of unpinned memory."""
    calls, work = trace(body)
    waiting = {name: n for name, n in calls.items() if re.search(r"Synchronize|Memcpy(_|$)", name)}
    return Counter(waiting) + Counter({name: n for name, n in work.items() if "Pageable" in name})


def use_everything(layout: PackedLayout, labels: torch.Tensor) -> None:
    names = (
        "lengths cu_seqlens cu_seqlens_static host_meta position_ids seq_ids max_seqlen "
        "total_tokens num_real_tokens num_sequences device"
    )
    for name in names.split():
        getattr(layout, name)
    (
        layout.flash_kwargs(),
        layout.wait(),
        repr(layout),
        layout.to(labels.device),
        layout.pin_memory(),
    )
    cuseq.data.mask_boundary_labels(labels, layout)
    cuseq.ops.cached_position_ids(layout.lengths, layout.total_tokens)
    cuseq.ops.cached_position_ids(layout.lengths, layout.total_tokens)


def test_the_count_sees_waits(cuda):
    """The other tests rely on the count."""
    tensor = torch.ones(3, device=cuda)
    event = torch.cuda.Event()

    def wait_on_event():
        event.record()
        event.synchronize()

    assert sum(waits(wait_on_event).values()) == 1
    assert sum(waits(torch.cuda.synchronize).values()) == 1
    assert waits(lambda: tensor + 1) == Counter()
    with pytest.raises(RuntimeError, match="synchroniz"), syncs_are_errors():
        tensor.sum().item()


def test_host_lengths_never_wait(cuda):
    labels = torch.arange(TOTAL, device=cuda)
    host = torch.tensor(LENGTHS)

    def body():
        for layout in (
            PackedLayout.from_lengths(LENGTHS, TOTAL),
            PackedLayout.from_lengths(host, TOTAL).pin_memory(),
            PackedLayout.from_cu_seqlens([0, 2, 2, 5], TOTAL),
        ):
            use_everything(layout.to(cuda), labels)
        use_everything(PackedLayout.from_lengths(LENGTHS, device=cuda), labels[:5])
        cuseq.data.mask_boundary_labels(labels, LENGTHS)
        cuseq.data.mask_boundary_labels(labels, host, shift=1)

    assert waits(body) == Counter()


def test_collator_leaves_the_gpu_alone():
    examples = [
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"input_ids": [7, 8, 9], "labels": [7, 8, 9]},
    ]
    calls, work = trace(lambda: cuseq.PackingCollator(total_tokens=8)(examples))
    assert (calls, work) == (Counter(), Counter())


def test_a_collated_batch_never_waits(cuda):
    examples = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]

    def body():
        batch = cuseq.PackingCollator(total_tokens=8)(examples)
        packed = batch.pop("packed").to(cuda)
        rows = {key: row.pin_memory().to(cuda, non_blocking=True) for key, row in batch.items()}
        use_everything(packed, rows["labels"])

    assert waits(body) == Counter()


@pytest.mark.parametrize("make", ["from_lengths", "from_cu_seqlens", "from_position_ids", "mask"])
def test_device_lengths_wait_once(make, cuda):
    lengths = torch.tensor([2, 3], device=cuda)
    offsets = cuseq.ops.cu_seqlens(lengths)
    ids = torch.tensor([0, 1, 0, 1, 2, 0], device=cuda)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], device=cuda)
    makers = {
        "from_lengths": lambda: PackedLayout.from_lengths(lengths, TOTAL),
        "from_cu_seqlens": lambda: PackedLayout.from_cu_seqlens(offsets, TOTAL),
        "from_position_ids": lambda: PackedLayout.from_position_ids(ids),
        "mask": lambda: PackedLayout.from_padding_mask(mask, total_tokens=TOTAL),
    }
    labels = torch.arange(TOTAL, device=cuda)
    assert waits(makers[make]) == Counter()
    assert waits(lambda: use_everything(makers[make](), labels)) == {"cudaEventSynchronize": 1}


def test_labels_and_unread_layouts_of_device_lengths_do_not_wait(cuda):
    lengths = torch.tensor([2, 3], device=cuda)
    labels = torch.arange(TOTAL, device=cuda)
    assert waits(lambda: cuseq.data.mask_boundary_labels(labels, lengths)) == Counter()


def test_to_is_safe_while_its_pinned_memory_is_free_again(cuda):
    torch.cuda._sleep(LONG)
    moved = [PackedLayout.from_lengths([i, 3], 200).to(cuda) for i in range(50)]
    assert [layout.lengths.tolist() for layout in moved] == [[i, 3] for i in range(50)]


# Every op with its arguments, and the most kernels that it may launch.
def all_ops(lengths, mask, ids, labels):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=lengths.device)
    values = torch.ones(TOTAL, 3, device=lengths.device)
    return {
        "cu_seqlens": (lambda: cuseq.ops.cu_seqlens(lengths), 1),
        "max_seqlen": (lambda: cuseq.ops.max_seqlen(lengths), 1),
        "last_token_indices": (lambda: cuseq.ops.last_token_indices(lengths), 1),
        "position_ids": (lambda: cuseq.ops.position_ids(lengths, TOTAL), 2),
        "seq_ids": (lambda: cuseq.ops.seq_ids(lengths, TOTAL), 2),
        "cached_cu_seqlens": (lambda: cuseq.ops.cached_cu_seqlens(lengths), 1),
        "cached_position_ids": (lambda: cuseq.ops.cached_position_ids(lengths, TOTAL), 2),
        "cached_seq_ids": (lambda: ops.cached_seq_ids(lengths, TOTAL), 2),
        "layout_metadata": (lambda: ops.layout_metadata(lengths, TOTAL, 4, False), 1),
        "token_metadata": (lambda: ops.token_metadata(offsets, TOTAL), 1),
        "lengths_from_padding_mask": (lambda: cuseq.ops.lengths_from_padding_mask(mask), 1),
        "from_position_ids": (lambda: cuseq.ops.cu_seqlens_from_position_ids(ids, 4), 2),
        "segment_reduce": (lambda: ops.segment_reduce(values, offsets, "mean"), 1),
        "mask_boundary_labels": (lambda: ops.mask_boundary_labels(labels, offsets), 1),
    }


def on_gpu(lengths: list[int], device) -> list[torch.Tensor]:
    mask = torch.arange(TOTAL).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.tensor(reference.position_ids(lengths, TOTAL))
    labels = torch.tensor(lengths).repeat(3)[:TOTAL]
    return [tensor.to(device) for tensor in (torch.tensor(lengths), mask, ids, labels)]


def test_ops_neither_wait_nor_launch_more_than_they_need(cuda):
    for name, (op, most) in all_ops(*on_gpu([2, 3], cuda)).items():

        def body(op=op):
            cuseq.cache.clear()  # a miss each time
            op()

        calls, work = trace(body)
        assert (name, [call for call in calls if "Synchronize" in call]) == (name, [])
        assert sum(work.values()) <= most, (name, work)


# Not for compute-sanitizer: without the caching allocator, captures cannot allocate.
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_replay_with_new_lengths(warm, cuda):
    inputs = on_gpu([2, 3], cuda)
    calls = {name: op for name, (op, _) in all_ops(*inputs).items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = {name: op() for name, op in calls.items()}
    torch.cuda.current_stream().wait_stream(side)
    if not warm:
        cuseq.cache.clear()

    before = cuseq.cache.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = {name: op() for name, op in calls.items()}
    after = cuseq.cache.stats()
    assert after["bypasses"] - before["bypasses"] == 3
    for count in ("hits", "misses", "entries"):
        assert (count, after[count]) == (count, before[count])
    assert all(captured[name] is not kept[name] for name in calls)

    for lengths in ([2, 3], [4, 1], [0, 6], [1, 1]):
        for tensor, new in zip(inputs, on_gpu(lengths, cuda), strict=True):
            tensor.copy_(new)
        graph.replay()
        replayed = {
            name: torch.utils._pytree.tree_map(torch.clone, v) for name, v in captured.items()
        }
        eager = {name: op() for name, op in calls.items()}
        torch.testing.assert_close(replayed, eager, rtol=0, atol=0)
        assert replayed["cached_seq_ids"].tolist() == reference.seq_ids(lengths, TOTAL)


def test_host_values_of_device_lengths_are_refused_in_a_capture(cuda):
    lengths = torch.tensor([2, 3], device=cuda)
    cuseq.ops.max_seqlen_sync(lengths)
    PackedLayout.from_lengths(lengths, TOTAL).wait()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="max_seqlen_sync.*captur"):
            cuseq.ops.max_seqlen_sync(lengths)
        with pytest.raises(RuntimeError, match="lengths.*captur"):
            PackedLayout.from_lengths(lengths, TOTAL)
        cuseq.ops.cu_seqlens(lengths)
