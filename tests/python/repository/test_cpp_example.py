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


def configured(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    command = [
        cmake,
        "-S",
        ROOT / "examples" / "cpp",
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
