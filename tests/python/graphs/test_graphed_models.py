"""Test GraphedStep over transformers' models: bf16, checkpointing, accumulation, LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cuseq
from cuseq import GraphedStep

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY = 128, 128
PACKS = ([40, 50], [1, 9, 100], [128], [16] * 8, [60, 7], [64, 60])
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=TOKENS,
    use_cache=False,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    ),
}


def make_batches() -> list[dict[str, Any]]:
    collate = cuseq.PackingCollator(total_tokens=TOKENS, max_seqs=8)
    packs = [[{"input_ids": torch.arange(n) % 16} for n in lengths] for lengths in PACKS]
    return [collate(pack) for pack in packs * 4]


def make_model(name: str, device: torch.device, checkpointing: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    if checkpointing:
        options = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    cuseq.enable(model)
    return model.train()


def plain_losses(model: torch.nn.Module, batches: list, accumulation: int) -> list[torch.Tensor]:
    """Train as a user would without a graph."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    losses = []
    for first in range(0, len(batches), accumulation):
        parts = []
        for batch in batches[first : first + accumulation]:
            moved = {name: value.to(model.device) for name, value in batch.items()}
            parts.append(model(**moved).loss / accumulation)
            parts[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.detach().float() for part in parts))
    return losses


def graphed_losses(model: torch.nn.Module, batches: list, accumulation: int) -> list[torch.Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    step = GraphedStep(
        lambda batch: model(**batch).loss / accumulation,
        torch.optim.AdamW(weights, lr=1e-3, fused=True),
        batches[0],
        accumulation=accumulation,
        warmup=1,
    )
    losses = []
    for first in range(0, len(batches), accumulation):
        given = batches[first : first + accumulation]
        losses.append(step(given[0] if accumulation == 1 else given).float().clone())
    assert step.captured == (weights[0].device.type == "cuda"), step.reason
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_without_a_graph(name, checkpointing, accumulation, device):
    batches = make_batches()
    expected = plain_losses(make_model(name, device, checkpointing), batches, accumulation)
    found = graphed_losses(make_model(name, device, checkpointing), batches, accumulation)
    assert expected[-1] < expected[0]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_compiled_layers_over_flex_replay_with_the_masks_of_each_row(name, accumulation, cuda):
    models = [make_model(name, cuda, checkpointing=False) for _ in range(2)]
    for model in models:
        cuseq.disable(model)
        cuseq.enable(model, backend="flex")
    for layer in models[1].model.layers:  # they share the mask that the layout holds
        layer.compile(fullgraph=True, dynamic=False)
    batches = make_batches()
    expected = plain_losses(models[0], batches, accumulation)
    found = graphed_losses(models[1], batches, accumulation)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_adapters_train_as_without_a_graph(device):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    models = []
    for _ in range(2):
        model = make_model("qwen3", device, checkpointing=False)
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, adapters).train())
    batches = make_batches()
    expected = plain_losses(models[0], batches, 1)
    torch.testing.assert_close(
        graphed_losses(models[1], batches, 1), expected, rtol=2e-2, atol=2e-2
    )
    base = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in base if not a.requires_grad)
