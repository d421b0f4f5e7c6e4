"""The label that a loss leaves out, and labels of the token before each."""

import torch
from torch import Tensor

IGNORE_INDEX = -100


def shifted(labels: Tensor) -> Tensor:
    """Return the label of the next token for each token, in the last dimension; none for the last.

    The first label of each sequence is masked, so the last one of each is after the shift.
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
