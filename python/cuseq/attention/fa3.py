"""The kernels of FlashAttention 3, for the backend "fa3" of attention.

No wheel is published: the module `flash_attn_interface` is there where somebody has built it from
the folder `hopper` of flash-attention. It registers ops, which are called here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from cuseq.attention.packages import register_kernels

_library: torch.library.Library | None = None


def register(capability: tuple[int, int]) -> str:
    """Register the kernels for CUDA. Return an empty string, or why they cannot be used."""
    global _library
    if capability[0] != 9:
        sm = "".join(map(str, capability))
        return f"FlashAttention 3 runs on GPUs of sm_90, got sm_{sm}"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return (
            "FlashAttention 3 is not installed: no wheel is published; build flash-attention's "
            "folder hopper, which installs the module flash_attn_interface"
        )
    try:
        importlib.import_module("flash_attn_interface")
        torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd  # noqa: B018
    except Exception as error:  # a build for another torch fails in many ways
        return (
            f"flash_attn_interface cannot be used ({type(error).__name__}: {error}): build it "
            f"again for torch {torch.__version__}"
        )
    _library = register_kernels("fa3", "flash_attn_interface", forward, backward)
    return ""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *sequences: Any,
) -> None:
    """Compute attention into `out` and `logsumexp`, for the op `cuseq::fa3_forward`.

    Rows are fp16 or bf16 `[tokens, heads, head_dim]` with zeros in a tail; `logsumexp` is fp32
    `[heads, tokens]`; `register_kernels` describes `sequences`. Never synchronises.
    """
    _, found, *_ = torch.ops.flash_attn_3.fwd(q, k, v, out=out, **_options(*sequences))
    logsumexp.copy_(found)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *sequences: Any,
) -> None:
    """Compute gradients into `grad_q`, `grad_k` and `grad_v`, for the op `cuseq::fa3_backward`.

    Shapes and dtypes are those of the forward; gradients have them too. Never synchronises.
    """
    torch.ops.flash_attn_3.bwd(
        grad_out, q, k, v, out, logsumexp, dq=grad_q, dk=grad_k, dv=grad_v, **_options(*sequences)
    )


def _options(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "is_causal": causal,
        "window_size_left": -1 if window_left is None else window_left,
        "window_size_right": -1 if window_right is None else window_right,
    }
