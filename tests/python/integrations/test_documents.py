"""What a call of a model says about its documents, against the documents one by one in fp64.

Each description is given to models of several kinds, made with attn_implementation="cuseq" and
enabled. A call of documents has their numbers, or raises, or warns. A call without documents has
those of the model before.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import cuseq

transformers = pytest.importorskip("transformers")
from document_batches import (  # noqa: E402, F401
    CONFIGS,
    DESCRIPTIONS,
    ENABLED_ONLY,
    LENGTHS,
    SIZES,
    VOCAB,
    clean,
    documents,
    make_classifier,
    make_model,
    one_document,
    plain,
    positions_of,
    real_tokens,
    restarting,
    with_random_weights,
)
from tiers import full  # noqa: E402

from cuseq.integrations.transformers._private import MASK_PREPARATION  # noqa: E402


def one_by_one(name: str) -> Tensor:
    """Return the logits `[tokens, vocab]` of the documents, each in a call of its own."""
    model = make_model(name)
    with torch.no_grad():
        return torch.cat([model(doc, use_cache=False).logits[0] for doc in documents()])


# ----------------------------------------------------------------------------- descriptions


def described(description: str) -> dict[str, Any]:
    return DESCRIPTIONS[description](documents())


def real_logits(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return logits[real_tokens(batch)]


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
    for description in DESCRIPTIONS:
        given = described(description)
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
    for description in DESCRIPTIONS:
        given = moved(described(description), device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = real_logits(model(**given).logits, given)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            failed.append(f"{description}: off by {(found - expected).abs().max():.2g}")
    assert not failed, "\n".join(failed)


# A model that embeds positions gets them from these.
WITHOUT_POSITIONS = ("packed", "packed_seq_lengths", "offsets alone", "seq_idx")


# Compiled code reads every description as it reads one of these.
READ_APART = ("packed", "positions", "cu_seqlens", "flash_attn_kwargs", *WITHOUT_POSITIONS)
COMPILED = [
    *(("qwen3", name) if name in READ_APART else full("qwen3", name) for name in DESCRIPTIONS),
    *(("gpt2", description) for description in WITHOUT_POSITIONS),
    *(full("mistral", description) for description in DESCRIPTIONS),
    *(full("opt", description) for description in WITHOUT_POSITIONS),
]


@pytest.mark.parametrize("name, description", COMPILED)
def test_compiled_code_keeps_documents_apart(name, description):
    torch._dynamo.reset()
    expected, model = one_by_one(name), make_model(name, "enabled")
    compiled, batch = (
        torch.compile(model, backend="eager", fullgraph=True),
        described(description),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = real_logits(compiled(**batch, use_cache=False).logits, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["enabled", "cuseq"])
@pytest.mark.parametrize("name, graphs", [("qwen3", 1), ("gpt2", 2)])
def test_compiled_code_is_the_same_for_all_packs(name, graphs, how):
    """A model that reads positions otherwise than by distance has one more graph, of the hook."""
    torch._dynamo.reset()
    model, counter = make_model(name, how), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ([5, 3], [2, 2, 4], [8]):
        packed = cuseq.PackedLayout.from_lengths(lengths, 10)
        ids = torch.arange(10)[None]
        with torch.no_grad():
            found = compiled(input_ids=ids, packed=packed, use_cache=False).logits[0, :8]
            alone = [model(one[None]).logits[0] for one in ids[0, :8].split(lengths)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("describe", ["packed", "offsets"])
def test_compiled_documents_may_go_on_in_the_next_row(describe):
    torch._dynamo.reset()
    model, packed = make_model("qwen3", "enabled"), cuseq.PackedLayout.from_lengths([5, 3, 4])
    ids = torch.arange(12).view(2, 6)
    told = {"packed": packed} if describe == "packed" else {"cu_seq_lens_q": packed.cu_seqlens}
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(input_ids=ids, use_cache=False, **told).logits
        alone = [model(one[None]).logits[0] for one in ids.flatten().split([5, 3, 4])]
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(alone), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_offsets_need_no_values(name):
    """Estimators of memory run a model on meta, or with fake tensors."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            CONFIGS[name](), attn_implementation="cuseq"
        )
        offsets = torch.empty(4, dtype=torch.int32)
        out = model(torch.empty(1, 12, dtype=torch.long), cu_seq_lens_q=offsets, use_cache=False)
    assert out.logits.shape == (1, 12, VOCAB)


def test_errors_of_offsets_name_those_that_were_given():
    ids = plain(documents())["input_ids"]
    with pytest.raises(TypeError, match="cu_seq_lens_k must be a tensor of integers, got list"):
        make_model("gpt2", "enabled")(ids, cu_seq_lens_k=[0, 12])


def make_dynamic() -> nn.Module:
    """Return a model whose rotation changes if positions along the row are its positions."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    sizes = SIZES | {"max_position_embeddings": max(LENGTHS)}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    model = with_random_weights(
        lambda: transformers.LlamaForCausalLM._from_config(config, dtype=torch.float64)
    )
    cuseq.enable(model)
    return model


@pytest.mark.parametrize("description", WITHOUT_POSITIONS)
def test_compiled_rotations_by_length_get_the_positions_of_documents(description):
    torch._dynamo.reset()
    model, batch = make_dynamic(), described(description)
    with torch.no_grad():
        found = real_logits(torch.compile(model, backend="eager")(**batch).logits, batch)
        alone = [model(one, use_cache=False).logits[0] for one in documents()]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "make", [lambda: make_model("gpt2", "enabled"), make_dynamic], ids=["gpt2", "dynamic"]
)
def test_compiled_code_says_that_a_mask_gives_no_positions(make):
    torch._dynamo.reset()
    batch = described("a mask that lists documents, padding left")
    with pytest.warns(UserWarning, match="LEAKS if attention_mask numbers documents: .* positions"):
        torch.compile(make(), backend="eager")(**batch, use_cache=False)
    torch._dynamo.reset()


def test_a_model_imported_after_cuseq_makes_its_mask(monkeypatch):
    """Its module then has cuseq's function for the preparation of masks, and names arguments."""
    code = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    if not hasattr(code, MASK_PREPARATION):
        pytest.skip("Gemma 3 of this transformers does not prepare masks itself")
    prepare = getattr(transformers.masking_utils, MASK_PREPARATION)
    monkeypatch.setattr(code, MASK_PREPARATION, prepare)
    batch = described("positions")
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with torch.no_grad():
        found = real_logits(make_model("gemma3", "enabled")(**batch).logits, batch)
    torch.testing.assert_close(found, one_by_one("gemma3"), rtol=1e-5, atol=1e-5)


def test_layers_with_a_state_do_not_read_a_4d_mask():
    batch = described("positions") | {"attention_mask": torch.ones(1, 1, 12, 12).bool().tril()}
    with pytest.warns(UserWarning, match="LEAKS if the 4-D attention_mask keeps .* pass packed="):
        make_model("qwen3_next", "enabled")(**batch)


@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_gradients_are_those_of_the_documents(description):
    weight = torch.randn(sum(LENGTHS), VOCAB, dtype=torch.float64)

    def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
        return torch.autograd.grad((logits * weight).sum(), list(model.parameters()))

    stock = make_model("qwen3")
    expected = gradients(stock, torch.cat([stock(doc).logits[0] for doc in documents()]))
    model, batch = make_model("qwen3", "enabled").train(), described(description)
    found = gradients(model, real_logits(model(**batch).logits, batch))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def planes(padding: str = "none") -> dict[str, Tensor]:
    batch = restarting(padding, documents())
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
    batch = described("positions")
    with torch.no_grad():
        expected = torch.cat([stock(doc).last_hidden_state[0] for doc in documents()])
        found = ours(**batch).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------ calls without documents


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
    batch = described("positions, mask of int64, padding none")
    batch["attention_mask"][0, 2] = 0
    with pytest.raises(ValueError, match="no zeros inside a document .* got 1 in the one that be"):
        model(**batch)


@pytest.mark.parametrize("name", ["seq_lens", "flash_attn_kwargs", "packed_seq_params"])
def test_a_name_that_is_not_read_is_said(name):
    model = make_model("qwen3", "enabled")
    batch = plain(documents())
    with pytest.warns(UserWarning, match=f"{name} does not say to cuseq where documents end"):
        model(**batch, **{name: types.SimpleNamespace(x=1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = cuseq.PackedLayout.from_lengths(LENGTHS)
        model(**batch, packed=layout, position_ids=positions_of(documents())[None], **{name: 3})


@pytest.mark.parametrize("other", ["cu_seq_lens_k", "cu_seqlens", "packed_seq_lengths"])
@pytest.mark.parametrize("first", ["packed", "cu_seq_lens_q"])
def test_descriptions_that_contradict_each_other_are_refused(first, other):
    model, docs = make_model("qwen3", "enabled"), documents()
    right, wrong = cuseq.PackedLayout.from_lengths(LENGTHS), [LENGTHS[0] - 1, LENGTHS[1] + 1]
    wrong = cuseq.PackedLayout.from_lengths([*wrong, *LENGTHS[2:]])
    batch = {"input_ids": torch.cat(docs, dim=1)}
    batch[first] = right if first == "packed" else right.cu_seqlens

    def told(layout: cuseq.PackedLayout) -> Tensor:
        return layout.lengths if other == "packed_seq_lengths" else layout.cu_seqlens.clone()

    model(**batch, **{other: told(right)})
    with pytest.raises(
        ValueError, match=f"{other} must (not contradict {first}|be equal)|{first} and"
    ):
        model(**batch, **{other: told(wrong)})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["enabled", "cuseq"])
def test_a_layout_that_no_attention_reads_is_refused(how, implementation):
    model = make_model("qwen3", how)
    model.set_attn_implementation(implementation)
    batch = described("packed")
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
        batch = described(description)
        types_ = torch.zeros_like(batch["input_ids"])
        with torch.no_grad():
            found = model(**batch, token_type_ids=types_).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- heads that pool


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
    found = model(**described(description), labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
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
        model(**described("packed"))
    model(documents()[0])
    model = make_classifier("qwen3")
    model.set_attn_implementation("cuseq")
    with pytest.raises(ValueError, match="gives one result for each row .* cuseq.enable"):
        model(**described("packed"))


def test_heads_of_tokens_take_packed_rows():
    model = make_classifier("qwen3", "AutoModelForTokenClassification")
    expected = torch.cat([model(doc).logits[0] for doc in documents()])
    cuseq.enable(model)
    found = model(**described("packed")).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
