"""The mask function of `attn_implementation="cuseq"`: masks that are built only if needed.

transformers makes masks before the layers run, where the user's keywords do not get to, so the mask
function cannot know whether lengths will come. It returns a `DeferredMask`, which remembers how to
build the mask. Attention builds it, once a forward, where no lengths came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import masking_utils

from cuseq._arguments import as_size
from cuseq._modes import outside_inference_mode
from cuseq.cache import new_key, remember
from cuseq.integrations.transformers._recurrent import recurrent_layers
from cuseq.integrations.transformers.names import NAME

_withheld = threading.local()


def withhold(position_ids: torch.Tensor | None) -> None:
    """Keep position ids from transformers' search for the next mask function on this thread."""
    _withheld.position_ids = position_ids


class DeferredMask:
    """Hold the mask of one layer type in one forward, unbuilt until dense attention asks for it.

    Only masks that lengths may replace are deferred: causal ones, with a window or without, and
    bidirectional ones, over as many keys as queries. This is a plain class, so that an object keeps
    its identity through checkpointing, compiled layers and FSDP2. It does not act as a tensor: a
    model that edits its mask before it attends fails loudly.

    Attributes:
        causal: Whether queries see no later keys.
        window: Keys that a query sees, itself included, or None.
        chunked: Whether the size in `window` is a chunk's.
        position_ids: int [batch or 1, seqlen], or None where the model does not give them.
        recurrent: The model's layer types that lengths do not reach, for a warning.
        arguments: What `transformers.masking_utils.sdpa_mask` needs to build the mask.
    """

    def __init__(
        self,
        window: int | None,
        chunked: bool,
        position_ids: torch.Tensor | None,
        recurrent: list[str],
        arguments: dict[str, Any],
    ) -> None:
        self.causal = arguments["allow_is_causal_skip"]
        self.window = window
        self.chunked = chunked
        self.position_ids = position_ids
        self.recurrent = recurrent
        self.arguments = arguments
        self._key: torch.Tensor | None = None  # made in eager code, for facts about this mask

    def __getattr__(self, name: str):
        raise AttributeError(
            f"DeferredMask has no {name}: the mask of a layer is not made before its attention "
            f'runs. A model that edits its masks cannot use attn_implementation="{NAME}"'
        )

    def contiguous(self) -> DeferredMask:
        """Return itself: `generate` of transformers 5.23 calls this on every mask it made."""
        return self

    def positions(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """Return the position ids that may describe packed rows.

        They come from where the mask was made or, with models that do not give them there, as
        `given` to the attention. The result is None where transformers would not look at them
        either: beside a 2-D mask, and without causality.
        """
        arguments = self.arguments
        if arguments["attention_mask"] is not None or not arguments["allow_is_causal_skip"]:
            return None
        if self.position_ids is not None:
            return self.position_ids
        return given if _may_be_packed(given, arguments["q_length"]) else None

    def build(self, position_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the mask that sdpa would get.

        Args:
            position_ids: int [batch or 1, seqlen], looked at as transformers does: eager code
                synchronises, compiled code always gets a mask.

        Returns:
            bool [batch, 1, q_length, kv_length], True where a query sees a key; None where sdpa
            needs none.
        """
        arguments = self.arguments
        if position_ids is not None:
            rows = position_ids.expand(arguments["batch_size"], -1)
            sequences = masking_utils.find_packed_sequence_indices(rows)
            if sequences is not None:
                arguments = arguments | {
                    "mask_function": self._inside(sequences, rows),
                    "allow_is_causal_skip": False,
                }
        return masking_utils.sdpa_mask(**arguments)

    def _inside(self, sequences: torch.Tensor, position_ids: torch.Tensor) -> Callable:
        """Restrict the pattern to each sequence; both tensors are [batch, seqlen]."""
        pattern = self.arguments["mask_function"]
        # Chunks are counted from the start of the row or, newer, of the sequence.
        per_sequence = getattr(masking_utils, "packed_sequence_compatibility_function", None)
        if self.chunked and per_sequence is not None:
            return per_sequence(pattern, position_ids, sequences)
        return masking_utils.and_masks(
            pattern, masking_utils.packed_sequence_mask_function(sequences)
        )

    def build_once(self, device: torch.device) -> torch.Tensor | None:
        """Return `build()` without position ids; later layers on this device get the same mask."""
        if self._key is None:
            self._key = new_key()
        with outside_inference_mode():
            return remember(self._key, "deferred_mask", lambda: self._on(device), device=device)

    def _on(self, device: torch.device) -> torch.Tensor | None:
        mask = self.build()
        return mask if mask is None else mask.to(device)


def cuseq_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: transformers.PreTrainedConfig | None = None,
    **kwargs,
) -> DeferredMask | torch.Tensor | None:
    """Make the mask of one layer type, as transformers' `AttentionMaskInterface` asks for it.

    transformers calls it once a forward for each layer type; the arguments are those of
    `sdpa_mask`.

    Returns:
        A `DeferredMask`, or what `sdpa_mask` returns where lengths could not replace the pattern:
        decode steps, chunks, patterns that the model draws itself.

    Raises:
        TypeError: `local_size`, the window of the config, is not an int.
    """
    position_ids = getattr(_withheld, "position_ids", None)
    _withheld.position_ids = None
    local_size = as_size(local_size, "sliding_window")
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    if not square or not _may_be_packed(position_ids, q_length):
        position_ids = None
    window = local_size if local_size is not None and local_size <= kv_length else None
    # The size of a chunk comes in the place of a window.
    chunked = window is not None and window != getattr(config, "sliding_window", None)
    deferred = DeferredMask(
        window,
        chunked,
        position_ids,
        recurrent_layers(config),
        dict(
            kwargs,
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        ),
    )
    # transformers withdraws both permissions where the model's own pattern must stay, and the
    # window of a bidirectional mask looks both ways.
    replaceable = allow_is_causal_skip or (allow_is_bidirectional_skip and window is None)
    if square and replaceable and not chunked:
        return deferred
    return deferred.build(position_ids)


def _may_be_packed(position_ids: torch.Tensor | None, seqlen: int) -> bool:
    """Return whether these may be packed text positions, not M-RoPE planes or a decoded token."""
    return (
        position_ids is not None
        and position_ids.dim() <= 2
        and position_ids.shape[-1] == seqlen
        and seqlen > 1
    )
