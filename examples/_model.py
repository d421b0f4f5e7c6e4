"""The model to train: a small Qwen3, or a local checkpoint or config folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _documents import UserError
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

SMALL: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
# Shape of Qwen3-0.6B; the vocabulary is as large as the tokenizer's.
LARGE: dict[str, Any] = dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)


@dataclass(frozen=True)
class ModelSource:
    """Builds the same model again for every mode.

    Attributes:
        config: the model's configuration.
        checkpoint: folder with initial weights; None starts from random weights.
    """

    config: PretrainedConfig
    checkpoint: Path | None = None

    def build(self, device: torch.device, seed: int) -> PreTrainedModel:
        """Return a model in training mode, bf16 on CUDA, else fp32; equal for equal seeds."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        options: dict[str, Any] = dict(attn_implementation="sdpa", dtype=dtype)
        torch.manual_seed(seed)
        if self.checkpoint is not None:
            model = AutoModelForCausalLM.from_pretrained(
                self.checkpoint, local_files_only=True, **options
            )
        else:
            with device:  # drawing 600 million weights on the host would take longer than training
                model = AutoModelForCausalLM.from_config(self.config, **options)
        return model.to(device).train()


def qwen3(vocab_size: int, row_length: int, device: torch.device) -> ModelSource:
    """Return a Qwen3 of a size that suits the device."""
    shape = LARGE if device.type == "cuda" else SMALL
    config = Qwen3Config(
        vocab_size=vocab_size,
        max_position_embeddings=row_length,
        tie_word_embeddings=True,
        **shape,
    )
    return ModelSource(config)


def local_model(folder: Path) -> ModelSource:
    """Return the model of a folder with a config.json, with its weights if the folder has them.

    Raises:
        UserError: there is no config.json.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: no config.json there")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return ModelSource(config, folder if has_weights else None)


def local_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint folder; None if there is none."""
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def check_fit(source: ModelSource, documents: list[list[int]], row_length: int) -> None:
    """Check that the model accepts these token ids and rows.

    Raises:
        UserError: the model is too small for them.
    """
    config = source.config
    largest = max(max(document, default=0) for document in documents)
    if largest >= config.vocab_size:
        raise UserError(
            f"the model has a vocabulary of {config.vocab_size}, the tokens reach id {largest}"
        )
    if row_length > config.max_position_embeddings:
        raise UserError(
            f"--row-length must be at most the model's {config.max_position_embeddings} "
            f"positions, got {row_length}"
        )
