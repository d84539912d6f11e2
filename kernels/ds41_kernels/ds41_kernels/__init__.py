"""Engram rows, fast: gathered from mapped tables by pinned threads, or read from disk. C++17 behind ctypes.

The same library computes EXL3 experts; :mod:`ds41_kernels.exl3` is that format's home.

Importing the package loads nothing. :func:`load` gives the library or says in one line why there is none; callers fall
back to numpy then. A record is one table row of 264 bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compile import LIBRARY

RECORD_BYTES = 264
ABI = 2

ByteArray = NDArray[np.uint8]
Int64Array = NDArray[np.int64]


class Unavailable(Exception):
    """The library cannot be used. The text is one line."""


class _Part(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("calls", "rows", "bytes", "nanoseconds"))


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library with its functions declared.

    Args:
        path: the shared object; None takes the one beside this file.

    Raises:
        Unavailable: not compiled, not loadable here, or of another version.
    """
    path = path or Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        raise Unavailable("ds41_kernels was installed without a C++ compiler")
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.ds41_abi())
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from None
    if found != ABI:
        raise Unavailable(f"{path.name}: expected ABI {ABI}, found {found}")
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
        ("ds41_loops", ctypes.c_char_p, (ctypes.c_char_p,)),
        ("ds41_pool_new", pointer, (i32, pointer, pointer)),
        ("ds41_pool_free", None, (pointer,)),
        ("ds41_pool_counters", None, (pointer, pointer)),
        ("ds41_gather", i64, (pointer, pointer, i64, pointer, i64, pointer)),
        ("ds41_scatter", None, (pointer, pointer, i64, i64)),
        ("ds41_compare", i64, (pointer, pointer, i64, i64)),
        ("ds41_disk_new", pointer, (i32, pointer, pointer, pointer, i32)),
        ("ds41_disk_free", None, (pointer,)),
        ("ds41_disk_uses_ring", ctypes.c_int, (pointer,)),
        ("ds41_disk_gather", i64, (pointer, pointer, pointer, i64, pointer)),
        ("ds41_mxfp4_linear", i32, (pointer, pointer, i64, i64, i64, i64, pointer, i64, pointer)),
        ("ds41_exl3_encode", i32, (pointer, pointer, i64, i32, pointer)),
        ("ds41_exl3_loops", ctypes.c_char_p, (ctypes.c_char_p,)),
        ("ds41_exl3_decode", None, (pointer, i64, i32, i32, pointer)),
        (
            "ds41_exl3_moe",
            i64,
            (pointer, pointer, i64, pointer, i64, i64, i64, pointer, pointer, i64, ctypes.c_float, pointer),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@dataclass(frozen=True)
class Counters:
    """What a pool has done so far. ``nanoseconds`` is the callers' wall time."""

    calls: int
    rows: int
    bytes: int
    nanoseconds: int

    @property
    def gb_per_s(self) -> float:
        """Record bytes a second in 10^9, 0 before the first call."""
        return self.bytes / self.nanoseconds if self.nanoseconds else 0.0


@dataclass(frozen=True)
class Part:
    """One mapped piece of a table: rows ``first_row ..`` are ``records [rows, 264]``; ``group`` is its NUMA node."""

    records: ByteArray
    first_row: int = 0
    group: int = 0


class Table:
    """The parts of one layer's table, kept alive as long as it is used."""

    def __init__(self, parts: Sequence[Part]) -> None:
        for part in parts:
            shape = part.records.shape
            if len(shape) != 2 or shape[1] != RECORD_BYTES or not part.records.flags.c_contiguous:
                raise ValueError(f"a part: expected contiguous [rows, {RECORD_BYTES}] bytes, found {shape}")
        self.parts = tuple(parts)
        self.rows = sum(part.records.shape[0] for part in parts)
        self._array = (_Part * len(parts))(
            *(_Part(p.records.ctypes.data, p.first_row, p.records.shape[0], p.group, 0) for p in parts)
        )


class Pool:
    """Gathers rows with the calling thread and ``len(cpus) - 1`` threads of its own.

    Args:
        library: from :func:`load`.
        cpus: one entry a worker: the CPU it is pinned to, or None. The first worker is the caller, never pinned.
        groups: NUMA node of each worker; with more than one node every worker reads only parts of its own node.
    """

    def __init__(
        self, library: ctypes.CDLL, cpus: Sequence[int | None] = (None,), groups: Sequence[int] | None = None
    ) -> None:
        count = len(cpus)
        groups = [0] * count if groups is None else groups
        if not count or len(groups) != count:
            raise ValueError(f"a pool: expected a CPU and a group for each worker, found {count} and {len(groups)}")
        numbers = ctypes.c_int32 * count
        self._library = library
        self._pool: int | None = library.ds41_pool_new(
            count, numbers(*groups), numbers(*(-1 if cpu is None else cpu for cpu in cpus))
        )
        if not self._pool:
            raise Unavailable(f"{count} gather threads cannot be started")
        self.threads = count

    def close(self) -> None:
        """End the threads."""
        pool, self._pool = self._pool, None
        if pool:
            self._library.ds41_pool_free(pool)

    def __del__(self) -> None:
        self.close()

    def counters(self) -> Counters:
        """What this pool has done so far."""
        found = _Counters()
        self._library.ds41_pool_counters(self._pool, ctypes.byref(found))
        return Counters(found.calls, found.rows, found.bytes, found.nanoseconds)

    def gather(self, table: Table, row_ids: Int64Array, out: ByteArray | None = None) -> ByteArray:
        """Copy records.

        Args:
            table: where the rows are.
            row_ids: ``[...]`` int64.
            out: ``[..., 264]`` uint8, contiguous; made when None.

        Raises:
            IndexError: an id lies in no part of the table; nothing was read.
        """
        ids, out = _prepared(row_ids, out)
        status = self._library.ds41_gather(
            self._pool, table._array, len(table.parts), ids.ctypes.data, ids.size, out.ctypes.data
        )
        if status >= 0:
            raise IndexError(f"Engram row id: expected one of {table.rows} rows, found {ids.reshape(-1)[status]}")
        if status == -2:
            raise ValueError("a part lies on a NUMA node for which the pool has no worker")
        return out


class DiskTable:
    """One layer's record files, read by io_uring with O_DIRECT where possible, else by a pool's threads.

    Args:
        library: from :func:`load`.
        files: (path, first row, rows) of every part.
        pool: threads for the buffered way, and counters for both.
        ring: False never uses io_uring.
    """

    def __init__(
        self, library: ctypes.CDLL, files: Sequence[tuple[Path, int, int]], pool: Pool, *, ring: bool = True
    ) -> None:
        paths = (ctypes.c_char_p * len(files))(*(os.fsencode(path) for path, _, _ in files))
        firsts = (ctypes.c_int64 * len(files))(*(first for _, first, _ in files))
        counts = (ctypes.c_int64 * len(files))(*(rows for _, _, rows in files))
        self._library, self._pool_owner = library, pool
        self.rows = sum(rows for _, _, rows in files)
        self._disk: int | None = library.ds41_disk_new(len(files), paths, firsts, counts, int(ring))
        if not self._disk:
            raise Unavailable(f"an Engram record file cannot be opened: {files[0][0].parent}")
        self.uses_ring = bool(library.ds41_disk_uses_ring(self._disk))

    def close(self) -> None:
        """Close the files."""
        disk, self._disk = self._disk, None
        if disk:
            self._library.ds41_disk_free(disk)

    def __del__(self) -> None:
        self.close()

    def gather(self, row_ids: Int64Array, out: ByteArray | None = None) -> ByteArray:
        """As :meth:`Pool.gather`. Raises OSError when the disk fails."""
        ids, out = _prepared(row_ids, out)
        status = self._library.ds41_disk_gather(
            self._disk, self._pool_owner._pool, ids.ctypes.data, ids.size, out.ctypes.data
        )
        if status >= 0:
            raise IndexError(f"Engram row id: expected one of {self.rows} rows, found {ids.reshape(-1)[status]}")
        if status < -1:
            number = -2 - int(status)
            raise OSError(number, f"reading Engram rows: {os.strerror(number)}")
        return out


def _prepared(row_ids: Int64Array, out: ByteArray | None) -> tuple[Int64Array, ByteArray]:
    ids: Int64Array = np.ascontiguousarray(row_ids, dtype=np.int64)
    wanted = (*ids.shape, RECORD_BYTES)
    if out is None:
        return ids, np.empty(wanted, dtype=np.uint8)
    if out.shape != wanted or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous uint8 {wanted}, found {out.dtype} {out.shape}")
    return ids, out


def loops(library: ctypes.CDLL, force: str | None = None) -> str:
    """Name of the gather loops in use: ``portable``, ``avx2`` or ``avx512``.

    Args:
        library: from :func:`load`.
        force: use these from now on (tests and benchmarks).

    Raises:
        Unavailable: this build or processor does not have them.
    """
    found: Any = library.ds41_loops(force.encode() if force else None)
    if found is None:
        raise Unavailable(f"gather loops {force!r} do not run on this machine")
    return str(found.decode())
