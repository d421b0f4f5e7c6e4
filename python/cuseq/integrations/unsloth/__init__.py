"""unsloth: functions with the names, arguments and results of unsloth's own (2026.10.9).

    import unsloth
    cuseq.enable(unsloth)

    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(...)
    SFTTrainer(model, args=SFTConfig(packing=True, ...), ...).train()

`cuseq.enable(unsloth)` replaces unsloth's functions by these. In models that use unsloth's own
attention (Llama, Mistral, Qwen, Granite, ...) it also runs packed rows through
`cuseq.varlen_attention`. Models that unsloth runs through transformers' classes (vision, most
mixtures of experts) attend as before.

The functions also work without unsloth, and importing this package changes nothing. Results
computed from a tensor of lengths are cached by the identity and version of that tensor, so many
packs can be cached at once, and an edit in place is detected. unsloth (PR 4173) caches one result
per device and returns it even after an edit.
"""

from cuseq.integrations.unsloth._labels import (
    mask_packed_boundary_labels,
    mask_packed_sequence_boundaries,
)
from cuseq.integrations.unsloth._layouts import PackedInfo
from cuseq.integrations.unsloth._masks import (
    build_sdpa_packed_attention_mask,
    build_xformers_block_causal_mask,
)
from cuseq.integrations.unsloth._metadata import get_packed_info_from_kwargs
from cuseq.integrations.unsloth._rotation import fast_qk_norm_rope, fast_rope_embedding

__all__ = [
    "PackedInfo",
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "fast_qk_norm_rope",
    "fast_rope_embedding",
    "get_packed_info_from_kwargs",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
]
