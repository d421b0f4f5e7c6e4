"""Packed rows that several ranks of a Trainer share: `cuseq.enable(trainer, cp=...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from cuseq._base import modes as _modes
from cuseq._base.arguments import shown
from cuseq._base.models import recurrent_types, rotations_by_length, text_config
from cuseq.distributed import ContextParallel
from cuseq.integrations.transformers import _private as private
from cuseq.integrations.transformers._layers import (
    calls_of,
    find_pretrained,
    loss_takes_keywords,
)
from cuseq.integrations.transformers._whole_rows import check_balance_loss

if TYPE_CHECKING:
    from transformers import Trainer


class DataMesh:
    """The part of a device mesh from which accelerate's data loaders read who shares rows.

    It stands for a mesh whose innermost dimension joins `size` ranks that read the same rows.
    DeepSpeed's loaders know such a dimension by the name "tp" only.
    """

    def __init__(self, dp_size: int, size: int, deepspeed: bool):
        self._sizes = {"tp": size} if deepspeed else {"dp_shard": dp_size, "cp": size}
        self.mesh_dim_names = tuple(self._sizes)

    def __getitem__(self, name: str) -> DataMesh:
        one = DataMesh(1, 1, False)
        one._sizes = {name: self._sizes[name]}
        return one

    def size(self) -> int:
        (size,) = self._sizes.values()
        return size


class SharedRows:
    """The methods that let a trainer train on parts of rows, until `restore`.

    All are set on the trainer and its accelerator themselves, so other trainers keep theirs.
    """

    def __init__(self, trainer: Trainer, cp: ContextParallel):
        self._trainer, self._cp = trainer, cp
        self._accelerator = trainer.accelerator
        self._compared: set[str] = set()  # "train" and "eval", once their rows were compared
        self._replaced: list[tuple[Any, str, Any]] = []
        self._gather = self._accelerator.gather_for_metrics

    def install(self) -> None:
        """Replace every method; `check_shared_rows` came before."""
        trainer, accelerator, cp = self._trainer, self._accelerator, self._cp
        self._set(trainer, private.CP_INPUTS, self._take_inputs)
        self._set(trainer, private.NUM_ITEMS, self._num_items)
        self._set(trainer, "get_cp_size", lambda: cp.size)
        self._set(trainer, "model_accepts_loss_kwargs", True)
        self._set(trainer, "prediction_step", self._prediction_step)
        self._set(trainer, "gather_function", self._gather_for_metrics)
        self._set(accelerator, "gather_for_metrics", self._gather_for_metrics)
        if has_own_context_parallelism(trainer):
            self._set(accelerator, private.PREPARE_CP, lambda *args: args)
        else:
            deepspeed = trainer.is_deepspeed_enabled
            mesh = DataMesh(accelerator.num_processes // cp.size, cp.size, deepspeed)
            self._set(accelerator, private.DATA_MESH, lambda: mesh)

    def restore(self) -> None:
        """Restore every method."""
        for owner, name, before in reversed(self._replaced):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    # ------------------------------------------------------------------------- the methods

    def _take_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
        """Return the inputs as the collator dealt them, for `_prepare_context_parallel_inputs`."""
        return nullcontext, ContextParallel.model_inputs(inputs)

    def _num_items(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Count the labels of a step on all ranks, for `_get_num_items_in_batch`."""
        if not batch_samples:
            return None
        kept = ContextParallel.num_items(batch_samples)
        self._compare_rows(batch_samples, "train")
        return kept.to(device)

    def _prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Return the mean loss of the whole row, on each rank that shares it."""
        if not prediction_loss_only:
            raise ValueError(
                "a trainer with cp must evaluate losses alone (prediction_loss_only=True), got a "
                "request for predictions: a rank has the logits of a part of each row"
            )
        trainer = self._trainer
        inputs = private.prepare_inputs(trainer, inputs)
        self._compare_rows([inputs], "eval")
        kept = torch.tensor(inputs["num_label_tokens"], device=trainer.args.device)
        inputs = ContextParallel.model_inputs(inputs)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=kept)
        # The trainer multiplies losses by the number of processes, which average gradients.
        parts = self._of_groups(self._accelerator.gather(loss.detach().reshape(1)))
        whole = parts.sum(1) / self._accelerator.num_processes
        return whole[self._accelerator.process_index // self._cp.size], None, None

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather scalars of all ranks, and values of samples once from each row.

        Scalars are sums over a rank's own tokens, so none of them is left out. The ranks that
        share a row have equal values for its samples.
        """
        if use_gather_object or not isinstance(input_data, Tensor):
            return self._gather(input_data, use_gather_object)
        gathered = self._accelerator.gather(input_data)
        if input_data.dim() == 0:
            return gathered
        once = self._of_groups(gathered.unflatten(0, (-1, len(input_data))))[:, 0].flatten(0, 1)
        state = self._accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            return once[: state.remainder]  # the others repeat samples, so that batches are even
        return once

    def _of_groups(self, of_ranks: Tensor) -> Tensor:
        """Return `[n_ranks, ...]` as `[n_groups, cp.size, ...]`."""
        return of_ranks.unflatten(0, (-1, self._cp.size))

    def _compare_rows(self, batches: Sequence[dict[str, Any]], stage: str) -> None:
        """Raise ValueError unless the ranks that share rows read the same ones.

        It waits for the device, so it compares the first step only, or with CUSEQ_CHECK=1 all.
        """
        if stage in self._compared and not _modes.CHECKING:
            return
        self._compared.add(stage)
        sums = torch.tensor(
            [[batch["row_checksum"] for batch in batches]], device=self._accelerator.device
        )
        of_groups = self._of_groups(self._accelerator.gather(sums))
        differ = (of_groups != of_groups[:, :1]).flatten(2).any(2).nonzero()
        if len(differ):
            group, rank = differ[0].tolist()
            first = group * self._cp.size
            raise ValueError(
                f"ranks that share rows must read the same ones, but rank {first + rank} reads "
                f"other {stage} rows than rank {first}: a sampler or data loader of your own must "
                f"take process_index // {self._cp.size} for the rank"
            )


def shared_rows_of(trainer: Trainer) -> SharedRows | None:
    """Return what `enable(trainer, cp=...)` made, or None."""
    method = vars(trainer).get(private.CP_INPUTS)
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, SharedRows) else None


# ------------------------------------------------------------------------------------------ checks


def has_own_context_parallelism(trainer: Trainer) -> bool:
    """Return whether accelerate itself shares rows among ranks (`ParallelismConfig(cp_size=)`)."""
    parallelism = trainer.accelerator.parallelism_config
    return parallelism is not None and parallelism.cp_enabled


def check_shared_rows(trainer: Trainer, cp: Any) -> None:
    """Raise unless the losses of a trainer are right on rows that the ranks of `cp` share.

    Raises:
        ValueError: the trainer has an option whose result would be wrong; the message names it.
        TypeError: `cp` is not a ContextParallel.
    """
    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp must be a ContextParallel or None, got {shown(cp)}")
    private.check_shared_rows(trainer)
    _check_ranks(trainer, cp)
    private.check_methods(trainer, ("prediction_step", private.CP_INPUTS, private.NUM_ITEMS), "cp")
    _check_loss(trainer)
    _check_data(trainer)
    config = text_config(trainer.model)
    recurrent = sorted(set(recurrent_types(config)))
    if recurrent:
        raise ValueError(
            f"cp must be None for a model with layers of type {', '.join(recurrent)}, whose state "
            f"would have to pass from rank to rank, got {cp}"
        )
    for rope_type in rotations_by_length(config):
        raise ValueError(
            "cp must be None for a model whose rotation follows the longest position, which ranks "
            f"with other parts of a row would not agree on, got rope_type={rope_type!r}"
        )
    if getattr(config, "output_router_logits", False):
        check_balance_loss(find_pretrained(trainer.model))
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "cp must be None for an SFTTrainer with a balance loss, since TRL averages it over "
            f"ranks, got router_aux_loss_coef={trainer.router_aux_loss_coef}: set it to 0.0 in "
            "SFTConfig"
        )


def _check_ranks(trainer: Trainer, cp: ContextParallel) -> None:
    accelerator = trainer.accelerator
    processes, first = accelerator.num_processes, cp.ranks[0]
    neighbours = cp.ranks == tuple(range(first, first + cp.size)) and first % cp.size == 0
    if not neighbours or processes % cp.size:
        raise ValueError(
            f"cp must join neighbours among the trainer's {processes} processes, as the last "
            f"dimension of a mesh over all of them does, got the ranks {list(cp.ranks)}"
        )
    parallelism = accelerator.parallelism_config
    if parallelism is None:
        return
    if parallelism.tp_enabled or parallelism.sp_enabled:
        raise ValueError(
            "cp must be None if the trainer's ParallelismConfig splits tensors or sequences itself "
            f"(tp_size, sp_size), got {cp}"
        )
    if not parallelism.cp_enabled:
        return
    if parallelism.cp_size != cp.size:
        raise ValueError(
            f"cp must have the cp_size = {parallelism.cp_size} ranks of the trainer's "
            f"ParallelismConfig, got {cp}"
        )
    if private.is_prepared(accelerator):
        raise ValueError(
            "cp must be given before the trainer trains or evaluates, got a model that accelerate "
            "has prepared: its hooks drop attention masks"
        )


def _check_loss(trainer: Trainer) -> None:
    args, liger = trainer.args, trainer.args.liger_kernel_config or {}
    fused = args.use_liger_kernel and liger.get("fused_linear_cross_entropy", True)
    wrong = {
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "a model that takes no num_items_in_batch": not _takes_num_items(trainer),
        "a model whose loss is not that of the next token": not private.shifts_labels(trainer),
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": bool(args.label_smoothing_factor),
        "compute_metrics": trainer.compute_metrics is not None,
        "use_liger_kernel=True with its fused_linear_cross_entropy": bool(fused),
    }
    for name, given in wrong.items():
        if given:
            raise ValueError(
                "cp must be None unless the loss is a sum over tokens of shift_labels, divided by "
                f"the labels of all ranks, got {name}"
            )


def _takes_num_items(trainer: Trainer) -> bool:
    """Return whether the loss of a trainer's model takes the number of labels of a step."""
    model = find_pretrained(trainer.model)
    if not loss_takes_keywords(type(model)):
        return False
    # A model of images refuses it in a Trainer, although its loss takes it.
    return trainer.model_accepts_loss_kwargs or "loss_function" in calls_of(model)


def _check_data(trainer: Trainer) -> None:
    args = trainer.args
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha must be None with cp, since its noise depends on the length of a "
            f"row and a rank has a part of it, got {args.neftune_noise_alpha}"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            'cp must be None with train_sampling_strategy="batch_rebalance", which gives every '
            "rank other examples, got both"
        )
    dispatch = args.accelerator_config.dispatch_batches
    sets = trainer.eval_dataset
    sets = [trainer.train_dataset, *(sets.values() if isinstance(sets, dict) else [sets])]
    streams = any(isinstance(dataset, IterableDataset) for dataset in sets)
    if dispatch or (dispatch is None and streams):
        raise ValueError(
            "accelerator_config must have dispatch_batches=False with cp, so that each rank reads "
            f"its own part, got {dispatch}"
        )
