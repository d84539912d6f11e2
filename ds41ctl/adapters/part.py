"""Part: the bytes of a file that are still arriving, hashed in order as they come, and the journal to go on from.

`<name>.<digest>.part` lies beside its target, `<name>.<digest>.part.journal` beside that. A journal line claims
spans only after their bytes are durable, so whatever kills us, what the last whole line claims is there. What was
received and not yet claimed is bounded by UNCLAIMED_MAX: that much is fetched again after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.adapters import files
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.extents import Extents

SUFFIX = files.PART_SUFFIX
JOURNAL_SUFFIX = ".journal"
TENSORS = "tensors"  # kind of a digest that names a plan, not bytes
CLAIM_AT = 16 << 20  # received bytes after which a claim is made
UNCLAIMED_MAX = (
    32 << 20
)  # writers wait there: with what sockets (or Xet's two streams) hold, a kill costs less than 64 MiB
_HASH_STEP = 4 << 20
_WRITE_STEP = 4 << 20  # Xet hands out pieces of tens of MiB


@dataclass(frozen=True)
class Identity:
    """What the finished file must be: `digest` is `sha256:HEX`, `git:HEX`, or `tensors:HEX` of the plan for a file
    that is made of some tensors of another; `size` in bytes. `sha256` is what a `tensors` file must have, '' while
    nothing knows it."""

    size: int
    digest: str
    sha256: str = ""

    @property
    def tag(self) -> str:
        """Part of the part's name: another pin never goes on from this one's bytes."""
        return self.digest.partition(":")[2][:16]


def part_path(target: Path, identity: Identity) -> Path:
    """Where the arriving bytes of `target` lie."""
    return target.with_name(f"{target.name}.{identity.tag}{SUFFIX}")


def claimed(target: Path, identity: Identity) -> int:
    """Bytes a killed run left that need not be fetched again."""
    part = part_path(target, identity)
    try:
        size = part.stat().st_size
        raw = part.with_name(part.name + JOURNAL_SUFFIX).read_bytes()
    except OSError:
        return 0
    return _clipped(_read_journal(raw, identity)[0], min(size, identity.size)).total


def _line(tree: object) -> bytes:
    text = json.dumps(tree, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _read_journal(raw: bytes, identity: Identity) -> tuple[Extents, int]:
    """(spans the last whole line claims, length of the valid beginning); (nothing, 0) for another file's journal."""
    spans, valid = Extents(), 0
    for number, line in enumerate(raw.split(b"\n")[:-1]):
        crc, _, text = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            break
        try:
            tree = json.loads(text)
            if number == 0:
                if tree != {"size": identity.size, "digest": identity.digest}:
                    return Extents(), 0
            else:
                spans = Extents((int(begin), int(end)) for begin, end in tree)
        except (ValueError, TypeError):
            break
        valid += len(line) + 1
    return spans, valid


def _clipped(spans: Extents, size: int) -> Extents:
    return Extents((begin, min(end, size)) for begin, end in spans.spans if begin < size)


class Part:
    """An open part. `write` may be called from several threads; `finish` publishes or raises.

    Every method raises OSError as the filesystem gives it; an error met by the two helper threads (hashing,
    claiming) is raised by the next call.
    """

    def __init__(self, target: Path, identity: Identity, *, git: bool = False) -> None:
        self.target, self.identity = target, identity
        self.path = part_path(target, identity)
        self.journal = self.path.with_name(self.path.name + JOURNAL_SUFFIX)
        self._digest = files.Digest(identity.size, git=git)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._hashed = 0
        self._unclaimed = 0
        self.waiting = 0  # writers that wait for a claim, that is for the disk
        self._pending = 0  # bytes of writes that have begun and not ended
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            self._log = os.open(
                self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
            try:
                self._spans = self._resume()
            except BaseException:
                os.close(self._log)
                raise
        except BaseException:
            os.close(self._fd)
            raise
        self.resumed = self._spans.total
        helpers: tuple[Callable[[], None], ...] = (self._hash, self._claim)
        self._threads = [threading.Thread(target=self._guard, args=(work,), daemon=True) for work in helpers]
        for thread in self._threads:
            thread.start()

    def _resume(self) -> Extents:
        raw = b""
        while chunk := os.read(self._log, 1 << 20):
            raw += chunk
        spans, valid = _read_journal(raw, self.identity)
        size = os.fstat(self._fd).st_size
        spans = _clipped(spans, min(size, self.identity.size))
        os.ftruncate(self._log, valid)
        if valid == 0:
            os.ftruncate(self._fd, 0)
            _write_all(self._log, _line({"size": self.identity.size, "digest": self.identity.digest}))
            os.fsync(self._log)
            files.fsync_dir(self.path.parent)
        elif size > self.identity.size:
            os.ftruncate(self._fd, self.identity.size)
        return spans

    # ---- from the workers

    @property
    def received(self) -> int:
        """Bytes that are there, claimed or not."""
        with self._changed:
            return self._spans.total

    def missing(self) -> list[tuple[int, int]]:
        """The spans still to be received."""
        with self._changed:
            return self._spans.missing(self.identity.size)

    def write(self, offset: int, data: bytes) -> None:
        """Take bytes for `offset`; waits while too much is not claimed yet."""
        if offset < 0 or offset + len(data) > self.identity.size:
            raise IntegrityError(f"{self.target.name}: more bytes arrive than the pinned {self.identity.size}")
        view = memoryview(data)
        for begin in range(0, len(view), _WRITE_STEP):
            self._write(offset + begin, view[begin : begin + _WRITE_STEP])

    def _write(self, offset: int, view: memoryview) -> None:
        """One piece; a writer that must wait makes a claim due."""
        length = len(view)

        def too_much() -> bool:
            return self._unclaimed + length > UNCLAIMED_MAX and self._unclaimed > 0 and not self._stopped()

        with self._changed:
            if too_much():
                self.waiting += 1
                self._changed.notify_all()
                while too_much():
                    self._changed.wait()
                self.waiting -= 1
            self._check()
            self._unclaimed += length
            self._pending += length
        at = offset
        try:
            while view:
                count = os.pwrite(self._fd, view, at)
                view, at = view[count:], at + count
        finally:
            with self._changed:
                self._pending -= length
                self._spans.add(offset, at)
                hash_more = self._spans.front - self._hashed >= _HASH_STEP or self._spans.total == self.identity.size
                if hash_more or self._unclaimed >= CLAIM_AT or self.waiting or self._closed:
                    self._changed.notify_all()

    def finish(self, before: Callable[[str], None] = lambda sha256: None) -> str:
        """Publish the whole file under its name; returns its sha256, which `before` is told before the name is given.

        Raises IntegrityError, publishing nothing, when the digest is not the pinned one.
        """
        with self._changed:
            self._changed.notify_all()
            while self._hashed < self.identity.size and not self._stopped():
                self._changed.wait()
            self._check()
        kind, _, wanted = self.identity.digest.partition(":")
        found = self._digest.git_oid if kind == "git" else self._digest.sha256
        if kind == TENSORS:
            kind, wanted = "sha256", self.identity.sha256 or found
        if found != wanted:
            raise IntegrityError(
                f"{self.target.name}: {kind} {found} arrived, {wanted} is pinned; nothing was published"
            )
        if os.fstat(self._fd).st_size != self.identity.size:
            raise IntegrityError(f"{self.target.name}: the part is not {self.identity.size} bytes long")
        os.fsync(self._fd)
        before(self._digest.sha256)
        self.path.rename(self.target)
        files.fsync_dir(self.target.parent)
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.journal.unlink()
        return self._digest.sha256

    def discard(self) -> None:
        """Close and remove everything."""
        self.close()
        for path in (self.path, self.journal):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def keep(self) -> None:
        """Close so that a later run goes on from here: one last claim."""
        with self._changed:
            healthy = not self._stopped()
        if healthy:
            self._make_claim()
        self.close()

    def close(self) -> None:
        """Close without another claim; safe to repeat."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            while self._pending:
                self._changed.wait()
        for thread in self._threads:
            thread.join()
        os.close(self._fd)
        os.close(self._log)

    # ---- helper threads

    def _stopped(self) -> bool:
        return self._closed or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ValueError("the part is closed")

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _hash(self) -> None:
        """Follow the gapless beginning of the file, reading it back from the page cache."""
        buffer = bytearray(files.HASH_CHUNK)
        view = memoryview(buffer)
        while self._hashed < self.identity.size:
            with self._changed:
                while not self._stopped():
                    front = self._spans.front
                    if front - self._hashed >= _HASH_STEP or front == self.identity.size:
                        break
                    self._changed.wait()
                if self._stopped():
                    return
            while self._hashed < front and not self._closed:
                count = os.preadv(self._fd, [view[: min(len(buffer), front - self._hashed)]], self._hashed)
                if count == 0:
                    raise IntegrityError(f"{self.path.name} was cut while it was written")
                self._digest.update(view[:count])
                self._hashed += count
        with self._changed:
            self._changed.notify_all()

    def _claim(self) -> None:
        while True:
            with self._changed:
                while not self._claim_is_due() and not self._stopped():
                    self._changed.wait()
                if self._stopped():
                    return
            self._make_claim()

    def _claim_is_due(self) -> bool:
        return self._unclaimed - self._pending >= (1 if self.waiting else CLAIM_AT)

    def _make_claim(self) -> None:
        with self._changed:
            spans, taken = self._spans.copy(), self._unclaimed - self._pending
        os.fdatasync(self._fd)
        _write_all(self._log, _line(spans.spans))
        os.fdatasync(self._log)
        with self._changed:
            self._unclaimed -= taken
            self._changed.notify_all()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
