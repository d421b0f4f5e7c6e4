"""Import of the compiled extension, with a clear error if it does not load."""

from __future__ import annotations

from typing import Any

import torch

_REBUILD = "reinstall cuseq with `pip install --no-build-isolation --force-reinstall --no-deps .`"


def _check_torch(built_for: str, running: str) -> None:
    """Raise ImportError unless torch has the minor version that cuseq was built with.

    libtorch's C++ interface changes with every minor release, and a mismatch crashes.
    """
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"cuseq was built with torch {built_for}, but torch {running} is running: {_REBUILD}"
        )


try:
    from cuseq import _build_config
except ImportError as error:
    raise ImportError(
        "cuseq's compiled part is missing: run `pip install --no-build-isolation -e .` in its "
        "source tree, or import the installed package from another folder"
    ) from error

_check_torch(_build_config.TORCH_VERSION, torch.__version__)

try:
    from cuseq import _C
except ImportError as error:
    if isinstance(error.__cause__, ValueError):  # an environment variable has an invalid value
        raise error.__cause__ from None
    raise ImportError(
        f"cuseq, built with torch {_build_config.TORCH_VERSION} (CUDA {_build_config.TORCH_CUDA}), "
        f"does not load into torch {torch.__version__} (CUDA {torch.version.cuda}): {error}; "
        f"if that does not say what to do, {_REBUILD}"
    ) from error


def build_info() -> dict[str, Any]:
    """Return the versions and options that the library was built with. Never synchronises.

    Returns:
        `torch`, the version of torch; `torch_cuda`, its CUDA version or None; `cuda`, whether the
        CUDA kernels were built; `cuda_archs`, their architectures, such as "80,90".

    Examples:
        >>> sorted(cuseq.build_info())
        ['cuda', 'cuda_archs', 'torch', 'torch_cuda']
    """
    return {
        "torch": _build_config.TORCH_VERSION,
        "torch_cuda": _build_config.TORCH_CUDA,
        **_C.build_info(),
    }
