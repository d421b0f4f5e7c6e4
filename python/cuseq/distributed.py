"""Distribution of packed rows over the ranks of context parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from cuseq import _C
from cuseq import _build_layout as build
from cuseq._arguments import as_int, check_tensor, one_of, shown
from cuseq._layout_state import LENGTH_DIVISOR
from cuseq._modes import is_capturing, may_keep, outside_inference_mode
from cuseq.layout import PackedLayout, check_layout
from cuseq.pad import one_or_all

__all__ = ["ContextParallelPlan", "cp_join", "cp_partition", "cp_plan", "equalize_tokens"]

_ops = torch.ops.cuseq


class ContextParallelPlan:
    """The assignment of a packed row's tokens to ranks of context parallelism; made by `cp_plan`.

    A plan is immutable. Pickling it pickles the layout that it was made for.

    Examples:
        >>> plan = cuseq.distributed.cp_plan([4, 4], 2, policy="zigzag")
        >>> plan.tokens_of(0), plan.tokens_of(1)
        (tensor([0, 3, 4, 7]), tensor([1, 2, 5, 6]))
        >>> plan.attention_balance
        1.0
    """

    def __init__(self, packed: PackedLayout, cp_size: int, policy: str):
        self._packed, self._cp_size, self._policy = packed, cp_size, policy
        # By device: the tokens of all ranks, rank after rank, and the place of each token there.
        self._deals: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._checked = weakref.WeakSet([packed])  # layouts that have the plan's segments

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole row, tail included."""
        return self._packed.total_tokens

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self._cp_size

    @property
    def policy(self) -> str:
        """The way tokens are assigned to ranks: "zigzag"."""
        return self._policy

    @property
    def attention_balance(self) -> float:
        """Query-key pairs of causal attention on the busiest rank, divided by the mean per rank.

        1.0 means balanced; a row without real tokens also has 1.0. Padding counts as free. If the
        lengths came from a GPU, this waits for their copy to the host.
        """
        if self._packed.num_real_tokens == 0:
            return 1.0
        lengths = self._packed.lengths_on_host().tolist()
        segments = self._packed.segments.lengths_on_host().tolist()
        parts = 2 * self._cp_size
        pairs = [0] * self._cp_size
        for length, segment in zip(lengths, segments, strict=True):
            part = segment // parts
            for number in range(parts):
                begin, end = (min(length, edge * part) for edge in (number, number + 1))
                rank = min(number, parts - 1 - number)
                pairs[rank] += (end * (end + 1) - begin * (begin + 1)) // 2
        return max(pairs) * self._cp_size / sum(pairs)

    def tokens_of(self, rank: int) -> Tensor:
        """Return the row indices of a rank's tokens, in the rank's order.

        The rank's part of the tail comes last.

        Args:
            rank: from 0 to `cp_size - 1`.

        Returns:
            int64 `[total_tokens / cp_size]` on the layout's device.

        Raises:
            ValueError: there is no such rank.
        """
        rank, own = self.checked_rank(rank), self.total_tokens // self._cp_size
        tokens, _ = self.deal(self._packed)
        return tokens[rank * own : (rank + 1) * own].long()

    def checked_rank(self, rank: int) -> int:
        """Return the rank as an int; raise ValueError if the plan has no such rank."""
        rank = as_int(rank, "rank")
        if not 0 <= rank < self._cp_size:
            raise ValueError(f"rank must lie in [0, cp_size = {self._cp_size}), got {rank}")
        return rank

    def deal(self, packed: PackedLayout) -> tuple[Tensor, Tensor]:
        """Return the tokens of all ranks, one rank after the other, and each token's place there.

        Args:
            packed: a layout with the same segments, on any device.

        Returns:
            int32 `[total_tokens]` each, on the device of `packed`.

        Raises:
            ValueError: the layout has other segments than the plan's.
        """
        check_layout(packed)
        packed.check_whole()
        self._check_segments(packed)
        if packed.device in self._deals:
            return self._deals[packed.device]
        offsets = packed.segments.cu_seqlens_static
        with outside_inference_mode():
            deal = _ops.cp_rows(offsets, packed.total_tokens, self._cp_size)
        if may_keep(*deal) and not is_capturing(packed.device):
            self._deals[packed.device] = deal
        return deal

    def _check_segments(self, packed: PackedLayout) -> None:
        if packed in self._checked:
            return
        if packed.total_tokens != self.total_tokens:
            raise ValueError(
                f"plan must be made for the layout's total_tokens = {packed.total_tokens}, got one "
                f"for {self.total_tokens}"
            )
        theirs, own = (_segment_lengths(layout) for layout in (packed, self._packed))
        if theirs != own:
            raise ValueError(
                f"plan must be made for the layout's segments {shown(theirs)}, got one for "
                f"{shown(own)}"
            )
        self._checked.add(packed)

    def __reduce__(self):
        return ContextParallelPlan, (self._packed, self._cp_size, self._policy)

    def __repr__(self) -> str:
        return (
            f"ContextParallelPlan({self._policy}, {self.total_tokens} tokens over "
            f"{self._cp_size} ranks)"
        )


def cp_plan(
    lengths_or_layout: PackedLayout | Sequence[int] | Tensor,
    cp_size: int,
    *,
    total_tokens: int | None = None,
    policy: str = "auto",
) -> ContextParallelPlan:
    """Plan which tokens of a packed row each rank of context parallelism holds.

    "zigzag" cuts each segment into `2 * cp_size` equal parts and gives rank r the parts r and
    `2 * cp_size - 1 - r`. Causal attention then costs every rank the same (as in Megatron-Core and
    TransformerEngine). On each rank a segment's real tokens come before its padding.

    Args:
        lengths_or_layout: the layout of the whole row; or lengths as for
            `PackedLayout.from_lengths`, for segments without padding.
        cp_size: number of ranks.
        total_tokens: tokens of the row, only with lengths; default their sum.
        policy: "zigzag". "auto" will choose between policies; it is refused while there is only
            one, so name the policy.

    Returns:
        The plan, for `cp_partition` and `cp_join`.

    Raises:
        ValueError: the policy is unknown; or, for "zigzag", a segment or the tail is not a multiple
            of `2 * cp_size` (make it one by `segment_multiple` and `total_multiple`). The message
            has its index and value if the host knows them.
        TypeError: an argument has the wrong type.

    Synchronises only if the host does not know the lengths: it then waits for their copy.

    Examples:
        >>> cuseq.distributed.cp_plan([4, 4], 2, policy="zigzag")
        ContextParallelPlan(zigzag, 8 tokens over 2 ranks)
    """
    cp_size = as_int(cp_size, "cp_size", least=1)
    if isinstance(policy, str) and policy == "auto":
        raise ValueError('policy must be "zigzag", the one that is built, got "auto"')
    policy = one_of(policy, "policy", ("zigzag",))
    if isinstance(lengths_or_layout, PackedLayout):
        packed = lengths_or_layout
        check_layout(packed)
        if total_tokens is not None and as_int(total_tokens, "total_tokens") != packed.total_tokens:
            raise ValueError(
                f"total_tokens must be the layout's {packed.total_tokens} or None, got "
                f"{total_tokens}"
            )
    else:
        packed = PackedLayout.from_lengths(lengths_or_layout, total_tokens)
    packed.check_whole()
    _check_multiples(packed, cp_size, 2 * cp_size)
    return ContextParallelPlan(packed, cp_size, policy)


def _segment_lengths(packed: PackedLayout) -> list[int]:
    """Return the segment lengths without zeros, which hold no tokens; wait if they are on a GPU."""
    known = packed.segments.known_lengths
    lengths = packed.segments.lengths_on_host() if known is None else known
    return [length for length in lengths.tolist() if length > 0]


def _check_multiples(packed: PackedLayout, cp_size: int, parts: int) -> None:
    segments = packed.segments
    if segments.known_lengths is None:  # the host knows only their common divisor, no single length
        divisor = _C.read_host_meta(segments.host_meta, LENGTH_DIVISOR)
        tail = packed.total_tokens - segments.num_real_tokens
        if divisor % parts != 0 or tail % parts != 0:
            raise ValueError(
                f"lengths and tail must be multiples of {parts} to be dealt to {cp_size} ranks, "
                f"but {divisor} is all that the lengths have in common and the tail has {tail}"
            )
        return
    lengths = segments.known_lengths.tolist()
    what = "segments" if packed.pads_between_sequences else "lengths"
    for number, length in enumerate([*lengths, packed.total_tokens - sum(lengths)]):
        if length % parts != 0:
            name = f"{what}[{number}]" if number < len(lengths) else "the tail"
            raise ValueError(
                f"{what} and tail must be multiples of {parts}, so that every rank gets as much, "
                f"got {name} = {length}: pad them by segment_multiple and total_multiple"
            )


def cp_partition(
    packed: PackedLayout, plan: ContextParallelPlan, rank: int, *tensors: Tensor
) -> tuple[PackedLayout | Tensor, ...]:
    """Return one rank's part of a packed row: its layout and its tokens of each tensor.

    Args:
        packed: the layout of the whole row.
        plan: the result of `cp_plan` for this layout, or for one with the same segments.
        rank: this rank, from 0 to `plan.cp_size - 1`.
        tensors: `[total_tokens, ...]` each, contiguous in the last dimension.

    Returns:
        The rank's layout, whose `position_ids` are positions in the whole sequences; then the
        rank's part `[total_tokens / cp_size, ...]` of each tensor, differentiable.

    Raises:
        ValueError: the plan was made for other segments, there is no such rank, or a tensor has
            other leading dimensions.
        TypeError: an argument has the wrong type.

    Synchronises only if the host does not know the lengths: it then waits for their copy.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([4, 4])
        >>> plan = cuseq.distributed.cp_plan(packed, 2, policy="zigzag")
        >>> local, ids = cuseq.distributed.cp_partition(packed, plan, 0, torch.arange(8))
        >>> ids, local.position_ids
        (tensor([0, 3, 4, 7]), tensor([0, 3, 0, 3], dtype=torch.int32))
    """
    check_layout(packed)
    _check_plan(plan)
    rank = plan.checked_rank(rank)
    tokens, places = plan.deal(packed)
    _check_rows(packed, tensors, (packed.total_tokens,))
    own = packed.total_tokens // plan.cp_size
    with outside_inference_mode():
        mine = tokens[rank * own : (rank + 1) * own]
        inverse = _places_of_rank(places, rank, own)
        positions = _ops.gather_rows([packed.position_ids], mine, inverse, [own], 1, [0])[0]
        local = _local_layout(packed, plan.cp_size, rank).as_part_of_row(positions)
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
    return one_or_all(joined)


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


def _local_layout(packed: PackedLayout, cp_size: int, rank: int) -> PackedLayout:
    n_seqs, segments = packed.num_sequences, packed.segments
    if packed.known_lengths is None or segments.known_lengths is None:
        lengths, padded = packed.lengths, segments.lengths
    else:
        lengths, padded = packed.known_lengths[:n_seqs], segments.known_lengths[:n_seqs]
    part = padded // (2 * cp_size)
    zero = torch.zeros_like(part)
    first = (lengths - rank * part).clamp(zero, part)
    second = (lengths - (2 * cp_size - 1 - rank) * part).clamp(zero, part)
    local = build.of_lengths_and_segments(
        first + second,
        padded // cp_size if packed.pads_between_sequences else None,
        packed.total_tokens // cp_size,
        packed.cu_seqlens_static.shape[0] - 1,
    )
    return PackedLayout(local).to(packed.device)


def equalize_tokens(
    packed: PackedLayout | None, group: torch.distributed.ProcessGroup | None = None
) -> PackedLayout | None:
    """Lengthen the row to the longest row of all ranks, as HybridEP and others need.

    This costs one all-reduce of one integer. Rows of a fixed `total_tokens` do not need it.

    Args:
        packed: this rank's layout. None is returned unchanged, without communication.
        group: the process group; default all ranks. With a CPU backend (gloo) no device is used.
            With a backend of only a device (NCCL, or another vendor's) the number goes through the
            current device and reading it synchronises. If the row gets longer and the layout's
            lengths came from a GPU, this also waits for their copy to the host.

    Returns:
        The layout with a longer tail, or the same layout if its row is already the longest.

    Examples:
        >>> cuseq.distributed.equalize_tokens(packed)  # doctest: +SKIP
        PackedLayout(2 sequences, longest 3, 5 real of 8 tokens, cpu)
    """
    if packed is None:
        return None
    check_layout(packed)
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, got {shown(group)}")
    total = torch.tensor(packed.total_tokens, device=_device_of(group, packed.device.type))
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group)
    return packed.with_total_tokens(int(total.item()))


def _device_of(group: torch.distributed.ProcessGroup | None, preferred: str) -> str:
    """Return the device type for a group's collectives: the CPU if the group supports it."""
    config = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in config.split(",")]
    return min(devices, key=lambda device: {"cpu": 0, preferred: 1}.get(device, inf))
