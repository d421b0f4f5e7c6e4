"""Numbers of each document, and log-probabilities of labels by a head."""

from cuseq.reductions.model_head import model_logprobs
from cuseq.reductions.segments import (
    segment_last,
    segment_max,
    segment_mean,
    segment_sum,
    token_logprobs,
)

__all__ = [
    "model_logprobs",
    "segment_last",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "token_logprobs",
]
