"""Models and documents for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from cuseq.debug.packing_check._documents import tokens_of_inputs
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
        ValueError: it is not a language model, with or without images, or does not support this
            attention.
    """
    if attention == "cuseq":
        register()
    options: dict[str, Any] = dict(attn_implementation=attention, dtype=dtype)
    config = AutoConfig.from_pretrained(name)
    if not tiny and not _is_config_alone(Path(name)):
        return _auto_class(config).from_pretrained(name, **options).to(device)
    config = _tiny_model_config(config)
    torch.manual_seed(0)
    return _auto_class(config).from_config(config, **options).to(device)


def _auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes a model of this config: of text, or of images."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[0])


def _tiny_model_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a tiny config of the text part or, if that is not a model by itself, of the whole."""
    text = config.get_text_config(decoder=True)
    small = tiny_config(text)
    if type(text) in AutoModelForCausalLM._model_mapping or text is config:
        return small
    for name in config.sub_configs:
        part = getattr(config, name)
        if part is text:
            setattr(config, name, small)
            continue
        for key in ("depth", "num_hidden_layers"):
            if hasattr(part, key):
                setattr(part, key, min(getattr(part, key), _LAYERS))
        if hasattr(part, "out_hidden_size"):  # the width of the text part
            part.out_hidden_size = small.hidden_size
    return config


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
    text = config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    # The pad token's embedding may have no gradient, and a token of an image needs the image.
    left_out = tokens_of_inputs(config) | {text.pad_token_id}
    known = torch.tensor([token for token in range(text.vocab_size) if token not in left_out])
    ids = known[torch.randint(0, len(known), (tokens,), generator=generator)]
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
