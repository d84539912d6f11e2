"""smoke: prove by behaviour that the running engine works."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ds41ctl import __version__, cli
from ds41ctl.cli import live, options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.junit import write_junit
from ds41ctl.cli.output import verdict
from ds41ctl.cli.session import Session, open_running
from ds41ctl.core.errors import NotFoundError
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status

app = group("Prove by behaviour that the engine works: tools, images, copies, speed.")


@app.command()
def smoke(
    profile: options.ProfileOpt = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="ID", help="A test; repeatable.")] = None,
    level: Annotated[str, typer.Option("--level", help="quick, full or thorough.")] = "quick",
    deadline: Annotated[float | None, typer.Option("--deadline", min=1, help="Seconds for all tests together.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Save what this engine thinks of fixed texts.")
    ] = None,
    fidelity: Annotated[
        Path | None, typer.Option("--fidelity", metavar="FILE", help="Compare this engine with a saved record.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option("--texts", metavar="DIR", help="--record: text sets, one NAME.txt each.")
    ] = None,
    windows: Annotated[
        int, typer.Option("--windows", min=1, max=4096, help="--record: windows of each text set.")
    ] = 16,
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
    if level not in tests.LEVELS:
        raise typer.BadParameter("--level is " + ", ".join(tests.LEVELS))
    if record is not None or fidelity is not None:
        _fidelity(open_running(profile), record, fidelity, texts, windows, junit)
        return
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
    _conclude(step.findings, goal.reached)


def _conclude(findings: list[Finding], reached: bool) -> None:
    unknown = [item for item in findings if item.status is Status.UNKNOWN]
    failed = [item for item in findings if item.failed()]
    cli.out.line(verdict(findings, strict=False), mark="OK" if reached else "FAIL" if failed else "UNKNOWN")
    if failed:
        raise typer.Exit(int(Exit.FINDINGS))
    if unknown:
        raise typer.Exit(int(Exit.INCONCLUSIVE))


def _fidelity(
    session: Session, record: Path | None, reference: Path | None, texts: Path | None, windows: int, junit: Path | None
) -> None:
    """Record a reference, or compare the running engine with one."""
    from ds41ctl.adapters import files
    from smoke import fidelity

    if record is not None and reference is not None:
        raise typer.BadParameter("--record and --fidelity exclude each other")
    if texts is not None and not texts.is_dir():
        raise NotFoundError(f"no folder {texts}")
    client, argv = live.client(session), live.started(session)

    def progress(text: str) -> None:
        cli.out.progress(f"  {text}")

    cli.out.line(f"fidelity  {session.profile.name}  {session.layout.url}")
    if record is not None:
        known = live.look(session, None)
        provenance = {
            "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
            "ds41ctl": __version__,
            "profile": session.profile.name,
            "profile_digest": known.profile_digest,
            "engine_digest": known.engine_digest,
            "facts_digest": known.facts_digest,
            "texts": str(texts) if texts else "built in",
        }
        sets = fidelity.texts_of(texts) if texts else fidelity.builtin_texts()
        found = fidelity.record(client, session.profile, sets, provenance, progress, windows=windows, argv=argv)
        sha256 = files.publish(record.absolute(), [fidelity.dump(found)])
        cli.out.data({"file": str(record), "sha256": sha256, "windows": len(found.windows), "provenance": provenance})
        cli.out.line(f"{len(found.windows)} windows in {record}, sha256 {sha256[:12]}", mark="OK")
        return
    assert reference is not None  # noqa: S101 - one of the two was given
    try:
        raw = reference.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{reference}: {error.strerror}", hints=("ds41ctl smoke --record FILE",)) from None
    old = fidelity.parse(raw, str(reference))
    new = fidelity.again(client, session.profile, old, progress, argv=argv)
    findings = fidelity.judge(old, new, session.profile)
    cli.out.findings(findings)
    cli.out.data(
        {
            "profile": session.profile.name,
            "reference": old.provenance,
            "findings": [item.model_dump(mode="json") for item in findings],
        }
    )
    if junit is not None:
        write_junit(junit, "ds41ctl smoke --fidelity", findings)
    _conclude(findings, all(item.status in (Status.OK, Status.WARN) for item in findings))
