"""Test GraphedStep on several ranks: averages of gradients, and steps that all make alike."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from test_graphed_step import (
    BATCHES,
    MAX_SEQS,
    TOKENS,
    VOCABULARY,
    TinyModel,
    make_batch,
    make_loss,
    make_optimizer,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from cuseq import _C, GraphedStep, PackedLayout
from cuseq.distributed import cp_partition, cp_plan
from cuseq.graphs import ranks as graphed_ranks
from cuseq.graphs import step as graphed_step
from cuseq.graphs.batch import StaticBatch
from cuseq.layout import StaticLayout, needed_room

RANKS = 2
PLAIN = 2  # steps before a capture


class WithExperts(TinyModel):
    """A model of which a batch uses the expert that it names, and none uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # of another dtype

    def forward(self, input_ids, packed, expert: int):
        hidden = self.embedding(input_ids)
        return self.head(self.experts[expert](hidden) * self.scale.float())


def loss_of(model: nn.Module, batch: dict) -> torch.Tensor:
    device = next(model.parameters()).device
    given = {k: v.to(device) if hasattr(v, "to") else v for k, v in batch.items()}
    labels = given.pop("labels")
    return nn.functional.cross_entropy(model(**given), labels)


def batches_of(rank: int, steps: int, accumulation: int) -> list[list[dict]]:
    """Return each step's batches of a rank, with other lengths than those of the other rank."""
    lengths = ([20, 30], [1, 9, 54], [64], [5] * 8, [0, 63, 0], [33, 31])
    count = RANKS * accumulation
    return [
        [
            make_batch(lengths[(step * count + rank + n * RANKS) % 6], step * count + rank * 7 + n)
            for n in range(accumulation)
        ]
        for step in range(steps)
    ]


def one_process(
    model: nn.Module, steps: int, accumulation: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Train on the batches of all ranks; return the parameters, and the norm of the last step."""
    optimizer = sgd(model)
    of_ranks = [batches_of(rank, steps, accumulation) for rank in range(RANKS)]
    for of_step in zip(*of_ranks, strict=True):
        optimizer.zero_grad()
        for rank in of_step:
            for batch in rank:
                (loss_of(model, batch) / RANKS / accumulation).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], norm.cpu()


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer that feels the size of gradients, as Adam does not."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def made(seed: int = 0, kind: type[nn.Module] = TinyModel) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def many_steps(rank: int, kind: str, steps: int, accumulation: int, bucket: int) -> dict[str, Any]:
    graphed_ranks._BUCKET_BYTES = bucket
    device = torch.device(kind, rank if kind == "cuda" else None)
    model = made().to(device)
    step = GraphedStep(
        make_loss(model, accumulation), sgd(model), BATCHES[0],
        accumulation=accumulation, max_grad_norm=1.0, warmup=PLAIN,
    )  # fmt: skip
    losses = []
    for batches in batches_of(rank, steps, accumulation):
        losses.append(step(batches if accumulation > 1 else batches[0]))
    return {
        "losses": losses,
        "parameters": [p.detach().cpu() for p in model.parameters()],
        "norm": step.grad_norm.cpu(),
        "captured": step.captured,
        "reason": step.reason,
    }


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bucket", [1, 1 << 12, 1 << 30])
def test_ranks_learn_what_one_process_learns(accumulation, bucket):
    expected, norm = one_process(made(), 6, accumulation)
    for one in distributed.run(many_steps, "cpu", 6, accumulation, bucket):
        torch.testing.assert_close(one["parameters"], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["norm"], norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bucket", [1 << 12, 1 << 30])
def test_captured_ranks_learn_what_one_process_learns(accumulation, bucket, second_gpu):
    expected, norm = one_process(made().cuda(), 50, accumulation)
    found = distributed.run(many_steps, "cuda", 50, accumulation, bucket, backend="nccl", limit=300)
    for one in found:
        assert one["captured"], one["reason"]
        torch.testing.assert_close(one["parameters"], expected, rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(one["norm"], norm, rtol=2e-2, atol=0)
    assert found[0]["losses"] != found[1]["losses"]  # each has its own
    assert torch.equal(found[0]["norm"], found[1]["norm"])


# ------------------------------------------------------------------------ rows that ranks share

# Documents that fit on a rank, that are cut, that ranks with tail alone get; each needs other room.
SHARED_ROWS = (
    [30, 34, 40, 20],
    [128],
    [100, 9, 3],
    [3] * 20,
    [0, 70, 1],
    [64, 64],
    [16] * 8,
)


def shared_batches(policy: str) -> Iterator[tuple[PackedLayout, Any, Tensor]]:
    """Yield whole rows with their plans and tokens."""
    for seed in itertools.count():
        packed = PackedLayout.from_lengths(
            SHARED_ROWS[seed % len(SHARED_ROWS)],
            2 * TOKENS,
            max_seqs=20,
            segment_multiple=2 * RANKS if policy == "zigzag" else 1,
        )
        plan = cp_plan(packed, RANKS, policy=policy, heads=(2, 2), head_dim=16)
        numbers = torch.Generator().manual_seed(seed)
        yield packed, plan, torch.randint(VOCABULARY, (2 * TOKENS,), generator=numbers)


def shared_steps(
    rank: int, kind: str, policy: str, steps: int, accumulation: int
) -> dict[str, Any]:
    device = torch.device(kind, rank if kind == "cuda" else None)
    group = dist.new_group(backend="nccl" if kind == "cuda" else "gloo")
    model = made().to(device)

    def part(packed: PackedLayout, plan: Any, ids: Tensor) -> dict[str, Any]:
        local, own, labels = cp_partition(packed, plan, rank, ids, ids.roll(-1), group=group)
        return {"input_ids": own, "labels": labels, "packed": local}

    parts = (part(*row) for row in shared_batches(policy))
    example = next(parts)
    step = GraphedStep(
        make_loss(model, accumulation), sgd(model), example,
        accumulation=accumulation, max_grad_norm=1.0, warmup=PLAIN,
    )  # fmt: skip
    rooms = []
    for _ in range(steps):
        batches = [next(parts) for _ in range(accumulation)]
        step(batches if accumulation > 1 else batches[0])
        rooms.append(tuple(step._rooms))
    return {
        "parameters": [p.detach().cpu() for p in model.parameters()],
        "norm": step.grad_norm.cpu(),
        "captured": step.captured,
        "reason": step.reason,
        "rooms": rooms,
    }


def one_of_shared(
    model: nn.Module, policy: str, steps: int, accumulation: int
) -> tuple[list[Tensor], Tensor]:
    """Train on the whole rows; return the parameters, and the norm of the last step."""
    optimizer = sgd(model)
    rows = shared_batches(policy)
    next(rows)  # the example
    for _ in range(steps):
        optimizer.zero_grad()
        for packed, _, ids in itertools.islice(rows, accumulation):
            batch = {"input_ids": ids, "labels": ids.roll(-1), "packed": packed}
            (loss_of(model, batch) / accumulation).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], norm.cpu()


@pytest.mark.parametrize("policy", ["auto", "contiguous", "zigzag", "ulysses"])
def test_ranks_that_share_rows_learn_what_one_process_learns(policy):
    expected, norm = one_of_shared(made(), policy, 8, 2)
    for one in distributed.run(shared_steps, "cpu", policy, 8, 2):
        torch.testing.assert_close(one["parameters"], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["norm"], norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("policy", ["auto", "contiguous", "zigzag", "ulysses"])
def test_captured_ranks_that_share_rows(policy, accumulation, second_gpu):
    expected, norm = one_of_shared(made().cuda(), policy, 50, accumulation)
    found = distributed.run(
        shared_steps, "cuda", policy, 50, accumulation, backend="nccl", limit=300
    )
    assert found[0]["rooms"] == found[1]["rooms"]
    if policy != "ulysses" and accumulation == 1:
        assert len(set(found[0]["rooms"])) > 1  # captured anew on the way
    for one in found:
        assert one["captured"], one["reason"]
        torch.testing.assert_close(one["parameters"], expected, rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(one["norm"], norm, rtol=2e-2, atol=0)


def shares_apart(rank: int) -> str:
    packed, plan, ids = next(shared_batches("auto"))
    local, own, labels = cp_partition(packed, plan, rank, ids, ids)
    model = made()
    with pytest.raises(ValueError) as raised:
        GraphedStep(
            make_loss(model),
            sgd(model),
            {"input_ids": own, "labels": labels, "packed": local},
            group=False,
        )
    return str(raised.value)


def test_ranks_that_share_rows_must_step_together():
    for error in distributed.run(shares_apart):
        assert error.startswith(
            "group must contain the ranks that share example_batch's rows, [0, 1], got none"
        )


def fails_in_a_forward(rank: int) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = made()
    plain = make_loss(model)

    def loss_fn(batch):
        if rank == 1 and is_faulty:
            raise KeyError("a fault of rank 1")
        return plain(batch)

    def part(lengths: list[int]) -> dict[str, Any]:
        packed = PackedLayout.from_lengths(lengths, 2 * TOKENS, max_seqs=20)
        plan = cp_plan(packed, RANKS, heads=(2, 2), head_dim=16)
        ids = torch.zeros(2 * TOKENS, dtype=torch.int64)
        local, own = cp_partition(packed, plan, rank, ids, group=group)
        return {"input_ids": own, "labels": own, "packed": local}

    is_faulty = False
    step = GraphedStep(loss_fn, sgd(model), part([128]))
    step(part([100, 9, 3]))
    errors = []
    for is_faulty in (True, False):
        try:
            step(part([128]))
        except (RuntimeError, KeyError) as error:
            errors.append(str(error))
    return errors


def test_no_step_follows_an_exchange_that_a_rank_left():
    for errors in distributed.run(fails_in_a_forward):
        assert len(errors) == 2 and "this GraphedStep cannot go on" in errors[1]


def local_part(rank: int = 0, max_seqs: int = 20, cp_size: int = 2, window: int | None = None):
    packed = PackedLayout.from_lengths([100, 9, 3], 2 * TOKENS, max_seqs=max_seqs)
    return cp_partition(packed, cp_plan(packed, cp_size, window=window), rank)[0]


def test_parts_that_a_graph_cannot_take_are_refused():
    static = StaticBatch({"packed": local_part()}, torch.device("cpu"), "example_batch")
    static.check({"packed": local_part()}, "batch")
    for other, message in [
        (local_part(rank=1), "must have the same rank: 0, got 1"),
        (local_part(window=32), "must have the same window of the plan: 0, got 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            static.check({"packed": other}, "batch")
    message = r"2 \* max_seqs below its total_tokens / cp_size = 64, got room for 64 pieces"
    with pytest.raises(ValueError, match=message):
        StaticBatch({"packed": local_part(max_seqs=100)}, torch.device("cpu"), "example_batch")


def test_a_rank_that_shares_rows_with_none_needs_no_group():
    static = StaticBatch({"packed": local_part(cp_size=1)}, torch.device("cpu"), "example_batch")
    assert static.groups() == set()


def test_rows_take_no_more_room_than_they_can_have():
    """Ranks that share no rows agree on the largest rooms, of rows with another max_seqs."""
    small, large = local_part(max_seqs=4), local_part(max_seqs=30)
    static = StaticLayout.like(small, torch.device("cpu"))
    room = [max(pair) for pair in zip(needed_room(small), [8, 60, 60, 64, 64, 64], strict=True)]
    static.fit(room)
    most = small.part.source.most_room()
    numbers = static.part.meta.tolist()
    assert numbers[_C.RankMeta.NUM_CUT] == most[1] < large.part.source.most_room()[1]


# ------------------------------------------------------------------------- parameters without use


def experts(rank: int, bucket: int) -> dict[str, Any]:
    graphed_ranks._BUCKET_BYTES = bucket
    model = made(kind=WithExperts)
    optimizer = make_optimizer(model)
    step = GraphedStep(
        lambda batch: loss_of(model, batch), optimizer, BATCHES[0] | {"expert": rank}, warmup=1
    )
    for _ in range(3):
        step(BATCHES[rank] | {"expert": rank})
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "with_state": [p in optimizer.state for p in model.parameters()],
    }


@pytest.mark.parametrize("bucket", [1, 1 << 12, 1 << 30])
def test_a_parameter_that_one_rank_alone_uses(bucket):
    """Its average has zeros of the others; one that no rank uses is left as it is."""
    model = made(kind=WithExperts)
    optimizer = make_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(model, BATCHES[rank] | {"expert": rank}) / RANKS).backward()
        optimizer.step()
    for one in distributed.run(experts, bucket):
        torch.testing.assert_close(
            one["parameters"], list(model.parameters()), rtol=1e-5, atol=1e-6
        )
        assert one["with_state"] == [p in optimizer.state for p in model.parameters()]


# -------------------------------------------------------------------------------- what is refused


def made_apart(rank: int, what: str) -> str:
    model = made(seed=rank if what == "weights" else 0)
    if what == "frozen" and rank == 1:
        model.head.bias.requires_grad_(False)
    options = {"warmup": 2 + rank} if what == "warmup" else {}
    with pytest.raises(ValueError) as raised:
        GraphedStep(make_loss(model), make_optimizer(model), BATCHES[0], **options)
    return str(raised.value)


@pytest.mark.parametrize(
    "what, message",
    [
        ("weights", "the values of parameter 0 must be the same on all ranks of group, got "),
        ("frozen", "shape, dtype and requires_grad of parameter 3 must be the same"),
        (
            "warmup",
            "warmup must be the same on all ranks of group, got 2 on rank 0 and 3 on rank 1",
        ),
    ],
)
def test_ranks_that_differ_are_refused_on_all(what, message):
    for error in distributed.run(made_apart, what):
        assert message in error


def one_fails(rank: int, where: str) -> tuple[str, str]:
    model = made()
    plain = make_loss(model)

    def loss_fn(batch):
        if where == "loss_fn" and rank == 1 and steps > 0:
            raise KeyError("a fault of rank 1")
        return plain(batch)

    steps = 0
    step = GraphedStep(loss_fn, make_optimizer(model), BATCHES[0])
    step(BATCHES[rank])
    steps = 1
    batch = BATCHES[0]
    if where == "batch" and rank == 1:
        batch = make_batch([64], max_seqs=MAX_SEQS + 1)
    if where == "masks" and rank == 1:
        StaticBatch.refill_block_masks = lambda self: {}["a fault of rank 1"]
    with pytest.raises((ValueError, RuntimeError, KeyError)) as raised:
        step(batch)
    result = type(raised.value).__name__, str(raised.value)
    step(BATCHES[rank]) if where == "batch" else None  # nothing was run, so they can go on
    return result


@pytest.mark.parametrize(
    "where, kind", [("batch", "ValueError"), ("loss_fn", "KeyError"), ("masks", "KeyError")]
)
def test_a_rank_that_raises_ends_the_step_of_the_others(where, kind):
    (other, message), (own, _) = distributed.run(one_fails, where)
    assert own == kind
    assert (other, "since rank 1 of its group raised" in message) == ("OtherRankRaised", True)


def two_fail(rank: int) -> list[str]:
    """Rank 0 raises after the others began; in the next step rank 1 has a batch of another form."""
    model = made()
    optimizer = sgd(model)

    def fault(*args):
        if is_faulty:
            raise MemoryError("of rank 0")

    is_faulty = rank == 0
    optimizer.register_step_pre_hook(fault)
    step = GraphedStep(make_loss(model), optimizer, BATCHES[0])
    errors = []
    batch = BATCHES[0]
    for batch in (batch, {"x": torch.ones(1)} if rank == 1 else batch, batch):
        try:
            step(batch)
        except (RuntimeError, MemoryError, ValueError, TypeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        is_faulty = False
    return errors


def test_all_ranks_learn_that_one_of_two_left_a_step_in_the_middle():
    for rank, errors in enumerate(distributed.run(two_fail, processes=3)):
        assert "this GraphedStep cannot go on" in errors[-1], (rank, errors)
    assert len(errors) == 2 and "of its group raised" in errors[0]


def cannot_go_on(rank: int, where: str) -> list[str]:
    """A rank raises after the others began; caught, no step may mix two steps' gradients."""
    graphed_ranks._BUCKET_BYTES = 1 << 30
    model = made()
    plain = make_loss(model)
    optimizer = sgd(model)

    def loss_fn(batch):
        loss = plain(batch)
        return loss.detach() if where == "backward" and is_faulty else loss

    def fault(*args):
        if is_faulty:
            raise MemoryError("of rank 1")

    is_faulty = False
    optimizer.register_step_pre_hook(fault if where == "optimizer" else lambda *args: None)
    step = GraphedStep(loss_fn, optimizer, BATCHES[0])
    step(BATCHES[rank])
    errors = []
    for is_faulty in (rank == 1, False, False):
        try:
            step(BATCHES[rank])
        except (RuntimeError, MemoryError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    again = GraphedStep(loss_fn, optimizer, BATCHES[0]) if where == "backward" else None
    if again is not None:  # the weights are still the same
        again(BATCHES[rank])
        errors += [str(p.detach().sum()) for p in model.parameters()]
    return errors


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_no_step_follows_one_that_a_rank_left_in_the_middle(where):
    first, second = distributed.run(cannot_go_on, where)
    own = "MemoryError: of rank 1" if where == "optimizer" else "RuntimeError: element 0 of tensors"
    assert second[0].startswith(own)
    later = second[1:3]
    others = first[:2] if where == "optimizer" else first[1:3]
    assert all("this GraphedStep cannot go on" in error for error in later)
    assert "rank 1 of its group raised" in first[0] and "cannot go on" in others[1]
    assert first[3:] == second[3:]


def differs(rank: int, what: str) -> str:
    model = made()
    optimizer = sgd(model)
    if what == "ddp":
        loss_fn = make_loss(nn.parallel.DistributedDataParallel(model))
    else:
        loss_fn = make_loss(model)
    if what == "rate" and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2
    if what == "base":
        model.head.weight.requires_grad_(False)
        model.head.weight.data += rank
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError) as raised:
        step = GraphedStep(loss_fn, optimizer, BATCHES[0], model=model)
        step(BATCHES[rank])
        if what == "frozen" and rank == 1:
            model.head.bias.requires_grad_(False)
        step(BATCHES[rank])
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rate", "options must be the same on all ranks of group, got [{'lr': 0.1"),
        ("base", "the values of parameter 3 must be the same"),
        ("frozen", "the parameters that require gradients must be the same on all ranks"),
        ("ddp", "loss_fn must call the model itself, got a DistributedDataParallel"),
    ],
)
def test_what_would_let_ranks_drift_apart_is_refused(what, message):
    for error in distributed.run(differs, what):
        assert message in error


def mixed(rank: int) -> str:
    model = made()
    fully_shard(model.qkv, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError) as raised:
        GraphedStep(make_loss(model), sgd(model), BATCHES[0], model=model)
    return str(raised.value)


def test_parameters_of_which_some_are_sharded_are_refused():
    for error in distributed.run(mixed):
        assert error == (
            "optimizer must have parameters that are all sharded or all whole, got 1 of 4 sharded"
        )


def one_dies(rank: int) -> str:
    model = made()
    step = GraphedStep(make_loss(model), make_optimizer(model), BATCHES[0])
    step(BATCHES[0])
    if rank == 1:
        torch.save("gone", f"{os.environ['RESULTS']}/1.result")
        os._exit(0)
    with pytest.raises(RuntimeError, match="a rank of this GraphedStep's group is gone") as raised:
        step(BATCHES[0])
        step(BATCHES[0])
    return str(raised.value)


def test_a_rank_that_died_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    with pytest.raises(FileNotFoundError):  # of rank 1; rank 0 came to its end
        distributed.run(one_dies, limit=60)


def reentrant(rank: int) -> str:
    model = made()
    shared = nn.Linear(32, 32)

    def loss_fn(batch):
        hidden = model.embedding(batch["input_ids"])
        for _ in range(2):
            hidden = checkpoint(shared, hidden, use_reentrant=True)
        return hidden.square().mean()

    optimizer = torch.optim.SGD([*model.parameters(), *shared.parameters()], lr=0.1)
    step = GraphedStep(loss_fn, optimizer, BATCHES[0])
    with pytest.raises(RuntimeError, match="use_reentrant=False") as raised:
        step(BATCHES[0])
    return str(raised.value)


def test_a_gradient_that_comes_twice_is_refused():
    distributed.run(reentrant)


def alone(rank: int, group: bool) -> list[torch.Tensor]:
    mine = dist.new_subgroups(group_size=1)[0] if group else False
    model = made(seed=rank)
    step = GraphedStep(make_loss(model), make_optimizer(model), BATCHES[0], group=mine)
    step(BATCHES[rank])
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("group", [True, False])
def test_a_group_of_one_averages_nothing(group):
    for rank, parameters in enumerate(distributed.run(alone, group)):
        model = made(seed=rank)
        optimizer = make_optimizer(model)
        make_loss(model)(BATCHES[rank]).backward()
        optimizer.step()
        assert all(map(torch.equal, parameters, model.parameters()))


def shards(rank: int) -> None:
    model = sharded(torch.device("cpu"), True, MixedPrecisionPolicy())
    optimizer = make_optimizer(model)
    obstacle = graphed_step._obstacle(optimizer, torch.device("cuda"), None)
    assert obstacle == (
        "the parameters are sharded, and model, the module that FSDP2 sharded, is not given"
    )
    assert graphed_step._obstacle(optimizer, torch.device("cuda"), model) is None
    groups = [group["params"] for group in optimizer.param_groups]
    known = _C.CapturedParameters(groups)
    assert known.are(groups)
    weight = groups[0][0]
    weight._local_tensor = weight._local_tensor.clone()
    assert not known.are(groups)


def test_shards_that_moved_are_noticed():
    distributed.run(shards)


def test_what_group_and_model_must_be():
    model = TinyModel()
    with pytest.raises(TypeError, match="model must be a torch.nn.Module or None, got 3"):
        GraphedStep(make_loss(model), make_optimizer(model), BATCHES[0], model=3)
    with pytest.raises(TypeError, match="group must be a ProcessGroup, None or False, got 'dp'"):
        GraphedStep(make_loss(model), make_optimizer(model), BATCHES[0], group="dp")


# ------------------------------------------------------------ captures, with a stand-in on the CPU


class Replays:
    """Stands in for a graph: a replay runs the plain step."""

    def __init__(self, step: GraphedStep):
        self._step, self.rooms = step, list(step._rooms)

    def is_of(self, optimizer: object) -> bool:
        return True

    def has_room(self, rooms: list[int]) -> bool:
        return rooms <= self.rooms

    def replay(self, optimizer: object) -> None:
        self.loss, self.grad_norm = self._step._plain_step(), self._step._grad_norm


def stood_in(rank: int, failing: bool) -> dict[str, Any]:
    captures = []

    def capture(self: GraphedStep) -> None:
        captures.append(list(self._rooms))
        if failing and rank == 1:
            self._give_up("a fault of the capture")
        else:
            self._graph = Replays(self)
        self._begin_to_agree(stale=False)()

    graphed_step._obstacle = lambda *_: None
    GraphedStep._capture = capture
    model = made()
    first = make_batch([64], max_seqs=40)
    step = GraphedStep(make_loss(model), make_optimizer(model), first, warmup=1)
    rows = [[64], [64], [32, 32], [1] * 20, [64]] if rank == 1 else [[64]] * 5
    warned = []
    for number, lengths in enumerate(rows):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(make_batch(lengths, max_seqs=40))
        warned += [(number, str(one.message)) for one in found if "GraphedStep" in str(one.message)]
    return {
        "warned": warned,
        "captures": captures,
        "captured": step.captured,
        "reason": step.reason,
        "parameters": [p.detach() for p in model.parameters()],
    }


def test_all_ranks_capture_anew_for_a_row_of_one():
    first, second = distributed.run(stood_in, False)
    assert first["captures"] == second["captures"] == [[8], [32]]
    assert first["warned"] == second["warned"]
    ((number, message),) = first["warned"]
    assert number == 3 and "captures anew" in message and "a row has more sequences" in message
    assert first["captured"] and second["captured"]
    assert all(map(torch.equal, first["parameters"], second["parameters"]))


def odd_sizes(rank: int, kind: str, accumulation: int) -> dict[str, Any]:
    """Train where two batches of rank 1 have other sizes than the rest; on a CPU with a stand-in
    for the graph.
    """

    def capture(self: GraphedStep) -> None:
        self._graph = Replays(self)
        self._begin_to_agree(stale=False)()

    graphs = Replays
    if kind == "cuda":
        graphs = graphed_step._Graph
    else:
        graphed_step._obstacle = lambda *_: None
        GraphedStep._capture = capture
    replayed: list[int] = []
    replay = graphs.replay

    def counted(self: Any, optimizer: object) -> None:
        replayed.append(number)
        replay(self, optimizer)

    graphs.replay = counted
    model = made().to(torch.device(kind, rank if kind == "cuda" else None))
    step = GraphedStep(
        make_loss(model, accumulation), sgd(model), BATCHES[0],
        accumulation=accumulation, warmup=1, max_grad_norm=1.0,
    )  # fmt: skip
    warned = []
    for number, batches in enumerate(odd_batches(rank, accumulation)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(batches if accumulation > 1 else batches[0])
        warned += [(number, str(one.message)) for one in found if "GraphedStep" in str(one.message)]
    return {
        "warned": warned,
        "replayed": replayed,
        "parameters": [p.detach().cpu() for p in model.parameters()],
    }


def odd_batches(rank: int, accumulation: int) -> list[list[dict]]:
    steps = batches_of(rank, 5, accumulation)
    if rank == 1:
        short = {"input_ids": torch.arange(20), "labels": torch.arange(20).roll(-1)}
        short["packed"] = PackedLayout.from_lengths([12, 8], max_seqs=MAX_SEQS)
        steps[2][-1] = short
        steps[4][0] = make_batch([3] * 20, max_seqs=40)  # more than there is capacity for
    return steps


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_another_size_is_a_plain_step_of_all_ranks(accumulation, kind, request):
    if kind == "cuda":
        request.getfixturevalue("second_gpu")
    model = made()
    optimizer = sgd(model)
    for batches in zip(*(odd_batches(rank, accumulation) for rank in range(RANKS)), strict=True):
        optimizer.zero_grad()
        for batch in itertools.chain(*batches):
            (loss_of(model, batch) / RANKS / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    backend = "nccl" if kind == "cuda" else "gloo"
    first, second = distributed.run(odd_sizes, kind, accumulation, backend=backend)
    tolerances = {"rtol": 2e-3, "atol": 2e-4} if kind == "cuda" else {"rtol": 1e-5, "atol": 1e-6}
    for one in (first, second):
        torch.testing.assert_close(one["parameters"], list(model.parameters()), **tolerances)
        assert one["replayed"] == [1, 3]
    assert [number for number, _ in first["warned"]] == [2, 4]
    assert "without its graph: a batch of rank 1 has another size" in first["warned"][0][1]
    name = "batch" if accumulation == 1 else "batch[1]"
    assert f"{name}['input_ids'] must be torch.int64 [64]" in second["warned"][0][1]
    assert "max_seqs: 8, got 40" in second["warned"][1][1]


def test_all_ranks_run_plain_steps_if_one_cannot_capture():
    first, second = distributed.run(stood_in, True)
    assert first["reason"] == "rank 1 runs plain steps: its reason says why"
    assert second["reason"] == "a fault of the capture"
    assert not first["captured"] and not second["captured"]
    assert all(map(torch.equal, first["parameters"], second["parameters"]))


# ---------------------------------------------------------------------------- captures, on two GPUs


def capture_that_fails(rank: int) -> dict[str, Any]:
    model = made().to(f"cuda:{rank}")
    plain = make_loss(model)
    reads: list[int] = []

    def loss_fn(batch):
        loss = plain(batch)
        if rank == 1 and torch.cuda.is_current_stream_capturing():
            reads.append(loss.item())
        return loss

    step = GraphedStep(loss_fn, make_optimizer(model), BATCHES[0], warmup=PLAIN)
    losses = [step(batch[0]) for batch in batches_of(rank, 6, 1)]
    return {
        "losses": losses,
        "reason": step.reason,
        "parameters": [p.detach().cpu() for p in model.parameters()],
    }


def test_a_capture_that_fails_on_one_gpu_leaves_plain_steps_on_all(second_gpu):
    first, second = distributed.run(capture_that_fails, backend="nccl", limit=120)
    assert "rank 1 of its group raised" in first["reason"]
    assert "cannot be captured" in second["reason"]
    assert all(map(torch.equal, first["parameters"], second["parameters"]))


def in_between(rank: int) -> dict[str, Any]:
    """Evaluate, load, change the optimizer, and meet rows with more sequences, between replays."""
    device = torch.device("cuda", rank)
    model = made().to(device)
    optimizer = make_optimizer(model)
    step = GraphedStep(make_loss(model), optimizer, make_batch([64], max_seqs=40), warmup=PLAIN)
    losses = []

    def steps(lengths: list[list[int]]) -> None:
        for number, one in enumerate(lengths):
            losses.append(step(make_batch(one, number, max_seqs=40)))

    steps([[64]] * 4)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with torch.no_grad():
        evaluated = loss_of(model, BATCHES[rank]).item()
    steps([[64]] * 2)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    with torch.no_grad():
        assert loss_of(model, BATCHES[rank]).item() == evaluated
    steps([[64]] * 2)
    again = losses[-2:], losses[-4:-2]
    steps([[32, 32], [2] * 30] if rank == 1 else [[64], [64]])
    group = optimizer.param_groups[0]
    group["weight_decay"] = 0.5
    steps([[64]])
    return {
        "again": again,
        "captured": step.captured,
        "parameters": [p.detach().cpu() for p in model.parameters()],
    }


def test_what_happens_between_replays_on_two_gpus(second_gpu):
    first, second = distributed.run(in_between, backend="cpu:gloo,cuda:nccl", limit=120)
    assert first["captured"] and second["captured"]
    torch.testing.assert_close(*first["again"], rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))


# --------------------------------------------------------------------------- sharded by FSDP2


def sharded(device: torch.device, reshard: bool, policy: MixedPrecisionPolicy) -> nn.Module:
    model = made().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model.qkv, model.head, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model


def sharded_steps(
    rank: int, kind: str, reshard: bool, accumulation: int, in_bf16: bool
) -> dict[str, Any]:
    """Make steps of a GraphedStep and of a plain loop over sharded models."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = bf16 if in_bf16 else MixedPrecisionPolicy()
    model, twin = (sharded(device, reshard, policy) for _ in range(2))
    step = GraphedStep(
        make_loss(model, accumulation), make_optimizer(model), BATCHES[0],
        accumulation=accumulation, max_grad_norm=1.0, warmup=PLAIN, model=model,
    )  # fmt: skip
    optimizer, loss_fn = make_optimizer(twin), make_loss(twin, accumulation)
    losses, expected = [], []
    for number, batches in enumerate(batches_of(rank, 20, accumulation)):
        losses.append(step(batches if accumulation > 1 else batches[0]).float())
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = loss_fn({k: v.to(device) for k, v in batch.items()})
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        expected.append(total)
        if number % 5 == 4:  # evaluate between replays
            with torch.no_grad():
                mine, theirs = (loss_of(one, BATCHES[rank]) for one in (model, twin))
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
    for part in (model, twin):  # the last evaluation may have left it gathered
        part.reshard()
        part.qkv.reshard()
        part.head.reshard()
    return {
        "losses": (torch.stack(losses).cpu(), torch.stack(expected).cpu()),
        "parameters": [
            [distributed.whole(p).detach().cpu() for p in one.parameters()] for one in (model, twin)
        ],
        "norms": (step.grad_norm.cpu(), norm.full_tensor().cpu()),
        "captured": step.captured,
        "reason": step.reason,
    }


def check_sharded(found: list[dict[str, Any]], tolerance: float) -> None:
    for one in found:
        torch.testing.assert_close(*one["losses"], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(*one["norms"], rtol=10 * tolerance, atol=tolerance)
        torch.testing.assert_close(*one["parameters"], rtol=tolerance, atol=tolerance)
    assert not torch.equal(found[0]["losses"][0], found[1]["losses"][0])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sharded_ranks(accumulation):
    check_sharded(distributed.run(sharded_steps, "cpu", True, accumulation, False), 1e-5)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reshard", [False, True])
def test_captured_sharded_ranks(reshard, accumulation, in_bf16, second_gpu):
    given = ("cuda", reshard, accumulation, in_bf16)
    found = distributed.run(sharded_steps, *given, backend="cpu:gloo,cuda:nccl", limit=120)
    check_sharded(found, 2e-2 if in_bf16 else 1e-3)
    for one in found:
        assert one["captured"], one["reason"]


def told_to_gather(rank: int, frozen: bool) -> list[tuple[str, list[str]]]:
    """Return which units a GraphedStep tells what their backward gathers."""
    model = made()
    model.embedding.requires_grad_(not frozen)
    for part in (model.embedding, model.qkv, model.head, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)))
    names = {module: name for name, module in model.named_modules()}
    told = []

    def telling(self: Any, modules: list[Any]) -> None:
        told.append((names[self], [names[module] for module in modules]))

    trained = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_modules_to_backward_prefetch", telling)
        GraphedStep(make_loss(model), trained, BATCHES[0], model=model)
    return told


@pytest.mark.parametrize("frozen", [False, True])
def test_shards_are_gathered_where_a_backward_needs_them(frozen):
    """What else a backward would gather may overwrite weights (docs/many_gpus.md)."""
    told = [("embedding", ["embedding"]), *([("qkv", ["qkv"])] if frozen else [])]
    assert distributed.run(told_to_gather, frozen) == [told] * RANKS


def moved_shards(rank: int) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    model = sharded(device, False, MixedPrecisionPolicy())
    step = GraphedStep(
        make_loss(model), make_optimizer(model), BATCHES[0], warmup=PLAIN, model=model
    )
    for _ in range(4):
        step(BATCHES[rank])
    assert step.captured, step.reason
    kept = {n: v.clone() for n, v in model.state_dict().items()}
    again = step(BATCHES[rank])
    model.load_state_dict(kept)  # in place
    second = step(BATCHES[rank])
    return {"again": again.cpu(), "second": second.cpu(), "captured": step.captured}


def test_sharded_weights_are_loaded_between_replays(second_gpu):
    for one in distributed.run(moved_shards, backend="cpu:gloo,cuda:nccl", limit=120):
        torch.testing.assert_close(one["second"], one["again"], rtol=1e-5, atol=1e-6)
        assert one["captured"]
