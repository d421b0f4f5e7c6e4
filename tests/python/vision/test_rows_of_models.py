"""Test rows of documents with images in models with M-RoPE, against each document alone."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")

HAS_RIGHT_PLANES = importlib.util.find_spec("transformers.vision_utils") is not None
IMAGE, VIDEO = 100, 101
TEXT = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
)  # fmt: skip
TOWER = dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4)
TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO)
FAMILIES = {
    "qwen2_vl": dict(text_config=TEXT, vision_config=TOWER | dict(hidden_size=64, embed_dim=32)),
    "qwen2_5_vl": dict(
        text_config=TEXT,
        vision_config=TOWER | dict(out_hidden_size=64, fullatt_block_indexes=[1], window_size=16),
    ),
    "qwen3_vl": dict(
        text_config=TEXT | dict(
            rope_parameters=TEXT["rope_parameters"] | {"mrope_interleaved": True}
        ),
        vision_config=TOWER | dict(out_hidden_size=64, deepstack_visual_indexes=[0]),
    ),
}  # fmt: skip


def make_model(family: str) -> torch.nn.Module:
    if family == "qwen2_5_vl" and not HAS_RIGHT_PLANES:
        pytest.skip("transformers before 5.9 mixes up this model's planes of images")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], **TOKENS)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    with torch.no_grad():  # so that the rotation of an image is seen in the logits
        for weight in model.parameters():
            weight.mul_(4)
    return model


def document(before: int, grid: tuple[int, int, int], after: int) -> dict[str, torch.Tensor]:
    patches = grid[0] * grid[1] * grid[2]
    image = [IMAGE] * (patches // 4)
    ids = [*range(1, before + 1), *image, *range(20, after + 20)]
    return dict(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in ids]]),
        pixel_values=torch.randn(patches, 3 * 2 * 4 * 4, dtype=torch.float64),
        image_grid_thw=torch.tensor([grid]),
    )


def make_row() -> tuple[list[dict], dict, cuseq.PackedLayout]:
    """Return documents, and the row of them: one begins with its image, another ends with it."""
    torch.manual_seed(1)
    documents = [document(3, (1, 4, 6), 5), document(0, (1, 8, 4), 4), document(2, (1, 4, 4), 0)]
    row = {
        name: torch.cat([one[name] for one in documents], dim=int(name.endswith("ids")))
        for name in documents[0]
    }
    packed = cuseq.PackedLayout.from_lengths([one["input_ids"].numel() for one in documents])
    return documents, row, packed


def planes_of(model: torch.nn.Module, row: dict, packed: cuseq.PackedLayout) -> torch.Tensor:
    return cuseq.vision.mrope_position_ids(
        row["input_ids"], packed, config=model.config, image_grid_thw=row["image_grid_thw"]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_documents_alone(family):
    model = make_model(family)
    documents, row, packed = make_row()
    with torch.no_grad():
        stock = torch.cat([model(**one).logits for one in documents], dim=1)
    cuseq.enable(model, qk_norm=False)  # transformers' norm rounds to fp32
    alone = torch.cat([model(**one).logits for one in documents], dim=1)
    torch.testing.assert_close(alone, stock, atol=1e-4, rtol=1e-4)  # its tower rotates in fp32
    alone.square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    found = model(**row, position_ids=planes_of(model, row, packed), packed=packed).logits
    torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-7)
    found.square().sum().backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    torch.testing.assert_close(grads, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("enabled_first", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_text_and_tower(family, enabled_first):
    """Of each document alone: the gradients of adapters; and none of the weights below them."""
    peft = pytest.importorskip("peft")
    model = make_model(family)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv", "proj"])
    if enabled_first:
        cuseq.enable(model, qk_norm=False)
    model = peft.get_peft_model(model, lora)
    if not enabled_first:
        cuseq.enable(model, qk_norm=False)
    adapters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert any("visual" in name for name in adapters)
    torch.manual_seed(2)
    with torch.no_grad():  # else the second factor of each is zero
        for one in adapters.values():
            one.copy_(torch.randn_like(one))
    documents, row, packed = make_row()
    alone = torch.cat([model(**one).logits for one in documents], dim=1)
    alone.square().sum().backward()
    expected = {name: one.grad for name, one in adapters.items()}
    assert all(bool(grad.any()) for grad in expected.values())
    model.zero_grad()
    found = model(**row, position_ids=planes_of(model, row, packed), packed=packed).logits
    torch.testing.assert_close(found, alone, atol=1e-8, rtol=1e-6)
    found.square().sum().backward()
    grads = {name: one.grad for name, one in adapters.items()}
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)
    below = [one for one in model.parameters() if not one.requires_grad]
    assert below and all(one.grad is None for one in below)


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_of_images_change_nothing_and_are_checked(family, device):
    model = make_model(family).to(device)
    cuseq.enable(model, qk_norm=False)
    documents, *_ = make_row()
    batch = cuseq.data.MultimodalPackingCollator(model.config)(documents)
    layout = batch.pop("image_layout")
    batch = {name: value.to(device) for name, value in batch.items()}
    expected = model(**batch).logits
    for given in (layout, layout.to(device)):
        assert torch.equal(model(**batch, image_layout=given).logits, expected)
    with pytest.raises(TypeError, match="image_layout must be a VisionLayout, got"):
        model(**batch, image_layout=batch["image_grid_thw"])
    other = cuseq.vision.VisionLayout.from_grid([[1, 4, 4], [1, 4, 4]])
    with pytest.raises(ValueError, match="image_layout must be of the images of image_grid_thw"):
        model(**batch, image_layout=other)
    with pytest.raises(ValueError, match="pixel_values must have the 72 patches of image_layout"):
        model(**batch | {"pixel_values": batch["pixel_values"][:-4]}, image_layout=layout)
    if device.type == "cpu":
        swapped = cuseq.vision.VisionLayout.from_grid(layout.grid_thw.flip(0))
        with pytest.raises(ValueError, match="image_layout must be of the images"):
            model(**batch, image_layout=swapped)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_the_collator_has_the_loss_of_its_documents(family):
    model = make_model(family)
    cuseq.enable(model, qk_norm=False)
    collate = cuseq.data.MultimodalPackingCollator(model.config, total_multiple=16)
    documents, *_ = make_row()
    documents.append(dict(input_ids=torch.tensor([[7, 8, 9]])))
    losses, counts = [], []
    for one in documents:
        labels = one["input_ids"].masked_fill(one["input_ids"] == IMAGE, -100)
        if (labels[:, 1:] != -100).any():
            losses.append(model(**one, labels=labels).loss)
            counts.append(int((labels[:, 1:] != -100).sum()))
    expected = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    expected.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    batch = collate(documents)
    assert batch["packed"].total_tokens > batch["packed"].num_real_tokens  # with a tail
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    found = {name: weight.grad for name, weight in model.named_parameters()}
    torch.testing.assert_close(found, grads, atol=1e-6, rtol=1e-5)


def test_a_trainer_trains_rows_of_the_collator(tmp_path):
    model = make_model("qwen2_vl").float()
    collate = cuseq.data.MultimodalPackingCollator(model.config)
    documents, *_ = make_row()
    rows = [
        {name: value.float() if value.is_floating_point() else value for name, value in one.items()}
        for one in documents * 2
    ]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=6, remove_unused_columns=False,
        report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    expected = make_model("qwen2_vl").float()
    cuseq.enable(expected)
    enabled = cuseq.enable(trainer)
    assert any("packs rows already" in reason for reason in enabled.left_alone)
    trainer.train()
    loss = expected(**next(iter(trainer.get_train_dataloader()))).loss.item()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2 and logged[0] == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_rotated_as_text_are_refused(family):
    model = make_model(family)
    cuseq.enable(model)
    _, row, packed = make_row()
    planes = planes_of(model, row, packed)
    counted = packed.position_ids[None].long()
    untyped = {name: value for name, value in row.items() if name != "mm_token_type_ids"}
    message = r"position_ids must be planes of M-RoPE.*mrope_position_ids\(input_ids, packed"
    offsets = dict(cu_seq_lens_q=packed.cu_seqlens, cu_seq_lens_k=packed.cu_seqlens)
    for call in (
        dict(row, position_ids=counted, packed=packed),
        dict(row, position_ids=counted),
        dict(row, position_ids=counted, max_length_q=16, max_length_k=16, **offsets),
        dict(untyped, packed=packed),
    ):
        with pytest.raises(ValueError, match=message):
            model(**call)
    with torch.no_grad():
        expected = model(**untyped, position_ids=planes, packed=packed).logits
        three = model(**untyped, position_ids=planes[1:], packed=packed).logits
        alone = model(**row, position_ids=planes).logits  # the first plane tells documents apart
        own = model(**row, packed=packed).logits  # the model makes planes, which count on
    for found in (three, alone):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)  # its angles are fp32


def test_embeddings_need_planes_too():
    """The model makes planes of token ids alone."""
    model = make_model("qwen2_vl")
    cuseq.enable(model)
    _, row, packed = make_row()
    embeddings = model.get_input_embeddings()(row.pop("input_ids"))
    with pytest.raises(ValueError, match="position_ids must be planes of M-RoPE"):
        model(**row, inputs_embeds=embeddings, packed=packed)


def test_a_config_that_leaves_the_sections_to_the_code_is_known(monkeypatch):
    model = make_model("qwen2_vl")
    cuseq.enable(model)
    _, row, packed = make_row()
    monkeypatch.delitem(model.config.get_text_config().rope_parameters, "mrope_section")
    with pytest.raises(ValueError, match="position_ids must be planes of M-RoPE"):
        model(**row, position_ids=packed.position_ids[None].long(), packed=packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_images_keep_their_positions(family):
    model = make_model(family)
    cuseq.enable(model)
    packed = cuseq.PackedLayout.from_lengths([5, 3])
    ids = torch.arange(1, 9)[None]
    alone = torch.cat([model(part).logits for part in ids.split([5, 3], dim=1)], dim=1)
    found = model(ids, position_ids=packed.position_ids[None].long(), packed=packed).logits
    torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-7)


@pytest.mark.slow
def test_compiled_code_refuses_them_too():
    model = make_model("qwen2_vl")
    cuseq.enable(model)
    _, row, packed = make_row()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(Exception, match="position_ids must be planes of M-RoPE"):
        compiled(**row, position_ids=packed.position_ids[None].long(), packed=packed)
