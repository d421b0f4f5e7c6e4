"""The training step of a Trainer as a `cuseq.GraphedStep`, for `cuseq.enable(trainer, graph=True)`.

Trainer's loop calls `training_step` for each batch, then clips, steps the optimizer and steps the
schedule. Here `training_step` keeps the batches until the last one of the step, and that call runs
all of them, with clipping and the optimizer, as one GraphedStep. The loop's own clipping and
optimizer calls then do nothing; its schedule call sets the learning rate of the next step.

On several ranks that have the whole model, the step averages gradients itself, and accelerate
prepares the model without DistributedDataParallel; steps that the trainer runs itself are averaged
before their clipping. FSDP2 reduces the gradients of what it sharded.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuseq._base.models import rotations_by_length, text_config
from cuseq._base.modes import is_capturing
from cuseq.data.multimodal import MultimodalPackingCollator
from cuseq.distributed import ContextParallel
from cuseq.graphs import GraphedStep
from cuseq.integrations.transformers._private import (
    check_training_loop,
    gradient_norm_names,
    is_of_library,
    loop_values,
    prepare_inputs,
)
from cuseq.integrations.transformers.callback import PackingCallback

_WARMUP = 3
_WHOLE_COPIES = ("MULTI_GPU", "MULTI_CPU")  # accelerate's kinds of run with the model on each rank


class GraphedTraining(TrainerCallback):
    """Replaces a trainer's step by a GraphedStep, and is a callback that follows its loop."""

    metric_names: tuple[str, ...] = ()

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.step: GraphedStep | None = None
        self._prepared: nn.Module | None = None  # of a run on several ranks, without DDP
        self._filter = False  # the run's logging_nan_inf_filter
        self._run = ExitStack()  # undoes what a run changed
        self._forget()

    # ------------------------------------------------------------------------------ installation

    def check(self) -> None:
        """Raise ValueError if training in a graph would differ from the trainer's own."""
        trainer = self.trainer
        args, accelerator = trainer.args, trainer.accelerator
        check_training_loop()
        kind = accelerator.distributed_type.name
        runs = (*_WHOLE_COPIES, *(["FSDP"] if accelerator.is_fsdp2 else []))
        if kind not in (runs if args.world_size > 1 else ("NO", *runs)):
            raise _refused(
                "one rank, or the model whole on each (DDP) or sharded by FSDP2",
                f"{kind} on {args.world_size} ranks",
            )
        if isinstance(trainer.model_wrapped, DistributedDataParallel):
            raise _refused(
                "a model that is not wrapped yet", "the DistributedDataParallel of an earlier run"
            )
        handler = accelerator.ddp_handler
        if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
            raise _refused("no communication hook of DDP", handler.comm_hook)
        if accelerator.parallelism_config is not None:
            raise _refused("no parallelism_config", accelerator.parallelism_config)
        if args.n_gpu > 1 or trainer.is_model_parallel:
            what = "device_map" if trainer.is_model_parallel else "DataParallel"
            raise _refused("its model on one GPU", f"{what} over several")
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise _refused("mixed precision in bf16 or none", accelerator.mixed_precision)
        for name, value in _refused_options(args).items():
            if value:
                raise _refused(f"no {name}", f"{value!r}")
        for rope_type in rotations_by_length(text_config(trainer.model)):
            raise _refused(
                "a rotation that does not follow the longest position of a row, which it reads on "
                "the host and padding may hold",
                f"rope_type={rope_type!r}",
            )
        collator = trainer.data_collator
        if isinstance(collator, MultimodalPackingCollator) and collator.max_images is None:
            raise ValueError(
                "trainer.data_collator must have max_images with graph=True, got a "
                "MultimodalPackingCollator without: its batches have the shapes of their images, "
                "and a graph replays one"
            )
        for name in ("training_step", "compute_loss", *gradient_norm_names()):
            if name in vars(trainer) or not is_of_library(getattr(type(trainer), name)):
                raise _refused(
                    f"the {name} of transformers or TRL, whose Python needs no replay",
                    f"that of {type(trainer).__name__}",
                )
        self.check_callbacks()

    def check_callbacks(self) -> None:
        """Raise ValueError if a callback acts between the gradients and the optimizer's step."""
        for callback in self.trainer.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
                raise _refused(
                    "no callback with on_pre_optimizer_step, since the graph steps the optimizer "
                    "before it",
                    type(callback).__name__,
                )

    def install(self) -> None:
        """Replace the trainer's methods; `check` came before."""
        clip, norm = gradient_norm_names()
        methods = {"training_step": self._training_step, clip: self._clip, norm: self._norm}
        for name, method in (methods | self.more_methods()).items():
            setattr(self.trainer, name, method)
        self.trainer.accelerator.prepare_model = self._prepare_model
        self.trainer.callback_handler.callbacks.append(self)

    def remove(self) -> None:
        """Restore the trainer's methods."""
        self.end()
        self._forget_prepared()
        for name in ("training_step", *gradient_norm_names(), *self.more_methods()):
            delattr(self.trainer, name)
        del self.trainer.accelerator.prepare_model
        self.trainer.callback_handler.callbacks.remove(self)

    def more_methods(self) -> dict[str, Callable[..., Any]]:
        """Return further methods of the trainer to replace."""
        return {}

    def _prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model as accelerate does, with the weights of rank 0 but without DDP.

        It prepares models that FSDP2 shards elsewhere.
        """
        accelerator = self.trainer.accelerator
        prepare = type(accelerator).prepare_model
        is_copy = accelerator.distributed_type.name in _WHOLE_COPIES and not evaluation_mode
        if is_copy:
            self._forget_prepared()
        made = prepare(accelerator, model, device_placement, evaluation_mode=True)
        if is_copy:
            self._prepared = made
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
        return made

    def _forget_prepared(self) -> None:
        """Let accelerate prepare the model of the last run again, for others with DDP."""
        if self._prepared is not None:
            accelerator = self.trainer.accelerator
            vars(self._prepared).pop("_is_accelerate_prepared", None)
            accelerator.unwrap_model(self._prepared, keep_fp32_wrapper=False)
            self._prepared = None

    # ---------------------------------------------------------------------------------- the loop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.check_callbacks()
        self.end()  # an earlier run may have failed before on_train_end
        self._filter = args.logging_nan_inf_filter
        self._run.callback(setattr, args, "logging_nan_inf_filter", self._filter)
        self._run.callback(self._hold(self.trainer.optimizer))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batches, self._stepped, self._averaged = [], False, False
        # Trainer's filter reads the loss on the host; `_add_losses` does the same on the device.
        args.logging_nan_inf_filter = self._filter and not self._takes_this_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        args.logging_nan_inf_filter = self._filter
        self._stepped = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.end()
        self._forget_prepared()

    def end(self) -> None:
        """Release the graph and its memory, and undo what the run changed, if there was one."""
        self._run.close()
        self._forget()

    def _forget(self) -> None:
        self.step = None
        self._batches: list[dict[str, Any]] = []
        self._stepped = False  # whether the optimizer has made this step
        self._averaged = False  # whether gradients of the trainer's own step are those of all ranks
        self._steps = 0
        self._told = False
        self.values: Tensor | None = None  # of each batch of the last step its loss and its metrics
        self._captured: list[Tensor] = []  # the same, where the last capture's replays write it
        self._computed: list[Tensor] = []  # the same of batches that ran without a graph
        self._nothing: Tensor | None = None

    def _takes_this_step(self) -> bool:
        # The last step of an epoch may have fewer batches. Trainer runs it itself.
        steps = self.trainer.args.gradient_accumulation_steps
        return self.trainer.current_gradient_accumulation_steps == steps

    def _hold(self, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
        """Make the loop's call of `optimizer.step` do nothing after a step of the graph; return a
        function that undoes this.
        """
        own = vars(optimizer).get("step")  # the schedule's, which notes that step was called
        step = optimizer.step

        def held(closure: Callable[[], Any] | None = None) -> None:
            if self._stepped:
                optimizer._opt_called = True
            else:
                self._average()
                step(closure)

        held._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = held

        def release() -> None:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

        return release

    # ---------------------------------------------------------------------------------- the step

    def _training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        trainer = self.trainer
        if not self._takes_this_step():
            if self.step is None:
                given = {"inputs": self._inputs(inputs)}
                self.step = self._make_step(model, given | {"num_items": num_items_in_batch})
            return self.step_of_the_trainer(model, inputs, num_items_in_batch)
        self._batches.append({"inputs": inputs, "num_items": num_items_in_batch})
        if self._nothing is None:
            self._nothing = torch.zeros((), device=trainer.args.device)
        if len(self._batches) < trainer.args.gradient_accumulation_steps:
            return self._nothing
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        batches = [batch | {"inputs": self._inputs(batch["inputs"])} for batch in self._batches]
        if self.step is None:
            self.step = self._make_step(model, batches[0])
        self._computed = []
        self.step(batches if len(batches) > 1 else batches[0])
        # Before these there may be values of an earlier capture, or of one that failed.
        self._captured = self._captured[-len(batches) :]
        self.values = torch.stack(self._computed[-len(batches) :] or self._captured)
        self._batches, self._stepped = [], True
        self._tell_if_not_captured()
        self._add_losses()
        self.count(batches)
        return self._nothing

    def _inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as the model takes it; of a shared row, this rank's part."""
        return ContextParallel.model_inputs(prepare_inputs(self.trainer, batch))

    def step_of_the_trainer(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | None
    ) -> Tensor:
        """Run the trainer's own `training_step`."""
        return type(self.trainer).training_step(self.trainer, model, inputs, num_items)

    def _make_step(self, model: nn.Module, example: dict[str, Any]) -> GraphedStep:
        trainer = self.trainer
        args, optimizer = trainer.args, trainer.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        held = {p for group in optimizer.param_groups for p in group["params"]}
        trained = {p for p in model.parameters() if p.requires_grad}
        if not trained <= held:
            raise _refused(
                "every parameter that requires gradients in its optimizer, or the norm of the "
                "gradients would differ",
                f"{len(trained - held)} outside",
            )
        # accelerate's backward divides by this, the number of batches before transformers 5.9.
        parts = trainer.accelerator.gradient_accumulation_steps

        def loss_of(batch: dict[str, Any]) -> Tensor:
            loss, metrics = self.loss(model, dict(batch["inputs"]), batch["num_items"])
            values = torch.stack([value.detach().double() for value in (loss, *metrics)])
            kept = self._captured if is_capturing(loss.device) else self._computed
            kept.append(values)
            return loss / parts if parts > 1 else loss

        return GraphedStep(
            loss_of,
            optimizer,
            example,
            max_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else float("inf"),
            accumulation=args.gradient_accumulation_steps,
            warmup=_WARMUP,
            group=None if args.world_size > 1 else False,
            model=model,
        )

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of a batch, and values of `metric_names`, without reading any."""
        trainer = self.trainer
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        return self.scaled(loss, num_items), []

    def scaled(self, loss: Tensor, num_items: Tensor | None) -> Tensor:
        """Return a batch's part of the step's loss, as `training_step` computes it."""
        trainer = self.trainer
        unscaled = not trainer.model_accepts_loss_kwargs or num_items is None
        if unscaled and trainer.compute_loss_func is None:
            return loss / trainer.args.gradient_accumulation_steps
        return loss

    def count(self, batches: list[dict[str, Any]]) -> None:
        """Give the layouts of a step to the callbacks that count tokens."""
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, PackingCallback):
                callback.count_instead(batch["inputs"].get("packed") for batch in batches)

    def _add_losses(self) -> None:
        """Add the losses of the step to the trainer's sum, as its loop does."""
        assert self.values is not None
        total, steps_since_log = loop_values(self.trainer)
        for loss in self.values[:, 0]:
            if self._filter:
                loss = torch.where(loss.isfinite(), loss, total / (1 + steps_since_log))
            total += loss

    def _tell_if_not_captured(self) -> None:
        assert self.step is not None
        self._steps += 1
        if self._steps > _WARMUP and not (self.step.captured or self._told):
            self._told = True
            warnings.warn(
                f"the trainer's steps run without a CUDA graph: {self.step.reason}", stacklevel=2
            )

    def _average(self) -> None:
        """Average the gradients of a step that the trainer runs itself, once."""
        if self.step is not None and not self._averaged:
            self.step.average_gradients()
            self._averaged = True

    def _clip(self, model: nn.Module) -> Tensor | None:
        if self._stepped:
            return None  # `_norm` has it
        self._average()
        return getattr(type(self.trainer), gradient_norm_names()[0])(self.trainer, model)

    def _norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        if self._stepped:
            assert self.step is not None
            return self.step.grad_norm
        self._average()
        return getattr(type(self.trainer), gradient_norm_names()[1])(self.trainer, model, grad_norm)


def graph_of(trainer: Trainer) -> GraphedTraining | None:
    """Return what `enable(trainer, graph=True)` made, or None."""
    callbacks = trainer.callback_handler.callbacks
    return next((c for c in callbacks if isinstance(c, GraphedTraining)), None)


def _refused_options(args: TrainingArguments) -> dict[str, Any]:
    """Return options with which a graph would do something else than the trainer, if given."""
    optim = str(getattr(args.optim, "value", args.optim))
    return {
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch_empty_cache_steps": args.torch_empty_cache_steps,
        "optim that steps in the backward": optim if "lomo" in optim else None,
        "activation_offloading": getattr(args, "activation_offloading", False),
    }


def _refused(rule: str, value: object) -> ValueError:
    return ValueError(f"trainer must have {rule}, for graph=True, got {value}")
