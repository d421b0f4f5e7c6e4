"""`MultimodalPackingCollator`, which makes one packed row of examples with images and videos."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int, check_flag, check_tensor, check_untransformed
from cuseq._base.labels import IGNORE_INDEX
from cuseq.data._lengths import array_as_tensor, is_array
from cuseq.data._processors import config_of
from cuseq.data._state import options_in
from cuseq.data.collator import IMAGE_COLUMNS, PackingCollator, checked_examples, part_of
from cuseq.distributed import ContextParallel
from cuseq.layout import PackedLayout
from cuseq.vision import VisionLayout
from cuseq.vision.layout import Room, layout_of_config
from cuseq.vision.positions import (
    COLUMNS,
    PIXELS,
    check_capture,
    features_of,
    grids_of,
    mrope_position_ids,
    rule_of,
    seconds_of,
    token_types,
)

_TYPES, _SECONDS = "mm_token_type_ids", "second_per_grid_ts"
# Keys of text that processors add, with the value of a text token.
_OF_PROCESSORS = {_TYPES: 0, "moe_mm_token_type_ids": 0, "attention_mask": 1}


class MultimodalPackingCollator:
    """Collate function that concatenates examples with images into one packed row.

    For models with M-RoPE, which `cuseq.vision.mrope_position_ids` lists. A Trainer takes it as
    `data_collator`, with `remove_unused_columns=False`.

    Args:
        processor_or_config: the config of the whole model (`model.config`), or the model's
            processor where that says all that is needed: of Qwen2-VL, Qwen3-VL, Qwen3.5, GLM-4V,
            GLM-4.5V, GLM-4.6V and GLM-OCR.
        total_tokens, capacity, max_seqs, total_multiple, pad_token_id: as for `PackingCollator`.
        image_capacity: most patches of images and videos that a row may hold, which bounds the
            memory of the vision tower; a batch with more raises ValueError. None means no limit.
        max_images: most images of a row of a fixed size, which a `cuseq.GraphedStep` captures: with
            `image_capacity` and `total_tokens`, every batch then has images' keys of the same
            shapes, those without images too. For Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5; videos
            and `cp` are refused. None: shapes are those of the images.
        blank_image: whether a batch without images gets a black one, which no token takes. The
            tower of an enabled model then runs on every rank, as FSDP2 and DDP need; its gradients
            are zero.
        cp: this rank's `cuseq.distributed.ContextParallel`, as for `PackingCollator`.

    Call it with a list of examples as the model's processor makes them for one document: mappings
    with `input_ids`, and for images `pixel_values` `[patches, ...]` and `image_grid_thw`
    `[images, 3]`, for videos `pixel_values_videos`, `video_grid_thw` and `second_per_grid_ts`, and
    optionally `labels`, `mm_token_type_ids` and other keys with one value per token. Per-token keys
    may have a leading dimension of 1. Examples without images may stand between others.

    Returns the dict of `PackingCollator`, with `position_ids` as planes, int64
    `[4, 1, total_tokens]`, and the images' keys concatenated, which are left out of a row without
    images; with `max_images` zeros follow, to `[image_capacity, ...]` patches and `[max_images, 3]`
    grids; `image_layout` and `video_layout`, each a `cuseq.vision.VisionLayout`, for the tower of
    an enabled model. Labels that are made here leave out the tokens of images and videos.
    Everything is on the host but `pixel_values` that were not.

    With `cp` the batch is this rank's part of the row, as that of `PackingCollator(cp=...)`, with
    the planes of its tokens. Images go to the ranks that hold their tokens, and an image that is
    cut goes to several, each of which runs the tower on all of it; `feature_rows` of the layouts
    says which rows of its output the tokens take. An enabled model reads it. A rank without tokens
    of images gets none, or a blank one.

    Raises:
        ValueError: as `PackingCollator`; the images are not those that the tokens say; patches and
            grids of an example do not fit each other; the row holds more than `image_capacity`
            patches; the config or processor is that of another model.
        TypeError: as `PackingCollator`; a key of images does not hold a tensor.

    Examples:
        >>> from transformers import Qwen2VLConfig
        >>> config = Qwen2VLConfig(image_token_id=60, video_token_id=61)
        >>> collate = cuseq.data.MultimodalPackingCollator(config)
        >>> image = dict(pixel_values=torch.zeros(16, 9), image_grid_thw=torch.tensor([[1, 4, 4]]))
        >>> batch = collate([{"input_ids": [5, 60, 60, 60, 60, 6], **image}, {"input_ids": [7, 8]}])
        >>> batch["position_ids"][2, 0]  # height
        tensor([0, 1, 1, 2, 2, 3, 0, 1])
        >>> batch["labels"]
        tensor([[-100, -100, -100, -100, -100,    6, -100,    8]])
    """

    _OPTIONS = (
        *("processor_or_config", "image_capacity", "max_images", "blank_image", "total_tokens"),
        *("capacity", "max_seqs", "total_multiple", "pad_token_id", "cp"),
    )

    def __init__(
        self,
        processor_or_config: Any,
        *,
        total_tokens: int | None = None,
        capacity: int | None = None,
        max_seqs: int | None = None,
        image_capacity: int | None = None,
        max_images: int | None = None,
        blank_image: bool = False,
        total_multiple: int = 1,
        pad_token_id: int = 0,
        cp: ContextParallel | None = None,
    ):
        self.config = config_of(processor_or_config)
        rule_of(self.config)
        self.image_capacity = image_capacity
        if image_capacity is not None:
            self.image_capacity = as_int(image_capacity, "image_capacity", 1)
        self.max_images = max_images
        if max_images is not None:
            check_capture(self.config)
            self.max_images = as_int(max_images, "max_images", 1)
            for name, value in (
                ("image_capacity", self.image_capacity),
                ("total_tokens", total_tokens),
            ):
                if value is None:
                    raise ValueError(f"{name} must be given with max_images = {max_images}")
            self._check_cp(cp)
            none = torch.empty(0, 3, dtype=torch.int64, device="cpu")
            self._row_of_images(none, none[:, 0])  # raises if there is no such row
        check_flag(blank_image, "blank_image")
        self.blank_image = blank_image
        self._text = PackingCollator(
            total_tokens=total_tokens,
            capacity=capacity,
            max_seqs=max_seqs,
            total_multiple=total_multiple,
            pad_token_id=pad_token_id,
            cp=cp,
        )

    @property
    def cp(self) -> ContextParallel | None:
        """The ranks that share each row, or None."""
        return self._text.cp

    def with_cp(self, cp: ContextParallel) -> MultimodalPackingCollator:
        """Return a copy of this collator that returns this rank's part of each row.

        Raises:
            ValueError, TypeError: as `PackingCollator.with_cp`.
        """
        self._check_cp(cp)
        shared = copy.copy(self)
        shared._text = self._text.with_cp(cp)
        return shared

    def _check_cp(self, cp: ContextParallel | None) -> None:
        if self.max_images is not None and cp is not None:
            raise ValueError(
                f"cp must be None with max_images = {self.max_images}: a rank's images differ in "
                "their shapes"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the collator again, so that a pickle is checked as arguments are."""
        own = {
            "processor_or_config": self.config,
            "image_capacity": self.image_capacity,
            "max_images": self.max_images,
            "blank_image": self.blank_image,
        }
        text = {name: getattr(self._text, name) for name in self._OPTIONS if name not in own}
        return _again, (own | text,)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts, images = [], []
        for i, example in enumerate(checked_examples(examples)):
            # `datasets` fills the columns that an example lacks with None.
            one = {key: value for key, value in example.items() if value is not None}
            images.append(_images_of({key: one.pop(key) for key in IMAGE_COLUMNS if key in one}, i))
            texts.append({key: _without_batch(value) for key, value in one.items()})
        _check_widths(images)
        labelled = any("labels" in text for text in texts)
        for key, value in _OF_PROCESSORS.items():  # a tokenizer alone gives none of them
            if any(key in text for text in texts):
                for text, image in zip(texts, images, strict=True):
                    if not image and "input_ids" in text:
                        text.setdefault(key, [value] * len(text["input_ids"]))
        batch, packed = self._text._row(texts)
        row = {
            key: torch.cat([one[key] for one in images if key in one])
            for key in IMAGE_COLUMNS
            if any(key in one for one in images)
        }
        patches = sum(len(row[key]) for key in PIXELS if key in row)
        if self.image_capacity is not None and patches > self.image_capacity:
            raise ValueError(
                f"examples must fit a row of image_capacity = {self.image_capacity} patches "
                f"together, got {patches}"
            )
        seconds = row.pop(_SECONDS, None)
        planes = mrope_position_ids(
            batch["input_ids"],
            packed,
            config=self.config,
            image_grid_thw=row.get("image_grid_thw"),
            video_grid_thw=row.get("video_grid_thw"),
            second_per_grid_ts=seconds if rule_of(self.config).videos_have_seconds else None,
            mm_token_type_ids=batch.get(_TYPES),
        )
        if not labelled:
            ids = batch["input_ids"]
            for token in (self.config.image_token_id, self.config.video_token_id):
                batch["labels"] = batch["labels"].masked_fill(ids == token, IGNORE_INDEX)
        types = token_types(batch["input_ids"], batch.get(_TYPES), self.config)
        taken: dict[str, Tensor | None] = {}
        tokens: dict[str, Tensor] = {}  # which take the features, by grids
        if self.cp is None:
            for kind, (_, grids, _) in enumerate(COLUMNS, 1):
                tokens[grids] = (types[0] == kind).nonzero().flatten()
            batch |= {"position_ids": planes, "packed": packed}
        else:
            batch, row, taken, tokens = self._part(batch, packed, planes, types, row, self.cp)
        if self.max_images is not None:
            return batch | self._of_fixed_size(row, tokens["image_grid_thw"])
        if self.blank_image and not any(key in row for key in PIXELS):
            row, none = self._blank(), torch.empty(0, dtype=torch.int64, device="cpu")
            taken["image_grid_thw"] = tokens["image_grid_thw"] = none
        for _, grids, layout in COLUMNS:
            if grids in row:
                batch[layout] = layout_of_config(
                    self.config, row[grids], taken.get(grids), tokens[grids]
                )
        return batch | row

    def _part(
        self,
        batch: dict[str, Any],
        packed: PackedLayout,
        planes: Tensor,
        types: Tensor,
        row: Mapping[str, Tensor],
        cp: ContextParallel,
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor | None], dict[str, Tensor]]:
        """Return this rank's part of a row, its images, and by their grids the features that it
        takes and the tokens that take them.

        A token's feature is its number among the tokens of images, or of videos, of the row.
        """
        for kind, columns in enumerate(COLUMNS, 1):
            features = torch.full_like(batch["input_ids"], -1)
            are_taken = types == kind
            features[are_taken] = torch.arange(int(are_taken.sum()), device="cpu")
            batch[columns.layout] = features
        batch["position_ids"] = planes[:, 0].T.contiguous()[None]
        part = part_of(batch, packed, cp)
        part["position_ids"] = part["position_ids"][0].T.contiguous()[:, None]
        images: dict[str, Tensor] = {}
        taken: dict[str, Tensor | None] = {}
        tokens: dict[str, Tensor] = {}
        for columns in COLUMNS:
            own = part.pop(columns.layout)[0]
            tokens[columns.grids] = (own >= 0).nonzero().flatten()
            own = own[tokens[columns.grids]]
            if own.numel() > 0:
                grids = row[columns.grids]
                counts = features_of(self.config, grids, columns is COLUMNS[1])
                used, taken[columns.grids] = _images_of_features(own, counts)
                patches = row[columns.pixels].split(grids.prod(1).tolist())
                images[columns.pixels] = torch.cat([patches[image] for image in used])
                images[columns.grids] = grids[used]
        return part, images, taken, tokens

    def _of_fixed_size(self, row: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Any]:
        """Return the images' keys of a row of a fixed size.

        Args:
            row: the images' keys of the row, none without images.
            tokens: int64 `[n]`, the tokens of the images.
        """
        pixels, grids, layout = COLUMNS[0]
        others = [key for key in row if key not in (pixels, grids)]
        if others:
            raise ValueError(
                f"examples must have images alone with max_images = {self.max_images}, got "
                f"{', '.join(others)}"
            )
        given = row.get(grids, torch.empty(0, 3, dtype=torch.int64, device="cpu"))
        made = self._row_of_images(given, tokens)
        assert made.room is not None
        patches = row.get(pixels)
        if patches is None:
            patches = self._blank()[pixels][:0]
        filled = patches.new_zeros(made.room.patches, *patches.shape[1:])
        filled[: len(patches)] = patches
        padded = torch.nn.functional.pad(given, (0, 0, 0, made.room.images - len(given)))
        return {pixels: filled, grids: padded, layout: made}

    def _row_of_images(self, grids: Tensor, tokens: Tensor) -> VisionLayout:
        """Return the layout of a row of a fixed size."""
        assert self.image_capacity is not None and self.max_images is not None
        room = Room(self.image_capacity, self.max_images)
        try:
            return layout_of_config(self.config, grids, None, tokens, room)
        except ValueError as error:
            raise ValueError(
                "examples must fit a row of image_capacity = "
                f"{self.image_capacity} patches and max_images = {self.max_images}: {error}"
            ) from None

    def _blank(self) -> dict[str, Tensor]:
        """Return the columns of a black image of one token."""
        tower = self.config.vision_config
        merge = tower.spatial_merge_size
        patch = (
            getattr(tower, "in_channels", getattr(tower, "num_channels", 3)),
            getattr(tower, "temporal_patch_size", 1),
            *(tower.patch_size, tower.patch_size),
        )
        pixels = torch.zeros(merge * merge, *patch, dtype=torch.float32, device="cpu")
        # PaddleOCR-VL takes patches as images, without frames.
        is_flat = self.config.model_type != "paddleocr_vl"
        return {
            "pixel_values": pixels.flatten(1) if is_flat else pixels[:, :, 0],
            "image_grid_thw": torch.tensor([[1, merge, merge]], device="cpu"),
        }


def _images_of_features(features: Tensor, counts: Tensor) -> tuple[list[int], Tensor | None]:
    """Return the images that features belong to, and the features' rows among theirs.

    Args:
        features: int64 `[n]`, numbers of features among those of all images, at least one.
        counts: int64 `[n_images]`, features of each image.

    Returns:
        The images, in the order of their first features; and int64 `[n]`, None if all features of
        these images are taken in order.
    """
    ends = counts.cumsum(0)
    owners = torch.searchsorted(ends, features, right=True)
    used = list(dict.fromkeys(owners.unique_consecutive().tolist()))
    first = torch.zeros_like(counts)
    first[used] = counts[used].cumsum(0) - counts[used]
    rows = features - (ends - counts)[owners] + first[owners]
    are_all = len(rows) == int(counts[used].sum())
    are_all = are_all and bool((rows == torch.arange(len(rows), device="cpu")).all())
    return used, None if are_all else rows


def _again(options: Any) -> MultimodalPackingCollator:
    return MultimodalPackingCollator(**options_in(options, MultimodalPackingCollator._OPTIONS))


def _without_batch(values: Any) -> Any:
    """Return what a processor made for one document without its batch dimension."""
    if is_array(values) or isinstance(values, Tensor):
        return values[0] if values.ndim == 2 and values.shape[0] == 1 else values
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
        return values[0]
    return values


def _images_of(found: dict[str, Any], i: int) -> dict[str, Tensor]:
    """Check the columns of an example's images; return them as tensors."""
    for pixels, grids, _ in COLUMNS:
        if (pixels in found) != (grids in found):
            raise ValueError(
                f"{pixels} and {grids} must be given together, but examples[{i}] has "
                f"{pixels if pixels in found else grids} alone"
            )
        if grids not in found:
            continue
        found[grids] = grids_of(_tensor(found[grids]), f"{grids} of examples[{i}]")
        found[pixels] = values = _tensor(found[pixels])
        if isinstance(values, list):
            raise TypeError(
                f"{pixels} of examples[{i}] must be a tensor, got a list: call the processor with "
                'return_tensors="pt", and read a dataset by dataset.with_format("torch")'
            )
        check_tensor(values, f"{pixels} of examples[{i}]")
        check_untransformed(values, f"{pixels} of examples[{i}]", "collate outside of it")
        patches = int(found[grids].prod(1).sum())
        if values.dim() < 2 or len(values) != patches:
            raise ValueError(
                f"{pixels} must have a row for each of the {patches} patches that {grids} says, "
                f"got {list(values.shape)} in examples[{i}]"
            )
    if "video_grid_thw" in found:
        name, videos = f"{_SECONDS} of examples[{i}]", len(found["video_grid_thw"])
        found[_SECONDS] = seconds_of(_tensor(found.get(_SECONDS)), name, videos)
    elif _SECONDS in found:
        seconds_of(_tensor(found.pop(_SECONDS)), f"{_SECONDS} of examples[{i}]", 0)
    return found


def _tensor(value: Any) -> Any:
    """Return an array as a tensor, and anything else as it is."""
    return array_as_tensor(value).clone() if is_array(value) else value


def _check_widths(images: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise ValueError if the patches of two examples have different shapes."""
    for key in PIXELS:
        rows = [(i, one[key]) for i, one in enumerate(images) if key in one]
        for i, row in rows:
            first, other = rows[0]
            if row.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"{key} must have patches of one shape, got {list(row.shape[1:])} in "
                    f"examples[{i}] and {list(other.shape[1:])} in examples[{first}]"
                )
