"""The attention layers of a transformers model, and checks that cuseq can replace them."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cuseq.integrations.transformers.names import ROTATE


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model that `model` is or contains.

    Raises:
        TypeError: `model` does not contain a transformers model.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"model must be or hold a transformers model, got {type(model).__name__}")


def code_of(layer: nn.Module) -> types.ModuleType:
    """Return the modeling module that defines a layer's class."""
    return sys.modules[type(layer).__module__]


def attention_layers(base: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that rotate queries and keys of text tokens.

    Layers of vision encoders are not returned, because they have no `layer_idx`.

    Raises:
        ValueError: the model has no such layer.
    """
    layers = [
        module
        for module in base.modules()
        if hasattr(module, "layer_idx")
        and "position_embeddings" in inspect.signature(type(module).forward).parameters
        and hasattr(module, "o_proj")
        and hasattr(code_of(module), ROTATE)
    ]
    if not layers:
        raise ValueError(
            f"{type(base).__name__} has no attention layer that cuseq knows: none is numbered, "
            f"takes position_embeddings and calls {ROTATE}"
        )
    return layers


def refuse_inexact_layers(layers: list[nn.Module]) -> None:
    """Raise ValueError if a layer uses an attention feature that packed attention lacks."""
    for layer in layers:
        name = f"{type(layer).__name__} {layer.layer_idx}"
        softcap = getattr(layer, "attn_logit_softcapping", None)
        if softcap is not None:
            raise ValueError(
                f"{name} caps its scores (attn_logit_softcapping={softcap}), which no packed "
                "attention kernel does; a config with attn_logit_softcapping=None can be enabled"
            )
        if hasattr(layer, "prepare_dynamic_mask"):
            raise ValueError(
                f"{name} draws a mask of its own from its values, which packed attention does not"
            )
        if hasattr(layer, "indexer"):
            raise ValueError(
                f"{name} attends to the keys that its indexer chooses, which packed attention does "
                "not"
            )
        dropout = getattr(layer, "attention_dropout", 0.0)
        if dropout:
            raise ValueError(
                f"{name} drops attention weights (attention_dropout={dropout}), which packed "
                "attention does not: set the config's attention_dropout to 0"
            )


def text_configs(base: PreTrainedModel, layers: list[nn.Module]) -> dict[str, Any]:
    """Return the configs of the layers, by their keys in `set_attn_implementation`."""
    own = {id(layer.config) for layer in layers}
    configs = {"": base.config} if id(base.config) in own else {}
    for key in base.config.sub_configs:
        config = getattr(base.config, key, None)
        if id(config) in own:
            configs[key] = config
    if len(configs) < len(own):
        raise ValueError(
            f"{type(base).__name__} has attention layers whose config is no part of its own"
        )
    return configs


def class_names(classes: Iterable[type]) -> tuple[str, ...]:
    """Return the sorted names of the classes without duplicates."""
    return tuple(sorted({one.__name__ for one in classes}))
