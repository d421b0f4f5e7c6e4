"""Small random models of the causal-LM families of the installed transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 64

# Sizes of a small model. Each is set where a family's config has a number of this name.
_SIZES: dict[str, int] = dict(
    vocab_size=VOCAB,
    vocab_size_per_layer_input=VOCAB,
    hidden_size=32,
    hidden_size_per_layer_input=8,
    d_model=32,
    intermediate_size=48,
    intermediate_size_mlp=48,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_hidden_layers=2,
    encoder_layers=2,
    decoder_layers=2,
    num_attention_heads=4,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    sliding_window=4,
    attention_chunk_size=4,
    floor_scale=4,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
_LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_key_value_heads=4,
    head_dim=None,
    index_head_dim=8,
    index_n_heads=4,
    index_topk=4,
)
_LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
_MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
)
_MAMBA2 = dict(n_groups=2, conv_kernel=4, chunk_size=16)
_WINDOWS = dict(layer_types=["sliding_attention", "full_attention"])
_ROTARY = dict(rotary_dim=4)
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])

# What else a family needs. None removes a size.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(layer_group_size=2),
    "bamba": _MAMBA | dict(attn_layer_indices=[1]),
    "codegen": _ROTARY,
    "cohere_compass_text": _WINDOWS
    | dict(rope_parameters=dict(sliding_attention=_ROPE, full_attention=_ROPE)),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v2": dict(n_group=None, topk_group=None),
    # It divides learned scales by this, which are 1 in a small model.
    "dory": dict(initializer_range=1.0),
    "exaone4": _WINDOWS,
    "exaone_moe": _WINDOWS,
    "falcon": dict(head_dim=None),
    "falcon_h1": _MAMBA | dict(mamba_d_ssm=64),
    "gemma2": _WINDOWS | dict(attn_logit_softcapping=2.0),
    "gemma3_text": _WINDOWS,
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
    ),
    # Shared KV layers, k equal to v, and heads of two sizes.
    "gemma4_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        attention_k_eq_v=True,
        global_head_dim=16,
        num_global_key_value_heads=1,
    ),
    "glm_moe_dsa": dict(indexer_types=["full", "shared"]),
    "gpt_neo": dict(num_hidden_layers=2, attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj": _ROTARY,
    "granitemoehybrid": _MAMBA
    | dict(layer_types=["mamba", "attention"], shared_intermediate_size=16),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        q_lora_rank=None,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    # One layer with a rotation and chunks, one with neither.
    "llama4_text": dict(
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        moe_layers=[1],
        num_experts_per_tok=1,
    ),
    "longcat_flash": dict(
        num_layers=2,
        head_dim=4,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        moe_topk=2,
        zero_expert_num=2,
    ),
    "mamba2": _MAMBA2 | dict(num_heads=8, head_dim=8, state_size=8, expand=2),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=4),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=2,
        index_topk_blocks=2,
    ),
    "nemotron_h": _MAMBA2
    | dict(
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
    ),
    "olmo_hybrid": _LINEAR | dict(head_dim=None),
    "olmo3": _WINDOWS,
    "phi": dict(rope_parameters=dict(partial_rotary_factor=0.5, rope_theta=1e4)),
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": dict(num_hidden_layers=3),  # every third layer attends
    "stablelm": dict(qk_layernorm=True),
    "xmod": dict(default_language="en_XX", languages=["en_XX"], is_decoder=True),
    "zamba": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_hidden_layers=4,
        attention_hidden_size=64,
        attention_head_dim=16,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "zaya": dict(layer_types=["hybrid"] * 2, num_experts_per_tok=1, router_hidden_size=16),
    "qwen4_exp_text": _LINEAR
    | dict(
        layer_types=["linear_attention", "qwen_sparse_attention"],
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=4,
    ),
}

_NAMES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def family_names() -> list[str]:
    """Return the model types of all causal-LM families of the installed transformers."""
    return sorted(_NAMES)


def other_parts(name: str) -> list[str]:
    """Return the names of the parts of a composite model; empty for a model of text alone."""
    parts = getattr(CONFIG_MAPPING[name], "sub_configs", {})
    return sorted(
        part
        for part, kind in parts.items()
        if part == "text_config" or kind is AutoConfig or kind.model_type in CONFIG_MAPPING
    )


def text_family(name: str) -> str | None:
    """Return the family that is the text part of a composite model; None if it has none."""
    part = getattr(CONFIG_MAPPING[name], "sub_configs", {}).get("text_config")
    kind = getattr(part, "model_type", None)
    return kind if kind in _NAMES else None


def small_config(name: str) -> PreTrainedConfig:
    """Return a config of a family with two layers or a few more, 32 wide, and 64 tokens.

    Nothing drops: all dropout is 0.
    """
    kind = CONFIG_MAPPING[name]
    like = kind()
    known = like.to_dict()
    wanted: dict[str, Any] = dict(_SIZES)
    if "qk_rope_head_dim" in known:
        wanted |= {key: value for key, value in _LATENT.items() if key in known}
    wanted |= _SPECIAL.get(name, {})
    mapped = like.attribute_map
    values: dict[str, Any] = {}
    for key, value in wanted.items():
        there = key if key in known else mapped.get(key, key)
        is_special = key in _SPECIAL.get(name, {})
        if value is not None and (is_special or there in known):
            values[there] = value
    for key, value in known.items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            values[key] = 0.0
    return kind(**values, **{k: v for k, v in _TOKENS.items() if k in known})


def small_model(
    name: str, change: Callable[[Any], None] | None = None, device: str = "cpu"
) -> PreTrainedModel:
    """Return a random model of a family, with weights far from their initial values.

    Args:
        name: the family's model type.
        change: may edit the config.
        device: of the model; its weights are the same on all.
    """
    torch.manual_seed(0)
    config = small_config(name)
    if change is not None:
        change(config)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.to(device).eval()
