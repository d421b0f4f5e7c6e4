"""Test scripts/release.py: what it asks for, and that it passes once everything is there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import script

CELLS = {"old": {"packages": {"torch": "2.11.0"}}, "new": {"packages": {"torch": "newest"}}}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return script("release")


@pytest.fixture
def tree(tmp_path) -> Path:
    """A committed tree of version 1.0 that is ready, with its built files in dist."""
    files = {
        "python/cuseq/_version.py": '__version__ = "1.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.0 (2026-11-28)\n\n## 0.9 (2026-01-01)\n",
        "scripts/versions.json": json.dumps({"wheels": ["2.11.0"], "cells": CELLS}),
        "docs/versions.json": json.dumps([{"cell": c, "failed": 0} for c in CELLS]),
        ".gitignore": "dist\n",
        "dist/cuseq-1.0.tar.gz": "",
    }
    for kind in ("cpu", "cu130"):
        folder = f"dist/torch2.11-{kind}"
        files[f"{folder}/cuseq-1.0+torch2.11.{kind}-cp312-cp312-linux_x86_64.whl"] = ""
        files[f"{folder}/index.html"] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "tree"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return tmp_path


def missing(release: ModuleType, tree: Path) -> list[str]:
    return [what for what, remedy in release.checks(tree, tree / "dist") if remedy]


def test_a_tree_that_is_ready(release, tree):
    assert len(list(release.checks(tree, tree / "dist"))) == 8
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
        ("dist/cuseq-1.0.tar.gz", None, "the source distribution is built"),
        ("dist/torch2.11-cu130/index.html", None, "wheels have their pages"),
        (
            "dist/torch2.11-cpu/cuseq-1.0+torch2.11.cpu-cp312-cp312-linux_x86_64.whl",
            None,
            "there are wheels for torch 2.11, cpu",
        ),
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
