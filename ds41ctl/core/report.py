"""Report: what a run amounts to, folded from its events and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ds41ctl.core.event import Event, StepState
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding

REPORT_SCHEMA = 1


class StepReport(BaseModel):
    """How one step ended. `state` None means it was started and never finished (the run died in it)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    state: StepState | None
    text: str = ""
    seconds: float | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class Report(BaseModel):
    """Verdict of a run: `interrupted` when its last event is not `run.done`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = REPORT_SCHEMA
    run: str
    command: str
    profile: str
    started: str
    seconds: float | None
    verdict: Literal["ok", "failed", "interrupted"]
    exit_code: int
    steps: tuple[StepReport, ...]
    findings: tuple[Finding, ...]


def fold(events: Iterable[Event]) -> Report:
    """Fold a run's events, in order, into its report. Raises ValueError when there is no `run.start`."""
    start: Event | None = None
    done: Event | None = None
    steps: dict[str, StepReport] = {}
    findings: list[Finding] = []
    for event in events:
        if event.type == "run.start":
            start = event
        elif event.type == "step.start":
            steps[event.step] = StepReport(step=event.step, state=None)
        elif event.type == "step.done":
            steps[event.step] = StepReport(
                step=event.step, state=event.state, text=event.text, seconds=event.seconds, data=event.data
            )
        elif event.type == "finding" and event.finding is not None:
            findings.append(event.finding)
        elif event.type == "run.done":
            done = event
    if start is None:
        raise ValueError("no run.start event: this is not the journal of a run")
    code = int(done.data.get("exit_code", Exit.INTERNAL)) if done else int(Exit.INTERNAL)
    return Report(
        run=start.run,
        command=str(start.data.get("command", "")),
        profile=str(start.data.get("profile", "")),
        started=start.ts,
        seconds=done.seconds if done else None,
        verdict="interrupted" if done is None else ("ok" if code == 0 else "failed"),
        exit_code=code,
        steps=tuple(steps.values()),
        findings=tuple(findings),
    )
