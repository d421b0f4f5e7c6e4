"""Right arguments of `PackedLayout` and of the functions of `cuseq.ops`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

import cuseq
from tests.fuzz import judge
from tests.fuzz.calls.schemas import position_ids_and_plane
from tests.fuzz.calls.target import TARGETS, function
from tests.fuzz.values import Draw, a_layout, a_row, some_spans

Layout = cuseq.PackedLayout

for _name in ("cu_seqlens", "max_seqlen", "max_seqlen_sync", "last_token_indices"):
    _target = TARGETS[f"torch.ops.cuseq.{_name}"]
    function(f"cuseq.ops.{_name}", getattr(cuseq.ops, _name), check=_target.check)(_target.make)
for _name in (
    "position_ids",
    "seq_ids",
    "cached_cu_seqlens",
    "cached_position_ids",
    "cached_seq_ids",
):
    _target = TARGETS[f"torch.ops.cuseq.{_name}"]
    function(f"cuseq.ops.{_name}", getattr(cuseq.ops, _name), check=_target.check)(_target.make)


@function(
    "cuseq.ops.lengths_from_padding_mask",
    cuseq.ops.lengths_from_padding_mask,
    check=judge.lengths_from_padding_mask,
)
def _(draw):
    return {"mask": _mask(draw)}


def _mask(draw: Draw) -> torch.Tensor:
    return draw.floats(draw.choice((0, 1, 3)), draw.choice((0, 1, 7)), dtype=torch.float32) > 0


function(
    "cuseq.ops.cu_seqlens_from_position_ids",
    cuseq.ops.cu_seqlens_from_position_ids,
    check=judge.cu_seqlens_from_position_ids,
)(position_ids_and_plane)


def _rule(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    spans = some_spans(draw, row)
    return {
        "lengths": draw.ints(row.lengths),
        "total_tokens": row.total,
        "causal": draw.chance(0.7),
        "window": draw.choice((None, None, 1, 3)),
        "spans": draw.ints(spans, torch.int32).view(-1, 2) if spans else None,
        "cu_seqlens_padded": None,
    }


function("cuseq.ops.mask_ranges", cuseq.ops.mask_ranges, check=judge.mask_ranges)(_rule)


@function("cuseq.ops.dense_mask", cuseq.ops.dense_mask, check=judge.dense_mask)
def _(draw):
    dtype = draw.choice((torch.bool, torch.float32, torch.float16))
    return {**_rule(draw), "dtype": dtype, "row_length": None, "finite": draw.chance(0.2)}


@function("cuseq.ops.block_mask", cuseq.ops.block_mask, weight=1)
def _(draw):
    return {**_rule(draw), "row_length": None, "block_size": draw.choice((4, 128, (2, 4)))}


# --------------------------------------------------------------------------- making layouts


@function("PackedLayout.from_lengths", Layout.from_lengths, check=judge.layout)
def _(draw):
    row = a_row(draw)
    multiple = draw.choice((1, 1, 4))
    return {
        "lengths": draw.choice((row.lengths, draw.ints(row.lengths))),
        "total_tokens": draw.choice((None, row.total)) if multiple == 1 else None,
        "segment_multiple": multiple,
        "total_multiple": draw.choice((1, 8)) if multiple == 4 else 1,
        "max_seqs": draw.choice((None, 8)),
        "device": draw.choice((None, draw.device)),
    }


@function("PackedLayout.from_cu_seqlens", Layout.from_cu_seqlens, check=judge.layout)
def _(draw):
    row = a_row(draw)
    return {
        "cu_seqlens": draw.choice((row.offsets, draw.ints(row.offsets))),
        "total_tokens": draw.choice((None, row.total)),
        "max_seqs": draw.choice((None, 8)),
        "device": None,
    }


@function("PackedLayout.from_padding_mask", Layout.from_padding_mask, check=judge.layout)
def _(draw):
    return {
        "mask": _mask(draw),
        "segment_multiple": draw.choice((1, 2)),
        "total_multiple": draw.choice((1, 4)),
        "true_is_pad": draw.chance(0.3),
        "total_tokens": draw.choice((None, 64)),
        "max_seqs": None,
        "device": None,
    }


@function("PackedLayout.from_position_ids", Layout.from_position_ids, check=judge.layout)
def _(draw):
    return {**position_ids_and_plane(draw), "max_seqs": draw.choice((None, 32)), "device": None}


# Only the class methods make one: every argument is wrong.
@function("cuseq.PackedLayout", Layout, also=("from_lengths",), weight=1, wrong=True)
def _(draw):
    return {"held": [2, 3]}


# --------------------------------------------------------------------------- their methods


def _method(name: str, **options: Any) -> Any:
    def call(arguments: dict[str, Any]) -> Any:
        packed, *rest = arguments.values()
        return getattr(packed, name)(**dict(zip(list(arguments)[1:], rest, strict=True)))

    return function(
        f"PackedLayout.{name}", getattr(Layout, name), call=call, also=("packed",), **options
    )


def _some_layout(draw: Draw) -> Layout:
    return a_layout(draw, a_row(draw), draw.choice((1, 1, 4)))


@_method("dense_mask")
def _(draw):
    row = a_row(draw)
    return {
        "self": a_layout(draw, row),
        "dtype": draw.choice((torch.bool, torch.float32)),
        "causal": draw.chance(0.7),
        "window": draw.choice((None, 2)),
        "spans": some_spans(draw, row) or None,
        "row_length": None,
        "finite": draw.chance(0.3),
    }


@_method("block_mask", weight=1)
def _(draw):
    row = a_row(draw)
    return {
        "self": a_layout(draw, row),
        "causal": draw.chance(0.7),
        "window": draw.choice((None, 2)),
        "spans": some_spans(draw, row) or None,
        "row_length": None,
        "block_size": draw.choice((4, 128, (2, 4))),
    }


if find_spec("xformers") is not None:

    @_method("xformers_bias", weight=1)
    def _(draw):
        packed = a_layout(draw, a_row(draw))
        packed = packed.with_total_tokens(packed.total_tokens + 1)  # an empty row is refused
        return {"self": packed, "window": draw.choice((None, 2))}


@_method("with_total_tokens", check=judge.layout)
def _(draw):
    packed = _some_layout(draw)
    return {"self": packed, "total_tokens": packed.total_tokens + draw.choice((0, 1, 16))}


@_method("to", check=judge.layout)
def _(draw):
    device = draw.choice(("cpu", None, torch.device("cpu"), draw.device))
    return {"self": _some_layout(draw), "device": device, "non_blocking": draw.chance(0.5)}


@_method("flash_kwargs")
def _(draw):
    return {"self": a_layout(draw, a_row(draw))}
