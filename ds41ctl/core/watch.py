"""Watchdog: what a series of looks at a running engine means, and when it may be started again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["starting", "ready", "dead", "hung", "zombie", "not answering"]

NOT_ANSWERING_LOOKS = 3  # policy: one slow answer is no fault; three in a row are
BACKOFF_S = (5.0, 30.0, 120.0)  # policy: before the first, second and every later restart
FORGET_S = 3600.0  # policy: restarts older than this no longer count


@dataclass(frozen=True)
class Look:
    """One look. `at`: seconds of a monotonic clock; `generated`: tokens so far; None: the engine did not say."""

    at: float
    alive: bool
    ready: bool = True
    answers: bool = True
    running: float | None = None
    generated: float | None = None


@dataclass
class Watch:
    """Feed it looks; `state` is what they mean. `stall_s`: requests that run without a token for this long are stuck.

    Stuck requests mean `hung` until the engine has answered a fresh one-token request, and `zombie` then: the engine
    works, and the requests that never end take their share of it.
    """

    stall_s: float = 120.0
    state: State = "starting"
    _moved_at: float | None = None
    _generated: float | None = None
    _silent: int = 0
    _probed: bool | None = None

    def feed(self, look: Look) -> State:
        """Take the next look."""
        if not look.alive:
            self.state = "dead"
            return self.state
        if not look.ready:
            self.state = "starting"
            self._moved_at = None
            return self.state
        self._silent = 0 if look.answers else self._silent + 1
        if self._silent >= NOT_ANSWERING_LOOKS:
            self.state = "not answering"
            return self.state
        idle = look.running is not None and look.running <= 0
        moved = look.generated is not None and look.generated != self._generated
        if idle or moved or self._moved_at is None:
            self._moved_at, self._probed = look.at, None
        if look.generated is not None:
            self._generated = look.generated
        stuck = look.at - self._moved_at >= self.stall_s and bool(look.running)
        if stuck and self._probed is not None:
            self.state = "zombie" if self._probed else "hung"
        else:
            self.state = "ready"
        return self.state

    def wants_probe(self, look: Look) -> bool:
        """True when requests are stuck and the engine was not asked for a token of its own since."""
        stuck = self._moved_at is not None and look.at - self._moved_at >= self.stall_s
        return stuck and bool(look.running) and self._probed is None and look.answers

    def probed(self, gave_token: bool) -> State:
        """The answer to the probe; its own token is no progress of the stuck requests."""
        self._probed = gave_token
        if gave_token and self._generated is not None:
            self._generated += 1
        self.state = "zombie" if gave_token else "hung"
        return self.state


@dataclass
class Restarts:
    """How often an engine may be started again: at most `most` times within an hour, later each time."""

    most: int
    done: list[float] = field(default_factory=list)

    def wait_s(self, now: float) -> float | None:
        """Seconds to wait before the next restart, None when the bound is reached."""
        self.done = [at for at in self.done if now - at < FORGET_S]
        if len(self.done) >= self.most:
            return None
        return BACKOFF_S[min(len(self.done), len(BACKOFF_S) - 1)]

    def note(self, now: float) -> None:
        """A restart was made."""
        self.done.append(now)


def rate(samples: Sequence[tuple[float, float | None]]) -> float | None:
    """Tokens a second between the first and the last sample that has a count, None without two of them."""
    known = [(at, count) for at, count in samples if count is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0] or known[-1][1] < known[0][1]:
        return None
    return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])
