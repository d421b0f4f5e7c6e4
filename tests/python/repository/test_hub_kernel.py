"""Test scripts/hub_kernel.py: a kernel is laid out from wheels, and programs load it by path."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_modules import script

import cuseq

PACKAGE = Path(cuseq.__file__).parent
VERSION = ".".join(torch.__version__.split(".")[:2])
# What `kernels` does with a variant: the module has a name of its own, and no folder on sys.path.
LOAD = """
import importlib.util, sys
def load(variant):
    spec = importlib.util.spec_from_file_location("_cuseq_kernel", f"{variant}/__init__.py")
    sys.modules["_cuseq_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["_cuseq_kernel"])
    return sys.modules["_cuseq_kernel"]
"""
BY_NAME = """
import sys, torch
torch.version.cuda = None  # the variant without CUDA, whatever this torch was built with
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2)

def model(config, name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(), attn_implementation=name)

for config in (lambda: LlamaConfig(**SIZES), lambda: MistralConfig(**SIZES, sliding_window=3)):
    ours, stock = model(config, "me/cuseq"), model(config, "sdpa")
    ids = torch.randint(0, 64, (1, 12))
    positions = torch.tensor([[*range(5), *range(3), *range(4)]])
    logits = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = [stock(input_ids=one, use_cache=False).logits for one in ids.split([5, 3, 4], 1)]
    torch.testing.assert_close(logits, torch.cat(alone, 1))
    padded, mask = torch.randint(0, 64, (2, 6)), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert ours.generate(padded, **options).equal(stock.generate(padded, **options))
assert "kernel" in sys.modules["cuseq"].__file__
"""


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    return script("hub_kernel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a wheel of the package under test, in a folder of scripts/wheels.py."""
    folder = tmp_path_factory.mktemp("dist") / f"torch{VERSION}-cpu"
    folder.mkdir()
    path = folder / f"cuseq-{cuseq.__version__}+torch{VERSION}.cpu-cp3-cp3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in PACKAGE.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(PACKAGE.parent))
    return path


@pytest.fixture(scope="module")
def repository(hub, wheel, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kernel")
    hub.lay_out([wheel], out / "build" / hub.variant_of(wheel.parent.name))
    return out


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True
    )


def test_the_hub_names_of_wheels(hub):
    machine = platform.machine()
    assert hub.variant_of("torch2.11-cpu") == f"torch211-cxx11-cpu-{machine}-linux"
    assert hub.variant_of("torch2.15-cu130") == f"torch215-cxx11-cu130-{machine}-linux"
    with pytest.raises(SystemExit, match="must be named like torch2.11-cpu, got wheels"):
        hub.variant_of("wheels")


def test_the_metadata(repository):
    (variant,) = repository.glob("build/*")
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"} and metadata["id"].isidentifier()
    assert metadata["version"] == 1 and metadata["python-depends"] == []


def test_a_program_without_cuseq_loads_it(repository):
    (variant,) = repository.glob("build/*")
    done = run(f"""{LOAD}
import torch
kernel = load("{variant}")
assert kernel.cuseq.__file__.startswith("{variant}")
q, offsets = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
out = kernel.flash_attn_varlen_func(q, q, q, offsets, offsets, causal=True)
packed = kernel.cuseq.PackedLayout.from_lengths([2, 3])
assert out.equal(kernel.cuseq.varlen_attention(q, q, q, packed))
assert load("{variant}").cuseq is kernel.cuseq
""")
    assert done.returncode == 0, done.stderr


def test_a_process_that_was_spawned_reads_its_layouts(repository):
    (variant,) = repository.glob("build/*")
    done = run(f"""{LOAD}
import multiprocessing
kernel = load("{variant}")
packed = kernel.cuseq.PackedLayout.from_lengths([2, 3])
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.apply(repr, (packed,)) == repr(packed)
""")
    assert done.returncode == 0, done.stderr


def test_a_cuseq_that_was_imported_stays(repository):
    (variant,) = repository.glob("build/*")
    done = run(
        f'{LOAD}\nimport cuseq\nassert load("{variant}").cuseq is cuseq',
        PYTHONPATH=str(PACKAGE.parent),
    )
    assert done.returncode == 0, done.stderr


def test_another_version_that_was_imported_is_said(repository):
    (variant,) = repository.glob("build/*")
    said = f"this kernel is of cuseq {cuseq.__version__}, and cuseq 9.1, which was imported before"
    done = run(
        f"""{LOAD}
import cuseq, warnings
cuseq.__version__ = "9.1"
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    load("{variant}")
assert [str(one.message).startswith({said!r}) for one in found] == [True], found
""",
        PYTHONPATH=str(PACKAGE.parent),
    )
    assert done.returncode == 0, done.stderr


def test_an_older_cuseq_that_was_imported_is_named(repository):
    (variant,) = repository.glob("build/*")
    done = run(f"""{LOAD}
import types
sys.modules["cuseq"] = types.SimpleNamespace(__version__="0.1")
try:
    load("{variant}")
except ImportError as error:
    assert "cuseq 0.1 was imported before this kernel" in str(error)
""")
    assert done.returncode == 0, done.stderr


def test_a_package_that_does_not_load_leaves_nothing_behind(repository, tmp_path, hub, wheel):
    hub.lay_out([wheel], tmp_path)
    config = tmp_path / "cuseq" / "_build_config.py"
    config.write_text(config.read_text().replace(torch.__version__, "1.0"))
    done = run(f"""{LOAD}
for _ in range(2):
    try:
        load("{tmp_path}")
    except ImportError as error:
        assert "cuseq was built with torch 1.0" in str(error)
        assert "take a build of this folder for torch" in str(error)
        assert "cuseq" not in sys.modules and "{tmp_path}" not in sys.path
""")
    assert done.returncode == 0, done.stderr


def test_wheels_of_two_versions_are_refused(hub, tmp_path):
    wheels = [tmp_path / f"cuseq-{version}-cp311-cp311-any.whl" for version in ("1.0", "1.1")]
    with pytest.raises(SystemExit, match="must have one version"):
        hub.lay_out(wheels, tmp_path / "variant")


@pytest.mark.skipif(find_spec("kernels") is None, reason="needs kernels")
def test_a_model_takes_it_by_the_name_of_its_repository(repository):
    done = run(BY_NAME, LOCAL_KERNELS=f"me/cuseq={repository}")
    assert done.returncode == 0, done.stderr
