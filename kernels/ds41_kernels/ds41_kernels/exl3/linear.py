"""One EXL3 linear layer: its tensors, the matrix they stand for, and reference products in double precision.

``W = diag(suh) . H . T . H . diag(svh)`` of shape ``[in, out]``, ``y = x W``: ``T`` is what the trellis decodes to and
``H`` the orthogonal Sylvester-Hadamard matrix in blocks of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codebook import Codebook, HalfArray
from .tile import EDGE, FormatError, PackedTiles, Rate, decode_tiles, random_tiles

HADAMARD = 128
PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
"""Names of a layer's tensors after ``<key>.``; su and sv are the sign bits of old files."""
_TILE_ROWS_AT_ONCE = 32

DoubleArray = NDArray[np.float64]


def hadamard(values: NDArray[Any], axis: int = -1) -> DoubleArray:
    """Multiply an axis by ``H``: Hadamard in blocks of 128, divided by sqrt(128). Its own inverse.

    Raises:
        FormatError: the axis is no multiple of 128.
    """
    moved = np.moveaxis(np.asarray(values, np.float64), axis, -1)
    if moved.shape[-1] % HADAMARD:
        raise FormatError(f"Hadamard: expected a multiple of {HADAMARD}, found {moved.shape[-1]}")
    out = moved.reshape(-1, HADAMARD)
    span = 1
    while span < HADAMARD:
        pairs = out.reshape(-1, HADAMARD // (2 * span), 2, span)
        out = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).reshape(-1, HADAMARD)
        span *= 2
    return np.moveaxis((out / np.sqrt(HADAMARD)).reshape(moved.shape), -1, axis)


@dataclass(frozen=True, eq=False)
class Exl3Linear:
    """The tensors of one layer.

    Attributes:
        trellis: packed tiles ``[in / 16, out / 16, words]`` uint16.
        suh: sign and scale of each input, half ``[in]``.
        svh: sign and scale of each output, half ``[out]``.
        codebook: how a state decodes.
        bias: half ``[out]``, or None.
    """

    trellis: PackedTiles
    suh: HalfArray
    svh: HalfArray
    codebook: Codebook
    bias: HalfArray | None = None

    @property
    def rate(self) -> Rate:
        """Bits a weight, by the trellis' shape; what a config says about it is never asked."""
        return Rate.of_words(self.trellis.shape[-1])

    @property
    def in_features(self) -> int:
        """Inputs."""
        return int(self.trellis.shape[0]) * EDGE

    @property
    def out_features(self) -> int:
        """Outputs."""
        return int(self.trellis.shape[1]) * EDGE

    @classmethod
    def from_tensors(cls, key: str, tensors: Mapping[str, NDArray[Any]]) -> Exl3Linear:
        """The layer ``key`` from tensors named ``<key>.trellis``, ``<key>.suh``, ...

        Raises:
            FormatError: a tensor is missing, has another type or a shape that does not fit; one line with its name.
        """
        found = {part: np.asarray(tensors[f"{key}.{part}"]) for part in PARTS if f"{key}.{part}" in tensors}
        trellis = found.get("trellis")
        if trellis is None:
            raise FormatError(f"{key}: expected a trellis, found {', '.join(found) or 'no tensor'}")
        if trellis.ndim != 3 or trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
            raise FormatError(
                f"{key}.trellis: expected int16 [in/16, out/16, words], found {trellis.dtype} {trellis.shape}"
            )
        try:
            rate = Rate.of_words(trellis.shape[-1])
        except FormatError as error:
            raise FormatError(f"{key}.trellis: {error}") from None
        inputs, outputs = trellis.shape[0] * EDGE, trellis.shape[1] * EDGE
        for extent, what in ((inputs, "inputs"), (outputs, "outputs")):
            if not extent or extent % HADAMARD:
                raise FormatError(f"{key}.trellis: expected {what} in multiples of {HADAMARD}, found {extent}")
        if "mcg" in found and "mul1" in found:
            raise FormatError(f"{key}: expected one codebook marker, found mcg and mul1")
        codebook = Codebook.MUL1 if "mul1" in found else Codebook.MCG if "mcg" in found else Codebook.THREE_INST
        if not rate.whole and codebook is not Codebook.MUL1:
            raise FormatError(f"{key}.trellis: {rate.bits:g} bits a weight exist with the mul1 codebook only")
        return cls(
            np.ascontiguousarray(trellis).view(np.uint16),
            _scales(key, "suh", "su", inputs, found),
            _scales(key, "svh", "sv", outputs, found),
            codebook,
            _half_vector(key, "bias", outputs, found["bias"]) if "bias" in found else None,
        )

    def tensors(self, key: str) -> dict[str, NDArray[Any]]:
        """The reverse of :meth:`from_tensors`."""
        out: dict[str, NDArray[Any]] = {
            f"{key}.trellis": self.trellis.view(np.int16),
            f"{key}.suh": self.suh,
            f"{key}.svh": self.svh,
        }
        if self.codebook.marker:
            out[f"{key}.{self.codebook.marker}"] = np.array(self.codebook.marker_value, np.int32)
        if self.bias is not None:
            out[f"{key}.bias"] = self.bias
        return out

    def decoded(self) -> HalfArray:
        """``T``: every tile decoded, half ``[in, out]``."""
        rows, columns, _ = self.trellis.shape
        out = np.empty((rows * EDGE, columns * EDGE), np.float16)
        for begin in range(0, rows, _TILE_ROWS_AT_ONCE):
            tiles = decode_tiles(self.trellis[begin : begin + _TILE_ROWS_AT_ONCE], self.codebook)
            out[begin * EDGE : (begin + tiles.shape[0]) * EDGE] = tiles.transpose(0, 2, 1, 3).reshape(
                -1, columns * EDGE
            )
        return out

    def reconstruct(self) -> DoubleArray:
        """``W`` as the format defines it, without any rounding after the codebook: double ``[in, out]``."""
        inner = hadamard(hadamard(self.decoded(), 0), 1)
        return self.suh.astype(np.float64)[:, None] * inner * self.svh.astype(np.float64)[None]

    def rotate(self, x: NDArray[Any]) -> HalfArray:
        """Activations as the kernels multiply them: ``x * suh`` in half, ``H`` in float, rounded to half."""
        scaled = np.asarray(x, np.float16) * self.suh
        return hadamard(scaled).astype(np.float32).astype(np.float16)

    def product(self, x: NDArray[Any]) -> DoubleArray:
        """``x W`` (+ bias) for ``x [..., in]`` in double, with no rounding of the activations."""
        return self._finish(hadamard(np.asarray(x, np.float64) * self.suh.astype(np.float64)))

    def kernel_product(self, x: NDArray[Any]) -> DoubleArray:
        """``x W`` (+ bias) with the rounding points of the GPU kernels (see :meth:`rotate`), summed in double."""
        return self._finish(self.rotate(x).astype(np.float64))

    def _finish(self, rotated: DoubleArray) -> DoubleArray:
        out = hadamard(rotated @ self.decoded().astype(np.float64)) * self.svh.astype(np.float64)
        return out if self.bias is None else out + self.bias.astype(np.float64)

    def slice_outputs(self, begin: int, end: int) -> Exl3Linear:
        """The layer of outputs ``[begin, end)``, in whole Hadamard blocks. Raises FormatError."""
        _whole_blocks(begin, end, self.out_features)
        tiles = np.ascontiguousarray(self.trellis[:, begin // EDGE : end // EDGE])
        bias = None if self.bias is None else self.bias[begin:end]
        return replace(self, trellis=tiles, svh=self.svh[begin:end], bias=bias)

    def slice_inputs(self, begin: int, end: int) -> Exl3Linear:
        """The layer of inputs ``[begin, end)``, in whole Hadamard blocks, without bias. Raises FormatError."""
        _whole_blocks(begin, end, self.in_features)
        return replace(self, trellis=self.trellis[begin // EDGE : end // EDGE], suh=self.suh[begin:end], bias=None)


def _whole_blocks(begin: int, end: int, extent: int) -> None:
    if begin % HADAMARD or end % HADAMARD or not 0 <= begin < end <= extent:
        raise FormatError(
            f"slice: expected multiples of {HADAMARD} within 0..{extent}, found {begin}..{end}: a cut Hadamard block "
            "decodes against the wrong transform"
        )


def _scales(key: str, part: str, old: str, extent: int, found: Mapping[str, NDArray[Any]]) -> HalfArray:
    if part in found:
        return _half_vector(key, part, extent, found[part])
    if old not in found:
        raise FormatError(f"{key}: expected {part}, found {', '.join(found)}")
    bits = found[old]
    if bits.shape != (extent // 16,) or bits.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
        raise FormatError(f"{key}.{old}: expected int16 [{extent // 16}], found {bits.dtype} {bits.shape}")
    negative = np.unpackbits(np.ascontiguousarray(bits).astype("<u2").view(np.uint8), bitorder="little")
    return np.where(negative, np.float16(-1), np.float16(1)).astype(np.float16)


def _half_vector(key: str, part: str, extent: int, values: NDArray[Any]) -> HalfArray:
    if values.shape != (extent,) or values.dtype != np.float16:
        raise FormatError(f"{key}.{part}: expected float16 [{extent}], found {values.dtype} {values.shape}")
    if not np.isfinite(values).all():
        raise FormatError(f"{key}.{part}: expected finite values, found NaN or infinity; the tensor is damaged")
    return np.ascontiguousarray(values)


def random_linear(
    random: np.random.Generator, in_features: int, out_features: int, rate: Rate, codebook: Codebook = Codebook.MUL1
) -> Exl3Linear:
    """A layer of random valid tiles, for tests: weights of about ``1 / sqrt(in)``, so that outputs keep the scale."""

    def scales(extent: int, size: float) -> HalfArray:
        sign = random.choice(np.array((-1.0, 1.0)), extent)
        return (sign * size * random.uniform(0.8, 1.2, extent)).astype(np.float16)

    spread = float(in_features) ** -0.5 / (1.0 if codebook is Codebook.MUL1 else 1.24)
    return Exl3Linear(
        random_tiles(random, (in_features // EDGE, out_features // EDGE), rate),
        scales(in_features, 1.0),
        scales(out_features, spread),
        codebook,
    )
