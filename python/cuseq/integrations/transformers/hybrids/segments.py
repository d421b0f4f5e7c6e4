"""Calls of a function of a row on few padded batches of the row's documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import copy_pair
from cuseq.cache import remember
from cuseq.integrations.transformers._warn import warn_once
from cuseq.layout import PackedLayout

Run = Callable[..., tuple[Tensor, Tensor | None]]

CHUNK = 64  # tokens; the functions pad rows to chunks of this or a larger size
# The fixed cost of a call, and of each chunk of its longest document, as the number of tokens that
# take as long: on a GPU a call of a chunked rule launches a thousand kernels, and a chunk dozens.
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


class Slots(NamedTuple):
    """Where the tokens of a row's documents lie in padded batches or chunks of them.

    Attributes:
        index: int32, the token of each slot; -1 on padding.
        inverse: int32 `[total_tokens]`, the slot of each token; -1 on padding and tail.
    """

    index: Tensor
    inverse: Tensor

    @staticmethod
    def of(pieces: list[Tensor], total_tokens: int, device: torch.device) -> Slots:
        """Make them of the tokens of all slots, in pieces on the host."""
        index = torch.cat(pieces)
        slots = torch.nonzero(index >= 0).flatten()
        inverse = torch.full((total_tokens,), -1, dtype=torch.int32)
        inverse[index[slots].long()] = slots.int()
        return Slots(*copy_pair(index, inverse, device))

    def fill(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return `[slots, ...]` of rows `[1, total_tokens, ...]`, zero on padding."""
        dense = [_with_rows(row) for row in rows]
        count = self.index.shape[0]
        return _ops.gather_rows(dense, self.index, self.inverse, [count], 2, [0] * len(rows))

    def row_of(self, slots: Tensor) -> Tensor:
        """Return the row `[1, total_tokens, ...]` of `[slots, ...]`, zero on padding and tail."""
        return self.rows_of([slots])[0]

    def rows_of(self, slots: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of several tensors of slots, by one kernel."""
        dense, count = [_with_rows(one) for one in slots], self.inverse.shape[0]
        fills = [0] * len(dense)
        found = _ops.gather_rows(dense, self.inverse, self.index, [count], 1, fills)
        return [one.unsqueeze(0) for one in found]


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as gather_rows takes it."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def documents_of(packed: PackedLayout) -> list[tuple[int, int]]:
    """Return the tokens of each sequence that has some, and where it begins in the row."""
    lengths = packed.lengths_on_host().tolist()
    begins = itertools.accumulate(packed.segments.lengths_on_host().tolist(), initial=0)
    return [(n, begin) for n, begin in zip(lengths, begins, strict=False) if n > 0]


def tokens_of(documents: list[tuple[int, int]], begin: int, end: int) -> Tensor:
    """Return int32 `[documents * (end - begin)]`: the tokens from `begin` up to `end` of each
    document, as places in the row; -1 after its end.
    """
    counts, starts = torch.tensor(documents, dtype=torch.int32).split(1, dim=1)
    columns = torch.arange(begin, end, dtype=torch.int32)
    return torch.where(columns < counts, starts + columns, -1).flatten()


def chunks_of(tokens: int) -> int:
    """Return the chunks of a document."""
    return -(-tokens // CHUNK)


class _Batches(NamedTuple):
    """Padded batches of the documents of a row.

    Attributes:
        slots: the slots of all batches, batch after batch.
        shapes: documents and tokens of each batch; the last sequence with tokens is in the first,
            if its state is wanted.
    """

    slots: Slots
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
        sequence, or None. A row without tokens of a sequence is given to `run` as it is.
    """
    warn_once(slow_warning(what, remedy))
    batches = _batches(packed, keeps_state, rows[0].device)
    if batches is None:
        return run(keeps_state, *rows)
    padded = batches.slots.fill(rows)
    outputs, state, begin = [], None, 0
    for n, longest in batches.shapes:
        end = begin + n * longest
        batch = (row[begin:end].unflatten(0, (n, longest)) for row in padded)
        keeps = keeps_state and begin == 0
        output, found = run(keeps, *batch)
        outputs.append(output.flatten(0, 1))
        state = found if keeps else state
        begin = end
    return batches.slots.row_of(torch.cat(outputs)), state


def _batches(packed: PackedLayout, keeps_state: bool, device: torch.device) -> _Batches | None:
    """Return the batches of a row; None if it is one document, or none has tokens."""
    if (packed.lengths_on_host() == packed.total_tokens).any():
        return None
    with outside_inference_mode():
        return remember(
            packed.row.lengths,
            "document_batches",
            lambda: _make_batches(packed, keeps_state, device),
            keeps_state,
            device=device,
            tensors=lambda made: () if made is None else made.slots,
        )


def _make_batches(packed: PackedLayout, keeps_state: bool, device: torch.device) -> _Batches | None:
    documents = documents_of(packed)
    if not documents:
        return None
    plan = [[documents.pop()]] if keeps_state else []
    plan += batches_of(documents, packed.total_tokens, device.type == "cuda")
    shapes = [(len(batch), max(n for n, _ in batch)) for batch in plan]
    pieces = [tokens_of(batch, 0, n) for batch, (_, n) in zip(plan, shapes, strict=True)]
    return _Batches(Slots.of(pieces, packed.total_tokens, device), shapes)


def batches_of(documents: list[Any], total_tokens: int, on_gpu: bool) -> list[list[Any]]:
    """Return the documents in batches of like length that cost least together.

    Args:
        documents: tuples that begin with a length above 0.
        total_tokens: of the row.
        on_gpu: whether calls cost what they do on a GPU.
    """
    call, chunk = (_GPU_CALL, _GPU_CHUNK) if on_gpu else (_CPU_CALL, _CPU_CHUNK)
    ordered = sorted(documents, key=lambda document: document[0])
    by_chunks = itertools.groupby(ordered, key=lambda document: chunks_of(document[0]))
    groups = [(size, list(same)) for size, same in by_chunks]
    # best[end]: the least cost of the documents of groups[:end], and the group at which the last of
    # their batches begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(groups) + 1):
        size, count, options = groups[end - 1][0], 0, []
        most = _most_documents(size, total_tokens)
        for begin in range(end - 1, -1, -1):
            count += len(groups[begin][1])
            calls = -(-count // most)
            cost = calls * (call + chunk * size) + count * size * CHUNK
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
    return max(1, _ROWS * total_tokens // (chunks * CHUNK))


def last_sequence(packed: PackedLayout) -> int:
    """Return the index of the segment that holds the last sequence with tokens.

    Segments are those of `cu_seqlens_recurrent`; none of them is empty. If no sequence has tokens
    this is the last segment.
    """
    offsets = packed.cu_seqlens_recurrent_on_host().tolist()
    documents = documents_of(packed)
    return offsets.index(documents[-1][1]) if documents else len(offsets) - 2
