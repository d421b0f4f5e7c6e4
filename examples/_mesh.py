"""This process's place among the ranks that torchrun started, and their device mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _documents import UserError
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

import cuseq


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run and this one's place among them.

    Attributes:
        rank, world_size: this process's number and the number of processes.
        device: where this rank trains.
        mesh: all ranks, as dp_replicate x dp_shard x cp.
        sharding: mesh for `fully_shard`: one dimension, or two with copies of the model. Ranks of
            cp hold shards too.
        host_group: all ranks over gloo, for decisions that must not wait for the device.
        saving_group: all ranks over gloo, for the thread that saves checkpoints alone: two threads
            must not share a group, whose collectives have to start in one order on all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    sharding: DeviceMesh
    host_group: ProcessGroup
    saving_group: ProcessGroup

    @property
    def cp_size(self) -> int:
        return self.mesh["cp"].size()

    @property
    def dp_size(self) -> int:
        """Return the number of different rows in a micro-step."""
        return self.world_size // self.cp_size

    @property
    def dp_rank(self) -> int:
        """Return which row this rank works on; the ranks of cp share it."""
        return self.rank // self.cp_size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def context_parallel(
        self, config: PretrainedConfig
    ) -> cuseq.distributed.ContextParallel | None:
        """Return how rows are dealt to the ranks of cp; None if each rank has rows of its own."""
        if self.cp_size == 1:
            return None
        config = config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return cuseq.distributed.ContextParallel(
            self.mesh["cp"], heads=(heads, key_heads), head_dim=head_dim
        )

    def on_each(self, function: Callable[[], Any]) -> Any:
        """Call `function` on every rank and return this rank's result.

        Raises:
            UserError: on all ranks, if it was raised on some: that of the first of these.
        """
        result, mine = None, None
        try:
            result = function()
        except UserError as error:
            mine = error
        errors: list[Any] = [None] * self.world_size
        dist.all_gather_object(errors, mine, group=self.host_group)
        for rank, error in enumerate(errors):
            if error is not None:
                raise UserError(f"rank {rank}: {error}")
        return result

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 and return its result on all ranks.

        Raises:
            UserError: on all ranks, if rank 0 raised it.
        """
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [function()]
            except UserError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, group=self.host_group)
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        return outcome[0]


@contextmanager
def joined_ranks(device_type: str, dp_replicate: int, cp: int) -> Iterator[Ranks]:
    """Join the other ranks, and leave them at the end.

    NCCL connects GPUs and gloo their hosts; CPUs have gloo alone.

    Raises:
        UserError: as for `make_ranks`; or torchrun is to restart several machines and keep its
            store.
    """
    on_cuda = device_type == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    attempt = _attempt()
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world_size,
    )
    try:
        yield make_ranks(device_type, dp_replicate, cp)
    finally:
        dist.destroy_process_group()


def restarts() -> int:
    """Return how often torchrun restarted this machine's ranks, by this machine's count.

    Each machine's torchrun counts the failures of its own ranks, so machines count differently.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _attempt() -> int:
    """Return a number that is new in each attempt of the ranks to meet, and the same on all.

    torchrun's own store outlives an attempt, with the addresses of dead ranks. Without it rank 0
    makes a store for each attempt.

    Raises:
        UserError: there is none, since several machines share torchrun's own store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if several and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError(
            "torchrun --max-restarts on several machines must have "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: ranks would find the "
            "addresses of dead ones in torchrun's store"
        )
    return restarts()


def make_ranks(device_type: str, dp_replicate: int, cp: int) -> Ranks:
    """Arrange the ranks of the default process group in a mesh.

    Args:
        device_type: "cpu", or "cuda" for the current GPU.
        dp_replicate: copies of the model.
        cp: ranks that share a row.

    Raises:
        UserError: the number of ranks is not a multiple of dp_replicate * cp.
    """
    world_size = dist.get_world_size()
    if world_size % (dp_replicate * cp) != 0:
        raise UserError(
            f"--dp-replicate times --cp must divide the number of ranks, {world_size}, got "
            f"{dp_replicate} times {cp}"
        )
    dp_shard = world_size // (dp_replicate * cp)
    mesh = init_device_mesh(
        device_type,
        (dp_replicate, dp_shard, cp),
        mesh_dim_names=("dp_replicate", "dp_shard", "cp"),
        # A dimension that spans all ranks would be the default group, over which FSDP2 shards too,
        # and a group's collectives run one after the other. One that names a backend is new.
        backend_override={"cp": "nccl" if device_type == "cuda" else "gloo"},
    )
    sharding = init_device_mesh(
        device_type,
        (dp_replicate, dp_shard * cp),
        mesh_dim_names=("dp_replicate", "dp_shard_cp"),
    )
    index = torch.cuda.current_device() if device_type == "cuda" else None
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        device=torch.device(device_type, index),
        mesh=mesh,
        sharding=sharding if dp_replicate > 1 else sharding["dp_shard_cp"],
        host_group=dist.new_group(backend="gloo"),
        saving_group=dist.new_group(backend="gloo"),
    )
