"""hashing: files on all cores, and how far that is, told now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds41ctl.adapters import pack
from ds41ctl.adapters.pack import Checked, Expected
from ds41ctl.steps.runner import Progress

TELL_EVERY_S = 1.0  # a work of hours must not fill its own journal


class Told:
    """Progress at most every TELL_EVERY_S, from one thread at a time (a journal takes no two at once)."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._at, self._lock = progress, 0.0, threading.Lock()

    def __call__(self, text: str, data: dict[str, Any]) -> None:
        """Tell, unless it was told a moment ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._at >= TELL_EVERY_S:
                self._at = now
                self._progress(text, data)


class Meter:
    """How many of `total` bytes are hashed, told now and then; may be called from several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._tell = total, Told(progress)
        self._done, self._began = 0, time.monotonic()

    def __call__(self, number: int, name: str) -> None:
        """`number` more bytes of a file were hashed."""
        self._done += number  # a lost update of two threads costs a rounding in a progress line
        rate = self._done / max(time.monotonic() - self._began, 0.001)
        left = max(0.0, self._total - self._done) / rate
        self._tell(f"hashing {name}", {"bytes": self._done, "total": self._total, "rate": rate, "eta_s": left})


def hash_all(wanted: Sequence[tuple[Path, Expected]], progress: Progress, *, lenient: bool = False) -> list[Checked]:
    """Hash files on all cores, telling how far it is; each with what is wrong with it. `lenient`: see pack.hash_all."""
    meter = Meter(sum(item.size for _, item in wanted), progress)
    return list(pack.hash_all(wanted, lambda number, item: meter(number, item.name), lenient=lenient))
