"""Test that the tools of the repository have one version each, wherever a file names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def pinned(file: str, tool: str) -> set[str]:
    """Return the versions of the tool that a file names."""
    return set(re.findall(rf"\b{tool}==([\d.]+)", (ROOT / file).read_text()))


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_pre_commit_has_the_linters_of_make_lint(tool):
    versions = pinned("Makefile", tool)
    assert len(versions) == 1
    assert pinned(".pre-commit-config.yaml", tool) == versions


def test_the_citation_has_the_package_and_its_license():
    fields = dict(re.findall(r"^([\w-]+): (\S.*)$", (ROOT / "CITATION.cff").read_text(), re.M))
    project = dict(re.findall(r'^(\w+) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M))
    assert (fields["title"], fields["license"]) == (project["name"], project["license"])
