"""`python -m benchmarks` lists every benchmark, runs one by its name and refuses other names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_every_benchmark_is_listed():
    listed = {line.split()[0] for line in run().stdout.splitlines() if "; needs: " in line}
    files = {path.stem.removeprefix("bench_") for path in ROOT.glob("benchmarks/bench_*.py")}
    assert listed == files


def test_a_name_runs_its_file():
    result = run("metadata", "--help")
    assert result.returncode == 0
    assert "bench_metadata.py" in result.stdout


def test_another_name_is_refused():
    result = run("nothing")
    assert result.returncode != 0
    assert "NAME must be one of" in result.stderr
