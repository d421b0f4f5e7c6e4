"""Teach a small Qwen3-VL to name colours, in packed rows and document by document.

    python examples/images.py             # a few minutes, on the CPU
    python examples/images.py --steps 20  # too few to learn them

A document is an image of one to four squares with their colours as text, or two of them, or text
alone. Trains twice from the same weights on the same documents: packed by
`MultimodalPackingCollator`, with `cuseq.enable`, and in transformers alone, where gradients of
documents add up to a step.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace as Run

import torch
import transformers
from _ranks import check_positive, parsed
from torch import Tensor
from transformers.hf_argparser import HfArg

import cuseq

LEARNING_RATE, WARMUP = 3e-3, 20
PATCH, MERGE, FRAMES = 4, 2, 2  # pixels of a patch, patches of a token, and frames of a patch
COLORS = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)  # the corners of RGB

# Tokens 0 to 7 are the colours. A model is asked for these and for END, which have labels.
END, VISION_START, VISION_END, IMAGE, VIDEO, VOCABULARY = range(len(COLORS), len(COLORS) + 6)
Document = dict[str, Tensor]


@dataclass
class Options:
    """What this example takes."""

    steps: int = HfArg(default=200, help="of training")
    documents: int = HfArg(default=32, help="of a step")
    seed: int = HfArg(default=0, help="of weights and documents")


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Train both ways, print the comparison and return it."""
    (options,) = parsed(__doc__, Options, given=arguments)
    check_positive(options, "steps", "documents")
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    drawn = (make_document(rng.choice([0, 1, 1, 2, 2]), rng) for _ in itertools.count())
    steps = [list(itertools.islice(drawn, options.documents)) for _ in range(options.steps)]
    unseen = [make_document(1, rng) for _ in range(200)]

    model = make_model(options.seed)
    cuseq.enable(model)
    collate = cuseq.data.MultimodalPackingCollator(model.config)
    packed = train("cuseq, packed", model, steps, unseen, lambda documents: [collate(documents)])
    alone = train("transformers, one by one", make_model(options.seed), steps, unseen, list)
    for run in (packed, alone):
        print(f"{run.name:24}  {run.tokens_per_second:7,.0f} tokens/s, last loss "
              f"{run.losses[-1]:.4f}, {run.named_right:.1%} of new squares right")  # fmt: skip
    apart = [abs(a - b) for a, b in zip(packed.losses, alone.losses)]
    # Training multiplies the rounding of its first steps, so later losses say less.
    print(f"Losses of the first 20 steps differ by at most {max(apart[:20]):.1e}, all by at most "
          f"{max(apart):.1e}.\nPacked training is "
          f"{packed.tokens_per_second / alone.tokens_per_second:.1f}x as fast.")  # fmt: skip
    return [packed, alone]


def make_model(seed: int) -> torch.nn.Module:
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
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.Qwen3VLForConditionalGeneration(config)


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


def make_document(images: int, rng: random.Random) -> Document:
    """Return a document as a processor makes it: images with their colours, or a run of these."""
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


def train(
    name: str, model: torch.nn.Module, steps: list[list[Document]], unseen: list[Document],
    batches_of: Callable[[list[Document]], list[dict]],
) -> Run:  # fmt: skip
    """Train on the documents of each step, in the batches that `batches_of` makes of them."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, len(steps))
    losses, begin = [], time.perf_counter()
    for step, documents in enumerate(steps, 1):
        batches = batches_of(documents)
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        losses.append(0.0)
        for batch, count in zip(batches, counts):
            # A model's loss is a mean over labels: weighted, the losses add up to that of a row.
            loss = model(**batch).loss * (count / sum(counts))
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"{name}: step {step} of {len(steps)}, loss {losses[-1]:.4f}", flush=True)
    seconds = time.perf_counter() - begin
    tokens = sum(one["input_ids"].numel() for documents in steps for one in documents)
    right = named_right(model, batches_of(unseen))
    return Run(name=name, losses=losses, tokens_per_second=tokens / seconds, named_right=right)


@torch.no_grad()
def named_right(model: torch.nn.Module, batches: list[dict]) -> float:
    """Return the share of colours that the model finds most probable after those before."""
    right = []
    for batch in batches:
        labels = batch["labels"][:, 1:]
        guesses = model(**batch).logits[:, :-1].argmax(-1)
        right.append((guesses == labels)[(labels >= 0) & (labels < END)])
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
