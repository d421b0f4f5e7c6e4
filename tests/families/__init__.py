"""Which causal-LM families of the installed transformers train on packed rows with `cuseq.enable`?

    python -m tests.families [FAMILY ...] [--docs FILE] [--json FILE]

Makes a small random model of every family, enables it and compares it with the model before
`enable`: packed rows with documents one by one (logits and gradients), batches that are dense or
padded, generation, gradient checkpointing and torch.compile. Downloads nothing.
"""

from __future__ import annotations

from tests.families.attempt import try_family
from tests.families.result import FamilyResult

__all__ = ["FamilyResult", "try_family"]
