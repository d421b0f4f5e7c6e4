"""Fusion of q/k norm and RoPE into one kernel, in attention layers of transformers.

Matching names are not enough. A layer is replaced only if its signature is the expected one and the
kernel gives the numbers of the layer's own forward on a small copy of the layer.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cuseq
from cuseq.integrations.transformers._layers import code_of
from cuseq.integrations.transformers._private import (
    attention_of,
    has_accelerate_forward,
    has_hooks,
    is_offloaded,
    own_forwards,
    own_modules,
    set_attention_alone,
    set_forward,
    without_forwards,
)
from cuseq.integrations.transformers._rotation import Rotary, agree, random_numbers
from cuseq.integrations.transformers.names import FORWARD_PARAMETERS, PROJECTIONS

_PLAIN = bool | int | float | str | None


@dataclass(frozen=True)
class NormedRotary:
    """The parameters of the fused norm and rotation for a layer."""

    rotary: Rotary
    norm: type
    eps: float
    weight_offset: float
    eager: Callable[..., tuple[Tensor, Tensor | None]]


def find_normed_layers(
    layers: list[nn.Module], rotaries: dict[types.ModuleType, Rotary]
) -> tuple[dict[nn.Module, NormedRotary], list[str]]:
    """Return the layers whose norm can be fused with the rotation, and reasons for the others."""
    normed: dict[nn.Module, NormedRotary] = {}
    reasons: dict[str, None] = {}
    known: dict[tuple, NormedRotary | str] = {}
    for layer in layers:
        if not hasattr(layer, "q_norm"):
            continue
        obstacle = _obstacle(layer)
        if obstacle is None:
            key = _kind_of(layer)
            if key not in known:
                known[key] = _normed_rotary(layer, rotaries[code_of(layer)])
            found = known[key]
            if isinstance(found, NormedRotary):
                normed[layer] = found
                continue
            obstacle = found
        reasons[f"the norm of queries and keys of {type(layer).__name__}: {obstacle}"] = None
    return normed, list(reasons)


def _kind_of(layer: nn.Module) -> tuple:
    """Return a key that is equal for layers that compute alike, apart from their weights.

    The class is not enough: layers of one class may rotate or not, by their index (EXAONE 4).
    """
    settings = (
        (name, value)
        for name, value in vars(layer).items()
        if name not in ("layer_idx", "training") and isinstance(value, _PLAIN)
    )
    return type(layer), _eps(layer.q_norm), frozenset(own_modules(layer)), frozenset(settings)


def _eps(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _obstacle(layer: nn.Module) -> str | None:
    """Return why a layer's norm cannot be fused, or None if no reason is found."""
    parameters = list(inspect.signature(type(layer).forward).parameters)
    if parameters != FORWARD_PARAMETERS:
        return f"its forward takes {parameters}"
    if not all(hasattr(layer, name) for name in (*PROJECTIONS, "k_norm", "scaling", "head_dim")):
        return "it has other projections"
    parts = {name.split(".")[0] for name, _ in layer.named_parameters()}
    others = sorted(parts - {*PROJECTIONS, "q_norm", "k_norm"})
    if others:
        return f"it has weights of its own beside: {', '.join(others)}"
    own = layer.__dict__.get("forward", type(layer).forward)
    # A layer that was pickled while enabled holds its class's forward as an attribute.
    is_own = getattr(own, "__func__", own) is type(layer).forward
    if not is_own and not has_accelerate_forward(layer):
        return "its forward was replaced by somebody else"
    for norm in (layer.q_norm, layer.k_norm):
        if list(getattr(norm, "weight", torch.empty(0)).shape) != [layer.head_dim]:
            return "it is not over each head"
        if _eps(norm) is None or len(list(norm.parameters())) != 1:
            return f"{type(norm).__name__} is another norm"
        if has_hooks(norm):
            return "it has hooks"
        if is_offloaded(norm):
            return "its weights are offloaded"
    if _eps(layer.q_norm) != _eps(layer.k_norm):
        return "queries and keys have different eps"
    return None


def _normed_rotary(layer: nn.Module, rotary: Rotary) -> NormedRotary | str:
    """Return how to fuse a layer, tested on a small copy, or the reason why it cannot be fused."""
    # The copy runs on the layer's device, because Triton norms need a GPU.
    device = layer.q_norm.weight.device
    probe, hidden = _probe(layer).to(device), random_numbers(1, 7, 8).to(device)
    width = layer.head_dim if rotary.turns == 1 else layer.head_dim // 2
    angles = random_numbers(1, 7, width // 2) if rotary.turns == 1 else random_numbers(1, 7, width)
    if rotary.turns == 1 and rotary.interleaved and not rotary.first_half:
        angles = angles.repeat_interleave(2, -1)
    elif rotary.turns == 1:
        angles = angles.repeat(1, 1, 2)
    table = angles.cos().to(device), angles.sin().to(device)
    try:
        expected, _ = type(layer).forward(probe, hidden, table, None)
    except Exception as error:  # the forward may need anything that the copy does not have
        return f"its forward cannot be tried ({type(error).__name__}: {error})"
    for weight_offset in (0.0, 1.0):
        eager = code_of(layer).eager_attention_forward
        norm = type(layer.q_norm)
        found = NormedRotary(rotary, norm, _eps(layer.q_norm), weight_offset, eager)
        probe._cuseq_rotary = found
        if agree([normed_forward(probe, hidden, table, None)[0]], [expected]):
            return found
    return "its forward gives other numbers"


def _probe(layer: nn.Module) -> nn.Module:
    """Return a copy of the layer with small projections, for one key head, in fp32."""
    probe = object.__new__(type(layer))
    children = dict(own_modules(layer))
    probe.__dict__ = without_forwards(layer.__dict__) | {"_modules": children}
    probe.training = False
    probe.config = copy.copy(layer.config)
    set_attention_alone(probe.config, "eager")
    draw = torch.Generator().manual_seed(0)  # do not change the user's random state

    def linear(inputs: int, outputs: int) -> nn.Linear:
        module = nn.utils.skip_init(nn.Linear, inputs, outputs)
        module.weight.data = torch.randn(outputs, inputs, generator=draw) / inputs**0.5
        module.bias.data = torch.randn(outputs, generator=draw)
        return module

    heads = layer.num_key_value_groups
    for name in PROJECTIONS[:3]:
        children[name] = linear(8, layer.head_dim * (heads if name == "q_proj" else 1))
    children["o_proj"] = linear(layer.head_dim * heads, 8)
    for name in ("q_norm", "k_norm"):
        norm = copy.deepcopy(children[name]).float()
        if has_accelerate_forward(norm):  # accelerate's forward moves its input to the GPU
            norm.__dict__ = without_forwards(norm.__dict__)
        norm.weight = nn.Parameter(torch.randn(layer.head_dim, generator=draw))
        children[name] = norm
    return probe.requires_grad_(False)


def normed_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run an attention layer with its norms and rotation in one kernel."""
    how: NormedRotary = self._cuseq_rotary
    if any(
        type(norm) is not how.norm or has_hooks(norm) or norm.weight.is_meta
        for norm in (self.q_norm, self.k_norm)
    ):
        # Since the check, a norm got an adapter or a hook, or accelerate offloaded its weight. The
        # kernel would bypass these, so run the class's own forward.
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
    rows = hidden_states.shape[:-1]
    q = self.q_proj(hidden_states).view(*rows, -1, self.head_dim)
    k = self.k_proj(hidden_states).view(*rows, -1, self.head_dim)
    v = self.v_proj(hidden_states).view(*rows, -1, self.head_dim)
    cos, sin = position_embeddings
    q, k = cuseq.apply_qk_norm_rope(
        q,
        k,
        self.q_norm.weight,
        self.k_norm.weight,
        how.rotary.columns(cos),
        how.rotary.columns(sin),
        eps=how.eps,
        weight_offset=how.weight_offset,
        qkv_format="bshd",
        **how.rotary.arguments(cos),
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(self.config), how.eager)
    out, weights = attend(
        self,
        q,
        k,
        v,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", None),
        **kwargs,
    )
    return self.o_proj(out.reshape(*rows, -1)), weights


# pickle saves bound methods by name. A model that is pickled while enabled gets its class's own
# forward when it is loaded, which computes the same.
normed_forward.__name__ = "forward"


def fuse(layer: nn.Module, how: NormedRotary) -> None:
    """Make a layer run its norms and rotation in one kernel."""
    layer._cuseq_rotary = how
    # A bound method, not a partial: with a partial every compiled layer would get its own graph.
    set_forward(layer, types.MethodType(normed_forward, layer))


def unfuse(layer: nn.Module) -> None:
    """Undo `fuse`."""
    del layer._cuseq_rotary
    if has_accelerate_forward(layer):
        set_forward(layer, types.MethodType(type(layer).forward, layer))
    else:
        del layer.forward


def is_fused(module: nn.Module) -> bool:
    """Return whether a module is fused, or is a copy of a fused module."""
    return any(
        getattr(forward, "__func__", None) is normed_forward for forward in own_forwards(module)
    )
