"""Train by GRPO with TRL; the samples of a prompt are one tree, which computes the prompt once.

    python examples/grpo.py --model Qwen/Qwen3-0.6B --questions questions.jsonl --output_dir run
    python examples/grpo.py --max_steps 300               # a tiny model learns, a minute on a CPU
    python examples/grpo.py --max_steps 300 --no_packed   # the same as TRL computes it, padded

--questions is a data set of the Hub, or a JSONL or Parquet file, with the columns `prompt` (text or
messages) and `answer` (text): a completion that has the answer is worth 1. Without it the prompt is
a row of digits and the answer its first. Other options are GRPOConfig's: --max_completion_length,
--num_generations, ... SIGTERM ends the run after a step, with a checkpoint.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import _ranks
import _runs
import datasets
import torch
import transformers
from _inputs import tokenizer_of
from _ranks import Defaults
from _texts import read_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.hf_argparser import HfArg
from trl import GRPOConfig, GRPOTrainer

import cuseq

DIGITS, LONGEST = "0123456789", 40  # most digits of a prompt


@dataclass
class Options:
    """What this example takes beside GRPOConfig's options."""

    model: str | None = HfArg(
        default=None,
        help="a name on the Hub or a checkpoint's folder (default: 0.1 million random weights)",
    )
    questions: str | None = HfArg(
        default=None, help="a data set of the Hub, or a JSONL or Parquet file"
    )
    packed: bool = HfArg(default=True, help="compute by cuseq (default), or --no_packed")
    micro_batch_tokens: int | None = HfArg(
        default=None, help="most tokens that are computed at once"
    )


@dataclass
class Arguments(Defaults, GRPOConfig):
    """GRPOConfig's options, with other defaults."""

    output_dir: str | None = HfArg(default="run_grpo", help="folder of the run")
    per_device_train_batch_size: int = HfArg(default=64, help="samples of a batch")


def main() -> None:
    options, args = _ranks.begin(__doc__, Options, Arguments)
    if (options.model is None) != (options.questions is None):
        raise SystemExit("--model and --questions must be given together")
    checkpoint = _runs.given_checkpoint(args)
    torch.manual_seed(args.seed)
    if options.questions is None:
        questions, tokenizer, model = a_task_of_digits(args.seed)
        args.max_completion_length, args.learning_rate = 4, 1e-3
    else:
        questions = read_rows(options.questions, "--questions", ("prompt", "answer"))
        model = options.model
        tokenizer = tokenizer_of(model, option="--questions")
    trainer = GRPOTrainer(
        model,
        reward_funcs=has_answer,
        args=args,
        train_dataset=questions,
        processing_class=tokenizer,
    )
    if options.packed:
        _ranks.say(str(cuseq.enable(trainer, micro_batch_tokens=options.micro_batch_tokens)))
    _runs.train(trainer, checkpoint, "--resume_from_checkpoint")


def has_answer(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    """Return the reward of each completion, which is a text, or messages."""
    said = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(right in text) for text, right in zip(said, answer)]


def a_task_of_digits(seed: int) -> tuple[datasets.Dataset, Any, transformers.PreTrainedModel]:
    """Return questions, their tokenizer, and a Qwen3 of 0.1 million random weights."""
    rng = random.Random(seed)
    rows = [rng.choices(DIGITS, k=rng.randint(1, LONGEST)) for _ in range(4096)]
    questions = [{"prompt": " ".join([*row, "="]), "answer": row[0]} for row in rows]
    words = {word: number for number, word in enumerate([*DIGITS, "=", "<end>", "<pad>"])}
    by_words = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_words, eos_token="<end>", pad_token="<pad>"
    )
    config = transformers.Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.1,
        pad_token_id=words["<pad>"], eos_token_id=words["<end>"], bos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    return datasets.Dataset.from_list(questions), tokenizer, model


if __name__ == "__main__":
    main()
