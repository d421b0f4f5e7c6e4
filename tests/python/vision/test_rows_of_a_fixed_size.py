"""Test rows of a fixed size for images: their layouts, and the steps that a graph replays."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch

import cuseq
from cuseq.data import MultimodalPackingCollator
from cuseq.graphs.batch import StaticBatch
from cuseq.vision import VisionLayout

transformers = pytest.importorskip("transformers")

from test_rows_of_models import HAS_RIGHT_PLANES, make_model  # noqa: E402
from test_rows_over_ranks import CLIP, SMALL, TALL, WIDE, config_of, document  # noqa: E402

TOKENS, PATCHES, IMAGES = 64, 160, 4
ROW = dict(total_tokens=TOKENS, max_seqs=8, image_capacity=PATCHES, max_images=IMAGES)
# Rows with few images, with as many as there is room for, with all patches, with none.
ROWS = [
    [document(3, SMALL, 5, seed=1), document(2, WIDE, 2, seed=2)],
    [document(SMALL, 2, SMALL, seed=3), document(4, seed=4), document(SMALL, WIDE, 1, seed=5)],
    [document(1, TALL, 3, WIDE, 1, WIDE, seed=6)],
    [document(9, seed=7), document(13, seed=8)],
    [document(5, (1, TALL)[1], 7, seed=9)],
]


# ------------------------------------------------------------------------------------- layouts


def test_the_rest_of_a_row_is_a_tail():
    layout = VisionLayout.from_grid(
        [[1, 4, 6], [1, 2, 2]], token_rows=[3, 4, 5, 6, 7, 8, 11], total_patches=64, max_images=3
    )
    plain = VisionLayout.from_grid([[1, 4, 6], [1, 2, 2]])
    assert layout.images.total_tokens == 64 and layout.images.row.max_seqs == 3
    assert layout.images.lengths.tolist() == [24, 4]
    assert torch.equal(layout.position_ids[:28], plain.position_ids)
    assert layout.position_ids.shape == (64, 2)
    assert layout.token_rows.tolist() == [3, 4, 5, 6, 7, 8, 11] + [-1] * 9
    assert layout.tokens.tolist() == [6, 1] and layout.tokens_end == 12
    assert layout.filled_grids.tolist() == [[1, 4, 6], [1, 2, 2], [1, 2, 18]]
    assert repr(layout) == "VisionLayout(2 images, 28 of 64 patches, 7 tokens, cpu)"
    again = pickle.loads(pickle.dumps(layout))
    assert again.room == layout.room and torch.equal(again.token_rows, layout.token_rows)


def test_windows_of_a_row_of_a_fixed_size_are_those_of_its_images():
    options = dict(window=112, patch_size=14)
    grids = [[1, 12, 18], [1, 4, 4]]
    layout = VisionLayout.from_grid(
        grids, token_rows=range(58), total_patches=400, max_images=3, **options
    )
    plain = VisionLayout.from_grid(grids, **options)
    assert torch.equal(layout.windows.lengths, plain.windows.lengths)
    assert torch.equal(layout.window_index[:58], plain.window_index)
    assert layout.window_index.sort().values.tolist() == list(range(100))
    assert layout.windows.total_tokens == 400 and layout.windows.row.max_seqs == 100


@pytest.mark.parametrize("images", [0, 1])
def test_a_row_may_be_empty_or_full(images):
    layout = VisionLayout.from_grid(
        [[1, 4, 4]] * images, token_rows=range(4 * images),
        total_patches=16, max_images=2,
    )  # fmt: skip
    assert layout.images.num_sequences == images and layout.position_ids.shape == (16, 2)
    assert (layout.token_rows >= 0).sum() == 4 * images


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(total_patches=64), "given together, max_images is None"),
        (dict(max_images=2), "given together, total_patches is None"),
        (dict(total_patches=62, max_images=2), r"a multiple of merge_size\^2 = 4, got 62"),
        (dict(total_patches=16, max_images=2), "total_patches must be at least .* 24, got 16"),
        (dict(total_patches=32, max_images=8), "max_images must be below the 8 tokens"),
        (dict(total_patches=32, max_images=0), "max_images must be at least 1"),
        (dict(total_patches=64, max_images=2, token_rows=None), "token_rows must be given with"),
        (dict(total_patches=64, max_images=2, feature_rows=[0] * 6), "feature_rows must not"),
        (dict(total_patches=24, max_images=2, token_rows=range(7)), "token_rows must be at most"),
    ],
)
def test_what_is_no_row_of_a_fixed_size_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        VisionLayout.from_grid([[1, 4, 6]], **dict(token_rows=range(6)) | options)


# ------------------------------------------------------------------------------------ collator


def test_batches_have_one_form():
    collate = MultimodalPackingCollator(config_of(), **ROW)
    batches = [collate(row) for row in ROWS]
    again = pickle.loads(pickle.dumps(collate))
    assert again.max_images == IMAGES
    for row, batch in zip(ROWS, batches, strict=True):
        plain = MultimodalPackingCollator(config_of(), total_tokens=TOKENS, max_seqs=8)(row)
        assert batch["pixel_values"].shape == (PATCHES, 96)
        assert batch["image_grid_thw"].shape == (IMAGES, 3)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(batch[name], plain[name])
        if "pixel_values" not in plain:
            assert not batch["pixel_values"].any() and not batch["image_grid_thw"].any()
            continue
        patches, images = len(plain["pixel_values"]), len(plain["image_grid_thw"])
        assert torch.equal(batch["pixel_values"][:patches].double(), plain["pixel_values"])
        assert not batch["pixel_values"][patches:].any()
        assert torch.equal(batch["image_grid_thw"][:images], plain["image_grid_thw"])
        assert not batch["image_grid_thw"][images:].any()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(image_capacity=None), "image_capacity must be given with max_images = 4"),
        (dict(total_tokens=None), "total_tokens must be given with max_images = 4"),
        (dict(image_capacity=62), "image_capacity = 62 patches and max_images = 4: total_patches"),
        (dict(max_images=40), "max_images = 40: max_images must be below the 40 tokens"),
    ],
)
def test_a_collator_of_no_such_row_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MultimodalPackingCollator(config_of(), **ROW | options)


def test_models_that_compute_with_sizes_are_refused():
    for kind in ("glm4v", "ernie4_5_vl_moe", "paddleocr_vl"):
        with pytest.raises(ValueError, match=f"max_images must be None for '{kind}', .* qwen2_vl"):
            MultimodalPackingCollator(config_of(kind), **ROW)


def test_rows_that_do_not_fit_are_named():
    collate = MultimodalPackingCollator(config_of(), **ROW)
    with pytest.raises(ValueError, match="max_images = 4: max_images must be at least .* 5"):
        collate([document(*[SMALL] * 5, 2)])
    with pytest.raises(ValueError, match="must have images alone .* got pixel_values_videos"):
        collate([document(2, CLIP, 1)])


# ---------------------------------------------------------------------------------- static batch


def test_a_static_layout_follows_the_rows_that_it_loads():
    collate = MultimodalPackingCollator(config_of(), **ROW)
    batches = [in_dtype(collate(row), torch.float32) for row in ROWS]
    static = StaticBatch(batches[0], torch.device("cpu"), "example")
    layout = static.value["image_layout"]
    held = {name: getattr(layout, name) for name in ("position_ids", "token_rows")}
    seen = layout.derived("sizes", lambda grids: (grids.prod(1).repeat_interleave(grids.prod(1)),))
    for batch in (*batches, batches[0]):
        static.fill(static.check(batch, "batch"))
        for name, tensor in held.items():
            assert getattr(layout, name) is tensor
            assert torch.equal(tensor, getattr(batch["image_layout"], name))
        assert torch.equal(layout.images.lengths, batch["image_layout"].images.lengths)
        sizes = batch["image_layout"].filled_grids.prod(1)
        assert torch.equal(seen[0], sizes.repeat_interleave(sizes))


def test_what_a_static_batch_cannot_hold_is_named():
    plain = MultimodalPackingCollator(config_of(), total_tokens=TOKENS, max_seqs=8)
    with pytest.raises(ValueError, match="example.*image_layout.* must be of a row of a fixed"):
        StaticBatch(plain(ROWS[0]), torch.device("cpu"), "example")
    static = StaticBatch(
        MultimodalPackingCollator(config_of(), **ROW)(ROWS[0]), torch.device("cpu"), "example"
    )
    other = MultimodalPackingCollator(config_of(), **ROW | dict(max_images=3))
    with pytest.raises(ValueError, match="must be like example_batch's layout: .* the same room"):
        static.check(other(ROWS[0]) | {"image_grid_thw": torch.zeros(IMAGES, 3).long()}, "batch")


# ------------------------------------------------------------------------------------- models

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"] if HAS_RIGHT_PLANES else []


def enabled(family: str, device: torch.device, dtype: torch.dtype = torch.float32):
    model = make_model(family).to(device, dtype)
    cuseq.enable(model)
    return model


def in_dtype(batch: dict, dtype: torch.dtype) -> dict:
    name = "pixel_values"
    return batch | {name: batch[name].to(dtype)} if name in batch else batch


def loss_of(model, batch: dict) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_fixed_size_gives_what_the_row_gives(family, device):
    model = enabled(family, device, torch.float64)
    for row in ROWS:
        found = []
        for options in (dict(total_tokens=TOKENS, max_seqs=8), ROW):
            batch = MultimodalPackingCollator(model.config, **options)(row)
            moved = {name: value.to(device) for name, value in in_dtype(batch, model.dtype).items()}
            model.zero_grad()
            loss = loss_of(model, moved)
            loss.backward()
            text = [p.grad for name, p in model.named_parameters() if "visual" not in name]
            tower = [p.grad for name, p in model.named_parameters() if "visual" in name]
            found.append((loss.detach(), text, tower))
        (loss, text, tower), (other, others, of_tower) = found
        # Heads and rotations of transformers compute parts in float32.
        close = dict(rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(others, text, **close)
        if tower[0] is None:  # the row has no images
            assert not any(grad.any() for grad in of_tower if grad is not None)
        else:
            torch.testing.assert_close(of_tower, tower, **close)


def gradients(model) -> dict[str, torch.Tensor]:
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_computes_what_a_plain_one_computes(family, checkpointing, dtype, device):
    """The weights stay, so that differences do not grow from step to step."""
    plain, model = (enabled(family, device, dtype).train() for _ in range(2))
    for one in (plain, model) if checkpointing else ():
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    collate = MultimodalPackingCollator(model.config, **ROW)
    batches = [in_dtype(collate(row), dtype) for row in ROWS] * 2
    step = cuseq.GraphedStep(
        lambda batch: loss_of(model, batch),
        torch.optim.SGD(model.parameters(), lr=0.0, fused=True), batches[0], warmup=2,
    )  # fmt: skip
    apart = 1e-3 if dtype == torch.float32 else 0.2  # of the norm
    for batch in batches:
        plain.zero_grad()
        expected = loss_of(plain, {name: value.to(device) for name, value in batch.items()})
        expected.backward()
        torch.testing.assert_close(step(batch), expected.detach(), rtol=apart / 4, atol=0)
        found = gradients(model)
        for name, grad in gradients(plain).items():
            difference = (found[name].float() - grad.float()).norm()
            assert difference <= apart * grad.float().norm(), name
    assert step.captured == (device.type == "cuda"), step.reason


@pytest.mark.skipif(HAS_RIGHT_PLANES, reason="towers ask cuseq for what they need of grids")
def test_towers_that_compute_with_grids_are_refused():
    model = enabled("qwen3_vl", torch.device("cpu"))
    batch = in_dtype(MultimodalPackingCollator(model.config, **ROW)(ROWS[0]), model.dtype)
    static = StaticBatch(batch, torch.device("cpu"), "example")
    with pytest.raises(ValueError, match="image_layout must not be that of a GraphedStep before"):
        model(**static.value)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RIGHT_PLANES, reason="its towers compute with grids themselves")
def test_a_trainer_captures_rows_with_images(device, one_gpu, tmp_path):
    losses = []
    for graph in (False, True):
        model = make_model("qwen3_vl").to(torch.float32)
        rows = [in_dtype(one, torch.float32) for row in ROWS for one in row] * 2
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=9, per_device_train_batch_size=1, report_to="none",
            remove_unused_columns=False, logging_steps=1, disable_tqdm=True, save_strategy="no",
            use_cpu=device.type == "cpu", bf16=False,
            learning_rate=1e-4,
            lr_scheduler_type="constant", train_sampling_strategy="sequential",
            dataloader_pin_memory=device.type == "cuda",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows,
            data_collator=MultimodalPackingCollator(model.config, **ROW),
        )  # fmt: skip
        cuseq.enable(trainer, graph=graph)
        with warnings.catch_warnings():
            if device.type == "cuda":
                warnings.filterwarnings("error", message="the trainer's steps run without a CUDA")
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
