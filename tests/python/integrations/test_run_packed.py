"""Test padded batches run as packed rows against the padded run of transformers itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cuseq

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("cuseq.integrations.transformers")

from hybrid_models import ARE_SEPARATED  # noqa: E402

VOCAB = 64
MASKS = {
    "right": [[1] * 9, [1] * 3 + [0] * 6, [1] * 6 + [0] * 3],
    "left": [[0] * 4 + [1] * 5, [1] * 9, [0] * 8 + [1]],
    "an empty row": [[1] * 5 + [0] * 4, [0] * 9, [1] * 9],
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the attention; the models of this file request it by name."""
    integration.register()
    yield
    integration.unregister()


def make_model(device: torch.device, implementation: str = "cuseq") -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    return model.double().to(device)


def make_batch(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    mask = torch.tensor(MASKS[name], device=device)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCAB, mask.shape, generator=generator).to(device), mask


def positions_of(mask: Tensor) -> Tensor:
    """Return position ids as callers give them with a mask: positions count real tokens."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("name", MASKS)
def test_logits_and_gradients_are_those_of_the_padded_run(name, device):
    ids, mask = make_batch(name, device)
    real = mask.bool()
    padded_model = make_model(device, "sdpa")
    padded = padded_model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    weight = torch.randn_like(padded)
    (padded * weight)[real].sum().backward()

    model = make_model(device)
    logits = cuseq.run_packed(model, ids, mask).logits
    torch.testing.assert_close(logits[real], padded[real])
    assert not logits[~real].any()
    (logits * weight).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(padded_model))


@pytest.mark.parametrize("name", ["right", "left"])
def test_the_loss_is_that_of_the_padded_run(name, device):
    ids, mask = make_batch(name, device)
    # In the padded run left padding predicts the first token; in the packed run nothing does.
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)
    padded = make_model(device, "sdpa")(
        ids, attention_mask=mask, position_ids=positions_of(mask), labels=labels
    )
    packed = cuseq.run_packed(make_model(device), ids, mask, labels=labels)
    torch.testing.assert_close(packed.loss, padded.loss)


@pytest.mark.parametrize(
    "options",
    [
        {"segment_multiple": 4},
        {"total_multiple": (8, 3)},
        {"total_tokens": 32},
        {"segment_multiple": 8, "total_tokens": 48},
    ],
    ids=str,
)
def test_padding_of_the_row_changes_nothing(options, device):
    ids, mask = make_batch("left", device)
    model = make_model(device)
    expected = cuseq.run_packed(model, ids, mask).logits
    torch.testing.assert_close(cuseq.run_packed(model, ids, mask, **options).logits, expected)


def test_other_outputs(device):
    ids, mask = make_batch("right", device)
    model = make_model(device)
    out = cuseq.run_packed(model, ids, mask, output_hidden_states=True)
    base = cuseq.run_packed(model.model, ids, mask, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    for state, other in zip(out.hidden_states, base.hidden_states, strict=True):
        assert state.shape == (*ids.shape, 32)
        assert torch.equal(state, other) and not state[mask == 0].any()
    assert torch.equal(base.last_hidden_state, base.hidden_states[-1])
    first, states = cuseq.run_packed(model, ids, mask, output_hidden_states=True, return_dict=False)
    assert torch.equal(first, out.logits) and torch.equal(states[1], out.hidden_states[1])


class Plain(nn.Module):
    """Keeps its arguments."""

    def forward(self, input_ids, position_ids, packed, weights):
        self.seen = input_ids, position_ids, packed
        return weights * position_ids.unsqueeze(-1)


def test_any_module_and_any_mask(device):
    ids, mask = make_batch("left", device)
    model = Plain()
    weights = torch.randn(*ids.shape, 2, device=device)
    expected = (weights * positions_of(mask).unsqueeze(-1)).masked_fill(mask[..., None] == 0, 0)
    for given, options in ((mask, {}), (mask == 0, {"true_is_pad": True}), (mask.cpu(), {})):
        out = cuseq.run_packed(model, ids, given, weights=weights, **options)
        assert torch.equal(out, expected)
        rows, positions, packed = model.seen
        assert rows.tolist() == [ids[mask == 1].tolist()]
        assert positions.dtype == torch.int64
        assert packed.device == ids.device and packed.lengths.tolist() == mask.sum(-1).tolist()


def test_a_device_mask_with_a_total_waits_for_nothing(cuda):
    ids, mask = make_batch("left", cuda)
    weights = torch.randn(*ids.shape, 2, device=cuda)
    cuseq.run_packed(Plain(), ids, mask, total_tokens=32, weights=weights)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuseq.run_packed(Plain(), ids, mask, total_tokens=32, weights=weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_position_ids_that_are_none_are_made(device):
    """A wrapper may pass on an optional argument; the model would count along the whole row."""
    ids, mask = make_batch("left", device)
    packed = cuseq.PackedLayout.from_padding_mask(mask)
    given = 7 * positions_of(mask)
    for positions, expected in ((None, packed.position_ids), (given, cuseq.pack(packed, given))):
        found = cuseq.run_packed(
            lambda position_ids, **_: position_ids, ids, mask, position_ids=positions
        )
        assert torch.equal(cuseq.pack(packed, found), expected)


def test_an_output_that_cannot_be_unpacked_is_refused(device):
    ids, mask = make_batch("left", device)
    with pytest.raises(TypeError, match="must return a tensor, .* got NoneType"):
        cuseq.run_packed(lambda **_: None, ids, mask)


def test_wrong_tensors_are_named(device):
    ids, mask = make_batch("left", device)
    with pytest.raises(ValueError, match=r"weights must be \[batch, seqlen"):
        cuseq.run_packed(Plain(), ids, mask, weights=torch.zeros(9, 3, device=device))
    packed = cuseq.PackedLayout.from_padding_mask(mask)
    with pytest.raises(ValueError, match=r"tensors\[0\] must be \[total_tokens = 15"):
        cuseq.unpack(packed, torch.zeros(14, 2, device=device))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_would_mix_documents_is_refused(attention, device):
    ids, mask = make_batch("left", device)
    model = make_model(device, attention)
    with pytest.raises(ValueError, match=f"model must be enabled.*'{attention}'.*use_cache"):
        cuseq.run_packed(model, ids, mask, use_cache=True)
    expected = cuseq.run_packed(make_model(device), ids, mask).logits
    # Without a cache transformers looks at the positions.
    for options in ({"use_cache": False}, {"use_cache": None}, {}):
        found = cuseq.run_packed(model, ids, mask, **options).logits
        torch.testing.assert_close(found, expected)
    model.config.use_cache = True
    with pytest.raises(ValueError, match="model must be enabled"):
        cuseq.run_packed(model, ids, mask)
    cuseq.enable(model)
    torch.testing.assert_close(cuseq.run_packed(model, ids, mask).logits, expected)


@pytest.mark.parametrize("batch", [0, 2])
def test_a_batch_without_tokens_has_a_row_of_the_multiples(batch, device):
    ids = torch.ones(batch, 4, dtype=torch.int64, device=device)
    seen = []
    cuseq.run_packed(
        lambda input_ids, **_: seen.append(input_ids.shape) or input_ids,
        ids,
        torch.zeros_like(ids),
        segment_multiple=4,
        total_multiple=(16, 6),
    )
    assert seen == [(1, 48)]


def test_a_batch_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="input_ids must be a tensor, got list"):
        cuseq.run_packed(Plain(), [[1, 2]], torch.ones(1, 2))


def test_the_attention_that_counts_is_that_to_text(device):
    """An enabled model with a vision tower keeps the tower's attention in its own config."""
    from cuseq.debug.packing_check._runs import Row
    from cuseq.debug.packing_check._suspects import _attention_remedy

    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    config = transformers.Qwen3VLConfig(
        text_config=dict(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=rope,
        ),
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32,
            deepstack_visual_indexes=[0],
        ),
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config).to(device)
    ids, mask = make_batch("left", device)
    with pytest.raises(ValueError, match="model must be enabled"):
        cuseq.run_packed(model, ids, mask)
    row = Row(None, *torch.zeros(3, 1, dtype=torch.int64))
    assert "cuseq.enable(model)" in _attention_remedy(model, row)
    cuseq.enable(model)
    logits = cuseq.run_packed(model, ids, mask).logits
    torch.testing.assert_close(logits[1], model(ids[1:2], use_cache=False).logits[0])
    assert "`packed`, from cuseq.PackingCollator" in _attention_remedy(model, row)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_layers_with_a_state_along_the_row_must_be_enabled(name, use_cache, device):
    """Mamba 2 has no attention, whose implementation would tell."""
    model = make_hybrid(name).to(device)
    ids, mask = make_batch("right", device)
    refused = (
        r"model must be enabled by cuseq.enable\(model\).* got layers of type (linear_att|mamba)"
    )
    with pytest.raises(ValueError, match=refused):
        cuseq.run_packed(model, ids, mask, use_cache=use_cache)
    if not ARE_SEPARATED:
        return
    cuseq.enable(model)
    logits = cuseq.run_packed(model, ids, mask, use_cache=use_cache).logits
    for row, real in zip(range(len(ids)), mask.bool(), strict=True):
        alone = model(ids[row][real][None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[row][real], alone, rtol=1e-4, atol=1e-4)


def make_hybrid(name: str) -> nn.Module:
    if name == "mamba2":
        config = transformers.Mamba2Config(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8,
            state_size=8, n_groups=1, chunk_size=8,
        )  # fmt: skip
    else:
        config = transformers.Qwen3_5TextConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class Seen:
    """A model that keeps its arguments."""

    def __call__(self, input_ids: Tensor, **arguments) -> Tensor:
        self.arguments = arguments
        return input_ids.double()


@pytest.mark.parametrize("shape", [(3, 4), (3, 3), (2, 5)], ids=str)
@pytest.mark.parametrize("planes", [3, 4])
def test_planes_of_positions_are_packed(shape, planes, device):
    """M-RoPE's planes come before the batch dimension. In `[3, 3, 3]` the name decides."""
    mask = torch.rand(shape, device=device) < 0.7
    ids = torch.arange(mask.numel(), device=device).view(shape)
    positions = torch.stack([ids * 10 + plane for plane in range(planes)])
    model = Seen()
    out = cuseq.run_packed(model, ids, mask, segment_multiple=2, position_ids=positions)
    assert torch.equal(out, (ids * mask).double())
    found, packed = model.arguments["position_ids"], model.arguments["packed"]
    assert found.shape == (planes, 1, packed.total_tokens)
    for plane, row in enumerate(found):
        assert torch.equal(row[0], cuseq.pack(packed, positions[plane]))
    if planes != shape[0]:
        assert torch.equal(cuseq.pack(packed, positions), found.squeeze(1))


def test_a_mask_for_every_row_is_expanded(device):
    real = torch.tensor([True, False, True, True], device=device)
    mask = (real & torch.ones(4, 4, dtype=torch.bool, device=device).tril())[None, None]
    ids = torch.arange(12, device=device).view(3, 4)
    model = Seen()
    out = cuseq.run_packed(model, ids, mask)
    assert torch.equal(out, (ids * real).double())
    assert model.arguments["packed"].lengths.tolist() == [3, 3, 3]


def test_what_is_no_model_or_batch_is_named():
    mask = torch.ones(1, 1, 2, 2)
    with pytest.raises(TypeError, match="model must be callable, got None"):
        cuseq.run_packed(None, torch.ones(2, 2).long(), mask)
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, seqlen\], got shape \[\]"):
        cuseq.run_packed(Seen(), torch.tensor(3), mask)
