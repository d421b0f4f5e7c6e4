"""Masks of a packed row under unsloth's names: dense masks and xformers' biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import check_flag
from cuseq.integrations.unsloth._layouts import as_window, lengths_of, row_of


def build_sdpa_packed_attention_mask(
    seq_info: Sequence[Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    sliding_window: int | None = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Return the mask that `scaled_dot_product_attention` adds to the scores of a packed row.

    Args:
        seq_info: from `get_packed_info_from_kwargs`, or any tuple that starts with lengths.
        dtype: floating point dtype of the mask.
        device: device of the mask.
        sliding_window: number of keys that a token sees, itself included; None, 0 or a negative
            number means all. With `is_causal=False` it limits only earlier keys, as in unsloth.
        total_tokens: length of the row; tokens after the last sequence are one more segment.
        is_causal: whether a token sees only itself and earlier tokens.

    Returns:
        `[1, 1, total_tokens, total_tokens]`, 0 where visible, else -inf. The mask is cached while
        the lengths live (`PackedLayout.dense_mask`), except that a window without causality makes a
        new mask in every call. Synchronises as `get_packed_info_from_kwargs` does.

    Raises:
        TypeError: `seq_info` is not a tuple of lengths, `sliding_window` or `total_tokens` is not
            an int, or `is_causal` is not a bool.

    Examples:
        >>> from cuseq.integrations.unsloth import build_sdpa_packed_attention_mask
        >>> info = (torch.tensor([1, 2]),)
        >>> build_sdpa_packed_attention_mask(info, dtype=torch.float32, device="cpu")
        tensor([[[[0., -inf, -inf],
                  [-inf, 0., -inf],
                  [-inf, 0., 0.]]]])
    """
    check_flag(is_causal, "is_causal")
    packed, window = row_of(seq_info, total_tokens).to(device), as_window(sliding_window)
    if is_causal or window is None:
        return packed.dense_mask(dtype, causal=is_causal, window=window)
    tokens = torch.arange(packed.total_tokens, device=packed.device)
    too_old = tokens.unsqueeze(1) - tokens >= window
    return packed.dense_mask(dtype, causal=False).masked_fill(too_old, float("-inf"))


def build_xformers_block_causal_mask(
    seq_info: Sequence[Any] | None,
    *,
    sliding_window: int | None = None,
    base_mask: Any | None = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Any | None:
    """Return the bias of a packed row for xformers' attention, on the device of the lengths.

    Args:
        seq_info: as for the dense mask; None for a row that is not packed.
        sliding_window: number of keys that a token sees, itself included (xformers' local
            attention).
        base_mask: the result if `seq_info` is None; it gets the window if it supports one.
        total_tokens, is_causal: as for the dense mask.

    Returns:
        A `BlockDiagonalCausalMask`, or a `BlockDiagonalMask` without causality; None if xformers is
        not installed or there are no sequences. Synchronises as `get_packed_info_from_kwargs` does.

    Raises:
        TypeError: as for the dense mask.

    Examples:
        >>> from cuseq.integrations.unsloth import build_xformers_block_causal_mask
        >>> bias = build_xformers_block_causal_mask((torch.tensor([2, 3]),))
    """
    check_flag(is_causal, "is_causal")
    window = as_window(sliding_window)
    if seq_info is None:
        return _with_window(base_mask, window)
    lengths = lengths_of(seq_info)
    if lengths.numel() == 0:
        return None
    try:
        from xformers.ops.fmha import attn_bias
    except ImportError:
        return None
    packed = row_of(seq_info, total_tokens).to(lengths.device)
    if is_causal:
        return packed.xformers_bias(window=window)
    causal = packed.xformers_bias()
    bias = attn_bias.BlockDiagonalMask(causal.q_seqinfo, causal.k_seqinfo)
    return _with_window(bias, window)


def _with_window(bias: Any, window: int | None) -> Any:
    if window is None or not hasattr(bias, "make_local_attention"):
        return bias
    return bias.make_local_attention(window_size=window)
