"""Right arguments of what packed rows with images need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import cuseq
from tests.fuzz.calls.target import function

IMAGE, VIDEO = 90, 91


def _check_planes(arguments: dict[str, Any], planes: torch.Tensor) -> None:
    packed = arguments["packed"]
    assert planes.shape == (4, 1, packed.total_tokens), f"planes of shape {planes.shape}"
    assert torch.equal(planes[0, 0].cpu(), packed.position_ids.long().cpu()), "other text positions"
    assert not (planes < 0).any(), "a negative position"
    assert not (planes > packed.total_tokens).any(), "a position outside the row"


@function("cuseq.vision.mrope_position_ids", cuseq.vision.mrope_position_ids, check=_check_planes)
def _(draw):
    lengths, ids, grids = [], [], []
    for _ in range(draw.choice((1, 2, 5))):
        height, width = draw.choice((1, 2, 3)), draw.choice((1, 2))
        document = [1] * draw.choice((0, 1, 4))
        if draw.chance(0.7):
            document += [IMAGE] * (height * width)
            grids.append([1, 2 * height, 2 * width])
        document += [2] * draw.choice((0, 3))
        lengths.append(len(document))
        ids += document
    tail = draw.choice((0, 3))
    packed = cuseq.PackedLayout.from_lengths(lengths, len(ids) + tail)
    row = torch.tensor([ids + [0] * tail], dtype=torch.int64)
    vision = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(
        model_type=draw.choice(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe")),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_config=vision,
    )
    return {
        "input_ids": row,
        "packed": packed,
        "config": config,
        "image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        "mm_token_type_ids": draw.choice((None, (row == IMAGE).int())),
    }
