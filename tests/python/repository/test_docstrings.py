"""Test that every public name has a docstring whose example runs as printed."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cuseq

MODULES = [cuseq, cuseq.data, cuseq.ops, cuseq.cache, cuseq.distributed, cuseq.vision]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each public function and class, each once."""
    seen = set()
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or callable(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(public_objects())


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_docstring_runs(name):
    docstring = inspect.getdoc(PUBLIC[name])
    assert docstring, f"{name} has no docstring"
    names = {"cuseq": cuseq, "torch": torch, "PackedLayout": cuseq.PackedLayout}
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert example.examples, f"the docstring of {name} has no example (>>>)"
    output: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    result = runner.run(example, out=output.append)
    assert result.failed == 0, "".join(output)


def test_a_wrong_example_is_found():
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(example, out=lambda text: None).failed == 1
