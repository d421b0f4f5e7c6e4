"""Import of the compiled extension, with a clear error if it does not load."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch


def _metadata(file: str) -> str:
    """Return a file that the installer wrote for this cuseq, or "" if there is none.

    Another cuseq may be installed beside a folder on sys.path, such as a Hub kernel's.
    """
    try:
        installed = importlib.metadata.distribution("cuseq")
    except importlib.metadata.PackageNotFoundError:
        return ""
    package = Path(__file__).resolve().parents[1]
    is_this = Path(str(installed.locate_file("cuseq"))).resolve() == package
    return installed.read_text(file) or "" if is_this or _is_in_a_tree() else ""


def _is_in_a_tree() -> bool:
    return (Path(__file__).resolve().parents[3] / "setup.py").is_file()


def _source() -> str:
    """Return what pip or uv takes to install the same source again, quoted for a shell."""
    tree = Path(__file__).resolve().parents[3]
    if _is_in_a_tree():
        return f"-e {shlex.quote(str(tree))}"
    record = json.loads(_metadata("direct_url.json") or "{}")
    url = record.get("url", "")
    if "vcs_info" in record:
        return shlex.quote(f"{record['vcs_info']['vcs']}+{url}")
    tree = Path(url2pathname(urlparse(url).path))
    return shlex.quote(str(tree)) if (tree / "setup.py").is_file() else "."


def wheels_of(torch_version: str, cuda: bool) -> str:
    """Return the folder of the running torch's wheels, as scripts/wheels.py names it."""
    kind = f"cu{torch.version.cuda.replace('.', '')}" if cuda and torch.version.cuda else "cpu"
    return f"torch{'.'.join(torch_version.split('.')[:2])}-{kind}"


def _rebuild(running: str = torch.__version__) -> str:
    """Return how to get a cuseq for the torch that runs now, into the same environment.

    What scripts/wheels.py made has its torch in the version, such as 0.2.0+torch2.11.cpu. pip's
    isolated build fetches the build's tools and finds the installed torch. uv's does not find it,
    so what uv installed was built without isolation, with tools that are still there.
    """
    python, source = shlex.quote(sys.executable), _source()
    install = f"{python} -m pip install"
    made_for = re.search(r"^Version: \S+\+torch[\d.]+\.(\w+)$", _metadata("METADATA"), re.MULTILINE)
    if made_for and source == ".":
        page = f"{wheels_of(running, made_for[1] != 'cpu')}/index.html"
        return (
            f"install the wheel for it with `{install} --force-reinstall --no-index --no-deps "
            f"cuseq --find-links .../{page}`, from the page beside the one that this wheel came "
            "from"
        )
    if source == "." and not _metadata("INSTALLER"):  # a folder on sys.path
        return (
            f"take a build of this folder for torch {running}, or install cuseq beside that torch"
        )
    if _metadata("INSTALLER").strip() == "uv":
        install = f"uv pip install --python {python} --no-build-isolation"
    setting = "CUSEQ_CUDA=off " if _build_config.CUSEQ_CUDA == "off" else ""
    where = " in its source tree" if source == "." else ""
    return (
        f"build cuseq again{where} with `{setting}{install} --force-reinstall --no-deps {source}`"
    )


def _check_torch(built_for: str, running: str) -> None:
    """Raise ImportError unless torch has the minor version that cuseq was built with.

    libtorch's C++ interface changes with every minor release, and a mismatch crashes.
    """
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"cuseq was built with torch {built_for}, but torch {running} is running: "
            f"{_rebuild(running)}"
        )


def _check_python(folder: Path) -> None:
    """Raise ImportError if a package has its compiled part for other Pythons alone."""
    names = [file.name for file in folder.glob("_C.*.so")]
    fits = any(name == f"_C{suffix}" for name in names for suffix in EXTENSION_SUFFIXES)
    if names and not fits:
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"this cuseq has its compiled part for other Pythons than the running {running}: "
            f"{', '.join(sorted(names))}; install the wheel for this one, or build cuseq with it"
        )


def _check_alone(folder: Path) -> None:
    """Raise ImportError if this process has loaded the library of another package than this.

    Its symbols would serve this package too, whatever they do there.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {Path(line.split(maxsplit=5)[-1]) for line in lines if line.endswith("/libcuseq.so")}
    for library in loaded:
        if folder.resolve() not in library.parents:
            raise ImportError(
                f"another cuseq is loaded in this process, {library}: one serves a process, so "
                "start a new one"
            )


try:
    from cuseq import _build_config
except ImportError as error:
    raise ImportError(
        "cuseq's compiled part is missing: run `pip install -e .` in its "
        "source tree, or import the installed package from another folder"
    ) from error

_check_torch(_build_config.TORCH_VERSION, torch.__version__)
_check_python(Path(__file__).parents[1])
_check_alone(Path(__file__).parents[1])

try:
    from cuseq import _C
except ImportError as error:
    if isinstance(error.__cause__, ValueError):  # an environment variable has an invalid value
        raise error.__cause__ from None
    raise ImportError(
        f"cuseq, built with torch {_build_config.TORCH_VERSION} (CUDA {_build_config.TORCH_CUDA}), "
        f"does not load into torch {torch.__version__} (CUDA {torch.version.cuda}): {error}; "
        f"if that does not say what to do, {_rebuild()}"
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
