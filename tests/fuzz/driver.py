"""Makes the calls one after the other, in a child process that may die, and reports findings."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANGS_AFTER = 60.0  # seconds for one call
STARTS_WITHIN = 300.0  # seconds, for the child's imports
MARK = "fuzz: "  # of the child's own lines: what is called may print too
NOT_STARTED = struct.pack("q", -1)
ROOM = 3 << 30  # bytes that the child may ask for beyond what it has after its imports
OUT_OF_MEMORY = "out of memory"
COUNT_EVERY = 1000  # calls
SYNCHRONIZE_EVERY = 50  # calls, on a GPU
# Functions that use no device.
HOST_ONLY = (
    "cuseq.PackingCollator",
    "cuseq.data.Pack",
    "cuseq.data.bin_pack",
    "cuseq.data.pack_groups",
    "cuseq.data.split_by_tokens",
)


@dataclass(frozen=True)
class Options:
    seed: int = 0
    first: int = 0
    calls: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    only: str = ""
    planted: bool = False

    def command(self, **changed: Any) -> list[str]:
        parts = [sys.executable, "-m", "tests.fuzz"]
        for name, value in {**vars(self), **changed}.items():
            if value is True:
                parts.append(f"--{name}")
            elif value not in (None, "", False):
                parts += [f"--{name}", str(value)]
        return parts


@dataclass
class Report:
    """What a run found."""

    calls: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, finding: dict[str, Any]) -> bool:
        """Count a finding; True for the first one of its kind."""
        kind = f"{finding['target']}: {re.sub(r'-?[0-9][-+.e0-9]*', '#', finding['what'])[:160]}"
        first = kind not in self.findings
        self.findings.setdefault(kind, {**finding, "times": 0})["times"] += 1
        return first


# --------------------------------------------------------------------------- the child


def run_calls(options: Options, progress: mmap.mmap) -> None:
    """Make the calls and write one JSON line for each finding, and a last one with the counts."""
    warnings.simplefilter("ignore")
    import torch

    from tests.fuzz import planted
    from tests.fuzz.calls import TARGETS
    from tests.fuzz.values import Draw

    torch.set_num_threads(1)
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)
    if options.planted:
        planted.plant()
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pass  # it reserves addresses for all of memory, and limits allocations by itself
    elif options.device == "cpu":
        _limit_memory()
    else:
        torch.cuda.set_per_process_memory_fraction(0.2)
    targets = [t for t in TARGETS.values() if re.search(options.only, t.name)]
    if options.device != "cpu":  # without _limit_memory(), a huge plan on the host takes minutes
        targets = [t for t in targets if not t.name.startswith(HOST_ONLY)]
    weights = [target.weight for target in targets]
    draw = Draw(options.device)
    outcomes: Counter[str] = Counter()
    end = None if options.seconds is None else time.monotonic() + options.seconds
    number = options.first
    while options.calls is None or number < options.first + options.calls:
        if end is not None and number % 64 == 0 and time.monotonic() > end:
            break
        progress[:8] = struct.pack("q", number)
        draw.begin(options.seed, number)
        (target,) = draw.choices(targets, weights)
        outcome, what, arguments = _one_call(target, draw)
        outcomes[outcome] += 1
        if what is not None:
            _say({"number": number, "target": target.name, "what": what, "arguments": arguments})
        number += 1
        if number % COUNT_EVERY == 0:  # a later crash must not lose them
            _say({"outcomes": outcomes})
            outcomes = Counter()
        if options.device != "cpu" and number % SYNCHRONIZE_EVERY == 0:
            torch.cuda.synchronize()
    if options.device != "cpu":
        torch.cuda.synchronize()
    _say({"done": number - options.first, "outcomes": outcomes})


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _say(line: dict[str, Any]) -> None:
    print(MARK + json.dumps(line), flush=True)


def _one_call(target: Any, draw: Any) -> tuple[str, str | None, str | None]:
    """Return the outcome of a call, and what is wrong with it."""
    from tests.fuzz import judge, values, ways

    make = target.maker(draw)
    try:
        arguments = target.make(draw)
    except Exception as error:
        return "not made", f"making right arguments: {type(error).__name__}: {error}", None
    bends = draw.choices((0, 1, 2, 4), (30, 48, 17, 5))[0]
    bendable = [name for name in arguments if name != "self"]
    bends = bends if bendable else 0
    right = bends == 0 and not target.wrong
    if right and draw.chance(0.4):
        what = ways.try_one(draw, target, make)
        outcome = "right in another way" if what is None else "wrong"
        return outcome, what, what and describe(arguments)
    for _ in range(bends):
        name = draw.choice(bendable)
        arguments[name] = _bent(target, draw, arguments[name])
    if bends and draw.chance(0.03):
        values.clear_while_read(draw, arguments)
    try:
        result = target.call(arguments)
    except Exception as error:
        what = judge.complaint(error, target.names, changed=draw.restless)
        if right:
            what = f"right arguments are refused: {type(error).__name__}: {error}"
        return f"refused {type(error).__name__}", what, what and describe(arguments)
    if target.check is None or target.wrong or draw.restless:
        return "returned", None, None
    try:
        target.check(arguments, result)
    except AssertionError as error:
        return "wrong", f"wrong value: {error}", describe(arguments)
    except Exception as error:
        if right:
            return "wrong", f"no judgement of right arguments: {error!r}", describe(arguments)
        return "returned", None, None
    return "right" if right else "checked", None, None


def _bent(target: Any, draw: Any, value: Any) -> Any:
    from tests.fuzz import values

    try:
        return (values.same_kind if target.typed else values.any_kind)(draw, value)
    except Exception:  # no such tensor can be made
        return value


def describe(arguments: dict[str, Any]) -> str:
    """Describe arguments in words, tensors by dtype, shape, strides and a few numbers."""
    return ", ".join(f"{name}={_described(value)}" for name, value in arguments.items())


def _described(value: Any) -> str:
    import torch

    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        return f"[{', '.join(map(_described, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)[:200]
    from tests.fuzz.values import readable

    try:
        numbers = value.tolist() if readable(value) and value.numel() <= 12 else "..."
        text = f"{value.dtype} {list(value.shape)} strides {value.stride()} {value.device}"
        return f"<{text} {numbers}>"
    except Exception:
        return f"<{value.dtype} {value.layout} tensor>"


# --------------------------------------------------------------------------- the parent


def fuzz(options: Options, verbose: bool = True) -> Report:
    """Run children until all calls are made; one that dies is a finding, the next goes on."""
    report, begun, first = Report(), time.monotonic(), options.first
    end = None if options.calls is None else options.first + options.calls
    while end is None or first < end:
        left = None if options.seconds is None else options.seconds - (time.monotonic() - begun)
        if left is not None and left <= 0:
            break
        part = Options(**{**vars(options), "first": first, "seconds": left})
        part = part if end is None else Options(**{**vars(part), "calls": end - first})
        at, fate = _child(part, report, verbose)
        report.calls += at - first + (fate is not None)
        if fate is None:
            break
        first = at + 1
        if fate == OUT_OF_MEMORY:
            continue
        finding = {"number": at, "target": "(a call)", "what": fate, "arguments": None}
        if report.add(finding) and verbose:
            _print(finding, options)
    report.seconds = time.monotonic() - begun
    return report


def _child(options: Options, report: Report, verbose: bool) -> tuple[int, str | None]:
    """Run a child; return the number of the call that it reached, and how it died if it did."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile("w+b") as errors:
        file.write(NOT_STARTED)
        file.flush()
        progress = mmap.mmap(file.fileno(), 8)
        child = subprocess.Popen(
            [*options.command(), "--child", file.name],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        )
        last: dict[str, Any] = {}
        fate = None
        for line in _lines(child, progress):
            if line is None:
                child.send_signal(signal.SIGKILL)
                fate = f"hang: no answer in {HANGS_AFTER:.0f} s"
                break
            if not line.startswith(MARK.encode()):
                continue
            last = json.loads(line.removeprefix(MARK.encode()))
            report.outcomes.update(last.get("outcomes", {}))
            if "target" in last and report.add(last) and verbose:
                _print(last, options)
        code = child.wait()
        at = struct.unpack("q", progress[:8])[0]
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if verbose:
        sys.stderr.write(said)
    if "done" in last:
        return options.first + last["done"], None
    if at < 0 or (fate is None and code > 0):
        raise RuntimeError(f"the fuzzer itself failed at call {at}: see the traceback above")
    return at, fate or _crash(signal.Signals(-code).name, said)


def _crash(name: str, said: str) -> str:
    """Return what is wrong with a call that ended the process, by what it wrote to stderr."""
    # A `new` of too much memory cannot raise under AddressSanitizer.
    if re.search("AddressSanitizer: (allocation-size-too-big|out-of-memory)", said):
        return OUT_OF_MEMORY
    report = re.search("AddressSanitizer: .*", said)
    return f"crash: the process ended with {name} {report[0] if report else ''}".strip()


def _lines(child: subprocess.Popen[bytes], progress: mmap.mmap) -> Iterator[bytes | None]:
    """Yield the lines of the child's output, and None if one call takes too long."""
    pending, seen, since = b"", progress[:8], time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1.0):
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                yield from lines
            if progress[:8] != seen:
                seen, since = progress[:8], time.monotonic()
            elif time.monotonic() - since > (STARTS_WITHIN if seen == NOT_STARTED else HANGS_AFTER):
                yield None


def _print(finding: dict[str, Any], options: Options) -> None:
    again = ["python", *options.command(first=finding["number"], calls=1, seconds=None)[1:]]
    print(f"{finding['target']}: {' '.join(finding['what'].split())[:600]}")
    if finding["arguments"]:
        print(f"  with {finding['arguments']}")
    print(f"  {' '.join(again)}", flush=True)
