"""Test examples/images.py: both ways of training learn the same; patches are the processor's."""

from __future__ import annotations

import importlib.util
import json
import random
import sys

import pytest
import torch
from example_modules import imported

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_vl")

STEPS = 16


@pytest.fixture(scope="module")
def example():
    with imported("images") as module:
        yield module


@pytest.mark.slow
def test_both_ways_learn_the_same(example, tmp_path, capsys):
    example.main(["--steps", str(STEPS), "--documents", "8", "--out", str(tmp_path / "made")])
    packed, alone = json.loads((tmp_path / "made" / "images.json").read_text())
    assert len(packed["losses"]) == STEPS
    assert packed["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert sum(packed["losses"][-4:]) < 0.8 * sum(packed["losses"][:4])
    assert packed["read_right"] == pytest.approx(alone["read_right"], abs=0.01)
    assert "differ by at most" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib"):
        picture = (tmp_path / "made" / "images.png").read_bytes()
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_nothing_is_drawn(example, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    example.draw(tmp_path / "images.png", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("digits", [[7], [0, 1, 2, 3]])
def test_patches_are_those_of_the_processor(example, digits):
    pytest.importorskip("PIL")
    process = transformers.Qwen2VLImageProcessorPil(
        patch_size=example.PATCH,
        merge_size=example.MERGE,
        temporal_patch_size=example.FRAMES,
        do_resize=False,
        do_rescale=False,
        do_normalize=False,
    )
    image = example.draw_digits(digits, random.Random(0))
    expected = process(images=[image.numpy()], return_tensors="pt")
    patches, grid = example.patches_of(image)
    torch.testing.assert_close(patches, expected["pixel_values"])
    assert [grid] == expected["image_grid_thw"].tolist()
