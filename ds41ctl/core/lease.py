"""The clock lease: what was locked, for whom, and what it was before; and whether a lock is kept under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ds41ctl.core.finding import Finding, Status

LEASE_SCHEMA = 1
TOLERANCE_MHZ = 15  # one step of a V100's clock table (nvidia-smi -q -d SUPPORTED_CLOCKS: 1530, 1522, 1515 ...)
KEPT_SHARE = 0.99  # policy: share of samples under load that must reach the target
SAMPLES_MIN = 20  # policy: fewer say nothing about a share of 99 %


class Process(BaseModel):
    """A process for certain: pid and start time in clock ticks since boot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    start_ticks: int


class Lease(BaseModel):
    """Journal of a lock, made durable before the first GPU is touched.

    Exactly what it names is ever reset. `owner` None: held until somebody unlocks or the machine is rebooted.
    `locked` False: the requests were not all made when this was written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = LEASE_SCHEMA
    profile: str
    boot_id: str
    mhz: int
    uuids: tuple[str, ...]
    governor: str = ""
    governors_before: dict[str, str] = Field(default_factory=dict, description="cpufreq policy -> governor before")
    owner: Process | None = None
    guardian: Process | None = None
    way: Literal["root", "sudo"] = "root"
    locked: bool = False
    created_at: str


@dataclass(frozen=True)
class Reading:
    """One sample of one GPU: SM clock in MHz, busy in percent."""

    mhz: int
    busy_percent: int


def judge_kept(target_mhz: int, samples: Mapping[str, Sequence[Reading]]) -> Finding:
    """Whether every GPU held `target_mhz` while it worked.

    That the driver took the request proves nothing (it answers success and runs at another clock), and a clock at
    rest proves nothing either: only samples under load count.
    """
    expected = f"{target_mhz - TOLERANCE_MHZ} MHz or more in {KEPT_SHARE:.0%} of the samples under load, on every GPU"
    rows: list[str] = []
    low: list[str] = []
    idle: list[str] = []
    for name, readings in samples.items():
        loaded = [item.mhz for item in readings if item.busy_percent > 0]
        if len(loaded) < SAMPLES_MIN:
            idle.append(f"{name} {len(loaded)}")
            continue
        kept = sum(1 for mhz in loaded if mhz >= target_mhz - TOLERANCE_MHZ) / len(loaded)
        rows.append(f"{name}: {kept:.1%} of {len(loaded)} samples, lowest {min(loaded)} MHz")
        if kept < KEPT_SHARE:
            low.append(rows[-1])
    if low:
        return Finding(
            id="clocks.kept",
            status=Status.FAIL,
            summary=f"the lock at {target_mhz} MHz is not kept: {low[0]}",
            expected=expected,
            found=f"{len(low)} of {len(samples)} GPUs below",
            why="auto-boost dips between bursts, or heat and power hold the card back: rates are not comparable",
            fix=("nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE", "ds41ctl preflight --only gpu.throttle"),
            evidence=tuple(rows),
        )
    if idle or not samples:
        return Finding(
            id="clocks.kept",
            status=Status.UNKNOWN,
            summary=f"not proven: fewer than {SAMPLES_MIN} samples under load ({', '.join(idle) or 'no GPU'})",
            expected=expected,
            found="too little load",
            why="a lock shows only while the card works",
            fix=("ds41ctl clocks status --sample 10   # while the engine answers requests",),
            evidence=tuple(rows),
        )
    return Finding(
        id="clocks.kept",
        status=Status.OK,
        summary=f"{target_mhz} MHz kept under load on {len(samples)} GPUs",
        expected=expected,
        found=rows[0].split(": ", 1)[1],
        evidence=tuple(rows),
    )
