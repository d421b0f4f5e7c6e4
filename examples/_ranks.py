"""What the examples need of several ranks: who shares a row, and that all were started alike."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

import cuseq

KIND = "cuda" if torch.cuda.is_available() else "cpu"


def say(text: str) -> None:
    """Print on the first rank alone."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def check_same_on_ranks(**facts: Any) -> None:
    """Exit on all ranks, with the name, if a value differs between ranks."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise SystemExit("the ranks did not meet, so each would train a model of its own")
        return
    mine = {name: json.dumps(value, default=str, sort_keys=True) for name, value in facts.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise SystemExit(f"{name} must be the same on all ranks, rank 0 has {value}, rank "
                                 f"{rank} {other[name]}")  # fmt: skip


def newest_checkpoint(folder: str | Path, last_file: str, resume: bool) -> str | None:
    """Return the newest checkpoint of a run that goes on, by `last_file`, which is written last.

    A run goes on with `resume`, or if torchrun started its ranks again after one of them died.

    Raises:
        SystemExit: there is none to go on from, or the folder has those of another run.
    """
    found = sorted(Path(folder).glob(last_file), key=lambda one: int(one.parent.name.split("-")[1]))
    newest = str(found[-1].parent) if found else None
    # Each machine counts the failures of its own ranks, so one that counted some speaks for all.
    restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), device=KIND)
    if dist.is_initialized():
        dist.all_reduce(restarts, dist.ReduceOp.MAX)
    if resume and not found:
        raise SystemExit(f"--resume: {folder} has no checkpoint")
    if found and not resume and restarts == 0:
        raise SystemExit(f"{folder} has checkpoints of another run: --resume goes on from them")
    check_same_on_ranks(checkpoint=newest)
    return newest


def options_of(*given: Any) -> dict[str, Any]:
    """Return the fields of dataclasses by name, for `check_same_on_ranks`."""
    return {f.name: getattr(one, f.name) for one in given for f in dataclasses.fields(one)}


def make_mesh(cp: int, row_length: int) -> DeviceMesh:
    """Return all ranks as dp x cp; `cp` neighbours share a row."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if cp < 1 or ranks % cp or row_length % cp:
        raise SystemExit(
            f"--cp must divide the {ranks} ranks and --row_length, {row_length}, got {cp}"
        )
    # The ranks that share rows exchange keys in a group of their own, beside that of gradients.
    own = {"cp": "nccl" if KIND == "cuda" else "gloo"}
    return init_device_mesh(
        KIND, (ranks // cp, cp), mesh_dim_names=("dp", "cp"), backend_override=own
    )


def context_parallel(
    mesh: DeviceMesh, config: PretrainedConfig
) -> cuseq.distributed.ContextParallel | None:
    """Return how the ranks of `cp` share rows; None if each has its own."""
    if mesh["cp"].size() == 1:
        return None
    config = config.get_text_config()
    heads = (config.num_attention_heads, config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    return cuseq.distributed.ContextParallel(mesh["cp"], heads=heads, head_dim=head_dim)
