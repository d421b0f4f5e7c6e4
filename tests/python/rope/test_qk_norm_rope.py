"""Test apply_qk_norm_rope: values, gradients, and every way that PyTorch runs it.

Tracing of the ops, and their errors, are tested in test_rope_autograd.py, which has the cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_no_sync import waits
from test_rope_autograd import (
    ALL_CASES,
    BACKENDS,
    CASES,
    COMPILERS,
    STRIDES,
    WHOLE_HEADS,
    Call,
    Case,
    check_no_worse,
    incoming,
)
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cuseq

EPS = 1e-6
LOW = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = [pytest.param(0.0, id="Qwen"), pytest.param(1.0, id="Gemma")]
SMALL_AND_WHOLE = [
    pytest.param(torch.float64, 8, id="small"),
    pytest.param(torch.bfloat16, 128, id="whole heads"),
]
TRAINED_OR_FROZEN = pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def weights_of(call: Call, offset: float = 0.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return one weight for q and another for k, around 1 after adding `offset`."""
    generator = torch.Generator().manual_seed(3)
    return [
        (1 - offset + torch.randn(t.shape[-1], generator=generator, dtype=torch.float64) / 4)
        .to(t.device, dtype or t.dtype)
        .requires_grad_()
        for t in call.tensors
    ]


def fused(
    call: Call, tensors: list[Tensor], weights: list[Tensor], offset: float = 0.0, **more: Any
) -> list[Tensor]:
    q, k = [*tensors, None][:2]
    q_weight, k_weight = [*weights, None][:2]
    results = cuseq.apply_qk_norm_rope(
        q,
        k,
        q_weight,
        k_weight,
        call.cos,
        call.sin,
        **{"eps": EPS, "weight_offset": offset} | call.options | more,
    )
    return list(results)[: len(tensors)]


def exact(
    call: Call, tensors: list[Tensor], weights: list[Tensor], offset: float = 0.0, eps: float = EPS
) -> list[Tensor]:
    """Compute the norm over the whole head, then the rotation, in float64."""
    normed = [
        x.double()
        * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
        * (w.double() + offset)
        for x, w in zip(tensors, weights, strict=True)
    ]
    return [call.plain(x) for x in normed]


def unfused(
    call: Call, tensors: list[Tensor], weights: list[Tensor], offset: float
) -> list[Tensor]:
    """Compute as models do: the norm in fp32, the rotation in the dtype of q and k."""
    results = []
    for x, weight in zip(tensors, weights, strict=True):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        if offset:
            normed = (wide * (offset + weight.float())).to(x.dtype)
        else:
            normed = (weight * wide.to(x.dtype)).to(x.dtype)
        results.append(call.plain(normed))
    return results


def exact_gradients(
    call: Call,
    tensors: list[Tensor],
    weights: list[Tensor],
    grads: list[Tensor],
    offset: float = 0.0,
) -> list[Tensor]:
    wanted = [t.detach().double().requires_grad_() for t in (*tensors, *weights)]
    n = len(tensors)
    outs = exact(call, wanted[:n], wanted[n:], offset)
    return list(torch.autograd.grad(outs, wanted, [g.double() for g in grads]))


def check_close(actual: list[Tensor], expected: list[Tensor], terms: int = 1) -> None:
    """Check up to float64's rounding of a norm, a rotation, and sums of `terms` such."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float64
        error, size = (one - other).detach().norm(), other.detach().norm()
        assert float(error) <= 16 * terms**0.5 * torch.finfo(torch.float64).eps * float(size)


# ---------------------------------------------------------------------------------- values


@pytest.mark.kernels
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_values_and_gradients(name, offset, device):
    call = ALL_CASES[name].build(device)
    weights = weights_of(call, offset)
    outs = fused(call, call.tensors, weights, offset)
    check_close(outs, exact(call, call.tensors, weights, offset))
    grads = incoming(outs)
    actual = torch.autograd.grad(outs, [*call.tensors, *weights], grads)
    check_close(actual, exact_gradients(call, call.tensors, weights, grads, offset))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (7, 3), (40, 8)], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256, 512])
def test_no_worse_than_the_unfused_sequence(dim, heads, dtype, device):
    case = Case((40,), lengths=(20, 1, 13), heads=heads, dim=dim, rotary=dim)
    for offset in (0.0, 1.0):
        compare_with_unfused(case, dtype, offset, device)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 65), qkv_format="bshd", lengths=(33, 0, 64), heads=(4, 2), dim=128, rotary=64),
        Case(
            (2, 60), "dense", qkv_format="bhsd", heads=(4, 2), dim=128, rotary=128, full_width=True
        ),
        Case((70,), "ids", heads=(4,), dim=96, rotary=24, options=dict(interleaved=True)),
        Case(
            (70,),
            "ids",
            heads=(4, 2),
            dim=128,
            rotary=128,
            options=dict(mrope_section=[24, 20, 20], mrope_interleaved=True),
        ),
    ],
    ids=["partial", "dense", "interleaved", "mrope"],
)
def test_no_worse_in_other_layouts(case, dtype, device):
    compare_with_unfused(case, dtype, 0.0, device)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own_table", [True, False], ids=["own table", "fp32 table"])
@TRAINED_OR_FROZEN
@pytest.mark.parametrize("name", WHOLE_HEADS)
def test_no_worse_of_whole_heads(name, trained, own_table, dtype, device):
    call = WHOLE_HEADS[name].build(device, dtype, dtype if own_table else None)
    weights = [w.detach().requires_grad_(trained) for w in weights_of(call)]
    check_against_unfused(call, call.tensors, weights)


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (9, 1), (0, 40)], ids=str)
def test_a_token_is_treated_alike_in_calls_of_any_size(heads, cuda):
    """The number of heads per warp depends on the number of tokens; the result must not."""
    case = Case((6000,), "ids", heads=heads, dim=128, rotary=128)
    call = case.build(cuda, torch.bfloat16)
    weights = [w.detach() for w in weights_of(call)]
    ids = call.options["position_ids"]

    def run(tokens: slice) -> list[Tensor]:
        tensors = [t[tokens] for t in call.tensors]
        outs = fused(call, tensors, weights, position_ids=ids[tokens])
        grads = [out.detach().flip(-1) for out in outs]
        return [*outs, *torch.autograd.grad(outs, tensors, grads)]

    small = [run(slice(i, i + 60)) for i in range(0, 6000, 60)]
    expected = [torch.cat(parts) for parts in zip(*small, strict=True)]
    for tokens in (300, 700, 1100, 2100, 3000, 6000):
        for out, wanted in zip(run(slice(tokens)), expected, strict=True):
            assert torch.equal(out, wanted[:tokens]), tokens


@pytest.mark.parametrize("heads", [(16, 8), (5, 1)], ids=str)
def test_frozen_weights_in_a_long_row(heads, cuda):
    """Long rows have another kernel than short ones."""
    case = Case((50_000,), "ids", heads=heads, dim=128, rotary=128)
    call = case.build(cuda, torch.bfloat16)
    weights = [w.detach() for w in weights_of(call)]
    outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    actual = torch.autograd.grad(outs, call.tensors, grads)
    expected = exact_gradients(call, call.tensors, weights, grads)[: len(outs)]
    for one, other in zip(actual, expected, strict=True):
        rounding = torch.finfo(one.dtype).eps / 2 * other.abs()
        assert ((one.double() - other).abs() <= rounding + 1e-4).all()


def compare_with_unfused(
    case: Case,
    dtype: torch.dtype,
    offset: float,
    device: torch.device,
    weight_dtype: torch.dtype | None = None,
) -> None:
    call = case.build(device, dtype)
    check_against_unfused(call, call.tensors, weights_of(call, offset, weight_dtype), offset)


def check_against_unfused(
    call: Call, tensors: list[Tensor], weights: list[Tensor], offset: float = 0.0
) -> None:
    """Check results and gradients."""
    wanted = [t for t in (*tensors, *weights) if t.requires_grad]
    ours = fused(call, tensors, weights, offset)
    theirs = unfused(call, tensors, weights, offset)
    for results in zip(ours, theirs, exact(call, tensors, weights, offset), strict=True):
        check_no_worse(*(t.detach() for t in results))
    grads = incoming(ours)
    gradients = zip(
        torch.autograd.grad(ours, wanted, grads),
        torch.autograd.grad(theirs, wanted, grads),
        exact_gradients(call, tensors, weights, grads, offset)[: len(wanted)],
        strict=True,
    )
    for i, (actual, plain, true) in enumerate(gradients):
        # The few elements of a weight's gradient are long sums: even their mean error is chance.
        of_weight = i >= len(tensors)
        check_no_worse(actual, plain, true, mean_in_fp32=2.0 if of_weight else 1.25)


@pytest.mark.parametrize("weight_dtype", [torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_weights_of_another_dtype(dtype, weight_dtype, device):
    if (dtype, weight_dtype) == (torch.float32, torch.float64):
        pytest.skip("PyTorch computes this in float64, the op in the inputs' float32")
    case = Case((70,), lengths=(30, 1, 33), heads=(4, 2), dim=64, rotary=64)
    for offset in (0.0, 1.0):
        compare_with_unfused(case, dtype, offset, device, weight_dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_begin_anywhere(dtype, device):
    """One element off vector alignment."""
    case = Case((70,), lengths=(30, 1, 33), heads=(4, 2), dim=64, rotary=64)
    call = case.build(device, dtype)
    weights = weights_of(call, 0.0, dtype)
    shifted = [torch.cat((w[:1], w)).detach()[1:] for w in weights]
    expected = fused(call, call.tensors, weights, 0.0)
    for out, other in zip(fused(call, call.tensors, shifted, 0.0), expected, strict=True):
        torch.testing.assert_close(out, other)


@pytest.mark.kernels
def test_the_norm_covers_what_is_not_rotated(device):
    """A literal case: the mean square of (1, 1, 1, 5) is 7, and a quarter turn is exact."""
    q = torch.tensor([[[1.0, 1.0, 1.0, 5.0]]], dtype=torch.float64, device=device)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, device=device)
    cos, sin = (torch.full((1, 1), v, dtype=torch.float64, device=device) for v in (0.0, 1.0))
    out, none = cuseq.apply_qk_norm_rope(q, None, weight, None, cos, sin, eps=2.0, rotary_dim=2)
    assert none is None
    expected = torch.tensor([[[-2.0, 1.0, 3.0, 20.0]]], dtype=torch.float64, device=device) / 3
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0)
    assert q.tolist() == [[[1.0, 1.0, 1.0, 5.0]]]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_a_head_of_zeros(dtype, device):
    """Only eps keeps the reciprocal finite."""
    call = CASES["packed"].build(device, dtype)
    tensors = [t.detach().clone() for t in call.tensors]
    for tensor in tensors:
        tensor[1:3, 0] = 0
        tensor.requires_grad_()
    weights = weights_of(call)
    outs = fused(call, tensors, weights)
    assert all(not out[1:3, 0].any() for out in outs)
    grads = torch.autograd.grad(outs, [*tensors, *weights], incoming(outs))
    assert all(grad.isfinite().all() for grad in grads)
    assert all(grad[1:3, 0].any() for grad in grads[:2])


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 3.0])
def test_eps(eps, device):
    call = CASES["packed"].build(device)
    tensors = [(t / 30).detach() for t in call.tensors]
    weights = weights_of(call)
    check_close(fused(call, tensors, weights, eps=eps), exact(call, tensors, weights, eps=eps))


@pytest.mark.kernels
@TRAINED_OR_FROZEN
@pytest.mark.parametrize("dtype,dim", SMALL_AND_WHOLE)
@pytest.mark.parametrize("heads", [(2, 1), (2,)], ids=str)
def test_no_tokens(heads, dtype, dim, trained, device):
    call = Case((0,), lengths=(), heads=heads, dim=dim, rotary=dim).build(device, dtype)
    weights = [w.detach().requires_grad_(trained) for w in weights_of(call)]
    outs = fused(call, call.tensors, weights)
    assert [out.shape for out in outs] == [t.shape for t in call.tensors]
    wanted = [*call.tensors, *(weights if trained else [])]
    grads = torch.autograd.grad(outs, wanted, outs)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    assert [g.shape for g in grads] == [t.shape for t in wanted]


@pytest.mark.kernels
@TRAINED_OR_FROZEN
@pytest.mark.parametrize("dtype,dim", SMALL_AND_WHOLE)
@pytest.mark.parametrize("heads", [(0,), (0, 2), (2, 0)], ids=str)
def test_no_heads(heads, dtype, dim, trained, device):
    case = Case((5,), lengths=(2, 3), heads=heads, dim=dim, rotary=dim)
    call = case.build(device, dtype)
    weights = [w.detach().requires_grad_(trained) for w in weights_of(call)]
    outs = fused(call, call.tensors, weights)
    grads = torch.autograd.grad(outs, [*call.tensors, *(weights if trained else [])], outs)
    for weight, n in zip(grads[len(outs) :], heads if trained else [], strict=True):
        assert n > 0 or torch.equal(weight, torch.zeros_like(weight))


@pytest.mark.kernels
@pytest.mark.parametrize("heads", [(8, 8), (64, 16), (30,)], ids=str)
def test_as_much_shared_memory_as_there_is(heads, device):
    """The largest heads, with angles that a lane cannot read from the table."""
    case = Case((3,), lengths=(1, 2), heads=heads, dim=512, rotary=512)
    call = case.build(device, torch.bfloat16, table_dtype=torch.float64)
    weights = weights_of(call)
    outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    found = [*outs, *torch.autograd.grad(outs, [*call.tensors, *weights], grads)]
    expected = exact(call, call.tensors, weights)
    expected += exact_gradients(call, call.tensors, weights, grads)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


# --------------------------------------------------------------------------------- strides


def of_a_fused_row(tensors: list[Tensor]) -> list[Tensor]:
    row = torch.cat([*tensors, tensors[0]], -2).detach()
    q_heads, k_heads = (t.shape[-2] for t in tensors)
    return [row[..., :q_heads, :], row[..., q_heads : q_heads + k_heads, :]]


INPUTS = {
    "slices of a fused row": of_a_fused_row,
    "heads in front": lambda ts: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in ts],
    "expanded": lambda ts: [t[:1].expand_as(t) for t in ts],
    "odd address": lambda ts: [STRIDES["odd address"](t) for t in ts],
    "wider heads": lambda ts: [STRIDES["sliced"](t) for t in ts],
}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["packed", "5x128 bshd"])
@pytest.mark.parametrize("strides", INPUTS)
def test_inputs_of_any_strides(strides, name, dtype, device):
    wide = Case((2, 33), qkv_format="bshd", heads=(5, 1), dim=128, rotary=128)
    call = (CASES | {"5x128 bshd": wide})[name].build(device, dtype)
    weights = weights_of(call)
    tensors = [t.detach().requires_grad_() for t in INPUTS[strides](call.tensors)]
    before = [t.detach().clone() for t in tensors]
    outs = fused(call, tensors, weights)
    assert [out.stride() for out in outs] == [torch.empty_like(t).stride() for t in tensors]
    if dtype == torch.float64:
        check_close(outs, exact(call, tensors, weights))
        grads = incoming(outs)
        actual = torch.autograd.grad(outs, [*tensors, *weights], grads)
        check_close(actual, exact_gradients(call, tensors, weights, grads))
    else:
        check_against_unfused(call, tensors, weights)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.kernels
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", ["packed", "8x64"])
def test_incoming_gradients_of_any_strides(name, strides, device):
    call = ALL_CASES[name].build(device)
    weights = weights_of(call)
    outs = fused(call, call.tensors, weights)
    grads = [STRIDES[strides](grad) for grad in incoming(outs)]
    before = [grad.clone() for grad in grads]
    actual = torch.autograd.grad(outs, [*call.tensors, *weights], grads)
    check_close(actual, exact_gradients(call, call.tensors, weights, before))
    assert all(map(torch.equal, grads, before)), "backward must leave the incoming gradient alone"


# ------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", ["packed", "dense, bshd, more keys", "mrope, interleaved", "cp"])
def test_gradcheck(name, device):
    call = CASES[name].build(device)
    weights = weights_of(call)

    def function(*given):
        tensors, weights = given[: len(call.tensors)], given[len(call.tensors) :]
        return tuple(fused(call, tensors, weights, 1.0))

    assert gradcheck(function, [*call.tensors, *weights])


# Which of q, k, q_weight and k_weight require gradients.
TRAINED = [(0, 1), (2, 3), (0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 3)]


class WeightGradients(TorchDispatchMode):
    """Records whether the backward op computes gradients of weights."""

    any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.cuseq.apply_qk_norm_rope_backward.default:
            self.any |= len(result[1]) > 0
        return result


@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_what_is_frozen_gets_no_gradient(trained, device):
    call = CASES["packed"].build(device)
    given = [t.detach() for t in (*call.tensors, *weights_of(call))]
    for i in trained:
        given[i].requires_grad_()
    outs = fused(call, given[:2], given[2:])
    grads = incoming(outs)
    total = sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True))
    with WeightGradients() as computed:
        total.backward()
    assert computed.any == any(i >= 2 for i in trained), "unneeded gradients cost time"
    expected = exact_gradients(call, given[:2], given[2:], grads)
    assert [i for i, t in enumerate(given) if t.grad is not None] == list(trained)
    check_close([given[i].grad for i in trained], [expected[i] for i in trained])


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_is_used(used, device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    wanted = [*call.tensors, *weights]
    actual = torch.autograd.grad(outs[used], wanted, grads[used], allow_unused=True)
    expected = exact_gradients(call, call.tensors, weights, grads)
    for i in (used, 2 + used):
        check_close([actual[i]], [expected[i]])
    for i in (1 - used, 3 - used):
        assert actual[i] is None or not actual[i].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights_are_deterministic(dtype, device):
    """With enough tokens that many blocks or threads contribute."""
    case = Case((6000,), "ids", heads=(5, 3), dim=64, rotary=64)
    call = case.build(device, dtype)
    weights = weights_of(call)
    first, *others = (
        torch.autograd.grad(outs, [*call.tensors, *weights], incoming(outs))
        for outs in (fused(call, call.tensors, weights) for _ in range(5))
    )
    for other in others:
        assert all(map(torch.equal, first, other))
    # Sums of 30,000 terms are no further from float64 than the unfused ones.
    compare_with_unfused(case, dtype, 0.0, device)


def test_sums_of_many_tokens_are_complete(device):
    """Without random numbers: each token adds exactly 1 to each element."""
    for tokens in (1, 255, 256, 257, 4099):
        q = torch.ones(tokens, 2, 16, device=device)
        weight = torch.ones(16, device=device, requires_grad=True)
        cos, sin = torch.ones(1, 8, device=device), torch.zeros(1, 8, device=device)
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        out, _ = cuseq.apply_qk_norm_rope(
            q, None, weight, None, cos, sin, eps=0.0, position_ids=positions
        )
        out.sum().backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 2 * tokens))


# --------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("name", ["packed", "packed, bhsd, no key", "mrope", "5x128"])
def test_saved_are_the_input_and_one_reciprocal_a_head(name, device):
    call = ALL_CASES[name].build(device, torch.bfloat16)
    tensors = [t * 1 for t in call.tensors]
    weights = weights_of(call)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(call, tensors, weights)
    small = [call.cos, call.sin, call.options.get("position_ids")]
    if "packed" in call.options:
        small += [call.options["packed"].cu_seqlens_static, call.options["packed"].host_meta]
    for tensor in (*small, *weights):
        if tensor is not None:
            saved.pop(tensor.untyped_storage().data_ptr(), None)
    inputs = [saved.pop(t.untyped_storage().data_ptr()) for t in tensors]
    assert [t.nbytes for t in inputs] == [t.nbytes for t in tensors]
    heads = sum(t.shape[:-1].numel() for t in tensors)
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert sum(t.untyped_storage().nbytes() for t in saved.values()) == 4 * heads


@pytest.mark.parametrize("edited", [0, 1, 2, 3])
def test_an_edit_of_what_is_saved_is_detected(edited, device):
    call = CASES["packed"].build(device)
    given = [*(t * 1 for t in call.tensors), *weights_of(call)]
    outs = fused(call, given[:2], given[2:])
    with torch.no_grad():
        given[edited].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outs, call.tensors, incoming(outs))


def test_saved_tensors_on_the_cpu(device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    with torch.autograd.graph.save_on_cpu():
        outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    actual = torch.autograd.grad(outs, [*call.tensors, *weights], grads)
    check_close(actual, exact_gradients(call, call.tensors, weights, grads))


# -------------------------------------------------------------------------------- in place


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL_CASES)
def test_in_place_equals_out_of_place(name, dtype, device):
    call = ALL_CASES[name].build(device, dtype)
    weights = weights_of(call)
    with torch.no_grad():
        expected = fused(call, call.tensors, weights)
        tensors = [t.clone() for t in call.tensors]
        versions = [t._version for t in tensors]
        results = fused(call, tensors, weights, inplace=True)
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert all(map(torch.equal, tensors, expected))
    assert all(t._version > before for t, before in zip(tensors, versions, strict=True))


def test_in_place_on_slices_leaves_the_rest(device):
    call = CASES["packed"].build(device)
    weights = [w.detach() for w in weights_of(call)]
    row = torch.cat([*call.tensors, call.tensors[0]], 1).detach()
    value = row[:, 3:].clone()
    expected = exact(call, call.tensors, weights)
    fused(call, [row[:, :2], row[:, 2:3]], weights, inplace=True)
    check_close([row[:, :2], row[:, 2:3]], expected)
    assert torch.equal(row[:, 3:], value)


@pytest.mark.parametrize("wanting", range(4))
def test_in_place_with_a_gradient_raises(wanting, device):
    call = CASES["packed"].build(device)
    given = [t.detach().clone() for t in (*call.tensors, *weights_of(call))]
    given[wanting].requires_grad_()
    if wanting < 2:
        given[wanting] = given[wanting] * 1
    before = [t.detach().clone() for t in given]
    with pytest.raises((ValueError, RuntimeError), match="inplace"):
        fused(call, given[:2], given[2:], inplace=True)
    assert all(map(torch.equal, given, before)), "a refused call changes nothing"


def test_inference_mode(device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    expected = exact(call, call.tensors, weights)
    with torch.inference_mode():
        check_close(fused(call, call.tensors, weights), expected)
        tensors = [t.clone() for t in call.tensors]
        fused(call, tensors, weights, inplace=True)
        check_close(tensors, expected)


# ------------------------------------------------------------- other ways in which it is run


def test_double_backward_raises(device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    wanted = [*call.tensors, *weights]
    outs = fused(call, call.tensors, weights)
    total = sum(out.square().sum() for out in outs)
    for given in wanted:
        (grad,) = torch.autograd.grad(total, given, create_graph=True)
        with pytest.raises(
            (NotImplementedError, RuntimeError), match="apply_qk_norm_rope has no second"
        ):
            grad.sum().backward()


def test_vmap_and_forward_mode_are_refused(device):
    call = CASES["packed"].build(device)
    q, k = (t.detach() for t in call.tensors)
    weights = [w.detach() for w in weights_of(call)]
    refused = (NotImplementedError, RuntimeError)
    for inplace in (False, True):
        with pytest.raises(refused, match="apply_qk_norm_rope.*vmap"):
            torch.func.vmap(lambda q, k: tuple(fused(call, [q, k], weights, inplace=inplace)))(
                torch.stack((q, q)), torch.stack((k, k))
            )
    for i in range(4):
        given = [q, k, *weights]

        def function(tangent, given=given, i=i):
            given[i] = tangent
            return fused(call, given[:2], given[2:])[i % 2]

        with pytest.raises(refused, match="apply_qk_norm_rope.*forward-mode"):
            torch.func.jvp(function, (given[i],), (given[i],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_leaves_the_dtype(dtype, device):
    call = CASES["packed"].build(device, dtype)
    weights = weights_of(call, dtype=torch.float32)
    expected = fused(call, call.tensors, weights)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outs = fused(call, call.tensors, weights)
    for out, other in zip(outs, expected, strict=True):
        assert out.dtype == dtype and torch.equal(out, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    wanted = [*call.tensors, *weights]
    outs = checkpoint(
        lambda *given: tuple(fused(call, given[:2], given[2:])), *wanted, use_reentrant=reentrant
    )
    grads = incoming(list(outs))
    torch.autograd.backward(outs, grads)
    expected = exact_gradients(call, call.tensors, weights, grads)
    check_close([t.grad for t in wanted], expected)


@pytest.mark.parametrize("backend,dynamic", COMPILERS)
def test_one_graph_for_all_packs(backend, dynamic, device):
    def layer(q, k, q_weight, k_weight, cos, sin, packed):
        return cuseq.apply_qk_norm_rope(
            q * 1, k * 1, q_weight, k_weight, cos, sin, eps=EPS, packed=packed
        )

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for lengths in ((2, 3), (1, 1, 1), (6,), ()):
        call = Case(lengths=lengths).build(device)
        weights = weights_of(call)
        wanted = [*call.tensors, *weights]
        outs = list(compiled(*wanted, call.cos, call.sin, call.options["packed"]))
        check_close(outs, exact(call, call.tensors, weights))
        grads = incoming(outs)
        actual = torch.autograd.grad(outs, wanted, grads)
        check_close(actual, exact_gradients(call, call.tensors, weights, grads))
        counts.append(counter.frame_count)
    # Dynamo may look up twice for the first: it tries once with the floats as tensors.
    assert len(set(counts)) == 1


def test_compiled_autograd(device):
    call = CASES["packed"].build(device)
    weights = weights_of(call)
    wanted = [*call.tensors, *weights]
    outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        torch.autograd.backward(outs, grads)
    check_close([t.grad for t in wanted], exact_gradients(call, call.tensors, weights, grads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_place_mutates_its_inputs(backend, device):
    call = CASES["packed"].build(device)
    weights = [w.detach() for w in weights_of(call)]

    def layer(q, k):
        return fused(call, [q, k], weights, inplace=True)[0].sin()

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    tensors = [t.detach().clone() for t in call.tensors]
    expected = exact(call, tensors, weights)
    sines = compiled(*tensors)
    check_close([*tensors, sines], [*expected, expected[0].sin()])


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(q_weight=torch.ones(7)), r"q_weight must have shape .*8.*got .*7"),
        (dict(k_weight=torch.ones(1, 8)), r"k_weight must have shape .*got .*1, 8"),
        (
            dict(q_weight=torch.ones(8, dtype=torch.int32)),
            "q_weight must be float32.*got torch.int32",
        ),
        (
            dict(k_weight=torch.ones(8).half()),
            "k_weight must be of q_weight's dtype.*got torch.float16",
        ),
        (
            dict(k_weight=torch.ones(16).double()[::2]),
            r"k_weight must be contiguous, got stride.*2",
        ),
        (dict(k_weight=None), "k_weight.*got k_weight=None"),
        (dict(k=None), "k_weight.*got k=None"),
        (dict(eps=-1.0), r"eps must .*got -1"),
        (dict(eps=float("nan")), "eps must .*got nan"),
    ],
)
def test_errors_name_argument_rule_and_value(change, message):
    call = CASES["packed"].build("cpu")
    weights = weights_of(call)
    q, k = call.tensors
    named = dict(q=q, k=k, q_weight=weights[0], k_weight=weights[1], eps=EPS) | change
    with pytest.raises((ValueError, TypeError), match=message):
        cuseq.apply_qk_norm_rope(cos=call.cos, sin=call.sin, **call.options, **named)


# ------------------------------------------------------------------------------ on the GPU


def test_weights_on_another_device_raise(cuda):
    call = CASES["packed"].build(cuda)
    q_weight, k_weight = weights_of(call)
    for i, name in enumerate(("q_weight", "k_weight")):
        weights = [q_weight, k_weight]
        weights[i] = weights[i].cpu()
        with pytest.raises(ValueError, match=f"{name} must lie on q's device"):
            fused(call, call.tensors, weights)


def test_nothing_waits(cuda):
    call = CASES["packed"].build(cuda, torch.bfloat16)
    weights = weights_of(call)
    grads = incoming(call.tensors)
    frozen = [t.detach() for t in call.tensors]

    def body():
        outs = fused(call, call.tensors, weights)
        torch.autograd.grad(outs, [*call.tensors, *weights], grads)
        with torch.no_grad():
            fused(call, [t.clone() for t in frozen], weights, inplace=True)

    assert not waits(body)


def test_a_captured_graph_replays(cuda):
    call = ALL_CASES["5x128"].build(cuda)
    weights = weights_of(call)
    wanted = [*call.tensors, *weights]
    grads = incoming(call.tensors)

    def step():
        outs = fused(call, [t * 1 for t in call.tensors], weights)
        return [*outs, *torch.autograd.grad(outs, wanted, grads)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    ids = call.options["position_ids"]
    for new in (ids.clone(), ids.flip(1)):
        ids.copy_(new)
        graph.replay()
        assert all(map(torch.equal, captured, step()))


def test_second_gpu(second_gpu):
    assert torch.cuda.current_device() == 0
    call = ALL_CASES["8x64"].build(second_gpu)
    weights = weights_of(call)
    outs = fused(call, call.tensors, weights)
    grads = incoming(outs)
    check_close(outs, exact(call, call.tensors, weights))
    actual = torch.autograd.grad(outs, [*call.tensors, *weights], grads)
    check_close(actual, exact_gradients(call, call.tensors, weights, grads))


def test_the_backward_op_checks_what_it_is_given(device):
    q = torch.randn(5, 3, 8, device=device)
    weight, table = torch.ones(8, device=device), torch.rand(5, 4, device=device)
    backward = torch.ops.cuseq.apply_qk_norm_rope_backward
    (_,), (rstd,) = torch.ops.cuseq.apply_qk_norm_rope([q], [weight], 1e-6, 0.0, table, table)
    expanded = q[..., :1].expand(5, 3, 8)
    with pytest.raises(ValueError, match="tensors must be contiguous in their last dimension"):
        backward([q], [expanded], [weight], [rstd], 0.0, True, table, table)
    with pytest.raises(ValueError, match="rstd must be what the forward returned"):
        backward([q], [q], [weight], [rstd[:, :2]], 0.0, True, table, table)
