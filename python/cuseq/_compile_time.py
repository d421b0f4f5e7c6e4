"""Questions that compiled code asks while it is compiled; it holds the answers as constants.

Marking a function for that imports torch._dynamo, which takes longer than the rest of cuseq. Only
code that is being compiled imports this module.
"""

from __future__ import annotations

from torch import nn
from torch.compiler import assume_constant_result, disable

from cuseq import _backends, model_head


@disable
def read_head(model: nn.Module) -> model_head.Head:
    """Return the head of a model; the compiler breaks its graph here."""
    return model_head.read_head(model)


@assume_constant_result
def load_now() -> bool:
    """Load the measurements and the installed packages of attention."""
    _backends.load()
    return True


@assume_constant_result
def least_tokens_for_flex(head_dim: int, mask: str, window: int) -> int | None:
    """Return the fewest tokens from which flex stays the best choice in compiled code, or None."""
    return _backends.tokens_from_which_flex_is_chosen(head_dim, mask, window)


@assume_constant_result
def flex_replays_fastest(
    head_dim: int, mask: str, window: int, tokens: int, room: int, expected: int
) -> bool:
    """Return whether flex is the best choice in a CUDA graph whose offsets have such room."""
    return _backends.flex_replays_fastest(head_dim, mask, window, tokens, room, expected)


@assume_constant_result
def shared_memory_of(index: int | None) -> int:
    """Return the bytes of shared memory that a block of a GPU can have."""
    return _backends.shared_memory_of(index)
