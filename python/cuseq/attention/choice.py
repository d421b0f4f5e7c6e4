"""The one place where it is decided which backend computes a call of `varlen_attention`.

The candidates, in the order in which they are asked: for a tree, one kernel over all of it
(`tree.py`); flex attention, which becomes a part of compiled code, so that only Python can run it
(`flex.py`); the op (`op.py`), which has the backends of C++ and chooses among them when it runs
(`csrc/attention/choice.cpp`). Code that is compiled with a model calls the op itself, without flex
(`integrations/transformers/attention.py`).
Flex and the op follow the measurements of `table.py`, a tree a modelled time. The measurements and
the packages that launch kernels from Python (`fa4.py`, `fa3.py`) are loaded at the first call on a
GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq.attention import fa3, fa4, flex, op, packages, tree
from cuseq.attention.call import Call, check_backend, check_rows
from cuseq.attention.table import COMMAND, Facts, Times, read_own_table, read_table

PACKAGES = {"fa4": fa4.register, "fa3": fa3.register}

_ignored = ""
_loaded = False


class Route(NamedTuple):
    """How a call is computed."""

    name: str  # of the backend
    reason: str  # why it was chosen
    run: Callable[[Call], Tensor]


# Without an explanation nobody asks the op beforehand what it will choose.
_BY_THE_OP = Route("", "", op.attend)


def route(call: Call, explain: bool = False) -> Route:
    """Return what computes a call.

    Args:
        explain: whether the reason is wanted, and which backend of C++ the op will choose; for
            eager code.

    Raises:
        ValueError, TypeError: no backend takes the call, or the one that it names does not. What
            the op checks when it runs is checked here if it does not run.
    """
    if call.q.is_cuda:
        load_backends()
    try:
        in_one_kernel = call.packed.tree is not None and tree.takes(call)
        by_flex = not in_one_kernel and flex.takes(call)
    except (RuntimeError, AttributeError):  # of nested shapes; checking first would cost time
        check_rows(call.q, call.k, call.v)
        raise
    if in_one_kernel:
        _check(call._replace(window=None))
        name, run = ("flex", flex.attend) if tree.takes_flex(call) else ("dense", tree.attend)
        return Route(name, tree.why(call) if explain else "", run)
    if by_flex:
        _check(call)
        return Route("flex", _noted(call, flex.why(call)) if explain else "", flex.attend)
    if not explain:
        return _BY_THE_OP
    name, reason = op.choose(call)
    return Route(name, _noted(call, reason), op.attend)


def _check(call: Call) -> None:
    if not is_compiling():
        check_rows(call.q, call.k, call.v)
        op.choose(call._replace(backend="auto"))


def _noted(call: Call, reason: str) -> str:
    """Return the reason, with which rows of the user's own table are not used here."""
    is_noted = _ignored and call.q.is_cuda and call.backend == "auto"
    return f"{reason}; {_ignored}" if is_noted else reason


# ------------------------------------------------------------------------- what the choice follows


def check_installed(backend: object) -> None:
    """Raise ValueError unless `backend` is a name and, if a package, is installed."""
    check_backend(backend)
    if backend in PACKAGES or backend == "cudnn":
        if not torch.cuda.is_available():
            raise ValueError(
                f'backend="{backend}" runs on CUDA, and torch finds no GPU: choose "auto", which '
                "takes what runs"
            )
        load_backends()
        if not packages.found.get(backend):
            why = _missing_cudnn() if backend == "cudnn" else _C.missing_attention(backend)
            raise ValueError(f'backend="{backend}" cannot be used: {why}')


def load_backends() -> None:
    """Load the measurements and the installed packages, once per process.

    In code that torch.compile traces, load during tracing, before the compiled code runs.
    """
    if is_compiling():
        # It imports torch._dynamo, which is there by now.
        from cuseq._base.compile_time import constant

        constant(load)
    elif not _loaded:
        load()


def load() -> bool:
    """Load the measurements and packages, unless they are loaded. Return True.

    Raises:
        ValueError: the user's own table is not one; see `table.read_own_table`.
    """
    global _loaded, _ignored
    if not _loaded and torch.cuda.is_available():  # tensors may be fakes of a GPU elsewhere
        own = read_own_table()
        _loaded = True
        _ignored = own.ignored
        _C.set_measured_attention([row for row in measurements(own.rows) if row[1]])
        capability = torch.cuda.get_device_capability()
        for name, register in PACKAGES.items():
            why = register(capability)
            _C.set_missing_attention(name, why)
            packages.found[name] = not why
        packages.found["cudnn"] = not _missing_cudnn()
        if own.ignored and not own.rows:
            warnings.warn(f"cuseq: {own.ignored}. To measure here: {COMMAND}", stacklevel=2)
    return True


def _missing_cudnn() -> str:
    """Return why this GPU, torch or cuDNN cannot run cuDNN's attention; empty if they can."""
    major, minor = torch.cuda.get_device_capability()
    return _C.missing_cudnn_attention(10 * major + minor)


def measurements(own: dict[Facts, Times]) -> list[tuple[Facts, Times]]:
    """Return the rows that auto follows: the package's, with the user's own in their place."""
    return list((dict(read_table()) | own).items())
