"""Check that everything of a release is there: `make release` after the wheels were built.

    release.py DIST     DIST has the source distribution and the folders of scripts/wheels.py

Prints a line for each check, and what to do where it fails. Publishes nothing. Exits with 1 if
something is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Check = tuple[str, str | None]  # what is checked, and what to do if it fails


def version_of(root: Path) -> str:
    (version,) = re.findall(
        r'^__version__ = "(.*)"$', (root / "python/cuseq/_version.py").read_text(), re.M
    )
    return version


def fault_of(wheel: Path, root: Path) -> str | None:
    """Return what to do about a wheel with other files than the tree, or without its address."""
    again = "build it again with scripts/wheels.py"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in (name for name in names if name.endswith((".py", ".h"))):
            folder = "." if name.startswith("cuseq/include/") else "python"
            file = root / folder / name.removeprefix("cuseq/" if folder == "." else "")
            if not file.name.startswith("_build") and (
                not file.is_file() or file.read_bytes() != archive.read(name)
            ):
                return f"{name} differs from the tree's: {again}"
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        if b"\nProject-URL: Repository" not in archive.read(metadata):
            return f"it names no repository: {again} and CUSEQ_REPOSITORY=https://..."
    return None


def checks(root: Path, dist: Path) -> Iterator[Check]:
    """Yield the checks of a tree and of its built files."""
    version = version_of(root)
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
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
        record = records.get(cell)
        passed = record is not None and record["failed"] == 0
        yield f"cell {cell} has passed", None if passed else f"make matrix CELL={cell}"
    cited = re.findall(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.M)
    yield (
        f"CITATION.cff names {version}",
        None if cited == [version] else f'write "version: {version}" into it',
    )
    source = dist / f"cuseq-{version}.tar.gz"
    yield (
        "the source distribution is built",
        None if source.is_file() else f"python -m build --sdist --outdir {dist}",
    )
    for minor in (torch.rpartition(".")[0] for torch in versions["wheels"]):
        for kind in ("cpu", "cu"):
            found = [*dist.glob(f"torch{minor}-{kind}*/cuseq-{version}+torch{minor}.{kind}*.whl")]
            yield (
                f"there are wheels for torch {minor}, {kind}",
                None if found else f"python scripts/wheels.py {dist} PYTHON, with that torch",
            )
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
