"""clocks: hold clocks and power limits, give them back, and see whether they are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import Session, open_running, open_session
from ds41ctl.core.errors import ConfigError, FindingsError, NotFoundError, UnsupportedError
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Status

if TYPE_CHECKING:
    from ds41ctl.core.facts import GpuFacts
    from ds41ctl.core.profile import Clocks
    from ds41ctl.steps.runner import Runner

app = group("Hold clocks and power limits for an engine, give them back, and see whether they are kept.")


@app.command()
def lock(
    profile: options.ProfileOpt = None,
    pid: Annotated[
        int | None,
        typer.Option("--pid", min=1, help="Give the clocks back when this process ends (default: the running engine)."),
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """Set what the profile's [clocks] name until the owner ends, `unlock`, or the next boot or load of the driver."""
    from ds41ctl.adapters import clocks, proc, running
    from ds41ctl.core.lease import Process
    from ds41ctl.steps.clocks import ClockLease, gpus, offset_hints

    session = open_running(profile)
    want = _target(session)
    _tell(clocks.recover(session.dirs.state))
    record = running.read(session.layout.record_path)
    owner: Process | None = None
    if pid is not None:
        identity = proc.identify(pid)
        if identity is None:
            raise NotFoundError(f"there is no process {pid}")
        owner = Process(pid=identity.pid, start_ticks=identity.start_ticks)
    elif record is not None and record.alive():
        owner = Process(pid=record.pid, start_ticks=record.start_ticks)
    if owner is not None:
        step = ClockLease(session.layout, owner=owner)
        goal = step.check()
        if not goal.reached:
            step.do(lambda text, data: None)
            goal = step.check()
        notes, text = step.notes, goal.text
    else:
        _, notes = clocks.acquire(
            session.dirs.state,
            profile=session.profile.name,
            uuids=gpus(session.layout),
            want=want,
        )
        text = ""
    taken = clocks.read(clocks.journal(session.dirs.state, session.profile.name))
    if taken is not None and not text:
        text = f"{taken.text} asked of {len(taken.uuids)} GPUs until `ds41ctl clocks unlock` or the next boot"
    hints = offset_hints(taken, want.offset_mhz)
    cli.out.data(
        {
            "profile": session.profile.name,
            "mhz": want.sm_mhz,
            "power_limit_w": want.power_limit_w,
            "offset_mhz": want.offset_mhz,
            "owner": owner.pid if owner else None,
            "notes": notes,
            "hints": hints,
        }
    )
    cli.out.line(text, mark="OK")
    for note in notes:
        cli.out.line(note, mark="WARN")
    for hint in hints:
        cli.out.hint(hint)
    look = f"ds41ctl clocks status --profile {session.profile.name}"
    cli.out.hint(f"{look} --sample 10   # under load: is it kept?" if want.sm_mhz is not None else look)


@app.command()
def unlock(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Give back exactly the clocks, limits and governors that the lease names."""
    from ds41ctl.adapters import clocks

    session = open_running(profile)
    _tell(clocks.recover(session.dirs.state))
    path = clocks.journal(session.dirs.state, session.profile.name)
    lease = clocks.read(path)
    given = clocks.release(session.dirs.state, session.profile.name)
    faults = given.stuck
    cli.out.data(
        {
            "profile": session.profile.name,
            "gpus": len(lease.uuids) if lease else 0,
            "left": list(faults),
            "kept": list(given.kept),
        }
    )
    _tell(given.kept)
    if faults:
        raise FindingsError(
            f"{len(faults)} clocks, limits or governors could not be reset: {faults[0]}",
            detail=faults if faults[1:] else (),
            hints=("ds41ctl clocks unlock", *clocks.BY_HAND),
        )
    text = f"reset on {len(lease.uuids)} GPUs ({lease.text} until now)" if lease else "already: there is no lease"
    cli.out.line(text, mark="OK")


@app.command()
def status(
    profile: options.ProfileOpt = None,
    sample: Annotated[
        float, typer.Option("--sample", metavar="SECONDS", min=0, help="Watch the clocks this long, under load.")
    ] = 0.0,
    json: options.JsonOpt = False,
) -> None:
    """Show the lease, clocks, power limits and offsets; --sample proves the clock under load.

    Exit 1 when something is not kept, 3 without load.
    """
    from ds41ctl.adapters import clocks, nvml
    from ds41ctl.core.lease import judge_kept, judge_values, settings
    from ds41ctl.steps.clocks import offset_hints

    session = open_running(profile)
    want = _target(session)
    if sample and want.sm_mhz is None:
        raise ConfigError(
            f"profile {session.profile.name} locks no clock that samples could prove",
            hints=(f"ds41ctl clocks status --profile {session.profile.name}",),
        )
    done = clocks.recover(session.dirs.state)
    _tell(done)
    lease = clocks.read(clocks.journal(session.dirs.state, session.profile.name))
    found = nvml.survey()
    if found.gpus is None:
        raise UnsupportedError(f"the GPUs cannot be asked: {found.note}", hints=("ds41ctl preflight --only gpu",))
    ours = [gpu for gpu in found.gpus if lease is not None and gpu.uuid in lease.uuids]
    finding = values = None
    if lease is not None and lease.locked and (lease.power_limit_w, lease.offset_mhz) != (None, None):
        values = judge_values(lease, found.gpus)
    if sample and lease is not None and lease.mhz is not None:
        with clocks.Sampler(lease.uuids) as sampler:
            time.sleep(sample)
        finding = judge_kept(lease.mhz, sampler.samples)
    cli.out.data(
        {
            "profile": session.profile.name,
            "lease": lease.model_dump(mode="json") if lease else None,
            "recovered": done,
            "wanted": want.model_dump(mode="json"),
            "gpus": [gpu.model_dump(mode="json", include=SHOWN) for gpu in found.gpus],
            "finding": finding.model_dump(mode="json") if finding else None,
            "values": values.model_dump(mode="json") if values else None,
        }
    )
    if lease is None:
        cli.out.line(f"no lease of {session.profile.name}", mark="SKIP")
    else:
        owner = f"pid {lease.owner.pid}" if lease.owner else "nobody in particular (until unlock or reboot)"
        guarded = f"guardian pid {lease.guardian.pid}" if lease.guardian else "no guardian"
        what = lease.text or "nothing"
        cli.out.line(f"{what} on {len(ours)} GPUs for {owner}, {guarded}, since {lease.created_at}", mark="OK")
        for note in lease.missed:
            cli.out.line(note, mark="WARN")
        for hint in offset_hints(lease, want.offset_mhz):
            cli.out.hint(hint)
    cli.out.line(f"  wanted  {settings(want.sm_mhz, want.power_limit_w, want.offset_mhz)}")
    for gpu in found.gpus:
        cli.out.line(f"  GPU {gpu.index}  {_shown(gpu)}  {gpu.name}")
    if sample and (lease is None or lease.mhz is None):
        raise ConfigError("there is no lease whose clock could be proven", hints=("ds41ctl clocks lock",))
    judged = [item for item in (values, finding) if item is not None]
    for item in judged:
        cli.out.finding(item)
    kinds = {item.status for item in judged}
    if kinds - {Status.OK}:
        raise typer.Exit(int(Exit.FINDINGS if Status.FAIL in kinds else Exit.INCONCLUSIVE))


# what status shows of a GPU, from its facts
SHOWN = {
    *("index", "uuid", "name", "sm_mhz", "sm_max_mhz", "persistence"),
    *("power_limit_w", "power_default_w", "power_min_w", "power_max_w"),
    *("offset_mhz", "offset_min_mhz", "offset_max_mhz", "offset_note"),
}


def _shown(gpu: GpuFacts) -> str:
    def number(value: float | None, form: str = "g") -> str:
        return "?" if value is None else format(value, form)

    power = f"{number(gpu.power_limit_w)} W (default {number(gpu.power_default_w)}"
    power += f", takes {number(gpu.power_min_w)} to {number(gpu.power_max_w)})"
    offset = f"offset {number(gpu.offset_mhz, '+d')} MHz"
    if gpu.offset_mhz is None:
        offset += f" ({gpu.offset_note})"
    elif gpu.offset_min_mhz is not None and gpu.offset_max_mhz is not None:
        offset += f" (takes {gpu.offset_min_mhz:+d} to {gpu.offset_max_mhz:+d})"
    return f"{gpu.sm_mhz} of {gpu.sm_max_mhz} MHz, {power}, {offset}"


@app.command()
def sudoers(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Print the sudoers lines that allow exactly the commands of the lease. Nothing is written."""
    import os
    import pwd

    from ds41ctl.adapters import clocks, kernel, nvml
    from ds41ctl.steps.clocks import gpus

    session = open_session(profile)
    want = _target(session)
    policies, _ = kernel.governors(Path("/"))
    wanted = list(policies or {}) if session.profile.clocks.governor else []
    now = nvml.Nvml().values(gpus(session.layout))
    lines = clocks.sudoers(pwd.getpwuid(os.getuid()).pw_name, want, now, wanted)
    cli.out.data({"profile": session.profile.name, "lines": lines})
    cli.out.line(f"# ds41ctl: clocks, power limits and CPU governor of profile {session.profile.name}")
    if want.offset_mhz is not None:
        cli.out.line("# the clock offset is not among them (nvidia-smi cannot set it, and no line may name a program")
        cli.out.line(f"# that this user can change); by hand: {clocks.offset_by_hand(want.offset_mhz, list(now))}")
    for text in lines:
        for part in text.splitlines():
            cli.out.line(part)
    if lines:
        cli.out.hint("sudo visudo -f /etc/sudoers.d/ds41ctl")


def _target(session: Session) -> Clocks:
    want = session.profile.clocks
    if not want.touched:
        raise UnsupportedError(
            f"profile {session.profile.name} leaves clocks alone",
            hints=("ds41ctl profile list   # one with sm_mhz, power_limit_w or offset_mhz in [clocks]",),
        )
    return want


def _tell(done: Iterable[str]) -> None:
    for text in done:
        cli.out.note(text)


def hold(runner: Runner, session: Session, *, strict: bool) -> None:
    """Take the lease as a step of a run. Without permission: an error under `strict`, else a warning and no lock."""
    from ds41ctl.adapters import clocks
    from ds41ctl.steps.clocks import ClockLease, offset_hints, sudoers_hint

    if not session.profile.clocks.touched:
        runner.skip("clocks", "this profile leaves clocks alone")
        return
    _tell(clocks.recover(session.dirs.state))
    step = ClockLease(session.layout)
    why = "" if step.check().reached else step.unavailable()
    if why and not strict:
        runner.skip("clocks", f"not locked, power limits as they are: {why}")
        cli.out.hint(sudoers_hint(session.layout))
        return
    runner.step(step)
    _tell(step.notes)
    for hint in offset_hints(
        clocks.read(clocks.journal(session.dirs.state, session.profile.name)), session.profile.clocks.offset_mhz
    ):
        cli.out.hint(hint)


@contextlib.contextmanager
def sampled(runner: Runner, session: Session) -> Iterator[Callable[[], bool]]:
    """Sample the leased clocks while the block gives the GPUs work; what is yielded judges them afterwards."""
    from ds41ctl.adapters import clocks

    lease = clocks.read(clocks.journal(session.dirs.state, session.profile.name))
    if lease is None or not lease.locked:
        yield lambda: True
        return
    from ds41ctl.steps.clocks import ClockProof

    sampler = clocks.Sampler(lease.uuids)
    with sampler:
        yield lambda: runner.judge(ClockProof(lease, sampler))
