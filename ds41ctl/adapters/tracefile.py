"""Trace file: one line an event, whole or not at all. A full disk costs the line that did not fit, no other."""

from __future__ import annotations

import os
from pathlib import Path

from ds41ctl.adapters.files import os_error


class TraceFile:
    """Appends lines to `path` (0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, text: str, *, durable: bool = False) -> None:
        """Write one line; `durable` also waits until the disk has it.

        Raises NoSpaceError when it does not fit; what was written of it is taken back.
        """
        data = text.encode() + b"\n"
        before = os.fstat(self._handle).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._handle, data[written:])
            if durable:
                os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, before)
            raise os_error(error, f"writing {self.path}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
