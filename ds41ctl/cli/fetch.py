"""fetch: get the pinned pack."""

from __future__ import annotations

from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.session import open_session
from ds41ctl.cli.up import heading
from ds41ctl.core.errors import IntegrityError

app = group("Get the pinned pack, verified by sha256 before it is published.")


@app.command()
def fetch(
    profile: options.ProfileOpt = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every byte against the pins; change nothing.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Quarantine files that are wrong and make them again.")
    ] = False,
    json: options.JsonOpt = False,
) -> None:
    """Materialise and verify the pack; files that are already right are left alone."""
    from ds41ctl.adapters import files
    from ds41ctl.steps.fetch import Fetch

    session = open_session(profile)
    step = Fetch(session.layout, verify=verify or repair, repair=repair)
    cli.out.line(heading("fetch", session))
    with runs.run(session, "fetch") as runner:
        if verify and not repair:
            goal = step.check()
            if not goal.reached:
                raise IntegrityError(goal.text, hints=("ds41ctl fetch --repair",))
            cli.out.line(f"  fetch      {'OK':<7} {goal.text}")
            cli.out.data(goal.data)
            return
        lock = session.dirs.state / "locks" / f"fetch-{session.profile.name}.lock"
        with files.locked(lock, f"fetching {session.profile.name}"):
            runner.step(step)
        cli.out.data({"dir": str(session.layout.model_dir)})
