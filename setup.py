"""setuptools build that runs CMake; CMakeLists.txt alone defines the targets."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PROJECT = (ROOT / "pyproject.toml").read_text()
# Another folder lets builds for several torches live side by side (scripts/matrix.py).
BUILD = Path(os.environ.get("CUSEQ_BUILD_DIR") or ROOT / "build").resolve()


@functools.cache
def environment_with_torch() -> dict[str, str]:
    """Return the environment variables with which `python -c "import torch"` works.

    pip's isolated build sets PYTHONPATH and PYTHONNOUSERSITE and so hides the installed torch.
    Building against another, freshly fetched torch would make a library that the installed one
    cannot load.

    Raises:
        SystemExit: torch is not installed, does not load or is too old.
    """
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    reason = ""
    for hiding in ((), ("PYTHONPATH",), ("PYTHONPATH", "PYTHONNOUSERSITE")):
        environment = {key: value for key, value in os.environ.items() if key not in hiding}
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        if found.returncode == 0:
            check_version(found.stdout.split()[-1])
            return environment
        # uv answers the words "No module named 'torch'" with advice that would fetch a second one.
        error = found.stderr.strip().rpartition("\n")[2]
        reason = "" if error.endswith("No module named 'torch'") else f": {error}"
    tools = " ".join(f'"{one}"' for one in listed("requires = "))
    raise SystemExit(
        "cuseq is built against the torch that it will run with, and found none in "
        f"{sys.prefix}{reason}\n"
        "With pip, type first:\n"
        "    pip install torch\n"
        "uv builds in an environment of its own, which does not have your torch. With uv, type:\n"
        f"    uv pip install torch {tools}\n"
        "    uv pip install --no-build-isolation '.[transformers]'\n"
        "`python -m build` needs --no-isolation and the same tools."
    )


def check_version(version: str) -> None:
    """Stop if torch is older than cuseq needs: pip would replace it after the build."""
    (least,) = re.findall(r"torch>=([\d.]+)", listed("dependencies = ")[0])
    if numbers(version) < numbers(least):
        raise SystemExit(
            f"cuseq needs torch {least} or newer, and {sys.prefix} has {version}. Type first:\n"
            "    pip install --upgrade torch"
        )


def check_setuptools() -> None:
    """Stop if setuptools, in a build without isolation, is older than pyproject.toml needs."""
    (least,) = re.findall(r"setuptools>=([\d.]+)", listed("requires = ")[0])
    if numbers(setuptools.__version__) < numbers(least):
        raise SystemExit(
            f"cuseq needs setuptools {least} or newer to build, and {sys.prefix} has "
            f"{setuptools.__version__}. Type first:\n"
            f'    pip install "{listed("requires = ")[0]}"'
        )


def numbers(version: str) -> list[int]:
    """Return the first three numbers of a version."""
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def listed(name: str) -> list[str]:
    """Return the strings of a list in pyproject.toml. Python 3.10 has no module that reads it."""
    (line,) = re.findall(rf"^{name}\[(.*)\]$", PROJECT, re.MULTILINE)
    return re.findall(r'"([^"]+)"', line)


def is_install() -> bool:
    """Return whether `pip install` or `uv pip install` asks for metadata, before it fetches.

    `pip download`, `uv lock` and a source distribution ask for it too, and need no torch.
    """
    try:
        caller = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # the build will look for torch
    return "dist_info" in sys.argv and b"install" in caller


def tool(name: str) -> str:
    """Return the path of a build tool from its Python package, or else its name on PATH."""
    try:
        package = __import__(name)
    except ImportError:
        return name
    folder = getattr(package, "CMAKE_BIN_DIR", None) or package.BIN_DIR
    return str(Path(folder) / name)


class CMakeBuild(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.fills_source_tree = bool(self.inplace)  # setuptools resets `inplace` before it builds

    def build_extension(self, ext: Extension) -> None:
        prefixes = [Path(self.get_ext_fullpath(ext.name)).resolve().parent]
        if self.fills_source_tree or self.editable_mode:
            # setuptools copies only the module itself into the source tree.
            prefixes.append(ROOT / "python" / "cuseq")
        version = ".".join(map(str, sys.version_info[:2]))
        build = BUILD / f"python{version}"
        environment = environment_with_torch()

        import pybind11

        configure = [
            tool("cmake"),
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            # Passed on every run: an isolated build's tools are in a temporary folder.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCUSEQ_CUDA={os.environ.get('CUSEQ_CUDA', 'auto')}",
            f"-DCUSEQ_CUDA_ARCHS={os.environ.get('CUSEQ_CUDA_ARCHS', '')}",
            f"-DCUSEQ_BUILD_TESTS={os.environ.get('CUSEQ_BUILD_TESTS', 'OFF')}",
        ]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        commands = [configure, [configure[0], "--build", str(build), "--parallel", jobs]]
        for prefix in prefixes:
            commands.append([configure[0], "--install", str(build), "--prefix", str(prefix)])
        for command in commands:
            if subprocess.run(command, env=environment).returncode != 0:
                raise SystemExit("cuseq was not built: the reason is above")


def about() -> dict[str, object]:
    """Return the README and the addresses of the project, for a package registry.

    CUSEQ_REPOSITORY, such as https://github.com/OWNER/cuseq, is where the README's links, relative
    in the repository, lead to. Without it they stay as they are.
    """
    readme = (ROOT / "README.md").read_text()
    repository = os.environ.get("CUSEQ_REPOSITORY", "").rstrip("/")
    if not repository:
        return {"long_description": readme, "long_description_content_type": "text/markdown"}
    version = re.search(r'__version__ = "(.+)"', (ROOT / "python/cuseq/_version.py").read_text())[1]

    def absolute(found: re.Match[str]) -> str:
        is_picture, text, path = found.groups()
        kind = "raw" if is_picture else "blob"
        query = "?sanitize=true" if path.endswith(".svg") else ""  # as a picture, not as text
        return f"{is_picture}[{text}]({repository}/{kind}/v{version}/{path}{query})"

    return {
        "long_description": re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            "Repository": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        },
    }


check_setuptools()
if is_install():
    environment_with_torch()
setup(
    ext_modules=[Extension("cuseq._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"build": {"build_base": str(BUILD)}},
    **about(),
)
