"""Import of files of examples/ and scripts/, which are no packages, and runs of examples."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def script(name: str) -> ModuleType:
    """Return the module scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Import examples/NAME.py, and the modules that it shares, until the end of the block."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
        for other in set(sys.modules) - before:
            if (EXAMPLES / f"{other}.py").exists():
                del sys.modules[other]


def logged(folder: Path, name: str) -> list[Any]:
    """Return what a run of Trainer's logged by a name, as its newest checkpoint has it."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda one: int(one.parent.name.split("-")[1]))
    return [log[name] for log in json.loads(newest.read_text())["log_history"] if name in log]


def run(name: str, *options: object) -> None:
    """Run examples/NAME.py in this process."""
    argv = [f"{name}.py", *map(str, options)]
    with imported(name) as module, mock.patch.object(sys, "argv", argv):
        module.main()
