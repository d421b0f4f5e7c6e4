"""Which line of the user's code a thread was at, and when.

torch.profiler can record the Python stack, but names a frame by the line of its `def`, and makes
traces many times as large. A trace function knows the line, and costs little in the frames that
it declines to follow.
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
    """Return the folders of code that is not the user's: cuseq, torch and what torch generates."""
    named = [os.path.dirname(torch.__file__)]
    for name in ("cuseq", "functorch", "triton"):
        spec = importlib.util.find_spec(name)
        named += [] if spec is None or spec.origin is None else [os.path.dirname(spec.origin)]
    named += [os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in named if folder)


_SKIPPED = _folders()
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")


def is_users(filename: str) -> bool:
    """Whether a code object's file is neither torch's, cuseq's, Python's nor generated."""
    if filename.startswith(("<frozen", "<eval_with_key")) or "torchinductor_" in filename:
        return False
    if filename.startswith(_STANDARD_LIBRARY):
        return any(f"/{name}/" in filename for name in _PACKAGES) and not filename.startswith(
            _SKIPPED
        )
    return not filename.startswith(_SKIPPED)


class LineLog:
    """Follows the thread that enters it: `at` says at which of the user's lines it was.

    The line is that of the innermost frame outside torch, cuseq and the standard library. Where
    another trace function is at work (a debugger, a coverage tool), it is left alone and `active`
    is False: then there are no lines.
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
            # So that a built-in function, which has no lines, has that of its caller.
            self._times.append(time.time_ns())
            self._places.append((frame.f_code, frame.f_lineno))
        sys.settrace(trace)
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            sys.settrace(None)

    def at(self, when: float) -> tuple[int, str] | None:
        """Since when the thread was at its line of that moment, and the line; ns of `time_ns`."""
        index = bisect.bisect_right(self._times, when) - 1
        if index < 0:
            return None
        return self._times[index], name_line(*self._places[index])


def _tracer(times: list[int], places: list[tuple[CodeType, int]]) -> Any:
    clock, known = time.time_ns, {}

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


def name_line(code: CodeType, line: int) -> str:
    """`file.py:123 in function`, the file relative to where packages or the program lie."""
    path = code.co_filename
    for folder in _PACKAGES:
        _, found, inside = path.rpartition(f"/{folder}/")
        if found:
            path = inside
            break
    else:
        path = path.removeprefix(os.path.join(os.getcwd(), ""))
    # Dynamo cuts functions at graph breaks and names the parts.
    name = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", code.co_name)
    return f"{path}:{line} in {name}"
