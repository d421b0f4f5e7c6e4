"""Test ops under torch.compile, export, opcheck and tracing modes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference
import torch
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import cuseq

ops = torch.ops.cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def ints(device, values, dtype=None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def lengths_cases(d, *rest):
    return [
        (ints(d, [2, 3]), *rest),
        (ints(d, [2, 0, 3], torch.int32), *rest),
        (ints(d, [[2, 9], [3, 9]])[:, 0], *rest),
        (ints(d, [], torch.int64), *rest),
    ]


def masks(d):
    return [
        *lengths_cases(d, 6),
        (ints(d, [0, 2, 5], torch.int32), 6, True, False, 2, ints(d, [[2, 4]], torch.int32)),
        (ints(d, [2, 2]), 4, False, True, None, None, None, 2, torch.bfloat16, True),
        (ints(d, [], torch.int64), 0, False, True, None, None, None, None, torch.float64),
    ]


def convolutions(d, trained=True):
    """Return arguments that end with whether the final states are asked for."""
    offsets, padded = ints(d, [0, 2, 5], torch.int32), ints(d, [0, 4, 8], torch.int32)
    rows, weight, bias = (torch.randn(s, device=d) for s in ((9, 3), (3, 4), (3,)))
    states = torch.randn(2, 3, 3, device=d)
    turned = rows.t().contiguous().t()
    seq_idx = ints(d, [[0, 0, 1, 1, -1], [0, 1, 1, 2, 2]], torch.int32)
    batch = torch.randn(2, 3, 5, device=d).transpose(1, 2)
    for tensor in (turned, bias, batch):
        tensor.requires_grad_(trained)
    return [
        (rows, weight, None, None, None, None, None, False, False),
        (turned, weight, bias, offsets, padded, None, states, True, True),
        (batch, weight, bias, None, None, seq_idx, None, True, False),
        (rows.bfloat16(), weight[:, :2], bias, offsets, None, None, None, False, False),
    ]


def heads(d):
    """Return arguments of token_logprobs."""
    targets = ints(d, [0, 8, -100, 3])
    hidden, weight, bias = (torch.randn(s, device=d) for s in ((4, 5), (9, 5), (9,)))
    hidden.requires_grad_(), weight.requires_grad_()
    return [(hidden, weight, targets), (hidden, weight, targets, bias, 0.5, 3, True, 0.5, 2.0)]


# Arguments of every op except those in ELSEWHERE, tested in test_attention.py,
# test_rope_autograd.py and test_gather_rows.py.
CASES = {
    "cu_seqlens": lengths_cases,
    "max_seqlen": lengths_cases,
    "max_seqlen_sync": lengths_cases,
    "last_token_indices": lengths_cases,
    "position_ids": lambda d: [*lengths_cases(d, 6), *lengths_cases(d, 5)],
    "seq_ids": lambda d: lengths_cases(d, 6),
    "cached_cu_seqlens": lengths_cases,
    "cached_position_ids": lambda d: lengths_cases(d, 6),
    "cached_seq_ids": lambda d: lengths_cases(d, 6),
    "segment_metadata": lambda d: [
        (ints(d, [2, 3]), 12, 4, 4),
        (ints(d, [], torch.int64), 0, 0, 2),
    ],
    "mask_rows": lambda d: [
        (ints(d, [[1, 1, 0], [1, 0, 1]]), ints(d, [0, 2, 4], torch.int32), 6),
        (ints(d, [[0, 1]], torch.bool), ints(d, [0, 4], torch.int32), 4, "zero"),
        (
            torch.tensor([[0.0, -1.0]], device=d),
            ints(d, [0, 1], torch.int32),
            1,
            "additive",
        ),
    ],
    "segment_rows": lambda d: [
        (ints(d, [0, 2, 5], torch.int32), ints(d, [0, 4, 8], torch.int32), 9),
    ],
    "mask_ranges": lambda d: [
        *lengths_cases(d, 6),
        (ints(d, [0, 2, 5], torch.int32), 6, True, False, 2, ints(d, [[2, 4]], torch.int32)),
        (ints(d, [2, 3]), 9, False, True, None, None, ints(d, [0, 4, 8], torch.int32)),
    ],
    "dense_mask": masks,
    "cached_mask_ranges": lambda d: lengths_cases(d, 6),
    "cached_dense_mask": masks,
    "block_mask": lambda d: [
        (ops.mask_ranges(ints(d, [2, 3]), 6), None, 2, 4),
        (ops.mask_ranges(ints(d, [2, 2]), 4), 2, 1, 1),
        (ops.mask_ranges(ints(d, [], torch.int64), 0),),
    ],
    "cached_block_mask": lambda d: [
        (ints(d, [2, 3]), 6),
        (ints(d, [0, 2, 4], torch.int32), 4, True, False, 1, None, None, 2, 2, 1),
    ],
    "layout_metadata": lambda d: [
        *lengths_cases(d, 6, 4, False),
        (ints(d, [0, 2, 5]), 6, 2, True),
        (ints(d, [0, 2, 5, 5], torch.int32), 6, 4, True, ints(d, [2], torch.int32)),
    ],
    "token_metadata": lambda d: [
        (ints(d, [0, 2, 5], torch.int32), 6),
        (ints(d, [0], torch.int32), 0),
        (ints(d, [0, 2, 5], torch.int32), 9, ints(d, [0, 4, 8], torch.int32)),
    ],
    "lengths_from_padding_mask": lambda d: [
        (ints(d, [[1, 1, 0], [1, 1, 1]], torch.bool),),
        (ints(d, [[1, 0], [1, 1], [0, 1]]).t(),),
    ],
    "cu_seqlens_from_position_ids": lambda d: [
        (ints(d, [0, 1, 0, 1, 2]),),
        (ints(d, [[0, 1, 0], [0, 0, 1]], torch.int32), 4),
        (ints(d, [[[9, 9, 9]], [[0, 1, 0]]]), 2, 1),
    ],
    "mask_boundary_labels": lambda d: [
        (ints(d, [5, 6, 7, 8, 9, 0]), ints(d, [0, 2, 5], torch.int32)),
        (ints(d, [[5, 6, 7], [8, 9, 0]]), ints(d, [0, 2, 5], torch.int32), 2, -7),
    ],
    "causal_conv1d": convolutions,
    "causal_conv1d_backward": lambda d: [
        (torch.ones_like(case[0]), *case[:-1], torch.ones(2, 3, 3, device=d) if case[-1] else None)
        for case in convolutions(d, trained=False)
    ],
    "segment_reduce": lambda d: [
        (torch.randn(6, 3, device=d, requires_grad=True), ints(d, [0, 2, 5], torch.int32), kind)
        for kind in ("sum", "mean", "max", "last")
    ] + [
        (torch.randn(6, 3, device=d), ints(d, [0, 2, 5, 5], torch.int32), "mean", None,
         cuseq.PackedLayout.from_lengths([2, 3], 6).host_meta),
    ],
    "segment_reduce_backward": lambda d: [
        (torch.randn(2, 3, device=d), ints(d, [[]] * 2, torch.int32), torch.bfloat16, 6,
         ints(d, [0, 2, 5], torch.int32), "mean"),
        (torch.randn(2, 1, device=d), ints(d, [[1], [3]], torch.int32), torch.float32, 6,
         ints(d, [0, 2, 5], torch.int32), "max"),
    ],
    "token_logprobs": heads,
    "token_logprobs_backward": lambda d: [
        (torch.randn(4, device=d), None, torch.randn(4, device=d), torch.randn(0, device=d),
         *(t.detach() for t in heads(d)[0][:3])),
        (torch.randn(4, device=d), torch.randn(4, device=d), torch.randn(4, device=d),
         torch.randn(4, device=d), *(t.detach() for t in heads(d)[1][:4]), 0.5, 3, True, 0.5, 2.0),
    ],
}  # fmt: skip
ELSEWHERE = {
    "gather_rows",
    "varlen_attention",
    "varlen_attention_backward",
    "apply_rope",
    "apply_rope_",
    "apply_qk_norm_rope",
    "apply_qk_norm_rope_",
    "apply_qk_norm_rope_backward",
}
# Called inside of varlen_attention alone, where nothing is traced; packages of others launch their
# kernels (test_attention_backends.py).
OF_PACKAGES = {"fa3_forward", "fa3_backward", "fa4_forward", "fa4_backward"}


def test_every_op_has_a_case():
    schemas = (Path(__file__).parents[3] / "csrc" / "ops.cpp").read_text()
    declared = set(re.findall(r'"(\w+)\(', schemas))
    registered = {
        schema.name.removeprefix("cuseq::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("cuseq::")
    }
    assert declared == registered, "csrc/ops.cpp holds every schema"
    assert declared == set(CASES) | ELSEWHERE | OF_PACKAGES


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, device):
    for case in CASES[name](device):
        opcheck(getattr(ops, name), case)


def test_meta_beside_other_devices_is_refused():
    """An op does not run if one tensor is on meta; results elsewhere would stay unwritten."""
    real, shape = torch.randn(6, 2, 8), torch.empty(6, 2, 8, device="meta")
    packed = cuseq.PackedLayout.from_lengths([2, 3], 6)
    index = torch.arange(6, dtype=torch.int32)
    attention = (packed.cu_seqlens_static, packed.host_meta)
    calls = [
        lambda: ops.varlen_attention(real, shape, real, *attention),
        lambda: ops.gather_rows([shape, real], index, index, [6], 1, [0, 0]),
        lambda: ops.token_metadata(packed.cu_seqlens, 6, shape.int()),
        lambda: ops.apply_rope_([real, shape], torch.ones(6, 4), torch.ones(6, 4)),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match="must lie on one device, got cpu, meta|on cpu, got meta"
        ):
            call()
    out = ops.varlen_attention(shape, shape, shape, *attention)[0]
    assert out.is_meta and out.shape == shape.shape
    assert ops.gather_rows([], index.to("meta"), index.to("meta"), [6], 1, []) == []


def test_pure_ops_are_tagged_for_compilers():
    for name in [*CASES, *ELSEWHERE]:
        assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


def everything(lengths, mask, ids, labels, total):
    """Call one of each, with work after them for which a compiler may reuse their memory."""
    offsets = cuseq.ops.cu_seqlens(lengths)
    found, count = cuseq.ops.cu_seqlens_from_position_ids(ids, 6)
    return {
        "cu_seqlens": offsets * 2,
        "max_seqlen": cuseq.ops.max_seqlen(lengths) * 2,
        "last_token_indices": cuseq.ops.last_token_indices(lengths),
        "position_ids": cuseq.ops.position_ids(lengths, total),
        "seq_ids": cuseq.ops.seq_ids(lengths, total) * 2,
        "cached_cu_seqlens": cuseq.ops.cached_cu_seqlens(lengths),
        "cached_position_ids": cuseq.ops.cached_position_ids(lengths, total) * 2,
        "cached_seq_ids": ops.cached_seq_ids(lengths, total),
        "lengths_from_padding_mask": cuseq.ops.lengths_from_padding_mask(mask),
        "from_position_ids": (found, count),
        "mask_boundary_labels": ops.mask_boundary_labels(labels * 2, offsets),
        "token_metadata": ops.token_metadata(offsets, total),
    }


def arguments(device, lengths, total):
    mask = torch.arange(8).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.tensor(reference.position_ids(lengths, total))
    tensors = (torch.tensor(lengths), mask, ids, torch.arange(total))
    return (*(tensor.to(device) for tensor in tensors), total)


@pytest.mark.parametrize(
    "backend, dynamic",
    [("aot_eager", True), ("aot_eager", False), ("inductor", True), full("inductor", False)],
)
def test_compiled_equals_eager(backend, dynamic, device):
    compiled = torch.compile(everything, backend=backend, fullgraph=True, dynamic=dynamic)
    for lengths, total in (([2, 3], 6), ([4, 2], 6), ([1, 3, 2, 1], 9)):
        args = arguments(device, lengths, total)
        cached = cuseq.ops.cached_position_ids(args[0], total)
        torch.testing.assert_close(compiled(*args), everything(*args), rtol=0, atol=0)
        assert cached.tolist() == reference.position_ids(lengths, total)
        assert cuseq.ops.cached_position_ids(args[0], total) is cached


def test_dynamic_shapes_need_one_graph(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, backend=counter, fullgraph=True, dynamic=True)
    for lengths, total in (([2, 3], 6), ([4, 2, 1], 8), ([3, 3, 2, 4, 1], 17)):
        compiled(*arguments(device, lengths, total))
    assert counter.frame_count == 1


def test_a_host_int_stays_symbolic(device):
    def longest(lengths):
        return cuseq.ops.max_seqlen_sync(lengths) * 2

    compiled = torch.compile(longest, backend="aot_eager", fullgraph=True)
    for values in ([2, 3], [7, 1], [0, 0]):
        assert compiled(ints(device, values)) == 2 * max(values)


def test_export(device):
    class Everything(torch.nn.Module):
        def forward(self, lengths, mask, ids, labels):
            return everything(lengths, mask, ids, labels, labels.shape[0])

    args = arguments(device, [2, 3], 6)
    n_seqs, tokens = torch.export.Dim("n_seqs", min=2), torch.export.Dim("tokens", min=2)
    shapes = ({0: n_seqs}, {0: n_seqs}, {0: tokens}, {0: tokens})
    program = torch.export.export(Everything(), args[:4], dynamic_shapes=shapes)
    # Only pure ops remain of the cached ones.
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    decomposed = {
        str(node.target)
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
    }
    assert "cuseq.position_ids.default" in called
    assert not any("cached" in target for target in decomposed)
    for lengths, total in (([2, 3], 6), ([1, 3, 2, 1], 9)):
        args = arguments(device, lengths, total)
        torch.testing.assert_close(program.module()(*args[:4]), everything(*args), rtol=0, atol=0)


def test_fakes_give_shapes_without_data():
    for name, cases in CASES.items():
        if name == "max_seqlen_sync":
            continue
        for case in cases(torch.device("cpu")):
            if name == "segment_reduce" and len(case) == 5:
                continue  # the number of sequences is a value
            op = getattr(ops, name)
            real = op(*case)
            meta = op(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in case))
            pairs = (
                zip(real, meta, strict=True) if isinstance(real, tuple | list) else [(real, meta)]
            )
            for one, other in pairs:
                assert (name, one.shape, one.dtype) == (name, other.shape, other.dtype)
                assert (name, one.stride()) == (name, other.stride())


def test_a_layout_is_an_argument_like_any_other(device):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def block(hidden, packed):
        return hidden + packed.cu_seqlens_static.sum(), packed

    hidden = torch.zeros(3, device=device)
    for lengths in ([2, 3], [1, 1, 4], [6], [1] * 6):
        layout = cuseq.PackedLayout.from_lengths(lengths, 6, device=device)
        out, packed = block(hidden, layout)
        assert packed is layout
        assert out.tolist() == [layout.cu_seqlens_static.sum().item()] * 3
    assert counter.frame_count == 1


def test_one_graph_for_all_padded_packs(device):
    """Pack, rotate, attend and unpack, with padding between sequences."""
    counter = CompileCounterWithBackend("aot_eager")
    cos, sin = cuseq.rope_table(12, 8, device=device)

    def layer(hidden, packed):
        rows = cuseq.pack(packed, hidden)
        q, k = cuseq.apply_rope(rows, rows * 2, cos, sin, packed=packed)
        return cuseq.unpack(packed, cuseq.varlen_attention(q, k, rows, packed))

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
    for lengths in ([3, 5], [8, 1], [4, 0]):
        mask = torch.arange(8) < torch.tensor(lengths).unsqueeze(1)
        packed = cuseq.PackedLayout.from_padding_mask(
            mask, segment_multiple=4, total_tokens=12, max_seqs=2, device=device
        )
        hidden = torch.randn(2, 8, 2, 8, device=device, requires_grad=True)
        results = []
        for function in (compiled, layer):
            out = function(hidden, packed)
            results.append((out, *torch.autograd.grad(out.square().sum(), hidden)))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


# Traced calls run the pure op: a cached tensor is never an output of a user's graph.


class Watch(TorchDispatchMode):
    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def under_fake_mode(function, lengths):
    with FakeTensorMode() as mode:
        fake = function(mode.from_tensor(lengths))
    assert tuple(fake.shape) == (3,)


def under_make_fx(function, lengths):
    graph = make_fx(function)(lengths)
    assert graph(torch.tensor([1, 1])).tolist() == [0, 1, 2]
    return graph(lengths)


def under_dispatch_mode(function, lengths):
    with Watch() as watch:
        value = function(lengths)
    assert ops.cu_seqlens.default in watch.seen
    return value


def under_vmap(function, lengths):
    zeros = torch.zeros(2, dtype=torch.int32, device=lengths.device)
    values = torch.vmap(lambda x: function(lengths) + x)(zeros)
    assert values.tolist() == [[0, 2, 5]] * 2


def under_functionalize(function, lengths):
    return torch.func.functionalize(function)(lengths)


def under_compile(function, lengths):
    return torch.compile(function, backend="aot_eager", fullgraph=True)(lengths)


def of_a_subclass(function, lengths):
    value = function(TwoTensor(lengths, lengths.clone()))
    assert isinstance(value, TwoTensor)
    return value.a


WATCHED = [
    under_fake_mode,
    under_make_fx,
    under_dispatch_mode,
    under_vmap,
    under_compile,
    of_a_subclass,
    under_functionalize,
]


@pytest.mark.parametrize("watched", WATCHED, ids=lambda watched: watched.__name__)
@pytest.mark.parametrize(
    "function", [cuseq.ops.cached_cu_seqlens, ops.cached_cu_seqlens], ids=["function", "op"]
)
@pytest.mark.parametrize("warm", [True, False])
def test_watched_calls_bypass_the_cache(watched, function, warm, device):
    lengths = ints(device, [2, 3])
    cached = cuseq.ops.cached_cu_seqlens(lengths) if warm else None
    before = cuseq.cache.stats()
    value = watched(function, lengths)
    after = cuseq.cache.stats()
    assert after["bypasses"] > before["bypasses"]
    for count in ("hits", "misses", "entries"):
        assert (count, after[count]) == (count, before[count])
    if value is not None:
        assert value.tolist() == [0, 2, 5]
        value.fill_(-1)
    if warm:
        assert cuseq.ops.cached_cu_seqlens(lengths) is cached
        assert cached.tolist() == [0, 2, 5]
