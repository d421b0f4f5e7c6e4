"""Follow CONTRIBUTING's list "Add an op" mechanically in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE, ADDED = "mask_boundary_labels", "hide_boundary_labels"

CHECKS = """
import sys

import reference, test_compile, torch

import cuseq

assert cuseq.__file__.startswith({root!r}), cuseq.__file__
op = torch.ops.cuseq.{op}
labels, lengths = [5, 6, 7, 8, 9, 0], [2, 3]
offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
for dtype in (torch.int32, torch.int64):
    for shift in (0, 1):
        hidden = op(torch.tensor(labels, dtype=dtype), offsets, shift)
        assert hidden.tolist() == reference.{op}(labels, lengths, shift), hidden
assert op(torch.empty(6, dtype=torch.int64, device="meta"), offsets.to("meta")).shape == (6,)
assert torch._C._dispatch_has_kernel_for_dispatch_key("cuseq::{op}", "CUDA")
test_compile.test_every_op_has_a_case()
test_compile.test_opcheck("{op}", torch.device("cpu"))
sys.path.insert(0, {root!r})
from tests.fuzz import calls

assert any("{op}" in name for name in calls.TARGETS), "the fuzzer does not call the op"
"""


def steps() -> dict[str, str]:
    """Return the files of the list, with the instruction for each."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## Add an op\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\d+\. `([^`]+)`: (.+)$", section, re.MULTILINE))


def renamed(text: str) -> str:
    """Replace the example's op name and struct name by the added op's."""
    return text.replace(EXAMPLE, ADDED).replace("BoundaryLabelsArgs", "HiddenLabelsArgs")


# The example's parts in files that hold many ops.
PARTS = {
    "csrc/ops.cpp": r'^  m\.def\(\n      "{}\(.*?pure\);\n',
    "python/cuseq/_base/fakes.py": r'^@register_fake\("cuseq::{}"\)\n.*?\n\n\n',
    "tests/python/reference.py": r"^def {}\(.*?\n\n\n",
    "tests/python/ops/test_compile.py": r'^    "{}": lambda d: \[\n.*?^    \],\n',
    "tests/fuzz/calls/schemas.py": r'^@schema\("{}"\)\n.*?\n\n\n',
}


def follow_the_list(tree: Path) -> None:
    for file in steps():
        if "NAME" in file:
            example = (tree / file.replace("NAME", EXAMPLE)).read_text()
            (tree / file.replace("NAME", ADDED)).write_text(renamed(example))
            continue
        text = (tree / file).read_text()
        part = re.search(PARTS[file].format(EXAMPLE), text, re.MULTILINE | re.DOTALL)
        assert part is not None, f"the example is not in {file}"
        (tree / file).write_text(text[: part.end()] + renamed(part[0]) + text[part.end() :])


def copy_of_the_tree(tree: Path) -> None:
    unwanted = shutil.ignore_patterns("*.so", "_build_config.py", "__pycache__", "lib")
    for name in ("csrc", "include", "cmake", "python", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
    for name in ("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree / name)


def build_environment(folder: Path) -> dict[str, str]:
    """Return the variables for a build on the CPU somewhere in the folder."""
    environment = {**os.environ, "CUSEQ_CUDA": "off", "CUSEQ_BUILD_TESTS": "OFF"}
    if shutil.which("ccache"):  # its hits do not depend on where the tree is
        environment |= {
            "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
            "CCACHE_BASEDIR": str(folder),
            "CCACHE_NOHASHDIR": "1",
        }
    return environment


def run_python(folder: Path, environment: dict[str, str], *command: str) -> None:
    """Run Python in the folder; fail with the end of its output if it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_the_list_names_files_that_exist():
    assert len(steps()) == 9
    for file in steps():
        assert (ROOT / file.replace("NAME", EXAMPLE)).is_file(), file


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_an_op_added_by_the_list_builds_and_passes_its_checks(tmp_path):
    copy_of_the_tree(tmp_path)
    follow_the_list(tmp_path)
    environment = build_environment(tmp_path)
    run_python(tmp_path, environment, "setup.py", "build_ext", "--inplace")
    environment["PYTHONPATH"] = os.pathsep.join(
        str(tmp_path / folder) for folder in ("python", "tests/python", "tests/python/ops")
    )
    run_python(tmp_path, environment, "-c", CHECKS.format(root=str(tmp_path), op=ADDED))
