"""Fixtures shared by all tests.

Environment:
    CUSEQ_REQUIRE_CUDA=1: a missing GPU, or a build without CUDA kernels, fails instead of skipping.
    CUSEQ_TEST_SEED: seed of the random numbers in every test, default 0.
    CUSEQ_EXPECT="torch=2.15.0 trl=1.*": a package that has another version fails the whole run.
    CI: hypothesis draws the same examples in every run.
    CUSEQ_TESTS_UNTIL: seconds since the epoch after which no test is begun; the others are skipped.

`pytest --failures=FILE` writes each failure to a file at once, for runs that a time limit may end.
`pytest --gpu-only` leaves out the tests that use no GPU. For `--dist loadgroup` of pytest-xdist
each test function is then a group, so that its parameters share what it compiles.
"""

from __future__ import annotations

import fnmatch
import gc
import importlib.metadata
import inspect
import os

# oneDNN reads this when torch loads it. On virtual machines that only claim AMX, AMX kernels die
# with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import subprocess
import sys
import tempfile
import time
import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

import cuseq
from cuseq.attention import choice, packages

# Inductor's keys leave out the schemas of custom ops: code of an older build would be run again.
_SCHEMAS = sorted(str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("cuseq::"))
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"inductor_{zlib.crc32(repr(_SCHEMAS).encode()):08x}"),
)

settings.register_profile(
    "cuseq",
    max_examples=100,
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    # The fixtures here are devices and switches; they hold no state that examples could share.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("cuseq")


def pytest_addoption(parser):
    parser.addoption("--gpu-only", action="store_true", help="leave out tests that use no GPU")
    parser.addoption("--failures", metavar="FILE", help="write each failure to FILE at once")


def _uses_gpu(item: pytest.Function) -> bool:
    """Return whether a test has a fixture of a GPU or names CUDA."""
    if {"cuda", "second_gpu"} & set(item.fixturenames):
        return True
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("device") in ("cpu", "cuda"):
        return parameters["device"] == "cuda"
    return "gpu" in item.name.lower() or "cuda" in item.name + inspect.getsource(item.function)


def unexpected(expected: str) -> list[str]:
    """Return how the environment differs from CUSEQ_EXPECT."""
    found = []
    for package, version in (one.split("=") for one in expected.split()):
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if not fnmatch.fnmatch(installed.split("+")[0], version):
            found.append(f"{package} must be {version}, is {installed}")
    return found


def pytest_configure(config):
    wrong = unexpected(os.environ.get("CUSEQ_EXPECT", ""))
    if wrong:
        raise pytest.UsageError(f"CUSEQ_EXPECT: {'; '.join(wrong)}")
    file, is_worker = config.getoption("--failures"), hasattr(config, "workerinput")
    if file is not None and not is_worker:
        config.pluginmanager.register(_Failures(file))


class _Failures:
    """Writes failures as they come: a run that is cut off reports none."""

    def __init__(self, file: str):
        self._file = file

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with open(self._file, "a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get("CUSEQ_TESTS_UNTIL", "inf")):
        pytest.skip("the time is up that CUSEQ_TESTS_UNTIL gives")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--gpu-only"):
        return
    kept: list[pytest.Function] = []
    left_out: list[pytest.Function] = []
    for item in items:
        (kept if _uses_gpu(item) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    for item in items:
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}::{item.originalname}"))


def _cuda() -> torch.device:
    missing = None
    if not torch.cuda.is_available():
        missing = "there is no CUDA device"
    elif not cuseq.build_info()["cuda"]:
        missing = "cuseq was built without CUDA kernels"
    if missing is None:
        return torch.device("cuda", 0)
    if os.environ.get("CUSEQ_REQUIRE_CUDA") == "1":
        pytest.fail(f"CUSEQ_REQUIRE_CUDA=1, but {missing}")
    pytest.skip(missing)


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    """Return each device in turn."""
    return torch.device("cpu") if request.param == "cpu" else _cuda()


@pytest.fixture
def cuda() -> torch.device:
    """Return the CUDA device, for tests that need a GPU."""
    return _cuda()


@pytest.fixture
def fa4(cuda) -> None:
    """Skip where FlashAttention 4 is not installed."""
    choice.load_backends()
    if not packages.found.get("fa4"):
        pytest.skip("FlashAttention 4 is not installed")


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """Keep gc.collect, which Trainer and many tests call, from walking all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_numbers(request):
    """Seed each test by its name alone, so that its numbers do not depend on other tests."""
    seed = int(os.environ.get("CUSEQ_TEST_SEED", "0"))
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + seed)


@pytest.fixture(autouse=True)
def full_precision():
    """Restore fp32 precision: Trainer's torch_compile turns TF32 on for the whole process."""
    before = torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = before


@pytest.fixture
def one_gpu(monkeypatch):
    """Hide further GPUs: a Trainer in one process would spread its model by DataParallel."""
    if torch.cuda.device_count() > 1:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def own_signals(monkeypatch):
    """Leave signals to pytest, which an example takes for itself."""
    monkeypatch.setattr("signal.signal", lambda number, handler: None)


@pytest.fixture
def second_gpu() -> torch.device:
    """Return a GPU that is not the current one."""
    _cuda()
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    return torch.device("cuda", 1)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill the results of torch.empty with the largest int, so that an unwritten output shows."""
    # The fill takes effect only in deterministic mode.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1, dtype=torch.int32).item() == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_cache():
    """Empty the identity cache before and after the test."""
    cuseq.cache.clear()
    yield
    cuseq.cache.clear()


@pytest.fixture
def run_python():
    """Return a function that runs code in a fresh interpreter, for variables that are read once."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
