"""The attention function of `attn_implementation="cuseq"`.

A call can describe its sequences in several ways. In order of precedence:

- `packed=layout` runs `cuseq.varlen_attention`, in eager and in compiled code, with one graph for
  all packs. It never synchronises, except that a layout made from lengths on a GPU waits for one
  event.
- `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` run the same attention. Compiled
  code ignores the ints, which would recompile with every pack, and uses upper bounds instead, which
  cost time.
- Packed `position_ids` alone run the same attention in eager code, after a wait for one event per
  forward, for models that pass them on unchanged (Qwen2-VL makes three planes of them). Compiled
  code cannot read them. It runs sdpa with a dense mask built from them, which is exact but slow,
  also for batches that are not packed; give it lengths instead. For a model that makes a 2-D mask
  of ones itself (OPT) the mask overrides position ids here; `cuseq.enable` adds `packed` to the
  call of such a model.
- A 2-D mask, a 4-D mask or nothing runs sdpa. Without a mask, eager code must read the position
  ids, which costs the one event above.

Lengths take precedence over a 2-D mask, which is then ignored, with a warning in eager code. These
raise together with lengths: a 4-D mask, a model that builds its own pattern (but for blocks of
image tokens in eager code), and features that change the result and have no packed form (dropout in
attention, position biases). `packed` and other lengths of the same call must agree, as far as the
host can compare them. Models that do not follow `position_ids` are refused when they are created.
Give `position_ids` (`layout.position_ids[None]`) together with the lengths: attention does not need
them, but RoPE and learned positions do.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.import_utils import is_tracing

import cuseq
from cuseq._base.arguments import as_size
from cuseq._base.models import HOLD
from cuseq.attention import attention_by_offsets
from cuseq.integrations.transformers._indexers import (
    CHOICES,
    masks_of_long_documents,
    with_chosen_keys,
)
from cuseq.integrations.transformers._layers import dropout_option
from cuseq.integrations.transformers._lengths import (
    check_lengths,
    check_offsets,
    longest_on_host,
)
from cuseq.integrations.transformers._recurrent import leak_warning, leak_warning_by_name
from cuseq.integrations.transformers._warn import warn_once
from cuseq.integrations.transformers.documents import check_total
from cuseq.integrations.transformers.masks import DeferredMask, RowMask
from cuseq.integrations.transformers.names import (
    BACKEND,
    DOCUMENTS,
    NAME,
    UNSUPPORTED,
)
from cuseq.layout import check_layout, layout_of_offsets
from cuseq.layout.build import offsets_of_chunks


def cuseq_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DeferredMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    packed: cuseq.PackedLayout | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' `AttentionInterface`.

    The module's docstring describes the keywords and which of them synchronise.

    Args:
        module: The attention layer. Its `is_causal` is used if neither the keyword nor the mask
            function determines causality.
        query: [batch, query heads, seqlen, head_dim]. The concatenated rows of the batch are the
            packed row.
        key: [batch, key heads, seqlen, head_dim].
        value: [batch, key heads, seqlen, value head_dim].
        attention_mask: The result of the mask function, or the user's own 4-D mask.
        dropout: Must be 0 for packed rows.
        scaling: Factor of the scores, 1 / sqrt(head_dim) if None.
        sliding_window: Number of keys that a query sees, itself included. Used if no `DeferredMask`
            gives the window, as with sdpa. 0 and -1 mean None.
        position_ids: int [batch or 1, seqlen]; other shapes are not read as packed positions.
        packed: Layout of batch * seqlen tokens.
        cu_seq_lens_q: int [n_seqs + 1], offsets of the sequences; `cu_seq_lens_k` must be equal.
        max_length_q: Longest sequence, in tokens, on the host; `max_length_k` must be equal.
        softcap: Bound of the scores (Gemma 2), None for none.
        s_aux: Sinks [query heads], one score per head without a value. Packed rows with sinks need
            `packed`.

    Returns:
        [batch, seqlen, query heads, value head_dim], contiguous, and None for the weights.

    Raises:
        TypeError: `sliding_window` or a keyword of lengths has the wrong type.
        ValueError: Packed lengths come with a decode step, a mask or an unsupported feature, the
            layout has another number of tokens, or lengths contradict each other.
    """
    sliding_window = as_size(sliding_window, "sliding_window")
    # Compiled code that reads a size or an int may recompile.
    compiling = torch.compiler.is_compiling()
    deferred = attention_mask if isinstance(attention_mask, DeferredMask) else None
    lengths_given = packed is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if isinstance(attention_mask, Tensor) and hasattr(attention_mask, DOCUMENTS):
        lengths_given, packed = False, None  # the mask has them
    elif not lengths_given and deferred is not None:
        packed = deferred.told.packed
        if is_tracing(query):
            attention_mask = deferred.build(position_ids)
        elif packed is None:
            attention_mask = deferred.build_once(query.device)
    if not lengths_given and packed is None:
        # Models with an indexer make a mask of its choice only for implementations they know.
        chosen = {name: kwargs.pop(name, None) for name in CHOICES}
        attention_mask = with_chosen_keys(
            module, attention_mask, chosen, query, key.shape[2], position_ids
        )
        return _dense_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout,
            scaling,
            is_causal,
            s_aux,
            softcap,
            kwargs,
        )

    chosen = {}
    if isinstance(attention_mask, RowMask):
        chosen = {name: kwargs.pop(name, None) for name in CHOICES}
    _check_packable(module, query, key, attention_mask, dropout)
    _refuse(kwargs, UNSUPPORTED, "packed attention")
    if getattr(module, "attn_temperature_tuning", False) and not hasattr(module, BACKEND):
        raise ValueError(
            f"{type(module).__name__} scales queries by their positions in the row, so a model "
            f'made with attn_implementation="{NAME}" cannot take packed rows: call '
            "cuseq.enable(model)"
        )
    # A layer may declare itself bidirectional under a causal mask (PaliGemma): the mask decides.
    causal, window, chunk = getattr(module, "is_causal", True), sliding_window, None
    if deferred is not None:
        causal, window, chunk = deferred.causal, deferred.window, deferred.chunk
    if is_causal is not None:
        causal = is_causal
    if window is not None and window < 1:
        window = None
    if window is not None and not causal:
        raise ValueError(
            "packed attention has no sliding window without causality, got "
            f"sliding_window={window} and is_causal=False"
        )

    if deferred is not None and not compiling and deferred.recurrent:
        if hasattr(module, HOLD):
            warn_once(leak_warning(deferred.recurrent))
        else:
            warn_once(leak_warning_by_name(deferred.recurrent, module.config))
    rows = _rows_of(query, key, value)
    backend = getattr(module, BACKEND, "auto")
    offsets = bound = None
    if packed is None:  # else compiled code must not look at offsets, which change their size
        offsets = cu_seq_lens_q if cu_seq_lens_q is not None else cu_seq_lens_k
    if packed is not None:
        check_layout(packed)
        if not compiling:  # in compiled code the op compares the sizes when it runs
            check_total(packed, rows[0].shape[0])
            packed = packed.to(query.device)
    elif s_aux is not None:
        raise ValueError(
            "packed must be passed to a model with sinks, got only cu_seq_lens_q or _k"
        )
    elif not compiling:
        check_lengths({"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k})
        check_offsets(cu_seq_lens_q, cu_seq_lens_k)
        bound = longest_on_host(max_length_q, max_length_k)
    if chunk is not None:
        if compiling:
            out = _chunks_in_compiled_code(rows, packed, offsets, chunk, scaling, softcap, backend)
            return _as_batch(out, query), None
        if packed is None:
            packed = layout_of_offsets(offsets, rows[0].shape[0])
        packed = packed.chunked(chunk)
    if packed is not None:
        out = cuseq.varlen_attention(
            *rows,
            packed,
            causal=causal,
            window=window,
            spans=None if deferred is None else deferred.spans,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            backend=backend,
        )
        if isinstance(attention_mask, RowMask) and _was_chosen(attention_mask, chosen):
            options = {"s_aux": s_aux, "softcap": softcap, "scaling": scaling}
            out = _among_chosen_keys(module, rows, out, query, attention_mask, chosen, options)
    else:
        out = attention_by_offsets(
            rows, offsets, causal, scaling, bound, window=window, softcap=softcap, backend=backend
        )
    return _as_batch(out, query), None


def cuseq_tower_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a tower's layer, with the signature of `AttentionInterface`.

    Without offsets it is transformers' sdpa. Never synchronises where the offsets come from the
    functions that `_tower` replaces; otherwise the first layer waits for a copy of them.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if not torch.compiler.is_compiling():
        packed = layout_of_offsets(cu_seq_lens_q, query.shape[2])
        return cuseq_attention(module, query, key, value, attention_mask, packed=packed, **kwargs)
    _check_packable(module, query, key, attention_mask, kwargs.get("dropout", 0.0))
    # Without a bound, kernels would start for images as long as the row. Of a layer's longest
    # images and windows compiled code makes one symbol, so it has one graph for all grids.
    bound = max_length_q if isinstance(max_length_q, int) else None  # a tensor in old releases
    rows = _rows_of(query, key, value)
    out = attention_by_offsets(rows, cu_seq_lens_q, False, kwargs.get("scaling"), bound)
    return _as_batch(out, query), None


def _rows_of(*states: Tensor) -> list[Tensor]:
    """Return tensors [batch, heads, seqlen, dim] as [batch * seqlen, heads, dim].

    Those of models' tensors are views.
    """
    return [one.transpose(1, 2).flatten(0, 1) for one in states]


def _was_chosen(mask: RowMask, chosen: dict[str, Any]) -> bool:
    """Return whether an indexer has chosen among keys of the row."""
    return any(one is not None and one.numel() > 0 for one in (mask.chosen, *chosen.values()))


@torch.compiler.disable
def _among_chosen_keys(
    module: torch.nn.Module,
    rows: list[Tensor],
    out: Tensor,
    query: Tensor,
    mask: RowMask,
    chosen: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Return `out` with the documents whose keys an indexer has chosen attended to those alone."""
    parts, at = [], 0
    for begin, end, shown in masks_of_long_documents(module, mask, chosen, query):
        q, k, v = (one[begin:end].transpose(0, 1).unsqueeze(0) for one in rows)
        found, _ = _dense_attention(
            module, q, k, v, shown, 0.0, is_causal=False, kwargs={}, **options
        )
        parts += [out[at:begin], found.flatten(0, 1)]
        at = end
    return torch.cat([*parts, out[at:]]) if parts else out


def _as_batch(out: Tensor, query: Tensor) -> Tensor:
    batch, _, seqlen, _ = query.shape
    return out.view(batch, seqlen, out.shape[-2], out.shape[-1])


def _chunks_in_compiled_code(
    rows: list[Tensor],
    packed: cuseq.PackedLayout | None,
    offsets: Tensor,
    chunk: int,
    scaling: float | None,
    softcap: float | None,
    backend: str,
) -> Tensor:
    """Compute causal attention in chunks of each sequence, with offsets made in the graph.

    `PackedLayout.chunked` makes tensors on the host, which compiled code cannot. A chunk bounds the
    longest sequence well, so the op needs no lengths on the host.
    """
    padded = None
    if packed is not None:
        check_layout(packed, parts=False, trees=False)
        offsets, padded = packed.cu_seqlens_static, packed.cu_seqlens_padded_static
    room = offsets.shape[0] - 1 + rows[0].shape[0] // chunk
    chunks, padded = offsets_of_chunks(offsets.to(torch.int32), padded, chunk, room)
    return attention_by_offsets(
        rows, chunks, True, scaling, chunk, padded=padded, softcap=softcap, backend=backend
    )


def _dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    s_aux: Tensor | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Run transformers' sdpa, or the model's eager attention for sinks and soft caps."""
    if softcap is not None:
        kwargs = {**kwargs, "softcap": softcap}
    if s_aux is not None or softcap is not None:
        return _dense_attention_by_model(
            module, query, key, value, attention_mask, dropout, scaling, kwargs
        )
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )


def _dense_attention_by_model(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Run the model's own eager attention, which knows its sinks and soft caps, as sdpa does not.

    It takes an additive mask.
    """
    if attention_mask is None and query.shape[2] > 1:
        shape = query.shape[2], key.shape[2]
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min  # more than float32 holds if queries are float64
        shown = query.new_zeros(attention_mask.shape)
        attention_mask = shown.masked_fill(~attention_mask, hidden)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = eager(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _check_packable(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: DeferredMask | Tensor | None,
    dropout: float,
) -> None:
    if query.shape[2] != key.shape[2]:
        if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
            raise ValueError(
                f"{type(module).__name__} attends to another sequence, of which packed lengths say "
                "nothing: train this model on padded batches"
            )
        raise ValueError(
            "packed lengths describe whole rows, not a decode step: they need as many keys as "
            f"queries, got {query.shape[2]} queries and {key.shape[2]} keys (a filled KV cache?). "
            "Pass use_cache=False to a model that adds keys of its own to its cache"
        )
    # A 2-D mask may be ignored, because the lengths determine more. No other mask is allowed.
    is_2d = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    if not (attention_mask is None or isinstance(attention_mask, DeferredMask) or is_2d):
        shape = list(getattr(attention_mask, "shape", ()))
        raise ValueError(
            "packed lengths cannot be combined with a 4-D attention_mask, got "
            f"{type(attention_mask).__name__} of shape {shape}; pass one of the two. If you "
            "passed no mask, the model made one for a pattern (chunks, another kind of causality) "
            "that packed attention cannot compute. Blocks of image tokens it computes in code that "
            "is not compiled as a whole, from packed or position_ids alone"
        )
    if dropout:
        raise ValueError(
            f"packed attention has no dropout, got dropout={dropout}; set the config's "
            f"{dropout_option(module)} to 0"
        )


def _refuse(kwargs: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name} is not supported by {where}, and dropping it would be wrong")
