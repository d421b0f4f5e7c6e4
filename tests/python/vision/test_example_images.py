"""Test examples/images.py: both ways of training learn the same; patches are the processor's."""

from __future__ import annotations

import random

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
def test_both_ways_learn_the_same(example, capsys):
    packed, alone = map(vars, example.main(["--steps", str(STEPS), "--documents", "8"]))
    assert len(packed["losses"]) == STEPS
    assert packed["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert sum(packed["losses"][-4:]) < 0.8 * sum(packed["losses"][:4])
    assert packed["named_right"] == pytest.approx(alone["named_right"], abs=0.01)
    assert "differ by at most" in capsys.readouterr().out


@pytest.mark.parametrize("colors", [[7], [0, 1, 2, 3]])
def test_patches_are_those_of_the_processor(example, colors):
    pytest.importorskip("PIL")
    process = transformers.Qwen2VLImageProcessorPil(
        patch_size=example.PATCH,
        merge_size=example.MERGE,
        temporal_patch_size=example.FRAMES,
        do_resize=False,
        do_rescale=False,
        do_normalize=False,
    )
    cells = example.draw_squares(colors, random.Random(0))
    image = cells
    for side in (1, 2):  # a cell is a token
        image = image.repeat_interleave(example.PATCH * example.MERGE, side)
    expected = process(images=[image.numpy()], return_tensors="pt")
    patches, grid = example.patches_of(cells)
    torch.testing.assert_close(patches, expected["pixel_values"])
    assert [grid] == expected["image_grid_thw"].tolist()
