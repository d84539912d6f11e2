"""smoke: prove by behaviour that the running engine works."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.junit import write_junit
from ds41ctl.cli.output import verdict
from ds41ctl.cli.session import open_running
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status

app = group("Prove by behaviour that the engine works: tools, images, copies, speed.")


@app.command()
def smoke(
    profile: options.ProfileOpt = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="ID", help="A test; repeatable.")] = None,
    level: Annotated[str, typer.Option("--level", help="quick or full.")] = "quick",
    deadline: Annotated[float | None, typer.Option("--deadline", min=1, help="Seconds for all tests together.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    list_tests: Annotated[bool, typer.Option("--list", help="List the tests and exit.")] = False,
    verbose: options.VerboseOpt = False,
    json: options.JsonOpt = False,
) -> None:
    """Ask the running engine. Exit 1 when a test fails, 3 when nothing failed but something could not be judged."""
    import smoke as tests

    cli.out.verbose = verbose
    if list_tests:
        rows = tests.table()
        cli.out.data([{"id": row[0], "level": row[1], "proves": row[2]} for row in rows])
        for row in rows:
            cli.out.line(f"{row[0]:<22} {row[2]}   ({row[1]})")
        return
    if level not in ("quick", "full"):
        raise typer.BadParameter("--level is quick or full")
    session = open_running(profile)
    step = runs.Smoke(session, level=level, only=tuple(only or ()), deadline_s=deadline)
    cli.out.line(f"smoke  {session.profile.name}  {session.layout.url}/v1")

    def show(finding: Finding) -> None:
        cli.out.finding(finding, 22)

    goal = step.judge(show, lambda text, data: None)
    cli.out.data(
        {
            "profile": session.profile.name,
            "findings": [item.model_dump(mode="json") for item in step.findings],
        }
    )
    if junit is not None:
        write_junit(junit, "ds41ctl smoke", step.findings)
    unknown = [item for item in step.findings if item.status is Status.UNKNOWN]
    failed = [item for item in step.findings if item.failed()]
    cli.out.line(verdict(step.findings, strict=False), mark="OK" if goal.reached else "FAIL" if failed else "UNKNOWN")
    if failed:
        raise typer.Exit(int(Exit.FINDINGS))
    if unknown:
        raise typer.Exit(int(Exit.INCONCLUSIVE))
