"""Why `enable` finds nothing to replace in a model: the reason in its error."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from cuseq.integrations.transformers._layers import attends, class_names, code_of
from cuseq.integrations.transformers.hybrids.kinds import kind_of


def without_layers(base: PreTrainedModel) -> str:
    """Return the message about a model without a layer that cuseq knows."""
    return (
        f"{type(base).__name__} has no attention layer that cuseq knows: {_reason(base)}. Train "
        "this model on padded batches, or call cuseq.varlen_attention in its attention layers"
    )


def _reason(base: PreTrainedModel) -> str:
    layers = [one for one in base.modules() if hasattr(one, "layer_idx")]
    attending = [layer for layer in layers if attends(layer)]
    of_encoder = [one for one in attending if getattr(one, "is_cross_attention", False)]
    not_causal = [one for one in attending if not getattr(one, "is_causal", False)]
    mixers = [layer for layer in layers if kind_of(layer) is not None]
    if _adds_alibi(base):
        return "it adds ALiBi's biases to the scores, which packed attention cannot"
    if of_encoder or _attends_to_encoder(base):
        return f"it attends to the states of an encoder{_named(of_encoder)}"
    if not_causal:
        return (
            f"it has layers with is_causal=False{_named(not_causal)}, as an encoder or attention "
            "to one has"
        )
    if mixers:
        return f"it hands no keywords on to its recurrent layers{_named(mixers)}"
    if attending:
        return (
            f"its layers take no position_embeddings{_named(attending)}, and its input adds no "
            "embedding of position_ids"
        )
    own = _with_own_attention(base)
    if own:
        return f"it computes attention in code of its own{_named(own)}"
    return "none of its layers is one of attention"


def _adds_alibi(base: PreTrainedModel) -> bool:
    if not any("alibi" in name for name in vars(code_of(base))):
        return False
    config = base.config
    return bool(getattr(getattr(config, "attn_config", config), "alibi", True))


def _attends_to_encoder(base: PreTrainedModel) -> bool:
    return bool(getattr(base.config, "add_cross_attention", False))


def _with_own_attention(base: PreTrainedModel) -> list[nn.Module]:
    """Return the innermost modules that are called attention and do not call their config's."""

    def is_attention(module: nn.Module) -> bool:
        return "Attention" in type(module).__name__ and not attends(module)

    found = [module for module in base.modules() if is_attention(module)]
    return [one for one in found if not any(map(is_attention, list(one.modules())[1:]))]


def _named(layers: Iterable[nn.Module]) -> str:
    names = class_names(type(layer) for layer in layers)
    return f" ({', '.join(names)})" if names else ""
