"""preflight: check this machine, or a recorded one, for a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import cli
from ds41ctl.cli import options
from ds41ctl.cli.app import group
from ds41ctl.cli.output import verdict
from ds41ctl.cli.session import open_session
from ds41ctl.core.errors import ConfigError, NotFoundError
from ds41ctl.core.exits import Exit
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.finding import Finding

app = group("Check this machine for a profile; every finding has a fix.")


@app.command()
def preflight(
    profile: options.ProfileOpt = None,
    strict: options.StrictOpt = False,
    level: Annotated[
        int, typer.Option("--level", min=1, max=3, help="1 facts, 2 and 3 deeper; each contains those below.")
    ] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="A check or a domain; repeatable.")
    ] = None,
    skip_check: options.SkipOpt = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
    for_serve: Annotated[
        bool, typer.Option("--for-serve", help="Also demand what a start needs: pack, engine, store.")
    ] = False,
    facts: Annotated[
        Path | None,
        typer.Option("--facts", metavar="FILE", help="Check a recorded machine (ds41ctl facts --json)."),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    verbose: options.VerboseOpt = False,
    json: options.JsonOpt = False,
) -> None:
    """Run all checks. Exit 1 when one fails; with --strict also when one warns or could not be measured."""
    import preflight as checks

    cli.out.verbose = verbose
    if list_checks:
        rows = checks.table()
        cli.out.data([{"id": row[0], "level": row[1], "title": row[2], "prevents": row[3]} for row in rows])
        for row in rows:
            cli.out.line(f"{row[0]:<24} {row[1]}  {row[2]}")
        return
    session = open_session(profile)
    if facts is None:
        from ds41ctl.adapters.probe import probe

        # the deeper looks take minutes: only those that somebody asked for
        wanted = max((check.level for check in checks.select(only or (), skip_check or (), level=level)), default=1)
        known = probe(session.layout, level=wanted)
    else:
        known = _recorded(facts)
    findings = checks.run(
        session.profile,
        known,
        stage="serve" if for_serve else "up",
        level=level,
        only=tuple(only or ()),
        skip=tuple(skip_check or ()),
    )
    unchecked = checks.not_checked(session.profile, known, level)
    failed = [item for item in findings if item.failed(strict=strict)]
    cli.out.data(
        {
            "profile": session.profile.name,
            "strict": strict,
            "level": level,
            "findings": [item.model_dump(mode="json") for item in findings],
            "not_checked": list(unchecked),
        }
    )
    if junit is not None:
        from ds41ctl.cli.junit import write_junit

        write_junit(junit, "ds41ctl preflight", findings, strict=strict)
    cli.out.line(f"preflight  {session.profile.name}  level {level}" + (", strict" if strict else ""))
    show(findings, checks.groups(), unchecked)
    cli.out.line(verdict(findings, strict=strict), mark="FAIL" if failed else "OK")
    if failed:
        raise typer.Exit(int(Exit.FINDINGS))
    cli.out.hint(f"ds41ctl up --profile {session.profile.name}")


def show(findings: Sequence[Finding], groups: Mapping[str, str], unchecked: Sequence[str]) -> None:
    """The findings under their headings, in the order in which the headings first appear, then what was not checked."""
    width = max((len(item.id) for item in findings), default=0)
    for name in dict.fromkeys(groups[item.id] for item in findings):
        cli.out.line(f"  {name}")
        for item in findings:
            if groups[item.id] == name:
                cli.out.finding(item, width)
    if unchecked:
        cli.out.line("Not checked:")
        for text in unchecked:
            cli.out.line(f"        {text}")


def _recorded(path: Path) -> HostFacts:
    from pydantic import ValidationError

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}") from None
    try:
        import json

        tree = json.loads(text)
        # the file may be the facts themselves or the whole document of `ds41ctl facts --json`
        return HostFacts.model_validate(tree["data"] if "data" in tree and "ok" in tree else tree)
    except (ValueError, ValidationError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not a facts file: {first}", hints=("ds41ctl facts --json > FILE",)) from None
