"""`PackedLayout`: where the sequences of a packed row lie."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq import _build_layout as build
from cuseq._arguments import as_device, as_int, shown
from cuseq._layout_masks import LayoutMasks
from cuseq._layout_state import LayoutState
from cuseq._modes import is_capturing, outside_inference_mode
from cuseq._transfer import with_index


class PackedLayout(LayoutMasks):
    """Where the sequences of a packed row lie. It holds no token data.

    Make it where lengths are still Python ints, in the collator, and hand it to the model: then no
    layer has to derive anything and nothing ever waits for the GPU. Its tensors are shared by
    everything that asks for them and must not be edited; with `CUSEQ_CHECK=1` the next use of a
    layout whose tensors were edited raises and names them.

    A layout made from lengths on a GPU starts to copy them to the host. The first use of a host
    value (`max_seqlen`, `num_real_tokens`, attention) waits for that copy by its event, never for
    the stream, and raises what is wrong with the lengths.

    Example:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3], 6)
        >>> packed
        PackedLayout(2 sequences, longest 3, 5 real of 6 tokens, cpu)
        >>> packed.position_ids
        tensor([0, 1, 0, 1, 2, 0], dtype=torch.int32)
    """

    # A plain class: FSDP2 rebuilds dataclasses and pytree nodes for every module.

    def __init__(self, state: LayoutState):
        if not isinstance(state, LayoutState):
            raise TypeError(
                "PackedLayout is made by from_lengths, as PackedLayout.from_lengths([2, 3]), or by "
                f"from_cu_seqlens, from_padding_mask or from_position_ids, got {shown(state)}"
            )
        super().__init__(state)
        self._moved: dict[torch.device, PackedLayout] = {}
        self._origin: weakref.ref[PackedLayout] | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        total_tokens: int | None = None,
        *,
        segment_multiple: int | Sequence[int] = 1,
        total_multiple: int | Sequence[int] = 1,
        max_seqs: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """Make a layout from the lengths of the sequences, in the order in which they lie.

        Args:
            lengths: ints, or int32 or int64 `[n_seqs]`, tokens.
            total_tokens: tokens of the row in memory; what the sequences leave is the tail. Default
                the sum of the lengths, which, for lengths on a GPU, waits for their copy at once.
            segment_multiple, total_multiple: as for `from_padding_mask`.
            max_seqs: capacity of `cu_seqlens_static`, default the larger of `total_tokens` and the
                number of sequences. Give it to make the buffer smaller, or as large for each pack.
            device: where the layout shall lie, default where the lengths lie.

        Raises:
            ValueError: a length is negative, they sum to more than `total_tokens` or 2^31 - 1, or
                there are more than `max_seqs` of them. For lengths on a GPU at the first use of a
                host value.
            TypeError: an argument is of another kind.
        """
        source = build.as_numbers(lengths, "lengths")
        if all(type(one) is int and one == 1 for one in (segment_multiple, total_multiple)):
            state = build.of_sequences(source, total_tokens, max_seqs, from_cu_seqlens=False)
        else:
            state = build.of_segments(
                source, total_tokens, segment_multiple, total_multiple, max_seqs
            )
        return cls(state).to(source.device if device is None else device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        total_tokens: int | None = None,
        *,
        max_seqs: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """Make a layout from offsets, int32 or int64 `[n_seqs + 1]`, from 0 on and not descending.

        Arguments, errors and waiting otherwise as for `from_lengths`.
        """
        source = build.as_numbers(cu_seqlens, "cu_seqlens")
        state = build.of_sequences(source, total_tokens, max_seqs, from_cu_seqlens=True)
        return cls(state).to(source.device if device is None else device)

    @classmethod
    def from_padding_mask(
        cls,
        mask: Tensor,
        segment_multiple: int | Sequence[int] = 1,
        total_multiple: int | Sequence[int] = 1,
        *,
        true_is_pad: bool = False,
        total_tokens: int | None = None,
        max_seqs: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """Make a layout from a padded batch's mask: row i is sequence i, its real tokens long.

        `cuseq.pack` and `cuseq.unpack` move tensors of the batch by such a layout. A mask on a GPU
        costs three kernels and, with `total_tokens`, no wait.

        Args:
            mask: bool or integer `[batch, seqlen]`, non-zero where a token is real; padding may be
                on the left, on the right or in between, and a row of padding has length zero. Or
                `[batch, 1 or heads, seqlen, seqlen]`, bool, integer or additive floating point
                (negative where hidden, else 0): tokens whose diagonal is visible are real, of the
                first head.
            segment_multiple: each sequence's segment is filled up to a multiple of it, or of all of
                several: 2 * cp_size, and whatever kernels want of each sequence.
            total_multiple: the row is filled up to a multiple of it, and of `segment_multiple`: 16
                or 32 for FP8, the tensor-parallel size, times cp_size.
            true_is_pad: turns a bool or integer mask round (Megatron's, `key_padding_mask`).
            total_tokens: tokens of the row in memory, a fixed size. Default what the multiples
                give, which for a mask on a GPU waits for the lengths.
            max_seqs: capacity of `cu_seqlens_static`, default the larger of batch and row.
            device: where the layout shall lie, default where the mask lies.

        Raises:
            ValueError, TypeError: what is wrong with an argument; segments do not fit in
                `total_tokens`.
        """
        real, kind = build.real_tokens(mask, true_is_pad)
        state = build.of_mask(real, kind, total_tokens, segment_multiple, total_multiple, max_seqs)
        layout = cls(state).to(mask.device)  # from the host, where lengths had to be waited for
        layout.take_mask(real, kind)
        return layout if device is None else layout.to(device)

    @classmethod
    def from_position_ids(
        cls,
        position_ids: Tensor,
        *,
        plane: int | None = None,
        max_seqs: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """Make a layout from positions that restart; see `cuseq.ops.cu_seqlens_from_position_ids`.

        All tokens belong to a sequence: positions cannot tell padding from text. Several rows
        become one flat row, row after row.

        Args:
            position_ids: int32 or int64 `[seqlen]`, `[batch, seqlen]` or `[planes, batch, seqlen]`.
            plane: which plane of three-dimensional positions to read.
            max_seqs: capacity of `cu_seqlens_static`, default the number of tokens.
            device: where the layout shall lie, default where the positions lie.

        Raises:
            ValueError, TypeError: as `cu_seqlens_from_position_ids`; or there are more sequences
                than `max_seqs`, of positions on a GPU at the first use of a host value.

        Never synchronises. How many sequences there are a GPU knows first: `lengths`, `cu_seqlens`,
        `position_ids` and `seq_ids` are cut by it, so the first use of one of them waits for the
        small copy as well.
        """
        layout = cls(build.of_positions(position_ids, plane, max_seqs))
        return layout if device is None else layout.to(device)

    def with_total_tokens(self, total_tokens: int) -> PackedLayout:
        """Return the same sequences in a longer row: what is added is tail. `max_seqs` stays.

        Waits for the layout's host values where lengths came from a GPU.

        Raises:
            ValueError: `total_tokens` is below the row's, or above 2^31 - 1.
            TypeError: it is not an int.
        """
        total_tokens = as_int(total_tokens, "total_tokens")
        if total_tokens < self.total_tokens:
            raise ValueError(
                f"total_tokens must be at least the row's {self.total_tokens}, got {total_tokens}"
            )
        if total_tokens >= 2**31:
            raise ValueError(f"total_tokens must be at most 2^31 - 1, got {total_tokens}")
        if total_tokens == self.total_tokens:
            return self
        self._wait_for_all()
        with outside_inference_mode():
            return PackedLayout(self.state.lengthened(total_tokens))

    def as_part_of_row(self, positions: Tensor) -> PackedLayout:
        """Return this layout as a rank's part of a row, of tokens with these positions.

        Args:
            positions: int32 `[total_tokens]` on the layout's device, in the whole sequences.
        """
        return PackedLayout(self.state._replace(rank_positions=positions))

    def _wait_for_all(self) -> None:
        """Raise what is wrong with the lengths: wrong ones must not become right in a copy."""
        self.wait()
        self.segments.wait()

    # ----------------------------------------------------------------------------- moved about

    def to(
        self, device: torch.device | str | int | None, non_blocking: bool = True
    ) -> PackedLayout:
        """Return this layout on another device: itself where it lies there, else one memoised.

        As with a tensor, None is no device: it stays where it is.

        From the CPU to a GPU the copy goes through pinned memory and never waits, whatever
        `non_blocking` says; the other way it waits for the data.
        """
        target = self.device if device is None else with_index(as_device(device, "device"))
        if target == self.device:
            return self
        if target not in self._moved:
            origin = None if self._origin is None else self._origin()
            if origin is not None and origin.device == target:
                return origin
            if is_capturing(target):
                raise RuntimeError(
                    f"a layout on {self.device} cannot be moved to {target} while a CUDA graph is "
                    "captured: move it before the capture"
                )
            moved = self._on(target)
            # Weak, since a cycle would keep GPU memory until the garbage collector runs.
            moved._origin = weakref.ref(self)
            # Another thread may have moved it meanwhile: there is one, whoever made it.
            self._moved.setdefault(target, moved)
        return self._moved[target]

    def _on(self, device: torch.device) -> PackedLayout:
        with outside_inference_mode():
            return PackedLayout(self.state.moved(device))

    def pin_memory(self, device: Any = None) -> PackedLayout:
        """Return this layout in pinned memory, as DataLoader asks; itself where it is on a GPU."""
        if self.device.type != "cpu" or self.cu_seqlens_static.is_pinned():
            return self
        with outside_inference_mode():
            return PackedLayout(self.state.pinned())

    def __reduce__(self):
        self._wait_for_all()
        return _restored, (self.state.to_buffers(), str(self.device))

    def __copy__(self) -> PackedLayout:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLayout:
        return self

    def __repr__(self) -> str:
        try:
            self.wait()
        except ValueError as error:
            return f"PackedLayout(invalid: {error})"
        return (
            f"PackedLayout({self.num_sequences} sequences, longest {self.max_seqlen}, "
            f"{self.num_real_tokens} real of {self.total_tokens} tokens, {self.device})"
        )


def _restored(buffers: LayoutState, device: str) -> PackedLayout:
    return PackedLayout(buffers.from_buffers()).to(device)


def check_layout(packed: object) -> None:
    """Raise TypeError unless packed is a PackedLayout; with `CUSEQ_CHECK=1` refuse edited ones."""
    if not isinstance(packed, PackedLayout):
        raise TypeError(f"packed must be a PackedLayout, got {type(packed).__name__}")
    packed.check_unedited()
