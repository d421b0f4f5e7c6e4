"""Names that cuseq shares with transformers, and names that it expects in models."""

from __future__ import annotations

NAME = "cuseq"
"""What `attn_implementation` is called."""

BACKEND = "_cuseq_backend"
"""The attribute of an attention layer that says which backend `enable` was asked for."""

MAKES_MASK = "_cuseq_makes_mask"
"""The attribute of an attention layer whose model may make a 2-D mask of ones itself."""

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

FORWARD_PARAMETERS = [
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
    "kwargs",
]
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""An attention layer whose norms can go into the rotation: its parts, by any of these names."""
