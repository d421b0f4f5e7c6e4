"""Rotary position embedding, alone or fused with the RMS norm of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from cuseq import _C
from cuseq._arguments import as_float, as_int, as_size, check_flag, check_tensor, one_of, shown
from cuseq.layout import PackedLayout, check_layout

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

    Pair `(a, b)` of a head becomes `(a cos - b sin, b cos + a sin)` (Su et al. 2021,
    arXiv:2104.09864). Arithmetic is in float32, or float64 for float64 inputs, rounded once.

    Args:
        q: `[tokens, heads, head_dim]` with qkv_format "thd", `[batch, seqlen, heads, head_dim]` in
            "bshd", `[batch, heads, seqlen, head_dim]` in "bhsd"; float32, float64, bfloat16 or
            float16; head_dim up to 512. Any strides with a contiguous last dimension.
        k: as `q`, with any number of heads; or None.
        cos: cosines of the angles, of any of these dtypes, `[rows, width]`: row p belongs to
            position p. `width` is `rotary_dim / 2`, or `rotary_dim` where each angle stands twice,
            as the pairing reads them: `[a, b, a, b]`, or `[a, a, b, b]` with `interleaved`.
        sin: sines, of the same shape and dtype.
        packed: positions restart in each of its sequences, and in the tail. With batch dimensions
            its row is that of all their tokens, batch row after batch row.
        position_ids: int32 or int64 positions, `[tokens]` or `[1, tokens]` ("thd"),
            `[batch, seqlen]` or `[1, seqlen]` (shared by the batch).
        offset: position of the first token where neither `packed` nor `position_ids` says more:
            then positions count up in each batch row, which a decode step continues.
        table: "position", or "token" where `cos` and `sin` have a row for each token,
            `[tokens, width]`, `[batch, seqlen, width]` or `[1, seqlen, width]`.
        qkv_format: "thd", "bshd" or "bhsd".
        interleaved: pairs are neighbours, `(0, 1), (2, 3), ...` (GPT-J), instead of the two halves,
            `(0, rotary_dim / 2), ...` (GPT-NeoX, Llama).
        rotary_dim: how many elements of each head turn, the first ones; the others are copied.
            Default `2 * width` where a head is so wide, else `width`. Give it for tables of full
            width that turn half a head or less: sizes alone cannot tell them from half tables.
        mrope_section: three counts of pairs that sum to `rotary_dim / 2`: how many turn by time,
            height and width (Qwen2-VL). `position_ids`, or the table of "token", then have a first
            dimension of 3.
        mrope_interleaved: planes alternate, `t h w t h w ... t`, instead of `t.. h.. w..`
            (Qwen3-VL). Height and width have every third pair at most: where a count asks for more,
            the rest turns by time, as in transformers.
        cp_size: ranks of context parallelism; `packed` is then the layout of the whole row, of
            which this rank holds its two parts of each sequence in order, and each length is a
            multiple of `2 * cp_size`. Without `packed`, of each row.
        cp_rank: this rank.
        inplace: write into `q` and `k`, which are then also what is returned.

    Returns:
        `(q, k)`, dense, with their dimensions in the order in which they lie in memory; `k` is None
        where it was. Differentiable any number of times.

    Raises:
        ValueError, TypeError: arguments do not fit each other, or a position known on the host lies
            beyond the table. Positions that only a GPU knows are not looked up beyond the table:
            such tokens become NaN, and an error with `CUSEQ_CHECK=1`.

    Never synchronises; with a layout from lengths on a GPU the first call waits for one small copy
    by its event.

    Example:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k = torch.randn(5, 8, 64), torch.randn(5, 2, 64)
        >>> cos, sin = cuseq.rope_table(packed.total_tokens, 64)
        >>> q, k = cuseq.apply_rope(q, k, cos, sin, packed=packed)
        >>> q.shape, k.shape
        (torch.Size([5, 8, 64]), torch.Size([5, 2, 64]))
    """
    check_tensor(q, "q")
    options = (
        offset,
        table,
        qkv_format,
        interleaved,
        rotary_dim,
        mrope_section,
        mrope_interleaved,
        cp_size,
        cp_rank,
        inplace,
    )
    positions = _positions_of(packed, position_ids, q, qkv_format, cp_size)
    if _ops_are_watched(q, k):
        _check_types({"q": q, "k": k, "cos": cos, "sin": sin}, position_ids, options)
        return _apply_rope_op(q, k, cos, sin, *positions, *options)
    try:
        return _C.apply_rope(q, k, cos, sin, *positions, *options)
    except Exception:
        # The binding and the dispatcher print signatures; checking first would cost every call.
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

    Equivalent to, with one rounding instead of one after each step:
        `x = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + eps) * (q_weight + weight_offset)`
        followed by `apply_rope` (RMS norm: Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        q_weight: `[head_dim]`, any of the dtypes of `q`.
        k_weight: `[head_dim]` of the same dtype; None where `k` is None.
        eps: added to the mean square.
        weight_offset: added to the weights: 1.0 for models that store them around 0 (Gemma).
        inplace: only where no gradient is needed, since the norm's needs its input.

    The others as for `apply_rope`; the norm is over the whole head however much of it turns.

    Returns:
        `(q, k)` as `apply_rope`, of the dtype of `q`. Differentiable once, in `q`, `k` and the
        weights, whose gradients are the same in every run. Saved for it are the inputs and one
        number for each head.

    Raises:
        ValueError, TypeError: as `apply_rope`; and where `k` and `k_weight` are not both given.

    Waits as `apply_rope` does.

    Example:
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
        raise ValueError(f"{given} must come with {missing}, got {missing}=None")
    check_tensor(q, "q")
    options = (
        offset,
        table,
        qkv_format,
        interleaved,
        rotary_dim,
        mrope_section,
        mrope_interleaved,
        cp_size,
        cp_rank,
        inplace,
    )
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
    """Offsets and host_meta of the segments in which positions restart, or positions."""
    if packed is None:
        return None, None, position_ids
    check_layout(packed)
    if packed.rank_positions is None:
        segments = packed.segments
        return segments.cu_seqlens_static, segments.host_meta, position_ids
    if cp_size != 1 or position_ids is not None:
        raise ValueError(
            "packed is a rank's part of a row and has positions of its own: cp_size must be 1 and "
            f"position_ids None, got cp_size = {cp_size}"
        )
    positions = packed.rank_positions
    if qkv_format == "thd" or q.dim() != 4:  # another q is what the op refuses
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
    """Raise TypeError or ValueError that names the first argument of a wrong type."""
    for name, value in (*tensors.items(), ("position_ids", position_ids)):
        if value is not None or name not in ("k", "k_weight", "position_ids"):
            check_tensor(value, name)
    offset, table, qkv_format, interleaved, rotary_dim, section, alternates, *last = options
    cp_size, cp_rank, inplace = last
    if is_compiling():
        return
    if isinstance(offset, bool):  # the binding takes integers and symbols for them alone
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
    flags = ((interleaved, "interleaved"), (alternates, "mrope_interleaved"), (inplace, "inplace"))
    for value, name in flags:
        check_flag(value, name)
    if inplace:
        for name in ("q", "k"):
            if tensors[name] is not None and tensors[name].is_neg():
                raise ValueError(
                    f"{name} must hold its own numbers for inplace, got a negated view"
                )


def _ops_are_watched(q: Tensor, k: Tensor | None) -> bool:
    """Whether the call has to go through torch.ops: traced, or for `__torch_function__` to see.

    Elsewhere pybind11 makes the same call for less of the host's time.
    """
    return is_compiling() or has_torch_function_variadic(q, k)


def _apply_rope_op(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
    *options, inplace = options
    tensors = [q] if k is None else [q, k]
    if inplace:
        _ops.apply_rope_(tensors, *options)
        return q, k
    turned = _ops.apply_rope(tensors, *options)
    return turned[0], None if k is None else turned[1]


def _apply_qk_norm_rope_op(
    q: Tensor, k: Tensor | None, q_weight: Tensor, k_weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor | None]:
    *options, inplace = options
    tensors, weights = ([q], [q_weight]) if k is None else ([q, k], [q_weight, k_weight])
    if inplace:
        _ops.apply_qk_norm_rope_(tensors, weights, *options)
        return q, k
    turned, _ = _ops.apply_qk_norm_rope(tensors, weights, *options)
    return turned[0], None if k is None else turned[1]
