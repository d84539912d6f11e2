"""The Engram store: every row in memory-backed files, with a manifest that proves itself.

A store is a folder with `manifest.json`; its files lie in the folder that the manifest names (`data_dir`), which may be
a mount of our own below it or a filesystem that the user prepared. They hold one of two things (`kind`): records, each
row's 264 bytes together, for ds41_engine; or shards, copies of the pack's Engram shards and an index of their tables,
for an engine that reads safetensors. The manifest of shards stays in the state folder: whoever reads their folder finds
what a pack has, and nothing else. This module looks; `storebuild` changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files, kernels, mounts, pack, proc, safetensors
from ds41ctl.core.engram import RECORD_BYTES, SCALE_BYTES, WEIGHT_BYTES, Geometry
from ds41ctl.core.errors import AlreadyRunningError, IntegrityError
from ds41ctl.core.facts import StoreFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import EngramTable

FORMAT = 2
MANIFEST = "manifest.json"
RECORDS = "layer-*.engram"
ROWS = "rows"  # folder of the files inside a store folder, where our own mount goes
BUFFERS = 4  # pieces in flight: the hash goes on while a piece waits for its pages
READ_BYTES = 8 << 20  # of a shard at a time: long enough for the drive, short enough for the second-level cache
REBUILD = ("ds41ctl engram drop", "ds41ctl engram build")


def record_file(layer: int, node: int | None = None) -> str:
    """File name of a layer's records; of one part when the table is split over NUMA nodes."""
    return f"layer-{layer:03d}.engram" if node is None else f"layer-{layer:03d}-node{node}.engram"


def of_shards(layout: Layout) -> bool:
    """True when the profile's store is copies of shards."""
    return layout.profile.engram.format == "shards"


def shard_names(layout: Layout) -> tuple[str, ...]:
    """Names of the files of a store of shards, the index last: whoever opens it finds the others whole."""
    if not of_shards(layout):
        return ()
    return (*dict.fromkeys(table.shard for table in layout.profile.model.engram), pack.INDEX)


def file_bytes(layout: Layout, table: EngramTable) -> int:
    """Bytes of one table in the store; of a shard that is neither pinned nor there, its rows alone."""
    if of_shards(layout):
        with contextlib.suppress(IntegrityError):
            for item in pack.expected(layout):
                if item.name == table.shard:
                    return item.size
        with contextlib.suppress(OSError):
            return (layout.model_dir / table.shard).stat().st_size
    return table.rows * RECORD_BYTES


def needed_bytes(layout: Layout) -> int:
    """Bytes of all files of the store."""
    return sum(file_bytes(layout, table) for table in layout.profile.model.engram)


def own_home(layout: Layout) -> Path:
    """Where a manifest lies whose files are in a mount of our own, or where none can or should be written."""
    return layout.dirs.state / "engram" / layout.name


def homes(layout: Layout) -> tuple[Path, ...]:
    """Folders that may hold the manifest, the preferred one first."""
    if of_shards(layout):
        return (own_home(layout),)
    return tuple(dict.fromkeys((*layout.store_dirs, own_home(layout))))


def locate(layout: Layout) -> Path:
    """The store folder: the candidate that has a manifest, else the first one."""
    for folder in homes(layout):
        if (folder / MANIFEST).is_file():
            return folder
    return homes(layout)[0]


def served(layout: Layout) -> Path:
    """What an engine is told (`${engram}`): the folder with the manifest of records, that of the files of shards."""
    folder = locate(layout)
    if not of_shards(layout):
        return folder
    with contextlib.suppress(IntegrityError):
        return data_dir(folder, manifest(folder))
    return planned_rows(layout)


def planned_rows(layout: Layout) -> Path:
    """Where the files will lie, as far as it can be known before a build."""
    mounted = layout.profile.engram.storage != "disk" and len(layout.store_dirs) > 1
    return layout.store_dirs[0] / ROWS if mounted else layout.store_dirs[0]


def boot_id() -> str:
    """This boot's id: what a memory-backed store is bound to."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def manifest(folder: Path) -> dict[str, Any]:
    """Parsed manifest. Raises IntegrityError when it is missing, not JSON or of another format."""
    try:
        tree = files.read_json(folder / MANIFEST)
    except (ValueError, OSError) as error:
        raise IntegrityError(f"the Engram store's manifest cannot be read: {error}", hints=REBUILD) from None
    if tree is None:
        raise IntegrityError(f"no Engram store in {folder}", hints=("ds41ctl engram build",))
    row_bytes = RECORD_BYTES if not isinstance(tree, dict) or tree.get("kind", "records") == "records" else 0
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("record_bytes") != row_bytes:
        raise IntegrityError(f"{folder / MANIFEST} is not a store of format {FORMAT}", hints=REBUILD)
    return tree


def data_dir(folder: Path, tree: dict[str, Any]) -> Path:
    """Folder of the store's files."""
    return folder / str(tree.get("data_dir", ""))


def problem(layout: Layout, folder: Path) -> str:
    """'' when manifest, boot id, place, sizes, rows, source digests and canary records hold; else one line."""
    try:
        tree = manifest(folder)
        if tree["tensor_parallel"] != 1:
            return f"built for tensor parallel {tree['tensor_parallel']}: one store with all rows serves every rank"
        engram = layout.profile.engram
        if tree.get("kind", "records") != engram.format:
            return f"it holds {tree.get('kind', 'records')}, the profile wants {engram.format}"
        if tree["memory_backed"] and tree["boot_id"] != boot_id():
            return "built before the last reboot: its memory is gone"
        if tree["storage"] == "disk" and engram.storage in ("tmpfs", "hugetlb"):
            return "it lies on a disk, the profile wants it in memory"
        records = data_dir(folder, tree)
        if len(layout.store_dirs) == 1 and not records.is_relative_to(layout.store_dirs[0]):
            return f"its records are in {records}, not in {layout.store_dirs[0]}, which is chosen now"
        pins = {item.name: item for item in pack.expected(layout)}
        by_layer = {item["layer"]: item for item in tree["layers"]}
        for table in layout.profile.model.engram:
            item = by_layer.get(table.layer)
            if item is None:
                return f"layer {table.layer} is missing"
            fault = _layer_problem(records, item, table.rows) or _source_problem(layout.model_dir, item, pins)
            if fault:
                return fault
        return _index_problem(records, tree)
    except IntegrityError as error:
        return error.message
    except (KeyError, TypeError, AttributeError, OSError) as error:
        return f"manifest is damaged: {error!r}"


def _index_problem(records: Path, tree: dict[str, Any]) -> str:
    """'' when the index of a store of shards is the one that was built (records have none)."""
    index = tree.get("index")
    if index is None:
        return ""
    path = records / index["file"]
    if not path.is_file():
        return f"{path.name} is missing"
    return "" if files.file_sha256(path) == index["sha256"] else f"{path.name} differs from what was built"


def _layer_problem(records: Path, item: dict[str, Any], rows: int) -> str:
    layer = item["layer"]
    if item["rows"] != rows:
        return f"layer {layer} has {item['rows']} rows, the profile says {rows}"
    reached = 0
    for part in item["parts"]:
        if part["first_row"] != reached:
            return f"layer {layer} goes on at row {part['first_row']}, expected {reached}: built for another split"
        reached += part["rows"]
        path = records / part["file"]
        size = path.stat().st_size if path.is_file() else -1
        if "weight_at" in item and size != part["bytes"]:
            return f"{part['file']} is missing or has not the {part['bytes']} bytes of the shard"
        if size < part["bytes"]:
            return f"{part['file']} is missing or shorter than {part['rows']} records"
    if reached != rows:
        return f"layer {layer} holds rows 0 to {reached - 1} of {rows}: built for another split"
    found = [read_record(records, item, canary["row"]) for canary in item["canaries"]]
    if not found:
        return f"layer {layer} has no canary records"
    if not any(any(record[:WEIGHT_BYTES]) for record in found):
        return f"layer {layer} holds only zero rows: its table was never filled"
    for canary, record in zip(item["canaries"], found, strict=True):
        if hashlib.sha256(record).hexdigest() != canary["sha256"]:
            return f"layer {layer}: record {canary['row']} differs from what was built"
    return ""


def read_record(records: Path, item: dict[str, Any], row: int) -> bytes:
    """One record of a layer of the manifest, read from its file; of a shard, the row's weights and then its scales."""
    part = next(part for part in item["parts"] if part["first_row"] <= row < part["first_row"] + part["rows"])
    with (records / part["file"]).open("rb", buffering=0) as source:
        if "weight_at" in item:
            source.seek(item["weight_at"] + row * WEIGHT_BYTES)
            weights: bytes = source.read(WEIGHT_BYTES)
            source.seek(item["scale_at"] + row * SCALE_BYTES)
            scales: bytes = source.read(SCALE_BYTES)
            return weights + scales
        source.seek((row - part["first_row"]) * RECORD_BYTES)
        record: bytes = source.read(RECORD_BYTES)
    return record


def _source_problem(model_dir: Path, item: dict[str, Any], pins: dict[str, pack.Expected]) -> str:
    """A sentence when the shard the store was built from is now another one, or is not the one that is pinned."""
    pin = pins.get(item["source_file"])
    if pin is not None and pin.sha256 != item["source_sha256"]:
        return f"built from another {item['source_file']} than the profile pins (revision {pin.revision[:12]})"
    if pin is not None and item["revision"] != pin.revision:
        return f"built from revision {item['revision'][:12] or 'unknown'}, the profile pins {pin.revision[:12]}"
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
    exists = (folder / MANIFEST).is_file()
    tree: dict[str, Any] = {}
    with contextlib.suppress(IntegrityError):
        tree = manifest(folder)
    records = data_dir(folder, tree)
    if of_shards(layout) and not exists:
        records = planned_rows(layout)
    names = [records / table.shard for table in layout.profile.model.engram] if of_shards(layout) else None
    there = names if names is not None else list(records.glob(RECORDS)) if records.is_dir() else []
    present = sum(path.stat().st_size for path in there if path.is_file())
    share, nodes, notes = tree.get("huge_share"), tree.get("node_bytes"), tree.get("notes")
    return StoreFacts(
        dir=str(folder),
        data_dir=str(records),
        huge_share=share if isinstance(share, float) else None,
        node_bytes=nodes if isinstance(nodes, dict) else {},
        notes=tuple(str(text) for text in notes) if isinstance(notes, list) else (),
        format=layout.profile.engram.format,
        exists=exists,
        storage=str(tree.get("storage", layout.profile.engram.storage)),
        fstype=mounts.mount_of(records).fstype,
        page_kind=str(tree.get("page_kind", "")),
        layers=tuple(int(item["layer"]) for item in tree.get("layers", ()) if isinstance(item, dict)),
        bytes_needed=needed_bytes(layout),
        bytes_present=present,
        problem=problem(layout, folder) if exists else "",
    )


def compare_sample(layout: Layout, folder: Path, geometry: Geometry, per_sub_table: int) -> tuple[int, str]:
    """Compare records with the shards: (rows compared, '' or the first difference).

    First, last and `per_sub_table` random rows of every sub-table.
    """
    compared = 0
    chooser = random.Random()  # noqa: S311 - a sample, not a secret
    tree = manifest(folder)
    records, by_layer = data_dir(folder, tree), {item["layer"]: item for item in tree["layers"]}
    for index, table in enumerate(layout.profile.model.engram):
        shard, weight, scale = pack.engram_tensors(layout.model_dir, table.layer)
        with shard.open("rb", buffering=0) as source:
            for first, last in geometry.boundaries(index):
                for row in sorted({first, last, *(chooser.randint(first, last) for _ in range(per_sub_table))}):
                    source.seek(weight.begin + row * WEIGHT_BYTES)
                    wanted = source.read(WEIGHT_BYTES)
                    source.seek(scale.begin + row * SCALE_BYTES)
                    if read_record(records, by_layer[table.layer], row) != wanted + source.read(SCALE_BYTES):
                        return compared, f"layer {table.layer}, row {row}: the store differs from {shard.name}"
                    compared += 1
    return compared, ""


def compare_all(layout: Layout, folder: Path) -> tuple[int, str]:
    """Compare every byte with the shards, and the shards with their pins: (rows compared, '' or the first fault)."""
    compared = 0
    loops = None if of_shards(layout) else kernels.loops(layout.dirs.cache)
    tree = manifest(folder)
    records, by_layer = data_dir(folder, tree), {item["layer"]: item for item in tree["layers"]}
    for table in layout.profile.model.engram:
        item = by_layer[table.layer]
        shard, weight, scale = pack.engram_tensors(layout.model_dir, table.layer)
        with contextlib.ExitStack() as stack:
            parts = [(part, stack.enter_context(mapped(records / part["file"]))) for part in item["parts"]]
            digest = hashlib.sha256()
            at = 0
            for tensor, row, piece in shard_pieces(shard, weight, scale):
                digest.update(piece)
                at += len(piece)
                width = WEIGHT_BYTES if tensor is weight else SCALE_BYTES
                if loops is None:
                    if parts[0][1][at - len(piece) : at] != piece:
                        where = f"rows from {row}" if tensor is not None else f"bytes before {at}"
                        return compared, f"layer {table.layer}, {where}: the store differs from {shard.name}"
                    continue
                if tensor is None:
                    continue
                offset = 0 if tensor is weight else WEIGHT_BYTES
                for part, view, begin, source in _overlaps(parts, row, piece, width):
                    bad = loops.differs(view, begin * RECORD_BYTES + offset, source, width)
                    if bad >= 0:
                        row = part["first_row"] + begin + bad
                        return compared, f"layer {table.layer}, row {row}: the store differs from {shard.name}"
        if digest.hexdigest() != item["source_sha256"]:
            return compared, f"{shard.name} is not the file that the store was built from (sha256)"
        compared += table.rows
    return compared, ""


def _overlaps(
    parts: list[tuple[dict[str, Any], mmap.mmap]], row: int, piece: memoryview, width: int
) -> Iterator[tuple[dict[str, Any], mmap.mmap, int, memoryview]]:
    """(part, its mapping, first record in it, rows) for each part that holds some of a piece's rows."""
    for part, view in parts:
        begin = max(row, part["first_row"])
        end = min(row + len(piece) // width, part["first_row"] + part["rows"])
        if begin < end:
            yield part, view, begin - part["first_row"], piece[(begin - row) * width : (end - row) * width]


def shard_pieces(
    shard: Path, weight: safetensors.Tensor, scale: safetensors.Tensor
) -> Iterator[tuple[safetensors.Tensor | None, int, memoryview]]:
    """All bytes of a shard in file order, read once: (table tensor or None, its first row, the bytes).

    Pieces of a table tensor hold whole rows. A piece is valid until the `BUFFERS`-th after it has been asked for.
    Raises IntegrityError when the file ends early.
    """
    buffers = [bytearray(READ_BYTES) for _ in range(BUFFERS)]
    number = at = 0
    size = shard.stat().st_size
    with shard.open("rb", buffering=0) as source:
        for tensor in (*sorted((weight, scale), key=lambda item: item.begin), None):
            for stop, found in ((tensor.begin, None), (tensor.end, tensor)) if tensor else ((size, None),):
                begin = at
                while at < stop:
                    buffer = memoryview(buffers[number % BUFFERS])[: min(READ_BYTES, stop - at)]
                    number += 1
                    filled = 0
                    while filled < len(buffer):
                        got = source.readinto(buffer[filled:])
                        if not got:
                            raise IntegrityError(
                                f"{shard.name} ended at byte {at + filled} while it was read, expected {size}",
                                hints=("ds41ctl fetch --repair",),
                            )
                        filled += got
                    width = WEIGHT_BYTES if found is weight else SCALE_BYTES
                    yield found, (at - begin) // width, buffer
                    at += len(buffer)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """A private view of a whole file. It is never written; without MAP_NORESERVE hugetlbfs would set pages aside."""
    with path.open("rb") as source:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        with mmap.mmap(source.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            yield view


def mapped_by(folder: Path) -> list[int]:
    """Pids of processes that map a file of the store (those this user may look into).

    A file that was replaced since it was mapped does not count: such a process reads rows of an older store.
    """
    tree: dict[str, Any] = {}
    with contextlib.suppress(IntegrityError):
        tree = manifest(folder)
    return mapping(data_dir(folder, tree), folder)


def file_users(folder: Path) -> dict[str, set[int]]:
    """Name of each record file that the manifest lists -> pids of processes that map it, as :func:`mapped_by`.

    Empty where there is no manifest that can be read.
    """
    try:
        tree = manifest(folder)
    except IntegrityError:
        return {}
    where = data_dir(folder, tree).resolve()
    names = {f" {where / part['file']}": part["file"] for item in tree["layers"] for part in item["parts"]}
    users: dict[str, set[int]] = {name: set() for name in names.values()}
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                for path, name in names.items():
                    if line.endswith(path):
                        users[name].add(pid)
    return users


def mapping(*folders: Path, opened: bool = False) -> list[int]:
    """Pids of processes that map a file below one of the folders; `opened`: also of those that have one open."""
    prefixes = [str(folder.resolve()) + "/" for folder in folders]
    found = []
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            lines += _open_files(pid) if opened else []
            if any(prefix in line and not line.endswith(" (deleted)") for line in lines for prefix in prefixes):
                found.append(pid)
    return found


def _open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            found.append(str(link.readlink()))
    return found


def used_by(folder: Path) -> list[int]:
    """Pids of processes that map a file of the store or, of shards, have one open: their rows are read by pread."""
    tree: dict[str, Any] = {}
    with contextlib.suppress(IntegrityError):
        tree = manifest(folder)
    shards = tree.get("kind") == "shards"
    where = data_dir(folder, tree)
    return mapping(where, opened=True) if shards else mapping(where, folder)


def refuse_mapped(*folders: Path, opened: bool = False) -> None:
    """Raise AlreadyRunningError when a process maps (`opened`: or has open) a file below one of the folders."""
    users = mapping(*folders, opened=opened)
    if users:
        how = "used" if opened else "mapped"
        raise AlreadyRunningError(
            f"the Engram store in {folders[0]} is {how} by {', '.join(proc.describe(pid) for pid in users)}",
            hints=("ds41ctl stop",),
        )
