"""Calls of a function of a row on few padded batches of the row's documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import copy_pair
from cuseq.cache import remember
from cuseq.integrations.transformers._warn import warn_once
from cuseq.layout import PackedLayout

Run = Callable[..., tuple[Tensor, Tensor | None]]

_CHUNK = 64  # tokens; the functions pad rows to chunks of this or a larger size
# What a call costs beside its tokens, in tokens: on a GPU one call of a chunked rule launches a
# thousand kernels, and a few dozen more for each chunk of its longest document.
_GPU_CALL, _GPU_CHUNK = 8192, 256
_CPU_CALL, _CPU_CHUNK = 256, 0
_ROWS = 2  # a batch holds at most this many times the tokens of the row

_ops = torch.ops.cuseq


def slow_warning(what: str, remedy: str) -> str:
    """Return the warning that something runs without a kernel for packed rows."""
    return (
        f"SLOW: {what} of packed rows runs in PyTorch, where one kernel call would do. This is "
        f"exact, but takes many small kernels in each such layer: {remedy}"
    )


class _Batches(NamedTuple):
    """Padded batches of the documents of a row.

    Attributes:
        index: int32, the token of each slot of all batches, batch after batch; -1 on padding.
        inverse: int32 `[total_tokens]`, the slot of each token; -1 on padding and tail.
        shapes: documents and tokens of each batch; the last sequence with tokens is in the first.
    """

    index: Tensor
    inverse: Tensor
    shapes: list[tuple[int, int]]


@torch.compiler.disable
def by_batches(
    what: str,
    remedy: str,
    packed: PackedLayout,
    run: Run,
    *rows: Tensor,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Call `run` on padded batches of the sequences of a row, and warn once that this is slow.

    Nothing in padding or tail reaches a sequence. Compiled code calls this outside the graph,
    because the batches depend on the lengths. Waits for lengths that came from a GPU, once.

    Args:
        what, remedy: for `slow_warning`.
        packed: the layout.
        run: `run(keeps, *rows)` of documents `[n, longest, ...]`, each followed by zeros; returns
            the output `[n, longest, ...]` and, if `keeps`, the state after the only document.
        *rows: `[1, total_tokens, ...]`.
        keeps_state: whether the state after the last sequence is wanted. It then is a batch of its
            own, because the zeros after a document could change its state.

    Returns:
        The output `[1, total_tokens, ...]`, zero on padding and tail, and the state after the last
        sequence, or None.
    """
    warn_once(slow_warning(what, remedy))
    device = rows[0].device
    if not (packed.lengths_on_host() == packed.total_tokens).any():  # else one document is the row
        with outside_inference_mode():
            batches: _Batches | None = remember(
                packed.row.lengths,
                "document_batches",
                lambda: _make_batches(packed, keeps_state, device),
                keeps_state,
                device=device,
                tensors=lambda made: () if made is None else made[:2],
            )
    else:
        batches = None
    if batches is None:
        return run(keeps_state, *rows)
    index, inverse, shapes = batches
    padded = _ops.gather_rows(
        [_with_rows(row) for row in rows], index, inverse, [index.shape[0]], 2, [0] * len(rows)
    )
    outputs, state, begin = [], None, 0
    for n, longest in shapes:
        end = begin + n * longest
        batch = (row[begin:end].unflatten(0, (n, longest)) for row in padded)
        keeps = keeps_state and begin == 0
        output, found = run(keeps, *batch)
        outputs.append(output.flatten(0, 1))
        state = found if keeps else state
        begin = end
    total = packed.total_tokens
    joined = torch.cat(outputs)
    (out,) = _ops.gather_rows([_with_rows(joined)], inverse, index, [total], 1, [0])
    return out.unsqueeze(0), state


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as gather_rows takes it."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _make_batches(packed: PackedLayout, keeps_state: bool, device: torch.device) -> _Batches | None:
    """Return the batches; None if no sequence has tokens."""
    lengths = packed.lengths_on_host().tolist()
    segments = packed.segments.lengths_on_host().tolist()
    begins = itertools.accumulate(segments, initial=0)
    documents = [(n, begin) for n, begin in zip(lengths, begins, strict=False) if n > 0]
    if not documents:
        return None
    plan = [[documents.pop()]] if keeps_state else []
    plan += batches_of(documents, packed.total_tokens, device.type == "cuda")
    pieces, shapes = [], []
    for batch in plan:
        longest = max(n for n, _ in batch)
        counts, starts = torch.tensor(batch, dtype=torch.int32).split(1, dim=1)
        columns = torch.arange(longest, dtype=torch.int32)
        pieces.append(torch.where(columns < counts, starts + columns, -1).flatten())
        shapes.append((len(batch), longest))
    index = torch.cat(pieces)
    inverse = inverse_of(index, packed.total_tokens)
    return _Batches(*copy_pair(index, inverse, device), shapes)


def inverse_of(index: Tensor, tokens: int) -> Tensor:
    """Return the slot of each token, given the token of each slot; in both, -1 means none."""
    slots = torch.nonzero(index >= 0).flatten()
    inverse = torch.full((tokens,), -1, dtype=torch.int32)
    inverse[index[slots].long()] = slots.int()
    return inverse


def batches_of(documents: list[Any], total_tokens: int, on_gpu: bool) -> list[list[Any]]:
    """Return the documents in batches of like length that cost least together.

    Args:
        documents: tuples that begin with a length above 0.
        total_tokens: of the row.
        on_gpu: whether calls cost what they do on a GPU.
    """
    call, chunk = (_GPU_CALL, _GPU_CHUNK) if on_gpu else (_CPU_CALL, _CPU_CHUNK)
    chunks = lambda document: -(-document[0] // _CHUNK)  # noqa: E731
    ordered = sorted(documents, key=lambda document: document[0])
    groups = [(size, list(same)) for size, same in itertools.groupby(ordered, key=chunks)]
    # Of the first `end` groups: the least cost, and where the batch that ends there begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(groups) + 1):
        size, count, options = groups[end - 1][0], 0, []
        most = _most_documents(size, total_tokens)
        for begin in range(end - 1, -1, -1):
            count += len(groups[begin][1])
            calls = -(-count // most)
            cost = calls * (call + chunk * size) + count * size * _CHUNK
            options.append((best[begin][0] + cost, begin))
        best.append(min(options))
    batches: list[list[Any]] = []
    end = len(groups)
    while end:
        begin = best[end][1]
        members = [one for _, same in groups[begin:end] for one in same]
        most = _most_documents(groups[end - 1][0], total_tokens)
        batches += [members[at : at + most] for at in range(0, len(members), most)]
        end = begin
    return batches


def _most_documents(chunks: int, total_tokens: int) -> int:
    return max(1, _ROWS * total_tokens // (chunks * _CHUNK))


def last_sequence(packed: PackedLayout) -> int:
    """Return the index of the segment that holds the last sequence with tokens.

    Segments are those of `cu_seqlens_recurrent`; none of them is empty. If no sequence has tokens
    this is the last segment.
    """
    offsets = packed.cu_seqlens_recurrent_on_host().tolist()
    lengths = packed.lengths_on_host().tolist()
    padded = packed.segments.lengths_on_host().tolist()
    begin = 0
    last = None
    for length, whole in zip(lengths, padded, strict=True):
        if length > 0:
            last = begin
        begin += whole
    return len(offsets) - 2 if last is None else offsets.index(last)
