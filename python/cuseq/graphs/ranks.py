"""`Ranks`: processes that make the steps of a `GraphedStep` together.

NCCL wants a collective captured by all ranks or by none, so the hosts agree before each step on
what they do, by one small collective over gloo. A rank that raises tells the others there, and they
raise too instead of waiting for it. Gradients are averaged on the device, where no host waits.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.nn.parallel import DistributedDataParallel

from cuseq._base.arguments import shown
from cuseq._base.modes import is_capturing
from cuseq.distributed import check_same_on_ranks

LastBackward = Callable[[], AbstractContextManager[None]]

_BUCKET_BYTES = 64 << 20  # of gradients that are averaged together
_PATIENCE = timedelta(seconds=60)  # of a rank that raised, with the others
# Of hosts with one that evaluates or saves alone; the end of a process is noticed at once.
_LONG = timedelta(days=1)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The groups of our own, for the hosts and for gradients, by the group that was given and the type
# of the device: graphs share their communicators.
_Groups = dict[str, tuple[ProcessGroup, ProcessGroup]]
_own_groups: weakref.WeakKeyDictionary[ProcessGroup, _Groups] = weakref.WeakKeyDictionary()


class OtherRankRaised(RuntimeError):
    """Another rank of the group raised, and this one stops with it."""


class Ranks:
    """The ranks of a group that make steps together; each process makes it at the same time.

    Args:
        group: of all ranks that hold a copy of the model or a shard.
        parameters: of the model.
        are_sharded: whether they are DTensors, whose gradients FSDP2 reduces, and not copies.
        rooms: how many numbers of a graph's room the ranks agree on.
        share_rows: whether a forward exchanges keys with other ranks.
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
        rooms: int,
        share_rows: bool,
        **facts: object,
    ):
        self._given, self._device = group, parameters[0].device
        self.rank = dist.get_rank(group)
        self.share_rows = share_rows
        self._expected: list[int] = []  # which parameters had a gradient on any rank
        self._width = 8 + rooms + len(parameters)
        self._is_broken = False
        facts["numbers of room for the layouts"] = rooms
        for number, parameter in enumerate(parameters):
            kind = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
            facts[f"shape, dtype and requires_grad of parameter {number}"] = kind
        if not are_sharded:
            sums = [_sum_of_bits(p.detach()).to(self._device) for p in parameters]
            values = torch.stack(sums).tolist()  # one wait
            facts |= {f"the values of parameter {n}": total for n, total in enumerate(values)}
        # By the group that was given, whose patience with a rank that never comes is the user's.
        with _naming_who_is_gone():
            check_same_on_ranks(facts, group)
        self._hosts, self._group = _groups_of_our_own(group, self._device)

    # ---------------------------------------------------------------------------------- the hosts

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number on any rank.

        Raises:
            OtherRankRaised: a rank raised.
            RuntimeError: a rank is gone, or a rank raised earlier in the middle of a step.
        """
        return self.begin_to_agree(numbers)()

    def begin_to_agree(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Return a function that returns what `agree` does, and raises what it raises."""
        if self._is_broken:
            raise RuntimeError(
                "this GraphedStep cannot go on, since a rank raised in the middle of a step that "
                "the others began: load a checkpoint and make the GraphedStep again on all ranks"
            )
        largest_of_all = self._begin([0, False, *numbers])

        def finish() -> list[int]:
            failed, has_begun, *largest = largest_of_all()
            if failed:
                self._break_if(bool(has_begun))
                raise OtherRankRaised(
                    f"this rank of a GraphedStep stops since rank {failed - 1} of its group "
                    "raised: see that rank's error"
                )
            return largest[: len(numbers)]

        return finish

    @contextlib.contextmanager
    def telling(self, *, has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Tell the others if the body raises.

        Args:
            has_begun: whether the step has then changed weights, or begun an average that the
                others wait for, so that none can go on.
        """
        try:
            yield
        except OtherRankRaised:
            raise
        except Exception:
            self.tell(has_begun())
            raise

    def tell(self, has_begun: bool) -> None:
        """Say that this rank raised, to the others, which wait in `agree` or will."""
        self._break_if(has_begun)
        with contextlib.suppress(RuntimeError):  # they may be gone, or wait for the device
            _, any_has_begun, *_ = self._begin([self.rank + 1, has_begun])(_PATIENCE)
            self._break_if(bool(any_has_begun))

    def _break_if(self, is_broken: bool) -> None:
        if is_broken:
            self._is_broken = True
            _own_groups.get(self._given, {}).pop(self._device.type, None)

    def _begin(self, numbers: Sequence[int]) -> Callable[..., list[int]]:
        """Tell the others numbers; return a function that waits for the largest of each."""
        # Of one length, since a rank that raises does not know what the others agree on. gloo's
        # all_reduce of so few numbers takes five times as long.
        mine = torch.zeros(self._width, dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(numbers)
        everyone = mine.new_empty(dist.get_world_size(self._hosts) * self._width)

        def largest(*patience: timedelta) -> list[int]:
            with _naming_who_is_gone():
                work.wait(*patience)
            return everyone.view(-1, self._width).amax(0).tolist()

        with _naming_who_is_gone():
            work = dist.all_gather_into_tensor(everyone, mine, self._hosts, async_op=True)
        return largest

    # ------------------------------------------------------------------------------ the gradients

    @contextlib.contextmanager
    def averaging(self, parameters: Sequence[Tensor]) -> Iterator[LastBackward]:
        """Average the gradients of the body's batches over the ranks, when it ends.

        It yields a context for the last backward, in which averages begin as gradients come, in an
        order that is the same on all ranks; no rank enters it if another has raised before. A
        parameter without a gradient on this rank counts as one of zeros if another rank has one.

        Raises:
            ValueError: other parameters require gradients on another rank; or the body called a
                DistributedDataParallel.
            RuntimeError: a parameter got its gradient twice in the last backward; or another rank
                raised.
        """
        if len(self._expected) != len(parameters):
            self._expected = [True] * len(parameters)
        averages = _Averages(self._group, parameters, self._expected)
        backward_began = False

        @contextlib.contextmanager
        def last_backward() -> Iterator[None]:
            nonlocal backward_began
            # While a step is captured, NCCL waits on the host for the other ranks.
            shapes = zlib.crc32(repr([p.shape for p in parameters]).encode())
            largest, smallest = self.agree([shapes, -shapes])
            if largest != -smallest:
                raise ValueError(
                    "the parameters that require gradients must be the same on all ranks of group, "
                    f"got others on some: {len(parameters)} here"
                )
            backward_began = not is_capturing(self._device)  # else nothing runs
            with averages.begun_by_hooks():
                yield

        # The exchange of keys in a forward waits for all ranks too.
        others_wait = self.share_rows and not is_capturing(self._device)
        with self.telling(has_begun=lambda: backward_began or others_wait), _without_ddp():
            yield last_backward
        try:
            self._expected = self.agree([p.grad is not None for p in parameters])
        except OtherRankRaised:
            self._break_if(backward_began or others_wait)
            raise
        averages.finish(self._expected)

    def updating(self) -> AbstractContextManager[None]:
        """Return a context for what follows the averages, which changes the weights."""
        if is_capturing(self._device):
            return contextlib.nullcontext()  # nothing runs, and after a capture the ranks agree
        return self.telling(has_begun=lambda: True)


@contextlib.contextmanager
def _naming_who_is_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"a rank of this GraphedStep's group is gone: {error}") from error


class _Averages:
    """The averages of one step's gradients over the ranks.

    Args:
        group: of the ranks.
        parameters: that require gradients.
        expected: whether each had a gradient in the step before.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[Tensor],
        expected: Sequence[int],
    ):
        self._group, self._parameters = group, parameters
        self._on_gpu = any(p.is_cuda for p in parameters)  # NCCL averages
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
    groups = _own_groups.setdefault(group, {})
    if device.type not in groups:
        ranks = dist.get_process_group_ranks(group)
        hosts = dist.new_group(ranks, _LONG, "gloo", use_local_synchronization=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        gradients = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        groups[device.type] = hosts, gradients
    return groups[device.type]


def group_of_ranks(group: ProcessGroup | Literal[False] | None) -> ProcessGroup | None:
    """Return the group whose ranks make a step together, None if this process is alone.

    Raises:
        TypeError: `group` is not a process group, None or False.
        ValueError: this process is not in it.
    """
    if group is False:
        return None
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, None or False, got {shown(group)}")
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this process, got a group without it")
    return group if dist.get_world_size(group) > 1 else None


def check_groups_of_rows(names: Iterable[str | None], group: ProcessGroup | None) -> None:
    """Raise ValueError if a group that shares rows, by its name, has ranks outside `group`."""
    together = [] if group is None else dist.get_process_group_ranks(group)
    for name in names:
        if not dist.is_initialized():
            continue  # attention says so
        shares = dist.group.WORLD if name is None else _resolve_process_group(GroupName(name))
        ranks = dist.get_process_group_ranks(shares)
        if len(ranks) > 1 and not set(ranks) <= set(together):
            raise ValueError(
                f"group must contain the ranks that share example_batch's rows, {ranks}, got "
                f"{together or 'none'}: leave it out, or give the group of all ranks"
            )


@contextlib.contextmanager
def _without_ddp() -> Iterator[None]:
    """Refuse a DistributedDataParallel that the body calls: gradients are averaged here."""
    forward = DistributedDataParallel.forward

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "loss_fn must call the model itself, got a DistributedDataParallel, which averages the "
            "gradients too: call its .module"
        )

    DistributedDataParallel.forward = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]
