"""Masks and arguments of a packed layout, for attention that is not cuseq's."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, masks
from cuseq._arguments import as_window, check_dtype, check_flag, check_tensor
from cuseq._layout_facts import LayoutFacts
from cuseq._layout_state import LayoutState
from cuseq._modes import is_capturing, outside_inference_mode
from cuseq._spans import Spans, check_pairs, sorted_pairs, spans_on
from cuseq.cache import remember

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_ops = torch.ops.cuseq


class LayoutMasks(LayoutFacts):
    """What attention of other kinds takes: masks, xformers' bias, flash attention's keywords."""

    def __init__(self, state: LayoutState):
        super().__init__(state)
        self._host_offsets: Tensor | None = None
        # By spans, row_length and stream, once they were found to be right: the spans where the
        # layout lies, and on the host.
        self._spans: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None]] = {}

    def flash_kwargs(self) -> dict[str, Any]:
        """Return transformers' flash attention keywords: offsets as tensors, lengths as ints.

        `packed`, the layout itself, goes with them, since the four names alone make compiled code
        fall back to bounds. Of a layout from lengths on a GPU the first call waits for their copy.

        Returns:
            `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `[n_seqs + 1]`; `max_length_q` and
            `max_length_k`, tokens; `packed`.

        Raises:
            ValueError: there is padding between sequences, or the layout is a rank's part.
        """
        self.check_whole()
        if self.pads_between_sequences:
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
        """Make a mask for `scaled_dot_product_attention`, once for as long as the layout lives.

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
        check_dtype(dtype, "dtype")
        check_flag(causal, "causal")
        check_flag(finite, "finite")
        *facts, spans, padded, row_length = self._mask_facts(window, spans, row_length)
        offsets, tokens, window = facts
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
        """Make a mask for `flex_attention`, once for as long as the layout lives.

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
        sizes = masks.block_sizes(block_size)
        *facts, spans, padded, row_length = self._mask_facts(window, spans, row_length)
        offsets, tokens, window = facts
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
        """Make xformers' `BlockDiagonalCausalMask`, once for as long as the layout lives.

        Its own constructors copy lengths to the GPU and wait. Here nothing waits, but for the
        layout's one copy where lengths came from a GPU. The tail is one causal segment of its own,
        since such a bias knows nothing but segments.

        Args:
            window: keys that a token sees, itself included: xformers' local attention.

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

    def _mask_facts(
        self, window: int | None, spans: Spans | None, row_length: int | None
    ) -> tuple[Tensor, int, int | None, Tensor | None, Tensor | None, int | None]:
        """Check the arguments that masks share; return them with what they need of the layout."""
        self.check_unedited()
        window, row_length = as_window(window), masks.as_row_length(row_length)
        if spans is not None or row_length is not None:
            spans = self.checked_spans(spans, row_length)
        padded = self.cu_seqlens_padded_static
        return self.cu_seqlens_static, self.total_tokens, window, spans, padded, row_length

    def remember_offsets_on_host(self) -> None:
        """Keep attention that runs sequence by sequence from copying its offsets back."""
        if self.device.type != "cuda" or is_capturing(self.device):
            return
        if self._host_offsets is None:
            with outside_inference_mode():
                self._host_offsets = _ops.cu_seqlens(self.lengths_on_host())
        _C.remember_on_host(self.cu_seqlens_static, self._host_offsets)

    def checked_spans(self, spans: Spans | None, row_length: int | None = None) -> Tensor | None:
        """Return spans beside the layout, ascending, once what the host knows of them is checked.

        Args:
            spans: (start, end) pairs in tokens of the row, or int32 `[n_spans, 2]`.
            row_length: tokens of the rows that the packed row is cut into; checked too.
        """
        if is_compiling():
            if spans is None or isinstance(spans, Tensor):
                return spans
            # Their numbers would be constants of a graph that serves one pack alone.
            raise TypeError(
                "spans must be an int32 tensor [n_spans, 2] inside compiled code, got "
                f"{type(spans).__name__}"
            )
        given = spans if isinstance(spans, Tensor) else None
        if given is not None:
            check_tensor(given, "spans")
        pairs = () if given is not None or spans is None else sorted_pairs(spans)
        if not pairs and row_length is None:
            return given
        on_gpu = self.device.type == "cuda"
        # A tensor that one stream copies is not there yet for another.
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        key = (pairs, row_length, stream)
        if key not in self._spans:
            padded = self.segments.known_lengths if self.pads_between_sequences else None
            on_host = check_pairs(pairs, row_length, self.known_lengths, padded, self.total_tokens)
            self._spans[key] = spans_on(self.device, on_host), on_host
        if given is not None:
            return given
        checked, on_host = self._spans[key]
        if on_gpu and checked is not None and not is_capturing(self.device):
            _C.remember_on_host(checked, on_host)
        return checked
