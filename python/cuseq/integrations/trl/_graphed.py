"""The training step of TRL's SFTTrainer as a `cuseq.GraphedStep`.

TRL's loss reads three metrics on the host for each batch, and on a GPU it selects the tokens that
have labels, a number that the host must know. The loss here computes the same numbers over all
tokens. Its metrics stay on the device until the trainer logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trl
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl import SFTTrainer
from trl.trainer import utils

from cuseq._base.arguments import round_up
from cuseq._base.foreign import check_attribute, private
from cuseq.integrations.transformers._graphed import GraphedTraining
from cuseq.integrations.trl._rows import PackedCollator


@dataclass
class FixedCollator(PackedCollator):
    """`PackedCollator` for rows of one shape, without the entries whose shape depends on lengths.

    Attributes:
        total_tokens: Tokens of every row.
        max_seqs: Most documents of a row.
    """

    total_tokens: int = 0
    max_seqs: int = 0

    def torch_call(self, examples: Any) -> dict[str, Any]:
        batch = self.row_of(examples, self.total_tokens, self.max_seqs)
        names = ("input_ids", "labels", "position_ids", "seq_idx", "packed")
        return {name: batch[name] for name in names}


class GraphedSFT(GraphedTraining):
    """Replaces the step of an SFTTrainer by a GraphedStep."""

    metric_names: tuple[str, ...] = ("entropy", "mean_token_accuracy")

    def __init__(self, trainer: SFTTrainer, collator: FixedCollator):
        self._collator = collator
        super().__init__(trainer)

    def check(self) -> None:
        super().check()
        trainer, args = self.trainer, self.trainer.args
        if not hasattr(utils, "_use_triton"):
            raise ValueError(
                "trl must be 1.16 or newer for graph=True, since the head of older ones selects "
                f"tokens by a number that it reads on the host, got {trl.__version__}"
            )
        private(utils, "_use_triton", signature=["device"], package="trl")
        outputs = ("fused_lm_head", "log_probs", "label_mask", "is_top1")
        for name in (*outputs, "aux_loss_enabled", "_total_train_tokens"):
            check_attribute(SFTTrainer.compute_loss, name)
        check_attribute(SFTTrainer.log, "_metrics")
        if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
            what = "label_smoothing_factor" if trainer.label_smoother else "compute_loss_func"
            raise ValueError(
                "trainer must have TRL's own loss for graph=True, which computes it without "
                f"reading metrics on the host, got {what}"
            )
        if args.loss_type not in ("nll", "dft"):
            raise ValueError(
                f'loss_type must be "nll" or "dft" for graph=True, got {args.loss_type!r}'
            )
        if trainer.aux_loss_enabled:
            for name in ("aux_loss", "current_gradient_accumulation_steps"):
                check_attribute(SFTTrainer.compute_loss, name)
            self.metric_names = (*self.metric_names, "aux_loss")

    def more_methods(self) -> dict[str, Callable[..., Any]]:
        return {"log": self._log, "get_train_dataloader": self._get_train_dataloader}

    def _get_train_dataloader(self) -> Any:
        trainer, collator = self.trainer, self.trainer.data_collator
        trainer.data_collator = self._collator  # evaluation keeps its rows
        try:
            return type(trainer).get_train_dataloader(trainer)
        finally:
            trainer.data_collator = collator

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        trainer = self.trainer
        inputs["use_cache"] = False
        if trainer.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with trainer.compute_loss_context_manager(), _all_tokens():
            outputs = model(**inputs, fused_lm_head=True)
            losses = -outputs.log_probs
            if trainer.args.loss_type == "dft":
                losses = losses * outputs.log_probs.exp().detach()
            kept = outputs.label_mask.sum()
            loss = losses.sum() / (kept if num_items is None else num_items).clamp(min=1)
            if num_items is not None and trainer.args.average_tokens_across_devices:
                loss = loss * trainer.accelerator.num_processes
            if trainer.aux_loss_enabled:
                steps = 1 if num_items is None else trainer.current_gradient_accumulation_steps
                loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss / steps
        loss = self.scaled(loss, num_items)
        sums = [outputs.entropy.detach().sum(), outputs.is_top1.sum(), kept]
        return loss, [*sums, outputs.aux_loss] if trainer.aux_loss_enabled else sums

    def step_of_the_trainer(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | None
    ) -> Tensor:
        before = self.trainer._total_train_tokens
        loss = super().step_of_the_trainer(model, inputs, num_items)
        self.trainer._total_train_tokens = before  # TRL has counted the padding too
        self._count_tokens(self._tokens_of(inputs))
        return loss

    def count(self, batches: list[dict[str, Any]]) -> None:
        super().count(batches)
        assert self.values is not None
        # Over the ranks as TRL does, but without reading anything.
        entropy, correct, kept, *aux = self._sum_over_ranks(self.values[:, 1:].clone()).unbind(1)
        metrics = [torch.where(kept > 0, value / kept, 0.0) for value in (entropy, correct)]
        metrics += [value / self.trainer.accelerator.num_processes for value in aux]
        sums = torch.stack(metrics, 1).sum(0)
        self._sums = sums if self._sums is None else self._sums + sums
        self._counted += len(batches)
        self._count_tokens(sum(self._tokens_of(batch["inputs"]) for batch in batches))

    def _tokens_of(self, inputs: dict[str, Any]) -> int:
        """Return the tokens of the row as it would be without graph=True."""
        multiple = self._collator.pad_to_multiple_of or 1
        return round_up(inputs["packed"].num_real_tokens, multiple)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(values, "sum")

    def _count_tokens(self, tokens: int) -> None:
        """Add a step's tokens of this rank to those of all, on several ranks without reading it."""
        if self.trainer.accelerator.num_processes == 1:
            self._add_tokens(tokens)
            return
        mine = torch.full((), tokens, device=self.trainer.args.device)
        counted = self._sum_over_ranks(mine)
        self._tokens = counted if self._tokens is None else self._tokens + counted

    def _add_tokens(self, tokens: int) -> None:
        trainer = self.trainer
        trainer._total_train_tokens += tokens
        trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]

    def _read_tokens(self) -> None:
        """Give TRL the tokens of the steps so far, before it logs or evaluates."""
        if self._tokens is not None:
            self._add_tokens(int(self._tokens))
            self._tokens = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if control.should_log or control.should_evaluate or control.should_save:
            self._read_tokens()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._read_tokens()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._read_tokens()
        super().on_train_end(args, state, control, **kwargs)

    def _log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        trainer = self.trainer
        if trainer.model.training and self._sums is not None:
            for name, total in zip(self.metric_names, self._sums.tolist(), strict=True):
                mean = total / self._counted
                trainer._metrics["train"][name].extend([mean] * self._counted)
            self._sums, self._counted = None, 0
        type(trainer).log(trainer, logs, start_time)

    def _forget(self) -> None:
        super()._forget()
        self._sums: Tensor | None = None  # of the metrics since the last log
        self._counted = 0  # batches in these sums
        self._tokens: Tensor | None = None  # of all ranks, that TRL has not been given


@contextlib.contextmanager
def _all_tokens() -> Iterator[None]:
    """Let TRL's head score all tokens, and not only those with labels, whose number it reads."""
    kept = utils._use_triton
    utils._use_triton = lambda device: False
    try:
        yield
    finally:
        utils._use_triton = kept
