"""`enable` and `disable` for a model, a trainer or the unsloth module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from torch import nn

from cuseq._base.foreign import after_import
from cuseq.integrations._enabled import (
    DEFAULTS,
    Enabled,
    ModelOptions,
    Options,
    TrainerOptions,
    UnslothOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Trainer(Protocol):
    """A Trainer of transformers, to type checkers; a module's `train` takes something else."""

    data_collator: Any

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any: ...


@overload
def enable(x: nn.Module, **options: Unpack[ModelOptions]) -> Enabled: ...
@overload
def enable(x: ModuleType, **options: Unpack[UnslothOptions]) -> Enabled: ...
@overload
def enable(x: _Trainer, **options: Unpack[TrainerOptions]) -> Enabled: ...
def enable(x: Any, **options: Unpack[Options]) -> Enabled:
    """Make a model, a trainer or the unsloth module train on packed rows with cuseq.

    `x` is one of these:

    - A transformers model, or a module that contains one (peft's, before or after wrapping). The
      attention of its text part becomes `attn_implementation="cuseq"`. RoPE of query and key (and
      the per-head q/k norm, if any) becomes one kernel. Enable the model before its layers are
      compiled. The towers of a vision-language model run one attention call a layer, and read the
      grids of images once a step. Padded batches, generation and evaluation give the same numbers
      as before, but attention weights (`output_attentions=True`) are not available. In a hybrid
      model, layers with a state along the row (short convolutions, gated delta rules, Mamba) start
      each document anew; docs/hybrids.md lists the families. The balance loss of a mixture of
      experts leaves out the padding of a row, and NEFTune scales its noise by the length of each
      document. Liger's kernels work together with this if they were applied with Liger's option
      `rope=False`.
    - TRL's `SFTTrainer` with `packing=True` or `padding_free=True`, or with `collator`. Its model
      is enabled as above, and its data collator is replaced, so that each batch has the layout of
      its row. Call `enable` before `train()`.
    - TRL's `GRPOTrainer`, `RLOOTrainer`, `DPOTrainer`, `KTOTrainer` and `RewardTrainer`. Their
      models (policy and reference) are enabled as above, and the models' bodies run padded batches
      as packed rows, or as trees of what samples share. Losses, metrics and generation stay TRL's.
    - Another `Trainer` of transformers. Its model is enabled as above. It keeps its data collator,
      so construct it with a `cuseq.PackingCollator`.
    - The unsloth module, after its import. unsloth's functions for packed rows are replaced. Enable
      trainers that exist already afterwards, each by `enable(trainer)`.

    `attn_implementation="cuseq"` is registered with transformers while a model is enabled. A second
    call with the same options changes nothing and returns the same result. All checks come first:
    if an error is raised, nothing was replaced.

    Args:
        x: the model, the trainer or the module.
        rope: for a model or a trainer, default True: replace the rotation.
        qk_norm: for a model or a trainer, default True: run the norms of queries and keys in the
            rotation's kernel.
        backend: for a model or a trainer, default "auto": which backend computes the attention of
            packed rows, as in `cuseq.varlen_attention`, for this model alone.
        bin_pack: for an SFTTrainer, default False. True, or a strategy of `cuseq.data.bin_pack`,
            packs the training dataset again, all of it together and not a thousand examples at a
            time. Evaluation keeps its rows. Documents longer than `capacity` are split with
            `packing_strategy="bfd_split"`, and otherwise truncated.
        capacity: the maximum number of tokens in a row. For an SFTTrainer with `bin_pack`, default
            the trainer's `max_length`. For a Trainer with a packing collator, default None: the
            `per_device_train_batch_size` examples that it drew are a row. Given, each training
            batch is a row of a `cuseq.data.PackedBatchSampler`: full, shuffled by (seed, epoch),
            balanced by attention over the ranks, as many on each; evaluation stays as it is. A
            column `length` (`length_column_name`) of the dataset saves counting tokens.
        cp: for a Trainer or an SFTTrainer, default None: this rank's
            `cuseq.distributed.ContextParallel`. Its ranks share each packed row; losses, evaluation
            and the sampling of rows are made right for that (docs/trainer.md). A Trainer must have
            a `cuseq.PackingCollator` or a `cuseq.data.MultimodalPackingCollator`, or get one as
            `collator`; an SFTTrainer is made with `packing=False`, and without `collator`
            `bin_pack` is then True.
        graph: for a Trainer or an SFTTrainer, default False: run each training step as a
            `cuseq.GraphedStep`, with clipping and the optimizer. Rows must have one shape; an
            SFTTrainer's get it. docs/cuda_graphs.md says what is refused. If the steps cannot be
            captured, a UserWarning says why, and plain steps give the same numbers. With `cp` for a
            Trainer whose rows have no images.
        collator: for a Trainer or an SFTTrainer, default None: a `cuseq.PackingCollator` or a
            `cuseq.data.MultimodalPackingCollator` in the place of the trainer's own. An SFTTrainer
            is then made with `packing=False` and `max_length=None`, and its dataset has what a
            processor made of each document. Not with `graph`.
        tree: for TRL's trainers that pad, default None: whether samples of a batch share the
            computation of equal prefixes. None: in GRPO and RLOO, unless the model has layers with
            a state or sliding windows.
        micro_batch_tokens: for a GRPOTrainer or an RLOOTrainer, default None: compute each batch of
            `per_device_train_batch_size` samples in pieces of at most so many tokens, groups
            together, each backward before the next forward; a longer sample is a piece of its own.
            Loss, gradients and what TRL logs are those of the batch. Ranks compute equally many
            pieces, as many as the rank with the most tokens needs. The loss must be a sum
            over samples or tokens (docs/trl.md).
        compile_blocks: for unsloth, default False: let the compiled decoder blocks of unsloth's own
            classes take packed rows, with one graph for all packs.

    Returns:
        An `Enabled` with `kind`, `replaced`, `left_alone` (with reasons) and `warnings`.

    Raises:
        TypeError: `x` is none of these, or an option does not apply to it.
        ValueError: `x` is already enabled with other options, or has a part that cuseq cannot
            replace exactly; or the backend is unknown or not installed; or the trainer has an
            option that would be wrong with `cp` or `graph`; the message names it.

    Warns:
        UserWarning: the model has recurrent layers that cuseq does not know, through which the
            documents of a packed row leak into each other (`warnings` has the same text, which
            starts with "LEAKS").

    Synchronises: it compares outputs of the model's layers with those of the kernels on a small
    input.

    Examples:
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
    for name in options:
        if name not in entry.options:
            takes = " and ".join(sorted(entry.options)) or "no options"
            raise TypeError(f"enable of {entry.what} takes {takes}, got {name}")
    defaults = {name: value for name, value in DEFAULTS.items() if name in entry.options}
    return entry.enable(x, **defaults | options)


def disable(x: Any) -> None:
    """Restore what `enable` replaced in a model, a trainer or the unsloth module.

    Pass the object that was given to `enable`. An object that was never enabled stays unchanged and
    raises no error. A model that is garbage-collected needs no `disable`.

    Raises:
        TypeError: `x` is not of a kind that `enable` takes.
        ValueError: `x` is a part of an enabled model.

    Examples:
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
    options: frozenset[str]
    enable: Callable[..., Enabled]  # it takes all of these options by name
    disable: Callable[[Any], None]


def _entry_of(x: Any) -> _Entry:
    """Return the functions for `x`, importing only the framework that `x` comes from."""
    if isinstance(x, nn.Module):
        from cuseq.integrations.transformers import _enable as model

        names = ModelOptions.__optional_keys__
        return _Entry("a model", names, model.enable_model, model.disable_model)
    if isinstance(x, ModuleType) and x.__name__ == "unsloth":
        from cuseq.integrations.unsloth import _enable as unsloth

        names = UnslothOptions.__optional_keys__
        return _Entry("unsloth", names, unsloth.enable_module, unsloth.disable_module)
    if "unsloth" in sys.modules:
        from cuseq.integrations.unsloth import _enable as unsloth

        if unsloth.is_packing_trainer(x):
            what = f"unsloth's {type(x).__name__}"
            return _Entry(what, frozenset(), unsloth.enable_trainer, unsloth.disable_trainer)
    what, names = f"a {type(x).__name__}", TrainerOptions.__optional_keys__
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(x).__mro__):
        from cuseq.integrations.trl import _enable as trl

        return _Entry(what, names, trl.enable_trainer, trl.disable_trainer)
    trainers = sys.modules.get("transformers.trainer")
    if trainers is not None and isinstance(x, trainers.Trainer):
        from cuseq.integrations.transformers import _trainer as trainer

        return _Entry(what, names, trainer.enable_trainer, trainer.disable_trainer)
    raise TypeError(
        "x must be a transformers model, a Trainer of transformers or of TRL, or the "
        f"unsloth module, got {type(x).__name__}"
    )


def _name_the_call(modeling: ModuleType) -> None:
    """Let transformers' error for an implementation "cuseq" that it does not know name the call."""
    # Its other releases lack the method, and a module that it imports may import cuseq.
    model = getattr(modeling, "PreTrainedModel", None)
    choose = getattr(model, "get_correct_attn_implementation", None)
    registry = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if choose is None or not hasattr(registry, "valid_keys"):
        return

    @functools.wraps(choose)
    def named(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == "cuseq" and "cuseq" not in registry.valid_keys():
            raise ValueError(
                'attn_implementation="cuseq" needs cuseq.integrations.transformers.register() '
                "before it; or make the model without it, and call cuseq.enable(model)"
            )
        return choose(self, requested_attention, *args, **kwargs)

    modeling.PreTrainedModel.get_correct_attn_implementation = named


after_import("transformers.modeling_utils", _name_the_call)
