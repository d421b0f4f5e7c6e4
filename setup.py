"""setuptools build that runs CMake; CMakeLists.txt alone defines the targets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def environment_with_torch() -> dict[str, str]:
    """Return the environment variables with which `python -c "import torch"` works.

    An isolated build sets PYTHONPATH and so hides the installed torch. Building against another,
    freshly fetched torch would make a library that the installed one cannot load.

    Raises:
        SystemExit: torch is not installed.
    """
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for environment in (dict(os.environ), outside):
        command = [sys.executable, "-c", "import torch"]
        if subprocess.run(command, env=environment, capture_output=True).returncode == 0:
            return environment
    raise SystemExit("cuseq is built against an installed torch: run `pip install torch` first")


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
        build = ROOT / "build" / f"python{version}"
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
            subprocess.run(command, check=True, env=environment)


setup(ext_modules=[Extension("cuseq._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
