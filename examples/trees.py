"""Train by DPO in a loop of your own, in which the two answers to a prompt share its computation.

    python examples/trees.py                              # pairs made of Python's own sources
    python examples/trees.py --pairs pairs.jsonl --model Qwen/Qwen3-0.6B

--pairs is a JSONL or Parquet file with the columns `prompt`, `chosen` and `rejected`. Without it
the beginning of a document is the prompt, its own continuation is chosen, and that of another
document rejected. A step's pairs are one row, a `cuseq.PackedTree`: each prompt once, both answers
below it.
Prints loss, accuracy (pairs whose chosen answer gained more), and how many tokens sharing saves.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from _inputs import Inputs, load, make_model, tokenizer_of
from _ranks import KIND, check_positive, parsed
from _texts import read_rows
from torch import Tensor
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

import cuseq

Pair = tuple[list[int], list[list[int]]]  # a prompt, and the chosen and the rejected answer


@dataclass
class Options(Inputs):
    """What this example takes."""

    pairs: str | None = HfArg(default=None, help="a JSONL or Parquet file of pairs")
    steps: int = HfArg(default=30, help="optimizer steps")
    batch_size: int = HfArg(default=8, help="pairs of a step")
    prompt: int = HfArg(default=96, help="tokens of a prompt of a document")
    answer: int = HfArg(default=32, help="tokens of an answer of a document")
    beta: float = HfArg(default=0.1, help="strength of the reference")
    learning_rate: float = HfArg(default=1e-4, help="of AdamW")
    seed: int = HfArg(default=0, help="of the weights")


def main() -> None:
    (options,) = parsed(__doc__, Options)
    check_positive(options, "steps", "batch_size", "prompt", "answer")
    pairs, vocab_size = read_pairs(options)
    torch.manual_seed(options.seed)
    dtype = torch.bfloat16 if KIND == "cuda" else torch.float32
    policy = make_model(options, vocab_size, KIND, dtype=dtype)
    reference = copy.deepcopy(policy).requires_grad_(False)
    print(cuseq.enable(policy))
    cuseq.enable(reference)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.learning_rate)
    for step in range(options.steps):
        begin = step * options.batch_size % len(pairs)
        tree = cuseq.PackedTree.from_groups(*zip(*pairs[begin : begin + options.batch_size]))
        tree = tree.to(KIND)
        with torch.no_grad():
            before = logprobs(reference, tree)
        gains = logprobs(policy, tree) - before  # [pairs, 2]
        margin = options.beta * (gains[:, 0] - gains[:, 1])
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        samples, unique = tree.samples.total_tokens, tree.layout.total_tokens
        print(
            f"step {step + 1:3}  loss {loss.item():.4f}  accuracy "
            f"{(margin > 0).float().mean().item():.2f}  {unique:,} tokens instead of {samples:,}"
        )


def logprobs(model: PreTrainedModel, tree: cuseq.PackedTree) -> Tensor:
    """Return the log-probability of each answer, `[pairs, 2]`."""
    rows, labels, by_sample = tree.targets
    hidden = model.get_decoder()(
        input_ids=tree.input_ids, position_ids=tree.position_ids, packed=tree.layout
    ).last_hidden_state[0]
    by_token = cuseq.model_logprobs(model, hidden[rows], labels)
    return cuseq.ops.segment_sum(by_token, by_sample).view(-1, 2)


def read_pairs(options: Options) -> tuple[list[Pair], int]:
    """Return the pairs and the size of the tokenizer's vocabulary."""
    if options.pairs is not None:
        tokenizer = tokenizer_of(options.model, option="--pairs")
        ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        found = []
        for number, row in enumerate(read_rows(options.pairs, "--pairs")):
            texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
            if not all(isinstance(text, str) and text for text in texts):
                raise SystemExit(f"--pairs {options.pairs}: row {number} must have texts prompt, "
                                 f"chosen and rejected, has {row}")  # fmt: skip
            prompt, chosen, rejected = map(ids, texts)
            found.append((prompt, [chosen, rejected]))
        return found, len(tokenizer)
    documents, tokenizer = load(options)
    cut, end = options.prompt, options.prompt + options.answer
    whole = [one["input_ids"] for one in documents if one["length"] >= end]
    if len(whole) < options.batch_size:
        raise SystemExit(f"--data must have {options.batch_size} documents of {end} tokens")
    return [
        (one[:cut], [one[cut:end], other[cut:end]])
        for one, other in zip(whole, whole[1:] + whole[:1])
    ], len(tokenizer)


if __name__ == "__main__":
    main()
