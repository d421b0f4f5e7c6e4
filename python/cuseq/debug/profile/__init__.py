"""`profile_step`: count what one training step does besides arithmetic."""

from cuseq.debug.profile.result import StepProfile
from cuseq.debug.profile.step import profile_step

__all__ = ["StepProfile", "profile_step"]
