"""The gated delta rule of a packed row in PyTorch, for machines without a kernel for it.

All documents are cut into chunks. What a chunk computes without the state before it runs for all
chunks at once; the states are then carried along the chunks of all documents side by side, the
longest document first. So the loop is as long as that document, and nothing is padded but the last
chunk of each.

A head's state S follows S' = exp(g) S + k (beta (v - exp(g) S^T k))^T, and a token reads S'^T q
(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; by chunks: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv 2406.06484).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuseq._base.modes import outside_inference_mode
from cuseq.cache import remember
from cuseq.integrations.transformers.hybrids.segments import (
    CHUNK,
    Slots,
    chunks_of,
    documents_of,
    tokens_of,
)
from cuseq.layout import PackedLayout

_EPS = 1e-6  # of the norm of queries and keys, as in transformers and flash-linear-attention
# Slots that are computed at a time. A CPU is fastest with tensors that stay small: it then uses
# memory again that it has touched.
_GPU_SLOTS, _CPU_SLOTS = 1 << 20, 512


class _Group(NamedTuple):
    """Documents that are computed together: the first chunk of each, then the second ones, ...

    Attributes:
        counts: how many documents have a first chunk, a second one, and so on.
        last: the place of the row's last sequence among them, if it is here.
        last_step: its last chunk.
    """

    counts: list[int]
    last: int | None
    last_step: int

    @property
    def slots(self) -> int:
        return sum(self.counts) * CHUNK


class _Chunks(NamedTuple):
    """The chunks of a row.

    Attributes:
        slots: the slots of all chunks, group after group.
        groups: the groups.
    """

    slots: Slots
    groups: list[_Group]


@torch.compiler.disable
def chunked_gated_delta_rule(
    packed: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    normalise: bool,
    keeps_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule of each sequence of a row. Waits for lengths that came from a GPU, once.

    Args:
        packed: the layout.
        query, key: `[1, total_tokens, key_heads, key_dim]`.
        value: `[1, total_tokens, heads, value_dim]`; `heads` is a multiple of `key_heads`.
        g: `[1, total_tokens, heads]`, the logarithm of the decay.
        beta: `[1, total_tokens, heads]`.
        normalise: whether queries and keys are divided by their lengths.
        keeps_state: whether to return the state after the last sequence.

    Returns:
        `[1, total_tokens, heads, value_dim]` in the query's dtype, zero on padding and tail; and
        `[1, heads, key_dim, value_dim]`, in fp32, or None.
    """
    tokens, heads, value_dim = value.shape[1:]
    key_dim = key.shape[3]
    with outside_inference_mode():
        chunks: _Chunks = remember(
            packed.row.lengths,
            "chunks_of_documents",
            lambda: _make_chunks(packed, value.device),
            device=value.device,
            tensors=lambda made: made.slots,
        )
    groups = chunks.groups
    if not groups:
        empty = torch.zeros(1, heads, key_dim, value_dim, device=value.device)
        return query.new_zeros(1, tokens, heads, value_dim), empty if keeps_state else None
    inputs = chunks.slots.fill((query, key, value, g, beta))
    of_groups = zip(*(one.split([group.slots for group in groups]) for one in inputs), strict=True)
    outputs, state = [], None
    with torch.autocast(value.device.type, enabled=False):
        for group, slots in zip(groups, of_groups, strict=True):
            q, k, v, log_decay, rate = (_by_heads(one, heads) for one in slots)
            if normalise:
                q, k = _normalised(q), _normalised(k)
            out, last = _rule(q * key_dim**-0.5, k, v, log_decay, rate, group, heads)
            state = state if last is None else last
            by_token = out.view(-1, heads, CHUNK, value_dim).transpose(1, 2)
            outputs.append(by_token.flatten(0, 1).to(query.dtype))
    out = chunks.slots.row_of(torch.cat(outputs))
    return out, state.view(1, heads, key_dim, value_dim) if keeps_state else None


def _by_heads(slots: Tensor, heads: int) -> Tensor:
    """Return fp32 `[chunks * heads, 64, ...]` of `[chunks * 64, heads or a part of them, ...]`."""
    chunks = slots.unflatten(0, (-1, CHUNK)).transpose(1, 2).float()
    if chunks.shape[1] != heads:
        chunks = chunks.repeat_interleave(heads // chunks.shape[1], dim=1)
    return chunks.reshape(-1, *chunks.shape[2:])


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    group: _Group,
    heads: int,
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule of `[chunks * heads, 64, ...]`; return the outputs and the last's state."""
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decayed = log_decay.cumsum(1)  # from the start of the chunk
    between = (decayed.unsqueeze(2) - decayed.unsqueeze(1)).masked_fill(above, -torch.inf).exp()
    since_start = decayed.exp().unsqueeze(2)
    until_end = (decayed[:, -1:] - decayed).exp().unsqueeze(2)

    # A token writes its value less what the state holds for its key, and the tokens before it in
    # the chunk have changed that state: a unit triangular system over the chunk's tokens.
    system = ((rate.unsqueeze(2) * k) @ k.mT) * between
    sides = rate.unsqueeze(2) * torch.cat((v, k * since_start), dim=2)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[2], k.shape[2]), dim=2)

    counts = [documents * heads for documents in group.counts]
    writes, decays = k * until_end, since_start[:, -1:]
    states, written = _Scan.apply(values, reads, writes, decays, counts)
    out = (q * since_start) @ states + ((q @ k.mT) * between) @ written
    if group.last is None:
        return out, None
    begin = sum(counts[: group.last_step]) + group.last * heads
    own = slice(begin, begin + heads)
    return out, states[own] * decays[own] + writes[own].mT @ written[own]


class _Scan(torch.autograd.Function):
    """The states before all chunks, and what each chunk writes, by chunks of `[n, 64, ...]`.

    new = values - reads S, and S' = decays S + writes^T new, where S' is the state before the next
    chunk of the document. Its backward is written out: autograd's would note each step. It has no
    second derivative.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, reads: Tensor, writes: Tensor, decays: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        states = values.new_empty(values.shape[0], reads.shape[2], values.shape[2])
        states[: counts[0]] = 0
        written = torch.empty_like(values)
        for now, lasting, following in _steps(counts):
            torch.baddbmm(values[now], reads[now], states[now], alpha=-1, out=written[now])
            decayed = states[lasting] * decays[lasting]
            torch.baddbmm(decayed, writes[lasting].mT, written[lasting], out=states[following])
        ctx.save_for_backward(reads, writes, decays, states, written)
        ctx.counts = counts
        return states, written

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reads, writes, decays, states, written = ctx.saved_tensors
        of_states, of_written = (grad.clone() for grad in grads)
        of_writes, of_decays = torch.zeros_like(writes), torch.zeros_like(decays)
        for now, lasting, following in reversed(list(_steps(ctx.counts))):
            later = of_states[following]
            of_written[lasting].baddbmm_(writes[lasting], later)
            of_states[lasting].addcmul_(later, decays[lasting])
            torch.bmm(written[lasting], later.mT, out=of_writes[lasting])
            of_decays[lasting] = (later * states[lasting]).sum((1, 2), keepdim=True)
            of_states[now].baddbmm_(reads[now].mT, of_written[now], alpha=-1)
        return of_written, -(of_written @ states.mT), of_writes, of_decays, None


def _steps(counts: list[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the chunks of each step, those of them whose document goes on, and where it does.

    Args:
        counts: chunks of each step; documents that end are the last ones of a step.
    """
    begin = 0
    for count, further in zip(counts, [*counts[1:], 0], strict=True):
        end = begin + count
        yield slice(begin, end), slice(begin, begin + further), slice(end, end + further)
        begin = end


def _make_chunks(packed: PackedLayout, device: torch.device) -> _Chunks:
    documents = documents_of(packed)
    most = _GPU_SLOTS if device.type == "cuda" else _CPU_SLOTS
    groups, pieces = [], [torch.empty(0, dtype=torch.int32)]
    for members in _grouped(documents, most):
        steps = chunks_of(members[0][0])
        counts = [sum(chunks_of(n) > step for n, _ in members) for step in range(steps)]
        for step, count in enumerate(counts):
            pieces.append(tokens_of(members[:count], step * CHUNK, (step + 1) * CHUNK))
        last = documents[-1]
        place = members.index(last) if last in members else None
        groups.append(_Group(counts, place, chunks_of(last[0]) - 1))
    return _Chunks(Slots.of(pieces, packed.total_tokens, device), groups)


def _grouped(documents: list[tuple[int, int]], most_slots: int) -> list[list[tuple[int, int]]]:
    """Return the documents, longest first, in groups of so many slots, or of one document."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for document in sorted(documents, key=lambda one: -chunks_of(one[0])):
        slots = chunks_of(document[0]) * CHUNK
        if not groups or slots > room:
            groups.append([])
            room = most_slots
        groups[-1].append(document)
        room -= slots
    return groups
