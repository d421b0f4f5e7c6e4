"""Record which line of the user's code a thread ran, and when.

torch.profiler can record the Python stack, but names a frame by the line of its `def`, and its
traces become many times as large. A trace function knows the line, and costs little in frames that
it does not follow.
"""

from __future__ import annotations

import bisect
import importlib.util
import os
import re
import sys
import sysconfig
import time
from types import CodeType, FrameType
from typing import Any

import torch

_PACKAGES = ("site-packages", "dist-packages")


def _folders() -> tuple[str, ...]:
    """Return the folders of code that is not the user's: cuseq, torch and generated code."""
    named = [os.path.dirname(torch.__file__)]
    for name in ("cuseq", "functorch", "triton"):
        spec = importlib.util.find_spec(name)
        named += [] if spec is None or spec.origin is None else [os.path.dirname(spec.origin)]
    named += [os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in named if folder)


_SKIPPED = _folders()
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")


def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not torch's, cuseq's, Python's or generated."""
    if filename.startswith(("<frozen", "<eval_with_key")) or "torchinductor_" in filename:
        return False
    if filename.startswith(_STANDARD_LIBRARY):
        return any(f"/{name}/" in filename for name in _PACKAGES) and not filename.startswith(
            _SKIPPED
        )
    return not filename.startswith(_SKIPPED)


class LineLog:
    """Context manager that records the lines of the thread that enters it; `at` looks one up.

    The line is that of the innermost frame outside torch, cuseq and the standard library. If
    another trace function is installed (a debugger, a coverage tool), it is left alone, `active` is
    False and no lines are recorded.
    """

    def __init__(self) -> None:
        self.active = False
        self._times: list[int] = []
        self._places: list[tuple[CodeType, int]] = []

    def __enter__(self) -> LineLog:
        if sys.gettrace() is not None:
            return self
        self.active = True
        trace = _tracer(self._times, self._places)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            # A built-in function has no lines; it gets the line of its caller.
            self._times.append(time.time_ns())
            self._places.append((frame.f_code, frame.f_lineno))
        sys.settrace(trace)
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            sys.settrace(None)

    def at(self, when: float) -> tuple[int, str] | None:
        """Return the line the thread was at, and since when; times in ns of `time_ns`."""
        index = bisect.bisect_right(self._times, when) - 1
        if index < 0:
            return None
        return self._times[index], name_line(*self._places[index])


def _tracer(times: list[int], places: list[tuple[CodeType, int]]) -> Any:
    clock = time.time_ns
    known: dict[str, bool] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        back: FrameType | None = frame.f_back if event == "return" else frame
        while back is not None:
            filename = back.f_code.co_filename
            users = known.get(filename)
            if users is None:
                users = known[filename] = is_users(filename)
            if users:
                times.append(clock())
                places.append((back.f_code, back.f_lineno))
                break
            if event != "return":
                return None
            back = back.f_back
        return trace

    return trace


def shown_path(path: str) -> str:
    """Return a file's path relative to the packages folder or working folder."""
    for folder in _PACKAGES:
        _, found, inside = path.rpartition(f"/{folder}/")
        if found:
            return inside
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def name_line(code: CodeType, line: int) -> str:
    """Return `file.py:123 in function`."""
    # Dynamo splits functions at graph breaks and names the parts.
    name = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", code.co_name)
    return f"{shown_path(code.co_filename)}:{line} in {name}"
