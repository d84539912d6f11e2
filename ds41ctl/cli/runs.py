"""Runs: open a journal for a command, close it with the exit code whatever happens."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ds41ctl import cli
from ds41ctl.adapters.journal import Journal
from ds41ctl.adapters.supply import Supply
from ds41ctl.cli import live
from ds41ctl.cli.session import Session
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status
from ds41ctl.steps.runner import Goal, Progress, Runner

if TYPE_CHECKING:
    from smoke.canaries import Canaries

THOROUGH_COPIES = 100  # identifiers, as seed 004's copy test


@contextlib.contextmanager
def run(session: Session, command: str) -> Iterator[Runner]:
    """A journalled run; its last event carries the exit code of an error that leaves the block."""
    journal = Journal(session.dirs.state / "runs")
    runner = Runner(
        journal,
        cli.out.listen,
        command=command,
        profile=session.profile.name,
        digest=session.profile.digest(),
    )
    code = int(Exit.OK)
    try:
        yield runner
    except Ds41Error as error:
        code = int(error.code)
        raise
    except BaseException as error:
        code = int(getattr(error, "exit_code", Exit.INTERNAL))
        raise
    finally:
        runner.close(code)


class Preflight:
    """The checks as a step of a run."""

    name = "preflight"

    def __init__(
        self,
        session: Session,
        *,
        stage: str,
        strict: bool = False,
        level: int = 1,
        skip: tuple[str, ...] = (),
        given: Supply | None = None,
    ) -> None:
        self.session, self.stage, self.strict, self.level, self.skip = session, stage, strict, level, skip
        self.given = given
        self.findings: list[Finding] = []

    def judge(self, on_finding: Callable[[Finding], None], progress: Progress) -> Goal:
        """Probe this machine and run every check."""
        import preflight
        from ds41ctl.adapters.probe import probe

        facts = probe(self.session.layout, self.given)
        self.findings = preflight.run(
            self.session.profile,
            facts,
            stage="serve" if self.stage == "serve" else "up",
            level=self.level,
            skip=self.skip,
        )
        for finding in self.findings:
            on_finding(finding)
        failed = [item for item in self.findings if item.failed(strict=self.strict)]
        skipped = sum(1 for item in self.findings if item.status is Status.SKIP)
        text = f"{len(self.findings)} checks" + (f", {skipped} skipped" if skipped else "")
        if self.skip:
            text += f", left out on request: {', '.join(self.skip)}"
        if failed:
            text = f"{len(failed)} of {len(self.findings)} failed: " + ", ".join(item.id for item in failed)
        return Goal(not failed, text)


# what a failed check means for the exit code of a command that needed it to pass
_CODES = {
    "host.ram": Exit.NO_SPACE,
    "host.tmpfs": Exit.PERMISSION,
    "host.tmpfs-size": Exit.NO_SPACE,
    "host.hugepages": Exit.NO_SPACE,
    "disk": Exit.NO_SPACE,
    "pack": Exit.INTEGRITY,
    "engram.store": Exit.INTEGRITY,
    "engram.storage": Exit.USAGE,
    "env": Exit.USAGE,
    "engine.installed": Exit.NOT_FOUND,
    "engine.drift": Exit.INTEGRITY,
    "engine.running": Exit.ALREADY_RUNNING,
}


class PreflightError(Ds41Error):
    """A command refused to go on because of a finding; the exit code is that of the first one."""

    def __init__(self, first: Finding, others: int) -> None:
        more = f" (and {others} more)" if others else ""
        super().__init__(f"{first.id}: {first.summary}{more}", hints=first.fix)
        domain = first.id.split(".")[0]
        self.code = _CODES.get(first.id, _CODES.get(domain, Exit.UNSUPPORTED))


def demand(runner: Runner, checks: Preflight) -> None:
    """Run the checks as a step. Raises PreflightError when one fails: the long step is not started."""
    if not runner.judge(checks):
        failed = [item for item in checks.findings if item.failed(strict=checks.strict)]
        raise PreflightError(failed[0], len(failed) - 1)


class Smoke:
    """The behavioural tests as a step of a run."""

    name = "smoke"

    def __init__(
        self, session: Session, *, level: str = "quick", only: tuple[str, ...] = (), deadline_s: float | None = None
    ) -> None:
        self.session, self.level, self.only, self.deadline_s = session, level, only, deadline_s
        self.findings: list[Finding] = []

    def judge(self, on_finding: Callable[[Finding], None], progress: Progress) -> Goal:
        """Ask the running engine."""
        import smoke

        profile = self.session.profile
        level = next(item for item in smoke.LEVELS if item == self.level)
        canaries = load_canaries(self.session, level)
        self.findings = smoke.run(
            live.client(self.session),
            canaries,
            profile,
            level=level,
            only=self.only,
            on_finding=on_finding,
            deadline_s=self.deadline_s,
            drafter=live.drafter(self.session),
        )
        failed = [item for item in self.findings if item.failed(strict=False) or item.status is Status.UNKNOWN]
        skipped = sum(1 for item in self.findings if item.status is Status.SKIP)
        good = len(self.findings) - len(failed) - skipped
        text = f"{good} of {len(self.findings)}" + (f", {skipped} skipped" if skipped else "")
        if failed:
            text += ": " + ", ".join(item.id for item in failed)
        return Goal(not failed, text)


def load_canaries(session: Session, level: str = "quick") -> Canaries:
    """The profile's canaries: trained ones of a recipe, or fresh random ones for a real model."""
    from ds41ctl.adapters.pack import recipe_folder
    from smoke import canaries

    wanted = session.profile.smoke
    if wanted.canaries != "random":
        return canaries.load(recipe_folder(wanted.canaries))
    seed = secrets.randbits(32)
    cli.out.note(f"random canaries of seed {seed}")
    thorough, context = level == "thorough", session.profile.serve.max_model_len
    return canaries.generate(
        seed,
        copies=max(wanted.copies, THOROUGH_COPIES) if thorough else wanted.copies,
        needle_tokens=wanted.needle_tokens,
        # texts come out up to a fifth longer than asked for; the answer needs room as well
        needle_lengths=(context // 4, context * 3 // 4) if thorough else (),
        needle_depths=(0.05, 0.25, 0.5, 0.75, 0.95) if thorough else (0.2, 0.7),
        images=2 if level == "quick" else 6,
    )
