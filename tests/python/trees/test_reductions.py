"""Test reductions over sequences, and log-probabilities of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuseq
from cuseq import ops

KINDS = {
    "sum": ops.segment_sum,
    "mean": ops.segment_mean,
    "max": ops.segment_max,
    "last": ops.segment_last,
}
EMPTY = {"sum": 0.0, "mean": 0.0, "max": -torch.inf, "last": 0.0}


def by_loop(values: torch.Tensor, packed: cuseq.PackedLayout, kind: str) -> torch.Tensor:
    """Reduce each sequence with PyTorch."""
    results = []
    starts = packed.cu_seqlens_padded.tolist()
    for start, length in zip(starts, packed.lengths.tolist(), strict=False):
        own = values[start : start + length]
        if length == 0:
            results.append(torch.full_like(values.sum(0), EMPTY[kind]))
        elif kind == "last":
            results.append(own[-1])
        elif kind == "max":
            results.append(own.max(0).values)
        else:
            results.append(getattr(own, kind)(0))
    return torch.stack(results) if results else values.new_zeros(0, *values.shape[1:])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 40]), max_size=6),
    st.integers(0, 3),
    st.sampled_from([(), (1,), (3,), (2, 40)]),
    st.sampled_from([1, 4]),
)
def test_values_and_gradients(kind, lengths, tail, shape, multiple):
    total = sum(-(-n // multiple) * multiple for n in lengths) + multiple * tail
    packed = cuseq.PackedLayout.from_lengths(lengths, total, segment_multiple=multiple)
    values = torch.randn(total, *shape, dtype=torch.float64, requires_grad=True)
    found, expected = KINDS[kind](values, packed), by_loop(values, packed, kind)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found).where(found.isfinite(), 0)
    (grad,) = torch.autograd.grad((found.nan_to_num(neginf=0) * weights).sum(), values)
    (wanted,) = torch.autograd.grad(
        (expected.nan_to_num(neginf=0) * weights).sum() + 0 * values.sum(), values
    )
    torch.testing.assert_close(grad, wanted)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_wide_and_deterministic(kind, dtype, device):
    packed = cuseq.PackedLayout.from_lengths([3000, 0, 1, 70], 3080, device=device)
    values = torch.randn(3080, 33, device=device).to(dtype).requires_grad_()
    found = KINDS[kind](values, packed)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_loop(values.float(), packed, kind), atol=1e-4, rtol=1e-5)
    assert torch.equal(found, KINDS[kind](values, packed))
    (grad,) = torch.autograd.grad(found.nan_to_num(neginf=0).sum(), values)
    assert grad.dtype == dtype and not grad[3071:].any()


def test_the_first_maximum_has_the_gradient(device):
    packed = cuseq.PackedLayout.from_lengths([4, 3], device=device)
    values = torch.tensor([1.0, 5.0, 5.0, 2.0, 1.0, torch.nan, 3.0], device=device).requires_grad_()
    found = ops.segment_max(values, packed)
    assert found[0] == 5 and found[1].isnan()
    (grad,) = torch.autograd.grad(found[0], values)
    assert grad.tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_wrong_values_are_named():
    packed = cuseq.PackedLayout.from_lengths([2, 3])
    with pytest.raises(ValueError, match="total_tokens = 5 rows"):
        ops.segment_sum(torch.ones(4), packed)
    with pytest.raises(TypeError, match="values must be"):
        ops.segment_sum(torch.ones(5, dtype=torch.int64), packed)
    with pytest.raises(TypeError, match="values must be a tensor"):
        ops.segment_sum([1.0], packed)


# ------------------------------------------------------------------------ token_logprobs


def plain(hidden, weight, targets, bias=None, temperature=1.0, scale=1.0, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return of_logits_alone(changed(logits, scale, softcap) / temperature, targets)


def changed(logits, scale=1.0, softcap=None):
    """Scale and cap logits as models do."""
    logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def of_logits_alone(logits, targets):
    logprobs = logits.log_softmax(1)
    kept = targets != -100
    own = logprobs.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1) * kept
    return own, -(logprobs.exp() * logprobs).sum(1) * kept


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_and_entropies(chunk_size, with_bias, device):
    torch.manual_seed(0)
    like = dict(dtype=torch.float64, device=device)
    hidden = torch.randn(7, 5, **like).requires_grad_()
    weight = torch.randn(11, 5, **like).requires_grad_()
    bias = torch.randn(11, **like).requires_grad_() if with_bias else None
    targets = torch.tensor([3, 0, -100, 10, 3, 3, -100], device=device)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    for options in (
        dict(),
        dict(temperature=0.7),
        dict(scale=0.0625),  # Cohere
        dict(scale=1 / 8, temperature=0.7),  # Granite
        dict(softcap=3.0),  # Gemma
        dict(scale=2.0, softcap=1.5, temperature=0.7),
    ):
        found = cuseq.token_logprobs(
            hidden, weight, targets, bias=bias, chunk_size=chunk_size, entropy=True, **options
        )
        expected = plain(hidden, weight, targets, bias, **options)
        weights = [torch.randn_like(one) for one in expected]
        for used in ((0,), (1,), (0, 1)):
            grads = torch.autograd.grad(
                sum((found[i] * weights[i]).sum() for i in used), inputs, retain_graph=True
            )
            wanted = torch.autograd.grad(
                sum((expected[i] * weights[i]).sum() for i in used), inputs, retain_graph=True
            )
            for grad, one in zip(grads, wanted, strict=True):
                torch.testing.assert_close(grad, one)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        only = cuseq.token_logprobs(hidden, weight, targets, bias=bias, **options)
        torch.testing.assert_close(only, expected[0])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 2, 9, 1000, 4099, 33_001])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 3.0}], ids=["plain", "capped"])
def test_rows_of_logits_of_any_size(vocabulary, dtype, options, device):
    """Rows of odd sizes begin between the vectors that the kernel loads."""
    hidden = torch.randn(5, 16, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, 16, device=device, dtype=dtype).requires_grad_()
    targets = torch.tensor([0, vocabulary - 1, vocabulary // 2, -100, vocabulary // 3])
    targets = targets.to(device)
    logits = torch.nn.functional.linear(hidden, weight).detach().double().requires_grad_()
    expected = of_logits_alone(changed(logits, **options), targets)
    found = cuseq.token_logprobs(hidden, weight, targets, entropy=True, chunk_size=3, **options)
    factors = [torch.randn(5, device=device, dtype=torch.float64) for _ in range(2)]
    eps = torch.finfo(dtype).eps
    narrow = torch.finfo(found[0].dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=300 * narrow, atol=300 * narrow)
    loss = sum((f * one).sum() for f, one in zip(factors, found, strict=True))
    grads = torch.autograd.grad(loss, [hidden, weight])
    (of_logits,) = torch.autograd.grad(
        sum((f * one).sum() for f, one in zip(factors, expected, strict=True)), logits
    )
    wanted = of_logits @ weight.double(), of_logits.T @ hidden.double()
    for grad, one in zip(grads, wanted, strict=True):
        # Of one logit the gradient is 0, found as a difference of probabilities near 1.
        scale = one.abs().max().item() + 0.5
        bound = (20 * eps + vocabulary * narrow) * scale
        torch.testing.assert_close(grad.double(), one, rtol=0, atol=bound)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_far_beyond_their_bound(dtype, device):
    """They stay finite, have no gradient, and differ in nothing."""
    weight = torch.tensor([[1.0], [2.0], [-1.0]], device=device, dtype=dtype)
    hidden = torch.full((1, 1), 1e4, device=device, dtype=dtype, requires_grad=True)
    target = torch.tensor([1], device=device)
    (found, entropy) = cuseq.token_logprobs(hidden, weight, target, softcap=30.0, entropy=True)
    torch.testing.assert_close(found.item(), -math.log(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.item(), math.log(2), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(found + entropy, hidden)
    assert grad.item() == 0


def test_logits_that_are_hidden(device):
    """A logit of -inf adds nothing to the entropy or to a gradient."""
    hidden = torch.randn(4, 6, device=device, dtype=torch.float64).requires_grad_()
    weight = torch.randn(40, 6, device=device, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([3, 0, 29, 7], device=device)
    bias = torch.zeros(40, device=device, dtype=torch.float64)
    bias[30:] = -math.inf
    found = cuseq.token_logprobs(hidden, weight, targets, bias=bias, entropy=True)
    expected = cuseq.token_logprobs(hidden, weight[:30], targets, entropy=True)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(sum(found).sum(), [hidden, weight])
    wanted = torch.autograd.grad(sum(expected).sum(), [hidden, weight])
    torch.testing.assert_close(grads, wanted)
    nothing = torch.full_like(bias, -math.inf)
    for own_bias in (nothing, torch.full_like(bias, math.nan)):
        assert cuseq.token_logprobs(hidden, weight, targets, bias=own_bias).isnan().all()


@pytest.mark.parametrize("target", [-1, -99, 9, 1 << 40])
def test_targets_outside_the_vocabulary_give_nan_on_a_gpu(target, cuda):
    hidden, weight = torch.randn(3, 4, device=cuda), torch.randn(9, 4, device=cuda)
    targets = torch.tensor([1, target, -100], device=cuda)
    found = cuseq.token_logprobs(hidden.requires_grad_(), weight, targets)
    assert found.isnan().tolist() == [False, True, False]
    (grad,) = torch.autograd.grad(found[:2].sum(), hidden)
    assert grad.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_any_strides(tokens, chunk_size, device):
    like = dict(dtype=torch.float64, device=device)
    hidden = torch.randn(5, tokens, **like).t().requires_grad_()
    weight = torch.randn(5, 11, **like).t().requires_grad_()
    bias = torch.randn(22, **like)[::2].requires_grad_()
    targets = torch.randint(11, (2 * tokens,), device=device)[::2]
    options = dict(bias=bias, chunk_size=chunk_size, entropy=True)
    found = cuseq.token_logprobs(hidden, weight, targets, **options)
    expected = plain(hidden, weight, targets, bias)
    torch.testing.assert_close(found, expected)
    leaves = [hidden, weight, bias]
    factors = torch.randn(2 * tokens, **like)[::2]
    grads, wanted = (
        torch.autograd.grad(sum((factors * one).sum() for one in both), leaves)
        for both in (found, expected)
    )
    torch.testing.assert_close(grads, wanted)


def test_sums_over_chunks_are_wide(device):
    """In bfloat16 many chunks give the weight's gradient of one chunk."""
    torch.manual_seed(0)
    hidden = torch.randn(256, 16, device=device).bfloat16()
    weight = torch.randn(32, 16, device=device).bfloat16().requires_grad_()
    targets = torch.randint(32, (256,), device=device)
    grads = [
        torch.autograd.grad(
            cuseq.token_logprobs(hidden, weight, targets, chunk_size=size).sum(), weight
        )[0].float()
        for size in (2, 256)
    ]
    torch.testing.assert_close(grads[0], grads[1], atol=0.05 * grads[1].abs().max().item(), rtol=0)


def test_no_tokens():
    weight = torch.randn(3, 4, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    found = cuseq.token_logprobs(torch.empty(0, 4), weight, none)
    assert found.shape == (0,)
    (grad,) = torch.autograd.grad(found.sum(), weight)
    assert not grad.any()


def test_logits_are_never_all_in_memory():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numel = max(self.numel, result.numel())
            return result

    hidden, weight = torch.randn(64, 4), torch.randn(50, 4, requires_grad=True)
    with Largest() as largest:
        found = torch.ops.cuseq.token_logprobs(
            hidden, weight.detach(), torch.zeros(64, dtype=torch.int64), None, 1.0, 4, False
        )
    assert found[0].shape == (64,) and largest.numel <= 50 * 4


def test_compiled(device):
    def loss(hidden, weight, targets):
        logprobs, entropies = cuseq.token_logprobs(hidden, weight, targets, entropy=True)
        return (logprobs - 0.1 * entropies).sum()

    hidden = torch.randn(6, 4, device=device, requires_grad=True)
    weight = torch.randn(9, 4, device=device, requires_grad=True)
    targets = torch.randint(9, (6,), device=device)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = compiled(hidden, weight, targets), loss(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found, [hidden, weight])
    wanted = torch.autograd.grad(expected, [hidden, weight])
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "last"])
def test_one_graph_serves_all_numbers_of_sequences(kind, backend, device):
    """Nothing is compiled again, and the losses of GRPO and DPO need no size."""
    graphs = []
    inner = torch._dynamo.lookup_backend(backend)

    def counted(module, example):
        graphs.append(module)
        return inner(module, example)

    reduce = getattr(cuseq.ops, f"segment_{kind}")

    def loss(values, packed):
        found = reduce(values, packed)
        return found.tanh(), found.mean() + found.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=counted)
    for lengths in ([3, 4], [1, 2, 2, 1, 1], [7], [2] * 6, [1] * 12, [12], [5, 0, 3]):
        if kind == "max" and 0 in lengths:
            continue  # -inf
        packed = cuseq.PackedLayout.from_lengths(lengths, 12).to(device)
        values = torch.randn(12, 3, device=device, requires_grad=True)
        found, expected = compiled(values, packed), loss(values, packed)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        (grad,) = torch.autograd.grad(found[1] + found[0].sum(), values)
        (wanted,) = torch.autograd.grad(expected[1] + expected[0].sum(), values)
        torch.testing.assert_close(grad, wanted)
    assert len(graphs) == 1
    padded = [
        cuseq.PackedLayout.from_lengths(lengths, 12, segment_multiple=4).to(device)
        for lengths in ([3, 1], [3, 4, 2], [12])
    ]
    for packed in padded:
        values = torch.randn(12, 3, device=device, requires_grad=True)
        found, expected = compiled(values, packed)[1], loss(values, packed)[1]
        torch.testing.assert_close(found, expected)
        (grad,) = torch.autograd.grad(found, values)
        (wanted,) = torch.autograd.grad(expected, values)
        torch.testing.assert_close(grad, wanted)
    assert len(graphs) == 2


def test_reduce_overhead_leaves_reductions_out_of_its_graphs():
    """They read host_meta, which a replay would not."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.cuseq.segment_reduce.default.tags


def test_a_capture_of_compiled_code_is_refused(cuda):
    """Its graph would keep the number of sequences of the capture."""
    packed = cuseq.PackedLayout.from_lengths([3, 4]).to(cuda)
    values = torch.ones(7, device=cuda)
    compiled = torch.compile(cuseq.ops.segment_sum, fullgraph=True, backend="eager")
    assert compiled(values, packed).tolist() == [3, 4]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="constant of the CUDA graph"), torch.cuda.graph(graph):
        compiled(values, packed)


def test_pairs_are_compiled_once():
    """DPO views the sums as pairs."""
    graphs = []

    def counted(module, example):
        graphs.append(module)
        return module

    def loss(values, packed):
        chosen, rejected = cuseq.ops.segment_sum(values, packed).view(-1, 2).unbind(1)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    compiled = torch.compile(loss, fullgraph=True, backend=counted)
    for lengths in ([3, 4], [1, 2, 2, 1], [2] * 6):
        packed = cuseq.PackedLayout.from_lengths(lengths, 12)
        values = torch.randn(12)
        torch.testing.assert_close(compiled(values, packed), loss(values, packed))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(3, 5)}, "weight must have shape"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, "targets must be int64"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must have one entry"),
        ({"targets": torch.tensor([0, 3])}, r"targets must lie in \[0, 3\)"),
        ({"temperature": 0.0}, r"temperature must be from 2\^-60 to 2\^60, got 0"),
        ({"temperature": 1e-30}, r"temperature must be from 2\^-60 to 2\^60, got 1e-30"),
        ({"scale": -1}, r"scale must be from 2\^-60 to 2\^60, got -1"),
        ({"scale": math.nan}, r"scale must be from 2\^-60 to 2\^60, got nan"),
        ({"scale": None}, "scale must be a number, got None"),
        ({"softcap": 0.0}, r"softcap must be from 2\^-60 to 2\^60, got 0"),
        ({"softcap": math.inf}, r"softcap must be from 2\^-60 to 2\^60, got inf"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"bias": torch.ones(4)}, "bias must be"),
        ({"hidden": torch.ones(2, 4, dtype=torch.int64)}, "hidden must be"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {
        "hidden": torch.ones(2, 4),
        "weight": torch.ones(3, 4),
        "targets": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        cuseq.token_logprobs(**(given | change))
