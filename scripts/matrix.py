"""Run a set of tests against one cell of scripts/versions.json, in an environment of its own.

    matrix.py run CELL [--set SET] [-- PYTEST ARGUMENT...]
                        make or keep the cell's environment, build cuseq for the CPU and install it
                        there, run the tests, and write what ran into docs/versions.md. With other
                        tests than a named set nothing is written
    matrix.py today [SECONDS]
                        run the set `daily` in the cell whose turn it is, or what CI, which began
                        SECONDS ago, has time for; write nothing
    matrix.py page      write the table of docs/versions.md again
    matrix.py pin CELL PACKAGE     print the requirement, such as torch==2.11.0
    matrix.py expect CELL          print the CUSEQ_EXPECT that tests/python/conftest.py checks
    matrix.py beside REQUIREMENT...  print what a build and the tests need besides, one a line

Environments are in $CUSEQ_MATRIX_DIR (build/matrix). Needs Python 3.10 and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = json.loads((ROOT / "scripts" / "versions.json").read_text())
CELLS = VERSIONS["cells"]
RECORDS, PAGE = ROOT / "docs" / "versions.json", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- `make versions` writes this table -->\n", "<!-- the end of the table -->\n"
# How many minutes after CI began a set may still be started. CI may take 90, and on a slow machine
# a cell takes 5 to install, 12 to build, and 15 for `daily`.
LATEST = {"daily": 55, "short": 68}


def printed(*command: str | Path) -> str | None:
    """Return what a command prints, without the spaces around it, or None if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def interpreter(minors: list[str]) -> Path | None:
    """Return an interpreter of the first version that is here and can make environments."""
    for minor in minors:
        name = f"python{minor}"
        prefix = printed("pyenv", "prefix", minor)
        uv = printed("uv", "python", "find", "--no-python-downloads", minor)
        for found in (shutil.which(name), prefix and f"{prefix}/bin/{name}", uv):
            # pyenv puts names of versions on PATH that are not switched on.
            code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
            if found and printed(found, "-c", code) == minor:
                return Path(found)
    return None


# ------------------------------------------------------------------------------- packages


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def beside(requirements: list[str]) -> list[str]:
    """Return what a build and the tests need besides these requirements."""
    named = {name_of(one) for one in requirements}
    return [one for one in VERSIONS["build"] + VERSIONS["beside"] if name_of(one) not in named]


def wanted(cell: str, package: str) -> str:
    """Return an exact version, one with a star, or "newest"."""
    version, _ = CELLS[cell].get("held", {}).get(package, (None, None))
    return version or CELLS[cell]["packages"][package]


def requirement(cell: str, package: str) -> str:
    version = wanted(cell, package)
    return package if version == "newest" else f"{package}=={version}"


def expected(cell: str, python: str | Path) -> dict[str, str]:
    """Return the versions that the cell must have; those called newest are asked of the index.

    The index answers for the given interpreter: a release may need a newer Python.
    """
    found = {}
    for package in CELLS[cell]["packages"]:
        found[package] = wanted(cell, package)
        if found[package] == "newest":
            answer = printed(python, "-m", "pip", "index", "versions", package) or ""
            newest = re.match(rf"{package} \((\S+)\)", answer)
            if newest is None:
                raise SystemExit(f"{cell}: the index does not say which {package} is the newest")
            found[package] = newest[1]
    return found


def as_expectation(versions: dict[str, str]) -> str:
    return " ".join(f"{package}={version}" for package, version in versions.items())


# ------------------------------------------------------------------------------- a cell


def environment(cell: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Make the cell's virtual environment, unless it is there as versions.json wants it.

    Returns:
        Its interpreter, and the versions that it must have.
    """
    base = interpreter(CELLS[cell]["python"])
    if base is None:
        raise SystemExit(f"{cell}: needs Python {' or '.join(CELLS[cell]['python'])}, not found")
    venv, stamp = folder / "venv", folder / "made_of.json"
    python = venv / "bin" / "python"

    def make_empty() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", venv], check=True)

    if not stamp.exists():
        make_empty()
    versions = expected(cell, python)
    requirements = [requirement(cell, package) for package in CELLS[cell]["packages"]]
    made_of = json.dumps([str(base), versions, requirements, beside(requirements)])
    if not stamp.exists() or stamp.read_text() != made_of:
        if stamp.exists():
            make_empty()
        variables = {**os.environ, "CUSEQ_CUDA": "off"}
        if printed("uv", "--version"):
            variables |= {"INSTALL": "uv pip install", "VIRTUAL_ENV": str(venv)}
        command = ["bash", "scripts/environment.sh", venv, *requirements]
        subprocess.run(command, env=variables, cwd=ROOT, check=True)
        stamp.write_text(made_of)
    return python, versions


def counted(*reports: Path) -> Counter[str]:
    """Return how many tests of JUnit reports passed, failed, and were skipped."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    for report in reports:
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            if tags & {"failure", "error"}:
                counts["failed"] += 1
            elif "skipped" in tags or case.get("status") == "notrun":
                counts["skipped"] += 1
            else:
                counts["passed"] += 1
    return counts


def run(cell: str, tests: list[str]) -> tuple[int, dict[str, Any]]:
    """Build and install cuseq in the cell and run tests there.

    Returns:
        The exit status of the tests, and what ran.
    """
    folder = Path(os.environ.get("CUSEQ_MATRIX_DIR") or ROOT / "build" / "matrix").resolve() / cell
    python, versions = environment(cell, folder)
    built = commit()
    # PYTHONPATH would bring the tree's own cuseq.
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHON": str(python),
        "CUSEQ_CUDA": "off",
        "CUSEQ_BUILD_TESTS": "ON",
        "CUSEQ_BUILD_DIR": str(folder / "build"),
        "CUSEQ_EXPECT": as_expectation(versions),
        "GTEST_OUTPUT": f"xml:{folder / 'cpp.xml'}",
    }
    for stale in (folder / "build").glob("lib*"):  # it may hold modules that the tree lost
        shutil.rmtree(stale)
    install = [python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps"]
    command = [*install, "--no-build-isolation", "."]
    subprocess.run(command, env=variables, cwd=ROOT, check=True)
    code = "import cuseq, sys; assert cuseq.__file__.startswith(sys.prefix), cuseq.__file__"
    subprocess.run([python, "-c", code], env=variables, cwd=folder, check=True)

    reports = [folder / "cpp.xml", folder / "python.xml"]
    for report in reports:
        report.unlink(missing_ok=True)
    ran = subprocess.run(
        ["bash", "scripts/run_tests.sh", f"--junitxml={reports[1]}", *tests],
        env=variables,
        cwd=ROOT,
    )
    counts = counted(*(report for report in reports if report.exists()))
    if not reports[1].exists() or (ran.returncode and not counts["failed"]):
        raise SystemExit(f"{cell}: the tests ended with {ran.returncode} before they were done")
    code = "import sys, importlib.metadata as m; print(*(m.version(n) for n in sys.argv[1:]))"
    packages = dict.fromkeys(["torch", "transformers", "trl", *versions])
    found = printed(python, "-c", code, *packages)
    minor = printed(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    return ran.returncode, {
        "cell": cell,
        "python": minor,
        "versions": dict(zip(packages, found.split(), strict=True)),
        **counts,
        "commit": built,
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """Return the commit that ran, with a + if files differ from it, those written here aside."""
    head = printed("git", "-C", ROOT, "rev-parse", "--short=7", "HEAD") or "unknown"
    written = [f":!{file.relative_to(ROOT)}" for file in (RECORDS, PAGE)]
    changed = printed("git", "-C", ROOT, "status", "--porcelain", "--", ".", *written)
    return f"{head}+" if changed else head


# ------------------------------------------------------------------------------- what ran


def table(records: list[dict[str, Any]]) -> str:
    """Return what ran as a Markdown table, in the order of versions.json."""
    lines = [
        "| cell | who has these | Python | torch | transformers | TRL | tests | result | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(records, key=lambda one: list(CELLS).index(one["cell"])):
        cell, versions = one["cell"], one["versions"]
        result = f"{one['passed']:,} passed, {one['skipped']:,} skipped"
        if one["failed"]:
            result += f", {one['failed']:,} failed"
        lines.append(
            f"| {cell} | {CELLS[cell]['who']} | {one['python']} | {versions['torch']} "
            f"| {versions['transformers']} | {versions['trl']} | {one['set']} | {result} "
            f"| {one['commit']}, {one['date']} |"
        )
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Write the table of docs/versions.json into docs/versions.md."""
    head, rest = PAGE.read_text().split(BEGIN)
    records = json.loads(RECORDS.read_text())
    PAGE.write_text(head + BEGIN + table(records) + END + rest.split(END)[1])


def record(ran: dict[str, Any]) -> None:
    """Keep what ran, in the place of an earlier run of that cell and set."""
    key = (ran["cell"], ran["set"])
    records = [one for one in json.loads(RECORDS.read_text()) if (one["cell"], one["set"]) != key]
    records = [one for one in records if one["cell"] in CELLS] + [ran]
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    write_page()


# ------------------------------------------------------------------------------- commands


def of_day(day: int) -> str | None:
    """Return the cell whose turn it is: of those that passed a recorded run and have a Python here.

    CI guards what has passed once: a cell joins by `matrix.py run`, whose record is committed.
    """
    passed = {one["cell"] for one in json.loads(RECORDS.read_text()) if not one["failed"]}
    others = [cell for cell in CELLS if cell != "pinned" and cell in passed]
    for step in range(len(others)):
        cell = others[(day + step) % len(others)]
        if interpreter(CELLS[cell]["python"]):
            return cell
        print(f"{cell}: left out, there is no Python {' or '.join(CELLS[cell]['python'])} here")
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("cell", choices=CELLS)
    one.add_argument("--set", choices=VERSIONS["sets"], help="tests to run instead of the cell's")
    one.add_argument("tests", nargs="*", help="arguments of pytest instead of a set")
    commands.add_parser("today").add_argument("elapsed", type=float, nargs="?", default=0)
    commands.add_parser("page")
    pin = commands.add_parser("pin")
    pin.add_argument("cell", choices=CELLS)
    pin.add_argument("package")
    commands.add_parser("expect").add_argument("cell", choices=CELLS)
    commands.add_parser("beside").add_argument("requirements", nargs="*")
    given = parser.parse_args(arguments)

    if given.command == "run":
        chosen = given.set or CELLS[given.cell]["tests"]
        status, ran = run(given.cell, given.tests or VERSIONS["sets"][chosen])
        print(json.dumps(ran, indent=1))
        if not given.tests:
            record({**ran, "set": chosen})
        return status
    if given.command == "today":
        cell = of_day(datetime.date.today().toordinal())
        if cell is None:
            print("cell of the day: LEFT OUT, no other cell has a recorded run that passed")
            return 0
        minutes = given.elapsed / 60
        chosen = next((name for name, latest in LATEST.items() if minutes <= latest), None)
        print(f"cell of the day: {cell}, tests: {chosen}, {minutes:.0f} minutes after CI began")
        if chosen is None:
            print(f"cell of the day: LEFT OUT, {max(LATEST.values())} minutes have passed")
            return 0
        sys.stdout.flush()
        status, ran = run(cell, VERSIONS["sets"][chosen])
        print(json.dumps(ran, indent=1))
        return status
    if given.command == "page":
        write_page()
    elif given.command == "pin":
        print(requirement(given.cell, given.package))
    elif given.command == "expect":
        print(as_expectation(expected(given.cell, Path(sys.executable))))
    else:
        print("\n".join(beside(given.requirements)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
