"""Properties of a packed layout: numbers on the host and tensors on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._layout_state import MAX_SEQLEN, NUM_REAL_TOKENS, NUM_SEQS, LayoutState
from cuseq._modes import CHECKING, is_capturing, may_keep, outside_inference_mode

if TYPE_CHECKING:
    from typing import Self

_ops = torch.ops.cuseq


class LayoutFacts:
    """The properties of a layout.

    The state holds from the start what attention reads, because a tensor that is first made inside
    a compiled region would cost a second graph. Other properties are computed at their first use.
    """

    # Whether `copy_` fills this layout again between the replays of a CUDA graph.
    is_static = False
    expected_sequences = 0  # of the rows that fill it in a graph; 0 if unknown

    def __init__(self, state: LayoutState):
        self.state = state
        self._segments: Self | None = None
        if state.segments is not None:
            self._segments = cast("Self", type(self)(state.segments))
        self._num_sequences = state.num_sequences
        self._lengths: Tensor | None = None
        self._cu_seqlens: Tensor | None = None
        self._tokens: tuple[Tensor, Tensor, Tensor] | None = None
        self._seq_idx: Tensor | None = None
        # With CUSEQ_CHECK=1: the version that each tensor had when it was made.
        self._versions: list[tuple[str, Tensor, int]] = []
        self.note_versions(cu_seqlens=state.cu_seqlens_static, lengths=state.lengths)
        self.note_versions(host_meta=state.host_meta, lengths_on_host=state.host_lengths)
        self.note_versions(position_ids=state.rank_positions)
        self._note_batch_rows(state.slots, state.tokens)
        self.note_versions(rank_rows=state.rank_rows, rank_meta=state.rank_meta)
        self.note_versions(tree_positions=state.tree_positions)
        self.note_versions(tree_rows=state.tree_rows, tree_meta=state.tree_meta)

    def note_versions(self, **tensors: Tensor | None) -> None:
        """With `CUSEQ_CHECK=1`, remember the versions of tensors for `check_unedited`."""
        if CHECKING and not is_compiling():
            self._versions += [
                (name, tensor, tensor._version)
                for name, tensor in tensors.items()
                if tensor is not None and not tensor.is_inference()
            ]

    def _note_batch_rows(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            self.note_versions(batch_rows=tensor)

    def check_unedited(self) -> None:
        """With `CUSEQ_CHECK=1`, raise ValueError if a tensor of the layout was edited.

        The check compares PyTorch's version counters. Writes through `.data`, NumPy or raw kernels
        do not change those.
        """
        if not CHECKING or is_compiling():
            return
        edited = [name for name, tensor, made in self._versions if tensor._version != made]
        if self._segments is not None:
            segments = self._segments._versions
            edited += [f"{n}_padded" for n, tensor, made in segments if tensor._version != made]
        if edited:
            raise ValueError(
                "tensors of a PackedLayout must not be edited, since they are shared, but these "
                f"(or their views) were: {', '.join('packed.' + name for name in edited)}; make a "
                "new layout instead"
            )

    def wait(self) -> Self:
        """Wait until the host values are available, check them and return the layout.

        This waits only if the lengths came from a GPU, and only once, for one small copy.
        """
        self._host_value(NUM_SEQS)  # the status in this host_meta covers the segments too
        return self

    def _host_value(self, slot: int) -> int:
        self._check_replays()
        return _C.read_host_meta(self.state.host_meta, slot)

    def _check_replays(self) -> None:
        """Raise RuntimeError while a CUDA graph is captured that will replay other lengths."""
        if self.is_static and is_capturing(self.device):
            raise RuntimeError(
                "lengths on the host, and tensors of their number, would be constants of the CUDA "
                "graph, which replays other lengths: use packed itself, packed.cu_seqlens_static "
                "or packed.position_ids"
            )

    @property
    def total_tokens(self) -> int:
        """Tokens of the row in memory, tail included."""
        return self.state.total_tokens

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
        state = self.state
        if state.lengths.device.type == "cpu":
            return state.lengths
        return None if state.from_device else state.host_lengths

    def lengths_on_host(self) -> Tensor:
        """Return int32 `[n_seqs]` on the host; waits for lengths that came from a GPU. Must not be
        edited.
        """
        self.wait()
        state = self.state
        lengths = state.lengths if state.host_lengths is None else state.host_lengths
        return lengths[: self.num_sequences]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.state.cu_seqlens_static.device

    @property
    def lengths(self) -> Tensor:
        """int32 `[n_seqs]`, tokens of each sequence. Must not be edited."""
        self._check_replays()
        if self._lengths is not None:
            return self._lengths
        lengths = self.state.lengths[: self.num_sequences]
        if may_keep(lengths):
            self._lengths = lengths
        return lengths

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[n_seqs + 1]`, offsets of the sequences' real tokens. Must not be edited."""
        self._check_replays()
        if self._cu_seqlens is not None:
            return self._cu_seqlens
        offsets = self.state.cu_seqlens_static[: self.num_sequences + 1]
        if may_keep(offsets):
            self._cu_seqlens = offsets
        return offsets

    @property
    def cu_seqlens_static(self) -> Tensor:
        """int32 `[max_seqs + 1]`, `cu_seqlens` with the last offset repeated. Must not be edited.

        Its shape depends only on `max_seqs`, so one compiled graph serves every pack.
        """
        return self.state.cu_seqlens_static

    @property
    def host_meta(self) -> Tensor:
        """int32 `[6]` on the CPU: number of sequences, longest length, total tokens, real tokens,
        status, greatest common divisor of the lengths. Must not be edited.

        Ops read it when they run, so compiled code never contains an old length.
        """
        return self.state.host_meta

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
        self.check_no_part()
        return None if self._segments is None else self._segments.cu_seqlens_static

    @property
    def segments(self) -> Self:
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
        positions = self.own_positions
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
        self.check_whole()
        if self._seq_idx is not None:
            return self._seq_idx
        self.check_unedited()
        seq_idx = self._compute_seq_idx()
        self._keep_seq_idx(seq_idx)
        return seq_idx

    def _compute_seq_idx(self) -> Tensor:
        with outside_inference_mode():
            _, sequences, is_pad = self._token_metadata()
            return sequences.masked_fill(is_pad, -1).unsqueeze(0)

    def _keep_seq_idx(self, seq_idx: Tensor) -> None:
        if may_keep(seq_idx) and not is_capturing(self.device):
            self._seq_idx = seq_idx
            self.note_versions(seq_idx=seq_idx)

    @property
    def rank_positions(self) -> Tensor | None:
        """`position_ids` if this is a rank's part of a row; None for a whole row. Must not be
        edited.
        """
        return self.state.rank_positions

    @property
    def own_positions(self) -> Tensor | None:
        """`position_ids` where they do not follow from the lengths: of a rank's part of a row, and
        of a tree. Must not be edited.
        """
        state = self.state
        return state.tree_positions if state.rank_positions is None else state.rank_positions

    @property
    def is_tree(self) -> bool:
        """Whether this is the layout of a `PackedTree`, whose sequences are the nodes."""
        return self.state.tree_rows is not None

    def check_no_tree(self) -> None:
        """Raise ValueError if this is the layout of a tree."""
        if self.state.tree_rows is not None:
            raise ValueError(
                "packed must hold its documents one after the other here, got the layout of a "
                "tree, in which a token may continue one that is not beside it"
            )

    def check_whole(self) -> None:
        """Raise ValueError if this is a rank's part of a row, or the layout of a tree."""
        self.check_no_part()
        self.check_no_tree()

    def check_no_part(self) -> None:
        """Raise ValueError if this is a rank's part of a row."""
        if self.state.rank_positions is not None:
            raise ValueError(
                "packed must describe a whole row here, got the part of it that cp_partition gave "
                "to one rank: its tokens have neighbours on other ranks"
            )

    def _token_metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each token, its position in its segment, its `seq_ids` and whether it is
        padding.
        """
        if self._tokens is not None:
            return self._tokens
        self.check_unedited()
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
        if may_keep(*tokens) and not is_capturing(self.device):
            self._tokens = tokens
            positions, sequences, is_pad = tokens
            self.note_versions(position_ids=positions, seq_ids=sequences, moe_padding_mask=is_pad)

    def made_for_tokens(self) -> tuple[tuple[Tensor, Tensor, Tensor] | None, Tensor | None]:
        """Return `position_ids`, `seq_ids` and `moe_padding_mask`, and `seq_idx`, if made."""
        return self._tokens, self._seq_idx

    def refill(self, tokens: tuple[Tensor, Tensor, Tensor] | None, seq_idx: Tensor | None) -> None:
        """Compute what `made_for_tokens` returned for another row, into the same tensors."""
        if tokens is not None:
            _C.refill_token_metadata(*self._offsets(), *tokens)
            self._keep_tokens(tokens)
        if seq_idx is not None:
            self._keep_seq_idx(seq_idx.copy_(self._compute_seq_idx()))

    def batch_rows(self) -> tuple[Tensor, Tensor]:
        """Return the batch slot of each token, and the token of each slot of the padded batch.

        If the layout was made without a mask, the batch is padded on the right. The tensors must
        not be edited.
        """
        self.check_whole()
        slots, tokens = self.state.slots, self.state.tokens
        if slots is None or tokens is None:
            self.check_unedited()
            positions = torch.arange(self.max_seqlen, device=self.device)
            return self.take_mask(positions < self.lengths.unsqueeze(1), "nonzero")
        return slots, tokens

    def take_mask(self, mask: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Compute slots and token metadata from the mask of a padded batch, in one kernel."""
        offsets = self.segments.cu_seqlens_static
        with outside_inference_mode():
            made = _ops.mask_rows(mask, offsets, self.total_tokens, kind)
        slots, tokens, positions, sequences, is_pad = made
        if may_keep(slots) and not is_capturing(self.device):
            self.state = self.state._replace(slots=slots, tokens=tokens)
            self._note_batch_rows(slots, tokens)
            self._keep_tokens((positions, sequences, is_pad))
        return slots, tokens
