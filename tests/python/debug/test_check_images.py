"""Test `check_packing` on rows of texts with images."""

from __future__ import annotations

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")

from cuseq.debug.packing_check.__main__ import main  # noqa: E402

IMAGE, BEGIN, END = 60, 62, 63


def model_of_images():
    text = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, bos_token_id=1,
        eos_token_id=2, rope_parameters=dict(
            rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2]
        ),
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=32, out_hidden_size=32, num_heads=2, intermediate_size=48,
        patch_size=4, spatial_merge_size=2, temporal_patch_size=2, window_size=16,
        fullatt_block_indexes=[1], in_channels=3,
    )  # fmt: skip
    tokens = dict(
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    cuseq.enable(model)
    return model


def with_image(ids, height=0, width=0):
    example = {"input_ids": ids, "mm_token_type_ids": [int(i == IMAGE) for i in ids]}
    if height > 0:
        generator = torch.Generator().manual_seed(height * width)
        example["pixel_values"] = torch.randn(height * width, 96, generator=generator)
        example["image_grid_thw"] = torch.tensor([[1, height, width]])
    return example


def examples_of_images():
    """One begins with an image, one has an image inside, one has none."""
    return [
        with_image([*[IMAGE] * 4, END, 5, 6, 7], 4, 4),
        with_image([9, BEGIN, *[IMAGE] * 6, END, 8], 4, 6),
        with_image([3, 4, 5]),
    ]


class CollatorOfImages:
    """A right collator; `lost` names what another one forgets."""

    def __init__(self, model, lost=""):
        self.model, self.lost = model, lost

    def __call__(self, examples):
        texts = ("input_ids", "labels", "mm_token_type_ids")
        own = [{key: value for key, value in e.items() if key in texts} for e in examples]
        batch = cuseq.PackingCollator()(own)
        positions = []
        for example in examples:
            ids, types = (
                torch.tensor([example[key]]) for key in ("input_ids", "mm_token_type_ids")
            )
            planes = self.model.model.get_rope_index(
                ids, types, image_grid_thw=example.get("image_grid_thw")
            )[0]
            positions.append(planes)
        if self.lost != "planes":
            batch["position_ids"] = torch.cat(positions, 2)
        if self.lost == "places":  # as if images were text, with planes for them
            batch["position_ids"] = batch["packed"].position_ids.long().expand(4, 1, -1)
        if self.lost == "layout":
            del batch["packed"]
        for key in ("pixel_values", "image_grid_thw"):
            given = [example[key] for example in examples if key in example]
            if given and self.lost != "images":
                batch[key] = torch.cat(given)
        return batch


@pytest.mark.parametrize("by", ["collator", "forward"])
@pytest.mark.parametrize(
    ("lost", "kind"),
    [("", None), ("places", "positions"), ("images", "logits"), ("layout", None)],
)
def test_images(lost, kind, by):
    model = model_of_images()
    collate = CollatorOfImages(model, lost)
    given = {"collator": collate}
    if by == "forward":
        given = {"forward": lambda model, examples: model(**collate(examples))}
    report = cuseq.check_packing(model, examples_of_images(), **given)
    assert report.ok == (kind is None), str(report)
    if kind is not None and by == "collator":
        assert report.suspect.name == kind, str(report)


def test_rows_without_planes_raise_as_in_training():
    model = model_of_images()
    with pytest.raises(ValueError, match="position_ids must be planes of M-RoPE"):
        cuseq.check_packing(model, examples_of_images(), collator=CollatorOfImages(model, "planes"))


def test_images_need_rows_of_the_user():
    model = model_of_images()
    with pytest.raises(
        ValueError, match="collator or forward must be given .* image_grid_thw, pixel"
    ):
        cuseq.check_packing(model, examples_of_images())
    with pytest.raises(ValueError, match="two different tokens besides those of images"):
        cuseq.check_packing(
            model,
            [with_image([IMAGE] * 4 + [5], 4, 4)] * 2,
            collator=CollatorOfImages(model),
        )


def test_text_alone_through_a_model_of_images():
    assert cuseq.check_packing(model_of_images(), [[5, 6, 7], [8], [9, 3, 4, 4]]).ok


FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_line_loads_models_of_images(family, tmp_path, capsys):
    """The text part runs; their documents hold no tokens of images."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    config = transformers.CONFIG_MAPPING[family]()
    if family.startswith("qwen2") and "mrope_section" not in config.text_config.rope_parameters:
        pytest.skip("its default config says nothing of the planes that its code reads")
    config.save_pretrained(tmp_path)
    code = main([str(tmp_path), "--tiny", "--no-cache", "--tokens", "64"])
    assert code == 0, capsys.readouterr()


def test_the_command_line_loads_weights_of_a_model_of_images(tmp_path, capsys):
    model = model_of_images()
    cuseq.disable(model)
    model.save_pretrained(tmp_path)
    assert main([str(tmp_path), "--tokens", "64"]) == 0, capsys.readouterr()
