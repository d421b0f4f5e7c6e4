"""Process groups: their names, and the device that their collectives use."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.distributed import ProcessGroup

from cuseq._arguments import shown


def check_group(group: Any) -> None:
    """Raise TypeError unless `group` is a process group or None."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, got {shown(group)}")


def name_of(group: ProcessGroup | str | None) -> str | None:
    """Return the name by which any process of the group finds it; None for the default group."""
    if isinstance(group, str):
        return group
    check_group(group)
    return None if group is None else group.group_name


def name_or_default(name: str | None) -> str:
    """Return the name, or for None that of the default group; empty if there is no such group."""
    if name is not None:
        return name
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    return "" if world is None else world.group_name


def device_of(group: ProcessGroup | None, preferred: str) -> str:
    """Return the device type for a group's collectives: the CPU if the group supports it."""
    config = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in config.split(",")]
    return min(devices, key=lambda device: {"cpu": 0, preferred: 1}.get(device, inf))
