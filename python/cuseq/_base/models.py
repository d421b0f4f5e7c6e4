"""Helpers for models that do not import the model's package."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

HOLD = "_cuseq_hold"
"""The attribute of enabled models and layers that keeps what they use replaced."""


def text_config(model: Any) -> Any:
    """Return the config of a transformers model's text part; None for a model without a config.

    The config of the whole model may name the attention of another part, such as a vision tower.
    """
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def eps_of(norm: nn.Module) -> float | None:
    """Return the epsilon of a norm, under transformers' name or torch's; None if it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def rotations_of(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of a config's rotation, and those of each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def rotations_by_length(config: Any) -> list[str]:
    """Return the types of a config's rotations whose angles depend on the longest position."""
    types = {rotation.get("rope_type") for rotation in rotations_of(config)}
    return [name for name in ("dynamic", "longrope") if name in types]


# --------------------------------------------------------------------------- recurrent layers

# Names that configs give to layers without a state along the row. A layer of any other type counts
# as recurrent, those that a new release adds too.
_STATELESS_LAYERS = {
    "attention",
    "chunked_attention",
    "compressed_sparse_attention",
    "deepseek_sparse_attention",
    "dense",
    "full_attention",
    "heavily_compressed_attention",
    "indexed_attention",
    "minimax_m3_sparse",
    "mlp",
    "moe",
    "qwen_sparse_attention",
    "sliding_attention",
    "sparse",
    "window_attention",
}


class Separated:
    """A mark that an enabled model of a config keeps documents apart in its recurrent layers.

    Configs compare by value, but a copy of a model must not count as enabled, so marks are compared
    by identity.
    """

    def __init__(self, config: Any) -> None:
        self.config = weakref.ref(config)


_marks: list[Separated] = []


def recurrent_layers(config: Any) -> list[str]:
    """Return the sorted types of a config's layers whose state crosses the ends of documents.

    These are the layers that carry a state from token to token, unless `mark_separated` was called.
    """
    if any(mark.config() is config for mark in _marks):
        return []
    return sorted(set(recurrent_types(config)))


def recurrent_types(config: Any) -> list[str]:
    """Return the type of each of a config's layers that may carry a state from token to token."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [kind for kind in types or () if kind not in _STATELESS_LAYERS]


def mark_separated(config: Any) -> Separated:
    """Note that an enabled model of this config keeps documents apart; return the mark."""
    mark = Separated(config)
    _marks.append(mark)
    return mark


def unmark_separated(mark: Separated) -> None:
    """Undo a `mark_separated`."""
    _marks.remove(mark)


# --------------------------------------------------------------------------- rows that nobody reads

_DENSE = ("eager", "flex_attention", "sdpa")
# The class whose calls are watched; False once a warning was given.
_watched: Any = None


def watch_models() -> None:
    """Warn once, from now on, if a transformers model gets a packed row and was not enabled.

    transformers hands `packed` on to its attention, which ignores it. Collators call this: without
    their rows nothing is watched. Does nothing before transformers is imported.
    """
    global _watched
    module = sys.modules.get("transformers.modeling_utils")
    if _watched is not None or module is None or "unsloth" in sys.modules:
        return
    if "__call__" in vars(module.PreTrainedModel):  # another package's
        return
    try:
        from torch._dynamo.eval_frame import skip_code  # which transformers has imported
    except ImportError:
        return
    # As for the __call__ of nn.Module: torch.compile compiles what it calls, each hook alone.
    skip_code(_watched_call.__code__)
    _watched = module.PreTrainedModel
    _watched.__call__ = _watched_call


@contextmanager
def unwatched() -> Iterator[None]:
    """Say nothing of the models that are called in this block: `check_packing` says more."""
    global _watched
    before, _watched = _watched, _watched and None
    try:
        yield
    finally:
        _watched = before if _watched is None else _watched


def _watched_call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("packed") is not None and not torch.compiler.is_compiling():
        _check_reader(model)
    return nn.Module.__call__(model, *args, **kwargs)


def _check_reader(model: nn.Module) -> None:
    """Warn if nothing in a model reads `packed`, and end the watch then."""
    global _watched
    if not _watched or _reads_packed(model):
        return
    del _watched.__call__
    _watched = False
    name = type(model).__name__
    warnings.warn(
        f"LEAKS: {name} got a packed row, but cuseq.enable was not called for it, and without that "
        "it ignores packed. With a KV cache (use_cache=True, transformers' default) its documents "
        "attend to each other; without one transformers may keep them apart by a dense mask. Call "
        "cuseq.enable(model) for every model that is made or loaded",
        stacklevel=3,  # the caller of the model
    )


def _reads_packed(model: nn.Module) -> bool:
    """Return whether a model was enabled, or may read `packed` by code of the user's."""
    names = {
        str(getattr(config, "_attn_implementation", None) or "sdpa")
        for config in (getattr(model, "config", None), text_config(model))
    }
    return (
        any(name.startswith("cuseq") for name in names)
        or not all(name in _DENSE or "flash" in name for name in names)  # one of the user's
        or "packed" in inspect.signature(type(model).forward).parameters
        or any(hasattr(module, HOLD) for module in model.modules())
    )
