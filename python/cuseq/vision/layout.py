"""`VisionLayout`: where the patches of images lie in the row of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import as_device, as_int, check_flag, shown
from cuseq._base.modes import is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_without_wait, with_index
from cuseq.layout import PackedLayout
from cuseq.vision.positions import grids_of, numbers_on_host, values_of


class Room(NamedTuple):
    """How much a row of a fixed size holds."""

    patches: int
    images: int


class _Recipe(NamedTuple):
    """The arguments that determine a `VisionLayout`.

    `side` is that of a window of attention in tokens, 0 without windows. `feature_rows` and
    `token_rows` are on the host. `room` is that for images in a row of a fixed size.
    """

    grid_thw: Tensor
    merge: int
    side: int
    frames_apart: bool
    feature_rows: Tensor | None
    token_rows: Tensor | None
    room: Room | None

    @property
    def filled_grids(self) -> Tensor:
        """The grids, and that of an image which would fill the rest of a row of a fixed size."""
        rest = 0 if self.room is None else self.room.patches - int(self.grid_thw.prod(1).sum())
        if rest == 0:
            return self.grid_thw
        filler = torch.tensor([[1, self.merge, rest // self.merge]], device="cpu")
        return torch.cat([self.grid_thw, filler])


class VisionLayout:
    """Where the patches of images and videos lie in the row of a vision tower; made by `from_grid`.

    It holds no pixels. Make it in the collator, where grids are still on the host, so that nothing
    waits for the GPU. It is immutable.

    Attributes:
        grid_thw: int64 `[n_images, 3]` on the host, frames, height and width of each in patches.
        images: the layout of the row: a sequence is a frame, or an image with all its frames.
        windows: the layout of the row in the order of the windows; None without them.
        position_ids: int64 `[patches, 2]`, row and column of each patch in its image.
        window_index: int64 `[tokens]`, the tokens in the order of the windows; None without them.
        tokens: int64 `[n_images]` on the host, tokens of each image in the text.
        feature_rows: int64 `[n]`, the rows of the tower's output that the tokens of a rank's part
            of a row take, in their order; None if the tokens take all rows in order.
        token_rows: int64 `[n]`, which tokens of the text's row take them, ascending; None if the
            layout does not say, so that the model looks for them. In a row of a fixed size one for
            each row of the tower's output, -1 for those that no token takes.

    Examples:
        >>> rows = cuseq.vision.VisionLayout.from_grid([[1, 4, 6], [1, 2, 2]])
        >>> rows
        VisionLayout(2 images, 28 patches, 7 tokens, cpu)
        >>> rows.images.lengths.tolist(), rows.position_ids[4].tolist()
        ([24, 4], [0, 2])
    """

    def __init__(
        self,
        recipe: _Recipe,
        images: PackedLayout,
        windows: PackedLayout | None,
        position_ids: Tensor,
        window_index: Tensor | None,
        feature_rows: Tensor | None,
        token_rows: Tensor | None,
    ):
        if not isinstance(recipe, _Recipe):
            raise TypeError(
                "VisionLayout is made by from_grid, as VisionLayout.from_grid([[1, 4, 6]]), got "
                f"{shown(recipe)}"
            )
        self._recipe = recipe
        self.grid_thw = recipe.grid_thw
        self.images, self.windows = images, windows
        self.position_ids, self.window_index = position_ids, window_index
        self.feature_rows, self.token_rows = feature_rows, token_rows
        self.tokens = self.grid_thw.prod(1) // recipe.merge**2
        self._moved: dict[torch.device, VisionLayout] = {}

    @classmethod
    def from_grid(
        cls,
        grid_thw: Tensor | Sequence[Sequence[int]],
        *,
        merge_size: int = 2,
        patch_size: int = 14,
        window: int | None = None,
        frames_apart: bool = True,
        feature_rows: Tensor | Sequence[int] | None = None,
        token_rows: Tensor | Sequence[int] | None = None,
        total_patches: int | None = None,
        max_images: int | None = None,
    ) -> VisionLayout:
        """Make the layout of images from their grids.

        Args:
            grid_thw: integers `[n_images, 3]`, frames, height and width of each image or video in
                patches, as the processor returns them.
            merge_size: patches along each side of a token of the text (`spatial_merge_size`).
                Heights and widths are multiples of it.
            patch_size: side of a patch in pixels; counts only with `window`.
            window: side of a window of attention in pixels (`window_size` of Qwen2.5-VL), at least
                `merge_size * patch_size`; None if no layer has windows. Windows begin at the top
                left of each frame, and those at its other borders are smaller.
            frames_apart: whether the frames of a video do not see each other (Qwen-VL, GLM-4V).
                Windows never reach over frames.
            feature_rows: integers `[n]`, the rows of the tower's output that the tokens of a row
                take, in their order; None if they take all rows in order. For a rank's part of a
                row, which may hold a piece of an image, or none of it (`n` = 0). An enabled model
                takes them.
            token_rows: integers `[n]`, which tokens of the text's row (of all rows of a batch, one
                after the other) take features, ascending. An enabled model then waits for the GPU
                neither to find nor to count them. None: it looks for them.
            total_patches: patches of the row in memory, a multiple of `merge_size` squared, for a
                row of a fixed size, which a `cuseq.GraphedStep` captures; patches behind the last
                image are the tail, which nothing sees. None: those of the images.
            max_images: images, or frames that do not see each other, that a row of a fixed size
                has room for, fewer than its tokens.

        Returns:
            The layout, on the host. Patches lie in the order of the processor: image after image,
            frame after frame, token after token.

        Raises:
            ValueError: a size of a grid is below 1 or not a multiple of `merge_size`; there are
                more than 2^31 - 1 patches; `window` is smaller than a token; a row of
                `feature_rows` is not below the number of tokens; `token_rows` do not ascend, or are
                not as many as `feature_rows`; `total_patches` and `max_images` are not given
                together, with `token_rows` and without `feature_rows`; there are more patches or
                images than these; or an argument is outside its range.
            TypeError: an argument has the wrong type.

        Grids on a GPU are copied from there, which waits.
        """
        merge = as_int(merge_size, "merge_size", 1)
        patch = as_int(patch_size, "patch_size", 1)
        check_flag(frames_apart, "frames_apart")
        side = 0
        if window is not None:
            side = as_int(window, "window", 1) // merge // patch
            if side == 0:
                raise ValueError(
                    f"window must be at least merge_size * patch_size = {merge * patch} pixels, "
                    f"got {window}"
                )
        with outside_inference_mode():
            grids = grids_of(grid_thw, "grid_thw").clone()
            lengths, places, index, windows = _C.vision_rows(grids, merge, side, frames_apart)
            patches, sequences, most_windows = None, None, None
            room = _room_of(total_patches, max_images, merge, len(places), len(lengths))
            rows = None
            if feature_rows is not None:
                rows = _rows_of(feature_rows, int(grids.prod(1).sum()) // merge**2)
            tokens = None if token_rows is None else _tokens_of(token_rows, rows)
            recipe = _Recipe(grids, merge, side, frames_apart, rows, tokens, room)
            if room is not None:
                if tokens is None or rows is not None:
                    raise ValueError(
                        "token_rows must be given with total_patches, and feature_rows must not"
                    )
                patches, sequences = room
                most_windows = patches // merge**2
                _, places, index, _ = _C.vision_rows(recipe.filled_grids, merge, side, frames_apart)
                if len(tokens) > most_windows:
                    raise ValueError(
                        f"token_rows must be at most total_patches / merge_size^2 = "
                        f"{most_windows}, got {len(tokens)}"
                    )
                tokens = torch.nn.functional.pad(tokens, (0, most_windows - len(tokens)), value=-1)
            return cls(
                recipe,
                PackedLayout.from_lengths(lengths, patches, max_seqs=sequences),
                PackedLayout.from_lengths(windows, patches, max_seqs=most_windows)
                if side > 0
                else None,
                places,
                index if side > 0 else None,
                rows,
                tokens,
            )

    @property
    def merge_size(self) -> int:
        """Patches along each side of a token."""
        return self._recipe.merge

    @property
    def window_side(self) -> int:
        """Tokens along each side of a window, 0 without windows."""
        return self._recipe.side

    @property
    def frames_apart(self) -> bool:
        """Whether the frames of a video do not see each other."""
        return self._recipe.frames_apart

    @property
    def room(self) -> Room | None:
        """The patches and images that a row of a fixed size holds; None for any other row."""
        return self._recipe.room

    @property
    def filled_grids(self) -> Tensor:
        """The grids, and that of an image which would fill the rest of a row of a fixed size."""
        return self._recipe.filled_grids

    @property
    def tokens_end(self) -> int:
        """One more than the last of `token_rows`, 0 without any."""
        tokens = self._recipe.token_rows
        return 0 if tokens is None or not len(tokens) else int(tokens[-1]) + 1

    @property
    def device(self) -> torch.device:
        """The device of all but `grid_thw` and `tokens`."""
        return self.images.device

    def to(
        self, device: torch.device | str | int | None, non_blocking: bool = True
    ) -> VisionLayout:
        """Return this layout on `device`: itself if it is there already, else a memoised copy.

        As with a tensor, None keeps the device. The copy to a GPU goes through pinned memory and
        never waits, whatever the value of `non_blocking`.
        """
        target = self.device if device is None else with_index(as_device(device, "device"))
        if target == self.device:
            return self
        if target not in self._moved:
            if is_capturing(target):
                raise RuntimeError(
                    f"a layout on {self.device} cannot be moved to {target} while a CUDA graph is "
                    "captured: move it before the capture"
                )

            def copied(one: Tensor | None) -> Tensor | None:
                return None if one is None else copy_without_wait(one, target)

            with outside_inference_mode():
                moved = VisionLayout(
                    self._recipe,
                    self.images.to(target),
                    None if self.windows is None else self.windows.to(target),
                    copy_without_wait(self.position_ids, target),
                    copied(self.window_index),
                    copied(self.feature_rows),
                    copied(self.token_rows),
                )
            self._moved.setdefault(target, moved)
        return self._moved[target]

    def __reduce__(self) -> tuple[Any, ...]:
        grids, *rest, rows, tokens, room = self._recipe
        listed = (None if one is None else one.tolist() for one in (rows, tokens))
        return _again, (grids.tolist(), *rest, *listed, room, str(self.device))

    def __copy__(self) -> VisionLayout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> VisionLayout:
        return self

    def __repr__(self) -> str:
        windows = "" if self.windows is None else f", {self.windows.num_sequences} windows"
        taken = "" if self.feature_rows is None else f", {len(self.feature_rows)} taken"
        patches = str(int(self.grid_thw.prod(1).sum()))
        if self.room is not None:
            patches += f" of {self.room.patches}"
        return (
            f"VisionLayout({len(self.grid_thw)} images, {patches} patches, "
            f"{int(self.tokens.sum())} tokens{taken}{windows}, {self.device})"
        )


def layout_of_config(
    config: Any,
    grid_thw: Tensor,
    feature_rows: Tensor | None = None,
    token_rows: Tensor | None = None,
    room: Room | None = None,
) -> VisionLayout:
    """Return the layout of images for the tower of a model's config."""
    tower, (patches, images) = config.vision_config, room or (None, None)
    return VisionLayout.from_grid(
        grid_thw,
        merge_size=tower.spatial_merge_size,
        patch_size=getattr(tower, "patch_size", 1),
        window=getattr(tower, "window_size", None),
        feature_rows=feature_rows,
        token_rows=token_rows,
        total_patches=patches,
        max_images=images,
    )


def _room_of(
    total_patches: Any, max_images: Any, merge: int, patches: int, images: int
) -> Room | None:
    """Return the room of a row of a fixed size, None for any other; check that the row fits."""
    if total_patches is None and max_images is None:
        return None
    if total_patches is None or max_images is None:
        missing = "total_patches" if total_patches is None else "max_images"
        raise ValueError(f"total_patches and max_images must be given together, {missing} is None")
    room = Room(as_int(total_patches, "total_patches", 1), as_int(max_images, "max_images", 1))
    if room.patches % merge**2:
        raise ValueError(
            f"total_patches must be a multiple of merge_size^2 = {merge**2}, got {room.patches}"
        )
    if room.images >= room.patches // merge**2:
        raise ValueError(
            f"max_images must be below the {room.patches // merge**2} tokens of total_patches, got "
            f"{room.images}"
        )
    found = zip(("total_patches", "max_images"), room, (patches, images), strict=True)
    for name, most, there_are in found:
        if there_are > most:
            raise ValueError(f"{name} must be at least that of grid_thw, {there_are}, got {most}")
    return room


def _integers(value: Any, name: str) -> Tensor:
    """Return integers as int64 `[n]` on the host."""
    if not isinstance(value, Tensor):
        given = [as_int(row, name) for row in values_of(value, name)]
        value = torch.tensor(given, dtype=torch.int64, device="cpu")
    rows = numbers_on_host(value, name).long().clone()
    if rows.dim() != 1:
        raise ValueError(f"{name} must be [n], got {list(rows.shape)}")
    return rows


def _rows_of(value: Any, tokens: int) -> Tensor:
    """Return the rows that tokens take as int64 `[n]` on the host."""
    rows = _integers(value, "feature_rows")
    wrong = ((rows < 0) | (rows >= tokens)).nonzero()
    if len(wrong):
        raise ValueError(
            f"feature_rows must be from 0 to below the {tokens} tokens of the images, got "
            f"{int(rows[wrong[0]])}"
        )
    return rows


def _tokens_of(value: Any, feature_rows: Tensor | None) -> Tensor:
    """Return the tokens that take features as int64 `[n]` on the host."""
    tokens = _integers(value, "token_rows")
    wrong = (tokens <= torch.nn.functional.pad(tokens[:-1], (1, 0), value=-1)).nonzero()
    if len(wrong):
        raise ValueError(
            "token_rows must ascend, from 0 or more, got "
            f"{int(tokens[wrong[0]])} as token_rows[{int(wrong[0])}]"
        )
    if feature_rows is not None and len(tokens) != len(feature_rows):
        raise ValueError(
            f"token_rows must be as many as feature_rows, {len(feature_rows)}, got {len(tokens)}"
        )
    return tokens


def _again(
    grids: list[list[int]],
    merge: int,
    side: int,
    frames_apart: bool,
    feature_rows: list[int] | None,
    token_rows: list[int] | None,
    room: Room | None,
    device: str,
) -> VisionLayout:
    patches, images = room or (None, None)
    layout = VisionLayout.from_grid(
        grids,
        merge_size=merge,
        patch_size=1,
        window=side * merge or None,
        frames_apart=frames_apart,
        feature_rows=feature_rows,
        token_rows=token_rows,
        total_patches=patches,
        max_images=images,
    )
    return layout.to(device)
