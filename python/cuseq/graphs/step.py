"""`GraphedStep`: a training step that is captured once and replayed with new packs."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cuseq import _C
from cuseq._base.arguments import as_float, as_int, shown
from cuseq._base.models import gather_what_is_needed, gathered_by_fsdp2
from cuseq.graphs.batch import StaticBatch
from cuseq.graphs.ranks import LastBackward, Ranks, check_groups_of_rows, group_of_ranks
from cuseq.layout import OtherSize


class GraphedStep:
    """A training step (forward, loss, backward, clipping, optimizer) as one CUDA graph.

    The first `warmup` calls run the step as it is. The next call captures it, and from then on a
    call copies its batch to the static inputs and replays the graph, whatever sequences the batch
    holds. Where a capture is not possible, every call runs the plain step and `reason` says why.

    Everything stays usable between calls: evaluation, saving, `state_dict` and `load_state_dict`
    of model and optimizer, the scheduler, `optimizer.param_groups`. After a change that the graph
    cannot follow (loaded optimizer state, another weight decay, parameters that moved, froze or
    were replaced) the next call captures anew, and a warning says so. So does a row with more
    sequences than the graph attends over: the most of any row so far, rounded up to a power of two.
    A batch of other sizes than the example, such as a row with more sequences than `max_seqs`, runs
    as a plain step and warns; among the first `warmup` batches it is an error. Modes of modules
    (`train`, `eval`) are those of the capture.

    On several ranks, each with the whole model, gradients are averaged over `group` as
    DistributedDataParallel does, inside the graph and while the backward runs. The gradients of
    parameters that FSDP2 sharded are its own business, which the graph has in it too. All ranks
    make each step alike: if one cannot replay, all run the plain step or capture anew, and if one
    raises, the others do. Let go of the step before `torch.distributed.destroy_process_group`,
    which waits, without end, while a graph with NCCL in it is there.

    Args:
        loss_fn: called with a batch, returns the loss, a scalar tensor. It must not read values of
            GPU tensors on the host. Mappings arrive as dict. On several ranks it calls the model
            itself, not a DistributedDataParallel.
        optimizer: all parameters on one device. To be captured it must be `fused=True` or
            `capturable=True`.
        example_batch: a batch of the form and sizes of all others: mappings, lists and tuples of
            tensors, `PackedLayout` and constants. Layouts must be made with `max_seqs` below
            `total_tokens`.
        scheduler: its `step()` is called after each step of the optimizer, on the host.
        max_grad_norm: clips the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
        accumulation: batches of a step. Their gradients are added: `loss_fn` divides its loss by
            whatever makes it a mean.
        autocast: `torch.bfloat16` for an autocast region around `loss_fn`.
        warmup: plain steps before the capture, at least 1. They compile and tune kernels.
        group: process group of the ranks that have a copy of the model or a shard, all of which
            make this object at the same time; those that share a row among them. Default: all
            ranks, if `torch.distributed` is initialised. False for a model of this process alone.
        model: the module that `loss_fn` calls. Needed if FSDP2 sharded it; else it has the frozen
            weights compared too.

    Raises:
        ValueError: an argument has a wrong value, ranks outside `group` share the batch's rows, the
            optimizer's parameters are on several devices, or some are sharded and others not; or
            between ranks the parameters, their values (not of shards), this object's options or the
            optimizer's differ.
        TypeError: an argument has a wrong type.

    Examples:
        >>> linear = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        >>> def loss_fn(batch):
        ...     return linear(batch["x"]).square().mean()
        >>> step = cuseq.GraphedStep(loss_fn, optimizer, {"x": torch.ones(2, 4)})
        >>> loss = step({"x": torch.randn(2, 4)})
        >>> step.captured, step.reason
        (False, 'the parameters are on cpu, and CUDA graphs need a GPU')
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Tensor],
        optimizer: Optimizer,
        example_batch: Any,
        *,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        accumulation: int = 1,
        autocast: torch.dtype | None = None,
        warmup: int = 3,
        group: ProcessGroup | Literal[False] | None = None,
        model: nn.Module | None = None,
    ):
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of a batch, got {shown(loss_fn)}")
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise TypeError(
                "scheduler must be a torch.optim.lr_scheduler.LRScheduler or None, got "
                f"{shown(scheduler)}"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler must step without a metric, got ReduceLROnPlateau: call its "
                "step(metric) yourself, after this step"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {shown(model)}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
        if autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast must be torch.bfloat16 or None, got {shown(autocast)}: float16 needs a "
                "GradScaler, which decides on the host"
            )
        if max_grad_norm is not None:
            max_grad_norm = as_float(max_grad_norm, "max_grad_norm")
            if not max_grad_norm > 0:
                raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}")
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._max_grad_norm = max_grad_norm
        self._autocast = autocast
        self._plain_steps_left = as_int(warmup, "warmup", least=1)
        self._device = _device_of(optimizer)
        self._batches = [
            StaticBatch(example_batch, self._device, "example_batch")
            for _ in range(as_int(accumulation, "accumulation", least=1))
        ]
        # The room of a graph: the numbers of sequences that it attends over in the layouts of a
        # batch, and for a rank's part of a row those of `Part.needed_room`.
        self._rooms = self._needed_rooms([None] * len(self._batches))
        for batch in self._batches:
            batch.expect(self._rooms)
        self._obstacle: str | None = None
        obstacle = _obstacle(optimizer, self._device, model)
        if obstacle is not None:
            self._give_up(obstacle)
        self._ranks: Ranks | None = None
        self._are_sharded = _are_sharded(optimizer)
        modules = () if model is None else model.modules()
        # A forward elsewhere may leave them gathered, with the weights of then.
        self._gathering: list[Any] = [one for one in modules if gathered_by_fsdp2(one)]
        if self._are_sharded and model is not None and not self._gathering:
            raise ValueError(
                "model must be sharded by FSDP2 (fully_shard), or have no DTensor, got "
                f"{type(model).__name__} without it"
            )
        if model is not None and self._gathering:
            gather_what_is_needed(model)
        together = group_of_ranks(group)
        groups_of_rows = self._batches[0].groups()
        check_groups_of_rows(groups_of_rows, together)
        if together is not None:
            own = _all_parameters(optimizer)
            held = set(map(id, own))
            others: list[Tensor] = [] if model is None else list(model.parameters())
            frozen = [p for p in others if id(p) not in held and not self._are_sharded]
            self._ranks = Ranks(
                together,
                own + frozen,
                are_sharded=self._are_sharded,
                accumulation=len(self._batches),
                warmup=self._plain_steps_left,
                max_grad_norm=max_grad_norm,
                autocast=autocast,
                rooms=len(self._rooms),
                share_rows=bool(groups_of_rows),
                optimizer=type(optimizer).__name__,
                options=[_numbers(group) for group in optimizer.param_groups],
            )
        self._graph: _Graph | None = None
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._grad_norm: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Whether the step is captured, so that calls replay a graph."""
        return self._graph is not None

    @property
    def reason(self) -> str | None:
        """Why the step is not captured, or None."""
        if self._graph is not None:
            return None
        if self._obstacle is None and self._plain_steps_left > 0:
            return f"warming up: plain steps before the capture: {self._plain_steps_left}"
        return self._obstacle

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the gradients of the last step before clipping, on the device; None without
        `max_grad_norm`.
        """
        return None if self._grad_norm is None else self._grad_norm.clone()

    def __call__(self, batch: Any) -> Tensor:
        """Run one step and return its loss, detached, on the device. Never waits for the GPU if
        it replays a graph; on several ranks it waits for the hosts of the others.

        Args:
            batch: of the form of `example_batch`, on the host or on the device; with accumulation a
                list of as many batches, whose losses are added. Best in pinned memory, from which
                the GPU copies large tensors while it works on the step before: it must have been
                filled when this is called, not by a copy that is still to come.

        Raises:
            ValueError: a batch has another form, or another size in the first `warmup` steps, and
                nothing has been run; or `loss_fn` returned more than one value.
            TypeError: `loss_fn` did not return a tensor.
            RuntimeError: another rank raised, or is gone.
        """
        with self._telling():
            batches = self._listed(batch)
            given, of_other_size = self._check(batches)
            self._rooms = _larger(self._rooms, self._needed_rooms(given))
        stale = self._graph is not None and not self._graph.is_of(self._optimizer)
        # The hosts hear of each other while they copy.
        agreed = self._begin_to_agree(stale, of_other_size)
        with self._telling(self._others_wait):
            values = []
            for static, leaves, one in zip(self._batches, given, batches, strict=True):
                if leaves is not None:
                    static.fill(leaves)
                values.append(static.moved(one) if leaves is None else static.value)
        stale, skipped = agreed()
        if self._obstacle is not None or self._plain_steps_left > 0 or skipped is not None:
            if self._obstacle is None and skipped is not None:
                with self._telling():  # a warning may be an error here
                    warnings.warn(
                        f"GraphedStep runs a step without its graph: {skipped}", stacklevel=2
                    )
            loss = self._plain_step(values)
        else:
            loss = self._replayed_step(stale)
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def _others_wait(self) -> bool:
        """Return whether the other ranks may have begun what waits for this one: a replay, or an
        exchange of keys.
        """
        shares_rows = self._ranks is not None and self._ranks.share_rows
        return self._graph is not None or shares_rows

    def _telling(
        self, has_begun: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[None]:
        """Return a context that tells the other ranks, if there are any, when the body raises."""
        return nullcontext() if self._ranks is None else self._ranks.telling(has_begun=has_begun)

    def average_gradients(self) -> None:
        """Average the gradients that the parameters have over the ranks, as each step does.

        For a step of your own in between, such as the last one of an epoch, which has fewer
        batches. All ranks call it. On one rank, or of sharded parameters, it does nothing.

        Raises:
            RuntimeError: another rank raised, or is gone.
        """
        if self._ranks is not None:
            with self._ranks.averaging(self._averaged()) as last_backward:
                with last_backward():
                    pass

    def _averaged(self) -> list[Tensor]:
        """Return the parameters whose gradients are averaged here."""
        if self._are_sharded:
            return []
        return [p for p in _all_parameters(self._optimizer) if p.requires_grad]

    def _begin_to_agree(
        self, stale: bool, of_other_size: str | None = None
    ) -> Callable[[], tuple[bool, str | None]]:
        """Return a function that lets this step be made as the other ranks do.

        That returns whether the graph of one is stale, and why a batch of one does not fit in it.
        """
        ranks = self._ranks
        if ranks is None:
            return lambda: (stale, of_other_size)
        plain = 0 if self._obstacle is None else 1 + ranks.rank
        skips = 0 if of_other_size is None else 1 + ranks.rank
        agreed = ranks.begin_to_agree([plain, stale, skips, *self._rooms])

        def finish() -> tuple[bool, str | None]:
            plain, any_stale, skips, *self._rooms = agreed()
            if plain and self._obstacle is None:
                self._give_up(f"rank {plain - 1} runs plain steps: its reason says why")
            of_others = f"a batch of rank {skips - 1} has another size" if skips else None
            return bool(any_stale), of_other_size or of_others

        return finish

    def _needed_rooms(self, given: Sequence[Sequence[Any] | None]) -> list[int]:
        """Return the room that each layout needs for the batches of a step, by their leaves; None
        stands for a batch like the example.
        """
        batches = zip(self._batches, given, strict=True)
        return functools.reduce(_larger, (batch.needed_rooms(leaves) for batch, leaves in batches))

    def _listed(self, batch: Any) -> Sequence[Any]:
        """Return the batches of a step."""
        if len(self._batches) == 1:
            return [batch]
        if not isinstance(batch, Sequence) or len(batch) != len(self._batches):
            raise ValueError(
                f"batch must be a list of accumulation = {len(self._batches)} batches, got "
                f"{f'{len(batch)} of them' if isinstance(batch, Sequence) else shown(batch)}"
            )
        return batch

    def _check(self, batches: Sequence[Any]) -> tuple[list[list[Any] | None], str | None]:
        """Return the leaves of each batch, None if it has other sizes than the example, and how
        they differ. In the first steps other sizes are an error: rows of no one shape gain nothing.
        """
        given: list[list[Any] | None] = []
        of_other_size = None
        for number, (static, one) in enumerate(zip(self._batches, batches, strict=True)):
            try:
                name = "batch" if len(batches) == 1 else f"batch[{number}]"
                given.append(static.check(one, name))
            except OtherSize as error:
                if self._plain_steps_left > 0:
                    raise ValueError(str(error)) from None
                given.append(None)
                of_other_size = of_other_size or str(error)
        return given, of_other_size

    def _give_up(self, obstacle: str) -> None:
        """Run plain steps from now on, because of an obstacle to a capture."""
        self._obstacle = obstacle
        self._graph = None
        for batch in self._batches:
            batch.mark_plain()

    def _plain_step(self, values: Sequence[Any] | None = None) -> Tensor:
        self._plain_steps_left = max(0, self._plain_steps_left - 1)
        self._optimizer.zero_grad(set_to_none=True)
        if self._stream is None:
            with _own_casts():
                return self._run(values)
        # Autograd remembers the stream of a parameter's first use; it must be the capture's.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _own_casts():
            loss = self._run(values)
        current.wait_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _run(self, values: Sequence[Any] | None = None) -> Tensor:
        """Run the step over these batches, by default the static ones; gradients must be None
        before.
        """
        if values is None:
            values = [batch.value for batch in self._batches]
        if self._ranks is None:
            loss = self._make_gradients(values, nullcontext)
            self._update()
            return loss
        with self._ranks.averaging(self._averaged()) as last_backward:
            loss = self._make_gradients(values, last_backward)
        with self._ranks.updating():
            self._update()
        return loss

    def _update(self) -> None:
        """Clip the gradients and step the optimizer."""
        if self._max_grad_norm is not None:
            parameters = _all_parameters(self._optimizer)
            norm: Any = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
            self._grad_norm = norm.full_tensor() if self._are_sharded else norm
        self._optimizer.step()

    def _make_gradients(self, values: Sequence[Any], around_last: LastBackward) -> Tensor:
        """Return the loss of all batches, with the last backward inside a context."""
        for batch in self._batches:
            batch.refill_block_masks()
        total: Tensor | None = None
        for number, value in enumerate(values, 1):
            with self._autocast_region():
                loss = _checked_loss(self._loss_fn(value))
            with around_last() if number == len(values) else nullcontext():
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _autocast_region(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    def _replayed_step(self, stale: bool) -> Tensor:
        for module in self._gathering:
            module.reshard()
        with self._telling(self._others_wait):
            for batch in self._batches:
                batch.fit(self._rooms)
        if stale or self._graph is None or not self._graph.has_room(self._rooms):
            if self._graph is not None:
                changed = "the optimizer's options, state or parameters changed"
                fuller = "a row has more sequences, or a plan more parts, than those before"
                with self._telling():
                    warnings.warn(
                        "GraphedStep captures anew, which takes longer than a step: "
                        f"{changed if stale else fuller}",
                        stacklevel=3,
                    )
            self._graph = None
            self._capture()
        if self._graph is None:
            return self._plain_step()
        self._graph.replay(self._optimizer)
        self._grad_norm = self._graph.grad_norm  # a plain step between replays has another
        return self._graph.loss.clone()

    def _capture(self) -> None:
        """Capture the step. Nothing of it runs: parameters and optimizer state stay as they are."""
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        cause: Exception | None = None
        in_run = False
        rates = [_as_rate(group["lr"], self._device) for group in self._optimizer.param_groups]
        try:
            with (
                _undone_if_it_fails(self._device) as pool,
                _capturable(self._optimizer, rates),
                _own_casts(),
                ExitStack() as promises,
                # Other threads may pin memory meanwhile, as DataLoader's does.
                torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
            ):
                for batch in self._batches:
                    promises.enter_context(batch.captured_for(self._rooms))
                in_run = True
                try:
                    loss = self._run()
                except Exception as error:
                    cause = error  # the end of the capture raises another
                    raise
            self._graph = _Graph(graph, loss, self._grad_norm, rates, self._optimizer, self._rooms)
        except Exception as error:
            self._optimizer.zero_grad(set_to_none=True)
            cause = cause or error
            self._give_up(f"the step cannot be captured: {type(cause).__name__}: {cause}")
            if self._ranks is not None and not in_run:
                self._ranks.tell(has_begun=False)
        self._begin_to_agree(stale=False)()


def _larger(rooms: list[int], others: list[int]) -> list[int]:
    return list(map(max, rooms, others))


def _checked_loss(loss: object) -> Tensor:
    """Return what `loss_fn` returned; raise unless it is a tensor of one value."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss_fn must return one value, got shape {list(loss.shape)}")
    return loss


class _Graph:
    """A captured step and what it took for constant."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        loss: Tensor,
        grad_norm: Tensor | None,
        rates: list[Tensor],
        optimizer: Optimizer,
        rooms: list[int],
    ):
        self.loss, self.grad_norm = loss, grad_norm
        self._rooms = rooms
        self._graph = graph
        # The learning rates are inputs of the graph, numbers on the host in the optimizer.
        self._rates = rates
        self._rates_now = [_number(group["lr"]) for group in optimizer.param_groups]
        self._state = optimizer.state
        self._options = _options(optimizer)
        self._parameters = _C.CapturedParameters(_parameters(optimizer))

    def has_room(self, rooms: list[int]) -> bool:
        """Return whether the capture had as much room in each layout."""
        return _larger(rooms, self._rooms) == self._rooms

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has the parameters, state and options of the capture."""
        return (
            optimizer.state is self._state
            and self._parameters.are(_parameters(optimizer))
            and _options(optimizer) == self._options
        )

    def replay(self, optimizer: Optimizer) -> None:
        """Run the step with the learning rates of now."""
        for number, group in enumerate(optimizer.param_groups):
            rate = _number(group["lr"])
            if isinstance(rate, Tensor):
                if rate is not self._rates[number]:
                    self._rates[number].copy_(rate, non_blocking=True)
            elif rate != self._rates_now[number]:
                self._rates[number].fill_(rate)
            self._rates_now[number] = rate
        self._graph.replay()
        self._parameters.set_gradients(_parameters(optimizer))


def _parameters(optimizer: Optimizer) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options that a captured step has in it as constants."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def _all_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in _parameters(optimizer) for p in group]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are numbers or words, as Python's, without its objects."""
    options = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in group.items()}
    plain = (bool, int, float, str, list, tuple, type(None))
    return {n: v for n, v in options.items() if isinstance(v, plain) and n != "params"}


def _number(rate: float | Tensor) -> float | Tensor:
    """Return a learning rate on the host as a number, one on the device as it is."""
    if isinstance(rate, Tensor) and rate.device.type == "cpu":
        return rate.item()
    return rate


def _as_rate(rate: float | Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device that a graph reads a learning rate from."""
    rate = _number(rate)
    return rate if isinstance(rate, Tensor) else torch.tensor(rate, device=device)


@contextlib.contextmanager
def _capturable(optimizer: Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Make the optimizer read its learning rates from tensors, and let it be captured."""
    names = ("lr", "capturable")
    before: list[dict[str, Any]] = [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Keep the casts of parameters that an autocast region of the caller caches out of the step.

    A cast from before the last update is stale, and a cast made in a capture is empty outside it.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _undone_if_it_fails(device: torch.device) -> Iterator[Any]:
    """Yield a memory pool for a capture on `device`; if the capture fails, undo what it began.

    PyTorch raises in `capture_end` if the capture was invalidated. It then leaves the stream of the
    capture current, the pool in use, and the generator of random numbers in capture mode, so that
    the next dropout raises.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()
        pool = torch.cuda.graph_pool_handle()
        try:
            yield pool
        except BaseException:
            torch.cuda.set_stream(current)
            try:
                torch._C._cuda_endAllocateToPool(device.index, pool)
            except RuntimeError:
                pass  # it is no longer in use: capture_end came to its end
            else:
                torch._C._cuda_releasePool(device.index, pool)
                generator.graphsafe_set_state(before)
            raise


def _device_of(optimizer: Optimizer) -> torch.device:
    devices = {p.device for p in _all_parameters(optimizer)}
    if len(devices) != 1:
        raise ValueError(
            "optimizer must have its parameters on one device, got them on "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    return devices.pop()


def _are_sharded(optimizer: Optimizer) -> bool:
    """Return whether the parameters are DTensors, whose module takes 37 MiB to import.

    Raises:
        ValueError: some are, and some are not.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    found = [isinstance(p, module.DTensor) for p in _all_parameters(optimizer)]
    if any(found) and not all(found):
        raise ValueError(
            "optimizer must have parameters that are all sharded or all whole, got "
            f"{sum(found)} of {len(found)} sharded"
        )
    return any(found)


def _obstacle(optimizer: Optimizer, device: torch.device, model: nn.Module | None) -> str | None:
    """Return why a step of the optimizer cannot be captured, or None."""
    if device.type != "cuda":
        return f"the parameters are on {device}, and CUDA graphs need a GPU"
    if model is None and _are_sharded(optimizer):
        return "the parameters are sharded, and model, the module that FSDP2 sharded, is not given"
    if not all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return (
            f"{type(optimizer).__name__} decides on the host: make it with fused=True or "
            "capturable=True"
        )
    return None
