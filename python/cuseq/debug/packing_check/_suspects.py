"""Derive the most likely cause from the numbers of a check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuseq._base.labels import IGNORE_INDEX
from cuseq._base.models import text_config
from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._leaks import Leak
from cuseq.debug.packing_check._report import Suspect
from cuseq.debug.packing_check._runs import Row
from cuseq.vision.positions import has_mrope

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


def mixing(model: nn.Module, row: Row, seen: str, found: tuple[str, nn.Module] | None) -> Suspect:
    """Name the cause of a leak, from the first module that lets a changed token through.

    Args:
        seen: the observation, which begins the finding.
        found: name and module, or None if no module shows the leak.
    """
    if found is None:
        return Suspect(
            "mixing",
            f"{seen}, but no module's output shows where",
            "pass the boundaries (packed, cu_seqlens or seq_ids) to every operation across tokens",
        )
    name, module = found
    kind = type(module).__name__
    place = f"{name} ({kind})" if name else f"{kind} itself"
    own_name = name.rpartition(".")[2]
    if _STATEFUL.search(kind) or _STATEFUL.search(own_name):
        return Suspect(
            "state",
            f"{seen}: state leaks in {place}",
            "pass the boundaries to the layer (seq_idx=packed.seq_ids, or packed.cu_seqlens), or "
            "reset its state where position_ids are 0",
        )
    if _ATTENTION.search(kind) or _ATTENTION.search(own_name):
        finding = f"{seen}: attention leaks in {place}"
        return Suspect("attention", finding, _attention_remedy(model, row))
    return Suspect(
        "mixing",
        f"{seen}: {place} mixes tokens of different documents",
        "keep it inside each document (packed.seq_ids and packed.cu_seqlens hold the boundaries)",
    )


def padding(leak: float) -> Suspect:
    return Suspect(
        "padding",
        f"padding leaks: another pad token changes the documents' logits by {leak:.2g}",
        "put padding after all documents (cuseq.PackingCollator does), and exclude it from their "
        "lengths and masks",
    )


def backward(leak: Leak) -> Suspect:
    return Suspect(
        "backward",
        f"{leak} in the backward pass only: gradients leak",
        "look at the backward of custom autograd functions and kernels: they must use the same "
        "boundaries as their forward",
    )


def tokens(message: str) -> Suspect:
    return Suspect(
        "tokens",
        message,
        "keep all tokens of the examples in the collator, in order (cuseq.PackingCollator does)",
    )


def not_finite(what: str) -> Suspect:
    return Suspect(
        "not finite",
        f"the logits of {what} are not finite",
        "look for a mask row that hides every key, or for overflow: try a wider dtype",
    )


def repeat(size: float) -> Suspect:
    return Suspect(
        "repeat",
        f"two runs of the same packed row give logits that differ by {size:.2g}",
        "reset state that the model keeps between calls, and turn off randomness in eval mode; the "
        "other checks need runs that repeat",
    )


def bits(size: float, where: str, found: tuple[str, nn.Module] | None) -> Suspect:
    """Name the module whose kernel rounds a document by its place in the row.

    Args:
        size: the largest change of its logits.
        where: the document, and the row that shows it.
        found: name and module, or None if no module shows it.
    """
    place = "" if found is None else f", first in {found[0]} ({type(found[1]).__name__})"
    return Suspect(
        "bits",
        f"{where} has logits that differ by {size:.2g}{place}",
        "let its kernel reduce each token in one order: cuseq.enable(model, backend=...) for "
        "attention; docs/check.md lists the kernels that do",
    )


def crossing_labels(row: Row, documents: Sequence[Document]) -> Suspect:
    wrong = wrong_label(row, documents)
    return Suspect(
        "labels",
        "the loss includes targets across boundaries: a document's last token predicts the next "
        "document's first token" + (f" ({wrong})" if wrong else ""),
        "set the label of each document's first token to -100 (cuseq.data.mask_boundary_labels); "
        "if the labels are shifted already, set that of its last token",
    )


def unused_labels(wrong: str) -> Suspect:
    return Suspect(
        "labels",
        f"the model returns no loss, and the batch's labels are wrong: {wrong}",
        "keep the examples' labels in the collator, with -100 on padding and on each document's "
        "first token (cuseq.PackingCollator does)",
    )


def loss(row: Row, documents: Sequence[Document]) -> Suspect:
    wrong = wrong_label(row, documents)
    if wrong:
        remedy = "keep the examples' labels in the collator, with -100 on padding"
        return Suspect("labels", f"the logits agree but the loss differs: {wrong}", remedy)
    return Suspect(
        "loss",
        "the logits agree but the loss differs",
        "make the loss the mean over all targets of the row, and look at terms that do not add up "
        "over documents (a router's auxiliary loss)",
    )


def positions(row: Row, first: int) -> Suspect:
    wrong = _wrong_position(row)
    return Suspect(
        "positions",
        f"document {first} and perhaps later ones differ, earlier ones agree, and nothing leaks: "
        "positions do not restart" + (f" ({wrong})" if wrong else ""),
        "pass position_ids that count from 0 in each document (packed.position_ids)",
    )


def lacks_planes(model: nn.Module, row: Row) -> bool:
    """Return whether a model of M-RoPE got the positions of text, on one plane or on all."""
    positions = (row.batch or {}).get("position_ids")
    if not isinstance(positions, Tensor) or not has_mrope(model):
        return False
    return positions.dim() < 3 or bool((positions == positions[-1]).all())


def planes(documents: Sequence[int]) -> Suspect:
    return Suspect(
        "positions",
        f"documents {', '.join(map(str, documents[:8]))} differ from their runs alone, and the "
        "batch has the positions of text for a model that rotates images by planes (M-RoPE)",
        "pass position_ids of cuseq.vision.mrope_position_ids(input_ids, packed, "
        "config=model.config, image_grid_thw=...)",
    )


def routing(share: float) -> Suspect:
    return Suspect(
        "routing",
        f"{share:.1%} of the tokens differ and nothing leaks: the router chose other experts",
        "try a wider dtype (float32, float64): if the results agree there, rounding broke ties, "
        "which is harmless; otherwise look at the experts' capacity",
    )


def logits(documents: Sequence[int]) -> Suspect:
    return Suspect(
        "logits",
        f"documents {', '.join(map(str, documents[:8]))} differ from their runs alone, "
        "and nothing leaks",
        "compare scale, window, causality, padding and positions (RoPE that depends on the longest "
        "sequence) between the packed path and the other",
    )


def gradients(name: str) -> Suspect:
    return Suspect(
        "gradients",
        f"logits and loss agree but gradients differ, most of all that of {name}",
        "look at the backward of code that only the packed path runs",
    )


def _attention_remedy(model: nn.Module, row: Row) -> str:
    batch: dict[str, Any] = row.batch or {}
    wrong = _wrong_position(row)
    implementation = getattr(text_config(model), "_attn_implementation", None)
    if implementation is not None and implementation != "cuseq":
        remedy = (
            "call cuseq.enable(model), whose attention reads `packed`; "
            f'"{implementation}" reads position_ids that restart, and only with use_cache=False'
        )
    elif "packed" not in batch and "cu_seq_lens_q" not in batch:
        remedy = "pass the documents' lengths to the model (`packed`, from cuseq.PackingCollator)"
    else:
        remedy = "make attention use the lengths that the batch has (cuseq.varlen_attention)"
    return f"{remedy}; {wrong}" if wrong else remedy


def _wrong_position(row: Row) -> str | None:
    """Return what is wrong with the batch's position ids; None if nothing or if it has none."""
    given = (row.batch or {}).get("position_ids")
    if not isinstance(given, Tensor) or given.dim() > 2 or given.numel() <= int(row.slots.max()):
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
    batch = row.batch or {}
    given = batch.get("labels")
    if not isinstance(given, Tensor) or given.numel() != batch["input_ids"].numel():
        return None
    flat = given.flatten()
    pads = row.pads()
    if bool((flat[pads] != IGNORE_INDEX).any()):
        return "labels of padding are not -100"
    lengths = [document.length for document in documents]
    own = flat[row.slots].cpu().split(lengths)
    places = [slots[0] % given.shape[-1] for slots in row.slots.cpu().split(lengths)]
    if may_be_shifted and all(map(_is_shifted, own, documents)):
        return None
    for i, (part, document) in enumerate(zip(own, documents, strict=True)):
        # Nothing predicts the first label of a row of the batch.
        if places[i] > 0 and part[0] != IGNORE_INDEX:
            return f"the first label of document {i} is {int(part[0])}"
        if not torch.equal(part[1:], document.labels[1:]):
            return f"labels of document {i} are not those of its example"
    return None


def _is_shifted(labels: Tensor, document: Document) -> bool:
    """Return whether each label is the next token's."""
    return torch.equal(labels[:-1], document.labels[1:]) and int(labels[-1]) == IGNORE_INDEX
