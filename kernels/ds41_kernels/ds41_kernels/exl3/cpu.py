"""A layer of EXL3 experts on the CPU: the compiled kernel (``exl3_moe.cpp``), or numpy where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codebook import Codebook
from .experts import SWIGLU_LIMIT, Exl3Expert, layer_forward, random_expert
from .linear import Exl3Linear
from .tile import FormatError, Rate, positions, random_tiles

if TYPE_CHECKING:
    from .. import Pool

FloatArray = NDArray[np.float32]
CHECK_TOLERANCE = 2e-6
"""Largest relative RMS error of single precision in the self-check; measured: below 3e-7 with 5120 inputs."""


class _Linear(ctypes.Structure):
    _fields_ = (
        ("trellis", ctypes.c_void_p),
        ("suh", ctypes.c_void_p),
        ("svh", ctypes.c_void_p),
        ("halves", ctypes.c_int32),
        ("codebook", ctypes.c_int32),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class _Expert(ctypes.Structure):
    _fields_ = (("w1", _Linear), ("w3", _Linear), ("w2", _Linear))


def _described(layer: Exl3Linear) -> _Linear:
    if layer.bias is not None:
        raise FormatError("expert: expected no bias, found one")
    for array in (layer.trellis, layer.suh, layer.svh):
        if not array.flags.c_contiguous:
            raise FormatError("expert: expected contiguous tensors")
    return _Linear(
        layer.trellis.ctypes.data,
        layer.suh.ctypes.data,
        layer.svh.ctypes.data,
        layer.rate.halves,
        layer.codebook.value,
        layer.in_features,
        layer.out_features,
    )


class CpuExperts:
    """The experts of one layer.

    Args:
        library: from :func:`ds41_kernels.load`, or None for numpy (slow; weights are decoded at every call).
        experts: by number, of one shape; None for those of other ranks, which add nothing.
        limit: clamp of the SwiGLU, 0 for none.
        pool: threads that share the work; None computes on the caller.

    Raises:
        FormatError: no expert, or experts of different shapes.
    """

    def __init__(
        self,
        library: ctypes.CDLL | None,
        experts: Sequence[Exl3Expert | None],
        limit: float = SWIGLU_LIMIT,
        pool: Pool | None = None,
    ) -> None:
        shapes = {(e.w1.in_features, e.w1.out_features) for e in experts if e is not None}
        if len(shapes) != 1:
            raise FormatError(f"experts of a layer: expected one shape, found {sorted(shapes) or 'no expert'}")
        ((self.hidden, self.inner),) = shapes
        self.experts = tuple(experts)
        self.limit = limit
        self._library, self._pool = library, pool
        self._array = (_Expert * len(experts))(
            *(
                _Expert() if e is None else _Expert(_described(e.w1), _described(e.w3), _described(e.w2))
                for e in self.experts
            )
        )

    def __call__(self, x: FloatArray, chosen: NDArray[np.int64], weights: FloatArray) -> FloatArray:
        """``x [T, hidden]``, expert numbers ``[T, k]`` and their weights ``[T, k]`` -> ``[T, hidden]``.

        A row's bits depend on that row alone.

        Raises:
            IndexError: an expert number is out of range; nothing was computed.
        """
        x = np.ascontiguousarray(x, np.float32)
        chosen = np.ascontiguousarray(chosen, np.int64)
        weights = np.ascontiguousarray(weights, np.float32)
        if x.ndim != 2 or x.shape[1] != self.hidden or chosen.shape[:1] != x.shape[:1] or chosen.shape != weights.shape:
            raise ValueError(
                f"experts: expected x [T, {self.hidden}] and chosen and weights [T, k], found {x.shape}, "
                f"{chosen.shape} and {weights.shape}"
            )
        if self._library is None:
            bad = (chosen < 0) | (chosen >= len(self.experts))
            if bad.any():
                raise _out_of_range(int(chosen[bad][0]), len(self.experts))
            exact = layer_forward(self.experts, x, chosen, weights, self.limit or np.inf, rounded=False)
            return exact.astype(np.float32)
        out = np.empty_like(x)
        status = self._library.ds41_exl3_moe(
            None if self._pool is None else self._pool._pool,
            self._array,
            len(self.experts),
            x.ctypes.data,
            x.shape[0],
            self.hidden,
            self.inner,
            chosen.ctypes.data,
            weights.ctypes.data,
            chosen.shape[1],
            self.limit,
            out.ctypes.data,
        )
        if status >= 0:
            raise _out_of_range(int(chosen.reshape(-1)[status]), len(self.experts))
        if status == -2:
            raise MemoryError(f"experts: no memory for {x.shape[0]} tokens of {self.hidden}")
        return out


def _out_of_range(found: int, count: int) -> IndexError:
    return IndexError(f"expert number: expected 0 to {count - 1}, found {found}")


def loops(library: ctypes.CDLL, force: str | None = None) -> str:
    """Name of the loops in use: ``portable``, ``avx2`` or ``avx512``. All give the same bits.

    Args:
        library: from :func:`ds41_kernels.load`.
        force: use these from now on (tests and benchmarks).

    Raises:
        FormatError: this build or processor does not have them.
    """
    found: Any = library.ds41_exl3_loops(force.encode() if force else None)
    if found is None:
        raise FormatError(f"EXL3 loops {force!r} do not run on this machine")
    return str(found.decode())


def decode_tiles(library: ctypes.CDLL, tiles: NDArray[np.uint16], codebook: Codebook) -> FloatArray:
    """Packed tiles ``[n, words]`` -> values in stream order ``[n, 256]``, by the compiled loops."""
    tiles = np.ascontiguousarray(tiles)
    out = np.empty((len(tiles), 256), np.float32)
    halves = Rate.of_words(tiles.shape[-1]).halves
    library.ds41_exl3_decode(tiles.ctypes.data, len(tiles), halves, codebook.value, out.ctypes.data)
    return out


def self_check(library: ctypes.CDLL, kinds: Sequence[tuple[Rate, Codebook]]) -> None:
    """Compare the compiled kernel with the reference for every rate and codebook that a pack has.

    Raises:
        FormatError: it computes something else; one line.
    """
    from .tile import decode_tiles as reference

    rows, columns = positions()
    for rate, codebook in kinds:
        random = np.random.default_rng(rate.halves)
        tiles = random_tiles(random, (8,), rate)
        expected = reference(tiles, codebook)[:, rows, columns].astype(np.float32)
        if not np.array_equal(decode_tiles(library, tiles, codebook), expected):
            raise FormatError(f"EXL3 self-check: tiles of {rate.bits:g} bits, {codebook.name}, decode to other values")
        expert = random_expert(random, 256, 128, (rate, rate, rate), codebook)
        x = random.standard_normal((3, 256)).astype(np.float32)
        chosen, weights = np.zeros((3, 1), np.int64), np.ones((3, 1), np.float32)
        found = CpuExperts(library, [expert])(x, chosen, weights)
        exact = layer_forward([expert], x, chosen, weights, rounded=False)
        error = float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))
        if not error <= CHECK_TOLERANCE:
            raise FormatError(
                f"EXL3 self-check: an expert of {rate.bits:g} bits, {codebook.name}: expected a relative error of at "
                f"most {CHECK_TOLERANCE:g}, found {error:.3g}"
            )
