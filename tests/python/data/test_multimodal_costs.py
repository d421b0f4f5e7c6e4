"""Test `multimodal_costs` against counts by hand, and ranks that share the work by it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from cuseq.data import PackedBatchSampler, multimodal_costs


def config_of(tower: dict | None = None, **text) -> SimpleNamespace:
    own = dict(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
               vocab_size=10) | text  # fmt: skip
    of_tower = dict(hidden_size=4, depth=2, intermediate_size=8, patch_size=14) | (tower or {})
    return SimpleNamespace(
        model_type="qwen2_5_vl",
        vision_config=SimpleNamespace(**of_tower),
        get_text_config=lambda: SimpleNamespace(**own),
    )


def test_text_is_its_products_and_its_pairs():
    products = 3 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * 10  # a layer's attention and MLP; the head
    pairs = 3 * 4 * 8
    found = multimodal_costs(config_of(), [5, 0], [None, None])
    assert found.tolist() == [3 * (2 * products * 5 + pairs * 15), 0]
    assert found.dtype == torch.float64


def test_fewer_key_heads_and_layers_of_other_kinds_cost_less():
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = config_of(num_attention_heads=4, num_key_value_heads=1, head_dim=4, layer_types=kinds)
    products = 3 * (2 * 8 * 4 * 5 + 3 * 8 * 16) + 8 * 10
    assert multimodal_costs(config, [5], [None]).item() == 3 * (2 * products * 5 + 64 * 15)


def test_experts_count_those_that_a_token_gets():
    config = config_of(num_experts_per_tok=2, moe_intermediate_size=4, num_experts=64)
    products = 3 * (4 * 8 * 8 + 3 * 8 * 8) + 8 * 10
    assert multimodal_costs(config, [1], [None]).item() == 3 * (2 * products + 96)


def test_images_cost_the_tower_by_frame_and_window():
    text = multimodal_costs(config_of(), [5], [None]).item()
    products = 2 * (4 * 4 * 4 + 2 * 4 * 8)
    whole = multimodal_costs(config_of(), [5], [[[2, 4, 6]]]).item() - text
    assert whole == 3 * (2 * products * 48 + 4 * 4 * 2 * 48 * 24)
    tower = dict(window_size=28, fullatt_block_indexes=[1])
    windows = multimodal_costs(config_of(tower), [5], [[[2, 4, 6]]]).item() - text
    assert windows == 3 * (2 * products * 48 + 4 * 4 * (48 * 24 + 48 * 4))


def test_ranks_share_the_work():
    draw = random.Random(0)
    grids = [[[1, 2 * draw.randint(4, 30), 60]] if draw.random() < 0.5 else None
             for _ in range(400)]  # fmt: skip
    lengths = [draw.randint(20, 300) + (g[0][1] * g[0][2] // 4 if g else 0) for g in grids]
    config = config_of(dict(hidden_size=64, intermediate_size=256, depth=8))
    costs = multimodal_costs(config, lengths, grids)
    work = []
    for options in (dict(costs=costs), dict(balance="tokens")):
        ranks = [
            list(PackedBatchSampler(lengths, 2048, rank=rank, world_size=4, **options))
            for rank in range(4)
        ]
        steps = zip(*ranks, strict=True)
        sums = [[sum(costs[i] for i in row) for row in step] for step in steps]
        work.append(sum(max(step) for step in sums) / (costs.sum() / 4))
    assert work[0] < 1.05 < work[1]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([5], []), ValueError, "entry for each of the 1 samples, got 0"),
        (([5], [[[1, 2]]]), ValueError, r"grids\[0\] must be \[n, 3\]"),
        (([5], "x"), TypeError, "grids must be a list"),
        (([5.5], [None]), TypeError, "lengths must be"),
        (([-1], [None]), ValueError, "lengths must not be negative, got -1"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        multimodal_costs(config_of(), *arguments)


def test_real_configs_are_read():
    transformers = pytest.importorskip("transformers")
    for kind in (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "glm4v_moe",
        "ernie4_5_vl_moe",
    ):
        config = transformers.AutoConfig.for_model(kind)
        costs = multimodal_costs(config, [300, 300], [None, torch.tensor([[1, 32, 32]])])
        assert 0 < costs[0] < costs[1]
