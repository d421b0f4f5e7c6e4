"""Small models of several kinds, and batches that describe their documents in each known way."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import cuseq
from cuseq.integrations.transformers import _enable, _warn, register, unregister

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


def make_model(name: str, how: str = "sdpa") -> nn.Module:
    """Return a model of float64 with the same random weights in every call.

    Args:
        name: a key of CONFIGS.
        how: "cuseq" names the attention alone; "enabled" enables the model.
    """
    auto = transformers.AutoModelForCausalLM
    if name in ("qwen2_vl", "gemma3"):
        auto = transformers.AutoModelForImageTextToText
    made = {"cuseq": "cuseq"}.get(how, "eager" if name == "gptj" else "sdpa")
    model = with_random_weights(
        lambda: auto.from_config(CONFIGS[name](), attn_implementation=made, dtype=torch.float64)
    )
    if how == "enabled":
        enable(model)
    return model


def make_classifier(name: str, auto: str = "AutoModelForSequenceClassification") -> nn.Module:
    """Return a model of float64 with a head of three labels, in the same way."""
    config = CONFIGS[name]()
    config.num_labels, config.pad_token_id = 3, 0
    return with_random_weights(
        lambda: getattr(transformers, auto).from_config(config, dtype=torch.float64)
    )


def with_random_weights(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.eval()


@pytest.fixture(autouse=True)
def clean():
    """Register cuseq's attention for a test, and disable what the test enabled."""
    _warn.forget_warnings()
    register()
    yield
    for model in list(_enable._models):
        cuseq.disable(model)
    unregister()
    gc.collect()


def enable(x: Any) -> Any:
    """Enable a model or a trainer; skip the test if its release of transformers leaks."""
    enabled = cuseq.enable(x)
    if any(warning.startswith("LEAKS") for warning in enabled.warnings):
        pytest.skip(f"documents leak in transformers {transformers.__version__}, and it is said")
    return enabled


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[Tensor]:
    """Return the tokens `[1, length]` of each document."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 59, (1, n), generator=generator) for n in lengths]


# ----------------------------------------------------------------------------- descriptions

Documents = list[Tensor]
Batch = dict[str, Any]


def lengths_of(docs: Documents) -> list[int]:
    return [doc.shape[1] for doc in docs]


def positions_of(docs: Documents) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths_of(docs)])


def numbers_of(docs: Documents) -> Tensor:
    lengths = torch.tensor(lengths_of(docs))
    return torch.repeat_interleave(torch.arange(len(docs)), lengths)


def offsets_of(docs: Documents) -> Tensor:
    lengths = torch.tensor([0, *lengths_of(docs)])
    return lengths.cumsum(0).int()


def batch_with(padding: str, docs: Documents, **more: Tensor) -> dict[str, Tensor]:
    """Return a row of the documents with padding, and values for each token, 0 at padding."""
    ids = torch.cat(docs, dim=1)[0]
    left, right = {"none": (0, 0), "left": (3, 0), "right": (0, 2), "both": (2, 3)}[padding]
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
    return {name: nn.functional.pad(value, (left, right))[None] for name, value in row.items()}


def restarting(padding: str, docs: Documents, dtype: torch.dtype = torch.int64) -> Batch:
    """Return a row with a mask of padding and positions that begin again."""
    batch = batch_with(padding, docs, position_ids=positions_of(docs))
    return batch | {"attention_mask": batch["attention_mask"].to(dtype)}


def listed(padding: str, docs: Documents) -> Batch:
    """Return a row with a mask that numbers the documents from 1."""
    batch = batch_with(padding, docs, numbers=numbers_of(docs) + 1)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["numbers"]}


def rows_of_documents(docs: Documents) -> Batch:
    """Return two rows, each with half of the documents, padded on the right to one length."""
    half = len(docs) // 2
    rows = [restarting("none", part) for part in (docs[:half], docs[half:])]
    longest = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: torch.cat(
            [nn.functional.pad(row[name], (0, longest - row[name].shape[1])) for row in rows]
        )
        for name in rows[0]
    }


def plain(docs: Documents) -> Batch:
    """Return a row that does not say where documents end."""
    return {"input_ids": torch.cat(docs, dim=1)}


def with_positions(docs: Documents) -> Batch:
    return plain(docs) | {"position_ids": positions_of(docs)[None]}


DESCRIPTIONS: dict[str, Callable[[Documents], Batch]] = {
    "positions": with_positions,
    **{
        f"positions, mask of {kind}, padding {padding}": (
            lambda docs, padding=padding, dtype=dtype: restarting(padding, docs, dtype)
        )
        for padding in ("none", "left", "right", "both")
        for kind, dtype in (("int64", torch.int64), ("bool", torch.bool))
    },
    **{
        f"a mask that lists documents, padding {padding}": (
            lambda docs, padding=padding: listed(padding, docs)
        )
        for padding in ("none", "left", "right", "both")
    },
    "rows of several documents": rows_of_documents,
    # The model's positions follow the next ones, and `packed`.
    "offsets alone": lambda docs: plain(docs) | _flash(docs),
    "seq_idx": lambda docs: plain(docs) | {"seq_idx": numbers_of(docs).int()[None]},
    "document_ids": lambda docs: plain(docs) | {"document_ids": numbers_of(docs)[None]},
    "segment_ids": lambda docs: plain(docs) | {"segment_ids": numbers_of(docs)[None] + 1},
    "packed_seq_lengths": (
        lambda docs: plain(docs) | {"packed_seq_lengths": torch.tensor(lengths_of(docs))}
    ),
    "cu_seqlens": lambda docs: with_positions(docs) | {"cu_seqlens": offsets_of(docs)},
    "cu_seqlens_q": lambda docs: with_positions(docs) | {"cu_seqlens_q": offsets_of(docs)},
    "cu_seq_lens_k alone": (lambda docs: plain(docs) | {"cu_seq_lens_k": offsets_of(docs)}),
    "flash_attn_kwargs of keys": (
        lambda docs: plain(docs) | {"flash_attn_kwargs": {"cu_seq_lens_k": offsets_of(docs)}}
    ),
    "flash_attn_kwargs": lambda docs: with_positions(docs) | {"flash_attn_kwargs": _flash(docs)},
    "packed_seq_params": lambda docs: with_positions(docs) | {"packed_seq_params": _params(docs)},
    "packed": (
        lambda docs: plain(docs) | {"packed": cuseq.PackedLayout.from_lengths(lengths_of(docs))}
    ),
}


def _flash(docs: Documents) -> dict[str, Tensor]:
    return {"cu_seq_lens_q": offsets_of(docs), "cu_seq_lens_k": offsets_of(docs)}


def _params(docs: Documents) -> types.SimpleNamespace:
    offsets = offsets_of(docs)
    return types.SimpleNamespace(cu_seqlens_q=offsets, cu_seqlens_q_padded=offsets)


def real_tokens(batch: Batch) -> Tensor:
    """Return which tokens of a batch are not padding, bool `[batch, seqlen]`."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0


# ------------------------------------------------------------------------ batches without documents


def one_document() -> dict[str, Batch]:
    """Return batches whose rows are one document each, by what is special about them."""
    ids = torch.cat(documents(), dim=1)
    rows, tokens = ids.repeat(3, 1), ids.shape[1]
    right = torch.ones_like(rows)
    right[0, 9:] = 0
    right[1, 5:] = 0
    left = right.flip(1)
    counted = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    zeros = (left.cumsum(-1) - 1).clamp(min=0)
    jumps = torch.tensor([[0, 1, 2, 3, 50, 51, 52, 90, 91, 92, 93, 94]])
    repeats = torch.arange(tokens)[None] // 2
    later = torch.arange(tokens)[None] + 7
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
        "positions": dict(input_ids=ids, position_ids=torch.arange(tokens)[None]),
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
