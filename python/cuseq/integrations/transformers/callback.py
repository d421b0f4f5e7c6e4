"""A callback for Hugging Face's Trainer that logs how full packed rows are and how fast they pass.

    trainer = Trainer(..., data_collator=cuseq.PackingCollator(...), callbacks=[PackingCallback()])

docs/trainer.md shows the rest of training on packed rows with Trainer.
"""

from __future__ import annotations

import warnings
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuseq.layout import PackedLayout

if TYPE_CHECKING:  # it needs accelerate, which attention does without
    from transformers import Trainer


class PackingCallback(TrainerCallback):
    """Add three figures to each log of the training loss, over all steps since the last one.

    - `fill`: real tokens of the rows over their tokens in memory, at most 1.
    - `real_tokens_per_second`: of all processes together, by the clock on the wall. Waiting for
      data counts, evaluating, predicting and saving do not. The first log says nothing of the time
      before the first step, such as skipping what a resumed run has seen.
    - `sequences_per_step`: sequences in one step of the optimizer, of all processes together.

    What counts is every `packed=PackedLayout` that the model is called with to train, with
    gradients enabled; evaluation is left out. It works whatever makes the batches, in DataLoader
    workers too, and under gradient accumulation, checkpointing, compiled models, LoRA, DDP, FSDP2
    and `device_map`. Processes that share a batch (tensor parallelism) count it each.

    In a step it reads Python ints only (of a layout made from lengths on a GPU: after the event
    that attention waited for). When Trainer logs, which has just waited for the loss, processes
    gather four numbers each; with one process there is nothing to gather.

    The figures go into the log's dict and into `state.log_history`. Trainer calls the trackers of
    `report_to` before the callbacks it was given, so they miss what a callback adds: `attach` puts
    it in front of them.

    Warns:
        UserWarning: the model was called without a layout since the last log, in all processes.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=dataset, data_collator=collator)
        >>> PackingCallback().attach(trainer)  # or Trainer(..., callbacks=[PackingCallback()])
        >>> trainer.train()
        {'loss': 4.2, ..., 'fill': 0.99, 'real_tokens_per_second': 81234.5, 'sequences_per_step': 9}
    """

    def __init__(self) -> None:
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._forget()

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to a trainer, in front of the others, so that trackers (Weights &
        Biases, TensorBoard) log the figures as well.

        Raises:
            ValueError: the trainer has a PackingCallback already.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, PackingCallback) for callback in callbacks):
            raise ValueError("trainer must not have a PackingCallback already, got a second one")
        callbacks.insert(0, self)

    # ----------------------------------------------------------------------------- what is counted

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: Any,
    ) -> None:
        self._release()  # of a run that failed
        self._forget()
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._release()

    def _see(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Part of the graph where the whole model is compiled, which an int would tie to one pack.
        packed = kwargs.get("packed")
        if isinstance(packed, PackedLayout) and torch.is_grad_enabled():
            self._seen.append(packed)

    def _count(self) -> None:
        for packed in self._seen:
            self._real_tokens += packed.num_real_tokens
            self._tokens += packed.total_tokens
            self._sequences += packed.num_sequences
        self._seen.clear()

    def _forget(self) -> None:
        # Emptied after each step, as Trainer drops its batches: layouts keep their masks alive.
        self._seen: list[PackedLayout] = []
        self._begun: float | None = None
        self._worked_until = 0.0
        self._reset()

    def _reset(self) -> None:
        self._real_tokens = self._tokens = self._sequences = self._steps = 0

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ----------------------------------------------------------------------------- the clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._begun is None:
            self._begun = self._worked_until = perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._count()
        self._steps += 1
        self._worked_until = perf_counter()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._leave_out()

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self._leave_out()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._leave_out()

    def _leave_out(self) -> None:
        """Leave out the time since the end of the last training step."""
        if self._begun is not None:
            now = perf_counter()
            self._begun += now - self._worked_until
            self._worked_until = now

    # ----------------------------------------------------------------------------- the figures

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        # Trainer logs the loss in all processes at once, as gathering needs, and after a wait for
        # it. Other logs may be one process's own.
        if "loss" not in logs or self._steps == 0:
            return
        now = perf_counter()
        figures = self._figures(args, now - self._begun)
        self._begun = self._worked_until = now
        self._reset()
        logs.update(figures)
        state.log_history[-1].update(figures)  # a copy of logs, made before callbacks see them

    def _figures(self, args: TrainingArguments, seconds: float) -> dict[str, float]:
        own = [self._real_tokens, self._tokens, self._sequences, seconds]
        rows = [own]
        if args.world_size > 1:
            from accelerate.utils import gather

            rows = gather(torch.tensor([own], dtype=torch.float64, device=args.device)).tolist()
        real_tokens, tokens, sequences, _ = (sum(column) for column in zip(*rows, strict=True))
        if tokens == 0:
            warnings.warn(
                "PackingCallback has nothing to log: the model was not called with "
                "packed=PackedLayout since the last log (data_collator=cuseq.PackingCollator(...) "
                "makes it)",
                stacklevel=2,
            )
            return {}
        return {
            "fill": real_tokens / tokens,
            "real_tokens_per_second": real_tokens / max(row[3] for row in rows),
            "sequences_per_step": sequences / self._steps,
        }
