"""Training steps that replay as CUDA graphs."""

from cuseq.graphs.step import GraphedStep

__all__ = ["GraphedStep"]
