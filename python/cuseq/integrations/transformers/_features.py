"""The rows of a tower's output that the tokens of a call take, and where these tokens are.

Each token of an image takes one row of the tower's output, in order. A rank that has a part of a
row may hold a piece of an image, whose tower runs on all of it; its layout says which rows the
tokens take (`VisionLayout.feature_rows`). The hook at the model's door hands them on with the grids
of the call (`hand_rows`): the tensor has them as an attribute, since the identity cache may be off.
The method by which the model asks its tower for features is replaced by one that returns those rows
alone. A call whose rows did not reach it raises when it ends (`check_taken`).

A model finds the tokens by a mask, whose use waits for the GPU: to count its tokens, to find them
again in the backward, and in each layer that adds features. Where the layout says which they are
(`VisionLayout.token_rows`), the model gets `_Places` in the place of the mask.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cuseq.integrations.transformers._forwards import is_ours, our_forward
from cuseq.integrations.transformers._layers import calls_of
from cuseq.vision import VisionLayout
from cuseq.vision.static import StaticVisionLayout

_IMAGES, _VIDEOS = "get_image_features", "get_video_features"
_MASK, _DEEPSTACK = "get_placeholder_mask", "_deepstack_process"
_ROWS = "_cuseq_feature_rows"  # an attribute of grids


class Rows:
    """The rows that the tokens of a call take, on their way to the method that returns them."""

    def __init__(self, layout: VisionLayout, kind: str) -> None:
        self.layout, self.kind = layout, kind
        self.are_taken = False


def hand_rows(grids: Tensor, layout: VisionLayout, kind: str) -> Tensor:
    """Hand the rows of a layout on with its grids, the keyword `kind`; return the grids."""
    if layout.feature_rows is not None or layout.token_rows is not None:
        setattr(grids, _ROWS, Rows(layout, kind))
    return grids


def rows_handed(grids: Iterable[Tensor]) -> list[Rows]:
    """Return the rows that were handed on with grids."""
    return [one for one in (getattr(grid, _ROWS, None) for grid in grids) if one is not None]


def check_taken(handed: Iterable[Rows]) -> None:
    """Raise RuntimeError if a call ended without a method that took its rows."""
    for rows in handed:
        if not rows.are_taken and rows.layout.feature_rows is not None:
            raise RuntimeError(
                f"the feature_rows of {rows.layout} must reach the model's {_IMAGES} or {_VIDEOS} "
                "with their grids, which something copied on the way: move grids to the model's "
                "device before the call, and leave out hooks that copy them"
            )


def replace_features(model: nn.Module) -> None:
    """Replace the methods by which a model's own forward asks for features and for their tokens.

    Those that someone else has set on the model stay.
    """
    for name in _methods(model):
        own = vars(model).get(name)
        # A model that was loaded has its class's own.
        if own is None or getattr(own, "__func__", None) is getattr(type(model), name):
            setattr(model, name, types.MethodType(_REPLACEMENTS[name](type(model), name), model))


def restore_features(model: nn.Module) -> None:
    """Undo `replace_features`."""
    for name in _REPLACEMENTS:
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
    """Return the methods of a model's class that its forward calls and that are to be replaced."""
    called = [name for name in _REPLACEMENTS if name in calls_of(model)]
    called = [name for name in called if hasattr(type(model), name)]
    features = [name for name in called if name in (_IMAGES, _VIDEOS)]
    features = [name for name in features if _grids_of(type(model), name) is not None]
    if _IMAGES in features:  # it may serve videos too
        features = [
            name for name in features if name == _IMAGES or _IMAGES not in _names(type(model), name)
        ]
    return features + [
        name for name in called if name == _DEEPSTACK or (name == _MASK and _IMAGES in features)
    ]


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
        if rows is None or rows.layout.feature_rows is None:
            found = original(self, *args, **kwargs)
        else:
            found = original(self, *args, **kwargs | {"return_dict": True})
            found.pooler_output = _selected(found.pooler_output, rows)
            if getattr(found, "deepstack_features", None) is not None:
                found.deepstack_features = [
                    _selected(one, rows) for one in found.deepstack_features
                ]
        if not torch.compiler.is_compiling():
            if rows is None:  # of images or of videos: those of neither are known any more
                _last.rows.clear()
            else:
                _last.rows[rows.kind] = rows
        return found

    return our_forward(features, name)


class _Last(threading.local):
    def __init__(self) -> None:
        self.rows: dict[str, Rows] = {}  # by kind, of the features that the model asked for last


_last = _Last()


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


# ------------------------------------------------------------------------- the tokens of a call


class _Places:
    """The tokens of a row that take features, in the place of the mask of a model's forward.

    It does what the forwards of these models do with the mask: `masked_scatter` of features,
    `mask[..., 0]`, `images | videos`, `mask.sum()` and `images[both]`.

    Args:
        rows: int64 `[n]`, distinct, on the device of the embeddings.
        end: one more than the last of them, on the host.
        has_others: whether some are -1, features that no token takes.
    """

    def __init__(self, rows: Tensor, end: int, has_others: bool = False) -> None:
        self.rows, self.end, self.has_others = rows, end, has_others
        self._begins: dict[int, int] = {}  # of the parts of both, by identity

    def __or__(self, other: _Places) -> _Places:
        both = _Places(torch.cat([self.rows, other.rows]), max(self.end, other.end))
        both._begins = {id(self): 0, id(other): len(self.rows)}
        return both

    def __getitem__(self, index: Any) -> _Places | Tensor:
        if not isinstance(index, _Places):
            return self
        begin = index._begins[id(self)]
        return torch.arange(begin, begin + len(self.rows), device=self.rows.device)

    def sum(self) -> int:
        """Return the number of tokens."""
        return len(self.rows)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.masked_scatter:
            return NotImplemented
        embeddings, places, features = args
        return places._changed(embeddings, features, torch.index_copy)

    def add(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return hidden states with features added to those of the tokens."""
        return self._changed(hidden, features.to(hidden.device, hidden.dtype), torch.index_add)

    def _changed(self, hidden: Tensor, features: Tensor, change: Callable[..., Tensor]) -> Tensor:
        """Return hidden states in which the rows of the tokens are changed by their features."""
        flat = self._checked(hidden, features)
        if not self.has_others:
            return change(flat, 0, self.rows, features).view_as(hidden)
        # The others go to a row of no token.
        last = flat.shape[0]
        rows = torch.where(self.rows < 0, last, self.rows)
        longer = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
        return change(longer, 0, rows, features)[:last].view_as(hidden)

    def _checked(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return hidden states as `[tokens, channels]`; raise unless each token has its feature."""
        flat = hidden.flatten(0, -2)
        if features.shape[0] != len(self.rows):
            raise ValueError(
                f"token_rows must have a token for each of {features.shape[0]} features of images "
                f"or videos, got {len(self.rows)}"
            )
        if self.end > flat.shape[0]:
            raise ValueError(
                f"token_rows must be below the {flat.shape[0]} tokens of the call, got "
                f"{self.end - 1}"
            )
        return flat


def _places_of(layout: VisionLayout, embeddings: Tensor) -> _Places:
    if isinstance(layout, StaticVisionLayout):
        layout.check_text(embeddings.shape[:-1].numel())
    rows = layout.to(embeddings.device).token_rows
    assert rows is not None
    return _Places(rows, layout.tokens_end, layout.room is not None)


# By the keyword of grids, the argument of the method for the features of those.
_FEATURES = {"image_grid_thw": "image_features", "video_grid_thw": "video_features"}


@functools.cache
def _placing(cls: type, name: str) -> Callable[..., Any]:
    """Return a class's method that returns the places of the features that were asked for last."""
    original = getattr(cls, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        told = signature.bind(self, *args, **kwargs).arguments
        asked = [one for one, of in _FEATURES.items() if told.get(of) is not None]
        rows = {one: _last.rows.pop(one, None) for one in asked}
        if any(one is None or one.layout.token_rows is None for one in rows.values()):
            return original(self, *args, **kwargs)
        embeddings: Tensor = told["inputs_embeds"]
        places = {
            one: _places_of(of.layout, embeddings) for one, of in rows.items() if of is not None
        }
        found = tuple(places.get(one) for one in _FEATURES)
        return found if "video_features" in signature.parameters else found[0]

    return our_forward(mask, name)


@functools.cache
def _adding(cls: type, name: str) -> Callable[..., Any]:
    """Return a class's method that adds features to the hidden states of their tokens."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def add(self: nn.Module, hidden: Tensor, where: Any, features: Tensor) -> Tensor:
        if isinstance(where, _Places):
            return where.add(hidden, features)
        return original(self, hidden, where, features)

    return our_forward(add, name)


_REPLACEMENTS = {_IMAGES: _selecting, _VIDEOS: _selecting, _MASK: _placing, _DEEPSTACK: _adding}
