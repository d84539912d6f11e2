"""Files: publish so that a final name never shows unverified bytes; locks that name their holder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ds41ctl.core.errors import DeniedError, Ds41Error, IntegrityError, LockedError, NoSpaceError

CHUNK = 1 << 20
PART_SUFFIX = ".part"


def os_error(error: OSError, what: str) -> Ds41Error:
    """The error a user understands for an OSError met while doing `what`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return NoSpaceError(f"{what}: no space left", hints=("df -h", "free the space and run the same command again"))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(f"{what}: {error.strerror}")
    return Ds41Error(f"{what}: {error.strerror or error}")


def fsync_dir(path: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path, chunks: Iterable[bytes], *, sha256: str | None = None, mode: int = 0o644) -> str:
    """Write `chunks` under a temporary name in the same folder, fsync, compare the digest, rename, fsync the folder.

    Returns the sha256. Raises IntegrityError (nothing published) when it differs from `sha256`, NoSpaceError or
    DeniedError when the filesystem says no. The temporary file is removed on every failure that we live to see.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with os.fdopen(handle, "wb") as out:
                for chunk in chunks:
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            found = digest.hexdigest()
            if sha256 is not None and found != sha256:
                raise IntegrityError(f"{path.name}: sha256 {found} written, {sha256} expected; nothing was published")
            part.rename(path)
            fsync_dir(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise os_error(error, f"writing {path}") from error
    return found


def publish_json(path: Path, tree: Any, *, mode: int = 0o644) -> str:
    """Publish a JSON document (sorted keys, one final newline); returns its sha256."""
    text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return publish(path, [text.encode()], mode=mode)


def read_json(path: Path) -> Any | None:
    """Parsed JSON, None when the file is missing. Raises ValueError for anything that is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return json.loads(text)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock; raises LockedError at once, naming the holder, when someone else has it.

    The lock is flock: the kernel frees it when its holder dies, SIGKILL included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    note = path.with_name(path.name + ".holder")
    try:
        lock.acquire()
    except Timeout:
        holder = ""
        with contextlib.suppress(OSError):
            holder = note.read_text().strip()
        raise LockedError(
            f"another ds41ctl run is busy with {what}" + (f": {holder}" if holder else ""),
            hints=("wait for it to end, or stop it",),
        ) from None
    try:
        note.write_text(f"pid {os.getpid()}, {what}\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        lock.release()
