"""Test PackedLayout: its properties, its constructors, and how it is moved to the model."""

from __future__ import annotations

import copy
import math
import pickle
import weakref

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DTYPES, make_lengths, packings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

import cuseq
from cuseq import PackedLayout

INT32_MAX = 2**31 - 1
# About half a second on any GPU of the last ten years.
LONG = 1_000_000_000


def check(
    layout: PackedLayout, lengths: list[int], total: int, max_seqs: int, device: torch.device
) -> None:
    """Check every attribute against its loop."""
    tensors = {
        "lengths": lengths,
        "cu_seqlens": reference.cu_seqlens(lengths),
        "cu_seqlens_static": reference.cu_seqlens_static(lengths, max_seqs),
        "position_ids": reference.position_ids(lengths, total),
        "seq_ids": reference.seq_ids(lengths, total),
    }
    for name, expected in tensors.items():
        tensor = getattr(layout, name)
        assert (name, tensor.tolist()) == (name, expected)
        assert (name, tensor.dtype) == (name, torch.int32)
        assert (name, tensor.device) == (name, device)
        assert getattr(layout, name) is tensor
    numbers = {
        "num_sequences": len(lengths),
        "max_seqlen": reference.max_seqlen(lengths),
        "total_tokens": total,
        "num_real_tokens": sum(lengths),
    }
    for name, expected in numbers.items():
        assert (name, getattr(layout, name)) == (name, expected)
        assert type(getattr(layout, name)) is int
    assert layout.device == device
    meta = layout.host_meta
    assert (meta.device.type, meta.dtype) == ("cpu", torch.int32)
    expected = [len(lengths), reference.max_seqlen(lengths), total, sum(lengths), 0]
    assert meta.tolist() == [*expected, math.gcd(*lengths)]


@pytest.mark.kernels
def test_literal_case(device):
    layout = PackedLayout.from_lengths([2, 3], 6, device=device)
    check(layout, [2, 3], 6, 6, device)
    assert layout.cu_seqlens_static.tolist() == [0, 2, 5, 5, 5, 5, 5]
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 0]
    assert layout.seq_ids.tolist() == [0, 0, 1, 1, 1, 2]


@given(packing=packings(), dtype=st.sampled_from(DTYPES), strided=st.booleans())
def test_lengths_and_offsets_say_the_same(packing, dtype, strided, device):
    lengths, total = packing
    max_seqs = max(len(lengths), total)
    tensor = make_lengths(lengths, dtype, device, strided)
    offsets = make_lengths(reference.cu_seqlens(lengths), dtype, device, strided)
    check(
        PackedLayout.from_lengths(tensor, total, max_seqs=max_seqs),
        lengths,
        total,
        max_seqs,
        device,
    )
    check(
        PackedLayout.from_cu_seqlens(offsets, total, max_seqs=max_seqs),
        lengths,
        total,
        max_seqs,
        device,
    )
    made_on_host = PackedLayout.from_lengths(lengths, total, max_seqs=max_seqs, device=device)
    check(made_on_host, lengths, total, max_seqs, device)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), left=st.booleans())
def test_a_mask_says_the_same(lengths, left, device):
    mask = torch.zeros(len(lengths), 6, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[6 - length if left else 0 :][:length] = True
    total = sum(lengths) + 2
    layout = PackedLayout.from_padding_mask(mask.to(device), total_tokens=total, max_seqs=9)
    check(layout, lengths, total, 9, device)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), max_seqs=st.sampled_from([None, 9])
)
def test_positions_say_the_same(lengths, max_seqs, device):
    total = sum(lengths)
    ids = torch.tensor(reference.position_ids(lengths, total), device=device)
    capacity = total if max_seqs is None else max_seqs
    check(PackedLayout.from_position_ids(ids, max_seqs=max_seqs), lengths, total, capacity, device)
    planes = torch.stack([ids * 0 + 5, ids, ids * 0 + 7]).unsqueeze(1)
    layout = PackedLayout.from_position_ids(planes, plane=1, max_seqs=max_seqs)
    check(layout, lengths, total, capacity, device)
    rows = PackedLayout.from_position_ids(torch.stack([ids, ids]), max_seqs=2 * total)
    check(rows, lengths * 2, 2 * total, 2 * total, device)


def test_defaults_and_other_sequences_of_ints(device):
    for lengths in (
        [2, 3],
        (2, 3),
        np.array([2, 3]),
        np.array([2, 3], dtype=np.int16),
        range(2, 4),
    ):
        check(PackedLayout.from_lengths(lengths, device=device), [2, 3], 5, 5, device)
    check(PackedLayout.from_cu_seqlens((0, 2, 5), device=device), [2, 3], 5, 5, device)
    tensor = torch.tensor([2, 3], device=device)
    check(PackedLayout.from_lengths(tensor), [2, 3], 5, 5, device)
    check(PackedLayout.from_cu_seqlens(cuseq.ops.cu_seqlens(tensor)), [2, 3], 5, 5, device)
    check(PackedLayout.from_lengths([], device=device), [], 0, 0, device)
    check(PackedLayout.from_lengths([], 4, device=device), [], 4, 4, device)


def test_it_is_a_snapshot(device):
    for dtype in DTYPES:
        source = torch.tensor([2, 3], dtype=dtype, device=device)
        layout = PackedLayout.from_lengths(source, 6)
        source.fill_(1)
        check(layout, [2, 3], 6, 6, device)


def test_limits():
    layout = PackedLayout.from_lengths([INT32_MAX], max_seqs=1)
    assert layout.max_seqlen == layout.total_tokens == layout.num_real_tokens == INT32_MAX
    many = PackedLayout.from_lengths([1, 0] * 50_000, max_seqs=100_000)
    assert (many.num_sequences, many.total_tokens, many.max_seqlen) == (100_000, 50_000, 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PackedLayout.from_lengths([4, -3], 9), ValueError, r"lengths\[1\] = -3"),
        (lambda: PackedLayout.from_lengths([4, -3]), ValueError, r"lengths\[1\] = -3"),
        (lambda: PackedLayout.from_lengths([-3]), ValueError, r"lengths\[0\] = -3"),
        (lambda: PackedLayout.from_lengths([INT32_MAX, 1], 9), ValueError, r"lengths\[1\] = 1"),
        (lambda: PackedLayout.from_lengths([INT32_MAX, 1]), ValueError, r"lengths\[1\] = 1"),
        (lambda: PackedLayout.from_lengths([2, 2**70]), (ValueError, TypeError), "lengths"),
        (lambda: PackedLayout.from_lengths([2, 3], 4), ValueError, "total_tokens = 4.*5"),
        (lambda: PackedLayout.from_lengths([2, 3], -1), ValueError, "total_tokens.*-1"),
        (lambda: PackedLayout.from_lengths([0] * 3, 2, max_seqs=2), ValueError, "max_seqs.*3"),
        (lambda: PackedLayout.from_lengths([2, 3], max_seqs=1), ValueError, "max_seqs = 1.*2"),
        (lambda: PackedLayout.from_lengths([2], "9"), TypeError, "total_tokens must .* got '9'"),
        (lambda: PackedLayout.from_lengths([2], True), TypeError, "total_tokens must .* got True"),
        (lambda: PackedLayout.from_lengths([2], 2**70), ValueError, f"total_tokens .*{2**70}"),
        (lambda: PackedLayout.from_lengths([2], max_seqs=1.5), TypeError, "max_seqs must .*1.5"),
        (lambda: PackedLayout.from_lengths(torch.ones(2, device="meta")), ValueError, "on meta"),
        (
            lambda: PackedLayout.from_lengths([2], segment_multiple=2**20 + 1),
            ValueError,
            r"segment_multiple must lie in \[1, 2\^20\], got 1048577",
        ),
        (
            lambda: PackedLayout.from_lengths([2], segment_multiple=2.0),
            TypeError,
            "segment_multiple must be an int, got 2.0",
        ),
        (
            lambda: PackedLayout.from_lengths([2], 4.0, segment_multiple=2),
            TypeError,
            "total_tokens.* must be an int, got 4.0",
        ),
        (
            lambda: PackedLayout.from_lengths([2], 4, segment_multiple=2, max_seqs=2.5),
            TypeError,
            "max_seqs must be an int, got 2.5",
        ),
        (
            lambda: PackedLayout.from_lengths([2]).with_total_tokens(2**31),
            ValueError,
            rf"total_tokens must be at most 2\^31 - 1, got {2**31}",
        ),
        (
            lambda: PackedLayout.from_position_ids([0, 1]),
            TypeError,
            "position_ids must be a tensor",
        ),
        (
            lambda: PackedLayout.from_position_ids(torch.tensor([0, 1]), max_seqs=1.5),
            TypeError,
            "max_seqs must be an int, got 1.5",
        ),
        (
            lambda: PackedLayout.from_position_ids(torch.ones(2, device="meta").long()),
            ValueError,
            "position_ids must have values, got a tensor on meta",
        ),
        (
            lambda: PackedLayout.from_padding_mask(torch.ones(2, 2, device="meta").bool()),
            ValueError,
            "mask must have values, got a tensor on meta",
        ),
        (
            lambda: PackedLayout.from_lengths([2]).dense_mask(causal=None),
            TypeError,
            "causal must be True or False, got None",
        ),
        (
            lambda: PackedLayout.from_lengths([2]).block_mask(causal=None),
            TypeError,
            "causal must be True or False, got None",
        ),
        (lambda: PackedLayout.from_lengths([2.0, 3.0]), TypeError, "lengths.*2.0"),
        (lambda: PackedLayout.from_lengths(torch.ones(2)), TypeError, "lengths.*torch.float32"),
        (lambda: PackedLayout.from_lengths(np.ones(2)), TypeError, "lengths"),
        (lambda: PackedLayout.from_lengths(torch.tensor(5)), ValueError, "lengths"),
        (lambda: PackedLayout.from_lengths(torch.ones(2, 2).int()), ValueError, "lengths"),
        (lambda: PackedLayout.from_cu_seqlens([0, 5, 3], 9), ValueError, r"cu_seqlens\[2\] = 3"),
        (lambda: PackedLayout.from_cu_seqlens([1, 5], 9), ValueError, r"cu_seqlens\[0\] = 1"),
        (lambda: PackedLayout.from_cu_seqlens([0, 10], 9), ValueError, "total_tokens = 9.*10"),
        (lambda: PackedLayout.from_cu_seqlens([0, 2**31]), ValueError, f"cu_seqlens.*{2**31}"),
        (lambda: PackedLayout.from_cu_seqlens([], 9), ValueError, "cu_seqlens"),
        (lambda: PackedLayout.from_cu_seqlens([0.0, 2.0]), TypeError, "cu_seqlens"),
        (lambda: PackedLayout.from_padding_mask(torch.ones(2, 3)), TypeError, "mask"),
        (
            lambda: PackedLayout.from_position_ids(torch.tensor([0, 0, 0]), max_seqs=2),
            ValueError,
            "max_seqs = 2",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message) as raised:
        make()
    assert "frame #" not in str(raised.value)  # messages must not contain a C++ stack


@pytest.mark.parametrize("how", ["fake mode", "make_fx", "export"])
def test_what_a_dry_run_makes_is_not_kept(how):
    """A FakeTensor is invalid outside of its mode."""
    packed = PackedLayout.from_lengths([3, 1], 12, segment_multiple=4)
    expected = PackedLayout.from_lengths([3, 1], 12, segment_multiple=4)
    rows, padded = torch.randn(12, 2), torch.randn(2, 3, 2)
    plan, same_plan = (
        cuseq.distributed.cp_plan(layout, 2, policy="zigzag") for layout in (packed, expected)
    )

    def run(rows):
        facts = packed.position_ids + packed.seq_idx[0] + packed.cu_seqlens[-1] + packed.lengths[0]
        shared = cuseq.distributed.cp_join(packed, plan, rows.view(2, 6, 2))
        batch = cuseq.unpack(packed, rows)
        return rows * facts.unsqueeze(1) + shared + cuseq.pack(packed, batch)

    if how == "fake mode":
        with FakeTensorMode(allow_non_fake_inputs=True):
            run(rows)
    elif how == "make_fx":
        make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(rows)
    else:
        module = nn.Module()
        module.forward = run
        torch.export.export(module, (rows,), strict=False)
    for name in ("position_ids", "seq_ids", "seq_idx", "moe_padding_mask", "lengths", "cu_seqlens"):
        assert getattr(packed, name).tolist() == getattr(expected, name).tolist(), name
    assert torch.equal(cuseq.pack(packed, padded), cuseq.pack(expected, padded))
    split = rows.view(2, 6, 2)
    assert torch.equal(
        cuseq.distributed.cp_join(packed, plan, split),
        cuseq.distributed.cp_join(expected, same_plan, split),
    )
    assert torch.equal(run(rows), run(rows))


def test_flash_kwargs(device):
    layout = PackedLayout.from_lengths([2, 3], 6, device=device)
    kwargs = layout.flash_kwargs()
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "packed")
    assert tuple(kwargs) == names
    assert kwargs["cu_seq_lens_q"] is layout.cu_seqlens
    assert kwargs["cu_seq_lens_k"] is layout.cu_seqlens
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (3, 3)
    assert type(kwargs["max_length_q"]) is int
    assert kwargs["packed"] is layout


def test_repr_is_for_people(device):
    text = repr(PackedLayout.from_lengths([2, 3], 6, device=device))
    assert text.startswith("PackedLayout(")
    for part in ("2 sequences", "longest 3", "5 real of 6 tokens", str(device)):
        assert part in text


# "meta" stands in for another device if there is no GPU.
@pytest.fixture(params=["meta", "cuda"])
def elsewhere(request) -> torch.device:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return torch.device("meta")


def test_to_is_memoised(elsewhere):
    layout = PackedLayout.from_lengths([2, 3], 6)
    assert layout.to("cpu") is layout
    assert layout.to(torch.device("cpu"), non_blocking=False) is layout
    moved = layout.to(elsewhere, non_blocking=True)
    assert moved.device == moved.cu_seqlens.device == elsewhere
    assert layout.to(elsewhere) is moved.to(elsewhere) is moved
    assert layout.to(elsewhere.type) is moved
    assert moved.to("cpu") is layout
    assert moved.max_seqlen == 3
    assert moved.host_meta.device.type == "cpu"


def test_to_keeps_nothing_alive(elsewhere):
    layout = PackedLayout.from_lengths([2, 3], 6)
    moved = weakref.ref(layout.to(elsewhere))
    original = weakref.ref(layout)
    del layout
    assert original() is None and moved() is None, "a cycle keeps GPU memory"


def test_to_another_gpu(second_gpu):
    layout = PackedLayout.from_lengths(torch.tensor([2, 3], device="cuda:0"), 6)
    moved = layout.to(second_gpu)
    check(moved, [2, 3], 6, 6, second_gpu)
    assert layout.to(second_gpu.index) is moved
    with torch.cuda.device(second_gpu):
        assert layout.to("cuda") is moved


def test_pickle_and_deepcopy(device):
    for lengths, total, max_seqs in (([2, 0, 3], 7, 5), ([], 0, 0), ([], 3, 3)):
        layout = PackedLayout.from_lengths(lengths, total, max_seqs=max_seqs, device=device)
        check(pickle.loads(pickle.dumps(layout)), lengths, total, max_seqs, device)
        assert copy.deepcopy({"packed": layout})["packed"] is layout
    found = PackedLayout.from_position_ids(torch.tensor([0, 1, 0], device=device), max_seqs=5)
    check(pickle.loads(pickle.dumps(found)), [2, 1], 3, 5, device)


@pytest.mark.parametrize("default", ["meta", "cuda"])
def test_default_device_does_not_move_it(default, request):
    if default == "cuda":
        request.getfixturevalue("cuda")
    cpu = torch.device("cpu")
    with torch.device(default):
        layout = PackedLayout.from_lengths([2, 3], 6)
        check(layout, [2, 3], 6, 6, cpu)
        check(PackedLayout.from_cu_seqlens([0, 2, 5], 6), [2, 3], 6, 6, cpu)
        check(pickle.loads(pickle.dumps(layout)), [2, 3], 6, 6, cpu)
        check(PackedLayout.from_lengths([]), [], 0, 0, cpu)


def test_opaque_to_pytree():
    layout = PackedLayout.from_lengths([2, 3])
    assert pytree.tree_leaves({"packed": layout}) == [layout]
    assert pytree.tree_map(lambda leaf: leaf, [layout])[0] is layout


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_keeps_its_identity(reentrant, device):
    layout = PackedLayout.from_lengths([2, 3], 6, device=device)
    seen = []

    def segment(hidden, packed):
        seen.append(packed)
        return hidden.sin() * packed.position_ids

    hidden = torch.ones(6, device=device, requires_grad=True)
    checkpoint(segment, hidden, layout, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert all(packed is layout for packed in seen)


def test_accelerate_moves_it(elsewhere):
    operations = pytest.importorskip("accelerate.utils.operations")
    layout = PackedLayout.from_lengths([2, 3], 6)
    moved = operations.send_to_device({"packed": layout}, elsewhere, non_blocking=True)
    assert moved["packed"] is layout.to(elsewhere)


def collate(examples):
    return cuseq.PackingCollator()(examples)


EXAMPLES = [{"input_ids": [1] * length} for length in (2, 3, 4, 1)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(EXAMPLES)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [EXAMPLES, Stream()], ids=["map", "stream"])
def test_data_loader(workers, dataset):
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=workers)
    layouts = [batch["packed"] for batch in loader]
    for layout, lengths in zip(layouts, ([2, 3], [4, 1]), strict=True):
        check(layout, lengths, sum(lengths), 5, torch.device("cpu"))


def test_data_loader_with_pinned_memory(cuda):
    loader = DataLoader(EXAMPLES, batch_size=2, collate_fn=collate, num_workers=1, pin_memory=True)
    for batch, lengths in zip(loader, ([2, 3], [4, 1]), strict=True):
        layout = batch["packed"]
        assert layout.cu_seqlens.is_pinned()
        assert layout.pin_memory() is layout
        check(layout, lengths, 5, 5, torch.device("cpu"))
        check(layout.to(cuda), lengths, 5, 5, cuda)
    on_gpu = PackedLayout.from_lengths([2, 3], device=cuda)
    assert on_gpu.pin_memory() is on_gpu


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("dataset", [EXAMPLES, Stream()], ids=["map", "stream"])
def test_accelerate_loaders(dataset, dispatch):
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.data_loader.prepare_data_loader(
        DataLoader(dataset, batch_size=2, collate_fn=collate),
        num_processes=1,
        process_index=0,
        put_on_device=True,
        device=torch.device("cpu"),
        dispatch_batches=dispatch,
    )
    # A dispatching loader moves batches to the process's own device.
    device = accelerate.PartialState().device if dispatch else torch.device("cpu")
    for batch, lengths in zip(loader, ([2, 3], [4, 1]), strict=True):
        check(batch["packed"], lengths, 5, 5, batch["packed"].device)
        assert batch["packed"].device.type == device.type
        assert batch["input_ids"].tolist() == [[1] * 5]


SOURCES = {
    "from_lengths": ([2, 3], (6,)),
    "from_cu_seqlens": ([0, 2, 5], (6,)),
    "from_position_ids": ([0, 1, 0, 1, 2], ()),
}


@pytest.mark.parametrize("make", SOURCES)
def test_it_waits_for_its_own_copy_alone(make, cuda):
    values, arguments = SOURCES[make]
    source, new = (torch.tensor(v, device=cuda) for v in ([0] * len(values), values))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Warm up: kernels and memory that are used for the first time may stall the device.
        getattr(PackedLayout, make)(new, *arguments).wait()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()

        torch.cuda._sleep(LONG)
        source.copy_(new)  # reading before the sleep ends gives zeros
        layout = getattr(PackedLayout, make)(source, *arguments)
        assert not side.query(), "making a layout must not wait"
        torch.cuda._sleep(LONG)
        assert (layout.max_seqlen, layout.num_real_tokens, layout.num_sequences) == (3, 5, 2)
        assert not side.query(), "a host value waits for its copy, not for the stream"
        assert layout.lengths.tolist() == [2, 3]
    torch.cuda.synchronize()


def test_copies_nobody_waited_for(cuda):
    # Their pinned memory must not be reused before the copies have finished.
    sources = [torch.tensor([i, 3], device=cuda) for i in range(4, 104)]
    torch.cuda._sleep(LONG)
    kept = []
    for i, source in enumerate(sources):
        layout = PackedLayout.from_lengths(source, 200)
        if i % 10 == 0:
            kept.append(layout)
    assert [layout.max_seqlen for layout in kept] == list(range(4, 104, 10))


def test_no_device_is_where_it_is(device):
    """accelerate's code for moving batches passes None if nothing has to be moved."""
    packed = PackedLayout.from_lengths([2, 3], device=device)
    assert packed.to(None) is packed


def test_a_longer_row_has_whole_tokens(device):
    packed = PackedLayout.from_lengths([2, 3], device=device)
    for tokens, kind, message in (
        (5.5, TypeError, "total_tokens must be an int, got 5.5"),
        (4, ValueError, "total_tokens must be at least the row's 5, got 4"),
        (2**70, ValueError, "total_tokens must fit in int64"),
    ):
        with pytest.raises(kind, match=message):
            packed.with_total_tokens(tokens)


PLAN = cuseq.distributed.cp_plan([4, 4], 2, policy="zigzag")


@pytest.mark.parametrize("given", [torch.tensor([0, 2, 5], dtype=torch.int32), [2, 3]])
@pytest.mark.parametrize(
    "call",
    [
        lambda packed, x: cuseq.varlen_attention(x, x, x, packed),
        lambda packed, x: cuseq.apply_rope(x, x, x[:, 0, :4], x[:, 0, :4], packed=packed),
        lambda packed, x: cuseq.pack(packed, x),
        lambda packed, x: cuseq.unpack(packed, x),
        lambda packed, x: cuseq.distributed.cp_partition(packed, PLAN, 0, x),
        lambda packed, x: cuseq.distributed.cp_join(packed, PLAN, x),
    ],
    ids=["attention", "rope", "pack", "unpack", "cp_partition", "cp_join"],
)
def test_what_is_no_layout_is_refused_by_name(call, given):
    """flash-attention takes offsets there."""
    with pytest.raises(
        TypeError, match=rf"packed must be a PackedLayout, got {type(given).__name__}"
    ):
        call(given, torch.randn(5, 2, 8))


def test_a_layout_is_not_made_by_its_class():
    for lengths in ([3, 5], torch.tensor([3, 5]), None):
        with pytest.raises(TypeError, match=r"PackedLayout\.from_lengths\(\[2, 3\]\)"):
            PackedLayout(lengths)
    with pytest.raises(TypeError):
        PackedLayout()


def test_pickling_goes_by_memory_and_not_through_lists(monkeypatch):
    mask = torch.rand(4, 300) < 0.7
    layout = PackedLayout.from_padding_mask(mask, 8, total_tokens=4 * 304 + 8, max_seqs=7)
    layout.position_ids  # noqa: B018
    batch = torch.randn(4, 300, 2)
    expected = cuseq.pack(layout, batch)

    def refuse(self):
        raise AssertionError("a list of tokens takes milliseconds")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", refuse)
        sent = pickle.dumps(layout)
        found = pickle.loads(sent)
    assert len(sent) < 4 * (2 * 4 * 304 + 200)
    names = "lengths cu_seqlens cu_seqlens_static cu_seqlens_padded cu_seqlens_padded_static "
    for name in (names + "host_meta position_ids seq_ids moe_padding_mask seq_idx").split():
        assert torch.equal(getattr(found, name), getattr(layout, name)), name
    assert torch.equal(cuseq.pack(found, batch), expected)
    assert found.num_sequences == layout.num_sequences
    assert found.known_lengths is not None and found.segments.known_lengths is not None


EDITED = """
import pickle, torch, cuseq
from cuseq import PackedLayout
from cuseq.layout import StaticLayout

device = torch.device("{device}")
labels = torch.arange(8, device=device)
x = torch.randn(8, 2, 8, device=device)
cos, sin = cuseq.rope_table(8, 8, device=device)
USES = dict(
    attention=lambda p: cuseq.varlen_attention(x, x, x, p),
    rope=lambda p: cuseq.apply_rope(x, x, cos, sin, packed=p),
    dense_mask=lambda p: p.dense_mask(),
    block_mask=lambda p: p.block_mask(),
    pack=lambda p: cuseq.pack(p, torch.zeros(2, 4, device=device)),
    unpack=lambda p: cuseq.unpack(p, x),
    cp_plan=lambda p: cuseq.distributed.cp_plan(p, 1, policy="zigzag"),
    labels=lambda p: cuseq.data.mask_boundary_labels(labels, p),
    flash_kwargs=lambda p: p.dense_mask() if p.pads_between_sequences else p.flash_kwargs(),
    chunked=lambda p: p.chunked(2),
    pickle=pickle.dumps,
    with_total_tokens=lambda p: p.with_total_tokens(12),
    static_copy=lambda p: StaticLayout.like(p, device),
    to=lambda p: p.to("meta"),
)
if device.type == "cpu" and torch.cuda.is_available():
    USES["pin_memory"] = lambda p: p.pin_memory()
NAMES = "lengths cu_seqlens cu_seqlens_static cu_seqlens_padded position_ids seq_ids seq_idx "
NAMES += "moe_padding_mask host_meta lengths_on_host batch_rows"

def tensor_of(packed, name):
    value = getattr(packed, name)
    if name == "batch_rows":
        return value()[0]
    return value if isinstance(value, torch.Tensor) else value()

for segment in (1, 4):
    for name in NAMES.split():
        for use, call in USES.items():
            packed = PackedLayout.from_lengths(
                [2, 4], 8, segment_multiple=segment, device=device
            )
            for other in NAMES.split():
                tensor_of(packed, other)
            call(packed)
            tensor_of(packed, name)[0] = tensor_of(packed, name)[0]
            shown = {{"cu_seqlens_static": "cu_seqlens", "lengths_on_host": "lengths"}}
            shown = shown.get(name, name)
            if segment == 1 and name == "cu_seqlens_padded":
                shown = "cu_seqlens"
            try:
                call(packed)
            except ValueError as error:
                assert f"packed.{{shown}}" in str(error), (name, use, error)
                assert "must not be edited" in str(error)
            else:
                raise AssertionError((name, use))
packed = PackedLayout.from_lengths([2, 3], 8)
moved = packed.to("meta") if device.type == "cpu" else packed.to(device)
for made in (packed, moved, packed.with_total_tokens(16), packed.pin_memory() if
             torch.cuda.is_available() else packed):
    made._check_unedited()
print("every edit was seen")
"""


def test_edited_tensors_are_named_when_asked_for(device, run_python):
    """Version counters detect the edit; they are compared only with CUSEQ_CHECK=1."""
    result = run_python(EDITED.format(device=str(device)), CUSEQ_CHECK="1")
    assert "every edit was seen" in result.stdout, result.stderr
    result = run_python(EDITED.format(device=str(device)), CUSEQ_CHECK="0")
    assert "AssertionError: ('lengths', 'attention')" in result.stderr


SHARED_PADDED = """
import torch, cuseq

packed = cuseq.PackedLayout.from_padding_mask(torch.tensor([[1, 0], [1, 1]]))
for total_tokens in (3, 4):
    for number in (0, 1):
        made = cuseq.PackedLayout.from_padding_mask(torch.tensor([[1, 0], [1, 1]]))
        made = made.with_total_tokens(total_tokens)
        made.batch_rows()[number][:] = 0
        try:
            cuseq.pack(made, torch.zeros(2, 2))
        except ValueError as error:
            assert "packed.batch_rows" in str(error), error
        else:
            raise AssertionError((total_tokens, number))
packed.batch_rows()[1][0] = 0
try:
    packed.seq_idx
except ValueError as error:
    assert "packed.batch_rows" in str(error), error
else:
    raise AssertionError("seq_idx")
print("every edit was seen")
"""


def test_edited_rows_of_a_padded_batch_are_named(run_python):
    result = run_python(SHARED_PADDED, CUSEQ_CHECK="1")
    assert "every edit was seen" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "name", [n for n in dir(PackedLayout) if isinstance(getattr(PackedLayout, n), property)]
)
def test_every_tensor_says_that_it_must_not_be_edited(name):
    packed = PackedLayout.from_padding_mask(torch.tensor([[1, 0], [1, 1]]), 4)
    docstring = " ".join(getattr(PackedLayout, name).__doc__.split())
    if isinstance(getattr(packed, name), torch.Tensor):
        assert "Must not be edited." in docstring


@pytest.mark.parametrize(
    "shared",
    [
        PackedLayout.batch_rows,
        PackedLayout.lengths_on_host,
        cuseq.PackedTree.input_ids.fget,
        cuseq.PackedTree.position_ids.fget,
    ],
)
def test_so_do_methods_and_the_properties_of_trees(shared):
    assert "ust not be edited." in " ".join(shared.__doc__.split())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.dense_mask("bf16"), TypeError, "dtype must be a torch.dtype, got 'bf16'"),
        (
            lambda p: p.dense_mask(torch.int32),
            TypeError,
            "dtype must be bool, float32, bfloat16, float16 or float64, got torch.int32",
        ),
        (lambda p: p.chunk_indices(True), TypeError, "chunk_size must be an int, got True"),
        (lambda p: p.dense_mask(window=2.5), TypeError, "window must be an int, got 2.5"),
        (lambda p: p.block_mask(window="a"), TypeError, "window must be an int, got 'a'"),
        (lambda p: p.xformers_bias(window=2.5), TypeError, "window must be an int, got 2.5"),
        (lambda p: p.dense_mask(window=0), ValueError, "window must be None or at least 1, got 0"),
        (lambda p: p.dense_mask(row_length=2.5), TypeError, "row_length must be an int, got 2.5"),
        (lambda p: p.dense_mask(finite=None), TypeError, "finite must be True or False, got None"),
        (lambda p: p.dense_mask(spans="ab"), TypeError, "spans must be pairs of ints .* got 'ab'"),
        (
            lambda p: p.dense_mask(spans=torch.ones(1, 2).int().to_sparse()),
            TypeError,
            "spans must be a dense tensor, got a torch.sparse_coo one",
        ),
        (
            lambda p: PackedLayout.from_lengths(torch.ones(2).int().to_sparse()),
            TypeError,
            "lengths must be a dense tensor, got a torch.sparse_coo one",
        ),
        (
            lambda p: PackedLayout.from_lengths(
                torch.nested.nested_tensor([torch.ones(2).int()], layout=torch.jagged)
            ),
            TypeError,
            "lengths must be a dense tensor, got a nested one",
        ),
        (
            lambda p: PackedLayout.from_padding_mask(torch.ones(2, 2).int().to_sparse()),
            TypeError,
            "mask must be a dense tensor, got a torch.sparse_coo one",
        ),
        (
            lambda p: PackedLayout.from_position_ids(torch.ones(2).int().to_sparse()),
            TypeError,
            "position_ids must be a dense tensor, got a torch.sparse_coo one",
        ),
        (lambda p: p.to("gpu"), ValueError, "device must be a device of torch, got 'gpu'"),
        (
            lambda p: PackedLayout.from_lengths([2], max_seqs=2**40),
            ValueError,
            rf"max_seqs must be at most 2\^31 - 1, got {2**40}",
        ),
        (
            lambda p: PackedLayout.from_position_ids(torch.zeros(1, 0).int(), max_seqs=2**31 - 1),
            ValueError,
            rf"max_seqs must be at most 2\^31 - 3, got {2**31 - 1}",
        ),
        (
            lambda p: PackedLayout.from_position_ids(torch.zeros(3, 1, 2).int(), plane=0.5),
            TypeError,
            "plane must be an int, got 0.5",
        ),
        (
            lambda p: cuseq.pack(p, torch.ones(2, 3, device="meta")),
            ValueError,
            r"tensors\[0\] must have values, got a tensor on meta",
        ),
        (
            lambda p: cuseq.unpack(p, torch.ones(5, device="meta")),
            ValueError,
            r"tensors\[0\] must have values, got a tensor on meta",
        ),
    ],
)
def test_errors_of_a_layouts_methods_are_no_dumps(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(PackedLayout.from_lengths([2, 3]))
    assert "incompatible function arguments" not in str(raised.value)
