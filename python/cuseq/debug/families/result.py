"""The result of trying one family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RIGHT, REFUSED, LEAKS, DIFFERS, NOT_TRIED = "right", "refused", "leaks", "differs", "not tried"
VERDICTS = (RIGHT, REFUSED, LEAKS, DIFFERS, NOT_TRIED)


@dataclass(frozen=True)
class FamilyResult:
    """What `cuseq.enable` did with a small model of a family, and what the model computed then.

    Attributes:
        family: the model type of the config.
        verdict: "right", if `enable` took the model and all checks agree; "refused", if `enable`
            raised; "leaks", if documents of a packed row reach each other; "differs", if another
            check failed; "not tried", if no small model of the family could be made and run.
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
        """Whether the family leaks or differs and `enable` does not warn of it."""
        warned = any(warning.startswith("LEAKS") for warning in self.warnings)
        return self.verdict in (LEAKS, DIFFERS) and not warned
