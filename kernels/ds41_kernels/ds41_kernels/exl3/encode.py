"""From a weight matrix to an EXL3 layer: Hadamard rotation, trellis search per tile, error feedback along the inputs.

The trellis search is compiled (``exl3_encode.cpp``); everything else is numpy. Whole rates only.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codebook import Codebook, HalfArray, table
from .linear import HADAMARD, DoubleArray, Exl3Linear, hadamard
from .tile import EDGE, WEIGHTS, FormatError, PackedTiles, Rate, decode_tiles, pack_states, positions

DAMPING = 0.01
"""Share of the mean diagonal that is added to a Hessian, so that inputs the calibration never saw keep some weight."""

SPREAD = 0.9
"""Standard deviation of the rotated weights in those of the codebook. Measured on experts of the tiny pack with 2, 3
and 5 bits: 0.9 leaves the least error of 0.7, 0.8, 0.9, 1.0 and 1.1 (1.0: 6 to 30 % more)."""


def encode_tiles(
    library: ctypes.CDLL, wanted: NDArray[Any], rate: Rate, codebook: Codebook, threads: int = 1
) -> PackedTiles:
    """The nearest path of the trellis for each tile.

    Args:
        library: from :func:`ds41_kernels.load`.
        wanted: ``[..., 16, 16]`` values in the codebook's scale.
        rate: whole bits a weight.
        codebook: how states decode.
        threads: how many tiles are searched at once.

    Returns:
        Packed tiles ``[..., words]``.
    """
    if not rate.whole:
        raise FormatError(f"encoding: expected whole bits a weight, found {rate.bits:g}")
    if wanted.shape[-2:] != (EDGE, EDGE):
        raise FormatError(f"encoding: expected tiles [..., 16, 16], found {wanted.shape}")
    rows, columns = positions()
    flat = np.ascontiguousarray(wanted[..., rows, columns], np.float32).reshape(-1, WEIGHTS)
    if not np.isfinite(flat).all():
        raise FormatError("encoding: expected finite weights, found NaN or infinity")
    values = np.ascontiguousarray(table(codebook), np.float32)
    states = np.empty(flat.shape, np.uint16)

    def work(part: slice) -> int:
        here, out = flat[part], states[part]
        return int(
            library.ds41_exl3_encode(values.ctypes.data, here.ctypes.data, len(here), int(rate.bits), out.ctypes.data)
        )

    share = -(-len(flat) // max(threads, 1)) or 1
    parts = [slice(begin, min(begin + share, len(flat))) for begin in range(0, len(flat), share)]
    with ThreadPoolExecutor(max_workers=max(threads, 1)) as pool:
        if any(pool.map(work, parts)):
            raise MemoryError("the trellis search needs about 16 MB a thread")
    return pack_states(states, rate).reshape(*wanted.shape[:-2], rate.words)


def quantise(
    library: ctypes.CDLL,
    weight: DoubleArray,
    rate: Rate,
    random: np.random.Generator,
    hessian: DoubleArray | None = None,
    codebook: Codebook = Codebook.MUL1,
    threads: int = 1,
) -> Exl3Linear:
    """Quantise ``weight [in, out]``.

    Input and output signs are random, outputs are scaled to one size. With a Hessian, rows are encoded 16 at a time and
    the rows to come make good what the encoded ones got wrong; at the end every output's scale is fitted.

    Args:
        library: from :func:`ds41_kernels.load`.
        weight: the matrix; a column of zeros stays exactly zero.
        rate: whole bits a weight.
        random: where the signs come from.
        hessian: ``x^T x`` of calibration inputs ``[in, in]``; None weighs all inputs alike.
        codebook: how states decode.
        threads: how many tiles are searched at once.
    """
    inputs, outputs = weight.shape
    if inputs % HADAMARD or outputs % HADAMARD:
        raise FormatError(f"quantising: expected multiples of {HADAMARD}, found {inputs} x {outputs}")
    metric = np.eye(inputs) if hessian is None else np.asarray(hessian, np.float64)
    metric = metric + DAMPING * max(float(np.trace(metric)) / inputs, 1e-30) * np.eye(inputs)
    suh = random.choice(np.array((-1.0, 1.0)), inputs)
    signs = random.choice(np.array((-1.0, 1.0)), outputs)
    size = np.sqrt(np.square(weight).mean(0))
    empty = size == 0
    svh = signs * np.where(empty, 1.0, size)
    rotated = hadamard(hadamard(weight / suh[:, None] / svh[None], 0), 1)
    spread = float(np.sqrt(np.square(rotated).mean())) or 1.0
    turned = _rotated(metric, suh)
    counts = np.where(empty, DAMPING * np.square(size[~empty]).mean(), np.square(size)) if not empty.all() else empty
    weights = _rotated(np.diag(counts), np.ones(outputs)) if empty.any() and not empty.all() else None
    factor = spread / (SPREAD * float(np.asarray(table(codebook), np.float64).std()))
    tiles = _encode_rows(library, rotated / factor, (turned, weights), rate, codebook, threads)
    layer = Exl3Linear(tiles, suh.astype(np.float16), _half(svh * factor, empty), codebook)
    return _fitted(layer, weight, metric, empty)


def _rotated(metric: DoubleArray, signs: DoubleArray) -> DoubleArray:
    return hadamard(hadamard(signs[:, None] * metric * signs[None], 0), 1)


def weighted_error(layer: Exl3Linear, weight: DoubleArray, metric: DoubleArray) -> float:
    """``tr(E^T M E)`` of the error ``E`` of a layer, in parts of ``tr(W^T M W)``."""
    error = layer.reconstruct() - weight
    return float((error * (metric @ error)).sum() / max(float((weight * (metric @ weight)).sum()), 1e-300))


def _encode_rows(
    library: ctypes.CDLL,
    wanted: DoubleArray,
    metrics: tuple[DoubleArray, DoubleArray | None],
    rate: Rate,
    codebook: Codebook,
    threads: int,
) -> PackedTiles:
    """Tiles of ``wanted [in, out]``: rows 16 at a time, in them columns 16 at a time when outputs have a metric.

    The error counts as ``tr(E^T inputs E outputs)``: what a tile gets wrong is made good, as far as the metrics let it,
    by the tiles to its right, and what a row of tiles gets wrong by the rows below.
    """
    inputs, outputs = metrics
    rows, columns = wanted.shape
    wanted = wanted.copy()
    tiles = np.empty((rows // EDGE, columns // EDGE, rate.words), np.uint16)
    width = columns if outputs is None else EDGE
    for top in range(0, rows, EDGE):
        bottom = top + EDGE
        error = np.empty((EDGE, columns))
        strip = wanted[top:bottom].copy()
        for left in range(0, columns, width):
            right = left + width
            blocks = strip[:, left:right].reshape(EDGE, width // EDGE, EDGE).transpose(1, 0, 2)
            packed = encode_tiles(library, blocks, rate, codebook, threads)
            tiles[top // EDGE, left // EDGE : right // EDGE] = packed
            found = decode_tiles(packed, codebook).astype(np.float64).transpose(1, 0, 2).reshape(EDGE, width)
            error[:, left:right] = found - wanted[top:bottom, left:right]
            if outputs is not None and right < columns:
                step = np.linalg.solve(outputs[right:, right:], outputs[right:, left:right])
                strip[:, right:] -= (found - strip[:, left:right]) @ step.T
        if bottom < rows:
            wanted[bottom:] -= np.linalg.solve(inputs[bottom:, bottom:], inputs[bottom:, top:bottom]) @ error
    return tiles


def _fitted(layer: Exl3Linear, weight: DoubleArray, metric: DoubleArray, empty: NDArray[np.bool_]) -> Exl3Linear:
    found = layer.reconstruct()
    weighted = metric @ found
    size = np.maximum((found * weighted).sum(0), 1e-300)
    factor = (weight * weighted).sum(0) / size
    svh = _half(layer.svh.astype(np.float64) * factor, empty)
    return Exl3Linear(layer.trellis, layer.suh, svh, layer.codebook)


def _half(values: DoubleArray, empty: NDArray[np.bool_]) -> HalfArray:
    return np.where(empty, 0.0, values).astype(np.float16)
