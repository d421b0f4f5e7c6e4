"""`PackedLayout`: where the sequences of a packed row lie."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuseq import _C, cache
from cuseq import _build_layout as build
from cuseq._arguments import as_device, as_int, shown
from cuseq._layout_masks import LayoutMasks
from cuseq._layout_state import LayoutState, Part, Recipe
from cuseq._modes import is_capturing, outside_inference_mode
from cuseq._transfer import with_index


class PackedLayout(LayoutMasks):
    """Where the sequences of a packed row lie. It holds no token data.

    Make the layout in the collator, where lengths are still Python ints, and pass it to the model.
    No layer then derives lengths itself, and nothing waits for the GPU. All callers share the
    layout's tensors, so they must not be edited. With `CUSEQ_CHECK=1` the next use of a layout
    whose tensors an operation edited in place raises ValueError and names them; PyTorch does not
    count writes through `.data` or NumPy.

    A layout made from lengths on a GPU starts an asynchronous copy of them to the host. The first
    use of a host value (`max_seqlen`, `num_real_tokens`, attention) waits for the event of that
    copy, not for the whole stream, and raises ValueError if the lengths are invalid.

    Examples:
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
        self._chunked: dict[int, PackedLayout] = {}
        self._chunks_of_layout: weakref.ref[PackedLayout] | None = None

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
        """Make a layout from the lengths of the sequences, in the order of the row.

        Args:
            lengths: ints, or int32 or int64 `[n_seqs]`, tokens.
            total_tokens: tokens of the row in memory; tokens after the last sequence are the tail.
                Default: the sum of the lengths. For lengths on a GPU this default waits at once for
                their copy to the host.
            segment_multiple, total_multiple: as for `from_padding_mask`.
            max_seqs: capacity of `cu_seqlens_static`. Default: the larger of `total_tokens` and the
                number of sequences. Set it to get a smaller buffer, or one size for every pack.
            device: device of the layout. Default: the device of the lengths.

        Raises:
            ValueError: a length is negative, the lengths sum to more than `total_tokens` or
                2^31 - 1, or there are more than `max_seqs` of them. For lengths on a GPU the error
                comes at the first use of a host value.
            TypeError: an argument has the wrong type.
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
        """Make a layout from offsets: int32 or int64 `[n_seqs + 1]`, starting at 0, never falling.

        The other arguments, errors and synchronisation are those of `from_lengths`.
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
        """Make a layout from a padded batch's mask: sequence i holds the real tokens of row i.

        `cuseq.pack` and `cuseq.unpack` use such a layout to move tensors of the batch. A mask on a
        GPU costs three kernels. With `total_tokens` it does not synchronise.

        Args:
            mask: bool or integer `[batch, seqlen]`, non-zero where a token is real. Padding may be
                on the left, on the right or in between; a row of padding has length zero. Or
                `[batch, 1 or heads, seqlen, seqlen]`, bool, integer or additive floating point
                (negative where hidden, else 0). Then a token is real if the first head's mask lets
                it see itself (the diagonal).
            segment_multiple: pad each sequence's segment to a multiple of this, or of all of these:
                2 * cp_size, and what kernels require of each sequence.
            total_multiple: pad the row to a multiple of this and of `segment_multiple`: 16 or 32
                for FP8, the tensor-parallel size, times cp_size.
            true_is_pad: whether True or non-zero marks padding in a bool or integer mask (as in
                Megatron and in `key_padding_mask`).
            total_tokens: tokens of the row in memory, a fixed size. Default: the smallest size that
                the multiples allow. For a mask on a GPU this default waits for the lengths.
            max_seqs: capacity of `cu_seqlens_static`. Default: the larger of the batch size and
                the tokens of the row.
            device: device of the layout. Default: the device of the mask.

        Raises:
            ValueError, TypeError: an argument is invalid, or the segments do not fit in
                `total_tokens`.
        """
        real, kind = build.real_tokens(mask, true_is_pad)
        state = build.of_mask(real, kind, total_tokens, segment_multiple, total_multiple, max_seqs)
        layout = cls(state).to(mask.device)  # the state is on the host if total_tokens was None
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
        """Make a layout from positions that restart with each sequence.

        `cuseq.ops.cu_seqlens_from_position_ids` describes how sequences are found. Every token
        belongs to a sequence, because positions do not distinguish padding from text. The rows of
        a batch are concatenated into one flat row.

        Args:
            position_ids: int32 or int64 `[seqlen]`, `[batch, seqlen]` or `[planes, batch, seqlen]`.
            plane: which plane of three-dimensional positions to read.
            max_seqs: capacity of `cu_seqlens_static`. Default: the number of tokens.
            device: device of the layout. Default: the device of the positions.

        Raises:
            ValueError, TypeError: as `cu_seqlens_from_position_ids`; or there are more sequences
                than `max_seqs`. For positions on a GPU that error comes at the first use of a host
                value.

        Never synchronises. For positions on a GPU the host does not know the number of sequences,
        which is the size of `lengths` and `cu_seqlens`. The first use of `lengths`, `cu_seqlens`,
        `position_ids` or `seq_ids` therefore waits for the small copy to the host too.
        """
        layout = cls(build.of_positions(position_ids, plane, max_seqs))
        return layout if device is None else layout.to(device)

    def with_total_tokens(self, total_tokens: int) -> PackedLayout:
        """Return the same sequences in a longer row; the added tokens are tail. `max_seqs` stays.

        If the lengths came from a GPU, this waits for their copy to the host.

        Raises:
            ValueError: `total_tokens` is smaller than the row's, or above 2^31 - 1.
            TypeError: `total_tokens` is not an int.
        """
        self.check_unedited()
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
        if self.state.tree is not None:
            longer = build.of_tree(
                self.state.tree, total_tokens, self.state.max_seqs, self.state.max_depth
            )
            return PackedLayout(longer).to(self.device)
        with outside_inference_mode():
            return PackedLayout(self.state.lengthened(total_tokens))

    def chunked(self, chunk_size: int) -> PackedLayout:
        """Return the layout whose sequences are chunks of this layout's sequences (Llama 4).

        Attention by that layout is chunked: a token sees the earlier tokens of its own chunk.
        Chunks start with each sequence and have `chunk_size` tokens; the last of a sequence may be
        shorter. Padding after a sequence belongs to its last chunk. A sequence without tokens has
        no chunk. The result is memoised.

        Args:
            chunk_size: tokens, at least 1.

        Raises:
            ValueError, TypeError: `chunk_size` is invalid, or this is a rank's part of a row or the
                layout of a tree.

        For lengths that came from a GPU the first call waits for their small copy to the host.

        Examples:
            >>> cuseq.PackedLayout.from_lengths([5, 2], 8).chunked(2).lengths
            tensor([2, 2, 1, 2], dtype=torch.int32)
        """
        self.check_unedited()
        chunk_size = as_int(chunk_size, "chunk_size", least=1)
        if chunk_size not in self._chunked:
            self.check_whole()
            self._wait_for_all()
            with outside_inference_mode():
                made = build.of_chunks(
                    self.lengths_on_host(),
                    self.segments.lengths_on_host() if self.pads_between_sequences else None,
                    self.total_tokens,
                    chunk_size,
                    self.cu_seqlens_static.shape[0] - 1,
                )
            chunks = PackedLayout(made).to(self.device)
            if self.is_static:
                chunks = chunks.static_copy(self.device)
            chunks._chunks_of_layout = weakref.ref(self)
            self._chunked.setdefault(chunk_size, chunks)
        return self._chunked[chunk_size]

    def as_part_of_row(
        self, positions: Tensor, rows: Tensor, meta: Tensor, group: str | None, part: Part
    ) -> PackedLayout:
        """Return this layout as one rank's part of a row.

        Args:
            positions: int32 `[total_tokens]` on the layout's device, positions in the whole
                sequences.
            rows: the rank's share of the plan, as `_C.CpPlan.share` returns it, on the layout's
                device.
            meta: the numbers of the share, on the host.
            group: name of the process group, None for the default group.
            part: what the part is made of.
        """
        state = self.state._replace(
            rank_positions=positions,
            rank_rows=rows,
            rank_meta=meta,
            rank_group=group,
            part=part,
        )
        return PackedLayout(state)

    def _wait_for_all(self) -> None:
        """Wait for the lengths and raise if they are invalid, so that no copy hides the error."""
        self.wait()
        self.segments.wait()

    # ----------------------------------------------------------------------------- copies

    def to(
        self, device: torch.device | str | int | None, non_blocking: bool = True
    ) -> PackedLayout:
        """Return this layout on `device`: itself if it is there already, else a memoised copy.

        As with a tensor, None keeps the device.

        The copy from the CPU to a GPU goes through pinned memory and never waits, whatever the
        value of `non_blocking`. The copy from a GPU to the CPU waits for the data.
        """
        target = self.device if device is None else with_index(as_device(device, "device"))
        if target == self.device:
            return self
        self.check_unedited()  # the copy's versions start anew, so it would hide the edit
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
            # Another thread may have moved it meanwhile: setdefault keeps the first copy.
            self._moved.setdefault(target, moved)
        return self._moved[target]

    def _on(self, device: torch.device) -> PackedLayout:
        with outside_inference_mode():
            return PackedLayout(self.state.moved(device))

    def static_copy(self, device: torch.device) -> PackedLayout:
        """Return a layout of the same row with tensors of its own, for `copy_` to fill.

        Its `position_ids`, `seq_ids` and `moe_padding_mask` are made.
        """
        self.check_unedited()
        self._wait_for_all()
        with outside_inference_mode():
            made = PackedLayout(self.state.moved(device).cloned())
        made.position_ids  # noqa: B018  computes them
        made.mark_static(True)
        return made

    def mark_static(self, is_static: bool) -> None:
        """Say whether `copy_` fills this layout again between the replays of a CUDA graph."""
        for layout in (self, self.segments, *self._chunked.values()):
            layout.is_static = is_static

    def copy_(self, other: PackedLayout) -> PackedLayout:
        """Make this layout describe another row, in place, for the static inputs of a CUDA graph.

        A graph reads tensors where they were at its capture. This fills those again:
        `cu_seqlens_static`, a rank's share of a plan, and `position_ids`, `seq_ids`,
        `moe_padding_mask`, `seq_idx`, the rows of a padded batch and the layouts of `chunked` where
        they have been made. Everything else (masks, chunks of recurrences, `lengths`, `cu_seqlens`,
        copies on other devices) is dropped and made anew at its next use.

        The copies are asynchronous on a GPU. If the lengths of either layout came from a GPU, this
        waits for their copy to the host.

        Args:
            other: a layout on the same device or, for a layout on a GPU, on the host (best in
                pinned memory), with the same `total_tokens`, `max_seqs` and kind: with or without
                padding between sequences, of a padded batch of the same shape or of none, a rank's
                part or a whole row. The GPU reads pinned memory after this returns: do not fill
                that layout again before.

        Returns:
            This layout.

        Raises:
            ValueError: `other` differs in one of these; nothing has been written.
            TypeError: `other` is not a PackedLayout.
            RuntimeError: a CUDA graph is being captured.

        Examples:
            >>> packed = cuseq.PackedLayout.from_lengths([2, 3], 6, max_seqs=4)
            >>> positions = packed.position_ids
            >>> packed.copy_(cuseq.PackedLayout.from_lengths([4, 2], 6, max_seqs=4))
            PackedLayout(2 sequences, longest 4, 6 real of 6 tokens, cpu)
            >>> positions
            tensor([0, 1, 2, 3, 0, 1], dtype=torch.int32)
        """
        if other is self:
            return self
        check_layout(other, "other")
        self.check_unedited()
        if is_capturing(self.device):
            raise RuntimeError("packed.copy_ must be called before the capture of a CUDA graph")
        if other.device != self.device and (self.device.type, other.device.type) != ("cuda", "cpu"):
            hosts = " or on the host" if self.device.type == "cuda" else ""
            raise ValueError(f"other must be on {self.device}{hosts}, got one on {other.device}")
        self.state.check_like(other.state)
        if self.state.slots is not None:
            other.batch_rows()
            self.state.check_like(other.state)
        for layout in (self, other):
            layout._wait_for_all()
        whole = None if self._chunks_of_layout is None else self._chunks_of_layout()
        if whole is not None:  # this layout is no longer the chunks of that one
            whole._chunked = {
                n: chunks for n, chunks in whole._chunked.items() if chunks is not self
            }
        with outside_inference_mode():
            if any(chunks is other for chunks in self._all_chunked()):  # it is filled too
                other = PackedLayout(other.state.cloned())
            self._copy_from(other)
        return self

    def _all_chunked(self) -> list[PackedLayout]:
        """Return the layouts that `chunked` made of this one, of those, and so on."""
        own = list(self._chunked.values())
        return own + [chunks for one in own for chunks in one._all_chunked()]

    def _copy_from(self, other: PackedLayout) -> None:
        for tensor in (self.state.lengths, *self.state.static_tensors()):
            cache.invalidate(tensor)
        # Copies on other devices stay what they are: this layout is no longer one of them.
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            origin._moved.pop(self.device, None)
        for moved in self._moved.values():
            moved._origin = None
        made, segments, chunked = self.made_for_tokens(), self._segments, self._chunked
        whole = self._chunks_of_layout
        state = self.state.filled_from(other.state)
        if segments is not None and other._segments is not None:
            segments._copy_from(other._segments)
            state = state._replace(segments=segments.state)
        PackedLayout.__init__(self, state)  # drops what was derived from the old row
        if segments is not None:
            self._segments = segments
        self.refill(*made)
        for chunk_size, chunks in chunked.items():
            chunks._copy_from(other.chunked(chunk_size))
        self._chunked = chunked
        self._chunks_of_layout = whole

    def pin_memory(self, device: Any = None) -> PackedLayout:
        """Return this layout in pinned memory, for DataLoader; on a GPU, return itself."""
        if self.device.type != "cpu" or self.cu_seqlens_static.is_pinned():
            return self
        self.check_unedited()
        with outside_inference_mode():
            return PackedLayout(self.state.pinned())

    def __reduce__(self) -> Recipe:
        """Return what makes the layout again: everything else follows from it, and is checked as
        arguments are.
        """
        self.check_unedited()
        self._wait_for_all()
        state, total, device = self.state, self.total_tokens, str(self.device)
        if state.part is not None:
            return state.part.recipe(total, state.rank_group, device)
        if state.tree is not None:
            return _tree_again, (state.tree, total, self.state.max_seqs, state.max_depth, device)
        segments = None
        if self.pads_between_sequences:
            segments = build.as_bytes(self.segments.lengths_on_host())
        batch = None
        if state.tokens is not None:
            batch = build.as_bytes(state.tokens >= 0), state.tokens.shape[1]
        lengths = build.as_bytes(self.lengths_on_host())
        return _row_again, (lengths, segments, total, self.state.max_seqs, batch, device)

    def __copy__(self) -> PackedLayout:
        return self  # only copy_ changes it, and all holders see that

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


def _row_again(
    lengths: bytes,
    segment_lengths: bytes | None,
    total_tokens: int,
    max_seqs: int,
    batch: tuple[bytes, int] | None,
    device: str,
) -> PackedLayout:
    target = as_device(device, "device")
    layout = PackedLayout(build.of_bytes(lengths, segment_lengths, total_tokens, max_seqs))
    if batch is not None:
        layout.take_mask(build.mask_from_bytes(batch, layout.lengths), "nonzero")
    return layout.to(target)


def _tree_again(
    tree: _C.Tree, total_tokens: int, max_seqs: int, max_depth: int, device: str
) -> PackedLayout:
    if not isinstance(tree, _C.Tree):
        raise TypeError(f"tree must be that of a PackedTree, got {shown(tree)}")
    sizes = zip(
        (total_tokens, max_seqs, max_depth), ("total_tokens", "max_seqs", "max_depth"), strict=True
    )
    state = build.of_tree(tree, *(as_int(size, name, least=0) for size, name in sizes))
    return PackedLayout(state).to(as_device(device, "device"))


# So that torch.load reads a saved batch with weights_only=True, its default: these functions check
# what they are given, as other arguments. Empty bytes are pickled as a call of `bytes`.
torch.serialization.add_safe_globals([_row_again, _tree_again, build.tree_of_parts, bytes])


def check_layout(packed: object, name: str = "packed") -> None:
    """Raise TypeError unless `packed` is a PackedLayout.

    With `CUSEQ_CHECK=1`, raise ValueError if its tensors were edited.
    """
    if not isinstance(packed, PackedLayout):
        raise TypeError(f"{name} must be a PackedLayout, got {type(packed).__name__}")
    packed.check_unedited()
