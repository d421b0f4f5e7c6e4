"""Calls that compiled code makes while it is compiled, and calls that it leaves to eager code.

Marking a function for either imports torch._dynamo, which takes longer than the rest of cuseq. Only
code that is being compiled imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import assume_constant_result, disable


@assume_constant_result
def constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of constants, once; the code holds its result as a constant."""
    return function(*arguments)


@disable
def in_eager_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function when the code runs; the compiler breaks its graph here."""
    return function(*arguments)
