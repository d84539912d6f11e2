"""serve: start the engine and wait until tokens flow."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import clocks, options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.planning import plan_of_serve, print_plan
from ds41ctl.cli.session import open_session
from ds41ctl.cli.up import heading, serving

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
    dry_run: options.DryRunOpt = False,
    json: options.JsonOpt = False,
) -> None:
    """Start the engine in a private tmux server and wait until it is proven ready."""
    from ds41ctl.adapters import running
    from ds41ctl.steps import stop
    from ds41ctl.steps.foreground import follow, held
    from ds41ctl.steps.serve import Serve, refuse_second

    session = open_session(profile, port=port, dspark=dspark)
    if dry_run:
        print_plan(plan_of_serve(session))
        return
    record = running.read(session.layout.record_path)
    step = Serve(session.layout, session.profile_path, os.environ, foreground=foreground)
    if replace and record is not None:
        step.refuse_unfit()  # an engine that works is not ended for one that cannot start
        cli.out.progress(f"stopping {record.profile} (pid {record.pid})", force=True)
        stop.end(session.layout, record)
    under_way = refuse_second(session.layout) is not None
    cli.out.line(heading("serve", session))
    with held(session.layout) if foreground else contextlib.nullcontext():
        with runs.run(session, "serve") as runner:
            if not under_way:  # its checks were made, and it holds the port by now
                checks = runs.Preflight(session, stage="serve", strict=strict, skip=tuple(skip_check or ()))
                runs.demand(runner, checks)
            runner.step(step)
            clocks.hold(runner, session, strict=strict)
        serving(session)
        if foreground:
            follow(session.layout, step, cli.out.note)
