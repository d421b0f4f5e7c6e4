"""Load a random Qwen3 as the real unsloth does: import, checkpoint, LoRA, packed rows."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import QWEN3

if TYPE_CHECKING:
    import torch

# torch is imported inside the functions: unsloth must be imported first, and xformers' runtime
# library before it.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # By default it writes its compiled modules into the current folder.
    "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"),
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES = {
    "tiny": dict(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False,
    ),
    **QWEN3,
}  # fmt: skip


def import_unsloth(peers: Path, xformers: bool) -> None:
    """Import unsloth before torch and transformers, as its users do.

    Args:
        peers: the folder with its packages, which must be on the path already.
        xformers: make xformers loadable. PyPI's xformers is built for CUDA 12; with a torch for
            CUDA 13 it needs the runtime library in the folder. Without it, unsloth reports that it
            cannot load xformers and uses PyTorch's attention.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if xformers:
        ctypes.CDLL(str(next((peers / "_cudart12").rglob("libcudart.so.12"))))
    import unsloth  # noqa: F401


def write_checkpoint(
    folder: Path, shape: dict[str, Any], four_bit: bool, device: torch.device
) -> None:
    """Write a random checkpoint: bf16 or nf4 weights, a file per layer, a word-level tokenizer.

    Writes nothing if the folder already has a config, which is written last.

    Args:
        folder: folder to create.
        shape: fields of Qwen3's config.
        four_bit: quantise the projections as bitsandbytes does with nested statistics, so that
            loading does not read them in 16 bits.
        device: where the weights are drawn.
    """
    if (folder / "config.json").exists():
        return
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    for number, shapes in enumerate(_shards(shape)):
        shard: dict[str, torch.Tensor] = {}
        for name, size in shapes.items():
            weight = _random_weight(size, draw, device)
            quantised = four_bit and name.split(".")[-2] in PROJECTIONS
            shard |= _quantised(name, weight) if quantised else {name: weight.cpu()}
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    _write_tokenizer(folder)
    _write_json(folder / "config.json", _config(shape, four_bit))


def load_model(
    folder: Path,
    four_bit: bool,
    max_tokens: int,
    checkpointing: str | bool = "unsloth",
    **placement: Any,
) -> torch.nn.Module:
    """Load the checkpoint with LoRA on all seven projections, ready to train.

    Both matrices of each adapter are random, equal in every process: with B at its initial zero, A
    would have no gradient to compare.
    """
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=max_tokens,
        dtype=torch.bfloat16,
        load_in_4bit=four_bit,
        local_files_only=True,
        use_gradient_checkpointing=checkpointing,
        **placement,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=PROJECTIONS,
        use_gradient_checkpointing=checkpointing,
        random_state=3407,
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapters(model):
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.01)
    return model.train()


def adapters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the decoder layers of a model with LoRA."""
    return model.get_base_model().model.layers


def packed_row(lengths: list[int], vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a packed row on the host, as unsloth's collator makes it for these lengths.

    Returns:
        `input_ids`, `labels`, `position_ids` int64 `[1, sum(lengths)]`, the label of each
        document's first token -100; `packed_seq_lengths` int32 `[documents]`. No mask.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "packed_seq_lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def _shards(shape: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and shapes of a Qwen3's weights: those of each layer, then the rest."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for number in range(shape["num_hidden_layers"]):
        yield {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    rest: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape["tie_word_embeddings"]:
        rest["lm_head.weight"] = (shape["vocab_size"], hidden)
    yield rest


def _random_weight(
    size: tuple[int, ...], draw: torch.Generator, device: torch.device
) -> torch.Tensor:
    import torch

    weight = torch.ones(size, dtype=torch.bfloat16, device=device)
    # A norm's weight has one dimension and starts at one.
    return weight if len(size) == 1 else weight.normal_(0, 0.02, generator=draw)


def _quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    data, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    parts = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {key: value.cpu() for key, value in ({name: data} | parts).items()}


def _config(shape: dict[str, Any], four_bit: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        **shape,
    }
    if four_bit:
        config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    return config


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|endoftext|>", "<|pad|>", "<|unk|>", *(f"w{i}" for i in range(1000))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        model_max_length=40_960,
    ).save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
