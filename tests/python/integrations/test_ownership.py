"""What `cuseq.enable` changes belongs to one model: its configs, its copies, what stays behind."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuseq

transformers = pytest.importorskip("transformers")
from document_batches import CONFIGS, clean, documents, enable, make_model  # noqa: E402, F401
from test_documents import described, one_by_one  # noqa: E402

from cuseq.integrations.transformers import unregister  # noqa: E402

KINDS = [name for name in CONFIGS if name not in ("gemma3", "qwen2_vl")]


def packed_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**described("packed")).logits[0]


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def attention(config: Any) -> str:
    return config.get_text_config()._attn_implementation


# ------------------------------------------------------------------------------- one config object


@pytest.mark.parametrize("name", KINDS)
def test_a_sweep_over_models_of_one_config(name):
    config = CONFIGS[name]()
    before = attention(config)
    for _ in range(3):
        model = transformers.AutoModelForCausalLM.from_config(config)
        named = attention(config)
        cuseq.enable(model)
        packed_logits(model.double())
        assert attention(config) == named != "cuseq"
        del model
        gc.collect()
    assert attention(config) == named and before != "cuseq"


@pytest.mark.parametrize("name", KINDS)
def test_models_of_one_config_do_not_share_what_enable_changes(name):
    expected = one_by_one(name)
    first = make_model(name)
    second, third = (type(first)(first.config).double().eval() for _ in range(2))
    for other in (second, third):
        other.load_state_dict(first.state_dict())
    padded = nn.utils.rnn.pad_sequence([d[0] for d in documents()], batch_first=True)
    batch = {"input_ids": padded, "attention_mask": (padded != 0).long()}
    with torch.no_grad():
        stock = third(**batch).logits
    enable(first)
    enable(second)
    assert attention(third.config) != "cuseq"
    for end in (lambda: cuseq.disable(first), lambda: None):
        end()
        assert_near(packed_logits(second), expected)
        with torch.no_grad():
            assert_near(third(**batch).logits, stock)  # its module's rotation is cuseq's
    del second
    gc.collect()
    with torch.no_grad():
        assert torch.equal(third(**batch).logits, stock)
        assert_near(first(**batch).logits, stock)  # its tables were made in fp64


def test_edits_of_a_config_are_kept():
    model = make_model("qwen3")
    config = model.config
    cuseq.enable(model)
    model.config.use_cache = False
    model.config.note = "kept"
    cuseq.disable(model)
    assert model.config is config
    assert config.use_cache is False and config.note == "kept"
    assert config._attn_implementation == "sdpa"


# ------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("name", KINDS)
def test_a_deep_copy_stays_enabled(name):
    expected = one_by_one(name)
    model = make_model(name, "enabled")
    copied = copy.deepcopy(model)
    result = cuseq.enable(model)
    del model
    gc.collect()
    unregister()
    assert_near(packed_logits(copied), expected)
    assert cuseq.enable(copied) == result
    again = copy.deepcopy(copied)
    cuseq.disable(copied)
    assert_near(packed_logits(again), expected)
    assert attention(copied.config) != "cuseq"
    with torch.no_grad():
        assert_near(copied(documents()[0]).logits[0], expected[:5])
    cuseq.disable(again)
    cuseq.disable(again)


def test_a_weight_average_is_enabled():
    expected = one_by_one("qwen3")
    averaged = torch.optim.swa_utils.AveragedModel(make_model("qwen3", "enabled"))
    gc.collect()
    assert_near(packed_logits(averaged), expected)


def test_a_backbone_that_is_kept_alone_goes_on():
    stock = make_model("qwen3")
    with torch.no_grad():
        expected = [stock.model(doc).last_hidden_state[0] for doc in documents()]
    backbone = make_model("qwen3", "enabled").model
    gc.collect()
    unregister()
    with torch.no_grad():
        found = backbone(**described("positions")).last_hidden_state[0]
    assert_near(found, torch.cat(expected))
    with pytest.raises(ValueError, match="must not be a part of an enabled model"):
        cuseq.enable(backbone)


@pytest.mark.parametrize("name", KINDS)
def test_a_pickle_can_be_enabled(name):
    if any("rotary_fn" in vars(module) for module in make_model(name).modules()):
        pytest.skip("layers of this transformers hold their rotation, which pickle then refuses")
    expected = one_by_one(name)
    model = make_model(name, "enabled")
    result = cuseq.enable(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    del model
    gc.collect()
    unregister()
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert_near(loaded(documents()[0]).logits[0], expected[:5])
    try:
        assert_near(packed_logits(loaded), expected)
    except ValueError as error:
        assert "cuseq.enable" in str(error)
    assert cuseq.enable(loaded) == result
    assert_near(packed_logits(loaded), expected)
    cuseq.disable(loaded)
    assert attention(loaded.config) != "cuseq"
    assert not [n for m in loaded.modules() for n in vars(m) if n.startswith("_cuseq")]


# -------------------------------------------------------------------------- layers of other configs


def test_layers_that_were_copied_before():
    model = make_model("qwen3")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[2].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3
    with torch.no_grad():
        expected = torch.cat([model(doc).logits[0] for doc in documents()])
    assert model.model.layers[2].self_attn.config is not model.config
    cuseq.enable(model)
    assert_near(packed_logits(model), expected)
    cuseq.disable(model)
    assert model.model.layers[2].self_attn.config._attn_implementation == "sdpa"


def test_an_adapter_that_saves_the_attention():
    peft = pytest.importorskip("peft")
    model = make_model("qwen3")
    expected = one_by_one("qwen3")
    options = peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])
    wrapped = peft.get_peft_model(model, options).eval()
    cuseq.enable(wrapped)
    assert_near(packed_logits(wrapped), expected)
    cuseq.disable(wrapped)
    assert not [n for m in wrapped.modules() for n in vars(m) if n.startswith("_cuseq")]


# --------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_continuous_batching_runs_as_before(name):
    api = pytest.importorskip("transformers.generation.continuous_batching")
    assert api is not None
    model = make_model(name).float()
    prompts = [doc[0].tolist() for doc in documents()]
    options = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=63)

    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)

    def tokens() -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = model.generate_batch(
                inputs=prompts, generation_config=options, continuous_batching_config=small
            )
        return [one.generated_tokens for one in made.values()]

    try:
        expected = tokens()
    except Exception as error:  # some releases have it for GPUs alone
        pytest.skip(f"transformers cannot: {type(error).__name__}: {error}")
    if not expected:
        pytest.skip("transformers made nothing here")
    model.set_attn_implementation("sdpa")  # releases before 5.12 leave another
    cuseq.enable(model)
    assert tokens() == expected
    cuseq.enable(model)
    assert_near(packed_logits(model.double()), one_by_one(name))
    cuseq.disable(model)
    assert attention(model.config) == "sdpa"
