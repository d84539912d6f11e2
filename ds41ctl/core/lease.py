"""The clock lease: what was set, for whom, and what it was before; and whether it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ds41ctl.core.facts import GpuFacts
from ds41ctl.core.finding import Finding, Status

Number = TypeVar("Number", int, float)

LEASE_SCHEMA = 1
TOLERANCE_MHZ = 15  # one step of a V100's clock table (nvidia-smi -q -d SUPPORTED_CLOCKS: 1530, 1522, 1515 ...)
KEPT_SHARE = 0.99  # policy: share of samples under load that must reach the target
SAMPLES_MIN = 20  # policy: fewer say nothing about a share of 99 %
TOLERANCE_W = 0.5  # half of the step in which nvidia-smi takes limits; NVML counts in mW


class Process(BaseModel):
    """A process for certain: pid and start time in clock ticks since boot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    start_ticks: int


class Lease(BaseModel):
    """Journal of what is set, made durable before the first GPU is touched.

    Exactly what it names is ever given back. `owner` None: held until somebody unlocks or the machine is rebooted.
    `locked` False: the requests were not all made when this was written. Clocks in MHz, power in W; None: left alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = LEASE_SCHEMA
    profile: str
    boot_id: str
    module: str = Field("", description="which load of the driver's kernel module; '' is not known")
    uuids: tuple[str, ...]
    mhz: int | None = None
    power_limit_w: float | None = None
    power_before_w: dict[str, float] = Field(default_factory=dict, description="uuid -> limit before; differing only")
    offset_mhz: int | None = None
    offset_before_mhz: dict[str, int] = Field(default_factory=dict, description="uuid -> offset before; differing only")
    missed: tuple[str, ...] = Field((), description="what was wanted and could not be had, with its reason")
    governor: str = ""
    governors_before: dict[str, str] = Field(default_factory=dict, description="cpufreq policy -> governor before")
    owner: Process | None = None
    guardian: Process | None = None
    way: Literal["root", "sudo"] = "root"
    locked: bool = False
    created_at: str

    def void(self, boot_id: str, module: str) -> str:
        """Why the driver has forgotten what was set, '' when it has not. Nobody's numbers are older than that."""
        if self.boot_id != boot_id:
            return "of an earlier boot"
        if self.module and module and self.module != module:
            return "of before the driver module was loaded again"
        return ""

    @property
    def text(self) -> str:
        """What is set, in words."""
        return settings(self.mhz, self.power_limit_w, self.offset_mhz)


def settings(mhz: int | None, power_limit_w: float | None, offset_mhz: int | None) -> str:
    """`1530 MHz, 200 W, offset +200 MHz`: what is not None of it."""
    parts = [f"{mhz} MHz"] if mhz is not None else []
    parts += [f"{power_limit_w:g} W"] if power_limit_w is not None else []
    parts += [f"offset {offset_mhz:+d} MHz"] if offset_mhz is not None else []
    return ", ".join(parts)


def to_give_back(
    set_to: float | None, before: Mapping[str, Number], now: Mapping[str, Number | None], *, ours: bool = False
) -> tuple[dict[str, Number], dict[str, Number]]:
    """(what each GPU must get back, values of somebody else that stay), by uuid.

    A value that is neither the one set nor the one before was chosen by somebody since. A value that cannot be read
    counts as ours: the setter will say what is wrong. `ours`: nobody else can have been there since it was set.
    """
    back: dict[str, Number] = {}
    foreign: dict[str, Number] = {}
    for uuid, value in before.items():
        found = now.get(uuid)
        if found is not None and abs(found - value) <= TOLERANCE_W:
            continue
        if ours or found is None or set_to is None or abs(found - set_to) <= TOLERANCE_W:
            back[uuid] = value
        else:
            foreign[uuid] = found
    return back, foreign


def changed(lease: Lease, gpus: Sequence[GpuFacts]) -> list[str]:
    """What of the lease's power limits and offsets is not in force any more, a line for each."""
    lines = []
    for gpu in gpus:
        if gpu.uuid not in lease.uuids or not lease.locked:
            continue
        limit, offset = lease.power_limit_w, lease.offset_mhz
        if limit is not None and gpu.power_limit_w is not None and abs(gpu.power_limit_w - limit) > TOLERANCE_W:
            lines.append(f"GPU {gpu.index}: power limit {gpu.power_limit_w:g} W now, {limit:g} W was set")
        if offset is not None and gpu.offset_mhz not in (None, offset):
            lines.append(f"GPU {gpu.index}: clock offset {gpu.offset_mhz:+d} MHz now, {offset:+d} MHz was set")
    return lines


def judge_values(lease: Lease, gpus: Sequence[GpuFacts]) -> Finding:
    """Whether the power limits and clock offsets of a lease are in force. A value that cannot be read is unknown."""
    expected = f"{settings(None, lease.power_limit_w, lease.offset_mhz)} on {len(lease.uuids)} GPUs"
    lines = changed(lease, gpus)
    if lines:
        return Finding(
            id="clocks.values",
            status=Status.FAIL,
            summary=f"not what was set: {lines[0]}",
            expected=expected,
            found=f"{len(lines)} values differ",
            why="somebody set it since, or the driver was loaded again or let go of its last client: rates before and "
            "after are not comparable",
            fix=(f"ds41ctl clocks unlock --profile {lease.profile}", f"ds41ctl clocks lock --profile {lease.profile}"),
            evidence=tuple(lines),
        )
    ours = [gpu for gpu in gpus if gpu.uuid in lease.uuids]
    blind = [gpu for gpu in ours if lease.power_limit_w is not None and gpu.power_limit_w is None]
    blind += [gpu for gpu in ours if lease.offset_mhz is not None and gpu.offset_mhz is None]
    if blind or len(ours) < len(lease.uuids):
        return Finding(
            id="clocks.values",
            status=Status.UNKNOWN,
            summary="power limits or clock offsets cannot be read",
            expected=expected,
            found=f"{len(ours)} of {len(lease.uuids)} GPUs answer",
            why="what cannot be read is not proven",
            fix=("nvidia-smi -q -d POWER,CLOCK",),
        )
    return Finding(
        id="clocks.values", status=Status.OK, summary=f"{expected}, as set", expected=expected, found="as set"
    )


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
