"""Masks and arguments that a packed layout makes for other attention implementations."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, masks
from cuseq import _tree_masks as trees
from cuseq._arguments import as_window, check_dtype, check_flag, check_tensor
from cuseq._layout_chunks import LayoutChunks
from cuseq._layout_state import LayoutState, keep
from cuseq._modes import is_capturing, outside_inference_mode
from cuseq._spans import Spans, check_pairs, sorted_pairs, spans_on
from cuseq.cache import remember

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_ops = torch.ops.cuseq


class LayoutMasks(LayoutChunks):
    """Masks, xformers' bias and flash attention's keyword arguments of a layout."""

    def __init__(self, state: LayoutState):
        super().__init__(state)
        self._host_offsets: Tensor | None = None
        # Spans that passed the checks, by (spans, row_length, stream): the tensor on the layout's
        # device and the one on the host.
        self._spans: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None]] = {}

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
        self.check_unedited()
        self.check_whole()
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
            spans: disjoint (start, end) pairs in tokens of the row, each inside one sequence. The
                tokens of a span see each other, whatever `causal` and `window` are. Compiled code
                needs an ascending int32 tensor `[n_spans, 2]` on the layout's device instead; its
                values are not checked on a GPU.
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
        check_dtype(dtype, "dtype")
        check_flag(causal, "causal")
        check_flag(finite, "finite")
        if self.is_tree:
            window = self._tree_window(causal, window, spans, row_length)
            return trees.dense_mask(self, dtype, window, finite)
        offsets, tokens, window, spans, padded, row_length = self._mask_facts(
            window, spans, row_length
        )
        if is_compiling():
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
        """Return a cached mask for `flex_attention`, made once while the layout lives.

        Its blocks equal those of `create_block_mask`. They are computed in closed form, without
        memory of size tokens x tokens, without synchronisation and without compilation. The other
        arguments are those of `dense_mask`.

        Args:
            block_size: tokens of a block; one number, or one for queries and one for keys.

        Returns:
            torch's `BlockMask` of `[rows, 1, row_length, row_length]`.

        Raises:
            ValueError, TypeError: an argument is invalid.
        """
        check_flag(causal, "causal")
        sizes = masks.block_sizes(block_size)
        if self.is_tree:
            return trees.block_mask(
                self, self._tree_window(causal, window, spans, row_length), sizes
            )
        offsets, tokens, window, spans, padded, row_length = self._mask_facts(
            window, spans, row_length
        )
        if is_compiling():
            ranges = _ops.cached_mask_ranges(offsets, tokens, True, causal, window, spans, padded)
            parts = _ops.block_mask(ranges, row_length, *sizes)
            reads_end = not causal or spans is not None
            return masks.build_block_mask(ranges, parts, row_length, sizes, reads_end)
        build = masks.build_block_mask
        return _C.cached_block_mask(
            offsets, tokens, causal, window, spans, padded, row_length, *sizes, build
        )

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
        self.check_unedited()
        self.check_whole()
        window = as_window(window)
        from cuseq.integrations import xformers

        bias, _ = remember(
            self.state.lengths,
            "xformers_bias",
            lambda: xformers.causal_bias(self, window),
            window,
            tensors=itemgetter(1),
        )
        return bias

    def _tree_window(
        self, causal: bool, window: int | None, spans: Spans | None, row_length: int | None
    ) -> int | None:
        """Check the arguments of a tree's mask; return the window."""
        self.check_unedited()
        if not causal or spans is not None or row_length is not None:
            raise ValueError(
                "a tree's mask must be causal, without spans and row_length, got causal="
                f"{causal}, spans={spans!r} and row_length={row_length}"
            )
        return as_window(window)

    def _mask_facts(
        self, window: int | None, spans: Spans | None, row_length: int | None
    ) -> tuple[Tensor, int, int | None, Tensor | None, Tensor | None, int | None]:
        """Check the arguments that all masks share; return them with the layout's tensors."""
        self.check_unedited()
        if window is not None:
            window = as_window(window)
        if spans is not None or row_length is not None:
            row_length = masks.as_row_length(row_length)
            spans = self.checked_spans(spans, row_length)
        state, padded = self.state, self.cu_seqlens_padded_static
        return state.cu_seqlens_static, state.total_tokens, window, spans, padded, row_length

    def remember_offsets_on_host(self) -> None:
        """Register a host copy of the offsets, so that attention that runs sequence by sequence
        does not copy them from the GPU.
        """
        if self.device.type != "cuda" or is_capturing(self.device):
            return
        if self._host_offsets is None:
            with outside_inference_mode():
                self._host_offsets = _ops.cu_seqlens(self.lengths_on_host())
        _C.remember_on_host(self.cu_seqlens_static, self._host_offsets)

    def checked_spans(self, spans: Spans | None, row_length: int | None = None) -> Tensor | None:
        """Check the spans against the host's lengths; return them sorted, on the layout's device.

        Args:
            spans: (start, end) pairs in tokens of the row, or int32 `[n_spans, 2]`.
            row_length: tokens of the rows that the packed row is cut into; checked too.
        """
        if is_compiling():
            if spans is None or isinstance(spans, Tensor):
                return spans
            # Python ints would become constants of the graph, which then serves only one pack.
            raise TypeError(
                "spans must be an int32 tensor [n_spans, 2] inside compiled code, got "
                f"{type(spans).__name__}"
            )
        given = spans if isinstance(spans, Tensor) else None
        if given is not None:
            check_tensor(given, "spans")
        pairs = () if spans is None or isinstance(spans, Tensor) else sorted_pairs(spans)
        if not pairs and row_length is None:
            return given
        on_gpu = self.device.type == "cuda"
        # A tensor copied on one stream may not be ready yet on another stream.
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        key = (pairs, row_length, stream)
        kept = self._spans.get(key)
        if kept is None:
            padded = self.segments.known_lengths if self.pads_between_sequences else None
            on_host = check_pairs(pairs, row_length, self.known_lengths, padded, self.total_tokens)
            kept = keep(self._spans, key, (spans_on(self.device, on_host), on_host))
        if given is not None:
            return given
        checked, on_host = kept
        if on_gpu and checked is not None and on_host is not None:
            if not is_capturing(self.device):
                _C.remember_on_host(checked, on_host)
        return checked
