"""The documents of a check: parse the user's examples and change single tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.arguments import check_tensor, shown
from cuseq._base.labels import IGNORE_INDEX


@dataclass(frozen=True)
class Document:
    """One example.

    Attributes:
        ids: int64 `[n]`, on the host.
        labels: int64 `[n]`, on the host, unshifted.
        others: the example's other keys, for collators and `forward`.
        own_labels: whether the example came with labels.
        kept: tokens that must stay what they are: a model counts those of an image.
    """

    ids: Tensor
    labels: Tensor
    others: dict[str, Any]
    own_labels: bool
    kept: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """Return the number of tokens in the loss; a document's first token is not a target."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())

    def example(self) -> dict[str, Any]:
        """Return the example for a collator, as lists, which every collator accepts."""
        example = {**self.others, "input_ids": self.ids.tolist()}
        if self.own_labels:
            example["labels"] = self.labels.tolist()
        return example

    def per_token(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Return the other keys in `keys` that hold one number per token."""
        return {key: value for key, value in self._numbers(keys) if value.shape == self.ids.shape}

    def inputs(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Return the other keys in `keys` that hold tensors of another shape: images."""
        return {
            key: value
            for key, value in self._numbers(keys)
            if value.dim() > 0 and value.shape != self.ids.shape
        }

    def _numbers(self, keys: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the other keys that hold numbers, but mask and positions, which packing makes."""
        for key in self.others.keys() & set(keys) - {"attention_mask", "position_ids"}:
            try:
                yield key, torch.as_tensor(self.others[key])
            except (TypeError, ValueError, RuntimeError):  # not numeric
                continue

    def with_token(self, index: int, token: int) -> Document:
        ids = self.ids.clone()
        ids[index] = token
        return replace(self, ids=ids)


def read_documents(
    examples: Sequence[Mapping[str, Any] | Sequence[int] | Tensor],
    kept: frozenset[int] = frozenset(),
) -> list[Document]:
    """Check the user's examples and read their tokens and labels.

    Args:
        examples: what the user gave.
        kept: tokens that must stay what they are.

    Raises:
        ValueError, TypeError: an example is wrong; the message says which.
    """
    try:
        given = None if isinstance(examples, str | Mapping) else list(examples)
    except (TypeError, RuntimeError):  # a number, a nested tensor or a 0-d tensor
        given = None
    if given is None:
        raise TypeError(f"examples must be a sequence of documents, got {shown(examples)}")
    documents = [replace(_document(example, i), kept=kept) for i, example in enumerate(given)]
    long = [document for document in documents if document.length >= 2]
    if len(long) < 2:
        raise ValueError(
            "examples must have at least two documents of two or more tokens, got lengths "
            f"{[document.length for document in documents]}"
        )
    if not any(document.num_targets for document in documents):
        raise ValueError("examples must have labels to predict, got only -100 after first tokens")
    found = list(_known(documents))
    if len(found) < 2:
        raise ValueError(
            "examples must hold two different tokens besides those of images, since one is changed "
            f"into the other, got only {found}"
        )
    return documents


def boundaries(documents: Sequence[Document]) -> set[int]:
    """Return the tokens that all documents begin or end with; a model may use them as separators.

    Returns none of these if fewer than two other tokens would remain. Tokens of images are always
    among the result.
    """
    firsts, lasts = ({int(document.ids[end]) for document in documents} for end in (0, -1))
    alike = set().union(*(ends for ends in (firsts, lasts) if len(ends) == 1))
    alike = alike if len(_known(documents).keys() - alike) >= 2 else set()
    return alike | documents[0].kept


def two_tokens(documents: Sequence[Document]) -> tuple[int, int]:
    """Return two tokens to substitute: any token can be changed into one of them.

    Both occur in the documents, so the model knows them, and neither is a boundary token.
    """
    edges = boundaries(documents)
    first, second, *_ = (token for token in _known(documents) if token not in edges)
    return first, second


def _known(documents: Sequence[Document]) -> dict[int, None]:
    """Return the tokens that occur and may be changed."""
    ids = torch.cat([document.ids for document in documents]).tolist()
    return dict.fromkeys(token for token in ids if token not in documents[0].kept)


def config_of(model: nn.Module) -> Any:
    """Return the config of a model, or of the one inside a wrapper; None if there is none."""
    return next((m.config for m in model.modules() if hasattr(m, "config")), None)


def text_of(config: Any) -> Any:
    """Return the part of a model's config that is about text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def tokens_of_inputs(config: Any) -> frozenset[int]:
    """Return the tokens that a model's config has for images, videos and audio."""
    text = text_of(config)
    return frozenset(
        value
        for one in (config, text)
        for name, value in (vars(one).items() if hasattr(one, "__dict__") else ())
        if name.endswith(("_token_id", "_token_index"))
        and type(value) is int
        and name not in ("pad_token_id", "bos_token_id", "eos_token_id")
    )


def _document(example: Mapping[str, Any] | Sequence[int] | Tensor, i: int) -> Document:
    if not isinstance(example, Mapping):
        example = {"input_ids": example}
    if "input_ids" not in example:
        raise ValueError(
            f"examples must have input_ids, got {sorted(map(str, example))} in examples[{i}]"
        )
    ids = _tokens(example["input_ids"], "input_ids", i)
    if len(ids) == 0:
        raise ValueError(f"examples must not be empty, but examples[{i}] has no tokens")
    own_labels = example.get("labels") is not None
    labels = _tokens(example["labels"], "labels", i) if own_labels else ids
    if len(labels) != len(ids):
        raise ValueError(
            f"labels must hold one value per token, but examples[{i}] has {len(ids)} tokens and "
            f"{len(labels)} labels"
        )
    others = {key: value for key, value in example.items() if key not in ("input_ids", "labels")}
    return Document(ids, labels, others, own_labels)


def _tokens(values: Any, name: str, i: int) -> Tensor:
    try:
        tokens = torch.as_tensor(values, device="cpu")
        check_tensor(tokens, name)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must hold one integer per token, got {type(values).__name__} in examples[{i}]"
        ) from error
    whole = not tokens.is_floating_point() and not tokens.is_complex()
    if tokens.dim() != 1 or (not whole and tokens.numel() > 0):
        raise TypeError(
            f"{name} must hold one integer per token, got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)} in examples[{i}]"
        )
    return tokens.to(torch.int64, copy=True)  # a copy: the user's tensor may be an inference tensor
