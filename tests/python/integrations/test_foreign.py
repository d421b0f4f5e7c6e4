"""Test what is said of other packages that are missing or have changed their private names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from cuseq._base import foreign
from cuseq._base.foreign import (
    UnknownRelease,
    check_attribute,
    check_fields,
    check_parameter,
    private,
    signature_of,
)


@pytest.fixture
def package(monkeypatch):
    """Make a package of version 4.5 with one of each kind of thing."""
    package, module = ModuleType("otherpack"), ModuleType("otherpack.parts")
    package.__version__ = "4.5"
    code = """
from dataclasses import dataclass

def _wrap(module: object, *, deep: bool = False):
    def call():
        module._hook = deep
    return call

class Thing:
    _limit = 3

@dataclass
class Options:
    scale: float
    mask: object = None
"""
    for name, one in (("otherpack", package), ("otherpack.parts", module)):
        monkeypatch.setitem(sys.modules, name, one)
    exec(code, vars(module))
    return module


def test_what_is_known_is_returned(package):
    assert private(package, "_wrap") is package._wrap
    assert private(package, "_wrap", signature=["module", "deep"]) is package._wrap
    assert private(package, "_wrap", signature="(module, *, deep=False)") is package._wrap
    assert private(package.Thing, "_limit") == private(package.Thing(), "_limit") == 3
    check_fields(package.Options, {"scale", "mask"})
    check_attribute(package._wrap, "_hook")
    assert signature_of(package._wrap) == "(module, *, deep=False)"


def test_a_parameter_may_have_the_name_of_another_release(package):
    renamed = {"module": "layer", "deep": "all"}
    for names in (["layer", "deep"], ["module", "all"]):
        with pytest.raises(UnknownRelease, match="takes .module, deep., not"):
            private(package, "_wrap", signature=names)
    with pytest.raises(UnknownRelease, match=r"takes \(module, deep\), not \(layer, whole\)"):
        private(package, "_wrap", signature=["layer", "whole"], renamed=renamed)
    found = private(package, "_wrap", signature=["layer", "all"], renamed=renamed)
    assert found is package._wrap
    assert check_parameter(package._wrap, ("layer", "module")) is None
    with pytest.raises(UnknownRelease, match="_wrap takes none of layer, block"):
        check_parameter(package._wrap, ("layer", "block"))


def test_a_missing_name(package):
    start = r"cuseq does not know this otherpack \(4\.5\): otherpack\.parts\."
    with pytest.raises(UnknownRelease, match=start + "_wrapped is missing"):
        private(package, "_wrapped")
    for owner in (package.Thing, package.Thing()):
        with pytest.raises(UnknownRelease, match=start + "Thing._size is missing"):
            private(owner, "_size")


def test_another_signature(package):
    takes = r"otherpack\.parts\._wrap takes "
    with pytest.raises(UnknownRelease, match=takes + r"\(module, deep\), not \(module\)"):
        private(package, "_wrap", signature=["module"])
    with pytest.raises(UnknownRelease, match=takes + r"\(module, \*, deep=False\), not \(module\)"):
        private(package, "_wrap", signature="(module)")
    with pytest.raises(UnknownRelease, match="Thing._limit is a int, not a function"):
        private(package.Thing, "_limit", signature="()")


def test_other_fields(package):
    with pytest.raises(UnknownRelease, match="otherpack.parts.Options has a field mask"):
        check_fields(package.Options, {"scale"})
    with pytest.raises(UnknownRelease, match="otherpack.parts.Options has no field softcap"):
        check_fields(package.Options, {"scale", "mask", "softcap"})


def test_an_attribute_that_is_not_set_any_more(package):
    with pytest.raises(UnknownRelease, match="parts._wrap does not use attribute _old_forward"):
        check_attribute(package._wrap, "_old_forward")


def test_the_package_of_a_subclass_is_said(package):
    @dataclass
    class Own(package.Thing):
        pass

    with pytest.raises(UnknownRelease, match=r"this otherpack \(4\.5\): .*Own._size is missing"):
        private(Own(), "_size", package="otherpack")


def test_a_package_without_a_version(package):
    del sys.modules["otherpack"].__version__
    with pytest.raises(UnknownRelease, match=r"this otherpack \(unknown version\)"):
        private(package, "_size")


def test_the_names_that_transformers_is_used_by(run_python):
    """Faked changes are found when cuseq is registered, before anything is replaced.

    In a process of its own: models that other tests enabled would keep the registration.
    """
    pytest.importorskip("transformers")
    code = """
import pytest, transformers
from cuseq._base.foreign import UnknownRelease
from cuseq.integrations.transformers import register, unregister

for owners, name in (
    ([transformers.PreTrainedConfig], "_attn_implementation"),
    (transformers.AttentionInterface.__mro__[:2], "_global_mapping"),
):
    with pytest.MonkeyPatch.context() as patch:
        for owner in owners:
            patch.delattr(owner, name)
        with pytest.raises(UnknownRelease, match=rf"this transformers .*{name} is missing"):
            register()
assert "cuseq" not in transformers.AttentionMaskInterface().valid_keys()
register()
assert "cuseq" in transformers.AttentionMaskInterface().valid_keys()
unregister()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_hooks_of_accelerate_under_another_name(monkeypatch):
    """A renamed hook must not be taken for a missing one."""
    hooks = pytest.importorskip("accelerate.hooks")
    pytest.importorskip("transformers")
    import torch

    from cuseq.integrations.transformers import _private

    module = torch.nn.Linear(2, 2)
    assert not _private.is_offloaded(module)

    def add_hook_to_module(module, hook, append=False):
        module._hook = hook

    monkeypatch.setattr(hooks, "add_hook_to_module", add_hook_to_module)
    _private._check_hooks.cache_clear()
    with pytest.raises(UnknownRelease, match="does not use attribute _hf_hook"):
        _private.is_offloaded(module)
    _private._check_hooks.cache_clear()


# ------------------------------------------------------------------------------- missing packages


def test_the_oldest_transformers_is_that_of_the_extras():
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    floors = set(re.findall(r'"transformers>=([\d.]+)"', project))
    assert floors == {foreign._NEEDED["transformers"].least}


WITHOUT = """
import json, sys

for package in ("transformers", "trl", "megatron", "xformers"):
    sys.modules[package] = None  # which makes its import fail
import cuseq, torch

packed = cuseq.PackingCollator()([{{"input_ids": [5, 6]}}])["packed"]
said = []
for code in {codes!r}:
    try:
        exec(code)
    except ImportError as error:
        said.append(str(error))
    else:
        said.append("no error")
print(json.dumps(said))
"""
INSTALL = "pip install 'cuseq[transformers]', or in a clone pip install '.[transformers]'"
TRANSFORMERS = "needs transformers 5.5.3 or newer", INSTALL
NEEDS = {
    "cuseq.enable(torch.nn.Linear(2, 2))": TRANSFORMERS,
    "cuseq.disable(torch.nn.Linear(2, 2))": TRANSFORMERS,
    "import cuseq.integrations.transformers": TRANSFORMERS,
    "from cuseq.integrations.transformers import PackingCallback": TRANSFORMERS,
    "import cuseq.integrations.trl": ("needs TRL", "pip install trl"),
    "from cuseq.integrations.megatron import packed_seq_params as f; f(packed)": (
        "packed_seq_params needs megatron-core",
        "pip install megatron-core",
    ),
    "packed.xformers_bias()": ("packed.xformers_bias needs xformers", "pip install xformers"),
}


def test_a_missing_package_is_named_with_what_to_type():
    command = [sys.executable, "-c", WITHOUT.format(codes=list(NEEDS))]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    for (code, expected), said in zip(NEEDS.items(), json.loads(made.stdout), strict=True):
        assert all(part in said for part in expected), f"{code}: {said}"


def test_the_check_of_a_model_needs_transformers_and_says_so(monkeypatch, capsys):
    from cuseq.debug.packing_check.__main__ import NOT_RUN, main

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["no/model"]) == NOT_RUN
    assert INSTALL in capsys.readouterr().err


def test_a_transformers_that_is_too_old_is_named(monkeypatch):
    transformers = pytest.importorskip("transformers")
    for version in ("4.57.1", "5.5.2", "5.5.3.dev0"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(
            ImportError, match=re.escape(f"5.5.3 or newer, got {version}: {INSTALL}")
        ):
            foreign.load("transformers", "cuseq.enable")
    for version in ("5.5.3", "5.10.0", "6.0.0.dev0"):
        monkeypatch.setattr(transformers, "__version__", version)
        assert foreign.load("transformers", "cuseq.enable") is transformers
