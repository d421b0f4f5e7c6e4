"""Test varlen_attention over the kernels that `activate_flash_attention_impl` installs.

`torch.nn.attention.activate_flash_attention_impl` replaces PyTorch's flash kernels. FA3 and FA4 are
separate packages; if installed, they are tested here. A stand-in shows everywhere which arguments
they get, and that cuseq relies only on what flash guarantees.

They load whole tiles and multiply what follows a sequence by zero, so the tail has to be finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from reference import attention as reference_attention
from test_attention import PACKS, check_against_reference, inputs
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

import cuseq
from cuseq import PackedLayout

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}


class StandIn:
    """Exact attention in place of PyTorch's flash operators.

    It leaves the tail full of NaN, as kernels may, and records the windows that it was given.
    """

    def __init__(self) -> None:
        self.windows: list[tuple[str, int | None, int | None]] = []
        self._library: torch.library.Library | None = None

    def register(self) -> StandIn:
        self._library = torch.library.Library("aten", "IMPL", "CUDA")
        self._library.impl("_flash_attention_forward", self._forward)
        self._library.impl("_flash_attention_backward", self._backward)
        return self

    def remove(self) -> None:
        self._library = None

    def _forward(self, q, k, v, offsets, _offsets, max_q, _max_k, dropout, causal, debug, **rest):
        left, right = rest.get("window_size_left"), rest.get("window_size_right")
        self.windows.append(("forward", left, right))
        lengths = offsets.diff().tolist()
        assert max_q >= max(lengths, default=0) and dropout == 0 and not debug
        out = exact(q, k, v, lengths, causal, left, rest["scale"])
        out[sum(lengths) :] = float("nan")
        logsumexp = q.new_full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
        state = q.new_zeros(2, dtype=torch.int64)
        return out.to(q.dtype), logsumexp, state, state[0], q.new_empty(0)

    def _backward(
        self, grad, q, k, v, out, lse, offsets, _, max_q, max_k, drop, causal, *_s, **rest
    ):
        left, right = rest.get("window_size_left"), rest.get("window_size_right")
        self.windows.append(("backward", left, right))
        lengths = offsets.diff().tolist()
        grads = gradients(q, k, v, grad, lengths, causal, left, rest["scale"])
        for tensor in grads:
            tensor[sum(lengths) :] = float("nan")
        return grads


def exact(q, k, v, lengths, causal, left, scale) -> Tensor:
    window = None if left is None else left + 1
    rows = [t.float() for t in (q, k, v)]
    return reference_attention(*rows, lengths, causal=causal, window=window, scale=scale)


def gradients(q, k, v, grad, lengths, causal, left, scale) -> tuple[Tensor, ...]:
    """Compute gradients by hand, since operators in a backward run below autograd."""
    group = q.shape[1] // k.shape[1]
    found = [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        begin += length
        queries, keys, values, upper = (t[own].float() for t in (q, k, v, grad))
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        place = torch.arange(length, device=q.device)
        distance = place[:, None] - place
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if left is not None:
            hidden = hidden | (distance.abs() > left)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        upon_weights = torch.einsum("qhd,khd->hqk", upper, values)
        upon_scores = weights * (upon_weights - (upon_weights * weights).sum(-1, keepdim=True))
        found[0][own] = torch.einsum("hqk,khd->qhd", upon_scores, keys) * scale
        upon_keys = torch.einsum("hqk,qhd->khd", upon_scores, queries) * scale
        upon_values = torch.einsum("hqk,qhd->khd", weights, upper)
        found[1][own] = upon_keys.unflatten(1, (-1, group)).sum(2)
        found[2][own] = upon_values.unflatten(1, (-1, group)).sum(2)
    return tuple(t.to(q.dtype) for t in found)


@contextmanager
def standing_in() -> Iterator[StandIn]:
    implementation = StandIn()
    register_flash_attention_impl("stand-in", register_fn=implementation.register)
    activate_flash_attention_impl("stand-in")
    try:
        yield implementation
    finally:
        restore_flash_attention_impl()


@pytest.fixture
def stand_in(cuda):
    with standing_in() as implementation:
        yield implementation


@pytest.fixture(params=sorted(MODULES))
def implementation(request, cuda) -> str:
    """Activate each installed implementation until the test is over."""
    pytest.importorskip(MODULES[request.param])
    activate_flash_attention_impl(request.param)
    yield request.param
    restore_flash_attention_impl()


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_what_is_in_flash_place_runs(stand_in, lengths, tokens, options):
    tensors = inputs(tokens, dim=64, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths(lengths, tokens, device="cuda")
    check_against_reference(tensors, lengths, packed, bound=6e-3, backend="flash", **options)
    # No bounds are passed if the window hides no token: FA4 has no backward with bounds.
    hides = options.get("window", tokens) < max(lengths, default=0)
    window = (options["window"] - 1, 0) if hides else (None, None)
    calls = [("forward", *window), ("backward", *window)] if any(lengths) else []
    assert stand_in.windows == calls


def test_flash_is_back_after_it(cuda):
    tensors = inputs(9, dim=64, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([4, 5], device="cuda")
    before = cuseq.varlen_attention(*tensors, packed, backend="flash")
    with standing_in() as implementation:
        cuseq.varlen_attention(*tensors, packed, backend="flash")
    after = cuseq.varlen_attention(*tensors, packed, backend="flash")
    assert len(implementation.windows) == 1 and torch.equal(before, after)


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize("causal", [True, False])
def test_installed_ones_match_the_reference(implementation, lengths, tokens, causal):
    tensors = inputs(tokens, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths(lengths, tokens, device="cuda")
    check_against_reference(
        tensors, lengths, packed, bound=6e-3, tail=1e3, backend="flash", causal=causal
    )


@pytest.mark.parametrize("lengths", [[700, 1, 90, 300, 0, 900], [64] * 32], ids=str)
def test_installed_ones_at_the_size_of_a_model(implementation, lengths):
    tokens = sum(lengths) + 57
    tensors = inputs(tokens, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths(lengths, tokens, device="cuda")
    check_against_reference(tensors, lengths, packed, bound=6e-3, tail=1e3, backend="flash")


def test_installed_ones_with_sinks(implementation):
    """Their backward gets another output and logsumexp than their forward returned."""
    tensors = inputs(40, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    packed = PackedLayout.from_lengths([20, 0, 17], 40, device="cuda")
    found = with_sinks(tensors, sinks, packed)
    restore_flash_attention_impl()
    for actual, expected in zip(found, with_sinks(tensors, sinks, packed), strict=True):
        apart = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert apart < 1e-2


def with_sinks(tensors, sinks, packed) -> list[Tensor]:
    out = cuseq.varlen_attention(*tensors, packed, sinks=sinks, backend="flash")
    weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
    return [out, *torch.autograd.grad((out.float() * weight).sum(), (*tensors, sinks))]


def test_installed_ones_in_compiled_code(implementation):
    tensors = inputs(300, 4, 2, 64, device="cuda", dtype=torch.bfloat16)

    def attend(q, k, v, packed):
        return cuseq.varlen_attention(q, k, v, packed, backend="flash")

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    for lengths in ([100, 200], [300], [10] * 20):
        packed = PackedLayout.from_lengths(lengths, 300, device="cuda")
        out = compiled(*tensors, packed)
        grads = torch.autograd.grad(out.sum(), tensors)
        expected = attend(*tensors, packed)
        torch.testing.assert_close(out, expected)
        wanted = torch.autograd.grad(expected.sum(), tensors)
        for actual, right in zip(grads, wanted, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-2, atol=1e-2)
