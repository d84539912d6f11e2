"""Building the Engram store: the shard is read once, and on the way hashed and laid out as records, or copied."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files, kernels, numa, pack, safetensors, store, storeplace
from ds41ctl.core.engram import RECORD_BYTES, SCALE_BYTES, WEIGHT_BYTES, Geometry, Part, pages, placement
from ds41ctl.core.errors import IntegrityError, NoSpaceError
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import EngramTable

Progress = Callable[[str, dict[str, Any]], None]
ALLOCATE_BYTES = 64 << 20  # pages taken at a time: rows follow soon, and a build that must stop stops soon
PROGRESS_EVERY_S = 0.5
SHARD_MODE = 0o644  # public bytes, and a container's user may be anybody
HUGE_SHARE = 0.99  # of the bytes on huge pages: less is said aloud
_MADV_COLLAPSE = 25  # Linux 6.1: gathers small pages of a tmpfs into huge ones


@dataclass(frozen=True)
class Source:
    """One table and where its two tensors lie."""

    table: EngramTable
    shard: Path
    weight: safetensors.Tensor
    scale: safetensors.Tensor
    parts: tuple[Part, ...]
    boundaries: tuple[tuple[int, int], ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes to read."""
        return self.shard.stat().st_size


def sources(layout: Layout, geometry: Geometry) -> list[Source]:
    """Every table's tensors and how it is split over NUMA nodes, from the headers alone.

    Raises IntegrityError when a shard is missing, is not whole, or its tensors have another type or shape.
    """
    shards = store.of_shards(layout)
    nodes = storeplace.nodes_for(layout.profile.engram.storage)
    found = []
    for index, table in enumerate(layout.profile.model.engram):
        shard, weight, scale = pack.engram_tensors(layout.model_dir, table.layer)
        for tensor, dtype, width in ((weight, "F8_E4M3", WEIGHT_BYTES), (scale, "F8_E8M0", SCALE_BYTES)):
            if tensor.dtype != dtype or tensor.shape != (table.rows, width):
                raise IntegrityError(
                    f"{shard.name}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {dtype} [{table.rows}, {width}]",
                    hints=("ds41ctl fetch --verify",),
                )
            if tensor.end - tensor.begin != table.rows * width:
                raise IntegrityError(
                    f"{shard.name}: {tensor.name} has {tensor.end - tensor.begin} bytes, expected {table.rows * width}"
                )
        bounds = tuple(geometry.boundaries(index))
        # a copy is one file, and its pages go where the kernel puts them: its name and its bytes are the pack's
        parts = (Part(0, 0, table.rows, shard.stat().st_size),) if shards else placement(bounds, nodes)
        found.append(Source(table, shard, weight, scale, parts, bounds))
    return found


def build(layout: Layout, geometry: Geometry, progress: Progress) -> Path:
    """Build the store: a place for it, every table's files, the index of shards, the manifest last. Returns its folder.

    Whatever an earlier build left is given back first. On any failure nothing of this one is left but what the ledger
    names. Raises IntegrityError when a shard is not the pinned one or lacks its table, NoSpaceError before the first
    byte when memory or filesystem are too small, AlreadyRunningError while a process maps the store, DeniedError or
    ConfigError before anything is touched when no place can be made.
    """
    found = sources(layout, geometry)
    refused = storeplace.refusal(layout)
    if refused is not None:
        raise refused
    storeplace.release(layout)
    tables = [(source.table.layer, source.parts) for source in found]
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        progress(text, {})

    place = storeplace.find(layout, tables, say)
    progress(f"{place.rows}: {place.kind}", {"dir": str(place.rows)})
    loops = None if store.of_shards(layout) else kernels.loops(layout.dirs.cache)  # a copy lays no rows out
    if loops is not None and loops.note:
        progress(f"rows are laid out by plain Python, several times slower: {loops.note}", {})
    try:
        meter = _Meter(sum(source.shard_bytes for source in found), progress)
        layers, backings = [], []
        for source in found:
            item, backing = _build_table(layout, place, source, loops, meter)
            layers.append(item)
            backings += backing
        index = _publish_index(place, found) if store.of_shards(layout) else {}
        _publish(layout, place, layers, backings, notes, say, index)
    except BaseException:
        # what was taken is given back now when the system lets us, else by the next build or drop
        with contextlib.suppress(Exception):
            storeplace.release(layout)
        raise
    return place.home


class _Meter:
    """Progress of all tables together, with the time left."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.done, self._progress = total, 0, progress
        self._started = self._shown = time.monotonic()

    def add(self, layer: int, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self._shown < PROGRESS_EVERY_S and self.done < self.total:
            return
        self._shown = now
        rate = self.done / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate
        text = f"layer {layer}, {rate / 1e9:.1f} GB/s, {left:.0f} s left"
        self._progress(
            text, {"bytes": self.done, "total": self.total, "bytes_per_s": round(rate), "eta_s": round(left, 1)}
        )


def _build_table(
    layout: Layout, place: storeplace.Place, source: Source, loops: kernels.Loops | None, meter: _Meter
) -> tuple[dict[str, Any], list[numa.Backing]]:
    """One table's record files under their final names, and its entry of the manifest."""
    layer = source.table.layer
    split = len(source.parts) > 1
    with contextlib.ExitStack() as stack:
        made: list[_RecordFile] = []
        for part in source.parts:
            copied = source.table.shard if part.size else ""
            path = place.rows / (copied or store.record_file(layer, part.node if split else None))
            made.append(stack.enter_context(_record_file(path, part, place.kind, part.node if split else None)))
        digest = _fill(source, made, loops, meter)
        pin = {item.name: item for item in pack.expected(layout)}.get(source.shard.name)
        if pin is not None and digest != pin.sha256:
            raise IntegrityError(
                f"{source.shard.name}: sha256 {digest[:12]}... read, {pin.sha256[:12]}... pinned",
                hints=("ds41ctl fetch --repair",),
            )
        backings = [_settled(_part_name(file.path), file.view, place.kind) for file in made]
        for file in made:
            _part_name(file.path).rename(file.path)
    parts = [
        {
            "file": file.path.name,
            "node": file.part.node,
            "first_row": file.part.first_row,
            "rows": file.part.rows,
            "bytes": file.part.bytes,
        }
        for file in made
    ]
    item: dict[str, Any] = {
        "layer": layer,
        "rows": source.table.rows,
        "bytes": sum(file.part.bytes for file in made),
        "parts": parts,
        "source_file": source.shard.name,
        "source_size": source.shard_bytes,
        "source_sha256": digest,
        "revision": pin.revision if pin is not None else "",
    }
    if store.of_shards(layout):
        item |= {"weight_at": source.weight.begin, "scale_at": source.scale.begin}
    return {**item, "canaries": _canaries(place.rows, item, source.boundaries)}, backings


def _part_name(path: Path) -> Path:
    return path.with_name(path.name + files.PART_SUFFIX)


@dataclass
class _RecordFile:
    """A record file under its temporary name, mapped for writing; its pages are taken ahead of the rows."""

    part: Part
    path: Path
    view: mmap.mmap
    taken: list[Future[None]]
    checked: int = 0

    def need(self, end: int) -> None:
        """Wait for the pages of the first `end` bytes. Raises NoSpaceError when they are not to be had."""
        while self.checked < pages(end, ALLOCATE_BYTES):
            self.taken[self.checked].result()
            self.checked += 1


@contextlib.contextmanager
def _record_file(path: Path, part: Part, kind: storeplace.Kind, node: int | None) -> Iterator[_RecordFile]:
    """A new record file whose pages a thread of its own takes, from the first one on.

    A page that is not there when it is touched would be a SIGBUS; here it is an error with words.
    """
    target = _part_name(path)
    size = part.size or storeplace.padded(part, kind.page_bytes)  # a copy has the bytes of its shard, no more
    try:
        handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if part.size:
            os.fchmod(handle, SHARD_MODE)
    except OSError as error:
        raise files.os_error(error, f"making {target}") from error
    try:
        with _taking(path, size, kind, node):
            os.ftruncate(handle, size)
            view = mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)

        def take(begin: int) -> None:
            with _taking(path, size, kind, node), numa.pages_on(node):
                os.posix_fallocate(handle, begin, min(ALLOCATE_BYTES, size - begin))

        with view, ThreadPoolExecutor(1, "pages") as taker:
            taken = [taker.submit(take, begin) for begin in range(0, size, ALLOCATE_BYTES)]
            try:
                yield _RecordFile(part, path, view, taken)
            finally:
                taker.shutdown(wait=True, cancel_futures=True)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _taking(path: Path, size: int, kind: storeplace.Kind, node: int | None) -> Iterator[None]:
    """Puts words to what the system answers when there are no pages for a record file."""
    try:
        yield
    except OSError as error:
        where = f" on NUMA node {node}" if node is not None else ""
        if isinstance(files.os_error(error, ""), NoSpaceError):
            raise NoSpaceError(
                f"{size} bytes for {path.name}{where}: the pages are not to be had ({kind})",
                hints=("ds41ctl engram status", f"df -h {path.parent}", "free -h"),
            ) from error
        raise files.os_error(error, f"allocating {path}{where}") from error


def _fill(source: Source, record_files: list[_RecordFile], loops: kernels.Loops | None, meter: _Meter) -> str:
    """Read the shard once, lay its rows out or copy it, and return the sha256 of all its bytes.

    Hashing and taking pages, the slowest parts, run in threads of their own while this one reads and places the rows.
    """
    digest = hashlib.sha256()
    hashing: deque[Future[None]] = deque()
    copy = record_files[0] if source.parts[0].size else None
    at_byte = 0
    with ThreadPoolExecutor(1, "sha256") as hasher:
        for tensor, row, piece in store.shard_pieces(source.shard, source.weight, source.scale):
            hashing.append(hasher.submit(digest.update, piece))
            if copy is not None:
                if at_byte + len(piece) > len(copy.view):
                    raise IntegrityError(f"{source.shard.name} grew while it was read")
                copy.need(at_byte + len(piece))
                copy.view[at_byte : at_byte + len(piece)] = piece
                at_byte += len(piece)
            elif tensor is not None and loops is not None:
                width = WEIGHT_BYTES if tensor is source.weight else SCALE_BYTES
                offset = 0 if tensor is source.weight else WEIGHT_BYTES
                for file in record_files:
                    first = file.part.first_row
                    begin, end = max(row, first), min(row + len(piece) // width, first + file.part.rows)
                    if begin < end:
                        file.need((end - first) * RECORD_BYTES)
                        at = (begin - first) * RECORD_BYTES + offset
                        loops.scatter(file.view, at, piece[(begin - row) * width : (end - row) * width], width)
            if len(hashing) == store.BUFFERS:
                hashing.popleft().result()  # its buffer is the next one to be read into
            meter.add(source.table.layer, len(piece))
    for file in record_files:
        file.need(len(file.view))
    return digest.hexdigest()


def _settled(path: Path, view: mmap.mmap, kind: storeplace.Kind) -> numa.Backing:
    """What really holds the pages of a filled file, after asking once for what is missing."""
    if kind.storage == "disk":
        view.flush()
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return numa.Backing(len(view), 0, 4, {})
    path = path.resolve()  # smaps names files by their real path
    found = numa.backing(path)
    if kind.page != "4K" and found.huge_share < HUGE_SHARE and kind.storage == "tmpfs":
        with contextlib.suppress(OSError):  # an older kernel, or no free huge page: measured again below
            view.madvise(_MADV_COLLAPSE)
        found = numa.backing(path)
    return found


def _canaries(rows: Path, item: dict[str, Any], boundaries: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Digests of the first, a middle and the last record of every sub-table. All zero is refused."""
    found = []
    for number, (first, last) in enumerate(boundaries):
        records = {row: store.read_record(rows, item, row) for row in sorted({first, (first + last) // 2, last})}
        if not any(any(record[:WEIGHT_BYTES]) for record in records.values()):
            raise IntegrityError(
                f"layer {item['layer']}: rows {', '.join(map(str, records))} of sub-table {number} are all zero in "
                f"{item['source_file']}: that table was never filled",
                hints=("ds41ctl fetch --verify",),
            )
        found += [{"row": row, "sha256": hashlib.sha256(record).hexdigest()} for row, record in records.items()]
    return found


def _publish_index(place: storeplace.Place, found: list[Source]) -> dict[str, Any]:
    """The index of a store of shards: its tables, by the names that the pack gives them, and no other tensor.

    Written when every copy is whole: who finds a table here finds its bytes.
    """
    tensors = [(tensor, source.table.shard) for source in found for tensor in (source.weight, source.scale)]
    tree = {
        "metadata": {"total_size": sum(tensor.end - tensor.begin for tensor, _ in tensors)},
        "weight_map": {tensor.name: shard for tensor, shard in tensors},
    }
    path = place.rows / pack.INDEX
    digest = files.publish_json(path, tree, mode=SHARD_MODE)
    path.chmod(SHARD_MODE)  # whatever the umask
    return {"index": {"file": pack.INDEX, "sha256": digest}}


def _publish(
    layout: Layout,
    place: storeplace.Place,
    layers: list[dict[str, Any]],
    backings: list[numa.Backing],
    notes: list[str],
    say: Callable[[str], None],
    index: dict[str, Any],
) -> None:
    total = sum(item.bytes for item in backings)
    share = sum(item.huge_bytes for item in backings) / total if total else 0.0
    node_bytes: dict[int, int] = {}
    for item in backings:
        for node, count in item.node_bytes.items():
            node_bytes[node] = node_bytes.get(node, 0) + count
    kind = place.kind
    if kind.storage == "disk":
        page_kind = "on disk: rows are read from the drive"
    else:
        fstype = "hugetlbfs" if kind.storage == "hugetlb" else "tmpfs"
        page = kind.page if share >= HUGE_SHARE else f"{share:.0%} on {kind.page}, rest 4K" if share else "4K"
        page_kind = f"{fstype} {page}"
        if kind.page != "4K" and share < HUGE_SHARE:
            say(f"only {share:.0%} of the bytes are on huge pages: the gather will be slower")
    relative = place.rows.relative_to(place.home) if place.rows.is_relative_to(place.home) else place.rows
    files.publish_json(
        place.home / store.MANIFEST,
        {
            **index,
            "format": store.FORMAT,
            "kind": layout.profile.engram.format,
            "record_bytes": 0 if index else RECORD_BYTES,  # 0: a reader of records refuses it
            "storage": kind.storage,
            "page_kind": page_kind,
            "page_bytes": kind.page_bytes,
            "huge_share": round(share, 4),
            "node_bytes": {str(node): count for node, count in sorted(node_bytes.items())},
            "memory_backed": kind.storage != "disk",
            "boot_id": store.boot_id(),
            "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "profile": layout.name,
            "data_dir": "" if str(relative) == "." else str(relative),
            "tensor_parallel": 1,
            "notes": notes,
            "layers": layers,
        },
        mode=0o600,
    )
