"""Test that an argument of the wrong type is rejected by name, without a dump of signatures."""

from __future__ import annotations

import numpy
import pytest
import torch

import cuseq

ops = cuseq.ops
LENGTHS = torch.tensor([2, 3])
Q = torch.randn(6, 2, 8)
TABLE = torch.ones(6, 4)
PACKED = cuseq.PackedLayout.from_lengths([2, 3], 6)
TREE = cuseq.PackedTree.from_sequences([[1, 2, 3], [1, 2, 4], [1, 5]], total_tokens=6).layout


def nested() -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.ones(2)])


NOT_DENSE = {
    "list": lambda: [2, 3],
    "None": lambda: None,
    "sparse": lambda: LENGTHS.to_sparse(),
    "nested": nested,
    "nested rows": lambda: torch.nested.as_nested_tensor([torch.ones(2, 8)] * 2),
    "jagged rows": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 2, 8), torch.ones(4, 2, 8)], layout=torch.jagged
    ),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: LENGTHS.to("meta"),
}
TENSORS = {
    "lengths": [
        ops.cu_seqlens,
        ops.max_seqlen,
        ops.max_seqlen_sync,
        ops.last_token_indices,
        ops.cached_cu_seqlens,
        lambda lengths: ops.position_ids(lengths, 6),
        lambda lengths: ops.seq_ids(lengths, 6),
        lambda lengths: ops.cached_position_ids(lengths, 6),
        lambda lengths: ops.cached_seq_ids(lengths, 6),
        lambda lengths: ops.mask_ranges(lengths, 6),
        lambda lengths: ops.dense_mask(lengths, 6),
        lambda lengths: ops.block_mask(lengths, 6),
    ],
    "mask": [ops.lengths_from_padding_mask],
    "position_ids": [ops.cu_seqlens_from_position_ids],
    "q": [
        lambda q: cuseq.varlen_attention(q, Q, Q, PACKED),
        lambda q: cuseq.varlen_attention(q, Q, Q, TREE),
        lambda q: cuseq.varlen_attention(q, Q, Q, TREE, window=1),
        lambda q: cuseq.apply_rope(q, Q, TABLE, TABLE),
        lambda q: cuseq.apply_rope(q, Q, TABLE, TABLE, packed=PACKED),
        lambda q: cuseq.apply_qk_norm_rope(q, None, Q[0, 0], None, TABLE, TABLE, eps=1e-6),
    ],
    "k": [
        lambda k: cuseq.varlen_attention(Q, k, Q, PACKED),
        lambda k: cuseq.varlen_attention(Q, k, Q, TREE),
        lambda k: cuseq.varlen_attention(Q, k, Q, TREE, window=1),
    ],
    "v": [
        lambda v: cuseq.varlen_attention(Q, Q, v, PACKED),
        lambda v: cuseq.varlen_attention(Q, Q, v, TREE),
        lambda v: cuseq.varlen_attention(Q, Q, v, TREE, window=1),
        lambda v: cuseq.attention_backend(Q, Q, v, TREE),
    ],
    "cos": [lambda cos: cuseq.apply_rope(Q, Q, cos, TABLE)],
    "sin": [lambda sin: cuseq.apply_rope(Q, Q, TABLE, sin)],
    "q_weight": [
        lambda weight: cuseq.apply_qk_norm_rope(Q, None, weight, None, TABLE, TABLE, eps=1e-6)
    ],
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_no_dense_tensor_is_refused(name, kind):
    for call in TENSORS[name]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must ") as error:
            call(NOT_DENSE[kind]())
        assert "\n" not in str(error.value)


REFUSED = {
    "total_tokens": [
        lambda: ops.position_ids(LENGTHS, 6.0),
        lambda: ops.seq_ids(LENGTHS, None),
        lambda: ops.cached_position_ids(LENGTHS, "6"),
        lambda: ops.mask_ranges(LENGTHS, None),
        lambda: ops.dense_mask(LENGTHS, 2**70),
        lambda: cuseq.PackedLayout.from_lengths([], 2**31),
    ],
    "window": [
        lambda: ops.mask_ranges(LENGTHS, 6, window=2.5),
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, window="2"),
    ],
    "causal": [
        lambda: ops.dense_mask(LENGTHS, 6, causal=None),
        lambda: ops.mask_ranges(LENGTHS, 6, causal=torch.tensor(True)),
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, causal="yes"),
    ],
    "finite": [lambda: ops.dense_mask(LENGTHS, 6, finite=None)],
    "dtype": [
        lambda: ops.dense_mask(LENGTHS, 6, "bf16"),
        lambda: cuseq.rope_table(4, 8, dtype=LENGTHS.numpy()),
    ],
    "spans": [
        lambda: ops.mask_ranges(LENGTHS, 6, spans=[(0, 2)]),
        lambda: ops.block_mask(LENGTHS, 6, spans=((0, 2),)),
    ],
    "cu_seqlens_padded": [lambda: ops.mask_ranges(LENGTHS, 6, cu_seqlens_padded=[0, 2, 5])],
    "row_length": [
        lambda: ops.dense_mask(LENGTHS, 6, row_length=3.0),
        lambda: ops.dense_mask(LENGTHS[:0], 0, row_length=2**62),
        lambda: PACKED.dense_mask(row_length=2**63 - 1),
    ],
    "block_size": [
        lambda: ops.block_mask(LENGTHS, 6, block_size=(4, 4, 4)),
        lambda: ops.block_mask(LENGTHS, 6, block_size=2.0),
        lambda: ops.block_mask(LENGTHS, 6, block_size=torch.ones(3)),
        lambda: ops.block_mask(LENGTHS, 6, block_size=2**62),
        lambda: PACKED.block_mask(block_size=0),
    ],
    "max_seqs": [
        lambda: ops.cu_seqlens_from_position_ids(LENGTHS, 2.0),
        lambda: ops.cu_seqlens_from_position_ids(LENGTHS, 2**63 - 1),
    ],
    "plane": [lambda: ops.cu_seqlens_from_position_ids(LENGTHS, plane="0")],
    "scale": [
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, scale="a"),
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, scale=torch.tensor(0.5)),
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, scale=10**400),
        lambda: cuseq.varlen_attention(Q, Q, Q, PACKED, scale=1e-300),
    ],
    "offset": [
        lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, offset=2**64),
        lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, offset=False),
    ],
    "iterable": [lambda: list(cuseq.data.PackedStream(torch.tensor(3), 8))],
    "length": [
        lambda: cuseq.data.PackedStream([], 8, length=3),
        lambda: cuseq.rope_table(2**63 - 1, 8),
    ],
    "shuffle": [lambda: cuseq.data.PackedStream([], 8, shuffle=LENGTHS)],
    "drop_last": [
        lambda: cuseq.data.PackedStream([], 8, drop_last=None),
        lambda: cuseq.data.PackedBatchSampler([3], 8, drop_last=LENGTHS),
    ],
    "samples": [
        lambda: list(cuseq.data.PackedStream([2.5], 8)),
        lambda: list(cuseq.data.PackedStream([{"input_ids": nested()}], 8)),
        lambda: list(cuseq.data.PackedStream([{"input_ids": LENGTHS.to_sparse()}], 8)),
    ],
    "input_ids of samples": [
        lambda: list(cuseq.data.PackedStream([{"input_ids": LENGTHS.to("meta")}], 8))
    ],
    "examples": [lambda: cuseq.PackingCollator()(3), lambda: cuseq.PackingCollator()(nested())],
    "batch": [lambda: list(cuseq.data.split_by_tokens(3, 8))],
    "pad_token_id": [lambda: list(cuseq.data.split_by_tokens({}, 8, pad_token_id=nested()))],
    "rotary_dim": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, rotary_dim=4.0)],
    "table": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, table=None)],
    "qkv_format": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, qkv_format=3)],
    "inplace": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, inplace="yes")],
    "mrope_section": [
        lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, mrope_section=3),
        lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, mrope_section=b"ab"),
    ],
    "cp_size": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, cp_size=None)],
    "position_ids": [lambda: cuseq.apply_rope(Q, Q, TABLE, TABLE, position_ids=[0] * 6)],
    "eps": [
        lambda: cuseq.apply_qk_norm_rope(Q, None, Q[0, 0], None, TABLE, TABLE, eps="small"),
    ],
    "theta": [lambda: cuseq.rope_table(4, 8, theta="a"), lambda: cuseq.rope_table(4, 8, theta=Q)],
    "attention_factor": [lambda: cuseq.rope_table(4, 8, attention_factor=[1.0])],
    "device": [
        lambda: cuseq.rope_table(4, 8, device="-1"),
        lambda: cuseq.rope_table(4, 8, device=2**70),
        lambda: cuseq.rope_table(4, 8, device="cuda:99"),
        lambda: PACKED.to("nowhere"),
    ],
    "tensor": [lambda: cuseq.cache.invalidate([2, 3]), lambda: cuseq.cache.invalidate(None)],
    "segment_multiple": [
        lambda: cuseq.PackedLayout.from_lengths([1, 7], segment_multiple=2**63 - 1),
    ],
    "overlong": [lambda: cuseq.data.PackedBatchSampler([3], 8, overlong=LENGTHS.numpy())],
    "policy": [lambda: cuseq.distributed.cp_plan([4], 2, policy=LENGTHS.numpy())],
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arguments_are_refused_by_name(name):
    for call in REFUSED[name]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must ") as error:
            call()
        assert "\n" not in str(error.value)


def test_a_negated_view_is_not_rotated_in_place():
    q = torch._neg_view(Q.clone())
    with pytest.raises(ValueError, match="q must not be a negated view if inplace=True"):
        cuseq.apply_rope(q, None, TABLE, TABLE, inplace=True)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    total, window = numpy.int64(6), numpy.int32(2)
    assert ops.position_ids(LENGTHS, total).tolist() == [0, 1, 0, 1, 2, 0]
    exact = cuseq.varlen_attention(Q, Q, Q, PACKED, window=2, scale=0.5)
    numbers = {"window": window, "scale": numpy.float32(0.5), "causal": numpy.True_}
    assert torch.equal(cuseq.varlen_attention(Q, Q, Q, PACKED, **numbers), exact)


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "backend": lambda x: cuseq.varlen_attention(Q, Q, Q, PACKED, backend=x),
        "balance": lambda x: cuseq.data.PackedBatchSampler([3], 8, balance=x),
        "block_size": lambda x: PACKED.block_mask(block_size=[x] * 3),
        "fill": lambda x: ops.shift_left(torch.arange(6), PACKED, fill=x),
        "total_tokens": lambda x: ops.cached_position_ids(LENGTHS, x),
        r"sequences\[0\]\[1\]": lambda x: cuseq.PackedTree.from_sequences([[1, x]]),
        "lengths": lambda x: cuseq.PackedLayout.from_lengths([x]),
        "spans": lambda x: PACKED.dense_mask(spans=[(0, x)]),
    }.items(),
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_messages_describe_tensors(name, call):
    """Their values may lie on a GPU, and there may be too many of them."""
    unprintable = torch.empty(3000, dtype=torch.qint8)
    with pytest.raises(RuntimeError):
        repr(unprintable)
    for value in (torch.ones(3000), unprintable):
        message = rf"^{name} must .*,? got \W*(0, )?a tensor of "
        with pytest.raises((TypeError, ValueError), match=message):
            call(value)


class Index:
    """What is an int by `__index__` alone."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [Index, numpy.int64, torch.tensor])
def test_sizes_of_layouts_are_ints_of_any_kind(kind):
    Layout = cuseq.PackedLayout
    mask = torch.tensor([[1, 1], [1, 0]])
    sizes = {"total_tokens": kind(8), "max_seqs": kind(3)}
    multiples = {"segment_multiple": kind(2), "total_multiple": kind(4)}
    for packed in (
        Layout.from_lengths([2, 1], **sizes),
        Layout.from_lengths([2, 1], **sizes, **multiples),
        Layout.from_cu_seqlens([0, 2, 3], **sizes),
        Layout.from_padding_mask(mask, **sizes, **multiples),
        Layout.from_lengths([2, 1], max_seqs=kind(3)).with_total_tokens(kind(8)),
    ):
        assert packed.lengths.tolist() == [2, 1]
        assert (packed.total_tokens, packed.cu_seqlens_static.shape[0]) == (8, 4)
    assert cuseq.run_packed(
        lambda input_ids, position_ids, packed: input_ids, mask, mask, total_tokens=kind(8)
    ).tolist() == [[1, 1], [1, 0]]
