"""Test find_package(cuseq): examples/cpp links against the installed library and runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import cuseq

ROOT = Path(__file__).parents[3]
PREFIX = Path(cuseq.__path__[0])
TORCH = Path(torch.__path__[0])


def configured(
    folder: Path, *options: str, source: Path = ROOT / "examples" / "cpp"
) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    command = [
        cmake,
        "-S",
        source,
        "-B",
        folder,
        f"-DCMAKE_PREFIX_PATH={PREFIX}",
    ]
    return subprocess.run([*command, *options], capture_output=True, text=True)


@pytest.mark.slow
def test_the_program_links_and_runs(tmp_path):
    made = configured(tmp_path, f"-DTORCH_ROOT={TORCH}")
    assert made.returncode == 0, made.stderr
    made = subprocess.run(["cmake", "--build", tmp_path], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    ran = subprocess.run(
        [tmp_path / "packed_attention"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("the second document, packed and alone, differs by ")


def test_a_folder_without_torch_is_named(tmp_path):
    made = configured(tmp_path / "build", f"-DTORCH_ROOT={tmp_path}")
    said = " ".join(made.stderr.split())
    assert made.returncode != 0
    assert f"TORCH_ROOT must be the folder of torch {torch.__version__}" in said
    assert f"got {tmp_path}" in said


@pytest.mark.parametrize("file", ["version.py", "build-version"])
def test_another_torch_is_named(file, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").touch()
    line = "__version__ = '2.1.0+cpu'\n" if file == "version.py" else "2.1.0+cpu\n"
    (tmp_path / file).write_text("from typing import Optional\n" * (file == "version.py") + line)
    made = configured(tmp_path / "build", f"-DTORCH_ROOT={tmp_path}")
    said = " ".join(made.stderr.split())
    assert made.returncode != 0
    assert f"TORCH_ROOT must be the folder of torch {torch.__version__}" in said
    assert f"got {tmp_path} (torch 2.1)" in said


@pytest.mark.parametrize(("asked", "is_found"), [("0.2", True), ("0.1", False), ("0.3", False)])
def test_a_program_asks_for_a_version(asked, is_found, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(program LANGUAGES CXX)\n"
        f"find_package(cuseq {asked} CONFIG REQUIRED)\n"
    )
    made = configured(tmp_path / "build", f"-DTORCH_ROOT={TORCH}", source=tmp_path)
    assert (made.returncode == 0) == is_found, made.stderr
    if not is_found:
        assert f'compatible with requested version "{asked}"' in " ".join(made.stderr.split())
