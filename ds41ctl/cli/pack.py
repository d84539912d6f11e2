"""pack: build a hybrid pack, look into a pack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.session import open_session
from ds41ctl.cli.up import heading
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Status

app = group("Build the hybrid pack of links, or show what a pack holds.")


@app.command()
def graft(profile: options.ProfileOpt = None, json: options.JsonOpt = False) -> None:
    """Build the profile's hybrid: links and a new index, some layers' experts from another pack."""
    from ds41ctl.steps.graft import GraftPack

    session = open_session(profile)
    cli.out.line(heading("pack graft", session))
    step = GraftPack(session.layout)
    with runs.run(session, "pack graft") as runner:
        runner.step(step)
        cli.out.data(step.check().data)


@app.command()
def inspect(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a pack; default: the profile's.")] = None,
    profile: options.ProfileOpt = None,
    verbose: options.VerboseOpt = False,
    json: options.JsonOpt = False,
) -> None:
    """Layout, bits of every layer, codebook, sizes, and what breaks the V4.1 contract."""
    from ds41ctl.steps.inspect import describe

    session = open_session(profile)
    cli.out.verbose = verbose
    where = folder or session.layout.model_dir
    found = describe(where, drafter=folder is None and session.layout.dspark)
    cli.out.line(f"pack inspect  {where}")
    for label, text in found.lines():
        cli.out.line(f"  {label:<10} {text}")
    data: dict[str, Any] = found.as_json()
    cli.out.data(data)
    cli.out.findings(found.findings)
    if any(item.failed() for item in found.findings):
        raise typer.Exit(int(Exit.INTEGRITY))
    if any(item.status is Status.UNKNOWN for item in found.findings):
        raise typer.Exit(int(Exit.INCONCLUSIVE))
