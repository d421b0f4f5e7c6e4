"""Names that cuseq shares with transformers, and names that it expects in models."""

from __future__ import annotations

NAME = "cuseq"
"""What `attn_implementation` is called."""

UNSUPPORTED = (
    "softcap",
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
    "output_attentions",
)
"""Keywords that models give their attention and that change its result."""

ROTATE = "apply_rotary_pos_emb"
ROTATE_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
"""The function by which modeling modules rotate queries and keys."""

FORWARD_PARAMETERS = [
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
    "kwargs",
]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""An attention layer whose norms can go into the rotation."""
