"""Test rows with images in models whose positions are one-dimensional, against documents alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")

IMAGE = 260
TEXT = dict(
    vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
              image_size=16, patch_size=4)  # fmt: skip
LLAMA, CLIP = dict(model_type="llama", **TEXT), dict(model_type="clip_vision_model", **VISION)
KINDS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)

# By family: its config, and the tokens of an image.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llava": (
        dict(text_config=LLAMA, vision_config=CLIP, image_token_index=IMAGE,
             vision_feature_layer=-1), 16,
    ),
    "internvl": (
        dict(text_config=dict(model_type="qwen2", **TEXT), downsample_ratio=0.5,
             vision_config=dict(VISION, image_size=[16, 16], patch_size=[4, 4])), 4,
    ),
    "idefics3": (dict(text_config=LLAMA, vision_config=VISION, scale_factor=2), 4),
    "lfm2_vl": (
        dict(text_config=dict(TEXT, model_type="lfm2", layer_types=["full_attention"] * 2),
             vision_config=dict(VISION, num_patches=16), downsample_factor=2), 4,
    ),
    "gemma3": (
        dict(text_config=TEXT | KINDS, vision_config=VISION, mm_tokens_per_image=4,
             image_token_index=IMAGE, boi_token_index=261, eoi_token_index=262), 4,
    ),
    "paligemma": (
        dict(text_config=dict(model_type="gemma", **TEXT), projection_dim=32, hidden_size=32,
             image_token_index=IMAGE, vision_config=dict(
                 VISION, model_type="siglip_vision_model", image_size=8, projection_dim=32)), 4,
    ),
    "gemma4": (
        dict(
            text_config=TEXT | KINDS | dict(
                global_head_dim=16, vocab_size_per_layer_input=300, hidden_size_per_layer_input=8,
                num_kv_shared_layers=0, use_bidirectional_attention="vision"),
            vision_config=dict(VISION, num_key_value_heads=2, head_dim=16, pooling_kernel_size=2),
            audio_config=None, boi_token_id=261, eoi_token_id=262, video_token_id=263,
            audio_token_id=264), 4,
    ),
    "mllama": (
        dict(text_config=dict(TEXT, num_hidden_layers=3, cross_attention_layers=[1],
                              rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
             vision_config=dict(
                 VISION, num_global_layers=1, attention_heads=2, max_num_tiles=1,
                 supported_aspect_ratios=[[1, 1]], intermediate_layers_indices=[0],
                 vision_output_dim=64), image_token_index=IMAGE), 1,
    ),
}  # fmt: skip


def make_model(family: str) -> torch.nn.Module:
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    options = FAMILIES[family][0] | dict(image_token_id=IMAGE)
    config = transformers.AutoConfig.for_model(family, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float64, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
    return model.eval()


def image(family: str, number: int) -> dict[str, torch.Tensor]:
    """Return an image as the family's processor gives it."""
    torch.manual_seed(number + 5)
    if family == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
        return dict(pixel_values=torch.randn(1, 16, 48).double(), image_position_ids=places)
    if family == "lfm2_vl":
        return dict(
            pixel_values=torch.randn(1, 16, 48).double(), spatial_shapes=torch.tensor([[4, 4]]),
            pixel_attention_mask=torch.ones(1, 16, dtype=torch.long),
        )  # fmt: skip
    if family == "mllama":
        return dict(
            pixel_values=torch.randn(1, 1, 1, 3, 16, 16).double(),
            aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long),
            aspect_ratio_mask=torch.ones(1, 1, 1, dtype=torch.long),
        )
    side = 8 if family == "paligemma" else 16
    before = (1, 1) if family == "idefics3" else (1,)
    return dict(pixel_values=torch.randn(*before, 3, side, side).double())


def call_of(family: str, ids: list[int], images: list[int]) -> dict[str, torch.Tensor]:
    call = dict(input_ids=torch.tensor([ids]))
    types = {"gemma4": "mm_token_type_ids", "gemma3": "token_type_ids"}
    types["paligemma"] = "token_type_ids"
    if family in types:
        call[types[family]] = torch.tensor([[int(token == IMAGE) for token in ids]])
    made = [image(family, number) for number in images]
    for name in made[0] if made else ():
        side_by_side = family in ("idefics3", "mllama")
        call[name] = torch.cat([one[name] for one in made], dim=int(side_by_side))
    return call


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_documents_alone(family):
    model = make_model(family)
    tokens = [IMAGE] * FAMILIES[family][1]
    documents = [[2, 3, 4, *tokens, 5, 6], [7, *tokens, 8, 9, 10], [11, 12, 13]]
    cuseq.enable(model, qk_norm=False)  # transformers' norm rounds to fp32
    with torch.no_grad():
        alone = torch.cat(
            [
                model(**call_of(family, ids, images)).logits
                for ids, images in zip(documents, [[0], [1], []], strict=True)
            ],
            dim=1,
        )
        packed = cuseq.PackedLayout.from_lengths([len(ids) for ids in documents])
        positions = packed.position_ids[None].long()
        row = call_of(family, sum(documents, []), [0, 1])
        for told in (
            dict(packed=packed),
            dict(position_ids=positions),
            dict(packed=packed, position_ids=positions),
        ):
            if family == "mllama":
                # Its tokens without an image see all images of the row: refused.
                with pytest.raises(ValueError, match="attends to another sequence"):
                    model(**row, **told)
                continue
            # Without positions they count along the row, and angles are fp32.
            found = model(**row, **told).logits
            torch.testing.assert_close(found, alone, atol=5e-6, rtol=1e-6)
        if family == "mllama":
            text = model(input_ids=torch.tensor([[11, 12, 13, 2, 3]]),
                         packed=cuseq.PackedLayout.from_lengths([3, 2])).logits  # fmt: skip
            torch.testing.assert_close(text[:, :3], alone[:, -3:], atol=5e-6, rtol=1e-6)
