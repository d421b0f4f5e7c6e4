"""Run all parts of one check in order and judge the results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from cuseq.debug.packing_check import _suspects
from cuseq.debug.packing_check._bits import Moved, first_to_differ, largest_move
from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._leaks import (
    Changes,
    Leak,
    backward_leak,
    changes_of,
    forward_leak,
    groups_of,
    padding_leak,
    with_other_tokens,
)
from cuseq.debug.packing_check._numbers import (
    Totals,
    alone_totals,
    crossing_gap,
    packed_totals,
    relative,
    token_errors,
    worst_error,
)
from cuseq.debug.packing_check._report import Check, PackingReport, Suspect
from cuseq.debug.packing_check._runs import Row, Runs, TokensNotFound

# Nondeterministic runs may differ by this factor times the difference between two equal runs.
_NOISE = 4

_Gradients = Mapping[str, Tensor | None]


class Comparison:
    """One check of one model.

    Args:
        runs: runs the model.
        documents: the documents to run.
        rtol: largest relative difference; None chooses one for the dtype.
        notes: sentences that the report begins its notes with.
        bitwise: whether documents must have the same bits wherever they lie.
    """

    def __init__(
        self,
        runs: Runs,
        documents: Sequence[Document],
        rtol: float | None,
        notes: Sequence[str] = (),
        bitwise: bool = False,
    ):
        self.runs = runs
        self.documents = documents
        self.rtol = math.nan if rtol is None else rtol
        self.checks: dict[str, Check] = {}
        self.notes = list(notes)
        self.bitwise = bitwise

    def report(self) -> PackingReport:
        try:
            row = self.runs.row(self.documents)
        except TokensNotFound as error:
            self._add("tokens", math.inf, 0.0)
            return self._finished(_suspects.tokens(str(error)))
        with torch.no_grad():
            still = self.runs.find_embeddings(self.documents).logits
            if math.isnan(self.rtol):
                at_work = self.runs.dtypes_at_work(self.documents, row)
                self.rtol = _default_rtol(self.runs.model, still, at_work)
            if not bool(still.isfinite().all()):
                self._add("logits", math.inf, self.rtol, "not finite")
                return self._finished(_suspects.not_finite("the packed run"))
            again = self.runs.packed(self.documents, row).logits
            noise, scale = float((again - still).abs().max()), float(still.abs().max())
            self._add("repeat", noise, self.rtol * scale)
            forward = forward_leak(self.runs, self.documents, row, still, _NOISE * noise)
            padding = padding_leak(self.runs, self.documents, row, still)
            moved = largest_move(self.runs, self.documents, again) if self.bitwise else None
        packed = self.runs.packed(self.documents, row)
        backward = backward_leak(packed, row)
        self._judge_leaks(forward, backward, padding, scale)
        if moved is not None:
            self._add("bits", moved.size, 0.0, str(moved))
        together = packed_totals(self.runs, self.documents, packed)
        del packed  # frees its autograd graph
        alone = alone_totals(self.runs, self.documents, row.batch or ())
        errors = token_errors(together.logits, alone.logits)
        self._judge_numbers(row, errors, together, alone)
        suspect = (
            self._suspect_of_runs(row, forward, backward)
            or self._suspect_of_logits(row, errors)
            or self._suspect_of_loss(row, together, alone)
            or self._suspect_of_bits(moved)
        )
        return self._finished(suspect, together.loss, alone.loss)

    # ------------------------------------------------------------------------------- the checks

    def _judge_leaks(
        self, forward: Leak, backward: Leak | None, padding: float | None, scale: float
    ) -> None:
        limit = _NOISE * self._value("repeat")
        # An expert's matrix product rounds differently when other tokens share it. A real leak of
        # that size would have a gradient.
        connected = backward is None or backward.size != 0
        if not connected and _suspects.has_experts(self.runs.model):
            limit = max(limit, self.rtol * scale)
            if 0 < forward.size <= limit:
                self.notes.append(
                    "a changed token changes other documents' logits, but only by rounding: their "
                    "experts process other tokens beside them, and no gradient connects them"
                )
        self._add("leak forward", forward.size, limit, str(forward))
        if backward is None:
            reason = "no embedding module that looks up the tokens was found"
            self._add("leak backward", None, 0.0, reason)
        else:
            self._add("leak backward", backward.size, 0.0, str(backward))
        if padding is not None:
            self._add("leak from padding", padding, limit)

    def _judge_numbers(self, row: Row, errors: Tensor, packed: Totals, alone: Totals) -> None:
        token = int(errors.argmax())
        document = int(row.document[token])
        place = token - int((row.document < document).sum())
        size = float((packed.logits - alone.logits).abs().max())
        where = f"document {document}, token {place}; absolute {size:.2g}"
        self._add("logits", float(errors[token]), self.rtol, where)
        if packed.own_loss:
            error = relative(abs(packed.loss - alone.loss), abs(alone.loss))
            where = f"{packed.loss:.6g} packed, {alone.loss:.6g} alone"
            self._add("loss", error, self.rtol, where)
        else:
            self._add("loss", None, self.rtol, "the model returns none")
            wrong = _suspects.wrong_label(row, self.documents, may_be_shifted=True)
            if wrong:
                self._add("labels", math.inf, 0.0, wrong)
        pairs: dict[str, tuple[_Gradients, _Gradients]] = {
            "gradients": (packed.gradients, alone.gradients),
            "gradients of embeddings": (packed.embeddings, alone.embeddings),
        }
        for name, (together, apart) in pairs.items():
            none = (None, "no tensor that takes a gradient was found")
            value, where = worst_error(together, apart) or none
            self._add(name, value, self.rtol, where)

    # ------------------------------------------------------------------------------- the suspects

    def _suspect_of_runs(self, row: Row, forward: Leak, backward: Leak | None) -> Suspect | None:
        if not self._passed("repeat"):
            return _suspects.repeat(self._value("repeat"))
        if not self._passed("leak from padding"):
            return _suspects.padding(self._value("leak from padding"))
        if not self._passed("leak forward"):
            found = self._mixing_module(forward.changes)
            return _suspects.mixing(self.runs.model, row, str(forward), found)
        if backward is not None and not self._passed("leak backward"):
            return _suspects.backward(backward)
        return None

    def _mixing_module(self, changes: Changes) -> tuple[str, nn.Module] | None:
        """Return the first module that lets changed tokens through to other documents."""
        changed = with_other_tokens(self.documents, changes)
        sources = {i for i, _ in changes}
        others = [i for i in range(len(self.documents)) if i not in sources]
        with torch.no_grad():
            return self.runs.first_to_differ((self.documents, others), (changed, others))

    def _suspect_of_logits(self, row: Row, errors: Tensor) -> Suspect | None:
        if self._passed("logits"):
            return None
        if math.isinf(self._value("logits")):
            return _suspects.not_finite("a document alone")
        wrong = errors > self.rtol
        documents = row.document[wrong].unique().tolist()
        # Wrong positions change all tokens of a document, but never the first document.
        has_images = any(document.inputs(self.runs.names) for document in self.documents)
        if has_images and _suspects.lacks_planes(self.runs.model, row):
            return _suspects.planes(documents)
        whole = all(bool(wrong[row.document == i].all()) for i in documents)
        if whole and documents[0] > 0:
            return _suspects.positions(row, documents[0])
        if _suspects.has_experts(self.runs.model):
            return _suspects.routing(float(wrong.float().mean()))
        return _suspects.logits(documents)

    def _suspect_of_loss(self, row: Row, packed: Totals, alone: Totals) -> Suspect | None:
        # Compare each loss with the cross entropy of its own logits: that shows crossing labels
        # however small their effect, and the difference cancels terms the model adds to its loss.
        surplus = (packed.loss - packed.cross_entropy) - (alone.loss - alone.cross_entropy)
        gap = crossing_gap(packed, self.documents)
        if abs(surplus - gap) < 0.1 * abs(gap):
            return _suspects.crossing_labels(row, self.documents)
        if not self._passed("labels"):
            return _suspects.unused_labels(self.checks["labels"].where)
        if not self._passed("loss"):
            return _suspects.loss(row, self.documents)
        for name in ("gradients", "gradients of embeddings"):
            if not self._passed(name):
                return self._suspect_of_gradients(row, self.checks[name].where)
        return None

    def _suspect_of_bits(self, moved: Moved | None) -> Suspect | None:
        if moved is None or self._passed("bits"):
            return None
        with torch.no_grad():
            found = first_to_differ(self.runs, self.documents, moved)
        return _suspects.bits(moved.size, str(moved), found)

    def _suspect_of_gradients(self, row: Row, where: str) -> Suspect:
        # A module's mixing stays hidden if a zero weight follows; that weight has a gradient.
        if not _suspects.has_experts(self.runs.model):
            for group in groups_of(len(self.documents)):
                for changes in changes_of(self.documents, group):
                    found = self._mixing_module(changes)
                    if found is not None:
                        return _suspects.mixing(
                            self.runs.model, row, _suspects.gradients(where).finding, found
                        )
        return _suspects.gradients(where)

    def _passed(self, name: str) -> bool:
        return name not in self.checks or self.checks[name].ok

    def _value(self, name: str) -> float:
        value = self.checks[name].value
        assert value is not None, name
        return value

    def _add(self, name: str, value: float | None, limit: float, where: str = "") -> None:
        self.checks[name] = Check(name, value, limit, where)

    def _finished(
        self, suspect: Suspect | None, packed: float | None = None, alone: float | None = None
    ) -> PackingReport:
        subject = _subject(self.runs, self.documents)
        return PackingReport(subject, self.checks, packed, alone, suspect, tuple(self.notes))


def _default_rtol(model: nn.Module, logits: Tensor, at_work: Collection[torch.dtype] = ()) -> float:
    """Return the square root of the largest epsilon of parameters, logits and op results."""
    tensors = [*model.parameters(), logits]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    dtypes.update(at_work)
    kind = logits.device.type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    widest = max(torch.finfo(dtype).eps for dtype in dtypes)
    # The older getters raise once the newer switch was used, as Trainer's torch_compile does.
    if kind == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        widest = max(widest, 2**-10)
    return math.sqrt(widest)


def _subject(runs: Runs, documents: Sequence[Document]) -> str:
    lengths = [document.length for document in documents]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in runs.model.parameters()})
    return (
        f"{type(runs.model).__name__}, {len(lengths)} documents of {min(lengths)} to "
        f"{max(lengths)} tokens, {', '.join(dtypes)}, {runs.device}"
    )
