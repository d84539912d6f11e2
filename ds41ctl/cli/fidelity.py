"""gate fidelity: copies of lists, perplexity by text set, and the same bits after a restart, in one command."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ds41ctl import __version__, cli
from ds41ctl.cli import clocks, live, runs
from ds41ctl.cli.junit import write_junit
from ds41ctl.cli.output import verdict
from ds41ctl.cli.session import Session
from ds41ctl.core import logprobs
from ds41ctl.core.errors import NotFoundError
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status

if TYPE_CHECKING:
    from ds41ctl.steps.restart import Restart
    from smoke.fidelity import Reference

REPORT, RECORD = "report.json", "record.json"


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `reference`: another engine's record; `window_tokens` None: 1,024 or what is safe."""

    reference: Path | None
    restart: bool
    texts: Path | None
    windows: int
    window_tokens: int | None
    lists: int
    passes: int
    junit: Path | None


def measure(session: Session, wanted: Wanted) -> None:
    """Measure, show, keep in state/fidelity. Raises before the engine is touched what can be known before."""
    from ds41ctl.adapters import files
    from ds41ctl.adapters.journal import new_folder
    from smoke import copylists, fidelity

    profile, argv = session.profile, live.started(session)
    size = fidelity.window_size(
        profile, wanted.window_tokens or min(fidelity.SEED_WINDOW, logprobs.window(profile, argv)), argv
    )
    old = _reference(wanted.reference)
    if old is not None:
        fidelity.require_room(profile, old, argv)
    sets = _sets(wanted, size)
    step = _restart(session) if wanted.restart else None
    if step is not None:
        step.refuse()
    cli.out.line(f"gate fidelity  {profile.name}  {session.layout.url}")

    def progress(text: str) -> None:
        cli.out.progress(f"  {text}")

    findings: list[Finding] = []

    def show(items: list[Finding]) -> None:
        findings.extend(items)
        for item in items:
            cli.out.finding(item, 26)

    client, canaries = live.client(session), runs.load_canaries(session)
    trained = profile.smoke.canaries != "random"
    lists = copylists.lists_of(canaries, trained, wanted.lists, secrets.randbits(32))
    copied = copylists.ask(client, profile, canaries, lists, wanted.passes, progress)
    known = live.look(session, None)
    show(copylists.findings(copied, drafter=profile.drafter if known.drafter is None else known.drafter))
    provenance = {
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "ds41ctl": __version__,
        "profile": profile.name,
        "profile_digest": known.profile_digest,
        "engine_digest": known.engine_digest,
        "facts_digest": known.facts_digest,
        "texts": str(wanted.texts) if wanted.texts else "built in: generated sentences and this project's source",
    }
    if old is None:
        now = fidelity.record(client, profile, sets, provenance, progress, windows=wanted.windows, size=size, argv=argv)
        show(fidelity.perplexities(now))
        for name in sets:
            got = sum(window.set == name for window in now.windows)
            if got < wanted.windows:
                cli.out.note(f"note: {name} gives {got} windows of {size} tokens, {wanted.windows} were asked for")
    else:
        now = fidelity.again(client, profile, old, progress, argv=argv)
        show(fidelity.judge(old, now, profile))
    folder = new_folder(session.dirs.state / "fidelity")
    files.publish(folder / RECORD, [fidelity.dump(now.model_copy(update={"provenance": provenance}))])
    if step is not None:
        _run(session, step)
        after = fidelity.again(live.client(session), profile, now, progress, argv=live.started(session))
        show([fidelity.restarted(now, after, profile, step.differs)])
    sentence = _sentence(findings, wanted, old)
    document = {
        "profile": profile.name,
        "provenance": provenance,
        "reference": old.provenance if old is not None else None,
        "record": str(folder / RECORD),
        "sentence": sentence,
        "findings": [item.model_dump(mode="json") for item in findings],
    }
    files.publish_json(folder / REPORT, document)
    cli.out.data({**document, "folder": str(folder)})
    if wanted.junit is not None:
        write_junit(wanted.junit, "ds41ctl gate fidelity", findings)
    cli.out.line(sentence)
    _conclude(findings, folder)


def _conclude(findings: list[Finding], folder: Path) -> None:
    failed = [item for item in findings if item.failed()]
    unknown = [item for item in findings if item.status is Status.UNKNOWN]
    cli.out.line(verdict(findings, strict=False), mark="FAIL" if failed else "UNKNOWN" if unknown else "OK")
    cli.out.hint(f"ds41ctl gate fidelity {folder / RECORD}   # another pack or engine against this one")
    if failed:
        raise typer.Exit(int(Exit.FINDINGS))
    if unknown:
        raise typer.Exit(int(Exit.INCONCLUSIVE))


def _reference(path: Path | None) -> Reference | None:
    from smoke import fidelity

    if path is None:
        return None
    try:
        return fidelity.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}", hints=("ds41ctl gate fidelity   # makes one",)) from None


def _sets(wanted: Wanted, size: int) -> dict[str, str]:
    from smoke import fidelity

    if wanted.texts is None:
        return fidelity.builtin_texts(wanted.windows * size)
    if not wanted.texts.is_dir():
        raise NotFoundError(f"no folder {wanted.texts}")
    return fidelity.texts_of(wanted.texts)


def _restart(session: Session) -> Restart:
    """A restart of the engine as it runs now, whatever this shell says of drafter, host and port."""
    from ds41ctl.adapters import running
    from ds41ctl.steps.restart import Restart

    layout, record = session.layout, running.read(session.layout.record_path)
    if record is not None and session.profile.serve.dspark_argv:
        layout = replace(layout, dspark=session.profile.drafter_in(record.argv))
    if record is not None:
        layout = replace(layout, host=record.host, port=record.port)
    return Restart(layout, session.profile_path, os.environ)


def _run(session: Session, step: Restart) -> None:
    """The restart as a run of its own, with the clocks held again."""
    with runs.run(session, "gate fidelity") as runner:
        try:
            runner.step(step)
        finally:
            if step.check().reached:  # an interrupt is heard once it serves again: at its clocks as well
                clocks.hold(runner, session, strict=False)


def _sentence(findings: list[Finding], wanted: Wanted, old: Reference | None) -> str:
    """The result as seed 004 words its own."""
    found = {item.id: item for item in findings}
    parts = []
    if found["fidelity.copy"].status is not Status.SKIP:
        parts.append(f"copy test {found['fidelity.copy'].found}")
    if found.get("fidelity.repeat", found["fidelity.copy"]).status is not Status.SKIP:
        parts.append(found["fidelity.repeat"].found)
    against = f" against {wanted.reference.name}" if wanted.reference is not None else ""
    changes = [
        f"{name.removeprefix('fidelity.perplexity.')} {item.found}"
        for name, item in found.items()
        if name.startswith("fidelity.perplexity.")
    ]
    parts.append(f"perplexity{against}: " + ", ".join(text.partition("; ")[0] for text in changes))
    if "fidelity.restart" in found:
        parts.append(found["fidelity.restart"].found)
    return "; ".join(parts)
