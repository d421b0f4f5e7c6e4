"""Test `mrope_position_ids` against each model's own function, document by document."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

import cuseq
from cuseq.vision import mrope_position_ids
from cuseq.vision.positions import _RULES

transformers = pytest.importorskip("transformers")

IMAGE, VIDEO = 90, 91
# Older releases mix up the planes of videos that are one block, and Qwen2.5-VL's of images too.
COUNTS_VIDEOS = Version(transformers.__version__) >= Version("5.9")
GLM = {name for name, rule in _RULES.items() if rule.video_tokens_are_images}
FRAMES = {name for name, rule in _RULES.items() if rule.frames_apart}


def own_function(name: str):
    """Return the `get_rope_index` of a family's models, and a config; skip where it has none."""
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {name}")
    classes = [one for one in vars(module).values() if hasattr(one, "get_rope_index")]
    model = min(classes, key=lambda one: len(one.__mro__))
    vision = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2, tokens_per_second=3)
    config = SimpleNamespace(
        model_type=name, image_token_id=IMAGE, video_token_id=VIDEO, vision_config=vision
    )
    part = functools.partial(getattr(model, "get_vision_position_ids", None), None)
    holder = SimpleNamespace(config=config, get_vision_position_ids=part)
    return functools.partial(model.get_rope_index, holder), config


def text(count: int) -> tuple[list[int], list[int]]:
    return list(range(1, count + 1)), [0] * count


def block(grid: tuple[int, int, int], kind: int, token: int, temporal: int = 1):
    count = grid[0] // temporal * (grid[1] // 2) * (grid[2] // 2)
    return [token] * count, [kind] * count


def video(name: str, grid: tuple[int, int, int]) -> list[tuple[list[int], list[int]]]:
    """Return the pieces of a video: one, or its frames with a timestamp before each."""
    token = IMAGE if name in GLM else VIDEO
    if name in FRAMES:
        return [part for _ in range(grid[0]) for part in (text(2), block((1, *grid[1:]), 2, token))]
    return [block(grid, 2, token, temporal=2 if name == "ernie4_5_vl_moe" else 1)]


def documents(name: str) -> list[dict]:
    """Return documents of all shapes that a packed row may hold."""
    shapes = [
        [("t", 4), ("i", (1, 4, 6)), ("t", 3)],
        [("t", 7)],
        [("i", (1, 2, 2))],  # an image of one token, which begins and ends its document
        [("i", (1, 8, 2)), ("t", 1), ("i", (1, 2, 10))],
        [("t", 2), ("v", (4, 4, 4)), ("t", 2), ("i", (1, 6, 4)), ("t", 1), ("v", (2, 2, 6))],
        [("t", 1)],
    ]
    made = []
    for shape in shapes:
        if not COUNTS_VIDEOS and name not in FRAMES:
            shape = [piece for piece in shape if piece[0] != "v"]
        pieces, images, videos = [], [], []
        for kind, what in shape:
            if kind == "t":
                pieces.append(text(what))
            elif kind == "i":
                pieces.append(block(what, 1, IMAGE))
                images.append(what)
            else:
                pieces.extend(video(name, what))
                videos.append(what)
        ids, types = ([value for piece in pieces for value in piece[k]] for k in (0, 1))
        made.append(dict(ids=ids, types=types, images=images, videos=videos))
    return made


def planes_alone(function, config, document: dict, seconds: list[float]) -> torch.Tensor:
    def grids(which):
        return torch.tensor(document[which]) if document[which] else None

    arguments = dict(
        input_ids=torch.tensor([document["ids"]]),
        mm_token_type_ids=torch.tensor([document["types"]]),
        image_grid_thw=grids("images"),
        video_grid_thw=grids("videos"),
    )
    if config.model_type == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = torch.tensor(seconds)
    return function(**arguments)[0]


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("name", _RULES)
def test_positions_are_those_of_each_document_alone(name, tail):
    function, config = own_function(name)
    if name == "qwen2_5_vl" and not COUNTS_VIDEOS:
        pytest.skip("this release spaces out images as it does videos")
    made = documents(name)
    seconds = [0.37, 1.9]
    if "int(next(" in inspect.getsource(function.func):
        seconds = [2.0, 1.0]  # this release rounds them down to whole ones
    given = iter(seconds)
    alone = [
        planes_alone(function, config, one, [next(given) for _ in one["videos"]]) for one in made
    ]
    lengths = [len(one["ids"]) for one in made]
    total = sum(lengths) + tail
    ids, types = (
        torch.tensor([[v for one in made for v in one[k]] + [0] * tail]) for k in ("ids", "types")
    )
    packed = cuseq.PackedLayout.from_lengths(lengths, total)
    videos = [grid for one in made for grid in one["videos"]]
    options = dict(
        image_grid_thw=torch.tensor([grid for one in made for grid in one["images"]]),
        video_grid_thw=videos or None,
        second_per_grid_ts=seconds if name == "qwen2_5_vl" and videos else None,
    )
    found = mrope_position_ids(ids, packed, config=config, mm_token_type_ids=types, **options)
    assert (found.shape, found.dtype) == ((4, 1, total), torch.int64)
    assert torch.equal(found[0, 0], packed.position_ids.long())
    last = torch.arange(tail).expand(3, 1, tail)
    assert torch.equal(found[1:], torch.cat([*alone, last], dim=2))
    if name not in GLM:  # the token ids alone say the same
        assert torch.equal(mrope_position_ids(ids[0], packed, config=config, **options), found)


def test_pads_between_documents_count_on_as_the_layout_does():
    _, config = own_function("qwen2_vl")
    packed = cuseq.PackedLayout.from_lengths([6, 3], segment_multiple=4)
    ids = torch.tensor([1, IMAGE, IMAGE, IMAGE, IMAGE, 2, 0, 0, 3, 4, 5, 0])
    planes = mrope_position_ids(ids, packed, config=config, image_grid_thw=[[1, 4, 4]])
    assert planes[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert planes[2, 0].tolist() == [0, 1, 1, 2, 2, 3, 6, 7, 0, 1, 2, 3]


def test_images_of_two_documents_may_touch():
    _, config = own_function("qwen2_vl")
    packed = cuseq.PackedLayout.from_lengths([3, 3])
    ids = torch.tensor([1, IMAGE, IMAGE, IMAGE, IMAGE, 2])
    grids = [[1, 2, 4], [1, 4, 2]]
    planes = mrope_position_ids(ids, packed, config=config, image_grid_thw=grids)
    assert planes[1:, 0].tolist() == [[0, 1, 1, 0, 0, 2], [0, 1, 1, 0, 1, 2], [0, 1, 2, 0, 0, 2]]


WRONG = {
    "a document ends inside an image": (dict(lengths=[3, 4]), "was a document cut inside an image"),
    "more images than grids": (
        dict(images=None),
        "image_grid_thw must have a row for each .* got 0",
    ),
    "fewer images than grids": (dict(images=[[1, 4, 4]] * 2), "got 2 and tokens of 1"),
    "another image": (dict(images=[[1, 4, 6]]), "must hold the 1 x 2 x 3 tokens of image_grid_thw"),
    "a huge grid": (dict(images=[[2**31 - 2] * 3]), "must hold the .* tokens of image_grid_thw"),
    "no multiple": (dict(images=[[1, 4, 5]]), "must have multiples of the merge sizes"),
    "a grid of zero": (dict(images=[[1, 0, 4]]), "must have sizes of 1 to 2"),
    "flat grids": (
        dict(images=torch.tensor([1, 4, 4])),
        r"image_grid_thw must be \[n, 3\], got \[3\]",
    ),
    "unknown types": (dict(types=[0, 3, 1, 1, 1, 0, 0]), "must be 0 .* got 3 at token 1"),
    "too few types": (dict(types=[0, 1]), "mm_token_type_ids must be .* got"),
    "seconds": (dict(second_per_grid_ts=[1.0]), "second_per_grid_ts must be None for qwen2_vl"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    changes, message = WRONG[case]
    _, config = own_function("qwen2_vl")
    ids = torch.tensor([1, IMAGE, IMAGE, IMAGE, IMAGE, 2, 3])
    options = dict(lengths=[6, 1], images=[[1, 4, 4]], types=None) | changes
    packed = cuseq.PackedLayout.from_lengths(options.pop("lengths"))
    types, images = options.pop("types"), options.pop("images")
    with pytest.raises(ValueError, match=message):
        mrope_position_ids(
            ids,
            packed,
            config=config,
            image_grid_thw=images,
            mm_token_type_ids=None if types is None else torch.tensor(types),
            **options,
        )


def test_a_document_that_ends_between_the_frames_of_a_video_is_named():
    _, config = own_function("qwen3_vl")
    ids = torch.tensor([1, VIDEO, 2, VIDEO])
    packed = cuseq.PackedLayout.from_lengths([2, 2])
    with pytest.raises(ValueError, match="2 frames of .* got 1: was a document cut inside a video"):
        mrope_position_ids(ids, packed, config=config, video_grid_thw=[[2, 2, 2]])


def test_videos_of_glm_need_types():
    _, config = own_function("glm4v")
    packed = cuseq.PackedLayout.from_lengths([2])
    with pytest.raises(ValueError, match="mm_token_type_ids must be given for videos of glm4v"):
        mrope_position_ids(
            torch.tensor([1, IMAGE]), packed, config=config, video_grid_thw=[[1, 2, 2]]
        )


@pytest.mark.parametrize("kind", ["llama", "qwen2_vl_text", None])
def test_other_configs_are_refused(kind):
    packed = cuseq.PackedLayout.from_lengths([2])
    with pytest.raises(ValueError, match="config must be that of a model with M-RoPE"):
        mrope_position_ids(torch.ones(2).long(), packed, config=SimpleNamespace(model_type=kind))


@pytest.mark.parametrize("seconds", [[float("nan")], [-1.0], [1e9], [1.0, 2.0], []])
def test_seconds_that_give_no_positions_are_refused(seconds):
    _, config = own_function("qwen2_5_vl")
    packed = cuseq.PackedLayout.from_lengths([2])
    with pytest.raises(ValueError, match="second_per_grid_ts must"):
        mrope_position_ids(
            torch.tensor([1, VIDEO]),
            packed,
            config=config,
            video_grid_thw=[[1, 2, 2]],
            second_per_grid_ts=seconds,
        )


def test_rows_on_a_gpu(cuda):
    _, config = own_function("qwen2_vl")
    ids = torch.tensor([[1, IMAGE, IMAGE, 2]])
    packed = cuseq.PackedLayout.from_lengths([4])
    options = dict(config=config, image_grid_thw=torch.tensor([[1, 2, 4]]))
    expected = mrope_position_ids(ids, packed, **options)
    found = mrope_position_ids(ids.to(cuda), packed.to(cuda), **options)
    assert found.device == ids.to(cuda).device and torch.equal(found.cpu(), expected)
