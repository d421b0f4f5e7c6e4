"""Names that cuseq shares with transformers, and names that it expects in models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

NAME = "cuseq"
"""What `attn_implementation` is called."""

TOWER = "cuseq_flash"
"""The `attn_implementation` of vision and audio towers.

transformers gives offsets only to attention with "flash" in its name.
"""

BACKEND = "_cuseq_backend"
"""The attribute of an attention layer that says which backend `enable` was asked for."""

DOCUMENTS = "_cuseq_documents"
"""The attribute of a mask that cuseq made of the documents of a row."""

UNSUPPORTED = (
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
    "output_attentions",
)
"""Keywords that models give their attention and that change its result."""

MASK_BESIDE_LENGTHS = (
    "attention_mask has no effect with packed lengths, which determine the sequences; pass one of "
    "the two"
)
"""The warning about a 2-D mask beside packed lengths."""

ROTATE = "apply_rotary_pos_emb"
"""The function by which most modeling modules rotate queries and keys."""

CACHE = "cache"
"""The argument that holds keys, values or states of earlier tokens."""

RENAMED = {
    "past_key_values": CACHE,
    "past_key_value": CACHE,
    "cache_params": CACHE,
    "layer_past": CACHE,
}
"""Names of arguments in some releases or models of transformers, and what cuseq calls them.

Code that looks for such an argument uses the functions below. An argument that a release has
renamed would else count as one that the call lacks.
"""


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, renamed as in `RENAMED`."""
    return [RENAMED.get(name, name) for name in inspect.signature(function).parameters]


def cache_names(arguments: Iterable[str]) -> list[str]:
    """Return those of some arguments' names that mean the cache."""
    return [name for name in arguments if RENAMED.get(name, name) == CACHE]


def pop_cache(keywords: dict[str, Any], given: Any = None) -> Any:
    """Remove the cache from keywords and return it; `given` is one that came by position."""
    for name in cache_names(keywords):
        value = keywords.pop(name)
        given = value if given is None else given
    return given


FORWARD_PARAMETERS = [
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    CACHE,
    "kwargs",
]
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""An attention layer whose norms can go into the rotation: its parts, by any of these names."""
