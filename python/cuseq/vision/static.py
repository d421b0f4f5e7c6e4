"""`StaticVisionLayout`: a layout of images whose tensors stay where they are, for a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cuseq._base.modes import is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_without_wait
from cuseq.layout import OtherSize, StaticLayout
from cuseq.vision.layout import VisionLayout

# Makes tensors for a tower of grids [n, 3], both on the host.
FromGrids = Callable[[Tensor], tuple[Tensor, ...]]


class StaticVisionLayout(VisionLayout):
    """A layout of images in a row of a fixed size, which `load` fills again between replays.

    Args:
        layout: a layout with `total_patches` and `max_images`.
        device: where the tensors are.
        name: what the layout is called in messages.

    Attributes:
        facts: what the integration of a model's tower keeps beside it, None at first.

    Raises:
        ValueError: the layout is not that of a row of a fixed size.
    """

    def __init__(self, layout: VisionLayout, device: torch.device, name: str):
        if layout.room is None:
            raise ValueError(
                f"{name} must be of a row of a fixed size, got {layout}: give "
                "MultimodalPackingCollator image_capacity and max_images"
            )
        moved = layout.to(device)

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone()

        with outside_inference_mode():
            windows = None
            if moved.windows is not None:
                windows = StaticLayout.like(moved.windows, device)
                windows.max_seqlen_bound = (layout.window_side * layout.merge_size) ** 2
            super().__init__(
                layout._recipe,
                StaticLayout.like(moved.images, device),
                windows,
                moved.position_ids.clone(),
                own(moved.window_index),
                None,
                own(moved.token_rows),
            )
        self.facts: Any = None
        self._derived: dict[Hashable, tuple[FromGrids, tuple[Tensor, ...]]] = {}
        self._text_tokens: int | None = None

    def derived(self, key: Hashable, make: FromGrids) -> tuple[Tensor, ...]:
        """Return tensors on the device that are those of `make(grids)`, and follow `load`.

        The grids are those of a full row, so that the tensors keep their shapes.
        """
        if key not in self._derived:
            if is_capturing(self.device):
                raise RuntimeError(
                    f"{key} must be computed in a step before the capture: it comes from the host"
                )
            with outside_inference_mode():
                made = make(self.filled_grids)
                copies = tuple(copy_without_wait(one, self.device).clone() for one in made)
            self._derived[key] = make, copies
        return self._derived[key][1]

    def check_text(self, tokens: int) -> None:
        """Raise ValueError unless `token_rows` are below the tokens of the text's row; rows that
        `load` gets must be too.
        """
        self._text_tokens = tokens
        _check_tokens(self, tokens)

    def check_form(self, layout: VisionLayout) -> None:
        """Raise ValueError unless `load(layout)` is possible: OtherSize if only sizes differ."""
        for name in ("merge_size", "window_side", "frames_apart", "room"):
            mine, other = getattr(self, name), getattr(layout, name)
            if mine != other:
                error = OtherSize if name == "room" else ValueError
                raise error(f"other must have the same {name}: {mine}, got {other}")
        for name in ("images", "windows"):
            mine, other = getattr(self, name), getattr(layout, name)
            if mine is not None:
                mine.check_form(other)
        if self._text_tokens is not None:
            _check_tokens(layout, self._text_tokens)

    def load(self, layout: VisionLayout) -> None:
        """Describe the images of another row, by asynchronous copies on a GPU; `check_form` came
        before.
        """
        self._recipe, self.grid_thw, self.tokens = layout._recipe, layout.grid_thw, layout.tokens
        for name in ("images", "windows"):
            mine, other = getattr(self, name), getattr(layout, name)
            if mine is not None:
                mine.load(other)
        with outside_inference_mode():
            for name in ("position_ids", "window_index", "token_rows"):
                mine, other = getattr(self, name), getattr(layout, name)
                if mine is not None:
                    mine.copy_(copy_without_wait(other, self.device))
            for make, targets in self._derived.values():
                for target, made in zip(targets, make(self.filled_grids), strict=True):
                    target.copy_(copy_without_wait(made, self.device))


def _check_tokens(layout: VisionLayout, tokens: int) -> None:
    if layout.tokens_end > tokens:
        raise ValueError(
            f"token_rows must be below the {tokens} tokens of the call, got {layout.tokens_end - 1}"
        )
