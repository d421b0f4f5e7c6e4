"""Test causal_conv1d: values, gradients, states, and every way that PyTorch runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from test_no_sync import syncs_are_errors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import cuseq

ops = torch.ops.cuseq

WIDTHS = [2, 3, 4]
SILU = pytest.mark.parametrize("silu", [False, True], ids=["linear", "silu"])
LOW = [torch.float32, torch.bfloat16, torch.float16]

# Lengths, tail, and the multiple of the segments.
PACKS = {
    "one": ([7], 0, 1),
    "short": ([1, 2, 3, 1, 1, 2], 0, 1),
    "around a chunk": ([63, 64, 65, 1, 129], 3, 1),
    "empty": ([0, 3, 0, 0, 5, 0], 0, 1),
    "tail": ([2, 3], 6, 1),
    "no sequence": ([], 5, 1),
    "pads": ([5, 1, 4, 0, 7], 2, 8),  # a row of 40 tokens, which vectors along tokens fit
    "long": ([300, 2, 211], 40, 1),
}


def make_layout(name: str, device: torch.device, **options: Any) -> cuseq.PackedLayout:
    lengths, tail, multiple = PACKS[name]
    used = sum(-(-length // multiple) * multiple for length in lengths)
    total = -(-(used + tail) // multiple) * multiple
    return cuseq.PackedLayout.from_lengths(
        lengths, total, segment_multiple=multiple, device=device, **options
    )


def spans_of(packed: cuseq.PackedLayout) -> list[tuple[int, int]]:
    begins = packed.cu_seqlens_padded.tolist()[:-1]
    lengths = packed.lengths.tolist()
    return [(b, b + n) for b, n in zip(begins, lengths, strict=True)]


def real_rows(packed: cuseq.PackedLayout) -> Tensor:
    return ~packed.moe_padding_mask


def in_order(rows: Tensor, order: str) -> Tensor:
    """Return the same numbers with another order in memory."""
    if order == "channels":
        return rows.contiguous()
    if order == "tokens":
        return rows.t().contiguous().t()
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 16), float("nan"))
    wide[:, 8:-8] = rows
    return wide[:, 8:-8]  # "slice": as the convolved part of a fused projection


ORDERS = pytest.mark.parametrize("order", ["channels", "tokens", "slice"])


def inputs(
    packed: cuseq.PackedLayout,
    channels: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    order: str = "channels",
    weight_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return x, weight, bias and initial states that require gradients."""
    device = packed.device

    def numbers(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device, of)

    weight_dtype = weight_dtype or dtype
    made = [
        in_order(numbers(packed.total_tokens, channels), order),
        numbers(channels, width, of=weight_dtype),
        numbers(channels, of=weight_dtype),
        numbers(packed.num_sequences, channels, width - 1, of=weight_dtype),
    ]
    return [tensor.requires_grad_() for tensor in made]


def close(found: Tensor, expected: Tensor, terms: int = 1) -> None:
    """Compare up to float64's rounding of sums of `terms` numbers."""
    assert found.shape == expected.shape and found.dtype == torch.float64
    size = max(1.0, float(expected.detach().norm()) if expected.numel() else 1.0)
    error = float((found - expected).detach().norm()) if expected.numel() else 0.0
    assert error <= 64 * terms**0.5 * torch.finfo(torch.float64).eps * size


def gradients(outs: Sequence[Tensor], wanted: Sequence[Tensor], grads: Any) -> list[Tensor]:
    """Return the gradients; zeros where nothing depends on a tensor."""
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
    found = [None] * len(wanted)
    if pairs:
        outs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return [
        torch.zeros_like(tensor) if grad is None else grad
        for tensor, grad in zip(wanted, found, strict=True)
    ]


# ---------------------------------------------------------------------------------- values


# Rows with one token or one channel, as slices leave them: with any stride in that dimension.
ONE_OF = {
    "a token": lambda rows: rows[:1].expand(1, 8),
    "a token of a wide row": lambda rows: rows.t()[:1],
    "a token by columns": lambda rows: rows[:, :1].t(),
    "a channel": lambda rows: rows[:, 2:3],
    "a channel of every other token": lambda rows: rows[::2, :1],
}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slice_of", ONE_OF)
def test_one_token_and_one_channel_take_any_strides(slice_of, dtype, device):
    rows = torch.randn(8, 8, dtype=torch.float64).to(device, dtype)
    x = ONE_OF[slice_of](rows).detach().requires_grad_()
    packed = cuseq.PackedLayout.from_lengths([x.shape[0]], device=device)
    weight = torch.randn(x.shape[1], 4, device=device, dtype=dtype, requires_grad=True)
    plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    for grad in (torch.randn(x.shape, device=device).to(dtype), rows[:1, :1].expand(x.shape)):
        found, expected = (
            torch.autograd.grad(cuseq.causal_conv1d(of, weight, None, packed), (of, weight), grad)
            for of in (x, plain)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.kernels
@SILU
@ORDERS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PACKS)
def test_values_and_gradients(name, width, order, silu, device):
    packed = make_layout(name, device)
    for channels in (1, 9, 72):
        x, weight, bias, _ = inputs(packed, channels, width, order=order)
        activation = "silu" if silu else None
        out = cuseq.causal_conv1d(x, weight, bias, packed, activation=activation)
        expected, _ = reference.causal_conv1d(x, weight, bias, spans_of(packed), silu)
        close(out, expected)
        grad = torch.randn_like(out)
        wanted = (x, weight, bias)
        found = torch.autograd.grad(out, wanted, grad)
        for one, other in zip(found, gradients([expected], wanted, [grad]), strict=True):
            close(one, other, packed.total_tokens)


@pytest.mark.kernels
@SILU
@ORDERS
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_no_worse_than_conv1d(dtype, order, silu, device):
    packed = make_layout("around a chunk", device)
    for channels, width, weight_dtype in (
        (64, 4, dtype),
        (24, 3, torch.float32),
        (36, 4, torch.bfloat16),
        (13, 2, dtype),
    ):
        tensors = inputs(packed, channels, width, dtype, order, weight_dtype)[:3]
        grad = torch.randn(packed.total_tokens, channels, device=device).to(dtype)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        exact, _ = reference.causal_conv1d(*wide, spans_of(packed), silu)
        exact_grads = torch.autograd.grad(exact, wide, grad.double())

        def of_torch(x, weight, bias, packed=packed, dtype=dtype, silu=silu):
            rows = []
            for begin, end in spans_of(packed):
                row = torch.nn.functional.conv1d(
                    x[begin:end].t(),
                    weight.to(dtype).unsqueeze(1),
                    bias.to(dtype),
                    padding=weight.shape[1] - 1,
                    groups=weight.shape[0],
                )[:, : end - begin]
                rows.append((torch.nn.functional.silu(row) if silu else row).t())
            rest = packed.total_tokens - sum(len(row) for row in rows)
            return torch.cat([*rows, x.new_zeros(rest, x.shape[1])])

        plain = of_torch(*tensors)
        plain_grads = torch.autograd.grad(plain, tensors, grad)
        activation = "silu" if silu else None
        out = cuseq.causal_conv1d(*tensors, packed, activation=activation)
        grads = torch.autograd.grad(out, tensors, grad)
        for found, theirs, right in zip(
            [out, *grads], [plain, *plain_grads], [exact, *exact_grads], strict=True
        ):
            assert found.dtype == theirs.dtype or weight_dtype != dtype
            error = (found.double() - right).norm()
            allowed = (theirs.double() - right).norm()
            rounding = torch.finfo(found.dtype).eps * right.norm()
            assert error <= 1.25 * allowed + rounding


def test_without_a_layout_the_row_is_one_sequence(device):
    packed = cuseq.PackedLayout.from_lengths([40], device=device)
    x, weight, bias, _ = inputs(packed, 16, 4)
    alone = cuseq.causal_conv1d(x, weight, bias)
    assert torch.equal(alone, cuseq.causal_conv1d(x, weight, bias, packed))
    assert torch.equal(
        cuseq.causal_conv1d(x, weight, bias, activation="swish"),
        cuseq.causal_conv1d(x, weight, bias, activation="silu"),
    )


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_the_output_has_the_order_of_x(order, device):
    packed = make_layout("tail", device)
    x, weight, bias, _ = inputs(packed, 8, 4, order=order)
    out = cuseq.causal_conv1d(x, weight, bias, packed)
    assert out.stride() == x.stride()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.stride() == x.stride()


def test_weights_of_any_strides(device):
    packed = make_layout("short", device)
    x, weight, bias, _ = inputs(packed, 24, 4)
    expected = cuseq.causal_conv1d(x, weight, bias, packed)
    turned = weight.t().contiguous().t()
    spread = torch.stack([bias, bias], 1)[:, 0]
    assert torch.equal(cuseq.causal_conv1d(x, turned, spread, packed), expected)
    part = cuseq.causal_conv1d(x[:, 8:16], weight[8:16], bias[8:16], packed)
    assert torch.equal(part, expected[:, 8:16])


@pytest.mark.parametrize("shape", [(0, 8), (6, 0)], ids=str)
def test_nothing_to_do(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[1], 4, device=device, requires_grad=True)
    out, states = cuseq.causal_conv1d(x, weight, return_final_state=True)
    assert out.shape == shape and states.shape == (1, shape[1], 3)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert all(not grad.any() for grad in grads)


# ------------------------------------------------------------------------ boundaries


@pytest.mark.parametrize("order", ["channels", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["pads", "tail"])
def test_padding_and_tail_reach_nothing(name, width, dtype, order, device):
    packed = make_layout(name, device)
    real = real_rows(packed)
    clean, weight, bias, _ = inputs(packed, 16, width, dtype, order)
    dirty = clean.detach().clone()
    dirty[~real] = float("nan")
    dirty = in_order(dirty, order).requires_grad_()
    grad = torch.randn_like(clean)
    bad_grad = grad.clone()
    bad_grad[~real] = float("inf")
    results = []
    for x, incoming in ((clean, grad), (dirty, bad_grad)):
        out = cuseq.causal_conv1d(x, weight, bias, packed, activation="silu")
        results.append([out, *torch.autograd.grad(out, (x, weight, bias), incoming)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    out, grad_x = results[1][:2]
    assert not out[~real].any() and not grad_x[~real].any()


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_documents_do_not_hear_each_other(order, device):
    packed = make_layout("around a chunk", device)
    x, weight, bias, _ = inputs(packed, 8, 4, order=order)
    out = cuseq.causal_conv1d(x, weight, bias, packed, activation="silu")
    for begin, end in spans_of(packed):
        (grad,) = torch.autograd.grad(out[begin:end].sum(), x, retain_graph=True)
        reached = grad.abs().sum(1) > 0
        assert reached[begin:end].all()
        assert not reached[:begin].any() and not reached[end:].any()


def test_lengths_are_read_when_the_op_runs(device):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    x, weight = torch.ones(5, 8, device=device), torch.ones(8, 2, device=device)
    first = ops.causal_conv1d(x, weight, None, offsets)[0]
    offsets[1] = 3
    second = ops.causal_conv1d(x, weight, None, offsets)[0]
    assert first[:, 0].tolist() == [1, 2, 1, 2, 2]
    assert second[:, 0].tolist() == [1, 2, 2, 1, 2]


# ------------------------------------------------------------------------ states


@pytest.mark.kernels
@SILU
@pytest.mark.parametrize("order", ["channels", "tokens"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PACKS)
def test_states(name, width, order, silu, device):
    packed = make_layout(name, device)
    tensors = inputs(packed, 10, width, order=order)
    x, weight, bias, states = tensors
    out, final = cuseq.causal_conv1d(
        x,
        weight,
        bias,
        packed,
        activation="silu" if silu else None,
        initial_state=states,
        return_final_state=True,
    )
    expected, right = reference.causal_conv1d(x, weight, bias, spans_of(packed), silu, states)
    close(out, expected)
    close(final, right)
    grads = torch.randn_like(out), torch.randn_like(final)
    found = torch.autograd.grad((out, final), tensors, grads)
    theirs = gradients([expected, right], tensors, grads)
    for one, other in zip(found, theirs, strict=True):
        close(one, other, packed.total_tokens)


def test_only_the_final_state_has_a_gradient(device):
    packed = make_layout("short", device)
    tensors = inputs(packed, 8, 4)
    x, weight, bias, states = tensors
    _, final = cuseq.causal_conv1d(
        x, weight, bias, packed, initial_state=states, return_final_state=True
    )
    _, right = reference.causal_conv1d(x, weight, bias, spans_of(packed), states=states)
    grad = torch.randn_like(final)
    found = torch.autograd.grad(final, tensors, grad)
    theirs = torch.autograd.grad(right, (x, states), grad)
    close(found[0], theirs[0])
    close(found[3], theirs[1])
    assert not found[1].any() and not found[2].any()


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_a_cut_sequence_continues_from_its_state(order, device):
    whole = cuseq.PackedLayout.from_lengths([9, 70], device=device)
    x, weight, bias, _ = inputs(whole, 16, 4, order=order)
    expected, last = cuseq.causal_conv1d(x, weight, bias, whole, return_final_state=True)
    first = cuseq.PackedLayout.from_lengths([1, 40], device=device)
    second = cuseq.PackedLayout.from_lengths([8, 30], device=device)
    front = in_order(torch.cat([x[:1], x[9:49]]), order)
    back = in_order(torch.cat([x[1:9], x[49:]]), order)
    out, states = cuseq.causal_conv1d(front, weight, bias, first, return_final_state=True)
    more, states = cuseq.causal_conv1d(
        back, weight, bias, second, initial_state=states, return_final_state=True
    )
    close(torch.cat([out[:1], more[:8], out[1:], more[8:]]), expected)
    close(states, last)


def test_states_of_another_dtype(device):
    packed = make_layout("pads", device)
    x, weight, bias, _ = inputs(packed, 16, 4, torch.bfloat16)
    states = torch.randn(packed.num_sequences, 16, 3, device=device, requires_grad=True)
    out, final = cuseq.causal_conv1d(
        x, weight, bias, packed, initial_state=states, return_final_state=True
    )
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    (grad,) = torch.autograd.grad(out.float().sum(), states)
    assert grad.dtype == torch.float32
    _, right = reference.causal_conv1d(
        x.double(), weight.double(), bias.double(), spans_of(packed), states=states.double()
    )
    assert torch.equal(final.double(), right)
    _, own = cuseq.causal_conv1d(x, weight, bias, packed, return_final_state=True)
    assert own.dtype == torch.bfloat16


def test_the_tail_has_no_state(device):
    packed = cuseq.PackedLayout.from_lengths([2, 3], 20, max_seqs=9, device=device)
    x, weight, bias, _ = inputs(packed, 8, 4)
    x = x.detach()
    states = torch.randn(2, 8, 3, device=device, dtype=torch.float64)
    results = []
    for value in (0.0, float("nan")):
        x[5:] = value
        results.append(
            cuseq.causal_conv1d(
                x, weight, bias, packed, initial_state=states, return_final_state=True
            )
        )
    assert results[0][1].shape == (2, 8, 3)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------- causal-conv1d's function


def batch(device, shape=(3, 12, 50), order="seqlen", dtype=torch.float64) -> list[Tensor]:
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    if order == "channels":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weight = torch.randn(shape[1], 4, dtype=torch.float64).to(device, dtype)
    bias = torch.randn(shape[1], dtype=torch.float64).to(device, dtype)
    return [t.requires_grad_() for t in (x, weight, bias)]


@pytest.mark.kernels
@pytest.mark.parametrize("order", ["seqlen", "channels"])
def test_a_batch(order, device):
    x, weight, bias = batch(device, order=order)
    states = torch.randn(3, 12, 3, dtype=torch.float64, device=device)
    kept = torch.empty_like(states)
    out, final = cuseq.ops.causal_conv1d_fn(
        x, weight, bias, None, states, True, kept, activation="silu"
    )
    assert final is kept
    assert out.stride() == x.stride()
    expected = []
    for row, state in zip(x, states, strict=True):
        one, last = reference.causal_conv1d(
            row.t(), weight, bias, [(0, 50)], True, state.unsqueeze(0)
        )
        expected.append(one.t())
        close(final[len(expected) - 1], last[0])
    close(out, torch.stack(expected))
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight, bias), grad)
    theirs = torch.autograd.grad(torch.stack(expected), (x, weight, bias), grad)
    for one, other in zip(found, theirs, strict=True):
        close(one, other, 150)


def by_index(x: Tensor, weight: Tensor, seq_idx: list[list[int]]) -> Tensor:
    """Convolve a batch by its definition: a lag counts if it leads to the same index."""
    rows = []
    for row, idx in zip(x, seq_idx, strict=True):
        columns = []
        for token, own in enumerate(idx):
            column = torch.zeros_like(row[:, 0])
            for lag in range(weight.shape[1]):
                if own >= 0 and lag <= token and idx[token - lag] == own:
                    column = column + weight[:, weight.shape[1] - 1 - lag] * row[:, token - lag]
            columns.append(column)
        rows.append(torch.stack(columns, 1))
    return torch.stack(rows)


@pytest.mark.kernels
@pytest.mark.parametrize("order", ["seqlen", "channels"])
@pytest.mark.parametrize("kind", ["runs", "any"])
def test_seq_idx(kind, order, device):
    x, weight, _ = batch(device, order=order)
    if kind == "any":
        seq_idx = torch.randint(-1, 2, (3, 50)).tolist()
    else:
        seq_idx = [[0] * 20 + [1] * 30, [-1] * 5 + [0] * 44 + [1], [7] + [-1] * 49]
    on_device = torch.tensor(seq_idx, dtype=torch.int32, device=device)
    out = cuseq.ops.causal_conv1d_fn(x, weight, seq_idx=on_device)
    expected = by_index(x, weight, seq_idx)
    close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight), grad)
    theirs = torch.autograd.grad(expected, (x, weight), grad)
    for one, other in zip(found, theirs, strict=True):
        close(one, other, 150)


def test_a_layout_and_its_seq_idx_agree(device):
    packed = make_layout("pads", device)
    x, weight, bias, _ = inputs(packed, 16, 4)
    out = cuseq.causal_conv1d(x, weight, bias, packed)
    same = cuseq.ops.causal_conv1d_fn(x.t().unsqueeze(0), weight, bias, packed.seq_idx)
    assert torch.equal(same[0].t(), out)


# ------------------------------------------------------------------------ ways to run it


@SILU
def test_gradcheck(silu):
    packed = make_layout("pads", torch.device("cpu"))
    tensors = inputs(packed, 3, 4)
    activation = "silu" if silu else None

    def call(x, weight, bias, states):
        return cuseq.causal_conv1d(
            x,
            weight,
            bias,
            packed,
            activation=activation,
            initial_state=states,
            return_final_state=True,
        )

    assert gradcheck(call, tensors)


def test_frozen_weights_and_frozen_input(device):
    packed = make_layout("long", device)
    x, weight, bias, _ = inputs(packed, 16, 4)
    grad = torch.randn_like(x)
    whole = torch.autograd.grad(
        cuseq.causal_conv1d(x, weight, bias, packed, activation="silu"), (x, weight, bias), grad
    )
    frozen = cuseq.causal_conv1d(x, weight.detach(), bias.detach(), packed, activation="silu")
    assert torch.equal(torch.autograd.grad(frozen, x, grad)[0], whole[0])
    fixed = cuseq.causal_conv1d(x.detach(), weight, bias, packed, activation="silu")
    assert torch.equal(torch.autograd.grad(fixed, bias, grad)[0], whole[2])


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_gradients_of_any_strides(order, device):
    packed = make_layout("tail", device)
    x, weight, bias, _ = inputs(packed, 16, 4, order=order)
    out = cuseq.causal_conv1d(x, weight, bias, packed)
    grad = torch.randn(16, packed.total_tokens, device=device, dtype=torch.float64)
    one = torch.autograd.grad(out, (x, weight), grad.t(), retain_graph=True)
    other = torch.autograd.grad(out, (x, weight), grad.t().contiguous(), retain_graph=True)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    (ones,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], ones)


@pytest.mark.kernels
def test_results_are_deterministic(device):
    packed = cuseq.PackedLayout.from_lengths([1000, 3000], 4096, device=device)
    for order in ("channels", "tokens"):
        tensors = inputs(packed, 256, 4, torch.bfloat16, order)[:3]
        grad = torch.randn_like(tensors[0])

        def run(tensors=tensors, grad=grad):
            out = cuseq.causal_conv1d(*tensors, packed, activation="silu")
            return [out, *torch.autograd.grad(out, tensors, grad)]

        for one, other in zip(run(), run(), strict=True):
            assert torch.equal(one, other)


def test_autocast(device):
    packed = make_layout("tail", device)
    x, weight, bias, _ = inputs(packed, 16, 4, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        out = cuseq.causal_conv1d(x, weight, bias, packed)
    assert torch.equal(out, cuseq.causal_conv1d(x.bfloat16(), weight, bias, packed))
    grads = torch.autograd.grad(out.float().sum(), (x, weight))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_checkpointing(device):
    packed = make_layout("around a chunk", device)
    tensors = inputs(packed, 16, 4)[:3]

    def run(*tensors):
        return cuseq.causal_conv1d(*tensors, packed, activation="silu").sin()

    expected = torch.autograd.grad(run(*tensors).sum(), tensors)
    for reentrant in (False, True):
        out = checkpoint(run, *tensors, use_reentrant=reentrant)
        out.sum().backward()
        for tensor, grad in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.grad, grad)
            tensor.grad = None


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_one_graph_for_all_packs(order, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def run(x, weight, bias, packed):
        return cuseq.causal_conv1d(x * 2, weight, bias, packed, activation="silu") + 1

    for lengths in ([5, 3], [1, 7, 8], [12]):
        packed = cuseq.PackedLayout.from_lengths(lengths, 16, device=device)
        x, weight, bias, _ = inputs(packed, 8, 4, torch.float32, order)
        out = run(x, weight, bias, packed)
        expected = cuseq.causal_conv1d(x * 2, weight, bias, packed, activation="silu") + 1
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad(out.sum(), (x, weight, bias))
        for one, other in zip(
            grads, torch.autograd.grad(expected.sum(), (x, weight, bias)), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


def test_inductor(device):
    torch.compiler.reset()
    packed = make_layout("tail", device)
    x, weight, bias, states = inputs(packed, 8, 4, torch.float32)

    @torch.compile(fullgraph=True, dynamic=True)
    def run(x, weight, bias, states):
        rows = (x + 1).t().contiguous().t()
        out, final = cuseq.causal_conv1d(
            rows, weight, bias, packed, initial_state=states, return_final_state=True
        )
        return out.t().relu(), final

    tensors = (x, weight, bias, states)
    out, final = run(*tensors)
    expected, last = cuseq.causal_conv1d(
        x + 1, weight, bias, packed, initial_state=states, return_final_state=True
    )
    torch.testing.assert_close(out, expected.t().relu())
    torch.testing.assert_close(final, last)
    grads = torch.autograd.grad(out.sum() + final.sum(), tensors)
    theirs = torch.autograd.grad(expected.relu().sum() + last.sum(), tensors)
    for one, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_and_other_modes_are_refused(device):
    x, weight, bias = torch.randn(6, 4), torch.randn(4, 3), torch.randn(4)
    tensors = [t.to(device).requires_grad_() for t in (x, weight, bias)]
    out = cuseq.causal_conv1d(*tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(
            lambda x: cuseq.causal_conv1d(x, *tensors[1:]), (tensors[0],), (x.to(device),)
        )
    with pytest.raises(NotImplementedError, match="batching rule"):
        torch.func.vmap(lambda x: cuseq.causal_conv1d(x, *tensors[1:]))(
            torch.stack([x, x]).to(device)
        )


# ------------------------------------------------------------------------ CUDA


def test_nothing_waits(cuda):
    packed = make_layout("pads", cuda)
    tensors = inputs(packed, 16, 4, torch.bfloat16)[:3]
    with syncs_are_errors():
        out = cuseq.causal_conv1d(*tensors, packed, activation="silu")
        torch.autograd.grad(out, tensors, torch.ones_like(out))


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_a_captured_call_reads_new_lengths(order, cuda):
    packed = cuseq.PackedLayout.from_lengths([100, 156], 300, max_seqs=8, device=cuda)
    offsets = packed.cu_seqlens_static.clone()
    x, weight, bias, _ = inputs(packed, 64, 4, torch.bfloat16, order)
    grad = torch.randn_like(x)

    def run() -> Sequence[Tensor]:
        out = ops.causal_conv1d(x, weight, bias, offsets, None, None, None, True)[0]
        return [out, *torch.autograd.grad(out, (x, weight, bias), grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for lengths in ([100, 156], [1, 2, 3, 290], [0, 300]):
        other = cuseq.PackedLayout.from_lengths(lengths, 300, max_seqs=8, device=cuda)
        offsets.copy_(other.cu_seqlens_static)
        graph.replay()
        for one, right in zip(captured, run(), strict=True):
            assert torch.equal(one, right)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", ["channels", "tokens"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [6001, 6008])
def test_devices_agree(tokens, width, order, dtype, cuda):
    """Rows of many chunks, of vectors that fit and that do not, along tokens and channels."""
    packed = cuseq.PackedLayout.from_lengths([1500, 1, 2, 700, 3000, 63, 64, 65], tokens)
    for channels in (8, 100, 520, 2055):
        tensors = inputs(packed, channels, width, dtype, order)[:3]
        grad = torch.randn_like(tensors[0])
        results = []
        for device in (torch.device("cpu"), cuda):
            moved = [
                in_order(t.detach().to(device), order).requires_grad_()
                if t.dim() == 2 and t.shape[0] == packed.total_tokens
                else t.detach().to(device).requires_grad_()
                for t in tensors
            ]
            out = cuseq.causal_conv1d(*moved, packed.to(device), activation="silu")
            grads = torch.autograd.grad(out, moved, in_order(grad.to(device), order))
            results.append([out.cpu(), *(g.cpu() for g in grads)])
        for one, other in zip(*results, strict=True):
            scale = float(one.float().abs().max())
            error = float((one.float() - other.float()).abs().max())
            # Gradients of weights are sums over the row, on CUDA in float32.
            ulps = 4 if one.shape == results[0][0].shape else 32
            assert error <= ulps * torch.finfo(dtype).eps * scale


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_long_batch_equals_its_rows(dtype, cuda):
    """Each row of so many is one block's, in more waves than one."""
    x = torch.randn(700, 2000, 8, device=cuda, dtype=dtype, requires_grad=True)
    weight = torch.randn(8, 4, device=cuda, dtype=dtype)
    whole = cuseq.causal_conv1d(x, weight, activation="silu")
    grad = torch.randn_like(whole)
    (of_whole,) = torch.autograd.grad(whole, x, grad)
    last = x[-1].detach().requires_grad_()
    alone = cuseq.causal_conv1d(last, weight, activation="silu")
    (of_last,) = torch.autograd.grad(alone, last, grad[-1])
    torch.testing.assert_close(whole[-1], alone, rtol=0, atol=0)
    torch.testing.assert_close(of_whole[-1], of_last, rtol=0, atol=0)


@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_the_most_channels(order, cuda):
    packed = cuseq.PackedLayout.from_lengths([1, 2], 8, device=cuda)
    x, weight, bias, _ = inputs(packed, 2**18, 4, torch.bfloat16, order)
    out = cuseq.causal_conv1d(x, weight, bias, packed)
    torch.testing.assert_close(out[0], weight[:, 3] * x[0] + bias, rtol=2**-6, atol=2**-6)
    torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))
    with pytest.raises(ValueError, match="x must have at most 262144"):
        cuseq.causal_conv1d(x.new_zeros(1, 2**18 + 1), weight.new_zeros(2**18 + 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["channels", "tokens"])
def test_past_2_31_elements(order, cuda):
    if torch.cuda.mem_get_info()[1] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    tokens, channels = 2**18 + 40, 2**13 + 8
    assert tokens * channels > 2**31
    packed = cuseq.PackedLayout.from_lengths([2**17, 2**17 + 30], tokens, device=cuda)
    shape = (tokens, channels) if order == "channels" else (channels, tokens)
    x = torch.randn(shape, device=cuda, dtype=torch.bfloat16)
    x = (x if order == "channels" else x.t()).requires_grad_()
    weight = torch.randn(channels, 4, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    out = cuseq.causal_conv1d(x, weight, packed=packed, activation="silu")
    last = slice(2**18 - 50, 2**18 + 30)
    alone = cuseq.causal_conv1d(x[last], weight, activation="silu")
    # The slice may take narrower vectors, whose sums may round another way.
    close_enough = {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(out[last][3:], alone[3:], **close_enough)
    assert not out[2**18 + 30 :].any()
    del alone
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert grad.isfinite().all()
    part = x.detach()[last].requires_grad_()
    alone = cuseq.causal_conv1d(part, weight, activation="silu")
    (expected,) = torch.autograd.grad(alone, part, alone.detach())
    torch.testing.assert_close(grad[last][6:], expected[6:], **close_enough)


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(6)}, ValueError, "x must have shape"),
        ({"x": torch.ones(6, 4, dtype=torch.int32)}, TypeError, "x must be float32"),
        ({"x": torch.ones(12, 8)[::2, ::2]}, ValueError, "x must be contiguous"),
        ({"x": [1.0]}, TypeError, "x must be a tensor"),
        (
            {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(4)])},
            TypeError,
            "x must be a dense tensor, got a nested one",
        ),
        ({"x": torch.ones(7, 4)}, ValueError, "x must have the layout's total_tokens = 6"),
        ({"weight": torch.ones(4, 5)}, ValueError, "weight must have shape"),
        ({"weight": torch.ones(4, 1)}, ValueError, "width of 2 to 4"),
        ({"weight": torch.ones(3, 4)}, ValueError, r"weight must have shape \[channels = 4"),
        ({"bias": torch.ones(3)}, ValueError, "bias must have shape"),
        ({"bias": torch.ones(4).bfloat16()}, TypeError, "bias must be of weight's dtype"),
        ({"packed": [2, 3]}, TypeError, "packed must be a PackedLayout"),
        ({"activation": "gelu"}, ValueError, "activation must be None"),
        ({"activation": torch.ones(2)}, ValueError, "activation must be None"),
        ({"initial_state": torch.ones(3, 4, 3)}, ValueError, "initial_state must have shape"),
        (
            {"initial_state": torch.ones(2, 4, 3, dtype=torch.int64)},
            TypeError,
            "initial_state must be float32, float64, bfloat16 or float16, got torch.int64",
        ),
        ({"initial_state": 1}, TypeError, "initial_state must be a tensor"),
        ({"return_final_state": None}, TypeError, "return_final_state must be True or False"),
    ],
)
def test_wrong_arguments(change, error, message):
    right = {
        "x": torch.ones(6, 4),
        "weight": torch.ones(4, 4),
        "bias": None,
        "packed": cuseq.PackedLayout.from_lengths([2, 3], 6),
    }
    with pytest.raises(error, match=message):
        cuseq.causal_conv1d(**right | change)


def test_a_rank_part_is_refused():
    packed = cuseq.PackedLayout.from_lengths([8])
    plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    part, x = cuseq.distributed.cp_partition(packed, plan, 0, torch.ones(8, 4))
    with pytest.raises(ValueError, match="whole row"):
        cuseq.causal_conv1d(x, torch.ones(4, 4), packed=part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4, 6)}, r"x must have shape \[batch"),
        ({"seq_idx": torch.zeros(2, 6)}, "seq_idx must be int32"),
        ({"seq_idx": torch.zeros(1, 6, dtype=torch.int32)}, "seq_idx must have shape"),
        (
            {
                "seq_idx": torch.zeros(2, 6, dtype=torch.int32),
                "initial_states": torch.zeros(2, 4, 3),
            },
            "seq_idx must be None with initial or final states",
        ),
        ({"initial_states": torch.zeros(2, 4, 2)}, "initial_states must have shape"),
        (
            {"return_final_states": True, "final_states_out": torch.zeros(2, 4, 2)},
            "final_states_out must have shape",
        ),
        *(
            ({"return_final_states": True, "final_states_out": states}, message)
            for states, message in (
                (
                    torch.zeros(2, 4, 3, dtype=torch.int64),
                    "must be floating point, got torch.int64",
                ),
                (torch.zeros(2, 4, 3, dtype=torch.complex64), "must be floating point"),
                (torch.zeros(2, 4, 3, requires_grad=True), "must not be a leaf that requires grad"),
                (torch.zeros(3, 4, 3, requires_grad=True)[1:], "or a view of one"),
                (torch.zeros(1, 4, 3).expand(2, 4, 3), "and not overlap itself"),
                (torch.zeros(99).as_strided((2, 4, 3), (8, 1, 1)), "and not overlap itself"),
            )
        ),
    ],
)
def test_wrong_arguments_of_a_batch(change, message):
    right = {"x": torch.ones(2, 4, 6), "weight": torch.ones(4, 4)}
    with pytest.raises((ValueError, TypeError), match=message):
        cuseq.ops.causal_conv1d_fn(**right | change)


def test_offsets_need_one_row():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    weight = torch.ones(4, 4)
    with pytest.raises(ValueError, match="x must be one row"):
        ops.causal_conv1d(torch.ones(2, 5, 4), weight, None, offsets)
    with pytest.raises(ValueError, match="cu_seqlens must end at or before"):
        ops.causal_conv1d(torch.ones(4, 4), weight, None, offsets)
    with pytest.raises(ValueError, match="must come with cu_seqlens"):
        ops.causal_conv1d(torch.ones(5, 4), weight, None, None, offsets)
