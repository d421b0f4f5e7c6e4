"""Test what a layout knows for recurrent kernels: runs of tokens and their chunks."""

from __future__ import annotations

import copy
import pickle

import pytest
import reference
import torch
from fla_index import load_fla_index
from hypothesis import assume, given
from hypothesis import strategies as st
from test_no_sync import syncs_are_errors

import cuseq

FLA_INDEX = load_fla_index()
LENGTHS = st.lists(st.integers(0, 200), max_size=8)


@given(LENGTHS, st.integers(0, 70), st.sampled_from([1, 4, 16]), st.sampled_from([1, 16, 64, 1000]))
def test_runs_and_chunks(lengths, tail, multiple, chunk_size):
    wholes = [-(-length // multiple) * multiple for length in lengths]
    total = sum(wholes) + -(-tail // multiple) * multiple
    packed = cuseq.PackedLayout.from_lengths(lengths, total, segment_multiple=multiple)
    runs = reference.recurrent_offsets(lengths, wholes, total)
    assert packed.cu_seqlens_recurrent.tolist() == runs
    assert packed.cu_seqlens_recurrent_on_host().tolist() == runs
    chunks = reference.chunk_indices(runs, chunk_size)
    offsets = reference.chunk_offsets(runs, chunk_size)
    for dtype in (torch.int32, torch.int64):
        found = packed.chunk_indices(chunk_size, dtype)
        assert found.dtype == dtype and found.shape == (len(chunks), 2)
        assert found.tolist() == chunks
        assert packed.chunk_offsets(chunk_size, dtype).tolist() == offsets
        assert packed.chunk_offsets(chunk_size, dtype).dtype == dtype


def test_an_example():
    packed = cuseq.PackedLayout.from_lengths([3, 0, 2, 0], 8, segment_multiple=4, max_seqs=9)
    packed = packed.with_total_tokens(12)
    assert packed.cu_seqlens_recurrent.tolist() == [0, 3, 4, 6, 8, 12]
    assert packed.chunk_indices(2).tolist() == [
        [0, 0],
        [0, 1],
        [1, 0],
        [2, 0],
        [3, 0],
        [4, 0],
        [4, 1],
    ]
    assert packed.chunk_offsets(2).tolist() == [0, 2, 3, 4, 5, 7]


@pytest.mark.skipif(FLA_INDEX is None, reason="fla is not installed")
@given(
    st.lists(st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 200)), max_size=6),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([1, 4]),
)
def test_equal_to_those_of_fla(lengths, tail, multiple):
    total = sum(-(-length // multiple) * multiple for length in lengths) + tail * multiple
    packed = cuseq.PackedLayout.from_lengths(lengths, total, segment_multiple=multiple)
    assume(len(packed.cu_seqlens_recurrent) > 1)  # fla takes no row without tokens
    for dtype in (torch.int32, torch.int64):
        offsets = packed.cu_seqlens_recurrent.to(dtype)
        for size in (16, 64):
            theirs = FLA_INDEX.prepare_chunk_indices(offsets, size)
            assert theirs.dtype == dtype
            assert torch.equal(packed.chunk_indices(size, dtype), theirs)
            theirs = FLA_INDEX.prepare_chunk_offsets(offsets, size)
            assert torch.equal(packed.chunk_offsets(size, theirs.dtype), theirs)


def test_each_is_made_once(device):
    packed = cuseq.PackedLayout.from_lengths([5, 70], 80, device=device)
    assert packed.cu_seqlens_recurrent is packed.cu_seqlens_recurrent
    for dtype in (torch.int32, torch.int64):
        assert packed.chunk_indices(64, dtype) is packed.chunk_indices(64, dtype)
        assert packed.chunk_offsets(64, dtype) is packed.chunk_offsets(64, dtype)
        assert packed.chunk_indices(64, dtype).device == packed.device


def test_not_kept_for_inference_alone(device):
    with torch.inference_mode():
        packed = cuseq.PackedLayout.from_lengths([5, 70], device=device)
        made = [
            packed.cu_seqlens_recurrent,
            packed.chunk_indices(64),
            packed.chunk_offsets(64, torch.int64),
        ]
    assert not any(tensor.is_inference() for tensor in made)


def test_copies_know_the_same(device):
    packed = cuseq.PackedLayout.from_lengths([5, 70], 80, device=device)
    for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed), packed.to("cpu")):
        assert other.chunk_indices(64).tolist() == packed.chunk_indices(64).tolist()
    longer = packed.with_total_tokens(100)
    assert longer.cu_seqlens_recurrent.tolist() == [0, 5, 75, 100]


@pytest.mark.parametrize(
    ("size", "dtype", "error", "message"),
    [
        (0, torch.int32, ValueError, "chunk_size must be at least 1"),
        ("64", torch.int32, TypeError, "chunk_size must be an int"),
        (64, torch.float32, TypeError, "dtype must be torch.int32 or torch.int64"),
        (64, "int32", TypeError, "dtype must be a torch.dtype"),
    ],
)
def test_wrong_arguments(size, dtype, error, message):
    packed = cuseq.PackedLayout.from_lengths([5])
    for function in (packed.chunk_indices, packed.chunk_offsets):
        with pytest.raises(error, match=message):
            function(size, dtype)


def test_a_huge_chunk_holds_each_run():
    packed = cuseq.PackedLayout.from_lengths([5, 7])
    assert packed.chunk_indices(2**62).tolist() == [[0, 0], [1, 0]]


def test_a_rank_part_is_refused():
    packed = cuseq.PackedLayout.from_lengths([8])
    plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    part, _ = cuseq.distributed.cp_partition(packed, plan, 0, torch.ones(8))
    with pytest.raises(ValueError, match="whole row"):
        part.chunk_indices(64)


def test_host_lengths_never_wait(cuda):
    def facts(*lengths: int) -> list[torch.Tensor]:
        packed = cuseq.PackedLayout.from_lengths(lengths, 96, segment_multiple=4).to(cuda)
        return [
            packed.cu_seqlens_recurrent,
            packed.chunk_indices(64),
            packed.chunk_offsets(64, torch.int64),
        ]

    facts(6, 70)  # the first pinned memory of a process may wait
    torch.cuda._sleep(1_000_000_000)
    event = torch.cuda.Event()
    event.record()
    with syncs_are_errors():
        made = facts(5, 70)
    assert not event.query(), "it waited for the GPU"
    assert made[0].tolist() == [0, 5, 8, 78, 80, 96]


def test_device_lengths(cuda):
    lengths = torch.tensor([5, 0, 70], device=cuda)
    packed = cuseq.PackedLayout.from_lengths(lengths, 80)
    assert packed.cu_seqlens_recurrent.tolist() == [0, 5, 75, 80]
    assert packed.cu_seqlens_recurrent.device == cuda
    ids = torch.tensor([0, 1, 0, 1, 2], device=cuda)
    found = cuseq.PackedLayout.from_position_ids(ids)
    assert found.chunk_indices(2).tolist() == [[0, 0], [1, 0], [1, 1]]


def test_in_a_capture_only_known_facts(cuda):
    packed = cuseq.PackedLayout.from_lengths([5, 70], device=cuda)
    known = packed.chunk_indices(64)
    fresh = cuseq.PackedLayout.from_lengths([5, 70], device=cuda)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert packed.chunk_indices(64) is known
        with pytest.raises(RuntimeError, match="before the capture"):
            fresh.chunk_indices(64)
        with pytest.raises(RuntimeError, match="before the capture"):
            _ = fresh.cu_seqlens_recurrent
