"""Megatron-Core's own dataclass and THD rotary embedding, where it is installed."""

from __future__ import annotations

import pytest
import torch

import cuseq
from cuseq import PackedLayout
from cuseq.integrations.megatron import packed_seq_params

megatron = pytest.importorskip(
    "megatron.core.packed_seq_params",
    reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
)


def test_fields_with_padding(device):
    packed = PackedLayout.from_lengths([3, 5], segment_multiple=4, total_multiple=16, device=device)
    params = packed_seq_params(packed)
    assert isinstance(params, megatron.PackedSeqParams)
    assert params.qkv_format == "thd"
    for side in ("q", "kv"):
        assert getattr(params, f"cu_seqlens_{side}").tolist() == [0, 3, 8]
        assert getattr(params, f"cu_seqlens_{side}_padded").tolist() == [0, 4, 12]
        assert getattr(params, f"max_seqlen_{side}") == 8


def test_fields_without_padding(device):
    params = packed_seq_params(PackedLayout.from_lengths([3, 5], device=device), cp_group="group")
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert params.cu_seqlens_q_padded is None
    assert params.max_seqlen_kv == 5
    assert params.cp_group == "group"
    with pytest.raises(TypeError, match="no_such_field"):
        packed_seq_params(PackedLayout.from_lengths([1]), no_such_field=1)


def test_seq_idx(device):
    packed = PackedLayout.from_lengths([3, 0, 5], segment_multiple=4, total_multiple=16)
    expected = [0] * 3 + [-1] + [2] * 5 + [-1] * 7
    seq_idx = packed.to(device).seq_idx
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
    assert seq_idx.tolist() == [expected]


@pytest.mark.parametrize("zigzag", [True, False])
def test_a_dealt_row_joins_again(zigzag, device):
    packed = PackedLayout.from_lengths([3, 8], segment_multiple=4, total_multiple=4, device=device)
    whole = torch.randn(packed.total_tokens, 2, device=device)
    parts = [cuseq.cp_partition(packed, 2, rank, whole, zigzag=zigzag) for rank in range(2)]
    assert parts[0][0].lengths.tolist() == ([1, 4] if zigzag else [2, 4])
    assert parts[1][0].lengths.tolist() == ([2, 4] if zigzag else [1, 4])
    stacked = torch.stack([tokens for _, tokens in parts])
    assert torch.equal(cuseq.cp_join(packed, 2, stacked, zigzag=zigzag), whole)
