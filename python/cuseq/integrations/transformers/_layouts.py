"""Layouts of packed rows, from the position ids or offsets of a call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.models import rotations_by_length, text_config
from cuseq._base.modes import outside_inference_mode
from cuseq.cache import remember
from cuseq.integrations.transformers._warn import warn_once
from cuseq.integrations.transformers.names import cache_names
from cuseq.layout import PackedLayout

LENGTHS = ("packed", "cu_seq_lens_q", "cu_seq_lens_k")
"""The keywords of a call that say where its sequences end."""


def layout_of_positions(position_ids: Tensor | None, batch: int) -> PackedLayout | None:
    """Return the layout that position ids describe; None if each row is one sequence.

    This waits for one event, once for each tensor until it is edited in place, because all layers
    share the cached result. Tensors made in inference mode have no version, so every layer waits;
    with CUSEQ_CACHE=0 every layer waits too.
    """
    if position_ids is None:
        return None
    with outside_inference_mode():
        return remember(
            position_ids,
            "packed_positions",
            lambda: _several_sequences(position_ids, batch),
            batch,
            tensors=_tensors_of,
        )


def layout_of_offsets(cu_seqlens: Tensor, total_tokens: int) -> PackedLayout:
    """Return the layout of offsets `[n_seqs + 1]`, made once for each tensor.

    The first use of a host value waits for one event if the offsets are on a GPU.
    """
    with outside_inference_mode():
        return remember(
            cu_seqlens,
            "packed_offsets",
            lambda: PackedLayout.from_cu_seqlens(cu_seqlens.clone(), total_tokens),
            total_tokens,
            tensors=_tensors_of,
        )


def layout_of_call(told: dict[str, Any]) -> PackedLayout | None:
    """Return the layout of packed position ids, read under the conditions of attention.

    Args:
        told: the arguments of a model's call by name, without those that are None.

    Returns:
        None if each row of the batch is one sequence, or a mask or a filled cache says more; always
        None in compiled code, which cannot read position ids, with a warning where it is compiled.
    """
    positions = told.get("position_ids")
    if positions is None or ("input_ids" not in told and "inputs_embeds" not in told):
        return None  # the model itself refuses a call without input
    if torch.compiler.is_compiling():
        others = ("attention_mask", *cache_names(told))
        if positions.dim() == 2 and all(told.get(name) is None for name in others):
            _warn_of_compiled_positions()
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # M-RoPE with the text's positions in front
    rows = rows_of_call(told)
    seqlen = rows.shape[1]
    if positions.dim() > 2 or positions.shape[-1] != seqlen or seqlen == 1:
        return None
    if told.get("attention_mask") is not None or _is_filled(told):
        return None
    return layout_of_positions(positions, rows.shape[0])


@torch.compiler.assume_constant_result  # the compiler calls it and puts None into the graph
def _warn_of_compiled_positions() -> None:
    warn_once(
        "LEAKS if position_ids are packed: compiled code cannot read them, and only the masks of "
        "some models do; pass packed= to a model that is compiled as a whole"
    )


def rows_of_call(told: dict[str, Any]) -> Tensor:
    """Return the input of a call, `[batch, seqlen]` or `[batch, seqlen, hidden]`."""
    ids = told.get("input_ids")
    return told["inputs_embeds"] if ids is None else ids


def _is_filled(told: dict[str, Any]) -> bool:
    return any(told[name].get_seq_length() > 0 for name in cache_names(told))


def names_of_call(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a model's forward takes by position."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def tell_layout(
    names: tuple[str, ...], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the layout of packed position ids to a model's call, as `packed`.

    A forward pre-hook for models that make a 2-D mask of ones if they get none (OPT): attention
    could not tell that mask from the user's, which overrides position ids. `names` are those of the
    model's arguments, which compiled code cannot look up.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    told = {name: value for name, value in given.items() if value is not None}
    if any(name in told for name in LENGTHS):
        return None
    packed = layout_of_call(told)
    return None if packed is None else ((), given | {"packed": packed})


def check_total(packed: PackedLayout, tokens: int) -> None:
    """Raise ValueError unless a layout describes all tokens of an input. In eager code only."""
    if packed.total_tokens != tokens:
        raise ValueError(
            f"packed must describe all batch * seqlen = {tokens} tokens of the input, got a layout "
            f"of total_tokens={packed.total_tokens}"
        )


def check_input(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError unless the input of a model's call is as long as its `packed`.

    Raise it too for a rank's part of a row if the rotation follows the longest position, which
    the ranks would not agree on.

    A forward pre-hook, so that the error comes before a layer runs. Reads shapes only. In compiled
    code it does nothing, because a comparison there would recompile; attention compares then.
    """
    packed = kwargs.get("packed")
    if torch.compiler.is_compiling() or not isinstance(packed, PackedLayout):
        return
    if packed.part is not None:
        for rope_type in rotations_by_length(text_config(model)):
            raise ValueError(
                "packed must describe a whole row for a model whose rotation follows the longest "
                f"position, which differs from rank to rank, got a rank's part and {rope_type=}"
            )
    name, rows = "input_ids", kwargs.get("input_ids", args[0] if args else None)
    if rows is None:
        name, rows = "inputs_embeds", kwargs.get("inputs_embeds")
    if not isinstance(rows, Tensor) or rows.dim() < 2:
        return  # the model refuses them
    tokens = rows.shape[0] * rows.shape[1]
    if tokens != packed.total_tokens:
        raise ValueError(
            f"{name} must have packed.total_tokens = {packed.total_tokens} tokens, got {tokens}: "
            "was a batch cut or padded after its collator? Cut the examples before it"
        )


def _several_sequences(position_ids: Tensor, batch: int) -> PackedLayout | None:
    layout = PackedLayout.from_position_ids(position_ids.expand(batch, -1))
    return None if layout.num_sequences == batch else layout


def _tensors_of(layout: PackedLayout | None) -> tuple[Tensor, ...]:
    if layout is None:
        return ()
    return layout.row.lengths, layout.row.cu_seqlens_static, layout.row.host_meta
