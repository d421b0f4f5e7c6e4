"""Test the versions file, what reads it, and the script that runs tests against its cells."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
from example_modules import script

ROOT = Path(__file__).resolve().parents[3]
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


matrix = script("matrix")
VERSIONS, CELLS = matrix.VERSIONS, matrix.CELLS


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# ------------------------------------------------------------------------------- the file


def test_the_package_demands_the_floors():
    project = (ROOT / "pyproject.toml").read_text()
    floors = {("python", VERSIONS["floors"]["python"])}
    floors |= {(name, VERSIONS["floors"][name]) for name in ("torch", "transformers")}
    found = set(re.findall(r'"(torch|transformers)>=([\d.]+)"', project))
    found |= {("python", re.search(r'requires-python = ">=([\d.]+)"', project)[1])}
    assert found == floors
    build = re.search(r"^requires = (\[.*\])$", project, re.MULTILINE)[1]
    assert json.loads(build) == VERSIONS["build"]


def test_pages_name_the_floors():
    found = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        found |= set(
            re.findall(r"(Python|torch|transformers)[ #]+([\d.]*\d) or newer", page.read_text())
        )
    assert {(name.lower(), version) for name, version in found} == set(VERSIONS["floors"].items())


def test_cells_lie_between_the_floors_and_the_newest():
    for name, cell in CELLS.items():
        assert set(cell) - {"held"} == {"who", "python", "packages", "tests"}, name
        assert cell["tests"] in VERSIONS["sets"], name
        for minor in cell["python"]:
            assert number(minor) >= number(VERSIONS["floors"]["python"]), name
        assert list(cell["packages"])[:2] == ["torch", "transformers"], name
        for package in ("torch", "transformers"):
            version = cell["packages"][package]
            if version != "newest":
                floor, newest = VERSIONS["floors"][package], VERSIONS["newest"][package]
                assert number(floor) <= number(version) <= number(newest), name


@pytest.mark.parametrize("cell,kind", [("oldest", "floors"), ("newest-known", "newest")])
def test_both_ends_are_cells(cell, kind):
    for package in ("torch", "transformers"):
        assert f"{CELLS[cell]['packages'][package]}.".startswith(f"{VERSIONS[kind][package]}.")


def test_a_package_is_held_back_for_a_reason():
    for name, cell in CELLS.items():
        for package, (version, reason) in cell.get("held", {}).items():
            assert cell["packages"][package] == "newest" and number(version), name
            assert len(reason) > 10, name


def test_requirements_beside_a_cell_leave_its_packages_out():
    everything = matrix.beside(["torch==2.15.0"])
    assert "ninja" in everything and [one for one in everything if one.startswith("trl==")]
    without = matrix.beside(["torch", "trl==0.27.2", "megatron_core", "tokenizers==0.22.*"])
    assert {matrix.name_of(one) for one in set(everything) - set(without)} == {
        "trl",
        "megatron-core",
        "tokenizers",
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_installs_the_pinned_cell_or_what_it_is_told():
    def shown(*settings: str) -> str:
        command = ["make", "-n", "environment", f"PYTHON={sys.executable}", *settings]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    pinned = CELLS["pinned"]["packages"]
    assert f'"torch=={pinned["torch"]}" "transformers=={pinned["transformers"]}"' in shown()
    assert '"torch" "transformers==5.5.3"' in shown(
        "TORCH=torch", "TRANSFORMERS=transformers==5.5.3"
    )


# ------------------------------------------------------------------------------- interpreters


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_python_that_is_not_switched_on_is_found_behind_its_name(tmp_path, monkeypatch):
    shims, real = tmp_path / "shims", tmp_path / "versions" / "bin" / f"python{MINOR}"
    monkeypatch.setenv("PATH", f"{shims}:/usr/bin:/bin")
    program(shims / f"python{MINOR}", "exit 127")
    program(shims / "uv", "exit 2")
    program(shims / "pyenv", "exit 1")
    assert matrix.interpreter([MINOR]) is None
    program(real, f'exec {sys.executable} "$@"')
    program(shims / "pyenv", f"echo {real.parent.parent}")
    assert matrix.interpreter(["3.99", MINOR]) == real
    assert matrix.interpreter(["3.99"]) is None  # pyenv's answer is looked at too


def test_a_cell_without_its_python_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(CELLS["pinned"], "python", ["3.98", "3.99"])
    with pytest.raises(SystemExit, match="pinned: needs Python 3.98 or 3.99"):
        matrix.environment("pinned", tmp_path)


def test_every_cell_that_passed_has_its_day(monkeypatch, capsys, tmp_path):
    records = tmp_path / "versions.json"
    monkeypatch.setattr(matrix, "RECORDS", records)
    monkeypatch.setattr(matrix, "interpreter", lambda minors: sys.executable)
    records.write_text(json.dumps([{"cell": "oldest", "failed": 1}]))
    assert matrix.of_day(0) is None and matrix.main(["today"]) == 0
    assert "LEFT OUT, no other cell has a recorded run" in capsys.readouterr().out
    records.write_text(json.dumps([{"cell": cell, "failed": 0} for cell in CELLS]))
    days = [matrix.of_day(day) for day in range(len(CELLS) - 1)]
    assert sorted([*days, "pinned"]) == sorted(CELLS)
    missing = CELLS[days[0]]["python"]
    monkeypatch.setattr(matrix, "interpreter", lambda minors: minors != missing or None)
    assert CELLS[matrix.of_day(0)]["python"] != missing
    assert f"{days[0]}: left out, there is no Python" in capsys.readouterr().out
    monkeypatch.setattr(matrix, "interpreter", lambda minors: None)
    assert matrix.of_day(0) is None


# ------------------------------------------------------------------------------- environments


def test_an_environment_is_made_again_when_its_cell_changes(tmp_path, monkeypatch):
    commands = []
    packages = {"torch": "2.11.0", "trl": "newest"}
    monkeypatch.setitem(CELLS, "mine", {"python": [MINOR], "packages": packages, "held": {}})
    monkeypatch.setattr(matrix, "interpreter", lambda minors: Path(sys.executable))
    index = ["trl (1.16.0)"]
    monkeypatch.setattr(matrix, "printed", lambda *command: index[-1])
    folder = tmp_path / "mine"

    def run(command, **kwargs):
        commands.append([str(one) for one in command])
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(matrix.subprocess, "run", run)

    def made() -> list[list[str]]:
        commands.clear()
        python, versions = matrix.environment("mine", folder)
        assert python == folder / "venv" / "bin" / "python"
        assert versions == {**packages, "trl": re.search(r"[\d.]+", index[-1])[0]}
        return [command[1:] for command in commands]

    venv = str(folder / "venv")
    first = [["-m", "venv", venv], ["scripts/environment.sh", venv, "torch==2.11.0", "trl"]]
    assert made() == first
    assert made() == []
    (folder / "left over").touch()
    packages["torch"] = "2.12.1"
    assert made()[1][2] == "torch==2.12.1"
    assert not (folder / "left over").exists()
    assert made() == []
    index.append("trl (1.17.0)")  # a new release
    assert made()[1][3] == "trl"
    (folder / "made_of.json").unlink()  # an installation that was cut off
    assert len(made()) == 2


def test_the_newest_is_what_the_index_has_unless_it_is_held(tmp_path, monkeypatch):
    python = tmp_path / "python"
    monkeypatch.setitem(CELLS["newest"], "held", {"trl": ["1.9.0", "for this test"]})
    program(python, 'echo "$5 (2.99.0)"; echo "Available versions: 3.0"')
    assert matrix.expected("newest", python) == {
        "torch": "2.99.0",
        "transformers": "2.99.0",
        "trl": "1.9.0",
    }
    assert matrix.requirement("newest", "trl") == "trl==1.9.0"
    assert matrix.requirement("newest", "torch") == "torch"
    program(python, "exit 1")
    with pytest.raises(SystemExit, match="does not say which torch is the newest"):
        matrix.expected("newest", python)


TORCH = importlib.metadata.version("torch").split("+")[0]


@pytest.mark.parametrize(
    "expected,said",
    [
        ("", []),
        (f"torch={TORCH}", []),
        (f"torch={TORCH.rpartition('.')[0]}.*", []),
        ("torch=0.0.1", [f"torch must be 0.0.1, is {TORCH}"]),
        (f"no-such-package=1.0 torch={TORCH}", ["no-such-package must be 1.0, is not installed"]),
    ],
)
def test_versions_are_compared_with_what_is_expected(expected, said):
    assert conftest.unexpected(expected) == said


def test_other_versions_than_expected_fail_the_run():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"CUSEQ_EXPECT": "torch=0.0.1"}
    ran = subprocess.run(
        [*command, "tests/python/repository/test_tools.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and f"torch must be 0.0.1, is {TORCH}" in ran.stderr


# ------------------------------------------------------------------------------- what ran

REPORTS = [
    """<testsuites><testsuite tests="5">
    <testcase name="a"/><testcase name="b"><skipped type="pytest.skip"/></testcase>
    <testcase name="c"><failure/></testcase><testcase name="d"><error/></testcase>
    <testcase name="e"><system-out/></testcase></testsuite></testsuites>""",
    """<testsuites><testsuite><testcase name="a" status="run"/><testcase name="b" status="notrun"/>
    <testcase name="c" status="run"><skipped/></testcase></testsuite></testsuites>""",
]


def test_results_are_counted(tmp_path):
    for i, text in enumerate(REPORTS):
        (tmp_path / f"{i}.xml").write_text(text)
    counts = matrix.counted(tmp_path / "0.xml", tmp_path / "1.xml")
    assert counts == {"passed": 3, "failed": 2, "skipped": 3}


def a_run(cell: str, passed: int, failed: int = 0) -> dict[str, object]:
    return {
        "cell": cell,
        "set": "fast",
        "python": "3.12",
        "versions": {"torch": "2.15.0", "transformers": "5.24.0", "trl": "1.16.0"},
        "passed": passed,
        "failed": failed,
        "skipped": 7,
        "commit": "abc1234",
        "date": "2026-11-26",
    }


def test_a_run_replaces_the_one_before(tmp_path, monkeypatch):
    page, records = tmp_path / "page.md", tmp_path / "records.json"
    page.write_text(f"before\n{matrix.BEGIN}old\n{matrix.END}after\n")
    records.write_text(json.dumps([a_run("a cell that is gone", 1)]))
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "RECORDS", records)
    for ran in (a_run("newest", 1), a_run("oldest", 2), a_run("newest", 3456, failed=4)):
        matrix.record(ran)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
    rows = [line for line in text.splitlines() if "3.12" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| oldest", "| newest"]
    assert "2 passed, 7 skipped |" in rows[0]
    assert "| 2.15.0 | 5.24.0 | 1.16.0 | fast | 3,456 passed, 7 skipped, 4 failed |" in rows[1]


def test_the_page_has_what_ran():
    records = json.loads(matrix.RECORDS.read_text())
    assert all(one["cell"] in CELLS and one["set"] in VERSIONS["sets"] for one in records)
    between = matrix.PAGE.read_text().split(matrix.BEGIN)[1].split(matrix.END)[0]
    assert between == matrix.table(records), "run `make versions`"


@pytest.mark.parametrize("minutes,tests", [(0, "daily"), (55, "daily"), (56, "short"), (69, None)])
def test_ci_runs_what_it_has_time_for(minutes, tests, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(matrix, "of_day", lambda day: "oldest")
    monkeypatch.setattr(matrix, "run", lambda *arguments: ran.append(arguments) or (3, {}))
    monkeypatch.setattr(matrix, "record", lambda ran: pytest.fail("CI's checkout is thrown away"))
    status = matrix.main(["today", str(60 * minutes)])
    if tests is None:
        assert (status, ran) == (0, [])
        assert "LEFT OUT, 68 minutes have passed" in capsys.readouterr().out
    else:
        assert (status, ran) == (3, [("oldest", VERSIONS["sets"][tests])])
        assert f"cell of the day: oldest, tests: {tests}" in capsys.readouterr().out


def test_a_run_is_recorded_only_with_a_named_set(monkeypatch):
    recorded = []
    monkeypatch.setattr(matrix, "run", lambda cell, tests: (0, {"cell": cell, "tests": tests}))
    monkeypatch.setattr(matrix, "record", recorded.append)
    matrix.main(["run", "oldest"])
    matrix.main(["run", "oldest", "--set", "short"])
    matrix.main(["run", "oldest", "--", "-m", "not full", "tests/python/layout"])
    assert [one["set"] for one in recorded] == [CELLS["oldest"]["tests"], "short"]
    assert recorded[1]["tests"] == VERSIONS["sets"]["short"]
