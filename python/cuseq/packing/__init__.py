"""Between padded batches and packed rows: `pack`, `unpack`, `run_packed`, `shift_left`."""

from cuseq.packing.rows import pack, run_packed, shift_left, unpack

__all__ = ["pack", "run_packed", "shift_left", "unpack"]
