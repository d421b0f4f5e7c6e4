"""`check_same_on_ranks`, which stops ranks that were started differently."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from cuseq._base.arguments import shown
from cuseq.distributed._groups import check_group, device_of


def check_same_on_ranks(facts: Mapping[str, object], group: ProcessGroup | None = None) -> None:
    """Raise on all ranks if they do not have the same facts, such as their options or seeds.

    Ranks that differ train a model of nobody's choice, or wait for each other forever. Call it once
    before training, on all ranks of the group: it costs one `all_gather_object`, which over NCCL
    alone waits for the GPU. A process without a process group has nothing to compare.

    Args:
        facts: values by name. They are compared by their `repr`, which must say all that matters.
        group: the process group; default all ranks.

    Raises:
        ValueError: a fact differs, or a rank lacks it, with its name and both values; or the group
            was destroyed.
        TypeError: `facts` is not a mapping, or `group` not a process group or None.

    Examples:
        >>> cuseq.distributed.check_same_on_ranks({"seed": 0, "rate": 3e-4})  # doctest: +SKIP
    """
    if not isinstance(facts, Mapping):
        raise TypeError(f"facts must be a mapping of names to values, got {shown(facts)}")
    check_group(group)
    if group is None and not dist.is_initialized():
        return
    device_of(group, "cpu")  # raises if there is no such group
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: repr(fact) for name, fact in facts.items()}, group)
    for rank, others in enumerate(everyone):
        for name in everyone[0] | others:
            first, other = everyone[0].get(name, "nothing"), others.get(name, "nothing")
            if first != other:
                raise ValueError(
                    f"{name} must be the same on all ranks of group, got {first} on rank 0 and "
                    f"{other} on rank {rank}"
                )
