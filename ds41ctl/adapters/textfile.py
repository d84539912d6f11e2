"""Small reads of /proc and /sys: what cannot be read is None or '', never an exception."""

from __future__ import annotations

import re
from pathlib import Path


def text(path: Path) -> str | None:
    """A file's text, None when it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def line(path: Path) -> str:
    """A one-line file, '' when it cannot be read."""
    return (text(path) or "").strip()


def integer(path: Path) -> int | None:
    """A file that holds one number, None when it does not."""
    found = text(path)
    try:
        return None if found is None else int(found)
    except ValueError:
        return None


def numbered(folder: Path, prefix: str) -> list[int] | None:
    """Numbers k of the entries `<prefix>k` of a folder, sorted; None when it cannot be listed."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return None
    return sorted(int(name[len(prefix) :]) for name in names if re.fullmatch(rf"{prefix}\d+", name))
