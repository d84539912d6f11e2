"""restart: the running engine is ended and the very same one started again; it serves whatever happens between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ds41ctl.adapters import files, machine, running, store, tmux
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import ConfigError, Ds41Error, EngineDiedError, NotFoundError, UnsupportedError
from ds41ctl.core.launch import launch
from ds41ctl.core.layout import Layout
from ds41ctl.steps import stop
from ds41ctl.steps.runner import Goal, Progress
from ds41ctl.steps.serve import Serve


class Restart:
    """End the engine of `layout` and start it again. `differs`: what of the new start is not as before, or ''."""

    name = "restart"

    def __init__(self, layout: Layout, profile_path: Path, environ: Mapping[str, str]) -> None:
        self.layout, self.profile_path, self.environ = layout, profile_path, environ
        self.differs = ""
        self._done = False

    def check(self) -> Goal:
        """It was ended once and serves again."""
        return self._serve().check() if self._done else Goal(False, "to be restarted")

    def refuse(self) -> Running:
        """The record of the engine that runs. Raises before anything is touched: NotFoundError when it was not started
        here, UnsupportedError when a terminal or a unit holds it, ConfigError when this shell would start another one.
        """
        record = running.read(self.layout.record_path)
        if record is None or not record.alive() or not record.ready_at:
            raise NotFoundError(
                f"{self.layout.name} is not running, or was not started by this ds41ctl: it cannot be restarted",
                hints=("ds41ctl serve", "ds41ctl status"),
            )
        if not record.container and tmux.read(self.layout.socket_path) is None:
            raise UnsupportedError(
                f"{self.layout.name} is held by a terminal (serve --foreground) or a unit, which a restart would end",
                hints=("restart it there, and compare: ds41ctl smoke --record FILE, then --fidelity FILE",),
            )
        other = self._other(record)
        if other:
            raise ConfigError(
                f"this shell would start another engine than the one that runs: {other}",
                hints=("set the variables (DS41_...) it was started with, or ds41ctl serve --replace first",),
            )
        self._serve().refuse_unfit()
        return record

    def do(self, progress: Progress) -> None:
        """End it and start it. An interrupt while it ends is heard once it serves again.

        Raises what `refuse` raises, FindingsError when it does not end, EngineDiedError when it does not come back at
        the second attempt either, DetachedError when interrupted while it starts (it goes on starting).
        """
        record = self.refuse()
        interrupt: BaseException | None = None
        with files.locked(self.layout.serve_lock, f"restarting {self.layout.name}"):
            progress(f"ending pid {record.pid}", {"note": True})
            try:
                stop.end(self.layout, record)
            except Ds41Error:
                raise
            except BaseException as caught:
                interrupt = caught
                progress("interrupted: the engine is brought back first; once more leaves it starting", {"note": True})
                stop.end(self.layout, record)
            try:
                self._serve().do(progress)
            except EngineDiedError as error:
                progress(f"it did not come back ({error.message}): once more", {"note": True})
                self._second(progress)
        self._done = True
        now = running.read(self.layout.record_path)
        self.differs = "the command line" if now is None or now.argv != record.argv else ""
        if interrupt is not None:
            raise interrupt

    def _second(self, progress: Progress) -> None:
        try:
            self._serve().do(progress)
        except EngineDiedError as error:
            raise EngineDiedError(
                f"the engine did not come back after the restart and is stopped: {error.message}",
                hints=("ds41ctl logs", f"ds41ctl serve --profile {self.layout.name}", *error.hints),
                detail=error.detail,
            ) from None

    def _serve(self) -> Serve:
        return Serve(self.layout, self.profile_path, self.environ, alone=True)

    def _other(self, record: Running) -> str:
        """What this shell's settings and profile would start otherwise than it was started."""
        layout = self.layout
        start = launch(layout, machine.look(layout, self.environ), str(store.locate(layout)), strict=True)
        if start.argv != record.argv:
            return "another command line"
        if str(layout.api_key_file or "") != record.api_key_file:
            return "another key file"
        if record.container:
            return ""
        try:
            given = json.loads(Path(record.spec).read_text(encoding="utf-8"))["env"]
        except (OSError, ValueError, KeyError):
            return "its environment is not known any more"
        names = sorted(name for name, value in start.env.items() if given.get(name) != value)
        return f"other values of {', '.join(names)}" if names else ""
