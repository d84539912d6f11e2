"""Foreground: stay with an engine that is our child, show its log, end it when we are told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ds41ctl.adapters import running
from ds41ctl.core.errors import EngineDiedError
from ds41ctl.core.layout import Layout
from ds41ctl.steps import stop
from ds41ctl.steps.serve import Serve


def follow(layout: Layout, step: Serve, show: Callable[[str], None]) -> None:
    """Copy the log until the engine ends. Interrupt or termination stops the engine first.

    Raises EngineDiedError when it ended by itself.
    """
    record, holder = step.record, step.holder
    if record is None or holder is None:
        return
    try:
        with Path(record.log).open(encoding="utf-8", errors="replace") as log:
            while True:
                ending = holder.ending()
                for line in log.read().splitlines():
                    show(line)
                if ending is not None:
                    break
                time.sleep(0.2)
    except BaseException:
        stop.end(layout, record)
        raise
    stopped_by_other = running.read(layout.record_path) is None
    if not stopped_by_other:
        stop.end(layout, record)
        raise EngineDiedError(f"the engine ended with {ending}", hints=(f"tail -50 {record.log}",))
