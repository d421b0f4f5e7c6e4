"""Test which kernels of other packages a recurrence may use."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from cuseq.integrations.transformers.hybrids import kernels  # noqa: E402


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "expected"),
    [
        ((9, 0), "3.3.1", False, False),
        ((9, 0), "3.4.0", False, True),
        ((9, 0), "3.7.0", False, True),
        ((9, 0), "3.7.1", False, False),
        ((9, 0), "3.6.0", True, False),
        ((8, 0), "3.6.0", False, False),
        ((9, 0), None, False, False),
    ],
)
def test_gated_kernels_train_where_their_gradients_are_right(
    capability, triton, tilelang, expected, monkeypatch
):
    found = object() if tilelang else None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: found)
    installed = None if triton is None else SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", installed)
    wrong = kernels._gated_backward_raises.__wrapped__
    assert wrong(0) is expected
    monkeypatch.setattr(kernels, "_gated_backward_raises", wrong)
    monkeypatch.setattr(kernels, "_imported", lambda kernel: kernel.name)
    frozen, trained = (
        SimpleNamespace(is_cuda=True, requires_grad=trains, get_device=lambda: 0)
        for trains in (False, True)
    )
    for kernel in (kernels.GATED_DELTA_RULE, kernels.GATED_LINEAR_ATTENTION):
        assert kernel.function(trained) == (None if expected else kernel.name)
        assert kernel.function(frozen, trained) == (None if expected else kernel.name)
        assert kernel.function(frozen, frozen) == kernel.name
        with torch.no_grad():
            assert kernel.function(trained) == kernel.name
    for kernel in (kernels.KIMI_DELTA_ATTENTION, kernels.LINEAR_ATTENTION):
        assert kernel.function(trained) == kernel.name
