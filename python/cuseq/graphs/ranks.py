"""`Ranks`: processes that make the steps of a `GraphedStep` together.

NCCL wants a collective captured by all ranks or by none, so the hosts agree before each step on
what they do, by one small collective over gloo. A rank that raises tells the others there, and they
raise too instead of waiting for it. Gradients are averaged on the device, where no host waits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cuseq._base.arguments import shown

Begun = Callable[[], AbstractContextManager[None]]

_BUCKET_BYTES = 64 << 20  # of gradients that are averaged together
_PATIENCE = timedelta(seconds=60)  # of a rank that raised, with the others
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The groups of our own by the group that was given, for the hosts and for gradients: graphs share
# their communicators.
_own_groups: weakref.WeakKeyDictionary[ProcessGroup, tuple[ProcessGroup, ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class OtherRankRaised(RuntimeError):
    """Another rank of the group raised, and this one stops with it."""


class Ranks:
    """The ranks of a group that make steps together; each process makes it at the same time.

    Args:
        group: of all ranks that hold a copy of the model or a shard.
        parameters: of the model.
        are_sharded: whether they are DTensors, whose gradients FSDP2 reduces, and not copies.
        facts: what must be the same on all ranks, by name.

    Raises:
        ValueError: a fact or a parameter differs between ranks, on all of them.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[Tensor],
        *,
        are_sharded: bool,
        **facts: object,
    ):
        self._hosts, self._group = _groups_of_our_own(group, parameters[0].device)
        self.rank = dist.get_rank(group)
        # Whether NCCL has averages, and the device streams on which a capture sees them.
        self._on_gpu = parameters[0].is_cuda
        self._expected: list[int] = []  # which parameters had a gradient on any rank
        self._width = 8 + len(parameters)
        for number, parameter in enumerate(parameters):
            kind = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
            facts[f"shape, dtype and requires_grad of parameter {number}"] = kind
        if not are_sharded:
            sums = torch.stack([_sum_of_bits(p.detach()) for p in parameters]).tolist()
            facts |= {f"the values of parameter {n}": total for n, total in enumerate(sums)}
        self._check_equal(facts)

    def _check_equal(self, facts: dict[str, object]) -> None:
        everyone: list[Any] = [None] * dist.get_world_size(self._hosts)
        dist.all_gather_object(everyone, {k: repr(v) for k, v in facts.items()}, self._hosts)
        for rank, others in enumerate(everyone):
            for name in everyone[0] | others:
                first, other = everyone[0].get(name), others.get(name)
                if first != other:
                    raise ValueError(
                        f"{name} must be the same on all ranks of group, got {first} on rank 0 and "
                        f"{other} on rank {rank}: seed all ranks alike or load the same weights"
                    )

    # ---------------------------------------------------------------------------------- the hosts

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number on any rank.

        Raises:
            RuntimeError: a rank raised, or is gone.
        """
        failed, *largest = self._largest([0, *numbers])
        if failed:
            raise OtherRankRaised(
                f"this rank of a GraphedStep stops since rank {failed - 1} of its group raised: "
                "see that rank's error"
            )
        return largest[: len(numbers)]

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others if the body raises."""
        try:
            yield
        except OtherRankRaised:
            raise
        except Exception:
            self.tell()
            raise

    def tell(self) -> None:
        """Say that this rank raised, to the others, which wait in `agree`."""
        with contextlib.suppress(RuntimeError):  # they may be gone, or wait for the device
            self._largest([self.rank + 1], _PATIENCE)

    def _largest(self, numbers: Sequence[int], patience: timedelta | None = None) -> list[int]:
        # Of one length, since a rank that raises does not know what the others agree on. gloo's
        # all_reduce of so few numbers takes five times as long.
        mine = torch.zeros(self._width, dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(numbers)
        everyone = mine.new_empty(dist.get_world_size(self._hosts) * self._width)
        try:
            work = dist.all_gather_into_tensor(everyone, mine, self._hosts, async_op=True)
            work.wait(*([] if patience is None else [patience]))
        except RuntimeError as error:
            raise RuntimeError(f"a rank of this GraphedStep's group is gone: {error}") from error
        return everyone.view(-1, self._width).amax(0).tolist()

    # ------------------------------------------------------------------------------ the gradients

    @contextlib.contextmanager
    def averaging(self, parameters: Sequence[Tensor]) -> Iterator[Begun]:
        """Average the gradients of the body's batches over the ranks, when it ends.

        It yields a context for the last backward, in which averages begin as gradients come, in an
        order that is the same on all ranks; no rank enters it if another has raised before. A
        parameter without a gradient on this rank counts as one of zeros if another rank has one.

        Raises:
            RuntimeError: a parameter got its gradient twice in the last backward; or another rank
                raised.
        """
        if len(self._expected) != len(parameters):
            self._expected = [True] * len(parameters)
            self._width = max(self._width, 8 + len(parameters))
        averages = _Averages(self._group, self._on_gpu, parameters, self._expected)

        @contextlib.contextmanager
        def begun() -> Iterator[None]:
            # While a step is captured, NCCL waits on the host for the other ranks.
            self.agree([])
            with averages.begun_by_hooks():
                yield

        with self.telling():
            yield begun
        self._expected = self.agree([p.grad is not None for p in parameters])
        averages.finish(self._expected)


class _Averages:
    """The averages of one step's gradients over the ranks.

    Args:
        group: of the ranks.
        on_gpu: whether NCCL does it.
        parameters: that require gradients.
        expected: whether each had a gradient in the step before.
    """

    def __init__(
        self,
        group: ProcessGroup,
        on_gpu: bool,
        parameters: Sequence[Tensor],
        expected: Sequence[int],
    ):
        self._group, self._on_gpu, self._parameters = group, on_gpu, parameters
        self._buckets = _buckets(
            [p for p, is_used in zip(parameters, expected, strict=True) if is_used]
        )
        self._bucket_of = {id(p): n for n, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._arrived: set[int] = set()
        self._begun = 0  # buckets
        self._works: list[Any] = []

    @contextlib.contextmanager
    def begun_by_hooks(self) -> Iterator[None]:
        """Begin a bucket's average once the gradients of it and of all before it are there."""
        hooks = [p.register_post_accumulate_grad_hook(self._arrive) for p in self._parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _arrive(self, parameter: Tensor) -> None:
        if id(parameter) in self._arrived:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} got its gradient twice in one "
                "backward, after its average over the ranks may have begun: give checkpoint "
                "use_reentrant=False"
            )
        self._arrived.add(id(parameter))
        number = self._bucket_of.get(id(parameter))
        if number is None:
            return
        self._missing[number] -= 1
        while self._begun < len(self._buckets) and self._missing[self._begun] == 0:
            self._begin(self._buckets[self._begun])
            self._begun += 1

    def finish(self, used: Sequence[int]) -> None:
        """Average what is left of the gradients that any rank has, and let the stream wait."""
        kept = {id(p) for p, is_used in zip(self._parameters, used, strict=True) if is_used}
        new = [p for p in self._parameters if id(p) in kept and id(p) not in self._bucket_of]
        for bucket in (*self._buckets[self._begun :], *_buckets(new)):
            self._begin([p for p in bucket if id(p) in kept])
        for work in self._works:
            work.wait()
        if not self._on_gpu:
            ranks = dist.get_world_size(self._group)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad /= ranks

    def _begin(self, bucket: Sequence[Tensor]) -> None:
        if not bucket:
            return
        gradients = []
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        options = dist.AllreduceCoalescedOptions()
        # gloo has no average.
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if self._on_gpu else dist.ReduceOp.SUM)
        self._works.append(self._group.allreduce_coalesced(gradients, options))


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return parameters of one dtype together, the last ones first, as their gradients come."""
    buckets: list[list[Tensor]] = []
    room, dtype = 0, None
    for parameter in reversed(parameters):
        if room <= 0 or parameter.dtype != dtype:
            buckets.append([])
            room, dtype = _BUCKET_BYTES, parameter.dtype
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


def _groups_of_our_own(
    group: ProcessGroup, device: torch.device
) -> tuple[ProcessGroup, ProcessGroup]:
    """Return two groups of the same ranks for graphs alone: for the hosts, and for gradients.

    NCCL orders captured and plain operations of one communicator, which costs time; and what the
    hosts say must not queue behind averages that a rank which raised never joins.
    """
    if group not in _own_groups:
        ranks = dist.get_process_group_ranks(group)
        hosts, gradients = (
            dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            for backend in ("gloo", "nccl" if device.type == "cuda" else "gloo")
        )
        _own_groups[group] = hosts, gradients
    return _own_groups[group]


def group_of_ranks(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group whose ranks make a step together, None if this process is alone.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: this process is not in it.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, got {shown(group)}")
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this process, got a group without it")
    return group if dist.get_world_size(group) > 1 else None
