"""Packed rows over the ranks of context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuseq import _C
from cuseq._arguments import as_int, check_flag, check_tensor
from cuseq._modes import is_capturing, may_keep, outside_inference_mode
from cuseq.layout import LENGTH_DIVISOR, PackedLayout, check_layout
from cuseq.pad import one_or_all

_ops = torch.ops.cuseq


def cp_partition(
    packed: PackedLayout, cp_size: int, cp_rank: int, *tensors: Tensor, zigzag: bool = True
) -> tuple[PackedLayout | Tensor, ...]:
    """One rank's part of a packed row: its layout and its tokens of each tensor.

    Each segment is cut into `2 * cp_size` equal parts, and rank r has parts r and
    `2 * cp_size - 1 - r`, so that causal attention costs all ranks the same (Megatron-Core,
    TransformerEngine). Its real tokens stay in front of its pads.

    Args:
        packed: the layout of the whole row. Segments must be multiples of `2 * cp_size`
            (`segment_multiple`), or of `cp_size` if not zigzag, and so must the tail.
        cp_size: number of ranks.
        cp_rank: which of them.
        tensors: `[total_tokens, ...]` each, contiguous in the last dimension.
        zigzag: False gives each rank one part of each segment, in order.

    Returns:
        The rank's layout, whose `position_ids` are those in the whole sequences, and then its
        `[total_tokens / cp_size, ...]` of each tensor, differentiable.

    Raises:
        ValueError: a length is no such multiple (with its index and value, where it is known on
            the host), or a rank that there is not.

    Never synchronises where lengths are known on the host; else it waits for their copy.
    """
    cp_size, cp_rank = _rank(cp_size, cp_rank)
    tokens, places = _deal(packed, cp_size, zigzag)
    _check_rows(tensors, (packed.total_tokens,))
    own = packed.total_tokens // cp_size
    with outside_inference_mode():
        mine = tokens[cp_rank * own : (cp_rank + 1) * own]
        local = _local_layout(packed, cp_size, cp_rank, zigzag)
        inverse = _places_of_rank(places, cp_rank, own)
        positions = packed._token_metadata()[0]
        local.rank_positions = _ops.gather_rows([positions], mine, inverse, [own], 1, [0])[0]
    dealt = _ops.gather_rows(tensors, mine, inverse, [own], 1, [0] * len(tensors))
    return local, *dealt


def cp_join(
    packed: PackedLayout, cp_size: int, *tensors: Tensor, zigzag: bool = True
) -> Tensor | tuple[Tensor, ...]:
    """The whole row again, from the parts of all ranks: the inverse of `cp_partition`.

    Args:
        tensors: `[cp_size, total_tokens / cp_size, ...]` each, rank by rank, as an all-gather
            stacks them.
        packed, cp_size, zigzag: as for `cp_partition`; the layout of the whole row.

    Returns:
        `[total_tokens, ...]` of each, one for one, a tuple for several. Differentiable.

    Raises:
        ValueError, TypeError: as `cp_partition`; a tensor has other leading dimensions.

    Never synchronises where lengths are known on the host; else it waits for their copy once.
    """
    cp_size, _ = _rank(cp_size, 0)
    tokens, places = _deal(packed, cp_size, zigzag)
    total = packed.total_tokens
    _check_rows(tensors, (cp_size, total // cp_size))
    joined = _ops.gather_rows(tensors, places, tokens, [total], 2, [0] * len(tensors))
    return one_or_all(joined)


def _rank(cp_size: int, cp_rank: int) -> tuple[int, int]:
    cp_size, cp_rank = as_int(cp_size, "cp_size", least=1), as_int(cp_rank, "cp_rank")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, cp_size = {cp_size}), got {cp_rank}")
    return cp_size, cp_rank


def _check_rows(tensors: Sequence[Tensor], leading: tuple[int, ...]) -> None:
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensors[{number}]")
        if tensor.shape[: len(leading)] != leading:
            raise ValueError(
                f"tensors[{number}] must have the leading dimensions {list(leading)}, got shape "
                f"{list(tensor.shape)}"
            )


def _deal(packed: PackedLayout, cp_size: int, zigzag: bool) -> tuple[Tensor, Tensor]:
    """Which tokens ranks have, one rank after the other, and where each token is among them."""
    check_layout(packed)
    check_flag(zigzag, "zigzag")
    if (cp_size, zigzag) in packed._deals:
        return packed._deals[cp_size, zigzag]
    packed.check_whole()
    segments = packed.segments
    parts = 2 * cp_size if zigzag else cp_size
    # Lengths on the host say which one it is; of others the divisor of all is known.
    if segments.known_lengths is not None:
        _check_lengths(packed, segments.known_lengths.tolist(), parts)
    else:
        divisor = _C.read_host_meta(segments.host_meta, LENGTH_DIVISOR)
        tail = packed.total_tokens - segments.num_real_tokens
        if divisor % parts != 0 or tail % parts != 0:
            raise ValueError(
                f"lengths and tail must be multiples of {parts} to be dealt to {cp_size} ranks, "
                f"but {divisor} is all that the lengths have in common and the tail has {tail}"
            )
    with outside_inference_mode():
        deal = _ops.cp_rows(segments.cu_seqlens_static, packed.total_tokens, cp_size, zigzag)
    if may_keep(*deal) and not is_capturing(packed.device):
        packed._deals[cp_size, zigzag] = deal
    return deal


def _check_lengths(packed: PackedLayout, segments: Sequence[int], parts: int) -> None:
    what = "segments" if packed.pads_between_sequences else "lengths"
    for number, length in enumerate([*segments, packed.total_tokens - sum(segments)]):
        if length % parts != 0:
            name = f"{what}[{number}]" if number < len(segments) else "the tail"
            raise ValueError(
                f"{what} and tail must be multiples of {parts}, so that every rank gets as much, "
                f"got {name} = {length}: pad them by segment_multiple and total_multiple"
            )


def _places_of_rank(places: Tensor, cp_rank: int, own: int) -> Tensor:
    """For each token of the row its place in this rank's part, or a number below 0."""
    place = places - cp_rank * own
    return place.masked_fill(place >= own, -1)


def _local_layout(packed: PackedLayout, cp_size: int, cp_rank: int, zigzag: bool) -> PackedLayout:
    host = packed.known_lengths is not None
    segments, n_seqs = packed.segments, packed.num_sequences
    lengths = (packed.known_lengths if host else packed._all_lengths)[:n_seqs]
    padded = (segments.known_lengths if host else segments._all_lengths)[:n_seqs]
    if zigzag:
        part = padded // (2 * cp_size)
        zero = torch.zeros_like(part)
        first = (lengths - cp_rank * part).clamp(zero, part)
        second = (lengths - (2 * cp_size - 1 - cp_rank) * part).clamp(zero, part)
        real = first + second
    else:
        part = padded // cp_size
        real = (lengths - cp_rank * part).clamp(torch.zeros_like(part), part)
    own = packed.total_tokens // cp_size
    max_seqs = packed.cu_seqlens_static.shape[0] - 1
    local = PackedLayout.from_lengths(real, own, max_seqs=max_seqs)
    if packed.pads_between_sequences:
        local._segments = PackedLayout.from_lengths(padded // cp_size, own, max_seqs=max_seqs)
    return local.to(packed.device)


def equalize_tokens(
    packed: PackedLayout | None, group: torch.distributed.ProcessGroup | None = None
) -> PackedLayout | None:
    """The layout in a row as long as the longest of all ranks, which HybridEP and others need.

    One all-reduce of one integer. Where rows have a fixed total (`total_tokens`), none is needed.

    Args:
        packed: this rank's layout; None is handed through, without a word to the others.
        group: whose ranks, default all. Over NCCL the number goes by the current GPU and comes
            back by a synchronisation; over gloo nothing touches a GPU. A row that gets longer waits
            for the layout's host values where lengths came from a GPU.

    Returns:
        The layout with a longer tail; the same one where it is as long already.
    """
    if packed is None:
        return None
    check_layout(packed)
    backend = torch.distributed.get_backend(group)
    device = "cuda" if backend == "nccl" else "cpu"
    total = torch.tensor(packed.total_tokens, device=device)
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group)
    return packed.with_total_tokens(int(total.item()))
