"""Test `enable` on hybrid models: documents of a packed row do not reach each other.

Packed rows are compared with the documents one by one through transformers' own eager code, and
everything that is not packed must be unchanged.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cuseq

transformers = pytest.importorskip("transformers")

from fla_index import load_fla_index  # noqa: E402
from hybrid_models import (  # noqa: E402
    ARE_SEPARATED,
    CONFIGS,
    ONE_OF_EACH_KIND,
    documents,
    functions_of_packages,
    make_model,
)

from cuseq._base import models as base_models  # noqa: E402
from cuseq._base.foreign import UnknownRelease  # noqa: E402
from cuseq.integrations.transformers import _warn  # noqa: E402
from cuseq.integrations.transformers._functions import original_function  # noqa: E402
from cuseq.integrations.transformers.hybrids import (  # noqa: E402
    delta_rule,
    kernels,
    kinds,
    routes,
    segments,
)
from cuseq.integrations.transformers.hybrids.kernels import Kernel  # noqa: E402
from tests.families.models import VOCAB  # noqa: E402

pytestmark = pytest.mark.skipif(
    not ARE_SEPARATED, reason="recurrent layers of this transformers get no keywords"
)
every_family = pytest.mark.parametrize("name", CONFIGS)
every_kind = pytest.mark.parametrize("name", ONE_OF_EACH_KIND)

FLA_INDEX = load_fla_index()
LENGTHS = [5, 1, 0, 9, 3, 2, 0, 7]
CHUNKS = [63, 64, 65, 1]  # the chunks of the gated delta rule have 64 tokens
TAIL = 3


@pytest.fixture(autouse=True)
def quiet():
    """Silence what transformers says about missing packages, and hear our warnings in each test."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    _warn.forget_warnings()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SLOW")
        yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def exact_convolutions():
    """Compute torch's convolutions in fp32, for which cuDNN takes TF32 by default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def no_packages(request, monkeypatch):
    """Run transformers' own code in PyTorch, which rounds less than the kernels of packages.

    Tests of those kernels ask for `cuda`, the others for `device`.
    """
    if "cuda" in request.fixturenames:
        return
    for code, name, function in functions_of_packages():
        monkeypatch.setattr(code, name, function)
    monkeypatch.setattr(Kernel, "function", lambda kernel, *tensors: None)


@pytest.fixture
def enabled(device):
    """Return a function that makes and enables a model, which is disabled after the test."""
    models = []

    def make(name: str) -> nn.Module:
        model = make_model(name, device)
        cuseq.enable(model)
        models.append(model)
        return model

    yield make
    for model in models:
        cuseq.disable(model)


def packed_batch(
    lengths: list[int], device: torch.device, tail: int = TAIL, **options: Any
) -> dict[str, Any]:
    """Return a packed batch with zero-length sequences and a tail, as no collator makes it."""
    packed = cuseq.PackedLayout.from_lengths(lengths, **options, device=device)
    if not options:
        packed = cuseq.PackedLayout.from_lengths(lengths, sum(lengths) + tail, device=device)
    ids = torch.full((1, packed.total_tokens), 4, device=device)
    ids[:, real_rows(packed)] = torch.cat(documents(lengths, device), dim=1)
    return {"input_ids": ids, "position_ids": packed.position_ids[None].long(), "packed": packed}


def real_rows(packed: cuseq.PackedLayout) -> Tensor:
    return (~packed.moe_padding_mask).nonzero().squeeze(1)


def one_by_one(model: nn.Module, lengths: list[int], device: torch.device) -> Tensor:
    docs = [doc for doc in documents(lengths, device) if doc.shape[1] > 0]
    return torch.cat([model(doc, use_cache=False).logits[0] for doc in docs])


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(logits.shape, generator=generator).to(logits)
    (logits * weight).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def packed_run(model: nn.Module, batch: dict[str, Any], **options: Any):
    rows = real_rows(batch["packed"])
    logits = model(**batch, **{"use_cache": False, **options}).logits[0, rows]
    return logits.detach(), gradients(model, logits)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 2e-4) -> None:
    scale = max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


def assert_same(found, expected, tolerance: float = 2e-4) -> None:
    assert_close(found[0], expected[0], tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert_close(found[1][name], grad, tolerance)


def code_of(model: nn.Module) -> list[ModuleType]:
    return [
        sys.modules[m] for m in {type(one).__module__ for one in model.modules()} if "modeling" in m
    ]


def functions_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (code.__name__, name): value
        for code in code_of(model)
        for name, value in vars(code).items()
        if callable(value) and not isinstance(value, type)
    }


# ------------------------------------------------------------------------------ documents


@pytest.mark.parametrize("lengths", [LENGTHS, CHUNKS], ids=["short", "chunks"])
@every_family
def test_packed_rows_equal_the_documents(name, lengths, device):
    model = make_model(name, device)
    before = functions_of(model)
    logits = one_by_one(model, lengths, device)
    expected = logits.detach(), gradients(model, logits)
    result = cuseq.enable(model)
    assert not any(text.startswith("LEAKS") for text in result.warnings)
    assert any(part.startswith(("conv:", "recurrence:")) for part in result.replaced)
    batch = packed_batch(lengths, device)
    assert_same(packed_run(model, batch), expected)
    assert_same(packed_run(model, batch, use_cache=True), expected)
    logits = one_by_one(model, lengths, device)  # rows that are not packed
    assert_same((logits.detach(), gradients(model, logits)), expected)
    cuseq.disable(model)
    assert functions_of(model) == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(key.startswith("_cuseq") for m in model.modules() for key in vars(m))
    assert torch.equal(one_by_one(model, lengths, device), expected[0])


@every_family
def test_check_packing_proves_it(name, enabled, device):
    """It compares loss and gradients too, and finds leaks in both directions by gradient."""
    model = enabled(name)
    if device.type == "cuda" and any("expert" in part for part, _ in model.named_parameters()):
        pytest.skip("a GPU multiplies by kernels that depend on how many tokens an expert got")
    examples = [doc[0].tolist() for doc in documents([5, 1, 9, 3], device)]
    report = cuseq.check_packing(model, examples)
    assert report.ok, str(report)


def test_what_another_put_in_the_place_of_our_functions_is_replaced_again(monkeypatch):
    """Else the next model would run it, and its documents would leak."""
    first, second = make_model("qwen3_5"), make_model("qwen3_5")
    (code,) = code_of(first)
    names = ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    own = {name: getattr(code, name) for name in names}
    cuseq.enable(first)
    others = {name: functools.wraps(own[name])(functools.partial(own[name])) for name in names}
    for name in names:
        monkeypatch.setattr(code, name, others[name])
    cuseq.enable(second)
    examples = [doc[0].tolist() for doc in documents([5, 1, 9, 3])]
    assert all(cuseq.check_packing(model, examples).ok for model in (first, second))
    cuseq.disable(first)
    assert cuseq.check_packing(second, examples).ok
    for name in names:  # what another puts there later stays, and is said to be there
        monkeypatch.setattr(code, name, others[name])
    with pytest.raises(RuntimeError, match=f"{names[0]} of .* was replaced after cuseq.enable"):
        second(**packed_batch(LENGTHS, torch.device("cpu")))
    second(documents([5])[0])
    cuseq.disable(second)
    assert [getattr(code, name) for name in names] == [others[name] for name in names]


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_what_wraps_our_functions_may_stay(name, monkeypatch):
    first, second = make_model(name), make_model(name)
    (code,) = code_of(first)
    own = functions_of(first)
    cuseq.enable(first)
    function = {"qwen3_5": "torch_chunk_gated_delta_rule", "mamba2": "mamba2_chunk_scan"}[name]
    ours = getattr(code, function)
    wrapper = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    with monkeypatch.context() as patch:
        patch.setattr(code, function, wrapper)
        cuseq.enable(second)
        assert getattr(code, function) is wrapper
        examples = [doc[0].tolist() for doc in documents([5, 1, 9, 3])]
        assert all(cuseq.check_packing(model, examples).ok for model in (first, second))
    cuseq.disable(first)
    cuseq.disable(second)
    assert functions_of(first)[code.__name__, function] is own[code.__name__, function]


def test_what_stands_there_for_a_while_takes_nothing_away(monkeypatch):
    first, second = make_model("qwen3_5"), make_model("qwen3_5")
    (code,) = code_of(first)
    name = "torch_chunk_gated_delta_rule"
    own = getattr(code, name)
    cuseq.enable(first)
    with monkeypatch.context() as patch:
        patch.setattr(code, name, functools.wraps(own)(functools.partial(own)))
        cuseq.enable(second)
    examples = [doc[0].tolist() for doc in documents([5, 1, 9, 3])]
    assert all(cuseq.check_packing(model, examples).ok for model in (first, second))
    cuseq.disable(first)
    cuseq.disable(second)
    assert getattr(code, name) is own


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "minimax"])
def test_without_enable_the_check_fails(name, device):
    model = make_model(name, device)
    examples = [doc[0].tolist() for doc in documents([5, 1, 9, 3], device)]
    assert not cuseq.check_packing(model, examples).ok


@every_kind
def test_offsets_and_positions_say_the_same(name, enabled, device):
    """Mixers cannot read offsets, such as TRL's, nor position ids; a layout is made of them."""
    model = enabled(name)
    batch = packed_batch(LENGTHS, device)
    rows = real_rows(batch["packed"])
    expected = model(**batch, use_cache=False).logits[0, rows]
    ends = torch.tensor([0, *LENGTHS, TAIL]).cumsum(0).to(device, torch.int32)
    del batch["packed"]
    found = model(**batch, use_cache=False).logits[0, rows]
    assert_close(found, expected)
    offsets = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=9, max_length_k=9)
    seq_idx = torch.zeros(1, len(batch["input_ids"][0]), dtype=torch.int32, device=device)
    found = model(**batch, **offsets, seq_idx=seq_idx, use_cache=False).logits[0, rows]
    assert_close(found, expected)


@every_kind
def test_offsets_edited_in_place_are_read_again(name, enabled, device):
    model = enabled(name)
    ids = torch.cat(documents([4, 6], device), dim=1)
    ends = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)

    def run() -> Tensor:
        offsets = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
        positions = cuseq.PackedLayout.from_cu_seqlens(ends).position_ids[None].long()
        return model(ids, position_ids=positions, **offsets, use_cache=False).logits[0]

    first = run()
    ends[1] = 6
    second = run()
    assert not torch.allclose(first, second, atol=1e-4)
    assert_close(second[:6], model(ids[:, :6], use_cache=False).logits[0])
    assert_close(second[6:], model(ids[:, 6:], use_cache=False).logits[0])


@every_kind
def test_a_row_may_be_a_batch_of_rows(name, enabled, device):
    model = enabled(name)
    batch = packed_batch([7, 5, 3, 9], device, tail=0)
    expected = model(**batch, use_cache=False).logits
    rows = {key: batch[key].view(2, 12) for key in ("input_ids", "position_ids")}
    for cached in (False, True):
        found = model(**rows, packed=batch["packed"], use_cache=cached).logits
        assert_close(found.flatten(0, 1), expected[0])


# ------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("options", [{}, {"segment_multiple": 4, "total_multiple": 16}])
@every_kind
def test_nan_in_padding_reaches_nothing_real(name, options, enabled, device):
    model = enabled(name)
    batch = packed_batch(LENGTHS, device, **options)
    rows = real_rows(batch["packed"])
    is_pad = batch["packed"].moe_padding_mask
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    results, of_weights = [], []
    for value in (0.5, -3.0, float("nan")):
        states = embedded.clone()
        states[0, is_pad] = value
        states.requires_grad_()
        logits = model(inputs_embeds=states, **batch, use_cache=False).logits[0, rows]
        logits.square().sum().backward()
        results.append((logits.detach(), states.grad[0, rows]))
        named = model.named_parameters()
        of_weights.append({key: p.grad.clone() for key, p in named if p.grad is not None})
        model.zero_grad()
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert found.isfinite().all()
            assert_close(found, expected)
    # A weight's gradient is a sum over all tokens, in which 0 * NaN is NaN: padding is finite here.
    assert of_weights[0].keys() == of_weights[1].keys() and of_weights[0]
    for key, expected in of_weights[0].items():
        assert_close(of_weights[1][key], expected)


@every_family
def test_padded_batches_and_rows_are_unchanged(name, device):
    model = make_model(name, device, "sdpa")
    ids = torch.cat(documents([7, 7], device))
    masks = torch.ones(4, 2, 7, dtype=torch.int64, device=device)
    masks[1, 0, 4:] = 0  # on the right
    masks[2, 0, :3] = 0  # on the left
    masks[3, :, 5:] = 0
    calls = [dict(input_ids=ids, attention_mask=mask) for mask in masks]
    calls += [dict(input_ids=ids[:1], attention_mask=mask[:1]) for mask in masks]
    calls += [dict(input_ids=ids), dict(input_ids=ids[:1])]
    expected = [model(**call, use_cache=False).logits for call in calls]
    cuseq.enable(model)
    for call, logits in zip(calls, expected, strict=True):
        found = model(**call, use_cache=False).logits
        kept = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        assert_close(found[kept], logits[kept])
    cuseq.disable(model)


def test_a_mask_beside_lengths_has_no_effect(enabled, device):
    model = enabled("qwen3_5")
    batch = packed_batch(LENGTHS, device)
    expected = model(**batch, use_cache=False).logits
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 3:6] = 0
    with pytest.warns(UserWarning, match="attention_mask has no effect with packed lengths"):
        found = model(**batch, attention_mask=mask, use_cache=False).logits
    assert torch.equal(found, expected)


# ------------------------------------------------------------------------------ other batches


@every_family
def test_decoding_is_unchanged_by_training(name, device):
    model = make_model(name, device, "sdpa")
    prompt = torch.cat(documents([6, 6], device))
    mask = torch.ones_like(prompt)
    if name != "minimax":  # whose linear layers see what attention leaves in padded rows
        mask[0, :2] = 0
    options = dict(max_new_tokens=5, do_sample=False, attention_mask=mask)
    expected = model.eval().generate(prompt, **options)
    cuseq.enable(model)
    packed_run(model.train(), packed_batch(LENGTHS, device))
    assert torch.equal(model.eval().generate(prompt, **options), expected)
    cuseq.disable(model)
    assert torch.equal(model.generate(prompt, **options), expected)


@every_family
def test_evaluation_with_a_cache(name, device):
    """Prefill in two calls, then one token at a time."""
    model = make_model(name, device).eval()
    ids = documents([9], device)[0]
    cached = "cache_params" if name == "mamba2" else "past_key_values"

    def run() -> list[Tensor]:
        logits, cache = [], None
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:8]):
            out = model(part, use_cache=True, **{cached: cache})
            cache = out[cached]
            logits.append(out.logits)
        return logits

    with torch.no_grad():
        expected = run()
        cuseq.enable(model)
        model(**packed_batch(LENGTHS, device))
        for found, logits in zip(run(), expected, strict=True):
            assert_close(found, logits)
    cuseq.disable(model)


@pytest.mark.parametrize("name", ["minimax", "jamba"])
def test_a_mixers_cache_of_an_unknown_name_is_refused(name, monkeypatch):
    """A document's state would go into the next with the cache on."""
    model = make_model(name)
    (mixer,) = {
        type(one) for one in model.modules() if hasattr(one, "layer_idx") and kinds.kind_of(one)
    }
    original = mixer.forward

    @functools.wraps(original)
    def forward(self, hidden_states, memory=None, **kwargs):
        return original(self, hidden_states, **kwargs)

    names = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "memory")]
    )
    forward.__signature__ = names
    monkeypatch.setattr(mixer, "forward", forward)
    with pytest.raises(UnknownRelease, match="takes none of cache, past_key_values"):
        cuseq.enable(model)


@every_kind
def test_a_packed_row_of_one_document_can_be_continued(name, enabled, device):
    model = enabled(name).eval()
    ids = documents([8], device)[0]
    cached = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        packed = cuseq.PackedLayout.from_lengths([7], device=device)
        cache = model(ids[:, :7], packed=packed, use_cache=True)[cached]
        found = model(ids[:, 7:], use_cache=True, **{cached: cache}).logits[0, -1]
        # Not the logits of the whole row: MiniMax's own decoding differs from them by 0.26.
        cache = model(ids[:, :7], use_cache=True)[cached]
        expected = model(ids[:, 7:], use_cache=True, **{cached: cache}).logits[0, -1]
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("last", "tail", "continues"),
    [(5, 0, True), (3, 0, True), (2, 0, False), (1, 0, False), (5, 3, False)],
)
def test_what_a_cache_of_a_packed_row_continues(last, tail, continues, enabled, device):
    """docs/hybrids.md says it: the inputs of the convolution, 4 wide, are the last of the row."""
    model = enabled("mamba2").eval()
    lengths = [6, last]
    following = documents([1], device)[0]
    with torch.no_grad():
        batch = packed_batch(lengths, device, tail=tail)
        alone = batch["input_ids"][:, 6 : 6 + last]
        cache = model(alone, use_cache=True).cache_params
        expected = model(following, cache_params=cache, use_cache=True).logits
        cache = model(**batch, use_cache=True).cache_params
        found = model(following, cache_params=cache, use_cache=True).logits
    if continues:
        assert_close(found, expected)
    else:
        assert not torch.allclose(found, expected, atol=1e-2)


@every_kind
def test_boundaries_are_not_kept(name, enabled, device):
    model = enabled(name)
    row = documents([12], device)[0]
    expected = model(row, use_cache=False).logits
    model(**packed_batch(LENGTHS, device), use_cache=False)
    assert torch.equal(model(row, use_cache=False).logits, expected)
    if device.type == "cuda":  # where a wrong id ends the process
        return
    with pytest.raises(IndexError):  # a call that fails on the way leaves none behind either
        batch = packed_batch(LENGTHS, device)
        model(**batch | {"input_ids": torch.full_like(batch["input_ids"], 10**6)})
    assert torch.equal(model(row, use_cache=False).logits, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@every_kind
def test_recomputed_layers_see_their_own_boundaries(name, reentrant, enabled, device):
    model = enabled(name)
    batches = [packed_batch(lengths, device) for lengths in (LENGTHS, [9, 2, 8, 8])]
    expected = [packed_run(model, batch) for batch in batches]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    for batch, run in zip(batches, expected, strict=True):
        assert_same(packed_run(model, batch), run)
    # Two packs and a dense row run before the first backward.
    logits = [model(**b, use_cache=False).logits[0, real_rows(b["packed"])] for b in batches]
    model(documents([12], device)[0], use_cache=False)
    for one, run in zip(logits, expected, strict=True):
        assert_same((one.detach(), gradients(model, one)), run)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2"])
def test_low_precision(name, enabled, device):
    model = enabled(name)
    batch = packed_batch(LENGTHS, device)
    expected = packed_run(model, batch)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])].float()
    scale = expected[0].abs().max()
    assert (logits - expected[0]).abs().max() < 0.1 * scale
    assert all(grad.isfinite().all() for grad in gradients(model, logits).values())
    model.bfloat16()
    logits = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])].float()
    assert (logits - expected[0]).abs().max() < 0.1 * scale
    assert all(grad.isfinite().all() for grad in gradients(model, logits).values())


# ------------------------------------------------------------------------------ kernels of others


class Fla:
    """fla's functions as loops over the offsets, which check what they are given."""

    def __init__(self, original) -> None:
        self.original = original
        self.calls: list[str] = []

    def facts(self, given: dict[str, Any], tokens: int) -> list[tuple[int, int]]:
        ends = given["cu_seqlens"].tolist()
        assert given["cu_seqlens"].dtype == torch.int32
        assert ends[0] == 0 and ends[-1] == tokens and all(a < b for a, b in zip(ends, ends[1:]))
        assert given["cu_seqlens_cpu"].tolist() == ends
        return list(zip(ends[:-1], ends[1:]))

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        cu_seqlens_cpu, chunk_indices,
    ):  # fmt: skip
        bounds = self.facts(dict(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu), q.shape[1])
        chunks = [[i, j] for i, (a, b) in enumerate(bounds) for j in range(-(-(b - a) // 64))]
        assert chunk_indices.tolist() == chunks
        if FLA_INDEX is not None:  # what fla would make of the offsets
            assert torch.equal(chunk_indices, FLA_INDEX.prepare_chunk_indices(cu_seqlens, 64))
        self.calls.append("chunk_gated_delta_rule")
        parts = [
            self.original(
                *(one[:, a:b] for one in (q, k, v, g, beta)),
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            for a, b in bounds
        ]
        states = torch.cat([state for _, state in parts])
        return torch.cat([o for o, _ in parts], 1), states if output_final_state else None

    def chunk_simple_gla(
        self, q, k, v, g=None, g_gamma=None, scale=None, output_final_state=False, cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):  # fmt: skip
        """The state decays by exp(g) and gets k v^T at each token; the output is scale q^T S."""
        self.calls.append("chunk_simple_gla")
        bounds = self.facts(dict(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu), q.shape[1])
        outputs, states = [], []
        for a, b in bounds:
            state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
            for token in range(a, b):
                decay = g_gamma if g is None else g[0, token]
                state = decay.exp()[:, None, None] * state
                state = state + k[0, token].unsqueeze(2) * v[0, token].unsqueeze(1)
                outputs.append(scale * (q[0, token].unsqueeze(1) @ state).squeeze(1))
            states.append(state)
        return torch.stack(outputs).unsqueeze(0), torch.stack(
            states
        ) if output_final_state else None


FLA_FAMILIES = {
    "qwen3_5": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    "granite": ("chunk_simple_gla", "mamba2_chunk_scan"),
    "nemotron_h": ("chunk_simple_gla", "mamba2_chunk_scan"),
    "minimax": ("chunk_simple_gla", None),
}


@pytest.mark.parametrize("options", [{}, {"segment_multiple": 4, "total_multiple": 16}])
@pytest.mark.parametrize("name", FLA_FAMILIES)
def test_a_kernel_gets_the_segments(name, options, enabled, device, monkeypatch):
    model = enabled(name)
    batch = packed_batch([*LENGTHS, 65], device, **options)
    expected = packed_run(model, batch)
    used, function = FLA_FAMILIES[name]
    original = None
    if function == "torch_chunk_gated_delta_rule":
        from transformers.models.qwen3_5 import modeling_qwen3_5

        original = original_function(modeling_qwen3_5, "torch_chunk_gated_delta_rule")
    fla = Fla(original)

    monkeypatch.setattr(
        Kernel, "function", lambda kernel, *tensors: getattr(fla, kernel.name, None)
    )
    assert_same(packed_run(model, batch), expected)
    assert_same(packed_run(model, batch, use_cache=True), expected)
    assert set(fla.calls) == {used}


def test_mamba_ssm_gets_the_sequence_of_each_token(enabled, device, monkeypatch):
    model = enabled("nemotron_h")
    batch = packed_batch(LENGTHS, device)
    expected = packed_run(model, batch)
    from transformers.models.nemotron_h import modeling_nemotron_h

    original = original_function(modeling_nemotron_h, "mamba2_chunk_scan")
    seen = []

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, seq_idx, **options):
        seen.append(seq_idx)
        ids = seq_idx[0]
        assert seq_idx.shape == (1, x.shape[1]) and seq_idx.dtype == torch.int32
        assert seq_idx.is_contiguous() and (ids.diff() >= 0).all()
        parts = [(ids == one).nonzero()[:, 0] for one in ids.unique()]
        rows = [[each[:, part] for each in (x, dt, B, C)] for part in parts]
        scanned = [original(x, dt, A, B, C, chunk_size, **options) for x, dt, B, C in rows]
        return torch.cat(scanned, dim=1)

    found = {"mamba_chunk_scan_combined": mamba_chunk_scan_combined}
    monkeypatch.setattr(Kernel, "function", lambda kernel, *tensors: found.get(kernel.name))
    assert_same(packed_run(model, batch), expected)
    assert len(seen) == 1


# Sizes that fla's kernels take; every expert is chosen, so that rounding cannot choose others.
WIDE = {
    "qwen3_5": dict(linear_key_head_dim=32, linear_value_head_dim=64),
    "kimi_linear": dict(linear_head_dim=32, mlp_layer_types=["dense", "dense"]),
    "granite_nope": dict(mamba_n_heads=2, mamba_d_head=32, mamba_d_state=64, mamba_n_groups=1),
    "minimax": dict(head_dim=32, num_experts_per_tok=4),
}


def needs_fla(name: str, monkeypatch) -> None:
    """Skip the test if fla is missing or does not train this family on the GPU.

    Else let its kernels choose between two configurations: to compile all takes minutes.
    """
    pytest.importorskip("fla")
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda *given: prune(*given)[:2])
    kernel = {
        "qwen3_5": kernels.GATED_DELTA_RULE, "granite_nope": kernels.GATED_LINEAR_ATTENTION
    }.get(name)  # fmt: skip
    rows = torch.empty(1, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    if kernel is not None and kernel.function(rows) is None:
        pytest.skip("fla refuses the gradients of this kernel on this GPU with this Triton")


@pytest.mark.parametrize("name", WIDE)
def test_kernels_of_fla_are_as_exact_as_one_document(name, cuda, monkeypatch):
    """In bf16, against fp32 through the kernels that transformers takes for a document."""
    needs_fla(name, monkeypatch)
    lengths = [*LENGTHS, 65, 130]
    model = make_model(name, cuda, **WIDE[name])
    logits = one_by_one(model, lengths, cuda)
    exact = logits.detach(), gradients(model, logits)
    model.bfloat16()
    logits = one_by_one(model, lengths, cuda).float()
    alone = logits.detach(), gradients(model, logits)
    assert cuseq.enable(model).warnings == ()
    batch = packed_batch(lengths, cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])].float()
    found = logits.detach(), gradients(model, logits)
    cuseq.disable(model)

    def error(one: Tensor, other: Tensor) -> float:
        return ((one.float() - other).norm() / other.norm().clamp_min(1e-6)).item()

    assert error(found[0], exact[0]) < 2 * error(alone[0], exact[0]) + 0.01
    for key, grad in exact[1].items():
        assert error(found[1][key], grad) < 2 * error(alone[1][key], grad) + 0.03, key


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_step_waits_for_nothing(name, cuda, monkeypatch):
    """Once its kernels are compiled, with lengths that the host knows; every step has new ones."""
    if name != "lfm2":
        needs_fla(name, monkeypatch)
    model = make_model(name, cuda, **WIDE.get(name, {})).bfloat16()
    cuseq.enable(model)

    def step(lengths: list[int]) -> None:
        packed = cuseq.PackedLayout.from_lengths(lengths, 100).to(cuda)
        ids = torch.zeros(1, 100, dtype=torch.int64).pin_memory().to(cuda, non_blocking=True)
        positions = packed.position_ids[None].long()
        logits = model(ids, position_ids=positions, packed=packed, use_cache=False).logits
        logits.float().square().mean().backward()

    step([50, 0, 30])
    step([10, 60, 1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step([7, 70, 3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cuseq.disable(model)


def test_a_missing_kernel_is_said_once(device):
    model = make_model("qwen3_5", device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = cuseq.enable(model)  # nothing ran slowly yet
    (said,) = result.warnings
    batch = packed_batch(LENGTHS, device)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch, use_cache=False)
    assert [str(one.message) for one in given] == [said]
    assert said.startswith("SLOW: the gated delta rule") and "flash-linear-attention" in said
    cuseq.disable(model)


def test_a_convolution_that_is_too_wide_runs_in_torch(device):
    config = CONFIGS["lfm2"]()
    config.conv_L_cache = 6
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(device)
    expected = one_by_one(model, LENGTHS, device)
    cuseq.enable(model)
    with pytest.warns(UserWarning, match="SLOW: a convolution of width 6"):
        batch = packed_batch(LENGTHS, device)
        found = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])]
    assert_close(found, expected)
    cuseq.disable(model)


# ------------------------------------------------------------------------------ batches


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=40),
    tail=st.integers(0, 300),
    on_gpu=st.booleans(),
)
def test_batches_hold_each_document_once(lengths, tail, on_gpu):
    documents = [(length, index) for index, length in enumerate(lengths)]
    total = sum(lengths) + tail
    batches = segments.batches_of(documents, total, on_gpu)
    assert sorted(itertools.chain(*batches)) == sorted(documents)
    for batch in batches:
        padded = len(batch) * -(-max(batch)[0] // 64) * 64
        assert len(batch) == 1 or padded <= 2 * total


@pytest.mark.parametrize("slots", [64, 192, 1 << 20])
@pytest.mark.parametrize("lengths", [[130, 1, 0, 64, 65, 200], [3], [64, 64], []], ids=str)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_gated_delta_rule_by_chunks(slots, lengths, key_heads, device, monkeypatch):
    """Against transformers' function on each document, in float32, as that computes."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    theirs = inspect.unwrap(original_function(qwen, "torch_chunk_gated_delta_rule"))
    monkeypatch.setattr(delta_rule, "_CPU_SLOTS", slots)
    monkeypatch.setattr(delta_rule, "_GPU_SLOTS", slots)
    cuseq.cache.clear()
    packed = cuseq.PackedLayout.from_lengths(
        lengths, sum(-(-n // 8) * 8 for n in lengths) + 8, segment_multiple=8, device=device
    )
    total = packed.total_tokens
    torch.manual_seed(0)
    shapes = [(key_heads, 6), (key_heads, 6), (2, 4), (2,), (2,)]
    rows = [torch.randn(1, total, *shape, device=device) for shape in shapes]
    rows[3], rows[4] = -rows[3].abs(), rows[4].sigmoid()
    alone = [row.clone().requires_grad_() for row in rows]
    real = packed.moe_padding_mask.logical_not()
    for row in rows:
        row[:, ~real] = torch.nan
        row.requires_grad_()
    out, state = delta_rule.chunked_gated_delta_rule(packed, *rows, True, True)
    assert not out[:, ~real].any()
    with torch.autocast(device.type, torch.bfloat16):  # computes in float32 too
        again, _ = delta_rule.chunked_gated_delta_rule(packed, *rows, True, True)
    assert torch.equal(again, out)
    expected, last = torch.zeros_like(out), torch.zeros_like(state)
    begins = packed.cu_seqlens_padded.tolist()
    for begin, n in zip(begins, lengths, strict=False):
        if n > 0:
            parts = [one[:, begin : begin + n] for one in alone]
            parts[:2] = (one.repeat_interleave(2 // key_heads, 2) for one in parts[:2])
            found, last = theirs(*parts, output_final_state=True, use_qk_l2norm_in_kernel=True)
            expected = torch.cat((expected[:, :begin], found, expected[:, begin + n :]), 1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-6)
    if lengths:
        weights = torch.randn_like(out)
        ours = torch.autograd.grad((out * weights).sum() + state.sum(), rows)
        wanted = torch.autograd.grad((expected * weights).sum() + last.sum(), alone)
        for one, other in zip(ours, wanted, strict=True):
            assert not one[:, ~real].any()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.01, 1.0, 5.0, 20.0])
def test_the_gradient_of_the_decay_is_precise_however_strong_it_is(decay, device):
    """In float32, against the recurrence in float64: what tokens do to themselves has no part."""
    lengths = [65, 1, 64, 200]
    packed = cuseq.PackedLayout.from_lengths(lengths, device=device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8), (2, 8), (2, 8), (2,), (2,)]
    rows = [torch.randn(1, sum(lengths), *one, generator=generator) for one in shapes]
    rows[3] = -decay * (1 + torch.rand(rows[3].shape, generator=generator))
    rows[4] = rows[4].sigmoid()
    ours = [row.to(device).requires_grad_() for row in rows]
    out, state = delta_rule.chunked_gated_delta_rule(packed, *ours, True, True)
    exact = [row.double().requires_grad_() for row in rows]
    query, key, value, g, beta = exact
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * 8**-0.5
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    outputs = []
    for token in range(sum(lengths)):
        if token in packed.cu_seqlens.tolist():
            last = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
        last = last * g[:, token, :, None, None].exp()
        read = torch.einsum("bhk,bhkv->bhv", key[:, token], last)
        new = beta[:, token, :, None] * (value[:, token] - read)
        last = last + key[:, token, :, :, None] * new[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, token], last))
    expected = torch.stack(outputs, 1)
    weights = torch.randn(expected.shape, generator=generator)
    found = torch.autograd.grad((out * weights.to(device)).sum() + state.sum(), ours)
    wanted = torch.autograd.grad((expected * weights).sum() + last.sum(), exact)
    rounding = 64 * 2 * decay * torch.finfo(torch.float32).eps  # of the sums in a chunk
    for one, other in zip(found, wanted, strict=True):
        assert (one.cpu() - other).abs().max() < (1e-5 + rounding) * other.abs().max()
    decays, exactly = found[3].cpu(), wanted[3]
    assert ((decays - exactly).abs() <= 1e-2 * exactly.abs()).all()  # the smallest ones too


def _noting(plan, sizes):
    """Return `plan`, which notes how many batches it makes."""

    def noted(*args):
        batches = plan(*args)
        sizes.append(len(batches))
        return batches

    return noted


@pytest.mark.parametrize("call", [0, 64, 1 << 20], ids=["many", "some", "one"])
@every_kind
def test_all_ways_to_batch_give_the_same(name, call, enabled, device, monkeypatch):
    monkeypatch.setattr(segments, "_CPU_CALL", call)
    monkeypatch.setattr(segments, "_GPU_CALL", call)
    monkeypatch.setattr(segments, "_ROWS", 1 if call == 64 else 100)
    cuseq.cache.clear()
    lengths = [65, 1, 0, 130, 3, 64, 1]
    model = enabled(name)
    monkeypatch.setattr(kernels.Kernel, "function", lambda *_: None)  # none of a package
    sizes = []
    monkeypatch.setattr(segments, "batches_of", _noting(segments.batches_of, sizes))
    found = packed_run(model, packed_batch(lengths, device))
    cuseq.disable(model)
    logits = one_by_one(model, lengths, device)
    assert_same(found, (logits.detach(), gradients(model, logits)))
    by_batches = name not in ("lfm2", "qwen3_5")  # which run in code of ours
    assert bool(sizes) == by_batches
    assert all((size == 1) == (call == 1 << 20) for size in sizes), sizes


# ------------------------------------------------------------------------------ compiled layers


def test_compiled_short_convolutions_share_one_graph(enabled, device):
    torch._dynamo.reset()
    model = enabled("lfm2")
    packs = [[5, 1, 9, 3], [18], [2, 3, 4, 9], [1, 1, 8, 8]]
    batches = [packed_batch(lengths, device) for lengths in packs]
    expected = [packed_run(model, batch) for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    model.model.layers[0].compile(backend=counter, fullgraph=True, dynamic=False)
    for batch, run in zip(batches, expected, strict=True):
        assert_same(packed_run(model, batch), run)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "jamba", "minimax", "kimi_linear"])
def test_compiled_layers_break_at_the_recurrence(name, enabled, device):
    """docs/hybrids.md names the break; no pack compiles anything again."""
    torch._dynamo.reset()
    model = enabled(name)
    packs = [[5, 1, 9, 3], [18], [2, 3, 4, 9], [1, 1, 8, 8]]
    batches = [packed_batch(lengths, device) for lengths in packs]
    expected = [packed_run(model, batch) for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    text = model.backbone if name == "mamba2" else model.model
    text.layers[0].compile(backend=counter, dynamic=False)
    graphs = []
    for batch, run in zip(batches, expected, strict=True):
        assert_same(packed_run(model, batch), run)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0
    torch._dynamo.reset()


def test_a_compiled_model_says_that_it_does_not_read_position_ids(enabled, device):
    """Packed position ids alone leak in it; the warning does not break the one graph."""
    torch._dynamo.reset()
    model = enabled("lfm2")
    batch = packed_batch(LENGTHS, device)
    expected = model(**batch, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        assert_close(compiled(**batch, use_cache=False).logits, expected)
        masked = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        compiled(**masked, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False)
    del batch["packed"]
    with pytest.warns(UserWarning, match="LEAKS if position_ids are packed: compiled code"):
        found = compiled(**batch, use_cache=False).logits
    assert not torch.allclose(found, expected, atol=1e-3)
    torch._dynamo.reset()


# ------------------------------------------------------------------------------ what is replaced


def test_what_enable_returns():
    model = make_model("qwen3_5")
    result = cuseq.enable(model)
    assert result.replaced == (
        "attention:Qwen3_5Attention",
        "rope:transformers.models.qwen3_5.modeling_qwen3_5",
        "qk_norm:Qwen3_5Attention",
        "conv:Qwen3_5GatedDeltaNet",
        "recurrence:Qwen3_5GatedDeltaNet",
    )
    assert result.left_alone == ()
    assert cuseq.enable(model) is result
    cuseq.disable(model)


@pytest.mark.parametrize(
    ("name", "norm"),
    [("qwen3_next", "Qwen3NextAttention"), ("lfm2", "Lfm2Attention"), ("olmo_hybrid", None)],
)
def test_norms_that_are_fused(name, norm, device):
    """Zero-centred norms, partial rotations and gates of Qwen3-Next, and names of LFM2's own."""
    model = make_model(name, device)
    replaced = cuseq.enable(model).replaced
    fused = [entry.removeprefix("qk_norm:") for entry in replaced if entry.startswith("qk_norm")]
    assert fused == ([] if norm is None else [norm])
    cuseq.disable(model)


def test_a_vision_model_with_a_hybrid_text_part(device):
    text = CONFIGS["qwen3_5"]().to_dict()
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    }  # fmt: skip
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).to(device)
    expected = one_by_one(model, LENGTHS, device)
    cuseq.enable(model)
    batch = packed_batch(LENGTHS, device)
    found = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])]
    assert_close(found, expected)
    planes = batch["position_ids"].expand(4, 1, -1)
    found = model(batch["input_ids"], position_ids=planes, use_cache=False).logits
    assert_close(found[0, real_rows(batch["packed"])], expected)
    cuseq.disable(model)


def test_two_models_of_one_family(device):
    first, second = make_model("jamba", device), make_model("jamba", device)
    before = functions_of(first)
    cuseq.enable(first)
    cuseq.enable(second)
    cuseq.disable(first)
    batch = packed_batch(LENGTHS, device)
    found = second(**batch, use_cache=False).logits[0, real_rows(batch["packed"])]
    assert_close(found, one_by_one(first, LENGTHS, device))
    cuseq.disable(second)
    assert functions_of(first) == before


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_dropped_model_gives_its_family_back(name, device):
    kept, dropped = make_model(name, device), make_model(name, device)
    before = functions_of(kept)
    cuseq.enable(dropped)
    assert functions_of(kept) != before
    del dropped
    gc.collect()
    assert functions_of(kept) == before
    assert base_models._separated == {}


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_model_that_is_freed_while_another_compiles(name, device):
    """Garbage collection may come at any time; what it frees must not be in the graph's guards."""
    from tests.families.models import small_model

    dropped = [make_model(name, device) for _ in range(2)]
    compiled = small_model("llama").to(device)
    for model in (*dropped, compiled):
        cuseq.enable(model)
    del model

    def backend(graph, example_inputs):
        dropped.clear()
        gc.collect()
        assert base_models._separated == {}
        return graph.forward

    ids = torch.arange(5, 12, device=device)[None]
    packed = cuseq.PackedLayout.from_lengths([3, 4]).to(device)
    given = dict(position_ids=packed.position_ids[None], packed=packed, use_cache=False)
    expected = compiled(input_ids=ids, **given).logits
    torch.compiler.reset()
    logits = torch.compile(compiled, backend=backend)(input_ids=ids, **given).logits
    assert not dropped
    torch.testing.assert_close(logits, expected)


@every_kind
def test_a_copy_is_enabled_and_a_saved_model_is_plain(name, device):
    model = make_model(name, device)
    expected = one_by_one(model, LENGTHS, device)
    enabled = cuseq.enable(model)
    if name in ("qwen3_5", "mamba2", "jamba"):
        copied = copy.deepcopy(model)
        assert cuseq.enable(copied) == enabled
        cuseq.disable(copied)
    saved = io.BytesIO()
    torch.save(model, saved)
    cuseq.disable(model)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert not any(
        "forward" in vars(module) and module.forward.__func__ is not type(module).forward
        for module in loaded.modules()
        if "forward" in vars(module)
    )
    cuseq.enable(loaded)
    batch = packed_batch(LENGTHS, device)
    found = loaded(**batch, use_cache=False).logits[0, real_rows(batch["packed"])]
    assert_close(found, expected)
    cuseq.disable(loaded)


def test_a_model_that_is_only_registered_still_warns(device):
    """Without `enable` its recurrent layers leak, whatever other models of its family do."""
    cuseq.integrations.transformers.register()
    try:
        other = make_model("qwen3_5", device)
        cuseq.enable(other)
        model = transformers.AutoModelForCausalLM.from_config(
            CONFIGS["qwen3_5"](), attn_implementation="cuseq"
        ).to(device)
        batch = packed_batch(LENGTHS, device)
        said = r"LEAKS: layers of type linear_attention.*of qwen3_5_text in.*Call cuseq.enable"
        with pytest.warns(UserWarning, match=said):
            model(**batch, use_cache=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "SLOW")
            _warn.forget_warnings()
            other(**batch, use_cache=False)
        cuseq.disable(other)
    finally:
        cuseq.integrations.transformers.unregister()


# ------------------------------------------------------------------------------ what is refused


def test_mamba_1_alone_is_refused(device):
    """Its blocks give their mixers no keywords, and a checkpoint would lose lent ones."""
    for config in (transformers.MambaConfig, transformers.FalconMambaConfig):
        small = config(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, expand=2
        )
        model = transformers.AutoModelForCausalLM.from_config(small)
        with pytest.raises(ValueError, match="has no attention layer that cuseq knows"):
            cuseq.enable(model.to(device))


def test_another_signature_is_refused(monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    model = make_model("qwen3_5")
    monkeypatch.setattr(
        modeling_qwen3_5, "torch_chunk_gated_delta_rule", lambda query, key, value: None
    )
    with pytest.raises(UnknownRelease, match="torch_chunk_gated_delta_rule takes"):
        cuseq.enable(model)
    assert model.config._attn_implementation == "eager"


@every_kind
def test_a_filled_cache_beside_lengths_is_refused(name, enabled, device):
    model = enabled(name).eval()
    cached = "cache_params" if name == "mamba2" else "past_key_values"
    ids = documents([5], device)[0]
    cache = model(ids, use_cache=True)[cached]
    batch = packed_batch(LENGTHS, device)
    with pytest.raises(ValueError, match="packed.*cache"):
        model(**batch, use_cache=True, **{cached: cache})


@every_kind
def test_a_layout_of_another_row_is_refused(name, enabled, device):
    model = enabled(name)
    packed = cuseq.PackedLayout.from_lengths([3, 4], device=device)
    with pytest.raises(ValueError, match="input_ids must have packed.total_tokens = 7.*got 9"):
        model(documents([9], device)[0], packed=packed, use_cache=False)
    with pytest.raises(TypeError, match="packed must be a PackedLayout"):
        model(documents([9], device)[0], packed=[3, 4], use_cache=False)


@every_kind
def test_what_contradicts_a_layout_is_refused(name, enabled, device):
    """Mamba 2 has no attention that would compare them."""
    model = enabled(name)
    batch = packed_batch([5, 9, 3], torch.device("cpu"), tail=0)
    batch = {key: value.to(device) for key, value in batch.items()}  # lengths known on the host
    ends = torch.tensor([0, 6, 17], dtype=torch.int32)
    for wrong in (
        {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        {"max_length_q": 8},
        {"packed_seq_lengths": torch.tensor([6, 11])},
    ):
        with pytest.raises(ValueError, match="must not contradict packed"):
            model(**batch, **wrong, use_cache=False)
    mask = torch.ones(1, 1, 17, 17, dtype=torch.bool, device=device).tril()
    with pytest.raises(ValueError, match="cannot be combined with a 4-D attention_mask"):
        model(**batch, attention_mask=mask, use_cache=False)


def test_a_part_of_a_row_is_refused(enabled, device):
    model = enabled("lfm2")
    packed = cuseq.PackedLayout.from_lengths([8, 8], segment_multiple=4, device=device)
    shared = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
    part, rows = cuseq.distributed.cp_partition(packed, shared, 0, torch.arange(16, device=device))
    with pytest.raises(ValueError, match="Lfm2Model has layers with a state along the row"):
        model(rows[None] + 3, packed=part, use_cache=False)


def test_a_tree_is_refused(enabled, device):
    model = enabled("lfm2")
    tree = cuseq.PackedTree.from_groups([[5, 6, 7]], [[[8, 9], [4]]]).to(device)
    with pytest.raises(ValueError, match="need whole rows of documents: packed must not be a tree"):
        model(tree.input_ids, packed=tree.layout, use_cache=False)


def test_keywords_on_their_way(device):
    """`routes` reads from the source which modules hand their keywords on."""
    from transformers.models.jamba import modeling_jamba
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_5 import modeling_qwen3_5

    hands_on = routes.hands_on_keywords
    assert hands_on(modeling_qwen3_5.Qwen3_5TextModel, "layers.0")
    assert hands_on(modeling_qwen3_5.Qwen3_5DecoderLayer, "linear_attn")
    assert not hands_on(modeling_jamba.JambaMambaDecoderLayer, "mamba")
    assert not hands_on(modeling_mamba2.Mamba2ForCausalLM, "backbone")
    assert hands_on(modeling_mamba2.Mamba2Model, "layers.0")
    assert not hands_on(modeling_mamba.MambaModel, "layers.0")
    modules = dict(make_model("mamba2").named_modules())
    assert routes.loans_to("backbone.layers.0.mixer", modules) == [("", "backbone")]
    modules = dict(make_model("jamba").named_modules())
    assert routes.loans_to("model.layers.0.mamba", modules) == [("model.layers.0", "mamba")]
    modules = dict(make_model("qwen3_5").named_modules())
    assert routes.loans_to("model.layers.0.linear_attn", modules) == []


class Block(nn.Module):
    """A layer that hands its keywords to one of its mixers alone, as NemotronH's before 5.17."""

    def forward(self, hidden_states, cache=None, **kwargs):
        if self.training:
            return self.mixer(hidden_states, cache=cache)
        if cache is None:
            return self.mixer(hidden_states)
        return self.mixer(hidden_states, cache=cache, **kwargs)


class WholeBlock(nn.Module):
    def forward(self, hidden_states, cache=None, **kwargs):
        if cache is None:
            return self.mixer(hidden_states)
        return self.mixer(hidden_states, cache=cache, **kwargs)


class Mixer(nn.Module):
    def forward(self, hidden_states, **kwargs):
        return mamba2_chunk_scan(causal_conv1d_fn(hidden_states, **kwargs))  # noqa: F821


def test_a_call_without_keywords_hands_on_none():
    assert not routes.hands_on_keywords(Block, "mixer")
    assert routes.hands_on_keywords(WholeBlock, "mixer")
    assert routes.reaches_functions(Mixer, ["causal_conv1d_fn"])
    assert not routes.reaches_functions(Mixer, ["causal_conv1d_fn", "mamba2_chunk_scan"])


def test_a_loan_reaches_a_mixer_whose_layer_hands_on_nothing(device):
    """The layers of NemotronH call their mixers so in transformers 5.16."""
    model = make_model("mamba2", device)

    class Silent(type(model.backbone.layers[0])):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + self.mixer(self.norm(hidden_states), attention_mask=None)

    for layer in model.backbone.layers:
        layer.__class__ = Silent
    expected = one_by_one(model, LENGTHS, device)
    cuseq.enable(model)
    batch = packed_batch(LENGTHS, device)
    found = model(**batch, use_cache=False).logits[0, real_rows(batch["packed"])]
    assert_close(found, expected)
    cuseq.disable(model)


def test_a_layout_that_does_not_arrive_is_no_leak(enabled, device):
    """What reads the source may err: the mixer's functions look too."""
    model = enabled("qwen3_5")
    layer = model.model.layers[0]
    hands_on = layer.forward
    layer.forward = lambda hidden, *args, packed=None, **kwargs: hands_on(hidden, *args, **kwargs)
    with pytest.raises(ValueError, match="must be given packed=, which a module above it did not"):
        model(**packed_batch(LENGTHS, device), use_cache=False)
    with torch.no_grad():
        model(documents([5], device)[0], use_cache=False)
