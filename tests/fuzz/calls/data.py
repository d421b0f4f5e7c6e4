"""Right arguments of planning, sampling, streaming, collating, and of the tools on whole models."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

import cuseq
from tests.fuzz.calls.target import function
from tests.fuzz.values import Draw, a_layout, a_row

data = cuseq.data


def _sample_lengths(draw: Draw) -> Any:
    lengths = [draw.choice((0, 1, 3, 8)) for _ in range(draw.choice((0, 1, 4, 9)))]
    return draw.choice((lengths, torch.tensor(lengths, dtype=torch.int64)))


def _check_plan(arguments: dict[str, Any], plan: Any) -> None:
    if arguments["overlong"] == "raise":
        count = len(list(arguments["lengths"]))
        samples = sorted(plan.indices.tolist())
        assert samples == list(range(count)), f"bin_pack of {count} samples gives {samples}"


@function("cuseq.data.bin_pack", data.bin_pack, check=_check_plan)
def _(draw):
    return {
        "lengths": _sample_lengths(draw),
        "capacity": 8,
        "strategy": draw.choice(("bfd", "ffd", "sequential")),
        "overlong": draw.choice(("raise", "truncate", "split")),
    }


def _check_groups(arguments: dict[str, Any], plan: Any) -> None:
    rows = [row for rank in range(plan.world_size) for row in plan.rows(rank)]
    found = sorted(sample for row in rows if not row.repeats for sample in row.samples.tolist())
    count = sum(len(list(lengths)) for lengths in arguments["completions"])
    assert found == list(range(count)), f"pack_groups of {count} samples gives {found}"


@function("cuseq.data.pack_groups", data.pack_groups, check=_check_groups)
def _(draw):
    groups = draw.choice((0, 1, 4))
    return {
        "prompts": [draw.choice((0, 1, 3)) for _ in range(groups)],
        "completions": [
            [draw.choice((0, 1, 5)) for _ in range(draw.choice((1, 3)))] for _ in range(groups)
        ],
        "capacity": draw.choice((8, 20)),
        "world_size": draw.choice((1, 3)),
        "cost": (0.5, 1.0, 2.0),
        "padded": draw.chance(0.5),
    }


def _iterated(of: Any) -> Any:
    """Make it and read a little of what it yields."""
    return lambda arguments: list(islice(iter(of(**arguments)), 50))


@function(
    "cuseq.data.PackedBatchSampler",
    data.PackedBatchSampler,
    call=_iterated(data.PackedBatchSampler),
    weight=1,
)
def _(draw):
    return {
        "lengths": [draw.choice((1, 3, 8)) for _ in range(draw.choice((4, 9)))],
        "capacity": 8,
        "rank": draw.choice((0, 1)),
        "world_size": 2,
        "strategy": draw.choice(("bfd", "ffd", "sequential")),
        "balance": None,
        "costs": None,
        "accumulation": 1,
        "overlong": "raise",
        "seed": draw.randrange(9),
        "shuffle": draw.chance(0.5),
        "drop_last": draw.chance(0.5),
        "buffer": None,
    }


def _samples(draw: Draw) -> list[dict[str, list[int]]]:
    return [{"input_ids": [7] * draw.choice((1, 3, 8))} for _ in range(draw.choice((2, 9)))]


@function(
    "cuseq.data.PackedStream",
    data.PackedStream,
    call=_iterated(data.PackedStream),
    also=("iterable", "samples", "sample"),
    weight=1,
)
def _(draw):
    return {
        "iterable": _samples(draw),
        "capacity": 8,
        "window": draw.choice((4, 16)),
        "strategy": draw.choice(("bfd", "ffd", "sequential")),
        "length": None,
        "rank": 0,
        "world_size": draw.choice((1, 2)),
        "shuffle": draw.chance(0.5),
        "seed": draw.randrange(9),
        "overlong": draw.choice(("raise", "skip")),
        "drop_last": draw.chance(0.5),
    }


def _collate(arguments: dict[str, Any]) -> Any:
    options = dict(arguments)
    examples = options.pop("examples")
    return data.PackingCollator(**options)(examples)


# Keys of an example are named as arguments are.
_KEYS = ("examples", "input_ids", "labels", "a", "position_ids", "attention_mask")


@function("cuseq.PackingCollator", data.PackingCollator, call=_collate, also=_KEYS, weight=2)
def _(draw):
    return {
        "examples": _samples(draw),
        "capacity": draw.choice((None, 100)),
        "total_tokens": None,
        "total_multiple": draw.choice((1, 8)),
        "pad_token_id": 0,
    }


def _batch(draw: Draw) -> dict[str, Any]:
    return data.PackingCollator()(_samples(draw))


@function(
    "cuseq.data.split_by_tokens",
    data.split_by_tokens,
    call=lambda arguments: list(islice(data.split_by_tokens(**arguments), 50)),
    also=("packed", "input_ids", "labels", "position_ids"),
    weight=1,
)
def _(draw):
    return {
        "batch": _batch(draw),
        "budget": draw.choice((8, 16)),
        "total_multiple": draw.choice((1, 4)),
        "pad_token_id": 0,
    }


@function("cuseq.data.mask_boundary_labels", data.mask_boundary_labels, also=("lengths",))
def _(draw):
    row = a_row(draw)
    return {
        "labels": draw.ints([draw.randrange(100) for _ in range(row.total)], torch.int64),
        "lengths_or_layout": draw.choice(
            (row.lengths, draw.ints(row.lengths), a_layout(draw, row))
        ),
        "ignore_index": -100,
    }


@function("cuseq.data.PackingPlan", data.PackingPlan, weight=1)
def _(draw):
    plan = data.bin_pack([3, 1, 4], 4)
    names = ("indices", "offsets", "starts", "lengths", "capacity")
    return {name: getattr(plan, name) for name in names}


def _row(arguments: dict[str, Any]) -> list[int]:
    try:
        return arguments["self"].row(arguments["number"])
    except IndexError as error:  # the documented error of a row that is not there
        raise ValueError(str(error)) from error


@function("PackingPlan.row", data.PackingPlan.row, call=_row, weight=1)
def _(draw):
    plan = data.bin_pack([3, 1, 4], 4)
    return {"self": plan, "number": draw.randrange(plan.num_rows)}


# --------------------------------------------------------------------------- whole models

_MODELS = ("model", "trainer", "unsloth")


@function("cuseq.enable", cuseq.enable, also=_MODELS, weight=1, wrong=True)
def _(draw):
    return {"x": torch.nn.Linear(2, 2)}


@function("cuseq.disable", cuseq.disable, also=_MODELS, weight=1, wrong=True)
def _(draw):
    return {"x": torch.nn.Linear(2, 2)}


# What the model raises is raised, as of an argument that it does not take.
@function("cuseq.check_packing", cuseq.check_packing, also=("input_ids",), weight=1, wrong=True)
def _(draw):
    return {"model": torch.nn.Linear(2, 2), "examples": [[1, 2], [3]], "rtol": None}


@function("cuseq.profile_step", cuseq.profile_step, weight=1, wrong=True)
def _(draw):
    return {"fn": None, "warmup": 0, "steps": 1, "batch": None}
