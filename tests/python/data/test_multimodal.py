"""Test `MultimodalPackingCollator`: rows of examples as a processor makes them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cuseq
from cuseq.data import MultimodalPackingCollator
from cuseq.vision import mrope_position_ids

IMAGE, VIDEO = 60, 61
VISION = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=1, tokens_per_second=2)


def config_of(kind: str = "qwen2_5_vl") -> SimpleNamespace:
    return SimpleNamespace(
        model_type=kind, image_token_id=IMAGE, video_token_id=VIDEO, vision_config=VISION
    )


def image_of(*grids: tuple[int, int, int], first: int = 0) -> dict[str, torch.Tensor]:
    patches = sum(t * h * w for t, h, w in grids)
    values = first + torch.arange(patches * 3, dtype=torch.float32).view(patches, 3)
    return dict(pixel_values=values, image_grid_thw=torch.tensor(grids))


def example(ids: list[int], **more) -> dict:
    """Return what a processor makes of one document, with its batch dimension."""
    row = torch.tensor([ids])
    types = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    return dict(input_ids=row, attention_mask=torch.ones_like(row), mm_token_type_ids=types, **more)


EXAMPLES = [
    example([1, IMAGE, IMAGE, 2, IMAGE], **image_of((1, 2, 4), (1, 2, 2))),
    example([3, 4]),
    example([IMAGE] * 4, **image_of((1, 4, 4), first=100)),
    example(
        [5, VIDEO, VIDEO, VIDEO, VIDEO],
        pixel_values_videos=torch.ones(16, 3),
        video_grid_thw=torch.tensor([[2, 2, 4]]),
        second_per_grid_ts=[1.5],
    ),
]


def test_a_row_holds_all_that_a_model_takes():
    batch = MultimodalPackingCollator(config_of(), total_multiple=8)(EXAMPLES)
    lengths = [one["input_ids"].numel() for one in EXAMPLES]
    assert batch["packed"].lengths.tolist() == lengths and batch["packed"].total_tokens == 16
    ids = torch.cat([one["input_ids"] for one in EXAMPLES], dim=1)
    assert torch.equal(batch["input_ids"], ids)
    expected = torch.cat([EXAMPLES[0]["pixel_values"], EXAMPLES[2]["pixel_values"]])
    assert torch.equal(batch["pixel_values"], expected)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2], [1, 4, 4]]
    assert batch["pixel_values_videos"].shape == (16, 3)
    planes = mrope_position_ids(
        ids, batch["packed"], config=config_of(), image_grid_thw=batch["image_grid_thw"],
        video_grid_thw=[[2, 2, 4]], second_per_grid_ts=[1.5],
    )  # fmt: skip
    assert torch.equal(batch["position_ids"], planes)
    assert planes[1, 0, -4:].tolist() == [1, 1, 4, 4]  # 1.5 seconds of 2 positions each
    labels = batch["labels"][0].tolist()
    assert labels == [-100, -100, -100, 2, -100, -100, 4, *[-100] * 9]
    assert "second_per_grid_ts" not in batch and "attention_mask" not in batch


def test_labels_of_the_user_stay():
    one = example([1, IMAGE, 2], **image_of((1, 2, 2)), labels=torch.tensor([[7, 8, 9]]))
    batch = MultimodalPackingCollator(config_of())([one, one])
    assert batch["labels"].tolist() == [[-100, 8, 9, -100, 8, 9]]


def test_text_of_a_tokenizer_stands_beside_images():
    one = example([1, IMAGE, 2], **image_of((1, 2, 2)))
    batch = MultimodalPackingCollator(config_of(), total_tokens=8)([{"input_ids": [3, 4]}, one])
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 0, 0, 0, 0]]
    assert batch["position_ids"][1, 0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2]


def test_a_row_without_images_has_none():
    batch = MultimodalPackingCollator(config_of())([example([1, 2]), example([3])])
    assert not any(name.startswith(("pixel", "image", "video")) for name in batch)
    assert batch["position_ids"].shape == (4, 1, 3)


def test_the_collator_can_be_pickled():
    collate = MultimodalPackingCollator(config_of(), total_tokens=32, image_capacity=99, max_seqs=5)
    again = pickle.loads(pickle.dumps(collate))
    for found, expected in zip(again(EXAMPLES).items(), collate(EXAMPLES).items(), strict=True):
        assert found[0] == expected[0]
        if isinstance(found[1], torch.Tensor):
            assert torch.equal(found[1], expected[1])
    layouts = (one(EXAMPLES)["image_layout"].grid_thw for one in (again, collate))
    assert torch.equal(*layouts)
    with pytest.raises(ValueError, match="image_capacity = 99"):
        again(
            [
                example(
                    [IMAGE] * 24,
                    **image_of((1, 8, 12)),
                ),
                example([IMAGE], **image_of((1, 2, 2))),
            ]
        )


def test_examples_as_datasets_and_processors_give_them():
    """NumPy arrays, columns of None, patches as pictures, keys that a tokenizer lacks."""
    grids, pixels = np.array([[1, 2, 2]]), np.ones((4, 3, 2, 2), np.float32)
    one = dict(
        input_ids=np.array([[1, IMAGE, 2]]), mm_token_type_ids=np.array([[0, 1, 0]]),
        moe_mm_token_type_ids=np.array([[0, 1, 0]]), pixel_values=pixels, image_grid_thw=grids,
        video_grid_thw=None, labels=None,
    )  # fmt: skip
    text = dict(input_ids=[3, 4], mm_token_type_ids=None, pixel_values=None, image_grid_thw=None)
    batch = MultimodalPackingCollator(config_of("paddleocr_vl"))([text, one])
    assert batch["pixel_values"].shape == (4, 3, 2, 2)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert batch["moe_mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 0]]
    assert batch["position_ids"].shape == (4, 1, 5)


def test_seconds_belong_to_the_videos_of_their_example():
    def video(**more):
        grids = dict(pixel_values_videos=torch.ones(8, 3), video_grid_thw=[[2, 2, 2]])
        return example([VIDEO, VIDEO, 5], **grids, **more)

    collate = MultimodalPackingCollator(config_of())
    batch = collate([video(second_per_grid_ts=torch.tensor([3.0])), video()])
    assert batch["position_ids"][1, 0].tolist() == [0, 6, 1, 0, 2, 1]  # 1 second by default
    for wrong in ([1.0, 3.0], [], torch.ones(1, 1)):
        with pytest.raises(ValueError, match="second_per_grid_ts of examples.1. must have one"):
            collate([video(), video(second_per_grid_ts=wrong)])
    with pytest.raises(TypeError, match="second_per_grid_ts of examples.0. must be"):
        collate([video(second_per_grid_ts=["1.0"])])


IMAGE_ROW = example([1, IMAGE, 2], **image_of((1, 2, 2)))
WRONG = {
    "pixels alone": (IMAGE_ROW | dict(image_grid_thw=None), "given together, but examples.1. has"),
    "grids alone": (IMAGE_ROW | dict(pixel_values=None), "has image_grid_thw alone"),
    "too few patches": (IMAGE_ROW | dict(pixel_values=torch.ones(3, 3)), "the 4 patches that"),
    "flat grids": (IMAGE_ROW | dict(image_grid_thw=torch.tensor([1, 2, 2])), r"must be \[n, 3\]"),
    "a cut image": (example([1, IMAGE], **image_of((1, 2, 4))), "cut inside an image"),
    "a lost image": (example([1, 2], **image_of((1, 2, 2))), "must have a row for each"),
    "other patches": (IMAGE_ROW | dict(pixel_values=torch.ones(4, 5)), "patches of one shape"),
    "a mask": (IMAGE_ROW | dict(attention_mask=torch.tensor([[1, 1, 0]])), "must be all ones"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_example_that_does_not_fit_is_named(case):
    wrong, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        MultimodalPackingCollator(config_of())([IMAGE_ROW, wrong])


def test_limits_and_types_are_named():
    with pytest.raises(ValueError, match="capacity = 4 tokens"):
        MultimodalPackingCollator(config_of(), capacity=4)(EXAMPLES)
    with pytest.raises(TypeError, match="pixel_values of examples.0. must be a tensor"):
        MultimodalPackingCollator(config_of())([IMAGE_ROW | dict(pixel_values=[[1.0]])])
    with pytest.raises(TypeError, match="examples must be a list of mappings"):
        MultimodalPackingCollator(config_of())(EXAMPLES[0])
    with pytest.raises(ValueError, match="config must be that of a model with M-RoPE"):
        MultimodalPackingCollator(SimpleNamespace(model_type="gemma3"))


def test_the_collator_of_text_names_this_one():
    with pytest.raises(TypeError, match=r"got pixel_values, image_grid_thw.*MultimodalPackingCol"):
        cuseq.PackingCollator()([EXAMPLES[1], EXAMPLES[0]])


def full_config() -> SimpleNamespace:
    vision = SimpleNamespace(**vars(VISION), in_channels=3, temporal_patch_size=2, patch_size=4)
    return SimpleNamespace(**vars(config_of()) | {"vision_config": vision})


def test_a_row_without_images_gets_a_blank_one():
    collate = MultimodalPackingCollator(full_config(), blank_image=True)
    again = pickle.loads(pickle.dumps(collate))
    for one in (collate, again):
        batch = one([example([1, 2]), example([3])])
        assert batch["input_ids"].tolist() == [[1, 2, 3]]
        assert batch["pixel_values"].shape == (4, 3 * 2 * 4 * 4)
        assert not batch["pixel_values"].any()
        assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
        assert batch["image_layout"].images.total_tokens == 4
        assert batch["image_layout"].feature_rows.tolist() == []
    with_image = collate([EXAMPLES[1], EXAMPLES[2]])
    assert with_image["input_ids"].tolist() == [[3, 4, *[IMAGE] * 4]]
    assert len(with_image["image_grid_thw"]) == 1
    assert with_image["image_layout"].feature_rows is None
    with pytest.raises(TypeError, match="blank_image must be"):
        MultimodalPackingCollator(full_config(), blank_image=1)
