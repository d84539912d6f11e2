"""Small texts of other people: a file, or a page fetched over https, bounded in size and time."""

from __future__ import annotations

from pathlib import Path

import httpx2

from ds41ctl.core.errors import ConfigError, NetworkError, NotFoundError

SECONDS = 30.0
REDIRECTS = 3


def read(source: str, largest: int) -> bytes:
    """The bytes behind a path or an https URL. Raises NotFoundError, ConfigError (another scheme, too big) or
    NetworkError."""
    if "://" not in source:
        return read_file(Path(source), largest)
    if not source.startswith("https://"):
        raise ConfigError(f"{source[:80]}: https:// or a file expected")
    try:
        with (
            httpx2.Client(timeout=SECONDS, follow_redirects=True, max_redirects=REDIRECTS) as client,
            client.stream("GET", source) as reply,
        ):
            if reply.status_code != 200:
                raise NetworkError(f"{source[:80]}: HTTP status {reply.status_code}")
            if reply.url.scheme != "https":
                raise ConfigError(f"{source[:80]}: was redirected to {reply.url.scheme}")
            found = b""
            for piece in reply.iter_bytes():
                found += piece
                if len(found) > largest:
                    raise ConfigError(f"{source[:80]}: more than {largest} bytes")
            return found
    except httpx2.HTTPError as error:
        raise NetworkError(f"{source[:80]}: {str(error)[:120] or type(error).__name__}") from None


def read_file(path: Path, largest: int = 1 << 20) -> bytes:
    """A small file's bytes."""
    try:
        with path.open("rb") as source:
            found = source.read(largest + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(found) > largest:
        raise ConfigError(f"{path}: more than {largest} bytes")
    return found
