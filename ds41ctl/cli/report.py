"""report: what a run amounted to."""

from __future__ import annotations

from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import load_settings
from ds41ctl.core.errors import NotFoundError

app = group("Show what a run amounted to.")


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Run id; the newest one without it.")] = "latest",
    json: options.JsonOpt = False,
) -> None:
    """Fold a run's journal into its report. The exit code is 0 whatever the run's verdict was."""
    from ds41ctl.adapters import paths
    from ds41ctl.adapters.journal import read_events
    from ds41ctl.core.report import fold

    folder = paths.dirs(load_settings().settings).state / "runs"
    path = folder / run / "events.jsonl"
    if "/" in run or not path.is_file():
        raise NotFoundError(f"no run {run!r} in {folder}", hints=(f"ls {folder}",))
    events, broken = read_events(path)
    try:
        found = fold(events)
    except ValueError as error:
        raise NotFoundError(f"{path}: {error}") from None
    cli.out.data({**found.model_dump(mode="json"), "unreadable_lines": broken, "events": str(path)})
    cli.out.line(f"{found.command}  {found.profile}  {found.started}   {found.verdict} (exit {found.exit_code})")
    for step in found.steps:
        cli.out.line(f"  {step.step:<10} {(step.state or 'unfinished'):<8} {step.text}   {step.seconds or 0.0:.1f} s")
    cli.out.findings([item for item in found.findings if item.failed(strict=True)])
    if broken:
        cli.out.note(f"{broken} lines of the journal could not be read")
    cli.out.line(f"events: {path}")
