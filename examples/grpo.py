"""Teach a tiny language model by GRPO, with its batches padded and as trees of shared prompts.

    python examples/grpo.py             # a few minutes, on the CPU
    python examples/grpo.py --steps 20  # too few to learn

A prompt is a row of digits, and the task is to say its first digit four times. A program checks the
answers: each right token is a quarter of the reward, and an early end loses the rest. The model
starts from random weights and learns from rewards alone (GRPO, Shao et al. 2024, arXiv:2402.03300;
two updates for each batch of answers, clipped ratios).

Trains twice from the same weights, prompts and random numbers: on padded batches in transformers
alone, and by `cuseq.run_packed(..., tree=True)`, which computes no padding and each prompt once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace as Run

import torch
import transformers
from _ranks import check_positive, parsed
from torch import Tensor
from transformers.hf_argparser import HfArg

import cuseq

GROUP, UPDATES, CLIP = 8, 2, 0.2  # answers to a prompt, updates for them, bound of their ratios
DIGITS, ANSWER = 10, 4  # tokens 0 to 9 are the digits; most tokens of an answer
ASK, END, PAD, VOCABULARY = range(10, 14)

# What a model makes of a batch of ids and its mask: logits [batch, seqlen, vocabulary].
Forward = Callable[[torch.nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Options:
    """What this example takes."""

    steps: int = HfArg(default=200, help="of training")
    prompts: int = HfArg(default=24, help="of a step")
    longest: int = HfArg(default=40, help="most digits of a prompt")
    seed: int = HfArg(default=0, help="of weights and prompts")


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Train both ways, print the comparison and return it."""
    (options,) = parsed(__doc__, Options, given=arguments)
    check_positive(options, "steps", "prompts", "longest")
    padded = train("transformers, padded", make_model(options.seed), padded_forward, options)
    model = make_model(options.seed)
    cuseq.enable(model)
    trees = train("cuseq, trees", model, tree_forward, options)
    for run in (padded, trees):
        first, last = fmean(run.rewards[:10]), fmean(run.rewards[-10:])
        print(f"{run.name:22}  rewards {first:.3f} to {last:.3f}, updates {run.seconds:6.1f} s "
              f"over {run.tokens:,} tokens")  # fmt: skip
    apart = [abs(a - b) for a, b in zip(padded.rewards, trees.rewards)]
    # Rounding can turn one sampled token into another, after which the runs go their own ways.
    same = next((step for step, one in enumerate(apart) if one > 1e-6), len(apart))
    print(
        f"The rewards of {same} of {len(apart)} steps are the same, all differ by at most "
        f"{max(apart):.3f}.\nUpdates by trees are {padded.seconds / trees.seconds:.1f}x as fast."
    )
    return [padded, trees]


def make_model(seed: int) -> transformers.PreTrainedModel:
    """Return a Qwen3 of 0.1 million random weights."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.1,
        pad_token_id=PAD, eos_token_id=END, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config)


def padded_forward(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def tree_forward(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return cuseq.run_packed(model, ids, mask, tree=True, use_cache=False).logits


def train(name: str, model: torch.nn.Module, forward: Forward, options: Options) -> Run:
    """Train a model by GRPO; return each step's mean reward, and what the updates cost."""
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    computed = [0]

    def count(layer: torch.nn.Module, hidden: tuple[Tensor, ...]) -> None:
        computed[0] += hidden[0].shape[0] * hidden[0].shape[1]

    rewards: list[float] = []
    seconds = 0.0
    for _ in range(options.steps):
        lengths = [rng.randint(1, options.longest) for _ in range(options.prompts)]
        prompts = [[rng.randrange(DIGITS) for _ in range(length)] + [ASK] for length in lengths]
        ids, mask = answered(model, prompts)
        reward = torch.tensor([
            checked(prompts[i // GROUP], row[-ANSWER:].tolist()) for i, row in enumerate(ids)
        ])  # fmt: skip
        rewards.append(float(reward.mean()))
        groups = reward.view(-1, GROUP)
        advantages = groups - groups.mean(1, keepdim=True)
        advantages = (advantages / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        begun = time.perf_counter()
        counting = model.model.layers[0].register_forward_pre_hook(count)
        old = None
        for _ in range(UPDATES):
            logprobs = logprobs_of(forward(model, ids, mask), ids)
            old = logprobs.detach() if old is None else old
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages, clipped * advantages)
            said = mask[:, -ANSWER:]
            loss = -(gain * said).sum() / said.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        counting.remove()
        seconds += time.perf_counter() - begun
    return Run(name=name, rewards=rewards, seconds=seconds, tokens=computed[0])


def checked(prompt: list[int], answer: list[int]) -> float:
    """Return the share of the answer's tokens that are right."""
    return answer.count(prompt[0]) / ANSWER


@torch.no_grad()
def answered(
    model: transformers.PreTrainedModel, prompts: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Sample a group of answers to each prompt.

    Returns:
        int64 ids and mask `[prompts * GROUP, longest + ANSWER]`: prompts are padded on the left,
        answers after their end on the right.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(one)) + one for one in prompts])
    ids = model.generate(
        input_ids=ids, attention_mask=(ids != PAD).long(), do_sample=True, top_k=0,
        max_new_tokens=ANSWER, min_new_tokens=1, num_return_sequences=GROUP,
    )  # fmt: skip
    ids = torch.nn.functional.pad(ids, (0, longest + ANSWER - ids.shape[1]), value=PAD)
    ends = (ids[:, longest:] == END).long()
    is_said = ends.cumsum(1) - ends == 0  # up to the end; a model may say PAD before it
    return ids, torch.cat([ids[:, :longest] != PAD, is_said], dim=1).long()


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities `[batch, ANSWER]` of the answers' tokens."""
    answers = logits[:, -ANSWER - 1 : -1].log_softmax(-1)
    return answers.gather(2, ids[:, -ANSWER:, None]).squeeze(2)


if __name__ == "__main__":
    main()
