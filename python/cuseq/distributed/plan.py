"""`cp_plan`: which tokens of a packed row each rank of context parallelism holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import as_int, as_rank, as_window, one_of, shown
from cuseq._base.modes import are_plain, is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_pair, to_host
from cuseq.layout import PackedLayout, build, check_layout

POLICIES = ("auto", "contiguous", "ulysses", "zigzag")
HEADS, HEAD_DIM = (16, 8), 128  # of Qwen3-0.6B


class ContextParallelPlan:
    """The assignment of a packed row's tokens to ranks of context parallelism; made by `cp_plan`.

    A plan is immutable and lies on the host. Pickling keeps the arguments of `cp_plan`, which make
    the same plan again.

    Examples:
        >>> plan = cuseq.distributed.cp_plan([6, 2, 2], 2)
        >>> plan.tokens_of(0), plan.tokens_of(1)
        (tensor([0, 1, 5, 6, 7]), tensor([2, 3, 4, 8, 9]))
        >>> plan.whole, plan.cut
        (2, 1)
    """

    def __init__(self, plan: _C.CpPlan, *arguments: Any):
        if not isinstance(plan, _C.CpPlan):
            raise TypeError(
                "ContextParallelPlan is made by cp_plan, as cp_plan([6, 2, 2], 2), got "
                f"{shown(plan)}"
            )
        self._plan, self._arguments = plan, arguments
        lengths, segments, total_tokens, cp_size, policy, heads, head_dim, *_ = arguments
        self._lengths, self._segments = lengths, segments
        self._total_tokens, self._cp_size, self._policy = total_tokens, cp_size, policy
        self._heads, self._head_dim = heads, head_dim
        # By device: the tokens of all ranks, rank after rank, and the place of each token there.
        self._deals: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._checked: weakref.WeakSet[PackedLayout] = weakref.WeakSet()

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole row, tail included."""
        return self._total_tokens

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self._cp_size

    @property
    def policy(self) -> str:
        """The way tokens are assigned to ranks, as it was given to `cp_plan`."""
        return self._policy

    @property
    def whole(self) -> int:
        """Number of documents with all their tokens on one rank."""
        return self._plan.num_whole

    @property
    def cut(self) -> int:
        """Number of documents with tokens on several ranks."""
        return self._plan.num_cut

    @property
    def attention_balance(self) -> float:
        """Query-key pairs of causal attention on the busiest rank, divided by the mean per rank.

        1.0 means balanced; a row without real tokens also has 1.0. Padding counts as free. With
        "ulysses" every rank computes its heads of all pairs.
        """
        if self._plan.pairs == 0 or self._policy == "ulysses":
            return 1.0
        return self._plan.max_pairs * self._cp_size / self._plan.pairs

    @property
    def moved_share(self) -> float:
        """Rows of keys and values that ranks receive, as a share of what an all-gather moves.

        With "ulysses" the rows of queries and outputs that move count too, by their bytes.
        """
        gathered = self._total_tokens * (self._cp_size - 1)
        return self._plan.far_rows / gathered if gathered > 0 else 0.0

    @property
    def predicted_us(self) -> float:
        """Microseconds of attention and exchange on the slowest rank, forward and backward, of one
        layer.

        The model assumes 300 TFLOP/s in attention and 300 GB/s between ranks (an H200 with NVLink,
        bf16). It serves to compare plans.
        """
        operations = 14 * self._heads[0] * self._head_dim  # of a query-key pair
        return self._plan.time * operations / 300e6

    @property
    def hash(self) -> int:
        """A number below 2^64, the same on all ranks that have the same plan."""
        return self._plan.hash

    def tokens_of(self, rank: int) -> Tensor:
        """Return the row indices of a rank's tokens, in the rank's order.

        With "zigzag" and "ulysses" that is the order of the row. Otherwise the pieces of cut
        documents come first, then whole documents, then padding and tail.

        Args:
            rank: from 0 to `cp_size - 1`.

        Returns:
            int64 `[total_tokens / cp_size]` on the host.

        Raises:
            ValueError: `rank` is below 0 or not below `cp_size`.
        """
        rank, own = self.checked_rank(rank), self._total_tokens // self._cp_size
        tokens, _ = self._deal_on(torch.device("cpu"))
        return tokens[rank * own : (rank + 1) * own].long()

    def plot(self, width: int = 64) -> str:
        """Return a drawing with one line per rank, of `width` characters.

        A character stands for the tokens at its place: a letter for a document, upper case where
        it is cut, and a dot for padding and tail.

        Examples:
            >>> plan = cuseq.distributed.cp_plan([8, 2, 2, 3], 2, total_tokens=16)
            >>> print(plan.plot(width=8))
            rank 0 |AAAAddd.|
            rank 1 |AAAAbbcc|
        """
        width = as_int(width, "width", least=1)
        own = self._total_tokens // self._cp_size
        lines = []
        for rank in range(self._cp_size):
            row = "".join(self._drawn(piece) for piece in self._of(rank))
            places = [(2 * i + 1) * own // (2 * width) for i in range(width)] if own > 0 else []
            drawn = "".join(row[place] for place in places)
            lines.append(f"rank {rank:<{len(str(self._cp_size - 1))}} |{drawn}|")
        return "\n".join(lines)

    def _of(self, rank: int) -> list[list[int]]:
        return self._plan.pieces(rank).tolist()

    def _drawn(self, piece: list[int]) -> str:
        document, begin, end = piece
        length = int(self._lengths[document]) if document < len(self._lengths) else 0
        real = max(0, min(end, length) - begin)
        letter = chr(ord("a") + document % 26)
        letter = letter if (begin, real) == (0, length) else letter.upper()
        return letter * real + "." * (end - begin - real)

    def checked_rank(self, rank: int) -> int:
        """Return the rank as an int; raise ValueError if the plan has no such rank."""
        return as_rank(rank, self._cp_size, "cp_size")

    def deal(self, packed: PackedLayout) -> tuple[Tensor, Tensor]:
        """Return the tokens of all ranks, one rank after the other, and each token's place there.

        Args:
            packed: a layout with the same sequences, on any device.

        Returns:
            int32 `[total_tokens]` each, on the device of `packed`.

        Raises:
            ValueError: the layout has other sequences than the plan's.
        """
        check_layout(packed, parts=False, trees=False)
        self._check_sequences(packed)
        return self._deal_on(packed.device)

    def share(
        self, rank: int, max_seqs: int, room: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lengths of a rank's pieces, and its share of the plan for a layout's state.

        Args:
            rank: from 0 to `cp_size - 1`.
            max_seqs: capacity of the whole row's offsets, which decides that of the share.
            room: what a CUDA graph has room for, up to `most_room(max_seqs)`.

        Returns:
            lengths, rows and meta, int32 on the host, as csrc/context_parallel/share.h says.
        """
        return self._plan.share(rank, max_seqs, room)

    def most_room(self, max_seqs: int) -> list[int]:
        """Return the most of each number of a room, as csrc/context_parallel/share.h says."""
        return self._plan.most_room(max_seqs)

    def _deal_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device in self._deals:
            return self._deals[device]
        if is_capturing(device):
            raise RuntimeError(
                f"a plan cannot be copied to {device} while a CUDA graph is captured: call "
                "cp_partition or cp_join with it before the capture"
            )
        with outside_inference_mode():
            deal = self._plan.deal()
            if device.type != "cpu":
                deal = copy_pair(*deal, device)
        if are_plain(*deal):
            self._deals[device] = deal
        return deal

    def note_same_sequences(self, packed: PackedLayout) -> None:
        """Remember that a layout has the plan's sequences, so that `deal` need not compare them."""
        self._checked.add(packed)

    def _check_sequences(self, packed: PackedLayout) -> None:
        if packed in self._checked:
            return
        if packed.total_tokens != self._total_tokens:
            raise ValueError(
                f"plan must be made for the layout's total_tokens = {packed.total_tokens}, got one "
                f"for {self._total_tokens}"
            )
        lengths, segments = packed_lengths(packed)
        if not self._plan.is_for(lengths, segments, packed.total_tokens):
            own = self._lengths if self._segments is None else self._segments
            given = lengths if segments is None else segments
            if _listed(own) == _listed(given):  # only the padding differs
                own, given = self._lengths, lengths
            raise ValueError(
                f"plan must be made for the layout's segments {shown(_listed(given))}, got one for "
                f"{shown(_listed(own))}"
            )
        self.note_same_sequences(packed)

    def __reduce__(self) -> tuple[Any, ...]:
        lengths, segments, *rest = self._arguments
        given = [None if one is None else one.tolist() for one in (lengths, segments)]
        return _planned_again, (*given, *rest)

    def __repr__(self) -> str:
        return (
            f"ContextParallelPlan({self._policy}, {self._total_tokens} tokens over "
            f"{self._cp_size} ranks: {self.whole} documents whole, {self.cut} cut, busiest rank "
            f"{self.attention_balance:.3f} of the mean, {100 * self.moved_share:.1f} % of an "
            f"all-gather moved, {self.predicted_us:.0f} us a layer predicted)"
        )


def cp_plan(
    lengths_or_layout: PackedLayout | Sequence[int] | Tensor,
    cp_size: int,
    *,
    total_tokens: int | None = None,
    policy: str = "auto",
    heads: Sequence[int] = HEADS,
    head_dim: int = HEAD_DIM,
    window: int | None = None,
    max_far_rows: int | None = None,
) -> ContextParallelPlan:
    """Plan which tokens of a packed row each rank of context parallelism holds.

    Every rank gets exactly `total_tokens / cp_size` tokens. The plan is integer arithmetic on the
    lengths, so all ranks and platforms compute the same one.

    Policies:
        "auto": short documents stay whole. A document is cut if it is longer than a rank, if its
            attention is too large a share of a rank's, or to fill up a rank. The pieces of a
            document are dealt so that attention balances. Of many such plans, and the contiguous
            one, it takes the one with the least predicted time among those whose busiest rank has
            at most 1.05 times the mean of the query-key pairs, or among all if there are none.
        "contiguous": cuts the documents, one after the other, every `total_tokens / cp_size`
            tokens.
        "ulysses": cuts the row as it is, padding included; attention exchanges heads instead of
            keys (Jacobs et al. 2023, arXiv:2309.14509). "auto" does not choose it.
        "zigzag": cuts each segment into `2 * cp_size` equal parts and gives rank r the parts r and
            `2 * cp_size - 1 - r`, as Megatron-Core and TransformerEngine do. On each rank a
            segment's real tokens come before its padding.

    Args:
        lengths_or_layout: the layout of the whole row; or lengths as for
            `PackedLayout.from_lengths`, for segments without padding.
        cp_size: number of ranks, at most 65,536.
        total_tokens: tokens of the row, only with lengths; default their sum. Below 2^30.
        policy: "auto", "contiguous", "ulysses" or "zigzag".
        heads: numbers of query heads and of key heads, the former a multiple of the latter.
            Default: (16, 8).
        head_dim: elements of a head, for the predicted time. Default: 128.
        window: number of keys that a token sees, itself included; None if any layer sees all. One
            plan serves all layers with at most this window.
        max_far_rows: most keys that a rank may receive, in tokens. It bounds the memory of the
            exchange and fixes the capacity of the layout's buffers. None means no limit.

    Returns:
        The plan, for `cp_partition` and `cp_join`.

    Raises:
        ValueError: `total_tokens` is not a multiple of `cp_size`; for "zigzag", a segment or the
            tail is not a multiple of `2 * cp_size` (make it one by `segment_multiple` and
            `total_multiple`); for "ulysses", `cp_size` does not divide the query heads, or neither
            divides the key heads nor is a multiple of them; a rank needs more than `max_far_rows`;
            or an argument is outside its range.
        TypeError: an argument has the wrong type.

    Synchronises only if the host does not know the lengths: it then waits for their copy.

    Examples:
        >>> plan = cuseq.distributed.cp_plan([6, 6, 2, 2], 2)
        >>> plan.whole, plan.cut, plan.tokens_of(0).tolist()
        (4, 0, [0, 1, 2, 3, 4, 5, 12, 13])
        >>> cuseq.distributed.cp_plan([4, 4], 2, policy="zigzag").tokens_of(0).tolist()
        [0, 3, 4, 7]
    """
    options = _checked_options(cp_size, policy, heads, head_dim, window, max_far_rows)
    if isinstance(lengths_or_layout, PackedLayout):
        packed = lengths_or_layout
        check_layout(packed, parts=False, trees=False)
        if total_tokens is not None and as_int(total_tokens, "total_tokens") != packed.total_tokens:
            raise ValueError(
                f"total_tokens must be the layout's {packed.total_tokens} or None, got "
                f"{total_tokens}"
            )
        lengths, segments = packed_lengths(packed)
        total_tokens = packed.total_tokens
    else:
        lengths, segments = build.as_numbers(lengths_or_layout, "lengths"), None
        lengths = lengths if lengths.device.type == "cpu" else to_host(lengths)
        if total_tokens is None:
            total_tokens = _C.tokens_of(lengths, False)
        total_tokens = as_int(total_tokens, "total_tokens", least=0)
    plan = _planned(lengths, segments, total_tokens, *options)
    if isinstance(lengths_or_layout, PackedLayout):
        plan.note_same_sequences(lengths_or_layout)
    return plan


def _checked_options(
    cp_size: int,
    policy: str,
    heads: Sequence[int],
    head_dim: int,
    window: int | None,
    max_far_rows: int | None,
) -> tuple[int, str, tuple[int, int], int, int | None, int | None]:
    return (
        as_int(cp_size, "cp_size", least=1),
        one_of(policy, "policy", POLICIES),
        checked_heads(heads),
        as_int(head_dim, "head_dim", least=1),
        as_window(window),
        None if max_far_rows is None else as_int(max_far_rows, "max_far_rows", least=0),
    )


def checked_heads(heads: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of query heads and key heads as ints."""
    if not isinstance(heads, Sequence) or isinstance(heads, str | bytes) or len(heads) != 2:
        raise TypeError(f"heads must be (query heads, key heads), got {shown(heads)}")
    query, key = (as_int(number, "heads") for number in heads)
    return query, key


def _planned(
    lengths: Tensor,
    segments: Tensor | None,
    total_tokens: int,
    cp_size: int,
    policy: str,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    max_far_rows: int | None,
) -> ContextParallelPlan:
    row = (lengths, segments, total_tokens)
    plan = _C.CpPlan(*row, cp_size, policy, *heads, window, max_far_rows)
    model = (heads, head_dim, window, max_far_rows)
    return ContextParallelPlan(plan, *row, cp_size, policy, *model)


def _planned_again(
    lengths: list[int], segments: list[int] | None, total_tokens: int, *options: Any
) -> ContextParallelPlan:
    if len(options) != 6:
        raise ValueError(
            "a pickled plan must hold cp_size, policy, heads, head_dim, window and max_far_rows, "
            f"got {len(options)} options: make a plan of an earlier cuseq again by cp_plan"
        )
    made = build.as_numbers(lengths, "lengths")
    padded = None if segments is None else build.as_numbers(segments, "segments")
    total_tokens = as_int(total_tokens, "total_tokens", least=0)
    return _planned(made, padded, total_tokens, *_checked_options(*options))


torch.serialization.add_safe_globals([_planned_again])  # it checks what it is given


def packed_lengths(packed: PackedLayout) -> tuple[Tensor, Tensor | None]:
    """Return the lengths of a layout, and of its segments if they are padded; wait if they are on
    a GPU.
    """
    if not packed.pads_between_sequences:
        return packed.lengths_on_host(), None
    return packed.lengths_on_host(), packed.segments.lengths_on_host()


def _listed(lengths: Tensor) -> list[int]:
    """Return the lengths without zeros, which hold no tokens."""
    return [length for length in lengths.tolist() if length > 0]
