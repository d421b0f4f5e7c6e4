"""Test the router in examples/moe_router.py: masked padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from example_modules import imported
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cuseq
from cuseq import PackedLayout

DIM, N_EXPERTS = 5, 4
UNPADDED, MASKED, MISTAKEN = "unpadded", "padded, with the mask", "padded, without it"


@pytest.fixture(scope="module")
def example():
    with imported("moe_router") as module:
        yield module


def routed(example, packed: PackedLayout, top_k: int, masked: bool, device="cpu"):
    """Return a row's routing, with ones on padding, and gradients of weights and real tokens."""
    torch.manual_seed(0)
    router = example.Router(DIM, N_EXPERTS, top_k).double().to(device)
    shape = packed.num_sequences, packed.max_seqlen, DIM
    batch = torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()
    hidden = cuseq.pack(packed, batch, fill=1)
    routing = router(hidden, packed.moe_padding_mask if masked else None)
    (routing.aux_loss + routing.weights.square().sum()).backward()
    return routing, [router.scores.weight.grad, batch.grad]


def loss_by_loop(example, packed: PackedLayout, top_k: int) -> float:
    """Compute Switch's loss token by token, over real tokens only."""
    torch.manual_seed(0)
    weight = example.Router(DIM, N_EXPERTS, top_k).double().scores.weight
    batch = torch.randn(packed.num_sequences, packed.max_seqlen, DIM, dtype=torch.float64)
    dispatched, probability, tokens = [0] * N_EXPERTS, [0.0] * N_EXPERTS, packed.num_real_tokens
    for document, length in zip(batch, packed.lengths.tolist(), strict=True):
        for token in document[:length]:
            wanted = torch.softmax(weight @ token, 0).tolist()
            for expert in sorted(range(N_EXPERTS), key=wanted.__getitem__)[-top_k:]:
                dispatched[expert] += 1
            probability = [a + b for a, b in zip(probability, wanted, strict=True)]
    pairs = zip(dispatched, probability, strict=True)
    return N_EXPERTS * sum(f / (tokens * top_k) * p / tokens for f, p in pairs)


def real_rows(packed: PackedLayout, rows: Tensor) -> Tensor:
    return rows[~packed.moe_padding_mask]


@pytest.mark.parametrize("top_k", [1, 2])
def test_padding_changes_nothing_where_it_is_masked(example, top_k, device):
    lengths = [3, 8, 1]
    plain = PackedLayout.from_lengths(lengths, device=device)
    padded = PackedLayout.from_lengths(
        lengths, segment_multiple=4, total_multiple=32, device=device
    )
    expected, expected_grads = routed(example, plain, top_k, False, device)
    actual, grads = routed(example, padded, top_k, True, device)
    assert actual.aux_loss.item() == pytest.approx(loss_by_loop(example, plain, top_k))
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(grads, expected_grads)
    assert torch.equal(actual.load, expected.load)
    assert actual.load.sum() == sum(lengths) * top_k
    assert torch.equal(real_rows(padded, actual.dispatch), expected.dispatch)
    torch.testing.assert_close(real_rows(padded, actual.weights), expected.weights)
    pads = padded.moe_padding_mask
    assert not actual.dispatch[pads].any() and not actual.weights[pads].any()


@pytest.mark.parametrize("top_k", [1, 2])
def test_padding_that_is_not_masked_counts(example, top_k, device):
    lengths = [3, 8, 1]
    padded = PackedLayout.from_lengths(
        lengths, segment_multiple=4, total_multiple=32, device=device
    )
    masked, masked_grads = routed(example, padded, top_k, True, device)
    mistaken, grads = routed(example, padded, top_k, False, device)
    assert mistaken.load.sum() == 32 * top_k
    assert (mistaken.aux_loss - masked.aux_loss).abs() > 0.1
    for mistake, right in zip(grads, masked_grads, strict=True):
        assert (mistake - right).norm() > 0.01 * right.norm()


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    segment=st.sampled_from([1, 4, 6]),
    total=st.sampled_from([1, 5, 16]),
    top_k=st.integers(1, N_EXPERTS),
)
def test_any_layout(example, lengths, segment, total, top_k):
    room = dict(max_seqs=6)  # sequences of length zero may outnumber the tokens
    plain = PackedLayout.from_lengths(lengths, **room)
    padded = PackedLayout.from_lengths(
        lengths, segment_multiple=segment, total_multiple=total, **room
    )
    expected, expected_grads = routed(example, plain, top_k, False)
    actual, grads = routed(example, padded, top_k, True)
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(grads, expected_grads)
    assert torch.equal(actual.load, expected.load)


def test_a_row_of_padding_alone(example, device):
    router = example.Router(DIM, N_EXPERTS, 2).to(device)
    everything = torch.ones(8, dtype=torch.bool, device=device)
    routing = router(torch.randn(8, DIM, device=device), everything)
    routing.aux_loss.backward()
    assert routing.aux_loss == 0 and not routing.dispatch.any()
    assert torch.equal(router.scores.weight.grad, torch.zeros_like(router.scores.weight))


def test_what_the_example_compares(example):
    """Its last row must be wrong, gradients too, or the example would show nothing."""
    grads = {}
    for name in (UNPADDED, MASKED, MISTAKEN):
        model, routings = example.route_three_ways(torch.float64)
        assert list(routings) == [UNPADDED, MASKED, MISTAKEN]
        routings[name].aux_loss.backward()
        grads[name] = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(routings[MASKED].aux_loss, routings[UNPADDED].aux_loss)
    torch.testing.assert_close(grads[MASKED], grads[UNPADDED])
    assert torch.equal(routings[MASKED].load, routings[UNPADDED].load)
    assert len(routings[MASKED].dispatch) > len(routings[UNPADDED].dispatch)
    assert (routings[MISTAKEN].aux_loss - routings[UNPADDED].aux_loss).abs() > 0.01
    for mistake, right in zip(grads[MISTAKEN], grads[UNPADDED], strict=True):
        assert (mistake - right).norm() > 0.01 * right.norm()


def test_what_the_example_prints(example, capsys):
    example.main()
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "aux loss" in heading
    for line, name in zip(lines, (UNPADDED, MASKED, MISTAKEN), strict=True):
        assert line.startswith(name)
    figures = [
        line.removeprefix(name).split()
        for line, name in zip(lines[:2], (UNPADDED, MASKED), strict=True)
    ]
    assert figures[0][1:] == figures[1][1:]
    assert lines[2].split()[-N_EXPERTS:] != lines[0].split()[-N_EXPERTS:]
