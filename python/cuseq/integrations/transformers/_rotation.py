"""Replacement of RoPE in modeling modules of transformers by `cuseq.apply_rope`.

A matching name is not enough. A module's rotation is replaced only if `cuseq.apply_rope` gives the
same numbers on a small input.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import cuseq
from cuseq.integrations.transformers._functions import (
    original_function,
    replace_function,
    restore_function,
)
from cuseq.integrations.transformers._layers import code_of, is_rotary_embedding
from cuseq.integrations.transformers.names import ROTATE, ROTATE_PARAMETERS

Rotate = Callable[..., tuple[Tensor, Tensor]]

_WITHOUT = "enable the model with rope=False, qk_norm=False"


@dataclass(frozen=True)
class Rotary:
    """How a model's rotation reads its tables of cosines and sines.

    Attributes:
        interleaved: as in `cuseq.apply_rope`.
        turns: number of rotated elements of a head for each column of the table, 1 or 2.
        first_half: whether only the first half of the columns is read.
    """

    interleaved: bool
    turns: int
    first_half: bool

    def arguments(self, cos: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of `apply_rope` for a table with one row per token."""
        width = cos.shape[-1]
        return dict(table="token", interleaved=self.interleaved, rotary_dim=width * self.turns)

    def columns(self, table: Tensor) -> Tensor:
        """Return the columns of a table that are read, contiguous in their last dimension."""
        if self.first_half:
            return table[..., : table.shape[-1] // 2]
        return (
            table if table.stride(-1) == 1 else table.contiguous()
        )  # GPT-OSS has a transposed table


# In order: halves with a full table, halves with a half table, neighbours with a full table,
# neighbours that read the first half of a full table (GLM), neighbours with a half table.
_ROTARIES = (
    Rotary(False, 1, False),
    Rotary(False, 2, False),
    Rotary(True, 1, False),
    Rotary(True, 1, True),
    Rotary(True, 2, False),
)


def find_rotaries(base: PreTrainedModel, layers: list[nn.Module]) -> dict[types.ModuleType, Rotary]:
    """Return how each modeling module rotates, found by comparison with the module's function.

    Raises:
        ValueError: a module rotates in a way that `cuseq.apply_rope` does not support.
    """
    rotaries = {}
    for code in dict.fromkeys(map(code_of, layers)):
        rotate = original_function(code, ROTATE)
        parameters = list(inspect.signature(rotate).parameters)
        if parameters != ROTATE_PARAMETERS:
            raise ValueError(
                f"{code.__name__}.{ROTATE} must take {ROTATE_PARAMETERS}, got {parameters}: "
                "is it of another release of transformers, or did another package replace it "
                "(Liger: rope=False)?"
            )
        layer = next(layer for layer in layers if code_of(layer) is code)
        try:
            rotaries[code] = _rotary_of(rotate, layer.head_dim, *_angles(base, layer))
        except (AttributeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{code.__name__}.{ROTATE} cannot be compared with cuseq.apply_rope "
                f"({type(error).__name__}: {error}): {_WITHOUT}"
            ) from error
    return rotaries


def _angles(base: PreTrainedModel, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a few rows of the model's own table for a layer, on the CPU."""
    code = code_of(layer)
    for module in base.modules():
        kind = type(module)
        if kind.__module__ != code.__name__ or not is_rotary_embedding(module):
            continue
        rotary = copy.deepcopy(module).cpu()
        rotary.__dict__.pop("forward", None)  # accelerate's forward moves tensors to the GPU
        options = {}
        if "layer_type" in inspect.signature(kind.forward).parameters:
            kinds = base.config.get_text_config().layer_types
            options["layer_type"] = kinds[layer.layer_idx]
        positions = torch.arange(7).unsqueeze(0)
        if hasattr(rotary, "mrope_section"):
            positions = positions.expand(3, 1, -1)
        return kind.forward(rotary, torch.zeros(1, 7, 1), positions, **options)
    raise ValueError(
        f"{code.__name__} has no rotary embedding among the model's modules: {_WITHOUT}"
    )


def _rotary_of(rotate: Rotate, head_dim: int, cos: Tensor, sin: Tensor) -> Rotary:
    q, k = (
        random_numbers(1, 3, cos.shape[1], head_dim),
        random_numbers(1, 2, cos.shape[1], head_dim),
    )
    expected = rotate(q, k, cos, sin)
    for rotary in _ROTARIES:
        if rotary.turns * cos.shape[-1] > head_dim:
            continue
        try:
            found = _rotated(rotary, q, k, cos, sin, "bhsd")
        except ValueError:
            continue  # the shape of the table does not fit this kind
        if agree(found, expected):
            return rotary
    raise ValueError(
        f"{rotate.__module__}.{ROTATE} rotates heads in a way that cuseq.apply_rope cannot: "
        f"{_WITHOUT}"
    )


def _rotated(
    rotary: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, qkv_format: str
) -> tuple[Tensor, Tensor]:
    return cuseq.apply_rope(
        q,
        k,
        rotary.columns(cos),
        rotary.columns(sin),
        qkv_format=qkv_format,
        **rotary.arguments(cos),
    )


def replace_rotation(code: types.ModuleType, rotary: Rotary) -> None:
    """Replace a modeling module's rotation on behalf of one more model."""
    replace_function(code, ROTATE, lambda original: _rotation(original, rotary))


def restore_rotations(codes: list[types.ModuleType]) -> None:
    """Undo one `replace_rotation` of each module; undoing the last restores the original."""
    for code in codes:
        restore_function(code, ROTATE)


def _rotation(original: Rotate, rotary: Rotary) -> Rotate:
    """Return the replacement of a modeling module's `apply_rotary_pos_emb`."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        known = q.device.type in ("cpu", "cuda") and q.dim() == 4 and cos.dim() == 3
        strided = q.stride(-1) != 1 or k.stride(-1) != 1
        if not known or strided or unsqueeze_dim not in (1, 2) or q.dtype != k.dtype:
            return original(q, k, cos, sin, unsqueeze_dim)
        return _rotated(rotary, q, k, cos, sin, "bhsd" if unsqueeze_dim == 1 else "bshd")

    return apply_rotary_pos_emb


def random_numbers(*shape: int) -> Tensor:
    """Return fixed normal fp32 numbers without a change of the user's random state."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator)


def agree(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Return whether each tensor equals the expected one up to fp32 rounding."""
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(found, expected, strict=True)
    )
