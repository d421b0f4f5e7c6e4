"""Facts that a layout has computed from its records. It drops them when these change."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

_MOST_KEPT = 16

Key = TypeVar("Key")
Value = TypeVar("Value")


class Derived:
    """The memoised facts of a layout; None where one has not been asked for.

    A plain class, whose fields compiled code may set.
    """

    def __init__(self) -> None:
        self.lengths: Tensor | None = None
        self.cu_seqlens: Tensor | None = None
        # Of each token: its position in its segment, its sequence, whether it is padding.
        self.tokens: tuple[Tensor, Tensor, Tensor] | None = None
        self.seq_idx: Tensor | None = None
        self.offsets_on_host: Tensor | None = None
        self.runs_on_host: Tensor | None = None
        self.runs: Tensor | None = None
        # By chunk size and dtype: the indices of chunks and the first chunk of each run.
        self.chunks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        # Spans that passed the checks, by (spans, row_length, stream): the tensor on the layout's
        # device and the one on the host.
        self.spans: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None]] = {}
        # By causality and window: masks of flex attention that compiled code takes as they are.
        self.block_masks: dict[tuple[bool, int | None], Any] = {}
        # With CUSEQ_CHECK=1: the version that each tensor had when it was made.
        self.versions: list[tuple[str, Tensor, int]] = []


def keep(kept: dict[Key, Value], key: Key, value: Value) -> Value:
    """Keep a value that a layout makes of an argument, beside the newest few of its kind.

    Return the value of the key: another thread may have kept one before.
    """
    value = kept.setdefault(key, value)
    for oldest in list(kept)[:-_MOST_KEPT]:
        kept.pop(oldest, None)
    return value
