"""Test cuseq's unsloth functions against unsloth's packing.py and against the real package.

CUSEQ_TEST_UNSLOTH=1 make test fetches both; CUSEQ_UNSLOTH is their folder, if not the default. The
real package runs in a process of its own: run as a script, this file is that process, and writes
the result of each check in REAL.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import cuseq
from cuseq._base.foreign import UnknownRelease
from cuseq.integrations import unsloth as integration
from cuseq.integrations.unsloth import _attention as attention
from cuseq.integrations.unsloth._enable import enable_trainer

VERSION = "2026.10.9"
FOLDER = Path(
    os.environ.get("CUSEQ_UNSLOTH")
    or Path(__file__).parents[3] / "build" / "oracles" / f"unsloth-{VERSION}"
)
NAMES = [
    "get_packed_info_from_kwargs",
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "mask_packed_sequence_boundaries",
    "mask_packed_boundary_labels",
    "fast_rope_embedding",
    "fast_qk_norm_rope",
]
LENGTHS = [5, 1, 9, 3]
WRAPPED = [
    "_run_attention",
    "clear_packed_caches",
    "enable_sample_packing",
    "enable_padding_free_metadata",
]
# None and non-positive windows mean no window.
WINDOWS = [None, 0, -1, 1, 3, 100]


def fetched(path: str) -> Path:
    if not (FOLDER / path).exists():
        pytest.skip(f"{path} is not in {FOLDER}: CUSEQ_TEST_UNSLOTH=1 make test fetches it")
    return FOLDER / path


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    path = fetched("unsloth/utils/packing.py")
    spec = importlib.util.spec_from_file_location("unsloth_packing_oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def biases() -> ModuleType:
    return pytest.importorskip("xformers.ops.fmha.attn_bias")


@st.composite
def packs(draw) -> list[int]:
    """Draw lengths of 1 to 12 documents; the first is not empty."""
    length = st.integers(1, 20)
    return [draw(length), *draw(st.lists(length | st.just(0), max_size=11))]


# A tail shorter than 0 means no tail.
tails = st.sampled_from([None, -1, 0, 1, 7])
windows = st.sampled_from(WINDOWS)


def int_lengths(lengths: list[int], device="cpu", dtype=torch.int32) -> Tensor:
    return torch.tensor(lengths, dtype=dtype, device=device)


def info_of(lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    return integration.get_packed_info_from_kwargs(
        {"packed_seq_lengths": lengths, "use_cache": False}, lengths.device
    )


def total_of(lengths: list[int], tail: int | None) -> int | None:
    return None if tail is None else sum(lengths) + tail


def segments_of(lengths: list[int], tail: int | None) -> list[int]:
    return [*lengths, tail] if tail and tail > 0 else lengths


def check_same_info(actual, expected) -> None:
    assert isinstance(actual, tuple) and len(actual) == 3
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        assert torch.equal(ours, theirs)
    assert type(actual[2]) is int and actual[2] == expected[2]


def check_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert torch.equal(actual, expected)


# ------------------------------------------------------------------------------------ packed info


def test_packed_info_of_the_literal_case(device):
    lengths, cu_seqlens, longest = info_of(int_lengths([2, 3], device))
    check_same_bits(lengths, int_lengths([2, 3], device))
    check_same_bits(cu_seqlens, int_lengths([0, 2, 5], device))
    assert longest == 3


@given(
    lengths=packs(),
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
    on_host=st.booleans(),
)
def test_packed_info_is_theirs(lengths, dtype, on_host, oracle, device):
    tensor = int_lengths(lengths, "cpu" if on_host else device, dtype)
    kwargs = {"packed_seq_lengths": tensor, "position_ids": None}
    actual = integration.get_packed_info_from_kwargs(kwargs, device)
    check_same_info(actual, oracle.get_packed_info_from_kwargs(kwargs, device))


@given(lengths=packs().filter(lambda pack: 0 not in pack), rows=st.sampled_from([1, 1, 2]))
def test_packed_info_of_positions_is_theirs(lengths, rows, oracle, device):
    positions = torch.tensor([reference.position_ids(lengths, sum(lengths))] * rows, device=device)
    actual = integration.get_packed_info_from_kwargs({}, device, positions)
    expected = oracle.get_packed_info_from_kwargs({}, device, positions)
    if expected is None:
        assert actual is None
        assert rows > 1 or len(lengths) == 1
    else:
        check_same_info(actual, expected)


@pytest.mark.parametrize(
    "positions",
    [
        None,
        [[0, 1, 2, 3]],
        [[0]],
        [[3, 4, 0, 1]],  # the row does not begin with a document
        [[0, 1, 2, 7, 8]],  # a jump is not a restart
        [[0, 1, 2, 1, 2, 3]],  # nor is a drop, which padding and shared prefixes cause
        [[0, 1, 0, 1], [0, 1, 2, 3]],
        [0, 1, 0, 1],
        [[[0, 1, 0, 1]]] * 3,  # MRoPE planes
    ],
    ids=str,
)
def test_positions_that_are_no_packing(positions, oracle, device):
    positions = None if positions is None else torch.tensor(positions, device=device)
    for kwargs in ({}, {"packed_seq_lengths": None}):
        assert oracle.get_packed_info_from_kwargs(kwargs, device, positions) is None
        assert integration.get_packed_info_from_kwargs(kwargs, device, positions) is None


def test_lengths_win_over_positions_and_a_layout_over_both(device):
    lengths = int_lengths([2, 4], device)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    kwargs = {"packed_seq_lengths": lengths}
    info = integration.get_packed_info_from_kwargs(kwargs, device, positions)
    assert info[1].tolist() == [0, 2, 6]

    packed = cuseq.PackedLayout.from_lengths([2, 4], device=device)
    kwargs["packed"] = packed
    first = integration.get_packed_info_from_kwargs(kwargs, device, positions)
    expected = (int_lengths([2, 4], device), int_lengths([0, 2, 6], device), 4)
    check_same_info(first, expected)
    assert first[0] is packed.lengths
    again = integration.get_packed_info_from_kwargs({"packed": packed}, device)
    assert again[0] is first[0] and again[1] is first[1]


def test_a_layout_of_another_row_gives_way_to_lengths(device):
    """unsloth's token budget splits a batch's rows, but keys it does not know are not split."""
    packed = cuseq.PackedLayout.from_lengths([2, 3, 4], device=device)
    kwargs = {"packed": packed, "packed_seq_lengths": int_lengths([3, 4], device)}
    info = integration.get_packed_info_from_kwargs(kwargs, device)
    assert info[1].tolist() == [0, 3, 7]


PARTS = [[2], [2, 3], [3, 4], [4]]
CONTRADICTIONS = [[2, 4, 3], [2, 3, 5], [2, 4], [5, 4], [1, 2], [2, 3, 4, 1], [2, 3, 4, 2, 3]]


@pytest.mark.parametrize("lengths", PARTS, ids=str)
def test_a_part_of_a_layout_is_its_lengths(lengths):
    packed = cuseq.PackedLayout.from_lengths([2, 3, 4], 12)
    kwargs = {"packed": packed, "packed_seq_lengths": int_lengths(lengths)}
    for _ in range(2):
        info = integration.get_packed_info_from_kwargs(kwargs, "cpu")
        assert info[0].tolist() == lengths


@pytest.mark.parametrize("lengths", CONTRADICTIONS, ids=str)
def test_lengths_that_contradict_a_layout_are_refused(lengths):
    packed = cuseq.PackedLayout.from_lengths([2, 3, 4], 12)
    kwargs = {"packed": packed, "packed_seq_lengths": int_lengths(lengths)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"packed_seq_lengths must be the .* \[2, 3, 4\]"):
            integration.get_packed_info_from_kwargs(kwargs, "cpu")


def test_lengths_edited_beside_their_layout_are_refused():
    lengths = int_lengths([2, 3, 4])
    kwargs = {"packed": cuseq.PackedLayout.from_lengths(lengths), "packed_seq_lengths": lengths}
    integration.get_packed_info_from_kwargs(kwargs, "cpu")
    lengths[0] = 1
    with pytest.raises(ValueError, match="packed_seq_lengths"):
        integration.get_packed_info_from_kwargs(kwargs, "cpu")


def test_a_layout_does_not_outlive_its_comparison():
    lengths = int_lengths([2, 3])
    packed = cuseq.PackedLayout.from_lengths([2, 3])
    kwargs = {"packed": packed, "packed_seq_lengths": lengths}
    integration.get_packed_info_from_kwargs(kwargs, "cpu")
    gone = weakref.ref(packed)
    del packed, kwargs
    gc.collect()
    assert gone() is None


def test_a_layout_must_be_one():
    with pytest.raises(TypeError, match="packed must be a PackedLayout, got dict"):
        integration.get_packed_info_from_kwargs({"packed": {}}, torch.device("cpu"))


def test_importing_the_integration_imports_and_enables_nothing():
    assert "unsloth" not in sys.modules
    assert integration._state.current() is None
    assert not {"enable", "disable"} & set(vars(integration))


def test_a_module_that_is_not_the_known_unsloth_is_refused():
    with pytest.raises(UnknownRelease, match=r"this unsloth .* unsloth\.utils\.packing is missing"):
        cuseq.enable(ModuleType("unsloth"))
    assert integration._state.current() is None
    cuseq.disable(ModuleType("unsloth"))  # nothing to do


# ----------------------------------------------------------------------------------------- errors


def packed_info(**kwargs: Any) -> Any:
    return integration.get_packed_info_from_kwargs(kwargs, torch.device("cpu"))


def sdpa_mask(seq_info: Any = (torch.tensor([2, 4]),), **options: Any) -> Tensor:
    options = {"dtype": torch.float32, "device": "cpu"} | options
    return integration.build_sdpa_packed_attention_mask(seq_info, **options)


def rope(positions: Any, **changes: Any) -> Any:
    arguments = dict.fromkeys(["Q", "K"], torch.zeros(1, 2, 6, 8))
    arguments |= dict.fromkeys(["cos", "sin"], torch.zeros(9, 8)) | changes
    return integration.fast_rope_embedding(**arguments, rope_embedding_indices=positions)


def norm_rope(positions: Any) -> Any:
    norm, heads, table = nn.RMSNorm(8, eps=1e-6), torch.zeros(2, 6, 1, 8), torch.zeros(9, 8)
    return integration.fast_qk_norm_rope(norm, norm, heads, heads, table, table, positions)


def shifted(lengths: Any, labels: Any = None) -> Any:
    labels = torch.zeros(6, dtype=torch.int64) if labels is None else labels
    return integration.mask_packed_sequence_boundaries(labels, lengths)


def raw(lengths: Any) -> Any:
    return integration.mask_packed_boundary_labels(torch.zeros(6, dtype=torch.int64), lengths)


FIVE = torch.arange(5).unsqueeze(0)
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list of lengths": (
        lambda: packed_info(packed_seq_lengths=[2, 4]),
        TypeError,
        "packed_seq_lengths must be a tensor, got list",
    ),
    "float lengths": (
        lambda: packed_info(packed_seq_lengths=torch.tensor([2.0])),
        TypeError,
        "packed_seq_lengths must be integers, got torch.float32",
    ),
    "list of positions": (
        lambda: integration.get_packed_info_from_kwargs({}, "cpu", [[0, 1]]),
        TypeError,
        "position_ids must be a tensor, got list",
    ),
    "no info": (lambda: sdpa_mask(None), TypeError, "seq_info must be a tuple .* got NoneType"),
    "info of lists": (lambda: sdpa_mask(([2, 4],)), TypeError, r"seq_info\[0\] must be a tensor"),
    "window of SDPA": (
        lambda: sdpa_mask(sliding_window=2.5),
        TypeError,
        "sliding_window must be an int, got 2.5",
    ),
    "window of xformers": (
        lambda: integration.build_xformers_block_causal_mask(None, sliding_window="3"),
        TypeError,
        "sliding_window must be an int, got '3'",
    ),
    "total": (lambda: sdpa_mask(total_tokens=7.5), TypeError, "total_tokens must be an int"),
    "five indices for six tokens": (
        lambda: rope(FIVE),
        ValueError,
        r"rope_embedding_indices must hold 6 positions .* shape \(1, 5\)",
    ),
    "five positions": (
        lambda: norm_rope(FIVE),
        ValueError,
        r"position_ids must hold 6 positions for all rows, or 2 times 6, got shape \(1, 5\)",
    ),
    "float indices": (
        lambda: rope(torch.zeros(1, 6)),
        TypeError,
        "rope_embedding_indices must be integers, got torch.float32",
    ),
    "list of indices": (
        lambda: rope([0, 1, 2, 3, 4, 5]),
        TypeError,
        "rope_embedding_indices must be a tensor, got list",
    ),
    "three dimensions": (
        lambda: rope(None, Q=torch.zeros(2, 6, 8)),
        ValueError,
        r"Q must have 4 dimensions, got shape \(2, 6, 8\)",
    ),
    "scalar table": (lambda: rope(None, cos=torch.tensor(1.0)), ValueError, "cos must be a table"),
    "labels that no view reaches": (
        lambda: shifted([2, 4], torch.zeros(2, 3).t()),
        ValueError,
        r"shift_labels must be contiguous, .* shape \(3, 2\) with strides \(1, 3\)",
    ),
    "list of labels": (lambda: shifted([2], [1, 2]), TypeError, "shift_labels must be a tensor"),
    "fractions": (lambda: shifted([2.5]), TypeError, "seq_lengths must be integers, got .*float"),
    "ragged lengths": (lambda: raw([[1, 2], [3]]), TypeError, "seq_lengths must be integers"),
    "words": (lambda: raw(["a"]), TypeError, "seq_lengths must be integers"),
    "65 bits": (lambda: raw([2**64]), TypeError, "seq_lengths must be integers of 64 bits"),
    "sparse lengths": (
        lambda: raw(torch.tensor([2, 4]).to_sparse()),
        TypeError,
        "seq_lengths must be a dense tensor",
    ),
    "ignored word": (
        lambda: integration.mask_packed_boundary_labels(torch.arange(6), [2], ignore_index="a"),
        TypeError,
        "ignore_index must be an int, got 'a'",
    ),
    "direction": (lambda: sdpa_mask(is_causal=None), TypeError, "is_causal must be True or False"),
    "norm": (
        lambda: integration.fast_qk_norm_rope(
            None, None, *[torch.zeros(1, 6, 2, 8)] * 2, *[torch.zeros(9, 8)] * 2
        ),
        TypeError,
        "q_norm.weight must be a tensor, got NoneType",
    ),
    "negative": (lambda: shifted([-1]), ValueError, "lengths must not be negative"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    function, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        function()


# ------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@given(lengths=packs(), tail=tails, window=windows, causal=st.booleans())
def test_masks_are_theirs(dtype, lengths, tail, window, causal, oracle, device):
    options = dict(
        dtype=dtype,
        device=device,
        sliding_window=window,
        total_tokens=total_of(lengths, tail),
        is_causal=causal,
    )
    info = info_of(int_lengths(lengths, device))
    mask = integration.build_sdpa_packed_attention_mask(info, **options)
    check_same_bits(mask, oracle.build_sdpa_packed_attention_mask(info, **options))


@given(lengths=packs(), tail=tails, window=windows, causal=st.booleans())
def test_masks_show_a_token_what_it_may_see(lengths, tail, window, causal, device):
    mask = integration.build_sdpa_packed_attention_mask(
        info_of(int_lengths(lengths, device)),
        dtype=torch.float32,
        device=device,
        sliding_window=window,
        total_tokens=total_of(lengths, tail),
        is_causal=causal,
    )
    segments = segments_of(lengths, tail)
    segment = torch.tensor(reference.seq_ids(segments, sum(segments)))
    back = torch.arange(sum(segments))[:, None] - torch.arange(sum(segments))[None]
    visible = segment[:, None] == segment[None]
    if causal:
        visible &= back >= 0
    if window is not None and window > 0:
        visible &= back < window  # also with windows where a token sees later tokens
    assert mask.shape == (1, 1, *visible.shape)
    assert torch.equal((mask == 0)[0, 0].cpu(), visible)
    assert torch.equal((mask == -torch.inf)[0, 0].cpu(), ~visible)


def test_masks_of_information_that_unsloth_made(oracle, device):
    info = oracle.get_packed_info_from_kwargs(
        {"packed_seq_lengths": int_lengths(LENGTHS, device)}, device
    )
    options = dict(dtype=torch.float32, device=device, sliding_window=3, total_tokens=20)
    mask = integration.build_sdpa_packed_attention_mask(info, **options)
    check_same_bits(mask, oracle.build_sdpa_packed_attention_mask(info, **options))


@given(lengths=packs(), tail=tails, window=windows, causal=st.booleans())
def test_biases_are_theirs(lengths, tail, window, causal, oracle, biases, device):
    options = dict(sliding_window=window, total_tokens=total_of(lengths, tail), is_causal=causal)
    info = info_of(int_lengths(lengths, device))
    actual = integration.build_xformers_block_causal_mask(info, **options)
    expected = oracle.build_xformers_block_causal_mask(info, **options)
    assert type(actual) is type(expected)
    assert getattr(actual, "_window_size", None) == getattr(expected, "_window_size", None)
    for side in ("q_seqinfo", "k_seqinfo"):
        ours, theirs = getattr(actual, side), getattr(expected, side)
        check_same_bits(ours.seqstart, theirs.seqstart)
        for name in ("seqstart_py", "max_seqlen", "min_seqlen"):
            assert (name, getattr(ours, name)) == (name, getattr(theirs, name))
    square = (sum(segments_of(lengths, tail)),) * 2
    assert torch.equal(actual.materialize(square), expected.materialize(square))


@pytest.mark.parametrize("window", [None, 0, 2])
def test_without_information_the_base_mask_stays(window, oracle, biases):
    build = integration.build_xformers_block_causal_mask
    base = biases.BlockDiagonalCausalMask.from_seqlens(LENGTHS)
    actual = build(None, sliding_window=window, base_mask=base)
    expected = oracle.build_xformers_block_causal_mask(None, sliding_window=window, base_mask=base)
    assert (actual is base) == (expected is base)
    assert type(actual) is type(expected)
    assert torch.equal(actual.materialize((18, 18)), expected.materialize((18, 18)))
    assert build(None, sliding_window=window) is None
    nothing_local = object()
    assert build(None, sliding_window=window, base_mask=nothing_local) is nothing_local


def test_no_bias_for_no_documents(oracle, biases):
    info = (int_lengths([]), int_lengths([0]), 0)
    assert oracle.build_xformers_block_causal_mask(info) is None
    assert integration.build_xformers_block_causal_mask(info) is None


# ----------------------------------------------------------------------------------------- labels

IGNORED = st.sampled_from([-100, -1, 7])
FORMS: dict[str, Callable[[list[int], torch.device], Any]] = {
    "list": lambda lengths, device: lengths,
    "tuple": lambda lengths, device: tuple(lengths),
    "int32": int_lengths,
    "int64": lambda lengths, device: int_lengths(lengths, device, torch.int64),
    "int16": lambda lengths, device: int_lengths(lengths, device, torch.int16),
    "on host": lambda lengths, device: int_lengths(lengths),
    "[1, n]": lambda lengths, device: int_lengths(lengths, device).unsqueeze(0),
    "nested": lambda lengths, device: [lengths],
}


@st.composite
def labelled(draw) -> tuple[list[int], Tensor]:
    """Draw lengths and labels `[n]`, `[1, n]` or `[2, n]`, perhaps of another token count."""
    lengths = draw(packs())
    tokens = max(0, sum(lengths) + draw(st.sampled_from([0, 0, 0, -1, -4, 1, 5])))
    labels = 10 + torch.arange(tokens)
    rows = draw(st.sampled_from([0, 1, 2]))
    return lengths, labels.view(rows, -1) if tokens and rows and tokens % rows == 0 else labels


@pytest.mark.parametrize("form", FORMS)
@given(drawn=labelled(), ignored=IGNORED)
def test_boundaries_are_theirs(form, drawn, ignored, oracle, device):
    lengths = FORMS[form](drawn[0], device)
    ours, theirs = (drawn[1].to(device, copy=True) for _ in range(2))
    marked = integration.mask_packed_sequence_boundaries(ours, lengths, ignore_index=ignored)
    expected = oracle.mask_packed_sequence_boundaries(theirs, lengths, ignore_index=ignored)
    assert marked is expected
    check_same_bits(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@given(drawn=labelled(), ignored=IGNORED)
def test_raw_labels_are_theirs(form, drawn, ignored, oracle, device):
    lengths, labels = FORMS[form](drawn[0], device), drawn[1].to(device, copy=True)
    actual = integration.mask_packed_boundary_labels(labels, lengths, ignore_index=ignored)
    expected = oracle.mask_packed_boundary_labels(labels, lengths, ignore_index=ignored)
    check_same_bits(actual, expected)
    check_same_bits(labels, drawn[1].to(device))  # the caller's labels are not written to


@given(lengths=packs(), tail=st.sampled_from([0, 3]))
def test_both_ways_of_masking_mark_the_same_targets(lengths, tail, device):
    labels = 10 + torch.arange(sum(lengths) + tail, device=device).unsqueeze(0)
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    tensor = int_lengths(lengths, device)
    assert integration.mask_packed_sequence_boundaries(shifted, tensor)
    raw = integration.mask_packed_boundary_labels(labels, tensor)
    assert torch.equal(raw[:, 1:], shifted[:, :-1])


def test_a_first_document_without_tokens_marks_nothing(oracle):
    labels, theirs = torch.arange(7), torch.arange(7)
    assert integration.mask_packed_sequence_boundaries(labels, [0, 2, 3])
    assert labels.tolist() == [0, -100, 2, 3, -100, 5, 6]
    oracle.mask_packed_sequence_boundaries(theirs, [0, 2, 3])
    assert theirs[-1] == -100  # offset 0 gives index -1, the last token of the row


def test_labels_that_no_view_reaches():
    labels = torch.arange(12)[::2]
    assert integration.mask_packed_sequence_boundaries(labels, [2, 4])
    assert labels.tolist() == [0, -100, 4, 6, 8, -100]
    # Reshaping would write to a copy, as unsloth's code does; test_a_mistake_is_named tests the
    # error.


@pytest.mark.parametrize("lengths", [None, [], torch.tensor([], dtype=torch.int32)], ids=str)
def test_without_lengths_labels_stay(lengths, oracle):
    labels = torch.arange(4)
    for module in (integration, oracle):
        assert module.mask_packed_boundary_labels(labels, lengths) is labels
        assert module.mask_packed_sequence_boundaries(labels, lengths) is False
        assert module.mask_packed_boundary_labels(None, [2, 2]) is None
    assert labels.tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------ remembering


def mask_of(info, window: int | None = None, total: int | None = None) -> Tensor:
    return integration.build_sdpa_packed_attention_mask(
        info,
        dtype=torch.float32,
        device=info[0].device,
        sliding_window=window,
        total_tokens=total,
    )


def answers(lengths: Tensor) -> list:
    """Return everything that is cached for a tensor of lengths."""
    info = info_of(lengths)
    return [*info[:2], mask_of(info), mask_of(info, 2), mask_of(info, None, 40)]


def check_same_objects(actual: list, expected: list) -> None:
    assert [id(x) for x in actual] == [id(x) for x in expected]


def test_the_same_tensor_gives_the_same_objects(device):
    lengths = int_lengths(LENGTHS, device)
    first = answers(lengths)
    check_same_objects(answers(lengths), first)
    other = int_lengths(LENGTHS, device)
    assert not {id(x) for x in answers(other)} & {id(x) for x in first}


def test_many_tensors_keep_their_objects(device):
    tensors = [int_lengths([n, 2, n + 1], device) for n in range(1, 9)]
    first = [answers(lengths) for lengths in tensors]
    for _ in range(2):
        for lengths, expected in zip(tensors, first, strict=True):
            check_same_objects(answers(lengths), expected)


def test_biases_are_remembered(biases, device):
    tensors = [int_lengths(LENGTHS, device), int_lengths([4, 4], device)]

    def build() -> list:
        return [
            integration.build_xformers_block_causal_mask(info_of(lengths), sliding_window=window)
            for lengths in tensors
            for window in (None, 2)
        ]

    check_same_objects(build(), build())


OPTIONS = [
    {},
    {"sliding_window": 2},
    {"sliding_window": 3},
    {"total_tokens": 20},
    {"total_tokens": 21},
    {"is_causal": False},
]


def test_what_is_remembered_is_so_for_its_options(oracle, device):
    """One tensor of lengths, used with many options, each twice."""
    info = info_of(int_lengths(LENGTHS, device))
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for options in OPTIONS:
                options = options | {"dtype": dtype, "device": device}
                mask = integration.build_sdpa_packed_attention_mask(info, **options)
                check_same_bits(mask, oracle.build_sdpa_packed_attention_mask(info, **options))


def test_biases_are_remembered_for_their_options(oracle, biases, device):
    info = info_of(int_lengths(LENGTHS, device))
    for _ in range(2):
        for options in OPTIONS:
            actual = integration.build_xformers_block_causal_mask(info, **options)
            expected = oracle.build_xformers_block_causal_mask(info, **options)
            square = (options.get("total_tokens", sum(LENGTHS)),) * 2
            assert torch.equal(actual.materialize(square), expected.materialize(square))


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda lengths: lengths[0].add_(1),
    "copy": lambda lengths: lengths.copy_(torch.tensor([1, 8, 1, 8])),
    "item": lambda lengths: lengths.__setitem__(2, 0),
    "view": lambda lengths: lengths.view(2, 2)[1].mul_(2),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_in_place_gives_a_new_answer_where_theirs_is_stale(edit, dtype, oracle, device):
    lengths = int_lengths(LENGTHS, device, dtype)
    kwargs = {"packed_seq_lengths": lengths}
    before = oracle.get_packed_info_from_kwargs(kwargs, device)
    offsets = before[1].tolist()
    info_of(lengths)
    EDITS[edit](lengths)

    right = reference.cu_seqlens(lengths.tolist())
    assert right != offsets
    stale = oracle.get_packed_info_from_kwargs(kwargs, device)
    assert stale[1].tolist() == offsets  # the reason for the version counter
    fresh = info_of(lengths)
    assert fresh[0].tolist() == lengths.tolist()
    assert fresh[1].tolist() == right
    assert fresh[2] == max(lengths.tolist())
    assert info_of(lengths)[1] is fresh[1]


def test_a_copy_does_not_bring_along_what_was_remembered(device):
    """A copy has its own version counter, which may reach the version of the original."""
    for duplicate in (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))):
        for edits in range(1, 5):
            lengths = int_lengths(LENGTHS, device)
            for _ in range(3):
                lengths += 1
            info_of(lengths)
            other = duplicate(lengths)
            for _ in range(edits):
                other += 10
            assert info_of(other)[0].tolist() == other.tolist()


def test_other_data_of_the_same_tensor(device):
    """Assigning `.data` does not change the version."""
    lengths = int_lengths(LENGTHS, device)
    info_of(lengths)
    lengths.data = int_lengths([7, 7], device)
    assert info_of(lengths)[1].tolist() == [0, 7, 14]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_part_of_the_data_of_the_same_tensor(dtype, device):
    """Assigning part of `.data` changes neither the version nor the address."""
    lengths = int_lengths(LENGTHS, device, dtype)
    info_of(lengths)
    lengths.data = lengths.data[:2]
    assert info_of(lengths)[1].tolist() == [0, 5, 6]
    lengths = int_lengths(LENGTHS, device, dtype)
    info_of(lengths)
    lengths.data = lengths.data[::2]
    assert info_of(lengths)[1].tolist() == [0, 5, 14]


def test_what_was_asked_about_can_be_saved_and_copied(device, tmp_path):
    lengths = int_lengths(LENGTHS, device)
    info = info_of(lengths)
    torch.save(lengths, tmp_path / "lengths.pt")
    assert torch.equal(torch.load(tmp_path / "lengths.pt", weights_only=True), lengths)
    assert b"cuseq" not in pickle.dumps(lengths)
    for duplicate in (copy.copy, copy.deepcopy):
        check_same_info(duplicate(info), info)


@pytest.mark.parametrize("edit", EDITS)
def test_masks_follow_an_edit(edit, oracle, device):
    lengths = int_lengths(LENGTHS, device)
    # Once with the same tensor, and once with what was made from it.
    by_hand = (lengths, None, None)
    mask_of(by_hand)
    mask_of(info_of(lengths))
    EDITS[edit](lengths)
    expected = oracle.build_sdpa_packed_attention_mask(
        (lengths.clone(), None, None), dtype=torch.float32, device=device
    )
    check_same_bits(mask_of(by_hand), expected)
    check_same_bits(mask_of(info_of(lengths)), expected)


@pytest.mark.parametrize("edit", EDITS)
def test_biases_follow_an_edit(edit, biases, device):
    lengths = int_lengths(LENGTHS, device)
    by_hand = (lengths, None, None)
    integration.build_xformers_block_causal_mask(by_hand)
    EDITS[edit](lengths)
    bias = integration.build_xformers_block_causal_mask(by_hand)
    assert bias.q_seqinfo.seqstart_py == reference.cu_seqlens(lengths.tolist())


def test_nothing_outlives_the_lengths(device):
    lengths = int_lengths(LENGTHS, device)
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, device=device)
    made = answers(lengths)
    made += integration.get_packed_info_from_kwargs({"packed": packed}, device)[:2]
    dead = [weakref.ref(x) for x in (lengths, packed, *made)]
    del lengths, packed, made
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


def test_what_inference_mode_made_can_be_trained_with(device):
    lengths = int_lengths(LENGTHS, device)
    with torch.inference_mode():
        answers(lengths)
    made = answers(lengths)
    assert made[1].tolist() == [0, 5, 6, 15, 18]
    assert not any(x.is_inference() for x in made)
    weight = torch.ones((), device=device, requires_grad=True)
    # saves the mask for backward, which is an error for an inference tensor
    (weight * made[2]).sum().backward()


def test_lengths_of_inference_mode(device):
    """Inference tensors have no version counter."""
    with torch.inference_mode():
        lengths = int_lengths(LENGTHS, device)
        assert info_of(lengths)[1].tolist() == [0, 5, 6, 15, 18]
        mask_of(info_of(lengths))
        lengths[0] += 1
        assert info_of(lengths)[1].tolist() == [0, 6, 7, 16, 19]
        assert mask_of(info_of(lengths)).shape == (1, 1, 19, 19)
    assert info_of(lengths)[1].tolist() == [0, 6, 7, 16, 19]


# --------------------------------------------------------------------------------------- rotation

BATCH, TOKENS, HEADS, KEY_HEADS, DIM, POSITIONS = 2, 12, 4, 2, 16, 32


def positions_of(kind: str) -> Tensor | None:
    """Return packed positions, `[1, S]` for all rows or `[B, S]`; they restart."""
    rows = torch.tensor(
        [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 17, 18, 19, 3]]
    )
    return {"none": None, "[1, S]": rows[:1], "[B, S]": rows, "int32": rows.int()}[kind]


def tables(dtype: torch.dtype, device, leading: bool = False) -> tuple[Tensor, Tensor]:
    """Return tables `[positions, D]`, or with leading dimensions of 1."""
    angles = torch.arange(POSITIONS)[:, None] * 0.3 ** torch.arange(DIM // 2, dtype=torch.float64)
    angles = torch.cat([angles, angles], dim=1).to(device)
    angles = angles[None, None] if leading else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(count: int, dtype: torch.dtype, device) -> Tensor:
    """Return random heads `[B, S, heads, D]`."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(BATCH, TOKENS, count, DIM, generator=generator, dtype=torch.float64)
    return values.to(device, dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    """Rotate `[B, H, S, D]` by the formula; the second half rotates with the first."""
    cos, sin = cos.reshape(-1, DIM), sin.reshape(-1, DIM)
    at = (
        torch.arange(x.shape[2], device=x.device)[None]
        if positions is None
        else positions.to(x.device)
    )
    cos, sin = (table[at.long()][:, None] for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def check_with_gradients(run, plain, inputs: list[Tensor]) -> None:
    """Check values and gradients of `run` against `plain`, as close to float64 as plain's own."""

    def results(function, dtype: torch.dtype) -> list[Tensor]:
        wanted = [t.detach().to(dtype).requires_grad_() for t in inputs]
        outs = function(*wanted)
        generator = torch.Generator().manual_seed(9)
        grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in outs]
        grads = [g.to(t) for g, t in zip(grads, outs, strict=True)]
        return [t.detach() for t in (*outs, *torch.autograd.grad(outs, wanted, grads))]

    dtype = inputs[0].dtype
    actual, own, exact = results(run, dtype), results(plain, dtype), results(plain, torch.float64)
    for ours, theirs, expected in zip(actual, own, exact, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        size = float(expected.norm())
        error, plain_error = (float((t - expected).norm()) / size for t in (ours, theirs))
        assert error <= 2 * plain_error + 4 * torch.finfo(dtype).eps


ROTATIONS = dict(argvalues=["none", "[1, S]", "[B, S]", "int32"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("leading", [False, True], ids=["[P, D]", "[1, 1, P, D]"])
@pytest.mark.parametrize("kind", **ROTATIONS)
def test_rope(kind, leading, dtype, device):
    positions = positions_of(kind)
    positions = None if positions is None else positions.to(device)

    def run(q, k):  # views of [B, S, H, D], as models have them
        return integration.fast_rope_embedding(
            q.transpose(1, 2), k.transpose(1, 2), *tables(q.dtype, device, leading), positions
        )

    def plain(q, k):
        return [
            rotated(x.transpose(1, 2), *(t.to(x) for t in tables(dtype, device)), positions)
            for x in (q, k)
        ]

    inputs = [heads(HEADS, dtype, device), heads(KEY_HEADS, dtype, device)]
    check_with_gradients(run, plain, inputs)


def test_heads_of_different_dtypes(device):
    """Adapters on some projections cause different dtypes; each tensor is rotated separately."""
    q = torch.randn(1, 4, 5, 8, device=device)
    k = torch.randn(1, 2, 5, 8, device=device, dtype=torch.float64)
    angles = torch.randn(9, 4, device=device).repeat(1, 2)
    positions = torch.tensor([[0, 1, 2, 0, 1]])  # on the host
    arguments = (angles.cos(), angles.sin(), positions)
    turned = integration.fast_rope_embedding(q, k, *arguments)
    for heads, alone in zip(turned, (q, k), strict=True):
        assert torch.equal(heads, integration.fast_rope_embedding(alone, alone, *arguments)[0])
    norm = SimpleNamespace(weight=torch.ones(8, device=device), eps=1e-6)
    normed = integration.fast_qk_norm_rope(
        norm, norm, q.transpose(1, 2), k.transpose(1, 2), *arguments
    )
    for heads, alone in zip(normed, (q, k), strict=True):
        rows = alone.transpose(1, 2)
        expected = integration.fast_qk_norm_rope(norm, norm, rows, rows, *arguments)[0]
        assert torch.equal(heads, expected)


def test_rope_of_contiguous_heads_leaves_its_inputs(device):
    q, k = (heads(n, torch.float64, device).transpose(1, 2).contiguous() for n in (4, 2))
    kept = q.clone(), k.clone()
    cos, sin = tables(torch.float64, device)
    positions = positions_of("[B, S]").to(device)
    for x, out in zip(
        (q, k), integration.fast_rope_embedding(q, k, cos, sin, positions), strict=True
    ):
        assert_close(out, rotated(x, cos, sin, positions))
    assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", ["variance_epsilon", "eps"])
@pytest.mark.parametrize("kind", **ROTATIONS)
def test_qk_norm_rope(kind, name, trained, dtype, device):
    eps = 0.05  # large enough for an error to show if it is ignored
    positions = positions_of(kind)
    positions = None if positions is None else positions.to(device)
    generator = torch.Generator().manual_seed(4)
    weights = [1 + torch.randn(DIM, generator=generator, dtype=torch.float64) for _ in range(2)]
    weights = [w.to(device, dtype) for w in weights]

    def run(q, k, *trained_weights):
        # SimpleNamespace: the norm is never called, and a Parameter would be a separate leaf.
        norms = [SimpleNamespace(weight=w, **{name: eps}) for w in trained_weights or weights]
        return integration.fast_qk_norm_rope(*norms, q, k, *tables(q.dtype, device), positions)

    def plain(q, k, *trained_weights):
        return [
            rotated(
                normed(x, w.to(x), eps).transpose(1, 2),
                *(t.to(x) for t in tables(dtype, device)),
                positions,
            )
            for x, w in zip((q, k), trained_weights or weights, strict=True)
        ]

    inputs = [heads(HEADS, dtype, device), heads(KEY_HEADS, dtype, device)]
    check_with_gradients(run, plain, inputs + (weights if trained else []))


def test_norms_that_are_modules(device):
    cos, sin = tables(torch.float64, device, leading=True)
    q, k = heads(HEADS, torch.float64, device), heads(KEY_HEADS, torch.float64, device)
    norms = [nn.RMSNorm(DIM, eps=0.05, dtype=q.dtype, device=device) for _ in range(2)]
    norms[1].requires_grad_(False)
    outs = integration.fast_qk_norm_rope(*norms, q, k, cos, sin)
    for x, norm, out in zip((q, k), norms, outs, strict=True):
        assert_close(out, rotated(norm(x).transpose(1, 2), cos, sin, None))
    sum(out.square().sum() for out in outs).backward()
    assert norms[0].weight.grad is not None and norms[1].weight.grad is None


# ----------------------------------------------------------- the package, in a process of its own

REAL: dict[str, Callable[[], None]] = {}


def real(check: Callable[[], None]) -> Callable[[], None]:
    """Mark a check that runs in the process that imports unsloth."""
    REAL[check.__name__] = check
    return check


def enable(**options: Any) -> Any:
    import unsloth

    return cuseq.enable(unsloth, **options)


def disable() -> None:
    import unsloth

    cuseq.disable(unsloth)


@contextmanager
def enabled(*trainers: Any, **options: Any) -> Iterator[Any]:
    """Enable unsloth, and trainers made before, for the body."""
    result = enable(**options)
    try:
        for trainer in trainers:
            cuseq.enable(trainer)
        yield result
    finally:
        disable()


def bindings() -> dict[tuple[str, str], Any]:
    """Return the value of every name in every loaded module of unsloth."""
    return {
        (module, name): value
        for module, loaded in list(sys.modules.items())
        if module.split(".")[0] == "unsloth" and loaded is not None
        for name, value in list(vars(loaded).items())
    }


def check_same_bindings(actual: dict, expected: dict) -> None:
    changed = [key for key, value in expected.items() if actual.get(key) is not value]
    assert changed == [] and actual.keys() == expected.keys()


def own(name: str) -> Any:
    """Return unsloth's function of that name, from the module that defines it."""
    from unsloth.kernels import qk_norm_rope, rope_embedding
    from unsloth.utils import attention_dispatch, packing

    modules = {
        "fast_rope_embedding": rope_embedding,
        "fast_qk_norm_rope": qk_norm_rope,
        "_run_attention": attention_dispatch,
    }
    return modules.get(name, packing), name


@real
def check_every_name_is_rebound_and_comes_back():
    before = bindings()
    originals = {name: getattr(*own(name)) for name in [*NAMES, *WRAPPED]}
    with enabled():
        during = bindings()
    for name, original in originals.items():
        holders = [key for key, value in before.items() if value is original]
        assert own(name)[0].__name__ in {module for module, _ in holders}
        replacements = {id(during[key]): during[key] for key in holders}
        assert len(replacements) == 1, f"{name} has {len(replacements)} replacements"
        (replacement,) = replacements.values()
        assert replacement is not original
        if name in NAMES:
            assert replacement is getattr(integration, name), name
        assert not [key for key, value in during.items() if value is original]
    # Each family of models has a module that binds these by value.
    assert sum(value is originals["fast_rope_embedding"] for value in before.values()) > 5
    check_same_bindings(bindings(), before)


@real
def check_modules_that_are_imported_meanwhile_come_back_too():
    late = ModuleType("unsloth.models.late")
    original = getattr(*own("fast_rope_embedding"))
    try:
        with enabled():
            sys.modules[late.__name__] = late
            exec("from unsloth.kernels import fast_rope_embedding", vars(late))
            assert late.fast_rope_embedding is integration.fast_rope_embedding
        assert late.fast_rope_embedding is original
    finally:
        del sys.modules[late.__name__]


def check_raises(function: Callable[[], Any], *parts: str) -> None:
    before = bindings()
    with pytest.raises(ValueError) as caught:
        function()
    for part in parts:
        assert part in str(caught.value)
    check_same_bindings(bindings(), before)


@real
def check_twice_changes_nothing():
    disable()  # never enabled
    before = bindings()
    with enabled() as first:
        during = bindings()
        assert enable() is first and enable(compile_blocks=False) is first
        check_same_bindings(bindings(), during)
        check_raises(lambda: enable(compile_blocks=True), "compile_blocks", "disable")
    check_same_bindings(bindings(), before)
    disable()
    check_same_bindings(bindings(), before)
    with enabled(compile_blocks=True) as again:  # and it can be enabled again
        assert again is not first
        assert getattr(*own("fast_rope_embedding")) is integration.fast_rope_embedding


@real
def check_the_result_names_what_was_replaced():
    with enabled() as result:
        assert result.kind == "unsloth"
        assert {one.partition(":")[2] for one in result.replaced} == {
            *NAMES,
            *WRAPPED,
            "_cached_host_lengths",
        }
        assert "attention:_run_attention" in result.replaced
        assert "rope:fast_rope_embedding" in result.replaced
        assert "qk_norm:fast_qk_norm_rope" in result.replaced
        assert any("compile_blocks" in one for one in result.left_alone)
        assert result.warnings == ()
    with enabled(compile_blocks=True) as result:
        assert "blocks:_wrap" in result.replaced
        assert not any("compile_blocks" in one for one in result.left_alone)
    torch.use_deterministic_algorithms(True)
    try:
        with enabled() as result:
            assert any("deterministic" in one for one in result.warnings)
    finally:
        torch.use_deterministic_algorithms(False)


@real
def check_clearing_unsloths_caches_clears_ours():
    from unsloth.utils import packing

    before = packing.clear_packed_caches
    lengths = int_lengths(LENGTHS)
    with enabled():
        gone = [weakref.ref(made) for made in answers(lengths)]
        gc.collect()
        assert all(made() is not None for made in gone)
        packing.clear_packed_caches()
        gc.collect()
        assert [made() for made in gone] == [None] * len(gone)
        captured = packing.clear_packed_caches
    assert packing.clear_packed_caches is before
    kept = answers(lengths)
    captured()  # behaves as unsloth's does
    check_same_objects(answers(lengths), kept)


@real
def check_another_signature_is_refused_by_name():
    for name in [*NAMES, *WRAPPED]:
        module, _ = own(name)
        original = getattr(module, name)
        try:
            setattr(module, name, lambda query, *, brand_new: None)
            check_raises(enable, name)
            parameters = list(inspect.signature(original).parameters.values())
            last = inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY)
            if parameters:
                last = parameters.pop().replace(default="another")
            changed = inspect.Signature([*parameters, last])
            setattr(module, name, lambda *args, **kwargs: None)
            getattr(module, name).__signature__ = changed
            check_raises(enable, name)
            delattr(module, name)
            check_raises(enable, name)
        finally:
            setattr(module, name, original)
    with enabled():
        pass


@real
def check_what_attention_is_told_is_looked_at():
    from unsloth.utils import attention_dispatch

    for name, field in (("AttentionConfig", "sdpa_kwargs"), ("AttentionContext", "seq_info")):
        original = getattr(attention_dispatch, name)
        fields = [f.name for f in dataclasses.fields(original) if f.name != field]
        try:
            setattr(attention_dispatch, name, dataclasses.make_dataclass(name, fields))
            check_raises(enable, name, field)
        finally:
            setattr(attention_dispatch, name, original)
        try:  # a new field might request something that cuseq does not do
            setattr(
                attention_dispatch,
                name,
                dataclasses.make_dataclass(name, [*fields, field, "sinks"]),
            )
            check_raises(enable, name, "sinks")
        finally:
            setattr(attention_dispatch, name, original)


def compiled_block(module: str = "unsloth.models.test") -> type[nn.Module]:
    """Return a decoder layer that unsloth compiles itself; it returns its keywords."""
    from unsloth.models import _block_compile

    class Block(nn.Module):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
            return kwargs

    Block.forward.__module__ = module
    _block_compile._wrap(Block, {})
    return Block


@real
def check_compiled_blocks_get_layouts_and_no_lengths():
    early = compiled_block()
    forward = early.forward
    hidden = torch.zeros(1, sum(LENGTHS) + 2, 4)
    lengths = int_lengths(LENGTHS)
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, hidden.shape[1])
    kwargs = {"packed_seq_lengths": lengths, "packed": packed}
    with torch.compiler.set_stance("force_eager"):
        with enabled():
            assert early.forward is forward
        with enabled(compile_blocks=True):
            late = compiled_block()
            for block in (early, late):
                seen = block().train()(hidden, **kwargs)
                assert seen["packed_seq_lengths"] is None
                assert seen["packed"].lengths.tolist() == [*LENGTHS, 2]
                assert block().train()(hidden, **kwargs)["packed"] is seen["packed"]
                assert block().eval()(hidden, **kwargs)["packed_seq_lengths"] is lengths
                assert block().train()(hidden) == {}
                torch.use_deterministic_algorithms(True)  # cuseq's attention does not support this
                try:
                    assert block().train()(hidden, **kwargs)["packed_seq_lengths"] is lengths
                finally:
                    torch.use_deterministic_algorithms(False)
            # These compile packed rows already, and need their lengths.
            other = compiled_block("transformers.models.test")
            assert other().train()(hidden, **kwargs)["packed_seq_lengths"] is lengths
        assert early.forward is forward
        assert late().train()(hidden, **kwargs)["packed_seq_lengths"] is lengths


@real
def check_lengths_that_are_known_are_not_read_again():
    """Paths that remain unsloth's use the lengths that the host knows."""
    from unsloth.utils import packing

    batch = {"packed_seq_lengths": int_lengths(LENGTHS)}
    with enabled():
        info = packing.get_packed_info_from_kwargs(batch, torch.device("cpu"))
        kwargs = {"packed_seq_lengths": info[0]}  # as its models pass them on
        packing.get_packed_info_from_kwargs(kwargs, torch.device("cpu"))
        assert packing._cached_host_lengths(info[0], info[1]) == tuple(LENGTHS)
        assert packing._cached_host_lengths(info[0], info[1].clone()) is None
        assert packing._cached_host_lengths(int_lengths(LENGTHS)) is None
        total = sum(LENGTHS) + 3
        assert packing.packed_segment_lengths(info, total) == (*LENGTHS, 3)
        assert packing.cover_padded_cu_seqlens(info, total)[0].tolist()[-2:] == [total - 3, total]


@real
def check_compiled_blocks_come_back():
    from unsloth.models import _block_compile

    before = bindings()
    original = _block_compile._wrap
    with enabled(compile_blocks=True):
        assert _block_compile._wrap is not original
        check_raises(enable, "compile_blocks", "disable")
    check_same_bindings(bindings(), before)
    try:
        _block_compile._wrap = lambda brand_new: None
        check_raises(lambda: enable(compile_blocks=True), "_wrap")
        with enabled():  # without compile_blocks it is not needed
            pass
    finally:
        _block_compile._wrap = original


# The two ways to norm and rotate: in one call for Qwen3, and without norms for Llama.
FAMILIES = ["qwen3", "llama"]


def attention_of(family: str) -> nn.Module:
    """Return a tiny random attention layer, patched as from_pretrained does."""
    import transformers
    import unsloth.models.llama
    import unsloth.models.qwen3

    # unsloth makes its angle tables on the GPU; the layer gets its own below.
    unsloth.models.llama.get_current_device = lambda: "cpu"
    unsloth.models.llama.DEVICE_TYPE_TORCH = "cpu"
    fast, config = {
        "qwen3": (unsloth.models.qwen3.FastQwen3Model, transformers.Qwen3Config),
        "llama": (unsloth.models.llama.FastLlamaModel, transformers.LlamaConfig),
    }[family]
    fast.pre_patch()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config(
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=DIM,
        ),
        dtype=torch.float64,
    )
    layer = model.model.layers[0].self_attn
    assert layer.forward.__func__.__module__.startswith("unsloth.")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return layer.train()


def one_by_one(layer: nn.Module, hidden: Tensor, lengths: list[int]) -> Tensor:
    """Compute the layer's formula for each document separately."""
    cos, sin = tables(torch.float64, "cpu")
    documents = []
    for document in hidden[0].split(lengths):
        q, k, v = (
            projection(document).unflatten(-1, (-1, DIM))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if hasattr(layer, "q_norm"):
            eps = layer.config.rms_norm_eps
            q, k = normed(q, layer.q_norm.weight, eps), normed(k, layer.k_norm.weight, eps)
        q, k = (rotated(x.transpose(0, 1)[None], cos, sin, None)[0].transpose(0, 1) for x in (q, k))
        seen = reference.mask([len(document)], len(document))
        documents.append(layer.o_proj(reference.masked_attention(q, k, v, seen).flatten(1)))
    return torch.cat(documents)[None]


def check_layer(layer: nn.Module) -> None:
    """Compare a packed row through unsloth's own forward with its documents one by one."""
    tail = 4
    hidden = torch.randn(1, sum(LENGTHS) + tail, 32, dtype=torch.float64, requires_grad=True)
    expected = one_by_one(layer, hidden, [*LENGTHS, tail])
    positions = torch.tensor([reference.position_ids(LENGTHS, hidden.shape[1])])
    wanted = [hidden, *layer.parameters()]
    gradient = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, wanted, gradient)
    lengths = int_lengths(LENGTHS)
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, hidden.shape[1])
    for how in ({"packed_seq_lengths": lengths}, {"packed_seq_lengths": lengths, "packed": packed}):
        out = layer(
            hidden,
            position_ids=positions,
            position_embeddings=tables(torch.float64, "cpu"),
            **how,
        )[0]
        assert_close(out, expected)
        for actual, right in zip(torch.autograd.grad(out, wanted, gradient), exact, strict=True):
            assert_close(actual, right)


@real
def check_layers_made_before_and_after():
    early = {family: attention_of(family) for family in FAMILIES}
    for layer in early.values():  # their kernels are Triton's, and need a GPU
        with pytest.raises(RuntimeError, match="driver"):
            check_layer(layer)
    with enabled():
        for family in FAMILIES:
            check_layer(early[family])
            check_layer(attention_of(family))
    for layer in early.values():
        with pytest.raises(RuntimeError, match="driver"):
            check_layer(layer)


def dispatch(
    tensors: list[Tensor], lengths: list[int] | None, backend: str = "sdpa", **more: Any
) -> Tensor:
    """Call unsloth's run_attention: q, k, v `[B, H, T, D]` to `[B, T, H, D]`."""
    from unsloth.utils import attention_dispatch

    q, k, v = tensors
    info = None
    if lengths is not None:
        tensor = int_lengths(lengths)
        info = (tensor, int_lengths(reference.cu_seqlens(lengths)), max(lengths))
    config = attention_dispatch.AttentionConfig(
        backend=backend,
        n_kv_heads=k.shape[1],
        n_groups=q.shape[1] // k.shape[1],
        sdpa_kwargs=more.pop("sdpa_kwargs", None),
    )
    context = attention_dispatch.AttentionContext(
        bsz=q.shape[0],
        q_len=q.shape[2],
        kv_seq_len=k.shape[2],
        n_heads=q.shape[1],
        head_dim=q.shape[3],
        requires_grad=q.requires_grad,
        seq_info=info,
        **{"attention_mask": None, "causal_mask": None} | more,
    )
    return attention_dispatch.run_attention(config=config, context=context, Q=q, K=k, V=v)


def qkv(tokens: int, rows: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(
            rows, n, tokens, DIM, generator=generator, dtype=torch.float64, requires_grad=True
        )
        for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


@contextmanager
def without(module: ModuleType, *names: str) -> Iterator[None]:
    """Fail if one of the module's functions is called."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"none of {names} should be called")

    kept = {name: getattr(module, name) for name in names}
    vars(module).update(dict.fromkeys(names, refuse))
    try:
        yield
    finally:
        vars(module).update(kept)


@real
def check_packed_rows_go_to_cuseq():
    from unsloth.utils import attention_dispatch

    cases = [
        dict(lengths=LENGTHS),
        dict(lengths=LENGTHS, tail=5),
        dict(lengths=[3, 0, 6, 6], sliding_window=3),
        dict(lengths=[7], sliding_window=0),
        dict(lengths=LENGTHS, tail=2, sdpa_kwargs={"scale": 0.7}),
        dict(lengths=LENGTHS, is_causal=False),
        dict(lengths=LENGTHS, training=True),
        dict(lengths=LENGTHS, tail=1, sliding_window=4),
    ]
    for case in cases:
        case = dict(case)
        lengths = case.pop("lengths")
        tensors = qkv(sum(lengths) + case.pop("tail", 0))
        theirs = dispatch(tensors, lengths, **case)
        gradient = torch.randn_like(theirs)
        expected = torch.autograd.grad(theirs, tensors, gradient)
        with (
            enabled(),
            without(
                attention_dispatch,
                "_sdpa_packed_segments",
                "build_sdpa_packed_attention_mask",
                "_training_sdpa",
                "_inference_sdpa",
            ),
        ):
            ours = dispatch(tensors, lengths, **case)
            assert_close(ours, theirs)
            actual = torch.autograd.grad(ours, tensors, gradient)
        for mine, right in zip(actual, expected, strict=True):
            assert_close(mine, right)


@real
def check_rows_of_xformers_go_to_cuseq():
    for more in ({}, {"sliding_window": 3}, {"is_causal": False}):
        tensors = qkv(sum(LENGTHS) + 2)
        with enabled():
            assert_close(
                dispatch(tensors, LENGTHS, "xformers", **more), dispatch(tensors, LENGTHS, **more)
            )


@real
def check_rows_of_flash_attn_stay_its_own():
    from unsloth.utils import attention_dispatch

    calls = []

    def flash(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[2].tolist())
        return torch.zeros_like(query)

    kept = attention_dispatch.flash_attn_varlen_func
    tensors = [heads.detach().float() for heads in qkv(sum(LENGTHS) + 2)]
    try:
        attention_dispatch.flash_attn_varlen_func = flash
        with enabled(), without(attention, "varlen_attention"):
            dispatch(tensors, LENGTHS, attention_dispatch.FLASH_VARLEN)
    finally:
        attention_dispatch.flash_attn_varlen_func = kept
    assert calls == [reference.cu_seqlens([*LENGTHS, 2])]


@real
def check_recurrent_layers_get_the_same_boundaries():
    from unsloth.utils import packing

    batch = {"input_ids": torch.zeros(1, sum(LENGTHS) + 2), "packed_seq_lengths": None}
    positions = torch.tensor([reference.position_ids([4, 16], 20)])
    for more in ({"packed_seq_lengths": int_lengths(LENGTHS)}, {"position_ids": positions}):
        packing.clear_packed_caches()
        theirs = packing._hybrid_varlen_metadata(batch | more)
        with enabled():
            ours = packing._hybrid_varlen_metadata(batch | more)
        for mine, right in zip(ours, theirs, strict=True):
            check_same_bits(mine, right)


@real
def check_everything_else_goes_to_unsloth():
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, 6:] = False
    # Granite's keywords, with is_causal False: newer torch rejects it together with a mask.
    as_granite = {"attn_mask": keep[:, None, None, :], "is_causal": False}
    cases = [
        (qkv(9, rows=2), None, {}),
        (qkv(9, rows=2), None, {"attention_mask": keep}),
        (qkv(9), None, {"sliding_window": 3}),
        # Given a mask and lengths, unsloth uses only the mask.
        (qkv(9), [4, 5], {"attention_mask": torch.ones(1, 9, dtype=torch.bool)}),
        (qkv(9, rows=2), None, {"sdpa_kwargs": as_granite}),
    ]
    for tensors, lengths, more in cases:
        theirs = dispatch(tensors, lengths, **more)
        with enabled(), without(attention, "varlen_attention"):
            assert torch.equal(dispatch(tensors, lengths, **more), theirs)


def trainer_of(**options: Any) -> Any:
    """Return a trainer as unsloth makes it, with documents of 3, 5, 7, 2, 9 and 4 tokens."""
    import datasets
    import tokenizers
    import transformers
    import trl
    from unsloth.trainer import _patch_trl_trainer

    _patch_trl_trainer()
    datasets.disable_progress_bars()
    words = tokenizers.models.WordLevel({"<eos>": 0, "<pad>": 1}, unk_token="<eos>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", pad_token="<pad>"
    )
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1)
    rows = [list(range(2, 2 + length)) for length in (3, 5, 7, 2, 9, 4)]
    return trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_config(config),
        trl.SFTConfig(
            "out",
            use_cpu=True,
            bf16=False,
            report_to="none",
            dataloader_pin_memory=False,
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )


TRAINERS = {
    "packing": (dict(packing=True, max_length=16), [9, 7, 5, 4, 3, 2], 0),
    "multiple": (dict(packing=True, max_length=16, pad_to_multiple_of=8), [9, 7, 5, 4, 3, 2], 2),
    "padding-free": (dict(padding_free=True, max_length=None), [3, 5], 0),
}


def batch_of(trainer: Any) -> dict[str, Any]:
    return dict(trainer.data_collator([trainer.train_dataset[i] for i in range(2)]))


def check_same_batch(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        same = (
            torch.equal(actual[key], value) if isinstance(value, Tensor) else actual[key] == value
        )
        assert same, key


def check_packed_batch(batch: dict[str, Any], plain: dict[str, Any], lengths, tail: int) -> None:
    packed = batch.pop("packed")
    assert type(packed) is cuseq.PackedLayout
    assert packed.lengths.tolist() == lengths
    assert packed.total_tokens == batch["input_ids"].numel() == sum(lengths) + tail
    assert batch["packed_seq_lengths"].tolist() == lengths
    check_same_batch(batch, plain)


@real
def check_batches_of_trainers_made_before_and_after():
    for options, lengths, tail in TRAINERS.values():
        early = trainer_of(**options)
        plain = batch_of(early)
        assert plain["packed_seq_lengths"].tolist() == lengths
        with enabled(early):
            check_packed_batch(batch_of(early), plain, lengths, tail)
            late = trainer_of(**options)
            check_packed_batch(batch_of(late), plain, lengths, tail)
        for trainer in (early, late):
            check_same_batch(batch_of(trainer), plain)
        with enabled(early):  # a second enable changes nothing
            check_packed_batch(batch_of(early), plain, lengths, tail)


@real
def check_a_trainer_is_enabled_after_unsloth_and_disabled_alone():
    options, lengths, tail = TRAINERS["packing"]
    trainer = trainer_of(**options)
    plain = batch_of(trainer)
    check_raises(lambda: cuseq.enable(trainer), "cuseq.enable(unsloth)")
    cuseq.disable(trainer)  # nothing to do
    with enabled():
        result = cuseq.enable(trainer)
        assert result.kind == "trainer" and result.left_alone == result.warnings == ()
        assert result.replaced == (f"collator:{type(trainer.data_collator).__name__}",)
        assert cuseq.enable(trainer) is result
        check_packed_batch(batch_of(trainer), plain, lengths, tail)
        cuseq.disable(trainer)
        check_same_batch(batch_of(trainer), plain)
        assert not hasattr(trainer.data_collator.torch_call, "_cuseq_wrapped")
        cuseq.enable(trainer)
        check_packed_batch(batch_of(trainer), plain, lengths, tail)
    check_same_batch(batch_of(trainer), plain)


class Takes(nn.Module):
    """A model whose forward accepts a layout."""

    def forward(self, input_ids: Tensor, packed: Any = None) -> None:
        raise AssertionError("only its keywords are looked at")


@real
def check_trainers_that_do_not_hold_their_model():
    """unsloth's own tests call it with the model as the first argument."""
    from unsloth.utils import packing

    examples = [
        {"input_ids": [2, 3, 4], "labels": [2, 3, 4], "seq_lengths": [2, 1]},
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [3]},
    ]
    collator = trainer_of(padding_free=True, max_length=None).data_collator
    for name in ("enable_sample_packing", "enable_padding_free_metadata"):
        for model, takes in ((Takes(), True), (nn.Linear(1, 1), False)):
            trainer = SimpleNamespace(
                args=SimpleNamespace(remove_unused_columns=True),
                data_collator=type(collator)(pad_token_id=1, padding_free=True),
            )
            with enabled():
                getattr(packing, name)(model, trainer)
                batch = trainer.data_collator.torch_call(examples)
                assert batch["packed_seq_lengths"].tolist() == [2, 1, 3]
                assert ("packed" in batch) is takes
                if takes:
                    assert batch["packed"].lengths.tolist() == [2, 1, 3]
            assert "packed" not in trainer.data_collator.torch_call(examples)


@real
def check_collators_that_only_collate():
    """A collator needs only `torch_call`: no weak references, no fields of TRL's."""
    from unsloth.utils import packing

    batch = {"input_ids": torch.zeros(1, 6, dtype=torch.int64)}
    trainer = SimpleNamespace(
        args=SimpleNamespace(),
        data_collator=SimpleNamespace(torch_call=lambda examples: dict(batch)),
    )
    examples = [{"input_ids": [2, 3, 4], "seq_lengths": [2, 1]}, {"input_ids": [5, 6, 7]}]
    with enabled():
        packing.enable_sample_packing(Takes(), trainer)
        made = trainer.data_collator.torch_call(
            examples[:1] + [{"input_ids": [5], "seq_lengths": [3]}]
        )
        assert made["packed"].lengths.tolist() == [2, 1, 3]
    assert "packed" not in trainer.data_collator.torch_call(examples)


@real
def check_a_model_that_would_not_take_a_layout_gets_none():
    options, _, _ = TRAINERS["packing"]
    trainer = trainer_of(**options)
    plain = batch_of(trainer)

    def forward(input_ids, labels, position_ids, packed_seq_lengths, seq_idx=None):
        raise AssertionError("only its keywords are looked at")

    trainer.model.forward = forward
    with enabled(trainer):
        check_same_batch(batch_of(trainer), plain)


@real
def check_a_collator_that_comes_again_is_replaced_once():
    from unsloth.utils import packing

    options, lengths, tail = TRAINERS["packing"]
    trainer = trainer_of(**options)
    plain = batch_of(trainer)
    with enabled(trainer):
        packing.enable_sample_packing(trainer.model, trainer)
        check_packed_batch(batch_of(trainer), plain, lengths, tail)
    check_same_batch(batch_of(trainer), plain)


@real
def check_what_is_wrapped_meanwhile_stays_and_nothing_is_kept():
    from unsloth.utils import packing

    options, lengths, tail = TRAINERS["packing"]
    trainer = trainer_of(**options)
    collator = trainer.data_collator
    plain = batch_of(trainer)
    with enabled(trainer):
        ours = collator.torch_call
        collator.torch_call = lambda examples: {**ours(examples), "more": 1}
        captured = packing.enable_sample_packing
        batch = batch_of(trainer)
        assert batch.pop("more") == 1
        check_packed_batch(batch, plain, lengths, tail)
    assert batch_of(trainer).pop("more") == 1 and "packed" not in batch_of(trainer)
    captured(trainer.model, trainer)  # behaves as unsloth's does
    assert "packed" not in batch_of(trainer)

    with enabled():
        late = trainer_of(**options)
        gone = weakref.ref(late.data_collator)
        del late
        gc.collect()
        assert gone() is None


@real
def check_padded_batches_stay():
    trainer = trainer_of(packing=False, padding_free=False)
    plain = batch_of(trainer)
    assert "attention_mask" in plain
    with enabled():
        check_raises(lambda: enable_trainer(trainer), "trainer", "DataCollatorForLanguageModeling")
        check_same_batch(batch_of(trainer), plain)
        check_same_batch(batch_of(trainer_of(packing=False, padding_free=False)), plain)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, str | None]:
    """Return the result of each check: None, or the error."""
    fetched("unsloth/__init__.py")
    fetched("unsloth_zoo/__init__.py")
    for package in ("transformers", "trl", "peft", "datasets"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("unsloth")
    helpers = str(Path(reference.__file__).parent)
    path = os.pathsep.join([str(FOLDER), helpers, os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "CUDA_VISIBLE_DEVICES": "",
        "UNSLOTH_ALLOW_CPU": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, __file__, "report.json"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    written = folder / "report.json"
    if not written.exists():
        pytest.fail(f"unsloth {VERSION} could not be imported:\n{result.stdout}{result.stderr}")
    return json.loads(written.read_text())


@pytest.mark.parametrize("name", REAL)
def test_real(name, report):
    assert report[name] is None, report[name]


def main(path: str) -> None:
    # The result must not depend on which of them the machine has: without them unsloth uses SDPA.
    for package in ("xformers", "flash_attn"):
        sys.modules[package] = None
    import unsloth  # noqa: F401

    outcomes: dict[str, str | None] = {}
    for name, check in REAL.items():
        try:
            check()
            outcomes[name] = None
        except BaseException:  # pytest.fail's exception is not an Exception
            outcomes[name] = traceback.format_exc()
        disable()  # a failed check may have left it enabled
    Path(path).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
