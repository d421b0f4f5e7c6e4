"""Test scripts/wheels.py: the version and the torch of a wheel, and the pages that pip reads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import script
from test_add_an_op import ROOT

METADATA = "Metadata-Version: 2.4\nName: cuseq\nVersion: 0.2.0\nRequires-Dist: torch>=2.11\n"


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    return script("wheels")


@pytest.fixture
def packer() -> None:
    """Skip without the program `wheel`; setuptools has a copy that only it can import."""
    if subprocess.run([sys.executable, "-m", "wheel", "version"], capture_output=True).returncode:
        pytest.skip("needs wheel")


def make_wheel(folder: Path, metadata: str = METADATA, version: str = "0.2.0") -> Path:
    """Return a wheel that has nothing but a module."""
    path = folder / f"cuseq-{version}-py3-none-any.whl"
    info = f"cuseq-{version}.dist-info"
    files = {
        "cuseq/__init__.py": "here = True\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        rows = [f"{info}/RECORD,,"]
        for name, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            rows.append(f"{name},sha256={digest.decode().rstrip('=')},{len(text)}")
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "\n".join(rows) + "\n")
    return path


def test_a_wheel_has_its_torch_in_its_version_and_asks_for_it(wheels, packer, tmp_path):
    made = wheels.relabelled(make_wheel(tmp_path), "torch2.11.cu130", tmp_path / "work")
    assert made.name == "cuseq-0.2.0+torch2.11.cu130-py3-none-any.whl"
    with zipfile.ZipFile(made) as archive:
        metadata = archive.read("cuseq-0.2.0+torch2.11.cu130.dist-info/METADATA").decode()
    assert "Version: 0.2.0+torch2.11.cu130\n" in metadata
    assert re.findall("Requires-Dist: torch.*", metadata) == ["Requires-Dist: torch==2.11.*"]


def test_a_wheel_that_does_not_ask_for_torch_is_refused(wheels, packer, tmp_path):
    wheel = make_wheel(tmp_path, METADATA.replace("torch", "numpy"))
    with pytest.raises(SystemExit, match="must ask for torch once, got 0 times"):
        wheels.relabelled(wheel, "torch2.11.cpu", tmp_path / "work")


@pytest.mark.parametrize(
    ("version", "cuda", "setting", "label"),
    [
        ("2.11.0+cu130", "13.0", "auto", "torch2.11.cu130"),
        ("2.15.0", "12.8", "on", "torch2.15.cu128"),
        ("2.11.0+cu130", "13.0", "off", "torch2.11.cpu"),
        ("2.13.0+cpu", None, "auto", "torch2.13.cpu"),
    ],
)
def test_the_label_follows_torch_and_the_setting(
    version, cuda, setting, label, wheels, tmp_path, monkeypatch
):
    (tmp_path / "torch").mkdir()
    facts = f"from types import SimpleNamespace\n__version__ = {version!r}\n"
    facts += "compiled_with_cxx11_abi = lambda: True\n"
    facts += "cuda = SimpleNamespace(is_available=lambda: False)\n"
    (tmp_path / "torch" / "__init__.py").write_text(
        facts + f"version = SimpleNamespace(cuda={cuda!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUSEQ_CUDA", setting)
    assert wheels.label_of(sys.executable) == label


def test_pip_finds_the_wheel_of_its_page_alone(wheels, tmp_path):
    for minor in ("2.11", "2.15"):
        folder = tmp_path / f"torch{minor}-cpu"
        folder.mkdir()
        version = f"0.2.0+torch{minor}.cpu"
        metadata = METADATA.replace("0.2.0", version).replace("torch>=2.11", f"torch=={minor}.*")
        make_wheel(folder, metadata, version)
    wheels.write_index(tmp_path)
    assert '"torch2.11-cpu/index.html"' in (tmp_path / "index.html").read_text()
    page = tmp_path / "torch2.11-cpu" / "index.html"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-index"]
    command = [*pip, "-d", tmp_path / "got", "--find-links", page, "cuseq"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    (got,) = (tmp_path / "got").iterdir()
    assert got.name == "cuseq-0.2.0+torch2.11.cpu-py3-none-any.whl"
    page.write_text(page.read_text().replace("sha256=", "sha256=0"))  # a file that was changed
    got.unlink()
    said = subprocess.run([*command, "--no-cache-dir"], capture_output=True, text=True)
    assert said.returncode != 0 and "HASH" in said.stderr.upper()


def test_the_workflow_builds_the_wheels_that_a_release_asks_for():
    asked = json.loads((ROOT / "scripts" / "versions.json").read_text())
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert json.loads(re.search(r"torch: (\[.*\])", workflow)[1]) == asked["wheels"]
    assert json.loads(re.search(r"python: (\[.*\])", workflow)[1]) == asked["wheel_pythons"]


def test_pages_of_nothing_are_refused(wheels, tmp_path):
    with pytest.raises(SystemExit, match="must have folders of wheels, got none"):
        wheels.write_index(tmp_path)
