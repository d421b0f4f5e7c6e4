"""Test layouts of position ids in the identity cache, and writes that version counters miss."""

from __future__ import annotations

import pytest
import torch

import cuseq

transformers = pytest.importorskip("transformers")

TOKENS = 12


@pytest.fixture(scope="module")
def model():
    from cuseq.integrations.transformers import register, unregister

    register()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_implementation="cuseq",
    )
    yield transformers.AutoModelForCausalLM.from_config(config).eval()
    unregister()


def positions_of(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def logits_of(model, position_ids: torch.Tensor) -> torch.Tensor:
    input_ids = torch.arange(TOKENS)[None] % 7 + 1
    with torch.no_grad():
        return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


WRITES = {
    "numpy": lambda position_ids, now: position_ids.numpy().__setitem__(..., now.numpy()),
    "data": lambda position_ids, now: position_ids.data.copy_(now),
    "dlpack": lambda position_ids, now: torch.from_dlpack(position_ids).copy_(now),
}
FORGET = {
    "invalidate": cuseq.cache.invalidate,
    "invalidate a view": lambda position_ids: cuseq.cache.invalidate(position_ids[0]),
    "clear": lambda position_ids: cuseq.cache.clear(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("forget", FORGET.values(), ids=FORGET)
def test_rewritten_positions_are_read_again_after(forget, write, model, fresh_cache):
    before, now = positions_of(5, 7), positions_of(4, 2, 6)
    expected = logits_of(model, now.clone())
    position_ids = before.clone()
    assert not torch.allclose(logits_of(model, position_ids), expected, atol=1e-3)
    write(position_ids, now)
    forget(position_ids)
    torch.testing.assert_close(logits_of(model, position_ids), expected)


def test_edits_and_other_sizes_need_no_word(model, fresh_cache):
    now = positions_of(4, 2, 6)
    expected = logits_of(model, now.clone())
    position_ids = positions_of(5, 7)
    logits_of(model, position_ids)
    position_ids.copy_(now)
    torch.testing.assert_close(logits_of(model, position_ids), expected)
    # Other strides over the same memory at the same version: one position per token.
    memory = torch.stack([positions_of(5, 7)[0], now[0]], dim=1)
    position_ids = memory.T[:1]
    logits_of(model, position_ids)
    position_ids.data = memory.T[1:]
    torch.testing.assert_close(logits_of(model, position_ids), expected)


def test_layers_share_one_layout(model, fresh_cache):
    position_ids = positions_of(5, 7)
    logits_of(model, position_ids)
    held = cuseq.cache.info()["packed_positions"]
    assert held["entries"] == 1 and held["bytes"] > 0
    del position_ids
    assert cuseq.cache.info()["packed_positions"]["entries"] == 0


SWITCHED_OFF = """
import torch, transformers, cuseq
from cuseq.integrations.transformers import register
made = []
from_position_ids = cuseq.PackedLayout.from_position_ids
cuseq.PackedLayout.from_position_ids = lambda rows: made.append(1) or from_position_ids(rows)
register()
config = transformers.Qwen3Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, attn_implementation="cuseq")
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
def logits(position_ids):
    return model(input_ids=torch.arange(12)[None], position_ids=position_ids).logits.detach()
now = torch.cat([torch.arange(n) for n in (4, 2, 6)])[None]
expected = logits(now.clone())
position_ids = torch.cat([torch.arange(n) for n in (5, 7)])[None]
logits(position_ids)
position_ids.numpy()[...] = now.numpy()
right = torch.allclose(logits(position_ids), expected)
print(len(made), right, cuseq.cache.stats()["entries"])
"""


@pytest.mark.full
def test_without_the_cache_positions_are_read_in_every_call(run_python):
    result = run_python(SWITCHED_OFF, CUSEQ_CACHE="0")
    assert result.stdout.strip() == "3 True 0", result.stdout + result.stderr
    result = run_python(SWITCHED_OFF, CUSEQ_CACHE="1")
    assert result.stdout.startswith("2 False"), "of which invalidate has to be told"
