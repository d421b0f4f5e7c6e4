"""Every backend that a GPU has: values, gradients, and every way that PyTorch runs it.

FlashAttention 3 and 4 are skipped where they are not installed.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention as reference_attention
from reference import mask as reference_mask
from test_attention import PACKS, check_against_reference, inputs, relative
from torch import Tensor

from cuseq import (
    _C,
    GraphedStep,
    PackedLayout,
    attention_backend,
    varlen_attention,
)
from cuseq.attention import choice as _choice
from cuseq.attention import fa4 as _fa4
from cuseq.attention import flex as _flex
from cuseq.attention.table import read_table
from cuseq.layout import StaticLayout

NAMES = ("auto", "flash", "cudnn", "fa4", "fa3", "flex", "efficient", "segments")
HALF = 6e-3  # error of bf16, relative


@pytest.fixture(params=NAMES)
def name(request, cuda) -> str:
    """Return each backend that is installed."""
    _choice.load_backends()
    if request.param in (*_choice.PACKAGES, "cudnn"):
        packed = PackedLayout.from_lengths([64], device=cuda)
        tensors = inputs(64, dim=64, device=cuda, dtype=torch.bfloat16)
        try:
            attention_backend(*tensors, packed, backend=request.param)
        except ValueError as missing:
            pytest.skip(str(missing))
    return request.param


def packed_inputs(lengths, tokens, *heads, dtype=torch.bfloat16, tail=0.0, **options):
    tensors = inputs(tokens, *heads, device="cuda", dtype=dtype, **options)
    with torch.no_grad():
        for tensor in tensors:
            tensor[sum(lengths) :] = tail
    return tensors, PackedLayout.from_lengths(lengths, tokens, device="cuda")


def check_with_any_tail(lengths, tokens, *heads, options, bound=HALF, **draw) -> None:
    """Compare with the reference; the tail holds NaN, in the inputs and in what comes back."""
    tensors, packed = packed_inputs(lengths, tokens, *heads, tail=math.nan, **draw)
    real = sum(lengths)
    out = varlen_attention(*tensors, packed, **options)
    named = {n: o for n, o in options.items() if n != "backend"}
    exact = [t.detach()[:real].double().cpu().requires_grad_() for t in tensors]
    expected = reference_attention(*exact, lengths, **named)
    assert out.is_contiguous() and not out[real:].any()
    assert relative(out[:real], expected, expected) <= bound
    grad = torch.randn(out.shape, dtype=torch.float64)
    poisoned = grad.clone()
    poisoned[real:] = math.nan
    grads = torch.autograd.grad(out, tensors, poisoned.to(out))
    if not real:
        return
    wanted = torch.autograd.grad(expected, exact, grad[:real])
    for actual, right in zip(grads, wanted, strict=True):
        assert not actual[real:].any()
        assert relative(actual[:real], right, grad[:real]) <= 3 * bound


def takes(name: str, tensors, packed: PackedLayout, **options) -> bool:
    try:
        attention_backend(*tensors, packed, backend=name, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 3}, {"causal": False, "window": 4}], ids=str
)
def test_every_backend_matches_the_reference(name, lengths, tokens, options):
    options = {"backend": name, **options}
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 64)
    if not takes(name, tensors, packed, **{n: o for n, o in options.items() if n != "backend"}):
        pytest.skip("another backend runs this")
    check_with_any_tail(lengths, tokens, 4, 2, 64, options=options)


@pytest.mark.parametrize("dim,value_dim", [
    (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192),
    (256, 256), (512, 512),
])  # fmt: skip
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_every_backend_with_every_head_dim(name, dim, value_dim, heads, options):
    if name == "flex" and dim not in (40, 128, 192, 256, 512):
        pytest.skip("every head_dim takes seconds to compile")
    if name == "flex" and dim > 256:
        skip_without_wide_flex()
    lengths, tokens = [300, 1, 0, 129, 77], 520
    tensors, packed = packed_inputs(lengths, tokens, *heads, dim, value_dim)
    if not takes(name, tensors, packed, **options):
        pytest.skip("another backend runs this")
    options = {"backend": name, **options}
    check_with_any_tail(lengths, tokens, *heads, dim, value_dim, options=options)


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 512])
def test_query_heads_of_every_group_share_a_key_head_of_the_efficient_kernel(heads, dim, cuda):
    """It runs once for each key head, or once for each query head of a group."""
    options = {"backend": "efficient"}
    check_with_any_tail([300, 1, 0, 129], 440, *heads, dim, options=options)
    check_with_any_tail([90, 0, 300], 400, *heads, dim, options=options | {"causal": False})


def test_the_efficient_kernel_does_not_repeat_keys_and_values(cuda):
    q = torch.randn(4096, 16, 64, device=cuda)
    k, v = (torch.randn(4096, 1, 64, device=cuda) for _ in range(2))
    packed = PackedLayout.from_lengths([1000, 3000], 4096, device=cuda)
    varlen_attention(q, k, v, packed, backend="efficient")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    varlen_attention(q, k, v, packed, backend="efficient")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * q.nbytes, peak / q.nbytes  # the output; as many key heads would take 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_backend_with_other_dtypes(name, dtype):
    lengths, tokens = [300, 1, 0, 129], 440
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 64, dtype=dtype)
    if not takes(name, tensors, packed):
        pytest.skip("another backend runs this")
    bound = 1.5e-3 if dtype == torch.float16 else 1e-5
    check_with_any_tail(
        lengths, tokens, 4, 2, 64, options={"backend": name}, dtype=dtype, bound=bound
    )


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 310),
)
def test_any_pack(name, lengths, causal, window):
    tokens = max(sum(lengths), 1)
    tokens += -tokens % 512  # few shapes, since flex compiles each
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 64)
    options = {"causal": causal, "window": window}
    if takes(name, tensors, packed, **options):
        check_with_any_tail(lengths, tokens, 4, 2, 64, options={"backend": name, **options})


def test_every_backend_at_the_size_of_a_model(name):
    lengths = [700, 1, 90, 1300, 0, 900, 2048]
    check_with_any_tail(lengths, 5120, 16, 8, 128, options={"backend": name})


@pytest.mark.parametrize("multiple", [1, 16])
def test_every_backend_with_sinks(name, multiple):
    lengths = [200, 0, 170]
    tensors, _ = packed_inputs(lengths, 400, 4, 2, 64)
    packed = PackedLayout.from_lengths(lengths, 400, segment_multiple=multiple, device="cuda")
    pads = packed.moe_padding_mask
    with torch.no_grad():
        for tensor in tensors:
            tensor[pads] = math.nan
    sinks = torch.randn(4, device="cuda", requires_grad=True)

    def run(backend: str) -> list[Tensor]:
        out = varlen_attention(*tensors, packed, sinks=sinks, backend=backend)
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
        grads = torch.autograd.grad((out.float() * weight).sum(), (*tensors, sinks))
        assert not any(rows[pads].any() for rows in (out, *grads[:3]))
        return [out, *grads]

    for found, expected in zip(run(name), run("segments"), strict=True):
        assert relative(found, expected, expected) < 2e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_every_backend_under_checkpointing(name, reentrant):
    tensors, packed = packed_inputs([200, 100], 320, 4, 2, 64)

    def layer(q, k, v):
        return varlen_attention(q, k, v, packed, backend=name)

    expected = torch.autograd.grad(layer(*tensors).sum(), tensors)
    torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=reentrant).sum().backward()
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert relative(tensor.grad, wanted, wanted) < 1e-2


def test_every_backend_in_compiled_code(name):
    """One graph serves all packs."""
    window = None if name == "cudnn" else 70

    def layer(q, k, v, packed, backend=name):
        return varlen_attention(q * 2, k, v, packed, window=window, backend=backend) * 2

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    for lengths in ([100, 200], [300], [10] * 20, []):
        tensors, packed = packed_inputs(lengths, 300, 4, 2, 64)
        out, expected = compiled(*tensors, packed), layer(*tensors, packed, "segments")
        assert relative(out, expected, expected) < 1e-2
        found = torch.autograd.grad(out.sum(), tensors)
        wanted = torch.autograd.grad(expected.sum(), tensors)
        for one, other in zip(found, wanted, strict=True):
            assert relative(one, other, other) < 2e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_every_backend_without_host_lengths(name):
    """Offsets alone, as in a capture: the last one is known to the device."""
    if name in ("flex", "segments"):
        pytest.skip("it does not run from offsets on the device")
    lengths, tokens = [200, 0, 170], 400
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 64, tail=math.nan)
    for offsets in (packed.cu_seqlens, packed.cu_seqlens_static[:65]):
        out = torch.ops.cuseq.varlen_attention(*tensors, offsets, None, backend=name)[0]
        grads = torch.autograd.grad(out.sum(), tensors)
        expected = varlen_attention(*tensors, packed, backend="segments")
        wanted = torch.autograd.grad(expected.sum(), tensors)
        for one, other in zip((out, *grads), (expected, *wanted), strict=True):
            assert one.isfinite().all() and relative(one, other, other) < 1e-2


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_every_backend_in_a_captured_graph(name, with_sinks, multiple):
    if name == "segments":
        pytest.skip("it needs offsets on the host")
    tensors, _ = packed_inputs([400], 400, 4, 2, 64)
    sinks = torch.randn(4, device="cuda", requires_grad=True) if with_sinks else None
    leaves = [*tensors, sinks] if with_sinks else tensors

    def layout(lengths):
        options = {"segment_multiple": multiple, "max_seqs": 8, "device": "cuda"}
        return PackedLayout.from_lengths(lengths, 400, **options)

    packed = layout([200, 0, 170])

    def step():
        out = varlen_attention(*tensors, packed, sinks=sinks, backend=name)
        # A graph that lives on would tie the gradients of the leaves to the stream of its making.
        return out.detach(), *torch.autograd.grad(out.sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [t.clone() for t in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other, other) < 1e-2
    for lengths in ([400], [1, 0, 380], [48] * 8, [33, 31]):
        other_row = layout(lengths)
        packed.copy_(other_row)
        graph.replay()
        out = varlen_attention(*tensors, other_row, sinks=sinks, backend="segments")
        expected = out, *torch.autograd.grad(out.sum(), leaves)
        for one, other in zip(found, expected, strict=True):
            assert relative(one, other, other) < 1e-2


def test_backends_mix_in_one_model(cuda):
    """Layers under one backward, each with another backend, leave the process as it was."""
    tensors, packed = packed_inputs([200, 0, 170], 400, 4, 2, 64)
    names = [name for name in NAMES[1:] if takes(name, tensors, packed)]

    def stack(backends):
        out = tensors[0]
        for backend in backends:
            out = varlen_attention(out, *tensors[1:], packed, backend=backend)
        return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]

    assert "flash" in names
    before = stack(["flash"] * len(names))
    for one, other in zip(stack(names), before, strict=True):
        assert relative(one, other, other) < 2e-2
    assert all(map(torch.equal, stack(["flash"] * len(names))[:1], before[:1]))


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"causal": False}], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)], ids=str)
def test_kernels_launched_directly_are_those_of_the_package(fa4, options, heads):
    tensors, packed = packed_inputs([300, 0, 129, 77], 520, *heads, 64)

    def run():
        out = varlen_attention(*tensors, packed, backend="fa4", **options)
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    _fa4.recorded.clear()
    _fa4._tries.clear()
    for _ in range(2):  # the first compiles
        run()
    direct = run()
    if torch.cuda.get_device_capability()[0] == 9:
        assert [kind[0] for kind in _fa4.recorded] == ["_flash_attn_fwd", "_flash_attn_bwd"]
    with _fa4.through_the_package():
        expecteds = run()
    for found, expected in zip(direct, expecteds, strict=True):
        assert relative(found, expected, expected) < 1e-3  # sums in another order


# Tokens of each pair's queries and keys, and of the rows in front of the first pair.
PAIRS = {
    "a tree's calls": ([200, 0, 300, 0, 1], [0, 140, 0, 200, 0], (0, 0)),
    "queries with a prefix": ([100, 257, 1, 64], [300, 300, 1, 65], (0, 0)),
    "fewer keys than queries": ([130, 64, 300], [5, 0, 129], (7, 130)),
    "pairs without tokens": ([0, 90, 0, 0], [0, 150, 0, 40], (33, 0)),
    "one long prompt": ([2000], [700], (300, 0)),
}


@pytest.mark.parametrize(
    "mask", [{"causal": False}, {"causal": True}, {"causal": True, "window": 70}], ids=str
)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_two_rows_over_flash_attention_4(fa4, name, dim, heads, mask):
    """Both launches, with logsumexps of another call as merges have them."""
    lengths_q, lengths_k, first = PAIRS[name]
    ends = [start + sum(n) for start, n in zip(first, (lengths_q, lengths_k), strict=True)]
    q, k, v = (torch.randn(ends[i > 0], heads[i > 0], dim, device="cuda") for i in range(3))
    q, k, v = (t.bfloat16() for t in (q, k, v))
    offsets = [
        torch.tensor([start, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        for start, n in zip(first, (lengths_q, lengths_k), strict=True)
    ]
    causal, window = mask["causal"], mask.get("window")
    away = (torch.arange(offsets[0][-1]), torch.arange(offsets[1][-1]))
    seen = torch.zeros(ends[0], ends[1], dtype=torch.bool)
    for (a, b), (c, d) in zip(
        *(list(zip(o[:-1].tolist(), o[1:].tolist(), strict=True)) for o in offsets), strict=True
    ):
        behind = (away[0][a:b] - b).unsqueeze(1) - (away[1][c:d] - d)
        seen[a:b, c:d] = behind >= 0 if causal else True
        if window is not None:
            seen[a:b, c:d] &= behind < window
    seen = seen.cuda()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    groups = heads[0] // heads[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in wide[1:])
    scores = torch.einsum("qhd,khd->hqk", wide[0], keys) * dim**-0.5
    scores = scores.masked_fill(~seen, -math.inf)
    # Each query sees a weight of e^0 elsewhere besides.
    elsewhere = torch.zeros(heads[0], ends[0], 1, device="cuda", dtype=torch.float64)
    merged = torch.cat([scores, elsewhere], 2).logsumexp(2)
    weights = (scores - merged.unsqueeze(2)).exp()
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    grad = torch.randn_like(expected).bfloat16()
    wanted = torch.autograd.grad(expected, wide, grad.double())
    alone = scores.logsumexp(2).detach()

    rest = (
        *offsets, max(lengths_q), max(lengths_k), dim**-0.5, causal,
        None if window is None else window - 1, None if window is None else 0,
    )  # fmt: skip
    has_keys = seen.any(1)
    own = torch.zeros(ends[0], dtype=torch.bool, device="cuda")
    own[first[0] :] = True
    own_keys = torch.zeros(ends[1], dtype=torch.bool, device="cuda")
    own_keys[first[1] :] = True

    def run():
        out = torch.full_like(q, math.nan)
        logsumexp = torch.full((heads[0], ends[0]), math.nan, device="cuda")
        torch.ops.cuseq.fa4_forward(q, k, v, out, logsumexp, *rest, True)
        assert torch.equal(logsumexp[:, own] == -math.inf, (~has_keys[own]).expand(heads[0], -1))
        torch.testing.assert_close(
            logsumexp[:, has_keys].double(), alone[:, has_keys], atol=2e-3, rtol=1e-3
        )
        own_out = torch.einsum("hqk,khd->qhd", scores.softmax(2).nan_to_num(), values).detach()
        assert relative(out[has_keys], own_out[has_keys], own_out) < HALF
        grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
        joined = expected.detach().bfloat16()
        torch.ops.cuseq.fa4_backward(
            grad, q, k, v, joined, merged.detach().float().contiguous(), *grads, *rest, True
        )
        for found, one, kept in zip(grads, wanted, (own, own_keys, own_keys), strict=True):
            if kept.any():
                assert relative(found[kept], one[kept], one) < 2 * HALF

    run()
    run()
    with _fa4.through_the_package():
        run()


@pytest.mark.parametrize("options", [
    {"softcap": 5.0}, {"softcap": 5.0, "window": 100}, {"spans": [(10, 200), (310, 330)]},
    {"spans": [(10, 200)], "window": 50}, {"causal": False, "window": 60},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_is_what_segments_are(cuda, options, compiled):
    lengths, tokens = [300, 0, 229, 77], 700
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 64)
    torch._dynamo.reset()

    def run(backend):
        def layer(q, k, v, spans):
            more = {} if spans is None else {"spans": spans}
            return varlen_attention(q, k, v, packed, **others, **more, backend=backend)

        others = {n: o for n, o in options.items() if n != "spans"}
        spans = options.get("spans")
        if spans is not None:
            spans = torch.tensor(spans, dtype=torch.int32, device="cuda")
        call = torch.compile(layer, fullgraph=True) if compiled and backend == "flex" else layer
        out = call(*tensors, spans)
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    for found, expected in zip(run("flex"), run("segments"), strict=True):
        assert relative(found, expected, expected) < 2e-2


def test_spans_of_flex_are_those_of_the_mask(cuda):
    """Beside segments: the scores are hidden where the mask of the specification says so."""
    lengths, tokens, spans = [300, 200], 512, [(10, 200)]
    tensors, packed = packed_inputs(lengths, tokens, 2, 2, 64)
    out = varlen_attention(*tensors, packed, spans=spans, backend="flex")
    seen = reference_mask(lengths, tokens, spans=spans).cuda()
    q, k, v = (t.detach().double() for t in tensors)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 64**-0.5
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    assert relative(out[:500], expected[:500], expected[:500]) < HALF


def test_eager_flex_is_compiled_once_for_all_packs(cuda):
    _flex._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    for lengths, softcap, window in (([300, 200], 5.0, None), ([512], 7.0, 60), ([9] * 50, 3.0, 9)):
        tensors, packed = packed_inputs(lengths, 512, 4, 2, 64)
        options = {"softcap": softcap, "window": window, "backend": "flex"}
        varlen_attention(*tensors, packed, **options).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_eager_flex_takes_any_number_of_lengths_of_the_row(cuda):
    """Dynamo bounds how often it compiles one function; other calls must not use that up."""
    _flex._compiled.cache_clear()
    for tokens in (512, 513, 640, 700, 800, 901, 1024):
        check_with_any_tail([tokens - 9], tokens, 2, 1, 32, options={"backend": "flex"})


def test_auto_takes_flex_for_soft_caps(cuda):
    tensors, packed = packed_inputs([300, 200], 512, 4, 2, 64)
    assert attention_backend(*tensors, packed, softcap=5.0).name == "flex"
    assert attention_backend(*tensors, packed).name != "flex"
    short, few = packed_inputs([30], 32, 4, 2, 64)
    assert attention_backend(*short, few, softcap=5.0).name == "segments"


def skip_without_wide_flex() -> None:
    wide = torch.empty(8, 1, 512, device="cuda", dtype=torch.bfloat16)
    if obstacle := _flex.obstacle(wide, wide):
        pytest.skip(obstacle)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_auto_takes_flex_for_wide_heads_where_it_was_measured_faster(cuda, compiled, monkeypatch):
    """Gemma 4's layers of head_dim 512: no flash kernel takes them."""
    skip_without_wide_flex()
    _choice.load_backends()
    major, minor = torch.cuda.get_device_capability()
    mode = "compiled" if compiled else "eager"
    facts = (10 * major + minor, True, 512, "causal", 0, mode, 1024, 3)
    lengths, tokens = [300, 0, 229, 477], 1024
    tensors, packed = packed_inputs(lengths, tokens, 4, 2, 512)
    monkeypatch.setattr(_choice, "_BY_THE_OP", NO_OTHER_BACKEND)
    torch._dynamo.reset()
    try:
        _C.set_measured_attention([(facts, {"efficient": 9.0, "flex": 2.0})])
        if not compiled:
            assert attention_backend(*tensors, packed).name == "flex"
            wider, row = packed_inputs([300], 512, 2, 1, 520)
            assert attention_backend(*wider, row).name == "efficient"
        layer = torch.compile(varlen_attention, fullgraph=True) if compiled else varlen_attention
        out = layer(*tensors, packed)
        grads = torch.autograd.grad(out.float().square().sum(), tensors)
    finally:
        _C.set_measured_attention(read_table())
    exact = [t.detach()[: sum(lengths)].double().cpu().requires_grad_() for t in tensors]
    expected = reference_attention(*exact, lengths)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    assert relative(out[: sum(lengths)], expected, expected) < HALF
    for found, right in zip(grads, wanted, strict=True):
        assert relative(found[: sum(lengths)], right, right) < 2e-2
        assert not found[sum(lengths) :].any()


def test_rows_that_are_not_3d_are_named(cuda):
    packed = PackedLayout.from_lengths([8], device=cuda)
    flat = torch.zeros(8, 64, device=cuda, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q must"):
        varlen_attention(flat, flat, flat, packed)


@pytest.mark.parametrize("tokens", [8, 16, 127])
def test_flex_with_wide_heads_and_few_tokens(cuda, tokens):
    skip_without_wide_flex()
    check_with_any_tail([3, tokens - 5], tokens, 8, 1, 512, options={"backend": "flex"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_flex_with_the_tiles_of_gpus_with_less_shared_memory(cuda, dims, dtype, monkeypatch):
    monkeypatch.setattr(_flex, "shared_memory", lambda device: 99 * 1024)
    monkeypatch.setattr(_flex, "_compiled", _flex._compiled.__wrapped__)  # no kernels of others
    monkeypatch.setattr(_flex, "_sizes", {})
    bound = HALF if dtype == torch.bfloat16 else 1e-5
    options = {"backend": "flex"}
    check_with_any_tail(
        [300, 1, 0, 129], 440, 4, 2, *dims, options=options, dtype=dtype, bound=bound
    )


def refuse_other_backends(*args: Any) -> Tensor:
    raise AssertionError("the op of the other backends was called instead of flex attention")


NO_OTHER_BACKEND = _choice.Route("", "", refuse_other_backends)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"causal": False}], ids=str)
def test_a_graphed_step_takes_flex_where_captures_measured_it_faster(
    options, compiled, cuda, monkeypatch
):
    major, minor = torch.cuda.get_device_capability()
    _choice.load_backends()
    facts = (10 * major + minor, True, 64, "causal", 0, "captured", 1024, 128)
    _C.set_measured_attention([(facts, {"flash": 2.0, "fa4": 2.0, "flex": 1.0})])
    try:
        drawn = torch.Generator(device="cuda").manual_seed(0)
        rows = [torch.randn(1024, 4, 64, generator=drawn, device="cuda") for _ in range(3)]
        parameters = [torch.nn.Parameter(row.bfloat16()) for row in rows]

        def attend(packed: PackedLayout) -> Tensor:
            return varlen_attention(*parameters, packed, **options)

        run = torch.compile(attend, fullgraph=True) if compiled else attend
        optimizer = torch.optim.SGD(parameters, lr=0.0, fused=True)
        packs = [[500, 0, 500], [1024], [7] * 100, [300, 200], [1, 1000]]
        layouts = [PackedLayout.from_lengths(pack, 1024, max_seqs=128) for pack in packs]
        step = GraphedStep(
            lambda batch: run(batch["packed"]).square().sum(), optimizer, {"packed": layouts[0]}
        )
        static = StaticLayout.like(layouts[0].to("cuda"), torch.device("cuda"))
        assert attention_backend(*parameters, static, **options).name == "flex"
        for layout in layouts:
            with monkeypatch.context() as patched:
                patched.setattr(_choice, "_BY_THE_OP", NO_OTHER_BACKEND)
                loss = step({"packed": layout})
            found = [parameter.grad.clone() for parameter in parameters]
            plain = [parameter.detach().clone().requires_grad_() for parameter in parameters]
            packed = layout.to("cuda")
            expected = varlen_attention(*plain, packed, backend="flash", **options)
            expected = expected.square().sum()
            expected.backward()
            assert relative(loss, expected, expected) < 1e-2
            for one, other in zip(found, plain, strict=True):
                assert relative(one, other.grad, other.grad) < 2e-2
        assert step.captured, step.reason
    finally:
        _C.set_measured_attention(read_table())


def test_auto_is_level_with_the_best_of_the_table(cuda):
    """Replay the measurements: auto is within 5 % of the best backend at every row."""
    _choice.load_backends()
    major, minor = torch.cuda.get_device_capability()
    rows = [row for row in read_table() if row[0][0] == 10 * major + minor]
    if not rows:
        pytest.skip("nothing was measured on such a GPU")
    for facts, times in rows:
        _, half, dim, mask, window, mode, tokens, sequences = facts
        if mode != "eager":
            continue
        each = tokens // sequences
        lengths = [each] * (sequences - 1) + [tokens - each * (sequences - 1)]
        packed = PackedLayout.from_lengths(lengths, device="cuda")
        dtype = torch.bfloat16 if half else torch.float32
        q = torch.empty(tokens, 2, dim, dtype=dtype, device="cuda")
        options = {
            "causal": mask not in ("full", "two_sided"),
            "window": window or None,
            "softcap": 30.0 if mask == "softcap" else None,
            "spans": [(0, min(8, lengths[0]))] if mask == "spans" else None,
        }
        found = attention_backend(q, q, q, packed, **options).name
        # Eager code chooses flex for these alone.
        with_flex = mask in ("spans", "two_sided", "softcap") or dim > 256
        there = {
            one: us
            for one, us in times.items()
            if takes(one, (q, q, q), packed, **options) and (one != "flex" or with_flex)
        }
        assert times[found] <= 1.05 * min(there.values()), (facts, found)


def test_deterministic_mode_runs_the_same_numbers_twice(cuda):
    tensors, packed = packed_inputs([300, 200], 512, 4, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_backend(*tensors, packed).name not in (*_choice.PACKAGES, "cudnn")

        def run():
            return torch.autograd.grad(varlen_attention(*tensors, packed).sum(), tensors)

        assert all(map(torch.equal, run(), run()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_closest_row_of_this_gpu_exists(cuda):
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip("only H100 and H200 were measured")
    _choice.load_backends()
    facts = (90, True, 128, "causal", 0, "eager", 8192, 16)
    assert _C.closest_measured_attention(facts)


def test_the_second_gpu(name, second_gpu):
    tensors = [
        t.detach().to(second_gpu).requires_grad_()
        for t in inputs(300, 4, 2, 64, dtype=torch.bfloat16)
    ]
    packed = PackedLayout.from_lengths([100, 190], 300, device=second_gpu)
    check_against_reference(tensors, [100, 190], packed, bound=HALF, tail=1e3, backend=name)
