"""Test that subclasses of Tensor give what plain tensors give, in every public function and op.

Batches of images and masks come as such: torchvision's `tv_tensors`, MONAI's `MetaTensor`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import cuseq

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

# isort: split
from tests.fuzz.calls import TARGETS  # noqa: E402
from tests.fuzz.values import Draw  # noqa: E402


class Passed(Tensor):
    """Results of torch functions have this type too (MetaTensor)."""


class Disabled(Tensor):
    """Results of torch functions are plain (tv_tensors)."""

    __torch_function__ = torch._C._disabled_torch_function_impl


KINDS = [Passed, Disabled, nn.Parameter]


def as_kind(kind, value):
    """Return a value with its tensors as a subclass, and plain ones elsewhere."""

    def change(one):
        if type(one) is not Tensor:
            return one
        if kind is nn.Parameter:
            return nn.Parameter(one, requires_grad=one.requires_grad)
        return one.as_subclass(kind)

    return tree_map(change, value)


def facts(value):
    """Return tensors, layouts and numbers of a result as plain values."""
    if isinstance(value, cuseq.PackedLayout):
        rows = () if value.rank_positions is not None or value.is_tree else value.batch_rows()
        tensors = value.position_ids, value.seq_ids, value.moe_padding_mask, value.lengths, *rows
        assert all(type(t) is Tensor for t in (*tensors, *value.state.static_tensors()))
        return repr(value), [facts(t) for t in tensors]
    if isinstance(value, cuseq.PackedTree):
        return facts([value.input_ids, value.layout, value.samples, list(value.targets)])
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).clone()
    if isinstance(value, (list, tuple)):
        return [facts(one) for one in value]
    if isinstance(value, dict):
        return {name: facts(one) for name, one in value.items()}
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value)


def outcome(target, arguments):
    try:
        return facts(target.call(arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def same(found, expected):
    flat, shape = tree_flatten(found)
    other, other_shape = tree_flatten(expected)
    if shape != other_shape:
        return False
    for one, two in zip(flat, other, strict=True):
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if one.dtype != two.dtype or one.shape != two.shape:
                return False
            if not torch.equal(one.nan_to_num(7), two.nan_to_num(7)):
                return False
        elif isinstance(one, Tensor) or isinstance(two, Tensor) or one != two:
            return False
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", sorted(n for n, target in TARGETS.items() if not target.wrong))
def test_every_function_takes_subclasses(name, kind):
    target, draw = TARGETS[name], Draw("cpu")
    for number in range(30):
        draw.begin(11, number)
        arguments = target.make(draw)
        draw.begin(11, number)
        given = as_kind(kind, target.make(draw))
        expected, found = outcome(target, arguments), outcome(target, given)
        assert same(found, expected), f"call {number}: {found}\nplain: {expected}"


LEFT = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]])  # padding on the left, and between tokens


@pytest.mark.parametrize("kind", [Passed, Disabled])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("total_tokens", [None, 8])
def test_a_mask_keeps_where_its_padding_lies(kind, dtype, total_tokens):
    mask = LEFT.to(dtype).as_subclass(kind)
    packed = cuseq.PackedLayout.from_padding_mask(mask, total_tokens=total_tokens)
    batch = torch.arange(8).view(2, 4)
    row = cuseq.pack(packed, batch)
    assert row[:5].tolist() == [2, 3, 4, 6, 7]
    assert torch.equal(cuseq.unpack(packed, row), batch * LEFT)
    dense = LEFT.bool()[:, None, None, :].expand(2, 1, 4, 4) & torch.ones(4, 4).tril().bool()
    dense = (dense | torch.eye(4).bool()) & LEFT.bool()[:, None, :, None]
    same_layout = cuseq.PackedLayout.from_padding_mask(dense.as_subclass(kind))
    assert cuseq.pack(same_layout, batch).tolist() == [2, 3, 4, 6, 7]

    def model(input_ids, position_ids, packed):
        return input_ids * 10 + position_ids

    found = cuseq.run_packed(model, batch.as_subclass(kind), mask)
    assert found.tolist() == [[0, 0, 20, 31], [40, 0, 61, 72]]


@pytest.mark.parametrize("kind", [Passed, Disabled])
def test_gradients_of_subclasses(kind):
    packed = cuseq.PackedLayout.from_padding_mask(LEFT)
    angles = torch.arange(10.0).view(5, 2)

    def losses(batch, row, weight):
        logprobs = cuseq.token_logprobs(row.flatten(1), weight, torch.tensor([0, 1, 2, 1, 0]))
        yield cuseq.pack(packed, batch).square().sum()
        yield cuseq.unpack(packed, row).square().sum()
        yield cuseq.varlen_attention(row, row, row, packed).square().sum()
        yield cuseq.apply_rope(row, row, angles.cos(), angles.sin(), packed=packed)[0].sum()
        yield cuseq.ops.segment_mean(row, packed).square().sum()
        yield cuseq.causal_conv1d(row.flatten(1), weight.t()[:, :2], packed=packed).sum()
        yield logprobs.sum()

    def grads(change):
        torch.manual_seed(0)
        plain = [torch.randn(s).requires_grad_() for s in ((2, 4, 3), (5, 2, 4), (3, 8))]
        for loss in losses(*map(change, plain)):
            found = torch.autograd.grad(loss, plain, allow_unused=True)
            yield [None if one is None else one.as_subclass(Tensor) for one in found]

    for found, expected in zip(
        grads(lambda t: t.as_subclass(kind)), grads(lambda t: t), strict=True
    ):
        torch.testing.assert_close(found, expected)


class Elsewhere(Tensor):
    """A tensor whose values lie in another one (DTensor, quantised weights)."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {})
        )
        return tree_map(lambda x: cls(x) if type(x) is Tensor else x, function(*args, **kwargs))


def test_values_that_lie_elsewhere_are_refused():
    Layout = cuseq.PackedLayout
    message = "{} must be a tensor with values of its own, got a Elsewhere"
    for make, value, name in (
        (Layout.from_lengths, torch.tensor([2, 3]), "lengths"),
        (Layout.from_cu_seqlens, torch.tensor([0, 2, 3]), "cu_seqlens"),
        (Layout.from_padding_mask, LEFT, "mask"),
        (Layout.from_position_ids, torch.tensor([0, 1, 0]), "position_ids"),
    ):
        with pytest.raises(TypeError, match=message.format(name)):
            make(Elsewhere(value))
