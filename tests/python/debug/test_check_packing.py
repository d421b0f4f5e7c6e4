"""Test cuseq.check_packing: correct models pass, wrong ones are found and the cause is named."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiers import full
from torch import nn

import cuseq
from cuseq.debug.packing_check import PackingReport, check_packing
from cuseq.debug.packing_check._comparison import _default_rtol

VOCAB = 61
LENGTHS = [5, 1, 12, 2, 9]


def make_documents(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


DOCUMENTS = make_documents()


def failed(report: PackingReport) -> set[str]:
    return {check.name for check in report.checks.values() if not check.ok}


def assert_fine(report: PackingReport, unseen: set[str] = frozenset()) -> None:
    assert report.ok and report.suspect is None, str(report)
    assert "verdict: OK" in str(report)
    assert {check.name for check in report.checks.values() if check.value is None} == unseen


def assert_suspect(report: PackingReport, name: str, *words: str) -> None:
    assert not report.ok
    assert report.suspect is not None and report.suspect.name == name, str(report)
    table = str(report)
    assert f"verdict: WRONG ({name})" in table and "\nremedy: " in table
    for word in words:
        assert word in table


# ------------------------------------------------------------------------------ plain PyTorch


class SegmentSum(torch.autograd.Function):
    """Running sums of the tokens inside each document; the backward may ignore the documents."""

    @staticmethod
    def forward(ctx, x, seen, backward_leaks):
        ctx.seen = torch.ones_like(seen).tril() if backward_leaks else seen
        return seen @ x

    @staticmethod
    def backward(ctx, gradient):
        return ctx.seen.T @ gradient, None, None


class Summing(nn.Module):
    """Learned positions and sums over a document: small, exact, and wrong in any way requested."""

    def __init__(self, *wrong: str):
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.tokens = nn.Embedding(VOCAB, 16, dtype=torch.float64)
        self.places = nn.Embedding(64, 16, dtype=torch.float64)
        self.norm = nn.LayerNorm(16, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, VOCAB, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(1))
        self.kept = 0.0

    def forward(self, input_ids, labels=None, position_ids=None, packed=None):
        self.calls += 1
        flat = input_ids.flatten()
        places = torch.arange(len(flat), device=flat.device)
        if position_ids is not None and "positions" not in self.wrong:
            places = position_ids.flatten()
        x = self.norm(self.tokens(flat) + self.places(places))
        x = self.dropout(x) + (torch.randn_like(x) if "random" in self.wrong else 0)
        seen = torch.ones(len(flat), len(flat), dtype=x.dtype, device=x.device).tril()
        if packed is not None and "cumulative" not in self.wrong:
            ids = packed.to(flat.device).seq_ids
            seen = seen * (ids[:, None] == ids[None, :])
        x = SegmentSum.apply(x, seen, "backward" in self.wrong and packed is not None)
        if "scale" in self.wrong and packed is not None:
            x = x * 1.01
        one_bit = 1 + torch.finfo(x.dtype).eps
        if "place" in self.wrong:
            odd = torch.arange(len(flat), device=flat.device) % 2 == 1
            x = torch.where(odd[:, None], x * one_bit, x)
        if "longest" in self.wrong and packed is not None and packed.max_seqlen > max(LENGTHS):
            x = x * one_bit
        if "state" in self.wrong:
            x, self.kept = x + self.kept, self.kept + 1.0
        if "nan" in self.wrong and packed is not None:
            x = x * math.nan
        if "gradients" in self.wrong and packed is not None and x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        logits = self.head(x)[None]
        if labels is None:
            return SimpleNamespace(logits=logits)
        target = F.pad(labels.flatten()[1:], (0, 1), value=-100)
        reduction = "sum" if "sum" in self.wrong else "mean"
        loss = F.cross_entropy(logits[0], target, reduction=reduction)
        return SimpleNamespace(logits=logits, loss=loss)


def test_a_right_model_passes(device):
    report = check_packing(Summing().to(device), DOCUMENTS)
    assert_fine(report)
    assert report.checks["logits"].value < 1e-12 and report.checks["logits"].limit < 1e-7
    assert report.checks["leak forward"].value == report.checks["leak backward"].value == 0
    assert report.loss_packed == pytest.approx(report.loss_alone, rel=1e-12)


@pytest.mark.parametrize(
    "wrong, suspect, words, checks",
    [
        ("cumulative", "mixing", ["Summing itself", "leaks into"], {"leak forward", "logits"}),
        ("positions", "positions", ["document 1 and"], {"logits"}),
        ("backward", "backward", ["backward pass only"], {"leak backward", "gradients"}),
        ("scale", "logits", ["documents 0, 1, 2, 3, 4 differ"], {"logits"}),
        ("sum", "loss", ["mean over all targets"], {"loss"}),
        ("gradients", "gradients", ["most of all"], {"gradients", "gradients of embeddings"}),
        ("random", "repeat", ["differ by"], {"repeat"}),
        ("state", "repeat", ["state that the model keeps between calls"], {"repeat"}),
        ("nan", "not finite", ["not finite"], {"logits"}),
    ],
)
def test_a_wrong_model_is_named(wrong, suspect, words, checks, device):
    report = check_packing(Summing(wrong).to(device), DOCUMENTS)
    assert_suspect(report, suspect, *words)
    assert checks <= failed(report)
    if wrong == "backward":
        assert "leak forward" not in failed(report) and "logits" not in failed(report)


@pytest.mark.parametrize("source, token", [(4, -1), (0, 0)])
def test_a_leak_into_one_document_is_traced_to_both(source, token, device):
    class Copying(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, labels, position_ids, packed)
            if packed is not None:  # leak this token into document 2, and nothing else
                tokens = self.tokens(input_ids.flatten())
                output.logits[0, 9, 0] += 1e-12 * tokens[token, 0]
            return output

    report = check_packing(Copying().to(device), DOCUMENTS)
    assert_suspect(report, "mixing", f"document {source} leaks into document 2")
    assert failed(report) == {"leak forward", "leak backward"}, "nothing else could see so little"


class NaNBackward(torch.autograd.Function):
    """Gradients of document 0 turn those of document 2, and no others, into NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if gradient[:5].any() and not gradient[5:].any():
            gradient[7] = math.nan
        return gradient


def test_nan_stays_the_worst_leak(device):
    class NaNForward(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, labels, position_ids, packed)
            if packed is not None and int(input_ids[0, 0]) != DOCUMENTS[0][0]:
                output.logits[0, 7] = math.nan
            return output

    class Backward(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            x = self.tokens(input_ids.flatten())
            return SimpleNamespace(logits=self.head(x if packed is None else NaNBackward.apply(x)))

    report = check_packing(NaNForward().to(device), DOCUMENTS)
    assert_suspect(report, "mixing", "document 0 leaks into document 2")
    assert math.isnan(report.checks["leak forward"].value)
    report = check_packing(Backward().to(device), DOCUMENTS)
    assert_suspect(report, "backward", "document 2 leaks into document 0")
    assert math.isnan(report.checks["leak backward"].value)


@pytest.mark.parametrize("count, source, target", [(20, 2, 1), (17, 15, 14), (33, 1, 30)])
def test_a_leak_between_two_of_many_documents_is_found(count, source, target, device):
    class Copying(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, labels, position_ids, packed)
            if packed is not None:
                starts = packed.cu_seqlens.tolist()
                heard = self.tokens(input_ids.flatten())[starts[source], 0]
                output.logits[0, starts[target], 0] += 1e-12 * heard
            return output

    documents = make_documents([2, 3, 1, 2] * (count // 4) + [2] * (count % 4))
    report = check_packing(Copying().to(device), documents)
    assert_suspect(report, "mixing", f"document {source} leaks into document {target}")
    where = report.checks["leak forward"].where, report.checks["leak backward"].where
    assert where == (f"document {source} leaks into document {target}",) * 2
    assert failed(report) == {"leak forward", "leak backward"}


def test_a_leak_that_takes_several_documents(device):
    """The leak is the maximum of all embeddings, held by two documents; one cannot lower it."""

    class Largest(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, labels, position_ids, packed)
            if packed is not None:
                output.logits = output.logits + (input_ids == 60).any().detach()
            return output

    documents = make_documents([2] * 12)
    documents = [[min(token, 59) for token in document] for document in documents]
    documents[1][0] = documents[3][0] = 60
    report = check_packing(Largest().to(device), documents, rtol=10)
    assert_suspect(report, "mixing", "one of documents 1, 3, 5, 7, 9, 11 leaks into")


@pytest.mark.parametrize("ends", [(), (0,)])
def test_boundaries_in_the_tokens_stay(ends, device):
    """A model that tells documents apart by the token that each begins or ends with."""

    class Cutting(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            flat = input_ids.flatten().tolist()
            cuts = [i + len(ends) for i, token in enumerate(flat) if token == 0]
            cuts = sorted({0, *cuts, len(flat)})
            lengths = [end - start for start, end in zip(cuts, cuts[1:], strict=False)]
            packed = cuseq.PackedLayout.from_lengths(lengths).to(input_ids.device)
            return super().forward(input_ids, labels, packed.position_ids.long(), packed)

    documents = [[*(() if ends else (0,)), *document, *ends] for document in DOCUMENTS]
    assert_fine(check_packing(Cutting().to(device), documents))
    assert_fine(check_packing(Cutting().to(device), [*documents, [0]] * 3))
    # Another leak is still found, by changing the tokens beside the boundaries.
    report = check_packing(Summing("cumulative").to(device), documents)
    assert {"leak forward", "leak backward"} <= failed(report)
    # If all tokens are boundaries they are changed anyway.
    report = check_packing(Summing("cumulative").to(device), [[1, 2], [1, 2]])
    assert {"leak forward", "leak backward"} <= failed(report)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleDict({"memory": nn.GRU(16, 16, batch_first=True)})
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids, **ignored):
        return SimpleNamespace(logits=self.head(self.layers["memory"](self.embed(input_ids))[0]))


def test_a_state_that_leaks_is_named(device):
    report = check_packing(Recurrent().to(device), DOCUMENTS)
    assert_suspect(report, "state", "layers.memory (GRU)", "seq_ids")
    assert report.checks["leak backward"].value > 0


class Attending(nn.Module):
    """An attention of any class, without masks."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.inner = type(kind, (Averaging,), {})()
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids, **ignored):
        x = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(x + self.inner(x)))


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        return self.out(seen / seen.sum(-1, keepdim=True) @ x)


@pytest.mark.parametrize(
    "kind, suspect",
    [
        ("CrossMultiheadAttention", "attention"),
        ("SSM", "state"),
        ("GatedSsmBlock", "state"),
        ("My_ssm", "state"),
        ("LinearAttn", "state"),
        ("Block", "mixing"),
    ],
)
def test_what_a_class_is_called_tells_its_kind(kind, suspect, device):
    report = check_packing(Attending(kind).to(device), DOCUMENTS)
    assert_suspect(report, suspect, f"inner ({kind})")


def test_a_leak_in_front_of_weights_of_zero_is_named(device):
    """Projections initialised with zeros pass nothing on, but get a gradient."""
    model = Attending("Attention").to(device)
    nn.init.zeros_(model.inner.out.weight)
    report = check_packing(model, DOCUMENTS)
    assert failed(report) == {"gradients"}
    assert_suspect(report, "attention", "gradients differ", "inner (Attention)")


def test_padding_behind_the_tokens_of_a_forward(device):
    model = Recurrent().to(device)

    def padded(model, examples):
        ids = sum((example["input_ids"] for example in examples), [])
        return model(torch.tensor([[*ids, 0, 0, 0]], device=device)).logits

    def cut(model, examples):
        return padded(model, examples)[:, :-3]

    for forward in (padded, cut):
        report = check_packing(model, DOCUMENTS, forward=forward)
        assert_suspect(report, "state", "layers.memory (GRU)")


def test_any_loop_through_forward(device):
    model = Recurrent().to(device)

    def one_after_the_other(model, examples):
        ids = [torch.tensor(example["input_ids"], device=device) for example in examples]
        return torch.cat([model(part[None]).logits[0] for part in ids])

    def packed(model, examples):
        ids = torch.tensor(sum((example["input_ids"] for example in examples), []), device=device)
        return {"logits": model(ids[None]).logits}

    report = check_packing(model, DOCUMENTS, forward=one_after_the_other)
    assert report.ok
    assert report.checks["leak backward"].value is None, "no module ever sees the whole row"
    assert "not measured" in str(report)
    report = check_packing(model, DOCUMENTS, forward=packed)
    assert_suspect(report, "state", "layers.memory (GRU)")


def test_what_forward_may_return(device):
    model = Summing().to(device)
    layouts = {}

    def run(model, examples):
        batch = cuseq.PackingCollator(total_multiple=8)(examples)
        layouts[len(examples)] = batch["packed"]
        return model(**{k: v.to(device) for k, v in batch.items()})

    for wrap, unseen in (
        (lambda output: output, set()),
        (lambda output: output.logits, {"loss"}),
        (lambda output: output.logits[0], {"loss"}),
        (lambda output: (output.loss, output.logits), set()),
        (lambda output: (output.loss[None], output.logits), set()),
        (lambda output: (output.logits, output.loss[None, None]), set()),
        (lambda output: (output.loss[None, None], output.logits), set()),
        (lambda output: {"logits": output.logits, "loss": output.loss.expand(3)}, {"loss"}),
        (lambda output: vars(output), set()),
    ):
        report = check_packing(model, DOCUMENTS, forward=lambda m, e: wrap(run(m, e)))
        assert_fine(report, unseen)
    assert layouts.keys() == {1, len(DOCUMENTS)}
    with pytest.raises(ValueError, match="logits must have a row for each of the 29 tokens"):
        check_packing(model, DOCUMENTS, forward=lambda m, e: run(m, e).logits[:, :3])
    with pytest.raises(TypeError, match="must return logits"):
        check_packing(model, DOCUMENTS, forward=lambda m, e: None)


@pytest.mark.parametrize("wrong", ["place", "longest"])
def test_bits_that_depend_on_the_row_are_found(wrong, device):
    model = Summing(wrong).to(device)
    assert_fine(check_packing(model, DOCUMENTS))
    report = check_packing(model, DOCUMENTS, bitwise=True)
    assert failed(report) == {"bits"} and 0 < report.checks["bits"].value < 1e-14
    assert_suspect(report, "bits", "in a row of lengths", "docs/check.md")


class InOneOrder(nn.Linear):
    """A linear layer that adds the products of any row alike; those of MKL do not on all CPUs."""

    def forward(self, x):
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


def test_bits_of_a_right_model_pass(device):
    model = Summing()
    model.head = InOneOrder(16, VOCAB, dtype=torch.float64)
    report = check_packing(model.to(device), DOCUMENTS, bitwise=True)
    assert_fine(report)
    assert report.checks["bits"].value == 0


def test_bits_need_documents():
    with pytest.raises(ValueError, match="examples must be documents for bitwise=True, .* batch"):
        check_packing(Summing(), {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, bitwise=True)
    with pytest.raises(TypeError, match="bitwise must be True or False, got 1"):
        check_packing(Summing(), DOCUMENTS, bitwise=1)


# ------------------------------------------------------------------------------ collators


def crossing_labels(examples):
    batch = cuseq.PackingCollator()(examples)
    return batch | {"labels": batch["input_ids"]}


def padding_labels(examples):
    batch = cuseq.PackingCollator(total_multiple=8)(examples)
    last = batch["labels"].shape[1] - 1
    return batch | {"labels": batch["labels"].index_fill(1, torch.tensor([last]), 3)}


def running_positions(examples):
    batch = cuseq.PackingCollator()(examples)
    return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


def reversed_rows(examples):
    return cuseq.PackingCollator()(examples[::-1])


def padded_in_front(examples):
    """Put four pad tokens before each document, and count them in its length."""
    return cuseq.PackingCollator()([{"input_ids": [0] * 4 + e["input_ids"]} for e in examples])


@pytest.mark.parametrize(
    "collator, suspect, words",
    [
        (crossing_labels, "labels", ["targets across boundaries", "first label of document 1"]),
        (padding_labels, "labels", ["labels of padding are not -100"]),
        (running_positions, "positions", ["position_ids of document 1 start at 5"]),
        (reversed_rows, "tokens", ["but document 1 (1 tokens) is missing"]),
        (padded_in_front, "padding", ["padding leaks"]),
    ],
)
def test_a_wrong_collator_is_named(collator, suspect, words, device):
    assert_suspect(
        check_packing(Summing().to(device), DOCUMENTS, collator=collator), suspect, *words
    )


def test_labels_that_cross_are_seen_in_any_dtype(device):
    """However few labels cross: the mean over many targets changes by less than bf16 rounding."""
    documents = make_documents([40, 40, 40, 2])
    model = Summing().float().to(device)
    report = check_packing(model, documents, collator=crossing_labels, rtol=0.5)
    assert failed(report) == set()
    assert_suspect(report, "labels")


def shifted_labels(examples):
    batch = cuseq.PackingCollator(total_multiple=8)(examples)
    return batch | {"labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def without_labels(examples):
    batch = cuseq.PackingCollator()(examples)
    return {key: value for key, value in batch.items() if key != "labels"}


def own_labels(examples):
    return cuseq.PackingCollator()([{"input_ids": example["input_ids"]} for example in examples])


def test_labels_of_a_model_without_a_loss(device):
    class WithoutLoss(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            return super().forward(input_ids, None, position_ids, packed)

    model = WithoutLoss().to(device)
    for right in (None, cuseq.PackingCollator(total_tokens=48), shifted_labels, without_labels):
        report = check_packing(model, DOCUMENTS, collator=right)
        assert_fine(report, {"loss"})
        assert "the model returns none" in str(report)
    answers = [{"input_ids": ids, "labels": [-100] * 4 + ids[4:]} for ids in DOCUMENTS[::2]]
    for examples, wrong, words in (
        (DOCUMENTS, crossing_labels, "the first label of document 1 is"),
        (DOCUMENTS, padding_labels, "labels of padding are not -100"),
        (answers, own_labels, "labels of document 0 are not those of its example"),
    ):
        report = check_packing(model, examples, collator=wrong)
        assert_suspect(report, "labels", "the model returns no loss", words)
        assert failed(report) == {"labels"}


@pytest.mark.parametrize("collator", [None, cuseq.PackingCollator(total_tokens=48)])
def test_right_collators_and_labels(collator, device):
    examples = [
        {"input_ids": ids, "labels": torch.tensor([-100] * min(i, len(ids)) + ids[i:])}
        for i, ids in enumerate(DOCUMENTS)
    ]
    report = check_packing(Summing().to(device), examples, collator=collator)
    assert_fine(report)
    assert ("leak from padding" in report.checks) == (collator is not None)


def test_documents_are_found_between_padding(device):
    """Segments of multiples of 4, whose padding belongs to no sequence."""

    def segments(examples):
        lengths = [len(example["input_ids"]) for example in examples]
        layout = cuseq.PackedLayout.from_lengths(lengths, segment_multiple=4)
        batch = {"packed": layout, "position_ids": layout.position_ids.long()[None]}
        for key, fill in (("input_ids", 0), ("labels", -100)):
            row = torch.full((layout.total_tokens,), fill)
            for example, start in zip(examples, layout.cu_seqlens_padded.tolist(), strict=False):
                ids = torch.tensor(example["input_ids"])
                row[start : start + len(ids)] = ids
                if key == "labels":
                    row[start] = fill
            batch[key] = row[None]
        return batch

    def unsaid(examples):
        return {key: value for key, value in segments(examples).items() if key != "packed"}

    # The second document is one token, equal to the padding before it.
    for documents in (DOCUMENTS, [[5, 6], [0], [7, 8, 9]]):
        assert_fine(check_packing(Summing().to(device), documents, collator=segments))
    # The same without a layout: the model does not need one, and the documents must be searched
    # for.
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).to(device)
    wrapped = Wrapped(model)
    assert_fine(check_packing(wrapped, DOCUMENTS, collator=unsaid), {"loss"})


class Wrapped(nn.Module):
    """Any module of tokens, called like a transformers model."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, **ignored):
        return SimpleNamespace(logits=self.inner(input_ids))


# ------------------------------------------------------------------------------ care


def test_nothing_is_left_behind(device):
    model = Summing().to(device).train()
    model.norm.eval()
    model.head.weight.requires_grad_(False)
    model.head.bias.grad = torch.full_like(model.head.bias, 7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    buffer = model.calls
    state = torch.get_rng_state()
    with torch.no_grad():
        assert_fine(check_packing(model, DOCUMENTS))
        assert not torch.is_grad_enabled()
    assert model.calls is buffer
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == {"head.bias"} and bool((grads["head.bias"] == 7).all())
    assert not any(module._forward_hooks for module in model.modules())


class Merging(nn.Linear):
    """Merges its correction into its weight in eval mode, as LoRA layers do."""

    def __init__(self):
        super().__init__(16, VOCAB, dtype=torch.float64)
        self.correction = nn.Parameter(torch.ones(VOCAB, 16, dtype=torch.float64))
        self.merged = False

    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += -self.correction if mode else self.correction
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return F.linear(x, self.weight if self.merged else self.weight + self.correction, self.bias)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head_training", [True, False])
def test_modes_are_put_back_by_train(training, head_training, device):
    model = Summing().to(device)
    model.head = Merging().to(device)
    model.train(training)
    model.head.train(head_training)
    weight = model.head.weight.detach().clone()
    assert_fine(check_packing(model, DOCUMENTS))
    assert model.training == model.norm.training == training
    assert model.head.training == head_training and model.head.merged != head_training
    torch.testing.assert_close(model.head.weight.detach(), weight)


def test_attributes_and_new_buffers_are_put_back(device):
    class Keeping(Summing):
        def __init__(self):
            super().__init__()
            self.longest, self.last, self.table = 0, None, torch.zeros(4)

        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            self.longest = max(self.longest, input_ids.shape[-1])
            self.last = input_ids
            self.seen = True
            table = self.table
            table += 1
            self.table = table.clone()
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(1), persistent=False)
                self.register_buffer("scale", torch.ones(1))
            return super().forward(input_ids, labels, position_ids, packed)

    model = Keeping().to(device)
    table = model.table
    attributes, names = vars(model).keys() - {"seen"}, model.state_dict().keys()
    assert_fine(check_packing(model, DOCUMENTS))
    assert (model.longest, model.last, model.kept) == (0, None, 0.0)
    assert model.table is table and not table.any()
    assert vars(model).keys() == attributes and model.state_dict().keys() == names
    assert not hasattr(model, "mask") and not model._non_persistent_buffers_set
    model(torch.tensor([[1, 2]], device=device))  # registers them again


def test_everything_is_put_back_after_an_error(device):
    model = Summing().to(device).train()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="on purpose"):
        check_packing(model, DOCUMENTS, forward=_fail)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), state)


def _fail(model, examples):
    model.calls += 1
    torch.rand(1)
    raise RuntimeError("on purpose")


def test_frozen_models(device):
    model = Summing().to(device).requires_grad_(False)
    report = check_packing(model, DOCUMENTS)
    assert report.ok and report.checks["gradients"].value is None
    assert report.checks["gradients of embeddings"].value is not None
    model = Summing("backward").to(device)
    model.tokens.requires_grad_(False)
    assert_suspect(check_packing(model, DOCUMENTS), "backward")


def test_in_inference_mode(device):
    model = Summing().to(device)
    with torch.inference_mode():
        assert_fine(check_packing(model, DOCUMENTS))


def test_documents_of_every_kind(device):
    model = Summing().to(device)
    ids = [torch.tensor(document, dtype=torch.int32) for document in DOCUMENTS]
    reports = [
        check_packing(model, examples)
        for examples in (DOCUMENTS, ids, [{"input_ids": document} for document in ids])
    ]
    assert len({str(report) for report in reports}) == 1
    many = make_documents([2, 3] * 10)
    assert_fine(check_packing(model, many))


def test_other_keys_of_the_examples_reach_both_runs(device):
    class Typed(Summing):
        def forward(self, input_ids, token_type_ids, **keywords):
            output = super().forward(input_ids, **keywords)
            output.logits = output.logits * (1 + token_type_ids[..., None])
            return output

    examples = [
        {"input_ids": ids, "token_type_ids": [i % 2] * len(ids), "attention_mask": [1] * len(ids)}
        for i, ids in enumerate(DOCUMENTS)
    ]
    report = check_packing(Typed().to(device), examples)
    assert report.checks["logits"].ok and report.checks["leak forward"].ok


def test_keys_that_the_collator_takes_stay_from_the_model(device):
    """Alone, too, the model gets only keys that the packed batch has."""

    def typed(examples):
        batch = cuseq.PackingCollator()([{"input_ids": e["input_ids"]} for e in examples])
        types = torch.cat([torch.as_tensor(example["token_type_ids"]) for example in examples])
        return batch | {"token_type_ids": types[None]}

    class Typed(Summing):
        def forward(self, input_ids, token_type_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, None, position_ids, packed)
            output.logits = output.logits * (1 + token_type_ids[..., None])
            return output

    numpy = pytest.importorskip("numpy")
    examples = [
        {
            "input_ids": numpy.array(ids),
            "token_type_ids": numpy.full(len(ids), i % 2),
            "completion_mask": [1] * len(ids),
            "messages": [{"role": "user"}] * len(ids),
            "name": "a",
        }
        for i, ids in enumerate(DOCUMENTS)
    ]
    assert_fine(check_packing(Typed().to(device), examples, collator=typed), {"loss"})
    # A key that no model accepts does no harm either if the collator passes it on.
    texts = [example | {"token_type_ids": list(example["messages"])} for example in examples]

    def untyped(examples):
        batch = cuseq.PackingCollator()([{"input_ids": e["input_ids"]} for e in examples])
        return batch | {"token_type_ids": [example["messages"] for example in examples]}

    class Untyped(Summing):
        def forward(self, input_ids, token_type_ids=None, **keywords):
            return super().forward(input_ids, **keywords)

    assert_fine(check_packing(Untyped().to(device), texts, collator=untyped))


def test_the_tolerance_is_half_of_the_digits_of_what_computes():
    model, logits = nn.Linear(2, 2), torch.zeros(1)
    assert _default_rtol(model.double(), logits.double()) == 2**-26
    assert _default_rtol(model.double(), logits) == 2**-11.5
    assert _default_rtol(model.half(), logits) == 2**-5
    assert _default_rtol(model.double(), logits.double(), {torch.float32}) == 2**-11.5
    with torch.autocast("cpu", torch.bfloat16):
        assert _default_rtol(model.float(), logits) == 2**-3.5


@pytest.mark.parametrize(
    "params, inside, rtol",
    [(torch.float64, torch.float32, 2**-11.5), (torch.float32, torch.bfloat16, 2**-3.5)],
)
def test_the_tolerance_of_a_model_that_casts_inside(params, inside, rtol, device):
    class Casting(Summing):
        def forward(self, input_ids, labels=None, position_ids=None, packed=None):
            output = super().forward(input_ids, None, position_ids, packed)
            logits = output.logits.to(inside).to(params)
            if packed is not None:  # imitates the rounding of other kernels
                logits = logits * (1 + torch.finfo(inside).eps)
            return SimpleNamespace(logits=logits)

    model = Casting().to(device, params)
    report = check_packing(model, DOCUMENTS)
    assert_fine(report, {"loss"})
    assert report.checks["logits"].limit == rtol
    assert report.checks["logits"].value > torch.finfo(params).eps ** 0.5


def test_a_model_that_autocasts_inside(device):
    class Autocasting(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)

        def forward(self, input_ids, **ignored):
            with torch.autocast(input_ids.device.type, torch.bfloat16):
                return SimpleNamespace(logits=self.head(self.embed(input_ids)).float())

    report = check_packing(Autocasting().to(device), DOCUMENTS)
    assert report.checks["logits"].limit == 2**-3.5
    assert_fine(report, {"loss"})


def test_logits_of_zero(device):
    """A head may be initialised with zeros."""
    model = Summing().to(device)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    report = check_packing(model, DOCUMENTS)
    assert_fine(report)
    assert report.checks["logits"].value == 0


@pytest.mark.parametrize(
    "examples, error, message",
    [
        ([[1, 2, 3]], ValueError, "at least two documents of two or more tokens, got lengths"),
        ([[1, 2], [3], [4]], ValueError, r"got lengths \[2, 1, 1\]"),
        ([[1, 2], [], [4, 5]], ValueError, r"examples\[1\] has no tokens"),
        ([[1, 1], [1, 1]], ValueError, "two different tokens"),
        ([[1, 2], [0.5, 1.5]], TypeError, r"float32 of shape \(2,\) in examples\[1\]"),
        ([[1, 2], "ab"], TypeError, r"got str in examples\[1\]"),
        ([[1, 2], torch.ones(2).to_sparse()], TypeError, r"got Tensor in examples\[1\]"),
        ([[1, 2], [1j, 2j]], TypeError, r"complex64 of shape \(2,\) in examples\[1\]"),
        ([{1: 2, "ids": 3}], ValueError, r"got \['1', 'ids'\] in examples\[0\]"),
        (3, TypeError, "examples must be a sequence of documents, got 3"),
        (torch.tensor(3), TypeError, "examples must be a sequence of documents, got a tensor"),
        (torch.nested.nested_tensor([torch.ones(2)] * 2), TypeError, "examples must be a sequence"),
        ({"input_ids": [[1, 2]]}, TypeError, "examples must be documents, or one batch with"),
        ([{"ids": [1, 2]}], ValueError, r"got \['ids'\] in examples\[0\]"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            ValueError,
            r"examples\[0\] has 2 tokens and 1 labels",
        ),
        (
            [
                {"input_ids": [1, 2], "labels": [1, -100]},
                {"input_ids": [3, 4], "labels": [3, -100]},
            ],
            ValueError,
            "labels to predict",
        ),
    ],
)
def test_examples_that_cannot_be_used(examples, error, message):
    with pytest.raises(error, match=message):
        check_packing(Summing(), examples)


def test_arguments_that_cannot_be_used():
    model = Summing()
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got None"):
        check_packing(None, DOCUMENTS)
    for name in ("collator", "forward"):
        with pytest.raises(TypeError, match=f"{name} must be a function or None, got 3"):
            check_packing(model, DOCUMENTS, **{name: 3})
    with pytest.raises(TypeError, match="rtol must be a number, got 'a'"):
        check_packing(model, DOCUMENTS, rtol="a")
    with pytest.raises(ValueError, match="collator must be None if forward is given"):
        check_packing(model, DOCUMENTS, collator=crossing_labels, forward=_fail)
    with pytest.raises(ValueError, match="rtol must be above 0, got 0"):
        check_packing(model, DOCUMENTS, rtol=0)
    with pytest.raises(TypeError, match="tensor input_ids, got list"):
        check_packing(model, DOCUMENTS, collator=lambda e: {"input_ids": [1, 2]})
    for batch, kind in ((3, "int"), (None, "NoneType"), (torch.ones(2), "Tensor")):
        with pytest.raises(TypeError, match=f"a dict with a tensor input_ids, got {kind}"):
            check_packing(model, DOCUMENTS, collator=lambda e, batch=batch: batch)


def test_the_report_as_json():
    for model, rtol in (
        (Summing(), None),
        (Summing("nan"), None),
        (Summing("cumulative"), None),
        (Summing(), math.inf),
    ):
        report = check_packing(model, DOCUMENTS, rtol=rtol)
        read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert read["ok"] == report.ok
        assert read["checks"].keys() == report.checks.keys()
        assert (read["suspect"] is None) == report.ok


# ------------------------------------------------------------------------------ transformers

_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_WINDOWS = dict(head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)


def make_config(kind: str):
    transformers = pytest.importorskip("transformers")
    if kind == "GPT2":
        return transformers.GPT2Config(**_GPT2)
    special = {"Gemma3Text": _WINDOWS, "Qwen3": dict(head_dim=16), "Qwen3Moe": _EXPERTS}
    return getattr(transformers, f"{kind}Config")(**_SHAPE, **special.get(kind, {}))


def make_model(kind: str, device, attention: str = "cuseq", **options):
    transformers = pytest.importorskip("transformers")
    import cuseq.integrations.transformers

    cuseq.integrations.transformers.register()
    config = make_config(kind)
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model.to(device)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3Text", "GPT2", "Qwen3Moe"])
def test_models_of_transformers_pass(kind, device):
    model = make_model(kind, device)
    report = check_packing(model, DOCUMENTS)
    assert_fine(report)
    assert report.checks["logits"].value < 1e-5
    padded = check_packing(model, DOCUMENTS, collator=cuseq.PackingCollator(total_tokens=48))
    assert_fine(padded)
    assert padded.checks["leak from padding"].limit == padded.checks["leak forward"].limit
    exact = kind != "Qwen3Moe"
    assert (report.checks["leak forward"].limit == 0) == exact


def test_a_model_of_transformers_in_float64_passes(device):
    """Its loss and norms are computed in fp32."""
    report = check_packing(make_model("Qwen3", device).double(), DOCUMENTS)
    assert_fine(report)
    assert report.checks["loss"].limit == 2**-11.5


def test_a_rope_that_grows_is_put_back(device):
    model = make_model(
        "Llama", device, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
    )
    rope = model.model.rotary_emb
    model.config.max_position_embeddings = rope.max_seq_len_cached = rope.original_max_seq_len = 8
    rope.original_inv_freq = rope.inv_freq
    before = rope.inv_freq.clone()
    check_packing(model, DOCUMENTS)
    assert rope.max_seq_len_cached == 8 and torch.equal(rope.inv_freq, before)


def test_a_mixture_of_experts_that_leaks_is_still_found(device):
    report = check_packing(make_model("Qwen3Moe", device, "sdpa"), DOCUMENTS)
    assert_suspect(report, "attention", "self_attn (Qwen3MoeAttention)")
    assert report.checks["leak forward"].limit == 0


def test_the_trap_of_use_cache(device):
    report = check_packing(make_model("Llama", device, "sdpa"), DOCUMENTS)
    words = ("model.layers.0.self_attn (LlamaAttention)", "use_cache=False", "cuseq.enable")
    assert_suspect(report, "attention", *words)
    assert {"leak forward", "leak backward", "logits", "gradients"} <= failed(report)
    assert_fine(check_packing(make_model("Llama", device, "sdpa", use_cache=False), DOCUMENTS))


def test_positions_that_do_not_restart(device):
    """Without lengths attention leaks as well; with them, only the learned positions are wrong."""
    model = make_model("Llama", device, "sdpa", use_cache=False)
    report = check_packing(model, DOCUMENTS, collator=running_positions)
    assert_suspect(report, "attention", "position_ids of document 1 start at 5")
    report = check_packing(make_model("GPT2", device), DOCUMENTS, collator=running_positions)
    assert_suspect(report, "positions", "position_ids of document 1 start at 5")


@pytest.mark.parametrize("attention", ["cuseq", full("sdpa")])
def test_layers_compiled_for_one_shape(attention, device):
    """Single documents have other shapes, and inner modules' hooks do not run when compiled."""
    torch._dynamo.reset()
    model = make_model("Llama", device, attention)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    documents = make_documents(range(2, 14))  # more shapes than torch's limit of recompiles
    report = check_packing(model, documents, collator=cuseq.PackingCollator(total_tokens=96))
    if attention == "cuseq":
        assert_fine(report)
    else:
        assert_suspect(report, "attention", "model.layers.0.self_attn (LlamaAttention)")


def test_collators_of_other_packages(device):
    transformers = pytest.importorskip("transformers")
    model = make_model("Llama", device)
    for options in ({}, dict(return_flash_attn_kwargs=True)):
        collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
        assert_fine(check_packing(model, DOCUMENTS, collator=collator))

    def padded(examples):
        longest = max(len(example["input_ids"]) for example in examples)
        batch = {}
        for key, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
            rows = [torch.tensor(example["input_ids"]) for example in examples]
            rows = [torch.ones_like(row) if key == "attention_mask" else row for row in rows]
            padded = [F.pad(row, (0, longest - len(row)), value=fill) for row in rows]
            batch[key] = torch.stack(padded)
        return batch

    # The second document is one token, equal to the padding before it.
    assert_fine(check_packing(model, [[5, 6], [0], [7, 8, 9]], collator=padded))


def test_bf16(cuda):
    report = check_packing(make_model("Gemma3Text", cuda).bfloat16(), DOCUMENTS)
    assert_fine(report)
    assert report.checks["logits"].limit == pytest.approx(0.088, abs=1e-3)


# ------------------------------------------------------------------------------ command line


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the config.json of a full-width Gemma 3, without weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=12, num_attention_heads=36, head_dim=64, sliding_window=512
    )
    config.save_pretrained(tmp_path / "gemma3")
    return tmp_path / "gemma3"


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "cuseq.debug.packing_check"]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.full
def test_command_finds_a_right_model_fine(folder, tmp_path):
    done = command(folder, "--json", tmp_path / "report.json", "--tokens", 64)
    assert done.returncode == 0, done.stderr
    assert "Gemma3ForCausalLM, 6 documents of 1 to 25 tokens, float32, cpu" in done.stdout
    assert "verdict: OK" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["checks"]["leak forward"]["value"] == 0


def test_command_finds_a_wrong_model_wrong(tmp_path):
    model = make_model("Llama", torch.device("cpu"))
    model.save_pretrained(tmp_path / "llama")
    done = command(tmp_path / "llama", "--attn", "sdpa", "--tokens", 48, "--documents", 4)
    assert done.returncode == 1, done.stderr
    assert "verdict: WRONG (attention)" in done.stdout


def test_command_says_why_it_could_not_run(tmp_path, capsys):
    pytest.importorskip("transformers")
    from cuseq.debug.packing_check.__main__ import main

    make_config("Llama").save_pretrained(tmp_path)
    for arguments, reason in (
        (["--documents", "3"], "--documents must be at least 4, got 3"),
        (["--tokens", "20"], "--tokens must be at least 4 for each of 6 documents, got 20"),
        (["--attn", "no_such"], "no_such"),
        (["--device", "no_such"], "no_such"),
        (["--rtol", "-1"], "rtol must be above 0"),
    ):
        assert main([str(tmp_path), *arguments]) == 2
        output = capsys.readouterr()
        assert "the check could not run: " in output.err and reason in output.err
        assert output.out == ""
    (tmp_path / "config.json").unlink()
    done = command(tmp_path)
    assert done.returncode == 2 and "the check could not run: " in done.stderr
    assert command(tmp_path, "--dtype", "int8").returncode == 2


def test_command_shows_a_verdict_that_it_cannot_write(tmp_path, capsys):
    pytest.importorskip("transformers")
    from cuseq.debug.packing_check.__main__ import main

    make_config("Llama").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "missing" / "report.json"):
        assert main([str(tmp_path), "--tokens", "24", "--json", str(path)]) == 2
        output = capsys.readouterr()
        assert "verdict: OK" in output.out
        assert "could not be written: " in output.err and str(path) in output.err


def test_lengths_of_the_command():
    pytest.importorskip("transformers")
    from cuseq.debug.packing_check._load import _lengths

    for documents in (4, 5, 6, 7, 25, 64, 300):
        for tokens in (4 * documents, 4 * documents + 1, 6 * documents, 10000):
            lengths = _lengths(tokens, documents)
            assert len(lengths) == documents and sum(lengths) == tokens
            assert min(lengths) == lengths[1] == 1 and lengths[3] == 2
            assert lengths[2] == max(lengths)


def test_command_without_cache(tmp_path):
    pytest.importorskip("transformers")
    from cuseq.debug.packing_check.__main__ import main

    make_config("Qwen3").save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--attn", "sdpa", "--tokens", "40"]
    assert main(arguments) == 1
    assert main([*arguments, "--no-cache"]) == 0


@pytest.mark.parametrize(
    "kind", ["Llama", "Gemma3Text", "Qwen3Moe", "DeepseekV3", "GPT2", "Qwen3Next", "Phimoe"]
)
def test_tiny_models_keep_their_family(kind):
    transformers = pytest.importorskip("transformers")
    from cuseq.debug.packing_check._load import tiny_config

    config = getattr(transformers, f"{kind}Config")()
    tiny = tiny_config(config)
    model = transformers.AutoModelForCausalLM.from_config(tiny, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 50e6
    assert tiny.num_hidden_layers <= 6 and tiny.vocab_size <= 1024
    assert set(getattr(tiny, "layer_types", None) or ()) == set(
        getattr(config, "layer_types", None) or ()
    )
    if getattr(config, "sliding_window", None):
        assert tiny.sliding_window == 16
    grouped = config.num_attention_heads != (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    assert grouped == (
        tiny.num_attention_heads
        != (getattr(tiny, "num_key_value_heads", None) or tiny.num_attention_heads)
    )
    with torch.no_grad():
        assert model(torch.arange(20)[None]).logits.isfinite().all()


def test_the_function_and_its_module_have_their_own_names():
    """`import cuseq.check_packing as m` used to give the function instead of the module."""
    import cuseq.debug.packing_check as module

    assert isinstance(module, ModuleType)
    assert cuseq.check_packing is module.check_packing
    # A folder of compiled files from an older checkout is found as a package without a file.
    spec = importlib.util.find_spec("cuseq.check_packing")
    assert spec is None or spec.origin is None


def test_no_framework_is_imported(run_python):
    code = (
        "import sys, cuseq; from cuseq.debug.packing_check import check_packing; "
        "assert callable(check_packing) and 'transformers' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
