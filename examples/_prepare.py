"""Read, tokenise and cut the documents for the model that is to be trained."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from _documents import Documents, read_documents
from _model import ModelSource, check_fit, find_model, find_tokenizer, qwen3
from _rows import FittedSequences, end_of_text, fit_sequences, tokenize, train_tokenizer
from tokenizers import Tokenizer

# Enough text to train a tokenizer and to choose documents from, and read within seconds.
MIN_CHARACTERS = 16_000_000
CHARACTERS_PER_TRAINED_TOKEN = 16  # some are in documents that are too long, some in unused rows


@dataclass(frozen=True)
class Prepared:
    """The model to train and the sequences to train it on.

    Attributes:
        source: builds the model.
        tokenizer: the model's own, or one trained on the documents.
        documents: what was read.
        fitted: their tokens, cut to --max-length.
    """

    source: ModelSource
    tokenizer: Tokenizer
    documents: Documents
    fitted: FittedSequences


def prepare(options: argparse.Namespace, trained_tokens: int) -> Prepared:
    """Read enough documents to train on `trained_tokens` tokens.

    Raises:
        UserError: the documents or the model do not exist, or do not fit each other.
    """
    max_characters = max(MIN_CHARACTERS, CHARACTERS_PER_TRAINED_TOKEN * trained_tokens)
    documents = read_documents(options.data, max_characters, options.seed)
    if options.model is None:
        tokenizer = train_tokenizer(documents.texts, options.vocab_size)
        source = qwen3(tokenizer.get_vocab_size(), options.row_length, options.device)
    else:
        source = find_model(options.model)
        vocab_size = min(options.vocab_size, source.config.get_text_config().vocab_size)
        tokenizer = find_tokenizer(options.model) or train_tokenizer(documents.texts, vocab_size)
    tokens = tokenize(documents.texts, tokenizer, end_of_text(tokenizer, source.config))
    check_fit(source, tokens, options.row_length)
    fitted = fit_sequences(tokens, documents.places, options.max_length, options.long)
    return Prepared(source, tokenizer, documents, fitted)
