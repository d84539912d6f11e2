"""Wheels from a folder: named right, of the right Python, and of the digest that the release's SHA256SUMS states."""

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
    """File name -> sha256 of a `sha256sum` file. Raises IntegrityError for any other line."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _SUM.fullmatch(line.strip())
        if match is None:
            if line.strip():
                raise IntegrityError(f"{path}: line {number} is no checksum: {line[:60]!r}")
            continue
        name = match[2].removeprefix("./")
        if found.get(name, match[1]) != match[1]:
            raise IntegrityError(f"{path}: {name} has two checksums")
        found[name] = match[1]
    return found


def pinned_sums(folder: Path, engine: Engine) -> dict[str, str]:
    """The release's checksum file, itself of the digest that the profile pins."""
    path = folder / engine.wheel_sums
    if not path.is_file():
        raise NotFoundError(f"no {engine.wheel_sums} in {folder}", hints=(f"get it from {engine.wheel_url}",))
    now = files.file_sha256(path)
    if not engine.wheel_sums_sha256:
        raise IntegrityError(
            f"{path} has sha256 {now}, and the profile pins none: nothing says that it is the release's",
            hints=("compare it with the release's page, then set engine.wheel_sums_sha256 in the profile",),
        )
    if now != engine.wheel_sums_sha256:
        raise IntegrityError(
            f"{path} is not the release's: sha256 {now[:12]}, {engine.wheel_sums_sha256[:12]} pinned",
            hints=(f"get it again from {engine.wheel_url}",),
        )
    return read_sums(path)


def engine_wheel(folder: Path, engine: Engine) -> Path:
    """The engine's wheel, checked: its name, its Python tag, its digest. Raises NotFoundError or IntegrityError."""
    path = folder / engine.wheel
    match = _WHEEL.fullmatch(engine.wheel)
    if match is None:
        raise IntegrityError(f"{engine.wheel!r} is no wheel's name")
    tag = "cp" + engine.python.replace(".", "")
    if engine.python and tag not in match[3].split(".") and "py3" not in match[3].split("."):
        raise IntegrityError(f"{engine.wheel} is for {match[3]}, the profile's engine runs on Python {engine.python}")
    if not path.is_file():
        raise NotFoundError(f"no {engine.wheel} in {folder}", hints=(f"get it from {engine.wheel_url}",))
    wanted = engine.wheel_sha256
    if not wanted:
        sums = pinned_sums(folder, engine)
        if engine.wheel not in sums:
            raise IntegrityError(f"{engine.wheel_sums} names no {engine.wheel}")
        wanted = sums[engine.wheel]
    now = files.file_sha256(path)
    if now != wanted:
        raise IntegrityError(
            f"{path} is not the pinned wheel: sha256 {now[:12]}, {wanted[:12]} expected",
            hints=(f"get it again from {engine.wheel_url}",),
        )
    return path
