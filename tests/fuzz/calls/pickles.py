"""Pickles and states with one part changed: what they make is refused, or its facts agree."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

import cuseq
from cuseq import _C
from tests.fuzz import judge
from tests.fuzz.calls.target import TARGETS, Arguments, Target
from tests.fuzz.values import Draw, a_layout, a_row, a_tree, any_kind, bent_int

data, cp = cuseq.data, cuseq.distributed
_OURS = ("cuseq", _C.__name__)


def recipe_of(value: Any) -> tuple[Any, ...] | None:
    """Return what pickle keeps of an object of ours: a function, its arguments, and a state."""
    if type(value) in copyreg.dispatch_table:
        return copyreg.dispatch_table[type(value)](value)
    if type(value).__module__.startswith("cuseq") and not isinstance(value, type):
        return value.__reduce_ex__(4)
    return None


def again(recipe: tuple[Any, ...]) -> Any:
    """Make the object of a recipe, as pickle does."""
    function, arguments, *state = recipe
    made = function(*arguments)
    if state and state[0] is not None:
        if hasattr(made, "__setstate__"):
            made.__setstate__(state[0])
        else:
            made.__dict__.update(state[0])
    return made


def edited(draw: Draw, value: Any) -> Any:
    """Return the value with one part of it, or of an object inside, changed."""
    recipe = None if hasattr(value, "_make") else recipe_of(value)
    if recipe is not None:
        function, arguments, state = (*recipe, None)[:3]
        if state is None:
            at = draw.randrange(len(arguments))
            changed = edited(draw, arguments[at])
            return again((function, (*arguments[:at], changed, *arguments[at + 1 :])))
        changed = edited(draw, state)
        if not isinstance(changed, dict):
            raise ValueError("pickled must be a dict: pickle itself raises")
        return again((function, arguments, changed))
    if isinstance(value, bytes):
        return _edited_bytes(draw, value)
    if isinstance(value, dict) and value and draw.chance(0.95):
        key = draw.choice(sorted(value, key=str))
        return value | {key: edited(draw, value[key])}
    if isinstance(value, tuple | list) and value and draw.chance(0.9):
        items = list(value)
        at = draw.randrange(len(items))
        items[at] = edited(draw, items[at])
        kept = type(value) if type(value) in (tuple, list) else type(value)._make
        return kept(items)
    if type(value) is int and draw.chance(0.7):
        return bent_int(draw, value)
    return any_kind(draw, value)


def _edited_bytes(draw: Draw, value: bytes) -> Any:
    if not value or draw.chance(0.2):
        return draw.choice((value + b"\0" * 4, value[:-1], value[:-4], b"", None, "a"))
    at = draw.randrange(len(value))
    return value[:at] + bytes([draw.randrange(256)]) + value[at + 1 :]


def _flipped(draw: Draw, value: Any) -> bytes:
    pickled = pickle.dumps(value)
    at = draw.randrange(len(pickled))
    return pickled[:at] + bytes([draw.randrange(256)]) + pickled[at + 1 :]


# --------------------------------------------------------------------------- what is used


def _use_layout(packed: cuseq.PackedLayout) -> None:
    total = packed.total_tokens
    too_large = total > 4096 or packed.cu_seqlens_static.numel() > 1 << 16
    if too_large or packed.device.type == "meta":
        return
    if packed.part is None and not packed.is_tree:
        judge.layout({}, packed)
        slots, tokens = packed.batch_rows()
        assert int((tokens >= 0).sum()) == packed.num_real_tokens
        assert slots.shape == (total,)
    for per_token in (packed.position_ids, packed.seq_ids, packed.moe_padding_mask):
        assert per_token.shape == (total,)
    if packed.part is None or packed.part.group is None:
        q = torch.zeros(total, 2, 8)
        cuseq.attention_backend(q, q, q, packed)


def _use_tree(tree: cuseq.PackedTree) -> None:
    _use_layout(tree.layout)
    total = tree.layout.total_tokens
    if total > 4096:
        return
    samples = tree.samples.num_sequences
    rows = torch.cat([tree.rows_of(i) for i in range(samples)] + [torch.zeros(0).long()])
    assert torch.equal(tree.gather(torch.arange(total)), rows)
    if tree.input_ids is not None:
        found, labels, _ = tree.targets
        assert torch.equal(tree.input_ids[0][rows[:0]], labels[:0]) and found.shape == labels.shape


def _use_plan(plan: data.PackingPlan) -> None:
    count = sum(len(plan.row(number)) for number in range(min(plan.num_rows, 100)))
    assert count <= len(plan.indices) and plan.fill <= 1.0


def _use_groups(plan: data.groups.GroupPlan) -> None:
    for rank in range(plan.world_size):
        for row in plan.rows(rank):
            assert row.tokens <= plan.capacity
    assert plan.imbalance >= 0.0


def _use_sampler(sampler: data.PackedBatchSampler) -> None:
    for row in islice(iter(sampler), 20):
        assert all(0 <= sample < len(sampler._lengths) for sample in row)
    len(sampler)


def _use_stream(stream: data.PackedStream) -> None:
    for row in islice(iter(stream), 20):
        assert sum(len(sample["input_ids"]) for sample in row) <= stream.capacity


def _use_collator(collator: cuseq.PackingCollator) -> None:
    if (collator.total_tokens or 0) <= 4096 and collator.total_multiple <= 4096:
        collator([{"input_ids": [5]}])


def _use_context_plan(plan: cp.ContextParallelPlan) -> None:
    if plan.total_tokens <= 4096 and plan.cp_size <= 64:
        tokens = torch.cat([plan.tokens_of(rank) for rank in range(plan.cp_size)])
        assert torch.equal(tokens.sort().values, torch.arange(plan.total_tokens))


# --------------------------------------------------------------------------- what is pickled


def _some_layout(draw: Draw) -> cuseq.PackedLayout:
    kind = draw.randrange(4)
    if kind == 0:
        return a_tree(draw).layout
    if kind == 1:
        mask = draw.floats(draw.choice((1, 3)), draw.choice((1, 5)), dtype=torch.float32) > 0
        return cuseq.PackedLayout.from_padding_mask(mask, draw.choice((1, 4)))
    packed = a_layout(draw, a_row(draw, multiple=4), segment_multiple=4)
    if kind == 2:
        return packed
    plan = cp.cp_plan(packed, 2, policy=draw.choice(("auto", "contiguous", "ulysses")))
    return cp.cp_partition(packed, plan, draw.randrange(2), group="a group")[0]


def _a_tree(draw: Draw) -> cuseq.PackedTree:
    if draw.chance(0.3):
        return a_tree(draw)
    ids = [[draw.randrange(3) for _ in range(draw.choice((0, 1, 4)))] for _ in range(4)]
    return cuseq.PackedTree.from_sequences(ids, total_tokens=20)


def _a_sampler(draw: Draw) -> data.PackedBatchSampler:
    sampler = data.PackedBatchSampler([3, 5, 2, 4, 4, 6], 8, world_size=2, seed=draw.randrange(9))
    if draw.chance(0.5):
        next(iter(sampler))
    return sampler


def _a_stream(draw: Draw, world_size: int = 1) -> data.PackedStream:
    samples = [{"input_ids": [7] * length} for length in (3, 5, 2, 4, 4, 6)]
    stream = data.PackedStream(samples, 8, window=4, world_size=world_size)
    list(islice(iter(stream), draw.choice((0, 1, 2))))
    return stream


def _a_group_plan(draw: Draw) -> Any:
    return data.pack_groups([4, 1, 3], [[2] * 4, [5] * 2, [1] * 5], 16, world_size=2)


_PICKLED: dict[str, tuple[Callable[[Draw], Any], Callable[[Any], None], str]] = {
    "PackedLayout": (
        _some_layout,
        _use_layout,
        "lengths segment_lengths total_tokens max_seqs batch mask seqlen tree max_depth device "
        "plan rank group cp_size policy heads head_dim window max_far_rows segments parents "
        "samples context packed",
    ),
    "PackedTree": (
        _a_tree,
        _use_tree,
        "lengths parents samples context input_ids layout tree total_tokens max_seqs max_depth "
        "device PackedTree",
    ),
    "PackingPlan": (
        lambda draw: data.bin_pack([3, 1, 4, 2, 2], 5),
        _use_plan,
        "indices offsets starts lengths capacity",
    ),
    "GroupPlan": (
        _a_group_plan,
        _use_groups,
        "capacity costs num_cut _grid groups completions samples tokens repeats",
    ),
    "PackedBatchSampler": (
        _a_sampler,
        _use_sampler,
        "lengths capacity rank world_size strategy balance accumulation overlong seed shuffle "
        "drop_last buffer costs epoch step before _next _position",
    ),
    "PackedStream": (
        _a_stream,
        _use_stream,
        "iterable capacity window strategy length rank world_size shuffle seed overlong drop_last "
        "held source consumed skipped done window_number _pass _source_moved samples sample",
    ),
    "PackingCollator": (
        lambda draw: cuseq.PackingCollator(total_tokens=draw.choice((None, 8)), max_seqs=3),
        _use_collator,
        "total_tokens capacity max_seqs total_multiple pad_token_id cp examples",
    ),
    "ContextParallelPlan": (
        lambda draw: cp.cp_plan([6, 2, 4], 2, heads=(4, 2)),
        _use_context_plan,
        "lengths segments total_tokens cp_size policy heads head_dim window max_far_rows",
    ),
}


def _register(name: str, make: Any, call: Callable[[Arguments], Any], names: str) -> None:
    # `wrong`: errors are expected, and no result is compared. Nothing else is bent.
    TARGETS[name] = Target(name, make, call, None, frozenset(names.split()), False, 2, True)


for _name, (_make, _use, _names) in _PICKLED.items():

    def _call_edited(arguments: Arguments, use: Any = _use) -> None:
        use(arguments["self"]())

    def _make_edited(draw: Draw, make: Any = _make) -> Arguments:
        value = make(draw)
        state = draw.getstate()

        def made() -> Any:  # called where errors are judged
            draw.setstate(state)
            return edited(draw, value)

        return {"self": made}

    def _call_flipped(arguments: Arguments, use: Any = _use, name: str = _name) -> None:
        edits = ValueError("pickle must not be edited")
        try:
            value = pickle.loads(arguments["self"])
        except Exception as error:
            raise edits from error
        if type(value).__name__ != name:
            raise edits
        try:
            use(value)
        except AssertionError:
            raise
        except Exception as error:  # it is of another class, or lacks attributes
            raise edits from error

    def _make_flipped(draw: Draw, make: Any = _make) -> Arguments:
        return {"self": _flipped(draw, make(draw))}

    _register(f"pickle of {_name}, a part changed", _make_edited, _call_edited, _names + " pickled")
    _register(f"pickle of {_name}, a byte changed", _make_flipped, _call_flipped, "pickle")


# --------------------------------------------------------------------------- states


def _load(use: Callable[[Any], None]) -> Callable[[Arguments], None]:
    def call(arguments: Arguments) -> None:
        of, state = arguments["self"]()
        of.load_state_dict(state)
        use(of)

    return call


def _make_state(make: Callable[[Draw], Any]) -> Callable[[Draw], Arguments]:
    def made(draw: Draw) -> Arguments:
        of = make(draw)
        before, state = of.state_dict(), draw.getstate()

        def changed() -> Any:
            draw.setstate(state)
            return make(draw) if draw.chance(0.1) else of, edited(draw, before)

        return {"self": changed}

    return made


_register(
    "state of PackedBatchSampler",
    _make_state(_a_sampler),
    _load(_use_sampler),
    f"{_PICKLED['PackedBatchSampler'][2]} state",
)
_register(
    "state of PackedStream",
    _make_state(lambda draw: _a_stream(draw, draw.choice((1, 2)))),
    _load(_use_stream),
    f"{_PICKLED['PackedStream'][2]} state",
)
