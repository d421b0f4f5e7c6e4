"""cuDNN's attention: rows share its plans, and its bounds are checked before the call."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from test_attention import inputs, relative

import cuseq
from cuseq import _C, PackedLayout, attention_backend, varlen_attention
from cuseq.attention import choice

HALF = 6e-3  # error of bf16, relative


def drawn_packs(law: str, tokens: int, count: int) -> list[list[int]]:
    """Return rows that are filled with documents of a law in the order in which they come."""
    draw = random.Random(1)
    laws = {
        "lognormal": lambda: int(draw.lognormvariate(5.4, 1.0)),
        "long": lambda: int(draw.lognormvariate(6.8, 1.0)),
        "exponential": lambda: int(draw.expovariate(1 / 512)),
        "uniform": lambda: draw.randint(1, 1000),
        "two kinds": lambda: draw.randint(*((100, 300) if draw.random() < 0.9 else (2000, 6000))),
    }
    documents = (max(1, min(tokens, laws[law]())) for _ in itertools.count())
    packs, row = [], []
    while len(packs) < count:
        one = next(documents)
        if sum(row) + one > tokens:
            packs.append(row)
            row = []
        row.append(one)
    return packs


# ------------------------------------------------------------------------------ plans, on the host


@pytest.mark.parametrize("law", ["lognormal", "long", "exponential", "uniform", "two kinds"])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
def test_a_training_run_needs_tens_of_plans(law, tokens):
    sizes = set()
    for pack in drawn_packs(law, tokens, 10_000):
        sequences, longest, row = _C.cudnn_plan_sizes(len(pack), max(pack), tokens)
        assert sequences >= len(pack) and longest >= max(pack) and row >= tokens
        assert sequences <= max(len(pack) + 3, 1.25 * len(pack)) and longest <= max(
            max(pack) + 127, 1.5 * max(pack)
        )
        sizes.add((sequences, longest, row))
    assert len(sizes) <= 75


def test_sizes_that_are_rounded_stay():
    for sequences, longest, tokens in ((4, 128, 512), (24, 1536, 8192), (96, 3072, 32768)):
        assert _C.cudnn_plan_sizes(sequences, longest, tokens) == (sequences, longest, tokens)
    assert _C.cudnn_plan_sizes(1, 1, 1) == (4, 128, 512)
    assert _C.cudnn_plan_sizes(1, 5000, 5000) == (4, 5120, 5120)  # no longer than the row's tiles
    assert _C.cudnn_plan_sizes(9, 1, 8193) == (12, 128, 10240)


def test_plans_are_counted():
    assert cuseq.cache.info()["cudnn_plan"] == {"entries": _C.cudnn_plans(), "bytes": 0}


# -------------------------------------------------------------------------------------- warming up


def test_warming_up_runs_each_kind_of_pack_once(monkeypatch):
    from cuseq.attention import warmup

    seen = []

    def attend(q, k, v, packed, *, causal, backend):
        seen.append((packed.num_sequences, packed.max_seqlen, q.shape, k.shape, v.shape, causal))
        assert backend == "segments"
        return varlen_attention(q, k, v, packed, causal=causal, backend=backend)

    monkeypatch.setattr(warmup, "varlen_attention", attend)
    options = {"heads": 4, "head_dim": 8, "device": "cpu", "dtype": torch.float32}
    options |= {"key_heads": 2, "value_dim": 16, "backend": "segments", "causal": False}
    packs = [[100, 28], [28, 100], [1] * 128, [], [90]]
    assert cuseq.attention_warmup(packs, **options) == 0  # no plan is cuDNN's
    rest = (torch.Size([128, 4, 8]), torch.Size([128, 2, 8]), torch.Size([128, 2, 16]), False)
    assert seen == [(2, 100, *rest), (128, 1, *rest)]
    seen.clear()
    cuseq.attention_warmup([[600, 8], [2000, 8]], total_tokens=2048, **options)
    assert [(n, longest, q[0]) for n, longest, q, *_ in seen] == [(2, 600, 2048), (2, 2000, 2048)]


@pytest.mark.parametrize("wrong,words", [
    ({"heads": 0}, "heads must be.* at least 1, got 0"),
    ({"head_dim": 1.5}, "head_dim must be an int.*, got 1.5"),
    ({"key_heads": True}, "key_heads must be"),
    ({"heads": 10**9}, "heads must be at most 65536"),
    ({"dtype": "bf16"}, "dtype must be"),
    ({"backend": "cuda"}, "backend must be one of"),
    ({"total_tokens": 5}, "total_tokens"),
    ({"causal": None}, "causal must be True or False"),
])  # fmt: skip
def test_a_wrong_argument_of_a_warm_up_is_named(wrong, words):
    options = {"heads": 2, "head_dim": 8, "device": "cpu", "dtype": torch.float32} | wrong
    with pytest.raises((ValueError, TypeError), match=words):
        cuseq.attention_warmup([[3, 4]], **options)


# --------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def cudnn(cuda):
    """Skip where torch or cuDNN are too old, and say so."""
    choice.load_backends()
    major, minor = torch.cuda.get_device_capability()
    missing = _C.missing_cudnn_attention(10 * major + minor)
    if missing:
        pytest.skip(missing)
    return cuda


def rows(tokens, *heads, dtype=torch.bfloat16):
    return inputs(tokens, *(heads or (4, 2, 64)), device="cuda", dtype=dtype)


def step(tensors, packed, backend="cudnn", **options):
    out = varlen_attention(*tensors, packed, backend=backend, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), tensors)


def check_step(tensors, packed, **options):
    found = step(tensors, packed, **options)
    expected = step(tensors, packed, "segments", **options)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous() and one.isfinite().all()
        # A document of one token has no gradient of q and k: what is left is compared with out's.
        assert relative(one, other, expected[0]) < 3 * HALF


def test_where_it_is_missing_the_reason_is_given(cuda):
    choice.load_backends()
    major, minor = torch.cuda.get_device_capability()
    if not _C.missing_cudnn_attention(10 * major + minor):
        pytest.skip("it is there")
    packed = PackedLayout.from_lengths([40, 24], device=cuda)
    with pytest.raises(ValueError, match="needs torch 2.15|needs cuDNN 9.24|sm_90 and sm_100"):
        attention_backend(*rows(64), packed, backend="cudnn")
    assert attention_backend(*rows(64), packed).name != "cudnn"


def test_packs_share_plans(cudnn):
    """A stream of packs makes a plan, forward and backward, for each rounded size, once."""
    packs = drawn_packs("lognormal", 2048, 40)
    tensors = rows(2048)
    layouts = [PackedLayout.from_lengths(pack, 2048, device=cudnn) for pack in packs]
    sizes = {_C.cudnn_plan_sizes(len(pack), max(pack), 2048) for pack in packs}
    assert 1 < len(sizes) < 25
    before = _C.cudnn_plans()
    for _ in range(2):
        for packed in layouts:
            step(tensors, packed)
        assert _C.cudnn_plans() - before <= 2 * len(sizes)
    for packed in layouts[:6]:
        check_step(tensors, packed)


def test_rows_of_other_lengths_share_plans(cudnn):
    """torch makes a plan for each number of tokens; rows are passed with that of the plan."""
    step(rows(1000), PackedLayout.from_lengths([300, 700], device=cudnn))
    before = _C.cudnn_plans()
    for tokens in (900, 961, 999, 1024):
        tensors = rows(tokens)
        check_step(tensors, PackedLayout.from_lengths([300, tokens - 300], device=cudnn))
        check_step(tensors, PackedLayout.from_lengths([300, 520], tokens, device=cudnn))
    assert _C.cudnn_plans() == before


def test_a_warm_up_makes_the_plans_of_a_run(cudnn):
    packs = drawn_packs("uniform", 3072, 30)
    options = {"heads": 6, "key_heads": 3, "head_dim": 40, "backend": "cudnn"}
    made = cuseq.attention_warmup(packs, total_tokens=3072, **options)
    assert made >= 2
    before = _C.cudnn_plans()
    tensors = rows(3072, 6, 3, 40)
    for pack in packs:
        step(tensors, PackedLayout.from_lengths(pack, 3072, device=cudnn))
    assert _C.cudnn_plans() == before
    assert cuseq.attention_warmup(packs, total_tokens=3072, **options) == 0


@pytest.mark.parametrize("lengths", [[1] * 300, [0, 300, 0, 0], [300], [128, 172], [2, 298]])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_at_the_edges(cudnn, lengths, causal):
    check_step(rows(300), PackedLayout.from_lengths(lengths, device=cudnn), causal=causal)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 64), (72, 72), (20, 36)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_heads(cudnn, dims, heads, dtype):
    if torch.cuda.get_device_capability()[0] == 10 and max(dims) > 128 and dims != (192, 128):
        pytest.skip("sm_100 takes fewer")
    tensors = rows(600, *heads, *dims, dtype=dtype)
    check_step(tensors, PackedLayout.from_lengths([250, 1, 0, 300], 600, device=cudnn))


def test_parts_of_one_projection_and_expanded_keys(cudnn):
    packed = PackedLayout.from_lengths([100, 212, 88], 420, device=cudnn)
    fused = torch.randn(420, 12, 64, device=cudnn, dtype=torch.bfloat16, requires_grad=True)

    def run(backend):
        out = varlen_attention(*fused.split([8, 2, 2], 1), packed, backend=backend)
        return out, *torch.autograd.grad(out.float().square().sum(), fused)

    for one, other in zip(run("cudnn"), run("segments"), strict=True):
        assert relative(one, other, other) < 3 * HALF
    q, k, v = (t.detach() for t in rows(420, 8, 1, 64))
    every = [q, k.expand(-1, 4, -1), v.expand(-1, 4, -1)]
    expected = varlen_attention(q, k, v, packed, backend="segments")
    found = varlen_attention(*every, packed, backend="cudnn")
    assert relative(found, expected, expected) < HALF


def test_what_it_cannot_take_is_refused_by_name(cudnn):
    packed = PackedLayout.from_lengths([200, 312], device=cudnn)
    tensors = rows(512)

    def refused(words, tensors=tensors, packed=packed, **options):
        with pytest.raises(ValueError, match=f'backend="cudnn" cannot take this call: .*{words}'):
            varlen_attention(*tensors, packed, backend="cudnn", **options)

    refused("it has no window", window=7)
    refused("it has no spans", spans=[(0, 4)])
    refused("it takes fp16 and bf16", tensors=[t.detach().float() for t in tensors])
    refused("it takes head_dim up to", tensors=rows(512, 4, 4, 264))
    torch.use_deterministic_algorithms(True)
    try:
        refused("its backward is not deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    # Room for many long sequences: one is long, and two thousand are short.
    lengths = [30_000] + [2] * 1_384
    many = PackedLayout.from_lengths(lengths, device=cudnn)
    wide = [torch.zeros(32_768, n, 128, device=cudnn, dtype=torch.bfloat16) for n in (16, 8, 8)]
    refused("more than 2\\^31 numbers", tensors=wide, packed=many)
    assert attention_backend(*wide, many).name != "cudnn"


def test_switched_off_for_torch_it_is_off_for_auto(cudnn):
    packed = PackedLayout.from_lengths([200, 312], device=cudnn)
    facts = (torch.cuda.get_device_capability()[0] * 10, True, 64, "causal", 0, "eager", 512, 2)
    measured = dict(choice.measurements({}))
    try:
        _C.set_measured_attention([(facts, {"cudnn": 1.0, "flash": 2.0})])
        assert attention_backend(*rows(512), packed).name == "cudnn"
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert attention_backend(*rows(512), packed).name == "flash"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        _C.set_measured_attention([row for row in measured.items() if row[1]])


def test_auto_counts_what_a_long_document_among_short_ones_costs(cudnn):
    """cuDNN clears gradients for every sequence at full length; the table's rows are even."""
    facts = (torch.cuda.get_device_capability()[0] * 10, True, 128, "causal", 0, "eager", 8192, 40)
    measured = dict(choice.measurements({}))
    tensors = [torch.zeros(8192, n, 128, device=cudnn, dtype=torch.bfloat16) for n in (16, 8, 8)]
    even = PackedLayout.from_lengths([204] * 40, 8192, device=cudnn)
    skewed = PackedLayout.from_lengths([6000] + [56] * 39, 8192, device=cudnn)
    try:
        _C.set_measured_attention([(facts, {"cudnn": 400.0, "flash": 600.0})])
        assert attention_backend(*tensors, even).name == "cudnn"
        assert attention_backend(*tensors, skewed).name == "flash"
    finally:
        _C.set_measured_attention([row for row in measured.items() if row[1]])
