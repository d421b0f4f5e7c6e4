"""Facts of packed rows that hold images and videos."""

from __future__ import annotations

from cuseq.vision.layout import VisionLayout
from cuseq.vision.positions import mrope_position_ids

__all__ = ["VisionLayout", "mrope_position_ids"]
