"""Test scripts/release.py: what it asks for, and that it passes once everything is there."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import script

VERSION, HEADER, SOURCE = '__version__ = "1.0"\n', "// ops\n", "int ops;\n"
DIGEST = hashlib.sha256(
    "".join(hashlib.sha256(text.encode()).hexdigest() for text in (SOURCE, HEADER)).encode()
).hexdigest()
CELLS = {
    "old": {"packages": {"torch": "2.11.0"}, "tests": "fast"},
    "new": {"packages": {"torch": "newest"}, "tests": "daily"},
}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return script("release")


def wheel_of(kind: str) -> str:
    return f"dist/torch2.11-{kind}/cuseq-1.0+torch2.11.{kind}-cp312-cp312-linux_x86_64.whl"


def write_wheel(path: Path, **changed: str | None) -> None:
    files = {
        "cuseq/_version.py": VERSION,
        "cuseq/include/cuseq/ops.h": HEADER,
        "cuseq/_build_config.py": f'SOURCES_DIGEST = "{DIGEST}"\n',
        "cuseq-1.0.dist-info/METADATA": "Name: cuseq\nProject-URL: Repository, https://a.b\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            if (text := changed.get(Path(name).stem, text)) is not None:
                archive.writestr(name, text)


def write_source(tree: Path, **changed: str | None) -> None:
    files = {
        "PKG-INFO": "Name: cuseq\nProject-URL: Repository, https://a.b\n",
        "python/cuseq/_version.py": VERSION,
        "include/cuseq/ops.h": HEADER,
        "csrc/ops.cpp": SOURCE,
    }
    with tarfile.open(tree / "dist" / "cuseq-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            text = changed.get(Path(name).name.replace(".", "_").replace("-", "_"), text)
            if text is not None:
                member = tarfile.TarInfo(f"cuseq-1.0/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def tree(tmp_path) -> Path:
    """A committed tree of version 1.0 that is ready, with its built files in dist."""
    files = {
        "python/cuseq/_version.py": VERSION,
        "include/cuseq/ops.h": HEADER,
        "CITATION.cff": "type: software\nversion: 1.0\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.0 (2026-11-28)\n\n## 0.9 (2026-01-01)\n",
        "csrc/ops.cpp": SOURCE,
        "scripts/versions.json": json.dumps(
            {"wheels": ["2.11.0"], "wheel_pythons": ["3.12"], "cells": CELLS}
        ),
        ".gitignore": "dist\n",
    }
    for kind in ("cpu", "cu130"):
        files[f"dist/torch2.11-{kind}/index.html"] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for kind in ("cpu", "cu130"):
        write_wheel(tmp_path / wheel_of(kind))
    write_source(tmp_path)
    run_git(tmp_path, "init", "-q")
    commit(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "versions.json").write_text(records(tmp_path))
    commit(tmp_path)
    return tmp_path


def run_git(tree: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout


def commit(tree: Path) -> None:
    run_git(tree, "add", ".")
    run_git(tree, "commit", "-qm", "change")


def records(tree: Path, **changed: object) -> str:
    """Return the records of all cells; `changed` is of the old one."""
    newest = run_git(tree, "rev-parse", "HEAD").strip()
    made = [
        {"cell": cell, "passed": 9, "failed": 0, "set": facts["tests"], "commit": newest}
        for cell, facts in CELLS.items()
    ]
    made[0] |= changed
    return json.dumps(made)


def missing(release: ModuleType, tree: Path) -> list[str]:
    return [what for what, remedy in release.checks(tree, tree / "dist") if remedy]


def test_a_tree_that_is_ready(release, tree):
    assert len(list(release.checks(tree, tree / "dist"))) == 11
    assert missing(release, tree) == []


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("new_file", "", "the tree is committed"),
        ("CHANGELOG.md", "## 1.0 (unreleased)\n", "CHANGELOG.md begins with 1.0 and its date"),
        ("CHANGELOG.md", "## 0.9 (2026-01-01)\n", "CHANGELOG.md begins with 1.0 and its date"),
        ("CITATION.cff", "version: 0.9\n", "CITATION.cff names 1.0"),
        ("dist/cuseq-1.0.tar.gz", None, "the source distribution is of this tree"),
        ("dist/torch2.11-cu130/index.html", None, "wheels have their pages"),
        (wheel_of("cpu"), None, "there are wheels for torch 2.11, cpu"),
    ],
)
def test_what_is_missing_is_named(name, text, what, release, tree):
    if text is None:
        (tree / name).unlink()
    else:
        (tree / name).write_text(text)
        if name != "new_file":
            commit(tree)
    assert missing(release, tree) == [what]


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"_version": "older\n"}, "cuseq/_version.py differs from the tree's: build it again"),
        ({"ops": "// old\n"}, "cuseq/include/cuseq/ops.h differs from the tree's: build it again"),
        ({"_version": None}, "cuseq/_version.py differs from the tree's: build it again"),
        (
            {"_build_config": 'SOURCES_DIGEST = "0"\n'},
            "its library is of other sources than csrc and include: build it again",
        ),
        ({"METADATA": "Name: cuseq\n"}, "it names no repository: build it again"),
    ],
)
def test_a_wheel_of_another_tree_is_named(changed, remedy, release, tree):
    write_wheel(tree / wheel_of("cu130"), **changed)
    ((what, found),) = [one for one in release.checks(tree, tree / "dist") if one[1]]
    assert what == f"{Path(wheel_of('cu130')).name} is of this tree"
    assert found.startswith(remedy)


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"ops_cpp": "int old;\n"}, "csrc/ops.cpp differs from the tree's: "),
        ({"ops_h": None}, "include/cuseq/ops.h differs from the tree's: "),
        ({"PKG_INFO": "Name: cuseq\n"}, "it names no repository: "),
    ],
)
def test_a_source_distribution_of_another_tree_is_named(changed, remedy, release, tree):
    write_source(tree, **changed)
    ((what, found),) = [one for one in release.checks(tree, tree / "dist") if one[1]]
    assert what == "the source distribution is of this tree"
    assert found.startswith(f"{remedy}CUSEQ_REPOSITORY=https://... python -m build --sdist")


@pytest.mark.parametrize(
    "changed", [{"failed": 2}, {"passed": 0}, {"set": "short"}, {"commit": "0" * 40}]
)
def test_a_cell_without_a_whole_run_is_named(changed, release, tree):
    (tree / "docs" / "versions.json").write_text(records(tree, **changed))
    commit(tree)
    assert missing(release, tree) == ["cell old has passed"]


def test_a_cell_that_ran_other_code_is_named(release, tree):
    (tree / "setup.py").write_text("# new\n")
    commit(tree)
    assert missing(release, tree) == ["cell old has passed", "cell new has passed"]


def test_the_digest_of_this_build_is_that_of_the_tree(release):
    from cuseq._build_config import SOURCES_DIGEST

    assert release.digest_of(release.ROOT) == SOURCES_DIGEST
