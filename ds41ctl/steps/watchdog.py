"""watchdog: looks at a running engine again and again, names what became of it, restarts it within a policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ds41ctl.adapters import running
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.layout import Layout
from ds41ctl.core.watch import Look, Restarts, State, Watch
from ds41ctl.steps import live, proof, serve, stop

EVERY_S = 2.0  # a death is named within this and the time of a look
PROBE_S = 60.0  # C5: a one-token canary that is not answered in 60 s is no answer
BROKEN: tuple[State, ...] = ("dead", "hung", "not answering")

Tell = Callable[[str], None]


class Watchdog:
    """Watches one profile's engine. `most`: restarts allowed within an hour; 0 only watches."""

    def __init__(
        self,
        layout: Layout,
        profile_path: Path,
        environ: Mapping[str, str] | None = None,
        *,
        most: int = 0,
        stall_s: float = 120.0,
        every_s: float = EVERY_S,
    ) -> None:
        self.layout, self.profile_path, self.every_s = layout, profile_path, every_s
        self.environ = os.environ if environ is None else environ
        self.watch = Watch(stall_s)
        self.restarts = Restarts(most)

    def states(self, tell: Tell) -> Iterator[tuple[State, Look]]:
        """A state a look, for ever, until the engine is stopped by `ds41ctl stop` or may not be restarted again."""
        while True:
            if running.read(self.layout.record_path) is None:
                tell("the engine was stopped: nothing is left to watch")
                return
            look = live.look(self.layout)
            state = self.watch.feed(look)
            if self.watch.wants_probe(look):
                record = running.read(self.layout.record_path)
                if record is not None:
                    state = self.watch.probed(proof.first_token(record, PROBE_S) == "")
            yield state, look
            if state in BROKEN and not self._restarted(state, tell):
                return
            time.sleep(self.every_s)

    def _restarted(self, state: State, tell: Tell) -> bool:
        """True when watching goes on. A restart begins only after `stop` has proven that nothing is left, VRAM too."""
        if self.restarts.most == 0:
            # a dead engine stays dead; one that hangs may yet be looked at by a person
            return state != "dead"
        wait = self.restarts.wait_s(time.monotonic())
        if wait is None:
            tell(f"{state}: not restarted, {self.restarts.most} restarts within an hour are the bound")
            return False
        record = running.read(self.layout.record_path)
        if record is None:
            return False
        tell(f"{state}: restarting in {wait:.0f} s")
        time.sleep(wait)
        self.restarts.note(time.monotonic())
        try:
            stop.end(self.layout, record)
            step = serve.Serve(self.layout, self.profile_path, self.environ)
            step.do(lambda text, data: None)
        except Ds41Error as error:
            tell(f"not restarted: {error.message}")
            return running.read(self.layout.record_path) is not None
        self.watch = Watch(self.watch.stall_s)
        tell("restarted, and proven ready again")
        return True
