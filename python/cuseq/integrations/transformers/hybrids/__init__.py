"""Layers with a state along the row, made to stop at the ends of documents.

A hybrid model mixes attention with layers that carry a state from token to token: a short
convolution, a gated delta rule, a state space. `cuseq.enable` finds these layers (`kinds`), hands
the layout of the row to them (`boundaries`), and replaces their functions by ones that start each
document anew: the convolution by `cuseq.causal_conv1d`, the recurrence by a kernel of fla or
mamba-ssm with offsets, or by the model's own PyTorch function on one segment at a time
(`segments`). docs/hybrids.md has the families and the costs.
"""
