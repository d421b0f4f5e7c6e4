"""Registration of `attn_implementation="cuseq"` with transformers, and its removal.

This makes three registrations and two patches in transformers, which are undone together: the
attention function; that of towers; the mask function; a check of models that request this
implementation; and a wrapper that stops transformers' own search for packed position ids.
`register` keeps them until `unregister`. Each enabled model keeps them until it is disabled or
garbage-collected.
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
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from cuseq._base.foreign import check_attribute
from cuseq._base.models import text_config
from cuseq.integrations.transformers._forwards import is_replaced
from cuseq.integrations.transformers._layers import hands_keywords_on, keywords_of
from cuseq.integrations.transformers._private import (
    BEFORE_SWITCH,
    MASK_PREPARATION,
    SWITCH,
    attention_of,
    check_mask_preparation,
    check_names,
    registered_functions,
    supports_sdpa,
)
from cuseq.integrations.transformers.attention import cuseq_attention, cuseq_tower_attention
from cuseq.integrations.transformers.documents import (
    documents_found,
    install_door,
    layout_of_masks_and_positions,
)
from cuseq.integrations.transformers.masks import DeferredMask, Told, cuseq_mask, hand_over
from cuseq.integrations.transformers.names import CACHE, NAME, TOWER

_TABLE = "_ATTENTION_CLASSES"  # suffix of the names of models' own attention tables

# Reentrant, because garbage collection may call `release_registration` inside these functions.
_lock = threading.RLock()
_registered_directly = False
_holds = 0
_undo: contextlib.ExitStack | None = None


def register() -> None:
    """Register `attn_implementation="cuseq"` with transformers, for use without `cuseq.enable`.

    `cuseq.enable(model)` does not need this call, because it registers while a model is enabled.
    Further calls of `register` change nothing; one `unregister` undoes them all.

    Raises:
        UnknownRelease: a private name of transformers that this needs is missing, or a function
            takes other arguments; nothing was registered.

    Examples:
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
    """Undo `register` and restore transformers' own functions.

    If models are enabled, the registration stays until the last of them is disabled. A model made
    with `attn_implementation="cuseq"` cannot run afterwards; set another implementation by
    `model.set_attn_implementation`. Without an earlier `register`, this does nothing.
    """
    global _registered_directly
    with _lock:
        _registered_directly = False
        _uninstall_if_unused()


def hold_registration() -> None:
    """Register on behalf of one more user; raises as `register`."""
    global _holds
    with _lock:
        _install()
        _holds += 1


def release_registration() -> None:
    """Undo one call of `hold_registration`."""
    global _holds
    with _lock:
        _holds -= 1
        _uninstall_if_unused()


def _install() -> None:
    global _undo
    if _undo is not None:
        return
    check_names()
    with contextlib.ExitStack() as undo:  # an error part-way undoes everything
        _register_function(undo, AttentionInterface, NAME, cuseq_attention)
        _register_function(undo, AttentionInterface, TOWER, cuseq_tower_attention)
        _register_function(undo, AttentionMaskInterface, NAME, cuseq_mask)
        _patch(
            undo,
            transformers.PreTrainedModel,
            "get_correct_attn_implementation",
            _refusing_other_models,
        )
        _withhold_position_ids(undo)
        _patch_paging(undo)
        _undo = undo.pop_all()


def _uninstall_if_unused() -> None:
    global _undo
    if _undo is not None and not _registered_directly and _holds == 0:
        undo, _undo = _undo, None
        undo.close()


def _register_function(
    undo: contextlib.ExitStack, interface: type, name: str, function: Callable[..., Any]
) -> None:
    functions = registered_functions(interface)
    interface.register(name, function)
    undo.callback(functions.pop, name, None)


def _patch(
    undo: contextlib.ExitStack,
    owner: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace a function of transformers by a wrapper until `undo` is closed.

    If other code has wrapped our wrapper by then, ours stays inside theirs and only calls the
    original.
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


# -------------------------------------------------------------------------------- refused models


def _refusing_other_models(choose: Callable[..., str]) -> Callable[..., str]:
    """Wrap the choice of attention to refuse models whose own attention would ignore `cuseq`.

    Such models declare that they do not support sdpa, but transformers does not check this for an
    implementation that it does not ship. Falcon supports sdpa and has its own attention table.
    """

    def checked(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME:
            check_model(self)
            install_door(self)
        if requested_attention == f"paged|{NAME}":  # continuous batching before transformers 5.20
            requested_attention = "paged|sdpa"
        return choose(self, requested_attention, *args, **kwargs)

    return checked


def check_model(model: transformers.PreTrainedModel) -> None:
    """Raise ValueError if the layers of a model would not compute the attention of their config."""
    # sdpa has no sinks (GPT-OSS, MiMo V2 Flash) and no soft caps (Gemma 2 in transformers 5.23), so
    # these models do not support it. Packed attention has both.
    has_caps = hasattr(model.config, "attn_logit_softcapping")
    known = supports_sdpa(model) or has_caps or _gives_sinks(model)
    own = [name for name in dir(sys.modules[type(model).__module__]) if name.endswith(_TABLE)]
    if not known or own:
        why = f"it chooses from {own[0]}" if own else "it does not support sdpa either"
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {why}, so its '
            "attention cannot be replaced"
        )
    chosen = _chooses_keys_itself(model)
    if chosen is not None:
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {chosen}, which '
            "packed attention alone cannot"
        )
    silent = _hands_nothing_on(model)
    if silent is not None:
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {silent} hands no '
            "keywords to its layers, so they would not know the documents of a packed row"
        )
    counted = _counts_positions_itself(model)
    if counted is not None:
        raise ValueError(
            f'{type(model).__name__} cannot use attn_implementation="{NAME}": {counted}, so '
            "the positions of a packed row would be wrong"
        )


def _gives_sinks(model: transformers.PreTrainedModel) -> bool:
    """Return whether a layer of a model's modeling module gives its sinks to its attention."""
    code = sys.modules[type(model).__module__]
    layers = (one for one in vars(code).values() if isinstance(one, type))
    return any("s_aux" in keywords_of(one) for one in layers if one.__module__ == code.__name__)


def _chooses_keys_itself(model: transformers.PreTrainedModel) -> str | None:
    """Return how the layers of a model choose the keys that a query sees; None if masks say it."""
    code = sys.modules[type(model).__module__]
    for one in vars(code).values():
        if not isinstance(one, type) or one.__module__ != code.__name__:
            continue
        if hasattr(one, "prepare_dynamic_mask"):
            return f"{one.__name__} computes a mask of its own from its values"
        if "indexer" in getattr(one.__init__, "__code__", _NO_CODE).co_names:
            layers = [module for module in model.modules() if type(module) is one]
            if not layers or not all(map(is_replaced, layers)):  # by `cuseq.enable`
                return (
                    f"{one.__name__} attends only to keys that its indexer chooses (where it can, "
                    "cuseq.enable(model) takes such a model)"
                )
    return None


def _hands_nothing_on(model: transformers.PreTrainedModel) -> str | None:
    """Return the class of a model's text part that gives its layers neither keywords nor rotations.

    Such a model (Moshi of older releases) gives them a mask only where the caller gives one.
    """
    code = sys.modules[type(model).__module__]
    for one in vars(code).values():
        if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel):
            forward = inspect.unwrap(one.forward)
            names = getattr(forward, "__code__", _NO_CODE).co_names
            takes_text = "input_ids" in inspect.signature(forward).parameters
            if takes_text and "create_causal_mask" in names and "rotary_emb" not in names:
                if not hands_keywords_on(forward):
                    return one.__name__
    return None


_NO_CODE = (lambda: None).__code__


def _counts_positions_itself(model: transformers.PreTrainedModel) -> str | None:
    """Return why a model would not use the positions of a packed batch; None if it uses them."""
    is_told = "position_ids" in inspect.signature(type(model).forward).parameters
    is_decoder = model.can_generate()  # rows of audio or pixels in an encoder are not packed
    for one in vars(sys.modules[type(model).__module__]).values():
        if hasattr(one, "create_position_ids_from_input_ids"):
            return "it counts positions from the one after its padding token's id"
        if isinstance(one, type) and one.__name__.endswith("PositionalEmbedding"):
            if is_decoder and not is_told:
                return "it counts positions along the row, whatever position_ids say"
    return None


# ---------------------------------------------------------------------------- continuous batching


def _patch_paging(undo: contextlib.ExitStack) -> None:
    """Let continuous batching run an enabled model by sdpa, and give it back its attention."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    if hasattr(ContinuousBatchingManager, SWITCH):
        check_attribute(getattr(ContinuousBatchingManager, SWITCH), BEFORE_SWITCH)
        _patch(undo, ContinuousBatchingManager, SWITCH, _paging_by_sdpa)


def _paging_by_sdpa(switch: Callable[..., None]) -> Callable[..., None]:
    def switched(self, model, *args, **kwargs):
        is_ours = attention_of(text_config(model)) == NAME
        if is_ours:
            model.set_attn_implementation("sdpa")
        switch(self, model, *args, **kwargs)
        if is_ours:
            setattr(self, BEFORE_SWITCH, NAME)

    return switched


# ------------------------------------------------------------ transformers' search for packed rows


def _withhold_position_ids(undo: contextlib.ExitStack) -> None:
    """Stop transformers' search for packed position ids for this implementation.

    The search synchronises once per forward and would build a dense mask that is not needed when
    lengths are given. The position ids go to the mask function instead, which transformers calls
    next on the same thread.
    """
    check_mask_preparation()
    _patch(undo, masking_utils, MASK_PREPARATION, _without_position_ids)


def _without_position_ids(prepare: Callable[..., Any]) -> Callable[..., Any]:
    # Gemma 3 gives arguments by name, and the cache's differs between releases.
    names = tuple(inspect.signature(prepare).parameters)
    of_mask, of_positions = names[2], names[4]

    def prepared(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        config, rows, mask, cache, positions = (given[name] for name in names[:5])
        if isinstance(mask, DeferredMask):
            # `generate` has already made the mask: prepare with a 4-D mask in its place, which
            # transformers passes through unchanged.
            given |= {of_mask: torch.empty(1, 1, 1, 1), of_positions: None}
            found = prepare(**given)
            return found[0], mask, *found[2:]
        if attention_of(config) == NAME:
            hand_over(_told(config, rows, mask, cache, positions))
            given[of_positions] = None
        return prepare(**given)

    return prepared


def _told(config: Any, rows: Tensor, mask: Any, cache: Any, position_ids: Any) -> Told:
    """Return what the call of a model says about its documents, for the mask function.

    In eager code the model's own hook has read it, unless the config was edited after the model was
    made.
    """
    batch, seqlen = rows.shape[:2]
    if is_tracing(rows):
        is_2d = isinstance(mask, Tensor) and mask.shape == (batch, seqlen)
        if mask is not None and not is_2d:
            return Told()
        return Told(None, position_ids, mask, cache is not None)
    is_known, packed = documents_found(config, batch, seqlen)
    if not is_known:
        told = {"attention_mask": mask, "position_ids": position_ids, CACHE: cache}
        given = {name: value for name, value in told.items() if value is not None}
        packed = layout_of_masks_and_positions(given, batch, seqlen)
    return Told(packed)
