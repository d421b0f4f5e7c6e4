"""Right arguments of attention, rotations, packing, context parallelism and the cache."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

import cuseq
from tests.fuzz import judge
from tests.fuzz.calls.schemas import convolution, heads, rotation
from tests.fuzz.calls.target import function
from tests.fuzz.values import Draw, Row, a_layout, a_row, a_tree, some_spans


def _attention(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    is_tree = draw.chance(0.2)
    packed = a_tree(draw).layout if is_tree else a_layout(draw, row)
    q, k, v = heads(draw, packed.total_tokens)
    spans = some_spans(draw, row) if draw.chance(0.2) and not is_tree else []
    sinks = draw.floats(q.shape[1], dtype=q.dtype) if draw.chance(0.15) else None
    return {
        "q": q,
        "k": k,
        "v": v,
        "packed": packed,
        "causal": is_tree or draw.chance(0.7),
        "window": draw.choice((None, None, 1, 3)),
        "spans": spans or None,
        "scale": draw.choice((None, 0.5)),
        "softcap": draw.choice((None, None, 2.0)),
        "sinks": sinks,
        "backend": "auto" if is_tree else draw.choice(("auto", "auto", "segments")),
    }


function("cuseq.varlen_attention", cuseq.varlen_attention, check=judge.attention, weight=2)(
    _attention
)
function("cuseq.attention_backend", cuseq.attention_backend, weight=1)(_attention)


@function("cuseq.attention_warmup", cuseq.attention_warmup)
def _(draw):
    key_heads = draw.choice((1, 2))
    return {
        "packs": [a_row(draw).lengths for _ in range(draw.randrange(3))],
        "heads": 2 * key_heads,
        "head_dim": draw.choice((4, 8)),
        "key_heads": key_heads,
        "value_dim": draw.choice((None, 4)),
        "total_tokens": None,
        "causal": draw.chance(0.7),
        "dtype": draw.choice((torch.float32, torch.float64)),
        "device": str(draw.device),
        "backend": draw.choice(("auto", "segments")),
    }


def _rope_arguments(draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, cos, sin, row = rotation(draw)
    packed, positions = a_layout(draw, row), None
    if draw.chance(0.3):
        packed = None
        positions = draw.ints([draw.randrange(row.total) for _ in range(row.total)])
    both = {"q": tensors[0], "k": tensors[1] if len(tensors) == 2 else None}
    return both, {
        "cos": cos,
        "sin": sin,
        "packed": packed,
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
        "inplace": draw.chance(0.2),
    }


@function("cuseq.apply_rope", cuseq.apply_rope, check=judge.rope, also=("head_dim",))
def _(draw):
    both, options = _rope_arguments(draw)
    return {**both, **options}


@function("cuseq.apply_qk_norm_rope", cuseq.apply_qk_norm_rope, also=("head_dim",))
def _(draw):
    both, options = _rope_arguments(draw)
    q, k = both.values()
    norm = {
        "q_weight": draw.floats(q.shape[-1], dtype=q.dtype),
        "k_weight": None if k is None else draw.floats(q.shape[-1], dtype=q.dtype),
        "eps": 1e-6,
        "weight_offset": draw.choice((0.0, 1.0)),
    }
    return {**both, **norm, **options}


@function("cuseq.rope_table", cuseq.rope_table)
def _(draw):
    dim = draw.choice((2, 4, 16))
    return {
        "length": draw.choice((0, 1, 9)),
        "rotary_dim": dim,
        "theta": draw.choice((1e4, 5e5)),
        "inv_freq": draw.floats(dim // 2, dtype=torch.float32) if draw.chance(0.3) else None,
        "attention_factor": 1.0,
        "dtype": draw.choice((torch.float32, torch.bfloat16)),
        "device": draw.device,
    }


@function("cuseq.causal_conv1d", cuseq.causal_conv1d, also=("initial_states", "cu_seqlens"))
def _(draw):
    tensors, row = convolution(draw)
    channels, width = tensors["weight"].shape
    packed, states = a_layout(draw, row), None
    if draw.chance(0.3):
        states = draw.floats(packed.num_sequences, channels, width - 1, dtype=torch.float32)
    return {
        **tensors,
        "packed": packed,
        "activation": draw.choice((None, "silu")),
        "initial_state": states,
        "return_final_state": draw.chance(0.3),
    }


@function("cuseq.ops.causal_conv1d_fn", cuseq.ops.causal_conv1d_fn, also=("final_states",))
def _(draw):
    tensors, row = convolution(draw)
    channels, width = tensors["weight"].shape
    seq_idx, final, out = None, draw.chance(0.3), None
    if draw.chance(0.4):
        seq_idx = draw.ints([[draw.randrange(-1, 2) for _ in range(row.total)]], torch.int32)
        final = False
    if final and draw.chance(0.5):
        out = draw.floats(1, channels, width - 1, dtype=tensors["x"].dtype)
    return {
        "x": tensors["x"].t().unsqueeze(0),
        "weight": tensors["weight"],
        "bias": tensors["bias"],
        "seq_idx": seq_idx,
        "initial_states": None,
        "return_final_states": final,
        "final_states_out": out,
        "activation": draw.choice((None, "swish")),
    }


# --------------------------------------------------------------------------- padded batches


def _spread(function: Any) -> Any:
    """Call with `packed`, then the tensors one by one."""

    def call(arguments: dict[str, Any]) -> Any:
        tensors = arguments["tensors"]
        tensors = tensors if isinstance(tensors, list) else [tensors]
        rest = {
            name: value for name, value in arguments.items() if name not in ("packed", "tensors")
        }
        plan = [rest.pop(name) for name in ("plan", "rank") if name in rest]
        return function(arguments["packed"], *plan, *tensors, **rest)

    return call


def _batch(draw: Draw) -> tuple[cuseq.PackedLayout, torch.Tensor]:
    mask = draw.floats(draw.choice((1, 3)), draw.choice((1, 7)), dtype=torch.float32) > 0
    return cuseq.PackedLayout.from_padding_mask(mask, draw.choice((1, 4))), mask


def _check_pack(arguments: dict[str, Any], rows: Any) -> None:
    packed, tensors, fill = arguments["packed"], arguments["tensors"], arguments["fill"]
    if packed is None or not isinstance(tensors, list) or len(tensors) != 1 or fill != 0:
        return
    (tensor,) = tensors
    again = cuseq.unpack(packed, rows)
    tokens = packed.batch_rows().tokens
    if not tensor.is_meta and tensor.shape[:2] == tokens.shape:  # planes are pack's own tests'
        real = (tokens >= 0).view(*tokens.shape, *[1] * (tensor.dim() - 2))
        expected = torch.where(real, tensor, torch.zeros_like(tensor))
        assert torch.equal(again.nan_to_num(), expected.nan_to_num()), "unpack does not undo pack"


@function("cuseq.pack", cuseq.pack, call=_spread(cuseq.pack), check=_check_pack)
def _(draw):
    packed, mask = _batch(draw)
    tensors = [draw.floats(*mask.shape, 2) for _ in range(draw.choice((1, 1, 2)))]
    return {"packed": packed, "tensors": tensors, "fill": draw.choice((0, -100))}


@function("cuseq.unpack", cuseq.unpack, call=_spread(cuseq.unpack))
def _(draw):
    packed, _ = _batch(draw)
    tensors = [draw.floats(packed.total_tokens, 2) for _ in range(draw.choice((1, 1, 2)))]
    return {"packed": packed, "tensors": tensors, "fill": draw.choice((0, -100))}


@function("cuseq.ops.shift_left", cuseq.ops.shift_left)
def _(draw):
    row = a_row(draw)
    packed = a_layout(draw, row, draw.choice((1, 4)))
    return {
        "values": draw.floats(packed.total_tokens, draw.choice((1, 3))),
        "packed": packed,
        "shift": draw.choice((0, 1, 2)),
        "fill": draw.choice((0, -100)),
    }


def _model(input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return input_ids.unsqueeze(-1).float() + 1


# What the model raises is raised, as of an argument that it does not take.
@function("cuseq.run_packed", cuseq.run_packed, also=("packed",), weight=2)
def _(draw):
    _, mask = _batch(draw)
    return {
        "model": _model,
        "input_ids": draw.ints([[3] * mask.shape[1]] * mask.shape[0], torch.int64),
        "attention_mask": draw.choice((mask, mask.long())),
        "segment_multiple": draw.choice((1, 2)),
        "total_multiple": 1,
        "true_is_pad": False,
        "total_tokens": draw.choice((None, 64)),
    }


# --------------------------------------------------------------------------- context parallelism

cp = cuseq.distributed
POLICIES = ("auto", "contiguous", "ulysses", "zigzag")


def _dealt_row(draw: Draw, policy: str, cp_size: int) -> Row:
    """Return a row that the policy can deal."""
    row = a_row(draw, multiple=2 * cp_size if policy == "zigzag" else 1)
    return Row(row.lengths, row.total + -row.total % cp_size)


@function(
    "cuseq.distributed.cp_plan", cp.cp_plan, also=("segments", "the tail", "lengths"), weight=2
)
def _(draw):
    cp_size, policy = draw.choice((1, 2, 4)), draw.choice(POLICIES)
    row = _dealt_row(draw, policy, cp_size)
    of_lengths = draw.chance(0.5)
    return {
        "lengths_or_layout": row.lengths if of_lengths else a_layout(draw, row),
        "cp_size": cp_size,
        "total_tokens": row.total if of_lengths else None,
        "policy": policy,
        "heads": (8, 4),
        "head_dim": 16,
        "window": draw.choice((None, None, 1, 3)),
        "max_far_rows": draw.choice((None, row.total)),
    }


# Only cp_plan makes one: every argument is wrong.
@function(
    "cuseq.distributed.ContextParallelPlan",
    cp.ContextParallelPlan,
    also=("cp_plan",),
    weight=1,
    wrong=True,
)
def _(draw):
    return {"plan": [2, 3]}


def _planned(draw: Draw) -> tuple[cuseq.PackedLayout, Any, int]:
    cp_size, policy = draw.choice((1, 2, 4)), draw.choice(POLICIES)
    packed = a_layout(draw, _dealt_row(draw, policy, cp_size))
    return packed, cp.cp_plan(packed, cp_size, policy=policy), cp_size


def _check_partition(arguments: dict[str, Any], result: Any) -> None:
    packed, rank = arguments["packed"], arguments["rank"]
    local, *rows = result
    assert local.total_tokens * arguments["plan"].cp_size == packed.total_tokens
    for tensor in rows:
        assert tensor.shape[0] == local.total_tokens, f"rank {rank} got {tensor.shape[0]} rows"


@function(
    "cuseq.distributed.cp_partition",
    cp.cp_partition,
    call=_spread(cp.cp_partition),
    check=_check_partition,
    weight=2,
)
def _(draw):
    packed, plan, cp_size = _planned(draw)
    tensors = [draw.floats(packed.total_tokens, 2) for _ in range(draw.choice((0, 1, 2)))]
    return {
        "packed": packed,
        "plan": plan,
        "rank": draw.randrange(cp_size),
        "tensors": tensors,
        "group": None,
    }


@function("cuseq.distributed.cp_join", cp.cp_join, call=_spread(cp.cp_join), weight=2)
def _(draw):
    packed, plan, cp_size = _planned(draw)
    return {
        "packed": packed,
        "plan": plan,
        "tensors": [draw.floats(cp_size, packed.total_tokens // cp_size, 2)],
    }


@function("cuseq.distributed.equalize_tokens", cp.equalize_tokens)
def _(draw):
    return {"packed": None, "group": None}  # a layout needs a process group


@function("cuseq.distributed.check_same_on_ranks", cp.check_same_on_ranks)
def _(draw):
    return {"facts": {"seed": draw.randrange(4)}, "group": None}


# --------------------------------------------------------------------------- the cache


@function("cuseq.cache.invalidate", cuseq.cache.invalidate)
def _(draw):
    (name,) = signature(cuseq.cache.invalidate).parameters
    return {name: draw.ints([2, 3])}


@function("cuseq.cache.stats", cuseq.cache.stats, weight=1)
def _(draw):
    return {}


@function("cuseq.cache.info", cuseq.cache.info, weight=1)
def _(draw):
    return {}


@function("cuseq.cache.clear", cuseq.cache.clear, weight=1)
def _(draw):
    return {}


def _scope(arguments: dict[str, Any]) -> None:
    with cuseq.cache.forward_scope():
        cuseq.ops.cached_cu_seqlens(torch.tensor([2, 3], device="cpu"))


@function("cuseq.cache.forward_scope", cuseq.cache.forward_scope, call=_scope, weight=1)
def _(draw):
    return {}


@function("cuseq.build_info", cuseq.build_info, weight=1)
def _(draw):
    return {}
