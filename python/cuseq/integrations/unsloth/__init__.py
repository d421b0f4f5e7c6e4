"""unsloth: functions with unsloth's names, arguments and results (2026.10.9).

    import unsloth
    cuseq.enable(unsloth)

    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(...)
    SFTTrainer(model, args=SFTConfig(packing=True, ...), ...).train()

`cuseq.enable(unsloth)` puts them in place of unsloth's own, and sends the packed rows of unsloth's
own attention (Llama, Mistral, Qwen, Granite, ...) through `cuseq.varlen_attention`. Models that
unsloth runs through transformers' classes (vision, most mixtures of experts) attend as before.

The functions also work without unsloth, and importing this package changes nothing. What they
compute from a tensor of lengths is kept for that tensor, by its identity and version: any number of
packs are known at once, and an edit in place is noticed. unsloth (PR 4173) keeps one answer a
device and returns it after an edit.
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
