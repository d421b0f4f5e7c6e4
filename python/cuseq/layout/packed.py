"""`PackedLayout`: where the sequences of a packed row lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, cache
from cuseq._base.arguments import as_device, as_int, shown
from cuseq._base.modes import CHECKING, are_plain, is_capturing, outside_inference_mode
from cuseq._base.transfer import with_index
from cuseq.layout import build, chunks, masks, records
from cuseq.layout.derived import Derived
from cuseq.layout.records import (
    MAX_SEQLEN,
    NUM_REAL_TOKENS,
    NUM_SEQS,
    Batch,
    Part,
    Recipe,
    Records,
)
from cuseq.layout.spans import Spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_ops = torch.ops.cuseq

# What `CUSEQ_CHECK=1` calls the tensors of records in its errors.
_NAMES: dict[tuple[str, ...], str] = {
    ("row", "cu_seqlens_static"): "cu_seqlens",
    ("row", "host_lengths"): "lengths_on_host",
    ("batch", "slots"): "batch_rows",
    ("batch", "tokens"): "batch_rows",
    ("part", "positions"): "position_ids",
    ("tree", "positions"): "position_ids",
    **{(kind, name): f"{kind}.{name}" for kind in ("part", "tree") for name in ("rows", "meta")},
}


class PackedLayout:
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

    # Whether a CUDA graph reads this layout and will read it with other rows.
    is_replayed = False

    # A plain class: FSDP2 rebuilds dataclasses and pytree nodes for every module.

    def __init__(self, held: Records):
        if not isinstance(held, Records):
            raise TypeError(
                "PackedLayout is made by from_lengths, as PackedLayout.from_lengths([2, 3]), or by "
                f"from_cu_seqlens, from_padding_mask or from_position_ids, got {shown(held)}"
            )
        self._hold(held)
        self._segments: PackedLayout | None = None
        if self.row.segments is not None:
            self._segments = type(self)(Records(self.row.segments))
        self._moved: dict[torch.device, PackedLayout] = {}
        self._origin: weakref.ref[PackedLayout] | None = None
        self._chunked: dict[int, PackedLayout] = {}
        self._chunks_of_layout: weakref.ref[PackedLayout] | None = None

    def _hold(self, held: Records) -> None:
        """Take records, and drop what was computed from others.

        They hold from the start what attention reads, because a tensor that is first made inside a
        compiled region would cost a second graph.
        """
        self.row, self.batch, self.part, self.tree = held
        self._special_kind = held.special_kind
        # `position_ids` where they do not follow from the lengths.
        self._own_positions: Tensor | None = getattr(held.special, "positions", None)
        self._num_sequences = self.row.num_sequences
        self._derived = Derived()
        if CHECKING:
            for path, tensor in records.tensors_of(held).items():
                if "segments" not in path:
                    self._note_versions(**{_NAMES.get(path, path[-1]): tensor})

    def _hold_part(self, part: Part) -> None:
        """Take another form of the same part, of which nothing was computed."""
        self.part = part
        if CHECKING:
            self._note_versions(**{"part.rows": part.rows, "part.meta": part.meta})

    @property
    def _records(self) -> Records:
        """All that the layout holds. Its tensors must not be edited."""
        return Records(self.row, self.batch, self.part, self.tree)

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
            row = build.of_sequences(source, total_tokens, max_seqs, from_cu_seqlens=False)
        else:
            row = build.of_segments(
                source, total_tokens, segment_multiple, total_multiple, max_seqs
            )
        return cls(Records(row)).to(source.device if device is None else device)

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
        row = build.of_sequences(source, total_tokens, max_seqs, from_cu_seqlens=True)
        return cls(Records(row)).to(source.device if device is None else device)

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
                on the left, on the right or in between; a row of padding has length zero. Several
                values in a row, by which some packages number its documents, are refused, apart
                from those of a mask on a GPU beside `total_tokens`, which are not read. Or
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
        real, kind = build.real_tokens(mask, true_is_pad, waits=total_tokens is None)
        row = build.of_mask(real, kind, total_tokens, segment_multiple, total_multiple, max_seqs)
        layout = cls(Records(row)).to(mask.device)  # it is on the host if total_tokens was None
        layout._take_mask(real, kind)
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
        layout = cls(Records(build.of_positions(position_ids, plane, max_seqs)))
        return layout if device is None else layout.to(device)

    def with_total_tokens(self, total_tokens: int) -> PackedLayout:
        """Return the same sequences in a longer row; the added tokens are tail. `max_seqs` stays.

        If the lengths came from a GPU, this waits for their copy to the host.

        Raises:
            ValueError: `total_tokens` is smaller than the row's, or above 2^31 - 1.
            TypeError: `total_tokens` is not an int.
        """
        self._check_unedited()
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
        if self.tree is not None:
            longer = build.of_tree(
                self.tree.nodes, total_tokens, self.row.max_seqs, self.tree.max_depth
            )
            return PackedLayout(longer).to(self.device)
        with outside_inference_mode():
            return PackedLayout(records.lengthened(self._records, total_tokens))

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
        self._check_unedited()
        chunk_size = as_int(chunk_size, "chunk_size", least=1)
        if chunk_size not in self._chunked:
            self._check_whole()
            self._wait_for_all()
            with outside_inference_mode():
                row = build.of_chunks(
                    self.lengths_on_host(),
                    self.segments.lengths_on_host() if self.pads_between_sequences else None,
                    self.total_tokens,
                    chunk_size,
                    self.cu_seqlens_static.shape[0] - 1,
                )
            made = self._chunks_from(PackedLayout(Records(row)))
            made._chunks_of_layout = weakref.ref(self)
            self._chunked.setdefault(chunk_size, made)
        return self._chunked[chunk_size]

    def _chunks_from(self, on_host: PackedLayout) -> PackedLayout:
        """Return the layout of this layout's chunks as this layout keeps it."""
        return on_host.to(self.device)

    def _wait_for_all(self) -> None:
        """Wait for the lengths and raise if they are invalid, so that no copy hides the error."""
        self.wait()
        self.segments.wait()

    # ----------------------------------------------------------------------------- facts

    def _note_versions(self, **tensors: Tensor | None) -> None:
        """With `CUSEQ_CHECK=1`, remember the versions of tensors for `_check_unedited`."""
        if CHECKING and not is_compiling():
            self._derived.versions += [
                (name, tensor, tensor._version)
                for name, tensor in tensors.items()
                if tensor is not None and not tensor.is_inference()
            ]

    def _check_unedited(self) -> None:
        """With `CUSEQ_CHECK=1`, raise ValueError if a tensor of the layout was edited.

        The check compares PyTorch's version counters. Writes through `.data`, NumPy or raw kernels
        do not change those.
        """
        if not CHECKING or is_compiling():
            return
        edited = [name for name, tensor, made in self._derived.versions if tensor._version != made]
        if self._segments is not None:
            segments = self._segments._derived.versions
            edited += [f"{n}_padded" for n, tensor, made in segments if tensor._version != made]
        if edited:
            raise ValueError(
                "tensors of a PackedLayout must not be edited, since they are shared, but these "
                f"(or their views) were: {', '.join('packed.' + name for name in edited)}; make a "
                "new layout instead"
            )

    def wait(self) -> PackedLayout:
        """Wait until the host values are available, check them and return the layout.

        This waits only if the lengths came from a GPU, and only once, for one small copy.
        """
        self._host_value(NUM_SEQS)  # the status in this host_meta covers the segments too
        return self

    def _host_value(self, slot: int) -> int:
        self._check_replays()
        return _C.read_host_meta(self.row.host_meta, slot)

    def _check_replays(self) -> None:
        """Raise RuntimeError while a CUDA graph is captured that will replay other lengths."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the row in memory, tail included."""
        return self.row.total_tokens

    @property
    def num_sequences(self) -> int:
        """Number of sequences, including those of length zero."""
        self._check_replays()
        if self._num_sequences is None:
            self._num_sequences = self._host_value(NUM_SEQS)
        return self._num_sequences

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return self._host_value(MAX_SEQLEN)

    @property
    def max_seqlen_padded(self) -> int:
        """Tokens of the longest segment."""
        return self.segments.max_seqlen

    @property
    def num_real_tokens(self) -> int:
        """Sum of the lengths."""
        return self._host_value(NUM_REAL_TOKENS)

    @property
    def known_lengths(self) -> Tensor | None:
        """int32 `[n_seqs or more]` on the host; None if reading them would wait. Must not be
        edited.
        """
        row = self.row
        if row.lengths.device.type == "cpu":
            return row.lengths
        return None if row.from_device else row.host_lengths

    def lengths_on_host(self) -> Tensor:
        """Return int32 `[n_seqs]` on the host; waits for lengths that came from a GPU. Must not be
        edited.
        """
        self.wait()
        row = self.row
        lengths = row.lengths if row.host_lengths is None else row.host_lengths
        return lengths[: self.num_sequences]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.row.cu_seqlens_static.device

    @property
    def lengths(self) -> Tensor:
        """int32 `[n_seqs]`, tokens of each sequence. Must not be edited."""
        self._check_replays()
        if self._derived.lengths is not None:
            return self._derived.lengths
        lengths = self.row.lengths[: self.num_sequences]
        if are_plain(lengths):
            self._derived.lengths = lengths
        return lengths

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[n_seqs + 1]`, offsets of the sequences' real tokens. Must not be edited."""
        self._check_replays()
        if self._derived.cu_seqlens is not None:
            return self._derived.cu_seqlens
        offsets = self.row.cu_seqlens_static[: self.num_sequences + 1]
        if are_plain(offsets):
            self._derived.cu_seqlens = offsets
        return offsets

    @property
    def cu_seqlens_static(self) -> Tensor:
        """int32 `[max_seqs + 1]`, `cu_seqlens` with the last offset repeated. Must not be edited.

        Its shape depends only on `max_seqs`, so one compiled graph serves every pack.
        """
        return self.row.cu_seqlens_static

    @property
    def host_meta(self) -> Tensor:
        """int32 `[6]` on the CPU: number of sequences, longest length, total tokens, real tokens,
        status, greatest common divisor of the lengths. Must not be edited.

        Ops read it when they run, so compiled code never contains an old length.
        """
        return self.row.host_meta

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """int32 `[n_seqs + 1]`, where segments start in memory. Must not be edited.

        Equal to `cu_seqlens` if there is no padding between sequences.
        """
        return self.segments.cu_seqlens

    @property
    def cu_seqlens_padded_static(self) -> Tensor | None:
        """int32 `[max_seqs + 1]` for ops; None if there is no padding between sequences. Must not
        be edited.
        """
        self._check_whole(trees=True)
        return None if self._segments is None else self._segments.cu_seqlens_static

    @property
    def segments(self) -> PackedLayout:
        """The layout of the segments: each is a sequence and the padding after it."""
        return self if self._segments is None else self._segments

    @property
    def pads_between_sequences(self) -> bool:
        """Whether the layout was made with segments that may be longer than their sequences."""
        return self._segments is not None

    @property
    def position_ids(self) -> Tensor:
        """int32 `[total_tokens]`, position of each token inside its segment. Must not be edited.

        Padding continues the positions of its sequence, and the tail restarts at 0. For a rank's
        part of a row these are the positions in the whole sequences, for a tree those on the paths.
        """
        positions = self._own_positions
        return self._token_metadata()[0] if positions is None else positions

    @property
    def seq_ids(self) -> Tensor:
        """int32 `[total_tokens]`, index of the sequence of each token. Must not be edited.

        Padding has the index of the sequence before it; the tail has `n_seqs`.
        """
        return self._token_metadata()[1]

    @property
    def moe_padding_mask(self) -> Tensor:
        """bool `[total_tokens]`, True on padding and tail. Must not be edited.

        It excludes padding from the statistics of a mixture-of-experts router.
        """
        return self._token_metadata()[2]

    @property
    def seq_idx(self) -> Tensor:
        """int32 `[1, total_tokens]`, index of the sequence of each token, -1 on padding and tail.
        Must not be edited.

        causal-conv1d and Mamba-2 take this form and treat negative indices as padding.
        """
        self._check_whole()
        if self._derived.seq_idx is not None:
            return self._derived.seq_idx
        self._check_unedited()
        seq_idx = self._compute_seq_idx()
        self._keep_seq_idx(seq_idx)
        return seq_idx

    def _compute_seq_idx(self) -> Tensor:
        with outside_inference_mode():
            _, sequences, is_pad = self._token_metadata()
            return sequences.masked_fill(is_pad, -1).unsqueeze(0)

    def _keep_seq_idx(self, seq_idx: Tensor) -> None:
        if are_plain(seq_idx) and not is_capturing(self.device):
            self._derived.seq_idx = seq_idx
            self._note_versions(seq_idx=seq_idx)

    @property
    def is_tree(self) -> bool:
        """Whether this is the layout of a `PackedTree`, whose sequences are the nodes."""
        return self.tree is not None

    def _check_whole(self, *, parts: bool = False, trees: bool = False) -> None:
        """Raise ValueError if this is a rank's part of a row or a tree, unless it may be one."""
        record = None if self._special_kind is None else self._records.special
        if record is not None and not (parts if record is self.part else trees):
            raise ValueError(record.refusal)

    def _token_metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each token, its position in its segment, its `seq_ids` and whether it is
        padding.
        """
        if self._derived.tokens is not None:
            return self._derived.tokens
        self._check_unedited()
        offsets, padded = self._offsets()
        with outside_inference_mode():
            tokens = _ops.token_metadata(offsets, self.total_tokens, padded)
        self._keep_tokens(tokens)
        return tokens

    def _offsets(self) -> tuple[Tensor, Tensor | None]:
        """Return `cu_seqlens`, and that of the segments if they are longer than their sequences."""
        return self.cu_seqlens, None if self._segments is None else self._segments.cu_seqlens

    def _keep_tokens(self, tokens: tuple[Tensor, Tensor, Tensor]) -> None:
        # A tensor made during CUDA graph capture holds no values until the replay, and later graphs
        # may reuse its memory.
        if are_plain(*tokens) and not is_capturing(self.device):
            self._derived.tokens = tokens
            positions, sequences, is_pad = tokens
            self._note_versions(position_ids=positions, seq_ids=sequences, moe_padding_mask=is_pad)

    def batch_rows(self) -> Batch:
        """Return the batch slot of each token, and the token of each slot of the padded batch.

        If the layout was made without a mask, the batch is padded on the right. The tensors must
        not be edited.
        """
        self._check_whole()
        if self.batch is not None:
            return self.batch
        self._check_unedited()
        positions = torch.arange(self.max_seqlen, device=self.device)
        return self._take_mask(positions < self.lengths.unsqueeze(1), "nonzero")

    def _take_mask(self, mask: Tensor, kind: str) -> Batch:
        """Compute slots and token metadata from the mask of a padded batch, in one kernel."""
        offsets = self.segments.cu_seqlens_static
        with outside_inference_mode():
            made = _ops.mask_rows(mask, offsets, self.total_tokens, kind)
        batch, tokens = Batch(*made[:2]), made[2:]
        if are_plain(batch.slots) and not is_capturing(self.device):
            self.batch = batch
            for tensor in batch:
                self._note_versions(batch_rows=tensor)
            self._keep_tokens(tuple(tokens))
        return batch

    # ----------------------------------------------------------------------------- recurrences

    def cu_seqlens_recurrent_on_host(self) -> Tensor:
        """Return `cu_seqlens_recurrent` on the host. Must not be edited.

        Waits only for lengths that came from a GPU, once.
        """
        return chunks.offsets_on_host(self)

    @property
    def cu_seqlens_recurrent(self) -> Tensor:
        """int32 `[n_runs + 1]`, offsets of the runs that a recurrence may go over: sequences, the
        padding after each, and the tail, without empty ones. Must not be edited.

        Give it to flash-linear-attention's and mamba-ssm's kernels as `cu_seqlens`. It covers the
        row, so no token of their outputs stays unwritten.
        """
        return chunks.offsets(self)

    def chunk_indices(self, chunk_size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the run and the number in it of each chunk of `chunk_size` tokens.

        Runs are those of `cu_seqlens_recurrent`; the last chunk of a run may be shorter. Equal to
        flash-linear-attention's `prepare_chunk_indices`, which would wait for the lengths.

        Args:
            chunk_size: tokens, at least 1.
            dtype: torch.int32 or torch.int64.

        Returns:
            `[n_chunks, 2]` on the layout's device. Must not be edited.

        Raises:
            ValueError, TypeError: an argument is invalid.

        Examples:
            >>> packed = cuseq.PackedLayout.from_lengths([2, 3], 6)
            >>> packed.chunk_indices(2).tolist()
            [[0, 0], [1, 0], [1, 1], [2, 0]]
        """
        return chunks.chunks_of(self, chunk_size, dtype)[0]

    def chunk_offsets(self, chunk_size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the number of chunks before each run, and last the number of all.

        Arguments and errors are those of `chunk_indices`. Equal to flash-linear-attention's
        `prepare_chunk_offsets`.

        Returns:
            `[n_runs + 1]` on the layout's device. Must not be edited.

        Examples:
            >>> cuseq.PackedLayout.from_lengths([2, 3], 6).chunk_offsets(2).tolist()
            [0, 1, 3, 4]
        """
        return chunks.chunks_of(self, chunk_size, dtype)[1]

    # ----------------------------------------------------------------------------- masks

    def flash_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' flash attention.

        The dict also holds `packed`, the layout itself. Compiled code that gets only the other four
        keywords has to use an upper bound in place of the longest length. If the lengths came from
        a GPU, the first call waits for their copy to the host.

        Returns:
            `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `[n_seqs + 1]`; `max_length_q` and
            `max_length_k`, tokens; `packed`.

        Raises:
            ValueError: there is padding between sequences, or the layout is a rank's part of a
                row.
        """
        self._check_unedited()
        self._check_whole()
        if self.pads_between_sequences:
            raise ValueError(
                "packed has padding between its sequences, which transformers' flash attention "
                "would take for tokens: use cuseq.varlen_attention, or segment_multiple=1"
            )
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "packed": self,
        }

    def dense_mask(
        self,
        dtype: torch.dtype = torch.bool,
        *,
        causal: bool = True,
        window: int | None = None,
        spans: Spans | None = None,
        row_length: int | None = None,
        finite: bool = False,
    ) -> Tensor:
        """Return a cached mask for `scaled_dot_product_attention`; it must not be edited.

        The mask is made once and stays in the identity cache while the layout lives.
        `CUSEQ_CACHE_MAX_BYTES` bounds the memory of all masks. Compiled code makes a new mask in
        each graph, so make the mask outside and pass it in. Never synchronises.

        Args:
            dtype: bool, where True means visible; or float32, bfloat16, float16 or float64, for a
                mask that is added to the scores (0 where visible). On a GPU the query's dtype is
                faster, because SDPA converts a bool mask in every call.
            causal: whether a token sees only itself and earlier tokens.
            window: number of keys that a token sees, itself included; with `causal=False` in both
                directions.
            spans: (start, end) pairs in tokens of the row, disjoint or repeated, each inside one
                sequence. The tokens of a span see each other, whatever `causal` and `window` are.
                Compiled code needs an ascending int32 tensor `[n_spans, 2]` on the layout's device
                instead; its values are not checked on a GPU.
            row_length: cuts the row into a batch of rows of this many tokens. No sequence may cross
                the end of such a row. Default: one row.
            finite: whether hidden keys get the dtype's lowest finite value instead of -inf.

        Returns:
            `[rows, 1, row_length, row_length]`; each line starts at a multiple of 16 elements in
            memory. Tokens of the tail see only themselves.

        Raises:
            ValueError, TypeError: an argument is invalid, or the mask would take more than
                `CUSEQ_DENSE_MASK_MAX_BYTES`.
        """
        return masks.dense_mask(self, dtype, causal, window, spans, row_length, finite)

    def block_mask(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        spans: Spans | None = None,
        row_length: int | None = None,
        block_size: int | tuple[int, int] = 128,
        hold: bool = False,
    ) -> BlockMask:
        """Return a cached mask for `flex_attention`, made once while the layout lives.

        Its blocks equal those of `create_block_mask`. They are computed in closed form, without
        memory of size tokens x tokens, without synchronisation and without compilation. The other
        arguments are those of `dense_mask`.

        Args:
            block_size: tokens of a block; one number, or one for queries and one for keys.
            hold: whether the layout holds the mask for code that is compiled: attention by flex
                takes it there, where each compiled layer would make a mask of its own. `copy_`
                writes other rows into it. For masks without spans and `row_length`, with blocks of
                128, made outside compiled code. `cuseq.enable` holds those of layers that are
                compiled one by one.

        Returns:
            torch's `BlockMask` of `[rows, 1, row_length, row_length]`.

        Raises:
            ValueError, TypeError: an argument is invalid.
        """
        return masks.block_mask(self, causal, window, spans, row_length, block_size, hold)

    def xformers_bias(self, *, window: int | None = None) -> Any:
        """Return a cached xformers `BlockDiagonalCausalMask`, made once while the layout lives.

        xformers' own constructors copy lengths to the GPU and wait. This method waits only if the
        layout's lengths came from a GPU, for their one copy to the host. The tail becomes one more
        causal segment, because the bias can only describe segments.

        Args:
            window: number of keys that a token sees, itself included (xformers' local attention).

        Raises:
            ImportError: xformers is not installed.
            ValueError: window is below 1, or the row has no token.
        """
        return masks.xformers_bias(self, window)

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
        self._check_unedited()  # the copy's versions start anew, so it would hide the edit
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
            return PackedLayout(records.moved(self._records, device))

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
        self._check_unedited()
        if is_capturing(self.device):
            raise RuntimeError("packed.copy_ must be called before the capture of a CUDA graph")
        if other.device != self.device and (self.device.type, other.device.type) != ("cuda", "cpu"):
            hosts = " or on the host" if self.device.type == "cuda" else ""
            raise ValueError(f"other must be on {self.device}{hosts}, got one on {other.device}")
        records.check_like(self._records, other._records)
        self._load(other)
        self._refill_block_masks()
        return self

    def _load(self, other: PackedLayout) -> None:
        """Describe the row of another layout of the same form and on the right device.

        Masks of flex attention are kept for `_refill_block_masks`.
        """
        for layout in (self, other):
            layout._wait_for_all()
        with outside_inference_mode():
            if any(made is other for made in self._all_chunked()):  # it is filled too
                other = PackedLayout(records.cloned(other._records))
            self._check_rows_like(other)
        whole = None if self._chunks_of_layout is None else self._chunks_of_layout()
        if whole is not None:  # this layout is no longer the chunks of that one
            whole._chunked = {n: made for n, made in whole._chunked.items() if made is not self}
        with outside_inference_mode():
            self._copy_from(other)

    def _check_rows_like(self, other: PackedLayout) -> None:
        """Raise ValueError unless rows of padded batches that were made here fit those of other."""
        if self.batch is not None:
            other.batch_rows()
            records.check_like(self._records, other._records)
        for chunk_size, made in self._chunked.items():
            made._check_rows_like(other.chunked(chunk_size))

    def _all_chunked(self) -> list[PackedLayout]:
        """Return the layouts that `chunked` made of this one, of those, and so on."""
        own = list(self._chunked.values())
        return own + [made for one in own for made in one._all_chunked()]

    def _copy_from(self, other: PackedLayout) -> None:
        for tensor in (self.row.lengths, *records.static_tensors(self._records)):
            cache.invalidate(tensor)
        # Copies on other devices stay what they are: this layout is no longer one of them.
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            origin._moved.pop(self.device, None)
        for moved in self._moved.values():
            moved._origin = None
        self._moved, self._origin = {}, None
        held, before = records.filled(self._records, other._records), self._derived
        if self._segments is not None and other._segments is not None:
            self._segments._copy_from(other._segments)
            held = held._replace(row=held.row._replace(segments=self._segments.row))
        self._hold(held)
        if before.tokens is not None:  # graphs read these tensors
            _C.refill_token_metadata(*self._offsets(), *before.tokens)
            self._keep_tokens(before.tokens)
        if before.seq_idx is not None:
            self._keep_seq_idx(before.seq_idx.copy_(self._compute_seq_idx()))
        self._derived.block_masks = before.block_masks
        for chunk_size, made in self._chunked.items():
            made._copy_from(other.chunked(chunk_size))

    def _refill_block_masks(self) -> None:
        """Write the row into the masks of flex attention, which graphs read."""
        with outside_inference_mode():
            for layout in self._with_those_it_made():
                masks.refill_block_masks(layout)

    def _with_those_it_made(self) -> Iterator[PackedLayout]:
        yield self
        for made in (self._segments, *self._chunked.values()):
            if made is not None:
                yield from made._with_those_it_made()

    def pin_memory(self, device: Any = None) -> PackedLayout:
        """Return this layout in pinned memory, for DataLoader; on a GPU, return itself."""
        if self.device.type != "cpu" or self.cu_seqlens_static.is_pinned():
            return self
        self._check_unedited()
        with outside_inference_mode():
            return PackedLayout(records.pinned(self._records))

    def __reduce__(self) -> Recipe:
        """Return what makes the layout again: everything else follows from it, and is checked as
        arguments are.
        """
        self._check_unedited()
        self._wait_for_all()
        total, max_seqs, device = self.total_tokens, self.row.max_seqs, str(self.device)
        if self.part is not None:
            return self.part.source.recipe(total, self.part.group, device)
        if self.tree is not None:
            return _tree_again, (self.tree.nodes, total, max_seqs, self.tree.max_depth, device)
        segments = None
        if self.pads_between_sequences:
            segments = build.as_bytes(self.segments.lengths_on_host())
        batch = None
        if self.batch is not None:
            batch = build.as_bytes(self.batch.tokens >= 0), self.batch.tokens.shape[1]
        lengths = build.as_bytes(self.lengths_on_host())
        return _row_again, (lengths, segments, total, max_seqs, batch, device)

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
    layout = PackedLayout(Records(build.of_bytes(lengths, segment_lengths, total_tokens, max_seqs)))
    if batch is not None:
        layout._take_mask(build.mask_from_bytes(batch, layout.lengths), "nonzero")
    return layout.to(target)


def _tree_again(
    tree: _C.Tree, total_tokens: int, max_seqs: int, max_depth: int, device: str
) -> PackedLayout:
    if not isinstance(tree, _C.Tree):
        raise TypeError(f"tree must be that of a PackedTree, got {shown(tree)}")
    sizes = zip(
        (total_tokens, max_seqs, max_depth), ("total_tokens", "max_seqs", "max_depth"), strict=True
    )
    held = build.of_tree(tree, *(as_int(size, name, least=0) for size, name in sizes))
    return PackedLayout(held).to(as_device(device, "device"))


# So that torch.load reads a saved batch with weights_only=True, its default: these functions check
# what they are given, as other arguments. Empty bytes are pickled as a call of `bytes`.
torch.serialization.add_safe_globals([_row_again, _tree_again, build.tree_of_parts, bytes])


def check_layout(
    packed: object, name: str = "packed", *, parts: bool = True, trees: bool = True
) -> None:
    """Raise TypeError unless `packed` is a PackedLayout.

    With `CUSEQ_CHECK=1`, raise ValueError if its tensors were edited.

    Args:
        parts, trees: whether it may be a rank's part of a row, or the layout of a tree. If it is
            and may not be, this raises ValueError.
    """
    if not isinstance(packed, PackedLayout):
        raise TypeError(f"{name} must be a PackedLayout, got {type(packed).__name__}")
    packed._check_unedited()
    packed._check_whole(parts=parts, trees=trees)


def own_positions(packed: PackedLayout) -> Tensor | None:
    """Return `position_ids` where they do not follow from the lengths: of a rank's part, a tree."""
    return packed._own_positions


def check_documents(packed: PackedLayout, why: str) -> None:
    """Raise ValueError unless the row holds whole documents, one after the other.

    Args:
        why: what needs them; the message begins with it.
    """
    if (kind := special_kind(packed)) is not None:
        raise ValueError(f"{why}: packed must not be {kind}")


def special_kind(packed: PackedLayout) -> str | None:
    """Return "a rank's part of a row" or "a tree"; None for documents one after the other."""
    return packed._special_kind


def positions_for_models(packed: PackedLayout) -> Tensor:
    """Return the layout's `position_ids` as models take them: int64 `[1, total_tokens]`."""
    return packed.position_ids.long().unsqueeze(0)


def remember_offsets_on_host(packed: PackedLayout) -> None:
    """Register a host copy of the offsets, so that attention that runs sequence by sequence does
    not copy them from the GPU.
    """
    if packed.device.type != "cuda" or is_capturing(packed.device):
        return
    if packed._derived.offsets_on_host is None:
        with outside_inference_mode():
            packed._derived.offsets_on_host = _ops.cu_seqlens(packed.lengths_on_host())
    _C.remember_on_host(packed.cu_seqlens_static, packed._derived.offsets_on_host)
