"""Planning, sampling, streaming and collating of packed rows."""

from cuseq.data.collator import PackingCollator, mask_boundary_labels
from cuseq.data.costs import multimodal_costs
from cuseq.data.groups import pack_groups
from cuseq.data.multimodal import MultimodalPackingCollator
from cuseq.data.plan import PackingPlan, bin_pack
from cuseq.data.sampler import PackedBatchSampler
from cuseq.data.split import split_by_tokens
from cuseq.data.stream import PackedStream

__all__ = [
    "MultimodalPackingCollator",
    "PackedBatchSampler",
    "PackedStream",
    "PackingCollator",
    "PackingPlan",
    "bin_pack",
    "mask_boundary_labels",
    "multimodal_costs",
    "pack_groups",
    "split_by_tokens",
]
