"""Small vision towers of the installed transformers, with weights at which attention matters."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import torch
import transformers

GRIDS = torch.tensor([[1, 4, 6], [1, 8, 4], [2, 4, 4], [1, 2, 2]])
FAMILIES = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
}
_SMALL = dict(
    depth=2, num_hidden_layers=2, hidden_size=64, embed_dim=64, intermediate_size=64, num_heads=4,
    num_attention_heads=4, num_key_value_heads=4, patch_size=4, out_hidden_size=64,
    fullatt_block_indexes=[1], window_size=16, deepstack_visual_indexes=[0],
)  # fmt: skip

_OWN = {"lfm3_vl": dict(layer_types=["conv", "full_attention"])}
# Dots3 describes each of its 42 layers, and Inkling 2 takes patches of several sizes.
_LEFT_OUT = ("dots3_note", "inkling2")


def installed_towers() -> list[tuple[str, str]]:
    """Return the families whose towers loop over images, and their models of vision.

    A tower with other arguments than pixels and grids is left out.
    """
    found = []
    root = os.path.dirname(transformers.models.__file__)
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name, f"modeling_{name}.py")
        if not os.path.exists(path) or name in _LEFT_OUT:
            continue
        with open(path) as file:
            code = file.read()
        if "lengths.tolist()" not in code or "is_flash_attention_requested" not in code:
            continue
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for kind, cls in vars(module).items():
            if (
                not inspect.isclass(cls)
                or cls.__module__ != module.__name__
                or "Vision" not in kind
            ):
                continue
            if issubclass(cls, transformers.PreTrainedModel):
                needed = [
                    one.name
                    for one in inspect.signature(cls.forward).parameters.values()
                    if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
                ]
                if len(needed) == 3 and needed[2] in ("grid_thw", "image_grid_thw"):
                    found.append((name, kind))
    return found


def make_tower(
    family: str | tuple[str, str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> torch.nn.Module:
    """Return a tower of a family, or of a family and its class."""
    name, kind = (family, FAMILIES[family]) if isinstance(family, str) else family
    cls = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)
    known: set[str] = set()
    for one in cls.config_class.__mro__:
        known |= set(getattr(one, "__annotations__", {}))
    known |= set(inspect.signature(cls.config_class.__init__).parameters)
    options = {key: value for key, value in _SMALL.items() if key in known}
    config = cls.config_class(**options | _OWN.get(name, {}))
    torch.manual_seed(0)
    tower = cls._from_config(config, dtype=dtype, attn_implementation="sdpa").to(device)
    with torch.no_grad():
        for weight in tower.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return tower


def pixels_of(tower: Any, grids: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the patches of images, in the shape that the tower takes."""
    torch.manual_seed(1)
    config, patches = tower.config, int(grids.prod(1).sum())
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    size, frames = config.patch_size, getattr(config, "temporal_patch_size", 1)
    dtype = next(tower.parameters()).dtype
    name = type(tower).__name__
    frames = 2 if name.startswith("Muse") else 1 if name.startswith("GlmImage") else frames
    flat = torch.randn(patches, channels * frames * size * size, dtype=torch.float64)
    if name.startswith(("PaddleOCR", "Kimi")):
        flat = flat.view(patches, channels, size, size)
    if name.startswith("PaddleOCR"):
        flat = flat[None]
    return flat.to(device, dtype)


def run(
    tower: torch.nn.Module, pixels: torch.Tensor, grids: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return what a tower returns, and the gradients of its weights."""
    tower.zero_grad()
    outputs = []
    for value in tower(pixels, grids).values():
        outputs += [value] if isinstance(value, torch.Tensor) else list(value)
    sum(one.square().mean() for one in outputs).backward()
    grads = {
        name: weight.grad for name, weight in tower.named_parameters() if weight.grad is not None
    }
    return [one.detach() for one in outputs], grads
