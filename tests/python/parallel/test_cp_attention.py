"""Test attention over parts of a row, over gloo, against one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import distributed
import pytest
import torch
import torch.distributed as dist
from cp_cases import Case, check, drawn
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cuseq
from cuseq import _C, PackedLayout, PackingCollator
from cuseq.distributed import ContextParallel, cp_join, cp_partition, cp_plan

META = _C.RankMeta
POLICIES = ("auto", "contiguous", "zigzag", "ulysses")
Group = dist.ProcessGroup

# Rows with one property each, which drawn rows may miss.
EDGES = [
    Case([1]),
    Case([0, 0], total=48),
    Case([500]),
    Case([500], policy="contiguous"),
    Case([9, 300, 2], total=600, policy="contiguous"),  # ranks with tail alone
    Case([13], total=24, policy="ulysses", heads=(24, 1)),
    # Padding between the documents: 61 + 11, 93 + 3, 5 + 7, 1 + 11, and a tail.
    Case([61, 0, 93, 5, 1], total=240, policy="ulysses", multiple=12, heads=(24, 24)),
    Case([61, 0, 93, 5, 1], 240, "ulysses", 12, (24, 1), sinks=True, tail=3),
    Case([61, 0, 93, 5, 1], 240, "ulysses", 12, (24, 24), causal=False, window=7),
    Case([61, 0, 93, 5, 1], 240, "ulysses", 12, (24, 24), spans=[(3, 61), (72, 165)]),
    Case([1, 1, 1], total=144, policy="ulysses", multiple=48, heads=(24, 24)),  # ranks of padding
    Case([61, 0, 93, 5, 1], total=240, multiple=12, sinks=True),
    Case([120] * 3, total=480, policy="zigzag", multiple=48, sinks=True),
    Case([200, 3, 3], max_far_rows=190),
    Case([300, 5], planned_window=7, window=7),
    Case([120] * 3, total=480, policy="zigzag", multiple=48),
    Case([500], heads=(4, 1), sinks=True),
    Case([500, 3], total=576, policy="zigzag", multiple=48),
    Case([400, 90, 1, 0, 60], total=600, tail=3),
    Case([240], policy="zigzag", multiple=48, window=100),
    Case([400, 90, 60], total=600, policy="contiguous", window=5),
    Case([400, 90, 60], total=600, policy="contiguous", window=350, softcap=2.0),
    # Ranks keep the few far rows for the backward.
    Case([27] * 39, total=1056, tail=5),
    Case([27] * 39, total=1056, sinks=True),
    Case([11] * 97, total=1080, policy="contiguous", heads=(4, 4)),
    Case([700, 300], total=1008, policy="contiguous", planned_window=5, window=3),
    # Rows that no vector of 16 bytes fits, and tensors that are views.
    Case([500], heads=(2, 1), value_dim=5),
    Case([500], heads=(3, 1), value_dim=7, strides="heads first"),
    Case([27] * 39, total=1056, strides="in wider rows"),
    Case([500, 40], total=576, strides="in wider rows"),
    Case([500, 40], total=576, strides="heads first"),
]


def groups_of(rank: int) -> dict[int, Group]:
    """Return the groups of the first 2, 3, ... ranks, up to all, of which this rank is one."""
    sizes = range(2, dist.get_world_size() + 1)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    return {size: group for size, group in groups.items() if rank < size}


def check_drawn_rows(groups: dict[int, Group], rows: int) -> None:
    for size, group in groups.items():
        for case in EDGES:
            check(case, group)
        for policy in POLICIES:
            for seed in range(rows):
                check(drawn(seed, size, policy), group)


def moved_bytes(call: Callable[[], object]) -> int | None:
    """Return the bytes that this rank gives to all-to-alls; None if it calls no collective."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        call()
    events = [event for event in recorded.events() if event.name.startswith("c10d::")]
    assert all(event.name == "c10d::alltoall_base_" for event in events), events
    sent = 0
    for event in events:
        rows, width = event.input_shapes[1]
        sent += rows * width * 8
    return sent if events else None


def check_what_moves(groups: dict[int, Group]) -> None:
    """Short documents move few keys, whole ones none; the process group is the witness."""
    group = groups[2]
    rank = dist.get_rank(group)

    def bytes_of(lengths: list[int], total: int) -> tuple[list[int | None], list[int]]:
        """Return the bytes sent forward and backward, and the share's numbers."""
        packed = PackedLayout.from_lengths(lengths, total)
        plan = cp_plan(packed, 2, heads=(4, 2))
        rows = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
        local, q, k = cp_partition(packed, plan, rank, rows, rows[:, :2].contiguous(), group=group)
        outputs = []
        forward = moved_bytes(lambda: outputs.append(cuseq.varlen_attention(q, k, k, local)))
        backward = moved_bytes(lambda: outputs[0].sum().backward())
        return [forward, backward], local.part.meta.tolist()

    assert bytes_of([20, 12, 20, 12], 64)[0] == [None, None]
    row = 2 * 2 * 8 * 8  # keys and values of a token
    sent, meta = bytes_of([27] * 39, 1054)  # one document is cut, and its few far rows are kept
    own, far = meta[META.NUM_SENT_ROWS], meta[META.NUM_FAR_ROWS]
    assert own + far in range(1, 27)
    assert meta[META.SAVES_FAR_ROWS] and sent == [own * row, far * row]
    sent, meta = bytes_of([500, 3], 504)  # the backward exchanges many again
    own, far = meta[META.NUM_SENT_ROWS], meta[META.NUM_FAR_ROWS]
    assert not meta[META.SAVES_FAR_ROWS] and sent == [own * row, (own + far) * row]


def check_documents_are_apart(groups: dict[int, Group]) -> None:
    """A changed document changes itself alone, on every rank, forward and backward."""
    for size, group in groups.items():
        rank = dist.get_rank(group)
        lengths = [70, 3, 41, 11, 1]
        for policy in ("auto", "contiguous", "ulysses"):
            packed = PackedLayout.from_lengths(lengths, 132)
            plan = cp_plan(packed, size, policy=policy, heads=(12, 12))
            tokens = plan.tokens_of(rank)

            def run(rows: Tensor, packed=packed, plan=plan, rank=rank, group=group) -> Tensor:
                local, own = cp_partition(packed, plan, rank, rows, group=group)
                own = own.detach().requires_grad_()
                out = cuseq.varlen_attention(own, own, own, local)
                out.square().sum().backward()
                return torch.stack([out.detach(), own.grad])

            rows = torch.randn(132, 12, 8, dtype=torch.float64, generator=seeded())
            before = run(rows)
            for number in range(len(lengths)):
                changed = rows.clone()
                mine = packed.seq_ids == number
                changed[mine] += 1
                after = run(changed)
                same = (before == after).flatten(2).all(-1).all(0)
                assert torch.equal(same, ~mine[tokens]), (policy, number)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Layer(nn.Module):
    """Two attentions of one input, one of them with a window."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(16, 32, dtype=torch.float64)
        self.kv = nn.Linear(16, 32, dtype=torch.float64).requires_grad_(not frozen)
        self.out = nn.Linear(64, 16, dtype=torch.float64)

    def forward(self, hidden: Tensor, packed: PackedLayout) -> Tensor:
        q = self.q(hidden).view(-1, 4, 8)
        k, v = self.kv(hidden).view(-1, 4, 8).chunk(2, 1)
        all_keys = cuseq.varlen_attention(q, k, v, packed)
        near = cuseq.varlen_attention(q, k, v, packed, window=5)
        return hidden + self.out(torch.cat([all_keys, near], 1).flatten(1))


class Layers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Layer(frozen=how == "frozen") for _ in range(2))

    def forward(self, hidden: Tensor, packed: PackedLayout) -> Tensor:
        for layer in self.layers:
            if self.how in ("reentrant", "non-reentrant"):
                hidden = checkpoint(layer, hidden, packed, use_reentrant=self.how == "reentrant")
            else:
                hidden = layer(hidden, packed)
        return hidden


def made(how: str) -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers(how)


def check_training(groups: dict[int, Group], how: str) -> None:
    """Accumulate the gradients of two micro-batches, both forwards before the backwards."""
    group = groups[2]
    rank = dist.get_rank(group)
    model, reference = made(how), made("plain")
    losses, expected = [], []
    for lengths in ([50, 9, 21], [3, 60, 17]):
        packed = PackedLayout.from_lengths(lengths, 84)
        rows = torch.randn(84, 16, dtype=torch.float64, generator=seeded(len(losses)))
        plan = cp_plan(packed, 2, policy="contiguous")
        local, own = cp_partition(packed, plan, rank, rows, group=group)
        own.requires_grad_(how == "reentrant")
        losses.append(model(own, local)[~local.moe_padding_mask].square().sum())
        expected.append(reference(rows, packed)[:80].square().sum())
    for loss in losses:
        loss.backward()
    sum(expected).backward()
    total = sum(loss.detach() for loss in losses)
    dist.all_reduce(total, group=group)
    assert_close(total, sum(expected).detach())
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if how == "frozen" and ".kv." in name:
            assert parameter.grad is None
            continue
        dist.all_reduce(parameter.grad, group=group)
        assert_close(parameter.grad, theirs[name].grad, msg=lambda text, name=name: name + text)


def check_a_collated_step(groups: dict[int, Group]) -> None:
    """Batches from the collator give the loss and the gradients of the whole row."""
    group = groups[2]
    cp = ContextParallel(group, policy="contiguous", heads=(4, 2))
    ids = torch.randint(0, 50, (110,), generator=seeded()).tolist()
    examples = [{"input_ids": ids[:70]}, {"input_ids": ids[70:75]}, {"input_ids": ids[75:]}]
    results = []
    for where in (cp, None):
        model = nn.ModuleList([nn.Embedding(50, 16, dtype=torch.float64), made("plain")])
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(50, 16, generator=seeded(1)))
        batch = PackingCollator(total_tokens=112, cp=where)(examples)
        hidden = model[1](model[0](batch["input_ids"][0]), batch["packed"])
        logits = hidden @ model[0].weight.t()
        if where is None:
            labels = cuseq.data.mask_boundary_labels(batch["labels"], batch["packed"])
            labels, logits = labels[0, 1:], logits[:-1]
            kept = (labels != -100).sum()
        else:
            labels, kept = batch["shift_labels"][0], cp.num_items([batch], group)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / kept
        loss.backward()
        results.append([loss.detach(), *distributed.gradients(model)])
    for tensor in results[0]:
        dist.all_reduce(tensor, group=group)
    assert_close(*results)


def check_autocast(groups: dict[int, Group]) -> None:
    group = groups[2]
    packed = PackedLayout.from_lengths([50, 9, 21])
    plan = cp_plan(packed, 2, policy="contiguous")
    rows = torch.randn(80, 2, 8, generator=seeded())
    local, own = cp_partition(packed, plan, dist.get_rank(group), rows, group=group)
    own.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = cuseq.varlen_attention(own, own, own, local)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert own.grad.dtype == torch.float32 and bool(own.grad.isfinite().all())


def check_bf16(groups: dict[int, Group]) -> None:
    """Gradients of keys from several ranks are added in fp32, and in one order."""
    for size, group in groups.items():
        packed = PackedLayout.from_lengths([200, 16], 216)
        plan = cp_plan(packed, size, policy="contiguous")
        rows = torch.randn(216, 2, 8, generator=seeded())

        def run(dtype: torch.dtype, layout: PackedLayout, own: Tensor) -> Tensor:
            leaves = [own.to(dtype).requires_grad_() for _ in range(3)]
            cuseq.varlen_attention(*leaves, layout).sum().backward()
            return torch.stack([leaf.grad.double() for leaf in leaves], 1)

        exact = run(torch.float64, packed, rows.bfloat16())
        one = run(torch.bfloat16, packed, rows)
        local, own, expected, alone = cp_partition(
            packed, plan, dist.get_rank(group), rows, exact, one, group=group
        )
        torch.use_deterministic_algorithms(True)
        try:
            found, again = (run(torch.bfloat16, local, own) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(found, again)
        # A far key's gradient is rounded once more, on its way.
        assert float((found - expected).norm()) < 2 * float((alone - expected).norm())


def check_a_rank_without_a_loss(groups: dict[int, Group]) -> None:
    """A rank whose output got no gradient still returns those of the keys that it needed."""
    group = groups[2]
    rank = dist.get_rank(group)
    packed = PackedLayout.from_lengths([40, 24])
    plan = cp_plan(packed, 2, policy="contiguous")

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    rows = torch.randn(64, 2, 8, dtype=torch.float64, generator=seeded())
    local, own = cp_partition(packed, plan, rank, rows, group=group)
    own.requires_grad_()
    out = cuseq.varlen_attention(own, own, own, local)
    (out if rank == 0 else NoGradient.apply(out)).sum().backward()
    whole = rows.clone().requires_grad_()
    mine = torch.zeros(64, 1, 1, dtype=torch.float64)
    mine[plan.tokens_of(0)] = 1
    (cuseq.varlen_attention(whole, whole, whole, packed) * mine).sum().backward()
    assert_close(own.grad, whole.grad[plan.tokens_of(rank)])


def check_one_graph(
    groups: dict[int, Group], packs: int, backend: str = "aot_eager", multiple: int = 1
) -> None:
    """Attention and its backward, compiled once, for every row and every plan.

    With a multiple, rows have padding between their documents and are dealt in their order.
    """
    group = groups[2]
    rank = dist.get_rank(group)
    counter = CompileCounterWithBackend(backend)

    def attend(q, k, packed, sinks):
        far = cuseq.varlen_attention(q, k, k, packed, sinks=sinks)
        return far + cuseq.varlen_attention(q, k, k, packed, window=4)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for number in range(packs):
        total = 96
        most = total - 6 * (multiple - 1)  # leaves room for the padding
        cuts = sorted(torch.randint(0, most, (number % 7,), generator=seeded(number)).tolist())
        lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        packed = PackedLayout.from_lengths(lengths, total, segment_multiple=multiple, max_seqs=8)
        policy = ("auto", "contiguous")[number % 2] if multiple == 1 else "ulysses"
        plan = cp_plan(packed, 2, policy=policy, heads=(4, 2))
        rows = torch.randn(total, 4, 8, dtype=torch.float64, generator=seeded(number))
        local, q, k = cp_partition(packed, plan, rank, rows, rows[:, :2].contiguous(), group=group)
        sinks = torch.zeros(4, dtype=torch.float64)
        results = []
        for function in (attend, compiled):
            leaves = [rows.detach().requires_grad_() for rows in (q, k, sinks)]
            out = function(leaves[0], leaves[1], local, leaves[2])
            out.square().sum().backward()
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        assert_close(*results)
    assert counter.frame_count == 1


def check_the_default_group(groups: dict[int, Group]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    packed = PackedLayout.from_lengths([90], 96)
    plan = cp_plan(packed, size, policy="contiguous")
    rows = torch.randn(96, 2, 8, dtype=torch.float64, generator=seeded())
    local, own = cp_partition(packed, plan, rank, rows)
    compiled = torch.compile(cuseq.varlen_attention, backend="aot_eager", fullgraph=True)
    outs = [function(own, own, own, local) for function in (cuseq.varlen_attention, compiled)]
    gathered = [torch.empty_like(outs[0]) for _ in range(size)]
    dist.all_gather(gathered, outs[0])
    joined = cp_join(packed, plan, torch.stack(gathered))
    assert_close(joined, cuseq.varlen_attention(rows, rows, rows, packed))
    assert torch.equal(*outs)


def check_refusals(groups: dict[int, Group]) -> None:
    """What no plan or group can serve is refused by every rank before anything moves."""
    group = groups[2]
    rank = dist.get_rank(group)
    packed = PackedLayout.from_lengths([50, 30])
    plan = cp_plan(packed, 2, policy="contiguous", window=9)
    rows = torch.randn(80, 2, 8)
    local, own = cp_partition(packed, plan, rank, rows, group=group)
    other, _ = cp_partition(packed, plan, 1 - rank, rows, group=group)
    lost, _ = cp_partition(packed, plan, rank, rows, group="of another run")
    spans = torch.tensor([[0, 4]], dtype=torch.int32)
    refused = [
        (local, {}, "window must be at most the plan's, 9, got None"),
        (local, {"window": 10}, "window must be at most the plan's, 9, got 10"),
        (local, {"window": 9, "causal": False}, "causal must be True.*ulysses"),
        (local, {"window": 9, "spans": spans}, "spans must be None.*ulysses"),
        (local, {"window": 9, "backend": "flex"}, "flex.*rank's part"),
        (other, {"window": 9}, f"part of this rank.*rank {rank} of 2, got the part of"),
        (lost, {"window": 9}, 'got "of another run", which is not known'),
    ]
    for layout, options, message in refused:
        with pytest.raises(ValueError, match=message):
            cuseq.varlen_attention(own, own, own, layout, **options)
    with pytest.raises(TypeError, match="spans must be an int32 tensor"):
        cuseq.varlen_attention(own, own, own, local, window=9, spans=[(0, 4)])
    plan = cp_plan(packed, 2, policy="ulysses")
    local, own = cp_partition(packed, plan, rank, torch.randn(80, 3, 8), group=group)
    with pytest.raises(ValueError, match="multiple of cp_size = 2 heads.*got 3 and 3"):
        cuseq.varlen_attention(own, own, own, local)


def check_flops(groups: dict[int, Group]) -> None:
    """Rank 0 holds 40 tokens of the first document, rank 1 its last 10 and the second one."""
    group = groups[2]
    rank = dist.get_rank(group)
    packed = PackedLayout.from_lengths([50, 30])
    plan = cp_plan(packed, 2, policy="contiguous")
    local, own = cp_partition(packed, plan, rank, torch.randn(80, 2, 8), group=group)
    with FlopCounterMode(display=False) as counter:
        cuseq.varlen_attention(own, own, own, local)
    pairs = (40 * 40, 10 * 50 + 30 * 30)[rank]
    assert counter.get_total_flops() == 2 * 2 * pairs * (8 + 8)


ON_ALL_RANKS = ("drawn rows", "documents are apart", "bf16")  # the others on ranks 0 and 1
CHECKS: dict[str, Callable[[dict[int, Group]], None]] = {
    "drawn rows": lambda groups: check_drawn_rows(groups, 12),
    "what moves": check_what_moves,
    "documents are apart": check_documents_are_apart,
    "plain training": lambda groups: check_training(groups, "plain"),
    "frozen keys": lambda groups: check_training(groups, "frozen"),
    "reentrant checkpoints": lambda groups: check_training(groups, "reentrant"),
    "non-reentrant checkpoints": lambda groups: check_training(groups, "non-reentrant"),
    "a collated step": check_a_collated_step,
    "bf16": check_bf16,
    "autocast": check_autocast,
    "a rank without a loss": check_a_rank_without_a_loss,
    "one graph": lambda groups: check_one_graph(groups, 30),
    "one graph, padded": lambda groups: check_one_graph(groups, 30, multiple=4),
    "flops": check_flops,
    "refusals": check_refusals,
}


def all_checks(rank: int) -> None:
    """Run every check on the ranks that it needs."""
    torch.manual_seed(0)
    groups = groups_of(rank)
    for name, run in CHECKS.items():
        if 2 in groups or name in ON_ALL_RANKS:
            run(groups)
    check_the_default_group(groups)


def one_rank() -> tuple[PackedLayout, Tensor, Tensor]:
    """Return the part of a rank that has the whole row, its rows and what they attend to."""
    packed = PackedLayout.from_lengths([5, 9, 2], 18)
    plan = cp_plan(packed, 1)
    rows = torch.randn(18, 2, 8, dtype=torch.float64)
    expected = cuseq.varlen_attention(rows, rows, rows, packed)
    return cp_partition(packed, plan, 0, rows, expected)


def test_a_plan_of_one_rank_needs_no_group():
    local, own, expected = one_rank()
    assert_close(cuseq.varlen_attention(own, own, own, local), expected)
    assert cuseq.attention_backend(own, own, own, local).name == "segments"


def test_a_plan_of_two_ranks_needs_a_group():
    packed = PackedLayout.from_lengths([9, 7])
    local, own = cp_partition(packed, cp_plan(packed, 2), 0, torch.randn(16, 2, 8))
    with pytest.raises(ValueError, match="needs a process group, got none: call .*init_process"):
        cuseq.varlen_attention(own, own, own, local)


@pytest.mark.parametrize("op", ["varlen_attention", "varlen_attention_backward"])
def test_opcheck_of_a_part(op):
    local, own, _ = one_rank()
    options = (local.cu_seqlens_static, local.host_meta, True, None, None, None, None, None, None)
    share = ("auto", local.part.rows, local.part.meta, "")
    leaf = own.detach().requires_grad_(op == "varlen_attention")
    rows = (leaf, leaf, leaf)
    if op == "varlen_attention_backward":
        out, logsumexp, far_rows = torch.ops.cuseq.varlen_attention(*rows, *options, *share)
        rows = (torch.ones_like(out), *rows, out, logsumexp, far_rows)
        for wrong in (None, far_rows[:-1], far_rows.float()):
            with pytest.raises(ValueError, match="far_rows must be what varlen_attention returned"):
                torch.ops.cuseq.varlen_attention_backward(*rows[:-1], wrong, *options, *share)
    torch.library.opcheck(getattr(torch.ops.cuseq, op), (*rows, *options, *share))


def test_one_rank_cannot_receive_rows():
    """There is no group to receive them from."""
    local, own, _ = one_rank()
    options = (local.cu_seqlens_static, local.host_meta, True, None, None, None, None, None, None)
    for any_far in (1, 2**31 - 1, -1):
        meta = local.part.meta.clone()
        meta[META.ANY_FAR] = any_far
        with pytest.raises(ValueError, match=f"got {any_far} for whether any of 1 ranks receives"):
            torch.ops.cuseq.varlen_attention(
                own, own, own, *options, "auto", local.part.rows, meta, ""
            )


@pytest.mark.slow
def test_four_processes_compute_what_one_does():
    """One group of processes for all checks: starting them costs more than the checks."""
    distributed.run(all_checks, processes=4, limit=240)


def many_rows(rank: int, sizes: tuple[int, ...], rows: int, packs: int) -> None:
    groups = groups_of(rank)
    check_drawn_rows({size: groups[size] for size in sizes if size in groups}, rows)
    if 2 in groups:
        check_one_graph(groups, packs)
        check_one_graph(groups, packs, "inductor")


@pytest.mark.full
@pytest.mark.slow
def test_hundreds_of_rows_on_up_to_eight_ranks():
    distributed.run(many_rows, (2, 3, 4, 8), 40, 300, processes=8, limit=1200)


def a_checked_plan(rank: int) -> list[str]:
    """Call with plans and shapes that differ between the ranks; return the messages."""
    packed = PackedLayout.from_lengths([50, 40])
    plan = cp_plan(packed, 3, policy="contiguous")
    rows = torch.randn(90, 2, 8)
    local, own = cp_partition(packed, plan, rank, rows)
    cuseq.varlen_attention(own, own, own, local)
    lengths = [50, 40] if rank != 1 else [40, 50]
    packed = PackedLayout.from_lengths(lengths)
    plan = cp_plan(packed, 3, policy="contiguous")
    (other,) = cp_partition(packed, plan, rank)
    wide = own if rank != 2 else own.double()
    messages = []
    for layout, tensor in ((other, own), (local, wide)):
        with pytest.raises(ValueError, match="all ranks must") as raised:
            cuseq.varlen_attention(tensor, tensor, tensor, layout)
        messages.append(str(raised.value))
    return messages


@pytest.mark.slow
def test_checked_ranks_with_another_plan_are_named(monkeypatch):
    monkeypatch.setenv("CUSEQ_CHECK", "1")
    for plans, calls in distributed.run(a_checked_plan, processes=3):
        assert "another plan on rank 1:" in plans
        assert calls.endswith("on rank 2")


def left_alone(rank: int, how: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    packed = PackedLayout.from_lengths([64])
    plan = cp_plan(packed, 2, policy="contiguous")
    local, own = cp_partition(packed, plan, rank, torch.randn(64, 2, 8), group=group)
    own.requires_grad_()
    out = cuseq.varlen_attention(own, own, own, local)
    if rank == 1 and how == "raises":
        with pytest.raises(ValueError, match="window must be None or at least 1"):
            cuseq.varlen_attention(own, own, own, local, window=0)
        time.sleep(20)  # alive, but in no collective
    assert rank == 0, "this rank dies"
    out.sum().backward()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"), [("raises", "timed out"), ("dies", "connection|timed out")]
)
def test_a_rank_that_fails_ends_the_others(how, message):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"(?si)rank 0: .*({message})"):
        distributed.run(left_alone, how)
    assert time.monotonic() - begin < 60


def trained(rank: int, cp_size: int, steps: int) -> list[float]:
    """Return the losses of a model that is trained on the same rows whatever the ranks."""
    model = made("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        lengths = torch.randint(1, 40, (5,), generator=seeded(step)).tolist()
        packed = PackedLayout.from_lengths(lengths, 208)
        rows = torch.randn(208, 16, dtype=torch.float64, generator=seeded(step))
        local, own = cp_partition(packed, cp_plan(packed, cp_size), rank, rows)
        kept = ~local.moe_padding_mask
        loss = (model(own, local)[kept] - own[kept].roll(1, 1)).square().sum() / sum(lengths)
        loss.backward()
        for tensor in (total := loss.detach(), *(p.grad for p in model.parameters())):
            if cp_size > 1:
                dist.all_reduce(tensor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


@pytest.mark.full
@pytest.mark.slow
def test_two_hundred_steps_are_those_of_one_process():
    expected = trained(0, 1, 200)
    assert expected[-1] < 0.5 * expected[0]
    for losses in distributed.run(trained, 2, 200, limit=600):
        assert_close(losses, expected, rtol=1e-8, atol=0)


def over_nccl(rank: int) -> None:
    """fp64 as over gloo; bf16 as one GPU, bit for bit, without a wait of the host."""
    groups = groups_of(rank)
    for case in EDGES:
        check(case, groups[2], "cuda")
    for policy in POLICIES:
        for seed in range(20):
            check(drawn(seed, 2, policy), groups[2], "cuda")
    packed = PackedLayout.from_lengths([3000, 350, 90, 1200, 7, 500], 5200).to("cuda")
    plan = cp_plan(packed, 2, policy="contiguous")
    rows = torch.randn(5200, 8, 64, generator=seeded()).to("cuda", torch.bfloat16)
    expected = cuseq.varlen_attention(rows, rows, rows, packed, backend="flash")
    local, own, expected = cp_partition(packed, plan, rank, rows, expected, group=groups[2])
    own.requires_grad_()

    def attend() -> Tensor:
        out = cuseq.varlen_attention(own, own, own, local, backend="flash")
        out.backward(out.detach())
        return out

    attend()  # loads the backends and makes the communicator
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.slow
def test_attention_over_nccl(second_gpu):
    distributed.run(over_nccl, backend="nccl", limit=300)
