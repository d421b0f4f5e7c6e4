"""Measure for how much of a step a GPU does nothing but communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

import torch
from torch.autograd import DeviceType

Result = TypeVar("Result")
Span = tuple[str, float, float]  # a kernel's or a copy's name, its begin and its end

FIRST, EVERY = 3, 100  # steps: the first ones compile and allocate; a profile slows its step down


def is_profiled(step: int) -> bool:
    """Return whether the step with this number, counted from 1, is one that is profiled."""
    return step >= FIRST and (step - FIRST) % EVERY == 0


def profiled(run: Callable[[], Result]) -> tuple[Result, float | None]:
    """Run a step under torch.profiler; return its result and `exposed_share`. Waits for the GPU
    before and after.
    """
    _start_profiler()
    with _profile() as profiler:
        result = run()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return result, exposed_share(spans)


@lru_cache(maxsize=1)
def _start_profiler() -> None:
    """Make a first profile, which may miss events because it also starts CUPTI."""
    with _profile():
        torch.cuda.synchronize()


def _profile() -> torch.profiler.profile:
    torch.cuda.synchronize()  # so that no work of earlier steps is in it
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events it warns that it keeps one cycle only, which is all there is.
    return torch.profiler.profile(activities=activities, acc_events=True)


def exposed_share(spans: Iterable[Span]) -> float | None:
    """Return the share of the time from the first begin to the last end in which only collectives
    ran; None without spans.
    """
    spans = list(spans)
    if not spans:
        return None
    whole = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    others = [span for span in spans if "nccl" not in span[0].lower()]
    return (_covered(spans) - _covered(others)) / whole if whole > 0 else 0.0


def _covered(spans: list[Span]) -> float:
    """Return the time that any of the spans covers."""
    total, until = 0.0, float("-inf")
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
