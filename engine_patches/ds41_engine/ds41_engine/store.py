"""The Engram store: table rows in a folder, mapped read-only and shared. Standard library and numpy only.

Layout: ``manifest.json`` and one file per layer. A record is one table row: 256 bytes F8_E4M3 weights, then 8 bytes
UE8M0 scales. ``ds41ctl engram build`` writes the folder; this module only reads it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
WEIGHT_BYTES = 256
SCALE_BYTES = 8
RECORD_BYTES = WEIGHT_BYTES + SCALE_BYTES
MANIFEST = "manifest.json"
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
MAX_SAFETENSORS_HEADER = 100_000_000
"""Largest header that the safetensors format allows, bytes."""

FIX = "run: ds41ctl engram build"

ByteArray = NDArray[np.uint8]


class StoreError(Exception):
    """The store cannot be used. The text is one line: what, expected, found, fix."""


def _fault(what: str, expected: object, found: object, fix: str = FIX) -> StoreError:
    return StoreError(f"{what}: expected {expected}, found {found}; {fix}")


@dataclass(frozen=True)
class StoreLayer:
    """One layer's rows as the manifest describes them."""

    layer: int
    path: Path
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
        layers = tuple(_layer(folder, entry) for entry in raw["layers"])
        memory_backed = raw["memory_backed"]
        if not isinstance(memory_backed, bool):
            raise TypeError("memory_backed is not true or false")
        return Manifest(str(raw["page_kind"]), memory_backed, str(raw["boot_id"]), layers)
    except KeyError as error:
        raise _fault(f"Engram store manifest {path}", f"key {error.args[0]}", "none") from None
    except (TypeError, ValueError) as error:
        raise _fault(f"Engram store manifest {path}", "the documented types", str(error)) from None


def _layer(folder: Path, entry: Mapping[str, Any]) -> StoreLayer:
    name = str(entry["file"])
    if not name or Path(name).name != name:
        raise ValueError(f"layer file {name!r} is not a plain file name")
    rows, size = int(entry["rows"]), int(entry["bytes"])
    if rows <= 0 or size != rows * RECORD_BYTES:
        raise ValueError(f"layer {entry['layer']}: bytes {size} is not {rows} rows x {RECORD_BYTES}")
    canaries = tuple((int(canary["row"]), str(canary["sha256"])) for canary in entry["canaries"])
    if not canaries:
        raise ValueError(f"layer {entry['layer']}: no canaries")
    for row, _ in canaries:
        if not 0 <= row < rows:
            raise ValueError(f"layer {entry['layer']}: canary row {row} is outside 0..{rows - 1}")
    return StoreLayer(int(entry["layer"]), folder / name, rows, str(entry["source_file"]), canaries)


class EngramStore:
    """An opened, validated store.

    Use :meth:`open`. ``records[layer]`` is a read-only ``[rows, 264]`` uint8 view of the shared mapping, so all engine
    processes of a machine read the same pages.
    """

    def __init__(self, folder: Path, manifest: Manifest, records: Mapping[int, ByteArray]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.records = records

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
        records: dict[int, ByteArray] = {}
        for layer, rows in expected_rows.items():
            entry = by_layer.get(layer)
            if entry is None:
                raise _fault(f"Engram store {folder}", f"layer {layer}", f"layers {sorted(by_layer)}")
            if entry.rows != rows:
                raise _fault(f"Engram store {folder}: layer {layer} rows", rows, entry.rows)
            records[layer] = _map_records(entry)
            _check_canaries(entry, records[layer])
            if pack is not None:
                sample = {0, rows - 1, *(sample_rows or {}).get(layer, ())}
                _check_against_shard(entry, records[layer], pack, sorted(sample))
        return cls(folder, manifest, records)

    def gather(self, layer: int, row_ids: NDArray[np.int64]) -> ByteArray:
        """Copy records: ``row_ids`` of any shape -> ``[*row_ids.shape, 264]`` uint8."""
        return self.records[layer][row_ids]


def _map_records(entry: StoreLayer) -> ByteArray:
    needed = entry.rows * RECORD_BYTES
    try:
        fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _fault(f"Engram store file {entry.path}", "a readable file", error.strerror) from None
    try:
        size = os.fstat(fd).st_size
        if size < needed:
            raise _fault(f"Engram store file {entry.path}: size", f"at least {needed} bytes", f"{size} (truncated)")
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise _fault(f"Engram store file {entry.path}", "a mappable file", error) from None
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8, count=needed).reshape(entry.rows, RECORD_BYTES)


def _check_canaries(entry: StoreLayer, records: ByteArray) -> None:
    for row, expected in entry.canaries:
        found = hashlib.sha256(records[row].tobytes()).hexdigest()
        if found != expected:
            raise _fault(
                f"Engram store file {entry.path}: canary row {row} of layer {entry.layer}",
                f"sha256 {expected[:16]}...",
                f"{found[:16]}... (changed bytes)",
            )


def _check_against_shard(entry: StoreLayer, records: ByteArray, pack: Path, rows: Iterable[int]) -> None:
    name = f"layers.{entry.layer}.engram.embed"
    weight = locate_tensor(pack, f"{name}.weight")
    scale = locate_tensor(pack, f"{name}.scale")
    if weight is None or scale is None:
        return
    total = records.shape[0]
    for located, row_bytes in ((weight, WEIGHT_BYTES), (scale, SCALE_BYTES)):
        if located.size != total * row_bytes:
            raise _fault(
                f"Engram shard {located.path}: {name}",
                f"{total} rows x {row_bytes} B as in the store",
                f"{located.size} bytes",
                "run: ds41ctl fetch --verify, then ds41ctl engram build",
            )
    with weight.path.open("rb") as weight_file, scale.path.open("rb") as scale_file:
        for row in rows:
            expected = os.pread(weight_file.fileno(), WEIGHT_BYTES, weight.offset + row * WEIGHT_BYTES)
            expected += os.pread(scale_file.fileno(), SCALE_BYTES, scale.offset + row * SCALE_BYTES)
            if records[row].tobytes() != expected:
                raise _fault(
                    f"Engram store file {entry.path}: row {row} of layer {entry.layer}",
                    f"the bytes of {weight.path.name}",
                    "other bytes (the store was built from another shard)",
                )


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
