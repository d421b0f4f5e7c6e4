"""Attention layers that scale their queries by the position of each token (Llama 4).

Layers without a rotation do this, and count the positions along the row. In a packed row they must
count inside each document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuseq.integrations.transformers._forwards import our_forward
from cuseq.integrations.transformers._layers import calls_of, code_of
from cuseq.integrations.transformers._private import attention_of
from cuseq.integrations.transformers.documents import (
    check_total,
    positions_in_compiled_code,
)
from cuseq.integrations.transformers.masks import DeferredMask
from cuseq.integrations.transformers.names import pop_cache
from cuseq.layout import PackedLayout, check_layout, layout_of_offsets

_SETTINGS = ("attn_temperature_tuning", "use_rope", "floor_scale", "attn_scale")
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")


def find_tempered_layers(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the layers whose forward has to be replaced by `tempered_forward`.

    Raises:
        ValueError: a layer counts the positions of its tokens in a way that cuseq does not know.
    """
    found = []
    for layer in layers:
        is_known = all(hasattr(layer, name) for name in (*_SETTINGS, *_PARTS))
        if is_known and layer.attn_temperature_tuning and not layer.use_rope:
            found.append(layer)
        # MiniMax M3 counts them for its indexer, if nobody gives them: `indexed_forward` does.
        elif not is_known and "arange" in calls_of(layer) and not hasattr(layer, "indexer"):
            raise ValueError(
                f"{type(layer).__name__} {layer.layer_idx} counts the positions of its tokens "
                "along the row, which are wrong in a packed row"
            )
    return found


@our_forward
def tempered_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run an attention layer without a rotation, whose queries grow with their positions."""
    cache = pop_cache(kwargs, cache)
    positions = _positions(hidden_states, attention_mask, kwargs)
    if positions is None:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache, **kwargs
        )
    rows = hidden_states.shape[:-1]
    q, k, v = (
        getattr(self, name)(hidden_states).view(*rows, -1, self.head_dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
    scales = torch.log1p(steps) * self.attn_scale + 1.0
    q = (q * scales.view(*rows, 1, 1)).to(q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    eager = code_of(self).eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(self.config), eager)
    out, weights = attend(
        self,
        q,
        k,
        v,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **kwargs,
    )
    return self.o_proj(out.reshape(*rows, -1)), weights


def _positions(hidden_states: Tensor, attention_mask: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the positions of a packed row's tokens; None if each row is one sequence."""
    batch, seqlen, _ = hidden_states.shape
    packed: PackedLayout | None = kwargs.get("packed")
    offsets = None
    if packed is None:  # else compiled code must not look at offsets, which change their size
        offsets = kwargs.get("cu_seq_lens_q")
    if torch.compiler.is_compiling():
        return positions_in_compiled_code(packed, offsets, batch * seqlen)
    if packed is None and offsets is not None:
        packed = layout_of_offsets(offsets, batch * seqlen)
    elif packed is None and isinstance(attention_mask, DeferredMask):
        packed = attention_mask.told.packed
    if packed is None:
        return None
    check_layout(packed)
    check_total(packed, batch * seqlen)
    return packed.to(hidden_states.device).position_ids
