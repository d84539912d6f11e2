"""Finding: the one row every check, smoke test and judge produces."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Status(StrEnum):
    """What is known. UNKNOWN (could not be measured) and CRASH (bug in the check) are never OK."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    UNKNOWN = "unknown"
    CRASH = "crash"


class Finding(BaseModel):
    """One thing that was looked at.

    `id` is dotted, lower case and stable. `summary` is one line. `expected`/`found` carry units. `why` says what
    would go wrong, `fix` is one paste-ready command or action a line. `evidence` names file, function or raw lines.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    status: Status
    summary: str
    expected: str = ""
    found: str = ""
    why: str = ""
    fix: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    seconds: float | None = None

    def failed(self, *, strict: bool = False) -> bool:
        """True when this finding must stop the run; `strict` adds warnings and what could not be measured."""
        if self.status in (Status.FAIL, Status.CRASH):
            return True
        return strict and self.status in (Status.WARN, Status.UNKNOWN)


def tally(findings: Iterable[Finding]) -> dict[Status, int]:
    """Number of findings per status, every status present."""
    counts = dict.fromkeys(Status, 0)
    for finding in findings:
        counts[finding.status] += 1
    return counts
