"""The dtypes that a model computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DtypesAtWork(TorchDispatchMode):
    """Mode that collects the floating dtypes of op results, since models cast and autocast inside.

    Args:
        least: number of elements of the smallest tensors that count. Smaller tensors are counters
            and the like.

    Attributes:
        found: dtypes of at least 16 bits. Shorter ones hold quantised weights and scales.
    """

    supports_higher_order_operators = True  # needed by flex_attention

    def __init__(self, least: int):
        super().__init__()
        self.least = least
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize >= 2:
                if leaf.numel() >= self.least:
                    self.found.add(leaf.dtype)
        return output
