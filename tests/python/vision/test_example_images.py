"""Test examples/images.py: a packed row teaches a model what its documents do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_vl")

EXAMPLE = Path(__file__).parents[3] / "examples" / "images.py"


@pytest.mark.slow
def test_both_ways_learn_the_same(tmp_path, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("images", EXAMPLE)
    images = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, images)  # its dataclass looks itself up there
    spec.loader.exec_module(images)
    images.main(["--steps", "12", "--documents", "12", "--out", str(tmp_path)])
    packed, alone = json.loads((tmp_path / "images.json").read_text())
    assert packed["losses"] == pytest.approx(alone["losses"], rel=2e-3)
    assert packed["losses"][0] > 1.3 * packed["losses"][-1]
    assert 0 <= packed["read_right"] <= 1
    assert "Losses differ by at most" in capsys.readouterr().out
