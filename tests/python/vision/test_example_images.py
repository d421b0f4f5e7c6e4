"""Test examples/images.py: it learns, on images of a user's own too; mistakes are named."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from example_modules import imported, logged, run

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_vl")
pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

NAMES = ["black", "blue", "green", "cyan", "red", "magenta", "yellow", "white"]
SPECIAL = ["<end>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} "
    "{% else %}{% for part in message.content %}"
    # As Qwen's: a part with the key of an image is one, whatever its value.
    "{% if part.type == 'image' or 'path' in part %}"
    "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}<end> {% endfor %}"
)


@pytest.fixture(scope="module")
def example():
    with imported("images") as module:
        yield module


@pytest.mark.slow
def test_it_learns_and_goes_on_from_a_checkpoint(own_signals, tmp_path, capsys):
    options = ("--max_steps", 40, "--save_steps", 20, "--disable_tqdm", "true")
    run("images", "--output_dir", tmp_path / "run", *options)
    losses = logged(tmp_path / "run", "loss")
    assert len(losses) == 40 and sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert "Written: the model" in capsys.readouterr().out
    run("images", "--output_dir", tmp_path / "again", *options, "--resume_from_checkpoint",
        tmp_path / "run" / "checkpoint-20")  # fmt: skip
    assert logged(tmp_path / "again", "loss") == losses


def save_model(example: Any, folder: Path) -> Any:
    """Write a model and its processor, and return the processor."""
    pytest.importorskip("torchvision", reason="processors of Qwen read videos by torchvision")
    words = {word: number for number, word in enumerate([*NAMES, *SPECIAL])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=SPECIAL[1:],
    )
    sizes = dict(patch_size=example.PATCH, merge_size=example.MERGE,
                 size=dict(shortest_edge=64, longest_edge=4096))  # fmt: skip
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer,
        transformers.Qwen3VLVideoProcessor(patch_size=example.PATCH), chat_template=TEMPLATE,
    )  # fmt: skip
    processor.save_pretrained(folder)
    example.a_small_model().save_pretrained(folder)
    return processor


def conversations(folder: Path, count: int) -> Path:
    """Write questions about images, one, two or none in each, with their colours as answers."""
    rng = random.Random(0)
    lines = []
    for number in range(count):
        parts, colors = [{"type": "text", "text": "white black"}], rng.choices(NAMES, k=number % 3)
        for place, color in enumerate(colors):
            file = folder / f"{number}-{place}.png"
            Image.new("RGB", (8 * rng.randint(1, 4), 8), color).save(file)
            parts.append({"type": "image", "path": str(file)})
        answer = [{"type": "text", "text": " ".join([*colors, "red"])}]
        lines.append({"messages": [{"role": "user", "content": parts},
                                   {"role": "assistant", "content": answer}]})  # fmt: skip
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.slow
def test_images_and_a_model_of_ones_own(example, own_signals, tmp_path, capsys):
    processor = save_model(example, tmp_path / "model")
    chats = conversations(tmp_path, 12)
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    documents = example.processed({"messages": copy.deepcopy(rows)}, processor)
    for number, (ids, labels) in enumerate(zip(documents["input_ids"], documents["labels"])):
        learned = processor.tokenizer.decode(labels[labels != -100])
        assert learned == f"{rows[number][1]['content'][0]['text']} <end>"
        assert torch.equal(ids[0, -len(learned.split()) :], labels[labels != -100])
        assert (documents["pixel_values"][number] is None) == (number % 3 == 0)
    # The column of TRL's data sets, whose parts say that there is an image and no more.
    pictures = [
        [Image.open(part.pop("path")) for part in row[0]["content"] if "path" in part] or None
        for row in rows
    ]
    again = example.processed({"messages": rows, "images": pictures}, processor)
    for name in ("input_ids", "pixel_values"):
        for one, other in zip(again[name], documents[name], strict=True):
            assert one is other or torch.equal(one, other)
    run("images", "--model", tmp_path / "model", "--conversations", chats, "--output_dir",
        tmp_path / "run", "--num_train_epochs", 4, "--max_steps", -1, "--learning_rate", 3e-3,
        "--per_device_train_batch_size", 4, "--save_steps", 12,
        "--disable_tqdm", "true")  # fmt: skip
    losses = logged(tmp_path / "run", "loss")
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    assert (tmp_path / "run" / "model" / "chat_template.jinja").exists()
    assert "WARNING" not in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 1"}) + "\n")
    with pytest.raises(SystemExit, match="--model and --conversations must be given together"):
        run("images", "--conversations", file, "--output_dir", tmp_path / "run")
    options = ("--conversations", file, "--model", tmp_path, "--output_dir", tmp_path / "other")
    with pytest.raises(SystemExit, match=f"--model {tmp_path}: cannot be loaded"):
        run("images", *options)


def test_a_conversation_without_an_answer_is_named(example):
    class Processor:
        def apply_chat_template(self, conversation, add_generation_prompt=False):
            assert conversation  # transformers' reads its first message
            turns = [f"{one['role']}: {one['content']}" for one in conversation]
            return "\n".join(turns + ["assistant: "] * add_generation_prompt)

    for roles in (["user"], ["user", "user"]):
        messages = [{"role": role, "content": "hello"} for role in roles]
        with pytest.raises(SystemExit, match="the last message must be an answer, has .*hello"):
            example.processed({"messages": [messages]}, Processor())


@pytest.mark.parametrize("colors", [[7], [0, 1, 2, 3]])
def test_patches_are_those_of_the_processor(example, colors):
    process = transformers.Qwen2VLImageProcessorPil(
        patch_size=example.PATCH,
        merge_size=example.MERGE,
        temporal_patch_size=example.FRAMES,
        do_resize=False,
        do_rescale=False,
        do_normalize=False,
    )
    cells = example.draw_squares(colors, random.Random(0))
    image = cells
    for side in (1, 2):  # a cell is a token
        image = image.repeat_interleave(example.PATCH * example.MERGE, side)
    expected = process(images=[image.numpy()], return_tensors="pt")
    patches, grid = example.patches_of(cells)
    torch.testing.assert_close(patches, expected["pixel_values"])
    assert [grid] == expected["image_grid_thw"].tolist()
