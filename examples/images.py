"""Train a model that sees images on packed rows, with transformers' Trainer.

    python examples/images.py --model Qwen/Qwen3-VL-2B-Instruct --conversations chats.jsonl
    python examples/images.py --max_steps 800   # a tiny Qwen3-VL learns to name colours

--conversations is a data set of the Hub, or a JSONL or Parquet file, with a column `messages` as
transformers' chat templates take them: a part of a content is {"type": "text", "text": TEXT},
{"type": "image", "path": FILE}, or {"type": "image"} for the next of a column `images`. The last
message is learned. Without it documents are images of squares with their colours as text.
Other options are Trainer's: --per_device_train_batch_size (documents of a row), --learning_rate,
--save_steps, ... SIGTERM and Ctrl-C end the run after a step, with a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import _ranks
import _runs
import torch
import transformers
from _inputs import UNUSABLE, unusable
from _ranks import Defaults
from _texts import read_rows
from torch import Tensor
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments
from transformers.hf_argparser import HfArg

import cuseq

PATCH, MERGE, FRAMES = 4, 2, 2  # pixels of a patch, patches of a token, and frames of a patch
COLORS = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)  # the corners of RGB
CAREFUL = 1e-5  # the learning rate of a model that was trained before
IMAGES = ("pixel_values", "image_grid_thw")
SOURCES = {"image", "path", "url", "base64"}  # keys of a part, one of which has its image

# Tokens 0 to 7 are the colours. A model is asked for these and for END, which have labels.
END, VISION_START, VISION_END, IMAGE, VIDEO, VOCABULARY = range(len(COLORS), len(COLORS) + 6)


@dataclass
class Options:
    """What this example takes beside Trainer's options."""

    model: str | None = HfArg(
        default=None,
        help="a name on the Hub or a checkpoint's folder (default: 0.3 million random weights)",
    )
    conversations: str | None = HfArg(
        default=None, help="a data set of the Hub, or a JSONL or Parquet file"
    )


@dataclass
class Arguments(Defaults, TrainingArguments):
    """Trainer's options, with other defaults."""

    output_dir: str | None = HfArg(default="run_images", help="folder of the run")
    learning_rate: float = HfArg(default=CAREFUL, help="of AdamW (default: 1e-5, for colours 3e-3)")
    per_device_train_batch_size: int = HfArg(default=8, help="documents of a row")


def main() -> None:
    options, args = _ranks.begin(__doc__, Options, Arguments)
    if (options.model is None) != (options.conversations is None):
        raise SystemExit("--model and --conversations must be given together")
    checkpoint = _runs.given_checkpoint(args)
    args.remove_unused_columns = False  # `processed` reads them
    torch.manual_seed(args.seed)
    if options.model is None:
        processor, model, rng = None, a_small_model(), random.Random(args.seed)
        documents: Any = [make_document(rng.choice([0, 1, 1, 2, 2]), rng) for _ in range(6400)]
        args.learning_rate = 3e-3 if args.learning_rate == CAREFUL else args.learning_rate
    else:
        try:
            processor = transformers.AutoProcessor.from_pretrained(options.model)
            model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32)
        except (*UNUSABLE, ImportError) as error:
            raise unusable(options.model, error) from error
        rows = read_rows(options.conversations, "--conversations", ("messages",))
        documents = rows.with_transform(lambda some: processed(some, processor))
    collate = cuseq.data.MultimodalPackingCollator(model.config, blank_image=args.world_size > 1)
    trainer = Trainer(
        model, args, train_dataset=documents, data_collator=collate, processing_class=processor
    )
    _ranks.say(str(cuseq.enable(trainer)))
    _runs.train(trainer, checkpoint, "--resume_from_checkpoint")


def processed(rows: dict[str, list], processor: Any) -> dict[str, list]:
    """Return columns of documents: token ids, labels of their last messages, patches of images."""
    documents = []
    for number, messages in enumerate(rows["messages"]):
        images = iter((rows["images"][number] if "images" in rows else None) or [])
        for message in messages:
            if isinstance(message["content"], list):  # a table fills what a part lacks with None
                message["content"] = [{k: v for k, v in part.items() if v is not None}
                                      for part in message["content"]]  # fmt: skip
                for part in message["content"]:
                    if part["type"] == "image" and not part.keys() & SOURCES:
                        part["image"] = next(images, None)
        ask = dict(conversation=messages[:-1], add_generation_prompt=True)
        whole = processor.apply_chat_template(messages)
        asked = processor.apply_chat_template(**ask) if len(messages) > 1 else None
        if asked is None or not whole.startswith(asked):
            raise SystemExit(f"--conversations: the last message must be an answer, has {messages}")
        document = processor.apply_chat_template(
            **ask, tokenize=True, return_dict=True, return_tensors="pt"
        )
        answer = processor.tokenizer(
            whole[len(asked) :], add_special_tokens=False, return_tensors="pt"
        )["input_ids"]
        before = document["input_ids"]
        patches = {name: document[name] for name in IMAGES if name in document}
        ids = torch.cat([before, answer], 1)
        labels = torch.cat([torch.full_like(before, -100), answer], 1)
        documents.append(dict(input_ids=ids, labels=labels, **patches))
    return {name: [one.get(name) for one in documents] for name in ("input_ids", "labels", *IMAGES)}


def a_small_model() -> transformers.PreTrainedModel:
    """Return a Qwen3-VL of 0.3 million random weights."""
    small = dict(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    text = dict(
        small, vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, use_cache=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 3, 3],
                             mrope_interleaved=True),
    )  # fmt: skip
    tower = dict(
        small, depth=2, num_heads=4, patch_size=PATCH, spatial_merge_size=MERGE,
        temporal_patch_size=FRAMES, out_hidden_size=64, num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    ))  # fmt: skip


def draw_squares(colors: Sequence[int], rng: random.Random) -> Tensor:
    """Return the colours `[3, rows, columns]` of an image's cells: squares in a line, on grey."""
    cells = torch.full((3, rng.randint(1, 2), len(colors) + rng.randint(0, 2)), 0.5)
    cells[:, 0, : len(colors)] = COLORS[colors].T
    return cells


def patches_of(cells: Tensor) -> tuple[Tensor, list[int]]:
    """Return patches `[patches, values]` as Qwen's processor orders them, and their grid.

    The patches of a token follow one another, and each holds the image in all of its frames.
    """
    by_patch = cells.flatten(1).T.repeat_interleave(MERGE**2, 0)
    _, rows, columns = cells.shape
    return by_patch.repeat_interleave(FRAMES * PATCH**2, 1), [1, rows * MERGE, columns * MERGE]


def make_document(images: int, rng: random.Random) -> dict[str, Tensor]:
    """Return images with their colours as text, or a run of colours without an image."""
    ids, pixels, grids = [], [], []
    for _ in range(images):
        colors = rng.choices(range(len(COLORS)), k=rng.randint(1, 4))
        patches, grid = patches_of(draw_squares(colors, rng))
        tokens = [IMAGE] * (len(patches) // MERGE**2)
        ids += [VISION_START, *tokens, VISION_END, *colors, END]
        pixels.append(patches + 0.2 * torch.randn(patches.shape))
        grids.append(grid)
    if not images:
        first = rng.randrange(len(COLORS))
        ids = [*(one % len(COLORS) for one in range(first, first + rng.randint(3, 20))), END]
    row = torch.tensor([ids])
    document = dict(input_ids=row, labels=row.masked_fill(row > END, -100))
    document["mm_token_type_ids"] = (row == IMAGE).long()
    if images:
        document |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return document


if __name__ == "__main__":
    main()
