"""Journal: one folder a run, events appended and made durable, the newest run found by one link."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ds41ctl.adapters.files import fsync_dir, os_error
from ds41ctl.core.event import Event, EventType, StepState
from ds41ctl.core.finding import Finding

KEEP = 30  # runs kept; older folders are removed


class Journal:
    """Appends a run's events to state/runs/<utc>-<id>/events.jsonl."""

    def __init__(self, runs: Path) -> None:
        self.folder = new_folder(runs)
        self.run = self.folder.name
        handle = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._out = os.fdopen(handle, "w", encoding="utf-8")
        self._seq = 0
        self._started = time.monotonic()

    def emit(
        self,
        type: EventType,
        *,
        step: str = "",
        state: StepState | None = None,
        text: str = "",
        seconds: float | None = None,
        finding: Finding | None = None,
        data: dict[str, Any] | None = None,
    ) -> Event:
        """Append one event; step ends and run ends are fsynced."""
        event = Event(
            ts=datetime.now(UTC).isoformat(timespec="milliseconds"),
            run=self.run,
            seq=self._seq,
            type=type,
            step=step,
            state=state,
            text=text,
            seconds=seconds,
            finding=finding,
            data=data or {},
        )
        self._seq += 1
        self._out.write(event.model_dump_json(exclude_defaults=True) + "\n")
        if type != "step.progress":
            self._out.flush()
            if type in ("step.done", "run.done"):
                os.fsync(self._out.fileno())
        return event

    def close(self, exit_code: int) -> None:
        """Write the last event."""
        self.emit("run.done", seconds=time.monotonic() - self._started, data={"exit_code": exit_code})
        self._out.close()


def new_folder(runs: Path, keep: int = KEEP) -> Path:
    """Make the folder of a new run, private; `latest` points to it, and only the `keep` newest stay.

    Raises the error a user understands when the state folder cannot be written.
    """
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder = runs / run
    try:
        folder.mkdir(mode=0o700, parents=True)
        _relink(runs / "latest", run)
    except OSError as error:
        raise os_error(error, f"making {folder}") from None
    _prune(runs, keep, folder)
    return folder


def _relink(link: Path, target: str) -> None:
    temporary = link.with_name(f".latest-{secrets.token_hex(3)}")
    temporary.symlink_to(target)
    temporary.rename(link)
    fsync_dir(link.parent)


def _prune(runs: Path, keep: int, newest: Path) -> None:
    """`newest` stays whatever its name: two runs of one second are in no order."""
    folders = sorted(path for path in runs.iterdir() if path.is_dir() and not path.is_symlink() and path != newest)
    for path in folders[: max(0, len(folders) + 1 - keep)]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


def read_events(path: Path) -> tuple[list[Event], int]:
    """(events, lines that could not be read): a line cut by a full disk or a kill is skipped and counted."""
    events: list[Event] = []
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            events.append(Event.model_validate(json.loads(line)))
        except (ValueError, ValidationError):
            broken += 1
    return events, broken
