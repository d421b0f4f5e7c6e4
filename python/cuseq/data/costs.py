"""`multimodal_costs`: the work of samples with images, to balance it over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cuseq._base.arguments import check_untransformed, shown
from cuseq.data._lengths import host_lengths
from cuseq.vision.positions import grids_of, rule_of

_BACKWARD = 3  # operations of forward and backward, of those of the forward


def multimodal_costs(
    config: Any,
    lengths: Sequence[int] | Tensor,
    grids: Sequence[Sequence[Sequence[int]] | Tensor | None],
) -> Tensor:
    """Return the floating-point operations of samples with images in a training step.

    Counted are the matrix products of text and tower, forward and backward, and their attention:
    that of the text over each sample, that of the tower over each frame, or its windows (Narayanan
    et al. 2021, arXiv:2104.04473, appendix; experts of a mixture that a token is given to). Give
    them to `PackedBatchSampler(lengths, costs=...)`, so that ranks get rows of about equal work: an
    image costs a tower much and its tokens little.

    Args:
        config: the config of the whole model, as for `MultimodalPackingCollator`.
        lengths: tokens of each sample, those of images included, as for `bin_pack`.
        grids: for each sample, grids `[n, 3]` of its images and videos in patches; None without
            any.

    Returns:
        float64 `[n_samples]` on the host.

    Raises:
        ValueError: `grids` has another number of samples; a grid is not `[n, 3]`; a length is
            negative; `config` is that of another model.
        TypeError: an argument has the wrong type.

    Examples:
        >>> from transformers import Qwen2VLConfig
        >>> costs = cuseq.data.multimodal_costs(Qwen2VLConfig(), [300, 300], [None, [[1, 32, 32]]])
        >>> bool(costs[1] > costs[0])
        True
    """
    rule_of(config)
    if isinstance(lengths, Tensor):
        check_untransformed(lengths, "lengths", "call it outside of the transform")
    tokens = host_lengths(lengths, "lengths").double()
    if bool((tokens < 0).any()):
        raise ValueError(f"lengths must not be negative, got {int(tokens.min())}")
    if isinstance(grids, str) or not isinstance(grids, Sequence):
        raise TypeError(f"grids must be a list with an entry for each sample, got {shown(grids)}")
    if len(grids) != len(tokens):
        raise ValueError(
            f"grids must have an entry for each of the {len(tokens)} samples, got {len(grids)}"
        )
    per_token, per_pair = _text_costs(config.get_text_config())
    costs = per_token * tokens + per_pair * tokens * (tokens + 1) / 2
    for i, own in enumerate(grids):
        if own is not None:
            sizes = grids_of(own, f"grids[{i}]").double()
            costs[i] += _tower_cost(config.vision_config, sizes)
    return _BACKWARD * costs


def _text_costs(text: Any) -> tuple[float, float]:
    """Return the operations of a token, and of a pair of query and key in all layers."""
    hidden, layers = text.hidden_size, text.num_hidden_layers
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_heads = getattr(text, "num_key_value_heads", heads)
    active = getattr(text, "num_experts_per_tok", None)
    if active:
        of_expert = getattr(text, "moe_intermediate_size", 0)
        if isinstance(of_expert, list):  # ERNIE 4.5 VL has experts of text and of images
            of_expert = of_expert[0]
        width = active * of_expert
        width += getattr(text, "shared_expert_intermediate_size", 0)
    else:
        width = text.intermediate_size
    weights = 2 * hidden * head_dim * (heads + key_heads) + 3 * hidden * width
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    pairs = 4 * heads * head_dim * sum(kind == "full_attention" for kind in kinds)
    return 2.0 * (layers * weights + hidden * text.vocab_size), float(pairs)


def _tower_cost(tower: Any, grids: Tensor) -> float:
    """Return the operations of a tower for images of some grids."""
    hidden = getattr(tower, "embed_dim", tower.hidden_size)
    depth = getattr(tower, "depth", None) or tower.num_hidden_layers
    width = getattr(tower, "intermediate_size", None) or hidden * tower.mlp_ratio
    whole = len(getattr(tower, "fullatt_block_indexes", None) or range(depth))
    frames, height, columns = grids.unbind(1)
    frame = height * columns
    patches = frames * frame
    window = (getattr(tower, "window_size", 0) / tower.patch_size) ** 2
    pairs = whole * patches * frame + (depth - whole) * patches * frame.clamp(max=window)
    weights = depth * (4 * hidden**2 + 2 * hidden * width)
    return float((2 * weights * patches + 4 * hidden * pairs).sum())
