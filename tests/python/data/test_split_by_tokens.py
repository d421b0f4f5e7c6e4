"""Test split_by_tokens: passes of bounded size with the loss and gradients of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import distributed
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import cuseq

PER_TOKEN = ("input_ids", "labels", "position_ids")
VOCABULARY = 50


def make_batch(lengths: list[int], tail: int = 0, keep: float = 1.0, seed: int = 0) -> dict:
    """Return a row as PackingCollator makes it; only some of the labels count."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        counts = torch.rand(length, generator=generator) < keep
        examples.append({"input_ids": ids, "labels": torch.where(counts, ids, -100)})
    total = sum(lengths) + tail
    return cuseq.PackingCollator(total_tokens=total)(examples)


def naive_passes(lengths: list[int], budget: int) -> list[list[int]]:
    passes: list[list[int]] = []
    for length in lengths:
        if not passes or sum(passes[-1]) + length > budget:
            passes.append([])
        passes[-1].append(length)
    return passes


def parts_of(batch: dict, budget: int, **options) -> list[tuple[dict, torch.Tensor]]:
    return list(cuseq.data.split_by_tokens(batch, budget, **options))


def test_literal_case():
    batch = cuseq.PackingCollator(total_tokens=10)(
        [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}, {"input_ids": [1, 2, 3, 4]}]
    )
    (one, weight), (other, rest) = parts_of(batch, 5)
    assert set(one) == set(other) == set(batch)
    assert one["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert one["labels"].tolist() == [[-100, 6, -100, 8, 9]]
    assert one["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert (one["packed"].lengths.tolist(), one["packed"].total_tokens) == ([2, 3], 5)
    assert other["input_ids"].tolist() == [[1, 2, 3, 4]], "the padding goes away"
    assert other["labels"].tolist() == [[-100, 2, 3, 4]]
    assert other["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert (other["packed"].lengths.tolist(), other["packed"].total_tokens) == ([4], 4)
    assert isinstance(other["packed"], cuseq.PackedLayout)
    assert (float(weight), float(rest)) == (0.5, 0.5)
    for value in (weight, rest):
        assert value.dim() == 0 and value.is_floating_point() and not value.requires_grad


rows = st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.sampled_from([0, 1, 7]))


@given(row=rows, spare=st.integers(0, 30), keep=st.sampled_from([1.0, 0.6]))
def test_any_row(row, spare, keep):
    lengths, tail = row
    batch = make_batch(lengths, tail, keep)
    batch["types"] = torch.arange(sum(lengths) + tail, dtype=torch.int32).unsqueeze(0)
    batch["image"] = torch.randn(1, sum(lengths) + tail, 2, 3)
    budget = max(lengths) + spare
    parts = parts_of(batch, budget)
    passes = naive_passes(lengths, budget)
    assert [part["packed"].lengths.tolist() for part, _ in parts] == passes
    begin = 0
    counted = int((batch["labels"] != -100).sum())
    for (part, weight), of_pass in zip(parts, passes, strict=True):
        end = begin + sum(of_pass)
        assert end - begin <= budget
        assert set(part) == set(batch)
        for key, value in part.items():
            if key == "packed":
                assert (value.total_tokens, value.num_real_tokens) == (sum(of_pass), sum(of_pass))
            else:
                assert value.dtype == batch[key].dtype
                assert torch.equal(value, batch[key][:, begin:end]), key
        if counted > 0:
            share = int((part["labels"] != -100).sum()) / counted
            assert float(weight) == pytest.approx(share, rel=1e-6)
        begin = end
    assert begin == sum(lengths)
    if counted > 0:
        assert float(sum(weight for _, weight in parts)) == pytest.approx(1, rel=1e-6)


@given(row=rows, spare=st.integers(0, 10), multiple=st.sampled_from([2, 4, 8]))
def test_padded_to_a_multiple(row, spare, multiple):
    lengths, tail = row
    batch = make_batch(lengths, tail)
    budget = -(-(max(lengths) + spare) // multiple) * multiple
    parts = parts_of(batch, budget, total_multiple=multiple)
    assert [part["packed"].lengths.tolist() for part, _ in parts] == naive_passes(lengths, budget)
    begin = 0
    for part, _ in parts:
        tokens, total = part["packed"].num_real_tokens, part["packed"].total_tokens
        assert tokens <= total < tokens + multiple and total % multiple == 0
        assert total <= budget
        for key in PER_TOKEN:
            assert part[key].shape == (1, total)
            assert torch.equal(part[key][:, :tokens], batch[key][:, begin : begin + tokens])
        assert part["labels"][:, tokens:].eq(-100).all()
        assert part["position_ids"][0, tokens:].tolist() == list(range(total - tokens))
        begin += tokens
    if any(n > 1 for n in lengths):
        assert float(sum(weight for _, weight in parts)) == pytest.approx(1, rel=1e-6)


def test_positions_of_several_planes_are_padded():
    packed = cuseq.PackedLayout.from_lengths([3, 2])
    positions = torch.arange(15).view(1, 5, 3)
    batch = {"packed": packed, "labels": torch.ones(1, 5).long(), "position_ids": positions}
    first, second = (part for part, _ in cuseq.data.split_by_tokens(batch, 4, total_multiple=4))
    assert torch.equal(first["position_ids"][:, :3], positions[:, :3])
    assert first["position_ids"][0, 3].tolist() == [0, 0, 0]
    assert torch.equal(second["position_ids"][:, :2], positions[:, 3:])
    assert second["position_ids"][0, 2:].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.float16], ids=str)
def test_positions_of_any_dtype_go_on_in_padding(dtype):
    batch = cuseq.PackingCollator()([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    batch["position_ids"] = batch["position_ids"].to(dtype)
    for part, _ in cuseq.data.split_by_tokens(batch, 4, total_multiple=8):
        tokens = part["packed"].num_real_tokens
        expected = [*range(tokens), *range(8 - tokens)]
        assert part["position_ids"].dtype == dtype
        assert part["position_ids"].int().tolist() == [expected]


def test_one_pass_where_the_budget_holds_all():
    batch = make_batch([3, 4, 5], tail=4)
    ((part, weight),) = parts_of(batch, 12)
    assert part["packed"].lengths.tolist() == [3, 4, 5]
    assert float(weight) == 1


def test_views_and_not_copies():
    batch = make_batch([3, 4, 5])
    for part, _ in parts_of(batch, 7):
        for key in ("input_ids", "labels"):
            of_part, of_batch = part[key].untyped_storage(), batch[key].untyped_storage()
            assert of_part.data_ptr() == of_batch.data_ptr()


def test_lazily():
    """A pass is made when it is requested."""
    batch = make_batch([3, 4, 5, 2])
    passes = cuseq.data.split_by_tokens(batch, 5)
    assert isinstance(passes, Iterator)
    part, _ = next(passes)
    assert part["packed"].lengths.tolist() == [3]


def test_the_batch_is_left_as_it_was():
    batch = make_batch([3, 4, 5], tail=2)
    before = {key: value.clone() for key, value in batch.items() if key != "packed"}
    packed = batch["packed"]
    parts_of(batch, 7, total_multiple=8)
    assert batch["packed"] is packed and set(batch) == {*before, "packed"}
    assert all(torch.equal(batch[key], value) for key, value in before.items())


# Loss and gradients.


class Guess(nn.Module):
    """Attention inside the sequences; the loss is the mean or the sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, distributed.DIM, dtype=torch.float64)
        self.blocks = distributed.make_model(2)
        self.head = nn.Linear(distributed.DIM, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids, labels, packed, position_ids):
        assert torch.equal(position_ids[0], packed.position_ids)
        hidden = self.tokens(input_ids)
        logits = self.head(self.blocks(hidden, packed))
        targets = labels[0, 1:]
        loss = cross_entropy(logits[0, :-1], targets, reduction="sum", ignore_index=-100)
        return loss / (targets != -100).sum().clamp(min=1)


def whole(model: nn.Module, batch: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return loss.detach(), distributed.gradients(model)


def split(model: nn.Module, batch: dict, budget: int, **options):
    model.zero_grad()
    total = 0
    for part, weight in cuseq.data.split_by_tokens(batch, budget, **options):
        loss = model(**part) * weight
        loss.backward()
        total = total + loss.detach()
    return total, distributed.gradients(model)


def check_same(one, other, tolerance: float = 1e-7) -> None:
    # A weight in float32 is exact to 6e-8.
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=0)
    for grad, expected in zip(one[1], other[1], strict=True):
        error = (grad - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < tolerance


@pytest.mark.parametrize("options", [{}, {"total_multiple": 8}], ids=["exact", "padded"])
@pytest.mark.parametrize("budget", [9, 16, 24, 64])
@pytest.mark.parametrize("tail", [0, 5])
def test_loss_and_gradients_are_those_of_the_whole(tail, budget, options):
    batch = make_batch([3, 9, 4, 1, 8, 8, 2, 5], tail, keep=0.7)
    model = Guess()
    check_same(split(model, batch, budget, **options), whole(model, batch))


@settings(max_examples=15)
@given(row=rows, spare=st.integers(0, 12), keep=st.sampled_from([1.0, 0.5]))
def test_loss_and_gradients_of_any_row(row, spare, keep):
    lengths, tail = row
    batch = make_batch(lengths, tail, keep)
    if not (batch["labels"] != -100).any():
        return
    model = Guess()
    check_same(split(model, batch, max(lengths) + spare), whole(model, batch))


def test_passes_without_labels_have_no_weight():
    """A prompt alone, or one token, has loss weight zero, whatever the other passes hold."""
    examples = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]},
        {"input_ids": [8, 9, 4], "labels": [8, 9, 4]},
        {"input_ids": [3], "labels": [3]},
    ]
    batch = cuseq.PackingCollator()(examples)
    assert [float(weight) for _, weight in parts_of(batch, 3)] == [0, 1, 0]


def test_no_label_counts_at_all():
    batch = cuseq.PackingCollator()([{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2)
    assert [float(weight) for _, weight in parts_of(batch, 3)] == [0, 0]


def test_transformers(request):
    """The documentation's lines, with a model that takes the mean or gets the number of targets."""
    transformers = pytest.importorskip("transformers")
    import cuseq.integrations.transformers

    cuseq.integrations.transformers.register()
    request.addfinalizer(cuseq.integrations.transformers.unregister)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="cuseq", dtype=torch.float64
    )
    batch = make_batch([3, 9, 4, 8, 8, 2, 5], tail=3, keep=0.8)
    model(**batch).loss.backward()
    expected = distributed.gradients(model)
    counted = (batch["labels"] != -100).sum()
    for weighed in (True, False):
        model.zero_grad()
        for part, weight in cuseq.data.split_by_tokens(batch, 16):
            if weighed:
                (model(**part).loss * weight).backward()
            else:
                model(**part, num_items_in_batch=counted).loss.backward()
        for grad, right in zip(distributed.gradients(model), expected, strict=True):
            # Norms and softmax are in float32 there.
            assert (grad - right).norm() < 1e-5 * right.norm().clamp(min=1e-30)


# What is refused.


def test_a_sequence_above_the_budget_is_named():
    batch = make_batch([3, 9, 4, 10])
    with pytest.raises(ValueError, match=r"budget.*\b1\b.*\b9\b"):
        parts_of(batch, 8)
    assert len(parts_of(batch, 10)) == 4


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        (0, {}, "budget.*0"),
        (-4, {}, "budget.*-4"),
        (8, {"total_multiple": 0}, "total_multiple.*0"),
        (8, {"total_multiple": 2**31}, "total_multiple must be at most 2\\^31 - 1"),
    ],
)
def test_wrong_options_are_named(budget, options, message):
    with pytest.raises(ValueError, match=message):
        parts_of(make_batch([3, 4]), budget, **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", 3),
        ("name", "a"),
        ("lengths", torch.tensor([3, 4])),
        ("scale", torch.tensor(1.0)),
        ("attention_mask", torch.ones(7, 7)),
        ("pixels", torch.ones(1, 6)),
        ("rows", torch.ones(2, 7)),
        ("flat", torch.ones(7)),
    ],
)
def test_what_is_not_per_token_is_named(key, value):
    with pytest.raises((TypeError, ValueError), match=key):
        parts_of({**make_batch([3, 4]), key: value}, 5)


@pytest.mark.parametrize("key", ["packed", "labels"])
def test_what_is_missing_is_named(key):
    batch = make_batch([3, 4])
    del batch[key]
    with pytest.raises((KeyError, ValueError), match=key):
        parts_of(batch, 5)


def test_lengths_that_are_on_the_gpu_alone_are_refused(cuda):
    lengths = torch.tensor([3, 4], device=cuda)
    batch = make_batch([3, 4])
    moved = {key: value.to(cuda) for key, value in batch.items()}
    moved["packed"] = cuseq.PackedLayout.from_lengths(lengths, 7)
    with pytest.raises(ValueError, match="packed.*lengths"):
        parts_of(moved, 5)


def test_a_batch_on_the_gpu_is_split_without_waiting(cuda):
    batch = make_batch([3, 9, 4, 1, 8], tail=3, keep=0.7)
    moved = {key: value.to(cuda) for key, value in batch.items()}
    expected = parts_of(batch, 12)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = parts_of(moved, 12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (part, weight), (right, share) in zip(parts, expected, strict=True):
        assert weight.device == part["labels"].device == moved["labels"].device
        assert float(weight) == pytest.approx(float(share))
        for key in PER_TOKEN:
            assert torch.equal(part[key].cpu(), right[key])
        assert part["packed"].device == moved["labels"].device
        assert part["packed"].lengths.tolist() == right["packed"].lengths.tolist()


def test_shifted_labels_of_padding_are_ignored():
    batch = cuseq.PackingCollator()([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    parts = cuseq.data.split_by_tokens(batch, 3, total_multiple=4)
    assert [part["shift_labels"].tolist() for part, _ in parts] == [
        [[6, -100, -100, -100]],
        [[8, 9, -100, -100]],
    ]
