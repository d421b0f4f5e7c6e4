"""Test flash-attn's functions over cuseq's attention against loops in fp64."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import cuseq
from cuseq.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

CASES = [
    pytest.param({}, id="full"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": True, "window_size": (2, 0)}, id="window"),
    pytest.param({"causal": True, "window_size": (2, -1)}, id="window, right open"),
    pytest.param({"causal": True, "window_size": (2, 2)}, id="window, right of no meaning"),
    pytest.param({"causal": True, "window_size": (None, None)}, id="no window"),
    pytest.param({"causal": True, "window_size": (0, 0)}, id="itself alone"),
    pytest.param({"window_size": (1, 1)}, id="window on both sides"),
    pytest.param({"window_size": (2, 0)}, id="window on the left"),
    pytest.param({"causal": True, "softcap": 1.5, "softmax_scale": 0.7}, id="softcap"),
    pytest.param({"causal": True, "s_aux": True}, id="sinks"),
]


def attended(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, s_aux=None
):
    """Return attention of one sequence as flash-attn defines it, for its last tokens."""
    n_q, n_k = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (softmax_scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]
    key = torch.arange(n_k, device=q.device)
    left, right = (n_q + n_k if one in (None, -1) else one for one in window_size)
    seen = (key >= at - left) & (key <= at + (0 if causal else right))
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(-1, n_q, 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :n_k]
    return torch.einsum("hqk,khd->qhd", weights, v)


def rows(queries, keys, device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 16)
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [one.to(device, dtype).requires_grad_() for one in drawn]


def offsets(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def looped(q, k, v, queries, keys, **options):
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([attended(*part, **options) for part in parts])


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("same", [True, False], ids=["one tensor", "two tensors"])
def test_a_packed_row(options, same, device):
    lengths = [5, 1, 0, 7]
    q, k, v = rows(lengths, lengths, device)
    if options.get("s_aux"):
        options = options | {"s_aux": torch.randn(4, device=device, dtype=torch.float64)}
    starts = offsets(lengths, device)
    other = starts if same else starts.clone()
    out = flash_attn_varlen_func(q, k, v, starts, other, 7, 7, **options)
    expected = looped(q, k, v, lengths, lengths, **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    given = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for one, two in zip(
        given, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("options", CASES)
def test_a_batch(options, device):
    q, k, v = (x.detach().unflatten(0, (3, 4)) for x in rows([12], [12], device))
    if options.get("s_aux"):
        options = options | {"s_aux": torch.randn(4, device=device, dtype=torch.float64)}
    out = flash_attn_func(q, k, v, **options)
    expected = torch.stack([attended(*one, **options) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("options", CASES[:9])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1, 1, 1], [5, 1, 9]), ([3, 0, 2], [4, 2, 2]), ([5, 2, 6], [2, 0, 6])],
    ids=["one token each", "some", "more queries than keys"],
)
def test_queries_and_keys_of_different_number(options, queries, keys, device):
    q, k, v = rows(queries, keys, device)
    out = flash_attn_varlen_func(
        q, k, v, offsets(queries, device), offsets(keys, device), max(queries), max(keys), **options
    )
    torch.testing.assert_close(out, looped(q, k, v, queries, keys, **options))
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()


def test_a_batch_that_is_decoded(device):
    q, k, v = (x.detach().unflatten(0, (3, -1)) for x in rows([3], [12], device))
    out = flash_attn_func(q, k, v, causal=True)
    expected = [attended(*one, causal=True) for one in zip(q, k, v, strict=True)]
    torch.testing.assert_close(out, torch.stack(expected))


def test_layers_share_one_layout(device):
    lengths = [4, 3]
    q, k, v = rows(lengths, lengths, device, torch.float32)
    starts = offsets(lengths, device)
    cuseq.cache.clear()
    flash_attn_varlen_func(q, k, v, starts, starts, 4, 4, causal=True)
    before = cuseq.cache.info()["packed_offsets"]
    flash_attn_varlen_func(q, k, v, starts, starts, 4, 4, causal=True)
    after = cuseq.cache.info()["packed_offsets"]
    assert after["entries"] == before["entries"] == 1
    starts.copy_(offsets([2, 5], device))
    out = flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True)
    torch.testing.assert_close(out, looped(q, k, v, [2, 5], [2, 5], causal=True))


def test_compiled_code(device):
    def attention(q, k, v, starts):
        return flash_attn_varlen_func(q, k, v, starts, starts, causal=True)

    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    for lengths in ([4, 3], [2, 5]):
        q, k, v = rows(lengths, lengths, device, torch.float32)
        out = compiled(q, k, v, offsets(lengths, device))
        torch.testing.assert_close(out, looped(q, k, v, lengths, lengths, causal=True))


def test_a_batch_in_compiled_code(device):
    q, k, v = (x.detach().unflatten(0, (3, 4)) for x in rows([12], [12], device, torch.float32))
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=False)
    out = compiled(q, k, v, causal=True, window_size=(1, 0))
    torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True, window_size=(1, 0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0, which cuseq's attention has none of, got 0.1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes must be None"),
        ({"block_table": torch.zeros(1)}, "block_table must be None"),
        ({"return_attn_probs": True}, "return_attn_probs must be False"),
        ({"deterministic": True}, "deterministic must be False, got True"),
        (
            {"window_size": (2, 1)},
            "window_size must be as wide on both sides without causal, or 0 on",
        ),
        (
            {"window_size": (2, -1)},
            "window_size must be as wide on both sides without causal, or 0 on",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(options, message):
    q, k, v = rows([3], [3], "cpu", torch.float32)
    starts = offsets([3], "cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, **options)


def test_compiled_code_needs_as_many_keys_as_queries():
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="eager")
    q, k, v = rows([2, 3], [3, 2], "cpu", torch.float32)
    with pytest.raises(RuntimeError, match="cu_seqlens_k must be equal to cu_seqlens_q"):
        compiled(q, k, v, offsets([2, 3], "cpu"), offsets([3, 2], "cpu"), 3, 3)
    starts = offsets([2, 3], "cpu")
    torch.testing.assert_close(
        compiled(q, k, v, starts, starts.clone(), 3, 3),
        looped(q, k, v, [2, 3], [2, 3]),
    )


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((3, 4), (3, 4), "k and v must have the batch size of q"),
        ((1, 4), (1, 4), "k and v must have the batch size of q"),
        ((2, 3), (2, 4), "k and v must have the batch size of q and one length"),
    ],
)
def test_batches_that_do_not_fit_are_refused(k, v, message):
    k, v = torch.randn(*k, 2, 8), torch.randn(*v, 2, 8)
    with pytest.raises(ValueError, match=message):
        flash_attn_func(torch.randn(2, 4, 2, 8), k, v)


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_decoding_refuses_what_sdpa_has_not(name):
    q, k, v = rows([1], [3], "cpu", torch.float32)
    options = {name: 1.0 if name == "softcap" else torch.ones(4)}
    with pytest.raises(ValueError, match="must be unset where queries and keys"):
        flash_attn_varlen_func(q, k, v, offsets([1], "cpu"), offsets([3], "cpu"), 1, 3, **options)


def test_different_numbers_of_sequences_are_refused():
    q, k, v = rows([2], [2], "cpu", torch.float32)
    with pytest.raises(ValueError, match="must have equally many sequences, got 1 and 2"):
        flash_attn_varlen_func(q, k, v, offsets([2], "cpu"), offsets([1, 1], "cpu"), 2, 2)


def test_deterministic_algorithms_may_be_asked_for():
    q, k, v = rows([3], [3], "cpu", torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        starts = offsets([3], "cpu")
        out = flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out, looped(q, k, v, [3], [3]))
