"""Test the build and its errors, and that the README's examples run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import cuseq
from cuseq._base import load as _load

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = (ROOT / "csrc" / "ops.cpp").read_text()
OPS = re.findall(r'"(\w+)\(', SCHEMAS)


def test_version_is_written_once():
    assert cuseq.__version__ == importlib.metadata.version("cuseq")
    assert f"## {cuseq.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("running", ["2.11.0", "2.11.1+cu130", "2.11.0a0+git1234"])
def test_patch_releases_and_vendor_builds_of_torch_are_accepted(running):
    _load._check_torch("2.11.0+cu130", running)


@pytest.mark.parametrize("running", ["2.12.0", "2.10.1", "3.11.0"])
def test_another_torch_names_both_and_the_remedy(running):
    with pytest.raises(ImportError, match=rf"torch 2.11.0.*torch {running}.*pip install"):
        _load._check_torch("2.11.0", running)


# Packages of their own have the kernels of these; Python registers them where one is installed.
OF_PACKAGES = ("fa3_", "fa4_")


@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith(("cached_", *OF_PACKAGES))])
def test_every_op_answers_on_both_devices(op):
    """With a kernel, with the error below in a build without CUDA, or without any tensors."""

    def has_kernel(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"cuseq::{op}", key)

    for key in ("CPU", "CUDA"):
        assert has_kernel(key) or has_kernel("CompositeExplicitAutograd"), key


def test_importing_cuseq_leaves_large_packages_alone():
    """Each of these takes longer to import than the rest of cuseq."""
    large = ["torch._dynamo", "torch.distributed.tensor", "triton", "sympy", "transformers"]
    code = f"import sys, cuseq; print([name for name in {large} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]"]


def test_the_command_says_what_runs_here():
    command = [sys.executable, "-m", "cuseq"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert {"cuseq", "running", "GPU", "frameworks", "kernels", "next"} <= lines.keys()
    assert lines["cuseq"].startswith(f"{cuseq.__version__}, built with torch {torch.__version__}")
    assert f"torch {torch.__version__}, Python" in lines["running"]
    assert ("attention" in lines) == (torch.cuda.is_available() and cuseq.build_info()["cuda"])
    if not torch.cuda.is_available():
        assert (lines["GPU"], lines["next"]) == ("none that torch finds", "nothing is missing")


@pytest.mark.parametrize(
    ("cuda", "gpu", "reasons", "said"),
    [
        (False, (9, 0), {}, r"cuseq has no kernels for it: install the wheel of torch2\.\d+-c"),
        (True, (7, 5), {"fa4": ""}, "cannot run on sm_75: CUSEQ_CUDA_ARCHS=75 before the build"),
        (True, (12, 0), {"fa4": ""}, "compiles the kernels for sm_120 at .*: CUSEQ_CUDA_ARCHS=120"),
        (True, (8, 6), {"fa4": ""}, None),
        (True, (9, 0), {"fa4": "no", "cudnn": "no"}, r"cuDNN, or FlashAttention 4 \(pip install"),
        (True, (9, 0), {"fa4": "", "cudnn": "no"}, None),
    ],
)
def test_the_command_says_what_is_missing(cuda, gpu, reasons, said):
    from cuseq.__main__ import advices

    build = {"cuda": cuda, "cuda_archs": "80,90"}
    gpus = [types.SimpleNamespace(major=gpu[0], minor=gpu[1])]
    found = [one for one in advices(build, gpus, reasons) if "cuseq[fla]" not in one]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


@pytest.mark.skipif(cuseq.build_info()["cuda"], reason="this build has CUDA kernels")
def test_a_build_without_cuda_says_how_to_get_it():
    on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(NotImplementedError, match="built without CUDA.*pip install"):
        torch.ops.cuseq.cu_seqlens.default.redispatch(on_cuda, torch.tensor([2, 3]))


def examples(page: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL | re.M)
    return [textwrap.dedent(one) for one in found]


PAGES = {
    "README.md": 1,
    "docs/attention.md": 2,
    "docs/cache.md": 1,
    "docs/check.md": 4,
    "docs/compile.md": 3,
    "docs/context_parallel.md": 2,
    "docs/cuda_graphs.md": 2,
    "docs/hybrids.md": 3,
    "docs/images.md": 1,
    "docs/index.md": 1,
    "docs/many_gpus.md": 1,
    "docs/masks.md": 3,
    "docs/packing.md": 5,
    "docs/quickstart.md": 4,
    "docs/thd.md": 8,
    "docs/trainer.md": 2,
    "docs/trees.md": 4,
    "docs/trl.md": 3,
    "docs/unsloth.md": 1,
    "docs/why.md": 2,
}
EXAMPLES = [(page, n) for page in PAGES for n in range(len(examples(page)))]
NEED_TRANSFORMERS = {"docs/hybrids.md": "5.17"}  # the page says so


def test_pages_have_examples():
    assert {page: len(examples(page)) for page in PAGES} == PAGES


@pytest.mark.parametrize("page,number", EXAMPLES)
def test_example(page, number, one_gpu, tmp_path, monkeypatch):
    del one_gpu
    example = examples(page)[number]
    for package in ("transformers", "trl", "datasets"):
        if f"from {package}" in example or f"import {package}" in example:
            pytest.importorskip(package, NEED_TRANSFORMERS.get(page))
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # graphs are counted per code object, whichever test compiled it
    exec(compile(example, f"{page} example {number}", "exec"), {})


@pytest.mark.parametrize("page", ["README.md", *sorted(ROOT.glob("docs/*.md"))], ids=str)
def test_links_lead_somewhere(page):
    page = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_a_bad_setting_is_named():
    code = "import cuseq"
    environment = os.environ | {"CUSEQ_CACHE_MAX_ENTRIES": "many"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "CUSEQ_CACHE_MAX_ENTRIES must be a number" in result.stderr
