"""Turn documents into rows: tokenise, cut to the maximum length and pack by first fit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from _documents import UserError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig

END_OF_TEXT = "<|endoftext|>"

Tokens = list[int]  # token ids of one document, or of one piece of a long one
Row = list[Tokens]


@dataclass
class FittedSequences:
    """Sequences short enough to train on, and counts of the documents that were not.

    Attributes:
        sequences: token ids, each list at least 2 long.
        too_long: number of documents longer than the maximum length.
        pieces: number of pieces those were split into; 0 if they were dropped.
        too_short: number of one-token sequences, which hold nothing to predict.
    """

    sequences: list[Tokens]
    too_long: int = 0
    pieces: int = 0
    too_short: int = 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; a small corpus gives fewer tokens than `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(texts: list[str], tokenizer: Tokenizer, end_of_text: int | None) -> list[Tokens]:
    """Return the token ids of every text, each followed by the `end_of_text` id if there is one."""
    suffix = [] if end_of_text is None else [end_of_text]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids + suffix for encoding in encodings]


def end_of_text(tokenizer: Tokenizer, config: PretrainedConfig) -> int | None:
    """Return the id of the token that ends a document; None if tokenizer and config name none."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is not None:
        return token
    ids = config.eos_token_id
    return ids[0] if isinstance(ids, list) else ids


def fit_sequences(
    documents: list[Tokens], places: list[str], max_length: int, policy: str
) -> FittedSequences:
    """Cut the documents to at most `max_length` tokens.

    Args:
        documents: token ids.
        places: where each document was found, for messages.
        max_length: tokens of the longest sequence.
        policy: what to do with a longer document: "split", "drop" or "error".

    Raises:
        UserError: the policy is "error" and a document is too long, or nothing is left.
    """
    fitted = FittedSequences([])
    for document, place in zip(documents, places):
        pieces = [document]
        if len(document) > max_length:
            fitted.too_long += 1
            pieces = _shorten(document, max_length, policy, place)
            fitted.pieces += len(pieces)
        fitted.sequences += [piece for piece in pieces if len(piece) > 1]
        fitted.too_short += sum(len(piece) == 1 for piece in pieces)
    if not fitted.sequences:
        raise UserError(
            f"no document is left: {fitted.too_long} are longer than {max_length} tokens, "
            f"{fitted.too_short} have a single one"
        )
    return fitted


def _shorten(document: Tokens, max_length: int, policy: str, place: str) -> list[Tokens]:
    if policy == "error":
        raise UserError(
            f"{place}: a document of {len(document)} tokens, at most {max_length} are allowed; "
            "use --long split or --long drop"
        )
    if policy == "drop":
        return []
    return [document[at : at + max_length] for at in range(0, len(document), max_length)]


def pack(sequences: list[Tokens], row_length: int) -> list[Row]:
    """Pack by first fit in the given order, so that every row is a mix of lengths."""
    rows: list[Row] = []
    room: list[int] = []
    for sequence in sequences:
        index = next((i for i, free in enumerate(room) if free >= len(sequence)), len(rows))
        if index == len(rows):
            rows.append([])
            room.append(row_length)
        rows[index].append(sequence)
        room[index] -= len(sequence)
    return rows


def choose_rows(rows: list[Row], steps: int) -> list[Row]:
    """Return one row for each step; all rows are used before any is repeated."""
    # First fit fills the first rows best.
    return list(itertools.islice(itertools.cycle(rows), steps))
