"""The findings of `check_packing`, as numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        value: the largest difference; None if it could not be measured. NaN never passes.
        limit: the largest difference allowed.
        where: where the difference is largest, or why there is no value.
    """

    name: str
    value: float | None
    limit: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.value is None or self.value <= self.limit


@dataclass(frozen=True)
class Suspect:
    """The most likely cause of a failure.

    Attributes:
        name: a word: tokens, not finite, repeat, padding, attention, state, mixing, backward,
            positions, routing, logits, labels, loss, gradients or bits.
        finding: what was seen, one line.
        remedy: what to do, one line.
    """

    name: str
    finding: str
    remedy: str


@dataclass(frozen=True)
class PackingReport:
    """The findings of `cuseq.check_packing`. `print(report)` shows a table and the verdict.

    Attributes:
        subject: what was checked, one line.
        checks: the comparisons that were made, by name: tokens, repeat, leak forward, leak
            backward, leak from padding, logits, loss, labels (only if the model returns no loss and
            they are wrong), gradients, gradients of embeddings, bits (only with `bitwise`).
        loss_packed, loss_alone: mean over all targets, packed and alone; computed from the logits
            if the model returns no loss.
        suspect: the most likely cause of a failure; None if nothing failed.
        notes: remarks that do not change the verdict.
        ok: whether packed and single runs agree and no document leaks into another.
    """

    subject: str
    checks: dict[str, Check]
    loss_packed: float | None = None
    loss_alone: float | None = None
    suspect: Suspect | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.suspect is None and all(check.ok for check in self.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts for JSON; non-finite numbers become strings."""
        return {
            "ok": self.ok,
            "subject": self.subject,
            "checks": {
                check.name: {
                    "value": _plain(check.value),
                    "limit": _plain(check.limit),
                    "where": check.where,
                    "ok": check.ok,
                }
                for check in self.checks.values()
            },
            "loss_packed": _plain(self.loss_packed),
            "loss_alone": _plain(self.loss_alone),
            "suspect": None if self.suspect is None else vars(self.suspect),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = [("", "difference", "allowed", "", "where")]
        rows += [
            (
                check.name,
                "not measured" if check.value is None else f"{check.value:.2g}",
                f"{check.limit:.2g}",
                "" if check.ok else "WRONG",
                check.where,
            )
            for check in self.checks.values()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"check_packing: {self.subject}"]
        for name, value, limit, mark, where in rows:
            cells = name.ljust(widths[0]), value.rjust(widths[1]), limit.rjust(widths[2])
            lines.append("  ".join(["", *cells, mark.ljust(widths[3]), where]).rstrip())
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines + self._verdict())

    def _verdict(self) -> list[str]:
        if self.suspect is None:
            return ["verdict: OK, packed equals one by one and no document leaks into another"]
        return [
            f"verdict: WRONG ({self.suspect.name}): {self.suspect.finding}",
            f"remedy: {self.suspect.remedy}",
        ]


def _plain(value: float | None) -> float | str | None:
    """Return the value, or a string for NaN and infinity, which JSON lacks."""
    if value is None or abs(value) < float("inf"):
        return value
    return str(value)
