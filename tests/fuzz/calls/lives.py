"""Sequences of calls on a few objects: what each holds is what a new object of its row holds."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from itertools import islice
from threading import Thread
from typing import Any

import torch
from torch import Tensor

import cuseq
from cuseq.layout import StaticLayout
from tests.fuzz.calls.target import TARGETS, Arguments, Target
from tests.fuzz.judge import facts, same
from tests.fuzz.values import Draw

Layout, Tree, data, cp = cuseq.PackedLayout, cuseq.PackedTree, cuseq.data, cuseq.distributed

TOKENS, MOST = 12, 8  # of every row, and its capacity for sequences, so that most may be filled


# --------------------------------------------------------------------------- rows


def _lengths(draw: Draw) -> list[int]:
    left, lengths = TOKENS, []
    for _ in range(draw.randrange(6)):
        lengths.append(draw.randint(0, min(left, 5)))
        left -= lengths[-1]
    return lengths


Row = tuple[str, Callable[[], Layout]]  # its kind, and a function that makes a new layout of it


def _of_lengths(draw: Draw) -> Row:
    lengths = _lengths(draw)
    source = draw.choice((lengths, draw.ints(lengths)))
    return "row", lambda: Layout.from_lengths(source, TOKENS, max_seqs=MOST)


def _of_segments(draw: Draw) -> Row:
    lengths = [draw.randint(0, 4) for _ in range(draw.randint(1, 3))]
    return "segments", lambda: Layout.from_lengths(
        lengths, TOKENS, segment_multiple=4, max_seqs=MOST
    )


def _of_mask(draw: Draw) -> Row:
    mask = draw.floats(draw.choice((2, 3)), 4, dtype=torch.float32) > draw.choice((0, 1))
    return "row", lambda: Layout.from_padding_mask(mask, total_tokens=TOKENS, max_seqs=MOST)


def _of_tree(draw: Draw) -> Row:
    ids = [[draw.randrange(2) for _ in range(draw.randint(0, 3))] for _ in range(3)]
    sizes = {"total_tokens": TOKENS, "max_seqs": MOST, "max_depth": 3}
    return "tree", lambda: Tree.from_sequences(ids, **sizes).layout


def _of_rank(draw: Draw) -> Row:
    lengths, rank = _lengths(draw), draw.randrange(2)
    policy = draw.choice(("contiguous", "ulysses"))

    def make() -> Layout:
        packed = Layout.from_lengths(lengths, TOKENS, max_seqs=MOST)
        plan = cp.cp_plan(packed, 2, policy=policy)
        return cp.cp_partition(packed, plan, rank, group="a group")[0]

    return policy, make


_ROWS = (_of_lengths, _of_lengths, _of_segments, _of_mask, _of_tree, _of_rank)

ROWS = torch.arange(TOKENS * 32, dtype=torch.float64).view(TOKENS, 2, 16).sin()
READERS: dict[str, Callable[[Layout], Any]] = {
    **{
        name: lambda packed, name=name: getattr(packed, name)
        for name in (
            *("lengths", "cu_seqlens", "cu_seqlens_static", "host_meta", "max_seqlen"),
            *("num_sequences", "num_real_tokens", "total_tokens", "position_ids", "seq_ids"),
            *("moe_padding_mask", "seq_idx", "cu_seqlens_recurrent", "cu_seqlens_padded"),
        )
    },
    "repr": repr,
    "chunk_indices": lambda packed: packed.chunk_indices(2),
    "chunk_offsets": lambda packed: packed.chunk_offsets(3, torch.int64),
    "chunked": lambda packed: facts(packed.chunked(2)),
    "dense_mask": lambda packed: packed.dense_mask(window=2),
    "batch_rows": lambda packed: packed.batch_rows(),
    "longer": lambda packed: facts(packed.with_total_tokens(packed.total_tokens + 3)),
    "moved": lambda packed: packed.to("meta").position_ids.shape,
    "pickled": lambda packed: facts(pickle.loads(pickle.dumps(packed))),
    "sums": lambda packed: cuseq.ops.segment_sum(ROWS[: packed.total_tokens], packed),
    "attention": lambda packed: cuseq.varlen_attention(
        *[ROWS[: packed.total_tokens]] * 3, packed, window=3
    ),
    "gradient": lambda packed: _gradient(packed),
}


def _gradient(packed: Layout) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        rows = ROWS[: packed.total_tokens].clone().requires_grad_()
        out = cuseq.varlen_attention(rows, rows, rows, packed)
        return torch.autograd.grad(out.square().sum(), rows)[0]


def _read(packed: Layout, name: str) -> Any:
    if name in ("attention", "gradient") and packed.part is not None:
        return None  # needs the other ranks
    try:
        return facts(READERS[name](packed))
    except (ValueError, NotImplementedError) as error:  # not of this kind of row
        return str(error)


class _Item:
    """A layout, and the row that it should describe: its own, or chunks of another item's."""

    def __init__(self, layout: Layout, row: Row, whole: tuple[_Item, int] | None = None):
        self.layout, self.own, self.whole = layout, row, whole

    @property
    def row(self) -> Row:
        if self.whole is None:
            return self.own
        item, size = self.whole
        kind, make = item.row
        return kind, lambda: make().chunked(size)

    def check(self, names: list[str]) -> None:
        _, make = self.row
        for name in names:
            found, expected = _read(self.layout, name), _read(make(), name)
            assert same(found, expected, torch.float64), f"{name}: {found}, not {expected}"


# In what rows of a kind may differ, so that one is not filled with the other.
_FORMS = {"row": "padded batch", "segments": "(total_tokens|padded batch)"}


def _sizes(packed: Layout) -> tuple[int, int]:
    return packed.total_tokens, packed.cu_seqlens_static.shape[0]


class _Life:
    """Steps on a few layouts, and their names."""

    def __init__(self, draw: Draw):
        self.draw = draw
        self.done: list[str] = []
        self.items: list[_Item] = []

    def run(self) -> None:
        steps = (self.make, self.fill, self.fill, self.read, self.chunk, self.copy, self.thread)
        self.make()
        for _ in range(self.draw.randint(3, 8)):
            with torch.inference_mode(self.draw.chance(0.15)):
                self.draw.choice(steps)()
        for item in self.items:
            item.check(list(READERS))

    def pick(self) -> tuple[int, _Item]:
        at = self.draw.randrange(len(self.items))
        return at, self.items[at]

    def add(self, what: str, item: _Item) -> None:
        self.done.append(f"{len(self.items)} = {what}")
        self.items.append(item)

    def make(self) -> None:
        row = self.draw.choice(_ROWS)(self.draw)
        layout = row[1]()
        self.add(f"{row[0]} of {layout.lengths.tolist()}", _Item(layout, row))

    def names(self) -> list[str]:
        return self.draw.sample(sorted(READERS), 3)

    def read(self) -> None:
        (at, item), names = self.pick(), self.names()
        self.done.append(f"{at}.read {names}")
        item.check(names)

    def thread(self) -> None:
        (at, item), names = self.pick(), self.names()
        self.done.append(f"{at}.read {names} in threads")
        errors: list[BaseException] = []

        def run() -> None:
            try:
                item.check(names)
            except Exception as error:
                errors.append(error)

        threads = [Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def fill(self) -> None:
        (at, item), (other_at, other) = self.pick(), self.pick()
        self.done.append(f"{at}.copy_({other_at})")
        kind, theirs = item.row[0], other.row
        try:
            item.layout.copy_(other.layout)
        except ValueError as error:
            rule = "other must have the same"
            if (kind, _sizes(item.layout)) == (theirs[0], _sizes(other.layout)):
                rule += f" {_FORMS.get(kind, 'shape of')}"
            assert re.search(rule, str(error)), error
            return
        if item is not other:
            item.own, item.whole = theirs, None

    def chunk(self) -> None:
        at, item = self.pick()
        if item.row[0] not in ("row", "segments"):
            return
        size = self.draw.choice((3, TOKENS))
        chunks = item.layout.chunked(size)
        if all(chunks is not one.layout for one in self.items):
            # They follow their layout until they are filled themselves.
            self.add(f"{at}.chunked({size})", _Item(chunks, item.row, (item, size)))

    def copy(self) -> None:
        at, item = self.pick()
        kind, make = item.row
        name = self.draw.choice(sorted(COPIES))
        self.add(f"{name} of {at}", _Item(COPIES[name](item.layout), (kind, make)))
        if name == "longer":
            self.items[-1].own = kind, lambda: COPIES[name](make())


COPIES: dict[str, Callable[[Layout], Layout]] = {
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "static copy": lambda packed: StaticLayout.like(packed, packed.device),
    "longer": lambda packed: packed.with_total_tokens(packed.total_tokens + 1),
}


# --------------------------------------------------------------------------- samplers and streams


def _a_sampler(draw: Draw) -> Callable[[], Any]:
    lengths = [draw.randint(1, 8) for _ in range(draw.randint(0, 20))]
    options = {
        "seed": draw.randrange(9),
        "shuffle": draw.chance(0.5),
        "drop_last": draw.chance(0.5),
        "buffer": draw.choice((None, 4)),
        "world_size": draw.choice((1, 2)),
    }
    return lambda: data.PackedBatchSampler(lengths, 8, **options)


def _a_stream(draw: Draw) -> Callable[[], Any]:
    samples = [{"input_ids": [7] * draw.randint(1, 8)} for _ in range(draw.randint(0, 20))]
    options = {
        "seed": draw.randrange(9),
        "shuffle": draw.chance(0.5),
        "drop_last": draw.chance(0.5),
        "window": draw.choice((4, 16)),
        "world_size": draw.choice((1, 2)),
    }
    return lambda: data.PackedStream(samples, 8, **options)


class _Pass:
    """A pass over a sampler or stream that is interrupted: what comes is what an uninterrupted one
    gives.
    """

    def __init__(self, draw: Draw, make: Callable[[], Any]):
        self.draw, self.make = draw, make
        self.done: list[str] = []

    def run(self) -> None:
        expected = list(self.make())
        of, at = self.make(), 0
        rows = iter(of)
        while at < len(expected):
            count = self.draw.randint(0, 3)
            self.done.append(f"take {count}")
            found = list(islice(rows, count))
            assert found == expected[at : at + count], f"{found}, not {expected[at : at + count]}"
            at = min(at + count, len(expected))
            step = self.draw.choice(("go on", "resume", "roll back", "pickle"))
            self.done.append(step)
            if step == "go on":
                continue
            state = pickle.loads(pickle.dumps(of.state_dict()))
            if step == "resume":
                of = self.make()
            elif step == "pickle":
                of = pickle.loads(pickle.dumps(of))
            of.load_state_dict(state)
            rows = iter(of)


# --------------------------------------------------------------------------- targets


def _register(name: str, start: Callable[[Draw], Any]) -> None:
    def call(arguments: Arguments) -> None:
        life = start(arguments["self"].fork())
        try:
            life.run()
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} after {life.done}: {error}") from error

    TARGETS[name] = Target(
        name, lambda draw: {"self": draw.fork()}, call, None, frozenset(), False, 2
    )


_register("life of PackedLayout", _Life)
_register("life of PackedBatchSampler", lambda draw: _Pass(draw, _a_sampler(draw)))
_register("life of PackedStream", lambda draw: _Pass(draw, _a_stream(draw)))
