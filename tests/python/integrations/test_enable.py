"""Test `enable` on live models of every supported family.

Packed rows are compared with the documents one by one through transformers' own eager code, and
everything else must be unchanged.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import signal
import sys
import warnings

import pytest
import torch
from tiers import full
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cuseq

pytest.importorskip("transformers")

import transformers
from hybrid_models import ARE_SEPARATED
from transformers.models.ctrl import modeling_ctrl
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from cuseq.integrations import transformers as integration
from cuseq.integrations._enabled import Enabled
from cuseq.integrations.transformers import _enable, _warn
from cuseq.integrations.transformers import masks as _masks
from cuseq.integrations.transformers._layers import code_of
from cuseq.integrations.transformers.hybrids import plan
from tests.families import models as families

LENGTHS = [5, 1, 9, 3]
VOCAB = 64
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
HEAD = BASE | {"head_dim": 16}
MOE = HEAD | {"num_experts_per_tok": 2}
# Small sections, so that each of the three planes rotates some pairs.
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}


def models() -> dict:
    """Return, by family, the config and the attention class whose norm is fused with RoPE."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

    t = transformers
    return {
        "llama": (t.LlamaConfig(**HEAD), None),
        "mistral": (t.MistralConfig(**HEAD, sliding_window=4), None),
        "qwen2": (t.Qwen2Config(**BASE), None),
        "qwen3": (t.Qwen3Config(**HEAD), "Qwen3Attention"),
        "qwen3_moe": (
            t.Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=16),
            "Qwen3MoeAttention",
        ),
        "gemma2": (t.Gemma2Config(**HEAD, attn_logit_softcapping=2.0, sliding_window=4), None),
        "gemma3": (t.Gemma3TextConfig(**HEAD, sliding_window=4), "Gemma3Attention"),
        "gpt_oss": (t.GptOssConfig(**MOE, num_local_experts=4, sliding_window=4), None),
        "phi3": (t.Phi3Config(**BASE, partial_rotary_factor=0.5), None),
        "glm": (t.GlmConfig(**HEAD), None),
        "glm4": (t.Glm4Config(**HEAD), None),
        "cohere": (t.CohereConfig(**BASE), None),
        "cohere2": (t.Cohere2Config(**BASE, sliding_window=4), None),
        "granite": (t.GraniteConfig(**BASE), None),
        # Its layers rotate only if they have a window.
        "exaone4": (
            t.Exaone4Config(
                **HEAD, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
            ),
            "Exaone4Attention",
        ),
        "olmo2": (t.Olmo2Config(**BASE), None),
        "qwen2_vl": (
            Qwen2VLTextConfig(**BASE, rope_parameters=MROPE | {"mrope_section": [1, 2, 1]}),
            None,
        ),
        "qwen3_vl": (Qwen3VLTextConfig(**HEAD, rope_parameters=MROPE), "Qwen3VLTextAttention"),
    }  # fmt: skip


def names(enabled, part: str) -> tuple[str, ...]:
    """Return the names of one part in `replaced`, such as "attention:NAME"."""
    pairs = [entry.split(":") for entry in enabled.replaced]
    return tuple(name for kind, name in pairs if kind == part)


class WithHead(nn.Module):
    """A text model that has no causal-LM class of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.lm_head = nn.Linear(BASE["hidden_size"], VOCAB)

    def forward(self, input_ids, **kwargs):
        labels = kwargs.pop("labels", None)
        logits = self.lm_head(self.base(input_ids=input_ids, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def make_model(name: str, device="cpu", implementation: str = "eager") -> nn.Module:
    config = models()[name][0]
    torch.manual_seed(0)
    if name.endswith("_vl"):
        code = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["_"])
        kind = getattr(code, type(config).__name__.replace("Config", "Model"))
        model = WithHead(kind._from_config(config, attn_implementation=implementation))
    else:
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # far from the initial values, so that norms matter
        offset = 1.0 if parameter.dim() == 1 else 0.0
        nn.init.normal_(parameter, mean=offset, std=0.2)
    return model.to(device)


def documents(device, lengths=LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, n), generator=generator).to(device) for n in lengths]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return grads


def one_by_one(model: nn.Module, docs: list[Tensor], weight: Tensor):
    logits = torch.cat([model(doc, use_cache=False).logits[0] for doc in docs])
    (logits * weight).sum().backward()
    return logits.detach(), gradients(model)


def packed_run(model: nn.Module, docs: list[Tensor], weight: Tensor, **changes):
    batch = cuseq.PackingCollator()([{"input_ids": doc[0].tolist()} for doc in docs])
    batch = {name: value.to(docs[0].device) for name, value in batch.items() if name != "labels"}
    logits = model(**batch | changes, use_cache=False).logits[0]
    (logits * weight).sum().backward()
    return logits.detach(), gradients(model)


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(
            found[1][name], grad, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), msg=name
        )


def weights(device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(LENGTHS), VOCAB, generator=generator).to(device)


@pytest.mark.parametrize("name", models())
def test_packed_rows_equal_the_documents(name, device):
    model, docs, weight = make_model(name, device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    norm = models()[name][1]
    assert names(enabled, "qk_norm") == (() if norm is None else (norm,))
    assert names(enabled, "attention")
    # Qwen2-VL of older releases rotates by a function of its own.
    assert names(enabled, "rope") or not hasattr(code_of(model), "apply_rotary_pos_emb")
    assert_same(packed_run(model, docs, weight), expected)
    assert_same(one_by_one(model, docs, weight), expected)  # rows that are not packed
    cuseq.disable(model)
    again = one_by_one(model, docs, weight)
    assert torch.equal(again[0], expected[0])


def test_the_table_of_families_is_printed(capsys, device):
    """docs/support.md lists these families."""
    rows = []
    for name in models():
        model = make_model(name, device)
        enabled = cuseq.enable(model)
        rows.append(
            (
                name,
                bool(names(enabled, "rope")),
                bool(names(enabled, "qk_norm")),
                enabled.left_alone,
            )
        )
        cuseq.disable(model)
    with capsys.disabled():
        for name, rope, norm, left in rows:
            fused = "q/k norm fused" if norm else "; ".join(left)
            print(f"\n{name:10} attention, {'rope' if rope else 'no rope'}, {fused}", end="")
    assert len(rows) == 18


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_the_loss_is_that_of_the_documents(name, device):
    model, docs = make_model(name, device), documents(device)
    targets = sum(doc.shape[1] - 1 for doc in docs)
    losses = [
        model(doc, labels=doc, use_cache=False).loss * (doc.shape[1] - 1)
        for doc in docs
        if doc.shape[1] > 1
    ]
    cuseq.enable(model)
    batch = cuseq.PackingCollator()([{"input_ids": doc[0].tolist()} for doc in docs])
    batch = {key: value.to(device) for key, value in batch.items()}
    torch.testing.assert_close(model(**batch).loss, sum(losses) / targets, rtol=1e-5, atol=1e-5)
    cuseq.disable(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "glm"])
def test_generation_is_untouched(name, device):
    model = make_model(name, device, "eager").eval()
    ids = torch.randint(3, VOCAB, (2, 7), device=device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padded on the left
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=mask)
    expected = model.generate(ids, **options)
    cuseq.enable(model)
    assert torch.equal(model.generate(ids, **options), expected)
    cuseq.disable(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_checkpointing(name, reentrant, device):
    model, docs, weight = make_model(name, device), documents(device), weights(device)
    cuseq.enable(model)
    expected = packed_run(model, docs, weight)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", full("gemma3"), full("gpt_oss")])
def test_compiled_layers_share_one_graph(name, device):
    torch._dynamo.reset()
    model, weight = make_model(name, device), weights(device)
    cuseq.enable(model)
    counter = CompileCounterWithBackend("aot_eager")
    expected = {}
    packs = [LENGTHS, [18], [2, 3, 4, 9]]
    for lengths in packs:
        expected[str(lengths)] = packed_run(model, documents(device, lengths), weight)
    for layer in model.model.layers:
        # Experts are chosen by data, which breaks graphs.
        layer.self_attn.compile(backend=counter, fullgraph=True, dynamic=False)
    for lengths in packs:
        found = packed_run(model, documents(device, lengths), weight)
        assert_same(found, expected[str(lengths)])
    kinds = len({getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers})
    assert counter.frame_count == kinds
    cuseq.disable(model)
    torch._dynamo.reset()


def test_layers_compiled_one_by_one_share_the_masks_of_flex(device, monkeypatch):
    torch._dynamo.reset()
    model, weight = make_model("gemma2", device), weights(device)
    cuseq.enable(model)
    held, hold = [], cuseq.PackedLayout.block_mask

    def spy(packed, **options):
        if options.get("hold"):
            held.append((options["causal"], options["window"]))
        return hold(packed, **options)

    def run(lengths):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return packed_run(model, documents(device, lengths), weight)

    monkeypatch.setattr(cuseq.PackedLayout, "block_mask", spy)
    expected = run(LENGTHS)
    assert not held
    if device.type == "cpu":  # where flex attention does not run
        monkeypatch.setattr(_masks, "is_taken_by_compiled_code", lambda call: True)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True, dynamic=False)
    for lengths in (LENGTHS, [18], [2, 3, 4, 9], LENGTHS):
        found = run(lengths)
    if device.type == "cpu":
        assert_same(found, expected)
    else:  # in bf16
        scale = expected[0].abs().max().item()
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.05 * scale)
    assert sorted(held, key=str) == sorted([(True, None), (True, 4)] * 4, key=str)
    assert counter.frame_count == 2
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    called = {str(node.target) for node in nodes if node.op == "call_function"}
    assert not any("mask_ranges" in name or "block_mask" in name for name in called)
    if device.type == "cuda":
        assert any("flex_attention" in name for name in called)
    cuseq.disable(model)
    torch._dynamo.reset()


def test_once_is_enough_and_disable_needs_no_enable(device):
    model = make_model("qwen3", device)
    cuseq.disable(model)
    enabled = cuseq.enable(model)
    assert cuseq.enable(model) is enabled
    cuseq.disable(model)
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__
    assert "forward" not in model.model.layers[0].self_attn.__dict__
    assert model.config._attn_implementation == "eager"


def test_two_models_of_one_family(device):
    first, second = make_model("llama", device), make_model("llama", device)
    original = modeling_llama.apply_rotary_pos_emb
    cuseq.enable(first)
    cuseq.enable(second)
    cuseq.disable(first)
    assert modeling_llama.apply_rotary_pos_emb is not original
    cuseq.disable(second)
    assert modeling_llama.apply_rotary_pos_emb is original


def test_a_dropped_model_gives_its_family_back(device):
    original = modeling_llama.apply_rotary_pos_emb
    model = make_model("llama", device)
    cuseq.enable(model)
    assert modeling_llama.apply_rotary_pos_emb is not original
    del model
    gc.collect()
    assert modeling_llama.apply_rotary_pos_emb is original


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when, device):
    peft = pytest.importorskip("peft")
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    reference = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(3)
    expected = one_by_one(peft.get_peft_model(reference, config), docs, weight)
    if when == "before":
        cuseq.enable(model)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, config)
    if when == "after":
        cuseq.enable(wrapped)
    assert_same(packed_run(wrapped, docs, weight), expected)
    assert any("lora" in name for name in expected[1])
    cuseq.disable(wrapped)


def test_a_copy_is_enabled_too(device):
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    cuseq.enable(model)
    expected = packed_run(model, docs, weight)
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].self_attn.forward.__self__ is copied.model.layers[0].self_attn
    nn.init.zeros_(model.model.layers[0].self_attn.q_norm.weight)
    assert_same(packed_run(copied, docs, weight), expected)
    cuseq.disable(model)


def test_a_part_is_refused_by_name(device):
    model = make_model("llama", device)
    cuseq.enable(model)
    with pytest.raises(
        ValueError, match="what was enabled, a LlamaForCausalLM, got its LlamaModel"
    ):
        cuseq.disable(model.model)
    assert model.config._attn_implementation == "cuseq"
    cuseq.disable(model)
    cuseq.disable(model.model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_saved_whole(kind, device, registered):
    """The loaded model uses cuseq's attention and its own norms, and can be enabled."""
    if "rotary_fn" in vars(make_model(kind).model.layers[0].self_attn):
        pytest.skip("layers of this transformers hold their rotation, which pickle then refuses")
    model, docs, weight = make_model(kind, device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    file = io.BytesIO()
    torch.save(model, file)
    cuseq.disable(model)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    layer = loaded.model.layers[0].self_attn
    assert layer.forward.__func__ is type(layer).forward
    assert_same(packed_run(loaded, docs, weight), expected)
    assert cuseq.enable(loaded) == enabled
    assert_same(packed_run(loaded, docs, weight), expected)
    cuseq.disable(loaded)
    assert "forward" not in vars(layer) and not hasattr(layer, "_cuseq_rotary")


def test_enable_again_after_another_attention_was_asked_for(device):
    model, docs, weight = make_model("llama", device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    model.set_attn_implementation("sdpa")
    assert cuseq.enable(model) is enabled
    assert model.config._attn_implementation == "cuseq"
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)
    assert model.config._attn_implementation == "eager"


HOOKS = {
    "forward": lambda norm: norm.register_forward_hook(lambda module, given, out: 2 * out),
    "before": lambda norm: norm.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "backward": lambda norm: norm.register_full_backward_hook(lambda m, came, went: (2 * came[0],)),
    "before backward": lambda norm: norm.register_full_backward_pre_hook(lambda m, g: (2 * g[0],)),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_what_comes_over_a_norm_later_is_heeded(hook, device):
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    plain = one_by_one(model, docs, weight)
    cuseq.enable(model)
    HOOKS[hook](model.model.layers[0].self_attn.k_norm)
    found = packed_run(model, docs, weight)
    cuseq.disable(model)
    assert_same(found, one_by_one(model, docs, weight))
    with pytest.raises(AssertionError):
        assert_same(found, plain)


def test_weights_that_accelerate_takes_away_later(device):
    accelerate = pytest.importorskip("accelerate")
    model, docs = make_model("qwen3", device).eval(), documents(device)
    with torch.no_grad():
        expected = [model(doc, use_cache=False).logits for doc in docs]
        cuseq.enable(model)
        accelerate.cpu_offload(model, execution_device=device)
        for doc, logits in zip(docs, expected, strict=True):
            torch.testing.assert_close(
                model(doc, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4
            )
        batch = cuseq.PackingCollator()([{"input_ids": doc[0].tolist()} for doc in docs])
        packed = model(**batch, use_cache=False).logits.to(device)
    torch.testing.assert_close(packed, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)


def test_the_model_stays_as_it_is_but_for_what_is_replaced(device):
    """Gates beside the projections stay trainable, and the user's random state does not change."""
    config = transformers.AfmoeConfig(**MOE, num_experts=2, moe_intermediate_size=16)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    trainable = [parameter.requires_grad for parameter in model.to(device).parameters()]
    enabled = cuseq.enable(model)
    assert any("it has other weights: gate_proj" in why for why in enabled.left_alone)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    cuseq.disable(model)

    fused = make_model("qwen3", device)
    seeds = torch.get_rng_state()
    assert names(cuseq.enable(fused), "qk_norm")
    assert torch.equal(torch.get_rng_state(), seeds)
    assert all(parameter.requires_grad for parameter in fused.parameters())
    cuseq.disable(fused)


def test_a_mask_of_values_is_refused(device):
    config = transformers.DogeConfig(**BASE | HEAD)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(
        ValueError, match="DogeAttention 0 computes a mask of its own from its values"
    ):
        cuseq.enable(model.to(device))
    assert model.config._attn_implementation == "eager"


def test_layers_that_mix_neighbours_are_named(device, monkeypatch):
    """A recurrent layer that cuseq does not know, as in a later release of transformers."""
    monkeypatch.setattr(plan, "kind_of", lambda layer: None)
    kinds = ["linear_attention", "full_attention"]
    sizes = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4)
    config = transformers.Qwen3NextConfig(
        **MOE | HEAD | sizes, linear_value_head_dim=4, layer_types=kinds, num_experts=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.warns(UserWarning, match="LEAKS: layers of type linear_attention.*padded") as given:
        enabled = cuseq.enable(model.to(device))
    assert any("layers of type linear_attention" in reason for reason in enabled.left_alone)
    # FlashAttention 4, which "auto" imports on a GPU that it runs on, makes cutlass warn.
    own = [warning for warning in given if not str(warning.message).startswith("cutlass.")]
    assert enabled.warnings == (str(own[0].message),) and len(own) == 1
    assert own[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        assert cuseq.enable(model) is enabled
        packed = cuseq.PackedLayout.from_lengths([2, 3], device=device)
        model(torch.ones(1, 5, dtype=torch.int64, device=device), packed=packed)
    cuseq.disable(model)


def test_a_rotation_that_cannot_be_compared_is_refused(monkeypatch, device):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        raise RuntimeError("it needs something else")

    model = make_model("qwen3", device)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", apply_rotary_pos_emb)
        with pytest.raises(ValueError, match="cannot be compared.*rope=False, qk_norm=False"):
            cuseq.enable(model)
    docs, weight = documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    cuseq.enable(model, rope=False, qk_norm=False)
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)


def test_generation_with_a_static_cache_and_a_window(device):
    model = make_model("mistral", device)
    model.config.sliding_window = 4
    prompt = documents(device)[0][:, :1].expand(1, 11)
    options = dict(max_new_tokens=3, do_sample=False, cache_implementation="static")
    model.set_attn_implementation("sdpa")
    expected = model.generate(prompt, disable_compile=True, **options)
    cuseq.enable(model)
    assert torch.equal(model.generate(prompt, disable_compile=True, **options), expected)
    cuseq.disable(model)


def test_only_attention(device):
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model, rope=False, qk_norm=False)
    assert names(enabled, "rope") == names(enabled, "qk_norm") == ()
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)


def test_one_kernel_is_called_for_norm_and_rotation(device, monkeypatch):
    calls = []
    for name in ("apply_rope", "apply_qk_norm_rope"):
        function = getattr(cuseq, name)

        def counted(*args, function=function, name=name, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(cuseq, name, counted)
    for family, expected in (("qwen3", "apply_qk_norm_rope"), ("llama", "apply_rope")):
        model = make_model(family, device)
        cuseq.enable(model)
        calls.clear()
        packed_run(model, documents(device), weights(device))
        assert calls == [expected] * 2
        cuseq.disable(model)


# ------------------------------------------------------------------------------- the front door


def is_registered() -> bool:
    return "cuseq" in transformers.AttentionInterface().valid_keys()


def test_what_enable_returns():
    model = make_model("qwen3")
    assert cuseq.enable(model) == Enabled(
        kind="model",
        replaced=(
            "attention:Qwen3Attention",
            "rope:transformers.models.qwen3.modeling_qwen3",
            "qk_norm:Qwen3Attention",
        ),
        left_alone=(),
        warnings=(),
    )
    assert "Enabled" not in cuseq.__all__


def test_what_enable_says():
    text = str(cuseq.enable(make_model("qwen3")))
    assert text.splitlines()[:5] == [
        "cuseq is enabled for this model",
        "  replaced    attention: Qwen3Attention",
        "              rotation: modeling_qwen3",
        "              norm of queries and keys, in the rotation's kernel: Qwen3Attention",
        '  attention   "segments" on the CPU, where the model is; chosen anew where it moves',
    ]
    assert "  left alone  nothing\n  warnings    none\n  next        give it rows of" in text
    assert max(map(len, text.splitlines())) <= 98
    flex = str(cuseq.enable(make_model("llama"), backend="flex"))
    assert 'attention   not in torch.float32 on cpu: backend="flex" cannot take this call' in flex
    config = make_model("llama").config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert "attention   not known before a row comes" in str(cuseq.enable(model))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "deepseek_v3", "gemma2", "mamba2"])
def test_a_line_of_the_report_never_stops_enable(family, monkeypatch):
    from cuseq.integrations.transformers import _enable
    from tests.families.models import small_model

    has_attention = family != "mamba2"
    if not (has_attention or ARE_SEPARATED):
        pytest.skip("recurrent layers of this transformers get no keywords")
    model = small_model(family)
    assert bool(cuseq.enable(model).attention) is has_attention
    cuseq.disable(model)

    def fail(*args, **named):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_enable, "attention_backend", fail)
    assert cuseq.enable(model).attention == ""
    cuseq.disable(model)


def test_enable_names_the_backend_of_a_gpu(cuda):
    enabled = cuseq.enable(make_model("qwen3", cuda).bfloat16())
    assert "for eager rows of 4,096 tokens in 8 documents in torch.bfloat16 on cuda" in str(enabled)


@pytest.mark.parametrize("default", ["meta", "cuda"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_default_device_changes_nothing(family, default, request):
    """Models are often made, and enabled, in a block of a default device."""
    if default == "cuda":
        request.getfixturevalue("cuda")
    expected = cuseq.enable(make_model(family))
    model = make_model(family)
    with torch.device(default):
        assert cuseq.enable(model) == expected


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_model_on_meta_gets_its_weights_later(family):
    """As with FSDP: made and enabled without weights, which are loaded afterwards."""
    full = make_model(family)
    with torch.device("meta"):
        model = type(full)(copy.deepcopy(full.config))
    enabled = cuseq.enable(model)
    model.to_empty(device="cpu").load_state_dict(full.state_dict())
    for module, other in zip(model.modules(), full.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            getattr(module, name).copy_(buffer)
    batch = cuseq.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    model.eval(), full.eval()
    expected = cuseq.enable(full)
    assert enabled == expected
    assert torch.equal(model(**batch).logits, full(**batch).logits)


def test_the_same_call_twice_and_other_options():
    model = make_model("qwen3")
    enabled = cuseq.enable(model, rope=False)
    assert names(enabled, "rope") == () and names(enabled, "qk_norm")
    assert cuseq.enable(model, rope=False) is enabled
    assert cuseq.enable(model, rope=False, qk_norm=True) is enabled
    with pytest.raises(ValueError, match="rope must stay False until cuseq.disable, got True"):
        cuseq.enable(model)
    with pytest.raises(ValueError, match="qk_norm must stay True.*got False: disable it"):
        cuseq.enable(model, rope=False, qk_norm=False)
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__
    cuseq.disable(model)
    assert names(cuseq.enable(model), "rope")


@pytest.mark.parametrize("option", ["graph", "cp", "collator", "token_budget", "bin_pack"])
def test_options_that_a_model_does_not_have(option):
    model = make_model("llama")
    with pytest.raises(
        TypeError, match=f"enable of a model takes backend and qk_norm and rope, got {option}"
    ):
        cuseq.enable(model, **{option: None})
    assert_untouched(model)


@pytest.mark.parametrize("option", ["rope", "qk_norm"])
def test_options_are_true_or_false(option):
    model = make_model("qwen3")
    with pytest.raises(TypeError, match=f"{option} must be True or False, got None"):
        cuseq.enable(model, **{option: None})
    assert_untouched(model)


@pytest.mark.parametrize("x", [None, "unsloth", 3, math, object()], ids=lambda x: type(x).__name__)
def test_what_enable_does_not_take(x):
    for call in (cuseq.enable, cuseq.disable):
        with pytest.raises(TypeError, match=f"x must be a transformers model.*{type(x).__name__}"):
            call(x)


def test_a_part_of_an_enabled_model_is_refused():
    model = make_model("llama")
    cuseq.enable(model)
    with pytest.raises(ValueError, match="what was enabled, a LlamaForCausalLM, got its Llama"):
        cuseq.enable(model.model)


def test_a_model_holds_the_registration():
    """From `enable` to `disable`, or until it is garbage-collected."""
    first, second = make_model("llama"), make_model("qwen3")
    cuseq.enable(first), cuseq.enable(second), cuseq.enable(second)
    cuseq.disable(first)
    assert is_registered()
    cuseq.disable(second)
    assert not is_registered()
    cuseq.enable(first), cuseq.disable(first), cuseq.disable(first)
    cuseq.enable(second)
    assert is_registered()
    del second
    gc.collect()
    assert not is_registered()


def test_register_and_enable_nest():
    model = make_model("llama")
    integration.register()
    integration.register()
    cuseq.enable(model)
    integration.unregister()
    assert is_registered(), "the model needs it"
    cuseq.disable(model)
    assert not is_registered()
    cuseq.enable(model)
    integration.register()
    cuseq.disable(model)
    assert is_registered(), "it was registered directly"
    integration.unregister()
    integration.unregister()
    assert not is_registered()


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise KeyboardInterrupt, also in a pytest that a shell put into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "step",
    [
        "give_configs",
        "install_door",
        "fuse",
        "replace_rotation",
        "separate",
        "replace_attention",
    ],
)
def test_an_interrupt_leaves_all_or_nothing(step, ctrl_c, monkeypatch):
    def state(model):
        modules = [(list(vars(m)), len(m._forward_pre_hooks)) for m in model.modules()]
        code = modeling_qwen3.apply_rotary_pos_emb
        return modules, model.config._attn_implementation, code, is_registered()

    model, other = make_model("qwen3"), make_model("qwen3")
    before = state(model)
    original, pressed = getattr(_enable, step), []

    def press(*args, **kwargs):  # Ctrl-C, once
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    def fail(*args, **kwargs):  # an interrupt from elsewhere, once
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(_enable, step, fail)
    with pytest.raises(KeyboardInterrupt):
        cuseq.enable(model)
    assert pressed and state(model) == before

    pressed.clear()
    monkeypatch.setattr(_enable, step, press)
    with pytest.raises(KeyboardInterrupt):
        cuseq.enable(model)
    monkeypatch.undo()
    expected = cuseq.enable(other)
    assert cuseq.enable(model) == expected and len(_enable._models) >= 2
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in other.modules()]
    cuseq.disable(other)
    cuseq.disable(model)
    assert state(model) == before


def test_a_model_that_is_refused_holds_nothing(monkeypatch):
    model = make_model("llama")

    def refuse(*args):
        raise ValueError("not this one")

    monkeypatch.setattr(_enable, "give_configs", refuse)
    with pytest.raises(ValueError, match="not this one"):
        cuseq.enable(model)
    assert not is_registered()
    assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__


# `import cuseq` alone wraps the first function, for the message of one error.
_PATCHED = """
import sys, cuseq, transformers
from transformers import masking_utils

def functions():
    return (
        transformers.PreTrainedModel.__dict__["get_correct_attn_implementation"],
        masking_utils._preprocess_mask_arguments,
        dict(transformers.AttentionInterface._global_mapping),
        dict(transformers.AttentionMaskInterface._global_mapping),
    )

before = functions()
"""


def test_importing_an_integration_patches_nothing(run_python):
    done = run_python(
        _PATCHED
        + """
import cuseq.integrations.transformers, cuseq.integrations.unsloth
from cuseq.integrations.transformers import callback, attention, masks, _enable, _trainer
assert functions() == before
assert functions()[:2] == before[:2]
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_unregister_restores_the_very_functions(run_python):
    done = run_python(
        _PATCHED
        + """
from cuseq.integrations.transformers import register, unregister
unregister()
for _ in range(2):
    register()
    register()
    now = functions()
    assert all(one is not other for one, other in zip(now[:2], before))
    assert "cuseq" in now[2] and "cuseq" in now[3]
    unregister()
    now = functions()
    assert all(one is other for one, other in zip(now[:2], before))
    assert now == before

# Somebody else wraps a function meanwhile: theirs stays, and ours in it does nothing.
register()
ours = masking_utils._preprocess_mask_arguments
theirs = lambda *args, **kwargs: ours(*args, **kwargs)
masking_utils._preprocess_mask_arguments = theirs
unregister()
assert masking_utils._preprocess_mask_arguments is theirs
import torch
transformers.AttentionMaskInterface.register("cuseq", masking_utils.sdpa_mask)
config = transformers.LlamaConfig()
config._attn_implementation = "cuseq"
rows, positions = torch.zeros(1, 4, 8), torch.tensor([[0, 1, 0, 1]])
assert theirs(config, rows, None, None, positions, None)[2] is not None
"""
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------- refusals


def assert_untouched(model: nn.Module) -> None:
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in module.__dict__ for module in model.modules())
    for code in (modeling_llama, modeling_qwen3, modeling_gemma3):
        assert code.apply_rotary_pos_emb.__module__ == code.__name__


def make_changed(config) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_what_is_not_exact_is_refused_whole():
    config = transformers.DogeConfig(**BASE, keep_window_size=4)
    model = make_changed(config)
    with pytest.raises(ValueError, match="DogeAttention 0 computes a mask of its own"):
        cuseq.enable(model)
    assert_untouched(model)


def test_dropout_is_refused_by_packed_rows_in_training_alone(device):
    config = transformers.SeedOssConfig(**HEAD, attention_dropout=0.1)
    model, docs, weight = make_changed(config).to(device), documents(device), weights(device)
    model.eval()
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    (warning,) = enabled.warnings
    assert warning.startswith("DROPOUT: SeedOssAttention drops attention weights")
    assert_same(packed_run(model, docs, weight), expected)
    model.train()
    with pytest.raises(ValueError, match="no dropout, got dropout=0.1"):
        packed_run(model, docs, weight)
    one_by_one(model, docs, weight)  # rows that are not packed may drop
    cuseq.disable(model)


def positions_in_embeddings(name: str, attn_pdrop: float = 0.0, **more):
    if name == "opt":
        sizes = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_attention_heads=4)
        return transformers.OPTConfig(
            vocab_size=VOCAB, num_hidden_layers=2, dropout=0.0, **sizes, **more
        )
    if name == "biogpt":
        dropouts = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=attn_pdrop)
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        return transformers.BioGptConfig(
            vocab_size=VOCAB, intermediate_size=48, **sizes, **dropouts, **more
        )
    if name == "ctrl":
        dropouts = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=attn_pdrop)
        return transformers.CTRLConfig(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, dff=48, **dropouts, **more
        )
    kind = {"gpt2": transformers.GPT2Config, "gpt_bigcode": transformers.GPTBigCodeConfig}[name]
    dropouts = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=attn_pdrop)
    return kind(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, **dropouts, **more)


@pytest.mark.filterwarnings("error:attention_mask has no effect")
@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "opt", "biogpt", "ctrl"])
def test_models_whose_input_embeds_positions(name, device):
    if name == "ctrl" and not hasattr(modeling_ctrl, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("CTRL of this transformers computes attention in code of its own")
    """They rotate nothing, and their positions restart with position_ids."""
    model = make_changed(positions_in_embeddings(name)).to(device)
    docs, weight = documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    assert names(enabled, "attention") and not names(enabled, "rope") and not enabled.warnings
    assert_same(packed_run(model, docs, weight), expected)
    assert_same(packed_run(model, docs, weight, packed=None), expected)  # position_ids alone
    assert_same(one_by_one(model, docs, weight), expected)
    positions = cuseq.PackedLayout.from_lengths(LENGTHS, device=device).position_ids[None].long()
    with torch.no_grad():  # of the model inside too
        inside = model.base_model
        found = inside(torch.cat(docs, dim=1), position_ids=positions, use_cache=False)[0]
        alone = torch.cat([inside(doc, use_cache=False)[0] for doc in docs], dim=1)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    cuseq.disable(model)


def test_position_ids_are_read_beside_a_mask_of_the_models_own(device):
    """OPT makes a 2-D mask of ones if it gets none, which says nothing of documents."""
    model = make_changed(positions_in_embeddings("opt")).to(device)
    ids = torch.cat(documents(device), dim=1)
    layout = cuseq.PackedLayout.from_lengths(LENGTHS, device=device)
    call = dict(input_ids=ids, position_ids=layout.position_ids[None].long(), use_cache=False)
    masked = call | {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        cuseq.enable(model)
        beside = model(**masked)
        alone = model(ids, None, None, None, None, False, **{"position_ids": call["position_ids"]})
        told = model(**call, cu_seq_lens_q=layout.cu_seqlens, cu_seq_lens_k=layout.cu_seqlens)
    for found in (alone, beside):
        torch.testing.assert_close(found.logits, told.logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(position_ids=call["position_ids"])
    cuseq.disable(model)
    assert not model._forward_pre_hooks


def test_a_compiled_model_that_makes_a_mask_warns_of_position_ids(device):
    torch._dynamo.reset()
    model = make_changed(positions_in_embeddings("opt")).eval().to(device)
    cuseq.enable(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _warn.forget_warnings()
    with torch.no_grad(), pytest.warns(UserWarning, match="LEAKS if position_ids are packed"):
        ids = torch.full((1, 5), 3, device=device)
        compiled(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]], device=device), use_cache=False)
    cuseq.disable(model)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "option"), [("gpt2", "attn_pdrop"), ("biogpt", "attention_probs_dropout_prob")]
)
def test_dropout_is_named_as_the_config_does(name, option):
    model = make_changed(positions_in_embeddings(name, attn_pdrop=0.1))
    (warning,) = cuseq.enable(model).warnings
    assert f"drops attention weights ({option}=0.1)" in warning
    device = torch.device("cpu")
    with pytest.raises(ValueError, match=f"set the config's {option} to 0"):
        packed_run(model.train(), documents(device), weights(device))


def test_layers_that_rotate_inside_are_refused():
    """Moshi's layers have rotary embeddings of their own, and its forward drops packed=."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    config = transformers.MoshiConfig(vocab_size=VOCAB, **sizes, ffn_dim=48, num_codebooks=2)
    model = transformers.MoshiForCausalLM(config)
    with pytest.raises(ValueError, match="MoshiForCausalLM has no attention layer that cuseq"):
        cuseq.enable(model)


def test_attention_to_an_encoder_is_refused():
    """The states of an encoder are no tokens of the row."""
    model = make_changed(positions_in_embeddings("gpt2", add_cross_attention=True))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no attention layer that cuseq knows"):
        cuseq.enable(model)


def test_a_backend_is_the_models_own(device):
    """Two models of one class, each with another backend; the one that cannot run says so."""
    docs, weight = documents(device), weights(device)
    models = [make_model("llama", device) for _ in range(2)]
    expected = one_by_one(models[0], docs, weight)
    unable = "flex" if device.type == "cpu" else "flash"  # for a CPU, for fp32
    cuseq.enable(models[0], backend="segments")
    cuseq.enable(models[1], backend=unable)
    assert_same(packed_run(models[0], docs, weight), expected)
    with pytest.raises(ValueError, match=f'backend="{unable}" cannot take this call'):
        packed_run(models[1], docs, weight)
    with pytest.raises(ValueError, match="backend"):
        cuseq.enable(models[0])
    for model in models:
        cuseq.disable(model)
    cuseq.enable(models[1])
    assert_same(packed_run(models[1], docs, weight), expected)
    cuseq.disable(models[1])


@pytest.mark.parametrize("backend", ["FA4", None, "fa4"])
def test_a_backend_that_is_not_there_replaces_nothing(backend):
    if backend == "fa4" and torch.cuda.is_available():
        pytest.skip("it may be there")
    model = make_changed(transformers.LlamaConfig(**HEAD))
    with pytest.raises(ValueError, match="backend"):
        cuseq.enable(model, backend=backend)
    assert_untouched(model)


def test_a_rotation_of_an_older_release(monkeypatch, device):
    """It takes position_ids that it does not read, as that of GPT-OSS before transformers 5.13."""
    own = modeling_qwen3.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        assert position_ids is None
        return own(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    assert names(cuseq.enable(model), "rope") and names(cuseq.enable(model), "qk_norm")
    assert_same(packed_run(model, docs, weight), expected)
    q, cos = torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 3, 4, device=device)
    with pytest.raises(AssertionError):  # positions go to the model's own function
        modeling_qwen3.apply_rotary_pos_emb(q, q, cos, cos, position_ids=torch.arange(3)[None])
    cuseq.disable(model)


def test_another_signature_is_refused(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin, offsets, unsqueeze_dim=1):
        raise AssertionError

    model = make_model("qwen3")
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    with pytest.raises(ValueError, match=r"must take .*'sin', 'unsqueeze_dim'\], got .*offsets"):
        cuseq.enable(model)
    assert model.config._attn_implementation == "eager"
    assert "forward" not in model.model.layers[0].self_attn.__dict__


@pytest.mark.parametrize("name", ["cache", "past_key_values", None])
def test_a_layer_takes_its_cache_by_every_name(name, device):
    """transformers 5.24 renamed past_key_values to cache; None gives it by position."""
    model = make_model("qwen3", device).eval()
    cuseq.enable(model)
    layer = model.model.layers[0].self_attn
    assert "forward" in layer.__dict__
    hidden = torch.randn(1, 3, model.config.hidden_size, device=device)
    angles = model.model.rotary_emb(hidden, torch.arange(3, device=device)[None])
    cache = transformers.DynamicCache(config=model.config)
    given = (hidden, angles, None) if name else (hidden, angles, None, cache)
    layer(*given, **({name: cache} if name else {}))
    assert cache.get_seq_length() == 3
    cuseq.disable(model)


def test_a_cache_of_an_unknown_name_is_refused(monkeypatch):
    """What is in it would be overlooked, so `enable` must not go on."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, memory=None,
                use_cache=None, **kwargs):  # fmt: skip
        raise AssertionError

    model = make_model("qwen3")
    monkeypatch.setattr(modeling_qwen3.Qwen3Model, "forward", forward)
    with pytest.raises(ValueError, match="forward takes none of cache, past_key_values"):
        cuseq.enable(model)
    assert_untouched(model)


def test_another_rotation_is_refused(monkeypatch):
    original = modeling_qwen3.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return original(q, k, cos, 2 * sin, unsqueeze_dim)

    model = make_model("qwen3")
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", apply_rotary_pos_emb)
        with pytest.raises(ValueError, match="rotates heads in a way.*rope=False"):
            cuseq.enable(model)
    assert_untouched(model)


def test_another_norm_is_left_alone(monkeypatch, device):
    """Norms are recognised by their values, not by their names."""
    forward = modeling_qwen3.Qwen3RMSNorm.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: forward(self, x) * 1.5
    )
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    assert names(enabled, "qk_norm") == () and "different numbers" in enabled.left_alone[0]
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)


def test_a_norm_with_hooks_keeps_them(device):
    model, docs, weight = make_model("qwen3", device), documents(device), weights(device)
    norm = model.model.layers[1].self_attn.q_norm
    norm.register_forward_hook(lambda module, args, out: out * 2)
    expected = one_by_one(model, docs, weight)
    enabled = cuseq.enable(model)
    assert "has hooks" in enabled.left_alone[0]
    assert_same(packed_run(model, docs, weight), expected)
    cuseq.disable(model)


def test_what_is_no_model_of_transformers():
    for other in (nn.Linear(2, 2), "a name"):
        with pytest.raises(TypeError, match="transformers model"):
            cuseq.enable(other)
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(
        ValueError, match="BertModel has no attention layer that cuseq knows"
    ) as bert:
        cuseq.enable(transformers.BertModel(config))
    assert "padded batches, or call cuseq.varlen_attention" in str(bert.value)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rotation_by_the_longest_position_refuses_a_part(rope_type):
    """Each rank would read the longest position of its own part, and rotate by other angles."""
    scaling = dict(rope_type=rope_type, factor=4.0, rope_theta=1e4)
    if rope_type == "longrope":
        scaling |= dict(short_factor=[1.0] * 8, long_factor=[4.0] * 8)
        scaling["original_max_position_embeddings"] = 8
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    config = transformers.LlamaConfig(**sizes, **heads, rope_parameters=scaling)
    model = transformers.LlamaForCausalLM(config)
    cuseq.enable(model)
    packed = cuseq.PackedLayout.from_lengths([13, 3])
    ids = torch.arange(16)
    model(ids[None], position_ids=packed.position_ids[None], packed=packed)
    plan = cuseq.distributed.cp_plan(packed, 2)
    local, own = cuseq.distributed.cp_partition(packed, plan, 1, ids)
    message = f"whole row .*longest position.*a rank's part and rope_type='{rope_type}'"
    with pytest.raises(ValueError, match=message):
        model(own[None], position_ids=local.position_ids[None], packed=local)
    cuseq.disable(model)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_that_was_cut_is_refused_before_a_layer_runs(family, device):
    model = make_model(family, device)
    cuseq.enable(model)
    batch = cuseq.PackingCollator()([{"input_ids": [5] * n} for n in LENGTHS])
    batch = {name: value.to(device) for name, value in batch.items()}
    ids = batch["input_ids"]
    ran = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: ran.append(module))
    cut = ids[:, :-4]
    embeds = model.get_input_embeddings()(cut)
    for inputs in (dict(input_ids=cut), dict(input_ids=None, inputs_embeds=embeds)):
        name = "input_ids" if inputs["input_ids"] is not None else "inputs_embeds"
        with pytest.raises(ValueError, match=rf"{name} must have packed.total_tokens = 18.*got 14"):
            model(**(batch | inputs))
    with pytest.raises(ValueError, match="input_ids must have packed.total_tokens = 18.*got 14"):
        model(cut, packed=batch["packed"])
    assert not ran
    model(**batch)
    assert len(ran) == 1
    cuseq.disable(model)
    assert not model._forward_pre_hooks


def test_a_vision_model_has_attention_in_both_parts(device):
    """In a vision-language model the text's attention is replaced, and that of the tower."""
    text = dict(HEAD, rope_parameters=MROPE)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
                  deepstack_visual_indexes=[])  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen3VLForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    ).to(device)
    code = sys.modules[type(model).__module__]
    helpers = {name: one for name, one in vars(code).items() if name.startswith("get_")}
    enabled = cuseq.enable(model)
    assert names(enabled, "attention") == names(enabled, "qk_norm") == ("Qwen3VLTextAttention",)
    assert names(enabled, "tower") == ("Qwen3VLVisionAttention",)
    assert model.config.text_config._attn_implementation == "cuseq"
    assert model.config.vision_config._attn_implementation == "cuseq_flash"
    assert config.vision_config._attn_implementation == "sdpa"  # the user's own object
    cuseq.disable(model)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert helpers == {name: one for name, one in vars(code).items() if name.startswith("get_")}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_replaced_rotation_hands_on_what_it_does_not_know(device):
    model = make_model("llama", device)
    original = modeling_llama.apply_rotary_pos_emb
    cuseq.enable(model)
    replaced = modeling_llama.apply_rotary_pos_emb
    assert inspect.signature(replaced) == inspect.signature(original)
    q = torch.randn(2, 7, 3, 16, device=device)
    angles = torch.randn(2, 7, 8, device=device).repeat(1, 1, 2)
    for x, axis in ((q, 2), (q.transpose(1, 2), 1)):
        for found, expected in zip(
            replaced(x, x, angles.cos(), angles.sin(), axis),
            original(x, x, angles.cos(), angles.sin(), axis),
            strict=True,
        ):
            torch.testing.assert_close(found, expected)
    wide = torch.randn(2, 3, 7, 5, 16, device=device)
    table = torch.randn(2, 7, 5, 16, device=device)
    assert torch.equal(replaced(wide, wide, table, table)[0], original(wide, wide, table, table)[0])
    cuseq.disable(model)


def test_sinks_are_refused_where_they_cannot_be_had(device):
    model, docs = make_model("gpt_oss", device), documents(device)
    cuseq.enable(model)
    ids = torch.cat(docs, 1)
    packed = cuseq.PackedLayout.from_lengths(LENGTHS, device=device)
    offsets = packed.flash_kwargs()
    offsets.pop("packed")
    positions = packed.position_ids.long().unsqueeze(0)
    with pytest.raises(ValueError, match="packed must be passed to a model with sinks"):
        model(ids, position_ids=positions, use_cache=False, **offsets)
    rows = torch.randn(16, 2, 8, device=device)
    flat = cuseq.PackedLayout.from_lengths([16], device=device)
    for sinks in (torch.zeros(3, device=device), torch.zeros(2, device=device).long()):
        with pytest.raises(ValueError, match=r"sinks must be floating point \[heads = 2\]"):
            cuseq.varlen_attention(rows, rows, rows, flat, sinks=sinks)
    cuseq.disable(model)


@pytest.fixture(autouse=True, scope="module")
def unregistered():
    """Undo registrations that other modules left behind."""
    integration.unregister()


@pytest.fixture
def registered():
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    for base in list(_enable._models):
        cuseq.disable(base)
    gc.collect()
    assert not is_registered()
    for code in (modeling_llama, modeling_qwen3, modeling_gemma3):
        assert code.apply_rotary_pos_emb.__module__ == code.__name__


def padded(ids: list[Tensor]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
    return {"input_ids": rows.clamp(min=0), "attention_mask": (rows >= 0).long()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mimo_v2_flash", "granitemoe_swa"])
def test_unpacked_batches_have_the_numbers_of_the_model(name, dtype):
    if name not in families.family_names():
        pytest.skip(f"transformers has no {name}")
    # A window of 4 tokens must not hold padding alone: transformers has NaN there.
    model = families.small_model(name).to(dtype)
    ids = [torch.arange(3, 3 + n) for n in (10, 11, 12)]
    batches = [padded(ids), {"input_ids": ids[2][None]}]
    before = [model(**batch).logits for batch in batches]
    cuseq.enable(model, rope=False, qk_norm=False)
    for batch, expected in zip(batches, before, strict=True):
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        torch.testing.assert_close(model(**batch).logits[real], expected[real])
