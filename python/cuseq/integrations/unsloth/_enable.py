"""Implementation of `cuseq.enable` and `cuseq.disable` for unsloth and its trainers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cuseq import cache
from cuseq._base.foreign import check_attribute, check_fields, private, signature_of
from cuseq.integrations._enabled import Enabled, check_same_options
from cuseq.integrations.unsloth import _blocks, _collators, _labels, _masks, _metadata, _rotation
from cuseq.integrations.unsloth._attention import FIELDS, run_attention
from cuseq.integrations.unsloth._collators import is_packing_trainer
from cuseq.integrations.unsloth._state import (
    BLOCKS,
    DISPATCH,
    PACKING,
    Replaced,
    State,
    current,
    set_current,
)

Function = Callable[..., Any]


class _Target(NamedTuple):
    """A function of unsloth that is replaced.

    Attributes:
        part: its part in training, as in `Enabled.replaced`.
        module, name: the module that defines it, and its name there.
        signature: the signature that cuseq expects, without annotations.
        make: returns the replacement, given unsloth's function.
    """

    part: str
    module: str
    name: str
    signature: str
    make: Callable[[Function], Function]


def _same(part: str, module: str, ours: Function, name: str | None = None) -> _Target:
    """Return a target whose replacement `ours` has the same signature as the original."""
    return _Target(part, module, name or ours.__name__, signature_of(ours), lambda original: ours)


def _then_clear_ours(original: Function) -> Function:
    @functools.wraps(original)
    def clear_packed_caches() -> None:
        original()
        if current() is not None:
            cache.clear()

    return clear_packed_caches


_TARGETS = (
    _same("metadata", PACKING, _metadata.get_packed_info_from_kwargs),
    _same("metadata", PACKING, _metadata.cached_host_lengths, "_cached_host_lengths"),
    _same("mask", PACKING, _masks.build_sdpa_packed_attention_mask),
    _same("mask", PACKING, _masks.build_xformers_block_causal_mask),
    _same("labels", PACKING, _labels.mask_packed_sequence_boundaries),
    _same("labels", PACKING, _labels.mask_packed_boundary_labels),
    _same("rope", "unsloth.kernels.rope_embedding", _rotation.fast_rope_embedding),
    _same("qk_norm", "unsloth.kernels.qk_norm_rope", _rotation.fast_qk_norm_rope),
    _Target(
        "attention",
        DISPATCH,
        "_run_attention",
        "(*, config, context, Q, K, V)",
        lambda original: functools.partial(run_attention, original),
    ),
    _Target(
        "collator",
        PACKING,
        "enable_sample_packing",
        "(model, trainer, *, sequence_lengths_key='seq_lengths')",
        _collators.then_hand_on_layout,
    ),
    _Target(
        "collator",
        PACKING,
        "enable_padding_free_metadata",
        "(model, trainer)",
        _collators.then_hand_on_layout,
    ),
    _Target("cache", PACKING, "clear_packed_caches", "()", _then_clear_ours),
)
_BLOCK_TARGET = _Target(
    "blocks",
    BLOCKS,
    "_wrap",
    "(cls, compile_options, kinds=1)",
    _blocks.then_let_packed_rows_in,
)


def enable_module(module: ModuleType, *, compile_blocks: bool) -> Enabled:
    """Make unsloth train packed rows with cuseq, for models loaded before or after this call.

    Args:
        module: the imported unsloth module.
        compile_blocks: let the compiled decoder blocks of unsloth's own classes take packed rows,
            which unsloth itself runs uncompiled. cuseq reads the lengths when the block runs, so
            one graph serves every pack.

    Returns:
        The replaced functions, each replaced in every module of unsloth that holds it. Your own
        modules that imported a function from unsloth by name keep unsloth's function.

    Raises:
        UnknownRelease: a function of this unsloth is missing or has another signature, or its
            attention takes other arguments; nothing is replaced.
        ValueError: unsloth is already enabled with another `compile_blocks`.

    Never synchronises.
    """
    state = current()
    if state is not None:
        check_same_options(
            {"compile_blocks": state.compile_blocks}, {"compile_blocks": compile_blocks}
        )
        return state.result
    targets = [*_TARGETS, _BLOCK_TARGET] if compile_blocks else list(_TARGETS)
    originals = [_checked(module, target) for target in targets]
    _check_attributes(module, compile_blocks)

    functions = [
        Replaced(target.name, original, target.make(original))
        for target, original in zip(targets, originals, strict=True)
    ]
    replaced = tuple(f"{target.part}:{target.name}" for target in targets)
    left_alone, warnings = _limits(module, compile_blocks)
    state = State(compile_blocks, Enabled("unsloth", replaced, left_alone, warnings), functions)
    set_current(state)
    for function in functions:
        _rebind(function.original, function.ours)
    if compile_blocks:
        for cls in _blocks.compiled_blocks():
            _blocks.let_packed_rows_in(cls)
    return state.result


def disable_module(module: ModuleType) -> None:
    """Restore everything that `enable_module` replaced; do nothing if it was not called."""
    state = current()
    if state is None:
        return
    set_current(None)
    for function in state.functions:
        _rebind(function.ours, function.original)
    for collator, torch_call in state.collators:
        _collators.take_back_layout(collator(), torch_call())
    for cls, forward in state.blocks:
        _blocks.take_rows_out(cls, forward)


def enable_trainer(trainer: Any) -> Enabled:
    """Add a layout to the batches of a trainer that was made before `enable_module`.

    Raises:
        ValueError: unsloth is not enabled, or does not pack this trainer's batches.
    """
    if current() is None:
        raise ValueError(
            "cuseq.enable(unsloth) must come before cuseq.enable(trainer) of one of its trainers"
        )
    if not is_packing_trainer(trainer):
        collator = type(getattr(trainer, "data_collator", None)).__name__
        raise ValueError(
            "trainer must be one that unsloth lets pack or run padding-free, got one with the data "
            f"collator {collator}"
        )
    return _collators.hand_on_layout(trainer.model, trainer)


def disable_trainer(trainer: Any) -> None:
    """Restore a trainer's collator; do nothing if it was not replaced."""
    state = current()
    if state is None:
        return
    for entry in list(state.collators):
        collator, torch_call = entry
        if collator() is trainer.data_collator:
            _collators.take_back_layout(collator(), torch_call())
            state.collators.remove(entry)


def _checked(module: ModuleType, target: _Target) -> Function:
    """Return unsloth's function; raise UnknownRelease if its signature is not the expected one."""
    owner = sys.modules.get(target.module)
    if owner is None and sys.modules.get(module.__name__) is module:
        with suppress(ImportError):  # unsloth imports its compiled blocks with its first model
            owner = import_module(target.module)
    if owner is None:  # this raises: the module is missing
        private(module, target.module.removeprefix("unsloth."))
    return private(owner, target.name, signature=target.signature)


def _check_attributes(module: ModuleType, compile_blocks: bool) -> None:
    """Check the fields and attributes of unsloth that cuseq reads but does not replace."""
    dispatch, packing = sys.modules[DISPATCH], sys.modules[PACKING]
    for name, fields in FIELDS.items():
        check_fields(private(dispatch, name), fields)
    for name, mark in _collators.WRAPPED_BY.items():
        check_attribute(getattr(packing, name), mark)
    if compile_blocks:
        private(dispatch, "select_attention_backend", signature="(use_varlen=False, dropout_p=0.0)")
        check_attribute(private(sys.modules[BLOCKS], "_wrap"), _blocks.ORIGINAL)


def _limits(module: ModuleType, compile_blocks: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts left alone, and warnings about packed rows that cuseq will not run."""
    left_alone = ["attention: models that unsloth runs through transformers' classes"]
    if not compile_blocks:
        left_alone.append("blocks: packed rows run uncompiled, since compile_blocks is False")
    warnings = []
    if private(sys.modules[DISPATCH], "HAS_FLASH_ATTENTION"):
        warnings.append("attention: flash-attn is installed and keeps its packed rows")
    if torch.are_deterministic_algorithms_enabled():
        warnings.append(
            "attention: torch.use_deterministic_algorithms is on, so unsloth keeps packed rows"
        )
    return tuple(left_alone), tuple(warnings)


def _rebind(old: Any, new: Any) -> None:
    """Replace a function in every module of unsloth that holds it: modules import it by value."""
    for name, module in list(sys.modules.items()):
        if name.lower().startswith("unsloth") and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
