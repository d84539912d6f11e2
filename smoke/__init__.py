"""Behavioural tests of a running server.

`run` asks a server what only a healthy one gets right and returns one Finding a test; it is bounded in time,
and what was not reached is unknown, never ok. `TESTS` is the explicit, ordered list; `table` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds41ctl.adapters.http import TIMEOUTS, EngineClient, Fault, HttpFault, printable
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.nearest import nearest
from ds41ctl.core.profile import Profile
from smoke import drafter as drafter_probe
from smoke import probes, probes_wide
from smoke.canaries import Canaries
from smoke.probes import LEVELS, Level, OutOfTimeError, Session

__all__ = ["DEADLINE_S", "LEVELS", "TESTS", "Level", "SmokeTest", "run", "table"]

DEADLINE_S: dict[Level, float] = {"quick": 300.0, "full": 900.0, "thorough": 7200.0}
_ALIVE_S = 20.0  # bound of the one-token question after a time-out


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """One test: stable id, what a pass proves, the probe, the least level it runs at, and what higher levels add."""

    id: str
    proves: str
    probe: Callable[[Session], Finding]
    full: str = ""
    thorough: str = ""
    level: Level = "quick"


TESTS: tuple[SmokeTest, ...] = (
    SmokeTest("smoke.health", "/health is 200, the right model is served and a token flows", probes.health),
    SmokeTest("smoke.arithmetic", "17 * 23 is 391, as a number and not as a part of one", probes.arithmetic),
    SmokeTest("smoke.thinking", "reasoning arrives in its own field, the answer in content", probes.thinking),
    SmokeTest("smoke.tool-call", "a tool call with exact arguments, finish_reason tool_calls", probes.tool_call),
    SmokeTest("smoke.tool-stream", "the same call joins from streamed deltas", probes.tool_stream),
    SmokeTest("smoke.tool-follow-up", "the tool's result reaches the model and is used", probes.tool_follow_up),
    SmokeTest(
        "smoke.tool-forced",
        "a forced tool is called rightly: by name, as required, whole, streamed",
        probes_wide.tool_forced,
        level="full",
    ),
    SmokeTest(
        "smoke.copy",
        "identifiers come back exactly: the Engram tables are loaded and read",
        probes.copy,
        thorough="100 identifiers, three passes",
    ),
    SmokeTest("smoke.repeat", "three answers at temperature 0 are identical", probes.repeat, "five answers"),
    SmokeTest(
        "smoke.needle",
        "a fact far back in a long prompt is found",
        probes.needle,
        "two needles",
        "five depths at three lengths, up to the profile's context",
    ),
    SmokeTest(
        "smoke.images",
        "two pictures are told apart, and the answer needs the picture",
        probes.images,
        "six pictures, and the prompt tokens of a large one",
    ),
    SmokeTest(
        "smoke.images-many",
        "several pictures, and one in a tool result, reach the model; one beyond the limit is refused",
        probes_wide.images_many,
        level="full",
    ),
    SmokeTest("smoke.batch", "a neighbour in the batch does not change an answer", probes_wide.batch, level="full"),
    SmokeTest(
        "smoke.prefix-cache",
        "a new text is not in the cache, a repeated one is, and answers the same",
        probes_wide.prefix_cache,
        level="full",
    ),
    SmokeTest(
        "smoke.decode",
        "streamed tok/s by the server's token count, against the figure for such text and drafter setting",
        probes.decode,
        "median of three runs of 128 tokens",
    ),
    SmokeTest(
        "smoke.drafter",
        "first drafts are accepted from the first steps of a chat on",
        drafter_probe.drafter,
        level="full",
    ),
    SmokeTest("smoke.stop", "a stop text ends the answer before it", probes_wide.stop, level="full"),
    SmokeTest(
        "smoke.limits",
        "max_tokens is kept and a bad request gets HTTP 400",
        probes.limits,
        "five kinds of bad requests",
    ),
)


def table() -> list[tuple[str, str, str]]:
    """(id, level, what it proves) of every test, in order. A level includes those below it."""
    rows = []
    for test in TESTS:
        more = [f"; {name}: {text}" for name, text in (("full", test.full), ("thorough", test.thorough)) if text]
        rows.append((test.id, test.level + "".join(more), test.proves))
    return rows


def run(
    target: EngineClient,
    canaries: Canaries,
    profile: Profile,
    *,
    level: Level = "quick",
    only: Sequence[str] = (),
    on_finding: Callable[[Finding], None] | None = None,
    deadline_s: float | None = None,
    spent: list[int] | None = None,
    drafter: bool | None = None,
) -> list[Finding]:
    """Run the tests against the engine at `target` and return their findings, in the order of TESTS.

    `only` names tests by id, with or without `smoke.`; `on_finding` is called after each. The run ends within
    `deadline_s` seconds (default DEADLINE_S[level]) plus a moment; tests it did not reach are unknown. After
    a failed smoke.health, or once the engine no longer answers, the rest is unknown too. `spent` gets the number
    of tokens of every answer; `drafter`: the engine was started with one (None: nobody knows). Raises ConfigError for a
    name that is no test.
    """
    chosen = _chosen(only, level)
    limit = DEADLINE_S[level] if deadline_s is None else deadline_s
    counted = spent if spent is not None else []
    session = Session(target, canaries, profile, level, time.monotonic() + limit, counted, drafter)
    findings: list[Finding] = []
    blocked = ""
    for test in chosen:
        began = time.monotonic()
        if blocked:
            finding = probes.unknown(test.id, f"not run: {blocked}", ("ds41ctl status", "ds41ctl logs"))
        else:
            finding, fault = _guarded(test, session, limit)
            if test.id == "smoke.health" and finding.status is not Status.OK:
                blocked = "smoke.health did not pass"
            elif fault is not None and not _alive(session, fault):
                blocked = f"the engine stopped answering in {test.id}"
        finding = finding.model_copy(update={"seconds": round(time.monotonic() - began, 3)})
        findings.append(finding)
        if on_finding is not None:
            on_finding(finding)
    return findings


def _chosen(only: Sequence[str], level: Level) -> list[SmokeTest]:
    if not only:
        return [test for test in TESTS if LEVELS.index(test.level) <= LEVELS.index(level)]
    ids = [test.id for test in TESTS]
    wanted = set()
    for name in only:
        full = name if name.startswith("smoke.") else f"smoke.{name}"
        if full not in ids:
            near = nearest(full, ids)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"no smoke test is called {name!r}{hint}", hints=("one of: " + ", ".join(ids),))
        wanted.add(full)
    return [test for test in TESTS if test.id in wanted]


def _guarded(test: SmokeTest, session: Session, limit: float) -> tuple[Finding, HttpFault | None]:
    try:
        session.left()
        return test.probe(session), None
    except OutOfTimeError:
        return _unfinished(test, limit), None
    except HttpFault as fault:
        if fault.kind in TIMEOUTS and time.monotonic() >= session.deadline:
            return _unfinished(test, limit), None  # the run's own limit cut the request, not the request's
        return probes.faulted(test.id, fault), fault
    except Exception as error:
        return (
            Finding(
                id=test.id,
                status=Status.CRASH,
                summary=f"the test itself crashed: {type(error).__name__}: {printable(str(error))}",
                why="a bug in this test, not in the engine",
                fix=("ds41ctl report",),
            ),
            None,
        )


def _unfinished(test: SmokeTest, limit: float) -> Finding:
    reason = f"not finished: the time limit of {limit:g} s was used up"
    return probes.unknown(test.id, reason, (f"run it alone: ds41ctl smoke --only {test.id}",))


def _alive(session: Session, fault: HttpFault) -> bool:
    """After a fault: does the engine still produce a token? A refusal by status comes from a living one."""
    if fault.kind is Fault.STATUS and fault.status is not None and fault.status < 500:
        return True
    try:
        session.chat(session.canaries.hello.prompt, 1, total_s=_ALIVE_S)
    except HttpFault:
        return False
    except OutOfTimeError:
        return True  # the deadline speaks for itself
    return True
