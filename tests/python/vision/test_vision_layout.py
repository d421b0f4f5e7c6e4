"""Test `VisionLayout` against transformers' functions, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from cuseq.vision import VisionLayout

GRIDS = [[1, 4, 6], [2, 2, 8], [1, 2, 2], [3, 10, 4]]


def test_a_window_in_the_corner_is_smaller():
    rows = VisionLayout.from_grid([[1, 4, 6]], patch_size=4, window=16)
    assert rows.windows.lengths.tolist() == [16, 8]
    # Tokens of 2 x 2 patches lie in 2 rows of 3; a window is 2 x 2 of them.
    assert rows.window_index.tolist() == [0, 1, 3, 4, 2, 5]
    assert rows.images.lengths.tolist() == [24]
    assert rows.tokens.tolist() == [6]
    assert rows.position_ids[:6].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]


def test_frames_see_each_other_or_not():
    apart = VisionLayout.from_grid(GRIDS)
    assert apart.images.lengths.tolist() == [24, 16, 16, 4, 40, 40, 40]
    together = VisionLayout.from_grid(GRIDS, frames_apart=False)
    assert together.images.lengths.tolist() == [24, 32, 4, 120]
    assert torch.equal(apart.position_ids, together.position_ids)
    assert apart.windows is None and apart.window_index is None


@given(
    grids=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5
    ),
    merge=st.integers(1, 3),
    side=st.integers(1, 4),
)
def test_layouts_are_those_of_transformers(grids, merge, side):
    theirs = pytest.importorskip("transformers.vision_utils")
    grid = torch.tensor([[t, h * merge, w * merge] for t, h, w in grids])
    patch, window = 7, side * merge * 7
    rows = VisionLayout.from_grid(grid, merge_size=merge, patch_size=patch, window=window)
    index, offsets = theirs.get_vision_window_index(grid, merge, window, patch)
    assert torch.equal(rows.window_index, index)
    assert torch.equal(rows.windows.cu_seqlens, offsets)
    assert torch.equal(rows.images.cu_seqlens, theirs.get_vision_cu_seqlens(grid))
    assert torch.equal(rows.position_ids, theirs.get_vision_position_ids(grid, merge))
    assert torch.equal(rows.tokens, grid.prod(1) // merge**2)


def test_no_images_are_an_empty_row():
    rows = VisionLayout.from_grid([], window=112)
    assert rows.images.total_tokens == 0 and rows.position_ids.shape == (0, 2)
    assert rows.tokens.tolist() == []


def test_copies_keep_everything(device):
    rows = VisionLayout.from_grid(GRIDS, patch_size=4, window=16, frames_apart=False).to(device)
    assert rows.to(device) is rows and rows.to(None) is rows
    assert copy.deepcopy(rows) is rows
    again = pickle.loads(pickle.dumps(rows))
    assert again.device == rows.device == rows.position_ids.device == rows.windows.device
    assert again.grid_thw.device.type == again.tokens.device.type == "cpu"
    for name in ("grid_thw", "position_ids", "window_index", "tokens"):
        assert torch.equal(getattr(again, name), getattr(rows, name))
    for name in ("images", "windows"):
        assert torch.equal(getattr(again, name).cu_seqlens, getattr(rows, name).cu_seqlens)
    assert (again.merge_size, again.window_side, again.frames_apart) == (2, 2, False)
    assert "windows" in repr(rows) and "148 patches" not in repr(
        VisionLayout.from_grid([[1, 2, 2]])
    )


@pytest.mark.parametrize("name", ["feature_rows", "token_rows"])
def test_rows_move_and_pickle(name, device):
    numbers = [3, 2, 9] if name == "feature_rows" else [2, 3, 99]
    given = torch.tensor(numbers, dtype=torch.int32)
    for rows in (given, given.to(device), numbers, tuple(numbers)):
        layout = VisionLayout.from_grid(GRIDS, **{name: rows})
        assert getattr(layout, name).dtype == torch.int64
        assert getattr(layout, name).device.type == "cpu"
        assert ("45 tokens, 3 taken" in repr(layout)) == (name == "feature_rows")
        moved = layout.to(device)
        again = pickle.loads(pickle.dumps(moved))
        for one in (layout, moved, again):
            assert getattr(one, name).tolist() == numbers
            assert one.tokens_end == (100 if name == "token_rows" else 0)
        assert getattr(again, name).device == getattr(moved, name).device == moved.device
    given[0] = 1
    assert getattr(layout, name)[0] == numbers[0]
    assert getattr(VisionLayout.from_grid(GRIDS, **{name: []}), name).shape == (0,)
    assert getattr(VisionLayout.from_grid(GRIDS), name) is None
    assert getattr(pickle.loads(pickle.dumps(VisionLayout.from_grid(GRIDS))), name) is None


def test_the_layout_does_not_follow_edits_of_its_grids():
    grid = torch.tensor([[1, 4, 6]])
    rows = VisionLayout.from_grid(grid)
    grid[0, 1] = 8
    assert rows.grid_thw.tolist() == [[1, 4, 6]]


@pytest.mark.parametrize(
    "grids, options, error, message",
    [
        ([[1, 3, 4]], {}, ValueError, r"multiples of merge_size = 2, got \(1, 3, 4\) in row 0"),
        ([[1, 2, 2], [0, 2, 2]], {}, ValueError, r"at least 1, got \(0, 2, 2\) in row 1"),
        ([[1, -2, 2]], {}, ValueError, r"at least 1, got \(1, -2, 2\) in row 0"),
        ([[2, 2**15, 2**15]], {}, ValueError, r"at most 2\^31 - 1 patches"),
        ([[2**62, 2**62, 2**62]], {}, ValueError, r"at most 2\^31 - 1 patches"),
        ([[1, 2]], {}, ValueError, r"grid_thw must be \[n, 3\]"),
        (torch.ones(1, 3), {}, TypeError, "grid_thw must be integers"),
        ("abc", {}, TypeError, "grid_thw must be a tensor or a list"),
        ([[1, 2, 2]], dict(merge_size=0), ValueError, "merge_size must be"),
        ([[1, 2, 2]], dict(patch_size=0), ValueError, "patch_size must be"),
        ([[1, 2, 2]], dict(window=27), ValueError, r"merge_size \* patch_size = 28 pixels, got 27"),
        ([[1, 2, 2]], dict(window=1.5), TypeError, "window must be"),
        ([[1, 2, 2]], dict(frames_apart=1), TypeError, "frames_apart must be"),
        ([[1, 2, 4]], dict(feature_rows=[0, 2]), ValueError, "below the 2 tokens .* got 2"),
        ([[1, 2, 4]], dict(feature_rows=[-1]), ValueError, "feature_rows must be from 0 .* got -1"),
        ([[1, 2, 4]], dict(feature_rows=torch.zeros(1, 1).int()), ValueError, r"must be \[n\]"),
        ([[1, 2, 4]], dict(feature_rows=torch.zeros(1)), TypeError, "rows must be integers"),
        ([[1, 2, 4]], dict(feature_rows=[0.5]), TypeError, "feature_rows must be an int"),
        ([[1, 2, 4]], dict(feature_rows=1), TypeError, "must be a tensor or a list of numbers"),
        ([[1, 2, 4]], dict(token_rows=[-1, 2]), ValueError, r"got -1 as token_rows\[0\]"),
        (
            [[1, 2, 4]],
            dict(token_rows=[2, 1]),
            ValueError,
            r"must ascend.*got 1 as token_rows\[1\]",
        ),
        ([[1, 2, 4]], dict(token_rows=[1, 1]), ValueError, r"got 1 as token_rows\[1\]"),
        ([[1, 2, 4]], dict(token_rows=[[1]]), TypeError, "token_rows must be an int"),
        ([[1, 2, 4]], dict(token_rows=torch.zeros(2)), TypeError, "token_rows must be integers"),
        (
            [[1, 2, 4]],
            dict(feature_rows=[0], token_rows=[3, 4]),
            ValueError,
            "as many as feature_rows, 1, got 2",
        ),
    ],
)
def test_bad_arguments_are_named(grids, options, error, message):
    with pytest.raises(error, match=message):
        VisionLayout.from_grid(grids, **options)


def test_it_is_made_by_from_grid():
    with pytest.raises(TypeError, match="made by from_grid"):
        VisionLayout([[1, 2, 2]], None, None, None, None, None, None)


def test_a_copy_to_the_gpu_does_not_wait(cuda):
    rows = VisionLayout.from_grid(GRIDS, patch_size=4, window=16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = rows.to(cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved.position_ids.cpu(), rows.position_ids)
    assert rows.to("cuda") is moved


def test_a_large_row_is_quick_to_describe():
    """A row of 100 images needs no loop in Python: one call makes all of it."""
    rows = VisionLayout.from_grid([[1, 36, 36]] * 100, window=112)
    assert rows.images.num_sequences == 100
    assert rows.windows.num_real_tokens == 36 * 36 * 100
    assert sorted(rows.window_index.tolist()) == list(range(18 * 18 * 100))
    assert cuseq.vision.VisionLayout is VisionLayout
