"""Single tensors of a Hub's safetensors file: its header, and a stream of a new file that holds the wanted ones.

The Hub states a digest of whole files alone. What binds ranges to the pinned file is what every answer says (see
download.HttpFile), so the header is kept with the ETag it came under: what arrives later must come under the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.adapters import download, files, pins
from ds41ctl.adapters.hub import Hub
from ds41ctl.adapters.pack import SHARD
from ds41ctl.adapters.safetensors import WORD, header_length, parse_header
from ds41ctl.core.errors import ConfigError
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import PinnedFile, Subset, SubsetFile, chosen
from ds41ctl.core.profile import HubSource
from ds41ctl.core.subset import Piece, Plan, plan

HEADS_AT_ONCE = 8  # two small requests each: their round trips overlap


@dataclass(frozen=True)
class Head:
    """Length word and header of a file of the Hub, and the ETag they came under ('' when the server gives none)."""

    raw: bytes
    etag: str

    @property
    def sha256(self) -> str:
        """Digest of `raw`."""
        return hashlib.sha256(self.raw).hexdigest()


# ---- headers


def ensure(layout: Layout, hub: Hub, note: Callable[[str], None]) -> None:
    """Read the headers of every source that leaves tensors out, and keep what they leave.

    Raises IntegrityError for a header that is none, ConfigError for globs that leave nothing out, and what
    download.HttpFile raises.
    """
    known, trees = pins.subsets(layout), pins.trees(layout)
    sources = [s for s in layout.profile.model.hub_sources if s.leave_out]
    for source in sources:
        if (source.repo, source.revision, source.leave_out) in known:
            continue
        tree = trees[source.repo, source.revision]
        shards = [item for item in chosen(tree, source.patterns) if item.path.endswith(SHARD)]
        hub.demand_online(f"the headers of {source.repo}")
        note(f"headers of {len(shards)} shards of {source.repo}")
        client = download.Client(hub.endpoint, hub.token, hub.limits)
        try:
            pins.keep(layout, [_subset(layout, hub, client, source, shards)])
        finally:
            client.close()


def _subset(
    layout: Layout, hub: Hub, client: download.Client, source: HubSource, shards: Sequence[PinnedFile]
) -> Subset:
    def entry(item: PinnedFile) -> SubsetFile:
        head = load(layout, source.repo, source.revision, item)
        if head is None:
            head = fetch_head(layout, hub, client, source.repo, source.revision, item)
        found = plan_of(head, item, source.leave_out)
        whole = found.kept == found.tensors
        return SubsetFile(
            path=item.path,
            head_sha256=head.sha256,
            tensors=found.tensors,
            kept=found.kept,
            size=item.size if whole else found.size if found.kept else 0,
            plan=found.digest(item.digest, head.sha256),
        )

    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        entries = tuple(pool.map(entry, shards))
    if all(item.whole for item in entries):
        raise ConfigError(f"leave_out {list(source.leave_out)} leaves no tensor of {source.repo} out")
    return Subset(repo=source.repo, revision=source.revision, leave_out=source.leave_out, files=entries)


def plan_of(head: Head, item: PinnedFile, leave_out: Sequence[str]) -> Plan:
    """How the new file is made. Raises IntegrityError when the header is not that of a whole safetensors file."""
    tensors, metadata = parse_header(head.raw[WORD:], item.size, item.path)
    return plan(tensors, metadata, leave_out)


def fetch_head(layout: Layout, hub: Hub, client: download.Client, repo: str, revision: str, item: PinnedFile) -> Head:
    """Ask for the header by two ranges and keep it."""
    source = http_file(hub, client, repo, revision, item)
    word = _bytes(source, 0, min(WORD, item.size), hub.limits) if item.size else b""
    raw = word + _bytes(source, WORD, WORD + header_length(word, item.size, item.path), hub.limits)
    head = Head(raw, source.etag)
    note = json.dumps({"etag": head.etag, "sha256": head.sha256})
    files.publish(_kept(layout, repo, revision, item), [note.encode() + b"\n", raw])
    return head


def _bytes(source: download.HttpFile, begin: int, end: int, limits: download.Limits) -> bytes:
    """A small range, asked for again after faults that may pass."""
    for attempt in range(1, limits.attempts + 1):
        try:
            with source.open(begin, end) as stream:
                return b"".join(stream)
        except download.Fault as fault:
            if attempt == limits.attempts:
                raise
            time.sleep(download.pause(limits, attempt, fault.retry_after))
    raise AssertionError("unreachable")


def http_file(
    hub: Hub, client: download.Client, repo: str, revision: str, item: PinnedFile, *, etag: str = ""
) -> download.HttpFile:
    """The Hub's file for ranges that nothing checks later."""
    pinned = download.Pinned(item.path, item.size, revision, (item.digest,))
    return download.HttpFile(client, hub.url(repo, revision, item.path), pinned, ranges_alone=True, etag=etag)


def _kept(layout: Layout, repo: str, revision: str, item: PinnedFile) -> Path:
    name = hashlib.sha256(f"{repo} {revision} {item.path} {item.digest}".encode()).hexdigest()
    return layout.heads_dir / name[:32]


def load(layout: Layout, repo: str, revision: str, item: PinnedFile) -> Head | None:
    """The header as it was kept, None when it was not, or its file is damaged."""
    try:
        note, _, raw = _kept(layout, repo, revision, item).read_bytes().partition(b"\n")
        tree = json.loads(note)
        head = Head(raw, str(tree["etag"]))
        return head if tree["sha256"] == head.sha256 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget(layout: Layout, repo: str, revision: str, item: PinnedFile) -> None:
    """The next run asks for the header again."""
    _kept(layout, repo, revision, item).unlink(missing_ok=True)


# ---- streams


class SomeTensors:
    """A source of the new file: what it asks of the Hub's file are the ranges of the plan."""

    def __init__(self, inner: download.Source, plan: Plan) -> None:
        self._inner, self._plan = inner, plan
        self.label = inner.label

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[download.Stream]:
        """Bytes [begin, end) of the new file. Raises, here or while it is read, what the inner source raises."""
        yield _Joined(self._inner, self._plan, begin, end)


class _Joined:
    """The header from memory, then range after range; what lies between wanted pieces is read and dropped."""

    def __init__(self, inner: download.Source, plan: Plan, begin: int, end: int) -> None:
        self._inner, self._plan, self._begin, self._end = inner, plan, begin, end
        self._stream: download.Stream | None = None
        self._cancelled = False

    def __iter__(self) -> Iterator[bytes]:
        head = self._plan.head[self._begin : self._end]
        if head:
            yield head
        for first, last, pieces in self._plan.requests(self._begin, self._end):
            with self._inner.open(first, last) as stream:
                self._stream = stream
                if self._cancelled:
                    raise download.Fault(f"{self._inner.label}: cancelled")
                yield from _wanted(stream, first, pieces)

    def cancel(self) -> None:
        """End the range that is read now, and ask for no other."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


def _wanted(stream: download.Stream, at: int, pieces: tuple[Piece, ...]) -> Iterator[bytes]:
    """What of a stream that begins at `at` belongs to the pieces."""
    number = 0
    for chunk in stream:
        end = at + len(chunk)
        while number < len(pieces) and pieces[number].source < end:
            begin, stop = pieces[number].source, pieces[number].source + pieces[number].length
            if (piece := chunk[max(begin - at, 0) : stop - at]) and stop > at:
                yield piece
            if stop > end:
                break
            number += 1
        at = end
