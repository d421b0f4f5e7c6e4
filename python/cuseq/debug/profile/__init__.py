"""`profile_step`: where a training step makes the host wait for the GPU."""

from cuseq.debug.profile.step import StepProfile, profile_step

__all__ = ["StepProfile", "profile_step"]
