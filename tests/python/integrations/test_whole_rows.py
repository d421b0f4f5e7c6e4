"""Test what a model computes over whole rows: balance losses, NEFTune, padding, tokens seen."""

from __future__ import annotations

import gc
from typing import Any

import distributed
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from tiers import full_but
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import cuseq
from cuseq.distributed import ContextParallel

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_models import SETTINGS  # noqa: E402
from trainer_models import small_model as llama_like  # noqa: E402
from transformers.integrations import neftune  # noqa: E402

from cuseq.integrations.transformers import register, unregister  # noqa: E402
from tests.families.models import (  # noqa: E402
    VOCAB,
    family_names,
    other_parts,
    small_model,
)

LENGTHS = (7, 9, 12)


def documents(lengths=LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def padded(ids: list[Tensor]) -> dict[str, Tensor]:
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    batch = {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).long()}
    labels[:, 0] = -100  # nothing predicts it, but Trainer of transformers 5.5 counts it
    return batch | {"labels": labels}


def packed(ids: list[Tensor], total_tokens: int | None = None) -> dict[str, Any]:
    return cuseq.PackingCollator(total_tokens=total_tokens)([{"input_ids": one} for one in ids])


def between(ids: list[Tensor]) -> dict[str, Any]:
    """Return a row with padding between its documents and a tail."""
    lengths = [len(one) for one in ids]
    layout = cuseq.PackedLayout.from_lengths(lengths, 64, segment_multiple=8)
    batch = {name: torch.zeros(64, dtype=torch.int64) for name in ("input_ids", "labels")}
    batch["labels"].fill_(-100)
    for one, start in zip(ids, layout.cu_seqlens_padded.tolist(), strict=False):
        batch["input_ids"][start : start + len(one)] = one
        batch["labels"][start + 1 : start + len(one)] = one[1:]
    batch["position_ids"] = layout.position_ids.long()
    return {name: value[None] for name, value in batch.items()} | {"packed": layout}


def by_offsets(ids: list[Tensor]) -> dict[str, Any]:
    """Return a row whose call has offsets that end before the tail."""
    batch = packed(ids, 64)
    layout = batch.pop("packed")
    offsets, longest = layout.cu_seqlens, layout.max_seqlen
    return batch | dict(
        cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest
    )


ROWS = {
    "no tail": lambda ids: packed(ids),
    "tail": lambda ids: packed(ids, 32),
    "long tail": lambda ids: packed(ids, 256),
    "padding between": between,
    "offsets": by_offsets,
    "offsets of keys": lambda ids: by_offsets(ids) | {"cu_seq_lens_q": None},
}


def result(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the output of a training step, and the gradients."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    named = model.named_parameters()
    return output, {name: p.grad.clone() for name, p in named if p.grad is not None}


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rounding: float):
    for name, gradient in expected.items():
        atol = rounding * float(gradient.abs().max())
        assert_close(found[name], gradient, rtol=0, atol=atol + 1e-12, msg=name)


# ----------------------------------------------------------------------------------- balance losses

BALANCED = (
    *("mixtral", "qwen3_moe", "jamba"),  # jamba has recurrent layers
    *("ernie4_5_moe", "flex_olmo", "gpt_oss", "laguna", "mellum", "minimax_m2", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"),
)


def balanced_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    def change(config: Any) -> None:
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        if hasattr(config, "sliding_window"):
            config.sliding_window = 16  # a padded batch has NaN where a window holds padding alone

    if name not in family_names():
        pytest.skip(f"transformers has no {name}")
    return small_model(name, change).to(dtype).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", full_but(BALANCED, "mixtral", "qwen3_moe", "jamba"))
def test_the_balance_loss_is_that_of_the_padded_batch(name, dtype):
    model, ids = balanced_model(name, dtype), documents()
    expected, gradients = result(model, padded(ids))
    if any(warning.startswith("LEAKS") for warning in cuseq.enable(model).warnings):
        pytest.skip(f"documents leak in {name} of transformers {transformers.__version__}")
    for kind, row in ROWS.items():
        if name in ("jamba", "gpt_oss") and kind in (
            "padding between",
            "offsets",
            "offsets of keys",
        ):
            continue  # refused with recurrent layers, and with sinks
        output, found = result(model, row(ids))
        assert_close(output.aux_loss, expected.aux_loss, rtol=1e-5, atol=0, msg=kind)
        assert_close(output.loss, expected.loss, rtol=1e-5, atol=0, msg=kind)
        check_gradients(found, gradients, 1e-5 if dtype == torch.float64 else 1e-3)


def test_a_row_without_a_tail_has_no_mask():
    gc.collect()  # models of other tests
    model, ids = balanced_model("qwen3_moe"), documents()
    code = transformers.models.qwen3_moe.modeling_qwen3_moe
    original = code.load_balancing_loss_func
    cuseq.enable(model)
    assert type(result(model, packed(ids))[0].router_logits) is tuple
    assert type(result(model, packed(ids, 32))[0].router_logits) is not tuple
    assert type(result(model, padded(ids))[0].router_logits) is tuple
    assert code.load_balancing_loss_func is not original
    cuseq.disable(model)
    assert code.load_balancing_loss_func is original
    assert type(result(model, padded(ids))[0].router_logits) is tuple


def test_a_compiled_model_has_one_graph_for_all_tails():
    model = balanced_model("qwen3_moe", torch.float32)
    model.set_experts_implementation("batched_mm")
    cuseq.enable(model)
    result(model, packed(documents()))  # transformers takes a lock in the first call
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
    for ids in (documents(), documents((20, 3)), documents((64,))):
        batch = packed(ids, 64)
        output, found = result(compiled, batch)
        expected, gradients = result(model, batch)
        assert_close(output.aux_loss, expected.aux_loss)
        gradients = {f"_orig_mod.{name}": value for name, value in gradients.items()}
        check_gradients(found, gradients, 1e-4)
    assert counter.frame_count == 1


def test_lora_sees_the_tail():
    peft = pytest.importorskip("peft")
    model = balanced_model("qwen3_moe")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    cuseq.enable(wrapped)
    losses = [wrapped(**packed(documents(), n), use_cache=False).aux_loss for n in (None, 256)]
    assert_close(losses[0], losses[1])


def part_of_ranks(rank: int) -> dict[str, Any]:
    """Return what a mixture in a loop of one's own computes of this rank's part of a row."""
    model = balanced_model("qwen3_moe")
    cuseq.enable(model)
    collate = cuseq.PackingCollator(
        total_tokens=64, cp=ContextParallel(dist.group.WORLD, policy="contiguous")
    )
    batch = collate([{"input_ids": one} for one in documents((7, 21, 12))])
    kept = batch.pop("num_label_tokens")
    batch.pop("row_checksum")
    output, gradients = result(model, batch | {"num_items_in_batch": torch.tensor(kept)})
    return {"loss": float(output.loss), "aux": float(output.aux_loss), "gradients": gradients}


def test_parts_of_a_row_add_up_to_its_balance_loss():
    model = balanced_model("qwen3_moe")
    expected, gradients = result(model, padded(documents((7, 21, 12))))
    ranks = distributed.run(part_of_ranks, limit=240)
    for name, value in {"aux": expected.aux_loss, "loss": expected.loss}.items():
        assert sum(rank[name] for rank in ranks) == pytest.approx(float(value), rel=1e-5)
    names = ranks[0]["gradients"]
    found = {name: sum(rank["gradients"][name] for rank in ranks) for name in names}
    check_gradients(found, gradients, 1e-5)


def test_a_balance_loss_that_ranks_cannot_add_up_is_refused():
    from cuseq.integrations.transformers import _whole_rows

    def another(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return gate_logits[0].logsumexp(-1).mean()

    with pytest.raises(ValueError, match="packed must describe a whole row.*output_router_logits"):
        _whole_rows._check_parts(another)


# ------------------------------------------------------------------------------------------ NEFTune

ALPHA = 8.0


def noise_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the noise `[tokens, hidden]` that a model of `noisy_model` adds to a row."""
    seen: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[2]))
    model(**batch, use_cache=False)
    return seen[0].detach().flatten(0, 1)


def noisy_model(order: str) -> nn.Module:
    model = llama_like(transformers.LlamaConfig, dtype=torch.float64).train()
    if order == "noise first":
        neftune.activate_neftune(model, ALPHA)
    cuseq.enable(model)
    if order == "enable first":
        neftune.activate_neftune(model, ALPHA)
    nn.init.zeros_(model.get_input_embeddings().weight)  # so that its output is the noise
    return model


@pytest.mark.parametrize("order", ["noise first", "enable first"])
@pytest.mark.parametrize("row", ROWS)
def test_noise_is_scaled_by_the_length_of_a_document(order, row):
    if row.startswith("offsets"):
        pytest.skip("noise needs the layout")
    model, ids = noisy_model(order), documents()
    batch = ROWS[row](ids)
    noise, layout = noise_of(model, batch), batch["packed"]
    starts = layout.cu_seqlens_padded.tolist()
    for one, start in zip(ids, starts, strict=False):
        bound = ALPHA / (len(one) * 32) ** 0.5
        largest = float(noise[start : start + len(one)].abs().max())
        assert 0.95 * bound < largest <= bound
    assert float(noise[layout.moe_padding_mask].abs().sum()) == 0
    cuseq.disable(model)
    bound = ALPHA / noise.numel() ** 0.5
    assert 0.95 * bound < float(noise_of(model, {"input_ids": batch["input_ids"]}).max()) <= bound


def test_equal_documents_have_the_noise_of_the_padded_batch():
    model, ids = noisy_model("enable first"), documents((16,) * 4)
    torch.manual_seed(1)
    expected = noise_of(model, padded(ids))
    torch.manual_seed(1)
    assert_close(noise_of(model, packed(ids)), expected)


def test_noise_needs_whole_documents():
    model = noisy_model("enable first")
    layout = cuseq.PackedLayout.from_lengths([6, 2])
    plan = cuseq.distributed.cp_plan(layout, 2, policy="contiguous")
    local, ids = cuseq.distributed.cp_partition(layout, plan, 0, torch.arange(8))
    with pytest.raises(
        ValueError, match="neftune_noise_alpha must be None unless .* packed must not be a"
    ):
        model(input_ids=ids[None], position_ids=local.position_ids[None].long(), packed=local)


# ------------------------------------------------------------------------------------------ padding

FILLS = {
    "padding token": lambda n: torch.zeros(n, dtype=torch.int64),
    "other tokens": lambda n: torch.arange(n) % (VOCAB - 3) + 3,
    "no tokens": lambda n: torch.tensor([-1, 2**40, VOCAB] * n)[:n],
}


TEXT_ALONE = [name for name in family_names() if not other_parts(name)]


@pytest.mark.parametrize("name", full_but(TEXT_ALONE, "gemma3n_text", "llama"))
def test_no_gradient_depends_on_what_is_in_padding(name):
    try:
        model = small_model(name).train()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                nn.init.zeros_(module.weight[0])
        cuseq.enable(model)
        _, expected = result(model, packed(documents()))
    except Exception as error:
        if name in ("gemma3n_text", "llama"):
            raise
        pytest.skip(f"{name} takes no packed rows: {error}")
    for kind, fill in FILLS.items():
        batch = packed(documents(), 40)
        batch["input_ids"][0, sum(LENGTHS) :] = fill(40 - sum(LENGTHS))
        _, found = result(model, batch)
        assert all(bool(one.isfinite().all()) for one in found.values()), kind
        check_gradients(found, expected, 1e-3)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_embeddings_of_padding_may_hold_anything(value):
    model = small_model("gemma3n_text").train()
    cuseq.enable(model)
    _, expected = result(model, packed(documents()))
    batch = packed(documents(), 40)
    ids = batch.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach()
    embeds[0, sum(LENGTHS) :] = value
    batch |= {"inputs_embeds": embeds, "per_layer_inputs": model.model.get_per_layer_inputs(ids)}
    _, found = result(model, batch)
    expected = {name: expected[name] for name in found if "embed" not in name}
    check_gradients(found, expected, 1e-3)


# ------------------------------------------------------------------------------------------ Trainer


def make_trainer(model: nn.Module, folder: Any, collator: Any, ids: list[Tensor], **options: Any):
    settings = SETTINGS | dict(
        per_device_train_batch_size=len(LENGTHS),
        max_steps=2,
        eval_strategy="no",
        use_cpu=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        bf16=False,
    )
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **(settings | options)),
        data_collator=collator,
        train_dataset=[{"input_ids": one.tolist()} for one in ids],
    )


def pad(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded([torch.as_tensor(example["input_ids"]) for example in examples])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.filterwarnings("ignore:the trainer's steps run without a CUDA graph")
def test_a_trainer_learns_what_it_learns_on_padded_batches(graph, tmp_path):
    learned = []
    for is_packed in (False, True):
        model = balanced_model("qwen3_moe")
        collator = cuseq.PackingCollator(total_tokens=64, max_seqs=8) if is_packed else pad
        trainer = make_trainer(model, tmp_path, collator, documents(LENGTHS * 2))
        if is_packed:
            cuseq.enable(trainer, graph=graph)
        trainer.train()
        learned.append(dict(model.named_parameters()))
    for name, value in learned[0].items():
        assert_close(learned[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture
def registered():
    register()
    yield
    unregister()


@pytest.mark.parametrize("total_tokens", [None, 64, 128])
@pytest.mark.parametrize("attention", ["sdpa", "cuseq"])
def test_a_trainer_adds_the_noise_of_documents(attention, total_tokens, registered, tmp_path):
    losses, hooks = [], []
    for is_packed in (False, True):
        name = attention if is_packed else "sdpa"
        model = llama_like(transformers.LlamaConfig, dtype=torch.float64, attention=name)
        before = len(model.model._forward_pre_hooks)
        collator = cuseq.PackingCollator(total_tokens=total_tokens) if is_packed else pad
        options = dict(neftune_noise_alpha=ALPHA, max_steps=1, per_device_train_batch_size=4)
        trainer = make_trainer(model, tmp_path, collator, documents((16,) * 4), **options)
        if is_packed:
            cuseq.enable(trainer)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        cuseq.disable(trainer)
        hooks.append(len(model.model._forward_pre_hooks) - before)
    assert hooks == [0, 0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["no", "all", "non_padding"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_trainer_counts_real_tokens(kind, is_enabled, tmp_path):
    model = llama_like(transformers.LlamaConfig, dtype=torch.float32)
    collator = cuseq.PackingCollator(total_tokens=64)
    options = dict(include_num_input_tokens_seen=kind)
    trainer = make_trainer(model, tmp_path, collator, documents(LENGTHS * 2), **options)
    if is_enabled:
        cuseq.enable(trainer)
        trainer.train()
        counts = {"no": 0, "all": 2 * 64, "non_padding": 2 * sum(LENGTHS)}
        assert trainer.state.num_input_tokens_seen == counts[kind]
        cuseq.disable(trainer)
    assert "_track_num_input_tokens" not in vars(trainer)
