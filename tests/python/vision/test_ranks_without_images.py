"""Test ranks of which one has a row without images: their towers must run together."""

from __future__ import annotations

import distributed
import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")

from test_rows_of_models import FAMILIES, make_model, make_row  # noqa: E402
from tower_models import GRIDS, installed_towers, make_tower, pixels_of  # noqa: E402

TEXT = [dict(input_ids=torch.tensor([[7, 8, 9]])), dict(input_ids=torch.tensor([[4, 5]]))]


def collator(model) -> cuseq.data.MultimodalPackingCollator:
    return cuseq.data.MultimodalPackingCollator(model.config, total_tokens=48, blank_image=True)


def gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_blank_image_changes_nothing(family):
    model = make_model(family)
    cuseq.enable(model)
    plain = cuseq.data.MultimodalPackingCollator(model.config, total_tokens=48)
    expected = gradients(model, plain(TEXT))
    found = gradients(model, collator(model)(TEXT))
    assert set(found) == {name for name, _ in model.named_parameters()} > set(expected)
    for name, grad in found.items():
        own = expected.get(name, torch.zeros_like(grad))
        torch.testing.assert_close(grad, own, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name, kind", installed_towers())
def test_patches_have_the_shape_that_a_tower_takes(name, kind):
    if name not in cuseq.vision.positions.MODEL_TYPES:
        pytest.skip("no model with M-RoPE")
    tower = make_tower((name, kind))
    config = transformers.AutoConfig.for_model(name)
    config.vision_config = tower.config
    collate = cuseq.data.MultimodalPackingCollator(config, total_tokens=8, blank_image=True)
    batch = collate(TEXT)
    grids = GRIDS[:1]
    expected = pixels_of(tower, grids)
    if name == "paddleocr_vl":
        expected = expected[0]  # the model adds a dimension
    assert batch["pixel_values"].shape[1:] == expected.shape[1:]
    pixels = batch["pixel_values"].double()
    tower(pixels[None] if name == "paddleocr_vl" else pixels, batch["image_grid_thw"])


def on_ranks(rank: int, way: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a model of which rank 1 has a row of text."""
    torch.set_num_threads(1)
    model = make_model("qwen3_vl")
    cuseq.enable(model)
    documents = make_row()[0] if rank == 0 else TEXT
    batch = collator(model)(documents)
    if way == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(**batch).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block, mesh=mesh)
    fully_shard(model.model.visual, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(**batch).loss.backward()
    return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_rank_without_images_trains_with_others(way):
    first, second = distributed.run(on_ranks, way, limit=240)
    model = make_model("qwen3_vl")
    cuseq.enable(model)
    grads = [gradients(model, collator(model)(one)) for one in (make_row()[0], TEXT)]
    for name in grads[0]:
        expected = (grads[0][name] + grads[1][name]) / 2
        torch.testing.assert_close(first[name], expected, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(second[name], expected, atol=1e-7, rtol=1e-6)
