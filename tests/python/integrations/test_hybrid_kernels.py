"""Test which kernels of other packages a recurrence may use."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from cuseq.integrations.transformers.hybrids import kernels  # noqa: E402


@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False),
        ((8, 0), "3.6.0", False),
        ((9, 0), None, False),
    ],
)
@pytest.mark.parametrize("tilelang", [False, True])
def test_gated_kernels_train_where_their_gradients_are_right(
    capability, triton, expected, tilelang, monkeypatch
):
    found = object() if tilelang else None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: found)
    installed = None if triton is None else SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", installed)
    for name in ("_gated_backward_raises", "_has_tilelang"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).__wrapped__)
    monkeypatch.setattr(kernels, "_imported", lambda kernel: kernel.name)
    assert kernels._gated_backward_raises(0) is expected

    def rows(trains: bool, dtype: torch.dtype) -> SimpleNamespace:
        return SimpleNamespace(
            is_cuda=True, requires_grad=trains, dtype=dtype, get_device=lambda: 0
        )

    for dtype in (torch.bfloat16, torch.float32):
        frozen, trained = rows(False, dtype), rows(True, dtype)
        for kernel in (kernels.GATED_DELTA_RULE, kernels.GATED_LINEAR_ATTENTION):
            # Of the latter, tilelang takes rows of float32 alone.
            taken = kernel is kernels.GATED_DELTA_RULE or dtype is torch.float32
            raises = expected and not (tilelang and taken)
            assert kernel.function(trained) == (None if raises else kernel.name)
            assert kernel.function(frozen, trained) == (None if raises else kernel.name)
            assert kernel.function(frozen, frozen) == kernel.name
            with torch.no_grad():
                assert kernel.function(trained) == kernel.name
        for kernel in (kernels.KIMI_DELTA_ATTENTION, kernels.LINEAR_ATTENTION):
            assert kernel.function(trained) == kernel.name
    with mock.patch.object(torch, "is_autocast_enabled", lambda device: True):
        taken = kernels.GATED_LINEAR_ATTENTION.function(rows(True, torch.float32))
        assert taken == (None if expected else "chunk_simple_gla")
