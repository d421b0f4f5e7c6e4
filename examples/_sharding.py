"""Make a model ready for several ranks: cuseq, recomputation, compiled layers and FSDP2."""

from __future__ import annotations

import argparse

import torch
from _mesh import Ranks
from _model import ModelSource
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

import cuseq


def shard_model(
    source: ModelSource, ranks: Ranks, options: argparse.Namespace
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model and shard each decoder layer, and the rest as one more unit.

    Every rank builds the whole model in fp32 first: 4 bytes a weight, until it is sharded.

    Returns:
        The model and the warnings of `cuseq.enable`.
    """
    model = source.build(ranks.device, options.seed, dtype=torch.float32)
    enabled = cuseq.enable(model)
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        if options.compile:
            # The forward alone: FSDP2 gathers the weights in hooks around it.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
        fully_shard(layer, mesh=ranks.sharding, mp_policy=policy)
    fully_shard(model, mesh=ranks.sharding, mp_policy=policy)
    return model, list(enabled.warnings)
