"""soak: work the engine for hours, judge it, compare runs, print what runs it every night."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds41ctl import cli
from ds41ctl.cli import live, options, runs
from ds41ctl.cli.app import group
from ds41ctl.cli.junit import write_junit
from ds41ctl.cli.session import Session, load_settings, open_running
from ds41ctl.core.errors import Ds41Error, NotFoundError
from ds41ctl.core.finding import Status
from ds41ctl.core.profile import Profile

if TYPE_CHECKING:
    from smoke.soak_report import Report
    from smoke.trace import Event

QUICK_MINUTES, LONG_MINUTES = 8.0, 480.0
EVENTS, REPORT, CRITERIA = "events.jsonl", "report.json", "profile.json"
PROM = "ds41_soak.prom"
# cron's own PATH is /usr/bin:/bin; sudo, mount and nvidia-smi may lie beside it
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

app = group("Work the engine for hours as agents do, and judge what came of it.")


@app.command("run")
def run(
    profile: options.ProfileOpt = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.1, max=10_080, help="Length (default: the profile's).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_MINUTES:g} minutes.")] = False,
    long: Annotated[bool, typer.Option("--long", help=f"{LONG_MINUTES / 60:g} hours.")] = False,
    mode: Annotated[str, typer.Option("--mode", help="mixed, fresh or waves (of 8 long prompts).")] = "mixed",
    waves: Annotated[
        int | None, typer.Option("--waves", min=1, max=1000, help="With --mode waves: so many and no more.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=16, help="With --mode waves: length of each prompt.")
    ] = None,
    cron: Annotated[bool, typer.Option("--cron", help="Silent on success, one line on stderr otherwise.")] = False,
    target: Annotated[
        str | None, typer.Option("--target", metavar="URL", help="An engine that was not started here.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirms a --target that is not this machine.")] = False,
    prom: Annotated[
        Path | None, typer.Option("--prom", metavar="FILE", help="Also publish the .prom text there.")
    ] = None,
    json: options.JsonOpt = False,
) -> None:
    """Soak the running engine. Exit 0 pass, 1 fail, 3 inconclusive, 11 when another soak or bench runs."""
    from smoke.soak import MODES

    if mode not in MODES:
        raise typer.BadParameter("--mode is " + ", ".join(MODES))
    if sum((minutes is not None, quick, long)) > 1:
        raise typer.BadParameter("--minutes, --quick and --long exclude each other")
    if mode != "waves" and (waves is not None or prompt_tokens is not None):
        raise typer.BadParameter("--waves and --prompt-tokens need --mode waves")
    if waves is not None and (minutes is not None or quick or long):
        raise typer.BadParameter("--waves says how long: it excludes --minutes, --quick and --long")
    length = QUICK_MINUTES if quick else LONG_MINUTES if long else minutes
    if cron:
        _cron_environment()
    session = open_running(profile)
    with live.only_load(session, f"a soak of {session.profile.name}"):
        _soak(session, length, mode, waves, prompt_tokens or 0, cron, target, yes, prom)


def _soak(
    session: Session,
    minutes: float | None,
    mode: str,
    waves: int | None,
    prompt_tokens: int,
    cron: bool,
    target: str | None,
    yes: bool,
    prom: Path | None,
) -> None:
    from ds41ctl.adapters import files
    from ds41ctl.adapters.journal import new_folder
    from ds41ctl.adapters.tracefile import TraceFile
    from smoke import soak
    from smoke.trace import Start, collect, line

    seed = secrets.randbits(31)
    if waves is not None:
        plan = soak.Plan.of_waves(session.profile, waves=waves, prompt_tokens=prompt_tokens, seed=seed)
    else:
        plan = soak.Plan.of(session.profile, minutes=minutes, mode=_mode(mode), seed=seed, prompt_tokens=prompt_tokens)
    known = live.to_load(session, target, confirmed=yes)
    engine = soak.Target(
        url=known.url,
        profile=session.profile,
        canaries=runs.load_canaries(session),
        record=known.record,
        store_dir=known.store_dir,
        confirmed=yes,
        key=known.key,
        drafter=known.drafter,
    )
    folder = new_folder(session.dirs.state / "soak", session.profile.soak.keep)
    # the profile as it is now stays with the run, so that a report made later judges by the same criteria
    files.publish_json(folder / CRITERIA, session.profile.model_dump(mode="json", by_alias=True))
    file = TraceFile(folder / EVENTS)
    events: list[Event] = []

    def record(event: Event) -> None:
        events.append(event)
        file.append(line(event), durable=event.type in ("start", "canary", "drain", "end"))

    def progress(text: str) -> None:
        if not cron:
            cli.out.progress(f"  {text}")

    if not cron:
        length = f"{plan.waves} waves, " if plan.waves else f"{plan.seconds / 60:g} min, "
        of = f" of {plan.prompt_tokens} tokens" if plan.prompt_tokens else ""
        cli.out.line(f"soak  {session.profile.name}  {known.url}  {length}{mode}, {plan.streams} streams{of}")
        for text in known.drift:
            cli.out.note(f"note: {text}")
    cli.out.restart_progress()
    try:
        record(
            Start(
                ts=datetime.now(UTC).isoformat(timespec="seconds"),
                run=folder.name,
                profile=session.profile.name,
                profile_digest=known.profile_digest,
                engine_digest=known.engine_digest,
                facts_digest=known.facts_digest,
                mode=mode,
                planned_s=plan.seconds,
                waves=plan.waves,
                prompt_tokens=plan.prompt_tokens,
                drafter=known.drafter,
                sample_s=plan.sample_s,
                gpus=session.profile.hardware.gpus,
                store_expected=known.store_dir is not None,
                identity_known=known.record is not None,
                notes=known.drift,
            )
        )
        soak.run(engine, plan, record, progress)
    except BaseException as error:
        # whatever ended it (a signal, a full disk): what was recorded is judged and shown before the error goes on
        if any(event.type == "start" for event in events):
            _conclude(session, folder, collect(events), cron, prom, raised=error)
        raise
    finally:
        file.close()
    report = _conclude(session, folder, collect(events), cron, prom)
    code = _exit_code(report)
    if code:
        raise typer.Exit(code)


def _exit_code(report: Report) -> int:
    from smoke.soak_judge import EXIT

    return int(EXIT[report.verdict.word])


def _conclude(
    session: Session, folder: Path, trace: Any, cron: bool, prom: Path | None, raised: BaseException | None = None
) -> Report:
    """Judge, write the report's files, show the result."""
    from smoke import soak_report
    from smoke.soak_judge import judge

    report = soak_report.make(folder.name, trace, judge(trace, session.profile))
    trouble: Ds41Error | None = None
    try:
        _write(folder, report, prom)
    except Ds41Error as error:
        trouble = error
    cli.out.data({**report.as_json(), "folder": str(folder)})
    text = soak_report.headline(report)
    if cron:
        if report.verdict.word != "pass" and raised is None:
            cli.out.note(f"ds41ctl soak: {text}; ds41ctl soak report {folder.name}")
    else:
        shown = [item for item in report.verdict.findings if item.status not in (Status.OK, Status.SKIP)]
        cli.out.findings(shown)
        mark = {"pass": "OK", "fail": "FAIL", "inconclusive": "UNKNOWN"}[report.verdict.word]
        cli.out.line(text, mark=mark)
        for item in report.verdict.not_proved:
            cli.out.line(f"        not proved: {item}")
        cli.out.hint(f"ds41ctl soak report {folder.name}   # {folder / 'report.html'}")
    if trouble is not None and raised is None:
        raise trouble
    if trouble is not None:
        cli.out.note(f"the report was not written: {trouble.message}")
    return report


def _write(folder: Path, report: Report, prom: Path | None) -> None:
    from ds41ctl.adapters import files
    from smoke import soak_report

    files.publish_json(folder / REPORT, report.as_json())
    files.publish(folder / "report.md", [soak_report.markdown(report).encode()])
    files.publish(folder / "report.html", [soak_report.page(report).encode()])
    files.publish(folder / "plots.png", [soak_report.picture(report.trace)])
    write_junit(folder / "junit.xml", "ds41ctl soak", report.verdict.findings)
    for path in {folder.parent / PROM, *([prom.absolute()] if prom else [])}:
        text = soak_report.prometheus(report, now=time.time(), last_success=_last_success(path))
        files.publish(path, [text])


def _last_success(path: Path) -> float | None:
    """Time of the last pass, as the textfile of the run before says."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(path.read_text()):
            for sample in family.samples:
                if sample.name == "ds41_soak_last_success_timestamp_seconds":
                    return float(sample.value)
    except (OSError, ValueError):
        return None
    return None


def _mode(mode: str) -> Any:
    return mode


def _cron_environment() -> None:
    """What cron leaves out: a PATH with the system's tools, and the folder of this interpreter."""
    found = os.environ.get("PATH", "").split(":")
    wanted = [str(Path(sys.executable).parent), *SYSTEM_PATH.split(":")]
    os.environ["PATH"] = ":".join(dict.fromkeys([*(part for part in found if part), *wanted]))


@app.command("report")
def report(
    names: Annotated[list[str] | None, typer.Argument(help="Runs; the newest one without it.")] = None,
    last: Annotated[int | None, typer.Option("--last", min=2, help="Compare the newest N runs.")] = None,
    json: options.JsonOpt = False,
) -> None:
    """Show a run, or compare several. The report is made anew from the run's record; the exit code is 0."""
    from ds41ctl.adapters import paths
    from smoke import soak_report

    folder = paths.dirs(load_settings().settings).state / "soak"
    chosen = list(names or [])
    if last is not None:
        chosen = sorted({path.parent.name for path in folder.glob("*/" + EVENTS) if not path.parent.is_symlink()})
        chosen = chosen[-last:]
    if len(chosen) < 2:
        only = _read(folder, chosen[0] if chosen else "latest")
        cli.out.data(only.as_json())
        for text in soak_report.markdown(only).splitlines():
            cli.out.line(text)
        age = _age(only)
        if age:
            cli.out.note(age)
        return
    rows = soak_report.compare([_document(folder, name) for name in chosen])
    cli.out.data([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cli.out.line("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _document(folder: Path, name: str) -> dict[str, Any]:
    """A run's report as it was written then; judged anew when the run left none (it was killed)."""
    from ds41ctl.adapters import files

    try:
        saved = files.read_json(folder / name / REPORT) if "/" not in name else None
    except ValueError:
        saved = None
    return saved if isinstance(saved, dict) and {"run", "verdict"} <= saved.keys() else _read(folder, name).as_json()


def _age(report: Report) -> str:
    start = report.trace.start
    if start is None or not start.ts:
        return ""
    hours = (datetime.now(UTC) - datetime.fromisoformat(start.ts)).total_seconds() / 3600
    return f"this run began {hours:.0f} hours ago" if hours >= 36 else ""


def _read(folder: Path, name: str) -> Report:
    from smoke import soak_report
    from smoke.soak_judge import judge
    from smoke.trace import parse

    path = folder / name / EVENTS
    if "/" in name or name.startswith(".") or not path.is_file():
        raise NotFoundError(f"no soak run {name!r} in {folder}", hints=(f"ls {folder}", "ds41ctl soak run"))
    trace = parse(path.read_text(encoding="utf-8", errors="replace"))
    if trace.start is None:
        raise NotFoundError(f"{path}: the start of the run cannot be read", hints=(f"ls -l {path}",))
    profile = _criteria(path.with_name(CRITERIA))
    return soak_report.make(path.parent.resolve().name, trace, judge(trace, profile))


def _criteria(path: Path) -> Profile:
    """The profile a run was made with. Raises NotFoundError when it is not beside the run."""
    from ds41ctl.adapters import files

    try:
        return Profile.model_validate(files.read_json(path))
    except ValueError:
        raise NotFoundError(
            f"{path}: not a profile this version reads, so the run cannot be judged again",
            hints=(f"less {path.with_name('report.md')}   # as it was judged then", "ds41ctl soak run"),
        ) from None


@app.command("schedule")
def schedule(
    profile: options.ProfileOpt = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="Length of each run.")] = 30,
    at: Annotated[str, typer.Option("--at", metavar="HH:MM", help="Time of day.")] = "03:17",
    json: options.JsonOpt = False,
) -> None:
    """Print a cron line and a systemd service with its timer; nothing is installed."""
    hour, _, minute = at.partition(":")
    if not (hour.isdecimal() and minute.isdecimal() and int(hour) < 24 and int(minute) < 60):
        raise typer.BadParameter("--at is HH:MM")
    settings = load_settings({"profile": profile})
    argv = [sys.executable, "-m", "ds41ctl", "soak", "run", "--cron", "--minutes", f"{minutes:g}"]
    if settings.settings.profile:
        argv += ["--profile", settings.settings.profile]
    kept = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("DS41_") and name != "DS41_PROFILE"
    }
    command = shlex.join([*(["env", *(f"{k}={v}" for k, v in kept.items())] if kept else []), *argv])
    path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    # in a crontab an unescaped percent sign ends the command
    cron = f"{int(minute)} {int(hour)} * * * PATH={path} {command}".replace("%", "\\%")
    environment = "".join(f'Environment="{k}={_systemd(v)}"\n' for k, v in {"PATH": path, **kept}.items())
    service = (
        "[Unit]\nDescription=Soak of the ds41ctl engine\n\n[Service]\nType=oneshot\n"
        f"{environment}ExecStart={' '.join(_systemd_word(item) for item in argv)}\n"
        "SuccessExitStatus=11\nNice=5\n"
    )
    timer = (
        "[Unit]\nDescription=Soak of the ds41ctl engine every night\n\n[Timer]\n"
        f"OnCalendar=*-*-* {int(hour):02d}:{int(minute):02d}:00\nPersistent=true\nRandomizedDelaySec=300\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )
    cli.out.data({"cron": cron, "service": service, "timer": timer})
    cli.out.line("# crontab -e   (mails only when a soak does not pass)")
    cli.out.line(cron)
    for name, text in (("ds41ctl-soak.service", service), ("ds41ctl-soak.timer", timer)):
        cli.out.line()
        cli.out.line(f"# ~/.config/systemd/user/{name}")
        for row in text.splitlines():
            cli.out.line(row)
    cli.out.hint("systemctl --user daemon-reload && systemctl --user enable --now ds41ctl-soak.timer")


def _systemd(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _systemd_word(value: str) -> str:
    plain = value and all(char.isalnum() or char in "/._-:=@+," for char in value)
    return value if plain else f'"{_systemd(value).replace("$", "$$")}"'
