"""The model to train: a small Qwen3, or a transformers config, folder or name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _documents import UserError
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.utils import cached_file

import cuseq

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
        checkpoint: folder or Hub name of the initial weights; None starts from random weights.
    """

    config: PretrainedConfig
    checkpoint: str | None = None

    def build(
        self, device: torch.device, seed: int, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        """Return a model in training mode; equal for equal seeds.

        Args:
            device: where the model lies.
            seed: seed of random weights.
            dtype: of the weights; None takes bf16 on CUDA, else fp32.

        Raises:
            UserError: transformers has no such causal language model, or not with sdpa.
        """
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        options: dict[str, Any] = dict(attn_implementation="sdpa", dtype=dtype)
        torch.manual_seed(seed)
        try:
            if self.checkpoint is not None:
                model = AutoModelForCausalLM.from_pretrained(self.checkpoint, **options)
            else:
                # Drawing 600 million weights on the host would take longer than training.
                with device:
                    model = AutoModelForCausalLM.from_config(self.config, **options)
        except ValueError as error:
            reason = str(error).partition(". ")[0]
            raise UserError(f"--model must be a causal LM with sdpa attention: {reason}") from error
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


def find_model(model: str) -> ModelSource:
    """Return the model of a config file, a folder with a config.json or a name on the Hub.

    A folder and a name bring their weights if they have any. A name has one slash and is not a
    folder.

    Raises:
        UserError: there is no such model.
    """
    path = Path(model)
    if path.is_file():
        return ModelSource(_config(model))
    if _is_name(model):
        return ModelSource(_config(model), model)
    if not (path / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json there")
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    return ModelSource(_config(model), model if has_weights else None)


def enable(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Let cuseq replace attention and rotation; return what it replaced, and its warnings.

    Raises:
        UserError: cuseq cannot compute this model, or not while it trains.
    """
    try:
        enabled = cuseq.enable(model)
    except ValueError as error:
        raise UserError(f"--model must be one that cuseq can compute: {error}") from error
    for warning in enabled.warnings:
        if warning.startswith("DROPOUT"):  # else the first step would raise
            raise UserError(f"--model must keep all attention weights, got {warning}")
    return list(enabled.replaced), list(enabled.warnings)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers, which are compiled one by one and sharded in units.

    Raises:
        UserError: the decoder keeps them under another name than Llama and GPT-2.
    """
    decoder = model.get_decoder()
    for name in ("layers", "h"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise UserError(
        "--model must have a decoder with a list of layers named `layers` or `h`, got "
        f"{type(decoder).__name__}"
    )


def compile_layers_and_loss(model: PreTrainedModel) -> None:
    """Compile each decoder layer, and the loss, whose logits in fp32 are then never stored.

    Batches must have one shape. Hooks, in which FSDP2 gathers weights, stay outside.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    model.loss_function = torch.compile(model.loss_function, dynamic=False)


def _is_name(model: str) -> bool:
    return model.count("/") == 1 and all(model.split("/")) and not Path(model).exists()


def _config(model: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {model}: transformers finds no config ({reason})") from error


def find_tokenizer(model: str) -> Tokenizer | None:
    """Return the tokenizer of a model's folder or name; None if there is none."""
    if not _is_name(model):
        file = Path(model) / "tokenizer.json"
        return Tokenizer.from_file(str(file)) if file.is_file() else None
    try:
        found = cached_file(model, "tokenizer.json")
    except OSError:  # the repository has no such file
        return None
    return None if found is None else Tokenizer.from_file(found)


def check_fit(source: ModelSource, documents: list[list[int]], row_length: int) -> None:
    """Check that the model accepts these token ids and rows.

    Raises:
        UserError: the model is too small for them.
    """
    config = source.config.get_text_config()
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
