"""What a call of a model says about its documents, against the documents one by one in fp64.

Each description is given to models of several kinds, made with attn_implementation="cuseq" and
enabled. A call of documents has their numbers, or raises, or warns. A call without documents has
those of the model before.
"""

from __future__ import annotations

import gc
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuseq

transformers = pytest.importorskip("transformers")
from cuseq.integrations.transformers import _enable, _warn, register, unregister  # noqa: E402

LENGTHS = [5, 1, 4, 2]
VOCAB = 64
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    pad_token_id=0,
)


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = dict(SIZES, rope_parameters=rope)
    vision = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2)
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision)


def gemma3() -> Any:
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(SIZES, head_dim=16, sliding_window=3, layer_types=["sliding_attention"] * 2)
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision | dict(image_size=28, patch_size=14),
        mm_tokens_per_image=4, image_token_id=60, boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        word_embed_proj_dim=32, max_position_embeddings=256, dropout=0.0,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, rotary_dim=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=0,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, mlp_only_layers=[0, 1],
    ),
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
}  # fmt: skip
ENABLED_ONLY = ("gptj", "qwen3_next")
ROTATED_BY_PLANES = ("qwen2_vl",)


def make_model(name: str, how: str = "sdpa") -> nn.Module:
    config = CONFIGS[name]()
    auto = transformers.AutoModelForCausalLM
    if name in ("qwen2_vl", "gemma3"):
        auto = transformers.AutoModelForImageTextToText
    made = {"cuseq": "cuseq"}.get(how, "eager" if name == "gptj" else "sdpa")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=made, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.eval()
    if how == "enabled":
        enable(model)
    return model


def enable(model: nn.Module) -> Any:
    """Enable a model; skip the test if its release of transformers has layers that leak."""
    enabled = cuseq.enable(model)
    if any(warning.startswith("LEAKS") for warning in enabled.warnings):
        pytest.skip(f"documents leak in transformers {transformers.__version__}, and it is said")
    return enabled


@pytest.fixture(autouse=True)
def clean():
    _warn.forget_warnings()
    register()
    yield
    for model in list(_enable._models):
        cuseq.disable(model)
    unregister()
    gc.collect()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 59, (1, n), generator=generator) for n in LENGTHS]


def one_by_one(name: str) -> Tensor:
    """Return the logits `[tokens, vocab]` of the documents, each in a call of its own."""
    model = make_model(name)
    with torch.no_grad():
        return torch.cat([model(doc, use_cache=False).logits[0] for doc in documents()])


# ----------------------------------------------------------------------------- descriptions

POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
TOTAL = sum(LENGTHS)


def batch_with(padding: str, **more: Tensor) -> dict[str, Tensor]:
    """Return a row of the documents with padding, and values for each token, 0 at padding."""
    ids = torch.cat(documents(), dim=1)[0]
    real = torch.ones(TOTAL, dtype=torch.long)
    left, right = {"none": (0, 0), "left": (3, 0), "right": (0, 2), "both": (2, 3)}[padding]
    row = {"input_ids": ids, "attention_mask": real, **more}
    return {name: nn.functional.pad(value, (left, right))[None] for name, value in row.items()}


def listed(padding: str) -> dict[str, Tensor]:
    batch = batch_with(padding, numbers=NUMBERS + 1)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["numbers"]}


def rows_of_documents() -> dict[str, Tensor]:
    """Return two rows: documents of 5 and 1 tokens, and of 4 and 2; the row is flat."""
    batch = batch_with("none", position_ids=POSITIONS)
    return {name: value.view(2, 6) for name, value in batch.items()}


DESCRIPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "positions": lambda: _without_mask(batch_with("none", position_ids=POSITIONS)),
    **{
        f"positions, mask of {kind}, padding {padding}": (
            lambda padding=padding, dtype=dtype: _with_mask_of(
                dtype, batch_with(padding, position_ids=POSITIONS)
            )
        )
        for padding in ("none", "left", "right", "both")
        for kind, dtype in (("int64", torch.int64), ("bool", torch.bool))
    },
    **{
        f"a mask that lists documents, padding {padding}": lambda padding=padding: listed(padding)
        for padding in ("none", "left", "right", "both")
    },
    "rows of several documents": rows_of_documents,
    "seq_idx": lambda: _named("seq_idx", NUMBERS.int()[None]),
    "document_ids": lambda: _named("document_ids", NUMBERS[None]),
    "segment_ids": lambda: _named("segment_ids", NUMBERS[None] + 1),
    "packed_seq_lengths": lambda: _named("packed_seq_lengths", torch.tensor(LENGTHS)),
    "cu_seqlens": lambda: _named("cu_seqlens", OFFSETS),
    "cu_seqlens_q": lambda: _named("cu_seqlens_q", OFFSETS),
    "flash_attn_kwargs": lambda: _named(
        "flash_attn_kwargs", {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
    ),
    "packed_seq_params": lambda: _named(
        "packed_seq_params",
        types.SimpleNamespace(cu_seqlens_q=OFFSETS, cu_seqlens_q_padded=OFFSETS),
    ),
    "packed": lambda: _named("packed", cuseq.PackedLayout.from_lengths(LENGTHS)),
}


def _without_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    del batch["attention_mask"]
    return batch


def _with_mask_of(dtype: torch.dtype, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"attention_mask": batch["attention_mask"].to(dtype)}


def _named(name: str, value: Any) -> dict[str, Any]:
    batch = _without_mask(batch_with("none", position_ids=POSITIONS))
    if name in ("packed", "packed_seq_lengths", *("seq_idx", "document_ids", "segment_ids")):
        del batch["position_ids"]  # the model's positions follow the description
    return batch | {name: value}


def real_logits(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return logits[mask != 0]


@pytest.mark.parametrize("use_cache", [False, True, None])
@pytest.mark.parametrize("how", ["enabled", "cuseq"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_description_gives_the_documents_apart(name, how, use_cache):
    if how == "cuseq" and name in ENABLED_ONLY:
        pytest.skip("the model has to be enabled")
    expected = one_by_one(name)
    model = make_model(name, how)
    caching = {} if use_cache is None else {"use_cache": use_cache}
    failed = []
    for description, batch in DESCRIPTIONS.items():
        given = batch()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = real_logits(model(**given, **caching).logits, given)
            except ValueError as error:
                failed.append(f"{description}: {error}")
                continue
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            failed.append(f"{description}: off by {(found - expected).abs().max():.2g}")
    assert not failed, "\n".join(failed)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, types.SimpleNamespace):
        return types.SimpleNamespace(**moved(vars(value), device))
    return value.to(device)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gptj", "qwen3_next", "qwen2_vl", "gemma3"])
def test_descriptions_on_any_device(name, device):
    expected = one_by_one(name).float().to(device)
    model = make_model(name, "enabled").float().to(device)
    failed = []
    for description, batch in DESCRIPTIONS.items():
        given = moved(batch(), device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = real_logits(model(**given).logits, given)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            failed.append(f"{description}: off by {(found - expected).abs().max():.2g}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("description", DESCRIPTIONS)
@pytest.mark.parametrize("name", ["qwen3", pytest.param("mistral", marks=pytest.mark.full)])
def test_compiled_code_keeps_documents_apart(name, description):
    torch._dynamo.reset()
    expected, model = one_by_one(name), make_model(name, "enabled")
    compiled, batch = (
        torch.compile(model, backend="eager", fullgraph=True),
        DESCRIPTIONS[description](),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = real_logits(compiled(**batch, use_cache=False).logits, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_gradients_are_those_of_the_documents(description):
    weight = torch.randn(TOTAL, VOCAB, dtype=torch.float64)

    def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
        return torch.autograd.grad((logits * weight).sum(), list(model.parameters()))

    stock = make_model("qwen3")
    expected = gradients(stock, torch.cat([stock(doc).logits[0] for doc in documents()]))
    model, batch = make_model("qwen3", "enabled").train(), DESCRIPTIONS[description]()
    found = gradients(model, real_logits(model(**batch).logits, batch))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def planes(padding: str = "none") -> dict[str, Tensor]:
    batch = batch_with(padding, position_ids=POSITIONS)
    return batch | {"position_ids": batch["position_ids"].expand(3, 1, -1)}


@pytest.mark.parametrize("how", ["enabled", "cuseq"])
@pytest.mark.parametrize("padding", [None, "none", "left", "both"])
def test_planes_of_positions_give_the_documents_apart(how, padding):
    expected = one_by_one("qwen2_vl")
    model = make_model("qwen2_vl", how)
    batch = planes(padding or "none")
    if padding is None:
        del batch["attention_mask"]
    with torch.no_grad():
        found = real_logits(model(**batch).logits, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bidirectional_attention_reads_positions():
    def model(implementation: str) -> nn.Module:
        config = transformers.Qwen3Config(**SIZES, head_dim=16)
        config.is_causal = False
        torch.manual_seed(0)
        made = transformers.AutoModel.from_config(
            config, attn_implementation=implementation, dtype=torch.float64
        )
        return made.eval()

    stock, ours = model("sdpa"), model("cuseq")
    batch = DESCRIPTIONS["positions"]()
    with torch.no_grad():
        expected = torch.cat([stock(doc).last_hidden_state[0] for doc in documents()])
        found = ours(**batch).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------ calls without documents


def one_document() -> dict[str, dict[str, Any]]:
    ids = torch.cat(documents(), dim=1)
    rows = ids.repeat(3, 1)
    right = torch.ones_like(rows)
    right[0, 9:] = 0
    right[1, 5:] = 0
    left = right.flip(1)
    counted = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    zeros = (left.cumsum(-1) - 1).clamp(min=0)
    jumps = torch.tensor([[0, 1, 2, 3, 50, 51, 52, 90, 91, 92, 93, 94]])
    repeats = torch.arange(TOTAL)[None] // 2
    later = torch.arange(TOTAL)[None] + 7
    return {
        "padding on the right": dict(input_ids=rows, attention_mask=right),
        "padding on the left": dict(input_ids=rows, attention_mask=left),
        "padding on the left with positions": dict(
            input_ids=rows, attention_mask=left, position_ids=counted
        ),
        "padding on the left with positions of 0": dict(
            input_ids=rows, attention_mask=left, position_ids=zeros
        ),
        "a bool mask": dict(input_ids=rows, attention_mask=right.bool()),
        "a mask of ones": dict(input_ids=ids, attention_mask=torch.ones_like(ids)),
        "positions": dict(input_ids=ids, position_ids=torch.arange(TOTAL)[None]),
        "positions that jump, with a cache": dict(
            input_ids=ids, position_ids=jumps, use_cache=True
        ),
        "positions that repeat, with a cache": dict(
            input_ids=ids, position_ids=repeats, use_cache=True
        ),
        "positions that jump beside a mask": dict(
            input_ids=ids, position_ids=jumps, attention_mask=torch.ones_like(ids)
        ),
        "positions from 7": dict(input_ids=ids, position_ids=later),
    }


@pytest.mark.parametrize("how", ["enabled", "cuseq"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2", "gptj", "qwen2_vl"])
def test_calls_without_documents_are_those_of_the_model(name, how):
    if how == "cuseq" and name in ENABLED_ONLY:
        pytest.skip("the model has to be enabled")
    stock, model = make_model(name), make_model(name, how)
    failed = []
    for description, batch in one_document().items():
        with torch.no_grad():
            found, expected = model(**batch).logits, stock(**batch).logits
        found, expected = real_logits(found, batch), real_logits(expected, batch)
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            failed.append(description)
    assert not failed


# --------------------------------------------------------------------------- errors and warnings


def test_a_mask_with_holes_in_documents_is_refused():
    model = make_model("qwen3", "enabled")
    batch = DESCRIPTIONS["positions, mask of int64, padding none"]()
    batch["attention_mask"][0, 2] = 0
    with pytest.raises(ValueError, match="no zeros inside a document .* got 1 in the one that be"):
        model(**batch)


@pytest.mark.parametrize("name", ["seq_lens", "flash_attn_kwargs", "packed_seq_params"])
def test_a_name_that_is_not_read_is_said(name):
    model = make_model("qwen3", "enabled")
    batch = _without_mask(batch_with("none"))
    with pytest.warns(UserWarning, match=f"{name} does not say to cuseq where documents end"):
        model(**batch, **{name: types.SimpleNamespace(x=1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = cuseq.PackedLayout.from_lengths(LENGTHS)
        model(**batch, packed=layout, position_ids=POSITIONS[None], **{name: 3})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["enabled", "cuseq"])
def test_a_layout_that_no_attention_reads_is_refused(how, implementation):
    model = make_model("qwen3", how)
    model.set_attn_implementation(implementation)
    batch = DESCRIPTIONS["packed"]()
    with pytest.raises(ValueError, match=f'packed is read by .*, got "{implementation}": call'):
        model(**batch)
    model.set_attn_implementation("cuseq")
    with torch.no_grad():
        found = model(**batch).logits[0]
    torch.testing.assert_close(found, one_by_one("qwen3"), rtol=1e-5, atol=1e-5)


def test_token_types_of_zeros_are_text():
    expected = one_by_one("gemma3")
    model = make_model("gemma3", "enabled")
    for description in ("packed", "positions"):
        batch = DESCRIPTIONS[description]()
        types_ = torch.zeros_like(batch["input_ids"])
        with torch.no_grad():
            found = model(**batch, token_type_ids=types_).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- heads that pool


def make_classifier(name: str, auto: str = "AutoModelForSequenceClassification") -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.num_labels, config.pad_token_id = 3, 0
    model = getattr(transformers, auto).from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.eval()


@pytest.mark.parametrize("description", DESCRIPTIONS)
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gptj", "opt"])
def test_a_head_on_the_last_token_scores_each_document(name, description):
    if name != "qwen3" and description not in ("packed", "cu_seqlens", "positions"):
        pytest.skip("tried with qwen3")
    model, labels = make_classifier(name), torch.tensor([2, 0, 1, 1])
    padded = nn.utils.rnn.pad_sequence([doc[0] for doc in documents()], batch_first=True)
    rows = {"input_ids": padded, "attention_mask": (padded != 0).long()}
    expected = model(**rows, labels=labels)
    grads = torch.autograd.grad(expected.loss, list(model.parameters()), allow_unused=True)
    cuseq.enable(model)
    found = model(**DESCRIPTIONS[description](), labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(found.loss, list(model.parameters()), allow_unused=True)
    for one, other in zip(ours, grads, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    again = model(**rows, labels=labels)
    torch.testing.assert_close(again.logits, expected.logits, rtol=1e-5, atol=1e-5)
    cuseq.disable(model)
    assert "forward" not in vars(model)


def test_other_heads_that_pool_are_refused():
    model = make_classifier("qwen3", "AutoModelForQuestionAnswering")
    cuseq.enable(model)
    with pytest.raises(ValueError, match="Qwen3ForQuestionAnswering gives one result for each row"):
        model(**DESCRIPTIONS["packed"]())
    model(documents()[0])
    model = make_classifier("qwen3")
    model.set_attn_implementation("cuseq")
    with pytest.raises(ValueError, match="gives one result for each row .* cuseq.enable"):
        model(**DESCRIPTIONS["packed"]())


def test_heads_of_tokens_take_packed_rows():
    model = make_classifier("qwen3", "AutoModelForTokenClassification")
    expected = torch.cat([model(doc).logits[0] for doc in documents()])
    cuseq.enable(model)
    found = model(**DESCRIPTIONS["packed"]()).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
