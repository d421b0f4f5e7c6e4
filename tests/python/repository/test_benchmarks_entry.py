"""`python -m benchmarks` lists every benchmark, runs one by its name and refuses other names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def benchmarks() -> set[str]:
    return {path.stem.removeprefix("bench_") for path in ROOT.glob("benchmarks/bench_*.py")}


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        ROOT / "benchmarks/results/README.md",
    ]


def test_every_benchmark_is_listed():
    listed = {line.split()[0] for line in run().stdout.splitlines() if "; needs: " in line}
    assert listed == benchmarks()


def test_a_name_runs_its_file():
    result = run("metadata", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: python -m benchmarks metadata [-h]")


@pytest.mark.parametrize("name", sorted(benchmarks()))
def test_a_benchmark_says_how_it_is_run(name):
    source = (ROOT / f"benchmarks/bench_{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    assert re.search(rf"^    python -m benchmarks {name}( |$)", docstring, re.MULTILINE)
    assert f"bench_{name}.py" not in docstring


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_runs_benchmarks_by_their_names(page):
    text = page.read_text()
    assert set(re.findall(r"python -m benchmarks ([a-z_]+)", text)) <= benchmarks()
    assert not re.findall(r"bench_\w+\.py --?\w|python\S* benchmarks/bench_", text)


def test_the_guide_names_every_list_of_benchmarks():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    section = guide.partition("## Add a benchmark")[2].partition("\n## ")[0]
    assert all(name in section for name in ("`BENCHMARKS`", "`bench`", "`BENCHES`"))


def test_published_results_are_few_and_listed_once():
    results = ROOT / "benchmarks/results"
    files = {str(path.relative_to(results)) for path in results.glob("*/*")}
    assert 0 < len(files) <= 60
    index = (results / "README.md").read_text()
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \|", index, re.MULTILINE)
    assert sorted(page for _, page in rows) == sorted(f for f in files if f.endswith(".md"))
    assert all(page == f"{name}.md" for name, page in rows)
    drawn = set(re.findall(r"`(\w+/\w+\.json)`", index))
    assert drawn == {name for name in files if name.endswith(".json")}
    pictures = {Path(name).name for name in files if name.endswith(".png")}
    assert pictures == set(re.findall(r"`(\w+\.png)`", index))


def test_commands_of_results_name_options_that_there_are():
    index = (ROOT / "benchmarks/results/README.md").read_text()
    shared = "".join(path.read_text() for path in ROOT.glob("benchmarks/*.py")
                     if not path.stem.startswith("bench_"))  # fmt: skip
    commands = re.findall(r"`python -m benchmarks (\w+)(.*?)`", index)
    assert len(commands) == len(re.findall(r"^\| \[", index, re.MULTILINE))
    for name, options in commands:
        source = (ROOT / f"benchmarks/bench_{name}.py").read_text() + shared
        for option in re.findall(r" (--\S+)", options):
            assert f'"{option}"' in source, (name, option)


def test_another_name_is_refused():
    result = run("nothing")
    assert result.returncode != 0
    assert "NAME must be one of" in result.stderr
