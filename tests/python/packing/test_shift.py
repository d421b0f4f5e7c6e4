"""Test shifts inside the sequences of a row against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from cuseq import PackedLayout
from cuseq.ops import shift_left


def by_loop(values, packed, shift, fill):
    rows = torch.full_like(values, fill)
    for start, length in zip(
        packed.cu_seqlens_padded.tolist(), packed.lengths.tolist(), strict=False
    ):
        for token in range(length - shift):
            rows[start + token] = values[start + token + shift]
    return rows


@pytest.mark.kernels
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 9]), max_size=5),
    multiple=st.sampled_from([1, 4]),
    tail=st.integers(0, 2),
    shift=st.sampled_from([0, 1, 2, 3, 50]),
    shape=st.sampled_from([(), (3,), (2, 3)]),
)
def test_values_and_gradients(lengths, multiple, tail, shift, shape, device):
    total = sum(-(-length // multiple) * multiple for length in lengths) + tail * multiple
    packed = PackedLayout.from_lengths(lengths, total, segment_multiple=multiple, device=device)
    ids = torch.arange(1, total + 1, device=device)
    expected = by_loop(ids, packed, shift, -100)
    assert torch.equal(shift_left(ids, packed, shift, fill=-100), expected)
    assert torch.equal(shift_left(ids.view(1, total), packed, shift, fill=-100)[0], expected)
    values = torch.randn(total, *shape, device=device, dtype=torch.float64).requires_grad_()
    found, wanted = shift_left(values, packed, shift), by_loop(values, packed, shift, 0)
    assert torch.equal(found, wanted)
    weight = torch.randn_like(values)
    grads = [
        torch.autograd.grad((one * weight).sum() + 0 * values.sum(), values)[0]
        for one in (found, wanted)
    ]
    assert torch.equal(*grads)


def test_labels_of_several_depths_are_those_of_masked_rolls(device):
    packed = PackedLayout.from_lengths([3, 6, 1], 16, segment_multiple=4, device=device)
    ids = torch.arange(16, device=device)
    for depth in (1, 2, 3):
        expected = cuseq.data.mask_boundary_labels(ids.roll(-depth), packed, shift=depth)
        assert torch.equal(shift_left(ids, packed, depth, fill=-100), expected)


def test_rows_of_other_shapes_and_parts_are_refused():
    packed = PackedLayout.from_lengths([3, 5])
    for values in (torch.ones(7), torch.ones(2, 8), torch.ones(())):
        with pytest.raises(ValueError, match=r"values must be \[total_tokens = 8, ...\]"):
            shift_left(values, packed)
    with pytest.raises(ValueError, match="shift must be at least 0, got -1"):
        shift_left(torch.ones(8), packed, -1)
    with pytest.raises(TypeError, match="fill must be numbers"):
        shift_left(torch.ones(8), packed, fill="x")
    plan = cuseq.distributed.cp_plan(packed, 2)
    local, own = cuseq.distributed.cp_partition(packed, plan, 0, torch.ones(8))
    with pytest.raises(ValueError, match="a whole row"):
        shift_left(own, local)
    tree = cuseq.PackedTree.from_groups([[1, 2]], [[[3], [4, 5]]])
    with pytest.raises(ValueError, match="one after the other"):
        shift_left(torch.ones(5), tree.layout)


def test_one_graph_serves_all_layouts(device):
    graphs = []

    def counted(module, example):
        graphs.append(module)
        return module

    compiled = torch.compile(shift_left, fullgraph=True, backend=counted)
    for lengths in ([3, 4], [1, 2, 2, 1], [8]):
        packed = PackedLayout.from_lengths(lengths, 12, device=device)
        packed.moe_padding_mask  # noqa: B018  made outside
        values = torch.arange(12, device=device)
        assert torch.equal(compiled(values, packed), shift_left(values, packed))
    assert len(graphs) <= 2


def test_megatron_moves_tokens_over_boundaries_of_padded_rows():
    """If this fails, docs/thd.md warns of a fault that the release no longer has."""
    mtp = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    from cuseq.integrations.megatron import packed_seq_params

    ids = torch.tensor([[5, 6, 7, 0, 8, 9, 0, 0]])
    packed = PackedLayout.from_lengths([3, 2], segment_multiple=4)
    found, _ = mtp.roll_tensor(ids, packed_seq_params=packed_seq_params(packed))
    assert not torch.equal(found, shift_left(ids, packed))
    alone = PackedLayout.from_lengths([3, 5])
    found, _ = mtp.roll_tensor(ids, packed_seq_params=packed_seq_params(alone))
    assert torch.equal(found, shift_left(ids, alone))
