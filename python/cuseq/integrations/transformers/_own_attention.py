"""Attention layers that compute attention in their own code: GPT-J, GPT-Neo, Falcon, XGLM.

They do not call the attention of their config, and most of their models hand no keywords on to
layers, only a mask. So a packed call gets a `LayoutMask` in the place of its mask, and the layers
attend with the lengths in it. Any other call runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

import cuseq
from cuseq.integrations.transformers._forwards import (
    our_forward,
    replace_forward,
    restore_forward,
)
from cuseq.integrations.transformers._layers import (
    attends,
    calls_of,
    code_of,
    dropout_option,
    models_around,
)
from cuseq.integrations.transformers._private import OWN_ATTENTION
from cuseq.integrations.transformers.attention import cuseq_attention
from cuseq.integrations.transformers.documents import (
    DESCRIPTIONS,
    names_of_call,
    warn_of_compiled_positions,
)
from cuseq.integrations.transformers.masks import LayoutMask
from cuseq.integrations.transformers.names import (
    CACHE,
    ROTATE,
    cache_names,
    parameters_of,
    pop_cache,
)

_KEYWORDS = (*DESCRIPTIONS, "max_length_q", "max_length_k", "packed_seq_lengths")
_DROPOUTS = ("attn_dropout", "attention_dropout")  # modules
_RATES = ("dropout",)
_SCALES = ("scale_attn", "norm_factor")  # what a layer divides its scores by


@dataclass(frozen=True)
class Kind:
    """An adapter for one kind of layer.

    Attributes:
        method: the name of the method that is replaced.
        parameters: the names of its parameters.
        needs: attributes that a layer must have.
        match: returns whether a layer computes what the replacement computes.
        replace: the new method, which calls the class's own for a call without a `LayoutMask`.
        dropouts: attributes, a module or a rate, that drop attention weights.
    """

    method: str
    parameters: tuple[str, ...]
    needs: tuple[str, ...]
    match: Callable[[nn.Module], bool]
    replace: Callable[..., tuple[Tensor, None]]
    dropouts: tuple[str, ...]


def _attend(
    layer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LayoutMask,
    scale: float,
    dropouts: tuple[str, ...] = (),
) -> Tensor:
    """Return attention `[batch, seqlen, heads, head_dim]` of a packed call."""
    out, _ = cuseq_attention(
        layer,
        q,
        k,
        v,
        mask.given,
        dropout=_rate(layer, dropouts) if layer.training else 0.0,
        scaling=scale,
        is_causal=True,
        sliding_window=_window(layer),
        **mask.lengths,
    )
    return out


def _scale(layer: nn.Module) -> float:
    divisor = next((getattr(layer, name) for name in _SCALES if hasattr(layer, name)), 1.0)
    return 1.0 / divisor


def _window(layer: nn.Module) -> int | None:
    return layer.config.window_size if getattr(layer, "attention_type", None) == "local" else None


def _rate(layer: nn.Module, names: tuple[str, ...]) -> float:
    # Lists: the compiler does not take max() of a generator.
    found = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return max([0.0, *[one.p if isinstance(one, nn.Dropout) else one for one in found]])


# ---------------------------------------------------------------------------------- replacements


def _attn(
    self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Attend as GPT-J: heads are rotated, `[batch, heads, seqlen, head_dim]`."""
    if not isinstance(attention_mask, LayoutMask):
        return type(self)._attn(self, query, key, value, attention_mask)
    q, k = query.to(value.dtype), key.to(value.dtype)  # rotated in fp32
    out = _attend(self, q, k, value, attention_mask, _scale(self), _DROPOUTS)
    return out.transpose(1, 2), None


_attn = our_forward(_attn, OWN_ATTENTION)


def _computes_alike(layer: nn.Module) -> bool:
    """Return whether a layer's `_attn` gives the numbers of packed attention."""
    window = _window(layer)
    tokens = 6 if window is None else min(window + 2, layer.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, tokens, 8, generator=generator, dtype=torch.float32) for _ in range(3)
    )
    attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    attributes |= {n: nn.Identity() for n, m in layer.named_children() if isinstance(m, nn.Dropout)}
    hidden = torch.full((tokens, tokens), torch.finfo(q.dtype).min).triu(1)[None, None]
    try:
        attributes |= {name: one.cpu() for name, one in layer.named_buffers(recurse=False)}
        with torch.autocast("cpu", enabled=False):
            expected, _ = type(layer)._attn(types.SimpleNamespace(**attributes), q, k, v, hidden)
            packed = cuseq.PackedLayout.from_lengths([tokens])
            rows = (states[0].transpose(0, 1).contiguous() for states in (q, k, v))
            found = cuseq.varlen_attention(*rows, packed, window=window, scale=_scale(layer))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(found.transpose(0, 1), expected[0], rtol=1e-4, atol=1e-4)


@our_forward
def _falcon_forward(
    self: nn.Module, hidden_states: Tensor, alibi: Any, attention_mask: Any, *args: Any, **kw: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as Falcon without ALiBi."""
    if not isinstance(attention_mask, LayoutMask):
        return type(self).forward(self, hidden_states, alibi, attention_mask, *args, **kw)
    heads = self._split_heads(self.query_key_value(hidden_states))
    q, k, v = (states.transpose(1, 2) for states in heads)
    q, k = code_of(self).apply_rotary_pos_emb(q, k, *kw["position_embeddings"])
    cache = pop_cache(kw)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    out = _attend(self, q, k, v, attention_mask, self.inv_norm_factor)
    return self.dense(out.flatten(2)), None


@our_forward
def _xglm_forward(
    self: nn.Module,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as XGLM's decoder."""
    cache = pop_cache(kwargs, cache)
    if not isinstance(attention_mask, LayoutMask):
        return type(self).forward(
            self, hidden_states, key_value_states, cache, attention_mask, **kwargs
        )
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    q, k, v = (
        project(hidden_states).view(shape).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    out = _attend(self, q, k, v, attention_mask, self.scaling, _RATES)
    return self.out_proj(out.flatten(2)), None


def _is_decoder(layer: nn.Module) -> bool:
    return layer.is_decoder


def _is_rotary(layer: nn.Module) -> bool:
    return not layer.config.alibi and ROTATE in calls_of(layer)


KINDS = (
    Kind(
        OWN_ATTENTION,
        ("self", "query", "key", "value", "attention_mask"),
        (),
        _computes_alike,
        _attn,
        _DROPOUTS,
    ),
    Kind(
        "forward",
        (
            "self", "hidden_states", "alibi", "attention_mask", "position_ids", CACHE,
            "use_cache", "output_attentions", "position_embeddings", "kwargs",
        ),
        ("_split_heads", "query_key_value", "dense", "inv_norm_factor", "config"),
        _is_rotary,
        _falcon_forward,
        (),  # its attention_dropout acts on what the layer returns
    ),
    Kind(
        "forward",
        (
            "self", "hidden_states", "key_value_states", CACHE, "attention_mask", "kwargs",
        ),
        ("q_proj", "k_proj", "v_proj", "out_proj", "scaling", "is_decoder", "embed_dim"),
        _is_decoder,
        _xglm_forward,
        _RATES,
    ),
)  # fmt: skip


@functools.cache
def _kinds_of(cls: type[nn.Module]) -> tuple[Kind, ...]:
    def takes(kind: Kind) -> bool:
        method = getattr(cls, kind.method, None)
        return method is not None and list(kind.parameters) == parameters_of(method)

    return tuple(kind for kind in KINDS if takes(kind))


def kind_of(layer: nn.Module) -> Kind | None:
    """Return the kind of a layer by its method and attributes, without comparing numbers."""
    return next(
        (k for k in _kinds_of(type(layer)) if all(hasattr(layer, name) for name in k.needs)), None
    )


# ------------------------------------------------------------------------------------- a model


def find_own_attention(base: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model that a `Kind` matches; none if the model needs more.

    Layers get a `LayoutMask` only through `create_causal_mask`, cross-attention has other lengths,
    and a model without position_ids counts positions along the row.
    """
    config = base.config
    takes_positions = "position_ids" in inspect.signature(type(base).forward).parameters
    is_causal = getattr(config, "is_causal", True)
    if not (takes_positions and is_causal) or getattr(config, "add_cross_attention", False):
        return []
    layers = [one for one in base.modules() if kind_of(one) is not None]
    through_mask = all(hasattr(code_of(layer), "create_causal_mask") for layer in layers)
    return layers if through_mask and all(_matches(one) for one in layers) else []


def _matches(layer: nn.Module) -> bool:
    kind = kind_of(layer)
    return kind is not None and not attends(layer) and kind.match(layer)


def left_rotations(layers: list[nn.Module], rotating: list[nn.Module]) -> list[str]:
    """Return reasons why rotations in layers are not replaced, for `Enabled.left_alone`."""
    left = [layer for layer in layers if ROTATE in calls_of(layer) and layer not in rotating]
    takes = {
        type(one).__name__: list(inspect.signature(getattr(code_of(one), ROTATE)).parameters)
        for one in left
    }
    return [f"the rotation of {name}: {ROTATE} takes {found}" for name, found in takes.items()]


def takes_angles(layer: nn.Module) -> bool:
    """Return whether a layer's forward takes position_embeddings."""
    return "position_embeddings" in inspect.signature(type(layer).forward).parameters


def own_dropout_of(layer: nn.Module) -> tuple[str, float]:
    """Return the config's option of dropped attention weights, and a layer's rate."""
    kind = kind_of(layer)
    return dropout_option(layer), _rate(layer, () if kind is None else kind.dropouts)


def replace_attention(base: PreTrainedModel, layers: list[nn.Module]) -> list[RemovableHandle]:
    """Make layers attend with the lengths of a call; return the hooks that bring them there.

    Each model around the layers gets a hook, since a model inside may be called alone.
    """
    for layer in layers:
        kind = kind_of(layer)
        if kind.method == "forward":
            replace_forward(layer, kind.replace)
        else:
            setattr(layer, kind.method, types.MethodType(kind.replace, layer))
    return [
        model.register_forward_pre_hook(
            functools.partial(_bring_layout, names_of_call(model)), with_kwargs=True
        )
        for model in models_around(base, layers)
    ]


def restore_attention(layers: list[nn.Module]) -> None:
    """Undo `replace_attention`, apart from its hooks."""
    for layer in layers:
        kind = kind_of(layer)
        if kind.method == "forward":
            restore_forward(layer)
        else:
            delattr(layer, kind.method)


def _bring_layout(
    names: tuple[str, ...], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put a `LayoutMask` in the place of the mask of a packed call.

    Raises:
        ValueError: the call asks for attention weights, which packed attention does not make.
    """
    call = dict(zip(names, args, strict=False)) | kwargs
    told = {name: value for name, value in call.items() if value is not None}
    mask = told.get("attention_mask")
    if isinstance(mask, LayoutMask):
        return None
    lengths = {name: told[name] for name in _KEYWORDS if name in told}
    if not any(name in lengths for name in DESCRIPTIONS):
        if torch.compiler.is_compiling() and "position_ids" in told and mask is None:
            if not cache_names(told):
                warn_of_compiled_positions()
        return None
    if told.get("output_attentions", model.config.output_attentions):
        raise ValueError(
            "output_attentions is not supported by packed attention, and dropping it would be wrong"
        )
    others = {name: value for name, value in call.items() if name not in _KEYWORDS}
    return (), others | {"attention_mask": LayoutMask(lengths, mask)}
