"""Callbacks for Hugging Face's Trainer: fill and throughput in its logs, and a stop of all ranks.

    trainer = Trainer(..., data_collator=cuseq.PackingCollator(...), callbacks=[PackingCallback()])

docs/trainer.md describes training on packed rows with Trainer.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuseq.layout import PackedLayout

if TYPE_CHECKING:  # importing Trainer needs accelerate, which cuseq's attention does not need
    from transformers import Trainer


class PackingCallback(TrainerCallback):
    """A Trainer callback that adds three figures to each log of the training loss.

    The figures cover all steps since the last log:

    - `fill`: real tokens of the rows divided by their tokens in memory, at most 1.
    - `real_tokens_per_second`: real tokens of all processes per second of wall time. This time
      includes waiting for data, but not evaluation, prediction and saving. The first log leaves out
      the time before the first step, such as skipping the data that a resumed run has seen.
    - `sequences_per_step`: sequences of all processes in one optimizer step.

    The callback counts every `packed=PackedLayout` that the model is called with while gradients
    are enabled, so evaluation is not counted. It works with any source of batches, with DataLoader
    workers, gradient accumulation, checkpointing, compiled models, LoRA, DDP, FSDP2 and
    `device_map`. If processes share a batch (tensor parallelism), each of them counts it.

    In a step it reads only Python ints. For a layout made from lengths on a GPU, it reads them
    after the event that attention waited for. At a log, Trainer has just waited for the loss; the
    processes then gather four numbers each. One process alone gathers nothing.

    The figures are added to the log's dict and to `state.log_history`. Trainer calls the trackers
    of `report_to` before the callbacks it was given, so trackers miss the figures of a callback
    that was passed to Trainer. `attach` puts the callback in front of the trackers.

    Warns:
        UserWarning: the model was called without a layout since the last log, in all processes.

    Examples:
        >>> trainer = Trainer(model, args, train_dataset=dataset, data_collator=collator)
        >>> PackingCallback().attach(trainer)  # or Trainer(..., callbacks=[PackingCallback()])
        >>> trainer.train()
        {'loss': 4.2, ..., 'fill': 0.99, 'real_tokens_per_second': 81234.5, 'sequences_per_step': 9}
    """

    def __init__(self) -> None:
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._forget()

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to a trainer, in front of the others.

        Trackers (Weights & Biases, TensorBoard) then log the figures too.

        Raises:
            ValueError: the trainer has a PackingCallback already.
            TypeError: `trainer` is not a Trainer.
        """
        if not hasattr(trainer, "callback_handler"):
            raise TypeError(f"trainer must be a Trainer, got {type(trainer).__name__}")
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, PackingCallback) for callback in callbacks):
            raise ValueError("trainer must not have a PackingCallback already, got a second one")
        callbacks.insert(0, self)

    # ----------------------------------------------------------------------------- counts

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: Any,
    ) -> None:
        self._release()  # an earlier run may have failed before on_train_end
        self._forget()
        # In front: hooks of enable take `packed` out of the calls of some models.
        self._hook = model.register_forward_pre_hook(self._see, prepend=True, with_kwargs=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._release()

    def _see(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # If the whole model is compiled, this hook is part of the graph. Store the layout, because
        # reading an int from it here would specialise the graph to one pack.
        packed = kwargs.get("packed")
        if torch.is_grad_enabled() and isinstance(packed, PackedLayout):
            self._seen.append(packed)

    def count_instead(self, layouts: Iterable[object]) -> None:
        """Count these layouts for the step instead of those that the model was called with.

        A CUDA graph calls the model with static copies, or not at all in a replay. Anything but a
        layout is ignored.
        """
        self._seen = [packed for packed in layouts if isinstance(packed, PackedLayout)]

    def _count(self) -> None:
        for packed in self._seen:
            self._real_tokens += packed.num_real_tokens
            self._tokens += packed.total_tokens
            self._sequences += packed.num_sequences
        self._seen.clear()

    def _forget(self) -> None:
        # Emptied after each step, because layouts keep their cached masks alive.
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
        """Exclude the time since the end of the last training step."""
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
        # Trainer logs the loss in all processes at once, which gathering needs, and after it has
        # waited for the loss. Other logs may come from only one process.
        if "loss" not in logs or self._steps == 0:
            return
        now = perf_counter()
        figures = self._figures(args, now - self._begun)
        self._begun = self._worked_until = now
        self._reset()
        logs.update(figures)
        # Its last item is a copy of logs, made before callbacks.
        state.log_history[-1].update(figures)

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


class StopCallback(TrainerCallback):
    """A Trainer callback that ends training at SIGTERM and Ctrl-C, with a checkpoint.

    All ranks save and stop after the same step, whichever of them got the signal. transformers'
    `enable_jit_checkpoint` lets each rank stop by its own clock, and the others then wait for it in
    a collective. Ranks ask each other when Trainer logs, which waits for the device anyway: every
    `logging_steps`. The handlers are set when training begins, in the main thread, and those of
    before are set again when it ends.

    Attributes:
        stopped: whether the last training ended by a signal.

    Examples:
        >>> trainer = Trainer(model, args, train_dataset=dataset, callbacks=[StopCallback()])
        >>> trainer.train(resume_from_checkpoint=True)
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.stopped = self._is_asked = False
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stopped = self._is_asked = False
        if threading.current_thread() is threading.main_thread():  # else Python sets no handler
            self._before = {one: signal.signal(one, self._ask) for one in self.SIGNALS}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % max(1, state.logging_steps):
            return
        asked = torch.tensor(int(self._is_asked), device=args.device)
        if args.world_size > 1:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked.item():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: Any) -> None:
        self._is_asked = True
