"""Registering `attn_implementation="cuseq"` in the process, and taking it back.

It takes two registrations and two patches of transformers, all undone together: the attention and
mask functions, a check of the models that ask for this implementation, and a wrapper that keeps
transformers' own search for packed position ids from running. `register` keeps them until
`unregister`; each enabled model holds them until it is disabled or garbage-collected.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from cuseq.integrations._foreign import UnknownRelease
from cuseq.integrations.transformers._private import (
    MASK_PREPARATION,
    attention_of,
    check_mask_preparation,
    check_names,
    registered_functions,
    supports_sdpa,
)
from cuseq.integrations.transformers._warn import warn
from cuseq.integrations.transformers.attention import cuseq_attention
from cuseq.integrations.transformers.masks import DeferredMask, cuseq_mask, withhold
from cuseq.integrations.transformers.names import NAME

_TABLE = "_ATTENTION_CLASSES"  # how models name their own choice of attentions

# Reentrant: garbage collection may release a model's hold in the middle of these functions.
_lock = threading.RLock()
_registered_directly = False
_holds = 0
_undo: contextlib.ExitStack | None = None


def register() -> None:
    """Register `attn_implementation="cuseq"` with transformers, for models that name it themselves.

    `cuseq.enable(model)` needs no call of this: it registers while a model is enabled. Calling
    `register` again changes nothing; one `unregister` takes it back.

    Raises:
        UnknownRelease: a private name of transformers that this needs is missing; nothing is
            registered then.

    Warns:
        UserWarning: transformers prepares masks in a way that cuseq does not know. Everything else
            works, with one synchronisation a forward.

    Example:
        >>> import cuseq.integrations.transformers
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> cuseq.integrations.transformers.register()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
        ...                      num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="cuseq")
        >>> batch = cuseq.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> model(**batch).loss.backward()
    """
    global _registered_directly
    with _lock:
        _install()
        _registered_directly = True


def unregister() -> None:
    """Take `register` back and restore transformers' own functions.

    While models are enabled the registration stays, until the last of them is disabled. A model
    that was made with `attn_implementation="cuseq"` cannot run afterwards: give it another by
    `model.set_attn_implementation`. Without a `register` before, nothing happens.
    """
    global _registered_directly
    with _lock:
        _registered_directly = False
        _uninstall_if_unused()


def hold_registration() -> None:
    """Register for one user more; raises and warns as `register`."""
    global _holds
    with _lock:
        _install()
        _holds += 1


def release_registration() -> None:
    """Give back what `hold_registration` took, once for each call of it."""
    global _holds
    with _lock:
        _holds -= 1
        _uninstall_if_unused()


def _install() -> None:
    global _undo
    if _undo is not None:
        return
    check_names()
    with contextlib.ExitStack() as undo:  # so that a failure half-way leaves nothing behind
        _register_function(undo, AttentionInterface, cuseq_attention)
        _register_function(undo, AttentionMaskInterface, cuseq_mask)
        _patch(
            undo,
            transformers.PreTrainedModel,
            "get_correct_attn_implementation",
            _refusing_other_models,
        )
        _withhold_position_ids(undo)
        _undo = undo.pop_all()


def _uninstall_if_unused() -> None:
    global _undo
    if _undo is not None and not _registered_directly and _holds == 0:
        undo, _undo = _undo, None
        undo.close()


def _register_function(
    undo: contextlib.ExitStack, interface: type, function: Callable[..., Any]
) -> None:
    functions = registered_functions(interface)
    interface.register(NAME, function)
    undo.callback(functions.pop, NAME, None)


def _patch(
    undo: contextlib.ExitStack,
    owner: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace a function of transformers by a wrapper, until `undo` is closed.

    Somebody who wraps it meanwhile keeps our wrapper inside theirs; it only calls the original
    from then on.
    """
    original = getattr(owner, name)
    wrapped, active = wrap(original), True

    @functools.wraps(original)
    def patched(*args, **kwargs):
        return (wrapped if active else original)(*args, **kwargs)

    def restore() -> None:
        nonlocal active
        active = False
        if getattr(owner, name) is patched:
            setattr(owner, name, original)

    setattr(owner, name, patched)
    undo.callback(restore)


# ---------------------------------------------------------------------- which models are refused


def _refusing_other_models(choose: Callable[..., str]) -> Callable[..., str]:
    """Refuse models with attention of their own, which would ignore `cuseq`, and the lengths.

    Such models say that they do not support sdpa, but transformers does not ask that for an
    implementation that it does not ship. Falcon supports sdpa and has a table of its own.
    """

    def checked(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME:
            _check_model(self)
        return choose(self, requested_attention, *args, **kwargs)

    return checked


def _check_model(model: transformers.PreTrainedModel) -> None:
    # GPT-OSS supports no sdpa because of its sinks, which packed attention has; Gemma 2 of
    # transformers 5.23 because of its soft caps, which may be off.
    has_no_caps = getattr(model.config, "attn_logit_softcapping", 0) is None
    known = supports_sdpa(model) or model.config.model_type == "gpt_oss" or has_no_caps
    own = [name for name in dir(sys.modules[type(model).__module__]) if name.endswith(_TABLE)]
    if not known or own:
        why = f"it chooses from {own[0]}" if own else "it does not support sdpa either"
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {why}, so its '
            "attention is not one that can be replaced"
        )
    counted = _counts_positions_itself(model)
    if counted is not None:
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {counted}, so '
            "the positions of a packed row would be wrong"
        )


def _counts_positions_itself(model: transformers.PreTrainedModel) -> str | None:
    """Return why a model's positions are not those that a packed batch gives, None if they are."""
    is_told = "position_ids" in inspect.signature(type(model).forward).parameters
    is_decoder = model.can_generate()  # an encoder's rows of sound or pixels count as they like
    for one in vars(sys.modules[type(model).__module__]).values():
        if hasattr(one, "create_position_ids_from_input_ids"):
            return "it counts positions from behind its padding token's id"
        if isinstance(one, type) and one.__name__.endswith("PositionalEmbedding"):
            counts = "past_key_values_length" in inspect.signature(one.forward).parameters
            if counts and is_decoder and not is_told:
                return "it counts positions along the row, whatever position_ids say"
    return None


# ------------------------------------------------------------ transformers' search for packed rows


def _withhold_position_ids(undo: contextlib.ExitStack) -> None:
    """Keep transformers' search for packed position ids from running for this implementation.

    The search stalls the device once a forward, and it would draw a dense mask that lengths make
    needless. The position ids go to the mask function instead, which transformers calls next on the
    same thread.
    """
    try:
        check_mask_preparation()
    except UnknownRelease as change:
        warn(
            f"{change}. transformers' own search for packed position_ids stays on, with one "
            "synchronisation a forward, and lengths beside packed position_ids raise unless "
            "use_cache is on",
            stacklevel=4,
        )
        return
    _patch(undo, masking_utils, MASK_PREPARATION, _without_position_ids)


def _without_position_ids(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepared(
        config,
        inputs_embeds,
        attention_mask,
        past_key_values,
        position_ids,
        layer_idx,
        encoder_hidden_states=None,
    ):
        if isinstance(attention_mask, DeferredMask):
            # `generate` has made it already: it goes through as a mask of four dimensions does.
            mask = torch.empty(1, 1, 1, 1)
            found = prepare(config, inputs_embeds, mask, past_key_values, None, layer_idx)
            return found[0], attention_mask, *found[2:]
        if attention_of(config) == NAME:
            withhold(position_ids if attention_mask is None else None)
            position_ids = None
        return prepare(
            config,
            inputs_embeds,
            attention_mask,
            past_key_values,
            position_ids,
            layer_idx,
            encoder_hidden_states,
        )

    return prepared
