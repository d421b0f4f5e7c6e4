"""Derive the most likely cause from the numbers of a check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._models import text_config
from cuseq.data.collator import IGNORE_INDEX
from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._leaks import Leak
from cuseq.debug.packing_check._report import Suspect
from cuseq.debug.packing_check._runs import Row

# "ssm" must be a whole word: CrossMultiheadAttention contains it too.
_STATEFUL = re.compile(
    r"rnn|gru|lstm|mamba|(?-i:SSM|Ssm|(?<![a-z])ssm)|mixer|conv|delta|recurrent|rwkv|retention"
    r"|linear_?attn",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"att", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|moe|router", re.IGNORECASE)


def has_experts(model: nn.Module) -> bool:
    """Return whether a module's class name looks like a mixture of experts."""
    return any(_EXPERTS.search(type(module).__name__) for module in model.modules())


def mixing(model: nn.Module, row: Row, heard: str, found: tuple[str, nn.Module] | None) -> Suspect:
    """Name the cause of a leak, from the first module that lets a changed token through.

    Args:
        heard: the observation, which begins the finding.
        found: name and module, or None if no module shows the leak.
    """
    if found is None:
        return Suspect(
            "mixing",
            f"{heard}, outside of what its modules show",
            "tell whatever works across tokens where documents lie (packed, cu_seqlens, seq_ids)",
        )
    name, module = found
    kind = type(module).__name__
    place = f"{name} ({kind})" if name else f"{kind} itself"
    own_name = name.rpartition(".")[2]
    if _STATEFUL.search(kind) or _STATEFUL.search(own_name):
        return Suspect(
            "state",
            f"{heard}: state leaks in {place}",
            "give the layer the documents (seq_idx = packed.seq_ids, or packed.cu_seqlens), or "
            "start its state anew where position_ids are 0",
        )
    if _ATTENTION.search(kind) or _ATTENTION.search(own_name):
        finding = f"{heard}: attention leaks in {place}"
        return Suspect("attention", finding, _attention_remedy(model, row))
    return Suspect(
        "mixing",
        f"{heard}: {place} mixes tokens of different documents",
        "make it work inside each document (packed.seq_ids and packed.cu_seqlens say where they "
        "lie)",
    )


def padding(leak: float) -> Suspect:
    return Suspect(
        "padding",
        f"padding is heard: another pad token changes the documents' logits by {leak:.2g}",
        "put padding behind all documents (cuseq.PackingCollator does), and leave it out of their "
        "lengths and masks",
    )


def backward(leak: Leak) -> Suspect:
    return Suspect(
        "backward",
        f"{leak} in the backward pass alone: its gradients leak",
        "look at the backward of custom autograd functions and kernels: they must use the same "
        "boundaries as their forward",
    )


def tokens(message: str) -> Suspect:
    return Suspect(
        "tokens",
        message,
        "let the collator keep all tokens of the examples, in their order (cuseq.PackingCollator)",
    )


def not_finite(what: str) -> Suspect:
    return Suspect(
        "not finite",
        f"{what} has logits that are not finite",
        "look for a row of a mask that hides everything, or for overflow: try a wider dtype",
    )


def repeat(size: float) -> Suspect:
    return Suspect(
        "repeat",
        f"the same packed run twice gives logits that differ by {size:.2g}",
        "start state that the model keeps between calls anew, and turn randomness off, in eval "
        "mode: without that nothing here can be told",
    )


def crossing_labels(row: Row, documents: Sequence[Document]) -> Suspect:
    wrong = wrong_label(row, documents)
    return Suspect(
        "labels",
        "the loss is that of documents whose last tokens predict the next one's first"
        + (f" ({wrong})" if wrong else ""),
        "set the label of each document's first token to -100 (cuseq.data.mask_boundary_labels), "
        "or with labels that are shifted already, that of its last",
    )


def unused_labels(wrong: str) -> Suspect:
    return Suspect(
        "labels",
        f"the model gives no loss, and the labels for another are wrong: {wrong}",
        "let the collator keep the examples' labels, and give -100 to padding and to each "
        "document's first token (cuseq.PackingCollator does)",
    )


def loss(row: Row, documents: Sequence[Document]) -> Suspect:
    wrong = wrong_label(row, documents)
    if wrong:
        remedy = "let the collator keep the examples' labels and give padding -100"
        return Suspect("labels", f"the logits agree and the loss does not: {wrong}", remedy)
    return Suspect(
        "loss",
        "the logits agree and the loss does not",
        "make the loss the mean over all targets of the row, and look at terms that do not add up "
        "over documents (a router's auxiliary loss)",
    )


def positions(row: Row, first: int) -> Suspect:
    wrong = _wrong_position(row)
    return Suspect(
        "positions",
        f"document {first} and perhaps later ones differ, those before do not, and nothing leaks: "
        "positions do not restart" + (f" ({wrong})" if wrong else ""),
        "give position_ids that count from 0 in each document (packed.position_ids)",
    )


def routing(share: float) -> Suspect:
    return Suspect(
        "routing",
        f"{share:.1%} of the tokens differ and nothing leaks: experts are chosen differently",
        "if they agree in a wider dtype (float32, float64) these are ties that rounding breaks, "
        "and harmless; else look at the experts' capacity",
    )


def logits(documents: Sequence[int]) -> Suspect:
    return Suspect(
        "logits",
        f"documents {', '.join(map(str, documents[:8]))} differ from themselves alone, and "
        "nothing leaks",
        "compare scale, window, causality, padding and positions (RoPE that depends on the longest "
        "sequence) of the packed path with those of the other",
    )


def gradients(name: str) -> Suspect:
    return Suspect(
        "gradients",
        f"logits and loss agree and gradients do not, most of all that of {name}",
        "look at the backward of what the packed path alone runs",
    )


def _attention_remedy(model: nn.Module, row: Row) -> str:
    batch: dict[str, Any] = row.batch or {}
    wrong = _wrong_position(row)
    implementation = getattr(text_config(model), "_attn_implementation", None)
    if implementation is not None and implementation != "cuseq":
        remedy = (
            'load the model with attn_implementation="cuseq", which reads `packed`; '
            f'"{implementation}" reads position_ids that restart, and those with use_cache=False '
            "only"
        )
    elif "packed" not in batch and "cu_seq_lens_q" not in batch:
        remedy = "give the model the documents' lengths (`packed`, from cuseq.PackingCollator)"
    else:
        remedy = "let attention read the lengths that the batch has (cuseq.varlen_attention)"
    return f"{remedy}; {wrong}" if wrong else remedy


def _wrong_position(row: Row) -> str | None:
    """Return what is wrong with the batch's position ids; None if nothing or if it has none."""
    given = (row.batch or {}).get("position_ids")
    if not isinstance(given, Tensor) or given.numel() <= int(row.slots.max()):
        return None
    given = given.flatten()[row.slots].split(row.document.bincount().tolist())
    for i, part in enumerate(given):
        if not torch.equal(part - part[0], torch.arange(len(part), device=part.device).to(part)):
            return f"position_ids of document {i} do not count up"
        if part[0] != given[0][0]:
            return f"position_ids of document {i} start at {int(part[0])}"
    return None


def wrong_label(
    row: Row, documents: Sequence[Document], *, may_be_shifted: bool = False
) -> str | None:
    """Return what is wrong with the batch's labels; None if nothing or if it has none."""
    given = (row.batch or {}).get("labels")
    if not isinstance(given, Tensor) or given.numel() != row.batch["input_ids"].numel():
        return None
    flat = given.flatten()
    pads = row.pads()
    if bool((flat[pads] != IGNORE_INDEX).any()):
        return "labels of padding are not -100"
    own = flat[row.slots].cpu().split([document.length for document in documents])
    if may_be_shifted and all(map(_is_shifted, own, documents)):
        return None
    for i, (part, document) in enumerate(zip(own, documents, strict=True)):
        if i > 0 and part[0] != IGNORE_INDEX:
            return f"the first label of document {i} is {int(part[0])}"
        if not torch.equal(part[1:], document.labels[1:]):
            return f"labels of document {i} are not those of its example"
    return None


def _is_shifted(labels: Tensor, document: Document) -> bool:
    """Return whether each label is the next token's."""
    return torch.equal(labels[:-1], document.labels[1:]) and int(labels[-1]) == IGNORE_INDEX
