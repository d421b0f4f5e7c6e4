"""Right arguments of what packed rows with images need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import cuseq
from tests.fuzz.calls.target import function
from tests.fuzz.values import Draw

IMAGE, VIDEO = 90, 91


def _check_planes(arguments: dict[str, Any], planes: torch.Tensor) -> None:
    packed = arguments["packed"]
    assert planes.shape == (4, 1, packed.total_tokens), f"planes of shape {planes.shape}"
    assert torch.equal(planes[0, 0].cpu(), packed.position_ids.long().cpu()), "other text positions"
    assert not (planes < 0).any(), "a negative position"
    assert not (planes > packed.total_tokens).any(), "a position outside the row"


def _config(draw: Draw) -> SimpleNamespace:
    vision = SimpleNamespace(
        spatial_merge_size=2, temporal_merge_size=2, tokens_per_second=2, patch_size=14
    )
    return SimpleNamespace(
        model_type=draw.choice(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe")),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_config=vision,
    )


class _Config(SimpleNamespace):
    def get_text_config(self) -> SimpleNamespace:
        return SimpleNamespace(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            vocab_size=100,
        )  # fmt: skip


@function("cuseq.data.multimodal_costs", cuseq.data.multimodal_costs)
def _(draw):
    lengths = draw.choice(([], [5], [8, 0, 300]))
    grids = [draw.choice((None, [[1, 4, 6]], torch.tensor([[2, 8, 4], [1, 2, 2]])))
             for _ in lengths]  # fmt: skip
    tower = SimpleNamespace(hidden_size=32, depth=2, intermediate_size=64, patch_size=14)
    model_type = draw.choice(("qwen2_vl", "qwen3_vl"))
    return {
        "config": _Config(model_type=model_type, vision_config=tower),
        "lengths": draw.choice((lengths, torch.tensor(lengths, dtype=torch.int64))),
        "grids": grids,
    }


def _document(draw: Draw) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a document that may hold an image, and its grids."""
    height, width = draw.choice((1, 2, 3)), draw.choice((1, 2))
    ids, grids = [1] * draw.choice((1, 4)), []
    if draw.chance(0.7):
        ids += [IMAGE] * (height * width)
        grids.append([1, 2 * height, 2 * width])
    return ids + [2] * draw.choice((0, 3)), grids


@function("cuseq.vision.mrope_position_ids", cuseq.vision.mrope_position_ids, check=_check_planes)
def _(draw):
    made = [_document(draw) for _ in range(draw.choice((1, 2, 5)))]
    ids = [token for document, _ in made for token in document]
    grids = [grid for _, own in made for grid in own]
    tail = draw.choice((0, 3))
    packed = cuseq.PackedLayout.from_lengths([len(one) for one, _ in made], len(ids) + tail)
    row = torch.tensor([ids + [0] * tail], dtype=torch.int64)
    return {
        "input_ids": row,
        "packed": packed,
        "config": _config(draw),
        "image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        "mm_token_type_ids": draw.choice((None, (row == IMAGE).int())),
    }


def _place(draw: Draw) -> cuseq.distributed.ContextParallel:
    """Return a rank's place in a group that no process has."""
    size = draw.choice((1, 2, 3))
    cp = cuseq.distributed.ContextParallel.__new__(cuseq.distributed.ContextParallel)
    cp.__setstate__(
        {
            "rank": draw.randrange(size),
            "size": size,
            "ranks": tuple(range(size)),
            "group_name": "a group",
            "policy": draw.choice(("auto", "contiguous")),
            "heads": (4, 2),
            "head_dim": 16,
        }
    )
    return cp


def _collate(arguments: dict[str, Any]) -> Any:
    options = dict(arguments)
    examples = options.pop("examples")
    return cuseq.data.MultimodalPackingCollator(**options)(examples)


@function(
    "cuseq.data.MultimodalPackingCollator",
    cuseq.data.MultimodalPackingCollator,
    call=_collate,
    also=("examples", "input_ids", "pixel_values", "image_grid_thw", "config"),
    weight=2,
)
def _(draw):
    examples = []
    for _ in range(draw.choice((1, 3))):
        ids, grids = _document(draw)
        example: dict[str, Any] = {"input_ids": torch.tensor([ids], dtype=torch.int64)}
        if grids:
            patches = grids[0][1] * grids[0][2]
            example["pixel_values"] = torch.ones(patches, 3, dtype=torch.float32)
            example["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64)
        examples.append(example)
    return {
        "processor_or_config": _config(draw),
        "capacity": draw.choice((None, 60)),
        "blank_image": draw.chance(0.5),
        "cp": draw.choice((None, _place(draw))),
        "examples": examples,
    }


def _check_rows(arguments: dict[str, Any], rows: cuseq.vision.VisionLayout) -> None:
    grids = rows.grid_thw
    assert rows.images.total_tokens == len(rows.position_ids) == int(grids.prod(1).sum())
    assert rows.images.num_real_tokens == rows.images.total_tokens
    if rows.feature_rows is not None:
        assert not (rows.feature_rows < 0).any()
        assert not (rows.feature_rows >= rows.tokens.sum()).any()
    if rows.token_rows is not None:
        assert not (rows.token_rows.diff() <= 0).any()
    if rows.windows is not None:
        index = rows.window_index
        assert index is not None and torch.equal(index.sort().values, torch.arange(len(index)))
        assert rows.windows.num_real_tokens == rows.images.total_tokens


@function(
    "VisionLayout.from_grid", cuseq.vision.VisionLayout.from_grid, check=_check_rows, weight=2
)
def _(draw):
    merge = draw.choice((1, 2, 3))
    grids = [
        [draw.choice((1, 2)), merge * draw.choice((1, 3)), merge * draw.choice((1, 2, 5))]
        for _ in range(draw.choice((0, 1, 4)))
    ]
    return {
        "grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        "merge_size": merge,
        "patch_size": draw.choice((1, 14)),
        "window": draw.choice((None, 14 * merge, 112)),
        "frames_apart": draw.chance(0.5),
        "feature_rows": draw.choice((None, [0] * len(grids), torch.arange(len(grids)))),
        "token_rows": draw.choice((None, list(range(3, 3 + len(grids))), torch.arange(len(grids)))),
    }


# Only `from_grid` makes one: every argument is wrong.
@function(
    "cuseq.vision.VisionLayout",
    cuseq.vision.VisionLayout,
    also=("from_grid",),
    weight=1,
    wrong=True,
)
def _(draw):
    names = ("recipe", "images", "windows", "position_ids", "window_index")
    names = (*names, "feature_rows", "token_rows")
    return dict.fromkeys(names, [[1, 2, 2]])
