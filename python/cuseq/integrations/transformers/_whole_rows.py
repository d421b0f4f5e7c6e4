"""What a model computes over a whole row, made right for rows of several documents and padding.

- The balance loss of a mixture of experts is a mean over the tokens of a row. transformers leaves
  out padding by the mask of a padded batch, which a packed row does not have.
- NEFTune scales its noise by the length of a row. Here that is the length of a document.
- Padding (the tail, and padding between sequences) is in no loss. But if a model has an infinite
  derivative there, the gradient is infinity times zero, NaN: Gemma 3n takes the square root of a
  token's mean square, and a padding token whose embedding is zero stays zero, since attention adds
  nothing to it. So a real token stands in the place of each padding token.

Hooks on the text model and on the models around it read the layout in the keywords of their calls.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations import neftune

from cuseq._base.models import text_config
from cuseq.distributed._groups import name_or_default
from cuseq.integrations.transformers._functions import (
    original_function,
    replace_function,
)
from cuseq.integrations.transformers._layers import code_of
from cuseq.integrations.transformers._private import forward_hooks
from cuseq.integrations.transformers.documents import names_of_call
from cuseq.integrations.transformers.hybrids.boundaries import lent_to
from cuseq.integrations.transformers.masks import LayoutMask
from cuseq.layout import PackedLayout, Part, check_documents

_ops = torch.ops.cuseq

_Function = Callable[..., Any]
_Place = tuple[ModuleType, str]  # a module and the name of a function that it looks up

_BALANCE = "load_balancing_loss_func"
_NOISE = "neftune_post_forward_hook"
_ALPHA = "neftune_noise_alpha"  # on embeddings that NEFTune adds noise to
_LAYOUT = "_cuseq_layout"  # on such embeddings while their model runs


def hook_models(models: list[PreTrainedModel]) -> list[RemovableHandle]:
    """Hook the models around the layers of a model: it, and those inside it."""
    hooks = []
    for model in models:
        names = names_of_call(model)
        tag = functools.partial(_tag_logits, names)
        hooks += [
            model.register_forward_hook(tag, with_kwargs=True),
            model.register_forward_pre_hook(_lend_layout, with_kwargs=True),
            model.register_forward_hook(_take_back_layout, always_call=True),
        ]
    # The innermost alone: the ids of others may hold placeholders of images, and a hook on a model
    # that is compiled is compiled apart from it.
    if models and text_config(models[-1]) is models[-1].config:
        fill = functools.partial(_fill_padding, names_of_call(models[-1]))
        hooks.append(models[-1].register_forward_pre_hook(fill, with_kwargs=True))
    return hooks


def replace_functions(base: PreTrainedModel) -> list[_Place]:
    """Replace the functions of transformers that compute over whole rows; return where they are.

    `_functions.restore_function` undoes each.
    """
    places = _balance_places(base)
    for code, name in places:
        replace_function(code, name, _balance_of_documents)
    replace_function(neftune, _NOISE, _noise_of_documents)
    hooks = forward_hooks(base.get_input_embeddings())
    for number, hook in hooks.items():  # NEFTune may be on already
        if hook is original_function(neftune, _NOISE):
            hooks[number] = getattr(neftune, _NOISE)
    return [*places, (neftune, _NOISE)]


# ------------------------------------------------------------------------------------------ padding


def _layout_of(told: dict[str, Any]) -> PackedLayout | None:
    """Return the layout that a call gives as `packed`, or in the place of its mask."""
    mask = told.get("attention_mask")
    packed = mask.lengths.get("packed") if isinstance(mask, LayoutMask) else told.get("packed")
    return packed if isinstance(packed, PackedLayout) else None


def _padding_of(told: dict[str, Any]) -> Tensor | None:
    """Return bool `[total_tokens]`, True on padding; None if the host knows that there is none.

    It waits at most for the event that attention waits for.
    """
    packed, rows = _layout_of(told), told.get("input_ids", told.get("inputs_embeds"))
    compiling = torch.compiler.is_compiling()
    if rows is None:
        return None
    if packed is not None:
        if compiling:  # an int of the layout would be a constant of the compiled code
            return _tokens_of(packed.to(rows.device))[1]
        if not packed.is_replayed and packed.num_real_tokens == packed.total_tokens:
            return None
        return packed.to(rows.device).moe_padding_mask
    offsets, total_tokens = told.get("cu_seq_lens_q"), rows.shape[0] * rows.shape[1]
    if offsets is None or offsets.numel() < 2:  # attention refuses too few
        return None
    if offsets.device.type == "cpu" and not compiling and int(offsets[-1]) == total_tokens:
        return None
    return torch.arange(total_tokens, device=rows.device) >= offsets[-1].to(rows.device)


def _tokens_of(packed: PackedLayout) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and whether it is padding, in compiled code and captures too."""
    padded = packed.segments.cu_seqlens_static if packed.pads_between_sequences else None
    _, sequences, is_pad = _ops.token_metadata(
        packed.cu_seqlens_static, packed.total_tokens, padded
    )
    return sequences, is_pad


def _fill_padding(
    names: tuple[str, ...], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put a real token in the place of each padding token, whatever the caller left there."""
    given = dict(zip(names, args, strict=False)) | kwargs
    told = _without_none(lent_to(model) | given)
    name = "input_ids" if "input_ids" in told else "inputs_embeds"
    pad = _padding_of(told) if name in told else None
    if pad is None:
        return None
    rows = told[name]
    if pad.numel() != rows.shape[0] * rows.shape[1]:
        return None  # refused by `check_input` and by attention
    pad = pad.view(rows.shape[:2])
    if name == "input_ids":
        real = rows.masked_fill(pad, 1).max()  # 1 for a rank that holds no real token
    else:
        first = (~pad).flatten().int().argmax()
        real = rows.detach().flatten(0, 1).index_select(0, first[None])
        pad = pad.unsqueeze(-1)
    return (), given | {name: torch.where(pad, real, rows)}


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


# ----------------------------------------------------------------------------------- balance losses


class RouterLogits(tuple):
    """The logits that a model's routers gave for a packed row, and what is known of the row.

    Attributes:
        padding: bool `[total_tokens]`, True on padding; None if there is none.
        part: What the layout holds if the row is a rank's part of one, else None.
    """

    padding: Tensor | None = None
    part: Part | None = None


def _tag_logits(
    names: tuple[str, ...],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> Any:
    """Note what a call says of its row on the router logits that it returns."""
    logits = getattr(out, "router_logits", None)
    if type(logits) is not tuple or not logits:
        return None
    told = _without_none(dict(zip(names, args, strict=False)) | kwargs)
    padding, packed = _padding_of(told), _layout_of(told)
    part = None if packed is None else packed.part
    if padding is None and part is None:
        return None
    tagged = RouterLogits(logits)
    tagged.padding, tagged.part = padding, part
    out.router_logits = tagged
    return out


def _balance_places(base: PreTrainedModel) -> list[_Place]:
    """Return where the balance loss of a model is looked up when it runs."""
    if not hasattr(text_config(base), "output_router_logits"):
        return []
    forward = inspect.unwrap(type(base).forward)  # Liger gives classes forwards of its own
    trl = importlib.import_module("transformers.models.mixtral.modeling_mixtral")  # for all models
    codes = dict.fromkeys([code_of(base), sys.modules[forward.__module__], trl])
    return [(code, _BALANCE) for code in codes if _BALANCE in vars(code)]


def _balance_of_documents(original: _Function) -> _Function:
    """Return a balance loss that leaves out the padding of a packed row.

    For a rank's part of a row it is a part of the row's loss: the sum over the ranks is the loss.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def balance(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        logits = bound.arguments["gate_logits"]
        if not isinstance(logits, RouterLogits):
            return original(*args, **kwargs)
        if logits.part is not None:
            _check_parts(original)
            bound.apply_defaults()
            num_experts, top_k = bound.arguments["num_experts"], bound.arguments["top_k"]
            count = functools.partial(_sum_over_ranks, group=logits.part.group)
            return _balance_of_part(logits, num_experts, top_k, count)
        bound.arguments["attention_mask"] = (~logits.padding).long()[None]
        return original(*bound.args, **bound.kwargs)

    return balance


def _balance_of_part(
    logits: RouterLogits, num_experts: int, top_k: int, over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a rank's part of the balance loss of a row.

    The loss is `num_experts * sum_e(choices[e] * probability[e])`, means over tokens and layers.
    Only the probabilities have gradients, and they are sums over tokens. So a rank needs the
    choices of all ranks, and its own probabilities.
    """
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    real = torch.ones(logits[0].shape[0], dtype=torch.int64, device=device)
    if logits.padding is not None:
        real = real.masked_fill(logits.padding.to(device), 0)
    choices = real.new_zeros(num_experts + 1)  # the last counts tokens
    choices[-1] = real.sum() * len(logits)
    probability = torch.zeros(num_experts, dtype=dtype, device=device)
    for layer in logits:
        weights = layer.to(device).softmax(-1)
        experts = weights.topk(top_k, dim=-1).indices
        choices.scatter_add_(0, experts.flatten(), real.repeat_interleave(top_k))
        probability = probability + (weights.to(dtype) * real[:, None]).sum(0)
    choices = over_ranks(choices)
    tokens = choices[-1].clamp(min=1)
    return num_experts * torch.sum((choices[:-1] / tokens) * (probability / tokens))


def _sum_over_ranks(values: Tensor, group: str | None) -> Tensor:
    summed = torch.ops._c10d_functional.all_reduce(values, "sum", name_or_default(group))
    return torch.ops._c10d_functional.wait_tensor(summed)


def check_balance_loss(base: PreTrainedModel) -> None:
    """Raise ValueError unless ranks that share a row can add up a model's balance loss."""
    for code, name in _balance_places(base):
        _check_parts(original_function(code, name))


@functools.cache
def _check_parts(function: _Function) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = RouterLogits(torch.randn(6, 4, generator=generator) for _ in range(2))
    logits.padding = torch.tensor([False, False, True, False, True, False])
    ours = _balance_of_part(logits, 4, 2, lambda choices: choices)
    try:
        theirs = function(tuple(logits), 4, 2, (~logits.padding).long()[None])
    except (TypeError, ValueError, RuntimeError):
        theirs = ours + 1
    if not torch.allclose(ours, theirs):
        raise ValueError(
            "packed must describe a whole row for a model whose balance loss is not num_experts * "
            f"sum(choices * probabilities), got a rank's part and that of {function.__module__}: "
            "set output_router_logits=False"
        )


# ------------------------------------------------------------------------------------------ NEFTune


def _lend_layout(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Show the layout of a call to embeddings with noise."""
    packed, embeddings = _layout_of(kwargs), model.get_input_embeddings()
    # Some models do not hand `packed` on to the model inside them (Mamba 2).
    if packed is not None and model.training and hasattr(embeddings, _ALPHA):
        setattr(embeddings, _LAYOUT, packed)


def _take_back_layout(model: Any, args: tuple[Any, ...], output: Any) -> None:
    embeddings = model.get_input_embeddings()
    if hasattr(embeddings, _LAYOUT):
        delattr(embeddings, _LAYOUT)


def _noise_of_documents(original: _Function) -> _Function:
    """Return NEFTune's hook with noise that is scaled by the length of each document."""

    @functools.wraps(original)
    def add_noise(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        packed = getattr(module, _LAYOUT, None)
        if packed is None or not module.training:
            return original(module, args, output)
        check_documents(
            packed,
            "neftune_noise_alpha must be None unless a row holds whole documents, by whose "
            "lengths the noise is scaled",
        )
        sequences, is_pad = _tokens_of(packed.to(output.device))
        lengths = packed.to(output.device).cu_seqlens_static.diff()
        last = lengths.shape[0] - 1  # the tail's number may be one more
        sizes = lengths[sequences.clamp(max=last)] * output.shape[-1]
        scale = (module.neftune_noise_alpha / sizes.sqrt()).masked_fill(is_pad, 0)
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * scale.to(output.dtype).view(*output.shape[:-1], 1)

    return add_noise
