"""Test that subclasses of Tensor give what plain tensors give, in every public function and op.

Batches of images and masks come as such: torchvision's `tv_tensors`, MONAI's `MetaTensor`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import cuseq

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

# isort: split
from tests.fuzz.calls import TARGETS  # noqa: E402
from tests.fuzz.judge import facts, same  # noqa: E402
from tests.fuzz.values import Draw  # noqa: E402
from tests.fuzz.ways import SUBCLASSES, Disabled, Passed, as_subclass  # noqa: E402


def as_kind(kind, value):
    """Return a value with its tensors as a subclass, and plain ones elsewhere."""
    return tree_map(lambda one: as_subclass(kind, one) if isinstance(one, Tensor) else one, value)


def outcome(target, arguments):
    try:
        return facts(target.call(arguments))
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", SUBCLASSES, ids=lambda kind: kind.__name__)
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
