"""varlen_attention: values, gradients, and every way that PyTorch runs it."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import attention as reference_attention
from tiers import full
from torch import Tensor

import cuseq
from cuseq import PackedLayout

op = torch.ops.cuseq.varlen_attention

PACKS = [
    pytest.param([2, 3], 6, id="tail"),
    pytest.param([6], 6, id="one giant"),
    pytest.param([1] * 6, 6, id="one-token sequences"),
    pytest.param([0, 4, 0, 0, 2], 6, id="zero-length sequences"),
    pytest.param([], 6, id="only a tail"),
    pytest.param([0, 0], 6, id="zero-length only"),
    pytest.param([], 0, id="no tokens"),
    pytest.param([130, 1, 257, 40], 430, id="longer than a tile"),
]


def inputs(
    tokens: int,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (key_heads, dim), (key_heads, value_dim or dim))
    return tuple(
        torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)
        .to(device=device, dtype=dtype)
        .requires_grad_()
        for shape in shapes
    )


def relative(actual: Tensor, expected: Tensor, like: Tensor) -> float:
    """Return the error relative to the result, or to `like` if the result cancels to zero."""
    actual, expected, like = (t.detach().double().cpu() for t in (actual, expected, like))
    size = torch.maximum(expected.norm(), like.norm())
    return float((actual - expected).norm() / size) if float(size) > 0 else 0.0


def check_against_reference(
    tensors,
    lengths,
    packed,
    *,
    bound: float,
    tail: float = math.nan,
    backend: str = "auto",
    **options,
) -> None:
    """Check output and gradients against float64 loops; `tail` fills the tail's gradient."""
    real = sum(lengths)
    out = cuseq.varlen_attention(*tensors, packed, backend=backend, **options)
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    expected = reference_attention(*exact, lengths, **options)
    assert out.is_contiguous() and out.shape == expected.shape and out.dtype == tensors[0].dtype
    assert not out[real:].any(), "the tail of the output must be zero"
    assert relative(out, expected, expected) <= bound

    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    poisoned = grad.clone()
    poisoned[real:] = tail
    grads = torch.autograd.grad(out, tensors, poisoned.to(out))
    # If no sequence has a token, the reference does not depend on its inputs at all.
    expected_grads = (
        torch.autograd.grad(expected, exact, grad)
        if expected.requires_grad
        else [torch.zeros_like(t) for t in exact]
    )
    for actual, wanted in zip(grads, expected_grads, strict=True):
        assert not actual[real:].any(), "the tail of a gradient must be zero"
        assert relative(actual, wanted, grad[:real]) <= 3 * bound


@pytest.mark.kernels
@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_matches_reference_in_fp32(device, lengths, tokens, options):
    tensors = inputs(tokens, device=device)
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    check_against_reference(tensors, lengths, packed, bound=2e-6, **options)


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"causal": False, "window": 5}, {"scale": 0.3}], ids=str
)
def test_matches_reference_in_fp64(device, lengths, tokens, options):
    tensors = inputs(tokens, device=device, dtype=torch.float64)
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    check_against_reference(tensors, lengths, packed, bound=1e-13, **options)


@pytest.mark.kernels
@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 3}, {"window": 1}, {"causal": False, "window": 5}],
    ids=str,
)
@pytest.mark.parametrize("dim,value_dim", [(64, 64), (20, 20), (48, 32)])
def test_flash_matches_reference(cuda, lengths, tokens, options, dim, value_dim):
    tensors = inputs(tokens, 4, 2, dim, value_dim, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths(lengths, tokens, device="cuda")
    check_against_reference(tensors, lengths, packed, bound=6e-3, backend="flash", **options)


@pytest.mark.parametrize("dim", [288, 20, 6, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"causal": False}], ids=str)
def test_what_flash_refuses_is_exact(device, dim, dtype, options):
    if torch.device(device).type == "cpu" and dtype == torch.float16:
        pytest.skip("fp16 has no exact CPU reference error to compare with")
    lengths = [5, 0, 70, 33]
    tensors = inputs(110, 4, 2, dim, device=device, dtype=dtype)
    packed = PackedLayout.from_lengths(lengths, 110, device=device)
    bound = 2e-6 if dtype == torch.float32 else 1.5e-3
    check_against_reference(tensors, lengths, packed, bound=bound, **options)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    tail=st.integers(0, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 45),
    group=st.sampled_from([1, 3]),
)
def test_any_pack(lengths, tail, causal, window, group):
    tokens = sum(lengths) + tail
    tensors = inputs(tokens, 2 * group, 2, 8, dtype=torch.float64)
    packed = PackedLayout.from_lengths(lengths, tokens, max_seqs=8)
    check_against_reference(tensors, lengths, packed, bound=1e-13, causal=causal, window=window)


def test_sequences_do_not_see_each_other(device):
    q, k, v = inputs(12, device=device)
    packed = PackedLayout.from_lengths([5, 7], 12, device=device)
    before = cuseq.varlen_attention(q, k, v, packed)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[:5] = 7.0
    after = cuseq.varlen_attention(q, k, v, packed)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


def test_strided_inputs(device):
    """Slices of a fused QKV row, and heads before tokens."""
    lengths, tokens = [4, 5], 10
    fused = torch.randn(tokens, 8, 32, device=device)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    expected = cuseq.varlen_attention(q.contiguous(), k.contiguous(), v.contiguous(), packed)
    assert torch.equal(cuseq.varlen_attention(q, k, v, packed), expected)
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    out = cuseq.varlen_attention(*transposed, packed)
    assert torch.equal(out, expected) and out.is_contiguous()


def test_gradcheck(device):
    tensors = inputs(6, 2, 1, 8, dtype=torch.float64, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    for options in ({}, {"window": 2}, {"causal": False}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, options=options: cuseq.varlen_attention(q, k, v, packed, **options),
            tensors,
        )


def test_expanded_and_partial_gradients(device):
    """A gradient with zero strides (from .sum()), and inputs that require none."""
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    cuseq.varlen_attention(q, k, v, packed).sum().backward()
    only_q = q.detach().clone().requires_grad_()
    cuseq.varlen_attention(only_q, k.detach(), v.detach(), packed).sum().backward()
    assert torch.equal(only_q.grad, q.grad)


def test_double_backward_raises(device):
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    out = cuseq.varlen_attention(q, k, v, packed)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_forward_mode_raises():
    q, k, v = (t.detach() for t in inputs(6))
    packed = PackedLayout.from_lengths([2, 3], 6)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: cuseq.varlen_attention(q, k, v, packed), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            cuseq.varlen_attention(dual, k, v, packed)


@pytest.mark.kernels
def test_offsets_that_lie_stay_inside_the_row(cuda):
    """With wrong offsets and no layout, no kernel accesses memory outside its tensors.

    The sanitizer checks this.
    """
    for dtype in (torch.bfloat16, torch.float32):
        tensors = inputs(64, 4, 2, 32, device="cuda", dtype=dtype)
        for lie in ([0, -5, 70], [0, 10**9, 3], [5, 64, 65], [-(2**31), 2**31 - 1, 7]):
            offsets = torch.tensor(lie, dtype=torch.int32, device="cuda")
            out = op(*tensors, offsets)[0]
            out.sum().backward()
            torch.cuda.synchronize()


@pytest.mark.parametrize("lie", [[-4, 2, 5], [1, 2, 5], [0, 4, 3], [0, 2, 7]], ids=str)
def test_offsets_that_are_not_of_the_layout_raise(device, lie):
    """fp64 runs sequence by sequence, from offsets on the host."""
    tensors = inputs(6, device=device, dtype=torch.float64)
    meta = PackedLayout.from_lengths([2, 3], 6).host_meta
    offsets = torch.tensor(lie, dtype=torch.int32, device=device)
    out, logsumexp, _ = op(*tensors, offsets.new_tensor([0, 2, 5]), meta)
    with pytest.raises(ValueError, match="cu_seqlens must"):
        op(*tensors, offsets, meta)
    rows = [t.detach() for t in (out, *tensors, out, logsumexp)]
    with pytest.raises(ValueError, match="cu_seqlens must"):
        torch.ops.cuseq.varlen_attention_backward(*rows, None, offsets, meta)


def test_the_bound_does_not_switch_the_window_off(device):
    q, k, v = inputs(9, device=device)
    packed = PackedLayout.from_lengths([9], device=device)
    expected = cuseq.varlen_attention(q, k, v, packed, window=4)
    out = op(q, k, v, packed.cu_seqlens, window=4, max_seqlen_bound=9)[0]
    torch.testing.assert_close(out, expected)
    for bound in (0, -1):
        with pytest.raises(ValueError, match="max_seqlen_bound must be at least"):
            op(q, k, v, packed.cu_seqlens, max_seqlen_bound=bound)


def test_a_layout_from_an_evaluation_trains(device):
    q, k, v = inputs(6, device=device)
    with torch.inference_mode():
        packed = PackedLayout.from_lengths([2, 3], 6, device=device)
        positions = packed.position_ids
        cuseq.varlen_attention(q, k, v, packed)
    assert not positions.is_inference()
    cuseq.varlen_attention(q, k, v, packed).sum().backward()


@pytest.mark.parametrize("lengths,tokens", [([2, 3], 6), ([1, 1, 1], 6), ([0], 6)])
def test_opcheck(device, lengths, tokens):
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    tensors = inputs(tokens, device=device)
    arguments = (*tensors, packed.cu_seqlens_static, packed.host_meta)
    torch.library.opcheck(op, arguments)
    torch.library.opcheck(op, (*tensors, packed.cu_seqlens), {"max_seqlen_bound": 4})
    with torch.no_grad():
        out, logsumexp, _ = op(*arguments)
        rows = (torch.randn_like(out), *(t.detach() for t in tensors), out, logsumexp, None)
        backward = torch.ops.cuseq.varlen_attention_backward
        torch.library.opcheck(backward, (*rows, *arguments[3:]))


def test_opcheck_with_padding(device):
    packed = PackedLayout.from_lengths([2, 3], 12, segment_multiple=4, device=device)
    tensors = inputs(12, device=device)
    arguments = (*tensors, packed.cu_seqlens_static, packed.host_meta)
    padded = {"cu_seqlens_padded": packed.cu_seqlens_padded_static}
    torch.library.opcheck(op, arguments, padded)
    with torch.no_grad():
        out, logsumexp, _ = op(*arguments, **padded)
        rows = (torch.randn_like(out), *(t.detach() for t in tensors), out, logsumexp, None)
        backward = torch.ops.cuseq.varlen_attention_backward
        torch.library.opcheck(backward, (*rows, *arguments[3:]), padded)


@pytest.mark.parametrize("multiple", [1, 4])
def test_logsumexp(multiple, device):
    """It is in the order of the row, and zero on padding and tail."""
    q, k, v = inputs(12, 2, 2, 8, device=device)
    packed = PackedLayout.from_lengths([2, 3], 12, segment_multiple=multiple, device=device)
    padded = packed.cu_seqlens_padded_static if multiple > 1 else None
    offsets, meta = packed.cu_seqlens_static, packed.host_meta
    logsumexp = op(q, k, v, offsets, meta, cu_seqlens_padded=padded)[1]
    own = slice(4, 7) if multiple > 1 else slice(2, 5)
    scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[own].double()) * 8**-0.5
    scores.masked_fill_(torch.ones(3, 3, device=device).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(logsumexp[:, own], scores.logsumexp(-1).float())
    assert not logsumexp[:, packed.moe_padding_mask].any()


def test_bounds_without_host_meta(device):
    """Offsets alone: every entry is a sequence, and the device's last offset ends the row."""
    q, k, v = inputs(9, device=device)
    packed = PackedLayout.from_lengths([2, 3], 9, device=device)
    expected = cuseq.varlen_attention(q, k, v, packed)
    for offsets in (packed.cu_seqlens, packed.cu_seqlens_static):
        for bound in (None, 3, 100):
            out = op(q, k, v, offsets, None, max_seqlen_bound=bound)[0]
            torch.testing.assert_close(out, expected)
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            wanted = torch.autograd.grad(expected.sum(), (q, k, v), retain_graph=True)
            for actual, other in zip(grads, wanted, strict=True):
                torch.testing.assert_close(actual, other)


@pytest.mark.parametrize("backend", ["aot_eager", full("inductor")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_for_all_packs(device, backend, dynamic):
    def layer(q, k, v, packed):
        return cuseq.varlen_attention(q * 2, k, v, packed, window=4).sin()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    tensors = inputs(6, device=device)
    for lengths in ([2, 3], [1, 1, 1], [6], [0, 2], [], [1] * 6):
        packed = PackedLayout.from_lengths(lengths, 6, device=device)
        out, expected = compiled(*tensors, packed), layer(*tensors, packed)
        torch.testing.assert_close(out, expected)
        for actual, wanted in zip(
            torch.autograd.grad(out.sum(), tensors),
            torch.autograd.grad(expected.sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(device, reentrant):
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    expected = torch.autograd.grad(cuseq.varlen_attention(q, k, v, packed).sum(), (q, k, v))
    out = torch.utils.checkpoint.checkpoint(
        cuseq.varlen_attention, q, k, v, packed, use_reentrant=reentrant
    )
    out.sum().backward()
    for tensor, wanted in zip((q, k, v), expected, strict=True):
        assert torch.equal(tensor.grad, wanted)


def test_selective_checkpointing_sees_the_op(device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx, called, *args, **kwargs):
        seen.append((called, ctx.is_recompute))
        save = called is op.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    out = torch.utils.checkpoint.checkpoint(
        lambda q: cuseq.varlen_attention(q * 2, k, v, packed),
        q,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    out.sum().backward()
    # Newer releases of torch do not call the policy in the recompute; a mismatch would have raised.
    assert (op.default, False) in seen
    kept = q.grad.clone()
    q.grad = None
    cuseq.varlen_attention(q * 2, k, v, packed).sum().backward()
    assert torch.equal(q.grad, kept)


def test_flop_counter_sees_the_op(device):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(6, 2, 2, 8, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    with FlopCounterMode(display=False) as counter:
        cuseq.varlen_attention(q, k, v, packed).sum().backward()
    forward = 2 * 2 * (2 * 2 + 3 * 3) * (8 + 8)
    assert counter.get_total_flops() == forward + forward * 5 // 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        op(*(t.to("meta") for t in (q, k, v)), packed.cu_seqlens.to("meta"))
    assert counter.get_total_flops() == 2 * 2 * 6 * 6 * (8 + 8)


@pytest.mark.parametrize("first", ["cuseq", "torch.utils.flop_counter"])
def test_flops_are_counted_whichever_is_imported_first(first):
    code = f"""
import sys, torch
import {first}
import cuseq
from importlib.util import find_spec
assert find_spec("torch.utils.flop_counter")
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(6, 2, 8)
with FlopCounterMode(display=False) as counter:
    cuseq.varlen_attention(q, q, q, cuseq.PackedLayout.from_lengths([6]))
assert counter.get_total_flops() == 2 * 2 * 6 * 6 * (8 + 8)
assert "torch.utils.flop_counter" not in [getattr(one, "module", None) for one in sys.meta_path]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_autocast_takes_the_dtype_of_the_region(device):
    dtype = torch.bfloat16
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    with torch.autocast(torch.device(device).type, dtype=dtype):
        out = cuseq.varlen_attention(q, k, v.to(dtype), packed)
    assert out.dtype == dtype
    expected = cuseq.varlen_attention(q.to(dtype), k.to(dtype), v.to(dtype), packed)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(q=torch.zeros(6, 64)), r"q must have shape \[tokens, heads, head_dim\]"),
        (dict(k=torch.zeros(5, 2, 16)), "k must have as many tokens as q, 6, got 5"),
        (dict(k=torch.zeros(6, 3, 16)), "k and v must have the same number of heads, got 3 and 2"),
        (
            dict(q=torch.zeros(6, 3, 16)),
            "q's number of heads must be a multiple of k's, got 3 and 2",
        ),
        (dict(q=torch.zeros(6, 4, 8)), "q and k must have the same head_dim"),
        (dict(v=torch.zeros(6, 2, 16).double()), "v must be floating point and of q's"),
        (dict(q=torch.zeros(6, 16, 4).transpose(1, 2)), "q must be contiguous in its last"),
        (dict(q=torch.zeros(6, 0, 16)), r"q must have at least one head, got \[6, 0, 16\]"),
        (dict(window=0), "window must be None or at least 1"),
        (dict(window=True), "window must be None or an int, got True"),
        *(
            (dict(scale=scale), f"scale must be a finite number above 0, got {scale}")
            for scale in (0, -1, math.inf, math.nan)
        ),
        (
            dict(packed=PackedLayout.from_lengths([2], 5)),
            r"q must have packed.total_tokens = 5 .*got 6",
        ),
        (
            dict(packed=PackedLayout.from_lengths([8])),
            r"q must have packed.total_tokens = 8 .*got 6",
        ),
        (dict(q=[1.0]), "q must be a tensor, got list"),
        (dict(k=None), "k must be a tensor, got NoneType"),
        (dict(v="v"), "v must be a tensor, got str"),
        (dict(sinks=[0.0] * 4), "sinks must be a tensor, got list"),
        (dict(causal=None), "causal must be True or False, got None"),
        (dict(q=torch.zeros(64), sinks=torch.zeros(4)), "q must have shape"),
    ],
)
def test_errors_name_argument_rule_and_value(change, message):
    call = dict(zip("qkv", inputs(6), strict=True), packed=PackedLayout.from_lengths([2, 3], 6))
    call.update(change)
    with pytest.raises((ValueError, TypeError), match=message):
        cuseq.varlen_attention(**call)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(grad_out=torch.zeros(5, 4, 16)), r"grad_out must have shape \[6, 4, 16\], got \[5"),
        (
            dict(grad_out=torch.zeros(6, 4, 16).double()),
            "grad_out must be of dtype torch.float32, got torch.float64",
        ),
        (dict(out=torch.zeros(6, 4, 8)), r"out must have shape \[6, 4, 16\], got \[6, 4, 8\]"),
        (dict(logsumexp=torch.zeros(6, 4)), r"logsumexp must have shape \[4, 6\], got \[6, 4\]"),
        (
            dict(far_rows=torch.zeros(0, 64)),
            r"far_rows must be None unless packed is a rank's part",
        ),
    ],
)
def test_backward_called_by_hand_checks_what_the_forward_gave(change, message, device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    call = dict(zip("qkv", inputs(6, device=device), strict=True))
    call |= {"cu_seqlens": packed.cu_seqlens_static, "host_meta": packed.host_meta}
    with torch.no_grad():
        out, logsumexp, _ = op(**call)
        backward = torch.ops.cuseq.varlen_attention_backward
        call |= {"grad_out": torch.ones_like(out), "out": out, "logsumexp": logsumexp}
        call |= {"far_rows": None}
        assert [grad.shape for grad in backward(**call)] == [x.shape for x in inputs(6)]
        with pytest.raises((ValueError, TypeError), match=message):
            backward(**call | {name: given.to(device) for name, given in change.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_called_by_hand_takes_any_strides(dtype, device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    given = {"cu_seqlens": packed.cu_seqlens_static, "host_meta": packed.host_meta}
    given |= dict(zip("qkv", inputs(6, device=device, dtype=dtype), strict=True))
    with torch.no_grad():
        out, logsumexp, given["far_rows"] = op(**given)
        grad_out = torch.randn_like(out)
        backward = torch.ops.cuseq.varlen_attention_backward
        plain = dict(grad_out=grad_out, out=out, logsumexp=logsumexp)
        expected = backward(**given, **plain)
        for laid_out in (
            lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
            lambda x: x.repeat_interleave(2, -1)[..., ::2],
        ):
            others = {name: laid_out(x) for name, x in plain.items()}
            for one, other in zip(expected, backward(**given, **others), strict=True):
                assert torch.equal(one, other)


def test_wrong_device_names_the_remedy(cuda):
    q, k, v = inputs(6, device="cuda")
    with pytest.raises(ValueError, match=r"packed must lie on q's device.*packed.to\(device\)"):
        cuseq.varlen_attention(q, k, v, PackedLayout.from_lengths([2, 3], 6))


def test_flash_backward_beyond_32_bit_workspace(cuda):
    """unsloth#8957: (tokens + 128 * n_seqs) * heads * dim past 2^31 was an illegal access."""
    attend = partial(cuseq.varlen_attention, backend="flash")
    sequences, heads, dim = 20_000, 8, 128
    assert (sequences + 128 * sequences) * heads * dim > 2**31
    tensors = inputs(2 * sequences, heads, 2, dim, device="cuda", dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([2] * sequences, device="cuda")
    grads = torch.autograd.grad(attend(*tensors, packed).sum(), tensors)
    # The same sequences in packs small enough for one call.
    few = 2_000
    small = PackedLayout.from_lengths([2] * few, device="cuda")
    for start in (0, 2 * (sequences - few)):
        part = [t.detach()[start : start + 2 * few].requires_grad_() for t in tensors]
        expected = torch.autograd.grad(attend(*part, small).sum(), part)
        for actual, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(actual[start : start + 2 * few], wanted)


def test_compiled_code_waits_for_lengths_from_the_device(cuda):
    """Python cannot wait inside a graph, so the op waits: here for a copy on a busy stream."""
    tensors = inputs(64, 4, 2, 32, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(cuseq.varlen_attention, fullgraph=True, dynamic=False)
    compiled(*tensors, PackedLayout.from_lengths([64], 64, device="cuda"))
    PackedLayout.from_lengths(torch.tensor([64], device="cuda"), 64)  # loading a kernel waits
    for lengths in ([20, 30], [1, 2, 3], [64]):
        on_device = torch.tensor(lengths, device="cuda")
        torch.cuda._sleep(1_000_000_000)
        packed = PackedLayout.from_lengths(on_device, 64)
        assert not torch.cuda.current_stream().query(), "building the layout must not wait"
        out = compiled(*tensors, packed)
        host = PackedLayout.from_lengths(lengths, 64, device="cuda")
        assert torch.equal(out, cuseq.varlen_attention(*tensors, host))


def test_graph_capture_takes_the_bound(cuda):
    tensors = inputs(64, 4, 2, 32, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.detach() for t in tensors)
    packed = PackedLayout.from_lengths([20, 30], 64, max_seqs=8, device="cuda")
    offsets = packed.cu_seqlens_static.clone()
    op(q, k, v, offsets, packed.host_meta, max_seqlen_bound=64)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(q, k, v, offsets, packed.host_meta, max_seqlen_bound=64)[0]
    for lengths in ([20, 30], [1, 2, 3], [64], []):
        other = PackedLayout.from_lengths(lengths, 64, max_seqs=8, device="cuda")
        offsets.copy_(other.cu_seqlens_static)
        graph.replay()
        torch.testing.assert_close(out, cuseq.varlen_attention(q, k, v, other))


def test_reduce_overhead_keeps_exact_lengths(cuda):
    def layer(q, k, v, packed):
        return cuseq.varlen_attention(q * 2, k, v, packed) + 1

    tensors = inputs(64, 4, 2, 32, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for lengths in ([20, 30], [1, 2, 3], [64], [5, 59], [64], [20, 30]) * 2:
        packed = PackedLayout.from_lengths(lengths, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*tensors, packed)
        expected = layer(*tensors, packed)
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad(out.sum(), tensors)
        for actual, wanted in zip(grads, torch.autograd.grad(expected.sum(), tensors), strict=True):
            torch.testing.assert_close(actual, wanted)


def test_second_gpu(second_gpu):
    tensors = inputs(64, 4, 2, 32, device=second_gpu, dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([20, 30], 64, device=second_gpu)
    assert torch.cuda.current_device() == 0
    check_against_reference(tensors, [20, 30], packed, bound=6e-3)
