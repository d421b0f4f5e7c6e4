"""Test `PackedLayout.chunked`: the layout of chunks of sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuseq
from cuseq.layout.build import offsets_of_chunks


def chunks(length: int, size: int) -> list[int]:
    """Cut a length into chunks, one after the other."""
    found = []
    while length > 0:
        found.append(min(length, size))
        length -= size
    return found


def test_the_example(device):
    packed = cuseq.PackedLayout.from_lengths([5, 2], 8, device=device)
    chunked = packed.chunked(2)
    assert chunked.lengths.tolist() == [2, 2, 1, 2]
    assert chunked.position_ids.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    assert chunked.total_tokens == 8 and chunked.device == packed.device
    assert packed.chunked(2) is chunked and packed.chunked(3) is not chunked
    assert packed.chunked(5).lengths.tolist() == [5, 2]


@given(lengths=st.lists(st.integers(0, 9), max_size=6), size=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_each_sequence_is_cut_from_its_start(lengths, size):
    chunked = cuseq.PackedLayout.from_lengths(lengths, sum(lengths) + 2).chunked(size)
    assert chunked.lengths.tolist() == [n for length in lengths for n in chunks(length, size)]
    assert chunked.max_seqlen == max([*chunked.lengths.tolist(), 0])


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    size=st.integers(1, 6),
    multiple=st.sampled_from([1, 4]),
)
@settings(max_examples=60, deadline=None)
def test_compiled_code_makes_the_same_offsets(lengths, size, multiple):
    packed = cuseq.PackedLayout.from_lengths(lengths, segment_multiple=multiple)
    chunked = packed.chunked(size)
    static, padded = packed.cu_seqlens_static, packed.cu_seqlens_padded_static
    room = static.shape[0] - 1 + packed.total_tokens // size
    found, found_padded = offsets_of_chunks(static, padded, size, room)
    assert torch.equal(found, chunked.cu_seqlens_static)
    if padded is None:
        assert found_padded is None
    else:
        assert torch.equal(found_padded, chunked.cu_seqlens_padded_static)


def test_padding_belongs_to_the_last_chunk():
    packed = cuseq.PackedLayout.from_lengths([5, 0, 2], segment_multiple=4)
    chunked = packed.chunked(2)
    assert chunked.lengths.tolist() == [2, 2, 1, 2]
    assert chunked.cu_seqlens_padded.tolist() == [0, 2, 4, 8, 12]


def test_attention_of_chunks(device):
    packed = cuseq.PackedLayout.from_lengths([5, 3], 9, device=device)
    q, k, v = (torch.randn(9, heads, 16, device=device) for heads in (4, 2, 2))
    found = cuseq.varlen_attention(q, k, v, packed.chunked(2))
    for begin, end in ((0, 2), (2, 4), (4, 5), (5, 7), (7, 8)):
        alone = cuseq.PackedLayout.from_lengths([end - begin], device=device)
        rows = (x[begin:end].contiguous() for x in (q, k, v))
        torch.testing.assert_close(found[begin:end], cuseq.varlen_attention(*rows, alone))


@pytest.mark.parametrize("multiple", [1, 4])
def test_chunks_follow_a_static_layout(multiple, device):
    """A captured graph reads the chunks' tensors where they were at its capture."""
    options = dict(segment_multiple=multiple, max_seqs=4, device=device)
    packed = cuseq.PackedLayout.from_lengths([5, 3], 16, **options)
    chunked = packed.chunked(2)
    static = chunked.cu_seqlens_static
    packed.copy_(cuseq.PackedLayout.from_lengths([1, 8, 2], 16, **options))
    assert packed.chunked(2) is chunked
    assert chunked.cu_seqlens_static is static
    expected = cuseq.PackedLayout.from_lengths([1, 8, 2], 16, **options).chunked(2)
    assert chunked.lengths.tolist() == expected.lengths.tolist() == [1, 2, 2, 2, 2, 2]
    assert torch.equal(static, expected.cu_seqlens_static)
    assert torch.equal(chunked.position_ids, expected.position_ids)
    if multiple > 1:
        assert torch.equal(chunked.cu_seqlens_padded_static, expected.cu_seqlens_padded_static)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_refused(size):
    packed = cuseq.PackedLayout.from_lengths([5])
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {size}"):
        packed.chunked(size)
    with pytest.raises(TypeError, match="chunk_size must be an int"):
        packed.chunked(2.0)


def test_parts_of_rows_and_trees_have_no_chunks():
    packed = cuseq.PackedLayout.from_lengths([8, 8])
    plan = cuseq.distributed.cp_plan(packed, 2)
    local, *_ = cuseq.distributed.cp_partition(packed, plan, 0)
    with pytest.raises(ValueError, match="packed must describe a whole row here"):
        local.chunked(2)
    tree = cuseq.PackedTree.from_parents([2, 3, 4], [-1, 0, 0])
    with pytest.raises(ValueError, match="tree"):
        tree.layout.chunked(2)
