"""Attention of unsloth's own model classes: packed rows through `cuseq.varlen_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuseq.attention import varlen_attention
from cuseq.integrations.unsloth._layouts import as_window, row_of
from cuseq.layout import PackedLayout

# The backends that cuseq replaces for packed rows, and the field of unsloth's options for each.
OPTIONS = {"sdpa": "sdpa_kwargs", "xformers": "xformers_kwargs"}
# The arguments of unsloth's attention. An unknown field could request unsupported behaviour.
FIELDS = {
    "AttentionConfig": (
        "backend n_kv_heads n_groups flash_dense_kwargs flash_varlen_kwargs sdpa_kwargs "
        "xformers_kwargs"
    ).split(),
    "AttentionContext": (
        "bsz q_len kv_seq_len n_heads head_dim requires_grad seq_info attention_mask causal_mask "
        "sliding_window prefix_seg_info is_causal training"
    ).split(),
}


def run_attention(
    original: Callable[..., Tensor], *, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor
) -> Tensor:
    """Run unsloth's attention dispatch; use cuseq for packed rows.

    Args:
        original: unsloth's dispatch, used for every other call.
        config, context: unsloth's dataclasses.
        Q, K, V: `[1, heads, tokens, head_dim]`.

    Returns:
        `[1, tokens, heads, head_dim]`.
    """
    if context.seq_info is None or not _is_ours(config, context, Q, K, V):
        if context.seq_info is not None and isinstance(context.seq_info[0], PackedLayout):
            # On this error unsloth runs the block uncompiled, where its attention gets the lengths.
            raise ValueError("compiled blocks must attend without dropout, masks and soft caps")
        return original(config=config, context=context, Q=Q, K=K, V=V)
    if torch.compiler.is_compiling():
        packed = context.seq_info[0]
    else:
        packed = row_of(context.seq_info, Q.shape[2]).to(Q.device)
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (Q, K, V)]
    out = varlen_attention(
        *rows,
        packed,
        causal=context.is_causal,
        window=as_window(context.sliding_window),
        scale=_options(config).get("scale"),
    )
    return out.unsqueeze(0)


def _is_ours(config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> bool:
    """Return whether this is one packed row and cuseq gives the result of sdpa or xformers."""
    if (
        config.backend not in OPTIONS
        or context.attention_mask is not None
        or context.prefix_seg_info is not None
        or not (context.is_causal or as_window(context.sliding_window) is None)
        or Q.shape[0] != 1
        or Q.shape[2] != K.shape[2]
        or not Q.dtype == K.dtype == V.dtype
        or (config.flash_varlen_kwargs or {}).get("softcap")
    ):
        return False
    if any(name != "scale" and not _is_off(value) for name, value in _options(config).items()):
        return False
    if torch.compiler.is_compiling():
        return isinstance(context.seq_info[0], PackedLayout)
    # flash-attention's backward is nondeterministic.
    return not torch.are_deterministic_algorithms_enabled()


def _options(config: Any) -> dict[str, Any]:
    return getattr(config, OPTIONS[config.backend]) or {}


def _is_off(option: Any) -> bool:
    return option is None or (isinstance(option, int | float) and not option)
