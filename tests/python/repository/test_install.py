"""Test what an installation says and does: with no torch, no nvcc, or others than before."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setuptools
import torch
from test_add_an_op import ROOT, build_environment, copy_of_the_tree

import cuseq
from cuseq import _C, _build_config
from cuseq._base import load as _load

PROJECT = (ROOT / "pyproject.toml").read_text()
TOOLS = re.findall(r'"([^"]+)"', re.search(r"^requires = (.*)$", PROJECT, re.MULTILINE)[1])


# ------------------------------------------------------------------------------- torch


@pytest.fixture
def tree(tmp_path) -> Path:
    """Return a copy of what setup.py reads before it builds."""
    tree = tmp_path / "tree"
    package = tree / "python" / "cuseq"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "python" / "cuseq" / name, package / name)
    return tree


class Environment:
    """A virtual environment with setuptools, on PYTHONPATH as in pip's isolated builds, alone."""

    def __init__(self, folder: Path, tree: Path, **options: bool):
        venv.create(folder / "env", with_pip=False, **options)
        self.python, self.tree = folder / "env" / "bin" / "python", tree
        self.tools = folder / "tools"
        self.tools.mkdir()
        installed = Path(setuptools.__file__).parents[1]
        for found in (*installed.glob("setuptools*"), *installed.glob("_distutils_hack")):
            (self.tools / found.name).symlink_to(found)
        self.variables = {"PYTHONPATH": str(self.tools), "PATH": os.environ["PATH"]}

    @property
    def site_packages(self) -> Path:
        (found,) = self.python.parents[1].glob("lib/python*/site-packages")
        return found

    def setup(self, command: str, *options: str, caller: str = "") -> subprocess.CompletedProcess:
        """Run setup.py below a process whose command line has the word `caller`."""
        below = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[2:]).returncode)"
        return subprocess.run(
            [sys.executable, "-c", below, caller, self.python, "setup.py", command, *options],
            cwd=self.tree, env=self.variables, capture_output=True, text=True,
        )  # fmt: skip


@pytest.fixture
def environment(tmp_path, tree) -> Environment:
    return Environment(tmp_path, tree)


def put_torch(folder: Path, code: str) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)


def test_an_empty_environment_is_told_before_anything_is_fetched(environment):
    made = environment.setup("dist_info", caller="install")
    assert made.returncode != 0
    assert made.stdout == "", "it stops before it does anything"
    for expected in ("pip install torch\n", "uv pip install --no-build-isolation", *TOOLS):
        assert expected in made.stderr
    assert "No module named" not in made.stderr, "uv answers that with advice that misleads"


@pytest.mark.parametrize("caller", ["download", "lock", "wheel"])
def test_metadata_for_another_purpose_need_no_torch(environment, tmp_path, caller):
    made = environment.setup("dist_info", "--output-dir", str(tmp_path), caller=caller)
    assert made.returncode == 0, made.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert f"Version: {cuseq.__version__}" in metadata.read_text()


def described(environment: Environment, folder: Path) -> tuple[dict[str, str], str]:
    """Return the addresses and the description that a package registry would show."""
    made = environment.setup("dist_info", "--output-dir", str(folder), caller="wheel")
    assert made.returncode == 0, made.stderr
    (path,) = folder.glob("*.dist-info/METADATA")
    found = email.message_from_string(path.read_text())
    urls = dict(one.split(", ") for one in found.get_all("Project-URL", []))
    assert found["Description-Content-Type"] == "text/markdown"
    return urls, found.get_payload()


def test_the_readme_is_the_description(environment, tmp_path):
    urls, text = described(environment, tmp_path)
    assert urls == {} and text.strip() == (ROOT / "README.md").read_text().strip()


def test_links_of_the_description_hold_outside_of_the_repository(environment, tmp_path):
    home = "https://example.org/them/cuseq"
    environment.variables["CUSEQ_REPOSITORY"] = home + "/"
    urls, text = described(environment, tmp_path)
    version = f"v{cuseq.__version__}"
    assert urls["Repository"] == home
    assert urls["Changelog"] == f"{home}/blob/{version}/CHANGELOG.md"
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text)
    given = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) == len(given) > 20
    for (is_picture, link), path in zip(links, given, strict=True):
        kind = "raw" if is_picture else "blob"
        assert link.removesuffix("?sanitize=true") == f"{home}/{kind}/{version}/{path}"
        assert (ROOT / path.partition("#")[0]).exists()


def test_a_source_distribution_needs_no_torch(environment, tmp_path):
    made = environment.setup("sdist", "--dist-dir", str(tmp_path), caller="build")
    assert made.returncode == 0, made.stderr
    assert list(tmp_path.glob("cuseq-*.tar.gz"))


def test_a_build_without_torch_stops(environment):
    made = environment.setup("build_ext", caller="wheel")
    assert made.returncode != 0 and "pip install torch\n" in made.stderr


@pytest.mark.parametrize("version", ["65.5.0", "77.0.2"])
def test_a_setuptools_that_cannot_read_the_project_is_named(version, environment):
    (environment.tools / "sitecustomize.py").write_text(
        f"import setuptools\nsetuptools.__version__ = '{version}'\n"
    )
    made = environment.setup("dist_info", caller="install")
    assert made.returncode != 0 and f"has {version}" in made.stderr
    assert f'pip install "{TOOLS[0]}"' in made.stderr


def test_a_torch_that_pip_would_replace_is_refused(environment):
    put_torch(environment.site_packages, "__version__ = '2.9.1+cu128'")
    made = environment.setup("dist_info", caller="install")
    assert made.returncode != 0
    assert "torch 2.11 or newer" in made.stderr and "has 2.9.1+cu128" in made.stderr
    assert "pip install --upgrade torch" in made.stderr


def test_a_torch_that_does_not_load_is_named(environment):
    put_torch(environment.site_packages, "raise OSError('libcudart.so.13: not found')")
    made = environment.setup("dist_info", caller="install")
    assert made.returncode != 0 and "OSError: libcudart.so.13: not found" in made.stderr


HIDE = "import sys; sys.path[:] = [one for one in sys.path if 'site-packages' not in one]"


def test_a_torch_that_pip_hides_is_found(environment, tmp_path):
    put_torch(environment.site_packages, "__version__ = '2.15.0a0+git1234'")
    (environment.tools / "sitecustomize.py").write_text(HIDE)
    made = environment.setup("dist_info", "--output-dir", str(tmp_path), caller="install")
    assert made.returncode == 0, made.stderr


def test_a_torch_of_the_user_is_found(tree, tmp_path):
    """pip installs for the user where site-packages are read-only, and hides them in its builds."""
    environment = Environment(tmp_path, tree, system_site_packages=True)
    base = {"PYTHONUSERBASE": str(tmp_path / "user")}
    command = [environment.python, "-c", "import site; print(site.getusersitepackages())"]
    folder = subprocess.run(command, env=base, capture_output=True, text=True, check=True).stdout
    put_torch(Path(folder.strip()), "__version__ = '2.15.0'")
    environment.variables |= base | {"PYTHONNOUSERSITE": "1"}
    made = environment.setup("dist_info", "--output-dir", str(tmp_path), caller="install")
    assert made.returncode == 0, made.stderr


# ------------------------------------------------------------------------------- nvcc

FACTS = {
    "root": "/torch", "version": "2.15.0+cu132", "cuda": "13.2", "cxx11_abi": 1, "cudart": "",
    "nvcc": "", "nvcc_packages": "nvidia-cuda-nvcc==13.2.* nvidia-nvvm==13.2.*", "gpu_archs": "",
}  # fmt: skip


def write_facts(tree: Path, **changes: str) -> None:
    (tree / "cmake").mkdir(exist_ok=True)
    text = json.dumps(FACTS | changes)
    (tree / "cmake" / "torch_info.py").write_text(f"print({text!r})\n")


def configure(tree: Path, build: Path, *options: str) -> str:
    """Run CMake over CMakeLists.txt and made-up facts; return its errors, spaces joined."""
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("there is no cmake")
    command = [cmake, "-S", tree, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", *options]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode != 0, "the copy has no sources"
    return " ".join(made.stderr.split())


@pytest.mark.parametrize("gpu", ["", "90"])
def test_a_torch_for_cuda_without_nvcc_says_what_to_type(tree, tmp_path, gpu):
    write_facts(tree, gpu_archs=gpu)
    said = configure(tree, tmp_path / "build")
    assert "torch 2.15.0+cu132 is built for CUDA 13.2, but there is no nvcc" in said
    assert "CUSEQ_CUDA=off pip install '.[transformers]'" in said
    assert "pip install 'nvidia-cuda-nvcc==13.2.*' 'nvidia-nvvm==13.2.*'" in said
    write_facts(tree, gpu_archs=gpu, cuda="12.8", nvcc_packages="")
    said = configure(tree, tmp_path / "build")
    assert "install the CUDA 12.8 toolkit and put its nvcc on PATH" in said
    assert "nvidia" not in said


def test_cuda_may_be_left_out_on_purpose(tree, tmp_path):
    write_facts(tree)
    assert "nvcc" not in configure(tree, tmp_path / "build", "-DCUSEQ_CUDA=off")
    write_facts(tree, cuda="", nvcc_packages="")
    assert "nvcc" not in configure(tree, tmp_path / "build")


def facts_here(folder: Path, cuda: str | None, **variables: str) -> dict[str, str]:
    """Return what torch_info.py prints of a torch for a version of CUDA."""
    put_torch(
        folder,
        "from types import SimpleNamespace as N\n"
        f"__version__, version = '2.15.0', N(cuda={cuda!r})\n"
        "cuda, compiled_with_cxx11_abi = N(is_available=lambda: False), lambda: True\n",
    )
    made = subprocess.run(
        [sys.executable, ROOT / "cmake" / "torch_info.py"],
        env={"PYTHONPATH": str(folder), **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(made.stdout)


def put_nvcc(folder: Path) -> str:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.touch(mode=0o755)
    return str(nvcc)


def test_nvcc_is_found_where_it_may_be(tmp_path):
    on_path, chosen = put_nvcc(tmp_path / "tools"), put_nvcc(tmp_path / "cuda" / "bin")
    variables = {"PATH": str(tmp_path / "tools")}
    assert facts_here(tmp_path / "a", "13.2", **variables)["nvcc"] == on_path
    for name in ("CUDA_HOME", "CUDA_PATH"):
        variables[name] = str(tmp_path / "cuda")
        assert facts_here(tmp_path / name, "13.2", **variables)["nvcc"] == chosen
        del variables[name]
    assert facts_here(tmp_path / "b", "13.0")["nvcc_packages"].startswith(
        "nvidia-cuda-nvcc==13.0.*"
    )
    assert facts_here(tmp_path / "c", "12.8")["nvcc_packages"] == ""
    assert facts_here(tmp_path / "d", None)["nvcc_packages"] == ""


@pytest.mark.skipif(Path("/usr/local/cuda/bin/nvcc").exists(), reason="the usual place has nvcc")
def test_nvcc_of_a_python_package_is_found(tmp_path):
    toolkit = tmp_path / "nvidia" / "cu13"
    (toolkit / "lib").mkdir(parents=True)
    (toolkit / "lib" / "libcudart.so.13").touch()
    nvcc = put_nvcc(toolkit / "bin")
    assert facts_here(tmp_path, "13.2", PATH="/nowhere")["nvcc"] == nvcc


@pytest.mark.parametrize(
    "facts,setting,calls,said",
    [
        ({}, "", ["off: -q --no-build-isolation --no-deps -e ."], True),
        (
            {"gpu_archs": "90"},
            "",
            [
                "unset: -q nvidia-cuda-nvcc==13.2.* nvidia-nvvm==13.2.*",
                "unset: -q --no-build-isolation --no-deps -e .",
            ],
            False,
        ),
        (  # CMake stops and says what to install
            {"gpu_archs": "90", "cuda": "12.8", "nvcc_packages": ""},
            "",
            ["unset: -q --no-build-isolation --no-deps -e ."],
            False,
        ),
        ({"nvcc": "/nvcc"}, "", ["unset: -q --no-build-isolation --no-deps -e ."], False),
        ({"cuda": ""}, "", ["unset: -q --no-build-isolation --no-deps -e ."], False),
        ({}, "on", ["on: -q --no-build-isolation --no-deps -e ."], False),
    ],
)
def test_make_builds_by_itself_what_the_machine_can(tree, tmp_path, facts, setting, calls, said):
    write_facts(tree, **facts)
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build.sh", tree / "scripts")
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\nif [ "$2 $3" != "pip install" ]; then exec {sys.executable} "$@"; fi\n'
        f'shift 3\necho "${{CUSEQ_CUDA:-unset}}: $*" >>{log}\n'
    )
    python.chmod(0o755)
    variables = {key: value for key, value in os.environ.items() if key != "CUSEQ_CUDA"}
    variables |= {"CUSEQ_CUDA": setting} if setting else {}
    command = ["bash", tree / "scripts" / "build.sh", python, "-q"]
    made = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert log.read_text().splitlines() == calls
    assert ("built without CUDA kernels (CUSEQ_CUDA=off)" in made.stdout) == said


# ------------------------------------------------------------------------------- another torch


def remedy(monkeypatch, folder: Path, *, installer: str, record: dict, cuda: str = "auto") -> str:
    """Return the command for a cuseq in the folder, which an installer has recorded."""
    files = {"INSTALLER": installer + "\n", "direct_url.json": json.dumps(record)}
    monkeypatch.setattr(_load, "_metadata", lambda name: files.get(name, ""))
    monkeypatch.setattr(_load, "__file__", str(folder / "python" / "cuseq" / "_base" / "load.py"))
    monkeypatch.setattr(_build_config, "CUSEQ_CUDA", cuda, raising=False)
    with pytest.raises(ImportError) as error:
        _load._check_torch("2.11.0", "2.15.0")
    return re.fullmatch(r".* is running: build cuseq again(.*)", str(error.value))[1]


def test_the_remedy_names_what_was_installed(monkeypatch, tree, tmp_path):
    python, away = sys.executable, tmp_path / "site-packages"
    end = "--force-reinstall --no-deps"
    of_tree = {"url": tree.as_uri(), "dir_info": {}}
    said = remedy(monkeypatch, away, installer="pip", record=of_tree)
    assert said == f" with `{python} -m pip install {end} {tree}`"
    said = remedy(monkeypatch, away, installer="pip", record=of_tree, cuda="off")
    assert said == f" with `CUSEQ_CUDA=off {python} -m pip install {end} {tree}`"
    said = remedy(monkeypatch, tree, installer="pip", record={})
    assert said == f" with `{python} -m pip install {end} -e {tree}`"
    said = remedy(monkeypatch, away, installer="uv", record=of_tree)
    uv = f"uv pip install --python {python} --no-build-isolation"
    assert said == f" with `{uv} {end} {tree}`"
    from_git = {"url": "https://host/cuseq.git", "vcs_info": {"vcs": "git"}}
    said = remedy(monkeypatch, away, installer="pip", record=from_git)
    assert said == f" with `{python} -m pip install {end} git+https://host/cuseq.git`"
    for unknown in ({}, {"url": (tmp_path / "gone").as_uri()}):
        said = remedy(monkeypatch, away, installer="pip", record=unknown)
        assert said == f" in its source tree with `{python} -m pip install {end} .`"


@pytest.mark.parametrize(
    ("wheel", "cuda", "page"),
    [
        ("cu130", "13.2", "torch2.15-cu132"),
        ("cu130", None, "torch2.15-cpu"),
        ("cpu", "13.2", "torch2.15-cpu"),
    ],
)
def test_a_wheel_of_another_torch_names_its_own(monkeypatch, wheel, cuda, page):
    files = {"METADATA": f"Name: cuseq\nVersion: 0.2.0+torch2.11.{wheel}\n"}
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_load, "_metadata", lambda name: files.get(name, ""))
    monkeypatch.setattr(_load, "_source", lambda: ".")
    with pytest.raises(ImportError) as raised:
        _load._check_torch("2.11.0+cu130", "2.15.0+cu132")
    assert "install the wheel for it with `" in str(raised.value)
    end = f"--no-index --no-deps cuseq --find-links .../{page}/index.html`"
    assert end in str(raised.value)


def test_a_package_for_another_python_names_those_that_it_has(tmp_path):
    _load._check_python(tmp_path)
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(ImportError, match="for other Pythons than .*: _C.cpython-39-x86_64"):
        _load._check_python(tmp_path)
    (tmp_path / Path(_C.__file__).name).touch()
    _load._check_python(tmp_path)


def test_a_second_cuseq_in_a_process_is_refused(tmp_path):
    package = Path(cuseq.__file__).parent
    shutil.copytree(package, tmp_path / "cuseq", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import sys, cuseq
for name in [name for name in sys.modules if name.split(".")[0] == "cuseq"]:
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
import cuseq
"""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "ImportError: another cuseq is loaded in this process, /" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_remedy_works_as_it_is_printed(tmp_path):
    """In an environment that has torch and this cuseq, built for another torch."""
    tree = tmp_path / "a tree"
    copy_of_the_tree(tree)
    environment = build_environment(tmp_path) | {"TMPDIR": str(tmp_path)}
    environment["PIP_NO_BUILD_ISOLATION"] = "false"  # pip's word for yes; the tools are here
    environment.pop("PYTHONPATH", None)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site_packages,) = python.parents[1].glob("lib/python*/site-packages")
    for older in site_packages.glob("setuptools*"):  # venv brings one before Python 3.12
        shutil.rmtree(older)
    (site_packages / "here.pth").write_text(f"{Path(setuptools.__file__).parents[1]}\n")

    def run(command: list | str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, shell=isinstance(command, str),
            capture_output=True, text=True,
        )  # fmt: skip

    made = run([python, "-m", "pip", "install", "--no-deps", tree])
    assert made.returncode == 0, made.stdout + made.stderr
    check = [python, "-c", "import cuseq; print(cuseq.__file__)"]
    assert run(check).stdout.strip() == str(site_packages / "cuseq" / "__init__.py")
    config = site_packages / "cuseq" / "_build_config.py"
    config.write_text(
        re.sub(r'TORCH_VERSION = ".*"', 'TORCH_VERSION = "2.0.0"', config.read_text())
    )

    said = run(check)
    assert "ImportError: cuseq was built with torch 2.0.0" in said.stderr
    made = run(re.search(r"`(.*)`", said.stderr)[1])
    assert made.returncode == 0, made.stdout + made.stderr
    assert run(check).returncode == 0
