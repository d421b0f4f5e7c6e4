"""Compare training steps of stock flex attention and cuseq's backends in one process.

    python -m benchmarks training_turns [--tokens T ...] [--documents N] [--compiled layers|model]

Qwen3-0.6B's shape, full fine-tuning. Every variant has a model and an optimizer of its own. They
take turns step by step, on the same packs, so that a host or a clock that is slow for a while slows
all of them alike (`bench_training_step` runs each variant in its own process). Variants:

- `flex`: transformers' flex attention, with the mask that transformers makes of the position ids;
- `flex_block_mask`: flex attention over cuseq's `packed.block_mask()`;
- `auto`, `flash`, `fa4`: `cuseq.enable(model, backend=...)`.

The models of flex come from a copy of transformers' modeling module, which `cuseq.enable` does not
change. "first" is the first step of a variant, with what it compiles. A variant whose first step
fails is left out, and the ratios are to the first variant that runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import timer
import torch
from bench_training_step import (
    ENABLED,
    MEAN_LENGTH,
    MODELS,
    MicroBatch,
    Variant,
    compile_parts,
    packed_batch,
    train_step,
)
from report import Report, Table, arguments, environment
from workload import documents, has_flash_attention_4, lognormal_lengths

FLEX = Variant("flex", "flex_attention", "packed")
VARIANTS = {
    variant.name: variant
    for variant in (
        FLEX,
        replace(FLEX, name="flex_block_mask", lengths="host", block_mask=True),
        replace(ENABLED, name="auto"),
        replace(ENABLED, name="flash", backend="flash"),
        replace(ENABLED, name="fa4", backend="fa4"),
    )
}


@dataclass
class Runner:
    """A variant with its model and optimizer, and the times of its steps in milliseconds."""

    variant: Variant
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    first_s: float
    steps: list[float]

    def step(self, batches: list[MicroBatch], device: torch.device) -> float:
        """Run one step; return its wall time in milliseconds, host and device together."""
        timer.synchronize(device)
        begun = time.perf_counter()
        train_step(self.model, self.optimizer, batches, device)
        timer.synchronize(device)
        return (time.perf_counter() - begun) * 1e3


def copied_modeling() -> ModuleType:
    """Return a second copy of transformers' Qwen3 code, for models that cuseq does not enable."""
    original = "transformers.models.qwen3.modeling_qwen3"
    found = importlib.util.find_spec(original)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{original}_copy", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_runner(
    variant: Variant, code: ModuleType, tokens: int, compiled: str, device: torch.device
) -> Runner:
    """Make the model of a variant, with equal random weights for all."""
    import transformers

    import cuseq

    config = transformers.Qwen3Config(**MODELS["0.6b"].shape)
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": variant.attention}
    with torch.device(device):
        if variant.enabled:
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
            cuseq.enable(model, backend=variant.backend)
        else:
            model = code.Qwen3ForCausalLM._from_config(config, **options)
    model.train()
    compile_parts(model, compiled, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return Runner(variant, model, optimizer, 0.0, [])


def packs(tokens: int, count: int | None, vocab_size: int):
    """Yield the documents of one pack after the other."""
    for seed in itertools.count():
        if count is None:
            lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed)
        else:
            lengths = [tokens // count] * (count - 1)
            lengths.append(tokens - sum(lengths))
        yield documents(lengths, vocab_size, seed)


def prepared(variant: Variant, docs: list[list[int]], tokens: int) -> list[MicroBatch]:
    """Return what a data loader would pass to the step, in pinned memory."""
    return [
        replace(batch, inputs={name: x.pin_memory() for name, x in batch.inputs.items()})
        for batch in packed_batch(variant, docs, tokens)
    ]


def measure(tokens: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    code = copied_modeling()
    stream = packs(tokens, args.documents, MODELS["0.6b"].shape["vocab_size"])
    runners = []
    for name in args.variants:
        runner = make_runner(VARIANTS[name], code, tokens, args.compiled, device)
        batches = prepared(runner.variant, next(stream), tokens)
        try:
            runner.first_s = runner.step(batches, device) / 1e3
        except Exception as failure:  # the code of peers may not compile as one graph
            print(f"{tokens:,} tokens, {name}: {str(failure).splitlines()[:1]}", flush=True)
            continue
        print(f"{tokens:,} tokens, {name}: first step {runner.first_s:.1f} s", flush=True)
        runners.append(runner)
    for turn in range(args.warmup + args.steps):
        docs = next(stream)
        first = turn % len(runners)
        for runner in runners[first:] + runners[:first]:
            taken = runner.step(prepared(runner.variant, docs, tokens), device)
            if turn >= args.warmup:
                runner.steps.append(taken)
    rows = []
    for runner in runners:
        ratios = [a / b for a, b in zip(runners[0].steps, runner.steps, strict=True)]
        row = {
            "tokens": tokens, "documents": args.documents, "variant": runner.variant.name,
            "step": statistics.median(runner.steps), "least": min(runner.steps),
            "most": max(runner.steps), "times": statistics.median(ratios),
            "first_s": runner.first_s,
        }  # fmt: skip
        print(f"{tokens:,} tokens, {row['variant']}: {row['step']:.1f} ms, {row['times']:.3f}")
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--documents", type=int, help="of equal length; default lognormal lengths")
    parser.add_argument("--compiled", choices=["layers", "model"], default="model")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cuda":
        parser.error("flex attention has no gradients on a CPU: it needs a GPU")
    if args.variants is None:
        args.variants = [name for name in VARIANTS if name != "fa4" or has_flash_attention_4()]
    rows = []
    for tokens in args.tokens:
        torch._dynamo.reset()
        rows += measure(tokens, args, device)
        torch.cuda.empty_cache()

    report = Report("training_turns", environment(args.device))
    report.notes.append(
        f"{MODELS['0.6b'].describe}, {args.compiled} compiled, variants taking turns; "
        "'times' is the median of a turn's ratio to the first variant."
    )
    columns = {
        "tokens": "tokens", "documents": "documents", "variant": "variant", "step": "step ms",
        "least": "least", "most": "most", "times": "times", "first_s": "first s",
    }  # fmt: skip
    report.tables.append(Table("Steps in turns", columns, rows))
    report.write(args.out)


if __name__ == "__main__":
    main()
