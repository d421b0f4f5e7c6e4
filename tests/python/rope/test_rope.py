"""apply_rope and rope_table: values on every device, from every source of positions."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_lengths, packings
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cuseq
from cuseq import PackedLayout

op = torch.ops.cuseq.apply_rope

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (2, 3, 16, 17, 20, 64, 80, 96, 112, 128, 192, 256, 512)
LAYOUTS = ("thd", "bshd", "bhsd")

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_cache")


def random(*shape: int, dtype=torch.float32, device="cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def tables(*shape: int, **options) -> tuple[Tensor, Tensor]:
    """Return tables with values that no angle has, so that a mix-up always shows."""
    return random(*shape, **options, seed=1), random(*shape, **options, seed=2)


def in_layout(x: Tensor, qkv_format: str) -> Tensor:
    """Convert `x`, `[batch, seqlen, heads, head_dim]`, to a qkv_format."""
    if qkv_format == "bhsd":
        return x.transpose(1, 2).contiguous()
    return x.flatten(0, 1) if qkv_format == "thd" else x


def flat(x: Tensor, qkv_format: str) -> Tensor:
    """Return `[tokens, heads, head_dim]` from any qkv_format."""
    if qkv_format == "bhsd":
        x = x.transpose(1, 2)
    return x if qkv_format == "thd" else x.flatten(0, 1)


def widen(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def assert_rounded_once(actual: Tensor, expected: Tensor, x: Tensor, table: Tensor) -> None:
    """Check the error: one rounding to the dtype, and a few roundings in fp32 (fp64 for fp64)."""
    if x.numel() == 0:
        return
    own = torch.finfo(x.dtype)
    arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32))
    largest = float(x.double().abs().max() * table.double().abs().max())
    allowed = own.eps / 2 * expected.abs() + 4 * arithmetic.eps * largest + own.tiny * own.eps
    assert ((actual.double() - expected).abs() <= allowed).all()


def check(q, k, cos, sin, positions, *, given=None, inplace=True, **options):
    """Compare cuseq with the loops, which read the half-width `cos` and `sin`.

    `given` are the tables for cuseq, if they differ. Also checks that inputs are unchanged, the
    properties of the outputs, and that in-place rotation gives the same.
    """
    given = (cos, sin) if given is None else given
    inputs = [x for x in (q, k) if x is not None]
    before = [x.clone() for x in inputs]
    results = cuseq.apply_rope(q, k, *given, **options)
    assert type(results) is tuple and (results[1] is None) == (k is None)
    qkv_format, pairs = options.get("qkv_format", "thd"), cos.shape[-1]
    for x, kept, out in zip(inputs, before, results, strict=False):
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert out.stride() == torch.empty_like(x).stride()
        assert torch.equal(x, kept), "the input must stay as it is"
        rows = flat(x, qkv_format).cpu()
        expected = reference.rope(
            rows,
            cos.cpu(),
            sin.cpu(),
            positions,
            interleaved=options.get("interleaved", False),
            section=options.get("mrope_section"),
            mrope_interleaved=options.get("mrope_interleaved", False),
        )
        actual = flat(out, qkv_format).cpu()
        assert torch.equal(actual[..., 2 * pairs :], rows[..., 2 * pairs :])
        assert_rounded_once(actual, expected, rows, torch.cat((cos, sin)).cpu())
    if inplace:
        edited = [x.clone() for x in inputs] + [None] * (k is None)
        returned = cuseq.apply_rope(*edited, *given, **options, inplace=True)
        for x, same, out in zip(edited, returned, results, strict=True):
            assert (out is None) == (x is None) == (same is None)
            if x is not None:
                assert torch.equal(x, out)
                assert (same.data_ptr(), same.stride()) == (x.data_ptr(), x.stride())
    return results


# Lengths [2, 3] in a row of 6 tokens, with angles of 90 and 180 degrees per position.
QUARTERS = dict(cos=[[1, 1], [0, -1], [-1, 1]], sin=[[0, 0], [1, 0], [0, 0]])
LITERAL = {
    False: ([1, 2, 3, 4], [-3, -2, 1, -4], [-1, 2, -3, 4]),
    True: ([1, 2, 3, 4], [-2, 1, -3, -4], [-1, -2, 3, 4]),
}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", LITERAL)
def test_literal_case(interleaved, dtype, device):
    cos, sin = (torch.tensor(table, dtype=dtype, device=device) for table in QUARTERS.values())
    q = torch.tensor([1, 2, 3, 4], dtype=dtype, device=device).repeat(6, 1, 1)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    out, none = cuseq.apply_rope(q, None, cos, sin, packed=packed, interleaved=interleaved)
    first, second, third = LITERAL[interleaved]
    assert out.tolist() == [[row] for row in (first, second, first, second, third, first)]
    assert none is None
    positions = [0, 1, 0, 1, 2, 0]
    assert reference.rope_positions([2, 3], 6) == positions
    loops = reference.rope(q, cos, sin, positions, interleaved=interleaved)
    assert loops.tolist() == out.tolist()


# Any valid call.


@st.composite
def rotations(draw):
    """Draw shapes, tables, the source of positions and the options, all as CPU tensors."""
    dim = draw(st.sampled_from(HEAD_DIMS))
    pairs = draw(st.just(dim // 2) | st.integers(1, dim // 2))
    qkv_format = draw(st.sampled_from(LAYOUTS))
    batch = 1 if qkv_format == "thd" else draw(st.integers(0, 3))
    seqlen = draw(st.integers(0, 5))
    tokens = batch * seqlen
    seed = draw(st.integers(0, 2**32))
    dtype = draw(st.sampled_from(DTYPES))
    q, k = (
        None
        if heads is None
        else in_layout(
            random(batch, seqlen, heads, dim, dtype=dtype, seed=seed + heads), qkv_format
        )
        for heads in (draw(st.sampled_from([1, 2, 3, 7])), draw(st.sampled_from([None, 1, 2, 8])))
    )
    options = {"qkv_format": qkv_format, "interleaved": draw(st.booleans())}

    source = draw(st.sampled_from(["packed", "dense", "position_ids", "token"]))
    lengths, ids = None, None
    if source == "packed":
        ends = sorted(draw(st.lists(st.integers(0, tokens), max_size=5)))
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        used = positions = reference.rope_positions(lengths, tokens)
    elif source == "dense":
        options["offset"] = draw(st.integers(0, 3))
        positions = [options["offset"] + s for s in range(seqlen)] * batch
        used = range(options["offset"] + seqlen)
    else:
        section = None
        if draw(st.booleans()):
            cuts = sorted(draw(st.tuples(*[st.integers(0, pairs)] * 2)))
            section = [cuts[0], cuts[1] - cuts[0], pairs - cuts[1]]
            options |= {"mrope_section": section, "mrope_interleaved": draw(st.booleans())}
        # [batch, seqlen], or one row for the whole batch: [1, seqlen] or [seqlen].
        shape = draw(st.sampled_from([(batch, seqlen), (1, seqlen), (seqlen,)]))
        planes = () if section is None else (3,)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 9, planes + shape, generator=generator)
        per_row = ids if len(shape) == 2 else ids.unsqueeze(-2)
        positions = per_row.expand(*planes, batch, seqlen).flatten(-2).tolist()
        used = ids.flatten().tolist()

    rows = max(used, default=-1) + 1 + draw(st.integers(0, 2))
    table_dtype = draw(st.sampled_from(DTYPES))
    cos, sin = tables(rows, pairs, dtype=table_dtype)
    given = (cos, sin)
    if source == "token":
        given = tuple(table[ids] for table in given)
        options["table"] = "token"
    elif source == "position_ids":
        options["position_ids"] = ids.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):  # full width
        given = tuple(widen(table, options["interleaved"]) for table in given)
    width = given[0].shape[-1]
    by_default = 2 * width if 2 * width <= dim else width
    if by_default != 2 * pairs or draw(st.booleans()):
        options["rotary_dim"] = 2 * pairs
    return q, k, cos, sin, positions, dict(given=given, **options), lengths


@given(rotation=rotations())
@settings(max_examples=200)
def test_any_rotation(rotation, device):
    q, k, cos, sin, positions, options, lengths = rotation
    q, cos, sin = q.to(device), cos.to(device), sin.to(device)
    k = None if k is None else k.to(device)
    options["given"] = tuple(table.to(device) for table in options["given"])
    if "position_ids" in options:
        options["position_ids"] = options["position_ids"].to(device)
    if lengths is not None:
        options["packed"] = PackedLayout.from_lengths(
            lengths, len(positions), max_seqs=8, device=device
        )
    check(q, k, cos, sin, positions, **options)


@given(
    packing=packings(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    made=st.sampled_from(["host lengths", "lengths", "cu_seqlens"]),
    interleaved=st.booleans(),
)
def test_any_packing(packing, dtype, made, interleaved, device):
    """Long rows of small heads, and layouts whose lengths only the device knows."""
    lengths, tokens = packing
    if made == "host lengths":
        packed = PackedLayout.from_lengths(lengths, tokens, max_seqs=40, device=device)
    elif made == "lengths":
        on_device = make_lengths(lengths, dtype, device)
        packed = PackedLayout.from_lengths(on_device, tokens, max_seqs=40)
    else:
        offsets = make_lengths(reference.cu_seqlens(lengths), dtype, device)
        packed = PackedLayout.from_cu_seqlens(offsets, tokens, max_seqs=40)
    positions = reference.rope_positions(lengths, tokens)
    cos, sin = tables(max(positions, default=0) + 1, 2, device=device)
    q, k = random(tokens, 1, 6, device=device), random(tokens, 2, 6, device=device, seed=5)
    check(q, k, cos, sin, positions, packed=packed, interleaved=interleaved)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(dim, dtype, device):
    """Each vector width, with all or part of the head rotated."""
    packed = PackedLayout.from_lengths([3, 0, 1], 5, device=device)
    q, k = (random(5, heads, dim, dtype=dtype, device=device, seed=heads) for heads in (3, 1))
    for interleaved in (False, True):
        for pairs in {1, dim // 4, dim // 2} - {0}:
            cos, sin = tables(3, pairs, device=device)
            options = dict(packed=packed, interleaved=interleaved, rotary_dim=2 * pairs)
            check(q, k, cos, sin, [0, 1, 2, 0, 0], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads,key_heads,dim",
    [(40, 8, 8), (7, 3, 8), (1, 5, 8), (3, None, 8), (300, 1, 8), (66, 7, 512)],
)
@pytest.mark.parametrize("qkv_format", LAYOUTS)
def test_head_counts(heads, key_heads, dim, qkv_format, dtype, device):
    q = in_layout(random(2, 3, heads, dim, dtype=dtype, device=device), qkv_format)
    k = key_heads and in_layout(
        random(2, 3, key_heads, dim, dtype=dtype, device=device), qkv_format
    )
    cos, sin = tables(6, dim // 2, device=device)
    dense = list(range(6)) if qkv_format == "thd" else [0, 1, 2] * 2
    check(q, k, cos, sin, dense, qkv_format=qkv_format)


@pytest.mark.parametrize("count", [31, 32, 33, 1000, 1025, 40_000])
def test_many_sequences(count, device):
    """With and without host values; a fifth of the sequences are empty."""
    lengths = [7 * i % 5 for i in range(count)]
    tokens = sum(lengths) + 3
    packed = PackedLayout.from_lengths(lengths, tokens, max_seqs=count + 100, device=device)
    q, (cos, sin) = random(tokens, 1, 2, device=device), tables(4, 1, device=device)
    positions = reference.rope_positions(lengths, tokens)
    out, _ = check(q, None, cos, sin, positions, packed=packed)
    for offsets in (packed.cu_seqlens, packed.cu_seqlens_static):
        assert torch.equal(op([q], cos, sin, offsets)[0], out)


@pytest.mark.slow
def test_without_vector_instructions(run_python):
    """Processors without AVX2 run this path."""
    code = f"""
import sys, torch
sys.path[:0] = {[str(Path(file).parent) for file in (__file__, reference.__file__)]!r}
import test_rope
for dtype in test_rope.DTYPES:
    for dim in test_rope.HEAD_DIMS:
        test_rope.test_head_dims(dim, dtype, torch.device("cpu"))
print("all right on", torch.backends.cpu.get_cpu_capability())
"""
    result = run_python(code, ATEN_CPU_CAPABILITY="default")
    assert "all right on" in result.stdout, result.stderr
    assert "AVX" not in result.stdout


# Rounding.


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply transformers' formula in the dtype of `x`; the tables have full width."""
    width = cos.shape[-1]
    rotary, rest = x[..., :width], x[..., width:]
    half = torch.cat((-rotary[..., width // 2 :], rotary[..., : width // 2]), dim=-1)
    cos, sin = (table.to(x.dtype).unsqueeze(1) for table in (cos, sin))
    return torch.cat((rotary * cos + half * sin, rest), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table_dtype", ["same", "fp32"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_no_further_from_float64_than_eager(rotary_dim, table_dtype, dtype, device):
    tokens = 3000
    cos, sin = cuseq.rope_table(tokens, rotary_dim, device=device)
    if table_dtype == "same":
        cos, sin = cos.to(dtype), sin.to(dtype)
    q, k = (random(tokens, heads, 64, dtype=dtype, device=device, seed=heads) for heads in (5, 2))
    full = [widen(table, False) for table in (cos, sin)]
    for x, out in zip((q, k), cuseq.apply_rope(q, k, cos, sin), strict=True):
        exact = eager(x.double(), *full)
        errors, theirs = ((y.double() - exact).abs() for y in (out, eager(x, *full)))
        assert 0 < errors.max() <= theirs.max() and 0 < errors.mean() <= theirs.mean()


# Positions.


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("qkv_format", LAYOUTS)
def test_position_ids_of_any_strides(qkv_format, dtype, device):
    q = in_layout(random(2, 3, 2, 8, device=device), qkv_format)
    cos, sin = tables(90, 4, device=device)
    values = [[7, 0, 89], [3, 3, 12]]
    ids = torch.tensor(values, dtype=dtype, device=device)
    if qkv_format == "thd":
        ids = ids.flatten()
        forms = [ids, ids[None], torch.stack([ids * 0 - 5, ids], 1)[:, 1]]
    else:
        forms = [ids, ids.t().contiguous().t(), torch.stack([ids * 0 - 5, ids], 2)[..., 1]]
    for form in forms:
        check(q, None, cos, sin, sum(values, []), qkv_format=qkv_format, position_ids=form)
    if qkv_format != "thd":
        for shared in (ids[1], ids[1:], ids[1:].expand(2, -1)):
            check(q, None, cos, sin, [3, 3, 12] * 2, qkv_format=qkv_format, position_ids=shared)


@pytest.mark.parametrize("qkv_format", LAYOUTS)
def test_offset_of_a_decode_step(qkv_format, device):
    """The last valid offset gives the same result as explicit position ids."""
    q = in_layout(random(1, 1, 2, 8, device=device), qkv_format)
    cos, sin = tables(50, 4, device=device)
    for offset in (0, 1, 49):
        out, _ = check(q, None, cos, sin, [offset], qkv_format=qkv_format, offset=offset)
        ids = torch.tensor([offset], device=device)
        assert torch.equal(
            out, cuseq.apply_rope(q, None, cos, sin, qkv_format=qkv_format, position_ids=ids)[0]
        )


# Planes.


@pytest.mark.parametrize(
    "section,interleaved,planes",
    [
        ([2, 1, 1], False, [0, 0, 1, 2]),  # Qwen2-VL: one section after the other
        ([2, 1, 1], True, [0, 1, 2, 0]),  # Qwen3-VL: in turn, until a section is used up
        ([3, 2, 1], True, [0, 1, 2, 0, 1, 0]),
        ([4, 1, 1], True, [0, 1, 2, 0, 0, 0]),
        ([2, 2, 2], False, [0, 0, 1, 1, 2, 2]),
        ([0, 3, 0], False, [1, 1, 1]),
        ([3, 0, 0], True, [0, 0, 0]),
        ([2, 0, 1], True, [0, 0, 2]),
    ],
)
@pytest.mark.parametrize("table", ["position", "token"])
@pytest.mark.kernels
def test_which_plane_a_pair_follows(table, section, interleaved, planes, device):
    """Row p of the table multiplies by p, so the result shows the position of each pair."""
    assert planes == [reference.mrope_plane(i, section, interleaved) for i in range(len(planes))]
    pairs = len(planes)
    positions = [[10, 11], [20, 21], [30, 31]]
    ids = torch.tensor(positions, device=device)
    cos = torch.arange(32.0, device=device)[:, None].repeat(1, pairs)
    sin = torch.zeros_like(cos)
    options = dict(mrope_section=section, mrope_interleaved=interleaved)
    if table == "token":
        options |= dict(table="token")
        cos, sin = cos[ids], sin[ids]
    else:
        options |= dict(position_ids=ids)
    ones = torch.ones(2, 1, 2 * pairs, device=device)
    expected = [[positions[plane][token] for plane in planes] for token in range(2)]
    neox, _ = cuseq.apply_rope(ones, None, cos, sin, **options)
    assert neox[:, 0].tolist() == [row + row for row in expected]
    gptj, _ = cuseq.apply_rope(ones, None, cos, sin, **options, interleaved=True)
    assert gptj[:, 0].tolist() == [[p for p in row for _ in range(2)] for row in expected]


@pytest.mark.kernels
@pytest.mark.parametrize("mrope_interleaved", [False, True])
@pytest.mark.parametrize("qkv_format", LAYOUTS)
@pytest.mark.parametrize(
    "dim,section", [(32, [6, 5, 5]), (32, [6, 2, 8]), (40, [8, 6, 2]), (128, [24, 20, 20])]
)
def test_three_planes(dim, section, qkv_format, mrope_interleaved, device):
    """Shared and token tables of both widths, and ids of any strides."""
    q, k = (in_layout(random(2, 2, n, dim, device=device, seed=n), qkv_format) for n in (2, 1))
    cos, sin = tables(12, sum(section), device=device)
    ids = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]], device=device)
    positions = ids.flatten(1).tolist()
    if qkv_format == "thd":
        ids = ids.flatten(1)
        forms = [ids, ids[:, None]]
    else:
        forms = [ids]
    forms.append(ids.movedim(0, -1).contiguous().movedim(-1, 0))
    options = dict(
        qkv_format=qkv_format, mrope_section=section, mrope_interleaved=mrope_interleaved
    )
    options |= dict(rotary_dim=2 * sum(section))
    for form in forms:
        for tables_given in ((cos, sin), (widen(cos, False), widen(sin, False))):
            shared = dict(options, given=tables_given, position_ids=form)
            out, _ = check(q, k, cos, sin, positions, **shared)
            per_token = [table[form] for table in tables_given]
            again, _ = cuseq.apply_rope(q, k, *per_token, table="token", **options)
            assert torch.equal(again, out)


@pytest.mark.parametrize("qkv_format", LAYOUTS)
def test_token_tables_of_any_strides(qkv_format, device):
    """Views from frameworks: a fused table, one row for the whole batch, tokens first."""
    q = in_layout(random(2, 3, 2, 8, device=device), qkv_format)
    fused = random(2, 3, 8, device=device, seed=1)
    cos, sin = fused.chunk(2, dim=-1)
    if qkv_format == "thd":
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
        forms = [(cos, sin), (cos[None], sin[None])]
    else:
        forms = [(cos, sin), [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (cos, sin)]]
    half = [t.reshape(6, 4) for t in (cos, sin)]
    for form in forms:
        check(q, None, *half, list(range(6)), given=form, qkv_format=qkv_format, table="token")
    if qkv_format != "thd":
        row = [t[1:].expand(2, -1, -1) for t in (cos, sin)]
        check(q, None, *half, [3, 4, 5] * 2, given=row, qkv_format=qkv_format, table="token")


# Context parallel.


def of_rank(x: Tensor, lengths: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return the tokens that a rank holds of a row: a chunk from either end of each segment."""
    chunks = []
    for segment in x.split([*lengths, x.shape[0] - sum(lengths)]):
        of_segment = segment.tensor_split(2 * cp_size)
        chunks += [of_segment[cp_rank], of_segment[-1 - cp_rank]]
    return torch.cat(chunks)


@given(
    cp_size=st.integers(1, 8),
    chunks=st.lists(st.integers(0, 3), max_size=5),
    tail=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
)
@settings(max_examples=40)
def test_ranks_joined_equal_the_whole(cp_size, chunks, tail, dtype, interleaved, device):
    lengths = [2 * cp_size * n for n in chunks]
    tokens = sum(lengths) + 2 * cp_size * tail
    packed = PackedLayout.from_lengths(lengths, tokens, max_seqs=6, device=device)
    positions = reference.rope_positions(lengths, tokens)
    cos, sin = tables(max(positions, default=0) + 1, 2, device=device)
    options = dict(packed=packed, interleaved=interleaved)
    tensors = [random(tokens, n, 4, dtype=dtype, device=device, seed=n) for n in (2, 1)]
    whole = cuseq.apply_rope(*tensors, cos, sin, **options)
    joined = [torch.full(x.shape, float("nan"), dtype=dtype) for x in tensors]
    for cp_rank in range(cp_size):
        options |= dict(cp_size=cp_size, cp_rank=cp_rank)
        local = [of_rank(x, lengths, cp_size, cp_rank) for x in tensors]
        here = reference.rope_positions(lengths, tokens, cp_size, cp_rank)
        results = check(*local, cos, sin, here, **options)
        where = of_rank(torch.arange(tokens), lengths, cp_size, cp_rank)
        for row, out in zip(joined, results, strict=True):
            row[where] = out.cpu()
    for row, out in zip(joined, whole, strict=True):
        assert torch.equal(row, out.cpu())


@pytest.mark.kernels
@pytest.mark.parametrize("qkv_format", LAYOUTS)
@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_ranks_of_batched_layouts(cp_size, qkv_format, device):
    """With a layout, a batch's flat row is part of each segment; without, each batch row is one."""
    lengths = [2 * cp_size * n for n in (3, 0, 1, 2)]
    tokens = sum(lengths) + 2 * cp_size
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    q, k = (in_layout(random(2, 7, n, 8, device=device, seed=n), qkv_format) for n in (2, 3))
    cos, sin = tables(14 * cp_size, 4, device=device)
    batch, row = (1, 14 * cp_size) if qkv_format == "thd" else (2, 7 * cp_size)
    for cp_rank in range(cp_size):
        options = dict(qkv_format=qkv_format, cp_size=cp_size, cp_rank=cp_rank)
        here = reference.rope_positions(lengths, tokens, cp_size, cp_rank)
        check(q, k, cos, sin, here, packed=packed, **options)
        if row % (2 * cp_size) == 0:
            here = reference.rope_positions([row], row, cp_size, cp_rank) * batch
            check(q, k, cos, sin, here, **options)


@pytest.mark.parametrize("lengths,tokens", [([4, 6], 12), ([8, 4], 14), ([3, 1], 4), ([], 6)])
@pytest.mark.parametrize("made", ["host lengths", "lengths"])
def test_lengths_that_ranks_cannot_share(made, lengths, tokens, device):
    if made == "lengths":
        packed = PackedLayout.from_lengths(make_lengths(lengths, torch.int32, device), tokens)
    else:
        packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    q, (cos, sin) = random(tokens // 2, 1, 8, device=device), tables(20, 4, device=device)
    with pytest.raises(ValueError, match="multiple.* 4"):
        cuseq.apply_rope(q, None, cos, sin, packed=packed, cp_size=2)


def test_a_dense_row_that_ranks_cannot_share(device):
    q, (cos, sin) = random(3, 1, 8, device=device), tables(20, 4, device=device)
    with pytest.raises(ValueError, match="multiple.* 4"):
        cuseq.apply_rope(q, None, cos, sin, cp_size=2)


# For q and for k, strides of batch row, token and head; then the start of q and of k, all in heads;
# last, the elements added to each token stride and each start.
VIEWS = {
    "one after the other": ((12, 4, 1), (6, 2, 1), 0, 24, 0),
    "fused QKV row": ((24, 8, 1), (24, 8, 1), 0, 4, 0),
    "fused row, two elements in": ((24, 8, 1), (24, 8, 1), 0, 4, 2),
    "fused row, three elements in": ((24, 8, 1), (24, 8, 1), 0, 4, 3),
    "heads before tokens": ((12, 1, 3), (6, 1, 3), 0, 24, 0),
    "tokens before the batch": ((4, 8, 1), (2, 4, 1), 0, 24, 0),
    "every other head": ((24, 8, 2), (12, 4, 2), 0, 48, 0),
    "apart in every dimension": ((60, 18, 3), (40, 12, 4), 1, 130, 0),
    "one head for all": ((3, 1, 0), (3, 1, 0), 0, 6, 0),
    "one token for all": ((4, 0, 1), (2, 0, 1), 0, 8, 0),
    "one row for all": ((0, 4, 1), (0, 2, 1), 0, 12, 0),
}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim,rotary_dim", [(32, 16), (17, 12)])
@pytest.mark.parametrize("qkv_format", LAYOUTS)
@pytest.mark.parametrize("name", VIEWS)
def test_strides(name, qkv_format, dim, rotary_dim, dtype, device):
    *strides, q_begin, k_begin, apart = VIEWS[name]

    def view_of(base: Tensor, heads: int, stride: tuple[int, ...], begin: int) -> Tensor:
        batch, token, head = (dim * n for n in stride)
        whole = base.as_strided(
            (2, 3, heads, dim), (batch + 3 * apart, token + apart, head, 1), begin * dim + apart
        )
        if qkv_format == "thd":
            return whole[1]
        return whole if qkv_format == "bshd" else whole.transpose(1, 2)

    def views(base: Tensor) -> list[Tensor]:
        return [view_of(base, 4, strides[0], q_begin), view_of(base, 2, strides[1], k_begin)]

    base = random(7000, dtype=dtype, device=device)
    kept = base.clone()
    cos, sin = tables(9, rotary_dim // 2, device=device)
    options = dict(qkv_format=qkv_format, rotary_dim=rotary_dim, offset=4)
    results = cuseq.apply_rope(*views(base), cos, sin, **options)
    expected = cuseq.apply_rope(*(x.contiguous() for x in views(base)), cos, sin, **options)
    for view, out, wanted in zip(views(base), results, expected, strict=True):
        assert torch.equal(out, wanted)
        assert out.stride() == torch.empty_like(view).stride()
    assert torch.equal(base, kept)

    if any(0 in view.stride() for view in views(base)):
        with pytest.raises(ValueError, match="[qk] must not overlap itself if it is rotated"):
            cuseq.apply_rope(*views(base), cos, sin, **options, inplace=True)
        assert torch.equal(base, kept)
        return
    cuseq.apply_rope(*views(base), cos, sin, **options, inplace=True)
    for view, wanted in zip(views(kept), expected, strict=True):
        view.copy_(wanted)
    assert torch.equal(base, kept), "in place only the views change"


def test_q_and_k_of_one_memory_cannot_be_in_place(device):
    x, (cos, sin) = random(4, 2, 8, device=device), tables(4, 4, device=device)
    kept = x.clone()
    # PyTorch's own check does not detect overlap of slices.
    for q, k in ((x, x), (x[:, :1], x[:, :1])):
        with pytest.raises(ValueError, match="q and k must not overlap if both are rotated"):
            cuseq.apply_rope(q, k, cos, sin, inplace=True)
    assert torch.equal(x, kept)
    check(x, x, cos, sin, range(4), inplace=False)


@pytest.mark.parametrize("qkv_format", ["thd", "bshd", "bhsd"])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_that_q_and_k_share_cannot_be_turned_in_place(norm, qkv_format, device):
    base, (cos, sin) = random(2, 3, 6, 8, device=device), tables(3, 4, device=device)
    weights = [torch.ones(8, device=device)] * 2

    def heads(first, last):
        part = base[:, :, first:last]
        if qkv_format == "thd":
            return part[0]
        return part.transpose(1, 2) if qkv_format == "bhsd" else part

    def turn(q, k):
        if norm:
            cuseq.apply_qk_norm_rope(
                q, k, *weights, cos, sin, eps=1e-6, qkv_format=qkv_format, inplace=True
            )
        else:
            cuseq.apply_rope(q, k, cos, sin, qkv_format=qkv_format, inplace=True)

    kept = base.clone()
    for q, k in (
        (heads(0, 4), heads(3, 6)),
        (heads(3, 6), heads(0, 4)),
        (heads(0, 6), heads(2, 3)),
        (heads(0, 2), base.flatten().as_strided(heads(0, 2).shape, heads(0, 2).stride(), 4)),
    ):
        with pytest.raises(ValueError, match="q and k must not overlap if both are rotated"):
            turn(q, k)
    assert torch.equal(base, kept), "a refused call changes nothing"
    turn(heads(0, 4), heads(4, 6))  # side by side
    assert not torch.equal(base, kept)


def test_overlap_is_found_exactly():
    """Compare with sets of addresses, for views of one buffer with arbitrary strides."""
    generator = torch.Generator().manual_seed(11)
    buffer, (cos, sin) = torch.zeros(400), tables(4, 1)
    addresses = torch.arange(400)

    def draw(bound):
        return int(torch.randint(bound, (1,), generator=generator))

    found = Counter()
    while sum(found.values()) < 400:
        tokens, strides = 1 + draw(4), None
        views = []
        for heads in (1 + draw(4), 1 + draw(4)):
            if strides is None or draw(3) == 0:
                strides = (2 + draw(30), 2 + draw(30), 1)
            size, offset = (tokens, heads, 2), draw(150)
            views.append((size, strides, offset))
        held = [addresses.as_strided(*view).flatten().tolist() for view in views]
        if any(len(set(numbers)) < len(numbers) for numbers in held):
            continue  # rejected on its own
        shared = not set(held[0]).isdisjoint(held[1])
        found[shared] += 1
        q, k = (buffer.as_strided(*view) for view in views)
        if shared:
            with pytest.raises(ValueError, match="q and k must not overlap"):
                cuseq.apply_rope(q, k, cos, sin, inplace=True)
        else:
            cuseq.apply_rope(q, k, cos, sin, inplace=True)
    assert min(found.values()) > 50


def test_heads_that_begin_inside_one_another_are_refused(device):
    q = random(200, device=device).as_strided((5, 3, 8), (8, 1, 1))
    cos, sin = tables(5, 4, device=device)
    with pytest.raises(ValueError, match=r"q must not overlap itself except through expand\(\)"):
        cuseq.apply_rope(q, None, cos, sin)


def test_more_heads_than_a_grid_holds_are_refused(device):
    cos, sin = cuseq.rope_table(1, 4, device=device)
    q = random(1, 65_536, 4, device=device)
    turned, _ = cuseq.apply_rope(q, None, cos, sin)
    assert torch.equal(turned, q), "position 0 turns nothing"
    with pytest.raises(ValueError, match="k must have at most 65536 heads, got 65537"):
        cuseq.apply_rope(q, random(1, 65_537, 4, device=device), cos, sin)


def test_a_table_without_rows_is_refused(device):
    cos, sin = tables(0, 4, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="cos must have a row for position 0"):
        cuseq.apply_rope(random(2, 1, 8, device=device), None, cos, sin, position_ids=ids)


def test_frequencies_take_no_gradient(device):
    frequencies = inverse_frequencies(16, 77.0).to(device).requires_grad_()
    with pytest.raises(ValueError, match="inv_freq must not require grad"):
        cuseq.rope_table(4, 16, inv_freq=frequencies)
    with torch.no_grad():
        cos, _ = cuseq.rope_table(4, 16, inv_freq=frequencies)
    assert cos.device == device, "where the frequencies lie, unless said otherwise"


def test_a_layout_must_be_one():
    q, (cos, sin) = random(4, 2, 8), tables(4, 4)
    with pytest.raises(TypeError, match="packed must be a PackedLayout, got list"):
        cuseq.apply_rope(q, None, cos, sin, packed=[1, 3])


def test_strided_tables(device):
    """The halves of one fused table, as inference engines keep it."""
    q, fused = random(5, 2, 16, device=device), random(5, 16, device=device, seed=1)
    cos, sin = fused.chunk(2, dim=-1)
    check(q, None, cos, sin, list(range(5)))
    check(q, None, cos[::2], sin[::2], [1, 2, 0, 0, 1], position_ids=ints(device, [1, 2, 0, 0, 1]))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["cos", "sin", "both"])
def test_tables_that_begin_anywhere(which, dtype, device):
    """One element off vector alignment, in memory or from row to row."""
    q, (cos, sin) = random(5, 3, 32, device=device), tables(5, 16, device=device)
    given = {"cos": cos.to(dtype), "sin": sin.to(dtype)}
    for name in given if which == "both" else [which]:
        shifted = torch.empty(5 * 16 + 1, dtype=dtype, device=device)[1:].view(5, 16)
        given[name] = shifted.copy_(given[name])
    exact = tuple(table.to(torch.float32) for table in given.values())
    check(q, None, *exact, list(range(5)), given=tuple(given.values()))
    odd = {name: torch.nn.functional.pad(table, (0, 1))[:, :-1] for name, table in given.items()}
    check(q, None, *exact, list(range(5)), given=tuple(odd.values()))


def ints(device, values, dtype=torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_elements_past_2_to_the_31_in_strides(dtype, dim, device, tmp_path, monkeypatch):
    """Use each stride of 2^31 in turn; on the CPU the memory is a sparse file."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    far = 2**31 + 16
    if device.type == "cuda":
        storage = torch.empty(far + dim, dtype=dtype, device=device)
    else:
        storage = torch.from_file(str(tmp_path / "holes"), shared=True, size=far + dim, dtype=dtype)
    cos, sin = tables(3, dim // 2, device=device)
    for shape in ((2, 1, 1, dim), (1, 2, 1, dim), (1, 1, 2, dim)):
        stride = [far if n == 2 else dim for n in shape[:3]] + [1]
        q = storage.as_strided(shape, stride)
        q.copy_(random(*shape, dtype=dtype))
        positions = [1, 2] if shape[1] == 2 else [1] * shape[0]
        check(q, None, cos, sin, positions, qkv_format="bshd", offset=1, inplace=False)
        expected, _ = cuseq.apply_rope(q.clone(), None, cos, sin, qkv_format="bshd", offset=1)
        cuseq.apply_rope(q, None, cos, sin, qkv_format="bshd", offset=1, inplace=True)
        assert torch.equal(q, expected)


@pytest.mark.slow
@pytest.mark.parametrize("qkv_format", ["thd", "bhsd"])
def test_more_than_2_to_the_31_elements(qkv_format, cuda, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    lengths, tokens = [65_536] * 4, 262_144 + 64
    generator = torch.Generator(cuda).manual_seed(0)
    q, k = (
        torch.empty(
            (tokens, heads, 128) if qkv_format == "thd" else (1, heads, tokens, 128),
            dtype=torch.bfloat16,
            device=cuda,
        ).normal_(generator=generator)
        for heads in (64, 2)
    )
    assert q.numel() > 2**31
    where = [0, 1, 65_535, 65_536, 131_072, 262_143, 262_144, tokens - 1]
    rows = [flat(x, qkv_format)[where].cpu() for x in (q, k)]
    positions = reference.rope_positions(lengths, tokens)
    used = [positions[token] for token in where]
    cos, sin = cuseq.rope_table(65_536, 128, device=cuda)
    packed = PackedLayout.from_lengths(lengths, tokens, device=cuda)
    cuseq.apply_rope(q, k, cos, sin, packed=packed, qkv_format=qkv_format, inplace=True)
    cos, sin = cos[used].cpu(), sin[used].cpu()
    for x, before in zip((q, k), rows, strict=True):
        expected = reference.rope(before, cos, sin, range(len(where)))
        assert_rounded_once(flat(x, qkv_format)[where].cpu(), expected, before, torch.ones(1))


# Positions beyond the table.

FAR = [
    (dtype, position)
    for dtype, most in ((torch.int32, 2**31 - 1), (torch.int64, 2**63 - 1))
    for position in (3, -1, 2**31 - 1, -(2**31), 2**32, 2**32 + 1, 2**63 - 1, -(2**63))
    if -most - 1 <= position <= most
]


@pytest.mark.kernels
@pytest.mark.parametrize("ids_dtype,position", FAR)
@pytest.mark.parametrize("dtype,dim,turned", [(torch.float32, 8, 4), (torch.bfloat16, 128, 128)])
def test_position_ids_beyond_the_table(dtype, dim, turned, ids_dtype, position, device):
    q = random(4, 2, dim, dtype=dtype, device=device)
    k = random(4, 1, dim, dtype=dtype, device=device, seed=5)
    cos, sin = tables(3, turned // 2, device=device)
    ids, inside = (ints(device, [2, p, 0, 1], ids_dtype) for p in (position, 0))
    options = dict(position_ids=ids, rotary_dim=turned)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"position_ids.*{position}"):
            cuseq.apply_rope(q, k, cos, sin, **options)
        return
    good = cuseq.apply_rope(q, k, cos, sin, **options | dict(position_ids=inside))
    for inplace in (False, True):
        results = cuseq.apply_rope(q.clone(), k.clone(), cos, sin, **options, inplace=inplace)
        for x, out, wanted in zip((q, k), results, good, strict=True):
            assert out[1, :, :turned].isnan().all()
            assert torch.equal(out[1, :, turned:], x[1, :, turned:])
            assert torch.equal(out[[0, 2, 3]], wanted[[0, 2, 3]])


@pytest.mark.kernels
@pytest.mark.parametrize("plane", range(3))
@pytest.mark.parametrize("mrope_interleaved", [False, True])
def test_one_plane_beyond_the_table(plane, mrope_interleaved, device):
    q, (cos, sin) = random(2, 1, 12, device=device), tables(3, 6, device=device)
    options = dict(mrope_section=[2, 2, 2], mrope_interleaved=mrope_interleaved)
    ids = torch.ones(3, 2, dtype=torch.int64, device=device)
    good, _ = cuseq.apply_rope(q, None, cos, sin, position_ids=ids, **options)
    ids[plane, 1] = 3
    if device.type == "cpu":
        with pytest.raises(ValueError, match="position_ids.*3"):
            cuseq.apply_rope(q, None, cos, sin, position_ids=ids, **options)
        return
    out, _ = cuseq.apply_rope(q, None, cos, sin, position_ids=ids, **options)
    assert torch.equal(out[0], good[0])
    planes = [reference.mrope_plane(i, [2, 2, 2], mrope_interleaved) for i in range(6)] * 2
    turned = torch.tensor([p == plane for p in planes])
    assert out[1, 0].isnan().cpu()[turned].all()


@pytest.mark.parametrize("lengths,tokens", [([5, 1], 6), ([1, 2, 5], 9), ([1, 2], 8), ([], 5)])
@pytest.mark.parametrize("made", ["host lengths", "lengths"])
def test_a_layout_longer_than_the_table(made, lengths, tokens, device):
    """The longest sequence, or the tail, has one token too many."""
    if made == "lengths":
        packed = PackedLayout.from_lengths(make_lengths(lengths, torch.int32, device), tokens)
    else:
        packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    q = random(tokens, 1, 8, device=device)
    cos, sin = tables(5, 4, device=device)
    check(q, None, cos, sin, reference.rope_positions(lengths, tokens), packed=packed)
    for inplace in (False, True):
        with pytest.raises(ValueError, match="(?=.*4)(?=.*5)"):
            cuseq.apply_rope(q, None, cos[:4], sin[:4], packed=packed, inplace=inplace)


def test_a_rank_s_table_reaches_to_the_end_of_the_global_sequence(device):
    packed = PackedLayout.from_lengths([4, 8], 12, device=device)
    q, (cos, sin) = random(6, 1, 8, device=device), tables(8, 4, device=device)
    for cp_rank in range(2):
        options = dict(cp_size=2, cp_rank=cp_rank)
        here = reference.rope_positions([4, 8], 12, **options)
        check(q, None, cos, sin, here, packed=packed, **options)
        for qkv_format in (dict(packed=packed), {}):
            with pytest.raises(ValueError, match="(?=.*7)(?=.*(8|12))"):
                cuseq.apply_rope(q, None, cos[:7], sin[:7], **qkv_format, **options)


@pytest.mark.parametrize("qkv_format", LAYOUTS)
def test_an_offset_beyond_the_table(qkv_format, device):
    """The last token of a batch row lies beyond the table, and sums overflow 64 bits."""
    q = in_layout(random(1 if qkv_format == "thd" else 2, 3, 1, 8, device=device), qkv_format)
    cos, sin = tables(7, 4, device=device)
    cuseq.apply_rope(q, None, cos, sin, qkv_format=qkv_format, offset=4)
    for offset in (5, 2**31, 2**62, 2**63 - 1):
        with pytest.raises(ValueError, match="row for each position|offset must lie"):
            cuseq.apply_rope(q, None, cos, sin, qkv_format=qkv_format, offset=offset)


@pytest.mark.kernels
def test_bare_offsets_without_host_values(device):
    """The op alone: the CPU reads the offsets; elsewhere positions beyond the table give NaN."""
    q, (cos, sin) = random(6, 1, 8, device=device), tables(3, 4, device=device)
    offsets = ints(device, [0, 2, 5], torch.int32)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    (expected,) = op([q], cos, sin, packed.cu_seqlens_static, packed.host_meta)
    (out,) = op([q], cos, sin, offsets)
    assert torch.equal(out, expected)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="cos|rows|table"):
            op([q], cos[:2], sin[:2], offsets)
        return
    (out,) = op([q], cos[:2], sin[:2], offsets)
    assert out[4].isnan().all()
    rest = [0, 1, 2, 3, 5]
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype,dim", [(torch.float32, 16), (torch.bfloat16, 128)])
def test_offsets_that_lie_stay_inside_the_table(dtype, dim, cuda):
    """With wrong offsets and no qkv_format, no kernel accesses memory outside its tensors.

    The sanitizer checks this.
    """
    q = random(64, 2, dim, dtype=dtype, device=cuda)
    cos, sin = tables(9, dim // 2, device=cuda)
    for lie in ([0, -5, 70], [0, 10**9, 3], [5, 64, 65], [-(2**31), 2**31 - 1, 7]):
        for cp in (dict(), dict(cp_size=4, cp_rank=3)):
            (out,) = op([q], cos, sin, ints(cuda, lie, torch.int32), **cp)
            wrong = out.isnan().flatten(1).any(1)
            assert torch.equal(wrong, out.isnan().flatten(1).all(1)), "a whole token or nothing"
    torch.cuda.synchronize()


CHECKED = """
import pytest, torch, cuseq
device = {device!r}
q, table = torch.randn(4, 2, 8, device=device), torch.randn(3, 4, device=device)
cos, sin = table, table + 1

def rope(*tables, **options):
    return cuseq.apply_rope(q, None, *tables, **options)

def ids(*values):
    return torch.tensor(values, device=device)

def twice(t):
    return torch.cat((t, t), -1)

other = twice(sin)
other[2, 6] += 1
good = dict(position_ids=ids(0, 1, 2, 0))
rope(cos, sin, **good), rope(twice(cos), twice(sin), **good)
offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
for call, message in [
    (lambda: rope(cos, sin, position_ids=ids(0, 3, 1, 2)), r"position_ids.*3"),
    (lambda: rope(cos, sin, position_ids=ids(0, 1, -1, 2)), r"position_ids.*-1"),
    (lambda: torch.ops.cuseq.apply_rope([q], cos, sin, offsets), "cos|rows|table"),
    (lambda: rope(twice(cos), other, **good), "sin"),
    (lambda: rope(twice(cos[:, :2]), twice(sin[:, :2]), **good), "rotary_dim"),
]:
    with pytest.raises(ValueError, match=message):
        call()
print("all raised")
"""


def test_cuseq_check_raises_at_once(cuda, run_python):
    """On the CPU the same errors occur without it, as other tests show."""
    result = run_python(CHECKED.format(device=str(cuda)), CUSEQ_CHECK="1")
    assert "all raised" in result.stdout, result.stderr


# Wrong calls.


def zeros(*shape, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def both(table: Tensor) -> dict[str, Tensor]:
    return dict(cos=table, sin=table.clone())


PACKED = PackedLayout.from_lengths([2, 3], 6)
IDS = torch.arange(6)
PLANES = dict(position_ids=IDS.expand(3, 6))

ERRORS = [
    # q and k
    (dict(q=zeros(6, 16)), ValueError, r"q must .*\[T, H, D\]|q must have"),
    (dict(q=zeros(1, 6, 2, 16)), ValueError, "q must"),
    (dict(k=zeros(5, 1, 16)), ValueError, "k must"),
    (dict(k=zeros(6, 1, 8)), ValueError, "k must"),
    (dict(k=zeros(6, 16)), ValueError, "k must"),
    (dict(qkv_format="bshd"), ValueError, "q must"),
    (dict(q=zeros(2, 3, 2, 16), k=zeros(3, 2, 1, 16), qkv_format="bshd"), ValueError, "k must"),
    (dict(q=zeros(2, 2, 3, 16), k=zeros(2, 1, 2, 16), qkv_format="bhsd"), ValueError, "k must"),
    (dict(q=zeros(6, 16, 2).transpose(1, 2)), ValueError, "q must .*(last|contiguous)"),
    (dict(k=zeros(6, 1, 32)[..., ::2]), ValueError, "k must .*(last|contiguous)"),
    (dict(q=zeros(6, 2, 16, dtype=torch.int32)), TypeError, "q must"),
    (dict(q=zeros(6, 2, 16, dtype=torch.complex64)), TypeError, "q must"),
    (dict(k=zeros(6, 1, 16, dtype=torch.bfloat16)), TypeError, "k must"),
    (dict(q=zeros(6, 2, 1), k=None, **both(zeros(6, 1))), ValueError, "512"),
    (dict(q=zeros(6, 2, 514), k=None), ValueError, "512"),
    # tables and rotary_dim
    (dict(sin=zeros(6, 4)), ValueError, "sin must"),
    (dict(sin=zeros(5, 8)), ValueError, "sin must"),
    (dict(sin=zeros(6, 8, dtype=torch.float64)), TypeError, "sin must"),
    (both(zeros(6, 8, dtype=torch.int64)), TypeError, "cos must"),
    (both(zeros(6)), ValueError, "cos must"),
    (both(zeros(1, 6, 8)), ValueError, "cos must"),
    (both(zeros(6, 16)[:, ::2]), ValueError, "cos must .*(last|contiguous)"),
    (dict(cos=zeros(6, 8).requires_grad_()), NotImplementedError, "cos .*must not require grad"),
    (dict(sin=zeros(6, 8).requires_grad_()), NotImplementedError, "sin must not require grad"),
    (both(zeros(6, 18)), ValueError, "head_dim|rotary_dim"),
    (both(zeros(6, 9)), ValueError, "rotary_dim"),
    (both(zeros(6, 0)), ValueError, "cos must|rotary_dim"),
    (dict(rotary_dim=4), ValueError, "cos must be rotary_dim / 2 = 2 or rotary_dim = 4 .*8"),
    (dict(rotary_dim=32), ValueError, "rotary_dim must .*32"),
    (dict(rotary_dim=15), ValueError, "rotary_dim must .*15"),
    (dict(rotary_dim=0), ValueError, "rotary_dim must .*0"),
    (dict(rotary_dim=-16), ValueError, "rotary_dim must .*-16"),
    (dict(**both(zeros(6, 9)), rotary_dim=18), ValueError, "rotary_dim must .*18"),
    # where positions come from
    (dict(qkv_format="sbhd"), ValueError, "qkv_format must .*sbhd"),
    (dict(table="row"), ValueError, "table must .*row"),
    (dict(packed=PACKED, position_ids=IDS), ValueError, "packed|position_ids"),
    (dict(packed=PACKED, offset=1), ValueError, "offset"),
    (dict(position_ids=IDS, offset=1), ValueError, "offset"),
    (dict(table="token", packed=PACKED), ValueError, "packed|token"),
    (dict(table="token", position_ids=IDS), ValueError, "position_ids|token"),
    (dict(table="token", offset=1), ValueError, "offset"),
    (dict(table="token", **both(zeros(5, 8))), ValueError, "cos must"),
    (dict(table="token", **both(zeros(2, 6, 8))), ValueError, "cos must"),
    (dict(table="token", **both(zeros(3, 6, 8))), ValueError, "cos must"),
    (dict(offset=-1), ValueError, "offset must .*-1"),
    (dict(offset=1), ValueError, "offset|rows"),
    (dict(packed=PackedLayout.from_lengths([2, 3], 7)), ValueError, "7"),
    (dict(packed=PACKED, cos=zeros(2, 8), sin=zeros(2, 8)), ValueError, "(?=.*2)(?=.*3)"),
    (dict(position_ids=IDS.float()), TypeError, "position_ids must"),
    (dict(position_ids=IDS.to(torch.int16)), TypeError, "position_ids must"),
    (dict(position_ids=IDS[:5]), ValueError, "position_ids must"),
    (dict(position_ids=IDS[:1]), ValueError, "position_ids must"),
    (dict(position_ids=IDS.expand(2, 6)), ValueError, "position_ids must"),
    (dict(position_ids=IDS.expand(3, 6)), ValueError, "position_ids must"),
    (dict(position_ids=IDS[:, None]), ValueError, "position_ids must"),
    (dict(position_ids=IDS + 1), ValueError, "position_ids.*6"),
    (dict(position_ids=IDS - 1), ValueError, "position_ids.*-1"),
    *(
        (dict([(name, value)]), TypeError, f"{name} must be True or False, got {value}")
        for name in ("interleaved", "mrope_interleaved")
        for value in (None, 1, 0)
    ),
    # planes
    (dict(mrope_section=[4, 2, 2]), ValueError, "mrope_section"),
    (dict(mrope_section=[4, 2, 2], packed=PACKED), ValueError, "mrope_section"),
    (dict(mrope_section=[4, 4], **PLANES), ValueError, "mrope_section must"),
    (dict(mrope_section=[2, 2, 2, 2], **PLANES), ValueError, "mrope_section must"),
    (dict(mrope_section=[4, 2, 1], **PLANES), ValueError, "mrope_section must"),
    (dict(mrope_section=[8, 4, 4], **PLANES), ValueError, "mrope_section must"),
    (dict(mrope_section=[8, 2, -2], **PLANES), ValueError, "mrope_section must"),
    (dict(mrope_section=[4, 2, 2], position_ids=IDS), ValueError, "position_ids must"),
    (dict(mrope_section=[4, 2, 2], position_ids=IDS.expand(2, 6)), ValueError, "position_ids must"),
    (dict(mrope_section=[4, 2, 2], table="token"), ValueError, "cos must"),
    (dict(mrope_interleaved=True), ValueError, "mrope_section"),
    # context parallel
    (dict(cp_size=0), ValueError, "cp_size must .*0"),
    (dict(cp_size=-2), ValueError, "cp_size must .*-2"),
    (dict(cp_rank=1), ValueError, "cp_rank must .*1"),
    (dict(cp_size=3, cp_rank=3), ValueError, "cp_rank must .*3"),
    (dict(cp_size=3, cp_rank=-1), ValueError, "cp_rank must .*-1"),
    (dict(cp_size=3, position_ids=IDS), ValueError, "cp_size"),
    (dict(cp_size=3, table="token"), ValueError, "cp_size"),
    (dict(cp_size=3, packed=PACKED), ValueError, "total_tokens = 6 / cp_size"),
]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("change,error,message", ERRORS, ids=[" ".join(e[0]) for e in ERRORS])
def test_errors_name_argument_rule_and_value(change, error, message, inplace):
    good = dict(q=zeros(6, 2, 16), k=zeros(6, 1, 16), cos=random(6, 8), sin=random(6, 8))
    with pytest.raises(error, match=message):
        cuseq.apply_rope(**(good | change), inplace=inplace)


@pytest.mark.parametrize("inplace", [None, 1, 0])
def test_inplace_is_a_flag(inplace):
    rows, table = zeros(6, 2, 16), zeros(6, 8)
    for rotate in (
        partial(cuseq.apply_rope, rows, rows.clone(), table, table),
        partial(cuseq.apply_qk_norm_rope, rows, None, zeros(16), None, table, table, eps=1e-6),
    ):
        with pytest.raises(TypeError, match=f"inplace must be True or False, got {inplace}"):
            rotate(inplace=inplace)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_read_at_the_wrong_width(interleaved):
    """The last row tells the table's width, and is checked if the host can read it."""
    q, half = random(4, 1, 16), tables(4, 4)
    full = [widen(table, interleaved) for table in half]
    options = dict(interleaved=interleaved, rotary_dim=8)
    with pytest.raises(ValueError, match="rotary_dim"):
        cuseq.apply_rope(q, None, *full, interleaved=interleaved)
    check(q, None, *half, range(4), given=full, **options)
    for wrong in (
        [widen(table, not interleaved) for table in half],
        tables(4, 8),  # a half of rotary_dim=16
        [full[0], full[1] + torch.eye(8)[3]],
    ):
        with pytest.raises(ValueError, match="(?s)rotary_dim = 8.*interleaved"):
            cuseq.apply_rope(q, None, *wrong, **options)


@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize("rotary_dim", [2, 4, 64])
def test_a_real_half_width_table_is_not_taken_for_a_full_one(rotary_dim, length, device):
    cos, sin = cuseq.rope_table(length, rotary_dim, device=device)
    q = random(1, 1, 64, device=device)
    for offset in {0, length - 1}:
        check(q, None, cos, sin, [offset], offset=offset)


def test_no_heads(device):
    q, k = random(3, 0, 8, device=device), random(3, 2, 8, device=device)
    cos, sin = tables(3, 4, device=device)
    check(q, k, cos, sin, range(3))
    check(k, q, cos, sin, range(3))
    check(q, None, cos, sin, range(3))


def test_wrong_devices_are_refused(cuda):
    q, (cos, sin) = random(6, 2, 16, device=cuda), tables(6, 8, device=cuda)
    ids = torch.arange(6)
    for change, message in [
        (dict(k=random(6, 1, 16)), "k must"),
        (dict(cos=cos.cpu(), sin=sin.cpu()), "cos must"),
        (dict(sin=sin.cpu()), "sin must"),
        (dict(position_ids=ids), "position_ids must"),
        (dict(packed=PACKED), r"packed.to\(device\)|cu_seqlens"),
    ]:
        with pytest.raises(ValueError, match=message):
            cuseq.apply_rope(**dict(dict(q=q, k=None, cos=cos, sin=sin), **change))


# The op's own options: the inverse, and where it runs.


@pytest.mark.kernels
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_inverse_turns_back(interleaved, device):
    x, (cos, sin) = random(5, 2, 20, device=device), tables(5, 6, device=device)
    (out,) = op([x], cos, sin, interleaved=interleaved, inverse=True)
    assert torch.equal(out, op([x], cos, -sin, interleaved=interleaved)[0])
    cos, sin = (t.double() for t in cuseq.rope_table(5, 12, dtype=torch.float64, device=device))
    x = x.double()
    (turned,) = op([x], cos, sin, interleaved=interleaved)
    (back,) = op([turned], cos, sin, interleaved=interleaved, inverse=True)
    assert_rounded_once(back, x, x, cos)
    assert not torch.equal(turned, x)


def test_runs_on_the_device_of_its_input(second_gpu):
    with torch.cuda.device(0):
        packed = PackedLayout.from_lengths([2, 3], 6, device=second_gpu)
        q, k = (random(6, n, 16, device=second_gpu, seed=n) for n in (2, 1))
        cos, sin = cuseq.rope_table(3, 16, device=second_gpu)
        assert cos.device == sin.device == second_gpu
        check(q, k, cos, sin, [0, 1, 0, 1, 2, 0], packed=packed)
        assert torch.cuda.current_device() == 0


def test_runs_on_the_current_stream(cuda):
    q, (cos, sin) = random(6, 2, 16, device=cuda), tables(6, 8, device=cuda)
    expected, _ = cuseq.apply_rope(q, None, cos, sin)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        # On another stream it would read the zeros from before the sleep.
        out, _ = cuseq.apply_rope(late, None, cos, sin)
    side.synchronize()
    assert torch.equal(out, expected)


# rope_table.


def inverse_frequencies(rotary_dim: int, theta: float, dtype=torch.float32) -> Tensor:
    """Compute powers in float64, rounded once."""
    return (theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)).to(dtype)


def angles_of(length: int, rotary_dim: int = 16, theta: float = 1e4) -> Tensor:
    return torch.arange(float(length))[:, None] * inverse_frequencies(rotary_dim, theta)


def assert_table_of(angles: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Check cosines and sines of fp32 angles, up to a few roundings of angles and results."""
    for table, function in zip(results, (torch.cos, torch.sin), strict=True):
        assert table.shape == angles.shape
        error = (table.double().cpu() - function(angles.double())).abs()
        # Powers in float64 differ in the last bit, so their rounded values may differ too.
        assert (error <= 2 * torch.finfo(torch.float32).eps * (1 + angles)).all()


@pytest.mark.parametrize(
    "length,rotary_dim,theta",
    [(0, 8, 1e4), (1, 2, 1e4), (7, 64, 1e4), (40, 20, 5e5), (3000, 128, 1e6)],
)
def test_table_of_theta(length, rotary_dim, theta, device):
    angles = angles_of(length, rotary_dim, theta)
    results = cuseq.rope_table(length, rotary_dim, theta=theta, device=device)
    for table, function in zip(results, (torch.cos, torch.sin), strict=True):
        assert (table.shape, table.dtype) == ((length, rotary_dim // 2), torch.float32)
        assert table.device == device and table.stride(-1) == 1 and not table.requires_grad
        exact = function(angles.double())
        errors, theirs = (
            (t.cpu() - exact).abs().sum() for t in (table, function(angles.to(device)))
        )
        assert errors <= 1.01 * theirs


def test_table_in_float64(device):
    """Angles are in float64 too: at position 3,000 the fp32 ones are wrong in the fourth digit."""
    results = cuseq.rope_table(3000, 64, dtype=torch.float64, device=device)
    positions = torch.arange(3000, dtype=torch.float64)[:, None]
    angles = positions * inverse_frequencies(64, 1e4, torch.float64)
    for table, expected in zip(results, (angles.cos(), angles.sin()), strict=True):
        assert table.dtype == torch.float64
        allowed = 4 * torch.finfo(torch.float64).eps * (1 + positions)
        assert ((table.cpu() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_table_is_scaled_then_cast(dtype, device):
    plain = cuseq.rope_table(100, 32, device=device)
    scaled = cuseq.rope_table(100, 32, attention_factor=1.3, dtype=dtype, device=device)
    for table, other in zip(scaled, plain, strict=True):
        assert torch.equal(table, (other * 1.3).to(dtype))


def test_table_of_given_frequencies(device):
    """Frequencies of any strides; `theta` is ignored."""
    inv_freq = inverse_frequencies(16, 77.0)
    wide = torch.stack([torch.full((8,), 7.0), inv_freq], dim=1)
    sources = [inv_freq, wide[:, 1], inv_freq.to(device), wide.to(device)[:, 1]]
    results = [
        cuseq.rope_table(50, 16, inv_freq=given, theta=3.0, device=device) for given in sources
    ]
    for cos, sin in results:
        assert cos.device == sin.device == device
        assert_table_of(angles_of(50, theta=77.0), (cos, sin))
        assert torch.equal(cos, results[0][0]) and torch.equal(sin, results[0][1])


def test_tables_grow_and_old_slices_stay(device):
    """A few tables serve many lengths, and tables handed out earlier do not change."""
    kept = {n: cuseq.rope_table(n, 8, device=device) for n in (*range(1, 5000, 50), 5000, 7)}
    for pick in range(2):
        longest = kept[5000][pick]
        assert all(torch.equal(pair[pick], longest[:n]) for n, pair in kept.items())
        assert len({pair[pick].untyped_storage().data_ptr() for pair in kept.values()}) <= 20
    assert_table_of(angles_of(5000, 8), kept[5000])


def test_tables_are_kept_counted_and_cleared(device):
    before = cuseq.cache.stats()
    assert (before["entries"], before["bytes"]) == (0, 0)
    cos, sin = cuseq.rope_table(100, 16, device=device)
    once = cuseq.cache.stats()
    assert once["entries"] >= 1 and once["bytes"] >= 2 * 100 * 8 * 4
    again = cuseq.rope_table(60, 16, device=device)
    assert [t.data_ptr() for t in again] == [cos.data_ptr(), sin.data_ptr()]
    stats = cuseq.cache.stats()
    assert (stats["entries"], stats["bytes"]) == (once["entries"], once["bytes"])
    for options in (dict(theta=3.0), dict(attention_factor=2.0), dict(dtype=torch.float64)):
        cuseq.rope_table(100, 16, **options, device=device)
    assert cuseq.cache.stats()["entries"] >= once["entries"] + 3
    values = cos.clone()
    cuseq.cache.clear()
    stats = cuseq.cache.stats()
    assert (stats["entries"], stats["bytes"]) == (0, 0)
    assert torch.equal(cos, values), "a table in use outlives the cache"
    assert torch.equal(cuseq.rope_table(100, 16, device=device)[0], values)


def test_each_option_has_its_own_table(device):
    """Every order of requests, since a cached table could be returned for other options."""
    calls = [
        {},
        dict(theta=500.0),
        dict(attention_factor=1.5),
        dict(dtype=torch.float64),
        dict(dtype=torch.bfloat16),
        dict(inv_freq=inverse_frequencies(16, 77.0).to(device)),
        dict(inv_freq=inverse_frequencies(16, 78.0).to(device)),
    ]
    alone = []
    for options in calls:
        cuseq.cache.clear()
        alone.append([t.clone() for t in cuseq.rope_table(20, 16, **options, device=device)])
    assert len({tuple(cos.double().flatten().tolist()) for cos, _ in alone}) == len(calls)
    for order in (range(len(calls)), reversed(range(len(calls)))):
        for i in order:
            results = cuseq.rope_table(20, 16, **calls[i], device=device)
            assert all(torch.equal(a, b) for a, b in zip(results, alone[i], strict=True))
    narrow, _ = cuseq.rope_table(20, 8, device=device)
    assert narrow.shape == (20, 4)


@pytest.mark.parametrize("which", [0, 1])
def test_an_edited_table_is_not_served_again(which, device):
    expected = [t.clone() for t in cuseq.rope_table(10, 16, device=device)]
    cuseq.rope_table(10, 16, device=device)[which][3:].zero_()
    for length in (10, 5, 200):
        for table, wanted in zip(
            cuseq.rope_table(length, 16, device=device), expected, strict=True
        ):
            assert torch.equal(table[:10], wanted[:length])


def test_edited_frequencies_make_a_new_table(device):
    inv_freq = inverse_frequencies(16, 1e4).to(device)
    for _ in range(2):
        results = cuseq.rope_table(10, 16, inv_freq=inv_freq, device=device)
        assert_table_of(torch.arange(10.0)[:, None] * inv_freq.cpu(), results)
        inv_freq.mul_(0.5)


def test_frequencies_given_another_storage_make_a_new_table(device):
    inv_freq = inverse_frequencies(16, 1e4).to(device)
    for _ in range(3):
        results = cuseq.rope_table(10, 16, inv_freq=inv_freq, device=device)
        assert_table_of(torch.arange(10.0)[:, None] * inv_freq.float().cpu(), results)
        inv_freq.data = (inv_freq * 0.5).bfloat16()


@pytest.mark.parametrize("qkv_format", ["bshd", "bhsd"])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_ranks_part_in_batch_rows(cp_rank, qkv_format, device):
    """Batch rows follow each other, in either qkv_format."""
    packed = cuseq.PackedLayout.from_lengths([7, 1, 4], segment_multiple=4, device=device)
    plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    (local,) = cuseq.distributed.cp_partition(packed, plan, cp_rank)
    cos, sin = cuseq.rope_table(16, 8, device=device)
    q = torch.randn(local.total_tokens, 3, 8, device=device)
    expected, _ = cuseq.apply_rope(q, None, cos, sin, packed=local)
    batch = q.view(2, -1, 3, 8)
    batch = batch if qkv_format == "bshd" else batch.transpose(1, 2)
    found, _ = cuseq.apply_rope(batch, None, cos, sin, packed=local, qkv_format=qkv_format)
    found = found if qkv_format == "bshd" else found.transpose(1, 2)
    assert torch.equal(found.reshape(-1, 3, 8), expected)
    with pytest.raises(ValueError, match="packed must have as many tokens as q, .* = 6, got"):
        shape = (2, 3, 3, 8)  # of 6 tokens in either qkv_format
        cuseq.apply_rope(q[:6].view(shape), None, cos, sin, packed=local, qkv_format=qkv_format)


def test_other_frequencies_at_the_same_address(device):
    """One model's tensor is freed and the next may get the same memory and the same id."""
    for scale in range(1, 30):
        inv_freq = inverse_frequencies(16, 1e4).to(device) * scale
        results = cuseq.rope_table(10, 16, inv_freq=inv_freq, device=device)
        assert_table_of(torch.arange(10.0)[:, None] * inv_freq.cpu(), results)
        del inv_freq, results


def test_few_tables_are_kept(device):
    for theta in range(2, 102):
        cuseq.rope_table(10, 16, theta=theta, device=device)
    assert 1 <= cuseq.cache.stats()["entries"] <= 64


def test_tables_from_threads(device):
    """Threads request other lengths of two tables, so that all of them make the tables grow."""

    def ask(seed: int) -> bool:
        for step in range(40):
            length = (seed * 377 + step * 611) % 5000 + 1
            theta = 1e4 if step % 2 else 5e5
            results = cuseq.rope_table(length, 16, theta=theta, device=device)
            assert_table_of(angles_of(length, theta=theta), results)
        return True

    first = cuseq.rope_table(10, 16, device=device)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cuseq.rope_table, 10, 16, device=device).result()
    assert [t.data_ptr() for t in other] == [t.data_ptr() for t in first]
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(6)))


def test_a_table_from_an_evaluation_trains(device):
    with torch.inference_mode():
        cuseq.rope_table(10, 16, device=device)
    cos, sin = cuseq.rope_table(10, 16, device=device)
    assert not cos.is_inference() and not sin.is_inference()
    q = random(10, 1, 16, device=device).requires_grad_()
    cuseq.apply_rope(q, None, cos, sin)[0].sum().backward()
    assert q.grad is not None


def test_what_the_tables_do_not_depend_on(device):
    """The default dtype, default device, autocast and traced tables have no influence."""
    with FakeTensorMode():
        cuseq.rope_table(10, 16, device=device)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast(device.type, dtype=torch.bfloat16):
            results = cuseq.rope_table(10, 16, device=device)
    finally:
        torch.set_default_dtype(torch.float32)
    assert results[0].dtype == torch.float32 and results[0].device == device
    assert_table_of(angles_of(10), results)
    assert_table_of(angles_of(10), cuseq.rope_table(10, 16, device=device))


@pytest.mark.parametrize(
    "change,error,message",
    [
        (dict(length=-1), ValueError, "length must .*-1"),
        (dict(rotary_dim=15), ValueError, "rotary_dim must .*15"),
        (dict(rotary_dim=0), ValueError, "rotary_dim must .*0"),
        (dict(rotary_dim=-2), ValueError, "rotary_dim must .*-2"),
        (dict(length="8"), TypeError, "length must be an int, got '8'"),
        *(
            (dict(theta=theta), ValueError, f"theta must be a finite number above 0, got {theta}")
            for theta in (0, -1.0, float("inf"), float("nan"))
        ),
        (dict(inv_freq=[1.0] * 8), TypeError, "inv_freq must be a tensor, got list"),
        (dict(rotary_dim=16.0), TypeError, "rotary_dim must be an int, got 16.0"),
        (dict(inv_freq=torch.ones(7)), ValueError, "inv_freq must .*7"),
        (dict(inv_freq=torch.ones(1, 8)), ValueError, "inv_freq must"),
        (dict(dtype=torch.int32), TypeError, "dtype must"),
    ],
)
def test_wrong_tables_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        cuseq.rope_table(**dict(dict(length=8, rotary_dim=16), **change))


def test_a_table_made_in_a_capture_is_not_kept(cuda):
    cuseq.rope_table(4, 8, device=cuda)  # loads the kernels
    before = cuseq.cache.stats()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuseq.rope_table(50, 16, device=cuda)
    after = cuseq.cache.stats()
    assert (after["entries"], after["bytes"]) == (before["entries"], before["bytes"])
    # The graph has not run yet, so the table returned now must not be in the graph's memory.
    assert_table_of(angles_of(50), cuseq.rope_table(50, 16, device=cuda))
    graph.replay()
    assert_table_of(angles_of(50), captured)


def test_a_table_made_on_another_stream_is_waited_for(cuda):
    inv_freq = torch.zeros(8, device=cuda)
    new = inverse_frequencies(16, 1e4).to(cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        inv_freq.copy_(new)
        made = cuseq.rope_table(50, 16, inv_freq=inv_freq, device=cuda)
    served = cuseq.rope_table(50, 16, inv_freq=inv_freq, device=cuda)
    assert served[0].data_ptr() == made[0].data_ptr()
    assert_table_of(angles_of(50), [table.clone() for table in served])


def test_frequencies_from_a_gpu_for_the_cpu(cuda):
    """A copy queued on a busy stream has not arrived yet when it is needed."""
    inv_freq = torch.zeros(8, device=cuda)
    new = inverse_frequencies(16, 1e4).to(cuda)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    inv_freq.copy_(new)
    assert_table_of(angles_of(50), cuseq.rope_table(50, 16, inv_freq=inv_freq, device="cpu"))
