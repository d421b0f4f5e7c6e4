"""Test examples/grpo.py: both ways of training learn the same, and trees compute less."""

from __future__ import annotations

import pytest
import torch
from example_modules import imported

import cuseq

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def example():
    with imported("grpo") as module:
        yield module


@pytest.mark.slow
def test_both_ways_learn_the_same(example, capsys):
    padded, trees = map(vars, example.main(["--steps", "30", "--prompts", "12", "--longest", "8"]))
    assert len(padded["rewards"]) == 30
    assert trees["rewards"][:5] == padded["rewards"][:5]
    assert trees["rewards"] == pytest.approx(padded["rewards"], abs=0.2)
    assert sum(trees["rewards"][-5:]) > 2 * sum(trees["rewards"][:5])
    assert 3 * trees["tokens"] < padded["tokens"]
    assert "as fast" in capsys.readouterr().out


def test_gradients_are_those_of_padded_batches(example):
    model = example.make_model(0).double()
    ids = torch.tensor([
        [example.PAD, 5, 6, example.ASK, 5, example.PAD, 5, 5],  # it says PAD itself
        [example.PAD, 5, 6, example.ASK, 5, example.END, example.PAD, example.PAD],
        [7, 8, 9, example.ASK, 7, 7, 7, 7],
    ])  # fmt: skip
    mask = torch.tensor([[0, *[1] * 7], [0, *[1] * 5, 0, 0], [1] * 8])
    weights = torch.randn(3, example.ANSWER, dtype=torch.float64) * mask[:, -example.ANSWER :]
    found = []
    for forward in (example.padded_forward, example.tree_forward):
        if found:
            cuseq.enable(model)
        loss = (example.logprobs_of(forward(model, ids, mask), ids) * weights).sum()
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_answers_end_where_they_say(example):
    ids, mask = example.answered(example.make_model(1), [[3, example.ASK], [1, 2, example.ASK]])
    assert ids.shape == mask.shape == (2 * example.GROUP, 3 + example.ANSWER)
    for row, keep in zip(ids[:, 3:].tolist(), mask[:, 3:].tolist(), strict=True):
        end = row.index(example.END) + 1 if example.END in row else example.ANSWER
        assert keep == [1] * end + [0] * (example.ANSWER - end)
    assert mask[: example.GROUP, 0].eq(0).all() and mask[example.GROUP :, :3].all()


@pytest.mark.parametrize("answer, reward", [([4] * 4, 1.0), ([4, 11, 12, 12], 0.25), ([5] * 4, 0)])
def test_answers_are_checked(example, answer, reward):
    assert example.checked([4, 7, example.ASK], answer) == reward
