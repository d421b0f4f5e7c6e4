"""Start the ranks of a benchmark as processes of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def default_ranks() -> int:
    """Return how many ranks a benchmark of several has: the GPUs, or 2 where there are fewer."""
    return max(2, torch.cuda.device_count())


def become_rank(rank: int, ranks: int, port: int) -> None:
    """Give this process of `run_ranks` the environment that torchrun gives a rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def run_ranks(work: Callable[..., None], ranks: int, *given: Any) -> None:
    """Run `work(rank, port, *given)` in a process for each rank; `port` is free for them to meet.

    Raises:
        ProcessRaisedException: `work` raised on a rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, *given), nprocs=ranks)
