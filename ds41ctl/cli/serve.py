"""serve: start the engine and wait until tokens flow."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import clocks, options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.planning import plan_of_serve, show_plan
from ds41ctl.cli.session import Session, open_session
from ds41ctl.cli.up import heading, serving
from ds41ctl.core.errors import AlreadyRunningError

if TYPE_CHECKING:
    from ds41ctl.steps.serve import Serve

app = group("Start the engine and wait until tokens flow.")


@app.command()
def serve(
    profile: options.ProfileOpt = None,
    port: options.PortOpt = None,
    dspark: options.DsparkOpt = None,
    strict: options.StrictOpt = False,
    skip_check: options.SkipOpt = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay attached: the log comes here, Ctrl-C stops the engine.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Stop this profile's running engine first.")] = False,
    dry_run: options.PlanOpt = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd unit that serves this profile; install nothing.")
    ] = False,
    json: options.JsonOpt = False,
) -> None:
    """Start the engine in a private tmux server and wait until it is proven ready."""
    session = open_session(profile, port=port, dspark=dspark)
    if dry_run:
        show_plan(session, plan_of_serve(session), stage="serve", strict=strict, skip=tuple(skip_check or ()))
        return
    if print_unit:
        _print_unit(session)
        return
    with contextlib.ExitStack() as stay:
        with _alone(session, replace):
            from ds41ctl.steps.foreground import follow, held
            from ds41ctl.steps.serve import Serve

            step = Serve(session.layout, session.profile_path, os.environ, foreground=foreground, alone=True)
            if foreground:
                stay.enter_context(held(session.layout, step))
            _start(session, step, replace, strict, tuple(skip_check or ()))
        serving(session)
        if foreground:
            follow(session.layout, step, cli.out.note)


@contextlib.contextmanager
def _alone(session: Session, replace: bool) -> Iterator[None]:
    """One start at a time; another one, or a ready engine, is said before anything is looked at or even imported."""
    from ds41ctl.adapters import files, running

    layout = session.layout
    with files.locked(layout.serve_lock, f"starting {layout.name}"):
        record = running.read(layout.record_path)
        if not replace and record is not None and record.ready_at and record.alive():
            raise AlreadyRunningError(
                f"{layout.name} is already running: pid {record.pid} on {record.url}",
                hints=("ds41ctl status", "ds41ctl stop", "ds41ctl serve --replace"),
            )
        yield


def _start(session: Session, step: Serve, replace: bool, strict: bool, skip: tuple[str, ...]) -> None:
    from ds41ctl.adapters import running
    from ds41ctl.steps import stop
    from ds41ctl.steps.serve import refuse_second

    record = running.read(session.layout.record_path)
    if replace and record is not None:
        step.refuse_unfit()  # an engine that works is not ended for one that cannot start
        cli.out.progress(f"stopping {record.profile} (pid {record.pid})", force=True)
        stop.end(session.layout, record)
    under_way = refuse_second(session.layout) is not None
    cli.out.line(heading("serve", session))
    with runs.run(session, "serve") as runner:
        if not under_way:  # its checks were made, and it holds the port by now
            runs.demand(runner, runs.Preflight(session, stage="serve", strict=strict, skip=skip))
        runner.step(step)
        clocks.hold(runner, session, strict=strict)


def _print_unit(session: Session) -> None:
    from ds41ctl.core.unit import render

    text = render(session.layout, str(session.profile_path), sys.executable, os.environ)
    cli.out.data({"unit": text})
    cli.out.line(text.rstrip())
    name = f"ds41ctl-{session.profile.name}.service"
    where, flag = ("/etc/systemd/system", "") if session.dirs.uid == 0 else ("~/.config/systemd/user", " --user")
    cli.out.hint(f"ds41ctl serve --profile {session.profile.name} --print-unit > {where}/{name}")
    cli.out.hint(f"systemctl{flag} daemon-reload && systemctl{flag} enable --now {name}")
    if session.dirs.uid:
        cli.out.hint("loginctl enable-linger   # or it ends with your last login")
