"""Helpers for tests of training loops: processes that cannot hang, and a small model."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cuseq

HEADS, HEAD_DIM = 2, 4
DIM = HEADS * HEAD_DIM

# Layouts that the blocks were called with, one for each call.
attended: list[cuseq.PackedLayout] = []


class Block(nn.Module):
    """Attention inside the sequences, rotated by positions from the identity cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)

    def forward(self, hidden: Tensor, packed: cuseq.PackedLayout) -> Tensor:
        attended.append(packed)
        tokens = hidden.flatten(0, -2)
        q, k, v = self.qkv(tokens).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        out = cuseq.varlen_attention(q, k, v, packed).flatten(1)
        positions = cuseq.ops.cached_position_ids(packed.lengths, packed.total_tokens)
        return hidden + (out * positions.to(out.dtype).cos().unsqueeze(1)).view_as(hidden)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, hidden: Tensor, packed: cuseq.PackedLayout) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, packed)
        return hidden


def make_model(blocks: int = 3) -> Model:
    """Return a model that has the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(blocks)


def make_rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, on every rank, which all call it; a plain one is its own."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def run(
    worker: Callable[..., Any],
    *arguments: Any,
    processes: int = 2,
    limit: float = 120,
    backend: str = "gloo",
) -> list[Any]:
    """Return the result of `worker(rank, *arguments)` from each process of a group.

    Over NCCL ("nccl" or "cpu:gloo,cuda:nccl") each process uses the GPU of its rank.

    Raises:
        RuntimeError: a process failed or the time was up; the message has every traceback.
    """
    spawn = multiprocessing.get_context("spawn")
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        group = [
            spawn.Process(
                target=_enter,
                args=(rank, processes, folder, limit, backend, worker, arguments),
                daemon=True,
            )
            for rank in range(processes)
        ]
        try:
            for process in group:
                process.start()
            while any(process.exitcode is None for process in group) and time.monotonic() < end:
                alive = [process.sentinel for process in group if process.exitcode is None]
                wait(alive, timeout=min(1, end - time.monotonic()))
                if any(process.exitcode not in (None, 0) for process in group):
                    # The others notice that their peer is gone; give them a little time to report
                    # it.
                    end = min(end, time.monotonic() + 3)
            codes = [process.exitcode for process in group]
        finally:
            for process in group:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if any(codes) or None in codes:
            errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise RuntimeError("\n".join([f"exit codes {codes}, None for no end in time", *errors]))
        return [torch.load(f"{folder}/{rank}.result", "cpu") for rank in range(processes)]


def _enter(
    rank: int, processes: int, folder: str, limit: float, backend: str, worker, arguments
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun sets these for libraries that read them; nothing connects to the port.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=processes,
            # a process that waits for a peer reports it before the limit
            timeout=timedelta(seconds=limit / 2),
        )
        torch.save(worker(rank, *arguments), f"{folder}/{rank}.result")
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # remaining gloo threads would abort an interpreter that exits normally
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.exit(1)
