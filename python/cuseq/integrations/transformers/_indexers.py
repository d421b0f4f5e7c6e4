"""Attention to the keys that an indexer chooses: DeepSeek V3.2's sparse attention and its kin.

An indexer scores the pairs of tokens of a row in fp32, and each query sees the keys with the
largest scores, up to a budget (DeepSeek-AI 2025, arXiv:2512.02556). In a document that fits into
the budget these are all keys, so packed attention is exact and no score is made. A longer document
goes through the model's own indexer alone, and its attention through a dense mask of its own
tokens. Calls without documents run the model's own code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from cuseq._base.modes import is_capturing
from cuseq.integrations.transformers._forwards import our_forward
from cuseq.integrations.transformers._layers import keywords_of
from cuseq.integrations.transformers.documents import (
    positions_in_compiled_code,
)
from cuseq.integrations.transformers.masks import DeferredMask, RowMask
from cuseq.integrations.transformers.names import cache_names
from cuseq.layout import PackedLayout, StaticLayout, check_documents, layout_of_offsets

ROW = "_cuseq_row"  # on an indexer, while its layer runs: the layout of the packed row


@dataclass(frozen=True)
class Kind:
    """A kind of indexer.

    Attributes:
        uses: names that its forward uses, by which it is recognised.
        lacks: parts of names that it must not use.
        budget: returns the most tokens of a document that leave it no choice.
        keyword: by which its layer gives the choice to attention; None if it changes the mask.
        tokens_at: the dimension of the choice that counts queries.
    """

    uses: frozenset[str]
    lacks: tuple[str, ...]
    budget: Callable[[Any], int]
    keyword: str | None
    tokens_at: int = 1


KINDS = (
    # int32 [batch, queries, keys]: DeepSeek V3.2, GLM DSA, Mistral Large 4 and others.
    Kind(
        frozenset(("index_topk", "topk")), ("pool", "compress", "block"),
        lambda one: one.index_topk, "indices",
    ),
    # Numbers of blocks, int64 [batch, index heads, queries, blocks]: MiniMax M3.
    Kind(
        frozenset(("topk_blocks", "block_size", "topk")), (),
        lambda one: one.topk_blocks * one.block_size, "block_indices", tokens_at=2,
    ),
    # A mask, bool [batch, 1, queries, keys], of blocks and the rest of a document: Qwen4-Exp.
    Kind(
        frozenset(("block_topk", "compress_ratio", "token_budget")), (),
        lambda one: (one.block_topk + 1) * one.compress_ratio - 1, None,
    ),
)  # fmt: skip


CHOICES = tuple(kind.keyword for kind in KINDS if kind.keyword is not None)
"""The keywords by which layers hand on what an indexer chose."""

_IN_TRANSFORMERS = {"eager", "sdpa"}  # the implementations for which a layer makes a mask itself


def kind_of(indexer: nn.Module) -> Kind | None:
    """Return the kind of an indexer; None for one that is not known."""
    code = inspect.unwrap(type(indexer).forward).__code__
    names = set(code.co_names)
    for kind in KINDS:
        if kind.uses <= names and not any(part in name for name in names for part in kind.lacks):
            return kind
    return None


def refuse_other_indexers(layers: list[nn.Module]) -> None:
    """Raise ValueError if an indexer is of no known kind, or its layer keeps the choice to itself.

    Layers without one reuse what an earlier layer chose. In older releases of transformers layers
    make a mask of tokens x tokens for every kind of attention.
    """
    for layer in layers:
        indexer = getattr(layer, "indexer", None)
        if indexer is None:
            continue
        if getattr(layer.config, "ple_layer_ids", None):
            raise ValueError(
                f"{type(layer).__name__} {layer.layer_idx} stands beside embeddings of n-grams "
                "along the row (ple_layer_ids of its config), which reach over the ends of "
                "documents: train this model on padded batches"
            )
        kind = kind_of(indexer)
        hands_it_on = kind is not None and (
            kind.keyword is None or _IN_TRANSFORMERS | {kind.keyword} <= keywords_of(type(layer))
        )
        if not hands_it_on:
            older = "" if kind is None else "; this transformers makes a mask there: update it"
            raise ValueError(
                f"{type(layer).__name__} {layer.layer_idx} attends only to keys that its indexer "
                f"chooses, which packed attention cannot{older}"
            )


@functools.cache
def indexed_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for an attention layer with an indexer.

    A packed row's layout comes in place of its mask.
    """
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @our_forward
    def indexed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = type(self).forward
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        mask, packed = kwargs.get("attention_mask"), kwargs.get("packed")
        offsets = kwargs.get("cu_seq_lens_q")
        if packed is None and offsets is not None:
            batch, seqlen, _ = kwargs["hidden_states"].shape
            packed = layout_of_offsets(offsets, batch * seqlen)
        elif packed is None and isinstance(mask, DeferredMask):
            packed = mask.told.packed
        if packed is not None:
            check_documents(
                packed,
                f"{type(self).__name__} attends to keys that an indexer chooses, which needs whole "
                "documents",
            )
            # MiniMax M3 counts blocks by positions, and Mistral Large 4 scales queries.
            positions = _positions(packed, kwargs["hidden_states"])
            kwargs |= {"packed": packed, "attention_mask": RowMask(packed, mask)}
            kwargs["position_ids"] = positions
        elif isinstance(mask, DeferredMask):  # the layer or its indexer reads it
            rows = kwargs["hidden_states"]
            kwargs["attention_mask"] = (
                mask.build(kwargs.get("position_ids"))
                if is_tracing(rows)
                else mask.build_once(rows.device)
            )
        if self.indexer is None:
            return forward(self, **kwargs)
        with _lent(self.indexer, packed):
            return forward(self, **kwargs)

    return indexed


def _positions(packed: PackedLayout, rows: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return packed.to(rows.device).position_ids.view(rows.shape[:2])
    found = positions_in_compiled_code(packed, None, rows.shape[0] * rows.shape[1])
    assert found is not None
    return found.to(rows.device).view(rows.shape[:2])


class _Rows(threading.local):
    def __init__(self) -> None:
        self.of: dict[nn.Module, PackedLayout | None] = {}


_rows = _Rows()  # of the indexers whose layers this thread runs; None: of a plain call


@contextlib.contextmanager
def _lent(indexer: nn.Module, packed: PackedLayout | None) -> Iterator[None]:
    """Lend the layout of a row to an indexer while its layer runs, or say that there is none.

    Compiled code cannot read what belongs to a thread, and takes the indexer's attribute.
    """
    before = getattr(indexer, ROW, None)
    setattr(indexer, ROW, packed)
    of_thread = {} if torch.compiler.is_compiling() else _rows.of
    outer = of_thread.copy()
    of_thread[indexer] = packed
    try:
        yield
    finally:
        setattr(indexer, ROW, before)
        of_thread.pop(indexer)
        of_thread.update(outer)


def _row_of(indexer: nn.Module) -> PackedLayout | None:
    """Return the layout that is lent to an indexer now, or None."""
    if torch.compiler.is_compiling() or indexer not in _rows.of:
        return getattr(indexer, ROW, None)
    return _rows.of[indexer]


@functools.cache
def choosing_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for an indexer, which sees of a packed row the documents that leave it a
    choice.

    It returns what the indexer returns; for a packed row what it returns for each of those
    documents alone, joined along the queries. Masks of documents are joined as `[numbers]`.
    """
    names = list(inspect.signature(cls.forward).parameters)[1:]

    @our_forward
    def chosen(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        packed = _row_of(self)
        if packed is None:
            return type(self).forward(self, **given)
        return _choose_in_long_documents(self, packed, given)

    return chosen


@torch.compiler.disable
def _choose_in_long_documents(
    indexer: nn.Module, packed: PackedLayout, given: dict[str, Any]
) -> Tensor:
    kind, rows = kind_of(indexer), given["hidden_states"]
    assert kind is not None  # `enable` has refused others
    documents = _long_documents(packed, kind.budget(indexer), rows.device)
    if not documents:
        return torch.empty(0, dtype=torch.int32, device=rows.device)
    one_row = {name: _as_row(value, rows.shape[:2]) for name, value in given.items()}
    one_row |= dict.fromkeys(cache_names(given))  # which has nothing of this row
    chosen = []
    for begin, end in documents:
        alone = {name: _cut(value, begin, end) for name, value in one_row.items()}
        if "attention_mask" in alone:
            mask = _causal_mask(end - begin, rows.device)
            alone["attention_mask"] = mask[:, 0] if kind.keyword is not None else mask
        found = type(indexer).forward(indexer, **alone)
        chosen.append(found if kind.keyword is not None else found.flatten())
    return torch.cat(chosen, dim=kind.tokens_at if kind.keyword is not None else 0)


def masks_of_long_documents(
    layer: nn.Module, mask: RowMask, keywords: dict[str, Any], like: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield where the documents begin and end whose keys were chosen, with their dense masks.

    Args:
        layer: the attention layer.
        mask: what it got in place of a mask.
        keywords: what else it gave its attention.
        like: its queries.

    Yields:
        `(begin, end, mask)`, the mask bool or additive `[1, 1 or heads, n, n]`.
    """
    found = next((one for one in KINDS if keywords.get(one.keyword or "") is not None), None)
    chosen = mask.chosen if found is None else keywords[found.keyword or ""]
    if chosen is None or chosen.numel() == 0:
        return
    if layer.indexer is not None:
        kind = kind_of(layer.indexer)
        assert kind is not None
        most = kind.budget(layer.indexer)
    else:
        most = chosen.shape[-1]  # of single keys, which alone are shared among layers
    at = 0
    for begin, end in _long_documents(mask.layout, most, like.device):
        n = end - begin
        causal = _causal_mask(n, like.device)
        if found is None:
            yield begin, end, causal & chosen[at : at + n * n].view(1, 1, n, n)
            at += n * n
            continue
        keys = chosen.narrow(found.tokens_at, at, n)
        alone = like.new_empty(1, like.shape[1], n, 0)
        yield begin, end, with_chosen_keys(layer, causal, {found.keyword: keys}, alone)
        at += n


def with_chosen_keys(
    layer: nn.Module,
    mask: Tensor | None,
    keywords: dict[str, Any],
    query: Tensor,
    keys: int | None = None,
    position_ids: Tensor | None = None,
) -> Tensor | None:
    """Return a dense mask that also hides the keys that an indexer has not chosen.

    Args:
        layer: the attention layer.
        mask: bool or additive `[batch, 1, queries, keys]`, or None.
        keywords: what the layer gave its attention, the choice among it.
        query: `[batch, heads, queries, head_dim]`.
        keys: their number, default that of the queries.
        position_ids: those that the layer got.
    """
    keys = query.shape[2] if keys is None else keys
    if (blocks := keywords.get("block_indices")) is not None:
        if position_ids is None:
            position_ids = torch.arange(keys - query.shape[2], keys, device=query.device)
        if position_ids.dim() == 1:
            position_ids = position_ids.unsqueeze(0)
        return layer.indexer.build_block_mask(
            blocks, mask, keys, query.dtype, query.device,
            position_ids.expand(query.shape[0], -1),
        )  # fmt: skip
    indices = keywords.get("indices")
    if indices is None:
        return mask
    shape = query.shape[0], query.shape[2], keys
    others = torch.ones(shape, dtype=torch.bool, device=query.device)
    others = others.scatter(-1, indices.long(), False).unsqueeze(1)
    if mask is None:
        return ~others
    if mask.dtype == torch.bool:
        return mask & ~others
    return mask.masked_fill(others, torch.finfo(query.dtype).min)


def _long_documents(packed: PackedLayout, most: int, device: torch.device) -> list[tuple[int, int]]:
    """Return where the documents of more than `most` tokens begin and end in the row.

    Raises:
        ValueError: the row is one of a CUDA graph, whose lengths are not known, and may have such.
    """
    if packed.is_replayed or is_capturing(device):
        bound = packed.max_seqlen_bound if isinstance(packed, StaticLayout) else None
        if bound is None or bound > most:
            raise ValueError(
                "a CUDA graph cannot attend to keys that an indexer chooses: documents of up to "
                f"{most} tokens leave it no choice, and the graph's rows may have longer ones, up "
                f"to {packed.total_tokens if bound is None else bound}: run these layers without a "
                "graph"
            )
        return []
    if packed.max_seqlen <= most:
        return []
    found, begin = [], 0
    lengths = packed.lengths_on_host().tolist()
    for length, whole in zip(lengths, packed.segments.lengths_on_host().tolist(), strict=True):
        if length > most:
            found.append((begin, begin + length))
        begin += whole
    return found


def _causal_mask(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()


def _as_row(value: Any, shape: torch.Size) -> Any:
    """Return a tensor `[batch or 1, seqlen, ...]` as one row `[1, tokens, ...]`."""
    if isinstance(value, tuple):
        return tuple(_as_row(one, shape) for one in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return value
    return value.expand(shape[0], *value.shape[1:]).flatten(0, 1).unsqueeze(0)


def _cut(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(one, begin, end) for one in value)
    return value[:, begin:end] if isinstance(value, Tensor) and value.dim() >= 2 else value
