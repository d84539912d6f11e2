"""Event: one line of a run's journal (events.jsonl), the only thing a report is made from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ds41ctl.core.finding import Finding

EVENT_SCHEMA = 1

EventType = Literal["run.start", "step.start", "step.progress", "step.done", "finding", "run.done"]
StepState = Literal["ok", "already", "skip", "fail", "unknown"]


class Event(BaseModel):
    """`ts` is ISO 8601 UTC; `data` holds small plain values (bytes, seconds, paths) and never a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = EVENT_SCHEMA
    ts: str
    run: str
    seq: int
    type: EventType
    step: str = ""
    state: StepState | None = None
    text: str = ""
    seconds: float | None = None
    finding: Finding | None = None
    data: dict[str, Any] = Field(default_factory=dict)
