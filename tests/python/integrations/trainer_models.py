"""The small model, the documents and the settings of the tests of trainers."""

from __future__ import annotations

import torch
import transformers
from torch import nn

# Arguments of a short run that tells what each step learned.
SETTINGS = dict(
    per_device_train_batch_size=3,
    per_device_eval_batch_size=1,
    optim="sgd",  # Adam would turn a gradient that is only rounding into a full step
    learning_rate=0.3,
    lr_scheduler_type="constant",
    logging_steps=1,
    eval_strategy="steps",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
# What differs in a run that saves a checkpoint to go on from: Adam's moments and a random order.
SAVING = dict(
    max_steps=6,
    save_strategy="steps",
    save_steps=4,
    optim="adamw_torch",
    learning_rate=1e-2,
    train_sampling_strategy="random",
)


def small_model(
    config: type[transformers.PreTrainedConfig],
    *,
    dtype: torch.dtype,
    attention: str = "sdpa",
    **options: object,
) -> nn.Module:
    """Return a model of two layers with the same random weights in every call.

    Args:
        config: a class of configurations with Llama's arguments.
        dtype: dtype in which the weights are drawn; another one gives other numbers.
        attention: the model's `attn_implementation`.
        options: more arguments of the configuration.
    """
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    made = config(**sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation=attention, dtype=dtype
    )


def documents(count: int, seed: int, longest: int = 24) -> list[dict[str, list[int]]]:
    """Return documents with prompts of any length, so that no two rows have as many labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        ids = torch.randint(2, 64, (length,), generator=generator).tolist()
        prompt = int(torch.randint(0, length, (1,), generator=generator))
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made
