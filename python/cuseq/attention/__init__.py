"""Attention inside the sequences of a packed row.

`call.py` checks a call, `choice.py` decides which backend computes it, `flex.py`, `tree.py` and
`op.py` compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuseq.attention import flops as flops
from cuseq.attention.call import check_rows, checked
from cuseq.attention.choice import check_installed as check_installed
from cuseq.attention.choice import load_backends, route
from cuseq.layout import PackedLayout, Spans


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Spans | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute exact softmax attention inside each sequence of a packed row.

    Several backends compute it. `backend="auto"` takes the one that was the fastest where something
    like the call was measured: FlashAttention 4 if it is installed, cuDNN from torch 2.15 on,
    PyTorch's flash kernels, or flex attention. For inputs that flash attention refuses (fp32,
    head_dim above 256, GPUs below sm_80), another exact kernel runs, with one warning per process
    unless it is flex attention's.
    `cuseq.attention_backend` names the one that is chosen and says why. Grouped-query attention
    needs no repeated keys. But for a tree that runs densely, no tensor of size tokens x tokens is
    made.

    Equivalent to, for each sequence `s` of the layout:
        `scaled_dot_product_attention(q[s], k[s], v[s], is_causal=causal, scale=scale)`
    With `softcap` the scores become `softcap * tanh(score / softcap)` before the softmax. The
    output and the gradients are zero on padding and tail.

    With the layout of a `PackedTree` a token sees its path, and a window counts tokens of the path.
    A window shorter than the longest path runs as flex attention, or densely if flex cannot run. In
    eager code a deep tree runs in the same way if that is faster by modelled time.

    Args:
        q: `[total_tokens, heads, head_dim]`; the last dimension must be contiguous.
        k: `[total_tokens, key_heads, head_dim]`; `heads` is a multiple of `key_heads`.
        v: `[total_tokens, key_heads, value_dim]`.
        packed: the row's layout, on the device of `q`.
        causal: whether a token sees only itself and earlier tokens.
        window: number of keys that a token sees, itself included (transformers' `sliding_window`);
            with `causal=False` in both directions. None means all keys.
        spans: (start, end) pairs in tokens of the row; in compiled code an int32 tensor
            `[n_spans, 2]`, as in `PackedLayout.dense_mask`. Tokens of a span see all of it.
        scale: factor of the scores, default `head_dim ** -0.5`.
        softcap: bound of the scores, above 0 (Gemma 2; Gemma Team 2024, arXiv:2408.00118). None
            means no bound.
        sinks: floating point `[heads]`, one score per head that is added to the softmax's
            denominator and has no value (GPT-OSS; Xiao et al. 2023, arXiv:2309.17453).
        backend: "auto"; "flash", PyTorch's flash kernels or what
            `torch.nn.attention.activate_flash_attention_impl` has put in their place; "cudnn",
            cuDNN's attention, on sm_90 and sm_100 from torch 2.15 on; "fa4" and
            "fa3", FlashAttention 4 and 3, whose packages must be installed; "flex", flex attention,
            which compiles a kernel at the first call; "efficient", PyTorch's memory-efficient
            kernel; "segments", one sequence after the other.

    Returns:
        `[total_tokens, heads, value_dim]`, contiguous. Differentiable once.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or the layout do not fit; or the backend that
            was asked for is not installed or cannot take the call, and the message says what to do;
            or the plan of a rank's part does not serve the options, or its process group is
            unknown.
        RuntimeError: another rank failed, or did not call within the timeout of the group.

    For a layout from `cp_partition`, all ranks of its group must make the same call, forward and
    backward, each with its own tokens. They exchange the keys that the plan names, and each rank
    gets its tokens of what one process would compute for the whole row. `causal=False` and spans
    need policy "ulysses"; spans then count tokens of the whole row. Over NCCL the host does not
    wait for the exchange.

    Inside torch.compile one graph serves every pack with the same `total_tokens`, because the op
    reads the lengths when it runs. With a layout from host lengths nothing synchronises. With a
    layout from lengths on a GPU the first call waits for the event of one small copy. Under
    autocast the computation uses the region's dtype, as in scaled_dot_product_attention.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> cuseq.varlen_attention(q, k, v, packed).shape
        torch.Size([5, 4, 16])
    """
    call = checked(q, k, v, packed, causal, window, spans, scale, softcap, sinks, backend)
    return route(call).run(call)


class AttentionBackend(NamedTuple):
    """The backend of a call of `varlen_attention`, and why it was chosen."""

    name: str
    reason: str


def attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Spans | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> AttentionBackend:
    """Return which backend `varlen_attention` runs for the same arguments in eager code, and why.

    Nothing is computed. Waits as `varlen_attention` does for a layout from lengths on a GPU.

    Returns:
        `AttentionBackend(name, reason)`. The name is one that a call can give, or "dense": the
        scores of all pairs of tokens, for a tree where flex cannot run. The reason says whether
        measurements chose, with their times, or a rule, on a GPU or for a call that nobody
        measured; and which rows of the user's own table of measurements are not used here.

    Raises:
        ValueError, TypeError: as `varlen_attention`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> cuseq.attention_backend(q, k, v, packed).name
        'segments'
    """
    check_rows(q, k, v)
    call = checked(q, k, v, packed, causal, window, spans, scale, softcap, sinks, backend)
    name, reason, _ = route(call, explain=True)
    return AttentionBackend(name, reason)


def attention_by_offsets(
    rows: Sequence[Tensor],
    offsets: Tensor,
    causal: bool,
    scale: float | None,
    bound: int | None = None,
    *,
    padded: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention inside the sequences of offsets `[n_seqs + 1]`, without host lengths.

    For compiled code, which can make no layout. `rows` are q, k and v; no sequence is longer than
    `bound`, in tokens, and without it kernels start for one as long as the row.
    """
    if rows[0].is_cuda:
        load_backends()
    out, *_ = torch.ops.cuseq.varlen_attention(
        *rows, offsets.to(torch.int32), None, causal, window, scale, bound, None, padded, softcap,
        backend,
    )  # fmt: skip
    return out
