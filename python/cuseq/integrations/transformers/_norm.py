"""Fusion of q/k norm and RoPE into one kernel, in attention layers of transformers.

Matching names are not enough. A layer is replaced only if its signature is the expected one and the
kernel gives the numbers of the layer's own forward on a small copy of the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cuseq
from cuseq._base.models import eps_of
from cuseq.integrations.transformers._forwards import (
    our_forward,
    replace_forward,
    restore_forward,
)
from cuseq.integrations.transformers._layers import code_of
from cuseq.integrations.transformers._private import (
    attention_of,
    has_accelerate_forward,
    has_hooks,
    is_offloaded,
    own_modules,
    set_attention_alone,
    without_forwards,
)
from cuseq.integrations.transformers._rotary import Rotary, agree, random_numbers
from cuseq.integrations.transformers._rotation import Function, Rotation
from cuseq.integrations.transformers.names import (
    FORWARD_PARAMETERS,
    NORMS,
    OUTPUTS,
    PROJECTIONS,
    ROTATE,
    parameters_of,
    pop_cache,
)

_PLAIN = bool | int | float | str | None


@dataclass(frozen=True)
class NormedRotary:
    """The parameters of the fused norm and rotation for a layer.

    Attributes:
        norms: the names of the norms of queries and keys.
        output: the name of the last projection.
        gated: whether the projection of queries also gives a gate for the output, head by head.
    """

    rotary: Rotary
    norm: type
    eps: float
    weight_offset: float
    eager: Callable[..., tuple[Tensor, Tensor | None]]
    norms: tuple[str, str]
    output: str
    gated: bool


def _norms_of(layer: nn.Module) -> tuple[str, str] | None:
    """Return the names of a layer's norms of queries and keys, or None if it has none."""
    return next((names for names in NORMS if hasattr(layer, names[0])), None)


def find_normed_layers(
    layers: list[nn.Module], rotations: dict[Function, Rotation]
) -> tuple[dict[nn.Module, NormedRotary], list[str]]:
    """Return the layers whose norm can be fused with the rotation, and reasons for the others."""
    normed: dict[nn.Module, NormedRotary] = {}
    reasons: dict[str, None] = {}
    known: dict[tuple, NormedRotary | str] = {}
    for layer in layers:
        norms = _norms_of(layer)
        if norms is None:
            continue
        obstacle = _obstacle(layer, norms)
        if hasattr(layer, "indexer"):
            obstacle = "its forward belongs to its indexer"
        rotation = rotations.get((code_of(layer), ROTATE))
        if obstacle is None and rotation is None:
            obstacle = f"it does not call {ROTATE}"
        if obstacle is None and rotation is not None:
            key = _kind_of(layer, norms)
            if key not in known:
                known[key] = _normed_rotary(layer, norms, rotation.rotary)
            found = known[key]
            if isinstance(found, NormedRotary):
                normed[layer] = found
                continue
            obstacle = found
        reasons[f"the norm of queries and keys of {type(layer).__name__}: {obstacle}"] = None
    return normed, list(reasons)


def _kind_of(layer: nn.Module, norms: tuple[str, str]) -> tuple:
    """Return a key that is equal for layers that compute alike, apart from their weights.

    The class is not enough: layers of one class may rotate or not, by their index (EXAONE 4).
    """
    settings = (
        (name, value)
        for name, value in vars(layer).items()
        if name not in ("layer_idx", "training") and isinstance(value, _PLAIN)
    )
    eps = eps_of(getattr(layer, norms[0]))
    return type(layer), eps, frozenset(own_modules(layer)), frozenset(settings)


def _obstacle(layer: nn.Module, norms: tuple[str, str]) -> str | None:
    """Return why a layer's norm cannot be fused, or None if no reason is found."""
    parameters = parameters_of(type(layer).forward)
    if parameters != FORWARD_PARAMETERS:
        return f"its forward takes {parameters}"
    if not all(hasattr(layer, name) for name in (*PROJECTIONS, norms[1], "scaling", "head_dim")):
        return "it has other projections"
    parts = {name.split(".")[0] for name, _ in layer.named_parameters()}
    others = sorted(parts - {*PROJECTIONS, *OUTPUTS, *norms})
    if others:
        return f"it has other weights: {', '.join(others)}"
    own = layer.__dict__.get("forward", type(layer).forward)
    # A layer that was pickled while enabled holds its class's forward as an attribute.
    is_own = getattr(own, "__func__", own) is type(layer).forward
    if not is_own and not has_accelerate_forward(layer):
        return "its forward was replaced by other code"
    of_queries, of_keys = (getattr(layer, name) for name in norms)
    for norm in (of_queries, of_keys):
        if getattr(norm, "weight", None) is None:
            return f"{type(norm).__name__} has no weights"
        if list(norm.weight.shape) != [layer.head_dim]:
            return "it does not normalise each head separately"
        if eps_of(norm) is None or len(list(norm.parameters())) != 1:
            return f"{type(norm).__name__} is not a norm that cuseq knows"
        if has_hooks(norm):
            return "it has hooks"
        if is_offloaded(norm):
            return "its weights are offloaded"
    if eps_of(of_queries) != eps_of(of_keys):
        return "queries and keys have different eps"
    return None


def _normed_rotary(layer: nn.Module, norms: tuple[str, str], rotary: Rotary) -> NormedRotary | str:
    """Return how to fuse a layer, tested on a small copy, or the reason why it cannot be fused."""
    # The copy runs on the layer's device, because Triton norms need a GPU.
    norm = getattr(layer, norms[0])
    device = torch.device("cpu") if norm.weight.is_meta else norm.weight.device
    table = _table(layer, rotary, device)
    output = next(name for name in OUTPUTS if hasattr(layer, name))
    reason = "its forward gives different numbers"
    for gated in (False, True):
        probe = _probe(layer, norms, output, gated).to(device)
        hidden = random_numbers(1, 7, 8).to(device)
        try:
            expected, _ = type(layer).forward(probe, hidden, table, None)
        except Exception as error:  # the forward may need anything that the copy does not have
            if not gated:
                reason = f"its forward could not be tried ({type(error).__name__}: {error})"
            continue
        for weight_offset in (0.0, 1.0):
            eager = code_of(layer).eager_attention_forward
            found = NormedRotary(
                rotary, type(norm), eps_of(norm), weight_offset, eager, norms, output, gated
            )
            probe._cuseq_rotary = found
            if agree([normed_forward(probe, hidden, table, None)[0]], [expected]):
                return found
    return reason


def _table(layer: nn.Module, rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random table of cosines and sines in the form that the layer's rotation reads."""
    width = layer.head_dim if rotary.turns == 1 else layer.head_dim // 2
    angles = random_numbers(1, 7, width // 2) if rotary.turns == 1 else random_numbers(1, 7, width)
    if rotary.turns == 1 and rotary.interleaved and not rotary.first_half:
        angles = angles.repeat_interleave(2, -1)
    elif rotary.turns == 1:
        angles = angles.repeat(1, 1, 2)
    return angles.cos().to(device), angles.sin().to(device)


def _probe(layer: nn.Module, norms: tuple[str, str], output: str, gated: bool) -> nn.Module:
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
    for name in PROJECTIONS:
        queries = heads * (2 if gated else 1)
        children[name] = linear(8, layer.head_dim * (queries if name == "q_proj" else 1))
    children[output] = linear(layer.head_dim * heads, 8)
    for name in norms:
        norm = copy.deepcopy(children[name]).float()
        if has_accelerate_forward(norm):  # accelerate's forward moves its input to the GPU
            norm.__dict__ = without_forwards(norm.__dict__)
        norm.weight = nn.Parameter(torch.randn(layer.head_dim, generator=draw))
        children[name] = norm
    return probe.requires_grad_(False)


@our_forward
def normed_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run an attention layer with its norms and rotation in one kernel."""
    if cache is not None and not hasattr(cache, "get_seq_length"):  # of continuous batching
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs
        )
    cache = pop_cache(kwargs, cache)
    how: NormedRotary = self._cuseq_rotary
    norms = [getattr(self, name) for name in how.norms]
    if any(type(norm) is not how.norm or has_hooks(norm) or norm.weight.is_meta for norm in norms):
        # Since the check, a norm got an adapter or a hook, or accelerate offloaded its weight. The
        # kernel would bypass these, so run the class's own forward.
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache, **kwargs
        )
    rows = hidden_states.shape[:-1]
    q, gate = self.q_proj(hidden_states), None
    if how.gated:
        q, gate = q.view(*rows, -1, 2 * self.head_dim).chunk(2, dim=-1)
    q = q.view(*rows, -1, self.head_dim)
    k = self.k_proj(hidden_states).view(*rows, -1, self.head_dim)
    v = self.v_proj(hidden_states).view(*rows, -1, self.head_dim)
    cos, sin = position_embeddings
    q, k = cuseq.apply_qk_norm_rope(
        q,
        k,
        norms[0].weight,
        norms[1].weight,
        how.rotary.columns(cos),
        how.rotary.sines(sin),
        eps=how.eps,
        weight_offset=how.weight_offset,
        qkv_format="bshd",
        **how.rotary.arguments(cos),
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(self.config), how.eager)
    out, weights = attend(
        self,
        q,
        k,
        v,
        attention_mask,
        dropout=getattr(self, "attention_dropout", 0.0) if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", None),
        **kwargs,
    )
    out = out.reshape(*rows, -1)
    if gate is not None:
        out = out * gate.reshape(*rows, -1).sigmoid()
    return getattr(self, how.output)(out), weights


def fuse(layer: nn.Module, how: NormedRotary) -> None:
    """Make a layer run its norms and rotation in one kernel."""
    layer._cuseq_rotary = how
    replace_forward(layer, normed_forward)


def unfuse(layer: nn.Module) -> None:
    """Undo `fuse`."""
    del layer._cuseq_rotary
    restore_forward(layer)
