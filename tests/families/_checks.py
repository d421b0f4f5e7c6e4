"""The checks of one family: what a model computes after `enable` against what it did before.

Each check is a generator: it computes what is expected, yields, and goes on when the model is
enabled; it returns None or what is wrong. `enable` replaces functions for the whole process, so no
second copy of the model could stay as it was.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import cuseq
from cuseq.integrations.transformers._padded_batches import (
    check_body,
    pack_batches,
    restore_batches,
)
from cuseq.integrations.transformers._register import hold_registration, release_registration
from cuseq.integrations.transformers._warn import forget_warnings
from cuseq.integrations.transformers.names import NAME
from tests.families.models import VOCAB

LENGTHS = (5, 1, 9, 3)
_OTHER_LENGTHS = (2, 7, 6, 3)
_TOLERANCE = 1e-3  # relative to the largest number
_NEW_TOKENS = 4

Run = Generator[None, None, str | None]
Check = Callable[[PreTrainedModel], Run]
Computed = tuple[Tensor, dict[str, Tensor]]  # logits, and the gradients of parameters


def documents(
    device: torch.device | str = "cpu", lengths: tuple[int, ...] = LENGTHS
) -> list[Tensor]:
    """Return random documents `[1, n]` without special tokens, the same on all devices."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCAB, (1, n), generator=generator) for n in lengths]
    return [doc.to(device) for doc in drawn]


def packed_batch(docs: list[Tensor]) -> dict[str, Any]:
    """Return the batch that holds the documents in one row, without labels."""
    batch = cuseq.PackingCollator()([{"input_ids": doc[0].tolist()} for doc in docs])
    device = docs[0].device
    return {name: value.to(device) for name, value in batch.items() if name != "labels"}


def packed(model: PreTrainedModel) -> Run:
    """Compare a packed row with its documents one by one, with gradients."""
    docs = documents(model.device)
    expected = _with_gradients(model, partial(_one_by_one, model, docs))
    yield
    return _compare(_with_gradients(model, partial(_packed_logits, model, docs)), expected)


def positions(model: PreTrainedModel) -> Run:
    """Compare the same row with packed `position_ids` alone, without `packed`."""
    docs = documents(model.device)
    with torch.no_grad():
        expected = _one_by_one(model, docs)
    yield
    with torch.no_grad():
        found = _logits_by_positions(model, docs)
    return _difference(found, expected)


def separate(model: PreTrainedModel) -> Run:
    """Change one document of a packed row and see whether the logits of others change."""
    docs = documents(model.device)
    yield
    with torch.no_grad():
        before = _packed_logits(model, docs).split(LENGTHS)
        for i in (0, 2, len(docs) - 1):
            changed = [*docs[:i], (docs[i] - 3 + 17) % (VOCAB - 3) + 3, *docs[i + 1 :]]
            after = _packed_logits(model, changed).split(LENGTHS)
            for j, (old, new) in enumerate(zip(before, after, strict=True)):
                if j != i and _difference(new, old):
                    return f"document {i} reaches document {j}"
    return None


def cached(model: PreTrainedModel) -> Run:
    """Compare a packed row that fills a cache with its documents one by one, or see it refused."""
    docs = documents(model.device)
    with torch.no_grad():  # with a cache too: layers of some families share keys through it
        expected = _one_by_one(model, docs, use_cache=True)
    yield
    with torch.no_grad():
        try:
            found = model(**packed_batch(docs), use_cache=True).logits[0]
        except ValueError as refusal:
            if "use_cache=False" not in str(refusal):
                raise
            return None
    return _difference(found, expected)


def dense(model: PreTrainedModel) -> Run:
    """Compare a batch of two rows of equal length, with gradients."""
    rows = torch.cat(documents(model.device, (7, 7)))
    expected = _with_gradients(model, partial(_logits, model, rows))
    yield
    return _compare(_with_gradients(model, partial(_logits, model, rows)), expected)


def padded(model: PreTrainedModel) -> Run:
    """Compare the real tokens of batches that are padded on the right and on the left.

    MiniMax M3 chooses blocks of keys by the tokens of the padding too, which eager attention and
    sdpa, with which an enabled model runs padded batches, leave in different states.
    """
    if model.config.model_type == "minimax_m3_vl_text":
        model.set_attn_implementation("sdpa")
    expected = {side: _padded_logits(model, side) for side in ("right", "left")}
    yield
    for side, logits in expected.items():
        wrong = _difference(_padded_logits(model, side), logits)
        if wrong:
            return f"padded on the {side}: {wrong}"
    return None


def generated(model: PreTrainedModel) -> Run:
    """Compare greedy continuations of two prompts of equal length."""
    expected = _continued(model)
    yield
    return None if torch.equal(_continued(model), expected) else "other tokens"


def checkpointed(model: PreTrainedModel) -> Run:
    """Compare a packed row in training mode with and without gradient checkpointing."""
    yield
    if not model.supports_gradient_checkpointing:
        return None
    run = partial(_packed_logits, model, documents(model.device))
    with _training(model):
        expected = _with_gradients(model, run)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            return _compare(_with_gradients(model, run), expected)
        finally:
            model.gradient_checkpointing_disable()


def compiled(model: PreTrainedModel) -> Run:
    """Compare two packed rows of the compiled model (`aot_eager`) with the same in eager code."""
    yield
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    for lengths in (LENGTHS, _OTHER_LENGTHS):
        docs = documents(model.device, lengths)
        expected = _with_gradients(model, partial(_packed_logits, model, docs))
        wrong = _compare(_with_gradients(model, partial(_packed_logits, run, docs)), expected)
        if wrong:
            return wrong
    return None


def named(model: PreTrainedModel) -> Run:
    """Compare a model made with `attn_implementation="cuseq"`, or see it refused or warned of."""
    wrong = _wrong_by_name(model)
    yield
    return wrong


def in_rows(model: PreTrainedModel) -> Run:
    """Compare a padded batch that the body runs as a row, as in TRL's trainers, with no padding."""
    docs = documents(model.device)
    with torch.no_grad():
        expected = _one_by_one(model, docs)
    yield
    try:
        check_body(model)
    except ValueError:
        return None
    pack_batches(model, False)
    try:
        for side in ("left", "right"):
            ids, mask = _pad(docs, side)
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            wrong = _difference(logits[mask.bool()], expected)
            if wrong:
                return f"{side}: {wrong}"
    finally:
        restore_batches(model)
    return None


CHECKS: dict[str, Check] = {
    "packed": packed,
    "positions": positions,
    "separate": separate,
    "cache": cached,
    "dense": dense,
    "padded": padded,
    "in rows": in_rows,
    "generate": generated,
    "named": named,
    "checkpoint": checkpointed,
    "compile": compiled,
}
"""The checks by name. "packed" and "separate" decide whether documents leak into each other."""


def _one_by_one(model: PreTrainedModel, docs: list[Tensor], use_cache: bool = False) -> Tensor:
    return torch.cat([model(input_ids=doc, use_cache=use_cache).logits[0] for doc in docs])


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _packed_logits(model: Callable[..., Any], docs: list[Tensor]) -> Tensor:
    logits: Tensor = model(**packed_batch(docs), use_cache=False).logits[0]
    return logits


def _logits_by_positions(model: Callable[..., Any], docs: list[Tensor]) -> Tensor:
    logits: Tensor = model(**packed_batch(docs) | {"packed": None}, use_cache=False).logits[0]
    return logits


def _padded_logits(model: PreTrainedModel, side: str) -> Tensor:
    ids, mask = _pad(documents(model.device, (4, 7)), side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits: Tensor = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    return logits[mask.bool()]


def _continued(model: PreTrainedModel) -> Tensor:
    # Without padding: transformers' own eager attention and sdpa differ on it (MiniMax).
    ids = torch.cat(documents(model.device, (7, 7)))
    most = dict(max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False)
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **most)
    return tokens


def _wrong_by_name(model: PreTrainedModel) -> str | None:
    """Return what a model with these weights, made with cuseq's attention, does wrong in silence.

    ValueError when it is made or called, and warnings that begin with "LEAKS", are not silent.
    """
    docs = documents(model.device)
    with torch.no_grad():
        expected = _one_by_one(model, docs), _padded_logits(model, "right")
    runs = {
        "packed": (lambda one: _packed_logits(one, docs), expected[0]),
        "positions": (lambda one: _logits_by_positions(one, docs), expected[0]),
        "padded": (lambda one: _padded_logits(one, "right"), expected[1]),
    }
    hold_registration()
    try:
        try:
            one = type(model)._from_config(
                copy.deepcopy(model.config), attn_implementation=NAME,
                experts_implementation="eager",
            )  # fmt: skip
        except ValueError:
            return None
        one.load_state_dict(model.state_dict())
        one.to(model.device).eval()
        for name, (run, right) in runs.items():
            forget_warnings()
            with torch.no_grad(), warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                try:
                    wrong = _difference(run(one), right)
                except Exception as error:
                    is_refusal = isinstance(error, ValueError) and name != "padded"
                    wrong = None if is_refusal else f"{type(error).__name__}: {error}"
            if wrong and not any(str(one.message).startswith("LEAKS") for one in given):
                return f"{name}: {wrong}"
    finally:
        release_registration()
    return None


def _compare(found: Computed, expected: Computed) -> str | None:
    return _difference(found[0], expected[0]) or _gradient_difference(found[1], expected[1])


def _with_gradients(model: PreTrainedModel, run: Callable[[], Tensor]) -> Computed:
    """Return the logits, and the gradients of their sum with fixed random weights."""
    model.zero_grad()
    logits = run()
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(logits.shape[-2:], generator=generator).to(logits.device)
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
    ids = docs[0].new_zeros(len(docs), longest)
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
