"""Test models whose images are blocks of tokens that see each other, in packed rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cuseq
from cuseq import _C

transformers = pytest.importorskip("transformers")
from test_other_families import FAMILIES, IMAGE, call_of, make_model  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import masking_utils  # noqa: E402

has_blocks = pytest.mark.skipif(
    not hasattr(masking_utils, "blockwise_overlay"),
    reason="this transformers hides blocks in functions of its models",
)
NEAR = dict(atol=5e-6, rtol=1e-5)  # norms and angles are fp32
KINDS = ["gemma3", "gemma4", "paligemma"]
PICTURE = [IMAGE] * 4

# Documents of one row: ids, and the numbers of their images.
ROWS = {
    "text between images": [
        ([2, 3, 4, *PICTURE, 5, 6], [0]),
        ([11, 12, 13], []),
        ([7, *PICTURE, 8], [1]),
    ],
    "images at both borders": [
        ([2, *PICTURE], [0]),
        ([*PICTURE, 3, 4], [1]),
        ([*PICTURE], [2]),
        ([*PICTURE, 9], [3]),
    ],
    "several images": [
        ([2, *PICTURE, 3, *PICTURE, 4, 5], [0, 1]),
        ([6, *PICTURE, 7, 8, *PICTURE], [2, 3]),
    ],
    "no image": [([2, 3, 4], []), ([5, 6, 7, 8], [])],
}


def call(family: str, documents: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Return the call of a row; the prefix of a PaliGemma document ends with its last image."""
    ids, images = (sum(part, []) for part in zip(*documents, strict=True))
    told = call_of(family, ids, images)
    if family == "paligemma":
        types = []
        for of_document, _ in documents:
            last = max((i for i, token in enumerate(of_document) if token == IMAGE), default=0)
            types += [0] * (last + 1) + [1] * (len(of_document) - last - 1)
        told["token_type_ids"] = torch.tensor([types])
    return told


def layout(documents: list[tuple[list[int], list[int]]], total: int | None = None) -> Any:
    return cuseq.PackedLayout.from_lengths([len(ids) for ids, _ in documents], total)


def gradients(model: torch.nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.fixture
def spans_seen(monkeypatch) -> list[Any]:
    """The spans that each layer's attention gets, None for a layer without; dense ones are not."""
    seen = []
    original = torch.ops.cuseq.varlen_attention
    names = [argument.name for argument in original.default._schema.arguments]

    def watched(*arguments, **options):
        spans = (dict(zip(names, arguments, strict=False)) | options)["spans"]
        seen.append(None if spans is None else spans.unique(dim=0).tolist())
        return original(*arguments, **options)

    monkeypatch.setattr(torch.ops.cuseq, "varlen_attention", watched)
    return seen


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("family", KINDS)
def test_logits_and_gradients_are_those_of_documents_alone(family, row):
    documents = ROWS[row]
    model = make_model(family)
    cuseq.enable(model, qk_norm=False, rope=False)
    alone = torch.cat([model(**call(family, [one])).logits for one in documents], dim=1)
    expected = gradients(model, alone)
    packed = layout(documents)
    told = dict(position_ids=packed.position_ids[None].long())
    for described in (dict(packed=packed), {}):
        logits = model(**call(family, documents), **told, **described).logits
        torch.testing.assert_close(logits, alone, **NEAR)
        found = gradients(model, logits)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, **NEAR)


@has_blocks
@pytest.mark.parametrize("family", KINDS)
def test_both_layers_attend_by_spans(family, spans_seen):
    documents = ROWS["images at both borders"]
    model = make_model(family)
    cuseq.enable(model)
    with torch.no_grad():
        model(**call(family, documents), packed=layout(documents))
    spans = [[1, 5], [5, 9], [11, 15], [15, 19]]
    if family == "paligemma":
        spans[0] = [0, 5]
    assert len(spans_seen) == 2
    assert spans in spans_seen
    assert all(one in (None, spans) for one in spans_seen)  # Gemma 4 has them in windows alone


@has_blocks
@pytest.mark.parametrize("family", KINDS)
def test_a_row_of_text_has_no_spans(family, spans_seen):
    documents = ROWS["no image"]
    model = make_model(family)
    cuseq.enable(model)
    told = call(family, documents)
    if family == "paligemma":
        told["token_type_ids"] = torch.ones_like(told["input_ids"])
    with torch.no_grad():
        model(**told, packed=layout(documents))
    assert spans_seen == [None, None]


@pytest.mark.parametrize("total", [None, 30])
@pytest.mark.parametrize("family", KINDS)
def test_rows_of_a_batch_and_tails(family, total):
    """Two rows of equal length, whose blocks have the same numbers."""
    model = make_model(family)
    cuseq.enable(model, qk_norm=False, rope=False)
    first = [([2, *PICTURE, 5], [0]), ([7, 8, *PICTURE], [1])]
    second = [([3, 4, *PICTURE, 9, 10], [2]), ([*PICTURE], [3])]
    with torch.no_grad():
        alone = [model(**call(family, [one])).logits for one in first + second]
        told = [call(family, row) for row in (first, second)]
        batch = {name: torch.cat([row[name] for row in told]) for name in told[0]}
        packed = layout(first + second)
        if total is not None:  # one row with a tail
            batch = call(family, first + second)
            packed = layout(first + second, total)
            for name in ("input_ids", "token_type_ids", "mm_token_type_ids"):
                if name in batch:
                    tail = total - batch[name].shape[1]
                    batch[name] = torch.nn.functional.pad(batch[name], (0, tail))
        positions = packed.position_ids.long().view(batch["input_ids"].shape)
        logits = model(**batch, packed=packed, position_ids=positions).logits
    found = logits.flatten(0, 1)[:24]
    torch.testing.assert_close(found, torch.cat(alone, 1)[0], **NEAR)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_window_shorter_than_an_image(family):
    """transformers' release decides whether the window cuts the image."""
    documents = ROWS["several images"]
    model = make_model(family)
    model.config.text_config.sliding_window = 2
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 2
    cuseq.enable(model, qk_norm=False, rope=False)
    with torch.no_grad():
        alone = torch.cat([model(**call(family, [one])).logits for one in documents], dim=1)
        packed = layout(documents)
        positions = packed.position_ids[None].long()
        found = model(**call(family, documents), packed=packed, position_ids=positions).logits
    torch.testing.assert_close(found, alone, **NEAR)


@has_blocks
def test_compiled_layers_have_one_graph_for_all_rows_with_images():
    model = make_model("gemma3")
    cuseq.enable(model, rope=False)
    counter = CompileCounterWithBackend("aot_eager")
    text = model.model.language_model
    eager = [layer.forward for layer in text.layers]
    rows = [
        ROWS["text between images"],
        ROWS["several images"],
        [([2, *PICTURE, 3], [0]), ([*PICTURE, 4], [1]), ([5, *PICTURE, 6, 7], [2])],
    ]
    for number, documents in enumerate(rows):
        told = call("gemma3", documents) | dict(packed=layout(documents))
        told["position_ids"] = told["packed"].position_ids[None].long()
        with torch.no_grad():
            for layer, forward in zip(text.layers, eager, strict=True):
                layer.forward = forward
            expected = model(**told).logits
            for layer, forward in zip(text.layers, eager, strict=True):
                layer.forward = torch.compile(
                    forward, backend=counter, dynamic=True, fullgraph=True
                )
            found = model(**told).logits
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        if number == 0:
            graphs = counter.frame_count
    assert counter.frame_count == graphs


def test_checkpointing_repeats_the_same_attention():
    documents = ROWS["several images"]
    model = make_model("gemma3").train()
    cuseq.enable(model, qk_norm=False, rope=False)
    packed = layout(documents)
    told = call("gemma3", documents)
    told |= dict(packed=packed, position_ids=packed.position_ids[None].long(), use_cache=False)
    expected = gradients(model, model(**told).logits)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    found = gradients(model, model(**told).logits)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-10)


# ---------------------------------------------------------------------------------- the arithmetic


def shown_by(blocks: torch.Tensor, lengths: list[int], segments: list[int]) -> torch.Tensor:
    """Return which tokens of the row share a block, a document and a row: bool [tokens, tokens]."""
    rows, seqlen = blocks.shape
    ids, row = blocks.flatten(), torch.arange(rows).repeat_interleave(seqlen)
    document = torch.full((rows * seqlen,), -1)
    begin = 0
    for i, (length, segment) in enumerate(zip(lengths, segments, strict=True)):
        document[begin : begin + length] = i
        begin += segment
    same = torch.ones(rows * seqlen, rows * seqlen, dtype=torch.bool)
    for one in (ids, row, document):
        same &= (one[:, None] == one) & ((one >= 0)[:, None])
    return same


def test_spans_of_drawn_blocks():
    drawn = random.Random(5)
    whole = 0
    for _ in range(400):
        rows, seqlen = drawn.randint(1, 3), drawn.randint(1, 9)
        numbers = torch.zeros(rows * seqlen, dtype=torch.int64)
        for i in range(1, len(numbers)):
            numbers[i] = numbers[i - 1] if drawn.random() < 0.6 else drawn.randint(-2, 9)
        blocks = numbers.view(rows, seqlen)
        segments, lengths, left = [], [], rows * seqlen
        while left and drawn.random() < 0.9:
            segments.append(drawn.randint(0, left))
            lengths.append(drawn.randint(0, segments[-1]))
            left -= segments[-1]
        spans = _C.block_spans(
            blocks, torch.tensor(lengths, dtype=torch.int64), torch.tensor(segments).long()
        )
        expected = shown_by(blocks, lengths, segments)
        in_pieces = any(
            bool(one.nonzero()[-1] - one.nonzero()[0] + 1 != one.sum())
            for one in expected
            if bool(one.any())
        )
        assert (spans is None) == in_pieces
        if spans is None:
            continue
        whole += 1
        found = torch.zeros_like(expected)
        for start, end in spans:
            found[start:end, start:end] = True
        single = torch.eye(len(expected), dtype=torch.bool)  # spans of one token are left out
        assert torch.equal(found | single, expected | single)
        assert spans == sorted(spans)
    assert 100 < whole < 400


@pytest.mark.parametrize(
    ("blocks", "lengths", "segments", "message"),
    [
        (torch.zeros(4).long(), [2], [2], "blocks must be contiguous int64 with 2 dimensions"),
        (torch.zeros(1, 4).int(), [2], [2], "blocks must be contiguous int64"),
        (torch.zeros(1, 4).long(), [2, 2], [2], "segments must have one value for each of 2"),
        (torch.zeros(1, 4).long(), [3], [2], "got length 3 and segment 2 of document 0"),
        (torch.zeros(1, 4).long(), [2, 2], [2, 3], "got length 2 and segment 3 of document 1"),
        (torch.zeros(1, 4).long(), [-1], [2], "got length -1"),
    ],
)
def test_wrong_blocks_are_refused(blocks, lengths, segments, message):
    with pytest.raises(ValueError, match=message):
        _C.block_spans(blocks, torch.tensor(lengths), torch.tensor(segments))


def test_every_family_here_is_one_of_the_others():
    assert set(KINDS) <= set(FAMILIES)
