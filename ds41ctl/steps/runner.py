"""Runner: verify, do, verify; every step journalled, and "already" when its goal is reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds41ctl.adapters.journal import Journal
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.event import Event, StepState
from ds41ctl.core.finding import Finding

Progress = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Goal:
    """Whether a step's goal is reached, in words by what. `unknown`: nothing speaks against it, nothing proves it."""

    reached: bool
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    unknown: bool = False


class Step(Protocol):
    """verify -> do -> verify. `check` is cheap and changes nothing; `do` must be safe to repeat after any death."""

    name: str

    def check(self) -> Goal:
        """Is the goal reached?"""
        ...

    def do(self, progress: Progress) -> None:
        """Reach it."""
        ...


class Judged(Protocol):
    """A step that only looks: it yields findings and a verdict (preflight, smoke)."""

    name: str

    def judge(self, on_finding: Callable[[Finding], None], progress: Progress) -> Goal:
        """Look, report each finding, say whether it passed."""
        ...


Listener = Callable[[Event], None]


class Runner:
    """Runs steps in order, writing the journal and telling the listener (the screen) about every event."""

    def __init__(self, journal: Journal, listener: Listener, *, command: str, profile: str, digest: str) -> None:
        self.journal = journal
        self._listener = listener
        self._tell("run.start", data={"command": command, "profile": profile, "profile_digest": digest})

    def _tell(self, type: Any, **fields: Any) -> None:
        self._listener(self.journal.emit(type, **fields))

    def step(self, step: Step, *, always: bool = False) -> None:
        """Run one step. Raises what the step raises, or Ds41Error when its goal is not reached afterwards.

        `always`: do it even when its goal looks reached (`--repair` believes no cheap look).
        """
        started = self._start(step.name)
        try:
            goal = step.check()
            state: StepState = "already"
            if always or not goal.reached:
                step.do(self._progress(step.name))
                goal = step.check()
                state = "ok"
                if not goal.reached:
                    raise Ds41Error(f"{step.name}: done, but its goal is not reached: {goal.text}")
        except BaseException as error:
            self._failed(step.name, error, started)
            raise
        self._done(step.name, state, goal, started)

    def judge(self, step: Judged) -> bool:
        """Run a step that only looks; returns whether it passed."""
        started = self._start(step.name)
        try:
            goal = step.judge(
                lambda finding: self._tell("finding", step=step.name, finding=finding),
                self._progress(step.name),
            )
        except BaseException as error:
            self._failed(step.name, error, started)
            raise
        self._done(step.name, "fail" if not goal.reached else "unknown" if goal.unknown else "ok", goal, started)
        return goal.reached

    def skip(self, name: str, why: str) -> None:
        """Journal a step that does not apply."""
        self._tell("step.start", step=name)
        self._tell("step.done", step=name, state="skip", text=why, seconds=0.0)

    def close(self, exit_code: int) -> None:
        """End the run."""
        self.journal.close(exit_code)

    def _start(self, name: str) -> float:
        self._tell("step.start", step=name)
        return time.monotonic()

    def _progress(self, name: str) -> Progress:
        def progress(text: str, data: dict[str, Any]) -> None:
            self._tell("step.progress", step=name, text=text, data=data)

        return progress

    def _done(self, name: str, state: StepState, goal: Goal, started: float) -> None:
        self._tell(
            "step.done",
            step=name,
            state=state,
            text=goal.text,
            seconds=time.monotonic() - started,
            data=goal.data,
        )

    def _failed(self, name: str, error: BaseException, started: float) -> None:
        text = error.message if isinstance(error, Ds41Error) else type(error).__name__
        if isinstance(error, PermissionError):
            text = f"permission denied: {error.filename or ''}"
        self._tell("step.done", step=name, state="fail", text=text, seconds=time.monotonic() - started)
