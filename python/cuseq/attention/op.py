"""Attention by the op `cuseq::varlen_attention`, which runs the backends of C++.

C++ chooses one of them when the op runs (`csrc/attention/choice.cpp`), since compiled code and
programs without Python call the op too.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.arguments import check_untransformed
from cuseq.attention.call import Call, as_autocast, check_rows
from cuseq.distributed._groups import name_or_default
from cuseq.layout import StaticLayout, checked_spans, remember_offsets_on_host

_ops = torch.ops.cuseq


def choose(call: Call) -> tuple[str, str]:
    """Check all that the op checks. Return the backend that it chooses, and why.

    Raises:
        ValueError, TypeError: as the op.
    """
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        check_untransformed(tensor, name, "pass the batch as one packed row")
    return _C.attention_choice(call.q, call.k, call.v, *_options(call))


def attend(call: Call) -> Tensor:
    """Run the op. Returns `[total_tokens, heads, value_dim]`."""
    q, k, v, _, _, _, _, _, _, sinks, _ = call
    options = _options(call)
    try:
        if sinks is not None:
            return _attention_with_sinks(q, k, v, sinks, options)
        return _ops.varlen_attention(q, k, v, *options)[0]
    except (RuntimeError, TypeError):
        # The dispatcher's message would print the schema. Checking first would cost time.
        check_rows(q, k, v)
        raise


def _options(call: Call) -> tuple[Any, ...]:
    """Return the arguments of the op after q, k and v."""
    q, _, _, packed, causal, window, spans, scale, softcap, _, backend = call
    row, part, tree = packed.row, packed.part, packed.tree
    bound = packed.max_seqlen_bound if isinstance(packed, StaticLayout) else None
    padded = None if row.segments is None else row.segments.cu_seqlens_static
    of_layout: tuple[Any, ...]
    if part is not None:
        if spans is not None and not isinstance(spans, Tensor):
            raise TypeError(
                "spans must be an int32 tensor [n_spans, 2] for a rank's part of a row, got "
                f"{type(spans).__name__}"
            )
        of_layout = part.rows, part.meta, name_or_default(part.group), None, None
    else:
        may_run_in_segments = (
            spans is not None
            or softcap is not None
            or (window is not None and not causal)
            or q.dtype == torch.float64
            or backend == "segments"
        )
        if may_run_in_segments and not is_compiling():
            remember_offsets_on_host(packed)  # which that backend reads
        spans = checked_spans(packed, spans) if spans is not None else None
        nodes = (None, None) if tree is None else (tree.rows, tree.meta)
        of_layout = None, None, "", *nodes
    return (
        row.cu_seqlens_static, row.host_meta, causal, window, scale, bound, spans, padded,
        softcap, backend, *of_layout,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ sinks


def _attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, arguments: tuple[Any, ...]
) -> Tensor:
    q, k, v = as_autocast(q, k, v)
    if is_compiling():
        # Dynamo of torch 2.11 merges arguments that are the same tensor and loses a gradient.
        q, k, v = (rows.view_as(rows) for rows in (q, k, v))
    function = _WithSinks if is_compiling() else _WithSinksInEager
    return function.apply(q, k, v, sinks, *arguments)


class _WithSinks(torch.autograd.Function):
    """Attention with sinks, computed from attention without them.

    A sink is a key without a value. It adds a term to the softmax's denominator, so the output is
    multiplied by the share that the real keys keep. The backward of attention, called with that
    output and that log-sum-exp, already gives the right gradients of q, k and v: the sink affects
    them only through `out . grad_out`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *arguments: Any
    ) -> Tensor:
        out, logsumexp, far_rows = _ops.varlen_attention(q, k, v, *arguments)
        scores = sinks.detach().to(logsumexp.dtype).unsqueeze(1)
        total = torch.logaddexp(logsumexp, scores)  # [heads, tokens]
        out = out * (logsumexp - total).exp().t().unsqueeze(2).to(out.dtype)
        ctx.save_for_backward(sinks, q, k, v, out, total, far_rows)
        ctx.arguments = arguments
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        create_graph = torch.is_grad_enabled() and not is_compiling()
        with torch.no_grad():
            grads = _WithSinks.gradients(grad_out, saved, ctx.arguments)
        if create_graph:
            grads = _Once.apply(grad_out, *saved[:4], *grads)
        return *grads, *[None] * len(ctx.arguments)

    @staticmethod
    def gradients(
        grad_out: Tensor, saved: tuple[Any, ...], arguments: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        sinks, _, _, _, out, total, _ = saved
        grads = _ops.varlen_attention_backward(grad_out, *saved[1:], *arguments)
        share = (sinks.to(total.dtype).unsqueeze(1) - total).exp()
        # On padding and tail `out` is zero, and `grad_out` may hold any value, even NaN.
        taken = torch.where(out != 0, grad_out.to(total.dtype) * out, 0).sum(-1)  # [tokens, heads]
        grad_sinks = -torch.einsum("ht,th->h", share, taken.to(total.dtype))
        return *grads, grad_sinks.to(sinks.dtype)


class _Once(torch.autograd.Function):
    """Pass gradients through, and raise if they are differentiated again.

    PyTorch's `once_differentiable` raises only if the incoming gradient has a graph.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take `grad_out, sinks, q, k, v` and then the gradients."""
        return tuple(grad.clone() for grad in tensors[5:])  # autograd forbids edits of views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(
            "cuseq::varlen_attention cannot be differentiated twice: its kernels have no second "
            "derivative; use eager attention where you need create_graph=True"
        )


class _WithSinksInEager(_WithSinks):
    """The same with a `jvp`, which says that there is none; the compiler refuses such functions."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "cuseq::varlen_attention has no forward-mode derivative: use reverse mode, or eager "
            "PyTorch where you need jvp"
        )
