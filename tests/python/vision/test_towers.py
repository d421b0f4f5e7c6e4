"""Test the vision towers of enabled models: one attention call a layer, and no wait."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import cuseq

transformers = pytest.importorskip("transformers")

from tower_models import (  # noqa: E402
    FAMILIES,
    GRIDS,
    installed_towers,
    make_tower,
    pixels_of,
    run,
)

HAS_HELPERS = importlib.util.find_spec("transformers.vision_utils") is not None


class Calls(TorchDispatchMode):
    """Counts the attention calls, by the kind of op."""

    def __init__(self):
        super().__init__()
        self.ours = self.theirs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.ours += name == "cuseq::varlen_attention"
        self.theirs += "attention" in name and not name.startswith("cuseq")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_computes_what_it_did(family, device):
    tower = make_tower(family, device)
    pixels = pixels_of(tower, GRIDS, device)
    expected = run(tower, pixels, GRIDS.to(device))
    enabled = cuseq.enable(tower, rope=False)
    assert any(one.startswith("tower:") for one in enabled.replaced)
    found = run(tower, pixels, GRIDS.to(device))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-8)
    on_host = run(tower, pixels, GRIDS)
    torch.testing.assert_close(on_host, found, atol=1e-12, rtol=1e-10)
    cuseq.disable(tower)
    enabled = cuseq.enable(tower)  # transformers rotates in fp32
    assert any(one.startswith("rope:") for one in enabled.replaced) and not enabled.left_alone
    found = run(tower, pixels, GRIDS.to(device))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    cuseq.disable(tower)
    again = run(tower, pixels, GRIDS.to(device))
    torch.testing.assert_close(again, expected, atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_makes_one_call(family):
    tower = make_tower(family)
    pixels = pixels_of(tower, GRIDS)
    depth = sum("Attention" in type(layer).__name__ for layer in tower.modules())
    with Calls() as stock:
        tower(pixels, GRIDS)
    assert stock.theirs > depth and stock.ours == 0
    cuseq.enable(tower)
    with Calls() as calls:
        tower(pixels, GRIDS)
    assert calls.ours == depth


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_waits_if_the_grids_are_on_the_host(family, cuda):
    if not HAS_HELPERS:
        pytest.skip("transformers before 5.9 reads grids in its towers")
    tower = make_tower(family, cuda, torch.bfloat16)
    pixels = pixels_of(tower, GRIDS, cuda)
    cuseq.enable(tower)
    run(tower, pixels, GRIDS)
    torch.cuda.synchronize()
    grids = GRIDS.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = tower(pixels, grids)
        out.pooler_output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_facts_of_grids_are_made_once(monkeypatch):
    tower = make_tower("qwen2_5_vl")
    pixels = pixels_of(tower, GRIDS)
    cuseq.enable(tower)
    made = []
    from_grid = cuseq.vision.VisionLayout.from_grid

    def counted(grids, **options):
        made.append(options)
        return from_grid(grids, **options)

    monkeypatch.setattr(cuseq.vision.VisionLayout, "from_grid", counted)
    grids = GRIDS.clone()
    first = tower(pixels, grids).pooler_output
    count = len(made)
    second = tower(pixels, grids).pooler_output
    assert len(made) == count and torch.equal(first, second)
    grids[0] = torch.tensor([1, 6, 4])  # an edit is seen
    third = tower(pixels, grids).pooler_output
    assert len(made) > count or not HAS_HELPERS
    assert not torch.equal(first, third)


def test_grids_of_one_size_and_other_values_do_not_share_facts():
    tower = make_tower("qwen3_vl")
    cuseq.enable(tower)
    grids = [torch.tensor([[1, 4, 6]]), torch.tensor([[1, 6, 4]]), torch.tensor([[1, 2, 12]])]
    pixels = pixels_of(tower, grids[0])
    found = [tower(pixels, one).pooler_output for one in grids * 2]
    cuseq.disable(tower)
    for one, own in zip(grids * 2, found, strict=True):
        torch.testing.assert_close(own, tower(pixels, one).pooler_output, atol=1e-5, rtol=1e-5)


def test_a_text_row_beside_images_does_not_reach_the_tower():
    tower = make_tower("qwen3_vl")
    pixels = pixels_of(tower, GRIDS)
    cuseq.enable(tower)
    expected = tower(pixels, GRIDS).pooler_output
    packed = cuseq.PackedLayout.from_lengths([3, 4])
    told = dict(packed=packed, cu_seq_lens_q=packed.cu_seqlens, cu_seq_lens_k=packed.cu_seqlens)
    found = tower(pixels, grid_thw=GRIDS, max_length_q=4, max_length_k=4, **told).pooler_output
    assert torch.equal(found, expected)


def test_given_facts_are_taken():
    """transformers' own keywords for offsets and places."""
    utils = pytest.importorskip("transformers.vision_utils")
    tower = make_tower("qwen3_vl")
    pixels = pixels_of(tower, GRIDS)
    cuseq.enable(tower)
    expected = tower(pixels, GRIDS).pooler_output
    given = dict(
        cu_seqlens=utils.get_vision_cu_seqlens(GRIDS),
        position_ids=utils.get_vision_position_ids(GRIDS, 2),
    )
    torch.testing.assert_close(tower(pixels, GRIDS, **given).pooler_output, expected)
    given["position_ids"] = given["position_ids"].flip(0)
    assert not torch.allclose(tower(pixels, GRIDS, **given).pooler_output, expected)


def test_copies_and_pickles_work(tmp_path):
    tower = make_tower("qwen2_5_vl")
    pixels = pixels_of(tower, GRIDS)
    expected = tower(pixels, GRIDS).pooler_output
    cuseq.enable(tower, rope=False)
    twin = copy.deepcopy(tower)
    cuseq.disable(tower)
    with Calls() as calls:
        found = twin(pixels, GRIDS).pooler_output
    assert calls.ours > 0
    torch.testing.assert_close(found, expected)
    loaded = pickle.loads(pickle.dumps(twin))
    cuseq.disable(twin)
    torch.testing.assert_close(loaded(pixels, GRIDS).pooler_output, expected)
    with Calls() as calls:
        tower(pixels, GRIDS)
    assert calls.ours == 0


def test_a_tower_that_drops_weights_is_left_alone():
    tower = make_tower("qwen3_vl")
    for layer in tower.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.1
    with pytest.raises(ValueError, match="no attention layer that cuseq knows"):
        cuseq.enable(tower)


def test_checkpointing_and_frozen_layers(device):
    tower = make_tower("qwen2_5_vl", device)
    pixels = pixels_of(tower, GRIDS, device)
    for weight in tower.blocks[0].parameters():
        weight.requires_grad_(False)
    expected = run(tower, pixels, GRIDS.to(device))
    cuseq.enable(tower, rope=False)
    tower.gradient_checkpointing_enable({"use_reentrant": False})
    found = run(tower.train(), pixels, GRIDS.to(device))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_tower_takes_new_grids(family):
    tower = make_tower(family)
    cuseq.enable(tower)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(tower, backend=graphs)
    several = [[[1, 4, 6], [1, 4, 4]], [[1, 8, 4], [1, 2, 6]], [[1, 6, 6]], [[1, 4, 4]] * 4]
    counts = []
    for grids in map(torch.tensor, several * 2):
        pixels = pixels_of(tower, grids)
        expected = tower(pixels, grids).pooler_output
        torch.testing.assert_close(compiled(pixels, grids).pooler_output, expected)
        counts.append(graphs.frame_count)
    assert counts[-1] == counts[3]  # no graph for grids that were seen
    torch.compiler.reset()


@pytest.mark.full
@pytest.mark.parametrize("name, kind", installed_towers())
def test_every_installed_tower_computes_what_it_did(name, kind):
    tower = make_tower((name, kind))
    grids = GRIDS.clone()
    grids[:, 0] = 1
    pixels = pixels_of(tower, grids)
    expected = run(tower, pixels, grids)
    enabled = cuseq.enable(tower, rope=False)
    assert any(one.startswith("tower:") for one in enabled.replaced)
    with Calls() as calls:
        found = run(tower, pixels, grids)
    assert calls.ours == sum(type(one).__name__ in str(enabled.replaced) for one in tower.modules())
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-8)
    cuseq.disable(tower)
    cuseq.enable(tower)
    found = run(tower, pixels, grids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_have_one_graph_for_all_grids(family):
    if not HAS_HELPERS:
        pytest.skip("before transformers 5.9 each block finds the longest sequence itself")
    tower = make_tower(family)
    cuseq.enable(tower)
    graphs = CompileCounterWithBackend("eager")
    several = [[[1, 4, 6], [1, 4, 4]], [[1, 8, 4], [1, 2, 6]], [[1, 6, 6]], [[1, 8, 8]] * 3]
    grids = [torch.tensor(one) for one in several]
    pixels = [pixels_of(tower, one) for one in grids]
    expected = [tower(x, one).pooler_output for x, one in zip(pixels, grids, strict=True)]
    for block in tower.blocks:
        block.compile(backend=graphs, dynamic=True)
    for x, one, own in zip(pixels, grids, expected, strict=True):
        torch.testing.assert_close(tower(x, one).pooler_output, own)
    assert graphs.frame_count <= 2  # the first block's input is a view, and has a graph of its own
    torch.compiler.reset()
