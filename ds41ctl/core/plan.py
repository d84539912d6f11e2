"""Plan: what a command would do, computed from profile, layout and facts alone; `--dry-run` prints it."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict

from ds41ctl.core.launch import Launch
from ds41ctl.core.layout import Layout

PLAN_SCHEMA = 2


class PlannedStep(BaseModel):
    """One step: `what` in words, the files it would write, the bytes it would move, its time budget in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    what: str
    writes: tuple[str, ...] = ()
    bytes: int | None = None
    budget_s: float | None = None
    commands: tuple[tuple[str, ...], ...] = ()


class Plan(BaseModel):
    """Everything a run would do; `launch` is the engine's start, None for a command that starts none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = PLAN_SCHEMA
    command: str
    profile: str
    profile_digest: str
    steps: tuple[PlannedStep, ...]
    launch: Launch | None = None
    url: str = ""
    lacks: tuple[str, ...] = ()

    def digest(self) -> str:
        """sha256 of the plan's canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def serve_plan(layout: Layout, start: Launch, command: str, steps: tuple[PlannedStep, ...]) -> Plan:
    """Plan of a command that ends with a running engine."""
    return Plan(
        command=command,
        profile=layout.name,
        profile_digest=layout.profile.digest(),
        steps=steps,
        launch=start,
        url=layout.url + "/v1",
        lacks=layout.profile.lacks,
    )
