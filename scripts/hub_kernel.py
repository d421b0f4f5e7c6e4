"""Lay out wheels of cuseq as a kernel of the Hugging Face Hub, which `kernels` loads.

    hub_kernel.py DIST OUT     DIST has the folders of scripts/wheels.py; OUT becomes the repository

A folder of wheels, torch2.11-cu130, becomes a variant, build/torch211-cxx11-cu130-x86_64-linux, for
all Pythons whose wheels are there. Publishes nothing; `hf upload OWNER/cuseq OUT --repo-type
kernel --revision v1` does. A program then needs no build and no pip. It has to say that it trusts
the publisher, unless the Hub lists that one:

    model = AutoModelForCausalLM.from_pretrained(
        name, attn_implementation="OWNER/cuseq", allow_all_kernels=True
    )
    kernel = kernels.get_kernel("OWNER/cuseq", version=1, trust_remote_code=True)
    kernel.cuseq                                                    # the whole package
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The Hub counts what is incompatible; this is the interface of flash-attn.
VERSION = 1
CODE = '''\
"""cuseq as a kernel of the Hub: the functions of flash-attn over cuseq's attention."""

import sys
import warnings
from pathlib import Path

VERSION = "<version>"

if "cuseq" not in sys.modules:  # its ops can be registered once in a process
    # Processes that this one spawns, as for loading data, search here too.
    _folder = str(Path(__file__).parent)
    sys.path.insert(0, _folder)
    try:
        import cuseq
    except BaseException:
        sys.path.remove(_folder)
        raise
import cuseq

try:
    from cuseq.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
except ImportError as error:
    raise ImportError(
        f"cuseq {cuseq.__version__} was imported before this kernel and lacks what it exports: one "
        "cuseq serves a process, so update that one, or load the kernel first"
    ) from error
if cuseq.__version__ != VERSION:
    warnings.warn(
        f"this kernel is of cuseq {VERSION}, and cuseq {cuseq.__version__}, which was imported "
        "before it, runs: one cuseq serves a process"
    )

__all__ = ["cuseq", "flash_attn_func", "flash_attn_varlen_func"]
'''
CARD = """\
---
license: apache-2.0
tags: [kernels]
---

# cuseq

Attention over packed rows, and the tools around it. `attn_implementation` takes the name of this
repository (with `allow_all_kernels=True`); `kernels.get_kernel(name, version={version},
trust_remote_code=True).cuseq` is the whole package, with `enable`.
"""


def variant_of(label: str) -> str:
    """Return the Hub's name of a folder of wheels, such as torch2.11-cu130."""
    found = re.fullmatch(r"torch(\d+)\.(\d+)-(cpu|cu\d+)", label)
    if found is None:
        raise SystemExit(f"a folder of wheels must be named like torch2.11-cpu, got {label}")
    major, minor, backend = found.groups()
    return f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-linux"


def lay_out(wheels: list[Path], variant: Path) -> None:
    """Write one variant of the kernel, from the wheels of one torch and one version of cuseq."""
    versions = {wheel.name.split("-")[1] for wheel in wheels}
    if len(versions) > 1:
        raise SystemExit(f"wheels of a folder must have one version, got {sorted(versions)}")
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
        # The Python part is that of any of them, and each has its own extension module.
        shutil.copytree(Path(scratch, "cuseq"), variant / "cuseq")
    version = versions.pop().partition("+")[0]
    (variant / "__init__.py").write_text(CODE.replace("<version>", version))
    digest = hashlib.sha256()
    for path in sorted(variant.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    backend = "cpu" if "-cpu-" in variant.name else "cuda"
    metadata = {
        "id": f"_cuseq_{backend}_{digest.hexdigest()[:12]}",
        "name": "cuseq",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dist", type=Path, metavar="DIST")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args()
    folders = sorted({wheel.parent for wheel in args.dist.glob("*/cuseq-*.whl")})
    if not folders:
        raise SystemExit(f"{args.dist} must have folders of wheels, got none")
    for folder in folders:
        variant = args.out / "build" / variant_of(folder.name)
        if variant.exists():
            raise SystemExit(f"{variant} is there already")
        wheels = sorted(folder.glob("cuseq-*.whl"))
        lay_out(wheels, variant)
        size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
        print(f"{variant.relative_to(args.out)}: {len(wheels)} wheels, {size / 2**20:.1f} MiB")
    (args.out / "README.md").write_text(CARD.format(version=VERSION))


if __name__ == "__main__":
    main()
