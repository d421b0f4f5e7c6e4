"""Check that everything of a release is there: `make release` after the wheels were built.

    release.py DIST     DIST has the source distribution and the folders of scripts/wheels.py

Prints a line for each check, and what to do where it fails. Publishes nothing. Exits with 1 if
something is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Check = tuple[str, str | None]  # what is checked, and what to do if it fails


def version_of(root: Path) -> str:
    (version,) = re.findall(
        r'^__version__ = "(.*)"$', (root / "python/cuseq/_version.py").read_text(), re.M
    )
    return version


def git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def digest_of(root: Path) -> str:
    """Return the digest of the sources in C++ and CUDA that CMakeLists.txt writes into a build."""
    kinds = {"csrc": (".cpp", ".h", ".cu", ".cuh"), "include": (".h",)}
    found = [
        path.relative_to(root).as_posix()
        for folder, endings in kinds.items()
        for path in (root / folder).rglob("*")
        if path.suffix in endings
    ]
    digests = (hashlib.sha256((root / name).read_bytes()).hexdigest() for name in sorted(found))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def fault_of(wheel: Path, root: Path) -> str | None:
    """Return what to do about a wheel with other files than the tree, or without its address."""
    again = "build it again with scripts/wheels.py"
    tracked = git(root, "ls-files", "python/cuseq", "include").splitlines()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in tracked:
            packed = name.removeprefix("python/") if name[0] == "p" else f"cuseq/{name}"
            if not name.endswith((".py", ".pyi", ".h", ".csv", ".typed")):
                continue
            if packed not in names or archive.read(packed) != (root / name).read_bytes():
                return f"{packed} differs from the tree's: {again}"
        config = archive.read("cuseq/_build_config.py").decode()
        if f'SOURCES_DIGEST = "{digest_of(root)}"' not in config:
            return f"its library is of other sources than csrc and include: {again}"
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        if b"\nProject-URL: Repository" not in archive.read(metadata):
            return f"it names no repository: {again} and CUSEQ_REPOSITORY=https://..."
    return None


def fault_of_source(source: Path, root: Path) -> str | None:
    """Return what to do about a source distribution, as `fault_of` of a wheel."""
    again = f"CUSEQ_REPOSITORY=https://... python -m build --sdist --outdir {source.parent}"
    if not source.is_file():
        return again
    with tarfile.open(source) as archive:
        files = {member.name.partition("/")[2]: member for member in archive if member.isfile()}
        for name in git(root, "ls-files", "python/cuseq", "include", "csrc").splitlines():
            member = files.get(name)
            if member is None or archive.extractfile(member).read() != (root / name).read_bytes():
                return f"{name} differs from the tree's: {again}"
        if b"\nProject-URL: Repository" not in archive.extractfile(files["PKG-INFO"]).read():
            return f"it names no repository: {again}"
    return None


def has_passed(record: dict[str, Any] | None, cell: dict[str, Any], root: Path) -> bool:
    """Return whether a record is of a cell's whole set, without a failure, on the tree's code."""
    if record is None or record["failed"] or not record["passed"] or record["set"] != cell["tests"]:
        return False
    code = ("csrc", "include", "python", "CMakeLists.txt", "setup.py")
    changed = subprocess.run(
        ["git", "diff", "--quiet", record["commit"], "--", *code], cwd=root, capture_output=True
    )
    return changed.returncode == 0  # above 1 if the commit is unknown


def checks(root: Path, dist: Path) -> Iterator[Check]:
    """Yield the checks of a tree and of its built files."""
    version = version_of(root)
    changed = git(root, "status", "--porcelain")
    yield "the tree is committed", changed and "commit or drop what `git status` shows"
    newest = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.M)[0]
    dated = re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", newest)
    yield (
        f"CHANGELOG.md begins with {version} and its date",
        None if dated else f'begin it with "## {version} (year-month-day)", not "## {newest}"',
    )
    versions = json.loads((root / "scripts/versions.json").read_text())
    cells = versions["cells"]
    records = {one["cell"]: one for one in json.loads((root / "docs/versions.json").read_text())}
    for cell in cells:
        passed = has_passed(records.get(cell), cells[cell], root)
        yield f"cell {cell} has passed", None if passed else f"make matrix CELL={cell}"
    cited = re.findall(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.M)
    yield (
        f"CITATION.cff names {version}",
        None if cited == [version] else f'write "version: {version}" into it',
    )
    source = dist / f"cuseq-{version}.tar.gz"
    yield "the source distribution is of this tree", fault_of_source(source, root)
    for minor in (torch.rpartition(".")[0] for torch in versions["wheels"]):
        for kind in ("cpu", "cu13"):
            found = [*dist.glob(f"torch{minor}-{kind}*/cuseq-{version}+torch{minor}.{kind}*.whl")]
            pythons = [
                python
                for python in versions["wheel_pythons"]
                if not any(f"-cp{python.replace('.', '')}-" in one.name for one in found)
            ]
            yield (
                f"there are wheels for torch {minor}, {kind}",
                f"python scripts/wheels.py {dist} PYTHON, with that torch, of Python "
                f"{', '.join(pythons)}" if pythons else None,
            )  # fmt: skip
    for wheel in sorted(dist.glob("torch*/*.whl")):
        yield f"{wheel.name} is of this tree", fault_of(wheel, root)
    pages = [folder for folder in dist.glob("torch*") if not (folder / "index.html").is_file()]
    yield "wheels have their pages", pages and f"python scripts/wheels.py --index {dist}" or None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dist", type=Path, metavar="DIST")
    missing = 0
    for what, remedy in checks(ROOT, parser.parse_args().dist.resolve()):
        print(f"{'missing' if remedy else 'ok':<8} {what}" + (f": {remedy}" if remedy else ""))
        missing += bool(remedy)
    print(f"{missing} missing" if missing else f"cuseq {version_of(ROOT)} is ready to be published")
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
