"""`bin_pack`, which plans the samples of each row, and its result, `PackingPlan`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import as_int, check_tensor, one_of
from cuseq.data._lengths import host_lengths

if TYPE_CHECKING:
    import numpy


_STRATEGIES = ("bfd", "ffd", "sequential", "wrapped")
_OVERLONG = ("raise", "split", "truncate")


class PackingPlan(tuple):
    """The assignment of samples to rows: the pair `(indices, offsets)`, made by `bin_pack`.

    Row b holds the samples `indices[offsets[b]:offsets[b + 1]]`.

    Attributes:
        indices: int64 `[n_pieces]`, numbers of the samples, row after row.
        offsets: int64 `[num_rows + 1]`, where each row starts in `indices`.
        starts: int64 `[n_pieces]`, the first token of the sample that the row takes; 0 unless
            samples were cut.
        lengths: int64 `[n_pieces]`, the number of tokens that the row takes.
        capacity: most tokens of a row.
        num_rows: number of rows.
        row_lengths: int64 `[num_rows]`, tokens of each row.
        fill: all tokens divided by `num_rows * capacity`; 1.0 if there are no rows.

    Examples:
        >>> plan = cuseq.data.bin_pack([6, 5, 7, 3], capacity=10)
        >>> plan
        PackingPlan(4 pieces in 3 rows of 10 tokens, fill 0.7000)
        >>> [plan.row(number) for number in range(plan.num_rows)]
        [[2, 3], [0], [1]]
    """

    starts: Tensor
    lengths: Tensor
    capacity: int

    def __new__(
        cls, indices: Tensor, offsets: Tensor, starts: Tensor, lengths: Tensor, capacity: int
    ) -> PackingPlan:
        # First of all, since its __index__ may edit the tensors.
        capacity = as_int(capacity, "capacity", least=1)
        for name, numbers in (
            ("indices", indices),
            ("offsets", offsets),
            ("starts", starts),
            ("lengths", lengths),
        ):
            _check_numbers(numbers, name)
            if name not in ("indices", "offsets") and numbers.shape != indices.shape:
                raise ValueError(
                    f"{name} must have one number for each of the {len(indices)} pieces, got "
                    f"{len(numbers)}"
                )
        _check_offsets(offsets, len(indices))
        plan = cls.of_checked(indices, offsets, starts, lengths, capacity)
        # The pieces first: sums of numbers near 2^63 would wrap.
        for what, tokens in (("pieces", lengths), ("rows", plan.row_lengths)):
            if len(tokens) > 0 and int(tokens.max()) > plan.capacity:
                raise ValueError(
                    f"lengths must make {what} of at most capacity = {plan.capacity} tokens, got "
                    f"{int(tokens.max())}"
                )
        return plan

    @classmethod
    def of_checked(
        cls, indices: Tensor, offsets: Tensor, starts: Tensor, lengths: Tensor, capacity: int
    ) -> PackingPlan:
        """Return the plan of what `_C.bin_pack` returns."""
        plan = super().__new__(cls, (indices, offsets))
        plan.starts = starts
        plan.lengths = lengths
        plan.capacity = capacity
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self, self.starts, self.lengths, self.capacity)

    @property
    def indices(self) -> Tensor:
        return self[0]

    @property
    def offsets(self) -> Tensor:
        return self[1]

    @property
    def num_rows(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def row_lengths(self) -> Tensor:
        ends = self.lengths.new_zeros(len(self.lengths) + 1)
        torch.cumsum(self.lengths, 0, out=ends[1:])
        return ends[self.offsets].diff()

    @property
    def fill(self) -> float:
        if self.num_rows == 0:
            return 1.0
        return self.row_lengths.sum(dtype=torch.float64).item() / (self.num_rows * self.capacity)

    def row(self, number: int) -> list[int]:
        """Return the samples of one row as ints.

        Raises:
            IndexError: `number` is not in `[0, num_rows)`.
            TypeError: `number` is not an int.
        """
        number = as_int(number, "number")
        if not 0 <= number < self.num_rows:
            raise IndexError(f"number must lie in [0, {self.num_rows}), got {number}")
        begin, end = self.offsets[number : number + 2].tolist()
        return self.indices[begin:end].tolist()

    def __repr__(self) -> str:
        return (
            f"PackingPlan({len(self.indices)} pieces in {self.num_rows} rows of "
            f"{self.capacity} tokens, fill {self.fill:.4f})"
        )


def _check_numbers(numbers: Tensor, name: str) -> None:
    check_tensor(numbers, name)
    if numbers.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, as bin_pack makes it, got {numbers.dtype}")
    if numbers.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(numbers.shape)}")
    if numbers.device.type != "cpu":
        raise ValueError(f"{name} must lie on the CPU, as bin_pack makes it, got {numbers.device}")
    if name != "offsets" and len(numbers) > 0 and int(numbers.min()) < 0:
        first = int((numbers < 0).int().argmax())
        raise ValueError(f"{name} must not be negative, got {name}[{first}] = {numbers[first]}")


def _check_offsets(offsets: Tensor, pieces: int) -> None:
    ends = offsets[[0, -1]].tolist() if len(offsets) > 0 else []
    if ends != [0, pieces] or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"offsets must ascend from 0 to the number of pieces, {pieces}, got "
            f"{offsets.tolist()[:8]} ..."
        )


def bin_pack(
    lengths: Iterable[int] | numpy.ndarray | Tensor,
    capacity: int,
    strategy: str = "bfd",
    *,
    overlong: str = "raise",
) -> PackingPlan:
    """Assign samples to few rows of at most `capacity` tokens each.

    Strategies:

    - `"bfd"`, best fit decreasing: place samples from the longest to the shortest, each into the
      row with the least room that fits; among rows with equal room, into the one opened first.
    - `"ffd"`, first fit decreasing: place samples in the same order, each into the first row that
      fits.
    - `"sequential"`: place samples in the given order; open a new row when the next sample does not
      fit into the last one.
    - `"wrapped"`: place samples in the given order and cut rows exactly at `capacity`, so samples
      are split over rows. The plan's `starts` and `lengths` say which tokens a row takes.

    The plan is deterministic: samples of equal length keep their order, rows are in the order in
    which they were opened, and the samples of a row in the order in which they were placed. Samples
    of length zero are placed like all others.

    Args:
        lengths: tokens of each sample: ints, a NumPy integer array, or an integer tensor on the
            CPU, `[n_samples]`, fewer than 2^31. int32 and int64 are read without a copy, other
            integers are converted.
        capacity: most tokens of a row, at least 1.
        strategy: one of the above.
        overlong: how to treat samples longer than `capacity`: `"raise"` a ValueError; `"split"`
            them into pieces of `capacity` tokens and the rest, each placed by itself; or
            `"truncate"` them to the first `capacity` tokens. "wrapped" always cuts them.

    Returns:
        A `PackingPlan`: `(indices, offsets)` with further attributes, on the CPU. It takes O(n)
        memory and never synchronises.

    Raises:
        ValueError: a length is negative; a length is above `capacity` with `overlong="raise"` (the
            message names the first such length); `capacity` is below 1; an option is unknown; or
            the lengths are on another device.
        TypeError: the lengths or the capacity are not integers.

    Examples:
        >>> indices, offsets = plan = cuseq.data.bin_pack([6, 5, 7, 3, 4, 3], capacity=10)
        >>> indices.tolist(), offsets.tolist()
        ([2, 3, 0, 4, 1, 5], [0, 2, 4, 6])
        >>> plan.row(0), plan.row_lengths.tolist()
        ([2, 3], [10, 10, 8])
    """
    one_of(strategy, "strategy", _STRATEGIES)
    one_of(overlong, "overlong", _OVERLONG)
    capacity = as_int(capacity, "capacity", least=1)
    plan = _C.bin_pack(host_lengths(lengths), capacity, strategy, overlong)
    return PackingPlan.of_checked(*plan, capacity)
