"""Measure vision towers, and steps of vision-language models over packed rows with images.

    python -m benchmarks images [--parts towers row receipts blocks captured] [--fla]

`towers`: forward and backward of the towers of Qwen2.5-VL-7B and Qwen3-VL-8B, bf16, over eight
images of about 1 MP and thirty-two of 0.25 MP: transformers' sdpa, which loops over images and
windows; its path for flash attention, with torch's varlen attention behind it; and enabled; the
last two with compiled blocks as well. `calls` are calls of attention in a forward, `waits` those of
the host in forward and backward.

`row`: a step of a Qwen3-VL-2B shape over rows of 8,192 tokens, of which half are those of images:
documents padded to the longest, the packed row in stock transformers, and enabled.

`receipts`: Megatron-Bridge's own comparison (PR 3838) for a Qwen3.5-VL-2B shape: documents with one
image of about 1 MP and 100 to 1,500 tokens of text, in micro-batches, padded to 2,048 tokens or
packed, in stock transformers and enabled; milliseconds, memory, and the largest micro-batch. Under
torchrun with DistributedDataParallel, micro-batches of 2 and 4; samples of all ranks count. Give
`--fla` where flash-linear-attention is installed; otherwise the layers are Qwen3-VL's.

`blocks`: forward and backward of packed rows of Gemma 3 (heads of the 4B shape, eight layers), half
their tokens images, whose tokens see each other in both directions: stock transformers, which makes
dense masks, and enabled.

`captured`: whole steps of a Qwen3-VL-0.6B shape over new rows of 2,048 tokens with three to five
images, plain and in a `GraphedStep`; `host` is the time that a call takes on the host.

On a CPU the sizes are small, and only say that everything runs.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import timer
import torch
import torch.distributed as dist
from report import Report, Table, arguments, environment
from torch.nn.parallel import DistributedDataParallel

import cuseq

IMAGE = 151_655
TEXT = dict(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                     "mrope_section": [24, 20, 20]},
)  # fmt: skip
VISION = dict(
    depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16,
    spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=2048,
    deepstack_visual_indexes=[5, 11, 17], num_position_embeddings=2304,
)  # fmt: skip
TOWERS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "Qwen2.5-VL": (
        "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel",
        dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14,
             window_size=112, fullatt_block_indexes=[7, 15, 23, 31], out_hidden_size=3584), 14,
    ),
    "Qwen3-VL": (
        "Qwen3VLVisionConfig", "Qwen3VLVisionModel",
        dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16,
             deepstack_visual_indexes=[8, 16, 24], out_hidden_size=4096), 16,
    ),
}  # fmt: skip
SMALL_TOWER = dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=2)
SMALL_TEXT = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64,
                  num_attention_heads=2, num_key_value_heads=1, vocab_size=IMAGE + 10)  # fmt: skip


def free(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    cuseq.cache.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wall(step: Callable[[], None], device: torch.device, repeats: int, warmup: int) -> float:
    """Return the median of the wall times of a step, in milliseconds."""
    walls = []
    for _ in range(warmup + repeats):
        timer.synchronize(device)
        begun = time.perf_counter()
        step()
        timer.synchronize(device)
        walls.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(walls[warmup:])


# ------------------------------------------------------------------------------------------- towers


def register_flash() -> list[int]:
    """Register torch's varlen attention under two names with "flash" in them; return the calls of
    the second. Compiled code would be made anew for each number of calls.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    calls = [0]

    def attend(module, q, k, v, cu_seq_lens_q=None, max_length_q=None, scaling=None, **_):
        rows = (one.squeeze(0).transpose(0, 1) for one in (q, k, v))
        out = varlen_attn(*rows, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                          scale=scaling)  # fmt: skip
        return out[None], None

    def counted(*args, **options):
        calls[0] += 1
        return attend(*args, **options)

    AttentionInterface.register("torch_flash", attend)
    AttentionInterface.register("counted_flash", counted)
    return calls


def tower_rows(
    name: str, device: torch.device, table: list[dict[str, Any]], report: Report, out: Any
) -> None:
    """Measure a tower, and write the report after each variant."""
    on_gpu = device.type == "cuda"
    config_name, class_name, shape, patch = TOWERS[name]
    shape = shape | ({} if on_gpu else SMALL_TOWER | dict(deepstack_visual_indexes=[0]))
    if not on_gpu:
        shape |= dict(fullatt_block_indexes=[1])
    family = "qwen2_5_vl" if name == "Qwen2.5-VL" else "qwen3_vl"
    folder = importlib.import_module(f"transformers.models.{family}")
    config = getattr(folder, config_name)(**shape)
    cls = getattr(importlib.import_module(f"{folder.__name__}.modeling_{family}"), class_name)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    flash_calls = register_flash() if on_gpu else None
    inputs = []
    for count, pixels in ((8, 1008), (32, 504)):
        side = pixels // patch // 2 * 2 if on_gpu else 8
        grids = torch.tensor([[1, side, side]] * (count if on_gpu else 2))
        patches = int(grids.prod(1).sum())
        x = torch.randn(patches, 3 * 2 * patch * patch, device=device, dtype=dtype)
        inputs.append((x, grids))
        table.append({"tower": name, "images": f"{len(grids)} x {side} x {side} patches"})
    for variant in ("sdpa", "flash", "cuseq", "flash compiled", "cuseq compiled"):
        kind, _, compiled = variant.partition(" ")
        if (kind == "flash" or compiled) and not on_gpu:
            continue
        free(device)
        torch.manual_seed(0)
        with torch.device(device):
            tower = cls._from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa"
            ).train()
        if kind == "flash":  # transformers makes no model with a name that it does not know
            tower.config._attn_implementation = "torch_flash"
        if kind == "cuseq":
            cuseq.enable(tower)
        for block in tower.blocks if compiled else ():
            block.compile(dynamic=True)
        for found, (x, grids) in zip(table[-2:], inputs, strict=True):
            # transformers reads grids of its own path on the device.
            grid = grids if kind == "cuseq" else grids.to(device)

            def step(tower=tower, x=x, grid=grid) -> None:
                tower(x, grid_thw=grid).pooler_output.sum().backward()
                for weight in tower.parameters():
                    weight.grad = None

            key = variant.replace(" ", "_")
            try:
                found[key] = wall(step, device, 4, 2 if compiled else 1)
            except Exception as error:
                report.notes.append(f"{name}, {variant}: {type(error).__name__}: {error}"[:300])
                continue
            if on_gpu and kind != "sdpa" and not compiled:  # its calls are too many to record
                found[f"{key}_waits"] = timer.profile(step, device=device).within(
                    timer.WHOLE
                ).syncs  # fmt: skip
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                step()
                found[f"{key}_gib"] = torch.cuda.max_memory_allocated() / 2**30
            if variant == "flash" and flash_calls is not None:
                flash_calls[0] = 0
                tower.config._attn_implementation = "counted_flash"
                with torch.no_grad():
                    tower(x, grid_thw=grid)
                tower.config._attn_implementation = "torch_flash"
                found["flash_calls"] = flash_calls[0]
            if "cuseq" in found:
                found["times"] = found["sdpa"] / found["cuseq"]
            del step
        if kind == "cuseq":
            cuseq.disable(tower)
        del tower
        report.write(out)


# --------------------------------------------------------------------------------------------- rows


def make_model(
    hybrid: bool,
    device: torch.device,
    of_text: dict[str, Any] | None = None,
    of_tower: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Return a vision-language model of 2B, or of other sizes, with random weights."""
    import transformers

    on_gpu = device.type == "cuda"
    text, vision = TEXT | (of_text or {}), VISION | (of_tower or {})
    if not on_gpu:
        text |= SMALL_TEXT
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [12, 10, 10]}
        vision |= SMALL_TOWER | dict(out_hidden_size=128, deepstack_visual_indexes=[0])
    if hybrid:
        vision.pop("deepstack_visual_indexes")
        text |= dict(num_hidden_layers=24 if on_gpu else 4, head_dim=256 if on_gpu else 64)
        text |= dict(num_attention_heads=8, num_key_value_heads=2)
        text["rope_parameters"] = text["rope_parameters"] | dict(
            partial_rotary_factor=0.25, mrope_section=[11, 11, 10] if on_gpu else [3, 3, 2]
        )
    config = transformers.AutoConfig.for_model(
        "qwen3_5" if hybrid else "qwen3_vl", text_config=text, vision_config=vision,
        image_token_id=IMAGE, video_token_id=IMAGE + 1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.train()


def document(side: int, text: int, draw: random.Random) -> dict[str, torch.Tensor]:
    """Return a document with one image of `side` x `side` patches of 16 pixels."""
    image = [IMAGE] * (side * side // 4)
    ids = [draw.randrange(1000) for _ in range(4)] + image
    ids += [draw.randrange(1000) for _ in range(max(1, text - 4))]
    return dict(
        input_ids=torch.tensor([ids]),
        pixel_values=torch.randn(side * side, 3 * 2 * 16 * 16),
        image_grid_thw=torch.tensor([[1, side, side]]),
    )


def padded_batch(
    model: torch.nn.Module, documents: list[dict[str, torch.Tensor]], length: int
) -> dict[str, torch.Tensor]:
    """Return documents padded to one length, with the planes of each."""
    one = cuseq.data.MultimodalPackingCollator(model.config)
    batch: dict[str, list[torch.Tensor]] = {}
    for row in (one([document]) for document in documents):
        left = length - row["input_ids"].shape[1]
        pad = torch.nn.functional.pad
        for name, value, dim in (
            ("input_ids", pad(row["input_ids"], (0, left)), 0),
            ("labels", pad(row["labels"], (0, left), value=-100), 0),
            ("attention_mask", pad(torch.ones_like(row["input_ids"]), (0, left)), 0),
            ("position_ids", pad(row["position_ids"][1:], (0, left)), 1),
        ):
            batch.setdefault(name, []).append(value)
    found = {
        name: torch.cat(values, dim=int(name == "position_ids")) for name, values in batch.items()
    }
    for name in ("pixel_values", "image_grid_thw"):
        found[name] = torch.cat([document[name] for document in documents])
    return found


def step_of(
    model: torch.nn.Module, batch: dict[str, Any], device: torch.device
) -> Callable[[], None]:
    dtype = next(model.parameters()).dtype
    if "pixel_values" in batch:
        batch = batch | {"pixel_values": batch["pixel_values"].to(dtype)}
    held = {name: one.pin_memory() if device.type == "cuda" and isinstance(one, torch.Tensor)
            else one for name, one in batch.items()}  # fmt: skip
    forward = model
    if dist.is_initialized():
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        moved = {name: one.to(device, non_blocking=True) for name, one in held.items()}
        forward(**moved, use_cache=False).loss.backward()
        for weight in model.parameters():
            weight.grad = None

    return step


def measured(make: Callable[[], Callable[[], None]], device: torch.device) -> dict[str, Any]:
    """Return milliseconds and GiB of the step that `make` returns, None where memory ran out."""
    try:
        found: dict[str, Any] = {"": wall(make(), device, 5, 2)}
    except torch.OutOfMemoryError:
        return {"": None}
    if device.type == "cuda":
        found["_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def waits(make: Callable[[], Callable[[], None]], device: torch.device) -> dict[str, Any]:
    """Return the waits of the step that `make` returns, and the operators that they are in."""
    step = make()
    step()
    seen = timer.profile(step, device=device).within(timer.WHOLE)
    return {"_waits": seen.syncs, "_sites": dict(seen.sites)}


def in_kinds(
    model: torch.nn.Module,
    steps: dict[str, Callable[[], Callable[[], None]]],
    device: torch.device,
    with_waits: bool,
) -> dict[str, Any]:
    """Measure a step for each kind, of which "cuseq" is that of the enabled model.

    Times come first: once the profiler has run, it slows every later launch.
    """
    found: dict[str, Any] = {}
    for measure in (measured, waits) if with_waits and device.type == "cuda" else (measured,):
        for kind, make in steps.items():
            if measure is waits and found[kind] is None:
                continue
            free(device)
            if kind == "cuseq":
                cuseq.enable(model)
            try:
                found |= {f"{kind}{name}": one for name, one in measure(make, device).items()}
            finally:
                for weight in model.parameters():
                    weight.grad = None
                if kind == "cuseq":
                    cuseq.disable(model)
    return found


def variants(
    model: torch.nn.Module,
    documents: list[dict[str, torch.Tensor]],
    length: int,
    kinds: tuple[str, ...],
    device: torch.device,
    with_waits: bool = False,
) -> dict[str, Any]:
    """Measure a step over documents, padded to a length, packed for stock, and packed for cuseq."""
    packed = cuseq.data.MultimodalPackingCollator(model.config)(documents)
    stock = {name: value for name, value in packed.items() if "layout" not in name}
    del stock["packed"]
    batches = {
        "padded": lambda: padded_batch(model, documents, length),
        "stock": lambda: stock,
        "cuseq": lambda: packed,
    }
    steps = {
        kind: lambda kind=kind: step_of(model, batches[kind](), device)  # type: ignore[misc]
        for kind in kinds
    }
    return in_kinds(model, steps, device, with_waits)


def row_of_images(device: torch.device, report: Report) -> None:
    """Measure a row of 8,192 tokens of which half are those of images."""
    on_gpu = device.type == "cuda"
    model, draw = make_model(False, device), random.Random(0)
    documents = []
    for _ in range(8 if on_gpu else 2):  # images of 256 to 1,024 tokens beside as much text
        side = draw.choice((32, 44, 44, 52)) if on_gpu else 8
        documents.append(document(side, side * side // 4, draw))
    tokens = sum(one["input_ids"].numel() for one in documents)
    longest = max(one["input_ids"].numel() for one in documents)
    found = variants(model, documents, longest, ("padded", "stock", "cuseq"), device, True)
    report.notes.append(f"Row: {len(documents)} documents, {tokens:,} tokens, longest {longest:,}.")
    found["times"] = found["stock"] / found["cuseq"]
    found["times_padded"] = found["padded"] / found["cuseq"]
    columns = {"padded": "padded, ms", "stock": "packed stock, ms", "cuseq": "cuseq, ms",
               "times": "of stock", "times_padded": "of padded", "padded_gib": "padded, GiB",
               "stock_gib": "stock, GiB", "cuseq_gib": "cuseq, GiB", "padded_waits": "padded waits",
               "stock_waits": "stock waits", "cuseq_waits": "cuseq waits"}  # fmt: skip
    report.tables.append(Table("A step of a 2B model, half its tokens images", columns, [found]))


def receipts(device: torch.device, report: Report, hybrid: bool, out: Any) -> None:
    """Measure micro-batches of receipts, padded to 2,048 tokens and packed.

    Writes the report after each number of samples: larger ones may end by a limit. Ranks have
    documents of their own, and micro-batches of 2 and 4.
    """
    on_gpu = device.type == "cuda"
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, draw = make_model(hybrid, device), random.Random(rank)
    side, length, most = (62, 2048, 1087) if on_gpu else (8, 64, 20)
    rows: list[dict[str, Any]] = []
    columns = {"samples": "samples", "padded": "padded, ms", "cuseq": "cuseq, ms",
               "times": "times", "padded_gib": "padded, GiB", "cuseq_gib": "cuseq, GiB",
               "padded_rate": "padded, samples/s", "cuseq_rate": "cuseq, samples/s"}  # fmt: skip
    report.tables.append(Table("Receipts in micro-batches", columns, rows))
    kinds: tuple[str, ...] = ("padded", "cuseq")
    for samples in range(2, 65 if ranks == 1 else 5, 2) if on_gpu else (2,):
        texts = [draw.randint(min(100, most // 2), most) for _ in range(samples)]
        documents = [document(side, text, draw) for text in texts]
        found = variants(model, documents, length, kinds, device)
        found["samples"] = samples
        for kind in kinds:
            if found[kind] is not None:
                found[f"{kind}_rate"] = ranks * samples * 1e3 / found[kind]
        if found.get("padded") and found.get("cuseq"):
            found["times"] = found["padded"] / found["cuseq"]
        rows.append(found)
        if rank == 0:
            report.write(out)
        kinds = tuple(kind for kind in kinds if found[kind] is not None)
        if not kinds:
            break


# ----------------------------------------------------------------------------------- image blocks


def gemma_row(tokens: int, vocabulary: int, draw: random.Random) -> dict[str, torch.Tensor]:
    """Return ids, types and positions of documents with an image of 256 tokens and as much text."""
    types, positions = [], []
    while tokens > 0:
        before = draw.randint(16, 200)
        document = ([0] * before + [1] * 256 + [0] * draw.randint(16, 340))[:tokens]
        types += document
        positions += range(len(document))
        tokens -= len(document)
    return dict(
        inputs_embeds=torch.randn(1, len(types), vocabulary),
        token_type_ids=torch.tensor([types]),
        position_ids=torch.tensor([positions]),
    )


def blocks(device: torch.device, report: Report) -> None:
    """Measure rows of Gemma 3 with images; embeddings stand for tokens and towers."""
    import transformers

    on_gpu = device.type == "cuda"
    text = dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
                num_key_value_heads=4, head_dim=256, sliding_window=1024, vocab_size=1000,
                num_hidden_layers=8)  # fmt: skip
    if not on_gpu:
        text |= dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=2)
    vision = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, boi_token_index=1, eoi_token_index=2,
        image_token_index=3,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation="sdpa"
        ).train()
    columns = {"tokens": "tokens", "documents": "documents", "stock": "stock, ms",
               "cuseq": "cuseq, ms", "times": "times", "stock_gib": "stock, GiB",
               "cuseq_gib": "cuseq, GiB", "cuseq_waits": "cuseq waits"}  # fmt: skip
    rows: list[dict[str, Any]] = []
    report.tables.append(Table("Rows of images whose tokens see each other", columns, rows))
    for tokens in (4096, 16_384, 32_768) if on_gpu else (1024, 4096):
        batch = gemma_row(tokens, text["hidden_size"], random.Random(0))
        lengths = batch["position_ids"][0].eq(0).nonzero().flatten().tolist() + [tokens]
        packed = cuseq.PackedLayout.from_lengths(
            [end - start for start, end in zip(lengths, lengths[1:], strict=False)]
        )
        batch = {name: value.to(device) for name, value in batch.items()}
        batch["inputs_embeds"] = batch["inputs_embeds"].to(model.dtype)
        found: dict[str, Any] = dict(tokens=tokens, documents=packed.num_sequences)
        tolds = dict(stock=batch, cuseq=batch | dict(packed=packed.to(device)))

        def step(kind: str, tolds: dict[str, Any] = tolds) -> None:
            model(**tolds[kind], use_cache=False).logits.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

        steps = {kind: lambda kind=kind: functools.partial(step, kind) for kind in tolds}
        found |= in_kinds(model, steps, device, True)
        if found["stock"] and found["cuseq"]:
            found["times"] = found["stock"] / found["cuseq"]
        rows.append(found)


# --------------------------------------------------------------------------------- captured steps


def captured(device: torch.device, report: Report) -> None:
    """Measure training steps over rows with images, plain and captured."""
    on_gpu = device.type == "cuda"
    small = dict(hidden_size=1024, intermediate_size=3072), dict(
        depth=12, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=1024,
        deepstack_visual_indexes=[2, 5, 8],
    )  # fmt: skip
    model = make_model(False, device, *small if on_gpu else ())
    cuseq.enable(model)
    tokens, patches = (2048, 4096) if on_gpu else (256, 512)
    sides, texts = ((16, 24, 28), (60, 220)) if on_gpu else ((4, 8), (4, 20))

    def batches(**options: int) -> list[dict[str, Any]]:
        draw = random.Random(1)
        collate = cuseq.data.MultimodalPackingCollator(
            model.config, total_tokens=tokens, max_seqs=16, **options
        )
        made = []
        for _ in range(26 if on_gpu else 8):
            documents = [
                document(draw.choice(sides), draw.randint(*texts), draw)
                for _ in range(draw.randint(3, 5))
            ]
            batch = collate(documents)
            batch["pixel_values"] = batch["pixel_values"].to(model.dtype)
            pinned = {name: one.pin_memory() for name, one in batch.items()
                      if on_gpu and isinstance(one, torch.Tensor)}  # fmt: skip
            made.append(batch | pinned)
        return made

    def measure(name: str, step: Callable[[dict[str, Any]], Any], given: list[Any]) -> None:
        """Measure a stream of steps, and then the host's part of steps that find the GPU idle."""
        for batch in given[:6]:
            step(batch)
        timer.synchronize(device)
        begun = time.perf_counter()
        for batch in given[6:]:
            step(batch)
        timer.synchronize(device)
        stream = (time.perf_counter() - begun) * 1e3 / len(given[6:])
        hosts = []
        for batch in given[6:]:
            begun = time.perf_counter()
            step(batch)
            hosts.append((time.perf_counter() - begun) * 1e3)
            timer.synchronize(device)
        rows.append({"step": name, "stream": stream, "host": statistics.median(hosts)})

    columns = {"step": "step", "stream": "step, ms", "host": "host, ms"}
    rows: list[dict[str, Any]] = []
    report.tables.append(Table("Training steps over rows with images", columns, rows))
    fixed = batches(image_capacity=patches, max_images=8)
    graphed = cuseq.GraphedStep(
        lambda batch: model(**batch, use_cache=False).loss,
        torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), fixed[0],
    )  # fmt: skip
    measure("graphed", graphed, fixed)
    report.notes.append(f"captured: {graphed.captured}, {graphed.reason}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def plain(batch: dict[str, Any]) -> None:
        moved = {name: one.to(device, non_blocking=True) for name, one in batch.items()}
        model(**moved, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    measure("plain, rows of a fixed size", plain, fixed)
    measure("plain", plain, batches())


def main() -> None:
    parser = arguments(__doc__)
    parts = ("towers", "row", "receipts", "blocks", "captured")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--fla", action="store_true", help="receipts with gated delta layers")
    args = parser.parse_args()
    device = torch.device(args.device)
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    report = Report("images", environment(args.device))
    if "towers" in args.parts:
        columns = {"tower": "tower", "images": "images"}
        for key in ("sdpa", "flash", "cuseq", "flash_compiled", "cuseq_compiled"):
            columns[key] = f"{key.replace('_', ' ')}, ms"
        columns |= {"times": "times", "flash_waits": "flash waits",
                    "cuseq_waits": "cuseq waits", "flash_calls": "calls",
                    "sdpa_gib": "sdpa, GiB", "cuseq_gib": "cuseq, GiB"}  # fmt: skip
        table: list[dict[str, Any]] = []
        report.tables.append(Table("Towers, forward and backward", columns, table))
        for name in TOWERS:
            tower_rows(name, device, table, report, args.out)
    if "row" in args.parts:
        row_of_images(device, report)
        report.write(args.out)
    if "receipts" in args.parts:
        receipts(device, report, args.fla, args.out)
    if "blocks" in args.parts:
        blocks(device, report)
        report.write(args.out)
    if "captured" in args.parts:
        captured(device, report)
        report.write(args.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
