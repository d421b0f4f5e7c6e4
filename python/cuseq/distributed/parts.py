"""`cp_partition` and `cp_join`: the parts of a packed row that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cuseq._base.arguments import as_device, check_tensor
from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import copy_pair
from cuseq.distributed._groups import name_of
from cuseq.distributed.plan import ContextParallelPlan, packed_lengths
from cuseq.layout import PackedLayout, Part, Recipe, Records, Row, build, check_layout
from cuseq.layout.records import moved

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ops = torch.ops.cuseq


def cp_partition(
    packed: PackedLayout,
    plan: ContextParallelPlan,
    rank: int,
    *tensors: Tensor,
    group: ProcessGroup | str | None = None,
) -> tuple[PackedLayout, Unpack[tuple[Tensor, ...]]]:
    """Return one rank's part of a packed row: its layout and its tokens of each tensor.

    Args:
        packed: the layout of the whole row.
        plan: the result of `cp_plan` for this layout, or for one with the same sequences.
        rank: this rank, from 0 to `plan.cp_size - 1`.
        tensors: `[total_tokens, ...]` each, contiguous in the last dimension.
        group: the process group of the ranks, or its name; the layout keeps the name. Default: the
            default group, which is looked up when it is used. No group is needed here.

    Returns:
        The rank's layout, whose `position_ids` are positions in the whole sequences and whose
        sequences are the rank's pieces (with "zigzag" both pieces of a sequence together); then the
        rank's part `[total_tokens / cp_size, ...]` of each tensor, differentiable. With "zigzag"
        and "ulysses" padding stays behind its sequence, otherwise it is behind all of the rank's.

    Raises:
        ValueError: the plan was made for other sequences, `rank` is not below `plan.cp_size`, or
            a tensor has other leading dimensions.
        TypeError: an argument has the wrong type.

    Synchronises only if the host does not know the lengths: it then waits for their copy.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([6, 2])
        >>> plan = cuseq.distributed.cp_plan(packed, 2, policy="contiguous")
        >>> local, ids = cuseq.distributed.cp_partition(packed, plan, 1, torch.arange(8))
        >>> ids, local.position_ids
        (tensor([4, 5, 6, 7]), tensor([4, 5, 0, 1], dtype=torch.int32))
    """
    check_layout(packed)
    _check_plan(plan)
    rank, name = plan.checked_rank(rank), name_of(group)
    tokens, places = plan.deal(packed)
    _check_rows(packed, tensors, (packed.total_tokens,))
    own = packed.total_tokens // plan.cp_size
    with outside_inference_mode():
        mine = tokens[rank * own : (rank + 1) * own]
        inverse = _places_of_rank(places, rank, own)
        positions = _ops.gather_rows([packed.position_ids], mine, inverse, [own], 1, [0])[0]
        local = _local_layout(packed, plan, rank, positions, name)
    dealt = _ops.gather_rows(tensors, mine, inverse, [own], 1, [0] * len(tensors))
    return local, *dealt


def cp_join(
    packed: PackedLayout, plan: ContextParallelPlan, *tensors: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """Join the parts of all ranks into the whole row: the inverse of `cp_partition`.

    Args:
        packed, plan: as for `cp_partition`; the layout of the whole row.
        tensors: `[cp_size, total_tokens / cp_size, ...]` each, in the order of the ranks, as an
            all-gather stacks them.

    Returns:
        `[total_tokens, ...]`: one tensor if one was given, else a tuple. Differentiable.

    Raises:
        ValueError, TypeError: as `cp_partition`; or a tensor has other leading dimensions.

    Synchronises only if the host does not know the lengths: it then waits for their copy, once.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([4, 4])
        >>> plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
        >>> cuseq.distributed.cp_join(packed, plan, torch.tensor([[0, 3, 4, 7], [1, 2, 5, 6]]))
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    check_layout(packed)
    _check_plan(plan)
    tokens, places = plan.deal(packed)
    total = packed.total_tokens
    _check_rows(packed, tensors, (plan.cp_size, total // plan.cp_size))
    joined = _ops.gather_rows(tensors, places, tokens, [total], 2, [0] * len(tensors))
    return joined[0] if len(joined) == 1 else tuple(joined)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, ContextParallelPlan):
        raise TypeError(
            f"plan must be what cuseq.distributed.cp_plan returns, got {type(plan).__name__}"
        )


def _check_rows(packed: PackedLayout, tensors: Sequence[Tensor], leading: tuple[int, ...]) -> None:
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensors[{number}]")
        if tensor.shape[: len(leading)] != leading:
            raise ValueError(
                f"tensors[{number}] must have the leading dimensions {list(leading)}, got shape "
                f"{list(tensor.shape)}"
            )


def _places_of_rank(places: Tensor, rank: int, own: int) -> Tensor:
    """Return each token's place in this rank's part, or a number below 0 if it is not there."""
    place = places - rank * own
    return place.masked_fill(place >= own, -1)


def _local_layout(
    packed: PackedLayout,
    plan: ContextParallelPlan,
    rank: int,
    positions: Tensor,
    group: str | None,
) -> PackedLayout:
    lengths, rows, meta = plan.share(rank, packed.row.max_seqs)
    own = packed.total_tokens // plan.cp_size
    # A rank has at most two pieces of a document, and no empty ones.
    max_seqs = min(own, 2 * (packed.row.max_seqs))
    if plan.policy == "zigzag":
        row = _zigzag_row(packed, plan.cp_size, rank)
    elif plan.policy == "ulysses" and packed.pads_between_sequences:
        padded = _padded_lengths(packed, rank * own, (rank + 1) * own)
        row = build.of_lengths_and_segments(*padded, own, max_seqs)
    else:
        row = build.of_sequences(lengths, own, max_seqs, from_cu_seqlens=False)
    local = moved(Records(row), packed.device)
    rows, _ = copy_pair(rows, lengths, packed.device)  # two tensors to a copy
    source = _Source(plan, rank, *packed_lengths(packed), packed.row.max_seqs)
    return PackedLayout(local._replace(part=Part(positions, rows, meta, group, source)))


class _Source(NamedTuple):
    """The arguments of `cp_partition`, of which the layout of a rank's part follows."""

    plan: ContextParallelPlan
    rank: int
    lengths: Tensor  # of the whole row's sequences, on the host
    segment_lengths: Tensor | None
    max_seqs: int  # of the whole row

    @property
    def own_tokens(self) -> int:
        return self.plan.total_tokens // self.plan.cp_size

    def share_of_room(self, room: Sequence[int]) -> tuple[Tensor, Tensor]:
        _, rows, meta = self.plan.share(self.rank, self.max_seqs, room)
        return rows, meta

    def most_room(self) -> list[int]:
        return self.plan.most_room(self.max_seqs)

    def recipe(self, total_tokens: int, group: str | None, device: str) -> Recipe:
        padded = None if self.segment_lengths is None else build.as_bytes(self.segment_lengths)
        row = (build.as_bytes(self.lengths), padded, self.max_seqs)
        return _part_again, (self.plan, self.rank, *row, total_tokens, group, device)


def _part_again(
    plan: ContextParallelPlan,
    rank: int,
    lengths: bytes,
    segment_lengths: bytes | None,
    max_seqs: int,
    total_tokens: int,
    group: str | None,
    device: str,
) -> PackedLayout:
    target = as_device(device, "device")
    _check_plan(plan)
    row = build.of_bytes(lengths, segment_lengths, plan.total_tokens, max_seqs)
    local = cp_partition(PackedLayout(Records(row)), plan, rank, group=group)[0]
    return local.with_total_tokens(total_tokens).to(target)


torch.serialization.add_safe_globals([_part_again])  # it checks what it is given


def _padded_lengths(packed: PackedLayout, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the lengths of the sequences in the tokens [first, end), and of their segments.

    A sequence whose padding alone lies there has length zero.
    """
    lengths, padded = packed.lengths_on_host(), packed.segments.lengths_on_host()
    ends = padded.cumsum(0)
    begins = ends - padded
    held = ends.clamp(first, end) - begins.clamp(first, end)
    real = (begins + lengths).clamp(first, end) - begins.clamp(first, end)
    return real[held > 0], held[held > 0]


def _zigzag_row(packed: PackedLayout, cp_size: int, rank: int) -> Row:
    """Return the row of a rank's segments, each with two of its `2 * cp_size` parts."""
    lengths, padded = packed.lengths_on_host(), packed.segments.lengths_on_host()
    part = padded // (2 * cp_size)
    zero = torch.zeros_like(part)
    first = (lengths - rank * part).clamp(zero, part)
    second = (lengths - (2 * cp_size - 1 - rank) * part).clamp(zero, part)
    return build.of_lengths_and_segments(
        first + second,
        padded // cp_size if packed.pads_between_sequences else None,
        packed.total_tokens // cp_size,
        packed.row.max_seqs,
    )
