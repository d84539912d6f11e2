"""logs: the engine's log."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.output import clean
from ds41ctl.cli.session import open_running
from ds41ctl.core.errors import NotFoundError

app = group("Show the engine's log.")


@app.command()
def logs(
    profile: options.ProfileOpt = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C; the engine is not touched.")
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the file's path only.")] = False,
    json: options.JsonOpt = False,
) -> None:
    """Show the newest log of the profile's engine."""
    session = open_running(profile)
    folder = session.dirs.state / "logs" / session.profile.name
    found = sorted(folder.glob("engine-*.log"))
    if not found:
        raise NotFoundError(f"no log of {session.profile.name} yet", hints=("ds41ctl serve",))
    newest = found[-1]
    if path:
        cli.out.data({"path": str(newest)})
        cli.out.line(str(newest))
        return
    with newest.open(encoding="utf-8", errors="replace") as source:
        last = source.read().splitlines()[-lines:] if lines else []
        cli.out.data({"path": str(newest), "lines": last})
        for text in last:
            cli.out.line(text)
        while follow and not cli.out.json_mode:
            _copy(source.read())
            time.sleep(0.3)


def _copy(text: str) -> None:
    if text:
        sys.stdout.write("\n".join(clean(line) for line in text.split("\n")))
        sys.stdout.flush()
