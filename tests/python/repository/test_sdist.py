"""Build the source distribution, and the wheel from what it holds."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from test_add_an_op import ROOT, build_environment, copy_of_the_tree, run_python

pytest.importorskip("build")

CHECK = """
import torch, cuseq

assert cuseq.__file__.startswith({folder!r}), cuseq.__file__
assert not cuseq.build_info()["cuda"]
packed = cuseq.PackedLayout.from_lengths([2, 3])
assert packed.position_ids.tolist() == [0, 1, 0, 1, 2]
"""


def sources() -> set[str]:
    """Return the files that a build reads."""
    found = {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    for folder in ("csrc", "include", "cmake"):
        found |= {str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.[chp]*")}
    package = ROOT / "python" / "cuseq"
    for pattern in ("*.py", "*.pyi", "py.typed"):
        found |= {str(file.relative_to(ROOT)) for file in package.rglob(pattern)}
    return {name for name in found if "__pycache__" not in name} - {
        "python/cuseq/_build_config.py"  # CMake writes it
    }


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_source_distribution_builds_a_wheel_that_works(tmp_path):
    tree, made, installed = (tmp_path / name for name in ("tree", "dist", "installed"))
    copy_of_the_tree(tree)

    # `build` unpacks in TMPDIR; inside this folder ccache finds what other trees have compiled.
    environment = build_environment(tmp_path) | {"TMPDIR": str(tmp_path)}

    # Without options `build` unpacks the source distribution and makes the wheel from that.
    run_python(
        tmp_path, environment, "-m", "build", "--no-isolation", "--outdir", str(made), str(tree)
    )
    (archive,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert sources() <= names, sources() - names
    assert not [name for name in names if Path(name).suffix in (".so", ".pyc")]

    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
    for name in ("py.typed", "_C.pyi", "include/cuseq/ops.h", "lib/libcuseq.so"):
        assert (installed / "cuseq" / name).is_file(), name
    environment["PYTHONPATH"] = str(installed)
    run_python(tmp_path, environment, "-c", CHECK.format(folder=str(installed)))
