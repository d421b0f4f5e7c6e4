"""What the benchmarks run on: document lengths, and documents of random tokens."""

from __future__ import annotations

import math
import random


def lognormal_lengths(total_tokens: int, mean: float, seed: int, sigma: float = 0.8) -> list[int]:
    """Document lengths that add up to `total_tokens` exactly.

    Args:
        total_tokens: tokens of the packed row.
        mean: mean of the lognormal distribution, in tokens.
        seed: of the draw; the same seed gives the same lengths.
        sigma: standard deviation of the logarithm.

    Returns:
        Lengths of at least 2 tokens each, so that every document has a target; the last is cut
        to fit.
    """
    draw = random.Random(seed)
    mu = math.log(mean) - sigma * sigma / 2
    lengths: list[int] = []
    left = total_tokens
    while left > 0:
        length = min(left, max(2, round(draw.lognormvariate(mu, sigma))))
        if left - length == 1:
            length += 1
        lengths.append(length)
        left -= length
    return lengths


def documents(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """One list of random token ids in `[0, vocab_size)` for each length."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]
