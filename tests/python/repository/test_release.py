"""Test scripts/release.py: what it asks for, and that it passes once everything is there."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import script

VERSION, HEADER = '__version__ = "1.0"\n', "// ops\n"
CELLS = {"old": {"packages": {"torch": "2.11.0"}}, "new": {"packages": {"torch": "newest"}}}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return script("release")


def wheel_of(kind: str) -> str:
    return f"dist/torch2.11-{kind}/cuseq-1.0+torch2.11.{kind}-cp312-cp312-linux_x86_64.whl"


def write_wheel(path: Path, **changed: str) -> None:
    files = {
        "cuseq/_version.py": VERSION,
        "cuseq/include/cuseq/ops.h": HEADER,
        "cuseq/_build_config.py": "CUDA = False\n",
        "cuseq-1.0.dist-info/METADATA": "Name: cuseq\nProject-URL: Repository, https://a.b\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, changed.get(Path(name).stem, text))


@pytest.fixture
def tree(tmp_path) -> Path:
    """A committed tree of version 1.0 that is ready, with its built files in dist."""
    files = {
        "python/cuseq/_version.py": VERSION,
        "include/cuseq/ops.h": HEADER,
        "CITATION.cff": "type: software\nversion: 1.0\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.0 (2026-11-28)\n\n## 0.9 (2026-01-01)\n",
        "scripts/versions.json": json.dumps({"wheels": ["2.11.0"], "cells": CELLS}),
        "docs/versions.json": json.dumps([{"cell": c, "failed": 0} for c in CELLS]),
        ".gitignore": "dist\n",
        "dist/cuseq-1.0.tar.gz": "",
    }
    for kind in ("cpu", "cu130"):
        files[f"dist/torch2.11-{kind}/index.html"] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for kind in ("cpu", "cu130"):
        write_wheel(tmp_path / wheel_of(kind))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "tree"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return tmp_path


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
        ("docs/versions.json", '[{"cell": "old", "failed": 0}]', "cell new has passed"),
        (
            "docs/versions.json",
            '[{"cell": "old", "failed": 2}, {"cell": "new", "failed": 0}]',
            "cell old has passed",
        ),
        ("CITATION.cff", "version: 0.9\n", "CITATION.cff names 1.0"),
        ("dist/cuseq-1.0.tar.gz", None, "the source distribution is built"),
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
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam",
                            "change"], cwd=tree, check=True)  # fmt: skip
    assert missing(release, tree) == [what]


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"_version": "older\n"}, "cuseq/_version.py differs from the tree's: build it again"),
        ({"ops": "// old\n"}, "cuseq/include/cuseq/ops.h differs from the tree's: build it again"),
        ({"METADATA": "Name: cuseq\n"}, "it names no repository: build it again"),
    ],
)
def test_a_wheel_of_another_tree_is_named(changed, remedy, release, tree):
    write_wheel(tree / wheel_of("cu130"), **changed)
    ((what, found),) = [one for one in release.checks(tree, tree / "dist") if one[1]]
    assert what == f"{Path(wheel_of('cu130')).name} is of this tree"
    assert found.startswith(remedy)
