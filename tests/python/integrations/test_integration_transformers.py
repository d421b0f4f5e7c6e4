"""Test attn_implementation="cuseq" against documents run one by one, and against sdpa."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import torch._functorch.config
import torch._inductor.config
import transformers
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RobertaConfig,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import cuseq
from cuseq._base.foreign import UnknownRelease
from cuseq.integrations import transformers as integration
from cuseq.integrations.transformers import _warn, attention, masks

VOCAB = 61
LENGTHS = [7, 1, 12, 4]
TOKENS = sum(LENGTHS)
TAIL = 8
WINDOW = 5

_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_CONFIGS = {
    "qwen3": (Qwen3Config, dict(head_dim=32)),
    "llama": (LlamaConfig, dict(head_dim=32)),
    "mistral": (MistralConfig, dict(head_dim=32, sliding_window=WINDOW)),
    "gemma3": (
        Gemma3TextConfig,
        dict(
            head_dim=32,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "qwen2": (
        Qwen2Config,
        dict(
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "llama4": (Llama4TextConfig, dict(head_dim=32, intermediate_size_mlp=96, num_local_experts=2)),
    # The window is only in the mask; the attention function does not get it.
    "phimoe": (PhimoeConfig, dict(sliding_window=WINDOW, num_local_experts=2)),
}
BOTH = ("cuseq", "sdpa")
MODELS = ["qwen3", "llama", "mistral", "gemma3", "qwen2"]


def make_model(kind: str, device, implementation: str = "cuseq", dtype=torch.float32, **options):
    config_class, special = _CONFIGS[kind]
    config = config_class(**{**_SHAPE, **special, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=dtype
    )
    return model.to(device).eval()


def make_ids(device, batch: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (batch, tokens), generator=generator).to(device)


def make_layout(device, total_tokens: int | None = None, lengths=LENGTHS) -> cuseq.PackedLayout:
    return cuseq.PackedLayout.from_lengths(lengths, total_tokens).to(device)


def bare_names(layout: cuseq.PackedLayout) -> dict:
    """Return the keywords that other packages' collators give."""
    return {name: value for name, value in layout.flash_kwargs().items() if name != "packed"}


WAYS = {
    "packed": lambda layout: dict(packed=layout),
    "packed, no cache": lambda layout: dict(packed=layout, use_cache=False),
    "packed, on the host": lambda layout: dict(packed=layout.to("cpu")),
    "flash_kwargs": lambda layout: layout.flash_kwargs(),
    "bare names": bare_names,
    "position_ids": lambda layout: dict(),
    "position_ids, no cache": lambda layout: dict(use_cache=False),
}


def one_by_one(model, ids: torch.Tensor, **options) -> torch.Tensor:
    """Return the logits of a row's documents, each run alone, [1, tokens, vocabulary]."""
    return torch.cat([model(part, **options).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def built(monkeypatch):
    """Count the layouts that are made from position ids."""
    calls = []
    original = cuseq.PackedLayout.from_position_ids.__func__

    def counted(cls, *args, **kwargs):
        calls.append(args)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(cuseq.PackedLayout, "from_position_ids", classmethod(counted))
    return calls


@pytest.fixture
def searched(monkeypatch):
    """Count transformers' own searches for packed position ids."""
    calls = []
    original = masking_utils.find_packed_sequence_indices

    def counted(position_ids):
        calls.append(position_ids)
        return original(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", counted)
    return calls


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the attention; the models of this file request it by name."""
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------ packed rows


@pytest.mark.parametrize("kind", [*MODELS, "phimoe"])
def test_logits_are_those_of_the_documents_alone(kind, device):
    model, reference = make_model(kind, device), make_model(kind, device, "sdpa")
    ids, layout = make_ids(device), make_layout(device)
    with torch.no_grad():
        expected = one_by_one(reference, ids)
        for way, keywords in WAYS.items():
            position_ids = layout.position_ids[None].clone()
            logits = model(ids, position_ids=position_ids, **keywords(layout)).logits
            assert_near(logits, expected)
        dense = model(ids, position_ids=torch.arange(TOKENS, device=device)[None]).logits
    assert (dense - expected).abs().max() > 1e-2, "the lengths make no difference here"


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_the_documents_alone(kind, device):
    model, reference = make_model(kind, device), make_model(kind, device, "sdpa")
    ids, layout = make_ids(device), make_layout(device)
    labels = cuseq.data.mask_boundary_labels(ids, layout)
    packed = model(ids, labels=labels, position_ids=layout.position_ids[None], packed=layout)
    packed.loss.backward()

    targets = sum(length - 1 for length in LENGTHS)
    total = 0.0
    for document in ids.split(LENGTHS, dim=1):
        if document.shape[1] > 1:
            loss = reference(document, labels=document).loss * (document.shape[1] - 1) / targets
            loss.backward()
            total += loss.detach()
    assert_near(packed.loss.detach(), total)
    expected, actual = grads(reference), grads(model)
    assert expected.keys() == actual.keys()
    for name, grad in actual.items():
        assert_near(grad, expected[name])


def test_tail_is_seen_by_nobody(device):
    model = make_model("qwen3", device)
    layout = make_layout(device, TOKENS + TAIL)
    ids = make_ids(device, tokens=TOKENS + TAIL)
    edited = ids.clone()
    edited[:, TOKENS:] = 5
    keywords = dict(position_ids=layout.position_ids[None], packed=layout)
    with torch.no_grad():
        logits, other = model(ids, **keywords).logits, model(edited, **keywords).logits
    assert_near(logits[:, :TOKENS], one_by_one(model, ids[:, :TOKENS]))
    assert torch.equal(logits[:, :TOKENS], other[:, :TOKENS])
    assert logits.isfinite().all()


@pytest.mark.parametrize("way", ["packed", "bare names", "position_ids"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_no_document_leaks_into_another(kind, way, device):
    model = make_model(kind, device)
    ids, layout = make_ids(device), make_layout(device)
    start, end = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3])
    edited = ids.clone()
    edited[0, start] = (edited[0, start] + 1) % VOCAB
    keywords = dict(position_ids=layout.position_ids[None], **WAYS[way](layout))
    with torch.no_grad():
        before, after = model(ids, **keywords).logits, model(edited, **keywords).logits
    outside = torch.ones(TOKENS, dtype=torch.bool, device=device)
    outside[start:end] = False
    assert torch.equal(before[:, outside], after[:, outside])
    assert not torch.equal(before[:, start:end], after[:, start:end])


def test_rows_of_a_batch_are_one_flat_row(device):
    model = make_model("mistral", device)
    layout = make_layout(device)
    ids = make_ids(device)
    batch = ids.view(2, -1)  # 7 + 1 + 4 tokens of the third document, then its other 8 and 4
    rows = cuseq.PackedLayout.from_lengths([7, 1, 4, 8, 4]).to(device)
    position_ids = rows.position_ids.view(2, -1)
    with torch.no_grad():
        expected = torch.cat(
            [model(part).logits for part in ids.split([7, 1, 4, 8, 4], dim=1)], dim=1
        )
        for keywords in (dict(packed=rows), bare_names(rows), {}):
            logits = model(batch, position_ids=position_ids, **keywords).logits
            assert_near(logits.flatten(0, 1)[None], expected)
        with pytest.raises(ValueError, match="packed.total_tokens = 24 tokens, got 48"):
            model(batch.repeat(2, 1), packed=layout)


def test_without_causality(device):
    model = make_model("qwen3", device)
    ids, layout = make_ids(device), make_layout(device)
    keywords = dict(is_causal=False, use_cache=False)
    with torch.no_grad():
        expected = one_by_one(model, ids, **keywords)
        causal = one_by_one(model, ids)
        logits = model(ids, position_ids=layout.position_ids[None], packed=layout, **keywords)
    assert_near(logits.logits, expected)
    assert not torch.allclose(expected, causal, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["packed", "bare names", "position_ids"])
def test_gradient_checkpointing(reentrant, way, device):
    ids, layout = make_ids(device), make_layout(device)
    results = []
    for checkpointed in (False, True):
        model = make_model("gemma3", device).train()
        if checkpointed:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
            model.enable_input_require_grads()
        position_ids = layout.position_ids[None].clone()
        model(ids, labels=ids, position_ids=position_ids, **WAYS[way](layout)).loss.backward()
        results.append(grads(model))
    plain, checkpointed = results
    for name, grad in plain.items():
        assert_near(checkpointed[name], grad)


def test_bf16(cuda):
    model = make_model("gemma3", cuda, dtype=torch.bfloat16)
    exact = make_model("gemma3", cuda, "sdpa")
    sdpa = make_model("gemma3", cuda, "sdpa", dtype=torch.bfloat16)
    ids, layout = make_ids(cuda), make_layout(cuda)
    with torch.no_grad():
        expected = one_by_one(exact, ids)
        noise = (one_by_one(sdpa, ids).float() - expected).abs().max()
        logits = model(ids, position_ids=layout.position_ids[None], packed=layout).logits
    assert (logits.float() - expected).abs().max() <= 2 * noise + 1e-3


def test_nothing_synchronises(cuda):
    # Not a model with windows: transformers' KV cache for them copies from pageable memory.
    model = make_model("qwen3", cuda, dtype=torch.bfloat16).train()
    ids = make_ids(cuda)
    for way in ("packed", "packed, no cache", "bare names"):
        layout = make_layout(cuda)
        keywords = dict(position_ids=layout.position_ids[None], **WAYS[way](layout))
        model(ids, **keywords).logits.sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids, **keywords).logits.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(
    "kind, graphs, way",
    [
        ("qwen3", 1, "packed, no cache"),
        ("qwen3", 1, "flash_kwargs"),
        ("gemma3", 2, "packed, no cache"),
    ],
)
def test_compiled_layers_share_one_graph_for_all_packs(kind, graphs, way, device):
    model, eager = make_model(kind, device), make_model(kind, device)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True, dynamic=False)
    ids = make_ids(device)
    for lengths in (LENGTHS, [TOKENS], [1] * TOKENS, [10, 3]):
        layout = make_layout(device, TOKENS, lengths)
        keywords = dict(position_ids=layout.position_ids[None], **WAYS[way](layout))
        keywords.update(labels=ids, use_cache=False)
        compiled, plain = model(ids, **keywords), eager(ids, **keywords)
        assert_near(compiled.logits, plain.logits)
        compiled.loss.backward()
        plain.loss.backward()
        # One for each layer type: a window is a constant of the graph.
        assert counter.frame_count == graphs
    expected = grads(eager)
    for name, grad in grads(model).items():
        assert_near(grad, expected[name])


def test_compiled_layers_do_not_read_the_longest_length(device):
    """The flash keywords carry it as an int; reading it would recompile for every pack."""
    model, eager = make_model("qwen3", device), make_model("qwen3", device)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True, dynamic=False)
    ids = make_ids(device)
    for lengths in (LENGTHS, [2, 2, 2, 18], [6, 6, 6, 6]):
        layout = make_layout(device, TOKENS, lengths)
        keywords = dict(position_ids=layout.position_ids[None], use_cache=False)
        with torch.no_grad():
            actual, expected = (m(ids, **keywords, **bare_names(layout)) for m in (model, eager))
        assert_near(actual.logits, expected.logits)
    assert counter.frame_count == 1


# Without the disk caches, which return old graphs after an op's schema has changed.
@torch._inductor.config.patch(fx_graph_cache=False)
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.full
def test_compiled_with_inductor(device):
    model, eager = make_model("qwen3", device), make_model("qwen3", device)
    exact = copy.deepcopy(eager).double()
    counter = CompileCounterWithBackend("inductor")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=counter, fullgraph=True)
    ids = make_ids(device)
    for lengths in (LENGTHS, [9, 15]):
        layout = make_layout(device, TOKENS, lengths)
        keywords = dict(position_ids=layout.position_ids[None], packed=layout, use_cache=False)
        compiled, plain = model(ids, **keywords).logits, eager(ids, **keywords).logits
        assert_near(compiled, plain)
        for logits in (compiled, plain, exact(ids, **keywords).logits):
            logits.square().sum().backward()
    assert counter.frame_count == 1
    of_all = ([p.grad for p in of.parameters()] for of in (model, eager, exact))
    for compiled_grad, plain_grad, right in zip(*of_all, strict=True):
        # Elements of a gradient are sums that cancel, so compare the error with the whole norm.
        far, plain_far = ((grad - right).norm() for grad in (compiled_grad, plain_grad))
        assert far <= 2 * plain_far + 1e-6 * right.norm()


@pytest.mark.parametrize(
    "part, given",
    [("layers", given) for given in ("packed", "nothing")]
    + [full("layers", given) for given in ("bare names", "position_ids", "mask")]
    + [("model", "packed"), full("model", "position_ids"), full("model", "mask")],
)
def test_compiled_code_is_right_whatever_it_is_given(part, given, device):
    model, reference = make_model("gemma3", device), make_model("gemma3", device, "sdpa")
    if part == "model":
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    ids, layout = make_ids(device), make_layout(device)
    keywords = dict(use_cache=False)
    with torch.no_grad():
        if given in ("mask", "nothing"):
            batch = ids.view(2, -1)
            if given == "mask":
                keywords["attention_mask"] = torch.ones_like(batch)
                keywords["attention_mask"][0, :3] = 0
            # Leaves out pad rows, which see nothing and which sdpa treats in its own way.
            actual = model(batch, **keywords).logits[:, 3:]
            expected = reference(batch, **keywords).logits[:, 3:]
        else:
            keywords["position_ids"] = layout.position_ids[None]
            actual = model(ids, **keywords, **WAYS[given](layout)).logits
            expected = one_by_one(reference, ids)
    assert_near(actual, expected)


# ------------------------------------------------------------------------------ dense batches


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes", "all ones"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_dense_batches_are_exactly_those_of_sdpa(kind, padding, use_cache, device):
    model, reference = make_model(kind, device), make_model(kind, device, "sdpa")
    ids = make_ids(device, batch=3, tokens=11)
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :4] = 0
        mask[2, :9] = 0
    elif padding == "right":
        mask[1, -6:] = 0
    elif padding == "holes":
        mask[:, 3:5] = 0
    keywords = dict(use_cache=use_cache)
    if padding != "none":
        keywords["attention_mask"] = mask
    actual, expected = model(ids, labels=ids, **keywords), reference(ids, labels=ids, **keywords)
    assert torch.equal(actual.logits, expected.logits)
    actual.loss.backward()
    expected.loss.backward()
    reference_grads = grads(reference)
    for name, grad in grads(model).items():
        if device.type == "cpu":
            assert torch.equal(grad, reference_grads[name])
        else:  # some backwards of sdpa and embedding are nondeterministic
            assert_near(grad, reference_grads[name])


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("cache", ["dynamic", None])
def test_generate_equals_sdpa(kind, cache, device, built):
    ids = make_ids(device, batch=2, tokens=9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    outputs = []
    for implementation in BOTH:
        model = make_model(kind, device, implementation)
        options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        options.update(output_logits=True, return_dict_in_generate=True)
        options.update(dict(use_cache=False) if cache is None else {})
        outputs.append(model.generate(ids, **options))
    ours, theirs = outputs
    assert torch.equal(ours.sequences, theirs.sequences)
    for actual, expected in zip(ours.logits, theirs.logits, strict=True):
        assert torch.equal(actual, expected)
    assert not built


def test_switching_a_live_model(device):
    model = make_model("qwen3", device, "sdpa")
    ids, layout = make_ids(device), make_layout(device)
    with torch.no_grad():
        expected = one_by_one(model, ids)
        model.set_attn_implementation("cuseq")
        logits = model(ids, position_ids=layout.position_ids[None], packed=layout).logits
    assert_near(logits, expected)


# ------------------------------------------------------------------------------ masks and lengths


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool])
def test_lengths_win_over_a_2d_mask(mask_dtype, device):
    model = make_model("gemma3", device)
    ids, layout = make_ids(device), make_layout(device)
    # The zeros would change the result; the lengths say that these tokens are real.
    mask = torch.ones_like(ids).to(mask_dtype)
    mask[0, 2:5] = 0
    with torch.no_grad():
        expected = one_by_one(model, ids)
        for keywords in (dict(packed=layout), bare_names(layout)):
            logits = model(
                ids, position_ids=layout.position_ids[None], attention_mask=mask, **keywords
            ).logits
            assert_near(logits, expected)


def test_a_4d_mask_with_lengths_raises(device):
    model, reference = make_model("qwen3", device), make_model("qwen3", device, "sdpa")
    ids, layout = make_ids(device), make_layout(device)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
    mask[..., 3] = False
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    for keywords in (dict(packed=layout), bare_names(layout)):
        with pytest.raises(ValueError, match="4-D attention_mask"):
            model(ids, attention_mask=mask, **keywords)
    assert torch.equal(
        model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    )


def test_a_pattern_of_the_models_own_is_combined_with_documents(device):
    options = dict(use_bidirectional_attention=True)
    model = make_model("gemma3", device, **options)
    reference = make_model("gemma3", device, "sdpa", **options)
    ids, layout = make_ids(device), make_layout(device)
    keywords = dict(position_ids=layout.position_ids[None], use_cache=False)
    expected = reference(ids, **keywords).logits
    assert torch.equal(model(ids, **keywords).logits, expected)
    assert torch.equal(model(ids, packed=layout).logits, expected)
    with pytest.raises(ValueError, match="the model made one for a pattern"):
        model(ids, **bare_names(layout))


@pytest.mark.parametrize("chunk", [WINDOW, TOKENS + 1])
def test_chunks_start_with_each_sequence(device, chunk):
    ids, layout = make_ids(device), make_layout(device)
    options = dict(
        attention_chunk_size=chunk,
        layer_types=["chunked_attention", "full_attention"],
        attn_temperature_tuning=False,
    )
    model, reference = (make_model("llama4", device, name, **options) for name in BOTH)
    with torch.no_grad():
        dense = [m(ids.view(2, -1)).logits for m in (model, reference)]
        assert torch.equal(*dense)
        positions = layout.position_ids[None]
        expected = one_by_one(reference, ids)
        offsets = dict(cu_seq_lens_q=layout.cu_seqlens, cu_seq_lens_k=layout.cu_seqlens)
        for lengths in (dict(packed=layout), offsets, {}):
            logits = model(ids, position_ids=positions, use_cache=False, **lengths).logits
            assert_near(logits, expected)


def test_a_temperature_needs_enable(device):
    """Layers that count positions along the row are replaced by `cuseq.enable` alone."""
    ids, layout = make_ids(device), make_layout(device)
    model = make_model("llama4", device, attn_temperature_tuning=True, floor_scale=2)
    with pytest.raises(ValueError, match="scales queries by their positions.*call cuseq.enable"):
        model(ids, packed=layout, position_ids=layout.position_ids[None], use_cache=False)


def test_a_decode_step_with_lengths_raises(device):
    model = make_model("qwen3", device)
    ids, layout = make_ids(device), make_layout(device)
    cache = model(ids, packed=layout, position_ids=layout.position_ids[None]).past_key_values
    with pytest.raises(ValueError, match="not a decode step"):
        model(ids[:, :1], past_key_values=cache, packed=layout)


def test_what_packed_attention_cannot_do_raises(device):
    ids, layout = make_ids(device), make_layout(device)
    with pytest.raises(ValueError, match="dropout=0.1"):
        make_model("qwen3", device, attention_dropout=0.1).train()(ids, packed=layout)
    with pytest.raises(TypeError, match="packed must be a PackedLayout, got list"):
        make_model("qwen3", device)(ids, packed=LENGTHS)

    model = make_model("qwen3", device)
    for name in attention.UNSUPPORTED:
        if name != "output_attentions":  # transformers removes it
            with pytest.raises(ValueError, match=f"{name} is not supported"):
                model(ids, packed=layout, **{name: torch.ones(1, device=device)})
            with pytest.raises(ValueError, match=f"{name} is not supported"):
                model(ids, **bare_names(layout), **{name: torch.ones(1, device=device)})


def test_soft_caps_are_those_of_the_models_own_attention(device):
    config = Gemma2Config(**_SHAPE, head_dim=32, sliding_window=WINDOW, attn_logit_softcapping=2.0)
    models = [
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name)
        .to(device)
        .eval()
        for name in ("cuseq", "eager")
    ]
    models[0].load_state_dict(models[1].state_dict())
    ids, layout = make_ids(device), make_layout(device)
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits)
    positions = layout.position_ids[None]
    packed = models[0](ids, packed=layout, position_ids=positions).logits
    bare = models[0](ids, **bare_names(layout), position_ids=positions).logits
    torch.testing.assert_close(bare, packed)
    begin = 0
    for length in layout.lengths.tolist():
        own = slice(begin, begin + length)
        begin += length
        torch.testing.assert_close(packed[:, own], models[1](ids[:, own]).logits)


def test_a_layer_that_calls_itself_bidirectional_under_a_causal_mask(device):
    """As in PaliGemma, whose text is causal without images."""
    torch.manual_seed(0)
    config = LlamaConfig(**_SHAPE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cuseq").to(device)
    batch = cuseq.PackingCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 4, 3]}])
    batch = {name: value.to(device) for name, value in batch.items()}
    expected = model(**batch, use_cache=False).logits
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert torch.equal(model(**batch, use_cache=False).logits, expected)
    asked = model(**batch, use_cache=False, is_causal=False).logits
    assert not torch.equal(asked, expected), "what the call says is stronger"


@pytest.mark.parametrize(
    "config,why",
    [
        (BloomConfig(hidden_size=16, n_head=2, n_layer=1), "does not support sdpa"),
        (
            FalconConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1),
            "FALCON_ATTENTION_CLASSES",
        ),
        (
            BartConfig(d_model=16, decoder_attention_heads=2, decoder_layers=1),
            "counts positions along the row",
        ),
        (
            RobertaConfig(
                hidden_size=16, num_attention_heads=2, num_hidden_layers=1, is_decoder=True
            ),
            "counts positions from the one after its padding token",
        ),
    ],
    ids=["bloom", "falcon", "bart", "roberta"],
)
def test_models_that_cannot_use_it(config, why):
    with pytest.raises(ValueError, match=f"ForCausalLM cannot use .*{why}"):
        AutoModelForCausalLM.from_config(config, attn_implementation="cuseq")
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_recurrent_layers_are_warned_of(device):
    config = Qwen3NextConfig(
        **_SHAPE,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cuseq").to(device)
    ids, layout = make_ids(device), make_layout(device)
    _warn.forget_warnings()
    with pytest.warns(UserWarning, match="layers of type linear_attention"):
        model(ids, packed=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, packed=layout)


@pytest.mark.parametrize(
    "keywords, message",
    [
        (dict(cu_seq_lens_q=torch.tensor([0])), r"\[n_seqs \+ 1\] with at least one"),
        (
            dict(cu_seq_lens_q=torch.tensor([0, TOKENS]), cu_seq_lens_k=torch.tensor([0, 3, 4])),
            r"must be equal in self-attention, got shapes \[2\] and \[3\]",
        ),
        (
            dict(cu_seq_lens_q=torch.tensor([0, TOKENS]), max_length_q=TOKENS, max_length_k=3),
            f"must be equal in self-attention, got {TOKENS} and 3",
        ),
        (
            dict(
                cu_seq_lens_q=torch.tensor([0, 5, TOKENS]),
                cu_seq_lens_k=torch.tensor([0, 6, TOKENS]),
            ),
            r"must be equal in self-attention, got \[0, 5, 24\] and \[0, 6, 24\]",
        ),
    ],
)
def test_impossible_names_raise(keywords, message, device):
    with pytest.raises(ValueError, match=message):
        make_model("qwen3", device)(make_ids(device), **keywords)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "packed_seq_lengths"])
@pytest.mark.parametrize(
    "value, got", [([0, TOKENS], "list"), (torch.tensor([0.0, TOKENS]), "float32")]
)
def test_lengths_of_another_type_are_named(name, value, got, device):
    with pytest.raises(TypeError, match=f"{name} must .*, got .*{got}"):
        make_model("qwen3", device)(make_ids(device), **{name: value})


@pytest.mark.parametrize("value", [12.0, [12], "12"])
def test_a_longest_length_that_is_no_int_is_named(value, device):
    model, layout = make_model("qwen3", device), make_layout(device)
    keywords = bare_names(layout) | dict(max_length_k=value)
    with pytest.raises(TypeError, match="max_length_k must be an int, got"):
        model(make_ids(device), position_ids=layout.position_ids[None], **keywords)


def test_a_window_that_is_no_int_is_named(device):
    layout, query = make_layout(device), torch.randn(1, 4, TOKENS, 32, device=device)
    for keywords in (dict(packed=layout), bare_names(layout), {}):
        with pytest.raises(TypeError, match="sliding_window must be an int, got 2.5"):
            attention.cuseq_attention(
                torch.nn.Module(), query, query, query, None, sliding_window=2.5, **keywords
            )
    with pytest.raises(TypeError, match="sliding_window must be an int, got 2.5"):
        masks.cuseq_mask(1, TOKENS, TOKENS, local_size=2.5, device=device)


CONTRADICTIONS = {
    "cu_seq_lens_q": torch.tensor([0, 8, 20, TOKENS], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, TOKENS]),
    "packed_seq_lengths": torch.tensor([8, 12, 4]),
    "max_length_q": 11,
    "max_length_k": torch.tensor(4),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_lengths_that_contradict_the_layout_are_named(name, device):
    model, layout = make_model("qwen3", device), make_layout(device)
    named = "max_length_q" if name == "max_length_k" else name
    with pytest.raises(ValueError, match=f"{named} must not contradict packed, got"):
        model(make_ids(device), packed=layout, **{name: CONTRADICTIONS[name]})


def test_lengths_that_agree_with_the_layout_in_their_own_way(device):
    """The tail as one or several sequences, empty sequences left out, a slice of one offset."""
    model = make_model("qwen3", device)
    ids = make_ids(device)
    layout = make_layout(device, TOKENS, [7, 0, 1, 12])
    for keywords in (
        layout.flash_kwargs(),
        dict(cu_seq_lens_q=torch.tensor([0, 7, 8, 20, TOKENS]), max_length_q=12),
        dict(cu_seq_lens_k=torch.tensor([0, 7, 8, 20, 21, 22, 23, TOKENS])),
        dict(cu_seq_lens_q=torch.tensor([0]), cu_seq_lens_k=torch.tensor([0])),
        dict(packed_seq_lengths=torch.tensor([7, 1, 12, 4])),
        dict(max_length_q=TOKENS),
    ):
        model(ids, position_ids=layout.position_ids[None], **keywords | dict(packed=layout))


def test_names_as_other_packages_give_them(device):
    """int64 offsets, the longest length as a tensor or missing, only one of each pair."""
    model = make_model("mistral", device)
    ids, layout = make_ids(device), make_layout(device)
    offsets = layout.cu_seqlens.long()
    with torch.no_grad():
        expected = one_by_one(model, ids)
        for keywords in (
            dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets),
            dict(cu_seq_lens_q=offsets, max_length_q=torch.tensor(12)),
            dict(cu_seq_lens_k=offsets, max_length_k=12),
            dict(cu_seq_lens_q=offsets, max_length_q=torch.tensor(12, device=device)),
        ):
            logits = model(ids, position_ids=layout.position_ids[None], **keywords).logits
            assert_near(logits, expected)


def test_bare_names_take_the_exact_longest_length_in_eager_code(device, monkeypatch):
    model = make_model("qwen3", device)
    seen = []
    original = torch.ops.cuseq.varlen_attention
    names = [argument.name for argument in original.default._schema.arguments]

    def watched(*arguments, **options):
        given = dict(zip(names, arguments, strict=False)) | options
        seen.append(given["max_seqlen_bound"])
        return original(*arguments, **options)

    monkeypatch.setattr(torch.ops.cuseq, "varlen_attention", watched)
    layout = make_layout(device)
    model(make_ids(device), position_ids=layout.position_ids[None], **bare_names(layout))
    assert seen == [max(LENGTHS)] * 2


# ------------------------------------------------------------------------------ position ids alone


def test_position_ids_are_read_once(device, built):
    """All layers, layer types and forwards share one read, until the ids are edited."""
    model = make_model("gemma3", device)
    ids, layout = make_ids(device), make_layout(device)
    position_ids = layout.position_ids[None].clone()
    with torch.no_grad():
        model(ids, position_ids=position_ids)
        model(ids, position_ids=position_ids)
        assert len(built) == 1
        position_ids.copy_(torch.arange(TOKENS, device=device))
        logits = model(ids, position_ids=position_ids).logits
        assert len(built) == 2
        assert torch.equal(logits, make_model("gemma3", device, "sdpa")(ids).logits)


REWRITES = {
    "numpy": lambda ids, new: ids.cpu().numpy().__setitem__(..., new.cpu().numpy()),
    "data": lambda ids, new: ids.data.copy_(new),
    "dlpack": lambda ids, new: torch.from_dlpack(ids.detach()).copy_(new),
}


@pytest.mark.parametrize("how", REWRITES)
@pytest.mark.parametrize("reached", ["invalidate", "clear"])
def test_position_ids_rewritten_past_the_version_counter(how, reached):
    """`invalidate` and `clear` drop what is cached from them, so the new documents are used."""
    model, cpu = make_model("qwen3", "cpu"), torch.device("cpu")
    ids, layout = make_ids(cpu), make_layout(cpu)
    other = make_layout(cpu, TOKENS, [5, 19]).position_ids[None].long()
    position_ids = layout.position_ids[None].long().clone()
    with torch.no_grad():
        expected = model(ids, position_ids=other.clone()).logits
        first = model(ids, position_ids=position_ids).logits
        REWRITES[how](position_ids, other)
        if reached == "invalidate":
            cuseq.cache.invalidate(position_ids)
        else:
            cuseq.cache.clear()
        assert_near(model(ids, position_ids=position_ids).logits, expected)
    assert not torch.allclose(first, expected, atol=1e-2)


def test_what_is_kept_of_a_forward_is_listed(device, fresh_cache):
    """Layouts of position ids and deferred masks are freed with their tensors and objects."""
    model, ids, layout = make_model("qwen3", device), make_ids(device), make_layout(device)
    position_ids = layout.position_ids[None].clone()
    deferred = masks.cuseq_mask(2, 6, 6, attention_mask=torch.ones(2, 6).tril().bool())
    with torch.no_grad():
        model(ids, position_ids=position_ids)
    mask = deferred.build_once(device)
    assert deferred.build_once(device) is mask
    for fact in ("packed_positions", "deferred_mask"):
        assert cuseq.cache.info()[fact]["entries"] == 1
    del position_ids, deferred
    for fact in ("packed_positions", "deferred_mask"):
        assert cuseq.cache.info()[fact]["entries"] == 0


def test_nothing_is_kept_with_the_cache_off(run_python):
    code = """
import torch
from cuseq.integrations.transformers.documents import layout_of_positions
position_ids = torch.tensor([[0, 1, 0, 1]])
first = layout_of_positions(position_ids, 1)
position_ids.numpy()[0] = [0, 0, 1, 2]
assert first.lengths.tolist() == [2, 2]
assert layout_of_positions(position_ids, 1).lengths.tolist() == [1, 3]
"""
    done = run_python(code, CUSEQ_CACHE="0")
    assert done.returncode == 0, done.stderr


def test_position_ids_are_not_read_where_lengths_or_masks_are_given(device, built, searched):
    model = make_model("gemma3", device)
    ids, layout = make_ids(device), make_layout(device)
    position_ids = layout.position_ids[None]
    for keywords in (
        dict(packed=layout),
        bare_names(layout),
        dict(packed=layout, use_cache=False),
        dict(attention_mask=torch.ones_like(ids), use_cache=False),
    ):
        model(ids, position_ids=position_ids, **keywords)
    assert not built
    assert not searched


def test_decode_steps_read_no_position_ids(device, built):
    model, reference = make_model("qwen3", device), make_model("qwen3", device, "sdpa")
    ids = make_ids(device)
    with torch.no_grad():
        positions = torch.arange(ids.shape[1] - 3, device=device)[None]
        prefill = [m(ids[:, :-3], position_ids=positions) for m in (model, reference)]
        reads = len(built)
        step = [
            m(ids[:, -3:-2], past_key_values=p.past_key_values).logits
            for m, p in zip((model, reference), prefill, strict=True)
        ]
        chunk = [
            m(ids[:, -2:], past_key_values=p.past_key_values).logits
            for m, p in zip((model, reference), prefill, strict=True)
        ]
    assert reads == 1
    assert len(built) == reads
    assert torch.equal(*step)
    assert torch.equal(*chunk)


def test_rows_of_one_sequence_each_go_to_sdpa(device, monkeypatch):
    model, reference = make_model("mistral", device), make_model("mistral", device, "sdpa")
    monkeypatch.setattr(cuseq, "varlen_attention", None)
    ids = make_ids(device).view(2, -1)
    with torch.no_grad():
        for position_ids in (None, torch.arange(ids.shape[1], device=device)[None] + 5):
            keywords = dict(position_ids=position_ids, use_cache=False)
            assert torch.equal(model(ids, **keywords).logits, reference(ids, **keywords).logits)


def test_position_ids_under_inference_mode(device):
    model = make_model("gemma3", device)
    ids, layout = make_ids(device), make_layout(device)
    with torch.inference_mode():
        expected = one_by_one(model, ids)
        position_ids = layout.position_ids[None].clone()
        assert_near(model(ids, position_ids=position_ids).logits, expected)
        position_ids.copy_(torch.arange(TOKENS, device=device))
        dense = model(ids, position_ids=position_ids).logits
    assert not torch.allclose(dense, expected, atol=1e-3)


@pytest.mark.parametrize("planes", [3, 4])
def test_multimodal_position_ids_are_no_packing(planes, device, built):
    layout = make_layout(device)
    position_ids = layout.position_ids.expand(planes, 1, -1)
    query = torch.randn(1, 4, TOKENS, 32, device=device)
    mask = masks.cuseq_mask(1, TOKENS, TOKENS, device=device)
    module = torch.nn.Module()
    out, _ = attention.cuseq_attention(module, query, query, query, mask, position_ids=position_ids)
    expected, _ = sdpa_attention_forward(module, query, query, query, None)
    assert torch.equal(out, expected)
    assert not built


# ------------------------------------------------------------------------------ registration


def test_the_search_still_runs_for_other_implementations(device, searched):
    model = make_model("qwen3", device, "sdpa")
    ids, layout = make_ids(device), make_layout(device)
    with torch.no_grad():
        expected = one_by_one(model, ids)
        searched.clear()
        logits = model(ids, position_ids=layout.position_ids[None], use_cache=False).logits
    assert len(searched) == 1
    assert_near(logits, expected)


def test_an_unknown_transformers_is_refused(monkeypatch):
    def detector(config, embeds):
        raise AssertionError

    integration.unregister()
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", detector)
    try:
        with pytest.raises(UnknownRelease) as refused:
            integration.register()
        assert masking_utils._preprocess_mask_arguments is detector
        assert "cuseq" not in AttentionInterface().valid_keys()
    finally:
        integration.unregister()
        monkeypatch.undo()
        integration.register()
    assert (
        f"cuseq does not know this transformers ({transformers.__version__}): transformers."
        "masking_utils._preprocess_mask_arguments takes (config, embeds), not (config, inputs_"
    ) in str(refused.value)


def test_a_model_that_edits_its_mask_is_told():
    mask = masks.cuseq_mask(1, 4, 4)
    with pytest.raises(AttributeError, match="DeferredMask has no dtype"):
        mask.dtype
    with pytest.raises(TypeError):
        torch.zeros(1, 1, 4, 4) + mask


def test_importing_cuseq_imports_no_framework(run_python):
    names = ["transformers", "trl", "accelerate", "peft", "unsloth", "xformers", "megatron"]
    done = run_python(f"import sys, cuseq; sys.exit(any(n in sys.modules for n in {names}))")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["cuseq", "transformers"])
def test_the_name_before_its_registration_names_the_call(first, run_python):
    done = run_python(f"""
import {first}
import cuseq, transformers

def error_of(act, *args, **kwargs):
    try:
        act(*args, **kwargs)
    except ValueError as error:
        return str(error)

def config():
    return transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
                                    num_hidden_layers=1, num_attention_heads=1)

make = transformers.AutoModelForCausalLM.from_config
call = "cuseq.integrations.transformers.register()"
assert call in error_of(make, config(), attn_implementation="cuseq")
assert "another" in (error := error_of(make, config(), attn_implementation="another"))
assert call not in error
assert call in error_of(make(config()).set_attn_implementation, "cuseq")
import cuseq.integrations.transformers
cuseq.integrations.transformers.register()
assert error_of(make, config(), attn_implementation="cuseq") is None
cuseq.integrations.transformers.unregister()
assert call in error_of(make, config(), attn_implementation="cuseq")
assert error_of(make, config(), attn_implementation="eager") is None
""")
    assert done.returncode == 0, done.stderr


def test_another_transformers_imports_beside_cuseq(tmp_path, run_python):
    """Its models lack the method that the message is added to."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("class PreTrainedModel: pass\n")
    done = run_python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import cuseq
import transformers.modeling_utils
assert transformers.__file__.startswith({str(tmp_path)!r})
""")
    assert done.returncode == 0, done.stderr
