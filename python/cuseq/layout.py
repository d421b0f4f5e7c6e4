"""`PackedLayout`: where the sequences of a packed row lie."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from math import lcm
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuseq import _C, masks
from cuseq._arguments import as_int, as_size, check_flag, check_tensor
from cuseq._modes import is_capturing, may_keep, outside_inference_mode
from cuseq._transfer import copy_pair, to_host

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_ops = torch.ops.cuseq

Spans = Sequence[tuple[int, int]] | Tensor

_NUM_SEQS, _MAX_SEQLEN, _TOTAL_TOKENS, _NUM_REAL_TOKENS, _STATUS, LENGTH_DIVISOR = range(6)


class PackedLayout:
    """Where the sequences of a packed row lie. It holds no token data.

    Make it where lengths are still Python ints, in the collator, and hand it to the model: then no
    layer has to derive anything and nothing ever waits for the GPU.

    Attributes:
        lengths: int32 `[n_seqs]`, tokens of each sequence. A snapshot: editing the tensor that the
            layout was made from changes nothing here.
        cu_seqlens: int32 `[n_seqs + 1]`, their offsets.
        cu_seqlens_static: int32 `[max_seqs + 1]`, the same with the last offset repeated. Its shape
            depends on `max_seqs` alone, so compiled code serves every pack with one graph.
        host_meta: int32 `[6]` on the CPU: number of sequences, longest length, total tokens, real
            tokens, status, greatest common divisor of the lengths. Ops read it when they run, so
            compiled code never holds a stale length.
        position_ids: int32 `[total_tokens]`, position inside the segment, padding counted on; the
            tail restarts at 0.
        seq_ids: int32 `[total_tokens]`, index of the sequence, its padding's too; `n_seqs` on the
            tail.
        moe_padding_mask: bool `[total_tokens]`, **True is padding** or tail.
        seq_idx: int32 `[1, total_tokens]`, index of the sequence, -1 on padding and tail.
        cu_seqlens_padded: int32 `[n_seqs + 1]`, where segments lie in memory. Equal to `cu_seqlens`
            without padding between sequences.
        rope_cu_seqlens: the same: positions restart where segments start.
        pads_between_sequences: whether segments are longer than their sequences, a Python bool, as
            the layout was made.
        max_seqlen: the longest length, a Python int; `max_seqlen_padded` the longest segment's.
        total_tokens: tokens of the row in memory, tail included.
        num_real_tokens: the sum of the lengths.
        num_sequences: how many sequences there are, those of length zero included.
        device: where the tensors lie (`host_meta` is always on the CPU).

    A layout made from lengths on a GPU starts to copy them to the host. The first use of a host
    value (`max_seqlen`, `num_real_tokens`, attention) waits for that by its event, never for the
    stream; what is wrong with the lengths is raised there.

    It is a plain class on purpose: FSDP2 rebuilds dataclasses and pytree nodes for every module.
    """

    def __init__(
        self,
        lengths: Tensor,
        cu_seqlens_static: Tensor,
        host_meta: Tensor,
        total_tokens: int,
        num_sequences: int | None,
    ):
        # What attention reads is here from the start: a tensor first made inside a compiled region
        # would cost a second graph. The rest is made when asked for.
        self.cu_seqlens_static = cu_seqlens_static
        self.host_meta = host_meta
        self._total_tokens = total_tokens
        self._all_lengths = lengths
        # Of a layout that was moved from the host: what nobody has to wait for.
        self.known_lengths = lengths if lengths.device.type == "cpu" else None
        # Of a layout from lengths on a GPU: right after wait().
        self._copied_lengths = self.known_lengths
        self._num_sequences = num_sequences
        self._lengths: Tensor | None = None
        self._cu_seqlens: Tensor | None = None
        self._tokens: tuple[Tensor, Tensor, Tensor] | None = None
        self._host_offsets: Tensor | None = None
        # The layout of the segments, where they are longer than their sequences.
        self._segments: PackedLayout | None = None
        self._seq_idx: Tensor | None = None
        # Of a rank's part of a row: positions in the whole sequences.
        self.rank_positions: Tensor | None = None
        # How a row is dealt to ranks, by their number and zigzag.
        self._deals: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        # Of a padded batch: the slot of each token and the token of each slot.
        self._batch: tuple[Tensor, Tensor] | None = None
        # By spans, row_length and stream, once they were found to be right: the spans where the
        # layout lies, and on the host.
        self._spans: dict[tuple, tuple[Tensor | None, Tensor | None]] = {}
        self._moved: dict[torch.device, PackedLayout] = {}
        self._origin: weakref.ref[PackedLayout] | None = None

    # ----------------------------------------------------------------------------- made from

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
        """From the lengths of the sequences, in the order in which they lie.

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
        """
        source = _as_tensor(lengths, "lengths")
        if all(type(one) is int and one == 1 for one in (segment_multiple, total_multiple)):
            return cls._build(source, total_tokens, max_seqs, device, from_cu_seqlens=False)
        layout = cls._build_segments(
            source, total_tokens, segment_multiple, total_multiple, max_seqs
        )
        return layout.to(source.device if device is None else device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        total_tokens: int | None = None,
        *,
        max_seqs: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """From offsets, int32 or int64 `[n_seqs + 1]` that start at 0 and do not descend.

        Arguments, errors and waiting otherwise as for `from_lengths`.
        """
        source = _as_tensor(cu_seqlens, "cu_seqlens")
        return cls._build(source, total_tokens, max_seqs, device, from_cu_seqlens=True)

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
        """From the mask of a padded batch: row i is sequence i, as long as it has real tokens.

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
        real, kind = _real_tokens(mask, true_is_pad)
        lengths = _ops.lengths_from_padding_mask(real, kind)
        layout = cls._build_segments(
            lengths, total_tokens, segment_multiple, total_multiple, max_seqs
        )
        layout = layout.to(mask.device)  # from the host, where lengths had to be waited for
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
        """From positions that restart with each sequence; see `cu_seqlens_from_position_ids`.

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
        check_tensor(position_ids, "position_ids")
        _check_not_meta(position_ids, "position_ids")
        max_seqs = as_size(max_seqs, "max_seqs")
        offsets, num_seqs = _ops.cu_seqlens_from_position_ids(position_ids, max_seqs, plane)
        tokens = position_ids[0] if position_ids.dim() == 3 else position_ids
        return cls._build(
            offsets, tokens.numel(), max_seqs, device, from_cu_seqlens=True, num_seqs=num_seqs
        )

    @classmethod
    def _build_segments(
        cls,
        lengths: Tensor,
        total_tokens: int | None,
        segment_multiple: int | Sequence[int],
        total_multiple: int | Sequence[int],
        max_seqs: int | None,
    ) -> PackedLayout:
        segment_multiple = common_multiple(segment_multiple, "segment_multiple")
        total_multiple = common_multiple(total_multiple, "total_multiple")
        total_multiple = lcm(segment_multiple, total_multiple)
        if total_tokens is None:
            lengths = lengths if lengths.device.type == "cpu" else to_host(lengths)
            _C.tokens_of(lengths, False)  # raises what is wrong with them, not with their sum
            segments = ((lengths.long() + segment_multiple - 1) // segment_multiple).sum().item()
            total_tokens = -(-segments * segment_multiple // total_multiple) * total_multiple
        elif as_int(total_tokens, "total_tokens") % total_multiple != 0:
            raise ValueError(
                f"total_tokens must be a multiple of {total_multiple}, which "
                f"segment_multiple and total_multiple give together, got {total_tokens}"
            )
        if max_seqs is None:
            max_seqs = max(total_tokens, lengths.shape[0])
        max_seqs = as_size(max_seqs, "max_seqs")
        if segment_multiple == 1:
            return cls._build(lengths, total_tokens, max_seqs, None, from_cu_seqlens=False)
        with outside_inference_mode():
            made = _ops.segment_metadata(lengths, total_tokens, max_seqs, segment_multiple)
            layout = cls._started(*made[:3], total_tokens, lengths.shape[0])
            layout._segments = cls._started(*made[3:], total_tokens, lengths.shape[0])
        if lengths.device.type == "cpu":
            layout._segments.wait()
        return layout

    @classmethod
    def _started(
        cls,
        lengths: Tensor,
        offsets: Tensor,
        meta: Tensor,
        total_tokens: int,
        num_sequences: int | None,
    ) -> PackedLayout:
        """What a kernel has made, with its copy to the host on the way."""
        host_meta, host_lengths = _C.start_host_copy([meta, lengths])
        layout = cls(lengths, offsets, host_meta, total_tokens, num_sequences)
        layout._copied_lengths = host_lengths
        return layout

    @classmethod
    def _build(
        cls,
        source: Tensor,
        total_tokens: int | None,
        max_seqs: int | None,
        device: torch.device | str | None,
        *,
        from_cu_seqlens: bool,
        num_seqs: Tensor | None = None,
    ) -> PackedLayout:
        total_tokens = as_size(total_tokens, "total_tokens")
        max_seqs = as_size(max_seqs, "max_seqs")
        if total_tokens is None:
            if source.device.type != "cpu":
                # Values are needed now: with them on the host nothing has to wait again.
                device = source.device if device is None else device
                source = to_host(source)
            total_tokens = _C.tokens_of(source, from_cu_seqlens)
        n_seqs = source.shape[0] - 1 if from_cu_seqlens else source.shape[0]
        if max_seqs is None:
            # Positions are as many as tokens, and have no sequence of length zero.
            max_seqs = total_tokens if num_seqs is not None else max(total_tokens, n_seqs)
        with outside_inference_mode():
            lengths, offsets, meta = _ops.layout_metadata(
                source, total_tokens, max_seqs, from_cu_seqlens, num_seqs
            )
            count = n_seqs if num_seqs is None else None
            layout = cls._started(lengths, offsets, meta, total_tokens, count)
        if meta.device.type == "cpu":
            layout.wait()  # raises now what is wrong
        return layout if device is None else layout.to(device)

    # ----------------------------------------------------------------------------- host values

    def wait(self) -> PackedLayout:
        """Waits until host values are there and checks them; returns itself.

        Only a layout whose lengths came from a GPU can make it wait, once, for one small copy.
        """
        _C.read_host_meta(self.host_meta, _NUM_SEQS)  # its status is that of the segments too
        return self

    def _host_value(self, slot: int) -> int:
        return _C.read_host_meta(self.host_meta, slot)

    @property
    def total_tokens(self) -> int:
        return self._total_tokens

    @property
    def num_sequences(self) -> int:
        if self._num_sequences is None:
            self._num_sequences = self._host_value(_NUM_SEQS)
        return self._num_sequences

    @property
    def max_seqlen(self) -> int:
        return self._host_value(_MAX_SEQLEN)

    @property
    def num_real_tokens(self) -> int:
        return self._host_value(_NUM_REAL_TOKENS)

    # ----------------------------------------------------------------------------- tensors

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens_static.device

    @property
    def lengths(self) -> Tensor:
        if self._lengths is not None:
            return self._lengths
        lengths = self._all_lengths[: self.num_sequences]
        if may_keep(lengths):
            self._lengths = lengths
        return lengths

    @property
    def cu_seqlens(self) -> Tensor:
        if self._cu_seqlens is not None:
            return self._cu_seqlens
        offsets = self.cu_seqlens_static[: self.num_sequences + 1]
        if may_keep(offsets):
            self._cu_seqlens = offsets
        return offsets

    @property
    def segments(self) -> PackedLayout:
        return self if self._segments is None else self._segments

    @property
    def cu_seqlens_padded_static(self) -> Tensor | None:
        self.check_whole()
        return None if self._segments is None else self._segments.cu_seqlens_static

    def check_whole(self) -> None:
        if self.rank_positions is not None:
            raise ValueError(
                "packed must describe a whole row here, got the part of it that cp_partition gave "
                "to one rank: its tokens have neighbours on other ranks"
            )

    @property
    def seq_idx(self) -> Tensor:
        """int32 `[1, total_tokens]`, the sequence of each token, -1 on pads and tail.

        As causal-conv1d and Mamba-2 take it, for whom negative is padding.
        """
        self.check_whole()
        if self._seq_idx is not None:
            return self._seq_idx
        with outside_inference_mode():
            _, sequences, is_pad = self._token_metadata()
            seq_idx = sequences.masked_fill(is_pad, -1).unsqueeze(0)
        if may_keep(seq_idx) and not is_capturing(self.device):
            self._seq_idx = seq_idx
        return seq_idx

    @property
    def moe_padding_mask(self) -> Tensor:
        """bool `[total_tokens]`, True on pads and tail, for the statistics of a router."""
        return self._token_metadata()[2]

    @property
    def cu_seqlens_padded(self) -> Tensor:
        return self.segments.cu_seqlens

    @property
    def max_seqlen_padded(self) -> int:
        return self.segments.max_seqlen

    @property
    def rope_cu_seqlens(self) -> Tensor:
        return self.cu_seqlens_padded

    @property
    def pads_between_sequences(self) -> bool:
        return self._segments is not None

    @property
    def position_ids(self) -> Tensor:
        return self._token_metadata()[0] if self.rank_positions is None else self.rank_positions

    @property
    def seq_ids(self) -> Tensor:
        return self._token_metadata()[1]

    def _token_metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions in the segments, their numbers, and whether there is padding."""
        if self._tokens is not None:
            return self._tokens
        padded = None if self._segments is None else self._segments.cu_seqlens
        with outside_inference_mode():
            tokens = _ops.token_metadata(self.cu_seqlens, self._total_tokens, padded)
        # What a graph's capture makes holds nothing before its replay, and later graphs reuse it.
        if may_keep(*tokens) and not is_capturing(self.device):
            self._tokens = tokens
        return tokens

    def flash_kwargs(self) -> dict[str, Any]:
        """Keywords of transformers' flash attention: offsets as tensors, longest lengths as ints.

        `packed`, the layout itself, goes with them, since the four names alone make compiled code
        fall back to bounds. Of a layout from lengths on a GPU the first call waits for their copy.

        Returns:
            `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `[n_seqs + 1]`; `max_length_q` and
            `max_length_k`, tokens; `packed`.

        Raises:
            ValueError: there is padding between sequences, or the layout is a rank's part.
        """
        self.check_whole()
        if self._segments is not None:
            raise ValueError(
                "packed has padding between its sequences, which flash attention of transformers "
                "would compute with: use cuseq.varlen_attention, or segment_multiple=1"
            )
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "packed": self,
        }

    def batch_rows(self) -> tuple[Tensor, Tensor]:
        """Slots of the tokens, tokens of the slots; without a mask, of padding on the right."""
        self.check_whole()
        if self._batch is None:
            positions = torch.arange(self.max_seqlen, device=self.device)
            mask = positions < self.lengths.unsqueeze(1)
            return self._take_mask(mask, "nonzero")
        return self._batch

    def _take_mask(self, mask: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """What a padded batch's mask says of its slots and of the row's tokens, in one kernel."""
        with outside_inference_mode():
            slots, tokens, *of_tokens = _ops.mask_rows(
                mask, self.segments.cu_seqlens_static, self._total_tokens, kind
            )
        if may_keep(slots) and not is_capturing(self.device):
            self._batch = slots, tokens
            self._tokens = tuple(of_tokens)
        return slots, tokens

    # ----------------------------------------------------------------------------- masks

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
        """A mask for `scaled_dot_product_attention`, made once for as long as the layout lives.

        It lies in the identity cache, which bounds the memory of all masks by
        `CUSEQ_CACHE_MAX_BYTES`, and must not be edited. Compiled code makes it anew in each graph:
        make it outside and pass it in. Never synchronises.

        Args:
            dtype: bool, where True is visible, or float32, bfloat16, float16 or float64, to be
                added to the scores: 0 where visible. On a GPU the query's own is faster: SDPA
                converts a bool mask in every call.
            causal: whether a token sees only itself and what comes before it.
            window: keys that a token sees, itself included; with `causal=False` to both sides.
            spans: (start, end) pairs in tokens of the row, each inside one sequence and apart from
                each other, whose tokens see each other whatever `causal` and `window` say. Or, as
                compiled code needs it, an int32 tensor `[n_spans, 2]` beside the layout, ascending;
                values on a GPU are not checked.
            row_length: cuts the row into rows of that many tokens, a batch; no sequence may cross
                an end. Default one row.
            finite: hides with the dtype's lowest finite value instead of -inf.

        Returns:
            `[rows, 1, row_length, row_length]`, lines aligned to 16 elements in memory. Tokens of
            the tail see themselves alone.

        Raises:
            ValueError, TypeError: what is wrong with an argument; or the mask would take more than
                `CUSEQ_DENSE_MASK_MAX_BYTES`.
        """
        check_flag(causal, "causal")
        if spans is not None or row_length is not None:
            spans = self.checked_spans(spans, row_length)
        offsets, padded, tokens = (
            self.cu_seqlens_static,
            self.cu_seqlens_padded_static,
            self._total_tokens,
        )
        if torch.compiler.is_compiling():
            return _ops.cached_dense_mask(
                offsets, tokens, True, causal, window, spans, padded, row_length, dtype, finite
            )
        return _C.cached_dense_mask(
            offsets, tokens, causal, window, spans, padded, row_length, dtype, finite
        )

    def block_mask(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        spans: Spans | None = None,
        row_length: int | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """A mask for `flex_attention`, made once for as long as the layout lives.

        Block for block what `create_block_mask` finds, in closed form: no memory of tokens x
        tokens, no synchronisation, no compiling. Arguments otherwise as for `dense_mask`.

        Args:
            block_size: tokens of a block, for queries and keys, or of each.

        Returns:
            torch's `BlockMask` of `[rows, 1, row_length, row_length]`.

        Raises:
            ValueError, TypeError: what is wrong with an argument.
        """
        check_flag(causal, "causal")
        if spans is not None or row_length is not None:
            spans = self.checked_spans(spans, row_length)
        sizes = masks.block_sizes(block_size)
        offsets, padded, tokens = (
            self.cu_seqlens_static,
            self.cu_seqlens_padded_static,
            self._total_tokens,
        )
        if torch.compiler.is_compiling():
            ranges = _ops.cached_mask_ranges(offsets, tokens, True, causal, window, spans, padded)
            parts = _ops.block_mask(ranges, row_length, *sizes)
            reads_end = not causal or spans is not None
            return masks.build_block_mask(ranges, parts, row_length, sizes, reads_end)
        return _C.cached_block_mask(
            offsets,
            tokens,
            causal,
            window,
            spans,
            padded,
            row_length,
            *sizes,
            masks.build_block_mask,
        )

    def xformers_bias(self, *, window: int | None = None) -> Any:
        """xformers' `BlockDiagonalCausalMask`, made once for as long as the layout lives.

        Its own constructors copy lengths to the GPU and wait. Here nothing waits, but for the
        layout's one copy where lengths came from a GPU. The tail is one causal segment of its own,
        since such a bias knows nothing but segments.

        Args:
            window: keys that a token sees, itself included: xformers' local attention.

        Raises:
            ImportError: xformers is not installed.
            ValueError: window is below 1, or the row has no token.
        """
        self.check_whole()
        from cuseq.integrations import xformers

        return _C.cached_xformers_bias(
            self._all_lengths, window, lambda: xformers.causal_bias(self, window)
        )

    def lengths_on_host(self) -> Tensor:
        """int32 `[n_seqs]`; waits where they came from a GPU."""
        self.wait()
        return self._copied_lengths[: self.num_sequences]

    def remember_offsets_on_host(self) -> None:
        """For attention that runs sequence by sequence: nothing has to be copied back."""
        if self.device.type != "cuda" or is_capturing(self.device):
            return
        if self._host_offsets is None:
            with outside_inference_mode():
                self._host_offsets = _ops.cu_seqlens(self.lengths_on_host())
        _C.remember_on_host(self.cu_seqlens_static, self._host_offsets)

    def checked_spans(self, spans: Spans | None, row_length: int | None = None) -> Tensor | None:
        """Spans beside the layout, in order. What the host knows of them and of rows is checked."""
        if torch.compiler.is_compiling():
            if spans is None or isinstance(spans, Tensor):
                return spans
            # Their numbers would be constants of a graph that serves one pack alone.
            raise TypeError(
                "spans must be an int32 tensor [n_spans, 2] inside compiled code, got "
                f"{type(spans).__name__}"
            )
        given = spans if isinstance(spans, Tensor) else None
        listed = () if given is not None or spans is None else _sorted_pairs(spans)
        if not listed and row_length is None:
            return given
        on_gpu = self.device.type == "cuda"
        # A tensor that one stream copies is not there yet for another.
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        key = (listed, row_length, stream)
        if key not in self._spans:
            self._spans[key] = self._check_spans(listed, row_length)
        if given is not None:
            return given
        spans, on_host = self._spans[key]
        if on_gpu and spans is not None and not is_capturing(self.device):
            _C.remember_on_host(spans, on_host)
        return spans

    def _check_spans(
        self, listed: tuple[tuple[int, int], ...], row_length: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        host = dict(dtype=torch.int32, device="cpu")
        with outside_inference_mode():
            try:
                spans = torch.tensor(listed, **host) if listed else None
            except RuntimeError as error:
                raise ValueError(
                    f"spans must lie inside the row of {self._total_tokens} tokens, got {listed}"
                ) from error
            if self.known_lengths is not None:
                offsets = _ops.cu_seqlens(self.known_lengths)
                padded = None
                if self._segments is not None:
                    padded = _ops.cu_seqlens(self._segments.known_lengths)
                _C.check_spans_and_rows(offsets, padded, self._total_tokens, spans, row_length)
            else:  # one sequence, as far as the host knows
                offsets = torch.tensor([0, self._total_tokens], **host)
                _C.check_spans_and_rows(offsets, None, self._total_tokens, spans, None)
            if spans is None or self.device.type == "cpu":
                return spans, spans
            if is_capturing(self.device):
                raise RuntimeError(
                    "spans must be a tensor on the layout's device while a CUDA graph is captured"
                )
            if self.device.type != "cuda":
                return spans.to(self.device), spans
            flat, _ = _C.copy_to_device(spans.view(-1), _empty(), self.device)
            return flat.view(-1, 2), spans

    def with_total_tokens(self, total_tokens: int) -> PackedLayout:
        """The same sequences in a longer row: what is added is tail. `max_seqs` stays.

        Waits for the layout's host values where lengths came from a GPU.
        """
        total_tokens = as_int(total_tokens, "total_tokens")
        if total_tokens < self._total_tokens:
            raise ValueError(
                f"total_tokens must be at least the row's {self._total_tokens}, got {total_tokens}"
            )
        if total_tokens >= 2**31:
            raise ValueError(f"total_tokens must be at most 2^31 - 1, got {total_tokens}")
        if total_tokens == self._total_tokens:
            return self
        self.wait()  # lengths that are wrong must not become right
        if self._segments is not None:
            self._segments.wait()
        with outside_inference_mode():
            return self._in_longer_row(total_tokens)

    def _in_longer_row(self, total_tokens: int) -> PackedLayout:
        meta = self.host_meta.clone()
        meta[_TOTAL_TOKENS] = total_tokens
        # A tensor of its own: the cache knows xformers' bias, which has the tail, by the lengths.
        lengths = self._all_lengths.view_as(self._all_lengths)
        packed = PackedLayout(
            lengths, self.cu_seqlens_static, meta, total_tokens, self._num_sequences
        )
        packed.known_lengths = self.known_lengths
        packed._copied_lengths = self._copied_lengths
        if self._segments is not None:
            packed._segments = self._segments._in_longer_row(total_tokens)
        more = total_tokens - self._total_tokens
        if self._batch is not None:
            slots, tokens = self._batch
            packed._batch = torch.nn.functional.pad(slots, (0, more), value=-1), tokens
        if self.rank_positions is not None:
            tail = torch.arange(more, dtype=torch.int32, device=self.device)
            packed.rank_positions = torch.cat([self.rank_positions, tail])
        return packed

    # ----------------------------------------------------------------------------- moved about

    def to(
        self, device: torch.device | str | int | None, non_blocking: bool = True
    ) -> PackedLayout:
        """This layout on another device: itself where it lies there, else one memoised layout.

        As with a tensor, None is no device: it stays where it is.

        From the CPU to a GPU the copy goes through pinned memory and never waits, whatever
        `non_blocking` says; the other way it waits for the data.
        """
        target = self.device if device is None else _with_index(torch.device(device))
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
            with outside_inference_mode():
                moved = self._on(target)
            # Weak, since a cycle would keep GPU memory until the garbage collector runs.
            moved._origin = weakref.ref(self)
            # Another thread may have moved it meanwhile: there is one, whoever made it.
            self._moved.setdefault(target, moved)
        return self._moved[target]

    def _on(self, device: torch.device) -> PackedLayout:
        offsets, lengths = copy_pair(self.cu_seqlens_static, self._all_lengths, device)
        moved = PackedLayout(
            lengths, offsets, self.host_meta, self._total_tokens, self._num_sequences
        )
        if moved.known_lengths is None:
            moved.known_lengths = self.known_lengths
            moved._copied_lengths = self._copied_lengths
        if self._segments is not None:
            moved._segments = self._segments._on(device)
        if self.rank_positions is not None:
            moved.rank_positions, _ = copy_pair(self.rank_positions, _empty(), device)
        if self._batch is not None:
            moved._batch = copy_pair(*self._batch, device)
        return moved

    def pin_memory(self, device: Any = None) -> PackedLayout:
        """This layout in pinned memory, as DataLoader asks for it. Itself where it is on a GPU."""
        if self.device.type != "cpu" or self.cu_seqlens_static.is_pinned():
            return self
        with outside_inference_mode():
            pinned = PackedLayout(
                self._all_lengths.pin_memory(),
                self.cu_seqlens_static.pin_memory(),
                self.host_meta,
                self._total_tokens,
                self._num_sequences,
            )
            if self._segments is not None:
                pinned._segments = self._segments.pin_memory()
            if self._batch is not None:
                pinned._batch = tuple(tensor.pin_memory() for tensor in self._batch)
            if self.rank_positions is not None:
                pinned.rank_positions = self.rank_positions.pin_memory()
        return pinned

    def __reduce__(self):
        self.wait()  # lengths that are wrong must not arrive as right ones
        max_seqs = self.cu_seqlens_static.shape[0] - 1
        segments = None if self._segments is None else _as_bytes(self._segments.lengths)
        batch = (
            None if self._batch is None else (*map(_as_bytes, self._batch), self._batch[1].shape)
        )
        positions = None if self.rank_positions is None else _as_bytes(self.rank_positions)
        return _restore, (
            _as_bytes(self.lengths),
            self._total_tokens,
            max_seqs,
            str(self.device),
            segments,
            batch,
            positions,
        )

    def __copy__(self) -> PackedLayout:
        return self  # immutable

    def __deepcopy__(self, memo: dict) -> PackedLayout:
        return self

    def __repr__(self) -> str:
        try:
            self.wait()
        except ValueError as error:
            return f"PackedLayout(invalid: {error})"
        return (
            f"PackedLayout({self.num_sequences} sequences, longest {self.max_seqlen}, "
            f"{self.num_real_tokens} real of {self._total_tokens} tokens, {self.device})"
        )


def check_layout(packed: object) -> None:
    """What is given as `packed` is easily lengths or offsets."""
    if not isinstance(packed, PackedLayout):
        raise TypeError(f"packed must be a PackedLayout, got {type(packed).__name__}")


def _as_bytes(numbers: Tensor) -> bytes:
    """A tensor would cost a DataLoader worker a shared-memory file each."""
    return array("i", numbers.flatten().tolist()).tobytes()


def _from_bytes(numbers: bytes) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=torch.int32) if numbers else _empty()


def _restore(
    lengths: bytes,
    total_tokens: int,
    max_seqs: int,
    device: str,
    segments: bytes | None,
    batch: tuple[bytes, bytes, torch.Size] | None,
    positions: bytes | None,
) -> PackedLayout:
    def layout_of(numbers: bytes) -> PackedLayout:
        return PackedLayout.from_lengths(_from_bytes(numbers), total_tokens, max_seqs=max_seqs)

    with outside_inference_mode():
        packed = layout_of(lengths)
        if segments is not None:
            packed._segments = layout_of(segments)
        if batch is not None:
            slots, tokens, shape = batch
            packed._batch = _from_bytes(slots), _from_bytes(tokens).view(shape)
        if positions is not None:
            packed.rank_positions = _from_bytes(positions)
        return packed.to(device)


def _real_tokens(mask: Tensor, true_is_pad: bool) -> tuple[Tensor, str]:
    """The mask `[batch, seqlen]` of real tokens, and how its elements say so."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"mask must be a tensor, got {type(mask).__name__}: without one give lengths, by "
            "PackedLayout.from_lengths"
        )
    _check_not_meta(mask, "mask")
    check_flag(true_is_pad, "true_is_pad")
    if mask.dim() == 4:
        if mask.shape[-1] != mask.shape[-2] or mask.shape[1] < 1:
            raise ValueError(
                f"mask must be [batch, 1 or heads, seqlen, seqlen], got {tuple(mask.shape)}"
            )
        mask = mask[:, 0].diagonal(dim1=-2, dim2=-1)
        if mask.is_floating_point():
            if true_is_pad:
                raise ValueError(
                    "true_is_pad must be False for an additive mask, whose negative elements hide"
                )
            if mask.device.type == "cpu" and not bool((mask <= 0).all()):
                raise ValueError(
                    "an additive mask must have no positive element and no NaN on its diagonal, "
                    f"got {mask[~(mask <= 0)][0].item()}: if it holds ones and zeros, give "
                    "mask.bool()"
                )
            return mask, "additive"
        is_signed = mask.dtype.is_signed and not mask.is_complex()
        if is_signed and mask.device.type == "cpu" and bool((mask < 0).any()):
            raise ValueError(
                f"a 4-D integer mask must have no negative element, got {mask.min().item()}: an "
                "additive one has to be floating point"
            )
    return mask, "zero" if true_is_pad else "nonzero"


def common_multiple(multiple: int | Sequence[int], name: str) -> int:
    multiples = multiple if isinstance(multiple, Sequence) else (multiple,)
    return as_int(lcm(*(as_int(one, name, least=1) for one in multiples)), name)


def _sorted_pairs(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    try:
        return tuple(sorted((index(start), index(end)) for start, end in spans))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"spans must be pairs of ints or an int32 tensor [n_spans, 2], got {spans!r}"
        ) from error


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.int32, device="cpu")


def _as_tensor(values: Sequence[int] | Tensor, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            # index() refuses what int() would cut off. The device is named because a device context
            # would move host lengths otherwise.
            values = torch.tensor([index(v) for v in values], dtype=torch.int64, device="cpu")
        except TypeError as error:
            raise TypeError(f"{name} must be ints or an integer tensor, got {values!r}") from error
        except (OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(f"{name} must fit in int64, got {values!r}") from error
    if values.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(values.shape)}")
    _check_not_meta(values, name)
    return values


def _check_not_meta(values: Tensor, name: str) -> None:
    if values.device.type == "meta":
        raise ValueError(f"{name} must have values, got a tensor on meta")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        return torch.device("cpu")  # accelerate says cpu:0; tensors there say cpu
    return device
