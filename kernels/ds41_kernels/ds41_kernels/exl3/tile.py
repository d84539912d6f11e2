"""Tiles: 256 weights of a 16x16 block as one tail-biting bit stream.

Position ``p`` of the stream is a weight; its state is the 16 stream bits that end with the weight's own bits, so
neighbours share bits and the first weights' states reach back to the stream's end. The stream lies most significant bit
first in little-endian 32-bit words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codebook import Codebook, HalfArray, StateArray, decode

EDGE = 16
WEIGHTS = EDGE * EDGE
STATE_BITS = 16
HALF_RATES = (3, 5, 7)  # 1.5, 2.5 and 3.5 bits a weight, in halves of a bit
LARGEST_RATE = 16  # 8 bits a weight

IndexArray = NDArray[np.int64]
PackedTiles = NDArray[np.uint16]


class FormatError(ValueError):
    """Not an EXL3 tensor. The text is one line."""


@dataclass(frozen=True, order=True)
class Rate:
    """Bits a weight, in halves of a bit: ``Rate(6)`` is K = 3, ``Rate(5)`` is K = 2.5.

    A half rate gives even positions ``K - 0.5`` bits and odd positions ``K + 0.5``.
    """

    halves: int

    def __post_init__(self) -> None:
        whole = self.halves % 2 == 0 and 2 <= self.halves <= LARGEST_RATE
        if not whole and self.halves not in HALF_RATES:
            raise FormatError(f"bits a weight: expected 1 to 8 or 1.5, 2.5, 3.5, found {self.halves / 2:g}")

    @classmethod
    def of(cls, bits: float) -> Rate:
        """Rate of ``bits`` bits a weight. Raises FormatError for a rate that does not exist."""
        if bits * 2 != int(bits * 2):
            raise FormatError(f"bits a weight: expected 1 to 8 or 1.5, 2.5, 3.5, found {bits:g}")
        return cls(int(bits * 2))

    @classmethod
    def of_words(cls, words: int) -> Rate:
        """Rate of a tile of so many 16-bit words (the last extent of a trellis). Raises FormatError."""
        if words <= 0 or words % 8:
            raise FormatError(f"expected 16 words a tile and bit a weight, found {words} words")
        return cls(words // 8)

    @property
    def bits(self) -> float:
        """K."""
        return self.halves / 2

    @property
    def whole(self) -> bool:
        """True unless it is a half rate."""
        return self.halves % 2 == 0

    @property
    def words(self) -> int:
        """16-bit words of a tile."""
        return 8 * self.halves

    @property
    def stream_bits(self) -> int:
        """Bits of a tile."""
        return 128 * self.halves

    def own_bits(self) -> IndexArray:
        """Bits that each of the 256 positions adds to the stream."""
        return self.halves // 2 + (np.arange(WEIGHTS) % 2) * (self.halves % 2)


@functools.cache
def _positions() -> tuple[IndexArray, IndexArray]:
    position = np.arange(WEIGHTS)
    lane, item = position // 8, position % 8
    rows = lane % 4 * 2 + (item & 1) + ((item >> 1) & 1) * 8
    columns = lane // 4 + (item >> 2) * 8
    for array in (rows, columns):
        array.setflags(write=False)
    return rows, columns


def positions() -> tuple[IndexArray, IndexArray]:
    """Row (input) and column (output) inside the tile of each stream position.

    Position ``8 * lane + item`` is what lane ``lane`` of a warp holds in the B fragment of mma.m16n8k16.
    """
    return _positions()


def _words32(tiles: NDArray[Any]) -> NDArray[np.uint32]:
    if tiles.dtype not in (np.dtype(np.uint16), np.dtype(np.int16)):
        raise FormatError(f"trellis: expected int16, found {tiles.dtype}")
    return np.ascontiguousarray(tiles).view("<u4").astype(np.uint32, copy=False)


def tile_states(tiles: NDArray[Any]) -> StateArray:
    """Packed tiles ``[..., words]`` int16 or uint16 -> states ``[..., 256]``; the rate is the last extent's."""
    rate = Rate.of_words(tiles.shape[-1])
    words = _words32(tiles)
    first = (np.cumsum(rate.own_bits()) - STATE_BITS) % rate.stream_bits
    word, shift = first // 32, (48 - first % 32).astype(np.uint64)
    high = words[..., word].astype(np.uint64) << np.uint64(32)
    pair = high | words[..., (word + 1) % words.shape[-1]]
    return (pair >> shift).astype(np.uint16)


def decode_tiles(tiles: NDArray[Any], codebook: Codebook) -> HalfArray:
    """Packed tiles ``[..., words]`` -> weights ``[..., 16, 16]`` (input, output), half precision."""
    rows, columns = positions()
    out = np.empty((*tiles.shape[:-1], EDGE, EDGE), np.float16)
    out[..., rows, columns] = decode(tile_states(tiles), codebook)
    return out


def pack_states(states: StateArray, rate: Rate) -> PackedTiles:
    """States ``[..., 256]`` along a path of the trellis -> packed tiles ``[..., words]``.

    Raises:
        FormatError: the states are no tail-biting path: neighbours do not share their bits.
    """
    if states.shape[-1:] != (WEIGHTS,):
        raise FormatError(f"states: expected 256 a tile, found {states.shape}")
    own = rate.own_bits()
    ends = np.cumsum(own)
    bits = np.zeros((*states.shape[:-1], rate.stream_bits), np.uint8)
    for position in range(WEIGHTS):
        for number in range(int(own[position])):
            bits[..., ends[position] - 1 - number] = (states[..., position] >> number) & 1
    stream = np.packbits(bits, axis=-1)
    tiles = stream.view(">u4").astype("<u4").view("<u2").astype(np.uint16, copy=False)
    if not np.array_equal(tile_states(tiles), states):
        raise FormatError("states: expected a tail-biting path of the trellis, found neighbours that share no bits")
    return tiles


def random_tiles(random: np.random.Generator, extents: Sequence[int], rate: Rate) -> PackedTiles:
    """Valid tiles ``[*extents, words]``, for tests: every bit stream is a path of the trellis."""
    return random.integers(0, 1 << 16, (*extents, rate.words), dtype=np.uint16)
