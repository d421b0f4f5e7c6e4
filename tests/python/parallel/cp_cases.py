"""Rows drawn at random for context-parallel attention, and the comparison with one process."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import cuseq
from cuseq import PackedLayout
from cuseq.distributed import cp_partition, cp_plan
from cuseq.layout import StaticLayout, needed_room

HEAD_DIM = 8


class Case(NamedTuple):
    """A row, its plan and the options of a call."""

    lengths: list[int]
    total: int | None = None
    policy: str = "auto"
    multiple: int = 1  # of segments
    heads: tuple[int, int] = (4, 2)
    planned_window: int | None = None
    max_far_rows: int | None = None
    tail: int = 0  # tokens that each rank's part is lengthened by
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    spans: list[tuple[int, int]] | None = None
    sinks: bool = False
    value_dim: int = HEAD_DIM - 2
    strides: str = "contiguous"  # of q, k and v; or "in wider rows", "heads first"

    def packed(self, cp_size: int) -> PackedLayout:
        parts = 2 * cp_size if self.policy == "zigzag" else cp_size
        return PackedLayout.from_lengths(
            self.lengths, self.total, segment_multiple=self.multiple, total_multiple=parts
        )

    def plan(self, cp_size: int) -> cuseq.distributed.ContextParallelPlan:
        return cp_plan(
            self.packed(cp_size),
            cp_size,
            policy=self.policy,
            heads=self.heads,
            window=self.planned_window,
            max_far_rows=self.max_far_rows,
        )

    def strided(self, rows: Tensor) -> Tensor:
        """Return the same values with the strides of the case."""
        if self.strides == "in wider rows":
            return torch.cat([rows, rows.detach()], 1)[:, : rows.shape[1]]
        if self.strides == "heads first":
            return rows.transpose(0, 1).contiguous().transpose(0, 1)
        return rows

    def options(self, device: torch.device) -> dict[str, Any]:
        spans = self.spans
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "spans": spans and torch.tensor(spans, dtype=torch.int32, device=device),
        }


def drawn(seed: int, cp_size: int, policy: str) -> Case:
    """Draw a row: short and long documents, empty ones, padding, a tail, windows, sinks."""
    draw = random.Random(seed)
    longest = draw.choice((6, 30, 90))
    lengths = [draw.choice((0, 1, cp_size + 1, draw.randint(1, longest)))
               for _ in range(draw.randint(0, 7))]  # fmt: skip
    multiple = draw.choice((1, 1, 3))
    parts = 2 * cp_size if policy == "zigzag" else cp_size
    if policy == "zigzag" and draw.random() < 0.5:
        multiple = parts
    elif policy == "zigzag":  # without padding
        multiple, lengths = 1, [-(-length // parts) * parts for length in lengths]
    used = sum(-(-length // multiple) * multiple for length in lengths)
    step = math.lcm(parts, multiple)
    total = max(1, -(-used // step) + draw.choice((0, 0, draw.randint(1, 9)))) * step
    heads = draw.choice([(4, 2), (3, 3), (4, 1)])
    if policy == "ulysses":
        heads = draw.choice([(24, 24), (24, 1), (24, 2 if cp_size % 2 == 0 else 3)])
    window = draw.choice((None, None, None, 1, 5))
    case = Case(lengths, total, policy, multiple, heads, window=window)
    if window is not None and draw.random() < 0.7:
        case = case._replace(planned_window=window + draw.choice((0, 2)))
    case = case._replace(tail=draw.choice((0, 0, 3)))
    extra = draw.choice(("none", "none", "softcap", "sinks", "both sides", "spans"))
    if extra == "softcap":
        case = case._replace(softcap=2.0)
    elif extra == "sinks":
        case = case._replace(sinks=True)
    elif extra == "both sides" and policy == "ulysses":
        case = case._replace(causal=False)
    elif extra == "spans" and policy == "ulysses":
        begin = 0
        spans = []
        for length in lengths:
            if length >= 4:
                spans.append((begin + 1, begin + length - 1))
            begin += -(-length // multiple) * multiple
        case = case._replace(spans=spans or None)
    return case


def in_a_room(local: PackedLayout, group: dist.ProcessGroup) -> StaticLayout:
    """Return the layout in the form of a CUDA graph that has room for the parts of all ranks."""
    static = StaticLayout.like(local, local.device)
    needed = torch.tensor(needed_room(static), device=local.device)
    dist.all_reduce(needed, dist.ReduceOp.MAX, group=group)
    static.fit(needed.tolist())
    return static


def check(case: Case, group: dist.ProcessGroup, device: str = "cpu") -> PackedLayout:
    """Compare this rank's attention, forward and backward, with that of the whole row.

    Once as the plan says, and once in the form that a CUDA graph reads.
    """
    rank, cp_size = dist.get_rank(group), dist.get_world_size(group)
    where = torch.device(device)
    packed = case.packed(cp_size).to(where)
    plan = case.plan(cp_size)
    heads, key_heads = case.heads
    generator = torch.Generator().manual_seed(len(case.lengths) + 7 * packed.total_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(where)

    total = packed.total_tokens
    whole = [randn(total, n, HEAD_DIM) for n in (heads, key_heads, key_heads)]
    whole[2] = whole[2][..., : case.value_dim].contiguous()
    grad = randn(total, heads, case.value_dim)
    sinks = randn(heads) if case.sinks else None
    options = case.options(where)

    def run(
        rows: list[Tensor], layout: PackedLayout, grad: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in rows]
        sink = None if sinks is None else sinks.clone().requires_grad_()
        out = cuseq.varlen_attention(*map(case.strided, leaves), layout, sinks=sink, **options)
        out.backward(grad)
        return out.detach(), [leaf.grad for leaf in leaves], None if sink is None else sink.grad

    out, grads, grad_sinks = run(whole, packed, grad)
    parts = cp_partition(packed, plan, rank, *whole, grad, out, *grads, group=group)
    local, own, own_grad, expected = parts[0], list(parts[1:4]), parts[4], list(parts[5:])
    if case.tail:
        local = local.with_total_tokens(local.total_tokens + case.tail)
        lengthen = [0, 0, 0, 0, 0, case.tail]
        own = [torch.nn.functional.pad(rows, lengthen, value=3.0) for rows in own]
        own_grad = torch.nn.functional.pad(own_grad, lengthen, value=2.0)
        expected = [torch.nn.functional.pad(rows, lengthen) for rows in expected]
    for form, layout in (("planned", local), ("in a room", in_a_room(local, group))):
        found, found_grads, found_sinks = run(own, layout, own_grad)
        where_it_was = f"{case}\nrank {rank}, {form}: "
        assert_close([found, *found_grads], expected, msg=lambda text, at=where_it_was: at + text)
        if found_sinks is not None:
            dist.all_reduce(found_sinks, group=group)  # each rank has its tokens' share
            assert_close(found_sinks, grad_sinks)
    return local
