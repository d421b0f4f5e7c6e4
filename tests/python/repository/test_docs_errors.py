"""Test that the sources can still raise every message quoted in docs/errors.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "errors.md"
VARIES = "\0"  # stands for the variable parts of a message

# A literal, the end of a statement, or other code.
CPP_PART = re.compile(r'//[^\n]*|"(?P<text>(?:[^"\\]|\\.)*)"|(?P<end>;)|(?P<code>[^"/;\s]+|/)')


def python_messages(source: str) -> Iterator[str]:
    """Yield strings that are not docstrings; the parser has joined adjacent parts."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else VARIES for p in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:
                yield node.value


def cpp_messages(source: str) -> Iterator[str]:
    """Yield, for each statement that checks or warns, its literals and what is between them."""
    text, code = "", ""
    for part in CPP_PART.finditer(source):
        if part["end"]:
            if re.search(r"\bTORCH_(CHECK|WARN)", code):
                yield text
            text, code = "", ""
        elif part["code"] and part["code"] != ",":  # a comma only separates two literals
            text, code = text + VARIES, code + " " + part["code"]
        elif part["text"] is not None:
            text += re.sub(r"\\(.)", r"\1", part["text"])


def cmake_messages(source: str) -> Iterator[str]:
    for literals in re.findall(r'FATAL_ERROR((?:\s+"[^"]*")+)', source):
        yield re.sub(r"\$\{\w+\}", VARIES, "".join(re.findall(r'"([^"]*)"', literals)))


def messages() -> list[str]:
    readers = [("python/cuseq", "*.py", python_messages), ("csrc", "*.[ch]*", cpp_messages)]
    files = [(path, read) for top, end, read in readers for path in (ROOT / top).rglob(end)]
    files += [(ROOT / "setup.py", python_messages), (ROOT / "CMakeLists.txt", cmake_messages)]
    return [message for path, read in files for message in read(path.read_text())]


MESSAGES = messages()
THD = (ROOT / "docs" / "thd.md").read_text().partition("## Errors")[2]
THD_ROWS = [line for line in THD.splitlines() if line.startswith("| `")]
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def occurs(quoted: str) -> bool:
    """Return whether one message has all quoted parts in order; `...` stands for variable ones."""
    parts = [re.escape(part) for part in quoted.split("...") if part]
    found = re.compile(f"(?:.|{VARIES})*?".join(parts), re.DOTALL)
    return any(found.search(message) for message in MESSAGES)


def test_every_row_of_the_tables_is_read():
    lines = PAGE.read_text().splitlines()
    headers = ["| message | cause | remedy |", "| --- | --- | --- |"]
    assert [line for line in lines if line.startswith("|") and line not in headers] == ROWS
    assert len(ROWS) >= 50
    assert len(THD_ROWS) >= 10


@pytest.mark.parametrize("row", ROWS)
def test_a_quoted_message_is_in_the_sources(row):
    columns = re.fullmatch(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", row)
    assert columns, "three columns, the message alone in the first, in backticks"
    quoted = columns[1]
    assert len(quoted.replace("...", "")) >= 20, "too short to be one message"
    assert occurs(quoted)


@pytest.mark.parametrize("row", THD_ROWS)
def test_so_is_what_the_page_of_padded_batches_quotes(row):
    assert occurs(row.split("`")[1])


def test_a_message_is_quoted_once():
    quotes = [row.split("`")[1] for row in ROWS]
    assert sorted(set(quotes)) == sorted(quotes)


def test_every_finding_of_check_packing_is_explained():
    source = (ROOT / "python/cuseq/debug/packing_check/_suspects.py").read_text()
    table = (ROOT / "docs" / "check.md").read_text().partition("| --- | --- | --- |")[2]
    explained = re.findall(r"^\| ([a-z ]+) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert sorted(explained) == sorted(set(re.findall(r'Suspect\(\s*"([a-z ]+)"', source)))


def prints_a_dtype(source: str) -> bool:
    """Return whether a literal is followed by a dtype, which C++ prints as "Float"."""
    return re.search(r'",\s*[\w.>\[\]-]+scalar_type\(\)', source) is not None


def test_dtypes_have_their_names_in_python():
    sources = [path for path in (ROOT / "csrc").rglob("*.[ch]*") if path.is_file()]
    assert not [path.name for path in sources if prints_a_dtype(path.read_text())], "use dtype_name"
    assert prints_a_dtype('TORCH_CHECK(ok, "got ", x->scalar_type());')
    assert not prints_a_dtype('TORCH_CHECK(ok, "got ", dtype_name(x->scalar_type()));')


@pytest.mark.parametrize(
    "invented",
    [
        "lengths must be a prime number, got ...",
        "got ... lengths must not be negative",  # in another order
        "lengths must not be negative ... window must be None or at least 1",  # of two messages
        "Where the sequences of a packed row lie. It holds no token data.",  # a docstring
    ],
)
def test_what_nobody_says_is_not_found(invented):
    assert not occurs(invented)
