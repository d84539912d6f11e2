"""Trace: everything a soak recorded, as the one input of its judge and its report.

Times `at` are seconds since the start of the run on the monotonic clock: a stepped wall clock cannot move them.
A value that could not be measured is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

TRACE_SCHEMA = 1
WAVE = 8  # unique long prompts at once, as seed 004's stress test

TurnKind = Literal["session", "fresh", "image", "wave", "cancel"]
Outcome = Literal["ok", "cancelled", "unfinished", "empty", "bad-tool", "error", "interrupted", "timeout"]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float = 0.0


class Start(_Event):
    """What is soaked, and how. `ts` is wall time, ISO 8601 UTC. `waves`: so many waves and no more, 0: as many as the
    time allows; `prompt_tokens`: length that a wave's prompts were to have. `drafter`: on or off (None: not known)."""

    type: Literal["start"] = "start"
    schema_version: int = TRACE_SCHEMA
    ts: str = ""
    run: str = ""
    profile: str = ""
    profile_digest: str = ""
    engine_digest: str = ""
    facts_digest: str = ""
    mode: str = "mixed"
    planned_s: float
    waves: int = 0
    prompt_tokens: int = 0
    drafter: bool | None = None
    sample_s: float = 5.0
    gpus: int = 0
    store_expected: bool = False
    identity_known: bool = True
    notes: tuple[str, ...] = ()


class Turn(_Event):
    """One request; `at` is when it was sent. Token counts are the server's. `decode_tps` None: `why` says why."""

    type: Literal["turn"] = "turn"
    kind: TurnKind
    session: int = 0
    index: int = 0
    outcome: Outcome
    fault: str = ""
    why: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    decode_tps: float | None = None
    seconds: float = 0.0
    streams: int = 1


class Gpu(BaseModel):
    """One GPU at one moment. `throttle`: NVML's bits of clock event reasons; `total_mib`: all its memory; limit in W,
    clock offset in MHz."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    used_mib: float | None = None
    total_mib: float | None = None
    sm_mhz: int | None = None
    throttle: int | None = None
    temperature_c: int | None = None
    power_limit_w: float | None = None
    offset_mhz: int | None = None


class Sample(_Event):
    """State of engine and machine at one moment; counters are the engine's own, summed over its ranks."""

    type: Literal["sample"] = "sample"
    wall: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    generated: float | None = None
    prompted: float | None = None
    preemptions: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    rss_mib: float | None = None
    gpus: tuple[Gpu, ...] | None = None
    xid: int | None = None
    swapped_pages: int | None = None
    store_mapped: bool | None = None
    engine: str = ""


class Canary(_Event):
    """One canary: id of the smoke test, its status, and what it found. `drafts`, `first_accepted`: what the engine's
    counters grew by meanwhile, for the canary that asks for them and nobody else beside it."""

    type: Literal["canary"] = "canary"
    id: str
    status: Literal["ok", "warn", "fail", "skip", "unknown", "crash"]
    text: str = ""
    fault: str = ""
    loaded: bool = False
    tokens: int = 0
    drafts: float | None = None
    first_accepted: float | None = None


class Drain(_Event):
    """The engine at rest: no request of ours was open for a moment. `idle_kv` is the level before the first one."""

    type: Literal["drain"] = "drain"
    idle_kv: float | None = None
    kv: float | None = None
    running: float | None = None
    waiting: float | None = None
    final: bool = False


class End(_Event):
    """How the run ended."""

    type: Literal["end"] = "end"
    reason: Literal["complete", "cancelled", "engine-died", "disk-full", "crashed"]
    text: str = ""


Event = Annotated[Start | Turn | Sample | Canary | Drain | End, Field(discriminator="type")]
_EVENT: TypeAdapter[Any] = TypeAdapter(Event)


@dataclass(frozen=True)
class Trace:
    """A run's events, sorted into their kinds. `unreadable`: lines of the file that were no events."""

    start: Start | None = None
    turns: Sequence[Turn] = ()
    samples: Sequence[Sample] = ()
    canaries: Sequence[Canary] = ()
    drains: Sequence[Drain] = ()
    end: End | None = None
    unreadable: int = 0

    @property
    def seconds(self) -> float:
        """Time of the last thing recorded."""
        times = [item.at for part in (self.turns, self.samples, self.canaries, self.drains) for item in part]
        return max([*times, self.end.at if self.end else 0.0])


def collect(events: Iterable[_Event], unreadable: int = 0) -> Trace:
    """Trace of `events`, each kind in order of time."""
    found: dict[type, list[Any]] = {Start: [], Turn: [], Sample: [], Canary: [], Drain: [], End: []}
    for event in events:
        found[type(event)].append(event)
    for part in found.values():
        part.sort(key=lambda item: item.at)
    return Trace(
        start=found[Start][0] if found[Start] else None,
        turns=found[Turn],
        samples=found[Sample],
        canaries=found[Canary],
        drains=found[Drain],
        end=found[End][-1] if found[End] else None,
        unreadable=unreadable,
    )


def line(event: _Event) -> str:
    """One line of a trace file, without its line end."""
    tree = {"type": type(event).model_fields["type"].default, **event.model_dump(mode="json", exclude_defaults=True)}
    return json.dumps(tree, ensure_ascii=False)


def parse(text: str) -> Trace:
    """Trace of a file's text. Lines that are no events (cut by a kill or a full disk) are counted, not fatal."""
    events, broken = [], 0
    for raw in text.splitlines():
        try:
            events.append(_EVENT.validate_json(raw))
        except ValidationError:
            broken += 1
    return collect(events, broken)
