"""Test that compiled code never overwrites tensors in the identity cache.

test_compile.py tests that traced calls bypass the cache. Here cached tensors stay alive around
graphs that reuse memory as much as they can, forward and backward.
"""

from __future__ import annotations

import pytest
import reference
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")

VALUES = [200, 0, 57, 255]
TOTAL = 600

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(device, values=VALUES) -> Tensor:
    return torch.tensor(values, device=device)


def hidden(device, total=TOTAL, seed=0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    return values.to(device).requires_grad_()


def look_up(lengths: Tensor, total: int) -> list[Tensor]:
    return [
        cuseq.ops.cached_cu_seqlens(lengths),
        cuseq.ops.cached_position_ids(lengths, total),
        cuseq.ops.cached_seq_ids(lengths, total),
    ]


class Warm:
    """The cached tensors of one key, and their bits when they were made."""

    def __init__(self, lengths: Tensor, total: int = TOTAL):
        self.lengths, self.total = lengths, total
        self.values = self.look_up()
        self.bits = [value.clone() for value in self.values]
        assert self.bits[1].tolist() == reference.position_ids(lengths.tolist(), total)

    def look_up(self) -> list[Tensor]:
        return look_up(self.lengths, self.total)

    def check(self) -> None:
        for value, bits, again in zip(self.values, self.bits, self.look_up(), strict=True):
            assert torch.equal(value, bits), "a cached tensor was overwritten"
            assert again is value, "no longer a hit"


def reuse_memory(warm: Warm) -> None:
    """Take blocks of the cached sizes from the allocator, overwrite them and free them."""
    for value in warm.values:
        for block in [torch.empty_like(value) for _ in range(8)]:
            block.fill_(-7)


def moved(before: dict[str, int]) -> dict[str, int]:
    """Return the changes of the lookup counts."""
    after = cuseq.cache.stats()
    return {key: after[key] - before[key] for key in ("hits", "misses", "entries")}


class Saves(torch.autograd.Function):
    """Saves ints unchanged, and computes with them in backward, where a compiler may reuse them."""

    @staticmethod
    def forward(ctx, x, ints):
        ctx.save_for_backward(ints)
        return x * ints

    @staticmethod
    def backward(ctx, grad):
        (ints,) = ctx.saved_tensors
        # Sorting is not elementwise: its input must be in memory, ideally in the ints' own memory.
        return grad * torch.sort(ints * 2 + 1).values, None


def work(x: Tensor, lengths: Tensor) -> Tensor:
    """Use what packed_* returns for the last time, then do work of the same sizes and dtypes."""
    total = x.shape[0]
    positions = cuseq.ops.cached_position_ids(lengths, total)
    ids = ops.cached_seq_ids(lengths, total)
    offsets = ops.cached_cu_seqlens(lengths)
    scaled = torch.sort(positions * 3 + 1).values
    ends = torch.sort(offsets * 2 + 1, descending=True).values
    return Saves.apply(x.sin(), ids) * scaled + x * ends.sum()


def on_arguments(x: Tensor, offsets: Tensor, positions: Tensor, ids: Tensor):
    """Do the same with cached tensors as arguments, saved and returned."""
    scaled = torch.sort(positions * 3 + 1).values
    y = Saves.apply(x.sin(), ids) * scaled + x * torch.sort(offsets * 2 + 1).values.sum()
    return y, positions * 2, ids


def check_close(function, expected_function, x: Tensor, *rest) -> None:
    """Compare result and gradient of two functions."""
    out, expected = function(x, *rest), expected_function(x, *rest)
    torch.testing.assert_close(out, expected)
    # One backward after the other: both outputs are alive until here.
    grad = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager"},
        pytest.param({"backend": "inductor"}, marks=pytest.mark.slow),
        pytest.param({"mode": "reduce-overhead"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_what_is_cached_is_never_overwritten(options, dynamic, device):
    if "mode" in options and device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    compiled = torch.compile(work, fullgraph=True, dynamic=dynamic, **options)
    warm = [Warm(make(device))]
    if dynamic:
        warm.append(Warm(make(device, [3, 700]), 800))
    for step in range(6):  # under reduce-overhead: warm-up, capture, replays
        for one in warm:
            torch.compiler.cudagraph_mark_step_begin()
            check_close(compiled, work, hidden(device, one.total, step), one.lengths)
            reuse_memory(one)
            one.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_calls_between_compiled_regions(backend, device):
    warm = Warm(make(device))
    options = {"backend": backend, "fullgraph": True, "dynamic": False}
    compiled_arguments = torch.compile(on_arguments, **options)
    compiled_work = torch.compile(work, **options)

    def model(x, first, second):
        x, doubled, ids = first(x, *warm.look_up())
        warm.check()
        doubled.fill_(-1)  # made in the graph, so it belongs to the caller
        assert ids.data_ptr() == warm.values[2].data_ptr(), "an argument comes back as it is"
        x = second(x * 1e-3, warm.lengths)
        reuse_memory(warm)
        warm.check()
        return x * cuseq.ops.cached_position_ids(warm.lengths, TOTAL)  # saved by eager autograd

    for step in range(2):
        x = hidden(device, seed=step)
        check_close(lambda x: model(x, compiled_arguments, compiled_work),
                    lambda x: model(x, on_arguments, work), x)  # fmt: skip
        reuse_memory(warm)
        warm.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_breaks(backend, device):
    warm = Warm(make(device))
    seen = []

    @torch.compiler.disable
    def eagerly(lengths, total):
        seen.append(cuseq.ops.cached_position_ids(lengths, total))
        return seen[-1]

    def model(x, lengths):
        x = Saves.apply(x, cuseq.ops.cached_position_ids(lengths, x.shape[0])) * 1e-3
        positions = eagerly(lengths, x.shape[0])
        scaled = torch.sort(positions * 3 + 1).values
        x = Saves.apply(x.sin(), positions) * scaled
        torch._dynamo.graph_break()
        return x * torch.sort(ops.cached_position_ids(lengths, x.shape[0]) * 2).values * positions

    compiled = torch.compile(model, backend=backend, dynamic=False)
    for step in range(2):
        check_close(compiled, model, hidden(device, seed=step), warm.lengths)
        reuse_memory(warm)
        warm.check()
    assert len(seen) == 4 and all(value is warm.values[1] for value in seen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_an_edit_by_compiled_code_is_a_miss(backend, context, device):
    @torch.compile(backend=backend, fullgraph=True)
    def edit(tensor, x):
        tensor.add_(1)
        return x.sin()

    lengths = make(device, [2, 3])
    edited = cuseq.ops.cached_cu_seqlens(lengths)
    with context():
        edit(edited, hidden(device))
        assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 2, 5]
        edit(lengths, hidden(device))
    assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == [0, 3, 7]


def test_graphs_hold_pure_ops_alone(device):
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def function(x, lengths):
        own = cuseq.ops.cached_cu_seqlens(lengths), ops.cached_seq_ids(lengths, TOTAL)
        return work(x, lengths), own

    warm = Warm(make(device))
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    before = cuseq.cache.stats()
    out, own = torch.compile(function, backend=backend, fullgraph=True)(
        hidden(device), warm.lengths
    )
    out.sum().backward()
    assert moved(before) == {"hits": 0, "misses": 0, "entries": 0}
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    called = {str(node.target) for node in nodes if node.op == "call_function"}
    assert {f"cuseq.{name}.default" for name in ("cu_seqlens", "position_ids", "seq_ids")} <= called
    assert not any("packed" in target for target in called)
    assert not any(node.op == "get_attr" for node in nodes), "no cached tensor as a constant"
    held = {value.data_ptr() for value in warm.values}
    for value in own:
        assert value.data_ptr() not in held
        value.fill_(-1)
    warm.check()


# Traced: the caller edits its inputs while the mode is on.


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class EditsOutputs(TorchDispatchMode):
    """A user's mode that overwrites the results of every cuseq op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.fill_(0) if func.namespace == "cuseq" else out


def edits(x: Tensor, lengths: Tensor) -> list[Tensor]:
    total = x.shape[0]
    return [
        cuseq.ops.cached_cu_seqlens(lengths).add_(1),
        ops.cached_cu_seqlens(lengths).add_(1),
        cuseq.ops.cached_position_ids(lengths, total).add_(1),
        ops.cached_position_ids(lengths, total).add_(1),
        cuseq.ops.cached_seq_ids(lengths, total).add_(1),
        ops.cached_seq_ids(lengths, total).add_(1),
    ]


class Edits(nn.Module):
    def forward(self, x, lengths):
        return edits(x, lengths)


def by_make_fx(tracing_mode: str, pre_dispatch: bool):
    def watched(x, lengths):
        trace = make_fx(edits, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)
        return trace(x, lengths)

    return watched


def by_export(strict: bool):
    def watched(x, lengths):
        program = torch.export.export(Edits(), (x, lengths), strict=strict)
        return program.run_decompositions().module()

    return watched


def by_jit_trace(x, lengths):
    return torch.jit.trace(edits, (x, lengths), check_trace=False)


def by_compile(x, lengths):
    return torch.compile(edits, backend="aot_eager", fullgraph=True)


def under(*modes):
    def watched(x, lengths):
        def function(x, lengths):
            for mode in modes:
                mode.__enter__()
            try:
                return edits(x, lengths)
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)

        return function

    return watched


def by_vmap(x, lengths):
    def function(x, lengths):
        rows = torch.stack([x, x])
        return [v[1] for v in torch.vmap(edits, in_dims=(0, None))(rows, lengths)]

    return function


def by_functionalize(x, lengths):
    return torch.func.functionalize(edits)


WATCHED = {
    **{
        f"make_fx-{mode}{'-pre_dispatch' * pre}": by_make_fx(mode, pre)
        for mode in ("real", "fake", "symbolic")
        for pre in (False, True)
    },
    "export-strict": by_export(True),
    "export": by_export(False),
    "jit.trace": by_jit_trace,
    "compile": by_compile,
    "dispatch mode": under(Watch()),
    "nested modes": under(Watch(), FlopCounterMode(display=False), Watch()),
    "vmap": by_vmap,
    "functionalize": by_functionalize,
}


# torch.jit.trace is deprecated and warns.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WATCHED)
def test_edits_under_a_mode_stay_there(name, device):
    warm, x = Warm(make(device)), hidden(device).detach()
    expected = [value + 1 for value in warm.bits for _ in range(2)]
    before = cuseq.cache.stats()
    function = WATCHED[name](x, warm.lengths)
    traced = moved(before)
    # Traces before dispatch keep the cached ops themselves; run directly, they are eager code.
    if "pre_dispatch" not in name and name != "jit.trace":
        torch.testing.assert_close(list(function(x, warm.lengths)), expected, rtol=0, atol=0)
        traced = moved(before)
    assert traced == {"hits": 0, "misses": 0, "entries": 0}
    warm.check()
    # No values of the first lengths became constants.
    other = make(device, [1, 2, 3, 4])
    assert function(x, other)[0].tolist() == [offset + 1 for offset in (0, 1, 3, 6, 10)]


def test_a_mode_that_edits_every_output(device):
    warm = Warm(make(device))
    with EditsOutputs():
        values = [*warm.look_up(), ops.cached_cu_seqlens(warm.lengths)]
    assert not any(value.any() for value in values)
    warm.check()


@pytest.mark.parametrize("real", [True, False], ids=["real lengths", "fake lengths"])
def test_fakes_beside_a_live_hit(real, device):
    """Under a fake mode, the mode must not get the hit, and the cache must not get a fake."""
    warm = Warm(make(device))
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        lengths = warm.lengths if real else mode.from_tensor(warm.lengths)
        fakes = [*look_up(lengths, TOTAL), ops.cached_cu_seqlens(lengths)]
    assert all(isinstance(fake, FakeTensor) for fake in fakes)
    warm.check()


# Transforms of functions that call packed_* outside of what is transformed.


def forward_ad(function):
    def dual(x):
        with torch.autograd.forward_ad.dual_level():
            out = function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    return dual


TRANSFORMS = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.vmap(f)(torch.stack([x, 2 * x])).sum()
    ),
    "forward AD": forward_ad,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, compiled, device):
    if compiled and name == "forward AD":
        pytest.skip("Dynamo does not trace dual levels")
    warm = Warm(make(device, [2, 3]), 6)

    def scores(x, offsets, positions, ids):
        return (x.sin() * positions * x + x * ids).sum() * offsets.sum()

    def function(x, lengths):
        offsets, positions, _ = look_up(lengths, 6)
        return scores(x, offsets, positions, ops.cached_seq_ids(lengths, 6))

    cold = warm.lengths.clone()
    x = hidden(device, 6).detach()
    expected = TRANSFORMS[name](lambda x: scores(x, *warm.bits))(x)
    for lengths in (warm.lengths, cold):
        transformed = TRANSFORMS[name](lambda x, lengths=lengths: function(x, lengths))
        if compiled:
            transformed = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(transformed(x), expected)
        for value, bits in zip(look_up(lengths, 6), warm.bits, strict=True):
            assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
            assert torch.equal(value, bits)
    warm.check()


def test_vmap_over_lengths(device):
    rows = torch.tensor([[2, 3], [1, 4]], device=device)
    for call in (cuseq.ops.cached_position_ids, ops.cached_position_ids):
        before = cuseq.cache.stats()
        value = torch.vmap(lambda row, call=call: call(row, 6))(rows)
        assert value.tolist() == [reference.position_ids(row, 6) for row in rows.tolist()]
        assert moved(before) == {"hits": 0, "misses": 0, "entries": 0}


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode", [SeesFunctions, lambda: torch.device("meta")], ids=["user's", "device context"]
)
def test_function_modes_leave_the_cache_on(mode, device):
    lengths = make(device)
    with mode():
        warm = Warm(lengths)
        before = cuseq.cache.stats()
        warm.check()
        assert ops.cached_cu_seqlens(lengths) is warm.values[0]
        assert moved(before) == {"hits": 4, "misses": 0, "entries": 0}
    warm.check()


# One graph, whatever the cache holds.


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_the_cache_holds_is_no_part_of_a_graph(dynamic, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, backend=counter, fullgraph=True, dynamic=dynamic)
    states = [
        lambda warm: None,
        lambda warm: cuseq.cache.clear(),
        lambda warm: cuseq.cache.invalidate(warm.lengths),
        lambda warm: warm.values[1].add_(1),
        lambda warm: warm.lengths.sub_(1),
    ]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, state in enumerate(states * 2):
            values = [20 + step] * (4 + step % 3 if dynamic else 4)
            total = 300 + (step if dynamic else 0)
            warm = Warm(make(device, values), total)
            state(warm)
            x = hidden(device, total, step)
            with cuseq.cache.forward_scope():
                before = cuseq.cache.stats()
                out = compiled(x, warm.lengths)
                assert moved(before) == {"hits": 0, "misses": 0, "entries": 0}
            out.sum().backward()
            cuseq.cache.clear()
            torch.testing.assert_close(out, work(x, warm.lengths))
    assert counter.frame_count == 1


# Compiled autograd.


class LooksUpInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths):
        ctx.save_for_backward(lengths)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (lengths,) = ctx.saved_tensors
        positions = cuseq.ops.cached_position_ids(lengths, grad.shape[0])
        return grad * torch.sort(positions * 3 + 1).values, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd(backend, device):
    warm = Warm(make(device))

    def hook(grad):
        ids = ops.cached_seq_ids(warm.lengths, grad.shape[0])
        return grad * torch.sort(ids * 2 + 1).values

    def grad_of(x):
        y = Saves.apply(x.sin(), cuseq.ops.cached_seq_ids(warm.lengths, TOTAL))
        y = LooksUpInBackward.apply(y, warm.lengths)
        y.register_hook(hook)
        return torch.autograd.grad(y.sum(), x)

    for step in range(2):
        x = hidden(device, seed=step)
        before = cuseq.cache.stats()
        expected = grad_of(x)
        assert moved(before) == {"hits": 3, "misses": 0, "entries": 0}
        before = cuseq.cache.stats()
        compiler = torch.compile(backend=backend, fullgraph=True, dynamic=False)
        with compiled_autograd._enable(compiler, dynamic=False):
            grad = grad_of(x)
        # Only the eager forward's: the graph of the backward contains the pure op.
        assert moved(before) == {"hits": 1, "misses": 0, "entries": 0}
        torch.testing.assert_close(grad, expected)
        reuse_memory(warm)
        warm.check()


# CUDA graphs inside compiled code.


@pytest.mark.slow
def test_lengths_from_a_replayed_graph(cuda):
    """It returns one tensor in every replay, with other values and the same version."""
    compiled = torch.compile(
        lambda mask: mask.sum(-1), fullgraph=True, dynamic=False, mode="reduce-overhead"
    )
    for step in range(8):
        values = [1 + step, 9 - step, step % 3]
        mask = torch.arange(16, device=cuda) < torch.tensor(values, device=cuda).unsqueeze(1)
        torch.compiler.cudagraph_mark_step_begin()
        lengths = compiled(mask)
        assert lengths.tolist() == values
        for _ in range(2):
            assert cuseq.ops.cached_cu_seqlens(lengths).tolist() == reference.cu_seqlens(values)
            assert cuseq.ops.cached_seq_ids(lengths, 16).tolist() == reference.seq_ids(values, 16)
        del lengths


class Block(nn.Module):
    def __init__(self, dim: int = 128, heads: int = 4):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads = heads

    def forward(self, x, packed, window):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return x + self.out(cuseq.varlen_attention(q, k, v, packed, window=window).flatten(1))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, packed):
        for block, window in zip(self.blocks, (None, 16), strict=True):
            x = block(x, packed, window)
        return x.float()


@pytest.mark.slow
def test_varlen_attention_keeps_exact_lengths_over_replays(cuda):
    torch.manual_seed(0)
    model = Stack().to(cuda, torch.bfloat16)
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    packs = [[256], [100, 100], [1] * 256, [], [0, 7, 0, 200], [31, 64, 127, 3], [255, 1]]
    warm = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, values in enumerate(packs * 3):
            packed = PackedLayout.from_lengths(values, 256, device=cuda)
            warm.append(Warm(packed.lengths, 256))
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(256, 128, generator=generator).to(cuda, torch.bfloat16)
            x.requires_grad_()
            weight = torch.randn(256, 128, generator=generator).to(cuda)
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x, packed)
            grads = torch.autograd.grad((out * weight).sum(), [x, *parameters])
            expected = model(x, packed)
            wanted = torch.autograd.grad((expected * weight).sum(), [x, *parameters])
            for actual, other in zip((out, *grads), (expected, *wanted), strict=True):
                # A compiler rounds differently; other lengths would be off by tens of per cent.
                error = (actual - other).float().norm()
                assert error <= 3e-2 * other.float().norm(), (step, values)
            del out, grads
            reuse_memory(warm[-1])
            for one in warm:
                one.check()
