"""Foreground: stay with an engine that is our child, show its log, end it whenever we are left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ds41ctl.adapters import running
from ds41ctl.core.errors import EngineDiedError
from ds41ctl.core.layout import Layout
from ds41ctl.steps import stop
from ds41ctl.steps.serve import Serve


@contextlib.contextmanager
def held(layout: Layout, step: Serve) -> Iterator[None]:
    """Whatever leaves this block by an exception (interrupt and termination too) ends the engine `step` started."""
    try:
        yield
    except BaseException:
        record = running.read(layout.record_path)
        if record is not None and step.record is not None and record.marker == step.record.marker:
            stop.end(layout, record)
        raise


def follow(layout: Layout, step: Serve, show: Callable[[str], None]) -> None:
    """Copy the log until the engine ends. Raises EngineDiedError unless `ds41ctl stop` ended it."""
    record, holder = step.record, step.holder
    if record is None or holder is None:
        return
    with Path(record.log).open(encoding="utf-8", errors="replace") as log:
        while True:
            ending = holder.ending()
            for line in log.read().splitlines():
                show(line)
            if ending is not None:
                break
            time.sleep(0.2)
    if running.read(layout.record_path) is not None:
        raise EngineDiedError(f"the engine ended with {ending}", hints=(f"tail -50 {record.log}",))
