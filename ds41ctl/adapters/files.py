"""Files: publish so that a final name never shows unverified bytes; digests; locks that name their holder."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ds41ctl.core.errors import ConfigError, DeniedError, Ds41Error, IntegrityError, LockedError, NoSpaceError
from ds41ctl.core.masking import mask_argv

CHUNK = 1 << 20
HASH_CHUNK = 4 << 20  # measured: 1 MiB and below lose 2 to 5 % of OpenSSL's speed to calls, more gains nothing
PART_SUFFIX = ".part"


def os_error(error: OSError, what: str) -> Ds41Error:
    """The error a user understands for an OSError met while doing `what`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return NoSpaceError(f"{what}: no space left", hints=("df -h", "free the space and run the same command again"))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(f"{what}: {error.strerror}")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return ConfigError(f"{what}: {error.strerror}", hints=("ds41ctl config   # where each folder comes from",))
    if error.errno == errno.EIO:
        return Ds41Error(f"{what}: {error.strerror}", hints=("dmesg | tail   # what the disk says",))
    return Ds41Error(f"{what}: {error.strerror or error}")


def fsync_dir(path: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part(path: Path) -> Path:
    """Temporary name under which `publish` writes."""
    return path.with_name(path.name + PART_SUFFIX)


def publish(path: Path, chunks: Iterable[bytes], *, sha256: str | None = None, mode: int = 0o644) -> str:
    """Write `chunks` under a temporary name in the same folder, fsync, compare the digest, rename, fsync the folder.

    Returns the sha256. Raises IntegrityError (nothing published) when it differs from `sha256`, NoSpaceError or
    DeniedError when the filesystem says no. The temporary file is removed on every failure that we live to see.
    """
    temporary = part(path)
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
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
            temporary.rename(path)
            fsync_dir(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
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


class Digest:
    """sha256 of `size` bytes, and the id git gives them as a blob when `git` asks for it."""

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # git's object ids are SHA-1 by definition; files that matter are pinned by sha256 beside it
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """Hex digest of what was taken."""
        return self._sha256.hexdigest()

    @property
    def git_oid(self) -> str:
        """git blob id, '' when it was not asked for."""
        return "" if self._git is None else self._git.hexdigest()


def file_digest(path: Path, *, git: bool = False, on_bytes: Callable[[int], None] | None = None) -> Digest:
    """Digest of a file's bytes; the file may not change meanwhile (OSError ESTALE when it does).

    `on_bytes` is told the length of every piece read and may raise to end the work.
    """
    buffer = bytearray(HASH_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as source:
        before = os.fstat(source.fileno())
        digest = Digest(before.st_size, git=git)
        while count := source.readinto(buffer):
            digest.update(view[:count])
            if on_bytes is not None:
                on_bytes(count)
        after = os.fstat(source.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError(errno.ESTALE, "it changed while it was read", str(path))
    return digest


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    return file_digest(path).sha256


def record_digest(sha256: str) -> str:
    """A hexadecimal sha256 as the RECORD of a distribution writes it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


@contextlib.contextmanager
def locked(path: Path, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock; raises LockedError (after `wait_s`), naming the holder, when someone else has it.

    The lock is flock: the kernel frees it when its holder dies, SIGKILL included.
    """
    note = path.with_name(path.name + ".holder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=wait_s)
        lock.acquire()
    except OSError as error:
        if isinstance(error, Timeout):
            raise _held(note, what) from None
        raise os_error(error, f"locking {path}") from None
    try:
        command = shlex.join(mask_argv([Path(sys.argv[0]).name, *sys.argv[1:]]))[:200]
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # the lock holds without its note, a full disk must not stop a run
            note.write_text(f"pid {os.getpid()} ({command}), {what}, since {since}\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        lock.release()


def _held(note: Path, what: str) -> LockedError:
    holder, deadline = "", time.monotonic() + 0.5
    while not holder and time.monotonic() < deadline:  # the holder writes its note a moment after it has the lock
        with contextlib.suppress(OSError):
            holder = note.read_text().strip()
        if not holder:
            time.sleep(0.02)
    return LockedError(
        f"another ds41ctl run is busy with {what}" + (f": {holder}" if holder else ""),
        hints=("wait for it to end, or stop it",),
    )
