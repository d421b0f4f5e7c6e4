"""Test GraphedStep: its plain path on every device, and its graph on a GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

import cuseq
from cuseq import _C, GraphedStep, PackedLayout
from cuseq.graphs import step as graphed_step
from cuseq.layout import StaticLayout

TOKENS, MAX_SEQS, VOCABULARY = 64, 8, 32
ROWS = ([20, 30], [1, 9, 54], [64], [5] * 8, [0, 63, 0], [33, 31])


class TinyModel(nn.Module):
    """One attention layer between an embedding and a head."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.qkv = nn.Linear(32, 96, bias=False)  # a bias of keys has no gradient but rounding
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, VOCABULARY)
        cos, sin = cuseq.rope_table(2 * TOKENS, 16)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, input_ids, packed):
        hidden = self.embedding(input_ids)
        q, k, v = self.qkv(hidden).view(-1, 3, 2, 16).unbind(1)
        q, k = cuseq.apply_rope(q, k, self.cos, self.sin, packed=packed)
        mixed = cuseq.varlen_attention(q, k, v, packed).flatten(1)
        return self.head(self.dropout(hidden + mixed))


def make_batch(lengths: list[int], seed: int = 0, max_seqs: int = MAX_SEQS) -> dict:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=numbers)
    packed = PackedLayout.from_lengths(lengths, TOKENS, max_seqs=max_seqs)
    return {"input_ids": ids, "labels": ids.roll(-1), "packed": packed}


BATCHES = [make_batch(lengths, seed) for seed, lengths in enumerate(ROWS)]


def make_loss(model: nn.Module, accumulation: int = 1):
    def loss_fn(batch):
        logits = model(batch["input_ids"], batch["packed"])
        return nn.functional.cross_entropy(logits, batch["labels"]) / accumulation

    return loss_fn


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def moved(batch: dict, device: torch.device) -> dict:
    return {name: value.to(device) for name, value in batch.items()}


def plain_loop(model, batches, *, accumulation=1, max_grad_norm=None, autocast=None, gamma=None):
    """Train as a user would without GraphedStep; return losses and norms."""
    optimizer, loss_fn = make_optimizer(model), make_loss(model, accumulation)
    scheduler = None if gamma is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    device = next(model.parameters()).device
    losses, norms = [], []
    for first in range(0, len(batches), accumulation):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in batches[first : first + accumulation]:
            with torch.autocast(device.type, autocast or torch.bfloat16, enabled=bool(autocast)):
                loss = loss_fn(moved(batch, device))
            loss.backward()
            total += loss.detach()
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses, norms


def graphed(model, *, gamma=None, accumulation=1, warmup=2, **options):
    """Return a GraphedStep over the model, its optimizer and its scheduler."""
    optimizer = make_optimizer(model)
    scheduler = None if gamma is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    step = GraphedStep(
        make_loss(model, accumulation),
        optimizer,
        BATCHES[0],
        scheduler=scheduler,
        accumulation=accumulation,
        warmup=warmup,
        **options,
    )
    return step, optimizer


def grouped(batches: list, accumulation: int) -> list:
    if accumulation == 1:
        return batches
    return [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]


OPTIONS = [
    {},
    {"max_grad_norm": 0.5},
    {"accumulation": 2},
    {"autocast": torch.bfloat16},
    {"gamma": 0.5, "max_grad_norm": 0.5, "accumulation": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_it_trains_as_a_plain_loop_does(options, device):
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    batches = BATCHES * 3
    expected, norms = plain_loop(twin, batches, **options)
    step, _ = graphed(model, **options)
    losses = []
    for number, batch in enumerate(grouped(batches, options.get("accumulation", 1))):
        losses.append(step(batch))
        if norms:
            torch.testing.assert_close(step.grad_norm, norms[number], rtol=1e-3, atol=1e-5)
    assert step.captured == (device.type == "cuda"), step.reason
    rounding = 2e-2 if "autocast" in options else 2e-4 if device.type == "cuda" else 0.0
    torch.testing.assert_close(losses, expected, rtol=rounding, atol=rounding)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rounding, atol=rounding)


def test_what_the_reason_says(device):
    step, _ = graphed(TinyModel().to(device))
    if device.type == "cpu":
        assert step.reason == "the parameters are on cpu, and CUDA graphs need a GPU"
    else:
        assert step.reason == "warming up: plain steps before the capture: 2"
    step(BATCHES[0])
    assert not step.captured
    assert step.grad_norm is None


def changed(**changes) -> dict:
    return BATCHES[1] | changes


def test_batches_of_another_form_are_refused_before_anything_runs(device):
    model = TinyModel().to(device)
    step, _ = graphed(model)
    before = copy.deepcopy(model.state_dict())
    ids = BATCHES[0]["input_ids"]
    wrong = [
        (changed(input_ids=ids[:-1]), r"batch\['input_ids'\] must be torch.int64 \[64\]"),
        (changed(labels=ids.int()), r"batch\['labels'\] must be torch.int64 \[64\] as in example"),
        (changed(labels=None), r"batch\['labels'\] must be a tensor"),
        (changed(packed=ids), r"batch\['packed'\] must be a PackedLayout"),
        (make_batch([64], max_seqs=9), r"batch\['packed'\] must be like .* max_seqs: 8, got 9"),
        (
            changed(more=1),
            r"structure of example_batch, \['input_ids'\], .* got \['input_ids'\], .*\['more'\]",
        ),
        (ids, r"the structure of example_batch, .*, got 1 values without names"),
    ]
    for batch, message in wrong:
        with pytest.raises(ValueError, match=message):
            step(batch)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    accumulating, _ = graphed(model, accumulation=2)
    for batch in (BATCHES[:1], BATCHES[0]):
        with pytest.raises(ValueError, match="a list of accumulation = 2 batches, got"):
            accumulating(batch)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_another_size_after_the_first_steps_is_a_plain_step(
    accumulation, device, monkeypatch
):
    """The message names what differs; before and after it the graph is replayed."""
    longer = {"input_ids": torch.arange(40) % VOCABULARY, "labels": torch.arange(40) % 7}
    longer["packed"] = PackedLayout.from_lengths([9, 30], 40, max_seqs=MAX_SEQS)
    batches = BATCHES * 3
    batches[9], batches[12] = longer, make_batch([5] * 12, max_seqs=12)
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    expected, norms = plain_loop(twin, batches, accumulation=accumulation, max_grad_norm=0.5)
    step, _ = graphed(model, accumulation=accumulation, max_grad_norm=0.5)
    is_on_gpu = device.type == "cuda"
    odd = {n // accumulation for n in (9, 12)} if is_on_gpu else set()
    names = ["batch", "batch"] if accumulation == 1 else [r"batch\[1\]", r"batch\[0\]"]
    whats = [r"\['input_ids'\] must be torch.int64 \[64\]", r"\['packed'\] .* max_seqs: 8, got 12"]
    says = [
        f"runs a step without its graph: {n}{what}" for n, what in zip(names, whats, strict=True)
    ]
    replayed = []
    replay = graphed_step._Graph.replay

    def counted(self, optimizer):
        replayed.append(number)
        replay(self, optimizer)

    monkeypatch.setattr(graphed_step._Graph, "replay", counted)
    losses, found_norms = [], []
    for number, batch in enumerate(grouped(batches, accumulation)):
        with pytest.warns(UserWarning, match=says.pop(0)) if number in odd else nullcontext():
            losses.append(step(batch))
        found_norms.append(step.grad_norm)
    rounding = 2e-4 if is_on_gpu else 0.0
    torch.testing.assert_close(losses, expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(found_norms, norms, rtol=1e-3, atol=1e-5)
    assert replayed == [n for n in range(2, len(losses)) if is_on_gpu and n not in odd]
    wrong = (changed(labels=BATCHES[0]["labels"].int()), changed(more=1))  # not their sizes alone
    for batch in wrong:
        with pytest.raises(ValueError, match="as in example|structure of example_batch"):
            step([batch] * accumulation if accumulation > 1 else batch)


def test_constants_must_stay(device):
    linear = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    example = {"x": torch.ones(2, 4), "scale": 2.0}
    step = GraphedStep(lambda b: linear(b["x"]).mean() * b["scale"], optimizer, example)
    step(example)
    with pytest.raises(ValueError, match=r"batch\['scale'\] must be 2.0 .* got 3.0"):
        step(example | {"scale": 3.0})


class Pair(NamedTuple):
    a: torch.Tensor
    b: Any


def test_mappings_inside_named_tuples_are_taken(device):
    linear = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.0, fused=True)
    batch = Pair(torch.ones(2, 4), BatchEncoding({"y": torch.zeros(2, 1)}))
    step = GraphedStep(lambda b: (linear(b.a) - b.b["y"]).square().mean(), optimizer, batch)
    torch.testing.assert_close(step(batch), step(batch))


def test_the_order_of_names_says_nothing(device):
    linear = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.0, fused=True)
    x, y = torch.ones(2, 4), {"b": torch.zeros(2, 1), "a": torch.full((2, 1), 3.0)}

    def loss_fn(batch):
        return (linear(batch["x"]) - batch["y"]["a"] + batch["y"]["b"]).square().mean()

    step = GraphedStep(loss_fn, optimizer, {"x": x, "y": y}, warmup=1)
    first = step({"x": x, "y": y})
    for _ in range(2):
        other_order = {"y": BatchEncoding({"a": y["a"], "b": y["b"]}), "x": x}
        torch.testing.assert_close(step(other_order), first)


def test_only_steps_that_can_be_captured_hide_lengths_from_the_host(device):
    """A layout that a graph refills follows other measurements than one of plain steps."""
    parameter = nn.Parameter(torch.ones(8, device=device))
    marks = []

    def loss_fn(batch):
        packed = batch["packed"]
        chunks = packed.chunked(3)
        marks.append([one.is_replayed for one in (packed, packed.segments, chunks)])
        loss = (packed.position_ids * parameter).sum()
        return loss if batch["captures"] or loss.item() > -1 else -loss

    def marks_of(captures, **options):
        batch = {"packed": PackedLayout.from_lengths([3, 2], 8, segment_multiple=2, max_seqs=4)}
        optimizer = torch.optim.SGD([parameter], lr=0.1, **options)
        step = GraphedStep(loss_fn, optimizer, batch | {"captures": captures}, warmup=1)
        marks.clear()
        for _ in range(3):
            step(batch | {"captures": captures})
        return [all(one) if any(one) else False for one in marks]

    on_gpu = device.type == "cuda"
    assert marks_of(True, fused=True) == ([True, True] if on_gpu else [False] * 3)
    assert marks_of(True, foreach=True) == [False] * 3
    if on_gpu:  # a plain step, a capture that fails, and plain steps instead
        assert marks_of(False, fused=True) == [True, True, False, False]


def test_wrong_arguments_are_named():
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters())
    default = PackedLayout.from_lengths([2, 3])

    def make(optimizer=optimizer, example=(), **options):
        return GraphedStep(lambda batch: None, optimizer, example, **options)

    with pytest.raises(
        ValueError, match=r"max_seqs below total_tokens = 5, its default, got 5: .*PackingColl"
    ):
        make(example={"packed": default})
    with pytest.raises(TypeError, match="loss_fn must be a function of a batch, got 3"):
        GraphedStep(3, optimizer, ())
    with pytest.raises(TypeError, match=r"scheduler must be a torch.optim.lr_scheduler.LRS.*got 1"):
        make(scheduler=1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="scheduler must step without a metric, got ReduceLROnP"):
        make(scheduler=plateau)
    for array in (np.ones(2), np.ones(())):
        with pytest.raises(
            TypeError, match=r"example_batch\['n'\] must be a tensor, .*got ndarray"
        ):
            make(example={"n": array})
    with pytest.raises(
        ValueError, match=r"example_batch\['x'\] must have values, got a tensor on m"
    ):
        make(example={"x": torch.ones(2, device="meta")})
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got"):
        make(optimizer=linear)
    with pytest.raises(ValueError, match=r"autocast must be torch.bfloat16 or None, got torch.fl"):
        make(autocast=torch.float16)
    with pytest.raises(ValueError, match="max_grad_norm must be above 0, got 0.0"):
        make(max_grad_norm=0)
    with pytest.raises(ValueError, match="accumulation must be at least 1, got 0"):
        make(accumulation=0)
    with pytest.raises(TypeError, match="warmup must be an int, got 'x'"):
        make(warmup="x")
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ValueError, match="on one device, got them on cpu, meta"):
        make(optimizer=torch.optim.SGD(parameters))


@pytest.mark.parametrize(
    "returned,error,message",
    [
        (None, TypeError, "loss_fn must return a tensor, got NoneType"),
        (0.5, TypeError, "loss_fn must return a tensor, got float"),
        (torch.ones(3), ValueError, r"loss_fn must return one value, got shape \[3\]"),
    ],
)
def test_what_is_not_a_loss_is_refused_before_the_optimizer_steps(returned, error, message):
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), weight_decay=1.0)
    before = copy.deepcopy(linear.state_dict())
    step = GraphedStep(lambda batch: returned, optimizer, ())
    with pytest.raises(error, match=message):
        step(())
    torch.testing.assert_close(linear.state_dict(), before, rtol=0, atol=0)


def test_an_error_leaves_parameters_as_they_are(device):
    model = TinyModel().to(device)
    optimizer = make_optimizer(model)
    loss_fn = make_loss(model)

    def fail(batch):
        loss_fn(batch)
        raise RuntimeError("out of luck")

    step = GraphedStep(fail, optimizer, BATCHES[0], warmup=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of luck"):
        step(BATCHES[0])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_state_dicts_and_resuming(device):
    """A run that is saved and resumed in the middle equals one that is not."""
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    step, optimizer = graphed(model)
    for batch in BATCHES:
        step(batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["capturable"] is False
    with torch.no_grad():
        model.eval()(BATCHES[0]["input_ids"].to(device), BATCHES[0]["packed"].to(device))
        model.train()
    twin_step, twin_optimizer = graphed(twin)
    for batch in BATCHES[:3]:
        twin_step(batch)  # captured on a GPU; what it learned is replaced
    twin.load_state_dict(saved[0])
    twin_optimizer.load_state_dict(saved[1])
    for batch in BATCHES:
        torch.testing.assert_close(twin_step(batch), step(batch), rtol=1e-4, atol=1e-5)
    assert twin_step.captured == (device.type == "cuda"), twin_step.reason


def test_frozen_parameters_and_options_changed_in_between(device):
    model = TinyModel().to(device)
    step, optimizer = graphed(model)
    for batch in BATCHES[:4]:
        step(batch)
    model.embedding.requires_grad_(False)
    frozen = model.embedding.weight.clone()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    head = model.head.weight.detach().clone()
    says = "captures anew, .*: the optimizer's options, state or parameters changed"
    with pytest.warns(UserWarning, match=says) if device.type == "cuda" else nullcontext():
        step(BATCHES[4])
    assert torch.equal(model.embedding.weight, frozen)
    assert not torch.equal(model.head.weight, head)
    assert step.captured == (device.type == "cuda"), step.reason


def test_dropout_draws_new_numbers_in_each_replay(cuda):
    model = TinyModel(dropout=0.5).to(cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    step = GraphedStep(make_loss(model), optimizer, BATCHES[0], warmup=1)
    losses = {step(BATCHES[0]).item() for _ in range(6)}
    assert step.captured, step.reason
    assert len(losses) == 6


def test_replays_of_deterministic_kernels_are_bit_equal(cuda):
    """The steps beside are the plain ones of another GraphedStep, over the same static batch."""
    losses, weights = [], []
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # cuBLAS may ask for a setting of its own
    try:
        for warmup in (2, 1000):
            torch.manual_seed(0)
            model = TinyModel().to(cuda)
            step, _ = graphed(model, warmup=warmup, max_grad_norm=0.5)
            losses.append(torch.stack([step(batch).clone() for batch in BATCHES * 4]))
            weights.append([weight.detach() for weight in model.parameters()])
            assert step.captured == (warmup == 2), step.reason
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*losses)
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, device):
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    expected, _ = plain_loop(twin, BATCHES)
    mixes = model.head.forward

    def recomputed(hidden):
        return checkpoint(mixes, hidden, use_reentrant=reentrant)

    model.head.forward = recomputed
    step, _ = graphed(model)
    losses = [step(batch) for batch in BATCHES]
    assert step.captured == (device.type == "cuda"), step.reason
    rounding = 1e-4 if device.type == "cuda" else 0.0
    torch.testing.assert_close(losses, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_the_dropout_of_its_forward_again(reentrant, cuda):
    """With x = weight * mask the gradient of x^2 / 2 is x * mask, if both masks are the same."""
    weight = nn.Parameter(torch.arange(1.0, 1001.0, device=cuda))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)

    def halves(weight):
        return nn.functional.dropout(weight, 0.5).square().sum() / 2

    step = GraphedStep(
        lambda batch: checkpoint(halves, weight, use_reentrant=reentrant),
        optimizer,
        BATCHES[0],
        warmup=1,
    )
    losses = []
    for _ in range(6):
        losses.append(step(BATCHES[0]).item())
        torch.testing.assert_close((weight.grad * weight).sum().item(), 2 * losses[-1])
    assert step.captured, step.reason
    assert len(set(losses)) == 6


def test_a_step_that_waits_for_the_gpu_says_so(cuda):
    model = TinyModel().to(cuda)
    loss_fn = make_loss(model)

    def waits(batch):
        loss = loss_fn(batch)
        return loss if loss.item() > 0 else loss * 2

    step = GraphedStep(waits, make_optimizer(model), BATCHES[0], warmup=1)
    losses = [step(BATCHES[0]).item() for _ in range(4)]
    assert not step.captured
    assert "cannot be captured" in step.reason
    assert "previous error" not in step.reason
    assert losses == sorted(losses, reverse=True)


def test_an_optimizer_that_decides_on_the_host_is_named(cuda):
    model = TinyModel().to(cuda)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=True)
    step = GraphedStep(make_loss(model), optimizer, BATCHES[0])
    step(BATCHES[0])
    assert "fused=True or capturable=True" in step.reason


def test_two_graphs_in_one_process(cuda):
    models = [TinyModel().to(cuda) for _ in range(2)]
    twins = copy.deepcopy(models)
    steps = [graphed(model)[0] for model in models]
    losses = [[step(batch) for step in steps] for batch in BATCHES]
    expected = [plain_loop(twin, BATCHES)[0] for twin in twins]
    for number, step in enumerate(steps):
        assert step.captured, step.reason
        mine = [pair[number] for pair in losses]
        torch.testing.assert_close(mine, expected[number], rtol=1e-3, atol=1e-4)


def test_a_region_of_autocast_around_all_steps_uses_the_weights_of_now(device):
    """A region casts each weight once; a step changes the weights."""
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    step, _ = graphed(model)
    expected, _ = plain_loop(twin, BATCHES, autocast=torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        losses = [step(batch) for batch in BATCHES]
    rounding = 2e-2 if device.type == "cuda" else 0.0
    torch.testing.assert_close(losses, expected, rtol=rounding, atol=rounding)


def test_a_learning_rate_in_a_tensor_is_followed(device):
    model = TinyModel().to(device)
    twin = copy.deepcopy(model)
    expected, _ = plain_loop(twin, BATCHES, gamma=0.5)
    rate = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=device.type == "cuda")
    step = GraphedStep(make_loss(model), optimizer, BATCHES[0], warmup=2)
    losses = []
    for batch in BATCHES:
        losses.append(step(batch))
        rate.mul_(0.5)  # in place, as schedulers change such a rate
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert step.captured == (device.type == "cuda"), step.reason


def test_after_a_capture_that_failed_everything_works(cuda):
    model = TinyModel(dropout=0.5).to(cuda)
    loss_fn = make_loss(model)

    def waits(batch):
        loss = loss_fn(batch)
        loss.item()
        return loss

    step = GraphedStep(waits, make_optimizer(model), BATCHES[0], warmup=1)
    stream = torch.cuda.current_stream()
    losses = {step(BATCHES[0]).item() for _ in range(4)}
    assert "cannot be captured" in step.reason
    assert len(losses) == 4  # dropout draws on
    assert torch.cuda.current_stream() == stream
    other = TinyModel(dropout=0.5).to(cuda)
    captured, _ = graphed(other)
    for batch in BATCHES:
        captured(batch)
    assert captured.captured, captured.reason


FIFTY_PACKS = """
import copy, random, sys
sys.path.insert(0, {folder!r})
import torch
import test_graphed_step as own

device, drawn = torch.device("{device}"), random.Random(0)

def lengths():
    left, found = own.TOKENS, []
    while left > 0 and len(found) < own.MAX_SEQS:
        found.append(drawn.randint(0, left))
        left -= found[-1]
    return found

batches = [own.make_batch(lengths(), seed) for seed in range(50)]
model = own.TinyModel().to(device)
twin = copy.deepcopy(model)
expected, _ = own.plain_loop(twin, batches)
step, _ = own.graphed(model)
losses = []
for batch in batches:
    for static in step._batches:
        packed = static.value["packed"]
        values = static.value["input_ids"], static.value["labels"]
        for tensor in (*values, packed.position_ids, packed.cu_seqlens_static):
            tensor.data.fill_(-99)  # not counted as an edit
    losses.append(step(batch))
assert step.captured == (device.type == "cuda"), step.reason
rounding = 1e-3 if device.type == "cuda" else 0.0
torch.testing.assert_close(losses, expected, rtol=rounding, atol=rounding)
rounding *= 10  # AdamW's first steps turn the noise of a small gradient into whole steps
torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=rounding, atol=rounding)
"""


def test_fifty_packs_with_poisoned_static_tensors_and_the_check(device, run_python):
    code = FIFTY_PACKS.format(device=device, folder=str(Path(__file__).parent))
    done = run_python(code, CUSEQ_CHECK="1")
    assert done.returncode == 0, done.stderr


def test_steps_on_a_side_stream(cuda):
    model = TinyModel().to(cuda)
    twin = copy.deepcopy(model)
    expected, _ = plain_loop(twin, BATCHES)
    torch.cuda.synchronize()
    step, _ = graphed(model)
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        losses = [step(batch) for batch in BATCHES]
        assert step.captured, step.reason
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)


def test_replays_take_no_more_memory(cuda):
    step, _ = graphed(TinyModel().to(cuda))
    for batch in BATCHES:
        step(batch)
    assert step.captured, step.reason
    torch.cuda.synchronize(cuda)
    allocated = torch.cuda.memory_allocated(cuda)
    for batch in BATCHES * 5:
        step(batch)
    torch.cuda.synchronize(cuda)
    assert torch.cuda.memory_allocated(cuda) <= allocated


GROWING = [[30, 34], [60], [1] * 9, [2, 3], [2] * 20, [7] * 9, [1] * 40]
ROOMS = [8, 8, 16, 16, 32, 32, 40]  # of each row's graph; the offsets have room for 40


def growing_batches() -> list[dict]:
    return [make_batch(lengths, seed, max_seqs=40) for seed, lengths in enumerate(GROWING)]


def test_a_graph_has_room_for_the_most_sequences_so_far(monkeypatch):
    """Without a GPU: what would be captured, and when."""

    class Graph:
        def __init__(self, room: int):
            self.room, self.loss, self.grad_norm = room, torch.zeros(()), None

        def is_of(self, optimizer: object) -> bool:
            return True

        def has_room(self, rooms: list[int]) -> bool:
            return rooms <= [self.room]

        def replay(self, optimizer: object) -> None:
            replayed.append(self.room)

    def capture(self: GraphedStep) -> None:
        (batch,) = self._batches
        with batch.captured_for(self._rooms):
            room = batch.value["packed"].host_meta[_C.HostMeta.NUM_SEQS].item()
        self._graph = Graph(room)

    replayed: list[int] = []
    monkeypatch.setattr(graphed_step, "_obstacle", lambda *_: None)
    monkeypatch.setattr(GraphedStep, "_capture", capture)
    first, *rest = growing_batches()
    model = TinyModel()
    step = GraphedStep(make_loss(model), make_optimizer(model), first, warmup=1)
    for batch in (first, first, *rest):
        step(batch)
    assert replayed == ROOMS


def test_what_is_expected_of_rows_stays(device):
    """So that recomputed forwards, and steps of longer rows, choose the attention of the first."""
    model = TinyModel().to(device)
    seen = []

    def forward(hidden, packed):
        seen.append(packed.expected_sequences)
        return model(hidden, packed)

    def loss_fn(batch):
        logits = checkpoint(forward, batch["input_ids"], batch["packed"], use_reentrant=False)
        return nn.functional.cross_entropy(logits, batch["labels"])

    batches = growing_batches()
    step = GraphedStep(loss_fn, make_optimizer(model), batches[0], warmup=2)
    for batch in batches:
        step(batch)
    assert set(seen) == {8} and len(seen) >= 4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_replay_attends_over_the_promised_sequences(compiled, cuda, monkeypatch):
    """With a count that is wrong on purpose, later sequences get no attention and no gradient."""
    monkeypatch.setattr(graphed_step.StaticBatch, "needed_rooms", lambda self, *_: [8])
    packed = PackedLayout.from_lengths([4] * 12, TOKENS, max_seqs=40)
    weight = nn.Parameter(torch.randn(TOKENS, 2, 64, device=cuda, dtype=torch.bfloat16))
    out = torch.zeros(TOKENS, 2, 64, device=cuda, dtype=torch.bfloat16)

    def attend(rows, packed):
        return cuseq.varlen_attention(rows, rows, rows, packed, backend="flash")

    if compiled:
        attend = torch.compile(attend, fullgraph=True, dynamic=False)

    def loss_fn(batch):
        attended = attend(weight, batch["packed"])
        out.copy_(attended.detach())
        return attended.square().sum()

    step = GraphedStep(
        loss_fn, torch.optim.SGD([weight], lr=0.0, fused=True), {"packed": packed}, warmup=2
    )
    for _ in range(4):
        step({"packed": packed})
    assert step.captured, step.reason
    for rows in (out, weight.grad):
        assert rows[: 8 * 4].any(dim=2).all() and not rows[8 * 4 :].any()


def test_rows_of_more_sequences_are_captured_anew(cuda, monkeypatch):
    rooms = []
    capture = GraphedStep._capture
    monkeypatch.setattr(
        GraphedStep, "_capture", lambda self: (rooms.extend(self._rooms), capture(self))
    )
    batches = growing_batches()
    model = TinyModel().to(cuda)
    twin = copy.deepcopy(model)
    expected, _ = plain_loop(twin, [*batches, *batches])
    step = GraphedStep(make_loss(model), make_optimizer(model), batches[0], warmup=1)
    losses = []
    for number, batch in enumerate([*batches, *batches]):
        losses.append(step(batch))
        assert number == 0 or step.captured, step.reason
    assert rooms == [8, 16, 32, 64]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)


def large_batch(seed: int) -> dict:
    numbers = torch.Generator().manual_seed(seed)
    pixels = torch.randn(TOKENS, 1 << 13, generator=numbers)  # 2 MiB
    return make_batch(ROWS[seed % len(ROWS)], seed) | {"pixels": pixels.pin_memory()}


def test_large_tensors_arrive_while_the_step_before_runs(cuda):
    model = nn.Linear(1 << 13, 8).to(cuda)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1e-3, fused=True) for m in (model, twin))

    def loss_of(model, batch):
        return model(batch["pixels"]).square().mean()

    step = GraphedStep(lambda batch: loss_of(model, batch), optimizer, large_batch(0), warmup=1)
    for seed in range(12):
        torch.cuda._sleep(10**8)
        running = torch.cuda.Event()
        running.record()
        batch = large_batch(seed)
        (leaves,), _ = step._check([batch])
        step._batches[0].fill(leaves)
        (arrival,) = step._batches[0]._arrivals.values()
        with torch.cuda.stream(arrival._stream):
            arrived = arrival._tensor.to("cpu")
        assert seed == 0 or not running.query()
        assert torch.equal(arrived, batch["pixels"])
        loss = step(batch)
        other.zero_grad()
        expected = loss_of(twin, moved(batch, cuda))
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    assert step.captured
    torch.testing.assert_close(
        list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("at_most, said", [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_a_promise_is_a_number_of_the_sequences_there_is_room_for(at_most, said):
    packed = PackedLayout.from_lengths([2, 3], segment_multiple=4, max_seqs=3)
    static = StaticLayout.like(packed, torch.device("cpu"))
    static.load(packed)  # which shares what is on the host
    chunks = static.chunked(2)
    layouts = (static, static.segments, chunks)
    slots = [_C.HostMeta.NUM_SEQS, _C.HostMeta.STATUS]
    before = [layout.host_meta for layout in (*layouts, packed)]
    values = [meta.tolist() for meta in before]
    with pytest.raises(KeyError), static.captured_for([at_most]):
        found = [layout.host_meta[slots].tolist() for layout in layouts]
        rooms = [said, 3, chunks.row.max_seqs]
        assert found == [[room, _C.HostMeta.OF_REPLAYS] for room in rooms]
        assert packed.host_meta.tolist() == values[-1]
        raise KeyError
    for layout, meta, value in zip((*layouts, packed), before, values, strict=True):
        assert layout.host_meta is meta and meta.tolist() == value


@pytest.mark.parametrize("padded", [False, True], ids=["real", "padded segments"])
def test_a_captured_call_attends_over_the_sequences_that_are_promised(padded, cuda):
    multiple = 32 if padded else 1
    packed = PackedLayout.from_lengths(
        [20, 30, 14], segment_multiple=multiple, max_seqs=6, device=cuda
    )
    shape = (packed.total_tokens, 2, 64)
    q, k, v = (torch.randn(shape, device=cuda, dtype=torch.bfloat16) for _ in "qkv")
    expected = cuseq.varlen_attention(q, k, v, packed)
    static = StaticLayout.like(packed, cuda)
    for promised, end in ((2, 64 if padded else 50), (3, packed.total_tokens)):
        graph = torch.cuda.CUDAGraph()
        with static.captured_for([promised]), torch.cuda.graph(graph):
            out = cuseq.varlen_attention(q, k, v, static, backend="flash")
        graph.replay()
        torch.testing.assert_close(out[:end], expected[:end], rtol=2e-2, atol=2e-2)
        assert not out[end:].any()  # a promise that is broken shows


def test_a_graphed_callable_holds_its_layout(cuda):
    """`make_graphed_callables` takes tensors alone; `copy_` brings in the other packs."""
    packed = PackedLayout.from_lengths(ROWS[0], TOKENS, max_seqs=MAX_SEQS).to(cuda)
    rows = [torch.randn(TOKENS, 2, 64, device=cuda, dtype=torch.bfloat16) for _ in range(3)]
    rows = [row.requires_grad_() for row in rows]

    def attend(q, k, v):
        return cuseq.varlen_attention(q, k, v, packed)

    run = torch.cuda.make_graphed_callables(attend, tuple(rows))
    for batch in BATCHES:
        packed.copy_(batch["packed"].to(cuda))
        found = torch.autograd.grad(run(*rows).square().sum(), rows)
        one = cuseq.varlen_attention(*rows, batch["packed"].to(cuda))
        expected = torch.autograd.grad(one.square().sum(), rows)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_captured_parameters_are_known_by_their_memory():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    first.grad = gradient = torch.zeros(2)
    captured = _C.CapturedParameters([[first], [second]])
    assert captured.are([[first], [second]])
    assert not captured.are([[second], [first]])
    assert not captured.are([[first]])
    assert not captured.are([[first], [second, first]])
    first.grad, second.grad = None, torch.zeros(3)
    captured.set_gradients([[first], [second]])
    assert first.grad is gradient and second.grad is None
    second.requires_grad_(False)
    assert not captured.are([[first], [second]])
    with pytest.raises(TypeError, match="groups must hold tensors, got int"):
        captured.are([[1]])
