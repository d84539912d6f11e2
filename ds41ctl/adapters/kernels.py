"""The builder's inner loops from ds41_kernels, compiled once into the cache; in plain Python without a compiler."""

from __future__ import annotations

import ctypes
import importlib.resources
import importlib.util
import mmap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ds41ctl.core.engram import RECORD_BYTES
from ds41ctl.core.errors import UnsupportedError

ROWS_AT_ONCE = 16384  # 4.1 MiB of records: stays in the last-level cache while the plain loops place each column


def source() -> Path:
    """Source folder of the ds41_kernels distribution: beside engine_patches in a checkout, inside it in a wheel."""
    patches = Path(str(importlib.resources.files("engine_patches")))
    for candidate in (patches / "ds41_kernels", patches.parent / "kernels" / "ds41_kernels"):
        if (candidate / "pyproject.toml").is_file():
            return candidate
    raise UnsupportedError("this installation lacks the sources of ds41_kernels", hints=("install ds41ctl again",))


@cache
def compiler_module() -> ModuleType:
    """ds41_kernels/compile.py, loaded by path: the package itself belongs to the engine's venv."""
    path = source() / "ds41_kernels" / "compile.py"
    spec = importlib.util.spec_from_file_location("ds41_kernels_compile", path)
    if spec is None or spec.loader is None:
        raise UnsupportedError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loops:
    """Placing and comparing rows in records. `note` says why the fast loops are not used, '' when they are."""

    def __init__(self, library: Any, note: str) -> None:
        self._library = library
        self.note = note

    def scatter(self, records: mmap.mmap, at: int, source: memoryview, width: int) -> None:
        """Place consecutive rows of `width` bytes at `at`, `at + 264`, ... of a writable mapping."""
        rows = len(source) // width
        if not rows:
            return
        if at + (rows - 1) * RECORD_BYTES + width > len(records):
            raise ValueError("rows beyond the end of their record file")
        if self._library is not None:
            self._library.ds41_scatter(_address(records, at), _address(source, 0), rows, width)
            return
        for begin in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - begin)
            piece = bytes(source[begin * width : (begin + count) * width])
            start = at + begin * RECORD_BYTES
            stop = start + (count - 1) * RECORD_BYTES + width
            for column in range(width):
                records[start + column : stop : RECORD_BYTES] = piece[column::width]

    def differs(self, records: mmap.mmap, at: int, source: memoryview, width: int) -> int:
        """The first row whose bytes at `at`, `at + 264`, ... are not the source's; -1 when all are equal."""
        rows = len(source) // width
        if not rows:
            return -1
        if at + (rows - 1) * RECORD_BYTES + width > len(records):
            return 0
        if self._library is not None:
            return int(self._library.ds41_compare(_address(records, at), _address(source, 0), rows, width))
        for row in range(rows):
            start = at + row * RECORD_BYTES
            if records[start : start + width] != source[row * width : (row + 1) * width]:
                return row
        return -1


def _address(buffer: Any, at: int) -> ctypes.c_void_p:
    # a reference to the first byte; the caller keeps the buffer alive for the length of the call
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + at)


def compiled(cache_dir: Path, *, store_only: bool = False) -> tuple[Path, str]:
    """The library of these very sources in `cache_dir`, compiled when it is not there; and why not, '' when it is.

    `store_only` leaves out what only an engine or the oracle needs.
    """
    module = compiler_module()
    sources = module.STORE_SOURCES if store_only else module.SOURCES
    path = cache_dir / "kernels" / f"{module.source_digest(sources)[:16]}-{module.LIBRARY}"
    if path.is_file():
        return path, ""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, str(module.compile_library(path, sources))


def loops(cache_dir: Path) -> Loops:
    """The compiled loops, from `cache_dir` when these very sources were compiled before."""
    path, problem = compiled(cache_dir, store_only=True)
    if problem:
        return Loops(None, problem)
    try:
        library = ctypes.CDLL(str(path))
        for name in ("ds41_scatter", "ds41_compare"):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
            function.restype = ctypes.c_int64 if name == "ds41_compare" else None
    except (OSError, AttributeError) as error:
        return Loops(None, f"{path.name} cannot be loaded: {error}")
    return Loops(library, "")
