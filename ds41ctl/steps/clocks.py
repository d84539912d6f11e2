"""clocks: clocks, power limits and the CPU governor are held for the engine that runs, and given back when it ends."""

from __future__ import annotations

from collections.abc import Callable

from ds41ctl.adapters import clocks, nvml, proc, running
from ds41ctl.core.errors import DeniedError, NotFoundError, UnsupportedError
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.layout import Layout
from ds41ctl.core.lease import Lease, Process, judge_kept, judge_values, settings
from ds41ctl.steps.runner import Goal, Progress


def gpus(layout: Layout) -> list[str]:
    """UUIDs of the profile's GPUs. Raises UnsupportedError when NVML cannot name them all."""
    found = nvml.survey()
    if found.gpus is None:
        raise UnsupportedError(f"the GPUs cannot be asked: {found.note}", hints=("ds41ctl preflight --only gpu",))
    wanted = [index for _, group in layout.gpu_groups for index in group] or list(range(layout.profile.hardware.gpus))
    known = {gpu.index: gpu.uuid for gpu in found.gpus if gpu.uuid}
    missing = [index for index in wanted if index not in known]
    if missing:
        raise UnsupportedError(f"GPU {missing[0]} does not answer", hints=("ds41ctl preflight --only gpu.count",))
    return [known[index] for index in wanted]


def wanted(layout: Layout) -> str:
    """What the profile sets on its GPUs, in words; '' when it leaves them alone."""
    want = layout.profile.clocks
    return settings(want.sm_mhz, want.power_limit_w, want.offset_mhz)


class ClockLease:
    """Hold what the profile's [clocks] name for the running engine (or for `owner`)."""

    name = "clocks"

    def __init__(self, layout: Layout, *, owner: Process | None = None) -> None:
        self.layout = layout
        self._owner = owner
        self.notes: list[str] = []

    def owner(self) -> Process:
        """Who the lease is for. Raises NotFoundError when no engine runs."""
        if self._owner is not None:
            return self._owner
        record = running.read(self.layout.record_path)
        if record is None or not record.alive():
            raise NotFoundError(f"no engine of {self.layout.name} runs", hints=("ds41ctl serve",))
        return Process(pid=record.pid, start_ticks=record.start_ticks)

    def unavailable(self) -> str:
        """'' when this user may lock clocks here, else why not. Touches nothing."""
        found = nvml.survey()
        if not found.gpus:
            return found.note or "no GPU answers"
        if clocks.way_of_this_user() == "root" or proc.sudo_passwordless():
            return ""
        allowed = clocks.sudo_allows(self.layout.profile.clocks, found.gpus[0].uuid)
        return "" if allowed else "neither root nor sudo without a password"

    def check(self) -> Goal:
        """A whole lease of this boot for that owner, with a live guardian."""
        lease = clocks.read(clocks.journal(self.layout.dirs.state, self.layout.name))
        if lease is None or not lease.locked:
            return Goal(False, "not locked")
        if clocks.void(lease) or lease.owner != self.owner() or not clocks.alive(lease.guardian):
            return Goal(False, "the lease is not this engine's, or nobody guards it")
        want = self.layout.profile.clocks
        shifted = lease.offset_mhz == want.offset_mhz or (lease.offset_mhz is None and lease.missed)
        if (lease.mhz, lease.power_limit_w) != (want.sm_mhz, want.power_limit_w) or not shifted:
            return Goal(False, f"set to {lease.text or 'nothing'}")
        asked = f"{lease.text or 'nothing'} asked of {len(lease.uuids)} GPUs"
        return Goal(
            True,
            f"{asked} (lease of pid {lease.owner.pid if lease.owner else 0}); load will show whether they keep it",
            {
                "mhz": lease.mhz,
                "power_limit_w": lease.power_limit_w,
                "offset_mhz": lease.offset_mhz,
                "gpus": len(lease.uuids),
            },
        )

    def do(self, progress: Progress) -> None:
        """Take the lease. Raises DeniedError when this user may not lock clocks."""
        target = wanted(self.layout)
        if not target:
            raise UnsupportedError(f"profile {self.layout.name} leaves clocks alone")
        why = self.unavailable()
        if why:
            raise DeniedError(f"{target} cannot be set: {why}", hints=(sudoers_hint(self.layout),))
        progress(f"setting {target}", {})
        _, self.notes = clocks.acquire(
            self.layout.dirs.state,
            profile=self.layout.name,
            uuids=gpus(self.layout),
            want=self.layout.profile.clocks,
            owner=self.owner(),
        )


def sudoers_hint(layout: Layout) -> str:
    """The command that prints what an administrator must allow."""
    return f"ds41ctl clocks sudoers --profile {layout.name}   # the lines for: sudo visudo -f /etc/sudoers.d/ds41ctl"


def offset_hints(lease: Lease | None, mhz: int | None) -> list[str]:
    """What helps when a lease could not have the profile's clock offset."""
    if lease is None or not lease.missed or mhz is None:
        return []
    if clocks.denied(lease.missed):
        return [f"{clocks.offset_by_hand(mhz, lease.uuids)}   # nobody sets it back to 0 for you"]
    return [f"set {mhz:+d} MHz with the recipe author's tool 170tune before the engine starts, or go on without"]


class ClockProof:
    """Whether the lease was kept: samples taken while something else gave the GPUs work, and the values after it."""

    name = "clocks-kept"

    def __init__(self, lease: Lease, sampler: clocks.Sampler) -> None:
        self.lease, self.sampler = lease, sampler

    def judge(self, on_finding: Callable[[Finding], None], progress: Progress) -> Goal:
        """Judge what the sampler saw. Passes unless a GPU fell below the target or has another limit or offset."""
        findings = [] if self.lease.mhz is None else [judge_kept(self.lease.mhz, self.sampler.samples)]
        if (self.lease.power_limit_w, self.lease.offset_mhz) != (None, None):
            findings.append(judge_values(self.lease, nvml.survey().gpus or ()))
        for finding in findings:
            on_finding(finding)
        passed = all(finding.status is not Status.FAIL for finding in findings)
        unproven = any(finding.status is Status.UNKNOWN for finding in findings)
        text = "; ".join(finding.summary for finding in findings) or "nothing was set"
        return Goal(passed, text, unknown=unproven)
