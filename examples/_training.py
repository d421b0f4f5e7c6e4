"""Train one mode and measure it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from _measure import Clock, Mark, PeakMemory, count_synchronisations, waits
from _model import ModelSource, compile_layers_and_loss, enable
from _modes import IGNORE_INDEX, Batch, Mode
from _rows import Row
from tqdm import tqdm
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainingPlan:
    """The settings that all modes share.

    Attributes:
        source: the model.
        rows: one for each optimiser step.
        row_length: tokens in a full row.
        batch_size: documents in a padded batch.
        warmup: number of first steps left out of the timings.
        learning_rate: learning rate of AdamW.
        device: where to train.
        seed: seed of the initial weights.
    """

    source: ModelSource
    rows: list[Row]
    row_length: int
    batch_size: int
    warmup: int
    learning_rate: float
    device: torch.device
    seed: int


@dataclass
class Measurement:
    """Measurements of one mode; times are None until a step after the warm-up has ended.

    Attributes:
        mode: name of the mode.
        losses: one per step, mean over the step's targets.
        real_tokens: tokens of documents in each step.
        targets: tokens predicted in each step.
        padding_share: share of padding among all tokens given to the model.
        tokens_per_second: real tokens over time, optimiser included.
        step_seconds, forward_seconds, backward_seconds: medians.
        compile_seconds: time of the first step beyond the median, for compiled modes.
        peak_memory_bytes: on a CPU, growth of the process since before the model was built; on
            CUDA, the total.
        synchronisations: counts of one forward and backward on CUDA, by name.
        interrupted: True if the user stopped the run.
    """

    mode: str
    losses: list[float] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    padding_share: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    compile_seconds: float | None = None
    peak_memory_bytes: int | None = None
    synchronisations: dict[str, int] | None = None
    interrupted: bool = False

    @property
    def waits(self) -> int | None:
        """Return how often the host waited in one forward and backward."""
        return None if self.synchronisations is None else waits(self.synchronisations)


@dataclass
class StepRecord:
    """Marks and losses of one step, on the device; reading them waits."""

    start: Mark
    end: Mark
    passes: list[tuple[Mark, Mark, Mark]]  # start, end of forward, end of backward
    losses: list[torch.Tensor]


def train_mode(mode: Mode, plan: TrainingPlan) -> Measurement:
    """Train a fresh model for the plan's steps; Ctrl-C ends it early and keeps the measurements."""
    memory = PeakMemory(plan.device)
    memory.start()
    clock = Clock(plan.device)
    measurement = Measurement(mode.name)
    records: list[StepRecord] = []
    batches = [_collate(mode, row, plan) for row in plan.rows]
    try:
        model = _build(mode, plan)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=plan.learning_rate, fused=plan.device.type == "cuda"
        )
        for step in tqdm(batches, desc=mode.label, unit="step"):
            records.append(_step(model, optimizer, step, clock))
        clock.wait()
        measurement.peak_memory_bytes = memory.bytes()
        if plan.device.type == "cuda":
            last = [_to_device(batch, plan.device) for batch in batches[-1]]
            measurement.synchronisations = count_synchronisations(
                lambda: _forward_backward(model, last, clock)
            )
    except KeyboardInterrupt:
        measurement.interrupted = True
    clock.wait()
    _count_tokens(measurement, batches[: len(records)], plan.rows)
    _read_records(measurement, records, plan.warmup, clock)
    if mode.compiled and measurement.step_seconds is not None:
        first = clock.seconds(records[0].start, records[0].end)
        measurement.compile_seconds = first - measurement.step_seconds
    return measurement


def _collate(mode: Mode, row: Row, plan: TrainingPlan) -> list[Batch]:
    """Return the step's batches as a DataLoader's workers would leave them."""
    batches = mode.batches(row, plan.row_length, plan.batch_size)
    if plan.device.type != "cuda":
        return batches
    return [_map_tensors(batch, lambda value: value.pin_memory()) for batch in batches]


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return _map_tensors(batch, lambda value: value.to(device, non_blocking=True))


def _map_tensors(batch: Batch, function: Any) -> Batch:
    """Apply `function` to tensors and layouts, and leave plain numbers alone."""
    return {key: function(value) if hasattr(value, "to") else value for key, value in batch.items()}


def _build(mode: Mode, plan: TrainingPlan) -> PreTrainedModel:
    model = plan.source.build(plan.device, plan.seed)
    if mode.cuseq:
        enable(model)  # before its layers are compiled
    if mode.compiled:
        compile_layers_and_loss(model)
    return model


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: list[Batch], clock: Clock
) -> StepRecord:
    start = clock.mark()
    on_device = [_to_device(batch, model.device) for batch in batches]
    losses, passes = _forward_backward(model, on_device, clock)
    optimizer.step()
    optimizer.zero_grad()
    return StepRecord(start, clock.mark(), passes, losses)


def _forward_backward(
    model: PreTrainedModel, batches: list[Batch], clock: Clock
) -> tuple[list[torch.Tensor], list[tuple[Mark, Mark, Mark]]]:
    """Run one forward and backward for each batch; gradients accumulate."""
    losses, passes = [], []
    for batch in batches:
        start = clock.mark()
        # With a cache, transformers would not look for documents in position_ids.
        loss = model(**batch, use_cache=False).loss
        middle = clock.mark()
        loss.backward()
        passes.append((start, middle, clock.mark()))
        losses.append(loss.detach())
    return losses, passes


def _count_tokens(measurement: Measurement, steps: list[list[Batch]], rows: list[Row]) -> None:
    measurement.real_tokens = [sum(map(len, row)) for row, _ in zip(rows, steps)]
    measurement.targets = [
        sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in step) for step in steps
    ]
    given = sum(batch["input_ids"].numel() for step in steps for batch in step)
    if given:
        measurement.padding_share = 1 - sum(measurement.real_tokens) / given


def _read_records(
    measurement: Measurement, records: list[StepRecord], warmup: int, clock: Clock
) -> None:
    """Convert marks to times and device losses to numbers, after waiting for the device."""
    measurement.losses = [sum(loss.item() for loss in record.losses) for record in records]
    timed = records[warmup:]
    if not timed:
        return
    median = statistics.median
    measurement.step_seconds = median(clock.seconds(r.start, r.end) for r in timed)
    measurement.forward_seconds = median(
        sum(clock.seconds(start, middle) for start, middle, _ in r.passes) for r in timed
    )
    measurement.backward_seconds = median(
        sum(clock.seconds(middle, end) for _, middle, end in r.passes) for r in timed
    )
    elapsed = clock.seconds(timed[0].start, timed[-1].end)
    measurement.tokens_per_second = sum(measurement.real_tokens[warmup:]) / elapsed
