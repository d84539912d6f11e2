"""Kernels loaded and launched through the CUDA driver. Standard library only; nothing here synchronises or allocates.

A launch goes to the stream it is given and can be captured into a graph. The caller's context is used: whoever works
with torch has one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ATTRIBUTES = {"shared_bytes": 1, "local_bytes": 3, "registers": 4, "ptx_version": 5, "binary_version": 6}
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76


class DriverError(Exception):
    """The driver refused a call. The text is one line."""


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded: {error}") from None
    _call(library, "cuInit", 0)
    return library


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode() or 'error'} ({status})")


def compute_capability(device: int = 0) -> tuple[int, int]:
    """(major, minor) of a card. Raises DriverError."""
    library = _driver()
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(handle), device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_MAJOR, handle)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_MINOR, handle)
    return major.value, minor.value


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, name: str) -> None:
        self._library, self._handle, self.name = library, handle, name

    def attributes(self) -> dict[str, int]:
        """What the card will run.

        ``ptx_version`` is the virtual architecture the code was written for and ``binary_version`` the one it was
        compiled to, both as 10 * major + minor: 70 and 90 for compute_70 PTX finished by the driver on an H200.
        """
        found = {}
        for name, number in _ATTRIBUTES.items():
            value = ctypes.c_int()
            _call(self._library, "cuFuncGetAttribute", ctypes.byref(value), number, self._handle)
            found[name] = value.value
        return found

    def launch(self, grid: Sequence[int], threads: int, stream: int, arguments: Sequence[Any]) -> None:
        """Start the kernel.

        Args:
            grid: CTAs in x, y and z.
            threads: threads of a CTA.
            stream: handle of a stream, 0 for the default one.
            arguments: ctypes values or structures, in the order and of the types the kernel declares.
        """
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in arguments)
        )
        x, y, z = grid
        _call(
            self._library,
            "cuLaunchKernel",
            self._handle,
            *(ctypes.c_uint(n) for n in (x, y, z, threads, 1, 1, 0)),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )


class Module:
    """A loaded image: a cubin of the card's architecture, or PTX that the driver compiles for it."""

    def __init__(self, image: Path) -> None:
        self._library = _driver()
        self._handle = ctypes.c_void_p()
        self.image = image
        try:
            content = image.read_bytes()
        except OSError as error:
            raise DriverError(f"{image}: {error.strerror}") from None
        _call(self._library, "cuModuleLoadData", ctypes.byref(self._handle), content + b"\0")
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """The kernel ``name``. Raises DriverError when the image has none."""
        if name not in self._kernels:
            handle = ctypes.c_void_p()
            try:
                _call(self._library, "cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
            except DriverError as error:
                raise DriverError(f"{self.image.name} has no kernel {name}: {error}") from None
            self._kernels[name] = Kernel(self._library, handle, name)
        return self._kernels[name]
