"""The checks of one family: what an enabled model computes against the model before `enable`.

Each check takes two copies of one model, `stock` and `enabled`, and returns None or what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import cuseq
from cuseq.debug.families.models import VOCAB

LENGTHS = (5, 1, 9, 3)
_OTHER_LENGTHS = (2, 7, 6, 3)
_TOLERANCE = 1e-3  # relative to the largest number
_NEW_TOKENS = 4

Check = Callable[[PreTrainedModel, PreTrainedModel], str | None]


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Tensor]:
    """Return random documents `[1, n]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (1, n), generator=generator) for n in lengths]


def packed_batch(docs: list[Tensor]) -> dict[str, Any]:
    """Return the batch that holds the documents in one row, without labels."""
    batch = cuseq.PackingCollator()([{"input_ids": doc[0].tolist()} for doc in docs])
    return {name: value for name, value in batch.items() if name != "labels"}


def packed(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare a packed row of the enabled model with the stock model's documents one by one."""
    docs = documents()
    expected, expected_grads = _with_gradients(stock, lambda: _one_by_one(stock, docs))
    found, grads = _with_gradients(enabled, lambda: _packed_logits(enabled, docs))
    return _difference(found, expected) or _gradient_difference(grads, expected_grads)


def separate(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Change one document of a row and see whether the logits of others change."""
    docs = documents()
    with torch.no_grad():
        before = _packed_logits(enabled, docs).split(LENGTHS)
        for i in (0, 2, len(docs) - 1):
            changed = [*docs[:i], (docs[i] - 3 + 17) % (VOCAB - 3) + 3, *docs[i + 1 :]]
            after = _packed_logits(enabled, changed).split(LENGTHS)
            for j, (old, new) in enumerate(zip(before, after, strict=True)):
                if j != i and _difference(new, old):
                    return f"document {i} reaches document {j}"
    return None


def dense(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare a batch of two rows of equal length, with gradients."""
    rows = torch.cat(documents((7, 7)))
    results = [_with_gradients(model, partial(_logits, model, rows)) for model in (stock, enabled)]
    (expected, expected_grads), (found, grads) = results
    return _difference(found, expected) or _gradient_difference(grads, expected_grads)


def padded(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare the real tokens of a padded batch, padded on the right and on the left."""
    for side in ("right", "left"):
        ids, mask = _pad(documents((4, 7)), side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            expected, found = (
                model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
                ).logits[mask.bool()]
                for model in (stock, enabled)
            )
        wrong = _difference(found, expected)
        if wrong:
            return f"padded on the {side}: {wrong}"
    return None


def generated(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare greedy continuations of a padded batch."""
    if not hasattr(stock, "generate") or not stock.can_generate():
        return None
    ids, mask = _pad(documents((4, 7)), "left")
    options = dict(max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False)
    expected = stock.generate(ids, attention_mask=mask, **options)
    found = enabled.generate(ids, attention_mask=mask, **options)
    return None if torch.equal(found, expected) else "other tokens"


def checkpointed(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare gradients of a packed row with and without gradient checkpointing."""
    docs = documents()
    if not enabled.supports_gradient_checkpointing:
        return None
    with _training(enabled):
        expected, expected_grads = _with_gradients(enabled, lambda: _packed_logits(enabled, docs))
        enabled.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            found, grads = _with_gradients(enabled, lambda: _packed_logits(enabled, docs))
        finally:
            enabled.gradient_checkpointing_disable()
    return _difference(found, expected) or _gradient_difference(grads, expected_grads)


def compiled(stock: PreTrainedModel, enabled: PreTrainedModel) -> str | None:
    """Compare two packed rows of the compiled enabled model with the same in eager code."""
    torch._dynamo.reset()
    run = torch.compile(enabled, backend="aot_eager")
    for lengths in (LENGTHS, _OTHER_LENGTHS):
        docs = documents(lengths)
        eager = partial(_packed_logits, enabled, docs)
        expected, expected_grads = _with_gradients(enabled, eager)
        found, grads = _with_gradients(enabled, partial(_packed_logits, run, docs))
        wrong = _difference(found, expected) or _gradient_difference(grads, expected_grads)
        if wrong:
            return wrong
    return None


CHECKS: dict[str, Check] = {
    "packed": packed,
    "separate": separate,
    "dense": dense,
    "padded": padded,
    "generate": generated,
    "checkpoint": checkpointed,
    "compile": compiled,
}
"""The checks by name. "packed" and "separate" decide whether documents leak into each other."""


def _one_by_one(model: PreTrainedModel, docs: list[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=doc, use_cache=False).logits[0] for doc in docs])


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _packed_logits(model: Callable[..., Any], docs: list[Tensor]) -> Tensor:
    logits: Tensor = model(**packed_batch(docs), use_cache=False).logits[0]
    return logits


def _with_gradients(
    model: PreTrainedModel, run: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of their sum with fixed random weights."""
    model.zero_grad()
    logits = run()
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(logits.shape[-2:], generator=generator)
    (logits * weight).sum().backward()
    named = model.named_parameters()
    grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return logits.detach(), grads


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    scale = expected.abs().max().clamp(min=1e-6) if expected.numel() else torch.ones(())
    off = ((found - expected).abs().max() / scale).item() if expected.numel() else 0.0
    return None if off <= _TOLERANCE else f"logits differ by {off:.1e}"


def _gradient_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        return f"gradients of {names[0]} are there in one of the two"
    largest = max((grad.abs().max().item() for grad in expected.values()), default=0.0)
    for name, grad in expected.items():
        scale = max(grad.abs().max().item(), 1e-3 * largest, 1e-6)
        off = ((found[name] - grad).abs().max() / scale).item()
        if not off <= 10 * _TOLERANCE:
            return f"gradients of {name} differ by {off:.1e}"
    return None


def _pad(docs: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(doc.shape[1] for doc in docs)
    ids = torch.zeros(len(docs), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, doc in enumerate(docs):
        where = slice(0, doc.shape[1]) if side == "right" else slice(longest - doc.shape[1], None)
        ids[row, where], mask[row, where] = doc[0], 1
    return ids, mask


@contextmanager
def _training(model: PreTrainedModel) -> Iterator[None]:
    model.train()
    try:
        yield
    finally:
        model.eval()
