"""Fake implementations: the output shapes of every op, for torch.compile, export and meta tensors.

They do not repeat the checks that an op makes when it runs. They only check that tensors on the
meta device and on other devices are not mixed: with one meta tensor the op never runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake as _register_fake
from torch.utils._pytree import tree_leaves

from cuseq import _C
from cuseq._base.arguments import ceil_div, round_up


def register_fake(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fake implementation, as `torch.library.register_fake` does.

    The registered function raises ValueError if an argument is on the meta device and an output is
    not, because no kernel would fill that output.
    """

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        @_register_fake(op)
        @functools.wraps(shapes)
        def fake(*args: Any, **kwargs: Any) -> Any:
            outputs = shapes(*args, **kwargs)
            # Ops that return nothing write to their first argument.
            written = _devices(args[0] if outputs is None else outputs)
            given = _devices((args, kwargs))
            if "meta" in given and written - {"meta"}:
                raise ValueError(
                    f"{op}: tensors must lie on one device, got {', '.join(sorted(given))}"
                )
            return outputs

        return fake

    return register


@functools.cache
def _defaults_of(op: str) -> dict[str, Any]:
    """Return the names of an op's arguments in their order, with their defaults."""
    arguments = getattr(torch.ops.cuseq, op).default._schema.arguments
    return {one.name: one.default_value for one in arguments}


def arguments_of(op: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of `torch.ops.cuseq.<op>` by name."""
    defaults = _defaults_of(op)
    return defaults | dict(zip(defaults, given, strict=False)) | named


def _devices(values: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _of_tokens(like: Tensor, total_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers = _int32(like, total_tokens)
    return numbers, torch.empty_like(numbers), torch.empty_like(numbers, dtype=torch.bool)


@register_fake("cuseq::cu_seqlens")
def _(lengths):
    return _int32(lengths, lengths.shape[0] + 1)


@register_fake("cuseq::max_seqlen")
def _(lengths):
    return _int32(lengths)


@register_fake("cuseq::max_seqlen_sync")
def _(lengths):
    longest = torch.library.get_ctx().new_dynamic_size(min=0)
    return longest


@register_fake("cuseq::last_token_indices")
def _(lengths):
    return _int32(lengths, lengths.shape[0])


@register_fake("cuseq::layout_metadata")
def _(source, total_tokens, max_seqs, from_cu_seqlens, num_seqs=None):
    n_seqs = source.shape[0] - 1 if from_cu_seqlens else source.shape[0]
    return (
        _int32(source, n_seqs),
        _int32(source, max_seqs + 1),
        _int32(source, _C.HostMeta.SIZE),
    )


@register_fake("cuseq::position_ids")
def _(lengths, total_tokens):
    return _int32(lengths, total_tokens)


@register_fake("cuseq::seq_ids")
def _(lengths, total_tokens):
    return _int32(lengths, total_tokens)


@register_fake("cuseq::token_metadata")
def _(cu_seqlens, total_tokens, cu_seqlens_padded=None):
    return _of_tokens(cu_seqlens, total_tokens)


@register_fake("cuseq::segment_metadata")
def _(lengths, total_tokens, max_seqs, segment_multiple):
    shapes = (lengths.shape[0], max_seqs + 1, _C.HostMeta.SIZE) * 2
    return tuple(_int32(lengths, size) for size in shapes)


@register_fake("cuseq::segment_rows")
def _(cu_seqlens, cu_seqlens_padded, total_tokens):
    return _int32(cu_seqlens, total_tokens), _int32(cu_seqlens, total_tokens)


@register_fake("cuseq::mask_rows")
def _(mask, cu_seqlens, total_tokens, kind="nonzero"):
    slots, tokens = _int32(mask, total_tokens), _int32(mask, *mask.shape)
    return slots, tokens, *_of_tokens(mask, total_tokens)


@register_fake("cuseq::lengths_from_padding_mask")
def _(mask, kind="nonzero"):
    return _int32(mask, mask.shape[0])


@register_fake("cuseq::cu_seqlens_from_position_ids")
def _(position_ids, max_seqs=None, plane=None):
    tokens = position_ids[0] if position_ids.dim() == 3 else position_ids
    capacity = tokens.numel() if max_seqs is None else max_seqs
    return _int32(position_ids, capacity + 1), _int32(position_ids, 1)


@register_fake("cuseq::mask_boundary_labels")
def _(labels, *options, **named_options):
    return torch.empty_like(labels)


@register_fake("cuseq::gather_rows")
def _(tensors, index, inverse, rows, leading, fill):
    for i, tensor in enumerate(tensors):
        if tensor.device != index.device:
            raise ValueError(
                f"tensors[{i}] must lie where index does, on {index.device}, got {tensor.device}"
            )
    return [tensor.new_empty((*rows, *tensor.shape[leading:])) for tensor in tensors]


@register_fake("cuseq::mask_ranges")
def _(source, total_tokens, *options, **named_options):
    return _int32(source, 2, total_tokens)


def _rows(total_tokens, row_length):
    return (1, total_tokens) if row_length is None else (total_tokens // row_length, row_length)


@register_fake("cuseq::dense_mask")
def _(
    source,
    total_tokens,
    from_cu_seqlens=False,
    causal=True,
    window=None,
    spans=None,
    cu_seqlens_padded=None,
    row_length=None,
    dtype=None,
    finite=False,
):
    rows, length = _rows(total_tokens, row_length)
    lines = source.new_empty((rows, 1, length, round_up(length, 16)), dtype=dtype or torch.bool)
    return lines.narrow(-1, 0, length)


@register_fake("cuseq::block_mask")
def _(ranges, row_length=None, query_block=128, key_block=128):
    rows, length = _rows(ranges.shape[1], row_length)
    queries = ceil_div(length, query_block)
    keys = ceil_div(length, key_block)
    shapes = []
    for blocks, others in ((queries, keys), (keys, queries)):
        shapes += [(rows, 1, blocks), (rows, 1, blocks, others)] * 2
    return [_int32(ranges, *shape) for shape in shapes]


@register_fake("cuseq::varlen_attention")
def _(*arguments, **named):
    given = arguments_of("varlen_attention", arguments, named)
    q, k, v, rank_rows = (given[name] for name in ("q", "k", "v", "rank_rows"))
    tokens, heads, _ = q.shape
    wide = q.dtype == torch.float64
    far_rows = None
    if rank_rows is not None:
        kept = k.shape[0] // _C.RankMeta.TOKENS_PER_KEPT_ROW
        far_rows = k.new_empty(kept, k.shape[1] * (k.shape[2] + v.shape[2]))
    return (
        q.new_empty(tokens, heads, v.shape[2]),
        q.new_empty(heads, tokens, dtype=torch.float64 if wide else torch.float32),
        far_rows,
    )


@register_fake("cuseq::varlen_attention_backward")
def _(grad_out, q, k, v, *options, **named_options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@register_fake("cuseq::apply_rope")
def _(tensors, *options, **named_options):
    return [torch.empty_like(tensor) for tensor in tensors]


@register_fake("cuseq::apply_rope_")
def _(tensors, *options, **named_options):
    return None


@register_fake("cuseq::apply_qk_norm_rope")
def _(tensors, *options, **named_options):
    given = arguments_of("apply_qk_norm_rope", (tensors, *options), named_options)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return outputs, [_rstd(tensor, given["qkv_format"]) for tensor in tensors]


def _rstd(tensor: Tensor, qkv_format: str) -> Tensor:
    if qkv_format == "thd":
        shape = (1, *tensor.shape[:2])
    elif qkv_format == "bshd":
        shape = tensor.shape[:3]
    else:
        shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1])
    wide = tensor.dtype == torch.float64
    return tensor.new_empty(shape, dtype=torch.float64 if wide else torch.float32)


@register_fake("cuseq::apply_qk_norm_rope_")
def _(tensors, *options, **named_options):
    return None


@register_fake("cuseq::apply_qk_norm_rope_backward")
def _(grads, tensors, weights, rstd, weight_offset, weight_grads, *options, **named_options):
    return (
        [torch.empty_like(tensor) for tensor in tensors],
        [torch.empty_like(weight) for weight in weights] if weight_grads else [],
    )


@register_fake("cuseq::causal_conv1d")
def _(x, weight, *options, **named_options):
    given = arguments_of("causal_conv1d", (x, weight, *options), named_options)
    cu_seqlens, initial_states = given["cu_seqlens"], given["initial_states"]
    outputs = [_rows_like(x)]
    if given["final_states"]:
        batch = x.shape[0] if x.dim() == 3 else 1
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = x.dtype if initial_states is None else initial_states.dtype
        shape = (sequences, x.shape[-1], weight.shape[1] - 1)
        outputs.append(x.new_empty(shape, dtype=dtype))
    return outputs


def _rows_like(x: Tensor) -> Tensor:
    """Return a dense tensor, with contiguous tokens if x has those and no contiguous channels."""
    has_channels, has_tokens = (x.shape[dim] == 1 or x.stride(dim) == 1 for dim in (-1, -2))
    if has_tokens and not has_channels:
        return x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2]).transpose(-1, -2)
    return x.new_empty(x.shape)


@register_fake("cuseq::causal_conv1d_backward")
def _(grad_out, x, weight, *options, **named_options):
    given = arguments_of("causal_conv1d_backward", (grad_out, x, weight, *options), named_options)
    with_gradients = [given["initial_states"]]
    if given["weight_grads"]:
        with_gradients = [weight, given["bias"], *with_gradients]
    grads = (one.new_empty(one.shape) for one in with_gradients if one is not None)
    return [_rows_like(x), *grads]


@register_fake("cuseq::segment_reduce")
def _(values, cu_seqlens, kind, cu_seqlens_padded=None, host_meta=None):
    columns = values.shape[1]
    # The number of sequences is read when the op runs, so one graph serves all of them.
    segments = (
        cu_seqlens.shape[0] - 1 if host_meta is None else torch.library.get_ctx().new_dynamic_size()
    )
    which = cu_seqlens.new_empty(segments, columns if kind == "max" else 0)
    return values.new_empty(segments, columns, dtype=_summed(values.dtype)), which


@register_fake("cuseq::segment_reduce_backward")
def _(grad_out, which, dtype, total_tokens, cu_seqlens, kind, cu_seqlens_padded=None):
    return grad_out.new_empty(total_tokens, grad_out.shape[1], dtype=dtype)


@register_fake("cuseq::token_logprobs")
def _(hidden, weight, targets, bias=None, temperature=1.0, chunk_size=None, entropy=False, *_):
    numbers = hidden.new_empty(hidden.shape[0], dtype=_summed(hidden.dtype))
    if entropy:
        return tuple(torch.empty_like(numbers) for _ in range(4))
    none = numbers.new_empty(0)
    return numbers, none, torch.empty_like(numbers), torch.empty_like(none)


@register_fake("cuseq::token_logprobs_backward")
def _(grad_logprobs, grad_entropies, logsumexp, mean, hidden, weight, targets, bias=None, *options):
    grad_bias = hidden.new_empty(0 if bias is None else weight.shape[0])
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias


def _summed(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
