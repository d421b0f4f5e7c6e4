"""Test wide heads, values of another width, and keys that are values or of several layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cuseq

LENGTHS = [5, 1, 9, 3]
TOKENS = 20  # with a tail


def rows(heads: int, dim: int, seed: int, device, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(TOKENS, heads, dim, generator=generator, dtype=torch.float64)
    return made.to(device, dtype).requires_grad_()


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None):
    """Compute attention of each sequence from its matrix of scores."""
    outputs, start = [], 0
    group = q.shape[1] // k.shape[1]
    for length in LENGTHS:
        own = (x[start : start + length].transpose(0, 1) for x in (q, k, v))
        queries, keys, values = own
        scores = queries @ keys.repeat_interleave(group, 0).mT / q.shape[2] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            seen &= ~seen.tril(-window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((weights @ values.repeat_interleave(group, 0)).transpose(0, 1))
        start += length
    outputs.append(q.new_zeros(TOKENS - start, q.shape[1], v.shape[2]))
    return torch.cat(outputs)


def assert_same(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weight = torch.sin(torch.arange(found.numel(), device=found.device)).view(found.shape)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, weight.to(found.dtype)),
        torch.autograd.grad(expected, inputs, weight.to(found.dtype)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


HEADS = [(4, 4), (4, 2), (6, 1)]
MASKS = [(None, None), (3, None), (None, 2.0)]


@pytest.mark.parametrize(("window", "softcap"), MASKS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dims", [(512, 512), (192, 128), (8, 24)], ids=str)
def test_heads_of_any_width(dims, heads, window, softcap, device):
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, TOKENS, device=device)
    q, k = rows(heads[0], dims[0], 1, device), rows(heads[1], dims[0], 2, device)
    v = rows(heads[1], dims[1], 3, device)
    found = cuseq.varlen_attention(q, k, v, packed, window=window, softcap=softcap)
    assert_same(found, reference(q, k, v, window, softcap), (q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_keys_that_are_the_values(heads, compiled, device):
    """The gradient of one tensor in two roles is the sum of both (Gemma 4, k equal to v)."""
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, TOKENS, device=device)
    q, k = rows(heads[0], 16, 1, device), rows(heads[1], 16, 2, device)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return cuseq.varlen_attention(q, k, k, packed)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same(attend(q, k), reference(q, k, k, None, None), (q, k))


def test_keys_and_values_of_several_layers(device):
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, TOKENS, device=device)
    queries = [rows(4, 16, seed, device) for seed in (1, 2, 3)]
    k, v = rows(2, 16, 4, device), rows(2, 16, 5, device)
    found = sum(cuseq.varlen_attention(q, k, v, packed) for q in queries)
    expected = sum(reference(q, k, v, None, None) for q in queries)
    assert_same(found, expected, (*queries, k, v))


def test_keys_are_not_repeated_on_a_cpu():
    tokens, key_heads, group, dim = 64, 2, 16, 512
    packed = cuseq.PackedLayout.from_lengths([tokens])
    q = torch.randn(tokens, group * key_heads, dim)
    k, v = torch.randn(2, tokens, key_heads, dim)
    with torch.profiler.profile(profile_memory=True) as profile:
        cuseq.varlen_attention(q, k, v, packed)
    copies = [event.cpu_memory_usage for event in profile.events() if event.name == "aten::clone"]
    assert not [size for size in copies if size >= group * k.nbytes]
