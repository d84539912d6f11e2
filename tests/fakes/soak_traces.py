"""Scripted soak traces: one healthy run, and one change a fault. Times are seconds, noise comes from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from smoke.trace import Canary, Drain, End, Gpu, Sample, Start, Trace, Turn, collect

MINUTE = 60.0
Change = Callable[[float], float]


def flat(at: float) -> float:
    """No change."""
    return 1.0


@dataclass(frozen=True)
class Script:
    """A run. `speed`, `wait`: factors on decode rate and TTFT; `rss`, `vram`: MiB over time; `kv`: level at rest;
    `drafter`: share of all drafts accepted, `first`: of first ones, in the canary that asks for code."""

    seconds: float = 30 * MINUTE
    planned: float = 30 * MINUTE
    gpus: int = 0
    noise: float = 0.02
    seed: int = 1
    speed: Change = flat
    wait: Change = flat
    rss: Change = lambda at: 3000.0
    vram: Change = lambda at: 20_000.0
    kv: Change = lambda at: 0.0
    mhz: Change = lambda at: 1530.0
    throttle: Change = lambda at: 0.0
    watts: Change | None = lambda at: 300.0
    offset: Change = lambda at: 0.0
    xid: Callable[[float], int | None] = lambda at: 0
    mapped: Callable[[float], bool | None] = lambda at: True
    engine: Callable[[float], str] = lambda at: "pid 10, started 5"
    reset_at: float | None = None
    outcome: Callable[[float], str] = lambda at: "ok"
    canary: Callable[[float, str], str] = lambda at, name: "ok"
    stuck: tuple[float, float] | None = None
    left_running: Change = lambda at: 0.0
    foreign: float = 0.0
    drafter: float | None = None
    first: float | None = None
    started_with_drafter: bool | None = None
    total_mib: float | None = 24_000.0
    every_s: float = 4.0
    sample_s: float = 5.0
    blind: tuple[float, float] | None = None
    wall_step_at: float | None = None
    end: str = "complete"
    canaries: bool = True
    metrics: bool = True


def trace(script: Script, **changes: Any) -> Trace:
    """The trace of `script` with `changes`."""
    s = replace(script, **changes)
    rng = random.Random(s.seed)
    events: list[Any] = [
        Start(
            planned_s=s.planned, sample_s=s.sample_s, gpus=s.gpus, store_expected=True, drafter=s.started_with_drafter
        )
    ]
    counts: list[tuple[float, int]] = []
    at, number = 1.0, 0
    while at < s.seconds - 10:
        session, index = divmod(number, 5)
        outcome: Any = s.outcome(at)
        said = 64 if outcome == "ok" else 0
        rate = 30.0 * s.speed(at) * max(0.05, rng.gauss(1, s.noise))
        events.append(
            Turn(
                at=at,
                kind="session",
                session=session,
                index=index,
                outcome=outcome,
                fault="" if outcome == "ok" else "connection reset by peer",
                prompt_tokens=200 + 150 * index,
                completion_tokens=said,
                ttft_s=0.2 * s.wait(at) * max(0.05, rng.gauss(1, s.noise)) if said else None,
                decode_tps=rate if said else None,
                seconds=64 / rate if said else 1.0,
            )
        )
        counts.append((at, said))
        at += s.every_s
        number += 1
    if s.canaries:
        for minute in range(5, int(s.seconds / MINUTE) + 1, 5):
            for name in ("smoke.arithmetic", "smoke.tool-call", "smoke.copy", "smoke.repeat"):
                found: Any = s.canary(minute * MINUTE, name)
                events.append(Canary(at=minute * MINUTE - 20, id=name, status=found, text="`found`"))
            if s.first is not None:
                asked: dict[str, Any] = {"id": "smoke.drafter", "drafts": 200.0, "first_accepted": 200.0 * s.first}
                status = "fail" if s.first < 0.7 else "ok"
                events.append(Canary(at=minute * MINUTE - 18, status=status, text="x", **asked))
            drained = minute * MINUTE - 15
            rest = s.left_running(drained)
            events.append(
                Drain(at=drained, idle_kv=0.0, kv=s.kv(drained) if s.metrics else None, running=rest, waiting=0.0)
            )
    at = 0.0
    while at <= s.seconds:
        if s.blind is None or not s.blind[0] < at < s.blind[1]:
            events.append(_sample(s, at, counts))
        at += s.sample_s
    if s.end:
        reason: Any = s.end
        events.append(End(at=s.seconds, reason=reason))
    return collect(events)


def waves(
    *,
    wanted: int = 2,
    sent: int = 2,
    outcome: Callable[[int], Any] = lambda number: "ok",
    tokens: int = 100_400,
    cached: int = 0,
    vram: float = 63_580.0,
    total: float = 64_911.0,
    gpus: int = 2,
) -> Trace:
    """A counted run: `sent` of `wanted` waves of eight prompts, `outcome` by the number of the request."""
    length = 420.0
    events: list[Any] = [Start(planned_s=7600, mode="waves", waves=wanted, prompt_tokens=100_000, gpus=gpus)]
    for number in range(8 * sent):
        said: Any = outcome(number)
        at = 2.0 + length * (number // 8)
        events.append(
            Turn(
                at=at, kind="wave", session=1 + number // 8, outcome=said, prompt_tokens=tokens, cached_tokens=cached,
                completion_tokens=32 if said == "ok" else 0, ttft_s=40.0 * (1 + number % 8), decode_tps=60.0,
                seconds=45.0 * (1 + number % 8), streams=8,
            )
        )  # fmt: skip
    end = length * sent + 30
    gpu = Gpu(used_mib=vram, total_mib=total, sm_mhz=1530, throttle=0)
    for step in range(int(end / 5) + 1):
        done = min(8 * sent, int(step * 5 / 45))
        running = 1.0 if step * 5 < length * sent else 0.0
        made = 32.0 * done if step * 5 < end - 10 else 32.0 * 8 * sent
        events.append(
            Sample(
                at=step * 5.0, wall=1_800_000_000 + step * 5.0, running=running, waiting=0.0, kv=0.2, generated=made,
                rss_mib=3000.0, gpus=(gpu,) * gpus, xid=0, engine="pid 10, started 5",
            )
        )  # fmt: skip
    for name in ("smoke.arithmetic", "smoke.copy", "smoke.repeat"):
        events.append(Canary(at=end - 5, id=name, status="ok", text="`found`"))
    events.append(Drain(at=end - 8, idle_kv=0.0, kv=0.0, running=0.0, waiting=0.0, final=True))
    events.append(End(at=end, reason="complete"))
    return collect(events)


def _sample(s: Script, at: float, counts: list[tuple[float, int]]) -> Sample:
    until = min(at, s.stuck[0]) if s.stuck and at < s.stuck[1] else at
    made = float(sum(said for sent, said in counts if sent + 3 <= until)) * (1 + s.foreign)
    if s.reset_at is not None and at >= s.reset_at:
        made -= float(sum(said for sent, said in counts if sent + 3 <= s.reset_at))
    skew = 3600.0 if s.wall_step_at is not None and at >= s.wall_step_at else 0.0
    gpu = Gpu(
        used_mib=s.vram(at),
        total_mib=s.total_mib,
        sm_mhz=int(s.mhz(at)),
        throttle=int(s.throttle(at)),
        power_limit_w=s.watts(at) if s.watts else None,
        offset_mhz=int(s.offset(at)),
    )
    return Sample(
        at=at,
        wall=1_800_000_000 + at + skew,
        running=1.0 if s.metrics else None,
        waiting=0.0 if s.metrics else None,
        kv=0.1 if s.metrics else None,
        generated=made if s.metrics else None,
        drafted=made if s.drafter is not None else None,
        accepted=made * s.drafter if s.drafter is not None else None,
        rss_mib=s.rss(at),
        gpus=tuple([gpu] * s.gpus) if s.gpus else None,
        xid=s.xid(at),
        store_mapped=s.mapped(at),
        engine=s.engine(at),
    )
