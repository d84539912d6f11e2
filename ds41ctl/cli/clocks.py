"""clocks: hold the SM clocks, give them back, and see whether they are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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
    from ds41ctl.steps.runner import Runner

app = group("Hold the SM clocks for an engine, give them back, and see whether they are kept.")


@app.command()
def lock(
    profile: options.ProfileOpt = None,
    pid: Annotated[
        int | None,
        typer.Option("--pid", min=1, help="Give the clocks back when this process ends (default: the running engine)."),
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """Lock the profile's SM clock and CPU governor until the owner ends, `unlock`, or the next boot."""
    from ds41ctl.adapters import clocks, proc, running
    from ds41ctl.core.lease import Process
    from ds41ctl.steps.clocks import ClockLease, gpus

    session = open_running(profile)
    target = _target(session)
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
        lease, notes = clocks.acquire(
            session.dirs.state,
            profile=session.profile.name,
            uuids=gpus(session.layout),
            mhz=target,
            governor=session.profile.clocks.governor,
        )
        text = f"{target} MHz asked of {len(lease.uuids)} GPUs until `ds41ctl clocks unlock` or the next boot"
    cli.out.data(
        {"profile": session.profile.name, "mhz": target, "owner": owner.pid if owner else None, "notes": notes}
    )
    cli.out.line(text, mark="OK")
    for note in notes:
        cli.out.line(f"governor not set: {note}", mark="WARN")
    cli.out.hint(f"ds41ctl clocks status --profile {session.profile.name} --sample 10   # under load: is it kept?")


@app.command()
def unlock(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Reset exactly the clocks and governors that the lease names."""
    from ds41ctl.adapters import clocks

    session = open_running(profile)
    _tell(clocks.recover(session.dirs.state))
    path = clocks.journal(session.dirs.state, session.profile.name)
    lease = clocks.read(path)
    faults = clocks.release(session.dirs.state, session.profile.name)
    cli.out.data({"profile": session.profile.name, "gpus": len(lease.uuids) if lease else 0, "left": faults})
    if faults:
        raise FindingsError(
            f"{len(faults)} clocks or governors could not be reset: {faults[0]}",
            detail=faults if faults[1:] else (),
            hints=("ds41ctl clocks unlock", "sudo nvidia-smi -rgc   # resets the clocks of every GPU"),
        )
    cli.out.line(f"reset on {len(lease.uuids)} GPUs" if lease else "already: there is no lease", mark="OK")


@app.command()
def status(
    profile: options.ProfileOpt = None,
    sample: Annotated[
        float, typer.Option("--sample", metavar="SECONDS", min=0, help="Watch the clocks this long, under load.")
    ] = 0.0,
    json: options.JsonOpt = False,
) -> None:
    """Show the lease and the clocks; --sample proves that it is kept. Exit 1 when it is not, 3 without load."""
    from ds41ctl.adapters import clocks, nvml
    from ds41ctl.core.lease import judge_kept

    session = open_running(profile)
    _target(session)
    done = clocks.recover(session.dirs.state)
    _tell(done)
    lease = clocks.read(clocks.journal(session.dirs.state, session.profile.name))
    found = nvml.survey()
    if found.gpus is None:
        raise UnsupportedError(f"the GPUs cannot be asked: {found.note}", hints=("ds41ctl preflight --only gpu",))
    ours = [gpu for gpu in found.gpus if lease is not None and gpu.uuid in lease.uuids]
    finding = None
    if sample and lease is not None:
        with clocks.Sampler(lease.uuids) as sampler:
            time.sleep(sample)
        finding = judge_kept(lease.mhz, sampler.samples)
    cli.out.data(
        {
            "profile": session.profile.name,
            "lease": lease.model_dump(mode="json") if lease else None,
            "recovered": done,
            "gpus": [
                {"index": gpu.index, "uuid": gpu.uuid, "sm_mhz": gpu.sm_mhz, "sm_max_mhz": gpu.sm_max_mhz}
                for gpu in found.gpus
            ],
            "finding": finding.model_dump(mode="json") if finding else None,
        }
    )
    if lease is None:
        cli.out.line(f"no lease of {session.profile.name}", mark="SKIP")
    else:
        owner = f"pid {lease.owner.pid}" if lease.owner else "nobody in particular (until unlock or reboot)"
        guarded = f"guardian pid {lease.guardian.pid}" if lease.guardian else "no guardian"
        cli.out.line(f"{lease.mhz} MHz on {len(ours)} GPUs for {owner}, {guarded}, since {lease.created_at}", mark="OK")
    for gpu in found.gpus:
        cli.out.line(f"  GPU {gpu.index}  {gpu.sm_mhz} of {gpu.sm_max_mhz} MHz  {gpu.name}")
    if sample and lease is None:
        raise ConfigError("there is no lease whose clock could be proven", hints=("ds41ctl clocks lock",))
    if finding is not None:
        cli.out.finding(finding)
        if finding.status is not Status.OK:
            raise typer.Exit(int(Exit.FINDINGS if finding.status is Status.FAIL else Exit.INCONCLUSIVE))


@app.command()
def sudoers(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Print the sudoers lines that allow exactly the commands of the lease. Nothing is written."""
    import os
    import pwd

    from ds41ctl.adapters import clocks, kernel
    from ds41ctl.steps.clocks import gpus

    session = open_session(profile)
    target = _target(session)
    policies, _ = kernel.governors(Path("/"))
    wanted = list(policies or {}) if session.profile.clocks.governor else []
    lines = clocks.sudoers(pwd.getpwuid(os.getuid()).pw_name, gpus(session.layout), target, wanted)
    cli.out.data({"profile": session.profile.name, "lines": lines})
    cli.out.line(f"# ds41ctl: SM clocks and CPU governor of profile {session.profile.name}")
    for text in lines:
        for part in text.splitlines():
            cli.out.line(part)
    cli.out.hint("sudo visudo -f /etc/sudoers.d/ds41ctl")


def _target(session: Session) -> int:
    target = session.profile.clocks.sm_mhz
    if target is None:
        raise UnsupportedError(
            f"profile {session.profile.name} leaves clocks alone",
            hints=("ds41ctl profile list   # one with [clocks] sm_mhz",),
        )
    return target


def _tell(done: list[str]) -> None:
    for text in done:
        cli.out.note(text)


def hold(runner: Runner, session: Session, *, strict: bool) -> None:
    """Take the lease as a step of a run. Without permission: an error under `strict`, else a warning and no lock."""
    from ds41ctl.adapters import clocks
    from ds41ctl.steps.clocks import ClockLease, sudoers_hint

    if session.profile.clocks.sm_mhz is None:
        runner.skip("clocks", "this profile leaves clocks alone")
        return
    _tell(clocks.recover(session.dirs.state))
    step = ClockLease(session.layout)
    why = "" if step.check().reached else step.unavailable()
    if why and not strict:
        runner.skip("clocks", f"not locked: {why}")
        cli.out.hint(sudoers_hint(session.layout))
        return
    runner.step(step)
    for note in step.notes:
        cli.out.note(f"governor not set: {note}")


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
