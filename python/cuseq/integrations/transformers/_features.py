"""The rows of a tower's output that the tokens of a call take.

Each token of an image takes one row of the tower's output, in order. A rank that has a part of a
row may hold a piece of an image, whose tower runs on all of it; its layout says which rows the
tokens take (`VisionLayout.feature_rows`). The hook at the model's door hands them on with the grids
of the call (`hand_rows`): the tensor has them as an attribute, since the identity cache may be off.
The method by which the model asks its tower for features is replaced by one that returns those rows
alone. A call whose rows did not reach it raises when it ends (`check_taken`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cuseq.integrations.transformers._forwards import is_ours, our_forward
from cuseq.integrations.transformers._layers import calls_of
from cuseq.vision import VisionLayout

_IMAGES, _VIDEOS = "get_image_features", "get_video_features"
_ROWS = "_cuseq_feature_rows"  # an attribute of grids


class Rows:
    """The rows that the tokens of a call take, on their way to the method that returns them."""

    def __init__(self, layout: VisionLayout) -> None:
        self.layout = layout
        self.are_taken = False


def hand_rows(grids: Tensor, layout: VisionLayout) -> Tensor:
    """Hand the rows of a layout on with its grids; return the grids."""
    if layout.feature_rows is not None:
        setattr(grids, _ROWS, Rows(layout))
    return grids


def rows_handed(grids: Iterable[Tensor]) -> list[Rows]:
    """Return the rows that were handed on with grids."""
    return [one for one in (getattr(grid, _ROWS, None) for grid in grids) if one is not None]


def check_taken(handed: Iterable[Rows]) -> None:
    """Raise RuntimeError if a call ended without a method that took its rows."""
    for rows in handed:
        if not rows.are_taken:
            raise RuntimeError(
                f"the feature_rows of {rows.layout} must reach the model's {_IMAGES} or {_VIDEOS} "
                "with their grids, which something copied on the way: move grids to the model's "
                "device before the call, and leave out hooks that copy them"
            )


def replace_features(model: nn.Module) -> None:
    """Replace the methods by which a model's own forward asks its tower for features.

    Those that someone else has set on the model stay.
    """
    for name in _methods(model):
        own = vars(model).get(name)
        # A model that was loaded has its class's own.
        if own is None or getattr(own, "__func__", None) is getattr(type(model), name):
            setattr(model, name, types.MethodType(_selecting(type(model), name), model))


def restore_features(model: nn.Module) -> None:
    """Undo `replace_features`."""
    for name in (_IMAGES, _VIDEOS):
        if _is_replaced(model, name):
            delattr(model, name)


def check_rows(model: nn.Module, name: str, layout: VisionLayout) -> None:
    """Raise ValueError if no part of a model takes the `feature_rows` of a layout.

    Args:
        model: the model.
        name: the keyword of the layout.
        layout: the layout.
    """
    if layout.feature_rows is None:
        return
    if not any(_is_replaced(one, _IMAGES) for one in model.modules()):
        raise ValueError(
            f"{name} must not have feature_rows for a {type(model).__name__} without a "
            f"{_IMAGES} that takes them, got {layout}: call cuseq.enable(model)"
        )


def _is_replaced(model: nn.Module, name: str) -> bool:
    return is_ours(getattr(vars(model).get(name), "__func__", None))


def _methods(model: nn.Module) -> list[str]:
    """Return the methods of a model's class that its forward calls, and that call no other."""
    found = [name for name in (_IMAGES, _VIDEOS) if name in calls_of(model)]
    found = [name for name in found if _grids_of(type(model), name) is not None]
    return [name for name in found if name == _IMAGES or _IMAGES not in _names(type(model), name)]


def _names(cls: type, name: str) -> tuple[str, ...]:
    return inspect.unwrap(getattr(cls, name)).__code__.co_names


def _grids_of(cls: type, name: str) -> tuple[int, str] | None:
    """Return which argument of a method is the grids, by place and name."""
    parameters = list(inspect.signature(getattr(cls, name)).parameters)[1:]
    return next(((i, one) for i, one in enumerate(parameters) if one.endswith("grid_thw")), None)


@functools.cache
def _selecting(cls: type, name: str) -> Callable[..., Any]:
    """Return a class's method that returns the rows which were handed on with its grids."""
    original, of_grids = getattr(cls, name), _grids_of(cls, name)
    assert of_grids is not None
    place, keyword = of_grids

    @functools.wraps(original)
    def features(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        grids = args[place] if len(args) > place else kwargs.get(keyword)
        rows = _take(grids)
        if rows is None:
            return original(self, *args, **kwargs)
        found = original(self, *args, **kwargs | {"return_dict": True})
        found.pooler_output = _selected(found.pooler_output, rows)
        if getattr(found, "deepstack_features", None) is not None:
            found.deepstack_features = [_selected(one, rows) for one in found.deepstack_features]
        return found

    return our_forward(features, name)


@torch.compiler.disable
def _take(grids: Any) -> Rows | None:
    rows = getattr(grids, _ROWS, None)
    if rows is not None:
        rows.are_taken = True
    return rows


def _selected(features: Tensor | list[Tensor] | tuple[Tensor, ...], rows: Rows) -> Any:
    """Return rows of features `[n, ...]`, in one piece if they come image by image."""
    whole = features if isinstance(features, Tensor) else torch.cat(tuple(features))
    taken = whole.index_select(0, _on_device(rows, whole.device))
    return taken if isinstance(features, Tensor) else (taken,)


@torch.compiler.disable
def _on_device(rows: Rows, device: torch.device) -> Tensor:
    taken = rows.layout.to(device).feature_rows
    assert taken is not None
    return taken
