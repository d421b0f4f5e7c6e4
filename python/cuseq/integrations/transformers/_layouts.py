"""Layouts of packed rows, from the position ids or offsets of a call."""

from __future__ import annotations

from torch import Tensor

from cuseq._modes import outside_inference_mode
from cuseq.cache import remember
from cuseq.layout import PackedLayout


def layout_of_positions(position_ids: Tensor | None, batch: int) -> PackedLayout | None:
    """Return the layout that position ids describe; None if each row is one sequence.

    This waits for one event, once for each tensor until it is edited in place, because all layers
    share the cached result. Tensors made in inference mode have no version, so every layer waits;
    with CUSEQ_CACHE=0 every layer waits too.
    """
    if position_ids is None:
        return None
    with outside_inference_mode():
        return remember(
            position_ids,
            "packed_positions",
            lambda: _several_sequences(position_ids, batch),
            batch,
            tensors=_tensors_of,
        )


def layout_of_offsets(cu_seqlens: Tensor, total_tokens: int) -> PackedLayout:
    """Return the layout of offsets `[n_seqs + 1]`, made once for each tensor.

    The first use of a host value waits for one event if the offsets are on a GPU.
    """
    with outside_inference_mode():
        return remember(
            cu_seqlens,
            "packed_offsets",
            lambda: PackedLayout.from_cu_seqlens(cu_seqlens.clone(), total_tokens),
            total_tokens,
            tensors=_tensors_of,
        )


def check_total(packed: PackedLayout, tokens: int) -> None:
    """Raise ValueError unless a layout describes all tokens of an input. In eager code only."""
    if packed.total_tokens != tokens:
        raise ValueError(
            f"packed must describe all batch * seqlen = {tokens} tokens of the input, got a layout "
            f"of total_tokens={packed.total_tokens}"
        )


def _several_sequences(position_ids: Tensor, batch: int) -> PackedLayout | None:
    layout = PackedLayout.from_position_ids(position_ids.expand(batch, -1))
    return None if layout.num_sequences == batch else layout


def _tensors_of(layout: PackedLayout | None) -> tuple[Tensor, ...]:
    if layout is None:
        return ()
    return layout.state.lengths, layout.state.cu_seqlens_static, layout.state.host_meta
