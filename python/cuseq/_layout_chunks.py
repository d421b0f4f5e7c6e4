"""Properties of a packed layout that the kernels of recurrent layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from cuseq import _C
from cuseq._arguments import as_int, check_dtype
from cuseq._layout_facts import LayoutFacts
from cuseq._layout_state import LayoutState, keep
from cuseq._modes import is_capturing, may_keep, outside_inference_mode
from cuseq._transfer import copy_pair


class LayoutChunks(LayoutFacts):
    """The runs of tokens over which a recurrence may go, and their chunks.

    A run is a sequence, the padding after one, or the tail: kernels leave tokens after the last
    offset unwritten, and a state that enters padding must not come out again. No run is empty,
    because such offsets break kernels of gated delta nets (VeOmni#845). All of these are computed
    once, on the host, from lengths that are there, so nothing waits; for lengths that came from a
    GPU the first use waits for their small copy.
    """

    def __init__(self, state: LayoutState):
        super().__init__(state)
        self._runs_on_host: Tensor | None = None
        self._runs: Tensor | None = None
        # By chunk size and dtype: the indices of chunks and the first chunk of each run.
        self._chunks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def cu_seqlens_recurrent_on_host(self) -> Tensor:
        """Return `cu_seqlens_recurrent` on the host. Must not be edited.

        Waits only for lengths that came from a GPU, once.
        """
        if self._runs_on_host is not None:
            return self._runs_on_host
        self.check_whole()
        self.check_unedited()
        segments = self.segments.lengths_on_host() if self.pads_between_sequences else None
        with outside_inference_mode():
            runs = _C.recurrent_offsets(self.lengths_on_host(), segments, self.total_tokens)
        if may_keep(runs):
            self._runs_on_host = runs
            self.note_versions(cu_seqlens_recurrent_on_host=runs)
        return runs

    @property
    def cu_seqlens_recurrent(self) -> Tensor:
        """int32 `[n_runs + 1]`, offsets of the runs that a recurrence may go over: sequences, the
        padding after each, and the tail, without empty ones. Must not be edited.

        Give it to flash-linear-attention's and mamba-ssm's kernels as `cu_seqlens`. It covers the
        row, so no token of their outputs stays unwritten.
        """
        if self._runs is not None:
            return self._runs
        on_host = self.cu_seqlens_recurrent_on_host()
        runs, _ = self._on_device(on_host, on_host[:0], "cu_seqlens_recurrent")
        if may_keep(runs):
            self._runs = runs
            self.note_versions(cu_seqlens_recurrent=runs)
        return runs

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
        return self._chunks_of(chunk_size, dtype)[0]

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
        return self._chunks_of(chunk_size, dtype)[1]

    def _chunks_of(self, chunk_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        chunk_size = as_int(chunk_size, "chunk_size", least=1)
        check_dtype(dtype, "dtype")
        if dtype not in (torch.int32, torch.int64):
            raise TypeError(f"dtype must be torch.int32 or torch.int64, got {dtype}")
        known = self._chunks.get((chunk_size, dtype))
        if known is not None:
            return known
        if dtype == torch.int64:
            indices, offsets = self._chunks_of(chunk_size, torch.int32)
            with outside_inference_mode():
                chunks = indices.long(), offsets.long()
        else:
            with outside_inference_mode():
                on_host = _C.chunks_of(self.cu_seqlens_recurrent_on_host(), chunk_size)
            chunks = self._on_device(*on_host, "chunk_indices")
        if may_keep(*chunks) and not is_capturing(self.device):
            keep(self._chunks, (chunk_size, dtype), chunks)
            self.note_versions(chunk_indices=chunks[0], chunk_offsets=chunks[1])
        return chunks

    def _on_device(self, first: Tensor, second: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Copy two tensors from the host to the layout's device, without waiting."""
        if self.device.type == "cpu":
            return first, second
        if is_capturing(self.device):
            raise RuntimeError(
                f"packed.{name} comes from the host, which a CUDA graph would not ask again: read "
                "it before the capture"
            )
        with outside_inference_mode():
            return copy_pair(first, second, self.device)
