"""Train one model on the same documents padded, packed, and packed with cuseq, and compare.

    python examples/compare.py                       # Python's own sources, a small Qwen3
    python examples/compare.py --data my_texts --model Qwen/Qwen3-0.6B

All ways start from the same weights and take the same documents in each step, so that their losses
can be compared step by step. Prints a table and writes compare.json and compare.png to --out.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace as Run
from typing import Any

import torch
from _inputs import Inputs, load, make_model
from _ranks import KIND, check_positive, on_device, parsed
from _runs import make_folder
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

import cuseq

ON_GPU = KIND == "cuda"
RATE = 3e-4 if ON_GPU else 3e-3
WAYS = {
    "padded": "padded, sdpa",
    "packed": "packed, sdpa",
    "cuseq": "packed, cuseq",
    "compiled": "packed, cuseq, compiled",
}
COLORS = dict(padded="#80868b", packed="#4c78a8", cuseq="#f58518", compiled="#b5384f")
Batch = dict[str, Any]


@dataclass
class Options(Inputs):
    """What this example takes."""

    ways: list[str] = HfArg(
        default_factory=lambda: list(WAYS)[: 4 if ON_GPU else 3],
        help="(default: all, on a CPU without the last)",
        metadata={"choices": list(WAYS)},
    )
    steps: int = HfArg(default=25, help="optimizer steps, a row each")
    warmup: int = HfArg(default=2, help="first steps that are not timed")
    batch_size: int = HfArg(default=8, help="documents of a padded batch")
    learning_rate: float = HfArg(default=RATE, help="of AdamW; for a checkpoint try 2e-5")
    seed: int = HfArg(default=0, help="of the weights and the documents' order")
    out: Path = HfArg(default=Path(__file__).parent / "out", help="folder of results")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup < self.steps:
            raise SystemExit(f"--warmup must be below --steps ({self.steps}), got {self.warmup}")


def main() -> None:
    (options,) = parsed(__doc__, Options)
    check_positive(options, "batch_size")
    make_folder("--out", options.out)
    sequences, tokenizer = load(options)
    seed, row_length = options.seed, options.row_length
    sampler = cuseq.data.PackedBatchSampler(sequences["length"], row_length, seed=seed)
    chosen = itertools.islice(itertools.cycle(sampler), options.steps)
    steps = [[{"input_ids": sequences[i]["input_ids"]} for i in row] for row in chosen]
    for row in steps:  # a sampler's rows begin with the longest, which would save padding
        random.Random(seed).shuffle(row)
    runs: list[Run] = []
    for way in dict.fromkeys(options.ways):
        torch.manual_seed(seed)
        model = make_model(options, len(tokenizer), KIND, attn_implementation="sdpa",
                           dtype=torch.bfloat16 if ON_GPU else torch.float32)  # fmt: skip
        runs.append(train(way, model.train(), steps, tokenizer.pad, options))
        del model
        if len(runs[-1].losses) < options.steps:
            print("Stopped early.")
            break
    report(runs, options)


def batches_of(way: str, row: list[Batch], pad: Callable, options: Options) -> list[Batch]:
    """Return the batches of a step; their losses add up to the mean over its labels."""
    if way == "padded":
        size = options.batch_size
        parts = [row[at : at + size] for at in range(0, len(row), size)]
        batches = [dict(pad(part, return_tensors="pt")) for part in parts]
        for batch in batches:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        count = sum(len(one["input_ids"]) - 1 for one in row)
        return [batch | {"num_items_in_batch": count} for batch in batches]
    collate = cuseq.PackingCollator(total_tokens=options.row_length if way == "compiled" else None)
    batch = collate(row)
    if way == "packed":
        del batch["packed"]  # transformers finds the documents where position_ids begin again
    return [batch]


def train(
    way: str, model: PreTrainedModel, steps: list[list[Batch]], pad: Callable, options: Options
) -> Run:
    """Train on each step's documents, and return what it took; Ctrl-C ends the run early."""
    if way in ("cuseq", "compiled"):
        print(*cuseq.enable(model).warnings, sep="\n", end="")
    if way == "compiled":
        for layer in model.get_decoder().layers:
            layer.compile(fullgraph=True, dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=ON_GPU)
    losses, real, given, begin = [], 0, 0, now()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    with suppress(KeyboardInterrupt):
        for step, row in enumerate(tqdm(steps, desc=WAYS[way], unit="step")):
            if step == options.warmup:
                real, given, begin = 0, 0, now()
            total = torch.zeros((), device=KIND)
            for batch in batches_of(way, row, pad, options):
                given += batch["input_ids"].numel()
                loss = model(**on_device(batch), use_cache=False).loss
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            real += sum(len(one["input_ids"]) for one in row)
    seconds, timed = now() - begin, len(losses) - options.warmup
    return Run(
        way=way,
        losses=[loss.item() for loss in losses],
        tokens_per_second=real / seconds if timed > 0 else None,
        ms_per_step=1e3 * seconds / timed if timed > 0 else None,
        padding=1 - real / given if timed > 0 else 0.0,
        gib=torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,  # the most of tensors
    )


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def report(runs: list[Run], options: Options) -> None:
    """Print the table, and write it as JSON and as a picture."""
    packed = next((run.tokens_per_second for run in runs if run.way == "packed"), None)
    print(f"\n{'':24}  tokens/s  of packed  ms/step  padding    GiB    loss")
    for run in (run for run in runs if run.tokens_per_second is not None):
        speed = f"{run.tokens_per_second / packed:.2f}x" if packed else "-"
        gib = "-" if run.gib is None else f"{run.gib:.1f}"
        print(
            f"{WAYS[run.way]:24}{run.tokens_per_second:10,.0f}{speed:>11}{run.ms_per_step:9,.0f}"
            f"{run.padding:9.1%}{gib:>7}{run.losses[-1]:8.3f}"
        )
    losses = {run.way: run.losses for run in runs}
    if {"packed", "cuseq"} <= losses.keys():
        apart = max(abs(a - b) for a, b in zip(losses["packed"], losses["cuseq"]))
        print(f"Losses of packed sdpa and packed cuseq differ by at most {apart:.1e}.")
    results = dict(options=asdict(options), torch=torch.__version__, runs=[vars(r) for r in runs])
    (options.out / "compare.json").write_text(json.dumps(results, indent=2, default=str) + "\n")

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    curves, *bars = figure.subplots(1, 3 if ON_GPU else 2)
    for run, width in zip(runs, (9, 5, 2.5, 1)):  # wide below thin, so that equal ones all show
        curves.plot(run.losses, color=COLORS[run.way], label=WAYS[run.way], linewidth=width)
    curves.set(title="Loss", xlabel="optimizer step")
    curves.legend(frameon=False)
    names, colors = zip(*((WAYS[run.way].replace(", ", "\n"), COLORS[run.way]) for run in runs))
    for axes, name, title in zip(bars, ("tokens_per_second", "gib"), ("Real tokens/s", "Peak GiB")):
        drawn = axes.bar(names, [getattr(run, name) or 0 for run in runs], color=colors)
        axes.bar_label(drawn, fmt="{:,.0f}" if name == "tokens_per_second" else "{:.1f}")
        axes.set_title(title)
    figure.savefig(options.out / "compare.png", dpi=120)
    print(f"Written: compare.json and compare.png in {options.out}")


if __name__ == "__main__":
    main()
