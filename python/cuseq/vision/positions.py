"""`mrope_position_ids`: where the tokens of images and videos lie in time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import (
    as_float,
    as_int,
    check_tensor,
    check_untransformed,
    plain_tensor,
    shown,
)
from cuseq._base.models import rotations_of, text_config
from cuseq._base.modes import outside_inference_mode
from cuseq.layout import PackedLayout, check_layout

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Rule(NamedTuple):
    """How the models of a type count positions, as their `get_rope_index` does."""

    frames_apart: bool = False  # each frame of a video is a block of its own
    videos_have_seconds: bool = False  # the frames of a video lie `second_per_grid_ts` apart
    videos_are_merged: bool = False  # a token is several frames
    video_tokens_are_images: bool = False  # ids alone do not tell frames from images
    may_be_captured: bool = False  # its parts compute nothing of grids that cuseq does not give


_FRAMES = _Rule(frames_apart=True)
_QWEN3 = _Rule(frames_apart=True, may_be_captured=True)
_GLM = _Rule(frames_apart=True, video_tokens_are_images=True)
_RULES = {
    "qwen2_vl": _Rule(may_be_captured=True),
    "paddleocr_vl": _Rule(),
    "ernie4_5_vl_moe": _Rule(videos_are_merged=True),
    "qwen2_5_vl": _Rule(videos_have_seconds=True, may_be_captured=True),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    **dict.fromkeys(("qwen4_exp", "cohere_compass"), _FRAMES),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _GLM),
}
MODEL_TYPES = frozenset(_RULES)
"""The `model_type` of the configs that `mrope_position_ids` takes."""


class Columns(NamedTuple):
    """The keywords by which models take images or videos: patches, grids, and their layout."""

    pixels: str
    grids: str
    layout: str


COLUMNS = (
    Columns("pixel_values", "image_grid_thw", "image_layout"),
    Columns("pixel_values_videos", "video_grid_thw", "video_layout"),
)
PIXELS = tuple(columns.pixels for columns in COLUMNS)
"""The keywords by which models take the patches of images and of videos."""
LAYOUTS = tuple(columns.layout for columns in COLUMNS)
"""The keywords by which an enabled model takes their layouts."""


def mrope_position_ids(
    input_ids: Tensor,
    packed: PackedLayout,
    *,
    config: Any,
    image_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    video_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    mm_token_type_ids: Tensor | None = None,
) -> Tensor:
    """Return the positions of a packed row with images, as a model with M-RoPE takes them.

    Each document counts from 0. A text token has one position on all planes. The tokens of an image
    lie on a grid of time, height and width that begins at the next position, and the text after it
    goes on behind the longer side of the grid. These are the numbers of the model's own
    `get_rope_index` for each document alone (Qwen2-VL, arXiv:2409.12191, section 2.1.2), as
    transformers 5.24 has it: older releases round the seconds of Qwen2.5-VL down, and those before
    5.9 mix up the planes of videos, in Qwen2.5-VL of images too.

    Args:
        input_ids: integers `[1, total_tokens]` or `[total_tokens]`.
        packed: the layout of the row.
        config: the model's config: of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 with their
            mixtures of experts, GLM-4V, GLM-4.5V, GLM-4.6V, GLM-OCR, ERNIE 4.5 VL, PaddleOCR-VL or
            Cohere Compass.
        image_grid_thw: integers `[n_images, 3]`, frames, height and width of each image in patches,
            in the order of the row, as the processor returns them.
        video_grid_thw: the same of each video.
        second_per_grid_ts: `[n_videos]`, seconds between the steps in time of each video, for
            Qwen2.5-VL; default 1.
        mm_token_type_ids: integers of the shape of `input_ids`, 0 for text, 1 for an image's token,
            2 for a video's, as the processor returns them. By default the tokens `image_token_id`
            and `video_token_id` of `config`; the videos of GLM need it.

    Returns:
        int64 `[4, 1, total_tokens]` on the device of `input_ids`: the position in the document, by
        which transformers keeps documents apart, then time, height and width. In the tail and in
        pads all planes count as `packed.position_ids` does.

    Raises:
        ValueError: the row holds other images than the grids say; a document ends inside an image;
            a grid is not a multiple of the config's merge sizes; shapes differ; `config` is that of
            another model.
        TypeError: `input_ids` or `mm_token_type_ids` is not a dense integer tensor.

    Runs on the host: arguments that lie on a GPU are copied from there, which waits. Call it in the
    collator.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([6, 3])
        >>> ids = torch.tensor([5, 151655, 151655, 151655, 151655, 6, 7, 8, 9])
        >>> from transformers import Qwen2VLConfig
        >>> config = Qwen2VLConfig(image_token_id=151655, video_token_id=151656)
        >>> planes = cuseq.vision.mrope_position_ids(
        ...     ids, packed, config=config, image_grid_thw=[[1, 4, 4]]
        ... )
        >>> planes[2, 0]  # height
        tensor([0, 1, 1, 2, 2, 3, 0, 1, 2])
    """
    check_layout(packed, parts=False, trees=False)
    rule, sizes = rule_of(config), _sizes_of(config)
    tokens = packed.total_tokens
    ids = _row(input_ids, "input_ids", tokens)
    given = mm_token_type_ids
    if given is not None:
        given = _row(given, "mm_token_type_ids", tokens)
    elif video_grid_thw is not None and rule.video_tokens_are_images:
        raise ValueError(
            f"mm_token_type_ids must be given for videos of {config.model_type}, whose tokens have "
            "the id of an image's, got None"
        )
    types = token_types(ids, given, config)
    images = grids_of(image_grid_thw, "image_grid_thw")
    videos = grids_of(video_grid_thw, "video_grid_thw")
    if second_per_grid_ts is not None and not rule.videos_have_seconds:
        raise ValueError(
            f"second_per_grid_ts must be None for {config.model_type}, whose positions do not "
            f"depend on it, got {shown(second_per_grid_ts)}"
        )
    intervals = torch.empty(0, dtype=torch.float32, device="cpu")
    if rule.videos_have_seconds:
        seconds = seconds_of(second_per_grid_ts, "second_per_grid_ts", len(videos))
        intervals = seconds * sizes.tokens_per_second
    planes = _C.mrope_positions(
        types.contiguous(),
        packed.lengths_on_host().long(),
        packed.segments.lengths_on_host().long(),
        images,
        videos,
        intervals.contiguous(),
        sizes.spatial_merge,
        sizes.temporal_merge if rule.videos_are_merged else 1,
        rule.frames_apart,
    )
    with outside_inference_mode():
        return planes.to(input_ids.device)


def token_types(ids: Tensor, given: Tensor | None, config: Any) -> Tensor:
    """Return what the tokens of a row are: 0 for text, 1 for an image's, 2 for a video's, int8.

    Args:
        ids: integers `[total_tokens]` on the host.
        given: the processor's `mm_token_type_ids` of that shape, or None.
        config: the model's config.
    """
    if given is not None:
        return given.clamp(-1, 3).to(torch.int8)  # the values that are refused stay refused
    types = (ids == config.image_token_id).to(torch.int8)
    types[ids == config.video_token_id] = 2
    return types


def features_of(config: Any, grids: Tensor, are_videos: bool) -> Tensor:
    """Return how many tokens of a row each image or video of some grids is: int64 `[n]`."""
    rule, sizes = rule_of(config), _sizes_of(config)
    temporal = sizes.temporal_merge if are_videos and rule.videos_are_merged else 1
    return grids.prod(1) // (sizes.spatial_merge**2 * temporal)


def has_mrope(model: Any) -> bool:
    """Return whether a model has M-RoPE, which a config may leave to the defaults of its code."""
    if str(getattr(model.config, "model_type", "")).removesuffix("_text") in MODEL_TYPES:
        return True
    return any("mrope_section" in one for one in rotations_of(text_config(model)))


def check_capture(config: Any) -> None:
    """Raise ValueError unless a model of a config can be captured with rows of a fixed size."""
    kind = str(getattr(config, "model_type", None))
    if not _RULES.get(kind, _Rule()).may_be_captured:
        raise ValueError(
            f"max_images must be None for {shown(kind)}, whose model computes sizes of images "
            "itself: rows of a fixed size are for "
            f"{', '.join(sorted(name for name, rule in _RULES.items() if rule.may_be_captured))}"
        )


def rule_of(config: Any) -> _Rule:
    """Return the rule of a model's config."""
    kind = getattr(config, "model_type", None)
    if kind not in _RULES:
        text = str(kind).removesuffix("_text")
        hint = ": pass the config of the whole model" if text in _RULES else ""
        raise ValueError(
            f"config must be that of a model with M-RoPE, one of {', '.join(sorted(_RULES))}, got "
            f"model_type={shown(kind)}{hint}"
        )
    return _RULES[kind]


class _Sizes(NamedTuple):
    """Token ids, merge sizes and positions a second of a model's images and videos."""

    image_token: int
    video_token: int
    spatial_merge: int
    temporal_merge: int
    tokens_per_second: float


def _sizes_of(config: Any) -> _Sizes:
    tower = getattr(config, "vision_config", None)

    def size(of: Any, name: str, default: int | None = None) -> int:
        where = "config.vision_config" if of is tower else "config"
        return as_int(getattr(of, name, default), f"{where}.{name}")

    return _Sizes(
        size(config, "image_token_id"),
        size(config, "video_token_id"),
        size(tower, "spatial_merge_size"),
        size(tower, "temporal_merge_size", 1),
        as_float(getattr(tower, "tokens_per_second", 1), "config.vision_config.tokens_per_second"),
    )


def _row(value: Any, name: str, tokens: int) -> Tensor:
    """Return integers of a row `[tokens]` on the host."""
    value = numbers_on_host(value, name)
    if value.dim() > 2 or value.numel() != tokens or (value.dim() == 2 and value.shape[0] != 1):
        raise ValueError(
            f"{name} must be [1, {tokens}] or [{tokens}], the tokens of the layout, got "
            f"{list(value.shape)}"
        )
    return value.reshape(-1)


def grids_of(value: Any, name: str) -> Tensor:
    """Return grids as int64 `[n, 3]` on the host."""
    if value is None:
        return torch.empty(0, 3, dtype=torch.int64, device="cpu")
    if not isinstance(value, Tensor):
        rows = [
            [as_int(size, name) for size in values_of(row, name)] for row in values_of(value, name)
        ]
        if any(len(row) != 3 for row in rows):
            raise ValueError(f"{name} must be [n, 3], got {shown(value)}")
        value = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3)
    grids = numbers_on_host(value, name)
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ValueError(f"{name} must be [n, 3], got {list(grids.shape)}")
    return grids.long().contiguous()


def seconds_of(value: Any, name: str, videos: int) -> Tensor:
    """Return seconds as float32 `[n_videos]` on the host; 1 without any."""
    if value is None:
        return torch.ones(videos, dtype=torch.float32, device="cpu")
    if isinstance(value, Tensor):
        seconds = numbers_on_host(value, name, integers=False).float()
    else:
        numbers = [as_float(number, name) for number in values_of(value, name)]
        seconds = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    if seconds.shape != (videos,):
        raise ValueError(
            f"{name} must have one value for each of {videos} videos, got shape "
            f"{list(seconds.shape)}"
        )
    return seconds


def values_of(value: Any, name: str) -> list[Any]:
    """Return the items of a list of numbers, or of rows."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text is not a list of numbers")
        return list(value)
    except TypeError as error:  # an array without dimensions too
        raise TypeError(
            f"{name} must be a tensor or a list of numbers, got {shown(value)}"
        ) from error


def numbers_on_host(value: Any, name: str, integers: bool = True) -> Tensor:
    """Check a tensor of numbers; return it on the host."""
    check_tensor(value, name)
    check_untransformed(value, name, "call it outside of the transform")
    value = plain_tensor(value, name).detach()
    if value.dtype not in _INTEGERS and (integers or not value.is_floating_point()):
        raise TypeError(
            f"{name} must be {'integers' if integers else 'numbers'}, got {value.dtype}"
        )
    return value.cpu()
