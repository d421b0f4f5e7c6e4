"""`profile_step`: what one training step does beside its arithmetic."""

from cuseq.debug.profile.result import StepProfile
from cuseq.debug.profile.step import profile_step

__all__ = ["StepProfile", "profile_step"]
