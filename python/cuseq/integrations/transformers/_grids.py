"""The grids of the images and videos in a model's call, and the layouts made of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cuseq._base.arguments import shown
from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import copy_without_wait
from cuseq.cache import remember
from cuseq.integrations.transformers._features import check_rows, hand_rows
from cuseq.layout import PackedLayout
from cuseq.vision import VisionLayout
from cuseq.vision.positions import COLUMNS, Columns, check_capture
from cuseq.vision.static import FromGrids, StaticVisionLayout

_FACTS = "_cuseq_facts"  # an attribute of the grids that stand for a row of a fixed size


class Facts:
    """The layouts that vision towers need of some grids, and other values, made on the host once.

    Attributes:
        grids: int64 `[n, 3]` on the host.
    """

    def __init__(self, grids: Tensor, given: VisionLayout | None = None):
        self.grids = grids
        self._layouts = [] if given is None else [given]
        self._made: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def sequences(self, frames_apart: bool) -> PackedLayout:
        """Return the layout of the patches that see each other."""
        return self._layout(
            lambda one: one.frames_apart == frames_apart, merge_size=1, frames_apart=frames_apart
        ).images

    def places(self, merge_size: int) -> VisionLayout:
        """Return a layout whose `position_ids` are those of tokens of a size."""
        return self._layout(lambda one: one.merge_size == merge_size, merge_size=merge_size)

    def windows(self, merge_size: int, window: int, patch_size: int) -> VisionLayout:
        """Return a layout with windows of so many pixels."""
        sides = merge_size, window // merge_size // patch_size
        return self._layout(
            lambda one: (one.merge_size, one.window_side) == sides,
            merge_size=merge_size, window=window, patch_size=patch_size,
        )  # fmt: skip

    def _layout(self, fits: Callable[[VisionLayout], bool], **options: Any) -> VisionLayout:
        """Return a layout that fits: one that is there already, or one made with the options."""
        for layout in self._layouts:
            if fits(layout):
                return layout
        self._layouts.append(VisionLayout.from_grid(self.grids, **options))
        return self._layouts[-1]

    def derived(
        self, key: tuple[Hashable, ...], make: FromGrids, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return on a device what `make` computes of the grids; made once for a key."""
        if key not in self._made:
            self._made[key] = make(self.grids)
        if (key, device) not in self._made:
            self._made[key, device] = tuple(
                copy_without_wait(one, device) for one in self._made[key]
            )
        return self._made[key, device]

    def on_device(self, device: torch.device) -> Tensor:
        """Return grids on a device whose facts are these."""
        return note_facts(copy_without_wait(self.grids, device), self)


class StaticFacts(Facts):
    """The facts of a row of a fixed size, whose tensors stay while the images change.

    Models get the grid of one image as large as the row: what they compute of grids themselves, the
    sizes of pieces, then is the same for all rows.
    """

    def __init__(self, layout: StaticVisionLayout):
        merge, patches = layout.merge_size, layout.images.total_tokens
        super().__init__(torch.tensor([[1, merge, patches // merge]], device="cpu"), layout)
        self._static = layout
        self._told: dict[torch.device, Tensor] = {}

    def _layout(self, fits: Callable[[VisionLayout], bool], **options: Any) -> VisionLayout:
        if not fits(self._static):
            raise ValueError(
                f"image_layout must be the one that the tower asks for, {options}, got "
                f"{self._static}"
            )
        return self._static

    def derived(
        self, key: tuple[Hashable, ...], make: FromGrids, device: torch.device
    ) -> tuple[Tensor, ...]:
        """As `Facts.derived`, on the device of the layout."""
        return self._static.derived(key, make)

    def on_device(self, device: torch.device) -> Tensor:
        """Return grids on a device whose facts are these, always the same tensor."""
        if device not in self._told:
            self._told[device] = copy_without_wait(self.grids, device)
            setattr(self._told[device], _FACTS, self)
        return self._told[device]


def facts_of(grids: Tensor) -> Facts:
    """Return the facts of grids, made once for each tensor. Grids on a GPU are waited for."""
    static: StaticFacts | None = getattr(grids, _FACTS, None)
    if static is not None:
        return static

    def make() -> Facts:
        return Facts(grids.detach().to("cpu", torch.int64, copy=True))

    with outside_inference_mode():
        return remember(grids, "vision_facts", make, tensors=no_tensors)


def note_facts(grids: Tensor, facts: Facts) -> Tensor:
    """Remember the facts of grids that were just made; return the grids."""
    with outside_inference_mode():
        remember(grids, "vision_facts", lambda: facts, tensors=no_tensors)
    return grids


def no_tensors(value: Any) -> tuple[Tensor, ...]:
    """Return no tensors: those in a value of this module are never edited in place."""
    return ()


@torch.compiler.disable
def grids_of_call(model: nn.Module, told: Mapping[str, Any], on_host: bool) -> dict[str, Any]:
    """Return grids in the place of those of a call, whose facts are known without a wait.

    Args:
        model: the model.
        told: the keywords of the call.
        on_host: whether the grids come back on the host; those without a layout are waited for.

    Raises:
        ValueError: a layout is of other images than its grids, or has rows that the model does not
            take, or pixels have another number of patches.
        TypeError: a layout is not a `VisionLayout`.
    """
    changes = {}
    for columns in COLUMNS:
        name = columns.grids
        grids, layout = told.get(name), told.get(columns.layout)
        if layout is not None:
            _check_layout(layout, told, columns)
            check_rows(model, columns.layout, layout)
        if not isinstance(grids, Tensor):
            continue
        if isinstance(layout, StaticVisionLayout):
            _check_static(model)
            layout.facts = layout.facts or StaticFacts(layout)
            where = torch.device("cpu") if on_host else grids.device
            changes[name] = hand_rows(layout.facts.on_device(where), layout, name)
        elif layout is not None:
            facts = Facts(layout.filled_grids, layout)
            if on_host:
                told_on = facts.grids.clone()
            elif layout.room is not None:
                told_on = copy_without_wait(facts.grids, grids.device)
            else:
                told_on = grids.view_as(grids)
            changes[name] = hand_rows(note_facts(told_on, facts), layout, name)
        elif on_host and not grids.is_cpu:
            facts = facts_of(grids)
            changes[name] = note_facts(facts.grids.clone(), facts)
    return changes


def _check_static(model: nn.Module) -> None:
    """Raise ValueError unless a model and its tower compute nothing of grids themselves."""
    check_capture(model.config)
    if importlib.util.find_spec("transformers.vision_utils") is None:
        raise ValueError(
            "image_layout must not be that of a GraphedStep before transformers 5.9, whose towers "
            f"compute with grids themselves, got transformers {transformers.__version__}"
        )


def _check_layout(layout: Any, told: Mapping[str, Any], columns: Columns) -> None:
    if not isinstance(layout, VisionLayout):
        raise TypeError(f"{columns.layout} must be a VisionLayout, got {shown(layout)}")
    grids, pixels = told.get(columns.grids), told.get(columns.pixels)
    expected = layout.grid_thw
    if layout.room is not None:  # without images behind the last
        expected = nn.functional.pad(expected, (0, 0, 0, layout.room.images - len(expected)))
    if isinstance(grids, Tensor) and grids.shape != expected.shape:
        raise ValueError(
            f"{columns.layout} must be of the images of {columns.grids}, {list(grids.shape)}, got "
            f"{layout}"
        )
    if isinstance(grids, Tensor) and grids.is_cpu and not bool((grids == expected).all()):
        raise ValueError(
            f"{columns.layout} must be of the images of {columns.grids}, got one of others"
        )
    patches = layout.images.total_tokens
    if isinstance(pixels, Tensor) and pixels.dim() == 2 and pixels.shape[0] != patches:
        raise ValueError(
            f"{columns.pixels} must have the {patches} patches of {columns.layout}, got "
            f"{pixels.shape[0]}"
        )
