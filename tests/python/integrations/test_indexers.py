"""Families whose layers attend to the keys that an indexer chooses."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from typing import Any

import pytest
import torch
from tiers import full
from torch import Tensor, nn

import cuseq

pytest.importorskip("transformers")

from hybrid_models import INDEXERS_ARE_KNOWN

from cuseq.integrations.transformers import _indexers
from tests.families.models import VOCAB, family_names, small_model

# The most tokens of a document that leave the indexer of the small model no choice.
BUDGETS = {
    "axk2": 4,
    "deepseek_v32": 4,
    "dots3_note_text": 4,
    "glm_moe_dsa": 4,
    "hy_v4": 4,
    "minimax_m3_vl_text": 4,
    "qwen4_exp_text": 5,
}
FAMILIES = [name for name in BUDGETS if name in family_names()]
SHORT, MIXED, LONG = (4, 1, 3, 2), (5, 1, 9, 3), (8, 6)

pytestmark = pytest.mark.skipif(
    not (FAMILIES and INDEXERS_ARE_KNOWN), reason="this transformers has none of them"
)


def _mistral_large_4() -> nn.Module | None:
    """Return its text model: layers that share choices, that share keys, and one that rotates
    nothing; None where transformers does not have it.
    """
    try:
        from transformers.models.mistral_large4.configuration_mistral_large4 import (
            MistralLarge4TextConfig,
        )
        from transformers.models.mistral_large4.modeling_mistral_large4 import (
            MistralLarge4TextModel,
        )
    except ImportError:
        return None
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, vocab_size=VOCAB,
                 num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=4,
                 n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
                 qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, index_topk=4,
                 index_head_dim=8, index_n_heads=2, max_position_embeddings=128)  # fmt: skip
    config = MistralLarge4TextConfig(
        **sizes, indexer_types=["full", "shared", "full", "full"], no_rope_layers=[1, 1, 0, 1],
        kv_source_layers=[0, 0, 2, 0], first_k_dense_replace=1,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    )  # fmt: skip
    model = MistralLarge4TextModel._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for weight in model.parameters():
        nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.2)
    return model.eval()


@pytest.fixture(params=[*FAMILIES, "mistral_large4_text"])
def model(request):
    """Return a small model of each family, in fp64."""
    if request.param in BUDGETS:
        made = small_model(request.param)
    else:
        made = _mistral_large_4()
        if made is None:
            pytest.skip("this transformers does not have it")
    made = made.double()
    yield made
    with contextlib.suppress(ValueError):
        cuseq.disable(made)


def documents(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB, (1, n), generator=generator) for n in lengths]


def output(model: nn.Module, ids: Tensor, **told: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **told)[0]


class _Double:
    """torch with float64 in the place of float32."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name == "float32" else name)


def one_by_one(model: nn.Module, docs: list[Tensor]) -> Tensor:
    """Return the output of each document alone, with transformers' gated delta rule in fp64."""
    code = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        if own := getattr(code, "torch_chunk_gated_delta_rule", None):
            plain = inspect.unwrap(own)
            names = plain.__globals__ | {"torch": _Double()}
            exact = types.FunctionType(plain.__code__, names, argdefs=plain.__defaults__)

            def checked(*rows: Tensor, **options: Any) -> Any:
                out, state = exact(*rows, **options | {"output_final_state": True})
                assert state.dtype is torch.float64
                return out, state

            patch.setattr(code, "torch_chunk_gated_delta_rule", checked)
        return torch.cat([output(model, ids) for ids in docs], dim=1)


def row_of(lengths: tuple[int, ...], total: int | None = None, **options: Any):
    packed = cuseq.PackedLayout.from_lengths(lengths, total, **options)
    return packed, {"packed": packed, "position_ids": packed.position_ids[None].long()}


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the error relative to the largest expected number, or to 1."""
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def count_calls(monkeypatch, model: nn.Module) -> list[int]:
    """Return the lengths with which the indexers' own forwards are called from now on."""
    seen: list[int] = []
    for kind in {type(layer.indexer) for layer in indexed(model)}:
        own = kind.forward

        def counted(self, *args, own=own, **kwargs):
            rows = kwargs.get("hidden_states", args[0] if args else None)
            seen.append(rows.shape[1])
            return own(self, *args, **kwargs)

        counted.__wrapped__ = own
        monkeypatch.setattr(kind, "forward", counted)
    return seen


def indexed(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if getattr(one, "indexer", None) is not None]


@pytest.mark.parametrize("lengths", [SHORT, MIXED, LONG], ids=["short", "mixed", "long"])
def test_packed_rows_are_their_documents_one_by_one(model, lengths, monkeypatch):
    """Values and all gradients; the indexer sees long documents alone, nothing else.

    Models in fp64 compute their norms and softmax in fp32.
    """
    docs = documents(lengths)
    expected = one_by_one(model, docs)
    wanted = gradients(model, expected)
    assert len(indexed(model)) >= 1
    seen = count_calls(monkeypatch, model)
    entries = cuseq.enable(model).replaced
    assert any(entry.startswith("indexer:") for entry in entries)
    _, told = row_of(lengths)
    found = output(model, torch.cat(docs, dim=1), **told)
    assert difference(found, expected) < 1e-6
    grads = gradients(model, found)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert difference(grads[name], grad) < 1e-4, name
    budget = _indexers.kind_of(indexed(model)[0].indexer).budget(indexed(model)[0].indexer)
    assert seen == [n for n in lengths if n > budget] * len(indexed(model))


def test_offsets_positions_and_batches_of_rows_say_the_same(model):
    docs, others = documents(MIXED), documents((6, 3, 2, 7))
    with torch.no_grad():
        expected, of_others = one_by_one(model, docs), one_by_one(model, others)
        cuseq.enable(model)
        packed, told = row_of(MIXED)
        row = torch.cat(docs, dim=1)
        offsets = packed.cu_seqlens
        by_offsets = output(model, row, position_ids=told["position_ids"], cu_seq_lens_q=offsets,
                            cu_seq_lens_k=offsets)  # fmt: skip
        by_positions = output(model, row, position_ids=told["position_ids"])
        assert difference(by_offsets, expected) < 1e-6
        assert difference(by_positions, expected) < 1e-6
        # Two rows of nine tokens, whose documents end where the rows do.
        packed, _ = row_of((6, 3, 2, 7))
        told = {"packed": packed, "position_ids": packed.position_ids.view(2, 9).long()}
        found = output(model, torch.cat(others, dim=1).view(2, 9), **told)
        assert difference(found.flatten(0, 1), of_others[0]) < 1e-6


def test_padding_between_documents_and_tails(model):
    lengths = (5, 2, 7)
    docs = documents(lengths)
    with torch.no_grad():
        expected = [output(model, ids)[0] for ids in docs]
        cuseq.enable(model)
        packed, told = row_of(lengths, 28, segment_multiple=4)
        row = torch.randint(3, VOCAB, (1, 28))
        begins = (0, 8, 12)
        for begin, ids in zip(begins, docs, strict=True):
            row[:, begin : begin + ids.shape[1]] = ids
        found = output(model, row, **told)[0]
        for begin, one in zip(begins, expected, strict=True):
            assert difference(found[begin : begin + len(one)], one) < 1e-6


def test_disable_gives_back_the_models_own_code(model):
    ids = torch.cat(documents(MIXED), dim=1)
    before = output(model, ids)
    cuseq.enable(model)
    assert not torch.equal(output(model, ids, **row_of(MIXED)[1]), before)
    cuseq.disable(model)
    assert torch.equal(output(model, ids), before)
    for layer in indexed(model):
        for module in (layer, layer.indexer):
            assert not any(name == "forward" or name.startswith("_cuseq") for name in vars(module))


def test_a_document_does_not_see_another_in_the_choice(model):
    """Other documents' tokens change nothing, though their keys would win."""
    cuseq.enable(model)
    _, told = row_of((9, 8))
    first, second, other = (documents((n,))[0] for n in (9, 8, 8))
    other = (other + 7) % VOCAB
    with torch.no_grad():
        one = output(model, torch.cat([first, second], dim=1), **told)
        two = output(model, torch.cat([first, other], dim=1), **told)
    assert difference(one[:, :9], two[:, :9]) < 1e-6
    assert not torch.allclose(one[:, 9:], two[:, 9:])


def test_rows_of_trees_and_graphs_are_refused(model):
    enabled = cuseq.enable(model)
    assert enabled.kind == "model"
    layer = indexed(model)[0]
    tree = cuseq.PackedTree.from_parents([3, 2, 2], [-1, 0, 0])
    ids = torch.randint(3, VOCAB, (1, tree.layout.total_tokens))
    with pytest.raises(ValueError, match="whole"):
        output(model, ids, packed=tree.layout, position_ids=tree.layout.position_ids[None].long())
    from cuseq.layout import StaticLayout

    budget = _indexers.kind_of(layer.indexer).budget(layer.indexer)
    packed = cuseq.PackedLayout.from_lengths([2, 3], 16, max_seqs=4)
    replayed = StaticLayout.like(packed, torch.device("cpu"))
    with pytest.raises(ValueError, match="a CUDA graph cannot attend to keys that an indexer"):
        _indexers._long_documents(replayed, budget, torch.device("cpu"))


def test_an_unknown_indexer_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(_indexers, "KINDS", ())
    with pytest.raises(ValueError, match="keys that its indexer chooses, which packed attention"):
        cuseq.enable(small_model(FAMILIES[0]))
    monkeypatch.undo()
    cuseq.integrations.transformers.register()
    try:
        with pytest.raises(ValueError, match="where it can, cuseq.enable"):
            small_model(FAMILIES[0]).set_attn_implementation("cuseq")
    finally:
        cuseq.integrations.transformers.unregister()


@pytest.mark.skipif("qwen4_exp_text" not in FAMILIES, reason="this transformers lacks it")
def test_embeddings_of_ngrams_along_the_row_are_refused():
    model = small_model("qwen4_exp_text")
    model.config.ple_layer_ids = [1]
    with pytest.raises(ValueError, match="embeddings of n-grams along the row"):
        cuseq.enable(model)


@pytest.mark.parametrize("told", ["packed", full("offsets")])
def test_compiled_models_count_inside_documents(model, told):
    """What layers do with positions follows the layout, compiled as a whole too."""
    lengths = (3, 8)
    docs = documents(lengths)
    with torch.no_grad():
        expected = one_by_one(model, docs)
        cuseq.enable(model)
        packed, _ = row_of(lengths)
        offsets = packed.cu_seqlens
        row = torch.cat(docs, dim=1)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", dynamic=False)
        of_call = {"packed": packed}
        if told == "offsets":
            of_call = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        found = compiled(input_ids=row, use_cache=False, **of_call)[0]
    assert difference(found, expected) < 1e-5


@pytest.mark.parametrize("second", ["packed", "plain"])
def test_threads_do_not_lend_each_other_their_rows(model, second):
    """Two threads inside one layer: each indexer sees the documents of its own call."""
    cuseq.enable(model)
    rows = [(9, 8), (8, 9)]
    inputs = [(torch.cat(documents(lengths), dim=1), row_of(lengths)[1]) for lengths in rows]
    if second == "plain":
        inputs[1] = inputs[1][0], {}
    with torch.no_grad():
        expected = [output(model, ids, **told) for ids, told in inputs]
    inside, done = threading.Event(), threading.Event()
    found: list[Tensor | None] = [None, None]
    layer = indexed(model)[0]

    def wait(module, args, kwargs):
        if threading.current_thread().name == "first" and not inside.is_set():
            inside.set()
            done.wait(20)

    def run(i):
        with torch.no_grad():
            found[i] = output(model, inputs[i][0], **inputs[i][1])

    hook = layer.indexer.register_forward_pre_hook(wait, with_kwargs=True)
    first = threading.Thread(target=run, args=(0,), name="first")
    first.start()
    inside.wait(20)
    run(1)
    done.set()
    first.join()
    hook.remove()
    for one, other in zip(found, expected, strict=True):
        assert one is not None and torch.equal(one, other)
