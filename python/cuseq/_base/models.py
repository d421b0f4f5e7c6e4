"""Helpers for models that do not import the model's package."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
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


def uses_cache(config: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a model of this config keeps a cache in a call with these keywords."""
    use_cache = given.get("use_cache")
    return bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)


def eps_of(norm: nn.Module) -> float | None:
    """Return the epsilon of a norm, under transformers' name or torch's; None if it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def gathered_by_fsdp2(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers parameters of a module, without importing its package."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gather_what_is_needed(model: nn.Module) -> None:
    """Keep FSDP2 from gathering weights that no backward asks for.

    A unit gathers, in its backward, the unit that the forwards ran before it. The first one of a
    forward so gathers the last one of an evaluation, if that came before; and the first one after
    frozen embeddings gathers these. PyTorch means to wait for such weights, but with torch 2.11
    they may be written over those of the next batch (docs/many_gpus.md). So the first unit is told
    to gather itself, which it has. Embeddings that are tied to the head are left alone: accelerate
    keeps them gathered, with the head.
    """
    modules = list(model.modules())
    uses = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
    units: list[Any] = [module for module in modules if gathered_by_fsdp2(module)]
    for unit, following in itertools.pairwise((*units, None)):
        is_apart = isinstance(unit, nn.Embedding) and uses[id(unit.weight)] == 1
        if is_apart:
            unit.set_modules_to_backward_prefetch([unit])
            if following is not None and not unit.weight.requires_grad:
                following.set_modules_to_backward_prefetch([following])


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


# How many enabled models of a config keep documents apart in its recurrent layers, by the config's
# id: configs compare by value, but a copy of a model must not count as enabled. Code that is being
# compiled asks whether the dict has a key, and guards on that alone. If it read more, a model that
# is freed in the meantime would end the compilation.
_separated: dict[int, int] = {}


def recurrent_layers(config: Any) -> list[str]:
    """Return the sorted types of a config's layers whose state crosses the ends of documents.

    These are the layers that carry a state from token to token, unless `mark_separated` was called.
    """
    if id(config) in _separated:
        return []
    return sorted(set(recurrent_types(config)))


def recurrent_types(config: Any) -> list[str]:
    """Return the type of each of a config's layers that may carry a state from token to token."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [kind for kind in types or () if kind not in _STATELESS_LAYERS]


def mark_separated(config: Any) -> None:
    """Note that an enabled model of this config, which it holds, keeps documents apart."""
    _separated[id(config)] = _separated.get(id(config), 0) + 1


def unmark_separated(config_id: int) -> None:
    """Undo a `mark_separated` of the config with this id."""
    _separated[config_id] -= 1
    if not _separated[config_id]:
        del _separated[config_id]


# --------------------------------------------------------------------------- rows that nobody reads

_lock = threading.Lock()
_here = threading.local()  # `inside`: whether a watched model calls this, or `unwatched` does
# The class whose calls are watched, once there is one; nothing is watched again after a warning.
_watched: Any = None
_judge: Any = None  # `_first_warning`, which torch.compile does not look into
_warned = False


def watch_models() -> None:
    """Warn once, from now on, if a transformers model leaks because it was not enabled.

    transformers hands `packed` on to its attention, which ignores it. Collators call this: without
    their rows nothing is watched. Does nothing before transformers is imported.
    """
    global _watched, _judge
    module = sys.modules.get("transformers.modeling_utils")
    if _watched is not None or _warned or module is None or "unsloth" in sys.modules:
        return
    if "__call__" in vars(module.PreTrainedModel):  # another package's
        return
    try:
        from torch._dynamo.eval_frame import skip_code  # which transformers has imported
    except ImportError:
        return
    # As for the __call__ of nn.Module: torch.compile compiles what it calls, each hook alone.
    skip_code(_watched_call.__code__)
    _judge = torch.compiler.disable(_first_warning)
    _watched = module.PreTrainedModel
    _watched.__call__ = _watched_call


@contextmanager
def unwatched() -> Iterator[None]:
    """Say nothing of the models that are called in this block: `check_packing` says more."""
    before, _here.inside = getattr(_here, "inside", False), True
    try:
        yield
    finally:
        _here.inside = before


def _watched_call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = super(_watched, model).__call__
    if kwargs.get("packed") is None or _warned or torch.compiler.is_compiling():
        return call(*args, **kwargs)
    if getattr(_here, "inside", False):  # a part of a model that was judged
        return call(*args, **kwargs)
    if warning := _judge(model, kwargs):
        warnings.warn(warning, stacklevel=2)
    _here.inside = True
    try:
        return call(*args, **kwargs)
    finally:
        _here.inside = False


def _first_warning(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """Return the warning of a model that leaks, and end the watch; None if there is none."""
    global _warned
    if not _leaks(model, given):
        return None
    with _lock:
        if _warned:
            return None
        _warned = True
        if vars(_watched).get("__call__") is _watched_call:  # nobody has wrapped it since
            del _watched.__call__
    return (
        f"LEAKS: {type(model).__name__} got a packed row and ignores packed, because it is not "
        "enabled: its documents reach each other. Call cuseq.enable(model) for every model that is "
        "made or loaded"
    )


def _leaks(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether documents of a packed row reach each other in a model.

    transformers keeps them apart by positions that begin again: over flash attention, and without a
    mask and a cache by a dense mask. Code of the user's may read `packed`.
    """
    config = text_config(model)
    names = {
        str(getattr(one, "_attn_implementation", None) or "sdpa")
        for one in (getattr(model, "config", None), config)
    }
    dense = {"eager", "flex_attention", "sdpa"}
    if not all(name in dense or name.startswith("flash") for name in names):
        return False  # cuseq's, or one of the user's
    if any(hasattr(module, HOLD) for module in model.modules()) or _may_read_packed(model):
        return False
    if given.get("position_ids") is None or recurrent_types(config):
        return True
    if not names & dense:
        return False
    recomputes = model.training and getattr(model, "is_gradient_checkpointing", False)
    caches = uses_cache(config, given) and not recomputes
    return caches or given.get("attention_mask") is not None


def _may_read_packed(model: nn.Module) -> bool:
    if model._forward_pre_hooks_with_kwargs:
        return True
    try:
        return "packed" in inspect.signature(model.forward).parameters
    except ValueError:  # not written in Python
        return True
