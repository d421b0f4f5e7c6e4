"""Test the families that `enable` must take, and the program that tries all of them."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import cuseq

pytest.importorskip("transformers")

import transformers
from hybrid_models import ARE_SEPARATED, INDEXERS_ARE_KNOWN

from cuseq.integrations import transformers as integration
from cuseq.integrations.transformers import documents
from tests.families import __main__ as command
from tests.families import _sweep, _table, attempt, try_family
from tests.families._checks import CHECKS
from tests.families.models import family_names, small_model
from tests.families.result import (
    DIFFERS,
    LEAKS,
    NOT_TRIED,
    RAISES,
    REFUSED,
    RIGHT,
    FamilyResult,
)

ROOT = Path(__file__).resolve().parents[3]
QUICK = tuple(name for name in CHECKS if name != "compile")
# What enable replaces in each family that must be right.
REQUIRED = {
    "codegen": {"attention"},
    "deepseek_v2": {"attention", "rope"},
    "deepseek_v3": {"attention", "rope"},
    "falcon": {"attention", "rope"},
    "gemma2": {"attention", "rope"},
    "gemma4_text": {"attention", "rope"},
    "gpt_neo": {"attention"},
    "gpt_neox": {"attention", "rope"},
    "gpt_neox_japanese": {"attention", "rope"},
    "gpt_oss": {"attention", "rope"},
    "gptj": {"attention"},
    "jamba": {"attention", "recurrence"},
    "granite_swa": {"attention", "rope"},
    "granitemoe_swa": {"attention", "rope"},
    "lfm2": {"attention", "rope", "qk_norm", "conv"},
    "mamba2": {"conv", "recurrence"},
    "qwen3_next": {"attention", "rope", "qk_norm", "conv", "recurrence"},
    "llama4_text": {"attention", "rope", "temperature"},
    "minimax": {"attention", "rope", "recurrence"},
    "mimo_v2_flash": {"attention", "rope"},
    "minimax_m2": {"attention", "rope"},
    "nanochat": {"attention", "rope"},
    "olmo2": {"attention", "rope"},
    "opt": {"attention"},
    "phi": {"attention", "rope"},
    "seed_oss": {"attention", "rope"},
    "stablelm": {"attention", "rope"},
    "xglm": {"attention"},
    "zamba": {"attention", "recurrence"},
}
# Before transformers 5.17 their layers make masks themselves, and are refused.
if INDEXERS_ARE_KNOWN:
    REQUIRED |= {
        "axk2": {"attention", "rope", "indexer"},
        "deepseek_v32": {"attention", "rope", "indexer"},
        "dots3_note_text": {"attention", "rope", "indexer"},
        "glm_moe_dsa": {"attention", "rope", "indexer"},
        "hy_v4": {"attention", "rope", "indexer"},
        "minimax_m3_vl_text": {"attention", "rope", "indexer"},
        "qwen4_exp_text": {"attention", "rope", "indexer", "conv", "recurrence"},
    }
# What older releases lack: families, and keywords for recurrent layers.
REQUIRED = {
    family: parts
    for family, parts in REQUIRED.items()
    if family in family_names() and (ARE_SEPARATED or not {"conv", "recurrence"} & parts)
}


@pytest.mark.parametrize("family", REQUIRED)
def test_required_families_are_right(family):
    result = try_family(family, QUICK)
    assert (result.verdict, result.reason) == (RIGHT, "")
    assert set(result.checks) == set(QUICK) and not any(result.checks.values())
    # transformers 5.24 rewrote GPT-J and CodeGen, whose rotation can be replaced since.
    parts = {entry.partition(":")[0] for entry in result.replaced}
    assert parts - ({"rope"} if family in ("gptj", "codegen") else set()) == REQUIRED[family]


@pytest.mark.parametrize("family", REQUIRED)
def test_required_families_are_right_on_a_gpu(family, cuda):
    result = try_family(family, CHECKS, device="cuda")
    assert (result.verdict, result.reason) == (RIGHT, "")
    assert set(result.checks) == set(CHECKS)


@pytest.mark.full
@pytest.mark.parametrize("family", REQUIRED)
def test_required_families_compile(family):
    result = try_family(family, ["compile"])
    assert (result.verdict, result.reason) == (RIGHT, "")


@pytest.mark.full
def test_no_accepted_family_leaks_or_differs(run_python):
    """This is the table of docs/families.md for the installed transformers, without compile.

    The sweep forks, which a process with threads of autograd cannot.
    """
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.families import _sweep
found = _sweep.sweep({family_names()!r}, {QUICK!r}, jobs=2)
print(json.dumps([(one.family, one.verdict, one.is_wrong, one.reason) for one in found]))
"""
    done = run_python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert sorted(family for family, *_ in results) == family_names()
    assert not [result for result in results if result[2]]
    right = {family for family, verdict, *_ in results if verdict == RIGHT}
    assert set(REQUIRED) <= right, [result for result in results if result[0] in REQUIRED]


# ------------------------------------------------------------------ what the families have in them


def test_the_small_models_have_what_their_families_are_known_for():
    deepseek = small_model("deepseek_v3")
    (layer, _) = (block.self_attn for block in deepseek.model.layers)
    assert layer.qk_head_dim != layer.v_head_dim and deepseek.config.rope_interleave
    llama4 = small_model("llama4_text")
    assert [bool(b.self_attn.use_rope) for b in llama4.model.layers] == [True, False]
    gemma4 = small_model("gemma4_text")
    layers = [block.self_attn for block in gemma4.model.layers]
    assert len({layer.head_dim for layer in layers}) == 2
    assert any(layer.is_kv_shared_layer for layer in layers)
    assert any(layer.use_alternative_attention for layer in layers)
    stablelm = small_model("stablelm")
    assert stablelm.config.qk_layernorm
    assert small_model("phi").model.layers[0].self_attn.rotary_ndims == 4


def test_norms_that_are_left_alone_are_named():
    for family, reason in (
        ("olmo2", "it does not normalise each head separately"),
        ("minimax_m2", "it does not normalise each head separately"),
        ("gemma4_text", "its forward takes"),
    ):
        result = try_family(family, [])
        (left,) = result.left_alone
        assert left.startswith("the norm of queries and keys of ") and reason in left


def test_a_layer_that_counts_positions_in_another_way_is_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward

    def counting(self, hidden_states, position_embeddings=None, **kwargs):
        torch.arange(hidden_states.shape[1])
        modeling_llama.ALL_ATTENTION_FUNCTIONS  # noqa: B018
        return forward(self, hidden_states, position_embeddings, **kwargs)

    model = small_model("llama")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", counting)
    with pytest.raises(ValueError, match="LlamaAttention 0 counts the positions of its tokens"):
        cuseq.enable(model)


@pytest.mark.skipif("zaya" not in family_names(), reason="this transformers has no Zaya")
def test_a_leak_that_enable_warns_of_is_not_wrong():
    result = try_family("zaya", ["separate"])
    assert result.verdict == LEAKS and not result.is_wrong
    assert result.warnings[0].startswith("LEAKS: layers of type hybrid")


@pytest.mark.parametrize(
    "family, reason",
    [
        ("inkling_text", "adds biases of its own to the scores"),
        ("deepseek_v4", "compresses along the row"),
    ],
)
def test_attention_that_is_not_exact_on_packed_rows_is_refused(family, reason):
    if family not in family_names():
        pytest.skip(f"this transformers has no {family}")
    with pytest.raises(ValueError, match=reason):
        cuseq.enable(small_model(family), rope=False, qk_norm=False)


@pytest.mark.parametrize(
    "family, reason",
    [
        ("bloom", "it adds ALiBi's biases to the scores"),
        ("mpt", "it adds ALiBi's biases to the scores"),
        ("bert", r"it has layers with is_causal=False \(BertSelfAttention\)"),
        ("prophetnet", "it attends to the states of an encoder"),
        ("falcon_mamba", r"no keywords on to its recurrent layers \(FalconMambaMixer\)"),
        ("recurrent_gemma", r"its layers take no position_embeddings \(RecurrentGemmaAttention\)"),
        ("xlnet", r"it computes attention in code of its own \(XLNetRelativeAttention\)"),
        ("xlstm", "none of its layers is one of attention"),
    ],
)
def test_a_refusal_says_why(family, reason):
    """Each kind of reason, near the front, since the table of docs/families.md cuts it."""
    if family in ("falcon_mamba", "recurrent_gemma") and not ARE_SEPARATED:
        pytest.skip("the layers of this transformers are written in another way")
    with pytest.raises(ValueError, match=reason) as refused:
        cuseq.enable(small_model(family))
    assert len(str(refused.value).partition(". Train")[0]) < 190


def test_a_model_that_hands_no_keywords_on_is_refused_or_exact():
    """Moshi of older releases gives its layers neither keywords nor a mask."""
    config = transformers.MoshiConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, sliding_window=64,
        audio_vocab_size=32, depth_decoder_config=dict(sliding_window=9, audio_vocab_size=32),
    )  # fmt: skip
    create = transformers.MoshiForCausalLM._from_config
    stock = create(copy.deepcopy(config), attn_implementation="sdpa").eval()
    integration.register()
    try:
        try:
            model = create(config, attn_implementation="cuseq").eval()
        except ValueError as error:
            assert re.search("hands no keywords to its layers|ATTENTION_CLASSES", str(error)), error
            return
        model.load_state_dict(stock.state_dict())
        batch = cuseq.PackingCollator()([{"input_ids": doc} for doc in ([5, 6, 7], [8, 9])])
        alone = [stock(input_ids=torch.tensor([doc])).logits[0] for doc in ([5, 6, 7], [8, 9])]
        for names in (("packed", "position_ids"), ("position_ids",)):
            found = model(batch["input_ids"], **{name: batch[name] for name in names}).logits[0]
            torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)
    finally:
        integration.unregister()


def test_a_deferred_mask_can_be_cut_to_some_queries():
    """transformers 5.23 cuts the masks of Gemma 4 so, to all queries or to the last ones."""
    from cuseq.integrations.transformers.masks import cuseq_mask

    mask = cuseq_mask(2, 4, 4, device=torch.device("cpu"))
    assert mask[:, :, slice(-0, None), :] is mask
    expected = torch.ones(4, 4, dtype=torch.bool).tril()[-2:].expand(2, 1, 2, 4)
    assert torch.equal(mask[:, :, slice(-2, None), :].expand(2, 1, 2, 4), expected)


def test_disable_restores_a_family_with_all_adapters():
    from transformers.models.llama4 import modeling_llama4

    rotate = modeling_llama4.apply_rotary_emb
    model = small_model("llama4_text")
    cuseq.enable(model)
    assert modeling_llama4.apply_rotary_emb is not rotate
    cuseq.disable(model)
    assert modeling_llama4.apply_rotary_emb is rotate
    assert not any("forward" in module.__dict__ for module in model.modules())


# ------------------------------------------------------------------------------------ the program


def wrong_model(family: str, device: str) -> nn.Module:
    """Return a model whose attention adds the row's first token to all others."""
    model = small_model(family, device=device)
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + out[:, :1])
    return model


def test_a_leak_is_found(monkeypatch):
    monkeypatch.setattr(attempt, "small_model", wrong_model)
    result = try_family("llama", ["packed", "separate", "dense"])
    assert result.verdict == LEAKS and result.is_wrong
    assert result.reason == "separate: document 0 reaches document 1"
    assert result.checks["packed"] and not result.checks["dense"]


@pytest.mark.parametrize(
    "family", ["llama", "bert"]
)  # one that `enable` takes, one that it refuses
def test_a_leak_of_a_model_that_is_only_made_by_name_is_found(monkeypatch, family):
    monkeypatch.setattr(documents, "layout_of_masks_and_positions", lambda *told: None)
    result = try_family(family, ["named"])
    assert result.verdict == LEAKS and result.is_wrong
    assert result.reason.startswith("named: positions: logits differ by ")


def failing_model(family: str, device: str) -> nn.Module:
    """Return a model whose layers refuse packed rows."""
    model = small_model(family, device=device)

    def refuse(module, args, kwargs):
        if kwargs.get("packed") is not None:
            raise RuntimeError("no packed rows")

    model.model.layers[0].register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def test_an_exception_is_no_leak(monkeypatch):
    monkeypatch.setattr(attempt, "small_model", failing_model)
    result = try_family("llama", ["separate", "dense"])
    assert result.verdict == RAISES and result.is_wrong
    assert result.reason == "separate: RuntimeError: no packed rows"


def test_position_ids_that_are_not_read_are_found(monkeypatch):
    """The batch of the other checks has `packed` too."""
    monkeypatch.setattr(documents, "layout_of_positions", lambda *arguments: None)
    result = try_family("llama", ["positions", "packed"])
    assert result.verdict == DIFFERS and result.is_wrong
    assert result.reason.startswith("positions: logits differ by") and not result.checks["packed"]


def try_badly(family: str, checks: object, device: str) -> FamilyResult:
    if family == "dies":
        os._exit(1)
    if family == "hangs":
        time.sleep(60)
    return FamilyResult(family, RIGHT)


def test_a_family_that_dies_or_hangs_stops_no_other(monkeypatch):
    monkeypatch.setattr(_sweep, "try_family", try_badly)
    found = {r.family: r for r in _sweep.sweep(["dies", "hangs", "a", "b"], jobs=2, seconds=3)}
    assert found["dies"].reason == "the process that tried it died"
    assert found["hangs"].reason == "took more than 3 seconds"
    assert found["a"].verdict == found["b"].verdict == RIGHT


def test_the_command(tmp_path, capsys, monkeypatch):
    assert command.main(["no_family"]) == command.UNUSABLE
    assert "no_family" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["llama", "--device", "cuda"]) == command.UNUSABLE
    assert "--device must be cpu" in capsys.readouterr().err
    results = {
        "llama": FamilyResult("llama", RIGHT, replaced=("attention:A", "rope:b", "rope:c")),
        "gpt2": FamilyResult("gpt2", REFUSED, "it has | no rotation"),
        "bert": FamilyResult("bert", LEAKS, "separate: document 0 reaches document 1"),
    }
    monkeypatch.setattr(_sweep, "sweep", lambda names, *args, **more: map(results.get, names))
    where = [f"--json={tmp_path / 'a.json'}", f"--docs={tmp_path / 'a.md'}"]
    assert command.main(["llama", "gpt2", *where]) == command.FINE
    assert [one["family"] for one in json.loads((tmp_path / "a.json").read_text())] == [
        "llama",
        "gpt2",
    ]
    page = (tmp_path / "a.md").read_text()
    assert "| `llama` | attention, rope |  |" in page
    assert "| `gpt2` | it has \\| no rotation |" in page and "## Leaking" not in page
    assert capsys.readouterr().out.endswith("1 right, 1 refused\n")
    assert command.main(["bert"]) == command.WRONG


def test_the_table_names_each_verdict():
    page = _table.as_page([FamilyResult(v, v, "why") for v in (LEAKS, DIFFERS, RAISES, NOT_TRIED)])
    for title in ("Leaking", "Different", "Raising", "Not tried"):
        assert f"## {title}" in page
    assert "on a CPU." in page and "on a GPU." in _table.as_page([], "cuda")


def test_a_row_ends_with_the_reason():
    page = _table.as_page(
        [FamilyResult("bloom", REFUSED, "it adds biases. Train it on padded rows")]
    )
    assert "| `bloom` | it adds biases |" in page
