"""The Engram store: table rows in a folder, mapped read-only and shared. Standard library and numpy only.

Layout: ``manifest.json`` and, in the folder that it names, one file per layer (or per layer and NUMA node). A record is
one table row: 256 bytes F8_E4M3 weights, then 8 bytes UE8M0 scales. ``ds41ctl engram build`` writes the store; this
module only reads it. Rows are gathered by ``ds41_kernels`` where that is installed and loads, else by numpy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FORMAT = 2
WEIGHT_BYTES = 256
SCALE_BYTES = 8
RECORD_BYTES = WEIGHT_BYTES + SCALE_BYTES
MANIFEST = "manifest.json"
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
SMAPS_FILE = Path("/proc/self/smaps")
MAX_SAFETENSORS_HEADER = 100_000_000
"""Largest header that the safetensors format allows, bytes."""

FIX = "run: ds41ctl engram build"

ByteArray = NDArray[np.uint8]


class StoreError(Exception):
    """The store cannot be used. The text is one line: what, expected, found, fix."""


def _fault(what: str, expected: object, found: object, fix: str = FIX) -> StoreError:
    return StoreError(f"{what}: expected {expected}, found {found}; {fix}")


@dataclass(frozen=True)
class StorePart:
    """Rows ``first_row ..`` of a layer in one file, whose pages lie on NUMA node ``node``."""

    path: Path
    node: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class StoreLayer:
    """One layer's rows as the manifest describes them."""

    layer: int
    parts: tuple[StorePart, ...]
    rows: int
    source_file: str
    canaries: tuple[tuple[int, str], ...]
    """(row, sha256 of its record)"""


@dataclass(frozen=True)
class Manifest:
    """A parsed ``manifest.json``."""

    page_kind: str
    memory_backed: bool
    boot_id: str
    layers: tuple[StoreLayer, ...]


def read_manifest(folder: Path) -> Manifest:
    """Parse a store's manifest.

    Raises:
        StoreError: missing, not JSON, of another format, or a key is missing or of the wrong type.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _fault(f"Engram store {folder}", "a manifest.json", "none") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _fault(f"Engram store manifest {path}", "readable JSON", str(error)) from None
    if not isinstance(raw, dict):
        raise _fault(f"Engram store manifest {path}", "a JSON object", type(raw).__name__)
    if raw.get("format") != FORMAT:
        raise _fault(f"Engram store manifest {path}: format", FORMAT, repr(raw.get("format")))
    if raw.get("record_bytes") != RECORD_BYTES:
        raise _fault(f"Engram store manifest {path}: record_bytes", RECORD_BYTES, repr(raw.get("record_bytes")))
    try:
        if raw["tensor_parallel"] != 1:
            raise ValueError(f"tensor_parallel {raw['tensor_parallel']!r}: one store with all rows serves every rank")
        records = folder / str(raw["data_dir"])
        layers = tuple(_layer(records, entry) for entry in raw["layers"])
        memory_backed = raw["memory_backed"]
        if not isinstance(memory_backed, bool):
            raise TypeError("memory_backed is not true or false")
        return Manifest(str(raw["page_kind"]), memory_backed, str(raw["boot_id"]), layers)
    except KeyError as error:
        raise _fault(f"Engram store manifest {path}", f"key {error.args[0]}", "none") from None
    except (TypeError, ValueError) as error:
        raise _fault(f"Engram store manifest {path}", "the documented types", str(error)) from None


def _layer(records: Path, entry: Mapping[str, Any]) -> StoreLayer:
    rows, size = int(entry["rows"]), int(entry["bytes"])
    if rows <= 0 or size != rows * RECORD_BYTES:
        raise ValueError(f"layer {entry['layer']}: bytes {size} is not {rows} rows x {RECORD_BYTES}")
    parts: list[StorePart] = []
    reached = 0
    for part in entry["parts"]:
        name = str(part["file"])
        if not name or Path(name).name != name:
            raise ValueError(f"layer file {name!r} is not a plain file name")
        found = StorePart(records / name, int(part["node"]), int(part["first_row"]), int(part["rows"]))
        if found.first_row != reached or found.rows <= 0:
            raise ValueError(f"layer {entry['layer']}: {name} starts at row {found.first_row}, not at {reached}")
        reached += found.rows
        parts.append(found)
    if reached != rows:
        raise ValueError(f"layer {entry['layer']}: its files hold {reached} of {rows} rows")
    canaries = tuple((int(canary["row"]), str(canary["sha256"])) for canary in entry["canaries"])
    if not canaries:
        raise ValueError(f"layer {entry['layer']}: no canaries")
    for row, _ in canaries:
        if not 0 <= row < rows:
            raise ValueError(f"layer {entry['layer']}: canary row {row} is outside 0..{rows - 1}")
    return StoreLayer(int(entry["layer"]), tuple(parts), rows, str(entry["source_file"]), canaries)


class MappedLayer:
    """One layer's rows, mapped read-only: ``records[i]`` is the ``[rows, 264]`` uint8 view of ``parts[i]``."""

    def __init__(self, entry: StoreLayer) -> None:
        self.entry = entry
        self.rows = entry.rows
        self.parts = entry.parts
        self.records = tuple(_map_records(part) for part in entry.parts)
        self._starts = np.array([part.first_row for part in entry.parts], dtype=np.int64)

    def between(self, begin: int, end: int) -> list[tuple[ByteArray, int, int]]:
        """(records, first row, node) of every part's rows among ``begin .. end-1``."""
        found = []
        for part, records in zip(self.parts, self.records, strict=True):
            first, stop = max(begin, part.first_row), min(end, part.first_row + part.rows)
            if first < stop:
                found.append((records[first - part.first_row : stop - part.first_row], first, part.node))
        return found

    def row(self, row: int) -> bytes:
        """One record."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.records[number][row - int(self._starts[number])].tobytes()


class Gather(Protocol):
    """Copies rows of one layer: ids ``[..., columns]`` -> ``[..., columns, 264]`` uint8, into ``out`` when it is given.

    IndexError out of range.
    """

    def __call__(self, row_ids: NDArray[np.int64], out: ByteArray | None = None) -> ByteArray: ...


class EngramStore:
    """An opened, validated store.

    Use :meth:`open`. All engine processes of a machine map the same pages. ``how`` says in words what gathers.
    """

    def __init__(self, folder: Path, manifest: Manifest, layers: Mapping[int, MappedLayer]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.layers = layers
        self.how = "numpy"
        self._spans = {layer: (0, mapped.rows) for layer, mapped in layers.items()}
        self._gathers: dict[int, Gather] = {}
        self._pool: Any = None
        self.restrict({})

    @classmethod
    def open(
        cls,
        folder: Path,
        expected_rows: Mapping[int, int],
        sample_rows: Mapping[int, Iterable[int]] | None = None,
        pack: Path | None = None,
        boot_id: str | None = None,
    ) -> EngramStore:
        """Map a store and prove that it is the model's.

        Args:
            folder: the store.
            expected_rows: rows of every Engram layer of the model (``engram_num_embeddings``).
            sample_rows: rows to compare with the pack's shard besides the first and the last one, per layer.
            pack: folder of the checkpoint; the comparison is skipped where its shard is not there.
            boot_id: this boot's id; None reads the kernel's. Checked when the store is memory-backed.

        Raises:
            StoreError: one line naming the fault and the fix.
        """
        manifest = read_manifest(folder)
        if manifest.memory_backed:
            current = boot_id if boot_id is not None else BOOT_ID_FILE.read_text(encoding="ascii").strip()
            if manifest.boot_id != current:
                raise _fault(f"Engram store {folder}: boot_id", f"{current} (this boot)", f"{manifest.boot_id} (stale)")
        by_layer = {entry.layer: entry for entry in manifest.layers}
        layers: dict[int, MappedLayer] = {}
        for layer, rows in expected_rows.items():
            entry = by_layer.get(layer)
            if entry is None:
                raise _fault(f"Engram store {folder}", f"layer {layer}", f"layers {sorted(by_layer)}")
            if entry.rows != rows:
                raise _fault(f"Engram store {folder}: layer {layer} rows", rows, entry.rows)
            layers[layer] = MappedLayer(entry)
            _check_canaries(layers[layer])
            if pack is not None:
                sample = {0, rows - 1, *(sample_rows or {}).get(layer, ())}
                _check_against_shard(layers[layer], pack, sorted(sample))
        return cls(folder, manifest, layers)

    def restrict(self, spans: Mapping[int, tuple[int, int]]) -> None:
        """From now on only rows ``begin .. end-1`` of these layers can be read; numpy gathers until told otherwise."""
        self._spans |= spans
        self.how, self._pool = "numpy", None
        self._gathers = {layer: NumpyGather(m.between(*self._spans[layer])) for layer, m in self.layers.items()}

    def use_kernels(self, threads: int, *, worker: int = 0) -> None:
        """Gather with ``ds41_kernels``: threads by NUMA node, rows of a disk store by io_uring.

        Args:
            threads: threads of this process that gather, the caller among them.
            worker: number of this process among those of the machine, so that each pins its threads elsewhere.

        Raises:
            StoreError: the library cannot be used; the store goes on with numpy.
        """
        try:
            import ds41_kernels as kernels
        except ImportError as error:
            raise StoreError(f"ds41_kernels is not installed ({error})") from None
        in_memory = self.manifest.memory_backed
        try:
            library = kernels.load()
            pieces = {layer: mapped.between(*self._spans[layer]) for layer, mapped in self.layers.items()}
            nodes = sorted({node for layer in pieces.values() for _, _, node in layer}) if in_memory else [0]
            groups, cpus = place_threads(threads, nodes, worker)
            pool = kernels.Pool(library, cpus, groups)
            way = kernels.loops(library)
            gathers: dict[int, Gather] = {}
            for layer, mapped in self.layers.items():
                if in_memory:
                    table = kernels.Table([kernels.Part(records, row, node) for records, row, node in pieces[layer]])
                    gathers[layer] = _bound(pool, table)
                    continue
                disk = kernels.DiskTable(library, [(p.path, p.first_row, p.rows) for p in mapped.parts], pool)
                gathers[layer] = _within(disk.gather, *self._spans[layer])
                way = "io_uring, O_DIRECT" if disk.uses_ring else "pread"
        except kernels.Unavailable as error:
            raise StoreError(str(error)) from None
        self.how = f"ds41_kernels ({way}, {len(cpus)} thread{'s' if len(cpus) > 1 else ''})"
        self._gathers, self._pool = gathers, pool

    def gather(self, layer: int, row_ids: NDArray[np.int64], out: ByteArray | None = None) -> ByteArray:
        """Copy records: ``row_ids`` ``[..., columns]`` -> ``[..., columns, 264]`` uint8, into ``out`` when it is given.

        Fresh memory costs more than the rows: who gathers often keeps a buffer.

        Raises:
            IndexError: an id is not a row of the layer.
        """
        return self._gathers[layer](row_ids, out)

    def counters(self) -> dict[str, float]:
        """``calls``, ``rows``, ``bytes``, ``ns``, ``gb_per_s`` of the kernels; empty while numpy gathers."""
        if self._pool is None:
            return {}
        found = self._pool.counters()
        return {
            "calls": found.calls,
            "rows": found.rows,
            "bytes": found.bytes,
            "ns": found.nanoseconds,
            "gb_per_s": round(found.gb_per_s, 3),
        }

    def huge_share(self) -> float:
        """Part of the touched bytes of all mappings that lie on huge pages, 0 to 1, from smaps."""
        names = {str(part.path.resolve()) for layer in self.layers.values() for part in layer.parts}
        total = huge = 0
        mine = False
        for line in SMAPS_FILE.read_text(errors="replace").splitlines():
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                mine = any(line.endswith(" " + name) for name in names)
            elif mine and head in ("Rss:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                total += int(rest.split()[0])
                huge += 0 if head == "Rss:" else int(rest.split()[0])
            elif mine and head in ("ShmemPmdMapped:", "FilePmdMapped:"):
                huge += int(rest.split()[0])
        return huge / total if total else 0.0


def _bound(pool: Any, table: Any) -> Gather:
    def gather(row_ids: NDArray[np.int64], out: ByteArray | None = None) -> ByteArray:
        rows: ByteArray = pool.gather(table, row_ids, out)
        return rows

    return gather


def _within(gather: Gather, begin: int, end: int) -> Gather:
    """``gather`` for rows ``begin .. end-1`` alone."""

    def checked(row_ids: NDArray[np.int64], out: ByteArray | None = None) -> ByteArray:
        _check_ids(row_ids, begin, end)
        return gather(row_ids, out)

    return checked


def _check_ids(row_ids: NDArray[np.int64], begin: int, end: int) -> None:
    outside = (row_ids < begin) | (row_ids >= end)
    if outside.any():
        raise IndexError(f"Engram row id: expected {begin} to {end - 1}, found {row_ids[outside].reshape(-1)[0]}")


class NumpyGather:
    """The plain way, for machines without a compiler: (records, first row, node) of consecutive pieces."""

    def __init__(self, pieces: Sequence[tuple[ByteArray, int, int]]) -> None:
        self._pieces = pieces
        self._begin = pieces[0][1]
        self._end = pieces[-1][1] + pieces[-1][0].shape[0]

    def __call__(self, row_ids: NDArray[np.int64], out: ByteArray | None = None) -> ByteArray:
        _check_ids(row_ids, self._begin, self._end)
        if out is None:
            out = np.empty((*row_ids.shape, RECORD_BYTES), dtype=np.uint8)
        for records, first, _ in self._pieces:
            mine = (row_ids >= first) & (row_ids < first + records.shape[0])
            out[mine] = records[row_ids[mine] - first]
        return out


def place_threads(threads: int, nodes: Sequence[int], worker: int) -> tuple[list[int], list[int | None]]:
    """Groups (NUMA nodes) and CPUs of gather threads.

    With at least one thread a node, threads are dealt out to the nodes and pinned to CPUs of theirs that this process
    may use; with fewer, nothing is pinned and every thread reads everywhere. The first entry is the calling thread.
    """
    if threads <= 1 or threads < len(nodes):
        return [0] * max(1, threads), [None] * max(1, threads)
    allowed = os.sched_getaffinity(0)
    groups, cpus = [], list[int | None]()
    for number in range(threads):
        node = nodes[number % len(nodes)]
        near = sorted(node_cpus(node) & allowed) or sorted(allowed)
        groups.append(node)
        # a process takes its CPUs from the end, where the fewest others start; the next process the ones before
        cpus.append(near[-(1 + (worker * threads + number) // len(nodes)) % len(near)])
    return groups, cpus


def node_cpus(node: int, root: Path = Path("/")) -> set[int]:
    """CPUs of a NUMA node; empty where the kernel does not say."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _map_records(part: StorePart) -> ByteArray:
    needed = part.rows * RECORD_BYTES
    try:
        fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _fault(f"Engram store file {part.path}", "a readable file", error.strerror) from None
    try:
        size = os.fstat(fd).st_size
        if size < needed:
            raise _fault(f"Engram store file {part.path}: size", f"at least {needed} bytes", f"{size} (truncated)")
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise _fault(f"Engram store file {part.path}", "a mappable file", error) from None
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8, count=needed).reshape(part.rows, RECORD_BYTES)


def _check_canaries(mapped: MappedLayer) -> None:
    entry = mapped.entry
    where = f"Engram store {entry.parts[0].path.parent}"
    filled = False
    for row, expected in entry.canaries:
        record = mapped.row(row)
        filled |= any(record[:WEIGHT_BYTES])
        found = hashlib.sha256(record).hexdigest()
        if found != expected:
            raise _fault(
                f"{where}: canary row {row} of layer {entry.layer}",
                f"sha256 {expected[:16]}...",
                f"{found[:16]}... (changed bytes)",
            )
    if not filled:
        raise _fault(f"{where}: layer {entry.layer}", "rows that are not all zero", "a table that was never filled")


def _check_against_shard(mapped: MappedLayer, pack: Path, rows: Sequence[int]) -> None:
    """Compare rows with the shard, where it is there."""
    layer = mapped.entry.layer
    expected = shard_rows(pack, layer, rows, mapped.rows)
    for row, wanted in zip(rows, expected or (), strict=False):
        if mapped.row(row) != wanted:
            raise _fault(
                f"Engram store {mapped.parts[0].path.parent}: row {row} of layer {layer}",
                f"the bytes of {mapped.entry.source_file}",
                "other bytes (the store was built from another shard)",
            )


def shard_rows(pack: Path, layer: int, rows: Iterable[int], total: int | None = None) -> list[bytes] | None:
    """Records of rows as the checkpoint's shard has them; None when index or shard are not there.

    Args:
        pack: folder of the checkpoint.
        layer: Engram layer.
        rows: row ids.
        total: rows that the table must have; None does not ask.

    Raises:
        StoreError: the index or the shard is damaged, or the table has another number of rows.
    """
    name = f"layers.{layer}.engram.embed"
    weight = locate_tensor(pack, f"{name}.weight")
    scale = locate_tensor(pack, f"{name}.scale")
    if weight is None or scale is None:
        return None
    for located, row_bytes in ((weight, WEIGHT_BYTES), (scale, SCALE_BYTES)):
        if total is not None and located.size != total * row_bytes:
            raise _fault(
                f"Engram shard {located.path}: {name}",
                f"{total} rows x {row_bytes} B as in the store",
                f"{located.size} bytes",
                "run: ds41ctl fetch --verify, then ds41ctl engram build",
            )
    found = []
    with weight.path.open("rb") as weights, scale.path.open("rb") as scales:
        for row in rows:
            record = os.pread(weights.fileno(), WEIGHT_BYTES, weight.offset + row * WEIGHT_BYTES)
            found.append(record + os.pread(scales.fileno(), SCALE_BYTES, scale.offset + row * SCALE_BYTES))
    return found


@dataclass(frozen=True)
class LocatedTensor:
    """Where a tensor's bytes lie: ``size`` bytes at ``offset`` of ``path``."""

    path: Path
    offset: int
    size: int


def locate_tensor(pack: Path, name: str) -> LocatedTensor | None:
    """Find a tensor through ``model.safetensors.index.json``; None when the index or the shard is not there.

    Raises:
        StoreError: the index or the shard's header is damaged, or the shard lacks a tensor that the index promises.
    """
    index_path = pack / "model.safetensors.index.json"
    fix = "run: ds41ctl fetch --verify --repair"
    try:
        file = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].get(name)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError):
        raise _fault(f"checkpoint index {index_path}", "JSON with a weight_map", "something else", fix) from None
    if file is None:
        return None
    path = pack / str(file)
    try:
        with path.open("rb") as shard:
            length = int.from_bytes(shard.read(8), "little")
            if not 2 <= length <= MAX_SAFETENSORS_HEADER:
                raise ValueError(f"header length {length}")
            header = json.loads(shard.read(length))
            begin, end = header[name]["data_offsets"]
            start = 8 + length + int(begin)
            size = int(end) - int(begin)
            if size < 0 or start + size > os.fstat(shard.fileno()).st_size:
                raise ValueError("data_offsets outside the file")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise _fault(f"shard {path}: tensor {name}", "a readable safetensors header", error, fix) from None
    return LocatedTensor(path, start, size)
