"""Test interleaved micro-batches: in any order of forwards and backwards, one build per key."""

from __future__ import annotations

import distributed
import pytest
import reference
import torch
from distributed import DIM, HEAD_DIM, HEADS
from test_cache import counted
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss, pad
from torch.utils.checkpoint import checkpoint

import cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")

ROW = 16
LENGTHS = [[3, 9, 4], [16], [1, 1, 14], [7, 8], [5, 5, 5], [2, 12], [6, 0, 9], [4], [15, 1]] + [
    [i, 16 - i] for i in (1, 6, 11)
]
# Layers alternate in window, row length and dtype of the lengths.
LAYERS = [(None, ROW, torch.int32), (3, ROW + 4, torch.int64)] * 2
KEYS = 2 * 3  # of one micro-batch: two kinds of layer with three facts each


class MicroBatch:
    def __init__(self, index: int, device: torch.device):
        self.values = LENGTHS[index]
        self.hidden = distributed.make_rows(ROW, seed=index).to(device).requires_grad_()
        self.lengths = {
            dtype: torch.tensor(self.values, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.int64)
        }


def cached_facts(q, k, v, batch: MicroBatch, window, total: int, dtype) -> tuple[Tensor, ...]:
    lengths = batch.lengths[dtype]
    offsets = cuseq.ops.cached_cu_seqlens(lengths)
    out = torch.ops.cuseq.varlen_attention(q, k, v, offsets, None, True, window)[0]
    ids = cuseq.ops.cached_seq_ids(lengths, total)
    return out, cuseq.ops.cached_position_ids(lengths, total), ids


def plain_facts(q, k, v, batch: MicroBatch, window, total: int, dtype) -> tuple[Tensor, ...]:
    out = reference.attention(q, k, v, batch.values, window=window)
    names = ("position_ids", "seq_ids")
    ids = [torch.tensor(getattr(reference, n)(batch.values, total), device=q.device) for n in names]
    return out, *ids


class Layers(nn.Module):
    def __init__(self, facts):
        super().__init__()
        self.facts = facts
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM, dtype=torch.float64) for _ in LAYERS)

    def layer(self, hidden: Tensor, batch: MicroBatch, index: int) -> Tensor:
        total = LAYERS[index][1]
        row = pad(hidden, (0, 0, 0, total - ROW))
        q, k, v = self.qkv[index](row).view(total, 3, HEADS, HEAD_DIM).unbind(1)
        out, positions, ids = self.facts(q, k, v, batch, *LAYERS[index])
        turn = (positions + 3 * ids).double().cos().unsqueeze(1)
        return hidden + (out.flatten(1) * turn)[:ROW]

    def forward(self, batch: MicroBatch, reentrant: bool | None) -> Tensor:
        hidden = batch.hidden
        for index in range(len(LAYERS)):
            if reentrant is None:
                hidden = self.layer(hidden, batch, index)
            else:
                # The micro-batch is passed as an object: a tensor would arrive detached.
                hidden = checkpoint(self.layer, hidden, batch, index, use_reentrant=reentrant)
        return hidden.square().sum()


def make_layers(facts, device: torch.device) -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers(facts).to(device)


def schedule(count: int, in_flight: int) -> list[tuple[bool, int]]:
    """Return which micro-batch goes forward (True) or backward at each step."""
    order = [(True, i) for i in range(in_flight)]
    for i in range(count):
        order.append((False, i))
        if i + in_flight < count:
            order.append((True, i + in_flight))
    return order


def check_gradients(layers: Layers, device: torch.device, times: int = 1) -> None:
    plain = make_layers(plain_facts, device)
    for index in range(len(LENGTHS)):
        plain(MicroBatch(index, device), None).backward()
    expected = [times * grad for grad in distributed.gradients(plain)]
    torch.testing.assert_close(distributed.gradients(layers), expected)


RECOMPUTE = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["kept", "reentrant", "not-reentrant"]
)


@RECOMPUTE
@pytest.mark.parametrize("in_flight", [1, 8], ids=["accumulation", "1f1b"])
def test_one_build_for_each_key(in_flight, reentrant, device):
    count = len(LENGTHS)
    layers = make_layers(cached_facts, device)
    alive: dict[int, tuple[MicroBatch, Tensor]] = {}
    calls = 3 * len(LAYERS) * count * (1 if reentrant is None else 2)
    with counted(misses=KEYS * count, hits=calls - KEYS * count):
        for forward, index in schedule(count, in_flight):
            if forward:
                batch = MicroBatch(index, device)
                alive[index] = batch, layers(batch, reentrant)
                del batch
            else:
                alive[index][1].backward()
                del alive[index]
            assert cuseq.cache.stats()["entries"] == KEYS * len(alive)
    check_gradients(layers, device)


def test_kept_micro_batches_are_built_once(device):
    layers = make_layers(cached_facts, device)

    def step_twice(group: range) -> None:
        batches = [MicroBatch(index, device) for index in group]
        keys, calls = KEYS * len(batches), 3 * len(LAYERS) * len(batches)
        with counted(misses=keys, hits=2 * calls - keys, entries=keys):
            for batch in [*batches, *batches]:
                layers(batch, None).backward()

    step_twice(range(0, 8)), step_twice(range(8, len(LENGTHS)))  # all together exceed the cache
    check_gradients(layers, device, times=2)


def test_a_scope_for_each_micro_batch(device):
    layers = make_layers(cached_facts, device)
    batches = [MicroBatch(index, device) for index in range(len(LENGTHS))]
    misses = KEYS * len(batches)
    with counted(misses=misses, hits=3 * len(LAYERS) * len(batches) - misses):
        for batch in batches:
            with cuseq.cache.forward_scope():
                layers(batch, None).backward()
    check_gradients(layers, device)


# Views of one tensor of lengths, as schedules split it.

PARTS, WIDTH = 4, 3
SPLITS = {
    "tensor_split": lambda base: base.tensor_split(PARTS),
    "chunk": lambda base: base.chunk(PARTS),
    "narrow": lambda base: [base.narrow(0, WIDTH * i, WIDTH) for i in range(PARTS)],
    "unbind": lambda base: base.view(PARTS, WIDTH).unbind(),
    "columns": lambda base: base.view(WIDTH, PARTS).unbind(1),
}
EDITS = {
    "all": lambda base, views: base.add_(2),
    "one": lambda base, views: base[-1:].fill_(5),
    "through a view": lambda base, views: views[1].zero_(),
}


def check_views(views) -> None:
    for view in views:
        assert cuseq.ops.cached_cu_seqlens(view).tolist() == reference.cu_seqlens(view.tolist())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("split", SPLITS)
def test_views_are_keys_of_their_own(split, edit, device):
    base = torch.arange(PARTS * WIDTH, device=device)
    views = SPLITS[split](base)
    with counted(misses=PARTS, hits=PARTS, entries=PARTS):
        check_views(views), check_views(views)
    with counted(misses=PARTS, entries=0):
        check_views(SPLITS[split](base))  # equal views are other tensors, which are freed by now
    with counted(misses=1, entries=1):
        check_views([base])
    EDITS[edit](base, views)
    # They share one version counter: an edit of any part makes the entries of all parts stale.
    with counted(misses=PARTS + 1, hits=PARTS + 1):
        for _ in range(2):
            check_views([*views, base])
    with counted(entries=-PARTS):
        del views


# A pipeline of two processes.

MICRO_BATCHES = 4
BLOCKS = 2  # of one stage
# Each micro-batch has its own lengths; zeros at the end of a row cost nothing.
TABLE = [values + [0] * (3 - len(values)) for values in LENGTHS[:MICRO_BATCHES]]


class Stage(nn.Module):
    """Half of the model. It makes its own layout from the lengths that came with the step."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden, lengths=None, layouts=None, micro_batch=None):
        if lengths is not None:
            packed = cuseq.PackedLayout.from_lengths(lengths[0], ROW, device=hidden.device)
        elif layouts is not None:
            packed = layouts[micro_batch.item()].to(hidden.device)
        else:
            packed = cuseq.PackedLayout.from_lengths([ROW])  # what a stage without lengths does
        for block in self.blocks:
            hidden = checkpoint(block, hidden, packed, use_reentrant=False)
        return hidden


def give_lengths(rank: int) -> dict:
    return {"lengths": torch.tensor(TABLE, dtype=torch.int32)}


def give_layouts(rank: int) -> dict:
    layouts = [cuseq.PackedLayout.from_lengths(lengths, ROW) for lengths in TABLE]
    return {"layouts": layouts, "micro_batch": torch.arange(MICRO_BATCHES)}


def give_the_first_alone(rank: int) -> dict:
    return give_lengths(rank) if rank == 0 else {}


RECIPES = {f.__name__: f for f in (give_lengths, give_layouts, give_the_first_alone)}
SCHEDULES = {f.__name__: f for f in (Schedule1F1B, ScheduleGPipe)}


def rows_and_targets() -> tuple[Tensor, Tensor]:
    rows = distributed.make_rows(2 * MICRO_BATCHES, ROW)
    return rows[:MICRO_BATCHES], rows[MICRO_BATCHES:]


def work(rank: int) -> dict:
    """Run one stage of every pipeline; return losses, gradients and changes of cache counts."""
    results = {}
    rows, targets = rows_and_targets()
    for name, recipe in ((s, r) for s in SCHEDULES for r in RECIPES):
        blocks = distributed.make_model(2 * BLOCKS).blocks[BLOCKS * rank : BLOCKS * (rank + 1)]
        stage = PipelineStage(Stage(blocks), rank, 2, torch.device("cpu"))
        runner = SCHEDULES[name](stage, MICRO_BATCHES, loss_fn=mse_loss)
        arguments = (rows,) if rank == 0 else ()
        options = RECIPES[recipe](rank)
        for _ in range(2):  # the first step runs a stage once more, to find the shapes
            blocks.zero_grad()
            losses: list[Tensor] = []
            before = cuseq.cache.stats()
            runner.step(*arguments, target=targets, losses=losses, **options)
            after = cuseq.cache.stats()
        results[name, recipe] = {
            "losses": [loss.item() for loss in losses],
            "gradients": distributed.gradients(blocks),
            "builds": (after["misses"] - before["misses"], after["hits"] - before["hits"]),
        }
    return results


@pytest.fixture(scope="module")
def stages() -> list[dict]:
    return distributed.run(work)


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], list[Tensor]]:
    model = distributed.make_model(2 * BLOCKS)
    losses = []
    for row, target, lengths in zip(*rows_and_targets(), LENGTHS, strict=False):
        packed = cuseq.PackedLayout.from_lengths(lengths, ROW)
        loss = mse_loss(model(row[None], packed), target[None])
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    return losses, distributed.gradients(model)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["give_lengths", "give_layouts"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_its_layout(schedule, recipe, stages, one_process):
    first, last = (results[schedule, recipe] for results in stages)
    assert last["losses"] == pytest.approx(one_process[0], rel=1e-12)
    torch.testing.assert_close(first["gradients"] + last["gradients"], one_process[1])
    # A layout that outlives the step, such as one from a list, is built only in the first step.
    builds = MICRO_BATCHES if recipe == "give_lengths" else 0
    calls = 2 * BLOCKS * MICRO_BATCHES  # forward and recompute
    for stage in (first, last):
        assert stage["builds"] == (builds, calls - builds)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_without_its_layout_shows(schedule, stages, one_process):
    losses = stages[1][schedule, "give_the_first_alone"]["losses"]
    wrong = [loss != pytest.approx(right) for loss, right in zip(losses, one_process[0])]
    one_document = [lengths == [ROW] for lengths in LENGTHS[:MICRO_BATCHES]]
    assert wrong == [not alone for alone in one_document]
