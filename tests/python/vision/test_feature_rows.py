"""Test the rows of a tower's output that tokens take, in every family with M-RoPE."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cuseq
from cuseq.data import MultimodalPackingCollator
from cuseq.vision import VisionLayout
from cuseq.vision.positions import MODEL_TYPES

transformers = pytest.importorskip("transformers")

from test_rows_of_models import (  # noqa: E402
    FAMILIES,
    HAS_RIGHT_PLANES,
    IMAGE,
    TOKENS,
    VIDEO,
    make_model,
)
from tower_models import _SMALL  # noqa: E402

ROPE = {
    "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
TEXT = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    rope_parameters=ROPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, pad_token_id=0,
    layer_types=["full_attention"] * 2, use_cache=False,
)  # fmt: skip
VISION = _SMALL | dict(num_position_embeddings=64, spatial_merge_size=2, image_size=32)
# By family: options of its text that differ.
OWN: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": dict(
        moe_intermediate_size=[32, 32], mlp_layer_types=["dense", "sparse"],
        rope_parameters=ROPE | {"mrope_section": [3, 3, 2]},
    ),
    "cohere_compass": dict(rope_parameters={"full_attention": ROPE}),
}  # fmt: skip
# enable refuses Qwen4's indexer.
LEFT_OUT = {"qwen4_exp"}
GRIDS = [(1, 4, 6), (1, 8, 4), (1, 4, 4)]


def known(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a config has."""
    names = set(inspect.signature(cls.__init__).parameters)
    for one in cls.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
    return {name: value for name, value in options.items() if name in names}


def small_model(family: str) -> torch.nn.Module:
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if family in FAMILIES:
        return make_model(family)
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    parts = mapping["glm4v" if family == "glm46v" else family].sub_configs
    text = known(parts["text_config"], TEXT | OWN.get(family, {}))
    vision = known(parts["vision_config"], VISION)
    config = mapping[family](text_config=text, vision_config=vision, **TOKENS)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    if "moe" in family:
        model.set_experts_implementation("eager")  # the others take no float64
    return model


def row_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a row of three documents, each with an image."""
    generator = torch.Generator().manual_seed(3)
    blank = MultimodalPackingCollator(model.config, blank_image=True)([{"input_ids": [1, 2]}])
    documents = []
    for number, grid in enumerate(GRIDS):
        patches = grid[1] * grid[2]
        ids = [*range(1, number + 3), *[IMAGE] * (patches // 4), 5, 6]
        shape = patches, *blank["pixel_values"].shape[1:]
        documents.append(
            dict(
                input_ids=ids,
                mm_token_type_ids=[int(token == IMAGE) for token in ids],
                moe_mm_token_type_ids=[int(token == IMAGE) for token in ids],
                pixel_values=torch.randn(shape, generator=generator, dtype=torch.float64),
                image_grid_thw=torch.tensor([grid]),
            )
        )
    if model.config.model_type != "ernie4_5_vl_moe":
        for one in documents:
            del one["moe_mm_token_type_ids"]
    return MultimodalPackingCollator(model.config)(documents)


def reversed_images(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its images in reverse order, and one more that no token takes."""
    counts = [h * w // 4 for _, h, w in GRIDS]
    sizes = [4 * count for count in counts]
    pixels = batch["pixel_values"].split(sizes)
    grids = torch.tensor([GRIDS[2], GRIDS[0], GRIDS[1], GRIDS[0]])
    first = [counts[2] + counts[0] + counts[1], counts[2] + counts[0], 0]
    rows = torch.cat([torch.arange(n) + at for n, at in zip(counts, first, strict=True)])
    layout = VisionLayout.from_grid(
        grids, patch_size=4, window=batch["image_layout"].window_side * 8 or None,
        feature_rows=rows,
    )  # fmt: skip
    return batch | dict(
        pixel_values=torch.cat([pixels[2], 7 + pixels[0], pixels[1], pixels[0]]),
        image_grid_thw=grids, image_layout=layout,
    )  # fmt: skip


def result(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach()} | grads


@pytest.mark.parametrize("family", sorted(MODEL_TYPES - LEFT_OUT))
def test_tokens_take_the_rows_of_a_layout(family):
    model = small_model(family)
    cuseq.enable(model, qk_norm=False)
    batch = row_of(model)
    expected = result(model, batch)
    assert any("visual" in name or "vision" in name for name in expected)
    found = result(model, reversed_images(batch))
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


class Searches(TorchDispatchMode):
    """Counts the calls that find tokens by a mask, for which a GPU is waited."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        searches = name in ("nonzero", "masked_select", "masked_scatter_backward", "unique_dim")
        if name.startswith("index") and isinstance(args[1], list | tuple):
            searches |= any(one is not None and one.dtype == torch.bool for one in args[1])
        # The facts of grids and layouts are read on the host, and transformers checks its counts.
        stack = [frame.filename for frame in traceback.extract_stack()]
        searches |= name == "_local_scalar_dense" and any("import_utils" in one for one in stack)
        if searches:
            self.found.append(name)
        return function(*args, **kwargs or {})


def without_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose layouts do not say which tokens take features."""
    layouts = {}
    for name in ("image_layout", "video_layout"):
        if name in batch:
            layout = batch[name]
            layouts[name] = VisionLayout.from_grid(
                layout.grid_thw, patch_size=1, window=layout.window_side * 2 or None,
                feature_rows=layout.feature_rows,
            )  # fmt: skip
    return batch | layouts


@pytest.mark.parametrize("family", sorted(MODEL_TYPES - LEFT_OUT))
def test_tokens_are_not_searched_for(family):
    model = small_model(family)
    cuseq.enable(model, qk_norm=False)
    batch = row_of(model)
    assert batch["image_layout"].token_rows.tolist() == [
        place for place, token in enumerate(batch["input_ids"][0]) if token == IMAGE
    ]
    expected = result(model, without_tokens(batch))
    with Searches() as searches:
        found = result(model, batch)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    if "moe" not in family:  # experts look for their tokens
        assert searches.found == []
    with Searches() as searches:
        result(model, without_tokens(batch))
    assert "masked_select" in searches.found or "masked_scatter_backward" in searches.found


def test_images_and_videos_share_the_layers_that_add_features():
    model = make_model("qwen3_vl")
    cuseq.enable(model, qk_norm=False)
    generator = torch.Generator().manual_seed(4)

    def pixels(patches: int) -> torch.Tensor:
        return torch.randn(patches, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)

    # A video of two frames, an image, and a document of both, with the video before the image.
    video, image = VIDEO, IMAGE
    batch = MultimodalPackingCollator(model.config)(
        [
            dict(input_ids=[1, *[video] * 4, 2, *[video] * 4, 3], pixel_values_videos=pixels(32),
                 video_grid_thw=torch.tensor([[2, 4, 4]])),
            dict(input_ids=[*[image] * 4, 5], pixel_values=pixels(16),
                 image_grid_thw=torch.tensor([[1, 4, 4]])),
            dict(input_ids=[7, *[video] * 4, 8, *[image] * 6, 9], pixel_values=pixels(24),
                 image_grid_thw=torch.tensor([[1, 4, 6]]), pixel_values_videos=pixels(16),
                 video_grid_thw=torch.tensor([[1, 4, 4]])),
        ]
    )  # fmt: skip
    assert len(batch["image_layout"].token_rows) == 10
    assert len(batch["video_layout"].token_rows) == 12
    expected = result(model, without_tokens(batch))
    with Searches() as searches:
        found = result(model, batch)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert searches.found == []


def test_checkpointed_and_compiled_layers_add_the_same_features():
    model = make_model("qwen3_vl").train()
    cuseq.enable(model, qk_norm=False)
    batch = row_of(model)
    expected = result(model, without_tokens(batch))
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    torch.testing.assert_close(result(model, batch), expected, atol=1e-12, rtol=1e-12)
    model.gradient_checkpointing_disable()
    for layer in model.model.language_model.layers:
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(result(model, batch), expected, atol=1e-9, rtol=1e-9)
    torch.compiler.reset()


def test_tokens_of_another_call_are_named():
    model = make_model("qwen3_vl")
    cuseq.enable(model)
    batch = row_of(model)
    tokens, grids = batch["image_layout"].token_rows, batch["image_grid_thw"]
    few = VisionLayout.from_grid(grids, token_rows=tokens[1:])
    with pytest.raises(ValueError, match="token_rows must have a token for each of 18 features"):
        model(**batch | {"image_layout": few})
    far = VisionLayout.from_grid(grids, token_rows=tokens + batch["input_ids"].shape[1])
    with pytest.raises(ValueError, match="token_rows must be below the .* tokens of the call"):
        model(**batch | {"image_layout": far})
    with torch.no_grad():  # a call that ended early leaves nothing behind
        torch.testing.assert_close(model(**batch).loss, model(**without_tokens(batch)).loss)


def test_a_step_never_waits(cuda):
    model = make_model("qwen3_vl").float().to(cuda)
    cuseq.enable(model)
    batch = row_of(model)
    batch["pixel_values"] = batch["pixel_values"].float()
    packed, layout = batch.pop("packed"), batch.pop("image_layout")
    for mode in ("default", "error"):  # the first call compiles kernels
        moved = {name: value.to(cuda) for name, value in batch.items()}
        moved |= dict(packed=packed, image_layout=layout)
        torch.cuda.synchronize()
        with torch.cuda.device(cuda):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                model(**moved).loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def model_and_rows(**options: Any) -> tuple[torch.nn.Module, dict, dict]:
    """Return an enabled model, a batch, and one with other images whose rows make it equal."""
    model = make_model("qwen3_vl")
    cuseq.enable(model, **options)
    batch = row_of(model)
    return model, batch, reversed_images(batch)


def test_copies_and_disabled_models_keep_their_methods():
    model, batch, other = model_and_rows(qk_norm=False)
    expected = model(**batch).loss
    twin = copy.deepcopy(model)
    cuseq.disable(model)
    assert not {"get_image_features", "get_video_features"} & set(vars(model.model))
    torch.testing.assert_close(twin(**other).loss, expected)
    cuseq.enable(model, qk_norm=False)
    torch.testing.assert_close(model(**other).loss, expected)


def test_a_model_that_was_loaded_must_be_enabled_again():
    model, batch, other = model_and_rows(qk_norm=False)
    if any(hasattr(layer, "rotary_fn") for layer in model.modules()):
        pytest.skip("before transformers 5.15 layers hold a function that enable replaces")
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="image_layout must not have feature_rows for a Qwen3VL"):
        loaded(**other)
    cuseq.enable(loaded, qk_norm=False)
    torch.testing.assert_close(loaded(**other).loss, model(**batch).loss)


def test_a_model_that_was_made_by_name_takes_them_in_a_trainer(tmp_path):
    """Its text part is named so: towers would take the documents of text."""
    cuseq.integrations.transformers.register()
    try:
        model = transformers.AutoModelForImageTextToText.from_config(
            make_model("qwen3_vl").config, dtype=torch.float64,
            attn_implementation={"text_config": "cuseq"},
        )  # fmt: skip
        batch = row_of(model)
        other = reversed_images(batch)
        with pytest.raises(ValueError, match="do not match"):
            model(**other)
        arguments = transformers.TrainingArguments(
            tmp_path, report_to="none", use_cpu=True, remove_unused_columns=False
        )
        trainer = transformers.Trainer(
            model, arguments, data_collator=MultimodalPackingCollator(model.config)
        )
        before = [len(one._forward_pre_hooks) for one in model.modules()]
        for _ in range(2):
            cuseq.enable(trainer)
            torch.testing.assert_close(model(**other).loss, model(**batch).loss)
            cuseq.disable(trainer)
            assert [len(one._forward_pre_hooks) for one in model.modules()] == before
            assert "get_image_features" not in vars(model.model)
    finally:
        cuseq.integrations.transformers.unregister()


def test_a_model_without_the_method_refuses_them():
    """Of a text model, and of one whose method someone else has set."""
    model, batch, other = model_and_rows()
    text = model.model.language_model
    ids = {name: batch[name] for name in ("input_ids", "position_ids", "packed")}
    layout = dict(image_layout=other["image_layout"], image_grid_thw=other["image_grid_thw"])
    message = r"image_layout must not have feature_rows .*call cuseq.enable\(model\)"
    with pytest.raises(ValueError, match=message):
        text(**ids, **layout)
    cuseq.disable(model)
    model.model.get_image_features = lambda *args, **kwargs: None
    cuseq.enable(model)
    with pytest.raises(ValueError, match=message):
        model(**other)


def test_rows_that_are_lost_on_the_way_are_named():
    """A permutation has as many features as tokens, so that transformers sees nothing."""
    model, batch, other = model_and_rows()
    order = torch.arange(batch["image_layout"].tokens.sum()).flip(0)
    layout = VisionLayout.from_grid(batch["image_grid_thw"], feature_rows=order)
    expected = model(**batch).loss
    assert not torch.equal(model(**batch | {"image_layout": layout}).loss, expected)

    def copied(inner, args, kwargs):
        return args, kwargs | {"image_grid_thw": kwargs["image_grid_thw"].clone()}

    model.model.register_forward_pre_hook(copied, with_kwargs=True)
    torch.testing.assert_close(model(**batch).loss, expected)
    with pytest.raises(RuntimeError, match="feature_rows of VisionLayout.*must reach the model's"):
        model(**batch | {"image_layout": layout})
    with pytest.raises(ValueError, match="do not match"):  # the error of the call itself
        model(**other)


def test_they_do_not_depend_on_the_identity_cache(monkeypatch, run_python):
    code = """
        import sys; sys.path += ["tests/python/vision", "tests/python"]
        import torch
        from test_feature_rows import model_and_rows
        model, batch, other = model_and_rows(qk_norm=False)
        with torch.inference_mode():
            torch.testing.assert_close(model(**other).logits, model(**batch).logits)
    """
    run_python(code, CUSEQ_CACHE="0")


@pytest.mark.slow
def test_a_compiled_model_takes_them():
    if not HAS_RIGHT_PLANES:
        pytest.skip("transformers before 5.9 reads grids in its towers, which compile cannot")
    model, batch, other = model_and_rows(qk_norm=False)
    expected = model(**batch).logits
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**batch).logits, expected, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(compiled(**other).logits, expected, atol=1e-7, rtol=1e-6)
    torch.compiler.reset()


def test_a_loss_without_shift_labels_is_refused_for_a_part():
    cls = type(make_model("qwen3_vl"))

    class OwnLoss(cls):  # type: ignore[valid-type, misc]
        def forward(self, labels=None, **kwargs):
            out = super().forward(**kwargs)
            out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=128)
            return out

    model = make_model("qwen3_vl")
    model.__class__ = OwnLoss
    cuseq.enable(model)
    packed = cuseq.PackedLayout.from_lengths([4, 4])
    plan = cuseq.distributed.cp_plan(packed, 2)
    local, ids = cuseq.distributed.cp_partition(packed, plan, 0, torch.arange(8))
    call = dict(input_ids=ids[None], packed=local, position_ids=local.position_ids[None].long())
    with pytest.raises(ValueError, match="labels must be None for a rank's part .* in a OwnLoss"):
        model(**call, labels=ids[None])
