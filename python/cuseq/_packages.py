"""Registration of attention kernels that packages launch from Python, and of their failures.

`cuseq._fa4` and `cuseq._fa3` register here. A package may compile a kernel when a call first needs
it, and fail then. The first failure warns and makes `backend="auto"` pass the package by: C++ runs
the call again with the next backend (`csrc/attention/call.cpp`).
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable

import torch

from cuseq import _C

failed: set[str] = set()  # the packages that "auto" passes by
_lock = threading.Lock()


def register_kernels(
    backend: str,
    package: str,
    forward: Callable[..., None],
    backward: Callable[..., None],
    device: str = "CUDA",
    takes_two_rows: bool = False,
) -> torch.library.Library:
    """Register the kernels of a backend, which has not failed then.

    Args:
        backend: "fa4" or "fa3".
        package: name and version, for messages.
        forward: kernel of the op `cuseq::<backend>_forward`.
        backward: kernel of the op `cuseq::<backend>_backward`.
        device: dispatch key; tests register stand-ins for "CPU".
        takes_two_rows: whether the queries and the keys of a call may lie in two rows, with
            sequences that lack either.

    Returns:
        The library; the kernels are registered while it lives.
    """
    failed.discard(backend)
    _C.set_failed_attention(backend, "")
    _C.set_attention_takes_two_rows(backend, device == "CUDA", takes_two_rows)
    library = torch.library.Library("cuseq", "IMPL")
    for name, kernel in (("forward", forward), ("backward", backward)):
        library.impl(f"{backend}_{name}", _reporting(backend, package, kernel), device)
    return library


def _reporting(backend: str, package: str, kernel: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel; an error of the package is reported before it is raised."""

    @functools.wraps(kernel)
    def launch(*args: object) -> None:
        try:
            kernel(*args)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not the package's: the next backend would raise it too
        except Exception as error:
            _report(backend, package, error)
            raise

    return launch


def _report(backend: str, package: str, error: Exception) -> None:
    lines = str(error).strip().splitlines()
    how = f"{package} failed ({type(error).__name__}{': ' + lines[0] if lines else ''})"
    with _lock:
        if backend in failed:
            return
        # Before the rest: where warnings are errors, the call raises this one.
        warnings.warn(
            f'{how}: backend="auto" does not choose it again in this process; '
            f'backend="{backend}" raises the whole error',
            stacklevel=4,
        )
        failed.add(backend)
        _C.set_failed_attention(backend, how)
