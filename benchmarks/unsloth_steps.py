"""Measure training steps of the real unsloth, as installed and with cuseq, in one process.

A process has one kind of attention and one model, fixed at import and loading. The rest is
switched: `enable` and `disable`, and hooks that empty unsloth's caches.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import timer
import torch
from bench_training_step import PHASES, StepClock
from unsloth_model import adapters, decoder_layers, packed_row
from workload import lognormal_lengths

Tensor = torch.Tensor

MEAN_LENGTH = 350
# Lengths reach the GPU in the first phase with a layout, in the second without.
BATCH = ("to device", "forward", "backward")
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Variant:
    """One way to run unsloth.

    Attributes:
        name: name on the command line and in the tables.
        attention: `installed`, or `xformers` if its library can be loaded.
        emptied: unsloth's caches are emptied before each layer, in the backward too.
        cuseq: `enable` is called, and the batch has a layout.
        blocks: with `compile_blocks`.
    """

    name: str
    attention: str
    emptied: bool = False
    cuseq: bool = False
    blocks: bool = False


# In measuring order: the first variant saves the gradients to compare with, and compiled blocks
# come last.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("unsloth", "installed"),
        Variant("unsloth_emptied", "installed", emptied=True),
        Variant("cuseq", "installed", cuseq=True),
        Variant("cuseq_blocks", "installed", cuseq=True, blocks=True),
        Variant("xformers", "xformers"),
        Variant("xformers_emptied", "xformers", emptied=True),
        Variant("cuseq_xformers", "xformers", cuseq=True),
    )
}
REFERENCE = "unsloth"


@dataclass(frozen=True)
class Plan:
    """What a process measures for one model and row length.

    Each of `rounds` goes through all variants, so that a temporary slowdown of the host affects
    all.

    Attributes:
        section: name in each row of results.
        tokens: length of the row.
        warmup: untimed steps at the start of each variant's turn.
        steps: timed steps of a variant in a round.
        scratch: folder where the reference saves its gradients for the other processes.
    """

    section: str
    tokens: int
    variants: list[Variant]
    rounds: int
    warmup: int
    steps: int
    scratch: Path

    def turns(self) -> Iterator[tuple[Variant, range]]:
        """Yield the variants in order, with the seeds of the packs that are timed.

        Compiled blocks have one turn, the last, because each turn would compile them again.
        """
        first = 1 + self.warmup
        for number in range(self.rounds):
            begin = first + number * self.steps
            for variant in self.variants:
                if not variant.blocks:
                    yield variant, range(begin, begin + self.steps)
        for variant in self.variants:
            if variant.blocks:
                yield variant, range(first, first + self.rounds * self.steps)


def measure(model: torch.nn.Module, plan: Plan, emit: Callable[[dict[str, Any]], None]) -> None:
    """Emit each variant's row of results after each of its turns, and the profiler's counts.

    All times come first, because the profiler may slow later launches.
    """
    start = [weight.detach().clone() for weight in adapters(model)]
    rows: dict[str, dict[str, Any]] = {
        variant.name: {"section": plan.section, "tokens": plan.tokens, "variant": variant.name}
        for variant in plan.variants
    }
    clocks: dict[str, list[StepClock]] = {variant.name: [] for variant in plan.variants}
    for variant, seeds in plan.turns():
        row = rows[variant.name]
        if "failed" in row:
            continue
        with _failures(row), _switched(variant, model):
            if not clocks[variant.name]:
                restore(model, start)
                row |= first_step(variant, model, plan)
            restore(model, start)
            torch.cuda.reset_peak_memory_stats()
            clocks[variant.name] += timed_steps(variant, model, plan, seeds)
            peak = torch.cuda.max_memory_allocated() / 2**30
            row["peak_gib"] = max(peak, row.get("peak_gib", 0))
            row |= summary(clocks[variant.name], plan)
        emit(row)
    note = timer.check_profiler(DEVICE)
    # In reverse order: the last variant's compiled code still exists.
    for variant in reversed(plan.variants):
        row = rows[variant.name]
        if "failed" in row:
            continue
        with _failures(row), _switched(variant, model):
            restore(model, start)
            row |= count_waits(variant, model, plan)
        if note:
            row["profiler"] = note
        emit(row)


def first_step(variant: Variant, model: torch.nn.Module, plan: Plan) -> dict[str, Any]:
    """Return time, loss and gradient error of the first step."""
    batch = make_batch(plan.tokens, model, 0)
    begun = time.perf_counter()
    loss = forward_backward(variant, model, batch, StepClock(DEVICE)).item()
    row = {"loss": loss, "first_s": time.perf_counter() - begun}
    return row | compare_gradients(variant, model, plan)


def timed_steps(
    variant: Variant, model: torch.nn.Module, plan: Plan, seeds: range
) -> list[StepClock]:
    """Time one step per seed, after the warm-up."""
    # New batches for each variant, because results are cached on a layout.
    batches = [
        make_batch(plan.tokens, model, seed) for seed in (*range(1, 1 + plan.warmup), *seeds)
    ]
    optimizer = _optimizer(model)
    clocks = [train_step(variant, model, optimizer, batch) for batch in batches]
    torch.cuda.synchronize()
    return clocks[plan.warmup :]


def summary(clocks: list[StepClock], plan: Plan) -> dict[str, Any]:
    """Return medians of phases and steps, in ms."""
    times = [clock.milliseconds() for clock in clocks]
    for step in times:
        step["batch"] = sum(step[phase] for phase in BATCH)
    row: dict[str, Any] = {
        phase: median(step[phase] for step in times) for phase in (*PHASES, "batch", "step")
    }
    row["step_low"] = min(step["step"] for step in times)
    row["step_high"] = max(step["step"] for step in times)
    row["tokens_per_s"] = plan.tokens / row["step"] * 1e3
    return row


def count_waits(variant: Variant, model: torch.nn.Module, plan: Plan) -> dict[str, Any]:
    """Return the profiler's counts of one step; a step before it does the first step's work."""
    optimizer = _optimizer(model)
    first, second = (make_batch(plan.tokens, model, seed) for seed in (0, 1))
    train_step(variant, model, optimizer, first)
    trace = timer.profile(lambda: train_step(variant, model, optimizer, second), device=DEVICE)
    both = trace.within(*BATCH)
    return {
        "stream_waits": both.syncs,
        "event_waits": both.event_waits,
        "waits": both.syncs + both.event_waits,
        "dtoh_copies": both.dtoh_copies,
        "kernels": both.kernels,
        "device_ms": both.device_us / 1e3,
        "activity": {phase: trace.within(phase).as_dict() for phase in PHASES},
    }


def train_step(
    variant: Variant,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Any],
) -> StepClock:
    """Run one whole step."""
    clock = StepClock(DEVICE)
    forward_backward(variant, model, batch, clock)
    with clock.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return clock


def forward_backward(
    variant: Variant, model: torch.nn.Module, batch: dict[str, Any], clock: StepClock
) -> Tensor:
    """Move the batch as Trainer does and compute gradients; the loss stays on the device."""
    with clock.phase("to device"):
        moved = {
            name: value.to(DEVICE, non_blocking=True)
            for name, value in batch.items()
            # enable adds the layout to unsloth's collator.
            if variant.cuseq or name != "packed"
        }
    with clock.phase("forward"), torch.autocast("cuda", torch.bfloat16):
        # Trainer's arguments for a packed row, as changed by unsloth.
        loss = model(**moved, use_cache=False).loss
    with clock.phase("backward"):
        loss.backward()
    return loss.detach()


def make_batch(tokens: int, model: torch.nn.Module, seed: int) -> dict[str, Any]:
    """Return a row in pinned memory, with its layout and the number of its targets."""
    import cuseq

    lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed)
    row = packed_row(lengths, model.config.vocab_size, seed)
    row["num_items_in_batch"] = (row["labels"] != -100).sum()
    pinned: dict[str, Any] = {name: value.pin_memory() for name, value in row.items()}
    pinned["packed"] = cuseq.PackedLayout.from_lengths(lengths, tokens).pin_memory()
    return pinned


def compare_gradients(variant: Variant, model: torch.nn.Module, plan: Plan) -> dict[str, Any]:
    """Return the relative L2 distance from the reference's gradients, then drop the gradients.

    The reference itself saves its gradients.
    """
    path = plan.scratch / f"gradients_{plan.section}_{plan.tokens}.pt"
    gradients = [weight.grad for weight in adapters(model)]
    model.zero_grad(set_to_none=True)
    if variant.name == REFERENCE:
        torch.save([gradient.cpu() for gradient in gradients], path)
        return {}
    if not path.exists():
        return {}
    expected = torch.load(path, map_location=DEVICE, weights_only=True)
    apart = sum(
        (ours.double() - theirs.double()).square().sum()
        for ours, theirs in zip(gradients, expected, strict=True)
    )
    norm = sum(theirs.double().square().sum() for theirs in expected)
    return {"gradient_error": (apart / norm).sqrt().item()}


@torch.no_grad()
def restore(model: torch.nn.Module, start: list[Tensor]) -> None:
    """Restore the initial weights."""
    model.zero_grad(set_to_none=True)
    for weight, value in zip(adapters(model), start, strict=True):
        weight.copy_(value)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(adapters(model), lr=1e-4, fused=True)


@contextmanager
def _switched(variant: Variant, model: torch.nn.Module) -> Iterator[None]:
    """Switch unsloth to the variant, and restore it afterwards."""
    from unsloth.utils.packing import clear_packed_caches

    with ExitStack() as undo:
        clear_packed_caches()
        if variant.emptied:
            for layer in decoder_layers(model):
                hook = layer.register_forward_pre_hook(lambda *_: clear_packed_caches())
                undo.callback(hook.remove)
        if variant.cuseq:
            import unsloth

            import cuseq

            cuseq.enable(unsloth, compile_blocks=variant.blocks)
            undo.callback(cuseq.disable, unsloth)
        yield


@contextmanager
def _failures(row: dict[str, Any]) -> Iterator[None]:
    """Turn an exception into a failed row, so that the other variants go on."""
    try:
        yield
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    except Exception as failure:
        traceback.print_exc()
        row["failed"] = (str(failure).splitlines() or [type(failure).__name__])[0]
    if "failed" in row:
        torch.cuda.empty_cache()
