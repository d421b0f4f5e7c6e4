"""`config_of`, which reads the fields of a model's config that collators need from a processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cuseq._base.arguments import as_int

# By class: a model type. Types that share a processor share a rule of positions too.
_FAMILIES = {
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen3VLProcessor": "qwen3_vl",
    "Glm4vProcessor": "glm4v",
    "Glm46VProcessor": "glm46v",
}
# By class of a processor: the fields that its models have in their config alone.
_OF_CONFIG = {
    "Qwen2_5_VLProcessor": "tokens_per_second and window_size",
    "Ernie4_5_VLMoeProcessor": "temporal_merge_size",
}


def config_of(processor_or_config: Any) -> Any:
    """Return a config as it is, or what a processor says in its place.

    Raises:
        ValueError: the processor does not say all that its models need, or its parts have different
            merge sizes.
    """
    images = getattr(processor_or_config, "image_processor", None)
    if images is None:
        return processor_or_config
    processor, videos = processor_or_config, getattr(processor_or_config, "video_processor", None)
    name = _class_name(type(processor))
    if name not in _FAMILIES:
        lacks = f"does not say {_OF_CONFIG[name]}" if name in _OF_CONFIG else "is not known"
        raise ValueError(
            f"processor_or_config must be a config for a {name}, which {lacks}: pass model.config; "
            f"processors may be {', '.join(_FAMILIES)}"
        )
    sizes = {}
    for size in ("merge_size", "patch_size", "temporal_patch_size"):
        sizes[size] = as_int(getattr(images, size, None), f"image_processor.{size}", 1)
        of_videos = getattr(videos, size, sizes[size])
        if of_videos != sizes[size]:
            raise ValueError(
                f"processor_or_config must have one {size}, got {sizes[size]} in its "
                f"image_processor and {of_videos} in its video_processor"
            )
    return SimpleNamespace(
        model_type=_FAMILIES[name],
        image_token_id=as_int(processor.image_token_id, "processor.image_token_id"),
        video_token_id=as_int(processor.video_token_id, "processor.video_token_id"),
        vision_config=SimpleNamespace(
            spatial_merge_size=sizes["merge_size"],
            patch_size=sizes["patch_size"],
            temporal_patch_size=sizes["temporal_patch_size"],
        ),
    )


def _class_name(cls: type) -> str:
    """Return the name of a processor's class, or of the one of transformers that it comes from."""
    for one in cls.__mro__:
        if one.__module__.startswith("transformers.models."):
            return one.__name__
    return cls.__name__
