"""The result of trying one family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RIGHT, REFUSED, LEAKS, DIFFERS = "right", "refused", "leaks", "differs"
RAISES, NOT_TRIED = "raises", "not tried"
VERDICTS = (RIGHT, REFUSED, LEAKS, DIFFERS, RAISES, NOT_TRIED)


@dataclass(frozen=True)
class FamilyResult:
    """What `cuseq.enable` did with a small model of a family, and what the model computed then.

    Attributes:
        family: the model type of the config.
        verdict: "right", if `enable` took the model and all checks agree; "refused", if `enable`
            raised; "leaks", if documents of a packed row reach each other; "differs", if another
            check found other numbers; "raises", if a check raised that does not without cuseq; "not
            tried", if no small model of the family could be made and run.
        reason: why, for all verdicts but "right".
        checks: the checks that ran: "" where the numbers agree, else what is wrong.
        replaced, left_alone, warnings: as in the result of `enable`.
    """

    family: str
    verdict: str
    reason: str = ""
    checks: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether the family leaks, differs or raises and `enable` does not warn of it."""
        warned = any(warning.startswith("LEAKS") for warning in self.warnings)
        return self.verdict in (LEAKS, DIFFERS, RAISES) and not warned
