"""Test varlen_attention with spans, whose tokens see each other in both directions."""

from __future__ import annotations

from collections import Counter

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import WINDOWS, Pack, masked_attention, masked_packs
from test_attention import inputs, relative
from test_masks import make_layout, spans_tensor
from test_no_sync import waits
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cuseq
from cuseq import PackedLayout

PACKS = [
    pytest.param(Pack([2, 3], 6, None, [(2, 5)]), id="tail"),
    pytest.param(Pack([6], 6, None, [(0, 4)]), id="prefix"),
    pytest.param(Pack([6], 6, None, [(0, 6)]), id="the whole sequence"),
    pytest.param(Pack([9], 9, None, [(1, 3), (3, 5), (7, 9)]), id="images"),
    pytest.param(Pack([4, 5], 9, None, [(1, 4), (1, 4), (5, 8), (5, 8), (5, 8)]), id="repeated"),
    pytest.param(Pack([1] * 6, 6, None, [(2, 3)]), id="one-token sequences"),
    pytest.param(Pack([0, 4, 0, 0, 2], 7, None, [(1, 4), (4, 6)]), id="zero-length sequences"),
    pytest.param(Pack([2, 3], 6, None, []), id="no spans"),
    pytest.param(Pack([], 3, None, []), id="only a tail"),
    pytest.param(Pack([], 0, None, []), id="no tokens"),
]


def by_loops(q, k, v, pack: Pack, *, scale: float | None = None, **options) -> Tensor:
    real = sum(pack.lengths)
    seen = reference.mask(pack.lengths, real, spans=pack.spans, **options).to(q.device)
    out = masked_attention(q[:real], k[:real], v[:real], seen, scale=scale)
    return torch.cat([out, q.new_zeros(q.shape[0] - real, q.shape[1], v.shape[2])])


def check_spans(tensors, pack: Pack, *, bound: float, as_tensor: bool = False, **options) -> None:
    """Check output and gradients against float64 loops, with NaN as the tail's gradient."""
    real, device = sum(pack.lengths), tensors[0].device
    packed = make_layout(pack, device)
    spans = spans_tensor(pack.spans, device) if as_tensor else pack.spans
    out = cuseq.varlen_attention(*tensors, packed, spans=spans, **options)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = by_loops(*exact, pack, **options)
    assert (out.shape, out.dtype) == (expected.shape, tensors[0].dtype)
    assert not out[real:].any(), "the tail of the output must be zero"
    assert relative(out, expected, expected) <= bound

    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    poisoned = grad.clone()
    poisoned[real:] = float("nan")
    grads = torch.autograd.grad(out, tensors, poisoned.to(out))
    # If no sequence has a token, the reference does not depend on its inputs at all.
    wanted = (
        torch.autograd.grad(expected, exact, grad.to(device))
        if real > 0
        else [torch.zeros_like(t) for t in exact]
    )
    for ours, right in zip(grads, wanted, strict=True):
        assert not ours[real:].any(), "the tail of a gradient must be zero"
        assert relative(ours, right, grad[:real]) <= 3 * bound


@pytest.mark.kernels
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 4}, {"causal": False, "window": 3}, {"causal": False}],
    ids=str,
)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_matches_reference(pack, options, as_tensor, device):
    tensors = inputs(pack.total_tokens, device=device, dtype=torch.float64)
    check_spans(tensors, pack, bound=1e-13, as_tensor=as_tensor, **options)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"causal": False}], ids=str)
def test_sequences_longer_than_a_tile(options, device):
    pack = Pack([130, 1, 99], 240, None, [(5, 99), (140, 220)])
    tensors = inputs(240, 2, 1, 16, device=device, dtype=torch.float64)
    check_spans(tensors, pack, bound=1e-13, **options)


@pytest.mark.parametrize("options", [{}, {"window": 7, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("heads,key_heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("dim,value_dim", [(16, 16), (300, 300), (24, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_and_dtypes(options, heads, key_heads, dim, value_dim, dtype, device):
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("bounds of 16 bits hold where products are summed in fp32")
    pack = Pack([5, 0, 40, 23], 70, None, [(1, 4), (10, 30), (50, 60)])
    tensors = inputs(70, heads, key_heads, dim, value_dim, device=device, dtype=dtype)
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}[dtype]
    check_spans(tensors, pack, bound=bound, **options)


@given(pack=masked_packs(), causal=st.booleans(), window=WINDOWS, as_tensor=st.booleans())
def test_any_pack(pack, causal, window, as_tensor):
    tensors = inputs(pack.total_tokens, 2, 1, 8, dtype=torch.float64)
    check_spans(tensors, pack, bound=1e-13, as_tensor=as_tensor, causal=causal, window=window)


def test_spans_in_any_order(device):
    tensors = inputs(9, device=device)
    packed = PackedLayout.from_lengths([9], device=device)
    one = cuseq.varlen_attention(*tensors, packed, spans=[(1, 3), (5, 8)])
    other = cuseq.varlen_attention(*tensors, packed, spans=((5, 8), (1, 3)))
    assert torch.equal(one, other)
    assert not torch.equal(one, cuseq.varlen_attention(*tensors, packed))


@pytest.mark.parametrize("none", [None, [], "tensor"], ids=str)
def test_no_spans(none, device):
    tensors = inputs(9, device=device)
    packed = PackedLayout.from_lengths([4, 3], 9, device=device)
    spans = spans_tensor([], device) if none == "tensor" else none
    out = cuseq.varlen_attention(*tensors, packed, spans=spans, window=2)
    torch.testing.assert_close(out, cuseq.varlen_attention(*tensors, packed, window=2))


def test_sequences_do_not_see_each_other(device):
    q, k, v = inputs(12, device=device)
    packed = PackedLayout.from_lengths([5, 7], 12, device=device)
    spans = [(1, 5), (5, 9)]
    before = cuseq.varlen_attention(q, k, v, packed, spans=spans)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[:5] = 7.0
    after = cuseq.varlen_attention(q, k, v, packed, spans=spans)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


def test_nothing_of_the_tail_is_read(device):
    """Values in the tail, even NaN, affect no output and no gradient."""
    pack = Pack([5, 4], 12, None, [(1, 4), (6, 9)])
    tensors = inputs(12, device=device, dtype=torch.float64)
    with torch.no_grad():
        for tensor in tensors:
            tensor[9:] = float("nan")
    packed = make_layout(pack, device)
    out = cuseq.varlen_attention(*tensors, packed, spans=pack.spans)
    exact = [t.detach().clone().requires_grad_() for t in tensors]
    expected = by_loops(*exact, pack)
    assert relative(out, expected, expected) <= 1e-13 and not out[9:].any()
    grads = torch.autograd.grad(out.square().sum(), tensors)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for ours, right in zip(grads, wanted, strict=True):
        assert relative(ours, right, right) <= 1e-12


def test_strided_inputs(device):
    fused = torch.randn(10, 8, 32, device=device)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    packed = PackedLayout.from_lengths([4, 5], 10, device=device)
    spans = [(1, 4), (4, 8)]
    expected = cuseq.varlen_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), packed, spans=spans
    )
    torch.testing.assert_close(cuseq.varlen_attention(q, k, v, packed, spans=spans), expected)
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    out = cuseq.varlen_attention(*transposed, packed, spans=spans)
    torch.testing.assert_close(out, expected)


def test_gradcheck(device):
    tensors = inputs(6, 2, 1, 8, dtype=torch.float64, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    for options in ({}, {"window": 2}, {"causal": False, "window": 1}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, options=options: cuseq.varlen_attention(
                q, k, v, packed, spans=[(2, 4)], **options
            ),
            tensors,
        )


def test_partial_gradients(device):
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    cuseq.varlen_attention(q, k, v, packed, spans=[(2, 5)]).sum().backward()
    alone = v.detach().clone().requires_grad_()
    cuseq.varlen_attention(q.detach(), k.detach(), alone, packed, spans=[(2, 5)]).sum().backward()
    assert torch.equal(alone.grad, v.grad)


def test_double_backward_raises(device):
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    out = cuseq.varlen_attention(q, k, v, packed, spans=[(2, 5)])
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="twice"):
        grad.sum().backward()


def test_an_edited_span_tensor(device):
    """Neither forward nor backward uses anything of the previous call."""
    tensors = inputs(9, device=device, dtype=torch.float64)
    packed = PackedLayout.from_lengths([9], device=device)
    spans = spans_tensor([(1, 4)], device)
    for end in (4, 6, 9):
        spans[0, 1] = end
        out = cuseq.varlen_attention(*tensors, packed, spans=spans)
        exact = [t.detach().clone().requires_grad_() for t in tensors]
        expected = by_loops(*exact, Pack([9], 9, None, [(1, end)]))
        assert relative(out, expected, expected) <= 1e-13
        grads = torch.autograd.grad(out.square().sum(), tensors)
        wanted = torch.autograd.grad(expected.square().sum(), exact)
        for ours, right in zip(grads, wanted, strict=True):
            assert relative(ours, right, right) <= 1e-12


def test_spans_edited_under_a_backward(device):
    """The gradient of other spans is never returned silently."""
    tensors = inputs(9, device=device)
    packed = PackedLayout.from_lengths([9], device=device)
    spans = spans_tensor([(1, 4)], device)
    out = cuseq.varlen_attention(*tensors, packed, spans=spans).sum()
    spans[0, 1] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_autocast_takes_the_dtype_of_the_region(device):
    dtype = torch.bfloat16
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    with torch.autocast(device.type, dtype=dtype):
        out = cuseq.varlen_attention(q, k, v.to(dtype), packed, spans=[(2, 5)])
    assert out.dtype == dtype
    cast = [t.to(dtype) for t in (q, k, v)]
    assert torch.equal(out, cuseq.varlen_attention(*cast, packed, spans=[(2, 5)]))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


WRONG = [
    (dict(spans=[(1, 3)]), "spans"),
    (dict(spans=[(5, 6)]), "spans"),
    (dict(spans=[(3, 3 - 1)]), "spans"),
    (dict(spans=[(2, 4), (3, 5)]), "spans"),
    (dict(spans=torch.tensor([[2, 4]])), "spans"),
    (dict(spans=torch.zeros(2, 3, dtype=torch.int32)), "spans"),
    (dict(spans=[(2, 4)], window=0), "window"),
    (dict(spans=[(2, 4)], q=torch.zeros(5, 4, 16)), "tokens"),
    (dict(spans=[(2, 4)], k=torch.zeros(6, 3, 16)), "heads"),
]


@pytest.mark.parametrize("change,message", WRONG)
def test_mistakes_are_named(change, message):
    call = dict(zip("qkv", inputs(6), strict=True), packed=PackedLayout.from_lengths([2, 3], 6))
    with pytest.raises((ValueError, TypeError), match=message):
        cuseq.varlen_attention(**{**call, **change})


class Calls(TorchDispatchMode):
    """Records every cuseq op that a call dispatches, with its arguments."""

    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cuseq":
            copies = torch.utils._pytree.tree_map_only(Tensor, torch.clone, (args, kwargs or {}))
            self.seen.append((func, *copies))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_opcheck(as_tensor, device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    spans = spans_tensor([(2, 5)], device) if as_tensor else [(2, 5)]
    tensors = inputs(6, device=device)
    with Calls() as calls:
        cuseq.varlen_attention(*tensors, packed, spans=spans, window=2).sum().backward()
    names = [func._schema.name for func, _, _ in calls.seen]
    assert any("attention" in name for name in names)
    for func, args, kwargs in calls.seen:
        is_backward = "backward" in func._schema.name
        if "attention" in func._schema.name and not is_backward:
            args, kwargs = torch.utils._pytree.tree_map_only(
                Tensor,
                lambda t: t.requires_grad_() if t.is_floating_point() else t,
                (args, kwargs),
            )
        with torch.set_grad_enabled(not is_backward):
            opcheck(func, args, kwargs)


def check_one_graph(device, **options) -> None:
    def layer(q, k, v, packed, spans):
        return cuseq.varlen_attention(q * 2, k, v, packed, spans=spans, window=2).sin()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, **options)
    tensors = inputs(9, device=device)
    for lengths, pairs in (
        ([4, 5], [(0, 3), (5, 8)]),
        ([9], [(1, 4), (4, 9)]),
        ([2, 2, 2], [(0, 2), (4, 6)]),
        ([0, 8], [(2, 6), (6, 7)]),
    ):
        packed = PackedLayout.from_lengths(lengths, 9, device=device)
        spans = spans_tensor(pairs, device)
        out, expected = compiled(*tensors, packed, spans), layer(*tensors, packed, spans)
        torch.testing.assert_close(out, expected)
        exact = by_loops(
            *(t.detach().double() for t in (tensors[0] * 2, *tensors[1:])),
            Pack(lengths, 9, None, pairs),
            window=2,
        ).sin()
        assert relative(out, exact, exact) <= 2e-6
        for ours, wanted in zip(
            torch.autograd.grad(out.sum(), tensors),
            torch.autograd.grad(expected.sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(ours, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_for_all_packs(dynamic, device):
    check_one_graph(device, backend="aot_eager", dynamic=dynamic)


def test_one_graph_of_inductor(cuda):
    check_one_graph(cuda, dynamic=False)


def test_a_list_of_spans_is_refused_in_compiled_code(device):
    """Their values would become part of the graph: one compile for each pack."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, packed: cuseq.varlen_attention(q, k, v, packed, spans=[(1, 4)]),
        fullgraph=True,
        backend="aot_eager",
    )
    packed = PackedLayout.from_lengths([4, 5], device=device)
    with pytest.raises(Exception, match="spans must be an int32 tensor"):
        compiled(*inputs(9, device=device), packed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(device, reentrant):
    q, k, v = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)

    def attend(q, k, v):
        return cuseq.varlen_attention(q, k, v, packed, spans=[(2, 5)])

    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    checkpoint(attend, q, k, v, use_reentrant=reentrant).sum().backward()
    for tensor, wanted in zip((q, k, v), expected, strict=True):
        assert torch.equal(tensor.grad, wanted)


# Only a GPU shows these.


@pytest.mark.parametrize("dim", [64, 300])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_host_lengths_do_not_wait(dim, as_tensor, cuda, fresh_cache):
    tensors = inputs(64, 4, 2, dim, device=cuda, dtype=torch.bfloat16)
    on_device = spans_tensor([(2, 5), (30, 50)], cuda)

    def body():
        packed = PackedLayout.from_lengths([20, 0, 40], 64).to(cuda)
        spans = on_device if as_tensor else [(2, 5), (30, 50)]
        out = cuseq.varlen_attention(*tensors, packed, spans=spans, window=9)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    assert waits(body) == Counter()


def test_device_lengths_wait_once(cuda, fresh_cache):
    tensors = inputs(64, 4, 2, 64, device=cuda, dtype=torch.bfloat16)
    lengths, spans = torch.tensor([20, 40], device=cuda), spans_tensor([(2, 5)], cuda)

    def body():
        packed = PackedLayout.from_lengths(lengths, 64)
        out = cuseq.varlen_attention(*tensors, packed, spans=spans)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    # For the layout's copy, and for the offsets that a loop over sequences needs.
    waited = waits(body)
    assert set(waited) <= {"cudaEventSynchronize"} and waited.total() <= 2


def test_no_memory_of_tokens_times_tokens(cuda, fresh_cache):
    total, length = 65_536, 256
    tensors = inputs(total, 2, 1, 64, device=cuda, dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([length] * (total // length), device=cuda)
    spans = [(i, i + 100) for i in range(0, total, length)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = cuseq.varlen_attention(*tensors, packed, spans=spans)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    # A bit per pair of tokens would be 512 MiB, and a mask for each sequence in bf16 32 MiB.
    assert torch.cuda.max_memory_allocated() - before <= 400 * 2**20


@pytest.mark.kernels
def test_values_of_the_device_stay_inside_the_row(cuda):
    tensors = inputs(64, 4, 2, 32, device=cuda, dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([20, 30], 64, device=cuda)
    for lie in ([(-5, 80)], [(30, 3)], [(2**31 - 1, -(2**31))], [(10, 30), (5, 64)]):
        out = cuseq.varlen_attention(*tensors, packed, spans=spans_tensor(lie, cuda))
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        torch.cuda.synchronize()


def test_second_gpu(second_gpu):
    pack = Pack([20, 30], 64, None, [(3, 9), (25, 45)])
    tensors = inputs(64, 4, 2, 32, device=second_gpu, dtype=torch.float32)
    assert torch.cuda.current_device() == 0
    check_spans(tensors, pack, bound=2e-6)


@pytest.mark.parametrize("spans", [None, [(3, 9)]], ids=["no spans", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, dict(window=4, causal=False)], ids=["causal", "window"])
def test_rows_that_start_off_alignment(options, dtype, spans, cuda):
    wide = torch.randn(40, 3 * 2 * 8 + 1, device=cuda, dtype=dtype)[:, 1:].unflatten(1, (6, 8))
    q, k, v = (t.detach().requires_grad_() for t in wide.split(2, dim=1))
    packed = PackedLayout.from_lengths([30, 5], 40, device=cuda)
    # bf16 without spans runs on flash, fp32 on the memory-efficient kernel or one by one.
    out = cuseq.varlen_attention(q, k, v, packed, spans=spans, **options)
    whole = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    expected = cuseq.varlen_attention(*whole, packed, spans=spans, **options)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.sum(), whole)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_backward_after_its_scope_does_not_wait(cuda, fresh_cache):
    tensors = inputs(64, device=cuda)
    packed = PackedLayout.from_lengths([30, 20], 64).to(cuda)

    def body():
        with cuseq.cache.forward_scope():
            loss = cuseq.varlen_attention(*tensors, packed, spans=[(2, 9)]).sum()
        loss.backward()

    body()
    cuseq.cache.clear()
    assert waits(body) == Counter()


def test_a_window_to_both_sides_does_not_wait(cuda, fresh_cache):
    tensors = inputs(64, device=cuda, dtype=torch.float32)
    packed = PackedLayout.from_lengths([30, 20], 64).to(cuda)

    def body():
        cuseq.varlen_attention(*tensors, packed, window=4, causal=False).sum().backward()

    body()
    cuseq.cache.clear()
    assert waits(body) == Counter()


def test_host_meta_of_another_layout_is_refused(cuda):
    one = PackedLayout.from_lengths([9], 9).to(cuda)
    other = PackedLayout.from_lengths([1] * 9, 9).to(cuda)
    tensors = inputs(9, device=cuda)
    cuseq.varlen_attention(*tensors, one, spans=[(0, 2)])
    spans = spans_tensor([(0, 2)], cuda)
    with pytest.raises(ValueError, match="host_meta must be of the layout"):
        torch.ops.cuseq.varlen_attention(
            *tensors, one.cu_seqlens_static, other.host_meta, spans=spans
        )


def test_long_sequences_have_masks_of_runs(cuda):
    total = 32_768
    packed = PackedLayout.from_lengths([total]).to(cuda)
    tensors = inputs(total, heads=1, key_heads=1, device=cuda, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cuseq.varlen_attention(*tensors, packed, spans=[(5, 9)]).sum().backward()
    # A whole mask would take 2 GiB.
    assert torch.cuda.max_memory_allocated() - before < 512 * 2**20
