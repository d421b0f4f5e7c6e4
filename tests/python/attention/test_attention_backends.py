"""Backends of attention: which one runs, that each is exact, and what the others say.

FlashAttention 3 and 4 are packages of others. Stand-ins on the CPU show how their ops are called;
the kernels themselves are tested where a GPU has them.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import pytest
import torch
from reference import attention as reference_attention
from test_attention import PACKS, check_against_reference, inputs, relative
from test_flash_implementations import exact, gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuseq import (
    _C,
    PackedLayout,
    PackedTree,
    attention_backend,
    varlen_attention,
)
from cuseq.attention import choice as _choice
from cuseq.attention import flex as _flex
from cuseq.attention import packages as _packages
from cuseq.attention import table as _attention_table
from cuseq.attention.call import Call, is_wide
from cuseq.layout import StaticLayout

NAMES = ("flash", "cudnn", "fa4", "fa3", "flex", "efficient", "segments")
op = torch.ops.cuseq.varlen_attention


# --------------------------------------------------------------------------------- on every device


def call_of(q: Tensor, packed: PackedLayout, **options: Any) -> Call:
    """Return a call with one tensor as queries, keys and values."""
    call = Call(q, q, q, packed, True, None, None, None, None, None, "auto")
    return call._replace(**options)


def test_compiled_code_holds_what_it_asked_when_it_was_compiled(monkeypatch):
    asked = []

    def least(head_dim: int, mask: str, window: int) -> int:
        asked.append((head_dim, mask, window))
        return 8

    monkeypatch.setattr(_choice, "load", lambda: asked.append("load"))
    monkeypatch.setattr(_flex, "least_tokens_in_compiled_code", least)
    packed = PackedLayout.from_lengths([2])

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def takes_flex(x: Tensor) -> Tensor:
        _choice.load_backends()
        call = call_of(x.view(-1, 1, 64), packed)
        return x + 1 if _flex._wins_in_compiled_code(call) else x - 1

    assert takes_flex(torch.zeros(9, 64)).eq(1).all()
    assert takes_flex(torch.zeros(3, 64)).eq(-1).all()
    count = len(asked)
    assert {"load", (64, "causal", 0)} == set(asked)
    assert takes_flex(torch.zeros(10, 64)).eq(1).all()
    assert len(asked) == count


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layout_that_a_graph_refills_asks_what_captures_measured(compiled, monkeypatch, measured):
    """Its capacity counts, not its lengths; other layouts ask about eager or compiled code."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_flex, "obstacle", lambda q, v: None)
    facts = (90, True, 128, "causal", 0, "captured")
    measured(
        ((*facts, 1024, 64), {"flash": 1.0, "flex": 2.0}),
        ((*facts, 1024, 512), {"flash": 9.0, "flex": 2.0}),
        ((*facts, 1000, 700), {"flash": 1.0}),  # says nothing about flex
    )

    def takes_flex(q: Tensor, packed: PackedLayout, options: dict[str, Any]) -> Tensor:
        return q + 1 if _flex.pays(call_of(q, packed, **options)) else q - 1

    if compiled:
        takes_flex = torch.compile(takes_flex, fullgraph=True, backend="aot_eager")
    for tokens, room, expected in ((1024, 60, -1), (1024, 500, 1), (1000, 700, 1), (400, 300, -1)):
        packed = PackedLayout.from_lengths([5, 7], tokens, max_seqs=room)
        q = torch.zeros(tokens, 1, 128, dtype=torch.bfloat16)
        masks = ({}, {"window": 99}, {"causal": False}, {"window": 3, "causal": False})
        for options in masks:
            torch._dynamo.reset()  # its limit of compilations is for one function in all
            assert takes_flex(q, StaticLayout.like(packed, q.device), options).eq(expected).all()
            assert takes_flex(q, packed, options).eq(-1).all()


def test_a_graph_is_for_the_sequences_expected_and_for_those_there_is_room_for(
    monkeypatch, measured
):
    """Code is compiled once: the choice is the one that loses less at its worst."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    facts = (90, True, 128, "causal", 0, "captured", 1024)
    measured(
        ((*facts, 8), {"flash": 2.0, "flex": 4.0}),
        ((*facts, 128), {"flash": 7.0, "flex": 4.0}),
        ((*facts, 1024), {"flash": 90.0, "flex": 4.0}),
    )

    def flex(expected: int) -> list[bool]:
        question = (128, "causal", 0, 1024)
        return [_flex.wins_replays(*question, n, expected) for n in (8, 128, 1024)]

    assert flex(expected=0) == [False, True, True]
    assert flex(expected=8) == [False, False, True]
    assert flex(expected=128) == [False, True, True]


def test_wide_heads_take_flex_where_it_was_measured_faster(monkeypatch, measured):
    """Heads of 512 have no flash kernel; what narrower ones measured says nothing of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_flex, "obstacle", lambda q, v: None)
    packed = PackedLayout.from_lengths([500, 524])

    def takes_flex(dim: int, **options: Any) -> bool:
        q = torch.zeros(1024, 1, dim, dtype=torch.bfloat16)
        return _flex.pays(call_of(q, packed, **options))

    narrow = (90, True, 256, "causal", 0, "eager", 1024, 2)
    measured((narrow, {"efficient": 9.0, "flex": 2.0}))
    assert not takes_flex(264) and not takes_flex(256)
    wide = ((90, True, 512, "causal", 0, "eager", 1024, 2), {"efficient": 9.0, "flex": 2.0})
    measured((narrow, {"efficient": 1.0, "flex": 2.0}), wide)
    assert takes_flex(264) and takes_flex(512) and not takes_flex(256)
    assert takes_flex(512, window=600)  # hides nothing
    assert not takes_flex(512, window=300) and not takes_flex(512, causal=False)
    measured(wide)
    rest = ("causal", 0, "eager", 4, 1)
    assert _C.closest_measured_attention((90, True, 512, *rest), backend="") == wide[1]
    assert _C.closest_measured_attention((90, True, 256, *rest), backend="") is None


def test_wide_heads_that_flex_refuses(monkeypatch):
    with FakeTensorMode():
        half = torch.empty(8, 1, 512, device="cuda", dtype=torch.bfloat16)
        full = torch.empty(8, 1, 512, device="cuda")
        wider = torch.empty(8, 1, 520, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(_flex, "shared_memory", lambda device: 227 * 1024)
    assert _flex.obstacle(half, half) is None
    assert "from 16 to 512, got 520 and 512" in _flex.obstacle(wider, half)
    assert "in fp16 and bf16 alone, got torch.float32" in _flex.obstacle(full, full)
    with monkeypatch.context() as under_autocast:
        under_autocast.setattr(_flex, "computes_in_half", lambda q: True)
        assert _flex.obstacle(full, full) is None
    assert is_wide(half, half[..., :64]) and not is_wide(half[0], half[0])
    assert _flex.fits(half[..., :256], half[..., :256])
    assert not _flex.fits(half, half)  # trees
    monkeypatch.setattr(_flex, "shared_memory", lambda device: 99 * 1024)
    assert "229,376 bytes of shared memory" in _flex.obstacle(half, half)
    assert _flex.obstacle(half[..., :256], half[..., :256]) is None


# Bytes of shared memory of a block: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {
    70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227,
    120: 99, 121: 99,
}  # fmt: skip


@pytest.fixture(params=SHARED_MEMORY, ids=lambda sm: f"sm_{sm}")
def unmeasured_gpu(request, monkeypatch, measured) -> int:
    """Pretend that the process has a GPU without measurements; return its compute capability."""
    sm = request.param
    measured()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
    monkeypatch.setattr(_flex, "is_capturing", lambda device: False)
    monkeypatch.setattr(_flex, "shared_memory", lambda device: SHARED_MEMORY[sm] * 1024)
    return sm


@pytest.mark.parametrize("packages", [(), ("fa4",)], ids=["PyTorch alone", "fa4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
def test_flex_by_rule(dim, dtype, packages, unmeasured_gpu, monkeypatch):
    """Without measurements only for masks that others run one by one, where its tiles fit."""
    there = {name: name in packages for name in (*_choice.PACKAGES, "cudnn")}
    monkeypatch.setattr(_packages, "found", there)
    packed = PackedLayout.from_lengths([500, 524])
    with FakeTensorMode():
        q = torch.empty(1024, 2, dim, device="cuda", dtype=dtype)
    plain = call_of(q, packed)
    roomy = SHARED_MEMORY[unmeasured_gpu] >= 224
    for options, expected in (
        ({}, False),
        ({"window": 9}, False),
        ({"causal": False, "window": 9}, False),
        ({"softcap": 5.0}, dim <= 256 or roomy),
        ({"spans": [(0, 9)]}, dim <= 256),
    ):
        asked = plain._replace(**options)
        expected = expected and dtype != torch.float32 and unmeasured_gpu >= 80
        assert _flex.pays(asked) == expected, options
        if expected:
            why = _flex.why(asked)
            assert why.startswith("a rule, not a measurement: one kernel for all sequences")
            assert why.endswith(
                f"measured on sm_{unmeasured_gpu} (to measure it, in a clone of cuseq: python -m "
                "benchmarks attention_backends)"
            )
    assert not _flex.pays(call_of(q[:511], packed, softcap=5.0))
    for mask in ("causal", "full", "window", "two_sided"):
        assert _flex.least_tokens_in_compiled_code(dim, mask, 0) is None
        assert not _flex.wins_replays(dim, mask, 0, 2048, 64, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (64, 256)], ids=str)
def test_flex_has_tiles_that_fit(dims, dtype, unmeasured_gpu):
    """In the 99 KiB of some GPUs torch's tiles do not, for rows of more than 256 bytes."""
    with FakeTensorMode():
        q, v = (torch.empty(1024, 2, dim, device="cuda", dtype=dtype) for dim in dims)
    obstacle = _flex.obstacle(q, v)
    if unmeasured_gpu < 80:
        assert "it runs on GPUs from sm_80 on" in obstacle
        return
    assert obstacle is None
    bytes_of_row = max(dims) * q.element_size()
    if SHARED_MEMORY[unmeasured_gpu] > 99 or bytes_of_row <= 256:
        assert _flex._tiles(q, v) is None
        return
    # Rows in a tile have a power of two as head_dim. A kernel holds one tile of queries and of
    # output, and those of keys and values. It was compiled for these GPUs to see what it takes.
    tiles = _flex._tiles(q, v)
    padded = sum(1 << (dim - 1).bit_length() for dim in dims) * q.element_size()
    for queries, keys in (("fwd_BLOCK_M", "fwd_BLOCK_N"), ("bwd_BLOCK_M1", "bwd_BLOCK_N1")):
        assert (tiles[queries] + tiles[keys]) * padded <= 99 * 1024


def test_a_tree_takes_its_calls_in_compiled_code(monkeypatch, measured):
    """The table compares backends over rows of documents, and flex needs a mask in every layer."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_flex, "obstacle", lambda q, v: None)
    measured(((90, True, 128, "causal", 0, "compiled", 512, 2), {"flash": 9.0, "flex": 2.0}))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def takes_flex(q: Tensor, packed: PackedLayout) -> Tensor:
        return q + 1 if _flex.pays(call_of(q, packed)) else q - 1

    q = torch.zeros(512, 1, 128, dtype=torch.bfloat16)
    tree = PackedTree.from_groups([[1] * 9], [[[2] * 5] * 3], total_tokens=512)
    assert takes_flex(q, PackedLayout.from_lengths([200, 300], 512)).eq(1).all()
    assert takes_flex(q, tree.layout).eq(-1).all()


def chosen(facts: tuple, usable: set[str]) -> str:
    """Return what auto runs in compiled code or in a GraphedStep at a row of the table."""
    sm, half, head_dim, mask, window, mode, tokens, sequences = facts
    if mode == "compiled":
        least = _flex.least_tokens_in_compiled_code(head_dim, mask, window)
        takes_flex = least is not None and tokens >= least
    else:
        sizes = (1 << (size - 1).bit_length() for size in (tokens, sequences))
        takes_flex = _flex.wins_replays(head_dim, mask, window, *sizes, expected=0)
    if takes_flex and tokens >= _flex.LEAST_TOKENS:
        return "flex"
    # The op chooses when it runs: in compiled code as in eager code.
    asked = (sm, half, head_dim, mask, window, mode if mode == "captured" else "eager")
    times = _C.closest_measured_attention((*asked, tokens, sequences), backend="")
    there = (usable - {"flex"}) & times.keys()
    return min(there, key=lambda name: times[name])


@pytest.mark.parametrize(
    "version,packages",
    [("2.11.0", ()), ("2.11.0", ("fa4",)), ("2.15.0", ()), ("2.15.0", ("fa4",)),
     ("2.15.0", ("cudnn",)), ("2.15.0", ("fa4", "cudnn"))],
    ids=str,
)  # fmt: skip
def test_auto_is_level_with_the_best_of_the_table_without_a_gpu(
    version, packages, monkeypatch, measured
):
    """Replay the measurements of compiled code and of captures: within 5 % of the best."""
    table = _attention_table.read_table(version)
    measured(*table)
    of_place = (*_choice.PACKAGES, "cudnn")  # what not every machine has
    monkeypatch.setattr(_packages, "found", {name: name in packages for name in of_place})
    usable = {name for name in NAMES if name not in of_place or name in packages}
    replayed = 0
    for facts, times in table:
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None, sm=facts[0]: divmod(sm, 10)
        )
        # Compiled code takes flex from some number of tokens on, or not at all: it may be ahead in
        # rows of 512 tokens and not in those of 2,048.
        if facts[5] == "eager" or (facts[5] == "compiled" and facts[6] < 2048):
            continue
        taken = usable - {"cudnn"} if facts[5] == "captured" else usable
        found = chosen(facts, taken)
        if found in times:  # flex was not measured in every row of captures
            best = min(us for name, us in times.items() if name in taken)
            assert times[found] <= 1.05 * best, (facts, found, times)
            replayed += 1
    assert replayed >= 16


@pytest.fixture
def measured():
    """Return a function that replaces the measurements until the test is over."""

    def replace(*rows: tuple[tuple, dict[str, float]]) -> None:
        _C.set_measured_attention(list(rows))

    yield replace
    _C.set_measured_attention(_attention_table.read_table() if torch.cuda.is_available() else [])


class Package:
    """Exact attention on the CPU in place of a package's kernels, with NaN where it may be."""

    def __init__(self, name: str):
        self.calls: list[tuple[str, int | None, int | None]] = []
        kernels = self.forward, self.backward
        self._library = _packages.register_kernels(name, "stand-in 1.0", *kernels, device="CPU")

    def remove(self) -> None:
        self._library = None

    def forward(self, q, k, v, out, logsumexp, offsets, _, longest, _k, scale, causal, left, right):
        self.calls.append(("forward", left, right))
        lengths = self.lengths_of(offsets, longest, q)
        assert right == (None if left is None else 0 if causal else left)
        out.copy_(exact(q, k, v, lengths, causal, left, scale))
        assert logsumexp.shape == (q.shape[1], q.shape[0])
        logsumexp.fill_(1.0)

    def backward(
        self, grad, q, k, v, out, lse, dq, dk, dv, offsets, _, longest, _k, scale, causal, left, _r
    ):
        self.calls.append(("backward", left, _r))
        assert lse.is_contiguous() and bool((lse == 1).all())
        lengths = self.lengths_of(offsets, longest, q)
        found = gradients(q, k, v, grad, lengths, causal, left, scale)
        for tensor, value in zip((dq, dk, dv), found, strict=True):
            tensor.copy_(value)

    def lengths_of(self, offsets: Tensor, longest: int, q: Tensor) -> list[int]:
        lengths = offsets.diff().tolist()
        assert longest >= max(lengths) and sum(lengths) == q.shape[0], "no rows of the tail"
        return lengths


@pytest.fixture
def install():
    """Return a function that puts a stand-in in the place of a package until the test is over."""
    installed = []

    def put(name: str) -> Package:
        installed.append(Package(name))
        return installed[-1]

    yield put
    for package in installed:
        package.remove()


@pytest.fixture(params=["fa4", "fa3"])
def package(request, install) -> tuple[str, Package]:
    return request.param, install(request.param)


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 3}, {"causal": False, "window": 2}], ids=str
)
def test_a_package_gets_the_rows_of_the_sequences(package, lengths, tokens, options):
    name, kernels = package
    tensors = inputs(tokens, dim=20, value_dim=16, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in tensors:
            tensor[sum(lengths) :] = math.nan
    packed = PackedLayout.from_lengths(lengths, tokens)
    out = varlen_attention(*tensors, packed, **options, backend=name)
    real = [t.detach()[: sum(lengths)] for t in tensors]
    expected = reference_attention(*(t.double() for t in real), lengths, **options)
    assert not out[sum(lengths) :].any()
    assert relative(out[: sum(lengths)], expected, expected) < 6e-3
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(not grad[sum(lengths) :].any() and grad.isfinite().all() for grad in grads)
    assert [one for one, *_ in kernels.calls] == (["forward", "backward"] if any(lengths) else [])


@pytest.mark.parametrize(
    "dim,heads,padded",
    [
        (8, (4, 2), 64), (40, (4, 2), 64), (64, (4, 4), 64), (72, (4, 2), 96), (80, (4, 4), 96),
        (128, (4, 1), 128), (160, (4, 4), 192), (160, (4, 2), 256), (192, (4, 1), 256),
        (256, (2, 2), 256),
    ],
)  # fmt: skip
def test_a_package_gets_head_sizes_that_it_computes_right(dim, heads, padded):
    """For others flash-attn-4's backward does not compile, or gives wrong gradients."""
    seen = []

    class Recording(Package):
        def forward(self, q, k, v, *rest):
            seen.append({rows.shape[2] for rows in (q, k, v)})
            super().forward(q, k, v, *rest)

    kernels = Recording("fa4")
    try:
        tensors = inputs(9, *heads, dim, 8, dtype=torch.bfloat16)
        packed = PackedLayout.from_lengths([4, 5])
        out = varlen_attention(*tensors, packed, backend="fa4")
        expected = varlen_attention(*tensors, packed, backend="segments")
        assert seen == [{padded}] and out.shape == expected.shape
        assert relative(out, expected, expected) < 1e-2
        grads = torch.autograd.grad(out.sum(), tensors)
        assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]
    finally:
        kernels.remove()


def test_a_package_gets_keys_of_another_row_where_its_kernels_take_them():
    tree = PackedTree.from_groups([[1, 2, 3]], [[[4, 5], [6]]])
    tensors = inputs(6, dim=64, dtype=torch.bfloat16)
    pairs = []

    def forward(q, k, v, out, logsumexp, offsets_q, offsets_k, *_):
        pairs.append((offsets_q.diff().tolist(), offsets_k.diff().tolist()))
        out.zero_()
        logsumexp.fill_(-math.inf)

    for takes_two_rows in (True, False):
        library = _packages.register_kernels(
            "fa4", "stand-in 1.0", forward, forward, device="CPU", takes_two_rows=takes_two_rows
        )
        try:
            if takes_two_rows:
                varlen_attention(*tensors, tree.layout, backend="fa4")
                (nodes, same), (queries, keys) = pairs
                assert nodes == same and sum(nodes) == 6
                assert (sum(queries), sum(keys)) == (3, 3)
            else:
                with pytest.raises(ValueError, match="were not tried on keys of another row"):
                    varlen_attention(*tensors, tree.layout, backend="fa4")
        finally:
            del library


def test_a_package_refuses_larger_heads(package):
    name, _ = package
    tensors = inputs(9, 2, 2, 264, dtype=torch.bfloat16)
    packed = PackedLayout.from_lengths([4, 5])
    with pytest.raises(ValueError, match="it takes head_dim up to 256, got 264"):
        varlen_attention(*tensors, packed, backend=name)


def test_the_measurements_choose_and_the_backward_follows(measured, install):
    kernels = install("fa4")
    facts = (0, True, 16, "causal", 0, "eager")
    measured(
        ((*facts, 8, 2), {"fa4": 9.0, "segments": 1.0}),
        ((*facts, 512, 2), {"fa4": 1.0, "segments": 9.0, "flash": 0.1}),
    )
    for lengths, name in (([3, 4], "segments"), ([300, 200], "fa4")):
        packed = PackedLayout.from_lengths(lengths)
        q, k, v = inputs(sum(lengths), dtype=torch.bfloat16)
        found = attention_backend(q, k, v, packed)
        assert found.name == name and "fastest where it was measured" in found.reason
        before = len(kernels.calls)
        varlen_attention(q, k, v, packed).sum().backward()
        made = ["forward", "backward"] if name == "fa4" else []
        assert [one for one, *_ in kernels.calls[before:]] == made


def test_calls_with_other_masks_follow_causal_rows_where_they_have_none(measured, install):
    install("fa4")
    causal, full = ((0, True, 16, mask, 0, "eager", 8, 2) for mask in ("causal", "full"))
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)

    def chosen(**options) -> str:
        return attention_backend(*tensors, packed, **options).name

    measured((causal, {"fa4": 9.0, "segments": 1.0}))
    assert chosen(causal=False) == "segments"
    assert chosen(window=2) == chosen(causal=False, window=2) == "segments"
    measured((causal, {"fa4": 9.0, "segments": 1.0}), (full, {"fa4": 1.0, "segments": 9.0}))
    assert chosen(causal=False) == "fa4" and chosen() == "segments"


def test_without_measurements_the_usual_one_runs(measured, install):
    measured()
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)
    assert attention_backend(*tensors, packed).name == "segments"
    kernels = install("fa4")
    found = attention_backend(*tensors, packed)
    assert found.name == "fa4" and "nothing like this call was measured" in found.reason
    assert found.reason.startswith("a rule, not a measurement: ")
    assert "these take it too: segments" in found.reason
    kernels.remove()
    assert attention_backend(*tensors, packed).name == "segments"


def test_deterministic_mode_leaves_the_packages(package):
    name, _ = package
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_backend(*tensors, packed).name == "segments"
        with pytest.raises(ValueError, match="not deterministic"):
            varlen_attention(*tensors, packed, backend=name)
    finally:
        torch.use_deterministic_algorithms(False)


class Failing(Package):
    """A package whose kernel raises in one direction; what it computes before is right."""

    def __init__(self, name: str, fails_in: str, error: BaseException):
        super().__init__(name)
        self.fails_in, self.error = fails_in, error

    def forward(self, q, k, v, out, logsumexp, offsets, *rest):
        self.calls.append(("forward", None, None))
        if self.fails_in == "forward":
            raise self.error
        found, lse, _ = op(q, k, v, offsets, scale=rest[3], backend="segments")
        out.copy_(found)
        logsumexp.copy_(lse)

    def backward(self, *tensors):
        self.calls.append(("backward", None, None))
        raise self.error


@pytest.fixture(params=["forward", "backward"])
def failing(request, measured):
    """Return a function that installs a package that fails, and removes it after the test."""
    measured()
    installed = []

    def put(error: BaseException) -> Failing:
        installed.append(Failing("fa4", request.param, error))
        return installed[-1]

    yield put
    for kernels in installed:
        kernels.remove()
        Package("fa4").remove()  # forgets the failure


def test_auto_passes_by_a_package_that_fails(failing):
    lengths, tokens = [3, 0, 4], 9
    packed = PackedLayout.from_lengths(lengths, tokens)
    tensors = inputs(tokens, dtype=torch.bfloat16)
    expected = varlen_attention(*tensors, packed)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    kernels = failing(TypeError("no such tile\n(many more lines)"))
    assert attention_backend(*tensors, packed).name == "fa4"
    with pytest.warns(
        UserWarning, match=r"stand-in 1.0 failed \(TypeError: no such tile\): "
    ) as seen:
        out = varlen_attention(*tensors, packed)
        grads = torch.autograd.grad(out.sum(), tensors)
    assert len(seen) == 1
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, wanted)
    made = len(kernels.calls)
    assert kernels.calls[-1][0] == kernels.fails_in
    varlen_attention(*tensors, packed).sum().backward()  # no second warning
    assert len(kernels.calls) == made
    found = attention_backend(*tensors, packed)
    assert found.name == "segments"
    assert "fa4: stand-in 1.0 failed (TypeError: no such tile)" in found.reason


@pytest.mark.filterwarnings("ignore:stand-in")
def test_a_package_that_is_asked_for_raises_its_error(failing):
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)
    failing(TypeError("no such tile"))
    for _ in range(2):
        with pytest.raises(TypeError, match="no such tile"):
            varlen_attention(*tensors, packed, backend="fa4").sum().backward()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory")], ids=repr
)
def test_what_is_no_failure_of_the_package_is_raised(failing, error):
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)
    failing(error)
    with pytest.raises(type(error)):
        varlen_attention(*tensors, packed).sum().backward()
    assert attention_backend(*tensors, packed).name == "fa4" and not _C.failed_attention("fa4")


@pytest.mark.filterwarnings("error:stand-in")
def test_a_failure_raises_where_warnings_are_errors(failing):
    packed = PackedLayout.from_lengths([3, 4])
    tensors = inputs(7, dtype=torch.bfloat16)
    failing(TypeError("no such tile"))
    with pytest.raises(UserWarning, match="stand-in 1.0 failed"):
        varlen_attention(*tensors, packed).sum().backward()


@pytest.mark.parametrize("name", ["flash", "cudnn", "fa4", "fa3", "flex", "efficient"])
def test_a_backend_that_cannot_run_says_what_to_do(name):
    packed = PackedLayout.from_lengths([2, 3])
    tensors = inputs(5)
    remedy = "CUDA|Python|installed"
    for call in (varlen_attention, attention_backend):
        with pytest.raises(ValueError, match=f'backend="{name}".*({remedy})'):
            call(*tensors, packed, backend=name)
    with pytest.raises(ValueError, match=f'backend="{name}"'):
        op(*tensors, packed.cu_seqlens, backend=name)


@pytest.mark.parametrize("name", ["FA4", "", "sdpa", None, 4])
def test_an_unknown_backend_raises(name):
    packed = PackedLayout.from_lengths([2, 3])
    with pytest.raises(ValueError, match="backend must be"):
        varlen_attention(*inputs(5), packed, backend=name)
    if isinstance(name, str):
        with pytest.raises(ValueError, match="backend must be"):
            op(*inputs(5), packed.cu_seqlens, backend=name)


@pytest.mark.parametrize(
    "options", [{}, {"window": 2}, {"causal": False}, {"sinks": True}], ids=str
)
def test_segments_can_be_asked_for(device, options):
    lengths, tokens = [5, 0, 9], 16
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    tensors = inputs(tokens, dim=16, device=device)
    if options.pop("sinks", False):
        options = {"sinks": torch.randn(4, device=device)}
    expected = varlen_attention(*tensors, packed, **options)
    out = varlen_attention(*tensors, packed, **options, backend="segments")
    torch.testing.assert_close(out, expected)
    assert attention_backend(*tensors, packed, **options, backend="segments").name == "segments"


# ------------------------------------------------------------------------------------- soft caps


@pytest.mark.parametrize("lengths,tokens", PACKS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 4}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_soft_caps_match_the_reference(device, lengths, tokens, options, dtype):
    tensors = inputs(tokens, device=device, dtype=dtype)
    packed = PackedLayout.from_lengths(lengths, tokens, device=device)
    bound = 2e-6 if dtype == torch.float32 else 1e-13
    check_against_reference(
        tensors, lengths, packed, bound=bound, softcap=0.7, backend="segments", **options
    )


def test_soft_caps_pass_gradcheck(device):
    tensors = inputs(6, 2, 1, 8, dtype=torch.float64, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    assert torch.autograd.gradcheck(
        lambda q, k, v: varlen_attention(q, k, v, packed, softcap=0.5, window=2), tensors
    )


def test_soft_caps_of_padded_segments(device):
    tensors = inputs(12, device=device)
    padded = PackedLayout.from_lengths([2, 3], 12, segment_multiple=4, device=device)
    out = varlen_attention(*tensors, padded, softcap=0.5)
    rows = torch.tensor([0, 1, 4, 5, 6], device=device)
    packed = PackedLayout.from_lengths([2, 3], device=device)
    expected = varlen_attention(*(t[rows] for t in tensors), packed, softcap=0.5)
    torch.testing.assert_close(out[rows], expected)


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan, math.inf])
def test_a_soft_cap_is_above_zero(softcap):
    packed = PackedLayout.from_lengths([2, 3])
    with pytest.raises(ValueError, match="softcap must be"):
        varlen_attention(*inputs(5), packed, softcap=softcap)
    with pytest.raises(ValueError, match="softcap must be"):
        op(*inputs(5), packed.cu_seqlens, softcap=softcap)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_options(device, reentrant):
    tensors = inputs(6, device=device)
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)

    def layer(q, k, v):
        return varlen_attention(q, k, v, packed, softcap=0.5, backend="segments")

    expected = torch.autograd.grad(layer(*tensors).sum(), tensors)
    out = torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=reentrant)
    out.sum().backward()
    assert all(torch.equal(t.grad, grad) for t, grad in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_with_options(backend):
    def layer(q, k, v, packed):
        return varlen_attention(q, k, v, packed, softcap=0.5, backend="segments")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    tensors = inputs(6)
    for lengths in ([2, 3], [6], [0, 2], []):
        packed = PackedLayout.from_lengths(lengths, 6)
        out, expected = compiled(*tensors, packed), layer(*tensors, packed)
        torch.testing.assert_close(out, expected)
        for actual, wanted in zip(
            torch.autograd.grad(out.sum(), tensors),
            torch.autograd.grad(expected.sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_autograd_keeps_the_options():
    tensors = inputs(6)
    packed = PackedLayout.from_lengths([2, 3], 6)

    def gradients_of(softcap):
        out = varlen_attention(*tensors, packed, softcap=softcap, backend="segments")
        return torch.autograd.grad(out.sum(), tensors)

    expected = [gradients_of(softcap) for softcap in (0.5, 0.25)]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = [gradients_of(softcap) for softcap in (0.5, 0.25)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_opcheck_with_options(device):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    arguments = (*inputs(6, device=device), packed.cu_seqlens_static, packed.host_meta)
    torch.library.opcheck(op, arguments, {"softcap": 0.5, "backend": "segments"})


# ------------------------------------------------------------------------------------------- flex


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths,tokens", [pack for pack in PACKS if pack.values[1] > 0])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 2}, {"softcap": 0.7}],
    ids=str,
)
def test_flex_rows_match_the_reference(lengths, tokens, options):
    """Uncompiled, in fp64 and without gradients, which a CPU does not have."""
    q, k, v = (t.detach() for t in inputs(tokens, dim=16, dtype=torch.float64))
    for tensor in (q, k, v):
        tensor[sum(lengths) :] = math.nan
    packed = PackedLayout.from_lengths(lengths, tokens)
    mask = packed.block_mask(**{n: o for n, o in options.items() if n != "softcap"})
    cap = torch.tensor(options["softcap"]) if "softcap" in options else None
    out = _flex.flex_rows(q, k, v, mask, packed.moe_padding_mask, 0.3, cap, None)
    real = [t[: sum(lengths)] for t in (q, k, v)]
    expected = reference_attention(*real, lengths, scale=0.3, **options)
    assert out.is_contiguous() and not out[sum(lengths) :].any()
    assert relative(out[: sum(lengths)], expected, expected) < 1e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_rows_with_sinks_and_spans():
    q, k, v = (t.detach() for t in inputs(9, dim=16))
    packed = PackedLayout.from_lengths([4, 3], 9)
    sinks = torch.randn(4)
    expected = varlen_attention(q, k, v, packed, spans=[(1, 3)], sinks=sinks)
    mask = packed.block_mask(spans=[(1, 3)])
    out = _flex.flex_rows(q, k, v, mask, packed.moe_padding_mask, None, None, sinks)
    torch.testing.assert_close(out, expected)


# ------------------------------------------------------------------------------------- the table


def test_every_row_of_the_table_is_its_own_closest(measured):
    """So auto takes the fastest backend at every row, of those that are installed."""
    rows = _attention_table.read_table()
    measured(*rows)
    assert len({facts for facts, _ in rows}) == len(rows)
    for facts, times in rows:
        assert times and all(us > 0 for us in times.values())
        assert _C.closest_measured_attention(facts) == times
        sm, half, head_dim, mask, window, mode, tokens, sequences = facts
        assert sm >= 80 and head_dim > 0 and window >= 0 < min(tokens, sequences)
        assert mask in ("causal", "full", "window", "two_sided", "spans", "softcap")
        assert mode in ("eager", "compiled", "captured")


def test_rows_are_compared_by_ratios(measured):
    facts = (90, True, 128, "causal", 0, "eager")
    measured(((*facts, 1000, 1), {"flash": 1.0}), ((*facts, 8000, 1), {"flash": 2.0}))
    for tokens, us in ((1, 1.0), (2000, 1.0), (4000, 2.0), (10**9, 2.0)):
        assert _C.closest_measured_attention((*facts, tokens, 1)) == {"flash": us}
    assert _C.closest_measured_attention((*facts, 1, 1), backend="flex") is None
    measured(((*facts, 1000, 1), {"flash": 1.0}), ((*facts, 8000, 1), {"flash": 2.0, "flex": 3.0}))
    assert _C.closest_measured_attention((*facts, 1, 1), backend="flex") == {
        "flash": 2.0,
        "flex": 3.0,
    }
    for other in ((80, *facts[1:]), (90, False, *facts[2:]), (*facts[:3], "full", 0, "eager")):
        assert _C.closest_measured_attention((*other, 1000, 1)) is None


def test_captures_are_compared_by_the_sequences_that_they_have_room_for(measured):
    facts = (90, True, 128, "causal", 0, "captured")
    times = {(1024, 64): 1.0, (2048, 64): 2.0, (2048, 1024): 3.0, (4096, 256): 4.0}
    measured(*(((*facts, *sizes), {"flash": us}) for sizes, us in times.items()))
    # The first has the same mean length as 1,024 tokens with room for 64.
    for sizes, us in (((2048, 128), 2.0), ((2048, 500), 3.0), ((1024, 1024), 3.0)):
        assert _C.closest_measured_attention((*facts, *sizes)) == {"flash": us}


def test_the_table_is_in_the_package():
    text = resources.files("cuseq.attention").joinpath(_attention_table.PACKAGED).read_text()
    facts = _attention_table.FACTS
    for _, line in _attention_table.table_lines(text):
        assert tuple(line)[: len(facts)] == facts
        assert set(tuple(line)[len(facts) :]) <= {*NAMES, *_attention_table.PLACE}
