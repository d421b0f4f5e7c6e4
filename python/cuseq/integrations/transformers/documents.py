"""The documents of a model's call, found once, at the model's own forward.

A call says in one of these ways where its documents end, in order of precedence:

1. `packed`, a layout.
2. Offsets: `cu_seq_lens_q` and `cu_seq_lens_k`, or another name of theirs (`cu_seqlens`,
   `cu_seqlens_q`, the fields of `flash_attn_kwargs` and of Megatron's `packed_seq_params`).
3. Lengths: `packed_seq_lengths`.
4. A number for each token: `seq_idx`, `document_ids`, `segment_ids`.
5. A 2-D mask with values above 1 (1, 1, 2, 2, 2, 0): the number of each token's document, 0 for
   padding.
6. `position_ids` that begin again, beside a 2-D mask of padding or without one.

`bring_documents`, a forward pre-hook, reads the first of them. It hands on a layout as `packed`, or
offsets as `cu_seq_lens_q`, so that nothing below reads another description. A 2-D mask beside them
is dropped, because they say where padding is. A call without documents stays as it is.

Compiled code cannot read values. There a mask and positions stay as they are, and attention makes a
dense mask of them (`document_numbers`).
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cuseq._base.models import HOLD, rotations_by_length, text_config
from cuseq._base.modes import is_capturing
from cuseq.integrations.transformers._features import (
    Rows,
    check_taken,
    replace_features,
    restore_features,
    rows_handed,
)
from cuseq.integrations.transformers._forwards import is_replaced
from cuseq.integrations.transformers._grids import grids_of_call
from cuseq.integrations.transformers._layers import (
    calls_of,
    code_of,
    loss_takes_keywords,
    makes_angles,
)
from cuseq.integrations.transformers._lengths import (
    LENGTHS,
    OFFSETS,
    check_agreement,
    check_lengths,
    check_offsets,
)
from cuseq.integrations.transformers._private import attention_of
from cuseq.integrations.transformers._warn import warn_once
from cuseq.integrations.transformers.names import (
    DOCUMENTS,
    MASK_BESIDE_LENGTHS,
    NAME,
    cache_names,
)
from cuseq.layout import (
    PackedLayout,
    check_layout,
    layout_of_offsets,
    own_positions,
    remembered_layout,
)
from cuseq.layout.build import of_lengths_and_segments
from cuseq.layout.records import Records
from cuseq.vision.positions import LAYOUTS, MODEL_TYPES, PIXELS, has_mrope

DESCRIPTIONS = ("packed", "cu_seq_lens_q", "cu_seq_lens_k")
"""The keywords that can describe documents below `bring_documents`."""

_NUMBERS = ("seq_idx", "document_ids", "segment_ids")
_FLASH, _MEGATRON = "flash_attn_kwargs", "packed_seq_params"  # objects that hold offsets
_AMBIGUOUS = ("seq_lens", "seqlens", "seq_lengths", "sequence_lengths")
_OTHER_NAMES = (*OFFSETS, *_NUMBERS, _FLASH, _MEGATRON, LENGTHS)
NAMES = (*DESCRIPTIONS, *_OTHER_NAMES, *_AMBIGUOUS, "attention_mask", "position_ids")
"""The keywords by which a call, or a column of a dataset, can say where documents end."""

_POOLING = (
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "DoubleHeadsModel",
)  # how the names of models end that give one result for each row
_OTHER_INPUTS = ("pixel", "image", "video", "input_features", "audio")  # how their names begin
_DOOR = "_cuseq_door"  # on a model that has the hooks


# ---------------------------------------------------------------------------------- the hooks


class _Call(NamedTuple):
    """A call of a model that a thread is inside of."""

    model: weakref.ref[nn.Module]
    shape: tuple[int, int]
    packed: PackedLayout | None
    rows: list[Rows]  # of a tower's output, which were handed on


@dataclass(frozen=True)
class _Door:
    """The properties of a model that its hook uses and that compiled code cannot look up.

    Attributes:
        names: the arguments of the model's forward.
        takes_more: whether it takes other keywords.
        attends: whether the model's layers compute the attention that its config names.
        makes_mask: whether the model makes a 2-D mask of ones itself (OPT), so that transformers
            reads no positions.
        pools: whether the model gives one result for each row.
        is_relative: whether the model only rotates, each token by its position, so that those along
            the row give the same attention as those of the documents.
        chooses_keys: whether indexers of the model choose keys by its mask and its positions.
    """

    names: tuple[str, ...]
    takes_more: bool
    attends: bool
    makes_mask: bool
    pools: bool
    is_relative: bool
    chooses_keys: bool


class _Calls(threading.local):
    def __init__(self) -> None:
        self.inside: list[_Call] = []


_calls = _Calls()


def install_door(model: nn.Module, attends: bool = True) -> list[RemovableHandle]:
    """Make a model read the documents of each call before its other hooks run.

    A model that has the hooks already gets no more.

    Args:
        model: the model.
        attends: whether its layers compute the attention that its config names.
    """
    if _DOOR in model.__dict__:
        return []
    parameters = inspect.signature(type(model).forward).parameters
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    setattr(model, _DOOR, True)
    replace_features(model)
    chooses_keys = any(getattr(one, "indexer", None) is not None for one in model.modules())
    door = _Door(
        names=names_of_call(model),
        # A model that computes attention in its own way takes them from its next hook.
        takes_more=takes_more or not attends,
        attends=attends,
        makes_mask="ones" in calls_of(model),
        pools=any(one.__name__.endswith(_POOLING) for one in type(model).__mro__),
        is_relative=_is_relative(model) and not chooses_keys,
        chooses_keys=chooses_keys,
    )
    bring = partial(bring_documents, door)
    return [
        model.register_forward_pre_hook(bring, with_kwargs=True, prepend=True),
        model.register_forward_hook(_leave, always_call=True),
    ]


def _is_relative(model: nn.Module) -> bool:
    """Return whether a model's attention follows the distances of positions alone.

    A model that is being made has no modules yet, so its code is asked too.
    """
    kinds = (*map(type, model.modules()), *vars(code_of(model)).values())
    rotates = any(isinstance(one, type) and makes_angles(one) for one in kinds)
    return rotates and not rotations_by_length(text_config(model))


def names_of_call(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a model's forward takes by position."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def remove_door(model: nn.Module) -> None:
    """Undo `install_door`, but for its hooks, which the caller removes."""
    restore_features(model)
    model.__dict__.pop(_DOOR, None)


def documents_found(config: Any, batch: int, seqlen: int) -> tuple[bool, PackedLayout | None]:
    """Return whether a hook has read the call that runs in this thread, and what it found."""
    if _calls.inside:
        of_model, shape, packed, _ = _calls.inside[-1]
        model = of_model()
        if model is not None and shape == (batch, seqlen):
            if model.config is config or text_config(model) is config:
                return True, packed
    return False, None


def model_inside() -> nn.Module | None:
    """Return the model whose call runs in this thread, the innermost that a hook has read."""
    return _calls.inside[-1].model() if _calls.inside else None


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling() and _calls.inside and _calls.inside[-1].model() is model:
        rows = _calls.inside.pop().rows
        if output is not None:  # it has not raised
            check_taken(rows)


def _enter(
    model: nn.Module, shape: tuple[int, int], packed: PackedLayout | None, rows: list[Rows]
) -> None:
    # A call that Ctrl-C ended never left: a model does not run inside itself.
    place = next((i for i, one in enumerate(_calls.inside) if one.model() is model), None)
    if place is not None:
        del _calls.inside[place:]
    _calls.inside.append(_Call(weakref.ref(model), shape, packed, rows))


def bring_documents(
    door: _Door, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Bring the documents of a model's call into one form; a forward pre-hook.

    Raises:
        ValueError: descriptions contradict each other or the input, a mask hides tokens inside a
            document, or the model's attention does not read `packed`.
        TypeError: a description is not what its name says.

    Descriptions on a GPU cost the wait of `PackedLayout`; those that need a mask are read at once.
    """
    given = dict(zip(door.names, args, strict=False)) | kwargs
    told = {name: value for name, value in given.items() if value is not None}
    rows = told.get("input_ids", told.get("inputs_embeds"))
    if not isinstance(rows, Tensor) or rows.dim() < 2:
        return None  # the model refuses them, or this is not a call with text
    is_read = not door.attends or _names_ours(model)
    if torch.compiler.is_compiling():
        changes = _in_compiled_code(door, model, told, rows) if is_read else {}
        return _with(given, changes | _images(model, told, are_packed=False))
    shape = batch, seqlen = rows.shape[0], rows.shape[1]
    packed, changes = told.get("packed"), {}
    if packed is not None:
        if not is_read:
            raise ValueError(
                f'packed is read by attn_implementation="{NAME}" alone, got '
                f'"{attention_of(text_config(model))}": call '
                f'model.set_attn_implementation("{NAME}"), or cuseq.enable(model) again'
            )
        _check_layout_of_call(model, told, packed, batch * seqlen)
    elif is_read:
        use_cache = getattr(text_config(model), "use_cache", False)
        packed, changes = _read({"use_cache": use_cache} | told, rows)
    described = any(name in told or name in changes for name in DESCRIPTIONS)
    are_packed = described or packed is not None
    if are_packed:
        if door.pools and not is_replaced(model):
            raise ValueError(
                f"{type(model).__name__} gives one result for each row of a batch: call "
                "cuseq.enable(model), by which a linear head on the last token scores each "
                "document, before mixed precision wraps the model's forward; or train it on padded "
                "batches"
            )
        hold = model.__dict__.get(HOLD)
        if hold is not None and hold.lacks_forwards:
            raise ValueError(
                f"{type(model).__name__} must be enabled again after it was loaded: its file "
                "does not hold what keeps documents apart: call cuseq.enable(model)"
            )
        _check_planes(door, model, told)
    if are_packed and _is_padding_mask(told):
        if described and not hasattr(told["attention_mask"], DOCUMENTS):
            warn_once(MASK_BESIDE_LENGTHS)
        changes["attention_mask"] = None
    if packed is not None and "packed" not in told and (door.takes_more or "packed" in door.names):
        changes["packed"] = packed
    if is_read and are_packed and _leaves_positions_to_model(door, told):
        positions = _positions_of_call(packed, told | changes, rows)
        if positions is not None:
            changes["position_ids"] = positions.view(shape)
    images = _images(model, told, are_packed)
    _enter(model, shape, packed, rows_handed(images.values()))
    return _with(given, changes | images)


def _images(model: nn.Module, told: Mapping[str, Any], are_packed: bool) -> dict[str, Any]:
    """Return grids in the place of those of a call whose values would be waited for.

    Models of known types read grids of packed rows on the host, if they get planes of positions.
    """
    known = getattr(model.config, "model_type", None) in MODEL_TYPES
    on_host = known and are_packed and "position_ids" in told
    if on_host or any(name in told for name in LAYOUTS):
        return grids_of_call(model, told, on_host)
    return {}


def _with(
    given: dict[str, Any], changes: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a call with some arguments changed, without the descriptions that they replace and
    without layouts of images; None if it stays as it is.
    """
    if not changes and not any(name in given for name in LAYOUTS):
        return None
    replaced = _OTHER_NAMES if any(name in changes for name in DESCRIPTIONS) else ()
    dropped = (*replaced, *LAYOUTS)
    return (), {name: value for name, value in given.items() if name not in dropped} | changes


def _names_ours(model: nn.Module) -> bool:
    """Return whether a model's config names cuseq's attention; it is asked in every call."""
    return attention_of(model.config) == NAME or attention_of(text_config(model)) == NAME


def _is_padding_mask(told: Mapping[str, Any]) -> bool:
    mask = told.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2


def _leaves_positions_to_model(door: _Door, told: Mapping[str, Any]) -> bool:
    """Return whether positions would count along the row.

    With other inputs than text the model counts positions of its own kind.
    """
    is_free = "position_ids" in door.names and "position_ids" not in told
    return is_free and not any(n.startswith(_OTHER_INPUTS) for n in told)


def _positions_of_call(
    packed: PackedLayout | None, told: Mapping[str, Any], rows: Tensor
) -> Tensor | None:
    """Return the positions `[tokens]` of a call with a layout or offsets; None for a filled cache.

    No layout is made of offsets: that would cost a copy to the host, and need values.
    """
    if packed is not None:
        return packed.to(rows.device).position_ids
    if _has_filled_cache(told):
        return None
    offsets = told["cu_seq_lens_q"]
    check_offsets(offsets, told.get("cu_seq_lens_k"))
    return _positions_of_offsets(offsets.to(rows.device), rows.shape[0] * rows.shape[1])


def _positions_of_offsets(offsets: Tensor, tokens: int, padded: Tensor | None = None) -> Tensor:
    return torch.ops.cuseq.token_metadata(offsets.to(torch.int32), tokens, padded)[0]


def _check_layout_of_call(
    model: nn.Module, told: Mapping[str, Any], packed: Any, tokens: int
) -> None:
    """Raise unless the input of a call is as long as its `packed`, and nothing contradicts it."""
    check_layout(packed)
    if packed.part is not None:
        if "labels" in told and not loss_takes_keywords(type(model)):
            raise ValueError(
                f"labels must be None for a rank's part of a row in a {type(model).__name__}, "
                "whose loss takes no shift_labels: compute the loss of its logits and "
                "shift_labels, or update transformers"
            )
        for rope_type in rotations_by_length(text_config(model)):
            raise ValueError(
                "packed must describe a whole row for a model whose rotation follows the longest "
                f"position, which differs from rank to rank, got a rank's part and {rope_type=}"
            )
    if _has_filled_cache(told):
        raise ValueError(
            "packed lengths describe whole rows, not a decode step: the cache must be empty, got "
            "one that is filled (by earlier tokens, or by the tokens of prefix tuning)"
        )
    if packed.total_tokens != tokens:
        name = "input_ids" if "input_ids" in told else "inputs_embeds"
        raise ValueError(
            f"{name} must have packed.total_tokens = {packed.total_tokens} tokens, got {tokens}: "
            "was a batch cut or padded after its collator? Cut the examples before it"
            + (" (peft's virtual tokens need padded batches)" if name == "inputs_embeds" else "")
        )
    check_lengths(told)
    check_agreement(packed, told)


def check_total(packed: PackedLayout, tokens: int) -> None:
    """Raise ValueError unless a layout describes all tokens of an input. In eager code only."""
    if packed.total_tokens != tokens:
        raise ValueError(
            f"packed must describe all batch * seqlen = {tokens} tokens of the input, got a layout "
            f"of total_tokens={packed.total_tokens}"
        )


# ------------------------------------------------------------------ reading one of the descriptions


def layout_of_batch(batch: Mapping[str, Any], use_cache: bool) -> PackedLayout | None:
    """Return the layout of the documents that a batch describes, as a call with it is read.

    Args:
        batch: keywords of a model, `input_ids` `[rows, tokens]` among them.
        use_cache: as in the model's config, if the batch does not say it.

    Returns:
        None if each row is one document.

    Raises:
        ValueError, TypeError: as `bring_documents`.
    """
    told = {name: value for name, value in batch.items() if value is not None}
    rows = told["input_ids"]
    packed, changes = _read({"use_cache": use_cache} | told, rows)
    if packed is None and any(name in told or name in changes for name in DESCRIPTIONS):
        packed = layout_of_offsets((told | changes)["cu_seq_lens_q"], rows.numel())
    return packed


def _read(told: dict[str, Any], rows: Tensor) -> tuple[PackedLayout | None, dict[str, Any]]:
    """Return the layout of a call without `packed`, or else arguments that give its offsets.

    Args:
        told: what the call gives, and `use_cache`.
        rows: its input.
    """
    batch, seqlen = rows.shape[0], rows.shape[1]
    tokens = batch * seqlen
    renamed = _offsets_by_other_names(told)
    told = told | renamed
    check_lengths(told)
    if any(name in told for name in DESCRIPTIONS):
        _check_offsets_alone(told, tokens)
        return told.get("packed"), renamed
    if LENGTHS in told:
        return layout_of_lengths(told[LENGTHS], tokens), {}
    for name in _NUMBERS:
        numbers = told.get(name)
        if isinstance(numbers, Tensor) and numbers.numel() == tokens:
            return layout_of_numbers(numbers, batch), {}
    packed = layout_of_masks_and_positions(told, batch, seqlen)
    if packed is None:
        for name in (*_AMBIGUOUS, *_NUMBERS, _FLASH, _MEGATRON):
            if name in told:
                warn_once(
                    f"{name} does not say to cuseq where documents end, so that each row of the "
                    "batch is one: pass packed=cuseq.PackedLayout.from_lengths(lengths)"
                )
    return packed, {}


def _check_offsets_alone(told: Mapping[str, Any], tokens: int) -> None:
    """Raise ValueError if offsets on the host contradict others, or lengths, of the same call."""
    offsets = told.get("cu_seq_lens_q")
    others = (told.get(name) for name in (*OFFSETS, LENGTHS))
    differ = any(other is not None and other is not offsets for other in others)
    if differ and offsets is not None and offsets.device.type == "cpu":
        check_agreement(layout_of_offsets(offsets, tokens), told, "cu_seq_lens_q")


def _offsets_by_other_names(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return `cu_seq_lens_q`, or `packed`, if a call gives them by another name.

    Those of the keys alone are those of the queries too.
    """
    if "packed" in told or "cu_seq_lens_q" in told:
        return {}
    for name in ("cu_seq_lens_k", *OFFSETS):
        if name in told:
            return {"cu_seq_lens_q": told[name]}
    flash, params = told.get(_FLASH), told.get(_MEGATRON)
    if isinstance(flash, Mapping):
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        found = {name: flash[name] for name in names if flash.get(name) is not None}
        if "cu_seq_lens_k" in found:
            found.setdefault("cu_seq_lens_q", found["cu_seq_lens_k"])
        return found
    offsets = getattr(params, "cu_seqlens_q", None)
    if offsets is None:
        return {}
    padded = getattr(params, "cu_seqlens_q_padded", None)
    if padded is None or torch.compiler.is_compiling():
        return {"cu_seq_lens_q": offsets if padded is None else padded}
    row = of_lengths_and_segments(
        offsets.diff(), padded.diff(), int(padded[-1]), max(1, padded.numel() - 1)
    )
    return {"packed": PackedLayout(Records(row))}


def layout_of_masks_and_positions(
    told: Mapping[str, Any], batch: int, seqlen: int
) -> PackedLayout | None:
    """Return the layout that the mask and the positions of a call describe.

    Args:
        told: `attention_mask`, `position_ids` and the cache of a call, by any of its names, and
            `use_cache`, without those that are None.
        batch, seqlen: the shape of the input.

    Returns:
        None if each row of the batch is one document, or if a 4-D mask or a filled cache says more.

    Raises:
        ValueError: a mask hides tokens inside a document.
    """
    mask, positions = told.get("attention_mask"), told.get("position_ids")
    if seqlen == 1 or (mask is None and positions is None) or _has_filled_cache(told):
        return None
    positions = _positions_of_rows(positions, batch, seqlen)
    if mask is None:
        has_cache = bool(cache_names(told)) or told.get("use_cache", False)
        return None if positions is None else layout_of_positions(positions, batch, has_cache)
    if not isinstance(mask, Tensor) or mask.shape != (batch, seqlen):
        return None
    counts = not mask.dtype.is_floating_point and mask.dtype != torch.bool
    if (positions is None and not counts) or mask.is_meta or is_capturing(mask.device):
        return None
    return _layout_of_mask(mask, positions)


def _has_filled_cache(told: Mapping[str, Any]) -> bool:
    return any(_is_filled(told[name]) for name in cache_names(told))


def _is_filled(cache: Any) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # it has states of recurrent layers alone
        return bool(cache.has_previous_state())


def _positions_of_rows(positions: Any, batch: int, seqlen: int) -> Tensor | None:
    """Return positions `[batch or 1, seqlen]`, or M-RoPE's `[3, batch, seqlen]`; else None."""
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2, 3):
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # the text's positions lie before the planes
    if positions.shape[-1] != seqlen or positions.is_floating_point():
        return None
    if positions.dim() == 1:
        positions = positions[None]
    return positions if positions.shape[-2] in (1, batch) else None


def layout_of_positions(
    positions: Tensor, batch: int, has_cache: bool = False
) -> PackedLayout | None:
    """Return the layout of positions `[batch or 1, seqlen]` or `[3, batch, seqlen]`.

    Where transformers reads positions (2-D ones, without a cache), a document begins wherever they
    do not go on by one, as there. Elsewhere `document_numbers` tells where.

    Returns:
        None if each row is one document.

    The first use of a host value waits for one event, once for each tensor until it is edited in
    place. Tensors made in inference mode have no version, so every call waits; with CUSEQ_CACHE=0
    too.
    """

    def several() -> PackedLayout | None:
        rows = positions.expand(*positions.shape[:-2], batch, -1)
        if has_cache or rows.dim() == 3:
            rows = counted(document_numbers(rows))
        layout = PackedLayout.from_position_ids(rows)
        return None if layout.num_sequences == batch else layout

    return remembered_layout(positions, "packed_positions", several, batch, has_cache)


def layout_of_lengths(lengths: Tensor, total_tokens: int) -> PackedLayout:
    """Return the layout of lengths `[n_seqs]`, made once for each tensor."""

    def layout() -> PackedLayout:
        return PackedLayout.from_lengths(lengths.clone(), total_tokens)

    return remembered_layout(lengths, "packed_lengths", layout, total_tokens)


def layout_of_numbers(numbers: Tensor, batch: int) -> PackedLayout:
    """Return the layout of a number for each token, which changes where a document begins."""

    def layout() -> PackedLayout:
        return PackedLayout.from_position_ids(counted(numbers.reshape(batch, -1)))

    return remembered_layout(numbers, "packed_numbers", layout, batch)


def document_numbers(positions: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """Return the number of each token's document in its row, from 0; works in compiled code.

    A mask with values above 1 says it. Else a document begins where positions fall. It begins too
    where they return to their first value, if all else in the row goes on by one: otherwise
    positions that repeat inside one document (SelfExtend) would cut it. M-RoPE's planes give each
    token of a document other positions, so a document begins where all return to the first.

    Args:
        positions: int `[batch, seqlen]` or `[3, batch, seqlen]`; None if they go on along the row.
        mask: `[batch, seqlen]`, 0 at padding, which is left out. Its number has no meaning.

    Returns:
        int64 `[batch, seqlen]`, never falling.
    """
    if mask is None:
        assert positions is not None
        real = torch.ones(positions.shape[-2:], dtype=torch.bool, device=positions.device)
    else:
        real = mask != 0
    slots = torch.arange(real.shape[-1], device=real.device).expand(real.shape)
    last = torch.where(real, slots, -1).cummax(-1).values  # the last real token up to each
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    follows = real & (before >= 0)
    before = before.clamp(min=0)
    starts = torch.zeros_like(real)
    if positions is not None:
        planes = positions if positions.dim() == 3 else positions[None]
        first = torch.where(real, slots, real.shape[-1] - 1).amin(-1, keepdim=True)
        returns = (planes == planes.gather(-1, first.expand(len(planes), -1, -1))).all(0)
        if positions.dim() == 2:
            step = positions - positions.gather(-1, before)
            goes_on = (step == 1) | (step < 0) | returns | ~follows
            returns = (step < 0) | (returns & goes_on.all(-1, keepdim=True))
        starts = returns
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.long()  # torch gathers no unsigned numbers of more than 8 bits
        changes = mask != mask.gather(-1, before)
        starts = torch.where((mask > 1).any(), changes, starts)
    return (starts & follows).cumsum(-1)


def counted(numbers: Tensor) -> Tensor:
    """Return positions that count from 0 inside each run of equal numbers in a row."""
    slots = torch.arange(numbers.shape[-1], device=numbers.device).expand(numbers.shape)
    starts = torch.nn.functional.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0))
    return slots - torch.where(starts, slots, 0).cummax(-1).values


def _layout_of_mask(mask: Tensor, positions: Tensor | None) -> PackedLayout | None:
    """Return the layout of the real tokens of a mask; None if each row is one document."""
    batch, seqlen = mask.shape
    on_host = mask.detach().cpu()
    if positions is None and not bool((on_host > 1).any()):
        return None
    if positions is not None:
        positions = positions.detach().cpu().expand(*positions.shape[:-2], batch, -1)
    numbers = document_numbers(positions, on_host)
    if not bool(numbers.any()):
        return None
    real = (on_host != 0).flatten().nonzero().flatten()
    row = torch.arange(batch).repeat_interleave(seqlen)
    keys = (row * seqlen + numbers.flatten())[real]
    _, lengths = keys.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    starts, last = real[ends - lengths], real[ends - 1]
    if not torch.equal(last - starts + 1, lengths):
        first = int((last - starts + 1 != lengths).nonzero()[0])
        raise ValueError(
            "attention_mask must have no zeros inside a document of a packed row, got "
            f"{int(last[first] - starts[first] + 1 - lengths[first])} in the one that begins at "
            f"token {int(starts[first]) % seqlen} of row {int(starts[first]) // seqlen}"
        )
    if starts[0] > 0:  # padding lies behind a document: here behind one without tokens
        starts, lengths = (torch.nn.functional.pad(one, (1, 0)) for one in (starts, lengths))
    segments = torch.cat([starts, starts.new_tensor([batch * seqlen])]).diff()
    if torch.equal(segments[:-1], lengths[:-1]):
        packed = PackedLayout.from_lengths(lengths, batch * seqlen)
    else:
        made = of_lengths_and_segments(lengths, segments, batch * seqlen, batch * seqlen)
        packed = PackedLayout(Records(made))
    return packed.to(mask.device)


# -------------------------------------------------------------------------------- in compiled code


def _in_compiled_code(
    door: _Door, model: nn.Module, told: dict[str, Any], rows: Tensor
) -> dict[str, Any]:
    """Return arguments in the place of those of a call, by their names and shapes alone."""
    changes = _offsets_by_other_names(told)
    positions = told.get("position_ids")
    if any(name in told or name in changes for name in DESCRIPTIONS):
        _check_planes(door, model, told)
        if _is_padding_mask(told):
            changes["attention_mask"] = None
    elif LENGTHS in told:
        offsets = torch.nn.functional.pad(told[LENGTHS].cumsum(0), (1, 0)).int()
        changes = {"cu_seq_lens_q": offsets}
    elif positions is None:
        for name in _NUMBERS:
            if name in told:
                return {"position_ids": counted(told[name].reshape(rows.shape[:2]))}
        if (
            not door.is_relative
            and "position_ids" in door.names
            and _is_padding_mask(told)
            and told["attention_mask"].dtype != torch.bool
        ):
            _warn_of_compiled_mask()
    elif door.makes_mask or door.chooses_keys or _makes_planes(model, positions):
        warn_of_compiled_positions()
    # Where they change nothing, the hook stays without operations, which would be a second graph.
    is_needed = not door.is_relative or rows.shape[0] > 1  # a document may go on in the next row
    if is_needed and _leaves_positions_to_model(door, told):
        now = told | changes
        found = positions_in_compiled_code(
            now.get("packed"), now.get("cu_seq_lens_q"), rows.shape[0] * rows.shape[1]
        )
        if found is not None:
            changes["position_ids"] = found.to(rows.device).view(rows.shape[:2])
    return changes


def positions_in_compiled_code(
    packed: PackedLayout | None, offsets: Tensor | None, tokens: int
) -> Tensor | None:
    """Return the positions `[tokens]` of a row by its layout or else by its offsets, if it has any.

    The layout's own `position_ids` may not be made yet. Making them in compiled code would cost a
    graph for each pack, and they would lie in memory that the next replay writes to.
    """
    padded = None
    if packed is not None:
        check_layout(packed)
        if (positions := own_positions(packed)) is not None:
            return positions
        offsets, padded = packed.cu_seqlens_static, packed.cu_seqlens_padded_static
    if offsets is None:
        return None
    return _positions_of_offsets(offsets, tokens, padded)


def _makes_planes(model: nn.Module, positions: Tensor) -> bool:
    """Return whether a model with M-RoPE makes its mask without these positions."""
    if positions.dim() == 3:
        return positions.shape[0] == 3
    return has_mrope(model)


def _check_planes(door: _Door, model: nn.Module, told: Mapping[str, Any]) -> None:
    """Raise ValueError if a model with M-RoPE would rotate the images of packed documents as text.

    Without positions it makes the planes itself if the call says which tokens are images.
    """
    if not any(name in told for name in PIXELS) or not has_mrope(model):
        return
    positions = told.get("position_ids")
    if positions is None:
        names = ("input_ids", "mm_token_type_ids")
        if "mm_token_type_ids" not in door.names or all(name in told for name in names):
            return
    elif positions.dim() == 3:
        return
    shape = "None" if positions is None else list(positions.shape)
    way = "the model's get_rope_index, document by document"
    if getattr(model.config, "model_type", None) in MODEL_TYPES:
        way = (
            "cuseq.vision.mrope_position_ids(input_ids, packed, config=model.config, "
            "image_grid_thw=image_grid_thw)"
        )
    raise ValueError(
        "position_ids must be planes of M-RoPE, [4, 1, total_tokens], for a row of documents with "
        f"images, which are rotated as text otherwise, got {shape}: make them with {way}"
    )


@torch.compiler.assume_constant_result  # the compiler calls it and puts None into the graph
def warn_of_compiled_positions() -> None:
    """Warn that packed positions are not read."""
    warn_once(
        "LEAKS if position_ids are packed: compiled code cannot read them, and only the masks of "
        "some models do; pass packed= to a model that is compiled as a whole"
    )


@torch.compiler.assume_constant_result
def _warn_of_compiled_mask() -> None:
    """Warn that a mask which numbers documents gives no positions."""
    warn_once(
        "LEAKS if attention_mask numbers documents: compiled code cannot read it, and this model's "
        "positions count along the row: pass position_ids that begin again, or packed="
    )


@torch.compiler.assume_constant_result
def warn_of_dense_mask() -> None:
    """Warn that layers with a state do not read a 4-D mask."""
    warn_once(
        "LEAKS if the 4-D attention_mask keeps documents apart: layers with a state along the row "
        "do not read it; pass packed= in its place"
    )
