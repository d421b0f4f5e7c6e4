"""Test `enable` on models that compute attention in their own code.

`test_families.py` compares packed rows, other batches and gradients of them.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuseq

pytest.importorskip("transformers")

from transformers.models.gptj import modeling_gptj

from cuseq.integrations.transformers import _warn
from cuseq.integrations.transformers._private import OWN_ATTENTION
from tests.families._checks import documents, packed_batch
from tests.families.models import small_model

FAMILIES = ("gpt_neox_japanese", "gpt_neo", "falcon", "xglm")
DROPOUTS = {
    "gpt_neox_japanese": "attention_dropout",
    "gpt_neo": "attention_dropout",
    "xglm": "attention_dropout",
}
# Since transformers 5.24 these two call the attention of their config, as most families do.
REWRITTEN = not hasattr(modeling_gptj.GPTJAttention, OWN_ATTENTION)
if not REWRITTEN:
    FAMILIES = ("gptj", "codegen", *FAMILIES)
    DROPOUTS |= {"gptj": "attn_pdrop", "codegen": "attn_pdrop"}
needs_own_gptj = pytest.mark.skipif(REWRITTEN, reason="GPT-J calls the attention of its config")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def forget():
    """Let each test see our warnings again."""
    _warn.forget_warnings()


def one_by_one(model: nn.Module) -> Tensor:
    return torch.cat([model(doc, use_cache=False).logits[0] for doc in documents()])


def packed_logits(model: nn.Module, **changes: Any) -> Tensor:
    return model(**packed_batch(documents()) | {"use_cache": False} | changes).logits[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)


@every_family
def test_lengths_arrive_in_every_way(family, device):
    model = small_model(family).to(device)
    move = {name: value.to(device) for name, value in packed_batch(documents()).items()}
    with torch.no_grad():
        expected = torch.cat(
            [model(doc.to(device), use_cache=False).logits[0] for doc in documents()]
        )
        cuseq.enable(model)
        layout = move.pop("packed")
        ends = layout.cu_seqlens
        told = (
            {"packed": layout},
            {"packed": layout, "use_cache": True},
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
            {"cu_seq_lens_q": ends, "max_length_q": 9, "packed": layout},
            {},
        )
        for lengths in told:
            assert_close(model(**{**move, "use_cache": False, **lengths}).logits[0], expected)
    cuseq.disable(model)


@every_family
def test_the_text_model_alone_separates_documents_too(family):
    """Its forward swallows `packed`, and the head of most families does not hand it on."""
    model = small_model(family)
    text = model.base_model
    assert text is not model
    with torch.no_grad():
        expected = torch.cat([text(doc).last_hidden_state[0] for doc in documents()])
        cuseq.enable(model)
        batch = packed_batch(documents())
        assert_close(text(**batch).last_hidden_state[0], expected)
        positions = {name: batch[name] for name in ("input_ids", "position_ids")}
        assert_close(text(**positions, use_cache=False).last_hidden_state[0], expected)
    cuseq.disable(model)


@every_family
def test_disable_restores_everything(family):
    model = small_model(family)
    before = one_by_one(model)
    result = cuseq.enable(model)
    assert cuseq.enable(model) is result
    assert not result.warnings
    copied = copy.deepcopy(model)
    assert cuseq.enable(copied) == result
    cuseq.disable(copied)
    saved = io.BytesIO()
    torch.save(model, saved)
    cuseq.disable(model)
    for module in model.modules():
        assert not {"forward", "_attn"} & set(vars(module))
        assert not any(name.startswith("_cuseq") for name in vars(module))
        assert not module._forward_pre_hooks
    assert torch.equal(one_by_one(model), before)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(one_by_one(loaded), before)
    cuseq.enable(loaded)
    assert_close(packed_logits(loaded), before)
    cuseq.disable(loaded)


@pytest.mark.parametrize("family", DROPOUTS)
def test_packed_rows_with_dropout_raise_in_training_mode(family):
    option = DROPOUTS[family]
    model = small_model(family, lambda config: setattr(config, option, 0.1))
    expected = one_by_one(model)
    (warning,) = cuseq.enable(model).warnings
    assert f"drops attention weights ({option}=0.1)" in warning
    assert_close(packed_logits(model), expected)
    model.train()
    with pytest.raises(ValueError, match=f"got dropout=0.1; set the config's {option} to 0"):
        packed_logits(model)
    model(documents()[0], use_cache=False)
    cuseq.disable(model)


def test_dropout_of_falcon_is_not_that_of_attention():
    """Its attention_dropout acts on what the layer returns."""
    model = small_model("falcon", lambda config: setattr(config, "attention_dropout", 0.1))
    assert not cuseq.enable(model).warnings
    packed_logits(model.train())
    cuseq.disable(model)


def test_falcon_with_alibi_is_refused():
    with pytest.raises(ValueError, match="FalconForCausalLM .* it adds ALiBi's biases"):
        cuseq.enable(small_model("falcon", lambda config: setattr(config, "alibi", True)))


@pytest.mark.parametrize("options", [{"multi_query": False}, {"new_decoder_architecture": True}])
def test_falcon_with_other_heads(options):
    model = small_model("falcon", lambda config: [setattr(config, *one) for one in options.items()])
    expected = one_by_one(model)
    cuseq.enable(model)
    assert_close(packed_logits(model), expected)
    cuseq.disable(model)


@needs_own_gptj
def test_rotations_that_stay_are_named():
    model = small_model("gptj")
    (left,) = cuseq.enable(model).left_alone
    assert left == (
        "the rotation of GPTJAttention: apply_rotary_pos_emb takes ['tensor', 'sin', 'cos']"
    )
    cuseq.disable(model)


@needs_own_gptj
def test_another_way_of_attention_is_refused(monkeypatch):
    """The numbers of `_attn` decide, not its name."""
    attn = modeling_gptj.GPTJAttention._attn

    def _attn(self, query, key, value, attention_mask=None):
        return attn(self, query * 1.1, key, value, attention_mask)

    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", _attn)
    with pytest.raises(ValueError, match="in code of its own .GPTJAttention"):
        cuseq.enable(small_model("gptj"))


def test_attention_to_an_encoder_is_refused():
    model = small_model("xglm", lambda config: setattr(config, "add_cross_attention", True))
    with pytest.raises(ValueError, match="it attends to the states of an encoder"):
        cuseq.enable(model)


@every_family
def test_what_packed_rows_cannot_have_raises(family):
    model = small_model(family)
    cuseq.enable(model)
    batch = packed_batch(documents())
    tokens = batch["input_ids"].shape[1]
    with torch.no_grad():
        with pytest.raises(ValueError, match="cannot be combined with a 4-D attention_mask"):
            model(**batch, attention_mask=torch.ones(1, 1, tokens, tokens))
        with pytest.raises(ValueError, match="input_ids must have packed.total_tokens"):
            model(batch["input_ids"][:, 1:], packed=batch["packed"])
        with pytest.raises(ValueError, match="must not contradict packed"):
            ends = torch.tensor([0, 4, tokens], dtype=torch.int32)
            model(**batch, cu_seq_lens_q=ends)
        cache = model(documents()[0], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="not a decode step"):
            model(**batch, past_key_values=cache)
        expected = packed_logits(model)
        mask = torch.ones_like(batch["input_ids"])
        mask[:, 3:6] = 0
        with pytest.warns(UserWarning, match="attention_mask has no effect with packed lengths"):
            assert torch.equal(packed_logits(model, attention_mask=mask), expected)
        if family != "xglm":  # whose forward takes no output_attentions
            with pytest.raises(ValueError, match="output_attentions is not supported"):
                model(**batch, output_attentions=True)
    cuseq.disable(model)


@every_family
def test_check_packing_proves_it(family):
    model = small_model(family)
    examples = [doc[0].tolist() for doc in documents()]
    cuseq.enable(model)
    report = cuseq.check_packing(model, examples)
    assert report.ok, str(report)
    cuseq.disable(model)


@every_family
def test_recomputed_layers_see_their_own_lengths(family):
    """With a checkpoint that is reentrant; the batch after it runs before the backward."""
    model = small_model(family)
    if not model.supports_gradient_checkpointing:
        pytest.skip("the family has no checkpoints")
    cuseq.enable(model)
    packed_logits(model).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    loss = packed_logits(model).square().sum()
    model(documents()[2], use_cache=False)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert_close(found[name], grad)
    cuseq.disable(model)


@every_family
def test_low_precision(family):
    model = small_model(family)
    expected = one_by_one(model)
    model.bfloat16()
    cuseq.enable(model)
    found = packed_logits(model)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.1 * expected.abs().max()
    cuseq.disable(model)


@pytest.mark.parametrize("family", ["falcon", "xglm"])
def test_compiled_code_says_that_it_does_not_read_position_ids(family):
    torch._dynamo.reset()
    model = small_model(family)
    expected = one_by_one(model)
    cuseq.enable(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="LEAKS if position_ids are packed"):
        packed_logits(compiled, packed=None)
    with torch.no_grad():
        assert_close(packed_logits(compiled), expected)
    cuseq.disable(model)
    torch._dynamo.reset()


@every_family
def test_layers_that_are_compiled_train_in_one_graph_each(family, device):
    torch._dynamo.reset()
    model = small_model(family).train().to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    cuseq.enable(model)
    batch = {name: value.to(device) for name, value in packed_batch(documents()).items()}
    expected = model(**batch, use_cache=False).logits
    decoder = model.base_model
    layers = next(m for m in decoder.modules() if isinstance(m, nn.ModuleList))
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    found = model(**batch, use_cache=False).logits
    assert_close(found, expected)
    found.square().mean().backward()
    cuseq.disable(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["gptj", "gpt_neo"])
def test_a_region_of_autocast_does_not_refuse_a_model(family, device):
    model = small_model(family).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert cuseq.enable(model).replaced
    cuseq.disable(model)


def test_a_window_as_long_as_the_context_is_taken():
    def shorten(config: Any) -> None:
        config.max_position_embeddings, config.window_size = 64, 256

    model = small_model("gpt_neo", shorten)
    assert cuseq.enable(model).replaced
    cuseq.disable(model)


def test_a_model_without_values_is_refused_by_a_named_error():
    with pytest.raises(ValueError):
        cuseq.enable(small_model("gptj").to("meta"))
