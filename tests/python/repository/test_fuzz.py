"""Test the fuzzer: a bounded run finds nothing, and injected faults are found."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

import cuseq
from cuseq.attention.choice import PACKAGES
from tests.fuzz import driver, planted, ways
from tests.fuzz.calls import TARGETS
from tests.fuzz.values import Draw

ROOT = Path(__file__).resolve().parents[3]

HANGS_AT = 36  # the first call of seed 0 that does
ALL_OPS = torch._C._dispatch_get_all_op_names()
OPS = {name.removeprefix("cuseq::") for name in ALL_OPS if name.startswith("cuseq::")}


def report_of(findings: dict[str, dict]) -> str:
    return "\n".join(f"{kind} (call {one['number']})" for kind, one in findings.items())


def test_a_bounded_run_finds_nothing(device):
    report = driver.fuzz(driver.Options(seed=1, calls=600, device=device.type), verbose=False)
    assert not report.findings, report_of(report.findings)
    assert report.calls == 600
    assert report.outcomes["right"] > report.calls / 20


def test_faults_that_were_put_in_are_found():
    options = driver.Options(calls=60, only="planted$", planted=True, seed=3)
    report = driver.fuzz(options, verbose=False)
    found = report_of(report.findings)
    for kind in (
        "wrong value: got #",
        "crash: the process ended with SIGSEGV",
        "IndexError: list index out of range",
        "AttributeError: 'function' object has no attribute",
        "ValueError: something is wrong",
    ):
        assert kind in found
    assert report.calls == 60

    (wrong,) = (one for kind, one in report.findings.items() if "wrong value" in kind)
    again = options.command(first=wrong["number"], calls=1)
    run = subprocess.run(again, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert wrong["what"] in run.stdout


def test_faults_that_only_another_way_shows_are_found():
    planted.plant()
    draw, found = Draw("cpu"), set()
    for number in range(400):
        draw.begin(0, number)
        make = TARGETS["careless"].maker(draw)
        found.add(ways.try_one(draw, TARGETS["careless"], make) or "")
    for what, way in (
        ("another result", "views"),
        ("gradient: ", ""),
        ("refused with", "inference mode"),
        ("another result", "default dtype"),
        ("another result", "threads"),
        ("refused with", "subclasses"),
    ):
        assert any(what in one and way in one for one in found), (what, way)


@pytest.mark.parametrize(("second", "is_found"), [(0.5, False), (0.25, True)])
def test_the_gradient_at_a_kink_is_not_judged(second, is_found):
    """Where two numbers are the largest, a difference quotient is between their gradients."""

    def second_of(arguments: dict) -> torch.Tensor:
        values = arguments["values"]
        return values.max().detach() + values[1] - values[1].detach()

    target = TARGETS["torch.ops.cuseq.segment_reduce"]
    target = dataclasses.replace(target, name="second", call=second_of)
    found = set()
    for number in range(40):
        draw = Draw("cpu")
        draw.begin(0, number)
        found.add(
            ways.try_one(
                draw, target, lambda: {"values": torch.tensor([0.5, second], dtype=torch.float64)}
            )
        )
    gradients = {one for one in found if one is not None and one.startswith("gradient: ")}
    assert bool(gradients) == is_found, found


def test_a_hang_is_found(monkeypatch):
    monkeypatch.setenv("CUSEQ_FUZZ_HANGS", "1")
    monkeypatch.setattr(driver, "HANGS_AFTER", 5.0)
    options = driver.Options(first=HANGS_AT, calls=1, only="planted$", planted=True)
    assert "hang: no answer in # s" in report_of(driver.fuzz(options, verbose=False).findings)


def test_every_op_is_called():
    called = {name.removeprefix("torch.ops.cuseq.") for name in TARGETS}
    of_packages = {f"{name}_{way}" for name in PACKAGES for way in ("forward", "backward")}
    assert sorted(OPS - called - of_packages) == []  # those have no kernel of ours


@pytest.mark.parametrize("module", ["", "data", "ops", "cache", "distributed", "vision"])
def test_every_public_name_is_called(module):
    where = getattr(cuseq, module) if module else cuseq
    called = {name.split(".")[-1] for name in TARGETS}
    modules = {"cache", "data", "distributed", "ops", "vision"}
    # These are made of a process group, and of a function and an optimizer.
    classes = {"ContextParallel", "GraphedStep"}
    assert sorted(set(where.__all__) - called - modules - classes) == []


def test_every_maker_of_a_layout_is_called():
    makers = {name for name in vars(cuseq.PackedLayout) if name.startswith("from_")}
    assert {f"PackedLayout.{name}" for name in makers} <= set(TARGETS)
