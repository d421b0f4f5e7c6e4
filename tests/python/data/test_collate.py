"""Test PackingCollator and mask_boundary_labels against loops."""

from __future__ import annotations

import io
import pickle
import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DTYPES, packings
from torch import Tensor

from cuseq import PackedLayout, PackedTree, PackingCollator
from cuseq.data import mask_boundary_labels
from cuseq.distributed import cp_partition, cp_plan

A, B = {"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}


def as_lists(batch: dict) -> dict:
    return {key: row[0].tolist() for key, row in batch.items() if key != "packed"}


@st.composite
def example_lists(draw) -> list[dict[str, list[int]]]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    with_labels, with_other = draw(st.booleans()), draw(st.booleans())
    examples = []
    for length in lengths:
        tokens = st.lists(st.integers(0, 50), min_size=length, max_size=length)
        example = {"input_ids": draw(tokens)}
        if with_labels:
            example["labels"] = [-100 if label < 9 else label for label in draw(tokens)]
        if with_other:
            example["token_type_ids"] = draw(tokens)
        examples.append(example)
    return examples


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_literal_case(dtype, device):
    labels = torch.tensor([5, 6, 7, 8, 9, 0], dtype=dtype, device=device)
    layout = PackedLayout.from_lengths([2, 3], 6)
    lengths = torch.tensor([2, 3], device=device)
    for where in ([2, 3], (2, 3), torch.tensor([2, 3]), lengths, layout, layout.to(device)):
        unshifted = mask_boundary_labels(labels, where)
        assert unshifted.tolist() == [-100, 6, -100, 8, 9, -100]
        assert (unshifted.dtype, unshifted.device) == (dtype, device)
        shifted = mask_boundary_labels(labels, where, shift=1, ignore_index=-7)
        assert shifted.tolist() == [5, -7, 7, 8, -7, -7]
        two_ahead = mask_boundary_labels(labels, where, shift=2)
        assert two_ahead.tolist() == [-100, -100, 7, -100, -100, -100]
    assert labels.tolist() == [5, 6, 7, 8, 9, 0], "out of place"


SHIFTS = st.integers(0, 7) | st.sampled_from([2**31, 2**63 - 1])


@given(packing=packings(), shift=SHIFTS, dtype=st.sampled_from(DTYPES))
def test_labels_of_any_packing(packing, shift, dtype, device):
    lengths, total = packing
    values = list(range(10, 10 + total))
    labels = torch.tensor(values, dtype=dtype, device=device)
    layout = PackedLayout.from_lengths(lengths, total, max_seqs=len(lengths), device=device)
    masked = mask_boundary_labels(labels, layout, shift=shift)
    assert masked.tolist() == reference.mask_boundary_labels(values, lengths, shift)
    assert torch.equal(mask_boundary_labels(masked, layout, shift=shift), masked)


def test_labels_given_with_zero_length_sequences(device):
    # There may be more sequences than tokens; the default capacity must not get in the way.
    labels = torch.tensor([5, 6], device=device)
    for lengths in ([0, 0, 2, 0, 0], torch.tensor([0, 0, 2, 0, 0], device=device)):
        assert mask_boundary_labels(labels, lengths).tolist() == [-100, 6]


def test_labels_and_their_shift_agree(device):
    """Masking before and after the shift leaves the same targets."""
    lengths, total = [3, 1, 0, 4, 2], 13
    labels = torch.arange(total, device=device)
    unshifted = mask_boundary_labels(labels, lengths)
    shifted = mask_boundary_labels(labels.roll(-1), lengths, shift=1)
    assert torch.equal(unshifted[1:], shifted[:-1])


def test_labels_of_multi_token_prediction(device):
    """Each sequence alone, shifted by k with the mask's fill after it, gives the packed labels."""
    lengths, total = [3, 1, 0, 4, 2], 13
    ids = torch.arange(20, 20 + total, device=device)
    for shift in range(1, 6):
        masked = mask_boundary_labels(ids.roll(-shift), lengths, shift=shift)
        alone = [
            [*document[shift:], *[-100] * min(shift, len(document))]
            for document in map(Tensor.tolist, ids.split([*lengths, total - sum(lengths)]))
        ]
        assert masked.tolist() == sum(alone[:-1], []) + [-100] * (total - sum(lengths))


@pytest.mark.parametrize("shift", [-1, -(2**63)])
def test_negative_shifts_are_refused(shift, device):
    labels = torch.arange(6, device=device)
    with pytest.raises(ValueError, match=f"shift must be at least 0, got {shift}"):
        mask_boundary_labels(labels, [2, 3], shift=shift)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"shift must be at least 0, got {shift}"):
        torch.ops.cuseq.mask_boundary_labels(labels, offsets, shift)


def test_shifts_that_are_not_ints_are_refused(device):
    labels = torch.arange(6, device=device)
    for shift in (1.0, None, "1"):
        with pytest.raises(TypeError, match=f"shift must be an int, got {shift!r}"):
            mask_boundary_labels(labels, [2, 3], shift=shift)
    with pytest.raises(ValueError, match="shift must fit in int64"):
        mask_boundary_labels(labels, [2, 3], shift=2**63)


def test_labels_of_any_shape(device):
    flat = torch.arange(10, 16, device=device)
    expected = mask_boundary_labels(flat, [2, 3])
    for shape in ((1, 6), (2, 3), (6,)):
        masked = mask_boundary_labels(flat.reshape(shape), [2, 3])
        assert masked.shape == shape
        assert torch.equal(masked.flatten(), expected)


def test_wrong_labels_are_refused(device):
    labels = torch.arange(6, device=device)
    with pytest.raises(TypeError, match="labels must be int32 or int64, got torch.float32"):
        mask_boundary_labels(labels.float(), [2, 3])
    with pytest.raises(TypeError, match="labels must be a tensor, got list"):
        mask_boundary_labels(labels.tolist(), [2, 3])
    with pytest.raises(TypeError, match="lengths must be ints or an integer tensor, got None"):
        mask_boundary_labels(labels, None)
    with pytest.raises(ValueError, match="total_tokens = 7.*6"):
        mask_boundary_labels(labels, PackedLayout.from_lengths([2, 3], 7))
    with pytest.raises(ValueError, match="lengths must sum to at most total_tokens = 6, got 7"):
        mask_boundary_labels(labels, [4, 3])
    with pytest.raises(ValueError, match=r"lengths\[1\] = -3"):
        mask_boundary_labels(labels, [4, -3])
    with pytest.raises(ValueError, match="labels must be contiguous"):
        mask_boundary_labels(labels.reshape(2, 3).t(), [2, 3])
    for wrong, kind in ((labels.to_sparse(), "torch.sparse_coo"), (nested(labels), "nested")):
        with pytest.raises(TypeError, match=f"labels must be a dense tensor, got a {kind} one"):
            mask_boundary_labels(wrong, [2, 3])


def nested(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor([values])


def test_collator_literal_case():
    batch = PackingCollator(total_tokens=6)([A, B])
    assert set(batch) == {"input_ids", "labels", "position_ids", "packed"}
    assert as_lists(batch) == {
        "input_ids": [5, 6, 7, 8, 9, 0],
        "labels": [-100, 6, -100, 8, 9, -100],
        "position_ids": [0, 1, 0, 1, 2, 0],
    }
    for key in ("input_ids", "labels", "position_ids"):
        assert (batch[key].shape, batch[key].dtype) == ((1, 6), torch.int64)
    packed = batch["packed"]
    assert isinstance(packed, PackedLayout)
    assert (packed.lengths.tolist(), packed.total_tokens, packed.device.type) == ([2, 3], 6, "cpu")


@given(
    examples=example_lists(),
    total_tokens=st.sampled_from([None, 60, 64]),
    multiple=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from([list, torch.tensor, np.array, tuple]),
    pad_token=st.sampled_from([0, 3]),
)
def test_any_examples(examples, total_tokens, multiple, kind, pad_token):
    collate = PackingCollator(
        total_tokens=total_tokens, total_multiple=multiple, pad_token_id=pad_token
    )
    batch = collate([{key: kind(values) for key, values in ex.items()} for ex in examples])
    lengths = [len(example["input_ids"]) for example in examples]
    total = total_tokens if total_tokens is not None else sum(lengths)
    while total % multiple != 0:
        total += 1
    fills = {"input_ids": pad_token, "labels": -100}
    assert as_lists(batch) == reference.collate(examples, total, fills)
    assert (batch["packed"].lengths.tolist(), batch["packed"].total_tokens) == (lengths, total)


def test_rows_of_one_length_have_one_shape():
    # Compiled code gets one shape, whatever the number of sequences.
    collate = PackingCollator(total_tokens=8)
    shapes = {
        (batch["input_ids"].shape, batch["packed"].cu_seqlens_static.shape)
        for batch in (collate([A]), collate([A, B]), collate([A] * 4))
    }
    assert shapes == {((1, 8), (9,))}


def test_other_keys_are_concatenated():
    examples = [
        {**A, "weight": [0.5, 1.0], "image": torch.ones(2, 3)},
        {**B, "weight": [2.0, 3.0, 4.0], "image": torch.full((3, 3), 2.0)},
    ]
    batch = PackingCollator(total_tokens=6)(examples)
    assert batch["weight"].tolist() == [[0.5, 1, 2, 3, 4, 0]]
    assert batch["weight"].dtype == torch.float32
    assert batch["image"].shape == (1, 6, 3)
    assert batch["image"][0, :, 0].tolist() == [1, 1, 2, 2, 2, 0]


def test_made_anew():
    """The examples' own labels are masked too; their tensors are not changed."""
    ids, labels = torch.tensor([5, 6]), torch.tensor([5, -100])
    example = {"input_ids": ids, "labels": labels, "position_ids": [0, 1]}
    batch = PackingCollator()([example, example])
    assert as_lists(batch)["position_ids"] == [0, 1, 0, 1]
    assert as_lists(batch)["labels"] == [-100, -100, -100, -100]
    batch["input_ids"].zero_()
    assert (ids.tolist(), labels.tolist()) == ([5, 6], [5, -100])
    one = PackingCollator()([{"input_ids": ids}])
    one["input_ids"].zero_(), one["labels"].zero_()
    assert ids.tolist() == [5, 6]


def test_attention_mask_of_ones_is_dropped_and_others_are_refused():
    masked = [{**A, "attention_mask": [1, 1]}, {**B, "attention_mask": torch.ones(3).long()}]
    assert "attention_mask" not in PackingCollator()(masked)
    masked[1]["attention_mask"] = [1, 0, 1]
    with pytest.raises(ValueError, match=r"attention_mask.*examples\[1\]"):
        PackingCollator()(masked)


@pytest.mark.parametrize(
    ("options", "examples", "error", "message"),
    [
        ({"capacity": 2}, [A, B], ValueError, r"capacity = 2.*examples\[1\].*3"),
        ({"total_tokens": 2}, [A, B], ValueError, r"capacity = 2.*examples\[1\].*3"),
        ({"capacity": 4}, [A, B], ValueError, r"capacity = 4.*5"),
        ({"capacity": 4, "total_tokens": 8}, [A, B], ValueError, "capacity = 4.*5"),
        ({}, [], ValueError, "examples must not be empty"),
        ({}, [A, {"input_ids": []}], ValueError, r"examples\[1\].*no tokens"),
        ({}, [{"labels": [1]}], ValueError, "input_ids"),
        ({}, [A, {**B, "labels": [7, 8, 9]}], ValueError, r"examples\[1\].*labels"),
        ({}, [{**A, "labels": [5, 6]}, B], ValueError, r"examples\[1\].*labels"),
        ({}, [A, {**B, "other": [1, 2, 3]}], ValueError, r"examples\[1\].*other"),
        ({}, [A, {"input_ids": [1, 2], "attention_mask": [1, 1]}], ValueError, r"examples\[1\]"),
        ({}, [{**A, "labels": [5]}], ValueError, r"labels.*examples\[0\].*2 tokens and 1"),
        ({}, [{**A, "other": [1, 2, 3]}], ValueError, r"other.*examples\[0\].*2 tokens and 3"),
        ({}, [{**A, "text": "ab"}], TypeError, r"text.*examples\[0\]"),
        ({}, [{**A, "index": 3}], TypeError, r"index.*examples\[0\]"),
        ({}, [{"input_ids": [[5, 6]]}], TypeError, r"input_ids.*examples\[0\]"),
        ({}, [{"input_ids": [5.5, 6.0]}], TypeError, r"input_ids.*examples\[0\]"),
        ({}, [{**A, "labels": [5.5, 6.0]}], TypeError, r"labels.*examples\[0\]"),
        ({"max_seqs": 1}, [A, B], ValueError, "examples must be at most max_seqs = 1, got 2"),
        (
            {},
            [A, {"input_ids": torch.tensor([5, 6]).to_sparse()}],
            TypeError,
            r"input_ids of examples\[1\] must be a dense tensor, got a torch.sparse_coo one",
        ),
        (
            {},
            [{"input_ids": torch.nested.nested_tensor([torch.tensor([5, 6])])}],
            TypeError,
            r"input_ids of examples\[0\] must be a dense tensor, got a nested one",
        ),
    ],
)
def test_wrong_examples_are_named(options, examples, error, message):
    with pytest.raises(error, match=message):
        PackingCollator(**options)(examples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity.*0"),
        ({"total_tokens": -1}, "total_tokens.*-1"),
        ({"total_multiple": 0}, "total_multiple.*0"),
        ({"max_seqs": 0}, "max_seqs must be at least 1, got 0"),
        ({"total_tokens": 10, "total_multiple": 4}, "total_tokens.*total_multiple = 4.*10"),
        ({"capacity": 9, "total_tokens": 8}, "capacity.*total_tokens = 8.*9"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator(**options)


def test_default_device_does_not_move_a_batch():
    with torch.device("meta"):
        batch = PackingCollator(total_tokens=6)([A, B])
    assert as_lists(batch)["labels"] == [-100, 6, -100, 8, 9, -100]
    assert batch["packed"].lengths.tolist() == [2, 3]


def test_options_are_keywords_and_kept():
    collate = PackingCollator(total_tokens=8)
    assert (collate.capacity, collate.total_tokens, collate.total_multiple) == (8, 8, 1)
    with pytest.raises(TypeError):
        PackingCollator(8)
    exactly = PackingCollator(capacity=5)([A, B])
    assert exactly["packed"].total_tokens == 5


def test_rows_hold_at_most_max_seqs_sequences():
    """It is also the capacity of the layout, whatever the row's length."""
    collate = PackingCollator(max_seqs=3, total_multiple=4)
    for examples in ([A], [A, B], [A, A, B]):
        packed = collate(examples)["packed"]
        assert packed.cu_seqlens_static.tolist()[: len(examples) + 1] == packed.cu_seqlens.tolist()
        assert packed.cu_seqlens_static.shape == (4,)
    assert PackingCollator(total_tokens=8)([A, B])["packed"].cu_seqlens_static.shape == (9,)
    assert PackingCollator().max_seqs is None
    with pytest.raises(TypeError, match="max_seqs must be an int, got 2.5"):
        PackingCollator(max_seqs=2.5)


def test_positions_of_examples_must_count_from_zero():
    collate = PackingCollator()
    counted = {"input_ids": [5, 6], "position_ids": [0, 1]}
    assert collate([counted, counted])["position_ids"].tolist() == [[0, 1, 0, 1]]
    with pytest.raises(ValueError, match=r"position_ids must count from 0.*examples\[1\]"):
        collate([counted, {"input_ids": [5, 6], "position_ids": [7, 9]}])


def test_ignore_index_must_fit():
    labels = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match="ignore_index must fit"):
        mask_boundary_labels(labels, [2, 3], ignore_index=-(2**40))
    with pytest.raises(TypeError, match="ignore_index must be an int, got 1.5"):
        mask_boundary_labels(labels, [2, 3], ignore_index=1.5)


@pytest.mark.parametrize("of_numpy", [False, True])
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64"])
def test_tokens_of_every_integer_dtype(name, of_numpy):
    np = pytest.importorskip("numpy")
    last = min(torch.iinfo(getattr(torch, name)).max, 2**63 - 1)  # of int64 too
    values = np.array([5, 6, last], dtype=name)
    values = values if of_numpy else torch.from_numpy(values)
    mask = np.ones(3, dtype=name)
    example = dict(input_ids=values, labels=values, attention_mask=mask)
    example["position_ids"] = np.arange(3, dtype=name)
    batch = PackingCollator(total_tokens=4)([example])
    assert batch["input_ids"].tolist() == [[5, 6, last, 0]]
    assert batch["labels"].tolist() == [[-100, 6, last, -100]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_tokens_past_int64_are_refused(key):
    ids = torch.tensor([1, 2**63 - 1, 2**63 - 1]).to(torch.uint64)
    wrong = torch.tensor([3, -1, -2]).view(torch.uint64)
    examples = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids, key: wrong}]
    message = rf"{key} must fit in int64, got {2**64 - 1} in examples\[1\]"
    with pytest.raises(ValueError, match=message):
        PackingCollator()(examples)


@pytest.mark.parametrize("kind", ["uint16", "big-endian", "reversed", "read-only"])
def test_tokens_in_arrays_of_any_kind(kind):
    tokens = {
        "uint16": np.arange(40_000, 40_005, dtype=np.uint16),
        "big-endian": np.arange(40_000, 40_005, dtype=">i4"),
        "reversed": np.arange(40_004, 39_999, -1)[::-1],
        "read-only": np.frombuffer(np.arange(40_000, 40_005).tobytes(), np.int64),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = PackingCollator()([{"input_ids": tokens, "position_ids": np.arange(5)}])
    assert batch["input_ids"].tolist() == [[40_000, 40_001, 40_002, 40_003, 40_004]]
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("make", [list, torch.tensor, lambda p: torch.tensor(p).float()])
def test_positions_that_count_and_those_that_do_not(make):
    for positions in ([0, 1, 2], [0.0, 1.0, 2.0]):
        PackingCollator()([{"input_ids": [5, 6, 7], "position_ids": make(positions)}])
    for positions in ([0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 2.5], [[0, 1, 2]], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match=r"position_ids must count from 0, .*examples\[1\]"):
            examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7]}]
            examples[0]["position_ids"] = make([0, 1, 2])
            PackingCollator()([examples[0], examples[1] | {"position_ids": make(positions)}])


@pytest.mark.parametrize(
    ("examples", "error", "message"),
    [
        ({"input_ids": [5]}, TypeError, "examples must be a list of mappings, got one mapping"),
        ([{"input_ids": [5]}, None], TypeError, r"got NoneType as examples\[1\]"),
        ([{"input_ids": [2**63]}], ValueError, r"input_ids must fit in int64.*examples\[0\]"),
        (
            [{"input_ids": [5], "x": torch.ones(1, n)} for n in (2, 3)],
            ValueError,
            r"x must have one shape per token, got \[3\] in examples\[1\] and \[2\]",
        ),
    ],
)
def test_what_is_no_batch_is_refused(examples, error, message):
    with pytest.raises(error, match=message):
        PackingCollator()(examples)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
def test_tokens_that_are_no_integers_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"input_ids must hold integers, got {dtype}"):
        PackingCollator()([{"input_ids": torch.ones(2).to(dtype)}])


@pytest.mark.parametrize("name", ["capacity", "total_tokens", "total_multiple", "pad_token_id"])
def test_options_are_whole(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got 1.5"):
        PackingCollator(**{name: 1.5})


def test_shifted_labels_of_padding_are_ignored():
    example = {"input_ids": [1, 2, 3], "shift_labels": [2, 3, -100]}
    batch = PackingCollator(total_tokens=5)([example])
    assert batch["shift_labels"].tolist() == [[2, 3, -100, -100, -100]]


def test_keys_of_several_types_are_named():
    examples = [{"input_ids": [1]}, {"input_ids": [1], 1: [1], "b": [1]}]
    with pytest.raises(ValueError, match=r"examples\[1\] has \[1, 'b'\]"):
        PackingCollator()(examples)


# ------------------------------------------------------------------------------- saved batches


def small_tree() -> PackedTree:
    return PackedTree.from_groups([[5, 6, 7], [3]], [[[8, 9], [4]], [[2]]], total_tokens=12)


def part_of_a_row(policy: str) -> PackedLayout:
    packed = PackedLayout.from_lengths([40, 7, 30, 2], 80)
    return cp_partition(packed, cp_plan(packed, 4, policy=policy), 1, group="7")[0]


LAYOUTS = {
    "a row": lambda: PackingCollator()([A, B])["packed"],
    "a row with a tail and room": lambda: PackedLayout.from_lengths([2, 0, 3], 9, max_seqs=5),
    "a long row": lambda: PackedLayout.from_lengths([70_000, 1], 2**17, max_seqs=300),
    "an empty row": lambda: PackedLayout.from_lengths([]),
    "padding between sequences": lambda: PackedLayout.from_lengths([2, 3], 16, segment_multiple=4),
    "a padded batch": lambda: PackedLayout.from_padding_mask(torch.tensor([[1, 1, 0], [1, 0, 0]])),
    "positions": lambda: PackedLayout.from_position_ids(torch.tensor([0, 1, 0])),
    "a rank's part, whole documents": lambda: part_of_a_row("auto"),
    "a rank's part, cut documents": lambda: part_of_a_row("contiguous"),
    "a rank's part, heads exchanged": lambda: part_of_a_row("ulysses"),
    "a tree": lambda: small_tree().layout,
}


def as_plain(state: tuple) -> dict:
    """Return the fields of a layout's state with lists in place of tensors.

    What it was made of, an object, is left out: the tensors follow from it.
    """

    def plain(value):
        if isinstance(value, Tensor):
            return value.dtype, value.device.type, value.tolist()
        return as_plain(value) if isinstance(value, tuple) else value

    fields = state._asdict().items()
    return {name: plain(value) for name, value in fields if name not in ("part", "tree")}


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_load_reads_a_saved_batch_with_weights_only(name, device):
    packed = LAYOUTS[name]().to(device)
    batch = {"input_ids": torch.arange(9)[None], "num_label_tokens": 7, "packed": packed}
    read = torch.load(saved([batch]), weights_only=True)[0]
    assert read["packed"].device == packed.device
    again = pickle.loads(pickle.dumps(packed))
    assert as_plain(read["packed"]._records) == as_plain(again._records)
    assert torch.equal(read["packed"].cu_seqlens, packed.cu_seqlens)
    assert torch.equal(read["input_ids"], batch["input_ids"])
    assert read["num_label_tokens"] == 7


def test_torch_load_reads_a_saved_tree_with_weights_only():
    read = torch.load(saved(small_tree()), weights_only=True)
    assert read.input_ids.tolist() == small_tree().input_ids.tolist()
    assert as_plain(read.layout._records) == as_plain(small_tree().layout._records)
