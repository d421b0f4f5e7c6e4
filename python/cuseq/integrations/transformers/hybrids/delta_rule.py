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

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import copy_without_wait
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
        lasting: int64, the chunks whose document goes on, in the order of the chunks that follow
            them, which are all but the first of each document.
        last: the place of the row's last sequence among them, if it is here.
        last_step: its last chunk.
    """

    counts: list[int]
    lasting: Tensor
    last: int | None
    last_step: int

    @property
    def slots(self) -> int:
        return sum(self.counts) * CHUNK

    def steps(self, chunks: Tensor) -> tuple[Tensor, ...]:
        """Return the chunks of each step of `[chunks * heads, ...]`."""
        heads = chunks.shape[0] // sum(self.counts)
        return chunks.split([count * heads for count in self.counts])

    def lasting_steps(self, chunks: Tensor) -> tuple[Tensor, ...]:
        """Return, for each step but the last, the chunks whose document goes on."""
        heads = chunks.shape[0] // sum(self.counts)
        pairs = itertools.pairwise((*self.counts, 0))
        sizes = [n * heads for count, further in pairs for n in (further, count - further)]
        return chunks.split(sizes)[:-2:2]

    def last_chunk(self, heads: int) -> slice:
        """Return the heads of the last chunk of the row's last sequence."""
        assert self.last is not None
        begin = (sum(self.counts[: self.last_step]) + self.last) * heads
        return slice(begin, begin + heads)


class _Chunks(NamedTuple):
    """The chunks of a row.

    Attributes:
        slots: the slots of all chunks, group after group.
        groups: the groups.
    """

    slots: Slots
    groups: list[_Group]

    def each(self) -> Iterator[tuple[_Group, slice]]:
        """Yield each group and its places among the slots."""
        begin = 0
        for group in self.groups:
            yield group, slice(begin, begin + group.slots)
            begin += group.slots

    def filled(self, rows: Sequence[Tensor], places: slice) -> list[Tensor]:
        """Return these slots of rows, without a gradient."""
        return Slots(self.slots.index[places], self.slots.inverse).fill(rows)


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
            tensors=lambda made: (*made.slots, *(group.lasting for group in made.groups)),
        )
    if not chunks.groups:
        empty = torch.zeros(1, heads, key_dim, value_dim, device=value.device)
        return query.new_zeros(1, tokens, heads, value_dim), empty if keeps_state else None
    out, state = _Rule.apply(query, key, value, g, beta, chunks, normalise, keeps_state)
    return out, None if state is None else state.unsqueeze(0)


class _Rule(torch.autograd.Function):
    """The rule of a row's chunks. Rows of fp16 and bf16 are computed in fp32.

    Per chunk and head, with c the sum of g up to a token, b its beta, q and k its scaled query and
    key, and S the state before the chunk, for tokens j <= i:

        P[i, j] = exp(c_i - c_j) q_i k_j
        N[i, j] = exp(c_i - c_j) k_i k_j, but 0 for i = j
        A       = (1 + diag(b) N)^-1 diag(b): the tokens before i in the chunk changed what i reads
        new     = A (V - diag(exp(c)) K S)
        out     = P new + diag(exp(c)) Q S
        S'      = exp(c_63) S + (diag(exp(c_63 - c)) K)^T new

    The backward is written out, because autograd would keep every step of this. It has no second
    derivative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunks: _Chunks,
        normalise: bool,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows, heads = (query, key, value, g, beta), value.shape[2]
        out = query.new_empty(len(chunks.slots.index), *value.shape[2:])
        kept: list[Tensor] = []
        state = None
        with torch.autocast(value.device.type, enabled=False):
            for group, places in chunks.each():
                slots = chunks.filled(rows, places)
                scales = _scales_of(slots[0], slots[1], normalise)
                terms = _Terms.of(slots, heads, scales)
                computed = _Computed.of(terms, group)
                found = terms.queries_by_keys() @ computed.new
                found.baddbmm_(terms.reads(), computed.states)
                _write_slots(found, heads, out[places])
                if keeps_state and group.last is not None:
                    own = group.last_chunk(heads)
                    state = computed.states[own] * terms.decay[own]
                    state = (state + terms.writes()[own].mT @ computed.new[own]).float()
                kept += [*scales, *computed]
        ctx.save_for_backward(*rows, *kept)
        ctx.chunks, ctx.normalise = chunks, normalise
        return chunks.slots.row_of(out), state

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, out_grad: Tensor, state_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, g, beta, *saved = ctx.saved_tensors
        rows, kept = (query, key, value, g, beta), iter(saved)
        chunks, heads = ctx.chunks, value.shape[2]
        grads = [one.new_empty(len(chunks.slots.index), *one.shape[2:]) for one in rows]
        with torch.autocast(value.device.type, enabled=False):
            for group, places in chunks.each():
                scales = next(kept), next(kept)
                computed = _Computed(*(next(kept) for _ in _Computed._fields))
                terms = _Terms.of(chunks.filled(rows, places), heads, scales)
                (slots_grad,) = chunks.filled((out_grad,), places)
                found = _gradients(group, terms, computed, slots_grad, state_grad)
                if ctx.normalise:
                    _take_out_lengths(terms, found[0], found[1])
                for one, grad, scale in zip(grads, found, (*scales, None, None, None), strict=True):
                    _write_slots(grad, heads, one[places], scale)
        return *chunks.slots.rows_of(grads), None, None, None


class _Computed(NamedTuple):
    """The inverses, states and new values of a group's chunks, which its backward needs too.

    Attributes:
        inverse: `[n, 64, 64]`, (1 + diag(b) N)^-1.
        states: `[n, key_dim, value_dim]`, S.
        new: `[n, 64, value_dim]`.
    """

    inverse: Tensor
    states: Tensor
    new: Tensor

    @staticmethod
    def of(terms: _Terms, group: _Group) -> _Computed:
        system = terms.keys_by_keys().mul_(terms.beta.unsqueeze(2))
        eye = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
        inverse = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
        of_values, of_keys = terms.mixing(inverse)
        new, reads, writes = of_values @ terms.v, of_keys @ terms.k, terms.writes()
        states = new.new_empty(new.shape[0], reads.shape[2], new.shape[2])
        of_step = [*map(group.steps, (states, reads, new))]
        goes_on = [*map(group.lasting_steps, (states, terms.decay, writes.mT, new))]
        first, *later = of_step[0]
        first.zero_()
        for step, (state, read, value) in enumerate(zip(*of_step, strict=True)):
            value.baddbmm_(read, state, alpha=-1)
            if step < len(later):
                before, decay, write, written = (one[step] for one in goes_on)
                torch.mul(before, decay, out=later[step]).baddbmm_(write, written)
        return _Computed(inverse, states, new)


def _gradients(
    group: _Group,
    terms: _Terms,
    computed: _Computed,
    out_grad: Tensor,
    state_grad: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients `[n, 64, ...]` of a group: scaled queries and keys, values, g, beta.

    Args:
        group, terms, computed: the group, and what its forward was made of.
        out_grad: `[slots, heads, value_dim]`.
        state_grad: `[heads, key_dim, value_dim]` of the state after the row's last sequence.
    """
    inverse, states, new = computed
    heads = out_grad.shape[1]
    of_values, of_keys = terms.mixing(inverse)
    key_reads, writes, decay = of_keys @ terms.k, terms.writes(), terms.decay
    reads, scores = terms.reads(), terms.queries_by_keys()
    out_grad = _by_heads(out_grad, heads, states.dtype)

    # From the outputs to the states, and along these from each document's last chunk.
    states_grad = reads.mT @ out_grad
    new_grad = scores.mT @ out_grad
    writes_grad = torch.zeros_like(writes)
    decayed_grad = torch.zeros_like(terms.decayed)  # the terms of c with the state before
    if state_grad is not None and group.last is not None:
        own, grad = group.last_chunk(heads), state_grad.to(states.dtype)
        decayed_grad[own, -1] = (grad * states[own]).sum((1, 2))
        writes_grad[own] = new[own] @ grad.mT
        new_grad[own] += writes[own] @ grad
        states_grad[own] += grad * decay[own]
    of_step = [*map(group.steps, (states_grad, key_reads.mT, new_grad))]
    goes_on = [*map(group.lasting_steps, (states_grad, decay, writes, new_grad))]
    later = of_step[0][1:]
    for step in reversed(range(len(group.counts))):
        if step < len(later):
            before_grad, kept, write, written_grad = (one[step] for one in goes_on)
            written_grad.baddbmm_(write, later[step])
            before_grad.addcmul_(later[step], kept)
        step_grad, read, value_grad = (one[step] for one in of_step)
        step_grad.baddbmm_(read, value_grad, alpha=-1)
    # Of all steps at once: a GPU waits for the host to launch the kernels of each.
    followed = group.counts[0] * heads
    written = _by_chunk(new, heads).index_select(0, group.lasting).flatten(0, 1)
    written = _by_chunk(written @ states_grad[followed:].mT, heads)
    _by_chunk(writes_grad, heads).index_copy_(0, group.lasting, written)
    carried = _by_chunk(states, heads).index_select(0, group.lasting).flatten(0, 1)
    carried_grad = _by_chunk((states_grad[followed:] * carried).sum((1, 2)), heads)
    _by_chunk(decayed_grad, heads)[:, :, -1].index_copy_(0, group.lasting, carried_grad)
    decayed_grad[:, -1] *= terms.kept[:, -1]

    # Queries, keys and values. `less_` is the negative of a gradient.
    pairs_grad = out_grad @ new.mT
    of_pairs = scores.mul_(pairs_grad)  # the terms of c with other tokens
    pairs_grad *= terms.pairs
    q_grad = pairs_grad @ terms.k
    reads_grad = out_grad @ states.mT
    q_grad.addcmul_(reads_grad, terms.kept.unsqueeze(2))
    k_grad = pairs_grad.mT @ terms.q
    less_key_reads_grad = new_grad @ states.mT
    less_of_keys_grad = less_key_reads_grad @ terms.k.mT
    k_grad.baddbmm_(of_keys.mT, less_key_reads_grad, alpha=-1)
    k_grad.addcmul_(writes_grad, terms.key_out.unsqueeze(2))
    v_grad = of_values.mT @ new_grad
    mixing_grad = new_grad @ terms.v.mT
    mixing_grad.addcmul_(less_of_keys_grad, terms.kept.unsqueeze(1), value=-1)
    beta_grad = (mixing_grad * inverse).sum(1)
    mixing_grad *= terms.beta.unsqueeze(1)
    less_system_grad = (inverse.mT @ mixing_grad @ inverse.mT).tril_(-1).mul_(terms.pairs)
    less_by_system = (terms.k @ terms.k.mT).mul_(less_system_grad)
    beta_grad -= less_by_system.sum(2)
    less_system_grad *= terms.beta.unsqueeze(2)
    k_grad.baddbmm_(less_system_grad + less_system_grad.mT, terms.k, alpha=-1)

    # A decay g_t counts in the terms of c between a token from t on and one before t, and in those
    # between a token from t on and the state before the chunk. So what tokens do to themselves,
    # which may be larger than all else, is never added and taken off again. Writes to the state are
    # read at the chunk's last token.
    of_pairs[:, -1] += (writes_grad * writes).sum(2)
    of_pairs.addcmul_(less_by_system, terms.beta.unsqueeze(2), value=-1)
    decayed_grad += (reads_grad * reads).sum(2)
    decayed_grad -= (less_of_keys_grad * of_keys).sum(1)
    earlier = torch.ones_like(of_pairs[0]).triu_(1)  # [j, t], j < t
    g_grad = (of_pairs @ earlier).add_(decayed_grad.unsqueeze(2)).tril_().sum(1)
    return q_grad, k_grad, v_grad, g_grad, beta_grad


def _take_out_lengths(terms: _Terms, q_grad: Tensor, k_grad: Tensor) -> None:
    """Make gradients of scaled queries and keys those of what `_write_slots` is to scale.

    With q' = s q / (|q|^2 + eps)^(1/2), the gradient of q is s / (|q|^2 + eps)^(1/2) times
    g - q' (q' g) / s^2; s^2 is 1 / key_dim for queries, and 1 for keys.
    """
    for x, grad, over_square in ((terms.q, q_grad, terms.q.shape[2]), (terms.k, k_grad, 1)):
        along = (grad * x).sum(2, keepdim=True)
        grad.addcmul_(x, along, value=-over_square)


@dataclass(frozen=True)
class _Terms:
    """Queries, keys and values of a group's chunks by heads, and the factors of their products.

    Forward and backward both make them. `n` is chunks times heads.

    Attributes:
        q, k: `[n, 64, key_dim]`, scaled.
        v: `[n, 64, value_dim]`.
        beta, decayed: `[n, 64]`, b and c.
        pairs: `[n, 64, 64]`, exp(c_i - c_j); zero for j > i.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decayed: Tensor
    pairs: Tensor

    @staticmethod
    def of(slots: Sequence[Tensor], heads: int, scales: tuple[Tensor, Tensor]) -> _Terms:
        """Make them of slots of queries, keys, values, g and beta, and of `_scales_of` them."""
        dtypes = (one.dtype for one in slots[:3])
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        factors = (*scales, None, None, None)
        q, k, v, log_decay, rate = (
            _by_heads(one, heads, dtype, factor) for one, factor in zip(slots, factors, strict=True)
        )
        decayed = log_decay.cumsum(1)
        pairs = (decayed.unsqueeze(2) - decayed.unsqueeze(1)).exp_().tril_()  # infinite above
        return _Terms(q, k, v, rate, decayed, pairs)

    @functools.cached_property
    def kept(self) -> Tensor:
        """`[n, 64]`, what is left of the state before the chunk."""
        return self.decayed.exp()

    @property
    def decay(self) -> Tensor:
        """`[n, 1, 1]`, of the state over the chunk."""
        return self.kept[:, -1:, None]

    @functools.cached_property
    def key_out(self) -> Tensor:
        """`[n, 64]`, the factor of a key that writes to the state after the chunk."""
        return (self.decayed[:, -1:] - self.decayed).exp()

    def reads(self) -> Tensor:
        """`[n, 64, key_dim]`, what outputs read of the state before the chunk."""
        return self.q * self.kept.unsqueeze(2)

    def writes(self) -> Tensor:
        """`[n, 64, key_dim]`, where new values go in the state."""
        return self.k * self.key_out.unsqueeze(2)

    def queries_by_keys(self) -> Tensor:
        """P."""
        return (self.q @ self.k.mT).mul_(self.pairs)

    def keys_by_keys(self) -> Tensor:
        """N, with values on the diagonal that nobody may read."""
        return (self.k @ self.k.mT).mul_(self.pairs)

    def mixing(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """A of the inverse of 1 + diag(b) N, and A diag(exp(c))."""
        of_values = inverse * self.beta.unsqueeze(1)
        return of_values, of_values * self.kept.unsqueeze(1)


def _scales_of(query: Tensor, key: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the factors `[slots, heads or a part of them]` of slots of queries and keys.

    One over their lengths, or 1; for queries also times `key_dim ** -0.5`.
    """
    found = []
    for one in (query, key):
        dtype = torch.promote_types(one.dtype, torch.float32)
        if normalise:
            length = torch.linalg.vector_norm(one, dim=2, dtype=dtype)
            found.append(torch.rsqrt(length.square_().add_(_EPS)))
        else:
            found.append(one.new_ones(one.shape[:2], dtype=dtype))
    found[0] *= query.shape[2] ** -0.5
    return found[0], found[1]


def _by_heads(slots: Tensor, heads: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return `[chunks * heads, 64, ...]` of `[chunks * 64, heads or a part of them, ...]`.

    `scale`, without the last dimension, is multiplied in by the same pass over memory.
    """
    chunks = slots.unflatten(0, (-1, CHUNK)).transpose(1, 2).unsqueeze(2)
    chunks = chunks.expand(-1, -1, heads // chunks.shape[1], *chunks.shape[3:])
    found = torch.empty(chunks.shape, dtype=dtype, device=chunks.device)
    if scale is None:
        found.copy_(chunks)
    else:
        factors = scale.unflatten(0, (-1, CHUNK)).transpose(1, 2)
        torch.mul(chunks, factors.unsqueeze(2).unsqueeze(-1), out=found)
    return found.flatten(0, 2)


def _by_chunk(chunks: Tensor, heads: int) -> Tensor:
    """Return `[chunks, heads, ...]` of `[chunks * heads, ...]`."""
    return chunks.unflatten(0, (-1, heads))


def _write_slots(chunks: Tensor, heads: int, slots: Tensor, scale: Tensor | None = None) -> None:
    """Write `[chunks * heads, 64, ...]` to slots `[chunks * 64, heads or a part of them, ...]`.

    The backward of `_by_heads`: heads that were repeated from one are summed, and multiplied by
    `scale`.
    """
    by_head, parts = _by_chunk(chunks, heads), slots.shape[1]
    if parts != heads:
        by_head = by_head.unflatten(1, (parts, -1)).sum(2)
    by_head, written = by_head.transpose(1, 2), slots.unflatten(0, (-1, CHUNK))
    if scale is None:
        written.copy_(by_head)
    else:
        torch.mul(by_head, scale.unflatten(0, (-1, CHUNK)).unsqueeze(-1), out=written)


def _make_chunks(packed: PackedLayout, device: torch.device) -> _Chunks:
    documents = documents_of(packed)
    most = _GPU_SLOTS if device.type == "cuda" else _CPU_SLOTS
    groups, pieces = [], [torch.empty(0, dtype=torch.int32)]
    for members in _grouped(documents, most):
        steps = chunks_of(members[0][0])
        counts = [sum(chunks_of(n) > step for n, _ in members) for step in range(steps)]
        for step, count in enumerate(counts):
            pieces.append(tokens_of(members[:count], step * CHUNK, (step + 1) * CHUNK))
        ends = itertools.accumulate(counts)
        lasting = [range(end - n, end - n + further) for end, (n, further) in
                   zip(ends, itertools.pairwise(counts), strict=False)]  # fmt: skip
        further = torch.tensor([*itertools.chain(*lasting)], dtype=torch.int64)
        last = documents[-1]
        place = members.index(last) if last in members else None
        on_device = copy_without_wait(further, device)
        groups.append(_Group(counts, on_device, place, chunks_of(last[0]) - 1))
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
