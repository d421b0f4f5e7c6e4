"""The user's own table of measurements: where it is, what is read, and what is refused."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cuseq.attention import choice as _choice
from cuseq.attention import packages as _packages
from cuseq.attention import table as _attention_table
from cuseq.attention.table import own_path, read_own_table, read_table

GPU = "NVIDIA L40S"
HEAD = "sm,half,head_dim,mask,window,mode,tokens,sequences,flash,flex,gpu,torch"
ROW = "89,1,128,causal,0,eager,2048,7,120.5,,NVIDIA L40S,2.11.0+cu130"
FACTS = (89, True, 128, "causal", 0, "eager", 2048, 7)


@pytest.fixture
def machine(monkeypatch) -> None:
    """Pretend that the process has one L40S, torch 2.11 and no table of the user's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=None: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu128")
    monkeypatch.setenv(_attention_table.VARIABLE, "")


@pytest.fixture
def write(machine, tmp_path, monkeypatch):
    """Return a function that writes a table of lines and names it to cuseq."""

    def put(*lines: str) -> Path:
        path = tmp_path / "mine.csv"
        path.write_text("\n".join(lines) + "\n")
        monkeypatch.setenv(_attention_table.VARIABLE, str(path))
        return path

    return put


@pytest.fixture
def loaded(monkeypatch):
    """Return a function that loads the measurements as a first call does, and returns the rows."""
    monkeypatch.setattr(_choice, "_loaded", False)
    monkeypatch.setattr(_choice, "_ignored", "")
    monkeypatch.setattr(_choice, "PACKAGES", {})
    rows: dict = {}
    monkeypatch.setattr(_choice._C, "set_measured_attention", lambda found: rows.update(found))

    def load() -> dict:
        _choice.load()
        return rows

    return load


def test_where_the_table_is(monkeypatch):
    monkeypatch.delenv(_attention_table.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert own_path() == Path("/settings/cuseq/attention_table.csv")
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "/home/one")
    assert own_path() == Path("/home/one/.config/cuseq/attention_table.csv")
    monkeypatch.setenv(_attention_table.VARIABLE, "~/two.csv")
    assert own_path() == Path("/home/one/two.csv")
    monkeypatch.setenv(_attention_table.VARIABLE, "")
    assert own_path() is None


def test_without_a_table_the_packages_counts(machine, tmp_path, monkeypatch, loaded):
    assert loaded() == {facts: times for facts, times in read_table() if times}
    monkeypatch.delenv(_attention_table.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # where there is none
    assert read_own_table() == ({}, "")


def test_rows_of_this_machine_count(write, loaded):
    write("# measured by hand", HEAD, "", ROW)
    assert read_own_table() == ({FACTS: {"flash": 120.5}}, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loaded()
    assert found[FACTS] == {"flash": 120.5} and len(found) == 1 + len(read_table())
    assert _choice._ignored == ""


def test_a_row_takes_the_place_of_the_packages(write, loaded):
    facts, times = read_table()[0]
    sm, half, *rest = facts
    cells = [sm, int(half), *rest, 1.5, "", GPU, "2.11"]
    write(HEAD, ",".join(map(str, cells)))
    found = loaded()
    assert found[facts] == {"flash": 1.5} != times
    assert len(found) == len(read_table())


def test_rows_of_other_machines_are_ignored_and_named(write, loaded):
    path = write(
        HEAD,
        ROW.replace(GPU, "NVIDIA A100"),
        ROW.replace(GPU, "NVIDIA A100").replace("2048", "4096"),
        ROW.replace("2.11.0", "2.15.0"),
        ROW,
    )
    assert set(loaded()) - dict(read_table()).keys() == {FACTS}
    assert _choice._ignored == (
        f"ignored rows of {path}: 2 of NVIDIA A100, 1 of torch 2.15; this is NVIDIA L40S with "
        "torch 2.11"
    )


def test_a_table_without_a_row_of_this_machine_warns(write, loaded):
    path = write(HEAD, ROW.replace("2.11.0", "2.15.0"))
    with pytest.warns(UserWarning, match="ignored rows of .*: 1 of torch 2.15.*To measure") as seen:
        assert loaded() == {facts: times for facts, times in read_table() if times}
    assert len(seen) == 1 and str(path) in str(seen[0].message)
    loaded()  # once


@pytest.mark.parametrize(
    "column,cell,rule",
    [
        ("sm", "ninety", "a compute capability such as 90"),
        ("sm", "-90", "a compute capability"),
        ("half", "yes", "1 for fp16 and bf16, or 0"),
        ("head_dim", "0", "a number from 1 to 999999999"),
        ("head_dim", "12800000000", "a number from 1 to 999999999"),
        ("mask", "casual", "one of causal, full, window, two_sided, spans, softcap"),
        ("window", "-1", "a number of keys"),
        ("mode", "", "one of eager, compiled, captured"),
        ("tokens", "2048.0", "a number from 1"),
        ("sequences", "0", "a number from 1"),
        ("flash", "fast", "microseconds above 0, or empty"),
        ("flash", "0", "microseconds above 0, or empty"),
        ("flash", "nan", "microseconds above 0, or empty"),
        ("flash", "inf", "microseconds above 0, or empty"),
        ("gpu", "", "the name of a GPU"),
        ("torch", "", "a version of torch"),
    ],
)
def test_a_value_that_is_not_of_its_kind_is_named(column, cell, rule, write, loaded):
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | {column: cell}
    path = write("# a comment", HEAD, ROW, ",".join(cells.values()))
    for _ in range(2):  # every call says so, not the first alone
        with pytest.raises(ValueError) as raised:
            loaded()
        message = str(raised.value)
        assert message.startswith(f"{path}, line 4: {column} must be {rule}")
        assert f"got {cell!r}: correct the table, or delete it and measure again" in message


@pytest.mark.parametrize(
    "lines,message",
    [
        ([HEAD, ROW.replace("120.5", "")], "line 2: it must have the time of a backend, got none"),
        ([HEAD, ROW + ",1"], "line 2: it must have a cell for each of the 12 columns, got 13"),
        ([HEAD, ROW, ROW], "line 3: facts must be measured once, got them twice"),
        ([HEAD.replace("gpu", "card"), ROW], "line 2: it must have a column gpu"),
        ([HEAD.replace("flex", "fa5"), ROW], "line 2: its columns must be .*, got 'fa5'"),
    ],
)
def test_a_table_of_another_form_is_refused(lines, message, write):
    write(*lines)
    with pytest.raises(ValueError, match=f"mine.csv, {message}"):
        read_own_table()


def test_a_table_that_cannot_be_read_is_named(write, tmp_path, monkeypatch):
    path = write(HEAD)
    path.unlink()
    with pytest.raises(ValueError, match="CUSEQ_ATTENTION_TABLE must name .*mine.csv"):
        read_own_table()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="CUSEQ_ATTENTION_TABLE must name .*mine.csv"):
        read_own_table()


# ----------------------------------------------------------------- the benchmark that writes it


@pytest.fixture
def benchmark_module(machine, monkeypatch) -> ModuleType:
    folder = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    kept = set(sys.modules)
    import bench_attention_backends

    yield bench_attention_backends
    for name in set(sys.modules) - kept:
        del sys.modules[name]


def test_what_the_benchmark_writes_is_read(benchmark_module, tmp_path, monkeypatch):
    bench = benchmark_module
    path = tmp_path / "new folder" / "table.csv"
    row = bench.Row(2048, 350)
    facts = bench.facts_of(row, "eager")
    foreign = facts | {"gpu": "NVIDIA A100, 80 GB", "flash": "9.0"}
    where = {"gpu": GPU, "torch": torch.__version__, "commit": "c", "time": "t"}
    bench.write_table(path, [foreign], [facts | {"flash": "7.5", "flex": "8.0"}], where)
    monkeypatch.setenv(_attention_table.VARIABLE, str(path))
    table = read_own_table()
    lengths = len(row.lengths)
    assert table.rows == {
        (89, True, 128, "causal", 0, "eager", 2048, lengths): {"flash": 7.5, "flex": 8.0}
    }
    assert "1 of NVIDIA A100, 80 GB" in table.ignored
    assert [one.name for one in path.parent.iterdir()] == ["table.csv"]


def test_the_benchmark_measures_again_what_is_of_this_machine(benchmark_module, monkeypatch):
    bench = benchmark_module
    row = bench.Row(2048, 350)
    facts = bench.facts_of(row, "eager")
    monkeypatch.setattr(_packages, "found", dict.fromkeys((*_choice.PACKAGES, "cudnn"), False))
    assert bench.is_here(facts, facts) and bench.is_here(facts | {"torch": "2.11.0"}, facts)
    packages = {name: cell for name, cell in facts.items() if name != "gpu"}
    assert bench.is_here(packages, facts) and not bench.is_here(packages | {"sm": "90"}, facts)
    for other in ({"gpu": "NVIDIA A100"}, {"torch": "2.15.0"}):
        assert not bench.is_here(facts | other, facts)
        assert bench.lacks([facts | other | {"flash": "1"}], row, "eager")
    assert bench.lacks([facts | {"flash": ""}], row, "eager")
    assert not bench.lacks([facts | {"flash": "1"}], row, "eager")
    assert not bench.lacks([packages | {"flash": "1"}], row, "eager")
    assert bench.lacks([packages | {"flash": "1", "torch": "2.10"}], row, "eager")


def test_the_rows_of_the_package_are_of_the_newest_torch_that_is_not_newer(monkeypatch):
    head = "sm,half,head_dim,mask,window,mode,tokens,sequences,flash,torch"
    rows = ("2048,7,200,2.15", "2048,7,100,2.11", "64,1,300,2.9")
    text = "\n".join([head, *(f"90,1,128,causal,0,eager,{row}" for row in rows)])
    lines = list(_attention_table.table_lines(text))
    monkeypatch.setattr(_attention_table, "table_lines", lambda _: lines)
    facts = (90, True, 128, "causal", 0, "eager")
    for version, us in (("2.11.0+cu130", 100), ("2.14.1", 100), ("2.15.0", 200), ("3.0.1", 200)):
        found = dict(read_table(version))
        assert found == {(*facts, 2048, 7): {"flash": us}, (*facts, 64, 1): {"flash": 300}}
    assert dict(read_table("2.10.0")) == {(*facts, 64, 1): {"flash": 300}}
