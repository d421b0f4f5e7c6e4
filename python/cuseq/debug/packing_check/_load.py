"""Models and documents for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cuseq.integrations.transformers import register

# Upper bounds for a tiny model. Head sizes are kept, because rotary sections, latent attention and
# kernels depend on them.
_MOST: dict[str, int] = dict(
    vocab_size=1024,
    intermediate_size=128,
    intermediate_size_mlp=128,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    n_inner=128,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    sliding_window=16,
    attention_chunk_size=16,
)
_LAYERS, _KV_HEADS, _HEADS_PER_KV = 2, 2, 2
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")


def load_model(
    name: str, *, attention: str, dtype: torch.dtype, device: torch.device, tiny: bool
) -> PreTrainedModel:
    """Load a model by name or folder.

    Builds a tiny model with random weights if `tiny` is set or the folder holds only a config.json.

    Raises:
        OSError: the model was not found.
        ValueError: it is not a causal language model, or does not support this attention.
    """
    if attention == "cuseq":
        register()
    options: dict[str, Any] = dict(attn_implementation=attention, dtype=dtype)
    if not tiny and not _is_config_alone(Path(name)):
        return AutoModelForCausalLM.from_pretrained(name, **options).to(device)
    config = tiny_config(AutoConfig.from_pretrained(name).get_text_config(decoder=True))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).to(device)


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a narrow config of the same family, with few layers and heads and windows of 16.

    Every type of layer is kept, and so is the kind of attention: as many key heads as query heads,
    fewer, or one.
    """
    values = config.to_dict()
    names = config.attribute_map  # names that differ in this family
    for key, most in _MOST.items():
        key = names.get(key, key)
        if isinstance(values.get(key), int):
            values[key] = min(values[key], most)

    layers = _layers_to_keep(config)
    values[names.get("num_hidden_layers", "num_hidden_layers")] = layers
    for key in _LAYER_LISTS:
        if isinstance(values.get(key), list):
            values[key] = values[key][:layers]

    if getattr(config, "num_attention_heads", None) is not None:
        _shrink_heads(config, values)
    # Special tokens may lie outside the smaller vocabulary.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[key] = None
    return type(config).from_dict(values)


def _shrink_heads(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    """Write the reduced heads, and the width that follows from them, into a tiny config."""
    names = config.attribute_map
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    tiny_kv_heads = min(kv_heads, _KV_HEADS)
    tiny_heads = tiny_kv_heads * min(heads // kv_heads, _HEADS_PER_KV)
    values[names.get("num_attention_heads", "num_attention_heads")] = tiny_heads
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = tiny_kv_heads
    width = tiny_heads * head_dim
    values[names.get("hidden_size", "hidden_size")] = width
    if "mamba_n_heads" in values:  # as many as fit into the width
        inner = width * values["mamba_expand"]
        values["mamba_n_heads"] = inner // values["mamba_d_head"]


def random_documents(config: PreTrainedConfig, tokens: int, documents: int) -> list[list[int]]:
    """Return documents of various lengths, including 1 and 2; equal arguments give equal documents.

    Raises:
        ValueError: there are too few tokens or documents.
    """
    lengths = _lengths(tokens, documents)
    config = config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size - 1, (tokens,), generator=generator)
    pad = config.pad_token_id
    if pad is not None:
        ids += ids >= pad  # skip the pad token, whose embedding may have no gradient
    return [part.tolist() for part in ids.split(lengths)]


def _lengths(tokens: int, documents: int) -> list[int]:
    if documents < 4:
        raise ValueError(f"--documents must be at least 4, got {documents}")
    if tokens < 4 * documents:
        raise ValueError(
            f"--tokens must be at least 4 for each of {documents} documents, got {tokens}"
        )
    count, left = documents - 2, tokens - 3
    parts = count * (count + 1) // 2
    rest = [1 + (left - count) * (i + 1) // parts for i in range(count)]
    rest[-1] += left - sum(rest)
    # Put the short documents between others, and the longest neither first nor last.
    return [rest[0], 1, rest[-1], 2, *rest[1:-1]]


def _is_config_alone(folder: Path) -> bool:
    weights = ("*.safetensors", "*.bin")
    has_config = (folder / "config.json").is_file()
    return has_config and not any(any(folder.glob(pattern)) for pattern in weights)


def _layers_to_keep(config: PreTrainedConfig) -> int:
    """Return the number of layers that includes every type of layer."""
    keep = _LAYERS
    for key in _LAYER_LISTS:
        types = getattr(config, key, None)
        if isinstance(types, (list, tuple)):
            keep = max(keep, *(types.index(kind) + 1 for kind in set(types)))
    return min(config.num_hidden_layers, keep)


def quiet() -> None:
    """Silence transformers' progress bars and advice."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
