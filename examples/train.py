"""Train a causal language model on the same documents padded, packed, and packed with cuseq.

    python examples/train.py                        # the source files of Python's standard library
    python examples/train.py --data my_texts        # a file or folder of text or JSONL
    python examples/train.py --model my_checkpoint  # a local checkpoint or config folder

Prints a table and writes results.json and results.png. The modes share the initial weights and the
documents of each step, so their losses can be compared step by step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from _documents import Documents, UserError, read_documents
from _figure import draw
from _model import ModelSource, check_fit, local_model, local_tokenizer, qwen3
from _modes import MODES
from _options import parse_options
from _report import print_documents, print_plan, print_table, write_results
from _rows import Tokens, choose_rows, end_of_text, fit_sequences, pack, tokenize, train_tokenizer
from _training import Measurement, TrainingPlan, train_mode
from transformers.utils import logging as transformers_logging

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # the exit code that a shell reports after Ctrl-C

# Enough text to train a tokenizer and to choose documents from, and read within seconds.
MIN_CHARACTERS = 16_000_000
CHARACTERS_PER_TRAINED_TOKEN = 16  # some are in documents that are too long, some in unused rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return the process's exit code."""
    transformers_logging.disable_progress_bar()
    try:
        options = parse_options(__doc__, arguments)
        if options.device.type == "cuda" and options.device.index is not None:
            torch.cuda.set_device(options.device)
        plan = make_plan(options)
        measurements, interrupted = train_modes(options.modes, plan)
        if measurements:
            report(measurements, plan, options)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        measurements, interrupted = [], True
    if interrupted:
        done = "Stopped early." if measurements else "Stopped before anything was measured."
        print(done, file=sys.stderr)
    return EXIT_INTERRUPTED if interrupted else 0


def make_plan(options: argparse.Namespace) -> TrainingPlan:
    """Read and pack the documents, and print how they were treated."""
    trained_tokens = options.steps * options.row_length
    max_characters = max(MIN_CHARACTERS, CHARACTERS_PER_TRAINED_TOKEN * trained_tokens)
    documents = read_documents(options.data, max_characters, options.seed)
    source, tokens = prepare_model(documents, options)
    fitted = fit_sequences(tokens, documents.places, options.max_length, options.long)
    rows = pack(fitted.sequences, options.row_length)
    print_documents(documents, fitted, rows, options)
    plan = TrainingPlan(
        source=source,
        rows=choose_rows(rows, options.steps),
        row_length=options.row_length,
        batch_size=options.batch_size,
        warmup=options.warmup,
        learning_rate=options.learning_rate,
        device=options.device,
        seed=options.seed,
    )
    print_plan(plan)
    return plan


def prepare_model(
    documents: Documents, options: argparse.Namespace
) -> tuple[ModelSource, list[Tokens]]:
    """Return the model to train and the documents' tokens for it."""
    if options.model is None:
        tokenizer = train_tokenizer(documents.texts, options.vocab_size)
        source = qwen3(tokenizer.get_vocab_size(), options.row_length, options.device)
    else:
        source = local_model(options.model)
        vocab_size = min(options.vocab_size, source.config.vocab_size)
        tokenizer = local_tokenizer(options.model) or train_tokenizer(documents.texts, vocab_size)
    tokens = tokenize(documents.texts, tokenizer, end_of_text(tokenizer, source.config))
    check_fit(source, tokens, options.row_length)
    return source, tokens


def train_modes(names: list[str], plan: TrainingPlan) -> tuple[list[Measurement], bool]:
    """Train one mode after the other; return the measurements and whether Ctrl-C ended the run."""
    measurements: list[Measurement] = []
    try:
        for name in names:
            measurement = train_mode(MODES[name], plan)
            if measurement.losses:
                measurements.append(measurement)
            if measurement.interrupted:
                return measurements, True
    except KeyboardInterrupt:
        return measurements, True
    return measurements, False


def report(
    measurements: list[Measurement], plan: TrainingPlan, options: argparse.Namespace
) -> None:
    """Print the table and write the results and the picture."""
    print_table(measurements, plan)
    options.out.mkdir(parents=True, exist_ok=True)
    write_results(options.out / "results.json", measurements, plan, options)
    draw(options.out / "results.png", measurements, plan)
    print(f"Written: results.json and results.png in {options.out}")


if __name__ == "__main__":
    sys.exit(main())
