"""The front door: `enable` and `disable` for a model, a trainer or the unsloth module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from cuseq.integrations._enabled import Enabled


def enable(x: Any, **options: Any) -> Enabled:
    """Let a model, a trainer or the unsloth module train on packed rows with cuseq.

    - A transformers model, or a module that holds one (peft's, before or after wrapping): its
      attention becomes `attn_implementation="cuseq"` in the text part, its rotation one kernel for
      query and key, which also takes in the norms of queries and keys where they are over each
      head. Enable it before its layers are compiled. Batches that are not packed, generation and
      evaluation give the numbers they gave, but no attention weights (`output_attentions=True`).
      Liger's kernels work beside it if they were applied with Liger's own `rope=False`.
    - TRL's `SFTTrainer` with `packing=True` or `padding_free=True`: its model as above, and its
      data collator, so that each batch carries the layout of its row. Call it before `train()`.
    - Another `Trainer` of transformers: its model as above. It keeps its data collator; give it a
      `cuseq.PackingCollator` when it is made.
    - The unsloth module, after it was imported: unsloth's functions for packed rows. Trainers that
      exist already are enabled afterwards, each by `enable(trainer)`.

    `attn_implementation="cuseq"` is registered with transformers while a model is enabled. Calling
    `enable` again with the same options changes nothing and returns the same result. Everything is
    checked first: where an error is raised, nothing was replaced.

    Args:
        x: the model, the trainer or the module.
        rope: of a model or a trainer, default True: replace the rotation.
        qk_norm: of a model or a trainer, default True: run the norms of queries and keys in the
            rotation's kernel.
        bin_pack: of an SFTTrainer, default False: True, or a strategy of `cuseq.data.bin_pack`,
            packs the training dataset again, over the whole of it instead of a thousand examples at
            a time. Evaluation keeps its rows. Documents longer than `capacity` are split with
            `packing_strategy="bfd_split"`, else truncated.
        capacity: of an SFTTrainer with `bin_pack`: the most tokens in such a row, default the
            trainer's `max_length`.
        compile_blocks: of unsloth, default False: let the compiled decoder blocks of unsloth's own
            classes take packed rows, with one graph for all packs.

    Returns:
        What was replaced, what was left alone and why, and warnings: an `Enabled` with `kind`,
        `replaced`, `left_alone` and `warnings`.

    Raises:
        TypeError: `x` is none of these, or an option is not one of its kind's.
        ValueError: `x` is enabled with other options, or holds something that cuseq cannot replace
            exactly; the message names it.

    Warns:
        UserWarning: the model has recurrent layers, through which the documents of a packed row
            leak (`warnings` has the same text, which starts with "LEAKS").

    It waits for the GPU, to compare a few numbers of the model's layers with the kernels'.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
        ...                      num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> cuseq.enable(model).replaced
        ('attention:LlamaAttention', 'rope:transformers.models.llama.modeling_llama')
        >>> batch = cuseq.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> model(**batch).loss.backward()
        >>> cuseq.disable(model)
    """
    entry = _entry_of(x)
    known = inspect.signature(entry.enable).parameters.values()
    names = sorted(p.name for p in known if p.kind is p.KEYWORD_ONLY)
    for name in options:
        if name not in names:
            takes = " and ".join(names) or "no options"
            raise TypeError(f"enable of {entry.what} takes {takes}, got {name}")
    return entry.enable(x, **options)


def disable(x: Any) -> None:
    """Put back what `enable` replaced in a model, a trainer or the unsloth module.

    The same object must be given: what was never enabled stays as it is, without an error. A model
    that is garbage-collected needs no `disable`.

    Raises:
        TypeError: `x` is not of a kind that `enable` takes.
        ValueError: `x` is a part or a copy of an enabled model.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
        ...                      num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> enabled = cuseq.enable(model)
        >>> cuseq.disable(model)
        >>> model.config._attn_implementation
        'sdpa'
    """
    _entry_of(x).disable(x)


class _Entry(NamedTuple):
    what: str
    enable: Callable[..., Enabled]
    disable: Callable[[Any], None]


def _entry_of(x: Any) -> _Entry:
    """Return the functions for `x`; no framework is imported that `x` is not from."""
    if isinstance(x, nn.Module):
        from cuseq.integrations.transformers import _enable as model

        return _Entry("a model", model.enable_model, model.disable_model)
    if isinstance(x, ModuleType) and x.__name__ == "unsloth":
        from cuseq.integrations.unsloth import _enable as unsloth

        return _Entry("unsloth", unsloth.enable_module, unsloth.disable_module)
    if "unsloth" in sys.modules:
        from cuseq.integrations.unsloth import _enable as unsloth

        if unsloth.is_packing_trainer(x):
            what = f"unsloth's {type(x).__name__}"
            return _Entry(what, unsloth.enable_trainer, unsloth.disable_trainer)
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(x).__mro__):
        from cuseq.integrations import trl

        return _Entry(f"a {type(x).__name__}", trl.enable_trainer, trl.disable_trainer)
    trainers = sys.modules.get("transformers.trainer")
    if trainers is not None and isinstance(x, trainers.Trainer):
        from cuseq.integrations.transformers import _trainer as trainer

        return _Entry(f"a {type(x).__name__}", trainer.enable_trainer, trainer.disable_trainer)
    raise TypeError(
        "x must be a transformers model, a Trainer of transformers or TRL's SFTTrainer, or the "
        f"unsloth module, got {type(x).__name__}"
    )
