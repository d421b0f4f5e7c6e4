"""Make a model ready for several ranks: cuseq, recomputation, compiled code, FSDP2 or DDP."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _documents import UserError
from _mesh import Ranks
from _model import ModelSource, compile_layers_and_loss, decoder_layers, enable
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel

# Rotations of transformers that read the longest position. Ranks that share a row read others.
BY_LENGTH = ("dynamic", "longrope")
# What configs call the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# FSDP2's hooks cost the host about as much for a small unit as for a large one.
UNIT_WEIGHTS = 60_000_000
# Gathered weights are kept until the backward if they take at most this share of a GPU's memory.
KEPT_SHARE = 1 / 20


def make_model(
    source: ModelSource, ranks: Ranks, options: argparse.Namespace
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model in fp32 and shard it, unless `options.shard` is False.

    Every rank builds the whole model first: 4 bytes a weight, until it is sharded.

    Returns:
        The model and the warnings of `cuseq.enable`.

    Raises:
        UserError: on all ranks, if the model cannot be trained, or not on ranks that share rows.
    """
    config = source.config.get_text_config()
    check_balance_loss(config, ranks, options)
    if not options.shard:
        check_copies(source.config)
    model = source.build(ranks.device, options.seed, dtype=torch.float32)
    if config is not source.config:
        freeze_parts_beside_text(model)
    replaced, warnings = enable(model)
    if ranks.cp_size > 1:
        check_parts(config, [*replaced, *warnings])
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = decoder_layers(model)
    if options.precision == "bf16":
        # Hidden states have to be cast, and nothing else: rotations that a model makes in fp32 are
        # to stay so. FSDP2 would cast all inputs of a unit's first layer; autocast casts none.
        layers[0].register_forward_pre_hook(partial(_cast, torch.bfloat16))
    if options.compile:
        compile_layers_and_loss(model)
    if options.shard:
        shard(model, layers, ranks, options)
    return model, warnings


def freeze_parts_beside_text(model: PreTrainedModel) -> None:
    """Freeze what text does not use, such as a vision tower, which no step would update."""
    used = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    for weight in set(model.parameters()) - used:
        weight.requires_grad_(False)


def shard(
    model: PreTrainedModel, layers: nn.ModuleList, ranks: Ranks, options: argparse.Namespace
) -> None:
    """Shard the decoder layers in units, and the rest of the model as one more unit."""
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = options.reshard_after_forward
    if reshard is None:
        # As rank 0 says: the ranks gather together, and their GPUs may differ.
        reshard = ranks.on_first(lambda: not has_room(model, ranks.device, policy.param_dtype))
    of_unit = replace(policy, cast_forward_inputs=False)
    for unit in group_layers(layers, UNIT_WEIGHTS):
        fully_shard(unit, mesh=ranks.sharding, mp_policy=of_unit, reshard_after_forward=reshard)
    fully_shard(model, mesh=ranks.sharding, mp_policy=policy)


def group_layers(layers: Iterable[nn.Module], weights: int) -> list[list[nn.Module]]:
    """Return the layers in groups of successive ones, each but the last of `weights` or more."""
    groups: list[list[nn.Module]] = []
    is_full, size = True, 0
    for layer in layers:
        if is_full:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += sum(weight.numel() for weight in layer.parameters())
        is_full = size >= weights
    return groups


def _cast(dtype: torch.dtype, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's positional inputs, the hidden states first, with floats in `dtype`."""
    return tuple(
        given.to(dtype) if torch.is_tensor(given) and given.is_floating_point() else given
        for given in inputs
    )


def has_room(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Return whether all weights in `dtype` are a small part of the GPU's memory; False on a CPU.

    Args:
        model: with fp32 weights.
        device: where it trains.
        dtype: of the forward; None is that of the weights.
    """
    if device.type != "cuda":
        return False
    room = KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory
    itemsize = (dtype or torch.float32).itemsize
    return itemsize * sum(weight.numel() for weight in model.parameters()) <= room


def check_balance_loss(config: PretrainedConfig, ranks: Ranks, options: argparse.Namespace) -> None:
    """Check that a router's balance loss would be added once in a step.

    A model adds it to the loss of each row. The losses of a step's rows are added up here, since
    each is already a share of the step's mean.

    Raises:
        UserError: it would be added once for each rank and row.
    """
    coefficient = getattr(config, "router_aux_loss_coef", 0)
    rows = ranks.world_size * options.accumulation
    if rows > 1 and coefficient and getattr(config, "output_router_logits", False):
        raise UserError(
            "--model must not add its router's balance loss (output_router_logits) to each of the "
            f"{rows} parts of a step, got router_aux_loss_coef={coefficient}: set it to 0 in the "
            "config, or train one row on one rank"
        )


def check_copies(config: PretrainedConfig) -> None:
    """Check that DDP and autocast can train a model.

    Raises:
        UserError: they cannot.
    """
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in EXPERTS):
        raise UserError(
            "--no-shard must not be given for a mixture of experts: autocast leaves experts in "
            "fp32, and DDP waits for gradients of experts that no token chose"
        )
    if text is not config:
        raise UserError(
            "--no-shard must not be given for a model with parts beside its text model, got "
            f"{type(config).__name__}: DDP waits for their gradients"
        )


def check_parts(config: PretrainedConfig, enabled: list[str]) -> None:
    """Check that a model computes the same of parts of a row as of the row.

    Args:
        config: of the model's text part.
        enabled: what `cuseq.enable` replaced, and its warnings.

    Raises:
        UserError: it does not.
    """
    states = [entry for entry in enabled if entry.startswith(("conv:", "recurrence:", "LEAKS"))]
    if states:
        raise UserError(
            "--cp must be 1 for a model whose layers carry a state along the row, which would have "
            f"to pass from rank to rank, got {states[0]}"
        )
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = [value for value in given.values() if isinstance(value, dict)]
    for rotation in of_layers or [given]:
        if rotation.get("rope_type") in BY_LENGTH:
            raise UserError(
                "--cp must be 1 for a model whose rotation follows the longest position, which "
                "ranks with other parts of a row would not agree on, got rope_type="
                f"{rotation['rope_type']!r}"
            )
