"""Rotary position embedding, alone or fused with the RMS norm of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from cuseq import _C
from cuseq._base.arguments import (
    as_float,
    as_int,
    as_size,
    check_flag,
    check_tensor,
    check_values,
    one_of,
    shown,
)
from cuseq.layout import PackedLayout, check_layout, own_positions

_ops = torch.ops.cuseq


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    packed: PackedLayout | None = None,
    position_ids: Tensor | None = None,
    offset: int = 0,
    table: str = "position",
    qkv_format: str = "thd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key by the angles of their positions, both in one kernel.

    Each pair `(a, b)` of a head becomes `(a cos - b sin, b cos + a sin)` (Su et al. 2021,
    arXiv:2104.09864). The arithmetic is in float32, or in float64 for float64 inputs, and the
    result is rounded once.

    Args:
        q: `[tokens, heads, head_dim]` with qkv_format "thd", `[batch, seqlen, heads, head_dim]` in
            "bshd", `[batch, heads, seqlen, head_dim]` in "bhsd"; float32, float64, bfloat16 or
            float16; head_dim up to 512. The last dimension must be contiguous.
        k: as `q`, with any number of heads; or None.
        cos: cosines of the angles, `[rows, width]`, of any of these dtypes. Row p belongs to
            position p. `width` is `rotary_dim / 2`, or `rotary_dim` if each angle appears twice, in
            the order of the pairs: `[a, b, a, b]`, or `[a, a, b, b]` with `interleaved`.
        sin: sines, of the same shape and dtype.
        packed: layout of the row; positions restart in each of its segments and in the tail. For
            tensors with a batch dimension the row is all their tokens, batch row after batch row.
        position_ids: int32 or int64 positions, `[tokens]` or `[1, tokens]` ("thd"),
            `[batch, seqlen]` or `[1, seqlen]` (shared by the batch).
        offset: position of the first token of each batch row, for calls with neither `packed` nor
            `position_ids`. Positions count up from it; a decode step uses it.
        table: "position", or "token" if `cos` and `sin` have one row for each token:
            `[tokens, width]`, `[batch, seqlen, width]` or `[1, seqlen, width]`.
        qkv_format: "thd", "bshd" or "bhsd".
        interleaved: pairs are neighbours, `(0, 1), (2, 3), ...` (GPT-J), instead of the two halves,
            `(0, rotary_dim / 2), ...` (GPT-NeoX, Llama).
        rotary_dim: number of elements of each head that are rotated, from the first on; the others
            are copied. Default: `2 * width` if a head has so many elements, else `width`. Give it
            for tables of full width that rotate half a head or less, because sizes alone do not
            distinguish those from half tables.
        mrope_section: three counts of pairs that sum to `rotary_dim / 2`: how many are rotated by
            time, height and width (Qwen2-VL). `position_ids`, or the tables with `table="token"`,
            then have a first dimension of 3.
        mrope_interleaved: whether the planes alternate, `t h w t h w ... t`, instead of
            `t.. h.. w..` (Qwen3-VL). Height and width have at most every third pair; pairs beyond
            that are rotated by time, as in transformers.
        cp_size: ranks of context parallelism. `packed` is then the layout of the whole row; `q` and
            `k` hold this rank's two parts of each sequence, in order, and each length is a multiple
            of `2 * cp_size`. Without `packed` the same holds for each batch row.
        cp_rank: this rank.
        inplace: whether to write the result into `q` and `k` and return those.

    Returns:
        `(q, k)`, dense, with the dimension order in memory of the inputs; `k` is None if it was
        None. Differentiable any number of times.

    Raises:
        ValueError, TypeError: arguments do not fit each other, or a position known on the host is
            beyond the table. For a position on a GPU that is beyond the table, nothing is read:
            its token becomes NaN, or an error is raised with `CUSEQ_CHECK=1`.

    Never synchronises. With a layout from lengths on a GPU the first call waits for the event of
    one small copy.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k = torch.randn(5, 8, 64), torch.randn(5, 2, 64)
        >>> cos, sin = cuseq.rope_table(packed.total_tokens, 64)
        >>> q, k = cuseq.apply_rope(q, k, cos, sin, packed=packed)
        >>> q.shape, k.shape
        (torch.Size([5, 8, 64]), torch.Size([5, 2, 64]))
    """
    check_values(q, "q")
    options: tuple[Any, ...] = (
        offset, table, qkv_format, interleaved, rotary_dim, mrope_section, mrope_interleaved,
        cp_size, cp_rank, inplace,
    )  # fmt: skip
    positions = _positions_of(packed, position_ids, q, qkv_format, cp_size)
    if _ops_are_watched(q, k):
        _check_types({"q": q, "k": k, "cos": cos, "sin": sin}, position_ids, options)
        return _apply_rope_op(q, k, cos, sin, *positions, *options)
    try:
        return _C.apply_rope(q, k, cos, sin, *positions, *options)
    except Exception:
        # Replace the binding's error, which prints signatures. Checking before the call would cost
        # time in every call.
        _check_types({"q": q, "k": k, "cos": cos, "sin": sin}, position_ids, options)
        raise


def apply_qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    packed: PackedLayout | None = None,
    position_ids: Tensor | None = None,
    offset: int = 0,
    table: str = "position",
    qkv_format: str = "thd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply RMS norm to each head of query and key, then `apply_rope`, in one kernel.

    Equivalent to, but rounded only once:
        `x = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + eps) * (q_weight + weight_offset)`
        followed by `apply_rope` (RMS norm: Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        q_weight: `[head_dim]`, any of the dtypes of `q`.
        k_weight: `[head_dim]` of the same dtype; None if `k` is None.
        eps: added to the mean square.
        weight_offset: added to the weights: 1.0 for models that store them around 0 (Gemma).
        inplace: only allowed if no gradient is needed, because the norm's gradient needs its input.

    The other arguments are those of `apply_rope`. The norm covers the whole head, even if only a
    part of it is rotated.

    Returns:
        `(q, k)` as `apply_rope`, of the dtype of `q`. Differentiable once, in `q`, `k` and the
        weights; the gradients of the weights are deterministic. The backward saves the inputs and
        one number for each head of each token.

    Raises:
        ValueError, TypeError: as `apply_rope`; or only one of `k` and `k_weight` is given.

    Synchronises as `apply_rope` does.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k = torch.randn(5, 8, 64), torch.randn(5, 2, 64)
        >>> cos, sin = cuseq.rope_table(packed.total_tokens, 64)
        >>> weight = torch.ones(64)
        >>> q, k = cuseq.apply_qk_norm_rope(
        ...     q, k, weight, weight, cos, sin, eps=1e-6, packed=packed
        ... )
        >>> q.shape
        torch.Size([5, 8, 64])
    """
    if (k is None) != (k_weight is None):
        given, missing = ("k_weight", "k") if k is None else ("k", "k_weight")
        raise ValueError(f"{given} must be passed with {missing}, got {missing}=None")
    check_values(q, "q")
    options: tuple[Any, ...] = (
        offset, table, qkv_format, interleaved, rotary_dim, mrope_section, mrope_interleaved,
        cp_size, cp_rank, inplace,
    )  # fmt: skip
    norm = (q_weight, k_weight, eps, weight_offset)
    positions = _positions_of(packed, position_ids, q, qkv_format, cp_size)
    if _ops_are_watched(q, k):
        _check_norm_types(q, k, norm, cos, sin, position_ids, options)
        return _apply_qk_norm_rope_op(q, k, *norm, cos, sin, *positions, *options)
    try:
        return _C.apply_qk_norm_rope(q, k, *norm, cos, sin, *positions, *options)
    except Exception:
        _check_norm_types(q, k, norm, cos, sin, position_ids, options)
        raise


def _positions_of(
    packed: PackedLayout | None,
    position_ids: Tensor | None,
    q: Tensor,
    qkv_format: str,
    cp_size: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `(cu_seqlens, host_meta, position_ids)` for the op.

    The first two are those of the layout's segments, in which positions restart. They are None if
    there is no layout, or if the layout has positions of its own: a rank's part and a tree.
    """
    if packed is None:
        return None, None, position_ids
    check_layout(packed)
    positions = own_positions(packed)
    if positions is None:
        segments = packed.segments.row
        return segments.cu_seqlens_static, segments.host_meta, position_ids
    check_tensor(q, "q")
    if cp_size != 1 or position_ids is not None:
        raise ValueError(
            "cp_size must be 1 and position_ids None if packed is a rank's part of a row, which "
            f"has its own positions, or a tree, got cp_size = {cp_size}"
        )
    if qkv_format == "thd" or q.dim() != 4:  # the op itself refuses a q of other dimensions
        return None, None, positions
    batch, seqlen = q.shape[0], q.shape[2 if qkv_format == "bhsd" else 1]
    if batch * seqlen != packed.total_tokens:
        raise ValueError(
            f"packed must have as many tokens as q, batch * seqlen = {batch * seqlen}, got a "
            f"layout of total_tokens = {packed.total_tokens}"
        )
    return None, None, positions.view(batch, seqlen)


def _check_norm_types(
    q: Any,
    k: Any,
    norm: tuple[Any, ...],
    cos: Any,
    sin: Any,
    position_ids: Any,
    options: tuple[Any, ...],
) -> None:
    q_weight, k_weight, eps, weight_offset = norm
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    if not is_compiling():
        as_float(eps, "eps")
        as_float(weight_offset, "weight_offset")
    _check_types(tensors, position_ids, options)


def _check_types(tensors: dict[str, Any], position_ids: Any, options: tuple[Any, ...]) -> None:
    """Raise a TypeError or ValueError that names the first argument of a wrong type."""
    for name, value in (*tensors.items(), ("position_ids", position_ids)):
        if value is not None or name not in ("k", "k_weight", "position_ids"):
            check_tensor(value, name)
    offset, table, qkv_format, interleaved, rotary_dim, section, alternates, *last = options
    cp_size, cp_rank, inplace = last
    flags = ((interleaved, "interleaved"), (alternates, "mrope_interleaved"), (inplace, "inplace"))
    for value, name in flags:
        check_flag(value, name)
    if is_compiling():
        return
    if isinstance(offset, bool):  # as_size would accept it; the binding takes only ints and symbols
        raise TypeError(f"offset must be an int, got {offset}")
    as_size(offset, "offset", optional=False)
    one_of(table, "table", ("position", "token"))
    one_of(qkv_format, "qkv_format", ("thd", "bshd", "bhsd"))
    as_size(rotary_dim, "rotary_dim")
    if section is not None:
        if not isinstance(section, Sequence) or isinstance(section, str | bytes):
            raise TypeError(f"mrope_section must be three ints, got {shown(section)}")
        for count in section:
            as_int(count, "mrope_section")
    as_int(cp_size, "cp_size")
    as_int(cp_rank, "cp_rank")
    if inplace:
        for name in ("q", "k"):
            if tensors[name] is not None and tensors[name].is_neg():
                raise ValueError(f"{name} must not be a negated view if inplace=True")


def _ops_are_watched(q: Tensor, k: Tensor | None) -> bool:
    """Return whether the call must go through torch.ops, for tracing or `__torch_function__`.

    Otherwise the pybind11 binding makes the same call with less host time.
    """
    return is_compiling() or has_torch_function_variadic(q, k)


def _apply_rope_op(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
    *given, inplace = options
    tensors = [q] if k is None else [q, k]
    if inplace:
        _ops.apply_rope_(tensors, *given)
        return q, k
    rotated = _ops.apply_rope(tensors, *given)
    return rotated[0], None if k is None else rotated[1]


def _apply_qk_norm_rope_op(
    q: Tensor, k: Tensor | None, q_weight: Tensor, k_weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor | None]:
    *given, inplace = options
    tensors, weights = ([q], [q_weight]) if k is None else ([q, k], [q_weight, k_weight])
    if inplace:
        _ops.apply_qk_norm_rope_(tensors, weights, *given)
        return q, k
    rotated, _ = _ops.apply_qk_norm_rope(tensors, weights, *given)
    return rotated[0], None if k is None else rotated[1]
