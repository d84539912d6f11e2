"""up: everything, from a bare machine to a proven engine."""

from __future__ import annotations

import json as codec
import os
import shlex

import typer

from ds41ctl import cli
from ds41ctl.cli import clocks, options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.engine import supply_of
from ds41ctl.cli.planning import show_plan, up_plan
from ds41ctl.cli.session import Session, open_session
from ds41ctl.core.exits import Exit

app = group("Everything, from a bare machine to a proven engine; steps already reached say so.")

QUESTION = "What is 17 * 23? Answer with just the number."


@app.command()
def up(
    profile: options.ProfileOpt = None,
    port: options.PortOpt = None,
    dspark: options.DsparkOpt = None,
    strict: options.StrictOpt = False,
    skip_check: options.SkipOpt = None,
    wheels: options.WheelsOpt = None,
    checkout: options.CheckoutOpt = None,
    accept_sums: options.AcceptSumsOpt = None,
    dry_run: options.PlanOpt = False,
    json: options.JsonOpt = False,
) -> None:
    """Preflight, engine, fetch, engram, serve, smoke; each step that is already reached says so."""
    from ds41ctl.adapters.hub import Hub
    from ds41ctl.adapters.supply import demand_fit
    from ds41ctl.steps.engine import EngineInstall
    from ds41ctl.steps.engram import EngramBuild
    from ds41ctl.steps.fetch import Fetch
    from ds41ctl.steps.graft import GraftPack
    from ds41ctl.steps.serve import Serve

    session = open_session(profile, port=port, dspark=dspark)
    given = supply_of(wheels, checkout, accept_sums)
    demand_fit(session.layout, given)
    if dry_run:
        plan = up_plan(session, given)
        show_plan(session, plan, stage="up", strict=strict, skip=tuple(skip_check or ()), given=given)
        return
    layout = session.layout
    cli.out.line(heading("up", session))
    with runs.run(session, "up") as runner:
        runs.demand(
            runner, runs.Preflight(session, stage="up", strict=strict, skip=tuple(skip_check or ()), given=given)
        )
        # before the pack: what may be refused (a digest, a wheel, a build) comes before what takes hours
        runner.step(EngineInstall(layout, os.environ, given))
        runner.step(Fetch(layout, hub=lambda: Hub.of_environment(xet=session.resolved.settings.xet)))
        if session.profile.model.graft is not None:
            runner.step(GraftPack(layout))
        if not session.profile.engram.own_store:
            runner.skip("engram", "this profile keeps no store")
        else:
            runner.step(EngramBuild(layout))
        runner.step(Serve(layout, session.profile_path, os.environ))
        clocks.hold(runner, session, strict=strict)
        with clocks.sampled(runner, session) as clocks_kept:
            passed = runner.judge(runs.Smoke(session))
        passed = clocks_kept() and passed
        if not passed:
            cli.out.hint("ds41ctl smoke -v")
            raise typer.Exit(int(Exit.FINDINGS))
    serving(session)


def heading(command: str, session: Session) -> str:
    """First line of a screen: what is done for which profile."""
    return f"{command}  {session.profile.name}  ({session.profile.title})"


def serving(session: Session) -> None:
    """Last lines: where the engine answers and how to talk to it."""
    layout, model = session.layout, session.profile.model.served_name
    cli.out.data({"url": layout.url + "/v1", "model": model, "profile": session.profile.name})
    cli.out.line(f"Serving {model} on {layout.url}/v1   (log: ds41ctl logs -f)")
    body = codec.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 400,
            "temperature": 0,
        }
    )
    cli.out.hint(f"curl -s {layout.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    cli.out.hint("ds41ctl stop")
