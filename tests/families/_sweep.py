"""Trying many families, each in a process of its own with a time limit."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
import transformers

import cuseq.integrations.transformers as integration
from tests.families._checks import CHECKS
from tests.families.attempt import try_family
from tests.families.result import NOT_TRIED, FamilyResult

_MEMORY = 12 * 2**30  # bytes that a process may map; torch alone maps 4 GiB


def sweep(
    families: Sequence[str],
    checks: Collection[str] = tuple(CHECKS),
    *,
    jobs: int = 1,
    seconds: float = 300.0,
    device: str = "cpu",
) -> Iterator[FamilyResult]:
    """Try families in processes; yield the results in the order in which they are ready.

    A family that crashes or hangs is not tried; the others go on. The processes are forks of this
    one, which must not have used a GPU or several threads.

    Args:
        families: model types.
        checks: names of `CHECKS`.
        jobs: number of processes at a time.
        seconds: time limit of one family.
        device: where the models run.
    """
    integration.register()  # import what `enable` needs once, before the forks
    integration.unregister()
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(families))
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                family = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_try, args=(family, tuple(checks), device, sender))
                process.start()
                sender.close()
                running[receiver] = family, process, time.monotonic() + seconds
            nearest = min(limit for _, _, limit in running.values())
            ready = wait(list(running), timeout=max(0.0, nearest - time.monotonic()))
            now = time.monotonic()
            for receiver in list(running):
                family, process, limit = running[receiver]
                if receiver in ready:
                    yield _received(receiver, family)
                elif now >= limit:
                    yield FamilyResult(family, NOT_TRIED, f"took more than {seconds:g} seconds")
                else:
                    continue
                del running[receiver]
                _end(receiver, process)
    finally:
        for receiver, (_, process, _) in running.items():
            _end(receiver, process)


def _try(family: str, checks: Sequence[str], device: str, sender: Connection) -> None:
    if device == "cpu":  # CUDA maps more than any model
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    torch._logging.set_logs(all=50)
    sender.send(try_family(family, checks, device))


def _received(receiver: Connection, family: str) -> FamilyResult:
    try:
        result: FamilyResult = receiver.recv()
    except EOFError:
        return FamilyResult(family, NOT_TRIED, "the process that tried it died")
    return result


def _end(receiver: Connection, process: ForkProcess) -> None:
    receiver.close()
    process.kill()
    process.join()
