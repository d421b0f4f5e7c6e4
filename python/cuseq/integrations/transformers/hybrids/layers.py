"""Forwards for mixers whose recurrence is not a function that gets the layout.

MiniMax's lightning attention computes its recurrence in its own forward. A Mamba-1 layer calls a
function but does not hand its keywords on to it. Such a layer is called on batches of documents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cuseq.integrations.transformers._forwards import our_forward
from cuseq.integrations.transformers.hybrids.boundaries import lent_to
from cuseq.integrations.transformers.hybrids.functions import WITH_FLA, layout_among
from cuseq.integrations.transformers.hybrids.kernels import LINEAR_ATTENTION, fla_arguments
from cuseq.integrations.transformers.hybrids.segments import by_batches
from cuseq.integrations.transformers.names import cache_names
from cuseq.layout import PackedLayout

NO_KERNEL = "no package has a kernel for it that takes offsets"


@our_forward
def mamba_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a Mamba-1 layer; with a layout, on batches of documents."""
    packed = layout_among(kwargs | lent_to(self), hidden_states)
    if packed is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    out, _ = _batches(self, "Mamba 1", NO_KERNEL, packed, hidden_states, args, kwargs)
    return out


@our_forward
def lightning_forward(
    self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run a layer of lightning attention; with a layout, by fla or on batches of documents."""
    packed = layout_among(kwargs, hidden_states)
    if packed is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    simple_gla = LINEAR_ATTENTION.function(hidden_states)
    if simple_gla is not None and all(kwargs[name] is None for name in cache_names(kwargs)):
        batch, seqlen, _ = hidden_states.shape
        heads = self.act_fn(self.qkv_proj(hidden_states))
        heads = heads.view(1, -1, self.num_attention_heads, 3 * self.head_dim)
        out, _ = simple_gla(
            *heads.split(self.head_dim, dim=-1),
            g_gamma=-self.slope_rate.float().view(-1),
            scale=1.0,
            **fla_arguments(simple_gla, packed),
        )
        out = self.norm(out.reshape(batch, seqlen, -1))
        return self.out_proj(self.output_gate(hidden_states).sigmoid() * out), None
    return _batches(self, "lightning attention", WITH_FLA, packed, hidden_states, args, kwargs)


def _batches(
    layer: nn.Module,
    what: str,
    remedy: str,
    packed: PackedLayout,
    hidden_states: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run a layer's own forward on batches of documents; a cache gets the last one's state."""
    if args:  # a cache among them could not be told from the rest
        raise ValueError(
            f"{type(layer).__name__} must get its arguments by keyword in a packed row, got "
            f"{len(args)} by position after hidden_states"
        )
    caches = {name: kwargs[name] for name in cache_names(kwargs)}
    others = {name: value for name, value in kwargs.items() if name not in caches}

    def run(keeps: bool, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        found = type(layer).forward(layer, batch, **others, **(caches if keeps else {}))
        return found if isinstance(found, tuple) else (found, None)

    rows = hidden_states.flatten(0, 1).unsqueeze(0)
    fills = any(cache is not None for cache in caches.values())
    out, state = by_batches(what, remedy, packed, run, rows, keeps_state=fills)
    return out.view(hidden_states.shape), state
