"""Attention over several ranks as others do it, over the kernels that cuseq uses.

Shims of our own. Each peer is `attend(q, k, v) -> out` over a rank's rows, differentiable, made for
one row of documents:

- `AllGather`: the row cut contiguously, keys and values gathered whole (ring-flash-attn's llama3,
  TransformerEngine's all_gather, torch's flex CP);
- `ZigzagRing`: each document cut into 2 R parts, keys and values sent round, outputs merged by
  their log-sum-exp (TransformerEngine's p2p). Documents are padded to multiples of 2 R.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_aten = torch.ops.aten


class Rows(NamedTuple):
    """Sequences of queries against sequences of keys, causal from the bottom right or not."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool

    @staticmethod
    def of(queries: list[int], keys: list[int], causal: bool, device: torch.device) -> Rows:
        offsets = [
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
            for lengths in (queries, keys)
        ]
        return Rows(*offsets, max(queries, default=0), max(keys, default=0), causal)


def forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return out and log-sum-exp `[heads, tokens]`: flash on a GPU, loops on the CPU."""
    if q.is_cuda:
        bounds = (rows.longest_q, rows.longest_k)
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, rows.cu_q, rows.cu_k, *bounds, 0.0, rows.causal, False
        )
        return out, lse
    outs, sums = [], []
    for query, key, value, mask in _sequences(q, k, v, rows):
        scores = torch.einsum("qhd,khd->hqk", query, key) * q.shape[-1] ** -0.5 + mask
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1].unsqueeze(-1)).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outs), torch.cat(sums, 1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given an output and a log-sum-exp that may be merged."""
    if q.is_cuda:
        state = torch.empty(2, dtype=torch.int64, device=q.device)
        bounds = (rows.longest_q, rows.longest_k)
        return _aten._flash_attention_backward(
            grad, q, k, v, out, lse, rows.cu_q, rows.cu_k, *bounds, 0.0, rows.causal, state, state
        )
    grads = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    cut = zip(_spans(rows.cu_q), _spans(rows.cu_k), _sequences(q, k, v, rows), strict=True)
    for queries, keys, (query, key, value, mask) in cut:
        scores = torch.einsum("qhd,khd->hqk", query, key) * q.shape[-1] ** -0.5 + mask
        weights = (scores - lse[:, queries].unsqueeze(-1)).exp()
        delta = (grad[queries] * out[queries]).sum(-1).t().unsqueeze(-1)
        inner = torch.einsum("qhd,khd->hqk", grad[queries], value) - delta
        inner = inner * weights * q.shape[-1] ** -0.5
        grads[0][queries] += torch.einsum("hqk,khd->qhd", inner, key)
        for at, more in (
            (1, torch.einsum("hqk,qhd->khd", inner, query)),
            (2, torch.einsum("hqk,qhd->khd", weights, grad[queries])),
        ):
            grads[at][keys] += more.unflatten(1, (-1, group)).sum(2)
    return tuple(grads)


def _spans(offsets: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(offsets.tolist())]


def _sequences(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> list[tuple[Tensor, ...]]:
    group = q.shape[1] // k.shape[1]
    found = []
    for queries, keys in zip(_spans(rows.cu_q), _spans(rows.cu_k), strict=True):
        key, value = (rows[keys].repeat_interleave(group, 1) for rows in (k, v))
        count = (queries.stop - queries.start, keys.stop - keys.start)
        mask = torch.zeros(count, dtype=q.dtype, device=q.device)
        if rows.causal:
            hidden = torch.ones_like(mask).triu(count[1] - count[0] + 1).bool()
            mask.masked_fill_(hidden, -torch.inf)
        found.append((q[queries], key, value, mask))
    return found


class _Peer(torch.autograd.Function):
    """Attention by an object with `run(q, k, v)` and `gradients(grad, q, k, v, out, lse)`."""

    @staticmethod
    def forward(ctx: Any, peer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = peer.run(q, k, v)
        ctx.peer = peer
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.peer.gradients(grad.contiguous(), *ctx.saved_tensors)


class AllGather:
    """Contiguous parts of the row; each rank gathers all keys and values."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup, device: torch.device):
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        total = sum(lengths)
        own = total // ranks
        begin, end = rank * own, (rank + 1) * own
        offsets = [0, *itertools.accumulate(lengths)]
        cut = [
            (max(a, begin), min(b, end), a)
            for a, b in itertools.pairwise(offsets)
            if a < end and b > begin
        ]
        self.tokens = torch.arange(begin, end, device=device)
        # Only the first document reaches back into other ranks' rows.
        self.keys = slice(cut[0][2], end)
        self.rows = Rows.of([b - a for a, b, _ in cut], [b - a for _, b, a in cut], True, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Peer.apply(self, q, k, v)

    def _gathered(self, k: Tensor, v: Tensor) -> Tensor:
        own = torch.cat([k, v], 1)
        whole = own.new_empty(own.shape[0] * dist.get_world_size(self.group), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own, group=self.group)
        return whole

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._gathered(k, v)[self.keys].chunk(2, 1)
        return forward(q, keys, values, self.rows)

    def gradients(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor) -> Any:
        whole = self._gathered(k, v)
        keys, values = whole[self.keys].chunk(2, 1)
        grad_q, grad_k, grad_v = backward(grad, q, keys, values, *saved, self.rows)
        sums = torch.zeros_like(whole)
        sums[self.keys] = torch.cat([grad_k, grad_v], 1)
        own = torch.empty_like(sums[: k.shape[0]])
        if q.is_cuda:
            dist.reduce_scatter_tensor(own, sums, group=self.group)
        else:  # gloo has no reduce-scatter of one tensor
            dist.all_reduce(sums, group=self.group)
            own = sums.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return grad_q, *own.chunk(2, 1)


class ZigzagRing:
    """Parts r and 2 R - 1 - r of each document; keys and values go round all ranks."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank = group, dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        parts = 2 * self.ranks
        if any(length % parts for length in lengths):
            raise ValueError(f"lengths must be multiples of {parts}, got {lengths}")
        half = [length // parts for length in lengths]
        both = [2 * length for length in half]
        offsets = itertools.accumulate([0, *lengths[:-1]])
        first, second = [], []
        tokens = []
        for length, begin in zip(half, offsets, strict=True):
            first += range(len(tokens), len(tokens) + length)
            second += range(len(tokens) + length, len(tokens) + 2 * length)
            for part in (self.rank, parts - 1 - self.rank):
                tokens += range(begin + part * length, begin + (part + 1) * length)
        self.tokens = torch.tensor(tokens, device=device)
        self.first, self.second = (torch.tensor(rows, device=device) for rows in (first, second))
        self.own = Rows.of(both, both, True, device)
        self.before = Rows.of(both, half, False, device)  # all queries, first halves of the keys
        self.after = Rows.of(half, both, False, device)  # second halves of the queries, all keys

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Peer.apply(self, q, k, v)

    def _pass_on(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Send a tensor to the next rank and receive one from the rank before."""
        received = torch.empty_like(tensor)
        peers = [dist.get_global_rank(self.group, (self.rank + by) % self.ranks) for by in (1, -1)]
        ops = [
            dist.P2POp(dist.isend, tensor, peers[0], self.group),
            dist.P2POp(dist.irecv, received, peers[1], self.group),
        ]
        return received, dist.batch_isend_irecv(ops)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([k, v], 1)
        out = lse = None
        for step in range(self.ranks):
            if step + 1 < self.ranks:
                following, works = self._pass_on(keys)
            key, value = keys.chunk(2, 1)
            if step == 0:
                out, lse = forward(q, k, v, self.own)
                out, lse = out.to(lse.dtype), lse.t().contiguous()
            elif step <= self.rank:
                more = forward(q, key[self.first], value[self.first], self.before)
                out, lse = _merged(out, lse, *more)
            else:
                more = forward(q[self.second], key.contiguous(), value.contiguous(), self.after)
                new = _merged(out[self.second], lse[self.second], *more)
                out[self.second], lse[self.second] = new
            if step + 1 < self.ranks:
                for work in works:
                    work.wait()
                keys = following
        return out.to(q.dtype), lse.t().contiguous()

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        keys = torch.cat([k, v], 1)
        sums = torch.zeros_like(keys, dtype=lse.dtype)  # travels with its keys
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        second = (grad[self.second], q[self.second])
        merged = (out[self.second], lse[:, self.second].contiguous())
        for step in range(self.ranks):
            key, value = (rows.contiguous() for rows in keys.chunk(2, 1))
            if step == 0:
                dq, dk, dv = backward(grad, q, key, value, out, lse, self.own)
                sums += torch.cat([dk, dv], 1)
                grad_q += dq
            elif step <= self.rank:
                near = (key[self.first], value[self.first])
                dq, dk, dv = backward(grad, q, *near, out, lse, self.before)
                sums[self.first] += torch.cat([dk, dv], 1)
                grad_q += dq
            else:
                dq, dk, dv = backward(*second, key, value, *merged, self.after)
                sums += torch.cat([dk, dv], 1)
                grad_q[self.second] += dq
            for name, tensor in (("keys", keys), ("sums", sums)):
                received, works = self._pass_on(tensor)
                for work in works:
                    work.wait()
                keys, sums = (received, sums) if name == "keys" else (keys, received)
        return grad_q.to(q.dtype), *sums.to(k.dtype).chunk(2, 1)


def _merged(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two outputs over disjoint keys; `lse` is `[tokens, heads]`, `more_lse` the reverse."""
    more_lse = more_lse.t()
    total = torch.logaddexp(lse, more_lse)
    shares = [(part - total).exp().unsqueeze(-1) for part in (lse, more_lse)]
    return out * shares[0] + more_out * shares[1], total
