"""Measure time, peak memory and synchronisations of training steps without stalling them."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Mark = Any  # host time in seconds, or a torch.cuda.Event

SYNCHRONISING_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
)
HOST_READS = ("aten::item", "aten::_local_scalar_dense")
DEVICE_TO_HOST = "Memcpy DtoH"


class Clock:
    """Marks points in the device's work. On CUDA a mark is an event, which does not stall."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the device; afterwards, earlier marks can be compared."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            return start.elapsed_time(end) / 1e3
        return end - start


class PeakMemory:
    """Peak memory since `start()`: of CUDA's allocator, or on Linux the growth of the process.

    The growth of the process includes memory that malloc keeps, so it is less exact than CUDA's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: int | None = 0

    def start(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._base = _reset_peak_rss()

    def bytes(self) -> int | None:
        """Return the peak in bytes; None if the system does not report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return None if self._base is None else _status_bytes("VmHWM") - self._base


def _reset_peak_rss() -> int | None:
    """Reset the kernel's high-water mark of this process and return its current memory."""
    if sys.platform != "linux":
        return None
    try:
        # Return memory freed by an earlier mode to the system; it would hide the next mode's
        # growth.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except (OSError, AttributeError):  # a sandbox without /proc, or a libc without malloc_trim
        return None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def count_synchronisations(step: Callable[[], object]) -> dict[str, int]:
    """Run `step` on CUDA under the profiler and count what makes the host wait in it.

    Returns:
        Counts by name: CUDA's synchronising calls, copies from device to host, and reads of a
            tensor's value.
    """
    window_name = "counted_step"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        torch.cuda.synchronize()
        with torch.profiler.record_function(window_name):
            step()
        torch.cuda.synchronize()
    events = list(profiler.events())
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    window = next(event.time_range for event in on_host if event.name == window_name)
    calls = Counter(
        event.name for event in on_host if window.start <= event.time_range.start <= window.end
    )
    # The copies run on the device, possibly after the host has left the window.
    copies = sum(event.name.startswith(DEVICE_TO_HOST) for event in events)
    counts = {name: calls[name] for name in SYNCHRONISING_CALLS + HOST_READS}
    return {**counts, DEVICE_TO_HOST: copies}


def waits(counts: dict[str, int]) -> int:
    """Return how often the host waited; a copy or read that waits appears among these calls."""
    return sum(counts[name] for name in SYNCHRONISING_CALLS)
