"""facts: this machine as a file that tests and bug reports replay."""

from __future__ import annotations

from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.session import open_session

app = group("Record this machine as a file that tests and bug reports replay.")


@app.command()
def facts(
    profile: options.ProfileOpt = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out host name, user names and command lines.")
    ] = False,
    json: options.JsonOpt = False,
) -> None:
    """Look once and print; `preflight --facts FILE` replays it anywhere."""
    from ds41ctl.adapters.probe import probe
    from ds41ctl.core.redact import redacted

    found = probe(open_session(profile).layout)
    if redact:
        found = redacted(found)
    cli.out.data(found.model_dump(mode="json"))
    cli.out.line(found.model_dump_json(indent=1))
