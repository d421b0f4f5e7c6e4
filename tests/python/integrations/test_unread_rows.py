"""Test the warning about packed rows that reach a transformers model which nobody enabled."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import cuseq
from cuseq._base import models

transformers = pytest.importorskip("transformers")

from hybrid_models import ARE_SEPARATED  # noqa: E402

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}]


def end_watch():
    if "__call__" in vars(transformers.PreTrainedModel):
        del transformers.PreTrainedModel.__call__


@pytest.fixture
def collate(monkeypatch):
    """Return a collator that begins a new watch, which ends with the test."""
    end_watch()
    monkeypatch.setattr(models, "_watched", None)
    monkeypatch.setattr(models, "_warned", False)
    yield cuseq.PackingCollator()
    end_watch()


def make_model(**options) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def heard(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if str(one.message).startswith("LEAKS")]


def test_a_model_that_nobody_enabled_is_named_once(collate):
    model = make_model()
    batch = collate(DOCUMENTS)
    with pytest.warns(UserWarning, match="LlamaForCausalLM got a packed row and ignores") as found:
        model(**batch)
    (ours,) = (one for one in found if str(one.message).startswith("LEAKS"))
    assert ours.filename == __file__
    assert heard(lambda: model(**batch)) == []
    assert "__call__" not in vars(transformers.PreTrainedModel)
    cuseq.PackingCollator()
    assert "__call__" not in vars(transformers.PreTrainedModel)


def test_a_model_loaded_after_another_was_enabled_is_named(collate, tmp_path):
    model = make_model()
    cuseq.enable(model)
    batch = collate(DOCUMENTS)
    assert heard(lambda: model(**batch)) == []
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(heard(lambda: again(**batch))) == 1


@pytest.mark.parametrize("kind", ["enabled", "body", "copy", "compiled", "by name", "hybrid"])
def test_models_that_read_packed_are_quiet(collate, kind):
    batch = collate(DOCUMENTS)
    if kind == "hybrid":
        if not ARE_SEPARATED:
            pytest.skip("recurrent layers of this transformers get no keywords")
        config = transformers.Mamba2Config(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8,
            state_size=8, n_groups=1, chunk_size=8,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
    elif kind == "by name":
        cuseq.integrations.transformers.register()
        model = make_model(attn_implementation="cuseq")
    else:
        model = make_model()
    if kind != "by name":
        cuseq.enable(model)
    if kind == "copy":
        model = copy.deepcopy(model)
    if kind == "body":
        model = model.model
        del batch["labels"]
    if kind == "compiled":
        model.compile(backend="eager")
    try:
        assert heard(lambda: model(**batch)) == []
        assert models._watched is transformers.PreTrainedModel
    finally:
        if kind == "by name":
            cuseq.integrations.transformers.unregister()


def test_code_of_the_users_that_reads_packed_is_quiet(collate, monkeypatch):
    class Own(transformers.LlamaForCausalLM):
        def forward(self, packed=None, **inputs):
            return super().forward(**inputs)

    assert heard(lambda: Own(make_model().config)(**collate(DOCUMENTS))) == []

    def attention(module, query, key, value, mask, packed=None, **options):
        return value.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "own_packed", attention)
    model = make_model(attn_implementation="own_packed")
    assert heard(lambda: model(**collate(DOCUMENTS))) == []

    model = make_model()
    read = lambda module, args, kwargs: (args, {**kwargs, "packed": None})  # noqa: E731
    model.register_forward_pre_hook(read, with_kwargs=True)
    assert heard(lambda: model(**collate(DOCUMENTS))) == []
    model = make_model()
    model.forward = lambda packed, **inputs: None
    assert heard(lambda: model(**collate(DOCUMENTS))) == []


def test_other_calls_are_left_alone(collate):
    model = make_model()
    ids = torch.tensor([[5, 6, 7]])
    assert heard(lambda: model(input_ids=ids)) == []
    assert heard(lambda: model(input_ids=ids, packed=None)) == []


@pytest.mark.parametrize(
    "given, implementation, leaks",
    [
        ({"position_ids": 1}, "sdpa", True),
        ({"position_ids": 1, "use_cache": None}, "sdpa", True),  # the config's, which is True
        ({"position_ids": 1, "use_cache": False}, "sdpa", False),
        ({"position_ids": 1, "use_cache": False, "attention_mask": 1}, "sdpa", True),
        ({"use_cache": False}, "eager", True),
        ({"position_ids": 1}, "flash_attention_2", False),
        ({}, "flash_attention_2", True),
    ],
)
def test_what_transformers_keeps_apart_by_positions_is_quiet(given, implementation, leaks):
    model = make_model()
    model.config._attn_implementation_internal = implementation
    assert models._leaks(model, given) is leaks


def test_the_warning_is_true(collate):
    """Documents reach each other where it is given, and do not with use_cache=False."""
    model, batch = make_model().eval(), collate(DOCUMENTS)
    other = batch["input_ids"].clone()
    other[:, :3] = 1
    with torch.no_grad():
        for cache in (True, False):
            models._warned = True
            first, second = (
                model(**batch | {"input_ids": ids}, use_cache=cache).logits[0, 3:]
                for ids in (batch["input_ids"], other)
            )
            assert torch.equal(first, second) is not cache
            given = {"position_ids": batch["position_ids"], "use_cache": cache}
            assert models._leaks(model, given) is cache


def test_threads_warn_once(collate):
    batch, together = collate(DOCUMENTS), threading.Barrier(4)
    mine = [make_model() for _ in range(4)]

    def call(model):
        together.wait()
        model(**batch)

    def all_call():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, mine))

    assert len(heard(all_call)) == 1


def test_a_wrapper_that_came_later_stays(collate):
    ours = transformers.PreTrainedModel.__call__

    def later(model, *args, **kwargs):
        return ours(model, *args, **kwargs)

    transformers.PreTrainedModel.__call__ = later
    model, batch = make_model(), collate(DOCUMENTS)
    assert len(heard(lambda: model(**batch))) == 1
    assert vars(transformers.PreTrainedModel)["__call__"] is later
    assert heard(lambda: model(**batch)) == []


def test_a_class_beside_the_model_keeps_its_call(collate):
    class Beside(nn.Module):
        def __call__(self, *args, **kwargs):
            return "beside"

    class Both(transformers.LlamaForCausalLM, Beside):
        pass

    assert Both(make_model().config)(**collate(DOCUMENTS)) == "beside"


def test_check_packing_keeps_the_warning_for_the_training(collate):
    model = make_model()
    documents = [example["input_ids"] for example in DOCUMENTS]
    assert heard(lambda: cuseq.check_packing(model, documents)) == []
    assert len(heard(lambda: model(**collate(DOCUMENTS)))) == 1
    assert heard(lambda: cuseq.check_packing(model, documents)) == []


def test_compiled_models_have_the_graphs_that_they_have_without(collate):
    model = make_model()
    model.register_forward_pre_hook(lambda module, args: None)
    cuseq.enable(model)
    graphs = []
    for watched in (True, False):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter)
        assert heard(lambda: compiled(**collate(DOCUMENTS), use_cache=False)) == []  # noqa: B023
        assert ("__call__" in vars(transformers.PreTrainedModel)) is watched
        graphs.append((counter.frame_count, counter.op_count))
        end_watch()
    assert graphs[0] == graphs[1]


def test_a_call_of_another_package_stays(collate, monkeypatch):
    end_watch()
    monkeypatch.setattr(models, "_watched", None)
    transformers.PreTrainedModel.__call__ = nn.Module.__call__
    cuseq.PackingCollator()
    assert vars(transformers.PreTrainedModel)["__call__"] is nn.Module.__call__


def test_nothing_is_watched_without_a_collator():
    code = """
        import transformers, cuseq
        layout = cuseq.PackedLayout.from_lengths([2, 3])
        assert "__call__" not in vars(transformers.PreTrainedModel)
        cuseq.PackingCollator()
        assert "__call__" in vars(transformers.PreTrainedModel)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
