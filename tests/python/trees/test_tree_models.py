"""Test models of transformers on rows of trees against their samples one by one."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

import cuseq

transformers = pytest.importorskip("transformers")

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=8),
    "a window": lambda: transformers.MistralConfig(**BASE, sliding_window=4),
}
PROMPTS = [[5, 6, 7, 8, 9], [11]]
COMPLETIONS = [[[1, 2, 3], [], [4]], [[12, 13, 14, 15], [12, 13]]]
SAMPLES = [
    prompt + completion
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True)
    for completion in completions
]


def make_model(name: str, enabled: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float64)
    if enabled:
        cuseq.enable(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_and_gradients_are_those_of_samples(name):
    model, plain = make_model(name), make_model(name, enabled=False)
    tree = cuseq.PackedTree.from_groups(PROMPTS, COMPLETIONS, total_tokens=20)
    rows, labels, by_sample = tree.targets
    hidden = model.model(
        input_ids=tree.input_ids, position_ids=tree.position_ids, packed=tree.layout
    ).last_hidden_state[0]
    logprobs = cuseq.token_logprobs(hidden[rows], model.lm_head.weight, labels)
    found = cuseq.ops.segment_sum(logprobs, by_sample)
    expected = []
    for sample, completion in zip(SAMPLES, [c for cs in COMPLETIONS for c in cs], strict=True):
        ids = torch.tensor([sample])
        alone = plain(ids).logits[0].log_softmax(-1)
        first = len(sample) - len(completion)
        expected.append(
            sum((alone[i - 1, sample[i]] for i in range(first, len(sample))), alone.new_zeros(()))
        )
    expected = torch.stack(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # norms are in fp32
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch_runs_as_a_tree(left):
    model, plain = make_model("llama"), make_model("llama", enabled=False)
    longest = max(map(len, SAMPLES))
    ids = torch.zeros(len(SAMPLES), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(SAMPLES):
        place = slice(longest - len(sample), None) if left else slice(0, len(sample))
        ids[i, place], mask[i, place] = torch.tensor(sample), 1
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = cuseq.run_packed(model, ids, mask, tree=True).logits
    assert seen == [5 + 3 + 1 + 1 + 4]  # a shared prefix is computed once
    for i, sample in enumerate(SAMPLES):
        alone = plain(torch.tensor([sample])).logits[0]
        torch.testing.assert_close(found[i][mask[i].bool()], alone, atol=1e-5, rtol=1e-4)
    assert not found[~mask.bool()].any()
    found.square().sum().backward()
    with pytest.raises(ValueError, match="tree=True takes input_ids"):
        cuseq.run_packed(model, ids, mask, tree=True, labels=ids)
    with pytest.raises(ValueError, match="segment_multiple and total_multiple must be 1"):
        cuseq.run_packed(model, ids, mask, tree=True, total_multiple=8)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason="recurrent layers of this transformers get no keywords; enable warns that they leak",
)
def test_models_with_a_state_along_the_row_refuse_trees():
    config = transformers.Qwen3NextConfig(
        **BASE | {"num_hidden_layers": 2},
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    cuseq.enable(model)
    tree = cuseq.PackedTree.from_groups(PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match="must not be a tree"):
        model(input_ids=tree.input_ids, position_ids=tree.position_ids, packed=tree.layout)
