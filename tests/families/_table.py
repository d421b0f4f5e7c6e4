"""The results of a sweep as a table: for the terminal, and the page docs/families.md."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

import torch
import transformers

import cuseq
from tests.families._checks import CHECKS
from tests.families.result import (
    DIFFERS,
    LEAKS,
    NOT_TRIED,
    RAISES,
    REFUSED,
    RIGHT,
    VERDICTS,
    FamilyResult,
)

_WIDTH = 100
_HEAD = """\
# Families

After this page you know whether `cuseq.enable` takes your model's family, and why not.
`python -m tests.families --docs docs/families.md` writes it. It makes a small random model of each
causal-LM family of the installed transformers, enables it by `cuseq.enable`, and compares what it
computes with the same model before. This run: transformers {transformers}, torch
{torch}, cuseq {cuseq}, on {device}.

| check | what it does |
| --- | --- |
{checks}

A family is "right" if all checks agree. Sizes and options of a real model differ from these:
`python -m cuseq.debug.packing_check MODEL` checks a real one.
[CONTRIBUTING](../CONTRIBUTING.md) says how a family that is refused can be added.

| result | families |
| --- | ---: |
{counts}
"""
_OTHERS = """
## {title}

{text}

| family | why |
| --- | --- |
{rows}
"""
_SECTIONS = (
    (LEAKS, "Leaking", "Documents of a packed row reach each other, and `enable` warns of it."),
    (DIFFERS, "Different", "A check found other numbers."),
    (RAISES, "Raising", "A check raised that does not raise without cuseq."),
    (REFUSED, "Refused", "`enable` raises ValueError with this reason and replaces nothing."),
    (NOT_TRIED, "Not tried", "The program has no small model of these families."),
)


def as_text(results: Sequence[FamilyResult]) -> str:
    """Return one line a family, and the counts."""
    lines = [as_line(result) for result in sorted(results, key=lambda one: one.family)]
    return "\n".join([*lines, "", ", ".join(f"{n} {verdict}" for verdict, n in _counts(results))])


def as_line(result: FamilyResult) -> str:
    """Return the line of one family."""
    said = result.reason or ", ".join(_short(result))
    return f"{result.family:26} {result.verdict:10} {shorten(said, _WIDTH)}"


def as_page(results: Sequence[FamilyResult], device: str = "cpu") -> str:
    """Return the page of the documentation, of a run on "cpu" or "cuda"."""
    results = sorted(results, key=lambda one: one.family)
    checks = dict.fromkeys(name for result in results for name in result.checks)
    page = _HEAD.format(
        transformers=transformers.__version__,
        cuseq=cuseq.__version__,
        torch=torch.__version__.partition("+")[0],
        device="a CPU" if device == "cpu" else "a GPU",
        checks="\n".join(f"| {name} | {_summary(name)} |" for name in checks),
        counts="\n".join(f"| {verdict} | {n} |" for verdict, n in _counts(results)),
    )
    right = [result for result in results if result.verdict == RIGHT]
    rows = "\n".join(
        f"| `{r.family}` | {', '.join(_short(r))} | {'; '.join(map(_cell, r.left_alone))} |"
        for r in right
    )
    page += f"\n## Right\n\n| family | replaced | left alone |\n| --- | --- | --- |\n{rows}\n"
    for verdict, title, text in _SECTIONS:
        rows = "\n".join(
            f"| `{r.family}` | {_cell(_sentence(r.reason))} |"
            for r in results
            if r.verdict == verdict
        )
        if rows:
            page += _OTHERS.format(title=title, text=text, rows=rows)
    return page


def _summary(check: str) -> str:
    return (CHECKS[check].__doc__ or "").partition(".\n")[0].rstrip(".")


def _short(result: FamilyResult) -> list[str]:
    """Return the parts that were replaced, without the names of classes and modules."""
    return list(dict.fromkeys(entry.partition(":")[0] for entry in result.replaced))


def _counts(results: Sequence[FamilyResult]) -> list[tuple[str, int]]:
    found = [(verdict, sum(r.verdict == verdict for r in results)) for verdict in VERDICTS]
    return [(verdict, n) for verdict, n in found if n]


def _sentence(text: str) -> str:
    """Return the first sentence, since remedies after it are the same in every row."""
    return text.partition(". ")[0]


def _cell(text: str) -> str:
    return shorten(text.replace("|", "\\|"), 2 * _WIDTH, placeholder=" ...")
