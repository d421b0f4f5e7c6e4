"""Process groups: their names, and the device that their collectives use."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.distributed import ProcessGroup

from cuseq._base.arguments import shown


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
    """Return the device type for a group's collectives: the CPU if the group supports it.

    Raises:
        ValueError: there is no such group.
    """
    devices = _backends(group)
    return min(devices, key=lambda device: {"cpu": 0, preferred: 1}.get(device, inf))


def device_without_wait(group: ProcessGroup | None) -> str:
    """Return the device type for collectives that the host need not wait for.

    It is that of the first backend of a device alone (NCCL, or another vendor's), else the CPU. It
    follows from the group, so all ranks choose alike, whatever tensors they hold.

    Raises:
        ValueError: there is no such group.
    """
    backends = _backends(group)
    return next((device for device, name in backends.items() if name != backends.get("cpu")), "cpu")


def _backends(group: ProcessGroup | None) -> dict[str, str]:
    """Return a group's backends by device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    try:
        config = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    except (TypeError, ValueError) as error:
        # torch names neither the argument nor, for a destroyed group, the reason.
        name = "None, the default group" if group is None else shown(group)
        raise ValueError(
            "group must be made by init_process_group or new_group and not be destroyed, got "
            f"{name}: {error}"
        ) from error
    pairs = (entry.partition(":") for entry in config.split(","))
    return {device: backend for device, _, backend in pairs}
