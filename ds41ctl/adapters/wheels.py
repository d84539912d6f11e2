"""Wheels: named right, of the right Python, and of the digest that a release's SHA256SUMS states."""

from __future__ import annotations

import re
from pathlib import Path

from ds41ctl.adapters import files
from ds41ctl.core.errors import IntegrityError, NotFoundError
from ds41ctl.core.profile import Engine

_SUM = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_WHEEL = re.compile(
    r"([A-Za-z0-9_.]+)-([A-Za-z0-9_.+!]+)(?:-\d\w*)?-(\w+(?:\.\w+)*)-(\w+(?:\.\w+)*)-(\w+(?:\.\w+)*)\.whl"
)


def read_sums(path: Path) -> dict[str, str]:
    """As parse_sums, of a file."""
    return parse_sums(path.read_text(encoding="utf-8", errors="replace"), str(path))


def parse_sums(text: str, where: str) -> dict[str, str]:
    """File name -> sha256 of a `sha256sum` file. Raises IntegrityError for any other line."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _SUM.fullmatch(line.strip())
        if match is None:
            if line.strip():
                raise IntegrityError(f"{where}: line {number} is no checksum: {line[:60]!r}")
            continue
        name = match[2].removeprefix("./")
        if found.get(name, match[1]) != match[1]:
            raise IntegrityError(f"{where}: {name} has two checksums")
        found[name] = match[1]
    return found


def entry(engine: Engine, sums: dict[str, str]) -> str:
    """Digest of the engine's wheel. Raises IntegrityError when the checksum file does not name it."""
    if engine.wheel not in sums:
        raise IntegrityError(f"{engine.wheel_sums} names no {engine.wheel}")
    return sums[engine.wheel]


def demand_name(engine: Engine) -> None:
    """Raise IntegrityError when the wheel's name is none, or says that it is for another Python."""
    match = _WHEEL.fullmatch(engine.wheel)
    if match is None:
        raise IntegrityError(f"{engine.wheel!r} is no wheel's name")
    tag = "cp" + engine.python.replace(".", "")
    if engine.python and tag not in match[3].split(".") and "py3" not in match[3].split("."):
        raise IntegrityError(f"{engine.wheel} is for {match[3]}, the profile's engine runs on Python {engine.python}")


def checked(path: Path, sha256: str, hints: tuple[str, ...] = ()) -> Path:
    """`path`, of that digest. Raises NotFoundError or IntegrityError."""
    if not path.is_file():
        raise NotFoundError(f"no {path.name} in {path.parent}", hints=hints)
    now = files.file_sha256(path)
    if now != sha256:
        raise IntegrityError(f"{path} is not the pinned wheel: sha256 {now[:12]}, {sha256[:12]} expected", hints=hints)
    return path
