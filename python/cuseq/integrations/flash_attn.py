"""The functions of flash-attn over cuseq's attention, for code that calls flash-attn.

    from cuseq.integrations.flash_attn import flash_attn_varlen_func

They take the arguments of flash-attn 2.8 by the same names, need no package beside torch, and run
the backend that `varlen_attention` chooses. transformers calls them where a model's
`attn_implementation` names the Hub kernel that scripts/hub_kernel.py lays out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuseq._base.modes import is_capturing
from cuseq.attention import attention_by_offsets, varlen_attention
from cuseq.cache import new_key
from cuseq.layout import PackedLayout, layout_of_offsets, remembered_layout

_EVEN = new_key()  # of layouts of batches, which have no tensor of lengths


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute attention inside each sequence of a packed row, called as flash-attn's function.

    A layout is made of the offsets once a forward, whatever the number of layers that get the same
    tensors, and the first layer waits for the event of one small copy if they are on a GPU. Where
    queries are fewer than keys, as in decoding with a cache, sequences run one after the other by
    `scaled_dot_product_attention`; with `causal` the last query then sees all keys. In compiled
    code and CUDA graphs, whose lengths are read on the device, the two must be equal.

    Args:
        q: `[total_q, heads, head_dim]`.
        k, v: `[total_k, key_heads, head_dim]`.
        cu_seqlens_q, cu_seqlens_k: integer `[n_seqs + 1]`, offsets of the sequences.
        max_seqlen_q: no sequence is longer, in compiled code and CUDA graphs; else the offsets say
            it, as for max_seqlen_k.
        softmax_scale: factor of the scores, default `head_dim ** -0.5`.
        window_size: keys that a token sees to the left and to the right of its own; -1 or None is
            all. With `causal` it sees none to the right, whatever that one is, and 0 there means
            `causal`; else the two must be equal.
        softcap: bound of the scores (arXiv:2408.00118); 0 means none.
        s_aux: floating point `[heads]`, a sink for each head (arXiv:2309.17453).
        dropout_p, alibi_slopes, return_attn_probs, block_table: must be left at their defaults.
        deterministic: needs `torch.use_deterministic_algorithms(True)`.

    Returns:
        `[total_q, heads, head_dim]`.

    Raises:
        ValueError, TypeError: as `cuseq.varlen_attention`, or an argument has no meaning there.

    Examples:
        >>> from cuseq.integrations.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 3, 3, causal=True).shape
        torch.Size([5, 4, 16])
    """
    _check_unused(dropout_p, alibi_slopes, return_attn_probs, deterministic, block_table)
    options = _options(causal, window_size, softmax_scale, softcap, s_aux)
    if torch.compiler.is_compiling() or is_capturing(q.device):
        _check_equal(q, k, cu_seqlens_q, cu_seqlens_k)
        bound = max_seqlen_q if isinstance(max_seqlen_q, int) else None
        return _by_offsets((q, k, v), cu_seqlens_q, bound, options)
    packed = layout_of_offsets(cu_seqlens_q, q.shape[0])
    if cu_seqlens_k is not cu_seqlens_q:
        keys = layout_of_offsets(cu_seqlens_k, k.shape[0])
        lengths = packed.lengths_on_host(), keys.lengths_on_host()
        if not torch.equal(*lengths):
            return _with_more_keys(q, k, v, *(one.tolist() for one in lengths), options)
    return varlen_attention(q, k, v, packed, **options)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Compute attention in each row of a batch without padding, called as flash-attn's function.

    The arguments that are not named here are those of `flash_attn_varlen_func`.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`.
        k, v: `[batch, seqlen_k, key_heads, head_dim]`.

    Returns:
        `[batch, seqlen_q, heads, head_dim]`.

    Raises:
        ValueError, TypeError: as `flash_attn_varlen_func`.

    Examples:
        >>> from cuseq.integrations.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 3, 4, 16])
    """
    _check_unused(dropout_p, alibi_slopes, return_attn_probs, deterministic, None)
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    if k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            "k and v must have the batch size of q and one length, got shapes "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    options = _options(causal, window_size, softmax_scale, softcap, s_aux)
    rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    if seqlen_q == seqlen_k and (torch.compiler.is_compiling() or is_capturing(q.device)):
        offsets = seqlen_q * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        out = _by_offsets(rows, offsets, seqlen_q, options)
    elif seqlen_q == seqlen_k:
        out = varlen_attention(*rows, _even_layout(batch, seqlen_q, q.device), **options)
    else:
        out = _with_more_keys(*rows, [seqlen_q] * batch, [seqlen_k] * batch, options)
    return out.unflatten(0, (batch, seqlen_q))


def _check_unused(
    dropout_p: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    deterministic: bool,
    block_table: Tensor | None,
) -> None:
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p must be 0, which cuseq's attention has none of, got {dropout_p}"
        )
    given = {"alibi_slopes": alibi_slopes, "block_table": block_table}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None, which cuseq's attention does not take")
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs must be False: cuseq's attention makes no probabilities"
        )
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic must be False, got True: call torch.use_deterministic_algorithms(True), "
            "which cuseq's attention follows"
        )


def _options(
    causal: bool,
    window_size: tuple[int | None, int | None],
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Return the options of `varlen_attention`, whose window counts a token's own key too."""
    left, right = (-1 if side is None else int(side) for side in window_size)
    if not causal and right != 0 and left != right and max(left, right) >= 0:
        raise ValueError(
            "window_size must be as wide on both sides without causal, or 0 on the right, got "
            f"{tuple(window_size)}"
        )
    return {
        "causal": causal or right == 0,
        "window": None if left < 0 else left + 1,
        "scale": scale,
        "softcap": softcap or None,
        "sinks": sinks,
    }


def _even_layout(batch: int, seqlen: int, device: torch.device) -> PackedLayout:
    def layout() -> PackedLayout:
        return PackedLayout.from_lengths([seqlen] * batch, max_seqs=max(batch, 1), device=device)

    return remembered_layout(_EVEN, "flash_attn_batch", layout, batch, seqlen, device=device)


def _check_equal(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise unless each sequence has as many keys as queries; values are compared on the device."""
    if q.shape[0] != k.shape[0] or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_k must be equal to cu_seqlens_q in compiled code and CUDA graphs, got "
            f"{q.shape[0]} queries and {k.shape[0]} keys"
        )
    if cu_seqlens_k is not cu_seqlens_q:
        torch._assert_async(
            (cu_seqlens_q == cu_seqlens_k).all(),
            "cu_seqlens_k must be equal to cu_seqlens_q in compiled code and CUDA graphs",
        )


def _by_offsets(
    rows: tuple[Tensor, Tensor, Tensor],
    offsets: Tensor,
    bound: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Compute attention where no layout can be made."""
    if options["sinks"] is not None:
        raise ValueError(
            "s_aux must be None in compiled code and CUDA graphs, where cuseq's attention needs a "
            "layout for it: call cuseq.varlen_attention"
        )
    causal, window, softcap = options["causal"], options["window"], options["softcap"]
    scale = options["scale"]
    return attention_by_offsets(rows, offsets, causal, scale, bound, window=window, softcap=softcap)


def _with_more_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: list[int],
    keys: list[int],
    options: dict[str, Any],
) -> Tensor:
    """Return attention of the last tokens of each sequence to all of its keys."""
    for name in ("softcap", "sinks"):
        if options[name] is not None:
            raise ValueError(
                f"{name} must be unset where queries and keys of a sequence differ in number: such "
                "a call runs scaled_dot_product_attention, which has none"
            )
    if len(queries) != len(keys):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have equally many sequences, got "
            f"{len(queries)} and {len(keys)}"
        )
    if v.shape[0] != k.shape[0]:
        raise ValueError(
            f"v must have as many tokens as k, got shapes {list(v.shape)} and {list(k.shape)}"
        )
    parts: list[Tensor] = []
    at_q = at_k = 0
    for n_q, n_k in zip(queries, keys, strict=True):
        at_q, at_k = at_q + n_q, at_k + n_k
        # Queries before the first key see none, or with a window those of its right side.
        reach = 0 if options["causal"] else (options["window"] or n_q) - 1
        seeing = min(n_q, n_k + reach) if n_k else 0
        if seeing < n_q:
            parts.append(q.new_zeros(n_q - seeing, q.shape[1], v.shape[2]))
        if seeing:
            rows = q[at_q - seeing : at_q], k[at_k - n_k : at_k], v[at_k - n_k : at_k]
            parts.append(_last_tokens(*rows, options))
    if at_q < q.shape[0]:
        parts.append(q.new_zeros(q.shape[0] - at_q, q.shape[1], v.shape[2]))
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[2])


def _last_tokens(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Return attention of one sequence, whose last query is its last key's token."""
    queries = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
    apart = queries[:, None] - torch.arange(k.shape[0], device=q.device)
    seen = apart >= 0 if options["causal"] else torch.ones_like(apart, dtype=torch.bool)
    if options["window"] is not None:
        seen &= apart.abs() < options["window"]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=seen,
        scale=options["scale"],
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    return out[0].transpose(0, 1)
