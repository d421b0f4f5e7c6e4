"""Registration of attention kernels that packages launch from Python.

`fa4.py` and `fa3.py` register here. A package may compile a kernel when a call first needs it, and
fail then. A call with `backend="auto"` is refused in that case, with a warning that says how it
failed: C++ gives the call to the next backend (`csrc/attention/call.cpp`), and passes the package
by from then on (`csrc/attention/backends/packages.cpp`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from cuseq import _C

found: dict[str, bool] = {}  # whether a package can be used here, once they are loaded


def is_usable(backend: str) -> bool:
    """Return whether "auto" may take a backend; PyTorch's own are always there."""
    return found.get(backend, True) and not _C.failed_attention(backend)


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
        forward: kernel of the op `cuseq::<backend>_forward`. It gets the tensors and then, as
            `sequences`, offsets of queries and of keys, int32 `[n_seqs + 1]`, their longest
            lengths, scale, causality, and the window to the left and to the right: tokens without
            the query, None for all keys.
        backward: kernel of the op `cuseq::<backend>_backward`, with the same `sequences`.
        device: dispatch key; tests register stand-ins for "CPU".
        takes_two_rows: whether the queries and the keys of a call may lie in two rows, with
            sequences that lack either.

    Returns:
        The library; the kernels are registered while it lives.
    """
    _C.set_registered_attention(backend, device == "CUDA", takes_two_rows)
    library = torch.library.Library("cuseq", "IMPL")
    for name, kernel in (("forward", forward), ("backward", backward)):
        library.impl(f"{backend}_{name}", _refusing(backend, package, kernel), device)
    return library


def _refusing(backend: str, package: str, kernel: Callable[..., None]) -> Callable[..., str]:
    """Return the kernel of an op: it returns how the package failed, or an empty string."""

    @functools.wraps(kernel)
    def launch(*args: object) -> str:
        try:
            kernel(*args[:-1])
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not the package's: the next backend would raise it too
        except Exception as error:
            if args[-1]:  # must_run
                raise
            lines = str(error).strip().splitlines()
            how = f"{package} failed ({type(error).__name__}{': ' + lines[0] if lines else ''})"
        else:
            return ""
        warnings.warn(
            f'{how}: backend="auto" does not choose it again in this process; '
            f'backend="{backend}" raises the whole error',
            stacklevel=3,
        )
        return how

    return launch
