"""Test against Megatron-Core's own dataclass and THD rotary embedding, if it is installed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import cuseq
from cuseq import PackedLayout
from cuseq.integrations.megatron import packed_seq_params

pytest.importorskip(
    "megatron.core",
    reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
)

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.multimodal.context_parallel import get_padding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.utils import get_thd_batch_on_this_cp_rank


def test_fields_with_padding(device):
    packed = PackedLayout.from_lengths([3, 5], segment_multiple=4, total_multiple=16, device=device)
    params = packed_seq_params(packed)
    assert isinstance(params, PackedSeqParams)
    assert params.qkv_format == "thd"
    for side in ("q", "kv"):
        # The tail is a sequence of length zero.
        assert getattr(params, f"cu_seqlens_{side}").tolist() == [0, 3, 8, 8]
        assert getattr(params, f"cu_seqlens_{side}_padded").tolist() == [0, 4, 12, 16]
        assert getattr(params, f"max_seqlen_{side}") == 8


def test_a_tail_alone_is_padding(device):
    packed = PackedLayout.from_lengths([3, 5], 32, device=device)
    params = packed_seq_params(packed)
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 8]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 3, 8, 32]
    assert params.max_seqlen_q == 24


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


def test_a_dealt_row_joins_again(device):
    packed = PackedLayout.from_lengths([3, 8], segment_multiple=4, total_multiple=4, device=device)
    whole = torch.randn(packed.total_tokens, 2, device=device)
    plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    parts = [cuseq.distributed.cp_partition(packed, plan, rank, whole) for rank in range(2)]
    assert parts[0][0].lengths.tolist() == [1, 4]
    assert parts[1][0].lengths.tolist() == [2, 4]
    stacked = torch.stack([tokens for _, tokens in parts])
    assert torch.equal(cuseq.distributed.cp_join(packed, plan, stacked), whole)


@pytest.mark.parametrize("lengths", [[3, 5], [8, 0, 1, 20, 0], [16]], ids=str)
def test_fields_are_those_that_megatron_makes(lengths, device):
    """Compare with fields that Megatron's own function makes from the data loader's offsets."""
    packed = PackedLayout.from_lengths(lengths, segment_multiple=4)
    _, theirs = get_thd_batch_on_this_cp_rank(
        {},
        packed.cu_seqlens,
        packed.cu_seqlens_padded,
        torch.tensor([packed.max_seqlen_padded]),
        cp_size=1,
        cp_rank=0,
    )
    ours = packed_seq_params(packed.to(device))
    for field in dataclasses.fields(theirs):
        value, expected = getattr(ours, field.name), getattr(theirs, field.name)
        assert type(value) is type(expected), field.name
        if isinstance(value, Tensor):
            assert value.device == device or value.device.type == device.type == "cuda"
            value, expected = (value.dtype, value.tolist()), (expected.dtype, expected.tolist())
        assert value == expected, field.name


@pytest.mark.parametrize("segment_multiple", [1, 8])
@pytest.mark.parametrize("lengths", [[3, 5], [8, 0, 1, 20, 0], [1] * 5, [16]], ids=str)
def test_what_megatron_reads_from_the_fields(lengths, segment_multiple, device):
    packed = PackedLayout.from_lengths(
        lengths, segment_multiple=segment_multiple, total_multiple=48, device=device
    )
    params = packed_seq_params(packed)
    segments = [-(-length // segment_multiple) * segment_multiple for length in lengths]
    longest = max(*segments, packed.total_tokens - sum(segments))
    # Megatron's table of angles has this length.
    rows = RotaryEmbedding.get_rotary_seq_len(None, None, None, None, None, params)
    assert rows == longest > packed.position_ids[~packed.moe_padding_mask].max()
    # Its Mamba makes seq_idx from these: padding belongs to its segment, the tail is one more.
    mamba = MambaMixer._create_packed_seq_idx(None, params, packed.total_tokens)
    assert torch.equal(mamba, packed.seq_ids.unsqueeze(0))
    assert torch.equal(mamba.masked_fill(packed.moe_padding_mask, -1), packed.seq_idx)


@pytest.mark.parametrize(
    "multiple,parallel",
    [
        (1, dict(cp_size=1, tp_size=8, has_sp=False)),
        (4, dict(cp_size=2, tp_size=1, has_sp=False)),
        (8, dict(cp_size=4, tp_size=2, has_sp=False)),
        (4, dict(cp_size=1, tp_size=4, has_sp=True)),
        (16, dict(cp_size=2, tp_size=4, has_sp=True)),
        (16, dict(cp_size=1, tp_size=1, has_sp=False, fp8_enabled=True)),
        (32, dict(cp_size=1, tp_size=1, has_sp=False, fp8_enabled=True, fp8_recipe="mxfp8")),
    ],
)
def test_segments_follow_the_padding_rules(multiple, parallel, device):
    lengths = [1, 0, 15, 16, 17, 33]
    packed = PackedLayout.from_lengths(lengths, segment_multiple=multiple, device=device)
    params = packed_seq_params(packed)
    lies_at = params.cu_seqlens_q if multiple == 1 else params.cu_seqlens_q_padded
    pads = lies_at.diff() - params.cu_seqlens_q.diff()
    assert pads.tolist() == [get_padding(length, **parallel) for length in lengths]


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("total_multiple", [1, 80], ids=["no tail", "tail"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rotary_embedding_of_padded_segments(cp_size, total_multiple, interleaved, device):
    """Each rank's part of the row, rotated by the offsets that Megatron takes from the fields."""
    packed = PackedLayout.from_lengths(
        [3, 0, 17, 8, 1], segment_multiple=8, total_multiple=total_multiple
    )
    params, head_dim = packed_seq_params(packed), 8
    offsets = params.cu_seqlens_q_padded
    assert torch.equal(offsets[:6], packed.cu_seqlens_padded) and offsets[-1] == packed.total_tokens
    assert params.max_seqlen_q != offsets[-1], "Megatron would take its table for one row a token"
    inv_freq = 10_000 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(params.max_seqlen_q, dtype=torch.float64), inv_freq)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    options = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=interleaved, multi_latent_attention=False
    )
    cos, sin = cuseq.rope_table(
        packed.total_tokens, head_dim, inv_freq=inv_freq, dtype=torch.float64, device=device
    )
    q = torch.randn(packed.total_tokens, 2, head_dim, dtype=torch.float64)
    plan = cuseq.distributed.cp_plan(packed, cp_size, policy="zigzag")
    for rank in range(cp_size):
        local, own = cuseq.distributed.cp_partition(packed, plan, rank, q)
        theirs = apply_rotary_pos_emb(
            own,
            angles[:, None, None],
            options,
            cu_seqlens=offsets,
            cp_group=SimpleNamespace(size=lambda: cp_size, rank=lambda rank=rank: rank),
        )
        whole = dict(packed=packed.to(device), cp_size=cp_size, cp_rank=rank)
        for layout in (whole, dict(packed=local.to(device))):
            ours, _ = cuseq.apply_rope(
                own.to(device), None, cos, sin, interleaved=interleaved, **layout
            )
            torch.testing.assert_close(ours.cpu(), theirs)
