"""Test apply_rope under autograd, compilers, checkpoints, graphs and tracing modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from test_no_sync import waits
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cuseq
from cuseq import PackedLayout

ops = torch.ops.cuseq

TABLE_ROWS = 64
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
COMPILERS = [
    ("aot_eager", True),
    ("aot_eager", False),
    pytest.param("inductor", True, marks=pytest.mark.slow),
]


class Call(NamedTuple):
    """A call of apply_rope, and the plain formula for one of its tensors."""

    tensors: list[Tensor]
    cos: Tensor
    sin: Tensor
    options: dict[str, Any]
    plain: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Parameters of a call; `rows` is [tokens] or [batch, seqlen], `heads` of q and of k."""

    rows: tuple[int, ...] = (6,)
    source: str = "packed"
    lengths: tuple[int, ...] = (2, 3)
    qkv_format: str = "thd"
    heads: tuple[int, ...] = (2, 1)
    dim: int = 8
    rotary: int = 8
    full_width: bool = False
    shared: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def positions(self, generator: torch.Generator) -> Tensor:
        """Return positions, `[planes, *rows]`."""
        size, rank = self.options.get("cp_size", 1), self.options.get("cp_rank", 0)
        if self.source == "packed":
            tail = size * math.prod(self.rows) - sum(self.lengths)
            row = [p for n in (*self.lengths, tail) for p in local_positions(n, size, rank)]
            return torch.tensor(row, dtype=torch.int64).view(1, *self.rows)
        if self.source == "dense":
            row = torch.tensor(local_positions(size * self.rows[-1], size, rank))
            return (self.options.get("offset", 0) + row).expand(1, *self.rows)
        planes = 3 if "mrope_section" in self.options else 1
        rows = (1, self.rows[-1]) if self.shared else self.rows
        return torch.randint(TABLE_ROWS, (planes, *rows), generator=generator)

    def build(
        self,
        device: torch.device | str,
        dtype: torch.dtype = torch.float64,
        table_dtype: torch.dtype | None = None,
    ) -> Call:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def on_device(tensor: Tensor) -> Tensor:
            default = torch.float64 if dtype == torch.float64 else torch.float32
            return tensor.to(device, table_dtype or default)

        interleaved = self.options.get("interleaved", False)
        angles = randn(TABLE_ROWS, self.rotary // 2)
        positions = self.positions(generator)
        table = [on_device(angles.cos()), on_device(angles.sin())]
        rows = [half[positions.to(device)] for half in table]
        options = {"qkv_format": self.qkv_format, **self.options}
        if self.source == "packed":
            total = options.get("cp_size", 1) * math.prod(self.rows)
            qkv_format = PackedLayout.from_lengths(list(self.lengths), total, device=device)
            options["packed"] = qkv_format
        if self.source == "ids":
            ids = positions if len(positions) == 3 else positions[0]
            options["position_ids"] = ids.to(device)
        if self.source == "token":
            options["table"] = "token"
            given = [half if len(positions) == 3 else half[0] for half in rows]
        else:
            given = table
        if self.full_width:
            widen = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: t.tile(2))
            given = [widen(half) for half in given]

        def shape(heads: int) -> tuple[int, ...]:
            where = 1 if self.qkv_format == "bhsd" else len(self.rows)
            return (*self.rows[:where], heads, *self.rows[where:], self.dim)

        planes = planes_of_pairs(self.rotary // 2, options)
        angles_of_tokens = [
            torch.stack([half[plane, ..., i] for i, plane in enumerate(planes)], -1).unsqueeze(
                1 if self.qkv_format == "bhsd" else -2
            )
            for half in rows
        ]
        tensors = [randn(*shape(heads)).to(device, dtype) for heads in self.heads]
        return Call(
            [tensor.requires_grad_() for tensor in tensors],
            *given,
            options,
            lambda x: rotate(x, *angles_of_tokens, interleaved),
        )


def local_positions(length: int, size: int, rank: int) -> list[int]:
    """Return the positions in a segment of the tokens that one context-parallel rank holds."""
    if size == 1:
        return list(range(length))
    half, last = length // (2 * size), 2 * size - 1 - rank
    return [*range(rank * half, (rank + 1) * half), *range(last * half, (last + 1) * half)]


def planes_of_pairs(pairs: int, options: dict[str, Any]) -> list[int]:
    section = options.get("mrope_section")
    if section is None:
        return [0] * pairs
    if options.get("mrope_interleaved"):
        return [i % 3 if i < 3 * section[i % 3] else 0 for i in range(pairs)]
    return [plane for plane, size in enumerate(section) for _ in range(size)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply the plain formula in the dtype of `x`; cos and sin broadcast over heads."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    )
    pair = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined, rest), -1)


MROPE = dict(mrope_section=[1, 1, 2])
MROPE_INTERLEAVED = dict(mrope_section=[3, 2, 1], mrope_interleaved=True)
CASES = {
    "packed": Case(),
    "packed, interleaved, partial": Case(rotary=4, options=dict(interleaved=True)),
    "packed, bshd, full width": Case((2, 3), qkv_format="bshd", full_width=True),
    "packed, bhsd, no key": Case((2, 3), qkv_format="bhsd", heads=(2,)),
    "dense, bshd, more keys": Case((2, 3), "dense", qkv_format="bshd", heads=(1, 3)),
    "dense, bhsd, offset": Case((2, 2), "dense", qkv_format="bhsd", options=dict(offset=5)),
    "ids, odd head": Case((4,), "ids", dim=7, rotary=6),
    "ids, bhsd, partial": Case(
        (2, 3), "ids", qkv_format="bhsd", rotary=4, full_width=True, options=dict(rotary_dim=4)
    ),
    "ids, bshd, shared, interleaved": Case(
        (2, 3),
        "ids",
        qkv_format="bshd",
        shared=True,
        full_width=True,
        options=dict(interleaved=True),
    ),
    "token": Case((4,), "token"),
    "token, bshd, shared": Case((2, 3), "token", qkv_format="bshd", shared=True, full_width=True),
    "mrope": Case((4,), "ids", options=MROPE),
    "mrope, interleaved": Case(
        (2, 2), "ids", qkv_format="bhsd", dim=12, rotary=12, options=MROPE_INTERLEAVED
    ),
    "mrope, token": Case(
        (2, 2), "token", qkv_format="bshd", options=dict(**MROPE, interleaved=True)
    ),
    "cp": Case((8,), lengths=(4, 8), options=dict(cp_size=2, cp_rank=1)),
    "cp, dense": Case((2, 4), "dense", qkv_format="bshd", options=dict(cp_size=2, cp_rank=0)),
}
# Sizes of real models, which use the wide paths of the kernels.
LARGE = {
    "8x64": Case((70,), lengths=(30, 1, 33), heads=(8, 2), dim=64, rotary=64),
    "5x128": Case((2, 33), "ids", qkv_format="bhsd", heads=(5, 1), dim=128, rotary=128),
    "3x96": Case((70,), "ids", heads=(3, 3), dim=96, rotary=24, options=dict(interleaved=True)),
    "2x256": Case((9,), "token", heads=(2, 1), dim=256, rotary=64),
}
ALL_CASES = CASES | LARGE
# Whole heads of wide vectors with every source of positions. In 16 bits most of them take the
# kernels' shortest path, and the others nearly qualify for it.
WHOLE_HEADS = {
    "packed": Case((70,), lengths=(30, 1, 33), heads=(5, 3), dim=128, rotary=128),
    "packed, bshd": Case(
        (2, 35), qkv_format="bshd", lengths=(30, 1, 33), heads=(4, 2), dim=64, rotary=64
    ),
    "packed, bhsd": Case(
        (2, 35), qkv_format="bhsd", lengths=(30, 1, 33), heads=(4, 2), dim=64, rotary=64
    ),
    "ids": Case((70,), "ids", heads=(3,), dim=256, rotary=256, full_width=True),
    "ids, bshd": Case((2, 33), "ids", qkv_format="bshd", heads=(5, 1), dim=128, rotary=128),
    "ids, bhsd": Case((1, 33), "ids", qkv_format="bhsd", heads=(5, 1), dim=128, rotary=128),
    "ids, bshd, shared": Case(
        (2, 33), "ids", qkv_format="bshd", shared=True, heads=(2, 2), dim=128, rotary=128
    ),
    "dense": Case((60,), "dense", heads=(9, 2), dim=128, rotary=128, options=dict(offset=3)),
    "dense, bshd": Case((2, 30), "dense", qkv_format="bshd", heads=(2, 2), dim=512, rotary=512),
    "token": Case((33,), "token", heads=(2, 2), dim=512, rotary=512),
    "token, bshd": Case((3, 11), "token", qkv_format="bshd", heads=(2, 1), dim=64, rotary=64),
    "token, bshd, shared": Case(
        (3, 11), "token", qkv_format="bshd", shared=True, heads=(2, 1), dim=64, rotary=64
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def rope(call: Call, tensors: list[Tensor], **more: Any) -> list[Tensor]:
    q, k = [*tensors, None][:2]
    results = cuseq.apply_rope(q, k, call.cos, call.sin, **call.options, **more)
    return list(results)[: len(tensors)]


def incoming(tensors: list[Tensor]) -> list[Tensor]:
    """Return gradients of the outputs."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in tensors]


def plain_gradients(call: Call, grads: list[Tensor]) -> list[Tensor]:
    """Compute gradients in float64, whatever the dtype of the call."""
    exact = [t.detach().double().requires_grad_() for t in call.tensors]
    return list(
        torch.autograd.grad([call.plain(t) for t in exact], exact, [g.double() for g in grads])
    )


def check_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Check equality up to the float64 rounding of two products and their sum."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == torch.float64
        one, other = one.detach(), other.detach()
        bound = 4 * torch.finfo(torch.float64).eps * float(other.abs().max())
        assert float((one - other).abs().max()) <= bound


def check_no_worse(
    actual: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    mean: float = 1.01,
    mean_in_fp32: float = 1.25,
) -> None:
    """Check that the error, largest and mean, is at most the plain formula's in that dtype."""
    assert actual.dtype == plain.dtype and actual.shape == plain.shape == exact.shape
    ours, theirs = ((t.double() - exact).abs() for t in (actual, plain))
    worst = 1.01
    # If both compute and store fp32, which one is worse at one element is chance.
    if actual.dtype.itemsize >= 4:
        worst, mean = 3.0, mean_in_fp32
    assert float(ours.max()) <= worst * float(theirs.max())
    assert float(ours.mean()) <= mean * float(theirs.mean())


# ------------------------------------------------------------------------------- gradients


@pytest.mark.kernels
@pytest.mark.parametrize("name", ALL_CASES)
def test_gradients(name, device):
    call = ALL_CASES[name].build(device)
    outs = rope(call, call.tensors)
    check_equal(outs, [call.plain(t) for t in call.tensors])
    grads = incoming(outs)
    actual = torch.autograd.grad(outs, call.tensors, grads)
    check_equal(actual, plain_gradients(call, grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGE | WHOLE_HEADS)
def test_values_and_gradients_in_low_precision(name, dtype, table_dtype, device):
    call = (LARGE | WHOLE_HEADS)[name].build(device, dtype, table_dtype)
    outs = rope(call, call.tensors)
    plain = [call.plain(t) for t in call.tensors]
    exact = [call.plain(t.detach().double()) for t in call.tensors]
    grads = incoming(outs)
    results = [
        *zip(outs, plain, exact, strict=True),
        *zip(
            torch.autograd.grad(outs, call.tensors, grads),
            torch.autograd.grad(plain, call.tensors, grads),
            plain_gradients(call, grads),
            strict=True,
        ),
    ]
    for one in results:
        check_no_worse(*(t.detach() for t in one), mean=0.75)  # one rounding instead of three


@pytest.mark.kernels
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_every_way_to_say_a_position_gives_the_same_bits(qkv_format, device):
    """Tokens of one row, found by offsets, by ids of either width or in a token table."""
    lengths = [30, 1, 33]
    rows = (70,) if qkv_format == "thd" else (1, 70)
    case = Case(rows, "packed", tuple(lengths), qkv_format, heads=(5, 3), dim=128, rotary=128)
    call = case.build(device, torch.bfloat16)
    packed = call.options["packed"]
    ids = packed.position_ids.view(rows)
    ways = [
        {"position_ids": ids.int()},
        {"position_ids": ids.long()},
        {"position_ids": ids.long().repeat_interleave(3, -1)[..., ::3]},
    ]
    expected = rope(call, call.tensors)
    for way in ways:
        given = Call(
            call.tensors, call.cos, call.sin, {"qkv_format": qkv_format, **way}, call.plain
        )
        assert all(map(torch.equal, rope(given, call.tensors), expected)), way
    cos, sin = (table[ids.long()] for table in (call.cos, call.sin))
    given = Call(call.tensors, cos, sin, {"qkv_format": qkv_format, "table": "token"}, call.plain)
    assert all(map(torch.equal, rope(given, call.tensors), expected))


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (9, 1)], ids=str)
def test_a_token_is_turned_alike_in_calls_of_any_size(heads, cuda):
    """The number of heads per warp depends on the number of tokens; the result must not."""
    case = Case((6000,), "ids", heads=heads, dim=128, rotary=128)
    call = case.build(cuda, torch.bfloat16)
    ids = call.options["position_ids"]

    def run(tokens: slice) -> list[Tensor]:
        part = Call(
            [t[tokens] for t in call.tensors],
            call.cos,
            call.sin,
            call.options | {"position_ids": ids[tokens]},
            call.plain,
        )
        return rope(part, part.tensors)

    small = [run(slice(i, i + 60)) for i in range(0, 6000, 60)]
    expected = [torch.cat(parts) for parts in zip(*small, strict=True)]
    for tokens in (300, 700, 1100, 2100, 3000, 6000):
        for out, wanted in zip(run(slice(tokens)), expected, strict=True):
            assert torch.equal(out, wanted[:tokens]), tokens


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name, inplace, device):
    call = CASES[name].build(device)

    def function(*tensors):
        if inplace:
            tensors = [t.clone() for t in tensors]
        return tuple(rope(call, list(tensors), inplace=inplace))

    assert gradcheck(function, call.tensors)
    assert gradgradcheck(function, call.tensors)


STRIDES = {
    "zero": lambda g: g[:1, :1, :1].expand_as(g),
    "zero in heads": lambda g: g[:, :1].expand_as(g),
    "zero in the last": lambda g: g[..., :1].expand_as(g),
    "transposed": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
    "last dimension apart": lambda g: g.mT.contiguous().mT,
    "sliced": lambda g: torch.cat((g, g), -1)[..., : g.shape[-1]],
    "every other": lambda g: g.repeat_interleave(2, -1)[..., ::2],
    "odd address": lambda g: torch.cat((g.new_zeros(1), g.flatten()))[1:].view_as(g),
}


@pytest.mark.kernels
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", ["packed", "3x96", "8x64"])
def test_incoming_gradients_of_any_strides(name, strides, device):
    call = ALL_CASES[name].build(device)
    outs = rope(call, call.tensors)
    grads = [STRIDES[strides](grad) for grad in incoming(outs)]
    before = [grad.clone() for grad in grads]
    actual = torch.autograd.grad(outs, call.tensors, grads)
    check_equal(actual, plain_gradients(call, before))
    for grad, kept, result in zip(grads, before, actual, strict=True):
        assert torch.equal(grad, kept), "backward must leave the incoming gradient alone"
        assert result.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()


def test_gradients_of_a_sum(device):
    call = CASES["packed"].build(device)
    outs = rope(call, call.tensors)
    sum(out.sum() for out in outs).backward()
    expected = plain_gradients(call, [torch.ones_like(out) for out in outs])
    check_equal([t.grad for t in call.tensors], expected)


@pytest.mark.kernels
def test_no_tokens(device):
    for case in (Case((0,), lengths=()), Case((0, 3), "dense", qkv_format="bshd")):
        call = case.build(device)
        outs = rope(call, call.tensors)
        assert [out.shape for out in outs] == [t.shape for t in call.tensors]
        grads = torch.autograd.grad(outs, call.tensors, outs)
        assert [grad.shape for grad in grads] == [t.shape for t in call.tensors]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_is_used(used, inplace, device):
    call = CASES["packed"].build(device)
    tensors = [t.clone() for t in call.tensors]
    outs = rope(call, tensors, inplace=inplace)
    grads = incoming(outs)
    actual = torch.autograd.grad(outs[used], call.tensors, grads[used], allow_unused=True)
    check_equal([actual[used]], [plain_gradients(call, grads)[used]])
    unused = actual[1 - used]
    assert unused is None or not unused.any()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_only_one_input_needs_a_gradient(frozen, inplace, device):
    call = CASES["packed"].build(device)
    tensors = [t.clone() for t in call.tensors]
    tensors[frozen] = tensors[frozen].detach()
    outs = rope(call, tensors, inplace=inplace)
    grads = incoming(outs)
    total = sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True))
    trained = 1 - frozen
    (actual,) = torch.autograd.grad(total, call.tensors[trained])
    check_equal([actual], [plain_gradients(call, grads)[trained]])


@pytest.mark.parametrize("name", CASES)
def test_inputs_stay_as_they_are(name, device):
    call = CASES[name].build(device)
    given = [*call.tensors, call.cos, call.sin]
    before = [t.detach().clone() for t in given]
    versions = [t._version for t in given]
    outs = rope(call, call.tensors)
    torch.autograd.grad(outs, call.tensors, incoming(outs))
    assert all(map(torch.equal, given, before))
    assert [t._version for t in given] == versions
    storages = {t.untyped_storage().data_ptr() for t in [*outs, *given]}
    assert len(storages) == len(outs) + len(given)


# --------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_only_table_and_positions_are_saved(name, inplace, device):
    call = CASES[name].build(device)
    allowed = [call.cos, call.sin]
    if "packed" in call.options:
        allowed += [call.options["packed"].cu_seqlens_static, call.options["packed"].host_meta]
    if "position_ids" in call.options:
        allowed.append(call.options["position_ids"])
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    tensors = [t.clone() for t in call.tensors]
    freed = [torch._C._WeakTensorRef(t) for t in tensors]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = rope(call, tensors, inplace=inplace)
    assert {call.cos.untyped_storage().data_ptr(), call.sin.untyped_storage().data_ptr()} <= set(
        saved
    ), "what is not saved through hooks cannot be moved by them"
    assert set(saved) <= {t.untyped_storage().data_ptr() for t in allowed}
    if not inplace:
        del tensors
        assert all(ref.expired() for ref in freed), "an input is kept alive"
    del outs


def test_an_edit_of_what_is_saved_is_detected(device):
    edits = {
        "cos": ("packed", lambda call: call.cos),
        "sin": ("packed", lambda call: call.sin),
        "offsets": ("packed", lambda call: call.options["packed"].cu_seqlens_static),
        "position_ids": ("mrope", lambda call: call.options["position_ids"]),
    }
    for name, edited in edits.values():
        call = CASES[name].build(device)
        outs = rope(call, call.tensors)
        edited(call).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(outs, call.tensors, incoming(outs))


def test_saved_tensors_on_the_cpu(device):
    call = CASES["packed"].build(device)
    with torch.autograd.graph.save_on_cpu():
        outs = rope(call, call.tensors)
    grads = incoming(outs)
    actual = torch.autograd.grad(outs, call.tensors, grads)
    check_equal(actual, plain_gradients(call, grads))


@pytest.mark.parametrize("norm", [False, True])
def test_errors_of_hooks_come_through(norm, device):
    """Checkpointing ends its recomputation by raising in a hook."""
    call = CASES["packed"].build(device)

    def refuse(tensor):
        raise KeyError("from a hook")

    arguments = dict(cos=call.cos, sin=call.sin, **call.options)
    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor):
        with pytest.raises(KeyError, match="from a hook"):
            if norm:
                weights = norm_weights(call)
                cuseq.apply_qk_norm_rope(*call.tensors, *weights, eps=1e-6, **arguments)
            else:
                cuseq.apply_rope(*call.tensors, **arguments)


def test_a_table_takes_no_gradient(device):
    call = CASES["packed"].build(device)
    for name in ("cos", "sin"):
        wanting = call._replace(**{name: getattr(call, name).clone().requires_grad_()})
        with pytest.raises((ValueError, RuntimeError), match=f"{name}.*grad"):
            rope(wanting, call.tensors)


# -------------------------------------------------------------------------------- in place


@pytest.mark.kernels
@pytest.mark.parametrize("name", ALL_CASES)
def test_in_place(name, device):
    call = ALL_CASES[name].build(device)
    tensors = [t.clone() for t in call.tensors]
    results = rope(call, tensors, inplace=True)
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    check_equal(tensors, [call.plain(t) for t in call.tensors])
    grads = incoming(tensors)
    actual = torch.autograd.grad(tensors, call.tensors, grads)
    check_equal(actual, plain_gradients(call, grads))


@pytest.mark.parametrize("qkv_format", ["thd", "bshd", "bhsd"])
def test_in_place_on_slices_of_a_fused_projection(qkv_format, device):
    """The gradient reaches the projection through q, k, v and the fused row itself."""
    tokens, heads, dim = (6,) if qkv_format == "thd" else (2, 3), (3, 2, 2), 8
    call = Case(tokens, qkv_format=qkv_format).build(device)
    generator = torch.Generator().manual_seed(2)
    hidden, weight, probe = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((*tokens, 5), (sum(heads) * dim, 5), (*tokens, sum(heads), dim))
    )
    weight.requires_grad_()

    def fused(rotation) -> tuple[Tensor, Tensor]:
        row = torch.nn.functional.linear(hidden, weight).view(*tokens, sum(heads), dim)
        q, k, v = row[..., :3, :], row[..., 3:5, :], row[..., 5:, :]
        if qkv_format == "bhsd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rotation(q, k)
        if qkv_format == "bhsd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        result = torch.cat((q, k, v), -2)
        return row, result

    row, result = fused(lambda q, k: rope(call, [q, k], inplace=True))
    assert torch.equal(row, result), "the fused row itself is rotated"
    _, expected = fused(lambda q, k: (call.plain(q), call.plain(k)))
    check_equal([result], [expected])
    (plain,) = torch.autograd.grad((expected.sin() * probe).sum(), weight)
    for used in (row, result):
        (grad,) = torch.autograd.grad((used.sin() * probe).sum(), weight, retain_graph=True)
        error = float((grad - plain).norm() / plain.norm())
        assert error <= 8 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("leaf", [0, 1])
def test_in_place_on_a_leaf_raises(leaf, view, device):
    call = CASES["packed"].build(device)
    tensors = [t.clone() for t in call.tensors]
    tensors[leaf] = call.tensors[leaf][:] if view else call.tensors[leaf]
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(RuntimeError, match="leaf"):
        rope(call, tensors, inplace=True)
    assert all(map(torch.equal, tensors, before)), "a refused call changes nothing"


@pytest.mark.parametrize("expanded", [0, 1])
def test_in_place_on_expanded_memory_raises(expanded, device):
    call = CASES["packed"].build(device)
    tensors = [t.detach().clone() for t in call.tensors]
    tensors[expanded] = tensors[expanded][:1].clone().expand_as(tensors[expanded])
    before = [t.clone() for t in tensors]
    with pytest.raises((ValueError, RuntimeError), match="overlap|single memory location|expand"):
        rope(call, tensors, inplace=True)
    assert all(map(torch.equal, tensors, before)), "a refused call changes nothing"
    check_equal(rope(call, tensors), [call.plain(t) for t in tensors])


@pytest.mark.parametrize("grad", [False, True])
def test_in_place_moves_the_version(grad, device):
    call = CASES["packed"].build(device)
    tensors = [t.clone() if grad else t.detach().clone() for t in call.tensors]
    versions = [t._version for t in tensors]
    rope(call, tensors, inplace=True)
    assert all(t._version > before for t, before in zip(tensors, versions, strict=True))


@pytest.mark.parametrize("edited", [0, 1])
@pytest.mark.parametrize("grad", [False, True])
def test_in_place_on_what_another_op_saved_is_detected(edited, grad, device):
    call = CASES["packed"].build(device)
    tensors = [t.clone() if grad else t.detach().clone() for t in call.tensors]
    other = torch.ones_like(tensors[edited], requires_grad=True)
    product = tensors[edited] * other
    rope(call, tensors, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode, inplace, device):
    call = CASES["packed"].build(device)
    expected = [call.plain(t).detach() for t in call.tensors]
    with mode():
        # Under no_grad even a leaf may be rotated in place, as with any in-place op.
        tensors = [t.clone() for t in call.tensors] if mode is torch.inference_mode else [
            t.detach().clone().requires_grad_() for t in call.tensors
        ]  # fmt: skip
        outs = rope(call, tensors, inplace=inplace)
        check_equal(outs, expected)
        assert all(out.grad_fn is None for out in outs)
        assert all(out.is_inference() == (mode is torch.inference_mode) for out in outs)
    if inplace and mode is torch.inference_mode:
        with pytest.raises(RuntimeError, match="inference"):
            rope(call, tensors, inplace=True)


# ----------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, inplace, device):
    call = CASES["packed"].build(device)

    def layer(*tensors):
        return tuple(rope(call, [t * 1 for t in tensors], inplace=inplace))

    outs = checkpoint(layer, *call.tensors, use_reentrant=reentrant)
    grads = incoming(list(outs))
    torch.autograd.backward(outs, grads)
    check_equal([t.grad for t in call.tensors], plain_gradients(call, grads))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpoint_sees_the_op(policy, device):
    call = CASES["packed"].build(device)
    seen = []

    def choose(context, op, *args, **kwargs):
        seen.append(op)
        return policy if op is ops.apply_rope.default else CheckpointPolicy.PREFER_RECOMPUTE

    outs = checkpoint(
        lambda *tensors: tuple(rope(call, [t * 1 for t in tensors])),
        *call.tensors,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(choose),
    )
    grads = incoming(list(outs))
    torch.autograd.backward(outs, grads)
    assert ops.apply_rope.default in seen
    check_equal([t.grad for t in call.tensors], plain_gradients(call, grads))


# -------------------------------------------------------------------------------- compiled


def check_compiled(compiled, call: Call, *args: Any) -> None:
    """Check results and gradients of a compiled `function(q, k, cos, sin, ...)`."""
    outs = compiled(*call.tensors, call.cos, call.sin, *args)
    check_equal(list(outs), [call.plain(t) for t in call.tensors])
    grads = incoming(list(outs))
    actual = torch.autograd.grad(outs, call.tensors, grads)
    check_equal(actual, plain_gradients(call, grads))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend,dynamic", COMPILERS)
def test_one_graph_for_all_packs(backend, dynamic, inplace, device):
    def layer(q, k, cos, sin, packed):
        return cuseq.apply_rope(q * 1, k * 1, cos, sin, packed=packed, inplace=inplace)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for lengths in ((2, 3), (1, 1, 1), (6,), (0, 2), (), (1,) * 6):
        call = Case(lengths=lengths).build(device)
        check_compiled(compiled, call, call.options["packed"])
    assert counter.frame_count == 1


def test_one_graph_for_all_row_lengths(device):
    def layer(q, k, cos, sin, packed):
        return cuseq.apply_rope(q, k, cos, sin, packed=packed)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens, lengths in ((13, (2, 3)), (9, (1, 5, 3)), (17, (4,))):
        call = Case((tokens,), lengths=lengths).build(device)
        check_compiled(compiled, call, call.options["packed"])
    assert counter.frame_count == 1


def test_one_graph_for_all_offsets(device):
    """In a decode step the position is not a constant of the graph."""

    def step(q, k, cos, sin, offset):
        return cuseq.apply_rope(q, k, cos, sin, qkv_format="bshd", offset=offset)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for offset in (2, 3, 7, TABLE_ROWS - 3):
        case = Case((2, 3), "dense", qkv_format="bshd", options=dict(offset=offset))
        check_compiled(compiled, case.build(device), offset)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_plain(name, device):
    call = CASES[name].build(device)

    def layer(*tensors):
        return tuple(rope(call, list(tensors)))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    outs = compiled(*call.tensors)
    check_equal(list(outs), [call.plain(t) for t in call.tensors])
    grads = incoming(list(outs))
    check_equal(torch.autograd.grad(outs, call.tensors, grads), plain_gradients(call, grads))


def test_compiled_autograd(device):
    call = CASES["packed"].build(device)
    outs = rope(call, call.tensors)
    grads = incoming(outs)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        torch.autograd.backward(outs, grads)
    check_equal([t.grad for t in call.tensors], plain_gradients(call, grads))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_place_mutates_its_inputs(backend, grad, device):
    call = CASES["packed"].build(device)

    def layer(q, k, packed):
        rotated, _ = cuseq.apply_rope(q, k, call.cos, call.sin, packed=packed, inplace=True)
        return rotated.sin()

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    tensors = [t.clone() if grad else t.detach().clone() for t in call.tensors]
    expected = [call.plain(t) for t in call.tensors]
    sines = compiled(*tensors, call.options["packed"])
    check_equal([*tensors, sines], [*expected, expected[0].sin()])
    if grad:
        grads = incoming(tensors)
        actual = torch.autograd.grad(tensors, call.tensors, grads)
        check_equal(actual, plain_gradients(call, grads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_place_on_slices(backend, device):
    call = CASES["packed"].build(device)

    def layer(row, packed):
        row = row * 1
        q, k = row[:, :2], row[:, 2:3]
        cuseq.apply_rope(q, k, call.cos, call.sin, packed=packed, inplace=True)
        return row

    row = torch.cat([*call.tensors, call.tensors[1]], 1).detach().requires_grad_()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    out = compiled(row, call.options["packed"])
    expected = torch.cat((call.plain(row[:, :2]), call.plain(row[:, 2:3]), row[:, 3:]), 1)
    check_equal([out], [expected])
    grads = incoming([out])
    check_equal(
        torch.autograd.grad(out, row, grads),
        torch.autograd.grad(expected, row, grads),
    )


# --------------------------------------------------------------------------------- opcheck


def op_options(call: Call) -> dict[str, Any]:
    """Return the options of apply_rope as arguments of its op."""
    options = dict(call.options)
    packed = options.pop("packed", None)
    if packed is not None:
        options |= dict(cu_seqlens=packed.cu_seqlens_static, host_meta=packed.host_meta)
    return options


def norm_weights(call: Call) -> list[Tensor]:
    return [1 + incoming([t[(0,) * (t.dim() - 1)]])[0] / 4 for t in call.tensors]


def sliced(call: Call) -> Call:
    """Return the same call with tensors that are slices of wider ones."""
    return call._replace(
        tensors=[torch.cat((t, t), -1).detach()[..., : t.shape[-1]] for t in call.tensors]
    )


OPCHECKED = [
    "packed",
    "packed, bshd, full width",
    "packed, bhsd, no key",
    "dense, bhsd, offset",
    "ids, bhsd, partial",
    "token",
    "mrope, interleaved",
    "cp",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPCHECKED)
@pytest.mark.parametrize("op", ["apply_rope", "apply_qk_norm_rope"])
def test_opcheck(op, name, device):
    call = CASES[name].build(device)
    tables, options = (call.cos, call.sin), op_options(call)
    weights = [weight.requires_grad_() for weight in norm_weights(call)]
    norm = (weights, 1e-6, 1.0) if op == "apply_qk_norm_rope" else ()
    opcheck(getattr(ops, op), (call.tensors, *norm, *tables), options)
    frozen = [t.detach() for t in call.tensors]
    frozen_norm = ([w.detach() for w in weights], *norm[1:]) if norm else ()
    opcheck(getattr(ops, f"{op}_"), (frozen, *frozen_norm, *tables), options)
    if norm:
        _, rstd = ops.apply_qk_norm_rope(frozen, *frozen_norm, *tables, **options)
        arguments = (incoming(frozen), frozen, frozen_norm[0], rstd, 1.0, True, *tables)
        opcheck(ops.apply_qk_norm_rope_backward, arguments, options)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["apply_rope", "apply_qk_norm_rope"])
def test_opcheck_of_strided_tensors(op, device):
    call = sliced(CASES["packed"].build(device))
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in call.tensors]
    for tensors in (call.tensors, transposed):
        norm = (norm_weights(call), 1e-6, 0.0) if op == "apply_qk_norm_rope" else ()
        arguments = (tensors, *norm, call.cos, call.sin)
        opcheck(getattr(ops, f"{op}_"), arguments, op_options(call))
        opcheck(
            getattr(ops, op),
            ([t.detach().requires_grad_() for t in tensors], *arguments[1:]),
            op_options(call),
        )


def test_the_inverse_turns_back(device):
    call = CASES["packed, interleaved, partial"].build(device)
    options = op_options(call)
    outs = ops.apply_rope(call.tensors, call.cos, call.sin, **options)
    back = ops.apply_rope(outs, call.cos, call.sin, **options, inverse=True)
    check_equal(back, call.tensors)
    # The gradient of the inverse rotation is the rotation.
    grads = incoming(outs)
    actual = torch.autograd.grad(
        ops.apply_rope(call.tensors, call.cos, call.sin, **options, inverse=True),
        call.tensors,
        grads,
    )
    check_equal(actual, [call.plain(grad) for grad in grads])


def test_the_fake_knows_the_memory_format(device):
    """Whatever the strides of the input, the fake result has those of the real one."""
    case = CASES["packed, bshd, full width"]
    call = case.build(device)
    q, k = (t.detach() for t in call.tensors)
    for tensors in ([q, k], [q.transpose(1, 2).contiguous().transpose(1, 2), k]):
        real = rope(call, tensors)
        meta = ops.apply_rope(
            [t.to("meta") for t in tensors],
            call.cos.to("meta"),
            call.sin.to("meta"),
            **{
                name: value.to("meta") if isinstance(value, Tensor) else value
                for name, value in op_options(call).items()
            },
        )
        for one, other in zip(real, meta, strict=True):
            assert (one.shape, one.stride()) == (other.shape, other.stride())


# ------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize("inplace", [False, True])
def test_vmap_is_refused(inplace, device):
    call = CASES["packed"].build(device)
    batches = [torch.stack((t, t)).detach() for t in call.tensors]
    with pytest.raises((NotImplementedError, RuntimeError), match="apply_rope.*vmap"):
        torch.func.vmap(lambda *tensors: tuple(rope(call, list(tensors), inplace=inplace)))(
            *batches
        )


def test_forward_mode_is_refused(device):
    call = CASES["packed"].build(device)
    q, k = (t.detach() for t in call.tensors)
    refused = pytest.raises(
        (NotImplementedError, RuntimeError),
        match="apply_rope.*forward-mode|forward-mode.*apply_rope",
    )
    with refused:
        torch.func.jvp(lambda q: rope(call, [q, k])[0], (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        for i in range(2):
            tensors = [q, k]
            tensors[i] = torch.autograd.forward_ad.make_dual(tensors[i], tensors[i])
            with refused:
                rope(call, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_leaves_the_dtype(dtype, device):
    call = CASES["packed"].build(device, dtype)
    expected = rope(call, call.tensors)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outs = rope(call, call.tensors)
    for out, other in zip(outs, expected, strict=True):
        assert out.dtype == dtype and torch.equal(out, other)


# ------------------------------------------------------------------------------ on the GPU


@pytest.mark.parametrize("name", ["packed", "packed, bhsd, no key", "ids, bhsd, partial", "cp"])
def test_nothing_waits(name, cuda):
    call = CASES[name].build(cuda, torch.bfloat16)
    grads = incoming(call.tensors)

    def body():
        torch.autograd.grad(rope(call, call.tensors), call.tensors, grads)
        rope(call, [t.clone() for t in call.tensors], inplace=True)

    assert not waits(body)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_captured_graph_reads_its_offsets(inplace, cuda):
    """Replayed with other lengths, it uses other positions, forward and backward."""
    case = Case((64,), lengths=(9, 14), heads=(4, 2), dim=64, rotary=64)
    call = case.build(cuda)
    offsets = torch.zeros(9, dtype=torch.int32, device=cuda)
    static = PackedLayout.from_lengths([9, 14], 64, max_seqs=8, device=cuda)
    static.row = static.row._replace(cu_seqlens_static=offsets)
    grads = incoming(call.tensors)

    def step(packed):
        q, k = (t * 1 for t in call.tensors)
        outs = cuseq.apply_rope(q, k, call.cos, call.sin, packed=packed, inplace=inplace)
        return [*outs, *torch.autograd.grad(outs, call.tensors, grads)]

    def layout(lengths):
        return PackedLayout.from_lengths(lengths, 64, max_seqs=8, device=cuda)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layout([9, 14]))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    kept = []
    for lengths in ([9, 14], [1, 2, 3], [64], [], [0, 30, 0, 20]):
        offsets.copy_(layout(lengths).cu_seqlens_static)
        graph.replay()
        kept.append([t.clone() for t in captured])
        check_equal(kept[-1], step(layout(lengths)))
    assert not torch.equal(kept[0][0], kept[1][0])


def test_a_captured_graph_reads_its_position_ids(cuda):
    call = LARGE["5x128"].build(cuda)
    ids = call.options["position_ids"]
    rope(call, call.tensors)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = rope(call, call.tensors)
    for new in (ids.clone(), ids.flip(1)):
        ids.copy_(new)
        graph.replay()
        check_equal(captured, rope(call, call.tensors))


@pytest.mark.slow
def test_reduce_overhead_keeps_the_lengths(cuda):
    def layer(q, k, cos, sin, packed):
        return cuseq.apply_rope(q * 1, k * 1, cos, sin, packed=packed)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for lengths in ((2, 3), (1, 1, 1), (6,), (2, 3), ()) * 2:
        call = Case(lengths=lengths).build(cuda)
        torch.compiler.cudagraph_mark_step_begin()
        check_compiled(compiled, call, call.options["packed"])
