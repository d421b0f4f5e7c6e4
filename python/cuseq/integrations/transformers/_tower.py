"""Vision and audio towers: one attention call a layer, and their facts once a step.

transformers packs the images of a batch into one row. Unless the name of its attention contains
"flash", it then splits queries, keys and values at the offsets, which waits three times a layer,
and attends to one image or window at a time. `enable` gives the attention layers of a tower a name
with "flash" in it, which stands for `cuseq_tower_attention`.

What a tower needs of its grids (offsets, places, windows) comes from functions of
`transformers.vision_utils`. Those are replaced in the tower's modeling module: they read the grids
on the host, once for each tensor, and `VisionLayout` does the arithmetic. A hook on the tower
copies grids that lie on the host to the device of the pixels, and remembers their values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cuseq._base.modes import outside_inference_mode
from cuseq.cache import remember
from cuseq.integrations.transformers._functions import Place, replace_function
from cuseq.integrations.transformers._grids import (
    Facts,
    facts_of,
    no_tensors,
)
from cuseq.integrations.transformers._layers import attends, calls_of, code_of
from cuseq.integrations.transformers.documents import (
    NAMES,
    names_of_call,
)
from cuseq.layout import (
    PackedLayout,
    StaticLayout,
    note_layout_of_offsets,
    offsets_of_static,
    static_layout_of,
)
from cuseq.vision.positions import LAYOUTS

_GRIDS = ("grid_thw", "image_grid_thw")
_OF_TEXT = frozenset({*NAMES, *LAYOUTS, "max_length_q", "max_length_k"}) - {
    "attention_mask",
    "position_ids",
}  # what a model hands on to its tower


# ------------------------------------------------------------------------------ finding the layers


def find_tower_layers(
    base: PreTrainedModel, layers: list[nn.Module]
) -> tuple[list[nn.Module], list[str]]:
    """Return the attention layers of a model's towers that take offsets, and what is left alone.

    Args:
        base: the model.
        layers: the attention layers of its text part.
    """
    text = {id(layer.config) for layer in layers}
    found, left_alone = [], {}
    for layer in base.modules():
        if not _takes_offsets(layer):
            continue
        dropout = getattr(layer, "attention_dropout", 0.0)
        if isinstance(dropout, float) and dropout:
            why = f"it drops attention weights (attention_dropout={dropout})"
            left_alone[type(layer).__name__] = why
        elif id(layer.config) in text:
            left_alone[type(layer).__name__] = "it shares its config with the text part"
        else:
            found.append(layer)
    return found, [f"tower:{name}: {why}" for name, why in sorted(left_alone.items())]


def _takes_offsets(layer: nn.Module) -> bool:
    """Return whether an attention layer hands offsets to an attention with "flash" in its name."""
    return (
        "is_flash_attention_requested" in calls_of(layer)
        and attends(layer)
        and "cu_seqlens" in inspect.signature(type(layer).forward).parameters
    )


def _towers_of(base: PreTrainedModel, layers: list[nn.Module]) -> list[PreTrainedModel]:
    """Return the smallest models around the layers."""
    found: dict[nn.Module, PreTrainedModel] = {}
    for model in base.modules():  # those inside come after those around them
        if isinstance(model, PreTrainedModel):
            found |= dict.fromkeys(model.modules(), model)
    return list(dict.fromkeys(found[layer] for layer in layers))


# ------------------------------------------------------------------------------------- the grids


def _bring_grids(
    names: tuple[str, ...],
    of_text: frozenset[str],
    tower: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take the text's documents out of a tower's call, and bring its grids to the pixels' device; a
    forward pre-hook.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if name not in of_text}
    values = (one for one in given.values() if isinstance(one, Tensor) and one.is_floating_point())
    pixels = next(values, None)
    for name in _GRIDS:
        grids = given.get(name)
        if isinstance(grids, Tensor) and pixels is not None and grids.device != pixels.device:
            given[name] = _on_device(grids, pixels.device)
    return (), given


@torch.compiler.disable
def _on_device(grids: Tensor, device: torch.device) -> Tensor:
    return facts_of(grids).on_device(device)


# ------------------------------------------------------- the functions that towers ask for facts


def _offsets(layout: PackedLayout) -> Tensor:
    """Return the offsets of a layout, by which attention finds the layout again."""
    if isinstance(layout, StaticLayout):
        return offsets_of_static(layout)
    # Without images one sequence without patches: towers of some releases take the longest.
    offsets = layout.cu_seqlens if layout.num_sequences else layout.cu_seqlens_static[:2]
    offsets = offsets.detach()  # a tensor of its own, which the layout does not hold
    note_layout_of_offsets(offsets, layout)
    with outside_inference_mode():
        remember(offsets, "vision_longest", lambda: layout.max_seqlen, tensors=no_tensors)
    return offsets


def _longest_of(layout: PackedLayout) -> int:
    """Return the longest sequence of a layout; of a static one, that of all its rows."""
    if isinstance(layout, StaticLayout):
        return layout.max_seqlen_bound or layout.total_tokens
    return layout.max_seqlen


def _cu_seqlens(facts: Facts, device: torch.device, merge_temporal: bool = False) -> Tensor:
    return _offsets(facts.sequences(not merge_temporal).to(device))


def _attention_seqlens(
    facts: Facts, device: torch.device, config: Any, merge_temporal: bool = False
) -> tuple[Tensor, int]:
    layout = facts.sequences(not merge_temporal).to(device)
    return _offsets(layout), _longest_of(layout)


def _position_ids(
    facts: Facts, device: torch.device, spatial_merge_size: int, include_temporal: bool = False
) -> Tensor:
    places = facts.places(spatial_merge_size).to(device).position_ids
    if not include_temporal:
        return places

    def frames(grids: Tensor) -> tuple[Tensor]:
        count, height, width = grids.unbind(1)
        patches = (height * width).repeat_interleave(count)
        number = torch.cat([torch.arange(int(n), device="cpu") for n in count] or [count])
        return (number.repeat_interleave(patches),)

    (number,) = facts.derived(("frames",), frames, device)
    return torch.cat([number[:, None], places], dim=1)


def _window_index(
    facts: Facts,
    device: torch.device,
    spatial_merge_size: int,
    window_size: int,
    patch_size: int,
) -> tuple[Tensor | None, Tensor]:
    layout = facts.windows(spatial_merge_size, window_size, patch_size).to(device)
    assert layout.windows is not None
    return layout.window_index, _offsets(layout.windows)


# By name: what computes it, None for transformers' own function on the host; and the names by which
# a caller may give its results.
_HELPERS: dict[str, tuple[Callable[..., Any] | None, tuple[str, ...]]] = {
    "get_vision_cu_seqlens": (_cu_seqlens, ("cu_seqlens",)),
    "get_vision_attention_seqlens": (_attention_seqlens, ("cu_seqlens", "max_seqlen")),
    "get_vision_position_ids": (_position_ids, ("position_ids",)),
    "get_vision_window_index": (_window_index, ("window_index", "cu_window_seqlens")),
    "get_vision_interpolation_indices_and_weights": (None, ("interp_indices", "interp_weights")),
    "get_vision_bilinear_indices_and_weights": (None, ("bilinear_indices", "bilinear_weights")),
}
_LONGEST = "get_max_seqlen"
_HOMES = ("transformers.vision_utils", "transformers.utils.generic")


def _helper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    ours, keys = _HELPERS[name]
    parameters = inspect.signature(original)

    @torch.compiler.disable
    def on_host(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        told = parameters.bind(*args, **options).arguments
        given = told.pop("kwargs", None) or {}
        grids = told.pop("grid_thw")
        is_plain = type(grids) is Tensor and not grids.is_meta
        if not is_plain or any(isinstance(one, Tensor) for one in told.values()):
            return original(*args, **options)
        for key in keys:
            given.pop(key, None)
        facts, device = facts_of(grids), grids.device
        if ours is not None:
            return ours(facts, device, **told)
        key = name, *sorted(told.items())
        return facts.derived(key, lambda grids: original(grids, **told), device)

    @functools.wraps(original)
    def helper(*args: Any, **options: Any) -> Any:
        given = options.get("kwargs")
        if given is not None and any(given.get(key) is not None for key in keys):
            return original(*args, **options)
        return on_host(args, options)

    return helper


def _longest(original: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    def known(cu_seqlens: Tensor, config: Any) -> int | None:
        static = static_layout_of(cu_seqlens)
        if static is not None:
            return _longest_of(static)
        with outside_inference_mode():
            make = functools.partial(original, cu_seqlens.detach(), config)
            return remember(cu_seqlens, "vision_longest", make, tensors=no_tensors)

    @functools.wraps(original)
    def get_max_seqlen(
        cu_seqlens: Tensor, config: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen"
    ) -> Any:
        if kwargs is not None and kwargs.get(kwarg_name) is not None:
            return kwargs.pop(kwarg_name)
        if kwargs is not None:
            kwargs.pop(kwarg_name, None)
        return known(cu_seqlens, config)

    return get_max_seqlen


def replace_tower(
    base: PreTrainedModel, layers: list[nn.Module]
) -> tuple[list[Place], list[RemovableHandle]]:
    """Make the towers around some layers read their grids once a step.

    Returns:
        The functions that were replaced, each of which `_functions.restore_function` restores, and
        the hooks.
    """
    places = []
    for code in dict.fromkeys(map(code_of, layers)):
        for name in (*_HELPERS, _LONGEST):
            home = getattr(inspect.unwrap(getattr(code, name, None) or len), "__module__", None)
            if home in _HOMES:
                make = _longest if name == _LONGEST else functools.partial(_helper, name)
                replace_function(code, name, make)
                places.append((code, name))
    hooks = []
    for tower in _towers_of(base, layers):
        parameters = inspect.signature(type(tower).forward).parameters.values()
        required = {one.name for one in parameters if one.default is one.empty}
        # A tower that must get offsets gets its own (PaddleOCR-VL before transformers 5.9).
        bring = functools.partial(_bring_grids, names_of_call(tower), _OF_TEXT - required)
        hooks.append(tower.register_forward_pre_hook(bring, with_kwargs=True, prepend=True))
    return places, hooks
