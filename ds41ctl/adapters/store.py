"""The Engram store: every row as one 264-byte record in memory-backed files, with a manifest that proves itself."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files, mounts, pack, proc
from ds41ctl.core.engram import RECORD_BYTES, SCALE_BYTES, WEIGHT_BYTES, Geometry
from ds41ctl.core.errors import (
    AlreadyRunningError,
    DeniedError,
    IntegrityError,
    NoSpaceError,
    UnsupportedError,
)
from ds41ctl.core.facts import StoreFacts
from ds41ctl.core.layout import Layout

FORMAT = 1
MANIFEST = "manifest.json"
MIB = 1 << 20
ROWS_AT_ONCE = 16384  # 4.1 MiB of records: stays in the last-level cache while 264 columns are placed
MOUNT_SOURCE = "ds41ctl"  # how our own tmpfs mounts are told from anybody else's
Progress = Callable[[str, dict[str, Any]], None]


def record_file(layer: int) -> str:
    """File name of a layer's records."""
    return f"layer-{layer:03d}.engram"


def needed_bytes(layout: Layout) -> int:
    """Bytes of all records of the profile's tables."""
    return sum(table.rows * RECORD_BYTES for table in layout.profile.model.engram)


def locate(layout: Layout) -> Path:
    """The store folder: the candidate that has a manifest, else the first one."""
    for folder in layout.store_dirs:
        if (folder / MANIFEST).is_file():
            return folder
    return layout.store_dirs[0]


def boot_id() -> str:
    """This boot's id: what a memory-backed store is bound to."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def manifest(folder: Path) -> dict[str, Any]:
    """Parsed manifest. Raises IntegrityError when it is missing, not JSON or of another format."""
    try:
        tree = files.read_json(folder / MANIFEST)
    except (ValueError, OSError) as error:
        raise IntegrityError(f"the Engram store's manifest cannot be read: {error}", hints=_REBUILD) from None
    if tree is None:
        raise IntegrityError(f"no Engram store in {folder}", hints=("ds41ctl engram build",))
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("record_bytes") != RECORD_BYTES:
        raise IntegrityError(f"{folder / MANIFEST} is not a store of format {FORMAT}", hints=_REBUILD)
    return tree


_REBUILD = ("ds41ctl engram drop", "ds41ctl engram build")


def problem(layout: Layout, folder: Path) -> str:
    """'' when manifest, boot id, sizes, rows, source digests and canary records hold; else one line."""
    try:
        tree = manifest(folder)
        if tree.get("memory_backed") and tree.get("boot_id") != boot_id():
            return "built before the last reboot: its memory is gone"
        by_layer = {item["layer"]: item for item in tree["layers"]}
        for table in layout.profile.model.engram:
            item = by_layer.get(table.layer)
            if item is None:
                return f"layer {table.layer} is missing"
            if item["rows"] != table.rows:
                return f"layer {table.layer} has {item['rows']} rows, the profile says {table.rows}"
            path = folder / item["file"]
            if not path.is_file() or path.stat().st_size < table.rows * RECORD_BYTES:
                return f"{item['file']} is missing or shorter than {table.rows} records"
            bad = _bad_canary(path, item["canaries"])
            if bad is not None:
                return f"layer {table.layer}: record {bad} differs from what was built"
            stale = _source_changed(layout.model_dir, item)
            if stale:
                return stale
    except IntegrityError as error:
        return error.message
    except (KeyError, TypeError, OSError) as error:
        return f"manifest is damaged: {error!r}"
    return ""


def _bad_canary(path: Path, canaries: list[dict[str, Any]]) -> int | None:
    with path.open("rb") as source:
        for canary in canaries:
            source.seek(canary["row"] * RECORD_BYTES)
            if hashlib.sha256(source.read(RECORD_BYTES)).hexdigest() != canary["sha256"]:
                return int(canary["row"])
    return None


def _source_changed(model_dir: Path, item: dict[str, Any]) -> str:
    """A sentence when the shard the store was built from is now another one (size or verified digest)."""
    shard = model_dir / item["source_file"]
    if not shard.is_file():
        return ""  # the store is complete without its shard; the pack check says that the shard is missing
    if shard.stat().st_size != item["source_size"]:
        return f"{shard.name} changed since the store was built"
    sidecar = shard.with_name(shard.name + pack.SIDECAR)
    with contextlib.suppress(OSError):
        if sidecar.read_text().split(" ", 1)[0] != item["source_sha256"]:
            return f"{shard.name} was replaced since the store was built"
    return ""


def inspect(layout: Layout) -> StoreFacts:
    """Facts about the store as it lies there."""
    folder = locate(layout)
    mount = mounts.mount_of(folder)
    exists = (folder / MANIFEST).is_file()
    tree: dict[str, Any] = {}
    with contextlib.suppress(IntegrityError):
        tree = manifest(folder)
    present = sum(path.stat().st_size for path in folder.glob("layer-*.engram")) if folder.is_dir() else 0
    return StoreFacts(
        dir=str(folder),
        exists=exists,
        storage=layout.profile.engram.storage,
        fstype=mount.fstype,
        page_kind=str(tree.get("page_kind", "")),
        layers=tuple(int(item["layer"]) for item in tree.get("layers", ()) if isinstance(item, dict)),
        bytes_needed=needed_bytes(layout),
        bytes_present=present,
        problem=problem(layout, folder) if exists else "",
    )


def build(layout: Layout, geometry: Geometry, progress: Progress) -> Path:
    """Build the store: mount where we may, interleave every table, publish the manifest last. Returns its folder.

    Raises IntegrityError when a shard is not the pinned one or lacks its table, NoSpaceError before the first byte
    when the filesystem is too small, UnsupportedError for storage kinds this version cannot build.
    """
    if layout.profile.engram.storage != "tmpfs":
        raise UnsupportedError(
            f"Engram storage {layout.profile.engram.storage!r} cannot be built by this version (tmpfs can)",
        )
    sources = [(table, *pack.engram_tensors(layout.model_dir, table.layer)) for table in layout.profile.model.engram]
    folder, note = _place(layout)
    if note:
        progress(note, {})
    mount = mounts.mount_of(folder)
    if not mount.memory_backed and layout.profile.engram.storage == "tmpfs":
        progress(f"{folder} is on {mount.fstype}, not in memory: rows will be read from disk", {})
    _refuse_mapped(folder)
    # from here on there is no valid store until the new manifest is published; the old records go first, since a
    # tmpfs sized for one store cannot hold two
    for path in (folder / MANIFEST, *folder.glob("layer-*.engram*")):
        path.unlink(missing_ok=True)
    need = needed_bytes(layout)
    have = mounts.free_bytes(folder)
    if have < need:
        raise NoSpaceError(
            f"the Engram store needs {need} bytes in {folder}, {have} are free",
            hints=("ds41ctl engram drop", f"df -h {folder}"),
        )
    layers = []
    for index, (table, shard, weight, scale) in enumerate(sources):
        if weight.shape != (table.rows, WEIGHT_BYTES) or scale.shape != (table.rows, SCALE_BYTES):
            raise IntegrityError(
                f"layer {table.layer}: {shard.name} holds {list(weight.shape)} and {list(scale.shape)}, "
                f"expected [{table.rows}, {WEIGHT_BYTES}] and [{table.rows}, {SCALE_BYTES}]"
            )
        digest = _source_digest(layout, shard)
        path = folder / record_file(table.layer)
        sha256 = files.publish(path, _counted(_records(shard, weight.begin, scale.begin, table.rows), table, progress))
        layers.append(
            {
                "layer": table.layer,
                "file": path.name,
                "rows": table.rows,
                "bytes": table.rows * RECORD_BYTES,
                "sha256": sha256,
                "source_file": shard.name,
                "source_size": shard.stat().st_size,
                "source_sha256": digest,
                "canaries": _canaries(path, geometry.boundaries(index)),
            }
        )
    files.publish_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "record_bytes": RECORD_BYTES,
            "page_kind": mount.page_kind,
            "memory_backed": mount.memory_backed,
            "boot_id": boot_id(),
            "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "profile": layout.name,
            "layers": layers,
        },
    )
    return folder


def _place(layout: Layout) -> tuple[Path, str]:
    """Make the store's folder: (folder, what to tell the user). Falls back in the order of `store_dirs`."""
    candidates = layout.store_dirs
    mount_first = len(candidates) > 1
    if mount_first:
        reason = _mount(layout, candidates[0])
        if not reason:
            return candidates[0], ""
        folder = candidates[1]
        note = f"no mount of our own ({reason}); using {folder}"
    else:
        folder, note = candidates[0], ""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise files.os_error(error, f"making {folder}") from error
    if owner != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
        raise DeniedError(f"{folder} belongs to user {owner}", hints=("set DS41_ENGRAM_DIR to a folder of yours",))
    return folder, note


def tmpfs_size(layout: Layout) -> int:
    """Bytes of a tmpfs for this store: the records, each file rounded up to a 2 MiB page, and 2 MiB for the rest."""
    if layout.profile.engram.size_gib:
        return int(layout.profile.engram.size_gib * (1 << 30))
    page = 2 * MIB
    sizes = [table.rows * RECORD_BYTES for table in layout.profile.model.engram]
    return sum(-(-size // page) * page for size in sizes) + page


def mount_options(layout: Layout) -> list[str]:
    """Mount options to try, best first: huge pages and no swapping where the kernel has them."""
    base = f"size={tmpfs_size(layout)},mode=0700,uid={layout.dirs.uid}"
    return [f"{base},huge=always,noswap", f"{base},huge=always", base]


def mount_argv(options: str, folder: Path, *, root: bool) -> list[str]:
    """The fixed command that mounts the store's tmpfs."""
    return [*_sudo(root), "mount", "-t", "tmpfs", "-o", options, MOUNT_SOURCE, str(folder)]


def _sudo(root: bool) -> list[str]:
    return [] if root else ["sudo", "-n"]


def _mount(layout: Layout, folder: Path) -> str:
    """Mount a tmpfs of our own on `folder`; '' when it is there, else why not."""
    if _ours(folder):
        return ""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = ""
    for options in mount_options(layout):
        done = proc.run(mount_argv(options, folder, root=os.getuid() == 0), timeout=30)
        if done.ok:
            return ""
        reason = (done.stderr.strip().splitlines() or ["mount failed"])[0]
    return reason


def _ours(folder: Path) -> bool:
    """True when our tmpfs is mounted exactly there."""
    mount = mounts.mount_of(folder)
    return mount.source == MOUNT_SOURCE and mount.point == folder.resolve()


def _source_digest(layout: Layout, shard: Path) -> str:
    """sha256 of a shard: from its sidecar when that still vouches for the bytes, else by reading them all."""
    pinned = {item.name: item for item in pack.expected(layout)}.get(shard.name)
    if pinned is None:
        return files.file_sha256(shard)
    reason = pack.file_problem(layout.model_dir, pinned, hash_it=False)
    if reason:
        reason = pack.file_problem(layout.model_dir, pinned, hash_it=True)
        if reason:
            raise IntegrityError(f"{shard.name}: {reason}", hints=("ds41ctl fetch --repair",))
    return pinned.sha256


def interleave(weights: bytes, scales: bytes) -> bytearray:
    """Records from `n` weight rows (n x 256 B) and scale rows (n x 8 B): n x 264 B."""
    rows = len(weights) // WEIGHT_BYTES
    out = bytearray(rows * RECORD_BYTES)
    for column in range(WEIGHT_BYTES):
        out[column::RECORD_BYTES] = weights[column::WEIGHT_BYTES]
    for column in range(SCALE_BYTES):
        out[WEIGHT_BYTES + column :: RECORD_BYTES] = scales[column::SCALE_BYTES]
    return out


def _records(shard: Path, weight_at: int, scale_at: int, rows: int) -> Iterator[bytes]:
    with shard.open("rb") as weights, shard.open("rb") as scales:
        weights.seek(weight_at)
        scales.seek(scale_at)
        for start in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - start)
            weight, scale = weights.read(count * WEIGHT_BYTES), scales.read(count * SCALE_BYTES)
            if len(weight) != count * WEIGHT_BYTES or len(scale) != count * SCALE_BYTES:
                raise IntegrityError(f"{shard.name} ended while it was read")
            yield bytes(interleave(weight, scale))


def _counted(chunks: Iterator[bytes], table: Any, progress: Progress) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        done += len(chunk)
        progress(f"layer {table.layer}", {"bytes": done, "total": table.rows * RECORD_BYTES})
        yield chunk


def _canaries(path: Path, boundaries: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Digests of the first and last record of every sub-table."""
    rows = sorted({row for pair in boundaries for row in pair})
    with path.open("rb") as source:
        found = []
        for row in rows:
            source.seek(row * RECORD_BYTES)
            found.append({"row": row, "sha256": hashlib.sha256(source.read(RECORD_BYTES)).hexdigest()})
    return found


def compare_rows(layout: Layout, folder: Path, geometry: Geometry, *, per_sub_table: int | None) -> tuple[int, str]:
    """Compare records with the shards: (rows compared, '' or the first difference).

    `per_sub_table` random rows of every sub-table, besides its first and last; None compares every byte.
    """
    compared = 0
    chooser = random.Random()  # noqa: S311 - a sample, not a secret
    by_layer = {item["layer"]: item for item in manifest(folder)["layers"]}
    for index, table in enumerate(layout.profile.model.engram):
        shard, weight, scale = pack.engram_tensors(layout.model_dir, table.layer)
        with _mapped(folder / by_layer[table.layer]["file"]) as records, _mapped(shard) as source:
            if per_sub_table is None:
                chosen: list[range] = [
                    range(start, min(start + ROWS_AT_ONCE, table.rows)) for start in range(0, table.rows, ROWS_AT_ONCE)
                ]
            else:
                chosen = [
                    range(row, row + 1)
                    for first, last in geometry.boundaries(index)
                    for row in {first, last, *(chooser.randint(first, last) for _ in range(per_sub_table))}
                ]
            for span in chosen:
                weights = source[weight.begin + span.start * WEIGHT_BYTES : weight.begin + span.stop * WEIGHT_BYTES]
                scales = source[scale.begin + span.start * SCALE_BYTES : scale.begin + span.stop * SCALE_BYTES]
                if records[span.start * RECORD_BYTES : span.stop * RECORD_BYTES] != interleave(weights, scales):
                    rows = f"row {span.start}" if len(span) == 1 else f"rows {span.start} to {span.stop - 1}"
                    return compared, f"layer {table.layer}, {rows}: the store differs from {shard.name}"
                compared += len(span)
    return compared, ""


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as view:
        yield view


def mapped_by(folder: Path) -> list[int]:
    """Pids of processes that map a file of the store (those this user may look into).

    A file that was replaced since it was mapped does not count: such a process reads rows of an older store.
    """
    prefix = str(folder.resolve()) + "/"
    found = []
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            if any(prefix in line and not line.endswith(" (deleted)") for line in lines):
                found.append(pid)
    return found


def _refuse_mapped(folder: Path) -> None:
    users = mapped_by(folder)
    if users:
        raise AlreadyRunningError(
            f"the Engram store in {folder} is mapped by {', '.join(proc.describe(pid) for pid in users)}",
            hints=("ds41ctl stop",),
        )


def drop(layout: Layout) -> list[str]:
    """Remove the store and the mount we made; returns what was removed. Raises when a process still maps it."""
    removed = []
    for folder in layout.store_dirs:
        if not folder.is_dir():
            continue
        _refuse_mapped(folder)
        names = [folder / MANIFEST, *folder.glob("layer-*.engram"), *folder.glob("*" + files.PART_SUFFIX)]
        for path in names:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(str(path))
        if _ours(folder):
            done = proc.run([*_sudo(os.getuid() == 0), "umount", str(folder)], timeout=30)
            if not done.ok:
                raise DeniedError(f"umount {folder}: {done.stderr.strip()}", hints=(f"sudo umount {folder}",))
            removed.append(f"mount {folder}")
        with contextlib.suppress(OSError):
            folder.rmdir()
    return removed
