"""Test attention with sinks against a softmax with the sinks as one more column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import cuseq
from cuseq import PackedLayout

LENGTHS = [5, 0, 9, 1]
TOTALS = {1: 18, 4: 28}  # by the multiple of the segments, with a tail of 3 and of 4
TOTAL = TOTALS[1]


def layout(multiple: int, device: torch.device) -> PackedLayout:
    return PackedLayout.from_lengths(
        LENGTHS, TOTALS[multiple], segment_multiple=multiple, device=device
    )


def inputs(dtype: torch.dtype, device: torch.device, multiple: int = 1) -> list[Tensor]:
    """Return q, k, v and sinks; two query heads share a key head."""
    generator = torch.Generator().manual_seed(0)
    total = TOTALS[multiple]
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, 8), (4,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def by_loop(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, multiple: int
) -> Tensor:
    rows, begin = [], 0
    for length in LENGTHS:
        segment = -(-length // multiple) * multiple
        own = slice(begin, begin + length)
        queries, keys, values = (t[own].transpose(0, 1) for t in (q, k, v))
        keys, values = (t.repeat_interleave(2, 0) for t in (keys, values))
        scores = queries @ keys.mT * 8**-0.5
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or len(q)))
        scores = scores.masked_fill(hidden.to(q.device), -torch.inf)
        column = sinks.view(-1, 1, 1).expand(-1, length, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        rows += [(weights @ values).transpose(0, 1), q.new_zeros(segment - length, 4, 8)]
        begin += segment
    return torch.cat([*rows, q.new_zeros(len(q) - begin, 4, 8)])


def exact(
    dtype: torch.dtype, device: torch.device, window: int | None, weight: Tensor, multiple: int
):
    """Compute output and gradients in float64 from inputs rounded to their own dtype.

    Also returns the magnitude of the terms of each sink's gradient, which may cancel.
    """
    tensors = [t.detach().double().requires_grad_() for t in inputs(dtype, device, multiple)]
    out = by_loop(*tensors, window, multiple)
    grads = torch.autograd.grad((out * weight).sum(), tensors, retain_graph=True)
    (added,) = torch.autograd.grad((out * out.detach().sign() * weight.abs()).sum(), tensors[3])
    return [out, *grads], added.abs()


@pytest.mark.kernels
@pytest.mark.parametrize("multiple", TOTALS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(dtype, window, multiple, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("products of bf16 are no test of a CPU")
    packed = layout(multiple, device)
    weight = torch.randn(TOTALS[multiple], 4, 8, dtype=torch.float64, device=device)
    tensors = inputs(dtype, device, multiple)
    q, k, v, sinks = tensors
    out = cuseq.varlen_attention(q, k, v, packed, window=window, sinks=sinks)
    assert out.dtype == dtype
    grads = torch.autograd.grad((out * weight.to(dtype)).sum(), tensors)
    assert not any(rows[packed.moe_padding_mask].any() for rows in (out, *grads[:3]))
    expected, added = exact(dtype, device, window, weight.to(dtype).double(), multiple)
    sizes = [right.abs() + right.abs().max() for right in expected[:-1]]
    for found, right, size in zip((out, *grads), expected, [*sizes, added], strict=True):
        assert found.dtype == dtype
        assert ((found.double() - right).abs() <= 8 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 0.5}, {"causal": False}, {"window": 2}], ids=str
)
def test_padding_changes_nothing(options, device):
    """A row with padded segments gives what the same sequences without padding give."""
    padded, packed = layout(4, device), layout(1, device)
    tensors = inputs(torch.float64, device, 4)
    real = ~padded.moe_padding_mask
    weight = torch.randn(TOTALS[4], 4, 8, dtype=torch.float64, device=device)

    def run(rows, layout, weight):
        leaves = [t.detach().requires_grad_() for t in (*rows, tensors[3])]
        out = cuseq.varlen_attention(*leaves[:3], layout, sinks=leaves[3], **options)
        return out, *torch.autograd.grad(out, leaves, weight)

    def alone(rows):
        return torch.cat([rows[real], rows.new_zeros(TOTAL - sum(LENGTHS), *rows.shape[1:])])

    found = run(tensors[:3], padded, weight)
    expected = run([alone(t) for t in tensors[:3]], packed, alone(weight))
    torch.testing.assert_close([alone(t) for t in found[:4]], list(expected[:4]))
    torch.testing.assert_close(found[4], expected[4])


@pytest.mark.parametrize("multiple", TOTALS)
def test_a_sink_far_below_changes_nothing(multiple, device):
    packed = layout(multiple, device)
    q, k, v, sinks = inputs(torch.float64, device, multiple)
    without = cuseq.varlen_attention(q, k, v, packed)
    far = torch.full_like(sinks, -1e4)
    torch.testing.assert_close(cuseq.varlen_attention(q, k, v, packed, sinks=far), without)
    near = cuseq.varlen_attention(q, k, v, packed, sinks=torch.full_like(sinks, 1e4))
    assert near.abs().max() < 1e-12


@pytest.mark.parametrize("multiple", TOTALS)
def test_compiled_in_one_graph(multiple, device):
    total = TOTALS[multiple]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, packed, sinks: cuseq.varlen_attention(q, k, v, packed, sinks=sinks),
        backend=counter,
        fullgraph=True,
        dynamic=False,
    )
    tensors = inputs(torch.float64, device, multiple)
    q, k, v, sinks = tensors
    for lengths in (LENGTHS, [total - 1], [1] * (total // multiple)):
        packed = PackedLayout.from_lengths(lengths, total, segment_multiple=multiple, device=device)
        found = compiled(q, k, v, packed, sinks)
        expected = cuseq.varlen_attention(q, k, v, packed, sinks=sinks)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), tensors),
            torch.autograd.grad(expected.square().sum(), tensors),
        )
    assert counter.frame_count == 1


@pytest.mark.parametrize("same", ["k is v", "q is k is v"])
def test_compiled_with_a_tensor_that_is_given_twice(same, device):
    """Dynamo passes it once: a Function in Python would lose one of its gradients."""
    packed = PackedLayout.from_lengths(LENGTHS, TOTAL, device=device)
    q, k, _, sinks = inputs(torch.float64, device)

    def attend(q, k, sinks):
        queries, keys = q.sin(), k.sin()
        if same == "k is v":
            return cuseq.varlen_attention(queries, keys, keys, packed, sinks=sinks)
        return cuseq.varlen_attention(keys, keys, keys, packed, sinks=sinks[:2])

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    wanted = [t for t in (q, k, sinks) if t is not q or same == "k is v"]
    found, expected = compiled(q, k, sinks), attend(q, k, sinks)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
    )


@pytest.mark.parametrize("multiple", TOTALS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_padding_and_tail_hold_does_not_count(value, multiple, device):
    packed = layout(multiple, device)
    tensors = inputs(torch.float64, device, multiple)
    grad = torch.randn(TOTALS[multiple], 4, 8, dtype=torch.float64, device=device)

    def run():
        out = cuseq.varlen_attention(*tensors[:3], packed, sinks=tensors[3])
        return out.detach(), *torch.autograd.grad(out, tensors, grad)

    expected = run()
    with torch.no_grad():
        for rows in (*tensors[:3], grad):
            rows[packed.moe_padding_mask] = value
    torch.testing.assert_close(run(), expected)


def test_autocast_leaves_float64_alone(device):
    packed = PackedLayout.from_lengths(LENGTHS, TOTAL, device=device)
    q, k, v, sinks = inputs(torch.float64, device)
    with torch.autocast(device.type, torch.bfloat16):
        out = cuseq.varlen_attention(q, k, v, packed, sinks=sinks)
    assert torch.equal(out, cuseq.varlen_attention(q, k, v, packed, sinks=sinks))


def test_autocast(device):
    packed = PackedLayout.from_lengths(LENGTHS, TOTAL, device=device)
    q, k, v, sinks = inputs(torch.float32, device)
    if device.type == "cpu":
        pytest.skip("products of bf16 are no test of a CPU")
    with torch.autocast(device.type, torch.bfloat16):
        out = cuseq.varlen_attention(q, k, v, packed, sinks=sinks)
    assert out.dtype == torch.bfloat16
    lower = [t.bfloat16() for t in (q, k, v)]
    assert torch.equal(out, cuseq.varlen_attention(*lower, packed, sinks=sinks))


def test_second_derivatives_raise(device):
    packed = PackedLayout.from_lengths(LENGTHS, TOTAL, device=device)
    q, k, v, sinks = inputs(torch.float64, device)
    out = cuseq.varlen_attention(q, k, v, packed, sinks=sinks)
    for loss in (out.sum(), out.square().sum()):  # with a constant gradient, and without
        wanted = [q, k, v, sinks]
        grads = torch.autograd.grad(loss, wanted, create_graph=True)
        plain = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert all(map(torch.equal, grads, plain))
        grads[0].mul_(2)  # as a hook may
        for grad in grads:
            with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
                torch.autograd.grad(grad.sum(), wanted, retain_graph=True, allow_unused=True)
