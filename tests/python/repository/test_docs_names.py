"""Test that the pages name what there is: members in docs/api, names in backticks, releases."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cuseq

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def resolved(name: str) -> Any:
    """Return the object of a dotted name; raise AttributeError or ImportError if there is none."""
    if name.startswith("torch.ops.cuseq."):
        return getattr(torch.ops.cuseq, name.removeprefix("torch.ops.cuseq."))
    value: Any = cuseq
    parts = name.split(".")
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


# ------------------------------------------------------------------------------- docs/api


def listed_members(page: str) -> dict[str, list[str]]:
    """Return the members that a page of docs/api lists, by class."""
    found = {}
    for entry in page.split("\n::: ")[1:]:
        members = re.findall(r"^        - (\w+)$", entry, re.MULTILINE)
        if members:
            found[entry.split()[0]] = members
    return found


LISTED = {
    name: members
    for page in sorted(ROOT.glob("docs/api/*.md"))
    for name, members in listed_members(page.read_text()).items()
}


@pytest.mark.parametrize("name", LISTED)
def test_a_page_lists_the_public_members_of_a_class(name):
    public = {member for member in dir(resolved(name)) if not member.startswith("_")}
    listed = [member for member in LISTED[name] if not member.startswith("__")]
    assert sorted(listed) == sorted(public)


def test_the_classes_of_the_first_page_are_compared():
    assert {"cuseq.PackedLayout", "cuseq.PackedTree", "cuseq.GraphedStep"} <= set(LISTED)


# ------------------------------------------------------------------------------- backticks


def names_in(text: str) -> set[str]:
    """Return the dotted names of cuseq in a page's inline code; programs run in other tests."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = set()
    for code in re.findall(r"`([^`\n]+)`", prose):
        found |= set(
            re.findall(r"(?<![\w./\-])(?:torch\.ops\.)?cuseq(?:\.[A-Za-z_]\w*)+(?![\w*])", code)
        )
    return found


def missing(names: set[str]) -> list[str]:
    found = []
    for name in sorted(names):
        try:
            resolved(name)
        except (AttributeError, ImportError) as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_backticks_exist(page):
    assert not missing(names_in(page.read_text()))


def test_a_name_that_is_not_there_is_found():
    page = "`cuseq.pack`, `x = cuseq.block_mask(p)`, `torch.ops.cuseq.no_op`, `a.cuseq.b`, "
    page += "`cuseq.ops.cached_*`\n```python\ncuseq.in_a_program\n```\n"
    names = names_in(page)
    assert names == {"cuseq.pack", "cuseq.block_mask", "torch.ops.cuseq.no_op", "cuseq.ops"}
    assert [line.split(":")[0] for line in missing(names)] == [
        "cuseq.block_mask",
        "torch.ops.cuseq.no_op",
    ]


# ------------------------------------------------------------------------------- versions


def test_the_page_of_versions_says_whose_families_are_listed():
    """It counts families of several releases, and links a list that is of one."""
    families = (ROOT / "docs/families.md").read_text()
    release = re.search(r"This run: transformers (\S+),", families)[1]
    versions = " ".join((ROOT / "docs/versions.md").read_text().split())
    assert f"The list in [families](families.md) is that of {release}." in versions
