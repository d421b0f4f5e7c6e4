"""Test log-probabilities under the heads of models against the models' own logits."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn

import cuseq
from cuseq.reductions.model_head import read_head

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("tests.families.models")

# Families with what their heads do beside a product, and the values that their configs get.
FAMILIES = {
    "llama": ({}, 1.0, None),
    "gpt2": ({}, 1.0, None),  # tied
    "phi": ({}, 1.0, None),  # with a bias
    "gptj": ({}, 1.0, None),  # with a bias
    "gpt_neox": ({}, 1.0, None),  # embed_out
    "opt": ({}, 1.0, None),
    "mamba": ({}, 1.0, None),
    "gemma2": ({"final_logit_softcapping": 2.0}, 1.0, 2.0),
    "gemma3_text": ({"final_logit_softcapping": 2.0}, 1.0, 2.0),
    "nanochat": ({"final_logit_softcapping": 2.0}, 1.0, 2.0),
    "recurrent_gemma": ({"logits_soft_cap": 2.0}, 1.0, 2.0),
    "granite": ({"logits_scaling": 8.0}, 1 / 8, None),
    "granitemoe": ({"logits_scaling": 8.0}, 1 / 8, None),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "cohere2": ({"logit_scale": 0.25}, 0.25, None),
    "falcon_h1": ({"lm_head_multiplier": 0.125}, 0.125, None),
}


def make(name: str, **values) -> nn.Module:
    def change(config):
        for key, value in values.items():
            setattr(config, key, value)

    return models.small_model(name, change).double()


def body_of(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()
    body = next(c for c in model.children() if c is not head and any(True for _ in c.parameters()))
    return getattr(body, "decoder", body)  # OPT calls that


def hidden_and_logits(model, ids):
    """Return what reaches the head, cut from the layers below, and the model's logits."""
    seen = []

    def cut(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        seen.append(hidden.detach().requires_grad_())
        if isinstance(output, tuple):
            return (seen[-1], *output[1:])
        output.last_hidden_state = seen[-1]
        return output

    handle = body_of(model).register_forward_hook(cut)
    logits = model(input_ids=ids).logits[0]
    handle.remove()
    return seen[0], logits


def assert_same(model, ids=None):
    ids = torch.tensor([[5, 9, 3, 22, 41, 7]]) if ids is None else ids
    targets = torch.tensor([9, 3, -100, 41, 7, 60])
    hidden, logits = hidden_and_logits(model, ids)
    kept = targets != -100
    rows = logits.double().log_softmax(1)  # Mamba casts them to fp32
    expected = rows.gather(1, targets.clamp(min=0)[:, None])[:, 0] * kept
    entropies = -(rows.exp() * rows).sum(1) * kept
    found = cuseq.model_logprobs(model, hidden[0], targets, entropy=True, chunk_size=4)
    torch.testing.assert_close(found, (expected, entropies), rtol=2e-5, atol=1e-6)
    leaves = [hidden, *model.get_output_embeddings().parameters()]
    factors = torch.randn(2, 6, dtype=torch.float64)
    grads, wanted = (
        torch.autograd.grad(
            sum((f * one).sum() for f, one in zip(factors, of, strict=True)), leaves
        )
        for of in (found, (expected, entropies))
    )
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_head(name):
    values, scale, softcap = FAMILIES[name]
    if name not in models.family_names():
        pytest.skip("not in this transformers")
    model = make(name, **values)
    head = read_head(model)
    assert (head.scale, head.softcap) == (scale, softcap)
    assert (head.bias is not None) == (name in ("phi", "gptj"))
    assert_same(model)


def test_a_change_of_the_config_is_seen():
    model = make("gemma2", final_logit_softcapping=2.0)
    assert read_head(model).softcap == 2.0
    model.config.final_logit_softcapping = 5.0
    assert read_head(model).softcap == 5.0
    model.config.final_logit_softcapping = None
    assert read_head(model).softcap is None
    assert_same(model)


def test_models_that_contain_one():
    peft = pytest.importorskip("peft")
    model = make("granite", logits_scaling=4.0)
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert read_head(lora).scale == 0.25
    assert read_head(lora).weight is not None
    assert read_head(torch.compile(model)).scale == 0.25
    wrapper = nn.Module()
    wrapper.module = model
    assert read_head(wrapper).scale == 0.25


def test_an_enabled_model_and_other_threads_see_no_change():
    model = make("llama")
    cuseq.enable(model)
    before, parts = dict(vars(model)), dict(model._modules)
    read_head(model)
    assert vars(model) == before and model._modules == parts
    assert_same(model)
    cuseq.disable(model)


def test_a_forward_of_the_object_is_compared_too():
    """Liger and accelerate set one."""
    model = make("llama")
    original = type(model).forward

    def halved(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.logits = output.logits / self.config.logits_scaling
        return output

    model.forward = types.MethodType(halved, model)
    model.config.logits_scaling = 2.0
    assert read_head(model).scale == 0.5
    model.forward = functools.partial(halved, model)
    with pytest.raises(ValueError, match="its forward was replaced by functools.partial"):
        read_head(model)
    del model.forward
    assert read_head(model).scale == 1.0


def test_rows_of_the_weight_beyond_the_vocabulary():
    model = make("llama")
    original = type(model).forward

    def cut(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.logits = output.logits[..., :62]
        return output

    model.forward = types.MethodType(cut, model)
    assert read_head(model).weight.shape == (62, 32)
    assert_same(model)


def test_models_are_not_kept():
    model = make("llama")
    read_head(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def lora_on_the_head(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))


def saved_head(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


def learned_factor(model):
    model.factor = nn.Parameter(torch.ones(()))
    return model


def loose_buffer(model):
    model.register_buffer("final_logits_bias", torch.zeros(64))
    return model


def unknown_factor(model):
    def forward(self, *args, **kwargs):
        output = type(self).forward(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    model.forward = types.MethodType(forward, model)
    return model


def hidden_logits(model):
    def forward(self, *args, **kwargs):
        output = type(self).forward(self, *args, **kwargs)
        output.logits[..., 3] = torch.finfo(output.logits.dtype).min
        return output

    model.forward = types.MethodType(forward, model)
    return model


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output + 1)
    return model


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def own_linear(model):
    model.lm_head = OwnLinear(32, 64)
    return model


def another_norm(model):
    model.norm = nn.LayerNorm(32)
    return model


def no_head(model):
    return model.model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lora_on_the_head, r"it is a peft\.\S*Linear"),
        (saved_head, r"it is a peft\.\S*ModulesToSaveWrapper"),
        (learned_factor, r"other parts than one and a head \(model, lm_head, factor\)"),
        (loose_buffer, r"other parts than one and a head \(model, lm_head, final_logits_bias\)"),
        (unknown_factor, "does not compute logits as hidden @ weight.T times any of"),
        (hidden_logits, "does not compute logits as hidden @ weight.T times any of"),
        (hooked, "it has a forward or hooks of its own"),
        (own_linear, r"it is a \S*OwnLinear"),
        (another_norm, r"other parts than one and a head \(model, norm, lm_head\)"),
        (no_head, "no part of it has get_output_embeddings"),
    ],
)
def test_what_is_refused(change, message):
    model = change(make("llama"))
    with pytest.raises(ValueError, match=message):
        cuseq.model_logprobs(model, torch.zeros(1, 32), torch.tensor([0]))


def test_models_that_are_none():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got Tensor"):
        cuseq.model_logprobs(torch.zeros(3), torch.zeros(1, 32), torch.tensor([0]))


def test_a_model_whose_parameters_ranks_share(tmp_path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
    try:
        model = make("llama")
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        with pytest.raises(ValueError, match="shared out over ranks"):
            read_head(model)
    finally:
        torch.distributed.destroy_process_group()
