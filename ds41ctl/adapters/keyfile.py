"""The API key: read from a file that only its owner can read, never from a command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ds41ctl.core.errors import ConfigError, DeniedError, NotFoundError

SHORTEST = 32  # characters; a generated key has 64
_MAKE = "(umask 077; openssl rand -hex 32 > {})"


def read(path: Path | None) -> str | None:
    """The key, None without a file. Raises NotFoundError, DeniedError (others may read it) or ConfigError."""
    if path is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"no API key file {path}", hints=(_MAKE.format(path),)) from None
    except OSError as error:
        raise DeniedError(f"API key file {path}: {error.strerror}") from None
    with os.fdopen(handle, "rb") as source:
        state = os.fstat(source.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"API key file {path} is not a file")
        if state.st_mode & 0o077 or state.st_uid not in (0, os.getuid()):
            raise DeniedError(f"API key file {path} can be read by others", hints=(f"chmod 600 {path}",))
        raw = source.read(4097)
    key = raw.decode("ascii", errors="replace").removeprefix("\ufeff").strip()
    if len(raw) > 4096 or not key.isprintable() or not key.isascii() or any(mark in key for mark in " \\,"):
        raise ConfigError(f"API key file {path}: expected one line of printable characters without blank or comma")
    if len(key) < SHORTEST:
        raise ConfigError(
            f"API key file {path}: {len(key)} characters, at least {SHORTEST} expected", hints=(_MAKE.format(path),)
        )
    return key
