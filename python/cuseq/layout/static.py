"""`StaticLayout`: a layout whose tensors stay where they are, for a CUDA graph to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cuseq import _C, cache
from cuseq._base.arguments import power_of_two
from cuseq._base.modes import is_capturing, outside_inference_mode
from cuseq._base.transfer import copy_without_wait
from cuseq.layout import records
from cuseq.layout.packed import PackedLayout
from cuseq.layout.records import NUM_SEQS, NUMBERS_OF_ROOM, Records

_LEAST_ROOM = 8  # sequences; fewer gain nothing


def graph_room(sequences: int) -> int:
    """Return how many sequences a graph attends over if its rows have so many.

    The next power of two, so that few rows have more and need a new graph.
    """
    return power_of_two(sequences, _LEAST_ROOM)


def needed_room(packed: PackedLayout) -> list[int]:
    """Return how many sequences a graph needs room for; a tree's nodes have all their room.

    For a rank's part of a row then what `Part.needed_room` says.
    """
    sequences = packed.row.max_seqs if packed.is_tree else graph_room(packed.num_sequences)
    return [sequences] if packed.part is None else [sequences, *packed.part.needed_room()]


class StaticLayout(PackedLayout):
    """A layout that `load` fills again between the replays of a CUDA graph.

    While a graph is captured it gives no lengths to the host, which would be constants of the
    graph.

    Attributes:
        is_replayed: whether a graph reads it.
        expected_sequences: sequences of the rows to come; 0 if unknown.
        max_seqlen_bound: tokens that no sequence of any row exceeds; None if it may be the row.
    """

    def __init__(self, held: Records):
        super().__init__(held)
        self.is_replayed = True
        self.expected_sequences = 0
        self.max_seqlen_bound: int | None = None

    @classmethod
    def like(cls, packed: PackedLayout, device: torch.device) -> StaticLayout:
        """Return a layout of the same row on `device` with tensors of its own.

        Its `position_ids`, `seq_ids` and `moe_padding_mask` are made.
        """
        packed._check_unedited()
        packed._wait_for_all()
        with outside_inference_mode():
            made = cls(records.cloned(records.moved(packed._records, device)))
        made.position_ids  # noqa: B018  computes them
        return made

    def load(self, packed: PackedLayout) -> None:
        """Describe another row, by asynchronous copies on a GPU, but for the masks of flex
        attention, which `refill_block_masks` writes; `check_form` came before.
        """
        self._load(packed if packed.device.type == "cpu" else packed.to(self.device))

    def refill_block_masks(self) -> None:
        """Write what was loaded into the masks that graphs read; a graph may have this in it."""
        self._refill_block_masks()

    def check_form(self, packed: PackedLayout) -> None:
        """Raise ValueError unless `load(packed)` is possible: OtherSize if only sizes differ."""
        records.check_like(self._records, packed._records)

    @property
    def numbers_of_room(self) -> int:
        """How many numbers `needed_room` returns."""
        return 1 if self.part is None else 1 + NUMBERS_OF_ROOM

    def fit(self, room: Sequence[int]) -> None:
        """Bring what was loaded to the form that a graph with this room reads, if it is a rank's
        part of a row; on a GPU asynchronously.

        Ranks that share no rows may have agreed on more room than these rows can have.

        Raises:
            ValueError: the row needs more room.
        """
        if self.part is None:
            return
        source = self.part.source
        rows, meta = source.share_of_room(list(map(min, room[1:], source.most_room())))
        with outside_inference_mode():
            self.part.rows.copy_(copy_without_wait(rows, self.device))
        cache.invalidate(self.part.rows)
        self._hold_part(self.part._replace(meta=meta))

    def stop_replays(self) -> None:
        """Say that no graph will read the layout, so that it gives lengths to the host."""
        for layout in (self, self.segments, *self._chunked.values()):
            assert isinstance(layout, StaticLayout)
            layout.is_replayed = False

    @contextmanager
    def captured_for(self, room: Sequence[int]) -> Iterator[None]:
        """Let a capture count on it that replays have at most so many sequences.

        Meanwhile the `host_meta` is one of replays (csrc/attention/capture_room.h). That of all
        that the layout has room for says that this is meant: no capture warns of it. The nodes of
        a tree and chunks have all their room.
        """
        layouts = (self, self.segments, *self._all_chunked())
        held = [(layout, layout.row) for layout in layouts]
        for layout, row in held:
            meta = row.host_meta.clone()
            only_row = layout is self and self.tree is None
            meta[NUM_SEQS] = min(room[0], row.max_seqs) if only_row else row.max_seqs
            meta[_C.HostMeta.STATUS] = _C.HostMeta.OF_REPLAYS
            layout.row = row._replace(host_meta=meta)
        try:
            yield
        finally:
            for layout, row in held:
                layout.row = row

    def _chunks_from(self, on_host: PackedLayout) -> PackedLayout:
        return StaticLayout.like(on_host, self.device)

    def _check_replays(self) -> None:
        if self.is_replayed and is_capturing(self.device):
            raise RuntimeError(
                "lengths on the host, and tensors of their number, would be constants of the CUDA "
                "graph, which replays other lengths: use packed itself, packed.cu_seqlens_static "
                "or packed.position_ids"
            )
