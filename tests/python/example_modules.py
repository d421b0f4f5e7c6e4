"""Import of files of examples/, which is not a package, and runs of their main function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def run(name: str, *options: object) -> None:
    """Run examples/NAME.py in this process."""
    argv = [f"{name}.py", *map(str, options)]
    with imported(name) as module, mock.patch.object(sys, "argv", argv):
        module.main()
