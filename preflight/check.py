"""Check: one pure question about (profile, facts), and the verdict it gives."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.profile import Profile

Stage = Literal["up", "serve"]
"""`up`: what is missing will be made. `serve`: the engine starts next, so everything must be there."""

CRASH_LINES = 4  # policy: what of a traceback goes into the evidence


@dataclass(frozen=True)
class Verdict:
    """A check's answer; fields as in Finding."""

    status: Status
    summary: str
    expected: str = ""
    found: str = ""
    why: str = ""
    fix: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


def ok(summary: str, *, expected: str = "", found: str = "", evidence: tuple[str, ...] = ()) -> Verdict:
    """Measured, and as it must be."""
    return Verdict(Status.OK, summary, expected, found, evidence=evidence)


def skip(summary: str) -> Verdict:
    """Does not apply here, or will be made by the step that `summary` names."""
    return Verdict(Status.SKIP, summary)


def warn(summary: str, *, expected: str, found: str, fix: tuple[str, ...], why: str = "") -> Verdict:
    """Works, but worse than it could."""
    return Verdict(Status.WARN, summary, expected, found, why, fix)


def fail(
    summary: str,
    *,
    expected: str,
    found: str,
    fix: tuple[str, ...],
    why: str = "",
    evidence: tuple[str, ...] = (),
) -> Verdict:
    """Measured, and wrong."""
    return Verdict(Status.FAIL, summary, expected, found, why, fix, evidence)


def unknown(summary: str, *, expected: str, fix: tuple[str, ...], found: str = "could not be measured") -> Verdict:
    """Could not be measured, which is never ok."""
    return Verdict(Status.UNKNOWN, summary, expected, found, fix=fix)


CheckFunction = Callable[[Profile, HostFacts, Stage], Verdict]


@dataclass(frozen=True)
class Check:
    """One check. `id` is dotted, lower case and stable; `prevents` says what goes wrong without it.

    `level` 1: facts alone, under a second; 2: reads every byte of the pack; 3: runs work on the GPUs.
    """

    id: str
    title: str
    level: int
    group: str
    prevents: str
    func: CheckFunction

    def run(self, profile: Profile, facts: HostFacts, stage: Stage) -> Finding:
        """The check's finding; a check that raises gives a CRASH finding with the end of its traceback."""
        started = time.perf_counter()
        try:
            verdict = self.func(profile, facts, stage)
        except Exception as error:  # a bug in one check must not hide what the others see
            verdict = Verdict(
                Status.CRASH,
                f"the check itself failed: {type(error).__name__}: {error}",
                expected="a verdict",
                found=type(error).__name__,
                fix=(
                    f"ds41ctl report   # a bug in {self.id}: attach the file",
                    f"ds41ctl preflight --skip {self.id}   # go on without it",
                ),
                evidence=tuple(traceback.format_exc().strip().splitlines()[-CRASH_LINES:]),
            )
        bad = verdict.status not in (Status.OK, Status.SKIP)
        return Finding(
            id=self.id,
            status=verdict.status,
            summary=verdict.summary,
            expected=verdict.expected,
            found=verdict.found,
            why=verdict.why or (self.prevents if bad else ""),
            fix=verdict.fix,
            evidence=verdict.evidence,
            seconds=round(time.perf_counter() - started, 6),
        )
