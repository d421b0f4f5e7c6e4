"""Right arguments of the ops."""

from __future__ import annotations

from typing import Any

import torch

import cuseq
from cuseq.distributed import cp_partition, cp_plan
from tests.fuzz import judge
from tests.fuzz.calls.target import schema
from tests.fuzz.values import Draw, Row, a_layout, a_row, a_tree, some_spans


def _offsets(draw: Draw, row: Row, capacity: int = 0) -> torch.Tensor:
    offsets = row.offsets
    return draw.ints(offsets + offsets[-1:] * capacity, torch.int32)


def _padded(draw: Draw, row: Row) -> tuple[torch.Tensor, int]:
    """Return offsets of segments longer than the sequences, and the row's tokens."""
    ends = [0]
    for length in row.lengths:
        ends.append(ends[-1] + length + draw.choice((0, 0, 1, 3)))
    return draw.ints(ends, torch.int32), ends[-1] + draw.choice((0, 2))


def _lengths(draw: Draw) -> dict[str, Any]:
    return {"lengths": draw.ints(a_row(draw).lengths)}


def _lengths_and_total(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    return {"lengths": draw.ints(row.lengths), "total_tokens": row.total}


for _name in ("cu_seqlens", "max_seqlen", "max_seqlen_sync", "last_token_indices"):
    schema(_name, check=judge.per_lengths(_name))(_lengths)
schema("cached_cu_seqlens", check=judge.per_lengths("cu_seqlens"))(_lengths)
for _name in ("position_ids", "seq_ids"):
    schema(_name, check=judge.per_token(_name))(_lengths_and_total)
    schema(f"cached_{_name}", check=judge.per_token(_name))(_lengths_and_total)


@schema("layout_metadata", check=judge.layout_metadata)
def _(draw):
    row = a_row(draw)
    from_offsets = draw.chance(0.5)
    source = draw.ints(row.offsets if from_offsets else row.lengths)
    return {
        "source": source,
        "total_tokens": row.total,
        "max_seqs": len(row.lengths) + draw.choice((0, 1, 5)),
        "from_cu_seqlens": from_offsets,
        "num_seqs": draw.ints([len(row.lengths)], torch.int32) if from_offsets else None,
    }


@schema("segment_metadata")
def _(draw):
    row = a_row(draw)
    multiple = draw.choice((1, 2, 4, 8))
    total = sum(-(-length // multiple) * multiple for length in row.lengths)
    return {
        "lengths": draw.ints(row.lengths),
        "total_tokens": total + draw.choice((0, 8)),
        "max_seqs": len(row.lengths) + 1,
        "segment_multiple": multiple,
    }


@schema("token_metadata", check=judge.token_metadata)
def _(draw):
    row = a_row(draw)
    padded, total = _padded(draw, row) if draw.chance(0.5) else (None, row.total)
    return {
        "cu_seqlens": _offsets(draw, row),
        "total_tokens": total,
        "cu_seqlens_padded": padded,
    }


@schema("lengths_from_padding_mask", check=judge.lengths_from_padding_mask)
def _(draw):
    kind = draw.choice(("nonzero", "zero", "additive"))
    return {"mask": _mask(draw, kind), "kind": kind}


def _mask(draw: Draw, kind: str = "nonzero") -> torch.Tensor:
    batch, seqlen = draw.choice((0, 1, 3)), draw.choice((0, 1, 5, 9))
    real = draw.floats(batch, seqlen, dtype=torch.float32) > 0
    if kind == "additive":
        return torch.where(real, 0.0, -1e4)
    return real.to(draw.choice((torch.bool, torch.int64, torch.uint8, torch.int32)))


@schema("mask_rows")
def _(draw):
    mask = _mask(draw)
    lengths = (mask != 0).sum(1).tolist()
    row = Row(lengths, sum(lengths) + draw.choice((0, 3)))
    return {
        "mask": mask,
        "cu_seqlens": _offsets(draw, row),
        "total_tokens": row.total,
        "kind": "nonzero",
    }


@schema("segment_rows")
def _(draw):
    row = a_row(draw)
    padded, total = _padded(draw, row)
    return {
        "cu_seqlens": _offsets(draw, row),
        "cu_seqlens_padded": padded,
        "total_tokens": total,
    }


@schema("cu_seqlens_from_position_ids", check=judge.cu_seqlens_from_position_ids)
def _(draw):
    return position_ids_and_plane(draw)


def position_ids_and_plane(draw: Draw) -> dict[str, Any]:
    batch, seqlen = draw.choice((1, 2)), draw.choice((0, 1, 6))
    planes = draw.choice((None, None, 3))
    shape = (batch, seqlen) if planes is None else (planes, batch, seqlen)
    ids = (
        (draw.floats(*shape, dtype=torch.float32) * 2)
        .int()
        .abs()
        .to(draw.choice((torch.int32, torch.int64)))
    )
    return {
        "position_ids": ids,
        "max_seqs": draw.choice((None, 3, 9)),
        "plane": None if planes is None else draw.randrange(3),
    }


@schema("mask_boundary_labels")
def _(draw):
    row = a_row(draw)
    padded, total = _padded(draw, row) if draw.chance(0.3) else (None, row.total)
    return {
        "labels": draw.ints([draw.randrange(100) for _ in range(total)]),
        "cu_seqlens": _offsets(draw, row),
        "shift": draw.choice((0, 1, 2)),
        "ignore_index": -100,
        "cu_seqlens_padded": padded,
    }


@schema("gather_rows", check=judge.gather_rows)
def _(draw):
    slots, rows, leading = draw.choice((0, 1, 6)), draw.choice((0, 1, 5)), draw.choice((1, 2))
    lead = (slots,) if leading == 1 else (2, slots // 2)
    count = slots if leading == 1 else slots // 2 * 2
    index = [draw.randrange(-1, count) for _ in range(rows)]
    inverse = [index.index(slot) if slot in index else -1 for slot in range(count)]
    index = [slot if slot >= 0 and inverse[slot] == at else -1 for at, slot in enumerate(index)]
    tensors = [draw.floats(*lead, 3) for _ in range(draw.choice((1, 2)))]
    return {
        "tensors": tensors,
        "index": draw.ints(index, torch.int32),
        "inverse": draw.ints(inverse, torch.int32),
        "rows": [rows],
        "leading": leading,
        "fill": [0] * len(tensors),
    }


def _rule(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    from_offsets = draw.chance(0.5)
    spans = some_spans(draw, row)
    return {
        "source": _offsets(draw, row) if from_offsets else draw.ints(row.lengths),
        "total_tokens": row.total,
        "from_cu_seqlens": from_offsets,
        "causal": draw.chance(0.7),
        "window": draw.choice((None, None, 1, 3)),
        "spans": draw.ints(spans, torch.int32).view(-1, 2) if spans else None,
        "cu_seqlens_padded": None,
    }


def _dense(draw: Draw) -> dict[str, Any]:
    dtype = draw.choice((None, torch.bool, torch.float32, torch.bfloat16))
    return {**_rule(draw), "row_length": None, "dtype": dtype, "finite": draw.chance(0.2)}


def _blocks(draw: Draw) -> dict[str, Any]:
    return {"row_length": None, "query_block": draw.choice((1, 4, 128)), "key_block": 4}


schema("mask_ranges", check=judge.mask_ranges)(_rule)
schema("cached_mask_ranges", check=judge.mask_ranges)(_rule)
schema("dense_mask", check=judge.dense_mask)(_dense)
schema("cached_dense_mask", check=judge.dense_mask)(_dense)
schema("cached_block_mask")(lambda draw: {**_rule(draw), **_blocks(draw)})


@schema("block_mask")
def _(draw):
    return {"ranges": torch.ops.cuseq.mask_ranges(*_rule(draw).values()), **_blocks(draw)}


def heads(draw: Draw, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of a row."""
    key_heads, dim = draw.choice((1, 2)), draw.choice((2, 8, 16))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    q = draw.floats(tokens, key_heads * draw.choice((1, 2)), dim, dtype=dtype)
    k = draw.floats(tokens, key_heads, dim, dtype=dtype)
    v = draw.floats(tokens, key_heads, draw.choice((dim, dim, 4)), dtype=dtype)
    return q, k, v


def _attention(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    is_tree = draw.chance(0.2)
    packed = a_tree(draw).layout if is_tree else a_layout(draw, row)
    q, k, v = heads(draw, packed.total_tokens)
    spans = some_spans(draw, row) if draw.chance(0.2) and not is_tree else []
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens": packed.cu_seqlens_static,
        "host_meta": packed.host_meta,
        "causal": is_tree or draw.chance(0.7),
        "window": draw.choice((None, 64)) if is_tree else draw.choice((None, None, 1, 3)),
        "scale": draw.choice((None, 0.5)),
        "max_seqlen_bound": draw.choice((None, None, 64)),
        "spans": draw.ints(spans, torch.int32).view(-1, 2) if spans else None,
        "cu_seqlens_padded": None,
        "softcap": draw.choice((None, None, 2.0)),
        "backend": draw.choice(("auto", "auto", "segments")),
        **(
            {"rank_rows": None, "rank_meta": None, "rank_group": ""}
            if is_tree
            else _share(draw, row)
        ),
        "tree_rows": getattr(packed.tree, "rows", None),
        "tree_meta": getattr(packed.tree, "meta", None),
    }


def _share(draw: Draw, row: Row) -> dict[str, Any]:
    """Return the share of a rank that has the whole row, or no share."""
    rows, meta = None, None
    if draw.chance(0.3):
        packed = cuseq.PackedLayout.from_lengths(row.lengths, row.total)
        plan = cp_plan(packed, 1, policy="ulysses", heads=(1, 1))
        local = cp_partition(packed, plan, 0)[0].to(draw.device)
        rows, meta = local.part.rows, local.part.meta
    return {"rank_rows": rows, "rank_meta": meta, "rank_group": ""}


schema("varlen_attention", weight=2)(_attention)


@schema("varlen_attention_backward", weight=1)
def _(draw):
    arguments = _attention(draw)
    out, logsumexp, far_rows = torch.ops.cuseq.varlen_attention(*arguments.values())
    q, k, v, *rest = arguments.values()
    names = list(arguments)[3:]
    first = {"grad_out": torch.ones_like(out), "q": q, "k": k, "v": v, "out": out}
    more = {"logsumexp": logsumexp, "far_rows": far_rows}
    return {**first, **more, **dict(zip(names, rest, strict=True))}


def rotation(draw: Draw) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Row]:
    """Return tensors to rotate, both tables, and the row."""
    row, dim = a_row(draw), draw.choice((4, 8, 16))
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    tensors = [
        draw.floats(row.total, draw.choice((1, 3)), dim, dtype=dtype)
        for _ in range(draw.choice((1, 2)))
    ]
    angles = draw.floats(row.total + 1, dim // 2, dtype=torch.float32)
    return tensors, angles.cos(), angles.sin(), row


def _options(draw: Draw, row: Row) -> dict[str, Any]:
    offsets, meta, positions = None, None, None
    if draw.chance(0.6):
        packed = a_layout(draw, row)
        offsets, meta = packed.cu_seqlens_static, packed.host_meta
    elif draw.chance(0.5):
        positions = draw.ints([draw.randrange(row.total) for _ in range(row.total)])
    return {
        "cu_seqlens": offsets,
        "host_meta": meta,
        "position_ids": positions,
        "offset": 0,
        "table": "position",
        "qkv_format": "thd",
        "interleaved": draw.chance(0.3),
        "rotary_dim": None,
        "mrope_section": None,
        "mrope_interleaved": False,
        "cp_size": 1,
        "cp_rank": 0,
        "inverse": draw.chance(0.3),
    }


def _rope(draw: Draw) -> dict[str, Any]:
    tensors, cos, sin, row = rotation(draw)
    return {"tensors": tensors, "cos": cos, "sin": sin, **_options(draw, row)}


def _norm_rope(draw: Draw) -> dict[str, Any]:
    tensors, cos, sin, row = rotation(draw)
    weights = [draw.floats(t.shape[-1], dtype=t.dtype) for t in tensors]
    norm = {"tensors": tensors, "weights": weights, "eps": 1e-6, "weight_offset": 0.0}
    return {**norm, "cos": cos, "sin": sin, **_options(draw, row), "inverse": False}


schema("apply_rope")(_rope)
schema("apply_rope_")(_rope)
schema("apply_qk_norm_rope")(_norm_rope)
schema("apply_qk_norm_rope_")(_norm_rope)


@schema("apply_qk_norm_rope_backward", weight=2)
def _(draw):
    arguments = _norm_rope(draw)
    out, rstd = torch.ops.cuseq.apply_qk_norm_rope(*arguments.values())
    tensors, weights, _, weight_offset, *rest = arguments.values()
    first = {"grads": out, "tensors": tensors, "weights": weights, "rstd": rstd}
    names = list(arguments)[4:]
    return {
        **first,
        "weight_offset": weight_offset,
        "weight_grads": draw.chance(0.5),
        **dict(zip(names, rest, strict=True)),
    }


def convolution(draw: Draw) -> tuple[dict[str, Any], Row]:
    """Return x, weight and bias, and the row."""
    row, channels = a_row(draw), draw.choice((1, 3, 8, 16))
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    of_weight = draw.choice((dtype, torch.float32, torch.bfloat16))
    x = draw.floats(channels, row.total, dtype=dtype).t()
    return {
        "x": x if draw.chance(0.3) else x.contiguous(),
        "weight": draw.floats(channels, draw.choice((2, 3, 4)), dtype=of_weight),
        "bias": draw.floats(channels, dtype=of_weight) if draw.chance(0.5) else None,
    }, row


def _convolution(draw: Draw) -> tuple[dict[str, Any], bool]:
    tensors, row = convolution(draw)
    offsets, seq_idx, states, final = None, None, None, draw.chance(0.3)
    channels, width = tensors["weight"].shape
    if draw.chance(0.7):
        offsets = _offsets(draw, row)
        if draw.chance(0.3):
            states = draw.floats(len(row.lengths), channels, width - 1, dtype=torch.float32)
    elif draw.chance(0.5):
        tensors["x"] = tensors["x"].unsqueeze(0)
        seq_idx = draw.ints([[draw.randrange(-1, 2) for _ in range(row.total)]], torch.int32)
        final = False
    rest = {
        "cu_seqlens": offsets,
        "cu_seqlens_padded": offsets if draw.chance(0.3) else None,
        "seq_idx": seq_idx,
        "initial_states": states,
        "silu": draw.chance(0.5),
    }
    return {**tensors, **rest}, final


@schema("causal_conv1d")
def _(draw):
    arguments, final = _convolution(draw)
    return {**arguments, "final_states": final}


@schema("causal_conv1d_backward", weight=2)
def _(draw):
    arguments, final = _convolution(draw)
    out = torch.ops.cuseq.causal_conv1d(*arguments.values(), final)
    last = {
        "grad_final_states": out[1] if final else None,
        "weight_grads": draw.chance(0.7),
    }
    return {"grad_out": out[0], **arguments, **last}


def _segments(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    return {
        "values": draw.floats(row.total, draw.choice((0, 1, 3)), dtype=dtype),
        "cu_seqlens": a_layout(draw, row).cu_seqlens,
        "kind": draw.choice(("sum", "mean", "max", "last")),
        "cu_seqlens_padded": None,
    }


schema("segment_reduce")(lambda draw: {**_segments(draw), "host_meta": None})


@schema("segment_reduce_backward")
def _(draw):
    values, offsets, kind, padded = _segments(draw).values()
    out, which = torch.ops.cuseq.segment_reduce(values, offsets, kind, padded)
    return {
        "grad_out": out,
        "which": which,
        "dtype": values.dtype,
        "total_tokens": values.shape[0],
        "cu_seqlens": offsets,
        "kind": kind,
        "cu_seqlens_padded": padded,
    }


def _head(draw: Draw) -> dict[str, Any]:
    tokens, features, vocabulary = (draw.choice(sizes) for sizes in ((0, 1, 5), (1, 4), (1, 7)))
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16))
    targets = [draw.choice((-100, draw.randrange(vocabulary))) for _ in range(tokens)]
    return {
        "hidden": draw.floats(tokens, features, dtype=dtype),
        "weight": draw.floats(vocabulary, features, dtype=dtype),
        "targets": draw.ints(targets, torch.int64),
        "bias": draw.floats(vocabulary, dtype=dtype) if draw.chance(0.5) else None,
        "temperature": draw.choice((1.0, 0.5)),
        "chunk_size": draw.choice((None, 1, 3)),
        "entropy": draw.chance(0.5),
        "scale": draw.choice((1.0, 0.25, 3)),
        "softcap": draw.choice((None, 2.0, 30)),
    }


schema("token_logprobs", check=judge.token_logprobs)(_head)


@schema("token_logprobs_backward")
def _(draw):
    arguments = _head(draw)
    out = torch.ops.cuseq.token_logprobs(*arguments.values())
    entropies = out[1] if arguments["entropy"] else None
    first = {"grad_logprobs": out[0], "grad_entropies": entropies, "logsumexp": out[2]}
    return {**first, "mean": out[3], **arguments}
