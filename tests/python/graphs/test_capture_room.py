"""A capture with room for many more sequences than its row has warns once, and says what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cuseq
from cuseq import GraphedStep, PackedLayout, PackedTree, varlen_attention

TOKENS = 2048
LENGTHS = [500, 0, 700, 300, 400]
WARNS = r"room for {} sequences in 2048 tokens, and the row has {}.*max_seqs.*GraphedStep"


@pytest.fixture
def told(capfd) -> Callable[[], str]:
    """Return what is said of room: on torch 2.11 C++ writes it to stderr, later as a warning."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # also what comes once a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def found() -> str:
            said = capfd.readouterr().err + "".join(str(one.message) for one in caught)
            return "".join(re.findall("cuseq.varlen_attention: a CUDA graph.*", said))

        yield found
    torch.set_warn_always(before)


def rows() -> list[Tensor]:
    return [
        torch.randn(TOKENS, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]


def capture(packed: PackedLayout, **options) -> None:
    """Capture one attention, forward and backward, after a plain one."""
    tensors = rows()

    def step() -> None:
        torch.autograd.grad(varlen_attention(*tensors, packed, **options).sum(), tensors)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()


def test_a_capture_of_the_default_room_warns(told, cuda):
    capture(PackedLayout.from_lengths(LENGTHS, TOKENS, device=cuda))
    assert re.search(WARNS.format(TOKENS, 5), told())


def test_a_graphed_callable_warns(told, cuda):
    packed = PackedLayout.from_lengths(LENGTHS, TOKENS, max_seqs=100, device=cuda)
    torch.cuda.make_graphed_callables(
        lambda q, k, v: varlen_attention(q, k, v, packed), tuple(rows())
    )
    assert re.search(WARNS.format(100, 5), told())


def test_a_capture_of_offsets_alone_warns(told, cuda):
    packed = PackedLayout.from_lengths(LENGTHS, TOKENS, device=cuda)
    q, k, v = (tensor.detach() for tensor in rows())
    attend = torch.ops.cuseq.varlen_attention
    attend(q, k, v, packed.cu_seqlens_static)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        attend(q, k, v, packed.cu_seqlens_static)
    assert re.search(WARNS.format(TOKENS, "a number that only the device knows"), told())


def test_a_capture_of_little_room_does_not_warn(told, cuda):
    for max_seqs in (5, 16, 20):
        capture(PackedLayout.from_lengths(LENGTHS, TOKENS, max_seqs=max_seqs, device=cuda))
    assert not told()


def test_a_capture_of_flex_does_not_warn(told, cuda):
    """Its kernels read a mask, whose blocks are those of the real lengths."""
    capture(PackedLayout.from_lengths(LENGTHS, TOKENS, device=cuda), backend="flex")
    assert not told()


@pytest.mark.parametrize("max_seqs", [8, 100, TOKENS - 1])
@pytest.mark.parametrize("kind", ["rows", "chunks", "tree"])
def test_a_graphed_step_does_not_warn(kind, max_seqs, told, cuda):
    """It chooses the room, and keeps what it needs for rows to come."""
    weight = nn.Parameter(torch.randn(TOKENS, 2, 64, device=cuda, dtype=torch.bfloat16))

    def attend(packed: PackedLayout) -> Tensor:
        if kind == "chunks":
            packed = packed.chunked(256)
        return varlen_attention(weight, weight, weight, packed, backend="flash")

    if kind == "tree":
        group = PackedTree.from_groups(
            [[1] * 9], [[[2] * 5] * 3], total_tokens=TOKENS, max_seqs=max_seqs
        )
        packs = [group.layout] * 5
    else:
        packs = [
            PackedLayout.from_lengths(lengths, TOKENS, max_seqs=max_seqs)
            for lengths in ([400] * 5, [TOKENS], [9] * 8, [TOKENS], [1, 2])
        ]
    step = GraphedStep(
        lambda batch: attend(batch["packed"]).square().sum(),
        torch.optim.SGD([weight], lr=0.0, fused=True),
        {"packed": packs[0]},
        warmup=1,
    )
    for packed in packs:
        step({"packed": packed})
    assert step.captured, step.reason
    assert not told()


def test_reduce_overhead_leaves_attention_out_of_its_graphs(told, cuda):
    """So it pays for the real lengths, and there is nothing to warn of."""
    tensors = rows()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(q, k, v, packed):
        return varlen_attention(q * 2, k, v, packed, backend="flash") * 2

    for lengths in (LENGTHS, [TOKENS], [7] * 100, LENGTHS):
        packed = PackedLayout.from_lengths(lengths, TOKENS, device=cuda)
        torch.compiler.cudagraph_mark_step_begin()
        out = layer(*tensors, packed)
        plain = varlen_attention(tensors[0] * 2, *tensors[1:], packed, backend="flash") * 2
        torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)
        out.sum().backward()
    assert not told()


def test_a_promise_is_made_for_every_layout_of_a_graphed_step():
    """Also where the graph has all the room of the layout: that it is meant must be known."""
    tree = PackedTree.from_groups([[1] * 9], [[[2] * 5] * 3], total_tokens=64, max_seqs=16)
    example = {
        "few": PackedLayout.from_lengths([5], 64, max_seqs=4),
        "many": PackedLayout.from_lengths([5], 64, max_seqs=40),
        "none": PackedLayout.from_lengths([], 64, max_seqs=0),
        "tree": tree.layout,
    }
    batch = cuseq.graphs.batch.StaticBatch(example, torch.device("cpu"), "example")
    slots = [cuseq._C.HostMeta.NUM_SEQS, cuseq._C.HostMeta.STATUS]

    def promised() -> dict[str, list[int]]:
        return {name: packed.host_meta[slots].tolist() for name, packed in batch.value.items()}

    before = promised()
    with batch.captured_for([8] * 4):
        assert promised() == {
            name: [room, cuseq._C.HostMeta.OF_REPLAYS]
            for name, room in {"few": 4, "many": 8, "none": 0, "tree": 16}.items()
        }
    assert promised() == before
