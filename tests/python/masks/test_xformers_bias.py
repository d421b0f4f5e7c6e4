"""Test xformers' block-diagonal biases against the installed package."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import reference
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import masked_attention
from test_attention import relative
from test_masks import attention_inputs
from test_no_sync import waits
from torch import Tensor

import cuseq
from cuseq import PackedLayout

PACKS = [
    ([2, 3], 6),
    ([2, 3], 5),
    ([7], 7),
    ([1] * 9, 12),
    ([0, 4, 0, 2], 6),
    ([0, 4, 0, 2, 0], 9),
    ([], 4),
]


@pytest.fixture
def biases():
    return pytest.importorskip("xformers.ops.fmha.attn_bias")


def segments(lengths: list[int], total_tokens: int) -> list[int]:
    """Return lengths in which the tail is one more segment."""
    tail = total_tokens - sum(lengths)
    return [*lengths, tail] if tail > 0 else list(lengths)


def theirs(biases, lengths: list[int], total_tokens: int, device, window: int | None):
    bias = biases.BlockDiagonalMask.from_seqlens(segments(lengths, total_tokens), device=device)
    return bias.make_causal() if window is None else bias.make_local_attention(window)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("first", ["shorter", "longer"])
def test_a_longer_row_has_a_bias_of_its_own(first, window, biases, device):
    rows = {"shorter": PackedLayout.from_lengths([2, 3], 5, device=device)}
    rows["longer"] = rows["shorter"].with_total_tokens(9)
    for name in sorted(rows, key=lambda name: name != first):
        total = rows[name].total_tokens
        bias = rows[name].xformers_bias(window=window)
        check_bias(bias, biases, [2, 3], total, device, window)
        assert rows[name].xformers_bias(window=window) is bias


def check_bias(bias, biases, lengths, total_tokens, device, window) -> None:
    expected = theirs(biases, lengths, total_tokens, device, window)
    assert type(bias) is type(expected)
    assert bias._batch_sizes is None
    assert bias.k_seqinfo is bias.q_seqinfo  # split() requires it
    ours, info = bias.q_seqinfo, expected.q_seqinfo
    assert type(ours) is type(info)
    assert type(ours.seqstart_py) is list
    assert ours.seqstart_py == info.seqstart_py
    for name in ("max_seqlen", "min_seqlen"):
        assert type(getattr(ours, name)) is int
        assert (name, getattr(ours, name)) == (name, getattr(info, name))
    assert (ours.seqstart.dtype, ours.seqstart.device) == (torch.int32, device)
    assert torch.equal(ours.seqstart, info.seqstart)
    if window is not None:
        assert bias._window_size == window


def materialized(bias, total_tokens: int) -> Tensor:
    return bias.materialize((total_tokens, total_tokens))


@pytest.mark.parametrize("lengths,total_tokens", PACKS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_equal_to_from_seqlens(lengths, total_tokens, window, device, biases):
    packed = PackedLayout.from_lengths(lengths, total_tokens, device=device)
    bias = packed.xformers_bias(window=window)
    check_bias(bias, biases, lengths, total_tokens, device, window)
    expected = theirs(biases, lengths, total_tokens, device, window)
    assert torch.equal(materialized(bias, total_tokens), materialized(expected, total_tokens))


def test_fields_of_the_literal_case(device, biases):
    bias = PackedLayout.from_lengths([2, 3], 6, device=device).xformers_bias()
    assert type(bias) is biases.BlockDiagonalCausalMask
    info = bias.q_seqinfo
    assert (info.seqstart_py, info.max_seqlen, info.min_seqlen) == ([0, 2, 5, 6], 3, 1)
    assert info.seqstart.tolist() == [0, 2, 5, 6]
    local = PackedLayout.from_lengths([2, 3], 6, device=device).xformers_bias(window=2)
    assert type(local) is biases.BlockDiagonalCausalLocalAttentionMask
    assert local._window_size == 2


@given(
    lengths=st.lists(st.integers(0, 12), max_size=8),
    tail=st.integers(0, 4),
    window=st.none() | st.integers(1, 15),
)
def test_equal_to_the_dense_mask_on_real_tokens(lengths, tail, window, biases):
    total, real = sum(lengths) + tail, sum(lengths)
    assume(total > 0)  # xformers has no bias for zero tokens
    packed = PackedLayout.from_lengths(lengths, total, max_seqs=30)
    bias = materialized(packed.xformers_bias(window=window), total)
    dense = packed.dense_mask(torch.float32, window=window)[0, 0]
    assert torch.equal(bias[:real], dense[:real])
    assert torch.equal(bias[:, :real], dense[:, :real])
    # The tail is a segment of its own: causal, and separate from the rest.
    last = reference.mask(segments(lengths, total), total, window=window)
    assert torch.equal(bias == 0, last)


def test_split_gives_the_sequences_back(device, biases):
    bias = PackedLayout.from_lengths([2, 3], 6, device=device).xformers_bias()
    rows = torch.arange(6, device=device).view(1, 6)
    assert [part.tolist() for part in bias.split(rows)] == [[[0, 1]], [[2, 3, 4]], [[5]]]


def test_other_ways_to_a_layout(device, biases):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], device=device)
    ids = torch.tensor([0, 1, 0, 1, 2, 0], device=device)
    for packed, lengths in (
        (PackedLayout.from_cu_seqlens([0, 2, 5], 6, device=device), [2, 3]),
        (PackedLayout.from_padding_mask(mask, total_tokens=6), [2, 3]),
        (PackedLayout.from_position_ids(ids), [2, 3, 1]),
        (PackedLayout.from_lengths([2, 3], 6).to(device), [2, 3]),
    ):
        check_bias(packed.xformers_bias(), biases, lengths, 6, device, None)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_is_at_least_one(window, device, biases):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    with pytest.raises(ValueError, match=rf"(?s)window.*{window}"):
        packed.xformers_bias(window=window)


def test_one_object_for_all_layers(device, biases, fresh_cache):
    packed = PackedLayout.from_lengths([2, 3], 6, device=device)
    bias, local = packed.xformers_bias(), packed.xformers_bias(window=2)
    assert bias is not local
    for _ in range(3):
        assert packed.xformers_bias() is bias
        assert packed.xformers_bias(window=2) is local
    gone = [weakref.ref(bias), weakref.ref(local)]
    del bias, local
    assert all(ref() is not None for ref in gone)
    del packed
    assert all(ref() is None for ref in gone)
    assert cuseq.cache.stats()["entries"] == 0


WITHOUT = """
import sys
sys.modules["xformers"] = None
import cuseq
packed = cuseq.PackedLayout.from_lengths([2, 3])
packed.dense_mask(), packed.block_mask()
try:
    packed.xformers_bias()
except ImportError as error:
    print(error)
"""


def test_a_missing_package_is_named(run_python):
    result = run_python(WITHOUT)
    assert "xformers" in result.stdout, result.stderr


IMPORTS = """
import sys, cuseq
packed = cuseq.PackedLayout.from_lengths([2, 3])
packed.dense_mask()
print([name for name in sys.modules if name.startswith("xformers")])
"""


def test_nothing_imports_it_unasked(run_python, biases):
    result = run_python(IMPORTS)
    assert result.stdout.strip() == "[]", result.stderr


# On the GPU.


def test_host_lengths_do_not_wait(cuda, biases, fresh_cache):
    def body():
        for packed in (
            PackedLayout.from_lengths([2, 3], 6).to(cuda),
            PackedLayout.from_lengths([2, 4], 6, device=cuda),
            PackedLayout.from_lengths([5, 0], 6).pin_memory().to(cuda),
        ):
            packed.xformers_bias(), packed.xformers_bias(window=2)

    assert waits(body) == Counter()


def test_device_lengths_wait_for_one_copy(cuda, biases, fresh_cache):
    lengths = torch.tensor([2, 0, 3], device=cuda)

    def body():
        packed = PackedLayout.from_lengths(lengths, 6)
        packed.xformers_bias(), packed.xformers_bias(window=2)

    assert waits(body) == {"cudaEventSynchronize": 1}
    packed = PackedLayout.from_lengths(lengths, 6)
    check_bias(packed.xformers_bias(), biases, [2, 0, 3], 6, cuda, None)


@pytest.mark.parametrize("lengths,total_tokens", [([70, 1, 129], 230), ([64, 64], 128)])
@pytest.mark.parametrize("window", [None, 1, 30])
def test_memory_efficient_attention(lengths, total_tokens, window, cuda, biases):
    from xformers.ops import memory_efficient_attention

    bias = PackedLayout.from_lengths(lengths, total_tokens, device=cuda).xformers_bias(
        window=window
    )
    tensors = attention_inputs((1, total_tokens, 2, 64), cuda, torch.bfloat16)
    try:
        out = memory_efficient_attention(*tensors, attn_bias=bias)
    except NotImplementedError as error:
        pytest.skip(f"none of xformers' operators runs here: {error}")
    exact = [t.detach()[0].double().requires_grad_() for t in tensors]
    cells = reference.mask(segments(lengths, total_tokens), total_tokens, window=window)
    expected = masked_attention(*exact, cells.to(cuda))
    assert relative(out[0], expected, expected) <= 6e-3
    grad = torch.sin(torch.arange(out.numel(), device=cuda)).view(out.shape)
    grads = torch.autograd.grad(out, tensors, grad.to(out.dtype))
    wanted = torch.autograd.grad(expected, exact, grad[0].double())
    for ours, right in zip(grads, wanted, strict=True):
        assert relative(ours[0], right, grad) <= 2e-2


def test_a_window_below_one_is_refused_when_the_bias_is_there_too(biases):
    packed = PackedLayout.from_lengths([2, 3])
    packed.xformers_bias()
    with pytest.raises(ValueError, match="window must be None or at least 1"):
        packed.xformers_bias(window=0)


def test_a_release_that_names_its_fields_otherwise_is_refused(biases, monkeypatch):
    monkeypatch.delattr(biases, "_SeqLenInfo")
    with pytest.raises(ValueError, match="does not know this xformers .*_SeqLenInfo is missing"):
        PackedLayout.from_lengths([2, 3]).xformers_bias()
