"""Load fla's functions for chunks from its file, without Triton and without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch


def load_fla_index() -> ModuleType | None:
    """Return `fla.ops.utils.index`; None if fla is not installed.

    Importing fla needs Triton with a driver. These functions need only its `cdiv`, so stand-ins
    take the place of Triton and of `fla.utils`.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "ops" / "utils" / "index.py"
    spec = importlib.util.spec_from_file_location("fla_index_of_tests", path)
    index = importlib.util.module_from_spec(spec)
    language = SimpleNamespace(constexpr=int)
    triton = SimpleNamespace(
        autotune=lambda *args, **options: lambda kernel: kernel,
        jit=lambda kernel: kernel,
        Config=lambda *args, **options: None,
        cdiv=lambda a, b: (a + b - 1) // b,
        language=language,
    )
    utils = SimpleNamespace(tensor_cache=lambda function: function, autotune_cache_kwargs={})
    modules = {"triton": triton, "triton.language": language, "fla.utils": utils}
    with patch.dict(sys.modules, modules):
        spec.loader.exec_module(index)
    return index
