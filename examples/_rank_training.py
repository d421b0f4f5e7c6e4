"""Train one model on all ranks: the step, the state that a checkpoint holds, and the loop."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from _mesh import Ranks
from _modes import Batch
from _updates import AdamW, clip_grad_norm
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import cuseq

FINAL_RATE = 0.1  # the last learning rate over the highest
HOST_KEYS = ("tokens", "pairs")  # of a batch, not for the model


class Trained:
    """A model, its optimizer and its random numbers.

    Args:
        model: from `make_model`.
        ranks: this rank's place.
        options: of the run.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, options: argparse.Namespace):
        self._ranks = ranks
        self._options = options
        self.model: nn.Module = model if options.shard else replicate(model, ranks.device)
        self.optimizer = AdamW(
            model.parameters(), lr=options.learning_rate, fused=ranks.device.type == "cuda"
        )

    def step(self, batches: list[Batch], number: int) -> torch.Tensor:
        """Make optimizer step `number`, counted from 0.

        Returns:
            float64 [4] on the device: this rank's part of the loss, its tokens without padding, its
            query-key pairs, and the norm of all gradients before clipping. Never waits for the
            device.
        """
        on_device = [_to_device(batch, self._ranks.device) for batch in batches]
        kept = cuseq.distributed.ContextParallel.num_items(on_device)
        loss = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for number_in_step, batch in enumerate(on_device, 1):
            inputs = {key: value for key, value in batch.items() if key not in HOST_KEYS}
            with self._precision(), self._reduction(is_last=number_in_step == len(on_device)):
                # The sum of the token losses over the kept labels of all ranks.
                part = self.model(**inputs, num_items_in_batch=kept, use_cache=False).loss
            (part * self._ranks.world_size).backward()  # FSDP2 and DDP average over the ranks
            loss += part.detach()
        norm = clip_grad_norm(self.model.parameters(), self._options.max_grad_norm)
        rate = self._options.learning_rate * rate_at(
            number, self._options.steps, self._options.lr_warmup
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        counts = (sum(batch[key] for batch in batches) for key in HOST_KEYS)
        return torch.stack([loss, *(loss.new_full((), n) for n in counts), norm.double()])

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the region of a forward; FSDP2 has its own policy."""
        if self._options.shard or self._options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._ranks.device.type, torch.bfloat16)

    def _reduction(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the region of a forward whose gradients DDP averages if it is a step's last."""
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def state_dict(self, random: bool = True) -> dict[str, Any]:
        """Return the state of model and optimizer, sharded or whole, and of this rank's random
        numbers.

        Args:
            random: False leaves out the random numbers, of which each rank has its own.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        return state | ({f"random-{self._ranks.rank}": self._random()} if random else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        random = state.get(f"random-{self._ranks.rank}")
        if random is not None:
            torch.set_rng_state(random["host"])
            if "device" in random:
                torch.cuda.set_rng_state(random["device"], self._ranks.device)

    def _random(self) -> dict[str, torch.Tensor]:
        random = {"host": torch.get_rng_state()}
        if self._ranks.device.type == "cuda":
            random["device"] = torch.cuda.get_rng_state(self._ranks.device)
        return random


def replicate(model: PreTrainedModel, device: torch.device) -> DistributedDataParallel:
    """Return the model with gradients that are averaged over all ranks during the backward."""
    # Dynamo would cut each compiled layer where a bucket of gradients ends.
    torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(
        model,
        device_ids=None if device.index is None else [device.index],
        # Each rank's are its own: rotations that follow the longest position keep theirs there.
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate: a line up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {
        key: value.to(device, non_blocking=True) if hasattr(value, "to") else value
        for key, value in batch.items()
    }


class StopRequest:
    """Whether some rank got SIGTERM or SIGINT, agreed on by all ranks in each step.

    Signals come to ranks in different steps. All ranks have to stop after the same one.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals instead of ending at once."""
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._note) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def start(self) -> tuple[torch.Tensor, dist.Work]:
        """Begin to ask all ranks, while the step runs."""
        asked = torch.tensor(0 if self.signal is None else 1)
        work = dist.all_reduce(
            asked, dist.ReduceOp.MAX, group=self._ranks.host_group, async_op=True
        )
        return asked, work

    @staticmethod
    def answer(question: tuple[torch.Tensor, dist.Work]) -> bool:
        asked, work = question
        work.wait()
        return bool(asked)
