"""Output: the one object that prints. stdout is the result, stderr is everything else, --json is one document."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.event import Event
from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status, tally

OUTPUT_SCHEMA = 1
_STYLE = {
    "OK": "green",
    "WARN": "yellow",
    "FAIL": "bold red",
    "CRASH": "bold red",
    "UNKNOWN": "magenta",
    "SKIP": "dim",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PLAIN_PROGRESS_EVERY = 10.0  # seconds between progress lines when stderr is not a terminal


def clean(text: str) -> str:
    """Text from elsewhere (logs, servers) without control characters."""
    return _CONTROL.sub("?", text)


class Output:
    """Human lines or one JSON document, decided once."""

    def __init__(self, *, json_mode: bool, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.json_mode = json_mode
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._data: Any = None
        self._progress_at = 0.0
        self._progress_shown = False
        self.verbose = False

    # ---- human lines
    def line(self, text: str = "", *, mark: str = "", tail: str = "") -> None:
        """One line of the result (nothing in JSON mode). `mark` is a word such as OK; colour only adds to it."""
        if self.json_mode:
            return
        self._clear_progress()
        shown = f"{mark:<7} {text}" if mark else text
        shown = f"{shown}   {tail}" if tail else shown
        self._stdout.write(self._colour(clean(shown), mark, self._stdout) + "\n")
        self._stdout.flush()

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        self._clear_progress()
        self._stderr.write(clean(text) + "\n")
        self._stderr.flush()

    def hint(self, text: str) -> None:
        """The next command."""
        if self.json_mode:
            return
        self._clear_progress()
        self._stderr.write(f"hint: {clean(text)}\n")
        self._stderr.flush()

    def progress(self, text: str, *, force: bool = False) -> None:
        """Where a long step is: in place on a terminal, else a plain line every 10 s."""
        now = time.monotonic()
        if self._stderr.isatty() and os.environ.get("TERM") != "dumb":
            if now - self._progress_at >= 0.1 or force:
                self._stderr.write("\r\x1b[K" + clean(text)[:110])
                self._stderr.flush()
                self._progress_at, self._progress_shown = now, True
        elif now - self._progress_at >= PLAIN_PROGRESS_EVERY or force:
            self._stderr.write(clean(text) + "\n")
            self._stderr.flush()
            self._progress_at = now

    def restart_progress(self) -> None:
        """A new step begins: its first plain progress line is due in 10 s."""
        self._progress_at = time.monotonic()

    def _clear_progress(self) -> None:
        if self._progress_shown:
            self._stderr.write("\r\x1b[K")
            self._progress_shown = False

    def _colour(self, text: str, mark: str, stream: TextIO) -> str:
        style = _STYLE.get(mark)
        if not style or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return text
        from rich.style import Style

        return text.replace(mark, Style.parse(style).render(mark), 1)

    # ---- structured
    def findings(self, findings: Sequence[Finding], *, strict: bool = False) -> None:
        """Findings as rows; what is not ok is followed by why it matters and what to do."""
        width = max((len(item.id) for item in findings), default=0)
        for item in findings:
            self.finding(item, width)

    def finding(self, item: Finding, width: int = 0) -> None:
        """One row."""
        self.line(f"{item.id:<{width}}  {item.summary}", mark=item.status.upper())
        if item.status in (Status.OK, Status.SKIP) and not self.verbose:
            return
        if item.status not in (Status.OK, Status.SKIP):
            for label, text in (("expected", item.expected), ("found", item.found), ("why", item.why)):
                if text:
                    self.line(f"        {label}: {text}")
            for command in item.fix:
                self.line(f"        fix: {command}")
        for text in item.evidence:
            self.line(f"        | {text}")

    def data(self, data: Any) -> None:
        """The document's data in JSON mode."""
        self._data = data

    def finish(self, exit_code: int, error: Ds41Error | None = None) -> None:
        """Print the one JSON document, or the error and its hints."""
        if self.json_mode:
            document: dict[str, Any] = {
                "schema": OUTPUT_SCHEMA,
                "ok": exit_code == 0,
                "exit_code": exit_code,
                "error": None,
                "data": self._data,
            }
            if error is not None:
                document["error"] = {
                    "code": Exit(exit_code).name.lower(),
                    "message": error.message,
                    "hints": list(error.hints),
                    "detail": list(error.detail),
                    "retryable": error.retryable,
                }
            self._stdout.write(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
            self._stdout.flush()
            return
        if error is not None:
            self._clear_progress()
            self._stderr.write(f"error: {clean(error.message)}\n")
            for text in error.detail:
                self._stderr.write(f"  {clean(text)}\n")
            for text in error.hints:
                self._stderr.write(f"hint: {clean(text)}\n")
            self._stderr.flush()

    # ---- a run's events
    def listen(self, event: Event) -> None:
        """Show an event of a run as it happens."""
        if event.type == "step.start":
            self.restart_progress()
            self._progress_line = f"  {event.step}"
        elif event.type == "step.progress" and event.data.get("note"):
            self.note(f"  {event.step:<10} {event.text}")
        elif event.type == "step.progress" and event.data.get("files") is not None:
            # many files at once: the total first, what does not fit the line is the tail of the names
            self.progress(f"  {event.step:<10}{_amount(event.data)}  {event.text}")
        elif event.type == "step.progress":
            self.progress(f"  {event.step:<10} {event.text}{_amount(event.data)}")
        elif event.type == "finding" and event.finding is not None:
            if event.finding.failed() or event.finding.status in (Status.WARN, Status.UNKNOWN):
                self.finding(event.finding)
            else:
                self.progress(f"  {event.step:<10} {event.finding.id}")
        elif event.type == "step.done":
            mark = "OK" if event.state == "already" else (event.state or "fail").upper()
            text = f"already ({event.text})" if event.state == "already" else event.text
            self.line(f"  {event.step:<10} {mark:<7} {text}   {event.seconds or 0.0:.1f} s")


def _amount(data: dict[str, Any]) -> str:
    total, done = data.get("total"), data.get("bytes")
    if not total or done is None:
        return ""
    text = f"  {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB ({100 * done / total:.0f} %)"
    rate, eta = data.get("rate"), data.get("eta_s")
    if rate:
        text += f", {rate / 2**20:,.1f} MiB/s"
    if rate and eta is not None:
        text += f", {_duration(eta)} left"
    return text


def _duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 12 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def verdict(findings: Sequence[Finding], *, strict: bool) -> str:
    """`1 failed, 2 warnings, 1 unknown of 23`, with what strict makes of it left to the caller."""
    counts = tally(findings)
    parts = []
    failed = counts[Status.FAIL] + counts[Status.CRASH]
    if failed:
        parts.append(f"{failed} failed")
    if counts[Status.WARN]:
        parts.append(f"{counts[Status.WARN]} warning" + ("s" if counts[Status.WARN] > 1 else ""))
    if counts[Status.UNKNOWN]:
        parts.append(f"{counts[Status.UNKNOWN]} unknown")
    if counts[Status.SKIP]:
        parts.append(f"{counts[Status.SKIP]} skipped")
    total = len(findings)
    return (", ".join(parts) + f" of {total}") if parts else f"{total} of {total}"
