"""The functions of modeling modules that carry a state along the row, and their replacements.

A replacement takes the arguments of the function it replaces. With a layout among them it starts
each sequence anew; without one it calls the original, so that dense and padded batches, prefill and
decoding compute what they did before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

import cuseq
from cuseq.integrations.transformers._functions import Function
from cuseq.integrations.transformers._warn import warn_once
from cuseq.integrations.transformers.hybrids.delta_rule import chunked_gated_delta_rule
from cuseq.integrations.transformers.hybrids.kernels import (
    GATED_DELTA_RULE,
    GATED_LINEAR_ATTENTION,
    KIMI_DELTA_ATTENTION,
    MAMBA_SCAN,
    Kernel,
    fla_arguments,
)
from cuseq.integrations.transformers.hybrids.segments import (
    by_batches,
    last_sequence,
    slow_warning,
)
from cuseq.layout import PackedLayout

WITH_FLA = 'on a GPU, flash-linear-attention makes it one kernel call (pip install "cuseq[fla]")'
WITH_GATED_FLA = f"{WITH_FLA}; to train on Hopper with Triton 3.4.0 to 3.7.0 it needs tilelang"
WITH_MAMBA = (
    "on a GPU, flash-linear-attention or mamba-ssm makes it one kernel call; to train on Hopper "
    "with Triton 3.4.0 to 3.7.0 it needs mamba-ssm, or for rows of float32 tilelang"
)
_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
_WIDTHS = (2, 3, 4)


_running = threading.local()


@contextlib.contextmanager
def inside_packed_row(model: str) -> Iterator[None]:
    """Note that a model of this name runs on a packed row: its mixers must get the layout."""
    before = getattr(_running, "model", None)
    _running.model = model
    try:
        yield
    finally:
        _running.model = before


def layout_among(keywords: dict[str, Any], rows: Tensor) -> PackedLayout | None:
    """Return the layout that a mixer handed to a function, on the device of `rows`; else None.

    Raises:
        ValueError: the row is packed and its layout did not arrive. Not seen in compiled code, nor
            when a checkpoint computes a layer again.
    """
    for name in ("packed", "seq_idx"):  # some mixers hand on `seq_idx` alone
        packed = keywords.get(name)
        if isinstance(packed, PackedLayout):
            return packed.to(rows.device)
    if not torch.compiler.is_compiling() and getattr(_running, "model", None) is not None:
        raise ValueError(
            f"a layer of {_running.model} with a state along the row must be given packed=, which "
            f"a module above it did not hand on (transformers {transformers.__version__}): "
            "documents would reach each other"
        )
    return None


def convolution(original: Function) -> Function:
    """Replace `causal_conv1d_fn`, the depthwise convolution before a recurrence."""

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        packed = layout_among(kwargs, hidden_states)
        if packed is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        tokens = columns = hidden_states.shape[2]
        if not torch.compiler.is_compiling():
            tokens = packed.total_tokens // hidden_states.shape[0]
            # A cache that this row fills returns a short row with zeros in front.
            if columns > max(tokens, weight.shape[1]):
                _refuse_state()
        states = hidden_states[:, :, -tokens:].transpose(1, 2)
        if weight.shape[1] not in _WIDTHS or activation not in _ACTIVATIONS:
            rows, _ = by_batches(
                f"a convolution of width {weight.shape[1]} with activation {activation}",
                "cuseq.causal_conv1d takes widths from 2 to 4 and silu",
                packed,
                lambda _, row: (_alone(original, row, weight, bias, activation), None),
                states.flatten(0, 1).unsqueeze(0),
            )
            return rows.view(states.shape).transpose(1, 2)
        out = cuseq.causal_conv1d(
            states.flatten(0, 1),
            weight,
            bias,
            packed,
            activation=_ACTIVATIONS[activation],
        )
        return out.view(states.shape).transpose(1, 2)

    return causal_conv1d_fn


def _alone(original: Function, row: Tensor, *arguments: Any) -> Tensor:
    weight, bias, activation = arguments
    return original(row.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)


def gated_delta_rule(original: Function) -> Function:
    """Replace `torch_chunk_gated_delta_rule` of Qwen3-Next and its kin."""
    return _delta_rule(original, GATED_DELTA_RULE, "the gated delta rule")


def kimi_delta_attention(original: Function) -> Function:
    """Replace `chunk_kimi_delta_attention`."""
    return _delta_rule(original, KIMI_DELTA_ATTENTION, "Kimi delta attention")


def _delta_rule(original: Function, kernel: Kernel, what: str) -> Function:
    def chunk_delta_rule(
        query, key, value, g, beta, *args, initial_state=None, output_final_state=False, **kwargs
    ):
        packed = layout_among(kwargs, query)
        if packed is None:
            return original(
                query,
                key,
                value,
                g,
                beta,
                *args,
                initial_state=initial_state,
                output_final_state=output_final_state,
                **kwargs,
            )
        if initial_state is not None:
            _refuse_state()
        batch = query.shape[0]
        rows = [one.flatten(0, 1).unsqueeze(0) for one in (query, key, value, g, beta)]
        normalise = kwargs.get("use_qk_l2norm_in_kernel", False)
        chunked = kernel.function(query, key, value, g, beta)
        if chunked is None and kernel is GATED_DELTA_RULE:
            warn_once(slow_warning(what, WITH_GATED_FLA))
            out, state = chunked_gated_delta_rule(packed, *rows, normalise, output_final_state)
        elif chunked is None:
            in_torch = getattr(original, "__wrapped__", original)
            out, state = by_batches(
                what,
                WITH_FLA,
                packed,
                lambda keeps, *batch: in_torch(
                    *batch, output_final_state=keeps, use_qk_l2norm_in_kernel=normalise
                ),
                *rows,
                keeps_state=output_final_state,
            )
        else:
            out, state = chunked(
                *rows[:3],
                g=rows[3],
                beta=rows[4],
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=normalise,
                **fla_arguments(chunked, packed),
            )
            state = _state_of_last(state, packed)
        return out.view(batch, -1, *out.shape[2:]), _of_each_row(state, batch)

    return chunk_delta_rule


def fused_mamba2(original: Function) -> Function:
    """Replace the function that runs a whole Mamba-2 layer, which has another convolution in it.

    With a layout it returns None, as without mamba-ssm; the layer then calls its parts.
    """

    def mamba2_split_conv1d_scan_combined(zxbcdt, *args, **kwargs):
        if layout_among(kwargs, zxbcdt) is not None:
            return None
        return original(zxbcdt, *args, **kwargs)

    return mamba2_split_conv1d_scan_combined


def mamba2_scan(original: Function) -> Function:
    """Replace `mamba2_chunk_scan`, the state space recurrence of Mamba 2."""

    def mamba2_chunk_scan(
        hidden_states, dt, A, B, C, chunk_size, initial_states=None, return_final_states=False,
        **kwargs,
    ):  # fmt: skip
        packed = layout_among(kwargs, hidden_states)
        if packed is None:
            return original(
                hidden_states,
                dt,
                A,
                B,
                C,
                chunk_size=chunk_size,
                initial_states=initial_states,
                return_final_states=return_final_states,
                **kwargs,
            )
        if initial_states is not None:
            _refuse_state()
        batch = hidden_states.shape[0]
        rows = [one.flatten(0, 1).unsqueeze(0) for one in (hidden_states, dt, B, C)]
        taken = ("D", "dt_bias", "dt_softplus", "dt_limit")
        options = {name: kwargs[name] for name in taken if name in kwargs}
        others = [one for one in (dt, A, B, C, *options.values()) if isinstance(one, Tensor)]
        of_mamba = MAMBA_SCAN.function(hidden_states, *others)
        of_fla = GATED_LINEAR_ATTENTION.function(hidden_states, *others)
        if of_mamba is not None and not return_final_states:
            x, dt, B, C = rows
            of_tokens = packed.seq_ids.unsqueeze(0)
            out, state = of_mamba(x, dt, A, B, C, chunk_size, seq_idx=of_tokens, **options), None
        elif of_fla is not None:
            out, state = _scan_by_fla(of_fla, packed, A, *rows, return_final_states, **options)
        else:
            in_torch = getattr(original, "__wrapped__", original)

            def scan(keeps, x, dt, B, C):
                found = in_torch(
                    x, dt, A, B, C, chunk_size=chunk_size, return_final_states=keeps, **options
                )
                return found if keeps else (found, None)

            out, state = by_batches(
                "the Mamba-2 scan",
                WITH_MAMBA,
                packed,
                scan,
                *rows,
                keeps_state=return_final_states,
            )
        out = out.view(batch, -1, *out.shape[2:])
        return (out, _of_each_row(state, batch)) if return_final_states else out

    return mamba2_chunk_scan


def _scan_by_fla(
    simple_gla: Function,
    packed: PackedLayout,
    A: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    return_final_states: bool,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor | None]:
    """Run the scan as gated linear attention: C are its queries, B its keys, dt * x its values.

    The state S of a head decays by exp(A dt) at each token: Dao and Gu, "Transformers are SSMs",
    arXiv 2405.21060.
    """
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    heads = x.shape[2] // B.shape[2]
    out, state = simple_gla(
        C.repeat_interleave(heads, dim=2).to(x.dtype),
        B.repeat_interleave(heads, dim=2).to(x.dtype),
        (x.float() * dt.unsqueeze(-1)).to(x.dtype),
        g=A.float() * dt,
        scale=1.0,
        output_final_state=return_final_states,
        **fla_arguments(simple_gla, packed),
    )
    if D is not None:
        out = out + (x.float() * D.float().unsqueeze(-1)).to(out.dtype)
    if state is None:
        return out, None
    return out, _state_of_last(state, packed).transpose(-1, -2)


def _refuse_state() -> None:
    raise ValueError(
        "packed lengths describe whole rows, not a decode step: got a state from a filled cache"
    )


def _state_of_last(states: Tensor | None, packed: PackedLayout) -> Tensor | None:
    """Return the state `[1, ...]` after the last sequence, of states `[segments, ...]`."""
    if states is None:
        return None
    segment = last_sequence(packed)
    return states[segment : segment + 1]


def _of_each_row(state: Tensor | None, batch: int) -> Tensor | None:
    """Return a state for each row of the batch, since a cache holds one a row."""
    return None if state is None else state.expand(batch, *state.shape[1:]).contiguous()
